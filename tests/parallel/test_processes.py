"""Four processes over gloo: groups, meshes, layouts of the golden models, and a rank that dies. Started once."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from seeded import draw
from worlds import Steps, load, run_steps

from k3lib import Batch, Mesh
from k3lib.ops import KDAParams, kda_chunk
from k3lib.parallel.health import EXIT_STATUS
from k3lib.testing import assert_close

SIZE = 4
CHECKS = ["collectives", "layouts", "golden_greedy", "micro_batches", "long_sequence", "refusals", "death"]
PACKED = {"tiny_k3_dev_mxfp4": 2e-4, "tiny_k3_wide_nvfp4": 2e-4}
pytestmark = pytest.mark.filterwarnings("ignore:.*padding behind the heads")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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
    """Function from a check to what each rank found; None of a rank that left nothing."""
    out = tmp_path_factory.mktemp("ranks")
    prompts = {name: {p: ids for p, (ids, *_) in cases.items()} for name, cases in expected.items()}
    torch.save(prompts, out / "prompts.pt")
    worker = pathlib.Path(__file__).with_name("process_worker.py")
    common = {
        **os.environ,
        "WORLD_SIZE": str(SIZE),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "PROMPTS": str(out / "prompts.pt"),
    }
    command = [sys.executable, str(worker), ",".join(CHECKS), str(out), str(golden)]
    said = out / "rank 0"
    with said.open("w") as file:
        errors = [file, *[None] * (SIZE - 1)]
        ranks = [
            subprocess.Popen(command, env={**common, "RANK": str(r), "LOCAL_RANK": str(r)}, stderr=errors[r])
            for r in range(SIZE)
        ]
    try:
        codes = [process.wait(timeout=240) for process in ranks]
    finally:
        for process in ranks:
            process.kill()

    def of(check):
        files = [out / f"{check}.{rank}.pt" for rank in range(SIZE)]
        found = [torch.load(file) if file.exists() else None for file in files]
        for rank, result in enumerate(found):
            assert not isinstance(result, str), f"{check}, rank {rank}:\n{result}"
        return found

    of.codes, of.said = codes, said.read_text()
    return of


def test_groups_move_what_they_should(results):
    for rank, found in enumerate(results("collectives")):
        assert found, rank
        assert [name for name, right in found.items() if not right] == [], rank


def test_layouts_compute_what_one_rank_computes(results, golden):
    want = run_steps(load(golden / "tiny_k3_dev", Mesh.single()), Mesh.single(), Steps())
    every = results("layouts")
    assert len(every[0]) == 3
    for rank, found in enumerate(every):
        for name, got in found.items():
            for step, (one, other) in enumerate(zip(want, got, strict=True)):
                assert_close(f"{name}, rank {rank}, step {step}", one, other, 1e-4)
                assert other.argmax(-1).equal(one.argmax(-1))


def test_packed_checkpoints_generate_the_golden_tokens(results, expected):
    for rank, found in enumerate(results("golden_greedy")):
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
    for found in results("micro_batches"):
        for one, other in zip(want, found, strict=True):
            assert_close("logits", one[None], other, 1e-4)


def test_a_sequence_split_over_processes_ends_in_the_state_of_the_whole(results):
    heads, keys, values, length = 2, 8, 4, 300
    every = results("long_sequence")
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
    for found in results("refusals"):
        assert found["world"] == (
            "tp_size=2 x pp_size=1 needs 2 ranks, WORLD_SIZE is 4: start that many processes or change the sizes"
        )
        assert found["other configuration"] == "config.json differs between ranks: 2 of 4 have another than rank 0"


def test_the_others_notice_a_rank_that_died(results):
    ended, *others, dead = results("death")
    assert ended is dead is None
    assert results.codes == [EXIT_STATUS, 0, 0, 7]
    assert results.said.count("rank 3 of 4 gave no sign of life for 3 s: rank 0 ends\n") == 1
    for rank, (kind, text, seconds, told) in enumerate(others, start=1):
        assert seconds < 20, (kind, text)
        assert told == [f"rank 3 of 4 gave no sign of life for 3 s: rank {rank} ends"]
