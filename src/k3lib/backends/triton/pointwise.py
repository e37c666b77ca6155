"""SiTU, norms, the merge of partial attentions, and the paged store and gather."""

from __future__ import annotations

import torch

from k3lib.backends.triton import OPTIONS
from k3lib.errors import ConfigError
from k3lib.ops.activation import SiTUSpec, situ_and_mul
from k3lib.ops.mla import MergeSpec, RowsSpec, gather_rows, merge_partials, store_rows
from k3lib.ops.norm import NormSpec, gated_rms_norm, rms_norm
from k3lib.ops.registry import register

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PAGE_DTYPES = (*_DTYPES, torch.float8_e4m3fn)
_MAX_WIDTH = 32768  # a row stays in the registers of one program


def _narrow(spec: SiTUSpec) -> str | None:
    return None if spec.dtype in _DTYPES else f"needs bfloat16, float16 or float32, got {spec.dtype}"


def _rows_fit(spec: NormSpec | MergeSpec) -> str | None:
    if spec.dtype not in _DTYPES:
        return f"needs bfloat16, float16 or float32, got {spec.dtype}"
    if isinstance(spec, NormSpec) and spec.weight_dtype not in _DTYPES:
        return f"needs a weight of bfloat16, float16 or float32, got {spec.weight_dtype}"
    width = spec.width if isinstance(spec, NormSpec) else spec.value_dim
    return None if width <= _MAX_WIDTH else f"needs a width of at most {_MAX_WIDTH}, got {width}"


def _pages_fit(spec: RowsSpec) -> str | None:
    if spec.page_dtype not in _PAGE_DTYPES:
        return f"needs pages of bfloat16, float16, float32 or float8_e4m3fn, got {spec.page_dtype}"
    return None if spec.width <= _MAX_WIDTH else f"needs a width of at most {_MAX_WIDTH}, got {spec.width}"


def _flat(x, width):
    """`[rows, width]` with neighbouring values in a row; a view if it can be."""
    x = x.reshape(-1, width)
    return x if x.stride(-1) == 1 or width == 1 else x.contiguous()


def _check_weight(x, weight):
    if weight.shape != x.shape[-1:]:
        raise ConfigError(f"weight has shape {tuple(weight.shape)}, x needs {tuple(x.shape[-1:])}")


@register(situ_and_mul, name="triton", priority=10, deterministic=True, supports=_narrow, **OPTIONS)
def situ_and_mul_triton(x, *, beta, linear_beta):
    """See `k3lib.ops.situ_and_mul`. In bfloat16 both caps use the hardware's tanh, exact to 2^-11."""
    if x.shape[-1] % 2:
        raise ConfigError(f"situ_and_mul needs an even last axis [gate | up], got {x.shape[-1]}")
    if not x.numel():
        return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    from k3lib.backends.triton.pointwise_kernels import launch_situ

    out = launch_situ(_flat(x, x.shape[-1]), beta, linear_beta)
    return out.view(*x.shape[:-1], x.shape[-1] // 2)


@register(rms_norm, name="triton", priority=10, deterministic=True, supports=_rows_fit, **OPTIONS)
def rms_norm_triton(x, weight, *, eps):
    """See `k3lib.ops.rms_norm`."""
    _check_weight(x, weight)
    if not x.numel():
        return torch.empty_like(x)
    from k3lib.backends.triton.pointwise_kernels import launch_rms_norm

    return launch_rms_norm(_flat(x, x.shape[-1]), weight.contiguous(), eps).view(x.shape)


@register(gated_rms_norm, name="triton", priority=10, deterministic=True, supports=_rows_fit, **OPTIONS)
def gated_rms_norm_triton(x, gate, weight, *, eps):
    """See `k3lib.ops.gated_rms_norm`."""
    _check_weight(x, weight)
    if x.shape != gate.shape:
        raise ConfigError(f"gate has shape {tuple(gate.shape)}, x has {tuple(x.shape)}")
    if not x.numel():
        return torch.empty_like(gate)
    from k3lib.backends.triton.pointwise_kernels import launch_gated_rms_norm

    def three(y):
        y = y if y.ndim == 3 else y.reshape(-1, 1, y.shape[-1])
        return y if y.stride(-1) == 1 or y.shape[-1] == 1 else y.contiguous()

    return launch_gated_rms_norm(three(x), three(gate), weight.contiguous(), eps).view(x.shape)


@register(merge_partials, name="triton", priority=10, deterministic=True, supports=_rows_fit, **OPTIONS)
def merge_partials_triton(outs, lses):
    """See `k3lib.ops.merge_partials`."""
    if lses.shape != outs.shape[:3]:
        raise ConfigError(f"merge_partials: lses {tuple(lses.shape)} do not fit outs {tuple(outs.shape)}")
    from k3lib.backends.triton.pointwise_kernels import launch_merge

    parts, tokens, heads, width = outs.shape
    out, lse = launch_merge(
        outs.contiguous().view(parts, tokens * heads, width), lses.contiguous().view(parts, tokens * heads)
    )
    return out.view(tokens, heads, width), lse.view(tokens, heads)


def _check_pages(name, pages):
    if not pages.is_contiguous():
        raise ConfigError(f"{name}: pages have strides {pages.stride()}, expected contiguous pages")


@register(store_rows, name="triton", priority=10, deterministic=True, supports=_pages_fit, **OPTIONS)
def store_rows_triton(values, pages, rows):
    """See `k3lib.ops.store_rows`. A row past the end is dropped."""
    if values.shape[-1] != pages.shape[-1] or rows.shape != values.shape[:1]:
        raise ConfigError(
            f"store_rows: values {tuple(values.shape)} and rows {tuple(rows.shape)} do not fit pages "
            f"{tuple(pages.shape)}"
        )
    _check_pages("store_rows", pages)
    if not values.numel():
        return
    from k3lib.backends.triton.pointwise_kernels import launch_store_rows

    launch_store_rows(_flat(values, values.shape[-1]), pages, rows.contiguous())


@register(gather_rows, name="triton", priority=10, deterministic=True, supports=_pages_fit, **OPTIONS)
def gather_rows_triton(pages, rows):
    """See `k3lib.ops.gather_rows`. A row past the end reads the null row."""
    _check_pages("gather_rows", pages)
    from k3lib.backends.triton.pointwise_kernels import launch_gather_rows

    return launch_gather_rows(pages, rows.contiguous())
