"""Two computations that do not need each other, beside each other on an accelerator with streams."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable  # noqa: TC003 - in the type of a constant
from typing import Literal

import torch
from torch import Tensor

__all__ = ["WAYS", "Way", "beside", "beside_in_graphs", "one_by_one"]


def one_by_one(
    _device: torch.device, first: Callable[[], Tensor], second: Callable[[], Tensor]
) -> tuple[Tensor, Tensor]:
    """Run `first`, then `second`; return what each gives."""
    return first(), second()


def beside(device: torch.device, first: Callable[[], Tensor], second: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """Run `second` on a side stream of `device` beside `first`, which stays on the current one.

    Both see all that was issued before, and what is issued afterwards sees both: the results are those of one after the
    other, bit for bit. Collectives inside travel beside the other's kernels; every rank issues those of `second` first.
    In a captured graph the two are branches that join again. Without CUDA streams `first` runs before `second`.

    Args:
        device: where both compute.
        first: the longer computation.
        second: must not write what `first` reads, nor the other way round.

    Returns:
        The results, for use on the current stream.
    """
    if device.type != "cuda":
        return one_by_one(device, first, second)
    here = torch.cuda.current_stream(device)
    side = _side_of(here)
    side.wait_stream(here)
    try:
        with torch.cuda.stream(side):
            other = second()
        one = first()
    except BaseException:
        # what the side stream still reads may be freed now, and used again here
        with contextlib.suppress(RuntimeError):  # of a capture that has failed: the failure itself says more
            here.wait_stream(side)
        raise
    here.wait_stream(side)
    # Memory that a stream has freed goes to the same stream again, and each waits for the other before it works on: so
    # nothing is overwritten while it is read. Of what the caller keeps of the side stream the allocator has to be told,
    # but in a graph, whose memory no other stream gets, and where it would be held until the capture ends.
    if not torch.cuda.is_current_stream_capturing():
        other.record_stream(here)
    return one, other


def beside_in_graphs(
    device: torch.device, first: Callable[[], Tensor], second: Callable[[], Tensor]
) -> tuple[Tensor, Tensor]:
    """`beside` while a graph is captured; else one after the other: to issue on two streams costs the host more time.

    A layer of K3's experts on an H200, as one rank of 8, nothing sent: captured, it takes 9 % less time for one token,
    2 % for 32, as much for 128 and more; eagerly 7 to 18 % more up to 128 tokens, where the host is what is waited for.
    """
    run = beside if device.type == "cuda" and torch.cuda.is_current_stream_capturing() else one_by_one
    return run(device, first, second)


Way = Literal["graphs", "always", "never"]
WAYS: dict[Way, Callable[..., tuple[Tensor, Tensor]]] = {
    "graphs": beside_in_graphs,
    "always": beside,
    "never": one_by_one,
}


@functools.cache
def _side_of(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """The stream that works beside `stream`, and beside no other."""
    side = torch.cuda.Stream(stream.device)  # type: ignore[no-untyped-call]
    # streams are given out in turn: this may be the very same
    return side if side != stream else torch.cuda.Stream(stream.device)  # type: ignore[no-untyped-call]
