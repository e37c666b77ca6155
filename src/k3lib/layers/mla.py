"""Gated multi-head latent attention without positions.

Shapes: T packed tokens, D hidden size, H heads of this rank, L latent width, R width of the shared key part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn import functional as F

from k3lib import ops
from k3lib.batch import Batch, LatentPages
from k3lib.errors import ConfigError
from k3lib.layers.linear import Fused, K3Module, Linear, Shard, shard_range
from k3lib.layers.norm import RMSNorm
from k3lib.parallel import dcp as context
from k3lib.parallel.group import LOCAL, Group, RankView
from k3lib.parallel.kcp import store_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from k3lib.config import MLAConfig

__all__ = ["GatedMLA"]


class GatedMLA(K3Module):
    """Latent attention with a sigmoid output gate: expanded for prefill, absorbed for decode and verify.

    Usable alone: `layer(x, Batch.lengths([6, 4]))` is stateless; with `pages = layer.new_pages(n, page_size)` and a
    batch made by `Batch.of(..., page_tables=...)` it attends to what the pages hold and appends to them.

    With `dcp` the ranks of that group share the tokens of the pages (see `k3lib.parallel.dcp`): the batch carries this
    rank's `rows` and `key_lens` of widened pages.
    """

    def __init__(
        self,
        config: MLAConfig,
        *,
        tp: Group = LOCAL,
        dcp: Group = LOCAL,
        cp: Group = LOCAL,
        dcp_comm_backend: Literal["a2a", "ag_rs"] = "a2a",
        dcp_replicate_q_proj: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Make the layer.

        Args:
            config: of the layer.
            tp: ranks that share the heads.
            dcp: ranks that share the tokens of the pages: contiguous inside `tp`; or any, if `tp` is one rank and each
                has all heads.
            cp: ranks that share the tokens of a batch that is split.
            dcp_comm_backend: how partial results are exchanged; see `dcp.merge_heads`.
            dcp_replicate_q_proj: project the queries of the whole `dcp` group here instead of gathering them.
            dtype: of the weights.
            device: of the weights.

        Raises:
            ConfigError: the ranks do not divide the heads, or `dcp` does not divide `tp`.
        """
        super().__init__()
        if tp.size > 1 and tp.size % dcp.size:
            raise ConfigError(
                f"dcp_size={dcp.size} must divide tp_size={tp.size}: DCP ranks are taken from the TP group"
            )
        self.config = c = config
        begin, end = shard_range(c.num_heads, tp, Shard(0, what="MLA heads"))
        self.num_heads = end - begin
        self.dcp = dcp
        self.cp = cp
        self.dcp_comm_backend = dcp_comm_backend
        # whose queries this rank projects: its own, or those of its whole dcp group
        self.replicates_queries = dcp_replicate_q_proj and min(tp.size, dcp.size) > 1
        self.gathers_queries = tp.size > 1 and not self.replicates_queries
        wide = RankView(tp.rank // dcp.size, tp.size // dcp.size) if self.replicates_queries else tp
        self._own = slice(0, self.num_heads)
        if self.replicates_queries:
            self._own = slice(dcp.rank * self.num_heads, (dcp.rank + 1) * self.num_heads)
        self._query_heads = self.num_heads * (dcp.size if self.replicates_queries else 1)
        place: dict[str, Any] = {"dtype": dtype, "device": device}

        def heads(width: int, source: int, tp: Group = wide) -> Linear:
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
            self.g_proj = heads(c.v_head_dim, c.hidden_size, tp)
        front = [self.q_proj if c.q_lora_rank is None else self.q_a_proj, self.kv_a_proj_with_mqa]
        self._widths: list[int] = [front[0].weight.shape[0], c.kv_lora_rank, c.qk_rope_head_dim]
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
        front, latent, shared, *gate = self._front(x).split_with_sizes(self._widths, -1)
        latent = torch.cat([self.kv_a_layernorm(latent), shared], dim=-1)  # the shared part is not normed
        if cache is not None:
            if batch.rows is None or batch.page_table is None or batch.key_lens is None:
                raise ConfigError("GatedMLA: pages were given, but the batch has no page_table, rows and key_lens")
            batch.note_dcp(self.dcp.size, self.dcp.rank)
            store_of(batch, self.cp)(latent, cache.pages, batch.rows)
        elif batch.split_over > 1:
            raise ConfigError(
                f"GatedMLA: a batch that is split over {batch.split_over} ranks needs pages: there they read each "
                "other's rows"
            )
        if cache is None or batch.mode == "prefill":
            out = self._attend_expanded(self._queries(front), latent, batch, cache)
        else:
            out = self._attend_absorbed(front, batch, cache)
        out = out.flatten(1)
        if gate:
            out = out * torch.sigmoid(gate[0])
        projected: Tensor = self.o_proj(out)
        return projected

    def _queries(self, front: Tensor) -> Tensor:
        """`[T, H, nope + R]` of this rank's heads, from the full or the low-rank projection."""
        width = self.config.qk_head_dim
        if self.replicates_queries and self.config.q_lora_rank is not None:
            q = F.linear(self.q_a_layernorm(front), _head_rows(self.q_b_proj.weight, self._own, width))
            return q.reshape(front.shape[0], self.num_heads, width)
        return self._all_queries(front)[:, self._own]

    def _all_queries(self, front: Tensor) -> Tensor:
        """`[T, heads, nope + R]` of all heads that this rank projects."""
        q = front if self.config.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(front))
        return q.reshape(front.shape[0], self._query_heads, self.config.qk_head_dim)

    def _expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Keys `[n, H, nope + R]` and values `[n, H, v]` of latent rows."""
        c = self.config
        compressed, shared = torch.split(latent, [c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        width = c.qk_nope_head_dim + c.v_head_dim
        if self.replicates_queries:
            kv = F.linear(compressed, _head_rows(self.kv_b_proj.weight, self._own, width))
        else:
            kv = self.kv_b_proj(compressed)
        kv = kv.view(-1, self.num_heads, width)
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
            k, v = self._expand(context.gather_piece(cache.pages, piece, self.dcp).to(q.dtype))
            more, more_lse = ops.attention_varlen(
                q, k, v, cu_seqlens_q=cu, cu_seqlens_k=piece.cu_seqlens_k, causal=False, scale=scale, return_lse=True
            )
            out, lse = ops.merge_partials(torch.stack([out, more]), torch.stack([lse, more_lse]))
        return out

    def _attend_absorbed(self, front: Tensor, batch: Batch, cache: LatentPages) -> Tensor:
        """Queries moved into the latent space, so that the cached rows are read as they are.

        With `dcp`, the queries of the whole group attend to this rank's rows, and the parts are merged.
        """
        c = self.config
        assert batch.page_table is not None, "checked in forward"
        assert batch.key_lens is not None, "checked in forward"
        q = self._all_queries(front)
        weight = self.kv_b_proj.weight.view(self._query_heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
        w_uk, w_uv = weight.split_with_sizes([c.qk_nope_head_dim, c.v_head_dim], 1)
        plain, shared = q.split_with_sizes([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
        absorbed = torch.cat([(plain.transpose(0, 1) @ w_uk).transpose(0, 1), shared], dim=-1)  # [T, heads, L + R]
        if self.dcp.size == 1:
            out = ops.mla_decode(
                absorbed,
                cache.pages,
                latent_dim=c.kv_lora_rank,
                page_table=batch.page_table,
                key_lens=batch.key_lens,
                cu_seqlens=batch.cu_seqlens,
                scale=c.scale,
            )
            assert isinstance(out, torch.Tensor), "no lse was asked for"
        else:
            out = self._attend_shared(absorbed, batch, cache)
        values: Tensor = (out.transpose(0, 1) @ w_uv[self._own].mT).transpose(0, 1)
        return values

    def _attend_shared(self, absorbed: Tensor, batch: Batch, cache: LatentPages) -> Tensor:
        """`[T, H, L]` of this rank's heads over the rows of all ranks of the dcp group."""
        assert batch.page_table is not None, "checked in forward"
        assert batch.key_lens is not None, "checked in forward"
        if self.gathers_queries:
            absorbed = self.dcp.all_gather(absorbed, dim=1)
        out, lse = ops.mla_decode(
            absorbed,
            cache.pages,
            latent_dim=self.config.kv_lora_rank,
            page_table=batch.page_table,
            key_lens=batch.key_lens,
            cu_seqlens=batch.cu_seqlens,
            scale=self.config.scale,
            return_lse=True,
        )
        return context.merge_heads(out, lse, self.dcp, heads=self.num_heads, form=self.dcp_comm_backend)


def _head_rows(weight: Tensor, heads: slice, width: int) -> Tensor:
    """The rows of some heads in a weight `[heads · width, in]`."""
    return weight[heads.start * width : heads.stop * width]
