"""Few-token kernels for the CPU in plain torch.

A decode step of a small model on a CPU is bound by the number of torch calls, not by arithmetic: a call costs about
3 µs, one with a Python scalar about 7 µs (measured on two cores, torch 2.13). These implementations compute what the
references say in fewer calls, with constants as tensors. They hold for float32 and bfloat16; float64 goes to the
references.
"""

from __future__ import annotations

import functools

import torch
from torch.nn import functional as F

from k3lib.errors import ConfigError
from k3lib.ops.activation import SiTUSpec, situ_and_mul
from k3lib.ops.attn_res import AttnResSpec, attn_res
from k3lib.ops.kda import KDASpec, kda_mixer
from k3lib.ops.mla import MLASpec, RowsSpec, mla_decode, store_rows
from k3lib.ops.moe import ExpertsSpec, RouteSpec, Routing, experts, route
from k3lib.ops.norm import NormSpec, rms_norm
from k3lib.ops.registry import register

_NARROW = (torch.float32, torch.bfloat16)
# `deterministic` only where no path inside depends on how many requests or routes there are
_FEW_ROUTES = 64  # above it the reference's loop over experts reads less
# decoded matrices of all routes; above it the loop is faster, too: up to 20 times at 64 routes of experts 512 x 512
_FEW_BYTES = 16 << 20
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


def _inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """`rsqrt(mean(x²) + eps)` over the last axis of an fp32 tensor, which is kept."""
    squares = torch.linalg.vecdot(x, x)
    return torch.add(_constant(eps), squares, alpha=1 / x.shape[-1]).rsqrt().unsqueeze(-1)


def _supports_norm(spec: NormSpec) -> str | None:
    return _dtypes(spec.dtype)


@register(rms_norm, name="cpu", platforms=CPU, priority=10, deterministic=True, supports=_supports_norm)
def rms_norm_cpu(x, weight, *, eps):
    """See `k3lib.ops.rms_norm`."""
    if weight.shape != x.shape[-1:]:
        raise ConfigError(f"weight has shape {tuple(weight.shape)}, x needs {tuple(x.shape[-1:])}")
    wide = x.float()
    if x.dtype == torch.float32 and weight.dtype == torch.float32:
        return wide * _inverse_rms(wide, eps) * weight
    return ((wide * _inverse_rms(wide, eps)).to(x.dtype) * weight).to(x.dtype)


def _supports_situ(spec: SiTUSpec) -> str | None:
    return _dtypes(spec.dtype) or (None if spec.capped_up else "needs linear_beta, got None")


@register(situ_and_mul, name="cpu", platforms=CPU, priority=10, deterministic=True, supports=_supports_situ)
def situ_and_mul_cpu(x, *, beta, linear_beta):
    """See `k3lib.ops.situ_and_mul`."""
    if x.shape[-1] % 2:
        raise ConfigError(f"situ_and_mul needs an even last axis [gate | up], got {x.shape[-1]}")
    gate, up = x.float().chunk(2, dim=-1)
    capped = torch.tanh(gate / _constant(beta)) * torch.tanh(up / _constant(linear_beta))
    return (capped * torch.sigmoid(gate) * _constant(beta * linear_beta)).to(x.dtype)


def _supports_attn_res(spec: AttnResSpec) -> str | None:
    return _dtypes(spec.dtype)


@register(attn_res, name="cpu", platforms=CPU, priority=10, deterministic=True, supports=_supports_attn_res)
def attn_res_cpu(prefix, delta, bank, *, score_weight, out_norm_weight, num_blocks, write_block, eps, out_eps):
    """See `k3lib.ops.attn_res`."""
    if prefix is None or delta is None or not num_blocks <= bank.shape[1] or (write_block or 0) >= bank.shape[1]:
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
    p = prefix + delta
    rows = torch.cat([bank.narrow(1, 0, num_blocks), p.unsqueeze(1)], dim=1).float()
    scores = (rows @ score_weight) * _inverse_rms(rows, eps).squeeze(-1)
    out = (scores.softmax(-1).unsqueeze(1) @ rows).squeeze(1).to(p.dtype)
    if out_norm_weight is not None:
        out = rms_norm_cpu(out, out_norm_weight, eps=out_eps)
    if write_block is None:
        return out, p
    bank[:, write_block] = p
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
    scores = torch.sigmoid(F.linear(x.float(), weight.float()))
    if ids is None:
        chosen = (scores + bias.float()).sort(dim=-1, descending=True, stable=True).indices.narrow(1, 0, top_k)
        ids = chosen.int()
    else:
        chosen = ids.long()
    weights = scores.gather(1, chosen)
    if renormalize and top_k > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + _constant(1e-20))
    return Routing(ids, weights if scale == 1 else weights * scale)


