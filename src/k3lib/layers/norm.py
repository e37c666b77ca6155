"""Norm modules: a weight and an eps around the ops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3lib import ops
from k3lib.layers.linear import K3Module, parameter, wide_dtype

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["GatedRMSNorm", "RMSNorm"]


class RMSNorm(K3Module):
    """RMS norm over the last axis."""

    def __init__(
        self,
        width: int,
        eps: float,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter(width, dtype=dtype, device=device, fill=1)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to `[..., width]`."""
        return ops.rms_norm(x, self._parameters["weight"], eps=self.eps)  # type: ignore[arg-type]


class GatedRMSNorm(K3Module):
    """RMS norm over the last axis times a sigmoid gate; its weight is kept in fp32."""

    wide = ("weight",)

    def __init__(
        self,
        width: int,
        eps: float,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter(width, dtype=wide_dtype(dtype), device=device, fill=1)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Apply to `[..., width]` with gate logits of the same shape."""
        return ops.gated_rms_norm(x, gate, self.weight, eps=self.eps)
