"""Few-token KDA in Triton against the reference.

Shapes: T packed tokens, H heads, K key dim, V value dim, N pool rows.
"""

from itertools import accumulate

import pytest
import torch

from k3lib.backends.triton.kda_decode import kda_mixer_triton, kda_recurrent_triton
from k3lib.batch import StateSaves
from k3lib.errors import ConfigError
from k3lib.ops import KDAParams, KDASpec, implementations, kda_mixer, kda_recurrent, use_backend
from k3lib.testing import assert_close, tolerance

CUDA = torch.cuda.is_available()
F32 = torch.float32
DTYPES = [F32, torch.float16, *([torch.bfloat16] if CUDA else [])]
ROWS = 7


def make(
    device, lengths, slots, *, heads=2, key_dim=8, value_dim=6, dtype=F32, state_dtype=F32, bound=-5.0, width=4,
    strided=False,
):  # fmt: skip
    """Inputs of the mixer; those of the recurrence stand beside them."""
    tokens, channels = sum(lengths), heads * (2 * key_dim + value_dim)

    def draw(*shape):
        x = torch.randn(*shape)
        if strided:  # as the parts of one projection are
            x = torch.cat([x.flatten(1), torch.full((len(x), 5), torch.nan)], 1)
            x = x[:, :-5].unflatten(1, shape[1:]) if len(shape) > 2 else x[:, :-5]
        return x.to(dtype).to(device)

    inputs = {
        "qkv": draw(tokens, channels),
        "gate": draw(tokens, heads, key_dim),
        "beta": draw(tokens, heads),
        "out_gate": draw(tokens, heads, value_dim),
    }
    vectors = {
        "q": draw(tokens, heads, key_dim),
        "k": draw(tokens, heads, key_dim),
        "v": draw(tokens, heads, value_dim),
    }
    layer = {
        "conv_weight": torch.randn(channels, width).to(device),
        "norm_weight": torch.randn(value_dim).to(device),
        "norm_eps": 1e-5,
    }
    common = {
        "params": KDAParams(torch.randn(heads).to(device), torch.randn(heads, key_dim).to(device), bound),
        "slots": torch.tensor(slots, dtype=torch.int32).to(device),
        "cu_seqlens": torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device),
        "scale": key_dim**-0.5,
    }
    state = torch.randn(ROWS, heads, value_dim, key_dim).to(state_dtype).to(device)
    conv_state = torch.randn(ROWS, width - 1, channels).to(dtype).to(device)
    return inputs, vectors, layer, common, state, conv_state


def wide(tensors):
    return {name: x.float() for name, x in tensors.items()}


def check_mixer(device, lengths, slots, **facts):
    inputs, _, layer, common, state, conv_state = make(device, lengths, slots, **facts)
    dtype = inputs["qkv"].dtype
    want_state, want_conv = state.float(), conv_state.float()
    got_state, got_conv = state.clone(), conv_state.clone()
    with use_backend("reference"):
        want = kda_mixer.reference(**wide(inputs), **layer, **common, state=want_state, conv_state=want_conv)
    got = kda_mixer_triton(**inputs, **layer, **common, state=got_state, conv_state=got_conv)
    assert_close("out", want, got, tolerance("kda_mixer", dtype))
    assert got.dtype == dtype
    # row 0 may hold anything finite
    narrow = min((dtype, state.dtype), key=lambda d: torch.finfo(d).bits)
    assert_close("state", want_state[1:], got_state[1:], tolerance("kda_mixer", narrow))
    assert got_conv[1:].float().equal(want_conv[1:])
    assert got_state.isfinite().all()
    assert got_conv.isfinite().all()
    untouched = sorted(set(range(1, ROWS)) - set(slots))
    assert got_state[untouched].equal(state[untouched])


def check_recurrent(device, lengths, slots, saves=None, **facts):
    _, vectors, _, common, state, _ = make(device, lengths, slots, **facts)
    inputs, *_ = make(device, lengths, slots, **facts)
    gates = {"gate": inputs["gate"], "beta": inputs["beta"]}
    dtype = vectors["v"].dtype
    want_state, got_state = state.float(), state.clone()
    want = kda_recurrent.reference(**wide(vectors), **wide(gates), **common, state=want_state, saves=saves)
    got = kda_recurrent_triton(**vectors, **gates, **common, state=got_state, saves=saves)
    assert_close("out", want, got, tolerance("kda_recurrent", dtype))
    narrow = min((dtype, state.dtype), key=lambda d: torch.finfo(d).bits)
    assert_close("state", want_state[1:], got_state[1:], tolerance("kda_recurrent", narrow))
    assert got_state.isfinite().all()


