"""The tensors: one pool of latent pages and one of KDA states, a view per layer.

Shapes: N slots + 1, P pages + 1; row 0 of either is null. The KDA state is `[N, H, V, K]`, value dimension first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from k3lib.batch import KDAState, LatentPages
from k3lib.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from k3lib.config import TextConfig

__all__ = ["CacheConfig", "HybridPool", "KDAPool", "LatentPool"]

_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
}
_STATE_DTYPES = ("float32", "bfloat16", "float64")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Size and dtypes of a cache. Counts are without the null page and the null slot.

    Attributes:
        num_pages: KV pages.
        num_slots: KDA states: of running requests, one each, and checkpoints, which give way to them.
        page_size: tokens a page.
        checkpoint_grid: states are kept for reuse at multiples of so many tokens.
        track_interval: the same during decode; None = `checkpoint_grid`, 0 = never.
        keep_turn_ends: also keep the state at the end of every request, at its exact length.
        prefix_cache: False reuses nothing and keeps nothing.
        kv_cache_dtype: "bfloat16", "float32", "fp8_e4m3"; None = the activation dtype.
        mamba_ssm_dtype: dtype of the recurrent state, "float32" or "bfloat16"; None = float32 (float64 in an fp64
            model).
    """

    num_pages: int
    num_slots: int
    page_size: int = 64
    checkpoint_grid: int = 512
    track_interval: int | None = None
    keep_turn_ends: bool = True
    prefix_cache: bool = True
    kv_cache_dtype: str | None = None
    mamba_ssm_dtype: str | None = None

    def __post_init__(self) -> None:
        for name in ("num_pages", "num_slots", "page_size", "checkpoint_grid", "track_interval"):
            value = getattr(self, name)
            if value is None and name == "track_interval":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"CacheConfig: {name} must be an integer, got {value!r}")
            least = 0 if name == "track_interval" else 1
            if value < least:
                raise ConfigError(f"CacheConfig: {name} must be >= {least}, got {value}")
        if self.kv_cache_dtype is not None and self.kv_cache_dtype not in _DTYPES:
            raise ConfigError(
                f"CacheConfig: kv_cache_dtype={self.kv_cache_dtype!r}; expected one of {', '.join(_DTYPES)}"
            )
        if self.mamba_ssm_dtype is not None and self.mamba_ssm_dtype not in _STATE_DTYPES:
            raise ConfigError(
                f"CacheConfig: mamba_ssm_dtype={self.mamba_ssm_dtype!r}; expected one of {', '.join(_STATE_DTYPES)}"
            )

    def kv_dtype(self, activations: torch.dtype) -> torch.dtype:
        """Dtype of the KV pages."""
        return activations if self.kv_cache_dtype is None else _DTYPES[self.kv_cache_dtype]

    def state_dtype(self, activations: torch.dtype) -> torch.dtype:
        """Dtype of the recurrent state."""
        if self.mamba_ssm_dtype is not None:
            return _DTYPES[self.mamba_ssm_dtype]
        return torch.float64 if activations == torch.float64 else torch.float32


class LatentPool:
    """KV pages of all MLA layers: `[layers, P, page, latent + rope width]`, zeroed."""

    def __init__(
        self, layers: Sequence[int], text: TextConfig, config: CacheConfig, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers = {layer: i for i, layer in enumerate(layers)}
        shape = (len(layers), config.num_pages + 1, config.page_size, text.mla.latent_width)
        self.pages = torch.zeros(shape, dtype=config.kv_dtype(dtype), device=device)

    def view(self, layer: int) -> LatentPages:
        """The pages of one layer."""
        return LatentPages(self.pages[self.layers[layer]])

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole pages in all layers."""
        raw = self.pages.view(torch.uint8)  # float8 has no index operations
        raw.index_copy_(1, targets, raw.index_select(1, sources))

    def zero(self, pages: Tensor) -> None:
        """Zero pages in all layers."""
        self.pages.view(torch.uint8).index_fill_(1, pages, 0)


class KDAPool:
    """States of all KDA layers: `[layers, N, H, V, K]` and windows `[layers, N, width - 1, C]`, zeroed."""

    def __init__(
        self,
        layers: Sequence[int],
        text: TextConfig,
        config: CacheConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        tp_size: int,
    ) -> None:
        kda, rows = text.kda, config.num_slots + 1
        self.layers = {layer: i for i, layer in enumerate(layers)}
        heads = kda.num_heads // tp_size
        self.state = torch.zeros(
            len(layers), rows, heads, kda.value_dim, kda.key_dim, dtype=config.state_dtype(dtype), device=device
        )
        channels = kda.conv_channels // tp_size
        self.conv = torch.zeros(len(layers), rows, kda.conv_width - 1, channels, dtype=dtype, device=device)

    def view(self, layer: int) -> KDAState:
        """The states of one layer."""
        i = self.layers[layer]
        return KDAState(self.state[i], self.conv[i])

    def zero(self, slots: Tensor) -> None:
        """Zero the states of `slots` in all layers."""
        self.state.index_fill_(1, slots, 0)
        self.conv.index_fill_(1, slots, 0)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole states in all layers; no target is a source."""
        self.state.index_copy_(1, targets, self.state.index_select(1, sources))
        self.conv.index_copy_(1, targets, self.conv.index_select(1, sources))


class HybridPool:
    """Both pools of the layers held here; satisfies `CacheViews`."""

    def __init__(
        self,
        text: TextConfig,
        config: CacheConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        tp_size: int = 1,
        layers: range | None = None,
    ) -> None:
        """Allocate zeroed pools.

        Raises:
            ConfigError: `tp_size` does not divide the KDA heads.
        """
        if text.kda.num_heads % tp_size:
            raise ConfigError(f"tp_size={tp_size} does not divide num_heads={text.kda.num_heads} of KDA")
        held = range(text.num_layers) if layers is None else layers
        device = torch.device(device)
        kda = [i for i in text.layers_of("kda") if i in held]
        mla = [i for i in text.layers_of("mla") if i in held]
        self.latent = LatentPool(mla, text, config, dtype=dtype, device=device)
        self.kda = KDAPool(kda, text, config, dtype=dtype, device=device, tp_size=tp_size)
        self.device = device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.latent.pages.nbytes + self.kda.state.nbytes + self.kda.conv.nbytes

    def view(self, layer: int) -> KDAState | LatentPages:
        """The memory of one layer."""
        return self.kda.view(layer) if layer in self.kda.layers else self.latent.view(layer)
