"""SiTU, norms, merge, store and gather in Triton against the reference.

Shapes: T tokens, H heads, D width.
"""

import pytest
import torch

from k3lib.backends.triton.pointwise import (
    gated_rms_norm_triton,
    gather_rows_triton,
    merge_partials_triton,
    rms_norm_triton,
    situ_and_mul_triton,
    store_rows_triton,
)
from k3lib.errors import ConfigError
from k3lib.ops import gated_rms_norm, gather_rows, merge_partials, rms_norm, situ_and_mul, store_rows
from k3lib.testing import assert_close, tolerance

CUDA = torch.cuda.is_available()
F32 = torch.float32
DTYPES = [F32, torch.float16, *([torch.bfloat16] if CUDA else [])]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def draw(device, *shape, dtype=F32, scale=1.0):
    return (torch.randn(*shape) * scale).to(dtype).to(device)


@every_dtype
@pytest.mark.parametrize("linear_beta", [25.0, None])
@pytest.mark.parametrize("width", [13, 96, *([384] if CUDA else [])])
def test_situ(device, width, linear_beta, dtype):
    x = draw(device, 3, 2, 2 * width, dtype=dtype, scale=3)
    want = situ_and_mul.reference(x.double(), beta=4.0, linear_beta=linear_beta)
    got = situ_and_mul_triton(x, beta=4.0, linear_beta=linear_beta)
    assert got.dtype == dtype
    assert_close("out", want, got, tolerance("situ_and_mul", dtype))


@every_dtype
@pytest.mark.parametrize("scale", [5e-3, 300.0])
def test_situ_of_tiny_and_huge_values(device, scale, dtype):
    x = draw(
        device, 4, 64, dtype=dtype, scale=scale * 10 if dtype == torch.float16 else scale
    )  # else subnormal results
    want = situ_and_mul.reference(x.double(), beta=4.0, linear_beta=25.0)
    got = situ_and_mul_triton(x, beta=4.0, linear_beta=25.0)
    assert_close("out", want, got, tolerance("situ_and_mul", dtype))
    top = torch.finfo(dtype).max
    ends = torch.tensor([[top, -top, 0.0, top, top, -top]], dtype=dtype).to(device)
    assert situ_and_mul_triton(ends, beta=4.0, linear_beta=25.0).flatten().tolist() == [100.0, 0.0, 0.0]


@every_dtype
@pytest.mark.parametrize("width", [5, 48, *([512, 7168] if CUDA else [])])
def test_rms_norm(device, width, dtype):
    x = draw(device, 5, 3, width, dtype=dtype)
    for weight_dtype in {dtype, F32}:
        weight = draw(device, width, dtype=weight_dtype)
        want = rms_norm.reference(x.float(), weight.float(), eps=1e-5)
        got = rms_norm_triton(x, weight, eps=1e-5)
        assert got.dtype == dtype
        assert_close("out", want, got, tolerance("rms_norm", dtype))
        # rounded before the weight, as the definition says
        assert_close("bits", rms_norm.reference(x, weight, eps=1e-5), got, tolerance("rms_norm", dtype) / 4)


def test_rms_norm_of_a_part_of_a_projection(device):
    x = draw(device, 5, 40)[:, 3:20]
    weight = draw(device, 17)
    assert_close("out", rms_norm.reference(x, weight, eps=1e-5), rms_norm_triton(x, weight, eps=1e-5), 1e-6)


@every_dtype
@pytest.mark.parametrize("width", [6, 48, *([128] if CUDA else [])])
def test_gated_rms_norm(device, width, dtype):
    x, weight = draw(device, 5, 3, width), draw(device, width)
    gate = draw(device, 5, 3 * width + 4, dtype=dtype)[:, 4:].view(5, 3, width)
    want = gated_rms_norm.reference(x, gate.float(), weight, eps=1e-5)
    got = gated_rms_norm_triton(x, gate, weight, eps=1e-5)
    assert got.dtype == dtype
    assert_close("out", want, got, tolerance("gated_rms_norm", dtype))
    flat = gated_rms_norm_triton(x[:, 0], gate[:, 0], weight, eps=1e-5)
    assert_close("rows", want[:, 0], flat, tolerance("gated_rms_norm", dtype))


