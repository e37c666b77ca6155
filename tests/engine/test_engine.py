"""The engine: greedy ids, admission, ends of requests, memory that always comes back."""

import asyncio
import random

import pytest
import torch
from engines import drained, greedy, ids_of, one_thread, run_all
from engines import prompts as random_prompts
from safetensors import safe_open

from k3lib import KimiK3ForCausalLM
from k3lib.cache import CacheConfig
from k3lib.engine import AsyncEngine, Engine, EngineConfig, Request, SamplingParams
from k3lib.errors import ConfigError, RequestError

pytestmark = pytest.mark.filterwarnings("ignore:.*padding behind the heads")

EOS = 251


def load(folder):
    return KimiK3ForCausalLM.from_pretrained(folder, dtype=torch.float32, progress=False)


@pytest.fixture(scope="module", autouse=True)
def threads():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model(golden):
    return load(golden / "tiny_k3_wide")


def make(model, *, slots=4, pages=40, page_size=8, **limits):
    return Engine(
        model, EngineConfig(cache=CacheConfig(num_pages=pages, num_slots=slots, page_size=page_size), **limits)
    )


def prompts(*lengths, seed=0):
    return random_prompts(*lengths, seed=seed, below=200)


# ---- the golden ids -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def expected(golden):
    cases = {}
    for part in ("", "_long"):
        with safe_open(golden / f"tiny_k3_dev_expected{part}.safetensors", "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                if name.endswith(".greedy_ids"):
                    p = name.split(".")[1]
                    cases[p] = (file.get_tensor(f"{p}.ids").tolist(), file.get_tensor(name).tolist())
    assert len(cases) == 5
    return [cases[p] for p in sorted(cases)]


@pytest.fixture(scope="module")
def dev(golden):
    return load(golden / "tiny_k3_dev")


@pytest.mark.parametrize("chunk", [*(pytest.param(n, marks=pytest.mark.again) for n in (1, 7)), 50, 2048])
def test_golden_greedy_ids_in_a_mixed_batch(dev, expected, chunk):
    expected = [case for case in expected if len(case[0]) <= 40 * chunk]  # 300 tokens in small pieces take long
    engine = make(dev, slots=3, pages=40, page_size=16, chunked_prefill_size=chunk)
    outputs = engine.generate([ids for ids, _ in expected], greedy(16))
    assert ids_of(outputs) == [want for _, want in expected]
    assert {out.finish for out in outputs} == {"length"}
    assert [out.prompt_ids for out in outputs] == [ids for ids, _ in expected]
    assert drained(engine)


@pytest.mark.parametrize(
    "params", [greedy(8), SamplingParams(max_new_tokens=8, seed=5, top_p=0.9)], ids=["greedy", "seed"]
)
def test_alone_and_in_a_batch_are_the_same(model, params):
    work = prompts(3, 17, 1, 9)
    together = make(model).generate(work, params)
    for ids, out in zip(work, together, strict=True):
        (alone,) = make(model).generate([ids], params)
        assert alone.token_ids == out.token_ids


def test_each_prompt_may_have_its_own_parameters(model):
    work = prompts(4, 4)
    outputs = make(model).generate(work, [greedy(2), greedy(5)])
    assert [len(out.token_ids) for out in outputs] == [2, 5]
    with pytest.raises(ConfigError, match="1 params for 2 prompts"):
        make(model).generate(work, [greedy()])
    assert make(model).generate([]) == []


# ---- admission ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("slots", "pages"), [(2, 40), (4, 4), (1, 3), (3, 5)])
def test_more_requests_than_memory_all_finish_in_their_order(model, slots, pages):
    work = prompts(9, 2, 14, 1, 5, 3, 11)
    want = ids_of(make(model, slots=8).generate(work, greedy(4)))
    engine = make(model, slots=slots, pages=pages)
    names = [engine.add(Request(ids, greedy(4))) for ids in work]
    admitted = []
    tokens = {name: [] for name in names}
    while engine.has_work:
        for out in engine.step():
            tokens[out.request_id] += out.token_ids
            if out.request_id not in admitted:
                admitted.append(out.request_id)
        engine.cache.check()
        assert len(engine.cache.dump()["leases"]) <= slots
    assert admitted == names
    assert list(tokens.values()) == want
    assert drained(engine)


def test_a_request_that_does_not_fit_yet_stays_first(model):
    """Nobody overtakes: a small request behind a large one waits with it, and nothing is taken for either."""
    engine = make(model, slots=4, pages=6)
    engine.add(Request(prompts(20)[0], greedy(4), "first"))  # 3 pages
    engine.add(Request(prompts(28, seed=1)[0], greedy(4), "large"))  # 4 pages
    engine.add(Request(prompts(2, seed=2)[0], greedy(4), "small"))
    for _ in range(3):
        engine.step()
        stats = engine.stats()
        assert {name: stats[name] for name in ("running", "waiting", "finished", "free_pages", "free_slots")} == {
            "running": 1, "waiting": 2, "finished": 0, "free_pages": 3, "free_slots": 3,
        }  # fmt: skip
    _, ends = run_all(engine)
    assert list(ends) == ["first", "large", "small"]
    assert drained(engine)


def test_fewer_running_requests_than_slots(model):
    engine = make(model, slots=4, max_running_requests=2)
    for ids in prompts(3, 3, 3):
        engine.add(Request(ids, greedy(3)))
    engine.step()
    assert (engine.stats()["running"], engine.stats()["waiting"]) == (2, 1)
    run_all(engine)
    assert drained(engine)


# ---- ends ---------------------------------------------------------------------------------------


def test_stop_ids_end_a_request_and_are_delivered(model):
    (ids,) = prompts(6)
    (free,) = make(model).generate([ids], greedy(8))
    stop = free.token_ids[3]
    first = free.token_ids.index(stop)
    engine = make(model)
    (out,) = engine.generate([ids], greedy(8, stop_token_ids=[stop]))
    assert (out.token_ids, out.finish) == (free.token_ids[: first + 1], "stop")
    assert drained(engine)


def test_eos_ends_a_request_unless_ignored(model):
    assert model.config.eos_token_id == EOS
    engine = make(model)
    bias = torch.zeros(256)
    bias[EOS] = 1e4
    hook = model.lm_head.register_forward_hook(lambda _module, _args, out: out + bias)
    try:
        stopped, ignored = engine.generate(prompts(3, 4), [SamplingParams(temperature=0, max_new_tokens=3), greedy(3)])
    finally:
        hook.remove()
    assert (stopped.token_ids, stopped.finish) == ([EOS], "stop")
    assert (ignored.token_ids, ignored.finish) == ([EOS] * 3, "length")
    assert drained(engine)


def test_no_and_one_new_token(model):
    engine = make(model)
    work = prompts(5, 5, 5)
    none, one, two = engine.generate(work, [greedy(0), greedy(1), greedy(2)])
    assert (none.token_ids, none.finish) == ([], "length")
    assert (len(one.token_ids), one.finish) == (1, "length")
    assert (len(two.token_ids), two.finish) == (2, "length")
    assert drained(engine)


def test_the_last_token_may_fill_context_and_pool(model):
    engine = make(model, slots=1, pages=2, context_length=16)
    (out,) = engine.generate(prompts(10), greedy(6))
    assert len(out.token_ids) == 6
    assert drained(engine)


# ---- abort --------------------------------------------------------------------------------------


def test_abort_at_any_moment_frees_everything(model):
    engine = make(model, slots=1, pages=8, chunked_prefill_size=4)
    (ids,) = prompts(10)
    engine.add(Request(ids, greedy(4), "running"))
    engine.add(Request(ids, greedy(4), "queued"))
    assert engine.abort("queued")
    engine.step()
    assert engine.cache.dump()["leases"] != {}
    assert engine.abort("running")  # in the middle of its prefill
    assert drained(engine)
    engine.add(Request(ids, greedy(4), "running"))
    while not any(out.token_ids for out in engine.step()):
        pass
    assert engine.abort("running")  # in the middle of its output
    assert not engine.abort("running")
    assert not engine.abort("never")
    assert drained(engine)


def test_a_thousand_aborts_leave_no_drift(model, monkeypatch):
    """Requests come, wait, run and are dropped in a random order; the model is replaced to save time."""
    engine = make(model, slots=3, pages=9, chunked_prefill_size=5)
    logits = torch.zeros(8, 256)

    def forward(batch, cache, logits="all", scores=logits):
        return scores[: len(batch.new_tokens)]

    monkeypatch.setattr(engine.runner, "model", _Stub(model, forward))
    rng = random.Random(0)
    alive, count = [], 0
    while count < 1000:
        if len(alive) < 8 and rng.random() < 0.6:
            alive.append(engine.add(Request([1] * rng.randint(1, 20), greedy(rng.randint(0, 8)))))
        if rng.random() < 0.7:
            gone = {out.request_id for out in engine.step() if out.finish is not None}
            alive = [name for name in alive if name not in gone]
        if alive and rng.random() < 0.6:
            count += 1
            assert engine.abort(alive.pop(rng.randrange(len(alive))))
        engine.cache.check()
    for name in alive:
        assert engine.abort(name)
    assert drained(engine)


class _Stub:
    """The model's facts with another forward."""

    def __init__(self, model, forward):
        self.config, self.mesh, self.device, self.dtype = model.config, model.mesh, model.device, model.dtype
        self.use_backends = model.use_backends
        self.forward = forward

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)


