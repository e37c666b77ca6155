"""The gated MLA layer: golden vectors, expanded against absorbed, pages, prefix pieces, ranks, gradients."""

import pytest
import torch
from seeded import Ranks, copy_shard, draw, seed_weights

from k3lib.batch import Batch, LatentPages
from k3lib.config import KimiK3Config, MLAConfig
from k3lib.errors import ConfigError
from k3lib.layers import GatedMLA
from k3lib.layers.linear import placement
from k3lib.parallel import RankView
from k3lib.testing import assert_close, tolerance

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
CASES = ["qlora", "no_qlora", "k3_head_sizes"]
PAGE = 4
LOOSE = 1e-5  # equal in exact arithmetic


def config(**changes):
    facts = {
        "hidden_size": 40, "num_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 6, "v_head_dim": 10,
    }  # fmt: skip
    return MLAConfig(**(facts | changes))


def layer_of(cfg, dtype=F32, seed=0):
    return seed_weights(GatedMLA(cfg, dtype=dtype), seed).requires_grad_(requires_grad=False)


def absurd_pages(layer, num_pages, page_size=PAGE):
    """Pages whose unwritten rows must not be read; the null page holds numbers."""
    pages = layer.new_pages(num_pages, page_size)
    pages.pages[1:] = torch.nan
    return pages


def shuffled(count, first=1, seed=0):
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)) + first
    return order.tolist()


def run_chunks(layer, x, chunks, *, single="decode", pages=None, table=None):
    """Feed one request chunk after chunk through its pages; `single` is the mode of one-token chunks."""
    table = table or shuffled(-(-len(x) // PAGE))
    pages = pages or absurd_pages(layer, len(table))
    outs, done = [], 0
    for part in x.split(chunks):
        mode = single if len(part) == 1 and done else "prefill"
        batch = Batch.of([len(part)], mode=mode, cached_tokens=[done], page_tables=[table], page_size=PAGE)
        outs.append(layer(part, batch, pages))
        done += len(part)
    rows = pages.pages[table].flatten(0, 1)[:done]
    return torch.cat(outs), rows


def golden_layer(vectors, name):
    cfg = KimiK3Config.from_hf(vectors.fact(f"{name}.config")).text.mla
    case = vectors.case(name)
    layer = GatedMLA(cfg, dtype=case["x"].dtype)
    layer.load_state_dict({key.removeprefix("w."): x for key, x in case.items() if key.startswith("w.")}, strict=True)
    return layer.requires_grad_(requires_grad=False), case["x"], vectors.fact(f"{name}.chunks")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("single", ["decode", "prefill", "verify"])
def test_golden_vectors_in_chunks(name, single, load_golden):
    vectors = load_golden("mla_layer")
    layer, x, chunks = golden_layer(vectors, name)
    y, rows = run_chunks(layer, x, chunks, single=single)
    vectors.check(name, "y", y, atol=5e-5)
    latent, shared = rows.split([layer.config.kv_lora_rank, layer.config.qk_rope_head_dim], dim=-1)
    vectors.check(name, "latent", latent, atol=5e-5)
    vectors.check(name, "k_pe", shared, atol=5e-5)


@pytest.mark.parametrize("name", CASES)
def test_golden_vectors_token_by_token(name, load_golden):
    vectors = load_golden("mla_layer")
    layer, x, _ = golden_layer(vectors, name)
    vectors.check(name, "y", run_chunks(layer, x, [1] * len(x))[0], atol=5e-5)


@pytest.mark.parametrize("name", CASES)
def test_golden_vectors_without_pages(name, load_golden):
    vectors = load_golden("mla_layer")
    layer, x, _ = golden_layer(vectors, name)
    vectors.check(name, "y", layer(x, Batch.lengths([len(x)])), atol=5e-5)


@pytest.mark.parametrize("single", ["decode", "prefill"])
def test_bf16_is_no_worse_than_twice_the_official_error(single, load_golden):
    vectors = load_golden("mla_layer")
    layer, x, chunks = golden_layer(vectors, "bf16")
    y, rows = run_chunks(layer, x, chunks, single=single)
    assert y.dtype == BF16
    latent, shared = rows.split([layer.config.kv_lora_rank, layer.config.qk_rope_head_dim], dim=-1)
    for result, got in {"y": y, "latent": latent, "k_pe": shared}.items():
        want, official = (vectors.tensors[f"bf16.{out}.{result}"].double() for out in ("out64", "out"))
        error, allowed = (got.double() - want).abs(), 2 * (official - want).abs()
        assert error.max() <= allowed.max(), result
        assert error.mean() <= allowed.mean(), result


def test_latent_norms_have_their_own_eps():
    layer = layer_of(config())
    assert layer.q_a_layernorm.eps == layer.kv_a_layernorm.eps == 1e-6


# ---- expanded against absorbed, whole against pieces


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None}, {"output_gate": False}], ids=str)
def test_absorbed_equals_expanded_equals_stateless(changes):
    layer = layer_of(config(**changes))
    x = draw(21, 40)
    want = layer(x, Batch.lengths([21]))
    for chunks, single in (
        ([1] * 21, "decode"),
        ([1] * 21, "prefill"),
        ([7, 1, 1, 12], "decode"),
        ([16, 5], "prefill"),
    ):
        got, _ = run_chunks(layer, x, chunks, single=single)
        assert_close(f"{chunks} {single}", want, got, LOOSE)


