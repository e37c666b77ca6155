"""Verification: every row sees what plain decoding would see, and requests do not notice that they speculate."""

import copy
import math
import random

import pytest
import torch

from k3lib.engine import Request, SamplingParams
from k3lib.engine.grammar import GrammarCompiler, allowed_tokens, build_grammar, is_available
from k3lib.engine.request import RequestState
from k3lib.engine.sampler import Prepared, TokenCounts, adjust, distribution, logprobs_of, sample
from k3lib.engine.verify import NO_TOKEN, NOT_FINITE, check_draft, judge
from k3lib.errors import ConfigError
from k3lib.server.tokenizer import load_tokenizer
from k3lib.spec.proposer import Draft

VOCAB = 40
EOS = 7
RULES = ("chain", "block")
GREEDY = SamplingParams(temperature=0)

MANY = [
    GREEDY,
    SamplingParams(),
    SamplingParams(temperature=0.3, top_k=1),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(min_p=0.2),
    SamplingParams(temperature=0, repetition_penalty=3.0),
    SamplingParams(repetition_penalty=0.4, frequency_penalty=1.5),
    SamplingParams(temperature=0, presence_penalty=2.0, frequency_penalty=-1.0),
    SamplingParams(logit_bias={3: 5.0, 4: -100.0, EOS: 3.0}, ignore_eos=True),
    SamplingParams(temperature=0, min_tokens=6, logit_bias={EOS: 100.0}),
    SamplingParams(min_tokens=3, stop_token_ids=(11, 12), logit_bias={11: 4.0}, presence_penalty=-1.0),
    SamplingParams(temperature=0.9, top_k=8, top_p=0.9, min_p=0.05, repetition_penalty=1.5, logit_bias={2: 1.0}),
]


def state_of(params, number=0, *, prompt=(1, 2, 3), generated=(), matcher=None):
    counts = TokenCounts.of(params, list(prompt))
    for token in generated:
        if counts is not None:
            counts.add(token)
    return RequestState(
        Request([*prompt], params), number, 1000 + number, 0.0, [*prompt, *generated], counts=counts, matcher=matcher
    )


def is_stop(params, token):
    return token in params.stop_token_ids or (token == EOS and not params.ignore_eos)


def plain(state, rows, stop_ids=(EOS,)):
    """What decoding gives one token at a time, each from its row, to the end of the request; -1 if it fails."""
    state = copy.copy(state)
    state.counts = copy.deepcopy(state.counts)
    state.matcher = None if state.matcher is None else state.matcher.clone()
    state.tokens = [*state.tokens]
    tokens = []
    for row in rows:
        params = state.request.params
        prepared = Prepared.of([params], [state.seed], row.device, stop_ids=stop_ids)
        allowed = None if state.matcher is None else allowed_tokens([state.matcher], len(row), row.device)
        at = torch.tensor([len(state.tokens)], device=row.device)
        token = int(sample(row[None], prepared, at, counts=[state.counts], allowed=allowed))
        tokens.append(token)
        if token < 0 or (state.matcher is not None and not state.matcher.accept(token)):
            break
        if is_stop(params, token) or (state.matcher is not None and state.matcher.is_finished):
            break
        state.tokens.append(token)
        if state.counts is not None:
            state.counts.add(token)
    return tokens


def delivered(verdict):
    return [[token for token in row if token != NO_TOKEN] for row in verdict.tokens.tolist()]


def split(logits, drafts):
    return torch.split(logits, [len(draft.token_ids) + 1 for draft in drafts])


def guesses(states, rows, sizes, rng, vocab=VOCAB):
    """Drafts that are right up to some place."""
    drafts = []
    for state, part, size in zip(states, rows, sizes, strict=True):
        ids = [max(token, 0) for token in plain(state, part)][:size]
        ids += [rng.randrange(vocab) for _ in range(size - len(ids))]
        if size and rng.random() < 0.7:
            ids[rng.randrange(size)] = rng.randrange(vocab)
        drafts.append(Draft(ids))
    return drafts


