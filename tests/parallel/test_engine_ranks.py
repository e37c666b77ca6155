"""An engine on many ranks gives what it gives on one: prefix reuse, preemption, verify steps, log-probabilities."""

import dataclasses
import functools

import pytest
import torch
from seeded import seed_weights
from worlds import World, load

from k3lib import Engine, EngineConfig, KimiK3ForCausalLM, Mesh, ParallelConfig, SamplingParams
from k3lib.cache import CacheConfig
from k3lib.engine import follow
from k3lib.engine.config import resolve_limits
from k3lib.engine.graphs import DecodeGraphs
from k3lib.engine.request import Request
from k3lib.errors import ConfigError, RequestError
from k3lib.spec.proposer import Draft, SpecConfig
from k3lib.testing import tiny_config

pytestmark = pytest.mark.filterwarnings("ignore:.*padding behind the heads")

CONFIG = tiny_config(
    num_hidden_layers=5, kda_layers=[1, 2, 4], full_attn_layers=[3, 5], attn_res_block_size=2, num_experts=8,
    num_experts_per_token=2,
)  # fmt: skip
# small pages and a fine grid: prefixes are reused, pages shared by ranks end in the middle
POOLS = CacheConfig(num_pages=40, num_slots=8, page_size=4, checkpoint_grid=8)
RULES = EngineConfig(cache=POOLS, chunked_prefill_size=16, max_running_requests=3)

