"""Which requests run in the next step, with which tokens. Pure Python: it sees ids and leases, never a tensor.

A step is a prefill (parts of prompts) or a decode (one token for every request whose prompt is done); when both have
work they take turns. Memory is reserved before a step; what runs out of it preempts the request that came last, which
waits, keeps its tokens and computes them anew (or finds them in the prefix cache).
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from k3lib.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from k3lib.cache.lease import Lease
    from k3lib.cache.prefix import MediaKey
    from k3lib.engine.request import RequestState

__all__ = ["LeaseSource", "Scheduler", "SchedulerConfig", "StepPlan", "Work"]


class LeaseSource(Protocol):
    """What the scheduler needs of a cache; `HybridCache` is one."""

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        ...

    @property
    def cached_pages(self) -> int:
        """Pages that can be had by evicting."""
        ...

    def open(
        self, prompt_ids: Sequence[int], *, namespace: str = "", media: Sequence[MediaKey] = (), reuse: bool = True
    ) -> Lease:
        """Give a request memory."""
        ...

    def grow(self, lease: Lease, *, tokens: int) -> None:
        """Reserve room for more tokens."""
        ...

    def commit(self, lease: Lease, ids: Sequence[int]) -> None:
        """Count tokens as context."""
        ...

    def close(self, lease: Lease, *, donate: bool = True) -> None:
        """Take the memory back."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Budgets and rules.

    Attributes:
        page_size: tokens a page.
        max_running: requests with memory.
        max_queued: requests that wait; None = any number.
        chunk_tokens: most prompt tokens of one prefill step.
        long_share: part of a prefill step that prompts longer than one step get while shorter ones want it too.
        mix_decode: let decoding requests ride in prefill steps instead of taking turns, as long as they leave half of
            such a step to prompts.
        aligned: cut prefills at multiples of `chunk_tokens`, and compute generated tokens one by one again after a
            preemption, so that the shape of every computation depends on the request alone. Not with `mix_decode`.
        reserve_tokens: admission counts on so many more tokens for every request, or its limit if that is less.
        fair_after: seconds after its arrival from which a request is admitted, and its prompt computed, before those
            of higher priority.
        queue_timeout: seconds that a request may wait before it first runs; None = any time.
        draft_tokens: a decode step has room for so many draft tokens of a request too, if that preempts nobody.
    """

    page_size: int
    max_running: int
    max_queued: int | None = None
    chunk_tokens: int = 2048
    long_share: float = 0.5
    mix_decode: bool = False
    aligned: bool = False
    reserve_tokens: int = 128
    fair_after: float = 60.0
    queue_timeout: float | None = None
    draft_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("page_size", "max_running", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("max_queued", "reserve_tokens", "fair_after", "queue_timeout", "draft_tokens"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"{name} must be >= 0, got {value}")
        if not 0 < self.long_share < 1:
            raise ConfigError(f"long_share must be between 0 and 1, got {self.long_share}")
        if self.aligned and self.mix_decode:
            raise ConfigError("mix_decode joins requests in a step, aligned keeps them apart: choose one")


class Work(NamedTuple):
    """The part of one request in a step: its next tokens. `samples`: the step chooses the token behind them."""

    state: RequestState
    lease: Lease
    ids: list[int]
    samples: bool


@dataclass(slots=True)
class StepPlan:
    """One step of the model. What is planned as "decode" becomes "verify" with the draft tokens behind its `ids`."""

    mode: Literal["prefill", "decode", "verify"]
    work: list[Work]

    @property
    def num_tokens(self) -> int:
        """New tokens of the step."""
        return sum(len(work.ids) for work in self.work)


@dataclass(slots=True)
class _Queue:
    """Waiting requests, by priority and then arrival; the one that waits longest is known as well."""

    heap: list[tuple[int, int, RequestState]] = field(default_factory=list)
    waiting: dict[int, RequestState] = field(default_factory=dict)  # by number

    def __len__(self) -> int:
        return len(self.waiting)

    def push(self, state: RequestState) -> None:
        self.waiting[state.number] = state
        heapq.heappush(self.heap, (-state.request.priority, state.number, state))

    def remove(self, state: RequestState) -> None:
        del self.waiting[state.number]
        while self.heap and self.heap[0][1] not in self.waiting:
            heapq.heappop(self.heap)
        if len(self.heap) > 2 * len(self.waiting) + 64:
            self.heap = [entry for entry in self.heap if entry[1] in self.waiting]
            heapq.heapify(self.heap)

    def first(self) -> RequestState:
        return self.heap[0][2]

    def oldest(self) -> RequestState:
        return self.waiting[min(self.waiting)]

    def worst(self) -> RequestState:
        return max(self.waiting.values(), key=_rank)


def _rank(state: RequestState) -> tuple[int, int]:
    """Order in which requests are served; the last is preempted first."""
    return (-state.request.priority, state.number)


class Scheduler:
    """Continuous batching over a cache. `next` plans a step, `commit` counts it once it was issued."""

    def __init__(
        self, cache: LeaseSource, config: SchedulerConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.cache = cache
        self.config = config
        self.clock = clock
        self.running: dict[int, RequestState] = {}  # by number
        self.num_preemptions = 0
        self.tag = ""  # of the weights: what was cached under another one does not match
        self._queue = _Queue()
        self._decode_turn = False
        self._long_credit = 0.0
        self._now = clock()  # one time for a whole plan

    @property
    def waiting(self) -> list[RequestState]:
        """Requests without memory, in the order in which they will be served."""
        return sorted(self._queue.waiting.values(), key=_rank)

    @property
    def num_waiting(self) -> int:
        """Requests without memory."""
        return len(self._queue)

    @property
    def has_work(self) -> bool:
        """Whether there is anything to run."""
        return bool(self.running) or bool(len(self._queue))

    def add(self, state: RequestState) -> RequestState | None:
        """Queue a request.

        Returns:
            Another one that lost its place to it, because the queue was full and it had a lower priority.

        Raises:
            CapacityError: the queue is full.
        """
        if not self.has_room(state.request.priority):
            raise CapacityError(f"the queue is full: max_queued_requests={self.config.max_queued}")
        loser = None
        if self._is_full:
            loser = self._queue.worst()
            self._queue.remove(loser)
        self._queue.push(state)
        return loser

    @property
    def _is_full(self) -> bool:
        limit, places = self.config.max_queued, self.config.max_running - len(self.running)
        return limit is not None and len(self._queue) - places >= limit

    def has_room(self, priority: int = 0) -> bool:
        """Whether a request of that priority would be taken."""
        if not self._is_full:
            return True
        worst = self._queue.worst() if len(self._queue) else None
        return worst is not None and worst.request.priority < priority and not worst.preemptions

    def drop(self, state: RequestState, *, donate: bool = True) -> bool:
        """Forget a request at any moment and take its memory back; False if it is not here (any more)."""
        if state.number in self._queue.waiting:
            self._queue.remove(state)
            return True
        if self.running.pop(state.number, None) is None:
            return False
        self._take_back(state, donate=donate)
        return True

    def forget(self, state: RequestState) -> None:
        """Let go of a request whose memory was taken back already."""
        state.lease = None
        self.running.pop(state.number, None)
        if state.number in self._queue.waiting:
            self._queue.remove(state)

    def expired(self, timeout_of: Callable[[RequestState], float | None]) -> list[RequestState]:
        """Requests whose time is over: dropped, their memory taken back."""
        now, late = self.clock(), []
        for state in [*self._queue.waiting.values(), *self.running.values()]:
            timeout, waits = timeout_of(state), self.config.queue_timeout
            is_new = state.lease is None and not state.preemptions and waits is not None
            if (timeout is not None and now - state.arrival >= timeout) or (
                is_new and waits is not None and now - state.arrival >= waits
            ):
                late.append(state)
        for state in late:
            self.drop(state)
        return late

    # -- planning -------------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Give memory to waiting requests in their order; the first that does not fit ends the round."""
        self._now = self.clock()
        while len(self._queue) and len(self.running) < self.config.max_running:
            oldest = self._queue.oldest()
            state = oldest if self._is_overdue(oldest) else self._queue.first()
            if self.running and self._pages_wanted(state) > self._pages_left():
                return
            request = state.request
            try:
                state.lease = self.cache.open(
                    state.tokens,
                    namespace=self.tag + request.namespace,
                    media=[image.key for image in request.media],
                    reuse=_reuses(state),
                )
            except CapacityError:
                return
            if state.cached_tokens is None:
                state.cached_tokens = min(state.lease.cached_len, state.num_prompt)
                state.kv_tokens = min(state.lease.kv_len, state.num_prompt)
            self._queue.remove(state)
            self.running[state.number] = state

    def _pages_wanted(self, state: RequestState) -> int:
        """Pages that a request will take altogether, as far as admission counts on it."""
        tokens = len(state.tokens) + min(state.left, self.config.reserve_tokens)
        return -(-tokens // self.config.page_size)

    def _pages_left(self) -> int:
        """Pages that are free or can be evicted, less what the running requests are counted on to take."""
        promised = 0
        for state in self.running.values():
            assert state.lease is not None, "what runs has memory"
            promised += max(0, self._pages_wanted(state) - len(state.lease.pages))
        return self.cache.free_pages + self.cache.cached_pages - promised

    def _is_overdue(self, state: RequestState) -> bool:
        return self._now - state.arrival >= self.config.fair_after

    def _turn(self, state: RequestState) -> tuple[int, int, int]:
        """Order in which prompts are computed."""
        return (0, 0, state.number) if self._is_overdue(state) else (1, *_rank(state))

    def next(self) -> StepPlan | None:
        """Plan a step and reserve its memory; None if there is nothing to do.

        Raises:
            CapacityError: nothing can run, because somebody else holds the memory.
        """
        self.admit()
        if not self.has_work:
            return None
        plans = [self._plan_prefill, self._plan_decode]
        for plan_of in reversed(plans) if self._decode_turn else plans:
            if (plan := plan_of()) is not None:
                return plan
        # the first in rank may preempt all others, so it is alone, and requests that cannot run alone are refused
        first = min(self.running.values() or self._queue.waiting.values(), key=_rank)
        raise CapacityError(
            f"request {first.request.request_id!r} with {len(first.tokens)} tokens cannot go on alone: "
            f"{self.cache.free_pages} pages are free, {self.cache.cached_pages} cached; are there foreign leases?"
        )

    def _by_stage(self) -> tuple[list[RequestState], list[RequestState]]:
        """Running requests that compute known tokens, and those that need one more."""
        prefilling: list[RequestState] = []
        decoding: list[RequestState] = []
        for state in self.running.values():
            todo = self._todo(state)
            # one token is left to compute of a request that decodes, be it after a preemption
            is_decode = todo <= 0 or (todo == 1 and not self.config.aligned and state.num_generated > 0)
            (decoding if is_decode else prefilling).append(state)
        return prefilling, decoding

    def _plan_decode(self) -> StepPlan | None:
        work: list[Work] = []
        self._add_decoding(self._by_stage()[1], work)
        if not work:
            return None
        self._decode_turn = False
        if self.config.draft_tokens:
            self._reserve_drafts(work)
        return StepPlan("decode", work)

    def _reserve_drafts(self, work: list[Work]) -> None:
        for state, lease, _, _ in work:
            tokens = 1 + max(0, min(self.config.draft_tokens, state.left - 1))
            if not self._has_room(state, tokens):
                try:
                    self.cache.grow(lease, tokens=tokens)
                except CapacityError:
                    return  # drafts get what room there is

    def draft_room(self, work: Work) -> int:
        """Draft tokens that a decode step can take of a request: what it may still generate, and has room for."""
        room = len(work.lease.pages) * self.config.page_size - work.lease.length - len(work.ids)
        return max(0, min(self.config.draft_tokens, work.state.left - 1, room))

    def _add_decoding(self, decoding: Iterable[RequestState], work: list[Work]) -> None:
        for state in sorted(decoding, key=_rank):
            if state.lease is not None and self._reserve(state, 1, work):
                work.append(self._work(state, 1))

    def _plan_prefill(self) -> StepPlan | None:
        work: list[Work] = []
        room = self.config.chunk_tokens
        prefilling, decoding = self._by_stage()
        mixes = self.config.mix_decode and bool(prefilling) and 2 * len(decoding) <= room
        if mixes:
            self._add_decoding(decoding, work)
            prefilling = [state for state in prefilling if state.lease is not None]  # others were preempted for it
        before = len(work)
        room -= before
        prefilling.sort(key=self._turn)
        short = [s for s in prefilling if self._todo(s) <= self.config.chunk_tokens]
        long = [s for s in prefilling if self._todo(s) > self.config.chunk_tokens]
        kept = 0
        if short and long:  # neither class can starve the other; what is less than can be given carries over
            unit = self.config.chunk_tokens if self.config.aligned else 1
            self._long_credit += room * self.config.long_share
            kept = min(room, int(self._long_credit) // unit * unit)
            self._long_credit -= kept
        room = self._fill(short, room - kept, work) + kept
        room = self._fill(long, room, work)
        taken = {id(w.state) for w in work}
        self._fill([s for s in short if id(s) not in taken], room, work)
        if len(work) == before:
            return None
        self._decode_turn = not mixes
        return StepPlan("prefill", work)

    def _fill(self, states: list[RequestState], room: int, work: list[Work]) -> int:
        """Add prompt parts up to `room` tokens; returns what is left of it."""
        for state in states:
            if room <= 0:
                break
            if state.lease is None:
                continue  # preempted meanwhile
            count = min(self._todo(state), room)
            if self.config.aligned:
                chunk = self.config.chunk_tokens
                count = min(self._todo(state), chunk - state.lease.length % chunk)
                if count > room:
                    break  # it cannot be cut, and nobody overtakes it
            if self._reserve(state, count, work):
                work.append(self._work(state, count))
                room -= count
        return room

    def _todo(self, state: RequestState) -> int:
        """Known tokens that a prefill has to compute.

        Generated tokens are not among them if the shape of a computation must not depend on preemptions.
        """
        assert state.lease is not None, "what runs has memory"
        known = state.num_prompt if self.config.aligned else len(state.tokens)
        return known - len(state.lease.tokens)

    @staticmethod
    def _work(state: RequestState, count: int) -> Work:
        lease = state.lease
        assert lease is not None, "what runs has memory"
        start = len(lease.tokens)
        return Work(state, lease, state.tokens[start : start + count], start + count == len(state.tokens))

    def _reserve(self, state: RequestState, tokens: int, work: list[Work]) -> bool:
        """Get memory for a step of a request, by preempting later ones that are not yet part of the step."""
        while not self._has_room(state, tokens):
            assert state.lease is not None, "what runs has memory"
            try:
                self.cache.grow(state.lease, tokens=tokens)
            except CapacityError:
                victim = self._victim(state, work)
                if victim is None:
                    return False
                self._preempt(victim)
        return True

    def _has_room(self, state: RequestState, tokens: int) -> bool:
        lease = state.lease
        assert lease is not None, "what runs has memory"
        return len(lease.tokens) + tokens <= len(lease.pages) * self.config.page_size

    def _victim(self, state: RequestState, work: list[Work]) -> RequestState | None:
        taken = {w.state.number for w in work}
        later = [s for s in self.running.values() if _rank(s) > _rank(state) and s.number not in taken]
        return max(later, key=_rank, default=None)

    def _preempt(self, state: RequestState, *, donate: bool = True) -> None:
        del self.running[state.number]
        self._take_back(state, donate=donate)
        state.preemptions += 1
        self.num_preemptions += 1
        self._queue.push(state)

    def _take_back(self, state: RequestState, *, donate: bool) -> None:
        assert state.lease is not None, "what runs has memory"
        self.cache.close(state.lease, donate=donate)
        state.lease = None

    def preempt_all(self, *, donate: bool) -> None:
        """Take the memory of all running requests; they wait and go on later."""
        for state in sorted(self.running.values(), key=_rank, reverse=True):
            self._preempt(state, donate=donate)

    def reopen(self) -> None:
        """Take back what requests found in the cache and did not build on yet: it may be bad. They look again."""
        for state in list(self.running.values()):
            assert state.lease is not None, "what runs has memory"
            if 0 < state.lease.cached_len == state.lease.length and state.lease.in_flight is None:
                del self.running[state.number]
                self._take_back(state, donate=False)
                if not state.preemptions:
                    state.cached_tokens, state.kv_tokens = None, 0
                self._queue.push(state)

    # -- after a step ---------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan) -> None:
        """Count the tokens of a step that was issued to the device; what is true of a verify step comes out later."""
        if plan.mode == "verify":
            return
        for work in plan.work:
            self.cache.commit(work.lease, work.ids)

    def prepare(self) -> None:
        """Do what does not depend on the tokens that the device is choosing: admit, and reserve for the next decode."""
        self.admit()
        for state in self.running.values():
            lease = state.lease
            if lease is None or lease.length < len(state.tokens) or state.left <= 1 or self._has_room(state, 1):
                continue
            try:
                self.cache.grow(lease, tokens=1)
            except CapacityError:
                return  # `next` finds a victim

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent."""
        assert not set(self.running) & set(self._queue.waiting), "a request runs and waits"
        assert len(self.running) <= self.config.max_running, "too many requests run"
        assert all(s.lease is not None and s.lease.is_open for s in self.running.values()), "running without memory"
        assert all(s.lease is None for s in self._queue.waiting.values()), "waiting with memory"
        assert set(self._queue.waiting) <= {number for _, number, _ in self._queue.heap}, "a request is forgotten"


def _reuses(state: RequestState) -> bool:
    """Whether a request can begin behind a cached prefix: not if something of every token is to be reported."""
    request = state.request
    if request.record_routes:
        return False
    return not request.params.prompt_logprobs or len(state.prompt_logprobs) >= state.num_prompt
