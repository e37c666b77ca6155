"""Few-token KDA: the recurrence, the mixer that joins convolution, recurrence and gated norm, and the replay of steps.

Shapes: T packed tokens, B requests, H heads, K key dim, V value dim, N pool rows, W width of the convolution; R rows
of a verify step's scratch, D tokens of each, L layers.
"""

from __future__ import annotations

import torch

from k3lib.backends.triton import OPTIONS
from k3lib.errors import ConfigError
from k3lib.ops.kda import KDASpec, ReplaySpec, kda_mixer, kda_recurrent, kda_replay
from k3lib.ops.registry import register

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_DIM = 256  # the state of a head stays in the registers of one program


def _supports(spec: KDASpec | ReplaySpec) -> str | None:
    for dtype in (spec.dtype, spec.state_dtype):
        if dtype is not None and dtype not in _DTYPES:
            return f"needs bfloat16, float16 or float32, got {dtype}"
    if max(spec.key_dim, spec.value_dim) > _MAX_DIM:
        return f"needs key_dim and value_dim of at most {_MAX_DIM}, got {spec.key_dim} and {spec.value_dim}"
    return None


def _supports_recurrent(spec: KDASpec) -> str | None:
    if spec.verify != "none" and spec.saves != "none":
        return f"needs saves=none in a verify step, got saves={spec.saves}"
    return _supports(spec)


def _supports_mixer(spec: KDASpec) -> str | None:
    if spec.verify == "none" and spec.tokens_per_request != "1":
        return f"needs one token a request, got {spec.tokens_per_request}"
    if spec.saves != "none":
        return f"needs saves=none, got saves={spec.saves}"
    return _supports(spec)


def _require_shape(name, x, want):
    if x.shape != want:
        raise ConfigError(f"kda: {name} has shape {tuple(x.shape)}, expected {tuple(want)}")


def _check(params, state, slots, cu_seqlens, heads, key_dim, value_dim):
    """What does not need the values of device tensors."""
    _require_shape("A_log", params.A_log, (heads,))
    if params.dt_bias.numel() != heads * key_dim:
        raise ConfigError(f"kda: dt_bias has {params.dt_bias.numel()} values, expected {heads} x {key_dim}")
    if (slots is None) != (state is None):
        raise ConfigError("state and slots must be given together, or both left out")
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 1 or cu_seqlens.is_floating_point():
        raise ConfigError(
            f"cu_seqlens must be a 1-D integer tensor of B + 1 offsets, got shape {tuple(cu_seqlens.shape)} of "
            f"{cu_seqlens.dtype}"
        )
    if state is None:
        return
    if state.shape[1:] != (heads, value_dim, key_dim):
        raise ConfigError(
            f"kda: state has rows {tuple(state.shape[1:])}, expected [H, V, K] = {(heads, value_dim, key_dim)}"
        )
    if not state.is_contiguous():
        raise ConfigError(f"kda: state has strides {state.stride()}, expected a contiguous pool")
    if slots.numel() != cu_seqlens.numel() - 1:
        raise ConfigError(f"{slots.numel()} slots for {cu_seqlens.numel() - 1} requests")


def check_scratch(op, verify, state, num_tokens, num_requests, shapes):
    """What of a verify step's scratch does not need the values of device tensors; `shapes`: of a token, by field.

    More tokens of a request than the scratch has room for are not kept, and a kernel may not compute them.
    """
    if state is None:
        raise ConfigError(f"{op}: a verify step needs state and slots")
    rows, width = verify.inputs.shape[:2]
    if num_requests > rows or num_tokens > num_requests * width:
        raise ConfigError(
            f"{op}: the verify scratch has {rows} rows of {width} tokens, the step {num_requests} requests with "
            f"{num_tokens} tokens"
        )
    for name, (shape, dtype) in shapes.items():
        x = getattr(verify, name)
        if x is None:
            raise ConfigError(f"{op}: the verify scratch has neither states nor all of k, v, log_decay and beta")
        want = (rows, width, *shape)
        if x.shape != want or x.dtype != dtype:
            raise ConfigError(
                f"{op}: verify.{name} has shape {tuple(x.shape)} of {x.dtype}, expected {want} of {dtype}"
            )
        if not x.is_contiguous():
            raise ConfigError(f"{op}: verify.{name} has strides {x.stride()}, expected a contiguous tensor")


