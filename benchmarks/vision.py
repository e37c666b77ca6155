"""The vision tower in its real shapes with random weights: time against the floor of its matrix products.

    python -m benchmarks.vision      # on a CUDA device; elsewhere `--device cpu --layers 1 --sides 112`

First a gate: bf16 against the same weights in fp32, packed images against single ones, a replayed graph against the
eager call. Then one line a case: images, patches, eager time, time of a replayed graph, the floor (FLOPs of all matrix
products over the given peak), what part of it is reached, and the memory that a call needs besides weights. Last the
attention alone, in the ways that are at hand.
"""

import argparse
import statistics
import time

import torch
from torch.nn import functional as F

from k3lib import KimiK3Config, KimiK3ForConditionalGeneration, ops
from k3lib.engine.vision_graphs import MAX_PATCHES, capture_tower
from k3lib.layers.vision import Grid, vision_flops

REAL = {
    "vt_hidden_size": 1024, "mm_hidden_size": 1024, "qkv_hidden_size": 1536, "vt_intermediate_size": 4096,
    "vt_num_attention_heads": 12, "vt_num_hidden_layers": 27, "init_pos_emb_height": 64, "init_pos_emb_width": 64,
    "hidden_size": 7168, "num_hidden_layers": 1, "kda_layers": [1], "full_attn_layers": [], "intermediate_size": 64,
}  # fmt: skip


def make(layers, device, dtype):
    """The tower and projector of K3 in front of a text model of one small layer."""
    config = KimiK3Config.tiny(**{**REAL, "vt_num_hidden_layers": layers})
    torch.manual_seed(0)
    model = KimiK3ForConditionalGeneration(config, dtype=dtype, device=device)
    return model.eval().requires_grad_(requires_grad=False)


def pixels(model, grids):
    count = sum(grid.num_patches for grid in grids)
    return torch.rand(count, 3, 14, 14, device=model.device, dtype=model.dtype) * 2 - 1


def timed(call, device, repeats):
    """Median milliseconds of a call, and the memory that it needs at its peak."""
    call()
    times, peak = [], 0
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
            peak = torch.cuda.max_memory_allocated() - before
        else:
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times), peak


def error(want, got):
    return float((got.double() - want.double()).square().mean().sqrt() / want.double().square().mean().sqrt())


def gate(model, layers):
    """Ratios of errors that must be small."""
    grids = [Grid(1, 16, 24), Grid(1, 8, 8), Grid(1, 32, 18)]
    patches = pixels(model, grids)
    exact = make(layers, model.device, torch.float32)
    exact.load_state_dict(model.state_dict())
    got = model.encode(patches, grids)
    want = exact.encode(patches.float(), grids)
    alone = [model.encode(x, [g])[0] for x, g in zip(patches.split([g.num_patches for g in grids]), grids, strict=True)]
    found = {
        "bf16 to fp32": error(torch.cat(want), torch.cat(got)),
        "packed to alone": error(torch.cat(got), torch.cat(alone)),
    }
    if model.device.type == "cuda":
        graph = capture_tower(model, grids)
        graph(pixels(model, grids))
        found["graph to eager"] = error(torch.cat(got), graph(patches))
        found["graph MiB"] = graph.num_bytes / 2**20
    print("gate", {name: f"{value:.3g}" for name, value in found.items()}, flush=True)
    bad = [name for name, most in (("bf16 to fp32", 4e-2), ("packed to alone", 2e-2), ("graph to eager", 1e-3))
           if not found.get(name, 0) <= most]  # fmt: skip
    if bad:
        raise SystemExit(f"the gate is closed: {', '.join(bad)}")


def attention_ways(tokens, device, dtype):
    """Ways to compute the attention of one image, `[P, 12, 128]`."""
    q, k, v = (torch.randn(tokens, 12, 128, device=device, dtype=dtype) for _ in range(3))
    offsets = torch.tensor([0, tokens], device=device, dtype=torch.int32)
    fields = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "causal": False, "scale": 128**-0.5}
    batch = [x.transpose(0, 1)[None] for x in (q, k, v)]
    ways = {"k3lib": lambda: ops.attention_varlen(q, k, v, **fields)}
    for name in ("triton", "cudnn"):

        def forced(name=name):
            with ops.use_backend(attention_varlen=name):
                return ops.attention_varlen(q, k, v, **fields)

        ways[name] = forced
    ways["torch sdpa"] = lambda: F.scaled_dot_product_attention(*batch)[0].transpose(0, 1)
    return ways


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--sides", type=int, nargs="*", default=[448, 896, 1344, 1792, 2688, 3584])
    parser.add_argument("--peak", type=float, default=790.0, help="TFLOP/s of dense bf16 products")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    device = torch.device(args.device)
    with torch.inference_mode():
        model = make(args.layers, device, torch.bfloat16)
        gate(model, args.layers)
        print(
            f"{'images':>16} {'patches':>8} {'eager ms':>9} {'graph ms':>9} {'floor ms':>9} {'of peak':>8} {'MiB':>7}"
        )
        first = args.sides[0]
        cases = [[side] for side in args.sides] + [[first] * 8, [first, 2 * first, first]]
        for sides in cases:
            try:
                line(model, [Grid(1, side // 14, side // 14) for side in sides], sides, args)
            except Exception as problem:  # noqa: PERF203 - a case that fails does not end the others
                print(sides, "failed:", str(problem).partition("\n")[0][:150], flush=True)
        for side in args.sides:
            tokens = (side // 14) ** 2
            flops, found = 4 * tokens**2 * 1536, []
            for name, call in attention_ways(tokens, device, torch.bfloat16).items():
                try:
                    ms, _ = timed(call, device, args.repeats)
                    found.append(f"{name} {ms:.3f} ms ({flops / ms / 1e9:.0f} TFLOP/s)")
                except Exception as problem:  # noqa: PERF203
                    found.append(f"{name}: {str(problem).partition(chr(10))[0][:60]}")
            print(f"attention of {tokens}:", ", ".join(found), flush=True)


def line(model, grids, sides, args):
    """Print one case."""
    patches, batch = pixels(model, grids), model.vision_batch(grids)
    eager, peak = timed(lambda: model.encode_batch(patches, batch), model.device, args.repeats)
    replayed = float("nan")
    if model.device.type == "cuda" and batch.num_patches <= MAX_PATCHES:
        graph = capture_tower(model, grids)
        replayed, _ = timed(lambda: graph(patches), model.device, args.repeats)
    floor = sum(vision_flops(grid, model.config.vision) for grid in grids) / args.peak / 1e9
    name = f"{len(sides)} x {sides[0]}" if len(set(sides)) == 1 else "+".join(map(str, sides))
    best = min(x for x in (eager, replayed) if x == x)
    print(f"{name:>16} {batch.num_patches:>8} {eager:>9.2f} {replayed:>9.2f} {floor:>9.3f} {floor / best:>8.1%} "
          f"{peak >> 20:>7}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
