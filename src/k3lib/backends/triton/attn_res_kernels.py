"""Attention residuals: kernels.

One program a token. It walks over `p = prefix + delta` and the bank rows with a running maximum and sum of the softmax:
a row is read once, gives its two sums (of squares, and with the score weight), and is added to the mixture in
registers. Norm, running sum and snapshot leave from the same registers. For few tokens, several rows at once, to be
done soonest; for many, row by row through a pipeline in shared memory, with few enough registers that two programs
share a processor. Bound: memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from k3lib.backends.triton.launch import launch_options


class Tiles(NamedTuple):
    """Bank rows a tile, warps a program, registers a thread."""

    rows: int
    warps: int
    registers: int | None = None


class Stream(NamedTuple):
    """Rows in the pipeline, warps a program, registers a thread."""

    stages: int
    warps: int
    registers: int | None = None


# by padded hidden size; H200, 2026-11-30
TILES = {8192: Tiles(4, 16)}
STREAM = {8192: Stream(3, 8, 128)}
STREAM_FROM = 133  # tokens: more than one for each of 132 processors
_SMALL_TILES = Tiles(2, 4)
_SMALL_STREAM = Stream(3, 4)


@triton.jit
def _load_rows(bank, first, NUM_BLOCKS: tl.constexpr, ROWS: tl.constexpr, stride, columns, inside):
    row = first + tl.arange(0, ROWS)
    mask = (row < NUM_BLOCKS)[:, None] & inside[None, :]
    return tl.load(bank + row[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _add_pair(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize=["write_block"])
def _attn_res_kernel(
    prefix,
    delta,
    bank,
    score_weight,
    norm_weight,
    out,
    new_prefix,
    prefix_stride,
    delta_stride,
    token_stride,
    row_stride,
    write_block,
    eps,
    out_eps,
    HIDDEN: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    WRITES: tl.constexpr,
    NORMS: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    bank += token * token_stride
    dtype = bank.dtype.element_ty

    if EARLY:
        gdc_wait()
    weight = tl.load(score_weight + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_PREFIX:
        p = tl.load(prefix + token * prefix_stride + columns, mask=inside, other=0.0)
    if HAS_DELTA:
        d = tl.load(delta + token * delta_stride + columns, mask=inside, other=0.0)
    if NUM_BLOCKS > 0:
        ahead = _load_rows(bank, 0, NUM_BLOCKS, ROWS, row_stride, columns, inside)
    if NORMS:
        scale = tl.load(norm_weight + columns, mask=inside, other=0.0)
    if HAS_PREFIX and HAS_DELTA:
        p = (p.to(tl.float32) + d.to(tl.float32)).to(dtype)
        if not WRITES:
            tl.store(new_prefix + token * HIDDEN + columns, p, mask=inside)
    elif HAS_DELTA:
        p = d

    mix = p.to(tl.float32)
    squares, dots = tl.reduce((mix * mix, mix * weight), 0, _add_pair)
    top = dots * tl.rsqrt(squares / HIDDEN + eps)
    total = 1.0
    for first in tl.static_range(0, NUM_BLOCKS, ROWS):
        rows = ahead.to(tl.float32)
        if first + ROWS < NUM_BLOCKS:
            ahead = _load_rows(bank, first + ROWS, NUM_BLOCKS, ROWS, row_stride, columns, inside)
        squares, dots = tl.reduce((rows * rows, rows * weight[None, :]), 1, _add_pair)
        scores = dots * tl.rsqrt(squares / HIDDEN + eps)
        scores = tl.where(first + tl.arange(0, ROWS) < NUM_BLOCKS, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 0))
        old, new = tl.exp(top - higher), tl.exp(scores - higher)
        total = total * old + tl.sum(new, 0)
        mix = mix * old + tl.sum(new[:, None] * rows, 0)
        top = higher
    mixed = (mix * (1.0 / total)).to(dtype)
    if NORMS:
        wide = mixed.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide * wide, 0) / HIDDEN + out_eps)
        mixed = ((wide * inverse).to(dtype).to(tl.float32) * scale.to(tl.float32)).to(dtype)
    tl.store(out + token * HIDDEN + columns, mixed, mask=inside)
    if WRITES:
        tl.debug_barrier()  # the row may be among those that were read, in another layout
        tl.store(bank + write_block * row_stride + columns, p, mask=inside)


@triton.jit
def _score(row, weight, HIDDEN: tl.constexpr, eps):
    squares, dots = tl.reduce((row * row, row * weight), 0, _add_pair)
    return dots * tl.rsqrt(squares / HIDDEN + eps)


@triton.jit(do_not_specialize=["write_block"])
def _attn_res_stream_kernel(
    prefix,
    delta,
    bank,
    score_weight,
    norm_weight,
    out,
    new_prefix,
    prefix_stride,
    delta_stride,
    token_stride,
    row_stride,
    write_block,
    eps,
    out_eps,
    HIDDEN: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    WRITES: tl.constexpr,
    NORMS: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    bank += token * token_stride
    dtype = bank.dtype.element_ty
    weight = tl.load(score_weight + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_PREFIX:
        p = tl.load(prefix + token * prefix_stride + columns, mask=inside, other=0.0)
    if HAS_DELTA:
        d = tl.load(delta + token * delta_stride + columns, mask=inside, other=0.0)
    if HAS_PREFIX and HAS_DELTA:
        p = (p.to(tl.float32) + d.to(tl.float32)).to(dtype)
    elif HAS_DELTA:
        p = d
    # at once: held until the end, it would take the registers of a second program
    if WRITES:
        tl.store(bank + write_block * row_stride + columns, p, mask=inside)
    elif HAS_PREFIX and HAS_DELTA:
        tl.store(new_prefix + token * HIDDEN + columns, p, mask=inside)
    mix = p.to(tl.float32)
    top = _score(mix, weight, HIDDEN, eps)
    total = 1.0
    for j in tl.range(0, NUM_BLOCKS, num_stages=STAGES):
        row = tl.load(bank + j * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
        score = _score(row, weight, HIDDEN, eps)
        higher = tl.maximum(top, score)
        old, new = tl.exp(top - higher), tl.exp(score - higher)
        total = total * old + new
        mix = mix * old + new * row
        top = higher
    mixed = (mix * (1.0 / total)).to(dtype)
    if NORMS:
        scale = tl.load(norm_weight + columns, mask=inside, other=0.0)
        wide = mixed.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide * wide, 0) / HIDDEN + out_eps)
        mixed = ((wide * inverse).to(dtype).to(tl.float32) * scale.to(tl.float32)).to(dtype)
    tl.store(out + token * HIDDEN + columns, mixed, mask=inside)


def launch_attn_res(
    prefix, delta, bank, score_weight, norm_weight, num_blocks, write_block, eps, out_eps, *, streams=True, config=None
):
    """Launch for checked arguments; returns the pair that the op returns.

    Args:
        streams: whether many tokens may take the other kernel; `config`, a `Tiles` or `Stream`, decides by itself.
    """
    tokens, hidden = bank.shape[0], bank.shape[2]
    writes = write_block is not None
    out = torch.empty(tokens, hidden, dtype=bank.dtype, device=bank.device)
    if prefix is not None and delta is not None and not writes:
        new_prefix = torch.empty_like(out)
    else:
        new_prefix = prefix if prefix is not None else delta
    if not tokens:
        return out, None if writes else new_prefix
    block = triton.next_power_of_2(hidden)
    if config is None:
        # the stream writes a snapshot before it has read the bank
        streams = streams and tokens >= STREAM_FROM and (not writes or write_block >= num_blocks)
        config = STREAM.get(block, _SMALL_STREAM) if streams else TILES.get(block, _SMALL_TILES)
    arguments = (
        prefix if prefix is not None else delta,
        delta if delta is not None else prefix,
        bank,
        score_weight,
        norm_weight if norm_weight is not None else score_weight,
        out,
        new_prefix,
        0 if prefix is None else prefix.stride(0),
        0 if delta is None else delta.stride(0),
        bank.stride(0),
        bank.stride(1),
        write_block if writes else 0,
        eps,
        out_eps,
    )
    common = {
        "HIDDEN": hidden,
        "NUM_BLOCKS": num_blocks,
        "BLOCK": block,
        "HAS_PREFIX": prefix is not None,
        "HAS_DELTA": delta is not None,
        "WRITES": writes,
        "NORMS": norm_weight is not None,
        **launch_options(bank.device, config.warps, config.registers),
    }
    if isinstance(config, Stream):
        _attn_res_stream_kernel[(tokens,)](*arguments, STAGES=config.stages, **common)
    else:
        rows = min(config.rows, triton.next_power_of_2(max(num_blocks, 1)))
        _attn_res_kernel[(tokens,)](*arguments, ROWS=rows, **common)
    return out, None if writes else new_prefix