def check_equals_plain(logits, drafts, states, verdict, stop_ids=(EOS,)):
    lengths = verdict.length.tolist()
    begin = 0
    for i, (state, draft, part, got) in enumerate(
        zip(states, drafts, split(logits, drafts), delivered(verdict), strict=True)
    ):
        want = plain(state, part, stop_ids)
        right = next((j for j, (a, b) in enumerate(zip(draft.token_ids, want, strict=False)) if a != b), None)
        right = min(len(draft.token_ids), len(want)) if right is None else right
        assert got == want[: right + 1], f"request {i}"
        assert lengths[i] == len(got) - 1
        assert verdict.rows[i, : len(got)].tolist() == [*range(begin, begin + len(got))]
        begin += len(part)


# ---- drafts that were not drawn -----------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_those_of_plain_decoding_under_every_parameter(seed, device):
    rng = random.Random(seed)
    states = [
        state_of(params, i, prompt=[rng.randrange(VOCAB) for _ in range(5)], generated=[rng.randrange(VOCAB)] * (i % 3))
        for i, params in enumerate(MANY * 2)
    ]
    sizes = [rng.choice([0, 1, 4, 7]) for _ in states]
    logits = torch.randn(sum(sizes) + len(sizes), VOCAB).mul_(3).to(device)
    drafts = guesses(states, torch.split(logits, [n + 1 for n in sizes]), sizes, rng)
    before = [(list(s.tokens), copy.deepcopy(s.counts)) for s in states]
    verdict = judge(logits, drafts, states, stop_ids=(EOS,), rule=RULES[seed % 2])
    for state, (tokens, counts) in zip(states, before, strict=True):
        assert state.tokens == tokens
        if counts is not None:
            assert (state.counts.ids, state.counts.times) == (counts.ids, counts.times)
            state.counts.check()
    check_equals_plain(logits, drafts, states, verdict)
    assert len(set(verdict.length.tolist())) > 3


def test_no_drafts_are_plain_sampling_to_the_bit(device):
    states = [state_of(params, i, generated=[4, 4, 9]) for i, params in enumerate(MANY)]
    logits = torch.randn(len(states), VOCAB).to(device)
    prepared = Prepared.of(MANY, [s.seed for s in states], logits.device, stop_ids=(EOS,))
    at = torch.tensor([len(s.tokens) for s in states], device=device)
    want = sample(logits, prepared, at, counts=[s.counts for s in states])
    probs = torch.empty(0, VOCAB, device=device)
    for drafts in ([Draft([])] * len(states), [Draft([], probs)] * len(states)):
        verdict = judge(logits, drafts, states, stop_ids=(EOS,))
        assert torch.equal(verdict.tokens[:, 0], want)
        assert verdict.tokens.shape == (len(states), 1)
        assert not verdict.length.any()


def test_no_requests_get_nothing():
    verdict = judge(torch.empty(0, VOCAB), [], [])
    assert verdict.tokens.shape == (0, 1)
    assert verdict.length.shape == (0,)


@pytest.mark.parametrize("probs", [False, True])
@pytest.mark.parametrize("place", range(4))
def test_a_draft_ends_with_the_request(place, probs):
    """The token that ends it is its last; what is proposed and computed behind it does not matter, not even NaN."""
    ids = [20, 21, 22, 23]
    ids[place] = EOS
    logits = torch.full((15, VOCAB), -50.0)
    for start in (0, 5, 10):
        for j, token in enumerate([*ids, 30]):
            logits[start + j, token] = 50.0
    logits[place + 1 : 5] = torch.nan
    states = [state_of(SamplingParams(**fields)) for fields in ({}, {"ignore_eos": True}, {"stop_token_ids": (20,)})]
    q = torch.zeros(4, VOCAB).index_put_((torch.arange(4), torch.tensor(ids)), torch.tensor(1.0))
    verdict = judge(logits, [Draft(ids, q if probs else None)] * 3, states, stop_ids=(EOS,))
    assert delivered(verdict) == [ids[: place + 1], [*ids, 30], ids[:1]]
    assert verdict.length.tolist() == [place, 4, 0]


