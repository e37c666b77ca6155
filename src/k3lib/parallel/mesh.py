"""The groups that a model is built with, by the names of their axes."""

from __future__ import annotations

from dataclasses import dataclass

from k3lib.parallel.group import LOCAL, Group

__all__ = ["Mesh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Named axes of ranks. `Mesh.single()` is one rank.

    Attributes:
        tp: tensor parallel: heads, feed-forward widths, vocabulary rows.
    """

    tp: Group = LOCAL

    @classmethod
    def single(cls) -> Mesh:
        """One rank."""
        return cls()
