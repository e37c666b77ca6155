"""Acceptance: what comes out has exactly the target's distribution, whatever the draft."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3lib.errors import ConfigError
from k3lib.spec.accept import (
    Accepted,
    accept_block,
    accept_forced,
    accept_greedy,
    accept_sampled,
    simulated_length,
)

RULES = {"chain": accept_sampled, "block": accept_block}
NEARLY_ONE = 1 - 2.0**-53
VOCAB = 163_840


def rows_of(table, sequences, length):
    """The rows of a table of distributions by prefix, in front of each of the first tokens: `[N, length, V]`."""
    return torch.tensor([[table[seq[:j]] for j in range(length)] for seq in sequences], dtype=torch.float64)


def threshold(is_below, number):
    """Up to where something holds of the numbers in [0, 1), of each row: 0 if nowhere. Exact to the last bit."""
    low, high = torch.zeros(number, dtype=torch.float64), torch.ones(number, dtype=torch.float64)
    holds = is_below(low)
    for _ in range(53):
        middle = (low + high) / 2
        below = is_below(middle)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return torch.where(holds, high, 0.0)


def branches(rule, draft, q, p, lengths):
    """The chance of each accepted length, and of each bonus behind it, by asking the rule where its decisions change.

    Returns `[N, g + 1]` and `[N, g + 1, V]`.
    """
    number, gamma = draft.shape
    vocab = p.shape[-1]

    def ask(fixed, column, promise):
        """Thresholds of one uniform each in K settings of the others: `[N, K]`."""
        settings = len(fixed)
        parts = [None if x is None else x.repeat_interleave(settings, 0) for x in (draft, q, p, lengths)]
        column, rows = column.repeat(number), torch.arange(number * settings)

        def is_below(u):
            uniforms = fixed.repeat(number, 1)
            uniforms[rows, column] = u
            return promise(rule(*parts[:3], uniforms, parts[3]))

        return threshold(is_below, number * settings).view(number, settings)

    places = torch.arange(gamma + 1)
    upto = torch.where(places < places[:, None], 0.0, NEARLY_ONE).double()  # row n: n drafts, if they can be, no more
    fixed = upto[:gamma] if rule is accept_sampled else torch.full((gamma, gamma + 1), NEARLY_ONE, dtype=torch.float64)
    limits = ask(fixed, places[:gamma], lambda got: got.length > places[:gamma].repeat(number)).unbind(1)
    left, chances = torch.ones(number, dtype=torch.float64), {}
    if rule is accept_sampled:
        for j, limit in enumerate(limits):
            chances[j], left = left * (1 - limit), left * limit
        chances[gamma] = left
    else:  # from the longest down
        for j in range(gamma, 0, -1):
            chances[j], left = left * limits[j - 1], left * (1 - limits[j - 1])
        chances[0] = left
    chance = torch.stack([chances[n] for n in range(gamma + 1)], 1)
    last = torch.arange(vocab - 1).repeat(number * (gamma + 1))
    fixed, column = upto.repeat_interleave(vocab - 1, 0), torch.full(((gamma + 1) * (vocab - 1),), gamma)
    ends = ask(fixed, column, lambda got: got.tokens.gather(1, got.length[:, None])[:, 0] <= last)
    ends = torch.nn.functional.pad(ends.view(number, gamma + 1, vocab - 1), (1, 0))
    return chance, torch.nn.functional.pad(ends, (0, 1), value=1.0).diff(dim=-1)


def outcome(rule, gamma, q, p, *, claimed=None, lengths=None):
    """Chances of all sequences of γ + 1 tokens, and the mean of the accepted lengths.

    A step gives the first of them; the target itself the others. `claimed` is what the draft says it drew from.
    """
    vocab = len(p[()])
    drafts = [*itertools.product(range(vocab), repeat=gamma)]
    weights = [math.prod(q[seq[:j]][seq[j]] for j in range(gamma)) for seq in drafts]
    sizes = None if lengths is None else torch.tensor([lengths(seq) for seq in drafts])
    rows = rows_of(claimed or q, drafts, gamma), rows_of(p, drafts, gamma + 1)
    chance, bonus = branches(rule, torch.tensor(drafts), *rows, sizes)
    found, mean = dict.fromkeys(itertools.product(range(vocab), repeat=gamma + 1), 0.0), 0.0
    for i, (seq, weight) in enumerate(zip(drafts, weights, strict=True)):
        for n in range(gamma + 1):
            mean += weight * float(chance[i, n]) * n
            for rest in itertools.product(range(vocab), repeat=gamma + 1 - n):
                full = seq[:n] + rest
                later = math.prod(p[full[:k]][full[k]] for k in range(n + 1, gamma + 1))
                found[full] += weight * float(chance[i, n] * bonus[i, n, rest[0]]) * later
    return found, mean


def wanted(p, gamma):
    vocab = len(p[()])
    return {
        seq: math.prod(p[seq[:j]][seq[j]] for j in range(gamma + 1))
        for seq in itertools.product(range(vocab), repeat=gamma + 1)
    }


def tables(vocab, gamma, *, seed=0, zeros=False):
    """A distribution for each prefix, of the target and of the draft."""
    generator = torch.Generator().manual_seed(seed)

    def table():
        found = {}
        for length in range(gamma + 1):
            for prefix in itertools.product(range(vocab), repeat=length):
                x = torch.rand(vocab, generator=generator, dtype=torch.float64) ** 3 + 1e-3
                if zeros:
                    x[torch.randint(vocab, (), generator=generator)] = 0
                found[prefix] = (x / x.sum()).tolist()
        return found

    return table(), table()


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(
    ("vocab", "gamma", "zeros"), [(4, 1, False), (4, 2, True), (3, 3, False), (3, 3, True), (2, 3, False)]
)
def test_what_comes_out_has_the_distribution_of_the_target(rule, vocab, gamma, zeros):
    p, q = tables(vocab, gamma, seed=vocab + gamma, zeros=zeros)
    found, mean = outcome(rule, gamma, q, p)
    assert found == pytest.approx(wanted(p, gamma), abs=1e-12)
    assert 0 < mean < gamma


SPECIAL = {
    "one-hot": lambda p, q: {prefix: [1.0, 0.0, 0.0] for prefix in q},
    "the target's own": lambda p, q: p,
    "nothing that the target takes": lambda p, q: {
        prefix: [float(i == min(range(3), key=row.__getitem__)) for i in range(3)] for prefix, row in p.items()
    },
    "the wrong way round": lambda p, q: {prefix: row[::-1] for prefix, row in p.items()},
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("kind", SPECIAL)
def test_any_draft_gives_the_distribution_of_the_target(rule, kind):
    p, q = tables(3, 2, seed=1, zeros=True)
    q = SPECIAL[kind](p, q)
    found, mean = outcome(rule, 2, q, p)
    assert found == pytest.approx(wanted(p, 2), abs=1e-12)
    expected = {"the target's own": 2.0, "nothing that the target takes": 0.0}
    if kind in expected:
        assert mean == pytest.approx(expected[kind], abs=1e-12)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("bad", [math.nan, -0.25, 1.5, math.inf, 0.0])
def test_a_probability_that_is_none_counts_as_zero(rule, bad):
    """Of the second token at every place the draft claims nonsense; it is drawn all the same."""
    p, q = tables(3, 2, seed=2)
    claimed = {prefix: [row[0], bad, row[2]] for prefix, row in q.items()}
    found, _ = outcome(rule, 2, q, p, claimed=claimed)
    assert found == pytest.approx(wanted(p, 2), abs=1e-12)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("kind", ["short", "behind the first 1"])
def test_shorter_drafts_give_the_distribution_of_the_target(rule, kind):
    p, q = tables(3, 3, seed=3)
    lengths = {"short": lambda seq: 2, "behind the first 1": lambda seq: min([*seq, 1].index(1) + 1, 3)}
    found, mean = outcome(rule, 3, q, p, lengths=lengths[kind])
    assert found == pytest.approx(wanted(p, 3), abs=1e-12)
    assert 0 < mean < {"short": 2, "behind the first 1": 3}[kind]


@pytest.mark.parametrize("seed", [0, 1, 4])
def test_block_verification_accepts_at_least_as_much(seed):
    p, q = tables(2 + seed % 2, 3, seed=seed, zeros=seed > 3)
    chain, block = (outcome(rule, 3, q, p)[1] for rule in RULES.values())
    assert block >= chain - 1e-12
    assert seed > 3 or block > chain + 1e-4


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_padding_may_hold_anything(rule, device):
    draft, q, p, u = batch(6, 4, 50, device)
    lengths = torch.tensor([0, 1, 2, 3, 4, 4], device=device)
    before = rule(draft, q, p, u, lengths)
    for i, n in enumerate(lengths.tolist()):
        draft[i, n:], q[i, n:], p[i, n + 1 :] = 10**6 - 2 * 10**6 * (i % 2), torch.nan, torch.nan
    after = rule(draft, q, p, u, lengths)
    assert torch.equal(before.tokens, after.tokens)
    assert bool((after.length <= lengths).all())
    assert ((after.tokens >= 0).sum(1) == after.length + 1).all()


def batch(number, gamma, vocab, device, dtype=torch.float32):
    p = torch.randn(number, gamma + 1, vocab).mul_(2).softmax(-1).to(device, dtype)
    q = (p[:, :gamma].log() + torch.randn(number, gamma, vocab).to(device, dtype) * 0.7).softmax(-1)
    draft = torch.multinomial(q.reshape(-1, vocab), 1).view(number, gamma) if gamma else p.new_zeros(number, 0).long()
    return draft, q, p, torch.rand(number, gamma + 1, dtype=torch.float64).to(device)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_request_gets_the_same_in_any_company(rule, device):
    draft, q, p, u = batch(9, 5, 300, device)
    draft = draft.to(torch.int32)
    together = rule(draft, q, p, u)
    assert len(together.length.unique()) > 2
    for i in range(9):
        alone = rule(draft[i : i + 1], q[i : i + 1], p[i : i + 1], u[i : i + 1])
        assert torch.equal(alone.tokens[0], together.tokens[i])
        assert alone.length[0] == together.length[i]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_long_vocabulary_gives_tokens_of_the_target_at_the_ends_of_the_interval(rule, device):
    draft, q, p, _ = batch(3, 2, VOCAB, device)
    p[:, :, ::2] = 0  # half of what is drafted is impossible
    p /= p.sum(-1, keepdim=True)
    for u in (0.0, NEARLY_ONE):
        length, tokens = rule(draft, q, p, torch.full((3, 3), u, dtype=torch.float64, device=device))
        bonus = tokens.gather(1, length[:, None])
        assert bool((p[torch.arange(3, device=device), length].gather(1, bonus) > 0).all())


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_difference_without_mass_still_gives_a_token_of_the_target(rule):
    """A draft that claims more than it may: the whole of P is below Q, and the token is rejected."""
    p = torch.tensor([[[0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.0, 1.0]]])
    q = torch.tensor([[[1.0, 1.0, 1.0, 1.0]]])
    for token, u in ((0, 0.0), (1, NEARLY_ONE)):
        for last in (0.0, 0.5, NEARLY_ONE):
            got = rule(torch.tensor([[token]]), q, p, torch.tensor([[u, last]], dtype=torch.float64))
            assert got.length.tolist() == [0]
            assert got.tokens.tolist() == [[1 if last < 0.5 else 2, -1]]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("nothing", [0.0, math.nan])
def test_a_target_row_without_probability_gives_minus_one_and_disturbs_nobody(rule, nothing):
    draft, q, p, u = batch(4, 3, 20, "cpu")
    u[:, :3] = 0
    q = p[:, :3].clone()
    good = rule(draft, q, p, u)
    assert good.length.tolist() == [3] * 4
    p[2, 1] = nothing
    got = rule(draft, q, p, u, torch.tensor([3, 3, 1, 3]))
    assert got.tokens[2].tolist() == [int(draft[2, 0]), -1, -1, -1]
    assert torch.equal(got.tokens[[0, 1, 3]], good.tokens[[0, 1, 3]])


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_draft_without_tokens_draws_from_the_target(rule, device):
    draft, q, p, u = batch(5, 0, 40, device)
    got = rule(draft, q, p, u)
    assert got.length.tolist() == [0] * 5
    want = (u * p[:, 0].double().sum(-1, keepdim=True) >= p[:, 0].double().cumsum(-1)).sum(-1, keepdim=True)
    assert torch.equal(got.tokens, want)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_no_requests_give_nothing(rule):
    got = rule(*batch(0, 3, 4, "cpu"))
    assert got.tokens.shape == (0, 4)
    assert got.length.shape == (0,)


# ---- without probabilities ----------------------------------------------------------------------


@given(st.data())
def test_greedy_accepts_what_the_target_chose(data):
    gamma = data.draw(st.integers(0, 4))
    ids = st.lists(st.integers(0, 1), min_size=gamma, max_size=gamma)
    rows = data.draw(st.lists(st.tuples(ids, ids, st.integers(-1, 1), st.integers(0, gamma)), min_size=1, max_size=4))
    draft = torch.tensor([row[0] for row in rows], dtype=torch.int64)
    target = torch.tensor([[*row[1], row[2]] for row in rows])
    got = accept_greedy(draft, target, torch.tensor([row[3] for row in rows]))
    for i, (proposed, chosen, last, size) in enumerate(rows):
        n = next((j for j in range(size) if proposed[j] != chosen[j]), size)
        assert got.length[i] == n
        assert got.tokens[i].tolist() == [*proposed[:n], [*chosen, last][n], *[-1] * (gamma - n)]
    whole = accept_greedy(draft, target)
    assert torch.equal(whole.tokens, accept_greedy(draft, target, torch.full((len(rows),), gamma)).tokens)


def test_what_the_target_could_not_choose_is_not_accepted():
    got = accept_greedy(torch.tensor([[5, -1, 5]]), torch.tensor([[5, -1, 5, 5]]))
    assert got.length.tolist() == [1]
    assert got.tokens.tolist() == [[5, -1, -1, -1]]


def test_a_forced_length_takes_the_bonus_of_the_target_there():
    draft, target = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[10, 20, 30, 40], [50, 60, 70, 80]])
    got = accept_forced(draft, target, torch.tensor([2, 0]))
    assert got.tokens.tolist() == [[1, 2, 30, -1], [50, -1, -1, -1]]


@pytest.mark.parametrize(("average", "gamma", "whole"), [(1, 7, 0), (4.5, 7, 3), (4.25, 7, 3), (8, 7, 7), (8, 3, 3)])
def test_simulated_lengths_have_the_given_average(average, gamma, whole):
    lengths = [simulated_length(average, u / 64, gamma) for u in range(64)]
    assert sum(lengths) / 64 + 1 == min(average, gamma + 1)
    assert set(lengths) <= {whole, min(whole + 1, gamma)}


# ---- what does not fit --------------------------------------------------------------------------


def test_shapes_that_do_not_fit_are_refused():
    draft, q, p, u = batch(2, 3, 5, "cpu")
    with pytest.raises(ConfigError, match=r"target must be \[2, 4\] for a draft of \[2, 3\], got \[2, 3\]"):
        accept_greedy(draft, draft)
    for rule in RULES.values():
        with pytest.raises(ConfigError, match=r"draft_probs must be \[2, 3, 5\] .*, got \[2, 3, 4\]"):
            rule(draft, q[:, :, 1:], p, u)
        with pytest.raises(ConfigError, match=r"target_probs must be \[2, 4, 5\] .*, got \[2, 3, 5\]"):
            rule(draft, q, p[:, 1:], u)
        with pytest.raises(ConfigError, match=r"uniforms must be \[2, 4\] .*, got \[2, 3\]"):
            rule(draft, q, p, u[:, 1:])
        with pytest.raises(ConfigError, match=r"lengths must be \[2\] .*, got \[3\]"):
            rule(draft, q, p, u, torch.tensor([1, 1, 1]))


def test_acceptance_does_not_wait_for_the_device(device):
    if device != "cuda":
        pytest.skip(f"needs cuda, this is {device}")
    draft, q, p, u = batch(4, 3, 1000, device)
    lengths, target = torch.tensor([3, 2, 1, 0], device=device), torch.zeros(4, 4, dtype=torch.int64, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [rule(draft, q, p, u, lengths) for rule in RULES.values()]
        found.append(accept_greedy(draft, target, lengths))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(isinstance(x, Accepted) for x in found)
