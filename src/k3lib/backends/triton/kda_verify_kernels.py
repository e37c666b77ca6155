"""KDA of verify steps: kernels.

Shapes: D tokens of a request at most (a power of two), H heads, K key dim, V value dim, R rows of the scratch.

A verify step reads the committed state once, runs up to 16 tokens on it in registers, and leaves it as it was. A
program takes a request and head: the convolutions, gates and norms of all tokens at once, as tiles of tokens by
channels, into vectors beside the scratch; then token by token on the state; the gated norm of all tokens last. A
replay brings states forward by tokens of the scratch, all layers in one launch; the next token is under way while one
is applied. Bound: neither bytes nor multiplications, but how long a token takes from end to end. The chunked form (a
matrix product with the state, then a small triangular system) was slower on an H200: 47 against 32 us, and 60 against
38 for the replay.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from k3lib.backends.triton.kda_decode_kernels import Config, _advance, _load_state, _log_decay, _split_keys, _unit
from k3lib.backends.triton.launch import launch_options

# H200, 2026-11-30
VERIFY = Config(128, 4, 168, 64)
REPLAY = Config(128, 2, None, 32)
_MAX_PART = 16384  # values of the state in the registers of a program


@triton.jit
def _taps(
    x, x_stride, conv_state, past, channel, inside, start, count, reads, tap,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Input number `tap` of the windows of the first `count` tokens of a request, `[D, channels]`."""
    token = tl.arange(0, D)[:, None]
    mask = (token < count) & inside[None, :]
    position = token + (tap + 1 - WIDTH)
    at = (start + position).to(tl.int64) * x_stride + channel[None, :]
    value = tl.load(x + at, mask=mask & (position >= 0), other=0.0)
    if tap + 1 < WIDTH:
        row = (position + (WIDTH - 1)) * CHANNELS + channel[None, :]
        old = tl.load(conv_state + past + row, mask=mask & (position < 0) & reads, other=0.0)
        value = tl.where(position >= 0, value, old.to(value.dtype))
    return value


