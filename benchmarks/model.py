"""Tokens per second of a small model: prefill of one prompt, and decode through the engine.

    python -m benchmarks.model                                        # tiny random weights, float32, CPU
    python -m benchmarks.model --model-path ../shared/golden/tiny_k3_dev

Prints one JSON line per case, then a table. Each case runs several times; the median is reported, beside the best.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
import warnings

import torch

from benchmarks import rank
from k3lib import Batch, Engine, EngineConfig, KimiK3ForCausalLM, SamplingParams
from k3lib.engine import Request
from k3lib.server.tiny import tiny_model


def prefill(model, tokens: int, repeats: int) -> list[float]:
    """Tokens per second of whole prompts, stateless."""
    vocab = model.config.text.vocab_size
    batch = Batch.pack([torch.randint(0, vocab, (tokens,), device=model.device)])
    rates = []
    with torch.inference_mode():
        for i in range(repeats + 2):
            start = time.perf_counter()
            model(batch, logits="last")
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            if i >= 2:
                rates.append(tokens / (time.perf_counter() - start))
    return rates


def decode(model, requests: int, tokens: int, repeats: int) -> list[float]:
    """Tokens per second of greedy decode, from the first decode step on."""
    engine = Engine(model, EngineConfig(max_running_requests=max(requests, 1)))
    params = SamplingParams(temperature=0, max_new_tokens=tokens, ignore_eos=True)
    vocab = model.config.text.vocab_size
    prompts = [torch.randint(0, vocab, (16,)).tolist() for _ in range(requests)]
    rates = []
    for i in range(repeats + 1):
        for prompt in prompts:
            engine.add(Request(prompt, params))
        engine.step()  # all prompts
        start = time.perf_counter()
        count = 0
        while engine.has_work:
            count += sum(len(out.token_ids) for out in engine.step())
        if i >= 1:
            rates.append(count / (time.perf_counter() - start))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path")
    parser.add_argument("--rank-of", metavar="tp16", help="one rank's share of Kimi-K3 instead; see benchmarks.rank")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="0 = best of 1 and all cores, per case")
    parser.add_argument("--prefill", type=int, nargs="*", default=[128, 512, 1024])
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 8], help="requests side by side")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    args, rest = parser.parse_known_args()
    if args.rank_of:
        sys.argv = ["benchmarks.rank", "--of", args.rank_of, *rest]
        rank.main()
        return
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    if args.model_path:
        model = KimiK3ForCausalLM.from_pretrained(args.model_path, dtype=dtype, device=args.device)
    else:
        model = tiny_model(dtype=dtype).to(args.device)
    gc.collect()
    gc.freeze()  # as k3lib-serve does
    cases = [("prefill", n, lambda n=n: prefill(model, n, args.repeats)) for n in args.prefill]
    cases += [("decode", n, lambda n=n: decode(model, n, args.new_tokens, args.repeats)) for n in args.decode]
    cores = torch.get_num_threads()
    rows = []
    for phase, size, run in cases:
        best = None
        for threads in [args.threads] if args.threads else sorted({1, cores}):
            torch.set_num_threads(threads)
            rates = run()
            row = {
                "phase": phase,
                "size": size,
                "threads": threads,
                "tokens_per_s": round(statistics.median(rates), 1),
                "best": round(max(rates), 1),
                "dtype": args.dtype,
                "device": str(model.device),
                "torch": torch.__version__,
                "machine": platform.machine(),
            }
            print(json.dumps(row), flush=True)
            if best is None or row["tokens_per_s"] > best["tokens_per_s"]:
                best = row
        rows.append(best)
    print(f"\n{'case':<22}{'tok/s (median)':>16}{'best':>10}{'threads':>9}")
    for row in rows:
        what = f"{row['phase']} {'T' if row['phase'] == 'prefill' else 'B'}={row['size']}"
        print(f"{what:<22}{row['tokens_per_s']:>16}{row['best']:>10}{row['threads']:>9}")


if __name__ == "__main__":
    main()
