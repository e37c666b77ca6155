"""The latent mixture of experts: golden vectors and intermediates, dtypes, recorded routes, ranks, gradients."""

import pytest
import torch
from seeded import Ranks, draw, seed_weights

from k3lib.batch import RouteTap
from k3lib.config import KimiK3Config, LatentMoEConfig, SiTU
from k3lib.errors import ConfigError
from k3lib.layers import LatentMoE
from k3lib.ops import ExpertWeights, quant
from k3lib.parallel import RankView
from k3lib.testing import assert_close, tolerance

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
CASES = ["k3_like", "one_token", "grouped", "no_renorm_no_latent_norm"]
COMBINATIONS = [(True, 1.0), (True, 2.5), (False, 1.0), (False, 2.5)]


def config(**changes):
    facts = {
        "hidden_size": 48, "latent_size": 32, "intermediate_size": 32, "num_experts": 8, "top_k": 3,
        "num_shared_experts": 2, "renormalize": True, "latent_norm": True, "act": SiTU(beta=4.0, linear_beta=25.0),
    }  # fmt: skip
    return LatentMoEConfig(**(facts | changes))


def layer_of(cfg, dtype=F32, seed=0):
    return seed_weights(LatentMoE(cfg, dtype=dtype), seed).requires_grad_(requires_grad=False)


def stack(weights):
    """Stored names of single experts as the layer's stacked `w13` and `w2`."""
    weights = dict(weights)
    count = sum(name.endswith(".w1.weight") for name in weights)
    gate, down, up = (
        torch.stack([weights.pop(f"experts.{e}.{w}.weight") for e in range(count)]) for w in ("w1", "w2", "w3")
    )
    return weights | {"experts.w13": torch.cat([gate, up], dim=1), "experts.w2": down}


def golden_layer(vectors, name):
    cfg = KimiK3Config.from_hf(vectors.fact(f"{name}.config")).text.moe
    case = vectors.case(name)
    layer = LatentMoE(cfg, dtype=case["x"].dtype)
    weights = stack({key.removeprefix("w."): x for key, x in case.items() if key.startswith("w.")})
    if not cfg.latent_norm:
        weights.pop("routed_expert_norm.weight", None)
    layer.load_state_dict(weights, strict=True)
    return layer.requires_grad_(requires_grad=False), case["x"]


def run_hooked(layer, x):
    """Outputs of the submodules by their golden names, and the routing."""
    seen = {}

    def keep(name, module, pick=lambda inputs, output: output):
        module.register_forward_hook(lambda _, inputs, output: seen.update({name: pick(inputs, output)}))

    keep("routing", layer.gate)
    keep("latent_sum", layer.experts)
    keep("latent_in_up", layer.routed_expert_up_proj, lambda inputs, _: inputs[0])
    keep("routed", layer.routed_expert_up_proj)
    keep("shared", layer.shared_experts)
    seen["y"] = layer(x)
    return seen


@pytest.mark.parametrize("name", CASES)
def test_golden_vectors(name, load_golden):
    vectors = load_golden("latent_moe")
    layer, x = golden_layer(vectors, name)
    seen = run_hooked(layer, x)
    routing = seen.pop("routing")
    order = routing.ids.argsort(dim=-1)
    assert torch.equal(routing.ids.gather(1, order).long(), vectors.tensors[f"{name}.out.topk_ids"])
    vectors.check(name, "topk_weights", routing.weights.gather(1, order), atol=1e-4)
    for result, got in seen.items():
        if f"{name}.out64.{result}" in vectors.tensors:
            vectors.check(name, result, got, atol=1e-4)


def test_bf16_is_no_worse_than_twice_the_official_error(load_golden):
    vectors = load_golden("latent_moe")
    layer, x = golden_layer(vectors, "bf16")
    seen = run_hooked(layer, x)
    routing = seen.pop("routing")
    assert torch.equal(routing.ids.sort(dim=-1).values.long(), vectors.tensors["bf16.out.topk_ids"])
    assert routing.weights.dtype == F32
    for result, got in seen.items():
        assert got.dtype == BF16, result
        want, official = (vectors.tensors[f"bf16.{out}.{result}"].double() for out in ("out64", "out"))
        error, allowed = (got.double() - want).abs(), 2 * (official - want).abs()
        assert error.max() <= allowed.max(), result
        assert error.mean() <= allowed.mean(), result


