"""Writing weights in the released layout; see `k3lib.checkpoint` for the formats."""

from __future__ import annotations

import copy
import json
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn

from k3lib.checkpoint import VISION_ROOTS, DiskExperts
from k3lib.errors import ConfigError
from k3lib.layers import Experts, KimiDeltaAttention, Linear
from k3lib.ops import quant
from k3lib.stored import INDEX, SINGLE, STORED_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from os import PathLike

    from torch import Tensor

    from k3lib.config import KimiK3Config, VisionConfig
    from k3lib.ops import ExpertWeights
    from k3lib.ops.moe import ExpertFormat

__all__ = ["save", "stored_layout", "vision_layout"]


class _Out(NamedTuple):
    """One tensor to be written; `make` computes it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]


def stored_layout(model: nn.Module, experts: ExpertFormat | None = None) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names, dtypes and shapes that saving `model` (which may be on the meta device) would write.

    Args:
        model: a whole `KimiK3ForCausalLM`.
        experts: stored format of the routed experts; None = as held.
    """
    return {name: (STORED_DTYPES[out.dtype], out.shape) for name, out in _outputs(model, experts)}


def _outputs(model: nn.Module, experts: ExpertFormat | None) -> Iterator[tuple[str, _Out]]:
    for owner, module in model.named_modules():
        if isinstance(module, Experts):
            yield from _expert_outputs(f"language_model.{owner}", module, experts)
            continue
        for name, value in module._parameters.items():
            assert value is not None, "modules have no empty parameters"
            full = f"language_model.{owner}.{name}"
            if isinstance(module, KimiDeltaAttention) and name == "A_log":
                shape = module.stored_decay_shape or tuple(value.shape)
                yield full, _Out(value.dtype, shape, _decay_maker(module, shape))
            else:
                yield full, _Out(value.dtype, tuple(value.shape), value.detach)


def _decay_maker(module: KimiDeltaAttention, shape: tuple[int, ...]) -> Callable[[], Tensor]:
    def make() -> Tensor:
        live = module.A_log.detach()[: module.num_heads]
        return nn.functional.pad(live, (0, math.prod(shape) - module.num_heads)).reshape(shape)

    return make


def _expert_outputs(owner: str, module: Experts, form: ExpertFormat | None) -> Iterator[tuple[str, _Out]]:
    c = module.config
    weights = module.weights
    form = form or weights.format
    inner, width = c.intermediate_size, c.expert_width
    plain = torch.bfloat16 if weights.format != "bf16" else weights.dtype
    if form != "bf16" and (inner % 32 or width % 32):
        raise ConfigError(f"{owner}: widths {width} and {inner} are no multiples of 32, which packed experts need")
    for e in range(c.num_experts):
        made: dict[tuple[str, str], Tensor] = {}

        def get(w: str, role: str, e: int = e, made: dict[tuple[str, str], Tensor] = made) -> Tensor:
            if (w, role) not in made:  # all matrices of an expert are converted together: w1 and w3 may share a scale
                converted = _convert_expert(weights.expert(e), form, plain)
                made.update({(w, role): x for w, roles in converted.items() for role, x in roles.items()})
            return made.pop((w, role))  # each is written once; what was written is not kept

        for w, rows, cols in (("w1", inner, width), ("w2", width, inner), ("w3", inner, width)):
            for suffix, dtype, shape in _matrix_layout(form, plain, rows, cols):
                yield f"{owner}.{e}.{w}.{suffix}", _Out(dtype, shape, lambda w=w, s=suffix, g=get: g(w, s))  # type: ignore[misc]


