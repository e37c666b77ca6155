"""Times of the routed experts and of the router on a GPU.

    python -m benchmarks.kernels_experts              # what is registered
    python -m benchmarks.kernels_experts --variants   # other launch configurations, too

Each case is first compared with the reference in fp32 on fresh random inputs. Times are medians, in microseconds, of
replays of a CUDA graph that holds one call for each of several sets of routes, so that the weights of a call are not
in the L2 cache. A floor is the bytes of the chosen experts, or the operations, over what an H200 reaches.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import os
import statistics
import traceback
from concurrent.futures import ProcessPoolExecutor

import torch

from k3lib.backends.triton import experts_kernels, route_kernels
from k3lib.backends.triton.route import route_triton
from k3lib.config import SiTU
from k3lib.ops import ExpertWeights, experts
from k3lib.testing import assert_close, tolerance

BF16 = torch.bfloat16
SITU = SiTU(beta=4.0, linear_beta=25.0)
EXPERTS, TOP_K, LATENT, HIDDEN = 896, 16, 3584, 7168
TOKENS = (1, 8, 64, 256, 8192)
# of (inner width, tokens) for MXFP4
BARS = {(384, 1): 22, (384, 8): 95, (384, 64): 420, (384, 256): 700, (384, 8192): 3600}
BYTES, FLOPS = 4.3e12, 7.9e14  # a second


def floor(inner, fmt, tokens):
    """Microseconds at least."""
    bits = {"mxfp4": 4.25, "nvfp4": 4.5, "bf16": 16}[fmt]
    chosen = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** tokens)
    size = 3 * LATENT * inner
    return 1e6 * max(chosen * size * bits / 8 / BYTES, 2 * tokens * TOP_K * size / FLOPS)


def store(inner, fmt="mxfp4", count=EXPERTS, device="cuda"):
    """Random codes; scales near those of trained weights."""
    shapes = ((count, 2 * inner, LATENT), (count, LATENT, inner))
    if fmt == "bf16":
        return ExpertWeights(*(torch.randn(s, dtype=BF16, device=device) * 0.02 for s in shapes))
    packed = [torch.randint(256, (*s[:2], s[2] // 2), dtype=torch.uint8, device=device) for s in shapes]
    if fmt == "mxfp4":
        scales = [torch.randint(118, 122, (*s[:2], s[2] // 32), dtype=torch.uint8, device=device) for s in shapes]
        return ExpertWeights(*packed, *scales, format=fmt)
    scales = [(torch.rand(*s[:2], s[2] // 16, device=device) + 0.5).to(torch.float8_e4m3fn) for s in shapes]
    return ExpertWeights(*packed, *scales, *(torch.rand(count, device=device) * 0.01 + 0.005 for _ in shapes), fmt)


def draw(tokens, count=EXPERTS, top_k=TOP_K):
    x = torch.randn(tokens, LATENT, device="cuda").to(BF16)
    ids = torch.rand(tokens, count, device="cuda").topk(top_k).indices.int()
    return x, ids, torch.rand(tokens, top_k, device="cuda") / 8


def time_graph(calls, repeats=8):
    """Median microseconds of a call."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    spans = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        spans.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(spans)


def parts_of(call):
    """Microseconds of each kernel of a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    found = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name.split("(")[0].strip("_")[:14]
            found[name] = found.get(name, 0) + event.device_time
    return " ".join(f"{name}={us:.1f}" for name, us in found.items())


def check(weights, tokens, path):
    x, ids, w = draw(tokens)
    got = experts_kernels.run(x, ids, w, weights, SITU, path)
    assert got.equal(experts_kernels.run(x, ids, w, weights, SITU, path)), "two runs differ"
    few = slice(0, min(tokens, 16))
    want = experts.reference(x[few].float(), ids[few], w[few], weights, act_fn=SITU)
    assert_close("experts", want, got[few], tolerance("experts", BF16))
    return functools.partial(experts_kernels.run, x, ids, w, weights, SITU, path)


def measure_experts(weights, tokens, path):
    sets = 1 if tokens >= 4096 else 3 if tokens >= 64 else 16
    calls = [functools.partial(experts_kernels.run, *draw(tokens), weights, SITU, path) for _ in range(sets)]
    return time_graph(calls)


def show_invariance(weights):
    """Whether a token's result depends on how many others there are."""
    x, ids, w = draw(64)
    paths = [path._replace(parts=1) for path in experts_kernels.PATHS]
    results = [experts_kernels.run(x, ids, w, weights, SITU, path) for path in paths]
    print("same bits in all paths:", all(r.equal(results[0]) for r in results))


def compile_path(path, inner, fmt):
    weights = store(inner, fmt, 16)
    experts_kernels.run(*draw(2, 16), weights, SITU, path)
    torch.cuda.synchronize()


