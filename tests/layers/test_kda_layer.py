"""The KDA layer: golden vectors, K != V, state against stateless, stored decay shapes, ranks, gradients."""

import warnings

import pytest
import torch
from seeded import Ranks, copy_shard, draw, seed_weights

from k3lib.batch import Batch, KDAState, StateSaves
from k3lib.config import KDAConfig, KimiK3Config
from k3lib.errors import CheckpointError, ConfigError
from k3lib.layers import KimiDeltaAttention
from k3lib.layers.linear import placement
from k3lib.parallel import RankView
from k3lib.testing import assert_close, tolerance

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
CASES = ["full_rank_gate", "low_rank_gate", "no_lower_bound", "k128"]
SIZES = [pytest.param(32, 48, id="K32-V48"), pytest.param(48, 32, id="K48-V32")]


def config(key_dim=32, value_dim=48, num_heads=3, **changes):
    facts = {"hidden_size": 40, "gate_lower_bound": -5.0, "gate_rank": 24} | changes
    return KDAConfig(num_heads=num_heads, key_dim=key_dim, value_dim=value_dim, **facts)


def layer_of(cfg, dtype=F32, seed=0):
    return seed_weights(KimiDeltaAttention(cfg, dtype=dtype), seed).requires_grad_(requires_grad=False)


def run_chunks(layer, x, chunks, slot=2, mode="prefill"):
    """Feed one request chunk after chunk; return the output, the state and the state after the first chunk."""
    state = layer.new_state(3)
    state.state[slot], state.conv[slot] = 0, 0
    outs, first = [], None
    for part in x.split(chunks):
        outs.append(layer(part, Batch.of([len(part)], slots=[slot], mode=mode), state))
        first = state.state[slot].clone() if first is None else first
    return torch.cat(outs), KDAState(state.state[slot], state.conv[slot]), first


def golden_layer(vectors, name):
    cfg = KimiK3Config.from_hf(vectors.fact(f"{name}.config")).text.kda
    case = vectors.case(name)
    layer = KimiDeltaAttention(cfg, dtype=case["x"].dtype)
    weights = {key.removeprefix("w."): x for key, x in case.items() if key.startswith("w.")}
    # these vectors have one entry of A_log a head; the layer keeps room for the released padding
    layer.load_state_dict(weights, strict=True)
    return layer.requires_grad_(requires_grad=False), case["x"], vectors.fact(f"{name}.chunks")


