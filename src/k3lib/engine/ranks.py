"""An engine on many ranks: rank 0 decides, and tells the others what to do to their memory and models, in order.

What rank 0 does to its device between two forward passes is collected and sent in one message with the next pass, so
that every rank moves the same pages and states, builds the same batch, and runs the model at the same time. The others
decide nothing: they have the tensors of a cache, and no bookkeeping.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch

from k3lib import ops
from k3lib.batch import Batch, FeatureTap
from k3lib.cache import HybridCache
from k3lib.engine.config import EngineConfig, free_bytes
from k3lib.engine.graphs import DecodeGraphs
from k3lib.engine.media import MediaMirror
from k3lib.engine.speculation import bring_features, draft_part, joint_embedding, joint_scores
from k3lib.engine.vision_graphs import VisionGraphs
from k3lib.errors import ConfigError, K3Error, RequestError
from k3lib.multimodal import KimiK3ForConditionalGeneration
from k3lib.parallel.group import TransportError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from k3lib.batch import CacheViews
    from k3lib.cache import CacheConfig, CacheEvent
    from k3lib.engine.request import Request
    from k3lib.model import KimiK3ForCausalLM
    from k3lib.parallel import Mesh
    from k3lib.parallel.group import Chain
    from k3lib.spec.proposer import Shared

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


def check_leader(model: KimiK3ForCausalLM, config: EngineConfig, *, in_lockstep: bool) -> None:
    """Refuse what an engine over many ranks cannot do, and a rank that does not lead.

    Raises:
        ConfigError: another rank than the first of a replica, one of several replicas that is not `in_lockstep` with
            the others.
    """
    mesh = model.mesh
    if mesh.dp.size > 1 and not in_lockstep:
        raise ConfigError(
            f"an Engine leads one replica, this mesh has dp_size={mesh.dp.size}: make a k3lib.engine.ReplicatedEngine "
            "on rank 0, and call k3lib.engine.follow on the others"
        )
    if mesh.replica_group.rank:
        raise ConfigError(
            f"rank {mesh.world.rank} of {mesh.world.size} follows rank {first_rank(mesh)}: call "
            "k3lib.engine.follow(model, config)"
        )


def check_request(mesh: Mesh, request: Request) -> None:
    """Refuse what a request may ask of one rank only.

    Raises:
        RequestError: names the field.
    """
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


def follow(model: KimiK3ForCausalLM | KimiK3ForConditionalGeneration, config: EngineConfig | None = None) -> None:
    """Serve the engine of this replica's first rank with this rank's part of the model, until it closes.

    Args:
        model: this rank's part.
        config: what that engine was given.

    Raises:
        ConfigError: this is the first rank.
        Exception: a step failed here; rank 0 and the others cannot go on, and end too.
    """
    config = config or EngineConfig()
    world = model.mesh.world
    if not model.mesh.replica_group.rank:
        raise ConfigError(f"rank {world.rank} of {world.size} leads: make an Engine")
    with telling(model.mesh):
        follower = Follower(model, config)
        part = draft_part(config.spec, follower.model)  # before memory is measured, as on rank 0
        if config.cache is None:
            free_bytes(model, config)  # rank 0 asks for the least of all
        ((kind, values),) = follower.receive()
        if kind == "end":
            return
        sizes, piece_tokens, strict, deterministic, (requests, pages), tap = values
        cache = allocate(follower.model, sizes)
        if part is not None:
            part.bind(follower.model, cache)
            follower.draft = part
        if requests:
            follower.graphs = DecodeGraphs(follower.model, cache, max_requests=requests, max_pages=pages, tap=tap)
        with ops.use_options(strict=strict or None, deterministic=deterministic or None):
            follower.run(cache, piece_tokens)


@contextlib.contextmanager
def telling(mesh: Mesh, *, wait: bool = True) -> Iterator[None]:
    """Around what other ranks wait for: if it fails here, they are told, and end too (see `Mesh.watch`).

    Args:
        mesh: the ranks.
        wait: see `Heartbeat.fail`.
    """
    try:
        yield
    except BaseException as error:
        mesh.fail(error, wait=wait)
        raise


def check_health(mesh: Mesh) -> None:
    """Raise TransportError if a rank has failed."""
    if mesh.health is not None and mesh.health.trouble is not None:
        raise TransportError(mesh.health.trouble)


def _channel(mesh: Mesh) -> Chain:
    return cast("Chain", mesh.replica_group if mesh.control is None else mesh.control)


def first_rank(mesh: Mesh) -> int:
    """Number, among all ranks, of the one that leads this rank's replica."""
    width = mesh.config.attention_size
    return mesh.world.rank % mesh.config.tp_size // width * width


