"""Judging drafts by the target's logits: every row sees what plain decoding would see there.

Shapes: B requests; W the most draft tokens of one, plus one; V vocabulary; N rows of logits: of each request one behind
its anchor and one behind each draft token.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from k3lib.draws import signed, uniforms
from k3lib.engine.grammar import allowed_ahead
from k3lib.engine.sampler import Filters, Prepared, adjust, distribution, sample, to_device
from k3lib.errors import ConfigError
from k3lib.spec.accept import (
    Accepted,
    accept_block,
    accept_forced,
    accept_greedy,
    accept_sampled,
    simulated_length,
)
from k3lib.spec.proposer import MAX_BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from k3lib.engine.request import RequestState, SamplingParams
    from k3lib.engine.sampler import History
    from k3lib.spec.proposer import Draft

__all__ = ["NOT_FINITE", "NO_TOKEN", "Verdict", "check_draft", "judge"]

NOT_FINITE, NO_TOKEN = -1, -2  # in place of a token

_JUDGED_TOGETHER = 2**24  # elements of logits whose distributions are there at once
_ACCEPT_LANE, _BONUS_LANE, _SIMULATION_LANE = 1, 2, 3  # of the random numbers; lane 0 is plain sampling


class Verdict(NamedTuple):
    """What a verify step gives its requests.

    A draft token that ends its request is the last one that it gets: then there is no token behind the accepted ones,
    it counts as that token itself. So the last token of a request never is one whose state the step has computed.

    Attributes:
        length: `[B]` int64, draft tokens whose state is to be kept: one less than there are tokens.
        tokens: `[B, W]` int64: these draft tokens, then one more, then `NO_TOKEN`. The last is `NOT_FINITE` if it had
            to be chosen from logits that are not finite, or from none.
        rows: `[B, W]` int64, the row of the logits that each token was chosen from; of `NO_TOKEN` any.
    """

    length: Tensor
    tokens: Tensor
    rows: Tensor


def check_draft(draft: Draft, block_size: int, vocab_size: int) -> str | None:
    """Return why a draft cannot be verified, in one sentence, or None. Looks at no values on the device.

    Args:
        draft: of a proposer.
        block_size: most tokens of a draft.
        vocab_size: of the target.
    """
    ids, probs, confidence = draft.token_ids, draft.probs, draft.confidence
    count = len(ids)
    if count > block_size:
        return f"the proposer gave {count} tokens, more than block_size={block_size}"
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool):
            return f"the proposer gave {token!r}, which is no token id"
        if not 0 <= token < vocab_size:
            return f"the proposer gave token {token}, outside the vocabulary 0..{vocab_size - 1}"
    if probs is not None:
        if not isinstance(probs, torch.Tensor) or not probs.is_floating_point():
            kind = probs.dtype if isinstance(probs, torch.Tensor) else type(probs).__name__
            return f"the proposer gave probs of {kind}, needs a tensor of floating point numbers"
        if tuple(probs.shape) != (count, vocab_size):
            return f"the proposer gave probs of shape {[*probs.shape]}, needs [{count}, {vocab_size}]"
    if confidence is not None:
        if len(confidence) != count:
            return f"the proposer gave {len(confidence)} confidences for {count} tokens"
        if bad := [x for x in confidence if not 0 <= x <= 1]:
            return f"the proposer gave confidence {bad[0]}, outside 0..1"
    return None


def judge(
    logits: Tensor,
    drafts: Sequence[Draft],
    states: Sequence[RequestState],
    *,
    stop_ids: Sequence[int] = (),
    rule: Literal["chain", "block"] = "chain",
    simulate: float | None = None,
) -> Verdict:
    """Accept draft tokens of each request and choose the one behind them, without waiting for the device.

    A token is accepted if the target, with all parameters and the grammar of the request, chose it too; for a draft
    without probabilities that is the token that plain decoding would draw there, so that the output does not depend on
    the draft. For one with probabilities, whose request draws, the rule keeps the distribution. A draft ends behind a
    token that its grammar does not allow, and behind one that ends the request. Nothing of the states changes.

    Args:
        logits: `[N, V]`, not adjusted.
        drafts: of each request, which `check_draft` has nothing against; empty ones are plain decoding.
        states: the requests; `tokens` ends with the anchor.
        stop_ids: the model's eos ids.
        rule: for draft tokens that were drawn: `accept_sampled` or `accept_block`.
        simulate: accept so many tokens on average, the one behind included, whatever they are; grammars and rows that
            are not finite may leave less.
    """
    num_rows, vocab = logits.shape
    ids = [draft.token_ids for draft in drafts]
    total = sum(map(len, ids))
    if not len(drafts) == len(states) == num_rows - total:
        raise ConfigError(f"judge: {num_rows} rows for {len(states)} states, {len(drafts)} drafts of {total} tokens")
    allowed, taken, is_over = allowed_ahead([state.matcher for state in states], ids, vocab, logits.device)
    starts = itertools.accumulate((len(part) + 1 for part in ids), initial=0)
    asked = [
        _Asked.of(row, draft, state, count, over, stop_ids)
        for row, draft, state, count, over in zip(starts, drafts, states, taken, is_over, strict=False)
    ]
    parts: list[tuple[list[int], Accepted]] = []
    drawn = [i for i, one in enumerate(asked) if one.is_drawn and simulate is None]
    chosen = [i for i, one in enumerate(asked) if not one.is_drawn or simulate is not None]
    if chosen:
        members = [asked[i] for i in chosen]
        length = None if simulate is None else _simulated(simulate, members)
        parts.append((chosen, _judge_chosen(logits, members, allowed, stop_ids, length)))
    parts += [
        (some, _judge_drawn(logits, [asked[i] for i in some], allowed, stop_ids, rule))
        for some in _together(drawn, asked, vocab)
    ]
    return _join(parts, asked, logits.device)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request in a verify step.

    Attributes:
        start: its first row.
        draft, state: its draft and itself.
        limit: tokens that can be accepted by a rule; a last one that the grammar does not allow is among them, because
            of what has been drawn only the rule may say whether it counts.
        permitted: tokens that the grammar takes.
        ends: the last of `limit` ends the request.
    """

    start: int
    draft: Draft
    state: RequestState
    limit: int
    permitted: int
    ends: bool

    @classmethod
    def of(
        cls, start: int, draft: Draft, state: RequestState, taken: int, is_over: bool, stop_ids: Sequence[int]
    ) -> _Asked:
        """Find where the draft ends."""
        params = state.request.params
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else stop_ids)}
        limit = taken if is_over else min(taken + 1, len(draft.token_ids))
        first = next((j for j, token in enumerate(draft.token_ids[:taken]) if token in stops), None)
        if first is not None:
            return cls(start, draft, state, first + 1, first + 1, ends=True)
        return cls(start, draft, state, limit, taken, ends=is_over)

    @property
    def count(self) -> int:
        """Rows."""
        return len(self.draft.token_ids) + 1

    @property
    def is_drawn(self) -> bool:
        """Whether its tokens were drawn, and have to be judged by their probabilities."""
        params = self.state.request.params
        return self.draft.probs is not None and self.count > 1 and params.temperature > 0 and params.top_k != 1


