"""What a parallel layout shards, and what that costs a rank: weights, caches, activations and traffic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from k3lib.cache.costs import ITEMSIZES, WIDE, itemsize_of, layer_state_bytes, text_of
from k3lib.errors import ConfigError
from k3lib.export import vision_layout
from k3lib.layers import Experts
from k3lib.model import KimiK3ForCausalLM
from k3lib.ops import ExpertsSpec
from k3lib.parallel import Mesh, ParallelConfig
from k3lib.parallel.ep import Placement
from k3lib.parallel.pp import payload_rows, stage_layers
from k3lib.parallel.traffic import Traffic, traffic

if TYPE_CHECKING:
    from k3lib.config import KimiK3Config, TextConfig

__all__ = ["LayoutCosts", "explain_layout", "layout_costs", "shares", "split_prompt_bytes"]

_EVERYWHERE = "on every rank of a replica"
_BITS = {"mxfp4": 4 + 8 / 32, "nvfp4": 4 + 8 / 16}  # a code and its share of a scale


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCosts:
    """Bytes of one rank, of the stage where they are largest.

    Attributes:
        weights: by part of the model, in the stored format of the experts.
        state_bytes: one request's KDA state.
        kv_bytes: latent KV of a token.
        stream_bytes: running sum and finished blocks of the attention residuals, for each new token of a replica.
        decode, prefill: what a rank sends for each new token of its replica.
    """

    weights: dict[str, int]
    state_bytes: int
    kv_bytes: float
    stream_bytes: float
    decode: tuple[Traffic, ...]
    prefill: tuple[Traffic, ...]

    @property
    def weight_bytes(self) -> int:
        """All weights."""
        return sum(self.weights.values())

    @property
    def decode_bytes(self) -> float:
        """Sent in a decode step for each new token."""
        return sum(kind.bytes_per_token for kind in self.decode)

    @property
    def prefill_bytes(self) -> float:
        """Sent in a prefill for each new token."""
        return sum(kind.bytes_per_token for kind in self.prefill)


def layout_costs(
    config: KimiK3Config,
    layout: ParallelConfig,
    *,
    kv_cache_dtype: str = "auto",
    mamba_ssm_dtype: str = "float32",
    vision: bool = False,
) -> LayoutCosts:
    """Count what one rank holds and sends; builds the rank's part of the model without memory.

    Args:
        config: the model.
        layout: the ranks.
        kv_cache_dtype: of the latent KV; "auto" is the activation dtype.
        mamba_ssm_dtype: of the recurrent state.
        vision: count the vision tower, which every rank of the first stage holds.

    Raises:
        ConfigError: the layout does not fit the model.
    """
    text, activations = text_of(config, None)
    layout.check(text)
    itemsize = ITEMSIZES[activations]
    stages = stage_layers(text.num_layers, layout.pp_size, layout.pp_partition)
    parts = [_weights(config, layout, stage * layout.tp_size) for stage in range(layout.pp_size)]
    if vision and config.vision is not None:
        tower = sum(math.prod(shape) for shape in vision_layout(config.vision).values()) * itemsize
        parts[0]["vision tower"] = tower  # tokens are embedded there
    state_itemsize = itemsize_of("mamba_ssm_dtype", mamba_ssm_dtype, allowed=WIDE)
    slot = layer_state_bytes(text.kda, state_itemsize, itemsize) // layout.attention_size
    row = text.mla.latent_width * itemsize_of("kv_cache_dtype", kv_cache_dtype, auto=activations)
    kda, mla = (max(sum(i in stage for i in text.layers_of(kind)) for stage in stages) for kind in ("kda", "mla"))
    per_block = None if text.attn_res is None else text.attn_res.layers_per_block
    shards = layout.attention_size if layout.shards_tokens else 1
    return LayoutCosts(
        weights=max(parts, key=lambda part: sum(part.values())),
        state_bytes=kda * slot,
        kv_bytes=mla * row / layout.dcp_size,
        stream_bytes=payload_rows(text.num_layers, per_block) * text.hidden_size * itemsize / shards,
        decode=tuple(traffic(text, layout, itemsize=itemsize)),
        prefill=tuple(traffic(text, layout, itemsize=itemsize, decode=False)),
    )


def split_prompt_bytes(text: TextConfig, ranks: int, *, tp_size: int = 1, itemsize: int = 2) -> int:
    """What a rank sends for one prompt whose tokens are split over `ranks` (`k3lib.parallel.kcp`), over all KDA layers.

    However long the prompt is: what a rank's tokens do to the state, in fp32, and the inputs of the convolution's
    window go to all others.

    Args:
        text: the model.
        ranks: that share the tokens.
        tp_size: ranks that share the heads of each.
        itemsize: bytes of an activation.

    Raises:
        ConfigError: no rank, or heads that do not divide.
    """
    kda = text.kda
    if ranks < 1 or tp_size < 1 or kda.num_heads % tp_size:
        raise ConfigError(
            f"ranks={ranks} must be >= 1, and tp_size={tp_size} must divide the {kda.num_heads} KDA heads"
        )
    change = kda.num_heads * (kda.value_dim + kda.key_dim) * kda.key_dim * 4
    window = (kda.conv_width - 1) * kda.conv_channels * itemsize
    return (ranks - 1) * len(text.layers_of("kda")) * (change + window) // tp_size


def _weights(config: KimiK3Config, layout: ParallelConfig, rank: int) -> dict[str, int]:
    """Bytes of the weights of one rank, by part."""
    dtype = getattr(torch, config.dtype)
    moe, placements = config.text.moe, {}
    if moe is not None and layout.redundant_experts:  # the same in every layer, and slow to find
        places = Placement.balanced([1.0] * moe.num_experts, layout.ep_size, layout.redundant_experts)
        placements = dict.fromkeys(range(config.text.num_layers), places)
    mesh = Mesh.view(layout, rank, placements=placements)
    model = KimiK3ForCausalLM(config, mesh=mesh, dtype=dtype, device="meta")
    stored = ExpertsSpec.from_config(config).weights if moe is not None else "bf16"
    found: dict[str, float] = {}
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if not own:
            continue
        size = float(sum(p.nbytes for p in own))
        if isinstance(module, Experts) and stored in _BITS:
            size = sum(p.numel() for p in own) * _BITS[stored] / 8
        part = _part(name, config)
        found[part] = found.get(part, 0.0) + size
    return {part: round(size) for part, size in found.items()}


def _part(name: str, config: KimiK3Config) -> str:
    for text, part in (
        (".shared_experts", "shared experts"),
        (".experts", "routed experts"),
        ("routed_expert_", "latent projections"),
        (".mlp.", "dense layers"),
        (".gate", "routers"),
        ("embed_tokens", "embedding and head"),
        ("lm_head", "embedding and head"),
    ):
        if text in name:
            return part
    if ".self_attn" in name:
        layer = int(name.split("layers.")[1].split(".")[0])
        return "KDA" if config.text.layer_types[layer] == "kda" else "MLA"
    return "norms and residual scores"


def explain_layout(
    config: KimiK3Config,
    layout: ParallelConfig,
    *,
    kv_cache_dtype: str = "auto",
    mamba_ssm_dtype: str = "float32",
    vision: bool = False,
    prompt_ranks: int = 1,
) -> str:
    """Say what a layout shards and what one rank holds and sends, as a table.

    Args:
        config, layout, kv_cache_dtype, mamba_ssm_dtype, vision: see `layout_costs`.
        prompt_ranks: ranks that share the tokens of a prompt in KDA layers; besides those of the layout.

    Raises:
        ConfigError: the layout does not fit the model.
    """
    dtypes = {"kv_cache_dtype": kv_cache_dtype, "mamba_ssm_dtype": mamba_ssm_dtype}
    costs = layout_costs(config, layout, **dtypes, vision=vision)
    rules = _rules(config, layout)
    lines = [f"{layout.world_size} ranks: {_sizes(layout)}", f"cut into {shares(layout)}", "", "weights of a rank"]
    width = max(len(part) for part in (*costs.weights, *rules))
    for part, size in sorted(costs.weights.items(), key=lambda item: -item[1]):
        lines.append(f"  {part:<{width}}  {_human(size):>10}  {rules.get(part, 'replicated')}")
    lines += [f"  {'all':<{width}}  {_human(costs.weight_bytes):>10}", "", "memory of a rank"]
    memory = (
        ("KDA state of a request", costs.state_bytes, _over(layout.attention_size, "heads over {}")),
        ("latent KV of a token", costs.kv_bytes, _over(layout.dcp_size, "tokens over {}", _EVERYWHERE)),
        ("residual stream of a token", costs.stream_bytes, _stream_rule(layout)),
    )
    width = max(len(name) for name, *_ in memory)
    lines += [f"  {name:<{width}}  {_human(size):>10}  {rule}" for name, size, rule in memory]
    for title, kinds in (("decode", costs.decode), ("prefill", costs.prefill)):
        lines += ["", f"sent by a rank for each new token of its replica, {title}"]
        width = max((len(kind.name) for kind in kinds), default=4)
        lines += [f"  {k.name:<{width}}  {_human(k.bytes_per_token):>10}  {k.where}" for k in kinds]
        lines.append(f"  {'all':<{width}}  {_human(sum(k.bytes_per_token for k in kinds)):>10}")
    if prompt_ranks > 1:
        text, activations = text_of(config, None)
        itemsize = ITEMSIZES[activations]
        moved = split_prompt_bytes(text, prompt_ranks, tp_size=layout.attention_size, itemsize=itemsize)
        lines += ["", f"sent by a rank for each prompt, however long, whose tokens {prompt_ranks} ranks share"]
        lines.append(
            f"  states and windows  {_human(moved):>10}  {len(text.layers_of('kda'))} x two gathers over {prompt_ranks}"
        )
    return "\n".join(lines)


def shares(layout: ParallelConfig) -> str:
    """Into how many parts the ranks of a layout cut latent KV, states, experts and the residual stream."""
    parts = {
        "KV": layout.dcp_size * layout.pp_size,
        "states": layout.attention_size * layout.pp_size,
        "experts": layout.world_size,
        "activations": layout.attention_size if layout.shards_tokens else 1,
    }
    return ", ".join(f"{name} {count}" for name, count in parts.items())


def _rules(config: KimiK3Config, layout: ParallelConfig) -> dict[str, str]:
    """How each part is cut."""
    width, inner = layout.attention_size, layout.tp_size // layout.ep_size
    experts = []
    if layout.ep_size > 1:
        moe = config.text.moe
        count = (moe.num_experts + layout.redundant_experts) // layout.ep_size if moe is not None else 0
        experts.append(f"{count} whole experts a rank")
    if inner > 1:
        experts.append(f"width over {inner}")
    heads = _over(width, "heads over {}")
    return {
        "KDA": heads,
        "MLA": heads + (f", queries over {width // layout.dcp_size}" if layout.dcp_replicate_q_proj else ""),
        "routed experts": ", ".join(experts) or "replicated",
        "shared experts": _over(layout.shared_size, "width over {}"),
        "dense layers": _over(width, "width over {}"),
        "embedding and head": _over(width, "vocabulary over {}"),
        "vision tower": "on every rank" + (" of the first stage" if layout.pp_size > 1 else ""),
        "latent projections": _over(width if layout.shard_latent_projections else 1, "width over {}"),
    }


def _over(ranks: int, text: str, otherwise: str = "replicated") -> str:
    return text.format(ranks) if ranks > 1 else otherwise


def _stream_rule(layout: ParallelConfig) -> str:
    return _over(layout.attention_size if layout.shards_tokens else 1, "tokens over {}", _EVERYWHERE)


def _sizes(layout: ParallelConfig) -> str:
    shown = [f"tp_size={layout.tp_size}"]
    others = ("dp_size", "dcp_size", "ep_size", "pp_size")
    shown += [f"{name}={getattr(layout, name)}" for name in others if getattr(layout, name) > 1]
    if layout.moe_exchange != "all_reduce":
        shown.append(f"moe_exchange={layout.moe_exchange}")
    others = ("shared_experts_tp_size", "redundant_experts", "dcp_comm_backend", "pp_partition")
    shown += [f"{name}={getattr(layout, name)}" for name in others if getattr(layout, name)]
    shown += [name for name in ("dcp_replicate_q_proj", "shard_latent_projections") if getattr(layout, name)]
    return ", ".join(shown)


def _human(size: float) -> str:
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.4g} {unit}"
