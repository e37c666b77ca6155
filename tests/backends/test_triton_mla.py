"""Latent attention in Triton: absorbed decode over pages, and attention over variable lengths.

Shapes: T packed tokens, H heads, L latent width, R width of the shared key part.
"""

from itertools import accumulate

import pytest
import torch

from k3lib.backends.triton import mla
from k3lib.errors import ConfigError
from k3lib.ops import MLASpec, attention_varlen, mla_decode
from k3lib.ops.mla import AttentionSpec
from k3lib.testing import assert_close, tolerance

pytest.importorskip("triton")

F16, F32, BF16, FP8 = torch.float16, torch.float32, torch.bfloat16, torch.float8_e4m3fn
ON_GPU = torch.cuda.is_available()
DTYPES = [F32, F16, BF16] if ON_GPU else [F32, F16]
gpu_only = pytest.mark.skipif(not ON_GPU, reason="needs a GPU: too much for the interpreter")


def offsets(lengths, device):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def draw(*shape, device, seed=0, dtype=F32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def paged(key_counts, *, latent, rope, page, dtype, device, tail=2, seed=0):
    """Pages in random order; rows that nobody has are NaN, entries behind the last page absurd."""
    g = torch.Generator().manual_seed(seed)
    needed = [-(-n // page) for n in key_counts]
    total = sum(needed)
    pages = torch.full((total + 2, page, latent + rope), torch.nan)
    order = (torch.randperm(total, generator=g) + 1).split(needed)
    table = torch.full((len(key_counts), max(needed) + tail), 2**31 - 1, dtype=torch.int32)
    table[:, -1] = -12345
    for i, (count, mine) in enumerate(zip(key_counts, order, strict=True)):
        table[i, : len(mine)] = mine
        rows = torch.full((len(mine) * page, latent + rope), torch.nan)
        rows[:count] = torch.randn(count, latent + rope, generator=g)
        pages[mine.long()] = rows.view(-1, page, latent + rope)
    return pages.to(dtype).to(device), table.to(device)


def call_of(lengths, key_counts, key_lens, *, heads, latent, rope, page, dtype, device, kv_dtype=None, scale=0.3):
    pages, table = paged(key_counts, latent=latent, rope=rope, page=page, dtype=kv_dtype or dtype, device=device)
    return {
        "q": draw(sum(lengths), heads, latent + rope, seed=1, dtype=dtype, device=device),
        "pages": pages,
        "latent_dim": latent,
        "page_table": table,
        "key_lens": torch.tensor(key_lens, dtype=torch.int32, device=device),
        "cu_seqlens": offsets(lengths, device),
        "scale": scale,
    }


def run(call):
    """The adapter, on a GPU twice: the bits are the same. The interpreter runs one program after another."""
    spec = MLASpec.of(**call)
    assert mla._supports_decode(spec) is None
    out, lse = mla.mla_decode_triton(**call, return_lse=True)
    if ON_GPU:
        again, again_lse = mla.mla_decode_triton(**call, return_lse=True)
        assert out.equal(again)
        assert lse.equal(again_lse)
    return out, lse


def check(call):
    want, want_lse = mla_decode.reference(**{**call, "q": call["q"].float()}, return_lse=True)
    out, lse = run(call)
    assert (out.dtype, lse.dtype) == (call["q"].dtype, F32)
    assert_close("out", want, out, tolerance("mla_decode", out.dtype))
    assert_close("lse", want_lse, lse, tolerance("mla_decode", F32 if out.dtype == F32 else out.dtype))


STEPS = {
    "decode": ([1, 1, 1], [5, 1, 40], [5, 1, 40]),
    "verify": ([3, 3], [7, 31], [5, 6, 7, 29, 30, 31]),
    "mixed": ([2, 0, 1, 4], [6, 3, 1, 33], [5, 6, 1, 30, 31, 32, 33]),
    "as many tokens as requests": ([0, 2, 1, 0, 2, 1], [3, 9, 8, 0, 7, 2], [8, 9, 8, 6, 7, 2]),
    "no keys": ([1, 2, 1], [0, 4, 0], [0, 0, 4, 0]),
    "nothing at all": ([1, 1], [0, 0], [0, 0]),
    "of other ranks": ([2, 2], [4, 2], [4, 4, 1, 2]),
    "whole pages": ([1, 1], [32, 16], [32, 16]),
    "sixteen tokens": ([16], [20], list(range(5, 21))),
}


# without and with splits; the interpreter takes its time
RUNS = [(dtype, count) for dtype in DTYPES for count in (1, 20) if ON_GPU or (dtype, count) != (F16, 1)]


@pytest.mark.parametrize(("dtype", "multiprocessors"), RUNS, ids=str)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_decode_matches_the_reference(step, dtype, multiprocessors, device, monkeypatch):
    monkeypatch.setattr(mla, "_multiprocessors", lambda _: multiprocessors)
    check(call_of(*step, heads=3, latent=16, rope=8, page=16, dtype=dtype, device=device))


@pytest.mark.parametrize(("latent", "rope", "page", "heads"), [
    (16, 0, 16, 1), (8, 4, 4, 3), (32, 20, 1, 2), (16, 16, 64, 17), (24, 3, 10, 5), (64, 1, 7, 12),
])  # fmt: skip
def test_decode_takes_any_width_page_and_number_of_heads(latent, rope, page, heads, device):
    check(
        call_of(
            [1, 0, 3], [50, 2, 9], [50, 7, 8, 9], heads=heads, latent=latent, rope=rope, page=page, dtype=F32,
            device=device,
        )
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [F16, BF16] if ON_GPU else [F16], ids=str)
@pytest.mark.parametrize("heads", [12, 70])
def test_decode_of_many_rows(heads, dtype, device):
    check(call_of([0, 2], [0, 66], [65, 66], heads=heads, latent=16, rope=16, page=64, dtype=dtype, device=device))


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_fixed_splits_match_the_reference(step, device, monkeypatch):
    monkeypatch.setattr(mla, "_FIXED_KEYS", 16)
    call = call_of(*step, heads=3, latent=16, rope=8, page=16, dtype=F32, device=device)
    want, want_lse = mla_decode.reference(**call, return_lse=True)
    out, lse = mla.mla_decode_triton_fixed(**call, return_lse=True)
    assert_close("out", want, out, tolerance("mla_decode", F32))
    assert_close("lse", want_lse, lse, tolerance("mla_decode", F32))


def test_fixed_splits_give_a_token_the_same_bits_in_any_company(device, monkeypatch):
    monkeypatch.setattr(mla, "_FIXED_KEYS", 32)
    call = call_of([1, 3, 1], [5, 100, 9], [5, 98, 99, 100, 9], heads=3, latent=16, rope=8, page=16, dtype=F32,
                   device=device)  # fmt: skip
    want, want_lse = mla.mla_decode_triton_fixed(**call, return_lse=True)
    for token, request, pages in ((0, 0, 1), (1, 1, 7), (3, 1, 8), (4, 2, 1)):
        alone = {
            **call, "q": call["q"][token : token + 1], "key_lens": call["key_lens"][token : token + 1],
            "page_table": call["page_table"][request : request + 1, :pages], "cu_seqlens": offsets([1], device),
        }  # fmt: skip
        out, lse = mla.mla_decode_triton_fixed(**alone, return_lse=True)
        assert out[0].equal(want[token])
        assert lse[0].equal(want_lse[token])


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)  # over fp8, bf16 queries become fp16
def test_decode_over_fp8_pages(dtype, device):
    check(
        call_of(
            [1, 1, 2], [5, 70, 9], [5, 70, 8, 9], heads=3, latent=32, rope=16, page=16, dtype=dtype, kv_dtype=FP8,
            device=device,
        )
    )  # fmt: skip


def test_decode_over_fp8_pages_takes_queries_beyond_fp16(device):
    call = call_of(
        [1, 1], [40, 9], [40, 9], heads=3, latent=32, rope=16, page=16, dtype=BF16, kv_dtype=FP8, device=device,
        scale=1e-7,
    )  # fmt: skip
    call["q"] *= 3e6
    call["q"][0, 0] *= 1e-30
    call["q"][1, 2] = 0
    check(call)


def test_decode_survives_huge_scores(device):
    call = call_of([1, 2], [40, 9], [40, 8, 9], heads=3, latent=16, rope=8, page=16, dtype=F32, device=device)
    call["q"] *= 1000
    want, want_lse = mla_decode.reference(**call, return_lse=True)
    out, lse = run(call)
    # a score of a thousand is known to a ten thousandth, and so are the weights
    assert_close("out", want, out, 100 * tolerance("mla_decode", F32))
    assert_close("lse", want_lse, lse, tolerance("mla_decode", F32))


def test_decode_of_more_requests_than_are_looked_at_together(device):
    lengths = [1 if i in (3, 60, 135) else 2 if i == 138 else 0 for i in range(140)]
    counts = [2 + i % 5 for i in range(140)]
    lens = [n for m, n in zip(lengths, counts, strict=True) for n in range(n - m + 1, n + 1)]
    call = call_of(lengths, counts, lens, heads=1, latent=16, rope=0, page=4, dtype=F32, device=device)
    check(call)


def test_decode_of_more_tokens_than_requests_that_are_looked_at_together(device):
    lengths = [141 if i == 135 else 0 for i in range(140)]
    counts = [n // 5 + 3 for n in lengths]
    lens = [n % 31 for n in range(141)]
    check(call_of(lengths, counts, lens, heads=1, latent=16, rope=0, page=64, dtype=F32, device=device))


def test_decode_of_no_tokens(device):
    call = call_of([0, 0], [5, 9], [], heads=3, latent=16, rope=8, page=4, dtype=F32, device=device)
    out, lse = mla.mla_decode_triton(**call, return_lse=True)
    assert (out.shape, lse.shape) == ((0, 3, 16), (0, 3))


def test_decode_leaves_its_inputs_alone(device):
    call = call_of([1, 1], [5, 9], [5, 9], heads=3, latent=16, rope=8, page=4, dtype=F32, device=device)
    before = {name: x.clone() for name, x in call.items() if isinstance(x, torch.Tensor)}
    run(call)
    for name, x in before.items():
        assert call[name].nan_to_num(7).equal(x.nan_to_num(7)), name


def test_decode_takes_strided_queries_and_tables(device):
    call = call_of([1, 1], [5, 9], [5, 9], heads=3, latent=16, rope=8, page=4, dtype=F32, device=device)
    want = mla.mla_decode_triton(**call)
    wide = torch.cat([call["q"], torch.full_like(call["q"], torch.nan)], dim=-1)
    table = torch.cat([call["page_table"], torch.full_like(call["page_table"], -7)], dim=1)
    count = call["page_table"].shape[1]
    got = mla.mla_decode_triton(**{**call, "q": wide[..., :24], "page_table": table[:, :count]})
    assert got.equal(want)


def test_decode_past_the_table_stays_inside_it(device):
    call = call_of([1], [16], [10**9], heads=2, latent=16, rope=0, page=4, dtype=F32, device=device)
    call["page_table"] = call["page_table"][:, :4].contiguous()
    want = mla_decode.reference(**{**call, "key_lens": call["key_lens"].clamp(max=16)})
    assert_close("out", want, mla.mla_decode_triton(**call), tolerance("mla_decode", F32))


def test_decode_reads_the_null_page_for_pages_that_do_not_exist(device):
    call = call_of([1], [8], [8], heads=2, latent=16, rope=0, page=4, dtype=F32, device=device)
    call["pages"][0] = 0
    call["page_table"][0, 1] = 10**6
    zeroed = {**call, "page_table": call["page_table"].clone()}
    zeroed["page_table"][0, 1] = 0
    assert mla.mla_decode_triton(**call).equal(mla.mla_decode_triton(**zeroed))


@pytest.mark.parametrize(("change", "message"), [
    (lambda c: {"q": c["q"][..., :-1]}, "q .* does not fit pages"),
    (lambda c: {"latent_dim": 25}, "latent_dim=25 does not lie in 1..24"),
    (lambda c: {"key_lens": c["key_lens"][:1]}, r"key_lens \(1,\) for 2 tokens"),
    (lambda c: {"page_table": c["page_table"][:1]}, "for 2 requests"),
    (lambda c: {"page_table": c["page_table"].float()}, "page_table must be int32, got torch.float32"),
    (lambda c: {"page_table": c["page_table"].t().contiguous().t()}, "rows of page_table must be contiguous"),
    (lambda c: {"pages": c["pages"].transpose(0, 1).contiguous().transpose(0, 1)}, "pages must be contiguous"),
])  # fmt: skip
def test_decode_refuses_what_does_not_fit(change, message, device):
    call = call_of([1, 1], [5, 9], [5, 9], heads=3, latent=16, rope=8, page=4, dtype=F32, device=device)
    with pytest.raises(ConfigError, match=message):
        mla.mla_decode_triton(**{**call, **change(call)})


def test_decode_says_what_it_cannot_do():
    def why(**facts):
        plain = {
            "heads": 12, "latent_dim": 512, "rope_dim": 64, "value_dim": 512, "dtype": BF16, "kv_dtype": BF16,
            "page_size": 64, "tokens_per_request": "1",
        }  # fmt: skip
        return mla._supports_decode(MLASpec(**{**plain, **facts}))

    assert why() is None
    assert why(kv_dtype=FP8, return_lse=True) is None
    assert why(dtype=torch.float64) == "needs bfloat16, float16 or float32, got torch.float64"
    assert "needs pages of torch.bfloat16" in why(kv_dtype=F32)
    assert "latent_dim <= 512" in why(latent_dim=1024)


def test_decode_is_launched_by_static_facts():
    def config(rows, tokens, dtype=BF16, kv_dtype=BF16):
        return mla._decode_config(dtype, kv_dtype, rows, tokens, 132)

    assert config(12, 1) == config(12, 16) == config(12, 8, kv_dtype=FP8) == mla._DECODE_FEW
    assert config(12, 17) == mla._DECODE[16]
    assert config(12, 17, kv_dtype=FP8) == mla._DECODE_FEW
    assert [config(rows, 1).block_m for rows in (17, 32, 33, 96, 768)] == [32, 32, 64, 64, 64]
    assert config(96, 1, dtype=F32) == mla._DECODE_FP32


@pytest.mark.parametrize(("tiles", "blocks", "slots", "least", "most"), [
    (1, 128, 132, 128, 128), (32, 128, 132, 4, 4), (16, 2048, 132, 8, 8), (300, 64, 132, 1, 16), (1, 1, 132, 1, 1),
    (1, 16384, 132, 128, 132), (1, 0, 132, 1, 1),
])  # fmt: skip
def test_the_keys_are_split_so_that_all_multiprocessors_work(tiles, blocks, slots, least, most):
    splits = mla._num_splits(tiles, blocks, slots)
    assert least <= splits <= most
    if blocks > 1:
        rounds = -(-tiles * splits // slots)
        assert tiles * splits / (rounds * slots) > 0.7


# ---- attention over variable lengths ------------------------------------------------------------


RANGES = [
    ([1], [1]), ([5, 0, 3], [5, 0, 3]), ([3, 1], [7, 65]), ([4, 2, 3], [2, 0, 3]), ([0, 2], [6, 2]), ([70], [130]),
]  # fmt: skip


def attend(q_lengths, k_lengths, *, heads=3, key_dim=24, value_dim=20, dtype=F32, device, causal=True):
    call = {
        "q": draw(sum(q_lengths), heads, key_dim, dtype=dtype, device=device),
        "k": draw(sum(k_lengths), heads, key_dim, seed=1, dtype=dtype, device=device),
        # the values of the layer are a slice
        "v": draw(sum(k_lengths), heads, value_dim + 3, seed=2, dtype=dtype, device=device)[..., 3:],
        "cu_seqlens_q": offsets(q_lengths, device),
        "cu_seqlens_k": offsets(k_lengths, device),
        "causal": causal,
        "scale": 0.3,
    }
    assert mla._supports_attention(AttentionSpec.of(**call)) is None
    wide = {**call, **{name: call[name].float() for name in "qkv"}}
    want, want_lse = attention_varlen.reference(**wide, return_lse=True)
    out, lse = mla.attention_varlen_triton(**call, return_lse=True)
    assert_close("out", want, out, tolerance("attention_varlen", dtype))
    assert_close("lse", want_lse, lse, tolerance("attention_varlen", dtype))
    assert out.equal(mla.attention_varlen_triton(**call))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("q_lengths", "k_lengths"), RANGES, ids=str)
def test_attention_matches_the_reference(q_lengths, k_lengths, dtype, causal, device):
    attend(q_lengths, k_lengths, dtype=dtype, causal=causal, device=device)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(6, 5), (16, 16), (48, 32), (17, 33)])
def test_attention_takes_any_width(key_dim, value_dim, device):
    attend([9, 2], [12, 40], key_dim=key_dim, value_dim=value_dim, device=device)


def test_attention_without_tokens(device):
    attend([0, 0], [3, 0], device=device)
    attend([2, 0], [0, 0], device=device)


def test_attention_does_not_look_at_neighbours(device):
    q, k, v = (draw(20, 2, 16, seed=i, device=device) for i in range(3))
    cu = offsets([7, 13], device)
    call = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": True, "scale": 0.3}
    want = mla.attention_varlen_triton(q, k, v, **call)[:7]
    for x in (q, k, v):
        x[7:] = torch.nan
    assert mla.attention_varlen_triton(q, k, v, **call)[:7].equal(want)


@pytest.mark.parametrize("dtype", [BF16] if ON_GPU else [F32], ids=str)
def test_attention_gives_a_request_the_same_bits_in_any_company(dtype, device):
    lengths = [70, 33, 1, 2000 if ON_GPU else 20]
    q, k, v = (draw(sum(lengths), 4, 32, seed=i, dtype=dtype, device=device) for i in range(3))
    cu = offsets(lengths, device)
    together = mla.attention_varlen_triton(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, scale=0.3)
    for i, mine in enumerate(together.split(lengths)):
        parts = [x.split(lengths)[i] for x in (q, k, v)]
        one = offsets([lengths[i]], device)
        assert mla.attention_varlen_triton(
            *parts, cu_seqlens_q=one, cu_seqlens_k=one, causal=True, scale=0.3
        ).equal(mine)  # fmt: skip


def test_attention_refuses_what_does_not_fit(device):
    q, k, v = (draw(3, 2, 16, device=device) for _ in range(3))
    cu = offsets([3], device)
    with pytest.raises(ConfigError, match="do not fit together"):
        mla.attention_varlen_triton(q, k[:, :1], v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, scale=1.0)
    with pytest.raises(ConfigError, match="1 requests of queries, 2 of keys"):
        mla.attention_varlen_triton(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=offsets([1, 2], device), causal=True, scale=1.0
        )


# ---- real sizes ---------------------------------------------------------------------------------


@gpu_only
@pytest.mark.parametrize("kv_dtype", [BF16, FP8], ids=str)
@pytest.mark.parametrize("heads", [6, 12, 24, 48, 96])
def test_decode_of_real_size(heads, kv_dtype, device):
    step = ([1, 1, 1, 1], [8192, 1, 700, 65], [8192, 1, 700, 65])
    check(call_of(*step, heads=heads, latent=512, rope=64, page=64, dtype=BF16, kv_dtype=kv_dtype, device=device,
                  scale=192**-0.5))  # fmt: skip


@gpu_only
@pytest.mark.parametrize("heads", [6, 12, 96])
def test_verify_of_real_size(heads, device):
    step = ([8, 0, 8], [4000, 5, 900], [*range(3993, 4001), *range(893, 901)])
    check(call_of(*step, heads=heads, latent=512, rope=64, page=64, dtype=BF16, device=device, scale=192**-0.5))


@gpu_only
def test_decode_at_a_million_tokens(device):
    context, page = 1 << 20, 64
    pages = torch.randn(context // page + 1, page, 576, dtype=BF16, device=device)
    call = {
        "q": draw(1, 6, 576, dtype=BF16, device=device),
        "pages": pages,
        "latent_dim": 512,
        "page_table": (torch.randperm(context // page, device=device) + 1).int()[None],
        "key_lens": torch.tensor([context - 3], dtype=torch.int32, device=device),
        "cu_seqlens": offsets([1], device),
        "scale": 192**-0.5,
    }
    check(call)


@gpu_only
def test_nothing_is_compiled_while_lengths_change(device):
    from k3lib.backends.triton import mla_kernels  # noqa: PLC0415 - after the interpreter was chosen

    def count():
        kernels = (mla_kernels._decode_kernel, mla_kernels._merge_kernel)
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    def step(requests, context):
        counts = [context] * requests
        check(call_of([1] * requests, counts, counts, heads=12, latent=512, rope=64, page=64, dtype=BF16,
                      device=device))  # fmt: skip

    for context in (64, 3000):
        step(2, context)
    before = count()
    for requests, context in ((1, 1), (2, 17), (3, 1000), (5, 4097), (16, 640)):
        step(requests, context)
    assert count() <= before + 1  # the merge of few and of many splits


@gpu_only
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("q_lengths", "k_lengths"), [([300, 0, 1, 129], [300, 0, 1, 129]), ([64, 5], [1000, 5000])])
def test_attention_of_real_size(q_lengths, k_lengths, causal, device):
    attend(q_lengths, k_lengths, key_dim=192, value_dim=128, heads=4, dtype=BF16, causal=causal, device=device)
