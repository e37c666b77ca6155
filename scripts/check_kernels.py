"""Random models of middle size on a GPU: kernels in bf16 against the references in fp32, replayed against eager steps.

    python scripts/check_kernels.py                       # needs a GPU; a few minutes with cold kernels

Two models. In "steady" ones the outputs of layers are small beside the embedding, as in trained models: bf16 stays
close to fp32. In "wild" ones they are not, so that roundings grow from layer to layer: kernels are compared with what
the references in bf16 lose. In both, the best token has to be that of fp32 where its lead is beyond those roundings.
Prints one line per check, last; exit status 1 if one misses.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import sys
import time
import warnings

import torch

from k3lib import Batch, Engine, EngineConfig, KimiK3Config, KimiK3ForCausalLM, SamplingParams
from k3lib.batch import RouteTap
from k3lib.cache import CacheConfig
from k3lib.layers.latent_moe import Experts
from k3lib.layers.linear import fuse
from k3lib.ops import ExpertWeights, observe, use_backend
from k3lib.ops.quant import mxfp4_encode

RELATIVE = 2e-2  # error of steady models' logits, of their root mean square
CLEAR = 6  # a lead of the best token over the second one, in errors of the references in bf16
STEADY = 0.3  # of the outputs of layers, beside an embedding of 1


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


def random_model(
    config: KimiK3Config, *, dtype: torch.dtype, device: str, packed: bool, steady: bool = False
) -> KimiK3ForCausalLM:
    """Equal weights for equal configurations, whatever the dtype; experts of MXFP4 values, packed or plain."""
    random = torch.Generator(device).manual_seed(0)
    model = KimiK3ForCausalLM(config, dtype=dtype, device=device)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "experts.w" in name:
                continue
            scale = 3 * p.shape[-1] ** -0.5 if "lm_head" in name else p.shape[-1] ** -0.5 if p.ndim > 1 else 0.1
            mean = 1.0 if "norm" in name else 0.0
            if steady and "embed_tokens" in name:
                scale = 1.0
            elif steady and name.endswith(("o_proj.weight", "down_proj.weight", "routed_expert_up_proj.weight")):
                scale *= STEADY
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


def logits_of(kernels, wide, prompts, ran) -> tuple[torch.Tensor, ...]:
    """Of the references in fp32, the kernels in bf16, the references in bf16, and kernels that choose experts.

    The others use those that fp32 chooses: where two scores are nearly equal, bf16 may choose another one.
    """
    text = wide.config.text
    shape = (sum(map(len, prompts)), text.num_layers - 1, text.moe.top_k)
    routes = torch.zeros(shape, dtype=torch.int32, device=prompts[0].device)

    def batch(*, replay: bool) -> Batch:
        return dataclasses.replace(Batch.pack(prompts), routes=RouteTap(routes, replay=replay))

    with torch.inference_mode():
        with use_backend("reference"):
            want = wide(batch(replay=False))
        with observe(lambda op, spec, impl: ran.update([f"{op}={impl}"])):
            got = kernels(batch(replay=True)).float()
        with use_backend("reference"):
            base = kernels(batch(replay=True)).float()
        free = kernels(Batch.pack(prompts)).float()
    return want, got, base, free


@torch.inference_mode()
def margin(model, tokens: list[int], others: list[int]) -> float:
    """Difference of the logits of the first token at which the end of `tokens` and `others` part."""
    prompt = len(tokens) - len(others)
    at = next(i for i, (a, b) in enumerate(zip(tokens[prompt:], others, strict=True)) if a != b)
    device = next(model.parameters()).device
    logits = model(Batch.pack([torch.tensor(tokens[: prompt + at], device=device)]))[-1].float()
    return float((logits[tokens[prompt + at]] - logits[others[at]]).abs())


def compare(model, prompts, first, second, noise: float) -> tuple[bool, str]:
    """Whether outputs are equal but for tokens that the model hardly prefers to each other."""
    leads = [margin(model, p + a, b) for p, a, b in zip(prompts, first, second, strict=True) if a != b]
    told = f"{len(leads)} of {len(prompts)} part, at leads up to {max(leads, default=0):.2f}; noise {noise:.2f}"
    return all(x <= noise for x in leads), told


def decode_rate(engine: Engine, requests: int = 32, tokens: int = 128) -> float:
    """Tokens a second of decode steps alone."""
    prompts = [[1 + i, *range(40)] for i in range(requests)]
    seconds = {}
    for count in (4, 1, tokens + 1):  # the first one captures graphs
        params = SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True)
        engine.cache.clear()
        begin = time.perf_counter()
        engine.generate(prompts, params)
        seconds[count] = time.perf_counter() - begin
    return requests * tokens / (seconds[tokens + 1] - seconds[1])


class Report:
    """Lines to print at the end, and whether all are good."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.is_good = True

    def __call__(self, name: str, is_good: bool, detail: str) -> None:
        self.is_good = self.is_good and is_good
        self.lines.append(f"{'ok  ' if is_good else 'MISS'} {name:<50} {detail}")


