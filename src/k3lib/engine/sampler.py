"""Choosing the next token from logits, per request and independent of the rest of the batch.

Shapes: B rows, one of each request; N rows of any kind; V vocabulary.

Everything that is summed over a row is summed in int64, where sums are exact: neither the company of a row, nor the
order of a reduction, nor the kernel that makes it can change a token. A probability stands there as the integer part of
itself times a power of two. Random numbers have 53 bits. With a vocabulary of 163,840, running sums that are rounded to
fp32 would misplace 0.1 % of the probability, and random numbers of 24 bits 0.2 %.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from k3lib.draws import draw, random_keys, random_numbers, signed, uniforms
from k3lib.engine.request import TokenLogprob
from k3lib.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from k3lib.engine.request import SamplingParams

__all__ = [
    "Filters",
    "History",
    "Logprobs",
    "Prepared",
    "TokenCounts",
    "adjust",
    "distribution",
    "draw",
    "logprobs_of",
    "sample",
    "to_device",
    "token_logprobs",
    "uniforms",
]

# Elements of the logits that are looked at together: they bound the temporary memory, with the bytes of each.
_DRAWN_TOGETHER = 2**24  # 24 bytes; 64 with top_k or top_p
_REPORTED_TOGETHER = 2**23  # 8 bytes; 32 with the best tokens

_TINY, _HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


# ---- what is known of the requests --------------------------------------------------------------


class History(Protocol):
    """The ids that a request has seen at some moment; read only.

    Attributes:
        num_generated, ids, times: as in `TokenCounts`.
        later: ids that were generated since, with the times to go by instead.
    """

    @property
    def num_generated(self) -> int: ...  # noqa: D102

    @property
    def ids(self) -> array[int]: ...  # noqa: D102

    @property
    def times(self) -> array[int]: ...  # noqa: D102

    @property
    def later(self) -> Mapping[int, int]: ...  # noqa: D102


class _Moment(NamedTuple):
    num_generated: int
    ids: array[int]
    times: array[int]
    later: dict[int, int]


class TokenCounts:
    """The ids that a request has seen, and how often it generated each: what penalties and `min_tokens` look at.

    It lives on the host and follows the request, through preemption too.

    Attributes:
        num_generated: generated tokens.
        ids: each id once; not to be written to, like `times`.
        times: how often each of `ids` was generated; 0 for one that only the prompt holds.
    """

    def __init__(self, prompt_ids: Sequence[int] = ()) -> None:
        self.num_generated = 0
        self.ids = array("q", dict.fromkeys(prompt_ids))
        self.times = array("q", bytes(8 * len(self.ids)))
        self._places = {token: place for place, token in enumerate(self.ids)}

    @classmethod
    def of(cls, params: SamplingParams, prompt_ids: Sequence[int]) -> TokenCounts | None:
        """Return the counts of a request that has generated nothing, or None if its parameters look at no history."""
        if not _looks_back(params):
            return None
        return cls(prompt_ids if params.repetition_penalty != 1 else ())

    def add(self, token: int) -> None:
        """Count a generated token."""
        place = self._places.setdefault(token, len(self.ids))
        if place == len(self.ids):
            self.ids.append(token)
            self.times.append(0)
        self.times[place] += 1
        self.num_generated += 1

    @property
    def later(self) -> Mapping[int, int]:
        """Nothing: all is counted."""
        return {}

    def ahead(self, tokens: Sequence[int]) -> list[History]:
        """Return the history in front of each of some tokens that may come next, and behind the last.

        They are good until a token is added.
        """
        moments: list[History] = [self]
        later: dict[int, int] = {}
        for i, token in enumerate(tokens):
            before = later.get(token)
            if before is None:
                place = self._places.get(token)
                before = 0 if place is None else self.times[place]
            later = {**later, token: before + 1}
            moments.append(_Moment(self.num_generated + i + 1, self.ids, self.times, later))
        return moments

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent."""
        assert self._places == {token: place for place, token in enumerate(self.ids)}
        assert len(self._places) == len(self.ids) == len(self.times)
        assert sum(self.times) == self.num_generated


