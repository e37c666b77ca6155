"""The cache of one process: batches, zeroing, dtypes."""

import pytest
import torch

from k3lib import Batch, KimiK3Config, KimiK3ForCausalLM, ops
from k3lib.cache import CacheConfig, HybridCache
from k3lib.errors import CapacityError, ConfigError
from k3lib.testing import assert_close, tolerance

pytestmark = pytest.mark.filterwarnings("ignore:.*padding behind the heads")

PAGE = 4


@pytest.fixture(scope="module")
def model(golden):
    return KimiK3ForCausalLM.from_pretrained(golden / "tiny_k3_wide", dtype=torch.float32, progress=False)


def allocate(config=None, *, dtype=torch.float32, tp_size=1, layers=None, **changes):
    sizes = CacheConfig(**{"num_pages": 24, "num_slots": 4, "page_size": PAGE, **changes})
    config = config or KimiK3Config.tiny()
    return HybridCache.allocate(config, sizes, dtype=dtype, tp_size=tp_size, layers=layers)


def opened(cache, committed, room):
    """A lease with `committed` tokens and pages for `room` more."""
    lease = cache.open([1])
    cache.grow(lease, tokens=committed + room)
    cache.commit(lease, list(range(committed)))
    return lease


@torch.inference_mode()
def run(model, cache, lease, ids, chunk=None, mode="prefill"):
    """Logits of every token of `ids`, in chunks."""
    cache.grow(lease, tokens=len(ids))
    parts = []
    for first in range(0, len(ids), chunk or len(ids)):
        piece = ids[first : first + (chunk or len(ids))]
        parts.append(model(cache.make_batch([(lease, piece)], mode=mode), cache))
        cache.commit(lease, piece)
    return torch.cat(parts)


@torch.inference_mode()
def stateless(model, ids):
    return model(Batch.pack([ids]))


