"""What goes wrong stays with the request it happened to: numbers that are not finite, exceptions, new weights."""

import contextlib

import pytest
import torch
from engines import VOCAB, alone, drained, greedy, ids_of, make_engine, one_thread, prompts, run_all, small_model

from k3lib import KimiK3ForCausalLM
from k3lib.engine import Request, SamplingParams
from k3lib.errors import CheckpointError, ConfigError, K3Error

GRID = 16
CURSED = VOCAB - 1  # a token whose embedding is not finite while a curse is on


@pytest.fixture(scope="module", autouse=True)
def threads():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model():
    return small_model()


@contextlib.contextmanager
def hooked(module, function):
    """A forward hook `function(inputs, output) -> output or None`."""
    hook = module.register_forward_hook(lambda _module, inputs, out: function(inputs, out))
    try:
        yield
    finally:
        hook.remove()


def curse(model, calls=None, bad=torch.nan):
    """Make the embedding of CURSED not finite, in the calls that `calls` names; all if None."""
    seen = 0

    def spoil(inputs, out):
        nonlocal seen
        seen += 1
        if calls is not None and seen not in calls:
            return None
        return torch.where((inputs[0] == CURSED)[..., None], bad, out)

    return hooked(model.model.embed_tokens, spoil)


def clean(engine):
    """Nothing that is not finite is left in pages, or in slots that somebody owns; free slots are zeroed when taken."""
    pool, slots = engine.cache.pool, engine.cache.allocator.slots
    owned = [slot for slot in range(1, slots.count + 1) if slots.refs(slot)]
    assert pool.kda.state[:, owned].isfinite().all()
    assert pool.kda.conv[:, owned].isfinite().all()
    assert pool.latent.pages.isfinite().all()
    return True


# ---- numbers that are not finite ----------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize(
    "params",
    [
        greedy(12),
        SamplingParams(max_new_tokens=12, seed=3, ignore_eos=True),
        SamplingParams(max_new_tokens=12, seed=3, ignore_eos=True, top_p=0.9, top_k=20, repetition_penalty=1.2),
    ],
    ids=["greedy", "sampled", "filtered"],
)
@pytest.mark.parametrize("rules", [{}, {"deterministic": True, "chunked_prefill_size": 16}], ids=["batched", "alone"])
def test_logits_at_step_5_end_only_their_request(model, params, bad, rules):
    """The failing step crosses a checkpoint boundary."""
    work = prompts(7, GRID - 4, 20)
    want = [alone(model, ids, params, **rules) for ids in work]
    engine = make_engine(model, **rules)
    names = [engine.add(Request(ids, params, f"r{i}")) for i, ids in enumerate(work)]
    outs = {name: [] for name in names}
    spoilt = []

    def spoil(_inputs, out):
        state = engine._states.get("r1")
        if state is None or state.num_generated != 4 or spoilt:
            return None
        row = 1
        if rules:  # requests come one by one
            spoil.calls = getattr(spoil, "calls", 0) + 1
            if spoil.calls != 2:
                return None
            row = 0
        spoilt.append(state.lease)
        out = out.clone()
        out[row] = bad
        return out

    with hooked(model.lm_head, spoil):
        while engine.has_work:
            for out in engine.step():
                outs[out.request_id].append(out)
            if spoilt and not spoilt[0].is_open:
                assert clean(engine)
    assert [found[-1].finish for found in outs.values()] == ["length", "error", "length"]
    delivered = [[token for out in found for token in out.token_ids] for found in outs.values()]
    assert delivered[1] == want[1].token_ids[:4], "no garbage is delivered"
    assert [delivered[0], delivered[2]] == [want[0].token_ids, want[2].token_ids]
    again = engine.generate([work[1], work[1] + want[1].token_ids[:5]], params)
    assert again[0].token_ids == want[1].token_ids
    assert [out.cached_tokens for out in again] == [0, 0], "what a failed request published is not used again"
    assert again[1].token_ids == alone(model, work[1] + want[1].token_ids[:5], params, **rules).token_ids
    assert engine.stats()["failed"] == 1
    assert drained(engine)