@dataclass(frozen=True, slots=True)
class Filters:
    """What shapes the distributions of N rows: tensors `[N]`, or None if no row asks for it.

    Attributes:
        temperature: fp32, above 0.
        top_k: int64, at least 1.
        top_p: fp64, in (0, 1].
        min_p: fp64, in [0, 1].
    """

    temperature: Tensor
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> Filters:
        """Make the tensors of these rows, with one copy to the device. Temperature 0 is the best token alone."""
        columns = _filter_columns(params)
        return cls(**dict(zip(columns, to_device(list(columns.values()), device), strict=True)))

    def rows(self, start: int, stop: int) -> Filters:
        """Return the part of rows `start` to `stop`, views."""
        top_k, top_p, min_p = (None if x is None else x[start:stop] for x in (self.top_k, self.top_p, self.min_p))
        return Filters(self.temperature[start:stop], top_k, top_p, min_p)


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that are chosen alike: greedy ones have no filters. `rows=None` are all of the batch."""

    size: int
    rows: Tensor | None
    filters: Filters | None


@dataclass(frozen=True, slots=True)
class Prepared:
    """The parameters of a batch on its device. Made once, good as long as the same requests stand in the same rows.

    Attributes:
        params: of each row.
        stop_ids: ids that end a request besides its own ones.
        edits_logits: whether a row has something for `adjust` to do.
        keys: `[B]` int64, hashed seeds; None if all rows are greedy.
        groups: the rows, by the way they are chosen.
    """

    params: tuple[SamplingParams, ...]
    stop_ids: tuple[int, ...]
    edits_logits: bool
    keys: Tensor | None
    groups: tuple[_Group, ...]

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        device: torch.device,
        *,
        stop_ids: Sequence[int] = (),
    ) -> Prepared:
        """Make the tensors, with one copy to the device, or none if all rows are greedy.

        Args:
            params: of each row.
            seeds: of each row, any integers; those of greedy rows are not used.
            device: of the logits.
            stop_ids: the model's eos ids, which `min_tokens` forbids for a while.
        """
        if len(params) != len(seeds):
            raise ConfigError(f"Prepared: {len(params)} params, {len(seeds)} seeds")
        kinds: dict[str, list[int]] = {"greedy": [], "plain": [], "sorted": []}
        for row, p in enumerate(params):
            kinds["greedy" if p.temperature == 0 else "sorted" if p.top_k or p.top_p < 1 else "plain"].append(row)
        tables: list[dict[str, Tensor]] = [{}]
        if len(kinds["greedy"]) < len(params):
            tables[0]["keys"] = random_keys(torch.tensor([signed(seed) for seed in seeds], dtype=torch.int64), 0)
        for kind, rows in kinds.items():
            columns = {} if kind == "greedy" else _filter_columns([params[i] for i in rows])
            if len(rows) < len(params):
                columns["rows"] = torch.tensor(rows, dtype=torch.int64)
            tables.append(columns)
        moved = iter(to_device([column for columns in tables for column in columns.values()], device))
        shared, *there = ({name: next(moved) for name in columns} for columns in tables)
        groups = []
        for members, columns in zip(kinds.values(), there, strict=True):
            if members:
                part = columns.pop("rows", None)
                groups.append(_Group(len(members), part, Filters(**columns) if columns else None))
        edits = any(_looks_back(p) or p.logit_bias for p in params)
        return cls(tuple(params), tuple(stop_ids), edits, shared.get("keys"), tuple(groups))


def _looks_back(params: SamplingParams) -> bool:
    return bool(_punishes(params) or params.min_tokens)


def _punishes(params: SamplingParams) -> bool:
    return bool(params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty)


def _filter_columns(params: Sequence[SamplingParams]) -> dict[str, Tensor]:
    """The fields of `Filters` on the host."""
    # at least a normal number: the smallest temperature gives 0 and -inf, not inf - inf
    temperature = [min(max(p.temperature or 1.0, _TINY), _HUGE) for p in params]
    columns = {"temperature": torch.tensor(temperature, dtype=torch.float32)}
    top_k = [min(p.top_k or 2**62, 2**62) if p.temperature else 1 for p in params]
    if min(top_k, default=2**62) < 2**62:
        columns["top_k"] = torch.tensor(top_k, dtype=torch.int64)
    if any(p.top_p < 1 for p in params):
        columns["top_p"] = torch.tensor([p.top_p for p in params], dtype=torch.float64)
    if any(p.min_p for p in params):
        columns["min_p"] = torch.tensor([p.min_p for p in params], dtype=torch.float64)
    return columns


def to_device(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Move host tensors with one copy that nobody waits for."""
    if device.type == "cpu" or not parts:
        return list(parts)
    order = sorted(range(len(parts)), key=lambda i: -parts[i].itemsize)  # each stays aligned
    packed = torch.cat([parts[i].flatten().view(torch.uint8) for i in order]).pin_memory().to(device, non_blocking=True)
    pieces = torch.split(packed, [parts[i].nbytes for i in order])
    moved = {i: piece.view(parts[i].dtype).view(parts[i].shape) for i, piece in zip(order, pieces, strict=True)}
    return [moved[i] for i in range(len(parts))]


