"""MXFP4 experts of humming (the package humming-kernels): two indexed products with SiTU between them.

Its layout is made from the canonical weights at the first call and kept as long as they live, beside them: the experts
of a layer take twice their memory. Its kernels are compiled at the first call of each size.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from k3lib.ops.activation import situ_and_mul
from k3lib.ops.moe import ExpertsSpec, experts, needs_resident
from k3lib.ops.registry import register
from k3lib.ops.target import HOPPER, Package

if TYPE_CHECKING:
    from torch import Tensor

    from k3lib.ops import ExpertWeights

__all__ = ["HUMMING", "experts_humming"]

HUMMING = Package("humming", ("humming-kernels",), at_least="0.1.20")

_LAYERS: dict[int, tuple[Any, Any]] = {}  # both products, by the identity of the canonical w13


def _supports(spec: ExpertsSpec) -> str | None:
    if reason := needs_resident(spec):
        return reason
    if spec.weights != "mxfp4":
        return f"needs weights=mxfp4, got {spec.weights}"
    if spec.activations != torch.bfloat16:
        return f"needs bfloat16, got {spec.activations}"
    if spec.act_fn != "situ":
        return f"needs act_fn=situ, got {spec.act_fn}"
    if spec.hidden % 64 or spec.intermediate % 64:
        return f"needs widths that are multiples of 64, got {spec.hidden} and {spec.intermediate}"
    return None


def _layer(weight: Tensor, scale: Tensor) -> Any:
    from humming.layer import HummingLayer  # type: ignore[import-not-found]

    num_experts, rows, packed = weight.shape
    layer = HummingLayer(
        shape_n=rows,
        shape_k=2 * packed,
        weight_config={"quant_method": "mxfp4"},
        num_experts=num_experts,
        torch_dtype=torch.bfloat16,
    )
    layer.load_from_tensors({"weight": weight, "weight_scale": scale})
    layer = layer.to(weight.device)
    layer.transform()
    return layer


def _layers(store: ExpertWeights) -> tuple[Any, Any]:
    key = id(store.w13)
    found = _LAYERS.get(key)
    if found is None:
        assert store.w13_scale is not None and store.w2_scale is not None, "MXFP4 has scales"  # noqa: PT018
        found = (_layer(store.w13, store.w13_scale), _layer(store.w2, store.w2_scale))
        _LAYERS[key] = found
        weakref.finalize(store.w13, _LAYERS.pop, key, None)
    return found


@register(
    experts,
    name="humming",
    platforms={"cuda"},
    archs=HOPPER,
    requires=(HUMMING, Package("triton", ("triton", "pytorch-triton"), at_least="3.4")),
    proven_on=HOPPER,
    priority=5,  # on an H200 it took 1.2 to 2.3 times as long as the kernels in Triton
    supports=_supports,
)
def experts_humming(x, ids, weights, prepared, *, act_fn):
    """See `k3lib.ops.experts`. Routes are sorted and results summed by the kernels of `k3lib.backends.triton`."""
    from k3lib.backends.triton import experts_kernels as kernels
    from k3lib.backends.triton.experts import check_experts

    check_experts(x, ids, weights, prepared)
    routes, top_k = ids.numel(), ids.shape[1]
    if not routes:
        return torch.zeros_like(x)
    x, ids = x.contiguous(), ids.contiguous()
    up, down = _layers(prepared)
    hidden = situ_and_mul(
        _product(kernels, up, x, ids, prepared, top_k), beta=act_fn.beta, linear_beta=act_fn.linear_beta
    )
    y = _product(kernels, down, hidden, ids, prepared, 1)
    return kernels.combine(y, ids, weights.contiguous(), prepared, x.dtype)


def _product(kernels, layer, x, ids, store, top_k):
    """`[T · k, N]`, a row for each route; rows of routes to other ranks are not written."""
    from humming.tune import get_heuristics_config  # type: ignore[import-not-found]

    routes = ids.numel()
    config = get_heuristics_config(layer.humming_config, shape_m=routes, gemm_type="indexed")
    block = config["block_shape"][0]
    tiles, filled, order = kernels.sort_routes(ids, store.first_expert, store.num_experts, block)
    lanes = torch.arange(block, dtype=torch.int32, device=ids.device)
    padded = torch.where(lanes < filled[:, None], order.view(-1, block), routes)
    return layer(
        x,
        sorted_ids=padded.flatten(),
        expert_ids=tiles.clamp(min=0),
        num_tokens_padded=((tiles >= 0).sum(dtype=torch.int32) * block).to(torch.int32),
        top_k=top_k,
        compute_config={"gemm_type": "indexed"},
        tuning_config=[[0, 1 << 30, config]],
    )
