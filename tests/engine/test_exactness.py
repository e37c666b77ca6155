"""Whatever happens around a request, its tokens are those of an undisturbed run by itself without a prefix cache."""

import random

import pytest
import torch
from engines import alone, drained, greedy, ids_of, make_engine, one_thread, prompts, small_model

from k3lib.engine import Request, SamplingParams

GRID = 16  # B of the cases: tokens between checkpoints


@pytest.fixture(scope="module", autouse=True)
def threads():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model():
    return small_model()


def assert_alone(model, requests, outputs):
    """Outputs by request id against solo runs."""
    for request in requests:
        assert outputs[request.request_id] == alone(model, request.prompt_ids, request.params).token_ids


def close_to(want, got, limit=1e-4):
    assert [entry.token_id for entry in want] == [entry.token_id for entry in got]
    for a, b in zip(want, got, strict=True):
        assert abs(a.logprob - b.logprob) <= limit
        assert [i for i, _ in a.top] == [i for i, _ in b.top]
        assert all(abs(x - y) <= limit for (_, x), (_, y) in zip(a.top, b.top, strict=True))


# ---- prefix reuse -------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 5, 16, 24])
def test_cold_warm_and_with_another_ending(model, page_size):
    """Boundaries lie at a page's end or inside one; both the shared part and the whole prompt hit."""
    (prompt, ending) = prompts(2 * GRID + 7, 5)
    other = prompt[: 2 * GRID] + ending
    engine = make_engine(model, page_size=page_size)
    params = greedy(6, logprobs=True, top_logprobs=2)
    for ids, reused in ((prompt, 0), (prompt, 2 * GRID), (other, 2 * GRID), (other, 2 * GRID), (prompt, 2 * GRID)):
        (out,) = engine.generate([ids], params)
        want = alone(model, ids, params)
        assert out.token_ids == want.token_ids
        assert out.cached_tokens == reused
        assert out.kv_tokens >= reused
        close_to(want.logprobs, out.logprobs)
    assert drained(engine)


