"""Experts that are read from files when they are chosen: equal bits, bounded memory, counters, damaged files."""

import copy
import gc
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections import OrderedDict

import pytest
import torch
from folders import IDS, MOE, experts_of, load, logits, parameters, random_model, rank, read, write
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from k3lib import Batch, KimiK3Config, KimiK3ForCausalLM, checkpoint
from k3lib.batch import RouteTap
from k3lib.config import SiTU, tiny_hf_config
from k3lib.errors import BackendUnavailable, CheckpointError, ConfigError
from k3lib.export import stored_layout
from k3lib.ops import experts, explain, observe, register
from k3lib.ops.moe import ExpertsSpec, needs_resident
from k3lib.parallel import LOCAL, ep_experts

FORMS = ["bf16", "mxfp4", "nvfp4"]
LONG = [(7 * i) % 512 for i in range(40)]
E = 8  # experts of a layer, of which a token chooses 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One small model in every format, wide enough for four ranks; read only."""
    folder = tmp_path_factory.mktemp("offload")
    model = random_model(moe_intermediate_size=128, num_experts=E)
    for form in FORMS:
        model.save_pretrained(folder / form, experts=form)
    return folder


def stores_of(model):
    return [module.packed for module in experts_of(model)]


def choices(model, ids):
    """Which experts each layer chooses, from the resident model."""
    tap = RouteTap(torch.zeros(len(ids), 3, 4, dtype=torch.int32), replay=False)
    batch = Batch.pack([ids])
    batch.routes = tap
    with torch.inference_mode():
        model(batch)
    return [sorted(set(tap.ids[:, layer].flatten().tolist())) for layer in range(3)]


@pytest.mark.parametrize("limit", [1, 2, E, 99])
@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_l3_expert_offload_gives_identical_logits(folders, form, dtype, limit):
    resident = load(folders / form, dtype=dtype)
    model = load(folders / form, dtype=dtype, resident_experts=limit)
    for ids in (IDS, LONG, [5], LONG[:16], LONG[:17]):  # few routes and many take other paths
        assert logits(model, ids).equal(logits(resident, ids))
    for store in stores_of(model):
        assert len(store.held) <= limit


@pytest.mark.parametrize("name", ["tiny_k3_dev", "tiny_k3_dev_mxfp4", "tiny_k3_wide_nvfp4"])
@pytest.mark.filterwarnings("ignore:.*padding behind the heads")
def test_l3_expert_offload_of_the_golden_models(golden, name):
    resident, model = load(golden / name), load(golden / name, resident_experts=2)
    tokens = {id(resident): list(IDS), id(model): list(IDS)}
    for each in (resident, model):
        for _ in range(5):
            tokens[id(each)].append(int(logits(each, tokens[id(each)])[-1].argmax()))
    assert tokens[id(model)] == tokens[id(resident)]
    assert logits(model, tokens[id(model)]).equal(logits(resident, tokens[id(model)]))


@pytest.mark.parametrize("ids", [[5], IDS, LONG], ids=len)
@pytest.mark.parametrize("form", FORMS)
def test_l3_only_routed_experts_are_touched_and_counted(folders, form, ids):
    wanted = choices(load(folders / form), ids)
    stored = checkpoint.Folder(folders / form).tensors()
    model = load(folders / form, resident_experts=E)
    zeros = {"hits": 0, "misses": 0, "bytes_read": 0, "resident": 0, "limit": E}
    assert model.expert_stats() == dict.fromkeys((1, 2, 3), zeros)
    logits(model, ids)
    logits(model, ids)
    for (layer, stats), chosen, store in zip(model.expert_stats().items(), wanted, stores_of(model), strict=True):
        assert sorted(store.held) == chosen
        size = sum(
            info.nbytes
            for e in chosen
            for name, info in stored.items()
            if f"layers.{layer}.block_sparse_moe.experts.{e}." in name and not name.endswith("input_scale")
        )
        want = {"hits": len(chosen), "misses": len(chosen), "bytes_read": size, "resident": len(chosen), "limit": E}
        assert stats == want


