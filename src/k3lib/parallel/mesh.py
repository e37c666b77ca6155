"""Which ranks share what: the layout that a user asks for, and the groups that layers are built with.

Ranks are numbered `(stage · dp_size + replica) · attention ranks + attention rank`: the ranks of a stage are
contiguous, inside it those of a replica, inside that those of a context-parallel group.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from k3lib.errors import ConfigError
from k3lib.parallel.ep import ExpertSpread, Placement
from k3lib.parallel.group import LOCAL, Group, RankView, TorchGroup
from k3lib.parallel.health import Heartbeat
from k3lib.parallel.pp import stage_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed import ProcessGroup

    from k3lib.config import TextConfig
    from k3lib.parallel.health import Store

__all__ = ["Mesh", "ParallelConfig"]

_DEVICES = {"nccl": "cuda", "hccl": "npu", "gloo": "cpu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """A layout. `tp_size · pp_size` ranks take part.

    Attributes:
        tp_size: ranks of a pipeline stage.
        dp_size: replicas of the attention part inside these ranks, each with `tp_size / dp_size` ranks and caches of
            its own. All share the experts.
        dcp_size: ranks of a replica that share the tokens of its latent KV.
        ep_size: ranks over which whole experts are spread; inside each of these parts `tp_size / ep_size` ranks share
            the intermediate width of an expert.
        pp_size: pipeline stages.
        shared_experts_tp_size: ranks that share the shared experts; None is all ranks of a replica, or one (replicated)
            with `moe_exchange="all_to_all"`.
        moe_exchange: "all_reduce": every rank sees all tokens and adds its experts' part. "all_to_all": a token's row
            visits the ranks that hold its experts, and tokens are sharded over the replica between attention layers.
        redundant_experts: copies of experts beyond one each.
        dcp_comm_backend: how partial attention is exchanged: "a2a", or "ag_rs" (all-gather and reduce-scatter). None is
            "a2a".
        dcp_replicate_q_proj: each rank projects the queries of its whole context-parallel group instead of gathering
            them.
        shard_latent_projections: cut the latent down and up projections of the experts and gather their outputs.
        overlap_shared_experts: when to compute the shared experts beside the routed ones, on a side stream of a GPU:
            in captured "graphs", unless they exchange in different groups; "always"; or "never".
        pp_partition: layers of each stage; None splits evenly.
    """

    tp_size: int = 1
    dp_size: int = 1
    dcp_size: int = 1
    ep_size: int = 1
    pp_size: int = 1
    shared_experts_tp_size: int | None = None
    moe_exchange: Literal["all_reduce", "all_to_all"] = "all_reduce"
    redundant_experts: int = 0
    dcp_comm_backend: Literal["a2a", "ag_rs"] | None = None
    dcp_replicate_q_proj: bool = False
    shard_latent_projections: bool = False
    overlap_shared_experts: Literal["graphs", "always", "never"] = "graphs"
    pp_partition: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("tp_size", "dp_size", "dcp_size", "ep_size", "pp_size", "shared_experts_tp_size"):
            value = getattr(self, name)
            if name == "shared_experts_tp_size" and value is None:
                continue
            if type(value) is not int or value < 1:
                raise ConfigError(f"ParallelConfig: {name} must be an integer >= 1, got {value!r}")
        if type(self.redundant_experts) is not int or self.redundant_experts < 0:
            raise ConfigError(
                f"ParallelConfig: redundant_experts must be an integer >= 0, got {self.redundant_experts!r}"
            )
        self._check_attention()
        self._check_experts()
        if self.pp_partition is not None and len(self.pp_partition) != self.pp_size:
            raise ConfigError(
                f"pp_partition={self.pp_partition} names {len(self.pp_partition)} stages, pp_size={self.pp_size}"
            )

    def _check_attention(self) -> None:
        if self.tp_size % self.dp_size:
            raise ConfigError(
                f"dp_size={self.dp_size} must divide tp_size={self.tp_size}: each replica takes an equal part of the "
                "ranks for its attention"
            )
        if self.attention_size % self.dcp_size:
            over = f" over dp_size={self.dp_size}" if self.dp_size > 1 else ""
            raise ConfigError(
                f"dcp_size={self.dcp_size} must divide tp_size={self.tp_size}{over}: DCP ranks are taken from the TP "
                f"group, which has {self.attention_size} ranks"
            )
        if self.dcp_comm_backend not in {None, "a2a", "ag_rs"}:
            raise ConfigError(f"dcp_comm_backend={self.dcp_comm_backend!r} is not one of a2a, ag_rs")
        if self.dcp_comm_backend == "a2a" and self.dcp_size == 1:
            raise ConfigError("dcp_comm_backend='a2a' needs dcp_size > 1, got dcp_size=1: there is nothing to exchange")
        if self.dcp_replicate_q_proj and (self.dcp_size == 1 or self.dcp_comm_backend == "ag_rs"):
            raise ConfigError(
                "dcp_replicate_q_proj=True needs dcp_size > 1 and dcp_comm_backend='a2a', got "
                f"dcp_size={self.dcp_size} and dcp_comm_backend={self.dcp_comm_backend!r}"
            )

    def _check_experts(self) -> None:
        if self.moe_exchange not in {"all_reduce", "all_to_all"}:
            raise ConfigError(f"moe_exchange={self.moe_exchange!r} is not one of all_reduce, all_to_all")
        if self.tp_size % self.ep_size:
            raise ConfigError(
                f"ep_size={self.ep_size} must divide tp_size={self.tp_size}: each part of the experts has an equal "
                "number of ranks"
            )
        if self.moe_exchange == "all_to_all" and self.ep_size != self.tp_size:
            raise ConfigError(
                f"moe_exchange='all_to_all' needs ep_size={self.ep_size} equal to tp_size={self.tp_size}: rows are "
                "sent to the one rank that holds an expert"
            )
        if self.overlap_shared_experts not in {"graphs", "always", "never"}:
            raise ConfigError(
                f"overlap_shared_experts={self.overlap_shared_experts!r} is not one of graphs, always, never"
            )
        shared = self.shared_experts_tp_size
        if shared is not None and self.attention_size % shared:
            raise ConfigError(
                f"shared_experts_tp_size={shared} must divide the {self.attention_size} ranks of a replica "
                f"(tp_size={self.tp_size}, dp_size={self.dp_size})"
            )
        if self.redundant_experts and self.ep_size == 1:
            raise ConfigError(
                f"redundant_experts={self.redundant_experts} needs ep_size > 1, got ep_size=1: every rank holds all "
                "experts"
            )
        if self.shard_latent_projections and self.shards_tokens:
            raise ConfigError(
                "shard_latent_projections=True needs every rank of a replica to see the same tokens, got "
                f"moe_exchange='all_to_all' over {self.attention_size} ranks, which shards them"
            )

    @property
    def world_size(self) -> int:
        """Ranks that take part."""
        return self.tp_size * self.pp_size

    @property
    def attention_size(self) -> int:
        """Ranks that share the heads of one replica."""
        return self.tp_size // self.dp_size

    @property
    def shared_size(self) -> int:
        """Ranks that share the shared experts."""
        if self.shared_experts_tp_size is not None:
            return self.shared_experts_tp_size
        return 1 if self.moe_exchange == "all_to_all" else self.attention_size

    @property
    def shards_tokens(self) -> bool:
        """Whether the residual stream between attention layers is sharded over the tokens of a replica."""
        return self.moe_exchange == "all_to_all" and self.attention_size > 1

    def check(self, text: TextConfig) -> None:
        """Refuse a layout that does not fit a model.

        Raises:
            ConfigError: names the size and what it does not divide.
        """
        width = self.attention_size
        where = f"tp_size={self.tp_size} over dp_size={self.dp_size}" if self.dp_size > 1 else f"tp_size={self.tp_size}"
        for kind, heads in (("kda", text.kda.num_heads), ("mla", text.mla.num_heads)):
            if text.layers_of(kind) and heads % width:  # type: ignore[arg-type]
                good = [n for n in range(1, heads + 1) if heads % n == 0]
                raise ConfigError(
                    f"{where} does not cut {kind.upper()} heads ({heads}) evenly; use one of "
                    f"{', '.join(map(str, good))}"
                )
        stage_layers(text.num_layers, self.pp_size, self.pp_partition)
        if text.dense_layers and text.intermediate_size % width:
            raise ConfigError(f"{where} does not divide intermediate_size={text.intermediate_size} of the dense layers")
        moe = text.moe
        if moe is None:
            if self.ep_size > 1:
                raise ConfigError(f"ep_size={self.ep_size}: this model has no experts")
            return
        if self.ep_size > moe.num_experts:
            raise ConfigError(f"ep_size={self.ep_size} is more ranks than there are experts ({moe.num_experts})")
        total = moe.num_experts + self.redundant_experts
        if total % self.ep_size:
            raise ConfigError(
                f"ep_size={self.ep_size} does not divide num_experts={moe.num_experts} + redundant_experts="
                f"{self.redundant_experts} = {total}: every rank holds equally many"
            )
        inner = self.tp_size // self.ep_size
        if moe.intermediate_size % inner:
            raise ConfigError(
                f"tp_size={self.tp_size} over ep_size={self.ep_size} leaves {inner} ranks an expert, which do not "
                f"divide its intermediate width {moe.intermediate_size}"
            )
        if moe.num_shared_experts and moe.shared_size % self.shared_size:
            raise ConfigError(
                f"{self.shared_size} ranks do not divide the width {moe.shared_size} of the shared experts; give "
                "shared_experts_tp_size"
            )

    def axes(self) -> dict[str, list[list[int]]]:
        """The groups of ranks of each axis; every list is a partition of all ranks, each group in its own order."""
        tp, width, world = self.tp_size, self.attention_size, self.world_size
        stages = [list(range(first, first + tp)) for first in range(0, world, tp)]

        def contiguous(size: int) -> list[list[int]]:
            return [list(range(first, first + size)) for first in range(0, world, size)]

        inner = tp // self.ep_size
        return {
            "pp": [[stage[i] for stage in stages] for i in range(tp)],
            "dp": [stage[i::width] for stage in stages for i in range(width)],
            "tp": contiguous(width),
            "dcp": contiguous(self.dcp_size),
            "ep": [stage[i::inner] for stage in stages for i in range(inner)],
            "expert_tp": contiguous(inner),
            "shared": contiguous(self.shared_size),
            "replica": [
                [stage[i] for stage in stages for i in range(first, first + width)] for first in range(0, tp, width)
            ],
            "world": [list(range(world))],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Named axes of ranks. `Mesh.single()` is one rank.

    Attributes:
        tp: ranks of a replica: heads, feed-forward widths, vocabulary rows.
        dp: ranks with the same place in the replicas of a stage.
        dcp: ranks, contiguous inside `tp`, that share the tokens of the latent KV.
        ep: ranks over which whole experts are spread.
        expert_tp: ranks that share the width of an expert; None is what follows from the others.
        shared: ranks that share the shared experts; None is `tp`, or one rank where tokens are sharded.
        pp: ranks with the same place in the pipeline stages.
        cp: ranks that share the tokens of a prefill, all with the same weights; set by hand (see
            `k3lib.parallel.kcp.prefill_split`).
        replica: ranks of a replica, over its stages; None is `world`.
        world: all ranks.
        control: those of `replica`, for small messages on the host; None is `replica`.
        leaders: the first ranks of the replicas, for small messages on the host; None is `dp`. Only they have it.
        health: who is told when a step fails here (see `watch` and `fail`); None tells nobody.
        config: the layout; the options in it count also for groups that were made by hand.
        placements: where experts and their copies lie, by MoE layer (counted from 0); a layer that is not named has
            contiguous ranges.
    """

    tp: Group = LOCAL
    dp: Group = LOCAL
    dcp: Group = LOCAL
    ep: Group = LOCAL
    expert_tp: Group | None = None
    shared: Group | None = None
    pp: Group = LOCAL
    cp: Group = LOCAL
    replica: Group | None = None
    world: Group = LOCAL
    control: Group | None = None
    leaders: Group | None = None
    health: Heartbeat | None = None
    config: ParallelConfig = field(default_factory=ParallelConfig)
    placements: Mapping[int, Placement] = field(default_factory=dict)

    @classmethod
    def single(cls) -> Mesh:
        """One rank."""
        return cls()

    @classmethod
    def create(
        cls,
        config: ParallelConfig,
        backend: str = "gloo",
        *,
        timeout_s: float = 600.0,
        placements: Mapping[int, Placement] | None = None,
    ) -> Mesh:
        """Join the other ranks. Every rank calls this with the same arguments.

        The environment of `torchrun` says who they are (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK), unless
        torch.distributed has been set up already.

        Args:
            config: the layout.
            backend: of torch.distributed: "gloo", "nccl" (also of ROCm) or "hccl".
            timeout_s: a collective that waits longer for a rank fails.
            placements: see `Mesh`.

        Raises:
            ConfigError: another number of ranks than the layout has, on every rank; or no environment to join by.
        """
        if config.world_size == 1 and "RANK" not in os.environ and not dist.is_initialized():
            return cls(config=config, placements=placements or {})
        _join(config, backend, timeout_s)
        device = _DEVICES.get(dist.get_backend().split(":")[-1].split(",")[0], "cpu")
        world = TorchGroup(dist.group.WORLD)  # type: ignore[arg-type] # set up by now
        differing = differing_ranks(world, repr((config, placements)))
        if differing:
            listed = ", ".join(map(str, differing))
            raise ConfigError(f"the layout differs between ranks: {listed} of {world.size} have another than rank 0")
        made: dict[tuple[tuple[int, ...], ...], Group] = {}
        groups: dict[str, Any] = {name: _group(rows, device, timeout_s, made) for name, rows in config.axes().items()}
        replicas = config.axes()["replica"]
        return cls(
            **groups,
            control=_host_group(replicas),
            leaders=_host_group([[row[0] for row in replicas]]),
            config=config,
            placements=placements or {},
        )

    @classmethod
    def view(cls, config: ParallelConfig, rank: int, *, placements: Mapping[int, Placement] | None = None) -> Mesh:
        """What `create` gives rank `rank`, without transport: to build, load and count that rank's part anywhere."""
        if not 0 <= rank < config.world_size:
            raise ConfigError(f"rank={rank} is not one of the {config.world_size} ranks of this layout")

        def place(rows: list[list[int]]) -> Group:
            row = next(row for row in rows if rank in row)
            return RankView(row.index(rank), len(row)) if len(row) > 1 else LOCAL

        return cls.of(config, place, placements=placements)

    @classmethod
    def of(
        cls,
        config: ParallelConfig,
        group: Callable[[list[list[int]]], Group],
        *,
        placements: Mapping[int, Placement] | None = None,
    ) -> Mesh:
        """Make a mesh with transport of your own: `group` gives this rank's group of a partition of all ranks."""
        groups: dict[str, Any] = {name: group(rows) for name, rows in config.axes().items()}
        return cls(**groups, config=config, placements=placements or {})

    def spread(self, moe_layer: int, num_experts: int) -> ExpertSpread:
        """How the routed experts of a layer lie over the ranks."""
        expert_tp = self.expert_tp
        if expert_tp is None:
            if self.ep.size == 1 and self.dp.size == 1:
                expert_tp = self.tp
            elif self.ep.size == self.tp.size * self.dp.size:
                expert_tp = LOCAL
            else:
                raise ConfigError(
                    f"Mesh: ep has {self.ep.size} ranks, tp {self.tp.size} and dp {self.dp.size}: give expert_tp"
                )
        placement = self.placements.get(moe_layer)
        if placement is None and self.config.redundant_experts:
            placement = Placement.balanced([1.0] * num_experts, self.ep.size, self.config.redundant_experts)
        return ExpertSpread(
            ep=self.ep,
            tp=expert_tp,
            replicas=self.dp,
            reduce=self.tp,
            exchange=self.config.moe_exchange,
            placement=placement,
        )

    @property
    def shared_group(self) -> Group:
        """Ranks that share the shared experts."""
        if self.shared is not None:
            return self.shared
        return LOCAL if self.config.moe_exchange == "all_to_all" else self.tp

    @property
    def replica_group(self) -> Group:
        """Ranks of this replica, over its stages; the first leads the others."""
        return self.world if self.replica is None else self.replica

    def stage(self, num_layers: int) -> range:
        """The layers of this rank's pipeline stage."""
        return stage_layers(num_layers, self.pp.size, self.config.pp_partition)[self.pp.rank]

    def check_same(self, what: str, value: str) -> None:
        """Refuse, on every rank, if `value` is not the same text on all of them.

        Args:
            what: what it is, for the message.
            value: any text; a digest of it travels.

        Raises:
            ConfigError: names the ranks that differ from rank 0.
        """
        if self.world.size == 1:
            return
        differing = differing_ranks(self.world, value)
        if differing:
            listed = ", ".join(map(str, differing))
            raise ConfigError(f"{what} differs between ranks: {listed} of {self.world.size} have another than rank 0")

    def least(self, value: int) -> int:
        """The least of a number over all ranks, which ask together: for example of free bytes."""
        if self.world.size == 1:
            return value
        mine = torch.tensor([value], dtype=torch.int64, device=device_of(self.world))
        return int(self.world.all_reduce(mine, "min"))

    def watch(self, *, timeout_s: float = 30.0, on_loss: Callable[[str], None] | None = None) -> Heartbeat | None:
        """Begin to watch the other ranks of `create`, from a thread; None if there is only one rank.

        With `mesh.replace(health=mesh.watch())` the others also know at once when a step fails here.

        Args:
            timeout_s: a rank that gives no sign of life for so long is gone.
            on_loss: called with a message that names it, or the rank that failed and why; None ends this process with
                the message.
        """
        if self.world.size == 1:
            return None
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

        def connect() -> Store:
            return cast("Store", dist.TCPStore(host, port, is_master=False))  # type: ignore[attr-defined]

        waits = isinstance(self.world, TorchGroup) and self.world.backend == "nccl"
        return Heartbeat(
            connect,
            self.world.rank,
            self.world.size,
            timeout_s=timeout_s,
            on_loss=on_loss,
            abort=self._abort if waits else None,
        )

    def fail(self, error: BaseException, *, wait: bool = True) -> None:
        """Tell the other ranks that this one cannot go on: see `Heartbeat.fail`."""
        if self.health is not None:
            self.health.fail(error, wait=wait)

    def _abort(self) -> None:
        """End collectives of NCCL, which do not notice that the process of a rank has ended."""
        axes = (self.tp, self.dp, self.dcp, self.ep, self.expert_tp, self.shared, self.pp, self.replica, self.world)
        groups = {g.group for g in axes if isinstance(g, TorchGroup) and g.backend == "nccl"}
        backends = [group._get_backend(torch.device("cuda")) for group in groups]
        with contextlib.suppress(Exception):  # the process ends soon, whatever comes of it
            for backend in backends:
                backend.abort()

    def replace(self, **changes: object) -> Mesh:
        """A copy with other groups or options."""
        return replace(self, **changes)  # type: ignore[arg-type]


