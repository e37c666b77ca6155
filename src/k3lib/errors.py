"""The exceptions and warnings of k3lib.

A message states what was asked, what was found and what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "BackendUnavailable",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "K3Error",
    "LayoutMismatch",
    "RequestError",
    "SlowPathWarning",
]


class K3Error(Exception):
    """Base of every error that k3lib raises on purpose."""


class ConfigError(K3Error, ValueError):
    """A bad or inconsistent configuration, or a call with arguments that contradict each other."""


class BackendUnavailable(K3Error, RuntimeError):
    """A kernel was forced but cannot run, or none exists.

    Attributes:
        decision: the `k3lib.ops.Decision` with the reason of every rejected implementation.
    """

    def __init__(self, message: str, decision: object = None) -> None:
        super().__init__(message)
        self.decision = decision


class CapacityError(K3Error, RuntimeError):
    """A pool is full. Expected in normal operation; nothing was taken.

    Attributes:
        needed_pages, free_pages, needed_slots, free_slots: what was asked of both pools.
    """

    def __init__(
        self,
        message: str,
        *,
        needed_pages: int = 0,
        free_pages: int = 0,
        needed_slots: int = 0,
        free_slots: int = 0,
    ) -> None:
        super().__init__(message)
        self.needed_pages = needed_pages
        self.free_pages = free_pages
        self.needed_slots = needed_slots
        self.free_slots = free_slots


class CheckpointError(K3Error, RuntimeError):
    """A weights folder that does not hold what its configuration promises.

    Attributes:
        weights_changed: replacing weights failed half-way: the model holds old ones and new ones.
    """

    LISTED = 10
    weights_changed = False

    @classmethod
    def listing(cls, summary: str, items: Sequence[str]) -> CheckpointError:
        """Make an error that lists up to ten items and counts the rest."""
        lines = [f"  {item}" for item in items[: cls.LISTED]]
        if len(items) > cls.LISTED:
            lines.append(f"  … and {len(items) - cls.LISTED} more")
        return cls("\n".join([summary, *lines]))


class LayoutMismatch(K3Error, RuntimeError):
    """A peer or a stored object has another memory layout."""


class RequestError(K3Error, ValueError):
    """The client's fault: answered with HTTP 400.

    Attributes:
        param: name of the offending request field, if there is one.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class SlowPathWarning(UserWarning):
    """An accelerator runs the readable reference because no kernel is able."""
