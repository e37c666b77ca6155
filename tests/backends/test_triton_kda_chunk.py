"""KDA prefill kernels against the reference in double precision: packing, slots, saves, segments, extreme data."""

import dataclasses
import math
from itertools import accumulate

import pytest
import torch

from k3lib.backends.triton import kda_chunk as kda_chunk_host
from k3lib.backends.triton.kda_chunk import kda_chunk_triton, kda_chunk_triton_unsplit
from k3lib.batch import StateSaves
from k3lib.errors import ConfigError
from k3lib.ops import KDAParams, KDASpec, kda_chunk
from k3lib.testing import assert_close, tolerance

pytest.importorskip("triton")

F16, F32, F64, BF16 = torch.float16, torch.float32, torch.float64, torch.bfloat16
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DTYPES = [F16, F32, pytest.param(BF16, marks=on_gpu)]
FORMS = [pytest.param(kda_chunk_triton, id="split"), pytest.param(kda_chunk_triton_unsplit, id="unsplit")]


def on(device):
    return F32 if device.type == "cpu" else BF16


@dataclasses.dataclass
class Case:
    """One call; `run` and `want` work on copies of the pool and return the output and the copy."""

    inputs: dict
    params: KDAParams
    lengths: list
    state: torch.Tensor | None
    slots: torch.Tensor | None
    saves: StateSaves | None = None

    def arguments(self, state):
        device = self.inputs["v"].device
        cu_seqlens = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=device)
        return {
            **self.inputs, "params": self.params, "state": state, "slots": self.slots, "cu_seqlens": cu_seqlens,
            "scale": self.inputs["q"].shape[-1] ** -0.5, "saves": self.saves,
        }  # fmt: skip

    def run(self, form=kda_chunk_triton):
        state = None if self.state is None else self.state.clone()
        return form(**self.arguments(state)), state

    def want(self):
        """The reference on the same numbers in double precision."""
        state = None if self.state is None else self.state.double()
        wide = {name: x.double() for name, x in self.inputs.items()}
        params = KDAParams(self.params.A_log.double(), self.params.dt_bias.double(), self.params.lower_bound)
        return kda_chunk.reference(**{**self.arguments(state), **wide, "params": params}), state

    def check(self, form=kda_chunk_triton):
        out, state = self.run(form)
        want, want_state = self.want()
        dtype = self.inputs["v"].dtype
        assert out.dtype == dtype
        assert_close("out", want, out, tolerance("kda_chunk", dtype))
        if state is not None:
            assert_close("state", want_state, state, tolerance("kda_chunk", narrower(dtype, state.dtype)))
        return out, state


def narrower(a, b):
    return max(a, b, key=lambda dtype: tolerance("kda_chunk", dtype))


def make(device, lengths, *, heads=None, key_dim=16, value_dim=32, dtype=None, bound=-5.0, slots=None, rows=None,
         state_dtype=F32, seed=0):  # fmt: skip
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, dtype=F32):
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    tokens, dtype = sum(lengths), dtype or on(device)
    heads = heads or (1 if device.type == "cpu" else 2)  # the interpreter takes its time for each
    slots = list(range(len(lengths), 0, -1)) if slots is None else slots
    inputs = {name: draw(tokens, heads, key_dim, dtype=dtype) for name in ("q", "k", "gate")}
    inputs |= {"v": draw(tokens, heads, value_dim, dtype=dtype), "beta": draw(tokens, heads, dtype=dtype)}
    params = KDAParams(draw(heads), draw(heads, key_dim) - 2, bound)
    state = draw(max([0, *slots]) + 1 if rows is None else rows, heads, value_dim, key_dim, dtype=state_dtype)
    return Case(inputs, params, list(lengths), state, torch.tensor(slots, dtype=torch.int32, device=device))


