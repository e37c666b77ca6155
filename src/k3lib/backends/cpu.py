"""Few-token kernels for the CPU in plain torch.

A decode step of a small model on a CPU is bound by the number of torch calls, not by arithmetic: a call costs about
3 µs, one with a Python scalar about 7 µs (measured on two cores, torch 2.13). These implementations compute what the
references say in fewer calls, with constants as tensors. They hold for float32 and bfloat16; float64 goes to the
references.
"""

from __future__ import annotations

import functools
from collections import Counter

import torch
from torch.nn import functional as F

from k3lib.errors import ConfigError
from k3lib.ops.activation import SiTUSpec, situ_and_mul
from k3lib.ops.attn_res import AttnResSpec, attn_res
from k3lib.ops.kda import KDASpec, kda_mixer
from k3lib.ops.mla import MLASpec, RowsSpec, mla_decode, store_rows
from k3lib.ops.moe import ExpertsSpec, ExpertStore, ExpertWeights, RouteSpec, Routing, experts, route
from k3lib.ops.norm import NormSpec, rms_norm
from k3lib.ops.registry import register

_NARROW = (torch.float32, torch.bfloat16)
# `deterministic` only where no path inside depends on how many requests or routes there are
_FEW_ROUTES = 1024  # above it the reference, which holds the results of one expert at a time
# Matrices of the experts that a call needs, decoded: above it the reference, which holds those of one at a time.
_FEW_BYTES = 16 << 20
# Packed experts of a layer are decoded once and kept if that takes at most so many bytes: decoding costs a small model
# more than all else in a step. A layer of K3 would take 59 GB in bfloat16, 92 layers that just fit take 1.5 GB.
_KEPT_BYTES = 16 << 20
CPU = {"cpu"}


def _make_constant(value: float) -> torch.Tensor:
    with torch.inference_mode(mode=False):  # else it could not take part in a call that records gradients
        return torch.tensor(value, dtype=torch.float32)


_kept_constant = functools.cache(_make_constant)


def _constant(value: float) -> torch.Tensor:
    return torch.tensor(value) if torch.compiler.is_dynamo_compiling() else _kept_constant(value)


def _dtypes(*dtypes: torch.dtype) -> str | None:
    for dtype in dtypes:
        if dtype not in _NARROW:
            return f"needs float32 or bfloat16, got {dtype}"
    return None


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float32 else x.float()  # a comparison costs less than a call


