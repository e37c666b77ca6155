"""KDA prefill in Triton on the GPU at hand: checked against the reference, then timed by graph replay with cold caches.

python -m benchmarks.kernels_kda_chunk [--variants] [case ...]
"""

from __future__ import annotations

import argparse
import statistics
from typing import NamedTuple

import torch

from k3lib.backends.triton import kda_chunk as adapter
from k3lib.ops import KDAParams, kda_chunk
from k3lib.testing import assert_close, tolerance


class Case(NamedTuple):
    """Requests of equal length, heads, the time to reach and the bound by bytes, in microseconds."""

    requests: int
    tokens: int
    heads: int
    bar: float
    floor: float


CASES = {
    "1x8192 H=12": Case(1, 8192, 12, 300, 30),
    "1x8192 H=6": Case(1, 8192, 6, 240, 15),
    "8x1024 H=12": Case(8, 1024, 12, 137, 32),
    "1x8192 H=96": Case(1, 8192, 96, 890, 237),
    "1x65536 H=12": Case(1, 65536, 12, 1600, 235),
}
DIM = 128
COLD_BYTES = 200 << 20


def make(case: Case, seed: int, dtype: torch.dtype = torch.bfloat16) -> dict:
    """Arguments of one call on the GPU, with slots out of order."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    total, heads = case.requests * case.tokens, case.heads
    q, k, v, gate = (draw(total, heads, DIM).to(dtype) for _ in range(4))
    return {
        "q": q, "k": k, "v": v, "gate": gate, "beta": draw(total, heads).to(dtype),
        "params": KDAParams(draw(heads) * 0.5, draw(heads, DIM) - 3, -5.0),
        "state": draw(case.requests + 1, heads, DIM, DIM) * 0.1,
        "slots": torch.arange(case.requests, 0, -1, dtype=torch.int32, device="cuda"),
        "cu_seqlens": torch.arange(case.requests + 1, dtype=torch.int32, device="cuda") * case.tokens,
        "scale": DIM**-0.5,
    }  # fmt: skip


def check(case: Case) -> str:
    """Compare one call with the reference in fp32."""
    given = make(case, seed=1)
    wide = {n: x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in given.items()}
    wide["state"] = given["state"].clone()
    want = kda_chunk.reference(**wide)
    got = adapter.kda_chunk_triton(**given)
    worst = []
    for name, a, b in (("out", want, got), ("state", wide["state"], given["state"])):
        worst.append(float((a - b.float()).norm() / a.norm()))
        assert_close(name, a, b, tolerance("kda_chunk", torch.bfloat16))
    return " ".join(f"{x:.1e}" for x in worst)


def measure(case: Case, replays: int = 12) -> float:
    """Median time of a call in microseconds, over several sets of inputs."""
    size = case.requests * case.tokens * case.heads * DIM * 2 * 5
    sets = [make(case, seed) for seed in range(max(2, -(-COLD_BYTES // size)))]
    graphs = []
    for given in sets:
        adapter.kda_chunk_triton(**given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            adapter.kda_chunk_triton(**given)
        graphs.append(graph)
    times = []
    for _ in range(replays):
        for graph in graphs:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[len(graphs) :])


def kernel_times(case: Case) -> str:
    """Mean time of each kernel of a call."""
    given = make(case, seed=0)
    adapter.kda_chunk_triton(**given)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            adapter.kda_chunk_triton(**given)
        torch.cuda.synchronize()
    rows = [(e.key, e.self_device_time_total / e.count) for e in profile.key_averages() if "kernel" in e.key]
    return " ".join(f"{name.strip('_').removesuffix('_kernel')} {us:.0f}" for name, us in rows)


VARIANTS: list[dict] = [
    {"chunk_columns": 32},
    {"chunk_stages": 2},
    {"output": (128, 8, 3)},
    {"output": (32, 4, 3)},
    {"summary": (64, 4, 2)},
    {"compose": (16, 4, 3)},
]


def main() -> None:
    """Print one line a case, and one a variant."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--variants", action="store_true")
    options = parser.parse_args()
    print(f"{'case':<14} {'us':>7} {'bar':>6} {'floor':>6}  error of out, state")
    for name in options.cases:
        case = CASES[name]
        try:
            error = check(case)
            print(f"{name:<14} {measure(case):7.0f} {case.bar:6.0f} {case.floor:6.0f}  {error}", flush=True)
            print(f"  {kernel_times(case)}", flush=True)
        except Exception as error:
            print(f"{name:<14} failed: {str(error)[:300]}", flush=True)
        torch.cuda.empty_cache()
    if not options.variants:
        return
    plain = adapter._CONFIGS["narrow"]
    for changes in VARIANTS:
        adapter._CONFIGS["narrow"] = plain._replace(**changes)
        print(" ".join(f"{field}={value}" for field, value in changes.items()))
        for name in options.cases:
            try:
                line = f"{measure(CASES[name], 6):7.0f} {check(CASES[name])} {kernel_times(CASES[name])}"
            except Exception as error:
                line = f"failed: {str(error)[:200]}"
            print(f"  {name:<14} {line}", flush=True)
        adapter._CONFIGS["narrow"] = plain


if __name__ == "__main__":
    main()
