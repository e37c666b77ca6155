"""The scheduler: budgets, memory, order and progress, over real bookkeeping and without tensors."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from k3lib.cache.lease import HybridAllocator
from k3lib.engine.request import Request, RequestState, SamplingParams
from k3lib.engine.scheduler import Scheduler, SchedulerConfig
from k3lib.errors import CapacityError, ConfigError

LONGEST = 60  # tokens of a prompt
MOST_NEW = 8


class Memory:
    """A `LeaseSource` over a `HybridAllocator`: what `HybridCache` does, without the tensors."""

    def __init__(self, pages=64, slots=8, page_size=4, **options):
        self.allocator = HybridAllocator(pages, slots, page_size, **options)

    @property
    def free_pages(self):
        return self.allocator.pages.num_free

    @property
    def cached_pages(self):
        return self.allocator.cached_pages

    def open(self, prompt_ids, *, namespace="", media=(), reuse=True):
        return self._issued(lambda: self.allocator.open(prompt_ids, namespace=namespace, media=media, reuse=reuse))

    def grow(self, lease, *, tokens):
        self._issued(lambda: self.allocator.grow(lease, tokens))

    def commit(self, lease, ids):
        self.allocator.commit(lease, ids)
        self.allocator.take_ops()

    def close(self, lease, *, donate=True):
        self.allocator.close(lease, donate=donate)

    def describe(self, plan):
        """What `make_batch` does to the bookkeeping."""
        self.allocator.take_ops()
        for work in plan.work:
            self.allocator.begin(work.lease, len(work.ids), saves=plan.mode == "prefill")

    def discard(self, lease):
        self.allocator.discard(lease)
        self.allocator.take_ops()

    def _issued(self, call):
        try:
            return call()
        except CapacityError:
            if not self.allocator.has_ops:
                raise
            self.allocator.take_ops()
            return call()


class Loop:
    """What an engine does around a scheduler; the token behind a context is a function of the context."""

    def __init__(self, memory, *, page_size=4, **rules):
        self.now = 0.0
        self.memory = memory
        rules = {"max_running": 8, "chunk_tokens": 16, **rules}
        self.scheduler = Scheduler(memory, SchedulerConfig(page_size=page_size, **rules), clock=lambda: self.now)
        self.numbers = itertools.count(1)
        self.begun: set[int] = set()  # numbers of requests that computed something
        self.firsts: list[int] = []  # numbers in the order of their first tokens

    def add(self, prompt, new=4, **fields):
        number = next(self.numbers)
        request = Request(list(prompt), SamplingParams(max_new_tokens=new), f"r{number}", **fields)
        state = RequestState(request, number, 0, self.now, list(prompt))
        return state, self.scheduler.add(state)

    def plan(self):
        """The next step, checked against the rules that hold for every step."""
        scheduler, config = self.scheduler, self.scheduler.config
        had_work = scheduler.has_work
        plan = scheduler.next()
        assert (plan is not None) == had_work, "no step although there is work"
        if plan is None:
            return None
        states = [work.state for work in plan.work]
        assert states, "an empty step"
        assert len({id(state) for state in states}) == len(states), "a request twice in a step"
        assert len(states) <= len(scheduler.running) <= config.max_running
        for work in plan.work:
            state, lease = work.state, work.lease
            assert scheduler.running[state.number] is state, "a step of a request that does not run"
            assert lease is state.lease
            assert work.ids, "a request without tokens in a step"
            start, end = lease.length, lease.length + len(work.ids)
            assert work.ids == state.tokens[start:end], "not the next tokens that are to be computed"
            assert work.samples == (end == len(state.tokens))
            if config.aligned:
                chunk = config.chunk_tokens
                whole = end % chunk == 0 or end == state.num_prompt
                assert whole if start < state.num_prompt else end == start + 1, "a part whose shape depends on others"
                assert start >= state.num_prompt or start // chunk == (end - 1) // chunk
        if plan.mode == "decode":
            assert all(len(work.ids) == 1 for work in plan.work)
        else:
            assert plan.num_tokens <= config.chunk_tokens, "more tokens than a step may have"
        self._check_order(plan)
        return plan

    def _check_order(self, plan):
        """Of requests of one priority nobody begins before one that came earlier, short and long ones apart."""
        planned = {work.state.number for work in plan.work}
        new = [work for work in plan.work if work.state.number not in self.begun]
        chunk = self.scheduler.config.chunk_tokens
        for work in new:
            number, priority = work.state.number, work.state.request.priority
            is_long = work.state.num_prompt - work.lease.length > chunk
            others = [*self.scheduler.waiting, *self.scheduler.running.values()]
            for other in others:
                if other.number > number or other.number in self.begun | planned or other.request.priority != priority:
                    continue
                assert other.lease is not None, f"{number} begins while {other.number} waits"
                differs = (other.num_prompt - other.lease.length > chunk) != is_long
                assert differs, f"{number} begins before {other.number}"
        self.begun |= {work.state.number for work in new}

    def step(self, ends=lambda state, token: False, fails=lambda state: False):
        """One step of an engine; returns the requests that ended."""
        plan = self.plan()
        if plan is None:
            return []
        self.memory.describe(plan)
        self.scheduler.commit(plan)
        self.scheduler.prepare()
        ended = []
        for work in plan.work:
            state = work.state
            if not work.samples:
                continue
            if fails(state):
                self.memory.discard(state.lease)
                self.scheduler.forget(state)
                ended.append(state)
                continue
            token = after(state.tokens)
            if not state.num_generated:
                self.firsts.append(state.number)
            if state.request.params.max_new_tokens:
                state.tokens.append(token)
            if not state.left or ends(state, token):
                assert self.scheduler.drop(state)
                ended.append(state)
        return ended

    def run(self, limit=10_000, **rules):
        """Step to the end; returns the number of steps."""
        for count in range(limit):
            if not self.scheduler.has_work:
                return count
            self.step(**rules)
            self.now += 1.0
            self.check()
        raise AssertionError(f"still working after {limit} steps")

    def check(self):
        self.scheduler.check()
        self.memory.allocator.check()

    def drained(self):
        """Everything is free or cached, and can be had back."""
        allocator = self.memory.allocator
        assert not self.scheduler.has_work
        self.check()
        assert not allocator.leases
        allocator.clear()
        allocator.take_ops()
        self.check()
        assert allocator.pages.num_free == allocator.pages.count
        assert allocator.slots.num_free == allocator.slots.count
        return True


def after(tokens):
    return (sum(tokens[-3:]) * 7 + len(tokens)) % 5


def prompt_of(length, branch=0, kind=0):
    """Prompts that share beginnings: equal up to `branch`."""
    return [i % 7 for i in range(min(branch, length))] + [kind % 5 + 7] * max(0, length - branch)


# ---- the machine --------------------------------------------------------------------------------


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, run, end, fail and are dropped in every order, with memory that never suffices for all."""

    @initialize(
        chunk=st.sampled_from([1, 3, 8, 16, 64]),
        running=st.integers(1, 5),
        slots=st.integers(1, 8),
        page_size=st.sampled_from([1, 4, 5]),
        spare=st.sampled_from([0, 1, 3, 10, 40]),
        kind=st.sampled_from(["plain", "plain", "mixed", "aligned"]),
        reserve=st.sampled_from([0, 3, 100]),
        queued=st.sampled_from([None, None, 0, 2]),
        grid=st.sampled_from([4, 10, 16]),
        options=st.fixed_dictionaries({"keep_turn_ends": st.booleans(), "prefix_cache": st.booleans()}),
        waits=st.sampled_from([None, 30.0]),
    )
    def begin(self, chunk, running, slots, page_size, spare, kind, reserve, queued, grid, options, waits):
        if kind == "aligned":
            options = {**options, "keep_turn_ends": False, "track_interval": 0}
            grid = -(-grid // chunk) * chunk
        pages = -(-(LONGEST + MOST_NEW) // page_size) + spare
        memory = Memory(pages, slots, page_size, checkpoint_grid=grid, **options)
        self.loop = Loop(
            memory,
            page_size=page_size,
            max_running=running,
            max_queued=queued,
            chunk_tokens=chunk,
            mix_decode=kind == "mixed",
            aligned=kind == "aligned",
            reserve_tokens=reserve,
            fair_after=20.0,
            queue_timeout=waits,
        )
        self.alive = {}
        self.preemptions = 0

    @rule(
        length=st.integers(1, LONGEST),
        branch=st.sampled_from([0, 0, 9, 20, 33, 60]),
        kind=st.integers(0, 3),
        priority=st.sampled_from([0, 0, 0, 1, 2]),
        new=st.integers(0, MOST_NEW),
        timeout=st.sampled_from([None, None, None, 10.0]),
    )
    def add(self, length, branch, kind, priority, new, timeout):
        scheduler = self.loop.scheduler
        has_room, before = scheduler.has_room(priority), scheduler.waiting
        fields = {"priority": priority, "timeout": timeout}
        if not has_room:
            with pytest.raises(CapacityError, match="the queue is full"):
                self.loop.add(prompt_of(length, branch, kind), new, **fields)
            assert scheduler.waiting == before
            return
        state, loser = self.loop.add(prompt_of(length, branch, kind), new, **fields)
        self.alive[state.number] = state
        if loser is not None:
            assert loser.request.priority < priority
            assert not loser.preemptions
            assert loser.lease is None
            del self.alive[loser.number]

    @rule(ending=st.sets(st.integers(0, 4)), failing=st.sampled_from([None] * 9 + [0, 1, 2]), count=st.integers(1, 4))
    def step(self, ending, failing, count):
        for _ in range(count):
            for state in self.loop.step(
                ends=lambda state, token: token in ending and state.number % 3 == 0,
                fails=lambda state: state.number % 5 == failing,
            ):
                del self.alive[state.number]
            self.loop.now += 1.0

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data):
        state = self.alive.pop(data.draw(st.sampled_from(sorted(self.alive))))
        assert self.loop.scheduler.drop(state)
        assert state.lease is None
        assert not self.loop.scheduler.drop(state)

    @rule(seconds=st.sampled_from([1.0, 10.0, 25.0]))
    def expire(self, seconds):
        self.loop.now += seconds
        queue_timeout = self.loop.scheduler.config.queue_timeout
        for state in self.loop.scheduler.expired(lambda state: state.request.timeout):
            age = self.loop.now - state.arrival
            assert state.lease is None
            timeout = state.request.timeout
            assert (timeout is not None and age >= timeout) or (queue_timeout is not None and age >= queue_timeout)
            del self.alive[state.number]

    @rule(donate=st.booleans())
    def preempt_all(self, donate):
        self.loop.scheduler.preempt_all(donate=donate)
        assert not self.loop.scheduler.running

    @invariant()
    def consistent(self):
        if not hasattr(self, "loop"):
            return
        self.loop.check()
        scheduler = self.loop.scheduler
        here = {s.number for s in scheduler.waiting} | set(scheduler.running)
        assert here == set(self.alive), "a request is lost, or its end was not told"
        assert scheduler.num_waiting == len(scheduler.waiting)
        assert scheduler.has_work == bool(here)
        preemptions = scheduler.num_preemptions
        assert preemptions >= self.preemptions
        self.preemptions = preemptions

    def teardown(self):
        if not hasattr(self, "loop"):
            return
        tokens = sum(len(s.tokens) + s.left for s in self.alive.values())
        # each token is computed in a step of its own at worst, and anew a few times for want of memory
        self.loop.run(limit=20 + 8 * tokens)
        assert self.loop.drained()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(stateful_step_count=100)


# ---- progress and order -------------------------------------------------------------------------

KINDS = [
    pytest.param({}, id="turns"),
    pytest.param({"mix_decode": True}, id="mixed"),
    pytest.param({"aligned": True}, id="aligned"),
]


def computed(state):
    return 0 if state.lease is None else state.lease.length


@pytest.mark.parametrize("rules", KINDS)
@pytest.mark.parametrize("chunk", [1, 2, 8, 16])
def test_a_long_prompt_goes_on_beside_a_stream_of_short_ones(rules, chunk):
    loop = Loop(Memory(pages=400, slots=12, page_size=4, checkpoint_grid=chunk), chunk_tokens=chunk, **rules)
    long, _ = loop.add(prompt_of(40 * chunk, kind=0), new=1)
    steps = 0
    while long.lease is not None or not steps:
        while loop.scheduler.num_waiting < 4:
            loop.add(prompt_of(chunk, kind=steps), new=1)
        loop.step()
        steps += 1
        assert steps <= 40 * 4, "the long prompt starves"
    assert len(loop.firsts) > 20, "the short ones starve"


@pytest.mark.parametrize("rules", KINDS)
@pytest.mark.parametrize("chunk", [1, 2, 8, 16])
def test_a_short_prompt_is_soon_done_beside_a_stream_of_long_ones(rules, chunk):
    loop = Loop(Memory(pages=4000, slots=12, page_size=4, checkpoint_grid=chunk), chunk_tokens=chunk, **rules)
    for _ in range(3):
        loop.add(prompt_of(50 * chunk), new=1)
    loop.step()
    short, _ = loop.add(prompt_of(chunk, kind=3), new=1)
    for _ in range(4):
        while loop.scheduler.num_waiting < 3:
            loop.add(prompt_of(50 * chunk), new=1)
        loop.step()
    assert short.number in loop.firsts


@pytest.mark.parametrize("chunk", [1, 2, 4, 16])
@pytest.mark.parametrize("rules", KINDS)
def test_prompts_and_decoding_requests_do_not_starve_each_other(rules, chunk):
    """Also with steps that decoding requests alone could fill."""
    loop = Loop(Memory(pages=400, checkpoint_grid=chunk), chunk_tokens=chunk, **rules)
    decoding = [loop.add([kind], new=200)[0] for kind in range(4)]
    while any(not state.num_generated for state in decoding):
        loop.step()
    late, _ = loop.add(prompt_of(12 * chunk, kind=2), new=200)
    before = [state.num_generated for state in decoding]
    steps = 0
    while not late.num_generated:
        loop.step()
        steps += 1
    assert steps <= 2 * 24 + 2
    gained = [state.num_generated - n for state, n in zip(decoding, before, strict=True)]
    assert min(gained) >= steps // 2 - 1


def test_decoding_requests_ride_in_prefill_steps_if_told_to():
    loop = Loop(Memory(), chunk_tokens=8, mix_decode=True)
    first, _ = loop.add(prompt_of(3), new=6)
    loop.step()
    loop.add(prompt_of(20, kind=1), new=2)
    plan = loop.plan()
    assert plan.mode == "prefill"
    assert [(work.state is first, len(work.ids)) for work in plan.work] == [(True, 1), (False, 7)]


@pytest.mark.parametrize("rules", KINDS)
def test_a_low_priority_waits_no_longer_than_it_should(rules):
    """Others of higher priority take every place and every prompt token there is."""
    loop = Loop(Memory(pages=400, slots=4, checkpoint_grid=8), max_running=2, chunk_tokens=8, fair_after=30.0, **rules)
    low, _ = loop.add(prompt_of(24, kind=1), new=3)
    while loop.now < 60:
        while loop.scheduler.num_waiting < 3:
            loop.add(prompt_of(16, kind=2), new=2, priority=1)
        loop.step()
        loop.now += 1.0
        if loop.now <= 30:
            assert not computed(low)
    assert low.num_generated == 3
    assert low.lease is None


def test_without_memory_nothing_is_taken_and_the_first_stays_first():
    loop = Loop(Memory(pages=6, slots=4, page_size=4), reserve_tokens=8)
    first, _ = loop.add(prompt_of(14), new=4)  # 5 pages in the end
    loop.step()
    second, _ = loop.add(prompt_of(8, kind=1), new=4)
    third, _ = loop.add([3], new=1)
    free = loop.memory.free_pages, loop.memory.allocator.slots.num_free
    while first.lease is not None:
        assert loop.scheduler.waiting == [second, third]
        assert loop.memory.allocator.slots.num_free == free[1]
        loop.step()
        loop.check()
    loop.run()
    assert loop.firsts == [1, 2, 3]
    assert loop.drained()


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_fewer_slots_than_places_only_wait(slots):
    loop = Loop(Memory(slots=slots), max_running=8)
    for kind in range(6):
        loop.add(prompt_of(9, kind=kind), new=3)
    most = 0
    while loop.scheduler.has_work:
        loop.step()
        loop.check()
        most = max(most, len(loop.scheduler.running))
    assert most == slots
    assert loop.firsts == [1, 2, 3, 4, 5, 6]
    assert loop.drained()


def test_who_comes_last_in_rank_is_preempted_first_and_goes_on_with_its_tokens():
    loop = Loop(Memory(pages=9, slots=4, page_size=2, prefix_cache=False), reserve_tokens=0, page_size=2)
    kept, _ = loop.add([1, 2, 3, 4], new=8, priority=1)
    middle, _ = loop.add([2, 3, 4, 5], new=8)
    last, _ = loop.add([3, 4, 5, 6], new=8)
    want = {}
    for state in (kept, middle, last):
        tokens = list(state.tokens)
        for _ in range(8):
            tokens.append(after(tokens))
        want[state.number] = tokens
    while not loop.scheduler.num_preemptions:
        loop.step()
    assert (kept.preemptions, middle.preemptions, last.preemptions) == (0, 0, 1)
    loop.run()
    assert kept.preemptions == 0
    assert last.preemptions > 0
    assert last.preemptions >= middle.preemptions
    assert {s.number: s.tokens for s in (kept, middle, last)} == want
    assert loop.scheduler.num_preemptions == middle.preemptions + last.preemptions
    assert loop.drained()


def test_a_decoding_request_may_preempt_a_prompt_of_its_own_step():
    loop = Loop(Memory(pages=4, page_size=4, prefix_cache=False), chunk_tokens=2, reserve_tokens=0, mix_decode=True)
    first, _ = loop.add([1, 2, 3], new=8)
    loop.step()
    loop.step()
    second, _ = loop.add([5] * 8, new=2)
    loop.run()
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert loop.drained()


@pytest.mark.parametrize("rules", KINDS)
@pytest.mark.parametrize("new", [1, 7, 40])
def test_two_that_only_fit_alone_take_turns_without_end(rules, new):
    """Each fills the whole pool in the end."""
    loop = Loop(Memory(pages=12, slots=2, page_size=4, checkpoint_grid=16), reserve_tokens=0, **rules)
    states = [loop.add(prompt_of(48 + 1 - new, kind=kind), new=new)[0] for kind in range(4)]
    loop.run(limit=2000)
    assert all(state.num_generated == new for state in states)
    assert loop.drained()


def test_memory_that_somebody_else_holds_is_an_error_and_not_an_endless_wait():
    loop = Loop(Memory(pages=4, slots=1, page_size=4))
    foreign = loop.memory.open([1])
    loop.add([1, 2], new=1)
    with pytest.raises(CapacityError, match=r"request 'r1' with 2 tokens cannot go on alone.*foreign leases"):
        loop.scheduler.next()
    loop.check()
    loop.memory.close(foreign)
    loop.run()
    foreign = loop.memory.open([1])
    loop.memory.close(foreign)
    assert loop.drained()


def test_a_place_in_a_full_queue_goes_to_a_higher_priority_but_never_that_of_a_preempted_request():
    loop = Loop(Memory(), max_running=1, max_queued=1)
    first, _ = loop.add([1], new=5)
    loop.step()
    second, _ = loop.add([2], new=5)
    assert not loop.scheduler.has_room(0)
    third, loser = loop.add([3], new=5, priority=1)
    assert loser is second
    loop.scheduler.preempt_all(donate=True)
    assert loop.scheduler.waiting == [third, first]
    assert not loop.scheduler.has_room(5)
    with pytest.raises(CapacityError, match="max_queued_requests=1"):
        loop.add([4], new=5, priority=5)
    loop.run()
    assert loop.drained()


def test_only_requests_that_never_ran_lose_their_patience_with_the_queue():
    loop = Loop(Memory(), max_running=1, queue_timeout=5.0)
    runs, _ = loop.add([1], new=100)
    loop.step()
    waits, _ = loop.add([2], new=5)
    loop.now = 4.9
    assert loop.scheduler.expired(lambda state: None) == []
    loop.now = 5.0
    assert loop.scheduler.expired(lambda state: None) == [waits]
    loop.scheduler.preempt_all(donate=True)
    loop.now = 50.0
    assert loop.scheduler.expired(lambda state: None) == []
    assert loop.scheduler.expired(lambda state: 50.0) == [runs]
    assert loop.drained()


def test_room_for_the_next_token_is_not_taken_from_the_cache_for_a_request_that_ends():
    loop = Loop(Memory(pages=3, slots=4, page_size=4))
    loop.add([9] * 8, new=1)
    loop.run()
    assert loop.memory.cached_pages == 2
    loop.add([1, 2, 3, 4], new=1)
    loop.run()
    assert loop.memory.cached_pages == 3, "a cached prefix was evicted for nothing"
    assert loop.drained()


def test_what_was_found_but_not_built_on_can_be_looked_for_again():
    loop = Loop(Memory(checkpoint_grid=4))
    loop.add([1, 2, 3, 4, 5, 6], new=1)
    loop.run()
    again, _ = loop.add([1, 2, 3, 4, 5, 6, 7], new=2)
    loop.scheduler.admit()
    assert again.cached_tokens == 6
    loop.memory.allocator.clear()
    loop.scheduler.reopen()
    assert again.lease is None
    assert loop.scheduler.waiting == [again]
    loop.run()
    assert (again.cached_tokens, again.preemptions) == (0, 0)
    assert loop.drained()


@pytest.mark.parametrize(
    ("rules", "pattern"),
    [
        ({"page_size": 0}, "page_size must be >= 1, got 0"),
        ({"max_running": 0}, "max_running must be >= 1, got 0"),
        ({"chunk_tokens": -1}, "chunk_tokens must be >= 1, got -1"),
        ({"max_queued": -1}, "max_queued must be >= 0, got -1"),
        ({"queue_timeout": float("nan")}, "queue_timeout must be >= 0, got nan"),
        ({"long_share": 1.0}, r"long_share must be between 0 and 1, got 1\.0"),
        ({"mix_decode": True, "aligned": True}, "choose one"),
    ],
)
def test_rules_that_cannot_be_are_refused(rules, pattern):
    with pytest.raises(ConfigError, match=pattern):
        SchedulerConfig(**{"page_size": 4, "max_running": 2, **rules})
