"""An engine on many ranks: rank 0 decides, and tells the others what to do to their memory and models, in order.

What rank 0 does to its device between two forward passes is collected and sent in one message with the next pass, so
that every rank moves the same pages and states, builds the same batch, and runs the model at the same time. The others
decide nothing: they have the tensors of a cache, and no bookkeeping.
"""

from __future__ import annotations

import logging
import os
import pickle
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch

from k3lib import ops
from k3lib.batch import FeatureTap
from k3lib.cache import HybridCache
from k3lib.engine.config import EngineConfig, free_bytes
from k3lib.engine.graphs import DecodeGraphs
from k3lib.errors import ConfigError, K3Error, RequestError
from k3lib.spec.proposer import Bound

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from k3lib.batch import Batch, CacheViews
    from k3lib.cache import CacheConfig, CacheEvent
    from k3lib.engine.request import Request
    from k3lib.model import KimiK3ForCausalLM
    from k3lib.parallel import Mesh
    from k3lib.parallel.group import Chain

__all__ = [
    "Follower",
    "Leader",
    "LedGraphs",
    "LedModel",
    "allocate",
    "can_replay",
    "check_leader",
    "check_request",
    "follow",
]

logger = logging.getLogger(__name__)

_SMALL = 1 << 14  # bytes of a message that is one broadcast; longer ones take a second


class Command(NamedTuple):
    """One thing to do, by name, with plain values."""

    kind: str
    values: tuple[Any, ...]


def check_leader(model: KimiK3ForCausalLM, config: EngineConfig) -> None:
    """Refuse what an engine over many ranks cannot do, and a rank that does not lead.

    Raises:
        ConfigError: another rank than 0, several replicas, which would each need a scheduler, or a draft model, which
            would need weights of other ranks.
    """
    _check_ranks(model.mesh, config)
    world = model.mesh.world
    if world.rank:
        raise ConfigError(f"rank {world.rank} of {world.size} follows rank 0: call k3lib.engine.follow(model, config)")


def _check_ranks(mesh: Mesh, config: EngineConfig) -> None:
    """Refuse, on every rank alike, what an engine cannot lead."""
    if mesh.dp.size > 1:
        raise ConfigError(
            f"an engine leads one replica, this mesh has dp_size={mesh.dp.size}: run the model itself, or one engine "
            "for each replica with experts of its own"
        )
    draft: Any = None if config.spec is None else config.spec.draft
    if mesh.world.size > 1 and (isinstance(draft, Bound) or (isinstance(draft, str) and draft != "ngram")):
        raise ConfigError(
            f"speculation over {mesh.world.size} ranks takes draft='ngram' or a proposer of its own, got {draft!r}: a "
            "draft model would need weights that lie on other ranks"
        )


def check_request(mesh: Mesh, request: Request) -> None:
    """Refuse what a request may ask of one rank only.

    Raises:
        RequestError: names the field.
    """
    if request.media and mesh.world.size > 1:
        raise RequestError(f"images need an engine on one rank, this one has {mesh.world.size}", param="media")
    if request.params.prompt_logprobs and mesh.pp.size > 1:
        raise RequestError(f"prompt_logprobs needs pp_size=1, got {mesh.pp.size}", param="prompt_logprobs")
    if request.record_routes and (mesh.pp.size > 1 or mesh.config.shards_tokens):
        raise RequestError(
            "record_routes needs ranks that see all tokens of all layers, got moe_exchange="
            f"{mesh.config.moe_exchange!r} and pp_size={mesh.pp.size}",
            param="record_routes",
        )


def allocate(
    model: KimiK3ForCausalLM, cache: CacheConfig, *, listener: Callable[[CacheEvent], None] | None = None
) -> HybridCache:
    """The cache of this rank."""
    mesh = model.mesh
    return HybridCache.allocate(
        model.config,
        cache,
        device=model.device,
        dtype=model.dtype,
        tp_size=mesh.tp.size,
        dcp_size=mesh.dcp.size,
        dcp_rank=mesh.dcp.rank,
        layers=model.model.layer_range,
        listener=listener,
    )