def test_a_resident_model_has_no_counters(folders):
    assert load(folders / "bf16").expert_stats() == {}


@pytest.mark.parametrize("limit", [0, -1, True, 2.0, "2"], ids=repr)
def test_fewer_than_one_resident_expert_is_refused(tmp_path, limit):
    with pytest.raises(ConfigError, match=r"resident_experts=.* must be an integer >= 1, or None"):
        load(tmp_path / "absent", resident_experts=limit)


# ---- the store ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_every_expert_decodes_to_the_resident_one(folders, form, size, dtype):
    for index in range(size):
        mesh = rank(index, size)
        resident, model = load(folders / form, mesh=mesh), load(folders / form, mesh=mesh, resident_experts=2)
        for module, store in zip(experts_of(resident), stores_of(model), strict=True):
            want = module.weights
            facts = ("num_experts", "width", "intermediate", "format", "first_expert", "dtype")
            assert [getattr(store, name) for name in facts] == [getattr(want, name) for name in facts]
            for which in (3, torch.tensor([6, 0, 6]), torch.tensor([1])):
                for a, b in zip(want.decode(which, dtype), store.decode(which, dtype), strict=True):
                    assert a.dtype == b.dtype == dtype
                    assert a.equal(b)


@given(uses=st.lists(st.integers(0, E - 1), max_size=30), limit=st.integers(1, E + 1))
def test_the_least_recently_used_leaves(folders, uses, limit):
    store = stores_of(load(folders / "mxfp4", layers=range(2), resident_experts=limit))[0]
    expected, hits = OrderedDict(), 0
    for e in uses:
        hits += e in expected
        expected.pop(e, None)
        expected[e] = None
        if len(expected) > limit:
            expected.popitem(last=False)
        store.decode(e, torch.float32)
        assert store.held == tuple(expected)
    stats = store.stats()
    assert (stats["hits"], stats["misses"], stats["resident"]) == (hits, len(uses) - hits, len(expected))


def test_held_experts_are_stored_bytes(folders):
    """Packed, and plain ones in the stored dtype, whatever the model computes in."""
    for form, dtype in (("mxfp4", torch.uint8), ("nvfp4", torch.uint8), ("bf16", torch.bfloat16)):
        store = stores_of(load(folders / form, dtype=torch.float32, resident_experts=1))[0]
        store.decode(2, torch.float32)
        assert store.expert(2).w13.dtype == store.dtype == dtype


def test_mixed_plain_dtypes_are_kept_exactly(folders, tmp_path):
    config, tensors = read(folders / "bf16")
    for name in tensors:
        if ".experts.3.w1" in name:
            tensors[name] = tensors[name].float() + 2**-20
    folder = write(tmp_path / "mixed", config, tensors)
    for dtype in (torch.float32, None):
        assert logits(load(folder, dtype=dtype, resident_experts=2), LONG).equal(
            logits(load(folder, dtype=dtype), LONG)
        )


def test_experts_follow_the_model_to_its_device(folders):
    model = load(folders / "mxfp4", resident_experts=2)
    store = stores_of(model)[0]
    store.decode(1, torch.float32)
    model.to("meta")
    assert store.device.type == "meta"
    assert {store.decode(e, torch.float32)[0].device.type for e in (1, 2)} == {"meta"}
    assert store.hits == 1


def test_casting_a_model_casts_no_expert(folders):
    resident, model = load(folders / "mxfp4"), load(folders / "mxfp4", resident_experts=2)
    assert logits(model.float(), LONG).equal(logits(resident.float(), LONG))


def test_experts_on_disk_are_no_parameters(folders):
    resident, model = load(folders / "bf16"), load(folders / "bf16", resident_experts=2)
    assert parameters(model).keys() == parameters(resident).keys() == dict(model.named_parameters()).keys()
    assert not [name for name in model.state_dict() if ".experts." in name]


def test_a_copied_model_reads_the_same_files(folders):
    model = load(folders / "nvfp4", resident_experts=2)
    want = logits(model)
    other = copy.deepcopy(model)
    logits(other, LONG)
    assert logits(other).equal(want)


