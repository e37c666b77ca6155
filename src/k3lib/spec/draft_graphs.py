"""CUDA graphs of a draft's block: many short kernels, which take longer to launch than to run."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from k3lib.capture import capture, graph_sizes, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from torch import Tensor

__all__ = ["Block", "DraftGraphs", "Proposed"]

logger = logging.getLogger(__name__)

MOST_REQUESTS = 128  # larger steps run eagerly: launching is not what takes their time


class Block(NamedTuple):
    """The requests of a step on the device: `[B]` each, `page_table [B, M]`; `draws` is on the host.

    A temperature of 0 is a greedy request; `draws` tells whether there are others.
    """

    anchors: Tensor
    lengths: Tensor
    seeds: Tensor
    temperatures: Tensor
    page_table: Tensor
    draws: bool

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What is on the device."""
        return self[:-1]


class Proposed(NamedTuple):
    """What came of a block: tokens `[B, g]`, their confidence `[B, g]` or None, and logits `[B, g, V]`.

    Of requests that draw, the logits are the probabilities that were drawn from.
    """

    tokens: Tensor
    confidence: Tensor | None
    logits: Tensor


class _Static(NamedTuple):
    block: Block
    graph: torch.cuda.CUDAGraph | None
    found: Proposed | None


class DraftGraphs:
    """Runs blocks over static memory that is filled in place, by replaying graphs of a few sizes.

    Attributes:
        reason: why blocks run eagerly; None while they do not.
        num_captures, num_replays: counts.
    """

    def __init__(
        self, compute: Callable[[Block], Proposed], facts: Callable[[], Hashable], *, captures: bool = True
    ) -> None:
        """Capture nothing yet.

        Args:
            compute: runs a block.
            facts: what graphs depend on: where weights and pools are, which kernels are asked for.
            captures: False runs the padded blocks eagerly: the same computation, on any device.
        """
        self.reason: str | None = None
        self.num_captures = self.num_replays = 0
        self._compute, self._facts_of, self._captures = compute, facts, captures
        self._sizes = graph_sizes(MOST_REQUESTS)
        self._statics: dict[tuple[int, int, bool], _Static] = {}
        self._pool: Any = None  # a handle whose type changes with torch
        self._facts: Hashable = None

    def run(self, block: Block) -> Proposed | None:
        """What comes of a block, valid until the next call; None if it has to run without a graph."""
        requests, pages = block.page_table.shape
        if (facts := self._facts_of()) != self._facts:
            self._statics.clear()
            self._pool, self._facts, self.reason = None, facts, None
        if self.reason is not None or not 0 < requests <= self._sizes[-1]:
            return None
        size = next(n for n in self._sizes if n >= requests)
        key = (size, max(4, 1 << (pages - 1).bit_length()) if pages else 4, block.draws)
        static = self._statics.get(key) or self._make(block, *key)
        if static is None:
            return None
        for target, given in zip(static.block.tensors, block.tensors, strict=True):
            target.zero_()
            target[tuple(slice(n) for n in given.shape)].copy_(given)
        if static.graph is None or static.found is None:
            found = self._compute(static.block)
        else:
            static.graph.replay()
            self.num_replays += 1
            found = static.found
        confidence = None if found.confidence is None else found.confidence[:requests]
        return Proposed(found.tokens[:requests], confidence, found.logits[:requests])

    def _make(self, like: Block, size: int, pages: int, draws: bool) -> _Static | None:
        anchors, lengths, seeds, temperatures = (x.new_zeros(size) for x in like[:4])
        block = Block(anchors, lengths, seeds, temperatures, like.page_table.new_zeros(size, pages), draws)  # padding
        static = _Static(block, None, None)
        if self._captures:
            try:
                if self._pool is None:
                    self._pool = torch.cuda.graph_pool_handle()
                static = _Static(block, *capture(lambda: self._compute(block), like.anchors.device, self._pool))
            except Exception as error:
                self.reason = reason_of(error)
                logger.warning("drafts run without CUDA graphs: %s", self.reason)
                return None
            self.num_captures += 1
        self._statics[size, pages, draws] = static
        return static
