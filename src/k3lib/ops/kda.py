"""Kimi Delta Attention: gate, chunked and recurrent forms, and the mixer that joins convolution, recurrence and norm.

Shapes: T packed tokens, B requests, H heads, K key dim, V value dim, N pool rows (row 0 is the null slot),
C = H·(2K + V) convolution channels. The state is `[N, H, V, K]`, value dimension first.

One token of the recurrence (model specification, section 3.3), per head with `S [V, K]`:
`S ← S · exp(g)`, `u = β (v − S k)`, `S ← S + u kᵀ`, `o = S q`, with normalised `k` and scaled, normalised `q`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch.nn import functional as F

from k3lib.config import KDAConfig, KimiK3Config, TextConfig
from k3lib.errors import ConfigError
from k3lib.ops.conv import short_conv
from k3lib.ops.norm import gated_rms_norm
from k3lib.ops.packing import (
    SavesKind,
    TokensPerRequest,
    VerifyKind,
    check_saves,
    check_verify,
    compute_dtype,
    host_lengths,
    host_slots,
    no_verify,
    saves_kind,
    tokens_per_request,
    verify_kind,
)
from k3lib.ops.registry import intern_spec, op

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from k3lib.batch import StateSaves, VerifyScratch

__all__ = [
    "KDAParams",
    "KDASpec",
    "ReplaySpec",
    "kda_chunk",
    "kda_gate",
    "kda_mixer",
    "kda_recurrent",
    "kda_replay",
    "l2_norm",
]

CHUNK = 32  # tokens a chunk while a bounded gate keeps exp(CHUNK / 2 · bound) inside fp32 ...
_FP32_EXPONENT = 80.0
PAIRWISE_CHUNK = 16  # ... else fewer: pairwise decays cost PAIRWISE_CHUNK · K exponentials per token and head
_PAIRWISE_ELEMENTS = 1 << 24  # bound on their temporary [chunks, H, PAIRWISE_CHUNK, PAIRWISE_CHUNK, K]


class KDAParams(NamedTuple):
    """Decay parameters of a layer: `A_log [H]` fp32, `dt_bias [H, K]` fp32, the bound or None for the softplus gate."""

    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KDASpec:
    """Static facts of a KDA call."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    state_dtype: torch.dtype | None
    tokens_per_request: TokensPerRequest
    saves: SavesKind = "none"
    verify: VerifyKind = "none"
    bounded_gate: bool = True
    deterministic: bool = False

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Tensor,
        beta: Tensor,
        *,
        params: KDAParams,
        state: Tensor | None = None,
        slots: Tensor | None = None,
        cu_seqlens: Tensor,
        scale: float,
        saves: StateSaves | None = None,
        verify: VerifyScratch | None = None,
    ) -> KDASpec:
        """Facts of a call of `kda_chunk` or `kda_recurrent`."""
        return intern_spec(
            KDASpec,
            v.shape[-2],
            k.shape[-1],
            v.shape[-1],
            v.dtype,
            None if state is None else state.dtype,
            tokens_per_request(v.shape[0], cu_seqlens),
            saves_kind(saves),
            verify_kind(verify),
            params.lower_bound is not None,
        )

    @staticmethod
    def of_mixer(
        qkv: Tensor,
        gate: Tensor,
        beta: Tensor,
        out_gate: Tensor,
        *,
        params: KDAParams,
        conv_weight: Tensor,
        norm_weight: Tensor,
        norm_eps: float,
        scale: float,
        state: Tensor | None = None,
        conv_state: Tensor | None = None,
        slots: Tensor | None = None,
        cu_seqlens: Tensor,
        saves: StateSaves | None = None,
        verify: VerifyScratch | None = None,
    ) -> KDASpec:
        """Facts of a call of `kda_mixer`."""
        return intern_spec(
            KDASpec,
            gate.shape[-2],
            gate.shape[-1],
            out_gate.shape[-1],
            qkv.dtype,
            None if state is None else state.dtype,
            tokens_per_request(qkv.shape[0], cu_seqlens),
            saves_kind(saves),
            verify_kind(verify),
            params.lower_bound is not None,
        )

    @staticmethod
    def from_config(
        config: KimiK3Config | TextConfig | KDAConfig,
        *,
        tp_size: int = 1,
        mode: Literal["prefill", "decode", "verify"] = "decode",
        dtype: torch.dtype = torch.bfloat16,
        state_dtype: torch.dtype = torch.float32,
        saves: SavesKind = "none",
        deterministic: bool = False,
    ) -> KDASpec:
        """Facts of a model's calls, to ask questions without tensors."""
        if isinstance(config, KimiK3Config):
            config = config.text
        kda = config.kda if isinstance(config, TextConfig) else config
        per_request: dict[str, TokensPerRequest] = {"prefill": "many", "decode": "1", "verify": "<=8"}
        return KDASpec(
            heads=kda.num_heads // tp_size,
            key_dim=kda.key_dim,
            value_dim=kda.value_dim,
            dtype=dtype,
            state_dtype=state_dtype,
            tokens_per_request=per_request[mode],
            saves=saves,
            verify="replay" if mode == "verify" else "none",
            bounded_gate=kda.gate_lower_bound is not None,
            deterministic=deterministic,
        )


