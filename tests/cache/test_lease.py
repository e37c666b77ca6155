"""Leases and the prefix tree: what is reused is what was computed, and memory is never lost or lent twice."""

from random import Random

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from simulation import Simulation

from k3lib.cache import HybridAllocator
from k3lib.cache.lease import save_positions
from k3lib.cache.prefix import MediaKey, prefix_keys, token_keys
from k3lib.errors import CapacityError, ConfigError


class Choices(Random):
    """The choices inside one rule: many small ones, which hypothesis would draw slowly."""

    def __init__(self, number):
        super().__init__(number)
        self.number = number

    def __repr__(self):
        return f"Choices({self.number})"

    def ids(self, length):
        """Few different ones, so that sequences share prefixes."""
        return [self.randrange(2) for _ in range(length)]

    def space(self):
        return self.choice(["", "", "", "salt"])


CHOICES = st.integers(0, 2**20).map(Choices)


def within(media, length):
    """The spans that lie in the first `length` tokens."""
    return tuple(span for span in media if span.position + span.length <= length)


class LeaseMachine(RuleBasedStateMachine):
    """Any order of calls on one allocator; `Simulation.check` says what must be true after each of them."""

    page_size = 4

    @initialize(
        grid=st.sampled_from([1, 2, 5, 8]),
        room=st.integers(12, 48),
        slots=st.integers(1, 6),
        interval=st.sampled_from([None, None, 0, 1, 3]),
        keep_turn_ends=st.sampled_from([True, True, False]),
    )
    def setup(self, grid, room, slots, interval, keep_turn_ends):
        self.sim = Simulation(
            -(-room // self.page_size),
            slots,
            self.page_size,
            checkpoint_grid=grid,
            track_interval=interval,
            keep_turn_ends=keep_turn_ends,
        )
        self.allocator = self.sim.allocator
        self.other = HybridAllocator(8, 2, self.page_size)
        self.grid, self.interval, self.keep_turn_ends = grid, grid if interval is None else interval, keep_turn_ends
        self.known = [((0,) * 9, ())]  # tokens and images that prompts begin with
        self.closed = []

    # ---- choices

    def prompt(self, choices):
        """Tokens and images: the beginning of something known, and a tail."""
        tokens, media = choices.choice(choices.choice([self.known, self.known[-5:]]))
        cut = choices.choice([len(tokens), choices.randint(0, len(tokens))])
        media = within(media, cut)
        covered = max((span.position + span.length for span in media), default=0)
        tokens = [*tokens[:cut], *choices.ids(choices.randint(0, 6))] or [0]
        if len(tokens) - covered >= 3 and not choices.randrange(5):
            position = choices.randint(covered, len(tokens) - 2)
            length = choices.randint(1, len(tokens) - position)
            media = (*media, MediaKey(position, length, choices.choice(["cat", "dog"])))
        return tokens, media

    def pick(self, choices, *, idle=False):
        """An open lease, if there is one; `idle`: without a step in flight."""
        runs = [run for run in self.sim.runs if not (idle and run.step is not None)]
        return choices.choice(runs) if runs else None

    def next_ids(self, choices, run, length):
        """What a step computes: the prompt as far as it goes, with its images; now and then something else."""
        at = len(run.keys)
        ids = [max(key, 0) for key in run.promised[at : at + length]] if choices.randrange(10) else []
        return [*ids, *choices.ids(length - len(ids))]

    def room(self, run):
        return len(run.lease.pages) * self.page_size - len(run.keys)

    def state(self):
        """Everything that a failed call must leave as it was."""
        allocator = self.allocator
        order = [node.name for node in allocator._states]
        leases = [(x.in_flight, list(x._saves), x.is_open) for x in allocator.leases.values()]
        router = {kind: dict(stored) for kind, stored in self.sim.router.stored.items()}
        return allocator.dump(), allocator.stats(), order, leases, router

    def refused(self, error, call, *args, **kwargs):
        before = self.state()
        with pytest.raises(error) as caught:
            call(*args, **kwargs)
        assert self.state() == before
        self.allocator.check()
        return caught.value

    # ---- a request begins

    @rule(choices=CHOICES, steps=st.integers(0, 3), closing=st.sampled_from([0, 1, 1, 2]))
    def request(self, choices, steps, closing):
        """Open a lease, after others were closed, and do its first steps."""
        for run in choices.sample(self.sim.runs, min(closing, len(self.sim.runs))):
            self.close_one(run, donate=choices.random() < 0.8)
        if (run := self.try_to_open(choices)) is not None:
            for _ in range(steps):
                self.try_to_advance(choices, run)

    def try_to_open(self, choices):
        tokens, media = self.prompt(choices)
        space, reuse = choices.space(), choices.random() < 0.8
        sim, allocator = self.sim, self.allocator
        hit = sim.longest(tokens, space, media) if reuse else 0
        assert sim.router.longest(tokens, space, media) == sim.longest(tokens, space, media)
        node = sim.states()[(space, *token_keys(tokens, media)[:hit])] if hit else None
        slots = allocator.slots.num_free + allocator.slots.num_idle
        pages = sim.obtainable_pages(held=[node] if node else [])
        if slots < 1 or (hit % self.page_size and pages < 1):
            if allocator.leases or allocator.has_ops or slots < 1:
                error = self.refused(CapacityError, sim.open, tokens, space, media, reuse=reuse)
                assert error.needed_slots == 1
                event("open refused" if slots < 1 else "open refused although it had a slot without reuse")
                return None
            hit = 0  # a lone request gives up its hit
            event("a lone request gave up its hit")
        taken_over = bool(hit) and not allocator.slots.num_free and allocator.slots.num_idle == 1
        run = sim.open(tokens, space, media, reuse=reuse)
        assert run.lease.cached_len == hit
        assert run.lease.tokens == tokens[:hit]
        assert hit <= run.lease.kv_len < len(tokens)
        assert run.lease.branch % self.grid == 0
        assert run.lease.branch == 0 or hit < run.lease.branch <= run.lease.kv_len
        event(f"hit: {'none' if not hit else 'inside a page' if hit % self.page_size else 'at a page border'}")
        if taken_over:
            event("a slot was taken over")
        self.known.append((tuple(tokens), media))
        return run

    # ---- and goes on

    def try_to_grow(self, run, tokens):
        sim, lease = self.sim, run.lease
        missing = max(0, -(-(len(run.keys) + tokens) // self.page_size) - len(lease.pages))
        assert self.allocator.pages_to_grow(lease, tokens) == missing
        own = [lease._node] if lease._node is not None else []
        if missing > sim.obtainable_pages(given_up=own):
            error = self.refused(CapacityError, self.allocator.grow, lease, tokens)
            assert error.needed_pages == missing
            fits = len(lease.pages) + missing <= self.allocator.pages.count
            assert len(sim.runs) > 1 or self.allocator.has_ops or not fits, "a lone request is stuck"
            event("grow refused")
            return False
        before = list(lease.pages)
        for _ in range(2):  # the same call twice reserves once
            self.allocator.grow(lease, tokens)
            assert lease.pages[: len(before)] == before
            assert len(lease.pages) == len(before) + missing
        if own and lease._node is None:
            event("gave up the prefix that it came from")
        return True

    @rule(choices=CHOICES, steps=st.integers(1, 3))
    def advance(self, choices, steps):
        """Whole steps of one request."""
        if (run := self.pick(choices, idle=True)) is not None:
            for _ in range(steps):
                self.try_to_advance(choices, run)

    def try_to_advance(self, choices, run):
        length = choices.choice([1, choices.randint(0, 9)])
        if self.try_to_grow(run, length):
            self.describe(choices, run, length)
            self.sim.forward(run, *run.step)
            self.commit(run)

    @rule(choices=CHOICES, calls=st.integers(1, 4))
    def advance_by_single_calls(self, choices, calls):
        """Single calls of several requests, so that steps overlap."""
        for _ in range(calls if self.sim.runs else 0):
            run = self.pick(choices)
            if run.step is None and choices.randrange(2):
                self.try_to_grow(run, choices.randint(0, 14))
            elif run.step is None or (not run.has_run and not choices.randrange(5)):
                self.describe(choices, run, min(choices.randint(0, 9), self.room(run)))
            elif not run.has_run:
                self.sim.forward(run, *run.step)
                run.has_run = True
            else:
                self.commit(run)

    @rule(choices=CHOICES, length=st.integers(0, 5))
    def commit_what_was_not_described(self, choices, length):
        if (run := self.pick(choices, idle=True)) is not None:
            ids = self.next_ids(choices, run, min(length, self.room(run)))
            self.sim.forward(run, ids)
            run.step = (ids, [])
            self.commit(run)

    @rule(choices=CHOICES, width=st.integers(1, 9))
    def verify(self, choices, width):
        """A step of which only the first tokens hold; the rows of the others belong to nobody."""
        run = self.pick(choices, idle=True)
        if run is None or not self.try_to_grow(run, width):
            return
        lease, start, taken = run.lease, len(run.keys), choices.randint(1, width)
        self.sim.describe(run, self.next_ids(choices, run, width), saves=False)
        self.refused(ConfigError, self.allocator.accept, lease, width + 1)
        self.refused(ConfigError, self.allocator.accept, lease, 0)
        spare = self.spare(run)
        saves = self.allocator.accept(lease, taken)
        on_grid = [p for p in range(start + 1, start + taken + 1) if self.interval and p % self.interval == 0]
        assert [start + offset for offset, _ in saves] == (on_grid[:spare] if lease.publishes else [])
        ids = run.step[0][:taken]
        run.step = (ids, saves)
        self.sim.forward(run, ids, saves)
        cached, _ = self.sim.protected()
        for position in range(start + taken, start + width):
            page, i = lease.pages[position // self.page_size], position % self.page_size
            assert (page, i) not in cached, "a rejected token overwrites cached KV"
            self.sim.rows[page][i] = self.sim.stale()
        event(f"accepted {'all' if taken == width else 'some'}, {len(saves)} states on the way")
        self.commit(run)

    def spare(self, run):
        """Slots that states to keep can have."""
        slots = self.allocator.slots
        unlocked = [n for n in self.allocator.tree.nodes() if n.slot is not None and not n.locks]
        return slots.num_free + len(run.saves) + sum(slots.is_idle(node.slot) for node in unlocked)

    def describe(self, choices, run, length):
        """Describes a step; all the states that it should keep get a slot, as far as there are any."""
        lease, start = run.lease, len(run.keys)
        wanted = save_positions(
            start, start + length, grid=self.grid, prompt_len=len(run.promised), branch=lease.branch
        )
        spare = self.spare(run)
        saves = choices.random() < 0.7
        reserved = self.sim.describe(run, self.next_ids(choices, run, length), saves=saves)
        got = [start + offset for offset, _ in reserved]
        assert got == (wanted[:spare] if saves and lease.publishes else [])

    def commit(self, run):
        """Commits, and what must be cached then is."""
        ids, saves = run.step
        start, end = len(run.keys), len(run.keys) + len(ids)
        kept = [start + offset for offset, _ in saves]
        due = bool(ids and self.interval) and end % self.interval == 0 and end not in kept
        self.sim.commit(run, ids)
        cached = self.sim.nodes()
        if run.lease.publishes:
            # the state of a later token may have taken the slot of an earlier one
            for position in kept[-1:] if due else kept:
                assert cached[(run.space, *run.keys[:position])].slot is not None, "a kept state is not cached"
            if due and run.sequence not in cached:
                assert not self.allocator.slots.num_free, "a state was not kept although there was a slot"
        self.known.append((tuple(run.lease.tokens), within(run.media, end)))

    # ---- and ends

    @rule(choices=CHOICES, donate=st.sampled_from([True, True, True, False]))
    def close(self, choices, donate):
        if (run := self.pick(choices)) is not None:
            self.close_one(run, donate=donate)

    def close_one(self, run, *, donate):
        lease, had = run.lease, self.sim.states()
        restores = {op.target for op in self.allocator.dump()["scheduled"] if op.kind in {"zero", "copy_slot"}}
        worth = self.keep_turn_ends or len(run.keys) == lease.cached_len
        copies = {op.target for op in self.allocator.dump()["scheduled"] if op.kind == "copy_page"}
        forgotten = lease._node is None and not copies.isdisjoint(lease.pages)
        is_whole = run.step is None and run.keys and lease.slot not in restores and not forgotten
        self.sim.close(run, donate=donate)
        assert not lease.is_open
        if donate and is_whole and worth and lease.publishes:
            assert self.sim.nodes()[run.sequence].slot is not None, "the last state was not kept"
        else:
            assert self.sim.states().keys() <= had.keys()
        self.closed.append(run)

    # ---- what is rarer

    @rule(choices=CHOICES, donate=st.booleans())
    def discard(self, choices, donate):
        runs = [run for run in self.sim.runs if run.lease._published] or self.sim.runs
        if runs and not choices.randrange(3):
            run = choices.choice(runs)
            if donate and run in self.sim.runs[:-1]:
                self.close_one(self.sim.runs[-1], donate=True)
            self.sim.discard(run)
            self.closed.append(run)

    @rule(choices=CHOICES, what=st.sampled_from(["issue", "issue", "look up", "clear", "misuse"]))
    def other_call(self, choices, what):
        if what == "issue":
            self.sim.issue()
            assert not self.allocator.has_ops
            assert all(node.is_ready for node in self.sim.nodes().values())
        elif what == "look up":  # A11: a router that replays the events computes the hit that open would give
            (tokens, media), space = self.prompt(choices), choices.space()
            assert self.sim.router.longest(tokens, space, media) == self.sim.longest(tokens, space, media)
        elif what == "clear" and not choices.randrange(3):
            tokens = sum(len(node.key) for node in self.sim.nodes().values())
            assert self.allocator.clear() == tokens
            assert not self.sim.nodes()
            assert self.allocator.cached_pages == 0
        elif what == "misuse":
            self.wrong_calls(choices)

    def wrong_calls(self, choices):
        foreign = self.other.open([1])
        self.refuse_all(foreign)
        self.refused(ConfigError, self.allocator.close, foreign)
        self.refused(ConfigError, self.allocator.discard, foreign)
        self.other.close(foreign)
        for prompt, media in [([], ()), ([-1], ()), ([1, 1], [MediaKey(1, 2, "a")]), ([1], [MediaKey(0, 0, "a")])]:
            self.refused(ConfigError, self.allocator.open, prompt, media=media)
        if (run := self.pick(choices)) is not None:
            lease, room = run.lease, self.room(run)
            self.refused(ConfigError, self.allocator.grow, lease, -1)
            self.refused(ConfigError, self.allocator.commit, lease, [0] * (room + 1))
            self.refused(ConfigError, self.allocator.begin, lease, room + 1, saves=True)
            length = len(run.step[0]) if run.step is not None else None
            for wrong in () if length is None else {max(length - 1, 0), length + 1} - {length}:
                self.refused(ConfigError, self.allocator.commit, lease, [0] * wrong)
            for bad in (-1, 2**63) if room and length in {None, 1} else ():
                self.refused(ConfigError, self.allocator.commit, lease, [bad])
        if self.closed:
            lease, before = choices.choice(self.closed).lease, self.state()
            self.allocator.close(lease)
            self.allocator.discard(lease)
            assert self.state() == before
            self.refuse_all(lease)

    def refuse_all(self, lease):
        self.refused(ConfigError, self.allocator.accept, lease, 1)
        self.refused(ConfigError, self.allocator.grow, lease, 1)
        self.refused(ConfigError, self.allocator.begin, lease, 0, saves=True)
        self.refused(ConfigError, self.allocator.commit, lease, [])
        self.refused(ConfigError, self.allocator.commit, lease, [1])

    @invariant()
    def is_right(self):
        if hasattr(self, "sim"):
            self.sim.poison_free()
            self.sim.check()

    def teardown(self):
        if not hasattr(self, "sim"):
            return
        for run in list(self.sim.runs):
            self.sim.close(run)
        self.sim.issue()
        self.sim.check()
        allocator = self.allocator
        assert allocator.pages.num_free + allocator.cached_pages == allocator.pages.count
        assert allocator.slots.num_free + allocator.cached_slots == allocator.slots.count
        allocator.clear()
        self.sim.check()
        assert (allocator.pages.num_free, allocator.slots.num_free) == (allocator.pages.count, allocator.slots.count)
        assert allocator.tree.roots == {}


class PageOfOne(LeaseMachine):
    page_size = 1


class PageOfThree(LeaseMachine):
    page_size = 3


MORE = settings(max_examples=settings().max_examples * 3 // 2)
TestPageOfOne = PageOfOne.TestCase
TestPageOfThree = PageOfThree.TestCase
TestPageOfFour = LeaseMachine.TestCase
TestPageOfOne.settings = TestPageOfThree.settings = TestPageOfFour.settings = MORE


# ---- one promise at a time

A, B, C = ([token] * 40 for token in (1, 2, 3))  # contexts that share nothing


def make(pages=40, slots=8, page_size=4, grid=4, **options):
    return Simulation(pages, slots, page_size, checkpoint_grid=grid, **options)


def prefill(sim, run, length=None, *, chunk=None):
    """Compute the prompt, or up to `length` tokens of it, in chunks."""
    end = length or len(run.promised)
    while len(run.keys) < end:
        ids = [max(key, 0) for key in run.promised[len(run.keys) : end][:chunk]]
        sim.allocator.grow(run.lease, len(ids))
        sim.advance(run, ids)
        sim.check()
    return run


def decode(sim, run, ids):
    for token in ids:
        sim.allocator.grow(run.lease, 1)
        sim.advance(run, [token], saves=False)
        sim.check()
    return run


def started(sim, prompt, *, chunk=None, **options):
    return prefill(sim, sim.open(prompt, **options), chunk=chunk)


def served(sim, prompt, reply=(), *, chunk=None, **options):
    """A whole request; returns its lease."""
    run = decode(sim, started(sim, prompt, chunk=chunk, **options), reply)
    sim.close(run)
    sim.issue()
    sim.poison_free()
    sim.check()
    return run.lease


def kept(sim, tokens=None, space=""):
    """Lengths of the prefixes that can be resumed from; of `tokens` or of everything."""
    names = [name[1:] for name in sim.states() if name[0] == space]
    return sorted(len(n) for n in names if tokens is None or list(n) == list(tokens[: len(n)]))


def probe(sim, prompt, **options):
    """What a prompt would reuse; nothing is changed but the order of use."""
    run = sim.open(prompt, **options)
    found = run.lease.cached_len, run.lease.kv_len
    sim.close(run, donate=False)
    return found


# -- where states are kept


@pytest.mark.parametrize(
    ("start", "end", "prompt_len", "branch", "want"),
    [
        (0, 7, 7, 0, []),  # below the grid
        (0, 8, 8, 0, [8]),  # resending it can resume at 0 only
        (0, 9, 9, 0, [8]),
        (0, 17, 17, 0, [16]),
        (0, 16, 16, 0, [8, 16]),  # 16 for those that go on, 8 for the same prompt again
        (0, 24, 100, 0, [24]),
        (24, 31, 100, 0, []),
        (24, 32, 33, 0, [32]),
        (5, 40, 100, 0, [40]),
        (5, 40, 41, 16, [16, 40]),
        (16, 40, 41, 16, [40]),  # already behind the branch
        (0, 8, 41, 16, [8]),  # not yet there
        (8, 9, 9, 0, []),  # 8 is where it comes from
        (0, 0, 9, 8, []),
    ],
)
def test_where_a_prefill_step_keeps_states(start, end, prompt_len, branch, want):
    assert save_positions(start, end, grid=8, prompt_len=prompt_len, branch=branch) == want


def test_a_prefill_keeps_the_last_state_on_the_grid_and_the_one_at_its_end():
    sim = make()
    served(sim, A[:23])
    assert kept(sim) == [20, 23]


def test_every_chunk_of_a_prefill_keeps_a_state():
    sim = make()
    served(sim, A[:23], chunk=9)
    assert kept(sim) == [8, 16, 20, 23]


@pytest.mark.parametrize(("interval", "want"), [(None, [4, 8, 12, 13]), (3, [4, 6, 9, 12, 13]), (0, [4, 13])])
def test_decode_keeps_states_on_the_interval(interval, want):
    sim = make(track_interval=interval)
    served(sim, A[:5], A[5:13])
    assert kept(sim) == want


def test_without_turn_ends_only_the_grid_is_kept():
    sim = make(keep_turn_ends=False)
    served(sim, A[:10], A[10:15])
    assert kept(sim) == [8, 12]


@pytest.mark.parametrize("grid", [4, 5])
@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("beside", [-1, 0, 1])
def test_the_same_prompt_again_hits_the_last_state_before_its_last_token(grid, times, beside):
    """Also where the prompt ends on the grid: one token must be computed, so the state at its end is of no use."""
    sim, length = make(grid=grid), times * grid + beside
    served(sim, A[:length])
    want = (length - 1) // grid * grid
    assert probe(sim, A[:length]) == (want, length - 1)
    assert probe(sim, A[: length + 1]) == (length, length)


def test_no_states_no_tree_and_no_hits_without_a_prefix_cache():
    sim = make(prefix_cache=False)
    for _ in range(2):
        lease = served(sim, A[:10], A[10:15])
        assert (lease.cached_len, lease.kv_len, lease.publishes) == (0, 0, False)
    assert sim.allocator.tree.num_nodes == 0
    assert sim.allocator.pages.num_free == 40


def test_states_beyond_the_free_slots_are_left_out_and_counted():
    sim = make(slots=2)
    run = sim.open(A[:16])
    sim.allocator.grow(run.lease, 16)
    assert [offset for offset, _ in sim.describe(run, A[:16], saves=True)] == [12]
    assert sim.allocator.stats()["skipped_checkpoints"] == 1


# -- branches


def test_a_shared_prefix_is_kept_where_prompts_part():
    sim = make()
    served(sim, A[:14] + B[:9])
    second = started(sim, A[:14] + C[:9])
    assert (second.lease.cached_len, second.lease.kv_len, second.lease.branch) == (0, 14, 12)
    sim.close(second)
    third = sim.open(A[:14] + [7] * 9)
    assert (third.lease.cached_len, third.lease.kv_len, third.lease.branch) == (12, 14, 0)


def test_the_branch_is_kept_by_whichever_chunk_reaches_it():
    sim = make(grid=8)
    served(sim, A[:30])
    run = sim.open(A[:20] + B[:20])
    assert run.lease.branch == 16
    prefill(sim, run, 10)
    assert 16 not in kept(sim, A)
    prefill(sim, run, 30, chunk=13)
    assert 16 in kept(sim, A)


def test_the_branch_that_is_on_the_hit_needs_no_state():
    sim = make()
    served(sim, A[:13])
    assert sim.open(A[:12] + B[:4]).lease.branch == 0


# -- which state gives way


def test_the_checkpoints_that_a_request_leaves_behind_are_recycled_first():
    """Prefill in chunks does not push out what others wait for."""
    sim = make(slots=4)
    served(sim, B[:3])
    run = sim.open(A[:17])
    prefill(sim, run, 8, chunk=4)
    assert (kept(sim, A), kept(sim, B)) == ([4, 8], [3])
    prefill(sim, run, 12, chunk=4)
    assert (kept(sim, A), kept(sim, B)) == ([8, 12], [3])
    prefill(sim, run, 16, chunk=4)
    assert (kept(sim, A), kept(sim, B)) == ([12, 16], [3])


def test_a_checkpoint_that_somebody_used_is_not_superseded():
    sim = make(slots=5)
    served(sim, B[:3])
    run = prefill(sim, sim.open(A[:17]), 4, chunk=4)
    other = started(sim, A[:4] + C[:2])  # resumes at 4
    prefill(sim, run, 8, chunk=4)
    prefill(sim, run, 12, chunk=4)
    assert (kept(sim, A), kept(sim, B)) == ([4, 8, 12], [])
    sim.close(other, donate=False)


def test_a_request_that_passes_the_checkpoint_of_another_leaves_it_its_turn():
    sim = make(slots=6)
    served(sim, B[:3])
    served(sim, A[:8])
    run = started(sim, A[:13], chunk=4, reuse=False)  # passes 4 and 8, which it did not make
    assert (kept(sim, A), kept(sim, B)) == ([4, 8, 12], [3])
    others = [sim.open(C) for _ in range(2)]
    assert (kept(sim, A), kept(sim, B)) == ([4, 8, 12], [])
    for one in (run, *others):
        sim.close(one, donate=False)


def test_a_match_refreshes_only_the_state_that_is_used():
    """Else all states of a long conversation would age together."""
    sim = make(slots=4)
    served(sim, A[:8])  # at 4 and 8
    served(sim, B[:3])
    assert (kept(sim, A), kept(sim, B)) == ([4, 8], [3])
    assert probe(sim, A[:9]) == (8, 8)
    runs = [sim.open(C) for _ in range(2)]
    assert (kept(sim, A), kept(sim, B)) == ([8], [3])
    runs.append(sim.open(C))
    assert (kept(sim, A), kept(sim, B)) == ([8], [])


def test_a_match_refreshes_the_pages_of_its_whole_path():
    sim = make(pages=4, grid=8)
    served(sim, A[:8])
    served(sim, B[:8])
    assert probe(sim, A[:9]) == (8, 8)
    started(sim, C[:4])
    assert (kept(sim, A), kept(sim, B)) == ([8], [])


def test_a_match_refreshes_its_path_also_if_its_deepest_run_made_room():
    sim = make(pages=4, grid=100)
    served(sim, A[:6])
    served(sim, A[:8])
    served(sim, B[:4])
    assert (kept(sim, A), kept(sim, B), sim.allocator.pages.num_free) == ([6, 8], [4], 0)
    assert probe(sim, A[:8]) == (6, 7)  # the copy of the page takes the place of 6..8
    assert (kept(sim, A), kept(sim, B), sim.allocator.pages.num_free) == ([6], [4], 1)
    started(sim, C[:5])
    assert (kept(sim, A), kept(sim, B)) == ([6], [])


def test_the_kv_of_a_lost_state_is_still_seen():
    sim = make(slots=3)
    served(sim, A[:8])
    served(sim, A[:8] + B[:6])
    runs = [sim.open(C) for _ in range(2)]
    assert kept(sim, A + B) == []
    assert kept(sim, A[:8] + B) == [14]
    for run in runs:
        sim.close(run)
    run = sim.open(A[:8] + B[:3])
    assert (run.lease.cached_len, run.lease.kv_len, run.lease.branch) == (0, 10, 8)


def test_a_leaf_goes_with_its_last_state():
    sim = make(slots=1)
    served(sim, A[:6])
    assert sim.allocator.cached_pages == 2
    sim.open(B)
    assert (sim.allocator.tree.num_nodes, sim.allocator.cached_pages) == (0, 0)


def test_a_run_goes_only_after_all_that_continue_it():
    """Found as pages that were promised and not there: a child that was listed twice counted for its sibling."""
    sim = make(pages=6, page_size=1, grid=1)
    served(sim, [1, 1, 2])
    served(sim, [1, 1, 3, 3])
    assert (kept(sim), sim.allocator.pages.num_free) == ([2, 3, 3, 4], 1)
    prefill(sim, sim.open([4] * 4))
    assert kept(sim, [1, 1]) == [2]
    assert sim.allocator.tree.num_nodes == 3


def test_case_a6_states_in_use_are_skipped_and_lost_only_to_requests():
    sim = make(slots=4)
    served(sim, A[:3])
    served(sim, B[:3])
    running = sim.open(A[:4])  # stands on the oldest state
    sim.issue()
    more = [sim.open(C)]
    assert (kept(sim, A), kept(sim, B)) == ([3], [3])
    more.append(sim.open(C))
    assert (kept(sim, A), kept(sim, B)) == ([3], [])
    # no state for a checkpoint: the last one is in use
    sim.allocator.grow(more[0].lease, 8)
    assert sim.describe(more[0], C[:8], saves=True) == []
    assert kept(sim, A) == [3]
    # but a slot for a request, which could not begin else
    more.append(sim.open(C))
    assert kept(sim, A) == []
    assert sim.allocator.stats()["nodes"] == 1, "the KV stays with who uses it"
    prefill(sim, running)
    with pytest.raises(CapacityError):
        sim.open(C)
    sim.close(running)
    sim.issue()
    sim.open(C)
    assert sim.allocator.stats()["nodes"] == 0
    sim.check()


# -- the last slot, the last page


def test_the_last_slot_is_taken_over_and_comes_back():
    sim = make(slots=1)
    served(sim, A[:8], A[8:9])
    run = sim.open(A[:10])
    assert (run.lease.cached_len, kept(sim)) == (9, [])
    assert [op.kind for op in sim.allocator.dump()["scheduled"]] == ["copy_page"]
    sim.close(run)
    assert probe(sim, A[:10]) == (9, 9)
    prefill(sim, sim.open(A[:10]))
    sim.check()


def test_case_b2_what_cannot_be_had_takes_nothing_and_can_be_had_later():
    sim = make(pages=3, slots=2)
    first, second = sim.open(A[:8]), sim.open(B[:8])
    sim.issue()
    before = sim.allocator.dump()
    for _ in range(3):
        with pytest.raises(CapacityError) as caught:
            sim.open(C)
        assert (caught.value.needed_slots, caught.value.free_slots) == (1, 0)
        assert sim.allocator.dump() == before
    sim.allocator.grow(first.lease, 8)
    before = sim.allocator.dump()
    with pytest.raises(CapacityError) as caught:
        sim.allocator.grow(second.lease, 8)
    assert (caught.value.needed_pages, caught.value.free_pages) == (2, 1)
    assert sim.allocator.dump() == before
    sim.close(first)
    sim.allocator.grow(second.lease, 8)
    sim.open(C)
    sim.check()


def test_a_hit_without_room_for_its_partly_filled_page_waits_while_others_run():
    sim = make(pages=4)
    served(sim, A[:6])
    other = started(sim, B[:8])
    before = sim.allocator.dump()
    with pytest.raises(CapacityError, match="need 1 pages and 1 slots; 0 of 4 pages") as caught:
        sim.open(A[:9])
    assert (caught.value.needed_pages, caught.value.free_pages) == (1, 0)
    assert sim.allocator.dump() == before
    sim.close(other)
    assert sim.open(A[:9]).lease.cached_len == 6


def test_a_lone_request_gives_up_a_hit_that_stands_in_its_way():
    sim = make(pages=2)
    served(sim, A[:6])
    run = started(sim, A[:7])
    assert run.lease.cached_len == 0
    sim.check()


def test_a_request_gives_up_the_prefix_it_came_from_before_it_fails():
    sim = make(pages=3)
    served(sim, A[:6])
    run = sim.open(A[:12])
    assert run.lease.cached_len == 6
    sim.issue()
    prefill(sim, run)
    sim.close(run)
    assert probe(sim, A[:13]) == (12, 12)


@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_a_lone_request_that_fits_is_always_served(page_size):
    pages = 12 // page_size
    sim = make(pages=pages, slots=1, page_size=page_size, grid=5)
    for prompt in (A[:12], A[:11], A[:5] + B[:7], A[:6] + B[:6], B[:12], A[:12], C[:1], A[:7] + C[:5]):
        run = sim.open(prompt)
        while len(run.keys) < len(prompt):
            sim.allocator.grow(run.lease, 1)
            sim.advance(run, prompt[len(run.keys) :][:1])
            sim.check()
        sim.close(run)


# -- copies


def test_a_state_is_not_matched_before_its_copy_was_issued():
    sim = make()
    run = started(sim, A[:7])
    sim.allocator.grow(run.lease, 1)
    sim.advance(run, A[7:8], saves=False)
    assert [op.kind for op in sim.allocator.dump()["scheduled"]] == ["copy_slot"]
    assert probe(sim, A[:9]) == (4, 8)
    sim.issue()
    assert probe(sim, A[:9]) == (8, 8)


def test_copies_of_a_closed_lease_are_dropped():
    sim = make()
    served(sim, A[:6])
    run, other = sim.open(A[:9]), sim.open(B)
    assert [op.kind for op in sim.allocator.dump()["scheduled"]] == ["copy_page", "copy_slot", "zero"]
    sim.close(run)
    assert [(op.kind, op.target) for op in sim.allocator.dump()["scheduled"]] == [("zero", other.lease.slot)]
    assert kept(sim) == [4, 6]


@pytest.mark.parametrize("prompt", [A[:9], B[:9]], ids=["hit", "miss"])
@pytest.mark.parametrize("progress", ["opened", "grown", "described", "issued"])
def test_case_b1_a_thousand_aborts_leave_everything_as_it_was(prompt, progress):
    sim = make(pages=9, slots=3)
    served(sim, A[:6])
    started(sim, C[:3])
    counts = None
    for _ in range(1000):
        run = sim.open(prompt)
        if progress != "opened":
            sim.allocator.grow(run.lease, 3)
        if progress in {"described", "issued"}:
            sim.describe(run, prompt[len(run.keys) :][:3], saves=True)
        if progress == "issued":
            sim.forward(run, *run.step)
        sim.close(run)
        sim.issue()
        now = {k: sim.allocator.stats()[k] for k in ("leases", "nodes", "checkpoints", "cached_pages", "cached_slots")}
        now["free"] = sim.allocator.pages.num_free, sim.allocator.slots.num_free
        counts = counts or now
        assert now == counts
    sim.check()
    assert probe(sim, A[:9])[0] == 6


# -- discarding


def test_nothing_of_a_discarded_lease_matches():
    sim = make()
    served(sim, A[:6])
    run = decode(sim, started(sim, A[:6] + B[:12], chunk=5), B[12:20])
    assert len(kept(sim, A[:6] + B)) > 3
    sim.discard(run)
    sim.check()
    assert kept(sim) == [4, 6]
    assert probe(sim, A[:6] + B[:20])[0] == 6


def test_pages_of_a_discarded_lease_do_not_live_on_in_the_prefix_of_another():
    """Found with a split: the state of a second request stood on pages of the first."""
    sim = make()
    bad = started(sim, A[:9])
    served(sim, A[:6] + B[:6], reuse=False)
    sim.discard(bad)
    sim.check()
    assert probe(sim, A[:6] + B[:7]) == (0, 0)


@pytest.mark.parametrize(("length", "grid", "hit"), [(9, 4, 8), (4, 3, 3)], ids=["shares-pages", "has-only-copies"])
def test_who_resumed_from_a_discarded_lease_goes_on_and_publishes_nothing(length, grid, hit):
    sim = make(grid=grid)
    bad = started(sim, A[:length])
    heir, stranger = sim.open(A[:hit] + B[:8]), sim.open(C[:8])
    assert heir.lease.cached_len == hit
    sim.issue()
    sim.discard(bad)
    assert (heir.lease.publishes, stranger.lease.publishes) == (False, True)
    for run in (heir, stranger):
        prefill(sim, run)
        sim.close(run)
        sim.check()
    assert kept(sim, A[:hit] + B) == []
    assert 8 in kept(sim, C)


def test_who_shares_pages_with_a_discarded_lease_publishes_nothing_even_after_a_clear():
    sim = make()
    bad = started(sim, A[:9])
    heir = sim.open(A[:8] + B[:8])
    sim.issue()
    sim.allocator.clear()
    sim.discard(bad)
    prefill(sim, heir)
    sim.close(heir)
    assert kept(sim) == []


def test_a_discarded_lease_zeroes_its_slot_and_the_pages_that_nobody_else_holds():
    sim = make()
    bad = started(sim, A[:9])
    heir = sim.open(A[:8] + B[:8])
    sim.issue()
    own = set(bad.lease.pages) - set(heir.lease.pages)
    sim.discard(bad)
    ops = sim.allocator.dump()["scheduled"]
    assert {op.target for op in ops if op.kind == "scrub_page"} == own
    assert [op.target for op in ops if op.kind == "zero"] == [bad.lease.slot]
    sim.check()


# -- clearing, events, messages


def test_open_leases_survive_a_clear():
    sim = make()
    served(sim, A[:10])
    run = sim.open(A[:20])
    assert sim.allocator.clear() == 10
    assert (run.lease.cached_len, sim.allocator.tree.num_nodes) == (10, 0)
    prefill(sim, run)
    sim.close(run)
    sim.check()
    assert probe(sim, A[:21])[0] == 20


def test_case_a11_events_tell_pages_from_checkpoints_and_how_long_each_prefix_is():
    sim, seen = make(grid=8), []
    sim.allocator._listener = lambda event: (seen.append(event), sim.router(event))
    served(sim, A[:10])
    pages = [e for e in seen if e.kind == "page"]
    states = [e for e in seen if e.kind == "checkpoint"]
    assert [(e.action, e.tokens, e.size) for e in pages] == [("store", n, 4) for n in (4, 8, 10)]
    assert [(e.action, e.tokens, e.size) for e in states] == [("store", n, 8) for n in (8, 10)]
    keys = prefix_keys(A, range(11))
    assert [(e.key, e.parent) for e in pages] == [(keys[4], None), (keys[8], keys[4]), (keys[10], keys[8])]
    assert [(e.key, e.parent) for e in states] == [(keys[8], None), (keys[10], keys[8])]
    seen.clear()
    while sim.allocator.tree.num_nodes:
        sim.allocator.open(B, reuse=False)
        sim.allocator.take_ops()
        sim.poison_free()
        for lease in list(sim.allocator.leases.values())[:-7]:
            sim.allocator.close(lease, donate=False)
        if len(sim.allocator.leases) == 7:
            break
    assert sim.router.stored["checkpoint"].keys() == {node.name for node in sim.states().values()}
    sim.allocator.clear()
    assert [e.action for e in seen[-2:]] == ["clear", "clear"]
    assert {e.kind for e in seen[-2:]} == {"page", "checkpoint"}
    assert sim.router.stored == {"page": {}, "checkpoint": {}}


def test_namespaces_never_share():
    sim = make()
    served(sim, A[:10], space="one")
    assert probe(sim, A[:11], space="two") == (0, 0)
    assert probe(sim, A[:11]) == (0, 0)
    assert probe(sim, A[:11], space="one") == (10, 10)


def test_images_of_equal_size_never_match_and_equal_ones_do():
    sim = make(grid=1)
    cat, dog = ([MediaKey(2, 4, name)] for name in ("cat", "dog"))
    served(sim, A[:10], media=cat)
    assert probe(sim, A[:11], media=dog) == (0, 2)
    assert probe(sim, A[:11]) == (0, 2)
    assert probe(sim, A[:11], media=cat) == (10, 10)
    assert probe(sim, [1, 1, 9, 9, 9, 9, 1, 1, 1, 1, 1], media=cat) == (10, 10), "inside an image ids say nothing"


def test_what_was_computed_counts_and_not_what_was_promised():
    sim = make(grid=1)
    run = sim.open(A[:6])
    sim.allocator.grow(run.lease, 6)
    sim.advance(run, [1, 1, 2, 2, 1, 1])
    sim.close(run)
    sim.check()
    assert probe(sim, A[:7]) == (0, 2)
    assert probe(sim, [1, 1, 2, 2, 1, 1, 1]) == (6, 6)


@pytest.mark.parametrize("slots", [1, 8], ids=["state-taken-over", "state-to-be-copied"])
@pytest.mark.parametrize("hit", [8, 9], ids=["page-border", "inside-a-page"])
def test_what_was_not_yet_copied_is_not_kept(slots, hit):
    """The tree forgot it, and the lease that was to get it closes."""
    sim = make(slots=slots)
    served(sim, A[:hit])
    run = sim.open(A[:12])
    assert run.lease.cached_len == hit
    sim.allocator.clear()
    sim.close(run)
    sim.check()
    # only where nothing had to be copied
    assert kept(sim) == ([8] if (slots, hit) == (1, 8) else [])


def test_an_unfinished_step_is_not_kept():
    """The state may have moved beyond the committed tokens."""
    sim = make(grid=100)
    run = started(sim, A[:6])
    sim.allocator.grow(run.lease, 2)
    sim.describe(run, A[6:8], saves=True)
    sim.close(run)
    sim.check()
    assert sim.allocator.tree.num_nodes == 0


def test_a_lease_without_room_says_what_to_do():
    sim = make()
    run = sim.open(A[:20])
    sim.allocator.grow(run.lease, 5)
    with pytest.raises(ConfigError, match=r"has room for 8 more tokens, 9 are asked; call grow\(\) first"):
        sim.allocator.commit(run.lease, [1] * 9)


def test_a_step_of_another_length_cannot_be_committed():
    sim = make()
    run = sim.open(A[:20])
    sim.allocator.grow(run.lease, 8)
    sim.describe(run, A[:8], saves=True)
    with pytest.raises(ConfigError, match=r"the step in flight has 8 tokens .* commit got 7"):
        sim.allocator.commit(run.lease, A[:7])


@pytest.mark.parametrize("token", [-1, 2**63, 2**70])
def test_a_token_that_is_no_id_is_refused_also_in_decode(token):
    sim = make()
    run = started(sim, A[:5])
    before = sim.allocator.dump()
    with pytest.raises(ConfigError, match="token ids must be"):
        sim.allocator.commit(run.lease, [token])
    assert sim.allocator.dump() == before
    sim.check()


@pytest.mark.parametrize(
    ("name", "value"), [("page_size", 0), ("checkpoint_grid", 0), ("checkpoint_grid", -4), ("track_interval", -1)]
)
def test_sizes_must_be_positive(name, value):
    sizes = {"page_size": 4, "checkpoint_grid": 8, "track_interval": None, name: value}
    with pytest.raises(ConfigError, match=f"{name} must be >= "):
        HybridAllocator(8, 2, **sizes)


def test_stats_count_what_was_looked_up_and_reused():
    sim = make()
    served(sim, A[:10])
    served(sim, A[:14])
    stats = sim.allocator.stats()
    assert {k: stats[k] for k in ("lookups", "prompt_tokens", "hit_tokens", "kv_tokens", "leases")} == {
        "lookups": 2,
        "prompt_tokens": 24,
        "hit_tokens": 10,
        "kv_tokens": 10,
        "leases": 0,
    }
    assert stats["stored_checkpoints"] - stats["removed_checkpoints"] == stats["checkpoints"] == len(kept(sim))
