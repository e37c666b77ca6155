"""The short causal convolution: kernels.

One token a request: one program a request and block of channels computes, and shifts the slot's window. Long inputs:
a first kernel treats all packed tokens as one sequence; it knows no requests, reads each tile once a tap (all but the
first from the L1 cache) and streams. The second one, a program a request, redoes the first tokens of each request with
the slot's window on their left, and stores the window that they leave. Bound: memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from k3lib.backends.triton.launch import launch_options


class Config(NamedTuple):
    """Tokens and channels a program, and its warps."""

    tokens: int
    channels: int
    warps: int


# H200, 2026-11-30
STREAM = Config(16, 256, 4)
WINDOW_CHANNELS = 512


@triton.jit
def _silu(y):
    return y * tl.sigmoid(y)


@triton.jit
def _shifted(rows, t, num_tokens, shift: tl.constexpr, stride, inside):
    """The tile of inputs `shift` tokens later; zero before the first."""
    mask = ((t < num_tokens) & (t + shift >= 0))[:, None] & inside[None, :]
    return tl.load(rows + shift * stride, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["num_tokens"])
def _conv_stream_kernel(
    x,
    weight,
    out,
    x_stride,
    num_tokens,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    c_in = c < CHANNELS
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    t_in = t < num_tokens
    tap = tl.arange(0, TAPS)[None, :]
    # the four taps of a channel are one access; a load for each tap would touch as many lines as there are threads
    weights = tl.load(weight + c[:, None] * WIDTH + tap, mask=c_in[:, None] & (tap < WIDTH), other=0.0).to(tl.float32)
    rows = x + t.to(tl.int64)[:, None] * x_stride + c[None, :]
    y = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    ahead = _shifted(rows, t, num_tokens, 1 - WIDTH, x_stride, c_in)
    for i in tl.static_range(WIDTH):
        taken = ahead.to(tl.float32)
        if i + 1 < WIDTH:
            ahead = _shifted(rows, t, num_tokens, i + 2 - WIDTH, x_stride, c_in)
        y += taken * tl.sum(tl.where(tap == i, weights, 0.0), 1)[None, :]
    where = out + t.to(tl.int64)[:, None] * CHANNELS + c[None, :]
    tl.store(where, _silu(y).to(out.dtype.element_ty), mask=t_in[:, None] & c_in[None, :])


@triton.jit
def _window(
    x, x_stride, conv_state, slot, start, end, c, c_in, reads,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """The last `WIDTH` inputs before token `end`, as `[TAPS, C]`: packed tokens, and before them the slot's own."""
    tap = tl.arange(0, TAPS)
    position = end - WIDTH + tap
    mask = (tap < WIDTH)[:, None] & c_in[None, :]
    fresh = (position >= start)[:, None]
    new = tl.load(x + position.to(tl.int64)[:, None] * x_stride + c[None, :], mask=mask & fresh, other=0.0)
    row = slot * (WIDTH - 1) + (position - start + (WIDTH - 1))
    kept = mask & (position < start)[:, None] & (position - start + (WIDTH - 1) >= 0)[:, None] & reads
    old = tl.load(conv_state + row[:, None] * CHANNELS + c[None, :], mask=kept, other=0.0)
    return tl.where(fresh, new, old.to(new.dtype))


@triton.jit
def _keep_window(window, conv_state, slot, c, c_in, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr):
    tap = tl.arange(0, TAPS)
    row = slot * (WIDTH - 1) + (tap - 1)
    mask = ((tap >= 1) & (tap < WIDTH))[:, None] & c_in[None, :]
    tl.store(conv_state + row[:, None] * CHANNELS + c[None, :], window.to(conv_state.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "num_requests", "num_slots"])
