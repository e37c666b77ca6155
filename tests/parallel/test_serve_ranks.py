"""`k3lib-serve` on two processes, as torchrun starts them: the answers of one rank, and a clean end."""

import os
import signal
import socket
import subprocess
import sys

import httpx
import pytest
import torch

from k3lib import Engine, EngineConfig, KimiK3ForCausalLM, SamplingParams
from k3lib.parallel.health import EXIT_STATUS
from k3lib.server.tiny import make_tiny

SCRIPT = "from k3lib.server.cli import serve; serve()"
PROMPT = [5, 6, 7, 8, 9] * 7


def free_ports(count):
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


class Ranks:
    """Two processes of `k3lib-serve`; `other` is the folder of the second, if it is not that of the first."""

    def __init__(self, folder, logs, *flags, other=None):
        port, master = free_ports(2)
        command = [sys.executable, "-c", SCRIPT, "--tokenizer-path", "bytes"]
        command += [
            "--checkpoint-grid",
            "16",
            "--port",
            str(port),
            "--tp-size",
            "2",
            "--dcp-size",
            "2",
            "--page-size",
            "8",
            "--dtype",
            "float32",
            *flags,
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        env["MASTER_PORT"] = str(master)
        self.logs = [logs / f"{port}-{rank}" for rank in range(2)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            with log.open("w") as err:
                ranked = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                where = ["--model-path", str(other if other is not None and rank else folder)]
                process = subprocess.Popen(
                    [*command, *where], env=ranked, stdout=subprocess.PIPE, stderr=err, text=True
                )
            self.processes.append(process)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)

    def wait_until_up(self):
        line = self.processes[0].stdout.readline()
        assert line.startswith("serving "), "\n".join(log.read_text() for log in self.logs)

    def ends(self, seconds=60):
        return [process.wait(seconds) for process in self.processes]

    def stop(self):
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    make_tiny(path, vision=False, draft="inferact")
    return path


@pytest.fixture
def serve(folder, tmp_path):
    started = []

    def start(*flags, other=None):
        started.append(Ranks(folder, tmp_path, *flags, other=other))
        return started[-1]

    yield start
    for ranks in started:
        ranks.stop()


@pytest.mark.again
def test_other_weights_on_a_rank_are_refused_by_both(serve, tmp_path):
    make_tiny(tmp_path / "other", vision=False, seed=7)
    ranks = serve(other=tmp_path / "other")
    assert set(ranks.ends(150)) <= {2, EXIT_STATUS}  # each refuses, or hears first that the other did
    for log in ranks.logs:
        said = log.read_text()
        assert "the checkpoint differs between ranks: 1 of 2 have another than rank 0" in said
        assert "Traceback" not in said


def test_two_ranks_with_a_draft_answer_like_one_and_end_together(serve, folder):
    ranks = serve("--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(folder / "dspark"))
    ranks.wait_until_up()
    model = KimiK3ForCausalLM.from_pretrained(folder, dtype=torch.float32, progress=False)
    params = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    (want,) = Engine(model, EngineConfig(max_running_requests=2)).generate([PROMPT], params)
    body = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}}
    for _ in range(2):  # the second finds its prefix
        answer = ranks.http.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["output_ids"] == want.token_ids
        assert answer.json()["meta_info"]["spec_verify_ct"] > 0
        ranks.processes[1].send_signal(signal.SIGTERM)  # rank 0 decides when it is time
    assert answer.json()["meta_info"]["cached_tokens"] > 0
    ranks.processes[0].send_signal(signal.SIGTERM)
    assert ranks.ends() == [0, 0], "\n".join(log.read_text() for log in ranks.logs)
