"""Every layout computes what one rank computes. Ranks are threads; other tests start processes."""

import functools

import pytest
import torch
from seeded import seed_weights
from worlds import Steps, World, load, run_steps

from k3lib import KimiK3ForCausalLM, Mesh, ParallelConfig
from k3lib.batch import FeatureTap, RouteTap
from k3lib.checkpoint import Folder, plan_load
from k3lib.errors import ConfigError
from k3lib.parallel import RankView
from k3lib.testing import assert_close, random_batch, tiny_config

LOGITS = 1e-4
pytestmark = pytest.mark.filterwarnings("ignore:.*padding behind the heads")

LAYOUTS = {
    "tp4-latent-shared2": {"tp_size": 4, "shard_latent_projections": True, "shared_experts_tp_size": 2},
    "tp4-ep2": {"tp_size": 4, "ep_size": 2},
    "tp2-ep2-copies": {"tp_size": 2, "ep_size": 2, "redundant_experts": 4},
    "a2a4-shared2": {"tp_size": 4, "ep_size": 4, "moe_exchange": "all_to_all", "shared_experts_tp_size": 2},
    "a2a2-copies": {"tp_size": 2, "ep_size": 2, "moe_exchange": "all_to_all", "redundant_experts": 2},
    "dp2-tp2": {"tp_size": 4, "dp_size": 2},
    "dp2-a2a4": {"tp_size": 4, "dp_size": 2, "ep_size": 4, "moe_exchange": "all_to_all"},
    "dcp4-ag_rs": {"tp_size": 4, "dcp_size": 4, "dcp_comm_backend": "ag_rs"},
    "dcp2-of-4-replicated-q": {"tp_size": 4, "dcp_size": 2, "dcp_replicate_q_proj": True},
    "dcp2-a2a": {"tp_size": 2, "dcp_size": 2, "ep_size": 2, "moe_exchange": "all_to_all"},
    "pp3-by-hand": {"pp_size": 3, "pp_partition": (1, 3, 1)},
    "pp2-dcp2": {"pp_size": 2, "tp_size": 2, "dcp_size": 2},
    "pp2-a2a2": {"pp_size": 2, "tp_size": 2, "ep_size": 2, "moe_exchange": "all_to_all"},
}


@pytest.fixture(scope="module")
def tiny():
    """A seeded model whose experts are plain, so that every width can be cut."""
    config = tiny_config(
        num_hidden_layers=5, kda_layers=[1, 2, 4], full_attn_layers=[3, 5], attn_res_block_size=2, num_experts=8,
        num_experts_per_token=2,
    )  # fmt: skip
    return seed_weights(KimiK3ForCausalLM(config, dtype=torch.float32)).eval()


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    path = tmp_path_factory.mktemp("whole")
    tiny.save_pretrained(path, experts="bf16")
    return path


@pytest.fixture(scope="module")
def whole(folder):
    """Function from steps to the logits of one rank."""
    model = load(folder, Mesh.single())
    return functools.cache(lambda steps: run_steps(model, Mesh.single(), Steps(*steps)))


def of_replica(replica):
    """Steps of a replica: others than its neighbour's, of another size."""
    if replica % 2 == 0:
        return ((("prefill", (13, 3)), ("prefill", (6, 2)), ("decode", (1, 1)), ("verify", (3, 2))), replica)
    return ((("prefill", (2,)), ("prefill", (0,)), ("decode", (1,)), ("verify", (1,))), replica)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_computes_what_one_rank_computes(name, folder, whole):
    world = World(ParallelConfig(**LAYOUTS[name]))
    width = world.config.attention_size

    def work(mesh, rank):
        replica = rank % world.config.tp_size // width
        return replica, run_steps(load(folder, mesh), mesh, Steps(*of_replica(replica)))

    for rank, (replica, got) in enumerate(world.run(work)):
        for step, (want, found) in enumerate(zip(whole(of_replica(replica)), got, strict=True)):
            assert_close(f"{name}, rank {rank}, step {step}", want, found, LOGITS)
            assert found.argmax(-1).equal(want.argmax(-1))