def follow(model: KimiK3ForCausalLM, config: EngineConfig | None = None) -> None:
    """Serve rank 0's engine with this rank's part of the model, until it closes.

    Args:
        model: this rank's part.
        config: what rank 0's engine was given.

    Raises:
        ConfigError: this is rank 0, or the layout has several replicas.
        Exception: a step failed here; rank 0 and the others cannot go on, and end when they notice.
    """
    config = config or EngineConfig()
    world = model.mesh.world
    _check_ranks(model.mesh, config)
    if not world.rank:
        raise ConfigError(f"rank 0 of {world.size} leads: make an Engine")
    if config.cache is None:
        free_bytes(model, config)  # rank 0 asks for the least of all
    follower = Follower(model)
    ((kind, values),) = follower.receive()
    if kind == "end":
        return
    sizes, piece_tokens, strict, deterministic, (requests, pages), tap = values
    cache = allocate(model, sizes)
    if requests:
        follower.graphs = DecodeGraphs(model, cache, max_requests=requests, max_pages=pages, tap=tap)
    with ops.use_options(strict=strict or None, deterministic=deterministic or None):
        follower.run(cache, piece_tokens)


def _channel(mesh: Mesh) -> Chain:
    return cast("Chain", mesh.world if mesh.control is None else mesh.control)