def check_logits(report: Report, kind: str, kernels, wide, prompts, ran) -> float:
    """Compare logits of prompts; returns a difference of logits that roundings explain."""
    want, got, base, free = logits_of(kernels, wide, prompts, ran)
    size = want.square().mean().sqrt()
    error, rounding = (float((x - want).square().mean().sqrt() / size) for x in (got, base))
    allowed = RELATIVE if kind == "steady" else 1.2 * rounding
    detail = f"{error:.2e}, allowed {allowed:.2e}; references {rounding:.2e}"
    report(f"{kind}: logits of prompts, bf16 to fp32", error <= allowed, detail)
    top = want.topk(2, -1).values
    clear = top[:, 0] - top[:, 1] > CLEAR * rounding * size
    same = float((got.argmax(-1) == want.argmax(-1))[clear].float().mean())
    detail = f"{same:.4f} of {int(clear.sum())} tokens of {len(clear)}"
    report(f"{kind}: best token where it is clear", same == 1.0, detail)
    return float(CLEAR * (free - want).square().mean().sqrt())  # also of experts that bf16 chooses otherwise


def check_engines(report: Report, kernels, ids: list[list[int]], noise: float, device: str) -> None:
    """Compare the tokens of engines that compute the same in other ways."""
    greedy = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)

    def run(engine: Engine) -> list[list[int]]:
        return [out.token_ids for out in engine.generate(ids, greedy)]

    eager, padded, replayed = engine_of(kernels, cuda_graphs=False), engine_of(kernels), engine_of(kernels)
    first = run(eager)
    eager.cache.clear()
    report("eager steps twice, from the beginning", first == run(eager), f"{len(ids)} requests")
    report("the same behind prefix hits, where it is clear", *compare(kernels, ids, first, run(eager), noise))
    if padded.runner.graphs is not None:
        padded.runner.graphs.captures = False
    second = run(padded)
    report("padded steps as others, where it is clear", *compare(kernels, ids, first, second, noise))
    third = run(replayed)
    graphs = replayed.runner.graphs
    if graphs is None or graphs.reason is not None:
        report("replayed steps", device == "cpu", "no graphs here" if graphs is None else str(graphs.reason))
    else:
        detail = f"{graphs.num_captures} captures, {graphs.num_replays} replays"
        report("replayed steps as the same ones run eagerly", second == third, detail)
    fixed = engine_of(kernels, deterministic=True, cuda_graphs=False)
    together = run(fixed)
    alone = [fixed.generate([p], greedy)[0].token_ids for p in ids]
    report("deterministic: alone as together", together == alone, f"{len(ids)} requests")
    for engine in (eager, padded, replayed, fixed):
        engine.cache.check()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    warnings.simplefilter("ignore")
    report = Report()
    small = {"num_hidden_layers": 4, "full_attn_layers": [4], "kda_layers": [1, 2, 3], "hidden_size": 128}
    config = middle(**(small if device == "cpu" else {}))
    lengths = (70, 64, 1, 13) if device == "cpu" else (700, 64, 1, 130)
    random = torch.Generator(device).manual_seed(1)
    prompts = [torch.randint(4096, (n,), generator=random, device=device) for n in lengths]
    ids = [p.tolist() for p in prompts] + [p.tolist()[:40] for p in prompts[:2]]
    ran: collections.Counter[str] = collections.Counter()
    for kind in ("wild", "steady"):
        made = {"device": device, "steady": kind == "steady"}
        kernels = random_model(config, dtype=torch.bfloat16, packed=True, **made)
        wide = random_model(config, dtype=torch.float32, packed=False, **made)
        noise = check_logits(report, kind, kernels, wide, prompts, ran)
        del wide
    check_engines(report, kernels, ids, noise, device)
    if device == "cuda":
        rates = [decode_rate(engine_of(kernels, deterministic=kind)) for kind in (False, True)]
        ratio = rates[1] / rates[0]
        report.lines.append(
            f"     deterministic=True decodes at {ratio:.2f} of the plain rate, {rates[0]:.0f} tokens/s"
        )
    print("kernels: " + ", ".join(sorted(ran)))
    print("\n".join(report.lines))
    sys.exit(not report.is_good)


if __name__ == "__main__":
    main()