def save(device, wanted):
    requests, offsets, slots = zip(*wanted, strict=True)
    return StateSaves(requests, offsets, torch.tensor(slots, dtype=torch.int32, device=device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [[1], [33, 0, 1, 64]], ids=str)
def test_matches_the_reference(device, lengths, dtype):
    make(device, lengths, heads=2, dtype=dtype).check()


@pytest.mark.parametrize("gate", [None, 1e4, -1e4], ids=["any", "bound", "none"])
def test_chunks_of_two_blocks(device, gate, monkeypatch):
    """The chunks of bfloat16, in float32: half of one forgets e^80 at the bound."""
    monkeypatch.setitem(kda_chunk_host._CONFIGS, "wide", kda_chunk_host._CONFIGS["wide"]._replace(chunk=32))
    case = make(device, [70, 31], heads=1, dtype=F32)
    if gate is not None:
        case.inputs["gate"].fill_(gate)
    if gate == -1e4:
        case.inputs["k"].copy_(case.inputs["k"][:1].expand_as(case.inputs["k"]) * 1.0)
        case.inputs["beta"].fill_(8.0)
    case.check()


@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 16), (64, 16), (32, 128), (256, 64)])
def test_key_and_value_widths_may_differ(device, key_dim, value_dim):
    make(device, [40], heads=1, key_dim=key_dim, value_dim=value_dim).check()


