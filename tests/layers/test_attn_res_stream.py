"""The residual streams: golden stack, with and without autograd, cuts between stages, taps, the ordinary residual."""

import math

import pytest
import torch
from seeded import draw, seed_weights
from torch import nn

from k3lib.batch import FeatureTap
from k3lib.layers import AttnRes, AttnResStream, Linear, ResidualStream, RMSNorm, ScoreWeights
from k3lib.testing import assert_close, tolerance

F32, F64 = torch.float32, torch.float64
GRAD = pytest.mark.parametrize("records", [False, True], ids=["inference", "autograd"])


class Sublayers(nn.Module):
    """Layers whose attention and feed-forward part are one matrix each."""

    def __init__(self, layers, width, *, dtype=F32):
        super().__init__()
        for i in range(layers):
            for name in ("self_attention", "mlp"):
                self.add_module(f"{i}_{name}", Linear(width, width, dtype=dtype))
                self._add_reader(f"{i}_{name}", width, dtype)
        self._add_reader("output", width, dtype)

    def _add_reader(self, name, width, dtype):
        self.add_module(f"{name}_score", RMSNorm(width, 1e-5, dtype=dtype))
        self.add_module(f"{name}_proj", Linear(width, 1, dtype=dtype))
        self.add_module(f"{name}_norm", RMSNorm(width, 1e-5, dtype=dtype))

    def reader(self, name):
        return AttnRes(*(self._modules[f"{name}_{part}"] for part in ("score", "proj", "norm")))

    def run(self, stream, layers, block, look=lambda what, value: None):
        for i in layers:
            look("in_attn", stream.mixture(self.reader(f"{i}_self_attention")))
            hidden = stream.read(self.reader(f"{i}_self_attention"), closes_block=i % block == 0)
            stream.add(self._modules[f"{i}_self_attention"](hidden))
            look("in_mlp", stream.mixture(self.reader(f"{i}_mlp")))
            stream.add(self._modules[f"{i}_mlp"](stream.read(self.reader(f"{i}_mlp"))))
            look("prefix", stream.hidden())
        return stream


def golden_stack(vectors, name):
    case = vectors.case(name)
    layers, width = vectors.fact(f"{name}.layers"), case["x"].shape[-1]
    stack = Sublayers(layers, width)

    def fill(module, stored):
        module.weight.data.copy_(case[f"w.{stored}"])

    for i in range(layers):
        for ours, stored, norm in (
            ("self_attention", "attn", "input_layernorm"),
            ("mlp", "mlp", "post_attention_layernorm"),
        ):
            fill(stack._modules[f"{i}_{ours}"], f"layers.{i}.{stored}")
            fill(stack._modules[f"{i}_{ours}_score"], f"layers.{i}.{ours}_res_norm.weight")
            fill(stack._modules[f"{i}_{ours}_proj"], f"layers.{i}.{ours}_res_proj.weight")
            fill(stack._modules[f"{i}_{ours}_norm"], f"layers.{i}.{norm}.weight")
    for part, where in (("score", "output_attn_res_norm"), ("proj", "output_attn_res_proj"), ("norm", "norm")):
        fill(stack._modules[f"output_{part}"], f"{where}.weight")
    return stack, case["x"], layers, vectors.fact(f"{name}.block_size")


@pytest.mark.parametrize("name", ["stack.l9b4", "stack.l5b1"])
@GRAD
def test_golden_stack(name, records, load_golden):
    vectors = load_golden("attn_res")
    stack, x, layers, block = golden_stack(vectors, name)
    seen = {"in_attn": [], "in_mlp": [], "prefix": []}
    with torch.set_grad_enabled(records):
        stream = AttnResStream(x, rows=math.ceil(layers / block))
        stack.run(stream, range(layers), block, lambda what, value: seen[what].append(value.detach().clone()))
        final = stream.mixture(stack.reader("output"))
        blocks = stream.history().clone()
        normed = stream.read(stack.reader("output"))
    for what, values in seen.items():
        vectors.check(name, what, torch.stack(values), atol=5e-5)
    for what, value in (("final", final), ("blocks", blocks), ("normed", normed)):
        vectors.check(name, what, value.detach(), atol=5e-5)


@GRAD
def test_the_embedding_is_not_written(records):
    stack = seed_weights(Sublayers(5, 8))
    x = draw(6, 8)
    before = x.clone()
    with torch.set_grad_enabled(records):
        stack.run(AttnResStream(x, rows=3), range(5), 2)
    assert torch.equal(x, before)


def test_the_first_read_of_an_empty_bank_is_the_norm_of_the_embedding():
    stack = seed_weights(Sublayers(1, 8))
    x = draw(6, 8)
    got = AttnResStream(x, rows=1).read(stack.reader("0_self_attention"), closes_block=True)
    assert_close("read", stack._modules["0_self_attention_norm"](x), got, tolerance("attn_res", F32))


@pytest.mark.parametrize("cut", range(1, 9))
@GRAD
def test_a_cut_hands_over_the_history_and_the_running_sum(cut, records):
    stack = seed_weights(Sublayers(9, 16))
    x = draw(5, 16)
    with torch.set_grad_enabled(records):
        whole = stack.run(AttnResStream(x, rows=3), range(9), 4)
        first = stack.run(AttnResStream(x, rows=math.ceil(cut / 4)), range(cut), 4)
        prefix, bank = first.hidden(), first.history()
        assert bank.shape[1] == math.ceil(cut / 4)
        second = AttnResStream(prefix.clone(), rows=3, bank=bank.clone(), num_blocks=bank.shape[1])
        stack.run(second, range(cut, 9), 4)
        assert torch.equal(whole.hidden(), second.hidden())
        assert torch.equal(whole.history(), second.history())
        reader = stack.reader("output")
        assert torch.equal(whole.read(reader), second.read(reader))