# ---- drafts that were drawn ---------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_the_distribution_of_plain_decoding_itself_is_accepted_whole(rule, device):
    """With q equal to p everything is accepted; so in each row p is exactly what plain decoding would draw from."""
    states, drafts, parts = [], [], []
    generator = torch.Generator().manual_seed(1)
    for number, params in enumerate([p for p in MANY if p.temperature > 0 and p.top_k != 1] * 12):
        state = state_of(params, number, generated=[5, 6, 5])
        size = number % 5
        rows = torch.randn(size + 1, VOCAB, generator=generator).mul_(2).to(device)
        ids, probs, counts = [], [], copy.deepcopy(state.counts)
        for row in rows[:size]:
            probs.append(distribution(adjust(row[None], [params], [counts], stop_ids=(EOS,)), [params])[0])
            ids.append(int(torch.multinomial(probs[-1].cpu(), 1, generator=generator)))
            if counts is not None:
                counts.add(ids[-1])
        states.append(state)
        parts.append(rows)
        drafts.append(Draft(ids, torch.stack(probs) if probs else None))
    verdict = judge(torch.cat(parts), drafts, states, stop_ids=(EOS,), rule=rule)
    for state, draft, got in zip(states, drafts, delivered(verdict), strict=True):
        ids = draft.token_ids
        end = next((j for j, token in enumerate(ids) if is_stop(state.request.params, token)), len(ids))
        assert got[:-1] == ids[: len(got) - 1]
        assert len(got) == (end + 1)
        assert got[-1] >= 0


class Chain:
    """A target whose logits depend on the last token and the position, and a draft that is wrong about them."""

    def __init__(self, vocab, gamma, positions=8):
        generator = torch.Generator().manual_seed(3)
        self.target = torch.randn(positions, vocab, vocab, generator=generator).mul_(1.5)
        self.q = (self.target + torch.randn(self.target.shape, generator=generator)).softmax(-1)
        self.gamma = gamma

    def drafts(self, states, generator):
        """Drafts of these requests, and the rows of the target; a prompt is one token."""
        place = torch.tensor([state.num_generated for state in states])
        tokens, probs = [torch.tensor([state.tokens[-1] for state in states])], []
        for j in range(self.gamma):
            probs.append(self.q[place + j, tokens[-1]])
            tokens.append(torch.multinomial(probs[-1], 1, generator=generator)[:, 0])
        logits = torch.stack([self.target[place + j, last] for j, last in enumerate(tokens)], 1)
        ids = torch.stack(tokens[1:], 1).tolist()
        return [Draft(*pair) for pair in zip(ids, torch.stack(probs, 1), strict=True)], logits.flatten(0, 1)


@pytest.mark.parametrize("rule", RULES)
def test_drawn_tokens_have_the_distribution_of_plain_decoding(rule):
    """Chi-square of each of three tokens with its predecessor, over several steps of drafts of two, 16 ids."""
    vocab, number, length = 16, 3000, 3
    chain, generator = Chain(vocab, gamma=2), torch.Generator().manual_seed(4)
    params = SamplingParams(temperature=0.7, top_p=0.95, presence_penalty=0.8)
    states = [state_of(params, i, prompt=[0]) for i in range(number)]
    accepted, steps = 0, 0
    while going := [s for s in states if s.num_generated < length]:
        drafts, logits = chain.drafts(going, generator)
        verdict = judge(logits, drafts, going, rule=rule)
        for state, got in zip(going, delivered(verdict), strict=True):
            accepted, steps = accepted + len(got) - 1, steps + 1
            for token in got:
                state.tokens.append(token)
                state.counts.add(token)
    assert 0.4 < accepted / steps < 1.6, "some of both"
    expected = [torch.zeros(vocab, vocab, dtype=torch.float64) for _ in range(length)]
    paths = {(): 1.0}
    for j in range(length):
        following = {}
        for path, chance in paths.items():
            counts = TokenCounts.of(params, [0])
            for token in path:
                counts.add(token)
            row = chain.target[j, path[-1] if path else 0][None]
            probs = distribution(adjust(row, [params], [counts], stop_ids=()), [params])[0].tolist()
            for token, p in enumerate(probs):
                if p:
                    following[(*path, token)] = chance * p
                    expected[j][path[-1] if path else 0, token] += chance * p
        paths = following
    for j in range(length):
        observed = torch.zeros(vocab, vocab, dtype=torch.float64)
        for state in states:
            observed[state.tokens[j], state.tokens[j + 1]] += 1
        want = expected[j] * number
        assert not observed[want == 0].any()
        common = want >= 5
        rest, seen = want[~common].sum(), observed[~common].sum()
        square = float(((observed - want)[common] ** 2 / want[common]).sum() + (seen - rest) ** 2 / max(rest, 1))
        freedom = int(common.sum())
        assert square < freedom + 3.5 * math.sqrt(2 * freedom), f"token {j}"


