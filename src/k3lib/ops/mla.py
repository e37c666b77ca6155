"""Attention over variable lengths, absorbed decode over latent pages, and the paged store and gather.

Shapes: T packed new tokens, B requests, H heads, L latent width, R width of the shared key part, M pages a request.
A log-sum-exp is a natural logarithm, `-inf` for an empty range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from k3lib.errors import ConfigError
from k3lib.ops.packing import TokensPerRequest, compute_dtype, host_lengths, tokens_per_request
from k3lib.ops.registry import intern_spec, op

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "AttentionSpec",
    "MLASpec",
    "MergeSpec",
    "RowsSpec",
    "attention_varlen",
    "gather_rows",
    "merge_partials",
    "mla_decode",
    "store_rows",
]

_QUERY_BLOCK = 512  # bounds the score matrix of the reference
FP8_MAX = 448.0  # largest float8_e4m3fn


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Static facts of un-absorbed attention."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    causal: bool
    return_lse: bool = False
    deterministic: bool = False

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        causal: bool,
        scale: float,
        return_lse: bool = False,
    ) -> AttentionSpec:
        """Facts of a call."""
        return intern_spec(
            AttentionSpec,
            q.shape[1],
            q.shape[2],
            v.shape[2],
            q.dtype,
            causal,
            return_lse,
        )


@op(AttentionSpec.of)
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool,
    scale: float,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of packed requests, fp32 inside.

    Args:
        q: `[Tq, H, Dk]`.
        k: `[Tk, H, Dk]`.
        v: `[Tk, H, Dv]`.
        cu_seqlens_q, cu_seqlens_k: `[B + 1]` int32.
        causal: a query sees the keys up to its own place, counted from the end of the key range.
        scale: factor applied to the scores.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        `[Tq, H, Dv]` in the dtype of `q`, and `[Tq, H]` fp32 if asked. A query without keys gives 0 and `-inf`.

    Raises:
        ConfigError: shapes or offsets do not fit.
    """
    if q.shape[1:] != k.shape[1:] or k.shape[:2] != v.shape[:2]:
        raise ConfigError(
            f"attention_varlen: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit together"
        )
    q_lengths = host_lengths(cu_seqlens_q, q.shape[0])
    k_lengths = host_lengths(cu_seqlens_k, k.shape[0])
    if len(q_lengths) != len(k_lengths):
        raise ConfigError(f"attention_varlen: {len(q_lengths)} requests of queries, {len(k_lengths)} of keys")
    dtype = compute_dtype(q)
    outs, lses = [], []
    for qi, ki, vi in zip(torch.split(q, q_lengths), torch.split(k, k_lengths), torch.split(v, k_lengths), strict=True):
        keys, values = ki.to(dtype).transpose(0, 1), vi.to(dtype).transpose(0, 1)  # [H, Tk, D]
        offset = len(ki) - len(qi)
        for start in range(0, len(qi), _QUERY_BLOCK):
            block = qi[start : start + _QUERY_BLOCK].to(dtype).transpose(0, 1)
            seen = min(len(ki), max(0, offset + start + block.shape[1])) if causal else len(ki)
            scores = (block @ keys[:, :seen].mT) * scale
            if causal:
                last = torch.arange(start, start + block.shape[1], device=q.device) + offset
                hidden = torch.arange(seen, device=q.device) > last[:, None]
                scores = scores.masked_fill(hidden, -torch.inf)
            out, lse = _softmax_times(scores, values[:, :seen])
            outs.append(out.transpose(0, 1))
            lses.append(lse.transpose(0, 1))
    out = torch.cat(outs).to(q.dtype) if outs else q.new_zeros(0, v.shape[1], v.shape[2])
    if not return_lse:
        return out
    return out, torch.cat(lses) if lses else q.new_zeros(0, q.shape[1], dtype=dtype)


