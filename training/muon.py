"""Muon for matrices, each head of an attention projection by itself; everything else goes to AdamW.

The update of a matrix is its momentum made orthogonal by Newton-Schulz iterations. A projection of H heads is H
matrices that should not share singular values, so each is made orthogonal alone (K3 report, section 2.5).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn

    from k3lib.config import TextConfig

__all__ = ["Muon", "orthogonal", "pieces", "split_parameters"]

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_UPDATE_SIZE = 0.2  # root mean square of an update, about that of AdamW, so that both take one learning rate
_BY_ADAMW = (
    "embed_tokens", "lm_head", "res_proj", "b_proj", "block_sparse_moe.gate", "conv1d", "A_log", "dt_bias", "pos_emb",
    "patch_embed", "markov_w", "confidence_head",
)  # fmt: skip


def orthogonal(matrices: Tensor) -> Tensor:
    """Make `[n, r, c]` with r <= c nearly orthogonal: singular values near 1, singular vectors as they were."""
    a, b, c = _COEFFICIENTS
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.to(matrices.dtype)


def pieces(name: str, shape: torch.Size, text: TextConfig) -> tuple[int, int] | None:
    """How a parameter is cut into matrices: `(number, axis)`; None leaves it to AdamW."""
    if any(sign in name for sign in _BY_ADAMW) or len(shape) < 2:
        return None
    if len(shape) == 3:
        return (2 if name.endswith("w13") else 1), 1  # experts: gate and up are two matrices
    last = name.split(".")[-2]
    if "wqkv" in name:
        return 3, 0
    if ".self_attn." in name and "language_model" in name:
        heads = text.kda.num_heads  # both kinds of layers have as many in this model, as in K3
        if last in ("q_proj", "k_proj", "v_proj", "g_proj", "f_b_proj", "q_b_proj", "kv_b_proj"):
            return heads, 0
        if last == "o_proj":
            return heads, 1
    return 1, 0


def split_parameters(
    model: nn.Module, text: TextConfig
) -> tuple[list[tuple[nn.Parameter, tuple[int, int]]], list[nn.Parameter]]:
    """Parameters for Muon, with how they are cut, and those for AdamW. Correction biases are nobody's."""
    matrices, others = [], []
    for name, value in model.named_parameters():
        if "e_score_correction_bias" in name:
            continue
        cut = pieces(name, value.shape, text)
        if cut is None:
            others.append(value)
        else:
            matrices.append((value, cut))
    return matrices, others


def _cut(x: Tensor, number: int, axis: int) -> Tensor:
    """`[m, r, c]` of the matrices in a parameter."""
    if x.ndim == 3:
        return x.reshape(-1, x.shape[1] // number, x.shape[2])
    if axis == 0:
        return x.view(number, -1, x.shape[1])
    return x.view(x.shape[0], number, -1).transpose(0, 1)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised matrix by matrix; matrices of one shape together."""

    def __init__(
        self,
        matrices: Iterable[tuple[nn.Parameter, tuple[int, int]]],
        *,
        lr: float | Tensor,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        listed = list(matrices)
        self._cuts = [cut for _, cut in listed]
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__([value for value, _ in listed], defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all matrices that have gradients."""
        assert closure is None, "not needed here"
        group = self.param_groups[0]
        live = [(v, cut) for v, cut in zip(group["params"], self._cuts, strict=True) if v.grad is not None]
        for value, _ in live:
            if not self.state[value]:
                self.state[value]["momentum"] = torch.zeros_like(value)
        momenta = [self.state[value]["momentum"] for value, _ in live]
        gradients = [value.grad for value, _ in live]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        ahead = torch._foreach_lerp(gradients, momenta, group["momentum"])  # Nesterov's
        shapes: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        for (value, cut), update in zip(live, ahead, strict=True):
            parts = _cut(update, *cut)
            target = _cut(value, *cut)
            if parts.shape[1] > parts.shape[2]:
                parts, target = parts.mT, target.mT
            shapes.setdefault((parts.shape[1], parts.shape[2]), []).append((parts, target))
        torch._foreach_mul_([value for value, _ in live], 1 - group["lr"] * group["weight_decay"])
        for (_, columns), both in shapes.items():
            updates = orthogonal(torch.cat([parts for parts, _ in both]))
            sizes = [len(parts) for parts, _ in both]
            updates = updates * (-group["lr"] * _UPDATE_SIZE * math.sqrt(columns))
            torch._foreach_add_([target for _, target in both], torch.split(updates, sizes))
