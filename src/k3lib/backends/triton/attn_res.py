"""Attention residuals in one pass over memory.

Shapes: T tokens, D hidden size.
"""

from __future__ import annotations

import torch

from k3lib.backends.triton import OPTIONS
from k3lib.errors import ConfigError
from k3lib.ops.attn_res import AttnResSpec, attn_res
from k3lib.ops.registry import register

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_HIDDEN = 16384  # a row of a token stays in the registers of one program


def _supports(spec: AttnResSpec) -> str | None:
    if spec.dtype not in _DTYPES:
        return f"needs bfloat16, float16 or float32, got {spec.dtype}"
    if spec.hidden > _MAX_HIDDEN:
        return f"needs a hidden size of at most {_MAX_HIDDEN}, got {spec.hidden}"
    return None


@register(attn_res, name="triton", priority=10, supports=_supports, **OPTIONS)
def attn_res_triton(prefix, delta, bank, *, score_weight, out_norm_weight, num_blocks, write_block, eps, out_eps):
    """See `k3lib.ops.attn_res`: one program a token; many tokens take another kernel than few."""
    return _read(
        prefix, delta, bank, score_weight, out_norm_weight, num_blocks, write_block, eps, out_eps, streams=True
    )


@register(attn_res, name="triton_invariant", priority=5, deterministic=True, supports=_supports, **OPTIONS)
def attn_res_triton_invariant(
    prefix, delta, bank, *, score_weight, out_norm_weight, num_blocks, write_block, eps, out_eps
):
    """The same bits for a token whatever the number of tokens: always the kernel for few."""
    return _read(
        prefix, delta, bank, score_weight, out_norm_weight, num_blocks, write_block, eps, out_eps, streams=False
    )


def _read(prefix, delta, bank, score_weight, out_norm_weight, num_blocks, write_block, eps, out_eps, *, streams):
    if prefix is None and delta is None:
        raise ConfigError("attn_res: prefix and delta are both None; there is nothing to read")
    if not 0 <= num_blocks <= bank.shape[1]:
        raise ConfigError(f"attn_res: num_blocks={num_blocks}, but the bank has {bank.shape[1]} rows")
    if write_block is not None and not 0 <= write_block < bank.shape[1]:
        raise ConfigError(f"attn_res: write_block={write_block}, but the bank has {bank.shape[1]} rows")
    hidden = bank.shape[-1]
    shape = (bank.shape[0], hidden)
    for name, x in (("prefix", prefix), ("delta", delta)):
        if x is not None and (x.shape != shape or x.dtype != bank.dtype):
            raise ConfigError(
                f"attn_res: {name} is {x.dtype} of shape {tuple(x.shape)}, the bank needs {bank.dtype} of {shape}"
            )
    if score_weight.shape != (hidden,):
        raise ConfigError(f"attn_res: score_weight has shape {tuple(score_weight.shape)}, the bank needs {(hidden,)}")
    if out_norm_weight is not None and out_norm_weight.shape != (hidden,):
        raise ConfigError(f"weight has shape {tuple(out_norm_weight.shape)}, x needs {(hidden,)}")
    if bank.numel() and bank.stride(-1) != 1:
        raise ConfigError(f"attn_res: the last axis of bank has stride {bank.stride(-1)}, expected 1")
    prefix, delta = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (prefix, delta))
    from k3lib.backends.triton.attn_res_kernels import launch_attn_res

    return launch_attn_res(
        prefix,
        delta,
        bank,
        score_weight,
        out_norm_weight,
        num_blocks,
        write_block,
        eps,
        out_eps,
        streams=streams,
    )
