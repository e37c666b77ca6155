"""Chunked KDA of flash-linear-attention (the package fla-core)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from k3lib.ops import kda_chunk, register
from k3lib.ops.target import Package

if TYPE_CHECKING:
    from torch import Tensor

    from k3lib.batch import StateSaves, VerifyScratch
    from k3lib.ops import KDAParams, KDASpec

__all__ = ["kda_chunk_fla"]

FLA = Package("fla", ("fla-core", "flash-linear-attention"), at_least="0.6.0", marker="ops/kda/chunk.py")


def _supports(spec: KDASpec) -> str | None:
    if spec.verify != "none":
        return f"needs verify=none, got {spec.verify}"
    if spec.saves != "none":
        return f"needs saves=none, got {spec.saves}: its states are those of chunks"
    if not spec.bounded_gate:
        return "needs a gate with a lower bound, got none"
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"needs bfloat16 or float16, got {spec.dtype}"
    if spec.key_dim != 128 or spec.value_dim != 128:
        return f"needs key_dim and value_dim 128, got {spec.key_dim} and {spec.value_dim}"
    return None


@register(
    kda_chunk,
    name="fla",
    platforms={"cuda", "rocm"},
    experimental=True,  # of its trials on an H200 one misses the tolerance: weak decay, 1.3e-2; tuning takes minutes
    requires=(FLA, Package("triton", ("triton", "pytorch-triton", "pytorch-triton-rocm"), at_least="3.4")),
    priority=5,
    supports=_supports,
)
def kda_chunk_fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    *,
    params: KDAParams,
    state: Tensor | None = None,
    slots: Tensor | None = None,
    cu_seqlens: Tensor,
    scale: float,
    saves: StateSaves | None = None,
    verify: VerifyScratch | None = None,
) -> Tensor:
    """Call `chunk_kda`, which returns states: they are gathered by slot before it and scattered behind it."""
    from fla.ops.kda import chunk_kda

    if not v.shape[0]:
        return torch.zeros_like(v)
    rows = initial = None
    if state is not None and slots is not None:
        rows = slots.clamp(min=0).long()
        initial = state.index_select(0, rows).float().masked_fill((slots <= 0)[:, None, None, None], 0)
    out, final = chunk_kda(
        q[None],
        k[None],
        v[None],
        gate[None],
        beta[None],
        scale=scale,
        initial_state=initial,
        output_final_state=rows is not None,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=True,
        lower_bound=params.lower_bound,
        state_v_first=True,
        cu_seqlens=cu_seqlens.long(),
        A_log=params.A_log,
        dt_bias=params.dt_bias.flatten(),
    )
    result: Tensor = out[0]
    if state is not None and slots is not None and rows is not None:
        state.index_copy_(0, rows, final.to(state.dtype))
        lengths = cu_seqlens.diff()
        absent = torch.repeat_interleave(slots < 0, lengths, output_size=v.shape[0])
        result = result.masked_fill(absent[:, None, None], 0)
    return result
