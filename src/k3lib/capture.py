"""CUDA graphs: which batch sizes are captured, and how a computation becomes a graph or says why it cannot."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from k3lib import ops

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["capture", "graph_sizes", "pool_bytes", "reason_of"]

T = TypeVar("T")


def graph_sizes(largest: int) -> tuple[int, ...]:
    """Batch sizes that are captured, up to `largest`: at most half of a step is padding, from 16 on a third."""
    sizes = {1, 2, 4, 8, largest}
    size = 16
    while size < largest:
        sizes |= {size, size + size // 2}
        size *= 2
    return tuple(sorted(n for n in sizes if n <= largest))


def capture(run: Callable[[], T], device: torch.device, pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:  # noqa: ANN401
    """Capture a computation over memory that stays where it is.

    It runs three times: kernels compile in the first, the second must not wait for the device, the third is captured.

    Args:
        run: the computation.
        device: a CUDA device.
        pool: handle of the memory that graphs share (`torch.cuda.graph_pool_handle`).

    Returns:
        The graph, and what `run` returned: tensors that a replay fills anew.

    Raises:
        RuntimeError: something waits for the device; names the op.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()  # libraries allocate what they keep, too
        with _no_waiting():
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # other threads may allocate meanwhile
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        result = run()
    return graph, result


def pool_bytes(pool: Any) -> int:  # noqa: ANN401 - a handle whose type changes with torch
    """Device memory that the graphs of a pool keep from everybody else."""
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == tuple(pool))


def reason_of(error: Exception) -> str:
    """Why a capture failed, in one line."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


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