def test_experts_read_without_gradients_serve_a_call_that_records_them(folders):
    resident, model = load(folders / "bf16", dtype=torch.float32), None
    model = load(folders / "bf16", dtype=torch.float32, resident_experts=E)
    logits(model)
    grads = []
    for each in (resident, model):
        embeds = each.model.embed_tokens(torch.tensor(IDS)).detach().requires_grad_()
        each(Batch.pack([IDS]), inputs_embeds=embeds).square().sum().backward()
        grads.append(embeds.grad)
    assert grads[0].equal(grads[1])


def test_a_slice_reads_its_own_layers(folders):
    model = load(folders / "mxfp4", layers=range(2), resident_experts=2)
    assert logits(model).equal(logits(load(folders / "mxfp4", layers=range(2))))
    assert list(model.expert_stats()) == [1]


# ---- implementations ----------------------------------------------------------------------------


@pytest.fixture
def stacked():
    """An implementation of `experts` that reads the stacks, before all others."""

    @register(experts, name="stacked", platforms={"cpu"}, priority=99, supports=needs_resident)
    def run(x, ids, weights, prepared, *, act_fn):
        assert prepared.w13.ndim == 3
        return experts.reference(x, ids, weights, prepared, act_fn=act_fn)

    yield
    experts.remove("stacked")


@pytest.mark.usefixtures("stacked")
def test_implementations_that_need_all_experts_decline(folders):
    used = {}
    for limit in (None, 2):
        model, seen = load(folders / "mxfp4", resident_experts=limit), set()
        with observe(lambda op, spec, impl, seen=seen: seen.add((impl, spec.offloaded)) if op == "experts" else None):
            logits(model)
        used[limit] = seen
    assert used == {None: {("stacked", False)}, 2: {("cpu", True)}}
    spec = ExpertsSpec.from_config(KimiK3Config.tiny(), offloaded=True)
    reasons = dict(explain(experts, spec).rejected)
    assert reasons["stacked"] == "needs all experts resident, got experts that are read when they are chosen"


@pytest.mark.usefixtures("stacked")
def test_forcing_one_is_refused_before_anything_is_loaded(folders, monkeypatch):
    monkeypatch.setattr(checkpoint, "load", lambda *_args, **_kwargs: pytest.fail("loaded"))
    with pytest.raises(BackendUnavailable, match="needs all experts resident"):
        load(folders / "mxfp4", resident_experts=2, backends={"experts": "stacked"})


def test_experts_over_ranks_take_a_store(folders):
    resident, store = experts_of(load(folders / "nvfp4"))[0].weights, None
    store = stores_of(load(folders / "nvfp4", resident_experts=2))[0]
    x, ids = torch.randn(9, store.width), torch.randint(E, (9, 4), dtype=torch.int32)
    call = {"act_fn": SiTU(beta=4.0, linear_beta=25.0), "group": LOCAL}
    weights = torch.rand(9, 4)
    assert ep_experts(x, ids, weights, store, **call).equal(ep_experts(x, ids, weights, resident, **call))


# ---- files --------------------------------------------------------------------------------------


@pytest.fixture
def private(folders, tmp_path):
    """A copy of the MXFP4 folder that a test may damage."""
    shutil.copytree(folders / "mxfp4", tmp_path / "private")
    return tmp_path / "private" / "model.safetensors"


def open_files(folder):
    links = pathlib.Path("/proc/self/fd")
    if not links.is_dir():
        pytest.skip("needs /proc to see open files")
    return [link for link in links.iterdir() if link.is_symlink() and str(folder) in os.path.realpath(link)]


def test_files_are_opened_when_needed_and_closed_with_the_model(private):
    model = load(private.parent, resident_experts=2)
    assert not open_files(private)
    logits(model)
    assert len(open_files(private)) == 1
    del model
    gc.collect()
    assert not open_files(private)


