"""Sampling: exact distributions, reproducible draws, rows independent of each other."""

import collections
import copy
import dataclasses
import math
import pickle

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from k3lib.engine import SamplingParams
from k3lib.engine.request import TokenLogprob
from k3lib.engine.sampler import (
    Filters,
    Prepared,
    TokenCounts,
    adjust,
    distribution,
    draw,
    logprobs_of,
    sample,
    token_logprobs,
    uniforms,
)
from k3lib.errors import ConfigError, RequestError

CPU = torch.device("cpu")
VOCAB = 163_840
GREEDY = SamplingParams(temperature=0)
LOGITS = [2.0, -1.0, 3.5, 0.25, 3.5, -4.0, 1.0]


def choose(logits, params, seeds=None, positions=None, stop_ids=(), **more):
    """Tokens of one step, as a list."""
    seeds = range(len(params)) if seeds is None else seeds
    prepared = Prepared.of(params, seeds, logits.device, stop_ids=stop_ids)
    positions = torch.zeros(len(params), dtype=torch.int64) if positions is None else torch.as_tensor(positions)
    return sample(logits, prepared, positions.to(logits.device), **more).tolist()


def plain_distribution(logits, params):
    """Temperature, top-k, top-p, min-p over sorted probabilities in double precision: the kept ids, best first."""
    if params.temperature == 0:
        return {max(range(len(logits)), key=lambda i: (logits[i], -i)): 1.0}
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weights = {i: math.exp((logits[i] - max(logits)) / params.temperature) for i in order[: params.top_k or None]}
    total = sum(weights.values())
    kept, mass = {}, 0.0
    for i in weights:
        if kept and mass >= params.top_p:
            break
        kept[i] = weights[i] / total
        mass += kept[i]
    kept = {i: p for i, p in kept.items() if p >= params.min_p * max(kept.values())}
    return {i: p / sum(kept.values()) for i, p in kept.items() if p > 0}


def kept(probs):
    return {i: p for i, p in enumerate(probs.tolist()) if p > 0}


CASES = [
    GREEDY,
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=5.0),
    SamplingParams(top_k=1),
    SamplingParams(top_k=3),
    SamplingParams(top_k=100),
    SamplingParams(top_k=10**30),
    SamplingParams(top_p=1e-300),
    SamplingParams(top_p=0.01),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=0.999),
    SamplingParams(top_p=math.nextafter(1, 0)),
    SamplingParams(min_p=1e-6),
    SamplingParams(min_p=0.05),
    SamplingParams(min_p=1.0),
    SamplingParams(temperature=2.0, top_k=4, top_p=0.8),
    SamplingParams(temperature=0.5, top_k=2, top_p=0.45),
    SamplingParams(temperature=3.0, top_k=5, top_p=0.95, min_p=0.3),
]


def name_of(value):
    if not isinstance(value, SamplingParams):
        return str(value)
    return f"t{value.temperature}-k{value.top_k}-p{value.top_p}-m{value.min_p}"


# ---- distributions ------------------------------------------------------------------------------


@pytest.mark.parametrize("params", CASES, ids=name_of)
def test_distribution_is_the_plain_one(params, device):
    other = SamplingParams(temperature=3.0, top_k=2, top_p=0.9, min_p=0.2)
    logits = torch.stack([torch.tensor(LOGITS), torch.randn(len(LOGITS))]).to(device)
    assert kept(distribution(logits, [params, other])[0]) == pytest.approx(plain_distribution(LOGITS, params), rel=1e-5)
    assert torch.equal(distribution(logits[:1], [params])[0], distribution(logits, [params, other])[0])


@given(data=st.data())
def test_distribution_is_the_plain_one_for_random_rows(data):
    values = st.sampled_from([-math.inf, -60.0, -3.0, -0.0, 0.0, 1.5, 1.75, 2.0, 9.0])
    params = SamplingParams(
        temperature=data.draw(st.sampled_from([0.0, 0.25, 1.0, 7.0])),
        top_k=data.draw(st.integers(0, 9)),
        top_p=data.draw(st.floats(0.01, 1)),
        min_p=data.draw(st.floats(0, 1)),
    )
    logits = data.draw(st.lists(values, min_size=1, max_size=12))
    assume(max(logits) > -math.inf)
    mass, whole = 0.0, plain_distribution(logits, dataclasses.replace(params, top_p=1.0, min_p=0.0))
    for p in whole.values():  # not at a bound: rounding decides there
        mass += p
        assume(params.top_p == 1 or abs(mass - params.top_p) > 1e-5)
        assume(p == max(whole.values()) or abs(p / max(whole.values()) - params.min_p) > 1e-5)
    got = kept(distribution(torch.tensor([logits]), [params])[0])
    assert got == pytest.approx(plain_distribution(logits, params), rel=1e-4, abs=1e-12)


