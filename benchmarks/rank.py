"""One rank's share of Kimi-K3 with random weights on one GPU: a captured decode step and a prefill chunk.

    python -m benchmarks.rank --of tp16                 # all 93 layers, about 93 GB
    python -m benchmarks.rank --of tp16 --layers 9      # the same with fewer
    python -m benchmarks.rank --layers 9 --top 20       # and the kernels that belong to no kind

Nothing is sent: collectives return their input. The floor of a step is what it has to read and write once (weights of
all layers, the experts that were chosen, states, latent rows) over the measured bandwidth, or its multiplications over
the measured rate if that is more. `python -m benchmarks.model --rank-of tp16` is the same.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import statistics
import time
import warnings
from dataclasses import dataclass

import torch

from k3lib import Batch, KimiK3Config, KimiK3ForCausalLM
from k3lib.bench import Ceilings
from k3lib.cache import CacheConfig, HybridCache
from k3lib.layers.latent_moe import Experts
from k3lib.layers.linear import fuse
from k3lib.ops import ExpertWeights
from k3lib.parallel import Mesh

PAGE = 64
# kernels by a part of their name, first match; the rest are pointwise kernels of torch
CLASSES = {
    "experts": ("_gate_up", "_down_kernel", "_combine", "_planes", "_sort_", "_count_", "_scan_", "_scatter_"),
    "route": ("route", "choose", "logits"),
    "kda": ("kda", "mixer", "recurrent", "conv", "chunk", "summary", "compose", "_output"),
    "mla": ("mla", "decode_kernel", "_merge", "attend", "flash", "cudnn", "fmha"),
    "attn_res": ("attn_res", "residual"),
    "linear": ("gemm", "nvjet", "cutlass", "sm90_xmma", "gemv", "splitk", "cublas", "_one_kernel",
               "_few_kernel"),
    "norm, SiTU": ("norm", "situ"),
}  # fmt: skip


@dataclass(frozen=True)
class Silent:
    """A group whose collectives return their input: sizes are right, values are not."""

    rank: int
    size: int

    def all_reduce(self, x, op="sum"):
        return x

    def all_gather(self, x, dim=0):
        return x

    def reduce_scatter(self, x, dim=0):
        return x

    def all_to_all(self, x, send_counts, recv_counts):
        return x


def kimi_k3(layers: int) -> KimiK3Config:
    """The sizes of the released model, or of its first layers."""
    latent = [i for i in range(1, 94) if i % 4 == 0 or i == 93]
    return KimiK3Config.tiny(
        vocab_size=163840, hidden_size=7168, num_hidden_layers=layers, intermediate_size=33792,
        full_attn_layers=[i for i in latent if i <= layers],
        kda_layers=[i for i in range(1, layers + 1) if i not in latent], num_heads=96, head_dim=128,
        num_attention_heads=96, num_key_value_heads=96, attn_res_block_size=12, num_experts=896,
        num_experts_per_token=16, moe_intermediate_size=3072, routed_expert_hidden_size=3584, q_lora_rank=1536,
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, max_position_embeddings=1 << 20,
        bos_token_id=163584, eos_token_id=163586, pad_token_id=163839, media_placeholder_token_id=163605,
    )  # fmt: skip


def build(config: KimiK3Config, size: int, device: torch.device) -> KimiK3ForCausalLM:
    """A rank's share with random weights, experts in MXFP4."""
    model = KimiK3ForCausalLM(config, mesh=Mesh(tp=Silent(0, size)), dtype=torch.bfloat16, device="meta")
    for module in model.modules():
        if isinstance(module, Experts):
            shapes = [module.w13.shape, module.w2.shape]
            packed = [torch.randint(0, 256, (*s[:2], s[2] // 2), dtype=torch.uint8, device=device) for s in shapes]
            scales = [torch.randint(114, 118, (*s[:2], s[2] // 32), dtype=torch.uint8, device=device) for s in shapes]
            module.set_packed(ExpertWeights(*packed, *scales, format="mxfp4"))
    for module in model.modules():
        for name, old in module.named_parameters(recurse=False):
            new = torch.empty(old.shape, dtype=old.dtype, device=device)
            if old.ndim > 1:
                new.normal_(0, old.shape[-1] ** -0.5)
            else:
                new.normal_(1.0 if "norm" in type(module).__name__.lower() else 0.0, 0.02)
            setattr(module, name, torch.nn.Parameter(new, requires_grad=False))
    fuse(model)
    return model.eval()


def weight_bytes(model) -> tuple[int, int]:
    """Bytes of everything but experts and embedding, and of one expert in all layers."""
    seen = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    embedding = model.model.embed_tokens.weight
    seen.pop(embedding.untyped_storage().data_ptr(), None)
    packed = [m.packed for m in model.modules() if isinstance(m, Experts)]
    each = sum(
        sum(x.nbytes for x in (w.w13, w.w2, w.w13_scale, w.w2_scale)) // w.num_experts for w in packed if w is not None
    )
    return sum(seen.values()), each


def chosen_experts(tokens: int, experts: int, top_k: int) -> float:
    """Different experts that so many tokens choose, if all are equally likely."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


def opened(model, cache, requests: int, context: int, *, new: int) -> list:
    """Leases that have a context of zeros in their memory."""
    leases = []
    for i in range(requests):
        lease = cache.open([i + 1, *[7] * (context + new - 1)])
        cache.grow(lease, tokens=context + new)
        if context:
            cache.make_batch([(lease, [7] * context)])
            cache.commit(lease, [7] * context)
        leases.append(lease)
    return leases


def captured(call):
    """A replay of a call, or the call itself with the reason if it cannot be captured."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError as error:
        torch.cuda.synchronize()
        print(f"not captured: {str(error).splitlines()[0][:160]}")
        return call
    return graph.replay


def timed(call, repeat: int) -> float:
    """Median seconds of device time."""
    found = []
    for _ in range(repeat):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found)


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, parts in CLASSES.items() if any(part in name for part in parts)), "other")


def by_kernel(call) -> dict[str, tuple[float, int]]:
    """Seconds of device time of each kernel in one call, and how often it ran.

    Kernels that begin before the one in front has ended count the time they wait, so the sum may exceed that of a step.
    """
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415 - slow to import

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    return {event.key: (event.self_device_time_total / 1e6, event.count) for event in found.key_averages()}


def show(title: str, seconds: float, floor: float, kernels: dict[str, tuple[float, int]], most: int, kind: str) -> None:
    """One line of the table, and below it the kernels of a kind that took most."""
    parts: collections.Counter[str] = collections.Counter()
    for name, (spent, _) in kernels.items():
        parts[kind_of(name)] += spent
    print(f"{title:<26}{1e3 * seconds:>9.2f}{1e3 * floor:>9.2f}{seconds / floor:>7.2f}   ", end="")
    print("  ".join(f"{kind} {1e3 * value:.2f}" for kind, value in parts.most_common()), flush=True)
    chosen = [(spent, count, name) for name, (spent, count) in kernels.items() if kind in ("all", kind_of(name))]
    for spent, count, name in sorted(chosen, reverse=True)[:most]:
        print(f"{1e3 * spent:>12.3f} ms {count:>6} x {name[:150]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", default="tp16", choices=["tp8", "tp16", "tp32"])
    parser.add_argument("--layers", type=int, default=93)
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--context", type=int, default=1024, help="tokens in front of each decoded one")
    parser.add_argument("--prefill", type=int, default=8192)
    parser.add_argument("--top", type=int, default=0, help="show so many kernels of a kind below each line")
    parser.add_argument("--kind", default="other", help='of which kind; "all" for every one')
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    device, size = torch.device("cuda"), int(args.of[2:])
    config = kimi_k3(args.layers)
    begin = time.perf_counter()
    with torch.inference_mode():
        ceilings = Ceilings.of(device)
        model = build(config, size, device)
    text = config.text
    dense, expert = weight_bytes(model)
    kda = sum(kind == "kda" for kind in text.layer_types)
    mla = args.layers - kda
    heads = text.kda.num_heads // size
    state = heads * text.kda.key_dim * text.kda.value_dim * 4 * kda
    row = (text.mla.kv_lora_rank + text.mla.qk_rope_head_dim) * 2 * mla
    print(
        f"{args.of}, {args.layers} layers: {torch.cuda.memory_allocated() / 1e9:.1f} GB in "
        f"{time.perf_counter() - begin:.0f} s; {dense / 1e9:.2f} GB dense, {expert / 1e6:.1f} MB an expert, "
        f"{ceilings.bytes_per_s / 1e12:.2f} TB/s, {ceilings.flops_per_s / 1e12:.0f} TFLOP/s, torch {torch.__version__}"
    )
    most = max([*args.requests, 1])
    pages = max(most * (args.context // PAGE + 2), args.prefill // PAGE + 2) + 8
    pools = CacheConfig(num_pages=pages, num_slots=most + 2, page_size=PAGE, prefix_cache=False)
    cache = HybridCache.allocate(model.config, pools, device=device, dtype=torch.bfloat16, tp_size=size)
    print(f"\n{'':<26}{'ms':>9}{'floor':>9}{'ratio':>7}   device time by kind, ms")
    with torch.inference_mode():
        for requests in args.requests:
            leases = opened(model, cache, requests, args.context, new=1)
            batch: Batch = cache.make_batch([(lease, [7 + i]) for i, lease in enumerate(leases)], mode="decode")
            call = captured(lambda batch=batch: model(batch, cache, logits="last"))
            used = chosen_experts(requests, text.moe.num_experts, text.moe.top_k)
            moved = dense + used * expert + requests * (2 * state + args.context * row)
            with contextlib.suppress(RuntimeError):
                floor = moved / ceilings.bytes_per_s
                show(f"decode, {requests} requests", timed(call, 12), floor, by_kernel(call), args.top, args.kind)
            for lease in leases:
                cache.discard(lease)
            del call
        if args.prefill:
            (lease,) = opened(model, cache, 1, 0, new=args.prefill)
            batch = cache.make_batch([(lease, [7] * args.prefill)], mode="prefill")
            batch.prefix_pieces(PAGE, 4096)

            def call():
                return model(batch, cache, logits="last")

            call()
            used = chosen_experts(args.prefill, text.moe.num_experts, text.moe.top_k)
            flops = 2 * args.prefill * (dense / 2 + text.moe.top_k * expert * 32 / 17)
            flops += args.prefill**2 * heads * 320 * mla
            floor = max((dense + used * expert) / ceilings.bytes_per_s, flops / ceilings.flops_per_s)
            show(f"prefill, {args.prefill} tokens", timed(call, 3), floor, by_kernel(call), args.top, args.kind)


if __name__ == "__main__":
    main()
