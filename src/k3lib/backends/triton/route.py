"""Router: the product with few tokens split over the hidden size, and the choice in one kernel."""

from __future__ import annotations

import torch

from k3lib.backends.triton import OPTIONS
from k3lib.errors import ConfigError
from k3lib.ops.moe import RouteSpec, Routing, route
from k3lib.ops.registry import register

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_EXPERTS = 4096
_MAX_TOP_K = 64


def _supports(spec: RouteSpec) -> str | None:
    if spec.num_groups > 1:
        return f"needs one group, got {spec.num_groups}"
    if spec.dtype not in _DTYPES:
        return f"needs bfloat16, float16 or float32, got {spec.dtype}"
    if spec.experts > _MAX_EXPERTS:
        return f"needs at most {_MAX_EXPERTS} experts, got {spec.experts}"
    if spec.top_k > _MAX_TOP_K:
        return f"needs at most {_MAX_TOP_K} experts a token, got {spec.top_k}"
    return None


def _checked(x, weight, bias, top_k, ids):
    if x.shape[-1] != weight.shape[-1] or bias.shape != weight.shape[:1]:
        raise ConfigError(f"route: x {tuple(x.shape)}, weight {tuple(weight.shape)}, bias {tuple(bias.shape)}")
    if top_k > weight.shape[0]:
        raise ConfigError(f"route: top_k={top_k} of {weight.shape[0]} experts")
    if ids is not None and (ids.ndim != 2 or ids.shape[0] != x.shape[0]):
        raise ConfigError(f"route: ids {tuple(ids.shape)} for {x.shape[0]} tokens")
    ids = None if ids is None else ids.to(torch.int32).contiguous()
    return x.contiguous(), weight.contiguous(), bias.contiguous(), ids


@register(route, name="triton", priority=10, supports=_supports, **OPTIONS)
def route_triton(x, weight, bias, *, top_k, num_groups=1, top_groups=1, renormalize, scale, ids=None):
    """See `k3lib.ops.route`."""
    from k3lib.backends.triton import route_kernels as kernels

    x, weight, bias, ids = _checked(x, weight, bias, top_k, ids)
    return Routing(*kernels.choose(kernels.logits(x, weight), bias, top_k, renormalize, scale, ids))


@register(route, name="triton_invariant", priority=9, deterministic=True, supports=_supports, **OPTIONS)
def route_triton_invariant(x, weight, bias, *, top_k, num_groups=1, top_groups=1, renormalize, scale, ids=None):
    """See `k3lib.ops.route`. Few tokens take the same way as many: the product is one of torch."""
    from k3lib.backends.triton import route_kernels as kernels

    x, weight, bias, ids = _checked(x, weight, bias, top_k, ids)
    logits = kernels.logits(x, weight, None)
    return Routing(*kernels.choose(logits, bias, top_k, renormalize, scale, ids, kernels.CHOICE_WARPS))
