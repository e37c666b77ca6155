"""The tensors: one pool of latent pages and one of KDA states, a view per layer.

Shapes: N slots + 1, P pages + 1; row 0 of either is null. The KDA state is `[N, H, V, K]`, value dimension first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from k3lib import ops
from k3lib.batch import KDAState, LatentPages, VerifyScratch
from k3lib.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from k3lib.batch import StateSaves
    from k3lib.config import TextConfig

__all__ = ["CacheConfig", "HybridPool", "KDAPool", "KDAScratch", "LatentPool", "PagedPool"]

_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
}
_STATE_DTYPES = ("float32", "bfloat16", "float64")
_COUNTS = {  # least value, and whether None is one
    "num_pages": (1, False), "num_slots": (1, False), "page_size": (1, False), "checkpoint_grid": (1, False),
    "track_interval": (0, True), "block_size": (0, False), "verify_rows": (1, True),
}  # fmt: skip


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
        block_size: most draft tokens of a verify step, which has one token more; 0 = no verify steps.
        rollback: what a verify step keeps of each token: its inputs ("replay") or the state after it ("states").
        verify_rows: most requests of a verify step; None = `num_slots`.
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
    block_size: int = 0
    rollback: Literal["replay", "states"] = "replay"
    verify_rows: int | None = None

    def __post_init__(self) -> None:
        for name, (least, is_optional) in _COUNTS.items():
            value = getattr(self, name)
            if value is None and is_optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"CacheConfig: {name} must be an integer, got {value!r}")
            if value < least:
                raise ConfigError(f"CacheConfig: {name} must be >= {least}, got {value}")
        if self.rollback not in {"replay", "states"}:
            raise ConfigError(f"CacheConfig: rollback={self.rollback!r}; expected replay or states")
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


class KDAScratch:
    """What a verify step keeps in all KDA layers, row i for request i of its batch: see `VerifyScratch`.

    Attributes:
        rows, width: most requests of a step, and most tokens of each.
        tensors: the fields of `VerifyScratch`, with the layers in front.
    """

    def __init__(self, pool: KDAPool, config: CacheConfig) -> None:
        rows = config.num_slots if config.verify_rows is None else config.verify_rows
        self.rows, self.width = rows, config.block_size + 1
        layers, _, heads, value_dim, key_dim = pool.state.shape
        place: dict[str, Any] = {"dtype": pool.conv.dtype, "device": pool.conv.device}
        front = (layers, rows, self.width)
        self.tensors = {"inputs": torch.zeros(*front, pool.conv.shape[-1], **place)}
        if config.rollback == "states":
            self.tensors["states"] = pool.state.new_zeros(*front, heads, value_dim, key_dim)
            return
        wide: dict[str, Any] = {**place, "dtype": torch.promote_types(torch.float32, pool.conv.dtype)}
        self.tensors["k"] = torch.zeros(*front, heads, key_dim, **place)
        self.tensors["v"] = torch.zeros(*front, heads, value_dim, **place)
        self.tensors["log_decay"] = torch.zeros(*front, heads, key_dim, **wide)
        self.tensors["beta"] = torch.zeros(*front, heads, **wide)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for x in self.tensors.values())

    def view(self, index: int) -> VerifyScratch:
        """The part of one layer, counted among the KDA layers."""
        return VerifyScratch(**{name: x[index] for name, x in self.tensors.items()})


class KDAPool:
    """States of all KDA layers: `[layers, N, H, V, K]` and windows `[layers, N, width - 1, C]`, zeroed.

    Attributes:
        scratch: of verify steps; None if there are none.
    """

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
        self.scratch = KDAScratch(self, config) if config.block_size else None

    def view(self, layer: int) -> KDAState:
        """The states of one layer."""
        i = self.layers[layer]
        return KDAState(self.state[i], self.conv[i], None if self.scratch is None else self.scratch.view(i))

    def commit(
        self,
        scratch: KDAScratch,
        slots: Tensor,
        steps: Tensor,
        saves: StateSaves | None = None,
        *,
        rows: Tensor | None = None,
    ) -> None:
        """Move slots to the state that a verify step found after some of its tokens, in all layers.

        Args:
            scratch: what the step kept.
            slots: `[B]` integers, row of the pool for each request; 0 or less: nothing happens to it.
            steps: `[B]` integers, the token whose state becomes the slot's: 0 is the first, the anchor.
            saves: states to store in other slots too, after so many of the step's tokens; requests count as in `slots`.
            rows: `[B]` integers, rows of the scratch; None = 0 .. B - 1.

        Raises:
            ConfigError: different counts.
        """
        if slots.shape != steps.shape or (rows is not None and rows.shape != slots.shape):
            raise ConfigError(f"KDAPool.commit: {slots.numel()} slots, {steps.numel()} steps and their rows must agree")
        if rows is None:
            rows = torch.arange(len(slots), device=slots.device)
        if saves is not None and saves.offsets:  # before the slots move
            requests, counts = torch.tensor([saves.requests, saves.offsets]).to(slots.device)
            self._advance(scratch, slots[requests], rows[requests], counts, saves.slots)
        self._advance(scratch, slots, rows, steps + 1, slots)

    def _advance(self, scratch: KDAScratch, sources: Tensor, rows: Tensor, counts: Tensor, targets: Tensor) -> None:
        """Write the state of `sources` after `counts` tokens, at least one, of scratch rows to `targets`."""
        kept = scratch.tensors
        if "states" in kept:
            self.state[:, targets.clamp(min=0).long()] = kept["states"][:, rows.long(), counts.long() - 1]
        else:
            entry = {"sources": sources, "rows": rows, "counts": counts, "targets": targets}
            ops.kda_replay(
                self.state, kept["k"], kept["v"], kept["log_decay"], kept["beta"],
                **{name: x.to(torch.int32) for name, x in entry.items()},
            )  # fmt: skip
        past = self.conv.shape[2]
        place = counts[:, None].long() - past + torch.arange(past, device=counts.device)
        new = kept["inputs"][:, rows[:, None].long(), place.clamp(min=0)]
        old = self.conv[:, sources[:, None].long(), (place + past).clamp(max=past - 1)]
        self.conv[:, targets.clamp(min=0).long()] = torch.where((place >= 0)[None, :, :, None], new, old)

    def zero(self, slots: Tensor) -> None:
        """Zero the states of `slots` in all layers."""
        self.state.index_fill_(1, slots, 0)
        self.conv.index_fill_(1, slots, 0)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole states in all layers; no target is a source."""
        self.state.index_copy_(1, targets, self.state.index_select(1, sources))
        self.conv.index_copy_(1, targets, self.conv.index_select(1, sources))


