"""What goes into the engine and what comes out: sampling parameters, requests, outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from k3lib.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from k3lib.cache import Lease
    from k3lib.engine.grammar import Grammar, Matcher
    from k3lib.engine.media import Media
    from k3lib.engine.sampler import TokenCounts

__all__ = ["FinishReason", "Output", "Request", "RequestState", "SamplingParams", "StepOutput", "TokenLogprob"]

FinishReason = Literal["stop", "length", "abort", "error"]


class _FrozenMapping(Mapping[int, float]):
    """A mapping that cannot change: it has a hash, and is copied and pickled like any value."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[int, float]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: int) -> float:
        return self._items[key]

    def __iter__(self) -> Iterator[int]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the next token, when to stop, and what to report.

    The logits are adjusted in this order: `repetition_penalty`, `frequency_penalty`, `presence_penalty`, `logit_bias`,
    `min_tokens`, the mask of a grammar. Then they are divided by the temperature, and `top_k`, `top_p` and `min_p` cut
    the distribution, in this order. All ties go to the lowest id.

    Attributes:
        temperature: 0 is greedy.
        top_p: keep the fewest best tokens whose probability reaches this part of the whole, in (0, 1].
        top_k: keep this many best tokens; 0 keeps all.
        min_p: keep the tokens that have at least this part of the largest probability, in [0, 1]; 0 keeps all.
        max_new_tokens: upper bound of generated tokens, the stop id included; 0 generates nothing.
        stop_token_ids: ids that end the request besides the model's eos id.
        stop: texts that end the request.
        ignore_eos: do not stop at the model's eos id.
        seed: makes the draw of this request reproducible, whatever else is in the batch. Any integer; equal modulo
            2^64 is equal.
        frequency_penalty: subtracted from a logit as often as its token was generated, in [-2, 2].
        presence_penalty: subtracted once from the logit of a token that was generated, in [-2, 2].
        repetition_penalty: divides the positive and multiplies the negative logits of tokens that the prompt holds or
            that were generated; above 0, 1 does nothing.
        logit_bias: values to add to the logits of token ids, each in [-100, 100].
        min_tokens: eos and `stop_token_ids` cannot be chosen before so many tokens were generated.
        logprobs: report the log-probability of each generated token, of the model alone: before any adjustment.
        top_logprobs: report so many best tokens besides, 0 to 20; needs `logprobs` or `prompt_logprobs`.
        prompt_logprobs: report the log-probability of each prompt token.
        grammar: what the output must be (`k3lib.engine.grammar`); None is anything.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    min_tokens: int = 0
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        self._check("temperature", "a finite number >= 0", _is_number(self.temperature) and self.temperature >= 0)
        self._check("top_p", "in (0, 1]", _is_number(self.top_p) and 0 < self.top_p <= 1)
        self._check("min_p", "in [0, 1]", _is_number(self.min_p) and 0 <= self.min_p <= 1)
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            self._check(name, "in [-2, 2]", _is_number(value) and -2 <= value <= 2)
        penalty = self.repetition_penalty
        self._check("repetition_penalty", "a finite number > 0", _is_number(penalty) and penalty > 0)
        self._check("top_k", "an integer >= 0 (0 = all)", _is_natural(self.top_k))
        for name in ("max_new_tokens", "min_tokens"):
            self._check(name, "an integer >= 0", _is_natural(getattr(self, name)))
        ceiling = f"at most max_new_tokens={self.max_new_tokens}"
        self._check("min_tokens", ceiling, self.min_tokens <= self.max_new_tokens)
        for name in ("ignore_eos", "logprobs", "prompt_logprobs"):
            self._check(name, "True or False", isinstance(getattr(self, name), bool))
        self._check("top_logprobs", "in 0..20", _is_natural(self.top_logprobs) and self.top_logprobs <= 20)
        reported = self.logprobs or self.prompt_logprobs or self.top_logprobs == 0
        self._check("top_logprobs", "0 without logprobs or prompt_logprobs", reported)
        self._check("seed", "an integer or None", self.seed is None or _is_integer(self.seed))
        self._check_collections()

    def _check_collections(self) -> None:
        stops = isinstance(self.stop, Iterable) and not isinstance(self.stop, str)
        object.__setattr__(self, "stop", tuple(self.stop) if stops else self.stop)
        good = stops and all(isinstance(text, str) and text for text in self.stop)
        self._check("stop", "a tuple of texts that are not empty", good)
        ids = isinstance(self.stop_token_ids, Iterable)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids) if ids else self.stop_token_ids)
        good = ids and all(_is_natural(i) for i in self.stop_token_ids)
        self._check("stop_token_ids", "a tuple of integers >= 0", good)
        bias = self.logit_bias
        if bias is None:
            return
        good = isinstance(bias, Mapping) and all(
            _is_natural(i) and _is_number(value) and -100 <= value <= 100 for i, value in bias.items()
        )
        self._check("logit_bias", "a mapping from integers >= 0 to numbers in [-100, 100]", good)
        object.__setattr__(self, "logit_bias", _FrozenMapping(bias))

    def _check(self, name: str, promise: str, is_kept: bool) -> None:
        if not is_kept:
            raise RequestError(f"{name} must be {promise}, got {getattr(self, name)!r}", param=name)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    """Whether this is a finite number that fits into a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


class TokenLogprob(NamedTuple):
    """Log-probability of a token, with the best tokens of its place as pairs of id and log-probability."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Request:
    """One prompt with its parameters.

    Attributes:
        prompt_ids: token ids.
        params: how to sample, when to stop, what to report.
        request_id: None lets the engine choose a name.
        priority: larger runs first and is preempted last.
        namespace: only what was cached under the same one is reused (an adapter, a tenant's salt).
        media: its images, as patches (`PromptImage`) or as features (`MediaSpan`), each at its place in the expanded
            prompt.
        timeout: seconds after which the request ends with "abort", wherever it is; None = the engine's.
        record_routes: report the experts that every token was routed to (computes the whole prompt anew).
    """

    prompt_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    request_id: str | None = None
    priority: int = 0
    namespace: str = ""
    media: Sequence[Media] = ()
    timeout: float | None = None
    record_routes: bool = False

    @property
    def name(self) -> str:
        """The id, once the request has one."""
        assert self.request_id is not None, "the engine names a request when it takes it"
        return self.request_id


