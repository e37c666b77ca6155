"""Times of latent attention on a GPU: absorbed decode over pages, and prefill beside cuDNN.

    python -m benchmarks.kernels_mla                 # what is registered
    python -m benchmarks.kernels_mla --tune decode   # other launch configurations, too

Each case is first compared with the reference. Times are medians of CUDA graph replays over inputs that do not fit the
L2 cache together, in microseconds. A floor is the bytes or the operations of a case over what an H200 reaches.
"""

from __future__ import annotations

import argparse
import statistics
import traceback
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from k3lib.backends.triton import mla
from k3lib.ops import attention_varlen, mla_decode
from k3lib.testing import assert_close, tolerance

LATENT, ROPE, PAGE = 512, 64, 64
WIDTH = LATENT + ROPE
BYTES, FLOPS = 4.3e12, 8.0e14  # a second


class Case(NamedTuple):
    """One decode or verify step."""

    name: str
    heads: int
    requests: int
    context: int
    new: int = 1
    pages: torch.dtype = torch.bfloat16
    bar: float | None = None

    @property
    def floor(self) -> float:
        """Microseconds at least."""
        keys = self.requests * self.context
        moved = keys * WIDTH * self.pages.itemsize
        done = 2 * keys * self.new * self.heads * (WIDTH + LATENT)
        return max(moved / BYTES, done / FLOPS) * 1e6


DECODE = (
    Case("H12 B1 8k", 12, 1, 8192, bar=14),
    Case("H12 B32 8k", 12, 32, 8192, bar=85),
    Case("H96 B8 128k", 96, 8, 131072, bar=421),
    Case("H12 B1 1k", 12, 1, 1024),
    Case("H12 B128 4k", 12, 128, 4096),
    Case("H6 B1 128k", 6, 1, 131072),
    Case("H24 B32 8k", 24, 32, 8192),
    Case("H96 B1 8k", 96, 1, 8192),
    Case("H12 B32 8k x8", 12, 32, 8192, new=8),
    Case("H12 B32 8k fp8", 12, 32, 8192, pages=torch.float8_e4m3fn),
    Case("H12 B1 8k fp8", 12, 1, 8192, pages=torch.float8_e4m3fn),
)


