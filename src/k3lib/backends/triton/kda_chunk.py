"""Kimi Delta Attention prefill: chunks on tensor cores, long requests in segments.

Shapes: T packed tokens, B requests, H heads, K key dim, V value dim, N state slots, C tokens a chunk.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from k3lib.backends.triton import OPTIONS
from k3lib.errors import ConfigError
from k3lib.ops.kda import KDASpec, kda_chunk
from k3lib.ops.registry import register

if TYPE_CHECKING:
    from torch import Tensor

    from k3lib.batch import StateSaves
    from k3lib.ops.kda import KDAParams

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_STATE_DTYPES = (None, torch.float32, torch.bfloat16)
_MAX_EXPONENT = 80.0  # of a decay over half a chunk, with room below the fp32 limit of 88


class _Config(NamedTuple):
    """Launch configuration of one class of dtypes.

    Attributes:
        chunk: tokens a chunk.
        chunk_columns: key columns that the chunk kernel works on at a time.
        chunk_warps: its warps. Two cover the C rows of its tiles; more would repeat them.
        chunk_registers: registers a thread of it may have; None leaves that to the compiler.
        chunk_stages: its pipeline stages.
        summary, compose, output: values of the state a program holds, warps, stages.
        alone: stages of output where segments leave each multiprocessor one program.
        precision: of matrix products of fp32 operands.
    """

    chunk: int
    chunk_columns: int
    chunk_warps: int
    chunk_registers: int | None
    chunk_stages: int
    summary: tuple[int, int, int]
    compose: tuple[int, int, int]
    output: tuple[int, int, int]
    alone: int
    precision: str


# measured on an H200 (triton 3.6, 2026-11-30) for bfloat16
_CONFIGS = {
    "narrow": _Config(32, 32, 2, 168, 3, (64, 4, 4), (32, 4, 3), (64, 4, 3), 4, "tf32"),
    "wide": _Config(16, 32, 2, None, 1, (32, 4, 1), (16, 4, 1), (32, 4, 1), 1, "tf32x3"),
}
_PROGRAMS = 132  # programs of the output kernel, one a multiprocessor of an H200
_SHARED_BYTES = 208 << 10  # of a multiprocessor, less what does not grow with the stages
_MIN_SEGMENTS = 4  # fewer do not pay for the transitions
_MIN_CHUNKS = 8  # of a segment
_LONG_SEGMENT = 64  # chunks of a segment from which twice as many programs, in two waves, are faster
_MAX_SPLIT_DIM = 128  # the transition of a segment is a tile of key_dim x key_dim in fp32


def _num_segments(num_tokens: int, num_requests: int, programs: int, chunk: int) -> int:
    """Segments a request, from shapes alone: as if all requests were of the same length."""
    programs *= num_requests
    chunks = num_tokens // num_requests // chunk
    twice = 2 * _PROGRAMS // programs
    room = twice if chunks >= twice * _LONG_SEGMENT else _PROGRAMS // programs
    wanted = min(room, chunks // _MIN_CHUNKS)
    return wanted if wanted >= _MIN_SEGMENTS else 1


def _fit_stages(stages: int, stage_bytes: int, other_bytes: int = 0) -> int:
    """Stages of a pipeline that shared memory holds."""
    return max(1, min(stages, (_SHARED_BYTES - other_bytes) // stage_bytes))


def _pieces(saves: StateSaves, num_requests: int, device: torch.device) -> Tensor:
    """`[P, 4]` int32: request, first token, end (-1 for the last token) and save (-1 for none) of each piece."""
    cuts: list[list[tuple[int, int]]] = [[] for _ in range(num_requests)]
    for index, (request, offset) in enumerate(zip(saves.requests, saves.offsets, strict=True)):
        if not 0 <= request < num_requests:
            raise ConfigError(f"saves: request {request} is not among {num_requests} requests")
        if offset < 1:
            raise ConfigError(f"saves: offset {offset} of request {request} must be at least 1")
        cuts[request].append((offset, index))
    rows = []
    for request, wanted in enumerate(cuts):
        ends = [(0, -1), *sorted(wanted), (-1, -1)]
        rows += [(request, begin, end, save) for (begin, _), (end, save) in pairwise(ends)]
    return torch.tensor(rows, dtype=torch.int32).to(device, non_blocking=True)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    params: KDAParams,
    state: Tensor | None,
    slots: Tensor | None,
    cu_seqlens: Tensor,
    saves: StateSaves | None,
) -> None:
    num_tokens, heads, value_dim = v.shape
    key_dim = k.shape[-1]
    wanted = {"q": (num_tokens, heads, key_dim), "k": (num_tokens, heads, key_dim), "beta": (num_tokens, heads)}
    wanted |= {"gate": (num_tokens, heads, key_dim), "A_log": (heads,)}
    given = {"q": q, "k": k, "beta": beta, "gate": gate, "A_log": params.A_log}
    for name, shape in wanted.items():
        if given[name].shape != shape:
            raise ConfigError(f"kda: {name} has shape {tuple(given[name].shape)}, expected {shape}")
    if params.dt_bias.numel() != heads * key_dim:
        raise ConfigError(f"kda: dt_bias has {params.dt_bias.numel()} values, expected {heads} x {key_dim}")
    for name, x in {"q": q, "k": k, "v": v, "gate": gate}.items():
        if x.stride(-1) != 1 and x.numel():
            raise ConfigError(f"kda: {name} needs stride 1 in its last axis, got {x.stride(-1)}")
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 1 or cu_seqlens.is_floating_point():
        raise ConfigError(
            f"cu_seqlens must be a 1-D integer tensor of B + 1 offsets, got shape {tuple(cu_seqlens.shape)} of "
            f"{cu_seqlens.dtype}"
        )
    if (slots is None) != (state is None):
        raise ConfigError("state and slots must be given together, or both left out")
    if state is None or slots is None:
        if saves is not None and saves.offsets:
            raise ConfigError("saves need a state pool: state and slots are None")
        return
    if state.shape[1:] != (heads, value_dim, key_dim) or not state.is_contiguous():
        raise ConfigError(
            f"kda: state has rows {tuple(state.shape[1:])} with strides {state.stride()}, expected contiguous "
            f"[H, V, K] = {(heads, value_dim, key_dim)}"
        )
    if slots.shape != (cu_seqlens.numel() - 1,):
        raise ConfigError(f"{slots.numel()} slots for {cu_seqlens.numel() - 1} requests")


def _run(
    config: _Config,
    split: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    params: KDAParams,
    state: Tensor | None,
    slots: Tensor | None,
    cu_seqlens: Tensor,
    scale: float,
    saves: StateSaves | None,
) -> Tensor:
    from k3lib.backends.triton import kda_chunk_kernels as kernels
    from k3lib.backends.triton.launch import launch_options

    num_tokens, heads, value_dim = v.shape
    key_dim, num_requests, device = k.shape[-1], cu_seqlens.numel() - 1, v.device
    saved = saves is not None and len(saves.offsets) > 0
    pieces = _pieces(saves, num_requests, device) if saved and saves is not None else None
    out = torch.empty(num_tokens, heads, value_dim, dtype=v.dtype, device=device)
    if not num_tokens or not num_requests:
        return out

    size, precision = config.chunk, config.precision
    num_pieces = num_requests if pieces is None else len(pieces)
    num_chunks = num_tokens // size + num_pieces
    num_slots = 0 if state is None else state.shape[0]
    shape = {"C": size, "K": key_dim, "V": value_dim}

    def columns(wanted: int) -> int:
        return min(wanted, key_dim, value_dim)

    table = torch.empty(num_chunks, 4, dtype=torch.int32, device=device)
    begins = torch.empty(num_requests + 1, dtype=torch.int32, device=device)
    signs = torch.empty(size + 16, size, dtype=torch.float16, device=device)
    kernels._plan_kernel[(num_pieces + 1,)](
        cu_seqlens, pieces, table, begins, signs, num_requests, num_pieces, SAVES=saved, C=size, N=128,
        **launch_options(device, 1),
    )  # fmt: skip
    dtype = torch.bfloat16 if v.dtype == torch.bfloat16 else torch.float32
    qk_in = torch.empty(num_chunks, heads, 2, size, key_dim, dtype=dtype, device=device)
    k_out = torch.empty(num_chunks, heads, size, key_dim, dtype=dtype, device=device)
    pairs = torch.empty(num_chunks, heads, 2, size, size, dtype=dtype, device=device)
    decay = torch.empty(num_chunks, heads, 2, key_dim, dtype=torch.float32, device=device)
    inverse_bound = 1 / (-params.lower_bound * math.log2(math.e)) if params.lower_bound else 1e30
    kernels._chunk_kernel[(num_chunks * heads,)](
        q, k, gate, beta, params.A_log.contiguous(), params.dt_bias.contiguous(), table, begins, signs,
        qk_in, k_out, pairs, decay, pairs.view(torch.float32),  # which holds the diagonal blocks of the systems first
        num_requests, heads,
        *q.stride()[:2], *k.stride()[:2], *gate.stride()[:2], *beta.stride(),
        inverse_bound, scale,
        C=size, K=key_dim, S=min(config.chunk_columns, key_dim), LEVELS=(size // 16).bit_length() - 1,
        PRECISION=precision,
        num_stages=config.chunk_stages, **launch_options(device, config.chunk_warps, config.chunk_registers),
    )  # fmt: skip

    width, warps, stages = config.output
    width = columns(width)
    programs = heads * (value_dim // width)
    segments = 1
    if split and key_dim <= _MAX_SPLIT_DIM:
        segments = _num_segments(num_tokens, num_requests, programs, size)
    is_alone = segments > 1 and segments * num_requests * programs <= _PROGRAMS
    # bytes of a chunk that both kernels below read, then what one of them reads
    per_chunk = (2 * key_dim + size + width) * size * dtype.itemsize + 8 * key_dim
    bytes_o = width * key_dim * 4 if saved else 0  # through which a state is stored between chunks
    stages = config.alone if is_alone else stages
    stages = _fit_stages(stages, per_chunk + (key_dim + size) * size * dtype.itemsize, bytes_o)
    carry = None
    if segments > 1:
        carry = torch.empty(num_requests, segments, heads, value_dim, key_dim, dtype=torch.float32, device=device)
        transition = torch.empty(num_requests, segments, heads, key_dim, key_dim, dtype=torch.float32, device=device)
        width_s, warps_s, stages_s = config.summary
        width_s = columns(width_s)
        stages_s = _fit_stages(stages_s, per_chunk)
        grid = ((segments - 1) * num_requests * heads * ((key_dim + value_dim) // width_s),)
        kernels._summary_kernel[grid](
            v, qk_in, k_out, pairs, decay, table, begins, state, slots, carry, transition,
            *v.stride()[:2], num_requests, num_slots, heads, segments,
            **shape, N=width_s, STATE=state is not None, SAVES=saved, PRECISION=precision, STAGES=stages_s,
            **launch_options(device, warps_s),
        )  # fmt: skip
        if segments > 2:
            width_c, warps_c, stages_c = config.compose
            width_c = columns(width_c)
            stages_c = _fit_stages(stages_c, key_dim * key_dim * 4)
            kernels._compose_kernel[(num_requests * heads * (value_dim // width_c),)](
                carry, transition, begins, num_requests, heads, segments,
                K=key_dim, V=value_dim, N=width_c, PRECISION=precision, num_stages=stages_c,
                **launch_options(device, warps_c),
            )  # fmt: skip
    kernels._output_kernel[(segments * num_requests * heads * (value_dim // width),)](
        v, qk_in, k_out, pairs, decay, table, begins, out, state, slots,
        None if saves is None else saves.slots, carry,
        *v.stride()[:2], num_requests, num_slots, heads, segments,
        **shape, N=width, STATE=state is not None, SAVES=saved, SPLIT=segments > 1, PRECISION=precision,
        STAGES=stages, **launch_options(device, warps),
    )  # fmt: skip
    return out


def _supports(spec: KDASpec) -> str | None:
    if spec.dtype not in _DTYPES:
        return f"needs bfloat16, float16 or float32, got {spec.dtype}"
    if spec.state_dtype not in _STATE_DTYPES:
        return f"needs a float32 or bfloat16 state, got {spec.state_dtype}"
    for name, size in (("key_dim", spec.key_dim), ("value_dim", spec.value_dim)):
        if size not in (16, 32, 64, 128, 256):
            return f"needs {name} to be a power of two in 16..256, got {size}"
    if not spec.bounded_gate:
        return "needs a gate with a lower bound, got the softplus gate"
    if spec.verify != "none":
        return f"needs verify=none, got verify={spec.verify}"
    return None


def _config(v: Tensor, lower_bound: float | None) -> _Config | None:
    """The launch configuration, or None where decays do not fit the factors."""
    config = _CONFIGS["narrow" if v.dtype == torch.bfloat16 else "wide"]
    if lower_bound is None or lower_bound > 0:
        return None
    if -lower_bound * config.chunk / 2 > _MAX_EXPONENT:
        config = config._replace(chunk=16)
    return config if -lower_bound * config.chunk / 2 <= _MAX_EXPONENT else None


@register(kda_chunk, name="triton", priority=10, supports=_supports, **OPTIONS)
def kda_chunk_triton(
    q, k, v, gate, beta, *, params, state=None, slots=None, cu_seqlens, scale, saves=None, verify=None
):
    """See `k3lib.ops.kda_chunk`. Long requests are split into segments as the whole batch leaves room."""
    _check(q, k, v, gate, beta, params, state, slots, cu_seqlens, saves)
    config = _config(v, params.lower_bound)
    if config is None:  # a gate bound that no model has
        return kda_chunk.reference(
            q, k, v, gate, beta, params=params, state=state, slots=slots, cu_seqlens=cu_seqlens, scale=scale,
            saves=saves,
        )  # fmt: skip
    return _run(config, True, q, k, v, gate, beta, params, state, slots, cu_seqlens, scale, saves)


@register(kda_chunk, name="triton_unsplit", priority=5, deterministic=True, supports=_supports, **OPTIONS)
def kda_chunk_triton_unsplit(
    q, k, v, gate, beta, *, params, state=None, slots=None, cu_seqlens, scale, saves=None, verify=None
):
    """The same without segments: the bits of a request do not depend on the rest of the batch."""
    _check(q, k, v, gate, beta, params, state, slots, cu_seqlens, saves)
    config = _config(v, params.lower_bound)
    if config is None:
        return kda_chunk.reference(
            q, k, v, gate, beta, params=params, state=state, slots=slots, cu_seqlens=cu_seqlens, scale=scale,
            saves=saves,
        )  # fmt: skip
    return _run(config, False, q, k, v, gate, beta, params, state, slots, cu_seqlens, scale, saves)
