"""Router: logits of all experts, then the choice of k of them.

Shapes: T tokens, D hidden size, E experts, k experts a token, S parts of D.

For few tokens the product is split over D so that all multiprocessors read the weight, and its parts are added, in
order, by the kernel that chooses. That kernel has one program a token: sigmoid, bias, then a partial sort of 64-bit
keys, which hold the score above and the complement of the expert below, so that ties go to the lowest id. Expected
bound: memory (the weight) for few tokens, latency of the sort for the choice.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from k3lib.backends.triton.launch import launch_options
from k3lib.backends.triton.linear_kernels import launch_linear

# H200, 2026-11-30
SPLIT_TOKENS = 64  # up to so many the product is split
STEP = 128


class Split(NamedTuple):
    """Parts of D, experts of a program, warps, stages."""

    parts: int
    columns: int
    warps: int
    stages: int


SPLIT = Split(8, 32, 4, 4)
CHOICE_WARPS = 8
MANY_TOKENS = 1024  # from here on one warp: the chip is full


@triton.jit(do_not_specialize=["num_tokens"])
def _logits_kernel(
    x_ptr, w_ptr, out_ptr, num_tokens, D: tl.constexpr, EXPERTS: tl.constexpr, PART: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`out[part, t, e]`: the product over one part of D."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(1)
    tokens = tl.arange(0, M)
    experts = tl.program_id(0) * N + tl.arange(0, N)
    k = tl.arange(0, K)
    first = part * PART
    x_ptrs = x_ptr + tokens[:, None].to(tl.int64) * D + (first + k)[None, :]
    w_ptrs = w_ptr + tl.minimum(experts, EXPERTS - 1)[None, :] * D + (first + k)[:, None]
    acc = tl.zeros((M, N), tl.float32)
    for begin in range(0, PART, K):
        inside = k < tl.minimum(PART, D - first) - begin
        x = tl.load(x_ptrs + begin, mask=(tokens < num_tokens)[:, None] & inside[None, :], other=0.0)
        w = tl.load(w_ptrs + begin, mask=inside[:, None], other=0.0)
        acc = tl.dot(x, w.to(x.dtype), acc, input_precision="ieee")
    out = out_ptr + (part.to(tl.int64) * num_tokens + tokens[:, None]) * EXPERTS + experts[None, :]
    tl.store(out, acc, mask=(tokens < num_tokens)[:, None] & (experts < EXPERTS)[None, :])


@triton.jit
def _key(score, e):
    """A 64-bit integer that orders by score, then by the lowest id; a NaN counts as the largest."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)  # -0 equals 0
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(score == score, bits, 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - e).to(tl.int64)


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["given_ptr"],
)
def _choose_kernel(
    logits_ptr, bias_ptr, given_ptr, ids_ptr, weights_ptr, num_tokens, scale, EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, RENORMALIZE: tl.constexpr,
    REPLAY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Ids and weights of one token."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    if REPLAY:
        chosen = tl.load(given_ptr + token * TOP_K + slot, mask=slot < TOP_K, other=0)
        known = (slot < TOP_K) & (chosen >= 0) & (chosen < EXPERTS)
        logit = tl.zeros((SLOTS,), tl.float32)
        for part in tl.static_range(PARTS):
            logit += tl.load(logits_ptr + (part * num_tokens + token) * EXPERTS + chosen, mask=known, other=0.0)
        weight = tl.where(known, tl.sigmoid(logit), 0.0)
    else:
        e = tl.arange(0, WIDTH)
        inside = e < EXPERTS
        bias = tl.load(bias_ptr + e, mask=inside, other=0.0).to(tl.float32)
        logit = tl.zeros((WIDTH,), tl.float32)
        for part in tl.static_range(PARTS):
            logit += tl.load(logits_ptr + (part * num_tokens + token) * EXPERTS + e, mask=inside, other=0.0)
        score = tl.sigmoid(logit)
        key = tl.where(inside, _key(score + bias, e), -(2**63))
        best = tl.topk(key, SLOTS)
        chosen = (0x7FFFFFFF - (best & 0x7FFFFFFF)).to(tl.int32)
        # the scores are asked for again, not carried through the reductions
        logit = tl.zeros((SLOTS,), tl.float32)
        for part in tl.static_range(PARTS):
            logit += tl.load(logits_ptr + (part * num_tokens + token) * EXPERTS + chosen, mask=slot < TOP_K, other=0.0)
        weight = tl.where(slot < TOP_K, tl.sigmoid(logit), 0.0)
    if RENORMALIZE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    tl.store(ids_ptr + token * TOP_K + slot, chosen, mask=slot < TOP_K)
    tl.store(weights_ptr + token * TOP_K + slot, weight * scale, mask=slot < TOP_K)


def logits(x, weight, split=SPLIT):
    """`x·weightᵀ` in fp32 as `[parts, T, E]`, to be added over the parts; one part if `split` is None."""
    num_tokens, hidden = x.shape
    num_experts = weight.shape[0]
    same = x.dtype == weight.dtype
    if split is None or num_tokens > SPLIT_TOKENS or not same or x.dtype == torch.float32:
        if same and x.is_cuda and x.dtype != torch.float32:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)[None]
        return (x.float() @ weight.float().t())[None]
    if num_tokens == 1:
        return launch_linear(x, weight, out_dtype=torch.float32)[None]
    part = triton.cdiv(triton.cdiv(hidden, split.parts), STEP) * STEP
    parts = triton.cdiv(hidden, part)
    out = x.new_empty(parts, num_tokens, num_experts, dtype=torch.float32)
    _logits_kernel[(triton.cdiv(num_experts, split.columns), parts)](
        x, weight, out, num_tokens, D=hidden, EXPERTS=num_experts, PART=part,
        M=max(16, triton.next_power_of_2(num_tokens)), N=split.columns, K=STEP,
        num_stages=split.stages, **launch_options(x.device, split.warps),
    )  # fmt: skip
    return out


def choose(logits, bias, top_k, renormalize, scale, ids=None, warps=None):
    """Ids int32 and weights fp32, `[T, k]`, from the logits in parts."""
    parts, num_tokens, num_experts = logits.shape
    top_k = top_k if ids is None else ids.shape[1]
    chosen = bias.new_empty(num_tokens, top_k, dtype=torch.int32)
    weights = bias.new_empty(num_tokens, top_k, dtype=torch.float32)
    if num_tokens and top_k:
        _choose_kernel[(num_tokens,)](
            logits, bias, chosen if ids is None else ids, chosen, weights, num_tokens, float(scale),
            EXPERTS=num_experts, WIDTH=max(2, triton.next_power_of_2(num_experts)), PARTS=parts, TOP_K=top_k,
            SLOTS=max(2, triton.next_power_of_2(top_k)), RENORMALIZE=renormalize and top_k > 1, REPLAY=ids is not None,
            **launch_options(logits.device, warps or (CHOICE_WARPS if num_tokens < MANY_TOKENS else 1)),
        )  # fmt: skip
    return chosen, weights
