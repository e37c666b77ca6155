"""The protocol of a group of ranks, the group of one, and a view of one rank without transport."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from k3lib.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["LOCAL", "Group", "LocalGroup", "RankView"]


class Group(Protocol):
    """Ranks that share work. A group of size 1 is the identity."""

    @property
    def rank(self) -> int:
        """Number of this rank in the group, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Combine `x` of all ranks; every rank gets the result."""
        ...

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """Concatenate `x` of all ranks along `dim`, in rank order."""
        ...

    def reduce_scatter(self, x: Tensor, dim: int = 0) -> Tensor:
        """Sum `x` over the ranks; each gets its part along `dim`."""
        ...

    def all_to_all(self, x: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Tensor:
        """Send `send_counts[r]` rows of `x` to each rank r; return the received rows in rank order."""
        ...


@dataclass(frozen=True, slots=True)
class LocalGroup:
    """The group of one rank: every method returns its input."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Return `x`."""
        return x

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return `x`."""
        return x

    def reduce_scatter(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return `x`."""
        return x

    def all_to_all(self, x: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Tensor:
        """Return `x`."""
        return x


LOCAL = LocalGroup()


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank of a group without transport: builds and loads that rank's shard anywhere, computes no collective."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"RankView: rank={self.rank} is not one of {self.size} ranks")

    def _refuse(self, what: str) -> ConfigError:
        return ConfigError(
            f"{what} over {self.size} ranks: this model was built for rank {self.rank} with a RankView, which can load "
            "a shard but not talk to the others"
        )

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Refuse."""
        raise self._refuse("all_reduce")

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """Refuse."""
        raise self._refuse("all_gather")

    def reduce_scatter(self, x: Tensor, dim: int = 0) -> Tensor:
        """Refuse."""
        raise self._refuse("reduce_scatter")

    def all_to_all(self, x: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Tensor:
        """Refuse."""
        raise self._refuse("all_to_all")