class _Rows(NamedTuple):
    """Rows of some requests, one behind the other.

    Attributes:
        logits, allowed: of them; `allowed` may be None.
        params, histories: of each row.
        places: `[B, W]` int64, where the rows of each request are; behind its last, that one.
        draft: `[B, W - 1]` int64, filled up with -1.
        limits: `[B]` int64.
        positions: tokens in front of each row, `[N]` int64.
        seeds: `[B]` int64.
    """

    logits: Tensor
    allowed: Tensor | None
    params: list[SamplingParams]
    histories: list[History | None]
    places: Tensor
    draft: Tensor
    limits: Tensor
    positions: Tensor
    seeds: Tensor

    @classmethod
    def of(cls, logits: Tensor, asked: Sequence[_Asked], allowed: Tensor | None) -> _Rows:
        """Collect them, with one copy to the device."""
        width = max(one.count for one in asked)
        rows = [row for one in asked for row in range(one.start, one.start + one.count)]
        begins = itertools.accumulate((one.count for one in asked), initial=0)
        places = [_spread(begin, one.count, width) for begin, one in zip(begins, asked, strict=False)]
        draft = [[*one.draft.token_ids, *[-1] * (width - one.count)] for one in asked]
        positions = [len(one.state.tokens) + j for one in asked for j in range(one.count)]
        limits, seeds = [one.limit for one in asked], [signed(one.state.seed) for one in asked]
        parts = [torch.tensor(part, dtype=torch.int64) for part in (places, draft, limits, positions, seeds, rows)]
        *there, taken = to_device(parts, logits.device)
        histories: list[History | None] = []
        for one in asked:
            counts = one.state.counts
            histories += [None] * one.count if counts is None else counts.ahead(one.draft.token_ids)
        if len(rows) < len(logits):
            logits, allowed = logits[taken], None if allowed is None else allowed[taken]
        params = [one.state.request.params for one in asked for _ in range(one.count)]
        return cls(logits, allowed, params, histories, *there)


def _spread(begin: int, count: int, width: int) -> list[int]:
    """Places of the rows of one request, the last one as often as it takes."""
    return [begin + min(j, count - 1) for j in range(width)]