def inputs(case: Case, seed: int = 0):
    """Enough sets that together they exceed the L2 cache; they share one pool."""
    torch.manual_seed(seed)
    each = -(-case.context // PAGE)
    size = case.requests * each * PAGE * WIDTH * case.pages.itemsize
    sets = max(1, -(-250_000_000 // size))
    pages = torch.randn(sets * case.requests * each + 1, PAGE, WIDTH, device="cuda", dtype=torch.bfloat16)
    pages = pages.to(case.pages)
    order = torch.randperm(pages.shape[0] - 1, device="cuda").int() + 1
    tables = order.view(sets, case.requests, each)
    tokens = case.requests * case.new
    calls = []
    for table in tables:
        last = case.context - torch.arange(case.new - 1, -1, -1, device="cuda", dtype=torch.int32)
        calls.append(
            {
                "q": torch.randn(tokens, case.heads, WIDTH, device="cuda", dtype=torch.bfloat16),
                "pages": pages,
                "latent_dim": LATENT,
                "page_table": table.contiguous(),
                "key_lens": last.repeat(case.requests),
                "cu_seqlens": torch.arange(0, tokens + 1, case.new, device="cuda", dtype=torch.int32),
                "scale": (128 + 64) ** -0.5,
            }
        )
    return calls


def graph_time(run, calls, repeats: int = 20) -> float:
    """Median microseconds of one call."""
    rounds = max(1, 8 // len(calls))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            run(**call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                run(**call)
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (rounds * len(calls)))
    return statistics.median(times)


def check(case: Case, call, run, want=None) -> float:
    """Compare with the reference; returns the relative error."""
    want, want_lse = want or reference(call)
    out, lse = run(**call, return_lse=True)
    assert_close(case.name, want, out, tolerance("mla_decode", torch.bfloat16))
    assert_close(f"{case.name} lse", want_lse, lse, 1e-4)
    again, _ = run(**call, return_lse=True)
    assert out.equal(again), f"{case.name}: another result the second time"
    return float((out.float() - want.float()).norm() / want.float().norm())


def reference(call):
    """In fp32; a request and eight heads at a time, so that it fits."""
    cu = call["cu_seqlens"].tolist()
    outs, lses = [], []
    for i, (begin, end) in enumerate(pairwise(cu)):
        parts = []
        for q in call["q"][begin:end].float().split(8, dim=1):
            one = {"q": q, "page_table": call["page_table"][i : i + 1], "key_lens": call["key_lens"][begin:end]}
            offsets = torch.tensor([0, end - begin], device=q.device, dtype=torch.int32)
            parts.append(mla_decode.reference(**{**call, **one, "cu_seqlens": offsets}, return_lse=True))
        outs.append(torch.cat([out for out, _ in parts], dim=1))
        lses.append(torch.cat([lse for _, lse in parts], dim=1))
    return torch.cat(outs), torch.cat(lses)


def with_config(config, splits=None):
    """The adapter with another launch configuration."""

    def run(q, pages, *, return_lse=False, **rest):
        out, lse = mla._decode(
            q, pages, rest["latent_dim"], rest["page_table"], rest["key_lens"], rest["cu_seqlens"], rest["scale"],
            config=config, num_splits=splits,
        )  # fmt: skip
        return (out, lse) if return_lse else out

    return run


C = mla._Decode
TUNE = {
    "H12 B1 8k": [(C(16, 64, 4, 2, 2), 128), (C(16, 32, 4, 3, 2), 128)],
    "H12 B32 8k": [
        (C(16, 32, 4, 3, 2), 8), (C(16, 64, 4, 2, 2), 8), (C(16, 32, 4, 4, 1), 4),
    ],
    "H96 B8 128k": [
        (C(64, 64, 8, 2, 1), 8), (C(32, 32, 4, 3, 2), 11), (C(32, 32, 8, 3, 2), 11),
    ],
    "H24 B32 8k": [
        (C(32, 32, 4, 3, 2), 8), (C(32, 32, 8, 3, 2), 8),
    ],
    "H12 B32 8k x8": [
        (C(64, 64, 8, 2, 1), 2), (C(32, 32, 4, 3, 2), 2), (C(32, 32, 8, 3, 2), 2),
    ],
    "H12 B32 8k fp8": [
        (C(16, 32, 4, 3, 2), 8), (C(16, 32, 4, 4, 1), 4), (C(16, 64, 4, 2, 2), 8),
    ],
}  # fmt: skip


def attempt(what: str, measure) -> None:
    """Print what `measure` returns; a failure only takes its own line."""
    try:
        print(f"{what:<16} {measure()}", flush=True)
    except Exception as error:
        print(f"{what:<16} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
        traceback.print_exc(limit=-2)


def decode(names, tune: bool) -> None:
    """Print the table of decode steps."""
    print(f"{'case':<16} {'us':>8} {'bar':>6} {'floor':>7}  what")
    for case in DECODE:
        if not names or case.name in names:
            attempt(case.name, lambda case=case: one_case(case, tune))
            torch.cuda.empty_cache()


def one_case(case: Case, tune: bool) -> str:
    """Check and measure; other configurations get lines of their own."""
    calls = inputs(case)
    want = reference(calls[0])

    def measure(run):
        error = check(case, calls[0], run, want)
        return graph_time(run, calls), error

    for config, splits in TUNE.get(case.name, []) if tune else []:

        def line(config=config, splits=splits):
            time, _ = measure(with_config(config, splits))
            return f"{time:8.1f} {'':>14}  {tuple(config)} splits {splits}"

        attempt(f"  {case.name}", line)
    time, error = measure(mla_decode)
    return f"{time:8.1f} {case.bar or 0:6.0f} {case.floor:7.1f}  error {error:.1e}"


def prefill(lengths=(8192,), heads=(12, 96)) -> None:
    """Print TFLOP/s of causal prefill with key width 192 and value width 128, of each implementation and of cuDNN."""
    print(f"{'prefill':<16} {'us':>8} {'TFLOP/s':>8}  what")
    for tokens in lengths:
        for count in heads:
            q, k = (torch.randn(tokens, count, 192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            v = torch.randn(tokens, count, 128, device="cuda", dtype=torch.bfloat16)
            cu = torch.tensor([0, tokens], device="cuda", dtype=torch.int32)
            call = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": True, "scale": 192**-0.5}
            work = tokens * (tokens + 1) / 2 * count * 2 * (192 + 128)

            def row(what, run, work=work, name=f"T{tokens} H{count}"):
                try:
                    time = graph_time(run, [{}], repeats=10)
                    print(f"{name:<16} {time:8.1f} {work / time / 1e6:8.0f}  {what}", flush=True)
                except Exception as error:
                    print(f"{name:<16} failed: {what} {type(error).__name__}: {str(error)[:300]}", flush=True)

            def sdpa(backend, q=q, k=k, v=v):
                def run():
                    with sdpa_kernel(backend):
                        return torch.nn.functional.scaled_dot_product_attention(
                            *(x[None].transpose(1, 2) for x in (q, k, v)), is_causal=True, scale=192**-0.5
                        )

                return run

            row("cuDNN through SDPA", sdpa(SDPBackend.CUDNN_ATTENTION))
            target = attention_varlen.local_target()
            spec = attention_varlen.spec_of(q, k, v, **call)
            for impl in attention_varlen.implementations():
                if impl.name == "reference" or impl.why_not(spec, target) is not None:
                    continue
                row(impl.name, lambda impl=impl, q=q, k=k, v=v, call=call: impl.run(q, k, v, **call))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="names of decode cases, or prefill")
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    if not args.only or "prefill" not in args.only or len(args.only) > 1:
        decode([n for n in args.only if n != "prefill"], args.tune)
    if not args.only or "prefill" in args.only:
        prefill()


if __name__ == "__main__":
    main()