@pytest.mark.parametrize("vocab", [1, 300, VOCAB])
@pytest.mark.parametrize("kind", ["normal", "coarse", "equal", "masked", "negative"])
def test_what_is_kept_is_the_shortest_prefix(vocab, kind, device):
    """Stated without an order: nothing better was dropped, the bounds are reached, and not without the last token."""
    logits = torch.randn(6, vocab) * torch.tensor([0.01, 1.0, 3.0, 3.0, 10.0, 1.0])[:, None]
    if kind == "coarse":
        logits = logits.bfloat16().float()
    elif kind == "equal":
        logits = torch.zeros_like(logits)
    elif kind == "masked":
        logits = logits.masked_fill(torch.rand_like(logits) < 0.9, -torch.inf)
        logits[:, -1] = 0.5
    elif kind == "negative":
        logits = -logits.abs() - 1e30
    logits = logits.to(device)
    plain = distribution(logits, [SamplingParams()] * 6).double()
    alive = (plain > 0).sum(-1)
    places = torch.arange(vocab, device=device)
    for top_k, top_p in ((17, 1.0), (0, 0.37), (5000, 0.93), (5000, 1.0)):
        among = distribution(logits, [SamplingParams(top_k=top_k)] * 6) > 0
        assert torch.equal(among.sum(-1), alive.clamp(max=top_k or vocab))
        got = distribution(logits, [SamplingParams(top_k=top_k, top_p=top_p)] * 6) > 0
        assert not (got & ~among).any()
        worst = logits.masked_fill(~got, torch.inf).amin(-1, keepdim=True)
        last = (places * (got & (logits == worst))).amax(-1, keepdim=True)
        better = (logits > worst) | ((logits == worst) & (places <= last))
        assert torch.equal(got, better & (plain > 0))
        whole = (plain * among).sum(-1)
        mass = (plain * got).sum(-1)
        assert (mass >= (top_p - 1e-6) * whole).all()
        without_last = mass - plain.gather(1, last)[:, 0]
        assert ((without_last <= (top_p + 1e-6) * whole) | (top_p == 1)).all()


@pytest.mark.parametrize("params", CASES, ids=name_of)
@pytest.mark.parametrize("vocab", [7, 1000])
def test_a_distribution_sums_to_one(params, vocab):
    probs = distribution(torch.randn(3, vocab) * 4, [params] * 3)
    torch.testing.assert_close(probs.double().sum(-1), torch.ones(3, dtype=torch.float64), rtol=3e-7, atol=0)


def test_everything_is_kept_unless_asked_otherwise():
    """The rounding of a long sum must not cut the tail off."""
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.5),
        SamplingParams(top_k=VOCAB),
        SamplingParams(top_k=VOCAB + 1),
    ]
    probs = distribution(torch.randn(4, VOCAB) * 2, params)
    assert (probs > 0).all()


def test_of_equal_tokens_the_lowest_ids_are_kept():
    row = torch.tensor([[1.0, 5.0, 1.0, 5.0, 1.0, -0.0, 0.0]])
    for params, ids in [
        (SamplingParams(top_k=1), {1}),
        (SamplingParams(top_k=3), {0, 1, 3}),
        (SamplingParams(top_k=4), {0, 1, 2, 3}),
        (SamplingParams(top_k=6), {0, 1, 2, 3, 4, 5}),  # -0 is 0
        (SamplingParams(temperature=1e30, top_p=0.4), {0, 1, 3}),
        (SamplingParams(temperature=1e30, top_k=3), {0, 1, 3}),  # by logit, although the probabilities are equal
        (SamplingParams(min_p=1.0), {1, 3}),
    ]:
        assert kept(distribution(row, [params])[0]).keys() == ids, params


@pytest.mark.parametrize(("top_p", "count"), [(0.25, 1), (0.2500001, 2), (0.5, 2), (0.75, 3), (0.76, 4), (1.0, 4)])
def test_what_reaches_top_p_exactly_is_enough(top_p, count):
    assert len(kept(distribution(torch.zeros(1, 4), [SamplingParams(top_p=top_p)])[0])) == count


@pytest.mark.parametrize("params", CASES, ids=name_of)
def test_given_tensors_make_the_same_distribution(params):
    logits = torch.randn(4, 50)
    each = [params, SamplingParams(temperature=0.7), params, SamplingParams(top_p=0.8)]
    filters = Filters.of(each, CPU)
    assert torch.equal(distribution(logits, filters), distribution(logits, each))
    assert torch.equal(distribution(logits[1:3], filters.rows(1, 3)), distribution(logits, each)[1:3])


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-38, 1e-45, 5e-324])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e38], ids=str)
def test_the_coldest_temperatures_are_greedy(temperature, scale):
    logits = torch.tensor([[0.5, -1.0, 2.0, 0.0], [-2.5, -3.0, -0.5, -0.75]]) * scale
    params = [SamplingParams(temperature=temperature)] * 2
    for seed in range(5):
        assert choose(logits, params, [seed, seed + 1]) == [2, 2]
    torch.testing.assert_close(distribution(logits, params).sum(-1), torch.ones(2))


@pytest.mark.parametrize("temperature", [1e30, 1e38, 1e300])
def test_the_hottest_temperatures_are_uniform(temperature):
    probs = distribution(torch.tensor([LOGITS]), [SamplingParams(temperature=temperature)])
    torch.testing.assert_close(probs, torch.full((1, 7), 1 / 7))


def test_extreme_logits_are_drawn():
    logits = torch.tensor([[3e38, -3e38, 0.0], [-3e38, -3e38, -3e38]])
    for params in (SamplingParams(), SamplingParams(temperature=1e300), SamplingParams(top_p=0.9, top_k=3)):
        tokens = choose(logits, [params] * 2)
        assert tokens[0] in ({0, 2} if params.temperature > 1 else {0})
        assert tokens[1] in {0, 1, 2}


