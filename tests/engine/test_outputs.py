"""What requests report and when they stop: log-probabilities, routes, stop texts, counters of reuse."""

import pytest
import torch
from engines import Scripted, alone, drained, greedy, ids_of, make_engine, one_thread, prompts, run_all, small_model

from k3lib.batch import Batch, RouteTap
from k3lib.engine import Request, SamplingParams
from k3lib.errors import K3Error
from k3lib.server.tokenizer import load_tokenizer


@pytest.fixture(scope="module", autouse=True)
def threads():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model():
    return small_model()


@torch.inference_mode()
def scores(model, ids):
    return model(Batch.pack([ids])).log_softmax(-1)


def check_logprobs(model, prompt, out, top):
    """Against one stateless forward over everything."""
    want = scores(model, prompt + out.token_ids)
    entries = [*(out.prompt_logprobs or [None] * len(prompt))[1:], *out.logprobs]
    for row, (token, entry) in enumerate(zip([*prompt[1:], *out.token_ids], entries, strict=True)):
        if entry is None:
            continue
        assert entry.token_id == token
        assert abs(entry.logprob - float(want[row, token])) <= 1e-4
        values, ids = want[row].topk(top)
        assert [i for i, _ in entry.top] == ids.tolist()
        torch.testing.assert_close(torch.tensor([x for _, x in entry.top]), values, atol=1e-4, rtol=0)


@pytest.mark.parametrize("top", [0, 1, 5])
@pytest.mark.parametrize("chunk", [3, 7, 512])
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0, "seed": 2, "logit_bias": {7: 5.0}}], ids=["greedy", "drawn"]
)
def test_logprobs_are_those_of_the_model_alone(model, chunk, top, params):
    """Before temperature and biases; for prompts too."""
    params = greedy(6, logprobs=True, prompt_logprobs=True, top_logprobs=top, **params)
    work = prompts(1, 2, 21, 40)
    engine = make_engine(model, chunked_prefill_size=chunk)
    for ids, out in zip(work, engine.generate(work, params), strict=True):
        assert out.prompt_logprobs[0] is None
        assert len(out.prompt_logprobs) == len(ids)
        assert len(out.logprobs) == 6
        check_logprobs(model, ids, out, top)
    assert drained(engine)