def test_twelve_heads_over_three_ranks_and_a_vocabulary_that_does_not_divide(tmp_path):
    """512 rows over three ranks are 171, 171 and 170."""
    config = tiny_config(
        num_attention_heads=12, num_key_value_heads=12, num_heads=12, head_dim=8, intermediate_size=96,
        moe_intermediate_size=48, num_experts=6, num_experts_per_token=2, num_hidden_layers=4,
        kda_layers=[1, 2, 3], full_attn_layers=[4],
    )  # fmt: skip
    seed_weights(KimiK3ForCausalLM(config, dtype=torch.float32)).save_pretrained(tmp_path, experts="bf16")
    steps = Steps()
    want = run_steps(load(tmp_path, Mesh.single()), Mesh.single(), steps)
    for sizes in ({"tp_size": 3}, {"tp_size": 3, "dcp_size": 3, "ep_size": 3, "moe_exchange": "all_to_all"}):
        for rank, got in enumerate(
            World(ParallelConfig(**sizes)).run(lambda m, _: run_steps(load(tmp_path, m), m, steps))
        ):
            for step, (one, other) in enumerate(zip(want, got, strict=True)):
                assert_close(f"rank {rank}, step {step}", one, other, LOGITS)


@pytest.mark.parametrize("kind", ["prefix", "mixture"])
@pytest.mark.parametrize("sizes", [{"pp_size": 3}, LAYOUTS["a2a4-shared2"]], ids=["pp3", "sp4"])
def test_draft_features_arrive_whole_at_the_end(sizes, kind, folder):
    """Taps inside a stage, at its last layer, and at the last layer of the model; tokens that do not divide."""
    layers, batch = (0, 1, 2, 4), random_batch([5, 2], 512)
    taps = FeatureTap(layers, kind)
    with torch.no_grad():
        load(folder, Mesh.single())(batch, taps=taps)

    def work(mesh, _):
        tap = FeatureTap(layers, kind)
        load(folder, mesh)(random_batch([5, 2], 512), taps=tap)
        return tap.out

    ends = World(ParallelConfig(**sizes)).run(work)
    for found in ends if "pp_size" not in sizes else ends[-1:]:
        assert_close("features", taps.out, found, LOGITS)


def test_chosen_experts_are_the_same_over_ranks_and_can_be_replayed(folder):
    batch = random_batch([4, 3], 512)
    taps = RouteTap(torch.zeros(7, 4, 2, dtype=torch.int32), replay=False)
    batch.routes = taps
    with torch.no_grad():
        want = load(folder, Mesh.single())(batch)

    def work(mesh, _):
        model, mine = load(folder, mesh), random_batch([4, 3], 512)
        mine.routes = RouteTap(torch.zeros(7, 4, 2, dtype=torch.int32), replay=False)
        model(mine)
        recorded, mine.routes = mine.routes.ids, RouteTap(taps.ids, replay=True)
        return recorded, model(mine)

    for recorded, logits in World(ParallelConfig(tp_size=2, ep_size=2, redundant_experts=2)).run(work):
        assert recorded.equal(taps.ids)
        assert_close("replayed", want, logits, LOGITS)

    def refused(mesh, _):
        mine = random_batch([4, 3], 512)
        mine.routes = taps
        with pytest.raises(ConfigError, match="routes: tokens are sharded over 2 ranks"):
            load(folder, mesh)(mine)

    World(ParallelConfig(tp_size=2, ep_size=2, moe_exchange="all_to_all")).run(refused)


