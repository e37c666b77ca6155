"""Hands out page and slot numbers. Number 0 is the null page or slot and is never given.

A number has owners of two kinds: users (a request, a pending copy) and the prefix tree. One that only the tree owns is
idle: it can be had back by evicting from the tree.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from k3lib.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["PageAllocator", "SlotAllocator"]


class _Allocator:
    """Numbers 1..count with reference counts."""

    noun = "entries"

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ConfigError(f"a pool of {self.noun} needs at least 1, got {count}")
        self.count = count
        self._free = list(range(count, 0, -1))
        self._refs: dict[int, int] = {}
        self._kept: dict[int, int] = {}  # how many of the references are the tree's
        self._num_idle = 0

    @property
    def num_free(self) -> int:
        """How many can be taken now."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """How many belong to the prefix tree alone."""
        return self._num_idle

    def take(self, count: int) -> list[int]:
        """Take `count` numbers, or raise CapacityError and take none."""
        if count > len(self._free):
            raise CapacityError(
                f"need {count} {self.noun}, {len(self._free)} of {self.count} are free", **self._shortage(count)
            )
        numbers = [self._free.pop() for _ in range(count)]
        self._refs.update(dict.fromkeys(numbers, 1))
        return numbers

    def share(self, numbers: Iterable[int]) -> None:
        """Count one more user of each number; all of them must be taken."""
        numbers = list(numbers)
        self._check_taken(numbers, self._refs)
        for number in numbers:
            if self._refs[number] == self._kept.get(number):
                self._num_idle -= 1
            self._refs[number] += 1

    def drop(self, numbers: Iterable[int]) -> None:
        """Count one user less of each; a number without owners is free again. All must be used."""
        numbers = list(numbers)
        self._check_used(numbers)
        for number in numbers:
            self._refs[number] -= 1
            self._settle(number)

    def keep(self, numbers: Iterable[int]) -> None:
        """Count the prefix tree once more as an owner of each number; all of them must be taken."""
        numbers = list(numbers)
        self._check_taken(numbers, self._refs)
        for number in numbers:
            self._refs[number] += 1
            self._kept[number] = self._kept.get(number, 0) + 1

    def release(self, numbers: Iterable[int]) -> None:
        """Count the prefix tree once less as an owner of each number; it must own them."""
        numbers = list(numbers)
        self._check_taken(numbers, self._kept)
        for number in numbers:
            was_idle = self._refs[number] == self._kept[number]
            self._refs[number] -= 1
            self._kept[number] -= 1
            if not self._kept[number]:
                del self._kept[number]
            if was_idle:
                self._num_idle -= 1
            self._settle(number)

    def refs(self, number: int) -> int:
        """Owners of a number; 0 if it is free."""
        return self._refs.get(number, 0)

    def is_idle(self, number: int) -> bool:
        """Whether only the prefix tree owns the number."""
        return number in self._kept and self._refs[number] == self._kept[number]

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent."""
        assert sorted([*self._free, *self._refs]) == list(range(1, self.count + 1)), "a number is lost or has two homes"
        assert all(count > 0 for count in self._refs.values()), "a taken number has no owner"
        assert all(0 < count <= self._refs[n] for n, count in self._kept.items()), "the tree owns more than all owners"
        assert self._num_idle == sum(self._refs[n] == k for n, k in self._kept.items()), "idle numbers are miscounted"

    def _settle(self, number: int) -> None:
        if not self._refs[number]:
            del self._refs[number]
            self._free.append(number)
        elif self._refs[number] == self._kept.get(number):
            self._num_idle += 1

    def _check_taken(self, numbers: Sequence[int], owners: dict[int, int]) -> None:
        for number in numbers:
            if number not in owners:
                raise ConfigError(f"{number} is not among the taken {self.noun}, or is dropped too often")
        if len(set(numbers)) < len(numbers) and owners is self._kept:
            for number, times in Counter(numbers).items():
                if owners[number] < times:
                    raise ConfigError(f"{number} is not among the taken {self.noun}, or is dropped too often")

    def _check_used(self, numbers: Sequence[int]) -> None:
        self._check_taken(numbers, self._refs)
        for number, times in Counter(numbers).items():
            if self._refs[number] - self._kept.get(number, 0) < times:
                raise ConfigError(f"{number} is not among the taken {self.noun}, or is dropped too often")

    def _shortage(self, count: int) -> dict[str, int]:
        return {}


class PageAllocator(_Allocator):
    """Hands out page numbers 1..num_pages. Page 0 is the null page and is never given."""

    noun = "pages"

    def _shortage(self, count: int) -> dict[str, int]:
        return {"needed_pages": count, "free_pages": self.num_free}


class SlotAllocator(_Allocator):
    """Hands out slot numbers 1..num_slots. Slot 0 is the null slot and is never given."""

    noun = "slots"

    def _shortage(self, count: int) -> dict[str, int]:
        return {"needed_slots": count, "free_slots": self.num_free}
