"""The router in Triton against the reference and against fp64: ties, replay, scales, many tokens.

Shapes: T tokens, D hidden size, E experts, k experts a token.
"""

import pytest
import torch

from k3lib.backends.triton import route_kernels
from k3lib.errors import ConfigError
from k3lib.ops import RouteSpec, route
from k3lib.testing import assert_close

triton_route = next(impl for impl in route.implementations() if impl.name == "triton")
on_gpu = torch.cuda.is_available()
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (F32, F16, BF16) if on_gpu else (F32, F16)


def case(tokens, device, dtype=F32, hidden=72, count=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(tokens, hidden, generator=generator), torch.randn(count, hidden, generator=generator)
    bias = torch.randn(count, generator=generator)
    return x.to(device, dtype), (0.2 * weight).to(device, dtype), bias.to(device)


def check(x, weight, bias, *, top_k=4, renormalize=True, scale=1.0, ids=None):
    """The chosen have the largest biased scores in fp64, best first, and their weights are those of fp64."""
    got = triton_route.run(x, weight, bias, top_k=top_k, renormalize=renormalize, scale=scale, ids=ids)
    assert (got.ids.dtype, got.weights.dtype) == (torch.int32, F32)
    scores = torch.sigmoid(x.double() @ weight.double().t())
    if ids is None:
        biased = scores + bias.double()
        chosen = biased.gather(1, got.ids.long())
        assert (chosen - biased.topk(top_k).values).abs().max() < 2e-6
        assert all(len(set(row)) == top_k for row in got.ids.tolist())
    else:
        assert got.ids.equal(ids)
    want = scores.gather(1, got.ids.long())
    if renormalize and want.shape[1] > 1:
        want = want / want.sum(1, keepdim=True)
    assert_close("weights", want * scale, got.weights, 1e-5)
    return got


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(("renormalize", "scale"), [(True, 1.0), (False, 2.5)])
def test_matches_fp64(renormalize, scale, tokens, dtype, device):
    check(*case(tokens, device, dtype), renormalize=renormalize, scale=scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_more_tokens_than_the_split_product_takes(dtype, device, monkeypatch):
    monkeypatch.setattr(route_kernels, "SPLIT_TOKENS", 2)
    check(*case(5, device, dtype))


@pytest.mark.parametrize("top_k", [1, 3, 40])
def test_any_number_of_experts_a_token(top_k, device):
    check(*case(3, device), top_k=top_k)


def test_ties_go_to_the_lowest_id_and_zero_has_no_sign(device):
    x, weight, bias = torch.zeros(3, 16, device=device), torch.randn(20, 16, device=device), torch.full((20,), -0.5)
    got = triton_route.run(x, weight, bias.to(device), top_k=4, renormalize=True, scale=1.0)
    assert got.ids.tolist() == [[0, 1, 2, 3]] * 3
    bias[9] = 1.0
    got = triton_route.run(x, weight, bias.to(device), top_k=4, renormalize=True, scale=1.0)
    assert got.ids.tolist() == [[9, 0, 1, 2]] * 3


def test_negative_and_huge_biases(device):
    x, weight, bias = case(4, device)
    check(x, weight, bias - 100, top_k=40)
    bias[3], bias[5] = torch.inf, -torch.inf
    got = triton_route.run(x, weight, bias, top_k=40, renormalize=True, scale=1.0)
    assert (got.ids[:, 0] == 3).all()
    assert (got.ids[:, -1] == 5).all()


def test_replays_given_experts(device):
    ids = torch.tensor([[1, 7, 7], [39, 0, 2]], dtype=torch.int32, device=device)
    check(*case(2, device), top_k=4, ids=ids)
    assert triton_route.run(*case(2, device), top_k=4, renormalize=True, scale=1.0, ids=ids.long()).ids.equal(ids)


def test_a_bfloat16_bias_and_mixed_dtypes(device):
    x, weight, bias = case(3, device, F16)
    want = triton_route.run(x.float(), weight.float(), bias.half().float(), top_k=4, renormalize=True, scale=1.0)
    got = triton_route.run(x, weight.float(), bias.half(), top_k=4, renormalize=True, scale=1.0)
    assert want.ids.equal(got.ids)
    assert_close("weights", want.weights, got.weights, 1e-6)


def test_no_tokens(device):
    got = triton_route.run(*case(0, device), top_k=4, renormalize=True, scale=1.0)
    assert got.ids.shape == got.weights.shape == (0, 4)


def test_the_result_is_the_same_twice(device):
    arguments = case(9, device, DTYPES[-1])
    first, second = (triton_route.run(*arguments, top_k=4, renormalize=True, scale=1.0) for _ in range(2))
    assert first.ids.equal(second.ids)
    assert first.weights.equal(second.weights)


def test_the_invariant_one_agrees(device):
    arguments, options = case(3, device), {"top_k": 4, "renormalize": True, "scale": 1.0}
    invariant = next(impl for impl in route.implementations() if impl.name == "triton_invariant")
    assert invariant.deterministic
    want, got = triton_route.run(*arguments, **options), invariant.run(*arguments, **options)
    assert want.ids.equal(got.ids)
    assert_close("weights", want.weights, got.weights, 1e-5)


def test_refuses_what_does_not_fit(device):
    x, weight, bias = case(3, device)
    with pytest.raises(ConfigError, match="route: x"):
        triton_route.run(x[:, :8], weight, bias, top_k=4, renormalize=True, scale=1.0)
    with pytest.raises(ConfigError, match="top_k=41 of 40 experts"):
        triton_route.run(x, weight, bias, top_k=41, renormalize=True, scale=1.0)
    ids = torch.zeros(2, 4, dtype=torch.int32, device=device)
    with pytest.raises(ConfigError, match="for 3 tokens"):
        triton_route.run(x, weight, bias, top_k=4, renormalize=True, scale=1.0, ids=ids)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"num_groups": 8}, "needs one group, got 8"),
        ({"dtype": torch.float64}, "needs bfloat16, float16 or float32, got torch.float64"),
        ({"experts": 8192}, "needs at most 4096 experts, got 8192"),
    ],
)
def test_declines_with_a_reason(facts, reason):
    spec = {"experts": 40, "top_k": 4, "num_groups": 1, "dtype": BF16, **facts}
    assert triton_route.supports(RouteSpec(**spec)) == reason


@pytest.mark.skipif(not on_gpu, reason="needs a GPU")
@pytest.mark.parametrize("tokens", [1, 33, 64, 500])
def test_real_widths_and_a_captured_graph(tokens, device):
    x, weight, bias = case(tokens, device, BF16, hidden=7168, count=896)
    weight *= 0.1
    options = {"top_k": 16, "renormalize": True, "scale": 1.0}
    want = check(x, weight, bias, top_k=16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = triton_route.run(x, weight, bias, **options)
    graph.replay()
    assert want.ids.equal(got.ids)
    assert want.weights.equal(got.weights)
