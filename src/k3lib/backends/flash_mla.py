"""Dense decode of FlashMLA (the package sgl-flash-mla) on Hopper: a new token a request over bf16 pages of 64 rows."""

from __future__ import annotations

import torch

from k3lib.errors import ConfigError
from k3lib.ops.mla import MLASpec, mla_decode
from k3lib.ops.registry import register
from k3lib.ops.target import HOPPER, Package

__all__ = ["FLASH_MLA", "mla_decode_flash_mla"]

FLASH_MLA = Package("flash_mla", ("sgl-flash-mla", "flash_mla"), at_least="1.0.0", marker="_C_legacy*.so")


_LEAST_HEADS = 48  # with fewer, its blocks of 64 rows are half empty, and the kernels in Triton are faster


def _supports(spec: MLASpec) -> str | None:
    if spec.heads < _LEAST_HEADS:
        return f"needs at least {_LEAST_HEADS} heads to be the faster one, got {spec.heads}"
    if spec.dtype != torch.bfloat16 or spec.kv_dtype != torch.bfloat16:
        return f"needs bfloat16 queries and pages, got {spec.dtype} and {spec.kv_dtype}"
    if (spec.latent_dim, spec.rope_dim, spec.page_size) != (512, 64, 64):
        return (
            "needs latent_dim 512, rope_dim 64 and pages of 64 rows, got "
            f"{spec.latent_dim}, {spec.rope_dim} and {spec.page_size}"
        )
    if spec.heads > 128:
        return f"needs at most 128 heads, got {spec.heads}"
    if spec.tokens_per_request != "1":
        return f"needs one token a request, got {spec.tokens_per_request}"
    return None


@register(
    mla_decode,
    name="flash_mla",
    platforms={"cuda"},
    archs=HOPPER,
    requires=(FLASH_MLA,),
    proven_on=HOPPER,
    priority=20,
    supports=_supports,
)
def mla_decode_flash_mla(q, pages, *, latent_dim, page_table, key_lens, cu_seqlens, scale, return_lse=False, plan=None):
    """See `k3lib.ops.mla_decode`. Each token is handed over as a request of its own, whose page table is looked up."""
    if q.ndim != 3 or pages.ndim != 3 or q.shape[-1] != pages.shape[2]:
        raise ConfigError(f"mla_decode: q {tuple(q.shape)} does not fit pages {tuple(pages.shape)}")
    if page_table.shape[0] != cu_seqlens.numel() - 1 or key_lens.shape != q.shape[:1]:
        raise ConfigError(
            f"mla_decode: page_table {tuple(page_table.shape)} for {cu_seqlens.numel() - 1} requests, key_lens "
            f"{tuple(key_lens.shape)} for {q.shape[0]} tokens"
        )
    if not pages.is_contiguous():
        raise ConfigError(f"mla_decode: pages must be contiguous, got strides {pages.stride()}")
    tokens, heads = q.shape[:2]
    if not tokens:
        out = q.new_empty(0, heads, latent_dim)
        return (out, q.new_empty(0, heads, dtype=torch.float32)) if return_lse else out
    import flash_mla  # type: ignore[import-not-found]

    token = torch.arange(tokens, dtype=cu_seqlens.dtype, device=q.device)
    table = page_table.index_select(0, torch.searchsorted(cu_seqlens, token, right=True) - 1).to(torch.int32)
    lens = key_lens.to(torch.int32)
    out, lse = flash_mla.flash_mla_with_kvcache(
        q.contiguous()[:, None],
        pages[:, :, None],
        table.contiguous(),
        lens,
        latent_dim,
        flash_mla.get_mla_metadata()[0],
        softmax_scale=scale,
        causal=False,
        use_legacy=True,
    )
    empty = (lens == 0)[:, None]  # it gives +inf there
    out = out[:, 0].masked_fill(empty[..., None], 0)
    return (out, lse[..., 0].masked_fill(empty, -torch.inf)) if return_lse else out