def test_autograd_and_inference_compute_the_same():
    stack = seed_weights(Sublayers(9, 16))
    outs = []
    for records in (False, True):
        with torch.set_grad_enabled(records):
            outs.append(stack.run(AttnResStream(draw(5, 16), rows=3), range(9), 4).read(stack.reader("output")))
    assert_close("out", outs[0], outs[1], tolerance("attn_res", F32))


def test_gradient_is_the_derivative():
    stack = seed_weights(Sublayers(3, 4, dtype=F64))

    def forward(x):
        return stack.run(AttnResStream(x, rows=2), range(3), 2).read(stack.reader("output"))

    assert torch.autograd.gradcheck(forward, (draw(2, 4, dtype=F64).requires_grad_(),))


def test_gradients_reach_all_weights_that_are_used():
    stack = seed_weights(Sublayers(5, 8))
    stack.run(AttnResStream(draw(6, 8), rows=3), range(5), 2).read(stack.reader("output")).square().sum().backward()
    unused = {"0_self_attention_score.weight", "0_self_attention_proj.weight"}
    for name, weight in stack.named_parameters():
        reached = weight.grad is not None and bool(weight.grad.any())
        assert reached == (name not in unused), name


@pytest.mark.parametrize("kind", ["prefix", "mixture"])
def test_tap_keeps_the_order_it_was_asked_for(kind):
    stack = seed_weights(Sublayers(5, 8))
    taps = FeatureTap((3, 0), kind)
    stream, want = AttnResStream(draw(6, 8), rows=3), {}
    for i in range(5):
        stack.run(stream, [i], 2)
        reader = stack.reader(f"{i + 1}_self_attention" if i < 4 else "output")
        stream.tap(taps, i, reader)
        want[i] = stream.hidden() if kind == "prefix" else stream.mixture(reader)
    assert torch.equal(taps.out, torch.cat([want[3], want[0]], dim=-1))


def test_tap_does_not_disturb_the_stream():
    stack = seed_weights(Sublayers(5, 8))
    outs = []
    for layers in ((), (0, 1, 2, 3, 4)):
        stream = AttnResStream(draw(6, 8), rows=3)
        for i in range(5):
            stack.run(stream, [i], 2)
            stream.tap(FeatureTap(layers, "mixture"), i, stack.reader("output"))
        outs.append(stream.read(stack.reader("output")))
    assert_close("out", outs[0], outs[1], tolerance("attn_res", F32))


def test_two_additions_without_a_read_are_both_kept():
    stream = AttnResStream(draw(3, 8), rows=0)
    stream.add(draw(3, 8, seed=1))
    stream.add(draw(3, 8, seed=2))
    assert torch.equal(stream.hidden(), draw(3, 8) + draw(3, 8, seed=1) + draw(3, 8, seed=2))


# ---- the ordinary residual


@GRAD
def test_ordinary_residual(records):
    stack = seed_weights(Sublayers(3, 8))
    x = h = draw(6, 8)
    with torch.set_grad_enabled(records):
        stream = stack.run(ResidualStream(x, rows=0), range(3), 2)
        for i in range(3):
            for name in (f"{i}_self_attention", f"{i}_mlp"):
                h = h + stack._modules[name](stack._modules[f"{name}_norm"](h))
        assert_close("sum", h, stream.hidden(), tolerance("attn_res", F32))
        assert torch.equal(stream.mixture(stack.reader("output")), stream.hidden())
        want = stack._modules["output_norm"](h)
        assert_close("read", want, stream.read(stack.reader("output")), tolerance("attn_res", F32))


def test_ordinary_residual_needs_no_score_weights():
    reader = AttnRes(None, None, RMSNorm(8, 1e-5, dtype=F32))
    nn.init.ones_(reader.out_norm.weight)
    out = ResidualStream(draw(3, 8), rows=0).read(reader, closes_block=True)
    assert_close("read", nn.functional.rms_norm(draw(3, 8), (8,), eps=1e-5), out, tolerance("rms_norm", F32))


def test_scores_that_were_folded_at_once_are_the_same_and_follow_the_weights():
    stack = seed_weights(Sublayers(5, 16))
    names = [f"{i}_{name}" for i in range(5) for name in ("self_attention", "mlp")]
    readers = [stack.reader(name) for name in [*names, "output"]]
    scores, x = ScoreWeights(readers), draw(6, 16)

    def out(folded):
        return stack.run(AttnResStream(x, rows=3, scores=folded), range(5), 2).read(readers[-1])

    assert not scores.folded()
    with torch.no_grad():
        for part in scores.parts:
            part.fuse()
        assert len(scores.folded()) == len(readers)
        first = out(None)
        assert out(scores.folded()).equal(first)
        readers[-1].score_proj.weight.mul_(3)
        assert out(scores.folded()).equal(out(None))
        assert not out(None).equal(first)
    assert not scores.folded()  # gradients are recorded
