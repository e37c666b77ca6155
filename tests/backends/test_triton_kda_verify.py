"""Verify steps of KDA in Triton, and their replay, against the references.

Shapes: T packed tokens, B requests, H heads, K key dim, V value dim, C channels, R rows of D tokens in the scratch.
"""

import dataclasses
from itertools import accumulate

import pytest
import torch

from k3lib.backends.triton.conv import short_conv_triton
from k3lib.backends.triton.kda_decode import kda_mixer_triton, kda_recurrent_triton, kda_replay_triton
from k3lib.batch import StateSaves, VerifyScratch
from k3lib.errors import ConfigError
from k3lib.ops import KDAParams, KDASpec, implementations, kda_mixer, kda_recurrent, kda_replay, short_conv, use_backend
from k3lib.testing import assert_close, tolerance

pytest.importorskip("triton")

CUDA = torch.cuda.is_available()
F32, BF16 = torch.float32, torch.bfloat16
KINDS = ["replay", "states"]
SLOTS = 7
GIVEN = ("inputs", "k", "v", "log_decay", "beta", "states")


@dataclasses.dataclass
class Step:
    """Arguments of a verify step of the mixer, and the pools."""

    inputs: dict
    layer: dict
    common: dict
    state: torch.Tensor
    conv_state: torch.Tensor
    lengths: list
    width: int
    heads: int

    def scratch(self, kind, dtype=None):
        """Fresh, of NaN: what is not written shows."""
        rows, like = len(self.lengths) + 1, self.inputs["qkv"]
        dtype = dtype or like.dtype
        key_dim, value_dim = self.inputs["gate"].shape[-1], self.inputs["out_gate"].shape[-1]

        def make(*shape, dtype=dtype):
            return torch.full((rows, self.width, *shape), torch.nan, dtype=dtype, device=like.device)

        inputs = make(like.shape[1])
        if kind == "states":
            return VerifyScratch(inputs, states=make(self.heads, value_dim, key_dim, dtype=self.state.dtype))
        return VerifyScratch(
            inputs, k=make(self.heads, key_dim), v=make(self.heads, value_dim),
            log_decay=make(self.heads, key_dim, dtype=F32), beta=make(self.heads, dtype=F32),
        )  # fmt: skip

    def mixed(self):
        """q, k, v of the recurrence, as if convolved."""
        tokens, heads = len(self.inputs["qkv"]), self.heads
        key_dim, value_dim = self.inputs["gate"].shape[-1], self.inputs["out_gate"].shape[-1]
        parts = self.inputs["qkv"].split([heads * key_dim, heads * key_dim, heads * value_dim], -1)
        names = zip("qkv", parts, strict=True)
        return {name: x.reshape(tokens, heads, -1) for name, x in names} | {
            "gate": self.inputs["gate"], "beta": self.inputs["beta"],
        }  # fmt: skip


def make(
    device, lengths, slots, *, heads=2, key_dim=8, value_dim=6, dtype=F32, state_dtype=F32, bound=-5.0, conv=4, width=4,
    seed=0,
):  # fmt: skip
    torch.manual_seed(seed)
    tokens, channels = sum(lengths), heads * (2 * key_dim + value_dim)

    def draw(*shape, dtype=dtype):
        return torch.randn(*shape).to(dtype).to(device)

    inputs = {
        "qkv": draw(tokens, channels), "gate": draw(tokens, heads, key_dim), "beta": draw(tokens, heads),
        "out_gate": draw(tokens, heads, value_dim),
    }  # fmt: skip
    layer = {
        "conv_weight": draw(channels, conv, dtype=F32), "norm_weight": draw(value_dim, dtype=F32), "norm_eps": 1e-5,
    }  # fmt: skip
    common = {
        "params": KDAParams(draw(heads, dtype=F32), draw(heads, key_dim, dtype=F32), bound),
        "slots": torch.tensor(slots, dtype=torch.int32, device=device), "scale": key_dim**-0.5,
        "cu_seqlens": torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device),
    }  # fmt: skip
    state, conv_state = (
        draw(SLOTS, heads, value_dim, key_dim, dtype=state_dtype),
        draw(SLOTS, conv - 1, channels),
    )
    state[0], conv_state[0] = 0, 0
    return Step(inputs, layer, common, state, conv_state, list(lengths), width, heads)


