"""Draft models: a small dense transformer that proposes a block of tokens from the target's hidden states.

Shapes: n tokens, B requests, g rows of a block, D hidden size, V vocabulary, G groups of heads that share keys and
values, J heads of a group, W width of a row that is kept of a token in one group and layer; of a row the first L values
are the value, and a query has zeros wherever a row holds nothing of the key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from k3lib import ops
from k3lib.errors import ConfigError
from k3lib.layers import K3Module, Linear, RMSNorm, VocabEmbedding
from k3lib.layers.linear import Fused, Shard, shard_range
from k3lib.ops.packing import compute_dtype
from k3lib.parallel.group import LOCAL, Group
from k3lib.spec.draft_pool import DraftPool
from k3lib.spec.rope import Rope, Turns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from k3lib.draft_config import DraftConfig, MarkovKind

__all__ = [
    "BlockDraft",
    "ConfidenceHead",
    "GroupedAttention",
    "InferactDraft",
    "LatentAttention",
    "MarkovHead",
    "MarkovStep",
    "RadixArkDraft",
    "divides",
    "make_draft",
]


# ---- heads --------------------------------------------------------------------------------------


class MarkovStep(NamedTuple):
    """What a Markov head says of the next token.

    Attributes:
        bias: `[B, V]`, to be added to its logits.
        embedding: `[B, rank]`, of the previous token.
        state: `[B, rank]`, to go on with; None unless the head is recurrent.
    """

    bias: Tensor
    embedding: Tensor
    state: Tensor | None


class MarkovHead(K3Module):
    """What the token in front of it adds to the logits of a token: makes a block read from left to right.

    With e = W1[previous] and the row h of the block:

        vanilla:  W2 e
        gated:    W2 (sigmoid(gate_proj [h ; e]) * e)
        rnn:      a, c, o = joint_proj [s ; e ; h];  s = sigmoid(a) * s + (1 - sigmoid(a)) * tanh(c);  W2 tanh(o)
    """

    def __init__(
        self,
        vocab_size: int,
        rank: int,
        hidden_size: int,
        *,
        kind: MarkovKind = "vanilla",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.kind = kind
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        self.markov_w1 = VocabEmbedding(vocab_size, rank, **place)
        self.markov_w2 = Linear(rank, vocab_size, **place)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank, **place)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank, **place)

    def forward(self, previous: Tensor, hidden: Tensor, state: Tensor | None = None) -> MarkovStep:
        """One token of each request.

        Args:
            previous: `[B]` int64, the token in front.
            hidden: `[B, D]`, the normed row of the block.
            state: of the step before; None begins.
        """
        e = self.markov_w1(previous)
        inner = e
        if self.kind == "gated":
            inner = torch.sigmoid(self.gate_proj(torch.cat([hidden, e], dim=-1))) * e
        elif self.kind == "rnn":
            state = torch.zeros_like(e) if state is None else state
            a, c, o = self.joint_proj(torch.cat([state, e, hidden], dim=-1)).chunk(3, dim=-1)
            keep = torch.sigmoid(a)
            state = keep * state + (1 - keep) * torch.tanh(c)
            inner = torch.tanh(o)
        return MarkovStep(self.markov_w2(inner), e, state)


class ConfidenceHead(K3Module):
    """Estimates the probability that a token is accepted if those in front of it are."""

    def __init__(
        self, width: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1, dtype=dtype, device=device)

    def forward(self, *parts: Tensor) -> Tensor:
        """Probabilities `[...]` in fp32 of rows `[..., width]`, given in parts side by side."""
        wide = compute_dtype(parts[0])
        x = torch.cat([part.to(wide) for part in parts], dim=-1)
        return torch.sigmoid(F.linear(x, self.proj.weight.to(wide), self.proj.bias.to(wide))).squeeze(-1)


# ---- attention ----------------------------------------------------------------------------------


class LatentAttention(K3Module):
    """Multi-head latent attention with rotary positions on the shared part; one group, queries absorbed.

    A row is `[normed latent | rotated shared key]`.
    """

    def __init__(
        self,
        config: DraftConfig,
        rope: Rope,
        *,
        tp: Group = LOCAL,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        c = config.mla
        assert c is not None, "the family has latent attention"
        assert c.q_lora_rank is not None, "read from the file"
        self.config, self.rope = c, rope
        begin, end = shard_range(c.num_heads, tp, Shard(0, what="heads of the draft"))
        self.num_heads = end - begin
        self.groups, self.width, self.value_dim = 1, c.latent_width, c.kv_lora_rank
        self.scale = c.scale * config.rope.softmax_factor
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        heads: dict[str, Any] = {"cut": "out", "tp": tp, **place}
        self.q_a_proj = Linear(c.hidden_size, c.q_lora_rank, **place)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, config.norm_eps, **place)
        self.q_b_proj = Linear(c.q_lora_rank, c.num_heads * c.qk_head_dim, unit=c.qk_head_dim, **heads)
        self.kv_a_proj_with_mqa = Linear(c.hidden_size, c.latent_width, **place)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, config.norm_eps, **place)
        expanded = c.qk_nope_head_dim + c.v_head_dim
        self.kv_b_proj = Linear(c.kv_lora_rank, c.num_heads * expanded, unit=expanded, **heads)
        self.o_proj = Linear(c.num_heads * c.v_head_dim, c.hidden_size, cut="in", unit=c.v_head_dim, tp=tp, **place)

    def rows(self, x: Tensor, turns: Turns) -> Tensor:
        """What is kept of tokens `x [n, D]`: `[n, 1, W]`."""
        c = self.config
        latent, shared = torch.split(self.kv_a_proj_with_mqa(x), [c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        return torch.cat([self.kv_a_layernorm(latent), self.rope.rotate(shared, turns)], dim=-1)[:, None]

    def queries(self, x: Tensor, turns: Turns) -> Tensor:
        """Queries of `x [n, D]`: `[n, 1, J, W]`."""
        c = self.config
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(-1, self.num_heads, c.qk_head_dim)
        plain, shared = torch.split(q, [c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        absorbed = (plain.transpose(0, 1) @ self._expansions()[0]).transpose(0, 1)
        return torch.cat([absorbed, self.rope.rotate(shared, turns)], dim=-1)[:, None]

    def output(self, mixed: Tensor) -> Tensor:
        """From attention over rows `[n, 1, J, L]` to `[n, D]`."""
        values = (mixed[:, 0].transpose(0, 1) @ self._expansions()[1].mT).transpose(0, 1)
        projected: Tensor = self.o_proj(values.flatten(1))
        return projected

    def _expansions(self) -> tuple[Tensor, Tensor]:
        """From a latent to the keys `[J, nope, L]` and values `[J, v, L]` of each head."""
        c = self.config
        weight = self.kv_b_proj.weight.view(self.num_heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
        keys, values = torch.split(weight, [c.qk_nope_head_dim, c.v_head_dim], dim=1)
        return keys, values


class GroupedAttention(K3Module):
    """Grouped-query attention with normed and rotated queries and keys; a group is one KV head.

    A row is `[value | key]`: so the kernel for latent attention serves it, with each KV head as a request of its own.
    """

    def __init__(
        self,
        config: DraftConfig,
        rope: Rope,
        *,
        tp: Group = LOCAL,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.rope, self.head_dim = rope, config.head_dim
        begin, end = shard_range(config.num_kv_heads, tp, Shard(0, what="KV heads of the draft"))
        self.groups, self.width, self.value_dim = end - begin, 2 * config.head_dim, config.head_dim
        self.share = config.num_heads // config.num_kv_heads
        self.scale = float(config.head_dim**-0.5)
        d, hidden = config.head_dim, config.hidden_size
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        heads: dict[str, Any] = {"cut": "out", "unit": d, "tp": tp, **place}
        self.q_proj = Linear(hidden, config.num_heads * d, **heads)
        self.k_proj = Linear(hidden, config.num_kv_heads * d, **heads)
        self.v_proj = Linear(hidden, config.num_kv_heads * d, **heads)
        self.q_norm = RMSNorm(d, config.norm_eps, **place)
        self.k_norm = RMSNorm(d, config.norm_eps, **place)
        self.o_proj = Linear(config.num_heads * d, hidden, cut="in", unit=d, tp=tp, **place)

    def rows(self, x: Tensor, turns: Turns) -> Tensor:
        """What is kept of tokens `x [n, D]`: `[n, G, W]`."""
        keys = self.k_norm(self.k_proj(x).view(-1, self.groups, self.head_dim))
        values = self.v_proj(x).view(-1, self.groups, self.head_dim)
        return torch.cat([values, self.rope.rotate(keys, turns)], dim=-1)

    def queries(self, x: Tensor, turns: Turns) -> Tensor:
        """Queries of `x [n, D]`: `[n, G, J, W]`."""
        q = self.rope.rotate(self.q_norm(self.q_proj(x).view(-1, self.groups, self.share, self.head_dim)), turns)
        return F.pad(q, (self.head_dim, 0))

    def output(self, mixed: Tensor) -> Tensor:
        """From attention over rows `[n, G, J, L]` to `[n, D]`."""
        projected: Tensor = self.o_proj(mixed.flatten(1))
        return projected


class _Context(NamedTuple):
    """The context of a block for `mla_decode`, each group being a request: the same in all layers."""

    pool: DraftPool
    page_table: Tensor
    key_lens: Tensor
    cu_seqlens: Tensor

    @classmethod
    def of(cls, pool: DraftPool, page_table: Tensor, lengths: Tensor, rows: int) -> _Context:
        groups, num_pages = pool.pages.shape[1:3]
        first = torch.arange(groups, dtype=torch.int32, device=page_table.device) * num_pages
        table = (page_table.to(torch.int32)[:, None] + first[:, None]).flatten(0, 1)
        lens = lengths.to(torch.int32)[:, None].expand(-1, groups * rows).flatten()
        cu = torch.arange(len(table) + 1, dtype=torch.int32, device=page_table.device) * rows
        return cls(pool, table, lens, cu)


def _attend(
    q: Tensor, rows: Tensor, layer: int, attention: _Attention, context: _Context | None, causal: bool
) -> Tensor:
    """Attention of a block over the context and itself.

    Args:
        q: `[B, g, G, J, W]`.
        rows: `[B, g, G, W]`, of the block.
        layer: whose pages of the context.
        attention: scale and width of the values.
        context: None = there is none.
        causal: whether a row sees only rows of the block in front of it, and itself.

    Returns:
        `[B * g, G, J, L]`.
    """
    scale, value_dim = attention.scale, attention.value_dim
    q, rows = q.transpose(1, 2), rows.transpose(1, 2)  # [B, G, g, ...]
    wide = compute_dtype(q)
    scores = torch.einsum("bgtjw,bgsw->bgtjs", q.to(wide), rows.to(wide)) * scale
    if causal:
        place = torch.arange(q.shape[2], device=q.device)
        scores = scores.masked_fill((place > place[:, None])[:, None], -torch.inf)
    values = rows[..., None, :value_dim].transpose(2, 3).to(wide)  # [B, G, 1, s, L]
    out = (scores.softmax(-1) @ values).to(q.dtype)
    if context is not None:
        seen, seen_lse = ops.mla_decode(
            q.reshape(-1, *q.shape[3:]),
            context.pool.view(layer),
            latent_dim=value_dim,
            page_table=context.page_table,
            key_lens=context.key_lens,
            cu_seqlens=context.cu_seqlens,
            scale=scale,
            return_lse=True,
        )
        parts = torch.stack([seen, out.flatten(0, 2)]), torch.stack([seen_lse, scores.logsumexp(-1).flatten(0, 2)])
        out = ops.merge_partials(*parts)[0].view_as(out)
    return out.transpose(1, 2).flatten(0, 1)


# ---- the models ---------------------------------------------------------------------------------


class _SwiGLU(K3Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, hidden_size: int, intermediate_size: int, **place: Any) -> None:  # noqa: ANN401 - tp, dtype, device
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, cut="out", **place)
        self.up_proj = Linear(hidden_size, intermediate_size, cut="out", **place)
        self._front = Fused(self.gate_proj, self.up_proj)
        self.down_proj = Linear(intermediate_size, hidden_size, cut="in", **place)

    def fused_parts(self) -> Sequence[Fused]:
        """Gate and up projection."""
        return (self._front,)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to `[n, D]`."""
        gate, up = self._front(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


_Attention = LatentAttention | GroupedAttention


class _Layer(K3Module):
    """One pre-norm layer with ordinary residuals."""

    def __init__(self, config: DraftConfig, attention: _Attention, *, tp: Group, **place: Any) -> None:  # noqa: ANN401
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps, **place)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps, **place)
        self.mlp = _SwiGLU(config.hidden_size, config.intermediate_size, tp=tp, **place)