# ---- streams ------------------------------------------------------------------------------------


def test_stream_yields_what_generate_returns(model):
    engine = make(model)
    (ids,) = prompts(6)
    (want,) = engine.generate([ids], greedy(7))
    assert list(engine.stream(ids, greedy(7))) == want.token_ids
    assert list(engine.stream(ids, temperature=0, max_new_tokens=7, ignore_eos=True)) == want.token_ids
    assert drained(engine)
    with pytest.raises(ConfigError, match=r"not both \(top_k\)"):
        engine.stream(ids, greedy(), top_k=3)


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_stream_closed_early_frees_everything(model, taken):
    engine = make(model)
    stream = engine.stream(prompts(6)[0], greedy(7))
    for _ in range(taken):
        next(stream)
    stream.close()
    assert drained(engine)


def test_streams_may_be_interleaved(model):
    engine = make(model)
    work = prompts(6, 3)
    want = ids_of(engine.generate(work, greedy(5)))
    streams = [engine.stream(ids, greedy(5)) for ids in work]
    got = [[next(streams[0])], [next(streams[1])]]
    (inside,) = engine.generate([work[1]], greedy(5))
    assert inside.token_ids == want[1]
    for tokens, stream in zip(got, streams, strict=True):
        tokens.extend(stream)
    assert got == want
    assert drained(engine)


