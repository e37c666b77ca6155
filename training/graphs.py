"""Computations of a training step as CUDA graphs: a model this small is bound by launches, not by arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from torch import Tensor

__all__ = ["Graphs"]


class Graphs:
    """Runs functions of tensors: a key that comes for the first time eagerly, from then on from a graph.

    The eager run is a real one, so that nothing is computed for the sake of warming up; what is captured computes
    nothing yet. Arguments are copied to places of their own; whatever else a function reads or writes (weights,
    gradients, states of an optimiser) has to stay where it is. All graphs share their memory, and run one after the
    other.

    Args:
        enabled: False runs everything eagerly, as on a CPU.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Any]] = {}
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._graphs)

    def forget(self) -> None:
        """Give all graphs up: what they compute has changed."""
        self._seen.clear()
        self._graphs.clear()
        self._pool = None

    def run(self, key: Hashable, function: Callable[..., Any], *args: Tensor) -> Any:
        """What `function(*args)` returns: a tensor, a tuple of tensors, or None."""
        if not self.enabled:
            return function(*args)
        if key not in self._graphs:
            if key not in self._seen:
                self._seen.add(key)
                return function(*args)
            self._graphs[key] = self._capture(function, args)
        graph, places, result = self._graphs[key]
        for place, arg in zip(places, args, strict=True):
            place.copy_(arg)
        graph.replay()
        return _copied(result)

    def _capture(
        self, function: Callable[..., Any], args: tuple[Tensor, ...]
    ) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Any]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        places = tuple(torch.empty_like(arg) for arg in args)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # loaders copy meanwhile
            result = function(*places)
        return graph, places, result


def _copied(result: Any) -> Any:
    """Copies outside the memory of the graphs: what one leaves there, the next one may overwrite."""
    if result is None:
        return None
    if isinstance(result, torch.Tensor):
        return result.clone()
    parts = [part.clone() for part in result]
    return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)
