"""Run the golden models on a device and compare with their fp64 values: the references must give the same anywhere.

    python scripts/check_device.py ../shared/golden --device cuda

Prints one line per model and dtype, last; exit status 1 if a tolerance is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path

import torch
from safetensors import safe_open

from k3lib import Batch, Engine, EngineConfig, KimiK3ForCausalLM, SamplingParams

TOLERANCE = {"tiny_k3_dev": 2e-4, "tiny_k3_wide": 1e-4}


def expected(golden: Path, name: str) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in (f"{name}_expected.safetensors", f"{name}_expected_long.safetensors"):
        if (golden / file).exists():
            with safe_open(golden / file, "pt") as source:
                tensors |= {key: source.get_tensor(key) for key in source.keys()}  # noqa: SIM118 - not a dict
    return tensors


def check(golden: Path, name: str, dtype: torch.dtype, device: str) -> dict[str, object]:
    model = KimiK3ForCausalLM.from_pretrained(golden / name, dtype=dtype, device=device)
    want = expected(golden, name)
    prompts = sorted(key.split(".")[0] for key in want if key.endswith(".ids") and key.startswith("p"))
    worst, mean, official = 0.0, 0.0, 0.0
    with torch.inference_mode():
        packed = model(Batch.pack([want[f"{p}.ids"].to(device) for p in prompts])).cpu().double()
    for p, logits in zip(prompts, packed.split([want[f"{p}.ids"].numel() for p in prompts]), strict=True):
        error = (logits - want[f"fp64.{p}.logits"]).abs()
        worst, mean = max(worst, error.max().item()), max(mean, error.mean().item())
        if f"bf16.{p}.logits" in want:
            reference = (want[f"bf16.{p}.logits"].double() - want[f"fp64.{p}.logits"]).abs().mean().item()
            official = max(official, reference)
    engine = Engine(model, EngineConfig(chunked_prefill_size=64, checkpoint_grid=8))
    params = SamplingParams(temperature=0, max_new_tokens=16, ignore_eos=True)
    outs = engine.generate([want[f"{p}.ids"].tolist() for p in prompts], params)
    same = sum(o.token_ids == want[f"fp32.{p}.greedy_ids"].tolist() for p, o in zip(prompts, outs, strict=True))
    warm = engine.generate(
        [want[f"{p}.ids"].tolist() + o.token_ids[:8] for p, o in zip(prompts, outs, strict=True)], params
    )
    reused = sum(a.token_ids[:8] == b.token_ids[8:] for a, b in zip(warm, outs, strict=True))
    hits = sum(a.cached_tokens > 0 for a in warm)
    engine.cache.check()
    family = next(key for key in TOLERANCE if name.startswith(key))
    if dtype == torch.float32:
        good = worst <= TOLERANCE[family] and same == reused == len(prompts)
    else:
        good = mean <= 2 * official or official == 0
    return {
        "model": name, "dtype": str(dtype).removeprefix("torch."), "max": worst, "mean": mean,
        "official_bf16_mean": official, "greedy_equal": f"{same}/{len(prompts)}",
        "warm_equal": f"{reused}/{len(prompts)}", "hits": hits, "ok": good,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("golden", type=Path)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = []
    for folder in sorted(path.name for path in args.golden.iterdir() if (path / "config.json").exists()):
        for dtype in (torch.float32, torch.bfloat16):
            rows.append(check(args.golden, folder, dtype, args.device))
            print(json.dumps(rows[-1]), flush=True)
    name = torch.cuda.get_device_name(0) if args.device == "cuda" else "cpu"
    print(f"\n{name}, torch {torch.__version__}")
    print(f"{'model':<22}{'dtype':<10}{'max':>10}{'mean':>10}{'official bf16 mean':>20}{'greedy':>8}{'warm':>8}  ok")
    for r in rows:
        print(
            f"{r['model']:<22}{r['dtype']:<10}{r['max']:>10.2e}{r['mean']:>10.2e}{r['official_bf16_mean']:>20.2e}"
            f"{r['greedy_equal']:>8}{r['warm_equal']:>8}  {r['ok']}"
        )
    sys.exit(not all(r["ok"] for r in rows))


if __name__ == "__main__":
    main()
