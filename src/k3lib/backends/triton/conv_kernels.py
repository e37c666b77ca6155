"""The short causal convolution: kernels.

One token a request: one program a request and block of channels computes, and shifts the slot's window. Long inputs:
most programs stream, as if all packed tokens were one sequence; the first ones, one a request, compute the first tokens
of each request, which the others leave out, with the slot's window on their left, and store the window that the last
ones leave. A verify step's few tokens are all of such programs, which keep them in the scratch instead. Bound: memory.
"""
# ruff: noqa: RUF005 - tuples grow by addition: kernels have no starred expressions
# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from k3lib.backends.triton.launch import launch_options


class Config(NamedTuple):
    """Tokens that are read at once, how often (30 tokens at most), channels a program, its warps and registers."""

    tokens: int
    steps: int
    channels: int
    warps: int
    registers: int | None = None


# H200, 2026-11-30
STREAM = Config(4, 4, 256, 2, 64)


@triton.jit
def _silu(y):
    return y * tl.sigmoid(y)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _left_out(
    begin, slots, cu_seqlens, num_tokens, num_requests, num_slots,
    SPAN: tl.constexpr, WIDTH: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """Bits of the `SPAN` tokens from `begin` that are first ones of their request, or of a request without a slot."""
    lane = tl.arange(0, 128)
    bits = tl.zeros([128], tl.int32)
    first = 0
    while first < num_requests:
        request = first + lane
        known = request < num_requests
        start = tl.load(cu_seqlens + request, mask=known, other=0).to(tl.int32)
        end = tl.minimum(tl.load(cu_seqlens + request + 1, mask=known, other=0).to(tl.int32), num_tokens)
        stop = tl.minimum(start + (WIDTH - 1), end)
        if HAS_STATE:
            slot = tl.load(slots + request, mask=known, other=0).to(tl.int64)
            stop = tl.where((slot >= 0) & (slot < num_slots), stop, end)
        low = tl.minimum(tl.maximum(start - begin, 0), SPAN)
        high = tl.minimum(tl.maximum(stop - begin, low), SPAN)
        bits |= (1 << high) - (1 << low)
        first += 128
    return tl.reduce(bits, 0, _either)


@triton.jit
def _stream(
    x, weight, out, slots, cu_seqlens, begin, c, c_in, x_stride, num_tokens, num_requests, num_slots,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr, BLOCK_T: tl.constexpr, STEPS: tl.constexpr,
    HAS_STATE: tl.constexpr,
):  # fmt: skip
    """A thread walks along tokens with the window in registers; the next few are under way meanwhile."""
    tap = tl.arange(0, TAPS)[None, :]
    # the four taps of a channel are one access; a load for each tap would touch as many lines as there are threads
    weights = tl.load(weight + c[:, None] * WIDTH + tap, mask=c_in[:, None] & (tap < WIDTH), other=0.0).to(tl.float32)
    rows = x + begin.to(tl.int64) * x_stride + c
    target = out + begin.to(tl.int64) * CHANNELS + c
    window = ()
    for i in tl.static_range(1 - WIDTH, 0):
        window = window + (tl.load(rows + i * x_stride, mask=c_in & (begin + i >= 0), other=0.0).to(tl.float32),)
    ahead = ()
    for i in tl.static_range(BLOCK_T):
        ahead = ahead + (tl.load(rows + i * x_stride, mask=c_in & (begin + i < num_tokens), other=0.0),)
    skip = _left_out(
        begin, slots, cu_seqlens, num_tokens, num_requests, num_slots, BLOCK_T * STEPS, WIDTH, HAS_STATE
    )  # fmt: skip
    taps = ()
    for i in tl.static_range(WIDTH):
        taps = taps + (tl.sum(tl.where(tap == i, weights, 0.0), 1),)
    for step in tl.static_range(STEPS):
        now = ahead
        if step + 1 < STEPS:
            ahead = ()
            for i in tl.static_range(BLOCK_T):
                t = (step + 1) * BLOCK_T + i
                ahead = ahead + (tl.load(rows + t * x_stride, mask=c_in & (begin + t < num_tokens), other=0.0),)
        for i in tl.static_range(BLOCK_T):
            window = window + (now[i].to(tl.float32),)
            y = window[0] * taps[0]
            for j in tl.static_range(1, WIDTH):
                y += window[j] * taps[j]
            window = window[1:]
            t = step * BLOCK_T + i
            mine = (begin + t < num_tokens) & ((skip >> t) & 1 == 0)
            tl.store(target + t * CHANNELS, _silu(y).to(out.dtype.element_ty), mask=c_in & mine)


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


@triton.jit
def _request(
    x, weight, out, conv_state, slots, saves, save_slots, kept, request, start, end, c, c_in,
    x_stride, num_requests, num_slots, width,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr, BLOCK_C: tl.constexpr, SINGLE: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_SAVES: tl.constexpr, VERIFY: tl.constexpr,
):  # fmt: skip
    """The tokens of a request that know its window, and the windows that it leaves."""
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
    last = tl.zeros((TAPS, BLOCK_C), x.dtype.element_ty)
    if HAS_STATE and not VERIFY:
        last = _window(x, x_stride, conv_state, slot, start, end, c, c_in, stored, CHANNELS, WIDTH, TAPS)
    stop = end
    t = start
    if not (SINGLE or VERIFY):
        # later tokens see none but their request's, and have been computed; those without a slot are zero. All loads
        # come before the first store, behind which the compiler would not move them up
        firsts = ()
        for i in tl.static_range(1, WIDTH):
            until = tl.minimum(start + i, end)
            window = _window(x, x_stride, conv_state, slot, start, until, c, c_in, stored, CHANNELS, WIDTH, TAPS)
            firsts = firsts + (tl.where(live, _silu(tl.sum(window.to(tl.float32) * taps, 0)), 0.0),)
        for i in tl.static_range(WIDTH - 1):
            place = out + (start + i).to(tl.int64) * CHANNELS + c
            tl.store(place, firsts[i].to(out.dtype.element_ty), mask=c_in & (start + i < end))
        t = start + (WIDTH - 1)
        stop = tl.where(live, t, end)
    while t < stop:
        window = _window(x, x_stride, conv_state, slot, start, t + 1, c, c_in, stored, CHANNELS, WIDTH, TAPS)
        y = tl.where(live, _silu(tl.sum(window.to(tl.float32) * taps, 0)), 0.0)
        tl.store(out + t.to(tl.int64) * CHANNELS + c, y.to(out.dtype.element_ty), mask=c_in)
        if VERIFY:
            fresh = tl.load(x + t.to(tl.int64) * x_stride + c, mask=c_in, other=0.0)
            kept_at = (request.to(tl.int64) * width + t - start) * CHANNELS + c
            tl.store(kept + kept_at, fresh.to(kept.dtype.element_ty), mask=c_in & (t - start < width))
        t += 1
    if HAS_SAVES:
        n = tl.load(saves + request)
        last_save = tl.load(saves + request + 1)
        while n < last_save:
            offset = tl.load(saves + num_requests + 1 + 2 * n)
            row = tl.load(save_slots + tl.load(saves + num_requests + 2 + 2 * n)).to(tl.int64)
            window = _window(
                x, x_stride, conv_state, slot, start, start + offset, c, c_in, stored, CHANNELS, WIDTH, TAPS
            )
            _keep_window(window, conv_state, row, c, c_in & (row > 0) & (row < num_slots), CHANNELS, WIDTH, TAPS)
            n += 1
    if HAS_STATE and not VERIFY:
        tl.debug_barrier()  # all threads have read the old window
        _keep_window(last, conv_state, slot, c, c_in & stored, CHANNELS, WIDTH, TAPS)


@triton.jit(
    do_not_specialize=["num_tokens", "num_requests", "num_slots", "width"],
    do_not_specialize_on_alignment=["slots", "cu_seqlens", "saves", "save_slots"],
)
def _conv_kernel(
    x, weight, out, conv_state, slots, cu_seqlens, saves, save_slots, kept,
    x_stride, num_tokens, num_requests, num_slots, width,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr, BLOCK_T: tl.constexpr, STEPS: tl.constexpr,
    BLOCK_C: tl.constexpr, SINGLE: tl.constexpr, HAS_STATE: tl.constexpr, HAS_SAVES: tl.constexpr,
    VERIFY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    pid = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    c_in = c < CHANNELS
    if pid < num_requests:
        start = tl.load(cu_seqlens + pid).to(tl.int32)
        end = tl.minimum(tl.load(cu_seqlens + pid + 1).to(tl.int32), num_tokens)
        if start < end:
            _request(
                x, weight, out, conv_state, slots, saves, save_slots, kept, pid, start, end, c, c_in,
                x_stride, num_requests, num_slots, width,
                CHANNELS, WIDTH, TAPS, BLOCK_C, SINGLE, HAS_STATE, HAS_SAVES, VERIFY,
            )  # fmt: skip
    else:
        begin = (pid - num_requests) * (BLOCK_T * STEPS)
        _stream(
            x, weight, out, slots, cu_seqlens, begin, c, c_in, x_stride, num_tokens, num_requests, num_slots,
            CHANNELS, WIDTH, TAPS, BLOCK_T, STEPS, HAS_STATE,
        )  # fmt: skip


def launch_short_conv(x, weight, conv_state, slots, cu_seqlens, saves, save_slots, single, config=None, kept=None):
    """Launch for checked arguments; `single`: most requests have one token; `kept`: inputs of a verify step."""
    num_tokens, channels = x.shape
    width = weight.shape[1]
    requests = cu_seqlens.numel() - 1
    out = torch.empty(num_tokens, channels, dtype=x.dtype, device=x.device)
    if not num_tokens or not requests:
        return out
    taps = triton.next_power_of_2(width)
    stateful = conv_state is not None
    tokens, steps, block_c, warps, registers = STREAM if config is None else Config(*config)
    block_c = min(block_c, triton.next_power_of_2(channels))
    streams = 0 if single or kept is not None else triton.cdiv(num_tokens, tokens * steps)
    _conv_kernel[(requests + streams, triton.cdiv(channels, block_c))](
        x,
        weight,
        out,
        conv_state if stateful else out,
        slots if stateful else cu_seqlens,
        cu_seqlens,
        cu_seqlens if saves is None else saves,
        cu_seqlens if saves is None else save_slots,
        kept,
        x.stride(0),
        num_tokens,
        requests,
        conv_state.shape[0] if stateful else 0,
        0 if kept is None else kept.shape[1],
        CHANNELS=channels,
        WIDTH=width,
        TAPS=taps,
        BLOCK_T=tokens,
        STEPS=steps,
        BLOCK_C=block_c,
        SINGLE=single,
        HAS_STATE=stateful,
        HAS_SAVES=saves is not None,
        VERIFY=kept is not None,
        **launch_options(x.device, warps, registers),
    )
    return out
