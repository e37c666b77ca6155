"""Run a random model in every parallel layout on the GPUs of one host, and compare with one rank. Needs no network.

    python scripts/multi_gpu.py --ranks 2                    # NCCL, bf16, MXFP4 experts
    python scripts/multi_gpu.py --ranks 2 --device cpu       # gloo, fp32, a tiny model

One process a rank runs all cases one after the other (`multi_gpu_cases.py` says what a case compares). A case that
fails or hangs is reported, its processes are replaced, and the next one goes on. Last, ranks die, and the others have
to say which. Prints a line for each case when it is done and a table in the end; exit status 1 if one misses.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from multi_gpu_cases import Job, Result, die, names, warm, work, write_model

from k3lib.parallel.health import EXIT_STATUS

SPAWN = multiprocessing.get_context("spawn")
GRACE_S = 8  # for the other ranks, when one has failed


_taken: set[int] = set()


def free_port() -> int:
    """A port that no crew has been given."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port not in _taken:
            _taken.add(port)
            return port


class Crew:
    """One process a rank, and a pipe to each."""

    def __init__(self, job: Job, target: Any = work, *more: tuple[Any, ...]) -> None:
        """Start `target(job, rank, pipe, *more[rank])` for every rank."""
        self.job = job._replace(port=free_port())
        self.pipes, self.processes = [], []
        for rank in range(job.ranks):
            mine, theirs = SPAWN.Pipe()
            extra = more[rank] if more else ()
            process = SPAWN.Process(target=target, args=(self.job, rank, theirs, *extra), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def ask(self, name: str, limit_s: float) -> list[Result] | str:
        """Results of a case, or why there are none."""
        for pipe in self.pipes:
            pipe.send(name)
        return self.hear(limit_s)

    def hear(self, limit_s: float) -> list[Any] | str:
        """What every rank says, or why one does not."""
        end = time.monotonic() + limit_s
        waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        found: dict[int, Any] = {}
        why = ""
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                silent = ", ".join(map(str, sorted(waiting.values())))
                why = why or f"no answer of rank {silent} within {limit_s:.0f} s"
                self._show_stacks(waiting.values())
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    found[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    self.processes[rank].join(5)
                    found[rank] = f"rank {rank} ended with status {self.processes[rank].exitcode}"
                if isinstance(found[rank], str) and found[rank] != "ready":
                    why = why or f"rank {rank}: {found[rank]}"
                    end = min(end, time.monotonic() + GRACE_S)
        return why or [found[rank] for rank in range(len(self.pipes))]

    def _show_stacks(self, ranks: Any) -> None:
        for rank in ranks:
            process = self.processes[rank]
            if process.is_alive() and process.pid:
                print(f"rank {rank} is at:", file=sys.stderr, flush=True)
                os.kill(process.pid, signal.SIGUSR1)
                time.sleep(0.5)

    def stop(self) -> None:
        """End all processes."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send("")
        for process in self.processes:
            process.join(1)
            process.kill()
            process.join(10)


def run_cases(
    args: argparse.Namespace, job: Job, wanted: list[str], end: float, target: Any = work
) -> dict[str, Result | str]:
    """Every case, in processes that are replaced when one fails."""
    found: dict[str, Result | str] = {}
    crew = None
    for name in wanted:
        left = end - time.monotonic()
        if left < 3:
            found[name] = "not run: no time left"
            continue
        fresh = crew is None
        crew = crew or Crew(job, target)
        begin = time.monotonic()
        limit = args.limit + (args.start_limit if fresh else 0)
        answer = crew.ask(name, min(limit, left))
        found[name] = answer if isinstance(answer, str) else Result.of_all(answer)
        if isinstance(answer, str):
            crew.stop()
            crew = None
            if "no answer" in answer:  # the first suspect: collectives beside each other
                job = job._replace(overlap="never")
                print("from here on shared experts are computed behind the routed ones", flush=True)
        print(f"{time.monotonic() - begin:6.1f} s  {name}: {told(found[name])}", flush=True)
    if crew is not None:
        crew.stop()
    return found


def told(result: Result | str) -> str:
    """A line about a result."""
    if isinstance(result, str):
        return result.strip()
    r = result
    return (
        f"{'ok' if r.good else 'OFF'}, error {r.error:.2e} (one rank {r.one:.2e}), tokens {r.equal}/{r.clear}, "
        f"graph {r.graph or '-'}, eager {r.eager_ms:.2f} ms, captured {r.captured_ms:.2f} ms; {r.note}"
    )


def deaths(job: Job) -> dict[str, Result | str]:
    """A rank is killed while all are in steps: the last one in one group, the first one in another."""
    found: dict[str, Result | str] = {}
    crews = {}
    for dead in (job.ranks - 1, 0):
        files = [Path(job.folder) / f"death.{dead}.{rank}" for rank in range(job.ranks)]
        crews[dead] = Crew(job, die, *[(str(file),) for file in files]), files
    for dead, (crew, files) in crews.items():
        name = f"death of rank {dead}"
        ready = crew.hear(90)
        if isinstance(ready, str):
            crew.stop()
            found[name] = "\n".join([*(file.read_text(errors="replace")[-2000:] for file in files), ready])
            continue
        begin = time.monotonic()
        crew.processes[dead].kill()
        others = [rank for rank in range(job.ranks) if rank != dead]
        for rank in others:
            crew.processes[rank].join(max(0.0, 30 - (time.monotonic() - begin)))
        seconds = time.monotonic() - begin
        codes = [crew.processes[rank].exitcode for rank in others]
        words = [files[rank].read_text(errors="replace") for rank in others]
        heard = [f"rank {dead} of {job.ranks}" in text for text in words]
        good = all(code == EXIT_STATUS for code in codes) and all(heard)
        note = f"the others ended after {seconds:.1f} s with {codes}"
        if not good:
            note += f"; they said {[text[-300:] for text in words]}"
        found[name] = Result(good, note=note)
        crew.stop()
    for name, result in found.items():
        print(f"{name}: {told(result)}", flush=True)
    return found


def start_warming(job: Job) -> list[Any]:
    """Processes that compile kernels while the ranks start; what they find is left to the cache of Triton."""
    early, late = ("prefill",), ("verify", "decode")
    parts = [(kind, modes) for kind in ("one", "tp", "dcp", "ep", "dp") for modes in (early, late)]
    parts.append(("engine", ()))
    started = []
    for i, (kind, modes) in enumerate(parts):
        process = SPAWN.Process(target=warm, args=(job, i % job.ranks, kind, modes), daemon=True)
        process.start()
        started.append(process)
    return started


def table(ranks: int, found: dict[str, Result | str]) -> str:
    """All results, a line each."""
    head = f"{'case':<38} ranks {'error':>9} {'one rank':>9} {'tokens equal':>13} graph=eager {'eager ms':>9} "
    head += "captured ms  verdict"
    lines = [head]
    for name, r in found.items():
        if isinstance(r, str):
            lines.append(f"{name:<38} {ranks:>5} {r.strip().splitlines()[-1][:110]}")
            continue
        error, one = (f"{x:9.2e}" if x else f"{'-':>9}" for x in (r.error, r.one))
        tokens = f"{r.equal}/{r.clear}" if r.clear else "-"
        eager, captured = (f"{x:.2f}" if x else "-" for x in (r.eager_ms, r.captured_ms))
        verdict = "ok" if r.good else "OFF"
        times = f"{eager:>9} {captured:>11}"
        lines.append(f"{name:<38} {ranks:>5} {error} {one} {tokens:>13} {r.graph or '-':>11} {times}  {verdict}")
    return "\n".join(lines)


def missed(result: Result | str) -> bool:
    """What is refused by name has not been promised."""
    return not result.startswith("rank 0: refused") if isinstance(result, str) else not result.good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=None, help="processes; default: one for each GPU, 2 on a CPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default=None, help="default: float32 on a CPU only")
    parser.add_argument("--only", nargs="*", default=None, help="cases whose name contains one of these")
    parser.add_argument("--skip", nargs="*", default=[], help="cases whose name contains one of these are left out")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for a case")
    parser.add_argument("--start-limit", type=float, default=120.0, help="more for a case in new processes")
    parser.add_argument("--seconds", type=float, default=900.0, help="for all cases")
    parser.add_argument("--no-warm", action="store_true", help="compile kernels in the ranks alone")
    parser.add_argument("--warm", action="store_true", help="compile kernels in several processes at once, and end")
    args = parser.parse_args()
    ranks = args.ranks or (torch.cuda.device_count() if args.device == "cuda" else 2)
    if args.device == "cuda" and ranks > torch.cuda.device_count():
        print(f"--ranks {ranks} needs as many GPUs, found {torch.cuda.device_count()}")
        return 2
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")  # ranks leave at once, and take down nothing
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # processes end with this one
    end = time.monotonic() + args.seconds
    every = [*names(ranks), "death"]
    wanted = [name for name in every if args.only is None or any(part in name for part in args.only)]
    wanted = [name for name in wanted if not any(part in name for part in args.skip)]
    found: dict[str, Result | str] = {}
    with tempfile.TemporaryDirectory() as folder:
        job = Job(args.device, ranks, folder, 0, args.dtype or ("float32" if args.device == "cpu" else "bfloat16"))
        if args.warm:
            write_model(Path(folder), args.device)
            for process in start_warming(job):
                process.join()
            return 0
        cold = args.device == "cuda" and not args.no_warm and wanted != ["death"]
        warming = start_warming(job) if cold else []
        if wanted != ["death"]:
            write_model(Path(folder), args.device)
        print(f"{ranks} ranks, {args.device}, {str(job.dtype)[6:]}, torch {torch.__version__}", flush=True)
        found |= run_cases(args, job, [name for name in wanted if name != "death"], end)
        for process in warming:
            process.kill()
        if "death" in wanted and ranks > 1:
            found |= deaths(job)
    print(table(ranks, found))
    off = [name for name, result in found.items() if missed(result)]
    good = sum(isinstance(result, Result) and result.good for result in found.values())
    refused = len(found) - len(off) - good
    more = f", {refused} refused" if refused else ""
    print(f"{good} of {len(found)} cases are good{more}" + (f"; not: {', '.join(off)}" if off else ""))
    return int(bool(off))


if __name__ == "__main__":
    sys.exit(main())