CASES = [
    ([1], [3]),
    ([1, 1, 1], [2, 6, 1]),
    ([1, 1, 1, 1], [0, 4, -1, 0]),
    ([2, 0, 1, 1], [1, 2, 0, 5]),
    ([0, 3, 0], [2, 4, 1]),
    ([1, 2, 1], [-2, -1, 99]),
]
SHAPES = [{"heads": 3}, {"key_dim": 6, "value_dim": 9}, {"heads": 1, "key_dim": 48, "value_dim": 40}]
REAL = [{"heads": 12, "key_dim": 128, "value_dim": 128}] if CUDA else []


@pytest.mark.parametrize(("lengths", "slots"), CASES, ids=str)
@pytest.mark.parametrize("check", [check_mixer, check_recurrent])
def test_matches_reference(device, check, lengths, slots):
    if max(slots) >= ROWS:  # past the end: harmless here, refused by the reference
        slots = [slot if slot < ROWS else -1 for slot in slots]
    check(device, lengths, slots)


@pytest.mark.parametrize("facts", [*SHAPES, *REAL], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("check", [check_mixer, check_recurrent])
def test_shapes_and_dtypes(device, check, dtype, facts):
    check(device, [1, 1], [5, 2], dtype=dtype, **facts)


@pytest.mark.parametrize("state_dtype", [torch.float16, *([torch.bfloat16] if CUDA else [])], ids=str)
@pytest.mark.parametrize("check", [check_mixer, check_recurrent])
def test_narrow_state(device, check, state_dtype):
    check(device, [1, 1], [1, 2], state_dtype=state_dtype)


@pytest.mark.parametrize("check", [check_mixer, check_recurrent])
def test_softplus_gate(device, check):
    check(device, [1, 1], [1, 2], bound=None)


@pytest.mark.parametrize("check", [check_mixer, check_recurrent])
def test_parts_of_one_projection(device, check):
    check(device, [1, 1, 1], [3, 1, 2], strided=True)


@pytest.mark.parametrize("width", [2, 5])
def test_other_widths(device, width):
    check_mixer(device, [1, 1], [4, 2], width=width)
    check_mixer(device, [3, 0], [4, 2], width=width)


@pytest.mark.parametrize("lengths", [[5, 0, 8, 1], [16]], ids=str)
def test_several_tokens(device, lengths):
    check_recurrent(device, lengths, [3, 1, 2, 4][: len(lengths)])


def test_saves_states_inside_the_call(device):
    slots = torch.tensor([5, 6, 0, -1], dtype=torch.int32).to(device)
    check_recurrent(device, [4, 3], [1, 2], saves=StateSaves((1, 0, 0, 1), (3, 2, 4, 1), slots))


@pytest.mark.parametrize("slot", [-1, -7, ROWS, 10**6])
def test_a_slot_outside_the_pool_reads_zero_and_writes_nothing(device, slot):
    inputs, vectors, layer, common, state, conv_state = make(device, [1, 2], [slot, 3])
    kept, kept_conv = state.clone(), conv_state.clone()
    out = kda_mixer_triton(**inputs, **layer, **common, state=state, conv_state=conv_state)
    assert out[0].eq(0).all()
    assert out[1:].ne(0).any()
    others = [0, 1, 2, 4, 5, 6]
    assert state[others].equal(kept[others])
    assert conv_state[others].equal(kept_conv[others])
    out = kda_recurrent_triton(**vectors, gate=inputs["gate"], beta=inputs["beta"], **common, state=state.copy_(kept))
    assert out[0].eq(0).all()
    assert state[others].equal(kept[others])


def test_null_slot_starts_from_zero(device):
    inputs, vectors, layer, common, state, conv_state = make(device, [1, 1], [0, 0])
    state[0], conv_state[0] = 1e30, 1e30  # finite, and no one's
    got = kda_mixer_triton(**inputs, **layer, **common, state=state, conv_state=conv_state)
    fresh = {**common, "slots": None}
    assert_close("out", kda_mixer_triton(**inputs, **layer, **fresh), got, 0.0)
    want = kda_mixer.reference(**inputs, **layer, **fresh)
    assert_close("out", want, got, tolerance("kda_mixer", F32))
    got = kda_recurrent_triton(**vectors, gate=inputs["gate"], beta=inputs["beta"], **fresh)
    want = kda_recurrent.reference(**vectors, gate=inputs["gate"], beta=inputs["beta"], **fresh)
    assert_close("out", want, got, tolerance("kda_recurrent", F32))


@pytest.mark.parametrize("size", [0.0, 30.0])
def test_extreme_inputs(device, size):
    """Vectors of zeros, and gates at both ends: decay 1 and e^-5, write 0 and 1."""
    inputs, _, layer, common, state, conv_state = make(device, [1, 1], [1, 2])
    inputs["gate"] = inputs["gate"].sign() * 1e4
    inputs["beta"] = inputs["beta"].sign() * 1e3
    inputs["qkv"] = inputs["qkv"] * size
    mine, mine_conv = state.clone(), conv_state.clone()
    with use_backend("reference"):
        want = kda_mixer.reference(**inputs, **layer, **common, state=state, conv_state=conv_state)
    got = kda_mixer_triton(**inputs, **layer, **common, state=mine, conv_state=mine_conv)
    assert_close("out", want, got, tolerance("kda_mixer", F32))
    assert_close("state", state[1:], mine[1:], tolerance("kda_mixer", F32))


def test_same_bits_twice_and_in_any_batch(device):
    facts = {"heads": 2, "key_dim": 16, "value_dim": 40}
    inputs, _, layer, common, state, conv_state = make(device, [1, 1, 1], [4, 2, 5], **facts)
    outs, states = [], []
    for _ in range(2):
        states.append(state.clone())
        outs.append(kda_mixer_triton(**inputs, **layer, **common, state=states[-1], conv_state=conv_state.clone()))
    assert outs[0].equal(outs[1])
    assert states[0].equal(states[1])
    common["slots"], common["cu_seqlens"] = common["slots"][1:2], common["cu_seqlens"][:2]
    alone = {name: x[1:2] for name, x in inputs.items()}
    out = kda_mixer_triton(**alone, **layer, **common, state=state, conv_state=conv_state)
    assert out.equal(outs[0][1:2])
    assert state[2].equal(states[0][2])


def test_calls_without_tokens(device):
    for lengths, slots in (([], []), ([0, 0], [1, 2])):
        inputs, vectors, layer, common, state, conv_state = make(device, lengths, slots)
        before = state.clone()
        assert kda_mixer_triton(**inputs, **layer, **common, state=state, conv_state=conv_state).shape == (0, 2, 6)
        out = kda_recurrent_triton(**vectors, gate=inputs["gate"], beta=inputs["beta"], **common, state=state)
        assert out.shape == (0, 2, 6)
        assert state.equal(before)


def test_refuses_what_does_not_fit(device):
    inputs, vectors, layer, common, state, conv_state = make(device, [1, 1], [1, 2])
    before = state.clone()
    for change, message in [
        ({"conv_state": conv_state[:-1]}, "state has 7 rows, conv_state has 6"),
        ({"state": state.transpose(2, 3)}, r"expected \[H, V, K\]"),
        ({"state": state.double()[..., ::2].repeat(1, 1, 1, 2)[..., ::1].float().mT.contiguous().mT}, "contiguous"),
        ({"conv_state": None}, "must be given together"),
        ({"slots": common["slots"][:1]}, "1 slots for 2 requests"),
        ({"beta": inputs["beta"][:, :1]}, "beta has shape"),
        ({"norm_weight": layer["norm_weight"][:-1]}, "norm_weight has shape"),
        ({"qkv": inputs["qkv"][:, 1:]}, "channels, expected"),
    ]:
        arguments = {**inputs, **layer, **common, "state": state, "conv_state": conv_state, **change}
        with pytest.raises(ConfigError, match=message):
            kda_mixer_triton(**arguments)
    saves = StateSaves((2,), (1,), torch.tensor([5]))
    with pytest.raises(ConfigError, match="request 2 is not among 2"):
        kda_recurrent_triton(**vectors, gate=inputs["gate"], beta=inputs["beta"], **common, state=state, saves=saves)
    assert state.equal(before)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"tokens_per_request": "many"}, "needs one token a request, got many"),
        ({"saves": "any"}, "needs saves=none, got saves=any"),
        ({"verify": "replay", "tokens_per_request": "many"}, None),
        ({"verify": "states", "saves": "any"}, "needs saves=none, got saves=any"),
        ({"dtype": torch.float64}, "needs bfloat16, float16 or float32, got torch.float64"),
        ({"key_dim": 512}, "needs key_dim and value_dim of at most 256, got 512 and 128"),
    ],
    ids=str,
)
def test_declines_with_a_reason(change, reason):
    facts = {
        "heads": 12, "key_dim": 128, "value_dim": 128, "dtype": torch.bfloat16, "state_dtype": F32,
        "tokens_per_request": "1", **change,
    }  # fmt: skip
    mixer = next(impl for impl in implementations(kda_mixer) if impl.name == "triton")
    assert mixer.supports(KDASpec(**facts)) == reason


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_replays_in_a_graph(device):
    facts = {"heads": 12, "key_dim": 128, "value_dim": 128, "dtype": torch.bfloat16}
    inputs, _, layer, common, state, conv_state = make(device, [1, 1, 1], [4, 2, 0], **facts)
    eager, eager_conv = state.clone(), conv_state.clone()
    want = [kda_mixer_triton(**inputs, **layer, **common, state=eager, conv_state=eager_conv) for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = kda_mixer_triton(**inputs, **layer, **common, state=state, conv_state=conv_state)
    for each in want:
        graph.replay()
        assert got.equal(each)
    assert state.equal(eager)
    assert conv_state.equal(eager_conv)