@pytest.fixture
def short_segments(device, monkeypatch):
    """In the interpreter half as many chunks make a segment."""
    if device.type == "cpu":
        monkeypatch.setattr(kda_chunk_host, "_MIN_CHUNKS", 2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("short_segments")
def test_a_long_request_in_segments_equals_one_chain(device, form):
    tokens = 267 if device.type == "cpu" else 4111
    case = make(device, [tokens], heads=1, key_dim=16, value_dim=16)
    case.check(form)


@pytest.mark.again
@pytest.mark.usefixtures("short_segments")
def test_requests_that_fill_fewer_segments_than_their_neighbours(device):
    lengths = [500, 40] if device.type == "cpu" else [5000, 100, 0, 1, 3000]
    make(device, lengths, heads=1, key_dim=16, value_dim=16).check()


@pytest.mark.parametrize("state_dtype", [F32, BF16], ids=str)
def test_state_is_read_and_written_in_its_dtype(device, state_dtype):
    make(device, [35, 2], state_dtype=state_dtype).check()


def test_stateless_call_starts_from_zero(device):
    case = make(device, [35, 2])
    case.state.zero_()
    want, _ = case.run()
    got, _ = dataclasses.replace(case, state=None, slots=None).run()
    assert got.equal(want)
    dataclasses.replace(case, state=None, slots=None).check()


def test_null_and_negative_slots(device):
    case = make(device, [20, 20, 20], rows=5, slots=[0, -1, 3])
    out, state = case.run()
    assert out[20:40].eq(0).all()
    assert [row for row in range(5) if not state[row].equal(case.state[row])] == [3]
    want, _ = dataclasses.replace(case, slots=torch.tensor([0, 4, 3], dtype=torch.int32, device=device)).want()
    dtype = case.inputs["v"].dtype
    assert_close("null slot", want[:20], out[:20], tolerance("kda_chunk", dtype))
    assert_close("after", want[40:], out[40:], tolerance("kda_chunk", dtype))


def test_slots_past_the_pool_are_not_followed(device):
    case = make(device, [20, 20], rows=3, slots=[1, 77])
    out, state = case.run()
    assert out.isfinite().all()
    assert state[2].equal(case.state[2])


@pytest.mark.parametrize("form", FORMS)
def test_interior_states(device, form):
    case = make(device, [70, 9, 33], heads=1, rows=12)
    case.saves = save(device, [(2, 33, 4), (0, 69, 5), (0, 1, 6), (0, 64, 7), (1, 4, 0), (1, 5, -1)])
    case.check(form)


def test_two_saves_at_one_place(device):
    case = make(device, [40], rows=5)
    case.saves = save(device, [(0, 32, 2), (0, 32, 3), (0, 40, 4)])
    _, state = case.run()
    assert state[2].equal(state[3])
    assert state[4].equal(state[1])
    case.saves = save(device, [(0, 32, 2), (0, 40, 4)])
    state[3] = case.state[3]
    _, want = case.want()
    assert_close("state", want, state, tolerance("kda_chunk", case.inputs["v"].dtype))


def test_an_empty_call_keeps_every_state(device):
    for lengths in ([0, 0], []):
        case = make(device, lengths, heads=2, rows=3)
        out, state = case.run()
        assert out.shape == (0, 2, 32)
        assert state.equal(case.state)


def test_two_calls_continue_one(device):
    case = make(device, [77])
    want, want_state = case.want()
    state, outs = case.state.clone(), []
    for begin, end in ((0, 41), (41, 77)):
        inputs = {n: x[begin:end] for n, x in case.inputs.items()}
        part = dataclasses.replace(case, inputs=inputs, lengths=[end - begin])
        outs.append(kda_chunk_triton(**part.arguments(state)))
    dtype = case.inputs["v"].dtype
    assert_close("out", want, torch.cat(outs), tolerance("kda_chunk", dtype))
    assert_close("state", want_state, state, tolerance("kda_chunk", dtype))


def test_rows_beyond_the_tokens_are_not_read(device):
    case = make(device, [35, 6])
    want, want_state = case.run()
    poisoned = {n: torch.cat([x, torch.full_like(x[:30], math.nan)])[: len(x)] for n, x in case.inputs.items()}
    out, state = dataclasses.replace(case, inputs=poisoned).run()
    assert out.equal(want)
    assert state.equal(want_state)


def test_views_of_a_wider_projection(device):
    heads, dim = 2, 32
    case = make(device, [35], heads=heads, key_dim=dim, value_dim=dim)
    joined = torch.cat([case.inputs[n].flatten(1) for n in ("q", "k", "v")], dim=1)
    views = [x.view(35, heads, dim) for x in joined.split(heads * dim, dim=1)]
    want, _ = case.run()
    got, _ = dataclasses.replace(case, inputs={**case.inputs, **dict(zip(("q", "k", "v"), views, strict=True))}).run()
    assert got.equal(want)


def test_the_same_bits_twice(device):
    lengths, heads = ([130, 7], 1) if device.type == "cpu" else ([5000, 70], 3)
    case = make(device, lengths, heads=heads)
    (out, state), (again, state_again) = case.run(), case.run()
    assert out.equal(again)
    assert state.equal(state_again)


def test_unsplit_bits_do_not_depend_on_the_batch(device):
    case = make(device, [66, 35])
    out, state = case.run(kda_chunk_triton_unsplit)
    alone = dataclasses.replace(
        case, inputs={n: x[:66] for n, x in case.inputs.items()}, lengths=[66], slots=case.slots[:1]
    )
    want, want_state = alone.run(kda_chunk_triton_unsplit)
    assert out[:66].equal(want)
    assert state[case.slots[0]].equal(want_state[case.slots[0]])


def test_decay_at_the_bound_on_every_channel(device):
    case = make(device, [130])
    case.inputs["gate"].fill_(1e4)
    case.check()


def test_channels_that_forget_at_once_beside_channels_that_keep(device):
    case = make(device, [130])
    case.params.A_log.fill_(5.0)
    case.params.dt_bias.zero_()
    case.inputs["gate"].copy_(torch.where(case.inputs["gate"] > 0.5, 50.0, -10.0))
    case.check()


def test_collinear_keys_without_decay(device):
    case = make(device, [130], heads=1, value_dim=16)
    case.inputs["k"].copy_(case.inputs["k"][:1].expand_as(case.inputs["k"]) * 1.0)
    case.inputs["gate"].fill_(-1e4)
    case.inputs["beta"].fill_(8.0)
    case.check()


def test_alternating_keys_without_decay(device):
    case = make(device, [130], heads=1, value_dim=16)
    sign = torch.tensor([1.0, -1.0], device=device).repeat(65)[:, None, None]
    case.inputs["k"].copy_(case.inputs["k"][:1] * sign)
    case.inputs["gate"].fill_(-1e4)
    case.inputs["beta"].fill_(8.0)
    case.check()


def test_extreme_logits_stay_finite(device):
    case = make(device, [70])
    for name in ("gate", "beta"):
        case.inputs[name].mul_(1e3)
    case.inputs["q"].mul_(1e4)
    case.inputs["k"].mul_(1e-4)
    out, state = case.run()
    assert out.isfinite().all()
    assert state.isfinite().all()


@pytest.mark.parametrize("name", ["q", "k"])
def test_zero_queries_and_keys(device, name):
    case = make(device, [40])
    case.inputs[name].zero_()
    case.check()


@pytest.mark.parametrize("bound", [-8.0, -1.0, 0.0, -60.0])
def test_other_bounds_of_the_gate(device, bound):
    make(device, [40], heads=1, bound=bound).check()


@on_gpu
@pytest.mark.parametrize("lengths", [[8192], [1000, 1, 0, 64, 3000], [129] * 40], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_real_widths(device, lengths, form):
    make(device, lengths, heads=6, key_dim=128, value_dim=128, dtype=BF16).check(form)


@on_gpu
def test_real_widths_with_saves(device):
    case = make(device, [5000, 64, 700], heads=4, key_dim=128, value_dim=128, rows=12, dtype=BF16)
    case.saves = save(device, [(0, 64, 4), (0, 2048, 5), (0, 4999, 6), (1, 64, 7), (2, 33, 8), (2, 512, 9)])
    case.check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": lambda x: x[:, :1]}, "q has shape"),
        ({"beta": lambda x: x[:-1]}, "beta has shape"),
        ({"gate": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)}, "gate needs stride 1"),
    ],
    ids=["heads", "tokens", "stride"],
)
def test_what_does_not_fit_is_refused_before_any_write(device, change, message):
    case = make(device, [5], heads=2)
    for name, make_wrong in change.items():
        case.inputs[name] = make_wrong(case.inputs[name])
    state = case.state.clone()
    with pytest.raises(ConfigError, match=message):
        kda_chunk_triton(**case.arguments(state))
    assert state.equal(case.state)


