"""Requests that end before their time leave nothing behind; prefills need no more memory than their chunks."""

import random
import weakref

import pytest
import torch
from engines import Scripted, alone, drained, greedy, make_engine, one_thread, prompts, run_all, small_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from k3lib.engine import Request
from k3lib.errors import CapacityError

GRID = 16


@pytest.fixture(scope="module", autouse=True)
def threads():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model():
    return small_model()


def scripted(model, **limits):
    """An engine whose model costs nothing: the next token is the last plus one, modulo 11."""
    engine = make_engine(model, **limits)
    engine.runner.model = Scripted(model, lambda ids, length: (ids[-1] + 1) % 11)
    return engine


def clocked(engine):
    """Give an engine's scheduler a clock that the test moves."""
    now = [0.0]
    engine.scheduler.clock = lambda: now[0]
    return now


def settled(engine):
    """What runs holds its memory, everything else is free or cached."""
    cache, running = engine.cache, engine.scheduler.running.values()
    cache.check()
    engine.scheduler.check()
    pages = {page for state in running for page in state.lease.pages}
    assert cache.free_slots + cache.cached_slots == cache.config.num_slots - len(running)
    assert cache.free_pages + cache.cached_pages == cache.config.num_pages - len(pages)
    return True


# ---- aborts -------------------------------------------------------------------------------------

QUEUED = ["queued", "queue timeout", "queue limit"]


@pytest.mark.parametrize("stage", [*QUEUED, "matched", "prefilling", "decoding", "preempted", "timeout"])
def test_what_a_request_holds_comes_back_wherever_it_is_dropped(model, stage):
    """Forty requests a stage, with a full running set and a prefix that they match."""
    engine = scripted(
        model,
        slots=6,
        pages=200,
        max_running_requests=2 if stage in QUEUED else 3,
        max_queued_requests=2,
        chunked_prefill_size=8,
        queue_timeout=50.0,
    )
    now = clocked(engine)
    shared = [i % 11 for i in range(3 * GRID + 5)]
    engine.generate([shared], greedy(2))
    for i in range(40):
        for name in ("runs0", "runs1"):
            if name not in engine._states:
                engine.add(Request([int(name[-1]), 2, 3], greedy(200), name))
        while any(not engine._states[name].num_generated for name in ("runs0", "runs1")):
            engine.step()
        name = f"r{i}"
        timeout = 5.0 if stage == "timeout" else None
        engine.add(Request(shared + [i % 7] * 9, greedy(20), name, timeout=timeout))
        assert DROPS[stage](engine, name, now) == "abort"
        assert name not in engine._states
        assert settled(engine)
        now[0] += 1.0
    for name in list(engine._states):
        assert engine.abort(name)
    assert drained(engine)


def aborted(engine, name):
    assert engine.abort(name)
    assert not engine.abort(name)
    assert settled(engine)
    assert all(out.request_id != name for out in engine.step())
    return "abort"


def until(engine, name, condition):
    """Step until the request has come so far."""
    for _ in range(100):
        if condition(engine._states[name]):
            return
        engine.step()
    raise AssertionError(f"{name} did not come so far")


def told(engine, name):
    """The end of a request that one more step tells."""
    (out,) = (out for out in engine.step() if out.request_id == name)
    assert out.token_ids == []
    return out.finish


def drop_matched(engine, name, now):
    engine.scheduler.admit()
    lease = engine._states[name].lease
    assert lease.length == lease.cached_len > 0
    return aborted(engine, name)


def drop_prefilling(engine, name, now):
    until(engine, name, lambda s: s.lease is not None and s.lease.cached_len < s.lease.length < s.num_prompt)
    return aborted(engine, name)


def drop_decoding(engine, name, now):
    until(engine, name, lambda s: s.num_generated > 3)
    return aborted(engine, name)


def drop_preempted(engine, name, now):
    until(engine, name, lambda s: s.num_generated > 1)
    engine.scheduler.preempt_all(donate=len(name) % 2 == 0)
    return aborted(engine, name)


def lose_patience(engine, name, now):
    engine._states[name].arrival = now[0] - 50.0
    return told(engine, name)


