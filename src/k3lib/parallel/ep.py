"""Routed experts spread over ranks: where each lies, and how tokens and experts meet.

Shapes: T tokens of this rank, L width of an expert, k experts per token, R ranks, E experts.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from k3lib.errors import ConfigError
from k3lib.ops.moe import ExpertsSpec, experts
from k3lib.ops.packing import compute_dtype
from k3lib.ops.registry import op
from k3lib.parallel.group import LOCAL, Group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from k3lib.config import SiTU
    from k3lib.ops.moe import ExpertStore

__all__ = ["ExpertSpread", "Placement", "ep_experts"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Which expert lies in which of the equal, contiguous parts of the ranks.

    Attributes:
        experts: for every place, in the order of the ranks, the expert that lies there. Each expert lies somewhere, hot
            ones several times.
        size: ranks; each has `len(experts) / size` places.
    """

    experts: tuple[int, ...]
    size: int

    def __post_init__(self) -> None:
        count = len(self.experts)
        if self.size < 1 or count % self.size:
            raise ConfigError(f"Placement: {count} places do not divide over {self.size} ranks")
        number = max(self.experts, default=-1) + 1
        lost = sorted(set(range(number)) - set(self.experts))
        if not number or min(self.experts) < 0 or lost:
            raise ConfigError(f"Placement: experts must be numbered from 0 without gaps; {lost or 'all'} lie nowhere")

    @classmethod
    def contiguous(cls, num_experts: int, size: int) -> Placement:
        """Equal ranges, in order."""
        return cls(tuple(range(num_experts)), size)

    @classmethod
    def balanced(cls, loads: Sequence[float], size: int, redundant: int = 0) -> Placement:
        """Spread experts so that the ranks get about equal work.

        First the expert with the largest load a copy gets another copy, `redundant` times. Then the copies go, heaviest
        first, to the rank with the least work that has a place and no copy of the same expert yet.

        Args:
            loads: work of each expert, for example how often it was chosen.
            size: ranks.
            redundant: copies beyond one each.

        Raises:
            ConfigError: the copies do not divide over the ranks, or a load is negative.
        """
        if any(not load >= 0 for load in loads):
            raise ConfigError(f"Placement.balanced: loads must be >= 0, got {min(loads)}")
        total = len(loads) + redundant
        if size < 1 or total % size:
            raise ConfigError(
                f"Placement.balanced: {len(loads)} experts and {redundant} copies do not divide over {size} ranks"
            )
        copies = [1] * len(loads)
        for _ in range(redundant):
            # a rank with two copies of one expert gains nothing
            possible = [e for e in range(len(loads)) if copies[e] < size] or list(range(len(loads)))
            copies[max(possible, key=lambda e: (loads[e] / copies[e], -e))] += 1
        pieces = sorted((-loads[e] / copies[e], e) for e in range(len(loads)) for _ in range(copies[e]))
        room, held = total // size, [[] for _ in range(size)]  # type: ignore[var-annotated]
        ranks = [(0.0, rank) for rank in range(size)]
        for load, expert in pieces:
            passed = []
            while True:
                work, rank = heapq.heappop(ranks)
                if expert not in held[rank] or not ranks:
                    break
                passed.append((work, rank))
            held[rank].append(expert)
            if len(held[rank]) < room:
                passed.append((work - load, rank))
            for entry in passed:
                heapq.heappush(ranks, entry)
        return cls(tuple(e for mine in held for e in sorted(mine)), size)

    @property
    def num_experts(self) -> int:
        """Different experts."""
        return max(self.experts) + 1

    @property
    def per_rank(self) -> int:
        """Places of a rank."""
        return len(self.experts) // self.size

    def of(self, rank: int) -> tuple[int, ...]:
        """Experts on one rank, in the order of its places."""
        return self.experts[rank * self.per_rank : (rank + 1) * self.per_rank]

    def places(self) -> list[list[int]]:
        """For every expert its places, counted over all ranks."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for place, expert in enumerate(self.experts):
            found[expert].append(place)
        return found

    def table(self) -> Tensor:
        """`[E, most copies]` int32: the places of each expert, repeated in turn; a token takes one column."""
        places = self.places()
        most = max(len(mine) for mine in places)
        return torch.tensor([[mine[i % len(mine)] for i in range(most)] for mine in places], dtype=torch.int32)


def choose_places(ids: Tensor, table: Tensor) -> Tensor:
    """Turn expert ids into places: neighbouring tokens take different copies.

    Args:
        ids: `[T, k]` int32; negative ids stay.
        table: of `Placement.table`, on the device of `ids`.
    """
    column = torch.arange(ids.shape[0], device=ids.device) % table.shape[1]
    places = table[ids.clamp(min=0).long(), column[:, None]]
    return torch.where(ids < 0, ids, places)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpread:
    """How the routed experts of a layer are spread over ranks.

    Attributes:
        ep: ranks over which whole experts are spread.
        tp: ranks that share the width of an expert.
        replicas: ranks whose tokens meet in these experts, if each replica of the attention has its own.
        reduce: ranks with the same tokens, whose partial sums are added.
        exchange: "all_reduce", or "all_to_all" over `ep`.
        placement: None is equal ranges, in order.
    """

    ep: Group = LOCAL
    tp: Group = LOCAL
    replicas: Group = LOCAL
    reduce: Group = LOCAL
    exchange: Literal["all_reduce", "all_to_all"] = "all_reduce"
    placement: Placement | None = None

    @property
    def talks_in(self) -> tuple[Group, ...]:
        """The groups that `run` exchanges in."""
        return (self.ep,) if self.exchange == "all_to_all" else (self.replicas, self.reduce)

    def held(self, num_experts: int) -> tuple[int, ...]:
        """The experts that lie on this rank, in the order of its places.

        Raises:
            ConfigError: experts and ranks do not fit together.
        """
        placement = self.placement
        if placement is None:
            if num_experts % self.ep.size:
                raise ConfigError(f"ep_size={self.ep.size} does not divide num_experts={num_experts}")
            placement = Placement.contiguous(num_experts, self.ep.size)
        if placement.num_experts != num_experts or placement.size != self.ep.size:
            raise ConfigError(
                f"a placement of {placement.num_experts} experts over {placement.size} ranks does not fit "
                f"num_experts={num_experts} over ep_size={self.ep.size}"
            )
        return placement.of(self.ep.rank)

    def run(
        self, x: Tensor, ids: Tensor, weights: Tensor, prepared: ExpertStore, *, act_fn: SiTU, counts: Sequence[int]
    ) -> Tensor:
        """Weighted sum of the chosen experts, complete on every rank.

        Args:
            x: `[T, L]`.
            ids: `[T, k]` int32: places.
            weights: `[T, k]` fp32.
            prepared: the experts of this rank.
            act_fn: the activation of an expert.
            counts: tokens of every replica; unused if there is one.
        """
        if self.exchange == "all_to_all":
            return ep_experts(x, ids, weights, prepared, act_fn=act_fn, group=self.ep)
        if self.replicas.size == 1:
            return self.reduce.all_reduce(experts(x, ids, weights, prepared, act_fn=act_fn))
        if len(counts) != self.replicas.size or counts[self.replicas.rank] != x.shape[0]:
            raise ConfigError(
                f"experts of {self.replicas.size} replicas: tokens of each are {tuple(counts)}, replica "
                f"{self.replicas.rank} has {x.shape[0]}"
            )
        # padded to the largest replica, so that the pieces are equal; a negative place is nobody's
        most = max(counts)
        if not most:
            return x
        x, weights = (_pad_rows(t, most) for t in (x, weights))
        every = [self.replicas.all_gather(t) for t in (x, _pad_rows(ids, most, -1), weights)]
        partial = experts(every[0], every[1], every[2], prepared, act_fn=act_fn)
        mine = self.replicas.reduce_scatter(partial)[: counts[self.replicas.rank]]
        return self.reduce.all_reduce(mine)


def _pad_rows(x: Tensor, rows: int, value: float = 0) -> Tensor:
    missing = rows - x.shape[0]
    return torch.cat([x, x.new_full((missing, *x.shape[1:]), value)]) if missing else x


def _spec(x: Tensor, ids: Tensor, weights: Tensor, prepared: ExpertStore, *, act_fn: SiTU, group: Group) -> ExpertsSpec:
    return ExpertsSpec(
        experts=prepared.num_experts,
        top_k=ids.shape[1],
        hidden=prepared.width,
        intermediate=prepared.intermediate,
        weights=prepared.format,
        activations=x.dtype,
        offloaded=prepared.offloaded,
        ep_size=group.size,
    )


@op(_spec, default="composed", parts=("experts",))
def ep_experts(x: Tensor, ids: Tensor, weights: Tensor, prepared: ExpertStore, *, act_fn: SiTU, group: Group) -> Tensor:
    """Weighted sum of the chosen experts, which live in equal contiguous ranges on the ranks of `group`.

    A row is sent once to each rank that holds one of its experts, with its ids and weights; that rank runs `experts`
    on what arrived and sends its partial sums back, where they are added in fp32 and rounded once. Counts may differ
    and be zero: every rank of the group calls this in the same step, also one without tokens.

    Args:
        x: `[T, L]`.
        ids: `[T, k]` int32, global expert ids (places, if experts have copies).
        weights: `[T, k]` fp32.
        prepared: the experts of this rank; `first_expert` is `rank · experts per rank`.
        act_fn: the activation between the two products.
        group: the ranks; a group of one exchanges nothing.

    Returns:
        `[T, L]` in the dtype of `x`.

    Raises:
        ConfigError: the experts held here are not this rank's range; nothing has been sent.
    """
    per_rank = prepared.num_experts
    if prepared.first_expert != group.rank * per_rank:
        raise ConfigError(
            f"ep_experts: rank {group.rank} of {group.size} with {per_rank} experts must hold those from "
            f"{group.rank * per_rank}, got first_expert={prepared.first_expert}"
        )
    if group.size == 1:
        return experts(x, ids, weights, prepared, act_fn=act_fn)
    ranks = torch.arange(group.size, device=x.device)
    goes = (ids.long() // per_rank).unsqueeze(1) == ranks[:, None]  # [T, R, k]
    rank, token = goes.any(-1).t().nonzero(as_tuple=True)  # in the order of the ranks
    send = torch.bincount(rank, minlength=group.size)
    one = [1] * group.size
    receive = group.all_to_all(send, one, one)
    sends: list[int] = send.tolist()
    receives: list[int] = receive.tolist()

    arrived = group.all_to_all(x[token], sends, receives)
    arrived_ids = group.all_to_all(ids[token], sends, receives)
    arrived_weights = group.all_to_all(weights[token], sends, receives)
    partial = experts(arrived, arrived_ids, arrived_weights, prepared, act_fn=act_fn)
    back = group.all_to_all(partial, receives, sends)
    total = x.new_zeros(x.shape, dtype=compute_dtype(x))
    return total.index_add(0, token, back.to(total.dtype)).to(x.dtype)
