"""Adapters to kernels: one module per provider, importable without the provider's package.

`load_all` imports them on the first choice. Kernels from outside come through the entry-point group `k3lib.backends`:
each entry point names a module whose import calls `k3lib.ops.register`, or a function that does.
"""

from __future__ import annotations

import importlib
import logging
from importlib.metadata import entry_points

from k3lib.ops.target import Package

__all__ = ["ADAPTERS", "FAILED", "GROUP", "KNOWN", "load_all"]

logger = logging.getLogger(__name__)

GROUP = "k3lib.backends"
ADAPTERS = ("cpu", "triton", "sdpa", "fla", "flash_mla", "humming", "flash_kda")
# Packages with kernels for K3, with their right distributions and a file that tells them from placeholders.
KNOWN = (
    Package("triton", ("triton", "pytorch-triton", "pytorch-triton-rocm"), at_least="3.4"),
    Package("flashinfer", ("flashinfer-python",), at_least="0.7.2", marker="kda.py"),
    Package("fla", ("fla-core", "flash-linear-attention"), at_least="0.5.0", marker="ops/kda/chunk.py"),
    Package("flash_mla", ("sgl-flash-mla", "flash_mla"), marker="*.so"),
    Package("flash_kda"),
    Package("deep_gemm", ("sgl-deep-gemm",), marker="mega/__init__.py"),
    Package("humming", ("humming-kernels",)),
    Package("aiter", ("amd-aiter",), marker="ops/shuffle.py"),
    Package("torch_npu", ("torch-npu",)),
)
FAILED: dict[str, str] = {}  # entry point -> why it could not be loaded; shown by `k3lib doctor`


def load_all() -> None:
    """Import our adapters and those of installed packages. A foreign one that fails is logged, never fatal."""
    for name in ADAPTERS:
        adapters = importlib.import_module(f"k3lib.backends.{name}")
        if hasattr(adapters, "load"):
            adapters.load()
    for entry in entry_points(group=GROUP):
        try:
            loaded = entry.load()
            if callable(loaded):
                loaded()
        except Exception as error:
            FAILED[entry.name] = f"{type(error).__name__}: {error}"
            logger.warning("k3lib.backends entry point %s could not be loaded: %s", entry.name, FAILED[entry.name])