@pytest.mark.parametrize("rule", RULES)
def test_a_request_gets_the_same_alone_and_in_a_mixed_batch(rule, device, monkeypatch):
    generator = torch.Generator().manual_seed(2)
    params = [GREEDY, SamplingParams(), SamplingParams(top_p=0.9, frequency_penalty=1.0), SamplingParams(top_k=1)]
    states = [state_of(params[i % 4], i, generated=[3] * (i % 5)) for i in range(24)]
    drafts, parts = [], []
    for i in range(24):
        rows = torch.randn(i % 7 + 1, VOCAB, generator=generator).to(device)
        q = (rows[:-1] + torch.randn(rows[:-1].shape, generator=generator).to(device) * 0.5).softmax(-1)
        ids = [int(torch.multinomial(x.cpu(), 1, generator=generator)) for x in q]
        drafts.append(Draft(ids, q if i % 3 else None))
        parts.append(rows)
    together = judge(torch.cat(parts), drafts, states, rule=rule)
    assert len(together.length.unique()) > 3
    for i in range(24):
        alone = judge(parts[i], [drafts[i]], [states[i]], rule=rule)
        assert delivered(alone)[0] == delivered(together)[i]
    monkeypatch.setattr("k3lib.engine.verify._JUDGED_TOGETHER", VOCAB * 11)  # a few at a time, at least one
    assert torch.equal(judge(torch.cat(parts), drafts, states, rule=rule).tokens, together.tokens)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [math.nan, -0.5, 2.0, math.inf])
def test_nonsense_in_the_probabilities_of_a_draft_harms_nobody(rule, bad):
    states = [state_of(SamplingParams(top_k=6), i) for i in range(4)]
    logits = torch.randn(12, VOCAB)
    q = torch.full((2, VOCAB), bad)
    drafts = [Draft([3, 4], logits[3 * i : 3 * i + 2].softmax(-1)) for i in range(4)]
    good = delivered(judge(logits, drafts, states, rule=rule))
    drafts[2] = Draft([3, 4], q)
    got = delivered(judge(logits, drafts, states, rule=rule))
    assert [got[i] for i in (0, 1, 3)] == [good[i] for i in (0, 1, 3)]
    assert len(got[2]) == 1
    assert got[2][0] in logits[6].topk(6).indices.tolist()


# ---- logits that are not finite -----------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["greedy", "one-hot", "chain", "block", "penalties", "drawn penalties"])
def test_rows_that_are_not_finite_fail_their_request_alone_and_only_if_they_are_used(bad, kind):
    fields = {"greedy": {"temperature": 0}, "penalties": {"presence_penalty": 1.0}}
    params = SamplingParams(**fields.get(kind.removeprefix("drawn "), {}))
    is_drawn = kind in {*RULES, "drawn penalties"}
    ids, number = [20, 21, 22], 7
    logits = torch.full((4 * number, VOCAB), -50.0)
    for j in range(4 * number):
        logits[j, [*ids, 30][j % 4]] = 50.0
    drafts = []
    for i in range(number):
        proposed = [*ids[:2], 5] if i == 5 else [5, *ids[1:]] if i == 6 else ids
        q = torch.zeros(3, VOCAB).index_put_((torch.arange(3), torch.tensor(proposed)), torch.tensor(1.0))
        drafts.append(Draft(proposed, q if is_drawn else None))
    for i in range(4):
        logits[4 * i + i] = bad if bad == -math.inf else logits[4 * i + i].index_fill(0, torch.tensor(9), bad)
    logits[4 * 5 + 3], logits[4 * 6 + 1 : 4 * 7] = bad, bad  # behind what is accepted
    verdict = judge(
        logits, drafts, [state_of(params, i) for i in range(number)], rule="block" if kind == "block" else "chain"
    )
    assert delivered(verdict) == [
        *([*ids[:j], NOT_FINITE] for j in range(4)),
        [*ids, 30],
        [*ids[:2], 22],
        [20],
    ]