def test_a_stream_ends_when_its_request_is_aborted(model):
    engine = make(model)
    stream = engine.stream(prompts(6)[0], greedy(5))
    first = next(stream)
    for state in list(engine.scheduler.running.values()):
        engine.abort(state.request.request_id)
    assert list(stream) == []
    assert isinstance(first, int)
    assert drained(engine)


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "tokens", "pattern"),
    [
        ([], 4, "the prompt is empty"),
        ([1, 256], 4, r"token id 256 is outside the vocabulary 0\.\.255"),
        ([-1], 4, "token id -1 is outside"),
        ([1] * 30, 3, "30 prompt tokens and max_new_tokens=3 exceed the context of 32 tokens"),
    ],
)
def test_a_request_that_can_never_run_is_refused(model, ids, tokens, pattern):
    engine = make(model, context_length=32)
    good = prompts(3)[0]
    for call in (
        lambda: engine.add(Request(ids, greedy(tokens))),
        lambda: engine.generate([good, ids], greedy(tokens)),
        lambda: engine.stream(ids, greedy(tokens)),
    ):
        with pytest.raises(RequestError, match=pattern) as caught:
            call()
        assert caught.value.param == "prompt"
        assert drained(engine)


def test_a_name_in_use_is_refused(model):
    engine = make(model, slots=1)
    for name in ("a", "b"):
        engine.add(Request([1], greedy(2), name))
    engine.step()
    for name in ("a", "b"):
        with pytest.raises(RequestError, match=f"request id '{name}' is in use"):
            engine.add(Request([1], greedy(2), name))
    run_all(engine)
    engine.add(Request([1], greedy(2), "a"))
    run_all(engine)


