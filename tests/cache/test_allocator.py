"""Page and slot numbers: never lost, never given twice, whoever owns them."""

import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from k3lib.cache import PageAllocator, SlotAllocator
from k3lib.errors import CapacityError, ConfigError

COUNT = 8


class AllocatorMachine(RuleBasedStateMachine):
    """Compares an allocator with two dictionaries: references of users and of the tree."""

    kind = PageAllocator

    def __init__(self):
        super().__init__()
        self.pool = self.kind(COUNT)
        self.users, self.tree = {}, {}

    @property
    def taken(self):
        return self.users.keys() | self.tree.keys()

    def numbers(self, data, owners):
        """Some of the numbers, each once or several times."""
        return data.draw(st.lists(st.sampled_from(sorted(owners)), min_size=1, max_size=6))

    @staticmethod
    def count(owners, numbers, step):
        for number in numbers:
            owners[number] = owners.get(number, 0) + step
            if not owners[number]:
                del owners[number]

    def refused(self, call, numbers, pattern):
        before = self.state()
        with pytest.raises(ConfigError, match=pattern):
            getattr(self.pool, call)(numbers)
        assert self.state() == before

    def state(self):
        pool = self.pool
        return pool.num_free, pool.num_idle, [(pool.refs(n), pool.is_idle(n)) for n in range(COUNT + 1)]

    @rule(count=st.integers(0, COUNT + 2))
    def take(self, count):
        free = COUNT - len(self.taken)
        if count > free:
            before = self.state()
            with pytest.raises(CapacityError, match=f"need {count} {self.kind.noun}, {free} of {COUNT} are free"):
                self.pool.take(count)
            assert self.state() == before
            return
        taken = self.pool.take(count)
        assert len(set(taken)) == count
        assert not self.taken & set(taken)
        self.users |= dict.fromkeys(taken, 1)

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), call=st.sampled_from(["share", "keep"]))
    def add_owners(self, data, call):
        numbers = self.numbers(data, self.taken)
        getattr(self.pool, call)(iter(numbers))
        self.count(self.users if call == "share" else self.tree, numbers, 1)

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), call=st.sampled_from(["drop", "release"]))
    def remove_owners(self, data, call):
        owners = self.users if call == "drop" else self.tree
        numbers = self.numbers(data, self.taken)
        if any(numbers.count(n) > owners.get(n, 0) for n in numbers):
            self.refused(call, numbers, "is not among the taken .*, or is dropped too often")
            return
        getattr(self.pool, call)(iter(numbers))
        self.count(owners, numbers, -1)

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), call=st.sampled_from(["drop", "share", "keep", "release"]))
    def misuse_together_with_a_good_number(self, data, call):
        owners = {"drop": self.users, "release": self.tree}.get(call, self.taken)
        bad = data.draw(st.sampled_from([n for n in range(-1, COUNT + 3) if n not in self.taken]))
        good = [data.draw(st.sampled_from(sorted(owners)))] if owners else []
        self.refused(call, [*good, bad], f"{bad} is not among the taken {self.kind.noun}")

    @invariant()
    def agrees(self):
        self.pool.check()
        idle = {n for n in self.tree if n not in self.users}
        assert self.pool.num_free == COUNT - len(self.taken)
        assert self.pool.num_idle == len(idle)
        assert {n for n in range(-1, COUNT + 3) if self.pool.is_idle(n)} == idle
        for number in range(COUNT + 1):
            assert self.pool.refs(number) == self.users.get(number, 0) + self.tree.get(number, 0)

    def teardown(self):
        for call, owners in (("drop", self.users), ("release", self.tree)):
            getattr(self.pool, call)([n for n, times in owners.items() for _ in range(times)])
        assert (self.pool.num_free, self.pool.num_idle) == (COUNT, 0)
        self.pool.check()


class SlotMachine(AllocatorMachine):
    kind = SlotAllocator


TestPages = AllocatorMachine.TestCase
TestSlots = SlotMachine.TestCase
TestSlots.settings = settings(max_examples=10)  # the same code


@pytest.mark.parametrize("kind", [PageAllocator, SlotAllocator])
def test_numbers_are_one_to_count(kind):
    pool = kind(5)
    assert sorted(pool.take(5)) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0
    assert pool.take(0) == []


@pytest.mark.parametrize("kind", [PageAllocator, SlotAllocator])
def test_a_number_is_idle_while_only_the_tree_owns_it(kind):
    pool = kind(2)
    (number,) = pool.take(1)
    pool.keep([number])
    assert (pool.num_idle, pool.num_free) == (0, 1)
    pool.drop([number])
    assert (pool.num_idle, pool.num_free, pool.is_idle(number)) == (1, 1, True)
    pool.share([number])
    assert (pool.num_idle, pool.is_idle(number)) == (0, False)
    pool.release([number])
    assert (pool.num_idle, pool.num_free, pool.refs(number)) == (0, 1, 1)
    pool.drop([number])
    assert (pool.num_idle, pool.num_free) == (0, 2)


@pytest.mark.parametrize("kind", [PageAllocator, SlotAllocator])
def test_users_cannot_drop_what_the_tree_owns_nor_the_tree_what_users_own(kind):
    pool = kind(2)
    (number,) = pool.take(1)
    with pytest.raises(ConfigError, match=f"{number} is not among the taken"):
        pool.release([number])
    pool.keep([number])
    pool.drop([number])
    with pytest.raises(ConfigError, match="dropped too often"):
        pool.drop([number])
    assert (pool.refs(number), pool.is_idle(number)) == (1, True)


@pytest.mark.parametrize(
    ("kind", "noun", "needed", "free"),
    [
        (PageAllocator, "pages", "needed_pages", "free_pages"),
        (SlotAllocator, "slots", "needed_slots", "free_slots"),
    ],
)
def test_shortage_is_told_in_numbers(kind, noun, needed, free):
    pool = kind(3)
    pool.take(1)
    with pytest.raises(CapacityError, match=f"need 3 {noun}, 2 of 3 are free") as caught:
        pool.take(3)
    assert (getattr(caught.value, needed), getattr(caught.value, free)) == (3, 2)
    assert pool.num_free == 2


@pytest.mark.parametrize("kind", [PageAllocator, SlotAllocator])
@pytest.mark.parametrize("count", [0, -1])
def test_empty_pools_are_refused(kind, count):
    with pytest.raises(ConfigError, match=f"at least 1, got {count}"):
        kind(count)


@pytest.mark.parametrize("module", ["allocator", "lease", "prefix", "sizing"])
def test_bookkeeping_needs_no_torch(module):
    code = f"import sys, k3lib.cache.{module}; sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
