"""Verify steps: what they leave behind equals decoding the accepted tokens one by one, whichever rollback is used."""

from __future__ import annotations

import random

import pytest
import torch

from k3lib import Batch, KimiK3Config, KimiK3ForCausalLM
from k3lib.batch import KDAState, VerifyScratch
from k3lib.cache import CacheConfig, HybridCache
from k3lib.config import KDAConfig
from k3lib.errors import ConfigError
from k3lib.layers import KimiDeltaAttention

BLOCK = 7


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = KimiK3ForCausalLM(KimiK3Config.tiny(), dtype=torch.float64)  # what is not rounding shows
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    return model.eval().requires_grad_(False)


def make_cache(model, rollback="replay", **sizes):
    sizes = {"num_pages": 40, "num_slots": 12, "page_size": 8, "checkpoint_grid": 16, **sizes}
    pools = CacheConfig(block_size=BLOCK, rollback=rollback, **sizes)
    return HybridCache.allocate(model.config, pools, dtype=model.dtype)


def prefill(model, cache, prompt):
    lease = cache.open(prompt)
    todo = prompt[lease.cached_len :]
    cache.grow(lease, tokens=len(todo))
    logits = model(cache.make_batch([(lease, todo)]), cache, logits="last")
    cache.commit(lease, todo)
    return lease, logits


def decode(model, cache, lease, ids):
    rows = []
    for token in ids:
        cache.grow(lease, tokens=1)
        rows.append(model(cache.make_batch([(lease, [token])], mode="decode"), cache, logits="last"))
        cache.commit(lease, [token])
    return torch.cat(rows)


def states_of(cache, lease):
    cache.issue()
    return cache.pool.kda.state[:, lease.slot].clone(), cache.pool.kda.conv[:, lease.slot].clone()


def assert_same(got, expected):
    """Equal but for roundings."""
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-11)


def kv_of(cache, lease):
    pages = cache.pool.latent.pages[:, lease.pages]
    return pages.flatten(1, 2)[:, : lease.length].clone()


@pytest.mark.parametrize("rollback", ["replay", pytest.param("states", marks=pytest.mark.again)])
def test_every_accepted_length_leaves_what_decoding_leaves(model, rollback):
    draw = random.Random(1)
    prompts = [[draw.randrange(256) for _ in range(n)] for n in (21, 5, 1)]
    for accepted in (0, 3, BLOCK):
        cache, plain = make_cache(model, rollback), make_cache(model)
        leases = [prefill(model, cache, p)[0] for p in prompts]
        others = [prefill(model, plain, p)[0] for p in prompts]
        before = [states_of(cache, lease) for lease in leases]
        # three steps with their own lengths; the second request always takes one token only
        for step in range(2):
            blocks = [[draw.randrange(256) for _ in range(BLOCK + 1 - i)] for i in range(3)]
            for lease, block in zip(leases, blocks, strict=True):
                cache.grow(lease, tokens=len(block))
            batch = cache.make_batch(list(zip(leases, blocks, strict=True)), mode="verify")
            logits = model(batch, cache).split([len(b) for b in blocks])
            if not step:
                for lease, (state, conv) in zip(leases, before, strict=True):
                    assert torch.equal(states_of(cache, lease)[0], state)
                    assert torch.equal(states_of(cache, lease)[1], conv)
            taken = [b[: min(accepted + 1, len(b))] if i != 1 else b[:1] for i, b in enumerate(blocks)]
            cache.commit_verified(list(zip(leases, taken, strict=True)))
            cache.check()
            for rows, lease, other, ids in zip(logits, leases, others, taken, strict=True):
                want = decode(model, plain, other, ids)
                assert_same(rows[: len(ids)], want)
                assert lease.tokens == other.tokens
                for got, expected in zip(states_of(cache, lease), states_of(plain, other), strict=True):
                    assert_same(got, expected)
                assert_same(kv_of(cache, lease), kv_of(plain, other))
        for lease in leases:
            cache.close(lease)
        cache.check()


def test_both_rollbacks_give_the_same_bits(model):
    draw = random.Random(2)
    prompt = [draw.randrange(256) for _ in range(30)]
    caches = [make_cache(model, kind) for kind in ("replay", "states")]
    leases = [prefill(model, cache, prompt)[0] for cache in caches]
    for _ in range(15):
        block = [draw.randrange(256) for _ in range(draw.randint(1, BLOCK + 1))]
        taken = block[: draw.randint(1, len(block))]
        for cache, lease in zip(caches, leases, strict=True):
            cache.grow(lease, tokens=len(block))
            model(cache.make_batch([(lease, block)], mode="verify"), cache)
            cache.commit_verified([(lease, taken)])
        for got, expected in zip(states_of(caches[0], leases[0]), states_of(caches[1], leases[1]), strict=True):
            assert torch.equal(got, expected)


