"""Chunked KDA prefill in three phases, every large product on tensor cores.

Shapes: T packed tokens, B requests, H heads, K key dim, V value dim, C tokens a chunk, J segments a request.

1. `_chunk_kernel`, a program a chunk and head: decays, normalised q and k, the pair matrices, the inverse of the
   triangular system. It leaves what a state S turns into results with: `u = u0 + w S`, `o = q_in S + pairs u`,
   `S' = decay S + k_outᵀ u` (S key first here, w already negated; `wq` holds w, then q_in).
2. Long requests among few heads are cut into J segments. `_summary_kernel` runs each segment from zero (the first one
   from the true state) and its transition on the identity; `_compose_kernel` chains the few results.
3. `_output_kernel` runs each segment, or the whole request, from its true state and writes outputs and states.

Decays: with a bounded gate the running log decay of half a chunk, taken from its middle, spans ±C/4 · bound, so
`e^{G_i - mid}` and `e^{mid - G_j}` are representable and pairs of tokens are one matrix product. The sums themselves
are products with matrices of 0 and ±1, of logs in fp16 terms: one (11 bits, as the factors have 8) for bf16, else two.
Bound: phase 1 by latency at 8 warps a multiprocessor (registers) and by its exponentials, phases 2 and 3 by the serial
chain of two dependent products a chunk. State blocks live in registers; tiles stream through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
    SAVES: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Rows (first token, tokens, save) of the chunk table, the first chunk of each request, the matrices of sums.

    `signs` are four 0, 1 and -1 matrices that turn the log decays of half a chunk into exponents of its tokens: since
    the start, to the end, since the middle (negative before it), all.
    """
    piece = tl.program_id(0)
    if piece == num_pieces:
        half: tl.constexpr = C // 2
        i = tl.arange(0, half)[:, None]
        t = tl.arange(0, half)[None, :]
        at = signs + i * half + t
        late = (t >= half // 2) & (t <= i)
        early = (t < half // 2) & (t > i)
        tl.store(at, (t <= i).to(tl.float16))
        tl.store(at + half * half, (t > i).to(tl.float16))
        tl.store(at + 2 * half * half, late.to(tl.float16) - early.to(tl.float16))
        tl.store(at + 3 * half * half, (t + i >= 0).to(tl.float16))
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
def _log_decay(gate, at, live, bias, rate, inverse_bound):
    """log2 of the decays as one fp16 term, and what it leaves: 22 bits together."""
    logits = tl.load(gate + at, mask=live, other=float("-inf")).to(tl.float32)
    root = tl.rsqrt(inverse_bound + inverse_bound * tl.exp2(rate * logits + bias))
    g = -root * root
    high = g.to(tl.float16)
    return g, high, (g - high.to(tl.float32)).to(tl.float16)


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


@triton.jit
def _sums_and(sums, signs, high, low, EXACT: tl.constexpr):
    sums = tl.dot(signs, high, acc=sums)
    if EXACT:
        sums = tl.dot(signs, low, acc=sums)
    return sums


@triton.jit(do_not_specialize=["num_requests"])
def _chunk_kernel(
    q, k, v, gate, beta, A_log, dt_bias, table, begins, signs,
    wq, u0, k_out, pairs, decay, scratch,
    num_requests, heads, scratch_tile,
    q_token, q_head, k_token, k_head, v_token, v_head, gate_token, gate_head, beta_token, beta_head,
    inverse_bound, scale,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, S: tl.constexpr, SV: tl.constexpr, LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Everything of a chunk that does not depend on the state, in two halves: suffix 0 and 1."""
    pid = tl.program_id(0)
    chunk = pid // heads
    head = pid % heads
    if chunk >= tl.load(begins + num_requests):
        return
    first = tl.load(table + chunk * 4).to(tl.int64)
    count = tl.load(table + chunk * 4 + 1)
    dot: tl.constexpr = wq.dtype.element_ty
    EXACT: tl.constexpr = dot != tl.bfloat16
    H: tl.constexpr = C // 2
    i = tl.arange(0, H)
    j = tl.arange(0, H)[None, :]
    live0 = (i < count)[:, None]
    live1 = (i + H < count)[:, None]
    tile = chunk.to(tl.int64) * heads + head
    q += first * q_token + head * q_head
    k += first * k_token + head * k_head
    v += first * v_token + head * v_head
    gate += first * gate_token + head * gate_head
    beta += first * beta_token + head * beta_head
    w = wq + tile * (2 * C * K)
    q_in = w + C * K
    k_out += tile * (C * K)
    u0 += tile * (C * V)
    pairs += tile * (C * C)
    at_q = i[:, None] * q_token
    at_k = i[:, None] * k_token
    at_v = i[:, None] * v_token
    at_gate = i[:, None] * gate_token
    written0 = tl.load(beta + i * beta_token, mask=i < count, other=0.0)
    written1 = tl.load(beta + (i + H) * beta_token, mask=i + H < count, other=0.0)
    strength0 = tl.sigmoid(written0.to(tl.float32))[:, None]
    strength1 = tl.sigmoid(written1.to(tl.float32))[:, None]

    every = tl.arange(0, K)[None, :]
    k_norm0 = _inverse_norm(k, at_k + every, live0)
    k_norm1 = _inverse_norm(k, at_k + every + H * k_token, live1)
    q_norm0 = _inverse_norm(q, at_q + every, live0) * scale
    q_norm1 = _inverse_norm(q, at_q + every + H * q_token, live1) * scale
    rate = -LOG2_E * tl.exp(tl.load(A_log + head))
    up_to = tl.load(signs + i[:, None] * H + j)
    beyond = tl.load(signs + H * H + i[:, None] * H + j)
    since_middle = tl.load(signs + 2 * H * H + i[:, None] * H + j)
    all_of = tl.load(signs + 3 * H * H + i[:, None] * H + j)
    k_pairs0 = tl.zeros([H, H], dtype=tl.float32)
    k_pairs1 = tl.zeros([H, H], dtype=tl.float32)
    k_cross = tl.zeros([H, H], dtype=tl.float32)
    q_pairs0 = tl.zeros([H, H], dtype=tl.float32)
    q_pairs1 = tl.zeros([H, H], dtype=tl.float32)
    q_cross = tl.zeros([H, H], dtype=tl.float32)
    for part in range(0, K, S):
        col = part + tl.arange(0, S)
        at = i[:, None] * K + col[None, :]
        bias = rate * tl.load(dt_bias + head * K + col)[None, :]
        g0, high0, low0 = _log_decay(gate, at_gate + col[None, :], live0, bias, rate, inverse_bound)
        g1, high1, low1 = _log_decay(gate, at_gate + H * gate_token + col[None, :], live1, bias, rate, inverse_bound)
        tl.store(decay + tile * K + col, tl.exp2(tl.sum(g0 + g1, axis=0)))
        keys0 = tl.load(k + at_k + col[None, :], mask=live0, other=0.0).to(tl.float32) * k_norm0
        asked0 = tl.load(q + at_q + col[None, :], mask=live0, other=0.0).to(tl.float32) * q_norm0
        keys1 = tl.load(k + at_k + H * k_token + col[None, :], mask=live1, other=0.0).to(tl.float32) * k_norm1
        asked1 = tl.load(q + at_q + H * q_token + col[None, :], mask=live1, other=0.0).to(tl.float32) * q_norm1

        growth = tl.exp2(_sums(up_to, high0, low0, EXACT))
        tl.store(w + at, (keys0 * growth * strength0).to(dot))
        tl.store(q_in + at, (asked0 * growth).to(dot))
        sums = _sums(beyond, high0, low0, EXACT)
        right = tl.trans((keys0 * tl.exp2(sums)).to(dot))
        tl.store(k_out + at, (keys0 * tl.exp2(_sums_and(sums, all_of, high1, low1, EXACT))).to(dot))
        sums = _sums(up_to, high1, low1, EXACT)
        growth = tl.exp2(sums)
        k_cross = tl.dot((keys1 * growth).to(dot), right, acc=k_cross, input_precision=PRECISION)
        q_cross = tl.dot((asked1 * growth).to(dot), right, acc=q_cross, input_precision=PRECISION)
        growth = tl.exp2(_sums_and(sums, all_of, high0, low0, EXACT))
        tl.store(w + H * K + at, (keys1 * growth * strength1).to(dot))
        tl.store(q_in + H * K + at, (asked1 * growth).to(dot))
        tl.store(k_out + H * K + at, (keys1 * tl.exp2(_sums(beyond, high1, low1, EXACT))).to(dot))

        sums = _sums(since_middle, high0, low0, EXACT)
        growth = tl.exp2(sums)
        right = tl.trans((keys0 * tl.exp2(-sums)).to(dot))
        k_pairs0 = tl.dot((keys0 * growth).to(dot), right, acc=k_pairs0, input_precision=PRECISION)
        q_pairs0 = tl.dot((asked0 * growth).to(dot), right, acc=q_pairs0, input_precision=PRECISION)
        sums = _sums(since_middle, high1, low1, EXACT)
        growth = tl.exp2(sums)
        right = tl.trans((keys1 * tl.exp2(-sums)).to(dot))
        k_pairs1 = tl.dot((keys1 * growth).to(dot), right, acc=k_pairs1, input_precision=PRECISION)
        q_pairs1 = tl.dot((asked1 * growth).to(dot), right, acc=q_pairs1, input_precision=PRECISION)
    at_pair = i[:, None] * C + j
    causal = i[:, None] >= j
    tl.store(pairs + at_pair, tl.where(causal, q_pairs0, 0.0).to(dot))
    tl.store(pairs + H + at_pair, tl.zeros([H, H], dtype=dot))
    tl.store(pairs + H * C + at_pair, q_cross.to(dot))
    tl.store(pairs + H * C + H + at_pair, tl.where(causal, q_pairs1, 0.0).to(dot))

    # (1 + system)⁻¹: substitution inside diagonal blocks, all columns at once, j innermost; then merges of neighbours
    system0 = tl.where(i[:, None] > j, k_pairs0 * strength0, 0.0)
    system1 = tl.where(i[:, None] > j, k_pairs1 * strength1, 0.0)
    cross = k_cross * strength1
    blocks = scratch + tile * scratch_tile
    same_block = (i[:, None] // BLOCK) == (j // BLOCK)
    at_block = i[:, None] * BLOCK + j % BLOCK
    tl.store(blocks + at_block, system0, mask=same_block)
    tl.store(blocks + H * BLOCK + at_block, system1, mask=same_block)
    tl.debug_barrier()
    n = tl.arange(0, C)
    b = tl.arange(0, BLOCK)
    solved = tl.where(b[None, :] == (n % BLOCK)[:, None], 1.0, 0.0)
    for step in tl.static_range(1, BLOCK):
        known = tl.load(blocks + ((n // BLOCK) * BLOCK + step)[:, None] * BLOCK + b[None, :])
        solved = tl.where(b[None, :] == step, solved - tl.sum(known * solved, axis=1)[:, None], solved)
    tl.debug_barrier()
    tl.store(blocks + ((n // BLOCK) * BLOCK)[:, None] * BLOCK + b[None, :] * BLOCK + (n % BLOCK)[:, None], solved)
    tl.debug_barrier()
    inverse0 = tl.load(blocks + at_block, mask=same_block, other=0.0)
    inverse1 = tl.load(blocks + H * BLOCK + at_block, mask=same_block, other=0.0)
    for level in tl.static_range(LEVELS):
        inverse0 = _merge(inverse0, system0, 16 << level, PRECISION)
        inverse1 = _merge(inverse1, system1, 16 << level, PRECISION)
    cross = _product(cross, inverse0, PRECISION)
    cross = -_product(inverse1, cross, PRECISION)

    solve0 = inverse0.to(dot)
    solve1 = inverse1.to(dot)
    across = cross.to(dot)
    for part in range(0, K, S):
        at_row = i[:, None] * K + part + tl.arange(0, S)[None, :]
        upper = tl.load(w + at_row)
        lower = tl.load(w + H * K + at_row)
        tl.store(w + at_row, (-tl.dot(solve0, upper, input_precision=PRECISION)).to(dot))
        answers = tl.dot(across, upper, input_precision=PRECISION)
        answers = tl.dot(solve1, lower, acc=answers, input_precision=PRECISION)
        tl.store(w + H * K + at_row, (-answers).to(dot))
    for part in range(0, V, SV):
        col_v = part + tl.arange(0, SV)[None, :]
        at_out = i[:, None] * V + col_v
        upper = tl.load(v + at_v + col_v, mask=live0, other=0.0)
        lower = tl.load(v + at_v + H * v_token + col_v, mask=live1, other=0.0)
        upper = (upper.to(tl.float32) * strength0).to(dot)
        lower = (lower.to(tl.float32) * strength1).to(dot)
        tl.store(u0 + at_out, tl.dot(solve0, upper, input_precision=PRECISION).to(dot))
        answers = tl.dot(across, upper, input_precision=PRECISION)
        answers = tl.dot(solve1, lower, acc=answers, input_precision=PRECISION)
        tl.store(u0 + H * V + at_out, answers.to(dot))


@triton.jit(
    do_not_specialize=["num_requests", "num_slots", "num_segments"],
    do_not_specialize_on_alignment=["slots"],
)
def _summary_kernel(
    wq, u0, k_out, decay, begins, state, slots, carry, transition,
    num_requests, num_slots, heads, num_segments,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N: tl.constexpr, STATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """State after each segment but the last from zero (true for the first), and the transition of all but the first."""
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
    dot: tl.constexpr = wq.dtype.element_ty
    i = tl.arange(0, C)
    row = tl.arange(0, K)
    col = block * N + tl.arange(0, N)
    at = row[:, None] + col[None, :] * K
    s = tl.where(row[:, None] == (col - V)[None, :], 1.0, 0.0)
    if STATE:
        slot = tl.load(slots + request).to(tl.int64)
        known = (slot > 0) & (slot < num_slots) & (segment == 0) & is_value
        s += tl.load(state + (slot * heads + head) * (K * V) + at, mask=known, other=0.0).to(tl.float32)
    start = begin + segment * span
    stop = start + span
    tile = head.to(tl.int64) + start * heads
    # read a chunk ahead: the compiler only does so for tiles that are operands
    keep_next = tl.load(decay + tile * K + row)
    u_next = tl.load(u0 + (tile * C + i)[:, None] * V + col[None, :], mask=is_value, other=0.0)
    for chunk in range(start, stop):
        tile = head.to(tl.int64) + chunk * heads
        at_k = (tile * C + i)[:, None] * K + row[None, :]
        u = u_next.to(tl.float32)
        keep = keep_next
        ahead = tile + heads
        more = chunk + 1 < stop
        keep_next = tl.load(decay + ahead * K + row, mask=more, other=0.0)
        u_next = tl.load(u0 + (ahead * C + i)[:, None] * V + col[None, :], mask=is_value & more, other=0.0)
        u = tl.dot(tl.load(wq + tile * (C * K) + at_k), s.to(dot), acc=u, input_precision=PRECISION)
        s = tl.dot(tl.trans(tl.load(k_out + at_k)), u.to(dot), acc=s * keep[:, None], input_precision=PRECISION)
    place = ((request * num_segments + segment + 1) * heads + head).to(tl.int64)
    if is_value:
        tl.store(carry + place * (K * V) + at, s)
    else:
        place -= heads
        tl.store(transition + place * (K * K) + row[:, None] * K + (col - V)[None, :], s)


@triton.jit(do_not_specialize=["num_requests", "num_segments"])
def _compose_kernel(
    carry, transition, begins, num_requests, heads, num_segments,
    K: tl.constexpr, V: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Turn the states after single segments into the states before them."""
    blocks: tl.constexpr = V // N
    pid = tl.program_id(0)
    block = pid % blocks
    head = (pid // blocks) % heads
    request = pid // blocks // heads
    count = tl.load(begins + request + 1) - tl.load(begins + request)
    span = tl.cdiv(count, num_segments)
    row = tl.arange(0, K)
    at = row[:, None] + (block * N + tl.arange(0, N))[None, :] * K
    at_t = row[:, None] * K + row[None, :]
    place = ((request * num_segments) * heads + head).to(tl.int64)
    s = tl.load(carry + (place + heads) * (K * V) + at, mask=span < count, other=0.0)
    used = tl.cdiv(count, tl.maximum(span, 1))
    after = tl.load(carry + (place + 2 * heads) * (K * V) + at, mask=used > 2, other=0.0)
    for segment in range(1, used - 1):
        here = place + segment * heads
        change = tl.load(transition + here * (K * K) + at_t)
        s = tl.dot(change, s, acc=after, input_precision=PRECISION)
        after = tl.load(carry + (here + 2 * heads) * (K * V) + at, mask=segment + 2 < used, other=0.0)
        tl.store(carry + (here + heads) * (K * V) + at, s)


@triton.jit(
    do_not_specialize=["num_requests", "num_slots", "num_segments"],
    do_not_specialize_on_alignment=["slots", "save_slots"],
)
def _output_kernel(
    wq, u0, k_out, pairs, decay, table, begins, out, state, slots, save_slots, carry,
    num_requests, num_slots, heads, num_segments,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N: tl.constexpr,
    STATE: tl.constexpr, SAVES: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
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
    dot: tl.constexpr = wq.dtype.element_ty
    i = tl.arange(0, C)
    j = tl.arange(0, C)
    row = tl.arange(0, K)
    col = block * N + tl.arange(0, N)
    at = head.to(tl.int64) * (K * V) + row[:, None] + col[None, :] * K
    s = tl.zeros([K, N], dtype=tl.float32)
    slot = tl.full([], 0, tl.int64)
    if STATE:
        slot = tl.load(slots + request).to(tl.int64)
        known = (slot > 0) & (slot < num_slots) & (segment == 0)
        s = tl.load(state + slot * heads * (K * V) + at, mask=known, other=0.0).to(tl.float32)
    if SPLIT:
        place = (request * num_segments + segment).to(tl.int64) * heads
        s += tl.load(carry + place * (K * V) + at, mask=segment > 0, other=0.0)
    tile = head.to(tl.int64) + start * heads
    # read a chunk ahead: the compiler only does so for tiles that are operands
    keep_next = tl.load(decay + tile * K + row)
    u_next = tl.load(u0 + (tile * C + i)[:, None] * V + col[None, :])
    token_next = tl.load(table + start * 4)
    count_next = tl.load(table + start * 4 + 1)
    for chunk in range(start, stop):
        tile = head.to(tl.int64) + chunk * heads
        at_k = (tile * C + i)[:, None] * K + row[None, :]
        u = u_next.to(tl.float32)
        keep = keep_next
        token = token_next.to(tl.int64) + i
        count = count_next
        ahead = tile + heads
        more = chunk + 1 < stop
        keep_next = tl.load(decay + ahead * K + row, mask=more, other=0.0)
        u_next = tl.load(u0 + (ahead * C + i)[:, None] * V + col[None, :], mask=more, other=0.0)
        token_next = tl.load(table + chunk * 4 + 4, mask=more, other=0)
        count_next = tl.load(table + chunk * 4 + 5, mask=more, other=0)
        old = s.to(dot)
        u = tl.dot(tl.load(wq + tile * (C * K) + at_k), old, acc=u, input_precision=PRECISION)
        answer = tl.dot(tl.load(wq + (tile + 1) * (C * K) + at_k), old, input_precision=PRECISION)
        new = u.to(dot)
        s = tl.dot(tl.trans(tl.load(k_out + at_k)), new, acc=s * keep[:, None], input_precision=PRECISION)
        rows = tl.load(pairs + (tile * C + i)[:, None] * C + j[None, :])
        answer = tl.dot(rows, new, acc=answer, input_precision=PRECISION)
        answer = tl.where(slot >= 0, answer, 0.0)
        target = out + (token * heads + head)[:, None] * V + col[None, :]
        tl.store(target, answer.to(out.dtype.element_ty), mask=(i < count)[:, None])
        if SAVES:
            save = tl.load(table + chunk * 4 + 2)
            goal = tl.load(save_slots + save, mask=save >= 0, other=0).to(tl.int64)
            wanted = (goal > 0) & (goal < num_slots) & (slot >= 0)
            tl.store(state + goal * heads * (K * V) + at, s.to(state.dtype.element_ty), mask=wanted)
    if STATE:
        final = (slot > 0) & (slot < num_slots) & (stop == end)
        tl.store(state + slot * heads * (K * V) + at, s.to(state.dtype.element_ty), mask=final)
