"""Four processes over gloo: groups, meshes, layouts of the golden models, and a rank that dies. Started once.

Two more starts: a step that fails on a rank, and on rank 0.
"""

import functools
import json

import pytest
import torch
from safetensors import safe_open
from seeded import draw, seed_weights
from spawned import Spawned
from worlds import Steps, load, of_replica, run_steps

from k3lib import Batch, KimiK3ForCausalLM, Mesh
from k3lib.ops import KDAParams, kda_chunk
from k3lib.parallel.health import EXIT_STATUS
from k3lib.testing import assert_close, tiny_config

SIZE = 4
CHECKS = ["collectives", "layouts", "golden_greedy", "micro_batches", "long_sequence", "refusals", "death"]
LAYOUTS = {
    "tp x dcp": {"tp_size": 4, "dcp_size": 4},
    "dp x ep": {"tp_size": 4, "dp_size": 2, "ep_size": 4, "moe_exchange": "all_to_all"},
    "pp x tp": {"tp_size": 2, "pp_size": 2},
}
# of two and of three ranks; 12 heads over three
FEW = {
    2: {"tp x dcp": {"tp_size": 2, "dcp_size": 2}, "dp x ep": {"tp_size": 2, "dp_size": 2, "ep_size": 2}},
    3: {
        "tp x dcp": {"tp_size": 3, "dcp_size": 3},
        "tp x ep": {"tp_size": 3, "ep_size": 3, "moe_exchange": "all_to_all"},
    },
}
PACKED = {"tiny_k3_dev_mxfp4": 2e-4, "tiny_k3_wide_nvfp4": 2e-4}
pytestmark = pytest.mark.filterwarnings("ignore:.*padding behind the heads")


@pytest.fixture(scope="module")
def expected(golden):
    """Prompt, greedy tokens and their logits of each packed checkpoint."""
    found = {}
    for name in PACKED:
        with safe_open(golden / f"{name}_expected.safetensors", "pt") as file:
            found[name] = {
                p: tuple(
                    file.get_tensor(key) for key in (f"{p}.ids", f"fp32.{p}.greedy_ids", f"fp32.{p}.greedy_logits")
                )
                for p in ("p0",)
            }
    return found


@pytest.fixture(scope="module")
def results(golden, expected, tmp_path_factory):
    """The ranks, ended."""
    out = tmp_path_factory.mktemp("ranks")
    prompts = {name: {p: ids for p, (ids, *_) in cases.items()} for name, cases in expected.items()}
    torch.save(prompts, out / "prompts.pt")
    env = {"PROMPTS": str(out / "prompts.pt"), "LAYOUTS": json.dumps(LAYOUTS), "MODEL": "tiny_k3_dev"}
    return Spawned(CHECKS, SIZE, out=out, folder=golden, **env).wait()


def test_groups_move_what_they_should(results):
    for rank, found in enumerate(results.found("collectives")):
        assert found, rank
        assert [name for name, right in found.items() if not right] == [], rank


def check_layouts(every, folder, count):
    model, mesh = load(folder, Mesh.single()), Mesh.single()
    whole = functools.cache(lambda replica: run_steps(model, mesh, Steps(*of_replica(replica))))
    for rank, found in enumerate(every):
        assert len(found) == count
        for name, (replica, got) in found.items():
            for step, (one, other) in enumerate(zip(whole(replica), got, strict=True)):
                assert_close(f"{name}, rank {rank}, step {step}", one, other, 1e-4)
                assert other.argmax(-1).equal(one.argmax(-1))


def test_layouts_compute_what_one_rank_computes(results, golden):
    check_layouts(results.found("layouts"), golden / "tiny_k3_dev", len(LAYOUTS))


def test_packed_checkpoints_generate_the_golden_tokens(results, expected):
    for rank, found in enumerate(results.found("golden_greedy")):
        assert len(found) == sum(len(cases) for cases in expected.values())
        for (name, prompt), (tokens, logits) in found.items():
            _, ids, want = expected[name][prompt]
            assert tokens == ids[:6].tolist(), (rank, name, prompt)
            assert (logits - want[:6]).abs().max() <= PACKED[name], (rank, name, prompt)


def test_micro_batches_fill_a_pipeline(results, golden):
    model = load(golden / "tiny_k3_dev", Mesh.single())
    ids = torch.arange(40) * 7 % 512
    with torch.no_grad():
        first = model(Batch.pack([torch.cat([ids[:9], ids[12:20]])]))
        want = [first[8], model(Batch.pack([ids[9:12]]))[-1], first[16], model(Batch.pack([ids[20:21]]))[-1]]
    for found in results.found("micro_batches"):
        for one, other in zip(want, found, strict=True):
            assert_close("logits", one[None], other, 1e-4)


