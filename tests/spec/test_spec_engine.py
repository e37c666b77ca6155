"""An engine that speculates gives what the same engine gives without: whatever is proposed, whatever else is on."""

from __future__ import annotations

import random

import pytest
import torch
from engines import alone, drained, greedy, ids_of, make_engine, one_thread, prompts, run_all, small_model
from proposers import Random, Scripted

from k3lib.batch import Batch, FeatureTap
from k3lib.engine import Engine, EngineConfig, Request, SamplingParams
from k3lib.engine.graphs import DecodeGraphs
from k3lib.errors import ConfigError
from k3lib.spec import Draft, NGram, SpecConfig

BLOCK = 7


@pytest.fixture(scope="module", autouse=True)
def threads():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model():
    return small_model()


def spec_engine(model, draft, *, rollback="replay", spec=(), **rules):
    return make_engine(model, spec=SpecConfig(draft=draft, rollback=rollback, **dict(spec)), **rules)


ASKED = prompts(37, 5, 1, 20)
PARAMS = [greedy(n) for n in (22, 13, 26, 1)]


@pytest.fixture(scope="module")
def wanted(model):
    return [alone(model, ids, p).token_ids for ids, p in zip(ASKED, PARAMS, strict=True)]


def proposers(wanted):
    answers = list(zip(ASKED, wanted, strict=True))
    draw = random.Random(0)
    return {
        "right": Scripted(answers),
        "wrong": Scripted(answers, right=lambda _: 0),
        "random": Random(),
        "drawn": Random(drawn=True),
        "changing": Scripted(answers, right=lambda _: draw.randint(0, 7), length=lambda _: draw.randint(0, 7)),
        "ngram": NGram(block_size=BLOCK),
    }


KINDS = ("right", "wrong", "random", "drawn", "changing", "ngram")
SETTINGS = {
    "plain": {},
    "no cache": {"disable_radix_cache": True},
    "chunks": {"chunked_prefill_size": 8},
    "few pages": {"pages": 18, "slots": 4, "schedule_conservativeness": 0.0},
    "mixed": {"chunked_prefill_size": 12, "mix_decode": True},
}


def pairs():
    """Every kind in three of the settings, every setting with three kinds or more."""
    names = list(SETTINGS)
    return [(kind, names[(i + step) % len(names)]) for i, kind in enumerate(KINDS) for step in (0, 1, 3)]


@pytest.mark.parametrize(("kind", "setting"), pairs())
def test_greedy_tokens_are_those_without(model, wanted, kind, setting):
    rollback = "states" if (KINDS.index(kind) + list(SETTINGS).index(setting)) % 2 else "replay"
    engine = spec_engine(model, proposers(wanted)[kind], rollback=rollback, **SETTINGS[setting])
    for _ in range(2):  # cold, then with what was cached
        assert ids_of(engine.generate(ASKED, PARAMS)) == wanted
    stats = engine.stats()
    if setting == "few pages":
        assert stats["preempted"], "the case is about preemption"
    report = stats["speculation"]
    assert report["steps"]
    assert report["refused"] == ""
    if kind == "right" and setting == "plain":
        assert report["accept_rate"] == 1.0
        assert stats["verify_steps"] < 2 * 26 / 4
    if kind == "wrong":
        assert report["accepted"] == 0
    assert drained(engine)


@pytest.mark.parametrize("rollback", ["replay", "states"])
@pytest.mark.parametrize("accepted", [0, 1, 3, BLOCK])
def test_memory_is_that_of_plain_decoding_after_every_step(model, wanted, accepted, rollback):
    draft = Scripted(list(zip(ASKED, wanted, strict=True)), right=lambda _: accepted)
    engine = spec_engine(model, draft, rollback=rollback)
    plain = make_engine(model, disable_radix_cache=True)
    engine.add(Request(ASKED[0], greedy(22)))
    plain.add(Request(ASKED[0], greedy(22)))
    while engine.has_work:
        engine.step()
        (state,) = engine._states.values() if engine._states else (None,)
        if state is None or not state.num_generated:
            continue
        while not plain._states or next(iter(plain._states.values())).num_generated < state.num_generated:
            plain.step()
        (other,) = plain._states.values()
        assert state.lease.tokens == other.lease.tokens
        length = state.lease.length
        for cache in (engine.cache, plain.cache):
            cache.issue()
        for name in ("state", "conv"):
            got = getattr(engine.cache.pool.kda, name)[:, state.lease.slot]
            want = getattr(plain.cache.pool.kda, name)[:, other.lease.slot]
            assert (got - want).abs().max() <= 1e-5 * want.abs().max().clamp(min=1)
        got, want = (
            e.cache.pool.latent.pages[:, s.lease.pages].flatten(1, 2)[:, :length]
            for e, s in ((engine, state), (plain, other))
        )
        assert (got - want).abs().max() <= 1e-5 * want.abs().max().clamp(min=1)