def wide(tensors):
    return {name: x.float() for name, x in tensors.items()}


def compare(name, want, got, dtype, op="kda_mixer"):
    """The scratch of live requests, and that nothing but their tokens was written."""
    for field in GIVEN:
        mine, theirs = getattr(got, field), getattr(want, field)
        if theirs is None:
            assert mine is None
            continue
        written = ~theirs.isnan()
        assert mine.isnan().equal(~written), f"{name}: other entries of {field} were written"
        narrow = max((dtype, mine.dtype), key=lambda d: tolerance(op, d))
        assert_close(f"{name}: {field}", theirs[written].float(), mine[written].float(), tolerance(op, narrow))


def check_mixer(step, kind):
    dtype = step.inputs["qkv"].dtype
    want_scratch, got_scratch = step.scratch(kind), step.scratch(kind)
    before, before_conv = step.state.clone(), step.conv_state.clone()
    pools = {"state": step.state, "conv_state": step.conv_state}
    with use_backend("reference"):
        want = kda_mixer.reference(
            **wide(step.inputs), **step.layer, **step.common, state=step.state.float(),
            conv_state=step.conv_state.float(), verify=want_scratch,
        )  # fmt: skip
    got = kda_mixer_triton(**step.inputs, **step.layer, **step.common, **pools, verify=got_scratch)
    assert got.dtype == dtype
    assert_close("out", want, got, tolerance("kda_mixer", dtype))
    compare("mixer", want_scratch, got_scratch, dtype)
    assert step.state.equal(before)
    assert step.conv_state.equal(before_conv)
    return got, got_scratch


CASES = [([4], [3]), ([3, 0, 1, 4], [1, 2, 0, 5]), ([1, 1, 1], [2, -1, 4])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("lengths", "slots"), CASES, ids=str)
def test_mixer_matches_the_reference_and_leaves_the_state(device, kind, lengths, slots):
    got, _ = check_mixer(make(device, lengths, slots), kind)
    for i, slot in enumerate(slots):
        if slot < 0:
            assert got[sum(lengths[:i]) : sum(lengths[: i + 1])].eq(0).all()


FACTS = [
    {"bound": None}, {"conv": 2}, {"conv": 5, "width": 7}, {"key_dim": 6, "value_dim": 9}, {"dtype": torch.float16},
    {"state_dtype": torch.float16}, {"heads": 1, "key_dim": 48, "value_dim": 40},
]  # fmt: skip
if CUDA:
    real = {"heads": 12, "key_dim": 128, "value_dim": 128, "width": 8}
    FACTS += [{**real, "dtype": BF16}, {**real, "dtype": BF16, "state_dtype": BF16}, {**real, "width": 16}]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("facts", FACTS, ids=str)
