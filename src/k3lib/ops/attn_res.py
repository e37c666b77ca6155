"""Attention residuals: a softmax over frozen block sums and the running sum.

Shapes: T tokens, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from k3lib.errors import ConfigError
from k3lib.ops.norm import rms_norm
from k3lib.ops.packing import compute_dtype
from k3lib.ops.registry import intern_spec, op

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AttnResSpec", "attn_res"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttnResSpec:
    """Static facts of an attention-residual read."""

    hidden: int
    num_blocks: int
    dtype: torch.dtype
    adds: bool
    writes: bool
    norms: bool
    deterministic: bool = False

    @staticmethod
    def of(
        prefix: Tensor | None,
        delta: Tensor | None,
        bank: Tensor,
        *,
        score_weight: Tensor,
        out_norm_weight: Tensor | None,
        num_blocks: int,
        write_block: int | None,
        eps: float,
        out_eps: float,
    ) -> AttnResSpec:
        """Facts of a call."""
        return intern_spec(
            AttnResSpec,
            bank.shape[-1],
            num_blocks,
            bank.dtype,
            prefix is not None and delta is not None,
            write_block is not None,
            out_norm_weight is not None,
        )


@op(AttnResSpec.of)
def attn_res(
    prefix: Tensor | None,
    delta: Tensor | None,
    bank: Tensor,
    *,
    score_weight: Tensor,
    out_norm_weight: Tensor | None,
    num_blocks: int,
    write_block: int | None,
    eps: float,
    out_eps: float,
) -> tuple[Tensor, Tensor | None]:
    """Add the pending delta, mix the block sums with the running sum, norm. Writes `bank[:, write_block]` in place.

    With `p = prefix + delta` and `rows = [bank_0 … bank_{n-1}, p]` (raw values):
    `s_j = Σ_d rows_j · score_weight · rsqrt(mean(rows_j²) + eps)`, `mix = Σ_j softmax(s)_j · rows_j`, all in fp32.
    Model specification, section 3.2.

    Args:
        prefix: `[T, D]`, running sum of the current block; None if the block has just begun.
        delta: `[T, D]`, output of the last sublayer; None if there is none.
        bank: `[T, rows, D]`, sums of the finished blocks.
        score_weight: `[D]` fp32, norm weight times projection, folded in fp32.
        out_norm_weight: `[D]` of the RMS norm that follows; None returns the mixture itself.
        num_blocks: rows of `bank` that count.
        write_block: store `p` in this row after reading, and begin a new block.
        eps: of the score norm.
        out_eps: of the norm that follows.

    Returns:
        The (normed) mixture `[T, D]`, and the new running sum: `p`, or None after a write.

    Raises:
        ConfigError: neither prefix nor delta, or a row that the bank does not have; nothing has been written.
    """
    if prefix is None and delta is None:
        raise ConfigError("attn_res: prefix and delta are both None; there is nothing to read")
    if not 0 <= num_blocks <= bank.shape[1]:
        raise ConfigError(f"attn_res: num_blocks={num_blocks}, but the bank has {bank.shape[1]} rows")
    if write_block is not None and not 0 <= write_block < bank.shape[1]:
        raise ConfigError(f"attn_res: write_block={write_block}, but the bank has {bank.shape[1]} rows")
    if prefix is None or delta is None:
        p = delta if prefix is None else prefix
        assert p is not None, "checked above"
    else:
        p = prefix + delta
    rows = torch.cat([bank[:, :num_blocks], p[:, None]], dim=1).to(compute_dtype(p))
    scores = (rows @ score_weight.to(rows.dtype)) * torch.rsqrt(rows.square().mean(-1) + eps)
    mix = (scores.softmax(-1)[:, None] @ rows)[:, 0].to(p.dtype)
    out = mix if out_norm_weight is None else rms_norm(mix, out_norm_weight, eps=out_eps)
    if write_block is None:
        return out, p
    bank[:, write_block] = p
    return out, None
