"""The helpers that every other test trusts."""

import pytest
import torch

from k3lib.ops import Target, implementations, ops, register, rms_norm
from k3lib.testing import assert_close, fill_nan, random_batch, skip_unless_able, tiny_config, tolerance


def test_equal_tensors_are_close():
    x = torch.randn(3, 4)
    assert_close("x", x, x.clone(), ratio=0.0)


def test_error_is_relative_to_the_reference():
    x = torch.randn(50, dtype=torch.float64) * 1e6
    assert_close("x", x, x * (1 + 1e-4), ratio=1.01e-4)
    with pytest.raises(AssertionError, match="allowed"):
        assert_close("x", x, x * (1 + 1e-4), ratio=0.99e-4)


def test_message_names_the_worst_index():
    want = torch.ones(2, 3)
    got = want.clone()
    got[1, 2] = 5
    with pytest.raises(AssertionError, match=r"out: error ratio 1\.63, allowed 0\.1; worst at \(1, 2\): got 5, expec"):
        assert_close("out", want, got, ratio=0.1)


@pytest.mark.parametrize("where", ["reference", "result", "both"])
def test_nan_never_passes(where):
    want, got = torch.ones(3), torch.ones(3)
    if where != "result":
        want[1] = torch.nan
    if where != "reference":
        got[1] = torch.nan
    with pytest.raises(AssertionError, match="NaN"):
        assert_close("x", want, got, ratio=1e9)


def test_zero_reference_admits_only_zeros():
    assert_close("x", torch.zeros(3), torch.zeros(3), ratio=1e-3)
    with pytest.raises(AssertionError, match="error ratio inf"):
        assert_close("x", torch.zeros(3), torch.tensor([0.0, 1e-30, 0.0]), ratio=1e9)


def test_infinities_must_agree():
    want = torch.tensor([1.0, -torch.inf])
    assert_close("lse", want, want.clone(), ratio=1e-6)
    with pytest.raises(AssertionError, match=r"infinities differ, first at \(1,\)"):
        assert_close("lse", want, torch.tensor([1.0, 0.0]), ratio=1e9)


def test_shapes_must_agree():
    with pytest.raises(AssertionError, match=r"shape \(1, 3\), expected \(3,\)"):
        assert_close("x", torch.ones(3), torch.ones(1, 3), ratio=1.0)


def test_empty_tensors_are_close():
    assert_close("x", torch.ones(0, 3), torch.ones(0, 3), ratio=0.0)


def test_tolerance_of_an_op_precedes_that_of_the_dtype():
    assert tolerance("kda_chunk", torch.bfloat16) > tolerance("some_op", torch.bfloat16)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(3),
        lambda: torch.empty(3, dtype=torch.bfloat16, requires_grad=False),
        lambda: torch.empty(3, requires_grad=True),
        lambda: torch.empty_like(torch.ones(3, dtype=torch.float8_e4m3fn)),
        lambda: torch.ones(2).new_empty(4),
        lambda: torch.empty_strided((2, 2), (2, 1)),
    ],
)
def test_uninitialised_memory_is_nan(make):
    with fill_nan():
        assert make().float().isnan().all()


def test_integer_memory_is_left_alone():
    with fill_nan():
        assert torch.empty(3, dtype=torch.int32).shape == (3,)


def test_fill_nan_ends():
    before = torch.empty, torch.Tensor.new_empty
    with fill_nan():
        assert torch.empty is not before[0]
    assert (torch.empty, torch.Tensor.new_empty) == before


def test_skips_with_the_reason_of_explain():
    @register(rms_norm, name="elsewhere", platforms={"npu"})
    def elsewhere(x, weight, *, eps):
        raise NotImplementedError

    try:
        impl = next(i for i in implementations(rms_norm) if i.name == "elsewhere")
        spec = rms_norm.spec_of(torch.ones(1, 2), torch.ones(2), eps=0.0)
        here = Target.detect().platform
        with pytest.raises(pytest.skip.Exception, match=f"rms_norm/elsewhere needs platform npu, this is {here}"):
            skip_unless_able(impl, spec)
    finally:
        rms_norm.remove("elsewhere")


def test_does_not_skip_what_is_able():
    spec = rms_norm.spec_of(torch.ones(1, 2), torch.ones(2), eps=0.0)
    skip_unless_able(ops()["rms_norm"].resolve(spec), spec)


def test_tiny_config_takes_changes():
    assert tiny_config(vocab_size=600).text.vocab_size == 600


def test_random_batch_is_repeatable():
    first, second = random_batch([3, 0, 5], 100, seed=1), random_batch([3, 0, 5], 100, seed=1)
    assert first.new_tokens == (3, 0, 5)
    assert first.input_ids.equal(second.input_ids)
    assert first.input_ids.max() < 100
