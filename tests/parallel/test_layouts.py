"""Every layout computes what one rank computes. Ranks are threads; other tests start processes."""

import functools

import pytest
import torch
from seeded import seed_weights
from worlds import Steps, World, load, of_replica, run_steps

from k3lib import Batch, Engine, EngineConfig, KimiK3ForCausalLM, Mesh, ParallelConfig, SamplingParams
from k3lib.batch import FeatureTap, RouteTap
from k3lib.cache import CacheConfig
from k3lib.cache.pools import HybridPool
from k3lib.checkpoint import Folder, plan_load
from k3lib.engine import follow
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


# ---- cases from the field


def test_case_i2_every_rank_stores_its_own_tokens_and_the_whole_state(folder):
    """100 tokens over four ranks and pages of 16 rows: each token once, on its owner; the state of all tokens."""
    ids, page, size = torch.arange(100) * 7 % 512, 16, 4

    def prefill(mesh, _):
        model = load(folder, mesh)
        sizes = CacheConfig(num_pages=8, num_slots=1, page_size=page)
        pools = HybridPool(model.config.text, sizes, dtype=model.dtype, device="cpu", tp_size=mesh.tp.size)
        pages = [[3, 1, 7, 2, 5, 4, 6][: -(-100 // (page * mesh.dcp.size))]]
        batch = Batch.of([100], slots=[1], page_tables=pages, page_size=page * mesh.dcp.size, input_ids=ids)
        batch.place_rows(page, dcp_size=mesh.dcp.size, dcp_rank=mesh.dcp.rank)
        model(batch, pools, logits="last")
        return pools, batch.rows

    (whole, rows), *_ = World(ParallelConfig()).run(prefill)
    found = World(ParallelConfig(tp_size=size, dcp_size=size)).run(prefill)
    for layer in (2, 4):
        want = whole.view(layer).pages.flatten(0, 1)[rows]
        seen = torch.zeros(100, dtype=torch.int64)
        for rank, (pools, mine) in enumerate(found):
            flat = pools.view(layer).pages.flatten(0, 1)
            stored = mine > 0
            assert stored.nonzero()[:, 0].tolist() == list(range(rank, 100, size))
            assert_close(f"layer {layer}, rank {rank}", want[stored], flat[mine[stored]], LOGITS)
            assert int(flat.any(-1).sum()) == int(stored.sum())  # row 0 took nothing, and no other row
            seen += stored
        assert seen.eq(1).all()
    for rank, (pools, _) in enumerate(found):
        for layer in (0, 1, 3):
            want = whole.view(layer).state[1]
            heads = slice(rank * len(want) // size, (rank + 1) * len(want) // size)
            assert_close(f"state {layer}, rank {rank}", want[heads], pools.view(layer).state[1], LOGITS)


@pytest.mark.parametrize("kv", ["float32", "fp8_e4m3"])
@pytest.mark.parametrize("size", [2, 4])
def test_case_i3_a_cached_prefix_is_extended_in_chunks(size, kv, folder):
    """Two boundaries are reused, 100 tokens come in two chunks, and some are decoded."""
    rules = EngineConfig(
        cache=CacheConfig(num_pages=48, num_slots=8, page_size=4, checkpoint_grid=16, kv_cache_dtype=kv),
        chunked_prefill_size=64,
        max_running_requests=2,
    )
    prefix, more = (torch.arange(33) * 11 % 512).tolist(), (torch.arange(100) * 5 % 512).tolist()

    def talk(engine):
        params = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
        outs = [engine.generate([prompt], params)[0] for prompt in (prefix, prefix[:32] + more)]
        return [(out.token_ids, out.cached_tokens) for out in outs]

    def work(mesh, rank):
        model = load(folder, mesh)
        if rank:
            return follow(model, rules)
        engine = Engine(model, rules)
        try:
            return talk(engine)
        finally:
            engine.close()

    want = talk(Engine(load(folder, Mesh.single()), rules))
    assert want[1][1] == 32
    assert World(ParallelConfig(tp_size=size, dcp_size=size)).run(work)[0] == want
