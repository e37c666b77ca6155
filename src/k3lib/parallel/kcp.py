"""Context-parallel prefill of KDA: the tokens of a sequence are split over ranks, in order.

The state after a rank's tokens is an affine function of the state before them, `S ← S A + b`: per head `A [K, K]` is
the product of the tokens' `diag(e^g) (I − β k kᵀ)`, and `b [V, K]` the state that the tokens leave when they start from
zero. Ranks exchange A and b, compose those in front of them, and run the recurrence from the state that results.

Shapes: T packed tokens of this rank, B requests, H heads, K key dim, V value dim, N pool rows, C channels, W width of
the convolution.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from k3lib.batch import Batch
from k3lib.errors import ConfigError
from k3lib.ops.conv import short_conv
from k3lib.ops.kda import kda_chunk, kda_mixer
from k3lib.ops.mla import store_rows
from k3lib.ops.norm import gated_rms_norm
from k3lib.ops.packing import compute_dtype, host_lengths, host_slots

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from k3lib.batch import StateSaves, VerifyScratch
    from k3lib.ops.kda import KDAParams
    from k3lib.parallel.group import Group

__all__ = [
    "compose",
    "conv_halo",
    "kda_context_parallel",
    "kda_mixer_context_parallel",
    "mixer_of",
    "prefill_split",
    "split_tokens",
    "store_everywhere",
    "store_of",
    "transitions",
]


def split_tokens(lengths: list[int], size: int, rank: int, chunk: int = 64) -> list[tuple[int, int]]:
    """Which tokens `[begin, end)` of each request this rank takes: equal runs in rank order, in multiples of `chunk`.

    The last ranks may get fewer, or none.
    """
    if size < 1 or chunk < 1 or not 0 <= rank < size:
        raise ConfigError(f"split_tokens: rank={rank} is not one of size={size} ranks, or chunk={chunk} is below 1")
    parts = []
    for length in lengths:
        each = -(-length // (size * chunk)) * chunk
        parts.append((min(rank * each, length), min((rank + 1) * each, length)))
    return parts


def transitions(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, *, params: KDAParams, cu_seqlens: Tensor, scale: float
) -> Tensor:
    """What this rank's tokens do to the state of each request: `[B, H, V + K, K]` fp32, b above A.

    A request without tokens here has the identity and zero. Arguments as in `ops.kda_chunk`.
    """
    requests, heads, key_dim, value_dim = cu_seqlens.numel() - 1, v.shape[1], k.shape[-1], v.shape[-1]
    dtype = compute_dtype(v)
    slots = torch.arange(1, requests + 1, dtype=torch.int32, device=v.device)

    def after(values: Tensor, state: Tensor) -> Tensor:
        kda_chunk(q, k, values, gate, beta, params=params, state=state, slots=slots, cu_seqlens=cu_seqlens, scale=scale)
        return state[1:]

    b = after(v, v.new_zeros(requests + 1, heads, value_dim, key_dim, dtype=dtype))
    identity = torch.eye(key_dim, dtype=dtype, device=v.device).expand(requests + 1, heads, key_dim, key_dim)
    # the recurrence moves each row of the state alike: rows of the identity become those of A
    a = after(v.new_zeros(v.shape[0], heads, key_dim), identity.contiguous())
    return torch.cat([b, a], dim=2)


def compose(state: Tensor, steps: Tensor) -> Tensor:
    """Apply transitions `[R, B, H, V + K, K]` to states `[B, H, V, K]`, in order."""
    value_dim = state.shape[-2]
    for step in steps:
        state = state @ step[..., value_dim:, :] + step[..., :value_dim, :]
    return state


def kda_context_parallel(
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
    group: Group,
) -> Tensor:
    """Run the KDA recurrence over requests whose tokens are split over the ranks of `group`, in rank order.

    Updates `state` in place: every rank gets the state after all tokens. All ranks call this in the same step, also
    one that has no token of any request.

    Args:
        q, k: `[T, H, K]`, not yet normalised.
        v: `[T, H, V]`.
        gate: `[T, H, K]`, logits of the channel-wise decay.
        beta: `[T, H]`, logits of the write strength.
        params: decay parameters of the layer.
        state: `[N, H, V, K]`, the same on all ranks; None starts every request from zero, keeps nothing.
        slots: `[B]` int32, row of `state` of each request; 0 or less reads zeros and keeps nothing.
        cu_seqlens: `[B + 1]` int32: this rank's tokens of each request, perhaps none.
        scale: factor applied to the normalised `q`.
        group: the ranks that share the tokens.

    Returns:
        `[T, H, V]` of this rank's tokens, in the dtype of `v`.

    Raises:
        ConfigError: shapes, offsets or slots do not fit; nothing has been sent or written.
    """
    lengths = host_lengths(cu_seqlens, v.shape[0])
    rows = host_slots(slots, state, len(lengths))
    heads, key_dim, value_dim = v.shape[1], k.shape[-1], v.shape[-1]
    if state is not None and state.shape[1:] != (heads, value_dim, key_dim):
        raise ConfigError(
            f"kda: state has rows {tuple(state.shape[1:])}, expected [H, V, K] = {(heads, value_dim, key_dim)}"
        )
    mine = transitions(q, k, v, gate, beta, params=params, cu_seqlens=cu_seqlens, scale=scale)
    start = mine.new_zeros(len(lengths), heads, value_dim, key_dim)
    live = [i for i, row in enumerate(rows or []) if row > 0]
    if rows is not None and state is not None and live:
        start[live] = state[[rows[i] for i in live]].to(start.dtype)
    every = group.all_gather(mine[None])
    # row 0 is the null slot of the op
    running = torch.cat([start.new_zeros(1, *start.shape[1:]), compose(start, every[: group.rank])])
    out = kda_chunk(
        q,
        k,
        v,
        gate,
        beta,
        params=params,
        state=running,
        slots=torch.arange(1, len(lengths) + 1, dtype=torch.int32, device=v.device),
        cu_seqlens=cu_seqlens,
        scale=scale,
    )
    if rows is not None and state is not None and live:
        state[[rows[i] for i in live]] = compose(start, every)[live].to(state.dtype)
    if rows is not None and any(row < 0 for row in rows):
        dropped = torch.tensor([row < 0 for row in rows], device=v.device)
        counts = torch.tensor(lengths, device=v.device)
        out = out.masked_fill(torch.repeat_interleave(dropped, counts)[:, None, None], 0)
    return out


def conv_halo(x: Tensor, width: int, *, cu_seqlens: Tensor, initial: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """The convolution's window in front of this rank's tokens, and the one behind all tokens of the group.

    Args:
        x: `[T, C]`, projected inputs of this rank.
        width: W.
        cu_seqlens: `[B + 1]` int32.
        initial: `[B, W - 1, C]`, the windows in front of the first rank's tokens.
        group: the ranks that share the tokens, in order.

    Returns:
        Two `[B, W - 1, C]` in the dtype of `initial`: where this rank starts, and where the requests end.
    """
    past = width - 1
    lengths = torch.tensor(host_lengths(cu_seqlens, x.shape[0]), device=x.device)
    # the last inputs of each request here, at the right end; what lies before them is masked by their number
    back = torch.arange(-past, 0, device=x.device)
    position = lengths[:, None] + back
    index = (cu_seqlens[:-1, None].long() + position).clamp(min=0)
    tails = x[index] if x.shape[0] else x.new_zeros(*index.shape, x.shape[1])
    counts = lengths.clamp(max=past)
    every, known = group.all_gather(tails[None]), group.all_gather(counts[None])
    window = before = initial
    for rank in range(group.size):
        if rank == group.rank:
            before = window
        # shift the window by the new inputs: from `window` or from the tail, by place
        place = torch.arange(past, device=x.device) + known[rank][:, None]
        joined = torch.cat([window, every[rank].to(window.dtype)], dim=1)  # [B, 2 (W - 1), C]
        source = torch.where(place < past, place, torch.arange(past, device=x.device) + past)
        window = joined.gather(1, source[..., None].expand(-1, -1, joined.shape[2]))
    return before, window


def kda_mixer_context_parallel(
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
    group: Group,
) -> Tensor:
    """`ops.kda_mixer` over requests whose tokens are split over the ranks of `group`; arguments as there.

    Updates `state` and `conv_state` in place, alike on every rank.

    Raises:
        ConfigError: shapes, offsets or slots do not fit, or states inside the prompt are wanted; nothing has been sent
            or written.
    """
    if saves is not None or verify is not None:
        raise ConfigError("kda_mixer: tokens that are split over ranks leave the state behind all of them, no other")
    num_tokens, heads, key_dim = gate.shape
    value_dim = out_gate.shape[-1]
    if qkv.shape[-1] != heads * (2 * key_dim + value_dim):
        raise ConfigError(
            f"kda_mixer: qkv has {qkv.shape[-1]} channels, expected H·(2K + V) = {heads * (2 * key_dim + value_dim)}"
        )
    if (state is None) != (conv_state is None):
        raise ConfigError("kda_mixer: state and conv_state must be given together, or both left out")
    lengths = host_lengths(cu_seqlens, num_tokens)
    rows = host_slots(slots, conv_state, len(lengths))
    live = [i for i, row in enumerate(rows or []) if row > 0]
    width = conv_weight.shape[1]
    initial = qkv.new_zeros(len(lengths), width - 1, qkv.shape[1])
    if rows is not None and conv_state is not None and live:
        initial[live] = conv_state[[rows[i] for i in live]].to(initial.dtype)
    before, after = conv_halo(qkv, width, cu_seqlens=cu_seqlens, initial=initial, group=group)
    windows = torch.cat([before.new_zeros(1, *before.shape[1:]), before])
    mixed = short_conv(
        qkv,
        conv_weight,
        conv_state=windows,
        slots=torch.arange(1, len(lengths) + 1, dtype=torch.int32, device=qkv.device),
        cu_seqlens=cu_seqlens,
    )
    q, k, v = torch.split(mixed, [heads * key_dim, heads * key_dim, heads * value_dim], dim=-1)
    out = kda_context_parallel(
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
        group=group,
    )
    if conv_state is not None and rows is not None and live:
        conv_state[[rows[i] for i in live]] = after[live].to(conv_state.dtype)
    return gated_rms_norm(out, out_gate, norm_weight, eps=norm_eps)


# ---- a whole model


def mixer_of(batch: Batch, group: Group) -> Callable[..., Tensor]:
    """`ops.kda_mixer`, or the same over the tokens of all ranks of `group` if the batch is split over them.

    Raises:
        ConfigError: it is split over another number of ranks.
    """
    return functools.partial(kda_mixer_context_parallel, group=group) if _is_split(batch, group) else kda_mixer


def store_of(batch: Batch, group: Group) -> Callable[[Tensor, Tensor, Tensor], None]:
    """`ops.store_rows`, or `store_everywhere` if the batch is split over the ranks of `group`; errors as above."""
    return functools.partial(store_everywhere, group=group) if _is_split(batch, group) else store_rows


def _is_split(batch: Batch, group: Group) -> bool:
    if batch.split_over not in {1, group.size}:
        raise ConfigError(
            f"the batch is split over {batch.split_over} ranks, the layer over {group.size}: build the model on a mesh "
            "with cp=group"
        )
    return batch.split_over > 1


def store_everywhere(latent: Tensor, pages: Tensor, rows: Tensor, *, group: Group) -> None:
    """`ops.store_rows` of every rank's rows on every rank; their number may differ.

    Args:
        latent: `[T, L + R]` of this rank's tokens.
        pages: of this rank, updated in place.
        rows: `[T]` int64, the same pages on all ranks.
        group: the ranks that share the tokens.
    """
    counts = group.all_gather(torch.tensor([len(rows)], device=rows.device))
    missing = int(counts.max()) - len(rows)
    # what fills up goes to the null row, which drops it
    latent, rows = F.pad(latent, (0, 0, 0, missing)), F.pad(rows, (0, missing))
    store_rows(group.all_gather(latent), pages, group.all_gather(rows))


def prefill_split(
    run: Callable[[Batch], Tensor],
    ids: Sequence[Tensor],
    group: Group,
    *,
    slots: Sequence[int],
    page_tables: Sequence[Sequence[int]],
    page_size: int,
    cached_tokens: Sequence[int] | None = None,
    chunk: int = 64,
) -> Tensor:
    """Prefill prompts whose tokens are split over ranks, each of which has all weights and pools of its own.

    Afterwards the pools of every rank hold what an unsplit prefill leaves there, so that any of them may decode. Only
    the tokens are shared: KDA composes states, latent attention reads the rows of the ranks in front from the pages,
    and everything else looks at one token at a time. (Pages narrower than the activations round these rows, as they do
    with those of a cached prefix.)

    Args:
        run: a step on this rank, `lambda batch: model(batch, cache, logits="last")`, of a model on
            `Mesh.single().replace(cp=group)`.
        ids: `[length]` of each request, the same on all ranks.
        group: the ranks, in the order of the tokens.
        slots: state slot of each request, the same on all ranks.
        page_tables: KV pages of each request, the same on all ranks.
        page_size: tokens a page.
        cached_tokens: of each request, in the pools of every rank already.
        chunk: ranks get multiples of so many tokens of a request, but for its last ones.

    Returns:
        What `run` gives of the last token of each request, on every rank; zeros for a request without tokens.
    """
    lengths, before = [len(x) for x in ids], list(cached_tokens or [0] * len(ids))
    parts = split_tokens(lengths, group.size, group.rank, chunk)
    batch = Batch.of(
        [end - begin for begin, end in parts],
        cached_tokens=[cached + begin for cached, (begin, _) in zip(before, parts, strict=True)],
        slots=slots,
        page_tables=page_tables,
        page_size=page_size,
        input_ids=torch.cat([x[begin:end] for x, (begin, end) in zip(ids, parts, strict=True)]),
    )
    batch.split_over = group.size
    last = run(batch)
    ends = [begin < end == length for (begin, end), length in zip(parts, lengths, strict=True)]
    return group.all_reduce(last.masked_fill(~torch.tensor(ends, device=last.device)[:, None], 0))
