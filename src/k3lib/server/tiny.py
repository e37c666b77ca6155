"""The tiny random Kimi-K3: every mechanism of the real one, in the released naming and packing, for a CPU."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors.torch import save_file

from k3lib.config import KimiK3Config, tiny_hf_config
from k3lib.export import vision_layout
from k3lib.layers.linear import fuse
from k3lib.model import KimiK3ForCausalLM
from k3lib.multimodal import KimiK3ForConditionalGeneration
from k3lib.spec import DraftConfig, make_draft
from k3lib.spec.draft_files import BUNDLE
from k3lib.stored import SINGLE

if TYPE_CHECKING:
    from os import PathLike

    from torch import Tensor

__all__ = ["add_vision", "make_tiny", "make_tiny_draft", "tiny_draft_config", "tiny_model"]


def _tiny_config() -> KimiK3Config:
    """The miniature with the token ids of the `bytes` tokenizer (protocol specification, section 1.3)."""
    return KimiK3Config.from_hf(
        tiny_hf_config(bos_token_id=256, eos_token_id=258, pad_token_id=511, media_placeholder_token_id=277)
    )


def _fill(name: str, shape: tuple[int, ...], dtype: torch.dtype, random: torch.Generator) -> Tensor:
    """Random weights of a size that keeps activations near 1 and logits clearly apart."""
    noise = torch.randn(shape, generator=random)
    last = name.rsplit(".", 2)[-2:]
    if "norm" in last[0]:
        noise = 1 + 0.1 * noise
    elif last[-1] == "A_log":
        noise = 0.5 * noise
    elif last[-1] == "e_score_correction_bias":
        noise = 0.05 * noise
    elif "conv1d" in last[0]:
        noise = 0.5 * noise
    elif "embed_tokens" in name or "markov_w1" in name or last[-1] == "dt_bias" or "pos_emb" in name:
        pass
    elif "lm_head" in name:
        noise = noise * (3 / math.sqrt(shape[-1]))
    else:
        noise = noise / math.sqrt(math.prod(shape[1:]) if len(shape) == 4 else shape[-1])
    return noise.to(dtype)


def tiny_model(seed: int = 0, *, dtype: torch.dtype = torch.bfloat16) -> KimiK3ForCausalLM:
    """Make the tiny model in memory, with plain experts; equal seeds give equal weights."""
    random = torch.Generator().manual_seed(seed)
    model = KimiK3ForCausalLM(_tiny_config(), dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = _fill(name, tuple(parameter.shape), parameter.dtype, random)
            if name.endswith("A_log"):
                values[model.config.text.kda.num_heads :] = 0  # the released padding
            parameter.copy_(values)
    model.requires_grad_(requires_grad=False)
    model = model.to(dtype)
    fuse(model)
    return model.eval()


def _vision_weights(model: KimiK3ForCausalLM, seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed + 1)
    assert model.config.vision is not None, "the miniature has a tower"
    layout = vision_layout(model.config.vision)
    return {name: _fill(name, shape, torch.bfloat16, random) for name, shape in layout.items()}


def add_vision(model: KimiK3ForCausalLM, seed: int = 0) -> KimiK3ForConditionalGeneration:
    """Give the tiny model the vision tower that `make_tiny` writes for the same seed."""
    whole = KimiK3ForConditionalGeneration.of(model)
    with torch.no_grad():
        for name, values in _vision_weights(model, seed).items():
            whole.get_parameter(name).copy_(values)
    whole.requires_grad_(requires_grad=False)
    return whole.eval()


def make_tiny(
    out: str | PathLike[str],
    *,
    seed: int = 0,
    mxfp4: bool = True,
    vision: bool = True,
    draft: Literal["inferact", "radixark"] | None = None,
) -> Path:
    """Write the tiny checkpoint; byte-identical for equal arguments.

    Args:
        out: folder, made if needed.
        seed: of the weights.
        mxfp4: pack the routed experts as in the official release.
        vision: add random weights of the vision tower and projector; without, the configuration is text-only.
        draft: write a draft of this family, too, into the subfolder `dspark`.

    Returns:
        The folder.
    """
    model = tiny_model(seed)
    extra: dict[str, Tensor] = {}
    if vision:
        extra = _vision_weights(model, seed)
    model.save_pretrained(out, experts="mxfp4" if mxfp4 else "bf16", extra=copy.copy(extra))
    if draft is not None:
        make_tiny_draft(Path(out) / BUNDLE, draft, seed=seed)
    return Path(out)


# ---- drafts -------------------------------------------------------------------------------------


def tiny_draft_config(family: Literal["inferact", "radixark"]) -> dict[str, Any]:
    """The `config.json` of a draft for the tiny model, with the keys of the public draft of that family."""
    text = _tiny_config().text
    common: dict[str, Any] = {
        "hidden_size": text.hidden_size, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "rms_norm_eps": 1e-5, "vocab_size": text.vocab_size, "max_position_embeddings": text.max_position_embeddings,
        "markov_rank": 16, "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": True, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    rope = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}
    if family == "inferact":
        return {
            "architectures": ["K3DSparkModel"], "model_type": "k3_dspark", **common, "num_key_value_heads": 4,
            "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
            "mla_use_nope": False, "mla_use_output_gate": False, "target_hidden_size": text.hidden_size,
            "target_num_hidden_layers": text.num_layers, "target_layer_ids": [1, 4, 7], "mask_token_id": 509,
            "rope_parameters": {**rope, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
        }  # fmt: skip
    return {
        "architectures": ["DSparkDraftModel"], "model_type": "qwen3", **common, "num_key_value_heads": 2,
        "head_dim": 16, "hidden_act": "silu", "attention_bias": False, "layer_types": ["full_attention"] * 2,
        "block_size": 7, "num_target_layers": text.num_layers, "rope_parameters": rope,
        "dflash_config": {"mask_token_id": 508, "target_layer_ids": [2, 5, 8]},
    }  # fmt: skip


def make_tiny_draft(out: str | PathLike[str], family: Literal["inferact", "radixark"], *, seed: int = 0) -> Path:
    """Write a random draft for the tiny model; byte-identical for equal arguments.

    Args:
        out: folder, made if needed.
        family: whose configuration and tensor names.
        seed: of the weights.

    Returns:
        The folder.
    """
    folder, hf = Path(out), tiny_draft_config(family)
    folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed + 2)
    draft = make_draft(DraftConfig.from_hf(hf), dtype=torch.bfloat16, device="meta")
    tensors = {name: _fill(name, tuple(p.shape), p.dtype, random) for name, p in draft.named_parameters()}
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")
    return folder
