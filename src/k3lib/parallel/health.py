"""Ranks that watch each other: when one is gone, every other one says which and ends."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["EXIT_STATUS", "Heartbeat", "Store"]

_LOST = "k3lib/lost"  # ranks that somebody misses
EXIT_STATUS = 71  # of a process that ends because another rank is gone


class Store(Protocol):
    """What a heartbeat needs of a key-value store that all ranks reach; `torch.distributed.TCPStore` is one."""

    def set(self, key: str, value: str) -> None:
        """Write a key."""
        ...

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read keys that exist."""
        ...


def _end(message: str) -> None:
    print(message, file=sys.stderr, flush=True)  # noqa: T201 - the last words of the process
    os._exit(EXIT_STATUS)  # collectives with a dead rank cannot be taken down in order


class Heartbeat:
    """Tells the other ranks that this one lives, and notices which of them does not.

    A rank counts up a number in the store; one whose number stands still for `timeout_s` is gone. If the store itself
    is gone, so is rank 0, which has it. A rank that ends as intended says so (`stop`) and is not missed.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        rank: int,
        size: int,
        *,
        timeout_s: float = 30.0,
        interval_s: float = 1.0,
        on_loss: Callable[[str], None] | None = None,
    ) -> None:
        """Begin.

        Args:
            connect: makes a connection to the store of this thread's own.
            rank: this rank.
            size: ranks.
            timeout_s: a rank that is silent for so long is gone.
            interval_s: between two signs of life.
            on_loss: called once with a message that names the rank; None prints it and ends the process.
        """
        self._rank, self._size = rank, size
        self._timeout, self._interval, self._on_loss = timeout_s, interval_s, on_loss or _end
        self._stopped = threading.Event()
        store = connect()
        store.set(self._key(rank), "0")
        if rank == 0:
            store.set(_LOST, "")
        self._thread = threading.Thread(target=self._run, args=(store,), name="k3lib-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Say farewell; the others go on without missing this rank."""
        self._stopped.set()
        self._thread.join()

    @staticmethod
    def _key(rank: int) -> str:
        return f"k3lib/alive/{rank}"

    def _run(self, store: Store) -> None:
        keys = [*(self._key(rank) for rank in range(self._size)), _LOST]
        last = [b""] * self._size
        seen = [time.monotonic()] * self._size
        beat = 0
        try:
            store.multi_get(keys)  # waits until every rank has begun
            while not self._stopped.wait(self._interval):
                beat += 1
                store.set(keys[self._rank], str(beat))
                *values, known = store.multi_get(keys)
                now = time.monotonic()
                for rank, value in enumerate(values):
                    if value != last[rank] or value == b"end":
                        last[rank], seen[rank] = value, now
                lost = [rank for rank in range(self._size) if now - seen[rank] > self._timeout]
                if lost or known:
                    self._lose(store, lost, known.decode())
                    return
            store.set(keys[self._rank], "end")
        except Exception:  # what a broken connection raises depends on the version of torch
            if not self._stopped.is_set() and last[0] != b"end":
                self._on_loss(f"rank 0 of {self._size} is gone: rank {self._rank} ends")

    def _lose(self, store: Store, ranks: list[int], known: str) -> None:
        which = known or ", ".join(map(str, ranks))
        if not known:
            store.set(_LOST, which)  # all say the same
        if self._rank == 0:  # the store ends with this process
            self._stopped.wait(3 * self._interval)
        noun = "ranks" if "," in which else "rank"
        self._on_loss(
            f"{noun} {which} of {self._size} gave no sign of life for {self._timeout:g} s: rank {self._rank} ends"
        )