class PagedPool(Protocol):
    """Memory beside the KV pages that is addressed by the same pages: what happens to one happens to the other."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        ...

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole pages; no target is a source."""
        ...

    def zero(self, pages: Tensor) -> None:
        """Zero pages."""
        ...


class HybridPool:
    """Both pools of the layers held here; satisfies `CacheViews`.

    Attributes:
        paged: further pools in the same pages, for example a draft's.
    """

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
        self.paged: list[PagedPool] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        scratch = 0 if self.kda.scratch is None else self.kda.scratch.nbytes
        own = self.latent.pages.nbytes + self.kda.state.nbytes + self.kda.conv.nbytes + scratch
        return own + sum(pool.nbytes for pool in self.paged)

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole KV pages in all layers, and what `paged` keeps with them; no target is a source."""
        self.latent.copy(sources, targets)
        for pool in self.paged:
            pool.copy(sources, targets)

    def zero_pages(self, pages: Tensor) -> None:
        """Zero KV pages in all layers, and what `paged` keeps with them."""
        self.latent.zero(pages)
        for pool in self.paged:
            pool.zero(pages)

    def view(self, layer: int) -> KDAState | LatentPages:
        """The memory of one layer."""
        return self.kda.view(layer) if layer in self.kda.layers else self.latent.view(layer)
