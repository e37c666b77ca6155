"""Speculation against plain decoding: the same engine, prompts and steps, with a dial for how much is accepted.

    python -m benchmarks.spec                      # small random model, float32, CPU
    python -m benchmarks.spec --device cuda        # a random target of middle size, MXFP4 experts, bf16

Acceptance is simulated (`SpecConfig.simulate_accept_len`), so it is exactly what the dial says and the text means
nothing; what a step computes does not depend on it. "free" is a proposer that costs nothing, "draft" a random draft
model of the layout of Inferact's, whose forward is computed. Break-even is the accepted length at which speculation is
as fast as plain decoding: the ratio of the times of a step. All figures of a table come from one run, alternating.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch

from k3lib import Engine, EngineConfig, KimiK3Config, KimiK3ForCausalLM, SamplingParams
from k3lib.cache import CacheConfig
from k3lib.engine import Request
from k3lib.layers.latent_moe import Experts
from k3lib.layers.linear import fuse
from k3lib.ops import ExpertWeights
from k3lib.ops.quant import mxfp4_encode
from k3lib.spec import Draft, DraftConfig, DSpark, SpecConfig, make_draft

BLOCK = 7
LENGTHS = (2.0, 4.5, 8.0)


class Free:
    """Proposes anything at no cost."""

    block_size = BLOCK
    feature_layers: tuple[int, ...] = ()
    feature_kind = "prefix"

    def propose(self, contexts):
        return [Draft([1] * BLOCK) for _ in contexts]

    def commit(self, contexts):
        pass

    def drop(self, request_id):
        pass


def target(device: str) -> KimiK3ForCausalLM:
    """Random weights: on a GPU a rank's share of heads and experts at the real head sizes, on a CPU something small."""
    if device == "cpu":
        config = KimiK3Config.tiny()
        dtype = torch.float32
    else:
        kda = [i for i in range(1, 24) if i % 4]
        config = KimiK3Config.tiny(
            vocab_size=32768, hidden_size=3584, intermediate_size=4096, num_hidden_layers=24, kda_layers=kda,
            full_attn_layers=[*range(4, 24, 4), 24], num_heads=12, head_dim=128, num_attention_heads=12,
            num_key_value_heads=12, num_experts=128, num_experts_per_token=8, moe_intermediate_size=384,
            routed_expert_hidden_size=1792, q_lora_rank=768, kv_lora_rank=512, qk_nope_head_dim=128,
            qk_rope_head_dim=64, v_head_dim=128,
        )  # fmt: skip
        dtype = torch.bfloat16
    model = KimiK3ForCausalLM(config, dtype=dtype, device=device)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "experts.w" not in name:
                p.normal_(std=p.shape[-1] ** -0.5) if p.ndim > 1 else p.fill_(1.0 if "norm" in name else 0.1)
        for module in model.modules():
            if isinstance(module, Experts):
                codes = []
                for old in (module.w13, module.w2):
                    codes += mxfp4_encode(torch.randn(old.shape, device=device) * old.shape[-1] ** -0.5)
                module.set_packed(ExpertWeights(codes[0], codes[2], codes[1], codes[3], format="mxfp4"))
    fuse(model)
    return model.eval().requires_grad_(requires_grad=False)


def draft_of(model: KimiK3ForCausalLM) -> DSpark:
    """A random draft of five latent-attention layers with the target's width."""
    text = model.config.text
    config = DraftConfig.from_hf(
        {
            "architectures": ["K3DSparkModel"], "model_type": "k3_dspark", "hidden_size": text.hidden_size,
            "intermediate_size": 2 * text.hidden_size, "num_hidden_layers": 5, "num_attention_heads": 8,
            "num_key_value_heads": 8, "q_lora_rank": text.hidden_size // 4, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16, "v_head_dim": 32, "mla_use_nope": False, "mla_use_output_gate": False,
            "rms_norm_eps": 1e-5, "vocab_size": text.vocab_size, "max_position_embeddings": 4096, "markov_rank": 64,
            "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
            "tie_word_embeddings": False, "target_hidden_size": text.hidden_size,
            "target_num_hidden_layers": text.num_layers, "target_layer_ids": [1, 3, 5, 6, 7], "mask_token_id": 7,
            "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 128,
                                "rope_theta": 10000.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                                "mscale_all_dim": 1.0},
        }
    )  # fmt: skip
    draft = make_draft(config, dtype=model.dtype, device=model.device)
    with torch.no_grad():
        for p in draft.parameters():
            p.normal_(std=p.shape[-1] ** -0.5) if p.ndim > 1 else p.fill_(1.0)
    return DSpark(draft.eval().requires_grad_(requires_grad=False))


class Run:
    """One engine whose decode steps are timed."""

    def __init__(self, model: KimiK3ForCausalLM, requests: int, spec: SpecConfig | None) -> None:
        pages = requests * 24 + 8
        pools = CacheConfig(num_pages=pages, num_slots=requests + 2, page_size=64, prefix_cache=False)
        self.engine = Engine(model, EngineConfig(cache=pools, spec=spec, max_running_requests=requests))
        self.requests = requests
        self.steps: list[float] = []
        self.tokens = 0

    def measure(self, prompt: int, steps: int) -> None:
        """Time of so many decode steps, once all prompts are computed."""
        vocab = self.engine.model.config.text.vocab_size
        draw = random.Random(0)
        params = SamplingParams(temperature=0, max_new_tokens=8 * (steps + 4), ignore_eos=True)
        names = [
            self.engine.add(Request([draw.randrange(vocab) for _ in range(prompt)], params))
            for _ in range(self.requests)
        ]
        while any(not state.num_generated for state in self.engine._states.values()):
            self.engine.step()
        self.engine.step()  # captures what has to be
        for _ in range(steps):
            begin = time.perf_counter()
            outputs = self.engine.step()
            self.steps.append(time.perf_counter() - begin)
            self.tokens += sum(len(out.token_ids) for out in outputs)
        for name in names:
            self.engine.abort(name)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / sum(self.steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rollback", default="replay", choices=("replay", "states"))
    args = parser.parse_args()
    torch.manual_seed(0)
    model = target(args.device)
    print(f"{model.config.text.num_layers} layers, {model.dtype}, {args.device}, block {BLOCK}, {args.rollback}")
    print("B    proposer  accepted  tokens/s  speed-up   step ms  plain ms  break-even")
    for requests in args.requests:
        runs = {("plain", 1.0): Run(model, requests, None)}
        for kind in ("free", "draft"):
            for length in LENGTHS:
                proposer = Free() if kind == "free" else draft_of(model)
                spec = SpecConfig(draft=proposer, simulate_accept_len=length, rollback=args.rollback)
                runs[kind, length] = Run(model, requests, spec)
        for _ in range(args.rounds):
            for run in runs.values():
                run.measure(args.prompt, args.steps)
        plain = runs["plain", 1.0]
        base = statistics.median(plain.steps)
        for (kind, _), run in runs.items():
            step = statistics.median(run.steps)
            report = run.engine.stats()["speculation"]
            accepted = 1.0 if report is None else report["accept_length"]
            print(
                f"{requests:<4} {kind:<9} {accepted:>8.2f} {run.rate:>9.0f} {run.rate / plain.rate:>9.2f} "
                f"{step * 1e3:>9.2f} {base * 1e3:>9.2f} {step / base:>11.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
