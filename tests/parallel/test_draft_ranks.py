"""Drafts in an engine on many ranks: they propose what they do on one, and the tokens are those of plain decoding."""

import dataclasses
import functools
import itertools
import json

import pytest
import torch
from engines import drained
from safetensors.torch import save_file
from seeded import seed_weights
from spawned import Spawned
from worlds import World, load

from k3lib import Engine, EngineConfig, KimiK3ForCausalLM, Mesh, ParallelConfig, SamplingParams
from k3lib.cache import CacheConfig
from k3lib.engine import ReplicatedEngine, follow
from k3lib.engine.config import resolve_limits
from k3lib.engine.graphs import DecodeGraphs
from k3lib.errors import CheckpointError, ConfigError
from k3lib.parallel import RankView
from k3lib.server.tiny import tiny_draft_config
from k3lib.spec import Draft, DraftConfig, DSpark, SpecConfig, make_draft
from k3lib.spec.draft_graphs import DraftGraphs
from k3lib.testing import assert_close, tiny_config

pytestmark = pytest.mark.filterwarnings("ignore:.*padding behind the heads")

VOCAB = 25  # so few that drafts are right now and then; ranks hold unequal parts
IDS = {"bos_token_id": 19, "eos_token_id": 20, "pad_token_id": 21, "media_placeholder_token_id": 22}
CONFIG = tiny_config(
    num_hidden_layers=5, kda_layers=[1, 2, 4], full_attn_layers=[3, 5], attn_res_block_size=2, num_experts=8,
    num_experts_per_token=2, vocab_size=VOCAB, **IDS,
)  # fmt: skip
TAPS = [0, 1, 4]  # of stages of 2 and 3 layers: one each, and one between them
POOLS = CacheConfig(num_pages=40, num_slots=8, page_size=4, checkpoint_grid=8)
RULES = EngineConfig(cache=POOLS, chunked_prefill_size=16, max_running_requests=3)
GREEDY = SamplingParams(temperature=0, max_new_tokens=9, ignore_eos=True)


def prompts():
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(18, (21,), generator=generator).tolist()
    return [[*shared, *torch.randint(18, (n,), generator=generator).tolist()] for n in (3, 19, 1)]


