"""Verify lengths: the best budget, whole prefixes, and tables that are checked."""

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3lib.errors import ConfigError
from k3lib.spec.proposer import Draft
from k3lib.spec.schedule import (
    AdditiveTimes,
    MeasuredRates,
    adaptive_lengths,
    load_step_rates,
    read_step_rates,
    read_temperatures,
    schedule_lengths,
    shorten,
    survivals,
)

MEASURED = {"sample_batch_tokens": [1, 8, 32], "sample_steps_per_sec": [100, 80, 20.5], "max_batch_tokens": 64}
ADDITIVE = {
    "bias_seconds": 0.01, "bs_probes": [1, 5], "alpha_seconds": [0, 0.004], "m_probes": [2, 10, 20],
    "theta_seconds": [0.001, 0.002, 0.02],
}  # fmt: skip

CONFIDENCES = st.lists(st.sampled_from([0.0, 1e-7, 0.25, 0.5, 0.9, 1.0]), max_size=4)
ROWS = st.lists(CONFIDENCES.map(survivals), min_size=1, max_size=4)


class Rates:
    """Any steps per second, by tokens."""

    def __init__(self, rates, max_tokens=None):
        self.rates = rates
        self.max_tokens = max_tokens

    def rate(self, num_requests, num_tokens):
        return self.rates[num_tokens - num_requests]


# ---- the best lengths ---------------------------------------------------------------------------


def outcome(rows, lengths, rates):
    """Tokens in a second."""
    number = len(rows)
    tokens = number + sum(sum(row[:n]) for row, n in zip(rows, lengths, strict=True))
    return tokens * rates.rate(number, number + sum(lengths))


@given(rows=ROWS, rates=st.lists(st.integers(1, 8), min_size=17, max_size=17))
def test_no_other_lengths_give_more_tokens_in_a_second(rows, rates):
    rates = Rates(sorted(rates, reverse=True))
    chosen = schedule_lengths(rows, rates)
    best = max(outcome(rows, n, rates) for n in itertools.product(*(range(len(row) + 1) for row in rows)))
    assert outcome(rows, chosen, rates) >= best * (1 - 1e-5)  # what is below 1e-6 is left out
    assert all(row[n - 1] >= 1e-6 for row, n in zip(rows, chosen, strict=True) if n)


@given(rows=ROWS, budget=st.integers(0, 16))
def test_tokens_go_to_the_likeliest_then_to_early_positions_then_to_early_requests(rows, budget):
    """A budget is forced by rates that are 0 elsewhere."""
    pairs = [(-s, j, i) for i, row in enumerate(rows) for j, s in enumerate(row) if s >= 1e-6]
    budget = min(budget, len(pairs))
    lengths = schedule_lengths(rows, Rates([float(b == budget) for b in range(17)]))
    picks = sorted(pairs)[:budget]
    assert lengths == [sum(i == k for _, _, i in picks) for k in range(len(rows))]


def test_of_equal_budgets_the_smallest_is_taken():
    assert schedule_lengths([[1.0, 1.0]], Rates([6.0, 3.0, 2.0])) == [0]
    assert schedule_lengths([[1.0, 1.0]], Rates([6.0, 3.1, 2.1])) == [2]


def test_no_step_is_larger_than_the_table_knows():
    rows = [[1.0] * 4, [0.9] * 4]
    for limit, lengths in ((1, [0, 0]), (2, [0, 0]), (5, [3, 0]), (8, [4, 2]), (100, [4, 4])):
        assert schedule_lengths(rows, Rates([1.0] * 9, limit)) == lengths


def test_no_requests_have_no_lengths():
    assert schedule_lengths([], read_step_rates(MEASURED)) == []
    assert adaptive_lengths([], 3) == []


# ---- without a table ----------------------------------------------------------------------------


@given(rows=ROWS, number=st.integers(4, 500), double=st.sampled_from([1.0, 64.0, 1000.0]))
def test_adaptive_lengths_are_prefixes_that_shrink_with_the_load(rows, number, double):
    lengths = adaptive_lengths(rows, number, double_tokens=double)
    for row, n in zip(rows, lengths, strict=True):
        pays = [(number + s) / (1 + (number + 1) / double) - number / (1 + number / double) for s in row]
        assert all(gain > -1e-9 for gain in pays[:n])
        assert n == len(row) or pays[n] < 1e-9 or row[n] < 1e-6
    assert all(a >= b for a, b in zip(lengths, adaptive_lengths(rows, number + 7, double_tokens=double), strict=True))


@given(rows=ROWS, changed=CONFIDENCES, number=st.integers(1, 100))
def test_an_adaptive_length_depends_on_nothing_behind_it(rows, changed, number):
    """What a drawn token is followed by must not decide whether it is verified."""
    for row, n in zip(rows, adaptive_lengths(rows, number), strict=True):
        if n < len(row):
            other = [*row[: n + 1], *(row[n] * s for s in survivals(changed))]
            assert adaptive_lengths([other, *rows], number)[0] == n


def test_drafts_are_shortened_by_their_confidence():
    drafts = [Draft([5, 6, 7], confidence=[0.9, 0.5, 0.1]), Draft([5, 6]), None, Draft([]), Draft([1], None, [0.0])]
    assert shorten(drafts, num_requests=5) == [2, 2, 0, 0, 0]
    assert shorten(drafts, num_requests=100, double_tokens=64) == [1, 2, 0, 0, 0]
    assert shorten(drafts, num_requests=10**9) == [0, 2, 0, 0, 0]


