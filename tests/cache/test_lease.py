"""Leases: all or nothing over both pools, in any order of calls."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from k3lib.cache import HybridAllocator
from k3lib.errors import CapacityError, ConfigError

PAGES, SLOTS, PAGE = 7, 3, 4


def snapshot(allocator):
    """Everything that a failed call must leave as it was."""
    leases = {n: (x.slot, list(x.pages), list(x.tokens), x.is_open, x.needs_zero) for n, x in allocator.leases.items()}
    return allocator.pages.num_free, allocator.slots.num_free, leases


class LeaseMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.allocator = HybridAllocator(PAGES, SLOTS, PAGE)
        self.other = HybridAllocator(PAGES, SLOTS, PAGE)
        self.open_leases, self.closed = [], []

    def pick(self, data):
        return data.draw(st.sampled_from(self.open_leases))

    def refuses(self, error, call, *args):
        before = snapshot(self.allocator)
        with pytest.raises(error):
            call(*args)
        assert snapshot(self.allocator) == before

    @rule(prompt=st.lists(st.integers(0, 9), max_size=6))
    def open(self, prompt):
        if not prompt:
            self.refuses(ConfigError, self.allocator.open, prompt)
        elif len(self.open_leases) == SLOTS:
            self.refuses(CapacityError, self.allocator.open, prompt)
        else:
            lease = self.allocator.open(prompt)
            assert (lease.length, lease.pages, lease.cached_len, lease.needs_zero) == (0, [], 0, True)
            assert 1 <= lease.slot <= SLOTS
            self.open_leases.append(lease)

    @precondition(lambda self: self.open_leases)
    @rule(data=st.data(), tokens=st.integers(-1, 20))
    def grow(self, data, tokens):
        lease = self.pick(data)
        if tokens < 0:
            self.refuses(ConfigError, self.allocator.grow, lease, tokens)
            return
        wanted = max(len(lease.pages), -(-(lease.length + tokens) // PAGE))
        if wanted - len(lease.pages) > self.allocator.pages.num_free:
            self.refuses(CapacityError, self.allocator.grow, lease, tokens)
            return
        before = list(lease.pages)
        for _ in range(2):  # the same call twice reserves once
            self.allocator.grow(lease, tokens)
            assert len(lease.pages) == wanted
            assert lease.pages[: len(before)] == before

    @precondition(lambda self: self.open_leases)
    @rule(data=st.data(), ids=st.lists(st.integers(0, 9), max_size=9))
    def commit(self, data, ids):
        lease = self.pick(data)
        if lease.length + len(ids) > len(lease.pages) * PAGE:
            self.refuses(ConfigError, self.allocator.commit, lease, ids)
            return
        want = lease.tokens + ids
        self.allocator.commit(lease, ids)
        assert lease.tokens == want

    @precondition(lambda self: self.open_leases)
    @rule(data=st.data())
    def close(self, data):
        lease = self.pick(data)
        self.open_leases.remove(lease)
        self.closed.append(lease)
        free = self.allocator.pages.num_free
        self.allocator.close(lease)
        assert not lease.is_open
        assert self.allocator.pages.num_free == free + len(lease.pages)

    @precondition(lambda self: self.closed)
    @rule(data=st.data())
    def use_after_close(self, data):
        lease = data.draw(st.sampled_from(self.closed))
        before = snapshot(self.allocator)
        self.allocator.close(lease)
        assert snapshot(self.allocator) == before
        self.refuses(ConfigError, self.allocator.grow, lease, 1)
        self.refuses(ConfigError, self.allocator.commit, lease, [])

    @rule()
    def foreign_lease(self):
        lease = self.other.open([1])
        self.refuses(ConfigError, self.allocator.grow, lease, 1)
        self.refuses(ConfigError, self.allocator.commit, lease, [])
        self.refuses(ConfigError, self.allocator.close, lease)
        assert lease.is_open
        self.other.close(lease)

    @invariant()
    def consistent(self):
        self.allocator.check()
        assert list(self.allocator.leases.values()) == self.open_leases
        assert self.allocator.slots.num_free == SLOTS - len(self.open_leases)

    def teardown(self):
        for lease in self.open_leases:
            self.allocator.close(lease)
        assert (self.allocator.pages.num_free, self.allocator.slots.num_free) == (PAGES, SLOTS)
        self.allocator.check()


TestLeases = LeaseMachine.TestCase


def test_shortage_of_pages_is_told_in_numbers():
    allocator = HybridAllocator(PAGES, SLOTS, PAGE)
    lease = allocator.open([1])
    with pytest.raises(CapacityError, match="need 8 pages for 29 more tokens, 7 of 7 are free") as caught:
        allocator.grow(lease, 29)
    assert (caught.value.needed_pages, caught.value.free_pages) == (8, 7)


def test_shortage_of_slots_is_told_in_numbers():
    allocator = HybridAllocator(PAGES, 1, PAGE)
    allocator.open([1])
    with pytest.raises(CapacityError) as caught:
        allocator.open([1])
    assert (caught.value.needed_slots, caught.value.free_slots) == (1, 0)


def test_a_lease_without_room_says_what_to_do():
    allocator = HybridAllocator(PAGES, SLOTS, PAGE)
    lease = allocator.open([1])
    allocator.grow(lease, 5)
    with pytest.raises(ConfigError, match=r"has room for 8 more tokens, 9 are asked; call grow\(\) first"):
        allocator.commit(lease, [1] * 9)


def test_page_size_must_be_positive():
    with pytest.raises(ConfigError, match="page_size must be >= 1, got 0"):
        HybridAllocator(PAGES, SLOTS, 0)