# ---- drawing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", CASES, ids=name_of)
def test_draw_inverts_the_distribution(params, device):
    """Every uniform of a fine grid gives the id whose interval it lies in, in the order of the ids."""
    probs = distribution(torch.tensor([LOGITS], device=device), [params])
    count = 4096
    drawn = draw(probs.expand(count, -1), (torch.arange(count, device=device) + 0.5) / count)
    want = plain_distribution(LOGITS, params)
    assert set(drawn.tolist()) <= want.keys()
    assert drawn.tolist() == sorted(drawn.tolist())
    for i, p in want.items():
        assert abs(int((drawn == i).sum()) - p * count) <= 2


@pytest.mark.parametrize("temperature", [1e30, 1.0])
def test_a_long_flat_distribution_is_drawn_exactly(temperature, device):
    """The interval of an id begins and ends where it should, to a thousandth of its length, up to the last id.

    Running sums that are rounded to fp32 miss by up to 0.6 % of a flat probability, and by half of a small one.
    """
    logits = torch.randn(1, VOCAB, device=device)
    params = [SamplingParams(temperature=temperature)]
    exact = (logits.double() / temperature).softmax(-1)
    ends = exact.cumsum(-1)[0]
    ids = torch.cat([torch.randint(1, VOCAB - 1, (20,)), torch.tensor([0, 1, VOCAB - 2])]).to(device)
    probs = distribution(logits, params).expand(len(ids), -1)
    length = torch.minimum(exact[0, ids], exact[0, ids + 1])
    for part in (0.001, 0.1, 0.9):
        assert torch.equal(draw(probs, ends[ids] - part * length), ids)
        assert torch.equal(draw(probs, ends[ids] + part * length), ids + 1)
    assert draw(probs[:1], torch.tensor([1 - 2**-53], dtype=torch.float64, device=device)).item() == VOCAB - 1
    # total variation of what is drawn from the exact distribution
    assert (probs[0].double() / probs[0].double().sum() - exact[0]).abs().sum() / 2 < 1e-6


def test_sample_draws_from_the_distribution(device):
    logits = torch.randn(8, 5000, device=device)
    params = [SamplingParams(), SamplingParams(top_p=0.99), SamplingParams(top_k=2500), SamplingParams(min_p=0.5)] * 2
    seeds, positions = torch.arange(8), torch.arange(8) * 3
    numbers = uniforms(seeds, positions, dtype=torch.float64).to(device)
    assert choose(logits, params, seeds.tolist(), positions) == draw(distribution(logits, params), numbers).tolist()


def test_sample_draws_with_more_than_24_bits():
    """Two tokens whose border lies between a number and what is left of it in 24 bits."""
    numbers = uniforms(torch.arange(20_000), torch.zeros(20_000).int(), dtype=torch.float64)
    coarse = (numbers * 2**24).floor() / 2**24
    for seed in ((numbers < 1e-2) & (numbers - coarse > 2**-25)).nonzero()[:20, 0].tolist():
        border = float(numbers[seed] + coarse[seed]) / 2
        logits = torch.tensor([[math.log(border) - math.log1p(-border), 0.0]])
        assert choose(logits, [SamplingParams()], [seed]) == [1]
        assert draw(distribution(logits, [SamplingParams()]), coarse[seed : seed + 1]).tolist() == [0]


@pytest.mark.parametrize("params", CASES, ids=name_of)
@pytest.mark.parametrize("vocab", [1, 7, 1000])
def test_the_ends_of_the_unit_interval(params, vocab):
    """0 draws the first id that was kept, the largest uniform the last one, and neither what was dropped."""
    probs = distribution(torch.randn(1, vocab) * 4, [params])
    ids = [*kept(probs[0])]
    assert draw(probs, torch.tensor([0.0])).item() == ids[0]
    for largest in (torch.tensor([1 - 2**-24]), torch.tensor([1 - 2**-53], dtype=torch.float64)):
        assert draw(probs, largest).item() in ids
    fat = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0, 0.0]])
    assert draw(fat, torch.tensor([1 - 2**-53], dtype=torch.float64)).item() == 3
    assert draw(fat, torch.tensor([0.0])).item() == 1
    assert draw(fat, torch.tensor([1.0])).item() == 3  # not a number that is drawn


def test_any_weights_may_be_drawn_from():
    """The residual of a speculative verification is not normalised, and may be empty."""
    probs = torch.tensor([[0.0, 1e-12, 0.0, 3e-12], [0.0, 0.0, 0.0, 0.0], [0.5, 1.0, 0.25, 0.0]])
    for number, want in [(0.1, [1, -1, 0]), (0.3, [3, -1, 1]), (0.99, [3, -1, 2])]:
        assert draw(probs, torch.full((3,), number)).tolist() == want
        assert draw(probs.double(), torch.full((3,), number)).tolist() == want


@pytest.mark.parametrize("params", [CASES[1], CASES[11], CASES[19]], ids=name_of)
@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_frequencies(params, along):
    count = 4000
    numbers, still = torch.arange(count), torch.full((count,), 3)
    seeds, positions = (numbers, still) if along == "seeds" else (still, numbers)
    drawn = choose(torch.tensor([LOGITS]).expand(count, -1), [params] * count, seeds.tolist(), positions)
    want = plain_distribution(LOGITS, params)
    assert set(drawn) <= want.keys()
    observed = collections.Counter(drawn)
    chi_square = sum((observed[i] - count * p) ** 2 / (count * p) for i, p in want.items())
    assert chi_square < bound_of_chi_square(len(want) - 1)


