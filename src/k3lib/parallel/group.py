"""The protocol of a group of ranks, the group of one, groups of torch.distributed, and views without transport."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from k3lib.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from torch import Tensor
    from torch.distributed import ProcessGroup, Work

__all__ = ["LOCAL", "Chain", "Group", "LocalGroup", "RankView", "TorchGroup", "TransportError"]


class TransportError(RuntimeError):
    """A collective failed: most likely another rank of the group has gone, or has ended its part."""


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


class Chain(Group, Protocol):
    """A group whose ranks also send to one another: the stages of a pipeline."""

    def send(self, x: Tensor, to: int) -> Work | None:
        """Begin to send `x` to rank `to`; keep `x` until the returned work is done."""
        ...

    def receive(self, like: Tensor, source: int) -> Tensor:
        """Receive from rank `source` what has the shape and dtype of `like`."""
        ...

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Give every rank the `x` of rank `source`; the others pass a tensor of its shape."""
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


_REDUCTIONS = ("sum", "max", "min")
# torch 2.13 renamed them
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)
# what backends do not know travels as bytes
_AS_BYTES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.bool)


# errors of this rank's own device
_OF_THE_DEVICE: tuple[type[Exception], ...] = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", MemoryError))


class _Transport:
    """Around calls of torch.distributed: what they raise is about the way, not about the data."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, _OF_THE_DEVICE):
            raise TransportError(str(error).strip() or type(error).__name__) from error


_TRANSPORT = _Transport()


class TorchGroup:
    """A group over a process group of torch.distributed: gloo, NCCL, RCCL, HCCL.

    Every rank calls the same methods in the same order. Inputs are never changed. Results carry no gradient: a
    backward pass through one is refused. What torch.distributed raises comes as a `TransportError`.
    """

    def __init__(self, group: ProcessGroup) -> None:
        """Wrap `group`, of which this process is a member."""
        self.group = group
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self.backend: str = dist.get_backend(group)

    @property
    def rank(self) -> int:
        """Number of this rank in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._size

    def __repr__(self) -> str:
        return f"TorchGroup(rank {self.rank} of {self.size}, {self.backend})"

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Combine `x` of all ranks by `op` ("sum", "max", "min"); every rank gets the result.

        Raises:
            ConfigError: another `op`; nothing has been sent.
        """
        if op not in _REDUCTIONS:
            raise ConfigError(f"all_reduce: op={op!r} is not one of {', '.join(_REDUCTIONS)}")
        if self.size == 1 or not x.numel():
            return x
        total = x.detach().clone(memory_format=torch.contiguous_format)
        with _TRANSPORT:
            dist.all_reduce(total, getattr(dist.ReduceOp, op.upper()), group=self.group)
        return _without_gradient(x, total)

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """Concatenate `x`, of one shape on all ranks, along `dim` in rank order."""
        if self.size == 1:
            return x
        if not x.numel():
            shape = list(x.shape)
            shape[dim] *= self.size
            return x.new_empty(shape)
        mine = _carried(x)
        parts = mine.new_empty(self.size * mine.shape[0], *mine.shape[1:]) if mine.ndim else mine.new_empty(self.size)
        with _TRANSPORT:
            _all_gather(parts, mine, group=self.group)
        if dim % x.ndim:
            parts = torch.cat(parts.chunk(self.size), dim=dim)
        return _without_gradient(x, parts.view(x.dtype))

    def reduce_scatter(self, x: Tensor, dim: int = 0) -> Tensor:
        """Sum `x` over the ranks; each gets its equal part along `dim`.

        Raises:
            ConfigError: `dim` does not divide into equal parts; nothing has been sent.
        """
        if self.size == 1:
            return x
        if x.shape[dim] % self.size:
            raise ConfigError(f"reduce_scatter: {x.shape[dim]} rows do not divide into {self.size} equal parts")
        if not x.numel():
            return x.chunk(self.size, dim)[0] if x.shape[dim] else x
        whole = x.detach()
        if dim % x.ndim:
            whole = torch.cat(whole.chunk(self.size, dim))  # parts one behind the other
        whole = whole.contiguous()
        part = whole.new_empty(whole.shape[0] // self.size, *whole.shape[1:])
        with _TRANSPORT:
            _reduce_scatter(part, whole, group=self.group)
        return _without_gradient(x, part)

    def all_to_all(self, x: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Tensor:
        """Send `send_counts[r]` rows of `x` to each rank r; return the received rows in rank order.

        Raises:
            ConfigError: the counts do not fit; nothing has been sent.
        """
        if len(send_counts) != self.size or len(recv_counts) != self.size or sum(send_counts) != x.shape[0]:
            raise ConfigError(
                f"all_to_all: {len(send_counts)} and {len(recv_counts)} counts for {self.size} ranks, which send "
                f"{sum(send_counts)} of {x.shape[0]} rows"
            )
        if self.size == 1:
            return x
        mine = _carried(x)
        received = mine.new_empty(sum(recv_counts), *mine.shape[1:])
        with _TRANSPORT:
            dist.all_to_all_single(received, mine, list(recv_counts), list(send_counts), group=self.group)
        return _without_gradient(x, received.view(x.dtype))

    # ---- one rank to another: pipelines, and what one rank decides for all

    def send(self, x: Tensor, to: int) -> Work | None:
        """Begin to send `x` to rank `to`; keep `x` until the returned work is done."""
        if not x.numel():
            return None
        with _TRANSPORT:
            return dist.isend(_carried(x), group=self.group, group_dst=to)

    def receive(self, like: Tensor, source: int) -> Tensor:
        """Receive from rank `source` what has the shape and dtype of `like`, into `like`, which is contiguous."""
        if like.numel():
            with _TRANSPORT:
                dist.recv(_carried(like), group=self.group, group_src=source)
        return like

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Give every rank the `x` of rank `source`; the others pass a contiguous tensor of its shape to be filled."""
        if self.size > 1 and x.numel():
            with _TRANSPORT:
                dist.broadcast(_carried(x), group=self.group, group_src=source)
        return x


def _carried(x: Tensor) -> Tensor:
    """`x` as backends take it: contiguous, of a dtype that they know."""
    x = x.detach().contiguous()
    return x.view(torch.uint8) if x.dtype in _AS_BYTES else x


class _NoGradient(torch.autograd.Function):
    """A collective in a graph: its result is right, its gradient does not exist."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, result: Tensor) -> Tensor:  # noqa: ANN401 - torch's signature
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: ANN401 - torch's signature
        raise ConfigError("a collective of TorchGroup has no gradient: train on one rank, or wrap the model yourself")


def _without_gradient(x: Tensor, result: Tensor) -> Tensor:
    if not (torch.is_grad_enabled() and x.requires_grad):
        return result
    out: Tensor = _NoGradient.apply(x, result)  # type: ignore[no-untyped-call]
    return out
