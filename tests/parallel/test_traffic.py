"""What ranks really send, counted in their groups, against the formulas."""

import pytest
import torch
from worlds import Steps, World, new_pool

from k3lib import KimiK3ForCausalLM, ParallelConfig
from k3lib.parallel.traffic import expected_ranks, traffic
from k3lib.testing import tiny_config

CONFIG = tiny_config(
    num_hidden_layers=5, kda_layers=[1, 2, 4], full_attn_layers=[3, 5], attn_res_block_size=2, num_experts=8,
    num_experts_per_token=2,
)  # fmt: skip

LAYOUTS = {
    "tp4": {"tp_size": 4},
    "tp4-latent-shared2": {"tp_size": 4, "shard_latent_projections": True, "shared_experts_tp_size": 2},
    "dp2-of-4": {"tp_size": 4, "dp_size": 2, "ep_size": 2},
    "dcp4": {"tp_size": 4, "dcp_size": 4},
    "dcp4-ag_rs": {"tp_size": 4, "dcp_size": 4, "dcp_comm_backend": "ag_rs"},
    "dcp2-replicated-q": {"tp_size": 4, "dcp_size": 2, "dcp_replicate_q_proj": True},
    "a2a4-shared2": {"tp_size": 4, "ep_size": 4, "moe_exchange": "all_to_all", "shared_experts_tp_size": 2},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_send_what_the_formulas_say(name):
    """A decode step of as many tokens as divide evenly; without the logits, which are counted by themselves."""
    layout = ParallelConfig(**LAYOUTS[name])
    requests = 16
    world = World(layout)
    steps = Steps((("decode", (1,) * requests),))

    def work(mesh, _):
        model = KimiK3ForCausalLM(CONFIG, mesh=mesh, dtype=torch.float32)
        pools = new_pool(model, mesh, num_slots=requests, num_pages=8 * requests)
        (batch,) = steps.batches(512, mesh)
        batch.replica_tokens = (requests,) * layout.dp_size
        model.hidden(batch, pools)

    world.run(work)
    sent = sum(sum(calls) for calls in world.traffic.values()) / layout.world_size / requests
    kinds = traffic(CONFIG.text, layout, itemsize=4)
    want = sum(kind.bytes_per_token for kind in kinds)
    if layout.moe_exchange == "all_to_all":  # which ranks a token visits is chance; and counts travel
        chance = next(kind.bytes_per_token for kind in kinds if kind.name == "routed experts")
        assert abs(sent - want) < 0.25 * chance
    else:
        assert sent == pytest.approx(want, rel=1e-9)


def test_a_prefill_exchanges_no_queries():
    names = [kind.name for kind in traffic(CONFIG.text, ParallelConfig(tp_size=4, dcp_size=4), decode=False)]
    assert names == ["hidden states", "routed experts", "shared experts"]
    assert traffic(CONFIG.text, ParallelConfig()) == []


def test_a_token_visits_fewer_ranks_than_it_has_experts():
    assert expected_ranks(896, 896, 16) == pytest.approx(16)
    assert expected_ranks(896, 1, 16) == 1
    assert expected_ranks(8, 4, 2) == pytest.approx(4 * (1 - 15 / 28))


def test_the_deepest_payload_counts():
    kinds = {kind.name: kind for kind in traffic(CONFIG.text, ParallelConfig(pp_size=3))}
    assert kinds["stage payload"].bytes_per_token == 3 * 96 * 2  # in front of layer 3: the sum and two blocks
    sharded = ParallelConfig(pp_size=3, tp_size=2, ep_size=2, moe_exchange="all_to_all")
    kinds = {kind.name: kind for kind in traffic(CONFIG.text, sharded)}
    assert kinds["stage payload"].bytes_per_token == 3 * 96
