"""Decode context parallelism: who owns which token, and that parts of attention merge to the whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeded import Ranks, copy_shard, draw, seed_weights

from k3lib import Batch
from k3lib.batch import LatentPages
from k3lib.config import MLAConfig
from k3lib.errors import ConfigError
from k3lib.layers import GatedMLA
from k3lib.ops import mla_decode
from k3lib.parallel import LOCAL, RankView, dcp
from k3lib.testing import assert_close

CONFIG = MLAConfig(
    hidden_size=24, num_heads=4, q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5
)
PAGE = 2


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 4))
def test_every_token_has_one_owner_and_one_row(length, size, interleave):
    positions = torch.arange(length)
    owners = torch.zeros(length, dtype=torch.int64)
    for rank in range(size):
        mine = dcp.owned(positions, size, rank, interleave)
        rows = dcp.local_rows(positions, size, rank, interleave)
        owners += mine
        assert rows[mine].tolist() == list(range(int(mine.sum())))  # dense, in order
        assert (rows[~mine] == -1).all()
        # the closed form is a count
        counted = [int(mine[:n].sum()) for n in range(length + 1)]
        assert dcp.local_lengths(torch.arange(length + 1), size, rank, interleave).tolist() == counted
        assert dcp.local_lengths(length, size, rank, interleave) == counted[length]
    assert (owners == 1).all()


def test_ownership_of_the_specification():
    assert [dcp.local_lengths(n, 4, 1) for n in range(1, 8)] == [max(0, -(-(n - 1) // 4)) for n in range(1, 8)]
    assert dcp.owned(torch.arange(8), 4, 2).tolist() == [False, False, True, False] * 2
    assert dcp.owned(torch.arange(8), 2, 1, interleave=2).tolist() == [False, False, True, True] * 2
    with pytest.raises(ConfigError, match="rank=4 is not one of size=4"):
        dcp.owned(torch.arange(3), 4, 4)


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 11), st.integers(0, 5)), min_size=1, max_size=4))
def test_pages_of_all_ranks_together_hold_every_new_token_once(size, requests):
    cached, new = (list(x) for x in zip(*requests, strict=True))
    pages = [list(range(1 + 9 * i, 10 + 9 * i)) for i in range(len(requests))]
    seen = []
    for rank in range(size):
        batch = Batch.of(new, cached_tokens=cached, page_tables=pages, page_size=PAGE * size)
        dcp.place_rows(batch, PAGE, size, rank)
        position = [c + t for c, n in zip(cached, new, strict=True) for t in range(n)]
        owner = [i for i, n in enumerate(new) for _ in range(n)]
        for i, p, row, visible in zip(owner, position, batch.rows.tolist(), batch.key_lens.tolist(), strict=True):
            assert visible == len([q for q in range(p + 1) if q % size == rank])
            if p % size == rank:
                assert row == pages[i][p // (PAGE * size)] * PAGE + p % (PAGE * size) // size
                seen.append((i, p))
            else:
                assert row == 0
    assert sorted(seen) == sorted((i, c + t) for i, (c, n) in enumerate(requests) for t in range(n))


def store(latent, size, rank, pages=12):
    """Pages of one request as one rank has them."""
    mine = LatentPages(torch.full((pages, PAGE, latent.shape[1]), 1e4))  # what nobody wrote must not be seen
    mine.pages[0] = 0
    rows = dcp.local_rows(torch.arange(len(latent)), size, rank)
    here = rows >= 0
    flat = mine.pages[1:].view(-1, latent.shape[1])
    flat[rows[here]] = latent[here]
    return mine


@settings(max_examples=40)
@given(st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([1, 8]), st.data())
def test_parts_of_attention_merge_to_the_whole(size, width, data):
    """Contexts of 1 .. 3 · size + 2 tokens; a query of several tokens is a verify step."""
    length = data.draw(st.integers(width, 3 * size + 2 + width))
    form = data.draw(st.sampled_from(["a2a", "ag_rs"]))
    heads, latent_dim = 2 * size, 6
    latent, q = draw(length, 9, seed=1), draw(width, heads, 9, seed=2)
    table = torch.arange(1, 12, dtype=torch.int32)[None]
    cu = torch.tensor([0, width], dtype=torch.int32)
    seen = torch.arange(length - width + 1, length + 1)

    def attend(pages, key_lens, q):
        return mla_decode(
            q, pages, latent_dim=latent_dim, page_table=table, key_lens=key_lens.int(), cu_seqlens=cu, scale=0.3,
            return_lse=True,
        )  # fmt: skip

    wide = torch.arange(1, 40, dtype=torch.int32)[None]
    whole = mla_decode(
        q, store(latent, 1, 0, pages=40).pages, latent_dim=latent_dim, page_table=wide, key_lens=seen.int(),
        cu_seqlens=cu, scale=0.3,
    )  # fmt: skip

    def work(group):
        out, lse = attend(store(latent, size, group.rank).pages, dcp.local_lengths(seen, size, group.rank), q)
        return dcp.merge_heads(out, lse, group, heads=2 if size > 1 else heads, form=form)

    got = torch.cat(Ranks(size).run(work), dim=1)
    assert_close(f"{size} ranks, {length} tokens", whole, got, 1e-5)


LAYOUTS = [
    # ranks, how they share the heads, further arguments
    (2, True, {}),
    (4, True, {"dcp_comm_backend": "ag_rs"}),
    (3, False, {}),  # every rank has all heads
    (2, True, {"dcp_replicate_q_proj": True}),
]


def steps_of(layer, batches, pages, x):
    out = []
    with torch.no_grad():
        for batch in batches:
            out.append(layer(x[: batch.num_tokens] + len(out), batch, pages))
    return out


@pytest.mark.parametrize(("size", "cut", "options"), LAYOUTS)
@pytest.mark.parametrize("fp8", [False, True])
def test_a_layer_with_shared_tokens_equals_one_rank(size, cut, options, fp8):
    """A prompt in two chunks over a cached prefix, a request shorter than the ranks, decode, and several tokens."""
    full = seed_weights(GatedMLA(CONFIG, dtype=torch.float32))
    x = draw(40, 24, seed=3)
    dtype = torch.float8_e4m3fn if fp8 else torch.float32
    work = [
        ("prefill", [11, 1], [0, 0]),
        ("prefill", [14, 1], [11, 1]),
        ("decode", [1, 1], [25, 2]),
        ("verify", [4, 3], [26, 3]),
    ]

    def batches(ranks, rank):
        for mode, new, cached in work:
            pages = [list(range(1, 18)), list(range(20, 37))]
            batch = Batch.of(new, mode=mode, cached_tokens=cached, page_tables=pages, page_size=PAGE * ranks)
            if ranks > 1:
                dcp.place_rows(batch, PAGE, ranks, rank)
                batch.prefix_pieces(PAGE, piece_tokens=5)
            yield batch

    def one(group):
        options_here = {"tp": group if cut else LOCAL, "dcp": group, **options}
        layer = GatedMLA(CONFIG, dtype=torch.float32, **options_here)
        copy_shard(full, layer)
        return steps_of(layer, batches(size, group.rank), layer.new_pages(40, PAGE, dtype=dtype), x)

    want = steps_of(full, batches(1, 0), full.new_pages(40, PAGE, dtype=dtype), x)
    for rank, got in enumerate(Ranks(size).run(one)):
        for step, (a, b) in enumerate(zip(want, got, strict=True)):
            assert_close(f"rank {rank}, step {step}", a, b, 1e-5)


def test_ranks_that_share_tokens_come_from_those_that_share_heads():
    with pytest.raises(ConfigError, match="dcp_size=3 must divide tp_size=4: DCP ranks are taken from the TP group"):
        GatedMLA(CONFIG, tp=RankView(0, 4), dcp=RankView(0, 3))
    with pytest.raises(ConfigError, match="3 heads are neither 2 nor 2 times as many"):
        dcp.merge_heads(torch.zeros(1, 3, 4), torch.zeros(1, 3), RankView(0, 2), heads=2)
    with pytest.raises(ConfigError, match="has no page_table"):
        dcp.place_rows(Batch.lengths([2]), PAGE, 2, 0)
    layer = GatedMLA(CONFIG, dcp=RankView(1, 2), dtype=torch.float32)
    batch = Batch.of([1], mode="decode", page_tables=[[1]], page_size=PAGE)
    dcp.place_rows(batch, PAGE, 2, 0)
    with pytest.raises(ConfigError, match="placed for dcp_rank=0 of dcp_size=2, the layer is rank 1 of 2"):
        layer(draw(1, 24), batch, layer.new_pages(2, PAGE))
