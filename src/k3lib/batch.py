"""One step of packed tokens, and the views of cache memory that layers read and write.

Shapes: T packed tokens, B requests, M pages a request, N pool rows, H heads, K key dim, V value dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from k3lib.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["Batch", "CacheViews", "FeatureTap", "KDAState", "LatentPages", "RouteTap", "StateSaves", "VerifyScratch"]

Mode = Literal["prefill", "decode", "verify"]


@dataclass(slots=True)
class VerifyScratch:
    """Where a verify step of one KDA layer leaves what its rollback needs; the committed state stays as it is.

    Row i belongs to request i of the batch, entry t to its t-th new token. R rows, D tokens a row, C convolution
    channels. Either `states` or the other four are given.

    Attributes:
        inputs: `[R, D, C]`, projected inputs of the convolution.
        states: `[R, D, H, V, K]`, the state after each token.
        k: `[R, D, H, K]`, after the convolution, not normalised.
        v: `[R, D, H, V]`, after the convolution.
        log_decay: `[R, D, H, K]` fp32, as `kda_gate` gives it.
        beta: `[R, D, H]` fp32, after the sigmoid.
    """

    inputs: Tensor
    states: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    log_decay: Tensor | None = None
    beta: Tensor | None = None

    @property
    def kind(self) -> Literal["states", "replay"]:
        """States kept per position, or inputs kept and replayed."""
        return "replay" if self.states is None else "states"


@dataclass(slots=True)
class KDAState:
    """One layer's view of the state pool. Row 0 is the null slot.

    Attributes:
        state: `[N, H, V, K]`, value dimension first.
        conv: `[N, width - 1, channels]`, oldest first, channels q | k | v.
        verify: scratch of a pool made for speculation.
    """

    state: Tensor
    conv: Tensor
    verify: VerifyScratch | None = None


@dataclass(slots=True)
class LatentPages:
    """One layer's view of the KV pool. Page 0 is the null page.

    Attributes:
        pages: `[num_pages + 1, page_size, latent + rope width]`.
    """

    pages: Tensor


class CacheViews(Protocol):
    """What the model needs of a cache: the memory of one layer."""

    def view(self, layer: int) -> KDAState | LatentPages:
        """Return the memory of layer `layer` (0-based)."""
        ...


@dataclass(slots=True)
class StateSaves:
    """Interior states to keep: any number per request and step.

    Attributes:
        requests: index of the request in `cu_seqlens`.
        offsets: new tokens of that request consumed when the state is taken, 1 .. its number of new tokens.
        slots: `[S]` int32, pool rows that receive the recurrent and the convolution state; 0 = padding.
    """

    requests: tuple[int, ...]
    offsets: tuple[int, ...]
    slots: Tensor

    def __post_init__(self) -> None:
        if not len(self.requests) == len(self.offsets) == self.slots.numel():
            raise ConfigError(
                f"StateSaves: {len(self.requests)} requests, {len(self.offsets)} offsets and "
                f"{self.slots.numel()} slots must be equally many"
            )


@dataclass(slots=True)
class FeatureTap:
    """Hidden states for a draft, filled by the model and consumed per step.

    Attributes:
        layers: 0-based; the value *after* that layer.
        kind: "prefix" (the running sum) or "mixture" (what the next reader would see, un-normed).
        out: `[T, len(layers) * hidden]` after the call, in the order of `layers`.
    """

    layers: tuple[int, ...]
    kind: Literal["prefix", "mixture"]
    out: Tensor | None = None


@dataclass(slots=True)
class RouteTap:
    """Routing replay.

    Attributes:
        ids: `[T, MoE layers, top_k]` int32, on the device of the model. MoE layers of the whole model are counted,
            also by a slice of it, which touches only its own.
        replay: True uses these ids, with weights from the model's own scores; False writes the chosen ids here.
    """

    ids: Tensor
    replay: bool

    def check(self, shape: tuple[int, int, int], num_experts: int, device: torch.device) -> None:
        """Refuse ids that do not fit; values are looked at only on a CPU, where that waits for nothing.

        Args:
            shape: T, MoE layers, top_k.
            num_experts: given ids lie below it.
            device: of the model.

        Raises:
            ConfigError: names what was found and what is needed.
        """
        ids = self.ids
        if tuple(ids.shape) != shape or ids.dtype != torch.int32:
            raise ConfigError(
                f"routes: ids must be int32 [tokens, MoE layers, experts a token] = {list(shape)}, got "
                f"{str(ids.dtype).removeprefix('torch.')} {list(ids.shape)}"
            )
        if ids.device != device:
            raise ConfigError(f"routes: ids are on {ids.device}, the model on {device}")
        if not self.replay:
            if any(step == 0 and size > 1 for step, size in zip(ids.stride(), ids.shape, strict=True)):
                raise ConfigError("routes: ids to be written must not be expanded: several entries share memory")
        elif ids.device.type == "cpu" and ids.numel():
            low, high = (int(x) for x in ids.aminmax())
            if low < 0 or high >= num_experts:
                raise ConfigError(
                    f"routes: id {low if low < 0 else high} is not one of the experts 0..{num_experts - 1}"
                )


@dataclass(slots=True, kw_only=True)
class Batch:
    """New tokens of several requests, packed end to end, and where their cache lives.

    Host integers stand beside the device tensors, so that nothing is read back during a step.

    Attributes:
        input_ids: `[T]` int64; layers used alone do not need it.
        cu_seqlens: `[B + 1]` int32, offsets of the new tokens of each request.
        seq_lens: `[B]` int32, length of the whole context after this step, over all DCP ranks.
        new_tokens: host copy of the lengths in `cu_seqlens`.
        max_new: longest request of this step.
        max_seq: longest context after this step.
        mode: which kernel is natural; the references compute the same in every mode.
        cached_tokens: host copy of the tokens of each request that were cached before this step.
        slots: `[B]` int32, KDA state slot of each request; 0 is the null slot, negative means none.
        page_table: `[B, M]` int32, KV pages of each request.
        rows: `[T]` int64, page * page_size + offset of each new token on this rank; 0 = not mine.
        key_lens: `[T]` int32, rows of this rank's pages that each new token may see, itself included.
        saves: interior KDA states to keep.
        routes: record or replay expert ids.
        replica_tokens: tokens of every replica in this step, where several share their experts; empty asks them.
        dcp_size, dcp_rank: ranks that share the tokens of the pages, and which of them this is; `place_rows` sets them.
        split_over: ranks over which the new tokens of the requests are split, in order; these are this one's (see
            `k3lib.parallel.kcp.prefill_split`).
    """

    input_ids: Tensor | None
    cu_seqlens: Tensor
    seq_lens: Tensor
    new_tokens: tuple[int, ...]
    max_new: int
    max_seq: int
    mode: Mode
    cached_tokens: tuple[int, ...] = ()
    slots: Tensor | None = None
    page_table: Tensor | None = None
    rows: Tensor | None = None
    key_lens: Tensor | None = None
    saves: StateSaves | None = None
    routes: RouteTap | None = None
    replica_tokens: tuple[int, ...] = ()
    dcp_size: int = 1
    dcp_rank: int = 0
    split_over: int = 1
    _prefix: list[PrefixPiece] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.cached_tokens and self.new_tokens:
            # made by hand without the host copy: read it once here, never in a layer
            totals = self.seq_lens.tolist()
            self.cached_tokens = tuple(total - new for total, new in zip(totals, self.new_tokens, strict=True))

    @property
    def num_tokens(self) -> int:
        """Number of new tokens, T."""
        return sum(self.new_tokens)

    @classmethod
    def pack(cls, sequences: Sequence[Tensor | Sequence[int]]) -> Batch:
        """Whole sequences of token ids, stateless.

        Args:
            sequences: one `[length]` integer tensor or list of ints per request; tensors of one device.

        Raises:
            ConfigError: an entry is not one-dimensional or not of an integer type.
        """
        tensors = [torch.as_tensor(s, dtype=None if len(s) else torch.int64) for s in sequences]
        for i, ids in enumerate(tensors):
            if ids.ndim != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
                raise ConfigError(
                    f"Batch.pack: sequence {i} must be a 1-D tensor of integers, got shape {tuple(ids.shape)} of "
                    f"{ids.dtype}"
                )
        batch = cls.lengths([ids.numel() for ids in tensors], device=tensors[0].device if tensors else None)
        batch.input_ids = torch.cat([ids.long() for ids in tensors]) if tensors else torch.zeros(0, dtype=torch.int64)
        return batch

    @classmethod
    def lengths(cls, lengths: Sequence[int], *, device: torch.device | str | None = None) -> Batch:
        """Whole sequences without ids, for a layer used alone."""
        return cls.of(lengths, mode="prefill", device=device)

    @classmethod
    def decode(cls, slots: Sequence[int], input_ids: Tensor | None = None) -> Batch:
        """One token for each of `slots`, for layers whose only cache is a KDA state."""
        device = None if input_ids is None else input_ids.device
        return cls.of([1] * len(slots), slots=slots, mode="decode", input_ids=input_ids, device=device)

    @classmethod
    def of(  # noqa: PLR0913 - the one place that knows how the fields hang together
        cls,
        lengths: Sequence[int],
        *,
        mode: Mode = "prefill",
        cached_tokens: Sequence[int] | None = None,
        slots: Sequence[int] | None = None,
        page_tables: Sequence[Sequence[int]] | None = None,
        page_size: int = 0,
        input_ids: Tensor | None = None,
        saves: StateSaves | None = None,
        device: torch.device | str | None = None,
    ) -> Batch:
        """Make a batch from host integers: the way to use pools of your own.

        Args:
            lengths: new tokens of each request; 0 is allowed.
            mode: "prefill", "decode" or "verify".
            cached_tokens: tokens of each request that are in the pools already; default none.
            slots: KDA state slot of each request.
            page_tables: KV pages of each request, with room for its cached and new tokens.
            page_size: tokens a page; needed with `page_tables`.
            input_ids: `[sum(lengths)]`.
            saves: interior KDA states to keep.
            device: where the tensors go; default that of `input_ids`, else CPU.

        Raises:
            ConfigError: the counts disagree, or the pages of a request do not hold its tokens.
        """
        n = len(lengths)
        cached = tuple(cached_tokens) if cached_tokens is not None else (0,) * n
        for name, given in (("cached_tokens", cached), ("slots", slots), ("page_tables", page_tables)):
            if given is not None and len(given) != n:
                raise ConfigError(f"Batch.of: {len(given)} {name} for {n} requests")
        if input_ids is not None and input_ids.numel() != sum(lengths):
            raise ConfigError(f"Batch.of: {input_ids.numel()} input_ids for {sum(lengths)} new tokens")
        if device is None and input_ids is not None:
            device = input_ids.device
        totals = [c + m for c, m in zip(cached, lengths, strict=True)]
        batch = cls(
            input_ids=input_ids,
            cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device),
            seq_lens=torch.tensor(totals, dtype=torch.int32, device=device),
            new_tokens=tuple(lengths),
            max_new=max(lengths, default=0),
            max_seq=max(totals, default=0),
            mode=mode,
            cached_tokens=cached,
            slots=None if slots is None else torch.tensor(list(slots), dtype=torch.int32, device=device),
            saves=saves,
        )
        if page_tables is not None:
            batch._place(page_tables, page_size, totals, device)
        return batch

    @classmethod
    def static(
        cls,
        num_requests: int,
        tokens_per_request: int = 1,
        *,
        max_pages: int,
        device: torch.device | str | None = None,
    ) -> Batch:
        """A step of fixed shape, for a captured graph: `fill` copies a real one into it.

        All its requests are padding: tokens 0, the null slot, the null page, row 0, one visible row.

        Args:
            num_requests: requests of the step.
            tokens_per_request: new tokens of each: 1 in a decode step, more in a verify step.
            max_pages: width of the page table.
            device: where the tensors go.

        Raises:
            ConfigError: a count below 1.
        """
        for name, value in (("num_requests", num_requests), ("tokens_per_request", tokens_per_request)):
            if value < 1:
                raise ConfigError(f"Batch.static: {name} must be >= 1, got {value}")
        total = num_requests * tokens_per_request
        batch = cls.of(
            [tokens_per_request] * num_requests,
            mode="decode" if tokens_per_request == 1 else "verify",
            slots=[0] * num_requests,
            input_ids=torch.zeros(total, dtype=torch.int64, device=device),
        )
        batch.page_table = torch.zeros(num_requests, max(1, max_pages), dtype=torch.int32, device=device)
        batch.rows = torch.zeros(total, dtype=torch.int64, device=device)
        batch.key_lens = torch.ones(total, dtype=torch.int32, device=device)
        return batch

    def fits(self, batch: Batch) -> bool:
        """Whether `fill` takes this batch."""
        table, mine = batch.page_table, self.page_table
        return (
            batch.mode == self.mode
            and len(batch.new_tokens) <= len(self.new_tokens)
            and all(0 < n <= self.max_new for n in batch.new_tokens)
            and batch.input_ids is not None
            and batch.slots is not None
            and table is not None
            and mine is not None
            and table.shape[1] <= mine.shape[1]
            and batch.saves is None
            and batch.routes is None
        )

    def fill(self, batch: Batch) -> None:
        """Copy a step into the tensors of this `static` one; what it does not use becomes padding again.

        A request of a verify step may have fewer tokens than the static one has for it: `place_of` says where its
        tokens are. Those behind them go to the null page, and rollback never looks at what they leave elsewhere.

        Raises:
            ConfigError: another mode, more requests or tokens of one, a wider page table, or interior states or routes
                to keep.
        """
        if not self.fits(batch):
            raise ConfigError(
                f"Batch.fill: {len(batch.new_tokens)} requests of {batch.max_new} tokens ({batch.mode}) do not fit "
                f"{len(self.new_tokens)} of {self.max_new} ({self.mode}), or they keep states or routes"
            )
        table, source = self.page_table, batch.page_table
        assert table is not None and source is not None, "checked by fits"  # noqa: PT018
        requests = len(batch.new_tokens)
        table[:requests, : source.shape[1]].copy_(source)
        table[requests:, :1].zero_()  # the only entry that padding looks at
        padding = {"input_ids": 0, "seq_lens": self.max_new, "slots": 0, "rows": 0, "key_lens": 1}
        place = self.place_of(batch)
        for name, value in padding.items():
            target, given = getattr(self, name), getattr(batch, name)
            if place is not None and len(target) > len(self.new_tokens):  # one entry a token
                target.fill_(value)
                target[place] = given
            else:
                target[: len(given)].copy_(given)
                target[len(given) :].fill_(value)
        self.max_seq = batch.max_seq
        self.cached_tokens = batch.cached_tokens + (0,) * (len(self.new_tokens) - requests)

    def place_of(self, batch: Batch) -> Tensor | None:
        """Where this `static` step has the tokens of a batch, `[T]` int64; None if they simply come first."""
        if all(n == self.max_new for n in batch.new_tokens):
            return None
        width = self.max_new
        place = torch.tensor([i * width + t for i, n in enumerate(batch.new_tokens) for t in range(n)])
        device = self.cu_seqlens.device
        return place if device.type == "cpu" else place.pin_memory().to(device, non_blocking=True)

    def _place(
        self,
        page_tables: Sequence[Sequence[int]],
        page_size: int,
        totals: Sequence[int],
        device: torch.device | str | None,
    ) -> None:
        if page_size < 1:
            raise ConfigError(f"Batch.of: page_size must be >= 1 with page_tables, got {page_size}")
        for i, (pages, total) in enumerate(zip(page_tables, totals, strict=True)):
            if len(pages) * page_size < total:
                raise ConfigError(
                    f"Batch.of: request {i} has {total} tokens but its {len(pages)} pages of {page_size} hold "
                    f"{len(pages) * page_size}"
                )
        width = max((len(p) for p in page_tables), default=0)
        table = torch.tensor([[*p, *[0] * (width - len(p))] for p in page_tables], dtype=torch.int32)
        self.page_table = table.reshape(len(totals), width).to(device=device)
        self.place_rows(page_size)

    def place_rows(self, page_size: int, *, dcp_size: int = 1, dcp_rank: int = 0) -> None:
        """Set `rows` and `key_lens` from `page_table`: where the new tokens go, and what each may see.

        Args:
            page_size: rows of a page on one rank.
            dcp_size: ranks that share the tokens: token i of a request belongs to rank `i % dcp_size`, and a page
                covers `page_size · dcp_size` tokens.
            dcp_rank: which of them this is. Tokens of the others get row 0, the null row, so their writes are dropped.
        """
        table = self.page_table
        if table is None:
            raise ConfigError("Batch.place_rows: the batch has no page_table")
        self.dcp_size, self.dcp_rank, self._prefix = dcp_size, dcp_rank, None
        device, count = table.device, self.num_tokens
        if not count:
            self.rows = torch.zeros(0, dtype=torch.int64, device=device)
            self.key_lens = torch.zeros(0, dtype=torch.int32, device=device)
            return
        request = torch.arange(len(self.new_tokens), device=device)
        if self.max_new == 1 and count == len(self.new_tokens):
            position = self.seq_lens.long() - 1
        else:
            new = self.cu_seqlens.diff()
            request = torch.repeat_interleave(request, new, output_size=count)
            first = self.seq_lens - self.cu_seqlens[1:]  # what to add to a packed index
            position = torch.arange(count, device=device) + first.long()[request]
        self.rows = _rows_of(table, request, position, page_size, dcp_size)
        if dcp_size == 1:
            self.key_lens = (position + 1).to(torch.int32)
            return
        self.rows = torch.where(position % dcp_size == dcp_rank, self.rows, 0)
        self.key_lens = ((position + dcp_size - dcp_rank) // dcp_size).to(torch.int32)

    def note_dcp(self, size: int, rank: int) -> None:
        """Note whose `rows` and `key_lens` these are, in a batch whose rows were placed by hand.

        Raises:
            ConfigError: they were placed for another rank, or for other sizes.
        """
        if (self.dcp_size, self.dcp_rank) == (size, rank):
            return
        if self.dcp_size > 1:
            raise ConfigError(
                f"the batch was placed for dcp_rank={self.dcp_rank} of dcp_size={self.dcp_size}, the layer is rank "
                f"{rank} of {size}"
            )
        self.dcp_size, self.dcp_rank, self._prefix = size, rank, None

    def prefix_pieces(self, page_size: int, piece_tokens: int = 4096) -> list[PrefixPiece]:
        """Cut the cached tokens of all requests into pieces of bounded size, for prefill over a cached prefix.

        Computed once per batch on the host and shared by all MLA layers. Each piece holds at most `piece_tokens`
        cached tokens, so the memory of a prefill step does not grow with the context. Ranks that share the tokens
        (`dcp_size`) cut alike, so that they gather together.
        """
        if self._prefix is None:
            self._prefix = _cut_prefix(self, page_size, piece_tokens)
        return self._prefix


@dataclass(slots=True)
class PrefixPiece:
    """A run of cached rows.

    Attributes:
        rows: `[n]` int64 in the pool; of ranks that share the tokens this rank's, filled up with row 0 to the largest
            share m.
        cu_seqlens_k: `[B + 1]` int32, tokens of each request in this piece, of all ranks.
        order: `[n]` int64, where each token, in sequence order, lies in the shares of all ranks one behind the other
            `[dcp_size · m]`; None if there is one rank.
    """

    rows: Tensor
    cu_seqlens_k: Tensor
    order: Tensor | None = None


def _cut_prefix(batch: Batch, page_size: int, piece_tokens: int) -> list[PrefixPiece]:
    table = batch.page_table
    if table is None:
        return []
    device = table.device
    # requests without new tokens need no prefix
    want = [c if n else 0 for c, n in zip(batch.cached_tokens, batch.new_tokens, strict=True)]
    spans: list[list[tuple[int, int, int]]] = []  # per piece: (request, first token, number of tokens)
    room = 0
    for i, tokens in enumerate(want):
        start = 0
        while start < tokens:
            if room == 0:
                spans.append([])
                room = piece_tokens
            take = min(room, tokens - start)
            spans[-1].append((i, start, take))
            start, room = start + take, room - take
    pieces = []
    for piece in spans:
        counts = [0] * len(want)
        for i, _, take in piece:
            counts[i] += take
        request = torch.cat([torch.full((take,), i) for i, _, take in piece])
        position = torch.cat([torch.arange(start, start + take) for _, start, take in piece])
        cu = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
        pieces.append(_piece(batch, table, request, position, page_size, cu))
    return pieces


def _piece(
    batch: Batch, table: Tensor, request: Tensor, position: Tensor, page_size: int, cu_seqlens_k: Tensor
) -> PrefixPiece:
    """The rows of some cached tokens, whose requests and positions are on the host."""
    size, device, order, most = batch.dcp_size, table.device, None, len(position)
    if size > 1:
        owner = position % size
        shares = torch.bincount(owner, minlength=size)
        most = int(shares.max())
        order = torch.empty_like(position)
        for rank, share in enumerate(shares.tolist()):
            order[owner == rank] = rank * most + torch.arange(share)
        order, mine = order.to(device), (owner == batch.dcp_rank).nonzero()[:, 0]
        request, position = request[mine], position[mine]
    rows = _rows_of(table, request.to(device), position.to(device), page_size, size)
    return PrefixPiece(torch.nn.functional.pad(rows, (0, most - len(rows))), cu_seqlens_k, order)


def _rows_of(table: Tensor, request: Tensor, position: Tensor, page_size: int, dcp_size: int) -> Tensor:
    """Pool rows `[n]` int64 of tokens, on the rank that owns each."""
    page = table[request, position // (page_size * dcp_size)].long()
    return page * page_size + position // dcp_size % page_size
