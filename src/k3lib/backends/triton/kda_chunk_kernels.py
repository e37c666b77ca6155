"""Chunked KDA prefill in three phases, every large product on tensor cores.

Shapes: T packed tokens, B requests, H heads, K key dim, V value dim, C tokens a chunk, J segments a request.

1. `_chunk_kernel`, a program a chunk and head: decays, normalised q and k, the pair matrices, the inverse of the
   triangular system. It leaves what a state S `[V, K]` turns into results with: `M = S e^{mid}`,
   `u = (v - M k_inᵀ) solveᵀ`, `o = M q_inᵀ + u pairsᵀ`, `S' = (M + u k_out) e^{end - mid}`, u, v and o `[V, C]`
   (`qk_in` holds k_in, then q_in; `pairs` q with k, then `solve`; `decay` both factors).
2. Long requests among few heads are cut into J segments. `_summary_kernel` runs each segment from zero (the first one
   from the true state) and its transition on the identity; `_compose_kernel` chains the few results.
3. `_output_kernel` runs each segment, or the whole request, from its true state and writes outputs and states.

Decays: with a bounded gate the running log decay G of a chunk, taken from its middle, spans ±C/2 · bound, so that
`e^{G_i - mid}` (q_in, k_in) and `e^{mid - G_j}` (k_out) are representable and pairs of tokens are one product. The
sums themselves are products with matrices of 0 and ±1, of logs in fp16 terms: one (11 bits, as the factors have 8) for
bf16, else two.
Bound: phase 1 by latency and instructions, phases 2 and 3 by the serial chain of dependent products of a chunk. There
the state is the left operand of every product and stays in registers, as do u and its products; what a chunk reads is
under way two chunks before.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK = tl.constexpr(16)  # rows that are solved by substitution; larger blocks are merged by products
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _count_chunks(cu_seqlens, pieces, index, mask, SAVES: tl.constexpr, C: tl.constexpr):
    """First token, tokens, chunks, request and save of pieces; without saves a piece is a request."""
    if SAVES:
        request = tl.load(pieces + index * 4, mask=mask, other=0)
        begin = tl.load(cu_seqlens + request, mask=mask, other=0).to(tl.int32)
        length = tl.load(cu_seqlens + request + 1, mask=mask, other=0).to(tl.int32) - begin
        first = tl.load(pieces + index * 4 + 1, mask=mask, other=0)
        last = tl.load(pieces + index * 4 + 2, mask=mask, other=0)
        save = tl.load(pieces + index * 4 + 3, mask=mask, other=-1)
        first = tl.minimum(first, length)
        last = tl.where(last < 0, length, tl.minimum(last, length))
        begin += first
        length = tl.maximum(last - first, 0)
        chunks = (length + C - 1) // C
        chunks = tl.where((save >= 0) & (chunks == 0), 1, chunks)  # two saves at one place: an empty chunk
    else:
        request = index
        begin = tl.load(cu_seqlens + index, mask=mask, other=0).to(tl.int32)
        length = tl.load(cu_seqlens + index + 1, mask=mask, other=0).to(tl.int32) - begin
        save = index * 0 - 1
        chunks = (length + C - 1) // C
    return begin, length, tl.where(mask, chunks, 0), request, save


@triton.jit(
    do_not_specialize=["num_requests", "num_pieces"],
    do_not_specialize_on_alignment=["cu_seqlens", "pieces"],
)
def _plan_kernel(
    cu_seqlens, pieces, table, begins, signs, num_requests, num_pieces,
    SAVES: tl.constexpr, C: tl.constexpr, N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rows (first token, tokens, save) of the chunk table, the first chunk of each request, the matrices of sums.

    `signs` are matrices of 0, 1 and -1 that turn the negated log decays of a chunk into sums: `[C, C]`, of each token
    since the middle (the other way before it), then `[16, C]`, until the middle, and after it, and nothing.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    piece = tl.program_id(0)
    if piece == num_pieces:
        i = tl.arange(0, C)[:, None]
        t = tl.arange(0, C)[None, :]
        at = signs + i * C + t
        late = (t > C // 2) & (t <= i)
        early = (t <= C // 2) & (t > i)
        tl.store(at, early.to(tl.float16) - late.to(tl.float16))
        i = tl.arange(0, 16)[:, None]
        ends = ((i == 0) & (t <= C // 2)) | ((i == 1) & (t > C // 2))
        tl.store(signs + C * C + i * C + t, -ends.to(tl.float16))
        return
    lanes = tl.arange(0, N)
    before = tl.zeros([N], dtype=tl.int32)
    for first in range(0, piece, N):
        index = first + lanes
        _, _, chunks, _, _ = _count_chunks(cu_seqlens, pieces, index, index < piece, SAVES, C)
        before += chunks
    place = tl.sum(before, axis=0)
    begin, length, count, request, save = _count_chunks(cu_seqlens, pieces, piece, piece >= 0, SAVES, C)
    opens = True
    if SAVES:
        opens = tl.load(pieces + piece * 4 + 1) == 0
    tl.store(begins + request, place, mask=opens)
    tl.store(begins + num_requests, place + count, mask=piece == num_pieces - 1)
    for first in range(0, count, N):
        index = first + lanes
        row = table + (place + index) * 4
        mask = index < count
        tl.store(row, begin + index * C, mask=mask)
        tl.store(row + 1, tl.minimum(length - index * C, C), mask=mask)
        tl.store(row + 2, tl.where(index == count - 1, save, -1), mask=mask)


@triton.jit
def _forgets(gate, at, live, bias, rate, inverse_bound):
    """Negated log2 of the decays as one fp16 term, and what it leaves: 22 bits together."""
    logits = tl.load(gate + at, mask=live, other=0.0).to(tl.float32)
    root = tl.rsqrt(inverse_bound + inverse_bound * tl.exp2(rate * logits + bias))
    g = root * root
    high = g.to(tl.float16)
    return high, (g - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _inverse_norm(x, at, live):
    wide = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, axis=1) + 1e-6)[:, None]


@triton.jit
def _product(a, b, PRECISION: tl.constexpr):
    """Matrix product of fp32 tiles.

    Tensor cores cut the last 13 bits of tf32 operands off, and where all keys point one way the errors of all tokens
    add up: half of the last place that remains is added first.
    """
    if PRECISION == "tf32":
        a = (a.to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True)
        b = (b.to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _merge(inverse, system, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """From the inverses of diagonal blocks of SIZE rows to those of twice the size."""
    i = tl.arange(0, system.shape[0])[:, None]
    j = tl.arange(0, system.shape[0])[None, :]
    below = (i // (2 * SIZE) == j // (2 * SIZE)) & (i // SIZE > j // SIZE)
    part = _product(tl.where(below, system, 0.0), inverse, PRECISION)
    return inverse - _product(inverse, part, PRECISION)


@triton.jit
def _sums(signs, high, low, EXACT: tl.constexpr):
    """Sums of log decays as a matrix product: of 11 bits, or of 22 in two terms."""
    sums = tl.dot(signs, high)
    if EXACT:
        sums = tl.dot(signs, low, acc=sums)
    return sums


@triton.jit(do_not_specialize=["num_requests"])
def _chunk_kernel(
    q, k, gate, beta, A_log, dt_bias, table, begins, signs,
    qk_in, k_out, pairs, decay, scratch,
    num_requests, heads,
    q_token, q_head, k_token, k_head, gate_token, gate_head, beta_token, beta_head,
    inverse_bound, scale,
    C: tl.constexpr, K: tl.constexpr, S: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Everything of a chunk that does not depend on the state."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    pid = tl.program_id(0)
    chunk = pid // heads
    head = pid % heads
    if chunk >= tl.load(begins + num_requests):
        return
    first = tl.load(table + chunk * 4).to(tl.int64)
    count = tl.load(table + chunk * 4 + 1)
    dot: tl.constexpr = qk_in.dtype.element_ty
    EXACT: tl.constexpr = dot != tl.bfloat16
    i = tl.arange(0, C)
    j = tl.arange(0, C)[None, :]
    live = (i < count)[:, None]
    tile = chunk.to(tl.int64) * heads + head
    q += first * q_token + head * q_head
    k += first * k_token + head * k_head
    gate += first * gate_token + head * gate_head
    beta += first * beta_token + head * beta_head
    k_in = qk_in + tile * (2 * C * K)
    q_in = k_in + C * K
    k_out += tile * (C * K)
    pairs += tile * (2 * C * C)
    decay += tile * (2 * K)
    at_q = i[:, None] * q_token
    at_k = i[:, None] * k_token
    at_gate = i[:, None] * gate_token
    written = tl.load(beta + i * beta_token, mask=i < count, other=0.0)
    strength = tl.sigmoid(written.to(tl.float32))
    every = tl.arange(0, K)[None, :]
    k_norm = _inverse_norm(k, at_k + every, live)
    q_norm = _inverse_norm(q, at_q + every, live) * scale
    rate = -LOG2_E * tl.exp(tl.load(A_log + head))
    bounds = tl.where(live, inverse_bound, 1e38)  # tokens that are not there forget nothing
    at_pair = i[:, None] * C + j
    since_middle = tl.load(signs + at_pair)
    end = tl.arange(0, 16)[:, None]
    until = tl.load(signs + C * C + end * C + j)
    k_pairs = tl.zeros([C, C], dtype=tl.float32)
    q_pairs = tl.zeros([C, C], dtype=tl.float32)
    for part in range(0, K, S):
        col = part + tl.arange(0, S)
        at = i[:, None] * K + col[None, :]
        bias = rate * tl.load(dt_bias + head * K + col)[None, :]
        high, low = _forgets(gate, at_gate + col[None, :], live, bias, rate, bounds)
        keys = tl.load(k + at_k + col[None, :], mask=live, other=0.0).to(tl.float32) * k_norm
        asked = tl.load(q + at_q + col[None, :], mask=live, other=0.0).to(tl.float32) * q_norm
        ends = tl.exp2(_sums(until, high, low, EXACT))
        tl.store(decay + end * K + col[None, :], ends, mask=end < 2)
        sums = _sums(since_middle, high, low, EXACT)
        growth = tl.exp2(sums)
        left = (keys * growth).to(dot)
        asked = (asked * growth).to(dot)
        right = (keys * tl.exp2(-sums)).to(dot)
        tl.store(k_in + at, left)
        tl.store(q_in + at, asked)
        tl.store(k_out + at, right)
        right = tl.trans(right)
        k_pairs = tl.dot(left, right, acc=k_pairs, input_precision=PRECISION)
        q_pairs = tl.dot(asked, right, acc=q_pairs, input_precision=PRECISION)
    q_pairs = tl.where(i[:, None] >= j, q_pairs, 0.0).to(dot)

    # (1 + system)⁻¹: substitution inside diagonal blocks, all columns at once, j innermost; then merges of neighbours
    system = tl.where(i[:, None] > j, k_pairs * strength[:, None], 0.0)
    blocks = scratch + tile * (2 * C * C * dot.primitive_bitwidth // 32)  # where `pairs` of this tile will be
    same_block = (i[:, None] // BLOCK) == (j // BLOCK)
    at_block = i[:, None] * BLOCK + j % BLOCK
    tl.store(blocks + at_block, system, mask=same_block)
    tl.debug_barrier()
    b = tl.arange(0, BLOCK)[None, :]
    top = (i // BLOCK) * BLOCK
    solved = tl.where(b == (i % BLOCK)[:, None], 1.0, 0.0)
    for step in tl.static_range(1, BLOCK):
        known = tl.load(blocks + (top + step)[:, None] * BLOCK + b)
        solved = tl.where(b == step, solved - tl.sum(known * solved, axis=1)[:, None], solved)
    tl.debug_barrier()
    tl.store(blocks + (top[:, None] + b) * BLOCK + (i % BLOCK)[:, None], solved)
    tl.debug_barrier()
    inverse = tl.load(blocks + at_block, mask=same_block, other=0.0)
    tl.debug_barrier()
    for level in tl.static_range(LEVELS):
        inverse = _merge(inverse, system, BLOCK << level, PRECISION)
    tl.store(pairs + at_pair, q_pairs)
    tl.store(pairs + C * C + at_pair, (inverse * strength[None, :]).to(dot))


@triton.jit
def _limit(table, end):
    """The token behind the last one of the chunks before `end`."""
    return tl.load(table + (end - 1) * 4) + tl.load(table + (end - 1) * 4 + 1)


@triton.jit
def _tokens(table, chunk, token, limit, SAVES: tl.constexpr, C: tl.constexpr):
    """First token of a chunk, and how many it has; `token` is right where no save shortens a chunk before."""
    count = tl.minimum(limit - token, C)
    if SAVES:
        token = tl.load(table + chunk * 4)
        count = tl.load(table + chunk * 4 + 1)
    return token.to(tl.int64), count


@triton.jit
def _advance(s, k_in, values, solve, until_middle, PRECISION: tl.constexpr):
    """The state `[V, K]` at the middle of a chunk, and u of its tokens `[V, C]` as an operand."""
    dot: tl.constexpr = k_in.dtype
    held = s * until_middle[None, :]
    # values are an operand, since the compiler reads operands ahead into shared memory
    solve = tl.trans(solve)
    u = tl.dot(tl.trans(values.to(dot)), solve, input_precision=PRECISION)
    known = tl.dot(held.to(dot), tl.trans(k_in), input_precision=PRECISION)
    u = tl.dot((-known).to(dot), solve, acc=u, input_precision=PRECISION)
    return held, u.to(dot)


@triton.jit(
    do_not_specialize=["num_requests", "num_slots", "num_segments"],
    do_not_specialize_on_alignment=["slots"],
)
def _summary_kernel(
    v, qk_in, k_out, pairs, decay, table, begins, state, slots, carry, transition,
    v_token, v_head, num_requests, num_slots, heads, num_segments,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N: tl.constexpr, STATE: tl.constexpr, SAVES: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """State after each segment but the last from zero (true for the first), and the transition of all but the first."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    blocks: tl.constexpr = (K + V) // N
    pid = tl.program_id(0)
    block = pid % blocks
    head = (pid // blocks) % heads
    request = (pid // blocks // heads) % num_requests
    segment = pid // blocks // heads // num_requests
    begin = tl.load(begins + request)
    end = tl.load(begins + request + 1)
    span = tl.cdiv(end - begin, num_segments)
    is_value = block < V // N
    if (begin + (segment + 1) * span >= end) | ((segment == 0) & (not is_value)):
        return
    i = tl.arange(0, C)
    j = tl.arange(0, C)
    row = tl.arange(0, K)
    col = block * N + tl.arange(0, N)
    at = col[:, None] * K + row[None, :]
    s = tl.where(row[None, :] == (col - V)[:, None], 1.0, 0.0)
    if STATE:
        slot = tl.load(slots + request).to(tl.int64)
        known = (slot > 0) & (slot < num_slots) & (segment == 0) & is_value
        s += tl.load(state + (slot * heads + head) * (K * V) + at, mask=known, other=0.0).to(tl.float32)
    start = begin + segment * span
    first = tl.load(table + start * 4)
    limit = _limit(table, end)
    v += head * v_head + col[None, :]
    for chunk in tl.range(start, start + span, num_stages=STAGES):
        tile = head.to(tl.int64) + chunk * heads
        at_k = (tile * C + i)[:, None] * K + row[None, :]
        token, count = _tokens(table, chunk, first + (chunk - start) * C, limit, SAVES, C)
        live = (i < count)[:, None] & is_value
        values = tl.load(v + (token + i)[:, None] * v_token, mask=live, other=0.0)
        solve = tl.load(pairs + (2 * tile + 1) * (C * C) + i[:, None] * C + j[None, :])
        until_middle = tl.load(decay + tile * (2 * K) + row)
        held, new = _advance(s, tl.load(qk_in + tile * (C * K) + at_k), values, solve, until_middle, PRECISION)
        s = tl.dot(new, tl.load(k_out + at_k), acc=held, input_precision=PRECISION)
        s *= tl.load(decay + tile * (2 * K) + K + row)[None, :]
    place = ((request * num_segments + segment + 1) * heads + head).to(tl.int64)
    if is_value:
        tl.store(carry + place * (K * V) + at, s)
    else:
        place -= heads
        tl.store(transition + place * (K * K) + (col - V)[:, None] * K + row[None, :], s)


@triton.jit(do_not_specialize=["num_requests", "num_segments"])
def _compose_kernel(
    carry, transition, begins, num_requests, heads, num_segments,
    K: tl.constexpr, V: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Turn the states after single segments into the states before them."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    blocks: tl.constexpr = V // N
    pid = tl.program_id(0)
    block = pid % blocks
    head = (pid // blocks) % heads
    request = pid // blocks // heads
    count = tl.load(begins + request + 1) - tl.load(begins + request)
    span = tl.cdiv(count, num_segments)
    row = tl.arange(0, K)
    at = (block * N + tl.arange(0, N))[:, None] * K + row[None, :]
    at_t = row[:, None] * K + row[None, :]
    place = ((request * num_segments) * heads + head).to(tl.int64)
    s = tl.load(carry + (place + heads) * (K * V) + at, mask=span < count, other=0.0)
    used = tl.cdiv(count, tl.maximum(span, 1))
    after = tl.load(carry + (place + 2 * heads) * (K * V) + at, mask=used > 2, other=0.0)
    for segment in range(1, used - 1):
        here = place + segment * heads
        change = tl.load(transition + here * (K * K) + at_t)
        s = tl.dot(s, change, acc=after, input_precision=PRECISION)
        after = tl.load(carry + (here + 2 * heads) * (K * V) + at, mask=segment + 2 < used, other=0.0)
        tl.store(carry + (here + heads) * (K * V) + at, s)


@triton.jit(
    do_not_specialize=["num_requests", "num_slots", "num_segments"],
    do_not_specialize_on_alignment=["slots", "save_slots"],
)
def _output_kernel(
    v, qk_in, k_out, pairs, decay, table, begins, out, state, slots, save_slots, carry,
    v_token, v_head, num_requests, num_slots, heads, num_segments,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N: tl.constexpr,
    STATE: tl.constexpr, SAVES: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    blocks: tl.constexpr = V // N
    pid = tl.program_id(0)
    block = pid % blocks
    head = (pid // blocks) % heads
    request = (pid // blocks // heads) % num_requests
    segment = pid // blocks // heads // num_requests
    begin = tl.load(begins + request)
    end = tl.load(begins + request + 1)
    stop = end
    start = begin
    if SPLIT:
        span = tl.cdiv(end - begin, num_segments)
        start = begin + segment * span
        stop = tl.minimum(start + span, end)
    if start >= stop:
        return
    i = tl.arange(0, C)
    j = tl.arange(0, C)
    row = tl.arange(0, K)
    col = block * N + tl.arange(0, N)
    at = head.to(tl.int64) * (K * V) + col[:, None] * K + row[None, :]
    s = tl.zeros([N, K], dtype=tl.float32)
    slot = tl.full([], 0, tl.int64)
    if STATE:
        slot = tl.load(slots + request).to(tl.int64)
        known = (slot > 0) & (slot < num_slots) & (segment == 0)
        s = tl.load(state + slot * heads * (K * V) + at, mask=known, other=0.0).to(tl.float32)
    if SPLIT:
        place = (request * num_segments + segment).to(tl.int64) * heads
        s += tl.load(carry + place * (K * V) + at, mask=segment > 0, other=0.0)
    first = tl.load(table + start * 4)
    limit = _limit(table, end)
    v += head * v_head + col[None, :]
    for chunk in tl.range(start, stop, num_stages=STAGES):
        tile = head.to(tl.int64) + chunk * heads
        at_k = (tile * C + i)[:, None] * K + row[None, :]
        at_pair = tile * (2 * C * C) + i[:, None] * C + j[None, :]
        token, count = _tokens(table, chunk, first + (chunk - start) * C, limit, SAVES, C)
        live = (i < count)[:, None]
        values = tl.load(v + (token + i)[:, None] * v_token, mask=live, other=0.0)
        until_middle = tl.load(decay + tile * (2 * K) + row)
        held, new = _advance(
            s, tl.load(qk_in + tile * (C * K) + at_k), values, tl.load(pairs + C * C + at_pair), until_middle, PRECISION
        )
        q_in = tl.load(qk_in + (tile + 1) * (C * K) + at_k)
        answer = tl.dot(held.to(q_in.dtype), tl.trans(q_in), input_precision=PRECISION)
        answer = tl.dot(new, tl.trans(tl.load(pairs + at_pair)), acc=answer, input_precision=PRECISION)
        s = tl.dot(new, tl.load(k_out + at_k), acc=held, input_precision=PRECISION)
        s *= tl.load(decay + tile * (2 * K) + K + row)[None, :]
        target = out + ((token + i) * heads + head)[None, :] * V + col[:, None]
        answer = tl.where(slot >= 0, answer, 0.0)
        tl.store(target, answer.to(out.dtype.element_ty), mask=(i < count)[None, :])
        if SAVES:
            save = tl.load(table + chunk * 4 + 2)
            goal = tl.load(save_slots + save, mask=save >= 0, other=0).to(tl.int64)
            wanted = (goal > 0) & (goal < num_slots) & (slot >= 0)
            tl.store(state + goal * heads * (K * V) + at, s.to(state.dtype.element_ty), mask=wanted)
    if STATE:
        final = (slot > 0) & (slot < num_slots) & (stop == end)
        tl.store(state + slot * heads * (K * V) + at, s.to(state.dtype.element_ty), mask=final)
