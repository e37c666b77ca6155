"""The Kimi Delta Attention layer.

Shapes: T packed tokens, D hidden size, H heads of this rank, K key dim, V value dim, C = H·(2K + V).
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from k3lib import ops
from k3lib.batch import Batch, KDAState
from k3lib.errors import CheckpointError, ConfigError
from k3lib.layers.linear import Fused, K3Module, Linear, Shard, parameter, shard_range, wide_dtype
from k3lib.layers.norm import GatedRMSNorm
from k3lib.parallel.group import LOCAL, Group
from k3lib.parallel.kcp import mixer_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from k3lib.config import KDAConfig

__all__ = ["KimiDeltaAttention", "live_decay", "warn_tails"]


def live_decay(name: str, stored: Tensor, num_heads: int) -> Tensor:
    """Return the `num_heads` entries of a stored `A_log` that count.

    The released tensor has one entry per channel of a head, more than there are heads; the rest is padding. Accepted:
    `[num_heads]`, anything longer, and `[1, 1, num_heads, 1]`.

    Raises:
        CheckpointError: fewer entries than heads, or another shape.
    """
    if stored.ndim == 4 and tuple(stored.shape) != (1, 1, num_heads, 1):
        raise CheckpointError(f"{name}: shape {tuple(stored.shape)}, expected (1, 1, {num_heads}, 1)")
    if stored.ndim not in {1, 4} or stored.numel() < num_heads:
        raise CheckpointError(
            f"{name}: shape {tuple(stored.shape)} has {stored.numel()} entries for {num_heads} heads; expected "
            f"[{num_heads}], a longer vector, or [1, 1, {num_heads}, 1]"
        )
    return stored.reshape(-1)[:num_heads]


def warn_tails(names: Sequence[str], *, stacklevel: int = 3) -> None:
    """Say once that padding entries of `A_log` are not zero; they change nothing."""
    if names:
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        message = f"{names[0]}{more}: the padding behind the heads is not zero; it is ignored"
        warnings.warn(message, stacklevel=stacklevel)


class _Conv(K3Module):
    """The weight of one depthwise convolution, `[channels, 1, width]`, kept in fp32."""

    wide = ("weight",)

    def __init__(
        self, channels: int, width: int, *, unit: int, tp: Group, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        super().__init__()
        rule = Shard(0, unit, "convolution channels")
        self.weight = parameter(channels, 1, width, dtype=dtype, device=device, shard=rule, tp=tp)


class KimiDeltaAttention(K3Module):
    """Kimi Delta Attention: short convolution, gated delta rule, gated norm.

    Usable alone: `layer(x, Batch.lengths([6, 4]))` is stateless; with `state = layer.new_state(n)` and a batch that has
    slots it continues where each slot stands.
    """

    wide = ("A_log", "dt_bias")

    def __init__(
        self,
        config: KDAConfig,
        *,
        tp: Group = LOCAL,
        cp: Group = LOCAL,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Make the layer.

        Args:
            config: of the layer.
            tp: ranks that share the heads.
            cp: ranks that share the tokens of a batch that is split.
            dtype: of the weights.
            device: of the weights.
        """
        super().__init__()
        self.config = config
        self.cp = cp
        hidden, keys, values = config.hidden_size, config.key_dim, config.value_dim
        begin, end = shard_range(config.num_heads, tp, Shard(0, what="KDA heads"))
        self.num_heads = end - begin
        self.tp = tp
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        wide = wide_dtype(dtype)

        def heads(width: int, source: int = hidden) -> Linear:
            return Linear(source, config.num_heads * width, cut="out", unit=width, tp=tp, **place)

        self.q_proj, self.k_proj, self.v_proj = heads(keys), heads(keys), heads(values)
        conv: dict[str, Any] = {"tp": tp, "dtype": wide, "device": device}
        self.q_conv1d = _Conv(config.num_heads * keys, config.conv_width, unit=keys, **conv)
        self.k_conv1d = _Conv(config.num_heads * keys, config.conv_width, unit=keys, **conv)
        self.v_conv1d = _Conv(config.num_heads * values, config.conv_width, unit=values, **conv)
        self.f_a_proj = Linear(hidden, config.gate_rank, **place)
        self.f_b_proj = heads(keys, config.gate_rank)
        self.b_proj = heads(1)
        # the released layout pads A_log to one entry per key channel; a rank of several holds only its heads
        entries = max(config.num_heads, keys) if tp.size == 1 else self.num_heads
        self.A_log = parameter(entries, dtype=wide, device=device, fill=0)  # cut by pad_decay
        rule = Shard(0, keys, "KDA heads")
        self.dt_bias = parameter(config.num_heads * keys, dtype=wide, device=device, shard=rule, tp=tp, fill=0)
        self.stored_decay_shape: tuple[int, ...] | None = None  # shape of A_log in the file it came from
        if config.full_rank_gate:
            self.g_proj = heads(values)
        else:
            self.g_a_proj = Linear(hidden, config.gate_rank, **place)
            self.g_b_proj = heads(values, config.gate_rank)
        out_gate = self.g_proj if config.full_rank_gate else self.g_a_proj
        self._front = Fused(self.q_proj, self.k_proj, self.v_proj, self.f_a_proj, self.b_proj, out_gate)
        self._conv = Fused(self.q_conv1d, self.k_conv1d, self.v_conv1d)
        self.o_norm = GatedRMSNorm(values, config.norm_eps, dtype=dtype, device=device)
        self.o_proj = Linear(config.num_heads * values, hidden, cut="in", unit=values, tp=tp, **place)

    def fused_parts(self) -> Sequence[Fused]:
        """Projections of the layer input, and the convolutions."""
        return (self._front, self._conv)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:  # noqa: ANN401
        name = f"{prefix}A_log"
        if (stored := state_dict.get(name)) is not None:
            warn_tails([name] if stored.reshape(-1)[self.config.num_heads :].any() else [])
            state_dict = {**state_dict, name: self.pad_decay(name, stored)}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def pad_decay(self, name: str, stored: Tensor) -> Tensor:
        """Bring a stored `A_log` of any accepted shape to this layer's: this rank's heads, then zeros."""
        live = live_decay(name, stored, self.config.num_heads)
        first = self.tp.rank * self.num_heads
        mine = live[first : first + self.num_heads]
        self.stored_decay_shape = tuple(stored.shape)
        return nn.functional.pad(mine, (0, self.A_log.shape[0] - self.num_heads))

    def new_state(
        self, num_slots: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> KDAState:
        """Make a zeroed state for `num_slots` requests: rows 1 .. num_slots; row 0 is the null slot.

        Args:
            num_slots: requests that can be in flight.
            dtype: of the recurrent state; the convolution state has the dtype of the weights.
            device: default that of the weights.
        """
        if num_slots < 1:
            raise ConfigError(f"new_state: num_slots must be >= 1, got {num_slots}")
        weight = self.q_proj.weight
        device = weight.device if device is None else device
        c = self.config
        if weight.dtype == torch.float64:
            dtype = torch.float64
        channels = self.num_heads * (2 * c.key_dim + c.value_dim)
        return KDAState(
            torch.zeros(num_slots + 1, self.num_heads, c.value_dim, c.key_dim, dtype=dtype, device=device),
            torch.zeros(num_slots + 1, c.conv_width - 1, channels, dtype=weight.dtype, device=device),
        )

    def _check_state(self, x: Tensor, batch: Batch, cache: KDAState) -> None:
        if batch.slots is None:
            raise ConfigError("KimiDeltaAttention: a state was given, but the batch has no slots")
        if cache.conv.dtype != x.dtype:
            raise ConfigError(
                f"KimiDeltaAttention: the convolution state is {cache.conv.dtype}, the layer input {x.dtype}; make the "
                "state with new_state(), or the cache from model.config"
            )
        if batch.mode == "verify" and cache.verify is None:
            raise ConfigError(
                "KimiDeltaAttention: a verify step must leave the committed state alone, but this state pool has no "
                "verify scratch"
            )

    def forward(self, x: Tensor, batch: Batch, cache: KDAState | None = None) -> Tensor:
        """Attend.

        Args:
            x: `[T, D]`, the normed layer input.
            batch: describes the T packed tokens; needs `slots` if `cache` is given.
            cache: this layer's state pool, updated in place; None is the stateless call on whole sequences.

        Returns:
            `[T, D]`.
        """
        if cache is not None:
            self._check_state(x, batch, cache)
        c, tokens, heads = self.config, x.shape[0], self.num_heads
        channels = heads * (2 * c.key_dim + c.value_dim)
        gate_width = heads * c.value_dim if c.full_rank_gate else c.gate_rank
        qkv, low_rank, beta, out_gate = self._front(x).split_with_sizes([channels, c.gate_rank, heads, gate_width], -1)
        gate = self.f_b_proj(low_rank).view(tokens, heads, c.key_dim)
        if not c.full_rank_gate:
            out_gate = self.g_b_proj(out_gate)
        out = mixer_of(batch, self.cp)(
            qkv,
            gate,
            beta,
            out_gate.view(tokens, heads, c.value_dim),
            params=ops.KDAParams(self.A_log[:heads], self.dt_bias.view(heads, c.key_dim), c.gate_lower_bound),
            conv_weight=self._conv.joined().squeeze(1),
            norm_weight=self.o_norm.weight,
            norm_eps=self.o_norm.eps,
            scale=c.scale,
            state=None if cache is None else cache.state,
            conv_state=None if cache is None else cache.conv,
            slots=None if cache is None else batch.slots,
            cu_seqlens=batch.cu_seqlens,
            saves=batch.saves if cache is not None else None,
            verify=cache.verify if cache is not None and batch.mode == "verify" else None,
        )
        out_proj: Tensor = self.o_proj(out.flatten(1))
        return out_proj
