"""SiTU, norms, the merge of partial attentions, and the paged store and gather: kernels.

Each reads its inputs once and writes its output once; rows lie in the registers of a program. Bound: memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.interpreter import InterpretedFunction

from k3lib.backends.triton.launch import launch_options

SITU = (4096, 8)  # elements a program, warps; H200, 2026-11-30
ROW_ELEMENTS = 4096  # of a program that takes several rows
FP8_MAX = tl.constexpr(448.0)  # largest float8_e4m3fn


@triton.jit
def _tanh(x):
    """Exact to fp32 rounding for all x: a series near zero, where the quotient would cancel."""
    y = tl.abs(x)
    t = tl.exp(-2.0 * y)
    far = (1.0 - t) / (1.0 + t)
    z = x * x
    near = y * (1.0 + z * (-1.0 / 3 + z * (2.0 / 15 + z * (-17.0 / 315 + z * (62.0 / 2835)))))
    y = tl.where(y < 0.25, near, far)
    return tl.where(x < 0, -y, y)


@triton.jit
def _tanh_fast(x):
    """The hardware's: relative error 2^-11."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit(do_not_specialize=["rows"])
def _situ_kernel(
    x, out, rows, x_stride, beta, linear_beta, inverse_beta, inverse_linear,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, CAPPED: tl.constexpr, FAST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = i // WIDTH
    inside = row < rows
    where = x + row * x_stride + i % WIDTH
    gate = tl.load(where, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(where + WIDTH, mask=inside, other=0.0).to(tl.float32)
    if FAST:
        capped = beta * _tanh_fast(gate * inverse_beta)
        if CAPPED:
            up = linear_beta * _tanh_fast(up * inverse_linear)
    else:
        capped = beta * _tanh(gate / beta)
        if CAPPED:
            up = linear_beta * _tanh(up / linear_beta)
    y = capped * tl.sigmoid(gate) * up
    tl.store(out + i, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x, weight, out, rows, x_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    wide = value.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)
    y = (wide * inverse[:, None]).to(value.dtype).to(tl.float32) * scale[None, :]
    tl.store(out + row[:, None] * WIDTH + column[None, :], y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _gated_rms_norm_kernel(
    x, gate, weight, out, rows, x_outer, x_inner, gate_outer, gate_inner, eps,
    INNER: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    outer, inner = row // INNER, row % INNER
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    x_rows = x + outer * x_outer + inner * x_inner
    gate_rows = gate + outer * gate_outer + inner * gate_inner
    value = tl.load(x_rows[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    logit = tl.load(gate_rows[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)
    y = value * inverse[:, None] * scale[None, :] * tl.sigmoid(logit)
    tl.store(out + row[:, None] * WIDTH + column[None, :], y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["parts", "rows"])
def _merge_kernel(
    outs, lses, out, lse_out, parts, rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    row_in = row < rows
    inside = row_in[:, None] & (column < WIDTH)[None, :]
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mix = tl.zeros((ROWS, BLOCK), tl.float32)
    part = 0
    while part < parts:
        at = row + rows.to(tl.int64) * part
        lse = tl.load(lses + at, mask=row_in, other=float("-inf")).to(tl.float32)
        counts = lse != float("-inf")
        value = tl.load(outs + at[:, None] * WIDTH + column[None, :], mask=inside & counts[:, None], other=0.0)
        higher = tl.maximum(top, lse)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        old, new = tl.exp(top - shift), tl.exp(lse - shift)
        total = total * old + new
        mix = mix * old[:, None] + new[:, None] * value.to(tl.float32)
        top = higher
        part += 1
    mix = mix / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + row[:, None] * WIDTH + column[None, :], mix.to(out.dtype.element_ty), mask=inside)
    tl.store(lse_out + row, tl.where(total == 0.0, float("-inf"), top + tl.log(total)), mask=row_in)


@triton.jit(
    do_not_specialize=["count", "num_rows"],
    do_not_specialize_on_alignment=["rows"],
)
def _store_rows_kernel(
    values, pages, rows, count, num_rows, values_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, FP8: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    row = tl.load(rows + i, mask=i < count, other=0).to(tl.int64)
    inside = ((row > 0) & (row < num_rows))[:, None] & (column < WIDTH)[None, :]
    value = tl.load(values + i.to(tl.int64)[:, None] * values_stride + column[None, :], mask=inside, other=0.0)
    where = pages + row[:, None] * WIDTH + column[None, :]
    if FP8:
        wide = value.to(tl.float32)
        wide = tl.where(wide > FP8_MAX, FP8_MAX, tl.where(wide < -FP8_MAX, -FP8_MAX, wide))
        bits = wide.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        tl.store(where, tl.where(wide == wide, bits, 0x7F), mask=inside)
    else:
        tl.store(where, value.to(pages.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=["count", "num_rows"],
    do_not_specialize_on_alignment=["rows"],
)
def _gather_rows_kernel(
    pages, rows, out, count, num_rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    row = tl.load(rows + i, mask=i < count, other=0).to(tl.int64)
    row = tl.where((row > 0) & (row < num_rows), row, 0)
    inside = (i < count)[:, None] & (column < WIDTH)[None, :]
    value = tl.load(pages + row[:, None] * WIDTH + column[None, :], mask=inside, other=0)
    tl.store(out + i.to(tl.int64)[:, None] * WIDTH + column[None, :], value, mask=inside)


def _shape(width: int, most: int = 16) -> tuple[int, int, int]:
    """Padded width, rows and warps of a program that holds whole rows."""
    block = triton.next_power_of_2(width)
    rows = max(1, min(most, ROW_ELEMENTS // block))
    return block, rows, 4 if block * rows <= 4096 else 8


def launch_situ(x, beta, linear_beta, config=None):
    """`x [rows, 2F]` with neighbouring values in a row; returns `[rows, F]`."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if out.numel():
        block, warps = config or SITU
        fast = (
            x.dtype == torch.bfloat16
            and torch.version.hip is None
            and not isinstance(_situ_kernel, InterpretedFunction)
        )
        capped = linear_beta is not None
        cap = linear_beta if capped else 1.0
        _situ_kernel[(triton.cdiv(out.numel(), block),)](
            x, out, rows, x.stride(0), beta, cap, 1 / beta, 1 / cap,
            WIDTH=width, BLOCK=block, CAPPED=capped, FAST=fast, **launch_options(x.device, warps),
        )  # fmt: skip
    return out


def launch_rms_norm(x, weight, eps):
    """`x [rows, D]` with neighbouring values in a row."""
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if out.numel():
        block, several, warps = _shape(width)
        _rms_norm_kernel[(triton.cdiv(rows, several),)](
            x,
            weight,
            out,
            rows,
            x.stride(0),
            eps,
            WIDTH=width,
            BLOCK=block,
            ROWS=several,
            **launch_options(x.device, warps),
        )
    return out


def launch_gated_rms_norm(x, gate, weight, eps):
    """`x`, `gate` `[outer, inner, V]` with neighbouring values in a row."""
    outer, inner, width = x.shape
    out = torch.empty(outer, inner, width, dtype=gate.dtype, device=x.device)
    if out.numel():
        block, several, warps = _shape(width)
        _gated_rms_norm_kernel[(triton.cdiv(outer * inner, several),)](
            x, gate, weight, out, outer * inner, x.stride(0), x.stride(1), gate.stride(0), gate.stride(1), eps,
            INNER=inner, WIDTH=width, BLOCK=block, ROWS=several, **launch_options(x.device, warps),
        )  # fmt: skip
    return out


def launch_merge(outs, lses):
    """`outs [P, rows, D]`, `lses [P, rows]`, contiguous."""
    parts, rows, width = outs.shape
    out = torch.empty(rows, width, dtype=outs.dtype, device=outs.device)
    lse = torch.empty(rows, dtype=torch.float32, device=outs.device)
    if rows:
        block, several, warps = _shape(width)
        _merge_kernel[(triton.cdiv(rows, several),)](
            outs,
            lses,
            out,
            lse,
            parts,
            rows,
            WIDTH=width,
            BLOCK=block,
            ROWS=several,
            **launch_options(outs.device, warps),
        )
    return out, lse


def launch_store_rows(values, pages, rows):
    """Rows into contiguous pages, in place."""
    count, width = values.shape
    fp8 = pages.dtype == torch.float8_e4m3fn
    block, several, warps = _shape(width, 4)
    _store_rows_kernel[(triton.cdiv(count, several),)](
        values, pages.view(torch.uint8) if fp8 else pages, rows, count, pages.shape[0] * pages.shape[1],
        values.stride(0), WIDTH=width, BLOCK=block, ROWS=several, FP8=fp8, **launch_options(values.device, warps),
    )  # fmt: skip


def launch_gather_rows(pages, rows):
    """Rows out of contiguous pages."""
    count, width = rows.shape[0], pages.shape[2]
    out = torch.empty(count, width, dtype=pages.dtype, device=pages.device)
    if out.numel():
        flat = pages.element_size() == 1
        block, several, warps = _shape(width, 8)
        _gather_rows_kernel[(triton.cdiv(count, several),)](
            pages.view(torch.uint8) if flat else pages, rows, out.view(torch.uint8) if flat else out, count,
            pages.shape[0] * pages.shape[1], WIDTH=width, BLOCK=block, ROWS=several,
            **launch_options(pages.device, warps),
        )  # fmt: skip
    return out
