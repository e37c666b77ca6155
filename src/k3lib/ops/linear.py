"""The product with a weight matrix.

Shapes: `...` any leading axes of T tokens, K input width, N output width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch.nn import functional as F

from k3lib.errors import ConfigError
from k3lib.ops.registry import intern_spec, op

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LinearSpec", "linear"]

FEW_TOKENS = 64
TokenClass = Literal["1", "few", "many"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """Static facts of a product; `tokens` is "1", "few" (at most 64) or "many"."""

    dtype: torch.dtype
    weight_dtype: torch.dtype
    tokens: TokenClass
    records: bool = False
    deterministic: bool = False

    @staticmethod
    def of(x: Tensor, weight: Tensor) -> LinearSpec:
        """Facts of a call."""
        count = x.shape[0] if x.ndim == 2 else x.shape[:-1].numel()
        tokens = "1" if count == 1 else "few" if count <= FEW_TOKENS else "many"
        records = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        return intern_spec(LinearSpec, x.dtype, weight.dtype, tokens, records)


@op(LinearSpec.of)
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`y = x weightᵀ`: fp32 sums of bf16 and fp16 products, one rounding.

    Args:
        x: `[..., K]`.
        weight: `[N, K]`.

    Returns:
        `[..., N]` in the dtype of `x`.

    Raises:
        ConfigError: shapes do not fit.
    """
    if x.shape[-1] != weight.shape[-1] or weight.ndim != 2:
        raise ConfigError(f"linear: x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}")
    return F.linear(x, weight)
