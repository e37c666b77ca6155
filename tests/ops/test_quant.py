"""Quantized formats: golden bytes, known answers, and properties of the encoders and decoders."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from k3lib.errors import CheckpointError, ConfigError
from k3lib.ops.quant import (
    check_mxfp4,
    fp8_block_decode,
    fp8_block_encode,
    mxfp4_decode,
    mxfp4_encode,
    mxfp4_to_nvfp4,
    mxfp8_decode,
    mxfp8_encode,
    nvfp4_decode,
    nvfp4_encode,
)

E4M3 = torch.float8_e4m3fn
FLOATS = [torch.bfloat16, torch.float32, torch.float64]
GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
MXFP4_ENCODED = ["normal", "bf16_small", "ties", "block_max_sweep", "wide_range", "zero_blocks"]
MXFP4_DECODED = [*MXFP4_ENCODED, "decode_all_bytes", "decode_all_scales"]
NVFP4_CASES = ["normal", "small_bf16", "wide_range"]

quick = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**32 - 1)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def random_mxfp4(seed, rows=5, groups=3, low=1, high=252):
    g = generator(seed)
    packed = torch.randint(0, 256, (rows, groups * 16), dtype=torch.uint8, generator=g)
    scale = torch.randint(low, high + 1, (rows, groups), dtype=torch.uint8, generator=g)
    return packed, scale


def random_weights(seed, rows=6, columns=96, spread=8.0, dtype=torch.float32):
    g = generator(seed)
    w = torch.randn(rows, columns, generator=g)
    octaves = torch.randn(rows, columns // 32, generator=g) * spread
    return (w * torch.exp2(octaves).repeat_interleave(32, -1)).to(dtype)


def e2m1_half_step(magnitude):
    """Half the distance between the neighbours of a magnitude on the E2M1 grid."""
    steps = torch.where(magnitude <= 2, 0.25, torch.where(magnitude <= 4, 0.5, 1.0))
    return steps.to(magnitude.dtype)


# MXFP4


@pytest.mark.parametrize("case", MXFP4_ENCODED)
def test_mxfp4_encode_equals_golden_bytes(golden, case):
    want = load_file(golden / "mxfp4.safetensors")
    packed, scale = mxfp4_encode(want[f"{case}.weight"])
    assert torch.equal(packed, want[f"{case}.weight_packed"])
    assert torch.equal(scale, want[f"{case}.weight_scale"])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", MXFP4_DECODED)
def test_mxfp4_decode_equals_golden_values(golden, case, dtype):
    file = load_file(golden / "mxfp4.safetensors")
    got = mxfp4_decode(file[f"{case}.weight_packed"], file[f"{case}.weight_scale"], dtype)
    want = file[f"{case}.dequantized"].to(dtype)
    if dtype == torch.float64:  # holds what overflows the golden bfloat16
        assert torch.equal(got.bfloat16().double(), want)
    else:
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float16], ids=str)
def test_mxfp4_known_answer(dtype):
    packed = torch.full((1, 16), 0x9E, dtype=torch.uint8)
    got = mxfp4_decode(packed, torch.tensor([[128]], dtype=torch.uint8), dtype)
    assert got.dtype == dtype
    assert got[0, :2].tolist() == [-8.0, -1.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [127, 126, 128, 0])
def test_mxfp4_low_nibble_comes_first(scale, dtype):
    packed = torch.tensor([[0x21, 0xF7] * 8], dtype=torch.uint8)
    got = mxfp4_decode(packed, torch.tensor([[scale]], dtype=torch.uint8), dtype)
    want = [value * 2.0 ** (scale - 127) for value in (0.5, 1.0, 6.0, -6.0)]
    assert got[0].tolist() == want * 8


def test_mxfp4_scale_byte_255_is_nan():
    packed = torch.zeros(1, 32, dtype=torch.uint8)
    got = mxfp4_decode(packed, torch.tensor([[255, 127]], dtype=torch.uint8), torch.bfloat16)
    assert got[0, :32].isnan().all()
    assert (got[0, 32:] == 0).all()


def test_mxfp4_float16_keeps_zeros_of_huge_groups():
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    got = mxfp4_decode(packed, torch.tensor([[200]], dtype=torch.uint8), torch.float16)
    assert (got == 0).all()


@quick
@given(seeds)
def test_mxfp4_representable_values_survive(seed):
    packed, scale = random_mxfp4(seed)
    values = mxfp4_decode(packed, scale, torch.float32)
    for dtype in FLOATS:
        again = mxfp4_decode(*mxfp4_encode(values.to(dtype)), torch.float32)
        assert torch.equal(again, values)


@quick
@given(seeds, st.floats(0, 30), st.sampled_from([torch.float16, *FLOATS]))
def test_mxfp4_second_encoding_changes_nothing(seed, spread, dtype):
    w = random_weights(seed, spread=spread if dtype != torch.float16 else 2.0, dtype=dtype)
    once = mxfp4_decode(*mxfp4_encode(w), torch.float64)
    twice = mxfp4_decode(*mxfp4_encode(once), torch.float64)
    assert torch.equal(once, twice)


@quick
@given(seeds, st.floats(0, 20))
def test_mxfp4_rounds_to_the_nearest(seed, spread):
    w = random_weights(seed, spread=spread)
    packed, scale = mxfp4_encode(w)
    unit = torch.exp2(scale.double() - 127).repeat_interleave(32, -1)
    target = (w.double() / unit).abs()
    assert (target < 7).all()
    got = (mxfp4_decode(packed, scale, torch.float64) / unit).abs()
    nearest = (target[..., None] - GRID).abs().amin(-1)
    assert torch.equal((got - target).abs(), nearest)
    assert (nearest <= e2m1_half_step(target)).all()


def test_mxfp4_keeps_leading_dims():
    w = torch.randn(2, 3, 4, 64)
    packed, scale = mxfp4_encode(w)
    assert (packed.shape, scale.shape) == ((2, 3, 4, 32), (2, 3, 4, 2))
    got = mxfp4_decode(packed, scale, torch.bfloat16)
    assert got.shape == w.shape
    one = mxfp4_decode(packed[1, 2], scale[1, 2], torch.bfloat16)
    assert torch.equal(got[1, 2], one)


def test_mxfp4_decodes_slices_and_nothing():
    packed, scale = mxfp4_encode(torch.randn(8, 96))
    whole = mxfp4_decode(packed, scale, torch.float32)
    part = mxfp4_decode(packed[::2, 16:32], scale[::2, 1:2], torch.float32)
    assert torch.equal(part, whole[::2, 32:64])
    assert mxfp4_decode(packed[:0], scale[:0], torch.float32).shape == (0, 96)


def test_mxfp4_drops_only_the_sign_of_an_exact_zero():
    w = torch.zeros(32)
    w[:4] = torch.tensor([1.0, -0.0, -0.01, 0.01])
    packed, _ = mxfp4_encode(w)
    assert packed[:2].tolist() == [0x06, 0x08]


def test_mxfp4_encode_spans_the_exponents_of_float32():
    w = torch.zeros(3, 32)
    w[0], w[1], w[2] = 2.0**-130, 1.5 * 2.0**-127, 1.5 * 2.0**127
    packed, scale = mxfp4_encode(w)
    got = mxfp4_decode(packed, scale, torch.float32)
    assert torch.equal(got, torch.tensor([0, 1.5 * 2.0**-127, 1.5 * 2.0**127])[:, None].expand(3, 32))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.75 * 2.0**127])
def test_mxfp4_encode_refuses_values_it_cannot_hold(value):
    w = torch.zeros(2, 32)
    w[1, 3] = value
    with pytest.raises(ConfigError, match="must be finite"):
        mxfp4_encode(w)


# check_mxfp4


def test_check_mxfp4_accepts_real_weights():
    check_mxfp4("w1", *mxfp4_encode(torch.randn(4, 64)))
    check_mxfp4("empty", *mxfp4_encode(torch.zeros(0, 64)))


def test_check_mxfp4_names_nan_scales():
    packed, scale = mxfp4_encode(torch.randn(4, 64))
    scale[1, 1] = scale[3, 0] = 255
    for dtype in FLOATS:
        with pytest.raises(CheckpointError, match=r"expert.w1: .*2 of 255, first at \[1, 1\]"):
            check_mxfp4("expert.w1", packed, scale, dtype)


@pytest.mark.parametrize(("scale", "largest"), [(252, 6.0), (253, 3.0), (254, 1.5)], ids=["252", "253", "254"])
def test_check_mxfp4_knows_the_largest_magnitude(scale, largest):
    scales = torch.full((1, 2, 3), 127, dtype=torch.uint8)
    scales[0, 1, 2] = scale
    for code, magnitude in enumerate(GRID.tolist()):
        packed = torch.zeros(1, 2, 48, dtype=torch.uint8)
        packed[0, 1, 36] = (code | 8) << 4  # column 73
        fits = magnitude <= largest
        assert mxfp4_decode(packed, scales, torch.float32).isfinite().all() == fits
        if fits:
            check_mxfp4("w2", packed, scales)
        else:
            with pytest.raises(CheckpointError, match=rf"w2: .*got 1 .*\[0, 1, 73\].*{scale}"):
                check_mxfp4("w2", packed, scales)


def test_check_mxfp4_reports_both_problems_of_the_known_bytes():
    packed = torch.tensor([[0x21, 0xF7] * 8], dtype=torch.uint8).expand(6, 16)
    scale = torch.tensor([127, 126, 128, 0, 254, 255], dtype=torch.uint8)[:, None]
    with pytest.raises(CheckpointError) as caught:
        check_mxfp4("w3", packed, scale)
    assert "got 1 of 255, first at [5, 0]" in str(caught.value)
    assert "got 16 that overflow, first at [4, 2] with scale byte 254" in str(caught.value)
    with pytest.raises(CheckpointError, match="got 1 of 255") as caught:
        check_mxfp4("w3", packed, scale, torch.float64)
    assert "overflow" not in str(caught.value)


def test_check_mxfp4_names_the_tensor_with_a_bad_shape():
    with pytest.raises(CheckpointError, match=r"w1: scale must be \[4, 2\] .* got \[4, 4\]"):
        check_mxfp4("w1", torch.zeros(4, 32).byte(), torch.zeros(4, 4).byte())


# NVFP4


@pytest.mark.parametrize("case", NVFP4_CASES)
def test_nvfp4_encode_equals_golden_bytes(golden, case):
    want = load_file(golden / "nvfp4.safetensors")
    packed, scale, scale_2 = nvfp4_encode(want[f"{case}.weight"])
    assert torch.equal(packed, want[f"{case}.weight_packed"])
    assert scale.dtype == E4M3
    assert torch.equal(scale.view(torch.uint8), want[f"{case}.weight_scale"].view(torch.uint8))
    assert scale_2.shape == ()
    assert torch.equal(scale_2, 1 / want[f"{case}.weight_global_scale"][0])


@pytest.mark.parametrize("case", NVFP4_CASES)
def test_nvfp4_decode_equals_golden_values(golden, case):
    file = load_file(golden / "nvfp4.safetensors")
    packed, scale = file[f"{case}.weight_packed"], file[f"{case}.weight_scale"]
    scale_2 = 1 / file[f"{case}.weight_global_scale"]
    exact = file[f"{case}.dequantized_exact"]
    for dtype, rtol in (torch.float64, 1e-6), (torch.float32, 1e-6), (torch.bfloat16, 2**-8):
        got = nvfp4_decode(packed, scale, scale_2, dtype)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), exact, rtol=rtol, atol=0)
    # that package rounds the scale to bfloat16 first, so its values are two ulps away at most
    theirs = file[f"{case}.dequantized_bf16"].double()
    torch.testing.assert_close(got.double(), theirs, rtol=2**-7, atol=0)


def test_nvfp4_golden_checkpoint_shares_scale_2(golden):
    for path in sorted((golden / "tiny_k3_wide_nvfp4").glob("*.safetensors")):
        scales = {k: v for k, v in load_file(path).items() if k.endswith("weight_scale_2")}
        pairs = [(v, scales[k.replace(".w1.", ".w3.")]) for k, v in scales.items() if ".w1." in k]
        assert pairs
        assert all(torch.equal(w1, w3) for w1, w3 in pairs)


@quick
@given(seeds, st.floats(0, 3), st.sampled_from(FLOATS))
def test_nvfp4_error_is_within_half_a_step(seed, spread, dtype):
    w = random_weights(seed, spread=spread, dtype=dtype)
    packed, scale, scale_2 = nvfp4_encode(w)
    unit = (scale.double() * scale_2.double()).repeat_interleave(16, -1)
    error = (nvfp4_decode(packed, scale, scale_2, torch.float64) - w.double()).abs() / unit
    target = w.double().abs() / unit
    # the rounding of the scale can leave the largest value above 6, by half of the E4M3 step
    step = torch.maximum(scale.double() * 2**-3, torch.tensor(2.0**-9, dtype=torch.float64))
    above = (6 * (step / 2) / scale.double()).repeat_interleave(16, -1)
    bound = torch.maximum(e2m1_half_step(target), above)
    assert (error <= bound * (1 + 1e-6)).all()


def test_nvfp4_matrices_with_one_amax_share_scale_2():
    w1, w3 = torch.randn(4, 32), 10 * torch.randn(4, 32)
    amax = torch.maximum(w1.abs().max(), w3.abs().max())
    first, third = nvfp4_encode(w1, amax=amax), nvfp4_encode(w3, amax=amax)
    assert torch.equal(first[2], third[2])
    assert torch.equal(third[2], nvfp4_encode(torch.cat([w1, w3]))[2])
    torch.testing.assert_close(nvfp4_decode(*first, torch.float32), w1, rtol=0.3, atol=0.3)


@pytest.mark.parametrize("amax", [0.5, math.nan, math.inf])
def test_nvfp4_refuses_an_amax_that_does_not_cover(amax):
    with pytest.raises(ConfigError, match=f"amax={amax} must be"):
        nvfp4_encode(torch.ones(1, 16), amax=torch.tensor(amax))


@pytest.mark.parametrize("value", [0.0, 1e-38, 1e-45, 3e38])
def test_nvfp4_scales_stay_positive_and_finite(value):
    w = torch.full((2, 32), value)
    packed, scale, scale_2 = nvfp4_encode(w)
    assert (scale.float() > 0).all()
    assert 0 < scale_2 < math.inf
    got = nvfp4_decode(packed, scale, scale_2, torch.float32)
    torch.testing.assert_close(got, w, rtol=0.25, atol=1e-39)


def test_nvfp4_tiny_group_next_to_a_huge_one():
    w = torch.cat([torch.full((1, 16), 1e6), torch.full((1, 16), 1e-6), torch.zeros(1, 16)], -1)
    packed, scale, scale_2 = nvfp4_encode(w)
    got = nvfp4_decode(packed, scale, scale_2, torch.float32)
    torch.testing.assert_close(got[:, :16], w[:, :16])
    assert (got[:, 16:] == 0).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nvfp4_encode_refuses_values_that_are_not_finite(value):
    w = torch.zeros(1, 32)
    w[0, 3] = value
    with pytest.raises(ConfigError, match="must be finite"):
        nvfp4_encode(w)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nvfp4_scale_2_per_expert(dtype):
    encoded = [nvfp4_encode(torch.randn(4, 32) * 10**e) for e in range(3)]
    got = nvfp4_decode(*(torch.stack(parts) for parts in zip(*encoded, strict=True)), dtype)
    for one, whole in zip(encoded, got, strict=True):
        assert torch.equal(whole, nvfp4_decode(*one, dtype))
    shared = nvfp4_decode(encoded[0][0], encoded[0][1], encoded[0][2].reshape(1), dtype)
    assert torch.equal(shared, got[0])


# MXFP4 to NVFP4


@quick
@given(seeds, st.integers(1, 235))
def test_closed_form_equals_mxfp4_on_groups_in_range(seed, low):
    pairs = [random_mxfp4(seed + i, low=low, high=low + 17) for i in range(2)]
    recoded, scale_2 = mxfp4_to_nvfp4(*pairs)
    for (packed, scale), (packed_nv, scale_nv) in zip(pairs, recoded, strict=True):
        assert torch.equal(packed, packed_nv)
        assert torch.equal(scale_nv[:, 0::2].float(), scale_nv[:, 1::2].float())
        for dtype in FLOATS:
            want = mxfp4_decode(packed, scale, dtype)
            assert torch.equal(nvfp4_decode(packed_nv, scale_nv, scale_2, dtype), want)


def test_closed_form_scales_are_the_powers_of_the_specification():
    packed = torch.full((1, 32), 0x22, dtype=torch.uint8)
    scale = torch.tensor([[130, 113]], dtype=torch.uint8)
    [(_, scale_nv)], scale_2 = mxfp4_to_nvfp4((packed, scale))
    assert scale_2.item() == 2.0 ** (3 - 8)
    assert scale_2.dtype == torch.float32
    assert scale_nv.float().tolist() == [[256.0, 256.0, 2.0**-9, 2.0**-9]]


@quick
@given(seeds, st.integers(18, 60))
def test_closed_form_rounds_far_groups(seed, distance):
    packed, scale = random_mxfp4(seed, low=100 - distance, high=100)
    packed[0, :16], scale[0, 0] = 0x22, 100
    source = packed.clone(), scale.clone()
    [(packed_nv, scale_nv)], scale_2 = mxfp4_to_nvfp4((packed, scale))
    assert torch.equal(packed, source[0])
    assert torch.equal(scale, source[1])
    want = mxfp4_decode(packed, scale, torch.float64)
    got = nvfp4_decode(packed_nv, scale_nv, scale_2, torch.float64)
    far = (100 - scale.int() > 17).repeat_interleave(32, -1)
    assert torch.equal(got[~far], want[~far])
    smallest = scale_2.double() * 2.0**-9
    assert ((got - want).abs()[far] <= 0.25 * smallest).all()


def test_closed_form_ignores_groups_of_zeros():
    packed = torch.zeros(1, 48, dtype=torch.uint8)
    packed[0, :16], packed[0, 16:32] = 0x88, 0x22
    scale = torch.tensor([[200, 120, 0]], dtype=torch.uint8)
    [(packed_nv, scale_nv)], scale_2 = mxfp4_to_nvfp4((packed, scale))
    assert scale_2.item() == 2.0 ** (-7 - 8)
    got = nvfp4_decode(packed_nv, scale_nv, scale_2, torch.float32)
    assert torch.equal(got, mxfp4_decode(packed, scale, torch.float32))
    only_zeros, scale_2 = mxfp4_to_nvfp4((packed[:, :16], scale[:, :1]))
    assert scale_2 > 0
    assert (nvfp4_decode(*only_zeros[0], scale_2, torch.float32) == 0).all()


def test_closed_form_shares_scale_2_between_matrices():
    small, large = (mxfp4_encode(torch.randn(4, 64) * 10**e) for e in (-2, 1))
    recoded, scale_2 = mxfp4_to_nvfp4(small, large)
    assert scale_2.shape == ()
    assert torch.equal(scale_2, mxfp4_to_nvfp4(large)[1])
    got = nvfp4_decode(*recoded[0], scale_2, torch.bfloat16)
    assert torch.equal(got, mxfp4_decode(*small, torch.bfloat16))


def test_closed_form_refuses_nan_scales_and_no_pairs():
    packed, scale = mxfp4_encode(torch.randn(2, 32))
    scale[0] = 255
    with pytest.raises(ConfigError, match="got 1 of 255"):
        mxfp4_to_nvfp4((packed, scale))
    with pytest.raises(ConfigError, match="got 0"):
        mxfp4_to_nvfp4()


# block-scaled FP8


@pytest.mark.parametrize("shape", [(1, 1), (96, 128), (128, 256), (130, 257), (576, 40)], ids=str)
def test_fp8_block_round_trip(shape):
    w = torch.randn(shape, generator=generator(0))
    codes, scale = fp8_block_encode(w)
    tiles = (math.ceil(shape[0] / 128), math.ceil(shape[1] / 128))
    assert (codes.dtype, codes.shape) == (E4M3, w.shape)
    assert (scale.dtype, scale.shape) == (torch.float32, tiles)
    full = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    got = fp8_block_decode(codes, scale, torch.float32)
    assert torch.equal(got, codes.float() * full)
    assert ((got - w).abs() <= torch.maximum(w.abs() * 2**-4, full * 2**-10) * 1.0001).all()
    stored = scale.reshape(tiles[0], 1, tiles[1], 1)
    assert torch.equal(fp8_block_decode(codes, stored, torch.float32), got)
    assert torch.equal(fp8_block_decode(codes, scale, torch.bfloat16), got.bfloat16())
    torch.testing.assert_close(fp8_block_decode(codes, scale, torch.float64).float(), got)


def test_fp8_block_scale_belongs_to_its_tile():
    w = torch.ones(4, 6)
    w[2:, 4:] = 448.0
    codes, scale = fp8_block_encode(w, block=2)
    assert scale[1].tolist() == [scale[0, 0].item()] * 2 + [1.0]
    got = fp8_block_decode(codes, scale, torch.float32, block=2)
    torch.testing.assert_close(got, w)


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 3e38])
def test_fp8_block_scales_stay_positive_and_finite(value):
    w = torch.full((3, 5), value)
    codes, scale = fp8_block_encode(w)
    assert 0 < scale < math.inf
    # half of the smallest E4M3 step times the smallest scale
    torch.testing.assert_close(fp8_block_decode(codes, scale, torch.float32), w, rtol=2**-4, atol=1.2e-41)


# MXFP8


@quick
@given(seeds, st.floats(0, 20), st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
def test_mxfp8_error_is_within_half_a_step(seed, spread, dtype):
    x = random_weights(seed, spread=spread, dtype=dtype)
    codes, scale = mxfp8_encode(x)
    assert (codes.shape, scale.shape) == (x.shape, (6, 3))
    unit = torch.exp2(scale.double() - 127).repeat_interleave(32, -1)
    target = x.double().abs() / unit
    top = target.unflatten(-1, (3, 32)).amax(-1)
    assert ((top >= 256) & (top < 512)).all()
    got = mxfp8_decode(codes, scale, torch.float64).abs() / unit
    want = target.clamp(max=448)
    assert ((got - want).abs() <= torch.maximum(want * 2**-4, torch.tensor(2.0**-10))).all()
    assert torch.equal(mxfp8_decode(codes, scale, torch.float32).double().abs(), got * unit)


def test_mxfp8_saturates_and_marks_bad_groups():
    x = torch.zeros(1, 128)
    x[0, 0], x[0, 32], x[0, 64] = -500.0, math.inf, math.nan
    codes, scale = mxfp8_encode(x)
    assert scale.tolist() == [[127, 255, 255, 0]]
    got = mxfp8_decode(codes, scale, torch.bfloat16)
    assert got[0, 0] == -448
    assert got[0, 32:96].isnan().all()
    assert (got[0, 96:] == 0).all()


def test_mxfp8_takes_no_tokens():
    codes, scale = mxfp8_encode(torch.zeros(0, 64))
    assert mxfp8_decode(codes, scale, torch.float32).shape == (0, 64)


# wrong arguments


def u8(*shape):
    return torch.zeros(shape, dtype=torch.uint8)


def fp8(*shape):
    return torch.zeros(shape, dtype=E4M3)


ONE = torch.ones(())
BAD_CALLS = {
    "mxfp4_encode columns": (lambda: mxfp4_encode(torch.zeros(2, 33)), r"of 32, got \[2, 33\]"),
    "mxfp4_encode dtype": (lambda: mxfp4_encode(u8(2, 32)), r"needs bfloat16.*got uint8"),
    "mxfp4_decode scale": (
        lambda: mxfp4_decode(u8(2, 32), u8(2, 4), torch.float32),
        r"scale must be \[2, 2\] for packed \[2, 32\], got \[2, 4\]",
    ),
    "mxfp4_decode rows": (
        lambda: mxfp4_decode(u8(2, 32), u8(3, 2), torch.float32),
        r"scale must be \[2, 2\] .*got \[3, 2\]",
    ),
    "mxfp4_decode columns": (
        lambda: mxfp4_decode(u8(2, 24), u8(2, 1), torch.float32),
        r"packed .*multiple of 16, got \[2, 24\]",
    ),
    "mxfp4_decode packed dtype": (
        lambda: mxfp4_decode(u8(2, 16).char(), u8(2, 1), torch.float32),
        r"packed must be torch.uint8, got torch.int8",
    ),
    "mxfp4_decode scale dtype": (
        lambda: mxfp4_decode(u8(2, 16), torch.ones(2, 1), torch.float32),
        r"scale must be torch.uint8, got torch.float32",
    ),
    "mxfp4_decode dtype": (
        lambda: mxfp4_decode(u8(2, 16), u8(2, 1), torch.int32),
        r"needs bfloat16.*got int32",
    ),
    "nvfp4_encode columns": (lambda: nvfp4_encode(torch.zeros(2, 24)), r"of 16, got \[2, 24\]"),
    "nvfp4_decode scale": (
        lambda: nvfp4_decode(u8(2, 32), fp8(2, 2), ONE, torch.float32),
        r"scale must be \[2, 4\] .*got \[2, 2\]",
    ),
    "nvfp4_decode scale dtype": (
        lambda: nvfp4_decode(u8(2, 32), u8(2, 4), ONE, torch.float32),
        r"scale must be torch.float8_e4m3fn, got torch.uint8",
    ),
    "nvfp4_decode scale_2": (
        lambda: nvfp4_decode(u8(3, 2, 32), fp8(3, 2, 4), torch.ones(2), torch.float32),
        r"scale_2 .*dims \[3\], got torch.float32 \[2\]",
    ),
    "nvfp4_decode scale_2 dtype": (
        lambda: nvfp4_decode(u8(2, 32), fp8(2, 4), ONE.double(), torch.float32),
        r"scale_2 must be float32.*got torch.float64",
    ),
    "mxfp4_to_nvfp4 scale": (
        lambda: mxfp4_to_nvfp4((u8(2, 32), u8(2, 1))),
        r"scale must be \[2, 2\] .*got \[2, 1\]",
    ),
    "fp8_block_encode dims": (lambda: fp8_block_encode(torch.zeros(2, 2, 2)), r"2 dims, got 3"),
    "fp8_block_encode values": (
        lambda: fp8_block_encode(torch.full((2, 2), math.inf)),
        r"must be finite in float32, got inf",
    ),
    "fp8_block_decode scale": (
        lambda: fp8_block_decode(fp8(130, 128), torch.ones(1, 1), torch.float32),
        r"scale must be float32 \[2, 1\] .*got torch.float32 \[1, 1\]",
    ),
    "fp8_block_decode dtype": (
        lambda: fp8_block_decode(u8(2, 2), torch.ones(1, 1), torch.float32),
        r"must be float8_e4m3fn .*got torch.uint8",
    ),
    "mxfp8_encode columns": (lambda: mxfp8_encode(torch.zeros(2, 48)), r"of 32, got \[2, 48\]"),
    "mxfp8_decode scale": (
        lambda: mxfp8_decode(fp8(2, 64), u8(2, 4), torch.float32),
        r"scale must be \[2, 2\] for codes \[2, 64\], got \[2, 4\]",
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_wrong_arguments_are_named(case):
    call, message = BAD_CALLS[case]
    with pytest.raises(ConfigError, match=message):
        call()