class Leader:
    """Rank 0's side."""

    def __init__(self, mesh: Mesh) -> None:
        self._channel = _channel(mesh)
        self._todo: list[Command] = []

    def note(self, kind: str, *values: Any) -> None:  # noqa: ANN401 - whatever can be pickled
        """Remember what rank 0 does to its own memory."""
        self._todo.append(Command(kind, values))

    def send(self, kind: str, *values: Any) -> None:  # noqa: ANN401 - whatever can be pickled
        """Send what was noted, and what comes now, in one message."""
        self.note(kind, *values)
        message = pickle.dumps(self._todo, protocol=pickle.HIGHEST_PROTOCOL)
        self._todo = []
        first = torch.zeros(_SMALL, dtype=torch.uint8)
        size, room = len(message), _SMALL - 8
        head = size.to_bytes(8, "little") + message[:room]
        first[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._channel.broadcast(first, 0)
        if size > room:
            self._channel.broadcast(torch.frombuffer(bytearray(message[room:]), dtype=torch.uint8), 0)


class LedModel:
    """The model of rank 0 as its runner calls it: every call is told to the other ranks first."""

    def __init__(self, model: KimiK3ForCausalLM, leader: Leader) -> None:
        self.model = model
        self.leader = leader

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the model has
        return getattr(self.model, name)

    def __call__(
        self,
        batch: Batch,
        cache: CacheViews,
        *,
        taps: FeatureTap | None = None,
        logits: Literal["all", "last"] = "all",
    ) -> Tensor:
        """As the model."""
        self.leader.send("forward", logits, None if taps is None else (taps.layers, taps.kind))
        scores: Tensor = self.model(batch, cache, taps=taps, logits=logits)
        return scores

    def hidden(self, batch: Batch, cache: CacheViews, *, taps: FeatureTap | None = None) -> Tensor:
        """As the model."""
        self.leader.send("hidden", None if taps is None else (taps.layers, taps.kind))
        return self.model.hidden(batch, cache, taps=taps)

    def scores(self, hidden: Tensor) -> Tensor:
        """As the model; the rows are sent to the other ranks."""
        self.leader.send("scores", hidden.shape[0])
        rows = cast("Chain", self.model.mesh.world).broadcast(hidden.contiguous(), 0)
        return self.model.scores(rows)

    def load_weights(self, source: Any, **options: Any) -> None:  # noqa: ANN401 - as the model
        """As the model, on every rank, which reads its part.

        Raises:
            ConfigError: tensors instead of a folder.
        """
        if not isinstance(source, str | os.PathLike):
            raise ConfigError("weights of many ranks are given by a folder, so that every rank reads its part")
        self.leader.send("load_weights", source, options)
        self.model.load_weights(source, **options)


class LedGraphs:
    """Replayed steps of rank 0: every one is told to the other ranks, which replay theirs."""

    def __init__(self, graphs: DecodeGraphs, leader: Leader) -> None:
        self.graphs = graphs
        self.leader = leader

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever graphs have
        return getattr(self.graphs, name)

    def run(self, batch: Batch) -> tuple[Tensor, Tensor | None] | None:
        """As the graphs: None on every rank alike, if the step has to run without."""
        if batch.routes is not None or not batch.new_tokens:  # which the others do not see
            return None
        self.leader.send("graph")
        return self.graphs.run(batch)


def can_replay(mesh: Mesh) -> bool:
    """Whether decode steps may be captured: not where the host is asked how many rows come, or stages wait."""
    return mesh.world.size == 1 or (mesh.pp.size == 1 and mesh.config.moe_exchange == "all_reduce")


class Follower:
    """Every other rank's side."""

    def __init__(self, model: KimiK3ForCausalLM) -> None:
        self.model = model
        self.graphs: DecodeGraphs | None = None
        self._channel = _channel(model.mesh)
        self._batch: Batch | None = None

    @torch.inference_mode()
    def run(self, cache: HybridCache, piece_tokens: int) -> None:
        """Do what rank 0 says, until it says that this is the end.

        Args:
            cache: this rank's memory, of the sizes that rank 0 has.
            piece_tokens: cached tokens that a prefill looks at together.
        """
        while True:
            for command in self.receive():
                if command.kind == "end":
                    return
                self._obey(command, cache, piece_tokens)

    def receive(self) -> Sequence[Command]:
        """Wait for the next message."""
        first = self._channel.broadcast(torch.empty(_SMALL, dtype=torch.uint8), 0)
        size, room = int.from_bytes(bytes(first[:8].tolist()), "little"), _SMALL - 8
        message = bytes(first[8 : 8 + min(size, room)].numpy())
        if size > room:
            rest = self._channel.broadcast(torch.empty(size - room, dtype=torch.uint8), 0)
            message += bytes(rest.numpy())
        commands: list[Command] = pickle.loads(message)  # from this program's own rank 0
        return commands

    def _obey(self, command: Command, cache: HybridCache, piece_tokens: int) -> None:
        kind, values = command
        if kind == "batch":
            self._batch = cache.build(*values)
            if self._batch.mode == "prefill":
                self._batch.prefix_pieces(cache.config.page_size, piece_tokens)
        elif kind in {"forward", "hidden", "graph"}:
            batch = self._batch
            assert batch is not None, "rank 0 describes a step before it runs one"
            *logits, tap = values or (None,)
            if kind == "graph":
                assert self.graphs is not None, "rank 0 has graphs"
                self.graphs.run(batch)
            elif logits:
                self.model(batch, cache, taps=_tap(tap), logits=logits[0])
            else:
                self.model.hidden(batch, cache, taps=_tap(tap))
        elif kind == "scores":
            text, device = self.model.config.text, self.model.device
            rows = torch.empty(values[0], text.hidden_size, dtype=self.model.dtype, device=device)
            self.model.scores(cast("Chain", self.model.mesh.world).broadcast(rows, 0))
        elif kind == "load_weights":
            try:
                self.model.load_weights(values[0], **values[1])
            except K3Error as error:  # rank 0 found the same, and says so
                logger.debug("weights were not replaced: %s", error)
        else:
            cache.replay(kind, *values)


def _tap(said: tuple[tuple[int, ...], Literal["prefix", "mixture"]] | None) -> FeatureTap | None:
    return None if said is None else FeatureTap(*said)