def lose_time(engine, name, now):
    until(engine, name, lambda s: s.num_generated > 1)
    engine._states[name].arrival = now[0] - 5.0
    return told(engine, name)


def lose_place(engine, name, now):
    better = [engine.add(Request([1], greedy(3), priority=1)) for _ in range(2)]
    finish = told(engine, name)
    assert all(engine.abort(other) for other in better)
    return finish


DROPS = {
    "queued": lambda engine, name, now: aborted(engine, name),
    "matched": drop_matched,
    "prefilling": drop_prefilling,
    "decoding": drop_decoding,
    "preempted": drop_preempted,
    "queue timeout": lose_patience,
    "queue limit": lose_place,
    "timeout": lose_time,
}


def test_a_thousand_requests_in_every_order_without_drift(model):
    engine = scripted(
        model, slots=4, pages=30, page_size=4, max_queued_requests=5, chunked_prefill_size=8, queue_timeout=40.0
    )
    now = clocked(engine)
    rng = random.Random(0)
    count, ends = 0, {}
    while count < 1000 or engine.has_work:
        now[0] += rng.choice([0.0, 1.0, 3.0])
        if count < 1000 and rng.random() < 0.7:
            ids = [i % 11 for i in range(rng.randrange(1, 60))] + [rng.randrange(11)] * rng.randrange(3)
            request = Request(
                ids, greedy(rng.choice([0, 1, 5, 20])), f"r{count}", priority=rng.choice([0, 0, 1]),
                timeout=rng.choice([None, 20.0]),
            )  # fmt: skip
            try:
                engine.add(request)
            except CapacityError:
                assert request.request_id not in engine._states
                ends[request.request_id] = "refused"
            count += 1
        for out in engine.step() if rng.random() < 0.8 else []:
            if out.finish is not None:
                assert out.request_id not in ends
                ends[out.request_id] = out.finish
        if engine._states and rng.random() < 0.15:
            name = rng.choice(sorted(engine._states))
            assert engine.abort(name)
            ends[name] = "aborted"
        if rng.random() < 0.02:
            engine.scheduler.preempt_all(donate=rng.random() < 0.5)
        if rng.random() < 0.02:
            engine.clear_cache()
        engine.cache.check()
        engine.scheduler.check()
    assert len(ends) == 1000
    assert {"refused", "aborted", "abort", "length"} <= set(ends.values())
    assert drained(engine)


def test_an_abort_between_any_two_steps_of_a_match(model):
    """Copies that were scheduled for it are dropped with it, or have been made; the prefix stays good."""
    (ids,) = prompts(2 * GRID + 6)
    # of the aborted one the last state is kept too: after 36 tokens, and after all 38, which leaves nothing to compute
    for moment, reused in enumerate((2 * GRID, 2 * GRID, 36, 2 * GRID)):
        engine = make_engine(model, page_size=5, chunked_prefill_size=4)
        engine.generate([ids], greedy(1))
        engine.add(Request(ids, greedy(5), "r"))
        if moment:
            engine.scheduler.admit()
        for _ in range(moment - 1):
            engine.step()
        assert engine.abort("r")
        (out,) = engine.generate([ids], greedy(5))
        assert out.cached_tokens == reused
        assert out.token_ids == alone(model, ids, greedy(5)).token_ids
        assert drained(engine)


# ---- timeouts -----------------------------------------------------------------------------------


def test_timeouts_end_requests_wherever_they_are(model):
    engine = scripted(model, slots=1, request_timeout=10.0, queue_timeout=4.0)
    now = clocked(engine)
    engine.add(Request([1], greedy(200), "runs"))
    engine.step()
    engine.add(Request([1], greedy(3), "waits"))
    engine.add(Request([1], greedy(3), "patient", timeout=2.0))
    ends = []
    for second in range(12):
        now[0] = float(second)
        ends += [(second, out.request_id) for out in engine.step() if out.finish == "abort"]
    assert ends == [(2, "patient"), (4, "waits"), (10, "runs")]
    assert engine.stats()["aborted"] == 3
    assert drained(engine)


