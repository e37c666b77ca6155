"""The engine in its thread: refusals, calls between steps, ends of tasks, loops and of the engine itself."""

import asyncio
import contextlib
import random
import threading
import time

import pytest
from engines import alone, drained, greedy, make_engine, one_thread, prompts, small_model

from k3lib.engine import AsyncEngine, SamplingParams
from k3lib.errors import CapacityError, ConfigError


@pytest.fixture(scope="module", autouse=True)
def threads():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.fixture
def start(model):
    """Make asynchronous engines; everything must be free at their end."""
    made = []

    def start(**limits):
        made.append(AsyncEngine(make_engine(model, **limits)))
        return made[-1]

    yield start
    for engine in made:
        engine.close()
        assert drained(engine.engine)
        assert not engine._sinks


def wait(coroutine, seconds=60):
    return asyncio.run(asyncio.wait_for(coroutine, seconds))


async def collect(engine, ids, params, **fields):
    tokens, finish = [], None
    async for out in engine.generate(ids, params, **fields):
        tokens += out.token_ids
        finish = out.finish
    return tokens, finish


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


# ---- refusals -----------------------------------------------------------------------------------


def test_a_full_queue_is_told_to_the_caller_and_to_nobody_else(model, start):
    engine = start(max_running_requests=1, max_queued_requests=1)
    work = prompts(3, 4, 5)

    async def main():
        first = asyncio.create_task(collect(engine, work[0], greedy(60)))
        await until(lambda: engine.engine.scheduler.running)
        second = asyncio.create_task(collect(engine, work[1], greedy(5)))
        await until(lambda: engine.engine.scheduler.num_waiting)
        with pytest.raises(CapacityError, match="max_queued_requests=1"):
            await collect(engine, work[2], greedy(5))
        return await asyncio.gather(first, second)

    first, second = wait(main())
    assert first == (alone(model, work[0], greedy(60)).token_ids, "length")
    assert second == (alone(model, work[1], greedy(5)).token_ids, "length")


def test_fields_of_a_request_arrive(model, start):
    engine = start(max_running_requests=1)
    work = prompts(30, 4, 5)

    async def main():
        order = []

        async def run(name, ids, **fields):
            result = await collect(engine, ids, greedy(4), **fields)
            order.append(name)
            return result

        running = asyncio.create_task(collect(engine, work[0], greedy(40), namespace="a"))
        await until(lambda: engine.engine.scheduler.running)
        low = asyncio.create_task(run("low", work[1]))
        await until(lambda: engine.engine.scheduler.num_waiting == 1)
        high = asyncio.create_task(run("high", work[2], priority=1))
        late = asyncio.create_task(run("late", work[2], timeout=1e-6))
        assert (await late)[1] == "abort"
        await asyncio.gather(running, low, high)
        again = [out async for out in engine.generate(work[0], greedy(1), namespace="b")]
        assert again[-1].cached_tokens == 0
        again = [out async for out in engine.generate(work[0], greedy(1), namespace="a")]
        assert again[-1].cached_tokens > 0
        return order

    assert wait(main()) == ["late", "high", "low"]


# ---- calls --------------------------------------------------------------------------------------


def test_a_call_runs_between_steps_in_the_thread_of_the_engine(model, start):
    engine = start()
    (ids,) = prompts(9)

    async def main():
        task = asyncio.create_task(collect(engine, ids, greedy(40)))
        seen = []
        while not task.done():
            name, running = await engine.call(lambda e: (threading.current_thread().name, e.stats()["running"]))
            engine.engine.cache.check()
            seen.append((name, running))
        return await task, seen

    result, seen = wait(main())
    assert result == (alone(model, ids, greedy(40)).token_ids, "length")
    assert ("k3lib-engine", 1) in seen


@pytest.mark.parametrize(
    "error", [ValueError("no"), ConfigError("no"), SystemExit(3), asyncio.CancelledError()], ids=repr
)
def test_what_a_call_raises_reaches_its_caller_and_stops_nobody(model, start, error):
    engine = start()
    (ids,) = prompts(9)

    def fail(_engine):
        raise error

    async def main():
        task = asyncio.create_task(collect(engine, ids, greedy(20)))
        with pytest.raises(type(error)):
            await engine.call(fail)
        return await task

    assert wait(main()) == (alone(model, ids, greedy(20)).token_ids, "length")
    assert engine._thread.is_alive()


def test_a_call_may_generate_without_taking_tokens_from_others(model, start):
    engine = start()
    work = prompts(9, 12, 5)

    async def main():
        tasks = [asyncio.create_task(collect(engine, ids, greedy(30))) for ids in work[:2]]
        await until(lambda: len(engine.engine.scheduler.running) == 2)
        (out,) = await engine.call(lambda e: e.generate(work[2:], greedy(12)))
        return out, await asyncio.gather(*tasks)

    out, results = wait(main())
    assert out.token_ids == alone(model, work[2], greedy(12)).token_ids
    assert results == [(alone(model, ids, greedy(30)).token_ids, "length") for ids in work[:2]]


def test_the_cache_may_be_flushed_under_running_requests(model, start):
    engine = start(chunked_prefill_size=4)
    work = prompts(20, 33)

    async def main():
        tasks = [asyncio.create_task(collect(engine, ids, greedy(15))) for ids in work]
        while not all(task.done() for task in tasks):
            await engine.call(lambda e: e.clear_cache())
        return await asyncio.gather(*tasks)

    assert wait(main()) == [(alone(model, ids, greedy(15)).token_ids, "length") for ids in work]


