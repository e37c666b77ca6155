"""The cache of one process: batches, reuse of KV and state, copies, dtypes."""

import itertools
import random

import pytest
import torch
from seeded import seed_weights
from simulation import Router

from k3lib import Batch, KimiK3Config, KimiK3ForCausalLM, ops
from k3lib.batch import StateSaves
from k3lib.cache import CacheConfig, HybridCache
from k3lib.cache.prefix import MediaKey, prefix_keys
from k3lib.errors import CapacityError, ConfigError
from k3lib.testing import assert_close, tiny_config, tolerance

PAGE = 4
LOGITS = {"rtol": 0, "atol": 1e-4}
STATES = 1e-5  # relative, between paths that are equal in exact arithmetic


# every kind of layer, and two blocks
SMALL = {
    "num_hidden_layers": 5,
    "kda_layers": [1, 2, 4],
    "full_attn_layers": [3, 5],
    "attn_res_block_size": 2,
    "num_experts": 4,
    "num_experts_per_token": 2,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model():
    built = seed_weights(KimiK3ForCausalLM(tiny_config(**SMALL), dtype=torch.float32))
    return built.requires_grad_(requires_grad=False).eval()


def allocate(config=None, *, dtype=torch.float32, tp_size=1, layers=None, listener=None, **changes):
    sizes = CacheConfig(
        **{"num_pages": 24, "num_slots": 6, "page_size": PAGE, "checkpoint_grid": 8, **changes},
    )
    config = config or KimiK3Config.tiny()
    return HybridCache.allocate(config, sizes, dtype=dtype, tp_size=tp_size, layers=layers, listener=listener)


def opened(cache, committed, room):
    """A lease with `committed` tokens and pages for `room` more; nothing was computed."""
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
        cache.check()
    return torch.cat(parts)


def answer(model, cache, ids, tokens=6, **options):
    """Prefill what is not cached, decode greedily, close; new tokens, logits of the computed positions, the lease."""
    lease = cache.open(ids, **options)
    logits = [run(model, cache, lease, ids[lease.cached_len :])]
    new = [int(logits[-1][-1].argmax())]
    while len(new) < tokens:
        logits.append(run(model, cache, lease, new[-1:], mode="decode"))
        new.append(int(logits[-1][-1].argmax()))
    cache.close(lease)
    cache.check()
    return new, torch.cat(logits), lease


@torch.inference_mode()
def stateless(model, ids):
    return model(Batch.pack([ids]))


def state_of(cache, slot):
    return cache.pool.kda.state[:, slot].clone(), cache.pool.kda.conv[:, slot].clone()


def state_after(model, ids):
    """State and windows that a prefill of exactly `ids` leaves."""
    cache = allocate(model.config, num_pages=len(ids), page_size=16, prefix_cache=False)
    lease = cache.open(ids)
    run(model, cache, lease, ids)
    return state_of(cache, lease.slot)


def same_state(want, got):
    for name, a, b in zip(("state", "conv"), want, got, strict=True):
        assert_close(name, a, b, ratio=STATES)


def prompt(length, seed=0):
    return torch.randint(500, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def kept(cache):
    """Nodes with a state, by the length of their prefix."""
    return {node.end: node for node in cache.allocator.tree.nodes() if node.slot is not None}


def reused(cache, ids, **options):
    """What a prompt would reuse: state, KV."""
    lease = cache.open(ids, **options)
    cache.close(lease, donate=False)
    return lease.cached_len, lease.kv_len


def served(cache, ids, **options):
    """A request of which only the bookkeeping is done."""
    with cache.lease(ids, **options) as lease:
        cache.grow(lease, tokens=len(ids) - lease.cached_len)
        cache.make_batch([(lease, ids[lease.cached_len :])])
        cache.commit(lease, ids[lease.cached_len :])
    return lease


def hold_slots(cache, count):
    """Requests that need slots and push out the states that were used longest ago."""
    leases = [cache.open([7 + i]) for i in range(count)]
    cache.issue()
    return leases


# ---- batches ------------------------------------------------------------------------------------

MIXES = {
    "prefill": ("prefill", [(6, 3), (0, 5), (4, 0), (7, 2)]),
    "page-borders": ("prefill", [(3, 1), (4, 1), (0, 4), (0, 1)]),
    "one-token-each": ("prefill", [(3, 1), (4, 1)]),
    "decode": ("decode", [(1, 1), (15, 1), (4, 1)]),
    "verify": ("verify", [(5, 3), (8, 3)]),
    "only-empty": ("prefill", [(4, 0)]),
    "nothing": ("prefill", []),
}
TENSORS = ("input_ids", "cu_seqlens", "seq_lens", "slots", "page_table", "rows", "key_lens")
NUMBERS = ("new_tokens", "cached_tokens", "max_new", "max_seq", "mode", "num_tokens")


def by_hand(work, mode, saves=None):
    """The batch of a step, from host integers."""
    return Batch.of(
        [len(ids) for _, ids in work],
        mode=mode,
        cached_tokens=[lease.length for lease, _ in work],
        slots=[lease.slot for lease, _ in work],
        page_tables=[lease.pages for lease, _ in work],
        page_size=PAGE,
        input_ids=torch.tensor([i for _, ids in work for i in ids], dtype=torch.int64),
        saves=saves,
    )


def assert_same_batch(got, want):
    for name in TENSORS:
        a, b = getattr(got, name), getattr(want, name)
        assert (a.dtype, a.tolist(), a.shape) == (b.dtype, b.tolist(), b.shape), name
    for name in NUMBERS:
        assert getattr(got, name) == getattr(want, name), name


@pytest.mark.parametrize(("mode", "mix"), MIXES.values(), ids=MIXES)
def test_a_batch_is_what_one_would_build_by_hand(mode, mix):
    cache = allocate(checkpoint_grid=100)
    for _ in range(2):  # shuffle the free lists, so that pages are neither sorted nor adjacent
        gone = [opened(cache, 0, n) for n in (9, 3, 14)]
        for lease in (gone[1], gone[0], gone[2]):
            cache.close(lease)
    work = [(opened(cache, old, new), list(range(100, 100 + new))) for old, new in mix]
    batch = cache.make_batch(work, mode=mode)
    assert_same_batch(batch, by_hand(work, mode))
    assert batch.saves is batch.routes is None
    rows = batch.rows.tolist()
    pages = [(x.pages, t) for (x, _), (old, n) in zip(work, mix, strict=True) for t in range(old, old + n)]
    assert rows == [p[t // PAGE] * PAGE + t % PAGE for p, t in pages]
    assert len(set(rows)) == len(rows)
    assert not any(row < PAGE for row in rows), "the null page is never written"
    assert 0 not in batch.slots.tolist()


def test_a_batch_takes_tensors_of_ids():
    cache = allocate()
    lease = cache.open(torch.tensor([5, 6, 7]))
    cache.grow(lease, tokens=3)
    batch = cache.make_batch([(lease, torch.tensor([5, 6, 7], dtype=torch.int32))])
    cache.commit(lease, torch.tensor([5, 6, 7]))
    assert batch.input_ids.tolist() == lease.tokens == [5, 6, 7]
    assert all(type(token) is int for token in lease.tokens)


def test_page_tables_are_right_in_any_order_and_after_slots_were_reused():
    """Steps of all kinds in random order: no row of the table keeps pages of an earlier owner."""
    choices, cache = random.Random(5), allocate(num_pages=60, num_slots=5)
    leases = []
    for step in range(150):
        if len(leases) < 5 and choices.random() < 0.4:
            leases.append(cache.open(prompt(choices.randint(1, 30), seed=choices.randrange(4))))
        picked = choices.sample(leases, choices.randint(0, len(leases)))
        work = []
        for lease in picked:
            count = choices.choice([0, 1, 1, choices.randint(1, 9)])
            if lease.length + count > 40:
                leases.remove(lease)
                cache.close(lease, donate=choices.random() < 0.5)
                continue
            cache.grow(lease, tokens=count + choices.choice([0, 0, 9]))
            work.append((lease, prompt(count, seed=step)))
        mode = choices.choice(["prefill", "decode"])
        batch = cache.make_batch(work, mode=mode)
        assert_same_batch(batch, by_hand(work, mode))
        for lease, ids in work:
            cache.commit(lease, ids)
        cache.check()


def test_a_short_request_in_the_slot_of_a_long_one_sees_none_of_its_pages():
    cache = allocate(num_slots=2)
    long = opened(cache, 0, 30)
    cache.make_batch([(long, [1])])
    slot = long.slot
    cache.close(long, donate=False)
    short = opened(cache, 0, 3)
    assert short.slot == slot
    other = opened(cache, 0, 30)
    table = cache.make_batch([(short, [1]), (other, [1])]).page_table.tolist()
    assert table == [[*short.pages, *[0] * 7], other.pages]


def test_errors_of_make_batch_change_nothing():
    cache = allocate()
    good, tight, closed = (opened(cache, 0, 4) for _ in range(3))
    cache.issue()
    cache.close(closed)
    waiting = cache.open([1])  # has something scheduled
    cache.pool.kda.state.fill_(7)
    foreign = opened(allocate(), 0, 4)
    before = cache.dump()
    for work, pattern in [
        ([(good, [1]), (closed, [1])], "is closed, or belongs to another cache"),
        ([(good, [1]), (foreign, [1])], "is closed, or belongs to another cache"),
        ([(good, [1]), (good, [2])], "a lease occurs twice"),
        ([(good, [1]), (tight, [1] * 5)], r"has room for 4 more tokens, 5 are asked; call grow\(\) first"),
        ([(good, [1]), (tight, [-1])], r"token ids must be 0 \.\. 2\^31 - 1, got -1 \.\. 1"),
        ([(good, [2**31])], r"token ids must be 0 \.\. 2\^31 - 1"),
    ]:
        with pytest.raises(ConfigError, match=pattern):
            cache.make_batch(work)
        assert cache.dump() == before
        assert cache.pool.kda.state.eq(7).all()
    assert (good.in_flight, tight.in_flight) == (None, None)
    cache.make_batch([(good, [1])])
    assert not cache.pool.kda.state[:, waiting.slot].any()
    assert cache.pool.kda.state[:, good.slot].eq(7).all(), "zeroed once, before its first step"


def test_a_prefill_asks_for_the_states_that_are_kept():
    cache = allocate()
    first, second = cache.open(prompt(20)), cache.open(prompt(17, seed=1))
    for lease in (first, second):
        cache.grow(lease, tokens=20)
    batch = cache.make_batch([(first, prompt(5)), (second, prompt(17, seed=1))])
    assert (batch.saves.requests, batch.saves.offsets) == ((1,), (16,))
    cache.commit(first, prompt(5))
    cache.commit(second, prompt(17, seed=1))
    batch = cache.make_batch([(second, [1]), (first, prompt(20)[5:])])
    assert (batch.saves.requests, batch.saves.offsets) == ((1,), (11,))
    taken = {first.slot, second.slot, *(node.slot for node in kept(cache).values())}
    assert not taken & set(batch.saves.slots.tolist())
    assert cache.make_batch([(first, prompt(20)[5:])], mode="decode").saves is None


# ---- memory -------------------------------------------------------------------------------------


def poison_free(cache):
    """NaN wherever nobody owns the memory; the null page and slot stay as they are."""
    slots = [n for n in range(1, cache.config.num_slots + 1) if not cache.allocator.slots.refs(n)]
    pages = [n for n in range(1, cache.config.num_pages + 1) if not cache.allocator.pages.refs(n)]
    cache.pool.kda.state[:, slots] = torch.nan
    cache.pool.kda.conv[:, slots] = torch.nan
    cache.pool.latent.pages[:, pages] = torch.nan


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, None])
def test_a_closed_request_leaks_nothing(model, chunk, prefix_cache):
    cache = allocate(model.config, num_slots=2, num_pages=8, prefix_cache=prefix_cache)
    keeper = cache.open([1])
    run(model, cache, keeper, prompt(5, seed=9))
    for seed in range(3):
        poison_free(cache)
        ids = prompt(11 + seed, seed)
        with cache.lease(ids) as lease:
            got = run(model, cache, lease, ids, chunk)
            torch.testing.assert_close(got, stateless(model, ids), **LOGITS)
    more = run(model, cache, keeper, [7, 8], mode="decode", chunk=1)
    want = stateless(model, [*prompt(5, seed=9), 7, 8])[5:]
    torch.testing.assert_close(more, want, **LOGITS)


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


def test_zeroing_waits_until_it_is_issued_and_happens_once():
    cache = allocate()
    lease = cache.open([1])
    cache.grow(lease, tokens=8)
    cache.pool.kda.state[:, lease.slot] = cache.pool.kda.conv[:, lease.slot] = 5
    assert cache.allocator.has_ops
    cache.make_batch([(lease, [1, 2])])
    assert not any(x.any() for x in state_of(cache, lease.slot))
    cache.commit(lease, [1, 2])
    cache.pool.kda.state[:, lease.slot] = 5
    cache.make_batch([(lease, [3])])
    assert cache.pool.kda.state[:, lease.slot].eq(5).all()


def test_free_counts_stats_and_dump():
    cache = allocate()
    assert (cache.free_pages, cache.free_slots) == (24, 6)
    lease = cache.open([1, 2])
    assert (cache.free_pages, cache.free_slots) == (24, 5)
    for _ in range(2):
        cache.grow(lease, tokens=9)
    cache.commit(lease, [5] * 6)
    assert (cache.free_pages, cache.free_slots) == (21, 5)
    dump = cache.dump()
    assert {name: dump[name] for name in cache.stats() if name != "leases"}.items() <= cache.stats().items()
    assert dump["bytes"] == cache.pool.nbytes
    assert dump["leases"] == {lease.number: {"slot": lease.slot, "pages": lease.pages, "tokens": 6, "cached_len": 0}}
    dump["leases"][lease.number]["pages"].clear()  # a copy
    cache.check()
    for _ in range(2):
        cache.close(lease)
    cache.check()
    assert (cache.free_pages, cache.cached_pages) == (22, 2)
    assert (cache.free_slots, cache.cached_slots) == (5, 1)
    assert cache.dump()["leases"] == {}
    assert cache.dump()["tree"] == [
        {"namespace": "", "start": 0, "end": 6, "pages": lease.pages[:2], "slot": lease.slot, "locks": 0}
    ]
    assert cache.clear() == 6
    cache.check()
    assert (cache.free_pages, cache.free_slots, cache.cached_pages, cache.cached_slots) == (24, 6, 0, 0)


def test_the_context_closes_after_an_error():
    cache = allocate()
    with pytest.raises(CapacityError), cache.lease([1]) as lease:
        cache.grow(lease, tokens=1000)
    assert (cache.free_pages, cache.free_slots) == (24, 6)


# ---- reuse --------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", [8, 13])
def test_case_a1_warm_requests_resume_from_states_that_were_written(model, grid):
    cache = allocate(model.config, num_pages=60, checkpoint_grid=grid)
    shared = prompt(2 * grid)
    ids, other = shared + prompt(7, seed=1), shared + prompt(5, seed=2)
    cold, cold_logits, lease = answer(model, cache, ids)
    assert lease.cached_len == 0
    cache.pool.kda.state[:, 0] = torch.nan  # nobody may take the null slot for a state
    warm, warm_logits, lease = answer(model, cache, ids)
    assert (lease.cached_len, lease.kv_len) == (2 * grid, 2 * grid + 6)
    assert warm == cold
    torch.testing.assert_close(warm_logits, cold_logits[2 * grid :], **LOGITS)
    lease = cache.open(other)
    assert lease.cached_len == 2 * grid
    cache.issue()
    same_state(state_after(model, shared), state_of(cache, lease.slot))
    cache.close(lease)
    cache.pool.kda.state[:, 0] = 0
    branched, logits, _ = answer(model, cache, other)
    fresh = allocate(model.config, num_pages=60, checkpoint_grid=grid)
    want, want_logits, _ = answer(model, fresh, other)
    assert branched == want
    torch.testing.assert_close(logits, want_logits[2 * grid :], **LOGITS)


def test_case_a2_cached_states_are_those_of_separate_prefills(model):
    lengths = [130, 64, 7, 1, 63, 65, 127, 128, 129]
    cache = allocate(model.config, num_pages=60, num_slots=40, page_size=16, checkpoint_grid=64)
    prompts = [prompt(n, seed=i) for i, n in enumerate(lengths)]
    leases = [cache.open(ids) for ids in prompts]
    for lease, ids in zip(leases, prompts, strict=True):
        cache.grow(lease, tokens=len(ids))
    work = list(zip(leases, prompts, strict=True))
    with torch.inference_mode():
        model(cache.make_batch(work), cache)
    for lease, ids in work:
        cache.commit(lease, ids)
    cache.check()
    found = {(node.end, node.path()[0].key[0]): node for node in cache.allocator.tree.nodes() if node.slot is not None}
    want = {(n, ids[0]) for ids in prompts for n in {len(ids) // 64 * 64, (len(ids) - 1) // 64 * 64} - {0}}
    assert found.keys() == want, "never the state after the last token of 130"
    for ids in prompts:
        for length in (64, 128):
            if (node := found.get((length, ids[0]))) is not None:
                same_state(state_after(model, ids[:length]), state_of(cache, node.slot))
    for lease, ids in work:
        same_state(state_after(model, ids), state_of(cache, lease.slot))


@pytest.mark.parametrize("others", range(6))
def test_case_a3_kv_without_a_state_is_not_used(model, others):
    """States are evicted one by one while their KV stays; reuse falls back to what has both."""
    cache = allocate(model.config, num_slots=6, num_pages=40)
    ids = prompt(36)
    for length in (17, 27, 36):  # states at 16, 17, 24, 27, 32 and 36
        answer(model, cache, ids[:length], tokens=1)
    held = hold_slots(cache, others)
    states = sorted(kept(cache))
    assert len(states) == 6 - max(others, 0)
    wanted = ids[:30] + prompt(4, seed=3)
    for lease in held:
        cache.close(lease)
    lease = cache.open(wanted)
    assert lease.cached_len == max((n for n in states if n <= 30), default=0)
    assert lease.kv_len == 30
    logits = run(model, cache, lease, wanted[lease.cached_len :])
    torch.testing.assert_close(logits, stateless(model, wanted)[lease.cached_len :], **LOGITS)


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside-another"])
def test_case_a5_the_state_at_a_boundary_is_kept_once_when_results_come_a_step_late(model, beside):
    """Decode from two tokens before the boundary to two behind it; a result is looked at after the next launch."""
    stored, ids = [], prompt(10)
    cache = allocate(model.config, listener=lambda e: stored.append(e) if e.kind == "checkpoint" else None)
    lease, other = cache.open(ids[:6]), cache.open(prompt(3, seed=1))
    run(model, cache, lease, ids[:6])
    run(model, cache, other, prompt(3, seed=1))
    late = []
    with torch.inference_mode():
        for token in ids[6:]:
            steps = [(lease, [token])] + ([(other, [token])] if beside else [])
            for each, new in steps:
                cache.grow(each, tokens=len(new))
            batch = cache.make_batch(steps, mode="decode")
            late.append((lease.length, model(batch, cache)))
            for each, new in steps:
                cache.commit(each, new)
            if len(late) > 1:  # the result of the step before
                length, logits = late[-2]
                torch.testing.assert_close(logits[0], stateless(model, ids[: length + 1])[-1], **LOGITS)
    assert [(e.action, e.tokens) for e in stored] == [("store", 8)]
    assert stored[0].key == prefix_keys(ids, [8])[0]
    same_state(state_after(model, ids[:8]), state_of(cache, kept(cache)[8].slot))


def test_case_a6_a_running_request_survives_the_loss_of_the_state_it_came_from(model):
    cache = allocate(model.config, num_slots=3)
    ids = prompt(15)
    answer(model, cache, ids[:9], tokens=1)
    lease = cache.open(ids)
    assert lease.cached_len == 9
    cache.issue()
    hold_slots(cache, 2)
    assert not kept(cache)
    with pytest.raises(CapacityError):
        cache.open([1])
    torch.testing.assert_close(run(model, cache, lease, ids[9:]), stateless(model, ids)[9:], **LOGITS)
    cache.close(lease)
    cache.close(cache.open([1]))  # what it gave back can be evicted
    cache.check()


@pytest.mark.parametrize("seed", range(4))
def test_case_a11_a_router_that_replays_the_events_knows_every_hit(seed):
    router, choices = Router(), random.Random(seed)
    cache = allocate(num_pages=30, num_slots=5, checkpoint_grid=choices.choice([1, 3, 8]), listener=router)
    known = [[1] * 9]
    for _ in range(200):
        ids = [*choices.choice(known)[: choices.randint(0, 30)], *(choices.randrange(2) for _ in range(6))]
        space, media = choices.choice(["", "salt"]), choices.choice([(), (MediaKey(2, 3, "cat"),)])
        expected = router.longest(ids, space, media)
        lease = cache.open(ids, namespace=space, media=media)
        assert lease.cached_len == expected
        for chunk in (5, 9, 1, 1):
            new = ids[lease.length : lease.length + chunk] or [choices.randrange(2)]
            if lease.length + len(new) > 60:
                break
            cache.grow(lease, tokens=len(new))
            cache.make_batch([(lease, new)], mode="prefill" if chunk > 1 else "decode")
            cache.commit(lease, new)
        known.append(list(lease.tokens))
        cache.close(lease, donate=choices.random() < 0.8)
        cache.check()
    stats = cache.stats()
    for kind, stored in (("pages", "page"), ("checkpoints", "checkpoint")):
        assert stats[f"stored_{kind}"] - stats[f"removed_{kind}"] == len(router.stored[stored])
        assert stats[f"removed_{kind}"] > 20
    cache.clear()
    assert router.stored == {"page": {}, "checkpoint": {}}


@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
@pytest.mark.parametrize("grid", [5, 64, 512])
def test_case_a13_reuse_is_the_largest_kept_boundary_whatever_the_page_size(page_size, grid):
    cache = allocate(
        num_pages=-(-5000 // page_size), num_slots=40, page_size=page_size, checkpoint_grid=grid, keep_turn_ends=False
    )
    assert (cache.stats()["page_size"], cache.stats()["checkpoint_grid"]) == (page_size, grid)
    for times, beside in itertools.product((1, 2), (-1, 0, 1)):
        length = times * grid + beside
        ids = prompt(length, seed=length)
        for want in (0, (length - 1) // grid * grid):
            lease = cache.open(ids)
            assert lease.cached_len == want
            assert len(lease.pages) == -(-want // page_size)
            cache.grow(lease, tokens=length - want)
            cache.make_batch([(lease, ids[want:])])
            cache.commit(lease, ids[want:])
            cache.close(lease)
            cache.check()


@pytest.mark.parametrize(("page_size", "grid"), [(1, 5), (7, 5), (16, 5), (64, 5), (7, 64), (16, 64)])
@pytest.mark.parametrize("beside", [-1, 0, 1])
def test_a_prompt_that_ends_beside_the_grid_gives_the_same_again(model, page_size, grid, beside):
    cache = allocate(model.config, num_pages=-(-200 // page_size), page_size=page_size, checkpoint_grid=grid)
    ids = prompt(2 * grid + beside)
    cold, cold_logits, _ = answer(model, cache, ids, tokens=3)
    warm, warm_logits, lease = answer(model, cache, ids, tokens=3)
    assert lease.cached_len == (len(ids) - 1) // grid * grid
    assert warm == cold
    torch.testing.assert_close(warm_logits, cold_logits[lease.cached_len :], **LOGITS)


@pytest.mark.parametrize("progress", ["opened", "grown", "described"])
def test_case_b1_a_thousand_aborts_neither_leak_nor_lose_the_cache(progress):
    cache = allocate(num_slots=3, num_pages=9)
    ids = prompt(14)
    served(cache, ids[:6])
    running = opened(cache, 3, 2)
    before = cache.free_pages, cache.free_slots, cache.cached_pages, cache.cached_slots
    for _ in range(1000):
        lease = cache.open(ids)
        assert lease.cached_len == 6
        if progress != "opened":
            cache.grow(lease, tokens=8)
        if progress == "described":
            cache.make_batch([(lease, ids[6:])])
        cache.close(lease)
        cache.issue()
        assert (cache.free_pages, cache.free_slots, cache.cached_pages, cache.cached_slots) == before
    cache.check()
    cache.close(running)


def test_case_b2_admission_is_all_or_nothing():
    cache = allocate(num_slots=2, num_pages=4)
    running = opened(cache, 9, 3)
    before = cache.dump()
    waiting = cache.open(prompt(9))
    with pytest.raises(CapacityError) as caught:
        cache.grow(waiting, tokens=9)
    assert (caught.value.needed_pages, caught.value.free_pages) == (3, 1)
    cache.close(waiting)
    assert {k: cache.dump()[k] for k in ("leases", "tree", "free_pages", "free_slots", "cached_slots")} == {
        k: before[k] for k in ("leases", "tree", "free_pages", "free_slots", "cached_slots")
    }
    cache.close(running)
    waiting = cache.open(prompt(9))
    cache.grow(waiting, tokens=9)
    cache.check()


@pytest.mark.parametrize("hit", [5, 6, 7])
def test_a_hit_inside_a_page_leaves_the_page_as_it_was(model, hit):
    """Copy on write: the resumed request fills its own copy, others still read the old bytes."""
    cache = allocate(model.config)
    ids = prompt(hit)
    answer(model, cache, ids, tokens=1)
    node = kept(cache)[hit]
    shared = cache.allocator.tree.pages_of(node)[-1]
    before = cache.pool.latent.pages[:, shared].clone()
    state = state_of(cache, node.slot)
    for seed in (1, 2):
        longer = ids + prompt(9, seed=seed)
        lease = cache.open(longer)
        assert lease.cached_len == hit
        assert lease.pages[0] == node.path()[0].pages[0]
        assert lease.pages[1] != shared
        got = run(model, cache, lease, longer[hit:])
        torch.testing.assert_close(got, stateless(model, longer)[hit:], **LOGITS)
        assert cache.pool.latent.pages[:, shared].equal(before)
        assert all(a.equal(b) for a, b in zip(state_of(cache, node.slot), state, strict=True))
        copied = cache.pool.latent.pages[:, lease.pages[1], : hit - PAGE]
        assert copied.equal(before[:, : hit - PAGE])
        cache.close(lease)


DTYPES = {
    "float32": {},
    "bf16-state": {"mamba_ssm_dtype": "bfloat16"},
    "bf16-kv": {"kv_cache_dtype": "bfloat16"},
    "fp8-kv": {"kv_cache_dtype": "fp8_e4m3"},
    "fp8-kv-bf16-state": {"kv_cache_dtype": "fp8_e4m3", "mamba_ssm_dtype": "bfloat16"},
}


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("hit", [16, 18])
def test_resuming_gives_the_bits_of_going_on(model, dtypes, hit):
    """Copies are exact in every dtype: a request cut at the same tokens computes the same."""
    ids = prompt(29)
    fresh = allocate(model.config, checkpoint_grid=2, **dtypes)
    with fresh.lease(ids[:hit]) as lease:
        run(model, fresh, lease, ids[:hit])
        want = run(model, fresh, lease, ids[hit:])
        want_state = state_of(fresh, lease.slot)
    cache = allocate(model.config, checkpoint_grid=2, num_slots=12, **dtypes)
    with cache.lease(ids[:hit]) as lease:
        run(model, cache, lease, ids[:hit])
    poison_free(cache)
    lease = cache.open(ids)
    assert lease.cached_len == hit
    assert run(model, cache, lease, ids[hit:]).equal(want)
    assert all(a.equal(b) for a, b in zip(state_of(cache, lease.slot), want_state, strict=True))


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_interior_states_resume_within_the_rounding_of_their_dtype(model, dtypes):
    """The state kept inside a chunk is that of a chunk which ends there."""
    ids = prompt(29)
    cache = allocate(model.config, num_slots=12, **dtypes)
    cold, logits, _ = answer(model, cache, ids)
    warm, again, lease = answer(model, cache, ids)
    assert lease.cached_len == 24
    ratio = {"float32": 1e-4}.get(next(k for k, v in DTYPES.items() if v == dtypes), 4e-2)
    assert_close("logits", logits[24 : len(again) + 24][:5], again[:5], ratio=ratio)
    if not dtypes:
        assert warm == cold


@pytest.mark.parametrize("turns", [4])
def test_a_conversation_is_reused_turn_by_turn(model, turns):
    cache = allocate(model.config, num_pages=60, num_slots=20)
    ids, before = prompt(11), 0
    for turn in range(turns):
        new, logits, lease = answer(model, cache, ids)
        assert lease.cached_len == before
        torch.testing.assert_close(logits, stateless(model, ids + new)[lease.cached_len : -1], **LOGITS)
        before = len(ids) + len(new) - 1  # the last new token was never computed
        ids = ids + new + prompt(5, seed=turn + 1)


@pytest.mark.parametrize("after", [1, 5, 8, 9])
def test_a_preempted_request_goes_on_where_it_was(model, after):
    ids = prompt(13)
    want, _, _ = answer(model, allocate(model.config), ids, tokens=12)
    cache = allocate(model.config)
    lease = cache.open(ids)
    new = [int(run(model, cache, lease, ids)[-1].argmax())]
    while len(new) < 12:
        if len(new) == after:
            cache.close(lease)  # preempted
            lease = cache.open(ids + new)
            assert lease.cached_len == len(ids) + len(new) - 1
        new.append(int(run(model, cache, lease, new[-1:], mode="decode")[-1].argmax()))
    assert new == want


def test_a_hit_needs_the_same_namespace_and_the_same_images():
    cache = allocate()
    ids, cat, dog = prompt(20), (MediaKey(3, 6, "cat"),), (MediaKey(3, 6, "dog"),)
    served(cache, ids, namespace="a", media=cat)
    assert reused(cache, ids, namespace="a", media=cat) == (16, 19)
    assert reused(cache, ids, namespace="b", media=cat) == (0, 0)
    assert reused(cache, ids, namespace="a", media=dog) == (0, 3)
    assert reused(cache, ids, namespace="a") == (0, 3)
    assert reused(cache, ids, media=cat) == (0, 0)
    other = [*ids[:3], *[9] * 6, *ids[9:]]
    assert reused(cache, other, namespace="a", media=cat) == (16, 19)
    assert reused(cache, ids, namespace="a", media=cat, reuse=False) == (0, 0)


def test_without_a_prefix_cache_nothing_is_reused(model):
    cache = allocate(model.config, prefix_cache=False)
    ids = prompt(20)
    results = [answer(model, cache, ids) for _ in range(2)]
    assert results[0][0] == results[1][0]
    assert results[0][1].equal(results[1][1])
    assert [lease.cached_len for _, _, lease in results] == [0, 0]
    assert (cache.free_pages, cache.free_slots) == (24, 6)


def test_a_slot_that_is_held_only_by_a_scheduled_copy_can_be_had():
    cache, ids = allocate(num_slots=2), prompt(6)
    served(cache, ids)
    assert cache.open([*ids, 1]).cached_len == 6
    with pytest.raises(CapacityError):
        cache.allocator.open([2])
    cache.open([2])
    cache.check()


def test_a_page_that_is_held_only_by_a_scheduled_copy_can_be_had():
    cache, ids = allocate(num_pages=3), prompt(12)
    served(cache, ids[:6])
    lease = cache.open(ids)
    assert lease.cached_len == 6
    with pytest.raises(CapacityError):
        cache.allocator.grow(lease, 6)
    cache.grow(lease, tokens=6)
    cache.check()


# ---- distrust -----------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_nothing_poisoned_can_match_and_the_next_owner_is_clean(model, when):
    cache = allocate(model.config, num_pages=8, num_slots=4)
    good, ids = prompt(6), prompt(6) + prompt(14, seed=1)
    answer(model, cache, good, tokens=1)
    lease = cache.open(ids)
    assert lease.cached_len == 6
    cache.issue()
    run(model, cache, lease, ids[6:])
    if when == "decode":
        run(model, cache, lease, prompt(5, seed=2), chunk=1, mode="decode")
    own = lease.pages[1:]  # the first page is that of the hit
    slots = [lease.slot, *(node.slot for end, node in kept(cache).items() if end > 6)]
    cache.pool.latent.pages[:, own] = torch.nan
    cache.pool.kda.state[:, slots] = torch.nan
    cache.pool.kda.conv[:, slots] = torch.nan
    cache.discard(lease)
    cache.discard(lease)
    cache.check()
    assert not cache.pool.latent.pages.isnan().any()
    assert not any(x.isnan().any() for x in state_of(cache, lease.slot))
    assert sorted(kept(cache)) == [6]
    for wanted in (ids, [*good, 1, 2, 3], prompt(30, seed=3)):
        reuse = cache.open(wanted)
        assert reuse.cached_len == (0 if wanted[:6] != good else 6)
        got = run(model, cache, reuse, wanted[reuse.cached_len :])
        torch.testing.assert_close(got, stateless(model, wanted)[reuse.cached_len :], **LOGITS)
        cache.close(reuse)


# ---- without make_batch ---------------------------------------------------------------------------


@torch.inference_mode()
def test_another_engine_may_describe_its_steps_itself(model):
    """`issue`, `lease.pages` and `lease.slot` are all it needs."""
    cache, ids = allocate(model.config), prompt(21)

    def foreign_step(lease, new, saves=None):
        cache.grow(lease, tokens=len(new))
        cache.issue()
        batch = by_hand([(lease, new)], "prefill", saves)
        logits = model(batch, cache)
        cache.commit(lease, new)
        cache.check()
        return logits

    with cache.lease(ids) as lease:
        parts = [foreign_step(lease, ids[:16]), foreign_step(lease, ids[16:])]
        torch.testing.assert_close(torch.cat(parts), stateless(model, ids), **LOGITS)
    assert sorted(kept(cache)) == [16, 21], "where a step ends on the grid, and at the end"
    longer = ids + prompt(8, seed=1)
    with cache.lease(longer) as lease:
        assert lease.cached_len == 21
        cache.grow(lease, tokens=8)
        reserved = cache.allocator.begin(lease, 8, saves=True)
        assert [offset for offset, _ in reserved] == [3]
        saves = StateSaves((0,), (3,), torch.tensor([reserved[0][1]], dtype=torch.int32))
        logits = foreign_step(lease, longer[21:], saves)
        torch.testing.assert_close(logits, stateless(model, longer)[21:], **LOGITS)
    same_state(state_after(model, longer[:24]), state_of(cache, kept(cache)[24].slot))


# ---- dtypes and parts ---------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "fp8_e4m3"])
def test_quantised_pages_stay_within_their_rounding(model, kv):
    """Prefill over a cached prefix, and decode, against pages of full precision."""
    layer = model.config.text.layers_of("mla")[0]
    attention = model.model.layers[layer].self_attn
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
                out.append(attention(x[begin : begin + sum(lengths)], batch, cache.view(layer)))
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8_e4m3"])
def test_copying_and_zeroing_pages_is_exact_in_every_dtype(dtype):
    cache = allocate(kv_cache_dtype=dtype, num_pages=5)
    pool = cache.pool.latent
    raw = pool.pages.view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))
    before = raw.clone()
    pool.copy(torch.tensor([1, 2, 1]), torch.tensor([3, 4, 5]))
    for source, target in ((1, 3), (2, 4), (1, 5), (1, 1), (2, 2), (0, 0)):
        assert raw[:, target].equal(before[:, source])
    pool.zero(torch.tensor([4, 2]))
    assert not raw[:, [2, 4]].any()
    assert raw[:, [0, 1, 3, 5]].equal(before[:, [0, 1, 1, 1]])


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
    whole = allocate(num_slots=4)
    assert whole.pool.kda.state.shape == (6, 5, 4, 32, 32)
    assert whole.pool.kda.conv.shape == (6, 5, 3, 384)
    assert whole.pool.latent.pages.shape == (3, 25, PAGE, 40)
    part = allocate(num_slots=4, tp_size=2, layers=range(2, 8))
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


def test_a_truncated_model_runs_on_the_pools_of_its_layers():
    layers = range(3)  # of both kinds
    model = seed_weights(KimiK3ForCausalLM(tiny_config(**SMALL), layers=layers, dtype=torch.float32))
    cache = allocate(model.config, layers=layers)
    ids = prompt(10)
    for cached in (0, 8):
        with cache.lease(ids) as lease:
            assert lease.cached_len == cached
            got = run(model, cache, lease, ids[cached:], 4)
            torch.testing.assert_close(got, stateless(model, ids)[cached:], **LOGITS)