def draft_config(family):
    hf = tiny_draft_config(family) | {"vocab_size": VOCAB, "markov_rank": VOCAB}
    if family == "inferact":
        return hf | {"target_num_hidden_layers": 5, "target_layer_ids": TAPS, "mask_token_id": 23}
    return hf | {"num_target_layers": 5, "dflash_config": {"mask_token_id": 23, "target_layer_ids": TAPS}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, another one, and a draft of each family that has seen which tokens follow which in its answers."""
    made = {"all": tmp_path_factory.mktemp("all")}
    made |= {name: made["all"] / name for name in ("target", "other", "inferact", "radixark")}
    for seed, name in enumerate(("target", "other")):
        model = seed_weights(KimiK3ForCausalLM(CONFIG, dtype=torch.float32), seed)
        model.save_pretrained(made[name], experts="bf16")
    answers = [out.token_ids for out in Engine(load(made["target"], Mesh.single()), RULES).generate(prompts(), GREEDY)]
    for seed, family in enumerate(("inferact", "radixark")):
        made[family].mkdir()
        hf = draft_config(family)
        draft = seed_weights(make_draft(DraftConfig.from_hf(hf), dtype=torch.float32), seed + 5)
        draft.markov_head.markov_w1.weight.data.copy_(torch.eye(VOCAB))
        for answer in answers:
            for previous, token in itertools.pairwise(answer):
                draft.markov_head.markov_w2.weight.data[token, previous] += 2
        save_file({n: p.detach().contiguous() for n, p in draft.named_parameters()}, made[family] / "model.safetensors")
        (made[family] / "config.json").write_text(json.dumps(hf))
    return made


class Told:
    """What a proposer proposed, step by step."""

    def __init__(self, proposer):
        self.seen, self.propose = [], proposer.propose
        proposer.propose = self

    def __call__(self, contexts):
        found = self.propose(contexts)
        self.seen.append([(list(d.token_ids), d.confidence) for d in found])
        return found


def rounds(engine, params, count):
    """Outputs of the same prompts, in each round longer by what was answered."""
    asked, outs = prompts(), []
    for _ in range(count):
        found = engine.generate(asked, params)
        asked = [p + out.token_ids for p, out in zip(asked, found, strict=True)]
        outs += found
    return outs


def converse(engine, params=GREEDY, count=2):
    """What an engine says, how many tokens its steps gave, what was proposed, and what became of memory."""
    told = Told(engine.speculation.proposer)
    outs = rounds(engine, params, count)
    assert drained(engine)
    assert not any(out.speculation.refused for out in outs)
    stats = {"preempted": engine.stats()["preempted"], "cached": [out.cached_tokens for out in outs]}
    return [out.token_ids for out in outs], [out.accepted_per_step for out in outs], told.seen, stats


def plain(engine, params=GREEDY, count=2):
    """Tokens of the same conversation without drafts."""
    return [out.token_ids for out in rounds(engine, params, count)]


def alone(folder, rules, talk=converse):
    return talk(Engine(load(folder, Mesh.single()), rules))


def run(layout, folder, rules, talk=converse):
    """What rank 0 gives; the others follow until it closes. `rules` may be made for each rank."""

    def work(mesh, rank):
        model, mine = load(folder, mesh), rules(mesh) if callable(rules) else rules
        if rank:
            follow(model, mine)
            return None
        engine = Engine(model, mine)
        try:
            return talk(engine)
        finally:
            engine.close()

    first, *others = World(ParallelConfig(**layout)).run(work)
    assert others == [None] * len(others)
    return first


def assert_same(got, want):
    """Tokens, lengths, memory, and every single draft with its confidence."""
    (tokens, lengths, drafts, stats), (ids, steps, expected, facts) = got, want
    assert tokens == ids
    assert lengths == steps
    assert stats == facts
    assert [[ids for ids, _ in step] for step in drafts] == [[ids for ids, _ in step] for step in expected]
    confidence, estimates = ([x for step in found for _, c in step for x in c] for found in (drafts, expected))
    assert confidence == pytest.approx(estimates, abs=1e-4)


def spec(folders, family, **options):
    return dataclasses.replace(RULES, spec=SpecConfig(draft=str(folders[family]), **options))


@pytest.fixture(scope="module")
def wanted(folders):
    """Function from a family to what it does on one rank, with the tokens of plain decoding."""
    tokens = alone(folders["target"], RULES, plain)

    @functools.cache
    def of(family):
        want = alone(folders["target"], spec(folders, family))
        assert want[0] == tokens
        assert any(want[3]["cached"])
        assert sum(map(sum, want[1])) > 1.3 * sum(map(len, want[1])), "some drafts are right"
        return want

    return of


LAYOUTS = {
    "tp2": {"tp_size": 2},
    "tp2-cut": {"tp_size": 2, "shard_latent_projections": True},
    "tp2-ep2": {"tp_size": 2, "ep_size": 2},
    "tp2-ep2-a2a": {"tp_size": 2, "ep_size": 2, "moe_exchange": "all_to_all"},
    "tp2-dcp2": {"tp_size": 2, "dcp_size": 2},
    "pp2": {"pp_size": 2},
    "pp2-dcp2": {"tp_size": 2, "dcp_size": 2, "pp_size": 2},
}
CASES = [
    ("inferact", "tp2-cut"), ("inferact", "tp2-ep2"), ("inferact", "tp2-dcp2"), ("inferact", "pp2"),
    pytest.param("radixark", "tp2-ep2", marks=pytest.mark.again), ("radixark", "tp2-ep2-a2a"),
    pytest.param("radixark", "tp2-dcp2", marks=pytest.mark.again), ("radixark", "pp2-dcp2"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "name"), CASES)
def test_ranks_propose_what_one_does(family, name, folders, wanted):
    """With a prefix hit in the second round."""
    assert_same(run(LAYOUTS[name], folders["target"], spec(folders, family)), wanted(family))


# ---- with everything else


@pytest.mark.again
def test_memory_is_short_and_requests_are_preempted(folders):
    few = dataclasses.replace(POOLS, num_pages=16, num_slots=4)
    short = {"cache": few, "schedule_conservativeness": 0.0}
    rules = dataclasses.replace(spec(folders, "inferact", rollback="states"), **short)
    params = dataclasses.replace(GREEDY, max_new_tokens=18)
    talk = functools.partial(converse, params=params, count=1)
    want = alone(folders["target"], rules, talk)
    assert want[3]["preempted"] > 0
    assert want[0] == alone(folders["target"], RULES, functools.partial(plain, params=params, count=1))
    assert_same(run(LAYOUTS["tp2"], folders["target"], rules, talk), want)


def test_verify_steps_and_blocks_of_fixed_shape_are_replayed_on_all_ranks(folders, wanted, monkeypatch):
    """Padded as graphs are, but run eagerly, on a CPU."""

    def with_graphs(model, config, proposer=None):
        return dataclasses.replace(resolve_limits(model, config, proposer), graph_requests=3)

    class Padded(DSpark):
        def bind(self, model, cache):
            super().bind(model, cache)
            self.graphs = DraftGraphs(self._compute, self._facts, captures=False)

    def rules(mesh):
        draft = Padded.from_pretrained(folders["radixark"], tp=mesh.tp)
        made.append(draft)
        return dataclasses.replace(RULES, spec=SpecConfig(draft=draft))

    def talk(engine):
        run_step = engine.runner.graphs.graphs.run
        engine.runner.graphs.graphs.run = lambda batch: replayed.append(run_step(batch)) or replayed[-1]
        return converse(engine)

    made, replayed = [], []
    for name in ("engine", "ranks"):
        monkeypatch.setattr(f"k3lib.engine.{name}.DecodeGraphs", functools.partial(DecodeGraphs, captures=False))
    monkeypatch.setattr("k3lib.engine.engine.resolve_limits", with_graphs)
    assert_same(run(LAYOUTS["tp2-dcp2"], folders["target"], rules, talk), wanted("radixark"))
    assert replayed
    assert all(result is not None for result in replayed)
    assert all(draft.graphs._statics for draft in made)


def test_drawn_tokens_are_those_of_one_rank(folders):
    """Drafts with probabilities are drawn and judged on rank 0, whose numbers depend on seed and place only."""
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_new_tokens=9, ignore_eos=True)
    talk, rules = functools.partial(converse, params=params, count=1), spec(folders, "radixark", accept="block")
    assert_same(run(LAYOUTS["tp2-ep2"], folders["target"], rules, talk), alone(folders["target"], rules, talk))


def test_new_weights_reach_the_draft(folders):
    """On pipeline stages the draft has a copy of the head, which changes with it."""

    def talk(engine):
        held = {x.name: x.value for x in engine.limits}["draft_weight_bytes"]
        engine.update_weights(folders["other"], progress=False)
        return held, converse(engine, count=1)

    rules = spec(folders, "radixark")
    bytes_alone, want = alone(folders["target"], rules, talk)
    bytes_there, got = run(LAYOUTS["pp2"], folders["target"], rules, talk)
    assert_same(got, want)
    assert bytes_there == bytes_alone + VOCAB * CONFIG.text.hidden_size * 4
    part = DSpark.from_pretrained(folders["radixark"], tp=RankView(1, 2))
    assert part.weight_bytes < 0.7 * bytes_alone, "each of two ranks holds its part"


class Chain:
    """A proposer without weights: the best next token of the newest one alone, by the target's embedding and head."""

    block_size, feature_layers, feature_kind = 3, (0, 4), "mixture"

    def __init__(self):
        self.model, self.features = None, []

    def bind(self, model, cache):
        self.model = model

    def propose(self, contexts):
        ids, found = torch.tensor([c.token_ids[-1] for c in contexts]), []
        for _ in range(3):
            ids = self.model.scores(self.model.model.embed_tokens(ids)).argmax(-1)
            found.append(ids)
        return [Draft(row) for row in torch.stack(found, dim=1).tolist()]

    def commit(self, contexts):
        self.features += [(context.request_id, context.features.clone()) for context in contexts]

    def drop(self, request_id):
        pass


def test_a_proposer_of_ones_own_uses_the_target_from_rank_0(folders):
    def talk(engine):
        return converse(engine, count=1), engine.speculation.proposer.features

    def rules(_):
        return dataclasses.replace(RULES, spec=SpecConfig(draft=Chain()))

    want, features = alone(folders["target"], rules(None), talk)
    for name in ("tp2-ep2-a2a", "pp2"):  # embeddings are sharded by token, the head is on another stage
        got, there = run(LAYOUTS[name], folders["target"], rules, talk)
        assert got == want, name
        assert [request for request, _ in there] == [request for request, _ in features]
        for (_, one), (_, other) in zip(features, there, strict=True):
            assert_close(name, one, other, 1e-4)


@pytest.mark.again
def test_replicas_have_a_draft_each(folders, wanted):
    """Four ranks: two replicas of two; which of them takes a request decides which others it is batched with."""
    rules = dataclasses.replace(spec(folders, "radixark"), max_running_requests=6)

    def work(mesh, rank):
        model = load(folders["target"], mesh)
        if rank:
            follow(model, rules)
            return None
        engine = ReplicatedEngine(model, rules)
        outs = rounds(engine, GREEDY, 2)
        engine.close()
        return [out.token_ids for out in outs], [out.accepted_per_step for out in outs]

    layout = ParallelConfig(tp_size=4, dp_size=2, ep_size=4, moe_exchange="all_to_all")
    tokens, lengths = World(layout).run(work)[0]
    assert tokens == wanted("radixark")[0]
    assert sum(map(sum, lengths)) > 1.3 * sum(map(len, lengths))


# ---- what is refused, and where


def test_heads_that_do_not_divide_are_repeated_on_every_rank(folders):
    """Two KV heads over four ranks; latent attention has four."""
    for family, size in (("radixark", 1), ("inferact", 4)):
        draft = DSpark.from_pretrained(folders[family], tp=RankView(1, 4), cut="evenly").draft
        assert draft.tp.size == size
    with pytest.raises(ConfigError, match="tp_size=4 does not cut"):
        DSpark.from_pretrained(folders["radixark"], tp=RankView(1, 4))


def test_what_does_not_fit_is_refused_on_every_rank(folders, tmp_path):
    hf = draft_config("radixark") | {"num_target_layers": 6}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    (tmp_path / "model.safetensors").write_bytes((folders["radixark"] / "model.safetensors").read_bytes())

    def refusals(drafts, layout):
        def work(mesh, rank):
            rules = dataclasses.replace(RULES, spec=SpecConfig(draft=str(drafts[rank])))
            with pytest.raises((ConfigError, CheckpointError)) as caught:
                (follow if rank else Engine)(load(folders["target"], mesh), rules)
            return str(caught.value)

        return set(World(ParallelConfig(**layout)).run(work))

    (said,) = refusals([tmp_path] * 2, LAYOUTS["pp2"])
    assert said == "the draft does not fit the target: target layers is 6 in the draft, 5 in the target"
    (said,) = refusals([folders["radixark"], folders["inferact"]], LAYOUTS["tp2"])
    assert said == "the draft differs between ranks: 1 of 2 have another than rank 0"
    (said,) = refusals([tmp_path / "nothing"] * 2, LAYOUTS["tp2"])
    assert str(tmp_path / "nothing") in said


def test_a_proposer_that_does_not_fit_lets_the_others_go(folders):
    class Picky(Chain):
        def bind(self, model, cache):
            raise ConfigError(f"wants 7 layers, the target has {model.config.text.num_layers}")

    with pytest.raises(ConfigError, match="wants 7 layers, the target has 5"):
        run(LAYOUTS["tp2"], folders["target"], lambda _: dataclasses.replace(RULES, spec=SpecConfig(draft=Picky())))


def test_a_block_that_fails_ends_the_step(folders):
    """On one rank requests would go on without drafts; here the others may be in the middle of the block."""

    class Broken(DSpark):
        def _compute(self, step):
            raise RuntimeError("out of memory on purpose")

    def work(mesh, rank):
        draft = Broken.from_pretrained(folders["radixark"], tp=mesh.tp)
        model, rules = load(folders["target"], mesh), dataclasses.replace(RULES, spec=SpecConfig(draft=draft))
        begin = follow if rank else lambda *given: Engine(*given).generate(prompts(), GREEDY)
        with pytest.raises(RuntimeError, match="on purpose"):
            begin(model, rules)

    World(ParallelConfig(tp_size=2)).run(work)


# ---- processes


@pytest.mark.again
def test_processes_propose_what_threads_do(folders, wanted, tmp_path):
    """Two ranks over gloo, which share the tokens of the latent KV."""
    ranks = Spawned(["drafts"], 2, out=tmp_path, folder=folders["all"]).wait()
    got, other = ranks.found("drafts")
    assert other is None
    assert_same(got, wanted("radixark"))
