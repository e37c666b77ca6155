"""Tokens sharded over the ranks of a replica between attention layers.

Shapes: T tokens of the replica, c = ceil(T / ranks) rows of a shard. The last shards are filled up with rows of zeros,
which stay zeros in every layer, so that all shards are equally long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional as F

from k3lib.parallel.group import LOCAL, Group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["TokenShards"]


class TokenShards:
    """A group whose sums stay sharded by token: layers that add partial results with `all_reduce` get their shard.

    As the `tp` of a layer it turns the all-reduce behind its last projection into a reduce-scatter; `gather` is the
    all-gather in front of the next such layer. With one rank everything is the identity.
    """

    def __init__(self, group: Group = LOCAL) -> None:
        self.group = group

    @property
    def rank(self) -> int:
        """Number of this rank in the group."""
        return self.group.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size

    def rows(self, tokens: int) -> int:
        """Rows of a shard of `tokens` tokens."""
        return -(-tokens // self.size)

    def shard(self, x: Tensor) -> Tensor:
        """This rank's rows `[c, ...]` of `x [T, ...]`, which all ranks have."""
        if self.size == 1:
            return x
        rows = self.rows(x.shape[0])
        return self._fill(x, rows)[self.rank * rows : (self.rank + 1) * rows]

    def gather(self, x: Tensor, tokens: int) -> Tensor:
        """All `[tokens, ...]` from the shards `[c, ...]`."""
        return x if self.size == 1 else self.group.all_gather(x)[:tokens]

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Sum `x [T, ...]` over the ranks; each gets its rows `[c, ...]`. Only sums can stay sharded."""
        if self.size == 1:
            return x
        if op != "sum":
            return self.group.all_reduce(x, op)
        return self.group.reduce_scatter(self._fill(x, self.rows(x.shape[0])))

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """As the group does."""
        return self.group.all_gather(x, dim)

    def reduce_scatter(self, x: Tensor, dim: int = 0) -> Tensor:
        """As the group does."""
        return self.group.reduce_scatter(x, dim)

    def all_to_all(self, x: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Tensor:
        """As the group does."""
        return self.group.all_to_all(x, send_counts, recv_counts)

    def _fill(self, x: Tensor, rows: int) -> Tensor:
        missing = rows * self.size - x.shape[0]
        return F.pad(x, [0, 0] * (x.ndim - 1) + [0, missing]) if missing else x
