"""KDA over sequences that are split over ranks: outputs, states and windows of the unsplit prefill."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeded import Ranks, draw, seed_weights

from k3lib import Batch, KimiK3ForCausalLM, Mesh
from k3lib.batch import StateSaves
from k3lib.cache import CacheConfig
from k3lib.cache.pools import HybridPool
from k3lib.errors import ConfigError
from k3lib.layers import GatedMLA
from k3lib.ops import KDAParams, kda_chunk, kda_mixer
from k3lib.parallel import LOCAL, RankView, kda_context_parallel
from k3lib.parallel.kcp import (
    compose,
    conv_halo,
    kda_mixer_context_parallel,
    prefill_split,
    split_tokens,
    transitions,
)  # fmt: skip
from k3lib.testing import assert_close, tiny_config

HEADS, KEYS, VALUES, WIDTH = 2, 8, 6, 4
CHANNELS = HEADS * (2 * KEYS + VALUES)


def params_of(bound, dtype=torch.float32):
    return KDAParams(draw(HEADS, seed=20, dtype=dtype) * 0.5, draw(HEADS, KEYS, seed=21, dtype=dtype), bound)


def inputs_of(length, dtype=torch.float32):
    """qkv, gate, beta, out_gate of `length` tokens."""
    shapes = [(CHANNELS,), (HEADS, KEYS), (HEADS,), (HEADS, VALUES)]
    return [draw(length, *shape, seed=30 + i, dtype=dtype) for i, shape in enumerate(shapes)]


def parts_of(x, lengths, size, rank, cuts):
    """This rank's tokens of every request, packed, and how many of each."""
    begins = [0, *accumulate(lengths)]
    pieces = [x[begin + a : begin + b] for begin, (a, b) in zip(begins, cuts[rank], strict=False)]
    return torch.cat(pieces), [b - a for a, b in cuts[rank]]


def offsets(counts):
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32)


@st.composite
def splits(draw_one):
    """Requests, ranks, and cuts of every request at any place, also of the same place twice."""
    size = draw_one(st.integers(1, 4))
    lengths = draw_one(st.lists(st.integers(0, 40), min_size=1, max_size=3))
    cuts = []
    for length in lengths:
        inner = sorted(draw_one(st.lists(st.integers(0, length), min_size=size - 1, max_size=size - 1)))
        edges = [0, *inner, length]
        cuts.append([(edges[r], edges[r + 1]) for r in range(size)])
    return lengths, size, [[cut[r] for cut in cuts] for r in range(size)]


def check_split(lengths, size, cuts, bound, dtype, *, allowed):
    """A mixer over cut requests against one over whole ones: outputs, states and windows of every rank."""
    total, slots = sum(lengths), torch.arange(1, len(lengths) + 1, dtype=torch.int32)
    inputs, params = inputs_of(total, dtype), params_of(bound, dtype)
    weight, norm = draw(CHANNELS, WIDTH, seed=40, dtype=dtype), 1 + 0.1 * draw(VALUES, seed=41, dtype=dtype)

    def pools():
        state = draw(len(lengths) + 1, HEADS, VALUES, KEYS, seed=42, dtype=dtype)
        return state, draw(len(lengths) + 1, WIDTH - 1, CHANNELS, seed=43, dtype=dtype)

    facts = {"params": params, "conv_weight": weight, "norm_weight": norm, "norm_eps": 1e-5, "scale": KEYS**-0.5}
    state, conv = pools()
    want = kda_mixer(*inputs, **facts, state=state, conv_state=conv, slots=slots, cu_seqlens=offsets(lengths))

    def work(group):
        mine = [parts_of(x, lengths, size, group.rank, cuts) for x in inputs]
        own_state, own_conv = pools()
        out = kda_mixer_context_parallel(
            *[x for x, _ in mine], **facts, state=own_state, conv_state=own_conv, slots=slots,
            cu_seqlens=offsets(mine[0][1]), group=group,
        )  # fmt: skip
        return out, own_state, own_conv

    for rank, (got, own_state, own_conv) in enumerate(Ranks(size).run(work)):
        assert got.dtype == own_state.dtype == dtype
        assert_close(f"out of rank {rank}", parts_of(want, lengths, size, rank, cuts)[0], got, allowed)
        assert_close(f"state of rank {rank}", state, own_state, allowed)
        assert own_conv.equal(conv)


@settings(max_examples=20)
@given(splits(), st.sampled_from([-5.0, None]))
def test_a_split_prefill_equals_the_whole(split, bound):
    check_split(*split, bound, torch.float32, allowed=1e-5)


UNEVEN = {
    # one request over four ranks: a chunk and a bit, then pieces shorter than the window of the convolution, then none
    "shorter than the window": ([72], [[(0, 69)], [(69, 70)], [(70, 72)], [(72, 72)]]),
    "nobody in front": ([9], [[(0, 0)], [(0, 0)], [(0, 9)], [(9, 9)]]),
    # three requests, one of them empty, cut at other places
    "several": (
        [130, 0, 5],
        [
            [(0, 64), (0, 0), (0, 0)],
            [(64, 65), (0, 0), (0, 1)],
            [(65, 65), (0, 0), (1, 5)],
            [(65, 130), (0, 0), (5, 5)],
        ],
    ),
}