# ---- from logits to a token ---------------------------------------------------------------------


def adjust(
    logits: Tensor,
    params: Sequence[SamplingParams],
    counts: Sequence[History | None],
    *,
    stop_ids: Sequence[int],
    allowed: Tensor | None = None,
) -> Tensor:
    """Apply penalties, biases and masks to logits; a new tensor, or `logits` itself if nothing applies.

    In this order: (1) logits above 0 of ids in the prompt or the generated tokens are divided by `repetition_penalty`,
    those below multiplied; (2) `frequency_penalty` times the count of the id in the generated tokens is subtracted, and
    (3) `presence_penalty` if the count is not 0; (4) `logit_bias` is added; (5) until `min_tokens` were generated,
    `stop_ids` and `stop_token_ids` become -inf, unless `allowed` leaves nothing else; (6) so does what `allowed` does
    not allow. What is infinite stays so, and penalties do not make a finite logit infinite. Biases and stop ids outside
    the vocabulary are passed over.

    Args:
        logits: `[B, V]` fp32.
        params: of each row.
        counts: of each row; may be None where the parameters look at no history.
        stop_ids: ids that end any request.
        allowed: `[B, V]` bool, what a grammar permits.
    """
    edits = _Edits.of(params, counts, stop_ids, logits.shape[1])
    out = logits
    if any(len(part) for part in edits):
        num_punished = int(edits.lengths.sum())
        edits = _Edits(*to_device(edits, logits.device))
        out = logits.clone(memory_format=torch.contiguous_format)
        flat = out.view(-1)
        if len(edits.starts):
            row = torch.repeat_interleave(edits.lengths, output_size=num_punished)
            entry = torch.arange(num_punished, device=row.device)
            entry += (edits.begins + edits.lengths - edits.lengths.cumsum(0))[row]
            punished = [edits.punish(flat, row, edits.ids[entry], edits.times[entry])]
            if len(edits.later_ids):  # instead of the former
                punished.append(edits.punish(flat, edits.later_rows, edits.later_ids, edits.later_times))
            for places, values in punished:
                flat[places] = values
        if len(edits.biased):
            flat[edits.biased] += edits.biases
    if allowed is not None:
        out = out.masked_fill(~allowed, -torch.inf)
    if len(edits.masked):
        going_on = out.clone(memory_format=torch.contiguous_format)
        going_on.view(-1).index_fill_(0, edits.masked, -torch.inf)
        out = going_on if allowed is None else torch.where(going_on.amax(-1, keepdim=True) > -torch.inf, going_on, out)
    return out


