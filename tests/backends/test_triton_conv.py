"""The short convolution in Triton against the reference.

Shapes: T packed tokens, C channels, W width, N pool rows.
"""

from itertools import accumulate

import pytest
import torch

from k3lib.backends.triton.conv import short_conv_triton
from k3lib.batch import StateSaves
from k3lib.errors import ConfigError
from k3lib.ops import short_conv
from k3lib.testing import assert_close, tolerance

CUDA = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])]
ROWS = 12


def make(device, lengths, slots, *, channels=24, width=4, dtype=torch.float32, strided=False):
    x = torch.randn(sum(lengths), channels + 3)[:, :channels]
    x = (x if strided else x.contiguous()).to(dtype)
    if strided:
        x = torch.cat([x, torch.full((len(x), 5), torch.nan, dtype=dtype)], 1).to(device)[:, :channels]
    return x.to(device), {
        "weight": torch.randn(channels, width).to(device),
        "conv_state": torch.randn(ROWS, width - 1, channels).to(dtype).to(device),
        "slots": torch.tensor(slots, dtype=torch.int32).to(device),
        "cu_seqlens": torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device),
    }


def compare(device, lengths, slots, saves=None, **facts):
    x, keywords = make(device, lengths, slots, **facts)
    window = keywords.pop("conv_state")
    want_window, got_window = window.clone(), window.clone()
    want = short_conv.reference(x, **keywords, conv_state=want_window, saves=saves)
    got = short_conv_triton(x, **keywords, conv_state=got_window, saves=saves)
    assert_close("out", want, got, tolerance("short_conv", x.dtype))
    assert got.dtype == x.dtype
    assert got_window[1:].equal(want_window[1:])
    assert got_window.isfinite().all()


@pytest.mark.parametrize(
    ("lengths", "slots"),
    [
        ([1, 1, 1], [3, 0, 5]),
        ([2, 0, 1], [1, 2, -1]),
        ([3, 0, 4, 1, 2, 9], [1, 2, 3, 4, 0, -1]),
        ([63, 0, 64, 1, 2, 65], [6, 5, 4, 3, 2, 1]),
        ([40], [7]),
        ([40, 40], [-1, 2]),
        ([9] * 10, list(range(1, 11))),
    ],
    ids=str,
)
def test_matches_reference(device, lengths, slots):
    compare(device, lengths, slots)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [[1, 1], [33, 40]], ids=str)
def test_dtypes(device, lengths, dtype):
    compare(device, lengths, [2, 5], dtype=dtype, channels=4608 if CUDA else 40)


@pytest.mark.parametrize("width", [2, 5])
@pytest.mark.parametrize("lengths", [[1, 1], [3, 40]], ids=str)
def test_other_widths(device, lengths, width):
    compare(device, lengths, [2, 5], width=width)


@pytest.mark.parametrize("lengths", [[1, 1], [3, 40]], ids=str)
def test_part_of_a_projection(device, lengths):
    compare(device, lengths, [2, 5], strided=True)


@pytest.mark.parametrize("lengths", [[2, 1, 0], [40, 3, 0]], ids=str)
def test_saves_windows_inside_the_call(device, lengths):
    slots = torch.tensor([9, 10, 11, 0, -1], dtype=torch.int32).to(device)
    saves = StateSaves((1, 0, 0, 0, 1), (1, 1, lengths[0], 2, 1), slots)
    compare(device, lengths, [1, 2, 3], saves=saves)


@pytest.mark.parametrize("lengths", [[1, 2], [40, 3, 0, 64]], ids=str)
def test_stateless_call_has_zeros_on_the_left(device, lengths):
    x, keywords = make(device, lengths, [1] * len(lengths))
    keywords = {**keywords, "conv_state": None, "slots": None}
    assert_close("out", short_conv.reference(x, **keywords), short_conv_triton(x, **keywords), 1e-6)


@pytest.mark.parametrize("lengths", [[1, 1], [40, 2]], ids=str)
@pytest.mark.parametrize("slot", [-1, ROWS, 10**6])
def test_a_slot_outside_the_pool_gives_zeros_and_writes_nothing(device, lengths, slot):
    x, keywords = make(device, lengths, [slot, 3])
    before = keywords["conv_state"].clone()
    out = short_conv_triton(x, **keywords)
    assert out[: lengths[0]].eq(0).all()
    others = [row for row in range(ROWS) if row != 3]
    assert keywords["conv_state"][others].equal(before[others])


def test_more_requests_than_are_compared_at_once(device):
    lengths = [10, *[0] * 150, 70, *[2] * 3]
    slots = [1, *[-1] * 150, 2, 3, 4, 0]
    compare(device, lengths, slots)


def test_same_bits_twice_and_in_any_batch(device):
    x, keywords = make(device, [5, 70], [1, 2])
    runs = []
    for _ in range(2):
        window = keywords["conv_state"].clone()
        runs.append((short_conv_triton(x, **{**keywords, "conv_state": window}), window))
    assert runs[0][0].equal(runs[1][0])
    assert runs[0][1].equal(runs[1][1])
    keywords["slots"], keywords["cu_seqlens"] = keywords["slots"][1:], keywords["cu_seqlens"][[0, 2]] - 5
    keywords["cu_seqlens"][0] = 0
    assert short_conv_triton(x[5:], **keywords).equal(runs[0][0][5:])


def test_calls_without_tokens(device):
    for lengths, slots in (([], []), ([0, 0], [1, 2])):
        x, keywords = make(device, lengths, slots)
        before = keywords["conv_state"].clone()
        assert short_conv_triton(x, **keywords).shape == (0, 24)
        assert keywords["conv_state"].equal(before)


def test_refuses_what_does_not_fit(device):
    x, keywords = make(device, [2, 5], [1, 2])
    pool = keywords["conv_state"]
    for change, message in [
        ({"x": x[:, 1:]}, r"weight needs \[T, 24\]"),
        ({"conv_state": pool[:, 1:]}, "conv_state has rows"),
        ({"conv_state": torch.cat([pool, pool], 2)[:, :, :24]}, "expected a contiguous pool"),
        ({"slots": None}, "must be given together"),
        ({"slots": keywords["slots"][:1]}, "1 slots for 2 requests"),
        ({"cu_seqlens": keywords["cu_seqlens"].float()}, "1-D integer tensor"),
        ({"conv_state": None, "slots": None, "saves": StateSaves((0,), (1,), torch.tensor([5]))}, "need a state pool"),
    ]:
        with pytest.raises(ConfigError, match=message):
            short_conv_triton(**{"x": x, **keywords, **change})


@pytest.mark.skipif(not CUDA, reason="needs a GPU: the interpreter compiles nothing")
def test_other_lengths_compile_nothing(device):
    from k3lib.backends.triton import conv_kernels  # noqa: PLC0415 - after the interpreter has been chosen

    def compiled():
        return [len(cache[0]) for cache in conv_kernels._conv_kernel.device_caches.values()]

    counts = []
    for lengths in ([32, 33], [16, 1, 100], [640], [1] + [48] * 9):
        compare(device, lengths, list(range(1, len(lengths) + 1)))
        counts.append(compiled())
    assert counts[1:] == counts[:-1]