def test_a_cancelled_call_is_not_run(start):
    engine = start()
    ran = []

    async def main():
        gate = threading.Event()
        blocking = asyncio.create_task(engine.call(lambda e: gate.wait(30)))
        await asyncio.sleep(0.01)
        late = asyncio.create_task(engine.call(lambda e: ran.append(1)))
        await asyncio.sleep(0.01)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        gate.set()
        await blocking
        await engine.call(lambda e: None)

    wait(main())
    assert ran == []


# ---- ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_tasks_cancelled_at_random_leave_the_others_as_they_are(model, start, seed):
    engine = start(slots=4, pages=40, chunked_prefill_size=8)
    rng = random.Random(seed)
    work = prompts(*(rng.randrange(1, 40) for _ in range(14)), seed=seed)
    params = [greedy(10), SamplingParams(max_new_tokens=10, seed=1, ignore_eos=True)]

    async def main():
        tasks = []
        for i, ids in enumerate(work):
            tasks.append(asyncio.create_task(collect(engine, ids, params[i % 2])))
            await asyncio.sleep(rng.choice([0, 0, 0.01]))
            if rng.random() < 0.4:
                rng.choice(tasks).cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: not engine.engine.has_work and engine._commands.empty())
        return results

    results = wait(main())
    finished = 0
    for i, result in enumerate(results):
        if not isinstance(result, asyncio.CancelledError):
            finished += 1
            assert result == (alone(model, work[i], params[i % 2]).token_ids, "length")
    assert 0 < finished < len(work)


def test_a_loop_that_ends_without_a_word_takes_its_requests_with_it(model, start):
    engine = start()
    loop = asyncio.new_event_loop()
    stream = engine.generate([1, 2, 3], greedy(380))
    loop.run_until_complete(stream.__anext__())
    loop.close()
    (ids,) = prompts(7)
    assert wait(collect(engine, ids, greedy(5))) == (alone(model, ids, greedy(5)).token_ids, "length")
    deadline = time.monotonic() + 30
    while engine.engine.has_work:
        assert time.monotonic() < deadline
        wait(asyncio.sleep(0.01))
    assert engine.engine.stats()["aborted"] == 1
    with contextlib.suppress(StopIteration):
        stream.aclose().send(None)


def test_close_ends_everything_that_waits(start):
    """Requests that run, that wait, and whose command has not been read; no call is left hanging."""
    engine = start(max_running_requests=1)

    async def main():
        gate = threading.Event()
        tasks = [asyncio.create_task(collect(engine, [1, 2], greedy(300))) for _ in range(3)]
        await until(lambda: engine.engine.scheduler.running)
        blocking = asyncio.create_task(engine.call(lambda e: gate.wait(30)))
        await asyncio.sleep(0.01)
        tasks += [asyncio.create_task(collect(engine, [3], greedy(300))) for _ in range(2)]
        calls = [asyncio.create_task(engine.call(lambda e: e.stats()["running"])) for _ in range(2)]
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(asyncio.to_thread(engine.close))
        await asyncio.sleep(0.01)
        gate.set()
        await closing
        assert await blocking
        assert await asyncio.gather(*calls) == [1, 1]
        with pytest.raises(ConfigError, match="closed"):
            await engine.call(lambda e: None)
        with pytest.raises(ConfigError, match="closed"):
            await collect(engine, [1], greedy(1))
        return await asyncio.gather(*tasks)

    assert {finish for _, finish in wait(main())} == {"abort"}
    engine.close()


def test_a_request_that_was_told_of_a_failure_is_not_run_afterwards(model, start):
    """Its command was still on its way when the step failed."""
    engine = start()
    gate, entered = threading.Event(), threading.Event()

    def fail(_module, _args):
        entered.set()
        assert gate.wait(30)
        raise ValueError("the device is gone")

    async def main():
        hook = model.lm_head.register_forward_pre_hook(fail)
        first = asyncio.create_task(collect(engine, [1, 2], greedy(300)))
        await until(entered.is_set)
        second = asyncio.create_task(collect(engine, [3, 4], greedy(300)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        hook.remove()
        gate.set()
        deadline = time.monotonic() + 30
        while not engine._commands.empty():  # without giving the tasks a chance to clean up
            assert time.monotonic() < deadline
        assert await asyncio.gather(first, second) == [([], "error")] * 2
        assert not await engine.call(lambda e: e._states)

    wait(main())


def test_calls_and_requests_that_race_with_close_never_hang(model):
    for attempt in range(20):
        engine = AsyncEngine(make_engine(model))

        async def main(engine=engine, attempt=attempt):
            async def ask():
                with contextlib.suppress(ConfigError):
                    while True:
                        await engine.call(lambda e: e.has_work)

            async def run():
                with contextlib.suppress(ConfigError):
                    while (await collect(engine, [1], greedy(3)))[1] != "abort":
                        pass

            tasks = [asyncio.create_task(ask()), asyncio.create_task(run()), asyncio.create_task(run())]
            await asyncio.sleep(0.002 * (attempt % 5))
            await asyncio.to_thread(engine.close)
            await asyncio.gather(*tasks)

        wait(main(), seconds=20)
        assert drained(engine.engine)
