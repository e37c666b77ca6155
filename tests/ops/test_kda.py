"""Kimi Delta Attention: golden vectors, a second formulation, packing, slots, interior states, extreme decays.

Shapes: T packed tokens, H heads, K key dim, V value dim, N pool rows.
"""

import dataclasses
import math
from itertools import accumulate, pairwise

import pytest
import torch
from torch.nn import functional as F

from k3lib.batch import StateSaves
from k3lib.errors import ConfigError
from k3lib.ops import (
    KDAParams,
    KDASpec,
    gated_rms_norm,
    implementations,
    kda_chunk,
    kda_gate,
    kda_mixer,
    kda_recurrent,
    l2_norm,
    short_conv,
    use_backend,
)
from k3lib.testing import assert_close, skip_unless_able, tolerance

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
FORMS = [kda_recurrent, kda_chunk]
IMPLS = [pytest.param(op, impl, id=f"{op.name}-{impl}") for op in FORMS for impl in implementations(op)]
MIXERS = [pytest.param(impl, id=str(impl)) for impl in implementations(kda_mixer)]
forms = pytest.mark.parametrize("op", FORMS, ids=lambda op: op.name)
AWKWARD = [0, 5, 6, 7, 200, 201]  # offsets of a batch that mixes long and single-token requests


