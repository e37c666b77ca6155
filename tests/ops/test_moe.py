"""Routing and routed experts: golden vectors, a dense second formulation, packed formats, ranks.

Shapes: T packed tokens, D hidden size, L width of an expert, I intermediate width, E experts, k experts a token.
"""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3lib.config import SiTU
from k3lib.errors import ConfigError
from k3lib.ops import (
    ExpertsSpec,
    ExpertWeights,
    RouteSpec,
    experts,
    implementations,
    rms_norm,
    route,
    situ_and_mul,
)
from k3lib.ops.moe import needs_resident
from k3lib.ops.quant import mxfp4_decode, mxfp4_encode, nvfp4_decode, nvfp4_encode
from k3lib.testing import assert_close, skip_unless_able, tolerance

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
SITU = SiTU(beta=4.0, linear_beta=25.0)
every_router = pytest.mark.parametrize("impl", implementations(route), ids=str)
every_runner = pytest.mark.parametrize("impl", implementations(experts), ids=str)


def draw(*shape, seed=0, dtype=F32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


# ---- route --------------------------------------------------------------------------------------


def routing(op, x, weight, bias, *, top_k=4, renormalize=True, scale=1.0, **groups):
    return op(x, weight, bias, top_k=top_k, renormalize=renormalize, scale=scale, **groups)


def by_hand(x, weight, bias, *, top_k, renormalize, scale, num_groups=1, top_groups=1):
    """fp64, one token after the other, with sorted Python lists."""
    scores = torch.sigmoid(x.double() @ weight.double().T)
    all_ids, all_weights = [], []
    for row, biased in zip(scores.tolist(), (scores + bias.double()).tolist(), strict=True):
        size = len(row) // num_groups
        groups = [biased[g * size : (g + 1) * size] for g in range(num_groups)]
        best = sorted(range(num_groups), key=lambda g: -sum(sorted(groups[g])[-2:]))[:top_groups]
        candidates = [e for e in range(len(row)) if e // size in best]
        ids = sorted(candidates, key=lambda e: (-biased[e], e))[:top_k]
        total = sum(row[e] for e in ids) + 1e-20 if renormalize and top_k > 1 else 1.0
        all_ids.append(ids)
        all_weights.append([row[e] / total * scale for e in ids])
    return torch.tensor(all_ids), torch.tensor(all_weights, dtype=F64)


def by_id(routed):
    ids, order = routed[0].long().cpu().sort(-1)
    return ids, routed[1].cpu().gather(1, order)


def assert_same_routing(want, got):
    (want_ids, want_weights), (ids, weights) = by_id(want), by_id(got)
    assert ids.equal(want_ids)
    assert_close("weights", want_weights, weights, tolerance("route", F32))


MOE_CASES = ["k3_like", "one_token", "grouped", "no_renorm_no_latent_norm", "bf16"]


def golden_moe(vectors, name):
    config = vectors.fact(f"{name}.config")
    return vectors.case(name), config if isinstance(config, dict) else json.loads(config)


@pytest.mark.parametrize("name", MOE_CASES)
@every_router
def test_route_reproduces_golden_vectors(impl, name, load_golden, device):
    vectors = load_golden("latent_moe")
    case, config = golden_moe(vectors, name)
    arguments = [case[key].to(device) for key in ("x", "w.gate.weight", "w.gate.e_score_correction_bias")]
    options = {
        "top_k": config["num_experts_per_token"],
        "num_groups": config["num_expert_group"],
        "top_groups": config["topk_group"],
        "renormalize": config["moe_renormalize"],
        "scale": config["routed_scaling_factor"],
    }
    skip_unless_able(impl, RouteSpec.of(*arguments, **options))
    ids, weights = by_id(impl.run(*arguments, **options))
    assert ids.equal(case["out.topk_ids"])
    vectors.check(name, "topk_weights", weights, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("renormalize", [True, False])
@every_router
def test_scale_applies_with_and_without_renormalisation(impl, renormalize, scale, device):
    x, weight, bias = draw(64, 24), draw(32, 24, seed=1) * 0.3, draw(32, seed=2)
    options = {"top_k": 4, "renormalize": renormalize, "scale": scale}
    skip_unless_able(impl, RouteSpec.of(x, weight, bias, **options))
    got = impl.run(x.to(device), weight.to(device), bias.to(device), **options)
    assert (got.ids.dtype, got.weights.dtype) == (torch.int32, F32)
    assert_same_routing(by_hand(x, weight, bias, **options), got)


@every_router
def test_one_expert_a_token_is_not_renormalised(impl, device):
    x, weight, bias = draw(8, 24), draw(32, 24, seed=1) * 0.3, draw(32, seed=2)
    options = {"top_k": 1, "renormalize": True, "scale": 1.0}
    skip_unless_able(impl, RouteSpec.of(x, weight, bias, **options))
    got = impl.run(x.to(device), weight.to(device), bias.to(device), **options)
    assert_same_routing(by_hand(x, weight, bias, **options), got)
    assert got.weights.max() < 1


@pytest.mark.parametrize("bias_dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("mean", [0.0, 8.0])
@every_router
def test_bias_differences_of_a_thousandth_decide(impl, mean, bias_dtype, device):
    x, weight = draw(64, 24, dtype=BF16), draw(32, 24, seed=1, dtype=BF16) * 1e-3
    bias = (mean + 1e-3 * torch.randperm(32, generator=torch.Generator().manual_seed(3))).to(bias_dtype)
    options = {"top_k": 4, "renormalize": True, "scale": 1.0}
    skip_unless_able(impl, RouteSpec.of(x, weight, bias, **options))
    ids, weights = impl.run(x.to(device), weight.to(device), bias.to(device), **options)
    scores = torch.sigmoid(x.double() @ weight.double().T)
    biased = scores + bias.double()
    chosen = biased.gather(1, ids.long().cpu())
    # except for ties in fp32, the chosen are the largest of the fp64 sums
    assert (chosen.sort(-1, descending=True).values - biased.topk(4).values).abs().max() < 2e-6 * max(mean, 1)
    want = scores.gather(1, ids.long().cpu())
    assert_close("weights", want / want.sum(-1, keepdim=True), weights, tolerance("route", F32))


def test_bias_does_not_enter_the_weights():
    x, weight = draw(6, 8), draw(4, 8, seed=1)
    even = routing(route, x, weight, torch.zeros(4), renormalize=False)
    moved = routing(route, x, weight, torch.tensor([5.0, -3.0, 100.0, 0.0]), renormalize=False)
    assert_same_routing(even, moved)


@every_router
def test_ties_go_to_the_lowest_id(impl, device):
    x, weight, bias = torch.zeros(3, 8), draw(16, 8), torch.zeros(16)
    bias[9] = 1
    skip_unless_able(impl, routing(RouteSpec.of, x, weight, bias))
    ids, _ = routing(impl.run, x.to(device), weight.to(device), bias.to(device))
    assert by_id((ids, ids))[0].tolist() == [[0, 1, 2, 9]] * 3


@pytest.mark.parametrize("shift", [0.0, -5.0], ids=["positive", "negative"])
@every_router
def test_only_the_best_groups_take_part(impl, shift, device):
    x, weight, bias = draw(40, 24), draw(16, 24, seed=1), draw(16, seed=2) * 0.2 + shift
    options = {"top_k": 4, "renormalize": True, "scale": 2.5, "num_groups": 4, "top_groups": 2}
    skip_unless_able(impl, RouteSpec.of(x, weight, bias, **options))
    got = impl.run(x.to(device), weight.to(device), bias.to(device), **options)
    assert_same_routing(by_hand(x, weight, bias, **options), got)
    assert all(len(set((row // 4).tolist())) <= 2 for row in got.ids)


@every_router
def test_replay_weighs_the_given_experts(impl, device):
    x, weight, bias = draw(6, 8), draw(8, 8, seed=1), draw(8, seed=2)
    ids = torch.tensor([[7, 0, 3], [1, 2, 3], [6, 5, 4], [0, 7, 1], [2, 4, 6], [3, 1, 0]], dtype=torch.int32)
    options = {"top_k": 3, "renormalize": True, "scale": 2.0}
    skip_unless_able(impl, RouteSpec.of(x, weight, bias, **options, ids=ids))
    got = impl.run(x.to(device), weight.to(device), bias.to(device), **options, ids=ids.to(device))
    assert got.ids.cpu().equal(ids)
    scores = torch.sigmoid(x.double() @ weight.double().T).gather(1, ids.long())
    assert_close("weights", 2 * scores / scores.sum(-1, keepdim=True), got.weights, tolerance("route", F32))


@every_router
def test_replay_of_the_own_choice_changes_nothing(impl, device):
    x, weight, bias = draw(6, 8).to(device), draw(8, 8, seed=1).to(device), draw(8, seed=2).to(device)
    skip_unless_able(impl, routing(RouteSpec.of, x, weight, bias))
    first = routing(impl.run, x, weight, bias)
    again = routing(impl.run, x, weight, bias, ids=first.ids)
    assert again.ids.equal(first.ids)
    assert_close("weights", first.weights, again.weights, tolerance("route", F32))


@every_router
def test_far_logits_give_finite_weights(impl, device):
    x, weight, bias = torch.full((2, 8), 1e3), -torch.ones(8, 8), torch.zeros(8)
    skip_unless_able(impl, routing(RouteSpec.of, x, weight, bias))
    assert routing(impl.run, x.to(device), weight.to(device), bias.to(device)).weights.isfinite().all()


def test_route_refuses_shapes_that_do_not_fit():
    with pytest.raises(ConfigError, match=r"route: x \(2, 7\), weight \(4, 8\)"):
        routing(route, draw(2, 7), draw(4, 8), torch.zeros(4), top_k=2)
    with pytest.raises(ConfigError, match=r"bias \(3,\)"):
        routing(route, draw(2, 8), draw(4, 8), torch.zeros(3), top_k=2)


@pytest.mark.parametrize("renormalize", [True, False])
def test_route_gradients_are_right(renormalize):
    x, weight = draw(3, 4, dtype=F64).requires_grad_(), draw(6, 4, seed=1, dtype=F64).requires_grad_()
    ids = torch.tensor([[0, 3], [5, 1], [2, 4]], dtype=torch.int32)

    def call(x, weight):
        return routing(route, x, weight, torch.zeros(6, dtype=F64), top_k=2, renormalize=renormalize, ids=ids).weights

    assert torch.autograd.gradcheck(call, [x, weight])


# ---- experts ------------------------------------------------------------------------------------


def plain_experts(*, num=8, width=12, intermediate=10, dtype=F32, first=0):
    w13 = draw(num, 2 * intermediate, width, seed=1) * width**-0.5
    w2 = draw(num, width, intermediate, seed=2) * intermediate**-0.5
    return ExpertWeights(w13=w13.to(dtype), w2=w2.to(dtype), first_expert=first)


def routes(tokens, top_k, num, seed=3):
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(num, generator=g)[:top_k] for _ in range(tokens)] or [torch.zeros(top_k)])[
        :tokens
    ]
    return ids.to(torch.int32), torch.rand(tokens, top_k, generator=g)


def dense(x, ids, weights, w13, w2, *, first=0, act=SITU):
    """Every expert on every token, weighted by a matrix that is zero for the others, in fp64."""
    x, w13, w2 = x.double(), w13.double(), w2.double()
    share = torch.zeros(x.shape[0], len(w13), dtype=F64)
    for e in range(len(w13)):
        share[:, e] = (weights.double() * (ids == first + e)).sum(-1)
    gate, up = torch.einsum("efl,tl->tef", w13, x).chunk(2, -1)
    if act.linear_beta is not None:
        up = act.linear_beta * torch.tanh(up / act.linear_beta)
    hidden = act.beta * torch.tanh(gate / act.beta) * torch.sigmoid(gate) * up
    return torch.einsum("te,tef,elf->tl", share, hidden, w2)


def able(impl, x, ids, weights, prepared, act_fn=SITU):
    skip_unless_able(impl, ExpertsSpec.of(x, ids, weights, prepared, act_fn=act_fn))
    made = impl.prepare(prepared) if impl.prepare else prepared
    return impl.run(x, ids, weights, made, act_fn=act_fn)


SIZES = [(1, 4), (16, 4), (17, 4), (40, 2), (3, 8)]  # 64 routes are the most that the reference gathers


@pytest.mark.parametrize("act", [SITU, SiTU(beta=1.0, linear_beta=None)], ids=str)
@pytest.mark.parametrize(("tokens", "top_k"), SIZES)
@every_runner
def test_experts_match_the_dense_form(impl, tokens, top_k, act):
    x, prepared = draw(tokens, 12), plain_experts()
    ids, weights = routes(tokens, top_k, 8)
    want = dense(x, ids, weights, prepared.w13, prepared.w2, act=act)
    assert_close("out", want, able(impl, x, ids, weights, prepared, act), tolerance("experts", F32))


@pytest.mark.parametrize(("tokens", "top_k"), SIZES)
@every_runner
def test_bf16_experts_lose_only_roundings(impl, tokens, top_k):
    x, prepared = draw(tokens, 12, dtype=BF16), plain_experts(dtype=BF16)
    ids, weights = routes(tokens, top_k, 8)
    out = able(impl, x, ids, weights, prepared)
    assert out.dtype == BF16
    assert_close("out", dense(x, ids, weights, prepared.w13, prepared.w2), out, tolerance("experts", BF16))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_tokens_alone_and_together_agree(dtype):
    """Few routes and many may take other paths."""
    x, prepared = draw(40, 12, dtype=dtype), plain_experts(dtype=dtype)
    ids, weights = routes(40, 4, 8)
    ids[:, 1] = 99
    together = experts(x, ids, weights, prepared, act_fn=SITU)
    pieces = [x.split(1), ids.split(1), weights.split(1)]
    alone = torch.cat([experts(*piece, prepared, act_fn=SITU) for piece in zip(*pieces, strict=True)])
    assert_close("out", together, alone, tolerance("experts", dtype))


@pytest.mark.parametrize("tokens", [5, 40])
@every_runner
def test_foreign_experts_contribute_nothing(impl, tokens):
    x, prepared = draw(tokens, 12), plain_experts(first=16)
    ids, weights = routes(tokens, 4, 8)
    assert able(impl, x, ids, weights, prepared).eq(0).all()
    assert able(impl, x, ids - 100, weights, prepared).eq(0).all()
    assert able(impl, x, ids + 24, weights, prepared).eq(0).all()
    assert able(impl, x, torch.full_like(ids, -1), weights, prepared).eq(0).all()


@pytest.mark.parametrize("tokens", [5, 40])
@every_runner
def test_ranks_add_up_to_the_whole(impl, tokens):
    x, whole = draw(tokens, 12), plain_experts()
    ids, weights = routes(tokens, 4, 8)
    parts = [ExpertWeights(w13=whole.w13[a:b], w2=whole.w2[a:b], first_expert=a) for a, b in [(0, 3), (3, 8)]]
    got = sum(able(impl, x, ids, weights, part) for part in parts)
    assert_close("out", dense(x, ids, weights, whole.w13, whole.w2), got, tolerance("experts", F32))


@every_runner
@pytest.mark.parametrize("tokens", [1, 3])
def test_one_expert_chosen_twice_counts_twice(impl, tokens):
    x, prepared = draw(tokens, 12), plain_experts()
    ids = torch.tensor([[5, 1, 5]] * tokens, dtype=torch.int32)
    weights = torch.tensor([[0.25, 0.125, 0.5]] * tokens)
    want = dense(x, ids, weights, prepared.w13, prepared.w2)
    assert_close("out", want, able(impl, x, ids, weights, prepared), tolerance("experts", F32))


def packed_experts(kind, *, first=0):
    """Experts in a packed format, and their decoded matrices."""
    plain = plain_experts(width=64, intermediate=32)
    if kind == "mxfp4":
        (w13, s13), (w2, s2) = mxfp4_encode(plain.w13), mxfp4_encode(plain.w2)
        made = ExpertWeights(w13=w13, w2=w2, w13_scale=s13, w2_scale=s2, format="mxfp4", first_expert=first)
        return made, mxfp4_decode(w13, s13, F32), mxfp4_decode(w2, s2, F32)
    w13, s13, g13 = (torch.stack(x) for x in zip(*(nvfp4_encode(w) for w in plain.w13), strict=True))
    w2, s2, g2 = (torch.stack(x) for x in zip(*(nvfp4_encode(w) for w in plain.w2), strict=True))
    made = ExpertWeights(
        w13=w13, w2=w2, w13_scale=s13, w2_scale=s2, w13_scale_2=g13.view(-1), w2_scale_2=g2.view(-1), format="nvfp4",
        first_expert=first,
    )  # fmt: skip
    decoded = [
        torch.stack([nvfp4_decode(p, s, g, F32) for p, s, g in zip(*parts, strict=True)])
        for parts in ((w13, s13, g13), (w2, s2, g2))
    ]
    return made, *decoded


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
@every_runner
def test_packed_experts_equal_decoded_ones(impl, kind, tokens, dtype):
    prepared, w13, w2 = packed_experts(kind, first=2)
    x = draw(tokens, 64, dtype=dtype)
    ids, weights = routes(tokens, 4, 12)
    want = dense(x, ids, weights, w13, w2, first=2)
    assert_close("out", want, able(impl, x, ids, weights, prepared), tolerance("experts", dtype))


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_kept_decoded_experts_follow_every_change(kind, tokens):
    prepared, other = packed_experts(kind)[0], packed_experts(kind)[0]
    x, (ids, weights) = draw(tokens, 64), routes(tokens, 4, 8)
    before = experts(x, ids, weights, prepared, act_fn=SITU)
    other.w13[:, :, 0] ^= 0x11

    def changed():
        return experts(x, ids, weights, prepared, act_fn=SITU), experts(x, ids, weights, other, act_fn=SITU)

    prepared.w13.copy_(other.w13)  # written
    got, want = changed()
    assert got.equal(want)
    assert not got.equal(before)
    prepared.w2 = other.w2 = other.w2.flip(0)  # replaced
    got, want = changed()
    assert got.equal(want)
    prepared.first_expert = other.first_expert = -1  # the same matrices under other numbers
    got, want = changed()
    assert got.equal(want)
    assert not got.equal(before)


@pytest.mark.parametrize(("width", "intermediate", "times"), [(64, 32, 1), (512, 352, 3)], ids=["small", "large"])
def test_small_packed_experts_are_decoded_once(width, intermediate, times, monkeypatch):
    """16 MiB of fp32 matrices a layer are kept; those of the larger ones would be 16.5 MiB."""
    plain = plain_experts(width=width, intermediate=intermediate)
    (w13, s13), (w2, s2) = mxfp4_encode(plain.w13), mxfp4_encode(plain.w2)
    prepared = ExpertWeights(w13=w13, w2=w2, w13_scale=s13, w2_scale=s2, format="mxfp4")
    asked, decode = [], ExpertWeights.decode
    monkeypatch.setattr(ExpertWeights, "decode", lambda self, *args: asked.append(self.format) or decode(self, *args))
    x, (ids, weights) = draw(1, width), routes(1, 4, 8)
    outs = [experts(x, ids, weights, prepared, act_fn=SITU) for _ in range(3)]
    assert asked.count("mxfp4") == times
    assert outs[0].equal(outs[2])
    want = dense(x, ids, weights, mxfp4_decode(w13, s13, F32), mxfp4_decode(w2, s2, F32))
    assert_close("out", want, outs[0], tolerance("experts", F32))


def test_packed_experts_made_in_inference_mode_are_not_kept():
    """Torch does not count writes to such tensors."""
    with torch.inference_mode():
        prepared = packed_experts("mxfp4")[0]
        x, (ids, weights) = draw(1, 64), routes(1, 4, 8)
        before = experts(x, ids, weights, prepared, act_fn=SITU)
        prepared.w2.zero_()
        assert experts(x, ids, weights, prepared, act_fn=SITU).eq(0).all()
        assert not before.eq(0).all()


@pytest.mark.parametrize("kind", ["bf16", "mxfp4", "nvfp4"])
def test_expert_weights_know_their_sizes(kind):
    prepared = plain_experts(width=64, intermediate=32) if kind == "bf16" else packed_experts(kind)[0]
    assert (prepared.num_experts, prepared.width, prepared.intermediate) == (8, 64, 32)


@every_runner
def test_experts_are_bitwise_repeatable(impl):
    x, prepared = draw(40, 12), plain_experts()
    ids, weights = routes(40, 4, 8)
    first = able(impl, x, ids, weights, prepared)
    assert all(able(impl, x, ids, weights, prepared).equal(first) for _ in range(5))


def test_experts_refuse_shapes_that_do_not_fit():
    prepared = plain_experts()
    ids, weights = routes(3, 2, 8)
    for x, w in ((draw(3, 11), weights), (draw(2, 12), weights), (draw(3, 12), weights[:, :1])):
        with pytest.raises(ConfigError, match="do not fit experts of width 12"):
            experts(x, ids, w, prepared, act_fn=SITU)


class OneByOne:
    """A store of ours that hands out experts of `whole`, and remembers what was asked for."""

    offloaded = True

    def __init__(self, whole):
        self.whole, self.asked = whole, []

    def __getattr__(self, name):
        return getattr(self.whole, name)

    def decode(self, which, dtype):
        self.asked.append(which if isinstance(which, int) else which.tolist())
        return self.whole.decode(which, dtype)


@pytest.mark.parametrize("tokens", [1, 5, 40])
@every_runner
def test_a_store_gives_the_bits_of_the_stacks(impl, tokens):
    x, whole = draw(tokens, 12), plain_experts(first=2)
    ids, weights = routes(tokens, 4, 8)
    store = OneByOne(whole)
    got = able(impl, x, ids, weights, store)
    assert got.equal(able(impl, x, ids, weights, whole))
    asked = {e for which in store.asked for e in ([which] if isinstance(which, int) else which)}
    assert asked == {int(e) - 2 for e in ids.unique() if e >= 2}


@every_runner
def test_large_experts_are_decoded_one_by_one(impl):
    """Decoded matrices of all routes together would be 24 MiB here."""
    store = OneByOne(plain_experts(width=512, intermediate=512))
    ids, weights = routes(2, 4, 8)
    able(impl, draw(2, 512), ids, weights, store)
    assert store.asked == ids.unique().tolist()


def test_the_spec_of_a_store_says_so():
    x, (ids, weights), whole = draw(3, 12), routes(3, 2, 8), plain_experts()
    specs = [ExpertsSpec.of(x, ids, weights, each, act_fn=SITU) for each in (whole, OneByOne(whole))]
    assert [spec.offloaded for spec in specs] == [False, True]
    assert needs_resident(specs[0]) is None
    assert needs_resident(specs[1]).startswith("needs all experts resident, got ")


@pytest.mark.parametrize("kind", ["bf16", "mxfp4", "nvfp4"])
def test_one_expert_of_a_stack(kind):
    whole = plain_experts(width=64, intermediate=32, first=3) if kind == "bf16" else packed_experts(kind, first=3)[0]
    one = whole.expert(5)
    assert (one.num_experts, one.first_expert, one.format) == (1, 8, kind)
    assert all(a.equal(b) for a, b in zip(one.decode(0, F32), whole.decode(5, F32), strict=True))


@given(tokens=st.integers(0, 30), top_k=st.integers(1, 5), seed=st.integers(0, 2**16))
def test_any_routing_matches_the_dense_form(tokens, top_k, seed):
    g = torch.Generator().manual_seed(seed)
    prepared = plain_experts(num=5, width=6, intermediate=4, first=2)
    ids = torch.randint(-2, 12, (tokens, top_k), generator=g, dtype=torch.int32)
    x, weights = torch.randn(tokens, 6, generator=g), torch.rand(tokens, top_k, generator=g)
    want = dense(x, ids, weights, prepared.w13, prepared.w2, first=2)
    assert_close("out", want, experts(x, ids, weights, prepared, act_fn=SITU), tolerance("experts", F32))


def test_experts_gradients_are_right():
    plain = plain_experts(num=3, width=3, intermediate=2, dtype=F64)
    ids, weights = routes(4, 2, 3)
    ids[0, 0] = 7

    def call(x, weights, w13, w2):
        return experts(x, ids, weights, ExpertWeights(w13=w13, w2=w2), act_fn=SITU)

    leaves = [t.double().requires_grad_() for t in (draw(4, 3), weights, plain.w13, plain.w2)]
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


def golden_layer(case, config, op):
    """The layer of the golden documents from ops: the routed sum, the input of the up projection, the result."""
    w = {key[2:]: x for key, x in case.items() if key.startswith("w.")}
    num = config["num_experts"]
    w13 = torch.stack([torch.cat([w[f"experts.{e}.w1.weight"], w[f"experts.{e}.w3.weight"]]) for e in range(num)])
    prepared = ExpertWeights(w13=w13, w2=torch.stack([w[f"experts.{e}.w2.weight"] for e in range(num)]))
    act = SiTU(beta=config["activation_situ_beta"], linear_beta=config["activation_situ_linear_beta"])
    x = case["x"]
    ids, weights = case["out.topk_ids"].to(torch.int32), case["out.topk_weights"]
    latent = able(op, x @ w["routed_expert_down_proj.weight"].T, ids, weights, prepared, act)
    normed = latent
    if config["latent_moe_use_norm"]:
        normed = rms_norm(latent, w["routed_expert_norm.weight"], eps=config["rms_norm_eps"])
    routed = normed @ w["routed_expert_up_proj.weight"].T
    both = torch.cat([x @ w[f"shared_experts.{name}_proj.weight"].T for name in ("gate", "up")], -1)
    hidden = situ_and_mul(both, beta=act.beta, linear_beta=act.linear_beta)
    shared = hidden @ w["shared_experts.down_proj.weight"].T
    return {"latent_sum": latent, "latent_in_up": normed, "routed": routed, "shared": shared, "y": routed + shared}


@pytest.mark.parametrize("name", [name for name in MOE_CASES if name != "bf16"])
@every_runner
def test_routed_sum_reproduces_golden_vectors(impl, name, load_golden):
    vectors = load_golden("latent_moe")
    case, config = golden_moe(vectors, name)
    for result, got in golden_layer(case, config, impl).items():
        if f"{name}.out64.{result}" in vectors.tensors:
            vectors.check(name, result, got, atol=1e-4)


@every_runner
def test_bf16_routed_sum_is_as_near_as_the_official_one(impl, load_golden):
    vectors = load_golden("latent_moe")
    case, config = golden_moe(vectors, "bf16")
    for result, got in golden_layer(case, config, impl).items():
        want = case[f"out64.{result}"]
        official, ours = ((x.double() - want).abs() for x in (case[f"out.{result}"], got))
        assert ours.max() <= 2 * official.max(), result
        assert ours.mean() <= 2 * official.mean(), result