@pytest.mark.parametrize("chunk", [7, 512])
def test_logprobs_from_a_warm_cache_and_after_preemption(model, chunk):
    (ids,) = prompts(40)
    for params in (
        greedy(8, logprobs=True, top_logprobs=2),
        greedy(8, logprobs=True, top_logprobs=2, prompt_logprobs=True),
    ):
        engine = make_engine(model, chunked_prefill_size=chunk)
        engine.generate([ids], greedy(1))
        (out,) = engine.generate([ids], params)
        # a prompt whose log-probabilities are wanted is computed anew
        assert out.cached_tokens == (0 if params.prompt_logprobs else 32)
        check_logprobs(model, ids, out, 2)
        for moment in (1, 3, 8):
            engine.add(Request(ids, params, "r"))
            steps = []
            while engine.has_work:
                if len(steps) == moment:
                    engine.scheduler.preempt_all(donate=True)
                steps.append(engine.step())
            outs = [out for step in steps for out in step]
            assert [entry.token_id for out in outs for entry in out.logprobs] == out_ids(outs)
            got = [entry.logprob for out in outs for entry in out.logprobs]
            want = scores(model, ids + out_ids(outs))[len(ids) - 1 : -1]
            want = want.gather(1, torch.tensor(out_ids(outs))[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(got), want, atol=1e-4, rtol=0)
            if params.prompt_logprobs:
                assert [out.prompt_logprobs is not None for out in outs] == [True] + [False] * (len(outs) - 1)
        assert drained(engine)


def out_ids(outs):
    return [token for out in outs for token in out.token_ids]


@pytest.mark.parametrize("length", [2, 17, 64, 300])
def test_prompt_logprobs_of_one_chunk_equal_the_stateless_model_to_the_bit(model, length):
    (ids,) = prompts(length)
    engine = make_engine(model, disable_radix_cache=True)
    (out,) = engine.generate([ids], greedy(1, prompt_logprobs=True))
    with torch.inference_mode():
        hidden = model.hidden(Batch.pack([ids]))
        want = torch.cat([model.scores(part) for part in hidden[:-1].split(256)]).log_softmax(-1)
    want = want.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert torch.equal(torch.tensor([entry.logprob for entry in out.prompt_logprobs[1:]]), want)
    assert drained(engine)


@pytest.mark.parametrize("length", [1, 2, 9, 33])
@pytest.mark.parametrize("chunk", [1, 8, 512])
def test_scoring_a_prompt_without_generating(model, length, chunk):
    (ids,) = prompts(length)
    engine = make_engine(model, chunked_prefill_size=chunk)
    (out,) = engine.generate([ids], greedy(0, prompt_logprobs=True, top_logprobs=1))
    assert (out.token_ids, out.finish, len(out.prompt_logprobs)) == ([], "length", length)
    want = scores(model, ids)
    for row, entry in enumerate(out.prompt_logprobs[1:]):
        assert entry.token_id == ids[row + 1]
        assert abs(entry.logprob - float(want[row, ids[row + 1]])) <= 1e-4
        assert entry.top[0][0] == int(want[row].argmax())
    assert engine.stats()["generated_tokens"] == 0
    assert drained(engine)


def test_who_wants_no_logprobs_gets_none_beside_one_who_does(model):
    engine = make_engine(model, chunked_prefill_size=8)
    work = prompts(12, 20, 5)
    plain, wants, deep = engine.generate(
        work,
        [
            greedy(5),
            greedy(5, logprobs=True, top_logprobs=1, prompt_logprobs=True),
            greedy(5, logprobs=True, top_logprobs=4),
        ],
    )
    assert (plain.logprobs, plain.prompt_logprobs) == (None, None)
    assert [len(entry.top) for entry in wants.logprobs] == [1] * 5
    assert [len(entry.top) for entry in deep.logprobs] == [4] * 5
    assert deep.prompt_logprobs is None
    assert drained(engine)


# ---- routes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [5, 512])
@pytest.mark.parametrize("mix_decode", [False, True], ids=["turns", "mixed"])
def test_routes_are_those_of_one_forward(model, chunk, mix_decode):
    text = model.config.text
    engine = make_engine(model, chunked_prefill_size=chunk, mix_decode=mix_decode)
    work = prompts(1, 19, 34)
    engine.generate(work, greedy(2))  # a cache that must not be used
    for i, ids in enumerate([*work, work[1]]):
        engine.add(Request(ids, greedy(5), f"r{i}", record_routes=i < 3))
    outs = {}
    while engine.has_work:
        for out in engine.step():
            outs.setdefault(out.request_id, []).append(out)
    for i, ids in enumerate(work):
        found = outs[f"r{i}"]
        assert [out.routes is not None for out in found] == [False] * (len(found) - 1) + [True]
        everything = ids + out_ids(found)
        tap = RouteTap(
            torch.zeros(len(everything) - 1, text.num_layers - 1, text.moe.top_k, dtype=torch.int32), replay=False
        )
        batch = Batch.pack([everything[:-1]])
        batch.routes = tap
        with torch.inference_mode():
            model(batch)
        assert found[-1].routes.dtype == torch.int32
        assert torch.equal(found[-1].routes.sort(-1).values, tap.ids.sort(-1).values)
        assert found[0].cached_tokens == 0
    assert all(out.routes is None for out in outs["r3"])
    assert outs["r3"][0].cached_tokens > 0
    assert drained(engine)


def test_routes_of_a_prompt_alone(model):
    (ids,) = prompts(11)
    engine = make_engine(model, chunked_prefill_size=4)
    engine.add(Request(ids, greedy(0), "r", record_routes=True))
    outs = [out for _ in range(10) if engine.has_work for out in engine.step()]
    assert [(out.token_ids, out.finish) for out in outs] == [([], "length")]
    assert outs[0].routes.shape[0] == 11
    assert drained(engine)


# ---- ends ---------------------------------------------------------------------------------------


def test_min_tokens_keeps_eos_and_stop_ids_away(model):
    (ids,) = prompts(9)
    eos = model.config.eos_token_id
    engine = make_engine(model)
    push = {eos: 90.0, 3: 80.0}
    for least in (0, 1, 4):
        (out,) = engine.generate(
            [ids],
            SamplingParams(temperature=0, max_new_tokens=8, min_tokens=least, logit_bias=push, stop_token_ids=(3,)),
        )
        assert out.finish == "stop"
        assert len(out.token_ids) == least + 1
        assert out.token_ids[-1] == eos
        assert not {eos, 3} & set(out.token_ids[:-1])
    assert drained(engine)


def test_a_bias_may_choose_every_token(model):
    engine = make_engine(model)
    outputs = engine.generate(prompts(5, 6), [greedy(4, logit_bias={9: 100.0}), greedy(4)])
    assert outputs[0].token_ids == [9] * 4
    assert outputs[1].token_ids == alone(model, prompts(5, 6)[1], greedy(4)).token_ids
    assert drained(engine)


def texts_engine(model, text, **rules):
    """An engine whose model writes `text`, one byte a token, after a prompt of one token."""
    data = text.encode()
    engine = make_engine(model, tokenizer=load_tokenizer("bytes"), **rules)
    engine.runner.model = Scripted(model, lambda ids, length: data[(length - 1) % len(data)])
    return engine


@pytest.mark.parametrize(
    ("text", "stop", "length"),
    [
        ("one two three", ("two",), 7),
        ("one two three", ("x", "e t", "one t"), 5),
        ("aaab", ("aab",), 4),
        ("ab", ("b",), 2),
        ("ab", ("a",), 1),
        ("naïve café", ("ï",), 4),
        ("naïve café", ("é",), 12),
        ("日本語です", ("語",), 9),
        ("日本語です", ("本語",), 9),
        ("emoji 👩‍🚀 end", ("🚀",), 17),
        ("abc", ("cab",), 5),  # over the end of the text, which begins anew
        ("abc", ("abcabcabcabcabcabcabcabcabcabcabc",), 33),
    ],
)
def test_texts_to_stop_at_across_tokens(model, text, stop, length):
    engine = texts_engine(model, text)
    (out,) = engine.generate([[1]], greedy(60, stop=stop))
    assert out.finish == "stop"
    assert bytes(out.token_ids) == (text * 30).encode()[:length]
    assert drained(engine)


def test_texts_of_the_prompt_do_not_stop(model):
    engine = texts_engine(model, "zbcd")
    engine.runner.model = Scripted(model, lambda ids, length: ids[-1] + 1)
    (out,) = engine.generate(["ab"], greedy(6, stop=("bc", "de")))
    assert (bytes(out.token_ids), out.finish) == (b"cde", "stop")
    assert drained(engine)


def test_a_stop_text_survives_preemption(model):
    engine = texts_engine(model, "one two three")
    engine.add(Request([1], greedy(60, stop=("e t", "three")), "r"))
    for _ in range(4):
        engine.step()
    engine.scheduler.preempt_all(donate=False)
    tokens, ends = run_all(engine)
    assert ends == {"r": "stop"}
    assert bytes(tokens["r"]) == b"t"
    assert drained(engine)


def test_only_the_last_tokens_are_looked_at_for_stop_texts(model):
    engine = texts_engine(model, "abc")
    decoded = []
    whole = engine.tokenizer

    class Counting:
        def decode(self, ids):
            decoded.append(len(ids))
            return whole.decode(ids)

    engine.tokenizer = Counting()
    (out,) = engine.generate([[1]], greedy(100, stop=("never", "ü")))
    assert out.finish == "length"
    assert max(decoded) <= 12
    assert drained(engine)


class Flat:
    """In place of a runner's model: the same scores at every place."""

    def __init__(self, model, scores):
        self.config, self.mesh, self.device, self.dtype = model.config, model.mesh, model.device, model.dtype
        self.row = torch.zeros(model.config.text.vocab_size)
        for token, value in scores.items():
            self.row[token] = value

    def __call__(self, batch, cache, logits="last"):
        return self.row.expand(len(batch.new_tokens), -1).clone()


@pytest.mark.parametrize("moment", [None, 2, 5])
def test_penalties_look_at_what_was_generated_and_at_the_prompt(model, moment):
    """Against a count by hand; also with a preemption on the way."""
    scores = {9: 8.0, 8: 7.5, 7: 7.0, 6: 6.0}
    frequency, presence, repetition = 0.4, 0.3, 1.1
    prompt = [9, 9, 1]
    counts, want = dict.fromkeys(scores, 0), []
    for _ in range(14):
        adjusted = {
            token: (value / repetition if token in prompt or counts[token] else value)
            - frequency * counts[token] - presence * (counts[token] > 0)
            for token, value in scores.items()
        }  # fmt: skip
        want.append(max(adjusted, key=lambda token: (adjusted[token], -token)))
        counts[want[-1]] += 1
    assert len(set(want)) == 4
    engine = make_engine(model)
    engine.runner.model = Flat(model, scores)
    params = greedy(14, frequency_penalty=frequency, presence_penalty=presence, repetition_penalty=repetition)
    engine.add(Request(prompt, params, "r"))
    got = []
    for step in range(60):
        if step == moment:
            engine.scheduler.preempt_all(donate=False)
        got += [token for out in engine.step() for token in out.token_ids] if engine.has_work else []
    assert got == want
    assert drained(engine)


def test_parts_of_prompts_may_stand_anywhere_in_a_step(model):
    work = prompts(5, 9, 30)
    engine = make_engine(model, chunked_prefill_size=20)
    planned = engine.scheduler.next

    def backwards():
        plan = planned()
        if plan is not None:
            plan.work.reverse()
        return plan

    engine.scheduler.next = backwards
    params = greedy(4, logprobs=True, top_logprobs=1)
    for ids, out in zip(work, engine.generate(work, params), strict=True):
        assert out.token_ids == alone(model, ids, params).token_ids
        check_logprobs(model, ids, out, 1)
    assert drained(engine)


@pytest.mark.parametrize("stop", [(), (5,)])
def test_eos_and_stop_ids_count_as_generated(model, stop):
    engine = make_engine(model)
    engine.runner.model = Scripted(model, lambda ids, length: 5 if length == 4 else 8)
    (out,) = engine.generate([[1, 2]], greedy(6, stop_token_ids=stop))
    assert out.token_ids == ([8, 8, 5] if stop else [8, 8, 5, 8, 8, 8])
    assert engine.stats()["generated_tokens"] == len(out.token_ids)
    assert drained(engine)


def test_a_tokenizer_that_fails_ends_only_its_request(model):
    class Broken:
        def decode(self, ids):
            raise KeyError(ids[-1])

    engine = make_engine(model, tokenizer=Broken())
    work = prompts(4, 5, 6)
    outputs = engine.generate(work, [greedy(4), greedy(4, stop=("x",)), greedy(4)])
    assert [out.finish for out in outputs] == ["length", "error", "length"]
    assert outputs[1].token_ids == []
    for i in (0, 2):
        assert outputs[i].token_ids == alone(model, work[i], greedy(4)).token_ids
    with pytest.raises(K3Error, match="ended with an error"):
        list(engine.stream(work[1], greedy(4, stop=("x",))))
    assert drained(engine)


# ---- reuse is visible ---------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [4, 7, 16])
@pytest.mark.parametrize("grid", [5, 16, 24])
def test_reuse_is_told_by_outputs_and_counters(model, page_size, grid):
    """Page size and grid are independent, and the measured boundary is what they say."""
    (ids,) = prompts(5 * grid)
    engine = make_engine(model, page_size=page_size, grid=grid, pages=200 // page_size * 4)
    cold, warm = (engine.generate([ids], greedy(3))[0] for _ in range(2))
    assert ids_of([cold, warm]) == [alone(model, ids, greedy(3)).token_ids] * 2
    assert (cold.cached_tokens, cold.kv_tokens) == (0, 0)
    assert (warm.cached_tokens, warm.kv_tokens) == (4 * grid, 5 * grid - 1)
    stats = engine.stats()
    assert (stats["cached_state_tokens"], stats["cached_kv_tokens"]) == (4 * grid, 5 * grid - 1)
    assert stats["prompt_tokens"] == 10 * grid
    assert stats["limits"]["page_size"]["value"] == stats["cache"]["page_size"] == page_size
    assert stats["limits"]["checkpoint_grid"]["value"] == stats["cache"]["checkpoint_grid"] == grid
    assert drained(engine)


def test_counters_balance(model):
    engine = make_engine(model, slots=3, chunked_prefill_size=8)
    engine.generate(prompts(5, 9, 20), greedy(4))
    engine.add(Request([1, 2, 3], greedy(50), "a"))
    engine.step()
    engine.abort("a")
    engine.add(Request([1, 2, 3], greedy(0), "b"))
    run_all(engine)
    stats = engine.stats()
    assert (stats["finished"], stats["aborted"], stats["failed"]) == (4, 1, 0)
    assert stats["generated_tokens"] == 12 + 1
    assert stats["prompt_tokens"] == 34 + 3
    assert stats["steps"] == stats["prefill_steps"] + stats["decode_steps"]
    assert stats["preempted"] == 0
    assert drained(engine)


def test_the_caller_may_go_on_writing_to_the_prompt(model):
    ids = [1, 2, 3]
    engine = make_engine(model)
    engine.add(Request(ids, greedy(4), "r"))
    ids += [4, 5, 6, 7, 8, 9]
    tokens, _ = run_all(engine)
    assert tokens["r"] == alone(model, [1, 2, 3], greedy(4)).token_ids
    assert drained(engine)
