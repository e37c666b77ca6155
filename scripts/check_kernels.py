"""A random model of middle size on a GPU: kernels in bf16 against the references in fp32, replayed against eager steps.

    python scripts/check_kernels.py                       # needs a GPU; a few minutes with cold kernels

Prints one line per check, last; exit status 1 if one misses.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import sys
import warnings

import torch

from k3lib import Batch, Engine, EngineConfig, KimiK3Config, KimiK3ForCausalLM, SamplingParams
from k3lib.batch import RouteTap
from k3lib.cache import CacheConfig
from k3lib.layers.latent_moe import Experts
from k3lib.layers.linear import fuse
from k3lib.ops import ExpertWeights, observe, use_backend
from k3lib.ops.quant import mxfp4_encode

RELATIVE = 2e-2  # of the root mean square of the logits


def middle(**changes) -> KimiK3Config:
    """The mechanisms of Kimi-K3 with its head sizes, 13 layers."""
    sizes = {
        "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 13,
        "full_attn_layers": [4, 8, 12, 13], "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11], "num_heads": 6,
        "head_dim": 128, "num_attention_heads": 6, "num_key_value_heads": 6,
        "num_experts": 64, "num_experts_per_token": 8,
        "moe_intermediate_size": 192, "routed_expert_hidden_size": 512, "q_lora_rank": 256, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    }  # fmt: skip
    return KimiK3Config.tiny(**{**sizes, **changes})


def random_model(config: KimiK3Config, *, dtype: torch.dtype, device: str, packed: bool) -> KimiK3ForCausalLM:
    """Equal weights for equal configurations, whatever the dtype; experts of MXFP4 values, packed or plain."""
    random = torch.Generator(device).manual_seed(0)
    model = KimiK3ForCausalLM(config, dtype=dtype, device=device)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "experts.w" in name:
                continue
            scale = 3 * p.shape[-1] ** -0.5 if "lm_head" in name else p.shape[-1] ** -0.5 if p.ndim > 1 else 0.1
            mean = 1.0 if "norm" in name else 0.0
            p.copy_((torch.randn(p.shape, generator=random, device=device) * scale + mean).to(torch.bfloat16))
        for module in model.modules():
            if not isinstance(module, Experts):
                continue
            codes = []
            for old in (module.w13, module.w2):
                values = torch.randn(old.shape, generator=random, device=device) * old.shape[-1] ** -0.5
                codes += mxfp4_encode(values)
            weights = ExpertWeights(codes[0], codes[2], codes[1], codes[3], format="mxfp4")
            if packed:
                module.set_packed(weights)
            else:
                plain = weights.decode(torch.arange(weights.num_experts, device=device), dtype)
                for p, value in zip((module.w13, module.w2), plain, strict=True):
                    p.copy_(value)
    fuse(model)
    return model.eval().requires_grad_(requires_grad=False)


def engine_of(model, **rules) -> Engine:
    pools = CacheConfig(num_pages=200, num_slots=40, page_size=64, checkpoint_grid=64)
    return Engine(model, EngineConfig(cache=pools, chunked_prefill_size=512, **rules))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    warnings.simplefilter("ignore")
    lines, good = [], True

    def report(name: str, is_good: bool, detail: str) -> None:
        nonlocal good
        good = good and is_good
        lines.append(f"{'ok  ' if is_good else 'MISS'} {name:<44} {detail}")

    small = {"num_hidden_layers": 4, "full_attn_layers": [4], "kda_layers": [1, 2, 3], "hidden_size": 128}
    config = middle(**(small if device == "cpu" else {}))
    kernels = random_model(config, dtype=torch.bfloat16, device=device, packed=True)
    wide = random_model(config, dtype=torch.float32, device=device, packed=False)
    random = torch.Generator(device).manual_seed(1)
    prompts = [torch.randint(4096, (n,), generator=random, device=device) for n in (700, 64, 1, 130)]
    ran: collections.Counter[str] = collections.Counter()
    with torch.inference_mode():
        # the experts are those that fp32 chooses: where two scores are nearly equal, bf16 may choose another one
        shape = (sum(map(len, prompts)), config.text.num_layers - 1, config.text.moe.top_k)
        routes = torch.zeros(shape, dtype=torch.int32, device=device)
        with use_backend("reference"):
            want = wide(dataclasses.replace(Batch.pack(prompts), routes=RouteTap(routes, replay=False)))
        with observe(lambda op, spec, impl: ran.update([f"{op}={impl}"])):
            got = kernels(dataclasses.replace(Batch.pack(prompts), routes=RouteTap(routes, replay=True))).float()
        with use_backend("reference"):
            base = kernels(dataclasses.replace(Batch.pack(prompts), routes=RouteTap(routes, replay=True))).float()
    error, rounding = (float((x - want).square().mean().sqrt() / want.square().mean().sqrt()) for x in (got, base))
    allowed = max(RELATIVE, 1.2 * rounding)  # the references in bf16 round as well
    report("logits of whole prompts, bf16 to fp32", error <= allowed, f"{error:.2e}; references {rounding:.2e}")
    top = want.topk(2, -1).values
    clear = top[:, 0] - top[:, 1] > 4 * RELATIVE * want.square().mean().sqrt()
    same = (got.argmax(-1) == want.argmax(-1))[clear].float().mean()
    report("best token where it is clear", float(same) == 1.0, f"{float(same):.4f} of {int(clear.sum())} tokens")

    ids = [p.tolist() for p in prompts] + [p.tolist()[:40] for p in prompts[:2]]
    greedy = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
    eager = engine_of(kernels, cuda_graphs=False)
    first = [out.token_ids for out in eager.generate(ids, greedy)]
    report(
        "eager steps twice", first == [out.token_ids for out in eager.generate(ids, greedy)], "cold, then prefix hits"
    )
    replayed = engine_of(kernels)
    second = [out.token_ids for out in replayed.generate(ids, greedy)]
    graphs = replayed.runner.graphs
    if graphs is None or graphs.reason is not None:
        report("replayed steps", device == "cpu", "no graphs here" if graphs is None else str(graphs.reason))
    else:
        report(
            "replayed steps as eager ones",
            first == second,
            f"{graphs.num_captures} captures, {graphs.num_replays} replays",
        )
    fixed = engine_of(kernels, deterministic=True, cuda_graphs=False)
    together = [out.token_ids for out in fixed.generate(ids, greedy)]
    alone = [fixed.generate([p], greedy)[0].token_ids for p in ids]
    report("deterministic: alone as together", together == alone, f"{len(ids)} requests")
    for engine in (eager, replayed, fixed):
        engine.cache.check()
    print("kernels: " + ", ".join(sorted(ran)))
    print("\n".join(lines))
    sys.exit(not good)


if __name__ == "__main__":
    main()
