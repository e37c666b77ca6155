"""Hands out page and slot numbers. Number 0 is the null page or slot and is never given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3lib.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

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

    @property
    def num_free(self) -> int:
        """How many can be taken now."""
        return len(self._free)

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
        """Count one more owner of each number; all of them must be taken."""
        numbers = list(numbers)
        self._check_taken(numbers)
        for number in numbers:
            self._refs[number] += 1

    def drop(self, numbers: Iterable[int]) -> None:
        """Count one owner less of each; a number without owners is free again. All must be taken."""
        numbers = list(numbers)
        self._check_taken(numbers)
        for number in numbers:
            self._refs[number] -= 1
            if not self._refs[number]:
                del self._refs[number]
                self._free.append(number)

    def refs(self, number: int) -> int:
        """Owners of a number; 0 if it is free."""
        return self._refs.get(number, 0)

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent."""
        assert sorted([*self._free, *self._refs]) == list(range(1, self.count + 1)), "a number is lost or has two homes"
        assert all(count > 0 for count in self._refs.values()), "a taken number has no owner"

    def _check_taken(self, numbers: list[int]) -> None:
        for number in numbers:
            if self._refs.get(number, 0) < numbers.count(number):
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
