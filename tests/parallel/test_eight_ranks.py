"""Eight ranks: every layout alone and in pairs equals one rank; as threads, and some of them as processes over gloo."""

import functools
import json

import pytest
import torch
from seeded import seed_weights
from spawned import Spawned
from test_engine_ranks import Guess
from worlds import PROMPTS, Steps, World, converse, ngrams, of_replica, part_of, rules, run_steps

from k3lib import Engine, KimiK3ForCausalLM, Mesh, ParallelConfig
from k3lib.engine import follow
from k3lib.spec.proposer import SpecConfig
from k3lib.testing import assert_close, tiny_config

LOGITS = 1e-4
pytestmark = pytest.mark.filterwarnings("ignore:.*padding behind the heads")

A2A = {"moe_exchange": "all_to_all"}
LAYOUTS = {
    # alone
    "tp8": {"tp_size": 8},
    "ep8": {"tp_size": 8, "ep_size": 8, **A2A},
    "dcp8": {"tp_size": 8, "dcp_size": 8},
    "pp8": {"pp_size": 8},
    "dp8": {"tp_size": 8, "dp_size": 8},
    # pairs and more
    "tp8-dcp2-replicated-q": {"tp_size": 8, "dcp_size": 2, "dcp_replicate_q_proj": True},
    "tp8-ep4-copies": {"tp_size": 8, "ep_size": 4, "redundant_experts": 4},
    "tp4-dp2-ep8": {"tp_size": 8, "dp_size": 2, "ep_size": 8, "shared_experts_tp_size": 2, **A2A},
    "pp2-tp4": {"pp_size": 2, "tp_size": 4, "shard_latent_projections": True},
    "pp4-tp2-dcp2": {"pp_size": 4, "tp_size": 2, "dcp_size": 2, "dcp_comm_backend": "ag_rs"},
    "pp2-dp2-tp2-dcp2-ep4": {"pp_size": 2, "tp_size": 4, "dp_size": 2, "dcp_size": 2, "ep_size": 4, **A2A},
}
PROCESSES = ("tp4-dp2-ep8", "pp2-dp2-tp2-dcp2-ep4")  # an engine over dcp8 besides


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Eight heads of each kind and eight layers; layouts without stages run the first four."""
    config = tiny_config(
        num_hidden_layers=8, kda_layers=[1, 2, 3, 5, 6, 7], full_attn_layers=[4, 8], attn_res_block_size=3,
        num_heads=8, head_dim=16, num_attention_heads=8, num_key_value_heads=8, num_experts_per_token=2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("eight")
    seed_weights(KimiK3ForCausalLM(config, dtype=torch.float32)).save_pretrained(path, experts="bf16")
    return path


@pytest.fixture(scope="module")
def whole(folder):
    """Function from steps, and whether they go through all layers, to the logits of one rank."""
    models = [part_of(folder, Mesh.single(), {"pp_size": pp}) for pp in (1, 2)]
    return functools.cache(lambda steps, staged: run_steps(models[staged], Mesh.single(), Steps(*steps)))


def check(name, rank, replica, got, whole):
    want = whole(of_replica(replica), "pp_size" in LAYOUTS[name])
    for step, (one, found) in enumerate(zip(want, got, strict=True)):
        assert_close(f"{name}, rank {rank}, step {step}", one, found, LOGITS)
        assert found.argmax(-1).equal(one.argmax(-1))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.again
            if name in ("tp8-ep4-copies", "tp8-dcp2-replicated-q", "tp4-dp2-ep8", "pp2-tp4", "pp4-tp2-dcp2")
            else (),
        )
        for name in LAYOUTS
    ],
)
def test_a_layout_of_eight_ranks_computes_what_one_rank_computes(name, folder, whole):
    """Requests shorter than the ranks that share their tokens, ranks without tokens, experts that nobody chose."""
    world = World(ParallelConfig(**LAYOUTS[name]))
    width = world.config.attention_size

    def work(mesh, rank):
        replica = rank % world.config.tp_size // width
        return replica, run_steps(part_of(folder, mesh, LAYOUTS[name]), mesh, Steps(*of_replica(replica)))

    for rank, (replica, got) in enumerate(world.run(work)):
        check(name, rank, replica, got, whole)


# ---- an engine: prefix reuse, and drafts that are verified


@pytest.fixture(scope="module")
def conversation(folder):
    """Function from whether there are stages to what one rank answers without drafts, and what it reuses."""

    @functools.cache
    def of(*, staged):
        model = part_of(folder, Mesh.single(), {"pp_size": 1 + staged})
        tokens, reused, *_ = converse(Engine(model, rules()))
        assert all(reused)
        return tokens, reused

    return of


@pytest.mark.parametrize(
    ("name", "drafts"),
    [
        pytest.param("tp8", None, marks=pytest.mark.again),
        ("dcp8", "right and wrong"),
        pytest.param("pp4-tp2-dcp2", "ngram", marks=pytest.mark.again),
    ],
    ids=str,
)
def test_an_engine_of_eight_ranks_answers_like_one(name, drafts, folder, conversation):
    spec, want = None if drafts is None else ngrams(), conversation(staged="pp_size" in LAYOUTS[name])
    if drafts == "right and wrong":
        known = [[*p, *a, *b] for p, a, b in zip(PROMPTS, want[0][:2], want[0][2:], strict=True)]
        spec = SpecConfig(draft=Guess(known), block_size=3)

    def work(mesh, rank):
        model = part_of(folder, mesh, LAYOUTS[name])
        if rank:
            return follow(model, rules(spec))
        engine = Engine(model, rules(spec))
        try:
            return converse(engine)
        finally:
            engine.close()

    (tokens, reused, proposed, accepted), *_ = World(ParallelConfig(**LAYOUTS[name])).run(work)
    assert (tokens, reused) == want
    assert (drafts is None) == (proposed == 0)
    assert drafts is None or 0 < accepted < proposed


# ---- processes


@pytest.fixture(scope="module")
def processes(folder, tmp_path_factory):
    """Eight processes over gloo, started once, ended."""
    layouts = json.dumps({name: LAYOUTS[name] for name in PROCESSES})
    out = tmp_path_factory.mktemp("processes")
    return Spawned(["layouts", "engine"], 8, out=out, folder=folder, LAYOUTS=layouts, SHORT="1").wait()


@pytest.mark.again
def test_eight_processes_compute_what_one_rank_computes(processes, whole):
    for rank, found in enumerate(processes.found("layouts")):
        assert set(found) == set(PROCESSES)
        for name, (replica, got) in found.items():
            check(name, rank, replica, got, whole)


@pytest.mark.again
def test_an_engine_of_eight_processes_answers_like_one(processes, conversation):
    (tokens, reused, proposed, accepted), *_ = processes.found("engine")
    assert (tokens, reused) == conversation(staged=False)
    assert 0 < accepted < proposed
    assert processes.codes == [0] * 8