@pytest.mark.parametrize("length", [GRID - 1, GRID, GRID + 1, 2 * GRID, 2 * GRID + 1, 3 * GRID - 1])
@pytest.mark.parametrize("chunk", [5, 512])
def test_reuse_is_the_largest_boundary_that_leaves_a_token(model, length, chunk):
    (prompt,) = prompts(length)
    engine = make_engine(model, chunked_prefill_size=chunk)
    outputs = [engine.generate([prompt], greedy(3))[0] for _ in range(2)]
    assert ids_of(outputs) == [alone(model, prompt, greedy(3)).token_ids] * 2
    assert [out.cached_tokens for out in outputs] == [0, (length - 1) // GRID * GRID]
    assert drained(engine)


def test_a_branch_point_is_found_by_the_third_prompt_that_shares_it(model):
    """The second leaves what is cached half-way and saves there."""
    system, *questions = prompts(3 * GRID + 2, 2 * GRID, 2 * GRID + 1, 2 * GRID + 2)
    engine = make_engine(model, pools={"keep_turn_ends": False})
    reused = []
    for question in questions:
        (out,) = engine.generate([system + question], greedy(4))
        assert out.token_ids == alone(model, system + question, greedy(4)).token_ids
        reused.append(out.cached_tokens)
    assert reused == [0, 0, 3 * GRID]
    assert drained(engine)


@pytest.mark.parametrize("keep_turn_ends", [True, False])
@pytest.mark.parametrize("chunk", [6, 512])
def test_conversations(model, keep_turn_ends, chunk):
    """Turn n + 1 contains the output of turn n. Two of them at once, and all of it twice."""
    engine = make_engine(model, chunked_prefill_size=chunk, pools={"keep_turn_ends": keep_turn_ends})
    for replay in range(2):
        histories = prompts(11, 23, seed=7)
        for turn in range(4):
            outputs = engine.generate(histories, greedy(9))
            for history, out in zip(histories, outputs, strict=True):
                assert out.token_ids == alone(model, history, greedy(9)).token_ids
                if turn and keep_turn_ends:  # everything but the last token and the new question
                    assert out.cached_tokens >= len(history) - 6
                elif turn or replay:
                    assert out.cached_tokens >= (len(history) - 15) // GRID * GRID
            questions = prompts(5, 5, seed=turn)
            histories = [
                history + out.token_ids + question
                for history, out, question in zip(histories, outputs, questions, strict=True)
            ]
    assert drained(engine)


def test_namespaces_share_nothing(model):
    (prompt,) = prompts(40)
    engine = make_engine(model)
    cached = []
    for name, namespace in (("a", "x"), ("b", "y"), ("c", "x"), ("d", "")):
        engine.add(Request(prompt, greedy(3), name, namespace=namespace))
        while engine.has_work:
            cached += [out.cached_tokens for out in engine.step() if out.finish is not None]
    assert cached == [0, 0, 32, 0]
    assert drained(engine)


# ---- company ------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [7, 512, *(pytest.param(n, marks=pytest.mark.again) for n in (1, 64))])
@pytest.mark.parametrize("mix_decode", [False, True], ids=["turns", "mixed"])
def test_any_order_any_batch_any_chunks(model, chunk, mix_decode):
    lengths = [1, 5, 16, 33] if chunk == 1 else [1, 5, 16, 33, 70, 2, 90]
    rng = random.Random(chunk)
    params = [
        greedy(9),
        SamplingParams(max_new_tokens=9, seed=4, ignore_eos=True),
        SamplingParams(max_new_tokens=7, seed=5, temperature=0.7, top_p=0.9, top_k=40, ignore_eos=True),
        greedy(8, repetition_penalty=1.5, frequency_penalty=0.3, presence_penalty=-0.2),
    ]
    work = [Request(ids, params[i % 4]) for i, ids in enumerate(prompts(*lengths))]
    engine = make_engine(model, pages=200, slots=20, chunked_prefill_size=chunk, mix_decode=mix_decode)
    for turn in range(2):  # with a prefix cache that is warm in the second turn
        rng.shuffle(work)
        batch = [Request(r.prompt_ids, r.params, f"{turn}-{i}") for i, r in enumerate(work)]
        late = batch[4:]
        for request in batch[:4]:
            engine.add(request)
        tokens = {}
        while engine.has_work:
            for out in engine.step():
                tokens.setdefault(out.request_id, []).extend(out.token_ids)
            if late and rng.random() < 0.4:
                engine.add(late.pop())
        assert_alone(model, batch, tokens)
    assert drained(engine)


def test_neighbours_may_vanish_at_any_step(model):
    work = [Request(ids, greedy(7)) for ids in prompts(20, 9, 33, 12)]
    for moment in (0, 1, 2, 3, 5, 8):
        engine = make_engine(model, chunked_prefill_size=8, pages=60)
        batch = [Request(r.prompt_ids, r.params, f"r{i}") for i, r in enumerate(work)]
        for request in batch:
            engine.add(request)
        tokens = {}
        for step in range(200):
            if step == moment:
                assert engine.abort("r1") or tokens.get("r1")
                engine.abort("r3")
            if not engine.has_work:
                break
            for out in engine.step():
                tokens.setdefault(out.request_id, []).extend(out.token_ids)
        assert_alone(model, [batch[0], batch[2]], tokens)
        assert drained(engine)


# ---- preemption ---------------------------------------------------------------------------------


def follow(engine, requests):
    """Run requests to the end; their tokens, and how many tokens each had generated when it was preempted."""
    tokens = {r.request_id: [] for r in requests}
    losses = {r.request_id: [] for r in requests}
    for request in requests:
        engine.add(request)
    states = dict(engine._states)
    while engine.has_work:
        before = {name: state.preemptions for name, state in states.items()}
        generated = {name: state.num_generated for name, state in states.items()}
        for out in engine.step():
            tokens[out.request_id] += out.token_ids
        engine.cache.check()
        engine.scheduler.check()
        for name, state in states.items():
            if state.preemptions > before[name]:
                losses[name].append(generated[name])
    return tokens, losses


@pytest.mark.parametrize("reuse", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("k", [1, 5, GRID, GRID + 1])
def test_preempted_after_k_tokens(model, k, reuse):
    """The pool holds both requests until the second has k tokens."""
    first, second = prompts(18, 18)
    pages = 2 * (18 + k - 1)
    engine = make_engine(
        model, page_size=1, pages=pages, context_length=pages, schedule_conservativeness=0,
        disable_radix_cache=not reuse,
    )  # fmt: skip
    new = min(GRID + 6, pages - 18)
    batch = [Request(first, greedy(new), "first"), Request(second, greedy(new), "second")]
    tokens, losses = follow(engine, batch)
    assert losses["first"] == []
    assert losses["second"][:1] == [k]
    assert_alone(model, batch, tokens)
    assert drained(engine)


@pytest.mark.parametrize("mix_decode", [False, True], ids=["turns", "mixed"])
@pytest.mark.parametrize("reuse", [True, False], ids=["cache", "no-cache"])
def test_preempted_again_and_again(model, reuse, mix_decode):
    engine = make_engine(
        model, pages=20, chunked_prefill_size=9, schedule_conservativeness=0, disable_radix_cache=not reuse,
        mix_decode=mix_decode,
    )  # fmt: skip
    kinds = [
        {},
        {"temperature": 1.0, "seed": 1},
        {"repetition_penalty": 1.7, "frequency_penalty": 0.4, "presence_penalty": 0.3, "min_tokens": 10},
    ]
    batch = [
        Request(ids, greedy(new, **kinds[i % 3]), f"r{i}")
        for i, (ids, new) in enumerate(
            zip(prompts(12, 3, 12, 3, 12, 3, 12, 3), (10, 40, 12, 35, 14, 30, 16, 25), strict=True)
        )
    ]
    tokens, losses = follow(engine, batch)
    assert max(len(x) for x in losses.values()) >= 2
    assert sum(len(x) for x in losses.values()) == engine.stats()["preempted"]
    assert_alone(model, batch, tokens)
    assert drained(engine)


def test_preempted_in_the_middle_of_a_prompt(model):
    """Also with log-probabilities of the prompt and routes, which are collected over all of it."""
    engine = make_engine(model, pages=20, chunked_prefill_size=8, max_running_requests=3)
    (prompt,) = prompts(50)
    params = greedy(5, prompt_logprobs=True, logprobs=True, top_logprobs=2)
    want = alone(model, prompt, params)
    for moment in (1, 2, 3, 6, 8):
        engine.add(Request(prompt, params, f"r{moment}", record_routes=moment % 2 == 0))
        outs = []
        for step in range(100):
            if not engine.has_work:
                break
            if step == moment or step == moment + 1:
                engine.scheduler.preempt_all(donate=step % 2 == 0)
            outs += engine.step()
        assert [token for out in outs for token in out.token_ids] == want.token_ids
        assert outs[-1].preemptions >= 1
        close_to(want.prompt_logprobs[1:], outs[0].prompt_logprobs[1:])
        close_to(want.logprobs, [entry for out in outs for entry in out.logprobs])
        if moment % 2 == 0:
            assert outs[-1].routes.shape[0] == len(prompt) + len(want.token_ids) - 1
    assert drained(engine)


# ---- everything at once -------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.again)])
def test_stress_with_slots_for_four(model, seed):
    """28 requests over 8 prompts, random arrivals and aborts: what completes has the tokens of its solo run."""
    rng = random.Random(seed)
    shared = prompts(40, seed=3)[0]
    texts = [shared[: rng.randrange(8, 40)] + tail for tail in prompts(3, 9, 14, 20, 27, 33, 5, 1, seed=seed)]
    kinds = [greedy(12), SamplingParams(max_new_tokens=9, seed=8, ignore_eos=True)]
    engine = make_engine(
        model, slots=4, pages=rng.choice([40, 60]), page_size=4, chunked_prefill_size=rng.choice([8, 20, 64]),
        schedule_conservativeness=rng.choice([0, 1]), mix_decode=rng.random() < 0.5,
    )  # fmt: skip
    todo = [
        Request(texts[i % 8], kinds[i % 2], f"r{i}", priority=rng.choice([0, 0, 1])) for i in rng.sample(range(28), 28)
    ]
    batch, tokens, ends = list(todo), {}, {}
    aborted = set()
    for _ in range(3000):
        if not (todo or engine.has_work):
            break
        while todo and rng.random() < 0.3:
            engine.add(todo.pop())
        if engine._states and rng.random() < 0.05:
            name = rng.choice(sorted(engine._states))
            assert engine.abort(name)
            aborted.add(name)
        for out in engine.step():
            assert out.request_id not in aborted
            tokens.setdefault(out.request_id, []).extend(out.token_ids)
            if out.finish is not None:
                ends[out.request_id] = out.finish
        engine.cache.check()
        engine.scheduler.check()
    assert set(ends) | aborted == {r.request_id for r in batch}
    assert set(ends.values()) == {"length"}
    assert len(ends) > 14
    assert_alone(model, [r for r in batch if r.request_id in ends], tokens)
    assert engine.stats()["finished"] == len(ends)
    assert engine.stats()["aborted"] == len(aborted)
    assert drained(engine)


# ---- to the bit ---------------------------------------------------------------------------------

EXACT = {"deterministic": True, "chunked_prefill_size": 8}


def bits(out):
    """All numbers of an output as one tensor."""
    entries = [*out.prompt_logprobs[1:], *out.logprobs]
    return torch.tensor([[e.logprob, *(x for _, x in e.top), e.token_id, *(i for i, _ in e.top)] for e in entries])


def exact_params(i, new=9):
    kinds = [{}, {"temperature": 0.8, "seed": 3}, {"repetition_penalty": 1.4}]
    return greedy(new, logprobs=True, prompt_logprobs=True, top_logprobs=3, **kinds[i % 3])


def assert_same_bits(want, got):
    assert want.token_ids == got.token_ids
    assert torch.equal(bits(want), bits(got))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.again)])
