"""HybridCache: the bookkeeping and the pools of one process, and the batches that join them."""

from __future__ import annotations

import contextlib
from array import array
from itertools import accumulate, chain, groupby
from typing import TYPE_CHECKING, Literal

import torch

from k3lib.batch import Batch, KDAState, LatentPages, StateSaves
from k3lib.cache.lease import CacheEvent, HybridAllocator, Lease, Op
from k3lib.cache.pools import CacheConfig, HybridPool, KDAScratch
from k3lib.config import KimiK3Config, TextConfig
from k3lib.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from k3lib.cache.prefix import MediaKey

__all__ = ["HybridCache"]


class HybridCache:
    """Pages and slots of running requests and cached prefixes, with the tensors behind them: the model's `cache`.

        lease = cache.open(prompt_ids)                     # cached_len tokens need no prefill
        todo = prompt_ids[lease.cached_len :]
        cache.grow(lease, tokens=len(todo))
        logits = model(cache.make_batch([(lease, todo)], mode="prefill"), cache)
        cache.commit(lease, todo)
        cache.close(lease)                                 # what was computed can be reused until it is evicted

    `CapacityError` from `open` and `grow` is normal; nothing was taken then.
    """

    def __init__(
        self,
        allocator: HybridAllocator,
        pool: HybridPool,
        config: CacheConfig,
        *,
        dcp_size: int = 1,
        dcp_rank: int = 0,
    ) -> None:
        self.allocator = allocator
        self.pool = pool
        self.config = config
        self.dcp_size, self.dcp_rank = dcp_size, dcp_rank
        # told what is done to the tensors, by name and with plain values: `replay` and `build` do it to those of others
        self.tell: Callable[..., None] | None = None
        # page table of every slot on the device; only new entries are copied there
        self._table = torch.zeros(config.num_slots + 1, 0, dtype=torch.int32, device=pool.device)
        self._written: dict[int, tuple[int, int]] = {}  # slot: lease whose pages stand in its row, and how many
        # of the last verify step, by lease: its row of the scratch, its ids, the length that it started from
        self._verified: dict[int, tuple[int, list[int], int]] = {}

    @classmethod
    def allocate(  # noqa: PLR0913 - what a rank's memory depends on
        cls,
        config: KimiK3Config | TextConfig,
        cache: CacheConfig,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        tp_size: int = 1,
        dcp_size: int = 1,
        dcp_rank: int = 0,
        layers: range | None = None,
        listener: Callable[[CacheEvent], None] | None = None,
    ) -> HybridCache:
        """Allocate the pools of a model.

        Args:
            config: the model.
            cache: counts, dtypes and what to keep.
            device: where the tensors go.
            dtype: of the activations; default what the configuration says (`model.config` says what the model has),
                bfloat16 for a bare text configuration.
            tp_size: ranks that share the KDA heads.
            dcp_size: ranks that share the tokens of the KV: a page covers `page_size · dcp_size` tokens.
            dcp_rank: which of them this is.
            layers: only these layers.
            listener: called with every `CacheEvent`.

        Raises:
            ConfigError: `tp_size` does not divide the KDA heads, or there is no such rank.
        """
        if not 0 <= dcp_rank < dcp_size:
            raise ConfigError(f"dcp_rank={dcp_rank} is not one of dcp_size={dcp_size} ranks")
        text = config.text if isinstance(config, KimiK3Config) else config
        if dtype is None:
            dtype = getattr(torch, config.dtype) if isinstance(config, KimiK3Config) else torch.bfloat16
        pool = HybridPool(text, cache, dtype=dtype, device=device, tp_size=tp_size, layers=layers)
        allocator = HybridAllocator(
            cache.num_pages,
            cache.num_slots,
            cache.page_size * dcp_size,
            checkpoint_grid=cache.checkpoint_grid,
            track_interval=cache.track_interval,
            keep_turn_ends=cache.keep_turn_ends,
            prefix_cache=cache.prefix_cache,
            listener=listener,
        )
        return cls(allocator, pool, cache, dcp_size=dcp_size, dcp_rank=dcp_rank)

    @property
    def page_tokens(self) -> int:
        """Tokens of a page, over all ranks that share them."""
        return self.config.page_size * self.dcp_size

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds; `cached_pages` more can be had by eviction."""
        return self.allocator.pages.num_free

    @property
    def free_slots(self) -> int:
        """Slots that nobody holds; `cached_slots` more can be had by eviction."""
        return self.allocator.slots.num_free

    @property
    def cached_pages(self) -> int:
        """Pages that only cached prefixes hold."""
        return self.allocator.pages.num_idle

    @property
    def cached_slots(self) -> int:
        """Slots that only checkpoints hold."""
        return self.allocator.slots.num_idle

    def view(self, layer: int) -> KDAState | LatentPages:
        """The memory of one layer, for the model."""
        return self.pool.view(layer)

    def open(
        self, prompt_ids: Sequence[int], *, namespace: str = "", media: Sequence[MediaKey] = (), reuse: bool = True
    ) -> Lease:
        """Take a slot for a request, and what is cached of its prompt; see `HybridAllocator.open`."""
        ids = _integers(prompt_ids)
        try:
            return self.allocator.open(ids, namespace=namespace, media=media, reuse=reuse)
        except CapacityError:
            if not self.allocator.has_ops:
                raise
            self.issue()  # frees the sources of scheduled copies
            return self.allocator.open(ids, namespace=namespace, media=media, reuse=reuse)

    @contextlib.contextmanager
    def lease(
        self, prompt_ids: Sequence[int], *, namespace: str = "", media: Sequence[MediaKey] = ()
    ) -> Iterator[Lease]:
        """`open` and `close` as a context."""
        lease = self.open(prompt_ids, namespace=namespace, media=media)
        try:
            yield lease
        finally:
            self.close(lease)

    def grow(self, lease: Lease, *, tokens: int) -> None:
        """Reserve pages for `tokens` beyond the committed length; the same call twice reserves once."""
        try:
            self.allocator.grow(lease, tokens)
        except CapacityError:
            if not self.allocator.has_ops:
                raise
            self.issue()
            self.allocator.grow(lease, tokens)

    def make_batch(
        self, work: Sequence[tuple[Lease, Sequence[int]]], *, mode: Literal["prefill", "decode", "verify"] = "prefill"
    ) -> Batch:
        """Describe one step: the new ids of each lease, behind its committed tokens.

        Issues what is scheduled (`issue`) and, for a prefill, reserves slots for the states that the step is to keep.
        One copy goes to the device. A verify step (the anchor and draft tokens) leaves KDA states as they are, and is
        followed by `commit_verified` instead of `commit`.

        Raises:
            ConfigError: a lease is closed, occurs twice, or has no room, or a verify step does not fit the scratch;
                nothing has been changed.
        """
        steps = [(lease, _integers(ids)) for lease, ids in work]
        if len({id(lease) for lease, _ in steps}) != len(steps):
            raise ConfigError("make_batch: a lease occurs twice")
        for lease, ids in steps:
            self.allocator._check_open(lease)
            self.allocator.check_room(lease, len(ids))
        scratch = self.pool.kda.scratch if mode == "verify" else None  # without one, a KDA layer refuses the batch
        if scratch is not None:
            _check_verify(scratch, [len(ids) for _, ids in steps])
        tokens = list(chain.from_iterable(ids for _, ids in steps))
        if tokens and (min(tokens) < 0 or max(tokens) >= 1 << 31):
            raise ConfigError(f"make_batch: token ids must be 0 .. 2^31 - 1, got {min(tokens)} .. {max(tokens)}")
        self.issue()
        saves = [
            (i, offset, slot)
            for i, (lease, ids) in enumerate(steps)
            for offset, slot in self.allocator.begin(lease, len(ids), saves=mode == "prefill")
        ]
        if scratch is not None:
            self._verified = {lease.number: (i, [*ids], lease.length) for i, (lease, ids) in enumerate(steps)}
        return self._pack([lease for lease, _ in steps], [len(ids) for _, ids in steps], tokens, saves, mode)

    def _pack(
        self,
        leases: list[Lease],
        lengths: list[int],
        tokens: list[int],
        saves: list[tuple[int, int, int]],
        mode: Literal["prefill", "decode", "verify"],
    ) -> Batch:
        cached = tuple([len(lease.tokens) for lease in leases])
        totals = [c + n for c, n in zip(cached, lengths, strict=True)]
        entries = self._new_entries(leases)
        parts: tuple[Sequence[int], ...] = (
            tokens,
            [0, *accumulate(lengths)],
            totals,
            [lease.slot for lease in leases],
            [slot for _, _, slot in saves],
            [slot for slot, _, _ in entries],
            [column for _, column, _ in entries],
            [page for _, _, page in entries],
        )
        width = max((len(lease.pages) for lease in leases), default=0)
        kept = tuple(i for i, _, _ in saves), tuple(o for _, o, _ in saves)
        if self.tell is not None:
            self.tell("batch", parts, cached, kept, width, mode)
        return self.build(parts, cached, kept, width, mode)

    def build(
        self,
        parts: Sequence[Sequence[int]],
        cached: tuple[int, ...],
        kept: tuple[tuple[int, ...], tuple[int, ...]],
        width: int,
        mode: Literal["prefill", "decode", "verify"],
    ) -> Batch:
        """Make the batch of a step that was described by integers, perhaps by another rank.

        Args:
            parts: token ids, offsets of the requests, lengths of their contexts, slots, slots of states to keep, and
                slot, column and page of the new entries of the page table.
            cached: tokens of each request before the step.
            kept: requests and offsets of the states to keep.
            width: columns of the page table.
            mode: of the step.
        """
        ids, cu, seq_lens, slots, save_slots, rows, columns, pages = _to_device(parts, self.pool.device)
        if width > self._table.shape[1]:
            wider = self._table.new_zeros(self._table.shape[0], max(width, 2 * self._table.shape[1]))
            wider[:, : self._table.shape[1]] = self._table
            self._table = wider
        if len(parts[5]):
            self._table[rows.long(), columns.long()] = pages
        table = self._table[:, :width].index_select(0, slots)
        totals = parts[2]
        lengths = [total - c for total, c in zip(totals, cached, strict=True)]
        batch = Batch(
            input_ids=ids.long(),
            cu_seqlens=cu,
            seq_lens=seq_lens,
            new_tokens=tuple(lengths),
            max_new=max(lengths, default=0),
            max_seq=max(totals, default=0),
            mode=mode,
            cached_tokens=cached,
            slots=slots,
            page_table=table,
            saves=StateSaves(*kept, save_slots) if kept[0] else None,
        )
        batch.place_rows(self.config.page_size, dcp_size=self.dcp_size, dcp_rank=self.dcp_rank)
        return batch

    def _new_entries(self, leases: Sequence[Lease]) -> list[tuple[int, int, int]]:
        """`(slot, column, page)` of the page table that the device does not have yet."""
        entries = []
        for lease in leases:
            owner, known = self._written.get(lease.slot, (0, 0))
            count = len(lease.pages)
            if owner != lease.number:
                entries += [(lease.slot, column, 0) for column in range(count, known)]
                known = 0
            elif known == count:
                continue
            entries += [(lease.slot, column, lease.pages[column]) for column in range(known, count)]
            self._written[lease.slot] = (lease.number, count)
        return entries

    def issue(self) -> None:
        """Issue the copies and zeroings that are scheduled, in order.

        `make_batch`, `commit` and `discard` do it; an engine that describes its steps itself calls this before each
        forward pass.
        """
        for kind, group in groupby(self.allocator.take_ops(), key=lambda op: op.kind):
            # within a run of one kind no target is a source: both are held until they have been issued
            self._do(kind, *_places(group))

    def _do(self, kind: str, *values: Sequence[int]) -> None:
        if self.tell is not None:
            self.tell(kind, *values)
        self.replay(kind, *values)

    def replay(self, kind: str, *values: Sequence[int]) -> None:
        """Do to these tensors what `tell` heard of, perhaps of another rank's: copies, zeroings, accepted states."""
        if kind == "verified":
            self._move_states(*values)
            return
        sources, targets = _to_device(values, self.pool.device)
        if kind == "zero":
            self.pool.kda.zero(targets.long())
        elif kind == "copy_slot":
            self.pool.kda.copy(sources.long(), targets.long())
        elif kind == "copy_page":
            self.pool.copy_pages(sources.long(), targets.long())
        else:
            self.pool.zero_pages(targets.long())

    def commit(self, lease: Lease, ids: Sequence[int]) -> None:
        """Count `ids` as context, once the forward pass over them has been issued, and publish what it kept.

        Raises:
            ConfigError: no room for them, or the step of this lease had other tokens, or was a verify step.
        """
        if lease.in_flight is not None and self._verified.get(lease.number, (0, [], -1))[2] == lease.length:
            raise ConfigError(f"lease {lease.number}: a verify step is followed by commit_verified")
        self.allocator.commit(lease, _integers(ids))
        if self.allocator.has_ops:
            self.issue()

    def commit_verified(self, work: Sequence[tuple[Lease, Sequence[int]]]) -> None:
        """Count the accepted tokens of a verify step as context, and move the KDA states behind the last of them.

        States at multiples of the track interval on the way are kept as checkpoints.

        Args:
            work: leases of the last verify step, each once, with the anchor and the accepted drafts: the first tokens
                that the step had for it, at least one.

        Raises:
            ConfigError: a lease was not in that step, or its tokens were others; nothing has been changed.
        """
        entries = [(lease, _integers(ids)) for lease, ids in work]
        for n, (lease, ids) in enumerate(entries):
            self.allocator._check_open(lease)
            _, known, start = self._verified.get(lease.number, (0, [], -1))
            if start != lease.length or lease.in_flight != len(known) or lease in [other for other, _ in entries[:n]]:
                raise ConfigError(f"commit_verified: lease {lease.number} has no verify step that waits for this")
            if not ids or ids != known[: len(ids)]:
                raise ConfigError(
                    f"commit_verified: lease {lease.number}: {ids} are not the first tokens of its step, {known}"
                )
        if not entries:
            return
        saves = [
            (i, *kept) for i, (lease, ids) in enumerate(entries) for kept in self.allocator.accept(lease, len(ids))
        ]
        self._do(
            "verified",
            [self._verified[lease.number][0] for lease, _ in entries],
            [lease.slot for lease, _ in entries],
            [len(ids) - 1 for _, ids in entries],
            [slot for _, _, slot in saves],
            [i for i, _, _ in saves],
            [offset for _, offset, _ in saves],
        )
        for lease, ids in entries:
            del self._verified[lease.number]
            self.allocator.commit(lease, ids)
        if self.allocator.has_ops:
            self.issue()

    def _move_states(self, *values: Sequence[int]) -> None:
        """Rows of the scratch, slots and accepted steps; slots, requests and offsets of the states to keep."""
        *moved, requests, offsets = values
        rows, slots, steps, targets = _to_device(moved, self.pool.device)
        kept = StateSaves(tuple(requests), tuple(offsets), targets) if requests else None
        assert self.pool.kda.scratch is not None, "there was a verify step"
        self.pool.kda.commit(self.pool.kda.scratch, slots, steps, kept, rows=rows)

    def close(self, lease: Lease, *, donate: bool = True) -> None:
        """Give the memory of a request back; legal at any moment, idempotent.

        Args:
            lease: the lease.
            donate: keep what was computed, for later requests.
        """
        self.allocator.close(lease, donate=donate)

    def discard(self, lease: Lease) -> None:
        """Close a lease whose contents are not to be trusted: nothing of it can match, its memory is zeroed."""
        self.allocator.discard(lease)
        self.issue()

    def clear(self) -> int:
        """Forget all cached prefixes; returns how many tokens of KV they had. Open leases go on."""
        return self.allocator.clear()

    def check(self) -> None:
        """Raise AssertionError if a page or slot is lost, has a wrong count of owners, or the tree is inconsistent."""
        self.allocator.check()
        for slot, (number, count) in self._written.items():
            lease = self.allocator.leases.get(number)
            fits = lease is None or (lease.slot == slot and count <= len(lease.pages))
            assert fits, "a row of the page table is not of its lease"

    def stats(self) -> dict[str, int]:
        """Sizes, hits, and what was stored, evicted and skipped, as counts."""
        return {
            "num_pages": self.config.num_pages,
            "num_slots": self.config.num_slots,
            "page_size": self.page_tokens,
            "checkpoint_grid": self.config.checkpoint_grid,
            "free_pages": self.free_pages,
            "free_slots": self.free_slots,
            **self.allocator.stats(),
        }

    def dump(self) -> dict[str, object]:
        """Everything that is held and cached, for debugging."""
        return {**self.stats(), "bytes": self.pool.nbytes, **self.allocator.dump()}