def differing_ranks(group: Group, value: str) -> list[int]:
    """Ranks whose `value` is not that of rank 0."""
    import hashlib  # noqa: PLC0415 - start-up only

    digest = torch.tensor(list(hashlib.sha256(value.encode()).digest()), dtype=torch.uint8, device=device_of(group))
    every = group.all_gather(digest[None]).cpu()
    return [rank for rank in range(group.size) if not every[rank].equal(every[0])]


def device_of(group: Group) -> torch.device:
    """Where tensors must be that `group` carries."""
    kind = _DEVICES.get(group.backend, "cpu") if isinstance(group, TorchGroup) else "cpu"
    return torch.device(kind)


def _join(config: ParallelConfig, backend: str, timeout_s: float) -> None:
    """Set up torch.distributed if nobody did, and compare its size with the layout."""
    if not dist.is_initialized():
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ConfigError(
                f"{config.world_size} ranks need {', '.join(missing)} in the environment: start with "
                f"torchrun --nproc-per-node {config.world_size}, or set up torch.distributed first"
            )
        _check_world(config, int(os.environ["WORLD_SIZE"]))
        if backend == "nccl":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))
    _check_world(config, dist.get_world_size())


def _check_world(config: ParallelConfig, found: int) -> None:
    if found != config.world_size:
        raise ConfigError(
            f"tp_size={config.tp_size} x pp_size={config.pp_size} needs {config.world_size} ranks, WORLD_SIZE is "
            f"{found}: start that many processes or change the sizes"
        )


