"""The mixture of experts in a latent space, with shared experts at full width.

Shapes: T tokens, D hidden size, L latent width, I local intermediate width, E experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from k3lib import ops
from k3lib.layers.linear import K3Module, Linear, Shard, parameter, shard_range, wide_dtype
from k3lib.layers.mlp import SiTUMLP
from k3lib.layers.norm import RMSNorm
from k3lib.parallel.group import LOCAL, Group

if TYPE_CHECKING:
    from torch import Tensor

    from k3lib.batch import RouteTap
    from k3lib.config import LatentMoEConfig

__all__ = ["Experts", "LatentMoE", "Router"]


class Router(K3Module):
    """Router weight and the correction bias, which is used for the choice only and kept in fp32."""

    wide = ("e_score_correction_bias",)

    def __init__(
        self,
        config: LatentMoEConfig,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.weight = parameter(config.num_experts, config.hidden_size, dtype=dtype, device=device)
        self.e_score_correction_bias = parameter(config.num_experts, dtype=wide_dtype(dtype), device=device, fill=0)

    def forward(self, x: Tensor, ids: Tensor | None = None) -> ops.Routing:
        """Route `[T, D]`; `ids` replays a choice."""
        c = self.config
        return ops.route(
            x,
            self.weight,
            self.e_score_correction_bias,
            top_k=c.top_k,
            num_groups=c.num_groups,
            top_groups=c.top_groups,
            renormalize=c.renormalize,
            scale=c.routed_scale,
            ids=ids,
        )


class Experts(K3Module):
    """The stacked routed experts: plain parameters `w13 [E, 2I, L]` and `w2 [E, L, I]`, or a store in their place.

    A store (`set_packed`) is packed weights, decoded only inside the `experts` op, or reads experts when they are
    chosen. It is no parameter: neither `parameters()` nor `state_dict()` has it.
    """

    def __init__(
        self,
        config: LatentMoEConfig,
        *,
        tp: Group = LOCAL,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.tp = tp
        self.rule = Shard(0, what="the intermediate width of the experts")
        self.begin, self.end = shard_range(config.intermediate_size, tp, self.rule)
        local, width = self.end - self.begin, config.expert_width
        # w1 and w3 are cut by themselves, then stacked: the loader places the parts
        self.w13 = parameter(config.num_experts, 2 * local, width, dtype=dtype, device=device)
        self.w2 = parameter(config.num_experts, width, local, dtype=dtype, device=device)
        self.packed: ops.ExpertStore | None = None

    def set_packed(self, weights: ops.ExpertStore) -> None:
        """Hold packed weights, or what fetches experts, instead of parameters."""
        if self.packed is None:
            del self.w13, self.w2
        self.packed = weights

    @property
    def weights(self) -> ops.ExpertStore:
        """The canonical weights that the op takes."""
        return self.packed if self.packed is not None else ops.ExpertWeights(self.w13, self.w2)

    def _apply(self, fn: Any, recurse: bool = True) -> Experts:  # noqa: ANN401 - torch's signature
        super()._apply(fn, recurse)
        if self.packed is not None:
            self.packed.to(fn(torch.zeros(1)).device)  # never cast: the bytes are codes
        return self

    def forward(self, x: Tensor, routing: ops.Routing) -> Tensor:
        """Weighted sum over the chosen experts of `[T, L]`; partial sums of the ranks are reduced here."""
        return self.tp.all_reduce(ops.experts(x, routing.ids, routing.weights, self.weights, act_fn=self.config.act))


class LatentMoE(K3Module):
    """`up(norm(Σ_i w_i expert_i(down(x)))) + shared(x)`; the router reads the full-width `x`."""

    def __init__(
        self,
        config: LatentMoEConfig,
        *,
        tp: Group = LOCAL,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = c = config
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        self.gate = Router(c, **place)
        if c.latent_size is not None:
            self.routed_expert_down_proj = Linear(c.hidden_size, c.latent_size, **place)
            if c.latent_norm:
                self.routed_expert_norm = RMSNorm(c.latent_size, c.norm_eps, **place)
            self.routed_expert_up_proj = Linear(c.latent_size, c.hidden_size, **place)
        self.experts = Experts(c, tp=tp, **place)
        if c.num_shared_experts:
            self.shared_experts = SiTUMLP(c.hidden_size, c.shared_size, c.act, tp=tp, **place)

    def forward(self, x: Tensor, *, routes: RouteTap | None = None, moe_layer: int = 0) -> Tensor:
        """Apply to `[T, D]`.

        Args:
            x: the normed layer input.
            routes: record the chosen experts, or replay given ones.
            moe_layer: which entry of `routes` is this layer's.
        """
        routing = self.gate(x, routes.ids[:, moe_layer] if routes is not None and routes.replay else None)
        if routes is not None and not routes.replay:
            routes.ids[:, moe_layer] = routing.ids
        routed = self._routed(x, routing)
        if self.config.num_shared_experts:
            routed = routed + self.shared_experts(x)
        return routed

    def _routed(self, x: Tensor, routing: ops.Routing) -> Tensor:
        if self.config.latent_size is None:
            plain: Tensor = self.experts(x, routing)
            return plain
        # the sum over all experts (and ranks) is complete before the norm
        total = self.experts(self.routed_expert_down_proj(x), routing)
        if self.config.latent_norm:
            total = self.routed_expert_norm(total)
        up: Tensor = self.routed_expert_up_proj(total)
        return up