def test_text_needs_a_tokenizer(model):
    with pytest.raises(ConfigError, match="tokenizer="):
        make(model).generate(["text"])

    class Bytes:
        def encode(self, text):
            return list(text.encode())

    engine = Engine(model, make(model).config, tokenizer=Bytes())
    assert ids_of(engine.generate(["abc"], greedy(3))) == ids_of(make(model).generate([[97, 98, 99]], greedy(3)))


# ---- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize(
    "params", [greedy(8), SamplingParams(max_new_tokens=8, seed=3, ignore_eos=True)], ids=["greedy", "sampled"]
)
def test_logits_that_are_not_finite_end_only_their_request(model, params, bad):
    work = prompts(5, 7, 3)
    want = make(model).generate(work, params)
    engine = make(model, slots=3, pages=6)
    calls = 0

    def poison(_module, _args, out):
        nonlocal calls
        calls += 1
        if calls == 5:
            out = out.clone()
            out[1] = bad
        return out

    hook = model.lm_head.register_forward_hook(poison)
    try:
        outputs = engine.generate(work, params)
    finally:
        hook.remove()
    assert [out.finish for out in outputs] == ["length", "error", "length"]
    assert outputs[1].token_ids == want[1].token_ids[:4], "no garbage is delivered"
    assert [outputs[0].token_ids, outputs[2].token_ids] == [want[0].token_ids, want[2].token_ids]
    assert drained(engine)


def test_memory_that_held_nan_is_clean_for_its_next_owner(model):
    """The failure is inside the layers, so that pages and state of the request would not be finite either."""
    work = prompts(9, 9)
    want = ids_of(make(model).generate(work, greedy(4)))
    engine = make(model, slots=1, pages=2)
    hook = model.model.embed_tokens.register_forward_hook(lambda _module, _args, out: out * torch.nan)
    try:
        (out,) = engine.generate(prompts(9, seed=4), greedy(4))
    finally:
        hook.remove()
    assert (out.token_ids, out.finish) == ([], "error")
    assert engine.cache.pool.kda.state.isfinite().all()
    assert engine.cache.pool.latent.pages.isfinite().all()
    assert ids_of(engine.generate(work, greedy(4))) == want
    assert drained(engine)


@pytest.mark.parametrize("failing_call", [1, 2, 5])
def test_a_failing_model_frees_all_memory_and_is_heard(model, failing_call):
    engine = make(model, slots=2, chunked_prefill_size=8)
    calls = 0

    def fail(_module, _args):
        nonlocal calls
        calls += 1
        if calls == failing_call:
            raise RuntimeError("the device is gone")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="the device is gone"):
            engine.generate(prompts(10, 10, 10), greedy(5))
    finally:
        hook.remove()
    assert drained(engine)
    assert ids_of(engine.generate(prompts(4), greedy(3))) == ids_of(make(model).generate(prompts(4), greedy(3)))


def test_a_failing_step_keeps_the_requests_that_were_not_in_it(model):
    engine = make(model, slots=2, chunked_prefill_size=8)
    for name, ids in zip("ab", prompts(8, 3), strict=True):
        engine.add(Request(ids, greedy(3), name))
    hook = model.lm_head.register_forward_pre_hook(lambda _module, _args: 1 / 0)
    try:
        with pytest.raises(ZeroDivisionError):
            engine.step()  # the chunk holds all of a and nothing of b
    finally:
        hook.remove()
    engine.cache.check()
    tokens, ends = run_all(engine)
    assert ends == {"a": "error", "b": "length"}
    assert [tokens["b"]] == ids_of(make(model).generate(prompts(8, 3)[1:], greedy(3)))
    assert drained(engine)