def _inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """`rsqrt(mean(x²) + eps)` over the last axis of an fp32 tensor, which is kept."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_constant(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()


def _supports_norm(spec: NormSpec) -> str | None:
    return _dtypes(spec.dtype)


@register(rms_norm, name="cpu", platforms=CPU, priority=10, deterministic=True, supports=_supports_norm)
def rms_norm_cpu(x, weight, *, eps):
    """See `k3lib.ops.rms_norm`."""
    if weight.shape != x.shape[-1:]:
        raise ConfigError(f"weight has shape {tuple(weight.shape)}, x needs {tuple(x.shape[-1:])}")
    if x.dtype == torch.float32 and weight.dtype == torch.float32:
        return (x * _inverse_rms(x, eps)).mul_(weight)
    wide = x.float()
    return ((wide * _inverse_rms(wide, eps)).to(x.dtype) * weight).to(x.dtype)


def _supports_situ(spec: SiTUSpec) -> str | None:
    return _dtypes(spec.dtype) or (None if spec.capped_up else "needs linear_beta, got None")


@register(situ_and_mul, name="cpu", platforms=CPU, priority=10, deterministic=True, supports=_supports_situ)
def situ_and_mul_cpu(x, *, beta, linear_beta):
    """See `k3lib.ops.situ_and_mul`."""
    if x.shape[-1] % 2:
        raise ConfigError(f"situ_and_mul needs an even last axis [gate | up], got {x.shape[-1]}")
    gate, up = _wide(x).chunk(2, dim=-1)
    capped = torch.tanh(gate / _constant(beta)) * torch.tanh(up / _constant(linear_beta))
    out = (capped * torch.sigmoid(gate)).mul_(_constant(beta * linear_beta))
    return out if x.dtype == torch.float32 else out.to(x.dtype)


def _supports_attn_res(spec: AttnResSpec) -> str | None:
    return _dtypes(spec.dtype)


@register(attn_res, name="cpu", platforms=CPU, priority=10, deterministic=True, supports=_supports_attn_res)
def attn_res_cpu(prefix, delta, bank, *, score_weight, out_norm_weight, num_blocks, write_block, eps, out_eps):
    """See `k3lib.ops.attn_res`."""
    held = bank.shape[1]
    is_there = 0 <= num_blocks <= held and (write_block is None or 0 <= write_block < held)
    if (prefix is None and delta is None) or not is_there:
        return attn_res.reference(
            prefix,
            delta,
            bank,
            score_weight=score_weight,
            out_norm_weight=out_norm_weight,
            num_blocks=num_blocks,
            write_block=write_block,
            eps=eps,
            out_eps=out_eps,
        )
    p = delta if prefix is None else prefix if delta is None else prefix + delta
    rows = _wide(torch.cat([bank.narrow(1, 0, num_blocks), p.unsqueeze(1)], dim=1))
    scores = torch.matmul(rows, score_weight) * _inverse_rms(rows, eps).squeeze(-1)
    out = torch.bmm(scores.softmax(-1).unsqueeze(1), rows).squeeze(1)
    if p.dtype != torch.float32:
        out = out.to(p.dtype)
    if out_norm_weight is not None:
        out = rms_norm_cpu(out, out_norm_weight, eps=out_eps)
    if write_block is None:
        return out, p
    bank.select(1, write_block).copy_(p)
    return out, None


def _supports_route(spec: RouteSpec) -> str | None:
    if spec.num_groups > 1:
        return f"needs one group, got {spec.num_groups}"
    return _dtypes(spec.dtype)


@register(route, name="cpu", platforms=CPU, priority=10, deterministic=True, supports=_supports_route)
def route_cpu(x, weight, bias, *, top_k, num_groups=1, top_groups=1, renormalize, scale, ids=None):
    """See `k3lib.ops.route`."""
    if x.shape[-1] != weight.shape[-1] or bias.shape != weight.shape[:1]:
        raise ConfigError(f"route: x {tuple(x.shape)}, weight {tuple(weight.shape)}, bias {tuple(bias.shape)}")
    scores = torch.sigmoid(F.linear(_wide(x), _wide(weight)))
    if ids is None:
        chosen = (scores + _wide(bias)).sort(dim=-1, descending=True, stable=True).indices.narrow(1, 0, top_k)
        ids = chosen.int()
    else:
        chosen = ids.long()
    weights = scores.gather(1, chosen)
    if renormalize and top_k > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + _constant(1e-20))
    return Routing(ids, weights if scale == 1 else weights * scale)


def _supports_experts(spec: ExpertsSpec) -> str | None:
    return _dtypes(spec.activations)


def _plain(prepared: ExpertStore, dtype: torch.dtype) -> ExpertStore:
    """The same experts, as plain matrices if those are kept or stored."""
    if not isinstance(prepared, ExpertWeights) or prepared.format == "bf16" or torch.compiler.is_dynamo_compiling():
        return prepared
    size = 3 * prepared.num_experts * prepared.intermediate * prepared.width * dtype.itemsize
    return (prepared.decoded(dtype) if size <= _KEPT_BYTES else None) or prepared


@register(experts, name="cpu", platforms=CPU, priority=10, supports=_supports_experts)
def experts_cpu(x, ids, weights, prepared, *, act_fn):
    """See `k3lib.ops.experts`: for few routes the matrices of each expert are read once, without gathering them."""
    routes, top_k = ids.numel(), ids.shape[1]
    fits = x.shape[-1] == prepared.width and ids.shape == weights.shape and len(ids) == len(x)
    prepared = _plain(prepared, x.dtype)
    size = 3 * prepared.intermediate * prepared.width * x.element_size()
    few = 0 < routes <= _FEW_ROUTES and min(routes, prepared.num_experts) * size <= _FEW_BYTES
    if not (fits and few) or act_fn.linear_beta is None:
        return experts.reference(x, ids, weights, prepared, act_fn=act_fn)
    host = ids.flatten().tolist()
    first = prepared.first_expert
    if min(host) < first or max(host) >= first + prepared.num_experts:
        return experts.reference(x, ids, weights, prepared, act_fn=act_fn)
    one_token = len(x) == 1
    order = range(routes) if one_token else sorted(range(routes), key=host.__getitem__)
    which = [host[route] - first for route in order]
    if one_token:
        sizes, parts = [1] * routes, [x] * routes
    else:
        counts = Counter(which)  # in that order
        which, sizes = list(counts), list(counts.values())
        tokens = torch.tensor([route // top_k for route in order])
        parts = x.index_select(0, tokens).split_with_sizes(sizes)
    pairs = _matrices(prepared, which, x.dtype)
    both = torch.cat([F.linear(part, w13) for part, (w13, _) in zip(parts, pairs, strict=True)])
    hidden = situ_and_mul_cpu(both, beta=act_fn.beta, linear_beta=act_fn.linear_beta)
    parts = hidden.split_with_sizes(sizes)
    out = torch.cat([F.linear(part, w2) for part, (_, w2) in zip(parts, pairs, strict=True)])
    if not one_token:  # back to the order of the routes
        out = out.index_select(0, torch.tensor(sorted(range(routes), key=order.__getitem__)))
    out = torch.bmm(weights.unsqueeze(1), _wide(out).view(*ids.shape, -1)).squeeze(1)
    return out if x.dtype == torch.float32 else out.to(x.dtype)


def _matrices(prepared: ExpertStore, which: list[int], dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`w13` and `w2` of some experts, without a copy of those that are stored like this."""
    if isinstance(prepared, ExpertWeights) and prepared.dtype == dtype:
        return [(prepared.w13[e], prepared.w2[e]) for e in which]
    w13, w2 = prepared.decode(torch.tensor(which), dtype)
    return list(zip(w13.unbind(0), w2.unbind(0), strict=True))


