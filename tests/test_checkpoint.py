"""Loading and saving weights: formats, names, strictness, shards."""

import json
import re
import shutil
import warnings
from collections import Counter

import pytest
import torch
from folders import LAYERS, MOE, decays_of, experts_of, load, logits, parameters, random_model, rank, read, write
from safetensors import safe_open

from k3lib import KimiK3Config, checkpoint, export
from k3lib.errors import CheckpointError, ConfigError
from k3lib.layers.linear import placement
from k3lib.ops import quant
from k3lib.testing import assert_close

# the golden checkpoints have a padding of A_log that is not zero, on purpose
pytestmark = pytest.mark.filterwarnings("ignore:.*padding behind the heads")

VISION = ("vision_tower.", "mm_projector.")
WIDE = ("A_log", "dt_bias", "o_norm.weight", "conv1d.weight", "e_score_correction_bias")
MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = torch.cat([MAGNITUDES, -MAGNITUDES])


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small checkpoint of plain weights, with vision tensors; read only."""
    folder = tmp_path_factory.mktemp("small")
    model = random_model()
    layout = export.vision_layout(model.config.vision)
    vision = {name: torch.full(shape, 0.5, dtype=torch.bfloat16) for name, shape in layout.items()}
    model.save_pretrained(folder, extra=vision)
    return folder


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """The same small model, wide enough for eight ranks, with its experts in every format; read only."""
    folder = tmp_path_factory.mktemp("cut")
    heads = {"num_heads": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16}
    model = random_model(moe_intermediate_size=256, num_experts=4, **heads)
    for form in ("bf16", "mxfp4", "nvfp4"):
        model.save_pretrained(folder / form, experts=form)
    return folder


class Reads:
    """Counts the bytes of every tensor that is read, and the files opened."""

    def __init__(self):
        self.bytes = Counter()
        self.opened = 0

    def open(self, file, framework):
        self.opened += 1
        return _Handle(safe_open(file, framework=framework), self.bytes)


class _Handle:
    def __init__(self, handle, count):
        self.handle, self.count = handle, count

    def get_tensor(self, name):
        tensor = self.handle.get_tensor(name)
        self.count[name] += tensor.nbytes
        return tensor

    def get_slice(self, name):
        return _Slice(self.handle.get_slice(name), name, self.count)


class _Slice:
    def __init__(self, part, name, count):
        self.part, self.name, self.count = part, name, count

    def __getitem__(self, where):
        tensor = self.part[where]
        self.count[self.name] += tensor.nbytes
        return tensor


@pytest.fixture
def reads(monkeypatch):
    made = Reads()
    monkeypatch.setattr(checkpoint, "safe_open", made.open)
    return made


# ---- formats ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "form"), [("tiny_k3_dev_mxfp4", "mxfp4"), ("tiny_k3_wide_nvfp4", "nvfp4")])
def test_packed_experts_stay_packed(golden, name, form):
    for module in experts_of(load(golden / name, dtype=torch.float32)):
        weights = module.weights
        assert weights.format == form
        assert weights.w13.dtype == weights.w2.dtype == torch.uint8
        assert weights.w13_scale.dtype == (torch.uint8 if form == "mxfp4" else torch.float8_e4m3fn)
        assert not list(module.parameters())


def decode_fp4(weight, scale, group):
    """The plain decoder: low nibble first, one scale for `group` inputs."""
    codes = torch.stack([weight & 15, weight >> 4], -1).flatten(-2).long()
    return E2M1[codes] * scale.repeat_interleave(group, -1)


@pytest.mark.parametrize(("name", "form"), [("tiny_k3_dev_mxfp4", "mxfp4"), ("tiny_k3_wide_nvfp4", "nvfp4")])
def test_packed_experts_compute_what_the_decoded_do(golden, tmp_path, name, form):
    config, tensors = read(golden / name)
    plain = {}
    for key, x in tensors.items():
        base, _, suffix = key.rpartition(".")
        if form == "mxfp4" and suffix == "weight_packed":
            plain[f"{base}.weight"] = decode_fp4(x, 2.0 ** (tensors[f"{base}.weight_scale"].float() - 127), 32)
        elif form == "nvfp4" and x.dtype == torch.uint8:
            scale = tensors[f"{base}.weight_scale"].float() * tensors[f"{base}.weight_scale_2"]
            plain[key] = decode_fp4(x, scale, 16)
        elif not suffix.startswith(("weight_", "input_scale")):
            plain[key] = x
    decoded = load(write(tmp_path / "plain", config, plain), dtype=torch.float32)
    packed = load(golden / name, dtype=torch.float32)
    for left, right in zip(experts_of(packed), experts_of(decoded), strict=True):
        for e in range(left.config.num_experts):
            for a, b in zip(left.weights.decode(e, torch.float32), right.weights.decode(e, torch.float32), strict=True):
                torch.testing.assert_close(a, b, rtol=2e-7, atol=0)
    if form == "mxfp4":
        assert logits(packed).equal(logits(decoded))
    else:
        torch.testing.assert_close(logits(packed), logits(decoded), rtol=0, atol=2e-5)


def test_stored_dtypes_are_kept(golden):
    for name, x in load(golden / "tiny_k3_dev").named_parameters():
        assert x.dtype == (torch.float32 if name.endswith(WIDE) else torch.bfloat16), name
        assert not x.requires_grad


def test_float32_upcasts_everything(golden):
    stored, wide = load(golden / "tiny_k3_dev"), load(golden / "tiny_k3_dev", dtype=torch.float32)
    for (name, x), (_, y) in zip(stored.named_parameters(), wide.named_parameters(), strict=True):
        assert y.dtype == torch.float32, name
        assert y.equal(x.float()), name


def test_moving_a_model_moves_packed_experts_and_casts_nothing_in_them(golden):
    model = load(golden / "tiny_k3_wide_nvfp4")
    before = [module.weights.w13.clone() for module in experts_of(model)]
    model.to(torch.float32)
    for module, x in zip(experts_of(model), before, strict=True):
        assert module.weights.w13.equal(x)
        assert module.weights.w13_scale.dtype == torch.float8_e4m3fn


# ---- names --------------------------------------------------------------------------------------


def strip_root(name):
    return name.removeprefix("language_model.")


def short_root(name):
    return name.replace("language_model.model.layers.", "language_model.layers.")


def old_spelling(name):
    return re.sub(r"(attention_res|mlp_res|attn_res)_(proj|norm)\.weight$", r"\1.\2_weight", name)


def old_spelling_without_root(name):
    return strip_root(old_spelling(name))


@pytest.mark.parametrize("rename", [str, strip_root, short_root, old_spelling, old_spelling_without_root])
@pytest.mark.parametrize("has_vision", [True, False])
def test_name_roots(golden, tmp_path, rename, has_vision):
    config, tensors = read(golden / "tiny_k3_wide_mxfp4")
    named = {rename(k): x for k, x in tensors.items() if has_vision or not k.startswith(VISION)}
    assert (rename is str) == (named.keys() <= tensors.keys())
    model = load(write(tmp_path / "renamed", config, named))
    assert logits(model).equal(logits(load(golden / "tiny_k3_wide_mxfp4")))


def test_flat_configuration(golden, tmp_path):
    config, tensors = read(golden / "tiny_k3_wide_nvfp4")
    flat = {**{k: v for k, v in config.items() if k not in {"text_config", "vision_config"}}, **config["text_config"]}
    named = {strip_root(k): x for k, x in tensors.items() if not k.startswith(VISION)}
    model = load(write(tmp_path / "flat", flat, named))
    assert model.config.vision is None
    assert logits(model).equal(logits(load(golden / "tiny_k3_wide_nvfp4")))


def test_layers_beyond_the_configuration_are_skipped(golden, tmp_path, reads):
    config, tensors = read(golden / "tiny_k3_dev")
    config["text_config"]["num_hidden_layers"] = 4
    folder = write(tmp_path / "short", config, tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*padding behind the heads")
        model = load(folder, dtype=torch.float32)
    assert max(int(n.split(".layers.")[1].split(".")[0]) for n in reads.bytes if ".layers." in n) == 3
    assert logits(model).equal(logits(load(golden / "tiny_k3_dev", dtype=torch.float32, layers=range(4))))


# ---- strictness ---------------------------------------------------------------------------------


def _missing(tensors):
    del tensors["language_model.model.norm.weight"]


def _unexpected(tensors):
    tensors[f"{LAYERS}.0.self_attn.q_proj.bias"] = torch.zeros(128)


def _unknown_top(tensors):
    tensors["language_model.model.rotary.inv_freq"] = torch.zeros(4)


def _unknown_root(tensors):
    tensors["transformer.wte.weight"] = torch.zeros(4)


def _misshaped(tensors):
    tensors[f"{LAYERS}.2.self_attn.q_proj.weight"] = torch.zeros(64, 96)


def _transposed(tensors):
    tensors[f"{LAYERS}.0.mlp.gate_proj.weight"] = torch.zeros(96, 160)


def _integers(tensors):
    tensors["language_model.model.embed_tokens.weight"] = torch.zeros(512, 96, dtype=torch.int32)


def _twice(tensors):
    tensors["model.norm.weight"] = tensors["language_model.model.norm.weight"].clone()


def _missing_expert(tensors):
    del tensors[f"{MOE}.experts.15.w3.weight"]


def _extra_expert(tensors):
    tensors[f"{MOE}.experts.16.w1.weight"] = torch.zeros(64, 64)


def _mixed_formats(tensors):
    packed, scale = quant.mxfp4_encode(tensors.pop(f"{MOE}.experts.3.w1.weight"))
    tensors[f"{MOE}.experts.3.w1.weight_packed"] = packed
    tensors[f"{MOE}.experts.3.w1.weight_scale"] = scale


def _fp8_experts(tensors):
    for e in range(16):
        for w in ("w1", "w2", "w3"):
            codes, scale = quant.fp8_block_encode(tensors[f"{MOE}.experts.{e}.{w}.weight"])
            tensors[f"{MOE}.experts.{e}.{w}.weight"] = codes
            tensors[f"{MOE}.experts.{e}.{w}.weight_scale"] = scale


def _all_renamed(tensors):
    for name in list(tensors):
        tensors[f"backbone.{name}"] = tensors.pop(name)


BROKEN = [
    (_missing, [r"1 tensors missing, 0 unexpected, 0 of a wrong", r"missing: model\.norm\.weight"]),
    (_unexpected, [r"0 tensors missing, 1 unexpected", rf"unexpected: {LAYERS}\.0\.self_attn\.q_proj\.bias"]),
    (_unknown_top, [r"unexpected: language_model\.model\.rotary\.inv_freq"]),
    (_unknown_root, [r"unexpected: transformer\.wte\.weight"]),
    (
        _misshaped,
        [r"1 of a wrong shape", r"layers\.2\.self_attn\.q_proj\.weight: shape \[64, 96\], expected \[128, 96\]"],
    ),
    (_transposed, [r"mlp\.gate_proj\.weight: shape \[96, 160\], expected \[160, 96\]"]),
    (_integers, [r"embed_tokens\.weight: dtype I32, expected BF16 or F16 or F32 or F64"]),
    (_twice, [r"model\.norm\.weight: the same weight as (language_model\.)?model\.norm\.weight"]),
    (_missing_expert, [r"missing: model\.layers\.1\.block_sparse_moe\.experts\.15\.w3\.weight"]),
    (_extra_expert, [rf"unexpected: {MOE}\.experts\.16\.w1\.weight"]),
    (_mixed_formats, [r"missing: .*experts\.3\.w1\.weight", r"unexpected: .*experts\.3\.w1\.weight_packed"]),
    (_fp8_experts, [r"FP8 experts are not implemented"]),
    (
        _all_renamed,
        [r"[1-9]\d* unexpected", r"… and \d+ more", r"missing: model\.embed_tokens\.weight"],
    ),
]


@pytest.mark.parametrize(("damage", "patterns"), BROKEN, ids=lambda x: getattr(x, "__name__", ""))
def test_wrong_tensors_are_named_and_nothing_is_read(small, tmp_path, reads, damage, patterns):
    config, tensors = read(small)
    damage(tensors)
    folder = write(tmp_path / "broken", config, tensors)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    for pattern in [re.escape(str(folder)), *patterns]:
        assert re.search(pattern, str(caught.value)), f"{pattern} not in {caught.value}"
    assert reads.opened == 0


def test_at_most_ten_problems_are_listed(small, tmp_path, reads):
    config, tensors = read(small)
    lost = [name for name in tensors if ".experts.7." in name or ".experts.8." in name]
    folder = write(tmp_path / "broken", config, {k: x for k, x in tensors.items() if k not in lost})
    with pytest.raises(CheckpointError, match=f"{len(lost)} tensors missing, 0 unexpected") as caught:
        load(folder)
    assert len(lost) == 18
    assert str(caught.value).count("missing: ") == 10
    assert "… and 8 more" in str(caught.value)
    assert reads.opened == 0


def _truncate(file):
    file.write_bytes(file.read_bytes()[:-1])


def _cut_header(file):
    file.write_bytes(file.read_bytes()[:100])


def _empty(file):
    file.write_bytes(b"")


def _header_no_json(file):
    file.write_bytes((20).to_bytes(8, "little") + b"not json at all.....")


def _header_list(file):
    file.write_bytes((2).to_bytes(8, "little") + b"[]")


def _header_entry(entry):
    def damage(file):
        header = json.dumps({"x": entry}).encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 64)

    return damage


def _pickle(file):
    torch.save({"x": torch.zeros(3)}, file)


def _remove(file):
    file.unlink()


@pytest.mark.parametrize(
    ("damage", "pattern"),
    [
        (_truncate, r"cut off: \d+ bytes, its header promises \d+"),
        (_cut_header, r"not a safetensors file, or cut inside its header"),
        (_empty, r"not a safetensors file"),
        (_header_no_json, r"its header is damaged"),
        (_header_list, r"its header is damaged"),
        (_header_entry(3), r"its header is damaged"),
        (_header_entry({"dtype": "F32", "shape": [2]}), r"its header is damaged"),
        (_header_entry({"dtype": "F32", "shape": [2], "data_offsets": [0]}), r"its header is damaged"),
        (_pickle, r"not a safetensors file"),
        (_remove, r"there is neither model\.safetensors\.index\.json nor model\.safetensors"),
    ],
    ids=[
        "truncated",
        "cut-header",
        "empty",
        "no-json",
        "list",
        "entry",
        "no-offsets",
        "one-offset",
        "pickle",
        "removed",
    ],
)
def test_damaged_file(small, tmp_path, reads, damage, pattern):
    folder = tmp_path / "broken"
    shutil.copytree(small, folder)
    damage(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=pattern) as caught:
        load(folder)
    assert str(folder) in str(caught.value)
    assert reads.opened == 0


@pytest.fixture
def sharded(small, tmp_path):
    load(small).save_pretrained(tmp_path / "sharded", max_file_bytes=200_000)
    return tmp_path / "sharded"


def edit_index(folder, change):
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))


def test_index_names_a_missing_tensor(sharded, reads):
    name = next(sharded.glob("model-00001-of-*")).name
    edit_index(sharded, lambda index: index["weight_map"].update({"language_model.model.x": name}))
    with pytest.raises(
        CheckpointError, match=rf"names 1 tensors that their files lack:\n  language_model.model.x \(in {name}"
    ):
        load(sharded)
    assert reads.opened == 0


def test_index_names_a_missing_file(sharded, reads):
    gone = next(sharded.glob("model-00002-of-*"))
    gone.unlink()
    with pytest.raises(CheckpointError, match=rf"{gone.name}: cannot be read"):
        load(sharded)
    assert reads.opened == 0


@pytest.mark.parametrize("value", [None, 3, {"a": 3}], ids=str)
def test_index_without_a_map(sharded, reads, value):
    edit_index(sharded, lambda index: index.update(weight_map=value))
    with pytest.raises(CheckpointError, match="weight_map"):
        load(sharded)
    assert reads.opened == 0


def test_shard_cut_off(sharded, reads):
    _truncate(next(sharded.glob("model-00003-of-*")))
    with pytest.raises(CheckpointError, match=r"model-00003-of-\d{6}\.safetensors: cut off"):
        load(sharded)
    assert reads.opened == 0


@pytest.mark.parametrize(
    ("content", "pattern"), [(None, "there is no config.json"), ("{", "not valid JSON"), ("[]", "JSON object")]
)
def test_damaged_configuration(small, tmp_path, content, pattern):
    folder = tmp_path / "broken"
    shutil.copytree(small, folder)
    if content is None:
        (folder / "config.json").unlink()
    else:
        (folder / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=pattern):
        load(folder)


def test_no_such_folder(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither a folder nor a name on the hub"):
        load(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"neither a folder nor a name on the hub"):
        load(tmp_path / "file")


def regroup_mxfp4(tensors):
    name = f"{MOE}.experts.2.w3.weight_scale"
    tensors[name] = tensors[name].repeat_interleave(2, 1)


def regroup_nvfp4(tensors):
    name = f"{MOE}.experts.2.w3.weight_scale"
    tensors[name] = tensors[name][:, ::2]


@pytest.mark.parametrize(
    ("name", "damage", "pattern"),
    [
        (
            "tiny_k3_wide_mxfp4",
            regroup_mxfp4,
            r"shape \[128, 8\], expected \[128, 4\] \(MXFP4: one scale for 32 inputs\)",
        ),
        (
            "tiny_k3_wide_nvfp4",
            regroup_nvfp4,
            r"shape \[128, 4\], expected \[128, 8\] \(NVFP4: one scale for 16 inputs\)",
        ),
    ],
)
def test_wrong_group_size(golden, tmp_path, reads, name, damage, pattern):
    config, tensors = read(golden / name)
    damage(tensors)
    with pytest.raises(CheckpointError, match=rf"experts\.2\.w3\.weight_scale: {pattern}"):
        load(write(tmp_path / "broken", config, tensors))
    assert reads.opened == 0


@pytest.mark.parametrize("w", ["w1", "w2", "w3"])
def test_scale_byte_255_is_refused(golden, tmp_path, w):
    config, tensors = read(golden / "tiny_k3_wide_mxfp4")
    name = f"{MOE}.experts.5.{w}.weight_scale"
    tensors[name][7, 2] = 255
    with pytest.raises(CheckpointError, match=rf"experts\.5\.{w}\.weight_scale: .*255 is NaN.*first at \[7, 2\]"):
        load(write(tmp_path / "broken", config, tensors))


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("w", ["w1", "w2", "w3"])
def test_overflowing_mxfp4_is_reported(golden, tmp_path, w, dtype):
    config, tensors = read(golden / "tiny_k3_wide_mxfp4")
    base = f"{MOE}.experts.5.{w}"
    tensors[f"{base}.weight_scale"][7, 2] = 254
    tensors[f"{base}.weight_packed"][7, 32:48] = 0x33  # 1.5: the largest that fits
    load(write(tmp_path / "fits", config, tensors), dtype=dtype)
    tensors[f"{base}.weight_packed"][7, 33] = 0x43  # element 67 is 2
    with pytest.raises(
        CheckpointError, match=rf"experts\.5\.{w}\.weight_scale: .*first at \[7, 67\] with scale byte 254"
    ):
        load(write(tmp_path / "broken", config, tensors), dtype=dtype)


def test_mxfp4_codes_of_the_case_list(tmp_path):
    """Low nibble first; scale byte s means 2^(s - 127), 0 included."""
    model = random_model(num_experts=4)
    model.save_pretrained(tmp_path / "packed", experts="mxfp4")
    config, tensors = read(tmp_path / "packed")
    base = f"{MOE}.experts.1.w2"
    tensors[f"{base}.weight_packed"][0, :2] = torch.tensor([0x21, 0xF7], dtype=torch.uint8)
    for byte in (127, 126, 128, 0):
        tensors[f"{base}.weight_scale"][0, 0] = byte
        weights = experts_of(load(write(tmp_path / str(byte), config, tensors)))[0].weights
        want = torch.tensor([0.5, 1, 6, -6], dtype=torch.float64) * 2.0 ** (byte - 127)
        assert weights.decode(1, torch.float32)[1][0, :4].double().equal(want)


def test_gate_and_up_must_share_the_global_scale(golden, tmp_path):
    config, tensors = read(golden / "tiny_k3_wide_nvfp4")
    tensors[f"{MOE}.experts.6.w1.weight_scale_2"] *= 2
    with pytest.raises(CheckpointError, match=r"experts\.6\.w1\.weight_scale_2: .* differs from .* of w3"):
        load(write(tmp_path / "broken", config, tensors))


# ---- A_log --------------------------------------------------------------------------------------

DECAY = f"{LAYERS}.1.self_attn.A_log"
LIVE = torch.tensor([0.1, -0.2, 0.3, -0.4])


def padded(length, tail):
    return torch.cat([LIVE, torch.full((length - 4,), float(tail))])


@pytest.mark.parametrize(
    "stored",
    [padded(32, 0), padded(32, 7), padded(128, 0), LIVE, LIVE.reshape(1, 1, 4, 1)],
    ids=lambda x: str(list(x.shape)),
)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_decay_of_every_stored_shape(small, tmp_path, stored, size):
    config, tensors = read(small)
    tensors[DECAY] = stored
    folder = write(tmp_path / "decay", config, tensors)
    for index in range(size):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            layer = decays_of(load(folder, mesh=rank(index, size)))[1]
        assert layer.A_log[: layer.num_heads].equal(LIVE[index * 4 // size : (index + 1) * 4 // size])
        assert not layer.A_log[layer.num_heads :].any()
        told = [str(x.message) for x in caught if "A_log" in str(x.message)]
        has_tail = bool(stored.reshape(-1)[4:].any())
        assert len(told) == has_tail
        assert all(DECAY in message for message in told)


def test_decay_tail_changes_nothing(small, tmp_path):
    config, tensors = read(small)
    want = logits(load(small))
    tensors[DECAY][4:] = 9.0
    assert logits(load(write(tmp_path / "tail", config, tensors))).equal(want)


def test_many_decay_tails_warn_once(golden):
    with pytest.warns(UserWarning, match=r"layers\.0\.self_attn\.A_log \(and 5 more\)") as caught:
        load(golden / "tiny_k3_dev")
    assert len([x for x in caught if "A_log" in str(x.message)]) == 1


@pytest.mark.parametrize("shape", [(3,), (0,), (1, 4), (1, 1, 3, 1), (1, 4, 1, 1), ()], ids=str)
def test_decay_of_other_shapes_is_refused(small, tmp_path, reads, shape):
    config, tensors = read(small)
    tensors[DECAY] = torch.zeros(shape)
    with pytest.raises(CheckpointError, match=rf"{DECAY}: shape {re.escape(str(shape))}.*4") as caught:
        load(write(tmp_path / "decay", config, tensors))
    assert "expected" in str(caught.value)
    assert reads.opened == 0


@pytest.mark.parametrize(
    "stored", [padded(32, 7), padded(128, 7), LIVE, LIVE.reshape(1, 1, 4, 1)], ids=lambda x: str(list(x.shape))
)
def test_saving_restores_the_shape_of_the_decay(small, tmp_path, stored):
    config, tensors = read(small)
    tensors[DECAY] = stored
    load(write(tmp_path / "decay", config, tensors)).save_pretrained(tmp_path / "saved")
    saved = read(tmp_path / "saved")[1][DECAY]
    assert saved.shape == stored.shape
    assert saved.reshape(-1)[:4].equal(LIVE)
    assert not saved.reshape(-1)[4:].any()


# ---- packed modules outside the experts, other geometries ---------------------------------------

GEOMETRIES = {
    "wide-heads": {"hidden_size": 256, "head_dim": 64, "q_lora_rank": None},
    "partial-tiles": {"hidden_size": 320, "head_dim": 64, "num_attention_heads": 3, "num_key_value_heads": 3},
    "low-rank-gate": {"use_full_rank_gate": False, "gate_lower_bound": None, "mla_use_output_gate": False},
    "grouped": {"num_expert_group": 4, "topk_group": 2},
    "no-latent": {"routed_expert_hidden_size": None, "latent_moe_use_norm": False},
    "no-latent-norm": {"latent_moe_use_norm": False},
    "no-residual-reads": {"attn_res_block_size": None},
    "more-dense": {"first_k_dense_replace": 3, "num_shared_experts": 0},
}


@pytest.mark.parametrize("changes", GEOMETRIES.values(), ids=GEOMETRIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_other_geometries_round_trip(tmp_path, changes, dtype):
    model = random_model(dtype=dtype, **changes)
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert again.config.text == model.config.text
    for name, x in model.named_parameters():
        if not name.endswith("A_log"):
            assert dict(again.named_parameters())[name].equal(x), name
    assert logits(again).isfinite().all()
    if dtype == torch.float32:  # loading joins weights that share an input: another path, other roundings
        assert_close("logits", logits(model), logits(again), 1e-5)
    again.save_pretrained(tmp_path / "again")
    assert logits(load(tmp_path / "again")).equal(logits(again))


def pack_resident(tensors, bases):
    """Pack linears as MXFP4 in place; return the plain values they stand for."""
    decoded = dict(tensors)
    for base in bases:
        packed, scale = quant.mxfp4_encode(tensors.pop(f"{base}.weight"))
        tensors[f"{base}.weight_packed"], tensors[f"{base}.weight_scale"] = packed, scale
        decoded[f"{base}.weight"] = decode_fp4(packed, 2.0 ** (scale.float() - 127), 32).bfloat16()
    return decoded


def test_resident_mxfp4_is_decoded(tmp_path):
    """Like the miniature of 0.40B parameters: shared experts and latent projections are packed too."""
    random_model(routed_expert_hidden_size=32).save_pretrained(tmp_path / "source", experts="mxfp4")
    config, tensors = read(tmp_path / "source")
    bases = [
        k.removesuffix(".weight") for k in tensors if re.search(r"shared_experts\..*weight|expert_(down|up)_proj", k)
    ]
    assert len(bases) == 15
    plain = write(tmp_path / "plain", config, pack_resident(tensors, bases))
    packed = write(tmp_path / "packed", config, tensors)
    for dtype in (None, torch.float32):
        for index, size in ((0, 1), (0, 2), (1, 2)):
            got, want = (load(folder, dtype=dtype, mesh=rank(index, size)) for folder in (packed, plain))
            for (name, x), (_, y) in zip(got.named_parameters(), want.named_parameters(), strict=True):
                assert x.dtype == y.dtype, name
                assert x.equal(y), name
    assert logits(load(packed)).equal(logits(load(plain)))


@pytest.mark.parametrize("byte", [254, 255])
def test_resident_mxfp4_is_checked(tmp_path, byte):
    random_model().save_pretrained(tmp_path / "source", experts="mxfp4")
    config, tensors = read(tmp_path / "source")
    base = f"{MOE}.shared_experts.gate_proj"
    pack_resident(tensors, [base])
    tensors[f"{base}.weight_scale"][5, 1] = byte
    tensors[f"{base}.weight_packed"][5, 16:32] = 0x77
    with pytest.raises(CheckpointError, match=r"shared_experts\.gate_proj\.weight_scale: .*first at \[5, "):
        load(write(tmp_path / "packed", config, tensors))


def test_mxfp4_beyond_float16_is_reported(tmp_path):
    random_model().save_pretrained(tmp_path / "source", experts="mxfp4")
    config, tensors = read(tmp_path / "source")
    shared, routed = f"{MOE}.shared_experts.gate_proj", f"{MOE}.experts.0.w1"
    pack_resident(tensors, [shared])
    for base in (shared, routed):
        damaged = dict(tensors)
        damaged[f"{base}.weight_scale"] = torch.full_like(tensors[f"{base}.weight_scale"], 127 + 15)
        damaged[f"{base}.weight_packed"] = torch.full_like(tensors[f"{base}.weight_packed"], 0x77)
        folder = write(tmp_path / "huge", config, damaged)
        load(folder)
        with pytest.raises(CheckpointError, match=rf"{base}\.weight_scale: .*float16"):
            load(folder, dtype=torch.float16)


def decode_fp8(codes, scale):
    tiles = scale.repeat_interleave(128, 0)[: codes.shape[0]].repeat_interleave(128, 1)[:, : codes.shape[1]]
    return codes.float() * tiles


@pytest.mark.parametrize("is_4d", [True, False])
@pytest.mark.parametrize("geometry", ["wide-heads", "partial-tiles", "low-rank-gate"])
def test_block_fp8_attention_is_decoded(tmp_path, geometry, is_4d):
    random_model(**GEOMETRIES[geometry]).save_pretrained(tmp_path / "source", experts="nvfp4")
    config, tensors = read(tmp_path / "source")
    decoded = dict(tensors)
    names = [k for k in tensors if re.search(r"self_attn\.\w+_proj(_with_mqa)?\.weight$", k) and "kv_b" not in k]
    for name in names:
        rows, cols = tensors[name].shape
        codes = (tensors[name].float() * 40).to(torch.float8_e4m3fn)
        scale = torch.rand(-(-rows // 128), -(-cols // 128)) / 64 + 2**-9  # no powers of two: decoding must multiply
        decoded[name] = decode_fp8(codes, scale)
        tensors[name] = codes
        tensors[f"{name}_scale"] = scale[:, None, :, None] if is_4d else scale
    assert any(tensors[f"{n}_scale"].numel() > 2 for n in names) == (geometry != "low-rank-gate")
    plain, packed = write(tmp_path / "plain", config, decoded), write(tmp_path / "packed", config, tensors)
    for dtype in (torch.bfloat16, torch.float32):
        sizes = (1, 2) if geometry == "wide-heads" else (1,)
        for mesh in [rank(index, size) for size in sizes for index in range(size)]:
            got, want = (load(folder, dtype=dtype, mesh=mesh) for folder in (packed, plain))
            for (name, x), (_, y) in zip(got.named_parameters(), want.named_parameters(), strict=True):
                assert x.dtype == y.dtype, name
                assert x.equal(y), name


@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2), (2, 2, 1, 1), (1, 2, 1, 2), (3, 2)], ids=str)
def test_block_fp8_scales_of_another_shape_are_refused(tmp_path, reads, shape):
    random_model(**GEOMETRIES["wide-heads"]).save_pretrained(tmp_path / "source")
    config, tensors = read(tmp_path / "source")
    name = f"{LAYERS}.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale"] = torch.ones(shape)
    expected = r"expected \[2, 1, 2, 1\] or \[2, 2\] \(one scale for 128 x 128\)"
    with pytest.raises(
        CheckpointError, match=rf"q_proj\.weight_scale: shape {re.escape(str(list(shape)))}, {expected}"
    ):
        load(write(tmp_path / "broken", config, tensors))
    assert reads.opened == 0


# ---- slices and ranks ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "outside"),
    [
        (range(3), {"embed_tokens", "norm", "output_attn_res_norm", "output_attn_res_proj", "lm_head"}),
        (range(4, 6), set()),
        (range(7, 9), {"norm", "output_attn_res_norm", "output_attn_res_proj", "lm_head"}),
    ],
    ids=["first", "middle", "last"],
)
def test_other_layers_are_never_read(golden, reads, layers, outside):
    load(golden / "tiny_k3_dev_mxfp4", layers=layers)
    found = {int(m[1]) for n in reads.bytes if (m := re.search(r"\.layers\.(\d+)\.", n))}
    assert found == set(layers)
    rest = {n.removeprefix("language_model.").removeprefix("model.") for n in reads.bytes if ".layers." not in n}
    assert {n.removesuffix(".weight") for n in rest} == outside


@pytest.mark.parametrize("layers", [range(0), range(3, 10), range(5, 5), range(0, 4, 2), range(-1, 3), 3], ids=str)
def test_invalid_layers_are_refused(golden, reads, layers):
    with pytest.raises(ConfigError, match=r"must be a non-empty range within 0\.\.9"):
        load(golden / "tiny_k3_dev_mxfp4", layers=layers)
    assert reads.opened == 0


def test_a_slice_still_refuses_strangers(small, tmp_path):
    config, tensors = read(small)
    _unexpected(tensors)
    _unknown_top(tensors)
    with pytest.raises(CheckpointError, match="0 tensors missing, 1 unexpected"):
        load(write(tmp_path / "broken", config, tensors), layers=range(1, 2))


def joined(parts, dim):
    return torch.cat(parts, dim)


@pytest.mark.parametrize("form", ["bf16", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_together_hold_every_parameter(cut, form, size):
    whole = load(cut / form)
    parts = [load(cut / form, mesh=rank(index, size)) for index in range(size)]
    shared = 0
    for name, full in parameters(whole).items():
        mine = [dict(part.named_parameters())[name] for part in parts]
        if name.endswith("A_log"):
            assert joined(mine, 0).equal(full[:8]), name
            continue
        rule = placement(mine[0]).shard
        if rule is None:
            shared += 1
            assert all(x.equal(full) for x in mine), name
        else:
            assert joined(mine, rule.dim).equal(full), name
    assert 0 < shared < len(parameters(whole))
    for number, module in enumerate(experts_of(whole)):
        ranks = [experts_of(part)[number].weights for part in parts]
        for name in ("w13", "w13_scale"):
            if (full := getattr(module.weights, name)) is not None:
                halves = [getattr(x, name).view(torch.uint8).chunk(2, 1) for x in ranks]
                got = joined([half[i] for i in (0, 1) for half in halves], 1)
                assert got.equal(full.view(torch.uint8)), name
        for name in ("w2", "w2_scale"):
            if (full := getattr(module.weights, name)) is not None:
                got = joined([getattr(x, name).contiguous().view(torch.uint8) for x in ranks], 2)
                assert got.equal(full.contiguous().view(torch.uint8)), name
        for name in ("w13_scale_2", "w2_scale_2"):
            if (full := getattr(module.weights, name)) is not None:
                assert all(getattr(x, name).equal(full) for x in ranks), name


@pytest.mark.parametrize("form", ["bf16", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("size", [1, 4])
def test_a_rank_reads_its_bytes_only(cut, reads, form, size):
    stored = checkpoint.Folder(cut / form).tensors()
    model = load(cut / form, mesh=rank(size - 1, size))
    cuts = {n for n, x in model.named_parameters() if placement(x).shard is not None and not n.endswith("A_log")}
    for name, info in stored.items():
        if name.endswith("input_scale"):
            assert reads.bytes[name] == 0
            continue
        is_expert = re.search(r"experts\.\d+\.w[123]\.weight(_packed|_scale)?$", name)
        share = size if is_expert or name.removeprefix("language_model.") in cuts else 1
        assert reads.bytes[name] * share == info.nbytes, name


def test_vision_is_not_read(golden, reads):
    load(golden / "tiny_k3_dev")
    stored = checkpoint.Folder(golden / "tiny_k3_dev").tensors()
    text = {name: info.nbytes for name, info in stored.items() if not name.startswith(VISION)}
    assert len(text) < len(stored)
    assert reads.bytes == Counter(text)


@pytest.mark.parametrize(
    ("form", "inner", "size"),
    [("mxfp4", 96, 2), ("mxfp4", 64, 4), ("mxfp4", 128, 8), ("nvfp4", 96, 4), ("nvfp4", 64, 8), ("bf16", 12, 8)],
)
def test_a_cut_that_tears_a_group_is_refused(tmp_path, reads, form, inner, size):
    heads = {"num_heads": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16}
    shared = {"num_shared_experts": 2, "num_experts": 4}
    random_model(moe_intermediate_size=inner, **heads, **shared).save_pretrained(tmp_path, experts=form)
    with pytest.raises(ConfigError, match=rf"tp_size={size} .*{inner}|tp_size={size} does not cut"):
        load(tmp_path, mesh=rank(0, size))
    assert reads.opened == 0


def test_an_nvfp4_cut_may_be_finer_than_an_mxfp4_cut(tmp_path):
    random_model(moe_intermediate_size=96, num_experts=4).save_pretrained(tmp_path, experts="nvfp4")
    assert experts_of(load(tmp_path, mesh=rank(1, 2)))[0].weights.w13_scale.shape == (4, 96, 4)


@pytest.mark.parametrize(("size", "what"), [(3, "KDA heads|vocabulary"), (8, "KDA heads")])
def test_heads_that_do_not_divide_are_refused(small, reads, size, what):
    with pytest.raises(ConfigError, match=rf"tp_size={size} does not cut .*({what}).* use one of 1, 2"):
        load(small, mesh=rank(0, size))
    assert reads.opened == 0


# ---- saving -------------------------------------------------------------------------------------


def test_sharded_files(small, tmp_path):
    model = load(small)
    model.save_pretrained(tmp_path, max_file_bytes=300_000)
    files = sorted(x.name for x in tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert files == [f"model-{n:05d}-of-{len(files):06d}.safetensors" for n in range(1, len(files) + 1)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    stored = checkpoint.Folder(tmp_path).tensors()
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(info.nbytes for info in stored.values())
    for file in files:
        held = sum(info.nbytes for info in stored.values() if info.file.name == file)
        assert held <= 300_000 or sum(info.file.name == file for info in stored.values()) == 1
    assert not list(tmp_path.glob("*.tmp"))
    assert logits(load(tmp_path)).equal(logits(model))
    model.save_pretrained(tmp_path)  # one file now: the index must not win
    assert not (tmp_path / "model.safetensors.index.json").exists()
    assert logits(load(tmp_path)).equal(logits(model))


def held_values(weights, dtype=torch.float32):
    return [weights.decode(e, dtype) for e in range(weights.num_experts)]


def expected_values(weights, form):
    """What the experts decode to after they were saved as `form`."""
    if form in {None, weights.format}:
        return held_values(weights)
    if form == "bf16":
        return [[x.float() for x in pair] for pair in held_values(weights, torch.bfloat16)]
    if form == "mxfp4":
        return [
            [quant.mxfp4_decode(*quant.mxfp4_encode(x), torch.float32) for x in pair] for pair in held_values(weights)
        ]
    if weights.format == "mxfp4":
        return held_values(weights)  # the cast is exact
    encoded = [[quant.nvfp4_encode(x) for x in pair] for pair in held_values(weights)]
    return [[quant.nvfp4_decode(*x, torch.float32) for x in pair] for pair in encoded]


@pytest.mark.parametrize("held", ["", "_mxfp4", "_nvfp4"], ids=["bf16", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("form", [None, "bf16", "mxfp4", "nvfp4"])
def test_saved_experts_round_trip(golden, tmp_path, held, form):
    model = load(golden / f"tiny_k3_wide{held}")
    model.save_pretrained(tmp_path, experts=form)
    again = load(tmp_path)
    for name, x in parameters(model).items():
        if not name.endswith("A_log"):
            assert dict(again.named_parameters())[name].equal(x), name
    for before, after in zip(experts_of(model), experts_of(again), strict=True):
        assert after.weights.format == (form or before.weights.format)
        for want, got in zip(expected_values(before.weights, form), held_values(after.weights), strict=True):
            assert want[0].equal(got[0])
            assert want[1].equal(got[1])
    quantization = again.config.quantization
    assert (quantization.expert_format if quantization else "bf16") == experts_of(again)[0].weights.format
    assert again.config.vision is None
    assert json.loads((tmp_path / "config.json").read_text())["vision_config"] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["tiny_k3_wide_mxfp4", "tiny_k3_dev_mxfp4"])
def test_mxfp4_as_nvfp4_gives_the_same_logits(golden, tmp_path, name, dtype):
    model = load(golden / name, dtype=dtype)
    model.save_pretrained(tmp_path, experts="nvfp4")
    again = load(tmp_path, dtype=dtype)
    assert experts_of(again)[0].weights.format == "nvfp4"
    assert logits(again).equal(logits(model))


def test_mxfp4_as_nvfp4_and_back(golden, tmp_path):
    model = load(golden / "tiny_k3_wide_mxfp4", dtype=torch.float32)
    model.save_pretrained(tmp_path / "there", experts="nvfp4")
    load(tmp_path / "there").save_pretrained(tmp_path / "back", experts="mxfp4")
    assert logits(load(tmp_path / "back", dtype=torch.float32)).equal(logits(model))


def test_saving_an_upcast_model_keeps_float32(golden, tmp_path):
    model = load(golden / "tiny_k3_wide", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    assert {x.dtype for x in read(tmp_path)[1].values()} == {torch.float32}
    assert logits(load(tmp_path)).equal(logits(model))


@pytest.mark.parametrize("name", ["tiny_k3_dev", "tiny_k3_dev_mxfp4", "tiny_k3_wide_nvfp4"])
def test_a_saved_checkpoint_equals_the_released_one(golden, tmp_path, name):
    config, tensors = read(golden / name)
    vision = {k: x for k, x in tensors.items() if k.startswith(VISION)}
    load(golden / name).save_pretrained(tmp_path, extra=vision)
    saved_config, saved = read(tmp_path)
    assert saved_config == config
    assert KimiK3Config.from_hf(saved_config) == KimiK3Config.from_hf(config)
    assert saved.keys() == tensors.keys()
    for key, x in tensors.items():
        assert (saved[key].dtype, saved[key].shape) == (x.dtype, x.shape), key
        if key.endswith("A_log"):
            heads = config["text_config"]["linear_attn_config"]["num_heads"]
            assert saved[key][:heads].equal(x[:heads]), key
        elif not key.endswith("input_scale"):
            assert saved[key].view(torch.uint8).equal(x.view(torch.uint8)) if x.ndim else saved[key].equal(x), key


def test_vision_tensors_are_written_and_keep_the_configuration(small, tmp_path):
    config, tensors = read(small)
    assert config["vision_config"] is not None
    vision = {k: x for k, x in tensors.items() if k.startswith(VISION)}
    load(small).save_pretrained(tmp_path, extra=vision)
    again, saved = read(tmp_path)
    assert again == config
    assert all(saved[k].equal(x) for k, x in vision.items())


@pytest.mark.parametrize(
    "options", [{}, {"experts": "mxfp4"}, {"experts": "nvfp4"}, {"max_file_bytes": 300_000}], ids=str
)
def test_saving_twice_gives_the_same_bytes(small, tmp_path, options):
    for name in ("a", "b"):
        load(small).save_pretrained(tmp_path / name, **options)
    a, b = ({x.name: x.read_bytes() for x in (tmp_path / name).iterdir()} for name in ("a", "b"))
    assert a == b


def test_the_layout_announces_what_is_written(small, tmp_path):
    model = load(small)
    for form in (None, "mxfp4", "nvfp4"):
        model.save_pretrained(tmp_path, experts=form)
        stored = checkpoint.Folder(tmp_path).tensors()
        assert export.stored_layout(model, form) == {n: (i.dtype, i.shape) for n, i in stored.items()}


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"layers": range(2)}, "holds 2 of 4 layers"),
        ({"layers": range(1, 4)}, "holds 3 of 4 layers"),
        ({"mesh": rank(0, 2)}, "one rank's part of 2"),
    ],
    ids=str,
)
def test_saving_a_part_is_refused(small, tmp_path, options, pattern):
    with pytest.raises(ConfigError, match=f"only a whole model can be saved: .*{pattern}"):
        load(small, **options).save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_widths_that_cannot_be_packed_are_refused(tmp_path):
    model = random_model(moe_intermediate_size=48, num_experts=4)
    with pytest.raises(ConfigError, match="64 and 48 are no multiples of 32"):
        model.save_pretrained(tmp_path / "saved", experts="mxfp4")
    assert not list(tmp_path.rglob("*.safetensors"))


def test_saving_over_the_loaded_folder(small, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(small, folder)
    want = logits(load(folder))
    load(folder).save_pretrained(folder)
    assert logits(load(folder)).equal(want)
