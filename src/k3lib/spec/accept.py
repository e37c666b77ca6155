"""Which draft tokens are accepted, and the token behind them: pure functions, exact for the target's distribution.

Shapes: B requests, γ draft tokens (gamma), V vocabulary. Row j of the target predicts draft token j; row γ comes
behind the last.

Nothing here waits for the device. A request depends on its own entries alone: sums over the vocabulary are made in
int64, where they are exact, as in the sampler.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from k3lib.draws import draw
from k3lib.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Accepted", "accept_block", "accept_forced", "accept_greedy", "accept_sampled", "simulated_length"]

_UNIT = 2.0**62  # of a probability as an integer; a row has a sum below 2


class Accepted(NamedTuple):
    """What came of a draft.

    Attributes:
        length: `[B]` int64, draft tokens that were accepted, 0 .. γ.
        tokens: `[B, γ + 1]` int64: these, then one token of the target (the bonus), then -1.
    """

    length: Tensor
    tokens: Tensor


def accept_greedy(draft: Tensor, target: Tensor, lengths: Tensor | None = None) -> Accepted:
    """Accept the tokens that the target chose as well, up to the first that it did not.

    Args:
        draft: `[B, γ]` ids.
        target: `[B, γ + 1]`, what the target chose at each row; -1 where it could not choose, which no token equals.
        lengths: `[B]`, tokens of each draft, 0 .. γ; the others are padding. None = γ.
    """
    _check(draft, target.shape, lengths)
    same = (draft == target[:, :-1]) & (draft >= 0) & _is_valid(draft, lengths)
    return accept_forced(draft, target, same.cumprod(1).sum(1))


def accept_forced(draft: Tensor, target: Tensor, length: Tensor) -> Accepted:
    """Accept so many tokens, whatever they are; the bonus is what the target chose behind them.

    Args:
        draft, target: as in `accept_greedy`.
        length: `[B]`, 0 .. γ.
    """
    _check(draft, target.shape, length)
    length = length.to(torch.int64)
    return _result(draft, length, target.gather(1, length[:, None]))


def accept_sampled(
    draft: Tensor, draft_probs: Tensor, target_probs: Tensor, uniforms: Tensor, lengths: Tensor | None = None
) -> Accepted:
    """Accept drawn tokens one by one, so that what comes out has the distribution of the target (chain rejection).

    With p the target's and q the draft's probability of token j, it is accepted if `u_j q < p`. At the first that is
    not, the bonus is drawn from `max(P_j - Q_j, 0)`, and behind the last from the target's row. The bonus inverts the
    cumulative distribution in the order of the ids with the last of the uniforms, which decides nothing else.

    A q that is NaN, negative, 0 or above 1 counts as 0: that token is not accepted. What comes out stays exact, as the
    token is in the difference with all of its p. A difference without any mass is met only by rounding; the bonus then
    comes from the target's row. It always has a probability above 0 there, or is -1 if the row has none (or only NaN).

    Args:
        draft: `[B, γ]` ids, drawn from `draft_probs`.
        draft_probs: `[B, γ, V]`; fp32 or fp64.
        target_probs: `[B, γ + 1, V]`, as the sampler draws from them; fp32 or fp64.
        uniforms: `[B, γ + 1]` in [0, 1), independent of each other and of the draws of the draft.
        lengths: `[B]`, tokens of each draft, 0 .. γ; the others are padding, of any content. None = γ. A length may
            depend on the tokens in front of its end, but not on those behind it, or exactness is lost.
    """
    _check_probs(draft, draft_probs, target_probs, uniforms, lengths)
    p, q = _chances(draft, draft_probs, target_probs)
    accepts = (q > 0) & (uniforms[:, :-1].double() * q < p) & _is_valid(draft, lengths)
    length = accepts.cumprod(1).sum(1)
    weight = torch.ones(len(draft), dtype=torch.float64, device=draft.device)
    return _result(draft, length, _bonus(length, weight, draft_probs, target_probs, uniforms, lengths))


def accept_block(
    draft: Tensor, draft_probs: Tensor, target_probs: Tensor, uniforms: Tensor, lengths: Tensor | None = None
) -> Accepted:
    """Accept the longest prefix that may be, looking at all tokens together (block verification, arXiv:2403.10444).

    On average it accepts at least as much as `accept_sampled`, with the same distribution of what comes out. With

        w_0 = 1,   w_j = min(w_(j-1) p_j / q_j, 1),   m_j = sum max(w_j P_(j+1) - Q_(j+1), 0)

    the first j tokens are accepted if `u_j < m_j / (m_j + 1 - w_j)`, and all of them if `u < w`; the longest such
    prefix counts. The bonus is drawn from `max(w P - Q, 0)`, and behind the last token from the target's row. All
    else, and the arguments, are as in `accept_sampled`; but here the uniforms behind the accepted tokens matter too, so
    that no later step may use them, nor the draws of the tokens that were rejected, again.
    """
    _check_probs(draft, draft_probs, target_probs, uniforms, lengths)
    p, q = _chances(draft, draft_probs, target_probs)
    num_rows, gamma = draft.shape
    ends = _ends(draft, lengths)
    weights = [torch.ones(num_rows, dtype=torch.float64, device=draft.device)]
    length = torch.zeros(num_rows, dtype=torch.int64, device=draft.device)
    for j in range(1, gamma + 1):
        ratio = torch.where(q[:, j - 1] > 0, p[:, j - 1] / q[:, j - 1], 0.0)
        weight = (weights[-1] * ratio).clamp_(max=1.0)
        weights.append(weight)
        threshold = weight
        if j < gamma:
            mass = _mass(_difference(target_probs[:, j], draft_probs[:, j], weight))
            rest = mass + 1.0 - weight
            # without any mass it is not left: P and Q are equal
            threshold = torch.where(ends == j, weight, torch.where(rest > 0, mass / rest, 1.0))
        length = torch.where((uniforms[:, j - 1].double() < threshold) & (j <= ends), j, length)
    weight = torch.stack(weights, 1).gather(1, length[:, None])[:, 0]
    return _result(draft, length, _bonus(length, weight, draft_probs, target_probs, uniforms, lengths))


def simulated_length(average: float, uniform: float, gamma: int) -> int:
    """Return how many draft tokens a step accepts if so many tokens come out of each step on average.

    A step gives the whole part of `average`, or one more with the probability of the rest, within 1 .. γ + 1; one of
    them is the bonus.

    Args:
        average: tokens of a step.
        uniform: in [0, 1), of this step.
        gamma: draft tokens of the step.
    """
    whole = math.floor(average)
    return min(max(whole + (uniform < average - whole), 1), gamma + 1) - 1


def _check(draft: Tensor, target: torch.Size, lengths: Tensor | None) -> None:
    num_rows, gamma = draft.shape
    if tuple(target) != (num_rows, gamma + 1):
        raise ConfigError(f"target must be [{num_rows}, {gamma + 1}] for a draft of {[*draft.shape]}, got {[*target]}")
    if lengths is not None and tuple(lengths.shape) != (num_rows,):
        raise ConfigError(f"lengths must be [{num_rows}] for a draft of {[*draft.shape]}, got {[*lengths.shape]}")


def _check_probs(
    draft: Tensor, draft_probs: Tensor, target_probs: Tensor, uniforms: Tensor, lengths: Tensor | None
) -> None:
    num_rows, gamma = draft.shape
    vocab = target_probs.shape[-1]
    for name, given, shape in (
        ("draft_probs", draft_probs, (num_rows, gamma, vocab)),
        ("target_probs", target_probs, (num_rows, gamma + 1, vocab)),
        ("uniforms", uniforms, (num_rows, gamma + 1)),
    ):
        if tuple(given.shape) != shape:
            raise ConfigError(f"{name} must be {[*shape]} for a draft of {[*draft.shape]}, got {[*given.shape]}")
    _check(draft, uniforms.shape, lengths)


def _ends(draft: Tensor, lengths: Tensor | None) -> Tensor:
    if lengths is not None:
        return lengths.to(torch.int64)
    return torch.full(draft.shape[:1], draft.shape[1], dtype=torch.int64, device=draft.device)


def _is_valid(draft: Tensor, lengths: Tensor | None) -> Tensor:
    return torch.arange(draft.shape[1], device=draft.device) < _ends(draft, lengths)[:, None]


def _chances(draft: Tensor, draft_probs: Tensor, target_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities of the draft tokens, target's and draft's, `[B, γ]` fp64; 0 for what is none."""
    vocab = target_probs.shape[-1]
    places = draft.clamp(0, vocab - 1).to(torch.int64)[:, :, None]
    p = target_probs[:, :-1].gather(2, places)[:, :, 0].double().nan_to_num(0.0)
    q = _trusted(draft_probs.gather(2, places)[:, :, 0].double())
    return p, torch.where((draft >= 0) & (draft < vocab), q, 0.0)