def read_error(model, ids=LONG):
    with pytest.raises(CheckpointError) as caught:
        logits(model, ids)
    return str(caught.value)


def test_a_truncated_file_is_named_and_the_model_stays_usable(private):
    model = load(private.parent, resident_experts=2)
    want, facts = logits(model, LONG), private.stat()
    whole = private.read_bytes()
    os.truncate(private, len(whole) // 2)
    message = read_error(model)
    assert f"cannot be read from {private}" in message
    assert "experts." in message
    assert "has changed since the model was loaded" in message
    private.write_bytes(whole)
    os.utime(private, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert logits(model, LONG).equal(want)
    assert all(len(store.held) <= 2 for store in stores_of(model))


def test_a_file_that_ends_while_it_is_read_is_named(private, monkeypatch):
    model = load(private.parent, resident_experts=2)
    monkeypatch.setattr("k3lib.stored._size_and_time", lambda _stat: None)
    monkeypatch.setattr(stores_of(model)[0].files, "_facts", dict.fromkeys([private]))
    os.truncate(private, 1000)
    assert f"{private} ends in it" in read_error(model)


def test_a_changed_file_is_refused_and_held_experts_serve(private):
    model = load(private.parent, resident_experts=E)
    want = logits(model, LONG)
    with private.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x07")
    os.utime(private, ns=(1, 1))
    assert logits(model, LONG).equal(want)
    assert "has changed" in read_error(load_then_touch(private))


def load_then_touch(file):
    model = load(file.parent, resident_experts=1)
    os.utime(file, ns=(2, 2))
    return model


def test_a_replaced_file_goes_on_as_it_was_if_it_is_open(private):
    opened, not_yet = load(private.parent, resident_experts=1), load(private.parent, resident_experts=1)
    want = logits(opened, LONG)
    newer = private.with_suffix(".new")
    shutil.copy(private, newer)
    os.utime(newer, ns=(5, 5))
    os.replace(newer, private)
    assert logits(opened, LONG).equal(want)
    assert "has changed" in read_error(not_yet)


def test_a_removed_file_is_named(private):
    model = load(private.parent, resident_experts=1)
    private.unlink()
    assert f"{private} cannot be read (No such file or directory)" in read_error(model)


@pytest.mark.parametrize("byte", [254, 255])
def test_bad_scales_are_found_when_the_expert_is_read(private, byte):
    config, tensors = read(private.parent)
    base = f"{MOE}.experts.5.w3"
    tensors[f"{base}.weight_scale"][7, 1] = byte
    tensors[f"{base}.weight_packed"][7, 16:32] = 0x77
    model = load(write(private.parent, config, tensors), resident_experts=2)
    store = stores_of(model)[0]
    with pytest.raises(CheckpointError, match=rf"expert 5 cannot be read from .*{private.name}: .*5\.w3\.weight_scale"):
        store.decode(5, torch.float32)
    assert store.held == ()
    assert store.decode(4, torch.float32)[0].isfinite().all()


def test_wrong_folders_are_refused_as_for_a_resident_model(private):
    config, tensors = read(private.parent)
    del tensors[f"{MOE}.experts.5.w3.weight_scale"]
    with pytest.raises(CheckpointError, match=r"missing: .*experts\.5\.w3\.weight_scale"):
        load(write(private.parent, config, tensors), resident_experts=2)


def test_a_header_that_contradicts_itself_is_refused(private):
    """Sizes are taken from shapes when an expert is read."""
    blob = private.read_bytes()
    length = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + length])
    header[f"{MOE}.experts.5.w3.weight_packed"]["data_offsets"][1] -= 1
    text = json.dumps(header).encode()
    private.write_bytes(len(text).to_bytes(8, "little") + text + blob[8 + length :])
    with pytest.raises(
        CheckpointError, match=r"experts\.5\.w3\.weight_packed: 4095 bytes, its shape and dtype need 4096"
    ):
        load(private.parent, resident_experts=2)


