"""Replacing weights in place: equal to a fresh load, in the same memory, all or nothing."""

import re
import shutil

import pytest
import torch
from folders import LAYERS, MOE, decays_of, experts_of, load, logits, random_model, rank, read, write

from k3lib import KimiK3Config, KimiK3ForCausalLM, checkpoint
from k3lib.errors import CheckpointError, ConfigError
from k3lib.layers.linear import K3Module
from k3lib.ops import ExpertWeights, quant

FORMS = ["bf16", "mxfp4", "nvfp4"]
SIZES = {"moe_intermediate_size": 128, "num_experts": 6}
STACKS = ("w13", "w2", "w13_scale", "w2_scale", "w13_scale_2", "w2_scale_2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two models of different weights, "a" and "b", in every format; read only."""
    folder = tmp_path_factory.mktemp("seeds")
    for name, seed in (("a", 1), ("b", 2)):
        model = random_model(seed, **SIZES)
        for form in FORMS:
            model.save_pretrained(folder / f"{name}-{form}", experts=form)
    return folder


def tensors_of(model):
    """All memory that holds weights: parameters, packed experts, joined projections."""
    held = dict(model.named_parameters())
    for i, module in enumerate(experts_of(model)):
        if isinstance(module.packed, ExpertWeights):
            stacks = {name: getattr(module.packed, name) for name in STACKS}
            held |= {f"{i}.{name}": x for name, x in stacks.items() if x is not None}
    for name, module in model.named_modules():
        if isinstance(module, K3Module):
            held |= {f"{name}.fused{i}": part.weight for i, part in enumerate(module.fused_parts())}
    return held


def places(model):
    return {name: (x.data_ptr(), x.dtype, x.shape, x.stride()) for name, x in tensors_of(model).items()}


def copies(model):
    return {name: x.detach().clone() for name, x in tensors_of(model).items()}


def bits(x):
    return x.detach().contiguous().view(-1).view(torch.uint8)


def assert_same_weights(model, other):
    mine, theirs = tensors_of(model), tensors_of(other)
    assert mine.keys() == theirs.keys()
    for name, x in mine.items():
        assert bits(x).equal(bits(theirs[name])), name


def updated(model, source, **options):
    """The model after an update that left every tensor where it was, with its joined projections in use."""
    before = places(model)
    model.load_weights(source, progress=False, **options)
    assert places(model) == before
    for module in model.modules():
        if isinstance(module, K3Module):
            assert all(part.intact() is not None for part in module.fused_parts())
    return model


def pairs_of(tensors):
    yield from tensors.items()


SOURCES = {
    "folder": lambda folder: folder,
    "path": str,
    "mapping": lambda folder: read(folder)[1],
    "pairs": lambda folder: pairs_of(read(folder)[1]),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_an_updated_model_equals_a_fresh_one_in_the_same_memory(folders, form, dtype, source):
    old, fresh = folders / f"a-{form}", load(folders / f"b-{form}", dtype=dtype)
    model = load(old, dtype=dtype)
    before = logits(model)
    updated(model, source(folders / f"b-{form}"))
    assert logits(model).equal(logits(fresh))
    assert not logits(model).equal(before)
    assert_same_weights(model, fresh)
    updated(model, old)
    assert logits(model).equal(before)


@pytest.mark.parametrize("kind", ["folder", "mapping"])
@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_packed_experts_take_plain_ones(folders, form, kind):
    """They are encoded as `save_pretrained(experts=...)` encodes them."""
    model = updated(load(folders / f"a-{form}"), SOURCES[kind](folders / "b-bf16"))
    assert_same_weights(model, load(folders / f"b-{form}"))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("held", "given"), [*((form, form) for form in FORMS), ("mxfp4", "bf16"), ("nvfp4", "bf16")])
def test_a_rank_takes_its_part(tmp_path, held, given, size):
    heads = {"num_heads": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
    for name, seed, form in (("a", 1, held), ("b", 2, held), ("given", 2, given)):
        random_model(seed, **SIZES, **heads).save_pretrained(tmp_path / name, experts=form)
    for kind in ("folder", "mapping"):
        for index in range(size):
            model = load(tmp_path / "a", mesh=rank(index, size))
            updated(model, SOURCES[kind](tmp_path / "given"))
            assert_same_weights(model, load(tmp_path / "b", mesh=rank(index, size)))


def test_a_slice_takes_its_layers(folders):
    model = updated(load(folders / "a-mxfp4", layers=range(1, 3)), folders / "b-mxfp4")
    assert_same_weights(model, load(folders / "b-mxfp4", layers=range(1, 3)))


def test_a_change_made_before_is_overwritten_and_views_see_the_new_values(folders):
    model, fresh = load(folders / "a-bf16"), load(folders / "b-bf16")
    view = model.lm_head.weight.view(-1)
    model.lm_head.weight.zero_()
    updated(model, folders / "b-bf16")
    assert view.equal(fresh.lm_head.weight.view(-1))


def test_weights_that_train_stay_trainable(folders):
    model = load(folders / "a-bf16", dtype=torch.float32).requires_grad_()
    before = {name: x.data_ptr() for name, x in model.named_parameters()}
    model.load_weights(folders / "b-bf16")
    assert {name: x.data_ptr() for name, x in model.named_parameters()} == before
    assert all(x.requires_grad and x.is_leaf for x in model.parameters())
    assert logits(model).equal(logits(load(folders / "b-bf16", dtype=torch.float32)))


def test_a_model_loaded_and_updated_in_inference_mode(folders):
    with torch.inference_mode():
        model = load(folders / "a-mxfp4")
        updated(model, folders / "b-mxfp4")
    updated(model, folders / "a-mxfp4")
    assert_same_weights(model, load(folders / "a-mxfp4"))
    assert not any(x.is_inference() for x in tensors_of(model).values())


def test_a_model_made_in_memory_takes_weights(folders):
    model = random_model(7, **SIZES)
    model.load_weights(folders / "b-bf16")
    fresh = load(folders / "b-bf16")
    assert all(x.equal(fresh.get_parameter(name)) for name, x in model.named_parameters())


def test_a_model_without_memory_is_refused(folders):
    model = KimiK3ForCausalLM(KimiK3Config.tiny(num_hidden_layers=4, **SIZES), device="meta")
    with pytest.raises(ConfigError, match="on the meta device; use from_pretrained"):
        model.load_weights(folders / "b-bf16")


def test_names_of_any_spelling_and_vision(folders):
    tensors = {name.removeprefix("language_model."): x for name, x in read(folders / "b-bf16")[1].items()}
    tensors["vision_tower.patch_embed.proj.weight"] = torch.zeros(3)
    assert_same_weights(updated(load(folders / "a-bf16"), tensors), load(folders / "b-bf16"))


# ---- special tensors ----------------------------------------------------------------------------

LIVE = torch.tensor([0.1, -0.2, 0.3, -0.4])
DECAY = f"{LAYERS}.1.self_attn.A_log"


@pytest.mark.parametrize(
    "stored",
    [LIVE, torch.cat([LIVE, torch.ones(124)]), LIVE.reshape(1, 1, 4, 1)],
    ids=lambda x: str(list(x.shape)),
)
@pytest.mark.parametrize("size", [1, 2])
def test_decay_of_every_stored_shape(folders, tmp_path, stored, size):
    """Stored with any padding, held padded or cut; saving writes the shape that came last."""
    model = load(folders / "a-bf16", mesh=rank(size - 1, size))
    tail = stored.reshape(-1)[4:]
    tensors = read(folders / "b-bf16")[1] | {DECAY: stored}
    if tail.any():
        with pytest.warns(UserWarning, match=r"1\.self_attn\.A_log: the padding behind the heads is not zero"):
            updated(model, tensors)
    else:
        updated(model, tensors)
    layer = decays_of(model)[1]
    first = 4 // size * (size - 1)
    assert layer.A_log[: layer.num_heads].equal(LIVE[first:])
    assert not layer.A_log[layer.num_heads :].any()
    if size == 1:
        model.save_pretrained(tmp_path)
        assert read(tmp_path)[1][DECAY].shape == stored.shape


def test_weights_kept_wide_take_every_digit(folders):
    tensors = read(folders / "b-bf16")[1]
    wide = [name for name, x in tensors.items() if x.dtype == torch.float32]
    assert {name.rsplit(".", 2)[-2] for name in wide} >= {"q_conv1d", "o_norm", "self_attn", "gate"}
    tensors |= {name: tensors[name] + 2**-12 for name in wide if not name.endswith("A_log")}
    model = updated(load(folders / "a-bf16"), tensors)
    for name in wide:
        if not name.endswith("A_log"):
            assert model.get_parameter(name.removeprefix("language_model.")).equal(tensors[name]), name


def test_values_take_the_dtype_of_the_model(folders):
    tensors = {name: x.double() for name, x in read(folders / "b-bf16")[1].items()}
    assert_same_weights(updated(load(folders / "a-bf16"), tensors), load(folders / "b-bf16"))


@pytest.mark.parametrize("form", ["mxfp4", "fp8"])
def test_packed_modules_outside_the_experts_are_decoded(folders, tmp_path, form):
    config, tensors = read(folders / "b-mxfp4")
    for base in [name.removesuffix(".weight") for name in tensors if re.search(r"shared_experts\..*weight$", name)]:
        w = tensors.pop(f"{base}.weight")
        if form == "mxfp4":
            tensors[f"{base}.weight_packed"], tensors[f"{base}.weight_scale"] = quant.mxfp4_encode(w)
        else:
            tensors[f"{base}.weight"], tensors[f"{base}.weight_scale"] = quant.fp8_block_encode(w)
    folder = write(tmp_path / "packed", config, tensors)
    for index, size in ((0, 1), (1, 2)):
        for source in (folder, tensors):
            model = updated(load(folders / "a-mxfp4", mesh=rank(index, size)), source)
            assert_same_weights(model, load(folder, mesh=rank(index, size)))


# ---- parts --------------------------------------------------------------------------------------


def changed(before, model):
    return {name for name, x in tensors_of(model).items() if not bits(before[name]).equal(bits(x))}


def test_a_part_changes_what_it_names(folders):
    tensors = read(folders / "b-bf16")[1]
    names = [f"{LAYERS}.2.self_attn.k_proj.weight", f"{LAYERS}.0.self_attn.A_log", "language_model.lm_head.weight"]
    model, fresh = load(folders / "a-bf16"), load(folders / "b-bf16")
    before = copies(model)
    updated(model, {name: tensors[name] for name in names}, partial=True)
    plain = [name.removeprefix("language_model.") for name in names]
    assert changed(before, model) == {*plain, "model.layers.2.self_attn.fused0"}
    assert all(model.get_parameter(name).equal(fresh.get_parameter(name)) for name in plain)


@pytest.mark.parametrize("given", ["packed", "plain"])
@pytest.mark.parametrize("form", FORMS)
def test_a_part_may_be_some_matrices_of_some_experts(folders, form, given):
    source = folders / (f"b-{form}" if given == "packed" else "b-bf16")
    wanted = re.compile(rf"{re.escape(MOE)}\.experts\.(2\.w2|4\.w[13])\.")
    tensors = {name: x for name, x in read(source)[1].items() if wanted.match(name)}
    model, old, fresh = load(folders / f"a-{form}"), load(folders / f"a-{form}"), load(folders / f"b-{form}")
    before = copies(model)
    updated(model, tensors, partial=True)
    stacks = {"w13", "w2", "w13_scale", "w2_scale", "w13_scale_2", "w2_scale_2"}
    names = (
        {f"0.{x}" for x in stacks}
        if form != "bf16"
        else {f"model.layers.1.block_sparse_moe.experts.{x}" for x in stacks}
    )
    assert changed(before, model) == names & before.keys()
    layers = [experts_of(each)[0].weights for each in (model, old, fresh)]
    for e in range(6):
        (w13, w2), (old13, old2), (new13, new2) = (weights.decode(e, torch.float32) for weights in layers)
        assert w13.equal(new13 if e == 4 else old13)
        assert w2.equal(new2 if e == 2 else old2)


def test_a_part_may_be_a_folder(folders, tmp_path):
    config, tensors = read(folders / "b-bf16")
    folder = write(
        tmp_path / "part", config, {"language_model.lm_head.weight": tensors["language_model.lm_head.weight"]}
    )
    model = load(folders / "a-bf16")
    before = copies(model)
    updated(model, folder, partial=True)
    assert changed(before, model) == {"lm_head.weight"}


def test_nothing_at_all_is_a_part(folders):
    model = load(folders / "a-nvfp4")
    before = copies(model)
    updated(model, {}, partial=True)
    assert not changed(before, model)


# ---- refusals -----------------------------------------------------------------------------------


def refused(model, error, pattern, source, **options):
    """The update raises and changes nothing."""
    before, want = copies(model), logits(model)
    with pytest.raises(error) as caught:
        model.load_weights(source, progress=False, **options)
    assert re.search(pattern, str(caught.value)), str(caught.value)
    assert not getattr(caught.value, "weights_changed", False)
    assert not changed(before, model)
    assert logits(model).equal(want)
    return str(caught.value)


def _drop(name):
    return lambda tensors: tensors.pop(name)


def _put(name, value):
    def change(tensors):
        tensors[name] = value(tensors.get(name))

    return change


Q = f"{LAYERS}.2.self_attn.q_proj.weight"
LAST = f"{LAYERS}.3.block_sparse_moe.experts.5"


def _nan_scale(scale):
    scale[7, 1] = torch.nan
    return scale


def _byte_scale(byte):
    def change(scale):
        scale[7, 1] = byte
        return scale

    return change


BAD = {
    "missing": ("bf16", _drop("language_model.model.norm.weight"), r"1 tensors missing.*\n +missing: model\.norm\."),
    "unexpected": ("bf16", _put(f"{Q}x", lambda _: torch.zeros(1)), rf"unexpected: {Q}x"),
    "unknown root": ("bf16", _put("transformer.wte", lambda _: torch.zeros(1)), r"unexpected: transformer\.wte"),
    "own name": ("bf16", _put(f"{MOE}.experts.w13", lambda _: torch.zeros(1)), r"unexpected: .*experts\.w13"),
    "shape": ("bf16", _put(Q, lambda x: x[:, 1:]), r"q_proj\.weight: shape \[128, 95\], expected \[128, 96\]"),
    "dtype": ("bf16", _put(Q, torch.Tensor.int), r"q_proj\.weight: dtype (I32|torch\.int32), expected BF16"),
    "decay": ("bf16", _put(DECAY, lambda _: torch.zeros(3)), r"A_log: shape \(3,\) has 3 entries for 4 heads"),
    "expert": ("bf16", _drop(f"{LAST}.w3.weight"), r"missing: .*experts\.5\.w3\.weight"),
    "scale shape": ("mxfp4", _put(f"{LAST}.w1.weight_scale", lambda x: x[:, 1:]), r"1\.weight_scale: shape \[128, 1\]"),
    "scale byte": ("mxfp4", _put(f"{LAST}.w2.weight_scale", _byte_scale(255)), r"5\.w2\.weight_scale: .*255 is NaN"),
    "nan scale": ("nvfp4", _put(f"{LAST}.w1.weight_scale", _nan_scale), r"5\.w1\.weight_scale: a scale is NaN"),
    "two scales": ("nvfp4", _put(f"{LAST}.w1.weight_scale_2", lambda x: x * 2), r"1\.weight_scale_2: .* differs from"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["folder", "mapping"])
@pytest.mark.parametrize(("form", "damage", "pattern"), BAD.values(), ids=BAD)
def test_a_bad_source_changes_nothing(folders, tmp_path, form, damage, pattern, kind):
    config, tensors = read(folders / f"b-{form}")
    damage(tensors)
    source = write(tmp_path / "bad", config, tensors) if kind == "folder" else tensors
    message = refused(load(folders / f"a-{form}"), CheckpointError, pattern, source)
    assert "while writing" not in message


@pytest.mark.parametrize("value", [torch.inf, torch.nan, 3.2e38])
@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_plain_experts_without_a_code_are_refused(folders, form, value):
    tensors = read(folders / "b-bf16")[1]
    tensors[f"{LAST}.w2.weight"][3, 3] = value
    pattern = rf"5\.w2\.weight: needs finite values below 2\.98e\+38 to become {form}"
    refused(load(folders / f"a-{form}"), CheckpointError, pattern, tensors)


@pytest.mark.parametrize(
    ("held", "given"), [("bf16", "mxfp4"), ("bf16", "nvfp4"), ("mxfp4", "nvfp4"), ("nvfp4", "mxfp4")]
)
def test_another_packed_format_is_refused(folders, held, given):
    pattern = rf"experts: held as {held}, given as {given}: in place only {held} or plain ones can be written"
    message = refused(load(folders / f"a-{held}"), CheckpointError, pattern, folders / f"b-{given}")
    assert "0 tensors missing, 0 unexpected, 3 of" in message


def test_resident_mxfp4_is_checked_before(folders):
    tensors = read(folders / "b-mxfp4")[1]
    base = f"{LAYERS}.3.block_sparse_moe.shared_experts.down_proj"
    packed, scale = quant.mxfp4_encode(tensors.pop(f"{base}.weight"))
    scale[5, 1] = 255
    tensors |= {f"{base}.weight_packed": packed, f"{base}.weight_scale": scale}
    refused(load(folders / "a-mxfp4"), CheckpointError, r"down_proj\.weight_scale: .*first at \[5, 1\]", tensors)


PARTS = {
    "missing": ([], {}, "tensors missing"),
    "no scale": ([f"{LAST}.w1.weight_packed"], {"partial": True}, r"missing: .*5\.w1\.weight_scale"),
    "only a scale": ([f"{LAST}.w1.weight_scale"], {"partial": True}, r"unexpected: .*5\.w1\.weight_scale"),
    "a stranger": (["model.x"], {"partial": True}, r"unexpected: model\.x"),
}


@pytest.mark.parametrize(("names", "options", "pattern"), PARTS.values(), ids=PARTS)
def test_incomplete_parts_are_refused(folders, names, options, pattern):
    tensors = read(folders / "b-mxfp4")[1]
    given = {name: tensors.get(name, torch.zeros(1)) for name in names}
    refused(load(folders / "a-mxfp4"), CheckpointError, pattern, given, **options)


@pytest.mark.parametrize("given", ["nvfp4", "bf16"])
def test_matrices_that_share_a_scale_come_together(folders, given):
    tensors = {name: x for name, x in read(folders / f"b-{given}")[1].items() if f"{LAST}.w1" in name}
    pattern = r"experts\.5: w1 and w3 share the global scale of NVFP4; give both"
    refused(load(folders / "a-nvfp4"), CheckpointError, pattern, tensors, partial=True)


ITEMS = {
    "twice": ([("model.norm.weight", torch.ones(96))] * 2, r"model\.norm\.weight is given twice"),
    "no tensor": (
        {"model.norm.weight": [1.0]},
        r"expected pairs of a stored name and a tensor .*'model\.norm\.weight'",
    ),
    "no name": ([(3, torch.ones(96))], "expected pairs of a stored name"),
    "no pair": ([torch.ones(96)], "expected pairs of a stored name"),
    "no values": ({"model.norm.weight": torch.ones(96, device="meta")}, "a tensor with values"),
    "nothing": (None, "a folder, a mapping from stored names to tensors, or pairs of them, got None"),
}


@pytest.mark.parametrize(("source", "pattern"), ITEMS.values(), ids=ITEMS)
def test_what_is_no_named_tensor_is_refused(folders, source, pattern):
    refused(load(folders / "a-bf16"), ConfigError, pattern, source, partial=True)


def test_one_weight_under_two_names_is_refused(folders):
    given = {name: torch.ones(96) for name in ("model.norm.weight", "language_model.model.norm.weight")}
    refused(load(folders / "a-bf16"), CheckpointError, "the same weight as", given, partial=True)


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({"gate_lower_bound": -4.0}, [r"kda\.gate_lower_bound: -5\.0 here, -4\.0 there"]),
        (
            {"rms_norm_eps": 1e-6, "moe_renormalize": False},
            [r"moe\.renormalize: True here, False there", r"\bnorm_eps: 1e-05"],
        ),
        ({"attn_res_block_size": None}, [r"attn_res: AttnResConfig\(.*\) here, None there"]),
        ({"hidden_size": 128}, [r"hidden_size: 96 here, 128 there"]),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_another_computation_is_refused(folders, tmp_path, changes, lines):
    random_model(2, **SIZES, **changes).save_pretrained(tmp_path)
    message = refused(load(folders / "a-bf16"), ConfigError, "computes something else than this model", tmp_path)
    for line in lines:
        assert re.search(line, message), message


def test_facts_that_compute_the_same_may_differ(folders, tmp_path):
    config, tensors = read(folders / "b-bf16")
    config["text_config"]["max_position_embeddings"] = 64
    config["text_config"]["eos_token_id"] = config["eos_token_id"] = 7
    model = updated(load(folders / "a-bf16"), write(tmp_path / "other", config, tensors))
    assert logits(model).equal(logits(load(folders / "b-bf16")))
    assert model.config.text.max_position_embeddings == 4096


@pytest.mark.parametrize("damage", ["no config", "cut", "absent", "no weights"])
def test_a_damaged_folder_changes_nothing(folders, tmp_path, damage):
    folder = tmp_path / "damaged"
    if damage != "absent":
        shutil.copytree(folders / "b-mxfp4", folder)
    file = folder / "model.safetensors"
    if damage == "no config":
        (folder / "config.json").unlink()
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "no weights":
        file.unlink()
    pattern = {"no config": "no config", "cut": "cut off", "absent": "neither a folder", "no weights": "neither"}[
        damage
    ]
    refused(load(folders / "a-mxfp4"), CheckpointError, pattern, folder)


@pytest.mark.parametrize("form", FORMS)
def test_a_failure_while_writing_says_that_weights_are_partly_new(folders, monkeypatch, form):
    model = load(folders / f"a-{form}")
    source, count = checkpoint._Source, iter(range(10**6))
    copy_into = source.copy_into

    def fail_late(self, target, info, *where):
        if next(count) > 60:
            raise OSError("the disk is gone")
        copy_into(self, target, info, *where)

    with monkeypatch.context() as patch:
        patch.setattr(source, "copy_into", fail_late)
        with pytest.raises(CheckpointError, match=r"gone\nThis happened while writing: .* partly new") as caught:
            model.load_weights(folders / f"b-{form}", progress=False)
    assert caught.value.weights_changed
    assert_same_weights(updated(model, folders / f"b-{form}"), load(folders / f"b-{form}"))


# ---- experts on disk ----------------------------------------------------------------------------


@pytest.mark.parametrize("given", FORMS)
@pytest.mark.parametrize("held", FORMS)
def test_experts_on_disk_switch_to_the_new_folder(folders, held, given):
    model = load(folders / f"a-{held}", resident_experts=2)
    logits(model)
    updated(model, folders / f"b-{given}")
    zeros = {"hits": 0, "misses": 0, "bytes_read": 0, "resident": 0, "limit": 2}
    assert model.expert_stats() == dict.fromkeys((1, 2, 3), zeros)
    assert logits(model).equal(logits(load(folders / f"b-{given}")))
    assert {module.weights.format for module in experts_of(model)} == {given}


def test_experts_on_disk_follow_a_folder_that_was_written_again(folders, tmp_path):
    folder = tmp_path / "live"
    shutil.copytree(folders / "a-mxfp4", folder)
    model = load(folder, resident_experts=1)
    logits(model)
    load(folders / "b-mxfp4").save_pretrained(folder)
    assert logits(updated(model, folder)).equal(logits(load(folders / "b-mxfp4")))


def test_experts_on_disk_cannot_be_given_as_tensors(folders):
    model, tensors = load(folders / "a-bf16", resident_experts=2), read(folders / "b-bf16")[1]
    want = logits(model)
    parts = {name: x for name, x in tensors.items() if f"{LAST}.w1" in name}
    rest = {name: x for name, x in tensors.items() if ".experts." not in name}
    reason = (
        r"3\.block_sparse_moe\.experts: these experts are read from files when they are chosen; give a whole folder"
    )
    for source, partial in ((tensors, False), (rest, False), (parts, True)):
        with pytest.raises(CheckpointError, match=reason):
            model.load_weights(source, partial=partial)
    assert logits(model).equal(want)
    updated(model, rest, partial=True)
    mixed = updated(load(folders / "a-bf16"), rest, partial=True)
    assert logits(model).equal(logits(mixed))


def test_a_bad_folder_leaves_experts_on_disk_as_they_are(folders, tmp_path):
    config, tensors = read(folders / "b-mxfp4")
    _drop(f"{LAST}.w3.weight_scale")(tensors)
    model = load(folders / "a-mxfp4", resident_experts=2)
    want = logits(model)
    stats = model.expert_stats()
    with pytest.raises(CheckpointError, match=r"missing: .*experts\.5\.w3\.weight_scale"):
        model.load_weights(write(tmp_path / "bad", config, tensors))
    assert model.expert_stats() == stats
    assert logits(model).equal(want)