def test_a_mask_does_not_hide_what_is_not_finite_from_a_drawn_token():
    """`logit_bias` and `min_tokens` change rows, and cannot make them good."""
    params = SamplingParams(min_tokens=9, logit_bias={3: 100.0})
    logits = torch.zeros(2, VOCAB)
    logits[0, EOS] = math.nan
    verdict = judge(logits, [Draft([3], torch.full((1, VOCAB), 1 / VOCAB))], [state_of(params)], stop_ids=(EOS,))
    assert delivered(verdict) == [[NOT_FINITE]]


# ---- grammars -----------------------------------------------------------------------------------

TOK = load_tokenizer()
needs_grammar = pytest.mark.skipif(not is_available(), reason="needs llguidance")
WORDS = {"type": "array", "items": {"enum": ["a", "bc", 7]}, "minItems": 2, "maxItems": 4}


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(TOK)


def grammar_of(schema, thinking=False):
    return build_grammar(
        None, None, thinking=thinking, response_format={"type": "json_schema", "json_schema": {"schema": schema}}
    )


def documents(compiler, params, number, *, thinking=False, limit=90):
    """Requests with a grammar, rows of logits for a whole output each, and what plain decoding makes of them."""
    grammar = grammar_of(WORDS, thinking)
    for i in range(number):
        state = state_of(params, i, matcher=compiler.matcher(grammar))
        rows = torch.randn(limit, TOK.vocab_size, generator=torch.Generator().manual_seed(i))
        rows[:, TOK.encode("]")[0]] += 3
        if thinking:  # close the channel, at some time
            marker = [TOK.special["<|close|>"], *TOK.encode("think"), TOK.special["<|sep|>"]]
            for j, token in enumerate(marker):
                rows[3 + j, token] = 99.0
        yield state, rows, plain(state, rows, ())


def advanced(state, tokens):
    """The request after these tokens."""
    matcher = state.matcher.clone()
    assert all(map(matcher.accept, tokens))
    return state_of(state.request.params, state.number, generated=tokens, matcher=matcher)


@needs_grammar
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(temperature=0.8, repetition_penalty=1.2)])
def test_a_grammar_may_end_anywhere_in_a_block(compiler, params, thinking):
    """Right drafts with the end at each place, and with rubbish behind it."""
    rng = random.Random(0)
    for state, rows, tokens in documents(compiler, params, 2, thinking=thinking):
        assert tokens[-1] == TOK.stop_ids[0]
        states, drafts, parts = [], [], []
        for done in [*range(0, len(tokens) - 8, 5), *range(len(tokens) - 8, len(tokens))]:
            ids = tokens[done : done + 7]
            drafts.append(Draft([*ids, *(rng.randrange(TOK.vocab_size) for _ in range(7 - len(ids)))]))
            states.append(advanced(state, tokens[:done]))
            parts.append(rows[done : done + 8])
        masks = [allowed_tokens([s.matcher], TOK.vocab_size, torch.device("cpu")) for s in states]
        marks = [(s.matcher.num_tokens, s.matcher.is_finished, s.matcher.is_stuck) for s in states]
        logits = torch.cat(parts)
        verdict = judge(logits, drafts, states)
        for i, s in enumerate(states):  # they stand where they stood
            assert (s.matcher.num_tokens, s.matcher.is_finished, s.matcher.is_stuck) == marks[i]
            again = allowed_tokens([s.matcher], TOK.vocab_size, torch.device("cpu"))
            assert (again is None) == (masks[i] is None)
            assert again is None or torch.equal(again, masks[i])
        check_equals_plain(logits, drafts, states, verdict, ())
        assert [len(got) for got in delivered(verdict)[-8:]] == [8, 7, 6, 5, 4, 3, 2, 1]
        assert all(got[-1] == TOK.stop_ids[0] for got in delivered(verdict)[-8:])


