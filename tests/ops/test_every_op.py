"""Promises that every op keeps about its inputs, offsets, keywords, and calls without tokens."""

import dataclasses
from itertools import accumulate

import pytest
import torch

from k3lib.batch import StateSaves
from k3lib.config import SiTU
from k3lib.errors import ConfigError
from k3lib.ops import ExpertWeights, KDAParams, observe, ops
from k3lib.ops.quant import mxfp4_encode

F32 = torch.float32
HEADS, KEY, VALUE, WIDTH, LATENT, ROPE, PAGE = 2, 4, 6, 8, 8, 4, 4
CHANNELS = HEADS * (2 * KEY + VALUE)


def draw(*shape):
    return torch.randn(*shape)


def pools(requests):
    rows = requests + 3
    return {
        "state": draw(rows, HEADS, VALUE, KEY),
        "conv_state": draw(rows, 3, CHANNELS),
        "slots": torch.arange(1, requests + 1, dtype=torch.int32),
    }


def recurrence(tokens, requests):
    shapes = {"q": (KEY,), "k": (KEY,), "v": (VALUE,), "gate": (KEY,), "beta": ()}
    at = pools(requests)
    del at["conv_state"]
    return {
        **{name: draw(tokens, HEADS, *shape) for name, shape in shapes.items()},
        **at,
        "params": KDAParams(draw(HEADS), draw(HEADS, KEY), -5.0),
        "scale": 0.5,
    }


def mixer(tokens, requests):
    return {
        "qkv": draw(tokens, CHANNELS),
        "gate": draw(tokens, HEADS, KEY),
        "beta": draw(tokens, HEADS),
        "out_gate": draw(tokens, HEADS, VALUE),
        "params": KDAParams(draw(HEADS), draw(HEADS, KEY), -5.0),
        "conv_weight": draw(CHANNELS, 4),
        "norm_weight": draw(VALUE),
        "norm_eps": 1e-5,
        "scale": 0.5,
        **pools(requests),
    }


def replay(tokens, requests):
    kept = (2, max(requests, 1), 4, HEADS)
    entries = torch.arange(requests, dtype=torch.int32)
    return {
        "state": draw(2, requests + 3, HEADS, VALUE, KEY),
        "k": draw(*kept, KEY),
        "v": draw(*kept, VALUE),
        "log_decay": -draw(*kept, KEY).abs(),
        "beta": draw(*kept).sigmoid(),
        "sources": entries + 1,
        "rows": entries,
        "counts": torch.full((requests,), 3 if tokens else 0, dtype=torch.int32),
        "targets": entries + 1,
    }


def convolution(tokens, requests):
    at = pools(requests)
    del at["state"]
    return {"x": draw(tokens, CHANNELS), "weight": draw(CHANNELS, 4), **at}


def decoding(tokens, requests):
    return {
        "q": draw(tokens, HEADS, LATENT + ROPE),
        "pages": draw(2 * requests + 1, PAGE, LATENT + ROPE),
        "latent_dim": LATENT,
        "page_table": torch.arange(1, 2 * requests + 1, dtype=torch.int32).view(requests, 2),
        "key_lens": torch.full((tokens,), 5, dtype=torch.int32),
        "scale": 0.5,
        "return_lse": True,
    }


def routing(tokens, _requests):
    return {
        "x": draw(tokens, WIDTH),
        "weight": draw(6, WIDTH),
        "bias": draw(6),
        "top_k": 2,
        "renormalize": True,
        "scale": 1.0,
    }


def runner(tokens, _requests, packed=False):
    w13, w2 = draw(3, 64, 32), draw(3, 32, 32)
    prepared = ExpertWeights(w13=w13, w2=w2)
    if packed:
        (w13, s13), (w2, s2) = mxfp4_encode(w13), mxfp4_encode(w2)
        prepared = ExpertWeights(w13=w13, w2=w2, w13_scale=s13, w2_scale=s2, format="mxfp4")
    return {
        "x": draw(tokens, 32),
        "ids": torch.randint(-1, 4, (tokens, 2), dtype=torch.int32),
        "weights": torch.rand(tokens, 2),
        "prepared": prepared,
        "act_fn": SiTU(beta=4.0, linear_beta=25.0),
    }


def residuals(tokens, _requests):
    return {
        "prefix": draw(tokens, WIDTH),
        "delta": draw(tokens, WIDTH),
        "bank": draw(tokens, 3, WIDTH),
        "score_weight": draw(WIDTH),
        "out_norm_weight": draw(WIDTH),
        "num_blocks": 2,
        "write_block": 2,
        "eps": 1e-5,
        "out_eps": 1e-5,
    }


