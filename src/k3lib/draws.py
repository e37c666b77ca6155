"""Random numbers that are hashes of a seed and a position, and draws from distributions with them.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["draw", "random_keys", "random_numbers", "signed", "uniforms"]

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64


def uniforms(seeds: Tensor, positions: Tensor, lane: int = 0, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a random number in [0, 1) for each pair of a seed and a position, the same on every device.

    A hash, not a stream: nothing is remembered, so a position can be drawn again. With the output function `mix` of
    splitmix64, in integers modulo 2^64,

        mix(x):  x ^= x >> 30; x *= 0xBF58476D1CE4E5B9; x ^= x >> 27; x *= 0x94D049BB133111EB; x ^= x >> 31
        hash  =  mix(mix(seed + (lane + 1) g) + (position + 1) g),   g = 0x9E3779B97F4A7C15

    and the number is the upper 24 bits of the hash (53 in fp64), over 2^24 (2^53).

    Args:
        seeds: `[N]` int64.
        positions: `[N]` of integers: tokens in front of the one that is drawn, prompt included.
        lane: keeps apart the numbers that one position needs for different purposes.
        dtype: fp32 or fp64.

    Returns:
        `[N]` in `dtype`.
    """
    return random_numbers(random_keys(seeds, lane), positions, dtype)


def random_keys(seeds: Tensor, lane: int = 0) -> Tensor:
    """The part of the hash that does not depend on positions, `[N]` int64, for `random_numbers`."""
    return _mix(seeds + signed((lane + 1) * _GOLDEN)) + _GOLDEN


def random_numbers(keys: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """`uniforms` of keys from `random_keys`."""
    bits = {torch.float32: 24, torch.float64: 53}[dtype]
    hashed = _mix(torch.add(keys, positions.to(torch.int64), alpha=_GOLDEN))
    return _shifted(hashed, 64 - bits).to(dtype) * 2.0**-bits


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, places: int) -> Tensor:
    """Shift int64 to the right as if it had no sign."""
    return (x >> places) & ((1 << (64 - places)) - 1)


def signed(x: int) -> int:
    """The int64 that equals an integer modulo 2^64."""
    return (x + 2**63) % 2**64 - 2**63


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one id of each row by inverting its cumulative distribution, in the order of the ids.

    Args:
        probs: `[N, V]`, not negative, of sum below 2; they are taken relative to their sum, to the bit 2^-62.
        uniforms: `[N]` in [0, 1).

    Returns:
        `[N]` int64, never an id of probability 0; -1 for a row of zeros.
    """
    ends = (probs * 2.0**62).to(torch.int64).cumsum(-1)
    total = ends[:, -1:]
    # the last entry that is not 0, whatever is rounded up
    ticket = torch.minimum((uniforms[:, None].double() * total).to(torch.int64), total - 1)
    return torch.where(total > 0, torch.searchsorted(ends, ticket, right=True), -1)[:, 0]
