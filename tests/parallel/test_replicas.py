"""Replicas behind one front give what one rank gives; who takes a request, and what happens while some have nothing."""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from seeded import seed_weights
from test_draft_ranks import RULES as DRAFT_RULES
from test_draft_ranks import folders, plain  # noqa: F401 - a fixture
from worlds import World, load

from k3lib import Engine, EngineConfig, KimiK3ForCausalLM, Mesh, ParallelConfig, SamplingParams
from k3lib.cache import CacheConfig
from k3lib.engine import AsyncEngine, ReplicatedEngine, follow
from k3lib.engine.config import resolve_limits
from k3lib.engine.graphs import DecodeGraphs
from k3lib.engine.replicas import Part, Pass, PrefixIndex, choose_replica, of_replica, page_keys
from k3lib.engine.request import Request
from k3lib.errors import CapacityError, ConfigError, K3Error, RequestError
from k3lib.spec.proposer import Draft, SpecConfig
from k3lib.testing import tiny_config

pytestmark = pytest.mark.filterwarnings("ignore:.*padding behind the heads")

CONFIG = tiny_config(
    num_hidden_layers=3, kda_layers=[1, 2], full_attn_layers=[3], attn_res_block_size=2, num_experts=8,
    num_experts_per_token=2,
)  # fmt: skip
POOLS = CacheConfig(num_pages=40, num_slots=8, page_size=4, checkpoint_grid=8)
RULES = EngineConfig(cache=POOLS, chunked_prefill_size=32, max_running_requests=6)
GREEDY = SamplingParams(temperature=0, max_new_tokens=5, ignore_eos=True)

