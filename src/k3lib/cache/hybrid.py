"""HybridCache: the bookkeeping and the pools of one process, and the batches that join them."""

from __future__ import annotations

import contextlib
from itertools import chain
from typing import TYPE_CHECKING, Literal

import torch

from k3lib.batch import Batch, KDAState, LatentPages
from k3lib.cache.lease import HybridAllocator, Lease
from k3lib.cache.pools import CacheConfig, HybridPool
from k3lib.config import KimiK3Config, TextConfig
from k3lib.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["HybridCache"]


class HybridCache:
    """Pages and slots of running requests, with the tensors behind them; pass it to the model as `cache`.

        lease = cache.open(prompt_ids)
        cache.grow(lease, tokens=len(prompt_ids))
        logits = model(cache.make_batch([(lease, prompt_ids)], mode="prefill"), cache)
        cache.commit(lease, prompt_ids)
        cache.close(lease)

    `CapacityError` from `open` and `grow` is normal; nothing was taken then.
    """

    def __init__(self, allocator: HybridAllocator, pool: HybridPool, config: CacheConfig) -> None:
        self.allocator = allocator
        self.pool = pool
        self.config = config

    @classmethod
    def allocate(
        cls,
        config: KimiK3Config | TextConfig,
        cache: CacheConfig,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        tp_size: int = 1,
        layers: range | None = None,
    ) -> HybridCache:
        """Allocate the pools of a model.

        Args:
            config: the model.
            cache: counts and dtypes.
            device: where the tensors go.
            dtype: of the activations; default what the configuration says (`model.config` says what the model has),
                bfloat16 for a bare text configuration.
            tp_size: ranks that share the KDA heads.
            layers: only these layers.
        """
        text = config.text if isinstance(config, KimiK3Config) else config
        if dtype is None:
            dtype = getattr(torch, config.dtype) if isinstance(config, KimiK3Config) else torch.bfloat16
        pool = HybridPool(text, cache, dtype=dtype, device=device, tp_size=tp_size, layers=layers)
        return cls(HybridAllocator(cache.num_pages, cache.num_slots, cache.page_size), pool, cache)

    @property
    def free_pages(self) -> int:
        """Pages that can be taken."""
        return self.allocator.pages.num_free

    @property
    def free_slots(self) -> int:
        """Slots that can be taken."""
        return self.allocator.slots.num_free

    def view(self, layer: int) -> KDAState | LatentPages:
        """The memory of one layer, for the model."""
        return self.pool.view(layer)

    def open(self, prompt_ids: Sequence[int]) -> Lease:
        """Take a slot for a request. Its state is zeroed before the first step."""
        return self.allocator.open(list(prompt_ids))

    @contextlib.contextmanager
    def lease(self, prompt_ids: Sequence[int]) -> Iterator[Lease]:
        """`open` and `close` as a context."""
        lease = self.open(prompt_ids)
        try:
            yield lease
        finally:
            self.close(lease)

    def grow(self, lease: Lease, *, tokens: int) -> None:
        """Reserve pages for `tokens` beyond the committed length; the same call twice reserves once."""
        self.allocator.grow(lease, tokens)

    def make_batch(
        self, work: Sequence[tuple[Lease, Sequence[int]]], *, mode: Literal["prefill", "decode", "verify"] = "prefill"
    ) -> Batch:
        """Describe one step: the new ids of each lease, behind its committed tokens.

        Raises:
            ConfigError: a lease is closed, occurs twice, or has no room; nothing has been changed.
        """
        leases = [lease for lease, _ in work]
        if len({id(lease) for lease in leases}) != len(leases):
            raise ConfigError("make_batch: a lease occurs twice")
        for lease, ids in work:
            self.allocator._check_open(lease)
            self.allocator.check_room(lease, len(ids))
        batch = Batch.of(
            [len(ids) for _, ids in work],
            mode=mode,
            cached_tokens=[lease.length for lease in leases],
            slots=[lease.slot for lease in leases],
            page_tables=[lease.pages for lease in leases],
            page_size=self.config.page_size,
            input_ids=torch.tensor(list(chain.from_iterable(ids for _, ids in work)), dtype=torch.int64),
            device=self.pool.device,
        )
        if batch.input_ids is not None:
            batch.input_ids = batch.input_ids.to(self.pool.device)
        fresh = [lease for lease in leases if lease.needs_zero]
        if fresh:
            self.pool.kda.zero(torch.tensor([lease.slot for lease in fresh], device=self.pool.device))
            for lease in fresh:
                lease.needs_zero = False
        return batch

    def commit(self, lease: Lease, ids: Sequence[int]) -> None:
        """Count `ids` as context, after the model has run on them."""
        self.allocator.commit(lease, list(ids))

    def close(self, lease: Lease) -> None:
        """Free the memory of a request; legal at any moment, idempotent."""
        self.allocator.close(lease)

    def check(self) -> None:
        """Raise AssertionError if a page or slot is lost or has two owners."""
        self.allocator.check()

    def dump(self) -> dict[str, object]:
        """Counts and leases, for debugging."""
        return {
            "free_pages": self.free_pages,
            "free_slots": self.free_slots,
            "bytes": self.pool.nbytes,
            "leases": {
                n: {"slot": x.slot, "pages": list(x.pages), "tokens": x.length}
                for n, x in self.allocator.leases.items()
            },
        }
