"""Speculation in an engine: asks the proposer, refuses what cannot be verified, and counts what came of it."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from typing import TYPE_CHECKING, Any

from k3lib.batch import FeatureTap
from k3lib.engine.request import SpecReport
from k3lib.engine.verify import check_draft
from k3lib.errors import ConfigError
from k3lib.spec import DSpark, NGram
from k3lib.spec.proposer import MAX_BLOCK, Bound, Draft, DraftContext, Proposer
from k3lib.spec.schedule import shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from k3lib.cache import HybridCache
    from k3lib.engine.request import RequestState
    from k3lib.engine.scheduler import StepPlan, Work
    from k3lib.model import KimiK3ForCausalLM
    from k3lib.spec.proposer import SpecConfig

__all__ = ["Speculation", "make_proposer"]

logger = logging.getLogger(__name__)


def make_proposer(config: SpecConfig, model: KimiK3ForCausalLM) -> Proposer:
    """Return what a configuration names, checked.

    Raises:
        ConfigError: not a proposer, or its block is smaller than the one asked for.
        CheckpointError: a draft that cannot be loaded.
    """
    made: Any = config.draft
    if made == "ngram":
        made = NGram(block_size=config.block_size or 7)
    elif isinstance(made, str):
        made = DSpark.from_pretrained(
            made, device=model.device, dtype=model.dtype, block_size=config.block_size, tp=model.mesh.tp
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
    return made


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
        """Bind the proposer to its target.

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
        if isinstance(proposer, Bound):
            proposer.bind(model, cache)

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
            found = self.proposer.propose(contexts)
        except Exception as error:
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

    def commit(self, states: Sequence[RequestState], lengths: Sequence[int], features: Sequence[Tensor]) -> None:
        """Tell the proposer what became context.

        Args:
            states: requests of a step.
            lengths: how many tokens of each became context.
            features: theirs, of all tokens of the step; empty if the proposer wants none.
        """
        contexts = []
        for i, (state, length) in enumerate(zip(states, lengths, strict=True)):
            assert state.lease is not None, "memory is taken back later"
            known = state.lease.length
            # a request that generates nothing has no anchor
            ids = state.tokens if len(state.tokens) == known + 1 else [*state.tokens, 0][: known + 1]
            contexts.append(self._context(state, ids, features[i][:length] if features else None))
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