def test_deterministic_bits_in_any_company_and_order(model, seed):
    work = prompts(1, 7, 8, 9, 24, 33, 40, 17)
    rng = random.Random(seed)
    order = rng.sample(range(8), 8)
    engine = make_engine(model, max_running_requests=rng.choice([3, 8]), **EXACT)
    outputs = engine.generate([work[i] for i in order], [exact_params(i) for i in order])
    for i, out in zip(order, outputs, strict=True):
        assert_same_bits(alone(model, work[i], exact_params(i), **EXACT), out)
    assert drained(engine)


@pytest.mark.parametrize("chunk", [8, 2048], ids=["chunks", "default"])
def test_deterministic_bits_from_a_warm_cache(model, chunk):
    """Prompt log-probabilities need the whole prompt, so they are left out here."""
    shared, *tails = prompts(37, 3, 9, 20)
    engine = make_engine(model, deterministic=True, chunked_prefill_size=chunk)
    exact = {**EXACT, "chunked_prefill_size": min(chunk, GRID)}
    params = greedy(9, logprobs=True, top_logprobs=3)
    for replay in range(2):
        for tail in tails:
            (out,) = engine.generate([shared + tail], params)
            want = alone(model, shared + tail, params, **exact)
            assert out.token_ids == want.token_ids
            assert out.logprobs == want.logprobs
            assert out.cached_tokens % GRID == 0
            assert out.cached_tokens == (len(shared + tail) - 1) // GRID * GRID or not replay
    assert drained(engine)


@pytest.mark.parametrize("reuse", [True, False], ids=["cache", "no-cache"])
def test_deterministic_bits_after_preemptions(model, reuse):
    work = prompts(12, 3, 22, 3, 12, 17)
    engine = make_engine(model, pages=16, schedule_conservativeness=0, disable_radix_cache=not reuse, **EXACT)
    news = (10, 40, 12, 35, 14, 30)
    outputs = engine.generate(work, [exact_params(i, new) for i, new in enumerate(news)])
    assert sum(out.preemptions for out in outputs) >= 3
    for i, (ids, out) in enumerate(zip(work, outputs, strict=True)):
        assert_same_bits(alone(model, ids, exact_params(i, news[i]), **EXACT), out)
    assert drained(engine)
