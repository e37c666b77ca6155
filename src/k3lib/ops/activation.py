"""SiTU-GLU, the activation of every feed-forward layer of K3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from k3lib.errors import ConfigError
from k3lib.ops.packing import compute_dtype
from k3lib.ops.registry import intern_spec, op

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SiTUSpec", "situ_and_mul"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SiTUSpec:
    """Static facts of the activation."""

    width: int
    dtype: torch.dtype
    capped_up: bool
    deterministic: bool = False

    @staticmethod
    def of(x: Tensor, *, beta: float, linear_beta: float | None) -> SiTUSpec:
        """Facts of a call."""
        return intern_spec(SiTUSpec, x.shape[-1] // 2, x.dtype, linear_beta is not None)


@op(SiTUSpec.of)
def situ_and_mul(x: Tensor, *, beta: float, linear_beta: float | None) -> Tensor:
    """Compute `beta·tanh(g/beta)·sigmoid(g) · linear_beta·tanh(u/linear_beta)` of `x = [g | u]`.

    fp32 inside, one rounding. The sigmoid takes the uncapped gate. Model specification, section 3.6.

    Args:
        x: `[..., 2F]`, the gate half, then the up half.
        beta: cap of the gate.
        linear_beta: cap of the up half; None leaves it uncapped.

    Returns:
        `[..., F]` in the dtype of `x`.
    """
    if x.shape[-1] % 2:
        raise ConfigError(f"situ_and_mul needs an even last axis [gate | up], got {x.shape[-1]}")
    gate, up = x.to(compute_dtype(x)).chunk(2, dim=-1)
    if linear_beta is not None:
        up = linear_beta * torch.tanh(up / linear_beta)
    return (beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up).to(x.dtype)