def _trusted(q: Tensor) -> Tensor:
    return torch.where((q > 0) & (q <= 1), q, 0.0)


def _difference(p: Tensor, q: Tensor, weight: Tensor) -> Tensor:
    """`max(weight P - Q, 0)` of one row of each request, `[B, V]`."""
    return (p * weight[:, None].to(p.dtype)).sub_(_trusted(q)).clamp_(min=0)


def _mass(probs: Tensor) -> Tensor:
    """Sums of rows, `[B]` fp64."""
    return (probs.nan_to_num(0.0, posinf=0.0).mul_(_UNIT)).to(torch.int64).sum(-1).double() / _UNIT


def _bonus(
    length: Tensor,
    weight: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    uniforms: Tensor,
    lengths: Tensor | None,
) -> Tensor:
    """Draw the token behind the accepted ones, `[B, 1]`; of all rows it looks at one of each request."""
    num_rows, gamma, _ = draft_probs.shape
    requests = torch.arange(num_rows, device=length.device)
    row = target_probs[requests, length]
    if gamma:
        left = _difference(row, draft_probs[requests, length.clamp(max=gamma - 1)], weight)
        is_whole = (length >= _ends(draft_probs, lengths)) | (_mass(left) == 0)
        row = torch.where(is_whole[:, None], row, left)
    return draw(row.nan_to_num(0.0, posinf=0.0), uniforms[:, -1])[:, None]


def _result(draft: Tensor, length: Tensor, bonus: Tensor) -> Accepted:
    places = torch.arange(draft.shape[1] + 1, device=draft.device)
    padded = torch.nn.functional.pad(draft.to(torch.int64), (0, 1), value=-1)
    tokens = torch.where(places < length[:, None], padded, torch.where(places == length[:, None], bonus, -1))
    return Accepted(length, tokens)
