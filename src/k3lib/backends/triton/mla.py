"""Latent attention: absorbed decode over pages, and attention over variable lengths for prefill."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from k3lib.backends.triton import OPTIONS
from k3lib.errors import ConfigError
from k3lib.ops.mla import AttentionSpec, MLASpec, attention_varlen, mla_decode
from k3lib.ops.registry import register

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_FP8 = torch.float8_e4m3fn


class _Decode(NamedTuple):
    """How to launch the decode kernel: see `_decode_kernel`; `programs` a multiprocessor are aimed at."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    programs: int


# by the rows (tokens times heads) of a request; measured on an H200 with 16-bit pages of width 576, 2026-11-30
_DECODE = {
    16: _Decode(16, 32, 4, 3, 2),
    32: _Decode(32, 32, 4, 3, 2),
    64: _Decode(64, 64, 8, 2, 1),
}
_DECODE_FEW = _Decode(16, 64, 4, 2, 2)  # 16 rows, and few tokens or fp8 pages
_DECODE_FP32 = _Decode(16, 16, 4, 1, 2)
_MERGE_WARPS = 4
_FIXED_KEYS = 2048  # of a split whose place does not depend on the batch


def _supports_decode(spec: MLASpec) -> str | None:
    if spec.dtype not in _DTYPES:
        return f"needs bfloat16, float16 or float32, got {spec.dtype}"
    if spec.kv_dtype not in (spec.dtype, _FP8):
        return f"needs pages of {spec.dtype} or {_FP8}, got {spec.kv_dtype}"
    if spec.latent_dim > 512 or spec.rope_dim > 128:
        return f"needs latent_dim <= 512 and rope_dim <= 128, got {spec.latent_dim} and {spec.rope_dim}"
    return None


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # of the interpreter
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _has_chained_launches(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


def _merge_blocks(num_splits: int) -> tuple[int, int]:
    """How many splits and columns a program of the merge takes together: a few sizes, about 4096 values."""
    for splits in (4, 16, 64):
        if num_splits <= splits:
            return splits, 4096 // max(8, splits)
    return 128, 32


@functools.lru_cache(maxsize=4096)
def _num_splits(tiles: int, blocks: int, slots: int) -> int:
    """Into how many parts to cut the keys, from static facts alone: `blocks` of keys at most, `slots` at a time.

    Fewest rounds of programs times the work of each. To start costs about two blocks; a split costs its share of the
    merge, a small part of that of a block.
    """
    best, least = 1, float("inf")
    for splits in range(1, max(1, min(blocks, slots)) + 1):
        rounds = -(-tiles * splits // slots)
        cost = rounds * (-(-blocks // splits) + 2) + 0.005 * splits
        if cost < least:
            best, least = splits, cost
    return best


def _pow2(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def _decode_config(dtype: torch.dtype, kv_dtype: torch.dtype, rows: int, tokens: int, multiprocessors: int) -> _Decode:
    """Choose by static facts: rows of a request, and tokens of the step."""
    kind = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if dtype == torch.float32:
        return _DECODE_FP32
    if kind == 16 and (tokens <= multiprocessors // 8 or kv_dtype == _FP8):
        return _DECODE_FEW
    return _DECODE[kind]


def _check_decode(q, pages, latent_dim, page_table, key_lens, cu_seqlens):
    if pages.ndim != 3 or q.ndim != 3 or q.shape[-1] != pages.shape[2]:
        raise ConfigError(f"mla_decode: q {tuple(q.shape)} does not fit pages {tuple(pages.shape)}")
    if not 0 < latent_dim <= q.shape[-1]:
        raise ConfigError(f"mla_decode: latent_dim={latent_dim} does not lie in 1..{q.shape[-1]}")
    requests = cu_seqlens.numel() - 1
    if page_table.ndim != 2 or page_table.shape[0] != requests or key_lens.shape != q.shape[:1]:
        raise ConfigError(
            f"mla_decode: page_table {tuple(page_table.shape)} for {requests} requests, key_lens "
            f"{tuple(key_lens.shape)} for {q.shape[0]} tokens"
        )
    if not pages.is_contiguous():
        raise ConfigError(f"mla_decode: pages must be contiguous, got strides {pages.stride()}")
    if page_table.shape[1] > 1 and page_table.stride(1) != 1:
        raise ConfigError(f"mla_decode: rows of page_table must be contiguous, got strides {page_table.stride()}")
    for name, index in (("page_table", page_table), ("key_lens", key_lens), ("cu_seqlens", cu_seqlens)):
        if index.dtype not in (torch.int32, torch.int64):
            raise ConfigError(f"mla_decode: {name} must be int32, got {index.dtype}")


@register(mla_decode, name="triton", priority=10, supports=_supports_decode, **OPTIONS)
def mla_decode_triton(q, pages, *, latent_dim, page_table, key_lens, cu_seqlens, scale, return_lse=False, plan=None):
    """See `k3lib.ops.mla_decode`."""
    _check_decode(q, pages, latent_dim, page_table, key_lens, cu_seqlens)
    out, lse = _decode(q, pages, latent_dim, page_table, key_lens, cu_seqlens, scale)
    return (out, lse) if return_lse else out


@register(mla_decode, name="triton_fixed", priority=5, deterministic=True, supports=_supports_decode, **OPTIONS)
def mla_decode_triton_fixed(
    q, pages, *, latent_dim, page_table, key_lens, cu_seqlens, scale, return_lse=False, plan=None
):
    """See `k3lib.ops.mla_decode`. Keys are cut at fixed places, tokens stay apart: company changes nothing."""
    _check_decode(q, pages, latent_dim, page_table, key_lens, cu_seqlens)
    out, lse = _decode(q, pages, latent_dim, page_table, key_lens, cu_seqlens, scale, is_fixed=True)
    return (out, lse) if return_lse else out


def _decode(
    q, pages, latent_dim, page_table, key_lens, cu_seqlens, scale, config=None, num_splits=None, is_fixed=False
):
    from k3lib.backends.triton import mla_kernels

    tokens, heads, width = q.shape
    requests, page_size = page_table.shape[0], pages.shape[1]
    out = q.new_empty(tokens, heads, latent_dim)
    lse = q.new_empty(tokens, heads, dtype=torch.float32)
    if not tokens or not heads:
        return out, lse
    q, key_lens, cu_seqlens = q.contiguous(), key_lens.contiguous(), cu_seqlens.contiguous()
    rows = tokens * heads
    if config is None:
        each = heads if is_fixed else -(-tokens // requests) * heads
        config = _decode_config(q.dtype, pages.dtype, each, 1 if is_fixed else tokens, _multiprocessors(q.device))
    packed = tokens > requests and not is_fixed
    tiles = tokens * -(-heads // config.block_m)
    if packed:
        tiles = min(tiles, (rows + requests * (config.block_m - 1)) // config.block_m)
    blocks = -(-page_table.shape[1] * page_size // config.block_n)
    per_split = _FIXED_KEYS // config.block_n if is_fixed else 0  # 0: even shares
    if is_fixed:
        num_splits = max(1, -(-blocks // per_split))
    elif num_splits is None:
        num_splits = _num_splits(tiles, blocks, config.programs * _multiprocessors(q.device))
    parts, part_lse = out, lse
    if num_splits > 1:
        parts = q.new_empty(num_splits, rows, latent_dim, dtype=torch.float32)
        part_lse = q.new_empty(num_splits, rows, dtype=torch.float32)
    rope_dim = width - latent_dim
    # the merge is launched before the splits end, and waits for them: only from sm90 on
    chained = num_splits > 1 and _has_chained_launches(q.device)
    mla_kernels._decode_kernel[tiles, num_splits](
        q, pages, page_table, key_lens, cu_seqlens, parts, part_lse, scale,
        rows, requests, page_table.shape[1], page_table.stride(0), pages.shape[0], num_splits, per_split,
        H=heads, L=latent_dim, R=rope_dim, PAGE=page_size,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_L=_pow2(latent_dim), BLOCK_R=_pow2(rope_dim),
        PACKED=packed, PARTIAL=num_splits > 1, CHAINED=chained,
        HALVES=q.dtype == torch.bfloat16 and pages.dtype == _FP8 and config.block_m == 16,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    if num_splits > 1:
        block_s, block_d = (32, 64) if is_fixed else _merge_blocks(num_splits)
        block_d = min(_pow2(latent_dim), block_d)
        more = {"launch_pdl": True} if chained else {}
        mla_kernels._merge_kernel[rows, -(-latent_dim // block_d)](
            parts, part_lse, out, lse, rows, num_splits,
            L=latent_dim, BLOCK_D=block_d, BLOCK_S=block_s, CHAINED=chained, num_warps=_MERGE_WARPS, **more,
        )  # fmt: skip
    return out, lse


class _Prefill(NamedTuple):
    """How to launch the kernel of variable lengths."""

    block_m: int
    block_n: int
    warps: int
    stages: int


_PREFILL = _Prefill(128, 64, 8, 3)
_PREFILL_FEW = _Prefill(64, 64, 4, 3)  # tiles that would leave multiprocessors idle
_PREFILL_FP32 = _Prefill(32, 16, 4, 1)


def _supports_attention(spec: AttentionSpec) -> str | None:
    if spec.dtype not in _DTYPES:
        return f"needs bfloat16, float16 or float32, got {spec.dtype}"
    if spec.key_dim > 256 or spec.value_dim > 256:
        return f"needs key_dim and value_dim <= 256, got {spec.key_dim} and {spec.value_dim}"
    return None


@register(attention_varlen, name="triton", priority=10, deterministic=True, supports=_supports_attention, **OPTIONS)
def attention_varlen_triton(q, k, v, *, cu_seqlens_q, cu_seqlens_k, causal, scale, return_lse=False):
    """See `k3lib.ops.attention_varlen`."""
    if q.shape[1:] != k.shape[1:] or k.shape[:2] != v.shape[:2]:
        raise ConfigError(
            f"attention_varlen: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit together"
        )
    if cu_seqlens_q.shape != cu_seqlens_k.shape or cu_seqlens_q.ndim != 1 or not cu_seqlens_q.numel():
        raise ConfigError(
            f"attention_varlen: {cu_seqlens_q.numel() - 1} requests of queries, {cu_seqlens_k.numel() - 1} of keys"
        )
    out, lse = _attend(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, scale)
    return (out, lse) if return_lse else out


def _attend(q, k, v, cu_q, cu_k, causal, scale, config=None):
    from k3lib.backends.triton import mla_kernels

    tokens, heads, key_dim = q.shape
    value_dim, requests = v.shape[2], cu_q.numel() - 1
    out = q.new_empty(tokens, heads, value_dim)
    lse = q.new_empty(tokens, heads, dtype=torch.float32)
    if not out.numel():
        return out, lse
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    if config is None:
        config = _PREFILL_FP32 if q.dtype == torch.float32 else _PREFILL
        if config is _PREFILL and _tiles(tokens, requests, config.block_m) * heads < _multiprocessors(q.device):
            config = _PREFILL_FEW
    block_a = max(16, 1 << (key_dim.bit_length() - 1))  # the largest power of two, then the rest
    block_b = _pow2(max(1, key_dim - block_a))
    mla_kernels._attention_kernel[_tiles(tokens, requests, config.block_m), heads](
        q, k, v, cu_q.contiguous(), cu_k.contiguous(), out, lse, scale, requests,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        H=heads, DK=key_dim, DV=value_dim, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        BLOCK_A=block_a, BLOCK_B=block_b, BLOCK_V=_pow2(value_dim),
        CAUSAL=causal, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out, lse


def _tiles(rows: int, requests: int, block: int) -> int:
    """Most tiles of `block` rows that so many requests can have, whatever their lengths."""
    return min(rows, (rows + requests * (block - 1)) // block)