def test_saves_that_do_not_fit_are_refused(device):
    case = make(device, [5], rows=3)
    for wanted, message in (([(1, 2, 2)], "request 1 is not among 1"), ([(0, 0, 2)], "must be at least 1")):
        case.saves = save(device, wanted)
        with pytest.raises(ConfigError, match=message):
            case.run()
    case.saves = save(device, [(0, 2, 2)])
    with pytest.raises(ConfigError, match="saves need a state pool"):
        dataclasses.replace(case, state=None, slots=None).run()


SPEC = KDASpec(heads=2, key_dim=128, value_dim=128, dtype=BF16, state_dtype=F32, tokens_per_request="many")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"saves": "any"}, None),
        ({"state_dtype": None}, None),
        ({"dtype": F64}, "needs bfloat16, float16 or float32, got torch.float64"),
        ({"state_dtype": F64}, "needs a float32 or bfloat16 state, got torch.float64"),
        ({"key_dim": 96}, "needs key_dim to be a power of two in 16..256, got 96"),
        ({"value_dim": 8}, "needs value_dim to be a power of two in 16..256, got 8"),
        ({"bounded_gate": False}, "needs a gate with a lower bound, got the softplus gate"),
        ({"verify": "replay"}, "needs verify=none, got verify=replay"),
    ],
    ids=str,
)
def test_supports_says_why_not(change, reason):
    impl = {impl.name: impl for impl in kda_chunk.implementations()}["triton"]
    assert impl.supports(dataclasses.replace(SPEC, **change)) == reason