def _softmax_times(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """`softmax(scores) @ values` and the log-sum-exp; rows without a finite score give 0 and `-inf`."""
    if scores.shape[-1] == 0:
        shape = (*scores.shape[:-1], values.shape[-1])
        return scores.new_zeros(shape), scores.new_full(scores.shape[:-1], -torch.inf)
    top = scores.amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0)  # a row without keys: every weight becomes 0
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    out = weights @ values / total.masked_fill(total == 0, 1)
    return out, (total.log() + top).squeeze(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MLASpec:
    """Static facts of absorbed decode."""

    heads: int
    latent_dim: int
    rope_dim: int
    value_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    page_size: int
    tokens_per_request: TokensPerRequest
    return_lse: bool = False
    deterministic: bool = False

    @staticmethod
    def of(
        q: Tensor,
        pages: Tensor,
        *,
        latent_dim: int,
        page_table: Tensor,
        key_lens: Tensor,
        cu_seqlens: Tensor,
        scale: float,
        return_lse: bool = False,
        plan: object = None,
    ) -> MLASpec:
        """Facts of a call."""
        return intern_spec(
            MLASpec,
            q.shape[1],
            latent_dim,
            q.shape[2] - latent_dim,
            latent_dim,
            q.dtype,
            pages.dtype,
            pages.shape[1],
            tokens_per_request(q.shape[0], cu_seqlens),
            return_lse,
        )


@op(MLASpec.of)
def mla_decode(
    q: Tensor,
    pages: Tensor,
    *,
    latent_dim: int,
    page_table: Tensor,
    key_lens: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    return_lse: bool = False,
    plan: object = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Absorbed multi-head latent attention over pages: all heads share one latent row per token.

    Args:
        q: `[T, H, L + R]`, absorbed queries beside the shared part.
        pages: `[P, page, L + R]`, cached rows; page 0 is the null page.
        latent_dim: L; the first L values of a row are also its value.
        page_table: `[B, M]` int32; entries beyond a request's rows are never followed.
        key_lens: `[T]` int32, rows that each token may see, counted from the start of its request's page table.
        cu_seqlens: `[B + 1]` int32.
        scale: factor applied to the scores.
        return_lse: also return the log-sum-exp.
        plan: ignored by the reference.

    Returns:
        `[T, H, L]` in the dtype of `q`, and `[T, H]` fp32 if asked; no keys give 0 and `-inf`.

    Raises:
        ConfigError: shapes do not fit, or a token would see more rows than its page table holds.
    """
    page_size, width = pages.shape[1:]
    if q.shape[-1] != width:
        raise ConfigError(f"mla_decode: q has width {q.shape[-1]}, pages have {width}")
    lengths = host_lengths(cu_seqlens, q.shape[0])
    if page_table.shape[0] != len(lengths) or key_lens.shape != q.shape[:1]:
        raise ConfigError(
            f"mla_decode: page_table has {page_table.shape[0]} rows for {len(lengths)} requests, key_lens "
            f"{tuple(key_lens.shape)} for {q.shape[0]} tokens"
        )
    dtype = compute_dtype(q)
    if not q.shape[0]:
        out = q.new_zeros(*q.shape[:2], latent_dim)
        return (out, q.new_zeros(q.shape[:2], dtype=dtype)) if return_lse else out
    longest = int(key_lens.max())
    if longest > page_table.shape[1] * page_size:
        raise ConfigError(
            f"mla_decode: key_lens reach {longest}, a page table row holds {page_table.shape[1]} pages of {page_size}"
        )
    # pad the queries of each request to the longest one: decode and verify steps need no padding at all
    most = max(lengths)
    uniform = most * len(lengths) == q.shape[0]
    member = torch.arange(most, device=q.device)
    here = member < torch.tensor(lengths, device=q.device)[:, None]
    token = torch.where(here, cu_seqlens[:-1, None] + member, 0)
    queries = q.view(len(lengths), most, *q.shape[1:]) if uniform else q[token]
    lens = key_lens.view(len(lengths), most) if uniform else torch.where(here, key_lens[token], 0)

    position = torch.arange(longest, device=q.device)
    exists = position < lens.amax(1)[:, None]
    pages_used = page_table[:, : -(-longest // page_size)]
    page = torch.where(exists, pages_used.repeat_interleave(page_size, 1)[:, :longest], 0)
    rows = pages[page.long(), (position % page_size).expand_as(page)].to(dtype)  # [B, n, L + R]
    rows = rows.masked_fill(~exists[..., None], 0)
    scores = torch.einsum("bthd,bnd->bhtn", queries.to(dtype), rows) * scale
    scores = scores.masked_fill((position >= lens[..., None])[:, None], -torch.inf)
    out, lse = _softmax_times(scores, rows[:, None, :, :latent_dim])
    out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    out, lse = (out.flatten(0, 1), lse.flatten(0, 1)) if uniform else (out[here], lse[here])
    return (out.to(q.dtype), lse) if return_lse else out.to(q.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeSpec:
    """Static facts of a merge."""

    heads: int
    value_dim: int
    dtype: torch.dtype
    deterministic: bool = False

    @staticmethod
    def of(outs: Tensor, lses: Tensor) -> MergeSpec:
        """Facts of a call."""
        return intern_spec(MergeSpec, outs.shape[2], outs.shape[3], outs.dtype)


@op(MergeSpec.of)
def merge_partials(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over disjoint key ranges: `out = Σ_p exp(lse_p − lse) out_p`, `lse = log Σ_p exp(lse_p)`.

    Args:
        outs: `[P, T, H, Dv]`.
        lses: `[P, T, H]`, natural logarithms; a part with `-inf` contributes nothing, whatever its out holds.

    Returns:
        `[T, H, Dv]` in the dtype of `outs`, and `[T, H]` fp32.
    """
    if lses.shape != outs.shape[:3]:
        raise ConfigError(f"merge_partials: lses {tuple(lses.shape)} do not fit outs {tuple(outs.shape)}")
    lses = lses.to(compute_dtype(outs))
    lse = lses.logsumexp(0)
    weights = (lses - lse.masked_fill(lse == -torch.inf, 0)).exp()[..., None]
    parts = outs.to(weights.dtype).masked_fill((lses == -torch.inf)[..., None], 0)
    return (weights * parts).sum(0).to(outs.dtype), lse


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsSpec:
    """Static facts of a paged store or gather."""

    width: int
    page_dtype: torch.dtype
    page_size: int
    deterministic: bool = False

    @staticmethod
    def of_store(values: Tensor, pages: Tensor, rows: Tensor) -> RowsSpec:
        """Facts of a call of `store_rows`."""
        return intern_spec(RowsSpec, pages.shape[2], pages.dtype, pages.shape[1])

    @staticmethod
    def of_gather(pages: Tensor, rows: Tensor) -> RowsSpec:
        """Facts of a call of `gather_rows`."""
        return intern_spec(RowsSpec, pages.shape[2], pages.dtype, pages.shape[1])


@op(RowsSpec.of_store)
def store_rows(values: Tensor, pages: Tensor, rows: Tensor) -> None:
    """Write rows into `pages` in place. Rows <= 0 are dropped: row 0 is the null row.

    Args:
        values: `[T, L + R]`; rounded to the dtype of `pages`, fp8 saturates.
        pages: `[P, page, L + R]`, contiguous.
        rows: `[T]` int64, `page * page_size + offset`.

    Raises:
        ConfigError: widths differ, or a row is past the end; nothing has been written.
    """
    if values.shape[-1] != pages.shape[-1] or rows.shape != values.shape[:1]:
        raise ConfigError(
            f"store_rows: values {tuple(values.shape)} and rows {tuple(rows.shape)} do not fit pages "
            f"{tuple(pages.shape)}"
        )
    if not rows.numel():
        return
    flat = pages.view(-1, pages.shape[-1])
    low, high = (int(x) for x in rows.aminmax())
    if high >= flat.shape[0]:
        raise ConfigError(f"store_rows: row {high} is past the end of a pool with rows 0..{flat.shape[0] - 1}")
    if low <= 0:
        keep = rows > 0
        values, rows = values[keep], rows[keep]
    if pages.dtype == torch.float8_e4m3fn:
        stored = values.clamp(-FP8_MAX, FP8_MAX).to(pages.dtype)
        flat.view(torch.uint8)[rows] = stored.view(torch.uint8)
    else:
        flat[rows] = values.to(pages.dtype)


@op(RowsSpec.of_gather)
def gather_rows(pages: Tensor, rows: Tensor) -> Tensor:
    """Read rows from `pages`. Rows <= 0 read the null row.

    Args:
        pages: `[P, page, L + R]`, contiguous.
        rows: `[n]` int64.

    Returns:
        `[n, L + R]` in the dtype of `pages`.

    Raises:
        ConfigError: a row is past the end.
    """
    flat = pages.view(-1, pages.shape[-1])
    if rows.numel() and int(rows.max()) >= flat.shape[0]:
        raise ConfigError(f"gather_rows: row {int(rows.max())} is past the end of rows 0..{flat.shape[0] - 1}")
    rows = rows.clamp(min=0)
    if pages.dtype == torch.float8_e4m3fn:
        return flat.view(torch.uint8)[rows].view(pages.dtype)
    return flat[rows]
