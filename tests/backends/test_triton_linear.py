"""Products of few tokens in Triton against fp64: odd widths, strides, parts of the input width, the same bits twice.

Shapes: T tokens, K input width, N output width.
"""

import pytest
import torch

from k3lib import ops
from k3lib.backends.triton import linear_kernels as kernels
from k3lib.errors import ConfigError
from k3lib.ops import LinearSpec, linear
from k3lib.testing import assert_close, tolerance

triton_linear = next(impl for impl in linear.implementations() if impl.name == "triton")
on_gpu = torch.cuda.is_available()
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (F16, BF16) if on_gpu else (F32, F16)
# small tiles, so that a little is enough for several programs, steps and parts
ONE = kernels.One(elements=256, width=32, programs=2)
FEW = kernels.Few(rows=16, columns=16, programs=12, parts=3)


def case(tokens, width, outputs, device, dtype=F32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(tokens, width, generator=generator), torch.randn(outputs, width, generator=generator)
    return x.to(device, dtype), (width**-0.5 * weight).to(device, dtype)


def check(x, weight, got):
    want = x.double() @ weight.double().t()
    assert got.dtype == x.dtype
    assert_close("y", want.to(x.dtype), got, tolerance("linear", x.dtype))
    return got


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "outputs"), [(32, 16), (200, 70), (3, 1)])
@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_matches_fp64(tokens, width, outputs, dtype, device):
    x, weight = case(tokens, width, outputs, device, dtype)
    check(x, weight, triton_linear.run(x, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "outputs"), [(96, 50), (100, 33)])
def test_one_token_in_several_programs_and_steps(width, outputs, dtype, device):
    x, weight = case(1, width, outputs, device, dtype)
    check(x, weight, kernels.launch_linear(x, weight, config=ONE))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "outputs", "parts"), [(96, 40, 3), (100, 33, 3), (32, 20, 1), (16, 200, 1)])
def test_parts_of_the_input_width(width, outputs, parts, dtype, device):
    x, weight = case(3, width, outputs, device, dtype)
    assert kernels.plan_few(outputs, width, FEW)[0] == parts
    first = check(x, weight, kernels.launch_linear(x, weight, config=FEW))
    # the tickets are as they were
    assert kernels.launch_linear(x, weight, config=FEW).equal(first)


@pytest.mark.parametrize("tokens", [1, 3])
def test_short_widths_and_many_tiles(tokens, device, monkeypatch):
    monkeypatch.setattr(kernels, "SHORT_TILES", 2)
    monkeypatch.setattr(kernels, "WIDE_FROM", 3)
    for outputs in (40, 100, 150):
        x, weight = case(tokens, 40, outputs, device, DTYPES[0])
        check(x, weight, triton_linear.run(x, weight))


def test_rows_far_apart_and_what_stands_between_them(device):
    x, weight = case(6, 32, 24, device, DTYPES[0])
    for tokens in (1, 6):
        wide = torch.full((tokens, 50), torch.nan, device=device, dtype=x.dtype)
        wide[:, 7:39] = x[:tokens]
        wider = torch.full((24, 40), torch.nan, device=device, dtype=x.dtype)
        wider[:, :32] = weight
        check(x[:tokens], weight, triton_linear.run(wide[:, 7:39], wider[:, :32]))


def test_other_axes_and_layouts(device):
    x, weight = case(6, 32, 24, device, DTYPES[0])
    want = check(x, weight, triton_linear.run(x, weight))
    assert triton_linear.run(x.view(2, 3, 32), weight).equal(want.view(2, 3, 24))
    assert triton_linear.run(x.t().contiguous().t(), weight.t().contiguous().t()).equal(want)
    assert triton_linear.run(x[0], weight).equal(triton_linear.run(x[:1], weight)[0])


def test_float32_results_of_narrow_operands(device):
    for tokens in (1, 4):
        x, weight = case(tokens, 64, 24, device, F16)
        got = kernels.launch_linear(x, weight, out_dtype=F32)
        assert got.dtype == F32
        assert_close("y", x.double() @ weight.double().t(), got.double(), 1e-5)


def test_infinities_stay_where_they_are(device):
    x, weight = case(3, 32, 20, device)
    weight[4] = torch.inf
    x[1] = torch.nan
    got = triton_linear.run(x.abs(), weight)
    assert got[0, 4] == torch.inf
    assert got[1].isnan().all()
    assert got[[0, 2]][:, :4].isfinite().all()


def test_no_tokens(device):
    x, weight = case(0, 32, 20, device)
    assert triton_linear.run(x, weight).shape == (0, 20)


def test_refuses_what_does_not_fit(device):
    x, weight = case(65, 32, 20, device)
    with pytest.raises(ConfigError, match=r"x \(65, 31\) does not fit weight \(20, 32\)"):
        triton_linear.run(x[:, :31], weight)
    with pytest.raises(ConfigError, match=r"x \(65, 31\) does not fit weight \(20, 32\)"):
        linear(x[:, :31], weight)
    with pytest.raises(ConfigError, match="at most 64 tokens, got 65"):
        triton_linear.run(x, weight)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"tokens": "many"}, "needs at most 64 tokens, got more"),
        ({"weight_dtype": F32}, "needs x and weight in bfloat16 or both in float16, got torch.bfloat16 and"),
        ({"dtype": F32, "weight_dtype": F32}, "got torch.float32 and torch.float32"),
        ({"records": True}, "needs that no gradients are recorded"),
    ],
)
def test_declines_with_a_reason(facts, reason):
    spec = {"dtype": BF16, "weight_dtype": BF16, "tokens": "1", **facts}
    assert reason in triton_linear.supports(LinearSpec(**spec))


@pytest.mark.parametrize(("tokens", "kind"), [(0, "few"), (1, "1"), (64, "few"), (65, "many")])
def test_tokens_are_counted_over_all_axes(tokens, kind):
    weight = torch.zeros(3, 4)
    assert LinearSpec.of(torch.zeros(tokens, 4), weight).tokens == kind
    assert LinearSpec.of(torch.zeros(1, tokens, 4), weight).tokens == kind
    assert LinearSpec.of(torch.zeros(4), weight).tokens == "1"


def test_what_records_gradients_is_left_to_torch(device):
    weight = torch.zeros(3, 4, device=device, requires_grad=True)
    assert LinearSpec.of(torch.zeros(1, 4, device=device), weight).records
    with torch.no_grad():
        assert not LinearSpec.of(torch.zeros(1, 4, device=device), weight).records
    assert linear(torch.ones(1, 4, device=device), weight).requires_grad


@pytest.mark.skipif(not on_gpu, reason="needs a GPU")
@pytest.mark.parametrize("tokens", [1, 2, 16, 33, 64])
@pytest.mark.parametrize(
    ("width", "outputs"), [(7168, 3584), (3584, 7168), (7168, 3216), (768, 7168), (7168, 768), (384, 7168), (128, 768)]
)
def test_real_widths_and_a_captured_graph(tokens, width, outputs, device):
    x, weight = case(tokens, width, outputs, device, BF16)
    want = check(x, weight, ops.linear(x, weight))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = triton_linear.run(x, weight)
    for _ in range(3):
        got.zero_()
        graph.replay()
        assert want.equal(got)