def conv_parts(layer, conv):
    """The convolution state `[3, C]` as the official `[D, 3]` of q, k and v."""
    keys, values = (layer.num_heads * n for n in (layer.config.key_dim, layer.config.value_dim))
    return dict(zip(("conv_q", "conv_k", "conv_v"), conv.T.split([keys, keys, values]), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_golden_vectors(name, load_golden):
    vectors = load_golden("kda_layer")
    layer, x, chunks = golden_layer(vectors, name)
    y, state, first = run_chunks(layer, x, chunks)
    vectors.check(name, "y", y, atol=5e-5)
    vectors.check(name, "state", state.state, atol=5e-5)
    vectors.check(name, "state_after_first_chunk", first, atol=5e-5)
    for part, value in conv_parts(layer, state.conv).items():
        want = vectors.tensors[f"{name}.out64.{part}"][:, 1:]
        assert (value.double() - want).abs().max() <= 5e-5, part


@pytest.mark.parametrize("name", CASES)
def test_golden_vectors_in_one_pass(name, load_golden):
    vectors = load_golden("kda_layer")
    layer, x, _ = golden_layer(vectors, name)
    vectors.check(name, "y", layer(x, Batch.lengths([len(x)])), atol=5e-5)


def test_bf16_is_no_worse_than_twice_the_official_error(load_golden):
    vectors = load_golden("kda_layer")
    layer, x, chunks = golden_layer(vectors, "bf16")
    y, state, first = run_chunks(layer, x, chunks)
    assert y.dtype == BF16
    for result, got in {"y": y, "state": state.state, "state_after_first_chunk": first}.items():
        want, official = (vectors.tensors[f"bf16.{out}.{result}"].double() for out in ("out64", "out"))
        error, allowed = (got.double() - want).abs(), 2 * (official - want).abs()
        assert error.max() <= allowed.max(), result
        assert error.mean() <= allowed.mean(), result


def test_the_bound_is_a_different_gate_and_not_a_clamp():
    bounded, unbounded = (layer_of(config(gate_lower_bound=bound)) for bound in (-5.0, None))
    x, batch = draw(30, 40), Batch.lengths([30])
    assert (bounded(x, batch) - unbounded(x, batch)).abs().max() > 1e-2


# ---- state against stateless


@pytest.mark.parametrize(("keys", "values"), SIZES)
@pytest.mark.parametrize("bound", [-5.0, None])
def test_chunks_and_single_tokens_equal_the_whole(keys, values, bound):
    layer = layer_of(config(keys, values, gate_lower_bound=bound))
    x = draw(37, 40)
    want = layer(x, Batch.lengths([37]))
    chunked, left, _ = run_chunks(layer, x, [20, 1, 16])
    single, right, _ = run_chunks(layer, x, [1] * 37, mode="decode")
    for name, got in (("chunks", chunked), ("tokens", single)):
        assert_close(name, want, got, tolerance("kda_mixer", F32))
    assert_close("state", left.state, right.state, tolerance("kda_mixer", F32))
    assert_close("conv", left.conv, right.conv, tolerance("kda_mixer", F32))


@pytest.mark.parametrize(("keys", "values"), SIZES)
def test_mixed_batch_equals_its_requests(keys, values):
    layer = layer_of(config(keys, values))
    lengths, slots = [65, 1, 0, 30, 1], [4, 2, 5, 1, 3]
    x = draw(sum(lengths), 40)
    state = layer.new_state(5)
    state.state.copy_(draw(*state.state.shape, seed=1))
    state.conv.copy_(draw(*state.conv.shape, seed=2))
    want = KDAState(state.state.clone(), state.conv.clone())
    out = layer(x, Batch.of(lengths, slots=slots), state)
    for part, got, slot in zip(x.split(lengths), out.split(lengths), slots, strict=True):
        if len(part):
            alone = layer(part, Batch.of([len(part)], slots=[slot]), want)
            assert_close("alone", alone, got, tolerance("kda_mixer", F32))
    assert_close("state", want.state[1:], state.state[1:], tolerance("kda_mixer", F32))
    assert_close("conv", want.conv[1:], state.conv[1:], tolerance("kda_mixer", F32))
    assert torch.equal(state.state[5], want.state[5]), "an empty request must not touch its slot"


def test_packed_stateless_requests_do_not_see_each_other():
    layer = layer_of(config())
    x = draw(16, 40)
    out = layer(x, Batch.lengths([6, 0, 10]))
    assert_close("first", layer(x[:6], Batch.lengths([6])), out[:6], tolerance("kda_mixer", F32))
    assert_close("last", layer(x[6:], Batch.lengths([10])), out[6:], tolerance("kda_mixer", F32))


def test_decode_batch_uses_slots_only():
    layer = layer_of(config())
    state = layer.new_state(4)
    x = draw(2, 40)
    out = layer(x, Batch.decode([3, 1]), state)
    assert_close("fresh", layer(x, Batch.lengths([1, 1])), out, tolerance("kda_mixer", F32))
    assert not state.state[[2, 4]].any()


def test_interior_saves_equal_separate_prefills():
    layer = layer_of(config())
    x = draw(130 + 7, 40)
    saves = StateSaves((0, 0, 0, 1), (64, 128, 77, 3), torch.tensor([3, 4, 5, 6], dtype=torch.int32))
    state = layer.new_state(6)
    layer(x, Batch.of([130, 7], slots=[1, 2], saves=saves), state)
    for request, offset, slot in zip(saves.requests, saves.offsets, (3, 4, 5, 6), strict=True):
        part = x.split([130, 7])[request][:offset]
        _, want, _ = run_chunks(layer, part, [offset])
        assert_close("state", want.state, state.state[slot], tolerance("kda_mixer", F32))
        assert_close("conv", want.conv, state.conv[slot], tolerance("kda_mixer", F32))


def test_a_state_needs_slots():
    layer = layer_of(config())
    with pytest.raises(ConfigError, match="no slots"):
        layer(draw(3, 40), Batch.lengths([3]), layer.new_state(1))


@pytest.mark.parametrize("count", [0, -1])
def test_new_state_needs_a_slot(count):
    with pytest.raises(ConfigError, match=f"num_slots must be >= 1, got {count}"):
        layer_of(config()).new_state(count)


# ---- stored decay


def stored(layer, decay):
    return layer.state_dict() | {"A_log": decay}


@pytest.mark.parametrize(
    "shape",
    [lambda a: a, lambda a: torch.cat([a, torch.zeros(5)]), lambda a: a.view(1, 1, -1, 1)],
    ids=["H", "H+5", "4D"],
)
def test_decay_is_read_in_every_stored_shape(shape):
    layer = layer_of(config())
    live = draw(3, seed=9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.load_state_dict(stored(layer, shape(live)))
    assert torch.equal(layer.A_log[:3], live)
    assert not layer.A_log[3:].any()


def test_a_tail_of_the_decay_warns_once_and_changes_nothing():
    layer = layer_of(config())
    x, batch = draw(9, 40), Batch.lengths([9])
    live = layer.A_log[:3].clone()
    layer.load_state_dict(stored(layer, live))
    want = layer(x, batch)
    with pytest.warns(UserWarning, match="A_log.*ignored") as caught:
        layer.load_state_dict(stored(layer, torch.cat([live, torch.full((29,), 7.0)])))
    assert len(caught) == 1
    assert torch.equal(layer(x, batch), want)


@pytest.mark.parametrize("shape", [(2,), (1, 1, 2, 1), (1, 1, 4, 1), (3, 1), (1, 3)], ids=str)
def test_a_decay_of_another_shape_is_refused(shape):
    layer = layer_of(config())
    with pytest.raises(CheckpointError) as caught:
        layer.load_state_dict(stored(layer, torch.zeros(shape)))
    message = str(caught.value)
    assert "A_log" in message
    assert str(shape) in message
    assert "3" in message


def test_a_short_decay_is_refused_with_tensor_length_and_heads():
    layer = torch.nn.ModuleDict({"self_attn": layer_of(config())})
    with pytest.raises(CheckpointError, match=r"self_attn\.A_log: .*2 entries.*3 heads"):
        layer.load_state_dict(layer.state_dict() | {"self_attn.A_log": torch.zeros(2)})


def test_a_missing_decay_is_reported_by_torch():
    layer = layer_of(config())
    weights = layer.state_dict()
    del weights["A_log"]
    with pytest.raises(RuntimeError, match="A_log"):
        layer.load_state_dict(weights)


# ---- dtypes


def test_wide_weights_survive_a_narrow_cast():
    layer = layer_of(config())
    before = {name: x.clone() for name, x in layer.named_parameters()}
    layer.to(BF16)
    kept = {"A_log", "dt_bias", "o_norm.weight", "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"}
    assert {name for name, x in layer.named_parameters() if x.dtype == F32} == kept
    assert all(torch.equal(x, before[name]) for name, x in layer.named_parameters() if name in kept)
    assert layer.half().A_log.dtype == F32
    assert {x.dtype for x in layer.double().parameters()} == {F64}


def test_state_is_fp32_and_window_has_the_activation_dtype():
    state = layer_of(config(), BF16).new_state(2)
    assert (state.state.dtype, state.conv.dtype) == (F32, BF16)
    assert state.state.shape == (3, 3, 48, 32)
    assert state.conv.shape == (3, 3, 3 * (32 + 32 + 48))
    assert layer_of(config(), F64).new_state(1).state.dtype == F64


def test_fp64_agrees_with_fp32():
    x = draw(25, 40, dtype=F64)
    want = layer_of(config(), F64)(x, Batch.lengths([25]))
    assert_close("fp32", want, layer_of(config())(x.float(), Batch.lengths([25])), tolerance("kda_mixer", F32))


# ---- ranks


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("full_rank", [True, False])
def test_shards_make_the_whole(size, full_rank):
    full = layer_of(config(num_heads=4, full_rank_gate=full_rank))
    ranks = [
        copy_shard(full, KimiDeltaAttention(full.config, tp=RankView(rank, size), dtype=F32)) for rank in range(size)
    ]
    for name, whole in full.named_parameters():
        parts = [dict(rank.named_parameters())[name] for rank in ranks]
        if name == "A_log":
            assert torch.equal(torch.cat([part[: 4 // size] for part in parts]), whole[:4])
        elif (shard := placement(parts[0]).shard) is None:
            assert all(torch.equal(part, whole) for part in parts)
        else:
            assert torch.equal(torch.cat(parts, dim=shard.dim), whole), name


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_add_up_to_one(size):
    full = layer_of(config(num_heads=4))
    x = draw(21, 40)
    batches = [Batch.of([20], slots=[1]), Batch.of([1], slots=[1], mode="decode")]

    def steps(layer):
        state = layer.new_state(1)
        return torch.cat(
            [layer(part, batch, state) for part, batch in zip(x.split([20, 1]), batches, strict=True)]
        ), state

    def work(group):
        layer = copy_shard(full, KimiDeltaAttention(full.config, tp=group, dtype=F32))
        return steps(layer)

    want, state = steps(full)
    results = Ranks(size).run(work)
    for out, _ in results:
        assert_close("out", want, out, tolerance("kda_mixer", F32))
    heads = torch.cat([mine.state for _, mine in results], dim=1)
    assert_close("state", state.state, heads, tolerance("kda_mixer", F32))


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match=r"tp_size=2.*KDA heads.*one of 1, 3"):
        KimiDeltaAttention(config(), tp=RankView(0, 2))


def test_a_rank_view_does_not_pretend_to_communicate():
    layer = KimiDeltaAttention(config(num_heads=4), tp=RankView(1, 2), dtype=F32)
    with pytest.raises(ConfigError, match="all_reduce over 2 ranks"):
        layer(draw(3, 40), Batch.lengths([3]))


# ---- gradients


def test_gradients_reach_every_weight_and_the_input():
    layer = seed_weights(KimiDeltaAttention(config(), dtype=F32))
    x = draw(20, 40).requires_grad_()
    layer(x, Batch.lengths([13, 7])).square().sum().backward()
    for name, weight in layer.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.isfinite().all(), name
        assert weight.grad.any(), name
    assert x.grad.any()


def test_gradient_is_the_derivative():
    cfg = config(key_dim=3, value_dim=4, num_heads=2, hidden_size=5, gate_rank=2)
    layer = seed_weights(KimiDeltaAttention(cfg, dtype=F64))
    x = draw(7, 5, dtype=F64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: layer(x, Batch.lengths([4, 3])), (x,))


def test_gradients_flow_through_a_step_that_writes_its_pool():
    layer = seed_weights(KimiDeltaAttention(config(), dtype=F32))
    x = draw(12, 40).requires_grad_()
    state = layer.new_state(2)
    state.state.copy_(draw(*state.state.shape, seed=3))
    stateless = layer_of(config())
    pools = KDAState(state.state.clone(), state.conv.clone())
    out = layer(x, Batch.of([5, 7], slots=[2, 1]), state)
    out.sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad.any()
    assert_close("out", stateless(x.detach(), Batch.of([5, 7], slots=[2, 1]), pools), out, tolerance("kda_mixer", F32))


def test_parameter_names_are_the_stored_ones(load_golden):
    vectors = load_golden("kda_layer")
    for name in ("full_rank_gate", "low_rank_gate"):
        layer, _, _ = golden_layer(vectors, name)
        assert set(layer.state_dict()) == {key.removeprefix("w.") for key in vectors.case(name) if key.startswith("w.")}


def test_a_state_of_another_dtype_is_refused_before_it_is_touched():
    layer = KimiDeltaAttention(
        KDAConfig(hidden_size=8, num_heads=2, key_dim=4, value_dim=4, gate_lower_bound=-5.0), dtype=torch.float32
    )
    state = layer.to(torch.bfloat16).new_state(1)
    layer.to(torch.float32)
    with pytest.raises(ConfigError, match=r"convolution state is torch\.bfloat16, the layer input torch\.float32"):
        layer(torch.randn(1, 8), Batch.decode(slots=[1]), state)
    assert not state.conv.any()