# ---- survivals ----------------------------------------------------------------------------------


@given(CONFIDENCES)
def test_a_survival_is_the_product_of_the_confidences(confidence):
    assert survivals(confidence) == pytest.approx([math.prod(confidence[: j + 1]) for j in range(len(confidence))])
    assert survivals(confidence, [1.0] * 4) == pytest.approx(survivals(confidence))


def test_temperatures_divide_the_log_odds():
    (got,) = survivals([0.8], [2.0])
    assert math.log(got / (1 - got)) == pytest.approx(math.log(4) / 2)
    assert survivals([1.0, 0.0], [5.0, 5.0]) == [1.0, 0.0]
    assert survivals([1e-300], [1e-3]) == [0.0]


def test_a_confidence_that_is_no_probability_promises_nothing():
    assert survivals([0.5, math.nan, 1.0]) == [0.5, 0.0, 0.0]
    assert survivals([2.0, -1.0]) == [1.0, 0.0]


# ---- tables -------------------------------------------------------------------------------------


def test_measured_rates_are_looked_up_below():
    rates = read_step_rates(MEASURED)
    assert isinstance(rates, MeasuredRates)
    assert [rates.rate(1, m) for m in (0, 1, 7, 8, 31, 32, 10**6)] == [100, 100, 100, 80, 80, 20.5, 20.5]
    assert rates.max_tokens == 64


def test_additive_times_are_linear_between_probes_and_constant_outside():
    times = read_step_rates(ADDITIVE)
    assert isinstance(times, AdditiveTimes)
    seconds = [times.seconds(r, m) for r, m in ((1, 2), (0, 0), (5, 10), (3, 6), (9, 15), (1, 99))]
    assert seconds == pytest.approx([0.011, 0.011, 0.016, 0.01 + 0.002 + 0.0015, 0.01 + 0.004 + 0.011, 0.03])
    assert times.rate(3, 6) == pytest.approx(1 / 0.0135)


def test_tables_come_from_files(tmp_path):
    path = tmp_path / "times.json"
    path.write_text(json.dumps(ADDITIVE))
    assert load_step_rates(path) == read_step_rates(ADDITIVE)
    path.write_text("{")
    for bad in (path, tmp_path / "none.json"):
        with pytest.raises(ConfigError, match="cannot read"):
            load_step_rates(bad)


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ([], "needs a JSON object, got list"),
        ({}, "needs sample_batch_tokens or bias_seconds, got nothing"),
        ({"x": 1}, "got x"),
        (MEASURED | {"sample_batch_tokens": []}, r"sample_batch_tokens must be a list of integers, got \[\]"),
        (MEASURED | {"sample_batch_tokens": [1, 2.5, 3]}, "must be a list of integers"),
        (MEASURED | {"sample_batch_tokens": [1, 8, 8]}, "must ascend from 0 or more"),
        (MEASURED | {"sample_batch_tokens": [-1, 8, 9]}, "must ascend from 0 or more"),
        (MEASURED | {"sample_steps_per_sec": [1.0, 2.0]}, "has 2 entries, sample_batch_tokens has 3"),
        (MEASURED | {"sample_steps_per_sec": [1.0, 2.0, 0]}, "must be > 0, got 0"),
        (MEASURED | {"sample_steps_per_sec": [1.0, 2.0, math.nan]}, "must be a list of numbers"),
        (MEASURED | {"sample_steps_per_sec": "abc"}, "must be a list of numbers"),
        (MEASURED | {"sample_steps_per_sec": None}, "must be a list of numbers"),
        (MEASURED | {"max_batch_tokens": 0}, "max_batch_tokens must be an integer >= 1, got 0"),
        (ADDITIVE | {"bias_seconds": -1}, "bias_seconds must be a number >= 0, got -1"),
        (ADDITIVE | {"bs_probes": 3}, "bs_probes must be a list of integers, got 3"),
        (ADDITIVE | {"alpha_seconds": [0.0]}, "alpha_seconds has 1 entries, bs_probes has 2"),
        (ADDITIVE | {"theta_seconds": [0.1, 0.2, -0.3]}, "theta_seconds must be a list of numbers >= 0"),
        (ADDITIVE | {"bias_seconds": 0, "theta_seconds": [0, 1, 2]}, "steps that take no time"),
    ],
)  # fmt: skip
def test_bad_tables_are_refused(table, reason):
    with pytest.raises(ConfigError, match=reason):
        read_step_rates(table)


def test_calibrations_are_checked():
    assert read_temperatures({"temperatures": [1, 0.5], "note": "x"}, 2) == (1.0, 0.5)
    for bad in ({"temperatures": [1.0]}, {"temperatures": [1.0, 0.0]}, {"temperatures": "ab"}, {}):
        with pytest.raises(ConfigError, match="temperatures must be 2 numbers > 0"):
            read_temperatures(bad, 2)
    with pytest.raises(ConfigError, match="got str"):
        read_temperatures("x", 2)
    with pytest.raises(ConfigError, match="1 temperatures for 2 tokens"):
        survivals([0.5, 0.5], [1.0])