def bound_of_chi_square(freedom):
    """Far beyond the 99.9th percentile."""
    return freedom + 4 * math.sqrt(2 * freedom) + 4


# ---- random numbers -----------------------------------------------------------------------------


def plain_hash(seed, position, lane):
    def mix(x):
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) % 2**64
        return x ^ x >> 31

    golden = 0x9E3779B97F4A7C15
    return mix((mix((seed + (lane + 1) * golden) % 2**64) + (position + 1) * golden) % 2**64)


@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**40),
    lane=st.integers(0, 100),
    narrow=st.booleans(),
)
def test_uniforms_are_the_hash_they_say(seed, position, lane, narrow):
    want = plain_hash(seed % 2**64, position, lane)
    seeds, positions = torch.tensor([seed]), torch.tensor([position])
    if narrow and position < 2**31:
        positions = positions.int()
    got = uniforms(seeds, positions, lane)
    assert got.dtype == torch.float32
    assert got.tolist() == [(want >> 40) / 2**24]
    assert uniforms(seeds, positions, lane, dtype=torch.float64).tolist() == [(want >> 11) / 2**53]


def test_uniforms_are_the_same_on_every_device(device):
    seeds, positions = torch.randint(-(2**63), 2**63 - 1, (1000,)), torch.randint(2**20, (1000,))
    for lane in (0, 5):
        for dtype in (torch.float32, torch.float64):
            there = uniforms(seeds.to(device), positions.to(device), lane, dtype=dtype).cpu()
            assert torch.equal(there, uniforms(seeds, positions, lane, dtype=dtype))


def grids(count):
    """Numbers of neighbouring seeds, positions and lanes: `[a, b]` where b goes along one of them."""
    wide, still = torch.arange(count), torch.full((count,), 12)
    yield "positions", torch.stack([uniforms(still, wide), uniforms(still, wide + 1)])
    yield "seeds", torch.stack([uniforms(wide, still), uniforms(wide + 1, still)])
    yield "lanes", torch.stack([uniforms(wide, still, 0), uniforms(wide, still, 1)])
    yield "seeds and positions", torch.stack([uniforms(wide, wide), uniforms(wide + 1, wide)])
    yield "far seeds", torch.stack([uniforms(wide << 40, still), uniforms(-wide << 40, still)])


def test_uniforms_are_uniform_and_independent_of_their_neighbours():
    count, bins = 200_000, 32
    for name, (a, b) in grids(count):
        for numbers in (a, b):
            assert numbers.min() >= 0
            assert numbers.max() < 1
            low_bits = (numbers * 2**24).long() % 1024
            for observed, size in ((torch.histc(numbers, 1000, 0, 1), 1000), (low_bits.bincount(minlength=1024), 1024)):
                chi_square = ((observed - count / size) ** 2 / (count / size)).sum()
                assert chi_square < bound_of_chi_square(size - 1), name
        if name != "far seeds":
            pairs = ((a * bins).long() * bins + (b * bins).long()).bincount(minlength=bins**2)
            expected = count / bins**2
            assert ((pairs - expected) ** 2 / expected).sum() < bound_of_chi_square(bins**2 - 1), name
            assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 5 / math.sqrt(count), name


@pytest.mark.parametrize("seed", [0, -1, 2**63, -(2**63), 2**64 - 1, 10**40, -(10**40)])
def test_any_integer_is_a_seed(seed):
    logits = torch.randn(1, 1000)
    tokens = [choose(logits, [SamplingParams(seed=seed)], [seed], [position])[0] for position in range(8)]
    assert tokens == [choose(logits, [SamplingParams()], [seed % 2**64], [position])[0] for position in range(8)]
    assert len(set(tokens)) > 1


# ---- rows do not depend on each other -----------------------------------------------------------


MIXED = [
    SamplingParams(temperature=1.3, top_p=0.95),
    SamplingParams(top_k=3),
    GREEDY,
    SamplingParams(temperature=0.1),
    SamplingParams(),
    SamplingParams(top_k=7, top_p=0.5, min_p=0.1),
    SamplingParams(min_p=0.3),
    SamplingParams(frequency_penalty=1.0, repetition_penalty=1.3, temperature=2.0),
    SamplingParams(temperature=0, logit_bias={3: 5.0, 4: -5.0}),
    SamplingParams(min_tokens=5, stop_token_ids=(1, 2), top_p=0.9, presence_penalty=-1.0),
]


def histories(params, vocab):
    counts = []
    for row, p in enumerate(params):
        counts.append(TokenCounts.of(p, [row, 5, 6]))
        for token in (7, 8, 7, row % vocab):
            if counts[-1] is not None:
                counts[-1].add(token)
    return counts