@needs_grammar
def test_a_token_that_the_grammar_forbids_ends_the_draft(compiler):
    rng = random.Random(1)
    (state, rows, tokens), *_ = documents(compiler, SamplingParams(), 1)
    states, drafts = [], []
    forbidden = TOK.special["<|open|>"]
    for place in range(7):
        ids = tokens[4:11]
        ids[place] = forbidden if place % 2 else rng.randrange(TOK.vocab_size)
        states.append(advanced(state, tokens[:4]))
        drafts.append(Draft(ids))
    logits = rows[4:12].repeat(7, 1)
    verdict = judge(logits, drafts, states)
    check_equals_plain(logits, drafts, states, verdict, ())
    assert verdict.length.tolist() == [*range(7)]


@needs_grammar
@pytest.mark.parametrize("rule", RULES)
def test_drawn_tokens_obey_the_grammar(compiler, rule):
    """Drafts that do not know the grammar: outputs are valid, and have the masked distribution."""
    grammar = grammar_of({"enum": ["a", "b"]})
    opener = [TOK.special["<|open|>"], *TOK.encode("response"), TOK.special["<|sep|>"], *TOK.encode('"')]
    a, b, quote = (TOK.encode(text)[0] for text in 'ab"')
    logits = torch.zeros(3, TOK.vocab_size)
    logits[0, a], logits[0, b] = math.log(3.0), 0.0
    q = torch.zeros(2, TOK.vocab_size)
    q[0, [a, b, 9]] = torch.tensor([0.2, 0.3, 0.5])
    q[1, [quote, 9]] = 0.5
    number = 800
    generator = torch.Generator().manual_seed(0)
    ids = torch.multinomial(q, number, replacement=True, generator=generator).T.tolist()
    first = state_of(SamplingParams(), matcher=compiler.matcher(grammar))
    matcher = advanced(first, opener).matcher
    states = [state_of(SamplingParams(), i, generated=opener, matcher=matcher.clone()) for i in range(number)]
    verdict = judge(logits.repeat(number, 1), [Draft(x, q) for x in ids], states, rule=rule)
    found = delivered(verdict)
    assert all(states[i].matcher.clone().accept(got[0]) for i, got in enumerate(found))
    assert {token for got in found for token in got[1:2]} == {quote}
    share = sum(got[0] == a for got in found) / number
    assert abs(share - 0.75) < 4 * math.sqrt(0.75 * 0.25 / number)
    assert {len(got) for got in found} == {1, 2, 3}


# ---- what else ----------------------------------------------------------------------------------


@pytest.mark.parametrize("probs", [False, True])
def test_simulated_acceptance_has_the_average_and_the_bonus_of_the_target(probs):
    params = SamplingParams(temperature=0)
    logits = torch.randn(3 * 8, VOCAB)
    best = logits.argmax(-1).view(3, 8)
    draft = Draft([30, 31, 32, 33, 34, 35, 36], torch.rand(7, VOCAB) if probs else None)
    taken = []
    for step in range(200):
        states = [state_of(params, i, prompt=range(2 + step)) for i in range(3)]
        verdict = judge(logits, [draft] * 3, states, stop_ids=(EOS,), simulate=4.25)
        (length,) = set(verdict.length.tolist())
        taken.append(length + 1)
        for i in range(3):
            assert delivered(verdict)[i] == [*draft.token_ids[:length], int(best[i, length])]
    assert set(taken) == {4, 5}
    assert abs(sum(taken) / 200 - 4.25) < 0.13


def test_simulated_acceptance_passes_neither_an_end_nor_a_failure():
    logits = torch.zeros(5 + 5 + 3 + 1, VOCAB)
    logits[:, 9] = 1.0
    logits[5 + 2] = math.nan
    drafts = [Draft([1, EOS, 2, 3]), Draft([1, 2, 3, 4]), Draft([1, 2]), Draft([])]
    verdict = judge(logits, drafts, [state_of(GREEDY, i) for i in range(4)], stop_ids=(EOS,), simulate=5)
    assert delivered(verdict) == [[1, EOS], [1, 2, NOT_FINITE], [1, 2, 9], [9]]
    assert verdict.length.tolist() == [1, 2, 2, 0]