def test_a_request_may_have_more_time_than_the_engine_gives(model):
    engine = scripted(model, request_timeout=5.0)
    now = clocked(engine)
    engine.add(Request([1], greedy(30), "long", timeout=100.0))
    engine.add(Request([1], greedy(30), "short"))
    now[0] = 50.0
    _, ends = run_all(engine)
    assert ends == {"short": "abort", "long": "length"}
    assert drained(engine)


# ---- admission ----------------------------------------------------------------------------------


def test_admission_takes_everything_or_nothing(model):
    """Pages for the second request are missing; slots are free."""
    engine = scripted(model, slots=4, pages=10, schedule_conservativeness=2.0)
    engine.add(Request([1] * 20, greedy(6), "first"))
    engine.step()
    engine.add(Request([2] * 30, greedy(6), "second"))
    engine.add(Request([3], greedy(1), "third"))
    slots, leases = engine.cache.free_slots, len(engine.cache.dump()["leases"])
    order = []
    while engine.has_work:
        for out in engine.step():
            if out.request_id not in order:
                order.append(out.request_id)
        engine.cache.check()
        if "first" in engine._states:
            assert (engine.cache.free_slots, len(engine.cache.dump()["leases"])) == (slots, leases)
            assert [s.request.request_id for s in engine.scheduler.waiting] == ["second", "third"]
    assert order == ["first", "second", "third"]
    assert drained(engine)


@pytest.mark.parametrize("slots", [1, 2])
def test_checkpoints_give_way_to_requests(model, slots):
    """Every slot is cached when a request comes."""
    engine = make_engine(model, slots=slots)
    work = prompts(40, 35, 50)
    for ids in work * 2:
        (out,) = engine.generate([ids], greedy(4))
        assert out.token_ids == alone(model, ids, greedy(4)).token_ids
        assert engine.cache.free_slots + engine.cache.cached_slots == slots
    assert drained(engine)


def test_foreign_leases_are_an_error_and_not_an_endless_wait(model):
    engine = make_engine(model, slots=1)
    lease = engine.cache.open([1, 2])
    engine.add(Request([1], greedy(2), "r"))
    with pytest.raises(CapacityError, match="are there foreign leases"):
        engine.step()
    engine.cache.close(lease)
    _, ends = run_all(engine)
    assert ends == {"r": "length"}
    assert drained(engine)


# ---- memory of a prefill ------------------------------------------------------------------------


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of tensors that were made inside; `peak` is the most that were alive together."""

    def __init__(self):
        super().__init__()
        self.alive = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if not isinstance(x, torch.Tensor):
                continue
            storage = x.untyped_storage()
            key = storage._cdata
            if key not in self.alive:
                if key in given:
                    continue
                self.alive[key] = [0, storage.nbytes()]
                self.now += storage.nbytes()
            self.alive[key][0] += 1
            weakref.finalize(x, self._gone, key)
        self.peak = max(self.peak, self.now)
        return out

    def _gone(self, key):
        entry = self.alive[key]
        entry[0] -= 1
        if not entry[0]:
            self.now -= entry[1]
            del self.alive[key]


@pytest.mark.parametrize("chunk", [48])
@pytest.mark.parametrize(
    "params", [greedy(1), greedy(1, prompt_logprobs=True, top_logprobs=2)], ids=["plain", "scored"]
)
def test_memory_of_a_prefill_depends_on_the_chunk_and_not_on_the_prompt(model, chunk, params):
    peaks = {}
    for times in (4, 12):
        engine = make_engine(
            model, slots=3, pages=12 * chunk // 16 + 4, page_size=16, grid=64, chunked_prefill_size=chunk,
            context_length=12 * chunk + 1,
        )  # fmt: skip
        with PeakMemory() as memory:
            (out,) = engine.generate(prompts(times * chunk), params)
        assert out.finish == "length"
        peaks[times] = memory.peak
        assert drained(engine)
    assert peaks[12] <= 1.1 * peaks[4]
    assert peaks[12] >= 0.9 * peaks[4]