def offsets(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def draw(*shape, seed=0, dtype=F32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclasses.dataclass
class Case:
    """One call of the recurrence. `run` works on a copy of the pool and returns the output and the copy."""

    inputs: dict
    params: KDAParams
    lengths: list
    state: torch.Tensor | None
    slots: torch.Tensor | None
    saves: StateSaves | None = None

    @property
    def spec(self):
        return KDASpec.of(**self.arguments(self.state))

    def arguments(self, state):
        return {
            **self.inputs,
            "params": self.params,
            "state": state,
            "slots": self.slots,
            "cu_seqlens": offsets(self.lengths).to(self.inputs["v"].device),
            "scale": self.inputs["q"].shape[-1] ** -0.5,
            "saves": self.saves,
        }

    def run(self, op):
        state = None if self.state is None else self.state.clone()
        return getattr(op, "run", op)(**self.arguments(state)), state

    def to(self, where):
        """Move to a device, or change the dtype of everything."""
        move = lambda x: x.to(where) if isinstance(x, torch.Tensor) and x.is_floating_point() else x  # noqa: E731
        device = where if isinstance(where, str) else "cpu"
        return dataclasses.replace(
            self,
            inputs={name: move(x) for name, x in self.inputs.items()},
            params=KDAParams(*map(move, self.params)),
            state=move(self.state),
            slots=None if self.slots is None else self.slots.to(device),
        )

    def alone(self, request):
        """The same request without its neighbours, in the same slot."""
        starts = [0, *accumulate(self.lengths)]
        here = slice(starts[request], starts[request + 1])
        return dataclasses.replace(
            self,
            inputs={name: x[here] for name, x in self.inputs.items()},
            lengths=[self.lengths[request]],
            slots=None if self.slots is None else self.slots[request : request + 1],
            saves=None,
        )

    def cut(self, length):
        """The first tokens of a case with one request."""
        return dataclasses.replace(self, inputs={n: x[:length] for n, x in self.inputs.items()}, lengths=[length])

    def rows(self, request):
        starts = [0, *accumulate(self.lengths)]
        return slice(starts[request], starts[request + 1])


def kda_case(
    lengths, *, heads=3, key_dim=8, value_dim=8, dtype=F32, bound=-5.0, seed=0, slots=None, rows=None, state_dtype=None
):
    tokens = sum(lengths)
    shape = (tokens, heads)
    slots = list(range(1, len(lengths) + 1)) if slots is None else slots
    rows = max([0, *slots]) + 1 if rows is None else rows
    inputs = {
        "q": draw(*shape, key_dim, seed=seed, dtype=dtype),
        "k": draw(*shape, key_dim, seed=seed + 1, dtype=dtype),
        "v": draw(*shape, value_dim, seed=seed + 2, dtype=dtype),
        "gate": draw(*shape, key_dim, seed=seed + 3, dtype=dtype),
        "beta": draw(*shape, seed=seed + 4, dtype=dtype),
    }
    wide = F64 if dtype == F64 else F32
    params = KDAParams(
        draw(heads, seed=seed + 5, dtype=wide), draw(heads, key_dim, seed=seed + 6, dtype=wide) - 2, bound
    )
    state = draw(rows, heads, value_dim, key_dim, seed=seed + 7, dtype=state_dtype or wide)
    return Case(inputs, params, list(lengths), state, torch.tensor(slots, dtype=torch.int32))


def matrix_form(case):
    """The recurrence as S = (I - beta k kT) Diag(alpha) S + beta k vT, o = ST q, key first, in fp64."""
    q, k, v, gate, beta = (case.inputs[name].double() for name in ("q", "k", "v", "gate", "beta"))
    q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() * q.shape[-1] ** -0.5
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    a_log, bias, bound = case.params
    logits = gate + bias.double().view(gate.shape[1:])
    rate = a_log.double().exp()[:, None]
    log_decay = -rate * (1 + logits.exp()).log() if bound is None else bound / (1 + (-rate * logits).exp())
    alpha, beta = log_decay.exp(), 1 / (1 + (-beta).exp())
    eye = torch.eye(k.shape[-1], dtype=F64)
    state, out = case.state.clone().double(), torch.zeros_like(v)
    for request, slot in enumerate(case.slots.tolist()):
        s = state[slot].mT.clone()
        for t in range(*case.rows(request).indices(len(v))[:2]):
            b = beta[t][:, None, None]
            transition = (eye - b * k[t][:, :, None] * k[t][:, None, :]) * alpha[t][:, None, :]
            s = transition @ s + b * k[t][:, :, None] * v[t][:, None, :]
            out[t] = (s.mT @ q[t][..., None])[..., 0]
        state[slot] = s.mT
    return out, state


# ---- golden vectors and known answers -----------------------------------------------------------

GOLDEN = [
    ("kda_core", name)
    for name in (
        "basic", "one_token_init", "two_chunks", "chunk_plus_one_init", "varlen_init", "long300", "extreme",
        "all_lower_bound", "no_decay", "softplus_gate", "bf16",
    )
] + [("kda_core_k128", "k128")]  # fmt: skip


def golden_case(file, name):
    x = file.case(name)
    size, tokens, heads, key_dim = x["q"].shape
    lengths = x["cu_seqlens"].diff().tolist() if "cu_seqlens" in x else [tokens] * size
    inputs = {n: x[{"gate": "g"}.get(n, n)].flatten(0, 1) for n in ("q", "k", "v", "gate", "beta")}
    params = KDAParams(x["A_log"], x["dt_bias"].view(heads, key_dim), file.fact(f"{name}.lower_bound"))
    pool = torch.zeros(len(lengths) + 1, heads, x["v"].shape[-1], key_dim)
    if "initial_state" in x:
        pool[1:] = x["initial_state"].mT  # stored key first
    return Case(inputs, params, lengths, pool, torch.arange(1, len(lengths) + 1, dtype=torch.int32))


@pytest.mark.parametrize(("file", "name"), GOLDEN)
@pytest.mark.parametrize(("op", "impl"), IMPLS)
def test_reproduces_golden_vectors(op, impl, file, name, load_golden, device):
    vectors = load_golden(file)
    case = golden_case(vectors, name)
    skip_unless_able(impl, case.spec)
    out, state = case.to(device).run(impl)
    want = vectors.tensors[f"{name}.out64.o"]
    vectors.check(name, "o", out.cpu().view(want.shape), atol=2e-5)
    vectors.check(name, "final_state", state[1:].cpu().mT, atol=5e-5)


@pytest.mark.parametrize("file", ["kda_core", "kda_core_k128"])
def test_no_golden_case_is_left_out(file, load_golden):
    assert {key.split(".")[0] for key in load_golden(file).tensors} == {name for f, name in GOLDEN if f == file}


@pytest.mark.parametrize(("file", "name"), GOLDEN)
def test_gate_reproduces_golden_log_decay(file, name, load_golden):
    vectors = load_golden(file)
    case = golden_case(vectors, name)
    want = vectors.tensors[f"{name}.out.log_decay"].flatten(0, 1)
    assert_close("log_decay", want, kda_gate(case.inputs["gate"], case.params), tolerance("kda_gate", F32))


POINTS = [(0.0, 0.0), (1.0, 0.0), (-2.0, 0.5), (3.0, -1.0)]
BOUNDED = [-2.5, -3.6552928932, -0.1782951471, -3.7547059847]
UNBOUNDED = [-0.6931471806, -1.3132616875, -0.2092689117, -1.1215126113]


@pytest.mark.parametrize(("bound", "want"), [(-5.0, BOUNDED), (None, UNBOUNDED)])
def test_gate_gives_known_answers(bound, want):
    logits, a_log = torch.tensor(POINTS, dtype=F64).unbind(1)
    bias = torch.full((4, 1), 0.25, dtype=F64)
    got = kda_gate((logits - 0.25).view(1, 4, 1), KDAParams(a_log, bias, bound))
    assert_close("log decay", torch.tensor(want, dtype=F64), got.flatten(), ratio=1e-10)


def test_gate_form_follows_the_bound():
    bounded = kda_case([20], bound=-5.0)
    unbounded = dataclasses.replace(bounded, params=bounded.params._replace(lower_bound=None))
    a, b = (case.run(kda_recurrent)[0] for case in (bounded, unbounded))
    assert (a - b).abs().max() > 0.1


def test_zero_beta_logit_writes_with_one_half():
    case = kda_case([1], heads=1)
    case.inputs["beta"].zero_()
    case.state.zero_()
    _, state = case.run(kda_recurrent)
    want = 0.5 * case.inputs["v"][0, 0][:, None] * l2_norm(case.inputs["k"][0, 0])
    assert_close("state", want, state[1, 0], tolerance("kda_recurrent", F32))


def test_l2_norm_adds_its_epsilon_to_the_sum():
    x = torch.full((1, 4), 1e-3, dtype=F64)
    assert_close("x", x / math.sqrt(4e-6 + 1e-6), l2_norm(x), ratio=1e-12)


# ---- a second formulation -----------------------------------------------------------------------


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(32, 48), (48, 32)])
@pytest.mark.parametrize(("lengths", "heads"), [([1], 1), ([63, 0, 64], 3), ([65, 1, 0, 130], 4)], ids=str)
@pytest.mark.parametrize(("op", "impl"), IMPLS)
def test_matches_the_matrix_form(op, impl, lengths, heads, key_dim, value_dim, bound, device):
    case = kda_case(lengths, heads=heads, key_dim=key_dim, value_dim=value_dim, bound=bound)
    skip_unless_able(impl, case.spec)
    want, want_state = matrix_form(case)
    out, state = case.to(device).run(impl)
    assert_close("out", want, out, tolerance(op.name, F32))
    assert_close("state", want_state, state, tolerance(op.name, F32))


