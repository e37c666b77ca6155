"""Ranks that watch each other."""

import threading
import time

import pytest
import torch
from worlds import World

from k3lib import Engine, EngineConfig, KimiK3ForCausalLM, ParallelConfig, SamplingParams
from k3lib.cache import CacheConfig
from k3lib.engine import follow
from k3lib.parallel.group import TransportError
from k3lib.parallel.health import Heartbeat
from k3lib.testing import tiny_config


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

    def compare_set(self, key, expected, desired):
        with self.changed:
            if self.is_gone:
                raise ConnectionError("broken pipe")
            if self.values.get(key, b"") == expected.encode():
                self.values[key] = desired.encode()
            return self.values[key]

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


@pytest.mark.parametrize("failed", [0, 1, 2])
def test_a_rank_that_fails_says_why_and_all_end_at_once(failed):
    """Long before anybody would be missed, and rank 0 last, which has the store."""
    ranks, said, told = start(Board(), 3, timeout_s=60)
    begin = time.monotonic()
    ranks[failed].fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nDetails"))
    for rank, event in enumerate(told):
        assert event.wait(20)
        cause = f"rank {failed} of 3 failed (OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.)"
        assert said[rank] == [f"{cause}: rank {rank} ends"]
        assert ranks[rank].trouble == cause
    assert time.monotonic() - begin < 20
    for rank in ranks:
        rank.stop()


def test_all_ranks_tell_the_first_failure():
    ranks, said, told = start(Board(), 3, timeout_s=60)
    ranks[1].fail(ValueError("first"))
    ranks[2].fail(ValueError("second"))
    ranks[0].fail(ValueError(), wait=False)
    for event in told:
        assert event.wait(20)
    assert {text.split(": rank")[0] for (text,) in said} == {"rank 1 of 3 failed (ValueError: first)"}


def test_a_broken_collective_blames_who_broke_it():
    """The process that is gone, or the rank that failed; only if nobody is missed, the rank whose collective broke."""
    board = Dying(2)
    ranks, said, told = start(board, 3)
    board.is_dead.set()
    ranks[1].fail(TransportError("Connection closed by peer"))
    assert told[0].wait(20)
    assert said[0] == ["rank 2 of 3 gave no sign of life for 0.3 s: rank 0 ends"]
    for rank in ranks:
        rank.stop()

    ranks, said, told = start(Board(), 2)
    ranks[1].fail(TransportError("Connection closed by peer"), wait=False)
    assert told[0].wait(20)
    assert said[0] == ["rank 1 of 2 failed (TransportError: Connection closed by peer): rank 0 ends"]


def test_a_rank_that_ends_after_its_failure_waits_until_the_others_know():
    for failed in (0, 1):
        ranks, said, told = start(Board(), 2, timeout_s=60)
        ranks[failed].fail(ValueError("refused"))
        ranks[failed].stop()  # the failure is on its way up: this process ends in order
        assert told[1 - failed].wait(20)
        assert said[failed] == []
        assert said[1 - failed] == [f"rank {failed} of 2 failed (ValueError: refused): rank {1 - failed} ends"]


def test_rank_0_ends_collectives_that_wait_for_the_failed_rank():
    aborted = threading.Event()
    board, told = Board(), threading.Event()
    options = {"timeout_s": 60, "interval_s": 0.02, "abort": aborted.set}
    first = Heartbeat(lambda: board, 0, 2, on_loss=lambda _: told.set(), **options)
    Heartbeat(lambda: board, 1, 2, on_loss=lambda _: None, **options).fail(ValueError("x"))
    assert told.wait(20)
    assert aborted.is_set()
    first.stop()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_step_that_fails_in_an_engine_is_told_to_all_ranks(failing):
    board, world = Board(), World(ParallelConfig(tp_size=2))
    config = tiny_config(num_hidden_layers=2, kda_layers=[1], full_attn_layers=[2])
    rules = EngineConfig(cache=CacheConfig(num_pages=16, num_slots=4, page_size=4, checkpoint_grid=8))
    heard, told = [], [threading.Event(), threading.Event()]

    def run(model, rank):
        if rank:
            follow(model, rules)
        else:
            Engine(model, rules).generate([[1, 2, 3]], SamplingParams(max_new_tokens=2))

    def work(mesh, rank):
        def on_loss(message):
            heard.append(message)
            told[rank].set()
            for group in world.groups.values():
                group.barrier.abort()  # as a process that ends breaks its connections

        beat = Heartbeat(lambda: board, rank, 2, interval_s=0.02, on_loss=on_loss)
        model = KimiK3ForCausalLM(config, mesh=mesh.replace(health=beat), dtype=torch.float32)
        if rank == failing:
            model.model.layers[1].self_attn = None  # what that raises is as good as any
        with pytest.raises((TypeError, threading.BrokenBarrierError)) as failure:
            run(model, rank)
        assert told[rank].wait(20)
        return failure.type, beat.trouble

    results = world.run(work)
    cause = f"rank {failing} of 2 failed (TypeError: 'NoneType' object is not callable)"
    assert [trouble for _, trouble in results] == [cause, cause]
    assert results[failing][0] is TypeError
    assert sorted(heard) == [f"{cause}: rank {rank} ends" for rank in range(2)]