def prompt(length, seed=0):
    return torch.randint(250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


# ---- batches ------------------------------------------------------------------------------------

MIXES = {
    "prefill": ("prefill", [(6, 3), (0, 5), (4, 0), (7, 1)]),
    "page-borders": ("prefill", [(3, 1), (4, 1), (0, 4), (0, 1)]),
    "decode": ("decode", [(1, 1), (15, 1), (4, 1)]),
    "verify": ("verify", [(5, 3), (8, 3)]),
    "only-empty": ("prefill", [(4, 0)]),
    "nothing": ("prefill", []),
}


@pytest.mark.parametrize(("mode", "mix"), MIXES.values(), ids=MIXES)
def test_fields_of_a_batch(mode, mix):
    cache = allocate()
    for _ in range(2):  # shuffle the free lists, so that pages are neither sorted nor adjacent
        gone = [opened(cache, 0, n) for n in (9, 3, 14)]
        for lease in (gone[1], gone[0], gone[2]):
            cache.close(lease)
    work = [(opened(cache, old, new), list(range(100, 100 + new))) for old, new in mix]
    batch = cache.make_batch(work, mode=mode)

    new, totals = [n for _, n in mix], [a + b for a, b in mix]
    assert batch.mode == mode
    assert batch.new_tokens == tuple(new)
    assert batch.cached_tokens == tuple(a for a, _ in mix)
    assert (batch.max_new, batch.max_seq) == (max(new, default=0), max(totals, default=0))
    assert batch.num_tokens == sum(new)
    assert batch.saves is batch.routes is None
    offsets = [0]
    for n in new:
        offsets.append(offsets[-1] + n)
    leases = [lease for lease, _ in work]
    width = max((len(x.pages) for x in leases), default=0)
    rows = [
        x.pages[t // PAGE] * PAGE + t % PAGE
        for x, (old, n) in zip(leases, mix, strict=True)
        for t in range(old, old + n)
    ]
    want = {
        "input_ids": ([i for _, ids in work for i in ids], torch.int64),
        "cu_seqlens": (offsets, torch.int32),
        "seq_lens": (totals, torch.int32),
        "slots": ([x.slot for x in leases], torch.int32),
        "rows": (rows, torch.int64),
        "key_lens": ([t + 1 for old, n in mix for t in range(old, old + n)], torch.int32),
    }
    for name, (values, dtype) in want.items():
        found = getattr(batch, name)
        assert (found.dtype, found.tolist()) == (dtype, values), name
    assert (batch.page_table.dtype, tuple(batch.page_table.shape)) == (torch.int32, (len(mix), width))
    assert batch.page_table.tolist() == [[*x.pages, *[0] * (width - len(x.pages))] for x in leases]
    assert len(set(rows)) == len(rows)
    assert not any(row < PAGE for row in rows), "the null page is never written"
    assert 0 not in batch.slots.tolist()


def test_errors_of_make_batch_change_nothing():
    cache = allocate()
    cache.pool.kda.state.fill_(7)
    cache.pool.kda.conv.fill_(7)
    good, tight, closed = (opened(cache, 0, 4) for _ in range(3))
    cache.close(closed)
    other = allocate()
    foreign = opened(other, 0, 4)
    before = cache.dump()
    for work, pattern in [
        ([(good, [1]), (closed, [1])], "is closed, or belongs to another cache"),
        ([(good, [1]), (foreign, [1])], "is closed, or belongs to another cache"),
        ([(good, [1]), (good, [2])], "a lease occurs twice"),
        ([(good, [1]), (tight, [1] * 5)], r"has room for 4 more tokens, 5 are asked; call grow\(\) first"),
    ]:
        with pytest.raises(ConfigError, match=pattern):
            cache.make_batch(work)
        assert good.needs_zero
        assert tight.needs_zero
        assert cache.dump() == before
        assert cache.pool.kda.state.eq(7).all()
        assert cache.pool.kda.conv.eq(7).all()
    cache.make_batch([(good, [1])])
    assert not cache.pool.kda.state[:, good.slot].any()
    assert cache.pool.kda.state[:, tight.slot].eq(7).all()


# ---- reuse --------------------------------------------------------------------------------------


def poison_free(cache):
    """NaN wherever no lease owns the memory; the null page and slot stay as they are."""
    leases = cache.allocator.leases.values()
    slots = [n for n in range(1, cache.config.num_slots + 1) if n not in {x.slot for x in leases}]
    pages = [n for n in range(1, cache.config.num_pages + 1) if n not in {p for x in leases for p in x.pages}]
    cache.pool.kda.state[:, slots] = torch.nan
    cache.pool.kda.conv[:, slots] = torch.nan
    cache.pool.latent.pages[:, pages] = torch.nan


@pytest.mark.parametrize("chunk", [1, 3, None])
def test_a_closed_request_leaks_nothing(model, chunk):
    cache = allocate(model.config, num_slots=2, num_pages=12)
    keeper = cache.open([1])
    run(model, cache, keeper, prompt(5, seed=9))
    for seed in range(3):
        poison_free(cache)
        ids = prompt(11 + seed, seed)
        with cache.lease(ids) as lease:
            got = run(model, cache, lease, ids, chunk)
            torch.testing.assert_close(got, stateless(model, ids), rtol=0, atol=1e-4)
    more = run(model, cache, keeper, [7, 8], mode="decode", chunk=1)
    want = stateless(model, [*prompt(5, seed=9), 7, 8])[5:]
    torch.testing.assert_close(more, want, rtol=0, atol=1e-4)


def test_the_same_request_after_another_gives_the_same_bits(model):
    ids = prompt(13)
    fresh = allocate(model.config)
    with fresh.lease(ids) as lease:
        want = run(model, fresh, lease, ids, 5)
    cache = allocate(model.config, num_slots=1, num_pages=4)
    for seed in (3, 4):
        with cache.lease([1]) as lease:
            run(model, cache, lease, prompt(9, seed))
    with cache.lease(ids) as lease:
        assert run(model, cache, lease, ids, 5).equal(want)


def test_zeroing_waits_for_the_first_batch(model):
    cache = allocate(model.config)
    a = cache.open([1])
    cache.grow(a, tokens=8)
    cache.pool.kda.state[:, a.slot] = 5
    assert cache.pool.kda.state[:, a.slot].any()
    cache.make_batch([(a, [1, 2])])
    assert not cache.pool.kda.state[:, a.slot].any()
    cache.commit(a, [1, 2])
    cache.pool.kda.state[:, a.slot] = 5
    cache.make_batch([(a, [3])])
    assert cache.pool.kda.state[:, a.slot].eq(5).all()


def test_free_counts_and_dump():
    cache = allocate()
    assert (cache.free_pages, cache.free_slots) == (24, 4)
    lease = cache.open([1, 2])
    assert (cache.free_pages, cache.free_slots) == (24, 3)
    cache.grow(lease, tokens=9)
    cache.grow(lease, tokens=9)
    cache.commit(lease, [5] * 6)
    assert (cache.free_pages, cache.free_slots) == (21, 3)
    dump = cache.dump()
    assert dump == {
        "free_pages": 21,
        "free_slots": 3,
        "bytes": cache.pool.nbytes,
        "leases": {lease.number: {"slot": lease.slot, "pages": lease.pages, "tokens": 6}},
    }
    dump["leases"][lease.number]["pages"].clear()  # a copy
    cache.check()
    cache.close(lease)
    cache.close(lease)
    cache.check()
    assert (cache.free_pages, cache.free_slots) == (24, 4)
    assert cache.dump()["leases"] == {}


def test_the_context_closes_after_an_error():
    cache = allocate()
    with pytest.raises(CapacityError), cache.lease([1]) as lease:
        cache.grow(lease, tokens=1000)
    assert (cache.free_pages, cache.free_slots) == (24, 4)


# ---- dtypes and parts ---------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "fp8_e4m3"])
def test_quantised_pages_stay_within_their_rounding(model, kv):
    """Prefill over a cached prefix, and decode, against pages of full precision."""
    attention = model.model.layers[2].self_attn
    x = torch.randn(14, attention.config.hidden_size)
    results = []
    for dtype in ("float32", kv):
        cache = allocate(model.config, kv_cache_dtype=dtype)
        leases = [cache.open([1]) for _ in range(2)]
        out = []
        with torch.inference_mode():
            for mode, lengths in (("prefill", (5, 3)), ("prefill", (2, 2)), ("decode", (1, 1))):
                for lease, n in zip(leases, lengths, strict=True):
                    cache.grow(lease, tokens=n)
                batch = cache.make_batch([(a, [0] * n) for a, n in zip(leases, lengths, strict=True)], mode=mode)
                begin = sum(o.shape[0] for o in out)
                out.append(attention(x[begin : begin + sum(lengths)], batch, cache.view(2)))
                for lease, n in zip(leases, lengths, strict=True):
                    cache.commit(lease, [0] * n)
        results.append(torch.cat(out))
    want, got = results
    assert got.dtype == torch.float32
    assert_close(
        f"attention over {kv}", want, got, ratio=tolerance("mla_decode", getattr(torch, kv, torch.float8_e4m3fn))
    )
    assert got.equal(want) == (kv == "float32")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16], ids=str)