@pytest.mark.parametrize("vocab", [50, 1013])
def test_a_request_gives_the_same_token_in_any_company(vocab, device):
    num = len(MIXED)
    rows = torch.randn(num, vocab, device=device) * 3
    counts, positions = histories(MIXED, vocab), torch.arange(num) * 10
    for trial in range(8):
        seeds = [trial * 100 + row for row in range(num)]
        alone = [
            choose(rows[i : i + 1], [MIXED[i]], [seeds[i]], positions[i : i + 1], counts=[counts[i]], stop_ids=(9,))[0]
            for i in range(num)
        ]
        for order in (range(num), torch.randperm(num).tolist(), torch.randperm(num).tolist()[:4]):
            got = choose(
                rows[list(order)],
                [MIXED[i] for i in order],
                [seeds[i] for i in order],
                positions[list(order)],
                counts=[counts[i] for i in order],
                stop_ids=(9,),
            )
            assert got == [alone[i] for i in order]


def test_a_large_batch_gives_what_its_rows_give(device):
    """The rows of the real vocabulary are looked at in several parts."""
    rows = torch.randn(6, VOCAB, device=device)
    each = [MIXED[i % 4] for i in range(60)]
    together = choose(rows.repeat(10, 1), each, range(60), range(60))
    for i in (0, 1, 2, 3, 49, 50, 51, 52, 53, 59):
        assert choose(rows[i % 6][None], [each[i]], [i], [i])[0] == together[i]