DP2 = {"tp_size": 2, "dp_size": 2}
LAYOUTS = {
    "gather": {"tp_size": 4, "dp_size": 2, "ep_size": 2},
    "all_to_all": {"tp_size": 4, "dp_size": 2, "dcp_size": 2, "ep_size": 4, "moe_exchange": "all_to_all"},
    "stages": {"tp_size": 2, "dp_size": 2, "pp_size": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole")
    seed_weights(KimiK3ForCausalLM(CONFIG, dtype=torch.float32)).save_pretrained(path, experts="bf16")
    return path


def prompts(*lengths, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(512, (n,), generator=generator).tolist() for n in lengths]


MANY = prompts(21, 3, 40, 1, 9, 17, 30)


def run(layout, folder, talk, rules=RULES, tokenizers=()):
    """What rank 0 says; the others follow until it closes. Nothing is left of any request on any replica."""

    def work(mesh, rank):
        model, tok = load(folder, mesh), dict(enumerate(tokenizers)).get(rank)
        if rank:
            follow(model, rules, tokenizer=tok)
            return None
        with contextlib.closing(ReplicatedEngine(model, rules, tokenizer=tok)) as engine:
            found = talk(engine)
            if not engine.has_work:
                drained(engine)
            return found

    first, *others = World(ParallelConfig(**layout)).run(work)
    assert others == [None] * len(others)
    return first


def drained(engine):
    engine.check()
    stats = engine.stats()
    assert stats["running"] == stats["waiting"] == 0
    engine.clear_cache()
    for each in engine.stats()["replicas"]:
        assert each["free_pages"] == each["cache"]["num_pages"]
        assert each["free_slots"] == each["cache"]["num_slots"]


def finished(engine):
    return [each["finished"] for each in engine.stats()["replicas"]]


def run_all(engine):
    """Step to the end: tokens and ends of the requests, by id."""
    tokens, ends = {}, {}
    while engine.has_work:
        for out in engine.step():
            tokens.setdefault(out.request_id, []).extend(out.token_ids)
            if out.finish is not None:
                ends[out.request_id] = out.finish
        engine.check()
    return tokens, ends


@pytest.fixture(scope="module")
def one(folder):
    """An engine on one rank."""
    return Engine(load(folder, Mesh.single()), RULES)


@pytest.fixture(scope="module")
def want(one):
    return [out.token_ids for out in one.generate(MANY, GREEDY)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_replicas_answer_like_one_rank(name, folder, want):
    """Many requests at once, then one alone on each replica, while the other has none."""

    def talk(engine):
        many = [out.token_ids for out in engine.generate(MANY, GREEDY)]
        before = finished(engine)
        alone, taken = [], []
        for prompt in MANY[1:4:2]:
            engine.clear_cache()  # so that the load alone decides
            alone += [list(engine.stream(prompt, GREEDY))]
            taken.append([now - then for now, then in zip(finished(engine), before, strict=True)])
        return many, before, alone, taken, engine.stats()

    many, before, alone, taken, stats = run(LAYOUTS[name], folder, talk)
    assert many == want
    assert all(before)
    assert sum(before) == len(MANY)
    assert alone == want[1:4:2]
    assert taken[-1] == [1, 1]
    assert stats["finished"] == len(MANY) + 2
    assert stats["cache"]["num_pages"] == 2 * POOLS.num_pages
    assert stats["limits"]["dp_size"]["value"] == 2


def test_a_replica_with_more_to_do_than_the_other(folder, one):
    """Prompts of several steps here, short ones there; some end early; the loads are even in the end."""
    ids = prompts(70, 2, 2, 2, seed=8)
    params = [dataclasses.replace(GREEDY, max_new_tokens=n) for n in (3, 12, 1, 7)]

    def talk(engine):
        engine.add(Request(ids[0], params[0], "long"))
        for i in (1, 2, 3):
            engine.add(Request(ids[i], params[i], f"short-{i}"))
        tokens, ends = run_all(engine)
        assert set(ends.values()) == {"length"}
        return list(tokens.values()), finished(engine)

    got, counts = run(DP2, folder, talk)
    assert counts == [1, 3]
    assert sorted(got) == sorted(out.token_ids for out in one.generate(ids, params))


def test_a_request_can_be_dropped_at_any_moment(folder):
    def talk(engine):
        for name, prompt in zip("abcdef", MANY, strict=False):
            engine.add(Request(prompt, GREEDY, name))
        with pytest.raises(RequestError, match="request id 'a' is in use"):
            engine.add(Request([1], GREEDY, "a"))
        with pytest.raises(RequestError, match="the prompt is empty"):
            engine.add(Request([], GREEDY))
        where = {name: state.replica for name, state in engine._open.items()}
        here, there = (sorted(name for name, r in where.items() if r == replica) for replica in (0, 1))
        assert engine.abort(there[0])  # the replica has not heard of it
        engine.step()
        dropped = [there[0], here[0], there[1]]
        assert all(engine.abort(name) for name in dropped[1:])
        assert not any(engine.abort(name) for name in dropped)
        engine.add(Request([3, 4], GREEDY, there[1]))  # the name is free again
        _, ends = run_all(engine)
        assert ends == {name: "length" for name in "abcdef" if name not in dropped[:2]}
        return engine.stats()["aborted"]

    assert run(DP2, folder, talk) == 2


def test_a_cached_prefix_wins_while_loads_are_near(folder, one):
    turn = prompts(30, seed=5)[0]
    params = dataclasses.replace(GREEDY, max_new_tokens=3)

    def talk(engine):
        engine.generate(prompts(4, seed=1), params)  # so that it is the turn of the other replica
        answer = list(engine.stream(turn, params))
        (again,) = engine.generate([[*turn, *answer, 7]], params)
        counts = finished(engine)
        # with that one at work on it, the other replica is free
        for name in ("first", "second"):
            engine.add(Request([*turn, *answer, 8], dataclasses.replace(params, max_new_tokens=9), name))
        where = [engine._open[name].replica for name in ("first", "second")]
        engine.add(Request([*turn, 9], params, "other", namespace="tenant"))
        where.append(engine._open["other"].replica)
        run_all(engine)
        return answer, again, counts, where

    answer, again, counts, where = run(DP2, folder, talk)
    assert answer == list(one.stream(turn, params))
    assert again.cached_tokens >= 32
    assert counts == [1, 2]
    assert where == [1, 0, 0]


class Bytes:
    """A tokenizer for stop texts; `bad` cannot decode."""

    def __init__(self, *, bad=False):
        self.bad = bad

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        if self.bad:
            raise ValueError("no such token")
        return "".join(chr(i) for i in ids)


def test_a_request_that_fails_on_another_replica_fails_alone(folder, want):
    def talk(engine):
        for i, prompt in enumerate(MANY[:4]):
            stop = ("stop",) if i % 2 else ()
            engine.add(Request(prompt, dataclasses.replace(GREEDY, stop=stop), str(i)))
        where = [engine._open[str(i)].replica for i in range(4)]
        tokens, ends = run_all(engine)
        return where, tokens, ends

    where, tokens, ends = run(DP2, folder, talk, tokenizers=[Bytes(), Bytes(bad=True)])
    assert where[1] == 1
    for i in range(4):
        fails = bool(i % 2 and where[i])
        assert ends[str(i)] == ("error" if fails else "length")
        assert fails or tokens[str(i)] == want[i]


def test_a_step_that_fails_beside_the_model_ends_its_requests_alone(folder, want):
    def talk(engine):
        for i, prompt in enumerate(MANY[:4]):
            engine.add(Request(prompt, GREEDY, str(i)))
        where = [engine._open[str(i)].replica for i in range(4)]
        scheduler, prepare = engine.scheduler, engine.scheduler.prepare

        def fails():
            scheduler.prepare = prepare
            raise ArithmeticError("on the host")

        scheduler.prepare = fails
        with pytest.raises(ArithmeticError):
            engine.step()
        here = [i for i in range(4) if where[i] == 0]
        assert engine.abort(str(here[0]))
        tokens, ends = run_all(engine)
        assert {i: ends.get(str(i)) for i in here} == {here[0]: None, **dict.fromkeys(here[1:], "error")}
        return {int(name): found for name, found in tokens.items() if ends[name] != "error"}

    found = run(DP2, folder, talk)
    assert found
    assert found == {i: want[i] for i in found}


def test_nothing_goes_on_after_a_pass_that_failed_somewhere(folder):
    def work(mesh, rank):
        model = load(folder, mesh)
        if rank:
            whole, calls = model.hidden, itertools.count()

            def hidden(*args, **options):
                if next(calls) == 3:
                    raise RuntimeError("no memory")
                return whole(*args, **options)

            model.hidden = hidden
            follow(model, RULES)
        engine = ReplicatedEngine(model, RULES)
        with pytest.raises(threading.BrokenBarrierError):
            engine.generate(MANY, GREEDY)
        assert not engine.has_work
        with pytest.raises(K3Error, match="a step failed while the other replicas waited for it"):
            engine.add(Request([1], GREEDY))
        engine.close()
        return "closed"

    with pytest.raises(RuntimeError, match="no memory"):
        World(ParallelConfig(**DP2)).run(work)


@pytest.mark.again
def test_draft_models_propose_on_each_replica(folders):  # noqa: F811
    """With their ranks, while those of the other one wait or propose too."""
    rules = dataclasses.replace(DRAFT_RULES, spec=SpecConfig(draft=str(folders["radixark"])), max_running_requests=6)
    target = folders["target"]
    got, stats = run(LAYOUTS["gather"], target, lambda engine: (plain(engine, count=1), engine.stats()), rules)
    assert got == plain(Engine(load(target, Mesh.single()), DRAFT_RULES), count=1)
    assert all(each["speculation"]["accepted"] for each in stats["replicas"])


class Guess:
    """Proposes what is known to come, but for every third token."""

    block_size, feature_layers, feature_kind = 3, (), "prefix"

    def __init__(self, answers):
        self.answers = answers  # whole token lists

    def propose(self, contexts):
        drafts = []
        for context in contexts:
            have = len(context.token_ids)
            known = next(a for a in self.answers if a[:have] == list(context.token_ids))[have : have + 3]
            drafts.append(Draft([(t + 1) % 512 if (have + i) % 3 == 0 else t for i, t in enumerate(known)]))
        return drafts

    def commit(self, contexts):
        pass

    def drop(self, request_id):
        pass


def test_drafts_are_verified_in_step_with_the_others(folder, one):
    """By a replica each, while the other one decodes, prefills or has nothing."""
    params = dataclasses.replace(GREEDY, max_new_tokens=9)
    want = [out.token_ids for out in one.generate(MANY[:3], params)]
    guess = Guess([prompt + answer for prompt, answer in zip(MANY, want, strict=False)])

    def talk(engine):
        return [out.token_ids for out in engine.generate(MANY[:3], params)], engine.stats()

    rules = dataclasses.replace(RULES, spec=SpecConfig(draft=guess, block_size=3))
    got, stats = run(LAYOUTS["gather"], folder, talk, rules)
    assert got == want
    report = stats["speculation"]
    each = [stats["speculation"]["steps"] for stats in stats["replicas"]]
    assert report["steps"] == sum(each)
    assert all(each)
    assert report["accept_length"] == report["emitted"] / report["steps"]
    assert sum(report["by_position"]) == report["accepted"]


def test_decode_steps_of_one_shape_are_replayed_by_all(folder, want, monkeypatch):
    """Padded as graphs are, but run eagerly, on a CPU: steps of unequal size, beside a prefill, and for one alone."""
    met = []

    class Eager(DecodeGraphs):
        def __init__(self, *args, **options):
            super().__init__(*args, captures=False, **options)

        def meet(self, shape, batch=None):
            met.append((self.model.mesh.world.rank, shape, None if batch is None else len(batch.new_tokens)))
            return super().meet(shape, batch)

    def with_graphs(model, config, proposer=None):
        return dataclasses.replace(resolve_limits(model, config, proposer), graph_requests=4)

    monkeypatch.setattr("k3lib.engine.engine.resolve_limits", with_graphs)
    monkeypatch.setattr("k3lib.engine.engine.DecodeGraphs", Eager)
    monkeypatch.setattr("k3lib.engine.ranks.DecodeGraphs", Eager)

    def talk(engine):
        many = [out.token_ids for out in engine.generate(MANY, GREEDY)]
        assert any(count and count < shape[0] for _, shape, count in met)
        met.clear()
        alone = [list(engine.stream(MANY[4], GREEDY)), list(engine.stream(MANY[5], GREEDY))]
        together = len(met)
        engine.add(Request([1, 2], GREEDY, "recorded", record_routes=True))
        engine.add(Request([3, 4], GREEDY, "plain"))
        run_all(engine)
        return many, alone, together, len(met)

    many, alone, together, all_steps = run(LAYOUTS["gather"], folder, talk)
    assert many == want
    assert alone == want[4:6]
    assert together == all_steps == 4 * 2 * 4  # ranks, requests, decode steps; none beside one that records
    assert {shape for _, shape, _ in met} == {(1, 1)}
    assert {count for _, _, count in met} == {1, None}


def test_new_weights_and_queues(folder, tmp_path, want):
    other = seed_weights(KimiK3ForCausalLM(CONFIG, dtype=torch.float32), seed=9)
    other.save_pretrained(tmp_path / "new", experts="bf16")
    rules = dataclasses.replace(RULES, max_running_requests=2, max_queued_requests=3)

    def talk(engine):
        with pytest.raises(ConfigError, match="by a folder, so that every rank reads its part"):
            engine.update_weights(dict(other.state_dict()))
        with pytest.raises(K3Error, match="nowhere"):
            engine.update_weights(tmp_path / "nowhere")
        before = [out.token_ids for out in engine.generate(MANY, GREEDY)]  # more than fit into the queues
        engine.update_weights(tmp_path / "new", progress=False)
        after = [out.token_ids for out in engine.generate(MANY[:2], GREEDY)]
        for name in "abcdef":  # of each replica one runs and two wait
            engine.add(Request([1, 2, 3], GREEDY, name))
        with pytest.raises(CapacityError, match="the queue is full: max_queued_requests=3"):
            engine.add(Request([1, 2, 3], GREEDY))
        engine.add(Request([1, 2, 3], GREEDY, "urgent", priority=1))
        _, ends = run_all(engine)
        return before, after, ends

    before, after, ends = run(DP2, folder, talk, rules)
    assert before == want
    assert after == [out.token_ids for out in Engine(other, RULES).generate(MANY[:2], GREEDY)]
    assert ends.pop("urgent") == "length"
    assert sorted(ends.values()) == ["abort", *["length"] * 5]


def test_a_server_ends_while_requests_run(folder, want):
    """Two answers are read to the end, one is given up, others run when the engine closes; idle leaders wait."""

    def talk(engine):
        async def read(runner, prompt, count=None):
            ids, stream = [], runner.generate(prompt, dataclasses.replace(GREEDY, max_new_tokens=count or 5))
            async with contextlib.aclosing(stream):
                async for out in stream:
                    ids += out.token_ids
                    if count and len(ids) > 3:
                        break
            return ids

        async def go():
            runner = AsyncEngine(engine)
            found = await asyncio.gather(*[read(runner, prompt) for prompt in MANY], read(runner, MANY[0], 90))
            stats = await runner.call(lambda engine: engine.stats())
            await asyncio.sleep(0)
            left = [asyncio.create_task(read(runner, prompt, 90)) for prompt in MANY[:3]]
            while not engine._open:
                await asyncio.sleep(0.001)
            await asyncio.to_thread(runner.close)
            await asyncio.gather(*left)
            return found, stats

        return asyncio.run(go())

    found, stats = run(DP2, folder, talk)
    assert found[:-1] == want
    assert len(found[-1]) == 4
    assert stats["running"] + stats["aborted"] == 1
    assert stats["finished"] == len(MANY)


def test_what_does_not_fit_is_refused(folder):
    def engines(mesh, rank):
        model = load(folder, mesh)
        with pytest.raises(ConfigError, match=r"leads one replica, this mesh has dp_size=2: .*ReplicatedEngine"):
            Engine(model, RULES)
        with pytest.raises(ConfigError, match="rank 0 of 4 leads" if rank == 0 else "rank . of 4 follows rank 0"):
            (ReplicatedEngine if rank else follow)(model, RULES)
        few = EngineConfig(max_mamba_cache_size=1)
        with pytest.raises(ConfigError, match="max_mamba_cache_size=1 over dp_size=2 replicas is no slot"):
            (follow if rank else ReplicatedEngine)(model, few)

    World(ParallelConfig(**LAYOUTS["gather"])).run(engines)
    with pytest.raises(ConfigError, match="needs dp_size > 1, got dp_size=1: make an Engine"):
        ReplicatedEngine(load(folder, Mesh.single()), RULES)


def test_limits_are_shared_by_replicas():
    rules = EngineConfig(
        max_running_requests=9, max_queued_requests=3, chunked_prefill_size=100, max_mamba_cache_size=8,
        max_total_tokens=4096,
    )  # fmt: skip
    part = of_replica(rules, 4)
    assert (part.max_running_requests, part.max_queued_requests, part.chunked_prefill_size) == (2, 1, 25)
    assert (part.max_mamba_cache_size, part.max_total_tokens) == (2, 4096)
    assert of_replica(EngineConfig(max_queued_requests=0), 4).max_queued_requests == 0
    assert of_replica(EngineConfig(deterministic=True), 3).chunked_prefill_size == 2048


# ---- the choice


@given(st.data())
def test_the_choice_of_a_replica(data):
    count = data.draw(st.integers(1, 5))
    loads, matches, taken = (data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)) for _ in range(3))
    rooms = data.draw(st.lists(st.booleans(), min_size=count, max_size=count).filter(any))
    chosen = choose_replica(loads, matches, taken, rooms)
    assert rooms[chosen]
    for other in (r for r in range(count) if rooms[r]):
        # nobody is less loaded by more than what the chosen one saves
        assert loads[chosen] - loads[other] <= matches[chosen] - matches[other]
        if loads[other] == loads[chosen]:
            assert matches[other] <= matches[chosen]
            assert matches[other] < matches[chosen] or taken[other] >= taken[chosen]
    order = data.draw(st.permutations(range(count)))
    moved = choose_replica(*([x[r] for r in order] for x in (loads, matches, taken, rooms)))
    key = (loads[chosen] - matches[chosen], loads[chosen], taken[chosen])
    assert (loads[order[moved]] - matches[order[moved]], loads[order[moved]], taken[order[moved]]) == key


SERVES = st.builds(Part, st.just(0), st.integers(0, 1), st.just(0), st.just(0))
WORKS = st.builds(Part, st.integers(1, 9), st.sampled_from([0, 1, 2, 4]), st.sampled_from([1, 4]), st.just(0))


@given(st.lists(SERVES | WORKS, min_size=1, max_size=4).filter(lambda parts: any(part.tokens for part in parts)))
def test_replicas_agree_on_one_graph_or_none(parts):
    agreed = Pass.of(parts)
    assert agreed.tokens == tuple(part.tokens for part in parts)
    if agreed.shape is None:
        widths = {part.width for part in parts if part.tokens}
        assert len(widths) > 1 or not all(part.requests for part in parts)
    else:
        requests, width = agreed.shape
        assert requests in {part.requests for part in parts}
        assert all(0 < part.requests <= requests for part in parts)
        assert all(part.width == width for part in parts if part.tokens)


@given(st.lists(st.integers(0, 1), max_size=14), st.lists(st.integers(0, 1), max_size=14), st.integers(1, 4))
def test_pages_of_prompts_match_as_far_as_the_tokens_do(first, second, page):
    index = PrefixIndex(100)
    index.note(page_keys(first, page))
    same = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    assert index.match(page_keys(second, page)) == same // page
    assert index.match(page_keys(second, page, "another tenant")) == 0
    small = PrefixIndex(2)
    small.note(page_keys(first, page))
    assert small.match(page_keys(first, page)) == min(2, len(first) // page)
    small.clear()
    assert small.match(page_keys(first, page)) == 0


# ---- processes


@pytest.fixture
def serve(folder, tmp_path):
    """Two processes of `k3lib-serve`, a replica each."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(2)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        port, master = (probe.getsockname()[1] for probe in probes)
    flags = {
        "model-path": folder, "tokenizer-path": "bytes", "dtype": "float32", "checkpoint-grid": 16,
        "page-size": 8, "tp-size": 2, "dp-size": 2, "ep-size": 2, "moe-exchange": "all_to_all",
        "max-running-requests": 8, "port": port,
    }  # fmt: skip
    command = [sys.executable, "-c", "from k3lib.server.cli import serve; serve()"]
    command += [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    processes = []
    for rank in range(2):
        ranked = {**env, "MASTER_PORT": str(master), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (tmp_path / f"log-{rank}").open("w") as log:
            processes.append(subprocess.Popen(command, env=ranked, stdout=subprocess.PIPE, stderr=log, text=True))
    try:
        said = processes[0].stdout.readline()
        assert said.startswith("serving "), "\n".join((tmp_path / f"log-{r}").read_text() for r in range(2))
        yield processes, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def seconds_of(process):
    """CPU time."""
    fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.again
def test_a_server_over_two_processes(serve, want):
    processes, http = serve
    sampling = {"temperature": 0, "max_new_tokens": GREEDY.max_new_tokens, "ignore_eos": True}
    answer = http.post("/generate", json={"input_ids": MANY, "sampling_params": sampling})
    assert answer.status_code == 200, answer.text
    assert [one["output_ids"] for one in answer.json()] == want
    (again,) = http.post("/generate", json={"input_ids": [MANY[2] + want[2]], "sampling_params": sampling}).json()
    assert again["meta_info"]["cached_tokens"] >= 32
    info = http.get("/server_info").json()
    assert [state["finished"] for state in info["internal_states"]] == pytest.approx([4, 4], abs=1)
    assert info["max_running_requests"] == 8
    assert info["limits"]["max_running_requests"]["value"] == 4
    assert 'k3lib:num_running_reqs{model_name="' in http.get("/metrics").text
    assert http.post("/flush_cache").json()["flushed_tokens"] > 0
    before = [seconds_of(process) for process in processes]
    with pytest.raises(subprocess.TimeoutExpired):
        processes[1].wait(1)
    assert [seconds_of(p) - then for p, then in zip(processes, before, strict=True)] == pytest.approx([0, 0], abs=0.4)
    processes[1].send_signal(signal.SIGTERM)  # rank 0 decides when it is time
    assert http.get("/health").status_code == 200
    processes[0].send_signal(signal.SIGTERM)
    assert [process.wait(60) for process in processes] == [0, 0]