@needs_grammar
def test_simulated_acceptance_obeys_the_grammar(compiler):
    (state, rows, tokens), *_ = documents(compiler, GREEDY, 1)
    ids = [*tokens[4:6], TOK.special["<|open|>"], 5, 5]
    verdict = judge(rows[4:10], [Draft(ids)], [advanced(state, tokens[:4])], simulate=6)
    assert delivered(verdict) == [tokens[4:7]]


def test_log_probabilities_of_the_tokens_are_those_of_their_rows():
    states = [state_of(GREEDY, i) for i in range(2)]
    logits = torch.randn(6, VOCAB)
    best = logits.argmax(-1).tolist()
    verdict = judge(logits, [Draft([best[0], best[1], 3]), Draft([best[4]])], states)
    found = logprobs_of(logits[verdict.rows.flatten()], verdict.tokens.flatten(), 2)
    want = logits.log_softmax(-1)
    for i, (row, tokens) in enumerate(zip(verdict.rows.tolist(), delivered(verdict), strict=True)):
        for j, token in enumerate(tokens):
            assert found.chosen[i * 4 + j] == want[row[j], token]
    assert [len(tokens) for tokens in delivered(verdict)] == [3, 2]


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        (Draft([]), None),
        (Draft([0, 39]), None),
        (Draft([0, 39], torch.rand(2, 40, dtype=torch.bfloat16), [0, 1.0]), None),
        (Draft([1] * 8), "gave 8 tokens, more than block_size=7"),
        (Draft([40]), r"gave token 40, outside the vocabulary 0\.\.39"),
        (Draft([-1]), r"gave token -1, outside the vocabulary"),
        (Draft([1.0]), "gave 1.0, which is no token id"),
        (Draft([True]), "gave True, which is no token id"),
        (Draft([1], torch.rand(1, 39)), r"gave probs of shape \[1, 39\], needs \[1, 40\]"),
        (Draft([1], torch.rand(2, 40)), r"gave probs of shape \[2, 40\], needs \[1, 40\]"),
        (Draft([1], torch.ones(1, 40).long()), "gave probs of torch.int64, needs a tensor of floating point numbers"),
        (Draft([1], [[1.0] * 40]), "gave probs of list, needs a tensor"),
        (Draft([1], None, [0.5, 0.5]), "gave 2 confidences for 1 tokens"),
        (Draft([1], None, [1.5]), r"gave confidence 1.5, outside 0\.\.1"),
        (Draft([1], None, [math.nan]), "gave confidence nan"),
    ],
)
def test_drafts_that_cannot_be_verified_are_explained(draft, reason):
    found = check_draft(draft, 7, 40)
    if reason is None:
        assert found is None
    else:
        with pytest.raises(AssertionError, match=f"the proposer {reason}"):
            raise AssertionError(found)


def test_rows_that_do_not_fit_the_drafts_are_refused():
    with pytest.raises(ConfigError, match="3 rows for 1 states, 1 drafts of 1 tokens"):
        judge(torch.zeros(3, VOCAB), [Draft([1])], [state_of(GREEDY)])


def test_judging_does_not_wait_for_the_device(device):
    if device != "cuda":
        pytest.skip(f"needs cuda, this is {device}")
    states = [state_of(params, i, generated=[5]) for i, params in enumerate(MANY)]
    logits = torch.randn(len(MANY) * 4, VOCAB, device=device)
    drafts = [Draft([1, 2, 3], logits[:3].softmax(-1) if i % 2 else None) for i in range(len(MANY))]
    judge(logits, drafts, states, stop_ids=(EOS,))
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [judge(logits, drafts, states, stop_ids=(EOS,), rule=rule) for rule in RULES]
        found.append(judge(logits, drafts, states, stop_ids=(EOS,), simulate=2.5))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all((verdict.length >= 0).all() for verdict in found)
