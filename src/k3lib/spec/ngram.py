"""Prompt lookup: propose what followed when the last tokens stood in the context before. Needs no weights."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Literal

from k3lib.errors import ConfigError
from k3lib.spec.proposer import MAX_BLOCK, Draft

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3lib.spec.proposer import DraftContext

__all__ = ["NGram"]


class NGram:
    """Proposes the continuation of the longest suffix of the context that occurs in it before; the latest of equals.

    A continuation that reaches the end of the context goes on with itself, so a period is repeated. Proposals are not
    drawn (`probs` is None). Satisfies `Proposer`.

    Attributes:
        block_size, feature_layers, feature_kind: see `Proposer`; it needs no features.
    """

    feature_layers: tuple[int, ...] = ()
    feature_kind: Literal["prefix", "mixture"] = "prefix"

    def __init__(self, block_size: int = 7, *, longest: int = 8, shortest: int = 2, candidates: int = 64) -> None:
        """Choose what counts as a match.

        Args:
            block_size: most tokens to propose.
            longest: length of a suffix at which the search ends.
            shortest: length of a suffix below which nothing is proposed.
            candidates: latest occurrences of the shortest suffix that are compared, so that a step does not become
                slower with the context.

        Raises:
            ConfigError: a value out of range.
        """
        for name, value, low, high in (
            ("block_size", block_size, 1, MAX_BLOCK),
            ("shortest", shortest, 1, longest),
            ("candidates", candidates, 1, 1 << 20),
        ):
            if not low <= value <= high:
                raise ConfigError(f"NGram: {name} must be {low} .. {high}, got {value}")
        self.block_size = block_size
        self.longest, self.shortest, self.candidates = longest, shortest, candidates
        self._indices: dict[str, _Index] = {}

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """Propose up to `block_size` tokens behind each context; none without a match."""
        return [Draft(self._continue(context.token_ids, self._index(context))) for context in contexts]

    def commit(self, contexts: Sequence[DraftContext]) -> None:
        """Take note of new tokens, so that the first proposal behind a long prompt need not read all of it."""
        for context in contexts:
            self._index(context)

    def drop(self, request_id: str) -> None:
        """Forget a request."""
        self._indices.pop(request_id, None)

    def _index(self, context: DraftContext) -> _Index:
        index = self._indices.get(context.request_id)
        if index is None or not index.continues(context.token_ids):
            index = self._indices[context.request_id] = _Index(self.shortest)
        index.extend(context.token_ids)
        return index

    def _continue(self, tokens: Sequence[int], index: _Index) -> list[int]:
        best, length = 0, 0
        for place in index.latest(tokens, self.candidates):
            common = self.shortest
            while common < min(self.longest, place) and tokens[place - 1 - common] == tokens[-1 - common]:
                common += 1
            if common > length:
                best, length = place, common
            if length == self.longest:
                break
        if not length:
            return []
        found: list[int] = []
        for i in range(best, best + self.block_size):
            found.append(tokens[i] if i < len(tokens) else found[i - len(tokens)])
        return found


class _Index:
    """Where each run of `size` tokens of one context ended: the last place by the run, and from place to place."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._last: dict[tuple[int, ...], int] = {}
        self._before = array("q")  # [place]: the place before it of the same run, 0 = none
        self._token = -1  # last one that was read

    def continues(self, tokens: Sequence[int]) -> bool:
        """Whether a context can be the one that was read so far, with more behind it."""
        known = len(self._before)
        return len(tokens) >= known and (not known or tokens[known - 1] == self._token)

    def extend(self, tokens: Sequence[int]) -> None:
        """Read up to the last token but one: the run that ends with the last has no continuation yet."""
        begin, end = len(self._before), len(tokens)
        for place in range(begin, end):
            if place < self.size:
                self._before.append(0)
                continue
            run = tuple(tokens[place - self.size : place])
            self._before.append(self._last.get(run, 0))
            self._last[run] = place
        if end > begin:
            self._token = tokens[end - 1]

    def latest(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Places behind the latest earlier occurrences of the last run, the latest first."""
        if len(tokens) <= self.size:
            return []
        places: list[int] = []
        place = self._last.get(tuple(tokens[len(tokens) - self.size :]), 0)
        while place and len(places) < limit:
            places.append(place)
            place = self._before[place]
        return places