def _matrix_layout(
    form: ExpertFormat, plain: torch.dtype, rows: int, cols: int
) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    if form == "bf16":
        return [("weight", plain, (rows, cols))]
    if form == "mxfp4":
        return [
            ("weight_packed", torch.uint8, (rows, cols // 2)),
            ("weight_scale", torch.uint8, (rows, cols // 32)),
        ]
    return [
        ("weight", torch.uint8, (rows, cols // 2)),
        ("weight_scale", torch.float8_e4m3fn, (rows, cols // 16)),
        ("weight_scale_2", torch.float32, ()),
        ("input_scale", torch.float32, ()),
    ]


def _convert_expert(weights: ExpertWeights, form: ExpertFormat, plain: torch.dtype) -> dict[str, dict[str, Tensor]]:
    """The three matrices of the one expert in `weights` in `form`, by their stored suffixes."""
    if form == weights.format == "mxfp4":
        assert weights.w13_scale is not None, "MXFP4 has scales"
        assert weights.w2_scale is not None, "MXFP4 has scales"
        packed = {"w2": (weights.w2[0], weights.w2_scale[0])}
        for w, code, scale in zip(("w1", "w3"), weights.w13[0].chunk(2), weights.w13_scale[0].chunk(2), strict=True):
            packed[w] = (code, scale)
        return {w: {"weight_packed": code, "weight_scale": scale} for w, (code, scale) in packed.items()}
    if form == "nvfp4":
        return {
            w: {
                "weight": code,
                "weight_scale": scale,
                "weight_scale_2": scale_2.reshape(()),
                "input_scale": torch.ones(()),
            }
            for w, (code, scale, scale_2) in _as_nvfp4(weights).items()
        }
    dtype = torch.float32 if form == "mxfp4" else plain
    w13, w2 = (m.detach() for m in weights.decode(0, dtype))
    matrices = {"w1": w13.chunk(2)[0], "w2": w2, "w3": w13.chunk(2)[1]}
    if form == "bf16":
        return {w: {"weight": m} for w, m in matrices.items()}
    return {
        w: dict(zip(("weight_packed", "weight_scale"), quant.mxfp4_encode(m), strict=True)) for w, m in matrices.items()
    }


def _as_nvfp4(weights: ExpertWeights) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    if weights.format == "nvfp4":
        assert weights.w13_scale is not None, "NVFP4 has scales"
        assert weights.w2_scale is not None, "NVFP4 has scales"
        assert weights.w13_scale_2 is not None, "NVFP4 has global scales"
        assert weights.w2_scale_2 is not None, "NVFP4 has global scales"
        (c1, c3), (s1, s3) = weights.w13[0].chunk(2), weights.w13_scale[0].chunk(2)
        shared = weights.w13_scale_2[0]
        return {
            "w1": (c1, s1, shared),
            "w3": (c3, s3, shared),
            "w2": (weights.w2[0], weights.w2_scale[0], weights.w2_scale_2[0]),
        }
    if weights.format == "mxfp4":
        assert weights.w13_scale is not None, "MXFP4 has scales"
        assert weights.w2_scale is not None, "MXFP4 has scales"
        (c1, c3), (s1, s3) = weights.w13[0].chunk(2), weights.w13_scale[0].chunk(2)
        (first, third), shared = quant.mxfp4_to_nvfp4((c1, s1), (c3, s3))
        (second,), own = quant.mxfp4_to_nvfp4((weights.w2[0], weights.w2_scale[0]))
        return {"w1": (*first, shared), "w3": (*third, shared), "w2": (*second, own)}
    gate, up = weights.w13[0].detach().float().chunk(2)
    amax = weights.w13[0].detach().abs().amax().float()
    return {
        "w1": quant.nvfp4_encode(gate, amax=amax),
        "w3": quant.nvfp4_encode(up, amax=amax),
        "w2": quant.nvfp4_encode(weights.w2[0].detach().float()),
    }


def save(
    model: nn.Module,
    config: KimiK3Config,
    path: str | PathLike[str],
    *,
    experts: ExpertFormat | None,
    max_file_bytes: int,
    extra: Mapping[str, Tensor],
) -> None:
    """Write a whole model; see `KimiK3ForCausalLM.save_pretrained`.

    Raises:
        ConfigError: the model is a slice or one rank's part, or has no `config.json` to write.
    """
    held = sum(1 for name, _ in model.named_modules() if re.fullmatch(r"model\.layers\.\d+", name))
    if held != config.text.num_layers:
        raise ConfigError(f"only a whole model can be saved: it holds {held} of {config.text.num_layers} layers")
    split = next((m.tp.size for m in model.modules() if isinstance(m, Linear) and m.tp.size > 1), 1)
    if split == 1:  # replicas of an attention part that share their experts
        split = next((m.spread.ep.size for m in model.modules() if isinstance(m, Experts) and m.spread.ep.size > 1), 1)
    if split > 1:
        raise ConfigError(f"only a whole model can be saved: this is one rank's part of {split}")
    hf = _config_to_write(model, config, experts, has_vision=any(n.startswith(VISION_ROOTS) for n in extra))
    folder = Path(path)
    if any(file.parent.resolve() == folder.resolve() for file in _files_in_use(model)):
        raise ConfigError(
            f"{path}: the experts of this model are read from there while it runs; save to another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    outputs = dict(_outputs(model, experts))
    if clash := sorted(set(extra) & set(outputs)):
        raise ConfigError(f"extra names {len(clash)} tensors of the text model, for example {clash[0]}")
    outputs.update({n: _Out(t.dtype, tuple(t.shape), lambda t=t: t) for n, t in extra.items()})  # type: ignore[misc]
    files = _split_files(outputs, max_file_bytes)
    for old in (SINGLE, INDEX):
        (folder / old).unlink(missing_ok=True)
    weight_map = {}
    for n, names in enumerate(files, 1):
        file = SINGLE if len(files) == 1 else f"model-{n:05d}-of-{len(files):06d}.safetensors"
        tensors = {name: outputs[name].make().to("cpu").contiguous().clone() for name in names}
        save_file(tensors, folder / f"{file}.tmp", metadata={"format": "pt"})
        os.replace(folder / f"{file}.tmp", folder / file)
        weight_map.update(dict.fromkeys(names, file))
    if len(files) > 1:
        total = sum(_nbytes(out) for out in outputs.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")


def _files_in_use(model: nn.Module) -> set[Path]:
    stores = [m.packed for m in model.modules() if isinstance(m, Experts) and isinstance(m.packed, DiskExperts)]
    return {file for store in stores for file in store.files.files}


def _nbytes(out: _Out) -> int:
    return math.prod(out.shape) * out.dtype.itemsize


def _split_files(outputs: Mapping[str, _Out], limit: int) -> list[list[str]]:
    files: list[list[str]] = [[]]
    room = limit
    for name, out in outputs.items():
        size = _nbytes(out)
        if files[-1] and size > room:
            files.append([])
            room = limit
        files[-1].append(name)
        room -= size
    return files


def _config_to_write(
    model: nn.Module, config: KimiK3Config, experts: ExpertFormat | None, *, has_vision: bool
) -> dict[str, Any]:
    hf = copy.deepcopy(config.to_hf())
    text = hf.get("text_config", hf)
    for part in (hf, text):
        for key in ("dtype", "torch_dtype"):
            if part.get(key) is not None:
                part[key] = config.dtype
    if not has_vision and "vision_config" in hf:
        hf["vision_config"] = None
    held: ExpertFormat = next((m.weights.format for m in model.modules() if isinstance(m, Experts)), "bf16")
    form: ExpertFormat = experts or held
    known = config.quantization.expert_format if config.quantization else None
    if form != (known or "bf16") or (form == "bf16" and known is None):
        hf.pop("quantization_config", None)
        text.pop("quantization_config", None)
        if form != "bf16":
            text["quantization_config"] = _manifest(form)
    return hf


def _manifest(form: ExpertFormat) -> dict[str, Any]:
    if form == "nvfp4":
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "ignore": ["*self_attn*", "*shared_experts*", "*mlp.*", "*routed_expert*", "*gate", "*res_proj", "lm_head"],
        }
    weights = {"group_size": 32, "num_bits": 4, "scale_dtype": "torch.uint8", "strategy": "group", "type": "float"}
    group = {"format": "mxfp4-pack-quantized", "targets": ["Linear"], "weights": {**weights, "symmetric": True}}
    ignore = [
        "self_attn",
        "shared_experts",
        r"mlp\.(gate|up|gate_up|down)_proj",
        "lm_head",
        "vision_tower",
        "mm_projector",
    ]
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": [f"re:.*{name}.*" for name in ignore],
        "quantization_status": "compressed",
    }


def vision_layout(config: VisionConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the stored vision tower and projector (model specification, section 4.1)."""
    hidden, inner, qkv = config.hidden_size, config.intermediate_size, config.qkv_hidden_size
    merged = hidden * config.merge_kernel_size[0] * config.merge_kernel_size[1]
    layout: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (hidden, 3, config.patch_size, config.patch_size),
        "vision_tower.patch_embed.pos_emb.weight": (config.pos_emb_height, config.pos_emb_width, hidden),
        "vision_tower.encoder.final_layernorm.weight": (hidden,),
    }
    for block in range(config.num_layers):
        base = f"vision_tower.encoder.blocks.{block}"
        layout |= {
            f"{base}.norm0.weight": (hidden,),
            f"{base}.norm1.weight": (hidden,),
            f"{base}.wqkv.weight": (3 * qkv, hidden),
            f"{base}.wo.weight": (hidden, qkv),
            f"{base}.mlp.fc0.weight": (inner, hidden),
            f"{base}.mlp.fc1.weight": (hidden, inner),
        }
    return layout | {
        "mm_projector.proj.0.weight": (merged, merged),
        "mm_projector.proj.2.weight": (config.text_hidden_size, merged),
        "mm_projector.post_norm.weight": (config.text_hidden_size,),
    }
