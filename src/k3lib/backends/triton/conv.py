"""The short causal convolution in front of KDA.

Shapes: T packed tokens, B requests, C channels (q | k | v), W width, N pool rows.
"""

from __future__ import annotations

import torch

from k3lib.backends.triton import OPTIONS
from k3lib.backends.triton.kda_decode import check_scratch, pack_saves
from k3lib.errors import ConfigError
from k3lib.ops.conv import ConvSpec, short_conv
from k3lib.ops.packing import tokens_per_request
from k3lib.ops.registry import register

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _supports(spec: ConvSpec) -> str | None:
    if spec.dtype not in _DTYPES:
        return f"needs bfloat16, float16 or float32, got {spec.dtype}"
    if spec.verify != "none" and spec.saves != "none":
        return f"needs saves=none in a verify step, got saves={spec.saves}"
    return None


@register(short_conv, name="triton", priority=10, deterministic=True, supports=_supports, **OPTIONS)
def short_conv_triton(x, weight, *, conv_state=None, slots=None, cu_seqlens, saves=None, verify=None):
    """See `k3lib.ops.short_conv`: blocks of tokens, or one program a request of one token."""
    num_tokens, (channels, width) = x.shape[0], weight.shape
    if x.shape != (num_tokens, channels):
        raise ConfigError(f"short_conv: x has shape {tuple(x.shape)}, weight needs [T, {channels}]")
    if (slots is None) != (conv_state is None):
        raise ConfigError("state and slots must be given together, or both left out")
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 1 or cu_seqlens.is_floating_point():
        raise ConfigError(
            f"cu_seqlens must be a 1-D integer tensor of B + 1 offsets, got shape {tuple(cu_seqlens.shape)} of "
            f"{cu_seqlens.dtype}"
        )
    if conv_state is not None:
        if conv_state.shape[1:] != (width - 1, channels):
            raise ConfigError(
                f"short_conv: conv_state has rows {tuple(conv_state.shape[1:])}, weight needs {(width - 1, channels)}"
            )
        if not conv_state.is_contiguous():
            raise ConfigError(f"short_conv: conv_state has strides {conv_state.stride()}, expected a contiguous pool")
        if slots.numel() != cu_seqlens.numel() - 1:
            raise ConfigError(f"{slots.numel()} slots for {cu_seqlens.numel() - 1} requests")
    if verify is not None:
        shapes = {"inputs": ((channels,), x.dtype)}
        check_scratch("short_conv", verify, conv_state, num_tokens, cu_seqlens.numel() - 1, shapes)
    table = pack_saves(saves, conv_state, cu_seqlens.numel() - 1, x.device)
    from k3lib.backends.triton.conv_kernels import launch_short_conv

    return launch_short_conv(
        x if x.stride(-1) == 1 else x.contiguous(),
        weight.contiguous(),
        conv_state,
        slots,
        cu_seqlens,
        table,
        None if saves is None else saves.slots,
        tokens_per_request(num_tokens, cu_seqlens) == "1",
        kept=None if verify is None else verify.inputs,
    )
