"""The conformance script for several GPUs: on two processes, and with cases that fail, hang and end."""

import argparse
import multiprocessing
import os
import pathlib
import subprocess
import sys
import time

import pytest

from k3lib import ParallelConfig

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import multi_gpu  # noqa: PLC0415 - no package

    # stand-ins for ranks compute nothing, so they may share this process's memory
    monkeypatch.setattr(multi_gpu, "SPAWN", multiprocessing.get_context("fork"))
    return multi_gpu


@pytest.mark.again
def test_two_processes_compute_what_one_does():
    names = ["tp x ep, all-to-all", "tp x dcp, gather", "four micro-batches", "KDA"]
    command = [sys.executable, str(SCRIPTS / "multi_gpu.py"), "--device", "cpu", "--ranks", "2", "--only", *names]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = ran.stdout.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("case "))
    found = {line[:38].strip(): line.split()[-1] for line in lines[begin + 1 : -1]}
    assert found == dict.fromkeys(
        (
            "tp x ep, all-to-all, tokens sharded", "tp x dcp, gather and reduce-scatter", "pp, four micro-batches",
            "KDA context parallel prefill",
        ),
        "ok",
    )  # fmt: skip
    assert lines[-1] == "4 of 4 cases are good"


def stand_in(_job, rank, pipe):
    """Answers as a rank would; the last one fails, hangs or ends where the case says so."""
    import multi_gpu_cases  # noqa: PLC0415 - no package

    while name := pipe.recv():
        if rank and name == "fails":
            pipe.send("Traceback ...\nValueError: on purpose")
        elif rank and name == "ends":
            os._exit(9)
        elif rank and name == "hangs":
            time.sleep(100)
        elif not rank and name in {"fails", "ends"}:
            time.sleep(100)  # in a collective that the other never joins
        else:
            off = name == "is off" and rank == 1
            pipe.send(multi_gpu_cases.Result(not off, error=0.5 * off, equal=3 - off, clear=3))


@pytest.mark.again
def test_a_case_that_fails_hangs_or_ends_is_reported_and_the_next_goes_on(script, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(script, "GRACE_S", 0.2)
    monkeypatch.setattr(script.Crew, "_show_stacks", lambda self, ranks: None)
    args = argparse.Namespace(limit=1.0, start_limit=0.0)
    job = script.Job("cpu", 2, str(tmp_path), 0)
    cases = ["first", "fails", "second", "hangs", "ends", "is off", "last"]
    found = script.run_cases(args, job, cases, time.monotonic() + 60, stand_in)
    assert list(found) == cases
    assert {name for name, result in found.items() if not isinstance(result, str) and result.good} == {
        "first", "second", "last",
    }  # fmt: skip
    assert found["fails"] == "rank 1: Traceback ...\nValueError: on purpose"
    assert found["hangs"] == "no answer of rank 1 within 1 s"
    assert found["ends"] == "rank 1: rank 1 ended with status 9"
    assert (found["is off"].error, found["is off"].equal, found["is off"].clear) == (0.5, 5, 6)
    assert [name for name, result in found.items() if script.missed(result)] == ["fails", "hangs", "ends", "is off"]
    table = script.table(2, found)
    assert "ValueError: on purpose" in table
    assert capsys.readouterr().out.count("\n") >= len(cases)
    assert not multiprocessing.active_children()
    late = script.run_cases(args, job, ["first"], time.monotonic(), stand_in)
    assert script.missed(late["first"])
    assert not script.missed("rank 0: refused: this kind of draft")


def test_layouts_have_as_many_ranks_as_there_are_processes(script):
    import multi_gpu_cases  # noqa: PLC0415 - no package

    for ranks in (2, 3, 4, 8):
        for sizes in multi_gpu_cases.layouts(ranks).values():
            assert ParallelConfig(**sizes).world_size == ranks
        for sizes, _ in multi_gpu_cases.engines(ranks).values():
            assert ParallelConfig(**sizes).world_size == ranks
