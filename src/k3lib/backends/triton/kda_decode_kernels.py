"""Few-token KDA: kernels.

The state of a request and head is read once, advanced in registers and written once. It is held as `[V, K / lanes,
lanes]`: the few threads that share 128 or 256 bytes of a row own a slice of every such part of it, so that the sums
over K are mostly inside a thread. `kda_recurrent`: a program takes some values of a request and head, token by token.
`kda_mixer`: a program takes all values, which the norm needs, in parts; the next part is under way while one is
advanced. A request with several tokens writes its outputs un-normed first. Bound: memory, twice the bytes of the
state; 128 threads with at most 168 registers leave three programs on a processor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from k3lib.backends.triton.launch import launch_options


class Config(NamedTuple):
    """Bytes of a state row that neighbouring threads read, warps a program, registers a thread, values at once."""

    row_bytes: int
    warps: int
    registers: int | None = None
    values: int = 32


# H200, 2026-11-30
FUSED = Config(256, 4, 168, 32)
RECURRENT = Config(128, 4)


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _log_decay(logits, bias, rate, bound, BOUNDED: tl.constexpr):
    x = logits.to(tl.float32) + bias
    if BOUNDED:
        return bound * tl.sigmoid(rate * x)
    return -rate * _softplus(x)


@triton.jit
def _decay(logits, bias, rate, bound, BOUNDED: tl.constexpr):
    return tl.exp(_log_decay(logits, bias, rate, bound, BOUNDED))


@triton.jit
def _unit(x):
    """A vector `[KO, KI]` of unit length."""
    return x * tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) + 1e-6)


@triton.jit
def _advance(s, q, k, v, decay, write, both):
    """One token of the recurrence on `s [V, KO, KI]`; returns the new state and the output `[V]`.

    `both` is `q · k`: the output `S' q = (S ∘ e^g) q + u (k · q)` needs no second pass over the new state.
    """
    s *= decay[None, :, :]
    recalled = tl.sum(tl.sum(s * k[None, :, :], 1), 1)
    out = tl.sum(tl.sum(s * q[None, :, :], 1), 1)
    u = write * (v - recalled)
    s += u[:, None, None] * k[None, :, :]
    return s, out + u * both


@triton.jit(
    do_not_specialize=["num_requests", "num_tokens", "num_slots", "kept"],
    do_not_specialize_on_alignment=["slots", "cu_seqlens", "saves", "save_slots"],
)
def _kda_recurrent_kernel(
    q,
    k,
    v,
    gate,
    beta,
    out,
    A_log,
    dt_bias,
    state,
    slots,
    cu_seqlens,
    saves,
    save_slots,
    kept_k,
    kept_v,
    kept_decay,
    kept_beta,
    kept_states,
    q_stride,
    k_stride,
    v_stride,
    gate_stride,
    beta_stride,
    q_head,
    k_head,
    v_head,
    gate_head,
    beta_head,
    num_requests,
    num_tokens,
    num_slots,
    kept,
    bound,
    scale,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KO: tl.constexpr,
    KI: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BOUNDED: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_SAVES: tl.constexpr,
    VERIFY: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    request = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    start = tl.load(cu_seqlens + request).to(tl.int32)
    end = tl.minimum(tl.load(cu_seqlens + request + 1).to(tl.int32), num_tokens)
    if start >= end:
        return
    ki = tl.arange(0, KO)[:, None] * KI + tl.arange(0, KI)[None, :]
    k_in = ki < K
    vi = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    v_in = vi < V
    cell = vi.to(tl.int64)[:, None, None] * K + ki[None, :, :] + head * (V * K)
    s_in = v_in[:, None, None] & k_in[None, :, :]
    live = True
    stored = False
    slot = tl.zeros((), tl.int64)
    if HAS_STATE:
        slot = tl.load(slots + request).to(tl.int64)
        live = (slot >= 0) & (slot < num_slots)
        stored = (slot > 0) & (slot < num_slots)
        s = tl.load(state + slot * (HEADS * V * K) + cell, mask=s_in & stored, other=0.0).to(tl.float32)
    else:
        s = tl.zeros((BLOCK_V, KO, KI), tl.float32)
    rate = tl.exp(tl.load(A_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head * K + ki, mask=k_in, other=0.0).to(tl.float32)
    if HAS_SAVES:
        first_save = tl.load(saves + request)
        last_save = tl.load(saves + request + 1)
    t = start
    while t < end:
        at = t.to(tl.int64)
        qt = tl.load(q + at * q_stride + head * q_head + ki, mask=k_in, other=0.0).to(tl.float32)
        kt = tl.load(k + at * k_stride + head * k_head + ki, mask=k_in, other=0.0).to(tl.float32)
        vt = tl.load(v + at * v_stride + head * v_head + vi, mask=v_in, other=0.0).to(tl.float32)
        logits = tl.load(gate + at * gate_stride + head * gate_head + ki, mask=k_in, other=0.0)
        write = tl.sigmoid(tl.load(beta + at * beta_stride + head * beta_head).to(tl.float32))
        log_decay = _log_decay(logits, bias, rate, bound, BOUNDED)
        if VERIFY == "replay":
            place = (request.to(tl.int64) * kept + t - start) * HEADS + head
            inside = t - start < kept
            first = inside & (tl.program_id(1) == 0)
            tl.store(kept_k + place * K + ki, kt.to(kept_k.dtype.element_ty), mask=k_in & first)
            tl.store(kept_decay + place * K + ki, log_decay, mask=k_in & first)
            tl.store(kept_beta + place, write, mask=first)
            tl.store(kept_v + place * V + vi, vt.to(kept_v.dtype.element_ty), mask=v_in & inside)
        qt, kt = _unit(qt) * scale, _unit(kt)
        both = tl.sum(tl.sum(qt * kt, 1), 0)
        s, o = _advance(s, qt, kt, vt, tl.exp(log_decay), write, both)
        o = tl.where(live, o, 0.0)
        tl.store(out + (at * HEADS + head) * V + vi, o.to(out.dtype.element_ty), mask=v_in)
        if VERIFY == "states":
            place = (request.to(tl.int64) * kept + t - start) * (HEADS * V * K)
            tl.store(kept_states + place + cell, s.to(kept_states.dtype.element_ty), mask=s_in & (t - start < kept))
        if HAS_SAVES:
            n = first_save
            while n < last_save:
                if tl.load(saves + num_requests + 1 + 2 * n) == t + 1 - start:
                    row = tl.load(save_slots + tl.load(saves + num_requests + 2 + 2 * n)).to(tl.int64)
                    wanted = s_in & (row > 0) & (row < num_slots)
                    tl.store(state + row * (HEADS * V * K) + cell, s.to(state.dtype.element_ty), mask=wanted)
                n += 1
        t += 1
    if HAS_STATE and VERIFY == "none":
        tl.store(state + slot * (HEADS * V * K) + cell, s.to(state.dtype.element_ty), mask=s_in & stored)


@triton.jit
def _window(
    x, x_stride, conv_state, past, token, start, end, channel, inside, reads,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """The inputs of one token's window, `[TAPS, channels]`: packed tokens, and before them the slot's own."""
    tap = tl.arange(0, TAPS)
    position = token - (WIDTH - 1) + tap
    mask = ((tap < WIDTH) & (token < end))[:, None] & inside[None, :]
    fresh = (position >= start)[:, None]
    new = tl.load(x + position.to(tl.int64)[:, None] * x_stride + channel[None, :], mask=mask & fresh, other=0.0)
    row = position - start + (WIDTH - 1)
    where = conv_state + past + row[:, None] * CHANNELS + channel[None, :]
    old = tl.load(where, mask=mask & (position < start)[:, None] & reads, other=0.0)
    return tl.where(fresh, new, old.to(new.dtype))


@triton.jit
def _weights(weight, channel, inside, WIDTH: tl.constexpr, TAPS: tl.constexpr):
    tap = tl.arange(0, TAPS)
    mask = (tap < WIDTH)[:, None] & inside[None, :]
    return tl.load(weight + channel[None, :] * WIDTH + tap[:, None], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _convolve(window, weight):
    y = tl.sum(window.to(tl.float32) * weight, 0)
    return (y * tl.sigmoid(y)).to(window.dtype).to(tl.float32)


@triton.jit
def _keep_window(
    window, conv_state, past, channel, inside, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr
):
    """Store the last `WIDTH - 1` taps as the slot's window."""
    tap = tl.arange(0, TAPS)
    mask = ((tap >= 1) & (tap < WIDTH))[:, None] & inside[None, :]
    where = conv_state + past + (tap - 1)[:, None] * CHANNELS + channel[None, :]
    tl.store(where, window.to(conv_state.dtype.element_ty), mask=mask)