@pytest.mark.parametrize("bound", [-5.0, None], ids=["bounded", "softplus"])
@pytest.mark.parametrize("name", UNEVEN)
def test_a_split_prefill_is_exact_in_double_precision(name, bound):
    """What is left is rounding: the maths of a split are those of the whole."""
    lengths, cuts = UNEVEN[name]
    check_split(lengths, 4, cuts, bound, torch.float64, allowed=1e-12)


def test_a_long_sequence_over_eight_ranks_some_without_tokens():
    """The bounded gate of the release, in whole chunks: the last ranks of eight have none of 300 tokens."""
    length, size = 300, 8
    q, k, v = draw(length, HEADS, KEYS, seed=1), draw(length, HEADS, KEYS, seed=2), draw(length, HEADS, VALUES, seed=3)
    gate, beta, params = draw(length, HEADS, KEYS, seed=4), draw(length, HEADS, seed=5), params_of(-5.0)
    cuts = [split_tokens([length], size, rank, chunk=64) for rank in range(size)]
    assert cuts[-1] == [(300, 300)]
    state = torch.zeros(2, HEADS, VALUES, KEYS)
    slots = torch.tensor([1], dtype=torch.int32)
    facts = {"params": params, "slots": slots, "scale": KEYS**-0.5}
    want = kda_chunk(q, k, v, gate, beta, **facts, state=state, cu_seqlens=offsets([length]))

    def work(group):
        ((begin, end),) = cuts[group.rank]
        own = torch.zeros(2, HEADS, VALUES, KEYS)
        out = kda_context_parallel(
            *[x[begin:end] for x in (q, k, v, gate, beta)], **facts, state=own, cu_seqlens=offsets([end - begin]),
            group=group,
        )  # fmt: skip
        return out, own

    found = Ranks(size).run(work)
    assert_close("out", want, torch.cat([out for out, _ in found]), 1e-5)
    for _, own in found:
        assert_close("state", state, own, 1e-5)


def test_transitions_compose_like_the_tokens_they_stand_for():
    length, params = 50, params_of(None)
    q, k, v = (draw(length, HEADS, n, seed=i) for i, n in enumerate((KEYS, KEYS, VALUES)))
    gate, beta = draw(length, HEADS, KEYS, seed=4), draw(length, HEADS, seed=5)
    tensors = (q, k, v, gate, beta)

    def step(begin, end):
        part = [x[begin:end] for x in tensors]
        return transitions(*part, params=params, cu_seqlens=offsets([end - begin]), scale=1.0)

    start = draw(1, HEADS, VALUES, KEYS, seed=6)
    whole = compose(start, step(0, length)[None])
    assert_close("cut at 17", whole, compose(start, torch.stack([step(0, 17), step(17, length)])), 1e-5)
    assert_close("cut twice", whole, compose(start, torch.stack([step(0, 17), step(17, 17), step(17, length)])), 1e-5)
    nothing = step(3, 3)[0, 0]
    assert nothing[:VALUES].eq(0).all()
    assert nothing[VALUES:].equal(torch.eye(KEYS))


def test_the_window_in_front_of_a_rank_may_come_from_several():
    initial = torch.arange(3.0)[None, :, None] - 3  # -3 -2 -1, then tokens 0 1 2 3
    parts = [torch.tensor([[0.0]]), torch.zeros(0, 1), torch.tensor([[1.0]]), torch.tensor([[2.0], [3.0]])]

    def work(group):
        x = parts[group.rank]
        return conv_halo(x, 4, cu_seqlens=offsets([len(x)]), initial=initial, group=group)

    before, after = zip(*Ranks(4).run(work), strict=True)
    assert [x.flatten().tolist() for x in before] == [[-3, -2, -1], [-2, -1, 0], [-2, -1, 0], [-1, 0, 1]]
    assert all(x.flatten().tolist() == [1, 2, 3] for x in after)


def test_requests_without_a_slot_are_dropped_and_the_null_slot_keeps_nothing():
    state = draw(3, HEADS, VALUES, KEYS, seed=1)
    before = state.clone()
    tensors = [draw(5, HEADS, n, seed=i) for i, n in enumerate((KEYS, KEYS, VALUES, KEYS))]
    out = kda_context_parallel(
        *tensors, draw(5, HEADS, seed=9), params=params_of(-5.0), state=state,
        slots=torch.tensor([-1, 0], dtype=torch.int32), cu_seqlens=offsets([2, 3]), scale=1.0, group=LOCAL,
    )  # fmt: skip
    assert out[:2].eq(0).all()
    assert not out[2:].eq(0).all()
    assert state.equal(before)


