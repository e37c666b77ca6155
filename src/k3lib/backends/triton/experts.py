"""Routed experts with packed weights decoded in registers."""

from __future__ import annotations

import torch

from k3lib.backends.triton import OPTIONS
from k3lib.errors import ConfigError
from k3lib.ops.moe import ExpertsSpec, experts, needs_resident
from k3lib.ops.registry import register

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_GROUPS = {"bf16": 1, "mxfp4": 32, "nvfp4": 16}


def _supports(spec: ExpertsSpec) -> str | None:
    if reason := needs_resident(spec):
        return reason
    if spec.activations not in _DTYPES:
        return f"needs bfloat16, float16 or float32, got {spec.activations}"
    if spec.act_fn != "situ":
        return f"needs act_fn=situ, got {spec.act_fn}"
    group = _GROUPS[spec.weights]
    if spec.hidden % group or spec.intermediate % group:
        return f"needs widths that are multiples of {group}, got {spec.hidden} and {spec.intermediate}"
    return None


def check_experts(x, ids, weights, store):
    """Refuse arguments that do not fit the stacked weights."""
    if x.shape[-1] != store.width or ids.shape != weights.shape or ids.shape[0] != x.shape[0]:
        raise ConfigError(
            f"experts: x {tuple(x.shape)}, ids {tuple(ids.shape)}, weights {tuple(weights.shape)} do not fit experts "
            f"of width {store.width}"
        )
    if ids.dtype != torch.int32 or weights.dtype != torch.float32:
        raise ConfigError(f"experts: ids must be int32 and weights float32, got {ids.dtype} and {weights.dtype}")
    count, inner, width, group = store.num_experts, store.intermediate, store.width, _GROUPS[store.format]
    pack = 1 if group == 1 else 2
    shapes: dict[str, tuple[int, ...]] = {"w13": (count, 2 * inner, width // pack), "w2": (count, width, inner // pack)}
    if pack == 2:
        shapes |= {"w13_scale": (count, 2 * inner, width // group), "w2_scale": (count, width, inner // group)}
    if store.format == "nvfp4":
        shapes |= {"w13_scale_2": (count,), "w2_scale_2": (count,)}
    for name, shape in shapes.items():
        stored = getattr(store, name)
        if stored is None or tuple(stored.shape) != shape:
            got = None if stored is None else tuple(stored.shape)
            raise ConfigError(f"experts: {name} must have shape {shape}, got {got}")
        if not stored.is_contiguous() or stored.data_ptr() % 16 or stored.device != x.device:
            raise ConfigError(
                f"experts: {name} must be contiguous, aligned to 16 bytes and on {x.device}, got strides "
                f"{stored.stride()} on {stored.device}"
            )


@register(experts, name="triton", priority=10, supports=_supports, **OPTIONS)
def experts_triton(x, ids, weights, prepared, *, act_fn):
    """See `k3lib.ops.experts`. Few tokens are summed in another order than many."""
    from k3lib.backends.triton import experts_kernels as kernels

    check_experts(x, ids, weights, prepared)
    return kernels.run(x.contiguous(), ids.contiguous(), weights.contiguous(), prepared, act_fn)


@register(experts, name="triton_invariant", priority=9, deterministic=True, supports=_supports, **OPTIONS)
def experts_triton_invariant(x, ids, weights, prepared, *, act_fn):
    """See `k3lib.ops.experts`. A token's result has the same bits whatever else is in the batch."""
    from k3lib.backends.triton import experts_kernels as kernels

    check_experts(x, ids, weights, prepared)
    return kernels.run(x.contiguous(), ids.contiguous(), weights.contiguous(), prepared, act_fn, one_order=True)
