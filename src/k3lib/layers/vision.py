"""MoonViT-V2, which turns the patches of images into features, and the projector into the text model.

Patches of several images are packed end to end; each image attends to itself only, and no mask is ever made.
Model specification, section 4.

Shapes: P packed patches, N images, C hidden size, H heads, D head dim, p patch size, G patches merged into a row,
M merged rows.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from k3lib import ops
from k3lib.errors import ConfigError
from k3lib.layers.linear import K3Module, Linear, parameter
from k3lib.layers.norm import RMSNorm
from k3lib.ops.packing import compute_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from k3lib.config import VisionConfig

__all__ = ["Grid", "VisionBatch", "VisionProjector", "VisionTower", "read_grids", "vision_flops"]

TOWER_EPS = 1.1920929e-7  # of single precision, in bf16 too: what the published tower computes with
_ROPE_BASE = 10_000.0
_TIME_BASE = 10_000.0


class Grid(NamedTuple):
    """Patches of one image: frames, rows, columns."""

    t: int
    h: int
    w: int

    @property
    def num_patches(self) -> int:
        """Patches of all frames."""
        return self.t * self.h * self.w

    def num_rows(self, merge: tuple[int, int]) -> int:
        """Rows of features after frames are averaged and neighbours merged: tokens in the prompt."""
        return (self.h // merge[0]) * (self.w // merge[1])


def read_grids(grid_thws: Tensor | Sequence[Sequence[int]], config: VisionConfig) -> tuple[Grid, ...]:
    """Check the grids of images and return them as host integers.

    Args:
        grid_thws: `[N, 3]` integers: frames, rows and columns of patches. A tensor on a device is read back.
        config: of the tower.

    Raises:
        ConfigError: no triples of integers, a side that is not made of whole merged rows, more frames than the tower
            knows.
    """
    if isinstance(grid_thws, torch.Tensor):
        if grid_thws.is_floating_point() or grid_thws.ndim != 2 or grid_thws.shape[1] != 3:
            raise ConfigError(
                f"grid_thws must be integers [N, 3], got {str(grid_thws.dtype).removeprefix('torch.')} "
                f"{list(grid_thws.shape)}"
            )
        grid_thws = grid_thws.tolist()
    rows, columns = config.merge_kernel_size
    grids = []
    for i, triple in enumerate(grid_thws):
        try:
            grid = Grid(*map(operator.index, triple))
        except TypeError as error:
            raise ConfigError(f"grid_thws[{i}] must be three integers, got {triple!r}") from error
        if min(grid) < 1 or grid.h % rows or grid.w % columns or grid.t > config.pos_emb_time:
            raise ConfigError(
                f"grid_thws[{i}]={tuple(grid)}: frames must lie in 1..{config.pos_emb_time}, rows be a multiple of "
                f"{rows} and columns of {columns}"
            )
        grids.append(grid)
    return tuple(grids)


def vision_flops(grid: Grid, config: VisionConfig) -> int:
    """Floating-point operations of matrix products for one image: tower and projector."""
    c, inner, qkv = config.hidden_size, config.intermediate_size, config.qkv_hidden_size
    patches, merged = grid.num_patches, c * math.prod(config.merge_kernel_size)
    layer = 2 * patches * (3 * qkv * c + qkv * c + 2 * inner * c) + 4 * patches**2 * qkv
    projector = 2 * grid.num_rows(config.merge_kernel_size) * merged * (merged + config.text_hidden_size)
    return config.num_layers * layer + 2 * patches * 3 * config.patch_size**2 * c + projector


@dataclass(frozen=True, slots=True, eq=False)
class VisionBatch:
    """Where the patches of a call belong: made once, used by all blocks. It holds no weights.

    Attributes:
        grids: of the images, in the order of their patches.
        cu_seqlens: `[N + 1]` int32, patch offsets of the images.
        rotation: `[P, D / 2]` complex, what pairs of channels of q and k are multiplied with.
    """

    grids: tuple[Grid, ...]
    cu_seqlens: Tensor
    rotation: Tensor

    @classmethod
    def of(
        cls,
        grids: Sequence[Grid],
        config: VisionConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> VisionBatch:
        """Make the batch of some images.

        Args:
            grids: from `read_grids`.
            config: of the tower.
            dtype: of the tower's weights; angles are in single precision, of a float64 tower in double.
            device: where the tensors go.
        """
        offsets = [0, *accumulate(grid.num_patches for grid in grids)]
        cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=device)
        angles = [_angles(grid, config.head_dim, device) for grid in grids]
        angle = torch.cat(angles) if angles else torch.zeros(0, config.head_dim // 2, device=device)
        kind = torch.complex128 if dtype == torch.float64 else torch.complex64
        return cls(tuple(grids), cu_seqlens, torch.polar(torch.ones_like(angle), angle).to(kind))

    @property
    def num_patches(self) -> int:
        """Patches of all images."""
        return sum(grid.num_patches for grid in self.grids)


def _angles(grid: Grid, head_dim: int, device: torch.device | str | None) -> Tensor:
    """Angles `[t * h * w, D / 2]`: even pairs turn with the column, odd ones with the row; frames are alike."""
    exponent = torch.arange(head_dim // 4, dtype=torch.float64, device=device) * (4 / head_dim)
    speed = _ROPE_BASE**-exponent
    x = torch.arange(grid.w, dtype=torch.float64, device=device)[:, None] * speed
    y = torch.arange(grid.h, dtype=torch.float64, device=device)[:, None] * speed
    shape = (grid.h, grid.w, head_dim // 4)
    one = torch.stack((x.expand(shape), y[:, None].expand(shape)), dim=-1).reshape(grid.h * grid.w, -1)
    return one.repeat(grid.t, 1)


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn adjacent channels `(2i, 2i + 1)` of `x [P, 2, H, D]`; in single precision, then rounded back."""
    wide = x.to(rotation.real.dtype).reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    turned = torch.view_as_complex(wide) * rotation[:, None, None]
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


