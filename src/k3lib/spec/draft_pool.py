"""The memory of a draft: keys and values of the context, in the same pages as the target's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from k3lib import ops
from k3lib.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DraftPool"]


class DraftPool:
    """Rows of all draft layers: `[layers, groups, P, page, width]`, zeroed; page 0 is the null page.

    A group is what attends to a row of its own: one for latent attention, as many as KV heads otherwise. Row r of the
    target's pool, `page * page_size + offset`, and row r of each layer and group here are of the same token, so what
    is done to a page of the target is done to the same page here (`copy`, `zero`), and a prefix hit finds both.
    """

    def __init__(
        self,
        *,
        layers: int,
        groups: int,
        width: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Allocate pages 0 .. num_pages.

        Raises:
            ConfigError: a size below 1.
        """
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            if value < 1:
                raise ConfigError(f"DraftPool: {name} must be >= 1, got {value}")
        self.pages = torch.zeros(layers, groups, num_pages + 1, page_size, width, dtype=dtype, device=device)

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.pages.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.pages.nbytes

    def view(self, layer: int) -> Tensor:
        """Pages of one layer, `[groups * P, page, width]`: page p of group g is number `g * P + p`."""
        return self.pages[layer].flatten(0, 1)

    def store(self, values: Tensor, rows: Tensor) -> None:
        """Write the rows of some tokens in all layers.

        Args:
            values: `[layers, n, groups, width]`.
            rows: `[n]` int64, where; tokens of a row <= 0 are dropped.

        Raises:
            ConfigError: shapes do not fit, or a row is past the end; nothing has been written.
        """
        layers, groups, num_pages, page_size, width = self.pages.shape
        if values.shape != (layers, rows.shape[0], groups, width):
            raise ConfigError(
                f"DraftPool.store: values {tuple(values.shape)} of {rows.shape[0]} rows do not fit "
                f"[{layers}, n, {groups}, {width}]"
            )
        span = num_pages * page_size
        if rows.device.type == "cpu" and rows.numel() and int(rows.max()) >= span:
            raise ConfigError(f"DraftPool.store: row {int(rows.max())} is past the end of rows 0..{span - 1}")
        part = torch.arange(layers * groups, device=rows.device).view(layers, 1, groups) * span
        places = torch.where(rows[:, None] > 0, rows[:, None] + part, 0)
        ops.store_rows(values.reshape(-1, width), self.pages.view(-1, page_size, width), places.flatten())

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole pages."""
        self.pages.index_copy_(2, targets, self.pages.index_select(2, sources))

    def zero(self, pages: Tensor) -> None:
        """Zero pages."""
        self.pages.index_fill_(2, pages, 0)
