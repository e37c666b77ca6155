"""Configuration of the engine, and the memory it derives from the model and the machine."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from k3lib.cache import CacheConfig, kv_bytes_per_token, state_bytes_per_slot
from k3lib.errors import ConfigError

if TYPE_CHECKING:
    from k3lib.model import KimiK3ForCausalLM

__all__ = ["EngineConfig", "derive_cache"]

logger = logging.getLogger(__name__)

CPU_CACHE_BYTES = 2 << 30
DEFAULT_RUNNING = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits of an engine.

    Attributes:
        cache: pools; None derives them from the model and the free memory.
        context_length: longest prompt plus output; None = the model's positions.
        chunked_prefill_size: most prompt tokens of one prefill step.
        max_running_requests: requests in flight; None = 16, or the slots of `cache`.
        strict_backends: refuse the slow reference on an accelerator.
    """

    cache: CacheConfig | None = None
    context_length: int | None = None
    chunked_prefill_size: int = 2048
    max_running_requests: int | None = None
    strict_backends: bool = False

    def __post_init__(self) -> None:
        for name in ("context_length", "chunked_prefill_size", "max_running_requests"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"EngineConfig: {name} must be >= 1, got {value}")
        if self.cache is not None and (self.max_running_requests or 0) > self.cache.num_slots:
            raise ConfigError(
                f"EngineConfig: max_running_requests={self.max_running_requests} needs as many slots, the cache has "
                f"{self.cache.num_slots}"
            )


def derive_cache(model: KimiK3ForCausalLM, config: EngineConfig, context_length: int) -> CacheConfig:
    """Choose pool sizes: a slot for each running request, pages for full contexts, both within the free memory.

    Half of the budget may go to states, the rest to pages. The budget is 2 GiB on a CPU and 80 % of the free memory of
    an accelerator.
    """
    text, device, itemsize = model.config.text, model.device, model.dtype.itemsize
    budget = CPU_CACHE_BYTES
    if device.type == "cuda":
        budget = int(torch.cuda.mem_get_info(device)[0] * 0.8)
    tp_size = model.mesh.tp.size
    per_slot = state_bytes_per_slot(text, conv_itemsize=itemsize, tp_size=tp_size)
    running = config.max_running_requests or DEFAULT_RUNNING
    slots = max(1, min(running, budget // 2 // per_slot)) if per_slot else running
    page_size = 64
    per_page = kv_bytes_per_token(text, itemsize=itemsize) * page_size
    full = -(-context_length // page_size) * slots
    pages = max(1, min(full, int((budget - slots * per_slot) // per_page))) if per_page else full
    cache = CacheConfig(num_pages=pages, num_slots=slots, page_size=page_size)
    logger.info(
        "memory plan: %d slots of %d KiB (asked %d), %d pages of %d tokens, %d KiB a page (full contexts: %d)",
        slots, per_slot >> 10, running, pages, page_size, int(per_page) >> 10, full,
    )  # fmt: skip
    return cache
