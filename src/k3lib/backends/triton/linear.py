"""Products of few tokens with a weight, which is read once; and torch's for all others."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from k3lib.backends.triton import OPTIONS
from k3lib.errors import ConfigError
from k3lib.ops.linear import FEW_TOKENS, LinearSpec, linear
from k3lib.ops.registry import register

_DTYPES = (torch.bfloat16, torch.float16)


def _supports(spec: LinearSpec) -> str | None:
    if spec.tokens == "many":
        return f"needs at most {FEW_TOKENS} tokens, got more"
    if spec.dtype not in _DTYPES or spec.weight_dtype != spec.dtype:
        return f"needs x and weight in bfloat16 or both in float16, got {spec.dtype} and {spec.weight_dtype}"
    return "needs that no gradients are recorded, got a tensor that requires them" if spec.records else None


def _check(x, weight):
    if x.shape[-1] != weight.shape[-1] or weight.ndim != 2:
        raise ConfigError(f"linear: x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}")


@register(linear, name="torch", platforms={"cuda", "rocm", "npu"}, deterministic=True, supports=lambda _spec: None)
def linear_torch(x, weight):
    """See `k3lib.ops.linear`: the vendor's library."""
    _check(x, weight)
    return F.linear(x, weight)


@register(linear, name="triton", priority=10, supports=_supports, **OPTIONS)
def linear_triton(x, weight):
    """See `k3lib.ops.linear`. One token is summed in another order than several."""
    _check(x, weight)
    flat = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    if flat.shape[0] > FEW_TOKENS:
        raise ConfigError(f"linear: the kernel takes at most {FEW_TOKENS} tokens, got {flat.shape[0]}")
    flat, weight = (y if y.stride(-1) == 1 or y.shape[-1] == 1 else y.contiguous() for y in (flat, weight))
    from k3lib.backends.triton.linear_kernels import launch_linear

    out = launch_linear(flat, weight)
    return out if x.ndim == 2 else out.view(*x.shape[:-1], weight.shape[0])
