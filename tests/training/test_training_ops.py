"""The differentiable ops of training against the library's references, forward and backward."""

import pytest
import torch

from k3lib import Batch, ops
from k3lib.ops.quant import mxfp4_decode, mxfp4_encode
from training import ops as training
from training.model import new_model, small_config


def grads(loss, leaves):
    return torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("length", [5, 32, 100])
def test_the_chunked_recurrence_is_the_reference_forward_and_backward(length):
    torch.manual_seed(length)
    batch, heads, keys, values = 2, 2, 8, 16
    total = batch * length
    shapes = [(total, heads, keys)] * 2 + [(total, heads, values), (total, heads, keys), (total, heads)]
    leaves = [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in shapes]
    params = ops.KDAParams(torch.randn(heads, dtype=torch.float64), torch.randn(heads, keys, dtype=torch.float64), -5.0)
    cu = torch.arange(batch + 1, dtype=torch.int32) * length
    want = ops.kda_recurrent(*leaves, params=params, cu_seqlens=cu, scale=0.3)

    q, k, v, gate, beta = (x.view(batch, length, *x.shape[1:]) for x in leaves)
    decay = ops.kda_gate(gate, params)
    got = training.chunked_kda(ops.l2_norm(q) * 0.3, ops.l2_norm(k), v, decay, torch.sigmoid(beta)).flatten(0, 1)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    weight = torch.randn_like(want)
    for mine, its in zip(grads((got * weight).sum(), leaves), grads((want * weight).sum(), leaves), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-7, atol=1e-9)


def test_inversion_is_stable_where_powers_would_explode():
    lower = torch.ones(32, 32).tril(-1)  # equal keys, full writes, no decay: powers of it reach 3e8
    inverse = training._InverseUnitLower.apply(lower)
    torch.testing.assert_close(inverse @ (lower + torch.eye(32)), torch.eye(32))


@pytest.mark.parametrize("rows", [3, 40])
def test_rounded_weights_are_what_the_checkpoint_will_hold(rows):
    torch.manual_seed(rows)
    w = torch.randn(rows, 64) * torch.logspace(-6, 3, rows)[:, None]
    w[0] = 0
    w[1, :32] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(4)  # ties
    w.requires_grad_()
    rounded = training.fake_mxfp4(w)
    torch.testing.assert_close(rounded, mxfp4_decode(*mxfp4_encode(w.detach()), torch.float32), rtol=0, atol=0)
    assert torch.equal(grads(rounded.sum(), [w])[0], torch.ones_like(w))


def test_the_whole_model_computes_the_same_and_has_the_same_gradients():
    model = new_model(small_config(), seed=0).double()
    text = model.language_model
    ids = [torch.arange(37) * 7 % 256, torch.arange(37) * 5 % 256]
    leaves = [p for name, p in text.named_parameters() if "correction_bias" not in name]
    results = []
    for ours in (False, True):
        if ours:
            with training.training_ops(), training.step(37):
                hidden = text.hidden(Batch.pack(ids))
        else:
            with ops.use_backend("reference"):
                hidden = text.hidden(Batch.pack(ids))
        results.append((hidden, grads(text.scores(hidden).logsumexp(-1).sum(), leaves)))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-7, atol=1e-9)
    for mine, its in zip(results[1][1], results[0][1], strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-8)


def test_the_registry_is_as_before_and_ragged_batches_are_refused():
    names = {name: [impl.name for impl in op.implementations()] for name, op in ops.ops().items()}
    text = new_model(small_config(), seed=0).language_model
    with (
        training.training_ops(),
        training.step(4),
        pytest.raises(ValueError, match="7 tokens are not 2 sequences of 4"),
    ):
        text.hidden(Batch.pack([[1, 2, 3], [1, 2, 3, 4]]))
    with training.training_ops(), pytest.raises(ValueError, match="with step"):
        text.hidden(Batch.pack([[1, 2, 3]]))
    assert {name: [impl.name for impl in op.implementations()] for name, op in ops.ops().items()} == names


def test_quantile_balancing_evens_the_load():
    torch.manual_seed(0)
    scores = torch.sigmoid(torch.randn(4000, 8) + torch.linspace(-2, 2, 8))
    bias, top_k = torch.zeros(8), 2

    def load(bias):
        return torch.bincount((scores + bias).topk(top_k).indices.flatten(), minlength=8) / 1000

    assert load(bias).max() > 2
    for _ in range(4):
        bias = training.quantile_bias(scores, bias, top_k)
    assert load(bias).max() < 1.1
    assert load(bias).min() > 0.9
    assert abs(float(bias.mean())) < 1e-6


def test_chosen_experts_and_all_experts_are_the_same():
    torch.manual_seed(0)
    experts = new_model(small_config(), seed=0).language_model.model.layers[1].block_sparse_moe.experts
    act = experts.config.act
    x, weights = torch.randn(40, 32, requires_grad=True), torch.rand(40, 2, requires_grad=True)
    ids = torch.stack([torch.randperm(3)[:2] for _ in range(40)])  # the last expert gets nothing
    leaves = [x, weights, experts.w13, experts.w2]
    results = []
    for run in (training._all_experts, training._chosen_experts):
        out = run(x, ids, weights, experts.w13, experts.w2, act)
        results.append([out, *grads((out * out.detach()).sum(), leaves)])
    for mine, its in zip(*results, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("decay", [0.0, -5.0])
def test_gates_at_their_bounds_stay_finite_in_single_precision(decay):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 96, 1, 8, requires_grad=True) for _ in range(3))
    log_decay, beta = torch.full((1, 96, 1, 8), decay, requires_grad=True), torch.ones(1, 96, 1, requires_grad=True)
    out = training.chunked_kda(ops.l2_norm(q), ops.l2_norm(k), v, log_decay, beta)
    assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in grads(out.square().sum(), [q, k, v, log_decay, beta]))