def test_what_does_not_fit_is_refused_before_anything_is_sent():
    tensors = [draw(5, HEADS, n, seed=i) for i, n in enumerate((KEYS, KEYS, VALUES, KEYS))]
    facts = {"params": params_of(-5.0), "scale": 1.0, "group": LOCAL, "slots": torch.tensor([1], dtype=torch.int32)}
    state = torch.zeros(2, HEADS, KEYS, VALUES)
    with pytest.raises(ConfigError, match=r"state has rows \(2, 8, 6\), expected \[H, V, K\] = \(2, 6, 8\)"):
        kda_context_parallel(*tensors, draw(5, HEADS), state=state, cu_seqlens=offsets([5]), **facts)
    with pytest.raises(ConfigError, match="cu_seqlens must rise from 0"):
        kda_context_parallel(*tensors, draw(5, HEADS), state=state, cu_seqlens=offsets([4]), **facts)
    with pytest.raises(ConfigError, match="rank=2 is not one of size=2 ranks"):
        split_tokens([5], 2, 2)


# ---- a whole model


@pytest.fixture(scope="module")
def model():
    config = tiny_config(
        num_hidden_layers=5, kda_layers=[1, 2, 4], full_attn_layers=[3, 5], attn_res_block_size=2, num_experts=8,
        num_experts_per_token=2,
    )  # fmt: skip
    return seed_weights(KimiK3ForCausalLM(config, dtype=torch.float32)).requires_grad_(requires_grad=False)


def built(model, mesh):
    """The same weights, on a mesh."""
    copy = KimiK3ForCausalLM(model.config, mesh=mesh, dtype=torch.float32)
    copy.load_state_dict(model.state_dict())
    return copy


def contents(pools, model, tables, totals, page):
    """Everything that requests 1, 2, … have in the pools."""
    found = {}
    for layer, kind in enumerate(model.config.text.layer_types):
        view = pools.view(layer)
        if kind == "kda":
            found[f"state {layer}"], found[f"window {layer}"] = view.state[1:3], view.conv[1:3]
            continue
        for i, (table, total) in enumerate(zip(tables, totals, strict=True)):
            found[f"rows {layer} of {i}"] = view.pages[table].flatten(0, 1)[:total]
    return found


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_prefill_of_a_model_split_over_ranks_equals_the_whole(size, model):
    """Two chunks of prompts, the second over cached prefixes and shorter than the ranks; then any rank decodes."""
    page, tables = 4, [list(range(1, 12)), list(range(12, 18))]
    steps = [(37, 5), (3, 9), (1, 1)]
    ids = [torch.arange(41) * 7 % 512, torch.arange(15) * 13 % 512]
    sizes = CacheConfig(num_pages=20, num_slots=2, page_size=page)

    def serve(model, group):
        pools = HybridPool(model.config.text, sizes, dtype=torch.float32, device="cpu")
        cached, logits = [0, 0], []
        for step, lengths in enumerate(steps):
            new = [x[c : c + n] for x, c, n in zip(ids, cached, lengths, strict=True)]
            facts = {"slots": [1, 2], "page_tables": tables, "page_size": page, "cached_tokens": cached}
            if group is not None and step < 2:
                logits.append(prefill_split(lambda b: model(b, pools, logits="last"), new, group, chunk=4, **facts))
            else:
                mode = "prefill" if step < 2 else "decode"
                batch = Batch.of(lengths, mode=mode, input_ids=torch.cat(new), **facts)
                logits.append(model(batch, pools, logits="last"))
            cached = [c + n for c, n in zip(cached, lengths, strict=True)]
        return logits, contents(pools, model, tables, cached, page)

    with torch.no_grad():
        want, held = serve(model, None)
    for rank, (got, mine) in enumerate(Ranks(size).run(lambda group: serve(built(model, Mesh(cp=group)), group))):
        for step, (one, other) in enumerate(zip(want, got, strict=True)):
            assert_close(f"rank {rank}, step {step}", one, other, 1e-4)
            assert other.argmax(-1).equal(one.argmax(-1))
        for name in held:
            assert_close(f"rank {rank}, {name}", held[name], mine[name], 1e-4)


def test_a_batch_that_is_split_otherwise_than_the_model_is_refused(model):
    ids, facts = [torch.arange(9)], {"slots": [1], "page_tables": [[1, 2, 3]], "page_size": 4}
    view = RankView(0, 2)
    pools = HybridPool(model.config.text, CacheConfig(num_pages=4, num_slots=1), dtype=torch.float32, device="cpu")
    with pytest.raises(ConfigError, match="split over 2 ranks, the layer over 1: build the model on a mesh with cp"):
        prefill_split(lambda batch: model(batch, pools, logits="last"), ids, view, **facts)
    layer = GatedMLA(model.config.text.mla, cp=view, dtype=torch.float32)
    batch = Batch.lengths([2])
    batch.split_over = 2
    with pytest.raises(ConfigError, match="split over 2 ranks needs pages"):
        layer(draw(2, 96), batch)
    tensors = [x[:0] for x in inputs_of(1)]
    with pytest.raises(ConfigError, match="leave the state behind all of them, no other"):
        kda_mixer_context_parallel(
            *tensors, params=params_of(-5.0), conv_weight=None, norm_weight=None, norm_eps=1e-5, scale=1.0,
            cu_seqlens=offsets([0]), saves=StateSaves((), (), torch.zeros(0, dtype=torch.int32)), group=view,
        )  # fmt: skip