@pytest.mark.parametrize(("renormalize", "scale"), COMBINATIONS)
def test_scaling_applies_with_and_without_renormalisation(renormalize, scale):
    layer = layer_of(config(renormalize=renormalize, routed_scale=scale))
    x = draw(64, 48)
    ids, weights = layer.gate(x)[:2]
    want = (x.double() @ layer.gate.weight.double().T).sigmoid().gather(1, ids.long())
    if renormalize:
        want = want / (want.sum(-1, keepdim=True) + 1e-20)
    assert_close("weights", want * scale, weights, tolerance("route", F32))


def test_layer_equals_a_loop_over_tokens_and_experts():
    layer = layer_of(config(num_groups=4, top_groups=2, routed_scale=1.5))
    x, c = draw(11, 48, dtype=F64), layer.config
    wide = layer_of(c, F64)
    want = []
    for token in x:
        scores = (wide.gate.weight @ token).sigmoid()
        biased = scores + wide.gate.e_score_correction_bias
        groups = biased.view(4, 2).sum(-1).topk(2).indices
        allowed = [e for e in range(8) if e // 2 in groups]
        ids = sorted(allowed, key=lambda e: -float(biased[e]))[:3]
        latent = wide.routed_expert_down_proj.weight @ token
        total = torch.zeros(32, dtype=F64)
        for e in ids:
            gate, up = (wide.experts.w13[e] @ latent).chunk(2)
            inner = 4 * (gate / 4).tanh() * gate.sigmoid() * 25 * (up / 25).tanh()
            total += scores[e] / scores[ids].sum() * 1.5 * (wide.experts.w2[e] @ inner)
        normed = total * (total.square().mean() + 1e-5).rsqrt() * wide.routed_expert_norm.weight
        want.append(wide.routed_expert_up_proj.weight @ normed + wide.shared_experts(token))
    assert_close("out", torch.stack(want), layer(x.float()), tolerance("experts", F32))


@pytest.mark.parametrize(
    "changes",
    [{"latent_size": None, "latent_norm": False}, {"num_shared_experts": 0}, {"latent_norm": False}],
    ids=lambda x: next(iter(x)),
)
def test_optional_parts_have_no_weights_when_absent(changes):
    layer = layer_of(config(**changes))
    names = set(layer.state_dict())
    assert ("routed_expert_down_proj.weight" in names) == (layer.config.latent_size is not None)
    assert ("routed_expert_norm.weight" in names) == layer.config.latent_norm
    assert ("shared_experts.up_proj.weight" in names) == (layer.config.num_shared_experts > 0)
    assert layer(draw(5, 48)).shape == (5, 48)


def test_no_tokens():
    assert layer_of(config())(draw(0, 48)).shape == (0, 48)


def test_tokens_do_not_depend_on_each_other():
    layer = layer_of(config())
    x = draw(9, 48)
    assert_close("alone", layer(x), torch.cat([layer(row[None]) for row in x]), tolerance("experts", F32))


# ---- routes


def test_recorded_routes_replay():
    layer = layer_of(config())
    x = draw(9, 48)
    tap = RouteTap(torch.full((9, 2, 3), -1, dtype=torch.int32), replay=False)
    want = layer(x, routes=tap, moe_layer=1)
    assert (tap.ids[:, 0] == -1).all()
    assert torch.equal(tap.ids[:, 1], layer.gate(x).ids)
    again = layer(x, routes=RouteTap(tap.ids, replay=True), moe_layer=1)
    assert torch.equal(want, again)


def test_replayed_routes_keep_this_layers_scores():
    layer = layer_of(config())
    x = draw(9, 48)
    ids = torch.tensor([[5, 0, 2]] * 9, dtype=torch.int32)
    routing = layer.gate(x, ids)
    scores = (x @ layer.gate.weight.T).sigmoid()[:, [5, 0, 2]]
    assert torch.equal(routing.ids, ids)
    assert_close("weights", scores / scores.sum(-1, keepdim=True), routing.weights, tolerance("route", F32))


def test_the_correction_bias_chooses_and_does_not_weigh():
    layer = layer_of(config())
    x = draw(9, 48)
    layer.gate.e_score_correction_bias[6] = 10
    routing = layer.gate(x)
    assert (routing.ids == 6).any(dim=-1).all()
    assert (routing.weights < 1).all()


# ---- dtypes and packed experts


def test_the_correction_bias_survives_a_narrow_cast():
    layer = layer_of(config())
    bias = layer.gate.e_score_correction_bias.clone()
    layer.to(BF16)
    wide = {name for name, x in layer.named_parameters() if x.dtype == F32}
    assert wide == {"gate.e_score_correction_bias"}
    assert torch.equal(layer.gate.e_score_correction_bias, bias)
    assert {x.dtype for x in layer.double().parameters()} == {F64}


def test_packed_experts_equal_their_decoded_values_and_are_never_cast():
    layer, plain = layer_of(config()), layer_of(config())
    w13, s13 = quant.mxfp4_encode(plain.experts.w13)
    w2, s2 = quant.mxfp4_encode(plain.experts.w2)
    plain.experts.w13.copy_(quant.mxfp4_decode(w13, s13, F32))
    plain.experts.w2.copy_(quant.mxfp4_decode(w2, s2, F32))
    layer.experts.set_packed(ExpertWeights(w13, w2, s13, s2, format="mxfp4"))
    x = draw(9, 48)
    assert_close("out", plain(x), layer(x), tolerance("experts", F32))
    assert not [name for name in layer.state_dict() if name.startswith("experts.")]
    layer.to(BF16)
    assert {layer.experts.packed.w13.dtype, layer.experts.packed.w2_scale.dtype} == {torch.uint8}
    assert_close("bf16", plain.to(BF16)(x.to(BF16)), layer(x.to(BF16)), tolerance("experts", BF16))


# ---- ranks


def rank_layer(full, group):
    """One rank's layer with its part of `full`: w1 and w3 are cut by themselves, then stacked."""
    layer = LatentMoE(full.config, tp=group, dtype=F32)
    weights = full.state_dict()
    begin, end = layer.experts.begin, layer.experts.end
    gate, up = weights["experts.w13"].chunk(2, dim=1)
    weights["experts.w13"] = torch.cat([gate[:, begin:end], up[:, begin:end]], dim=1)
    weights["experts.w2"] = weights["experts.w2"][..., begin:end]
    part = full.config.shared_size // group.size
    shared = slice(group.rank * part, (group.rank + 1) * part)
    for name in ("gate_proj", "up_proj"):
        weights[f"shared_experts.{name}.weight"] = weights[f"shared_experts.{name}.weight"][shared]
    weights["shared_experts.down_proj.weight"] = weights["shared_experts.down_proj.weight"][:, shared]
    layer.load_state_dict(weights, strict=True)
    return layer


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_add_up_to_one(size):
    full = layer_of(config())
    x = draw(13, 48)
    for out in Ranks(size).run(lambda group: rank_layer(full, group)(x)):
        assert_close("out", full(x), out, tolerance("experts", F32))


def test_widths_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match=r"tp_size=3.*intermediate width of the experts"):
        LatentMoE(config(), tp=RankView(0, 3))


# ---- gradients


def test_gradients_reach_every_weight_but_the_bias():
    layer = seed_weights(LatentMoE(config(), dtype=F32))
    x = draw(40, 48).requires_grad_()
    layer(x).square().sum().backward()
    for name, weight in layer.named_parameters():
        if name == "gate.e_score_correction_bias":
            assert weight.grad is None or not weight.grad.any()
        else:
            assert weight.grad.isfinite().all(), name
            assert weight.grad.any(), name
    assert x.grad.any()


def test_gradient_is_the_derivative():
    sizes = {"hidden_size": 5, "latent_size": 4, "intermediate_size": 3, "num_experts": 4, "top_k": 2}
    layer = seed_weights(LatentMoE(config(**sizes), dtype=F64))
    assert torch.autograd.gradcheck(layer, (draw(6, 5, dtype=F64).requires_grad_(),))
