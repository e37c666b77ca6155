"""What proposes tokens, and what speculation is allowed to do: the interface between a draft and the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from k3lib.draft_config import MAX_BLOCK
from k3lib.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from k3lib.cache import HybridCache, Lease
    from k3lib.engine.request import SamplingParams
    from k3lib.model import KimiK3ForCausalLM

__all__ = ["MAX_BLOCK", "Bound", "Draft", "DraftContext", "Proposer", "Shared", "SpecConfig"]


@dataclass(slots=True)
class DraftContext:
    """One request as a proposer sees it.

    Attributes:
        request_id: whose.
        token_ids: the whole context; the last one is the anchor, which the target has not computed yet. Read only.
        params: how it samples.
        seed: of its draws.
        features: `[n, layers * hidden]`, the target's features of the n newest tokens in front of the anchor, which
            `commit` makes context; None in `propose`, and if the proposer wants none.
        lease: its memory, for a proposer that keeps its own rows beside the target's pages.
        first_row: where `features` begin among those of all tokens of the step, which every rank has.
    """

    request_id: str
    token_ids: Sequence[int]
    params: SamplingParams
    seed: int = 0
    features: Tensor | None = None
    lease: Lease | None = None
    first_row: int = 0


@dataclass(slots=True)
class Draft:
    """Proposed tokens of one request.

    Attributes:
        token_ids: at most `block_size` ids; none is allowed.
        probs: `[n, vocab]`, the distributions that they were drawn from; None = they were not drawn (one-hot).
        confidence: for each token an estimate of the probability that it is accepted if those before it are.
    """

    token_ids: Sequence[int]
    probs: Tensor | None = None
    confidence: Sequence[float] | None = None


@runtime_checkable
class Proposer(Protocol):
    """Proposes continuations. Whatever it proposes, the engine's output stays that of the target.

    Attributes:
        block_size: most tokens of a draft.
        feature_layers: layers of the target (0-based) whose outputs it needs; () if none.
        feature_kind: what of these layers: the running sum, or what the next reader sees (`FeatureTap`).
    """

    block_size: int
    feature_layers: tuple[int, ...]
    feature_kind: Literal["prefix", "mixture"]

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """Propose tokens behind the anchor of each context."""
        ...

    def commit(self, contexts: Sequence[DraftContext]) -> None:
        """Take note of what became context: called after every step of the target, prefill too."""
        ...

    def drop(self, request_id: str) -> None:
        """Forget a request that finished, was aborted or lost its memory."""
        ...


@runtime_checkable
class Bound(Protocol):
    """A proposer that uses the target's embedding or memory: told once which they are, before anything else.

    In an engine over many ranks it runs on rank 0 alone, and the other ranks do their part of each
    `model.model.embed_tokens(ids)` and `model.scores(hidden)`; its rows lie beside rank 0's pages, which hold
    `cache.page_tokens` tokens each.
    """

    def bind(self, model: KimiK3ForCausalLM, cache: HybridCache) -> None:
        """Take the target and its cache.

        Raises:
            ConfigError: they do not fit; names both values.
        """
        ...


@runtime_checkable
class Shared(Bound, Protocol):
    """A bound proposer that the ranks of the first stage run together: each has its part, and does what rank 0 does.

    Those of later stages make one only to `check` it.

    Attributes:
        tell: on rank 0 of several, called with what is about to be done, by name and with plain values; None elsewhere.
            The others begin with "propose" at once, and do everything else before whatever comes next.
    """

    tell: Callable[..., None] | None

    def check(self, model: KimiK3ForCausalLM) -> None:
        """Refuse a target that it does not fit, on every rank alike and before anything is exchanged.

        Raises:
            ConfigError: names both values.
        """
        ...

    def summary(self) -> str:
        """What has to be the same on all ranks."""
        ...

    def replay(self, kind: str, *values: Any, features: Tensor | None = None) -> None:  # noqa: ANN401 - plain values
        """Do what `tell` heard of on rank 0; `features` are those of all tokens of the last step."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecConfig:
    """How an engine speculates.

    Attributes:
        draft: a folder with a draft model, "ngram", or a proposer.
        block_size: most draft tokens of a step; None = the proposer's.
        accept: rule for sampled tokens: "chain" (token by token) or "block" (block verification, which accepts more).
        rollback: what keeps the recurrent state exact: "replay" (inputs are kept) or "states" (every state is).
        simulate_accept_len: pretend that so many tokens come out of each step on average, 1 .. block_size + 1; the
            output is then of no use but to measure speed.
        adaptive: shorten drafts whose confidence says that verifying them does not pay.
        max_batch: with more running requests than this, decode plainly; None = never.
    """

    draft: str | Proposer
    block_size: int | None = None
    accept: Literal["chain", "block"] = "chain"
    rollback: Literal["replay", "states"] = "replay"
    simulate_accept_len: float | None = None
    adaptive: bool = False
    max_batch: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("accept", ("chain", "block")), ("rollback", ("replay", "states"))):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"SpecConfig: {name} must be one of {allowed}, got {getattr(self, name)!r}")
        if self.block_size is not None and not 1 <= self.block_size <= MAX_BLOCK:
            raise ConfigError(f"SpecConfig: block_size must be 1 .. {MAX_BLOCK}, got {self.block_size}")
        length = self.simulate_accept_len
        if length is not None and not 1 <= length <= (self.block_size or MAX_BLOCK) + 1:
            raise ConfigError(
                f"SpecConfig: simulate_accept_len must be 1 .. {(self.block_size or MAX_BLOCK) + 1}, got {length}"
            )
        if self.max_batch is not None and self.max_batch < 0:
            raise ConfigError(f"SpecConfig: max_batch must be >= 0, got {self.max_batch}")