def test_from_pretrained(golden):
    engine = Engine.from_pretrained(
        golden / "tiny_k3_wide", EngineConfig(context_length=64), dtype=torch.float32, progress=False
    )
    assert ids_of(engine.generate([[1, 2]], greedy(2))) == ids_of(make(engine.model).generate([[1, 2]], greedy(2)))


# ---- asyncio ------------------------------------------------------------------------------------


@pytest.fixture
def running(model):
    """An asynchronous engine; everything must be free at its end."""
    engine = AsyncEngine(make(model, slots=2, pages=240))
    yield engine
    engine.close()
    assert drained(engine.engine)


async def collect(engine, ids, params):
    tokens, finish = [], None
    async for out in engine.generate(ids, params):
        tokens += out.token_ids
        finish = out.finish
    return tokens, finish


async def until_idle(engine):
    while engine.engine.has_work or not engine._commands.empty():
        await asyncio.sleep(0)


def wait(coroutine, seconds=60):
    return asyncio.run(asyncio.wait_for(coroutine, seconds))


def test_concurrent_requests_equal_the_synchronous_result(model, running):
    work = prompts(3, 12, 1, 7, 5)
    want = ids_of(make(model).generate(work, greedy(5)))

    async def main():
        return await asyncio.gather(*(collect(running, ids, greedy(5)) for ids in work))

    assert wait(main()) == [(tokens, "length") for tokens in want]


def test_one_engine_serves_several_loops(model, running):
    (want,) = ids_of(make(model).generate(prompts(3), greedy(4)))
    for _ in range(2):
        assert wait(collect(running, prompts(3)[0], greedy(4))) == (want, "length")


def test_closing_the_iterator_aborts_its_request(model, running):
    work = prompts(3, 4)
    want = ids_of(make(model).generate(work, greedy(20)))

    async def main():
        stream = running.generate(work[0], greedy(800))
        first = await anext(stream)
        other = asyncio.create_task(collect(running, work[1], greedy(20)))
        await stream.aclose()
        result = await other
        await until_idle(running)
        return first, result

    first, result = wait(main())
    assert first.token_ids == want[0][:1]
    assert result == (want[1], "length")
    assert drained(running.engine)


def test_a_cancelled_task_aborts_its_request(running):
    async def main():
        task = asyncio.create_task(collect(running, [1, 2], greedy(800)))
        while not running.engine.has_work:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_idle(running)

    wait(main())
    assert drained(running.engine)


def test_a_failing_engine_ends_every_request_with_an_error_and_goes_on(model, running):
    work = prompts(3, 4, 5)
    (want,) = ids_of(make(model).generate(work[:1], greedy(3)))

    def fail(_module, _args):
        raise RuntimeError("the device is gone")

    async def main():
        hook = model.lm_head.register_forward_pre_hook(fail)
        try:
            failed = await asyncio.gather(*(collect(running, ids, greedy(3)) for ids in work))
            await until_idle(running)
        finally:
            hook.remove()
        return failed, await collect(running, work[0], greedy(3))

    failed, later = wait(main())
    assert failed == [([], "error")] * 3
    assert later == (want, "length")


def test_refusals_come_before_anything_is_queued(running):
    with pytest.raises(RequestError, match="the prompt is empty"):
        wait(collect(running, [], greedy(3)))

    async def with_image():
        async for _ in running.generate([1], greedy(3), media=(object(),)):
            pass

    with pytest.raises(RequestError, match="does not take images"):
        wait(with_image())
    assert drained(running.engine)


def test_close_ends_running_requests_with_abort(model):
    engine = AsyncEngine(make(model, pages=240))

    async def main():
        stream = engine.generate([1, 2, 3], greedy(800))
        await anext(stream)
        waiting = asyncio.create_task(collect(engine, [1, 2], greedy(800)))
        await asyncio.sleep(0)
        await asyncio.to_thread(engine.close)
        rest = [out async for out in stream]
        return rest[-1].finish, await waiting

    finish, (_, other) = wait(main())
    assert (finish, other) == ("abort", "abort")
    assert drained(engine.engine)
    engine.close()
    with pytest.raises(ConfigError, match="closed"):
        wait(collect(engine, [1], greedy(1)))