CALLS = {
    "rms_norm": lambda t, _: {"x": draw(t, WIDTH), "weight": draw(WIDTH), "eps": 1e-5},
    "gated_rms_norm": lambda t, _: {
        "x": draw(t, 2, WIDTH), "gate": draw(t, 2, WIDTH), "weight": draw(WIDTH), "eps": 1e-5,
    },
    "situ_and_mul": lambda t, _: {"x": draw(t, WIDTH), "beta": 4.0, "linear_beta": 25.0},
    "short_conv": convolution,
    "kda_chunk": recurrence,
    "kda_recurrent": recurrence,
    "kda_mixer": mixer,
    "kda_replay": replay,
    "attn_res": residuals,
    "attention_varlen": lambda t, _: {
        "q": draw(t, HEADS, KEY), "k": draw(t, HEADS, KEY), "v": draw(t, HEADS, VALUE), "causal": True, "scale": 0.5,
        "return_lse": True,
    },
    "mla_decode": decoding,
    "merge_partials": lambda t, _: {"outs": draw(3, t, HEADS, VALUE), "lses": draw(3, t, HEADS)},
    "store_rows": lambda t, _: {
        "values": draw(t, WIDTH), "pages": draw(t + 1, PAGE, WIDTH), "rows": torch.randperm(3 * t + 3)[:t] - 1,
    },
    "gather_rows": lambda t, _: {"pages": draw(t + 1, PAGE, WIDTH), "rows": torch.arange(t) - 1},
    "linear": lambda t, _: {"x": draw(t, WIDTH), "weight": draw(6, WIDTH)},
    "route": routing,
    "experts": runner,
}  # fmt: skip
IN_PLACE = {"state", "conv_state", "bank"}
STORES = {"store_rows"}  # the one op that writes its pages
PACKED = ["short_conv", "kda_chunk", "kda_recurrent", "kda_mixer", "attention_varlen", "mla_decode"]
every_op = pytest.mark.parametrize("name", CALLS)


def offsets(name, cu_seqlens):
    cu = torch.tensor(cu_seqlens, dtype=torch.int32)
    if name not in PACKED:
        return {}
    return {"cu_seqlens_q": cu, "cu_seqlens_k": cu} if name == "attention_varlen" else {"cu_seqlens": cu}


def arguments(name, lengths):
    return {**CALLS[name](sum(lengths), len(lengths)), **offsets(name, [0, *accumulate(lengths)])}


def call(name, given):
    given = dict(given)
    tensors = [given.pop(p) for p in positional(name)]
    return ops()[name](*tensors, **given)


def positional(name):
    code = ops()[name].reference.__code__
    return code.co_varnames[: code.co_argcount]


def tensors_in(value):
    """All tensors inside an argument, by name."""
    if isinstance(value, torch.Tensor):
        return {"": value}
    if dataclasses.is_dataclass(value):
        fields = [f.name for f in dataclasses.fields(value)]
        return {f: getattr(value, f) for f in fields if isinstance(getattr(value, f), torch.Tensor)}
    if isinstance(value, tuple):
        return {str(i): x for i, x in enumerate(value) if isinstance(x, torch.Tensor)}
    return {}


def snapshot(given):
    return {(name, part): x.clone() for name, value in given.items() for part, x in tensors_in(value).items()}


def test_there_is_a_call_for_every_op():
    assert set(CALLS) == set(ops()) - {"ep_experts"}  # which takes a group: tests/parallel


@pytest.mark.parametrize("lengths", [[5, 0, 1, 20], [1, 1]], ids=str)
@every_op
def test_inputs_are_left_as_they_were(name, lengths):
    given = arguments(name, lengths)
    before = snapshot(given)
    call(name, given)
    changed = {key[0] for key, x in snapshot(given).items() if not x.equal(before[key])}
    assert changed <= (IN_PLACE if name not in STORES else {"pages"})


@every_op
def test_a_second_call_on_the_same_inputs_gives_the_same(name):
    given = arguments(name, [5, 0, 1, 20])
    results = []
    for _ in range(2):
        fresh = {key: value.clone() if key in IN_PLACE else value for key, value in given.items()}
        result = call(name, fresh)
        results.append(result if isinstance(result, tuple) else (result,))
    for first, second in zip(*results, strict=True):
        assert first is second is None or first.equal(second)


@every_op
def test_an_unknown_keyword_is_a_type_error(name):
    given = arguments(name, [3])
    before = snapshot(given)
    with pytest.raises(TypeError, match="transpose_state"):
        call(name, {**given, "transpose_state": True})
    assert all(x.equal(before[key]) for key, x in snapshot(given).items())


@every_op
def test_a_missing_keyword_is_a_type_error(name):
    given = arguments(name, [3])
    given.pop(positional(name)[-1])
    with pytest.raises((TypeError, KeyError)):
        call(name, given)