@triton.jit
def _load_state(
    cell, block, ki, stored, K: tl.constexpr, V: tl.constexpr, PART_V: tl.constexpr, HAS_STATE: tl.constexpr
):
    """Part number `block` of a head's state, `[PART_V, KO, KI]` in fp32; zeros without a slot."""
    if HAS_STATE:
        vi = block * PART_V + tl.arange(0, PART_V)
        mask = (vi < V)[:, None, None] & (ki < K)[None, :, :] & stored
        return tl.load(cell + block * (PART_V * K), mask=mask, other=0.0).to(tl.float32)
    return tl.zeros(cell.shape, tl.float32)


@triton.jit
def _store_state(
    cell, block, s, ki, stored, K: tl.constexpr, V: tl.constexpr, PART_V: tl.constexpr, HAS_STATE: tl.constexpr
):
    if HAS_STATE:
        vi = block * PART_V + tl.arange(0, PART_V)
        mask = (vi < V)[:, None, None] & (ki < K)[None, :, :] & stored
        tl.store(cell + block * (PART_V * K), s.to(cell.dtype.element_ty), mask=mask)


@triton.jit
def _gated_norm(o, shown, norm, dtype: tl.constexpr, V: tl.constexpr, eps):
    o = o.to(dtype).to(tl.float32)
    return o * tl.rsqrt(tl.sum(o * o, 0) / V + eps) * norm * tl.sigmoid(shown)