@pytest.mark.again
def test_wrong_drafts_change_nothing_in_512_tokens(model):
    (ids,) = prompts(9, seed=4)
    want = alone(model, ids, greedy(512)).token_ids
    engine = spec_engine(model, Scripted([(ids, want)], right=lambda _: 0, length=lambda _: 3), pages=200)
    (out,) = engine.generate([ids], greedy(512))
    assert out.token_ids == want
    assert out.speculation.accepted == 0
    assert out.speculation.steps == 510  # the prompt gives the first token, and the last has no room for a draft


def test_positions_of_acceptance_are_counted(model, wanted):
    draft = Scripted(list(zip(ASKED, wanted, strict=True)), right=lambda _: 3)
    engine = spec_engine(model, draft)
    (out,) = engine.generate([ASKED[0]], greedy(22))
    found = out.speculation
    assert found.by_position[:3] == found.tried_by_position[:3]
    assert not any(found.by_position[3:])
    assert found.accepted == sum(found.by_position)
    assert found.proposed == sum(found.tried_by_position)
    assert sum(out.accepted_per_step) == len(out.token_ids) == 22
    assert found.accept_length == found.emitted / found.steps


def test_a_right_draft_is_accepted_at_every_position_after_a_hit_and_far_in(model):
    for length in (17, 600):
        (ids,) = prompts(length)
        want = alone(model, ids, greedy(25)).token_ids
        engine = spec_engine(model, Scripted([(ids, want)]), pages=400, chunked_prefill_size=128)
        for _ in range(2):
            (out,) = engine.generate([ids], greedy(25))
            assert out.token_ids == want
            assert out.speculation.by_position == out.speculation.tried_by_position
        assert out.cached_tokens
        assert drained(engine)


def test_features_are_those_of_the_taps_for_every_committed_token(model, wanted):
    draft = Scripted(list(zip(ASKED, wanted, strict=True)), right=lambda c: len(c.token_ids) % 4, layers=(0, 2))
    draft.feature_kind = "mixture"
    engine = spec_engine(model, draft, chunked_prefill_size=8, disable_radix_cache=True)
    name = engine.add(Request(ASKED[0], greedy(22)))
    run_all(engine)
    whole = [*ASKED[0], *wanted[0]]
    tap = FeatureTap((0, 2), "mixture")
    model(Batch.pack([whole]), taps=tap)
    rows = draft.features[name]
    assert sorted(rows) == list(range(len(whole) - 1))
    got = torch.stack([rows[i] for i in range(len(whole) - 1)])
    torch.testing.assert_close(got, tap.out[:-1], rtol=1e-4, atol=1e-4)
    assert draft.dropped == [name]


def test_a_stop_inside_a_block_ends_there(model, wanted):
    answer = wanted[0]
    stop = answer[11]
    params = greedy(22, stop_token_ids=(stop,))
    want = alone(model, ASKED[0], params)
    engine = spec_engine(model, Scripted([(ASKED[0], answer)]))
    for _ in range(2):
        (out,) = engine.generate([ASKED[0]], params)
        assert (out.token_ids, out.finish) == (want.token_ids, "stop")
    # what was cached of it ends in front of the stop token
    again = alone(model, ASKED[0] + out.token_ids + [5], greedy(8)).token_ids
    assert ids_of(engine.generate([ASKED[0] + out.token_ids + [5]], greedy(8))) == [again]
    assert drained(engine)


def test_logprobs_are_those_of_plain_decoding(model, wanted):
    params = greedy(22, logprobs=True, top_logprobs=5)
    want = alone(model, ASKED[0], params).logprobs
    draft = Scripted([(ASKED[0], wanted[0])], right=lambda c: len(c.token_ids) % 5)
    (out,) = spec_engine(model, draft).generate([ASKED[0]], params)
    assert [entry.token_id for entry in out.logprobs] == out.token_ids
    for got, expected in zip(out.logprobs, want, strict=True):
        assert got.logprob == pytest.approx(expected.logprob, abs=1e-4)
        assert [i for i, _ in got.top] == [i for i, _ in expected.top]