@pytest.mark.parametrize("bound", [-5.0, None])
@forms
def test_matches_the_matrix_form_in_fp64(op, bound):
    case = kda_case([33, 0, 70], heads=2, key_dim=6, value_dim=5, bound=bound, dtype=F64)
    want, want_state = matrix_form(case)
    out, state = case.run(op)
    assert_close("out", want, out, tolerance(op.name, F64))
    assert_close("state", want_state, state, tolerance(op.name, F64))


@pytest.mark.parametrize(("key_dim", "value_dim"), [(32, 48), (128, 128)])
@pytest.mark.parametrize(("op", "impl"), IMPLS)
def test_bf16_inputs_lose_only_roundings(op, impl, key_dim, value_dim, device):
    case = kda_case([65, 1, 0, 130], heads=3, key_dim=key_dim, value_dim=value_dim, dtype=BF16)
    skip_unless_able(impl, case.spec)
    want, want_state = matrix_form(case)
    out, state = case.to(device).run(impl)
    assert out.dtype == BF16
    assert_close("out", want, out, tolerance(op.name, BF16))
    # the state is fp32, but a kernel may have rounded the normalised k
    assert_close("state", want_state, state, tolerance(op.name, BF16))


@pytest.mark.parametrize(("op", "impl"), IMPLS)
def test_bf16_state_is_rounded_once(op, impl, device):
    case = kda_case([17, 1], key_dim=32, value_dim=32, dtype=BF16, state_dtype=BF16)
    skip_unless_able(impl, case.spec)
    _, want = matrix_form(case)
    _, state = case.to(device).run(impl)
    assert state.dtype == BF16
    assert_close("state", want, state, tolerance(op.name, BF16))


@pytest.mark.parametrize("shape", [(32, 48), (48, 32), (128, 128)])
def test_chunk_equals_recurrent_over_five_chunks(shape):
    case = kda_case([5 * 64 + 7], heads=2, key_dim=shape[0], value_dim=shape[1])
    want, want_state = case.run(kda_recurrent)
    out, state = case.run(kda_chunk)
    assert_close("out", want, out, tolerance("kda_chunk", F32))
    assert_close("state", want_state, state, tolerance("kda_chunk", F32))


@forms
def test_state_is_value_first(op):
    case = kda_case([3], key_dim=4, value_dim=6)
    with pytest.raises(ConfigError, match=r"state has rows \(3, 4, 6\), expected \[H, V, K\] = \(3, 6, 4\)"):
        dataclasses.replace(case, state=case.state.mT.contiguous()).run(op)


@forms
def test_prefill_in_pieces_equals_one_pass(op):
    case = kda_case([100], key_dim=32, value_dim=48)
    want, want_state = case.run(op)
    pieces, state = [], case.state.clone()
    for begin, end in [(0, 1), (1, 33), (33, 97), (97, 100)]:
        inputs = {name: x[begin:end] for name, x in case.inputs.items()}
        piece = dataclasses.replace(case, inputs=inputs, lengths=[end - begin], state=state)
        out, state = piece.run(op)
        pieces.append(out)
    assert_close("out", want, torch.cat(pieces), tolerance(op.name, F32))
    assert_close("state", want_state, state, tolerance(op.name, F32))


