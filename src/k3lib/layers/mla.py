"""Gated multi-head latent attention without positions.

Shapes: T packed tokens, D hidden size, H heads of this rank, L latent width, R width of the shared key part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from k3lib import ops
from k3lib.batch import Batch, LatentPages
from k3lib.errors import ConfigError
from k3lib.layers.linear import Fused, K3Module, Linear, Shard, shard_range
from k3lib.layers.norm import RMSNorm
from k3lib.parallel.group import LOCAL, Group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from k3lib.config import MLAConfig

__all__ = ["GatedMLA"]


class GatedMLA(K3Module):
    """Latent attention with a sigmoid output gate: expanded for prefill, absorbed for decode and verify.

    Usable alone: `layer(x, Batch.lengths([6, 4]))` is stateless; with `pages = layer.new_pages(n, page_size)` and a
    batch made by `Batch.of(..., page_tables=...)` it attends to what the pages hold and appends to them.
    """

    def __init__(
        self,
        config: MLAConfig,
        *,
        tp: Group = LOCAL,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = c = config
        begin, end = shard_range(c.num_heads, tp, Shard(0, what="MLA heads"))
        self.num_heads = end - begin
        place: dict[str, Any] = {"dtype": dtype, "device": device}

        def heads(width: int, source: int) -> Linear:
            return Linear(source, c.num_heads * width, cut="out", unit=width, tp=tp, **place)

        if c.q_lora_rank is None:
            self.q_proj = heads(c.qk_head_dim, c.hidden_size)
        else:
            self.q_a_proj = Linear(c.hidden_size, c.q_lora_rank, **place)
            self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.latent_norm_eps, **place)
            self.q_b_proj = heads(c.qk_head_dim, c.q_lora_rank)
        self.kv_a_proj_with_mqa = Linear(c.hidden_size, c.latent_width, **place)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.latent_norm_eps, **place)
        self.kv_b_proj = heads(c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
        if c.output_gate:
            self.g_proj = heads(c.v_head_dim, c.hidden_size)
        front = [self.q_proj if c.q_lora_rank is None else self.q_a_proj, self.kv_a_proj_with_mqa]
        self._widths = [front[0].weight.shape[0], c.kv_lora_rank, c.qk_rope_head_dim]
        if c.output_gate:
            front.append(self.g_proj)
            self._widths.append(self.num_heads * c.v_head_dim)
        self._front = Fused(*front)
        self.o_proj = Linear(c.num_heads * c.v_head_dim, c.hidden_size, cut="in", unit=c.v_head_dim, tp=tp, **place)

    def fused_parts(self) -> Sequence[Fused]:
        """Projections of the layer input."""
        return (self._front,)

    def new_pages(
        self,
        num_pages: int,
        page_size: int = 64,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> LatentPages:
        """Make zeroed pages 1 .. num_pages; page 0 is the null page."""
        if num_pages < 1 or page_size < 1:
            raise ConfigError(f"new_pages: num_pages={num_pages} and page_size={page_size} must be >= 1")
        weight = self.kv_a_proj_with_mqa.weight
        return LatentPages(
            torch.zeros(
                num_pages + 1,
                page_size,
                self.config.latent_width,
                dtype=dtype or weight.dtype,
                device=weight.device if device is None else device,
            )
        )

    def forward(self, x: Tensor, batch: Batch, cache: LatentPages | None = None) -> Tensor:
        """Attend.

        Args:
            x: `[T, D]`, the normed layer input; it also drives the output gate.
            batch: describes the T packed tokens; needs `page_table`, `rows` and `key_lens` if `cache` is given.
            cache: this layer's pages, appended to in place; None is the stateless call on whole sequences.

        Returns:
            `[T, D]`.
        """
        front, latent, shared, *gate = torch.split(self._front(x), self._widths, dim=-1)
        q = self._queries(front)
        latent = torch.cat([self.kv_a_layernorm(latent), shared], dim=-1)  # the shared part is not normed
        if cache is not None:
            if batch.rows is None or batch.page_table is None or batch.key_lens is None:
                raise ConfigError("GatedMLA: pages were given, but the batch has no page_table, rows and key_lens")
            ops.store_rows(latent, cache.pages, batch.rows)
        if cache is None or batch.mode == "prefill":
            out = self._attend_expanded(q, latent, batch, cache)
        else:
            out = self._attend_absorbed(q, batch, cache)
        out = out.flatten(1)
        if gate:
            out = out * torch.sigmoid(gate[0])
        projected: Tensor = self.o_proj(out)
        return projected

    def _queries(self, front: Tensor) -> Tensor:
        """`[T, H, nope + R]` from the full or the low-rank projection."""
        q = front if self.config.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(front))
        return q.reshape(front.shape[0], self.num_heads, self.config.qk_head_dim)

    def _expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Keys `[n, H, nope + R]` and values `[n, H, v]` of latent rows."""
        c = self.config
        compressed, shared = torch.split(latent, [c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        kv = self.kv_b_proj(compressed).view(-1, self.num_heads, c.qk_nope_head_dim + c.v_head_dim)
        k, v = torch.split(kv, [c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        return torch.cat([k, shared[:, None].expand(-1, self.num_heads, -1)], dim=-1), v

    def _attend_expanded(self, q: Tensor, latent: Tensor, batch: Batch, cache: LatentPages | None) -> Tensor:
        """New tokens among themselves, then over the cached prefix in pieces of bounded size."""
        pieces = [] if cache is None else batch.prefix_pieces(cache.pages.shape[1])
        k, v = self._expand(latent)
        cu, scale = batch.cu_seqlens, self.config.scale
        if cache is None or not pieces:
            out = ops.attention_varlen(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, scale=scale)
            assert isinstance(out, torch.Tensor), "no lse was asked for"
            return out
        out, lse = ops.attention_varlen(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, scale=scale, return_lse=True
        )
        for piece in pieces:
            k, v = self._expand(ops.gather_rows(cache.pages, piece.rows).to(q.dtype))
            more, more_lse = ops.attention_varlen(
                q, k, v, cu_seqlens_q=cu, cu_seqlens_k=piece.cu_seqlens_k, causal=False, scale=scale, return_lse=True
            )
            out, lse = ops.merge_partials(torch.stack([out, more]), torch.stack([lse, more_lse]))
        return out

    def _attend_absorbed(self, q: Tensor, batch: Batch, cache: LatentPages) -> Tensor:
        """Queries moved into the latent space, so that the cached rows are read as they are."""
        c = self.config
        assert batch.page_table is not None, "checked in forward"
        assert batch.key_lens is not None, "checked in forward"
        weight = self.kv_b_proj.weight.view(self.num_heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
        w_uk, w_uv = torch.split(weight, [c.qk_nope_head_dim, c.v_head_dim], dim=1)
        plain, shared = torch.split(q, [c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        absorbed = (plain.transpose(0, 1) @ w_uk).transpose(0, 1)  # [T, H, L]
        out = ops.mla_decode(
            torch.cat([absorbed, shared], dim=-1),
            cache.pages,
            latent_dim=c.kv_lora_rank,
            page_table=batch.page_table,
            key_lens=batch.key_lens,
            cu_seqlens=batch.cu_seqlens,
            scale=c.scale,
        )
        assert isinstance(out, torch.Tensor), "no lse was asked for"
        values: Tensor = (out.transpose(0, 1) @ w_uv.mT).transpose(0, 1)
        return values