class _Edits(NamedTuple):
    """What `adjust` does. Places are those in the flat logits; none is twice in a list.

    Attributes:
        starts, begins, lengths, divisors, frequency, presence: for each row with penalties: place of its first logit,
            where its ids begin and how many they are, and parameters.
        ids, times: of requests: what was seen, and how often it was generated; their rows share it.
        later_rows, later_ids, later_times: what counts instead in some of these rows.
        biased, biases: places, and what is added there.
        masked: places that become -inf.
    """

    starts: Tensor
    begins: Tensor
    lengths: Tensor
    divisors: Tensor
    frequency: Tensor
    presence: Tensor
    ids: Tensor
    times: Tensor
    later_rows: Tensor
    later_ids: Tensor
    later_times: Tensor
    biased: Tensor
    biases: Tensor
    masked: Tensor

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], counts: Sequence[History | None], stop_ids: Sequence[int], vocab: int
    ) -> _Edits:
        """Collect them on the host."""
        punished: list[tuple[int, SamplingParams]] = []
        begins, lengths, ids, times = array("q"), array("q"), array("q"), array("q")
        later_rows, later_ids, later_times = array("q"), array("q"), array("q")
        last: array[int] | None = None
        begin = 0
        bias: dict[int, float] = {}
        masked = array("q")
        for row, (p, history) in enumerate(zip(params, counts, strict=True)):
            start = row * vocab
            if p.logit_bias:
                bias.update({start + i: value for i, value in p.logit_bias.items() if i < vocab})
            if not _looks_back(p):
                continue
            if history is None:
                raise ConfigError(f"adjust: row {row} has penalties or min_tokens and needs its TokenCounts, got None")
            if _punishes(p) and (history.ids or history.later):
                if history.ids is not last:
                    last, begin = history.ids, len(ids)
                    ids.extend(history.ids)
                    times.extend(history.times)
                later_rows.extend([len(punished)] * len(history.later))
                later_ids.extend(history.later)
                later_times.extend(history.later.values())
                punished.append((start, p))
                begins.append(begin)
                lengths.append(len(history.ids))
            if history.num_generated < p.min_tokens:
                masked.extend(start + i for i in {*stop_ids, *p.stop_token_ids} if i < vocab)
        seen = _integers(ids)
        for found in (seen, _integers(later_ids)):
            assert not len(found) or (found.min() >= 0 and found.max() < vocab), f"ids outside 0..{vocab - 1} were seen"
        return cls(
            _integers(array("q", [start for start, _ in punished])),
            _integers(begins),
            _integers(lengths),
            _floats([min(max(p.repetition_penalty, _TINY), _HUGE) for _, p in punished]),
            _floats([p.frequency_penalty for _, p in punished]),
            _floats([p.presence_penalty for _, p in punished]),
            seen,
            _integers(times),
            _integers(later_rows),
            _integers(later_ids),
            _integers(later_times),
            _integers(array("q", bias)),
            _floats([*bias.values()]),
            _integers(masked),
        )

    def punish(self, flat: Tensor, rows: Tensor, ids: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        """Return places in the flat logits and what comes there, for ids of some of the rows with penalties."""
        places = self.starts[rows] + ids
        old, divisors = flat[places], self.divisors[rows]
        deductions = self.frequency[rows] * times + self.presence[rows] * (times > 0)
        new = torch.where(old > 0, old / divisors, old * divisors) - deductions
        return places, torch.where(old.isinf(), old, new.clamp(-_HUGE, _HUGE))


def _integers(values: array[int]) -> Tensor:
    # a copy-free view keeps the array alive, but cannot be made of nothing
    return torch.frombuffer(values, dtype=torch.int64) if values else torch.zeros(0, dtype=torch.int64)


def _floats(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def distribution(logits: Tensor, params: Sequence[SamplingParams] | Filters) -> Tensor:
    """Return the probabilities that tokens are drawn with.

    The logits are divided by the temperature; then `top_k` keeps so many of the best tokens; then `top_p` keeps the
    fewest of the best whose part of what `top_k` kept reaches it; then `min_p` drops the tokens that have less than
    this part of the largest probability. Best is by logit, ties by id. Of a row of temperature 0 the best token stays.

    A token of less than 2^-44 of the largest probability (at V = 163,840) has probability 0.

    Args:
        logits: `[N, V]`, after `adjust`.
        params: of each row, or their tensors, made once.

    Returns:
        `[N, V]` fp32; each row has the sum 1, or is 0 if its logits contain NaN or inf, or nothing but -inf.
    """
    filters = params if isinstance(params, Filters) else Filters.of(params, logits.device)
    logits = logits.float()
    ids = None
    if filters.top_k is not None or filters.top_p is not None:
        logits, ids = logits.sort(dim=-1, descending=True, stable=True)
    bits = 62 - logits.shape[1].bit_length()  # a row of ones stays below 2^62
    relative = (logits - logits.amax(-1, keepdim=True)).div_(filters.temperature[:, None]).exp_()
    # rows that are not finite are NaN by now, or 0
    weights = relative.mul_(2.0**bits).nan_to_num_().to(torch.int64)
    if filters.top_k is not None:
        ranks = torch.arange(logits.shape[1], device=logits.device)
        weights.masked_fill_(ranks >= filters.top_k[:, None], 0)
    if filters.top_p is not None:
        ends = weights.cumsum(-1)
        bound = torch.where(filters.top_p < 1, (filters.top_p * ends[:, -1]).ceil().to(torch.int64), ends[:, -1])
        weights.masked_fill_(ends.sub_(weights) >= bound[:, None], 0)
    if filters.min_p is not None:
        least = (filters.min_p * 2.0**bits).ceil().to(torch.int64)  # the largest weight is 2^bits
        weights.masked_fill_(weights < least[:, None], 0)
    # exact: a weight has the 24 bits of the fp32 number that it comes from
    probs = weights.to(torch.float32).div_(weights.sum(-1, keepdim=True).clamp_(min=1))
    return probs if ids is None else torch.empty_like(probs).scatter_(1, ids, probs)


def sample(
    logits: Tensor,
    prepared: Prepared,
    positions: Tensor,
    *,
    counts: Sequence[History | None] | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """Choose the next token of each row, without waiting for the device.

    A row depends on its own logits, parameters, seed, position and history alone.

    Args:
        logits: `[B, V]`.
        prepared: parameters of the rows.
        positions: `[B]` of integers on the device: tokens in front of the one that is chosen, prompt included.
        counts: history of each row; may be None if no row looks at its own.
        allowed: `[B, V]` bool, what grammars permit.

    Returns:
        `[B]` int64; -1 for a row whose logits contain NaN or inf, or that has nothing left to choose from.
    """
    num_rows, vocab = logits.shape
    if not len(prepared.params) == len(positions) == num_rows:
        raise ConfigError(f"sample: {num_rows} rows, {len(prepared.params)} params, {len(positions)} positions")
    raw = logits
    if prepared.edits_logits or allowed is not None:
        raw = logits.float()
        histories = [None] * num_rows if counts is None else counts
        logits = adjust(raw, prepared.params, histories, stop_ids=prepared.stop_ids, allowed=allowed)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    numbers = None if prepared.keys is None else random_numbers(prepared.keys, positions, torch.float64)
    for group in prepared.groups:
        for start, stop in _slices(group.size, vocab, _DRAWN_TOGETHER):
            rows = slice(start, stop) if group.rows is None else group.rows[start:stop]
            if group.filters is None or numbers is None:
                best, chosen = logits[rows].max(-1)  # NaN is the largest of all; of equal ones the first
                tokens[rows] = torch.where(best.isfinite(), chosen, -1)
            else:
                tokens[rows] = draw(distribution(logits[rows], group.filters.rows(start, stop)), numbers[rows])
    # a mask may have hidden what is not finite
    return tokens if logits is raw else torch.where(raw.amax(-1).isfinite(), tokens, -1)


def _slices(num_rows: int, vocab: int, elements: int) -> Iterator[tuple[int, int]]:
    step = max(elements // vocab, 1)
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)


# ---- log-probabilities --------------------------------------------------------------------------


class Logprobs(NamedTuple):
    """Log-probabilities of N tokens.

    Attributes:
        chosen: `[N]` fp32, of the tokens themselves.
        top_ids: `[N, top]` int64, the best tokens of each place, best first, ties by id.
        top_values: `[N, top]` fp32, theirs.
    """

    chosen: Tensor
    top_ids: Tensor
    top_values: Tensor


def logprobs_of(logits: Tensor, ids: Tensor, top: int = 0) -> Logprobs:
    """Return log-probabilities as the model gives them: `log_softmax(logits.float())`, to the bit.

    Works on a few rows at a time: prompts are long.

    Args:
        logits: `[N, V]`, before `adjust`.
        ids: `[N]` int64; -1 has the log-probability NaN.
        top: how many of the best tokens to name; of V at most all.
    """
    num_rows, vocab = logits.shape
    top = min(top, vocab)
    found = Logprobs(
        torch.empty(num_rows, dtype=torch.float32, device=logits.device),
        torch.empty(num_rows, top, dtype=torch.int64, device=logits.device),
        torch.empty(num_rows, top, dtype=torch.float32, device=logits.device),
    )
    for start, stop in _slices(num_rows, vocab, _REPORTED_TOGETHER):
        part, chosen = logits[start:stop].float(), ids[start:stop, None]
        values = part.log_softmax(-1)
        found.chosen[start:stop] = values.gather(1, chosen.clamp(min=0)).masked_fill_(chosen < 0, torch.nan)[:, 0]
        if top:
            # no two are equal: `topk` promises nothing about ties
            keys = _order(part).to(torch.int64).bitwise_left_shift_(32).add_(torch.arange(vocab, device=part.device))
            best = keys.topk(top, largest=False).values & 0xFFFFFFFF
            found.top_ids[start:stop] = best
            found.top_values[start:stop] = values.gather(1, best)
    return found


def _order(logits: Tensor) -> Tensor:
    """Integers that ascend where fp32 logits descend, and are equal where they are equal."""
    bits = (logits + 0.0).view(torch.int32)  # -0 is 0
    return ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))


def token_logprobs(ids: Sequence[int], found: Logprobs, top: Sequence[int] | None = None) -> list[TokenLogprob]:
    """Copy log-probabilities to the host, as the outputs of requests have them.

    Args:
        ids: `[N]`, as given to `logprobs_of`.
        found: its result.
        top: how many of the best tokens each entry names; None is all that were found.
    """
    chosen, top_ids, top_values = (x.tolist() for x in found)
    pairs = [tuple(zip(*row, strict=True)) for row in zip(top_ids, top_values, strict=True)]
    if top is not None:
        pairs = [row[:n] for row, n in zip(pairs, top, strict=True)]
    return [TokenLogprob(*entry) for entry in zip(ids, chosen, pairs, strict=True)]