# ---- saving -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [None, *FORMS])
@pytest.mark.parametrize("held", FORMS)
def test_saving_passes_experts_through(folders, tmp_path, held, form):
    for name, limit in (("resident", None), ("disk", 1)):
        model = load(folders / held, resident_experts=limit)
        model.save_pretrained(tmp_path / name, experts=form, max_file_bytes=400_000)
        assert all(len(store.held) == 0 for store in stores_of(model) if limit)
    a, b = ({x.name: x.read_bytes() for x in (tmp_path / name).iterdir()} for name in ("resident", "disk"))
    assert a == b


def test_saving_over_the_files_in_use_is_refused(private):
    model = load(private.parent, resident_experts=1)
    before = private.read_bytes()
    with pytest.raises(ConfigError, match="experts of this model are read from there while it runs; save to another"):
        model.save_pretrained(private.parent / "." / "")
    assert private.read_bytes() == before
    assert logits(model).isfinite().all()


# ---- memory -------------------------------------------------------------------------------------

MEGABYTES = 200
CHILD = """
import json, pathlib, re, sys
import torch
from k3lib import Batch, KimiK3ForCausalLM
from k3lib.batch import RouteTap

torch.set_num_threads(1)
status = pathlib.Path("/proc/self/status")
kilobytes = lambda key: int(re.search(rf"{key}:\\s+(\\d+)", status.read_text())[1])
warm = torch.randn(64, 512) @ torch.randn(512, 64)
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts over
before = kilobytes("VmRSS")
limit = None if sys.argv[2] == "all" else int(sys.argv[2])
model = KimiK3ForCausalLM.from_pretrained(sys.argv[1], resident_experts=limit, progress=False)
count = model.config.text.moe.num_experts
ids = torch.arange(96 * 3 * 4, dtype=torch.int32).view(96, 3, 4) % count  # every expert of every layer
for tokens in (1, 16, 96):
    batch = Batch.pack([list(range(tokens))])
    batch.routes = RouteTap(ids[:tokens], replay=True)
    with torch.inference_mode():
        logits = model(batch)
grown = (kilobytes("VmHWM") - before) * 1024
read = sum(stats["bytes_read"] for stats in model.expert_stats().values())
print(json.dumps({"grown": grown, "read": read, "sum": float(logits.double().sum())}))
"""


def write_large(folder):
    """A checkpoint of `MEGABYTES` of MXFP4 experts; returns their bytes."""
    width = inner = 512
    count = MEGABYTES * 10**6 // (3 * 3 * width * inner * 17 // 32)
    hf = tiny_hf_config(
        num_hidden_layers=4, routed_expert_hidden_size=width, moe_intermediate_size=inner, num_experts=count
    )
    hf["vision_config"] = None
    with torch.device("meta"):
        model = KimiK3ForCausalLM(KimiK3Config.from_hf(hf), dtype=torch.bfloat16)
    kinds = {"BF16": torch.bfloat16, "F32": torch.float32}
    codes = torch.randint(256, (inner, width // 2), dtype=torch.uint8)
    scale = torch.randint(112, 120, (inner, width // 32), dtype=torch.uint8)
    tensors, size = {}, 0
    for name, (dtype, shape) in stored_layout(model, "mxfp4").items():
        if dtype == "U8":
            tensors[name] = (scale if name.endswith("scale") else codes).roll(len(tensors), 0)
            size += tensors[name].nbytes
        else:
            tensors[name] = (0.05 * torch.randn(shape)).to(kinds[dtype])
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf))
    return size


def run_child(folder, limit):
    command = [sys.executable, "-c", CHILD, str(folder), str(limit)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.again
@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux to measure the peak")
def test_memory_does_not_grow_with_the_experts_on_disk(tmp_path):
    size = write_large(tmp_path)
    assert size > 0.98e6 * MEGABYTES
    few, everything = run_child(tmp_path, 2), run_child(tmp_path, "all")
    print(f"{size / 1e6:.0f} MB of experts; with two resident {few}; with all {everything}")
    assert few["sum"] == everything["sum"]
    assert few["read"] >= size
    assert few["grown"] < 0.6 * size < size < everything["grown"]
