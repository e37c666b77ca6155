"""RMS norms.

Shapes: `...` any leading axes, D width, V value dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from k3lib.errors import ConfigError
from k3lib.ops.packing import compute_dtype
from k3lib.ops.registry import intern_spec, op

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["NormSpec", "gated_rms_norm", "rms_norm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """Static facts of a norm."""

    width: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    deterministic: bool = False

    @staticmethod
    def of(x: Tensor, weight: Tensor, *, eps: float) -> NormSpec:
        """Facts of a call of `rms_norm`."""
        return intern_spec(NormSpec, x.shape[-1], x.dtype, weight.dtype)

    @staticmethod
    def of_gated(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> NormSpec:
        """Facts of a call of `gated_rms_norm`."""
        return intern_spec(NormSpec, x.shape[-1], x.dtype, weight.dtype)


def _check_weight(x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise ConfigError(f"weight has shape {tuple(weight.shape)}, x needs {tuple(x.shape[-1:])}")


@op(NormSpec.of)
def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Scale to unit root mean square, round, then multiply by the weight.

    `y = weight · round(x · rsqrt(mean(x²) + eps))`, fp32 inside; the first rounding to the dtype of `x` is part of
    the definition (model specification, section 3).

    Args:
        x: `[..., D]`.
        weight: `[D]`.
        eps: added to the mean of squares.

    Returns:
        `[..., D]` in the dtype of `x`.
    """
    _check_weight(x, weight)
    wide = x.to(compute_dtype(x))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed.to(x.dtype) * weight).to(x.dtype)


@op(NormSpec.of_gated)
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """RMS norm over the last axis times a sigmoid gate: fp32 throughout, one rounding at the end.

    Args:
        x: `[..., V]`.
        gate: `[..., V]`, logits.
        weight: `[V]`.
        eps: added to the mean of squares.

    Returns:
        `[..., V]` in the dtype of `gate`, which is the activation dtype.
    """
    _check_weight(x, weight)
    if x.shape != gate.shape:
        raise ConfigError(f"gate has shape {tuple(gate.shape)}, x has {tuple(x.shape)}")
    dtype = torch.promote_types(compute_dtype(x), compute_dtype(gate))
    wide = x.to(dtype)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight * torch.sigmoid(gate.to(dtype))).to(gate.dtype)
