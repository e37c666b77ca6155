"""Products of few tokens with a weight that is read once.

Shapes: T tokens, K input width, N output width.

One token: a program multiplies some rows of the weight with the token, all of K, in fp32 lanes that are added at the
end. Up to 64 tokens, or a short K: tiles of 64 rows on tensor cores, the weight as the left operand, K cut into parts
where N alone would leave processors idle. The last program of a tile to end adds the parts in their order, so results
are the same bits every time. Expected bound: memory; measured, about 3 µs come on top.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from k3lib.backends.triton.launch import launch_options

TICKETS = 256  # most tiles whose K is cut
_STREAMS = 64  # that have tickets of their own


class One(NamedTuple):
    """For one token: elements of the weight a step, the widest piece of K among them, programs that are aimed at."""

    elements: int = 4096
    width: int = 1024
    programs: int = 256
    warps: int = 4
    stages: int = 3


class Few(NamedTuple):
    """For several tokens: rows and columns of the weight a step, programs that are aimed at, and most parts of K."""

    rows: int = 64
    columns: int = 128
    programs: int = 132
    parts: int = 8
    warps: int = 4
    stages: int = 4


# H200, 2026-11-30. Several tokens by their padded number: if one program a processor is enough, with more in flight
ONE = One()
FEW = {16: Few(stages=6), 32: Few(stages=6), 64: Few(stages=5)}
WIDE = {16: Few(), 32: Few(), 64: Few(columns=64, stages=5)}
WIDE_FROM = 133  # tiles
SHORT = 1024  # up to this K one token, too, goes to the tensor cores, if there is work for many processors
SHORT_TILES = 32


@triton.jit
def _one_kernel(
    x_ptr, w_ptr, out_ptr, outs, width, w_stride,
    ROWS: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`out[n] = w[n] · x` of ROWS rows."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, K)
    w_ptrs = w_ptr + tl.minimum(rows, outs - 1).to(tl.int64)[:, None] * w_stride + k[None, :]
    acc = tl.zeros((ROWS, K), tl.float32)
    for begin in tl.range(0, width, K, num_stages=STAGES):
        if EVEN:
            w = tl.load(w_ptrs + begin)
            x = tl.load(x_ptr + begin + k)
        else:
            inside = k < width - begin
            w = tl.load(w_ptrs + begin, mask=inside[None, :], other=0.0)
            x = tl.load(x_ptr + begin + k, mask=inside, other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    y = tl.sum(acc, 1)
    tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), mask=rows < outs)


@triton.jit(do_not_specialize=["num_tokens"])
def _few_kernel(
    x_ptr, w_ptr, out_ptr, parts_ptr, tickets_ptr, num_tokens, outs, width, x_stride, w_stride, out_stride,
    part_width,
    PARTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`out[t, n] = w[n] · x[t]` of N rows, or of one part of K."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.program_id(0)
    part = tl.program_id(1)
    rows = tile * N + tl.arange(0, N)
    first = part * part_width
    last = tl.minimum(first + part_width, width)
    k = tl.arange(0, K)
    tokens = tl.arange(0, M)
    here = tokens < num_tokens
    w_ptrs = w_ptr + tl.minimum(rows, outs - 1).to(tl.int64)[:, None] * w_stride + k[None, :]
    x_ptrs = x_ptr + tokens.to(tl.int64)[None, :] * x_stride + k[:, None]
    acc = tl.zeros((N, M), tl.float32)
    for begin in range(first, last, K):
        if EVEN:
            w = tl.load(w_ptrs + begin)
            x = tl.load(x_ptrs + begin, mask=here[None, :], other=0.0)
        else:
            inside = k < last - begin
            w = tl.load(w_ptrs + begin, mask=inside[None, :], other=0.0)
            x = tl.load(x_ptrs + begin, mask=here[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
    exist = (rows < outs)[:, None] & here[None, :]
    out = out_ptr + tokens.to(tl.int64)[None, :] * out_stride + rows[:, None]
    if PARTS == 1:
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=exist)
    else:
        place = (tile * PARTS).to(tl.int64) * (N * M) + tl.arange(0, N)[:, None] * M + tokens[None, :]
        tl.store(parts_ptr + place + part * (N * M), acc)
        tl.debug_barrier()  # all of the part is stored before the ticket is taken
        before = tl.atomic_add(tickets_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if before == PARTS - 1:
            total = tl.zeros((N, M), tl.float32)
            for i in tl.static_range(PARTS):
                # past the L1 cache, which may not know what other processors wrote
                total += tl.load(parts_ptr + place + i * (N * M), cache_modifier=".cg")
            tl.store(out, total.to(out_ptr.dtype.element_ty), mask=exist)
            tl.store(tickets_ptr + tile, 0)


_streams = itertools.count()
_kept_tickets: dict[torch.device, torch.Tensor] = {}  # by device: outlives the graphs that use it


@functools.cache
def _row_of_stream(device, stream):
    return next(_streams) % _STREAMS


def _tickets(device):
    """Zeros, which each launch leaves as zeros. Launches that may run at the same time, on other streams, have others.

    So graphs that were captured on one stream must not be replayed at the same time.
    """
    on_gpu = device.type == "cuda"
    if device not in _kept_tickets:
        if on_gpu and torch.cuda.is_current_stream_capturing():
            return torch.zeros(TICKETS, dtype=torch.int32, device=device)  # of this graph alone
        _kept_tickets[device] = torch.zeros(_STREAMS, TICKETS, dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else 0
    return _kept_tickets[device][_row_of_stream(device, stream)]


def _power_below(n):
    return 1 << (max(n, 1).bit_length() - 1)


def plan_one(outs, width, config):
    """Rows of a program, and the piece of K a step."""
    k = min(config.width, triton.next_power_of_2(width))
    while k > 128 and width % k:
        k //= 2
    rows = min(32, config.elements // k, max(2, _power_below(outs // config.programs)))
    return rows, k


def plan_few(outs, width, config):
    """Parts of K, and the width of each but the last."""
    tiles = triton.cdiv(outs, config.rows)
    steps = triton.cdiv(width, config.columns)
    parts = max(1, min(config.parts, config.programs // tiles, steps // 2))
    each = triton.cdiv(steps, parts)
    return triton.cdiv(steps, each), each * config.columns


def _choose(num_tokens, outs, width):
    """A `One` or a `Few`, by static facts."""
    padded = max(16, triton.next_power_of_2(num_tokens))
    tiles = triton.cdiv(outs, FEW[padded].rows)
    if num_tokens == 1 and (width > SHORT or tiles < SHORT_TILES):
        return ONE
    return (WIDE if tiles >= WIDE_FROM else FEW)[padded]


def launch_linear(x, weight, out_dtype=None, config=None):
    """`x·weightᵀ`, `[T, N]`: for checked `x [T, K]` and `weight [N, K]` with neighbouring values in rows, T <= 64.

    Args:
        x: the tokens.
        weight: read once.
        out_dtype: of the result; None is that of `x`.
        config: a `One` (for one token) or a `Few` in place of what is chosen.
    """
    num_tokens, width = x.shape
    outs = weight.shape[0]
    out = torch.empty(num_tokens, outs, dtype=out_dtype or x.dtype, device=x.device)
    if not out.numel():
        return out
    config = config or _choose(num_tokens, outs, width)
    if isinstance(config, One):
        rows, k = plan_one(outs, width, config)
        _one_kernel[(triton.cdiv(outs, rows),)](
            x, weight, out, outs, width, weight.stride(0), ROWS=rows, K=k, EVEN=width % k == 0, STAGES=config.stages,
            **launch_options(x.device, config.warps),
        )  # fmt: skip
        return out
    padded = max(16, triton.next_power_of_2(num_tokens))
    parts, part_width = plan_few(outs, width, config)
    tiles = triton.cdiv(outs, config.rows)
    partial = tickets = out
    if parts > 1:
        partial = torch.empty(tiles * parts * config.rows * padded, dtype=torch.float32, device=x.device)
        tickets = _tickets(x.device)
    _few_kernel[(tiles, parts)](
        x, weight, out, partial, tickets, num_tokens, outs, width, x.stride(0), weight.stride(0), out.stride(0),
        part_width, PARTS=parts, M=padded, N=config.rows, K=config.columns, EVEN=width % config.columns == 0,
        num_stages=config.stages, **launch_options(x.device, config.warps),
    )  # fmt: skip
    return out
