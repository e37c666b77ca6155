"""Decode context parallelism: the ranks of a group share the tokens of the latent KV.

Token i of a request belongs to rank `(i // interleave) % size`. A page number names one physical page on every rank and
covers `page_size · size` tokens, so page tables, allocators and prefix trees are the same on all ranks; only the rows
of a step are local.

Shapes: T packed new tokens, B requests, H heads of this rank, G = size · H heads of the group, L latent width, R width
of the shared key part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch

from k3lib.errors import ConfigError
from k3lib.ops.mla import gather_rows, merge_partials
from k3lib.ops.packing import compute_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from k3lib.batch import Batch, PrefixPiece
    from k3lib.parallel.group import Group

__all__ = [
    "gather_piece",
    "local_lengths",
    "local_rows",
    "merge_heads",
    "owned",
    "place_rows",
]


# ---- ownership: pure, without processes -----------------------------------------------------------


def _check(size: int, rank: int, interleave: int) -> None:
    if size < 1 or interleave < 1 or not 0 <= rank < size:
        raise ConfigError(f"dcp: rank={rank} is not one of size={size} ranks, or interleave={interleave} is below 1")


def owned(positions: Tensor, size: int, rank: int, interleave: int = 1) -> Tensor:
    """Whether this rank stores the token at each position: a mask of the shape of `positions`."""
    _check(size, rank, interleave)
    return torch.as_tensor(positions) // interleave % size == rank


@overload
def local_lengths(seq_lens: Tensor, size: int, rank: int, interleave: int = 1) -> Tensor: ...
@overload
def local_lengths(seq_lens: int, size: int, rank: int, interleave: int = 1) -> int: ...
def local_lengths(seq_lens: Tensor | int, size: int, rank: int, interleave: int = 1) -> Tensor | int:
    """How many of the first `seq_lens` tokens this rank stores; shares differ by at most `interleave`."""
    _check(size, rank, interleave)
    cycle = size * interleave
    rest = seq_lens % cycle - rank * interleave
    clamped = rest.clamp(0, interleave) if isinstance(rest, torch.Tensor) else min(max(rest, 0), interleave)
    return seq_lens // cycle * interleave + clamped


def local_rows(positions: Tensor, size: int, rank: int, interleave: int = 1) -> Tensor:
    """Index of each position's token inside its owner's share, counted from 0; -1 where that is another rank."""
    positions = torch.as_tensor(positions)
    mine = owned(positions, size, rank, interleave)
    index = positions // (size * interleave) * interleave + positions % interleave
    return torch.where(mine, index, -1)


def place_rows(batch: Batch, page_size: int, size: int, rank: int) -> None:
    """Set `rows` and `key_lens` of a batch for this rank, from its page table of widened pages.

    A new token that another rank owns gets row 0, the null row, so its write is dropped.
    """
    _check(size, rank, 1)
    batch.place_rows(page_size, dcp_size=size, dcp_rank=rank)


# ---- exchange -------------------------------------------------------------------------------------


def gather_piece(pages: Tensor, piece: PrefixPiece, group: Group) -> Tensor:
    """The cached rows of a piece in sequence order, `[n, L + R]` in the dtype of `pages`, from all ranks."""
    mine = gather_rows(pages, piece.rows)
    if piece.order is None:
        return mine
    narrow = mine.dtype.itemsize == 1
    every = group.all_gather(mine.view(torch.uint8) if narrow else mine)  # fp8 moves as bytes
    picked = every.index_select(0, piece.order)
    return picked.view(mine.dtype) if narrow else picked


def merge_heads(out: Tensor, lse: Tensor, group: Group, *, heads: int, form: Literal["a2a", "ag_rs"] = "a2a") -> Tensor:
    """Merge each rank's attention over its own tokens, and keep this rank's heads.

    Args:
        out: `[T, G, L]`, attention over this rank's tokens.
        lse: `[T, G]`, natural logarithms; `-inf` where a rank has no token, which then contributes nothing.
        group: the ranks.
        heads: H. `G = H` means that every rank needs all heads.
        form: "a2a" sends each rank the partial results of its heads in one exchange of bytes; "ag_rs" gathers the
            log-sum-exps, scales, and sums by a reduce-scatter over heads, in fp32.

    Returns:
        `[T, H, L]` in the dtype of `out`.
    """
    if group.size == 1:
        return out
    if out.shape[1] not in {heads, heads * group.size}:
        raise ConfigError(f"merge_heads: {out.shape[1]} heads are neither {heads} nor {group.size} times as many")
    if out.shape[1] == heads or form == "ag_rs":
        return _merge_by_sums(out, lse, group, heads)
    return _merge_by_exchange(out, lse, group, heads)


def _merge_by_exchange(out: Tensor, lse: Tensor, group: Group, heads: int) -> Tensor:
    tokens, _, width = out.shape

    def by_rank(x: Tensor) -> Tensor:  # [T, G, n] -> [size · T · H, bytes of n]
        parts = x.reshape(tokens, group.size, heads, x.shape[-1]).transpose(0, 1).contiguous()
        return parts.view(group.size * tokens * heads, x.shape[-1]).view(torch.uint8)

    sent = torch.cat([by_rank(out), by_rank(lse[..., None])], dim=1)
    count = [tokens * heads] * group.size
    arrived = group.all_to_all(sent, count, count)
    split = width * out.dtype.itemsize
    outs = arrived[:, :split].contiguous().view(out.dtype).view(group.size, tokens, heads, width)
    lses = arrived[:, split:].contiguous().view(lse.dtype).view(group.size, tokens, heads)
    return merge_partials(outs, lses)[0]


def _merge_by_sums(out: Tensor, lse: Tensor, group: Group, heads: int) -> Tensor:
    lse = lse.to(compute_dtype(out))
    every = group.all_gather(lse[None])
    total = every.logsumexp(0)
    weight = (lse - total.masked_fill(total == -torch.inf, 0)).exp()[..., None]
    part = weight * out.to(weight.dtype).masked_fill((lse == -torch.inf)[..., None], 0)
    if out.shape[1] == heads:
        return group.all_reduce(part).to(out.dtype)
    return group.reduce_scatter(part.transpose(0, 1).contiguous()).transpose(0, 1).to(out.dtype)
