"""k3lib: Kimi-K3 in parts that work alone. Public names are imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME = {
    "AsyncEngine": "k3lib.engine",
    "Batch": "k3lib.batch",
    "Engine": "k3lib.engine",
    "EngineConfig": "k3lib.engine",
    "KimiK3Config": "k3lib.config",
    "KimiK3ForCausalLM": "k3lib.model",
    "KimiK3ForConditionalGeneration": "k3lib.multimodal",
    "Mesh": "k3lib.parallel",
    "ParallelConfig": "k3lib.parallel",
    "SamplingParams": "k3lib.engine",
}

__all__ = [
    "AsyncEngine",
    "Batch",
    "Engine",
    "EngineConfig",
    "KimiK3Config",
    "KimiK3ForCausalLM",
    "KimiK3ForConditionalGeneration",
    "Mesh",
    "ParallelConfig",
    "SamplingParams",
    "__version__",
]

if TYPE_CHECKING:
    from k3lib.batch import Batch
    from k3lib.config import KimiK3Config
    from k3lib.engine import AsyncEngine, Engine, EngineConfig, SamplingParams
    from k3lib.model import KimiK3ForCausalLM
    from k3lib.multimodal import KimiK3ForConditionalGeneration
    from k3lib.parallel import Mesh, ParallelConfig


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'k3lib' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