def test_a_sequence_split_over_processes_ends_in_the_state_of_the_whole(results):
    heads, keys, values, length = 2, 8, 4, 300
    every = results.found("long_sequence")
    tensors = [draw(length, heads, n, seed=i) for i, n in enumerate((keys, keys, values, keys))]
    state = draw(3, heads, values, keys, seed=12)
    want = kda_chunk(
        *tensors,
        draw(length, heads, seed=9),
        params=KDAParams(draw(heads, seed=10), draw(heads, keys, seed=11), -5.0),
        state=state,
        slots=torch.tensor([2], dtype=torch.int32),
        cu_seqlens=torch.tensor([0, length], dtype=torch.int32),
        scale=keys**-0.5,
    )
    assert_close("out", want, torch.cat([out for out, _ in every]), 1e-5)
    for _, found in every:
        assert_close("state", state, found, 1e-5)


def test_all_ranks_refuse_alike(results):
    for found in results.found("refusals"):
        assert found["world"] == (
            "tp_size=2 x pp_size=1 needs 2 ranks, WORLD_SIZE is 4: start that many processes or change the sizes"
        )
        assert found["other configuration"] == "config.json differs between ranks: 2 of 4 have another than rank 0"


def test_the_others_notice_a_rank_that_died(results):
    ended, *others, dead = results.found("death")
    assert ended is dead is None
    assert results.codes == [EXIT_STATUS, 0, 0, 7]
    assert results.said(0).count("rank 3 of 4 gave no sign of life for 3 s: rank 0 ends\n") == 1
    for rank, (kind, text, seconds, told) in enumerate(others, start=1):
        assert seconds < 20, (kind, text)
        assert told == [f"rank 3 of 4 gave no sign of life for 3 s: rank {rank} ends"]


# ---- a step that fails on one rank


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Twelve heads of each kind, three layers."""
    folder = tmp_path_factory.mktemp("small")
    config = tiny_config(
        num_hidden_layers=3, kda_layers=[1, 2], full_attn_layers=[3], attn_res_block_size=2, num_heads=12, head_dim=8,
        num_attention_heads=12, num_key_value_heads=12, intermediate_size=96, moe_intermediate_size=48,
        num_experts=6, num_experts_per_token=2,
    )  # fmt: skip
    seed_weights(KimiK3ForCausalLM(config, dtype=torch.float32)).save_pretrained(folder, experts="bf16")
    return folder


@pytest.fixture(scope="module")
def failures(small, tmp_path_factory):
    """By the rank whose step fails, after layouts that worked: the ranks, ended. Both worlds run at once."""

    def start(failing, size):
        env = {"FAILS": str(failing), "LAYOUTS": json.dumps(FEW[size])}
        return Spawned(
            ["layouts", "split_prompts", "failure"], size, out=tmp_path_factory.mktemp("failing"), folder=small, **env
        )

    started = {1: start(1, 3), 0: start(0, 2)}
    return {failing: ranks.wait() for failing, ranks in started.items()}


@pytest.mark.parametrize("failing", [1, 0])
def test_layouts_of_few_ranks_compute_what_one_rank_computes(failures, failing, small):
    ranks = failures[failing]
    check_layouts(ranks.found("layouts"), small, len(FEW[ranks.size]))


@pytest.mark.parametrize("failing", [1, 0])
def test_prompts_split_over_processes_give_the_logits_of_the_whole(failures, failing, small):
    with torch.no_grad():
        whole = load(small, Mesh.single())(Batch.pack([torch.arange(13) * 7 % 512, torch.tensor([9])]), logits="last")
    for rank, found in enumerate(failures[failing].found("split_prompts")):
        assert_close(f"rank {rank}", whole, found, 1e-4)


@pytest.mark.parametrize("failing", [1, 0])
def test_a_step_that_fails_on_one_rank_ends_all_with_its_cause(failures, failing):
    """At once: nobody is missed for 90 s, no collective waits for less. Rank 0 answers its requests before it ends."""
    ranks = failures[failing]
    first, *others = ranks.left("failure")
    began, finishes, kind = first
    assert finishes == ["error", "error"]
    assert kind == ("TransportError" if failing else "OutOfMemoryError")
    assert max(ranks.ends) - began < 45
    assert ranks.codes == ([EXIT_STATUS, 1, EXIT_STATUS] if failing else [EXIT_STATUS, EXIT_STATUS])
    cause = f"rank {failing} of {ranks.size} failed (OutOfMemoryError: out of memory on purpose)"
    for rank, code in enumerate(ranks.codes):
        assert ranks.said(rank).count(f"{cause}: rank {rank} ends") == (code == EXIT_STATUS), ranks.said(rank)
    if failing:
        assert "out of memory on purpose" in others[0]  # its traceback
