"""Print how far k3lib is from the golden vectors. Usage: python scripts/golden_errors.py FOLDER

FOLDER holds the golden vectors and models. An error is the largest absolute difference from the fp64 value; `noise` is
that of the fp32 run of the code that made the vectors.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open

from k3lib import Batch, Engine, KimiK3Config, KimiK3ForCausalLM, SamplingParams
from k3lib.layers import GatedMLA, KimiDeltaAttention, LatentMoE
from k3lib.ops import KDAParams, kda_chunk, kda_recurrent, quant

MODELS = ("tiny_k3_dev", "tiny_k3_dev_mxfp4", "tiny_k3_wide", "tiny_k3_wide_mxfp4", "tiny_k3_wide_nvfp4")
LAYERS = (("kda_layer", KimiDeltaAttention, "kda"), ("mla_layer", GatedMLA, "mla"), ("latent_moe", LatentMoE, "moe"))


def read(path):
    with safe_open(path, "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118 - not a dict


def off(got, want):
    return float((got.double() - want.double().reshape(got.shape)).abs().max())


def line(what, error, noise):
    print(f"  {what:<37} {error:8.1e}   noise {noise:8.1e}")


def recurrences(folder):
    for name in ("kda_core", "kda_core_k128"):
        tensors, facts = read(folder / f"{name}.safetensors")
        noise = json.loads(facts["fp32_vs_fp64_max_abs"])
        for case in dict.fromkeys(key.split(".")[0] for key in tensors):
            x = {key.removeprefix(f"{case}."): t for key, t in tensors.items() if key.startswith(f"{case}.")}
            size, tokens, heads, width = x["q"].shape
            cu = x.get("cu_seqlens", torch.arange(size + 1, dtype=torch.int32) * tokens)
            bound = json.loads(facts.get(f"{case}.lower_bound", "null"))
            params = KDAParams(x["A_log"], x["dt_bias"].view(heads, width), bound)
            inputs = [x[key].flatten(0, 1) for key in ("q", "k", "v", "g", "beta")]
            for op in (kda_recurrent, kda_chunk):
                pool = torch.zeros(len(cu), heads, width, width)
                if "initial_state" in x:
                    pool[1:] = x["initial_state"].mT  # stored key first
                slots = torch.arange(1, len(cu), dtype=torch.int32)
                out = op(*inputs, params=params, state=pool, slots=slots, cu_seqlens=cu, scale=width**-0.5)
                line(f"{op.name}, {case}: o", off(out, x["out64.o"]), noise[f"{case}.o"])
                line("    final state", off(pool[1:].mT, x["out64.final_state"]), noise[f"{case}.final_state"])


def layers(folder):
    for name, kind, part in LAYERS:
        tensors, facts = read(folder / f"{name}.safetensors")
        noise = json.loads(facts["fp32_vs_fp64_max_abs"])
        for case in sorted({key.split(".")[0] for key in tensors} - {"bf16"}):
            config = getattr(KimiK3Config.from_hf(json.loads(facts[f"{case}.config"])).text, part)
            layer = kind(config)
            start = f"{case}.w."
            weights = {key.removeprefix(start): t for key, t in tensors.items() if key.startswith(start)}
            if part == "moe":
                weights = stack(weights, config)
            layer.load_state_dict(weights)
            x = tensors[f"{case}.x"]
            out = layer(x) if part == "moe" else layer(x, Batch.lengths([len(x)]))
            line(f"{name}, {case}", off(out, tensors[f"{case}.out64.y"]), noise[f"{case}.y"])


def stack(weights, config):
    """Per-expert matrices as the two stacks that the layer holds."""
    each = [{w: weights.pop(f"experts.{e}.{w}.weight") for w in ("w1", "w2", "w3")} for e in range(config.num_experts)]
    weights["experts.w13"] = torch.stack([torch.cat([e["w1"], e["w3"]]) for e in each])
    weights["experts.w2"] = torch.stack([e["w2"] for e in each])
    if not config.latent_norm:
        weights.pop("routed_expert_norm.weight", None)
    return weights


def decoders(folder):
    tensors, _ = read(folder / "mxfp4.safetensors")
    cases = [key.split(".")[0] for key in tensors if key.endswith(".dequantized")]
    equal = [
        torch.equal(quant.mxfp4_decode(tensors[f"{c}.weight_packed"], tensors[f"{c}.weight_scale"], torch.bfloat16),
                    tensors[f"{c}.dequantized"].bfloat16())
        for c in cases
    ]  # fmt: skip
    print(f"  MXFP4: {sum(equal)} of {len(cases)} cases decode to equal bits")
    tensors, _ = read(folder / "nvfp4.safetensors")
    for case in (key.split(".")[0] for key in tensors if key.endswith(".dequantized_exact")):
        want = tensors[f"{case}.dequantized_exact"]
        scale_2 = 1 / tensors[f"{case}.weight_global_scale"]
        got = quant.nvfp4_decode(
            tensors[f"{case}.weight_packed"], tensors[f"{case}.weight_scale"], scale_2, torch.float32
        )
        print(f"  NVFP4, {case}: relative error {float(((got - want).abs() / want.abs().clamp(min=1e-30)).max()):.1e}")


def models(folder):
    for name in MODELS:
        want, facts = {}, {}
        for part in ("", "_long"):
            tensors, found = read(folder / f"{name}_expected{part}.safetensors")
            want, facts = want | tensors, facts | found
        prompts = {key[:2]: ids.tolist() for key, ids in want.items() if key.startswith("p") and key.endswith(".ids")}
        official = json.loads(facts["report"])
        model = KimiK3ForCausalLM.from_pretrained(folder / name, dtype=torch.float32, progress=False)
        errors = [off(model(Batch.pack([ids])), want[f"fp64.{p}.logits"]) for p, ids in prompts.items()]
        noise = max(off(want[f"fp32.{p}.logits"], want[f"fp64.{p}.logits"]) for p in prompts)
        line(f"{name}: logits", max(errors), noise)
        outs = Engine(model).generate(
            list(prompts.values()), SamplingParams(temperature=0, max_new_tokens=16, ignore_eos=True)
        )
        same = sum(out.token_ids == want[f"fp32.{p}.greedy_ids"].tolist() for p, out in zip(prompts, outs, strict=True))
        narrow = KimiK3ForCausalLM.from_pretrained(folder / name, progress=False)
        ours = [(narrow(Batch.pack([ids])) - want[f"fp64.{p}.logits"]).abs().mean() for p, ids in prompts.items()]
        theirs = [official[f"{p}.logits"]["bf16"]["mean"] for p in prompts]
        print(f"    greedy: {same} of {len(prompts)} prompts agree in all 16 ids; bf16 mean error "
              f"{float(sum(ours)) / len(ours):.3f}, official bf16 {sum(theirs) / len(theirs):.3f}")  # fmt: skip


@torch.no_grad()
def main():
    folder = Path(sys.argv[1])
    for part in (recurrences, layers, decoders, models):
        print(part.__name__)
        part(folder)


if __name__ == "__main__":
    main()
