"""Leases: one request's claim on pages and a slot, all or nothing over both pools. Pure Python."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from k3lib.cache.allocator import PageAllocator, SlotAllocator
from k3lib.errors import CapacityError, ConfigError

__all__ = ["HybridAllocator", "Lease"]


@dataclass(slots=True, eq=False)
class Lease:
    """One request's memory. Made by `HybridAllocator.open`; read-only for others.

    Attributes:
        number: distinguishes leases in messages.
        slot: KDA state slot.
        pages: KV pages in the order of the context.
        tokens: ids of the committed context.
        cached_len: tokens of the prompt that need no prefill.
    """

    number: int
    slot: int
    pages: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached_len: int = 0
    is_open: bool = True
    needs_zero: bool = True  # the slot still holds its last owner's state

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self.tokens)


class HybridAllocator:
    """Pages and slots of all requests. A call that fails changes nothing."""

    def __init__(self, num_pages: int, num_slots: int, page_size: int) -> None:
        if page_size < 1:
            raise ConfigError(f"page_size must be >= 1, got {page_size}")
        self.page_size = page_size
        self.pages = PageAllocator(num_pages)
        self.slots = SlotAllocator(num_slots)
        self.leases: dict[int, Lease] = {}
        self._numbers = itertools.count(1)

    def open(self, prompt_ids: list[int]) -> Lease:
        """Take a slot for a request.

        Raises:
            ConfigError: an empty prompt.
            CapacityError: no slot is free.
        """
        if not prompt_ids:
            raise ConfigError("open: the prompt is empty")
        (slot,) = self.slots.take(1)
        lease = Lease(next(self._numbers), slot)
        self.leases[lease.number] = lease
        return lease

    def grow(self, lease: Lease, tokens: int) -> None:
        """Reserve pages for `tokens` beyond the committed length; calling it twice reserves once.

        Raises:
            CapacityError: the pages do not suffice; nothing was taken.
        """
        self._check_open(lease)
        if tokens < 0:
            raise ConfigError(f"grow: tokens must be >= 0, got {tokens}")
        missing = -(-(lease.length + tokens) // self.page_size) - len(lease.pages)
        if missing > self.pages.num_free:
            raise CapacityError(
                f"need {missing} pages for {tokens} more tokens, {self.pages.num_free} of {self.pages.count} are free",
                needed_pages=missing,
                free_pages=self.pages.num_free,
                free_slots=self.slots.num_free,
            )
        if missing > 0:
            lease.pages += self.pages.take(missing)

    def commit(self, lease: Lease, ids: list[int]) -> None:
        """Count `ids` as context: their KV and state have been written.

        Raises:
            ConfigError: the lease has no room for them.
        """
        self._check_open(lease)
        self.check_room(lease, len(ids))
        lease.tokens += ids

    def close(self, lease: Lease) -> None:
        """Free the memory. Legal at any moment; a second call does nothing."""
        if not lease.is_open:
            return
        self._check_open(lease)
        self.pages.drop(lease.pages)
        self.slots.drop([lease.slot])
        del self.leases[lease.number]
        lease.is_open = False

    def check_room(self, lease: Lease, tokens: int) -> None:
        """Refuse a step that the reserved pages cannot hold."""
        room = len(lease.pages) * self.page_size - lease.length
        if tokens > room:
            raise ConfigError(
                f"lease {lease.number} has room for {room} more tokens, {tokens} are asked; call grow() first"
            )

    def check(self) -> None:
        """Raise AssertionError if a page or slot is lost or has two owners."""
        self.pages.check()
        self.slots.check()
        pages = [page for lease in self.leases.values() for page in lease.pages]
        assert len(set(pages)) == len(pages), "a page belongs to two leases"
        assert len(pages) == self.pages.count - self.pages.num_free, "a taken page belongs to no lease"
        slots = [lease.slot for lease in self.leases.values()]
        assert len(set(slots)) == len(slots) == self.slots.count - self.slots.num_free, "slots and leases disagree"
        for lease in self.leases.values():
            assert lease.length <= len(lease.pages) * self.page_size, "committed tokens have no page"

    def _check_open(self, lease: Lease) -> None:
        if self.leases.get(lease.number) is not lease:
            raise ConfigError(f"lease {lease.number} is closed, or belongs to another cache")