def l2_norm(x: Tensor) -> Tensor:
    """`x / sqrt(Σx² + 1e-6)` over the last axis, in fp32 (fp64 for fp64)."""
    wide = x.to(compute_dtype(x))
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)


def kda_gate(gate: Tensor, params: KDAParams) -> Tensor:
    """Log decay of each channel, `[T, H, K]` in fp32 (fp64 for fp64): 0 keeps, negative forgets.

    With a lower bound: `bound · sigmoid(exp(A_log) · (gate + dt_bias))`; without: `−exp(A_log) · softplus(gate +
    dt_bias)`. Two different functions, not a clamp (model specification, section 3.3).
    """
    logits = gate.to(compute_dtype(gate)) + params.dt_bias.view(gate.shape[-2:])
    rate = params.A_log.exp()[:, None]
    if params.lower_bound is None:
        return -rate * F.softplus(logits)
    return params.lower_bound * torch.sigmoid(rate * logits)


class _Call(NamedTuple):
    """A checked call: host facts, and the normalised inputs in the compute dtype."""

    lengths: list[int]
    slots: list[int] | None
    saves: list[tuple[int, int, int]]
    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor
    initial: Tensor


def _require_shape(name: str, x: Tensor, want: tuple[int, ...]) -> None:
    if x.shape != want:
        raise ConfigError(f"kda: {name} has shape {tuple(x.shape)}, expected {want}")


def _check_layer(params: KDAParams, state: Tensor | None, heads: int, key_dim: int, value_dim: int) -> None:
    _require_shape("A_log", params.A_log, (heads,))
    if params.dt_bias.numel() != heads * key_dim:
        raise ConfigError(f"kda: dt_bias has {params.dt_bias.numel()} values, expected {heads} x {key_dim}")
    if state is not None and state.shape[1:] != (heads, value_dim, key_dim):
        raise ConfigError(
            f"kda: state has rows {tuple(state.shape[1:])}, expected [H, V, K] = {(heads, value_dim, key_dim)}"
        )


def _begin(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    params: KDAParams,
    state: Tensor | None,
    slots: Tensor | None,
    cu_seqlens: Tensor,
    scale: float,
    saves: StateSaves | None,
) -> _Call:
    num_tokens, heads, value_dim = v.shape
    key_dim = k.shape[-1]
    tokens_heads = (num_tokens, heads)
    _require_shape("q", q, (*tokens_heads, key_dim))
    _require_shape("k", k, (*tokens_heads, key_dim))
    _require_shape("gate", gate, (*tokens_heads, key_dim))
    _require_shape("beta", beta, tokens_heads)
    _check_layer(params, state, heads, key_dim, value_dim)
    lengths = host_lengths(cu_seqlens, num_tokens)
    rows = host_slots(slots, state, len(lengths))
    wanted = check_saves(saves, lengths, rows, state)

    dtype = compute_dtype(v)
    if rows is None or state is None:
        initial = v.new_zeros(len(lengths), heads, value_dim, key_dim, dtype=dtype)
    elif min(rows, default=1) > 0:
        initial = state[slots].to(dtype)
    else:
        live = torch.tensor([s > 0 for s in rows], device=v.device)
        initial = torch.where(live[:, None, None, None], state[[max(s, 0) for s in rows]].to(dtype), 0)
    return _Call(
        lengths,
        rows,
        wanted,
        l2_norm(q) * scale,
        l2_norm(k),
        v.to(dtype),
        kda_gate(gate, params),
        torch.sigmoid(beta.to(dtype)),
        initial,
    )


