"""Processes of `process_worker.py`, one a rank, and what they leave behind."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys

import torch

__all__ = ["Spawned"]

WORKER = pathlib.Path(__file__).with_name("process_worker.py")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Spawned:
    """Ranks that run some checks, from their start; `wait` until they have ended.

    Attributes:
        codes, ends: exit status of each rank, and when it ended.
    """

    def __init__(self, checks, size, *, out, folder, **env):
        self.size, self.out = size, out
        common = {
            **os.environ,
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            **env,
        }
        command = [sys.executable, str(WORKER), ",".join(checks), str(out), str(folder)]
        self.process = subprocess.Popen(command, env=common, start_new_session=True)

    def wait(self, timeout=240):
        """Wait for all; none is left behind, whatever comes."""
        try:
            self.process.wait(timeout=timeout)
            self.codes, self.ends = json.loads((self.out / "ends.json").read_text())
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)  # its session: the ranks, and what they started
        return self

    def _log(self, rank):
        return self.out / f"{rank}.stderr"

    def said(self, rank):
        """What a rank wrote to stderr."""
        return self._log(rank).read_text()

    def left(self, check):
        """What each rank found in a check; None of one that left nothing."""
        files = [self.out / f"{check}.{rank}.pt" for rank in range(self.size)]
        return [torch.load(file) if file.exists() else None for file in files]

    def found(self, check):
        """The same, but a failure of a rank is a failure of the test."""
        every = self.left(check)
        for rank, result in enumerate(every):
            assert not isinstance(result, str), f"{check}, rank {rank}:\n{result}\n{self.said(rank)}"
        return every
