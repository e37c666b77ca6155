"""CUDA graphs of the vision tower for images whose sizes come again.

The tower of a small image is many short kernels, which take longer to launch than to run. Large images gain nothing,
and a graph keeps the memory of its call, so only a few are made, and only for grids that came before.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from k3lib import ops
from k3lib.capture import capture, pool_bytes, reason_of
from k3lib.multimodal import KimiK3ForConditionalGeneration

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from torch import Tensor

    from k3lib.layers.vision import Grid, VisionBatch
    from k3lib.model import KimiK3ForCausalLM

__all__ = ["Captured", "VisionGraphs", "capture_tower"]

logger = logging.getLogger(__name__)

CAPACITY = 2
MIN_HITS = 2
MAX_PATCHES = 6144


class Captured(Protocol):
    """A call of the tower that can be repeated with other pixels."""

    num_bytes: int

    def __call__(self, patches: Tensor) -> Tensor:
        """Features of patches of the same grids."""
        ...


class VisionGraphs:
    """Encodes images, by replaying a graph where the very grids of a call came before.

    Attributes:
        num_captures, num_replays: counts.
    """

    def __init__(
        self,
        model: KimiK3ForConditionalGeneration,
        *,
        capture: Callable[[KimiK3ForConditionalGeneration, Sequence[Grid]], Captured] | None = None,
        capacity: int = CAPACITY,
        min_hits: int = MIN_HITS,
        max_patches: int = MAX_PATCHES,
    ) -> None:
        """Capture nothing yet.

        Args:
            model: encodes what is not replayed.
            capture: makes a graph; `capture_tower` unless told otherwise.
            capacity: most graphs. Once there are as many, other grids run eagerly.
            min_hits: a graph is made the so-many-th time that its grids come.
            max_patches: calls with more patches run eagerly.
        """
        self.model = model
        self.capacity, self.min_hits, self.max_patches = capacity, min_hits, max_patches
        self.num_captures = self.num_replays = 0
        self._capture = capture or capture_tower
        self._graphs: dict[tuple[Grid, ...], Captured] = {}
        self._failed: set[tuple[Grid, ...]] = set()
        self._seen: OrderedDict[tuple[Grid, ...], int] = OrderedDict()
        self._facts: Hashable = None

    @classmethod
    def wanted(cls, model: KimiK3ForCausalLM | KimiK3ForConditionalGeneration, *, enabled: bool) -> VisionGraphs | None:
        """Graphs of a model, if they are enabled and it sees on a CUDA device."""
        if not enabled or model.device.type != "cuda" or not isinstance(model, KimiK3ForConditionalGeneration):
            return None
        return cls(model)

    def run(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Features of images, `[rows of all, D]`, in memory of their own; as `encode_local` of the model gives them."""
        key = tuple(grids)
        self._check_facts()
        graph = self._graphs.get(key) or self._make(key)
        if graph is None:
            return self.model.encode_local(patches, grids)
        self.num_replays += 1
        return graph(patches)

    @property
    def num_bytes(self) -> int:
        """Memory that the graphs keep."""
        return sum(graph.num_bytes for graph in self._graphs.values())

    def stats(self) -> dict[str, object]:
        """Counts for a report."""
        return {
            "graphs": len(self._graphs),
            "captures": self.num_captures,
            "replays": self.num_replays,
            "failed": len(self._failed),
            "retained_bytes": self.num_bytes,
        }

    def clear(self) -> None:
        """Forget all graphs and what was seen."""
        self._graphs.clear()
        self._failed.clear()
        self._seen.clear()

    def _make(self, key: tuple[Grid, ...]) -> Captured | None:
        """A graph for these grids, if it is time for one."""
        if key in self._failed or not key or sum(grid.num_patches for grid in key) > self.max_patches:
            return None
        if self._count(key) < self.min_hits or len(self._graphs) >= self.capacity:
            return None
        try:
            graph = self._capture(self.model, key)
        except Exception as error:
            self._failed.add(key)
            logger.warning("images of grids %s run without a graph: %s", _shown(key), reason_of(error))
            return None
        self._graphs[key] = graph
        self.num_captures += 1
        logger.info("captured the vision tower for grids %s, which keeps %d MiB", _shown(key), graph.num_bytes >> 20)
        return graph

    def _count(self, key: tuple[Grid, ...]) -> int:
        """How often these grids came, of the last few that did."""
        self._seen[key] = self._seen.get(key, 0) + 1
        self._seen.move_to_end(key)
        while len(self._seen) > 8 * self.capacity:
            self._seen.popitem(last=False)
        return self._seen[key]

    def _check_facts(self) -> None:
        """Start anew if the weights have moved, or other kernels are preferred."""
        text = self.model.language_model
        ends = (self.model.vision_tower.weight, self.model.mm_projector.post_norm.weight)
        facts = (ops.options_key(), text.family, *text.backends.items(), *[x.data_ptr() for x in ends])
        if facts != self._facts:
            self.clear()
            self._facts = facts


def _shown(key: tuple[Grid, ...]) -> str:
    return ", ".join("x".join(map(str, grid)) for grid in key)


@dataclass(slots=True)
class _TowerGraph:
    """A graph with the memory of its input and output."""

    graph: torch.cuda.CUDAGraph
    patches: Tensor
    batch: VisionBatch
    features: Tensor
    num_bytes: int

    def __call__(self, patches: Tensor) -> Tensor:
        self.patches.copy_(patches, non_blocking=True)
        self.graph.replay()
        return self.features.clone()  # the next replay writes over them


def capture_tower(model: KimiK3ForConditionalGeneration, grids: Sequence[Grid]) -> Captured:
    """Capture one call of the tower and the projector on a CUDA device, in a pool of memory of its own.

    Raises:
        RuntimeError: something waits for the device; names the op.
    """
    device = model.device
    batch = model.vision_batch(grids)
    p = model.vision_tower.config.patch_size
    patches = torch.zeros(batch.num_patches, 3, p, p, dtype=model.dtype, device=device)
    pool = torch.cuda.graph_pool_handle()
    graph, features = capture(lambda: model.encode_batch(patches, batch), device, pool)
    return _TowerGraph(graph, patches, batch, features, pool_bytes(pool) + patches.nbytes)
