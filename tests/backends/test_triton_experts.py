"""Routed experts in Triton against the reference: formats, ranges, repeated and foreign ids, empty calls, paths.

Shapes: T tokens, k routes a token, E experts, L width, I intermediate width.
"""

import dataclasses

import pytest
import torch

from k3lib.backends.triton import experts_kernels
from k3lib.backends.triton.experts_kernels import Config, Path
from k3lib.config import SiTU
from k3lib.errors import ConfigError
from k3lib.ops import ExpertsSpec, ExpertWeights, experts
from k3lib.ops.quant import mxfp4_encode, nvfp4_encode
from k3lib.testing import assert_close, tolerance

registered = {impl.name: impl for impl in experts.implementations()}
triton_experts = registered["triton"]
on_gpu = torch.cuda.is_available()
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (F32, F16, BF16) if on_gpu else (F32, F16)
FORMATS = ("mxfp4", "nvfp4", "bf16")
SITU = SiTU(beta=4.0, linear_beta=25.0)
needs_gpu = pytest.mark.skipif(not on_gpu, reason="needs a GPU")


def draw(*shape, seed=0, size=1.0):
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pack(w13, w2, fmt, dtype, first_expert=0):
    if fmt == "bf16":
        return ExpertWeights(w13.to(dtype), w2.to(dtype), first_expert=first_expert)
    if fmt == "mxfp4":
        (p13, s13), (p2, s2) = mxfp4_encode(w13), mxfp4_encode(w2)
        return ExpertWeights(p13, p2, s13, s2, format="mxfp4", first_expert=first_expert)
    fields = []
    for w in (w13, w2):
        parts = [nvfp4_encode(each) for each in w]
        scales = torch.stack([part[1].view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
        fields.append((torch.stack([part[0] for part in parts]), scales, torch.stack([part[2] for part in parts])))
    (p13, s13, g13), (p2, s2, g2) = fields
    return ExpertWeights(p13, p2, s13, s2, g13, g2, format="nvfp4", first_expert=first_expert)


def stored(fmt, dtype, device, count=5, width=64, inner=32, size=0.2, first_expert=0):
    weights = pack(
        draw(count, 2 * inner, width, seed=1, size=size), draw(count, width, inner, seed=2, size=size), fmt, dtype,
        first_expert,
    )  # fmt: skip
    weights.to(device)
    return weights


def call(tokens, top_k, dtype, device, count=5, width=64, low=0, seed=3):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(low, count, (tokens, top_k), generator=generator, dtype=torch.int32)
    weights = torch.rand(tokens, top_k, generator=generator)
    return draw(tokens, width, seed=seed + 1).to(device, dtype), ids.to(device), weights.to(device)


def check(x, ids, weights, store, act_fn=SITU):
    got = triton_experts.run(x, ids, weights, store, act_fn=act_fn)
    wide = store if store.format != "bf16" else dataclasses.replace(store, w13=store.w13.float(), w2=store.w2.float())
    want = experts.reference(x.float(), ids, weights, wide, act_fn=act_fn)
    assert got.dtype == x.dtype
    ratio = 2e-3 if x.dtype == F16 else tolerance("experts", x.dtype)
    assert_close("experts", want, got, ratio)
    return got


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens", [1, 7])
def test_matches_the_reference(tokens, fmt, dtype, device):
    check(*call(tokens, 3, dtype, device), stored(fmt, dtype, device))


@pytest.mark.parametrize("fmt", FORMATS)
def test_widths_that_no_block_divides(fmt, device):
    store = stored(fmt, F32, device, width=96, inner=96)
    check(*call(3, 2, F32, device, width=96), store)


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize(
    "path",
    [
        Path(1, 16, False, Config(64, 32, 4, 3), Config(64, 32, 4, 3)),
        Path(1, 16, False, Config(64, 16, 4, 3), Config(64, 16, 4, 3, 2), parts=2),
        Path(1, 16, True, Config(64, 16, 4, 3, 2), Config(64, 32, 4, 3, 2)),
        Path(1, 8, False, Config(64, 32, 4, 3), Config(64, 16, 4, 3, 2, 16)),
        Path(1, 8, True, Config(64, 32, 4, 3), Config(64, 16, 4, 3, 2, 16)),
    ],
    ids=["tiles of one route", "parts", "unrolled", "one route in wider products", "narrow tiles in wider products"],
)
def test_launch_forms(path, fmt, device):
    dtype = DTYPES[-1]
    x, ids, weights = call(2, 2, dtype, device, count=3, width=128, low=-1)
    store = stored(fmt, dtype, device, count=2, width=128, inner=128)
    want = experts.reference(x.float(), ids, weights, store, act_fn=SITU)
    ratio = 2e-3 if dtype == F16 else tolerance("experts", dtype)
    assert_close("experts", want, experts_kernels.run(x, ids, weights, store, SITU, path), ratio)


def test_many_tokens_are_computed_in_turns(device, monkeypatch):
    x, ids, weights = call(3, 2, F32, device)
    store = stored("mxfp4", F32, device)
    want = triton_experts.run(x, ids, weights, store, act_fn=SITU)
    monkeypatch.setattr(experts_kernels, "TURN_TOKENS", 2)
    assert_close("experts", want, triton_experts.run(x, ids, weights, store, act_fn=SITU), 1e-6)


def test_an_uncapped_up_half(device):
    check(*call(3, 2, F32, device), stored("mxfp4", F32, device), SiTU(beta=4.0, linear_beta=None))


@pytest.mark.parametrize("size", [1e-4, 40.0])
def test_tiny_and_saturating_activations(size, device):
    x, ids, weights = call(4, 2, F32, device)
    check(x * size, ids, weights, stored("mxfp4", F32, device))


def test_experts_of_other_ranks_contribute_nothing(device):
    x, ids, weights = call(6, 4, F32, device, count=9, low=-2)
    store = stored("mxfp4", F32, device, first_expert=2)
    check(x, ids, weights, store)
    far = torch.full_like(ids, 2**31 - 1)
    assert not triton_experts.run(x, far, weights, store, act_fn=SITU).any()
    assert not triton_experts.run(x, -far, weights, store, act_fn=SITU).any()


@pytest.mark.parametrize("weight", [torch.inf, torch.nan])
def test_weights_of_foreign_experts_are_not_read(weight, device):
    x, ids, weights = call(3, 3, F32, device)
    ids[:, 1], weights[:, 1] = 77, weight
    got = triton_experts.run(x, ids, weights, stored("mxfp4", F32, device), act_fn=SITU)
    assert got.isfinite().all()


def test_one_expert_for_all_tokens_and_repeated_ids(device):
    x, ids, weights = call(20, 3, F32, device)
    check(x, torch.full_like(ids, 4), weights, stored("mxfp4", F32, device))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_no_routes(shape, device):
    x, ids, weights = call(*shape, F32, device)
    got = triton_experts.run(x, ids, weights, stored("mxfp4", F32, device), act_fn=SITU)
    assert got.shape == x.shape
    assert not got.any()


def test_the_result_is_the_same_twice_and_inputs_stay(device):
    dtype = DTYPES[-1]
    arguments, store = call(8, 3, dtype, device), stored("mxfp4", dtype, device)
    before = [a.clone() for a in arguments]
    first = triton_experts.run(*arguments, store, act_fn=SITU)
    assert first.equal(triton_experts.run(*arguments, store, act_fn=SITU))
    assert all(a.equal(b) for a, b in zip(arguments, before, strict=True))


def test_strided_inputs(device):
    x, ids, weights = call(3, 2, F32, device)
    store = stored("mxfp4", F32, device)
    want = triton_experts.run(x, ids, weights, store, act_fn=SITU)
    wide = [torch.stack([a, a], dim=-1)[..., 0] for a in (x, ids, weights)]
    assert want.equal(triton_experts.run(*wide, store, act_fn=SITU))


@pytest.mark.parametrize("exponent", [70, 126, 140])
def test_scales_far_from_one(exponent, device):
    store = stored("mxfp4", DTYPES[-1], device)
    shift = exponent - int(store.w13_scale.float().median())
    for scale in (store.w13_scale, store.w2_scale):
        scale.copy_((scale.int() + shift).clamp(1, 200).to(torch.uint8))
    if DTYPES[-1] == F16:
        pytest.skip("float16 has no room for such weights")
    check(*call(4, 2, DTYPES[-1], device), store)


def test_refuses_what_does_not_fit(device):
    x, ids, weights = call(4, 3, F32, device)
    store = stored("mxfp4", F32, device)
    with pytest.raises(ConfigError, match="do not fit experts of width 64"):
        triton_experts.run(x[:, :32], ids, weights, store, act_fn=SITU)
    with pytest.raises(ConfigError, match="ids must be int32"):
        triton_experts.run(x, ids.long(), weights, store, act_fn=SITU)
    store.w13_scale = store.w13_scale[:, :, :1]
    with pytest.raises(ConfigError, match="w13_scale must have shape"):
        triton_experts.run(x, ids, weights, store, act_fn=SITU)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"activations": torch.float64}, "needs bfloat16, float16 or float32, got torch.float64"),
        ({"offloaded": True}, "needs all experts resident, got experts that are read when they are chosen"),
        ({"intermediate": 48}, "needs widths that are multiples of 32, got 64 and 48"),
    ],
)
def test_declines_with_a_reason(change, reason):
    spec = ExpertsSpec(experts=5, top_k=3, hidden=64, intermediate=32, weights="mxfp4", activations=BF16)
    assert triton_experts.supports(dataclasses.replace(spec, **change)) == reason