def test_decode_continues_prefill():
    case = kda_case([40], key_dim=32, value_dim=48)
    want, want_state = matrix_form(case)
    out, state = case.cut(36).run(kda_chunk)
    outs = [out]
    for t in range(36, 40):
        inputs = {name: x[t : t + 1] for name, x in case.inputs.items()}
        out, state = dataclasses.replace(case, inputs=inputs, lengths=[1], state=state).run(kda_recurrent)
        outs.append(out)
    assert_close("out", want, torch.cat(outs), tolerance("kda_recurrent", F32))
    assert_close("state", want_state, state, tolerance("kda_recurrent", F32))


@forms
def test_stateless_call_starts_from_zero(op):
    case = kda_case([20, 0, 3])
    case.state.zero_()
    want, _ = case.run(op)
    got, state = dataclasses.replace(case, state=None, slots=None).run(op)
    assert state is None
    assert got.equal(want)


# ---- packing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[5, 1, 1, 193, 1], [65, 1, 0, 130]], ids=str)
@pytest.mark.parametrize(("op", "impl"), IMPLS)
def test_packed_equals_separate(op, impl, lengths, device):
    case = kda_case(lengths, key_dim=32, value_dim=48)
    skip_unless_able(impl, case.spec)
    out, state = case.to(device).run(impl)
    for i, slot in enumerate(case.slots.tolist()):
        want, want_state = case.alone(i).run(op.reference)
        assert_close(f"out of request {i}", want, out[case.rows(i)], tolerance(op.name, F32))
        assert_close(f"state of request {i}", want_state[slot], state[slot], tolerance(op.name, F32))


@pytest.mark.parametrize(("op", "impl"), IMPLS)
def test_mixed_batch_is_bitwise_repeatable(op, impl, device):
    lengths = [b - a for a, b in pairwise(AWKWARD)]
    case = kda_case(lengths, key_dim=32, value_dim=32)
    skip_unless_able(impl, dataclasses.replace(case.spec, deterministic=True))
    case = case.to(device)
    out, state = case.run(impl)
    assert out.isfinite().all()
    for _ in range(19):
        again, state_again = case.run(impl)
        assert again.equal(out)
        assert state_again.equal(state)


@pytest.mark.parametrize(("op", "impl"), IMPLS)
def test_ten_segments_are_bitwise_repeatable(op, impl, device):
    lengths = [300, 1, 77, 500, 64, 130, 2, 400, 63, 511]
    assert sum(lengths) == 2048
    case = kda_case(lengths, heads=1, key_dim=16, value_dim=16)
    skip_unless_able(impl, dataclasses.replace(case.spec, deterministic=True))
    case = case.to(device)
    out, state = case.run(impl)
    for _ in range(19 if op is kda_chunk else 3):
        again, state_again = case.run(impl)
        assert again.equal(out)
        assert state_again.equal(state)


@forms
def test_empty_request_keeps_its_state(op):
    case = kda_case([4, 0, 6])
    _, state = case.run(op)
    assert state[2].equal(case.state[2])


# ---- slots --------------------------------------------------------------------------------------


@forms
def test_negative_slot_gives_zeros_and_writes_nothing(op):
    case = kda_case([1, 1], slots=[-1, 3], rows=5)
    for row in range(5):
        case.state[row] = row + 1
    out, state = case.run(op)
    assert out[0].eq(0).all()
    changed = [row for row in range(5) if not state[row].equal(case.state[row])]
    assert changed == [3]


@forms
def test_negative_slot_of_a_long_request_gives_zeros(op):
    case = kda_case([70, 3, 5], slots=[2, -1, -7], rows=4)
    out, state = case.run(op)
    assert out[70:].eq(0).all()
    assert state[[0, 1, 3]].equal(case.state[[0, 1, 3]])
    want, want_state = case.alone(0).run(op)
    assert_close("out", want, out[:70], tolerance(op.name, F32))
    assert_close("state", want_state[2], state[2], tolerance(op.name, F32))


@pytest.mark.parametrize("slots", [[5, 1], [1, 700]], ids=str)
@forms
def test_slot_past_the_end_raises_before_any_write(op, slots):
    case = kda_case([1, 1], slots=slots, rows=5)
    state = case.state.clone()
    with pytest.raises(ConfigError, match=r"slot \d+ is past the end of a pool with rows 0\.\.4"):
        op(**case.arguments(state))
    assert state.equal(case.state)


@forms
def test_null_slot_reads_as_zero_and_stays_finite(op):
    case = kda_case([3, 4], slots=[0, 0], rows=3)
    case.state[0] = 9.0
    out, state = case.run(op)
    want, _ = dataclasses.replace(case, state=None, slots=None).run(op)
    assert out.equal(want)
    assert state.isfinite().all()
    assert state[1:].equal(case.state[1:])


@forms
def test_one_slot_for_two_requests_is_refused(op):
    with pytest.raises(ConfigError, match="a slot is given to two requests"):
        kda_case([1, 1], slots=[2, 2], rows=3).run(op)


