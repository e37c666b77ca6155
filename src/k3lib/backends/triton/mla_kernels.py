"""Absorbed MLA decode over pages, split over the keys, and the merge of the splits.

A program takes up to BLOCK_M rows (a row is a token and a head) of one request and one range of its keys. All rows
share the cached latents, so a tile of them is read once and used twice: as keys and, its first L columns, as values.
Tiles that come are on their way in shared memory while one is worked on; the queries and the output stay on chip.
Softmax is online, in base 2; partial results go to fp32 memory and are merged in the order of the splits. Bound: memory
below about 32 rows a request; above, the waiting between dependent products.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
SCAN = tl.constexpr(128)  # requests looked at together


@triton.jit
def _request_of_token(cu, num_requests, token):
    """The request of a packed token; usually its own number, in a step of one token a request."""
    request = tl.minimum(token, num_requests - 1)
    first = tl.load(cu + request)
    last = tl.load(cu + request + 1)
    if (first != token) | (last != token + 1):
        request = token * 0
        for start in range(0, num_requests, SCAN):
            i = start + tl.arange(0, SCAN)
            end = tl.load(cu + 1 + i, mask=i < num_requests, other=2147483647)
            request += tl.sum((end <= token).to(tl.int32))
    return request


@triton.jit
def _request_of_tile(cu, num_requests, tile, H: tl.constexpr, BLOCK_M: tl.constexpr):
    """The request that tile number `tile` belongs to, the number of its first tile, and of all tiles."""
    request, first, total = tile * 0, tile * 0, tile * 0
    for start in range(0, num_requests, SCAN):
        i = start + tl.arange(0, SCAN)
        here = i < num_requests
        begin = tl.load(cu + i, mask=here, other=0)
        end = tl.load(cu + i + 1, mask=here, other=0)
        tiles = ((end - begin) * H + BLOCK_M - 1) // BLOCK_M
        upto = total + tl.cumsum(tiles, 0)
        before = here & (upto <= tile)
        request += tl.sum(before.to(tl.int32))
        first = tl.maximum(first, tl.max(tl.where(before, upto, 0)))
        total += tl.sum(tiles)
    return request, first, total


@triton.jit
def _page_of(table, n, end, longest, num_pages, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of a tile, or of each of its rows; entries of the table behind the last row are not read."""
    if PAGE % BLOCK_N == 0:
        page = tl.load(table + n // PAGE, mask=n < end, other=0)
    else:
        place = n + tl.arange(0, BLOCK_N)
        page = tl.load(table + place // PAGE, mask=(place < longest) & (n < end), other=0)
    return tl.where((page >= 0) & (page < num_pages), page, 0).to(tl.int64)


@triton.jit
def _start_of(page, n, W: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the rows of a tile begin in the pool."""
    if PAGE % BLOCK_N == 0:
        start = (page * PAGE + n % PAGE + tl.arange(0, BLOCK_N)) * W
    else:
        # multiplied before the sum: the compiler takes a sum of multiples and neighbours for multiples
        start = page * (PAGE * W) + ((n + tl.arange(0, BLOCK_N)) % PAGE).to(tl.int64) * W
    return start


@triton.jit
def _attend_tiles(
    acc, top, total, page, q_l, q_r, pages, table, begin, end, limit, seen, longest, factor, num_pages,
    L: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Cached rows `begin .. end`; `seen` of them are visible to each query, `longest` exist. Others are not read.

    The page of a tile is read one tile ahead, up to `limit`: in the same step it would cost a stage of the pipeline.
    """
    W: tl.constexpr = L + R
    TWICE: tl.constexpr = pages.dtype.element_ty.primitive_bitwidth == 8 and q_l.shape[0] == 16
    l = tl.arange(0, BLOCK_L)
    r = tl.arange(0, BLOCK_R)
    for n in range(begin, end, BLOCK_N):
        place = n + tl.arange(0, BLOCK_N)
        here = place < longest
        start = _start_of(page, n, W, PAGE, BLOCK_N)
        where_l = pages + start[:, None] + l[None, :]
        if MASKED or L < BLOCK_L:
            kv = tl.load(where_l, mask=here[:, None] & (l < L)[None, :], other=0.0).to(q_l.dtype)
        else:
            kv = tl.load(where_l).to(q_l.dtype)
        values = kv
        if TWICE:  # a tile that is converted is read ahead only if it has one use; the policy keeps the loads apart
            if MASKED or L < BLOCK_L:
                values = tl.load(
                    where_l, mask=here[:, None] & (l < L)[None, :], other=0.0, eviction_policy="evict_first"
                ).to(q_l.dtype)
            else:
                values = tl.load(where_l, eviction_policy="evict_first").to(q_l.dtype)
        page = _page_of(table, n + BLOCK_N, limit, longest, num_pages, PAGE, BLOCK_N)
        if R > 0:
            where_r = pages + start[:, None] + L + r[None, :]
            if MASKED or R < BLOCK_R:
                shared = tl.load(where_r, mask=here[:, None] & (r < R)[None, :], other=0.0).to(q_l.dtype)
            else:
                shared = tl.load(where_r).to(q_l.dtype)
        s = tl.dot(q_l, tl.trans(kv), input_precision=PRECISION)
        if R > 0:
            s = tl.dot(q_r, tl.trans(shared), s, input_precision=PRECISION)
        s = s * factor[:, None]
        if MASKED:
            s = tl.where(place[None, :] < seen[:, None], s, float("-inf"))
        now = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(now == float("-inf"), 0.0, now) if MASKED else now
        keep = tl.exp2(top - safe)
        weight = tl.exp2(s - safe[:, None])
        total = total * keep + tl.sum(weight, 1)
        acc = tl.dot(weight.to(values.dtype), values, acc * keep[:, None], input_precision=PRECISION)
        top = now
    return acc, top, total, page


_LENGTHS = ["num_rows", "num_requests", "table_width", "table_stride", "num_pages", "num_splits", "per_split"]


@triton.jit(
    do_not_specialize=_LENGTHS,
    do_not_specialize_on_alignment=["table", "lens", "cu"],
)
def _decode_kernel(
    q, pages, table, lens, cu, out, lse, scale,
    num_rows, num_requests, table_width, table_stride, num_pages, num_splits, per_split,
    H: tl.constexpr, L: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr,
    PACKED: tl.constexpr, PARTIAL: tl.constexpr, CHAINED: tl.constexpr, HALVES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    W: tl.constexpr = L + R
    tile, split = tl.program_id(0), tl.program_id(1)
    if CHAINED:  # the merge may be launched: it waits for the end of this kernel by itself
        tl.extra.cuda.gdc_launch_dependents()
    # few loads wait for one another: what a program looks at first is rarely in a cache
    if PACKED:
        request, first, tiles = _request_of_tile(cu, num_requests, tile, H, BLOCK_M)
        if tile >= tiles:
            return
        row0 = tl.load(cu + request) * H + (tile - first) * BLOCK_M
        row_end = tl.load(cu + request + 1) * H
    else:
        BLOCKS: tl.constexpr = (H + BLOCK_M - 1) // BLOCK_M
        token = tile // BLOCKS
        row0 = token * H + (tile % BLOCKS) * BLOCK_M
        row_end = (token + 1) * H
    rows = row0.to(tl.int64) + tl.arange(0, BLOCK_M)
    live = rows < row_end
    seen = tl.load(lens + rows // H, mask=live, other=0).to(tl.int32)
    if not PACKED:
        request = _request_of_token(cu, num_requests, token)
    seen = tl.minimum(seen, table_width * PAGE)
    longest = tl.max(seen)
    if per_split == 0:  # share what there is evenly
        blocks = (longest + BLOCK_N - 1) // BLOCK_N
        per_split = (blocks + num_splits - 1) // num_splits
    begin = split * per_split * BLOCK_N
    end = tl.minimum(longest, begin + per_split * BLOCK_N)
    # whole tiles that all rows see need no masks
    common = tl.min(tl.where(live, seen, longest)) // BLOCK_N * BLOCK_N
    middle = tl.maximum(begin, tl.minimum(end, common))
    table += request.to(tl.int64) * table_stride
    page = _page_of(table, begin, end, longest, num_pages, PAGE, BLOCK_N)

    l = tl.arange(0, BLOCK_L)
    r = tl.arange(0, BLOCK_R)
    q_l = tl.load(q + rows[:, None] * W + l[None, :], mask=live[:, None] & (l < L)[None, :], other=0.0)
    q_r = tl.load(q + rows[:, None] * W + L + r[None, :], mask=live[:, None] & (r < R)[None, :], other=0.0)
    factor = tl.zeros([BLOCK_M], tl.float32) + scale * LOG2E
    if HALVES:  # fp8 becomes fp16 in one instruction, bf16 takes several: give each row a range that fp16 has
        largest = tl.maximum(tl.max(tl.abs(q_l).to(tl.float32), 1), tl.max(tl.abs(q_r).to(tl.float32), 1))
        power = tl.exp2(tl.floor(tl.log2(tl.where(largest > 0, largest, 1.0))))
        q_l = (q_l.to(tl.float32) / power[:, None]).to(tl.float16)
        q_r = (q_r.to(tl.float32) / power[:, None]).to(tl.float16)
        factor = factor * power
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
    acc, top, total, page = _attend_tiles(
        acc, top, total, page, q_l, q_r, pages, table, begin, middle, end, seen, longest, factor, num_pages,
        L, R, PAGE, BLOCK_N, BLOCK_L, BLOCK_R, False, PRECISION,
    )  # fmt: skip
    acc, top, total, page = _attend_tiles(
        acc, top, total, page, q_l, q_r, pages, table, middle, end, end, seen, longest, factor, num_pages,
        L, R, PAGE, BLOCK_N, BLOCK_L, BLOCK_R, True, PRECISION,
    )  # fmt: skip
    empty = total == 0
    some = tl.where(empty, 1.0, total)
    found = tl.where(empty, float("-inf"), (tl.where(empty, 0.0, top) + tl.log2(some)) * LN2)
    there = rows
    stored = live
    if PARTIAL:
        there = rows + split.to(tl.int64) * num_rows
        stored = live & (begin < end)
    tl.store(lse + there, found, mask=live)
    result = (acc / some[:, None]).to(out.dtype.element_ty)
    tl.store(out + there[:, None] * L + l[None, :], result, mask=stored[:, None] & (l < L)[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _merge_kernel(
    parts, part_lse, out, lse, num_rows, num_splits,
    L: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Splits of a row, BLOCK_S together, in their order; those without keys were not written and are not read."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    if CHAINED:
        tl.extra.cuda.gdc_wait()
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, num_splits, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        at = s.to(tl.int64) * num_rows + row
        part = tl.load(part_lse + at, mask=s < num_splits, other=float("-inf")) * LOG2E
        full = part > float("-inf")
        values = tl.load(parts + at[:, None] * L + d[None, :], mask=full[:, None] & (d < L)[None, :], other=0.0)
        now = tl.maximum(top, tl.max(part))
        safe = tl.where(now == float("-inf"), 0.0, now)
        weight = tl.exp2(part - safe)
        keep = tl.exp2(top - safe)
        total = total * keep + tl.sum(weight)
        acc = acc * keep + tl.sum(values * weight[:, None], 0)
        top = now
    empty = total == 0
    some = tl.where(empty, 1.0, total)
    tl.store(out + row * L + d, (acc / some).to(out.dtype.element_ty), mask=d < L)
    if tl.program_id(1) == 0:
        tl.store(lse + row, tl.where(empty, float("-inf"), (top + tl.log2(some)) * LN2))


@triton.jit
def _attend_blocks(
    acc, top, total, q_a, q_b, k, v, begin, end, seen, factor, k_t, v_t,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys `begin .. end` of a request; `seen` keys are visible to each row."""
    a, b, d = tl.arange(0, BLOCK_A), BLOCK_A + tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_V)
    last = tl.max(seen)
    for n in range(begin, end, BLOCK_N):
        place = n + tl.arange(0, BLOCK_N)
        row = place.to(tl.int64)
        here = place < last
        if MASKED or BLOCK_A > DK:
            k_a = tl.load(k + row[None, :] * k_t + a[:, None], mask=here[None, :] & (a < DK)[:, None], other=0.0)
        else:
            k_a = tl.load(k + row[None, :] * k_t + a[:, None])
        s = tl.dot(q_a, k_a, input_precision=PRECISION)
        if DK > BLOCK_A:
            if MASKED or BLOCK_A + BLOCK_B > DK:
                k_b = tl.load(k + row[None, :] * k_t + b[:, None], mask=here[None, :] & (b < DK)[:, None], other=0.0)
            else:
                k_b = tl.load(k + row[None, :] * k_t + b[:, None])
            s = tl.dot(q_b, k_b, s, input_precision=PRECISION)
        if MASKED:
            s = tl.where(place[None, :] < seen[:, None], s, float("-inf"))
        now = tl.maximum(top, tl.max(s, 1) * factor)
        safe = tl.where(now == float("-inf"), 0.0, now) if MASKED else now
        weight = tl.exp2(s * factor - safe[:, None])
        keep = tl.exp2(top - safe)
        total = total * keep + tl.sum(weight, 1)
        acc = acc * keep[:, None]
        if MASKED or BLOCK_V > DV:
            values = tl.load(v + row[:, None] * v_t + d[None, :], mask=here[:, None] & (d < DV)[None, :], other=0.0)
        else:
            values = tl.load(v + row[:, None] * v_t + d[None, :])
        acc = tl.dot(weight.to(values.dtype), values, acc, input_precision=PRECISION)
        top = now
    return acc, top, total


@triton.jit(
    do_not_specialize=["num_requests"],
    do_not_specialize_on_alignment=["cu_q", "cu_k"],
)
def _attention_kernel(
    q, k, v, cu_q, cu_k, out, lse, scale, num_requests, q_t, q_h, k_t, k_h, v_t, v_h,
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_V: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of packed requests: a program takes BLOCK_M queries of a head, those that see most keys first.

    The key width is cut into a power of two and the rest. Keys that all queries of a tile see need no masks.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    request, first, total_tiles = _request_of_tile(cu_q, num_requests, tile, 1, BLOCK_M)
    if tile >= total_tiles:
        return
    q_begin, q_end = tl.load(cu_q + request), tl.load(cu_q + request + 1)
    k_begin, k_end = tl.load(cu_k + request), tl.load(cu_k + request + 1)
    n_q, n_k = q_end - q_begin, k_end - k_begin
    m0 = ((n_q + BLOCK_M - 1) // BLOCK_M - 1 - (tile - first)) * BLOCK_M
    m = m0 + tl.arange(0, BLOCK_M)
    live = m < n_q
    if CAUSAL:
        seen = tl.minimum(tl.maximum(n_k - n_q + m + 1, 0), n_k)
        whole = tl.minimum(tl.maximum(n_k - n_q + m0 + 1, 0), n_k) // BLOCK_N * BLOCK_N
        end = tl.minimum(tl.maximum(n_k - n_q + m0 + BLOCK_M, 0), n_k)
    else:
        seen = tl.zeros([BLOCK_M], tl.int32) + n_k
        whole = n_k // BLOCK_N * BLOCK_N
        end = n_k
    a, b, d = tl.arange(0, BLOCK_A), BLOCK_A + tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_V)
    row = (q_begin + m).to(tl.int64)
    q += head.to(tl.int64) * q_h
    k += k_begin.to(tl.int64) * k_t + head.to(tl.int64) * k_h
    v += k_begin.to(tl.int64) * v_t + head.to(tl.int64) * v_h
    q_a = tl.load(q + row[:, None] * q_t + a[None, :], mask=live[:, None] & (a < DK)[None, :], other=0.0)
    q_b = tl.load(q + row[:, None] * q_t + b[None, :], mask=live[:, None] & (b < DK)[None, :], other=0.0)
    factor = scale * LOG2E
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc, top, total = _attend_blocks(
        acc, top, total, q_a, q_b, k, v, 0, whole, seen, factor, k_t, v_t,
        DK, DV, BLOCK_A, BLOCK_B, BLOCK_V, BLOCK_N, False, PRECISION,
    )  # fmt: skip
    acc, top, total = _attend_blocks(
        acc, top, total, q_a, q_b, k, v, whole, end, seen, factor, k_t, v_t,
        DK, DV, BLOCK_A, BLOCK_B, BLOCK_V, BLOCK_N, True, PRECISION,
    )  # fmt: skip
    empty = total == 0
    some = tl.where(empty, 1.0, total)
    acc = acc / some[:, None]
    there = row * H + head
    stored = live[:, None] & (d < DV)[None, :]
    tl.store(out + there[:, None] * DV + d[None, :], acc.to(out.dtype.element_ty), mask=stored)
    found = tl.where(empty, float("-inf"), (tl.where(empty, 0.0, top) + tl.log2(some)) * LN2)
    tl.store(lse + there, found, mask=live)