@triton.jit
def _conv_tokens(
    x, x_stride, conv_state, past, weight, channel, inside, start, count, reads,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Convolution and SiLU of the first `count` tokens of a request, `[D, channels]`, and their inputs."""
    y = tl.zeros([D, channel.shape[0]], tl.float32)
    value = tl.zeros([D, channel.shape[0]], x.dtype.element_ty)
    for tap in tl.static_range(WIDTH):
        value = _taps(
            x, x_stride, conv_state, past, channel, inside, start, count, reads, tap, CHANNELS, WIDTH, D
        )  # fmt: skip
        taps = tl.load(weight + channel * WIDTH + tap, mask=inside, other=0.0).to(tl.float32)
        y += value.to(tl.float32) * taps[None, :]
    return (y * tl.sigmoid(y)).to(x.dtype.element_ty).to(tl.float32), value


@triton.jit
def _keep(rows, value, token, count, kept, channel, inside, CHANNELS: tl.constexpr):
    """Store rows of the first tokens in the scratch."""
    mask = ((token < count) & (token < kept))[:, None] & inside[None, :]
    at = rows + token[:, None] * CHANNELS + channel[None, :]
    tl.store(at, value.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def _unit_rows(x):
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit(
    do_not_specialize=["num_tokens", "num_slots", "kept"],
    do_not_specialize_on_alignment=["slots", "cu_seqlens"],
)
def _kda_verify_kernel(
    qkv, gate, beta, out_gate, out, vectors,
    A_log, dt_bias, conv_weight, norm_weight, state, conv_state, slots, cu_seqlens,
    kept_inputs, kept_k, kept_v, kept_decay, kept_beta, kept_states,
    qkv_stride, gate_stride, beta_stride, out_gate_stride, gate_head, beta_head, out_gate_head,
    num_tokens, num_slots, kept, bound, scale, eps,
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    KO: tl.constexpr, KI: tl.constexpr, BLOCK_V: tl.constexpr, PART_V: tl.constexpr,
    BOUNDED: tl.constexpr, HAS_STATE: tl.constexpr, KEEP_STATES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    CHANNELS: tl.constexpr = HEADS * (2 * K + V)
    BLOCK_K: tl.constexpr = KO * KI
    ROW: tl.constexpr = 3 * BLOCK_K + BLOCK_V + 4  # of `vectors`: q, k, decay, v, then q · k and the write strength
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
    count = tl.minimum(end - start, D)
    if count <= 0:
        return
    past = slot * ((WIDTH - 1) * CHANNELS)
    row = request.to(tl.int64)
    token = tl.arange(0, D)
    here = token < count
    keeps = here & (token < kept)
    packed = (start + token).to(tl.int64)
    key = tl.arange(0, BLOCK_K)
    key_in = key < K
    vi = tl.arange(0, BLOCK_V)
    v_in = vi < V
    key_mask = here[:, None] & key_in[None, :]
    value_mask = here[:, None] & v_in[None, :]
    # all loads come before the first store, behind which the compiler would not move them up
    logits = tl.load(gate + packed[:, None] * gate_stride + head * gate_head + key[None, :], mask=key_mask, other=0.0)
    write = tl.load(beta + packed * beta_stride + head * beta_head, mask=here, other=0.0)
    at_gate = packed[:, None] * out_gate_stride + head * out_gate_head + vi[None, :]
    shown = tl.load(out_gate + at_gate, mask=value_mask, other=0.0)
    q_channel, k_channel, v_channel = head * K + key, (HEADS + head) * K + key, 2 * HEADS * K + head * V + vi
    q, q_inputs = _conv_tokens(
        qkv, qkv_stride, conv_state, past, conv_weight, q_channel, key_in, start, count, stored, CHANNELS, WIDTH, D
    )
    k, k_inputs = _conv_tokens(
        qkv, qkv_stride, conv_state, past, conv_weight, k_channel, key_in, start, count, stored, CHANNELS, WIDTH, D
    )
    v, v_inputs = _conv_tokens(
        qkv, qkv_stride, conv_state, past, conv_weight, v_channel, v_in, start, count, stored, CHANNELS, WIDTH, D
    )
    k, v = tl.where(live, k, 0.0), tl.where(live, v, 0.0)  # as the convolution alone gives them
    rate = tl.exp(tl.load(A_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head * K + key, mask=key_in, other=0.0).to(tl.float32)
    log_decay = _log_decay(logits, bias[None, :], rate, bound, BOUNDED)
    write = tl.sigmoid(write.to(tl.float32))
    norm = tl.load(norm_weight + vi, mask=v_in, other=0.0).to(tl.float32)
    inputs = kept_inputs + row * kept * CHANNELS
    _keep(inputs, q_inputs, token, count, kept, q_channel, key_in, CHANNELS)
    _keep(inputs, k_inputs, token, count, kept, k_channel, key_in, CHANNELS)
    _keep(inputs, v_inputs, token, count, kept, v_channel, v_in, CHANNELS)
    if not KEEP_STATES:
        place = (row * kept + token) * HEADS + head
        at = place[:, None] * K + key[None, :]
        tl.store(kept_k + at, k.to(kept_k.dtype.element_ty), mask=key_mask & keeps[:, None])
        tl.store(kept_decay + at, log_decay, mask=key_mask & keeps[:, None])
        tl.store(kept_beta + place, write, mask=keeps)
        at = place[:, None] * V + vi[None, :]
        tl.store(kept_v + at, v.to(kept_v.dtype.element_ty), mask=value_mask & keeps[:, None])
    q, k = _unit_rows(q) * scale, _unit_rows(k)
    vectors += (row * HEADS + head) * (D * ROW)
    at = vectors + token[:, None] * ROW + key[None, :]
    tl.store(at, q)
    tl.store(at + BLOCK_K, k)
    tl.store(at + 2 * BLOCK_K, tl.exp(log_decay))
    tl.store(vectors + 3 * BLOCK_K + token[:, None] * ROW + vi[None, :], v)
    scalars = vectors + (3 * BLOCK_K + BLOCK_V) + token * ROW
    tl.store(scalars, tl.sum(q * k, 1))
    tl.store(scalars + 1, write)
    tl.debug_barrier()
    ki = tl.arange(0, KO)[:, None] * KI + tl.arange(0, KI)[None, :]
    part = tl.arange(0, PART_V)
    inner = part[:, None, None] * K + ki[None, :, :]
    cell = state + (slot * HEADS + head) * (V * K) + inner
    for b in tl.static_range(BLOCK_V // PART_V):
        s = _load_state(cell, b, ki, stored, K, V, PART_V, HAS_STATE)
        mine = b * PART_V + part
        t = 0
        while t < count:
            vector = vectors + t * ROW
            qt, kt = tl.load(vector + ki), tl.load(vector + BLOCK_K + ki)
            decay = tl.load(vector + 2 * BLOCK_K + ki)
            vt = tl.load(vector + 3 * BLOCK_K + mine)
            both = tl.load(vector + 3 * BLOCK_K + BLOCK_V)
            strength = tl.load(vector + 3 * BLOCK_K + BLOCK_V + 1)
            s, o_t = _advance(s, qt, kt, vt, decay, strength, both)
            answer = out + ((start + t).to(tl.int64) * HEADS + head) * V + mine
            tl.store(answer, o_t.to(out.dtype.element_ty), mask=mine < V)
            if KEEP_STATES:
                where = kept_states + ((row * kept + t) * HEADS + head) * (V * K) + b * (PART_V * K) + inner
                s_in = (mine < V)[:, None, None] & (ki < K)[None, :, :] & (t < kept)
                tl.store(where, s.to(kept_states.dtype.element_ty), mask=s_in)
            t += 1
    tl.debug_barrier()
    at = out + (packed * HEADS + head)[:, None] * V + vi[None, :]
    o = tl.load(at, mask=value_mask, other=0.0).to(tl.float32)
    tl.debug_barrier()  # all threads have read what is overwritten
    y = o * tl.rsqrt(tl.sum(o * o, 1) / V + eps)[:, None] * norm[None, :] * tl.sigmoid(shown.to(tl.float32))
    tl.store(at, tl.where(live, y, 0.0).to(out.dtype.element_ty), mask=value_mask)


@triton.jit
def _kept(k, v, log_decay, beta, t, ki, k_in, vi, v_in, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """Key, value, log decay and write strength of a token."""
    key = tl.load(k + t * (HEADS * K) + ki, mask=k_in, other=0.0)
    decay = tl.load(log_decay + t * (HEADS * K) + ki, mask=k_in, other=0.0)
    value = tl.load(v + t * (HEADS * V) + vi, mask=v_in, other=0.0)
    return key, value, decay, tl.load(beta + t * HEADS)


@triton.jit(
    do_not_specialize=["num_entries", "num_slots", "num_rows", "width"],
    do_not_specialize_on_alignment=["sources", "rows", "counts", "targets"],
)
def _kda_replay_kernel(
    state, k, v, log_decay, beta, sources, rows, counts, targets,
    state_layer, k_layer, v_layer, decay_layer, beta_layer, k_row, v_row, decay_row, beta_row,
    num_entries, num_slots, num_rows, width,
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KO: tl.constexpr, KI: tl.constexpr, BLOCK_V: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0) % HEADS
    entry = (tl.program_id(0) // HEADS) % num_entries
    layer = (tl.program_id(0) // HEADS // num_entries).to(tl.int64)
    target = tl.load(targets + entry).to(tl.int64)
    if (target <= 0) | (target >= num_slots):
        return
    source = tl.load(sources + entry).to(tl.int64)
    row = tl.load(rows + entry).to(tl.int64)
    count = tl.minimum(tl.load(counts + entry).to(tl.int32), width)
    count = tl.where((row >= 0) & (row < num_rows), count, 0)
    ki = tl.arange(0, KO)[:, None] * KI + tl.arange(0, KI)[None, :]
    vi = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    v_in = vi < V
    k_in = ki < K
    cell = state + layer * state_layer + head * (V * K) + vi[:, None, None] * K + ki[None, :, :]
    s_in = v_in[:, None, None] & k_in[None, :, :]
    known = s_in & (source > 0) & (source < num_slots)
    k += layer * k_layer + row * k_row + head * K
    v += layer * v_layer + row * v_row + head * V
    log_decay += layer * decay_layer + row * decay_row + head * K
    beta += layer * beta_layer + row * beta_row + head
    if count > 0:
        key, value, decay, write = _kept(k, v, log_decay, beta, 0, ki, k_in, vi, v_in, HEADS, K, V)
        s = tl.load(cell + source * (HEADS * V * K), mask=known, other=0.0).to(tl.float32)
        t = 0
        while t < count:
            ahead = tl.minimum(t + 1, count - 1)
            next_key, next_value, next_decay, next_write = _kept(
                k, v, log_decay, beta, ahead, ki, k_in, vi, v_in, HEADS, K, V
            )  # fmt: skip
            kt = _unit(key.to(tl.float32))
            s *= tl.exp(decay)[None, :, :]
            u = write * (value.to(tl.float32) - tl.sum(tl.sum(s * kt[None, :, :], 1), 1))
            s += u[:, None, None] * kt[None, :, :]
            key, value, decay, write = next_key, next_value, next_decay, next_write
            t += 1
        tl.store(cell + target * (HEADS * V * K), s.to(state.dtype.element_ty), mask=s_in)
    elif source != target:
        s = tl.load(cell + source * (HEADS * V * K), mask=known, other=0.0)
        tl.store(cell + target * (HEADS * V * K), s, mask=s_in)


def launch_kda_verify(
    qkv, gate, beta, out_gate, params, conv_weight, norm_weight, eps, scale, state, conv_state, slots, cu_seqlens,
    verify, config=None,
):  # fmt: skip
    """Launch for checked arguments; returns the output, fills `verify`."""
    tokens, heads, key_dim = gate.shape
    value_dim = out_gate.shape[-1]
    out = torch.empty(tokens, heads, value_dim, dtype=qkv.dtype, device=qkv.device)
    requests = cu_seqlens.numel() - 1
    if not tokens or not requests:
        return out
    row_bytes, warps, registers, values = Config(*(config or VERIFY))
    block_v = triton.next_power_of_2(value_dim)
    outer, lanes = _split_keys(key_dim, 4 if state is None else state.element_size(), row_bytes)
    width = triton.next_power_of_2(verify.inputs.shape[1])
    vectors = torch.empty(
        requests, heads, width, 3 * outer * lanes + block_v + 4, dtype=torch.float32, device=qkv.device
    )
    _kda_verify_kernel[(requests * heads,)](
        qkv, gate, beta, out_gate, out, vectors,
        params.A_log, params.dt_bias, conv_weight, norm_weight,
        out if state is None else state, out if conv_state is None else conv_state,
        cu_seqlens if slots is None else slots, cu_seqlens,
        verify.inputs, verify.k, verify.v, verify.log_decay, verify.beta, verify.states,
        qkv.stride(0), gate.stride(0), beta.stride(0), out_gate.stride(0),
        gate.stride(1), beta.stride(1), out_gate.stride(1),
        tokens, 0 if state is None else state.shape[0], verify.inputs.shape[1],
        0.0 if params.lower_bound is None else params.lower_bound, scale, eps,
        HEADS=heads, K=key_dim, V=value_dim, WIDTH=conv_weight.shape[1], D=width,
        KO=outer, KI=lanes, BLOCK_V=block_v, PART_V=min(values, block_v, _MAX_PART // (outer * lanes)),
        BOUNDED=params.lower_bound is not None, HAS_STATE=state is not None, KEEP_STATES=verify.states is not None,
        **launch_options(qkv.device, warps, registers),
    )  # fmt: skip
    return out


def launch_kda_replay(state, k, v, log_decay, beta, sources, rows, counts, targets, config=None):
    """Launch for checked arguments; updates `state`."""
    layers, _, heads, value_dim, key_dim = state.shape
    entries = sources.numel()
    if not entries or not layers:
        return
    row_bytes, warps, registers, values = Config(*(config or REPLAY))
    outer, lanes = _split_keys(key_dim, state.element_size(), row_bytes)
    block_v = min(triton.next_power_of_2(value_dim), values)
    _kda_replay_kernel[(layers * entries * heads, triton.cdiv(value_dim, block_v))](
        state, k, v, log_decay, beta, sources, rows, counts, targets,
        state.stride(0), k.stride(0), v.stride(0), log_decay.stride(0), beta.stride(0),
        k.stride(1), v.stride(1), log_decay.stride(1), beta.stride(1),
        entries, state.shape[1], k.shape[1], k.shape[2],
        HEADS=heads, K=key_dim, V=value_dim, KO=outer, KI=lanes, BLOCK_V=block_v,
        **launch_options(state.device, warps, registers),
    )  # fmt: skip
