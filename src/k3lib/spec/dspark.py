"""DSPARK: a draft model that proposes a block of tokens in one forward, from the target's hidden states."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from k3lib import ops
from k3lib.draws import draw, signed, uniforms
from k3lib.errors import ConfigError
from k3lib.parallel.group import LOCAL, Group
from k3lib.spec.draft_files import load_draft
from k3lib.spec.draft_graphs import Block, DraftGraphs, Proposed
from k3lib.spec.proposer import MAX_BLOCK, Draft

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from os import PathLike

    from torch import Tensor

    from k3lib.cache import HybridCache, Lease
    from k3lib.engine.request import SamplingParams
    from k3lib.model import KimiK3ForCausalLM
    from k3lib.spec.draft_pool import DraftPool
    from k3lib.spec.drafts import BlockDraft
    from k3lib.spec.proposer import DraftContext

__all__ = ["DSpark"]

_LANE = 8  # of `uniforms`: the lower ones are the target's
_COLDEST = 1e-5  # least temperature that is divided by


class _Bound(NamedTuple):
    model: KimiK3ForCausalLM
    pool: DraftPool


class _Span(NamedTuple):
    """Tokens of a request that become context: from `begin` to `end`.

    Attributes:
        begin, end: positions.
        pages: those that hold them, from the one of `begin` on.
        first_row: where their features begin among those of all tokens of the step.
    """

    begin: int
    end: int
    pages: list[int]
    first_row: int


class DSpark:
    """Proposes with a draft model. Satisfies `Proposer`, `Bound` and `Shared`.

    The draft's keys and values of the context lie in the pages of the requests, beside the target's, so whoever finds
    a prefix in the cache finds them, too. A block itself is never stored.

        spark = DSpark.from_pretrained("RadixArk/Kimi-K3-DSpark", device=model.device, dtype=model.dtype)
        engine = Engine(model, EngineConfig(spec=SpecConfig(draft=spark)))

    Over many ranks, those of the first stage run it together: heads and MLP are cut alike, embedding and head are the
    target's, cut by vocabulary, and each rank keeps rows of its own heads, of all tokens (also where the target's are
    shared by context parallelism). Rank 0 alone would need no message for a block, but a whole draft, copies of
    embedding and head, and rows of all heads; and all ranks would do without that memory, because their pools have one
    size. Taking in context costs no message: what a rank has to do for it travels with the next one.

    Without an engine, `draft` is a module of its own: see `BlockDraft`.

    Attributes:
        draft: the model, or this rank's part.
        block_size, feature_layers, feature_kind: see `Proposer`; taps are a property of the draft.
        graphs: replays blocks on a CUDA device; None before `bind`, and elsewhere.
        tell: see `Shared`.
    """

    def __init__(self, draft: BlockDraft, *, block_size: int | None = None) -> None:
        """Wrap a draft model.

        Args:
            draft: the model.
            block_size: tokens to propose; None = as many as the draft was made for.

        Raises:
            ConfigError: `block_size` is not 1 .. 15.
        """
        size = draft.config.block_size if block_size is None else block_size
        if type(size) is not int or not 1 <= size <= MAX_BLOCK:
            raise ConfigError(f"DSpark: block_size must be 1 .. {MAX_BLOCK}, got {size!r}")
        self.draft = draft
        self.block_size = size
        self.feature_layers: tuple[int, ...] = draft.config.feature_layers
        self.feature_kind: Literal["prefix", "mixture"] = draft.config.feature_kind
        self.graphs: DraftGraphs | None = None
        self.tell: Callable[..., None] | None = None
        self._bound: _Bound | None = None
        self._ends: dict[str, tuple[int, int]] = {}  # of each request its lease, and how many tokens have rows there

    @classmethod
    def from_pretrained(
        cls,
        path: str | PathLike[str],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        block_size: int | None = None,
        tp: Group = LOCAL,
        revision: str | None = None,
        cut: Literal["always", "evenly"] = "always",
    ) -> DSpark:
        """Load a draft; arguments and errors as in `load_draft` and the constructor."""
        draft = load_draft(path, tp=tp, dtype=dtype, device=device, revision=revision, cut=cut)
        return cls(draft, block_size=block_size)

    @property
    def cell_bytes(self) -> int:
        """Bytes that the context takes for each token of the target's pages."""
        return self.draft.new_pool(1, 1).nbytes // 2  # a pool of one row has the null row too

    @property
    def weight_bytes(self) -> int:
        """Bytes of this rank's weights."""
        return sum(p.nbytes for p in self.draft.parameters())

    @property
    def nbytes(self) -> int:
        """Bytes that the context takes, in all pages of the cache; 0 before `bind`."""
        return 0 if self._bound is None else self._bound.pool.nbytes

    def check(self, model: KimiK3ForCausalLM) -> None:
        """Refuse a target that the draft does not fit; a draft on the meta device fits targets on any.

        Raises:
            ConfigError: names both values.
        """
        _check_fit(self.draft, model)

    def summary(self) -> str:
        """What has to be the same on all ranks: configuration, dtype, and how it is cut."""
        return repr((self.draft.config, self.draft.dtype, self.block_size, self.draft.tp.size))

    def bind(self, model: KimiK3ForCausalLM, cache: HybridCache) -> None:
        """Take the target's embedding, head and pages, and allocate rows beside them.

        Raises:
            ConfigError: the draft does not fit the target, or is bound already. Names both values; nothing has been
                allocated.
        """
        if self._bound is not None:
            raise ConfigError("DSpark: this draft is bound to a target already; load it again for another one")
        self.check(model)
        _check_held(model)
        pool = self.draft.new_pool(cache.config.num_pages, cache.page_tokens)
        cache.pool.paged.append(pool)
        self._bound = _Bound(model, pool)
        if self.draft.device.type == "cuda":
            self.graphs = DraftGraphs(self._compute, self._facts)

    def _facts(self) -> Hashable:
        """What a graph of a block depends on."""
        model, pool = self._need_bound()
        ends = (pool.pages, next(self.draft.parameters()), model.model.embed_tokens.weight, model.lm_head.weight)
        return (ops.options_key(), model.family, *model.backends.items(), *[x.data_ptr() for x in ends])

    def drop(self, request_id: str) -> None:
        """Forget a request; its rows go with its pages."""
        self._ends.pop(request_id, None)

    # -- context --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def commit(self, contexts: Sequence[DraftContext]) -> None:
        """Store rows of the tokens that became context, `features` of each request being of the newest.

        Raises:
            ConfigError: no features or lease, other shapes, or tokens in front of them that never had rows. Nothing has
                been written.
        """
        size = self._need_bound().pool.page_size
        spans = [self._new_span(context, size) for context in contexts]
        if all(span.begin == span.end for span in spans):
            return
        if self.tell is not None:
            self.tell("commit", [tuple(span) for span in spans])
        self._take_in(spans, [context.features for context in contexts if context.features is not None])
        for context, span in zip(contexts, spans, strict=True):
            self._ends[context.request_id] = _lease(context).number, span.end

    def _take_in(self, spans: Sequence[_Span], features: Sequence[Tensor]) -> None:
        """Store rows of some tokens."""
        model, pool = self._need_bound()
        positions = [p for span in spans for p in range(span.begin, span.end)]
        rows = [row for span in spans for row in _rows_of(span, pool.page_size)]
        place, where = _to_device([positions, rows], self.draft.device)
        with model.use_backends():
            fused = self.draft.context(torch.cat(list(features)) if len(features) > 1 else features[0])
            pool.store(self.draft.rows(fused, place), where)

    @torch.no_grad()
    def replay(self, kind: str, *values: Any, features: Tensor | None = None) -> None:  # noqa: ANN401 - plain values
        """Do what `tell` heard of on rank 0."""
        if kind == "commit":
            assert features is not None, "the step had taps"
            spans = [_Span(*span) for span in values[0]]
            self._take_in(spans, [features[s.first_row : s.first_row + s.end - s.begin] for s in spans])
        else:
            self._run(*values)

    def _new_span(self, context: DraftContext, page_size: int) -> _Span:
        """The tokens that `features` are of."""
        features, end, name = context.features, len(context.token_ids) - 1, context.request_id
        width = self.draft.config.feature_width
        if features is None or features.ndim != 2 or features.shape[1] != width or features.dtype != self.draft.dtype:
            found = "none" if features is None else f"{list(features.shape)} of {features.dtype}"
            raise ConfigError(
                f"request {name}: the draft needs features [n, {width}] of {self.draft.dtype}, got {found}"
            )
        begin, known = end - features.shape[0], self._end_of(context)
        if not 0 <= begin <= known:
            raise ConfigError(
                f"request {name}: features of tokens {begin} .. {end - 1} were given, but the draft knows the context "
                f"up to {known} only: every step of the target has to be committed"
            )
        pages = _lease(context).pages
        if len(pages) * page_size < end:
            raise ConfigError(f"request {name}: its {len(pages)} pages of {page_size} do not hold {end} tokens")
        return _Span(begin, end, pages[begin // page_size : -(-end // page_size)], context.first_row)

    def _end_of(self, context: DraftContext) -> int:
        """Tokens of a request that have rows: those that were committed, or found in the cache."""
        lease = _lease(context)
        number, end = self._ends.get(context.request_id, (0, 0))
        return end if number == lease.number else lease.cached_len

    # -- proposals ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """Propose `block_size` tokens behind each anchor: one forward for all requests, one copy to the host.

        Greedy requests (`temperature` 0 or `top_k` 1) get the best tokens; for others each token is drawn from the
        softmax over all logits, with the temperature alone. What is drawn depends on the seed and the position, not on
        the rest of the batch.

        Raises:
            ConfigError: no lease, or part of a context was never committed.
        """
        pool = self._need_bound().pool
        if not contexts:
            return []
        for context in contexts:
            length, known = len(context.token_ids) - 1, self._end_of(context)
            if not 0 <= length <= known:
                raise ConfigError(
                    f"request {context.request_id}: a context of {length} tokens, but the draft knows {known} only: "
                    "every step of the target has to be committed"
                )
        asked = self._describe(contexts, pool)
        if self.tell is not None:
            self.tell("propose", *asked)
        found = self._run(*asked)
        listed, estimates = _to_host(found.tokens, found.confidence)
        return [
            Draft(
                ids,
                None if _is_greedy(context.params) else found.logits[i],
                None if estimates is None else estimates[i],
            )
            for i, (ids, context) in enumerate(zip(listed, contexts, strict=True))
        ]

    def _run(self, parts: Sequence[list[int]], width: int, draws: bool) -> Proposed:
        """What comes of the block that `_describe` describes."""
        anchors, starts, seeds, bits, pages = _to_device(parts, self.draft.device)
        step = Block(anchors, starts, seeds, bits.view(torch.float64), pages.view(len(anchors), width), draws)
        found = None if self.graphs is None else self.graphs.run(step)
        return self._compute(step) if found is None else found

    def _compute(self, step: Block) -> Proposed:
        model, pool = self._need_bound()
        with model.use_backends():
            hidden = self._run_block(step, model, pool)
        logits = model.scores(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)
        tokens, confidence = self._pick(hidden, logits, step)
        return Proposed(tokens, confidence, logits)

    def _describe(self, contexts: Sequence[DraftContext], pool: DraftPool) -> tuple[list[list[int]], int, bool]:
        """A block as plain values.

        Returns:
            Anchors, lengths of the contexts, seeds, bits of the temperatures, and page tables one behind the other;
            columns of a page table; and whether a request draws.
        """
        lengths = [len(context.token_ids) - 1 for context in contexts]
        counts = [-(-length // pool.page_size) for length in lengths]
        width = max(counts)
        tables = [
            [*_lease(context).pages[:count], *[0] * (width - count)]
            for context, count in zip(contexts, counts, strict=True)
        ]
        sampled = [not _is_greedy(context.params) for context in contexts]
        temperatures = [
            max(context.params.temperature, _COLDEST) if drawn else 0.0
            for context, drawn in zip(contexts, sampled, strict=True)
        ]
        parts = [
            [context.token_ids[-1] for context in contexts],
            lengths,
            [signed(context.seed) for context in contexts],
            [_as_bits(t) for t in temperatures],
            [page for table in tables for page in table],
        ]
        return parts, width, any(sampled)

    def _run_block(self, step: Block, model: KimiK3ForCausalLM, pool: DraftPool) -> Tensor:
        """What the head reads for each token to be proposed: `[B, block_size, D]`."""
        config = self.draft.config
        skipped = 0 if config.sample_from_anchor else 1  # the row of the anchor
        ids = step.anchors.new_full((len(step.anchors), self.block_size + skipped), config.mask_token_id)
        ids[:, 0] = step.anchors
        # where tokens are sharded over ranks, an embedding is too
        embedded = model.model.rows.gather(model.model.embed_tokens(ids.flatten()), ids.numel()).view(*ids.shape, -1)
        return self.draft.block(embedded, step.lengths, pool, step.page_table)[:, skipped:]

    def _pick(self, hidden: Tensor, logits: Tensor, step: Block) -> tuple[Tensor, Tensor | None]:
        """Choose tokens from left to right.

        Args:
            hidden: `[B, g, D]`.
            logits: `[B, g, V]` fp32; if a request draws, they become the probabilities that it draws from.
            step: anchors and how each request chooses.

        Returns:
            Tokens `[B, g]` and, if the draft has the head, their confidence `[B, g]`.
        """
        markov, head = self.draft.markov_head, self.draft.confidence_head
        draws = self._uniforms(step, logits.shape[1]) if step.draws else None
        is_drawn = step.temperatures > 0
        divisors = torch.where(is_drawn, step.temperatures, 1)[:, None].to(logits.dtype)
        previous, state = step.anchors, None
        tokens, embeddings = [], []
        for k in range(logits.shape[1]):
            row = logits[:, k]
            if markov is not None:
                said = markov(previous, hidden[:, k], state)
                row += said.bias
                state = said.state
                embeddings.append(said.embedding)
            previous = row.argmax(-1)
            if draws is not None:
                row.copy_((row / divisors).softmax(-1))
                # of logits that are not finite nothing can be drawn
                previous = torch.where(is_drawn, draw(row, draws[:, k]).clamp(min=0), previous)
            tokens.append(previous)
        confidence = None
        if head is not None:
            looks_back = self.draft.config.confidence_with_markov
            confidence = head(hidden, torch.stack(embeddings, dim=1)) if looks_back else head(hidden)
        return torch.stack(tokens, dim=1), confidence

    def _uniforms(self, step: Block, count: int) -> Tensor:
        """Numbers `[B, count]` to draw with.

        Each step of a request has its own: a token that is proposed a second time must not depend on what was accepted
        the first time.
        """
        places = step.lengths[:, None] * (MAX_BLOCK + 1) + torch.arange(count, device=step.lengths.device)
        seeds = step.seeds[:, None].expand_as(places)
        return uniforms(seeds.flatten(), places.flatten(), _LANE).view_as(places)

    def _need_bound(self) -> _Bound:
        if self._bound is None:
            raise ConfigError("DSpark: bind(model, cache) comes first")
        return self._bound


def _check_fit(draft: BlockDraft, model: KimiK3ForCausalLM) -> None:
    """Raise ConfigError if a draft cannot work for this target."""
    c, text = draft.config, model.config.text
    pairs = [
        ("vocab_size", c.vocab_size, text.vocab_size),
        ("hidden_size", c.hidden_size, text.hidden_size),
        ("target_hidden_size", c.target_hidden_size, text.hidden_size),
        ("target layers", c.target_layers or text.num_layers, text.num_layers),
        ("dtype", draft.dtype, model.dtype),
        ("device", model.device if draft.device.type == "meta" else draft.device, model.device),
    ]
    for name, mine, its in pairs:
        if mine != its:
            raise ConfigError(f"the draft does not fit the target: {name} is {mine} in the draft, {its} in the target")
    if max(c.feature_layers) >= text.num_layers:
        raise ConfigError(
            f"the draft does not fit the target: it taps layers {list(c.feature_layers)}, the target has layers 0.."
            f"{text.num_layers - 1}"
        )
    if draft.tp.size not in (1, model.mesh.tp.size):
        raise ConfigError(
            f"the draft is cut over tp_size={draft.tp.size} ranks, the target over "
            f"{model.mesh.tp.size}; cut it alike, or not at all"
        )


def _check_held(model: KimiK3ForCausalLM) -> None:
    """Raise ConfigError if a target has no embedding or head; an engine over stages gives the first one a head."""
    if model.model.has_embedding and "lm_head" in model._modules:
        return
    held = model.model.layer_range
    raise ConfigError(
        f"the draft needs the whole target, which has {model.config.text.num_layers} layers; this is a slice of layers "
        f"{held.start}..{held.stop - 1}"
    )


def _lease(context: DraftContext) -> Lease:
    if context.lease is None:
        raise ConfigError(f"request {context.request_id}: the draft needs its lease, got none")
    return context.lease


def _rows_of(span: _Span, page_size: int) -> list[int]:
    """Rows of the pool."""
    first = span.begin // page_size
    return [span.pages[p // page_size - first] * page_size + p % page_size for p in range(span.begin, span.end)]


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature == 0 or params.top_k == 1


def _as_bits(value: float) -> int:
    """The int64 with the bits of a double."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def _to_device(parts: Sequence[list[int]], device: torch.device) -> tuple[Tensor, ...]:
    """Lists of integers as int64 tensors, with one copy to the device that does not wait for it."""
    host = torch.tensor([x for part in parts for x in part], dtype=torch.int64)
    moved = host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
    return torch.split(moved, [len(part) for part in parts])


def _to_host(tokens: Tensor, confidence: Tensor | None) -> tuple[list[list[int]], list[list[float]] | None]:
    """Both tensors as lists, with one copy."""
    if confidence is None:
        return tokens.tolist(), None
    packed = torch.stack([tokens.double(), confidence.double()]).cpu()  # a double holds an id exactly
    return packed[0].long().tolist(), packed[1].tolist()