@pytest.mark.parametrize("new", [1, 3])
def test_heads_are_independent_over_one_quantised_latent(dtype, new):
    pages = torch.randn(4, PAGE, 24).to(dtype)
    call = {
        "latent_dim": 16,
        "page_table": torch.tensor([[2, 1], [3, 0]], dtype=torch.int32),
        "key_lens": torch.tensor([*range(6, 6 + new), *range(2, 2 + new)], dtype=torch.int32).clamp(max=7),
        "cu_seqlens": torch.tensor([0, new, 2 * new], dtype=torch.int32),
        "scale": 0.2,
    }
    call["key_lens"][new:] = call["key_lens"][new:].clamp(max=4)
    q = torch.randn(2 * new, 5, 24)
    order = torch.tensor([3, 0, 4, 1, 2])
    out = ops.mla_decode(q, pages, **call)
    torch.testing.assert_close(ops.mla_decode(q[:, order], pages, **call), out[:, order], rtol=0, atol=1e-6)
    torch.testing.assert_close(ops.mla_decode(q, pages.float(), **call), out, rtol=0, atol=1e-6)


def test_a_model_with_fp8_pages_and_bf16_state_runs_close_to_fp32(model):
    ids = prompt(24)
    want = stateless(model, ids)
    for kv, ssm, ratio in ((None, "bfloat16", 2e-2), ("fp8_e4m3", None, 4e-2)):
        cache = allocate(model.config, kv_cache_dtype=kv, mamba_ssm_dtype=ssm)
        with cache.lease(ids) as lease:
            got = torch.cat(
                [run(model, cache, lease, ids[:20], 7), run(model, cache, lease, ids[20:], 1, mode="decode")]
            )
        assert_close(f"logits with kv={kv} state={ssm}", want, got, ratio=ratio)
        assert not got.equal(want)


