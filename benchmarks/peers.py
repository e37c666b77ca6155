"""k3lib beside transformers' `kimi_linear` and mlx-lm's `kimi_k3` on a CPU: tokens per second in one run, as ratios.

    pip install transformers mlx-lm "mlx[cpu]"        # whichever is absent is left out of the table
    python -m benchmarks.peers --model-path ../shared/golden/tiny_k3_dev

transformers has no Kimi-K3: its Kimi-Linear gets the same widths and random weights, and has fewer mechanisms (no
attention residuals, latent experts or output gate in full rank). mlx-lm loads the same checkpoint. Everything runs in
float32; the rounds of all contestants alternate, so that a busy machine slows all of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
import warnings
from pathlib import Path

import torch

from benchmarks.model import decode, prefill
from k3lib import KimiK3ForCausalLM
from k3lib.server.tiny import make_tiny


class Ours:
    name = "k3lib"

    def __init__(self, path: Path) -> None:
        self.model = KimiK3ForCausalLM.from_pretrained(path, dtype=torch.float32)

    def prefill(self, tokens: int) -> float:
        return max(prefill(self.model, tokens, 2))

    def decode(self, tokens: int) -> float:
        return max(decode(self.model, 1, tokens, 1))


class Transformers:
    name = "transformers"

    def __init__(self, path: Path) -> None:
        from transformers.models.kimi_linear import modeling_kimi_linear as kimi

        del path
        config = kimi.KimiLinearConfig(
            vocab_size=512, hidden_size=96, intermediate_size=160, num_hidden_layers=9, num_attention_heads=4,
            num_key_value_heads=4, moe_intermediate_size=64, num_experts=16, num_experts_per_token=4,
            num_shared_experts=2, first_k_dense_replace=1, q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16,
            qk_rope_head_dim=8, v_head_dim=16, rms_norm_eps=1e-5, max_position_embeddings=4096, pad_token_id=511,
            linear_attn_config={
                "full_attn_layers": [4, 8, 9], "kda_layers": [1, 2, 3, 5, 6, 7], "num_heads": 4, "head_dim": 32,
                "short_conv_kernel_size": 4,
            },
        )  # fmt: skip
        self.model = kimi.KimiLinearForCausalLM(config).eval()

    @torch.inference_mode()
    def prefill(self, tokens: int) -> float:
        ids = torch.randint(0, 512, (1, tokens))
        rates = []
        for _ in range(4):
            start = time.perf_counter()
            self.model(ids, logits_to_keep=1)
            rates.append(tokens / (time.perf_counter() - start))
        return max(rates[2:])

    @torch.inference_mode()
    def decode(self, tokens: int) -> float:
        out = self.model(torch.randint(0, 512, (1, 16)), use_cache=True)
        start = time.perf_counter()
        for _ in range(tokens):
            token = out.logits[:, -1:].argmax(-1)
            out = self.model(token, past_key_values=out.past_key_values, use_cache=True)
        return tokens / (time.perf_counter() - start)


class Mlx:
    name = "mlx-lm"

    def __init__(self, path: Path) -> None:
        import mlx.core as mx
        import mlx.utils
        from mlx_lm.models.cache import make_prompt_cache
        from mlx_lm.utils import load_model

        self.mx, self.new_cache = mx, make_prompt_cache
        self.model, _ = load_model(path, strict=False)  # it has no vision tower
        widen = lambda p: p.astype(mx.float32) if mx.issubdtype(p.dtype, mx.floating) else p  # noqa: E731
        self.model.update(mlx.utils.tree_map(widen, self.model.parameters()))

    def prefill(self, tokens: int) -> float:
        ids = self.mx.array(torch.randint(0, 512, (1, tokens)).tolist())
        rates = []
        for _ in range(3):
            start = time.perf_counter()
            self.mx.eval(self.model(ids, cache=self.new_cache(self.model)))
            rates.append(tokens / (time.perf_counter() - start))
        return max(rates[1:])

    def decode(self, tokens: int) -> float:
        mx, cache = self.mx, self.new_cache(self.model)
        token = mx.argmax(self.model(mx.array([list(range(16))]), cache=cache)[:, -1:], -1)
        mx.eval(token)
        start = time.perf_counter()
        for _ in range(tokens):
            token = mx.argmax(self.model(token, cache=cache)[:, -1:], -1)
            mx.eval(token)
        return tokens / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", type=Path)
    parser.add_argument("--prefill", type=int, nargs="*", default=[128, 512, 1024])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    path = args.model_path or make_tiny("/tmp/k3lib-tiny", mxfp4=False, vision=False)
    peers = [Ours(path)]
    peers += [Transformers(path)] if importlib.util.find_spec("transformers") else []
    peers += [Mlx(path)] if importlib.util.find_spec("mlx_lm") else []
    cases = [("prefill", n, lambda p, n=n: p.prefill(n)) for n in args.prefill]
    cases.append(("decode", 1, lambda p: p.decode(args.new_tokens)))
    cores = torch.get_num_threads()
    print(
        f"{'tokens/s, median of best thread count':<40}"
        + "".join(f"{p.name:>14}" for p in peers)
        + "   ours / best peer"
    )
    for phase, size, run in cases:
        medians = [0.0] * len(peers)
        for threads in sorted({1, cores}):
            torch.set_num_threads(threads)
            rates: list[list[float]] = [[] for _ in peers]
            for _ in range(args.rounds):
                for rate, peer in zip(rates, peers, strict=True):
                    rate.append(run(peer))
            medians = [max(old, statistics.median(new)) for old, new in zip(medians, rates, strict=True)]
        best = max(medians[1:], default=float("nan"))
        row = "".join(f"{m:>14.1f}" for m in medians)
        print(
            f"{phase + (f' T={size}' if phase == 'prefill' else ' B=1'):<40}{row}{medians[0] / best:>19.2f}", flush=True
        )


if __name__ == "__main__":
    main()