def _finish(
    call: _Call, out: Tensor, final: Tensor, kept: list[Tensor], state: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Write the states back, if there are any, blank the requests without a slot, round once."""
    if call.slots is not None and any(s < 0 for s in call.slots):
        dropped = torch.tensor([s < 0 for s in call.slots], device=out.device)
        mask = torch.repeat_interleave(dropped, torch.tensor(call.lengths, device=out.device))
        out = out.masked_fill(mask[:, None, None], 0)
    if state is not None and call.slots is not None:
        live = [i for i, s in enumerate(call.slots) if s > 0]
        if live:
            state[[call.slots[i] for i in live]] = (final if len(live) == len(final) else final[live]).to(state.dtype)
        if kept:
            state[[slot for _, _, slot in call.saves]] = torch.stack(kept).to(state.dtype)
    return out.to(dtype)


def _keep_inputs(verify: VerifyScratch, call: _Call, k: Tensor, v: Tensor) -> None:
    """Write what `kda_replay` reads: one row a request."""
    assert verify.k is not None and verify.v is not None, "checked by check_verify"  # noqa: PT018
    assert verify.log_decay is not None and verify.beta is not None, "checked by check_verify"  # noqa: PT018
    row = torch.repeat_interleave(torch.arange(len(call.lengths)), torch.tensor(call.lengths, dtype=torch.int64))
    starts = torch.tensor([0, *accumulate(call.lengths)])
    column = torch.arange(len(row)) - starts[row]
    place = (row.to(v.device), column.to(v.device))
    for kept, value in ((verify.k, k), (verify.v, v), (verify.log_decay, call.log_decay), (verify.beta, call.beta)):
        kept[place] = value.to(kept.dtype)


@op(KDASpec.of)
def kda_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    *,
    params: KDAParams,
    state: Tensor | None = None,
    slots: Tensor | None = None,
    cu_seqlens: Tensor,
    scale: float,
    saves: StateSaves | None = None,
    verify: VerifyScratch | None = None,
) -> Tensor:
    """Run the KDA recurrence token by token, all requests side by side. Updates `state` in place.

    Args:
        q, k: `[T, H, K]`, not yet normalised.
        v: `[T, H, V]`.
        gate: `[T, H, K]`, logits of the channel-wise decay.
        beta: `[T, H]`, logits of the write strength (0 means 0.5, not "no write").
        params: decay parameters of the layer.
        state: `[N, H, V, K]` fp32 or bf16, value dimension first; None starts every request from zero, keeps nothing.
        slots: `[B]` int32, row of `state` for each request; 0 is the null slot, negative means none (output zero).
        cu_seqlens: `[B + 1]` int32, token offsets of the requests; an empty request keeps its state.
        scale: factor applied to the normalised `q`.
        saves: interior states to store as well.
        verify: scratch of a verify step, row i for request i: `state` stays as it is, what `kda_replay` needs, or the
            state after each token, goes there.

    Returns:
        `[T, H, V]` in the dtype of `v`.

    Raises:
        ConfigError: shapes, offsets, slots, saves or scratch do not fit; nothing has been written.
    """
    call = _begin(q, k, v, gate, beta, params, state, slots, cu_seqlens, scale, saves)
    if verify is not None:
        check_verify("kda_recurrent", verify, call.lengths, call.slots, saves)
    retention = call.log_decay.exp()
    starts = [0, *accumulate(call.lengths)]
    order = sorted(range(len(call.lengths)), key=lambda i: -call.lengths[i])  # the running ones come first
    plain = order == list(range(len(order)))
    s = call.initial if plain else call.initial[order]
    wanted: dict[tuple[int, int], list[int]] = {}
    for n, (request, offset, _) in enumerate(call.saves):
        wanted.setdefault((request, offset), []).append(n)
    kept: list[Tensor] = [call.initial] * len(call.saves)
    outs, ended, tokens = [], [], []
    for t in range(max(call.lengths, default=0)):
        running = sum(1 for n in call.lengths if n > t)
        if running < len(s):
            ended.append(s[running:])
            s = s[:running]
        now = [starts[i] + t for i in order[:running]]
        tokens += now
        at = slice(None) if now == list(range(len(v))) else now
        s = s * retention[at][:, :, None, :]
        error = call.v[at] - (s @ call.k[at][..., None]).squeeze(-1)
        s = s + (call.beta[at][..., None] * error)[..., None] * call.k[at][:, :, None, :]
        outs.append((s @ call.q[at][..., None]).squeeze(-1))
        if verify is not None and verify.states is not None:
            verify.states[order[:running], t] = s.to(verify.states.dtype)
        for n, i in enumerate(order[:running]):
            for which in wanted.get((i, t + 1), ()):
                kept[which] = s[n]
    final = torch.cat([s, *reversed(ended)]) if ended else s
    if not plain:
        final = final[torch.tensor(order, device=final.device).argsort()]
    out = torch.cat(outs) if len(outs) > 1 else outs[0] if outs else call.v
    if tokens != list(range(len(tokens))):
        out = out[torch.tensor(tokens, device=out.device).argsort()]
    if verify is not None:
        if verify.states is None:
            _keep_inputs(verify, call, k, v)
        state = None
    return _finish(call, out, final, kept, state, v.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySpec:
    """Static facts of a replay."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    state_dtype: torch.dtype
    deterministic: bool = False

    @staticmethod
    def of(
        state: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        *,
        sources: Tensor,
        rows: Tensor,
        counts: Tensor,
        targets: Tensor,
    ) -> ReplaySpec:
        """Facts of a call."""
        return intern_spec(ReplaySpec, state.shape[2], k.shape[-1], v.shape[-1], v.dtype, state.dtype)


@op(ReplaySpec.of)
def kda_replay(
    state: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    sources: Tensor,
    rows: Tensor,
    counts: Tensor,
    targets: Tensor,
) -> None:
    """Advance states, in place, by tokens that a verify step kept, in all layers at once.

    With the arithmetic of `kda_recurrent`. Entry i reads `state[:, sources[i]]`, takes the first `counts[i]` tokens of
    scratch row `rows[i]`, and writes `state[:, targets[i]]`. A source may be the target of its own entry, of no other.

    Args:
        state: `[L, N, H, V, K]`, updated in place. L layers.
        k: `[L, R, D, H, K]`, not normalised. R rows of D tokens.
        v: `[L, R, D, H, V]`.
        log_decay: `[L, R, D, H, K]` fp32.
        beta: `[L, R, D, H]` fp32, after the sigmoid.
        sources, rows, counts, targets: `[n]` int32. A count of 0 copies; a target of 0 or less is dropped.

    Raises:
        ConfigError: shapes or places do not fit; nothing has been written.
    """
    _check_replay(state, k, v, log_decay, beta, sources, rows, counts, targets)
    taken: list[int] = counts.tolist()
    live = [i for i, target in enumerate(targets.tolist()) if target > 0]
    if not live:
        return
    dtype = torch.float64 if state.dtype == torch.float64 else torch.float32
    row, count = rows[live].long(), counts[live]
    s = state[:, sources[live].long()].to(dtype)
    for t in range(max(taken[i] for i in live)):
        key = l2_norm(k[:, row, t].to(dtype))
        grown = s * log_decay[:, row, t].to(dtype).exp()[..., None, :]
        error = v[:, row, t].to(dtype) - (grown @ key[..., None]).squeeze(-1)
        grown = grown + (beta[:, row, t].to(dtype)[..., None] * error)[..., None] * key[..., None, :]
        s = torch.where((count > t)[None, :, None, None, None], grown, s)
    state[:, targets[live].long()] = s.to(state.dtype)


def _check_replay(
    state: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    sources: Tensor,
    rows: Tensor,
    counts: Tensor,
    targets: Tensor,
) -> None:
    layers, slots, heads, value_dim, key_dim = state.shape
    if k.ndim != 5:
        raise ConfigError(f"kda_replay: k must be [L, R, D, H, K], got {list(k.shape)}")
    num_rows, width = k.shape[1:3]
    for name, x, last in (("k", k, (key_dim,)), ("v", v, (value_dim,)), ("log_decay", log_decay, (key_dim,)),
                          ("beta", beta, ())):  # fmt: skip
        want = (layers, num_rows, width, heads, *last)
        if tuple(x.shape) != want:
            raise ConfigError(f"kda_replay: {name} has shape {list(x.shape)}, expected {list(want)}")
    sizes = {name: x.numel() for name, x in (("sources", sources), ("rows", rows), ("counts", counts),
                                             ("targets", targets))}  # fmt: skip
    if len(set(sizes.values())) > 1:
        raise ConfigError(f"kda_replay: {sizes} must be equally many")
    limits = (("sources", sources, slots - 1), ("rows", rows, num_rows - 1), ("counts", counts, width))
    for name, x, most in limits:
        if x.numel() and not (int(x.min()) >= 0 and int(x.max()) <= most):
            raise ConfigError(f"kda_replay: {name} must lie in 0..{most}, got {x.tolist()}")
    wanted = [t for t in targets.tolist() if t > 0]
    if wanted and (max(wanted) >= slots or len(set(wanted)) != len(wanted)):
        raise ConfigError(f"kda_replay: targets must be different slots below {slots}, got {targets.tolist()}")


@op(KDASpec.of, supports=no_verify)
def kda_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    *,
    params: KDAParams,
    state: Tensor | None = None,
    slots: Tensor | None = None,
    cu_seqlens: Tensor,
    scale: float,
    saves: StateSaves | None = None,
    verify: VerifyScratch | None = None,
) -> Tensor:
    """Run the KDA recurrence chunk by chunk. Updates `state` in place. Arguments as in `kda_recurrent`.

    With `G` the running sum of the log decay inside a chunk and `S` the state before it, the recurrence unrolls to

        u_i = β_i (v_i − S (k_i ∘ e^{G_i})) − Σ_{j<i} A_ij u_j,   A_ij = β_i Σ_c k_i k_j e^{G_i − G_j}
        o_i = S (q_i ∘ e^{G_i}) + Σ_{j≤i} B_ij u_j,               B_ij = Σ_c q_i k_j e^{G_i − G_j}
        S'  = S ∘ e^{G_C} + Σ_j u_j (k_j ∘ e^{G_C − G_j})ᵀ

    so one triangular solve gives all `u` of a chunk, and only the last line runs from chunk to chunk. A bounded gate
    splits `e^{G_i − G_j}` at the middle of the chunk into two factors inside the fp32 range, so A and B are matrix
    products; otherwise the pairs are formed one by one, with exponents ≤ 0, so that no decay overflows.
    """
    call = _begin(q, k, v, gate, beta, params, state, slots, cu_seqlens, scale, saves)
    if not v.shape[0]:
        return _finish(call, call.v, call.initial, [], state, v.dtype)
    device = v.device
    bound = params.lower_bound
    factored = bound is not None and -bound * CHUNK / 2 <= _FP32_EXPONENT
    size = CHUNK if factored else PAIRWISE_CHUNK
    chunks = list(_rounds(call.lengths, call.saves, size))
    first = torch.tensor([start for _, _, start, _, _ in chunks], device=device)
    count = torch.tensor([tokens for _, _, _, tokens, _ in chunks], device=device)
    index = first[:, None] + torch.arange(size, device=device)
    valid = torch.arange(size, device=device) < count[:, None]
    index = torch.where(valid, index, 0).flatten()
    padded = len(index) > v.shape[0]

    def gather(x: Tensor) -> Tensor:  # [T, H, ...] -> [chunks, H, size, ...], padding tokens zero
        picked = x.index_select(0, index).view(len(chunks), size, *x.shape[1:])
        if padded:
            picked = picked.masked_fill(~valid.view(*valid.shape, *[1] * (x.ndim - 1)), 0)
        return picked.transpose(1, 2).contiguous()

    qc, kc, vc, bc = gather(call.q), gather(call.k), gather(call.v), gather(call.beta)[..., None]
    log_decay = gather(call.log_decay)
    grown = log_decay.cumsum(2).exp()
    k_pairs, q_pairs = (_factored_products if factored else _pairwise_products)(kc, qc, log_decay)
    system = bc * k_pairs.tril(-1)
    rhs = torch.cat([bc * vc, bc * kc * grown], dim=-1)
    solved = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)
    u0, w = solved.split([vc.shape[-1], kc.shape[-1]], dim=-1)
    q_in = qc * grown
    remaining = log_decay.flip(2).cumsum(2).flip(2)[:, :, 1:]  # log decay after each token
    k_out = kc * F.pad(remaining, (0, 0, 0, 1)).exp()
    last = grown[:, :, -1:]

    order = sorted(range(len(call.lengths)), key=lambda i: -_num_chunks(call.lengths[i], i, call.saves, size))
    s = call.initial[order]
    kept: list[Tensor] = [call.initial] * len(call.saves)
    outs, ended = [], []
    begin = 0
    while begin < len(chunks):
        this_round = chunks[begin][0]
        end = begin
        while end < len(chunks) and chunks[end][0] == this_round:
            end += 1
        if end - begin < len(s):
            ended.append(s[end - begin :])
            s = s[: end - begin]
        part = slice(begin, end)
        u = u0[part] - w[part] @ s.mT
        outs.append(q_in[part] @ s.mT + q_pairs[part] @ u)
        s = s * last[part] + u.mT @ k_out[part]
        for n, (_, _, _, _, saved) in enumerate(chunks[begin:end]):
            for which in saved:
                kept[which] = s[n]
        begin = end
    final = torch.cat([s, *reversed(ended)]) if ended else s
    final = final[torch.tensor(order, device=device).argsort()]
    flat = torch.cat(outs).transpose(1, 2).flatten(0, 1)
    mine = valid.flatten().nonzero()[:, 0]  # place of each token among the chunks, then back to its own order
    out = flat.index_select(0, mine[index[mine].argsort()])
    return _finish(call, out, final, kept, state, v.dtype)


