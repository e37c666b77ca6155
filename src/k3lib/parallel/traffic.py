"""How many bytes a rank sends for each token in a layout. Pure arithmetic on a configuration.

Counted as rings move them: of n bytes that p ranks sum, each sends 2 (p − 1)/p n; of n that they gather or scatter,
(p − 1)/p n. What padding and counts add is left out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from k3lib.parallel.pp import payload_rows, stage_layers

if TYPE_CHECKING:
    from k3lib.config import TextConfig
    from k3lib.parallel.mesh import ParallelConfig

__all__ = ["Traffic", "expected_ranks", "traffic"]


class Traffic(NamedTuple):
    """One kind of exchange.

    Attributes:
        name: what is exchanged.
        bytes_per_token: what a rank sends for each new token of its replica, over the layers of its stage.
        where: how often and over which ranks.
    """

    name: str
    bytes_per_token: float
    where: str


def _shared(n: float, ranks: int) -> float:
    return (ranks - 1) / ranks * n


def expected_ranks(experts: int, ranks: int, top_k: int) -> float:
    """Ranks, of those that share the experts equally, that hold one of a token's experts, if all are as likely."""
    each = experts // ranks
    return ranks * (1 - math.comb(experts - each, top_k) / math.comb(experts, top_k))


def traffic(text: TextConfig, layout: ParallelConfig, *, itemsize: int = 2, decode: bool = True) -> list[Traffic]:
    """What a rank of the stage with the most layers sends, by kind; kinds without traffic are left out.

    Args:
        text: the model.
        layout: the ranks.
        itemsize: bytes of an activation.
        decode: a decode or verify step; else a prefill without a cached prefix. They differ under `dcp_size` only.
    """
    stages = stage_layers(text.num_layers, layout.pp_size, layout.pp_partition)
    # the last of the largest stages: the later one carries more blocks
    stage = max(stages, key=lambda layers: (len(layers), layers.start))
    found = [
        *_stream(text, layout, stage, itemsize),
        *_experts(text, layout, stage, itemsize),
        *(_context(text, layout, stage, itemsize) if decode else ()),
    ]
    if layout.pp_size > 1:
        per_block = text.attn_res.layers_per_block if text.attn_res is not None else None
        rows = max(payload_rows(layers.start, per_block) for layers in stages[1:])
        part = layout.attention_size if layout.shards_tokens else 1
        found.append(
            Traffic("stage payload", rows * text.hidden_size * itemsize / part, f"deepest cut: {rows} hidden vectors")
        )
    return [kind for kind in found if kind.bytes_per_token]


def _stream(text: TextConfig, layout: ParallelConfig, stage: range, itemsize: int) -> list[Traffic]:
    """Around attention, dense layers and the embedding."""
    width, hidden = layout.attention_size, text.hidden_size * itemsize
    dense = sum(layer in text.dense_layers for layer in stage)
    embedding = int(stage.start == 0)
    layers = len(stage) + dense
    if layout.shards_tokens:
        output = int(stage.stop == text.num_layers)
        moved = (2 * layers + embedding + output) * _shared(hidden, width)
        return [Traffic("hidden states", moved, f"{layers} x gather and reduce-scatter over {width}")]
    moved = (layers + embedding) * 2 * _shared(hidden, width)
    return [Traffic("hidden states", moved, f"{layers + embedding} x all-reduce over {width}")]


def _experts(text: TextConfig, layout: ParallelConfig, stage: range, itemsize: int) -> list[Traffic]:
    moe = text.moe
    layers = sum(layer not in text.dense_layers for layer in stage)
    if moe is None or not layers:
        return []
    width, latent, hidden = layout.attention_size, moe.expert_width * itemsize, text.hidden_size * itemsize
    choice = 8 * moe.top_k  # an id and a weight, 32 bits each
    found = []
    if layout.moe_exchange == "all_to_all":
        visited = expected_ranks(moe.num_experts, layout.ep_size, moe.top_k) * _shared(1, layout.ep_size)
        moved = visited * (2 * latent + choice) / width
        where = f"{layers} x to {visited:.1f} of {layout.ep_size} ranks"
        found.append(Traffic("routed experts", layers * moved, where))
        shared = (layout.shared_size - 1) * 2 * hidden / width
        where = f"{layers} x gather and reduce-scatter over {layout.shared_size}"
    else:
        moved = 2 * _shared(latent, width)
        where = f"{layers} x all-reduce over {width}"
        if layout.dp_size > 1:
            moved += (layout.dp_size - 1) * (2 * latent + choice)
            where = f"{layers} x gather and reduce-scatter over {layout.dp_size} replicas"
            where += f", all-reduce over {width}" if width > 1 else ""
        found.append(Traffic("routed experts", layers * moved, where))
        shared = 2 * _shared(hidden, layout.shared_size)
        where = f"{layers} x all-reduce over {layout.shared_size}"
    if moe.num_shared_experts:
        found.append(Traffic("shared experts", layers * shared, where))
    if layout.shard_latent_projections and moe.latent_size is not None:
        moved = _shared(latent + hidden, width)
        found.append(Traffic("latent projections", layers * moved, f"{layers} x two gathers over {width}"))
    return found


def _context(text: TextConfig, layout: ParallelConfig, stage: range, itemsize: int) -> list[Traffic]:
    """Queries and partial attention of a context-parallel group."""
    ranks, mla = layout.dcp_size, text.mla
    layers = sum(layer in stage for layer in text.layers_of("mla"))
    if ranks == 1 or not layers:
        return []
    heads = mla.num_heads // layout.attention_size
    found = []
    if not layout.dcp_replicate_q_proj:
        moved = (ranks - 1) * heads * mla.latent_width * itemsize
        found.append(Traffic("queries", layers * moved, f"{layers} x gather over {ranks}"))
    if layout.dcp_comm_backend == "ag_rs":
        moved = (ranks - 1) * (ranks * heads * 4 + heads * mla.kv_lora_rank * 4)
        found.append(Traffic("partial attention", layers * moved, f"{layers} x gather, reduce-scatter over {ranks}"))
    else:
        moved = (ranks - 1) * heads * (mla.kv_lora_rank * itemsize + 4)
        found.append(Traffic("partial attention", layers * moved, f"{layers} x all-to-all over {ranks}"))
    return found