class Leader:
    """Rank 0's side."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._channel = _channel(mesh)
        self._todo: list[Command] = []

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Around what all ranks do: a failure here ends them all, after the requests have been told."""
        return telling(self._mesh, wait=False)

    def check(self) -> None:
        """Refuse what a step gave if a rank has failed meanwhile: collectives that were ended give anything.

        Raises:
            TransportError: which rank, and why.
        """
        check_health(self._mesh)

    def note(self, kind: str, *values: Any) -> None:  # noqa: ANN401 - whatever can be pickled
        """Remember what rank 0 does to its own memory."""
        self._todo.append(Command(kind, values))

    def send(self, kind: str, *values: Any) -> None:  # noqa: ANN401 - whatever can be pickled
        """Send what was noted, and what comes now, in one message."""
        self.note(kind, *values)
        todo, self._todo = self._todo, []
        send(self._channel, todo)


def send(channel: Chain, value: object) -> None:
    """Give all other ranks of a channel a value, which they `receive`."""
    message = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    first = torch.zeros(_SMALL, dtype=torch.uint8)
    size, room = len(message), _SMALL - 8
    head = size.to_bytes(8, "little") + message[:room]
    first[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    channel.broadcast(first, 0)
    if size > room:
        channel.broadcast(torch.frombuffer(bytearray(message[room:]), dtype=torch.uint8), 0)


def receive(channel: Chain) -> Any:  # noqa: ANN401 - whatever rank 0 sends
    """Wait for the next value of rank 0 of a channel."""
    first = channel.broadcast(torch.empty(_SMALL, dtype=torch.uint8), 0)
    size, room = int.from_bytes(bytes(first[:8].tolist()), "little"), _SMALL - 8
    message = bytes(first[8 : 8 + min(size, room)].numpy())
    if size > room:
        message += bytes(channel.broadcast(torch.empty(size - room, dtype=torch.uint8), 0).numpy())
    return pickle.loads(message)  # from this program's own rank 0


class LedModel:
    """The model of rank 0 as its runner calls it: every call is told to the other ranks first."""

    def __init__(
        self, model: KimiK3ForCausalLM, leader: Leader, whole: KimiK3ForCausalLM | KimiK3ForConditionalGeneration
    ) -> None:
        self.model = model
        self.leader = leader
        self.whole = whole  # with the tower, if there is one

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the model has
        return getattr(self.model, name)

    def __call__(
        self,
        batch: Batch,
        cache: CacheViews,
        *,
        inputs_embeds: Tensor | None = None,
        taps: FeatureTap | None = None,
        logits: Literal["all", "last"] = "all",
    ) -> Tensor:
        """As the model; the others have made embeddings of their own (see `k3lib.engine.media`)."""
        with self.leader.together():
            self.leader.send("forward", logits, None if taps is None else (taps.layers, taps.kind))
            scores: Tensor = self.model(batch, cache, inputs_embeds=inputs_embeds, taps=taps, logits=logits)
            bring_features(self.model, batch, taps)
            return scores

    def hidden(
        self,
        batch: Batch,
        cache: CacheViews,
        *,
        inputs_embeds: Tensor | None = None,
        taps: FeatureTap | None = None,
    ) -> Tensor:
        """As the model."""
        with self.leader.together():
            self.leader.send("hidden", None if taps is None else (taps.layers, taps.kind))
            return self.model.hidden(batch, cache, inputs_embeds=inputs_embeds, taps=taps)

    def scores(self, hidden: Tensor) -> Tensor:
        """As the model; the rows are sent to the other ranks."""
        with self.leader.together():
            self.leader.send("scores", hidden.shape[0])
            rows = cast("Chain", self.model.mesh.replica_group).broadcast(hidden.contiguous(), 0)
            return joint_scores(self.model, rows)

    def load_weights(self, source: Any, **options: Any) -> None:  # noqa: ANN401 - as the model
        """As the model, on every rank, which reads its part.

        Raises:
            ConfigError: tensors instead of a folder.
        """
        if not isinstance(source, str | os.PathLike):
            raise ConfigError("weights of many ranks are given by a folder, so that every rank reads its part")
        self.leader.send("load_weights", source, options)
        self.whole.load_weights(source, **options)


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
        with self.leader.together():
            self.leader.send("graph")
            return self.graphs.run(batch)

    def meet(self, shape: tuple[int, int], batch: Batch | None = None) -> tuple[Tensor, Tensor | None] | None:
        """As the graphs."""
        with self.leader.together():
            self.leader.send("meet", shape, batch is not None)
            return self.graphs.meet(shape, batch)


def can_replay(mesh: Mesh) -> bool:
    """Whether decode steps may be captured: not where the host is asked how many rows come, or stages wait."""
    return mesh.world.size == 1 or (mesh.pp.size == 1 and mesh.config.moe_exchange == "all_reduce")


class Follower:
    """Every other rank's side."""

    def __init__(self, model: KimiK3ForCausalLM | KimiK3ForConditionalGeneration, config: EngineConfig) -> None:
        self.whole = model
        self.model = model.language_model if isinstance(model, KimiK3ForConditionalGeneration) else model
        self.graphs: DecodeGraphs | None = None
        self.media: MediaMirror | None = None
        if self.model.model.has_embedding:  # later stages need no features
            graphs = VisionGraphs.wanted(model, enabled=config.vision_graphs)
            self.media = MediaMirror(model, one_by_one=config.deterministic, graphs=graphs)
        self._channel = _channel(model.mesh)
        self.draft: Shared | None = None
        self._batch: Batch | None = None
        self._features: Tensor | None = None  # of the last step, for the draft
        self._embeds: Tensor | None = None

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
        commands: list[Command] = receive(self._channel)
        return commands

    def _see(self, kind: str, values: tuple[Any, ...]) -> None:
        """Do with images what rank 0 does; later pipeline stages have nothing to do with them."""
        if self.media is None:
            return
        if kind == "images":
            assert self._batch is not None, "rank 0 describes a step before it embeds one"
            self._embeds = self.media.embed(self._batch, *values)
        else:
            self.media.drop(*values)

    def _meet(self, kind: str, values: tuple[Any, ...]) -> None:
        """Take note of the tokens of all replicas in the next pass, or run one of the shape they agreed on."""
        if kind == "replicas":
            assert self._batch is not None, "rank 0 describes a step before it runs one"
            (self._batch.replica_tokens,) = values
        elif kind == "serve":
            serve(self.model, *values)
        else:
            assert self.graphs is not None, "rank 0 has graphs"
            shape, has_step = values
            found = self.graphs.meet(shape, self._batch if has_step else None)
            self._features = None if found is None else found[1]

    def _help(self, kind: str, values: tuple[Any, ...]) -> None:
        """Do this rank's part of an embedding, of the head, or of a draft that ranks share."""
        text, device = self.model.config.text, self.model.device
        if kind == "scores":
            rows = torch.empty(values[0], text.hidden_size, dtype=self.model.dtype, device=device)
            joint_scores(self.model, cast("Chain", self.model.mesh.replica_group).broadcast(rows, 0))
        elif kind == "embed":
            joint_embedding(self.model, torch.tensor(values[0], dtype=torch.int64, device=device))
        elif self.draft is not None:
            with ops.use_options(strict=False):  # as on rank 0, where only steps of the target are strict
                self.draft.replay(*values, features=self._features)

    def _obey(self, command: Command, cache: HybridCache, piece_tokens: int) -> None:
        kind, values = command
        if kind == "batch":
            self._batch, self._embeds = cache.build(*values), None
            if self._batch.mode == "prefill":
                self._batch.prefix_pieces(cache.config.page_size, piece_tokens)
        elif kind in {"forward", "hidden", "graph"}:
            batch = self._batch
            assert batch is not None, "rank 0 describes a step before it runs one"
            *logits, tap = values or (None,)
            if kind == "graph":
                assert self.graphs is not None, "rank 0 has graphs"
                self._features = (self.graphs.run(batch) or (None, None))[1]
            else:
                taps = _tap(tap)
                if logits:
                    self.model(batch, cache, inputs_embeds=self._embeds, taps=taps, logits=logits[0])
                else:
                    self.model.hidden(batch, cache, inputs_embeds=self._embeds, taps=taps)
                self._features = bring_features(self.model, batch, taps)
        elif kind in {"images", "drop_image"}:
            self._see(kind, values)
        elif kind in {"replicas", "serve", "meet"}:
            self._meet(kind, values)
        elif kind in {"scores", "embed", "draft"}:
            self._help(kind, values)
        elif kind == "load_weights":
            try:
                self.whole.load_weights(values[0], **values[1])
            except K3Error as error:  # rank 0 found the same, and says so
                logger.debug("weights were not replaced: %s", error)
        else:
            cache.replay(kind, *values)


def serve(model: KimiK3ForCausalLM, counts: tuple[int, ...]) -> None:
    """Run a pass without tokens of this replica, whose experts others need; `counts` are the tokens of every one."""
    batch = Batch.of([], input_ids=torch.zeros(0, dtype=torch.int64, device=model.device))
    batch.replica_tokens = counts
    model(batch, None, logits="last")


def _tap(said: tuple[tuple[int, ...], Literal["prefix", "mixture"]] | None) -> FeatureTap | None:
    return None if said is None else FeatureTap(*said)