def test_a_position_may_be_drawn_again():
    """A preempted request goes on as if nothing had happened: no state is left behind by earlier draws."""
    logits = torch.randn(12, 1, 500)
    params, seed = SamplingParams(temperature=2.0), [99]
    straight = [choose(logits[t], [params], seed, [t + 4])[0] for t in range(12)]
    prepared = Prepared.of([params], seed, CPU)
    for t in (*range(7, 12), *range(3), 5):
        assert sample(logits[t], prepared, torch.tensor([t + 4])).tolist() == [straight[t]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("params", [*CASES[:2], CASES[17], CASES[19]], ids=name_of)
def test_a_row_that_is_not_finite_gives_minus_one_and_disturbs_nobody(bad, params):
    rows = torch.randn(5, 20)
    each = [SamplingParams(), params, GREEDY, SamplingParams(top_p=0.7), SamplingParams(top_k=4)]
    clean = choose(rows, each)
    rows[1, 13] = bad
    got = choose(rows, each)
    assert (got[1] == -1) == (bad != -math.inf)
    assert got[1] != 13
    rows[1] = bad
    assert choose(rows, each) == [clean[0], -1, *clean[2:]]
    assert not distribution(rows, each)[1].any()
    assert choose(rows.bfloat16(), [GREEDY] * 5)[1] == -1


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_a_mask_does_not_hide_what_is_not_finite(bad):
    rows = torch.zeros(3, 8)
    rows[0, 2] = rows[1, 3] = bad
    allowed = torch.ones(3, 8, dtype=torch.bool)
    allowed[0, 2] = False
    params = [GREEDY, SamplingParams(min_tokens=3, stop_token_ids=(3,)), GREEDY]
    assert choose(rows, params, counts=[None, TokenCounts(), None], allowed=allowed) == [-1, -1, 0]


def test_a_mask_that_permits_nothing_gives_minus_one():
    each = [GREEDY, SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(top_k=2), GREEDY]
    allowed = torch.zeros(5, 9, dtype=torch.bool)
    allowed[4, 6] = True
    assert choose(torch.randn(5, 9), each, allowed=allowed) == [-1, -1, -1, -1, 6]


@pytest.mark.parametrize("params", CASES, ids=name_of)
def test_only_what_a_mask_permits_is_drawn(params):
    count = 300
    allowed = torch.rand(count, 40) < 0.1
    allowed[:, 17] = True
    tokens = choose(torch.randn(count, 40) * 5, [params] * count, allowed=allowed)
    assert allowed[torch.arange(count), tokens].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_greedy_ties_go_to_the_lowest_id(dtype, device):
    rows = torch.tensor([LOGITS, [0.0] * 7, [-1.0] * 6 + [1.0]], dtype=dtype, device=device)
    assert choose(rows, [GREEDY] * 3) == [2, 0, 6]
    long = torch.randint(3, (20, VOCAB), device=device).to(dtype)
    assert choose(long, [GREEDY] * 20) == [row.index(2) for row in long.tolist()]
    assert choose(long, [SamplingParams(temperature=0, logit_bias={VOCAB - 1: 1e-3})] * 20) == [
        VOCAB - 1 if row[-1] == 2 else row.index(2) for row in long.tolist()
    ]


def test_an_empty_batch_gives_no_tokens():
    assert choose(torch.zeros(0, 5), []) == []
    assert choose(torch.zeros(0, 5), [], allowed=torch.zeros(0, 5, dtype=torch.bool)) == []


def test_counts_that_disagree_are_refused():
    prepared = Prepared.of([GREEDY], [0], CPU)
    for rows, positions in ((2, 1), (1, 2), (2, 2)):
        with pytest.raises(ConfigError, match=f"{rows} rows, 1 params, {positions} positions"):
            sample(torch.zeros(rows, 3), prepared, torch.zeros(positions, dtype=torch.int64))
    with pytest.raises(ConfigError, match="1 params, 2 seeds"):
        Prepared.of([GREEDY], [0, 1], CPU)
    with pytest.raises(ConfigError, match="row 1 has penalties or min_tokens and needs its TokenCounts"):
        choose(torch.zeros(2, 3), [GREEDY, SamplingParams(presence_penalty=1)])


def test_a_step_does_not_wait_for_the_device(device):
    if device != "cuda":
        pytest.skip(f"needs cuda, this is {device}")
    rows = torch.randn(len(MIXED), 5000, device=device)
    counts, positions = histories(MIXED, 5000), torch.arange(len(MIXED), device=device)
    allowed = torch.ones_like(rows, dtype=torch.bool)
    torch.cuda.set_sync_debug_mode("error")
    try:
        prepared = Prepared.of(MIXED, range(len(MIXED)), rows.device, stop_ids=(9,))
        for _ in range(2):
            sample(rows, prepared, positions, counts=counts)
            sample(rows, prepared, positions, counts=counts, allowed=allowed)
            logprobs_of(rows, positions, 5)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- adjustments --------------------------------------------------------------------------------


def plain_adjust(logits, p, prompt, generated, allowed, stop_ids):
    """Logits that a mask has left with stop ids alone keep these."""
    times = collections.Counter(generated)
    out, stopping = [], []
    for i, x in enumerate(logits):
        if i in times or i in prompt:
            x = x / p.repetition_penalty if x > 0 else x * p.repetition_penalty
        x -= p.frequency_penalty * times[i]
        x -= p.presence_penalty * (i in times)
        x += (p.logit_bias or {}).get(i, 0)
        if allowed is not None and not allowed[i]:
            x = -math.inf
        stopping.append(x)
        if len(generated) < p.min_tokens and (i in stop_ids or i in p.stop_token_ids):
            x = -math.inf
        out.append(x)
    return stopping if allowed is not None and max(out) == -math.inf else out


IDS = st.integers(0, 11)
ADJUSTMENTS = st.fixed_dictionaries(
    {},
    optional={
        "frequency_penalty": st.floats(-2, 2),
        "presence_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.1, 10),
        "logit_bias": st.dictionaries(st.integers(0, 20), st.floats(-100, 100)),
        "min_tokens": st.integers(0, 8),
        "stop_token_ids": st.lists(st.integers(0, 20), max_size=3),
    },
)


@given(data=st.data())
def test_adjust_is_the_plain_one(data):
    vocab, stop_ids = 12, (4, 99)
    rows = data.draw(
        st.lists(
            st.tuples(
                ADJUSTMENTS.map(lambda fields: SamplingParams(**fields)),
                st.lists(IDS, max_size=6),
                st.lists(IDS, max_size=10),
                st.lists(st.sampled_from([-math.inf, -3.5, -0.0, 0.0, 0.25, 4.0]), min_size=vocab, max_size=vocab),
                st.lists(st.booleans(), min_size=vocab, max_size=vocab),
            ),
            min_size=1,
            max_size=4,
        )
    )
    params, prompts, generated, logits, allowed = (list(column) for column in zip(*rows, strict=True))
    counts = [TokenCounts.of(p, prompt) for p, prompt in zip(params, prompts, strict=True)]
    for history, tokens in zip(counts, generated, strict=True):
        for token in tokens:
            if history is not None:
                history.add(token)
                history.check()
    given_rows = torch.tensor(logits)
    before = given_rows.clone()
    if not data.draw(st.booleans()):
        allowed = [None] * len(rows)
        mask = None
    else:
        mask = torch.tensor(allowed)
    got = adjust(given_rows, params, counts, stop_ids=stop_ids, allowed=mask)
    want = [plain_adjust(*row, stop_ids) for row in zip(logits, params, prompts, generated, allowed, strict=True)]
    torch.testing.assert_close(got, torch.tensor(want), rtol=1e-5, atol=1e-5)
    assert torch.equal(given_rows, before)


def test_min_tokens_gives_way_to_a_mask_that_leaves_only_stop_ids():
    params, rows = [SamplingParams(min_tokens=1, stop_token_ids=[2])], torch.tensor([[1.0, 2.0, 3.0]])
    only = torch.tensor([[False, False, True]])
    assert adjust(rows, params, [TokenCounts()], stop_ids=(), allowed=only).tolist() == [[-math.inf, -math.inf, 3.0]]
    assert adjust(rows, params, [TokenCounts()], stop_ids=(), allowed=~only).tolist() == [[1.0, 2.0, -math.inf]]


def test_logits_are_handed_back_if_nothing_applies():
    logits = torch.randn(3, 9)
    done = TokenCounts([1, 2])
    for _ in range(4):
        done.add(8)
    params = [GREEDY, SamplingParams(logit_bias={}), SamplingParams(min_tokens=4, stop_token_ids=(3,))]
    assert adjust(logits, params, [None, None, done], stop_ids=(1,)) is logits
    assert adjust(logits, params, [None, None, TokenCounts()], stop_ids=(1,)) is not logits


def test_adjustments_take_strided_rows():
    whole = torch.randn(4, 20)
    params = [SamplingParams(logit_bias={0: 3.0, 11: 2.0})] * 4
    got = adjust(whole[:, :12], params, [None] * 4, stop_ids=())
    assert torch.equal(got, adjust(whole[:, :12].contiguous(), params, [None] * 4, stop_ids=()))


def test_penalties_work_in_this_order():
    """Repetition first, then what is subtracted and added, then what is forbidden."""
    params = SamplingParams(
        repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, logit_bias={1: 10.0, 3: 7.0},
        min_tokens=4, stop_token_ids=(3,),
    )  # fmt: skip
    history = TokenCounts.of(params, [0, 1])
    for token in (1, 1, 2):
        history.add(token)
    got = adjust(torch.tensor([[4.0, 4.0, -4.0, 4.0, 4.0]]), [params], [history], stop_ids=(4,))
    assert got.tolist() == [[2.0, 2.0 - 1.0 - 0.25 + 10.0, -8.0 - 0.5 - 0.25, -math.inf, -math.inf]]
    history.add(4)
    got = adjust(torch.tensor([[4.0, 4.0, -4.0, 4.0, 4.0]]), [params], [history], stop_ids=(4,))
    assert got[0, 3:].tolist() == [11.0, 2.0 - 0.5 - 0.25]


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e300])
def test_penalties_leave_finite_logits_finite(penalty):
    logits = torch.tensor([[3.0, -3.0, 0.0, -math.inf, 1.0]])
    params = SamplingParams(repetition_penalty=penalty, logit_bias={0: 100.0, 1: -100.0})
    got = adjust(logits, [params], [TokenCounts(range(4))], stop_ids=())
    assert got.isfinite().tolist() == [[True, True, True, False, True]]
    assert choose(logits, [dataclasses.replace(params, temperature=0)], counts=[TokenCounts(range(4))])[0] in {0, 4}


