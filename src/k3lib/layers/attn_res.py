"""The running residual of K3: attention residuals, or an ordinary residual stream.

Shapes: T packed tokens, D hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from k3lib import ops
from k3lib.layers.linear import Fused

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

    from k3lib.batch import FeatureTap
    from k3lib.layers.linear import Linear
    from k3lib.layers.norm import RMSNorm

__all__ = ["AttnRes", "AttnResStream", "ResidualStream", "ScoreWeights"]


class AttnRes(NamedTuple):
    """The weights of one read.

    Attributes:
        score_norm: norm whose weight shapes the scores; None in a model without attention residuals.
        score_proj: projection `[1, D]` to a score; None likewise.
        out_norm: norm applied to the mixture.
    """

    score_norm: RMSNorm | None
    score_proj: Linear | None
    out_norm: RMSNorm

    def score_weight(self) -> Tensor:
        """Norm weight times projection, `[D]`, folded in fp32."""
        assert self.score_norm is not None, "only attention residuals have scores"
        assert self.score_proj is not None, "only attention residuals have scores"
        gamma: Any = self.score_norm._parameters["weight"]
        w: Any = self.score_proj._parameters["weight"]
        return _folded(gamma, w).squeeze(0)


def _folded(gamma: Tensor, w: Tensor) -> Tensor:
    return gamma * w if gamma.dtype == torch.float64 else gamma.float() * w.float()


class ScoreWeights:
    """The score weights of all reads of a model, folded at once: as many kernels a step as else a read needs."""

    def __init__(self, readers: Sequence[AttnRes]) -> None:
        """Take readers that have scores."""
        norms = [reader.score_norm for reader in readers if reader.score_norm is not None]
        self._projs = [reader.score_proj for reader in readers if reader.score_proj is not None]
        self.parts = (Fused(*norms), Fused(*self._projs))

    def folded(self) -> Mapping[nn.Module | None, Tensor]:
        """`[D]` of each reader, by its projection; none if the weights are not joined, or gradients are recorded."""
        gammas, w = (part.intact() for part in self.parts)
        if gammas is None or w is None:
            return {}
        count, width = len(self._projs), w.shape[-1]
        rows = _folded(gammas[: count * width].view(count, width), w[:count])
        return dict(zip(self._projs, rows.unbind(0), strict=True))


class AttnResStream:
    """Running sum of the current block, the bank of finished blocks, and the pending output of the last sublayer.

    `add` only remembers the output; `read` is one `attn_res` op: add it, mix, norm, and at the first layer of a block
    store the finished sum as the next bank row.

    Attributes:
        prefix: `[T, D]`, or None at the beginning of a block.
        bank: `[T, rows, D]`; the first `num_blocks` rows count.
    """

    def __init__(
        self,
        prefix: Tensor | None,
        *,
        rows: int,
        bank: Tensor | None = None,
        num_blocks: int = 0,
        scores: Mapping[nn.Module | None, Tensor] | None = None,
    ) -> None:
        """Start a stream.

        Args:
            prefix: `[T, D]`: the embeddings, or the running sum at the cut of a pipeline stage.
            rows: rows that the bank will need.
            bank: `[T, num_blocks, D]`, the history at a cut.
            num_blocks: rows of `bank`.
            scores: score weights that have been folded already; see `ScoreWeights`.
        """
        self.prefix = prefix
        self._scores = scores or {}
        self.num_blocks = num_blocks
        self._delta: Tensor | None = None
        self._frozen: list[Tensor] = []  # finished rows while autograd records: no in-place writes
        source = prefix if prefix is not None else bank
        assert source is not None, "a stream starts from a prefix or a bank"
        self._records = torch.is_grad_enabled()
        if self._records:
            self.bank = source.new_empty(source.shape[0], 0, source.shape[-1]) if bank is None else bank
        else:
            self.bank = source.new_zeros(source.shape[0], rows, source.shape[-1])
            if bank is not None:
                self.bank[:, :num_blocks] = bank

    def add(self, delta: Tensor) -> None:
        """Remember the output of a sublayer; the next read adds it."""
        if self._delta is not None:
            self._settle()
        self._delta = delta

    def read(self, reader: AttnRes, *, closes_block: bool = False) -> Tensor:
        """Return what `reader` sees, normed: `[T, D]`. `closes_block`: this layer begins a new block."""
        in_place = closes_block and not self._records
        out, prefix = ops.attn_res(
            self.prefix,
            self._delta,
            self.bank,
            score_weight=self._score_weight(reader),
            out_norm_weight=reader.out_norm.weight,
            num_blocks=self.num_blocks,
            write_block=self.num_blocks if in_place else None,
            eps=reader.score_norm.eps if reader.score_norm is not None else 0.0,
            out_eps=reader.out_norm.eps,
        )
        self.prefix, self._delta = prefix, None
        if closes_block:
            if self._records:  # a bank that autograd has seen is extended, not written
                assert prefix is not None, "nothing was written"
                self.bank = torch.cat([self.bank[:, : self.num_blocks], prefix[:, None]], dim=1)
                self.prefix = None
            self.num_blocks += 1
        return out

    def _score_weight(self, reader: AttnRes) -> Tensor:
        known = self._scores.get(reader.score_proj)
        return reader.score_weight() if known is None else known

    def mixture(self, reader: AttnRes) -> Tensor:
        """Return what `reader` would see, un-normed, without changing the stream."""
        out, _ = ops.attn_res(
            self.prefix,
            self._delta,
            self.bank,
            score_weight=self._score_weight(reader),
            out_norm_weight=None,
            num_blocks=self.num_blocks,
            write_block=None,
            eps=reader.score_norm.eps if reader.score_norm is not None else 0.0,
            out_eps=reader.out_norm.eps,
        )
        return out

    def hidden(self) -> Tensor:
        """The running sum with the pending output folded in, `[T, D]`."""
        self._settle()
        assert self.prefix is not None, "a stream is never empty between layers"
        return self.prefix

    def history(self) -> Tensor:
        """The finished bank rows, `[T, num_blocks, D]`: with `hidden()` the payload of a pipeline cut."""
        return self.bank[:, : self.num_blocks]

    def tap(self, taps: FeatureTap | None, layer: int, reader: AttnRes) -> None:
        """Store the feature of `layer` in `taps` if it is wanted; `reader` is the next one."""
        if taps is None or layer not in taps.layers:
            return
        value = self.hidden() if taps.kind == "prefix" else self.mixture(reader)
        width = value.shape[-1]
        if taps.out is None:
            taps.out = value.new_zeros(value.shape[0], len(taps.layers) * width)
        for n, wanted in enumerate(taps.layers):
            if wanted == layer:
                taps.out[:, n * width : (n + 1) * width] = value

    def _settle(self) -> None:
        if self._delta is not None:
            self.prefix = self._delta if self.prefix is None else self.prefix + self._delta
            self._delta = None


class ResidualStream(AttnResStream):
    """The ordinary residual of a model without attention residuals, behind the same interface."""

    def read(self, reader: AttnRes, *, closes_block: bool = False) -> Tensor:
        """Return the normed running sum."""
        out: Tensor = reader.out_norm(self.hidden())
        return out

    def mixture(self, reader: AttnRes) -> Tensor:
        """Return the running sum."""
        return self.hidden()
