"""CUDA graphs of decode steps: one for each of a few batch sizes, captured when first needed."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import torch

from k3lib import ops
from k3lib.batch import Batch

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from torch import Tensor

    from k3lib.cache import HybridCache
    from k3lib.model import KimiK3ForCausalLM

__all__ = ["DecodeGraphs", "graph_sizes"]

logger = logging.getLogger(__name__)


def graph_sizes(largest: int) -> tuple[int, ...]:
    """Batch sizes that are captured, up to `largest`: at most half of a step is padding, from 16 on a third."""
    sizes = {1, 2, 4, 8, largest}
    size = 16
    while size < largest:
        sizes |= {size, size + size // 2}
        size *= 2
    return tuple(sorted(n for n in sizes if n <= largest))


class DecodeGraphs:
    """Runs decode steps by replaying graphs over static batches, which are filled in place.

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
    ) -> None:
        """Capture nothing yet.

        Args:
            model: a whole model.
            cache: its memory.
            max_requests: most requests of a step.
            max_pages: most pages of a request.
            captures: False runs the padded steps eagerly: the same computation, on any device.
        """
        self.model = model
        self.cache = cache
        self.sizes = graph_sizes(max_requests)
        self.max_pages = max_pages
        self.captures = captures
        self.reason: str | None = None
        self.num_captures = self.num_replays = 0
        self._graphs: dict[int, tuple[Batch, torch.cuda.CUDAGraph | None, Tensor | None]] = {}
        self._pool: Any = None  # a handle whose type changes with torch
        self._facts: Hashable = None
        self._told: set[str] = set()

    def run(self, batch: Batch) -> Tensor | None:
        """Logits `[B, vocab]` of a decode step, valid until the next call; None if it has to run without a graph."""
        requests = len(batch.new_tokens)
        size = next((n for n in self.sizes if n >= requests), None)
        self._check_facts()
        if self.reason is not None or size is None or not requests:
            return None
        static, graph, logits = self._graphs.get(size) or self._prepare(size)
        if self.reason is not None or not static.fits(batch):
            return None
        static.fill(batch)
        if graph is None or logits is None:
            return self._forward(static)[:requests]
        graph.replay()
        self.num_replays += 1
        return logits[:requests]

    def clear(self) -> None:
        """Forget all graphs; they are captured again when needed."""
        self._graphs.clear()
        self._pool = None
        self.reason = None

    def _check_facts(self) -> None:
        """Start anew if memory that the graphs point to has moved, or other kernels are preferred."""
        pool = self.cache.pool
        tensors = (pool.latent.pages, pool.kda.state, pool.kda.conv, *_ends(self.model))
        model = self.model
        kernels = (ops.options_key(), model.family, *model.backends.items())
        facts = (*kernels, *[x.data_ptr() for x in tensors])
        if facts != self._facts:
            if self._graphs:
                logger.info("memory or kernels changed: decode steps are captured anew")
            self.clear()
            self._facts = facts

    def _forward(self, static: Batch) -> Tensor:
        logits: Tensor = self.model(static, self.cache, logits="last")
        return logits

    def _prepare(self, size: int) -> tuple[Batch, torch.cuda.CUDAGraph | None, Tensor | None]:
        static = Batch.static(size, max_pages=self.max_pages, device=self.model.device)
        graph, logits = None, None
        if self.captures:
            try:
                graph, logits = self._capture(static)
            except Exception as error:
                # nothing of a request was touched: the step was padding
                self.clear()
                self.reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                if self.reason not in self._told:
                    self._told.add(self.reason)
                    logger.warning("decode steps run without CUDA graphs: %s", self.reason)
        self._graphs[size] = static, graph, logits
        return self._graphs[size]

    def _capture(self, static: Batch) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture a step of padding: it writes the null slot and the null page only."""
        stream = torch.cuda.Stream(self.model.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.model.device))
        with torch.cuda.stream(stream):
            self._forward(static)  # compiles kernels, and libraries allocate what they keep
            with _no_waiting():
                self._forward(static)
        torch.cuda.current_stream(self.model.device).wait_stream(stream)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # other threads may allocate meanwhile
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            logits = self._forward(static)
        self.num_captures += 1
        logger.debug("captured a decode step of %d requests", len(static.new_tokens))
        return graph, logits


def _ends(model: KimiK3ForCausalLM) -> tuple[Tensor, Tensor]:
    """The first and the last weights: moving a model moves both."""
    return model.model.embed_tokens.weight, model.lm_head.weight


@contextlib.contextmanager
def _no_waiting() -> Iterator[None]:
    """Refuse to wait for the device, which a graph cannot, and name the op that does."""
    seen: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with ops.observe(lambda op, _, impl: seen.append(f"{op}/{impl}")):
            yield
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        where = seen[-1] if seen else "the model"
        raise RuntimeError(f"{where} waits for the device, which a graph cannot") from error
    finally:
        torch.cuda.set_sync_debug_mode(before)
