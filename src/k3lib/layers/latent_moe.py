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
from k3lib.parallel.ep import ExpertSpread, choose_places
from k3lib.parallel.group import LOCAL, Group
from k3lib.parallel.sp import TokenShards
from k3lib.parallel.streams import WAYS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from k3lib.batch import RouteTap
    from k3lib.config import LatentMoEConfig
    from k3lib.parallel.streams import Way

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

    Attributes:
        held: the experts of this rank, in the order of the stack.
        first_place: number of the first of them over all ranks; without copies, of the expert itself.
    """

    def __init__(
        self,
        config: LatentMoEConfig,
        *,
        tp: Group = LOCAL,
        spread: ExpertSpread | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Make the layer.

        Args:
            config: of the mixture.
            tp: ranks that share the width of every expert and see the same tokens.
            spread: any other way over ranks; then `tp` is not looked at.
            dtype: of the weights.
            device: of the weights.
        """
        super().__init__()
        self.config = config
        self.spread = spread = spread or ExpertSpread(tp=tp, reduce=tp)
        self.tp = spread.tp
        self.held = spread.held(config.num_experts)
        self.first_place = spread.ep.rank * len(self.held)
        self.rule = Shard(0, what="the intermediate width of the experts")
        self.begin, self.end = shard_range(config.intermediate_size, self.tp, self.rule)
        local, width = self.end - self.begin, config.expert_width
        # w1 and w3 are cut by themselves, then stacked: the loader places the parts
        self.w13 = parameter(len(self.held), 2 * local, width, dtype=dtype, device=device)
        self.w2 = parameter(len(self.held), width, local, dtype=dtype, device=device)
        self.packed: ops.ExpertStore | None = None
        # which copy of an expert a token takes; small, and made where it is needed
        self._places = None if spread.placement is None else spread.placement.table()

    def set_packed(self, weights: ops.ExpertStore) -> None:
        """Hold packed weights, or what fetches experts, instead of parameters."""
        if self.packed is None:
            del self.w13, self.w2
        self.packed = weights

    @property
    def weights(self) -> ops.ExpertStore:
        """The canonical weights that the op takes."""
        if self.packed is not None:
            return self.packed
        return ops.ExpertWeights(self.w13, self.w2, first_expert=self.first_place)

    def _apply(self, fn: Any, recurse: bool = True) -> Experts:  # noqa: ANN401 - torch's signature
        super()._apply(fn, recurse)
        if self.packed is not None:
            self.packed.to(fn(torch.zeros(1)).device)  # never cast: the bytes are codes
        return self

    def forward(self, x: Tensor, routing: ops.Routing, *, counts: Sequence[int] = ()) -> Tensor:
        """Weighted sum over the chosen experts of `[T, L]`, complete on every rank.

        Args:
            x: `[T, L]`.
            routing: the choice.
            counts: tokens of every replica, if the experts serve several.
        """
        ids = routing.ids
        if self._places is not None:
            self._places = self._places.to(ids.device)
            ids = choose_places(ids, self._places)
        return self.spread.run(x, ids, routing.weights, self.weights, act_fn=self.config.act, counts=counts)


class LatentMoE(K3Module):
    """`up(norm(Σ_i w_i expert_i(down(x)))) + shared(x)`; the router reads the full-width `x`."""

    def __init__(
        self,
        config: LatentMoEConfig,
        *,
        tp: Group = LOCAL,
        spread: ExpertSpread | None = None,
        shared: Group | None = None,
        shard_latent: bool = False,
        overlap_shared: Way = "graphs",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Make the layer.

        Args:
            config: of the mixture.
            tp: ranks that see the same tokens.
            spread: how the routed experts lie over ranks; None cuts the width of every expert over `tp`.
            shared: ranks that share the shared experts; None is `tp`. With experts that exchange by all-to-all the
                tokens are sharded over `tp`, and gathered in this group.
            shard_latent: cut the latent projections over `tp` and gather their outputs; False repeats them.
            overlap_shared: when to compute the shared experts beside the routed ones, if the device has streams: in
                captured "graphs", unless they exchange in different groups; "always"; or "never". The result is the
                same.
            dtype: of the weights.
            device: of the weights.
        """
        super().__init__()
        self.config = c = config
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        self.gate = Router(c, **place)
        self.latent_tp = tp if shard_latent else LOCAL
        if c.latent_size is not None:
            cut: dict[str, Any] = {"cut": "out", "tp": tp} if shard_latent else {}
            self.routed_expert_down_proj = Linear(c.hidden_size, c.latent_size, **cut, **place)
            if c.latent_norm:
                self.routed_expert_norm = RMSNorm(c.latent_size, c.norm_eps, **place)
            self.routed_expert_up_proj = Linear(c.latent_size, c.hidden_size, **cut, **place)
        self.experts = Experts(c, tp=tp, spread=spread, **place)
        if c.num_shared_experts:
            shared = tp if shared is None else shared
            sharded = spread is not None and spread.exchange == "all_to_all"
            # every rank has other tokens there: gathered in front of the shared experts, scattered by their sum
            self._shared_tokens = TokenShards(shared if sharded else LOCAL)
            tokens = self._shared_tokens if sharded else shared
            self.shared_experts = SiTUMLP(c.hidden_size, c.shared_size, c.act, tp=tokens, **place)
            groups = {id(g) for g in (shared, self.latent_tp, *self.experts.spread.talks_in) if g.size > 1}
            # kernels of two communicators that run at once can wait for each other for ever; those of one are in order
            is_safe = len(groups) < 2 or overlap_shared == "always"
            self.overlap_shared: Way = overlap_shared if is_safe else "never"

    def forward(
        self, x: Tensor, *, routes: RouteTap | None = None, moe_layer: int = 0, counts: Sequence[int] = ()
    ) -> Tensor:
        """Apply to `[T, D]`.

        Args:
            x: the normed layer input.
            routes: record the chosen experts, or replay given ones.
            moe_layer: which entry of `routes` is this layer's.
            counts: tokens of every replica, if the experts serve several.
        """

        def routed() -> Tensor:
            routing = self.gate(x, routes.ids[:, moe_layer] if routes is not None and routes.replay else None)
            if routes is not None and not routes.replay:
                routes.ids[:, moe_layer] = routing.ids
            return self._routed(x, routing, counts)

        if not self.config.num_shared_experts:
            return routed()
        one, other = WAYS[self.overlap_shared](x.device, routed, lambda: self._shared(x))
        return one + other

    def _shared(self, x: Tensor) -> Tensor:
        together = self._shared_tokens
        out: Tensor = self.shared_experts(together.gather(x, x.shape[0] * together.size))
        return out

    def _routed(self, x: Tensor, routing: ops.Routing, counts: Sequence[int]) -> Tensor:
        if self.config.latent_size is None:
            plain: Tensor = self.experts(x, routing, counts=counts)
            return plain
        down = self.latent_tp.all_gather(self.routed_expert_down_proj(x), dim=-1)
        # the sum over all experts (and ranks) is complete before the norm
        total = self.experts(down, routing, counts=counts)
        if self.config.latent_norm:
            total = self.routed_expert_norm(total)
        return self.latent_tp.all_gather(self.routed_expert_up_proj(total), dim=-1)
