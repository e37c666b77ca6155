"""Layouts: what divides what, which ranks form a group; pipeline stages and what travels between them."""

import json
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from worlds import World

from k3lib import Batch, KimiK3ForCausalLM, Mesh, ParallelConfig
from k3lib.cache import CacheConfig, HybridCache
from k3lib.checkpoint import Folder, fingerprint
from k3lib.errors import CheckpointError, ConfigError
from k3lib.parallel import LOCAL, RankView, StagePayload, dcp, stage_layers
from k3lib.parallel.pp import features_before, payload_rows
from k3lib.server.tiny import make_tiny
from k3lib.testing import tiny_config


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp_size": 0}, "tp_size must be an integer >= 1, got 0"),
        ({"ep_size": True}, "ep_size must be an integer >= 1, got True"),
        ({"tp_size": 4, "dp_size": 3}, "dp_size=3 must divide tp_size=4"),
        ({"tp_size": 4, "dcp_size": 3}, "dcp_size=3 must divide tp_size=4: DCP ranks are taken from the TP group"),
        ({"tp_size": 8, "dp_size": 4, "dcp_size": 4}, "dcp_size=4 must divide tp_size=8 over dp_size=4.*has 2 ranks"),
        ({"tp_size": 4, "ep_size": 3}, "ep_size=3 must divide tp_size=4"),
        ({"tp_size": 4, "ep_size": 2, "moe_exchange": "all_to_all"}, "needs ep_size=2 equal to tp_size=4"),
        ({"moe_exchange": "nccl"}, "moe_exchange='nccl' is not one of"),
        ({"tp_size": 4, "shared_experts_tp_size": 3}, "shared_experts_tp_size=3 must divide the 4 ranks"),
        ({"tp_size": 2, "redundant_experts": 2}, "redundant_experts=2 needs ep_size > 1, got ep_size=1"),
        ({"redundant_experts": -1}, "redundant_experts must be an integer >= 0, got -1"),
        ({"dcp_comm_backend": "a2a"}, "dcp_comm_backend='a2a' needs dcp_size > 1, got dcp_size=1"),
        ({"tp_size": 2, "dcp_size": 2, "dcp_comm_backend": "x"}, "dcp_comm_backend='x' is not one of"),
        ({"dcp_replicate_q_proj": True}, "dcp_replicate_q_proj=True needs dcp_size > 1.*got dcp_size=1"),
        ({"pp_size": 2, "pp_partition": (9,)}, r"pp_partition=\(9,\) names 1 stages, pp_size=2"),
        (
            {"tp_size": 2, "ep_size": 2, "moe_exchange": "all_to_all", "shard_latent_projections": True},
            "shard_latent_projections=True needs every rank",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_sizes_that_do_not_fit_each_other_are_refused(sizes, message):
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(**sizes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp_size": 3}, r"tp_size=3 does not cut KDA heads \(4\) evenly; use one of 1, 2, 4"),
        ({"tp_size": 6, "dp_size": 2}, r"tp_size=6 over dp_size=2 does not cut KDA heads \(4\)"),
        ({"pp_size": 10}, "pp_size=10 exceeds the 9 layers"),
        ({"pp_size": 2, "pp_partition": (4, 4)}, r"pp_partition=\(4, 4\) must be positive and add up to the 9 layers"),
        ({"tp_size": 32, "dp_size": 32, "ep_size": 32}, r"ep_size=32 is more ranks than there are experts \(16\)"),
        ({"tp_size": 4, "ep_size": 4, "redundant_experts": 2}, "ep_size=4 does not divide .*num_experts=16.*=2 = 18"),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_refused_before_it_is_built(sizes, message):
    mesh = Mesh.view(ParallelConfig(**sizes), 0)
    with pytest.raises(ConfigError, match=message):
        KimiK3ForCausalLM(tiny_config(), mesh=mesh, device="meta")


def test_groups_of_ranks_by_axis():
    axes = ParallelConfig(tp_size=8, dp_size=2, dcp_size=2, ep_size=4, pp_size=2, shared_experts_tp_size=2).axes()
    assert axes["tp"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert axes["dp"][:4] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert axes["dcp"][:2] == axes["shared"][:2] == axes["expert_tp"][:2] == [[0, 1], [2, 3]]
    assert axes["ep"] == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    assert axes["pp"][:2] == [[0, 8], [1, 9]]


@given(st.sampled_from([1, 2, 3, 4]), st.data())
def test_every_axis_is_a_partition_of_all_ranks(pp, data):
    tp = data.draw(st.sampled_from([1, 2, 4, 6, 8, 12]))
    divisors = [n for n in range(1, tp + 1) if tp % n == 0]
    dp, ep = data.draw(st.sampled_from(divisors)), data.draw(st.sampled_from(divisors))
    width = tp // dp
    inner = [n for n in range(1, width + 1) if width % n == 0]
    config = ParallelConfig(
        tp_size=tp, dp_size=dp, ep_size=ep, pp_size=pp, dcp_size=data.draw(st.sampled_from(inner)),
        shared_experts_tp_size=data.draw(st.sampled_from(inner)),
    )  # fmt: skip
    sizes = {"pp": pp, "dp": dp, "tp": width, "dcp": config.dcp_size, "ep": ep, "expert_tp": tp // ep}
    for name, rows in config.axes().items():
        assert sorted(rank for row in rows for rank in row) == list(range(config.world_size)), name
        assert all(len(row) == sizes.get(name, len(row)) for row in rows), name
        assert all(row == sorted(row) for row in rows), name
    rank = data.draw(st.integers(0, config.world_size - 1))
    mesh = Mesh.view(config, rank)
    assert mesh.tp.rank == rank % width
    assert mesh.dcp.rank == mesh.tp.rank % config.dcp_size  # contiguous inside the attention ranks
    assert mesh.pp.rank == rank // tp
    assert mesh.ep.rank * mesh.expert_tp.size + mesh.expert_tp.rank == rank % tp


def test_groups_made_by_hand_say_what_is_missing():
    assert Mesh(tp=RankView(0, 2)).spread(0, 8).tp.size == 2
    assert Mesh(tp=RankView(0, 2), ep=RankView(0, 2)).spread(0, 8).tp is LOCAL
    with pytest.raises(ConfigError, match="ep has 2 ranks, tp 4 and dp 1: give expert_tp"):
        Mesh(tp=RankView(0, 4), ep=RankView(0, 2)).spread(0, 8)
    with pytest.raises(ConfigError, match="rank=2 is not one of the 2 ranks"):
        Mesh.view(ParallelConfig(tp_size=2), 2)


def test_without_the_environment_of_torchrun_a_mesh_says_how_to_start(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"2 ranks need RANK, WORLD_SIZE.* torchrun --nproc-per-node 2"):
        Mesh.create(ParallelConfig(tp_size=2))
    assert Mesh.create(ParallelConfig()).tp is LOCAL
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"tp_size=2 x pp_size=1 needs 2 ranks, WORLD_SIZE is 4"):
        Mesh.create(ParallelConfig(tp_size=2))


# ---- stages


def test_stages_of_the_released_model():
    assert [len(s) for s in stage_layers(93, 2)] == [46, 47]  # the last ones are longer
    assert [len(s) for s in stage_layers(93, 4)] == [23, 23, 23, 24]
    assert stage_layers(9, 3, (1, 6, 2)) == (range(0, 1), range(1, 7), range(7, 9))
    # one running sum and the finished blocks of twelve layers
    assert [payload_rows(layer, 12) for layer in (46, 31, 62, 92, 12, 13)] == [5, 4, 7, 9, 2, 3]
    assert payload_rows(46, 12) * 7168 * 2 == 71_680
    assert payload_rows(92, 12) * 7168 * 2 == 129_024
    assert payload_rows(5, None) == 1


@given(st.integers(1, 120), st.integers(1, 120))
def test_stages_cover_all_layers_in_order(layers, size):
    if size > layers:
        with pytest.raises(ConfigError, match=f"pp_size={size} exceeds the {layers} layers"):
            stage_layers(layers, size)
        return
    stages = stage_layers(layers, size)
    assert [layer for stage in stages for layer in stage] == list(range(layers))
    lengths = [len(stage) for stage in stages]
    assert lengths == sorted(lengths)
    assert lengths[-1] - lengths[0] <= 1


@pytest.mark.parametrize("partition", [(9,), (3, 3, 3), (0, 9), (10, -1), (4, 4), (4.0, 5)])
def test_a_partition_by_hand_must_add_up(partition):
    with pytest.raises(ConfigError, match="pp_partition="):
        stage_layers(9, 2, partition)


@given(st.integers(0, 5), st.integers(0, 4), st.integers(0, 3))
def test_a_payload_survives_packing(tokens, blocks, features):
    payload = StagePayload(
        torch.randn(tokens, 6), torch.randn(tokens, blocks, 6), torch.randn(tokens, features * 6) if features else None
    )
    got = StagePayload.unpack(payload.pack(), hidden=6, blocks=blocks, features=features * 6)
    assert got.prefix.equal(payload.prefix)
    assert got.bank.equal(payload.bank)
    assert (got.features is None) == (features == 0)
    assert got.features is None or got.features.equal(payload.features)
    with pytest.raises(ConfigError, match="a stage payload has"):
        StagePayload.unpack(payload.pack(), hidden=6, blocks=blocks + 1, features=features * 6)


def test_a_feature_belongs_to_the_stage_of_its_reader():
    assert features_before((0, 3, 8), 4) == (0,)  # the value after layer 3 is read by layer 4
    assert features_before((0, 3, 8), 5) == (0, 1)
    assert features_before((), 5) == ()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_share_the_rows_of_tokens_and_no_state(size):
    """Case I2: each of 100 tokens at a row of one rank; pages are as much wider as ranks are many; states whole."""
    config, page, tokens = tiny_config(), 16, 100
    used = -(-tokens // (page * size))
    held = []
    for rank in range(size):
        sizes = CacheConfig(num_pages=used, num_slots=2, page_size=page)
        pool = HybridCache.allocate(config, sizes, tp_size=4, dcp_size=size, dcp_rank=rank).pool
        assert pool.kda.state.shape[2] == config.text.kda.num_heads // 4  # of the heads, however many share tokens
        batch = Batch.of([tokens], page_tables=[list(range(1, 1 + used))], page_size=page * size)
        dcp.place_rows(batch, page, size, rank)
        here = {position: row for position, row in enumerate(batch.rows.tolist()) if row}
        assert list(here) == list(range(rank, tokens, size))
        assert sorted(here.values()) == list(range(page, page + len(here)))  # behind the null page, without gaps
        held += here
    assert sorted(held) == list(range(tokens))


# ---- refused on every rank


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp_size": 3},
        {"tp_size": 6, "dp_size": 2},
        {"tp_size": 32, "dp_size": 32, "ep_size": 32},
        {"tp_size": 2, "pp_size": 10},
        {"tp_size": 4, "ep_size": 4, "redundant_experts": 2},
    ],
    ids="-".join,
)
def test_a_layout_that_does_not_fit_is_refused_on_every_rank_alike(sizes):
    layout, said = ParallelConfig(**sizes), set()
    for rank in range(layout.world_size):
        with pytest.raises(ConfigError) as refused:
            KimiK3ForCausalLM(tiny_config(), mesh=Mesh.view(layout, rank), device="meta")
        said.add(str(refused.value))
    assert len(said) == 1


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints that ranks may confuse: other weights, another configuration, a tensor stored otherwise."""
    root = tmp_path_factory.mktemp("folders")
    make_tiny(root / "first", vision=False)
    make_tiny(root / "weights", seed=1, vision=False)
    for name in ("same", "config", "stored"):
        shutil.copytree(root / "first", root / name)
    config = json.loads((root / "config" / "config.json").read_text())
    config["text_config"]["rms_norm_eps"] *= 2
    (root / "config" / "config.json").write_text(json.dumps(config))
    file = root / "stored" / "model.safetensors"
    tensors = load_file(file)
    norm = next(name for name in tensors if name.endswith("model.norm.weight"))
    tensors[norm] = tensors[norm].float()
    save_file(tensors, file, metadata={"format": "pt"})
    return root


@pytest.mark.parametrize(
    ("names", "differing"),
    [
        (("first", "first", "weights", "first"), "2"),
        (("first", "config", "first", "config"), "1, 3"),
        (("stored", "first", "first", "first"), "1, 2, 3"),
        (("first", "same", "first", "same"), None),
    ],
    ids=str,
)
def test_other_files_on_a_rank_are_refused_on_every_rank(folders, names, differing):
    def work(mesh, rank):
        try:
            KimiK3ForCausalLM.from_pretrained(folders / names[rank], mesh=mesh, progress=False)
        except ConfigError as error:
            return str(error)
        return None

    want = differing and f"the checkpoint differs between ranks: {differing} of 4 have another than rank 0"
    assert World(ParallelConfig(tp_size=4, ep_size=4)).run(work) == [want] * 4


def test_a_fingerprint_is_of_kinds_and_samples(folders):
    def of(name):
        folder = Folder(folders / name)
        return fingerprint(folder.config(), folder.tensors())

    assert of("first") == of("same")
    assert len({of(name) for name in ("first", "weights", "config", "stored")}) == 4
    stored = Folder(folders / "first").tensors()
    gone = {name: info._replace(file=folders / "nowhere") for name, info in stored.items()}
    with pytest.raises(CheckpointError, match="cannot be read"):
        fingerprint({}, gone)
