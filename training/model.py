"""The configuration of k3lib-nano, its first weights, and what it weighs.

    python -m training.model        # bytes of the packed checkpoint, part by part

Every mechanism of Kimi-K3 is present. The numbers come from two limits: 14 MB for the checkpoint with vision tower and
draft, and 60 tokens a second on two cores.

A step on a CPU costs about as much as it has layers, whatever their width: seven layers of width 256 rather than more
of less. Attention: K3's pattern (every fourth layer and the last are MLA) and head width 64, so there are five states
of 4 x 64 x 64. Residuals: blocks of three layers, so a read mixes up to three finished blocks and the running one.
Experts: 16 of a latent width of 128; packed, they cost a quarter of what other weights cost.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import torch

from k3lib.config import KimiK3Config, tiny_hf_config
from k3lib.export import stored_layout, vision_layout
from k3lib.layers import KimiDeltaAttention
from k3lib.model import KimiK3ForCausalLM
from k3lib.multimodal import KimiK3ForConditionalGeneration
from k3lib.spec import DraftConfig, make_draft
from k3lib.stored import TORCH_DTYPES

if TYPE_CHECKING:
    from torch import nn

__all__ = ["IMAGE_SIDES", "draft_config", "main", "nano_config", "new_draft", "new_model", "size_table", "small_config"]

LIMIT = 14_000_000
IMAGE_SIDES = (56, 84)  # pixels; 4 and 9 tokens
MASK = 508  # a reserved special token of the `bytes` tokenizer: what a draft is to find
_TOKENS = {"bos_token_id": 256, "eos_token_id": 258, "pad_token_id": 511, "media_placeholder_token_id": 277}


def nano_config(**changes: Any) -> KimiK3Config:
    """The configuration of k3lib-nano; `changes` replace keys of its `config.json`."""
    values: dict[str, Any] = {
        **_TOKENS, "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 7, "intermediate_size": 448,
        "kda_layers": [1, 2, 3, 5, 6], "full_attn_layers": [4, 7], "num_heads": 4, "head_dim": 64,
        "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 64,
        "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 64, "attn_res_block_size": 3,
        "num_experts": 16, "num_experts_per_token": 4, "moe_intermediate_size": 128, "num_shared_experts": 2,
        "routed_expert_hidden_size": 128, "max_position_embeddings": 32768, "text_hidden_size": 256,
        "init_pos_emb_height": 6, "init_pos_emb_width": 6, "vt_num_attention_heads": 4, "vt_num_hidden_layers": 2,
        "vt_hidden_size": 64, "vt_intermediate_size": 128, "mm_hidden_size": 64, "qkv_hidden_size": 64,
        "dtype": "float32",
    }  # fmt: skip
    return KimiK3Config.from_hf(tiny_hf_config(**{**values, **changes}))


def small_config() -> KimiK3Config:
    """A tenth of it, for tests: two blocks, both kinds of attention, experts and a vision tower."""
    return nano_config(
        hidden_size=64, num_hidden_layers=4, intermediate_size=96, kda_layers=[1, 2], full_attn_layers=[3, 4],
        num_heads=2, head_dim=32, num_attention_heads=2, num_key_value_heads=2, q_lora_rank=32, kv_lora_rank=32,
        qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=32, attn_res_block_size=2, num_experts=4,
        num_experts_per_token=2, moe_intermediate_size=32, routed_expert_hidden_size=32, vt_hidden_size=32,
        vt_intermediate_size=32, mm_hidden_size=32, qkv_hidden_size=32, vt_num_hidden_layers=1,
        max_position_embeddings=4096,
    )  # fmt: skip


def new_model(config: KimiK3Config, seed: int, *, device: torch.device | str = "cpu") -> KimiK3ForConditionalGeneration:
    """A model with its first weights: equal seeds, equal weights on every device."""
    torch.manual_seed(seed)
    model = KimiK3ForConditionalGeneration(config, dtype=torch.float32)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("res_proj.weight"):
                value.zero_()  # all blocks count alike
        for module in model.modules():
            if isinstance(module, KimiDeltaAttention):
                _start_decay(module)
    return model.to(device).train()


def _start_decay(layer: KimiDeltaAttention) -> None:
    """Channels that keep from a few to a few thousand tokens; with zeros all would forget within one."""
    bound = layer.config.gate_lower_bound
    assert bound is not None, "K3's gate is bounded"
    low, high = math.log(1e-3), math.log(0.5)
    decay = torch.exp(torch.rand_like(layer.dt_bias) * (high - low) + low)
    part = decay / -bound
    layer.dt_bias.copy_(torch.log(part / (1 - part)))


def draft_config(config: KimiK3Config) -> dict[str, Any]:
    """The `config.json` of a draft of RadixArk's layout for a target."""
    text = config.text
    last = text.num_layers - 1
    return {
        "architectures": ["DSparkDraftModel"], "model_type": "qwen3", "hidden_size": text.hidden_size,
        "intermediate_size": 3 * text.hidden_size // 2, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5, "vocab_size": text.vocab_size,
        "max_position_embeddings": text.max_position_embeddings, "markov_rank": 48, "markov_head_type": "vanilla",
        "enable_confidence_head": True, "confidence_head_with_markov": True, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "hidden_act": "silu", "attention_bias": False, "layer_types": ["full_attention"],
        "block_size": 7, "num_target_layers": text.num_layers,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [last // 3, 2 * last // 3, last]},
    }  # fmt: skip


def new_draft(config: KimiK3Config, seed: int, *, device: torch.device | str = "cpu") -> nn.Module:
    """A draft with its first weights."""
    torch.manual_seed(seed)
    return make_draft(DraftConfig.from_hf(draft_config(config)), dtype=torch.float32).to(device).train()


# ---- what it weighs -----------------------------------------------------------------------------


def _part(name: str) -> str:
    for sign, part in (
        ("vision_tower.", "vision tower and projector"), ("mm_projector.", "vision tower and projector"),
        (".experts.", "routed experts, MXFP4"), ("shared_experts", "shared experts"),
        ("block_sparse_moe.", "router and latent projections"), (".mlp.", "dense MLP"),
        ("embed_tokens", "embedding and head"), ("lm_head", "embedding and head"),
    ):  # fmt: skip
        if sign in name:
            return part
    return "norms and residual scores"


def size_table(config: KimiK3Config) -> list[tuple[str, int, int]]:
    """Parameters and bytes of each part of the stored checkpoint, draft included; the last row is the sum."""
    config = copy.copy(config)
    model = KimiK3ForCausalLM(config, dtype=torch.bfloat16, device="meta")
    rows: dict[str, list[int]] = {}

    def count(part: str, parameters: int, nbytes: int) -> None:
        row = rows.setdefault(part, [0, 0])
        row[0] += parameters
        row[1] += nbytes

    for name, (dtype, shape) in stored_layout(model, "mxfp4").items():
        size, part = math.prod(shape), _part(name)
        if ".self_attn." in name:
            part = f"{config.text.layer_types[int(name.split('.layers.')[1].split('.')[0])].upper()} attention"
        logical = size * 2 if name.endswith("weight_packed") else 0 if name.endswith("weight_scale") else size
        count(part, logical, size * TORCH_DTYPES[dtype].itemsize)
    assert config.vision is not None, "the nano model sees"
    for name, shape in vision_layout(config.vision).items():
        count(_part(name), math.prod(shape), 2 * math.prod(shape))
    for value in make_draft(DraftConfig.from_hf(draft_config(config)), device="meta").parameters():
        count("draft", value.numel(), 2 * value.numel())
    table = [(part, *row) for part, row in rows.items()]
    return [*table, ("total", sum(row[1] for row in table), sum(row[2] for row in table))]


def main() -> None:
    """Print the table."""
    for part, parameters, nbytes in size_table(nano_config()):
        print(f"{part:32} {parameters:>12,} parameters {nbytes:>12,} bytes")
    print(f"{'limit':32} {'':>12}            {LIMIT:>12,} bytes")


if __name__ == "__main__":
    main()