def _check_verify(scratch: KDAScratch, lengths: Sequence[int]) -> None:
    longest = max(lengths, default=0)
    if len(lengths) > scratch.rows or longest > scratch.width or min(lengths, default=1) < 1:
        raise ConfigError(
            f"make_batch: the verify scratch has {scratch.rows} rows of 1 .. {scratch.width} tokens, the step has "
            f"{len(lengths)} of {min(lengths)} .. {longest}"
        )


def _places(ops: Iterable[Op]) -> tuple[list[int], list[int]]:
    """Sources and targets."""
    listed = list(ops)
    return [op.source for op in listed], [op.target for op in listed]


def _integers(ids: Sequence[int] | Tensor) -> list[int]:
    if isinstance(ids, list):
        return ids
    if isinstance(ids, torch.Tensor):
        listed: list[int] = ids.tolist()
        return listed
    return list(ids)


def _to_device(parts: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Lists of integers as int32 tensors, with one copy to the device that does not wait for it."""
    packed = array("i")
    for part in parts:
        packed.extend(part)
    if not packed:
        return [torch.zeros(0, dtype=torch.int32, device=device) for _ in parts]
    host = torch.frombuffer(packed, dtype=torch.int32)
    # on a CPU the tensor keeps the array alive
    moved = host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
    return [*torch.split(moved, [len(part) for part in parts])]
