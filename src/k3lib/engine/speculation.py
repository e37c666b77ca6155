"""Speculation in an engine: asks the proposer, refuses what cannot be verified, and counts what came of it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from typing import TYPE_CHECKING, Any, cast

import torch

from k3lib.batch import FeatureTap
from k3lib.engine.request import SpecReport
from k3lib.engine.verify import check_draft
from k3lib.errors import ConfigError
from k3lib.layers import Linear
from k3lib.spec import DSpark, NGram
from k3lib.spec.proposer import MAX_BLOCK, Bound, Draft, DraftContext, Proposer, Shared
from k3lib.spec.schedule import shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from k3lib.batch import Batch
    from k3lib.cache import HybridCache
    from k3lib.engine.ranks import Leader, LedModel
    from k3lib.engine.request import RequestState
    from k3lib.engine.scheduler import StepPlan, Work
    from k3lib.model import KimiK3ForCausalLM
    from k3lib.parallel.group import Chain
    from k3lib.spec.proposer import SpecConfig

__all__ = [
    "LedTarget",
    "Speculation",
    "bring_features",
    "draft_part",
    "joint_embedding",
    "joint_scores",
    "make_proposer",
]

logger = logging.getLogger(__name__)


def make_proposer(config: SpecConfig, model: KimiK3ForCausalLM) -> Proposer:
    """Return what a configuration names, checked; of a draft that ranks share, this rank's part.

    Raises:
        ConfigError: not a proposer, or its block is smaller than the one asked for, or it does not fit the target, or
            ranks have different ones.
        CheckpointError: a draft that cannot be loaded.
    """
    mesh, made = model.mesh, cast("Any", config.draft)
    if made == "ngram":
        made = NGram(block_size=config.block_size or 7)
    elif isinstance(made, str):
        device: torch.device | str = model.device if mesh.pp.rank == 0 else "meta"  # later stages only check it
        made = DSpark.from_pretrained(
            made, device=device, dtype=model.dtype, block_size=config.block_size, tp=mesh.tp, cut="evenly"
        )
    if not isinstance(made, Proposer):
        raise ConfigError(f"SpecConfig: draft must be a path, 'ngram' or a Proposer, got {type(made).__name__}")
    size = made.block_size
    if not isinstance(size, int) or not 1 <= size <= MAX_BLOCK:
        raise ConfigError(f"the proposer's block_size must be 1 .. {MAX_BLOCK}, got {size!r}")
    if config.block_size is not None and config.block_size > size:
        raise ConfigError(f"SpecConfig: block_size={config.block_size} exceeds the proposer's {size}")
    block, length = config.block_size or size, config.simulate_accept_len
    if length is not None and length > block + 1:
        raise ConfigError(
            f"SpecConfig: simulate_accept_len={length} exceeds what a step can give: {block} draft tokens and one more"
        )
    check_taps(made, model)
    if isinstance(made, Shared):
        if isinstance(made, DSpark) and made.draft.tp.size < mesh.tp.size:
            logger.warning("each of %d ranks holds the whole draft, whose heads are not cut", mesh.tp.size)
        made.check(model)
        mesh.check_same("the draft", made.summary())
        _share_head(model)
    return made


def draft_part(config: SpecConfig | None, model: KimiK3ForCausalLM) -> Shared | None:
    """This rank's part of a draft that it shares with rank 0, if there is one; every rank but 0 calls this.

    Raises:
        ConfigError, CheckpointError: see `make_proposer`, which rank 0 calls meanwhile.
    """
    if config is None or config.draft == "ngram" or not isinstance(config.draft, str | Shared):
        return None
    made = cast("Shared", make_proposer(config, model))
    return made if model.mesh.pp.rank == 0 else None


def _share_head(model: KimiK3ForCausalLM) -> None:
    """Give the ranks of the first stage a copy of their part of the head, which the last stage has.

    A draft lies where the embedding is, and rank 0. With a head beside it, a block needs no other stage: the copy costs
    a rank `vocabulary · hidden / tp` weights, asking the last stage would cost every block two transfers. It is a
    parameter like others, so whoever replaces weights replaces it, too.
    """
    pp, text = cast("Chain", model.mesh.pp), model.config.text
    if pp.size == 1:
        return
    last = pp.size - 1
    if pp.rank == last:
        work = pp.send(model.lm_head.weight.detach().contiguous(), 0)
        if work is not None:
            work.wait()
    elif pp.rank == 0:
        if "lm_head" not in model._modules:
            model.lm_head = Linear(
                text.hidden_size, text.vocab_size, cut="out", even=False, tp=model.mesh.tp, dtype=model.dtype,
                device=model.device,
            ).requires_grad_(requires_grad=False)  # fmt: skip
        weight = model.lm_head.weight
        with torch.no_grad():
            weight.copy_(pp.receive(torch.empty_like(weight), last))


def bring_features(model: KimiK3ForCausalLM, batch: Batch, tap: FeatureTap | None) -> Tensor | None:
    """The features of a step that was run, complete on every rank of the first stage; all ranks of a pipeline call it.

    Ranks of a stage have them whole: they are taken from the running sum, which is repeated on each, or gathered where
    tokens are sharded. The last stage has those of all layers.
    """
    if tap is None:
        return None
    pp = cast("Chain", model.mesh.pp)
    last = pp.size - 1
    if last and pp.rank == last:
        assert tap.out is not None, "the step had taps"
        work = pp.send(tap.out, 0)
        if work is not None:
            work.wait()
    elif last and pp.rank == 0:
        width = len(tap.layers) * model.config.text.hidden_size
        there = torch.empty(batch.num_tokens, width, dtype=model.dtype, device=model.device)
        tap.out = pp.receive(there, last)
    return tap.out


def joint_embedding(model: KimiK3ForCausalLM, ids: Tensor) -> Tensor | None:
    """Embeddings `[n, D]` of `ids [n]`, with the other ranks of the first stage; None on later ones."""
    if not model.model.has_embedding:
        return None
    return model.model.rows.gather(model.model.embed_tokens(ids), len(ids))


def joint_scores(model: KimiK3ForCausalLM, hidden: Tensor) -> Tensor:
    """Logits of rows that all ranks have, on every rank; computed on the last stage."""
    pp = cast("Chain", model.mesh.pp)
    if pp.size == 1:
        return model.scores(hidden)
    last = pp.size - 1
    if pp.rank == last:
        found = model.scores(hidden).contiguous()
    else:
        wide = torch.promote_types(model.dtype, torch.float32)
        found = torch.empty(len(hidden), model.config.text.vocab_size, dtype=wide, device=hidden.device)
    return pp.broadcast(found, last)


class LedTarget:
    """The target as a proposer sees it that runs on rank 0 alone: the other ranks do their part of each call.

    `model.embed_tokens` and `scores` may be called, whatever the layout; the rest is rank 0's part of the model.
    """

    def __init__(self, led: LedModel, target: KimiK3ForCausalLM, leader: Leader) -> None:
        self.led = led
        self.model = _LedStack(target, leader)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the model has
        return getattr(self.led, name)


class _LedStack:
    def __init__(self, target: KimiK3ForCausalLM, leader: Leader) -> None:
        self.target = target
        self.leader = leader

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the model has
        return getattr(self.target.model, name)

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """Look up `ids [n]`."""
        with self.leader.together():
            self.leader.send("embed", ids.tolist())
            found = joint_embedding(self.target, ids)
        assert found is not None, "rank 0 is in the first stage"
        return found


def check_taps(proposer: Proposer, model: KimiK3ForCausalLM) -> None:
    """Refuse features that the target does not have."""
    layers = model.config.text.num_layers
    if wrong := [i for i in proposer.feature_layers if not 0 <= i < layers]:
        raise ConfigError(f"the draft wants features of layers {wrong}, the target has layers 0..{layers - 1}")
    if proposer.feature_kind not in {"prefix", "mixture"}:
        raise ConfigError(f"the draft wants features of kind {proposer.feature_kind!r}; there are prefix and mixture")


class Speculation:
    """The proposer of an engine and what it knows of each request.

    Attributes:
        config: what was asked for.
        proposer: proposes.
        block_size: most draft tokens of a step.
        report: counts of all requests.
    """

    def __init__(
        self,
        config: SpecConfig,
        proposer: Proposer,
        model: KimiK3ForCausalLM,
        cache: HybridCache,
        *,
        draft_room: Callable[[Work], int],
    ) -> None:
        """Make one whose proposer is bound to nothing yet.

        Args:
            config: what was asked for.
            proposer: see `make_proposer`.
            model: the target.
            cache: its memory.
            draft_room: draft tokens that a step has room for.
        """
        self.config = config
        self.proposer = proposer
        self.block_size = config.block_size or proposer.block_size
        self.report = SpecReport(simulated=config.simulate_accept_len is not None)
        self._vocab = model.config.text.vocab_size
        self._room = draft_room
        self._known: dict[str, RequestState] = {}  # requests that the proposer has heard of
        self._model, self._cache = model, cache
        self._leader: Leader | None = None  # of the ranks that share the proposer

    def bind(self, model: KimiK3ForCausalLM, leader: Leader | None = None) -> None:
        """Give the proposer its target.

        Args:
            model: the target, or over several ranks the one that tells the others of every call.
            leader: of these ranks, which know their cache by now.

        Raises:
            ConfigError: the proposer does not fit the target.
        """
        proposer = self.proposer
        if isinstance(proposer, Shared):
            proposer.bind(self._model, self._cache)
            if leader is not None:
                self._leader = leader
                # a block is computed together, at once; to take in context needs nobody else
                say = {"propose": leader.send}
                proposer.tell = lambda kind, *values: say.get(kind, leader.note)("draft", kind, *values)
        elif isinstance(proposer, Bound):
            if leader is None:
                proposer.bind(model, self._cache)
                return
            target = LedTarget(cast("LedModel", model), self._model, leader)
            try:
                proposer.bind(cast("KimiK3ForCausalLM", target), self._cache)
            except BaseException:
                leader.send("end")  # the others have begun to follow
                raise

    @property
    def tap(self) -> FeatureTap | None:
        """What of the target's hidden states the proposer needs."""
        layers = self.proposer.feature_layers
        return FeatureTap(tuple(layers), self.proposer.feature_kind) if layers else None

    def start(self, state: RequestState) -> None:
        """Take note of a new request."""
        state.speculation = SpecReport(simulated=self.report.simulated)

    def plan(self, plan: StepPlan) -> tuple[StepPlan, list[Draft]]:
        """Turn a decode step into a verify step, if there is something to verify."""
        if plan.mode != "decode" or (self.config.max_batch is not None and len(plan.work) > self.config.max_batch):
            return plan, []
        room = {work.state.number: min(self.block_size, self._room(work)) for work in plan.work}
        asked = [w.state for w in plan.work if room[w.state.number] and w.state.speculation and self._may_ask(w.state)]
        drafts = {}
        if asked:
            for state, draft in zip(asked, self._propose(asked), strict=True):
                drafts[state.number] = self._cut(state, draft, room[state.number])
        if self.config.adaptive:
            kept = shorten([drafts[n] for n in drafts], num_requests=len(plan.work))
            drafts = {n: _first(d, length) for (n, d), length in zip(drafts.items(), kept, strict=True)}
        found = [drafts.get(w.state.number) or Draft([]) for w in plan.work]
        if not any(len(draft.token_ids) for draft in found):
            return plan, []
        work = [w._replace(ids=[*w.ids, *map(int, d.token_ids)]) for w, d in zip(plan.work, found, strict=True)]
        return dataclasses.replace(plan, mode="verify", work=work), found

    @staticmethod
    def _may_ask(state: RequestState) -> bool:
        assert state.speculation is not None, "given when the request came"
        return not state.speculation.refused

    def _propose(self, states: Sequence[RequestState]) -> list[Draft | None]:
        contexts = [self._context(state, state.tokens) for state in states]
        try:
            with contextlib.nullcontext() if self._leader is None else self._leader.together():
                found = self.proposer.propose(contexts)
        except Exception as error:
            if self._leader is not None:  # others may be in the middle of it
                raise
            logger.exception("the proposer failed")
            return [self._refuse(state, f"the proposer failed: {error}") for state in states]
        if len(found) != len(states):
            reason = f"the proposer gave {len(found)} drafts for {len(states)} requests"
            return [self._refuse(state, reason) for state in states]
        return list(found)

    def _cut(self, state: RequestState, draft: Draft | None, room: int) -> Draft | None:
        """A draft that can be verified: what is too much for this step is left out."""
        if draft is None:
            return None
        if (reason := check_draft(draft, self.block_size, self._vocab)) is not None:
            return self._refuse(state, reason)
        return _first(draft, room)

    def _refuse(self, state: RequestState, reason: str) -> Draft | None:
        """The request goes on without speculation, and says so."""
        assert state.speculation is not None, "given when the request came"
        logger.warning("%s goes on without speculation: %s", state.request.name, reason)
        state.speculation.refused = reason
        self.report.refused = reason
        return None

    def commit(
        self,
        states: Sequence[RequestState],
        lengths: Sequence[int],
        features: Sequence[Tensor],
        first_rows: Sequence[int] = (),
    ) -> None:
        """Tell the proposer what became context.

        Args:
            states: requests of a step.
            lengths: how many tokens of each became context.
            features: theirs, of all tokens of the step; empty if the proposer wants none.
            first_rows: where each of these begins among those of the whole step; empty if there are none.
        """
        contexts = []
        for i, (state, length) in enumerate(zip(states, lengths, strict=True)):
            assert state.lease is not None, "memory is taken back later"
            known = state.lease.length
            # a request that generates nothing has no anchor
            ids = state.tokens if len(state.tokens) == known + 1 else [*state.tokens, 0][: known + 1]
            context = self._context(state, ids, features[i][:length] if features else None)
            context.first_row = first_rows[i] if first_rows else 0
            contexts.append(context)
        if not contexts:
            return
        try:
            self.proposer.commit(contexts)
        except Exception as error:
            logger.exception("the proposer failed")
            for state in states:
                if state.speculation is not None and not state.speculation.refused:
                    self._refuse(state, f"the proposer failed: {error}")

    def _context(self, state: RequestState, ids: Sequence[int], features: Tensor | None = None) -> DraftContext:
        self._known[state.request.name] = state
        return DraftContext(state.request.name, ids, state.request.params, state.seed, features, state.lease)

    def drop(self, name: str) -> None:
        """Forget a request that ended."""
        if self._known.pop(name, None) is not None:
            self.proposer.drop(name)

    def sync(self) -> None:
        """Forget requests whose memory was taken."""
        for name in [name for name, state in self._known.items() if state.lease is None]:
            self.drop(name)

    def count(self, state: RequestState, draft: Draft, delivered: Sequence[int], *, is_over: bool) -> None:
        """Count a verify step of a request: what it was given of a draft, and behind it.

        Where the request ended inside the draft, the rest of the draft was not tried.
        """
        proposed = min(len(draft.token_ids), len(delivered)) if is_over else len(draft.token_ids)
        pairs = zip(draft.token_ids, delivered if is_over else delivered[:-1], strict=False)
        accepted = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        for report in (self.report, state.speculation):
            if report is not None:
                report.count(proposed, accepted, len(delivered))


def _first(draft: Draft | None, length: int) -> Draft | None:
    if draft is None or len(draft.token_ids) <= length:
        return draft
    confidence = None if draft.confidence is None else draft.confidence[:length]
    return Draft(draft.token_ids[:length], None if draft.probs is None else draft.probs[:length], confidence)