@triton.jit(
    do_not_specialize=["num_tokens", "num_slots"],
    do_not_specialize_on_alignment=["slots", "cu_seqlens"],
)
def _kda_mixer_kernel(
    qkv,
    gate,
    beta,
    out_gate,
    out,
    A_log,
    dt_bias,
    conv_weight,
    norm_weight,
    state,
    conv_state,
    slots,
    cu_seqlens,
    qkv_stride,
    gate_stride,
    beta_stride,
    out_gate_stride,
    gate_head,
    beta_head,
    out_gate_head,
    num_tokens,
    num_slots,
    bound,
    scale,
    eps,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    KO: tl.constexpr,
    KI: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PART_V: tl.constexpr,
    TAPS: tl.constexpr,
    BOUNDED: tl.constexpr,
    HAS_STATE: tl.constexpr,
    EARLY: tl.constexpr,
):
    CHANNELS: tl.constexpr = HEADS * (2 * K + V)
    BLOCK_K: tl.constexpr = KO * KI
    BLOCKS: tl.constexpr = BLOCK_V // PART_V
    request = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    live = True
    stored = False
    slot = tl.zeros((), tl.int64)
    if HAS_STATE:
        slot = tl.load(slots + request).to(tl.int64)
        live = (slot >= 0) & (slot < num_slots)
        stored = (slot > 0) & (slot < num_slots)
    start = tl.load(cu_seqlens + request).to(tl.int32)
    end = tl.minimum(tl.load(cu_seqlens + request + 1).to(tl.int32), num_tokens)
    if start >= end:
        return
    past = slot * ((WIDTH - 1) * CHANNELS)

    # the head's channels are this program's alone: no other one reads or writes their windows
    key = tl.arange(0, BLOCK_K)
    key_in = key < K
    vi = tl.arange(0, BLOCK_V)
    v_in = vi < V
    q_channel = head * K + key
    k_channel = HEADS * K + head * K + key
    v_channel = 2 * HEADS * K + head * V + vi
    rate = tl.exp(tl.load(A_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head * K + key, mask=key_in, other=0.0).to(tl.float32)
    norm = tl.load(norm_weight + vi, mask=v_in, other=0.0).to(tl.float32)
    gate += head * gate_head + key
    out_gate += head * out_gate_head + vi
    beta += head * beta_head
    rows = out + head * V
    out += head * V + vi
    ki = tl.arange(0, KO)[:, None] * KI + tl.arange(0, KI)[None, :]
    part = tl.arange(0, PART_V)
    cell = state + (slot * HEADS + head) * (V * K) + part[:, None, None] * K + ki[None, :, :]

    if end - start == 1:
        at = start.to(tl.int64)
        q_win = _window(
            qkv, qkv_stride, conv_state, past, start, start, end, q_channel, key_in, stored, CHANNELS, WIDTH, TAPS
        )
        k_win = _window(
            qkv, qkv_stride, conv_state, past, start, start, end, k_channel, key_in, stored, CHANNELS, WIDTH, TAPS
        )
        v_win = _window(
            qkv, qkv_stride, conv_state, past, start, start, end, v_channel, v_in, stored, CHANNELS, WIDTH, TAPS
        )
        logits = tl.load(gate + at * gate_stride, mask=key_in, other=0.0)
        write = tl.sigmoid(tl.load(beta + at * beta_stride).to(tl.float32))
        shown = tl.load(out_gate + at * out_gate_stride, mask=v_in, other=0.0).to(tl.float32)
        q_weight = _weights(conv_weight, q_channel, key_in, WIDTH, TAPS)
        k_weight = _weights(conv_weight, k_channel, key_in, WIDTH, TAPS)
        v_weight = _weights(conv_weight, v_channel, v_in, WIDTH, TAPS)
        ahead = _load_state(cell, 0, ki, stored, K, V, PART_V, HAS_STATE)
        q = _unit(tl.reshape(_convolve(q_win, q_weight), (KO, KI))) * scale
        k = _unit(tl.reshape(_convolve(k_win, k_weight), (KO, KI)))
        both = tl.sum(tl.sum(q * k, 1), 0)
        decay = tl.reshape(_decay(logits, bias, rate, bound, BOUNDED), (KO, KI))
        v = tl.reshape(_convolve(v_win, v_weight), (BLOCKS, PART_V))
        o = tl.zeros((BLOCKS, PART_V), tl.float32)
        block = tl.arange(0, BLOCKS)[:, None]
        for b in tl.static_range(BLOCKS):
            s = ahead
            if b + 1 < BLOCKS:
                ahead = _load_state(cell, b + 1, ki, stored, K, V, PART_V, HAS_STATE)
            s, o_b = _advance(s, q, k, tl.sum(tl.where(block == b, v, 0.0), 0), decay, write, both)
            _store_state(cell, b, s, ki, stored, K, V, PART_V, HAS_STATE)
            o = tl.where(block == b, o_b[None, :], o)
        y = _gated_norm(tl.reshape(o, (BLOCK_V,)), shown, norm, out.dtype.element_ty, V, eps)
        tl.store(out + at * (HEADS * V), tl.where(live, y, 0.0).to(out.dtype.element_ty), mask=v_in)
    else:
        # no register for more than a part of the state: its outputs are normed when all parts have written theirs
        q_weight = _weights(conv_weight, q_channel, key_in, WIDTH, TAPS)
        k_weight = _weights(conv_weight, k_channel, key_in, WIDTH, TAPS)
        b = 0
        while b < BLOCKS:
            s = _load_state(cell, b, ki, stored, K, V, PART_V, HAS_STATE)
            mine = b * PART_V + part
            mine_in = mine < V
            channel = 2 * HEADS * K + head * V + mine
            mine_weight = _weights(conv_weight, channel, mine_in, WIDTH, TAPS)
            t = start
            while t < end:
                at = t.to(tl.int64)
                q_win = _window(
                    qkv, qkv_stride, conv_state, past, t, start, end, q_channel, key_in, stored, CHANNELS, WIDTH, TAPS
                )
                k_win = _window(
                    qkv, qkv_stride, conv_state, past, t, start, end, k_channel, key_in, stored, CHANNELS, WIDTH, TAPS
                )
                mine_win = _window(
                    qkv, qkv_stride, conv_state, past, t, start, end, channel, mine_in, stored, CHANNELS, WIDTH, TAPS
                )
                logits = tl.load(gate + at * gate_stride, mask=key_in, other=0.0)
                write = tl.sigmoid(tl.load(beta + at * beta_stride).to(tl.float32))
                q = _unit(tl.reshape(_convolve(q_win, q_weight), (KO, KI))) * scale
                k = _unit(tl.reshape(_convolve(k_win, k_weight), (KO, KI)))
                both = tl.sum(tl.sum(q * k, 1), 0)
                decay = tl.reshape(_decay(logits, bias, rate, bound, BOUNDED), (KO, KI))
                s, o_b = _advance(s, q, k, _convolve(mine_win, mine_weight), decay, write, both)
                tl.store(rows + at * (HEADS * V) + mine, o_b.to(out.dtype.element_ty), mask=mine_in)
                t += 1
            _store_state(cell, b, s, ki, stored, K, V, PART_V, HAS_STATE)
            b += 1
        tl.debug_barrier()
        t = start
        while t < end:
            at = t.to(tl.int64)
            shown = tl.load(out_gate + at * out_gate_stride, mask=v_in, other=0.0).to(tl.float32)
            o = tl.load(out + at * (HEADS * V), mask=v_in, other=0.0).to(tl.float32)
            y = _gated_norm(o, shown, norm, out.dtype.element_ty, V, eps)
            tl.store(out + at * (HEADS * V), tl.where(live, y, 0.0).to(out.dtype.element_ty), mask=v_in)
            t += 1
        last = end - 1
        q_win = _window(
            qkv, qkv_stride, conv_state, past, last, start, end, q_channel, key_in, stored, CHANNELS, WIDTH, TAPS
        )
        k_win = _window(
            qkv, qkv_stride, conv_state, past, last, start, end, k_channel, key_in, stored, CHANNELS, WIDTH, TAPS
        )
        v_win = _window(
            qkv, qkv_stride, conv_state, past, last, start, end, v_channel, v_in, stored, CHANNELS, WIDTH, TAPS
        )
    if HAS_STATE:
        tl.debug_barrier()  # all threads have read the old windows
        _keep_window(q_win, conv_state, past, q_channel, key_in & stored, CHANNELS, WIDTH, TAPS)
        _keep_window(k_win, conv_state, past, k_channel, key_in & stored, CHANNELS, WIDTH, TAPS)
        _keep_window(v_win, conv_state, past, v_channel, v_in & stored, CHANNELS, WIDTH, TAPS)


def _split_keys(key_dim: int, itemsize: int, row_bytes: int) -> tuple[int, int]:
    block = triton.next_power_of_2(key_dim)
    lanes = min(block, row_bytes // itemsize)
    return block // lanes, lanes


def launch_kda_recurrent(
    q, k, v, gate, beta, params, state, slots, cu_seqlens, scale, saves, save_slots, out, verify=None, config=None
):
    """Launch for checked arguments; fills `out`, updates `state`, or `verify` instead."""
    tokens, heads, value_dim = v.shape
    key_dim = k.shape[-1]
    requests = cu_seqlens.numel() - 1
    row_bytes, warps, registers, values = Config(*(config or RECURRENT))
    outer, lanes = _split_keys(key_dim, 4 if state is None else state.element_size(), row_bytes)
    block_v = min(triton.next_power_of_2(value_dim), values)
    unused = out
    _kda_recurrent_kernel[(requests * heads, triton.cdiv(value_dim, block_v))](
        q,
        k,
        v,
        gate,
        beta,
        out,
        params.A_log,
        params.dt_bias,
        unused if state is None else state,
        unused if slots is None else slots,
        cu_seqlens,
        cu_seqlens if saves is None else saves,
        cu_seqlens if saves is None else save_slots,
        *((None,) * 5 if verify is None else (verify.k, verify.v, verify.log_decay, verify.beta, verify.states)),
        q.stride(0),
        k.stride(0),
        v.stride(0),
        gate.stride(0),
        beta.stride(0),
        q.stride(1),
        k.stride(1),
        v.stride(1),
        gate.stride(1),
        beta.stride(1),
        requests,
        tokens,
        0 if state is None else state.shape[0],
        0 if verify is None else verify.inputs.shape[1],
        0.0 if params.lower_bound is None else params.lower_bound,
        scale,
        HEADS=heads,
        K=key_dim,
        V=value_dim,
        KO=outer,
        KI=lanes,
        BLOCK_V=block_v,
        BOUNDED=params.lower_bound is not None,
        HAS_STATE=state is not None,
        HAS_SAVES=saves is not None,
        VERIFY="none" if verify is None else verify.kind,
        **launch_options(v.device, warps, registers),
    )


def launch_kda_mixer(
    qkv, gate, beta, out_gate, params, conv_weight, norm_weight, eps, scale, state, conv_state, slots, cu_seqlens,
    config=None,
):  # fmt: skip
    """Launch for checked arguments; returns the output, updates `state` and `conv_state`."""
    tokens, heads, key_dim = gate.shape
    value_dim = out_gate.shape[-1]
    out = torch.empty(tokens, heads, value_dim, dtype=qkv.dtype, device=qkv.device)
    requests = cu_seqlens.numel() - 1
    if not tokens or not requests:
        return out
    row_bytes, warps, registers, values = Config(*(config or FUSED))
    block_v = triton.next_power_of_2(value_dim)
    outer, lanes = _split_keys(key_dim, 4 if state is None else state.element_size(), row_bytes)
    width = conv_weight.shape[1]
    _kda_mixer_kernel[(requests * heads,)](
        qkv,
        gate,
        beta,
        out_gate,
        out,
        params.A_log,
        params.dt_bias,
        conv_weight,
        norm_weight,
        out if state is None else state,
        out if conv_state is None else conv_state,
        cu_seqlens if slots is None else slots,
        cu_seqlens,
        qkv.stride(0),
        gate.stride(0),
        beta.stride(0),
        out_gate.stride(0),
        gate.stride(1),
        beta.stride(1),
        out_gate.stride(1),
        tokens,
        0 if state is None else state.shape[0],
        0.0 if params.lower_bound is None else params.lower_bound,
        scale,
        eps,
        HEADS=heads,
        K=key_dim,
        V=value_dim,
        WIDTH=width,
        KO=outer,
        KI=lanes,
        BLOCK_V=block_v,
        PART_V=min(values, block_v),
        TAPS=triton.next_power_of_2(width),
        BOUNDED=params.lower_bound is not None,
        HAS_STATE=state is not None,
        **launch_options(qkv.device, warps, registers),
    )
    return out