def _judge_chosen(
    logits: Tensor,
    asked: Sequence[_Asked],
    allowed: Tensor | None,
    stop_ids: Sequence[int],
    length: Sequence[int] | None,
) -> Accepted:
    """Choose the token of every row as plain decoding does, and accept what equals it; or as many as `length` says."""
    rows = _Rows.of(logits, asked, allowed)
    seeds = [one.state.seed for one in asked for _ in range(one.count)]
    prepared = Prepared.of(rows.params, seeds, logits.device, stop_ids=stop_ids)
    tokens = sample(rows.logits, prepared, rows.positions, counts=rows.histories, allowed=rows.allowed)
    target = tokens[rows.places]
    if length is None:
        return accept_greedy(rows.draft, target, rows.limits)
    (wanted,) = to_device([torch.tensor(length, dtype=torch.int64)], logits.device)
    return accept_forced(rows.draft, target, torch.minimum(wanted, (target >= 0).cumprod(1).sum(1)))


def _judge_drawn(
    logits: Tensor,
    asked: Sequence[_Asked],
    allowed: Tensor | None,
    stop_ids: Sequence[int],
    rule: Literal["chain", "block"],
) -> Accepted:
    """Judge tokens that were drawn by the probabilities of draft and target."""
    rows = _Rows.of(logits, asked, allowed)
    num_requests, width = rows.places.shape
    adjusted = adjust(rows.logits.float(), rows.params, rows.histories, stop_ids=stop_ids, allowed=rows.allowed)
    # a mask may have hidden what is not finite, or left nothing
    is_good = rows.logits.amax(-1).isfinite() & adjusted.amax(-1).isfinite()
    probs = distribution(adjusted, Filters.of(rows.params, logits.device)).masked_fill_(~is_good[:, None], 0.0)
    if len(probs) < num_requests * width:
        probs = probs[rows.places.view(-1)]
    given = [one.draft.probs.to(logits.device, torch.float32) for one in asked if one.draft.probs is not None]
    proposed = torch.nn.utils.rnn.pad_sequence(given, batch_first=True)
    # the draft ends where the target cannot judge it; of all that, only what would have been chosen there is an error
    limits = torch.minimum(rows.limits, is_good[rows.places].cumprod(1).sum(1))
    accept = accept_block if rule == "block" else accept_sampled
    return accept(rows.draft, proposed, probs.view(num_requests, width, -1), _numbers(rows), limits)


def _numbers(rows: _Rows) -> Tensor:
    """Uniforms of a step, `[B, W]`. No other step uses them: each begins at a position of its own."""
    begins, seeds = rows.positions[rows.places[:, :1]], rows.seeds[:, None]
    steps = torch.arange(rows.draft.shape[1], device=begins.device)
    accepts = uniforms(seeds, begins * (MAX_BLOCK + 1) + steps, _ACCEPT_LANE, dtype=torch.float64)
    return torch.cat([accepts, uniforms(seeds, begins, _BONUS_LANE, dtype=torch.float64)], 1)


def _simulated(average: float, asked: Sequence[_Asked]) -> list[int]:
    """How many tokens each request accepts, without looking at them: the same for all, if their drafts allow it."""
    first = asked[0].state  # a number of this step, that all ranks agree on
    seed, position = torch.tensor([signed(first.seed)]), torch.tensor([len(first.tokens)])
    uniform = float(uniforms(seed, position, _SIMULATION_LANE, dtype=torch.float64))
    length = simulated_length(average, uniform, max(one.count for one in asked) - 1)
    return [min(length, one.permitted) for one in asked]


def _together(drawn: Sequence[int], asked: Sequence[_Asked], vocab: int) -> Iterator[list[int]]:
    """Requests whose distributions fit into memory at once, at least one."""
    some: list[int] = []
    width = 0
    for i in drawn:
        width = max(width, asked[i].count)
        if some and (len(some) + 1) * width * vocab > _JUDGED_TOGETHER:
            yield some
            some, width = [], asked[i].count
        some.append(i)
    if some:
        yield some


def _join(parts: Sequence[tuple[list[int], Accepted]], asked: Sequence[_Asked], device: torch.device) -> Verdict:
    """Put the requests in their order again, and end those whose draft ended them."""
    width = max((one.count for one in asked), default=1)
    last = [one.limit if one.ends else -1 for one in asked]
    rows = [_spread(one.start, one.count, width) for one in asked]
    order = [i for members, _ in parts for i in members]
    table = [torch.tensor(x, dtype=torch.int64) for x in (rows, last, sorted(range(len(order)), key=order.__getitem__))]
    places, last_ones, back = to_device(table, device)
    lengths = [found.length for _, found in parts]
    padded = [torch.nn.functional.pad(x.tokens, (0, width - x.tokens.shape[1]), value=NO_TOKEN) for _, x in parts]
    if len(parts) == 1:
        length, tokens = lengths[0], padded[0]
    elif parts:
        length, tokens = torch.cat(lengths)[back], torch.cat(padded)[back]
    else:
        length, tokens = last_ones, places.view(0, width)
    length = length - (length == last_ones).long()
    behind = torch.arange(width, device=device) > length[:, None]
    return Verdict(length, tokens.masked_fill(behind, NO_TOKEN), places.view(-1, width))