class PatchProjection(K3Module):
    """A convolution whose kernel is as large as its stride: one matrix product over patches."""

    def __init__(self, config: VisionConfig, **place: Any) -> None:  # noqa: ANN401 - dtype and device
        super().__init__()
        p = config.patch_size
        self.weight = parameter(config.hidden_size, 3, p, p, **place)

    def forward(self, patches: Tensor) -> Tensor:
        """Map `[P, 3, p, p]` to `[P, C]`."""
        return F.linear(patches.flatten(1), self.weight.flatten(1))


class PositionTable(K3Module):
    """Learned positions of a square of patches, stretched to other grids, and sines of the frame."""

    def __init__(self, config: VisionConfig, **place: Any) -> None:  # noqa: ANN401 - dtype and device
        super().__init__()
        self.num_frames = config.pos_emb_time
        self.weight = parameter(config.pos_emb_height, config.pos_emb_width, config.hidden_size, **place)

    def forward(self, grids: Sequence[Grid]) -> Tensor:
        """Positions `[P, C]` of all patches, in the dtype of the table."""
        planes: dict[tuple[int, int], Tensor] = {}
        parts = []
        for grid in grids:
            size = (grid.h, grid.w)
            plane = planes.get(size)
            if plane is None:
                plane = planes[size] = self._plane(*size)
            if grid.t > 1:
                plane = (plane + self._frames(grid.t, plane)[:, None]).flatten(0, 1)
            parts.append(plane.to(self.weight.dtype))
        return torch.cat(parts) if parts else self.weight.new_zeros(0, self.weight.shape[-1])

    def _plane(self, rows: int, columns: int) -> Tensor:
        """The table for one frame, `[rows * columns, C]` in single precision."""
        table = self.weight.to(compute_dtype(self.weight))
        if (rows, columns) != tuple(table.shape[:2]):
            table = F.interpolate(
                table.permute(2, 0, 1)[None], size=(rows, columns), mode="bilinear", align_corners=False
            )[0].permute(1, 2, 0)
        return table.flatten(0, 1)

    @staticmethod
    def _frames(count: int, like: Tensor) -> Tensor:
        """Sines, then cosines of the number of a frame, `[count, C]`."""
        half = like.shape[-1] // 2
        speed = _TIME_BASE ** -(torch.arange(half, dtype=torch.float64, device=like.device) / half)
        angle = torch.arange(count, dtype=torch.float64, device=like.device)[:, None] * speed
        return torch.cat((angle.sin(), angle.cos()), dim=1).to(like.dtype)


class PatchEmbed(K3Module):
    """Patches to hidden states that know their place."""

    def __init__(self, config: VisionConfig, **place: Any) -> None:  # noqa: ANN401 - dtype and device
        super().__init__()
        self.proj = PatchProjection(config, **place)
        self.pos_emb = PositionTable(config, **place)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Map `[P, 3, p, p]` to `[P, C]`."""
        embedded: Tensor = self.proj(patches) + self.pos_emb(grids)
        return embedded


class VisionMLP(K3Module):
    """Two linear layers around the tanh form of GELU."""

    def __init__(self, config: VisionConfig, **place: Any) -> None:  # noqa: ANN401 - dtype and device
        super().__init__()
        self.fc0 = Linear(config.hidden_size, config.intermediate_size, **place)
        self.fc1 = Linear(config.intermediate_size, config.hidden_size, **place)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to `[P, C]`."""
        out: Tensor = self.fc1(F.gelu(self.fc0(x), approximate="tanh"))
        return out