def _cuts(length: int, request: int, saves: list[tuple[int, int, int]]) -> list[tuple[int, list[int]]]:
    """Ends of the segments of one request, each with the saves that are taken there."""
    ends: dict[int, list[int]] = {length: []} if length else {}
    for n, (owner, offset, _) in enumerate(saves):
        if owner == request:
            ends.setdefault(offset, []).append(n)
    return sorted(ends.items())


def _num_chunks(length: int, request: int, saves: list[tuple[int, int, int]], size: int) -> int:
    start, total = 0, 0
    for end, _ in _cuts(length, request, saves):
        total, start = total - (start - end) // size, end
    return total


def _rounds(
    lengths: list[int], saves: list[tuple[int, int, int]], size: int
) -> Iterator[tuple[int, int, int, int, list[int]]]:
    """Yield `(round, request, first token, tokens, saves at its end)`: the r-th chunks of all requests, longest first.

    A save ends a chunk, so a request's chunks count from its last save.
    """
    starts = [0, *accumulate(lengths)]
    per_request = []
    for i, length in enumerate(lengths):
        mine, begin = [], 0
        for end, saved in _cuts(length, i, saves):
            for a in range(begin, end, size):
                b = min(a + size, end)
                mine.append((i, starts[i] + a, b - a, saved if b == end else []))
            begin = end
        per_request.append(mine)
    per_request.sort(key=len, reverse=True)
    for r in range(len(per_request[0])):
        for mine in per_request:
            if r < len(mine):
                yield (r, *mine[r])


