"""Page and slot numbers: never lost, never given twice."""

import subprocess
import sys

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from k3lib.cache import PageAllocator, SlotAllocator
from k3lib.errors import CapacityError, ConfigError

COUNT = 8


class AllocatorMachine(RuleBasedStateMachine):
    """Compares an allocator with a dictionary from number to owners."""

    kind = PageAllocator

    def __init__(self):
        super().__init__()
        self.pool, self.owners = self.kind(COUNT), {}

    @rule(count=st.integers(0, COUNT + 2))
    def take(self, count):
        free = COUNT - len(self.owners)
        if count > free:
            with pytest.raises(CapacityError, match=f"need {count} {self.kind.noun}, {free} of {COUNT} are free"):
                self.pool.take(count)
            return
        taken = self.pool.take(count)
        assert len(set(taken)) == count
        assert not self.owners.keys() & set(taken)
        self.owners |= dict.fromkeys(taken, 1)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def share(self, data):
        numbers = data.draw(st.sets(st.sampled_from(sorted(self.owners)), min_size=1))
        self.pool.share(numbers)
        for number in numbers:
            self.owners[number] += 1

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def drop(self, data):
        numbers = data.draw(st.sets(st.sampled_from(sorted(self.owners)), min_size=1))
        self.pool.drop(numbers)
        for number in numbers:
            self.owners[number] -= 1
            if not self.owners[number]:
                del self.owners[number]

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), call=st.sampled_from(["drop", "share"]))
    def misuse_together_with_a_good_number(self, data, call):
        good = data.draw(st.sampled_from(sorted(self.owners)))
        bad = data.draw(st.sampled_from([n for n in range(-1, COUNT + 3) if n not in self.owners]))
        with pytest.raises(ConfigError, match=f"{bad} is not among the taken {self.kind.noun}"):
            getattr(self.pool, call)([good, bad])

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def drop_once_too_often(self, data):
        number = data.draw(st.sampled_from(sorted(self.owners)))
        with pytest.raises(ConfigError, match="dropped too often"):
            self.pool.drop([number] * (self.owners[number] + 1))

    @invariant()
    def agrees(self):
        self.pool.check()
        assert self.pool.num_free == COUNT - len(self.owners)
        assert {n: self.pool.refs(n) for n in range(COUNT + 1) if self.pool.refs(n)} == self.owners


class SlotMachine(AllocatorMachine):
    kind = SlotAllocator


TestPages = AllocatorMachine.TestCase
TestSlots = SlotMachine.TestCase


@pytest.mark.parametrize("kind", [PageAllocator, SlotAllocator])
def test_numbers_are_one_to_count(kind):
    pool = kind(5)
    assert sorted(pool.take(5)) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0
    assert pool.take(0) == []


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


@pytest.mark.parametrize("module", ["allocator", "lease", "sizing"])
def test_bookkeeping_needs_no_torch(module):
    code = f"import sys, k3lib.cache.{module}; sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