@forms
def test_scattered_slots_decode_as_if_alone(op):
    slots, steps = [7, 2, 5], 5
    case = kda_case([1] * 3, slots=slots, rows=9, key_dim=8, value_dim=6)
    together, apart = case.state.clone(), case.state.clone()
    for step in range(steps):
        tokens = dataclasses.replace(kda_case([1] * 3, seed=100 * step, value_dim=6), slots=case.slots)
        out = op(**tokens.arguments(together))
        for i in range(3):
            want = op(**tokens.alone(i).arguments(apart))
            assert_close(f"step {step}", want, out[i : i + 1], tolerance(op.name, F32))
    assert_close("state", apart, together, tolerance(op.name, F32))
    others = [row for row in range(9) if row not in slots]
    assert together[others].equal(case.state[others])


# ---- interior states ----------------------------------------------------------------------------


def saves_of(wanted):
    requests, places, slots = zip(*wanted, strict=True)
    return StateSaves(requests, places, torch.tensor(slots, dtype=torch.int32))


SAVES = {
    "grid": [(0, 64, 4), (0, 128, 5)],
    "odd": [(0, 1, 4), (0, 63, 5), (0, 65, 6), (0, 129, 7)],
    "packed": [(2, 3, 4), (0, 64, 5), (1, 64, 6), (0, 128, 7), (1, 17, 8), (2, 7, 9), (0, 130, 10)],
}


@pytest.mark.parametrize("wanted", SAVES.values(), ids=SAVES)
@pytest.mark.parametrize(("op", "impl"), IMPLS)
def test_interior_states_equal_shorter_prefills(op, impl, wanted, device):
    case = kda_case([130, 64, 7], key_dim=32, value_dim=48, rows=12)
    case.saves = saves_of(wanted)
    skip_unless_able(impl, case.spec)
    moved = case.to(device)
    moved.saves = StateSaves(case.saves.requests, case.saves.offsets, case.saves.slots.to(device))
    out, state = moved.run(impl)
    want, want_state = dataclasses.replace(case, saves=None).run(op.reference)
    assert_close("out", want, out, tolerance(op.name, F32))
    assert_close("states", want_state[:4], state[:4], tolerance(op.name, F32))
    for request, length, slot in wanted:
        _, prefix = case.alone(request).cut(length).run(op.reference)
        assert_close(f"state after {length}", prefix[request + 1], state[slot], tolerance(op.name, F32))


@forms
def test_one_state_may_be_saved_to_two_slots(op):
    case = kda_case([9], rows=5)
    case.saves = saves_of([(0, 3, 2), (0, 3, 3), (0, 9, 4)])
    _, state = case.run(op)
    _, prefix = case.alone(0).cut(3).run(op.reference)
    for slot in (2, 3):
        assert_close(f"slot {slot}", prefix[1], state[slot], tolerance(op.name, F32))
    assert state[4].equal(state[1])


@forms
def test_saves_into_the_null_slot_are_dropped(op):
    case = kda_case([9], rows=4)
    want, want_state = case.run(op)
    case.saves = saves_of([(0, 3, 0), (0, 5, -1)])
    out, state = case.run(op)
    assert_close("out", want, out, tolerance(op.name, F32))
    assert_close("state", want_state[1], state[1], tolerance(op.name, F32))
    assert state[2:].equal(case.state[2:])


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ((0, 10, 2), "offset 10 of request 0 must lie in 1..9"),
        ((0, 0, 2), "offset 0 of request 0 must lie in 1..9"),
        ((1, 1, 2), "request 1 is not among 1 requests"),
        ((0, 3, 4), r"slot 4 is past the end of a pool with rows 0\.\.3"),
    ],
)
@forms
def test_bad_save_is_refused_before_any_write(op, wanted, message):
    case = kda_case([9], rows=4)
    case.saves = saves_of([(0, 2, 3), wanted])
    state = case.state.clone()
    with pytest.raises(ConfigError, match=message):
        op(**case.arguments(state))
    assert state.equal(case.state)


# ---- extremes -----------------------------------------------------------------------------------


@forms
def test_decay_at_the_bound_on_every_channel_is_exact(op):
    case = kda_case([200], key_dim=16, value_dim=16)
    case.inputs["gate"].fill_(1e4)
    want, want_state = matrix_form(case)
    out, state = case.run(op)
    assert_close("out", want, out, tolerance(op.name, F32))
    assert_close("state", want_state, state, tolerance(op.name, F32))


@forms
def test_huge_softplus_rates_are_exact(op):
    # channels that forget at once beside channels that hardly forget, in the same chunk
    case = kda_case([100], key_dim=16, value_dim=16, bound=None)
    case.params.A_log.fill_(5.0)
    case.params.dt_bias.zero_()
    case.inputs["gate"].copy_(torch.where(draw(100, 3, 16, seed=9) > 1, 50.0, -10.0))
    want, want_state = matrix_form(case)
    out, state = case.run(op)
    assert_close("out", want, out, tolerance(op.name, F32))
    assert_close("state", want_state, state, tolerance(op.name, F32))


