"""Differentiable implementations of the model's ops for rectangular batches: every sequence has the same length.

The library's layers call ops, and the registry chooses who computes them; `training_ops` puts these in place for a
while. They differ from the references in how they are laid out, not in what they compute: no loop over experts or
requests, and of KDA only one product a chunk runs in order.

Shapes: B sequences of S tokens, T = B * S; H heads, K key dim, V value dim, n chunks of C tokens, E experts, I width of
an expert, L width of its input, D hidden size.
"""

from __future__ import annotations

import contextlib
import contextvars
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from k3lib import ops
from k3lib.errors import ConfigError
from k3lib.ops.kda import kda_gate, l2_norm
from k3lib.ops.moe import Routing
from k3lib.ops.packing import compute_dtype
from k3lib.ops.registry import Impl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from k3lib.config import SiTU

__all__ = ["Step", "chunked_kda", "fake_mxfp4", "quantile_bias", "step", "training_ops"]

NAME = "train"
CHUNK = 32  # exp(CHUNK / 2 * 5) is inside fp32, and 5 is the bound of K3's gate
_BASE = (
    8  # blocks of the triangular matrix that are inverted by a series of powers: exact, and small enough to be stable
)


@dataclass(slots=True)
class Step:
    """What the ops of one forward pass must know beyond their arguments, and what they leave behind.

    Attributes:
        length: S, tokens of every sequence.
        qat: round the weights of experts as MXFP4 does; gradients pass as if they were not rounded.
        grouped: compute the chosen experts by grouped products instead of all of them.
        balance: collect new correction biases of the routers.
        biases: the routers' biases and what they should become, in the order of the layers.
        loads: tokens of the busiest expert over the mean, of each layer.
    """

    length: int
    qat: bool = False
    balance: bool = False
    grouped: bool = False
    biases: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    loads: list[Tensor] = field(default_factory=list)

    def most_load(self) -> Tensor:
        """Tokens of the busiest expert over the mean, averaged over the layers; 1 is balanced."""
        return torch.stack(self.loads).mean() if self.loads else torch.ones(())


_step: contextvars.ContextVar[Step | None] = contextvars.ContextVar("training_step", default=None)


@contextlib.contextmanager
def step(length: int, *, qat: bool = False, balance: bool = False, grouped: bool = False) -> Iterator[Step]:
    """Announce a forward pass over sequences of `length` tokens; the other arguments are those of `Step`."""
    made = Step(length, qat, balance, grouped)
    token = _step.set(made)
    try:
        yield made
    finally:
        _step.reset(token)


def _now() -> Step:
    now = _step.get()
    if now is None:
        raise ConfigError("the training ops need `with step(length):` around the forward pass")
    return now


def _rectangle(x: Tensor, cu_seqlens: Tensor) -> tuple[int, int]:
    """B and S of packed tokens."""
    length = _now().length
    if x.shape[0] != length * (len(cu_seqlens) - 1):
        raise ConfigError(f"{x.shape[0]} tokens are not {len(cu_seqlens) - 1} sequences of {length}")
    return len(cu_seqlens) - 1, length


