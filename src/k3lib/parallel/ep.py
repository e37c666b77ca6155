"""Routed experts spread over ranks: each token's row visits the ranks that hold its experts, and comes back.

Shapes: T tokens of this rank, L width of an expert, k experts per token, R ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from k3lib.errors import ConfigError
from k3lib.ops.moe import ExpertsSpec, experts
from k3lib.ops.packing import compute_dtype
from k3lib.ops.registry import op

if TYPE_CHECKING:
    from torch import Tensor

    from k3lib.config import SiTU
    from k3lib.ops.moe import ExpertStore
    from k3lib.parallel.group import Group

__all__ = ["ep_experts"]


def _spec(x: Tensor, ids: Tensor, weights: Tensor, prepared: ExpertStore, *, act_fn: SiTU, group: Group) -> ExpertsSpec:
    return ExpertsSpec(
        experts=prepared.num_experts,
        top_k=ids.shape[1],
        hidden=prepared.width,
        intermediate=prepared.intermediate,
        weights=prepared.format,
        activations=x.dtype,
        offloaded=prepared.offloaded,
        ep_size=group.size,
    )


@op(_spec, default="composed", parts=("experts",))
def ep_experts(x: Tensor, ids: Tensor, weights: Tensor, prepared: ExpertStore, *, act_fn: SiTU, group: Group) -> Tensor:
    """Weighted sum of the chosen experts, which live in equal contiguous ranges on the ranks of `group`.

    A row is sent once to each rank that holds one of its experts, with its ids and weights; that rank runs `experts`
    on what arrived and sends its partial sums back, where they are added in fp32 and rounded once. Counts may differ
    and be zero: every rank of the group calls this in the same step, also one without tokens.

    Args:
        x: `[T, L]`.
        ids: `[T, k]` int32, global expert ids.
        weights: `[T, k]` fp32.
        prepared: the experts of this rank; `first_expert` is `rank · experts per rank`.
        act_fn: the activation between the two products.
        group: the ranks; a group of one exchanges nothing.

    Returns:
        `[T, L]` in the dtype of `x`.

    Raises:
        ConfigError: the experts held here are not this rank's range; nothing has been sent.
    """
    per_rank = prepared.num_experts
    if prepared.first_expert != group.rank * per_rank:
        raise ConfigError(
            f"ep_experts: rank {group.rank} of {group.size} with {per_rank} experts must hold those from "
            f"{group.rank * per_rank}, got first_expert={prepared.first_expert}"
        )
    if group.size == 1:
        return experts(x, ids, weights, prepared, act_fn=act_fn)
    ranks = torch.arange(group.size, device=x.device)
    goes = (ids.long() // per_rank).unsqueeze(1) == ranks[:, None]  # [T, R, k]
    rank, token = goes.any(-1).t().nonzero(as_tuple=True)  # in the order of the ranks
    send = torch.bincount(rank, minlength=group.size)
    one = [1] * group.size
    receive = group.all_to_all(send, one, one)
    sends: list[int] = send.tolist()
    receives: list[int] = receive.tolist()

    arrived = group.all_to_all(x[token], sends, receives)
    arrived_ids = group.all_to_all(ids[token], sends, receives)
    arrived_weights = group.all_to_all(weights[token], sends, receives)
    partial = experts(arrived, arrived_ids, arrived_weights, prepared, act_fn=act_fn)
    back = group.all_to_all(partial, receives, sends)
    total = x.new_zeros(x.shape, dtype=compute_dtype(x))
    return total.index_add(0, token, back.to(total.dtype)).to(x.dtype)