@pytest.mark.parametrize("name", ["q", "k"])
@pytest.mark.parametrize(("op", "impl"), IMPLS)
def test_zero_queries_and_keys_give_no_nan(op, impl, name, device):
    case = kda_case([70], key_dim=32, value_dim=32)
    case.inputs[name].zero_()
    skip_unless_able(impl, case.spec)
    want, want_state = matrix_form(case)
    out, state = case.to(device).run(impl)
    assert_close("out", want, out, tolerance(op.name, F32))
    assert_close("state", want_state, state, tolerance(op.name, F32))


@pytest.mark.parametrize("bound", [-5.0, None])
@forms
def test_extreme_logits_stay_finite(op, bound):
    case = kda_case([130], key_dim=16, value_dim=16, bound=bound)
    for name in ("gate", "beta"):
        case.inputs[name].mul_(1e3)
    case.inputs["q"].mul_(1e15)
    case.inputs["k"].mul_(1e-15)
    out, state = case.run(op)
    assert out.isfinite().all()
    assert state.isfinite().all()


# ---- the mixer ----------------------------------------------------------------------------------


@dataclasses.dataclass
class Mixer:
    """One call of `kda_mixer`; `run` works on copies of the pools and returns the output and the copies."""

    inputs: dict
    weights: dict
    lengths: list
    state: torch.Tensor | None
    conv_state: torch.Tensor | None
    slots: torch.Tensor | None
    saves: StateSaves | None = None

    def arguments(self, state, conv_state):
        pools = {"state": state, "conv_state": conv_state, "slots": self.slots, "saves": self.saves}
        key_dim = self.inputs["gate"].shape[-1]
        return {
            **self.inputs, **self.weights, **pools, "cu_seqlens": offsets(self.lengths), "scale": key_dim**-0.5,
            "norm_eps": 1e-5,
        }  # fmt: skip

    @property
    def spec(self):
        return KDASpec.of_mixer(**self.arguments(self.state, self.conv_state))

    def run(self, op=kda_mixer):
        pools = [None if x is None else x.clone() for x in (self.state, self.conv_state)]
        return getattr(op, "run", op)(**self.arguments(*pools)), *pools

    def alone(self, request, length):
        start = [0, *accumulate(self.lengths)][request]
        return dataclasses.replace(
            self,
            inputs={name: x[start : start + length] for name, x in self.inputs.items()},
            lengths=[length],
            slots=None if self.slots is None else self.slots[request : request + 1],
            saves=None,
        )


def mixer_case(lengths, *, heads=2, key_dim=8, value_dim=6, rows=12, dtype=F32, seed=0, slots=None):
    tokens, channels = sum(lengths), heads * (2 * key_dim + value_dim)
    wide = F64 if dtype == F64 else F32
    inputs = {
        "qkv": draw(tokens, channels, seed=seed, dtype=dtype),
        "gate": draw(tokens, heads, key_dim, seed=seed + 1, dtype=dtype),
        "beta": draw(tokens, heads, seed=seed + 2, dtype=dtype),
        "out_gate": draw(tokens, heads, value_dim, seed=seed + 3, dtype=dtype),
    }
    weights = {
        "params": KDAParams(
            draw(heads, seed=seed + 4, dtype=wide), draw(heads, key_dim, seed=seed + 5, dtype=wide) - 2, -5.0
        ),
        "conv_weight": draw(channels, 4, seed=seed + 6, dtype=wide),
        "norm_weight": draw(value_dim, seed=seed + 7, dtype=wide),
    }
    slots = list(range(1, len(lengths) + 1)) if slots is None else slots
    return Mixer(
        inputs, weights, list(lengths),
        draw(rows, heads, value_dim, key_dim, seed=seed + 8, dtype=wide),
        draw(rows, 3, channels, seed=seed + 9, dtype=dtype),
        torch.tensor(slots, dtype=torch.int32),
    )  # fmt: skip


def mixer_by_parts(case):
    """Convolution per channel group, matrix form, norm and gate, in fp64."""
    heads, key_dim = case.inputs["gate"].shape[1:]
    groups = (("q", key_dim), ("k", key_dim), ("v", case.inputs["out_gate"].shape[-1]))
    mixed, begin = {}, 0
    for name, width in groups:
        here = slice(begin, begin + heads * width)
        pieces, start = [], 0
        for length, slot in zip(case.lengths, case.slots.tolist(), strict=True):
            x = torch.cat([case.conv_state[slot, :, here], case.inputs["qkv"][start : start + length, here]]).double()
            if length:
                y = F.conv1d(x.t()[None], case.weights["conv_weight"][here, None].double(), groups=heads * width)
                pieces.append(F.silu(y[0].t()))
            start += length
        mixed[name] = torch.cat(pieces).view(-1, heads, width)
        begin += heads * width
    inputs = {**mixed, "gate": case.inputs["gate"], "beta": case.inputs["beta"]}
    out, state = matrix_form(Case(inputs, case.weights["params"], case.lengths, case.state, case.slots))
    out = F.rms_norm(out, out.shape[-1:], eps=1e-5) * case.weights["norm_weight"].double()
    return out * torch.sigmoid(case.inputs["out_gate"].double()), state