LAYOUTS = {
    "tp2-dcp2": {"tp_size": 2, "dcp_size": 2},
    "tp2-ep2-a2a": {"tp_size": 2, "ep_size": 2, "moe_exchange": "all_to_all"},
    "pp2-dcp2": {"tp_size": 2, "dcp_size": 2, "pp_size": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole")
    seed_weights(KimiK3ForCausalLM(CONFIG, dtype=torch.float32)).save_pretrained(path, experts="bf16")
    return path


def prompts():
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(512, (21,), generator=generator).tolist()
    return [[*shared, *torch.randint(512, (n,), generator=generator).tolist()] for n in (3, 19, 1)]


def converse(engine):
    """Two rounds of the same prompts, the second longer by what was answered: tokens, reuse."""
    params = SamplingParams(temperature=0, max_new_tokens=5, ignore_eos=True)
    first = engine.generate(prompts(), params)
    again = engine.generate([p + out.token_ids for p, out in zip(prompts(), first, strict=True)], params)
    engine.cache.check()
    return [(out.token_ids, out.cached_tokens) for out in (*first, *again)]


def run(layout, folder, talk, rules=RULES):
    """What rank 0 gives; the others follow until it closes."""

    def work(mesh, rank):
        model = load(folder, mesh)
        if rank:
            follow(model, rules)
            return None
        engine = Engine(model, rules)
        try:
            return talk(engine)
        finally:
            engine.close()

    first, *others = World(ParallelConfig(**layout)).run(work)
    assert others == [None] * len(others)
    return first


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_answer_like_one(name, folder):
    want = converse(Engine(load(folder, Mesh.single()), RULES))
    assert any(cached for _, cached in want)
    assert run(LAYOUTS[name], folder, converse) == want


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


def test_drafts_are_verified_by_all_ranks(folder):
    """With tokens shared over ranks, and states rolled back on each."""

    def talk(engine):
        params = SamplingParams(temperature=0, max_new_tokens=14, ignore_eos=True)
        outs = engine.generate(prompts()[:2], params)
        return [out.token_ids for out in outs], engine.stats()["verify_steps"]

    want, _ = talk(Engine(load(folder, Mesh.single()), RULES))
    guess = Guess([p + answer for p, answer in zip(prompts(), want, strict=False)])
    rules = dataclasses.replace(RULES, spec=SpecConfig(draft=guess, block_size=3))
    got, steps = run(LAYOUTS["tp2-dcp2"], folder, talk, rules)
    assert got == want
    assert 0 < steps < 14


@pytest.mark.parametrize("layout", [LAYOUTS["tp2-dcp2"], LAYOUTS["tp2-ep2-a2a"]], ids=["tp2-dcp2", "a2a"])
def test_steps_of_fixed_shape_are_replayed_on_all_ranks(folder, monkeypatch, layout):
    """Padded as graphs are, but run eagerly, on a CPU; some steps, with routes to record, run without."""

    def with_graphs(model, config, proposer=None):
        return dataclasses.replace(resolve_limits(model, config, proposer), graph_requests=3)

    eager = functools.partial(DecodeGraphs, captures=False)
    monkeypatch.setattr("k3lib.engine.engine.resolve_limits", with_graphs)
    monkeypatch.setattr("k3lib.engine.engine.DecodeGraphs", eager)
    monkeypatch.setattr("k3lib.engine.ranks.DecodeGraphs", eager)
    replayed = []

    def talk(engine):
        if engine.runner.graphs is not None:
            run_step = engine.runner.graphs.graphs.run
            engine.runner.graphs.graphs.run = lambda batch: replayed.append(run_step(batch)) or replayed[-1]
        found = converse(engine)
        if not engine.model.mesh.config.shards_tokens:
            engine.add(Request([1, 2, 3], SamplingParams(max_new_tokens=3, temperature=0), record_routes=True))
            while engine.has_work:
                found += [out.token_ids for out in engine.step()]
        return found

    got = run(layout, folder, talk)
    monkeypatch.undo()
    want = talk(Engine(load(folder, Mesh.single()), RULES))
    assert got[: len(prompts()) * 2] == want[: len(prompts()) * 2]
    assert all(result is not None for result in replayed)
    assert bool(replayed) == (layout is LAYOUTS["tp2-dcp2"])


def test_memory_is_short_and_requests_are_preempted(folder):
    rules = dataclasses.replace(
        RULES, cache=dataclasses.replace(POOLS, num_pages=7, num_slots=4), schedule_conservativeness=0.0
    )

    def talk(engine):
        params = SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True)
        outs = engine.generate([p[:24] for p in prompts()], params)
        return [out.token_ids for out in outs], engine.stats()["preempted"]

    want, _ = talk(Engine(load(folder, Mesh.single()), RULES))
    got, preempted = run(LAYOUTS["tp2-dcp2"], folder, talk, rules)
    assert got == want
    assert preempted > 0


def test_log_probabilities_of_prompts_and_new_weights(folder, tmp_path):
    other = seed_weights(KimiK3ForCausalLM(CONFIG, dtype=torch.float32), seed=9)
    other.save_pretrained(tmp_path, experts="bf16")
    params = SamplingParams(temperature=0, max_new_tokens=3, ignore_eos=True, logprobs=True, prompt_logprobs=True)

    def talk(engine):
        (before,) = engine.generate([prompts()[0]], params)
        with pytest.raises(ConfigError, match="by a folder, so that every rank reads its part"):
            engine.update_weights(dict(other.state_dict()))
        engine.update_weights(tmp_path, progress=False)
        (after,) = engine.generate([prompts()[0]], params)
        found = []
        for out in (before, after):
            chances = [x.logprob for x in (*out.prompt_logprobs[1:], *out.logprobs)]
            found.append((out.token_ids, torch.tensor(chances)))
        return found

    want = talk_alone(folder, talk, tmp_path)
    got = run({"tp_size": 2}, folder, talk)
    for (tokens, chances), (ids, expected) in zip(got, want, strict=True):
        assert tokens == ids
        assert torch.allclose(chances, expected, atol=1e-4)


def talk_alone(folder, talk, new_weights):
    """The same on one rank, where weights may also be given as tensors."""
    engine = Engine(load(folder, Mesh.single()), RULES)

    class Alone:
        generate = engine.generate

        def update_weights(self, source, **options):
            if isinstance(source, dict):
                raise ConfigError("by a folder, so that every rank reads its part")
            engine.update_weights(new_weights, **options)

    return talk(Alone())


def test_what_many_ranks_cannot_do_is_refused(folder):
    def wrong_rank(mesh, rank):
        if rank:
            with pytest.raises(ConfigError, match=r"rank 1 of 2 follows rank 0: call k3lib\.engine\.follow"):
                Engine(load(folder, mesh), RULES)
        else:
            with pytest.raises(ConfigError, match="rank 0 of 2 leads: make an Engine"):
                follow(load(folder, mesh), RULES)

    World(ParallelConfig(tp_size=2)).run(wrong_rank)

    def prompt_logprobs(engine):
        with pytest.raises(RequestError, match="prompt_logprobs needs pp_size=1, got 2"):
            engine.add(Request([1, 2], SamplingParams(prompt_logprobs=True)))

    run({"pp_size": 2}, folder, prompt_logprobs)
