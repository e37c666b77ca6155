"""CUDA graphs of decode and verify steps: one for each of a few batch sizes, captured when first needed."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from k3lib import ops
from k3lib.batch import Batch
from k3lib.capture import capture, graph_sizes, reason_of

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from k3lib.batch import FeatureTap
    from k3lib.cache import HybridCache
    from k3lib.model import KimiK3ForCausalLM

__all__ = ["DecodeGraphs", "graph_sizes"]

logger = logging.getLogger(__name__)


class _Step(NamedTuple):
    """A padded step: its batch, the graph that computes it, and where its results stand."""

    batch: Batch
    graph: torch.cuda.CUDAGraph | None = None
    logits: Tensor | None = None
    features: Tensor | None = None


class DecodeGraphs:
    """Runs decode and verify steps by replaying graphs over static batches, which are filled in place.

    A graph stays valid while the pools and the weights keep their memory: it sees weights that are replaced in place.
    It is captured again when they move, or when other kernels are asked for. Graphs run one at a time, so they share
    one pool of memory, and the logits of one are gone with the next.

    Attributes:
        reason: why steps run eagerly; None while they do not.
        num_captures, num_replays: counts.
    """

    def __init__(
        self,
        model: KimiK3ForCausalLM,
        cache: HybridCache,
        *,
        max_requests: int,
        max_pages: int,
        captures: bool = True,
        tap: FeatureTap | None = None,
    ) -> None:
        """Capture nothing yet.

        Args:
            model: a whole model.
            cache: its memory; a verify step has as many tokens of a request as its scratch holds.
            max_requests: most requests of a step.
            max_pages: most pages of a request.
            captures: False runs the padded steps eagerly: the same computation, on any device.
            tap: what to keep of hidden states in every step.
        """
        self.model = model
        self.cache = cache
        self.sizes = graph_sizes(max_requests)
        self.max_pages = max_pages
        self.captures = captures
        self.reason: str | None = None
        self.num_captures = self.num_replays = 0
        self.tap = tap
        self._graphs: dict[tuple[int, int], _Step] = {}  # by requests, and tokens of each
        self._statics: dict[tuple[int, int], Batch] = {}
        self._pool: Any = None  # a handle whose type changes with torch
        self._facts: Hashable = None
        self._told: set[str] = set()

    def run(self, batch: Batch) -> tuple[Tensor, Tensor | None] | None:
        """Run a decode or verify step, or None if it has to run without a graph.

        Returns:
            Logits `[T, vocab]` of all tokens of the batch, and their features; valid until the next call.
        """
        shape = self.shape_of(batch)
        if shape is None:
            return None
        step = self._graphs.get(shape) or self._prepare(shape)
        if self.reason is not None:
            return None
        return self._replay(step, batch)

    def shape_of(self, batch: Batch) -> tuple[int, int] | None:
        """Requests, and tokens of each, of the smallest graph that takes a step; None if it has to run without."""
        requests = len(batch.new_tokens)
        size = next((n for n in self.sizes if n >= requests), None)
        if size is None or not requests or not self.can_meet():
            return None
        scratch = self.cache.pool.kda.scratch
        shape = size, 1 if batch.mode == "decode" or scratch is None else scratch.width
        return shape if self._static(shape).fits(batch) else None

    def can_meet(self) -> bool:
        """Whether graphs are replayed here at all, as far as is known."""
        self._check_facts()
        return self.reason is None

    def meet(self, shape: tuple[int, int], batch: Batch | None = None) -> tuple[Tensor, Tensor | None] | None:
        """Run a step of a shape that all replicas agreed on.

        Args:
            shape: requests, and tokens of each, at least those of `shape_of`.
            batch: the step; None runs padding for the others.

        Returns:
            As `run`; None for padding. A graph that cannot be captured is no reason to leave the others alone: its step
            runs eagerly, padded alike.
        """
        self._check_facts()
        step = self._graphs.get(shape) or self._prepare(shape)
        if batch is not None:
            return self._replay(step, batch)
        none = torch.zeros(0, dtype=torch.int64, device=self.model.device)
        step.batch.fill(Batch.of([], mode=step.batch.mode, slots=[], page_tables=[], page_size=1, input_ids=none))
        self._compute(step)
        return None

    def _replay(self, step: _Step, batch: Batch) -> tuple[Tensor, Tensor | None]:
        step.batch.fill(batch)
        logits, features = self._compute(step)
        place = step.batch.place_of(batch)
        rows = slice(batch.num_tokens) if place is None else place
        return logits[rows], None if features is None else features[rows]

    def _compute(self, step: _Step) -> tuple[Tensor, Tensor | None]:
        if step.graph is None or step.logits is None:
            return self._forward(step.batch)
        step.graph.replay()
        self.num_replays += 1
        return step.logits, step.features

    def clear(self) -> None:
        """Forget all graphs; they are captured again when needed."""
        self._graphs.clear()
        self._statics.clear()
        self._pool = None
        self.reason = None

    def _check_facts(self) -> None:
        """Start anew if memory that the graphs point to has moved, or other kernels are preferred."""
        pool = self.cache.pool
        scratch = () if pool.kda.scratch is None else tuple(pool.kda.scratch.tensors.values())
        tensors = (pool.latent.pages, pool.kda.state, pool.kda.conv, *scratch, *_ends(self.model))
        model = self.model
        kernels = (ops.options_key(), model.family, *model.backends.items())
        facts = (*kernels, *[x.data_ptr() for x in tensors])
        if facts != self._facts:
            if self._graphs:
                logger.info("memory or kernels changed: decode steps are captured anew")
            self.clear()
            self._facts = facts

    def _forward(self, static: Batch) -> tuple[Tensor, Tensor | None]:
        tap = None if self.tap is None else dataclasses.replace(self.tap, out=None)
        logits: Tensor = self.model(static, self.cache, logits="all", taps=tap)
        return logits, None if tap is None else tap.out

    def _static(self, shape: tuple[int, int]) -> Batch:
        """The padded step of a shape."""
        if shape not in self._statics:
            size, width = shape
            static = Batch.static(size, width, max_pages=self.max_pages, device=self.model.device)
            replicas = self.model.mesh.dp.size
            if replicas > 1:  # all run the same shape
                static.replica_tokens = (size * width,) * replicas
            self._statics[shape] = static
        return self._statics[shape]

    def _prepare(self, shape: tuple[int, int]) -> _Step:
        static = self._static(shape)
        step = _Step(static)
        if self.captures:
            try:
                step = self._capture(static)
            except Exception as error:
                # nothing of a request was touched: the step was padding
                self.clear()
                self.reason = reason_of(error)
                if self.reason not in self._told:
                    self._told.add(self.reason)
                    logger.warning("decode steps run without CUDA graphs: %s", self.reason)
        self._graphs[shape] = step
        return step

    def _capture(self, static: Batch) -> _Step:
        """Capture a step of padding: it writes the null slot and the null page only."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, (logits, features) = capture(lambda: self._forward(static), self.model.device, self._pool)
        self.num_captures += 1
        logger.debug("captured a %s step of %d requests", static.mode, len(static.new_tokens))
        return _Step(static, graph, logits, features)


def _ends(model: KimiK3ForCausalLM) -> tuple[Tensor, Tensor]:
    """The first and the last weights: moving a model moves both."""
    return model.model.embed_tokens.weight, model.lm_head.weight