@pytest.mark.parametrize("lengths", [[1, 1, 1], [5, 0, 1], [65, 1, 0, 130]], ids=str)
@pytest.mark.parametrize("impl", MIXERS)
def test_mixer_matches_its_parts(impl, lengths):
    case = mixer_case(lengths)
    skip_unless_able(impl, case.spec)
    want, want_state = mixer_by_parts(case)
    out, state, _ = case.run(impl)
    assert_close("out", want, out, tolerance("kda_mixer", F32))
    assert_close("state", want_state, state, tolerance("kda_mixer", F32))


@pytest.mark.parametrize("impl", MIXERS)
def test_mixer_in_pieces_equals_one_pass(impl):
    case = mixer_case([40])
    skip_unless_able(impl, case.spec)
    want, want_state, want_conv = case.run(impl)
    outs, state, conv_state = [], case.state, case.conv_state
    for begin, end in [(0, 2), (2, 30), (30, 31), (31, 40)]:
        inputs = {name: x[begin:end] for name, x in case.inputs.items()}
        piece = dataclasses.replace(case, inputs=inputs, lengths=[end - begin], state=state, conv_state=conv_state)
        out, state, conv_state = piece.run(impl)
        outs.append(out)
    assert_close("out", want, torch.cat(outs), tolerance("kda_mixer", F32))
    assert_close("state", want_state, state, tolerance("kda_mixer", F32))
    assert conv_state.equal(want_conv)


@pytest.mark.parametrize("wanted", SAVES.values(), ids=SAVES)
@pytest.mark.parametrize("impl", MIXERS)
def test_mixer_interior_states_equal_shorter_prefills(impl, wanted):
    case = mixer_case([130, 64, 7])
    case.saves = saves_of(wanted)
    skip_unless_able(impl, case.spec)
    out, state, conv_state = case.run(impl)
    want, *_ = dataclasses.replace(case, saves=None).run()
    assert_close("out", want, out, tolerance("kda_mixer", F32))
    for request, length, slot in wanted:
        _, prefix, prefix_conv = case.alone(request, length).run()
        assert_close(f"state after {length}", prefix[request + 1], state[slot], tolerance("kda_mixer", F32))
        assert conv_state[slot].equal(prefix_conv[request + 1])


@pytest.mark.parametrize("impl", MIXERS)
def test_mixer_negative_slot_gives_zeros_and_writes_nothing(impl):
    case = mixer_case([1, 1], rows=5, slots=[-1, 3])
    skip_unless_able(impl, case.spec)
    out, state, conv_state = case.run(impl)
    assert out[0].eq(0).all()
    for before, after in ((case.state, state), (case.conv_state, conv_state)):
        assert [row for row in range(5) if not after[row].equal(before[row])] == [3]


@pytest.mark.parametrize("impl", MIXERS)
def test_mixer_stateless_call_starts_from_zero(impl):
    case = mixer_case([20, 3])
    case.state.zero_()
    case.conv_state.zero_()
    skip_unless_able(impl, case.spec)
    want, *_ = case.run(impl)
    got, *_ = dataclasses.replace(case, state=None, conv_state=None, slots=None).run(impl)
    assert got.equal(want)


def test_mixer_composes_the_narrow_ops():
    case = mixer_case([1, 1])
    heads, key_dim = case.inputs["gate"].shape[1:]
    state, conv_state = case.state.clone(), case.conv_state.clone()
    common = {"slots": case.slots, "cu_seqlens": offsets(case.lengths)}
    mixed = short_conv(case.inputs["qkv"], case.weights["conv_weight"], conv_state=conv_state, **common)
    q, k, v = mixed.split([heads * key_dim, heads * key_dim, heads * 6], dim=-1)
    out = kda_recurrent(
        q.view(2, heads, key_dim), k.view(2, heads, key_dim), v.view(2, heads, 6), case.inputs["gate"],
        case.inputs["beta"], params=case.weights["params"], state=state, scale=key_dim**-0.5, **common,
    )  # fmt: skip
    want = gated_rms_norm(out, case.inputs["out_gate"], case.weights["norm_weight"], eps=1e-5)
    with use_backend(kda_mixer="composed"):
        got, *_ = case.run()
    assert got.equal(want)


