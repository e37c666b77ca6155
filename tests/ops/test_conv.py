"""The short convolution: golden vectors, decode, windows, slots, gradients.

Shapes: T packed tokens, C channels, W width, N pool rows.
"""

from itertools import accumulate

import pytest
import torch
from torch.nn import functional as F

from k3lib.batch import StateSaves
from k3lib.errors import ConfigError
from k3lib.ops import ConvSpec, implementations, short_conv
from k3lib.testing import assert_close, skip_unless_able, tolerance

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
IMPLS = [pytest.param(impl, id=str(impl)) for impl in implementations(short_conv)]
every_impl = pytest.mark.parametrize("impl", IMPLS)


def offsets(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def able(impl, *args, **kwargs):
    skip_unless_able(impl, ConvSpec.of(*args, **kwargs))
    return impl.run


def conv_inputs(lengths, *, channels=5, width=4, rows=None, dtype=F32):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(sum(lengths), channels, generator=g).to(dtype)
    weight = torch.randn(channels, width, generator=g).to(F64 if dtype == F64 else F32)
    pool = torch.randn(rows or len(lengths) + 1, width - 1, channels, generator=g).to(dtype)
    return x, weight, pool


def by_torch(x, weight, left):
    """One request through torch's convolution in fp64: outputs and the window after it."""
    whole = torch.cat([left, x]).double()
    if not len(x):
        return x.double(), whole
    y = F.conv1d(whole.t()[None], weight[:, None].double(), groups=weight.shape[0])[0].t()
    return F.silu(y), whole[len(x) :]


@pytest.mark.parametrize("name", ["plain", "shorter_than_kernel", "varlen_state", "bf16"])
@every_impl
def test_reproduces_golden_vectors(impl, name, load_golden, device):
    vectors = load_golden("short_conv")
    case = vectors.case(name)
    requests = len(case["cu_seqlens"]) - 1
    pool = torch.zeros(requests + 1, 3, case["x"].shape[1], dtype=case["x"].dtype)
    pool[1:] = case["initial_state"].mT
    pool = pool.to(device)
    x, weight = case["x"].to(device), case["weight"][:, 0].to(device)
    at = {"conv_state": pool, "slots": torch.arange(1, requests + 1, dtype=torch.int32, device=device)}
    run = able(impl, x, weight, **at, cu_seqlens=case["cu_seqlens"].to(device))
    y = run(x, weight, **at, cu_seqlens=case["cu_seqlens"].to(device))
    vectors.check(name, "y", y.cpu(), atol=5e-6)
    vectors.check(name, "state", pool[1:].mT.cpu(), atol=0.0, ulps=0)
    steps = [
        run(step.to(device), weight, **at, cu_seqlens=offsets([1] * requests).to(device)) for step in case["steps_x"]
    ]
    vectors.check(name, "steps_y", torch.stack(steps).cpu(), atol=5e-6)
    vectors.check(name, "state_after_steps", pool[1:].mT.cpu(), atol=0.0, ulps=0)


@pytest.mark.parametrize("width", [2, 4, 5])
@pytest.mark.parametrize("lengths", [[1, 1, 1], [2, 0, 1], [63, 0, 64, 3, 1]], ids=str)
@every_impl
def test_matches_torch_convolution(impl, lengths, width):
    x, weight, pool = conv_inputs(lengths, width=width)
    slots = torch.arange(1, len(lengths) + 1, dtype=torch.int32)
    got = pool.clone()
    arguments = {"conv_state": got, "slots": slots, "cu_seqlens": offsets(lengths)}
    y = able(impl, x, weight, **arguments)(x, weight, **arguments)
    for i, piece in enumerate(x.split(lengths)):
        want, window = by_torch(piece, weight, pool[i + 1])
        assert_close(f"y of request {i}", want, y.split(lengths)[i], tolerance("short_conv", F32))
        assert_close(f"window of request {i}", window, got[i + 1], ratio=0.0)


def test_stateless_call_has_zeros_on_the_left():
    x, weight, pool = conv_inputs([3, 0, 9])
    y = short_conv(x, weight, cu_seqlens=offsets([3, 0, 9]))
    for piece, got in zip(x.split([3, 0, 9]), y.split([3, 0, 9]), strict=True):
        want, _ = by_torch(piece, weight, torch.zeros_like(pool[0]))
        assert_close("y", want, got, tolerance("short_conv", F32))


def test_bf16_is_rounded_once():
    x, weight, pool = conv_inputs([40], dtype=BF16)
    y = short_conv(x, weight, conv_state=pool.clone(), slots=torch.tensor([1]), cu_seqlens=offsets([40]))
    want, _ = by_torch(x, weight, pool[1])
    assert y.dtype == BF16
    assert (y - want).abs().le(2**-8 * want.abs() + 1e-5).all()


def test_last_tap_multiplies_the_current_token():
    weight = torch.tensor([[0.0, 0.0, 0.0, 2.0]])
    x = torch.tensor([[1.0], [3.0]])
    assert_close("y", F.silu(2 * x), short_conv(x, weight, cu_seqlens=offsets([2])), tolerance("short_conv", F32))


@pytest.mark.parametrize("cuts", [[1] * 9, [2, 3, 4], [8, 1]], ids=str)
@every_impl
def test_prefill_in_pieces_equals_one_pass(impl, cuts):
    x, weight, pool = conv_inputs([9])
    slot = torch.tensor([1], dtype=torch.int32)
    whole, pieces = pool.clone(), pool.clone()
    run = able(impl, x, weight, conv_state=whole, slots=slot, cu_seqlens=offsets([9]))
    want = run(x, weight, conv_state=whole, slots=slot, cu_seqlens=offsets([9]))
    got = [run(p, weight, conv_state=pieces, slots=slot, cu_seqlens=offsets([len(p)])) for p in x.split(cuts)]
    assert_close("y", want, torch.cat(got), tolerance("short_conv", F32))
    assert pieces.equal(whole)


@pytest.mark.parametrize("lengths", [[1, 1, 1], [5, 2, 7]], ids=str)
@every_impl
def test_negative_slot_gives_zeros_and_writes_nothing(impl, lengths):
    x, weight, pool = conv_inputs(lengths, rows=5)
    got = pool.clone()
    at = {"conv_state": got, "slots": torch.tensor([3, -1, 4], dtype=torch.int32), "cu_seqlens": offsets(lengths)}
    y = able(impl, x, weight, **at)(x, weight, **at)
    assert y.split(lengths)[1].eq(0).all()
    assert got[:3].equal(pool[:3])
    want, window = by_torch(x[: lengths[0]], weight, pool[3])
    assert_close("y", want, y[: lengths[0]], tolerance("short_conv", F32))
    assert_close("window", window, got[3], ratio=0.0)


@pytest.mark.parametrize("lengths", [[1, 1], [5, 2]], ids=str)
@every_impl
def test_null_slot_reads_as_zero_and_stays_finite(impl, lengths):
    x, weight, pool = conv_inputs(lengths, rows=3)
    got = pool.clone()
    at = {"conv_state": got, "slots": torch.tensor([0, 0], dtype=torch.int32), "cu_seqlens": offsets(lengths)}
    y = able(impl, x, weight, **at)(x, weight, **at)
    assert_close("y", short_conv(x, weight, cu_seqlens=offsets(lengths)), y, tolerance("short_conv", F32))
    assert got.isfinite().all()
    assert got[1:].equal(pool[1:])


def test_slot_past_the_end_raises_before_any_write():
    x, weight, pool = conv_inputs([1, 1], rows=5)
    got = pool.clone()
    with pytest.raises(ConfigError, match="slot 5 is past the end"):
        short_conv(x, weight, conv_state=got, slots=torch.tensor([1, 5]), cu_seqlens=offsets([1, 1]))
    assert got.equal(pool)


def test_scattered_slots_leave_the_others_alone():
    x, weight, pool = conv_inputs([1, 1, 1], rows=9)
    got = pool.clone()
    y = short_conv(x, weight, conv_state=got, slots=torch.tensor([7, 2, 5]), cu_seqlens=offsets([1, 1, 1]))
    for i, slot in enumerate([7, 2, 5]):
        want, window = by_torch(x[i : i + 1], weight, pool[slot])
        assert_close("y", want, y[i : i + 1], tolerance("short_conv", F32))
        assert_close("window", window, got[slot], ratio=0.0)
    others = [0, 1, 3, 4, 6, 8]
    assert got[others].equal(pool[others])


@pytest.mark.parametrize("lengths", [[130, 64, 7], [1, 1, 1]], ids=str)
@every_impl
def test_interior_windows_equal_shorter_prefills(impl, lengths):
    x, weight, pool = conv_inputs(lengths, rows=12)
    wanted = [(0, 1, 4), (0, 2, 5), (0, 64, 6), (0, 130, 7), (2, 3, 8), (1, 63, 9), (2, 1, 10)]
    wanted = [w for w in wanted if w[1] <= lengths[w[0]]]
    requests, places, slots = zip(*wanted, strict=True)
    got = pool.clone()
    at = {
        "conv_state": got,
        "slots": torch.tensor([1, 2, 3], dtype=torch.int32),
        "cu_seqlens": offsets(lengths),
        "saves": StateSaves(requests, places, torch.tensor(slots, dtype=torch.int32)),
    }
    able(impl, x, weight, **at)(x, weight, **at)
    for request, length, slot in wanted:
        _, window = by_torch(x.split(lengths)[request][:length], weight, pool[request + 1])
        assert_close(f"window after {length}", window, got[slot], ratio=0.0)


@every_impl
def test_is_bitwise_repeatable(impl):
    lengths = [5, 1, 1, 193, 1]
    x, weight, pool = conv_inputs(lengths)
    slots = torch.arange(1, 6, dtype=torch.int32)
    results = []
    for _ in range(5):
        state = pool.clone()
        at = {"conv_state": state, "slots": slots, "cu_seqlens": offsets(lengths)}
        results.append((able(impl, x, weight, **at)(x, weight, **at), state))
    assert all(y.equal(results[0][0]) and state.equal(results[0][1]) for y, state in results)


@pytest.mark.parametrize(("what", "message"), [("x", "x has shape"), ("conv_state", "conv_state has rows")])
def test_wrong_shapes_are_refused_before_any_write(what, message):
    x, weight, pool = conv_inputs([4])
    given = {"x": x, "conv_state": pool}
    given[what] = given[what][..., :-1].contiguous()
    before = given["conv_state"].clone()
    with pytest.raises(ConfigError, match=message):
        short_conv(given["x"], weight, conv_state=given["conv_state"], slots=torch.tensor([1]), cu_seqlens=offsets([4]))
    assert given["conv_state"].equal(before)


@pytest.mark.parametrize("lengths", [[5, 0, 2], [1, 1]], ids=str)
def test_gradients_reach_inputs_weights_and_the_state(lengths):
    x, weight, pool = conv_inputs(lengths, channels=2, dtype=F64)
    slots = torch.arange(1, len(lengths) + 1)

    def call(x, weight, initial):
        state = initial.clone()
        return short_conv(x, weight, conv_state=state, slots=slots, cu_seqlens=offsets(lengths)), state[1:]

    leaves = [t.requires_grad_() for t in (x, weight, pool)]
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)