def _scratch_shapes(verify, dtype, state, heads, key_dim, value_dim):
    if verify.states is not None:
        return {"states": ((heads, value_dim, key_dim), verify.states.dtype if state is None else state.dtype)}
    return {
        "k": ((heads, key_dim), dtype), "v": ((heads, value_dim), dtype),
        "log_decay": ((heads, key_dim), torch.float32), "beta": ((heads,), torch.float32),
    }  # fmt: skip


def _rows(x):
    """The tensor with neighbouring values in its last axis."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def pack_saves(saves, state, num_requests, device):
    """Save points sorted by request: `[first save of each request (B + 1), then (offset, index of its slot) pairs]`.

    Returns None if nothing is to be saved. The tensor is made from host values; nothing is read back.
    """
    if saves is None or not saves.offsets:
        return None
    if state is None:
        raise ConfigError("saves need a state pool: state and slots are None")
    order = sorted(range(len(saves.offsets)), key=lambda n: saves.requests[n])
    if saves.requests[order[0]] < 0 or saves.requests[order[-1]] >= num_requests:
        bad = saves.requests[order[0] if saves.requests[order[0]] < 0 else order[-1]]
        raise ConfigError(f"saves: request {bad} is not among {num_requests} requests")
    first = [0] * (num_requests + 1)
    for request in saves.requests:
        first[request + 1] += 1
    for i in range(num_requests):
        first[i + 1] += first[i]
    table = torch.tensor([*first, *(x for n in order for x in (saves.offsets[n], n))], dtype=torch.int32)
    if device.type == "cpu":
        return table
    return table.pin_memory().to(device, non_blocking=True)


@register(kda_recurrent, name="triton", priority=10, deterministic=True, supports=_supports_recurrent, **OPTIONS)
def kda_recurrent_triton(
    q, k, v, gate, beta, *, params, state=None, slots=None, cu_seqlens, scale, saves=None, verify=None
):
    """See `k3lib.ops.kda_recurrent`: token by token, the state of a head in registers."""
    num_tokens, heads, value_dim = v.shape
    key_dim = k.shape[-1]
    _require_shape("q", q, (num_tokens, heads, key_dim))
    _require_shape("k", k, (num_tokens, heads, key_dim))
    _require_shape("gate", gate, (num_tokens, heads, key_dim))
    _require_shape("beta", beta, (num_tokens, heads))
    _check(params, state, slots, cu_seqlens, heads, key_dim, value_dim)
    num_requests = cu_seqlens.numel() - 1
    if verify is not None:
        shapes = _scratch_shapes(verify, v.dtype, state, heads, key_dim, value_dim)
        check_scratch("kda_recurrent", verify, state, num_tokens, num_requests, shapes)
    table = pack_saves(saves, state, num_requests, v.device)
    out = torch.empty(num_tokens, heads, value_dim, dtype=v.dtype, device=v.device)
    if not num_tokens or not num_requests:
        return out
    from k3lib.backends.triton.kda_decode_kernels import launch_kda_recurrent

    launch_kda_recurrent(
        _rows(q),
        _rows(k),
        _rows(v),
        _rows(gate),
        beta,
        params,
        state,
        slots,
        cu_seqlens,
        scale,
        table,
        None if saves is None else saves.slots,
        out,
        verify,
    )
    return out


@register(kda_mixer, name="triton", priority=10, deterministic=True, supports=_supports_mixer, **OPTIONS)
def kda_mixer_triton(
    qkv,
    gate,
    beta,
    out_gate,
    *,
    params,
    conv_weight,
    norm_weight,
    norm_eps,
    scale,
    state=None,
    conv_state=None,
    slots=None,
    cu_seqlens,
    saves=None,
    verify=None,
):
    """See `k3lib.ops.kda_mixer`: everything of a request and head in one program, verify steps too."""
    num_tokens, heads, key_dim = gate.shape
    value_dim = out_gate.shape[-1]
    channels = heads * (2 * key_dim + value_dim)
    if qkv.shape != (num_tokens, channels):
        raise ConfigError(f"kda_mixer: qkv has {qkv.shape[-1]} channels, expected H·(2K + V) = {channels}")
    if (state is None) != (conv_state is None):
        raise ConfigError("kda_mixer: state and conv_state must be given together, or both left out")
    if state is not None and conv_state is not None:
        if state.shape[0] != conv_state.shape[0]:
            raise ConfigError(f"kda_mixer: state has {state.shape[0]} rows, conv_state has {conv_state.shape[0]}")
        if conv_state.shape[1:] != (conv_weight.shape[1] - 1, channels) or not conv_state.is_contiguous():
            raise ConfigError(
                f"short_conv: conv_state has rows {tuple(conv_state.shape[1:])} with strides {conv_state.stride()}, "
                f"weight needs contiguous {(conv_weight.shape[1] - 1, channels)}"
            )
    _require_shape("beta", beta, (num_tokens, heads))
    _require_shape("out_gate", out_gate, (num_tokens, heads, value_dim))
    _require_shape("norm_weight", norm_weight, (value_dim,))
    _require_shape("conv_weight", conv_weight, (channels, conv_weight.shape[1]))
    _check(params, state, slots, cu_seqlens, heads, key_dim, value_dim)
    given = (
        _rows(qkv), _rows(gate), beta, _rows(out_gate), params, conv_weight.contiguous(), norm_weight, norm_eps, scale,
        state, conv_state, slots, cu_seqlens,
    )  # fmt: skip
    if verify is None:
        from k3lib.backends.triton.kda_decode_kernels import launch_kda_mixer

        return launch_kda_mixer(*given)
    shapes = {"inputs": ((channels,), qkv.dtype)}
    shapes |= _scratch_shapes(verify, qkv.dtype, state, heads, key_dim, value_dim)
    check_scratch("kda_mixer", verify, state, num_tokens, cu_seqlens.numel() - 1, shapes)
    from k3lib.backends.triton.kda_verify_kernels import launch_kda_verify

    return launch_kda_verify(*given, verify)


@register(kda_replay, name="triton", priority=10, deterministic=True, supports=_supports, **OPTIONS)
def kda_replay_triton(state, k, v, log_decay, beta, *, sources, rows, counts, targets):
    """See `k3lib.ops.kda_replay`. Places outside the tensors are not followed."""
    layers, _, heads, value_dim, key_dim = state.shape
    if k.ndim != 5:
        raise ConfigError(f"kda_replay: k must be [L, R, D, H, K], got {list(k.shape)}")
    front = (layers, *k.shape[1:3], heads)
    wanted = {"k": (k, (*front, key_dim)), "v": (v, (*front, value_dim))}
    wanted |= {"log_decay": (log_decay, (*front, key_dim)), "beta": (beta, front)}
    for name, (x, shape) in wanted.items():
        if x.shape != shape or (x.numel() and not x[0, 0].is_contiguous()):
            raise ConfigError(
                f"kda_replay: {name} has shape {tuple(x.shape)} with strides {x.stride()}, expected {shape} with "
                "contiguous rows"
            )
    if layers and not state[0].is_contiguous():
        raise ConfigError(f"kda_replay: state has strides {state.stride()}, expected contiguous layers")
    places = {"sources": sources, "rows": rows, "counts": counts, "targets": targets}
    if len({x.shape for x in places.values()}) > 1 or sources.ndim != 1:
        shapes = {name: tuple(x.shape) for name, x in places.items()}
        raise ConfigError(f"kda_replay: sources, rows, counts and targets must be equally many, got {shapes}")
    from k3lib.backends.triton.kda_verify_kernels import launch_kda_replay

    launch_kda_replay(state, k, v, log_decay, beta, sources, rows, counts, targets)
