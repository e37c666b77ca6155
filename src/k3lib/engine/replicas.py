"""Several replicas of the attention part behind one front: a scheduler and a cache each, passes of the model together.

Each replica has an `Engine` on its first rank, which leads its other ranks. The replicas share their experts, so that
a pass of one needs the ranks of all: their leaders begin every pass together, and those that have nothing to run serve
an empty one. Rank 0 is also the front. It works in rounds: it tells the leaders what is new, each of them takes at most
one step, and when all have come to the end of theirs, it hears what came of them. Between two rounds the leaders wait
for the next message and compute nothing, and no output is on its way.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import logging
import os
import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from k3lib import ops
from k3lib.cache import Limit
from k3lib.engine import ranks
from k3lib.engine.config import EngineConfig
from k3lib.engine.engine import Engine
from k3lib.engine.prompts import Prompts
from k3lib.engine.request import Request, SamplingParams, SpecReport, StepOutput
from k3lib.errors import CapacityError, ConfigError, K3Error, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from os import PathLike

    from torch import Tensor

    from k3lib.batch import Batch, CacheViews
    from k3lib.engine.graphs import DecodeGraphs
    from k3lib.engine.media import Media
    from k3lib.model import KimiK3ForCausalLM
    from k3lib.multimodal import KimiK3ForConditionalGeneration
    from k3lib.parallel import Mesh
    from k3lib.parallel.group import Chain

__all__ = [
    "Lockstep",
    "Part",
    "Pass",
    "PrefixIndex",
    "ReplicatedEngine",
    "choose_replica",
    "follow",
    "of_replica",
    "page_keys",
]

logger = logging.getLogger(__name__)


# ---- which replica takes a request ------------------------------------------------------------------------------


def choose_replica(loads: Sequence[int], matches: Sequence[int], taken: Sequence[int], has_room: Sequence[bool]) -> int:
    """Choose the replica for a request: the one whose load is least, less what its cache saves of the prompt.

    So a cached prefix wins as long as the replica that has it is not busier by more tokens than the prefix has.

    Args:
        loads: tokens of the requests that each replica has.
        matches: tokens of the prompt that each replica is likely to have cached.
        taken: requests that each replica ever got, to take turns where all else is equal.
        has_room: whether the replica's queue takes one more; at least one does.
    """
    able = [replica for replica, room in enumerate(has_room) if room]
    return min(able, key=lambda r: (loads[r] - matches[r], loads[r], taken[r], r))


def page_keys(ids: Sequence[int], page_tokens: int, namespace: str = "") -> list[int]:
    """A key for each whole page of a prompt, which tells it and all in front of it from others."""
    key, keys = hash(namespace), []
    for end in range(page_tokens, len(ids) + 1, page_tokens):
        key = hash((key, *ids[end - page_tokens : end]))
        keys.append(key)
    return keys


class PrefixIndex:
    """The pages that a replica has seen last: a guess at what its cache holds, made without asking it."""

    def __init__(self, num_pages: int) -> None:
        """Make an empty one that remembers as many pages as the cache can hold."""
        self._num_pages = num_pages
        self._keys: collections.OrderedDict[int, None] = collections.OrderedDict()

    def note(self, keys: Sequence[int]) -> None:
        """Take note of the pages of a prompt; the first ones are forgotten last."""
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._num_pages:
            self._keys.popitem(last=False)

    def match(self, keys: Sequence[int]) -> int:
        """How many of the first pages of a prompt are known."""
        return sum(1 for _ in itertools.takewhile(self._keys.__contains__, keys))

    def clear(self) -> None:
        """Forget all."""
        self._keys.clear()


def of_replica(config: EngineConfig, dp_size: int) -> EngineConfig:
    """The part of one replica: limits that count requests or prompt tokens of a step are divided, pools are not.

    Raises:
        ConfigError: fewer state slots than replicas.
    """
    changes: dict[str, Any] = {}
    if config.max_running_requests is not None:
        changes["max_running_requests"] = max(1, config.max_running_requests // dp_size)
    if config.max_queued_requests is not None:
        changes["max_queued_requests"] = -(-config.max_queued_requests // dp_size)
    if not config.deterministic:  # which promises bits that depend on the size
        changes["chunked_prefill_size"] = max(1, config.chunked_prefill_size // dp_size)
    if config.max_mamba_cache_size is not None and config.cache is None:
        changes["max_mamba_cache_size"] = config.max_mamba_cache_size // dp_size
        if not changes["max_mamba_cache_size"]:
            raise ConfigError(
                f"max_mamba_cache_size={config.max_mamba_cache_size} over dp_size={dp_size} replicas is no slot"
            )
    return dataclasses.replace(config, **changes)


# ---- passes together --------------------------------------------------------------------------------------------


class Lockstep:
    """What the leaders of all replicas agree on: which pass they run next, and when all are done.

    Attributes:
        mesh: all ranks.
        rank, size: this replica, and how many there are.
        is_broken: something that all do together failed here, so that the others wait for what never comes.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._group = cast("Chain", mesh.dp if mesh.leaders is None else mesh.leaders)
        self.rank, self.size = self._group.rank, self._group.size
        self.is_broken = False
        self._model: JoinedModel | None = None
        self._graphs: DecodeGraphs | None = None

    def join(self, model: KimiK3ForCausalLM, leader: ranks.Leader | None, config: EngineConfig) -> JoinedModel:
        """Take the model of this replica, whose passes begin together with those of the others.

        Args:
            model: what the runner would call.
            leader: tells the other ranks of this replica, if there are any.
            config: of the engine.
        """
        self._model = JoinedModel(model, self, leader, config)
        return self._model

    def join_graphs(self, graphs: DecodeGraphs) -> JoinedGraphs:
        """Take the graphs of this replica, which are replayed together with those of the others."""
        self._graphs = graphs
        return JoinedGraphs(graphs, self)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around what all leaders do: a failure here ends all ranks (see `Mesh.watch`)."""
        try:
            with ranks.telling(self.mesh, wait=False):
                yield
        except BaseException:
            self.is_broken = True
            raise

    def enter(self, tokens: int, shape: tuple[int, int] | None = None) -> Pass:
        """Begin a pass with so many tokens of this replica; others may serve with none.

        Args:
            tokens: at least one.
            shape: of the smallest graph that takes them: requests, and tokens of each; None if none does.
        """
        requests, width = shape or (0, 0)
        return Pass.of(self._gather(Part(tokens, requests, width, 0)))

    def finish(self, message: bytes = b"") -> list[bytes]:
        """Come to the end of a round, and serve the passes of those that have not.

        Args:
            message: for rank 0.

        Returns:
            On rank 0 what the others say, without those that say nothing.
        """
        assert self._model is not None, "the engine has joined"
        with self.together(), self._model.rules(), torch.inference_mode():
            found = self._gather(self._nothing(len(message)))
            while any(part.tokens for part in found):
                self._serve(Pass.of(found))
                found = self._gather(self._nothing(len(message)))
            if self.rank == 0:
                sizes = [part.message for part in found]
                room = [(r, torch.empty(size, dtype=torch.uint8)) for r, size in enumerate(sizes) if r and size]
                return [bytes(self._group.receive(like, r).numpy()) for r, like in room]
            if message:
                work = self._group.send(torch.frombuffer(bytearray(message), dtype=torch.uint8), 0)
                if work is not None:
                    work.wait()
            return []

    def tell(self, *message: Any) -> None:  # noqa: ANN401 - whatever can be pickled
        """Begin a round, on rank 0: `listen` of the others returns what is said."""
        with self.together():
            ranks.send(self._group, message)

    def listen(self) -> tuple[Any, ...]:
        """Wait for what rank 0 tells next, as long as it takes."""
        with self.together():
            message: tuple[Any, ...] = ranks.receive(self._group)
            return message

    def _nothing(self, message: int) -> Part:
        """The part of a replica that has nothing to run: padding of any shape, if it replays graphs."""
        return Part(0, int(self._graphs is not None and self._graphs.can_meet()), 0, message)

    def _serve(self, agreed: Pass) -> None:
        assert self._model is not None, "the engine has joined"
        if agreed.shape is None:
            self._model.serve(agreed.tokens)
        else:
            assert self._graphs is not None, "only then there is a shape"
            self._graphs.meet(agreed.shape)

    def _gather(self, part: Part) -> list[Part]:
        return [Part(*row) for row in self._group.all_gather(torch.tensor([part])).tolist()]

    def check(self) -> None:
        """Refuse what a step gave if a rank has failed meanwhile.

        Raises:
            TransportError: which rank, and why.
        """
        ranks.check_health(self.mesh)


class Part(NamedTuple):
    """What a replica brings to the next pass.

    Attributes:
        tokens: to compute; 0 serves.
        requests, width: of the smallest graph that takes them, requests and tokens of each; no requests if none does,
            no width if any does.
        message: bytes that rank 0 is told in the end.
    """

    tokens: int
    requests: int
    width: int
    message: int


class Pass(NamedTuple):
    """A pass of all replicas.

    Attributes:
        tokens: of each.
        shape: of the graph that all replay: requests, and tokens of each; None runs without.
    """

    tokens: tuple[int, ...]
    shape: tuple[int, int] | None

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Pass:
        """What follows from the parts of all replicas: one graph, as large as the largest, if all can and fit."""
        widths = {part.width for part in parts if part.tokens}
        shape = None
        if all(part.requests for part in parts) and len(widths) == 1:
            shape = max(part.requests for part in parts), widths.pop()
        return cls(tuple(part.tokens for part in parts), shape)


class JoinedModel:
    """The model of a replica as its runner calls it: every pass begins on all replicas at once."""

    def __init__(
        self, model: KimiK3ForCausalLM, lockstep: Lockstep, leader: ranks.Leader | None, config: EngineConfig
    ) -> None:
        self.model = model
        self._lockstep = lockstep
        self._leader = leader
        self._config = config

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the model has
        return getattr(self.model, name)

    def __call__(self, batch: Batch, cache: CacheViews, **options: Any) -> Tensor:  # noqa: ANN401 - as the model
        """As the model."""
        return self._together(batch, lambda: self.model(batch, cache, **options))

    def hidden(self, batch: Batch, cache: CacheViews, **options: Any) -> Tensor:  # noqa: ANN401 - as the model
        """As the model."""
        return self._together(batch, lambda: self.model.hidden(batch, cache, **options))

    def _together(self, batch: Batch, run: Callable[[], Tensor]) -> Tensor:
        with self._lockstep.together():
            if not batch.replica_tokens:  # no graph was asked for
                batch.replica_tokens = self._lockstep.enter(batch.num_tokens).tokens
            if self._leader is not None:
                self._leader.note("replicas", batch.replica_tokens)
            return run()

    def rules(self) -> contextlib.AbstractContextManager[None]:
        """What the runner asks of kernels."""
        rules = self._config
        return ops.use_options(strict=rules.strict_backends or None, deterministic=rules.deterministic or None)

    def serve(self, counts: tuple[int, ...]) -> None:
        """Run a pass of other replicas; `counts` are the tokens of each."""
        if self._leader is None:
            ranks.serve(self.model, counts)
        else:
            self._leader.send("serve", counts)
            ranks.serve(cast("ranks.LedModel", self.model).model, counts)


class JoinedGraphs:
    """Graphs of a replica: a step is replayed if it can be on all replicas, in one shape."""

    def __init__(self, graphs: DecodeGraphs, lockstep: Lockstep) -> None:
        self.graphs = graphs
        self._lockstep = lockstep

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever graphs have
        return getattr(self.graphs, name)

    def run(self, batch: Batch) -> tuple[Tensor, Tensor | None] | None:
        """As the graphs; a step that has to run without has begun on all replicas all the same."""
        with self._lockstep.together():
            agreed = self._lockstep.enter(batch.num_tokens, self.graphs.shape_of(batch))
            batch.replica_tokens = agreed.tokens
            return None if agreed.shape is None else self.graphs.meet(agreed.shape, batch)


# ---- the leaders of other replicas ------------------------------------------------------------------------------


class _Order(NamedTuple):
    """Something for a replica: a request to add, or the name of one to abort."""

    replica: int
    kind: str
    value: Any


def follow(
    model: KimiK3ForCausalLM | KimiK3ForConditionalGeneration,
    config: EngineConfig | None = None,
    *,
    tokenizer: Any = None,  # noqa: ANN401
) -> None:
    """Serve rank 0's engine with this rank's part of the model, until it closes.

    Args:
        model: this rank's part.
        config: what rank 0's engine was given.
        tokenizer: what rank 0's engine was given; the first rank of each replica needs it.

    Raises:
        ConfigError: this is rank 0.
        Exception: a step failed here; rank 0 and the others cannot go on, and end too.
    """
    mesh, config = model.mesh, config or EngineConfig()
    if mesh.dp.size == 1:
        ranks.follow(model, config)
    elif mesh.replica_group.rank:
        ranks.follow(model, of_replica(config, mesh.dp.size))
    elif mesh.world.rank:
        _lead(model, config, tokenizer)
    else:
        raise ConfigError(f"rank 0 of {mesh.world.size} leads: make a ReplicatedEngine")


def _lead(model: KimiK3ForCausalLM | KimiK3ForConditionalGeneration, config: EngineConfig, tokenizer: Any) -> None:  # noqa: ANN401
    """Run the engine of a replica as rank 0 tells, until it says that this is the end."""
    with ranks.telling(model.mesh):
        lockstep = Lockstep(model.mesh)
        engine = Engine(model, of_replica(config, lockstep.size), tokenizer=tokenizer, lockstep=lockstep)
        _run(engine, lockstep)


def _run(engine: Engine, lockstep: Lockstep) -> None:
    while True:
        kind, *values = lockstep.listen()
        if kind == "ask":
            lockstep.finish(pickle.dumps(_answer(engine, *values)))
            continue
        outputs = [out for order in values[0] if order.replica == lockstep.rank for out in _obey(engine, order)]
        if kind == "end":
            engine.close()
            return
        outputs += _step(engine, lockstep)
        lockstep.finish(pickle.dumps(outputs) if outputs else b"")


def _obey(engine: Engine, order: _Order) -> list[StepOutput]:
    if order.kind == "abort":
        engine.abort(order.value)
        return []
    try:
        engine.add(order.value)
    except Exception as error:  # the front counts as we do, so only priorities can make this happen
        logger.warning("replica %d does not take %s: %s", order.replica, order.value.name, error)
        return [StepOutput([], "abort", request_id=order.value.name)]
    return []


def _step(engine: Engine, lockstep: Lockstep) -> list[StepOutput]:
    """At most one step. Requests of one that failed end with "error", which the next one tells."""
    try:
        return engine.step() if engine.has_work else []
    except Exception:
        if lockstep.is_broken:
            raise
        logger.exception("a step of replica %d failed; its requests end with an error", lockstep.rank)
        return []


def _check(engine: Engine) -> None:
    engine.cache.check()
    engine.scheduler.check()


_QUESTIONS: dict[str, Callable[..., Any]] = {
    "stats": Engine.stats, "clear_cache": Engine.clear_cache, "update_weights": Engine.update_weights, "check": _check,
}  # fmt: skip


def _answer(engine: Engine, name: str, values: Mapping[str, Any]) -> Any:  # noqa: ANN401 - what the question asks for
    """What a replica answers, or the exception."""
    try:
        return _QUESTIONS[name](engine, **values)
    except (K3Error, AssertionError) as error:
        return error
    except Exception as error:  # of any package, which others may not be able to read
        logger.exception("%s failed", name)
        return K3Error(f"{name} failed: {type(error).__name__}: {error}")


# ---- the front --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Open:
    """A request that has not ended.

    Attributes:
        request: what was asked.
        replica: who runs it.
        tokens: generated so far.
    """

    request: Request
    replica: int
    tokens: list[int] = field(default_factory=list)

    @property
    def load(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.request.prompt_ids) + len(self.tokens)


class ReplicatedEngine(Prompts):
    """An `Engine` over several replicas, with its methods: rank 0 makes it, the other ranks call `follow`.

    Each request goes to one replica and stays there: to the one with the fewest tokens of open requests, unless
    another one has more of the prompt cached than it is busier (`choose_replica`).

    Attributes:
        engine: that of the first replica, which is led from here.
        model, cache, scheduler, media: its.
        config: what was asked for, for all replicas together.
        tokenizer: for prompts and stops given as text.
        context_length: longest prompt plus output.
        limits: effective limits of each replica.
    """

    def __init__(
        self,
        model: KimiK3ForCausalLM | KimiK3ForConditionalGeneration,
        config: EngineConfig | None = None,
        *,
        tokenizer: Any = None,  # noqa: ANN401
    ) -> None:
        """Make the front and the engine of the first replica.

        Args:
            model: rank 0's part.
            config: limits of all replicas together (see `of_replica`); pools are of each.
            tokenizer: as an `Engine` takes it.

        Raises:
            ConfigError: a layout of one replica, another rank than 0, or what an `Engine` refuses.
        """
        mesh = model.mesh
        if mesh.dp.size == 1:
            raise ConfigError("a ReplicatedEngine needs dp_size > 1, got dp_size=1: make an Engine")
        if mesh.world.rank:
            raise ConfigError(
                f"rank {mesh.world.rank} of {mesh.world.size} follows rank 0: call k3lib.engine.follow(model, config)"
            )
        self.config = config or EngineConfig()
        self._lockstep = Lockstep(mesh)
        count = self._lockstep.size
        own = of_replica(self.config, count)
        self.engine = Engine(model, own, tokenizer=tokenizer, lockstep=self._lockstep)
        self.model, self.tokenizer = self.engine.model, tokenizer
        self.cache, self.scheduler, self.media = self.engine.cache, self.engine.scheduler, self.engine.media
        self.context_length = self.engine.context_length
        replicas = Limit("dp_size", count, "given", "replicas; the other limits are of each")
        logger.info("%s = %s (%s) %s", *replicas)
        self.limits: tuple[Limit, ...] = (replicas, *self.engine.limits)
        self._open: dict[str, _Open] = {}
        self._orders: list[_Order] = []  # that the other leaders are told with the next round
        self._unread: list[StepOutput] = []
        self._inboxes: dict[str, collections.deque[StepOutput]] = {}
        self._names = itertools.count(1)
        self._loads, self._taken = [0] * count, [0] * count
        self._seen = [PrefixIndex(self.cache.config.num_pages) for _ in range(count)]
        self._is_closed = False

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        if self._lockstep.is_broken:
            return False
        return bool(self._open or self._orders or self._unread or self.engine.has_work)

    def check_request(self, request: Request) -> None:
        """Refuse a request that can never run, as `Engine.check_request` does."""
        self.engine.check_request(request)

    def has_room(self, priority: int = 0) -> bool:
        """Whether a request of that priority would be taken."""
        return any(self._rooms(priority))

    def add(self, request: Request) -> str:
        """Give a request to a replica and return its id.

        Raises:
            RequestError: see `check_request`, or an id that is in use.
            CapacityError: the queues of all replicas are full.
            ConfigError: the engine was closed.
        """
        self._check_open()
        self.check_request(request)
        request.prompt_ids = list(request.prompt_ids)  # the caller may go on writing to theirs
        if request.request_id is None:
            names = (f"request-{n}" for n in self._names)
            request.request_id = next(name for name in names if name not in self._open)
        if request.name in self._open:
            raise RequestError(f"request id {request.name!r} is in use", param="request_id")
        keys = self._keys(request.prompt_ids, request)
        replica = self._choose(request, keys)
        if replica == 0:
            self.engine.add(request)
        else:
            self._orders.append(_Order(replica, "add", request))
        state = self._open[request.name] = _Open(request, replica)
        self._loads[replica] += state.load
        self._taken[replica] += 1
        self._seen[replica].note(keys)
        return request.name

    def _choose(self, request: Request, keys: Sequence[int]) -> int:
        rooms = self._rooms(request.priority)
        if not any(rooms):
            raise CapacityError(f"the queue is full: max_queued_requests={self.config.max_queued_requests}")
        matches = [index.match(keys) * self.cache.page_tokens for index in self._seen]
        return choose_replica(self._loads, matches, self._taken, rooms)

    def _rooms(self, priority: int) -> list[bool]:
        """Which queues take one more; one that is full does if it may drop a request of lower priority."""
        limit, running = self.engine.config.max_queued_requests, self.scheduler.config.max_running
        if limit is None:
            return [True] * self._lockstep.size
        counts = [0] * self._lockstep.size
        lowest = [priority] * self._lockstep.size
        for state in self._open.values():
            counts[state.replica] += 1
            lowest[state.replica] = min(lowest[state.replica], state.request.priority)
        free = [count < limit + running for count in counts]
        return free if any(free) else [low < priority for low in lowest]

    def _keys(self, ids: Sequence[int], request: Request) -> list[int]:
        return page_keys(ids, self.cache.page_tokens, request.namespace)

    def abort(self, request_id: str) -> bool:
        """Drop a request at any moment; False if it is not known (any more). Its memory is free with the next step."""
        state = self._open.pop(request_id, None)
        if state is None:
            return False
        self._loads[state.replica] -= state.load
        self._unread = [out for out in self._unread if out.request_id != request_id]
        if state.replica == 0:
            self.engine.abort(request_id)
            return True
        told = [order for order in self._orders if order.value is not state.request]
        if len(told) == len(self._orders):
            told.append(_Order(state.replica, "abort", request_id))
        self._orders = told
        return True

    def step(self) -> list[StepOutput]:
        """Let every replica advance by one step, if it has something to do.

        Returns:
            What was computed since the last call, but not for `generate` and `stream`, which get theirs.

        Raises:
            ConfigError: the engine was closed.
            Exception: a step of the first replica failed, as of `Engine.step`.
        """
        self._step()
        outputs, self._unread = self._unread, []
        return outputs

    def _step(self) -> None:
        self._check_open()
        orders, self._orders = self._orders, []
        self._lockstep.tell("round", orders)
        outputs: list[StepOutput] = []
        try:
            if self.engine.has_work:
                outputs = self.engine.step()
        finally:
            if not self._lockstep.is_broken:
                said = self._lockstep.finish()
                for out in (*outputs, *(out for message in said for out in pickle.loads(message))):
                    self._hand_out(out)

    def _hand_out(self, out: StepOutput) -> None:
        name = out.request_id or ""
        state = self._open.get(name)
        if state is None:  # of a step that failed, and dropped meanwhile
            return
        state.tokens += out.token_ids
        self._loads[state.replica] += len(out.token_ids)
        if out.finish is not None:
            del self._open[name]
            self._loads[state.replica] -= state.load
            ids = [*state.request.prompt_ids, *state.tokens]
            self._seen[state.replica].note(self._keys(ids, state.request))
        inbox = self._inboxes.get(name)
        (self._unread if inbox is None else inbox).append(out)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError("this engine was closed")
        if self._lockstep.is_broken:
            raise K3Error("a step failed while the other replicas waited for it: this engine cannot go on")

    # ---- what is asked of all replicas

    def _ask(self, name: str, **values: Any) -> list[Any]:  # noqa: ANN401 - what the question takes
        """The answers of all replicas, in order.

        Raises:
            Exception: the first that a replica answered with.
        """
        self._check_open()
        self._lockstep.tell("ask", name, values)
        answers = [_answer(self.engine, name, values)]
        answers += [pickle.loads(message) for message in self._lockstep.finish()]
        failures = [answer for answer in answers if isinstance(answer, Exception)]
        if failures:
            if len(failures) < len(answers):
                failures[0].weights_changed = name == "update_weights"  # type: ignore[attr-defined]
            raise failures[0]
        return answers

    def stats(self) -> dict[str, Any]:
        """What `Engine.stats` says, added up, and under `replicas` what each of them says."""
        each = self._ask("stats")
        limits = {x.name: {"value": x.value, "reason": x.reason, "note": x.note} for x in self.limits}
        return {**_added(each), "speculation": _speculation(each), "limits": limits, "replicas": each}

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping of a replica, or the front's, is inconsistent."""
        self._ask("check")
        loads = [0] * self._lockstep.size
        for state in self._open.values():
            loads[state.replica] += state.load
        assert loads == self._loads, "the load of a replica is miscounted"

    def clear_cache(self) -> int:
        """Forget all cached prefixes; returns the tokens of KV that were forgotten. Running requests go on."""
        for index in self._seen:
            index.clear()
        return sum(self._ask("clear_cache"))

    def update_weights(
        self,
        source: str | PathLike[str] | Mapping[str, Tensor],
        *,
        keep_cache: bool = False,
        **options: Any,  # noqa: ANN401
    ) -> None:
        """Replace the weights of all replicas between two steps, as `Engine.update_weights` does, from a folder.

        Raises:
            ConfigError: tensors instead of a folder.
            CheckpointError, ConfigError: a source that does not fit; nothing has been changed, or, with
                `weights_changed`, not the same on all replicas.
        """
        if not isinstance(source, str | os.PathLike):
            raise ConfigError("weights of many ranks are given by a folder, so that every rank reads its part")
        if not keep_cache:
            for index in self._seen:
                index.clear()
        self._ask("update_weights", source=source, keep_cache=keep_cache, **options)

    def close(self) -> None:
        """Drop all requests and let the other ranks go; nothing more can be computed then. Idempotent."""
        if self._is_closed:
            return
        for name in list(self._open):
            self.abort(name)
        self._is_closed = True
        if not self._lockstep.is_broken:
            self._lockstep.tell("end", self._orders)
            self._orders = []
            self.engine.close()

    # ---- what generate and stream need

    def make_requests(
        self,
        prompts: Sequence[Sequence[int] | str],
        params: SamplingParams | Sequence[SamplingParams] | None,
        media: Sequence[Sequence[Media]] | None,
    ) -> list[Request]:
        """The requests of `generate`, checked; arguments and errors as there."""
        return self.engine.make_requests(prompts, params, media)

    def _is_open(self, name: str) -> bool:
        return name in self._open


_SAME = {"page_size", "checkpoint_grid"}  # counts that are those of each replica


def _added(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts of all replicas together; what cannot be added is that of the first."""
    total: dict[str, Any] = {}
    for name, first in each[0].items():
        values = [stats[name] for stats in each]
        if isinstance(first, dict):
            total[name] = _added(values)
        elif isinstance(first, int | float) and not isinstance(first, bool) and name not in _SAME:
            total[name] = sum(values)
        else:
            total[name] = first
    return total


def _speculation(each: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The report of all replicas together, with its rates."""
    if each[0]["speculation"] is None:
        return None
    total = SpecReport()
    for stats in each:
        found = stats["speculation"]
        for name in ("steps", "proposed", "accepted", "emitted"):
            setattr(total, name, getattr(total, name) + found[name])
        for name in ("by_position", "tried_by_position"):
            pairs = itertools.zip_longest(getattr(total, name), found[name], fillvalue=0)
            setattr(total, name, [a + b for a, b in pairs])
        total.refused = total.refused or found["refused"]
        total.simulated = total.simulated or found["simulated"]
    return total.summary()
