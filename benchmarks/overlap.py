"""Shared experts beside the routed ones on one GPU: a mixture-of-experts layer of K3's shape, as one rank has it.

    python -m benchmarks.overlap --of tp8 tp16
    python -m benchmarks.overlap --of tp8 --device cpu --tiny   # both ways are the same there

Nothing is sent: collectives return their input. Each line: microseconds of a layer one after the other and overlapped,
called eagerly and replayed from a graph of several layers in a row, and whether all results are equal bit for bit.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings

import torch

from benchmarks.rank import Silent, kimi_k3
from k3lib import KimiK3Config
from k3lib.expert_io import new_experts
from k3lib.layers import LatentMoE
from k3lib.layers.linear import fuse
from k3lib.parallel.streams import WAYS

LAYERS = 8  # in a row, one after the other's output


def layers_of(config: KimiK3Config, size: int, device: torch.device, way: str) -> list[LatentMoE]:
    """One rank's layer with random weights, plain and overlapped."""
    moe = config.text.moe
    layer = LatentMoE(moe, tp=Silent(0, size), dtype=torch.bfloat16, device="meta")
    inner = layer.experts.end - layer.experts.begin
    packed = new_experts(moe.num_experts, "mxfp4", moe.expert_width, inner, dtype=torch.bfloat16, device=device)
    for codes, scale in ((packed.w13, packed.w13_scale), (packed.w2, packed.w2_scale)):
        codes.random_(0, 256)
        scale.random_(114, 118)
    layer.experts.set_packed(packed)
    for module in layer.modules():
        for name, old in module.named_parameters(recurse=False):
            new = torch.empty(old.shape, dtype=old.dtype, device=device)
            if old.ndim > 1:
                new.normal_(0, old.shape[-1] ** -0.5)
            else:
                new.normal_(1.0 if "norm" in type(module).__name__.lower() else 0.0, 0.02)
            setattr(module, name, torch.nn.Parameter(new, requires_grad=False))
    fuse(layer)
    layer.overlap_shared = "never"
    other = copy.copy(layer)  # with the same weights
    other.overlap_shared = way
    return [layer, other]


def in_a_row(layer: LatentMoE, x: torch.Tensor) -> torch.Tensor:
    for _ in range(LAYERS):
        y = layer(x)
        x = y * y.float().square().mean(-1, keepdim=True).add(1e-6).rsqrt().to(y.dtype)
    return x


def graph_of(layer: LatentMoE, x: torch.Tensor):
    """A replay of `in_a_row`, and where its result stands."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            in_a_row(layer, x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = in_a_row(layer, x)
    return graph.replay, out


def micros(call, repeat: int, device: torch.device) -> float:
    """Of one layer: wall time around the device's work, so that slow issuing counts."""
    found = []
    for _ in range(repeat):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append((time.perf_counter() - begin) / LAYERS * 1e6)
    return statistics.median(found)


def measure(layers: list[LatentMoE], tokens: int, width: int, device: torch.device, repeat: int) -> str:
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
    outs = [in_a_row(layer, x) for layer in layers for _ in range(2)]
    calls = [lambda layer=layer: in_a_row(layer, x) for layer in layers]
    if device.type == "cuda":
        for layer in layers:
            replay, out = graph_of(layer, x)
            replay()
            outs.append(out.clone())
            for _ in range(5):
                replay()
            outs.append(out.clone())
            calls.append(replay)
    first, second = [[micros(call, repeat, device) for call in calls] for _ in range(2)]
    best = [min(pair) for pair in zip(first, second, strict=True)]
    equal = all(out.equal(outs[0]) for out in outs)
    kinds = ("eager", "graph")[: len(calls) // 2]
    parts = [
        f"{kind} {best[2 * i]:9.1f} -> {best[2 * i + 1]:9.1f} us ({best[2 * i + 1] / best[2 * i] - 1:+6.1%})"
        for i, kind in enumerate(kinds)
    ]
    finite = bool(outs[0].isfinite().all())
    return f"{'   '.join(parts)}   {'bit-equal' if equal and finite else f'DIFFER (finite={finite})'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", nargs="*", default=["tp8", "tp16"])
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 32, 128, 8192])
    parser.add_argument("--way", default="graphs", choices=tuple(WAYS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    device = torch.device(args.device)
    config = KimiK3Config.tiny() if args.tiny else kimi_k3(2)
    with torch.inference_mode():
        for name in args.of:
            size = 2 if args.tiny else int(name.removeprefix("tp"))
            layers = layers_of(config, size, device, args.way)
            for tokens in args.tokens:
                line = measure(layers, tokens, config.text.hidden_size, device, 3 if tokens > 1000 else 10)
                print(f"{name:5} {tokens:5} tokens   {line}", flush=True)
            del layers


if __name__ == "__main__":
    main()