@every_dtype
def test_merge(device, dtype):
    outs, lses = draw(device, 3, 5, 2, 12, dtype=dtype), draw(device, 3, 5, 2, scale=10)
    lses[0, 1], outs[0, 1] = -torch.inf, torch.nan  # contributes nothing, whatever it holds
    lses[:, 2, 0] = -torch.inf
    lses[:, 3] = 1e4
    want, want_lse = merge_partials.reference(outs.float(), lses)
    got, lse = merge_partials_triton(outs, lses)
    assert got.dtype == dtype
    assert lse.dtype == F32
    assert_close("out", want, got, tolerance("merge_partials", dtype))
    assert_close("lse", want_lse, lse, tolerance("merge_partials", F32))
    assert got[2, 0].eq(0).all()


PAGE_DTYPES = [F32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]


def as_bytes(x):
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("page_dtype", PAGE_DTYPES, ids=str)
@pytest.mark.parametrize("width", [12, *([576] if CUDA else [])])
def test_store_and_gather(device, width, page_dtype):
    pages = draw(device, 5, 4, width).to(page_dtype)
    values = draw(device, 7, width + 3)[:, :width] * 300
    if not CUDA:  # the interpreter truncates
        values = values.clamp(-440, 440).to(page_dtype).float()
    values[0, :4] = torch.tensor([torch.inf, -torch.inf, 0.0, 2.0**-9])
    rows = torch.tensor([3, 0, -1, 7, 19, 8, -100]).to(device)
    want, got = pages.clone(), pages.clone()
    store_rows.reference(values, want, rows)
    assert store_rows_triton(values, got, rows) is None
    assert as_bytes(got).equal(as_bytes(want))
    again = gather_rows_triton(got, rows)
    assert again.dtype == page_dtype
    assert as_bytes(again).equal(as_bytes(gather_rows.reference(want, rows)))


@pytest.mark.skipif(not CUDA, reason="the interpreter has its own NaN of this format")
def test_fp8_keeps_nan(device):
    pages = torch.zeros(2, 4, 16, device=device).to(torch.float8_e4m3fn)
    store_rows_triton(torch.full((1, 16), torch.nan, device=device), pages, torch.tensor([5], device=device))
    assert pages.float()[1, 1].isnan().all()


def test_rows_past_the_end_are_harmless(device):
    pages = draw(device, 3, 4, 8)
    before = pages.clone()
    rows = torch.tensor([12, 10**12]).to(device)
    store_rows_triton(draw(device, 2, 8), pages, rows)
    assert pages.equal(before)
    assert gather_rows_triton(pages, rows).equal(pages[0, :1].expand(2, -1))


def test_calls_without_rows(device):
    empty = torch.empty(0, dtype=torch.int64, device=device)
    pages, weight = draw(device, 2, 4, 8), draw(device, 8)
    assert situ_and_mul_triton(draw(device, 0, 8), beta=4.0, linear_beta=25.0).shape == (0, 4)
    assert rms_norm_triton(draw(device, 0, 8), weight, eps=1e-5).shape == (0, 8)
    assert gated_rms_norm_triton(draw(device, 0, 2, 8), draw(device, 0, 2, 8), weight, eps=1e-5).shape == (0, 2, 8)
    out, lse = merge_partials_triton(draw(device, 2, 0, 3, 8), draw(device, 2, 0, 3))
    assert (out.shape, lse.shape) == ((0, 3, 8), (0, 3))
    store_rows_triton(draw(device, 0, 8), pages, empty)
    assert gather_rows_triton(pages, empty).shape == (0, 8)


def test_refuses_what_does_not_fit(device):
    x, pages, rows = draw(device, 4, 8), draw(device, 2, 4, 8), torch.tensor([1, 2, 3, 4]).to(device)
    for call, message in [
        (lambda: situ_and_mul_triton(x[:, 1:], beta=4.0, linear_beta=25.0), "even last axis"),
        (lambda: rms_norm_triton(x, x[0, 1:], eps=1e-5), "weight has shape"),
        (lambda: gated_rms_norm_triton(x, x[1:], x[0], eps=1e-5), "gate has shape"),
        (lambda: merge_partials_triton(draw(device, 2, 3, 1, 4), draw(device, 2, 3, 2)), "do not fit outs"),
        (lambda: store_rows_triton(x[:, 1:], pages, rows), "do not fit pages"),
        (lambda: store_rows_triton(x, pages.mT.contiguous().mT, rows), "expected contiguous pages"),
        (lambda: gather_rows_triton(pages.mT.contiguous().mT, rows), "expected contiguous pages"),
    ]:
        with pytest.raises(ConfigError, match=message):
            call()
