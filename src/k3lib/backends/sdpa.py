"""cuDNN's attention through torch: large prefills of one request. All else goes to the kernel in Triton."""

from __future__ import annotations

import torch

from k3lib.backends.triton import OPTIONS
from k3lib.errors import ConfigError
from k3lib.ops.mla import AttentionSpec, attention_varlen
from k3lib.ops.registry import register
from k3lib.ops.target import HOPPER

_DTYPES = (torch.bfloat16, torch.float16)
# cuDNN plans for about 70 ms when it meets lengths for the first time, and is a fifth faster then: it gets large calls
# of lengths that come again
_GRID = 1024
_LEAST = 4096 * 4096  # queries times keys


def _supports_attention(spec: AttentionSpec) -> str | None:
    if spec.dtype not in _DTYPES:
        return f"needs bfloat16 or float16, got {spec.dtype}"
    if spec.key_dim % 8 or spec.value_dim % 8 or spec.key_dim > 192 or spec.value_dim > 128:
        return f"needs multiples of 8 up to key_dim 192 and value_dim 128, got {spec.key_dim} and {spec.value_dim}"
    return None


@register(
    attention_varlen, name="cudnn", priority=20, archs=HOPPER, supports=_supports_attention,
    **{**OPTIONS, "platforms": {"cuda"}},
)  # fmt: skip
def attention_varlen_cudnn(q, k, v, *, cu_seqlens_q, cu_seqlens_k, causal, scale, return_lse=False):
    """See `k3lib.ops.attention_varlen`. Lengths of one request are shapes; those of several are not read."""
    if q.shape[1:] != k.shape[1:] or k.shape[:2] != v.shape[:2]:
        raise ConfigError(
            f"attention_varlen: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit together"
        )
    # its causal mask starts at the first key, ours ends at the last
    tokens, keys = q.shape[0], k.shape[0]
    is_single = cu_seqlens_q.numel() == cu_seqlens_k.numel() == 2 and (not causal or tokens == keys)
    if not is_single or tokens % _GRID or keys % _GRID or tokens * keys < _LEAST:
        from k3lib.backends.triton.mla import attention_varlen_triton

        return attention_varlen_triton(
            q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, causal=causal, scale=scale,
            return_lse=return_lse,
        )  # fmt: skip
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(x.unsqueeze(0).transpose(1, 2) for x in (q, k, v)), None, return_lse, 0.0, causal, False, scale=scale
    )[:2]
    out = out.squeeze(0).transpose(0, 1)
    return (out, lse.reshape(q.shape[1], -1).t()) if return_lse else out
