"""The tiny random Kimi-K3: every mechanism of the real one, in the released naming and packing, for a CPU."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from k3lib.config import KimiK3Config, tiny_hf_config
from k3lib.export import vision_layout
from k3lib.layers.linear import fuse
from k3lib.model import KimiK3ForCausalLM

if TYPE_CHECKING:
    from os import PathLike

    from torch import Tensor

__all__ = ["make_tiny", "tiny_model"]


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
    elif "embed_tokens" in name or last[-1] == "dt_bias" or "pos_emb" in name:
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


def make_tiny(out: str | PathLike[str], *, seed: int = 0, mxfp4: bool = True, vision: bool = True) -> Path:
    """Write the tiny checkpoint; byte-identical for equal arguments.

    Args:
        out: folder, made if needed.
        seed: of the weights.
        mxfp4: pack the routed experts as in the official release.
        vision: add random weights of the vision tower and projector; without, the configuration is text-only.

    Returns:
        The folder.
    """
    model = tiny_model(seed)
    extra: dict[str, Tensor] = {}
    if vision and model.config.vision is not None:
        random = torch.Generator().manual_seed(seed + 1)
        layout = vision_layout(model.config.vision)
        extra = {name: _fill(name, shape, torch.bfloat16, random) for name, shape in layout.items()}
    model.save_pretrained(out, experts="mxfp4" if mxfp4 else "bf16", extra=copy.copy(extra))
    return Path(out)