def test_ids_outside_the_vocabulary_touch_no_other_row():
    params = [SamplingParams(logit_bias={5: 9.0}, repetition_penalty=2.0, min_tokens=1, stop_token_ids=(6,)), GREEDY]
    logits = torch.ones(2, 5)
    assert torch.equal(adjust(logits, params, [TokenCounts(), None], stop_ids=(9,)), logits)
    for ids in ([1, 5], [-1, 2]):
        with pytest.raises(AssertionError, match=r"ids outside 0\.\.4"):
            adjust(logits, params, [TokenCounts(ids), None], stop_ids=())


@pytest.mark.parametrize("temperature", [0, 1])
def test_no_stop_before_min_tokens(temperature):
    logits = torch.full((1, 10), -5.0)
    logits[0, [2, 4]] = 30.0
    params = SamplingParams(temperature=temperature, min_tokens=3, stop_token_ids=(4,))
    history, tokens = TokenCounts.of(params, [2, 4]), []
    for position in range(5):
        tokens += choose(logits, [params], [7], [position], stop_ids=(2,), counts=[history])
        history.add(tokens[-1])
    assert not {2, 4} & {*tokens[:3]}
    assert {2, 4} >= {*tokens[3:]}


def test_counts_are_kept_only_where_they_are_looked_at():
    for fields in ({}, {"logit_bias": {1: 1.0}}, {"top_p": 0.5, "temperature": 0}):
        assert TokenCounts.of(SamplingParams(**fields), [1]) is None
    for fields in ({"min_tokens": 1}, {"frequency_penalty": -1.0}, {"presence_penalty": 1}):
        assert not TokenCounts.of(SamplingParams(**fields), [1]).ids
    assert TokenCounts.of(SamplingParams(repetition_penalty=1.1), [3, 1, 3]).ids.tolist() == [3, 1]


# ---- log-probabilities --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 7), (40, 1013), (13, VOCAB)])
def test_logprobs_are_those_of_the_model_to_the_bit(rows, vocab, dtype, device):
    logits = (torch.randn(rows, vocab, device=device) * 5).to(dtype)
    ids = torch.randint(vocab, (rows,), device=device)
    want = logits.float().log_softmax(-1)
    found = logprobs_of(logits, ids, 5)
    assert torch.equal(found.chosen, want.gather(1, ids[:, None])[:, 0])
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(found.top_ids, order[:, :5])
    assert torch.equal(found.top_values, want.gather(1, order[:, :5]))
    alone = logprobs_of(logits[-1:], ids[-1:], 5)
    assert all(torch.equal(a[0], b[-1]) for a, b in zip(alone, found, strict=True))


def test_the_best_of_a_list_is_the_greedy_token():
    logits = torch.randint(4, (20, 300)).bfloat16()
    found = logprobs_of(logits, torch.zeros(20, dtype=torch.int64), 20)
    assert found.top_ids[:, 0].tolist() == choose(logits, [GREEDY] * 20)
    assert (found.top_values.diff(dim=-1) <= 0).all()


def test_logprobs_of_nothing():
    found = logprobs_of(torch.randn(2, 4), torch.tensor([-1, 3]), 0)
    assert found.chosen.isnan().tolist() == [True, False]
    assert found.top_ids.shape == found.top_values.shape == (2, 0)
    assert logprobs_of(torch.randn(0, 4), torch.zeros(0, dtype=torch.int64), 3).top_ids.shape == (0, 3)
    assert logprobs_of(torch.randn(2, 4), torch.tensor([1, 3]), 20).top_ids.shape == (2, 4)