def _supports_store(spec: RowsSpec) -> str | None:
    return _dtypes(spec.page_dtype)


@register(store_rows, name="cpu", platforms=CPU, priority=10, deterministic=True, supports=_supports_store)
def store_rows_cpu(values, pages, rows):
    """See `k3lib.ops.store_rows`."""
    host = rows.tolist()
    count = pages.shape[0] * pages.shape[1]
    if not host or min(host) <= 0 or max(host) >= count or values.shape != (len(host), pages.shape[2]):
        store_rows.reference(values, pages, rows)
        return
    pages.view(count, -1).index_copy_(0, rows, values.to(pages.dtype))


def _supports_mla(spec: MLASpec) -> str | None:
    if spec.tokens_per_request != "1":
        return f"needs one token a request, got {spec.tokens_per_request}"
    if spec.return_lse:
        return "needs return_lse=False, got True"
    return _dtypes(spec.dtype, spec.kv_dtype)


@register(mla_decode, name="cpu", platforms=CPU, priority=10, supports=_supports_mla)
def mla_decode_cpu(q, pages, *, latent_dim, page_table, key_lens, cu_seqlens, scale, return_lse=False, plan=None):
    """See `k3lib.ops.mla_decode`: a request at a time while they are few."""
    page_size, width = pages.shape[1:]
    lens = key_lens.tolist()
    few = 0 < len(lens) <= 4 and cu_seqlens.tolist() == list(range(len(lens) + 1)) and q.shape[2] == width
    if not few or page_table.shape[0] != len(lens) or not 0 < min(lens) <= max(lens) <= page_table.shape[1] * page_size:
        return mla_decode.reference(
            q,
            pages,
            latent_dim=latent_dim,
            page_table=page_table,
            key_lens=key_lens,
            cu_seqlens=cu_seqlens,
            scale=scale,
        )
    outs = []
    for i, length in enumerate(lens):
        used = page_table[i].narrow(0, 0, -(-length // page_size))
        rows = pages.index_select(0, used).view(-1, width).narrow(0, 0, length).float()
        scores = (q[i].float() @ rows.t()) * _constant(scale)
        outs.append(scores.softmax(-1) @ rows.narrow(1, 0, latent_dim))
    return torch.stack(outs).to(q.dtype)


def _records(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _supports_mixer(spec: KDASpec) -> str | None:
    if spec.tokens_per_request != "1":
        return f"needs one token a request, got {spec.tokens_per_request}"
    if spec.saves != "none" or spec.verify != "none":
        return f"needs saves=none and verify=none, got saves={spec.saves} and verify={spec.verify}"
    if spec.state_dtype is None:
        return "needs a state, got a stateless call"
    return _dtypes(spec.dtype, spec.state_dtype)


@register(kda_mixer, name="cpu", platforms=CPU, priority=10, supports=_supports_mixer)
def kda_mixer_cpu(
    qkv,
    gate,
    beta,
    out_gate,
    *,
    params,
    conv_weight,
    norm_weight,
    norm_eps,
    scale,
    state=None,
    conv_state=None,
    slots=None,
    cu_seqlens,
    saves=None,
    verify=None,
):
    """See `k3lib.ops.kda_mixer`: one token for each of B requests with a slot."""
    count, heads, key_dim = gate.shape
    rows = slots.tolist() if slots is not None else []
    plain = (
        count > 0
        and cu_seqlens.tolist() == list(range(count + 1))
        and len(set(rows)) == len(rows) == count
        and min(rows) > 0
        and conv_state is not None
        and max(rows) < min(state.shape[0], conv_state.shape[0])
        and state.shape[1:] == (heads, out_gate.shape[2], key_dim)
        and qkv.shape[1] == conv_state.shape[2] == conv_weight.shape[0] == heads * (2 * key_dim + out_gate.shape[2])
        and conv_state.shape[1] == conv_weight.shape[1] - 1
        and beta.shape == out_gate.shape[:2] == (count, heads)
        and norm_weight.shape == out_gate.shape[2:]
        and params.A_log.shape == (heads,)
        and params.dt_bias.numel() == heads * key_dim
        and not _records(qkv, gate, beta, out_gate, state, conv_state, conv_weight, norm_weight, *params[:2])
    )
    if not plain:  # padding, empty requests, gradients, and everything that the reference refuses with a reason
        return kda_mixer.reference(
            qkv,
            gate,
            beta,
            out_gate,
            params=params,
            conv_weight=conv_weight,
            norm_weight=norm_weight,
            norm_eps=norm_eps,
            scale=scale,
            state=state,
            conv_state=conv_state,
            slots=slots,
            cu_seqlens=cu_seqlens,
        )
    # neighbouring slots are a view of the pools
    view = rows == list(range(rows[0], rows[0] + count))
    index = None if view else slots.long()
    past = conv_state.narrow(0, rows[0], count) if view else conv_state.index_select(0, index)
    window = torch.cat([past if past.dtype == qkv.dtype else past.to(qkv.dtype), qkv.unsqueeze(1)], dim=1)
    after = window.narrow(1, 1, conv_state.shape[1])
    if view:
        past.copy_(after)
    else:
        conv_state.index_copy_(0, index, after.to(conv_state.dtype))
    mixed = F.silu(torch.linalg.vecdot(_wide(window), conv_weight.t().contiguous(), dim=1))
    if qkv.dtype != torch.float32:
        mixed = mixed.to(qkv.dtype).float()
    both = mixed.narrow(1, 0, 2 * heads * key_dim).view(count, 2, heads, 1, key_dim)
    both = both * torch.linalg.vecdot(both, both).add_(_constant(1e-6)).rsqrt_().unsqueeze(-1)
    q, k = both.unbind(1)  # [B, H, 1, K]
    v = mixed.narrow(1, 2 * heads * key_dim, heads * out_gate.shape[2]).view(out_gate.shape)

    rate, logits = params.A_log.exp().unsqueeze(-1), _wide(gate) + params.dt_bias.view(heads, key_dim)
    if params.lower_bound is None:
        decay = F.softplus(logits).mul_(rate).neg_().exp_()
    else:
        decay = logits.mul_(rate).sigmoid_().mul_(_constant(params.lower_bound)).exp_()
    before = state.narrow(0, rows[0], count) if view else state.index_select(0, index)
    s = _wide(before)  # fp32 is advanced where it lies
    # sums and outer products, not products of matrices: those of one column take twice the time
    s.mul_(decay.unsqueeze(2))
    error = (v - torch.linalg.vecdot(s, k)).mul_(torch.sigmoid(_wide(beta)).unsqueeze(-1))
    s.addcmul_(error.unsqueeze(-1), k)
    if not view:
        state.index_copy_(0, index, s.to(state.dtype))
    elif s is not before:
        before.copy_(s)
    out = torch.linalg.vecdot(s, q).mul_(_constant(scale))
    if qkv.dtype != torch.float32:
        out = out.to(qkv.dtype).float()
    normed = (out * _inverse_rms(out, norm_eps)).mul_(norm_weight).mul_(torch.sigmoid(_wide(out_gate)))
    return normed if qkv.dtype == torch.float32 else normed.to(qkv.dtype)