def _supports_experts(spec: ExpertsSpec) -> str | None:
    return _dtypes(spec.activations)


@register(experts, name="cpu", platforms=CPU, priority=10, supports=_supports_experts)
def experts_cpu(x, ids, weights, prepared, *, act_fn):
    """See `k3lib.ops.experts`: for few routes the matrices of each route are read once, without a loop."""
    routes = ids.numel()
    fits = x.shape[-1] == prepared.width and ids.shape == weights.shape and len(ids) == len(x)
    few = 0 < routes <= min(_FEW_ROUTES, _FEW_BYTES // (3 * prepared.intermediate * x.shape[-1] * x.element_size()))
    if not (fits and few) or act_fn.linear_beta is None:
        return experts.reference(x, ids, weights, prepared, act_fn=act_fn)
    chosen = ids.flatten()
    host = chosen.tolist()
    first = prepared.first_expert
    if min(host) < first or max(host) >= first + prepared.num_experts:
        return experts.reference(x, ids, weights, prepared, act_fn=act_fn)
    local = chosen.long() - first if first else chosen.long()
    w13, w2 = prepared.decode(local, x.dtype)  # [routes, 2I, L], [routes, L, I]
    if x.shape[0] == 1:
        both = F.linear(x, w13.flatten(0, 1)).view(routes, -1)  # all experts of a token as one matrix
    else:
        both = torch.bmm(w13, x.repeat_interleave(ids.shape[1], 0).unsqueeze(-1)).squeeze(-1)
    hidden = situ_and_mul_cpu(both, beta=act_fn.beta, linear_beta=act_fn.linear_beta)
    out = (w2 * hidden.unsqueeze(1)).sum(-1) if x.dtype == torch.float32 else torch.bmm(w2, hidden.unsqueeze(-1))
    out = out.view(*ids.shape, x.shape[1]).float()
    return (weights.view(ids.shape[0], 1, -1) @ out).squeeze(1).to(x.dtype)


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
    )
    if not plain:  # padding, empty requests, and everything that the reference refuses with a reason
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
    recorded = torch.is_grad_enabled()
    # neighbouring slots are a view of the pool; while gradients are recorded the pool is only written at the end
    view = not recorded and rows == list(range(rows[0], rows[0] + count))
    index = slots.long()
    past = conv_state.narrow(0, rows[0], count) if view else conv_state.index_select(0, index)
    window = torch.cat([past.to(qkv.dtype), qkv.unsqueeze(1)], dim=1)
    after = window.narrow(1, 1, conv_state.shape[1])
    if view:
        past.copy_(after)
    else:
        conv_state.index_copy_(0, index, after.to(conv_state.dtype))
    mixed = F.silu((window.float() * conv_weight.t()).sum(1)).to(qkv.dtype).float()
    both = mixed.narrow(1, 0, 2 * heads * key_dim).view(count, 2, heads, key_dim)
    v = mixed.narrow(1, 2 * heads * key_dim, heads * out_gate.shape[2]).view(count, heads, -1)
    both = both * (torch.linalg.vecdot(both, both) + _constant(1e-6)).rsqrt().unsqueeze(-1)
    q, k = both.unbind(1)

    logits = gate.float() + params.dt_bias.view(heads, key_dim)
    rate = params.A_log.exp().unsqueeze(-1)
    if params.lower_bound is None:
        log_decay = -rate * F.softplus(logits)
    else:
        log_decay = torch.sigmoid(rate * logits) * _constant(params.lower_bound)
    before = state.narrow(0, rows[0], count) if view else state.index_select(0, index)
    s = before.float() * log_decay.exp().unsqueeze(2)
    error = v - (s * k.unsqueeze(2)).sum(-1)
    s = torch.addcmul(s, (error * torch.sigmoid(beta.float()).unsqueeze(-1)).unsqueeze(-1), k.unsqueeze(2))
    if view:
        before.copy_(s)
    else:
        state.index_copy_(0, index, s.to(state.dtype))
    out = (s * (q * _constant(scale)).unsqueeze(2)).sum(-1)
    out = out.to(qkv.dtype).float()
    normed = out * _inverse_rms(out, norm_eps) * norm_weight
    return (normed * torch.sigmoid(out_gate.float())).to(qkv.dtype)