class VisionBlock(K3Module):
    """Attention over all patches of an image, then an MLP, each behind a norm and around a residual."""

    def __init__(self, config: VisionConfig, **place: Any) -> None:  # noqa: ANN401 - dtype and device
        super().__init__()
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.norm0 = RMSNorm(config.hidden_size, TOWER_EPS, **place)
        self.norm1 = RMSNorm(config.hidden_size, TOWER_EPS, **place)
        self.wqkv = Linear(config.hidden_size, 3 * config.qkv_hidden_size, **place)
        self.wo = Linear(config.qkv_hidden_size, config.hidden_size, **place)
        self.mlp = VisionMLP(config, **place)

    def forward(self, x: Tensor, batch: VisionBatch) -> Tensor:
        """Apply to `[P, C]`."""
        x = x + self.wo(self._attend(self.norm0(x), batch))
        out: Tensor = x + self.mlp(self.norm1(x))
        return out

    def _attend(self, x: Tensor, batch: VisionBatch) -> Tensor:
        qkv = self.wqkv(x).view(-1, 3, self.num_heads, self.head_dim)
        q, k = _rotate(qkv[:, :2], batch.rotation).unbind(1)
        offsets = batch.cu_seqlens
        out = ops.attention_varlen(
            q, k, qkv[:, 2], cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=False, scale=self.head_dim**-0.5
        )
        assert isinstance(out, torch.Tensor), "no log-sum-exp was asked for"
        return out.flatten(1)


class VisionEncoder(K3Module):
    """The blocks and the last norm."""

    def __init__(self, config: VisionConfig, **place: Any) -> None:  # noqa: ANN401 - dtype and device
        super().__init__()
        self.blocks = nn.ModuleList(VisionBlock(config, **place) for _ in range(config.num_layers))
        self.final_layernorm = RMSNorm(config.hidden_size, TOWER_EPS, **place)

    def forward(self, x: Tensor, batch: VisionBatch) -> Tensor:
        """Apply to `[P, C]`."""
        for block in self.blocks:
            x = block(x, batch)
        normed: Tensor = self.final_layernorm(x)
        return normed


class VisionTower(K3Module):
    """MoonViT-V2: patches of images to groups of neighbouring features.

    Usable alone: `VisionTower(config)(patches, [(1, 32, 32)])`.
    """

    def __init__(
        self,
        config: VisionConfig,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        self.patch_embed = PatchEmbed(config, **place)
        self.encoder = VisionEncoder(config, **place)

    @property
    def weight(self) -> Tensor:
        """The first weight: it has the dtype and the device of all."""
        return self.patch_embed.proj.weight

    def batch(self, grid_thws: Tensor | Sequence[Sequence[int]]) -> VisionBatch:
        """What the blocks need to know of some images.

        Raises:
            ConfigError: see `read_grids`.
        """
        grids = read_grids(grid_thws, self.config)
        return VisionBatch.of(grids, self.config, dtype=self.weight.dtype, device=self.weight.device)

    def forward(self, pixel_values: Tensor, grid_thws: Tensor | Sequence[Sequence[int]] | VisionBatch) -> Tensor:
        """Compute `[M, G, C]`: one row for each token of the prompt, image after image.

        Args:
            pixel_values: `[P, 3, p, p]`, patches row by row, frame by frame, image by image.
            grid_thws: frames, rows and columns of the images, or a `batch` made of them before.

        Raises:
            ConfigError: grids that the tower does not take, or another number or shape of patches than they say.
        """
        batch = grid_thws if isinstance(grid_thws, VisionBatch) else self.batch(grid_thws)
        p = self.config.patch_size
        if pixel_values.ndim != 4 or pixel_values.shape[1:] != (3, p, p) or not pixel_values.is_floating_point():
            raise ConfigError(
                f"pixel_values must be floats [patches, 3, {p}, {p}], got "
                f"{str(pixel_values.dtype).removeprefix('torch.')} {list(pixel_values.shape)}"
            )
        if len(pixel_values) != batch.num_patches:
            raise ConfigError(f"pixel_values has {len(pixel_values)} patches, the grids describe {batch.num_patches}")
        x = self.patch_embed(pixel_values.to(self.weight.dtype), batch.grids)
        return self._merge(self.encoder(x, batch), batch.grids)

    def _merge(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Average the frames of each image and put neighbours side by side."""
        rows, columns = self.config.merge_kernel_size
        parts = []
        for grid, part in zip(grids, torch.split(x, [grid.num_patches for grid in grids]), strict=True):
            cut = part.view(grid.t, grid.h // rows, rows, grid.w // columns, columns, -1).transpose(2, 3)
            cut = cut[0] if grid.t == 1 else cut.mean(0)
            parts.append(cut.reshape(-1, rows * columns, x.shape[-1]))
        return torch.cat(parts) if parts else x.new_zeros(0, rows * columns, x.shape[-1])


class VisionProjector(K3Module):
    """Merged features to rows that take the place of token embeddings."""

    def __init__(
        self,
        config: VisionConfig,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        width = config.hidden_size * math.prod(config.merge_kernel_size)
        # the exact GELU here, its tanh form in the tower
        self.proj = nn.Sequential(
            Linear(width, width, **place), nn.GELU(), Linear(width, config.text_hidden_size, **place)
        )
        self.post_norm = RMSNorm(config.text_hidden_size, config.projector_norm_eps, **place)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[M, G, C]` to `[M, hidden size of the text]`."""
        projected: Tensor = self.post_norm(self.proj(x.flatten(1)))
        return projected