def test_dtypes_of_the_pools():
    config = KimiK3Config.tiny()
    default = HybridCache.allocate(config, CacheConfig(num_pages=2, num_slots=2))
    assert default.pool.latent.pages.dtype == default.pool.kda.conv.dtype == torch.bfloat16
    assert default.pool.kda.state.dtype == torch.float32
    double = allocate(dtype=torch.float64)
    assert double.pool.kda.state.dtype == double.pool.latent.pages.dtype == torch.float64
    chosen = allocate(kv_cache_dtype="fp8_e4m3", mamba_ssm_dtype="bfloat16")
    assert chosen.pool.latent.pages.dtype == torch.float8_e4m3fn
    assert chosen.pool.kda.state.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"num_pages": 0}, "num_pages must be >= 1, got 0"),
        ({"num_slots": 0}, "num_slots must be >= 1, got 0"),
        ({"page_size": -1}, "page_size must be >= 1, got -1"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype='int4'; expected one of .*fp8_e4m3"),
        ({"mamba_ssm_dtype": "fp8_e4m3"}, "mamba_ssm_dtype='fp8_e4m3'; expected one of float32, bfloat16"),
    ],
)
def test_bad_sizes_are_refused(changes, pattern):
    with pytest.raises(ConfigError, match=pattern):
        allocate(**changes)


def test_shapes_of_a_part():
    config = KimiK3Config.tiny()  # MLA at 3, 7 and 8; 4 heads of 32
    whole = allocate()
    assert whole.pool.kda.state.shape == (6, 5, 4, 32, 32)
    assert whole.pool.kda.conv.shape == (6, 5, 3, 384)
    assert whole.pool.latent.pages.shape == (3, 25, PAGE, 40)
    part = allocate(tp_size=2, layers=range(2, 8))
    assert part.pool.kda.state.shape == (4, 5, 2, 32, 32)
    assert part.pool.kda.conv.shape == (4, 5, 3, 192)
    assert part.pool.latent.pages.shape == (2, 25, PAGE, 40)
    for layer in range(2, 8):
        view = part.view(layer)
        memory = view.state if config.text.layer_types[layer] == "kda" else view.pages
        memory.fill_(layer)
    assert part.pool.kda.state[:, 0, 0, 0, 0].tolist() == [2, 4, 5, 6]
    assert part.pool.latent.pages[:, 0, 0, 0].tolist() == [3, 7]
    with pytest.raises(ConfigError, match="tp_size=3 does not divide num_heads=4 of KDA"):
        allocate(tp_size=3)


def test_a_truncated_model_runs_on_the_pools_of_its_layers(golden):
    model = KimiK3ForCausalLM.from_pretrained(
        golden / "tiny_k3_wide", dtype=torch.float32, layers=range(3), progress=False
    )
    cache = allocate(model.config, layers=range(3))
    ids = prompt(10)
    with cache.lease(ids) as lease:
        torch.testing.assert_close(run(model, cache, lease, ids, 4), stateless(model, ids), rtol=0, atol=1e-4)
