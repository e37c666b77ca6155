"""The memory of requests: pages of latent KV and slots of KDA state, allocated together, and what is cached of them.

Bookkeeping is pure Python and importable without torch; names that need torch are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from k3lib.cache.allocator import PageAllocator, SlotAllocator
from k3lib.cache.lease import CacheEvent, HybridAllocator, Lease, Op
from k3lib.cache.prefix import MediaKey, PrefixTree, prefix_keys
from k3lib.cache.sizing import (
    Limit,
    MemoryPlan,
    RatioTerms,
    default_mem_fraction,
    draft_bytes_per_token,
    format_ratio,
    kv_bytes_per_token,
    plan_memory,
    ratio_terms,
    replay_bytes_per_slot,
    rest_from_memory,
    slots_per_request,
    state_bytes_per_slot,
    state_kv_ratio,
)

__all__ = [
    "CacheConfig",
    "CacheEvent",
    "HybridAllocator",
    "HybridCache",
    "HybridPool",
    "KDAPool",
    "LatentPool",
    "Lease",
    "Limit",
    "MediaKey",
    "MemoryPlan",
    "Op",
    "PageAllocator",
    "PrefixTree",
    "RatioTerms",
    "SlotAllocator",
    "default_mem_fraction",
    "draft_bytes_per_token",
    "format_ratio",
    "kv_bytes_per_token",
    "plan_memory",
    "prefix_keys",
    "ratio_terms",
    "replay_bytes_per_slot",
    "rest_from_memory",
    "slots_per_request",
    "state_bytes_per_slot",
    "state_kv_ratio",
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