@pytest.mark.parametrize("mix_decode", [False, True], ids=["turns", "mixed"])
@pytest.mark.parametrize("place", [3, 20, 45])
def test_a_prompt_that_fails_half_way_ends_at_once_and_leaves_no_trace(model, place, mix_decode):
    """Checkpoints of its first chunks were published before."""
    healthy, late, bad = prompts(20, 9, 50, below=CURSED)
    bad[place] = CURSED
    engine = make_engine(model, chunked_prefill_size=8, mix_decode=mix_decode)
    engine.add(Request(healthy, greedy(12), "healthy"))
    engine.add(Request(bad, greedy(4), "bad"))
    with curse(model):
        tokens, ends = {}, {}
        for step in range(100):
            if step == 4:
                engine.add(Request(late, greedy(6), "late"))
            if not engine.has_work:
                break
            for out in engine.step():
                tokens.setdefault(out.request_id, []).extend(out.token_ids)
                ends |= {out.request_id: out.finish} if out.finish else {}
            if "bad" in ends:
                assert clean(engine)
    assert ends == {"bad": "error", "healthy": "length", "late": "length"}
    assert tokens["bad"] == []
    assert engine.stats()["prefill_steps"] <= 3 + (place // 8 + 1) * 2 + 2, "it ends when it fails, not with its prompt"
    assert tokens["healthy"] == alone(model, healthy, greedy(12)).token_ids
    assert tokens["late"] == alone(model, late, greedy(6)).token_ids
    for ids in (bad, bad[: place + 3]):
        (out,) = engine.generate([ids], greedy(4))
        assert out.token_ids == alone(model, ids, greedy(4)).token_ids
    assert drained(engine)


@pytest.mark.parametrize("length", [20, 40])
@pytest.mark.parametrize("moment", [1, 2])
def test_who_hits_what_a_failing_request_has_just_published_is_not_drawn_in(model, length, moment):
    """It is admitted while the step runs that publishes and fails; it looks again and computes everything."""
    (ids,) = prompts(length, below=CURSED)
    ids[2] = CURSED
    engine = make_engine(model, slots=6, chunked_prefill_size=16, max_running_requests=2)
    other = prompts(3, seed=9)[0]
    engine.add(Request(other, greedy(30), "other"))
    engine.add(Request(ids, greedy(4), "first"))
    tokens, ends, seen = {}, {}, 0
    calls = {moment + 1}
    with curse(model, calls):
        while engine.has_work:
            if seen == moment:
                engine.add(Request(ids, greedy(4), "second"))
                engine.add(Request(ids, greedy(4), "third"))
            seen += 1
            for out in engine.step():
                tokens.setdefault(out.request_id, []).extend(out.token_ids)
                ends |= {out.request_id: out.finish} if out.finish else {}
            engine.cache.check()
            engine.scheduler.check()
    want = alone(model, ids, greedy(4)).token_ids
    assert {name for name, end in ends.items() if end == "error"} <= {"first"}
    assert tokens["second"] == tokens["third"] == want
    assert tokens["other"] == alone(model, other, greedy(30)).token_ids
    assert clean(engine)
    assert drained(engine)


def test_a_hit_on_what_is_not_known_to_be_good_is_given_back(model):
    """The second request finds the first one's checkpoint within the step that makes it."""
    (ids,) = prompts(2 * GRID + 3, below=CURSED)
    ids[1] = CURSED
    engine = make_engine(model, chunked_prefill_size=GRID)
    engine.add(Request(ids, greedy(3), "first"))
    engine.scheduler.config = type(engine.scheduler.config)(
        page_size=4, max_running=8, chunk_tokens=GRID, reserve_tokens=0
    )
    found = []
    admit = engine.scheduler.admit

    def late(self=engine):
        if not found:  # called by next(), then by prepare() after the states were published
            found.append(None)
            return admit()
        if len(found) == 1:
            found.append(None)
            engine.add(Request(ids, greedy(3), "second"))
            admit()
            found.append(engine._states["second"].lease.cached_len)
            return None
        return admit()

    engine.scheduler.admit = late
    with curse(model, {1}):
        tokens, ends = run_all(engine)
    assert found[2] == GRID, "the test did not happen"
    assert ends == {"first": "error", "second": "length"}
    assert tokens["second"] == alone(model, ids, greedy(3)).token_ids
    assert clean(engine)
    assert drained(engine)


def test_all_requests_of_a_step_may_fail(model):
    engine = make_engine(model)
    with hooked(model.lm_head, lambda _inputs, out: out * torch.nan):
        outputs = engine.generate(prompts(4, 20, 40), greedy(3, logprobs=True, prompt_logprobs=True))
    assert [out.finish for out in outputs] == ["error"] * 3
    assert ids_of(outputs) == [[]] * 3
    assert engine.stats()["failed"] == 3
    assert drained(engine)


def test_a_failed_request_takes_its_shared_prefix_out_only_as_far_as_it_made_it(model):
    shared, tail = prompts(2 * GRID + 1, 8, below=CURSED)
    engine = make_engine(model)
    engine.generate([shared], greedy(1))
    with curse(model):
        (out,) = engine.generate([[*shared, CURSED, *tail]], greedy(3))
    assert out.finish == "error"
    assert clean(engine)
    (out,) = engine.generate([shared + tail], greedy(3))
    assert out.cached_tokens >= 2 * GRID
    assert out.token_ids == alone(model, shared + tail, greedy(3)).token_ids
    assert drained(engine)


# ---- exceptions ---------------------------------------------------------------------------------


class Failure(Exception):
    pass


def failing_once(owner, name, call):
    """Make the `call`-th call of a method raise."""
    original, count = getattr(owner, name), 0

    def replaced(*args, **kwargs):
        nonlocal count
        count += 1
        if count == call:
            raise Failure(name)
        return original(*args, **kwargs)

    setattr(owner, name, replaced)


PARTS = [
    ("runner", "launch"),
    ("cache", "make_batch"),
    ("cache", "issue"),
    ("scheduler", "commit"),
    ("cache", "commit"),
    ("scheduler", "prepare"),
    ("runner", "_prepare"),
]


@pytest.mark.parametrize("call", [1, 2, 5])
@pytest.mark.parametrize(("part", "name"), PARTS)
def test_an_exception_anywhere_in_a_step_ends_that_step_alone(model, part, name, call):
    engine = make_engine(model, slots=3, pages=40, chunked_prefill_size=16)
    work = {f"r{i}": ids for i, ids in enumerate(prompts(10, 20, 7, 30, 12))}
    for key, ids in work.items():
        engine.add(Request(ids, greedy(5), key))
    failing_once(getattr(engine, part), name, call)
    tokens, ends, failures = {}, {}, 0
    for _ in range(300):
        if not engine.has_work:
            break
        try:
            outs = engine.step()
        except Failure:
            failures += 1
            outs = []
        for out in outs:
            assert out.request_id not in ends
            tokens.setdefault(out.request_id, []).extend(out.token_ids)
            ends |= {out.request_id: out.finish} if out.finish else {}
        engine.cache.check()
        engine.scheduler.check()
    assert failures == 1
    assert set(ends) == set(work), "every request is told its end"
    assert "length" in ends.values()
    for key, end in ends.items():
        want = alone(model, work[key], greedy(5)).token_ids
        assert tokens[key] == want if end == "length" else tokens[key] == want[: len(tokens[key])]
    again = engine.generate(list(work.values()), greedy(5))
    assert ids_of(again) == [alone(model, ids, greedy(5)).token_ids for ids in work.values()]
    assert drained(engine)


@pytest.mark.parametrize("call", [1, 2])
def test_an_exception_reaches_generate_and_the_streams_that_were_in_its_step(model, call):
    """The first step decodes for the stream, the second computes the new prompts."""
    engine = make_engine(model)
    (ids,) = prompts(5)
    want = alone(model, ids, greedy(9)).token_ids
    stream = engine.stream(ids, greedy(9))
    got = [next(stream)]
    failing_once(engine.runner, "launch", call)
    with pytest.raises(Failure):
        engine.generate(prompts(6, 7), greedy(9))
    with contextlib.ExitStack() as stack:
        if call == 1:
            stack.enter_context(pytest.raises(K3Error, match="ended with an error"))
        got += list(stream)
    assert got == (want[:1] if call == 1 else want)
    assert drained(engine)


def test_outputs_of_requests_that_were_added_are_not_lost_to_generate(model):
    engine = make_engine(model)
    work = prompts(5, 9, 13)
    engine.add(Request(work[0], greedy(12), "added"))
    (out,) = engine.generate([work[1]], greedy(4))
    assert out.token_ids == alone(model, work[1], greedy(4)).token_ids
    assert engine.has_work
    assert list(engine.stream(work[2], greedy(20))) == alone(model, work[2], greedy(20)).token_ids
    tokens, ends = run_all(engine)
    assert tokens == {"added": alone(model, work[0], greedy(12)).token_ids}
    assert ends == {"added": "length"}
    assert drained(engine)


def test_an_aborted_request_is_not_heard_of_any_more(model):
    engine = make_engine(model)
    engine.add(Request(prompts(5)[0], greedy(50), "added"))
    engine.generate(prompts(9), greedy(4))
    assert engine.abort("added")
    assert engine.step() == []
    assert drained(engine)


def test_names_that_the_engine_chooses_avoid_those_in_use(model):
    engine = make_engine(model)
    engine.add(Request([1], greedy(2), "request-1"))
    engine.add(Request([1], greedy(2), "request-2"))
    assert engine.add(Request([1], greedy(2))) == "request-3"
    run_all(engine)
    assert drained(engine)


# ---- new weights --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("weights")
    model.save_pretrained(folder / "old")
    small_model(seed=1).save_pretrained(folder / "new")
    small_model(seed=1, intermediate_size=80).save_pretrained(folder / "other")
    return folder


def load(folder):
    return KimiK3ForCausalLM.from_pretrained(folder, dtype=torch.float32, progress=False)


@pytest.fixture
def own(folders):
    return load(folders / "old")


@pytest.fixture(scope="module")
def renewed(folders):
    return load(folders / "new")


def test_new_weights_forget_what_the_old_ones_computed(folders, own, renewed):
    work = prompts(40, 40, 12)
    engine = make_engine(own)
    old = ids_of(engine.generate(work, greedy(6)))
    assert [out.cached_tokens for out in engine.generate(work, greedy(6))] == [32, 32, 0]
    engine.update_weights(folders / "new", progress=False)
    outputs = engine.generate(work, greedy(6))
    assert ids_of(outputs) == [alone(renewed, ids, greedy(6)).token_ids for ids in work] != old
    assert [(out.cached_tokens, out.kv_tokens) for out in outputs] == [(0, 0)] * 3
    assert [out.cached_tokens for out in engine.generate(work, greedy(6))] == [32, 32, 0]
    engine.update_weights(folders / "old", progress=False)
    outputs = engine.generate(work, greedy(6))
    assert ids_of(outputs) == old
    assert [out.cached_tokens for out in outputs] == [0] * 3
    assert drained(engine)


def test_what_is_cached_is_kept_only_if_told_to(folders, own):
    (ids,) = prompts(40)
    engine = make_engine(own)
    engine.generate([ids], greedy(6))
    engine.update_weights(folders / "new", keep_cache=True, progress=False)
    (out,) = engine.generate([ids], greedy(6))
    assert out.cached_tokens == 32
    assert drained(engine)


@pytest.mark.parametrize("keep_cache", [False, True])
def test_running_requests_go_on_with_new_weights(folders, own, renewed, keep_cache):
    engine = make_engine(own, chunked_prefill_size=16, slots=3)
    work = {f"r{i}": ids for i, ids in enumerate(prompts(9, 20, 33, 12))}
    for name, ids in work.items():
        engine.add(Request(ids, greedy(8), name))
    tokens = {name: [] for name in work}
    for _ in range(5):
        for out in engine.step():
            tokens[out.request_id] += out.token_ids
    before = {name: list(ids) for name, ids in tokens.items()}
    assert any(before.values())
    engine.update_weights(folders / "new", keep_cache=keep_cache, progress=False)
    assert engine.stats()["running"] == 0
    engine.scheduler.check()
    more, ends = run_all(engine)
    assert set(ends.values()) == {"length"}
    for name, ids in work.items():
        got = before[name] + more.get(name, [])
        assert len(got) == 8
        if not keep_cache:  # behind what stays, everything is as if the new weights had always been there
            rest = alone(renewed, ids + before[name], greedy(8 - len(before[name]))).token_ids
            assert got == before[name] + rest
    assert drained(engine)


@pytest.mark.parametrize("source", ["other", "missing", {}, {"nonsense": torch.zeros(2)}], ids=str)
def test_weights_that_do_not_fit_change_nothing(folders, own, source):
    work = prompts(40, 9)
    engine = make_engine(own)
    engine.generate(work[:1], greedy(3))
    engine.add(Request(work[1], greedy(6), "runs"))
    engine.step()
    before = engine.stats()
    with pytest.raises((CheckpointError, ConfigError)):
        engine.update_weights(folders / source if isinstance(source, str) else source, progress=False)
    assert engine.stats() == before
    tokens, _ = run_all(engine)
    assert tokens["runs"] == alone(own, work[1], greedy(6)).token_ids[1:]
    (out,) = engine.generate(work[:1], greedy(3))
    assert out.cached_tokens == 32
    assert drained(engine)


def test_weights_that_are_partly_new_leave_nothing_cached(folders, own, renewed, monkeypatch):
    work = prompts(40, 9)
    engine = make_engine(own)
    engine.generate(work[:1], greedy(3))
    engine.add(Request(work[1], greedy(6), "runs"))
    engine.step()
    original, calls = torch.Tensor.copy_, 0

    def failing(self, *args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == 9:
            raise Failure("the file is gone")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "copy_", failing)
    with pytest.raises(CheckpointError, match="partly new"):
        engine.update_weights(folders / "new", progress=False)
    monkeypatch.undo()
    assert engine.cache.cached_pages == 0
    engine.update_weights(folders / "new", progress=False)
    run_all(engine)
    (out,) = engine.generate(work[:1], greedy(3))
    assert out.token_ids == alone(renewed, work[0], greedy(3)).token_ids
    assert out.cached_tokens == 0
    assert drained(engine)