def test_shapes_and_dtypes(device, kind, facts):
    check_mixer(make(device, [4, 2], [5, 2], **facts), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_sixteen_tokens(device, kind):
    check_mixer(make(device, [16, 9], [5, 2], width=16), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("lengths", "slots"), CASES, ids=str)
def test_recurrence_alone(device, kind, lengths, slots):
    step = make(device, lengths, slots)
    want_scratch, got_scratch = step.scratch(kind), step.scratch(kind)
    want_scratch.inputs, got_scratch.inputs = want_scratch.inputs.zero_(), got_scratch.inputs.zero_()
    before = step.state.clone()
    want = kda_recurrent.reference(**step.mixed(), **step.common, state=step.state.clone(), verify=want_scratch)
    got = kda_recurrent_triton(**step.mixed(), **step.common, state=step.state, verify=got_scratch)
    assert_close("out", want, got, tolerance("kda_recurrent", F32))
    compare("recurrence", want_scratch, got_scratch, F32, "kda_recurrent")
    assert step.state.equal(before)


@pytest.mark.parametrize(("lengths", "slots"), CASES, ids=str)
def test_convolution_alone(device, lengths, slots):
    step = make(device, lengths, slots)
    given = {"slots": step.common["slots"], "cu_seqlens": step.common["cu_seqlens"]}
    want_scratch, got_scratch = step.scratch("states"), step.scratch("states")
    before = step.conv_state.clone()
    x, weight = step.inputs["qkv"], step.layer["conv_weight"]
    want = short_conv.reference(x, weight, conv_state=step.conv_state.clone(), **given, verify=want_scratch)
    got = short_conv_triton(x, weight, conv_state=step.conv_state, **given, verify=got_scratch)
    assert_close("out", want, got, tolerance("short_conv", F32))
    assert got_scratch.inputs.nan_to_num(7).equal(want_scratch.inputs.nan_to_num(7))
    assert step.conv_state.equal(before)


def replayed(scratch, state, sources, rows, counts, targets, form=kda_replay_triton):
    """Replay in one layer; returns the new pool."""
    pool = state.clone()[None]
    index = {"sources": sources, "rows": rows, "counts": counts, "targets": targets}
    index = {name: torch.tensor(x, dtype=torch.int32, device=state.device) for name, x in index.items()}
    kept = (x.nan_to_num(0)[None] for x in (scratch.k, scratch.v, scratch.log_decay, scratch.beta))
    form(pool, *kept, **index)
    return pool[0]


@pytest.mark.parametrize("state_dtype", [F32, torch.float16], ids=str)
def test_replay_of_accepted_tokens_equals_plain_decoding(device, state_dtype):
    step = make(device, [4, 4, 4], [1, 2, 3], state_dtype=state_dtype)
    _, scratch = check_mixer(step, "replay")
    got = replayed(scratch, step.state, [1, 2, 3], [0, 1, 2], [4, 0, 2], [1, 5, 3])
    want = replayed(scratch, step.state, [1, 2, 3], [0, 1, 2], [4, 0, 2], [1, 5, 3], kda_replay.reference)
    assert_close("replay", want, got, tolerance("kda_recurrent", state_dtype))
    assert got[5].equal(step.state[2])
    untouched = [0, 2, 4, 6]
    assert got[untouched].equal(step.state[untouched])
    states = step.scratch("states")
    pools = {"state": step.state, "conv_state": step.conv_state}
    kda_mixer_triton(**step.inputs, **step.layer, **step.common, **pools, verify=states)
    assert_close("four tokens", states.states[0, 3], got[1], tolerance("kda_recurrent", state_dtype))
    assert_close("two tokens", states.states[2, 1], got[3], tolerance("kda_recurrent", state_dtype))


def test_replay_of_several_layers(device):
    torch.manual_seed(0)
    layers, rows, width, heads, key_dim, value_dim = 3, 2, 4, 2, 8, 6
    state = torch.randn(layers, SLOTS, heads, value_dim, key_dim, device=device)
    k, v = (torch.randn(layers, rows, width, heads, n, device=device) for n in (key_dim, value_dim))
    log_decay = -torch.rand(layers, rows, width, heads, key_dim, device=device)
    beta = torch.rand(layers, rows, width, heads, device=device)
    places = {"sources": [2, 3, 4], "rows": [1, 0, 1], "counts": [3, 4, 1], "targets": [2, 6, 0]}
    index = {name: torch.tensor(x, dtype=torch.int32, device=device) for name, x in places.items()}
    want, got = state.clone(), state.clone()
    kda_replay.reference(want, k, v, log_decay, beta, **index)
    kda_replay_triton(got, k, v, log_decay, beta, **index)
    assert_close("state", want, got, tolerance("kda_recurrent", F32))
    assert got[:, [0, 1, 3, 4, 5]].equal(state[:, [0, 1, 3, 4, 5]])
    wild = {**index, "rows": index["rows"] * 0 + 99, "targets": torch.tensor([1, 77, -3]).to(index["rows"])}
    kda_replay_triton(got.copy_(state), k, v, log_decay, beta, **wild)  # harmless, refused by the reference
    assert got[:, 1].equal(state[:, 2])
    assert got[:, 2:].equal(state[:, 2:])


def test_same_bits_twice_and_in_any_batch(device):
    step = make(device, [4, 2, 3], [4, 2, 5], key_dim=16, value_dim=40)
    pools = {"state": step.state, "conv_state": step.conv_state}
    kept = [step.scratch("replay") for _ in range(3)]
    outs = [kda_mixer_triton(**step.inputs, **step.layer, **step.common, **pools, verify=x) for x in kept[:2]]
    assert outs[0].equal(outs[1])
    common = {
        **step.common, "slots": step.common["slots"][:1], "cu_seqlens": step.common["cu_seqlens"][:2],
    }  # fmt: skip
    alone = {name: x[:4] for name, x in step.inputs.items()}
    assert kda_mixer_triton(**alone, **step.layer, **common, **pools, verify=kept[2]).equal(outs[0][:4])
    assert kept[2].log_decay[0].equal(kept[0].log_decay[0])


def test_a_step_without_tokens(device):
    for lengths, slots in (([], []), ([0, 0], [1, 2])):
        step = make(device, lengths, slots)
        scratch = step.scratch("replay")
        pools = {"state": step.state, "conv_state": step.conv_state}
        assert kda_mixer_triton(**step.inputs, **step.layer, **step.common, **pools, verify=scratch).shape[0] == 0
        assert scratch.k.isnan().all()


def test_refuses_what_does_not_fit(device):
    step = make(device, [2, 2], [1, 2])
    scratch = step.scratch("replay")
    pools = {"state": step.state, "conv_state": step.conv_state}
    for change, message in [
        ({"inputs": scratch.inputs[:1]}, "scratch has 1 rows of 4 tokens, the step 2 requests with 4 tokens"),
        ({"inputs": scratch.inputs[:, :1]}, "scratch has 3 rows of 1 tokens, the step 2 requests with 4 tokens"),
        ({"k": scratch.k[..., :-1]}, "verify.k has shape"),
        ({"beta": scratch.beta.half()}, "verify.beta has shape .* of torch.float16, expected .* of torch.float32"),
        ({"v": None}, "neither states nor all of k, v, log_decay and beta"),
        ({"log_decay": scratch.log_decay.mT.contiguous().mT}, "expected a contiguous tensor"),
    ]:
        verify = dataclasses.replace(scratch, **change)
        with pytest.raises(ConfigError, match=message):
            kda_mixer_triton(**step.inputs, **step.layer, **step.common, **pools, verify=verify)
    with pytest.raises(ConfigError, match="a verify step needs state and slots"):
        kda_mixer_triton(**step.inputs, **step.layer, **{**step.common, "slots": None}, verify=scratch)
    assert scratch.k.isnan().all()
    kept = [x[None] for x in (scratch.k, scratch.v, scratch.log_decay, scratch.beta)]
    index = dict.fromkeys(("sources", "rows", "counts", "targets"), step.common["slots"])
    for change, message in [
        ({"rows": index["rows"][:1]}, "must be equally many"),
        ({"v": kept[1][..., :-1]}, "kda_replay: v has shape"),
    ]:
        given = {**dict(zip(("k", "v", "log_decay", "beta"), kept, strict=True)), **index, **change}
        with pytest.raises(ConfigError, match=message):
            kda_replay_triton(step.state[None], **given)


def test_choices_of_a_verify_step():
    facts = {
        "heads": 12, "key_dim": 128, "value_dim": 128, "dtype": BF16, "state_dtype": F32, "verify": "replay",
        "tokens_per_request": "many",
    }  # fmt: skip
    for op in (kda_mixer, kda_recurrent):
        impl = next(impl for impl in implementations(op) if impl.name == "triton")
        assert impl.supports(KDASpec(**facts)) is None
        assert "saves=none" in impl.supports(KDASpec(**facts, saves="any"))


def test_saves_are_refused_with_a_scratch_by_the_reference(device):
    step = make(device, [2], [1])
    saves = StateSaves((0,), (1,), torch.tensor([5], dtype=torch.int32, device=device))
    with pytest.raises(ConfigError, match="keeps no states of its own"):
        kda_recurrent.reference(
            **step.mixed(), **step.common, state=step.state, saves=saves, verify=step.scratch("replay")
        )


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_replays_in_a_graph(device, kind):
    step = make(device, [8] * 3, [4, 2, 0], heads=12, key_dim=128, value_dim=128, dtype=BF16, width=8)
    pools = {"state": step.state, "conv_state": step.conv_state}
    eager, scratch = step.scratch(kind), step.scratch(kind)
    want = kda_mixer_triton(**step.inputs, **step.layer, **step.common, **pools, verify=eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = kda_mixer_triton(**step.inputs, **step.layer, **step.common, **pools, verify=scratch)
    for _ in range(2):
        graph.replay()
        assert got.equal(want)
    for name in GIVEN:
        if (kept := getattr(eager, name)) is not None:
            assert kept.nan_to_num(7).equal(getattr(scratch, name).nan_to_num(7))
