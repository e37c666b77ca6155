"""The dense feed-forward layer with SiTU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from k3lib import ops
from k3lib.layers.linear import Fused, K3Module, Linear
from k3lib.parallel.group import LOCAL, Group

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from k3lib.config import SiTU

__all__ = ["SiTUMLP"]


class SiTUMLP(K3Module):
    """`down(SiTU(gate(x), up(x)))`: the dense layers and the shared experts."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        act: SiTU,
        *,
        tp: Group = LOCAL,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.act = act
        place: dict[str, Any] = {"tp": tp, "dtype": dtype, "device": device}
        self.gate_proj = Linear(hidden_size, intermediate_size, cut="out", **place)
        self.up_proj = Linear(hidden_size, intermediate_size, cut="out", **place)
        self._front = Fused(self.gate_proj, self.up_proj)
        self.down_proj = Linear(intermediate_size, hidden_size, cut="in", **place)

    def fused_parts(self) -> Sequence[Fused]:
        """Gate and up projection."""
        return (self._front,)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to `[T, hidden]`."""
        out: Tensor = self.down_proj(
            ops.situ_and_mul(self._front(x), beta=self.act.beta, linear_beta=self.act.linear_beta)
        )
        return out
