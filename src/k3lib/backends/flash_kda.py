"""Chunked KDA of FlashKDA (the package flash_kda, built from source): states are gathered by slot and scattered."""

from __future__ import annotations

import torch

from k3lib.errors import ConfigError
from k3lib.ops.kda import KDASpec, kda_chunk
from k3lib.ops.registry import register
from k3lib.ops.target import BLACKWELL, HOPPER, Package

__all__ = ["FLASH_KDA", "kda_chunk_flash_kda"]

FLASH_KDA = Package("flash_kda")


def _supports(spec: KDASpec) -> str | None:
    if spec.verify != "none":
        return f"needs verify=none, got verify={spec.verify}"
    if spec.saves != "none":
        return f"needs saves=none, got saves={spec.saves}: it keeps no states inside a call"
    if not spec.bounded_gate:
        return "needs a gate with a lower bound, got none"
    if spec.dtype != torch.bfloat16:
        return f"needs bfloat16, got {spec.dtype}"
    if spec.state_dtype not in (None, torch.float32, torch.bfloat16):
        return f"needs a float32 or bfloat16 state, got {spec.state_dtype}"
    if spec.key_dim != 128 or spec.value_dim != 128:
        return f"needs key_dim and value_dim 128, got {spec.key_dim} and {spec.value_dim}"
    return None


@register(
    kda_chunk,
    name="flash_kda",
    platforms={"cuda"},
    archs=HOPPER | BLACKWELL,
    requires=(FLASH_KDA,),
    experimental=True,  # written from its interface: it has to be compiled, which was not done on a chip
    priority=4,
    supports=_supports,
)
def kda_chunk_flash_kda(
    q, k, v, gate, beta, *, params, state=None, slots=None, cu_seqlens, scale, saves=None, verify=None
):
    """See `k3lib.ops.kda_chunk`."""
    if not -5.0 <= params.lower_bound <= 0:
        raise ConfigError(f"kda: flash_kda needs a bound of the gate in [-5, 0], got {params.lower_bound}")
    if not v.shape[0]:
        return torch.empty_like(v)
    import flash_kda  # type: ignore[import-not-found]

    out = torch.empty_like(v, memory_format=torch.contiguous_format)[None]
    rows = initial = final = None
    if state is not None and slots is not None:
        rows = slots.clamp(min=0).long()
        initial = state.index_select(0, rows).masked_fill((slots <= 0)[:, None, None, None], 0)
        final = torch.empty_like(initial)
    flash_kda.fwd(
        *(x.contiguous()[None] for x in (q, k, v, gate, beta)),
        scale,
        out,
        params.A_log.contiguous(),
        params.dt_bias.view(gate.shape[-2:]).contiguous(),
        params.lower_bound,
        initial_state=initial,
        final_state=final,
        cu_seqlens=cu_seqlens.long(),
    )
    result = out[0]
    if state is not None and slots is not None and rows is not None and final is not None:
        state.index_copy_(0, rows, final)
        absent = torch.repeat_interleave(slots < 0, cu_seqlens.diff(), output_size=v.shape[0])
        result = result.masked_fill(absent[:, None, None], 0)
    return result
