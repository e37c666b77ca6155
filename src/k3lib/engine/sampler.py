"""Choosing the next token from logits, per request and independent of the rest of the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from k3lib.errors import ConfigError

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from torch import Tensor

    from k3lib.engine.request import SamplingParams

__all__ = ["distribution", "draw", "sample"]


def distribution(logits: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """Return probabilities after temperature, top-k and top-p, best first, with their token ids.

    Top-k and top-p both act on the distribution after the temperature; top-p keeps the token that crosses the bound.
    Ties are ordered by id.

    Args:
        logits: `[B, vocab]` fp32.
        params: of each row; temperature 0 is treated as 1 (greedy rows are not drawn).

    Returns:
        Probabilities `[B, vocab]`, each row descending and summing to 1, and ids `[B, vocab]`.
    """
    device = logits.device
    temperature = torch.tensor([p.temperature or 1.0 for p in params], device=device)
    # below the maximum, over a normal number: the smallest temperature gives 0 and -inf, not inf - inf
    temperature = temperature.clamp(min=torch.finfo(temperature.dtype).tiny)
    below = logits - logits.amax(-1, keepdim=True)
    probs, ids = (below / temperature[:, None]).softmax(-1).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[1], device=device)
    top_k = torch.tensor([p.top_k or probs.shape[1] for p in params], device=device)
    probs = probs.masked_fill(rank >= top_k[:, None], 0)
    probs = probs / probs.sum(-1, keepdim=True)
    top_p = torch.tensor([p.top_p for p in params], device=device)
    before = probs.cumsum(-1) - probs
    # top_p 1 keeps all: the rounded sum may reach 1 before the end
    cut = (before >= top_p[:, None]) & (top_p < 1)[:, None] & (rank > 0)
    probs = probs.masked_fill(cut, 0)
    return probs / probs.sum(-1, keepdim=True), ids


def draw(probs: Tensor, ids: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one id of each row by inverting the cumulative distribution at `uniforms [B]` in [0, 1)."""
    total = probs.cumsum(-1)
    place = torch.searchsorted(total, (uniforms[:, None] * total[:, -1:]).contiguous(), right=True)
    last = (probs > 0).sum(-1, keepdim=True) - 1
    return ids.gather(1, torch.minimum(place, last))[:, 0]


def sample(logits: Tensor, params: Sequence[SamplingParams], rngs: Sequence[random.Random]) -> list[int | None]:
    """Choose the next token of each row; None for a row whose logits are not finite.

    Args:
        logits: `[B, vocab]`.
        params: of each row; temperature 0 takes the largest logit, ties to the lowest id.
        rngs: random state of each row; one number is taken from it for each drawn token.
    """
    if len(params) != logits.shape[0] or len(rngs) != logits.shape[0]:
        raise ConfigError(f"sample: {logits.shape[0]} rows, {len(params)} params, {len(rngs)} random states")
    finite = logits.isfinite().all(-1)
    chosen = logits.argmax(-1)
    drawn = [i for i, p in enumerate(params) if p.temperature > 0]
    if drawn:
        rows = torch.where(finite[drawn][:, None], logits[drawn].float(), 0)
        uniforms = torch.tensor([rngs[i].random() for i in drawn], dtype=torch.float32, device=logits.device)
        probs, ids = distribution(rows, [params[i] for i in drawn])
        chosen[drawn] = draw(probs, ids, uniforms)
    packed: list[int] = torch.where(finite, chosen, -1).tolist()  # the one copy to the host of a step
    return [None if token < 0 else token for token in packed]
