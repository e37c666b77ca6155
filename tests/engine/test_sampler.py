"""Sampling: exact distributions, reproducible draws, rows independent of each other."""

import math
import random

import pytest
import torch

from k3lib.engine import SamplingParams
from k3lib.engine.sampler import distribution, draw, sample
from k3lib.errors import ConfigError, RequestError

GREEDY = SamplingParams(temperature=0)
LOGITS = [2.0, -1.0, 3.5, 0.25, 3.5, -4.0, 1.0]


def generators(*seeds):
    return [random.Random(seed) for seed in seeds]


def plain_distribution(logits, params):
    """Temperature, top-k, then top-p over sorted probabilities in double precision: a dictionary of the kept ids."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weights = {i: math.exp((logits[i] - max(logits)) / params.temperature) for i in order[: params.top_k or None]}
    total = sum(weights.values())
    kept, mass = {}, 0.0
    for i in weights:
        if kept and mass >= params.top_p:
            break
        kept[i] = weights[i] / total
        mass += kept[i]
    return {i: p / sum(kept.values()) for i, p in kept.items()}


CASES = [
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=5.0),
    SamplingParams(top_k=1),
    SamplingParams(top_k=3),
    SamplingParams(top_k=100),
    SamplingParams(top_p=0.01),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=0.999),
    SamplingParams(temperature=2.0, top_k=4, top_p=0.8),
    SamplingParams(temperature=0.5, top_k=2, top_p=0.45),
]


def name_of(params):
    return (
        f"t{params.temperature}-k{params.top_k}-p{params.top_p}" if isinstance(params, SamplingParams) else str(params)
    )


@pytest.mark.parametrize("params", CASES, ids=name_of)
def test_distribution_is_the_plain_one(params):
    other = SamplingParams(temperature=3.0, top_k=2)
    logits = torch.stack([torch.tensor(LOGITS), torch.randn(len(LOGITS))])
    probs, ids = distribution(logits, [params, other])
    want = plain_distribution(LOGITS, params)
    got = {int(i): float(p) for i, p in zip(ids[0], probs[0], strict=True) if p > 0}
    assert list(got) == list(want)
    assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("params", CASES, ids=name_of)
def test_draw_inverts_the_distribution(params):
    """Every uniform of a fine grid gives the id whose interval it lies in."""
    probs, ids = distribution(torch.tensor([LOGITS]), [params])
    count = 4096
    uniforms = (torch.arange(count) + 0.5) / count
    drawn = draw(probs.expand(count, -1), ids.expand(count, -1), uniforms)
    want = plain_distribution(LOGITS, params)
    assert set(drawn.tolist()) <= want.keys()
    for i, p in want.items():
        assert abs(int((drawn == i).sum()) - p * count) <= 2


@pytest.mark.parametrize("params", [CASES[0], CASES[8], CASES[10]], ids=name_of)
def test_frequencies_over_seeds(params):
    count = 4000
    drawn = sample(torch.tensor([LOGITS]).expand(count, -1), [params] * count, generators(*range(count)))
    want = plain_distribution(LOGITS, params)
    assert set(drawn) <= want.keys()
    chi_square = sum((drawn.count(i) - count * p) ** 2 / (count * p) for i, p in want.items())
    freedom = len(want) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 4  # far beyond the 99.9th percentile


def test_greedy_ties_go_to_the_lowest_id():
    assert sample(torch.tensor([LOGITS, [0.0] * 7, [-1.0] * 6 + [1.0]]), [GREEDY] * 3, generators(1, 2, 3)) == [2, 0, 6]


def test_sampled_ties_are_ordered_by_id():
    _, ids = distribution(torch.tensor([[1.0, 5.0, 1.0, 5.0]]), [SamplingParams()])
    assert ids.tolist() == [[1, 3, 0, 2]]
    assert sample(torch.tensor([[1.0, 5.0, 1.0, 5.0]]), [SamplingParams(top_k=1)], generators(0)) == [1]


def test_a_seed_gives_the_same_token_in_any_company():
    row = torch.randn(50)
    params = SamplingParams(temperature=1.3, top_p=0.95)
    for seed in range(20):
        alone = sample(row[None], [params], generators(seed))[0]
        others = [SamplingParams(top_k=3), GREEDY, SamplingParams(temperature=0.1)]
        for place in range(4):
            rows = torch.randn(4, 50)
            rows[place] = row
            mixed = [*others[:place], params, *others[place:]]
            assert sample(rows, mixed, generators(*[seed if i == place else 99 for i in range(4)]))[place] == alone


def test_a_generator_gives_one_number_a_drawn_token():
    rng, other = random.Random(5), random.Random(5)
    for _ in range(3):
        sample(torch.randn(2, 9), [SamplingParams(), GREEDY], [rng, random.Random(0)])
        other.random()
    assert rng.random() == other.random()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_k=2, top_p=0.5)], ids=name_of)
def test_a_row_that_is_not_finite_gives_none_and_disturbs_nobody(bad, params):
    rows = torch.randn(5, 20)
    each = [SamplingParams(), params, GREEDY, SamplingParams(top_p=0.7), SamplingParams(top_k=4)]
    clean = sample(rows, each, generators(*range(5)))
    rows[1, 13] = bad
    got = sample(rows, each, generators(*range(5)))
    assert got[1] is None
    assert got[:1] + got[2:] == clean[:1] + clean[2:]
    rows[1] = bad
    assert sample(rows, each, generators(*range(5))) == got


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-38, 1e-45, 5e-324])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e38], ids=str)
def test_the_coldest_temperatures_are_greedy(temperature, scale):
    logits = torch.tensor([[0.5, -1.0, 2.0, 0.0], [-2.5, -3.0, -0.5, -0.75]]) * scale
    params = [SamplingParams(temperature=temperature)] * 2
    for seed in range(5):
        assert sample(logits, params, generators(seed, seed + 1)) == [2, 2]
    probs, _ = distribution(logits, params)
    torch.testing.assert_close(probs.sum(-1), torch.ones(2))


@pytest.mark.parametrize("temperature", [1e30, 1e38, 1e300])
def test_the_hottest_temperatures_are_uniform(temperature):
    probs, _ = distribution(torch.tensor([LOGITS]), [SamplingParams(temperature=temperature)])
    torch.testing.assert_close(probs, torch.full((1, 7), 1 / 7))


def test_extreme_logits_are_drawn():
    logits = torch.tensor([[3e38, -3e38, 0.0], [-3e38, -3e38, -3e38]])
    tokens = sample(logits, [SamplingParams()] * 2, generators(0, 1))
    assert tokens[0] == 0
    assert tokens[1] in {0, 1, 2}


@pytest.mark.parametrize("params", CASES, ids=name_of)
@pytest.mark.parametrize("vocab", [1, 7, 1000])
def test_the_ends_of_the_unit_interval(params, vocab):
    """0 draws the best token, the largest uniform the last one that was kept, rounding up to 1 included."""
    probs, ids = distribution(torch.randn(1, vocab) * 4, [params])
    last = int(ids[0, int((probs > 0).sum()) - 1])
    assert draw(probs, ids, torch.tensor([0.0])).item() == ids[0, 0]
    kept = set(ids[0, : int((probs > 0).sum())].tolist())
    assert draw(probs, ids, torch.tensor([math.nextafter(1.0, 0.0)], dtype=torch.float32)).item() == last
    assert draw(probs, ids, torch.tensor([1 - 2**-24])).item() in kept


def test_everything_is_kept_unless_asked_otherwise():
    """The rounding of a long sum must not cut the tail off."""
    probs, _ = distribution(torch.randn(2, 163_840) * 2, [SamplingParams(), SamplingParams(temperature=1.5)])
    assert (probs > 0).all()


def test_counts_that_disagree_are_refused():
    with pytest.raises(ConfigError, match="2 rows, 1 params, 2 random states"):
        sample(torch.zeros(2, 3), [GREEDY], generators(0, 1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -1),
        ("max_new_tokens", -1),
    ],
)
def test_bad_parameters_are_refused(field, value):
    with pytest.raises(RequestError, match=f"{field} must be .*got {value}") as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