def _full_precision(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Autocast off: products in the dtype of their operands."""
    return torch.autocast(x.device.type, enabled=False)


# ---- Kimi Delta Attention -----------------------------------------------------------------------


class _InverseUnitLower(torch.autograd.Function):
    """`(1 + L)^-1` of strictly lower triangular `L [..., C, C]`.

    Diagonal blocks by a series that ends, then blocks of twice the size: `[[A, 0], [-D B A, D]]`. As stable as
    substitution, without its C steps.
    """

    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        size = lower.shape[-1]
        place = torch.arange(size, device=lower.device)
        eye = torch.eye(size, dtype=lower.dtype, device=lower.device)
        block = place // _BASE
        power = lower * (block[:, None] == block)
        inverse = eye - power
        for _ in range(_BASE.bit_length() - 2):  # (1 - x)(1 + x²)(1 + x⁴) ends where x⁸ = 0
            power = power @ power
            inverse = inverse @ (eye + power)
        width = _BASE
        while width < size:
            block = place // width
            joint = (block[:, None] == block + 1) & (block[:, None] % 2 == 1)
            inverse = inverse - inverse @ (lower * joint) @ inverse
            width *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grad @ inverse.mT).tril(-1)


class _Scan(torch.autograd.Function):
    """States in front of each chunk: `S_0 = 0`, `S_{i+1} = S_i A_i + B_i`; one product a chunk in either direction.

    Shapes: `A [n, m, K, K]`, `B [n, m, V, K]`, states `[n, m, V, K]`.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        states = torch.cat([torch.zeros_like(b[:1]), b[:-1]])
        for i in range(1, len(b)):
            states[i].baddbmm_(states[i - 1], a[i - 1])
        ctx.save_for_backward(a, states)
        return states

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, states = ctx.saved_tensors
        after = torch.cat([grad[1:], torch.zeros_like(grad[:1])])  # gradient of the state behind each chunk
        for i in range(len(grad) - 2, -1, -1):
            after[i].baddbmm_(after[i + 1], a[i + 1].mT)
        return states.mT @ after, after


def chunked_kda(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """The recurrence of `k3lib.ops.kda_chunk` on rectangular batches, for a bounded gate.

    With the symbols of that op, what a chunk does to the state is linear: `S' = S A + B` with
    `A = diag(e^{G_C}) − wᵀ k_out` and `B = u0ᵀ k_out`, so that all chunks are prepared side by side.

    Args:
        q: `[B, S, H, K]`, normalised and scaled.
        k: `[B, S, H, K]`, normalised.
        v: `[B, S, H, V]`.
        log_decay: `[B, S, H, K]`, between -5 and 0.
        beta: `[B, S, H]`, after the sigmoid.

    Returns:
        `[B, S, H, V]`.
    """
    length = k.shape[1]
    missing = -length % CHUNK  # tokens that write and decay nothing
    q, k, v, log_decay, beta = (F.pad(x, (0, 0, 0, 0, 0, missing)) for x in (q, k, v, log_decay, beta[..., None]))
    a, b, local, read = _chunks(*map(_cut, (q, k, v, log_decay, beta)))
    return _read_states(local, read, _Scan.apply(a.flatten(1, 2), b.flatten(1, 2)))[:, :length]


def _cut(x: Tensor) -> Tensor:
    """`[B, n C, H, d]` to chunks `[n, B, H, C, d]`."""
    return x.unflatten(1, (-1, CHUNK)).permute(1, 0, 3, 2, 4).contiguous()


def _chunks(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All that chunks need not know of one another, from `[n, B, H, C, d]`.

    Returns:
        `A [n, B, H, K, K]` and `B [n, B, H, V, K]` of each chunk, what it puts out by itself, `[n, B, H, C, V]`, and
        what it reads the state in front of it with, `[n, B, H, C, K]`.
    """
    total = log_decay.cumsum(-2)
    k_pairs, q_pairs = _pairs(q, k, total, beta)
    return _combine(_InverseUnitLower.apply(k_pairs), q_pairs, q, k, v, total, beta)


def _pairs(q: Tensor, k: Tensor, total: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """What keys have in common with earlier keys, times beta, and queries with keys: `[n, B, H, C, C]`."""
    middle = total[..., CHUNK // 2 - 1 : CHUNK // 2, :]
    grown, right = (total - middle).exp(), (k * (middle - total).exp()).mT
    return beta * ((k * grown) @ right).tril(-1), ((q * grown) @ right).tril()


def _combine(
    inverse: Tensor, q_pairs: Tensor, q: Tensor, k: Tensor, v: Tensor, total: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `_chunks`."""
    decay = total.exp()
    u0, w = inverse @ (beta * v), inverse @ (beta * k * decay)
    k_out = k * (total[..., -1:, :] - total).exp()
    a = torch.diag_embed(decay[..., -1, :]) - w.mT @ k_out
    return a, u0.mT @ k_out, q_pairs @ u0, q * decay - q_pairs @ w


def _read_states(local: Tensor, read: Tensor, states: Tensor) -> Tensor:
    """Add what every chunk reads from the state in front of it: `[B, n C, H, V]`."""
    out = local + read @ states.view(*local.shape[:3], *states.shape[2:]).mT
    return out.permute(1, 0, 3, 2, 4).flatten(1, 2)


def _short_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Depthwise causal convolution and SiLU of `x [B, S, C]`, `weight [C, W]`."""
    length, width = x.shape[1], weight.shape[1]
    padded = F.pad(x, (0, 0, width - 1, 0)).to(compute_dtype(x))
    return F.silu(sum(padded[:, j : j + length] * weight[:, j] for j in range(width)))


def _kda_inputs(
    qkv: Tensor, gate: Tensor, beta: Tensor, decay_rate: Tensor, dt_bias: Tensor, bound: float | None,
    conv_weight: Tensor, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Convolution, norms and gates of a layer: what `_chunks` takes."""
    heads, keys = gate.shape[2:]
    mixed = _short_conv(qkv, conv_weight)
    q, k, v = torch.split(mixed, [heads * keys, heads * keys, mixed.shape[-1] - 2 * heads * keys], dim=-1)
    log_decay = kda_gate(gate, ops.KDAParams(decay_rate, dt_bias, bound))
    wide = torch.sigmoid(beta.to(compute_dtype(beta)))
    q, k, v = (x.unflatten(-1, (heads, -1)) for x in (q, k, v))
    q, k = l2_norm(q) * scale, l2_norm(k)
    return tuple(map(_cut, (q, k, v, log_decay, wide[..., None])))


def _kda_back(
    local: Tensor, read: Tensor, states: Tensor, out_gate: Tensor, norm_weight: Tensor, norm_eps: float
) -> Tensor:
    """States read, normed and gated like `out_gate [B, n C, H, V]`."""
    out = _read_states(local, read, states)
    normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + norm_eps) * norm_weight
    return (normed * torch.sigmoid(out_gate.to(normed.dtype))).to(out_gate.dtype)


def _kda_mixer(
    qkv, gate, beta, out_gate, *, params, conv_weight, norm_weight, norm_eps, scale, state=None, conv_state=None,
    slots=None, cu_seqlens, saves=None, verify=None,
):  # fmt: skip
    """See `k3lib.ops.kda_mixer`; stateless. Sequences are filled up to whole chunks, behind all that counts."""
    batch, length = _rectangle(qkv, cu_seqlens)
    missing = -length % CHUNK
    qkv, gate, beta, out_gate = (
        F.pad(x.view(batch, length, *x.shape[1:]), (0, 0) * (x.ndim - 1) + (0, missing)) if missing
        else x.view(batch, length, *x.shape[1:])
        for x in (qkv, gate, beta, out_gate)
    )  # fmt: skip
    with _full_precision(qkv):
        a, b, local, read = _chunks(*_kda_inputs(qkv, gate, beta, *params, conv_weight, scale))
        states = _Scan.apply(a.flatten(1, 2), b.flatten(1, 2))
        out = _kda_back(local, read, states, out_gate, norm_weight, norm_eps)
    return out[:, :length].flatten(0, 1)


# ---- attention, norms, residuals ----------------------------------------------------------------


def _attention(q, k, v, *, cu_seqlens_q, cu_seqlens_k, causal, scale, return_lse=False):
    """See `k3lib.ops.attention_varlen`; queries and keys of the same tokens."""
    batch, length = _rectangle(q, cu_seqlens_q)
    if k.shape[0] != q.shape[0] or return_lse:
        raise ConfigError(f"training attention: {q.shape[0]} queries and {k.shape[0]} keys, return_lse={return_lse}")
    q, k, v = (x.view(batch, length, *x.shape[1:]).transpose(1, 2) for x in (q, k.to(q.dtype), v.to(q.dtype)))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    return out.transpose(1, 2).flatten(0, 1)


def _rms_norm(x, weight, *, eps):
    """See `k3lib.ops.rms_norm`; not rounded before the weight."""
    wide = x.to(torch.promote_types(compute_dtype(x), weight.dtype))
    return F.rms_norm(wide, weight.shape, weight.to(wide.dtype), eps)


def _read_blocks(
    p: Tensor, bank: Tensor, score_weight: Tensor, norm_weight: Tensor | None, eps: float, out_eps: float
) -> Tensor:
    rows = torch.cat([bank, p[:, None]], dim=1)
    scores = (rows * score_weight).sum(-1) * torch.rsqrt(rows.square().mean(-1) + eps)
    mix = (rows * scores.softmax(-1)[..., None]).sum(1)
    return mix if norm_weight is None else _rms_norm(mix, norm_weight, eps=out_eps)


def _attn_res(prefix, delta, bank, *, score_weight, out_norm_weight, num_blocks, write_block, eps, out_eps):
    """See `k3lib.ops.attn_res`; the residual stream stays in fp32."""
    p = delta if prefix is None else prefix if delta is None else prefix + delta
    p = p.to(compute_dtype(p))
    blocks = bank[:, :num_blocks].to(p.dtype)
    out = _read_blocks(p, blocks, score_weight.to(p.dtype), out_norm_weight, eps, out_eps)
    if write_block is None:
        return out, p
    bank[:, write_block] = p  # only where nothing is recorded
    return out, None


# ---- experts ------------------------------------------------------------------------------------


def quantile_bias(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """The correction bias under which every expert would have been chosen equally often by these tokens.

    One round of the alternation that solves the balanced assignment: a token's threshold is its best score that was not
    chosen; an expert's bias brings the quantile of its scores above these thresholds to zero.

    Args:
        scores: `[T, E]`, sigmoids.
        bias: `[E]`, of now.
        top_k: experts a token.

    Returns:
        `[E]`, with mean zero.
    """
    scores = scores[:: 1 + scores.shape[0] // 8192]  # enough for a quantile
    biased = scores + bias
    threshold = biased.topk(top_k + 1, dim=-1).values[:, -1:]
    rank = max(1, round(scores.shape[0] * (1 - top_k / scores.shape[1])))
    cut = (scores - threshold).kthvalue(rank, dim=0).values
    return cut.mean() - cut


def _route(x, weight, bias, *, top_k, num_groups=1, top_groups=1, renormalize, scale, ids=None):
    """See `k3lib.ops.route`; without groups."""
    now = _now()
    with _full_precision(x):
        dtype = compute_dtype(x)
        scores = torch.sigmoid(x.to(dtype) @ weight.to(dtype).t())
    if num_groups > top_groups:
        raise ConfigError(f"training: groups of experts are not implemented, got num_groups={num_groups}")
    with torch.no_grad():
        if ids is None:
            ids = (scores + bias.to(dtype)).topk(top_k, dim=-1).indices
        if now.balance:
            now.biases.append((bias, quantile_bias(scores, bias, top_k)))
            counts = torch.zeros_like(bias).index_add_(
                0, ids.flatten().long(), torch.ones_like(bias[:1]).expand(ids.numel())
            )
            now.loads.append(counts.max() / counts.mean())
    weights = scores.gather(1, ids.long())
    if renormalize and top_k > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routing(ids.to(torch.int32), weights * scale)


def fake_mxfp4(w: Tensor) -> Tensor:
    """What MXFP4 makes of weights `[..., I]`, with the gradient of the identity.

    The values are those of `mxfp4_decode(*mxfp4_encode(w))`, without packing and without waiting for the device.
    """
    groups = w.detach().unflatten(-1, (-1, 32))
    amax = groups.abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(amax)
    exponent = exponent - 3 + (mantissa >= 0.875).int()
    scale = torch.ldexp(torch.ones_like(amax), exponent)
    size = (groups / scale).abs().clamp(max=6)
    # steps of 1/2 below 2, of 1 below 4, of 2 up to 6; round() takes ties to the even step, which is the even code
    step_size = 0.5 + 0.5 * (size >= 2) + (size >= 4)
    rounded = torch.copysign((size / step_size).round() * step_size, groups) * scale
    rounded = torch.where(amax > 0, rounded, 0).flatten(-2)
    return w + (rounded - w).detach()


def _situ(gate_up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    gate, up = gate_up.to(compute_dtype(gate_up)).chunk(2, dim=-1)
    if linear_beta is not None:
        up = linear_beta * torch.tanh(up / linear_beta)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up


def _situ_and_mul(x, *, beta, linear_beta):
    """See `k3lib.ops.situ_and_mul`."""
    return _situ(x, beta, linear_beta).to(x.dtype)


def _weighted_situ(gate_up: Tensor, share: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """`[T, E, 2I]` to `[T, E, I]`, times each expert's share of each token."""
    return (_situ(gate_up, beta, linear_beta) * share[..., None]).to(gate_up.dtype)


def _experts(x, ids, weights, prepared, *, act_fn):
    """See `k3lib.ops.experts`."""
    now, (w13, w2) = _now(), (prepared.w13, prepared.w2)
    if now.qat:
        w13, w2 = fake_mxfp4(w13), fake_mxfp4(w2)
    run = _chosen_experts if now.grouped else _all_experts
    return run(x, ids.long(), weights, w13, w2, act_fn)


def _all_experts(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, act: SiTU) -> Tensor:
    """All experts of every token, those not chosen times zero: two products, E / k times the work."""
    share = weights.new_zeros(x.shape[0], len(w13)).scatter(1, ids, weights)
    gate_up = F.linear(x, w13.flatten(0, 1)).view(x.shape[0], *w13.shape[:2])
    hidden = _weighted_situ(gate_up, share, act.beta, act.linear_beta)
    return F.linear(hidden.flatten(1), w2.transpose(0, 1).flatten(1))


class _Permute(torch.autograd.Function):
    """Rows in another order, whose gradient is another lookup instead of a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


def _chosen_experts(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, act: SiTU) -> Tensor:
    """The chosen experts only, tokens sorted by expert: grouped products, which autocast does not know."""
    count, k = ids.shape
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    inverse = order.argsort()
    ends = torch.zeros(len(w13), dtype=torch.int32, device=x.device)
    ends = ends.index_add(0, flat, torch.ones_like(flat, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
    rows = _Permute.apply(x[:, None].expand(-1, k, -1).reshape(count * k, -1), order, inverse)
    share = _Permute.apply(weights.reshape(-1, 1), order, inverse)
    gate_up = torch._grouped_mm(rows, w13.to(x.dtype).mT, offs=ends)
    hidden = _weighted_situ(gate_up[:, None], share, act.beta, act.linear_beta)[:, 0]
    out = torch._grouped_mm(hidden, w2.to(x.dtype).mT, offs=ends)
    return _Permute.apply(out, inverse, order).view(count, k, -1).sum(1)


# ---- in the registry ----------------------------------------------------------------------------

_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "kda_mixer": _kda_mixer,
    "attention_varlen": _attention,
    "rms_norm": _rms_norm,
    "attn_res": _attn_res,
    "route": _route,
    "situ_and_mul": _situ_and_mul,
    "experts": _experts,
}


def _supports(spec: object) -> str | None:
    stateful = getattr(spec, "state_dtype", None) is not None or getattr(spec, "saves", "none") != "none"
    return "needs a stateless call of whole sequences" if stateful else None


@contextlib.contextmanager
def training_ops() -> Iterator[None]:
    """Compute the model's ops with the functions of this module, then put the registry back."""
    platforms = frozenset({"cpu", "cuda"})
    added = []
    try:
        for name, run in _IMPLEMENTATIONS.items():
            ops.ops()[name].add(
                Impl(op=name, name=NAME, run=run, platforms=platforms, priority=1000, supports=_supports)
            )
            added.append(name)
        with ops.use_backend(NAME):
            yield
    finally:
        for name in added:
            ops.ops()[name].remove(NAME)
