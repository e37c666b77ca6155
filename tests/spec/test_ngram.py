"""Prompt lookup."""

import time

import pytest

from k3lib import SamplingParams
from k3lib.errors import ConfigError
from k3lib.spec import Bound, DraftContext, NGram, Proposer

PARAMS = SamplingParams()


def context(ids, name="r"):
    return DraftContext(name, ids, PARAMS)


def proposal(ids, **options):
    (draft,) = NGram(**options).propose([context(ids)])
    assert draft.probs is None
    assert draft.confidence is None
    return list(draft.token_ids)


def by_scan(ids, block, longest, shortest):
    """The same by looking at everything."""
    for length in range(min(longest, len(ids) - 1), shortest - 1, -1):
        for end in range(len(ids) - 1, length - 1, -1):
            if ids[end - length : end] == ids[-length:]:
                more = list(ids)
                for i in range(block):
                    more.append(more[end + i])
                return more[len(ids) :]
    return []


def test_it_is_a_proposer_without_needs():
    assert isinstance(NGram(), Proposer)
    assert not isinstance(NGram(), Bound)
    assert NGram().feature_layers == ()


@pytest.mark.parametrize(
    ("ids", "want"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5, 1]),
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], [4, 9, 1, 2]),  # the latest of equals
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], [3, 8, 1, 2]),  # the longest wins over the latest
        ([5, 5, 5], [5, 5, 5, 5]),  # goes on with itself
        ([1, 2, 1, 2, 1, 2], [1, 2, 1, 2]),
        ([1, 2, 3, 4], []),
        ([1, 1], []),
        ([1], []),
    ],
)
def test_continuations(ids, want):
    assert proposal(ids, block_size=4) == want


def test_limits_of_a_match():
    ids = [7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2]
    assert proposal(ids, block_size=2, longest=2) == [4, 7]  # longer matches do not count
    assert proposal(ids, block_size=2, shortest=4) == []
    assert proposal([3, 4, 3], block_size=2, shortest=1) == [4, 3]
    assert proposal([3, 4, 3], block_size=2) == []


def test_growing_contexts_equal_a_scan_of_each():
    ids, state = [], 1
    ngram = NGram(5, longest=4, shortest=1, candidates=10_000)
    for _ in range(300):
        state = state * 48271 % 2147483647
        ids.append(state % 5)
        ngram.commit([context(ids, "other"), context(ids)])
        (draft,) = ngram.propose([context(ids)])
        assert draft.token_ids == by_scan(ids, 5, 4, 1)


def test_each_request_has_its_own_context():
    ngram = NGram(3)
    one, two = ngram.propose([context([1, 2, 3, 1, 2], "a"), context([1, 2, 9, 1, 2], "b")])
    assert (one.token_ids, two.token_ids) == ([3, 1, 2], [9, 1, 2])
    assert ngram.propose([]) == []


def test_a_dropped_or_other_context_is_forgotten():
    ngram = NGram(3)
    ngram.propose([context([1, 2, 3, 1, 2])])
    assert ngram.propose([context([1, 2, 8, 9])])[0].token_ids == []  # shorter: not a continuation
    ngram.propose([context([1, 2, 3, 1, 2])])
    ngram.drop("r")
    ngram.drop("unknown")
    assert ngram.propose([context([6, 5, 4, 3, 2, 1, 2])])[0].token_ids == []


def test_a_step_does_not_read_the_context_again():
    ids = [i % 7 for i in range(400_000)]
    ngram = NGram()
    ngram.commit([context(ids)])
    begin = time.perf_counter()
    for token in range(50):
        ids.append(token)
        ngram.propose([context(ids)])
    assert time.perf_counter() - begin < 0.25  # a scan takes longer each time


def test_bad_options_are_refused():
    for options, match in (
        ({"block_size": 0}, "block_size must be 1 .. 15, got 0"),
        ({"block_size": 16}, "block_size must be 1 .. 15, got 16"),
        ({"shortest": 0}, "shortest must be 1 .. 8, got 0"),
        ({"shortest": 5, "longest": 4}, "shortest must be 1 .. 4, got 5"),
        ({"candidates": 0}, "candidates must be 1 .."),
    ):
        with pytest.raises(ConfigError, match=match):
            NGram(**options)