def test_seeds_give_the_same_tokens_with_a_draft_that_was_not_drawn(model):
    params = [SamplingParams(temperature=t, top_p=0.9, seed=7 + i, max_new_tokens=25, ignore_eos=True,
                             frequency_penalty=0.3) for i, t in enumerate((0.7, 1.0, 1.3))]  # fmt: skip
    asked = prompts(10, 30, 3)
    want = [alone(model, ids, p).token_ids for ids, p in zip(asked, params, strict=True)]
    draft = Scripted(list(zip(asked, want, strict=True)), right=lambda c: len(c.token_ids) % 8)
    engine = spec_engine(model, draft)
    assert ids_of(engine.generate(asked, params)) == want
    assert engine.stats()["speculation"]["accepted"] > 20


def test_requests_that_come_and_go(model):
    asked = prompts(*([20, 7, 33, 12] * 3), seed=3)
    wants = {tuple(ids): alone(model, ids, greedy(12)).token_ids for ids in asked}
    draw = random.Random(5)
    draft = Scripted(list(wants.items()), right=lambda _: draw.randint(0, 7), length=lambda _: draw.randint(0, 7))
    engine = spec_engine(model, draft, slots=4, pages=60)
    names, tokens, todo, aborted = {}, {}, list(asked), set()
    while todo or engine.has_work:
        if todo and draw.random() < 0.5:
            ids = todo.pop()
            names[engine.add(Request(ids, greedy(12)))] = ids
        if names and draw.random() < 0.1:
            name = draw.choice(list(names))
            if engine.abort(name):
                aborted.add(name)
        for out in engine.step():
            tokens.setdefault(out.request_id, []).extend(out.token_ids)
        engine.cache.check()
    for name, ids in names.items():
        want = wants[tuple(ids)]
        got = tokens.get(name, [])
        assert got == want if name not in aborted else got == want[: len(got)]
    assert drained(engine)
    assert not engine.speculation._known


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (Draft([1] * 9), "9"), (Draft([512]), "512"), (Draft([-1]), "-1"),
        (Draft([1, 2], probs=torch.ones(1, 512)), "probs"), ("raise", "broken"), ("count", "drafts for"),
    ],
)  # fmt: skip
def test_a_bad_draft_is_refused_and_the_request_goes_on(model, wanted, bad, says):
    class Bad(Scripted):
        def propose(self, contexts):
            if bad == "raise":
                raise RuntimeError("broken")
            if bad == "count":
                return []
            return [bad for _ in contexts]

    engine = spec_engine(model, Bad([]))
    outs = engine.generate(ASKED[:2], PARAMS[:2])
    assert ids_of(outs) == wanted[:2]
    assert all(says in out.speculation.refused for out in outs)
    assert says in engine.stats()["speculation"]["refused"]
    assert drained(engine)


def test_what_does_not_fit_is_refused(model):
    class Taps(Scripted):
        feature_layers = (0, 3)

    with pytest.raises(ConfigError, match=r"layers \[3\].*0\.\.2"):
        spec_engine(model, Taps([], layers=(0, 3)))
    odd = Scripted([], layers=(0,))
    odd.feature_kind = "mean"
    with pytest.raises(ConfigError, match="'mean'"):
        spec_engine(model, odd)
    with pytest.raises(ConfigError, match=r"block_size=9.*7"):
        spec_engine(model, Scripted([]), spec={"block_size": 9})
    with pytest.raises(ConfigError, match=r"simulate_accept_len=9.*7 draft tokens"):
        spec_engine(model, Scripted([]), spec={"simulate_accept_len": 9})
    with pytest.raises(ConfigError, match="Proposer"):
        spec_engine(model, 5)
    with pytest.raises(ConfigError, match="deterministic"):
        spec_engine(model, Scripted([]), deterministic=True)
    with pytest.raises(ConfigError, match=r"block_size=7.*block_size=3"):
        spec_engine(model, Scripted([]), pools={"block_size": 3})


def test_the_cap_of_running_requests_is_told(model):
    engine = Engine(model, EngineConfig(spec=SpecConfig(draft="ngram")))
    limit = engine.stats()["limits"]["max_running_requests"]
    assert limit["value"] <= 48
    many = make_engine(model, slots=64, pages=300, spec=SpecConfig(draft="ngram"))
    limit = many.stats()["limits"]["max_running_requests"]
    assert limit["value"] == 48
    assert "speculation" in limit["note"]
    scratch = {kind: spec_engine(model, "ngram", rollback=kind).stats()["limits"] for kind in ("replay", "states")}
    assert scratch["replay"]["verify_scratch_bytes"]["value"] < scratch["states"]["verify_scratch_bytes"]["value"]
    assert "8 tokens of 8 requests" in scratch["states"]["verify_scratch_bytes"]["note"]
    given = make_engine(model, slots=64, pages=300, spec=SpecConfig(draft="ngram"), max_running_requests=50)
    assert given.stats()["limits"]["max_running_requests"]["value"] == 50