def test_checkpoints_inside_a_window_hold_the_state_of_their_length(model):
    draw = random.Random(3)
    cache = make_cache(model, track_interval=3, num_slots=30)
    prompt = [draw.randrange(256) for _ in range(7)]
    block = [draw.randrange(256) for _ in range(BLOCK + 1)]
    lease, _ = prefill(model, cache, prompt)
    cache.grow(lease, tokens=len(block))
    model(cache.make_batch([(lease, block)], mode="verify"), cache)
    cache.commit_verified([(lease, block[:6])])  # 7 -> 13 tokens: states at 9 and 12
    cache.close(lease)
    whole = prompt + block
    for length in (9, 12, 13):
        found = cache.open([*whole[:length], 0, 0])
        assert found.cached_len == length
        plain = make_cache(model)
        other, _ = prefill(model, plain, whole[:length])
        for got, expected in zip(states_of(cache, found), states_of(plain, other), strict=True):
            assert_same(got, expected)
        cache.close(found)
    rejected = cache.open([*whole[:15], 0])
    assert rejected.cached_len == 13, "nothing of a rejected token can be found"
    cache.close(rejected)
    cache.check()


def test_replay_keeps_far_less_than_states(model):
    sizes = {kind: make_cache(model, kind).pool.kda.scratch.nbytes for kind in ("replay", "states")}
    kda = model.config.text.kda
    per_token = 3 * kda.key_dim + 2 * kda.value_dim + kda.key_dim + kda.value_dim  # a few vectors a head
    rows = 12 * (BLOCK + 1) * len(model.config.text.layers_of("kda")) * kda.num_heads
    assert sizes["replay"] <= rows * (per_token + 1) * 8
    assert sizes["states"] >= rows * kda.key_dim * kda.value_dim * 8
    assert make_cache(model).pool.nbytes - sizes["replay"] > 0


def test_a_verify_step_that_does_not_fit_is_refused(model):
    cache = make_cache(model, verify_rows=1)
    leases = [prefill(model, cache, [1, 2, 3])[0] for _ in range(2)]
    for lease in leases:
        cache.grow(lease, tokens=BLOCK + 2)
    with pytest.raises(ConfigError, match=r"1 rows of 1 \.\. 8 tokens, the step has 2"):
        cache.make_batch([(lease, [1]) for lease in leases], mode="verify")
    with pytest.raises(ConfigError, match=r"1 \.\. 9|9 \.\. 9"):
        cache.make_batch([(leases[0], [1] * (BLOCK + 2))], mode="verify")
    with pytest.raises(ConfigError, match="has no verify step"):
        cache.commit_verified([(leases[0], [1])])
    cache.make_batch([(leases[0], [5, 6, 7])], mode="verify")
    for wrong in ([6], [], [5, 6, 7, 8], [5, 7]):
        with pytest.raises(ConfigError, match="not the first tokens"):
            cache.commit_verified([(leases[0], wrong)])
    with pytest.raises(ConfigError, match="commit_verified"):
        cache.commit(leases[0], [5, 6, 7])
    with pytest.raises(ConfigError, match="has no verify step"):
        cache.commit_verified([(leases[0], [5]), (leases[0], [5])])
    cache.commit_verified([(leases[0], [5])])
    with pytest.raises(ConfigError, match="has no verify step"):
        cache.commit_verified([(leases[0], [6])])
    without = HybridCache.allocate(model.config, CacheConfig(num_pages=4, num_slots=2), dtype=model.dtype)
    lease = without.open([1])
    without.grow(lease, tokens=1)
    with pytest.raises(ConfigError, match="no verify scratch"):
        model(without.make_batch([(lease, [1])], mode="verify"), without)


def test_an_aborted_verify_step_leaves_nothing(model):
    cache = make_cache(model)
    lease, _ = prefill(model, cache, list(range(20)))
    cache.grow(lease, tokens=8)
    model(cache.make_batch([(lease, [3] * 8)], mode="verify"), cache)
    cache.close(lease)
    cache.check()
    assert cache.free_pages + cache.cached_pages == 40
    again = cache.open([*range(20), 3, 3, 3])
    assert again.cached_len <= 20
    cache.close(again)
    cache.clear()
    cache.check()
    assert (cache.free_pages, cache.free_slots) == (40, 12)


def test_a_layer_alone_can_verify():
    torch.manual_seed(4)
    layer = KimiDeltaAttention(KDAConfig(hidden_size=32, num_heads=2, key_dim=16, value_dim=8, gate_lower_bound=-5.0))
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.3)
    layer.requires_grad_(False)
    state = layer.new_state(2)
    x = torch.randn(12, 32)
    layer(x[:4], Batch.of([4], slots=[1]), state)
    before = state.state.clone(), state.conv.clone()
    scratch = VerifyScratch(torch.zeros(1, 8, 2 * (2 * 16 + 8)), states=torch.zeros(1, 8, 2, 8, 16))
    out = layer(x[4:], Batch.of([8], slots=[1], cached_tokens=[4], mode="verify"), KDAState(*before, scratch))
    assert torch.equal(state.state, before[0])
    layer(x[4:9], Batch.of([5], slots=[1], cached_tokens=[4]), state)
    torch.testing.assert_close(scratch.states[0, 4], state.state[1], rtol=1e-5, atol=1e-5)
    again = layer.new_state(1)
    want = layer(x, Batch.of([12], slots=[1]), again)
    torch.testing.assert_close(out, want[4:], rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match="no verify scratch"):
        layer(x[4:], Batch.of([8], slots=[1], mode="verify"), state)