def test_several_absorbed_tokens_are_causal():
    layer = layer_of(config())
    x = draw(18, 40)
    pages, table = absurd_pages(layer, 5), [4, 1, 5, 3, 2]
    want = layer(x, Batch.lengths([18]))
    first = Batch.of([10], page_tables=[table], page_size=PAGE)
    verify = Batch.of([8], mode="verify", cached_tokens=[10], page_tables=[table], page_size=PAGE)
    got = torch.cat([layer(x[:10], first, pages), layer(x[10:], verify, pages)])
    assert_close("out", want, got, LOOSE)


def prefix_case(layer):
    """Three requests with cached tokens, one of them without new tokens."""
    cached, new = [13, 5, 0, 22], [6, 1, 9, 0]
    tables, first = [], 1
    for c, n in zip(cached, new, strict=True):
        count = -(-(c + n) // PAGE)
        tables.append(shuffled(count, first, seed=first))
        first += count
    contexts = [draw(c + n, 40, seed=10 + i) for i, (c, n) in enumerate(zip(cached, new, strict=True))]
    pages = absurd_pages(layer, first)
    old = torch.cat([x[:c] for x, c in zip(contexts, cached, strict=True)])
    layer(old, Batch.of(cached, page_tables=tables, page_size=PAGE), pages)
    fresh = torch.cat([x[c:] for x, c in zip(contexts, cached, strict=True)])
    batch = Batch.of(new, cached_tokens=cached, page_tables=tables, page_size=PAGE)
    want = [layer(x, Batch.lengths([len(x)]))[c:] for x, c in zip(contexts, cached, strict=True)]
    return fresh, batch, pages, torch.cat(want)


@pytest.mark.parametrize("piece_tokens", [1, 3, 4, 7, 18, 4096])
def test_prefill_over_a_cached_prefix_in_pieces(piece_tokens):
    layer = layer_of(config())
    fresh, batch, pages, want = prefix_case(layer)
    pieces = batch.prefix_pieces(PAGE, piece_tokens)
    assert len(pieces) == -(-18 // piece_tokens)
    assert all(len(piece.rows) <= piece_tokens for piece in pieces)
    assert_close("out", want, layer(fresh, batch, pages), LOOSE)


@pytest.mark.parametrize("mode", ["decode", "verify"])
def test_mixed_absorbed_batch_equals_its_requests(mode):
    layer = layer_of(config())
    fresh, batch, pages, want = prefix_case(layer)
    batch.mode = mode
    assert_close("out", want, layer(fresh, batch, pages), LOOSE)


def test_packed_stateless_requests_do_not_see_each_other():
    layer = layer_of(config())
    x = draw(16, 40)
    out = layer(x, Batch.lengths([6, 0, 10]))
    assert_close("first", layer(x[:6], Batch.lengths([6])), out[:6], LOOSE)
    assert_close("last", layer(x[6:], Batch.lengths([10])), out[6:], LOOSE)


def test_unused_entries_of_the_page_table_are_not_read():
    layer = layer_of(config())
    x = draw(9, 40)
    want, _ = run_chunks(layer, x, [8, 1], table=[2, 1, 3])
    got, _ = run_chunks(layer, x, [8, 1], table=[2, 1, 3, 8, 9], pages=absurd_pages(layer, 9))
    assert_close("out", want, got, LOOSE)


def test_other_pages_are_not_written():
    layer = layer_of(config())
    pages = layer.new_pages(5, PAGE)
    run_chunks(layer, draw(9, 40), [8, 1], table=[5, 2, 4], pages=pages)
    assert not pages.pages[[1, 3]].any()
    assert not pages.pages[4, 1:].any()
    assert pages.pages[4, 0].any()


def test_pages_need_a_page_table():
    layer = layer_of(config())
    with pytest.raises(ConfigError, match="no page_table"):
        layer(draw(3, 40), Batch.lengths([3]), layer.new_pages(1))


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 4), (1, 0)])
def test_new_pages_needs_counts(num_pages, page_size):
    with pytest.raises(ConfigError, match=f"num_pages={num_pages} and page_size={page_size}"):
        layer_of(config()).new_pages(num_pages, page_size)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"page_tables": [[1]]}, "page_size must be >= 1"),
        ({"page_tables": [[1]], "page_size": 4}, "request 0 has 5 tokens but its 1 pages of 4 hold 4"),
        ({"page_tables": [[1], [2]], "page_size": 4}, "2 page_tables for 1 requests"),
        ({"slots": [1, 2]}, "2 slots for 1 requests"),
        ({"cached_tokens": [1, 2]}, "2 cached_tokens for 1 requests"),
        ({"input_ids": torch.zeros(4, dtype=torch.int64)}, "4 input_ids for 5 new tokens"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_batches_whose_parts_disagree_are_refused(facts, message):
    with pytest.raises(ConfigError, match=message):
        Batch.of([5], **facts)


# ---- dtypes, ranks, gradients


def test_narrow_cast_and_widening():
    layer = layer_of(config())
    assert {x.dtype for x in layer.to(BF16).parameters()} == {BF16}
    assert layer.new_pages(1).pages.dtype == BF16
    assert {x.dtype for x in layer.double().parameters()} == {F64}


def test_pages_of_another_dtype_than_the_weights():
    layer = layer_of(config())
    x = draw(14, 40)
    want, _ = run_chunks(layer, x, [12, 1, 1])
    got, _ = run_chunks(layer, x, [12, 1, 1], pages=layer.new_pages(4, PAGE, dtype=BF16))
    assert got.dtype == F32
    assert_close("out", want, got, tolerance("mla_decode", BF16))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("rank", [24, None])
def test_shards_make_the_whole(size, rank):
    full = layer_of(config(q_lora_rank=rank))
    ranks = [copy_shard(full, GatedMLA(full.config, tp=RankView(r, size), dtype=F32)) for r in range(size)]
    for name, whole in full.named_parameters():
        parts = [dict(layer.named_parameters())[name] for layer in ranks]
        shard = placement(parts[0]).shard
        assert torch.equal(torch.cat(parts, dim=shard.dim) if shard else parts[-1], whole), name


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_add_up_to_one(size):
    full = layer_of(config())
    x = draw(14, 40)
    want, rows = run_chunks(full, x, [10, 1, 3])
    results = Ranks(size).run(
        lambda group: run_chunks(copy_shard(full, GatedMLA(full.config, tp=group, dtype=F32)), x, [10, 1, 3])
    )
    for out, mine in results:
        assert_close("out", want, out, LOOSE)
        assert torch.equal(mine, rows), "every rank caches the whole latent"


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match=r"tp_size=3.*MLA heads.*one of 1, 2, 4"):
        GatedMLA(config(), tp=RankView(0, 3))


