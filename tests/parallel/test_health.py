"""Ranks that watch each other, and the conformance script on processes."""

import argparse
import pathlib
import runpy
import threading

from k3lib import ParallelConfig
from k3lib.parallel.health import Heartbeat

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "multi_gpu.py"


class Board:
    """A store that all threads share; `is_gone` breaks every connection."""

    def __init__(self):
        self.values, self.changed, self.is_gone = {}, threading.Condition(), False

    def set(self, key, value):
        with self.changed:
            if self.is_gone:
                raise ConnectionError("broken pipe")
            self.values[key] = value.encode()
            self.changed.notify_all()

    def multi_get(self, keys):
        with self.changed:
            self.changed.wait_for(lambda: self.is_gone or all(key in self.values for key in keys), timeout=20)
            if self.is_gone:
                raise ConnectionError("broken pipe")
            return [self.values[key] for key in keys]


class Dying(Board):
    """Takes no sign of life from one rank any more."""

    def __init__(self, rank):
        super().__init__()
        self.dead, self.is_dead = f"k3lib/alive/{rank}", threading.Event()

    def set(self, key, value):
        if not (self.is_dead.is_set() and key == self.dead):
            super().set(key, value)


def start(board, size, **options):
    said = [[] for _ in range(size)]
    told = [threading.Event() for _ in range(size)]

    def hear(rank):
        def on_loss(message):
            said[rank].append(message)
            told[rank].set()

        return on_loss

    options = {"timeout_s": 0.3, "interval_s": 0.02, **options}
    ranks = [Heartbeat(lambda: board, rank, size, on_loss=hear(rank), **options) for rank in range(size)]
    return ranks, said, told


def test_every_rank_says_which_one_is_silent():
    board = Dying(2)
    ranks, said, told = start(board, 3)
    board.is_dead.set()
    for rank in (0, 1):
        assert told[rank].wait(20)
        assert said[rank] == [f"rank 2 of 3 gave no sign of life for 0.3 s: rank {rank} ends"]
    for rank in ranks:
        rank.stop()


def test_a_rank_that_ends_as_intended_is_not_missed():
    ranks, said, told = start(Board(), 3)
    ranks[1].stop()
    assert not told[0].wait(0.8)
    for rank in ranks:
        rank.stop()
    assert said == [[], [], []]


def test_without_the_store_rank_0_is_gone():
    board = Board()
    _, said, told = start(board, 2)
    board.is_gone = True
    board_changed = board.changed
    with board_changed:
        board_changed.notify_all()
    assert told[1].wait(20)
    assert said[1] == ["rank 0 of 2 is gone: rank 1 ends"]


def test_the_script_for_several_gpus_runs_on_processes(tmp_path, capfd):
    script = runpy.run_path(str(SCRIPT))
    args = argparse.Namespace(ranks=2, backend="gloo", size="tiny", only="replicated queries")
    script["write_model"](tmp_path, args.size)
    assert script["start"](args, tmp_path, limit_s=240) == [0, 0]
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith(("ok ", "OFF", "-- "))]
    assert [line.split("  ")[0] for line in lines] == ["ok"]
    assert "tp x dcp, replicated queries" in lines[0]
    found = script["layouts"](4)
    for sizes in found.values():
        assert ParallelConfig(**sizes).world_size == 4