def _factored_products(k: Tensor, q: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """`Σ_c x_i k_j e^{G_i − G_j}` for j ≤ i, else 0, with x = k and x = q: two `[chunks, H, size, size]`."""
    half = log_decay.shape[2] // 2
    # sums from the middle outwards: small where they are exact, and half as large as sums from the start
    before = F.pad(log_decay[:, :, 1:half].flip(2).cumsum(2).flip(2), (0, 0, 0, 1))
    sums = torch.cat([-before, log_decay[:, :, half:].cumsum(2)], dim=2)
    grown = sums.exp()
    right = (k * (-sums).exp()).mT  # not k / grown, whose gradient needs the square of the inverse
    return ((k * grown) @ right).tril(), ((q * grown) @ right).tril()


def _pairwise_products(k: Tensor, q: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """The same for decays of any size."""
    size = log_decay.shape[2]
    step = max(1, _PAIRWISE_ELEMENTS // (log_decay.shape[1] * size * size * log_decay.shape[3]))
    parts = []
    for kp, qp, gp in zip(torch.split(k, step), torch.split(q, step), torch.split(log_decay, step), strict=True):
        decay = _sums_since(gp).exp()
        decayed = decay * kp[:, :, None]  # [n, H, i, j, K]
        parts.append(decayed @ torch.stack([kp, qp], dim=-1))  # [n, H, i, j, 2]
    both = torch.cat(parts)
    return both[..., 0].tril(), both[..., 1].tril()


def _sums_since(x: Tensor) -> Tensor:
    """`Σ_{j<m≤i} x_m` of `[n, H, C, K]` as `[n, H, i, j, K]`; 0 for j ≥ i.

    Not as a difference of running sums, which cancels when one token forgets much more than its neighbours.
    """
    row = torch.zeros_like(x)
    rows = [row]
    for i in range(1, x.shape[2]):
        row = torch.cat([row[:, :, :i] + x[:, :, i, None], row[:, :, i:]], dim=2)
        rows.append(row)
    return torch.stack(rows, dim=2)


@op(
    KDASpec.of_mixer,
    default="composed",
    parts=("short_conv", "kda_chunk", "kda_recurrent", "gated_rms_norm"),
)
def kda_mixer(
    qkv: Tensor,
    gate: Tensor,
    beta: Tensor,
    out_gate: Tensor,
    *,
    params: KDAParams,
    conv_weight: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    scale: float,
    state: Tensor | None = None,
    conv_state: Tensor | None = None,
    slots: Tensor | None = None,
    cu_seqlens: Tensor,
    saves: StateSaves | None = None,
    verify: VerifyScratch | None = None,
) -> Tensor:
    """Short convolution, delta-rule recurrence and gated norm. Updates `state` and `conv_state` in place.

    Args:
        qkv: `[T, C]`, projections in the order q | k | v.
        gate: `[T, H, K]`, logits of the decay.
        beta: `[T, H]`, logits of the write strength.
        out_gate: `[T, H, V]`, logits of the output gate.
        params: decay parameters of the layer.
        conv_weight: `[C, W]` fp32.
        norm_weight: `[V]` fp32.
        norm_eps: of the output norm.
        scale: factor applied to the normalised query.
        state: `[N, H, V, K]`, or None with `conv_state` and `slots` for the stateless call.
        conv_state: `[N, W - 1, C]`, oldest first.
        slots: `[B]` int32.
        cu_seqlens: `[B + 1]` int32.
        saves: interior states to store as well.
        verify: scratch of a verify step: `state` and `conv_state` stay as they are.

    Returns:
        `[T, H, V]` in the dtype of `qkv`.

    Raises:
        ConfigError: shapes, offsets, slots or saves do not fit; nothing has been written.
    """
    num_tokens, heads, key_dim = gate.shape
    value_dim = out_gate.shape[-1]
    if qkv.shape[-1] != heads * (2 * key_dim + value_dim):
        raise ConfigError(
            f"kda_mixer: qkv has {qkv.shape[-1]} channels, expected H·(2K + V) = {heads * (2 * key_dim + value_dim)}"
        )
    if (state is None) != (conv_state is None):
        raise ConfigError("kda_mixer: state and conv_state must be given together, or both left out")
    if state is not None and conv_state is not None and state.shape[0] != conv_state.shape[0]:
        raise ConfigError(f"kda_mixer: state has {state.shape[0]} rows, conv_state has {conv_state.shape[0]}")
    # all of it before the convolution, which writes
    _require_shape("beta", beta, (num_tokens, heads))
    _require_shape("out_gate", out_gate, (num_tokens, heads, value_dim))
    _require_shape("norm_weight", norm_weight, (value_dim,))
    _check_layer(params, state, heads, key_dim, value_dim)
    mixed = short_conv(
        qkv, conv_weight, conv_state=conv_state, slots=slots, cu_seqlens=cu_seqlens, saves=saves, verify=verify
    )
    q, k, v = torch.split(mixed, [heads * key_dim, heads * key_dim, heads * value_dim], dim=-1)
    is_long = verify is None and tokens_per_request(num_tokens, cu_seqlens) == "many"
    recurrence = kda_chunk if is_long else kda_recurrent
    out = recurrence(
        q.view(num_tokens, heads, key_dim),
        k.view(num_tokens, heads, key_dim),
        v.view(num_tokens, heads, value_dim),
        gate,
        beta,
        params=params,
        state=state,
        slots=slots,
        cu_seqlens=cu_seqlens,
        scale=scale,
        saves=saves,
        verify=verify,
    )
    return gated_rms_norm(out, out_gate, norm_weight, eps=norm_eps)