class BlockDraft(K3Module):
    """What both families share: context rows from the target's features, the masked block, the heads.

    Usable alone:

        pool = draft.new_pool(num_pages, page_size)
        pool.store(draft.rows(draft.context(features), positions), rows)  # each token of the context
        hidden = draft.block(embeddings, lengths, pool, page_table)  # the target's embeddings of [anchor, mask, ...]
        logits = target.scores(hidden[:, k]) + draft.markov_head(previous, hidden[:, k]).bias
    """

    def __init__(
        self,
        config: DraftConfig,
        *,
        attention: type[LatentAttention | GroupedAttention],
        interleaved: bool,
        tp: Group = LOCAL,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config, self.tp = config, tp
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        self.rope = Rope(config.rope, config.rope_dim, interleaved=interleaved)
        self.layers = nn.ModuleList(
            _Layer(config, attention(config, self.rope, tp=tp, **place), tp=tp, **place)
            for _ in range(config.num_layers)
        )
        hidden, rank = config.hidden_size, config.markov_rank
        self.markov_head = (
            MarkovHead(config.vocab_size, rank, hidden, kind=config.markov_head, **place) if rank else None
        )
        width = hidden + (rank if config.confidence_with_markov else 0)
        self.confidence_head = ConfidenceHead(width, **place) if config.has_confidence_head else None

    def _fuse_taps(self, features: Tensor) -> Tensor:
        raise NotImplementedError

    def _last_norm(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights, features and rows."""
        return self._first.input_layernorm.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._first.input_layernorm.weight.device

    @property
    def _first(self) -> _Layer:
        layer: _Layer = self.layers[0]  # type: ignore[assignment]
        return layer

    def new_pool(self, num_pages: int, page_size: int = 64) -> DraftPool:
        """Make zeroed memory for the context: pages 1 .. num_pages of each layer and group."""
        attention = self._first.self_attn
        return DraftPool(
            layers=len(self.layers),
            groups=attention.groups,
            width=attention.width,
            num_pages=num_pages,
            page_size=page_size,
            dtype=self.dtype,
            device=self.device,
        )

    def context(self, features: Tensor) -> Tensor:
        """Fuse the taps of some tokens into one vector each, `C = RMSNorm(W features)`.

        Args:
            features: `[n, taps * target hidden]`, as `FeatureTap.out` has them.

        Returns:
            `[n, D]`.

        Raises:
            ConfigError: another width or dtype.
        """
        if features.ndim != 2 or features.shape[1] != self.config.feature_width or features.dtype != self.dtype:
            raise ConfigError(
                f"the draft needs features [n, {self.config.feature_width}] of {self.dtype} "
                f"({len(self.config.feature_layers)} taps), got {list(features.shape)} of {features.dtype}"
            )
        return self._fuse_taps(features)

    def rows(self, context: Tensor, positions: Tensor) -> Tensor:
        """What each layer keeps of tokens of the context; they do not pass through the layers.

        Args:
            context: `[n, D]`.
            positions: `[n]`, places in their sequences.

        Returns:
            `[layers, n, G, W]`.
        """
        turns = self.rope.turns(positions, context.dtype)
        return torch.stack([layer.self_attn.rows(context, turns) for layer in self.layers])  # type: ignore[operator,union-attr]

    def block(
        self, embeddings: Tensor, lengths: Tensor, pool: DraftPool | None = None, page_table: Tensor | None = None
    ) -> Tensor:
        """Run one block of each request; all its rows see the whole context.

        Args:
            embeddings: `[B, g, D]`: the target's embeddings of the anchor and of g - 1 masks.
            lengths: `[B]` integers: tokens of the context, which is the anchor's position.
            pool: rows of the context; None = there is no context, whatever `lengths` says.
            page_table: `[B, M]` pages of each request; needed with `pool`.

        Returns:
            `[B, g, D]`, normed: what the target's head reads.
        """
        requests, rows, _ = embeddings.shape
        if pool is not None and page_table is None:
            raise ConfigError("block: a pool was given, but no page_table")
        context = None
        if pool is not None and page_table is not None and page_table.numel():
            context = _Context.of(pool, page_table, lengths, rows)
        positions = (lengths.long()[:, None] + torch.arange(rows, device=lengths.device)).flatten()
        turns = self.rope.turns(positions, embeddings.dtype)
        hidden = embeddings.flatten(0, 1)
        for i, (layer, causal) in enumerate(zip(self.layers, self.config.causal, strict=True)):
            assert isinstance(layer, _Layer), "made here"
            attention, x = layer.self_attn, layer.input_layernorm(hidden)
            q, own = attention.queries(x, turns), attention.rows(x, turns)
            shape = (requests, rows)
            mixed = _attend(
                q.view(*shape, *q.shape[1:]), own.view(*shape, *own.shape[1:]), i, attention, context, causal
            )
            hidden = hidden + attention.output(mixed)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self._last_norm(hidden).view(embeddings.shape)


class InferactDraft(BlockDraft):
    """Inferact's family: latent attention, rotary pairs side by side, taps of the running sum.

    Public: Inferact/Kimi-K3-DSpark, 3,562,312,961 parameters with its copy of the target's embedding, which is not
    read; see `DraftConfig`.
    """

    def __init__(
        self,
        config: DraftConfig,
        *,
        tp: Group = LOCAL,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(config, attention=LatentAttention, interleaved=True, tp=tp, dtype=dtype, device=device)
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        self.context_proj = Linear(config.feature_width, config.hidden_size, **place)
        self.context_norm = RMSNorm(config.hidden_size, config.norm_eps, **place)
        self.final_norm = RMSNorm(config.hidden_size, config.norm_eps, **place)

    def _fuse_taps(self, features: Tensor) -> Tensor:
        fused: Tensor = self.context_norm(self.context_proj(features))
        return fused

    def _last_norm(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self.final_norm(hidden)
        return normed


class RadixArkDraft(BlockDraft):
    """RadixArk's family: grouped heads, rotary halves, taps of the mixture. DFlash drafts are those without heads.

    Public: RadixArk/Kimi-K3-DSpark, 2,249,289,601 parameters; see `DraftConfig`.
    """

    def __init__(
        self,
        config: DraftConfig,
        *,
        tp: Group = LOCAL,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(config, attention=GroupedAttention, interleaved=False, tp=tp, dtype=dtype, device=device)
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        self.fc = Linear(config.feature_width, config.hidden_size, **place)
        self.hidden_norm = RMSNorm(config.hidden_size, config.norm_eps, **place)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, **place)

    def _fuse_taps(self, features: Tensor) -> Tensor:
        fused: Tensor = self.hidden_norm(self.fc(features))
        return fused

    def _last_norm(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self.norm(hidden)
        return normed


def divides(config: DraftConfig, tp_size: int) -> bool:
    """Whether so many ranks can share a draft's heads and MLP evenly."""
    heads = config.num_kv_heads if config.mla is None else config.mla.num_heads
    return heads % tp_size == 0 and config.intermediate_size % tp_size == 0


def make_draft(
    config: DraftConfig,
    *,
    tp: Group = LOCAL,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> InferactDraft | RadixArkDraft:
    """Make the model of a configuration, with random weights; on "meta" without memory.

    Args:
        config: the draft.
        tp: ranks that share its heads and MLP; default each rank holds all of it.
        dtype: of the weights.
        device: of the weights.

    Raises:
        ConfigError: the heads cannot be shared among the ranks.
    """
    family = InferactDraft if config.family == "inferact" else RadixArkDraft
    return family(config, tp=tp, dtype=dtype, device=device)
