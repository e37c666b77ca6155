"""Ranks that watch each other: when one is gone or has failed, every other one says which and why, and ends."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

from k3lib.parallel.group import TransportError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["EXIT_STATUS", "Heartbeat", "Store"]

logger = logging.getLogger(__name__)

_TROUBLE = "k3lib/trouble"  # what happened first; nothing before
EXIT_STATUS = 71  # of a process that ends because another rank is gone
_LONGEST_CAUSE = 500  # characters


class Store(Protocol):
    """What a heartbeat needs of a key-value store that all ranks reach; `torch.distributed.TCPStore` is one."""

    def set(self, key: str, value: str) -> None:
        """Write a key."""
        ...

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read keys that exist."""
        ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write a key if it has the `expected` value; return what it has then."""
        ...


def _end(message: str) -> None:
    print(message, file=sys.stderr, flush=True)  # noqa: T201 - the last words of the process
    os._exit(EXIT_STATUS)  # collectives with a dead rank cannot be taken down in order


class _Failure(NamedTuple):
    """What a rank has to tell of itself.

    Attributes:
        said: the sentence.
        due: when to tell it, if nobody else has told anything.
        is_cause: it is no failure of another rank that is seen from here.
    """

    said: str
    due: float
    is_cause: bool


class Heartbeat:
    """Tells the other ranks that this one lives, and notices which of them does not, or has failed.

    A rank counts up a number in the store; one whose number stands still for `timeout_s` is gone. If the store itself
    is gone, so is rank 0, which has it. A rank that ends as intended says so (`stop`) and is not missed. One that fails
    says why (`fail`): the others know within `interval_s`. All ranks say the same, which is what happened first.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        rank: int,
        size: int,
        *,
        timeout_s: float = 30.0,
        interval_s: float = 0.5,
        on_loss: Callable[[str], None] | None = None,
        abort: Callable[[], None] | None = None,
    ) -> None:
        """Begin.

        Args:
            connect: makes a connection to the store of this thread's own.
            rank: this rank.
            size: ranks.
            timeout_s: a rank that is silent for so long is gone.
            interval_s: between two signs of life.
            on_loss: called once with a message that names the rank and the cause; None prints it and ends the process.
            abort: ends collectives that wait for a rank; called on rank 0 before `on_loss`, so that its requests can be
                told. None if they end by themselves when a process does.
        """
        self._rank, self._size = rank, size
        self._timeout, self._interval = timeout_s, interval_s
        self._on_loss, self._abort = on_loss or _end, abort
        self._stopped, self._woken, self._known = threading.Event(), threading.Event(), threading.Event()
        self._own: _Failure | None = None
        self._text = ""
        store = connect()
        store.set(self._key(rank), "0")
        if rank == 0:
            store.set(_TROUBLE, "")
        self._thread = threading.Thread(target=self._run, args=(store,), name="k3lib-heartbeat", daemon=True)
        self._thread.start()

    @property
    def trouble(self) -> str | None:
        """Which rank is gone or has failed, and why; None as long as all is well."""
        return self._text or None

    def fail(self, error: BaseException, *, wait: bool = True) -> None:
        """Tell all ranks that this one cannot go on, unless it is known already that another one could not.

        A collective that failed (`TransportError`) says little: most likely another rank has gone. This rank then tells
        only if nobody else is missed within `timeout_s`.

        Args:
            error: why.
            wait: return when the ranks have been told, or others have told this one, so that this process may end; an
                engine with requests to answer does not wait.
        """
        words = str(error).strip().splitlines()
        cause = f"{type(error).__name__}: {words[0]}" if words else type(error).__name__
        is_cause = not isinstance(error, TransportError)
        delay = 0.0 if is_cause else self._timeout + 2 * self._interval
        if self._own is None or is_cause:
            said = f"rank {self._rank} of {self._size} failed ({cause[:_LONGEST_CAUSE]})"
            self._own = _Failure(said, time.monotonic() + delay, is_cause)
        self._woken.set()
        if wait and self._thread.is_alive():
            self._known.wait(delay + 10 * self._interval)

    def stop(self) -> None:
        """Say farewell; the others go on without missing this rank. After a failure they have been told instead."""
        self._stopped.set()
        self._woken.set()
        self._thread.join()

    @staticmethod
    def _key(rank: int) -> str:
        return f"k3lib/alive/{rank}"

    def _run(self, store: Store) -> None:
        keys = [*(self._key(rank) for rank in range(self._size)), _TROUBLE]
        last = [b""] * self._size
        seen = [time.monotonic()] * self._size
        beat = 0
        try:
            store.multi_get(keys)  # waits until every rank has begun
            while not (self._stopped.is_set() and self._own is None):
                beat += 1
                store.set(keys[self._rank], str(beat))
                *values, known = store.multi_get(keys)
                now = time.monotonic()
                for rank, value in enumerate(values):
                    if value != last[rank] or value == b"end":
                        last[rank], seen[rank] = value, now
                lost = [rank for rank in range(self._size) if now - seen[rank] > self._timeout]
                said = known.decode() or self._news(lost, now)
                if said:
                    self._lose(store.compare_set(_TROUBLE, "", said).decode())
                    return
                self._woken.wait(self._interval)
                self._woken.clear()
            store.set(keys[self._rank], "end")
        except Exception:  # what a broken connection raises depends on the version of torch
            if not self._stopped.is_set() and last[0] != b"end":
                self._lose(f"rank 0 of {self._size} is gone")
        finally:
            self._known.set()

    def _news(self, lost: list[int], now: float) -> str:
        """What this rank has to tell the others."""
        if self._own is not None and now >= self._own.due:
            return self._own.said
        if not lost:
            return ""
        noun = "ranks" if len(lost) > 1 else "rank"
        return f"{noun} {', '.join(map(str, lost))} of {self._size} gave no sign of life for {self._timeout:g} s"

    def _lose(self, said: str) -> None:
        self._text = said
        self._known.set()
        if self._rank == 0:
            if self._abort is not None:
                logger.critical("%s", said)  # an ended collective may end the process
                # to end one may itself wait for a dead rank
                threading.Thread(target=self._abort, name="k3lib-abort", daemon=True).start()
            time.sleep(3 * self._interval)  # the store ends with this process, and requests have to be told
        elif self._own is not None and (self._own.is_cause or said == self._own.said):
            self._stopped.wait(3 * self._interval)  # its own failure ends this rank, if nothing holds it up
        if not self._stopped.is_set():
            self._on_loss(f"{said}: rank {self._rank} ends")