@pytest.mark.parametrize("cu_seqlens", [[0, 9], [0, 4, 3, 10], [1, 10], [0, 11]], ids=str)
@pytest.mark.parametrize("name", PACKED)
def test_offsets_that_do_not_fit_raise_before_any_write(name, cu_seqlens):
    given = {**CALLS[name](10, len(cu_seqlens) - 1), **offsets(name, cu_seqlens)}
    before = snapshot(given)
    with pytest.raises(ValueError, match=r"cu_seqlens must rise from 0 to the number of tokens \(10\)"):
        call(name, given)
    assert all(x.equal(before[key]) for key, x in snapshot(given).items())


@pytest.mark.parametrize("name", PACKED)
def test_equal_neighbours_are_an_empty_request(name):
    given = {**CALLS[name](10, 3), **offsets(name, [0, 4, 4, 10])}
    before = snapshot(given)
    call(name, given)
    for state in {"state", "conv_state"} & set(given):
        assert given[state][2].equal(before[state, ""][2])
        assert not given[state][1].equal(before[state, ""][1])


@pytest.mark.parametrize("cu_seqlens", [torch.tensor([0.0, 10.0]), torch.tensor([[0, 10]]), torch.tensor(10)], ids=str)
@pytest.mark.parametrize("name", [name for name in PACKED if name != "attention_varlen"])
def test_offsets_of_another_kind_are_refused(name, cu_seqlens):
    given = {**CALLS[name](10, 1), "cu_seqlens": cu_seqlens}
    with pytest.raises(ConfigError, match="cu_seqlens must be a 1-D integer tensor"):
        call(name, given)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]], ids=str)
@every_op
def test_no_tokens_are_fine(name, lengths):
    given = arguments(name, lengths)
    before = snapshot(given)
    result = call(name, given)
    results = result if isinstance(result, tuple) else (result,)
    assert all(x is None or 0 in x.shape for x in results)
    assert all(x.equal(before[key]) for key, x in snapshot(given).items())


def test_no_tokens_are_fine_for_packed_experts():
    given = runner(0, 0, packed=True)
    assert call("experts", given).shape == (0, 32)


@pytest.mark.parametrize("name", ["short_conv", "kda_chunk", "kda_recurrent", "kda_mixer"])
def test_empty_saves_are_no_saves(name):
    given = arguments(name, [5, 1])
    given["saves"] = StateSaves((), (), torch.zeros(0, dtype=torch.int32))
    before = snapshot(given)
    call(name, given)
    for state in {"state", "conv_state"} & set(given):
        assert given[state][3:].equal(before[state, ""][3:])


@pytest.mark.parametrize(
    ("missing", "message"), [("slots", "must be given together"), ("state", "must be given together")]
)
@pytest.mark.parametrize("name", ["kda_chunk", "kda_recurrent", "kda_mixer"])
def test_a_pool_needs_slots_and_slots_a_pool(name, missing, message):
    given = arguments(name, [5, 1])
    given[missing] = None
    before = snapshot(given)
    with pytest.raises(ConfigError, match=message):
        call(name, given)
    assert all(x.equal(before[key]) for key, x in snapshot(given).items())


@pytest.mark.parametrize("name", ["short_conv", "kda_chunk", "kda_recurrent", "kda_mixer"])
def test_as_many_slots_as_requests(name):
    given = arguments(name, [5, 1])
    given["slots"] = torch.tensor([1], dtype=torch.int32)
    with pytest.raises(ConfigError, match="1 slots for 2 requests"):
        call(name, given)


@pytest.mark.parametrize("name", ["short_conv", "kda_chunk", "kda_recurrent", "kda_mixer"])
def test_saves_without_a_pool_are_refused(name):
    given = arguments(name, [5])
    given.update(dict.fromkeys({"state", "conv_state", "slots"} & set(given)))
    given["saves"] = StateSaves((0,), (2,), torch.tensor([3], dtype=torch.int32))
    with pytest.raises(ConfigError, match="saves need a state pool"):
        call(name, given)


@every_op
def test_specs_are_hashable_and_hold_no_tensor(name):
    given = arguments(name, [5, 0, 20])
    spec = ops()[name].spec_of(**given)
    assert hash(spec) == hash(ops()[name].spec_of(**given))
    assert spec.deterministic is False
    assert not any(isinstance(getattr(spec, f.name), torch.Tensor) for f in dataclasses.fields(spec))


@every_op
def test_calls_are_observed(name):
    seen = []
    with observe(lambda *event: seen.append(event)):
        call(name, arguments(name, [5]))
    assert name in [op for op, _, _ in seen]
    assert all(impl in [i.name for i in ops()[op].implementations()] for op, _, impl in seen)


@every_op
def test_docstring_says_what_is_updated_in_place(name):
    doc = ops()[name].__doc__
    first = doc.split("\n\n")[0]
    for argument in IN_PLACE & set(positional(name) + ops()[name].reference.__code__.co_varnames):
        assert "in place" in first, f"{name} updates {argument}"
