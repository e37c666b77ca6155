"""Routed experts: sort routes by expert, two grouped products with packed weights, one weighted sum.

Shapes: T tokens, k routes a token, R = T * k routes, E experts, L width, I intermediate, N routes of a tile, M rows.

The weights are the left operand: a tile of M rows is read once, decoded in registers in the layout that the tensor
cores want, and multiplied with the columns of N routes of one expert. A 16-bit word holds four consecutive columns, so
the right operand stands in four planes, `x[:, m::4]`, and a word gives one element of each of four products: no value
moves between threads. A nibble becomes bfloat16 by moving its sign and its three magnitude bits, which is the value
times 2^-126; the group's scale undoes that on the way. Expected bound: memory until an expert has about 100 routes;
measured, the instructions that decode weights come to nearly the same time.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from k3lib.backends.triton.launch import launch_options

ONE_PROGRAM_ROUTES = 2048
TURN_TOKENS = 16384  # bounds the rows of all routes, which are in memory between the products and their sum


class Config(NamedTuple):
    """Of one product: M rows, K words, warps, stages, what a program repeats, and N, if not the width of a tile.

    In the first product that is how many products make a step, in the second how many blocks of rows there are. With
    N = 8 the products are those of a warp, not of four: in another order of summation, with fewer instructions and
    registers.
    """

    rows: int
    words: int
    warps: int
    stages: int
    repeat: int = 1
    columns: int = 0


class Path(NamedTuple):
    """Up to `routes` routes an expert: width of a tile, whether they are sorted, the two products, parts of the first.

    Routes that are not sorted make tiles of one.
    """

    routes: float
    width: int
    is_sorted: bool
    gate_up: Config
    down: Config
    parts: int = 1


# H200, 2026-11-30. Chosen by the number of tokens, which is static, as if routes fell evenly on the experts
FEW_PATHS = (
    Path(0.04, 16, False, Config(64, 32, 4, 4, 2), Config(64, 32, 4, 4), parts=2),
    Path(0.25, 8, False, Config(64, 64, 4, 3), Config(64, 32, 4, 3, 7, 16)),
    Path(6, 8, True, Config(64, 64, 4, 3), Config(64, 32, 4, 3, 8, 16)),
)
# these give the same bits
PATHS = (
    Path(0.25, 16, False, Config(64, 32, 4, 3, 2), Config(64, 32, 4, 3, 7)),
    Path(10, 16, True, Config(64, 32, 4, 3, 2), Config(64, 32, 4, 3, 8)),
    Path(40, 32, True, Config(128, 32, 4, 4), Config(128, 32, 4, 3, 4)),
    Path(float("inf"), 64, True, Config(128, 32, 4, 3), Config(128, 32, 8, 3, 7)),
)
_PLAIN = Path(float("inf"), 16, True, Config(32, 16, 4, 2), Config(32, 16, 4, 2))

# value of an E2M1 nibble in bfloat16, times 2^-126: sign to bit 15, magnitude to bits 8..6; two words at once
_NIBBLE_0 = tl.constexpr(
    "{ .reg .b32 a; and.b32 a, $1, 0x000F000F; mul.lo.u32 a, a, 4160; and.b32 $0, a, 0x81C081C0; }"
)
_NIBBLE_1 = tl.constexpr("{ .reg .b32 a; and.b32 a, $1, 0x00F000F0; mul.lo.u32 a, a, 260; and.b32 $0, a, 0x81C081C0; }")
_NIBBLE_2 = tl.constexpr(
    "{ .reg .b32 a; shr.u32 a, $1, 8; and.b32 a, a, 0x000F000F; mul.lo.u32 a, a, 4160; and.b32 $0, a, 0x81C081C0; }"
)
_NIBBLE_3 = tl.constexpr(
    "{ .reg .b32 a; shr.u32 a, $1, 8; and.b32 a, a, 0x00F000F0; mul.lo.u32 a, a, 260; and.b32 $0, a, 0x81C081C0; }"
)
# what is left of the powers of two after decoding to bfloat16: see `_group_scales`
_REST_MX = tl.constexpr(2.0**64)
_REST_NV = tl.constexpr(2.0**8)


@triton.jit
def _nibble(words, WHICH: tl.constexpr, dtype: tl.constexpr, PACKED: tl.constexpr):
    """Column WHICH of each word of four, as `dtype`: the value, or with PACKED (bfloat16) the value times 2^-126."""
    if PACKED:
        asm: tl.constexpr = (_NIBBLE_0, _NIBBLE_1, _NIBBLE_2, _NIBBLE_3)[WHICH]
        value = tl.inline_asm_elementwise(asm, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        bits = words.to(tl.int32) >> (4 * WHICH)
        value = (((bits & 8) << 28) | ((bits & 7) << 22)).to(tl.float32, bitcast=True) * 2.0**126
    return value


@triton.jit
def _group_scales(codes, NVFP4: tl.constexpr, PACKED: tl.constexpr):
    """Scales of groups from their stored bytes.

    In fp32 the scale itself. With PACKED in bfloat16 times what keeps the product with a nibble in range: E8M0 times
    2^62, exact for bytes 66..192 (beyond, a weight is 0 or the output infinite); E4M3 times 2^118.
    """
    bits = codes.to(tl.int32)
    if PACKED and NVFP4:
        tiny = (((bits & 0x80) << 8) | ((bits & 0x7F) << 4)).to(tl.int16).to(tl.bfloat16, bitcast=True)
        half = tl.full(tiny.shape, 2.0**119, tl.bfloat16)
        scales = tiny * half * half
    elif PACKED:
        scales = (tl.minimum(bits + 62, 255) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif NVFP4:
        scales = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 2.0**120
    else:
        scales = tl.where(bits == 0, 1 << 22, bits << 23).to(tl.float32, bitcast=True)
    return scales


@triton.jit
def _tanh_parts(x):
    """Numerator and denominator of tanh(x), the latter in 1..2."""
    shrunk = tl.exp(-2 * tl.abs(x))
    far = tl.where(x < 0, shrunk - 1, 1 - shrunk)
    square = x * x
    # near zero the quotient would cancel
    near = x * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    is_near = square < 0.0625
    return tl.where(is_near, near, far), tl.where(is_near, 1.0, 1 + shrunk)


@triton.jit
def _situ(gate, up, beta, linear_beta, CAPPED: tl.constexpr):
    """`beta·tanh(g/beta)·sigmoid(g) · linear_beta·tanh(u/linear_beta)` with one division an element."""
    above, below = _tanh_parts(gate * (1 / beta))
    shrunk = tl.exp(-tl.abs(gate))
    above *= tl.where(gate < 0, shrunk, 1.0) * beta
    below *= 1 + shrunk
    if CAPPED:
        up_above, up_below = _tanh_parts(up * (1 / linear_beta))
        above *= up_above * linear_beta
        below *= up_below
    else:
        above *= up
    return above / below


@triton.jit
def _tile(
    experts_ptr, counts_ptr, order_ptr, ids_ptr, tile, first, num_experts, WIDTH: tl.constexpr, N: tl.constexpr,
    SORTED: tl.constexpr,
):  # fmt: skip
    """Local expert of a tile (negative: none), its routes `[N]`, and which of them exist."""
    n = tl.arange(0, N)
    if SORTED:
        expert = tl.load(experts_ptr + tile)
        count = tl.load(counts_ptr + tile)
        live = n < count
        routes = tl.load(order_ptr + tile * WIDTH + n, mask=live, other=0)
    else:
        expert = tl.load(ids_ptr + tile) - first
        expert = tl.where(expert < num_experts, expert, -1)
        live = n < 1
        routes = tl.where(live, tile, 0)
    return expert, routes, live


@triton.jit
def _four_bytes(four, M: tl.constexpr, GROUPS: tl.constexpr):
    """`[M, GROUPS]` bytes of `[M, GROUPS / 4]` integers."""
    even_bytes = tl.join(four & 0xFF, (four >> 16) & 0xFF)
    odd_bytes = tl.join((four >> 8) & 0xFF, (four >> 24) & 0xFF)
    return tl.reshape(tl.join(even_bytes, odd_bytes), (M, GROUPS))


@triton.jit
def _decode(w, s, FORMAT: tl.constexpr, PACKED: tl.constexpr, M: tl.constexpr, K: tl.constexpr, dtype: tl.constexpr):
    """Words `[M, K]` and bytes of scales to weights `[M, 4K]` in the order of the right operand."""
    words: tl.constexpr = 4 if FORMAT == "nvfp4" else 8
    s = tl.broadcast_to(_group_scales(s, FORMAT == "nvfp4", PACKED)[:, :, None], (M, K // words, words))
    s = tl.reshape(s, (M, K))
    low = tl.join((_nibble(w, 0, dtype, PACKED) * s).to(dtype), (_nibble(w, 1, dtype, PACKED) * s).to(dtype))
    high = tl.join((_nibble(w, 2, dtype, PACKED) * s).to(dtype), (_nibble(w, 3, dtype, PACKED) * s).to(dtype))
    # only names change here: every value stays in its register
    w = tl.permute(tl.reshape(tl.join(low, high), (M, K // 16, 16, 2, 2)), (0, 1, 4, 3, 2))
    return tl.reshape(w, (M, 4 * K))


@triton.jit
def _weight_tile(
    w_ptrs, s_ptrs, rows_exist, begin, COLUMNS: tl.constexpr, FORMAT: tl.constexpr, PACKED: tl.constexpr,
    M: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr, FOUR: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Weights `[M, 4K]` of a step in the order of the right operand: blocks of 64 columns, in planes of 16."""
    if FORMAT == "bf16":
        k = tl.arange(0, 4 * K)
        w = tl.load(w_ptrs + 4 * begin, mask=rows_exist & (k < COLUMNS - 4 * begin)[None, :], other=0.0).to(dtype)
    else:
        words: tl.constexpr = 4 if FORMAT == "nvfp4" else 8
        groups: tl.constexpr = K // words
        if EVEN:
            w = tl.load(w_ptrs + begin)
            if FOUR:
                # four scales in one integer: the least that is copied to shared memory asynchronously
                s = _four_bytes(tl.load(s_ptrs + begin // (4 * words)), M, groups)
            else:
                s = tl.load(s_ptrs + begin // words)
        else:
            k = tl.arange(0, K)
            g = tl.arange(0, groups)
            w = tl.load(w_ptrs + begin, mask=rows_exist & (k < COLUMNS // 4 - begin)[None, :], other=0)
            left = COLUMNS // (4 * words) - begin // words
            s = tl.load(s_ptrs + begin // words, mask=rows_exist & (g < left)[None, :], other=0)
        w = _decode(w, s, FORMAT, PACKED, M, K, dtype)
    return w


@triton.jit
def _scale_ptrs(s_ptr, rows, GROUPS: tl.constexpr, FOUR: tl.constexpr):
    """Pointers to the first scales of rows that begin at byte `rows`: to integers of four if FOUR, else to bytes."""
    if FOUR:
        ptrs = s_ptr.to(tl.pointer_type(tl.int32)) + rows // 4 + tl.arange(0, max(GROUPS // 4, 1))[None, :]
    else:
        ptrs = s_ptr + rows + tl.arange(0, max(GROUPS, 1))[None, :]
    return ptrs


@triton.jit
def _column(p, PLANES: tl.constexpr):
    """Which column of the matrix stands at place p of an operand."""
    if PLANES == 1:
        return p
    return p // 64 * 64 + p % 16 * 4 + p % 64 // 16


@triton.jit
def _rest(global_ptr, expert, FORMAT: tl.constexpr, PACKED: tl.constexpr):
    """The factor that decoding left to the end."""
    rest = 1.0
    if FORMAT == "nvfp4":
        rest = tl.load(global_ptr + expert)
        if PACKED:
            rest *= _REST_NV
    elif FORMAT == "mxfp4" and PACKED:
        rest = _REST_MX
    return rest


@triton.jit
def _gate_up_kernel(
    x_ptr, w_ptr, s_ptr, global_ptr, hidden_ptr, experts_ptr, counts_ptr, order_ptr, ids_ptr, first, num_experts,
    beta, linear_beta,
    L: tl.constexpr, I: tl.constexpr, X_WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr, TOP_K: tl.constexpr,
    FORMAT: tl.constexpr, CAPPED: tl.constexpr, SORTED: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr,
    PLANES: tl.constexpr, PARTS: tl.constexpr, UNROLL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`hidden[r] = SiTU(w13 x)` of each route: M / 2 columns of it, from 8 gate and 8 up rows in turn.

    With PARTS, each program sums over one part of the columns of x and leaves gate and up, in fp32, to
    `_activate_kernel`.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    half: tl.constexpr = M // 2
    expert, routes, live = _tile(
        experts_ptr, counts_ptr, order_ptr, ids_ptr, tl.program_id(1), first, num_experts, WIDTH, N, SORTED
    )
    if expert < 0:
        return
    expert = expert.to(tl.int64)
    q = tl.arange(0, M)
    column = _column(tl.program_id(0) * half + q // 16 * 8 + q % 8, PLANES)
    exist = (column < I)[:, None]
    source = (tl.minimum(column, I - 1) + q // 8 % 2 * I)[:, None]
    words: tl.constexpr = 4 if FORMAT == "nvfp4" else 8
    even: tl.constexpr = L % (4 * K) == 0 and I % half == 0 and K % words == 0
    four: tl.constexpr = even and K % (4 * words) == 0
    stride: tl.constexpr = L // PLANES
    groups: tl.constexpr = L // (4 * words)
    k = tl.arange(0, 4 * K)
    if PLANES == 1:
        w_ptrs = w_ptr + expert * (2 * I * stride) + source * stride + k[None, :]
    else:
        w_ptrs = w_ptr + expert * (2 * I * stride) + source * stride + tl.arange(0, K)[None, :]
    s_ptrs = _scale_ptrs(s_ptr, expert * (2 * I * groups) + source * groups, K // words, four)
    x_ptrs = x_ptr + (routes // TOP_K).to(tl.int64)[None, :] * X_WIDTH + k[:, None]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    acc = tl.zeros((M, N), tl.float32)
    span: tl.constexpr = (L + 4 * PARTS - 1) // (4 * PARTS)
    part = 0 if PARTS == 1 else tl.program_id(2)
    # with two products a step the compiler leaves each of them whole; alone it is cut every 16 words, which hides more
    # latency and costs a third more instructions
    for step in range(0, span, UNROLL * K):
        for i in tl.static_range(UNROLL):
            begin = part * span + step + i * K
            w = _weight_tile(w_ptrs, s_ptrs, exist, begin, L, FORMAT, PACKED, M, K, even, four, dtype)
            if even:
                x = tl.load(x_ptrs + 4 * begin, mask=live[None, :], other=0.0)
            else:
                x = tl.load(x_ptrs + 4 * begin, mask=live[None, :] & (k < X_WIDTH - 4 * begin)[:, None], other=0.0)
            acc = tl.dot(w, x, acc, input_precision="ieee")
    acc *= _rest(global_ptr, expert, FORMAT, PACKED)
    gate, up = tl.split(tl.permute(tl.reshape(acc, (M // 16, 2, 8, N)), (0, 2, 3, 1)))
    rows = tl.program_id(0) * half + tl.arange(0, half)
    exist = live[None, :] & (rows < OUT_WIDTH)[:, None]
    if PARTS == 1:
        gate = gate.to(dtype).to(tl.float32)
        up = up.to(dtype).to(tl.float32)
        hidden = tl.reshape(_situ(gate, up, beta, linear_beta, CAPPED), (half, N))
        out = hidden_ptr + routes.to(tl.int64)[None, :] * OUT_WIDTH + rows[:, None]
        tl.store(out, hidden.to(dtype), mask=exist)
    else:
        out = hidden_ptr + (routes.to(tl.int64)[None, :] * PARTS + part) * (2 * OUT_WIDTH) + rows[:, None]
        tl.store(out, tl.reshape(gate, (half, N)), mask=exist)
        tl.store(out + OUT_WIDTH, tl.reshape(up, (half, N)), mask=exist)


@triton.jit
def _activate_kernel(
    parts_ptr, hidden_ptr, ids_ptr, first, num_experts, beta, linear_beta, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Add the parts of gate and up in their order, and activate."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    route = tl.program_id(0)
    expert = tl.load(ids_ptr + route) - first
    if (expert < 0) | (expert >= num_experts):
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gate = tl.zeros((BLOCK,), tl.float32)
    up = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        at = parts_ptr + (route.to(tl.int64) * PARTS + part) * (2 * WIDTH) + columns
        gate += tl.load(at, mask=inside, other=0.0)
        up += tl.load(at + WIDTH, mask=inside, other=0.0)
    dtype: tl.constexpr = hidden_ptr.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    hidden = _situ(gate, up, beta, linear_beta, CAPPED)
    tl.store(hidden_ptr + route.to(tl.int64) * WIDTH + columns, hidden.to(dtype), mask=inside)


@triton.jit
def _hidden_tile(hidden_ptr, routes, live, begin, WIDTH: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr):
    """`[4K, N]` of the hidden columns from word `begin` on."""
    k = 4 * begin + tl.arange(0, 4 * K)
    if EVEN:
        exists = live[None, :]
    else:
        exists = live[None, :] & (k < WIDTH)[:, None]
    return tl.load(hidden_ptr + routes[None, :] * WIDTH + k[:, None], mask=exists, other=0.0)


@triton.jit
def _down_kernel(
    hidden_ptr, w_ptr, s_ptr, global_ptr, out_ptr, experts_ptr, counts_ptr, order_ptr, ids_ptr, first, num_experts,
    L: tl.constexpr, I: tl.constexpr, X_WIDTH: tl.constexpr, FORMAT: tl.constexpr, SORTED: tl.constexpr,
    WIDTH: tl.constexpr,
    PACKED: tl.constexpr, PLANES: tl.constexpr, BLOCKS: tl.constexpr, STEPS: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`out[r] = w2 hidden[r]` of each route: BLOCKS times M rows.

    With STEPS (at most 4), they cover the hidden columns, which are read once, and the loop is over the blocks of rows.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    expert, routes, live = _tile(
        experts_ptr, counts_ptr, order_ptr, ids_ptr, tl.program_id(1), first, num_experts, WIDTH, N, SORTED
    )
    if expert < 0:
        return
    expert = expert.to(tl.int64)
    routes = routes.to(tl.int64)
    words: tl.constexpr = 4 if FORMAT == "nvfp4" else 8
    stride: tl.constexpr = I // PLANES
    groups: tl.constexpr = I // (4 * words)
    w_columns = tl.arange(0, 4 * K if PLANES == 1 else K)[None, :]
    w_ptr += expert * (L * stride)
    even: tl.constexpr = I % (4 * K) == 0 and L % (BLOCKS * M) == 0 and K % words == 0
    four: tl.constexpr = even and K % (4 * words) == 0
    whole: tl.constexpr = X_WIDTH % (4 * K) == 0
    dtype: tl.constexpr = hidden_ptr.dtype.element_ty
    rest = _rest(global_ptr, expert, FORMAT, PACKED)
    if STEPS > 0:
        x0 = _hidden_tile(hidden_ptr, routes, live, 0, X_WIDTH, K, whole)
    if STEPS > 1:
        x1 = _hidden_tile(hidden_ptr, routes, live, K, X_WIDTH, K, whole)
    if STEPS > 2:
        x2 = _hidden_tile(hidden_ptr, routes, live, 2 * K, X_WIDTH, K, whole)
    if STEPS > 3:
        x3 = _hidden_tile(hidden_ptr, routes, live, 3 * K, X_WIDTH, K, whole)
    for block in range(0, BLOCKS):
        rows = (tl.program_id(0) * BLOCKS + block) * M + tl.arange(0, M)
        exist = (rows < L)[:, None]
        source = tl.minimum(rows, L - 1)[:, None]
        w_ptrs = w_ptr + source * stride + w_columns
        s_ptrs = _scale_ptrs(s_ptr, expert * (L * groups) + source * groups, K // words, four)
        acc = tl.zeros((M, N), tl.float32)
        if STEPS > 0:
            w = _weight_tile(w_ptrs, s_ptrs, exist, 0, I, FORMAT, PACKED, M, K, even, four, dtype)
            acc = tl.dot(w, x0, acc, input_precision="ieee")
            if STEPS > 1:
                w = _weight_tile(w_ptrs, s_ptrs, exist, K, I, FORMAT, PACKED, M, K, even, four, dtype)
                acc = tl.dot(w, x1, acc, input_precision="ieee")
            if STEPS > 2:
                w = _weight_tile(w_ptrs, s_ptrs, exist, 2 * K, I, FORMAT, PACKED, M, K, even, four, dtype)
                acc = tl.dot(w, x2, acc, input_precision="ieee")
            if STEPS > 3:
                w = _weight_tile(w_ptrs, s_ptrs, exist, 3 * K, I, FORMAT, PACKED, M, K, even, four, dtype)
                acc = tl.dot(w, x3, acc, input_precision="ieee")
        else:
            for begin in range(0, tl.cdiv(I, 4), K):
                w = _weight_tile(w_ptrs, s_ptrs, exist, begin, I, FORMAT, PACKED, M, K, even, four, dtype)
                x = _hidden_tile(hidden_ptr, routes, live, begin, X_WIDTH, K, whole)
                acc = tl.dot(w, x, acc, input_precision="ieee")
        out = out_ptr + routes[None, :] * L + rows[:, None]
        tl.store(out, (acc * rest).to(dtype), mask=live[None, :] & exist)


@triton.jit
def _planes_kernel(
    x_ptr, out_ptr, L: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Order each block of 64 columns in four planes, `x[4i + m]` to place `16m + i`; zeros behind the last column."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = _column(p, 4)
    x = tl.load(x_ptr + token * L + column, mask=column < L, other=0.0)
    tl.store(out_ptr + token * WIDTH + p, x, mask=p < WIDTH)


@triton.jit
def _combine_kernel(
    y_ptr, ids_ptr, weights_ptr, out_ptr, first, num_experts, L: tl.constexpr, TOP_K: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`out[t] = Σ_i weights[t, i] y[t, i]` in fp32, in one order."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < L
    # with one warp each thread holds the same columns of all routes: its loads are under way together
    i = tl.arange(0, SLOTS)
    routes = token * TOP_K + i
    expert = tl.load(ids_ptr + routes, mask=i < TOP_K, other=-1)
    here = (i < TOP_K) & (expert >= first) & (expert - first < num_experts)
    weights = tl.load(weights_ptr + routes, mask=here, other=0.0)
    y = tl.load(y_ptr + routes[:, None] * L + columns[None, :], mask=here[:, None] & inside[None, :], other=0.0)
    total = tl.sum(weights[:, None] * y.to(tl.float32), 0)
    tl.store(out_ptr + token * L + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _count(ids_ptr, counts_ptr, ranks_ptr, first, num_experts, num_routes, begin, BLOCK: tl.constexpr):
    """Number the routes of each expert. Their order within an expert is arbitrary, and no result depends on it."""
    r = begin + tl.arange(0, BLOCK)
    inside = r < num_routes
    expert = tl.load(ids_ptr + r, mask=inside, other=-1) - first
    here = inside & (expert >= 0) & (expert < num_experts)
    rank = tl.atomic_add(counts_ptr + expert, 1, mask=here, sem="relaxed")
    tl.store(ranks_ptr + r, rank, mask=inside)


@triton.jit
def _scan(counts_ptr, starts_ptr, tiles_ptr, num_experts, max_tiles, N: tl.constexpr, EXPERTS: tl.constexpr):
    """First tile of each expert; the tiles behind the last one get no expert."""
    e = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + e, mask=e < num_experts, other=0, cache_modifier=".cg")
    tiles = (counts + (N - 1)) // N
    ends = tl.cumsum(tiles, 0)
    tl.store(starts_ptr + e, ends - tiles, mask=e < num_experts)
    total = tl.sum(tiles, 0)
    tile = e
    begin = 0
    while begin < max_tiles:
        tl.store(tiles_ptr + tile, tl.full((EXPERTS,), -1, tl.int32), mask=(tile >= total) & (tile < max_tiles))
        tile += EXPERTS
        begin += EXPERTS


@triton.jit
def _scatter(
    ids_ptr, counts_ptr, starts_ptr, ranks_ptr, tiles_ptr, sizes_ptr, order_ptr, first, num_experts, num_routes,
    begin, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Put each route into its tile."""
    r = begin + tl.arange(0, BLOCK)
    inside = r < num_routes
    expert = tl.load(ids_ptr + r, mask=inside, other=-1) - first
    here = inside & (expert >= 0) & (expert < num_experts)
    rank = tl.load(ranks_ptr + r, mask=here, other=0)
    tile = tl.load(starts_ptr + expert, mask=here, other=0) + rank // N
    tl.store(order_ptr + tile * N + rank % N, r, mask=here)
    leads = here & (rank % N == 0)
    count = tl.load(counts_ptr + expert, mask=leads, other=0, cache_modifier=".cg")
    tl.store(tiles_ptr + tile, expert, mask=leads)
    tl.store(sizes_ptr + tile, tl.minimum(count - rank, N), mask=leads)


@triton.jit(do_not_specialize=["num_routes", "max_tiles", "first"])
def _sort_kernel(
    ids_ptr, counts_ptr, starts_ptr, ranks_ptr, tiles_ptr, sizes_ptr, order_ptr, first, num_experts, num_routes,
    max_tiles, N: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """All of the sorting in one program, for few routes."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    e = tl.arange(0, EXPERTS)
    tl.store(counts_ptr + e, tl.zeros((EXPERTS,), tl.int32), mask=e < num_experts)
    tl.debug_barrier()
    begin = 0
    while begin < num_routes:
        _count(ids_ptr, counts_ptr, ranks_ptr, first, num_experts, num_routes, begin, BLOCK)
        begin += BLOCK
    tl.debug_barrier()
    _scan(counts_ptr, starts_ptr, tiles_ptr, num_experts, max_tiles, N, EXPERTS)
    tl.debug_barrier()
    begin = 0
    while begin < num_routes:
        _scatter(
            ids_ptr, counts_ptr, starts_ptr, ranks_ptr, tiles_ptr, sizes_ptr, order_ptr, first, num_experts,
            num_routes, begin, N, BLOCK,
        )  # fmt: skip
        begin += BLOCK


@triton.jit(do_not_specialize=["num_routes", "first"])
def _count_kernel(ids_ptr, counts_ptr, ranks_ptr, first, num_experts, num_routes, BLOCK: tl.constexpr):
    _count(ids_ptr, counts_ptr, ranks_ptr, first, num_experts, num_routes, tl.program_id(0) * BLOCK, BLOCK)


@triton.jit(do_not_specialize=["max_tiles"])
def _scan_kernel(counts_ptr, starts_ptr, tiles_ptr, num_experts, max_tiles, N: tl.constexpr, EXPERTS: tl.constexpr):
    _scan(counts_ptr, starts_ptr, tiles_ptr, num_experts, max_tiles, N, EXPERTS)


@triton.jit(do_not_specialize=["num_routes", "first"])
def _scatter_kernel(
    ids_ptr, counts_ptr, starts_ptr, ranks_ptr, tiles_ptr, sizes_ptr, order_ptr, first, num_experts, num_routes,
    N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    _scatter(
        ids_ptr, counts_ptr, starts_ptr, ranks_ptr, tiles_ptr, sizes_ptr, order_ptr, first, num_experts, num_routes,
        tl.program_id(0) * BLOCK, N, BLOCK,
    )  # fmt: skip


def _tiles_bound(num_routes, num_experts, width):
    """At most so many tiles of `width` hold `num_routes` routes of `num_experts` experts."""
    return min(num_routes, num_experts) + num_routes // width


def sort_routes(ids, first, num_experts, width):
    """Tiles of `width` routes of one expert: expert and size of each tile, and the routes in their order."""
    num_routes = ids.numel()
    max_tiles = _tiles_bound(num_routes, num_experts, width)
    sizes = (num_experts, num_experts, num_routes, max_tiles, max_tiles, max_tiles * width)
    # all aligned to 16 bytes: kernels are compiled for whether their arguments are
    rooms = [triton.cdiv(size, 4) * 4 for size in sizes]
    parts = ids.new_empty(sum(rooms)).split(rooms)
    counts, starts, ranks, tiles, filled, order = (x[:size] for x, size in zip(parts, sizes, strict=True))
    lanes = triton.next_power_of_2(num_experts)
    if num_routes <= ONE_PROGRAM_ROUTES:
        _sort_kernel[(1,)](
            ids, counts, starts, ranks, tiles, filled, order, first, num_experts, num_routes, max_tiles,
            N=width, EXPERTS=lanes, BLOCK=1024, **launch_options(ids.device, 16),
        )  # fmt: skip
        return tiles, filled, order
    grid = (triton.cdiv(num_routes, 1024),)
    counts.zero_()
    _count_kernel[grid](ids, counts, ranks, first, num_experts, num_routes, BLOCK=1024)
    _scan_kernel[(1,)](counts, starts, tiles, num_experts, max_tiles, N=width, EXPERTS=lanes)
    _scatter_kernel[grid](
        ids, counts, starts, ranks, tiles, filled, order, first, num_experts, num_routes, N=width, BLOCK=1024
    )
    return tiles, filled, order


def choose_path(num_routes, num_experts, dtype, one_order):
    """The first path that is made for so many routes an expert; with `one_order` all give the same bits."""
    if dtype == torch.float32:
        return _PLAIN  # no tensor cores: small tiles
    paths = PATHS if one_order else FEW_PATHS + PATHS
    return next(path for path in paths if num_routes <= path.routes * num_experts)


def run(x, ids, weights, store, act_fn, path=None, one_order=False):
    """Compute the op; arguments are checked by the adapter, which gives contiguous tensors."""
    num_tokens = x.shape[0]
    out = torch.empty_like(x)
    if not ids.numel():
        return out.zero_()
    for begin in range(0, num_tokens, TURN_TOKENS):
        turn = slice(begin, begin + TURN_TOKENS)
        chosen = path or choose_path(ids[turn].numel(), store.num_experts, x.dtype, one_order)
        _run_turn(x[turn], ids[turn], weights[turn], store, act_fn, chosen, out[turn])
    return out


def _run_turn(x, ids, weights, store, act_fn, path, out):
    num_tokens, width = x.shape
    top_k = ids.shape[1]
    num_routes = ids.numel()
    inner, num_experts, first = store.intermediate, store.num_experts, store.first_expert
    packed = store.format != "bf16"
    is_cuda = x.is_cuda and torch.version.hip is None
    fixed = {
        "L": width,
        "I": inner,
        "FORMAT": store.format,
        "PACKED": x.dtype == torch.bfloat16 and is_cuda,
        "PLANES": 4 if packed else 1,
        "SORTED": path.is_sorted,
        "WIDTH": path.width,
    }
    if packed:
        w13, w2 = store.w13.view(torch.int16), store.w2.view(torch.int16)
        s13, s2 = store.w13_scale.view(torch.uint8), store.w2_scale.view(torch.uint8)
        g13, g2 = (store.w13_scale_2, store.w2_scale_2) if store.format == "nvfp4" else (x, x)
        x_width, hidden_width = (triton.cdiv(n, 64) * 64 for n in (width, inner))
        planes = x.new_empty(num_tokens, x_width)
        block = min(1024, triton.next_power_of_2(x_width))
        _planes_kernel[(num_tokens, triton.cdiv(x_width, block))](
            x, planes, L=width, WIDTH=x_width, BLOCK=block, **launch_options(x.device, 4)
        )  # fmt: skip
    else:
        w13, w2, s13, s2, g13, g2 = store.w13, store.w2, *(4 * (x,))
        x_width, hidden_width, planes = width, inner, x
    if path.is_sorted:
        tiles, filled, order = sort_routes(ids, first, num_experts, path.width)
        num_tiles = tiles.numel()
    else:
        tiles = filled = order = ids
        num_tiles = num_routes
    hidden = x.new_empty(num_routes, hidden_width)
    y = x.new_empty(num_routes, width)
    up, down = path.gate_up, path.down
    parts = path.parts if width % (4 * up.words * path.parts) == 0 else 1
    unroll = up.repeat if width % (4 * up.words * parts * up.repeat) == 0 else 1
    into = hidden if parts == 1 else x.new_empty(num_routes, parts, 2, hidden_width, dtype=torch.float32)
    act = (act_fn.beta, act_fn.linear_beta or 1.0)
    capped = act_fn.linear_beta is not None
    _gate_up_kernel[(triton.cdiv(2 * hidden_width, up.rows), num_tiles, parts)](
        planes, w13, s13, g13, into, tiles, filled, order, ids, first, num_experts, *act,
        TOP_K=top_k, CAPPED=capped, X_WIDTH=x_width, OUT_WIDTH=hidden_width, PARTS=parts, UNROLL=unroll, M=up.rows,
        N=up.columns or path.width, K=up.words, num_stages=up.stages, **launch_options(x.device, up.warps), **fixed,
    )  # fmt: skip
    if parts > 1:
        block = min(128, triton.next_power_of_2(hidden_width))
        _activate_kernel[(num_routes, triton.cdiv(hidden_width, block))](
            into, hidden, ids, first, num_experts, *act, WIDTH=hidden_width, PARTS=parts, CAPPED=capped, BLOCK=block,
            **launch_options(x.device, 1),
        )  # fmt: skip
    # columns that do not exist are decoded too
    fits_half = packed and down.words == 32 and down.repeat > 1 and inner % 128 and not inner % 64
    words = 16 if fits_half else down.words
    steps = triton.cdiv(hidden_width, 4 * words)
    blocks = down.repeat if packed and steps <= 4 else 1  # plain weights would not fit shared memory
    _down_kernel[(triton.cdiv(width, down.rows * blocks), num_tiles)](
        hidden, w2, s2, g2, y, tiles, filled, order, ids, first, num_experts,
        X_WIDTH=hidden_width, BLOCKS=blocks, STEPS=steps if blocks > 1 else 0, M=down.rows,
        N=down.columns or path.width, K=words, num_stages=down.stages, **launch_options(x.device, down.warps), **fixed,
    )  # fmt: skip
    _combine(y, ids, weights, store, out)


def _combine(y, ids, weights, store, out):
    num_tokens, top_k = ids.shape
    width = out.shape[1]
    _combine_kernel[(num_tokens, triton.cdiv(width, 256))](
        y, ids, weights, out, store.first_expert, store.num_experts,
        L=width, TOP_K=top_k, SLOTS=triton.next_power_of_2(top_k), BLOCK=256, **launch_options(y.device, 1),
    )  # fmt: skip


def combine(y, ids, weights, store, dtype):
    """Weighted sum of the results `[T · k, L]` of the routes to experts of `store`."""
    out = torch.empty(ids.shape[0], y.shape[1], dtype=dtype, device=y.device)
    _combine(y, ids, weights, store, out)
    return out