def test_a_rank_reads_its_experts_and_its_layers_only(folder, tiny):
    """Plans of loading, on any machine: together the ranks read every expert once, and no rank more than its part."""
    config = ParallelConfig(tp_size=4, ep_size=4, pp_size=2)
    stored = Folder(folder).tensors()
    seen = []
    for rank in range(config.world_size):
        mesh = Mesh.view(config, rank)
        model = KimiK3ForCausalLM(tiny.config, mesh=mesh, dtype=torch.float32, device="meta")
        plan = plan_load(model, stored, tiny.config.text, torch.float32)
        assert plan.problems() == []
        names = [name for job in plan.jobs for name in job.names]
        mine = [name for name in names if ".experts." in name and "shared" not in name]
        assert len(mine) == 2 * 3 * sum(layer > 0 for layer in mesh.stage(5))  # two experts of three matrices a layer
        layers = {int(name.split("layers.")[1].split(".")[0]) for name in names if "layers." in name}
        assert layers == set(mesh.stage(5))
        assert any("embed_tokens" in name for name in names) == (mesh.pp.rank == 0)
        assert any("lm_head" in name for name in names) == (mesh.pp.rank == 1)
        seen += mine
    assert sorted(seen) == sorted(name for name in stored if ".experts." in name and "shared" not in name)


def test_experts_of_a_rank_can_stay_in_their_files(folder, whole):
    def work(mesh, _):
        return run_steps(load(folder, mesh, resident_experts=1), mesh, Steps(*of_replica(0)))

    for got in World(ParallelConfig(tp_size=2, ep_size=2)).run(work):
        assert_close("logits", whole(of_replica(0))[-1], got[-1], LOGITS)


def test_weights_of_a_rank_are_replaced_in_place(folder, tiny):
    other = seed_weights(KimiK3ForCausalLM(tiny.config, dtype=torch.float32), seed=5)
    batch = random_batch([4], 512)
    with torch.no_grad():
        want = other(batch)
    folder_of_other = folder.parent / "other"
    other.save_pretrained(folder_of_other, experts="bf16")

    def work(mesh, _):
        model = load(folder, mesh)
        model.load_weights(folder_of_other)
        return model(random_batch([4], 512))

    for got in World(ParallelConfig(tp_size=2, ep_size=2)).run(work):
        assert_close("logits", want, got, LOGITS)


def test_part_of_a_model_is_not_saved(tiny, tmp_path):
    """Also where no width is cut: a replica's rank with some of the experts."""
    mesh = Mesh.view(ParallelConfig(tp_size=2, dp_size=2, ep_size=2), 1)
    with pytest.raises(ConfigError, match="only a whole model can be saved"):
        KimiK3ForCausalLM(tiny.config, mesh=mesh, dtype=torch.float32).save_pretrained(tmp_path)


def test_a_stage_takes_what_the_one_before_gives(tiny):
    mesh = Mesh.view(ParallelConfig(pp_size=2), 1)
    with pytest.raises(ConfigError, match=r"layers=range\(0, 3\) with pp_size=2"):
        KimiK3ForCausalLM(tiny.config, mesh=mesh, layers=range(3), device="meta")
    first, last = (
        KimiK3ForCausalLM(tiny.config, mesh=mesh.replace(pp=RankView(r, 2)), dtype=torch.float32) for r in (0, 1)
    )
    batch = random_batch([3], 512)
    with torch.no_grad():
        payload = first.model.run_stage(batch)
        assert payload.pack().shape == last.model.payload_like(batch).shape == (3, 2 * 96)  # layers 0 and 1: one block
        with pytest.raises(ConfigError, match=r"layers 2\.\.4 needs a payload"):
            last.model.run_stage(batch)
        with pytest.raises(ConfigError, match=r"layers 0\.\.1 begins with the embedding"):
            first.model.run_stage(batch, None, payload)
        payload.bank = payload.bank[:, :0]
        with pytest.raises(ConfigError, match=r"begins at layer 2 needs 1 finished blocks .*got 0"):
            last.model.run_stage(batch, None, payload)
