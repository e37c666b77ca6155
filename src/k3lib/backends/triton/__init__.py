"""Kernels in Triton, written for Hopper.

One module a group of ops. It registers adapters and is importable without triton; the kernels stand in a module of the
same name with `_kernels` behind it, which an adapter imports when it is first called. An adapter checks its arguments,
allocates, and launches. Launch configurations are data beside the kernels: nothing is tuned while a model serves, and
no kernel is specialised on a length that changes from step to step, nor on the alignment of an index, which is often a
part of a larger tensor.
"""

from __future__ import annotations

import importlib
from typing import Any

from k3lib.ops.target import HOPPER, Package

__all__ = ["OPTIONS", "load"]

# what all registrations share: run on Hopper by us, elsewhere a guess
OPTIONS: dict[str, Any] = {
    "platforms": frozenset({"cuda", "rocm"}),
    "proven_on": HOPPER,
    "requires": (Package("triton", ("triton", "pytorch-triton", "pytorch-triton-rocm"), at_least="3.4"),),
}
MODULES: tuple[str, ...] = (
    "attn_res", "conv", "experts", "kda_chunk", "kda_decode", "linear", "mla", "pointwise", "route",
)  # fmt: skip


def load() -> None:
    """Register all adapters."""
    for name in MODULES:
        importlib.import_module(f"k3lib.backends.triton.{name}")
