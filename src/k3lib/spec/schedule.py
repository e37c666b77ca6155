"""How many draft tokens of each request to verify: pure functions of confidence and of what a step costs.

The survival of a draft token is the probability that it is accepted: the product of the confidences up to it.

Exactness: tokens that were not drawn may be cut anywhere. Where tokens were drawn, a cut may depend on the tokens in
front of it, but not on those behind it: else what is left would no longer have the distribution that the draft claims.
`adaptive_lengths` looks at nothing but the confidences up to the first token that is cut; that one must have been
estimated before its token was drawn, as a confidence head does. `schedule_lengths` compares all of them: for drawn
tokens give it survivals of an earlier step.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from k3lib.errors import ConfigError

if TYPE_CHECKING:
    from os import PathLike

    from k3lib.spec.proposer import Draft

__all__ = [
    "AdditiveTimes",
    "MeasuredRates",
    "StepRates",
    "adaptive_lengths",
    "load_step_rates",
    "read_step_rates",
    "read_temperatures",
    "schedule_lengths",
    "shorten",
    "survivals",
]

_LEAST_SURVIVAL = 1e-6  # a token that is less likely to be accepted is never verified
_DOUBLE_TOKENS = 64  # a round number, not measured: what a step of K3 costs depends on the machine


class StepRates(Protocol):
    """How fast steps of the target are."""

    @property
    def max_tokens(self) -> int | None:
        """Most tokens of a step that it knows of; None = any."""
        ...

    def rate(self, num_requests: int, num_tokens: int) -> float:
        """Return steps per second with so many requests and tokens."""
        ...


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """Measured steps per second by tokens of a step; in between those of the next smaller measurement.

    Attributes:
        tokens: of the measured steps, ascending.
        rates: theirs, steps per second.
        max_tokens: most tokens of a step.
    """

    tokens: tuple[int, ...]
    rates: tuple[float, ...]
    max_tokens: int | None

    def rate(self, num_requests: int, num_tokens: int) -> float:
        """Return steps per second with so many tokens; below the first measurement, the first."""
        del num_requests
        return self.rates[max(bisect.bisect_right(self.tokens, num_tokens) - 1, 0)]


@dataclass(frozen=True, slots=True)
class AdditiveTimes:
    """Seconds of a step: a constant, a part that grows with the requests, and one that grows with the tokens.

    Between the measurements both are linear; outside they stay as they are at the ends.

    Attributes:
        bias: seconds of any step.
        requests, request_seconds: the part of the requests, by their number.
        tokens, token_seconds: the part of the tokens, by their number.
    """

    bias: float
    requests: tuple[int, ...]
    request_seconds: tuple[float, ...]
    tokens: tuple[int, ...]
    token_seconds: tuple[float, ...]

    @property
    def max_tokens(self) -> int | None:
        """Any."""
        return None

    def seconds(self, num_requests: int, num_tokens: int) -> float:
        """Return the time of a step."""
        part = _interpolated(self.requests, self.request_seconds, num_requests)
        return self.bias + part + _interpolated(self.tokens, self.token_seconds, num_tokens)

    def rate(self, num_requests: int, num_tokens: int) -> float:
        """Return steps per second with so many requests and tokens."""
        return 1 / self.seconds(num_requests, num_tokens)


def _interpolated(xs: Sequence[int], ys: Sequence[float], x: int) -> float:
    i = bisect.bisect_right(xs, x)
    if i in {0, len(xs)}:
        return ys[min(i, len(xs) - 1)]
    return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])


# ---- tables -------------------------------------------------------------------------------------


def load_step_rates(path: str | PathLike[str]) -> StepRates:
    """Read a table of step times from a JSON file.

    Raises:
        ConfigError: no such file, no JSON, or what `read_step_rates` refuses.
    """
    try:
        table = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"step times: cannot read {path}: {error}") from error
    return read_step_rates(table)


def read_step_rates(table: object) -> StepRates:
    """Read a table of step times in one of two forms.

    `{"sample_batch_tokens": [...], "sample_steps_per_sec": [...], "max_batch_tokens": n}` has measured rates;
    `{"bias_seconds": x, "bs_probes": [...], "alpha_seconds": [...], "m_probes": [...], "theta_seconds": [...]}` the
    time of a step as a sum, by requests (alpha) and by tokens (theta). Further fields are passed over.

    Raises:
        ConfigError: neither, with the field and what it holds.
    """
    if not isinstance(table, Mapping):
        raise ConfigError(f"step times: needs a JSON object, got {type(table).__name__}")
    if "sample_batch_tokens" in table:
        tokens = _counts(table, "sample_batch_tokens")
        rates = _numbers(table, "sample_steps_per_sec", len(tokens), "sample_batch_tokens")
        if min(rates) <= 0:
            raise ConfigError(f"step times: sample_steps_per_sec must be > 0, got {min(rates)}")
        limit = table.get("max_batch_tokens")
        if limit is not None and (not _is_count(limit) or limit < 1):
            raise ConfigError(f"step times: max_batch_tokens must be an integer >= 1, got {limit!r}")
        return MeasuredRates(tokens, rates, limit)
    if "bias_seconds" not in table:
        raise ConfigError(
            f"step times: needs sample_batch_tokens or bias_seconds, got {', '.join(map(str, table)) or 'nothing'}"
        )
    bias = table["bias_seconds"]
    if not _is_number(bias) or bias < 0:
        raise ConfigError(f"step times: bias_seconds must be a number >= 0, got {bias!r}")
    requests, tokens = _counts(table, "bs_probes"), _counts(table, "m_probes")
    alpha = _numbers(table, "alpha_seconds", len(requests), "bs_probes")
    theta = _numbers(table, "theta_seconds", len(tokens), "m_probes")
    times = AdditiveTimes(float(bias), requests, alpha, tokens, theta)
    if bias + min(alpha) + min(theta) <= 0:
        raise ConfigError(
            f"step times: bias_seconds={bias}, alpha_seconds from {min(alpha)} and theta_seconds from {min(theta)} "
            "make steps that take no time"
        )
    return times


def read_temperatures(table: object, gamma: int) -> tuple[float, ...]:
    """Read the calibration of a confidence head: `{"temperatures": [...]}`, one above 0 for each draft token.

    Raises:
        ConfigError: not so, with what it holds.
    """
    if not isinstance(table, Mapping):
        raise ConfigError(f"calibration: needs a JSON object, got {type(table).__name__}")
    found = cast("Sequence[float]", table.get("temperatures"))
    if not _is_list(found) or len(found) != gamma or not all(_is_number(x) and x > 0 for x in found):
        raise ConfigError(f"calibration: temperatures must be {gamma} numbers > 0, got {found!r}")
    return tuple(map(float, found))


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _counts(table: Mapping[str, object], name: str) -> tuple[int, ...]:
    found = table.get(name)
    if not _is_list(found) or not found or not all(map(_is_count, cast("Sequence[object]", found))):
        raise ConfigError(f"step times: {name} must be a list of integers, got {found!r}")
    values = tuple(cast("Sequence[int]", found))
    if values[0] < 0 or any(a >= b for a, b in itertools.pairwise(values)):
        raise ConfigError(f"step times: {name} must ascend from 0 or more, got {found!r}")
    return values


def _numbers(table: Mapping[str, object], name: str, count: int, other: str) -> tuple[float, ...]:
    found = table.get(name)
    if not _is_list(found) or not all(_is_number(x) and x >= 0 for x in cast("Sequence[float]", found)):
        raise ConfigError(f"step times: {name} must be a list of numbers >= 0, got {found!r}")
    values = tuple(map(float, cast("Sequence[float]", found)))
    if len(values) != count:
        raise ConfigError(f"step times: {name} has {len(values)} entries, {other} has {count}")
    return values


# ---- lengths ------------------------------------------------------------------------------------


def survivals(confidence: Sequence[float], temperatures: Sequence[float] | None = None) -> list[float]:
    """Return for each draft token the estimated probability that it is accepted.

    Args:
        confidence: for each token, that it is accepted if those before it are; NaN counts as 0.
        temperatures: of each position, that divide the log-odds of the confidence (calibration).
    """
    if temperatures is not None and len(temperatures) < len(confidence):
        raise ConfigError(f"survivals: {len(temperatures)} temperatures for {len(confidence)} tokens")
    values = [min(max(c, 0.0), 1.0) if not math.isnan(c) else 0.0 for c in confidence]
    if temperatures is not None:
        values = [_calibrated(c, t) for c, t in zip(values, temperatures, strict=False)]
    return list(itertools.accumulate(values, lambda a, b: a * b))


def _calibrated(confidence: float, temperature: float) -> float:
    if confidence in {0.0, 1.0}:
        return confidence
    odds = math.log(confidence / (1 - confidence)) / temperature
    return 1 / (1 + math.exp(-odds)) if odds > -700 else 0.0


def schedule_lengths(rows: Sequence[Sequence[float]], rates: StepRates) -> list[int]:
    """Choose how many draft tokens of each request to verify, so that most tokens come out of a second.

    With b tokens more than one for each of R requests, a step gives `R + (sum of their survivals)` tokens and has the
    rate of R requests and R + b tokens. The b most likely tokens are the best; of equal ones the earlier positions,
    then the earlier requests. Of equal budgets the smallest is taken.

    Args:
        rows: `survivals` of each request; empty for one that has no draft.
        rates: what steps cost.

    Returns:
        For each request 0 to all of its tokens.
    """
    num_requests = len(rows)
    order = sorted(
        (-least, j, i)
        for i, row in enumerate(rows)
        for j, least in enumerate(itertools.accumulate(row, min))  # a token is of no use without those before it
        if least >= _LEAST_SURVIVAL
    )
    if rates.max_tokens is not None:
        order = order[: max(rates.max_tokens - num_requests, 0)]
    gain = [float(num_requests), *(-entry[0] for entry in order)]
    speed = [tokens * rates.rate(num_requests, num_requests + b) for b, tokens in enumerate(itertools.accumulate(gain))]
    lengths = [0] * num_requests
    for _, _, i in order[: speed.index(max(speed))]:
        lengths[i] += 1
    return lengths


def adaptive_lengths(
    rows: Sequence[Sequence[float]], num_requests: int, *, double_tokens: float = _DOUBLE_TOKENS
) -> list[int]:
    """Choose how many draft tokens of each request to verify where nothing was measured.

    Let a step of m tokens take a time in proportion to `1 + m / D`. Among R requests that decode plainly, a draft token
    of survival s pays if `(R + s) / (1 + (R + 1) / D) > R / (1 + R / D)`, so if `s > R / (R + D)`: near 0 for few
    requests, near 1 for many. With other draft tokens in the step the bound would be (tokens that come out) / (tokens
    that go in + D), higher if most of them are accepted and lower if few are. That is left out, so that a length
    depends on the load and the request's own confidences alone.

    Args:
        rows: `survivals` of each request.
        num_requests: that are in the step, with a draft or without.
        double_tokens: D, tokens of a step that takes twice as long as an empty one would.

    Returns:
        For each request the tokens in front of the first that does not pay.
    """
    bound = max(num_requests / (num_requests + double_tokens), _LEAST_SURVIVAL)
    return [next((j for j, s in enumerate(row) if s < bound), len(row)) for row in rows]


def shorten(drafts: Sequence[Draft | None], *, num_requests: int, double_tokens: float = _DOUBLE_TOKENS) -> list[int]:
    """Return how many tokens of each draft to verify by `adaptive_lengths`; all of one that knows no confidence.

    Args:
        drafts: of some requests; None = none.
        num_requests, double_tokens: see there.
    """
    rows = [[] if draft is None else _survivals_of(draft) for draft in drafts]
    return adaptive_lengths(rows, num_requests, double_tokens=double_tokens)


def _survivals_of(draft: Draft) -> list[float]:
    return [1.0] * len(draft.token_ids) if draft.confidence is None else survivals(draft.confidence)