@needs_gpu
@pytest.mark.parametrize("tokens", [1, 9, 65, 1500])
@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_real_widths(fmt, tokens, device):
    store = stored(fmt, BF16, device, count=32, width=3584, inner=384, size=0.02)
    check(*call(tokens, 16, BF16, device, count=34, width=3584, low=-1), store)


@needs_gpu
@pytest.mark.parametrize("tokens", [1, 300])
def test_a_captured_graph_follows_its_inputs(tokens, device):
    store = stored("mxfp4", BF16, device, count=32)
    x, ids, weights = call(tokens, 4, BF16, device, count=32)
    triton_experts.run(x, ids, weights, store, act_fn=SITU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = triton_experts.run(x, ids, weights, store, act_fn=SITU)
    for seed in (5, 6):
        for kept, fresh in zip((x, ids, weights), call(tokens, 4, BF16, device, count=32, seed=seed), strict=True):
            kept.copy_(fresh)
        graph.replay()
        assert out.equal(check(x, ids, weights, store))


@needs_gpu
def test_a_result_does_not_depend_on_the_other_tokens(device):
    store = stored("mxfp4", BF16, device, count=32, width=3584, inner=384, size=0.02)
    x, ids, weights = call(700, 16, BF16, device, count=32, width=3584)
    invariant = registered["triton_invariant"]
    assert invariant.deterministic
    whole = invariant.run(x, ids, weights, store, act_fn=SITU)
    for begin, end in ((3, 4), (100, 107), (50, 250)):
        some = (a[begin:end].contiguous() for a in (x, ids, weights))
        assert whole[begin:end].equal(invariant.run(*some, store, act_fn=SITU))