def _conv_windows_kernel(
    x,
    weight,
    out,
    conv_state,
    slots,
    cu_seqlens,
    saves,
    save_slots,
    x_stride,
    num_tokens,
    num_requests,
    num_slots,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SINGLE: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_SAVES: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    request = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    c_in = c < CHANNELS
    start = tl.load(cu_seqlens + request).to(tl.int32)
    end = tl.minimum(tl.load(cu_seqlens + request + 1).to(tl.int32), num_tokens)
    if start >= end:
        return
    live = True
    stored = False
    slot = tl.zeros((), tl.int64)
    if HAS_STATE:
        slot = tl.load(slots + request).to(tl.int64)
        live = (slot >= 0) & (slot < num_slots)
        stored = (slot > 0) & (slot < num_slots)
    tap = tl.arange(0, TAPS)
    mask = (tap < WIDTH)[:, None] & c_in[None, :]
    taps = tl.load(weight + c[None, :] * WIDTH + tap[:, None], mask=mask, other=0.0).to(tl.float32)
    stop = end
    if not SINGLE:  # later tokens see none but their request's, and have been computed; those without a slot are zero
        stop = tl.where(live, tl.minimum(end, start + (WIDTH - 1)), end)
    t = start
    while t < stop:
        window = _window(x, x_stride, conv_state, slot, start, t + 1, c, c_in, stored, CHANNELS, WIDTH, TAPS)
        y = tl.where(live, _silu(tl.sum(window.to(tl.float32) * taps, 0)), 0.0)
        tl.store(out + t.to(tl.int64) * CHANNELS + c, y.to(out.dtype.element_ty), mask=c_in)
        t += 1
    if HAS_SAVES:
        n = tl.load(saves + request)
        last = tl.load(saves + request + 1)
        while n < last:
            offset = tl.load(saves + num_requests + 1 + 2 * n)
            row = tl.load(save_slots + tl.load(saves + num_requests + 2 + 2 * n)).to(tl.int64)
            window = _window(
                x, x_stride, conv_state, slot, start, start + offset, c, c_in, stored, CHANNELS, WIDTH, TAPS
            )
            _keep_window(window, conv_state, row, c, c_in & (row > 0) & (row < num_slots), CHANNELS, WIDTH, TAPS)
            n += 1
    if HAS_STATE:
        window = _window(x, x_stride, conv_state, slot, start, end, c, c_in, stored, CHANNELS, WIDTH, TAPS)
        tl.debug_barrier()  # all threads have read the old window
        _keep_window(window, conv_state, slot, c, c_in & stored, CHANNELS, WIDTH, TAPS)


def launch_short_conv(x, weight, conv_state, slots, cu_seqlens, saves, save_slots, single, config=None):
    """Launch for checked arguments; `single`: most requests have one token."""
    num_tokens, channels = x.shape
    width = weight.shape[1]
    requests = cu_seqlens.numel() - 1
    out = torch.empty(num_tokens, channels, dtype=x.dtype, device=x.device)
    if not num_tokens or not requests:
        return out
    taps = triton.next_power_of_2(width)
    if not single:
        tokens, block_c, warps = config or STREAM
        block_c = min(block_c, triton.next_power_of_2(channels))
        _conv_stream_kernel[(triton.cdiv(num_tokens, tokens), triton.cdiv(channels, block_c))](
            x,
            weight,
            out,
            x.stride(0),
            num_tokens,
            CHANNELS=channels,
            WIDTH=width,
            TAPS=taps,
            BLOCK_T=tokens,
            BLOCK_C=block_c,
            **launch_options(x.device, warps),
        )
    stateful = conv_state is not None
    block_c = min(WINDOW_CHANNELS, triton.next_power_of_2(channels))
    _conv_windows_kernel[(requests, triton.cdiv(channels, block_c))](
        x,
        weight,
        out,
        conv_state if stateful else out,
        slots if stateful else cu_seqlens,
        cu_seqlens,
        cu_seqlens if saves is None else saves,
        cu_seqlens if saves is None else save_slots,
        x.stride(0),
        num_tokens,
        requests,
        conv_state.shape[0] if stateful else 0,
        CHANNELS=channels,
        WIDTH=width,
        TAPS=taps,
        BLOCK_C=block_c,
        SINGLE=single,
        HAS_STATE=stateful,
        HAS_SAVES=saves is not None,
        **launch_options(x.device, 4),
    )
    return out