def test_more_requests_than_max_batch_decode_plainly(model, wanted):
    draft = Scripted(list(zip(ASKED, wanted, strict=True)))
    engine = spec_engine(model, draft, spec={"max_batch": 1})
    assert ids_of(engine.generate(ASKED, PARAMS)) == wanted
    stats = engine.stats()
    assert stats["decode_steps"]
    assert stats["verify_steps"]


@pytest.mark.parametrize("length", [1.0, 2.5, 8.0])
def test_simulated_acceptance_has_its_average_and_says_what_it_is(model, length):
    engine = spec_engine(model, Random(), spec={"simulate_accept_len": length})
    engine.speculation.proposer.propose = lambda contexts: [Draft([3] * BLOCK) for _ in contexts]
    outs = engine.generate(prompts(*[9] * 8), greedy(40))
    report = engine.stats()["speculation"]
    assert report["simulated"]
    assert all(out.speculation.simulated for out in outs)
    assert report["accept_length"] == pytest.approx(length, rel=0.15)


def test_a_failing_request_ends_alone(model, wanted):
    draft = Scripted(list(zip(ASKED, wanted, strict=True)), right=lambda _: 2)
    engine = spec_engine(model, draft)
    first, second = engine.add(Request(ASKED[0], greedy(22))), engine.add(Request(ASKED[1], PARAMS[1]))
    forward = engine.runner.model.forward

    def poisoned(batch, *args, **kwargs):
        logits = forward(batch, *args, **kwargs)
        if batch.mode == "verify" and len(batch.new_tokens) == 2 and batch.seq_lens[0] > 44:
            logits[: batch.new_tokens[0]] = float("nan")
        return logits

    engine.runner.model.forward = poisoned
    try:
        tokens, ends = run_all(engine)
    finally:
        del engine.runner.model.forward
    assert ends == {first: "error", second: "length"}
    assert tokens[second] == wanted[1]
    assert tokens[first] == wanted[0][: len(tokens[first])]
    assert drained(engine)


@pytest.mark.parametrize("layers", [(), (0, 2)])
def test_padded_steps_of_any_length_give_the_same(model, wanted, layers):
    draw = random.Random(1)
    answers = list(zip(ASKED, wanted, strict=True))
    draft = Scripted(answers, right=lambda _: draw.randint(0, 7), length=lambda _: draw.randint(0, 7), layers=layers)
    engine = spec_engine(model, draft, context_length=128)
    ran = []
    graphs = engine.runner.graphs = DecodeGraphs(
        model, engine.cache, max_requests=8, max_pages=32, captures=False, tap=engine.speculation.tap
    )
    run = graphs.run
    graphs.run = lambda batch: ran.append((batch.mode, batch.new_tokens)) or run(batch)
    assert ids_of(engine.generate(ASKED, PARAMS)) == wanted
    assert any(mode == "verify" and len(set(lengths)) > 1 for mode, lengths in ran)
    if layers:
        lengths = sorted(len(ids) + len(out) - 1 for ids, out in answers)
        assert sorted(len(rows) for rows in draft.features.values()) == lengths
    assert drained(engine)


def test_a_stop_text_inside_a_block_ends_there(model, wanted):
    class Letters:
        def encode(self, text):
            return [ord(c) for c in text]

        def decode(self, ids):
            return "".join(chr(200 + i) for i in ids)

    text = Letters().decode(wanted[0][8:10])
    params = greedy(22, stop=(text,))
    want = alone(model, ASKED[0], params, tokenizer=Letters())
    draft = Scripted([(ASKED[0], wanted[0])])
    engine = make_engine(model, tokenizer=Letters(), spec=SpecConfig(draft=draft))
    (out,) = engine.generate([ASKED[0]], params)
    assert (out.token_ids, out.finish) == (want.token_ids, "stop")
    assert len(out.token_ids) <= 10
    assert drained(engine)


def test_drafts_without_confidence_are_shortened_under_load(model, wanted):
    class Sure(Scripted):
        def propose(self, contexts):
            return [Draft(d.token_ids, confidence=[0.9, 0.9, 0.01, 0.9]) for d in super().propose(contexts)]

    answers = list(zip(ASKED, wanted, strict=True))
    reports = []
    for adaptive in (False, True):
        engine = spec_engine(model, Sure(answers, length=lambda _: 4), spec={"adaptive": adaptive})
        assert ids_of(engine.generate(ASKED, PARAMS)) == wanted
        reports.append(engine.stats()["speculation"])
    assert len(reports[0]["tried_by_position"]) == 4
    assert len(reports[1]["tried_by_position"]) == 2
