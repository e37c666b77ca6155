"""Rotary positions of drafts: in pairs side by side, or in two halves."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from k3lib.ops.packing import compute_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from k3lib.draft_config import RopeConfig

__all__ = ["Rope", "Turns"]


class Turns(NamedTuple):
    """Cosines and sines of some tokens, each `[n, dim / 2]`."""

    cos: Tensor
    sin: Tensor


class Rope:
    """Rotates vectors of `dim` values by their token's position."""

    def __init__(self, config: RopeConfig, dim: int, *, interleaved: bool) -> None:
        """Prepare the frequencies.

        Args:
            config: base and stretching.
            dim: values that are rotated.
            interleaved: a pair is two neighbours; else it is value i of either half.
        """
        self.interleaved = interleaved
        self.multiplier = config.multiplier
        self._frequencies = {torch.device("cpu"): torch.tensor(config.frequencies(dim), dtype=torch.float64)}

    def turns(self, positions: Tensor, dtype: torch.dtype) -> Turns:
        """Cosines and sines of `positions [n]`, in what vectors of `dtype` are computed in."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        device = positions.device
        if device not in self._frequencies:
            self._frequencies[device] = self._frequencies[torch.device("cpu")].to(device)
        # fp64: at a position of a million the angle in fp32 is off by 0.06
        angles = positions.to(torch.float64)[:, None] * self._frequencies[device]
        return Turns((angles.cos() * self.multiplier).to(wide), (angles.sin() * self.multiplier).to(wide))

    def rotate(self, x: Tensor, turns: Turns) -> Tensor:
        """Rotate `x [n, ..., dim]`; in the dtype of `x`, computed in fp32."""
        shape = (x.shape[0], *[1] * (x.ndim - 2), x.shape[-1] // 2)
        cos, sin = turns.cos.view(shape), turns.sin.view(shape)
        wide = x.to(compute_dtype(x))
        if self.interleaved:
            a, b = wide.reshape(*wide.shape[:-1], shape[-1], 2).unbind(-1)
            out = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
        else:
            a, b = wide.chunk(2, dim=-1)
            out = torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
        return out.to(x.dtype)
