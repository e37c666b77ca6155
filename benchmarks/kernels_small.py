"""Small kernels on one GPU: attention residuals, few-token KDA, short convolution, SiTU, norms, paged rows.

    python -m benchmarks.kernels_small [--only attn_res,mixer,...] [--tune]

Each case is checked against the reference in bf16 first, then timed: replays of a CUDA graph over several input sets,
so that the L2 cache is cold; the median in microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import traceback
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from k3lib import ops
from k3lib.testing import assert_close, tolerance

if TYPE_CHECKING:
    from collections.abc import Callable

DEVICE = torch.device("cuda")
BF16, F32 = torch.bfloat16, torch.float32


class Case(NamedTuple):
    name: str
    bar: float | None
    floor: float
    make: Callable[..., Callable[[], object]]  # each call gives a run over fresh inputs
    check: Callable[[], None]
    set_bytes: float
    variants: dict[str, dict[str, object]]


def median_us(make: Callable[[], Callable[[], object]], set_bytes: float, repeats: int) -> float:
    """Median time of one call: a graph of calls over rotating inputs, together larger than the L2 cache."""
    sets = max(2, min(40, int(300e6 // max(set_bytes, 1)) + 1))
    runs = [make() for _ in range(sets)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for run in runs[:2]:
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / sets)
    return statistics.median(times)


def draw(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=F32).to(dtype)


def residuals(
    tokens: int, rows: int, bar: float | None, *, delta: bool = True, write: int | None = None, hidden: int = 7168
) -> Case:
    """`rows` rows of the bank and the running sum."""
    from k3lib.backends.triton import attn_res_kernels as kernels  # noqa: PLC0415

    score, norm = draw(hidden, dtype=F32) / hidden**0.5, draw(hidden)

    def inputs():
        return draw(tokens, hidden), draw(tokens, hidden) if delta else None, draw(tokens, 8, hidden)

    keywords = {
        "score_weight": score, "out_norm_weight": norm, "num_blocks": rows, "write_block": write, "eps": 1e-5,
        "out_eps": 1e-5,
    }  # fmt: skip

    def make(config=None):
        prefix, pending, bank = inputs()
        return lambda: kernels.launch_attn_res(
            prefix, pending, bank, score, norm, rows, write, 1e-5, 1e-5, config=config
        )

    def check():
        for streams in (True, False):
            prefix, pending, bank = (None if x is None else x[:64] for x in inputs())
            p = prefix if pending is None else prefix + pending
            want, _ = ops.attn_res.reference(p.float(), None, bank.float(), **{**keywords, "write_block": None})
            config = None if not streams else kernels.STREAM.get(8192)
            for _ in range(2):
                mine = bank.clone()
                got, new = kernels.launch_attn_res(
                    prefix, pending, mine, score, norm, rows, write, 1e-5, 1e-5, config=config
                )
                assert_close("out", want, got, tolerance("attn_res", BF16))
                assert (mine[:, write] if write is not None else new).equal(p)

    moved = rows + 2 + 2 * delta  # the bank, the running sum, what is added to it and the new sum, the result
    floor = round(tokens * hidden * 2 * moved / 4.3e6, 1)
    tries = [kernels.Tiles(4, 16), kernels.Tiles(4, 8), kernels.Stream(3, 8, 128), kernels.Stream(2, 8, 128)]
    tune = {str(config): {"config": config} for config in tries}
    size = tokens * hidden * 2 * moved
    name = f"attn_res T={tokens} rows={rows}{' +delta' * delta}{' snapshot' * (write is not None)}"
    return Case(name, bar, floor, make, check, size, tune)


def mixer(heads: int, requests: int, bar: float, floor: float) -> Case:
    from k3lib.backends.triton import kda_decode_kernels as kernels  # noqa: PLC0415
    from k3lib.backends.triton.kda_decode import kda_mixer_triton  # noqa: PLC0415

    dim, width = 128, 4
    channels = heads * 3 * dim
    params = ops.KDAParams(draw(heads, dtype=F32), draw(heads, dim, dtype=F32), -5.0)
    weight, norm = draw(channels, width, dtype=F32), draw(dim, dtype=F32)
    cu = torch.arange(requests + 1, device=DEVICE, dtype=torch.int32)

    def inputs():
        state = torch.randn(requests + 1, heads, dim, dim, device=DEVICE) * 0.1
        slots = (torch.randperm(requests, device=DEVICE) + 1).to(torch.int32)
        tensors = (
            draw(requests, channels),
            draw(requests, heads, dim),
            draw(requests, heads),
            draw(requests, heads, dim),
        )
        return tensors, state, draw(requests + 1, width - 1, channels), slots

    def make(config=None):
        tensors, state, conv, slots = inputs()
        return lambda: kernels.launch_kda_mixer(
            *tensors, params, weight, norm, 1e-5, dim**-0.5, state, conv, slots, cu, config
        )

    def check():
        tensors, state, conv, slots = inputs()
        keywords = {
            "params": params, "conv_weight": weight, "norm_weight": norm, "norm_eps": 1e-5, "scale": dim**-0.5,
            "slots": slots, "cu_seqlens": cu,
        }  # fmt: skip
        states = [(state.clone(), conv.clone()) for _ in range(3)]
        with ops.use_backend("reference"):
            want = ops.kda_mixer.reference(
                *(x.float() for x in tensors), state=states[0][0], conv_state=states[0][1].float(), **keywords
            )
            ops.kda_mixer.reference(*tensors, state=state, conv_state=conv, **keywords)
        got = kda_mixer_triton(*tensors, state=states[1][0], conv_state=states[1][1], **keywords)
        again = kda_mixer_triton(*tensors, state=states[2][0], conv_state=states[2][1], **keywords)
        assert_close("out", want, got, tolerance("kda_mixer", BF16))
        assert_close("state", state, states[1][0], 1e-3)
        assert conv.equal(states[1][1])
        assert got.equal(again)

    size = requests * heads * dim * dim * 8
    configs = [(128, 4, 168, 32), (512, 4, 128, 32), (256, 4, 128, 32), (256, 8, 128, 64), (256, 4, None, 32)]
    tune = {f"{config}": {"config": config} for config in configs}
    return Case(f"kda_mixer H={heads} B={requests}", bar, floor, make, check, size, tune)


def convolution(tokens: int, heads: int, bar: float, floor: float) -> Case:
    from k3lib.backends.triton import conv_kernels as kernels  # noqa: PLC0415
    from k3lib.backends.triton.conv import short_conv_triton  # noqa: PLC0415

    channels, width = heads * 384, 4
    weight = draw(channels, width, dtype=F32)
    cu = torch.tensor([0, tokens], device=DEVICE, dtype=torch.int32)
    slots = torch.ones(1, device=DEVICE, dtype=torch.int32)

    def make(config=None):
        x, conv = draw(tokens, channels), draw(2, width - 1, channels)
        return lambda: kernels.launch_short_conv(x, weight, conv, slots, cu, None, None, False, config)

    def check():
        x, conv = draw(tokens, channels), draw(2, width - 1, channels)
        mine = conv.clone()
        want = ops.short_conv.reference(x, weight, conv_state=conv, slots=slots, cu_seqlens=cu)
        got = short_conv_triton(x, weight, conv_state=mine, slots=slots, cu_seqlens=cu)
        assert_close("out", want, got, tolerance("short_conv", BF16))
        assert mine.equal(conv)

    tune = {
        f"tokens {t} channels {c} warps {w}": {"config": (t, c, w)}
        for t, c, w in ((32, 256, 8), (16, 256, 4), (32, 128, 4), (64, 256, 8), (32, 512, 8), (16, 512, 8))
    }
    return Case(f"short_conv T={tokens} H={heads}", bar, floor, make, check, tokens * channels * 4, tune)


def simple(name: str, size: float, make_call: Callable[[], Callable[[str], object]], dtype=BF16) -> Case:
    """A case of two implementations of one op on equal inputs, without a bar; the floor is at 4.1 TB/s."""

    def make():
        call = make_call()
        return lambda: call("triton")

    def check():
        call = make_call()
        want, got = call("reference"), call("triton")
        if isinstance(want, torch.Tensor):
            assert_close("out", want, got, tolerance(name.split()[0], dtype))

    return Case(name, None, round(size / 4.1e6, 1), make, check, size, {})


def implementation(op: str, which: str) -> Callable[..., object]:
    found = ops.ops()[op]
    if which == "reference":
        return found.reference
    return next(impl.run for impl in found.implementations() if impl.name == which)


def norm(rows: int, width: int) -> Case:
    def make_call():
        x, weight = draw(rows, width), draw(width)
        return lambda which: implementation("rms_norm", which)(x, weight, eps=1e-5)

    return simple(f"rms_norm rows={rows} D={width}", rows * width * 4, make_call)


def gated(tokens: int, heads: int) -> Case:
    def make_call():
        x, gate, weight = draw(tokens, heads, 128), draw(tokens, heads, 128), draw(128, dtype=F32)
        return lambda which: implementation("gated_rms_norm", which)(x, gate, weight, eps=1e-5)

    return simple(f"gated_rms_norm T={tokens} H={heads}", tokens * heads * 128 * 6, make_call)


def store(tokens: int, page_dtype: torch.dtype) -> Case:
    def make_call():
        values, pages = draw(tokens, 576), torch.zeros(tokens // 64 + 2, 64, 576, device=DEVICE).to(page_dtype)
        rows = torch.randperm(tokens, device=DEVICE) + 1
        return lambda which: implementation("store_rows", which)(values, pages, rows)

    size = tokens * 576 * (2 + torch.empty(0, dtype=page_dtype).element_size())
    return simple(f"store_rows T={tokens} {str(page_dtype)[6:]}", size, make_call)


def gather(tokens: int) -> Case:
    def make_call():
        pages, rows = draw(tokens // 64 + 2, 64, 576), torch.randperm(tokens, device=DEVICE)
        return lambda which: implementation("gather_rows", which)(pages, rows)

    return simple(f"gather_rows n={tokens}", tokens * 576 * 4, make_call)


def merge(tokens: int, heads: int) -> Case:
    def make_call():
        outs, lses = draw(2, tokens, heads, 128), draw(2, tokens, heads, dtype=F32)
        return lambda which: implementation("merge_partials", which)(outs, lses)[0]

    return simple(f"merge_partials P=2 T={tokens} H={heads}", tokens * heads * 128 * 6, make_call)


def step(requests: int, heads: int, tokens: int) -> Case:
    params = ops.KDAParams(draw(heads, dtype=F32), draw(heads, 128, dtype=F32), -5.0)
    cu = torch.arange(requests + 1, device=DEVICE, dtype=torch.int32) * tokens

    def make_call():
        q, k, v, gate = (draw(requests * tokens, heads, 128) for _ in range(4))
        beta, state = draw(requests * tokens, heads), draw(requests + 1, heads, 128, 128, dtype=F32)
        slots = torch.arange(1, requests + 1, device=DEVICE, dtype=torch.int32)
        pools = {which: state.clone() for which in ("reference", "triton")}
        return lambda which: implementation("kda_recurrent", which)(
            q, k, v, gate, beta, params=params, state=pools[which], slots=slots, cu_seqlens=cu, scale=128**-0.5
        )

    name = f"kda_recurrent H={heads} B={requests} tokens={tokens}"
    return simple(name, requests * heads * 131072, make_call)


def window(requests: int, heads: int) -> Case:
    weight, cu = draw(heads * 384, 4, dtype=F32), torch.arange(requests + 1, device=DEVICE, dtype=torch.int32)

    def make_call():
        x, slots = draw(requests, heads * 384), torch.arange(1, requests + 1, device=DEVICE, dtype=torch.int32)
        pool = draw(requests + 1, 3, heads * 384)
        pools = {which: pool.clone() for which in ("reference", "triton")}
        return lambda which: implementation("short_conv", which)(
            x, weight, conv_state=pools[which], slots=slots, cu_seqlens=cu
        )

    return simple(f"short_conv decode H={heads} B={requests}", requests * heads * 384 * 16, make_call)


def situ(rows: int, width: int, bar: float, floor: float) -> Case:
    from k3lib.backends.triton import pointwise_kernels as kernels  # noqa: PLC0415
    from k3lib.backends.triton.pointwise import situ_and_mul_triton  # noqa: PLC0415

    def make(config=None):
        x = draw(rows, 2 * width)
        return lambda: kernels.launch_situ(x, 4.0, 25.0, config)

    def check():
        x = draw(1000, 2 * width) * 3
        want = ops.situ_and_mul.reference(x.double(), beta=4.0, linear_beta=25.0)
        assert_close("out", want, situ_and_mul_triton(x, beta=4.0, linear_beta=25.0), tolerance("situ_and_mul", BF16))
        tiny = x * 1e-4
        want = ops.situ_and_mul.reference(tiny.double(), beta=4.0, linear_beta=25.0)
        got = situ_and_mul_triton(tiny, beta=4.0, linear_beta=25.0)
        assert_close("tiny", want, got, tolerance("situ_and_mul", BF16))

    tune = {f"block {b} warps {w}": {"config": (b, w)} for b, w in ((2048, 4), (1024, 8))}
    return Case(f"situ rows={rows} D={width}", bar, floor, make, check, rows * width * 6, tune)


CASES: dict[str, list[Callable[[], Case]]] = {
    "attn_res": [
        lambda: residuals(64, 4, 5),
        lambda: residuals(8192, 8, 330, delta=False),
        lambda: residuals(8192, 7, None, write=7),
        lambda: residuals(8192, 8, None),
        lambda: residuals(256, 8, None),
        lambda: residuals(1024, 8, None),
    ],
    "mixer": [
        lambda: mixer(12, 32, 15, 12.2),
        lambda: mixer(12, 256, 112, 98),
        lambda: mixer(96, 32, 110, 98),
        lambda: mixer(96, 256, 850, 784),
    ],
    "conv": [lambda: convolution(8192, 12, 50, 35)],
    "situ": [lambda: situ(131072, 384, 76, 70)],
    "others": [
        lambda: norm(64, 7168),
        lambda: norm(8192, 7168),
        lambda: norm(8192, 512),
        lambda: gated(8192, 12),
        lambda: store(64, BF16),
        lambda: store(8192, BF16),
        lambda: store(8192, torch.float8_e4m3fn),
        lambda: gather(65536),
        lambda: merge(8192, 12),
        lambda: step(32, 12, 1),
        lambda: step(256, 12, 1),
        lambda: step(32, 12, 8),
        lambda: window(32, 12),
    ],
}


def show(name: str, us: str, case: Case) -> None:
    print(f"{name:<44} {us:>9} {case.bar or 0:>7} {case.floor:>7}", flush=True)


def measure(case: Case, repeats: int, *, tune: bool) -> None:
    """Print the case, and its variants if asked; a failure is printed and does not end the run."""
    try:
        case.check()
        show(case.name, f"{median_us(case.make, case.set_bytes, repeats):.1f}", case)
    except Exception as error:
        traceback.print_exc(limit=3)
        show(case.name, type(error).__name__, case)
        print(str(error)[:300])
    for name, keywords in case.variants.items() if tune else ():
        try:
            us = median_us(partial(case.make, **keywords), case.set_bytes, repeats)
            show(f"    {name}", f"{us:.1f}", case)
        except Exception as error:  # noqa: PERF203 - one variant must not end the others
            print(f"    {name}: {str(error)[:200]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--tune", action="store_true", help="also the configurations that lost")
    parser.add_argument("--repeats", type=int, default=25, help="of a graph")
    options = parser.parse_args()
    print(f"{'case':<44} {'us':>9} {'bar':>7} {'floor':>7}")
    for group in options.only.split(","):
        for build in CASES[group]:
            measure(build(), options.repeats, tune=options.tune)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