def _group(
    rows: Sequence[Sequence[int]], device: str, timeout_s: float, made: dict[tuple[tuple[int, ...], ...], Group]
) -> Group:
    """This rank's group of a partition; axes with the same partition share one."""
    if len(rows[0]) == 1:
        return LOCAL
    key = tuple(map(tuple, rows))
    if key not in made:
        if len(rows) == 1:
            made[key] = TorchGroup(dist.group.WORLD)  # type: ignore[arg-type] # set up by now
        else:
            mesh = DeviceMesh(device, torch.tensor(key), mesh_dim_names=("among", "within"))
            made[key] = TorchGroup(_with_timeout(mesh.get_group("within"), timeout_s))
            across = tuple(zip(*key, strict=True))
            if len(across[0]) > 1 and across not in made:
                made[across] = TorchGroup(_with_timeout(mesh.get_group("among"), timeout_s))
    return made[key]


def _host_group(rows: Sequence[Sequence[int]]) -> Group | None:
    """This rank's group of `rows` for messages on the host, if it is in one of several ranks. All ranks call this."""
    mine = None
    for row in rows:
        if len(row) > 1:
            # an idle rank waits for a message as long as it takes; that others live, is not this group's business
            group = dist.new_group(list(row), backend="gloo", timeout=datetime.timedelta(days=365))
            if dist.get_rank() in row:
                mine = TorchGroup(group)
    return mine


def _with_timeout(group: ProcessGroup, timeout_s: float) -> ProcessGroup:
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415 - the setter is not public

    c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s), group)
    return group