@dataclass(slots=True)
class SpecReport:
    """What speculation did for a request, or for all of an engine.

    Attributes:
        steps: verify steps.
        proposed: draft tokens that were verified.
        accepted: those that were accepted.
        emitted: tokens that came out of verify steps, those that a stop rule cut off not counted.
        by_position: accepted draft tokens by their place in the draft, and `tried_by_position` the verified ones.
        refused: why the requests go on without speculation; "" while they do not.
        simulated: acceptance was made up to measure speed; the text is of no use.
    """

    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    emitted: int = 0
    by_position: list[int] = field(default_factory=list)
    tried_by_position: list[int] = field(default_factory=list)
    refused: str = ""
    simulated: bool = False

    def count(self, proposed: int, accepted: int, emitted: int) -> None:
        """Count a verify step."""
        self.steps += 1
        self.proposed += proposed
        self.accepted += accepted
        self.emitted += emitted
        for counts, number in ((self.by_position, accepted), (self.tried_by_position, proposed)):
            counts += [0] * (proposed - len(counts))
            for place in range(number):
                counts[place] += 1

    @property
    def accept_length(self) -> float:
        """Tokens a verify step gave on average; 0 before the first."""
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def accept_rate(self) -> float:
        """Part of the draft tokens that was accepted."""
        return self.accepted / self.proposed if self.proposed else 0.0

    def summary(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {**asdict(self), "accept_length": self.accept_length, "accept_rate": self.accept_rate}


@dataclass(slots=True, eq=False)
class RequestState:
    """A request in the engine.

    Attributes:
        request: what was asked.
        number: order of arrival.
        seed: of its draws.
        arrival: when it came, on the scheduler's clock.
        tokens: prompt and generated tokens.
        lease: its memory; None while it waits.
        counts: history for penalties; None if its parameters look at none.
        matcher: where it stands in its grammar; None without one.
        cached_tokens, kv_tokens: prompt tokens that needed no prefill, and whose KV was found, when it first ran.
        preemptions: how often its memory was taken.
        prompt_logprobs: of the prompt so far; None for the first token and for what is not computed yet.
        routes: experts of each computed token, by position.
        speculation: None if the engine does not speculate.
    """

    request: Request
    number: int
    seed: int
    arrival: float
    tokens: list[int]
    lease: Lease | None = None
    counts: TokenCounts | None = None
    matcher: Matcher | None = None
    cached_tokens: int | None = None
    kv_tokens: int = 0
    preemptions: int = 0
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    routes: Tensor | None = None
    speculation: SpecReport | None = None

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def num_generated(self) -> int:
        """Tokens that were generated."""
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def left(self) -> int:
        """Tokens that may still be generated."""
        return self.request.params.max_new_tokens - self.num_generated


class StepOutput(NamedTuple):
    """New tokens of one request after one engine step.

    Attributes:
        token_ids: include the stop id that ended the request.
        finish: None while it goes on.
        logprobs: one entry a token, if asked for.
        cached_tokens: prompt tokens that needed no prefill.
        request_id: whose tokens.
        kv_tokens: prompt tokens whose KV was found, with or without a state to go on from.
        prompt_logprobs: with the first tokens, if asked for.
        routes: with the end, if asked for: `[tokens, MoE layers, top_k]` int32 of all tokens but the last.
        speculation: counts of the request so far, if the engine speculates; they go on changing.
    """

    token_ids: list[int]
    finish: FinishReason | None
    logprobs: list[TokenLogprob] | None = None
    cached_tokens: int | None = None
    request_id: str | None = None
    kv_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    routes: Tensor | None = None
    preemptions: int = 0
    speculation: SpecReport | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """A finished request.

    Attributes:
        request_id, prompt_ids: what was asked.
        token_ids: include the stop id that ended it.
        finish: why it ended.
        logprobs: one entry a token, if asked for.
        prompt_logprobs: one entry a prompt token, None for the first, if asked for.
        cached_tokens: prompt tokens that needed no prefill.
        kv_tokens: prompt tokens whose KV was found, with or without a state to go on from.
        accepted_per_step: tokens of each decode step.
        preemptions: how often its memory was taken and it had to be computed anew.
        routes: experts of every token but the last, `[tokens, MoE layers, top_k]` int32, if asked for.
        speculation: what it did for this request; None if the engine does not speculate.
    """

    request_id: str
    prompt_ids: list[int]
    token_ids: list[int]
    finish: FinishReason
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0
    kv_tokens: int = 0
    accepted_per_step: tuple[int, ...] = ()
    preemptions: int = 0
    routes: Tensor | None = None
    speculation: SpecReport | None = None

    @classmethod
    def join(cls, request: Request, steps: Sequence[StepOutput]) -> Output:
        """Put the outputs of all steps together."""
        params = request.params
        prompt = [entry for s in steps for entry in s.prompt_logprobs or ()]
        routes = [s.routes for s in steps if s.routes is not None]
        return cls(
            request.name,
            request.prompt_ids,
            [token for s in steps for token in s.token_ids],
            steps[-1].finish or "abort",
            [entry for s in steps for entry in s.logprobs or ()] if params.logprobs else None,
            prompt if params.prompt_logprobs else None,
            max((s.cached_tokens or 0 for s in steps), default=0),
            max((s.kv_tokens for s in steps), default=0),
            tuple(len(s.token_ids) for s in steps if s.token_ids),
            max((s.preemptions for s in steps), default=0),
            routes[-1] if routes else None,
            steps[-1].speculation,
        )