def compile_all(jobs):
    """Fill the cache of compiled kernels in several processes."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(12, os.cpu_count() or 1), mp_context=context) as pool:
        for future in [pool.submit(compile_path, *job) for job in jobs]:
            if error := future.exception():
                print("compiling:", repr(error)[:300])


def show(title, us, bar="", least="", note=""):
    least = f"{least:.1f}" if least else ""
    print(f"{title:<36} {us:>8.1f} {bar!s:>6} {least:>7}  {note}", flush=True)


def attempt(title, call):
    """Run one case; a failure is printed, and the table goes on."""
    try:
        call()
    except Exception as error:
        print(title, repr(error)[:400])
        traceback.print_exc(limit=-2)


def experts_case(weights, inner, tokens, path, with_parts):
    fmt = weights.format
    call = check(weights, tokens, path)
    bar = BARS.get((inner, tokens), "") if fmt == "mxfp4" else ""
    note = "" if path is None else str(tuple(tuple(f) if isinstance(f, tuple) else f for f in path))
    us = measure_experts(weights, tokens, path)
    show(f"experts {fmt} I={inner} T={tokens}", us, bar, floor(inner, fmt, tokens), note)
    if with_parts:
        print("    ", parts_of(call))


def experts_table(inner, fmt, variants=()):
    weights = store(inner, fmt)
    show_invariance(weights)
    for tokens in TOKENS:
        for path in (None, *[p for n, p in variants if n == tokens]):
            case = functools.partial(experts_case, weights, inner, tokens, path, bool(variants))
            attempt(f"experts {fmt} I={inner} T={tokens} {path}", case)


def route_case(tokens, weight, bias):
    x = torch.randn(tokens, HIDDEN, device="cuda").to(BF16)
    parts = route_kernels.logits(x, weight)
    exact = x.double() @ weight.double().t()
    chosen, weights = route_kernels.choose(parts, bias, TOP_K, renormalize=True, scale=1.0)
    scores = torch.sigmoid(exact)
    biased = scores + bias.double()
    lost = biased.topk(TOP_K).values - biased.gather(1, chosen.long()).sort(descending=True).values
    want = scores.gather(1, chosen.long())
    assert_close("weights", want / want.sum(1, keepdim=True), weights, tolerance("route", torch.float32))
    error = (parts.sum(0).double() - exact).abs().max().item()
    note = f"logit error {error:.1e}, biased score lost by the choice {lost.max().item():.1e}"
    product = time_graph([functools.partial(route_kernels.logits, x, weight)] * 10)
    show(f"route T={tokens} product", product, "", 1e6 * weight.nbytes / BYTES, note)
    ready = parts.sum(0, keepdim=True)
    choose = functools.partial(route_kernels.choose, ready, bias, TOP_K, renormalize=True, scale=1.0)
    show(f"route T={tokens} choice", time_graph([choose] * 10), 6 if tokens == 64 else "")
    whole = functools.partial(route_triton, x, weight, bias, top_k=TOP_K, renormalize=True, scale=1.0)
    show(f"route T={tokens} both", time_graph([whole] * 10))


C, P = experts_kernels.Config, experts_kernels.Path
FEW = [
    P(1, 16, False, C(64, 32, 4, 3, 2), C(64, 32, 4, 4)),
    P(1, 16, False, C(64, 32, 4, 3, 2), C(64, 32, 4, 3, 2), 2),
]
SOME = [
    P(1, 16, True, C(64, 32, 4, 4), C(64, 32, 4, 3, 8)),
    P(1, 16, True, C(128, 32, 4, 3, 2), C(64, 32, 4, 3, 4)),
]
MANY = [P(1, 64, True, C(128, 32, 8, 3), C(128, 32, 8, 3, 7)), P(1, 64, True, C(128, 32, 4, 3), C(128, 32, 4, 3, 7))]
VARIANTS = [*itertools.product((1, 8), FEW), *itertools.product((64, 256), SOME), *itertools.product((8192,), MANY)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--variants", action="store_true", help="measure other launch configurations, too")
    variants = VARIANTS if parser.parse_args().variants else []
    torch.manual_seed(0)
    shapes = ((192, "mxfp4"), (384, "mxfp4"), (384, "nvfp4"))
    compile_all([(p, *s) for p in experts_kernels.PATHS for s in shapes] + [(p, 384, "mxfp4") for _, p in variants])
    print(f"{'case':<36} {'us':>8} {'bar':>6} {'floor':>7}")
    weight = torch.randn(EXPERTS, HIDDEN, device="cuda").to(BF16) * 0.02
    bias = torch.randn(EXPERTS, device="cuda") * 0.1
    for tokens in TOKENS:
        attempt(f"route T={tokens}", functools.partial(route_case, tokens, weight, bias))
    for inner, fmt in shapes:
        experts_table(inner, fmt, variants if (inner, fmt) == (384, "mxfp4") else ())


if __name__ == "__main__":
    main()