def test_gradients_reach_every_weight_and_the_input():
    layer = seed_weights(GatedMLA(config(), dtype=F32))
    x = draw(20, 40).requires_grad_()
    layer(x, Batch.lengths([13, 7])).square().sum().backward()
    for name, weight in layer.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.isfinite().all(), name
        assert weight.grad.any(), name
    assert x.grad.any()


def test_gradient_is_the_derivative():
    sizes = {"hidden_size": 5, "num_heads": 2, "q_lora_rank": 3, "kv_lora_rank": 4, "qk_nope_head_dim": 3}
    layer = seed_weights(GatedMLA(config(**sizes, qk_rope_head_dim=2, v_head_dim=3), dtype=F64))
    x = draw(6, 5, dtype=F64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: layer(x, Batch.lengths([4, 2])), (x,))


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_gradients_flow_through_a_step_that_writes_its_pages(mode):
    layer = seed_weights(GatedMLA(config(), dtype=F32))
    x = draw(6, 40).requires_grad_()
    pages = LatentPages(layer.new_pages(3, PAGE).pages.copy_(draw(4, PAGE, 22, seed=5)))
    batch = Batch.of([6], mode=mode, cached_tokens=[5], page_tables=[[3, 1, 2]], page_size=PAGE)
    layer(x, batch, pages).square().sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad.any()
