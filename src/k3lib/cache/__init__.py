"""The memory of running requests: pages of latent KV and slots of KDA state, allocated together.

Bookkeeping is pure Python and importable without torch; names that need torch are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from k3lib.cache.allocator import PageAllocator, SlotAllocator
from k3lib.cache.lease import HybridAllocator, Lease
from k3lib.cache.sizing import kv_bytes_per_token, state_bytes_per_slot

__all__ = [
    "CacheConfig",
    "HybridAllocator",
    "HybridCache",
    "HybridPool",
    "KDAPool",
    "LatentPool",
    "Lease",
    "PageAllocator",
    "SlotAllocator",
    "kv_bytes_per_token",
    "state_bytes_per_slot",
]

_HOME = {
    "CacheConfig": "k3lib.cache.pools",
    "HybridCache": "k3lib.cache.hybrid",
    "HybridPool": "k3lib.cache.pools",
    "KDAPool": "k3lib.cache.pools",
    "LatentPool": "k3lib.cache.pools",
}

if TYPE_CHECKING:
    from k3lib.cache.hybrid import HybridCache
    from k3lib.cache.pools import CacheConfig, HybridPool, KDAPool, LatentPool


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'k3lib.cache' has no attribute {name!r}")