def broken(case, what):
    """A copy of the case with one argument that does not fit."""
    inputs, weights = dict(case.inputs), dict(case.weights)
    if what in inputs:
        inputs[what] = inputs[what][:, :1]
    elif what in weights:
        weights[what] = weights[what][:-1]
    elif what in ("A_log", "dt_bias"):
        weights["params"] = weights["params"]._replace(**{what: getattr(weights["params"], what)[:1]})
    state = case.state[..., :-1].contiguous() if what == "state" else case.state
    conv_state = case.conv_state[:, :-1].contiguous() if what == "conv_state" else case.conv_state
    return dataclasses.replace(case, inputs=inputs, weights=weights, state=state, conv_state=conv_state)


@pytest.mark.parametrize(
    "what", ["qkv", "gate", "beta", "out_gate", "conv_weight", "norm_weight", "A_log", "dt_bias", "state", "conv_state"]
)
@pytest.mark.parametrize("lengths", [[3, 70], [1, 1]], ids=str)
def test_mixer_refuses_wrong_shapes_before_any_write(lengths, what):
    case = broken(mixer_case(lengths), what)
    state, conv_state = case.state.clone(), case.conv_state.clone()
    with pytest.raises(ConfigError):
        kda_mixer(**case.arguments(state, conv_state))
    assert state.equal(case.state)
    assert conv_state.equal(case.conv_state)


@pytest.mark.parametrize("what", ["q", "k", "gate", "beta", "A_log", "dt_bias"])
@forms
def test_recurrence_refuses_wrong_shapes_before_any_write(op, what):
    case = kda_case([3])
    if what in case.inputs:
        case.inputs[what] = case.inputs[what][:, :1]
    else:
        case.params = case.params._replace(**{what: getattr(case.params, what)[:1]})
    state = case.state.clone()
    with pytest.raises(ConfigError, match=f"kda: {what} has"):
        op(**case.arguments(state))
    assert state.equal(case.state)


# ---- gradients ----------------------------------------------------------------------------------


def leaves(tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("lengths", [[3, 0, 2], [1, 1]], ids=str)
@forms
def test_gradients_reach_every_input_and_the_initial_state(op, lengths, bound):
    case = kda_case(lengths, heads=2, key_dim=3, value_dim=2, dtype=F64, bound=bound)
    names = list(case.inputs)

    def call(initial, a_log, dt_bias, *inputs):
        pool = initial.clone()
        out = op(**{
            **case.arguments(pool), **dict(zip(names, inputs, strict=True)), "params": KDAParams(a_log, dt_bias, bound),
        })  # fmt: skip
        return out, pool[1:]

    inputs = leaves([case.state, case.params.A_log, case.params.dt_bias, *case.inputs.values()])
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)


def test_gradients_cross_chunks():
    case = kda_case([35], heads=1, key_dim=2, value_dim=2, dtype=F64)
    names = list(case.inputs)

    def call(initial, *inputs):
        pool = initial.clone()
        return kda_chunk(**{**case.arguments(pool), **dict(zip(names, inputs, strict=True))}), pool[1:]

    assert torch.autograd.gradcheck(call, leaves([case.state, *case.inputs.values()]), fast_mode=True)


@pytest.mark.parametrize("lengths", [[2, 9], [1, 1]], ids=str)
def test_gradients_reach_every_input_of_the_mixer(lengths):
    case = mixer_case(lengths, heads=1, key_dim=3, value_dim=2, rows=3, dtype=F64)
    names = list(case.inputs)

    def call(state, conv_state, conv_weight, norm_weight, *inputs):
        pools = state.clone(), conv_state.clone()
        weights = {"conv_weight": conv_weight, "norm_weight": norm_weight}
        out = kda_mixer(**{**case.arguments(*pools), **weights, **dict(zip(names, inputs, strict=True))})
        return out, pools[0][1:], pools[1][1:]

    weights = (case.weights["conv_weight"], case.weights["norm_weight"])
    inputs = leaves([case.state, case.conv_state, *weights, *case.inputs.values()])
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)


# ---- the spec -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "want"), [([1, 1], "1"), ([1, 0, 1], "1"), ([8, 8], "<=8"), ([1, 15], "<=8"), ([8, 9], "many")], ids=str
)
def test_spec_names_a_class_of_lengths_not_a_count(lengths, want):
    assert kda_case(lengths).spec.tokens_per_request == want


@pytest.mark.parametrize(
    ("wanted", "kind"), [(SAVES["grid"], "chunk"), (SAVES["odd"], "any"), (SAVES["packed"], "any")]
)
def test_spec_says_where_interior_states_are_wanted(wanted, kind):
    case = kda_case([130, 64, 7], rows=12)
    assert case.spec.saves == "none"
    case.saves = saves_of(wanted)
    assert case.spec.saves == kind


def test_spec_of_two_batches_of_one_kind_is_equal():
    assert kda_case([100, 3]).spec == kda_case([77]).spec
    assert hash(kda_case([100, 3]).spec) == hash(kda_case([77]).spec)
