"""RMS norms and SiTU-GLU: golden vectors, known answers, rounding rules, gradients."""

import pytest
import torch
from torch.nn import functional as F

from k3lib.errors import ConfigError
from k3lib.ops import NormSpec, SiTUSpec, gated_rms_norm, implementations, rms_norm, situ_and_mul
from k3lib.testing import assert_close, skip_unless_able, tolerance

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def every(op):
    return pytest.mark.parametrize("impl", implementations(op), ids=str)


def draw(*shape, seed=0, dtype=F32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


# ---- rms_norm -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 128), (0, 16)], ids=str)
@every(rms_norm)
def test_rms_norm_matches_torch(impl, shape, device):
    x, weight = draw(*shape), draw(shape[-1], seed=1)
    skip_unless_able(impl, NormSpec.of(x, weight, eps=1e-5))
    want = F.rms_norm(x.double(), shape[-1:], weight.double(), eps=1e-5)
    assert_close("y", want, impl.run(x.to(device), weight.to(device), eps=1e-5), tolerance("rms_norm", F32))


@every(rms_norm)
def test_rms_norm_eps_is_added_to_the_mean(impl, device):
    x, weight = torch.full((1, 8), 1e-3), torch.ones(8)
    skip_unless_able(impl, NormSpec.of(x, weight, eps=1e-6))
    want = x.double() / (1e-6 + 1e-6) ** 0.5
    assert_close("y", want, impl.run(x.to(device), weight.to(device), eps=1e-6), tolerance("rms_norm", F32))


@pytest.mark.parametrize("weight_dtype", [BF16, F32])
@every(rms_norm)
def test_rms_norm_of_bf16_is_within_two_roundings(impl, weight_dtype, device):
    x, weight = draw(5, 64, dtype=BF16), draw(64, seed=1, dtype=weight_dtype)
    skip_unless_able(impl, NormSpec.of(x, weight, eps=1e-5))
    want = F.rms_norm(x.double(), (64,), weight.double(), eps=1e-5)
    y = impl.run(x.to(device), weight.to(device), eps=1e-5).cpu()
    assert y.dtype == BF16
    assert ((y - want).abs() <= 2**-7 * want.abs()).all()


def test_rms_norm_reference_rounds_before_the_weight():
    x, weight = draw(50, 64, dtype=BF16), draw(64, seed=1, dtype=BF16)
    normed = F.rms_norm(x.float(), (64,), eps=1e-5).to(BF16)
    assert rms_norm(x, weight, eps=1e-5).equal(normed * weight)


@every(rms_norm)
def test_rms_norm_of_zeros_is_zero(impl, device):
    x, weight = torch.zeros(2, 8), torch.ones(8)
    skip_unless_able(impl, NormSpec.of(x, weight, eps=1e-5))
    assert impl.run(x.to(device), weight.to(device), eps=1e-5).eq(0).all()


# ---- gated_rms_norm -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["h128", "h16_tiny_input", "big_gate", "bf16"])
@every(gated_rms_norm)
def test_gated_rms_norm_reproduces_golden_vectors(impl, name, load_golden, device):
    vectors = load_golden("gated_rmsnorm")
    case = {key: x.to(device) for key, x in vectors.case(name).items()}
    arguments, eps = (case["x"], case["gate"], case["weight"]), vectors.fact(f"{name}.eps")
    skip_unless_able(impl, NormSpec.of_gated(*arguments, eps=eps))
    vectors.check(name, "y", impl.run(*arguments, eps=eps).cpu(), atol=5e-6, ulps=1)


@every(gated_rms_norm)
def test_gated_rms_norm_gate_is_a_sigmoid(impl, device):
    x, gate, weight = draw(3, 2, 16), draw(3, 2, 16, seed=1), draw(16, seed=2)
    skip_unless_able(impl, NormSpec.of_gated(x, gate, weight, eps=1e-5))
    want = F.rms_norm(x.double(), (16,), weight.double(), eps=1e-5) * torch.sigmoid(gate.double())
    got = impl.run(x.to(device), gate.to(device), weight.to(device), eps=1e-5)
    assert_close("y", want, got, tolerance("gated_rms_norm", F32))


def test_gated_rms_norm_gives_the_dtype_of_the_gate():
    y = gated_rms_norm(draw(3, 8), draw(3, 8, dtype=BF16), draw(8), eps=1e-5)
    assert y.dtype == BF16


# ---- situ_and_mul -------------------------------------------------------------------------------

KNOWN = [
    ((1.0, 1.0), 0.7158178281),
    ((-1.0, 2.0), -0.5258288955),
    ((4.0, -10.0), -28.4162295230),
    ((10.0, 50.0), 95.1080215340),
    ((-20.0, 100.0), -2.05958418e-07),
]


@pytest.mark.parametrize("name", ["k3", "edges", "no_linear", "bf16"])
@every(situ_and_mul)
def test_situ_reproduces_golden_vectors(impl, name, load_golden, device):
    vectors = load_golden("situ_glu")
    x = vectors.case(name)["x"].to(device)
    caps = {"beta": vectors.fact(f"{name}.beta"), "linear_beta": vectors.fact(f"{name}.linear_beta")}
    skip_unless_able(impl, SiTUSpec.of(x, **caps))
    vectors.check(name, "y", impl.run(x, **caps).cpu(), atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize(("point", "want"), KNOWN)
def test_situ_gives_known_answers(point, want):
    y = situ_and_mul(torch.tensor([point], dtype=F64), beta=4.0, linear_beta=25.0)
    assert y.item() == pytest.approx(want, rel=1e-9)


@every(situ_and_mul)
def test_situ_is_bounded_by_the_caps(impl, device):
    x = torch.tensor([[1e30, 1e30], [1e30, -1e30], [-1e30, 1e30]], device=device)
    skip_unless_able(impl, SiTUSpec.of(x, beta=4.0, linear_beta=25.0))
    y = impl.run(x, beta=4.0, linear_beta=25.0).cpu()
    assert y.flatten().tolist() == [100.0, -100.0, 0.0]


def test_situ_refuses_an_odd_width():
    with pytest.raises(ConfigError, match=r"needs an even last axis \[gate \| up\], got 5"):
        situ_and_mul(torch.zeros(1, 5), beta=4.0, linear_beta=None)


# ---- refusals and gradients ---------------------------------------------------------------------


def test_norms_refuse_a_weight_of_another_width():
    with pytest.raises(ConfigError, match=r"weight has shape \(7,\), x needs \(8,\)"):
        rms_norm(torch.ones(2, 8), torch.ones(7), eps=1e-5)
    with pytest.raises(ConfigError, match=r"weight has shape \(1,\), x needs \(8,\)"):
        gated_rms_norm(torch.ones(2, 8), torch.ones(2, 8), torch.ones(1), eps=1e-5)


def test_gated_rms_norm_refuses_a_gate_of_another_shape():
    with pytest.raises(ConfigError, match=r"gate has shape \(1, 8\), x has \(2, 8\)"):
        gated_rms_norm(torch.ones(2, 8), torch.ones(1, 8), torch.ones(8), eps=1e-5)


@pytest.mark.parametrize(
    ("call", "shapes"),
    [
        (lambda x, w: rms_norm(x, w, eps=1e-5), [(2, 5), (5,)]),
        (lambda x, g, w: gated_rms_norm(x, g, w, eps=1e-5), [(2, 5), (2, 5), (5,)]),
        (lambda x: situ_and_mul(x, beta=4.0, linear_beta=25.0), [(3, 6)]),
        (lambda x: situ_and_mul(x, beta=4.0, linear_beta=None), [(3, 6)]),
    ],
    ids=["rms_norm", "gated_rms_norm", "situ", "situ uncapped"],
)
def test_gradients_are_right(call, shapes):
    leaves = [draw(*shape, seed=i, dtype=F64).requires_grad_() for i, shape in enumerate(shapes)]
    assert torch.autograd.gradcheck(call, leaves)
