"""The short causal convolution in front of KDA.

Shapes: T packed tokens, B requests, C channels (q | k | v), W width, N pool rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from k3lib.errors import ConfigError
from k3lib.ops.packing import (
    SavesKind,
    TokensPerRequest,
    VerifyKind,
    check_saves,
    check_verify,
    compute_dtype,
    host_lengths,
    host_slots,
    saves_kind,
    tokens_per_request,
    verify_kind,
)
from k3lib.ops.registry import intern_spec, op

if TYPE_CHECKING:
    from torch import Tensor

    from k3lib.batch import StateSaves, VerifyScratch

__all__ = ["ConvSpec", "short_conv"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvSpec:
    """Static facts of a short convolution."""

    channels: int
    width: int
    dtype: torch.dtype
    stateful: bool
    tokens_per_request: TokensPerRequest
    saves: SavesKind = "none"
    verify: VerifyKind = "none"
    deterministic: bool = False

    @staticmethod
    def of(
        x: Tensor,
        weight: Tensor,
        *,
        conv_state: Tensor | None = None,
        slots: Tensor | None = None,
        cu_seqlens: Tensor,
        saves: StateSaves | None = None,
        verify: VerifyScratch | None = None,
    ) -> ConvSpec:
        """Facts of a call."""
        return intern_spec(
            ConvSpec,
            weight.shape[0],
            weight.shape[1],
            x.dtype,
            conv_state is not None,
            tokens_per_request(x.shape[0], cu_seqlens),
            saves_kind(saves),
            verify_kind(verify),
        )


@op(ConvSpec.of)
def short_conv(  # noqa: C901 - a reference, read from top to bottom
    x: Tensor,
    weight: Tensor,
    *,
    conv_state: Tensor | None = None,
    slots: Tensor | None = None,
    cu_seqlens: Tensor,
    saves: StateSaves | None = None,
    verify: VerifyScratch | None = None,
) -> Tensor:
    """Depthwise causal convolution and SiLU. Updates `conv_state` in place.

    `y_t[c] = silu(Σ_j weight[c, j] · x_{t-W+1+j}[c])`, fp32 inside; the last tap multiplies the current token.
    Model specification, section 3.3.

    Args:
        x: `[T, C]`, projected inputs.
        weight: `[C, W]` fp32.
        conv_state: `[N, W - 1, C]`, the last inputs of each slot, oldest first; None starts every request from zeros
            and keeps nothing.
        slots: `[B]` int32, row of each request; 0 is the null slot, negative means none (its output is zero).
        cu_seqlens: `[B + 1]` int32.
        saves: interior positions whose window is stored as well.
        verify: scratch of a verify step: `conv_state` stays as it is, and `verify.inputs` gets the new inputs.

    Returns:
        `[T, C]` in the dtype of `x`.

    Raises:
        ConfigError: shapes, offsets, slots or saves do not fit; nothing has been written.
    """
    num_tokens, (channels, width) = x.shape[0], weight.shape
    if x.shape != (num_tokens, channels):
        raise ConfigError(f"short_conv: x has shape {tuple(x.shape)}, weight needs [T, {channels}]")
    if conv_state is not None and conv_state.shape[1:] != (width - 1, channels):
        raise ConfigError(
            f"short_conv: conv_state has rows {tuple(conv_state.shape[1:])}, weight needs {(width - 1, channels)}"
        )
    lengths = host_lengths(cu_seqlens, num_tokens)
    rows = host_slots(slots, conv_state, len(lengths))
    wanted = check_saves(saves, lengths, rows, conv_state)
    if verify is not None:
        check_verify("short_conv", verify, lengths, rows, saves)
        if verify.inputs.shape[2] != channels:
            raise ConfigError(f"short_conv: verify.inputs has {verify.inputs.shape[2]} channels, weight has {channels}")

    past = width - 1
    # history: the left context of every request, then all new tokens; a window is W indices into it
    if rows is None or conv_state is None:
        left = x.new_zeros(len(lengths), past, channels)
    elif min(rows, default=1) > 0:
        left = conv_state[slots].to(x.dtype)
    else:
        live = torch.tensor([s > 0 for s in rows], device=x.device)
        left = torch.where(live[:, None, None], conv_state[[max(s, 0) for s in rows]].to(x.dtype), 0)
    taps = weight.t().to(torch.promote_types(compute_dtype(x), weight.dtype))  # [W, C]
    if num_tokens == len(lengths) and lengths == [1] * num_tokens:  # decode: one window per request
        windows = torch.cat([left, x[:, None]], dim=1)
        after = windows[:, 1:]
        window_after = None
    else:
        history = torch.cat([left.flatten(0, 1), x])
        starts = [0, *accumulate(lengths)][:-1]
        request = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        position = torch.arange(num_tokens) - torch.tensor(starts)[request]
        windows = history[_window(position + 1, request, torch.tensor(starts), past, len(lengths), width).to(x.device)]

        def window_after(requests: list[int], counts: list[int]) -> Tensor:
            index = _window(
                torch.tensor(counts), torch.tensor(requests), torch.tensor(starts), past, len(lengths), past
            )
            return history[index.to(x.device)]

        after = window_after(list(range(len(lengths))), lengths)
    out = F.silu((windows.to(taps.dtype) * taps).sum(1)).to(x.dtype)

    if rows is None or conv_state is None:
        return out
    if any(s < 0 for s in rows):
        dropped = torch.tensor([s < 0 for s in rows], device=x.device)
        out = out.masked_fill(torch.repeat_interleave(dropped, torch.tensor(lengths, device=x.device))[:, None], 0)
    if verify is not None:
        for i, inputs in enumerate(torch.split(x, lengths)):
            verify.inputs[i, : len(inputs)] = inputs
        return out
    keep = [i for i, s in enumerate(rows) if s > 0]
    if len(keep) == len(rows):
        conv_state[slots] = after.to(conv_state.dtype)
    else:
        conv_state[[rows[i] for i in keep]] = after[keep].to(conv_state.dtype)
    if wanted:
        requests, offsets, targets = map(list, zip(*wanted, strict=True))
        kept = after[requests] if window_after is None else window_after(requests, offsets)
        conv_state[targets] = kept.to(conv_state.dtype)
    return out


def _window(count: Tensor, request: Tensor, starts: Tensor, past: int, num_requests: int, width: int) -> Tensor:
    """Indices into `history` of the last `width` inputs of each request after `count` of its new tokens."""
    back = torch.arange(width) - width  # -width .. -1
    position = count[:, None] + back
    in_batch = num_requests * past + starts[request][:, None] + position
    in_state = request[:, None] * past + past + position
    return torch.where(position >= 0, in_batch, in_state)