def test_logprobs_go_to_the_host_with_as_many_alternatives_as_asked():
    logits = torch.tensor([[0.0, 1.0, 2.0], [2.0, 2.0, 0.0], [0.0, 0.0, 0.0]])
    ids = torch.tensor([0, 1, 2])
    found = logprobs_of(logits, ids, 2)
    values = logits.log_softmax(-1).tolist()
    assert token_logprobs(ids.tolist(), found, [2, 1, 0]) == [
        TokenLogprob(0, values[0][0], ((2, values[0][2]), (1, values[0][1]))),
        TokenLogprob(1, values[1][1], ((0, values[1][0]),)),
        TokenLogprob(2, values[2][2], ()),
    ]
    assert [len(entry.top) for entry in token_logprobs(ids.tolist(), found)] == [2, 2, 2]
    assert [entry.top for entry in token_logprobs(ids.tolist(), logprobs_of(logits, ids))] == [(), (), ()]


# ---- parameters ---------------------------------------------------------------------------------

NOT_NUMBERS = [math.nan, math.inf, -math.inf, True, "1", None, 10**400]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, *NOT_NUMBERS]),
        ("top_p", [0.0, 1.1, -1, *NOT_NUMBERS]),
        ("min_p", [-0.1, 1.1, *NOT_NUMBERS]),
        ("frequency_penalty", [-2.1, 2.1, *NOT_NUMBERS]),
        ("presence_penalty", [-2.1, 2.1, *NOT_NUMBERS]),
        ("repetition_penalty", [0, -1.0, *NOT_NUMBERS]),
        ("top_k", [-1, 1.0, True, None]),
        ("max_new_tokens", [-1, 1.0, True, None]),
        ("min_tokens", [-1, 1.0, True, None, 129]),
        ("seed", [1.0, True, "1"]),
        ("ignore_eos", [0, 1, None]),
        ("logprobs", [1, None]),
        ("prompt_logprobs", [1, None]),
        ("top_logprobs", [-1, 21, 1.0, True, None, 5]),
        ("stop_token_ids", [(-1,), (1.0,), (True,), 3, None, "1"]),
        ("stop", ["text", ("",), (1,), None, 3, (None,)]),
        ("logit_bias", [{-1: 0.0}, {"1": 0.0}, {True: 0.0}, {1: 100.1}, {1: math.nan}, {1: True}, [(1, 2.0)], 3]),
    ],
)
def test_bad_parameters_are_refused(field, values):
    for value in values:
        with pytest.raises(RequestError, match=f"{field} must be ") as caught:
            SamplingParams(**{field: value})
        assert caught.value.param == field
        assert str(caught.value).endswith(f"got {value!r}") or not isinstance(value, (int, float))


numbers = st.floats(allow_nan=True, allow_infinity=True) | st.integers(-(10**30), 10**30)


@given(
    temperature=numbers, top_p=numbers, min_p=numbers, penalty=numbers, top_k=st.integers(-2, 10**30),
    logprobs=st.booleans(), top=st.integers(-2, 23), min_tokens=st.integers(-2, 5), limit=st.integers(-2, 5),
    seed=st.none() | st.integers(),
)  # fmt: skip
def test_what_is_accepted_can_be_sampled(
    temperature, top_p, min_p, penalty, top_k, logprobs, top, min_tokens, limit, seed
):
    good = (
        0 <= temperature < math.inf
        and 0 < top_p <= 1
        and 0 <= min_p <= 1
        and -2 <= penalty <= 2
        and top_k >= 0
        and 0 <= top <= (20 if logprobs else 0)
        and 0 <= min_tokens <= limit
    )
    fields = {
        "temperature": temperature, "top_p": top_p, "min_p": min_p, "frequency_penalty": penalty, "top_k": top_k,
        "logprobs": logprobs, "top_logprobs": top, "min_tokens": min_tokens, "max_new_tokens": limit, "seed": seed,
    }  # fmt: skip
    if not good:
        with pytest.raises(RequestError):
            SamplingParams(**fields)
        return
    params = SamplingParams(**fields)
    (token,) = choose(torch.tensor([LOGITS]), [params], [seed or 0], counts=[TokenCounts.of(params, [1])])
    assert 0 <= token < len(LOGITS)


@given(
    temperature=st.floats(0, 1e308), top_p=st.floats(0, 1, exclude_min=True), min_p=st.floats(0, 1),
    repetition=st.floats(0, exclude_min=True, allow_infinity=False), top_k=st.integers(0, 9), seed=st.integers(),
)  # fmt: skip
def test_every_good_number_draws_a_token(temperature, top_p, min_p, repetition, top_k, seed):
    params = SamplingParams(
        temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k, repetition_penalty=repetition
    )
    (token,) = choose(torch.tensor([LOGITS]), [params], [seed], counts=[TokenCounts([1, 2])])
    assert 0 <= token < len(LOGITS)


def test_parameters_are_values():
    bias = {5: 1.0, 7: -3}
    params = SamplingParams(logit_bias=bias, stop=["a", "b"], stop_token_ids=[3], top_logprobs=2, prompt_logprobs=True)
    bias[5] = 2.0
    assert params.logit_bias == {5: 1.0, 7: -3}
    assert params.stop == ("a", "b")
    assert params.stop_token_ids == (3,)
    with pytest.raises(TypeError, match="item assignment"):
        params.logit_bias[5] = 0.0
    for other in (copy.deepcopy(params), pickle.loads(pickle.dumps(params)), dataclasses.replace(params)):
        assert other == params
        assert hash(other) == hash(params)
    assert dataclasses.replace(params, seed=3) != params
    assert "{5: 1.0, 7: -3}" in repr(params)
