"""Attention, absorbed decode over pages, the merge of partial attentions, and the paged store and gather.

Shapes: T packed tokens, H heads, L latent width, R width of the shared key part.
"""

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3lib.errors import ConfigError
from k3lib.ops import (
    AttentionSpec,
    MergeSpec,
    MLASpec,
    RowsSpec,
    attention_varlen,
    gather_rows,
    implementations,
    merge_partials,
    mla_decode,
    store_rows,
)
from k3lib.testing import assert_close, skip_unless_able, tolerance

F32, F64, BF16, FP8 = torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn
LATENT, ROPE, PAGE = 8, 4, 4


def every(op):
    return pytest.mark.parametrize("impl", implementations(op), ids=str)


def draw(*shape, seed=0, dtype=F32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def offsets(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def one_query(q, keys, values, scale):
    """Softmax of one query `[H, D]` over `[n, H, D]`, key by key, in fp64: output and log-sum-exp."""
    q, keys, values = q.double(), keys.double(), values.double()
    if not len(keys):
        return torch.zeros(len(q), values.shape[-1], dtype=F64), torch.full((len(q),), -torch.inf, dtype=F64)
    scores = torch.stack([(q * key).sum(-1) for key in keys]) * scale
    top = scores.max(0).values
    parts = (scores - top).exp()
    return sum(p[:, None] * v for p, v in zip(parts, values, strict=True)) / parts.sum(0)[:, None], top + parts.sum(
        0
    ).log()


# ---- attention_varlen ---------------------------------------------------------------------------


def plain_attention(q, k, v, q_lengths, k_lengths, causal, scale):
    outs, lses = [], []
    for qi, ki, vi in zip(q.split(q_lengths), k.split(k_lengths), v.split(k_lengths), strict=True):
        for t, query in enumerate(qi):
            seen = max(0, len(ki) - len(qi) + t + 1) if causal else len(ki)
            out, lse = one_query(query, ki[:seen], vi[:seen], scale)
            outs.append(out)
            lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def attend(op, q, k, v, q_lengths, k_lengths, causal=True, scale=0.3, return_lse=True):
    return op(
        q, k, v, cu_seqlens_q=offsets(q_lengths).to(q.device), cu_seqlens_k=offsets(k_lengths).to(q.device),
        causal=causal, scale=scale, return_lse=return_lse,
    )  # fmt: skip


RANGES = [
    ([1], [1]), ([5, 0, 3], [5, 0, 3]), ([3, 1], [7, 65]), ([4, 2, 3], [2, 0, 3]), ([0, 2], [6, 2]), ([70], [130]),
]  # fmt: skip


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("q_lengths", "k_lengths"), RANGES, ids=str)
@every(attention_varlen)
def test_attention_matches_a_plain_softmax(impl, q_lengths, k_lengths, causal, device):
    q, k, v = draw(sum(q_lengths), 3, 6), draw(sum(k_lengths), 3, 6, seed=1), draw(sum(k_lengths), 3, 5, seed=2)
    skip_unless_able(impl, attend(AttentionSpec.of, q, k, v, q_lengths, k_lengths, causal))
    want, want_lse = plain_attention(q, k, v, q_lengths, k_lengths, causal, 0.3)
    out, lse = attend(impl.run, q.to(device), k.to(device), v.to(device), q_lengths, k_lengths, causal)
    assert_close("out", want, out, tolerance("attention_varlen", F32))
    assert_close("lse", want_lse, lse, tolerance("attention_varlen", F32))


def test_attention_in_query_blocks_equals_one_block(monkeypatch):
    q, k, v = draw(23, 2, 4), draw(30, 2, 4, seed=1), draw(30, 2, 4, seed=2)
    want, want_lse = attend(attention_varlen, q, k, v, [20, 3], [25, 5])
    monkeypatch.setattr("k3lib.ops.mla._QUERY_BLOCK", 7)
    out, lse = attend(attention_varlen, q, k, v, [20, 3], [25, 5])
    assert_close("out", want, out, tolerance("attention_varlen", F32))
    assert_close("lse", want_lse, lse, tolerance("attention_varlen", F32))


@every(attention_varlen)
def test_attention_query_without_keys_gives_zero(impl, device):
    q, k, v = (x.to(device) for x in (draw(3, 2, 4), draw(1, 2, 4, seed=1), draw(1, 2, 4, seed=2)))
    skip_unless_able(impl, attend(AttentionSpec.of, q, k, v, [3], [1]))
    out, lse = attend(impl.run, q, k, v, [3], [1])
    assert out[:2].eq(0).all()
    assert lse[:2].eq(-torch.inf).all()
    assert lse[2].isfinite().all()


@every(attention_varlen)
def test_attention_heads_are_independent(impl, device):
    q, k, v = (x.to(device) for x in (draw(9, 4, 6), draw(12, 4, 6, seed=1), draw(12, 4, 5, seed=2)))
    skip_unless_able(impl, attend(AttentionSpec.of, q, k, v, [9], [12], return_lse=False))
    order = [2, 0, 3, 1]
    want = attend(impl.run, q, k, v, [9], [12], return_lse=False)[:, order]
    got = attend(impl.run, q[:, order], k[:, order], v[:, order], [9], [12], return_lse=False)
    assert_close("out", want, got, tolerance("attention_varlen", F32))


@every(attention_varlen)
def test_attention_survives_huge_scores(impl, device):
    q, k, v = draw(5, 2, 4) * 100, draw(5, 2, 4, seed=1) * 100, draw(5, 2, 4, seed=2)
    skip_unless_able(impl, attend(AttentionSpec.of, q, k, v, [5], [5]))
    want, want_lse = plain_attention(q, k, v, [5], [5], True, 0.3)
    out, lse = attend(impl.run, q.to(device), k.to(device), v.to(device), [5], [5])
    # a score of ten thousand is known to half a thousandth in fp32, and so are the weights
    assert_close("out", want, out, ratio=100 * tolerance("attention_varlen", F32))
    assert_close("lse", want_lse, lse, tolerance("attention_varlen", F32))


def test_attention_bf16_is_rounded_once():
    q, k, v = draw(9, 2, 8, dtype=BF16), draw(9, 2, 8, seed=1, dtype=BF16), draw(9, 2, 8, seed=2, dtype=BF16)
    want, want_lse = plain_attention(q, k, v, [9], [9], True, 0.3)
    out, lse = attend(attention_varlen, q, k, v, [9], [9])
    assert (out.dtype, lse.dtype) == (BF16, F32)
    assert_close("out", want, out, tolerance("attention_varlen", BF16))
    assert_close("lse", want_lse, lse, tolerance("attention_varlen", F32))


@pytest.mark.parametrize(
    ("q_lengths", "k_lengths", "message"),
    [
        ([3], [2, 2], "1 requests of queries, 2 of keys"),
        ([2], [4], "cu_seqlens must rise"),
        ([3], [5], "cu_seqlens must"),
    ],
)
def test_attention_refuses_offsets_that_do_not_fit(q_lengths, k_lengths, message):
    q, k, v = draw(3, 2, 4), draw(4, 2, 4), draw(4, 2, 4)
    with pytest.raises(ConfigError, match=message):
        attend(attention_varlen, q, k, v, q_lengths, k_lengths)


def test_attention_gradients_are_right():
    leaves = [draw(*s, seed=i, dtype=F64).requires_grad_() for i, s in enumerate([(5, 2, 3), (6, 2, 3), (6, 2, 2)])]
    call = lambda q, k, v: attend(attention_varlen, q, k, v, [2, 3], [4, 2])  # noqa: E731

    def finite(q, k, v):
        out, lse = call(q, k, v)
        return out, lse.masked_fill(lse.isinf(), 0)

    assert torch.autograd.gradcheck(finite, leaves, fast_mode=True)


# ---- mla_decode ---------------------------------------------------------------------------------


class Paged:
    """A shuffled page table over pages of which every unused row is NaN and every unused entry is absurd."""

    def __init__(self, key_counts, *, dtype=F32, seed=0):
        g = torch.Generator().manual_seed(seed)
        needed = [-(-n // PAGE) for n in key_counts]
        total = sum(needed)
        numbers = (torch.randperm(total, generator=g) + 1).tolist()
        self.pages = torch.full((total + 3, PAGE, LATENT + ROPE), torch.nan).to(dtype)
        self.table = torch.full((len(key_counts), max(needed, default=0) + 2), 2**31 - 1, dtype=torch.int32)
        self.table[:, -1] = -12345
        self.rows = []
        for i, (count, pages) in enumerate(zip(key_counts, needed, strict=True)):
            mine = [numbers.pop() for _ in range(pages)]
            self.table[i, :pages] = torch.tensor(mine, dtype=torch.int32)
            values = torch.randn(count, LATENT + ROPE, generator=g).to(dtype)
            for r in range(count):
                self.pages[mine[r // PAGE], r % PAGE] = values[r]
            self.rows.append(values)


def decode(op, q, paged, lengths, key_lens, return_lse=True):
    where = q.device
    return op(
        q,
        paged.pages.to(where),
        latent_dim=LATENT,
        page_table=paged.table.to(where),
        key_lens=torch.tensor(key_lens, dtype=torch.int32, device=where),
        cu_seqlens=offsets(lengths).to(where),
        scale=0.3,
        return_lse=return_lse,
    )


def decode_want(q, paged, lengths, key_lens):
    """Each token through `attention_varlen`, with all heads sharing the gathered rows."""
    request = [i for i, n in enumerate(lengths) for _ in range(n)]
    rows = [paged.rows[i][:n].double() for i, n in zip(request, key_lens, strict=True)]
    keys = torch.cat([*rows, torch.zeros(0, LATENT + ROPE, dtype=F64)])[:, None].expand(-1, q.shape[1], -1)
    counts = [len(r) for r in rows]
    return attend(attention_varlen.reference, q.double(), keys, keys[..., :LATENT], [1] * len(q), counts, causal=False)


STEPS = {
    "decode": ([1, 1, 1], [5, 1, 9], [5, 1, 9]),
    "verify": ([3, 3], [7, 11], [5, 6, 7, 9, 10, 11]),
    "mixed": ([2, 0, 1, 4], [6, 3, 1, 13], [5, 6, 1, 10, 11, 12, 13]),
    "no keys": ([1, 2, 1], [0, 4, 0], [0, 0, 4, 0]),
    "nothing at all": ([1, 1], [0, 0], [0, 0]),
    "dcp": ([2, 2], [4, 2], [4, 4, 1, 2]),
    "whole pages": ([1, 1], [8, 4], [8, 4]),
}


@pytest.mark.parametrize(("lengths", "key_counts", "key_lens"), STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("heads", [1, 3])
@every(mla_decode)
def test_decode_matches_attention_on_gathered_rows(impl, heads, lengths, key_counts, key_lens, device):
    paged, q = Paged(key_counts), draw(sum(lengths), heads, LATENT + ROPE, seed=1)
    skip_unless_able(impl, decode(MLASpec.of, q, paged, lengths, key_lens))
    want, want_lse = decode_want(q, paged, lengths, key_lens)
    out, lse = decode(impl.run, q.to(device), paged, lengths, key_lens)
    assert_close("out", want, out, tolerance("mla_decode", F32))
    assert_close("lse", want_lse, lse, tolerance("mla_decode", F32))


@every(mla_decode)
def test_decode_without_keys_gives_zero(impl, device):
    paged, q = Paged([0, 3]), draw(2, 2, LATENT + ROPE)
    skip_unless_able(impl, decode(MLASpec.of, q, paged, [1, 1], [0, 3]))
    out, lse = decode(impl.run, q.to(device), paged, [1, 1], [0, 3])
    assert out[0].eq(0).all()
    assert lse[0].eq(-torch.inf).all()


@every(mla_decode)
def test_decode_heads_are_independent(impl, device):
    paged, q = Paged([6, 9]), draw(2, 4, LATENT + ROPE).to(device)
    skip_unless_able(impl, decode(MLASpec.of, q, paged, [1, 1], [6, 9], return_lse=False))
    order = [2, 0, 3, 1]
    want = decode(impl.run, q, paged, [1, 1], [6, 9], return_lse=False)[:, order]
    got = decode(impl.run, q[:, order], paged, [1, 1], [6, 9], return_lse=False)
    assert_close("out", want, got, tolerance("mla_decode", F32))


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
@every(mla_decode)
def test_decode_reads_narrow_pages_exactly(impl, dtype, device):
    paged, q = Paged([6, 9], dtype=dtype), draw(2, 3, LATENT + ROPE, seed=1)
    skip_unless_able(impl, decode(MLASpec.of, q, paged, [1, 1], [6, 9]))
    want, _ = decode_want(q, paged, [1, 1], [6, 9])
    out, _ = decode(impl.run, q.to(device), paged, [1, 1], [6, 9])
    assert out.dtype == F32
    assert_close("out", want, out, tolerance("mla_decode", F32))


@pytest.mark.parametrize(("lengths", "key_lens"), [([1, 1], [40, 9]), ([5, 2], [36, 37, 38, 39, 40, 8, 9])], ids=str)
@every(mla_decode)
def test_decode_over_fp8_pages_is_within_quantisation_error(impl, lengths, key_lens, device):
    plain, q = Paged([40, 9]), draw(sum(lengths), 3, LATENT + ROPE, seed=1)
    paged = Paged([40, 9], dtype=FP8)
    skip_unless_able(impl, decode(MLASpec.of, q, paged, lengths, key_lens))
    want, _ = decode_want(q, plain, lengths, key_lens)
    out, _ = decode(impl.run, q.to(device), paged, lengths, key_lens)
    assert_close("out", want, out, tolerance("mla_decode", FP8))


@every(mla_decode)
def test_decode_leaves_the_pages_alone(impl, device):
    paged, q = Paged([6]), draw(1, 2, LATENT + ROPE).to(device)
    skip_unless_able(impl, decode(MLASpec.of, q, paged, [1], [6]))
    before = paged.pages.clone()
    decode(impl.run, q, paged, [1], [6])
    assert paged.pages.nan_to_num(7).equal(before.nan_to_num(7))


def test_decode_past_the_page_table_is_refused():
    paged, q = Paged([4]), draw(1, 2, LATENT + ROPE)
    with pytest.raises(ConfigError, match="key_lens reach 13, a page table row holds 3 pages of 4"):
        decode(mla_decode, q, paged, [1], [13])


def test_decode_refuses_shapes_that_do_not_fit():
    paged = Paged([4])
    with pytest.raises(ConfigError, match="q has width 11, pages have 12"):
        decode(mla_decode, draw(1, 2, 11), paged, [1], [4])
    with pytest.raises(ConfigError, match="page_table has 1 rows for 2 requests"):
        decode(mla_decode, draw(2, 2, 12), paged, [1, 1], [4, 4])
    with pytest.raises(ConfigError, match=r"key_lens \(2,\) for 1 tokens"):
        decode(mla_decode, draw(1, 2, 12), paged, [1], [4, 4])


@pytest.mark.parametrize(("lengths", "key_lens"), [([1, 1], [3, 5]), ([2, 1], [2, 3, 5])], ids=str)
def test_decode_gradients_reach_queries_and_pages(lengths, key_lens):
    paged = Paged([3, 5], dtype=F64)
    q = draw(sum(lengths), 2, LATENT + ROPE, dtype=F64).requires_grad_()
    pages = paged.pages.nan_to_num(0.5).requires_grad_()

    def call(q, pages):
        paged.pages = pages
        return decode(mla_decode, q, paged, lengths, key_lens)

    assert torch.autograd.gradcheck(call, [q, pages], fast_mode=True)


# ---- merge_partials -----------------------------------------------------------------------------


@given(
    keys=st.integers(0, 13),
    cuts=st.lists(st.integers(0, 13), max_size=4),
    seed=st.integers(0, 2**16),
    op=st.sampled_from(implementations(merge_partials)),
)
def test_partials_merge_to_the_whole(keys, cuts, seed, op):
    q, k, v = draw(2, 3, 4, seed=seed), draw(keys, 3, 4, seed=seed + 1), draw(keys, 3, 5, seed=seed + 2)
    bounds = [0, *sorted(min(c, keys) for c in cuts), keys]
    outs, lses = [], []
    for begin, end in pairwise(bounds):
        counts = [end - begin]
        out, lse = attend(attention_varlen, q, k[begin:end], v[begin:end], [2], counts, causal=False)
        outs.append(out if end > begin else torch.full_like(out, torch.nan))
        lses.append(lse)
    outs, lses = torch.stack(outs), torch.stack(lses)
    if op.why_not(MergeSpec.of(outs, lses), merge_partials.local_target("cpu")) is not None:
        return
    want, want_lse = plain_attention(q, k, v, [2], [keys], False, 0.3)
    out, lse = op.run(outs, lses)
    assert_close("out", want, out, tolerance("merge_partials", F32))
    assert_close("lse", want_lse, lse, tolerance("merge_partials", F32))


@every(merge_partials)
def test_merge_of_nothing_is_zero(impl, device):
    outs, lses = torch.full((3, 2, 1, 4), torch.nan), torch.full((3, 2, 1), -torch.inf)
    skip_unless_able(impl, MergeSpec.of(outs, lses))
    out, lse = impl.run(outs.to(device), lses.to(device))
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()


@every(merge_partials)
def test_merge_survives_far_apart_parts(impl, device):
    outs, lses = draw(2, 3, 1, 4), torch.tensor([[1e4], [-1e4], [0.0]]).expand(2, 3, 1).clone()
    lses[1] = -lses[1]
    skip_unless_able(impl, MergeSpec.of(outs, lses))
    out, lse = impl.run(outs.to(device), lses.to(device))
    assert_close(
        "out", torch.stack([outs[0, 0], outs[1, 1], outs[:, 2].mean(0)]), out, tolerance("merge_partials", F32)
    )
    assert_close("lse", torch.tensor([[1e4], [1e4], [0.6931472]]), lse, tolerance("merge_partials", F32))


def test_merge_refuses_shapes_that_do_not_fit():
    with pytest.raises(ConfigError, match="do not fit outs"):
        merge_partials(draw(2, 3, 1, 4), draw(2, 3, 2))


def test_merge_gradients_are_right():
    outs, lses = draw(3, 2, 2, 4, dtype=F64).requires_grad_(), draw(3, 2, 2, seed=1, dtype=F64).requires_grad_()
    assert torch.autograd.gradcheck(merge_partials, [outs, lses])


# ---- store_rows and gather_rows -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16, FP8], ids=str)
@every(gather_rows)
def test_gather_returns_what_store_wrote(impl, dtype, device):
    values, rows = draw(4, 6), torch.tensor([9, 3, 11, 4])
    pages = torch.zeros(4, 3, 6).to(dtype)
    skip_unless_able(impl, RowsSpec.of_gather(pages, rows))
    store_rows(values, pages, rows)
    got = impl.run(pages.to(device), rows.to(device)).cpu()
    assert got.dtype == dtype
    assert got.float().equal(values.to(dtype).float())


@pytest.mark.parametrize("dtype", [F32, BF16, FP8], ids=str)
@every(store_rows)
def test_store_drops_rows_that_are_not_mine(impl, dtype, device):
    values, rows = draw(4, 6), torch.tensor([0, 5, -1, -12])
    pages = torch.ones(4, 3, 6).to(dtype)
    skip_unless_able(impl, RowsSpec.of_store(values, pages, rows))
    got = pages.clone().to(device)
    impl.run(values.to(device), got, rows.to(device))
    want = pages.float().view(12, 6)
    want[5] = values[1].to(dtype).float()
    # row 0 is the null row: nobody reads meaning from it
    assert got.cpu().float().view(12, 6)[1:].equal(want[1:])
    assert got.float().isfinite().all()


@every(store_rows)
def test_store_past_the_end_writes_nothing(impl):
    values, rows, pages = draw(2, 6), torch.tensor([1, 12]), torch.zeros(4, 3, 6)
    skip_unless_able(impl, RowsSpec.of_store(values, pages, rows))
    if impl.name != "reference":
        pytest.skip("the op's debug mode checks rows for kernels")
    with pytest.raises(ConfigError, match=r"row 12 is past the end of a pool with rows 0\.\.11"):
        impl.run(values, pages, rows)
    assert pages.eq(0).all()


def test_gather_past_the_end_is_refused():
    with pytest.raises(ConfigError, match=r"row 12 is past the end of rows 0\.\.11"):
        gather_rows(torch.zeros(4, 3, 6), torch.tensor([12]))


@pytest.mark.parametrize("dtype", [F32, FP8], ids=str)
@every(gather_rows)
def test_gather_of_no_row_reads_the_null_row(impl, dtype, device):
    pages, rows = draw(2, 3, 6).to(dtype), torch.tensor([0, -1, -5, 4])
    skip_unless_able(impl, RowsSpec.of_gather(pages, rows))
    got = impl.run(pages.to(device), rows.to(device)).cpu().float()
    flat = pages.float().view(6, 6)
    assert got.equal(flat[[0, 0, 0, 4]])


@every(store_rows)
def test_fp8_store_saturates(impl, device):
    values = torch.tensor([[1e6, -1e6, 448.0, 460.0, 0.0, 1.0]])
    pages, rows = torch.zeros(2, 1, 6).to(FP8), torch.tensor([1])
    skip_unless_able(impl, RowsSpec.of_store(values, pages, rows))
    pages = pages.to(device)
    impl.run(values.to(device), pages, rows.to(device))
    assert pages[1, 0].float().tolist() == [448.0, -448.0, 448.0, 448.0, 0.0, 1.0]


def test_store_refuses_shapes_that_do_not_fit():
    pages = torch.zeros(2, 3, 6)
    with pytest.raises(ConfigError, match="do not fit pages"):
        store_rows(draw(2, 5), pages, torch.tensor([1, 2]))
    with pytest.raises(ConfigError, match="do not fit pages"):
        store_rows(draw(2, 6), pages, torch.tensor([1]))
