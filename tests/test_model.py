"""The whole model: golden checkpoints, invariances of batching and chunking, taps, slices, refusals, gradients."""

import copy
import dataclasses
import functools
import json
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from seeded import Ranks, draw, seed_weights

from k3lib import Batch, KimiK3ForCausalLM, Mesh, ops
from k3lib import model as model_module
from k3lib.batch import FeatureTap, RouteTap, StateSaves
from k3lib.cache import CacheConfig, HybridCache
from k3lib.cache.pools import HybridPool
from k3lib.errors import BackendUnavailable, CheckpointError, ConfigError, RequestError
from k3lib.layers import AttnResStream
from k3lib.ops import observe, register, use_backend
from k3lib.parallel import RankView
from k3lib.testing import assert_close, random_batch, tiny_config

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore:.*padding behind the heads")  # the golden tails are not zero on purpose
LOGITS = 1e-4  # relative, between paths that are equal in exact arithmetic
STATES = 1e-5

# ---- golden checkpoints

TOLERANCE = {
    "tiny_k3_dev": 2e-4,
    "tiny_k3_dev_mxfp4": 2e-4,
    "tiny_k3_wide": 1e-4,
    "tiny_k3_wide_mxfp4": 1e-4,
    "tiny_k3_wide_nvfp4": 1e-4,
}
EVERY = pytest.mark.parametrize("name", TOLERANCE)
PLAIN = pytest.mark.parametrize("name", ["tiny_k3_dev", "tiny_k3_wide"])


class Expected:
    """The expected outputs of a checkpoint; `ids` maps each text prompt to its token ids."""

    def __init__(self, golden, name):
        self.tensors, self.metadata = {}, {}
        for file in (golden / f"{name}_expected.safetensors", golden / f"{name}_expected_long.safetensors"):
            with safe_open(file, "pt") as opened:
                self.metadata |= opened.metadata()
                self.tensors |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - not a dict
        self.ids = {key[:2]: x for key, x in sorted(self.tensors.items()) if key.endswith(".ids") and key[0] == "p"}
        self.report = json.loads(self.metadata["report"])

    def check(self, key, got, atol):
        want = self.tensors[key].double()
        assert got.shape == want.shape, key
        error = (got.double() - want).abs().max()
        assert error <= atol, f"{key}: off by {float(error):.3g}, allowed {atol}"


@pytest.fixture(scope="module")
def load(golden):
    """Function from name and dtype to a golden model, loaded once."""

    @functools.cache
    def loaded(name, dtype=F32, layers=None):
        return KimiK3ForCausalLM.from_pretrained(golden / name, dtype=dtype, layers=layers, progress=False)

    return loaded


@pytest.fixture(scope="module")
def expected(golden):
    return functools.cache(lambda name: Expected(golden, name))


def new_cache(model, lengths, page_size=16):
    pages = sum(math.ceil(n / page_size) for n in lengths)
    return HybridCache.allocate(
        model.config, CacheConfig(num_pages=pages, num_slots=len(lengths), page_size=page_size), dtype=model.dtype
    )


def step(model, cache, work, mode):
    """Run one step over `(lease, ids)` pairs; return the logits of each request."""
    for lease, ids in work:
        cache.grow(lease, tokens=len(ids))
    with torch.no_grad():
        logits = model(cache.make_batch(work, mode=mode), cache)
    for lease, ids in work:
        cache.commit(lease, ids)
    return logits.split([len(ids) for _, ids in work])


@EVERY
def test_golden_logits_of_each_prompt_alone_and_together(name, load, expected):
    model, want = load(name), expected(name)
    together = model(Batch.pack(list(want.ids.values()))).split([len(ids) for ids in want.ids.values()])
    for (prompt, ids), packed in zip(want.ids.items(), together, strict=True):
        want.check(f"fp64.{prompt}.logits", model(Batch.pack([ids])), TOLERANCE[name])
        want.check(f"fp64.{prompt}.logits", packed, TOLERANCE[name])


@EVERY
def test_golden_logits_in_float64_agree_to_the_last_digits(name, load, expected):
    """The formulas are the same: what is left of the float32 differences is rounding."""
    model, want = load(name, torch.float64), expected(name)
    for prompt, ids in want.ids.items():
        want.check(f"fp64.{prompt}.logits", model(Batch.pack([ids])), 1e-11)


@EVERY
@pytest.mark.parametrize("piece", [pytest.param(17, marks=pytest.mark.again), 64])
def test_golden_logits_of_prompts_in_pieces(name, piece, load, expected):
    model, want = load(name), expected(name)
    cache = new_cache(model, [len(ids) for ids in want.ids.values()])
    leases = {prompt: cache.open(ids.tolist()) for prompt, ids in want.ids.items()}
    got = {prompt: [] for prompt in want.ids}
    for start in range(0, max(len(ids) for ids in want.ids.values()), piece):
        running = [prompt for prompt, ids in want.ids.items() if start < len(ids)]
        work = [(leases[prompt], want.ids[prompt][start : start + piece].tolist()) for prompt in running]
        for prompt, logits in zip(running, step(model, cache, work, "prefill"), strict=True):
            got[prompt].append(logits)
    for prompt, pieces in got.items():
        want.check(f"fp64.{prompt}.logits", torch.cat(pieces), TOLERANCE[name])


def check_states(want, prefix, model, cache, lease, atol):
    """The KDA and convolution state of every layer against `<prefix>.layerI.*`, official columns 1..3."""
    for layer in model.config.text.layers_of("kda"):
        view, kda = cache.view(layer), model.config.text.kda
        want.check(f"{prefix}.layer{layer}.kda_state", view.state[lease.slot], atol)
        width = kda.num_heads * kda.key_dim
        for part, got in zip("qkv", view.conv[lease.slot].T.split(width), strict=True):
            key = f"{prefix}.layer{layer}.conv_{part}"
            assert (got - want.tensors[key][:, 1:]).abs().max() <= atol, key


@EVERY
def test_golden_greedy_continuation_through_the_cache(name, load, expected):
    model, want = load(name), expected(name)
    cache = new_cache(model, [len(ids) + 15 for ids in want.ids.values()])
    leases = [cache.open(ids.tolist()) for ids in want.ids.values()]
    work = [(lease, ids.tolist()) for lease, ids in zip(leases, want.ids.values(), strict=True)]
    logits = [[x[-1]] for x in step(model, cache, work, "prefill")]
    with_states = [prompt for prompt in want.ids if f"fp32.{prompt}.layer0.kda_state" in want.tensors]
    assert bool(with_states) == (name in {"tiny_k3_dev", "tiny_k3_wide"})
    for prompt, lease in zip(want.ids, leases, strict=True):
        if prompt in with_states:
            check_states(want, f"fp32.{prompt}", model, cache, lease, TOLERANCE[name])
    for _ in range(15):
        work = [(lease, [int(x[-1].argmax())]) for lease, x in zip(leases, logits, strict=True)]
        for mine, new in zip(logits, step(model, cache, work, "decode"), strict=True):
            mine.append(new[-1])
    for prompt, mine, lease in zip(want.ids, logits, leases, strict=True):
        got = torch.stack(mine)
        assert torch.equal(got.argmax(-1), want.tensors[f"fp32.{prompt}.greedy_ids"]), prompt
        want.check(f"fp64.{prompt}.greedy_logits", got, TOLERANCE[name])
        if prompt in with_states:
            check_states(want, f"fp32.{prompt}.after_greedy", model, cache, lease, TOLERANCE[name])
        cache.close(lease)
    cache.clear()
    cache.check()
    assert (cache.free_pages, cache.free_slots) == (cache.config.num_pages, cache.config.num_slots)


@PLAIN
def test_golden_intermediates(name, load, expected):
    model, want = load(name), expected(name)
    seen = {"attn_out": [], "ffn_out": []}
    hooks = []
    for layer in model.model.layers:
        ffn = layer.mlp if layer.is_dense else layer.block_sparse_moe
        for outs, module in ((seen["attn_out"], layer.self_attn), (seen["ffn_out"], ffn)):
            hooks += [module.register_forward_hook(lambda _m, _i, out, outs=outs: outs.append(out))]
    depth = model.config.text.num_layers
    for prompt, ids in want.ids.items():
        if f"fp32.{prompt}.prefix_sum" not in want.tensors:
            continue
        for outs in seen.values():
            outs.clear()
        taps = FeatureTap(tuple(range(depth)), "prefix")
        stream = model.model.run(model.model.start(model.model.embed_tokens(ids)), Batch.pack([ids]), taps=taps)
        prefix = taps.out.view(len(ids), depth, -1).transpose(0, 1)
        want.check(f"fp32.{prompt}.prefix_sum", prefix, TOLERANCE[name])
        want.check(f"fp32.{prompt}.block_residual_final", stream.history(), TOLERANCE[name])
        for what, outs in seen.items():
            want.check(f"fp32.{prompt}.{what}", torch.stack(outs), TOLERANCE[name])
    for hook in hooks:
        hook.remove()


def distance(want, got):
    """Mean absolute difference of the logits, mean KL divergence, agreement of the best token."""
    want, got = want.double(), got.double()
    kl = (want.softmax(-1) * (want.log_softmax(-1) - got.log_softmax(-1))).sum(-1).mean()
    return float((want - got).abs().mean()), float(kl), float((want.argmax(-1) == got.argmax(-1)).double().mean())


@EVERY
def test_golden_bf16_run_is_as_good_as_the_official_one(name, load, expected):
    """Mean error of each prompt; KL and best token over all prompts, where one routing flip does not decide."""
    model, want = load(name, None), expected(name)
    assert model.dtype == BF16
    total, mine, official = 0, [0.0, 0.0], [0.0, 0.0]
    for prompt, ids in want.ids.items():
        reported = want.report[f"{prompt}.logits"]["bf16"]
        mean, *rest = distance(want.tensors[f"fp64.{prompt}.logits"], model(Batch.pack([ids])))
        assert mean <= 2 * reported["mean"], prompt
        total += len(ids)
        for i, key in enumerate(("kl", "top1")):
            mine[i] += len(ids) * rest[i]
            official[i] += len(ids) * reported[key]
    assert mine[0] <= 3 * official[0]
    assert mine[1] / total >= official[1] / total - 0.05


def test_the_distance_is_that_of_the_report(expected):
    want = expected("tiny_k3_dev")
    mean, kl, top1 = distance(want.tensors["fp64.p0.logits"], want.tensors["bf16.p0.logits"])
    official = want.report["p0.logits"]["bf16"]
    assert (mean, kl, top1) == pytest.approx((official["mean"], official["kl"], official["top1"]), rel=1e-3)


@pytest.mark.parametrize("name", ["tiny_k3_dev", "tiny_k3_dev_mxfp4", "tiny_k3_wide_nvfp4"])
def test_golden_logits_of_two_ranks(name, golden, load, expected):
    want = expected(name)
    prompts = [want.ids["p0"], want.ids["p1"], want.ids["p2"]]

    def work(group):
        mesh = Mesh(tp=group)
        model = KimiK3ForCausalLM.from_pretrained(golden / name, dtype=F32, mesh=mesh, progress=False)
        return model(Batch.pack(prompts))

    for logits in Ranks(2).run(work):
        for prompt, got in zip(("p0", "p1", "p2"), logits.split([len(ids) for ids in prompts]), strict=True):
            want.check(f"fp64.{prompt}.logits", got, TOLERANCE[name])


# ---- the seeded miniature


@functools.cache
def tiny(dtype=F32, **changes):
    """The miniature with seeded weights and without gradients."""
    config = tiny_config(**changes)
    return seed_weights(KimiK3ForCausalLM(config, dtype=dtype)).requires_grad_(requires_grad=False).eval()


def prompt_of(length, seed=0):
    return random_batch([length], 512, seed).input_ids.tolist()


def pool_of(model, num_pages=12, num_slots=6, page_size=8):
    config = CacheConfig(num_pages=num_pages, num_slots=num_slots, page_size=page_size)
    return HybridPool(model.config.text, config, dtype=model.dtype, device="cpu")


def run_chunks(model, ids, chunks, *, mode="prefill", page_size=5):
    """Logits of a prompt in chunks through a cache."""
    cache = new_cache(model, [len(ids)], page_size)
    with cache.lease(ids) as lease:
        parts = torch.tensor(ids).split(chunks)
        return torch.cat([step(model, cache, [(lease, part.tolist())], mode)[0] for part in parts])


@functools.cache
def whole(length, **changes):
    return tiny(**changes)(Batch.pack([prompt_of(length)]))


@pytest.mark.slow
@settings(max_examples=8)
@given(data=st.data())
def test_any_chunking_gives_the_same_logits(data):
    cuts = sorted(data.draw(st.sets(st.integers(1, 39), max_size=4)))
    chunks = [b - a for a, b in zip([0, *cuts], [*cuts, 40], strict=True)]
    assert_close(str(chunks), whole(40), run_chunks(tiny(), prompt_of(40), chunks), LOGITS)


@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_token_by_token_gives_the_same_logits(mode):
    assert_close(mode, whole(24), run_chunks(tiny(), prompt_of(24), [1] * 24, mode=mode), LOGITS)


def test_a_verify_step_without_scratch_is_refused_and_leaves_the_committed_state_alone():
    model = tiny()
    cache = HybridCache.allocate(model.config, CacheConfig(num_pages=2, num_slots=1), dtype=torch.float32)
    with cache.lease([1, 2, 3]) as lease:
        cache.grow(lease, tokens=3)
        batch = cache.make_batch([(lease, [1, 2, 3])], mode="verify")
        with pytest.raises(ConfigError, match="no verify scratch"):
            model(batch, cache)
        assert not cache.pool.kda.state.any()


@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
def test_prefill_then_decode_at_awkward_lengths(length):
    ids = prompt_of(length + 3)
    want = tiny()(Batch.pack([ids]))
    got = run_chunks(tiny(), ids, [length, 1, 1, 1])
    assert_close("logits", want, got, LOGITS)


def variant(changes):
    key, value = next(iter(changes.items()))
    return f"{key}={value}"


VARIANTS = [
    {"gate_lower_bound": None},
    {"use_full_rank_gate": False},
    {"q_lora_rank": None},
    {"attn_res_block_size": None},
    {"attn_res_block_size": 1},
    {"num_expert_group": 4, "topk_group": 2},
    {"routed_expert_hidden_size": None, "latent_moe_use_norm": False},
    {"num_shared_experts": 0},
    {"first_k_dense_replace": 3},
    {"head_dim": 24},
    {"num_heads": 3},
    {"activation_situ_linear_beta": None},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=variant)
def test_every_variant_agrees_with_itself_through_the_cache(changes):
    got = run_chunks(tiny(**changes), prompt_of(21), [12, 1, 1, 7])
    assert got.isfinite().all()
    assert_close("logits", whole(21, **changes), got, LOGITS)


@pytest.mark.parametrize(
    "changes",
    [
        {"gate_lower_bound": None},
        {"attn_res_block_size": None},
        {"attn_res_block_size": 3},
        {"num_expert_group": 4, "topk_group": 2},
        {"activation_situ_linear_beta": None},
        {"num_experts_per_token": 3},
        {"rms_norm_eps": 1e-2},
    ],
    ids=variant,
)
def test_a_changed_key_changes_the_logits_of_the_same_weights(changes):
    model = KimiK3ForCausalLM(tiny_config(**changes), dtype=F32)
    model.load_state_dict(tiny().state_dict(), strict="attn_res_block_size" not in changes)
    assert (model(Batch.pack([prompt_of(21)])) - whole(21)).abs().max() > 1e-2


def test_alone_equals_mixed_batch():
    lengths = [65, 1, 0, 30, 1]
    batch = random_batch(lengths, 512)
    together = tiny()(batch).split(lengths)
    for ids, got in zip(batch.input_ids.split(lengths), together, strict=True):
        if len(ids):
            assert_close("alone", tiny()(Batch.pack([ids])), got, LOGITS)


def test_mixed_prefill_and_decode_step_equals_each_alone():
    model, prompts = tiny(), [prompt_of(n, n) for n in (20, 33, 9)]
    cache = new_cache(model, [24, 40, 12], 8)
    leases = [cache.open(ids) for ids in prompts]
    step(model, cache, [(leases[0], prompts[0][:19]), (leases[1], prompts[1][:10])], "prefill")
    work = [(leases[2], prompts[2]), (leases[0], prompts[0][19:]), (leases[1], prompts[1][10:])]
    for i, got in zip((2, 0, 1), step(model, cache, work, "prefill"), strict=True):
        assert_close(f"request {i}", model(Batch.pack([prompts[i]]))[-len(got) :], got, LOGITS)


def test_last_logits_are_the_last_rows():
    batch = random_batch([5, 1, 8], 512)
    assert_close("last", tiny()(batch)[[4, 5, 13]], tiny()(batch, logits="last"), STATES)


def test_last_logits_of_a_request_without_tokens_are_zero():
    batch = random_batch([5, 0, 8], 512)
    got = tiny()(batch, logits="last")
    assert_close("last", tiny()(batch)[[4, 12]], got[[0, 2]], STATES)
    assert not got[1].any()


@pytest.mark.parametrize("sequences", [[], [[]], [torch.zeros(0)], [torch.zeros(0, dtype=torch.int64), []]], ids=str)
def test_no_tokens_give_no_logits(sequences):
    batch = Batch.pack(sequences)
    assert tiny()(batch).shape == (0, 512)
    assert tiny()(batch, logits="last").shape == (len(sequences), 512)


@pytest.mark.parametrize("dtype", [F32, BF16, F64])
def test_logits_are_at_least_fp32(dtype):
    logits = tiny(dtype)(Batch.pack([prompt_of(5)]))
    assert logits.dtype == (F64 if dtype == F64 else F32)


def test_fp32_agrees_with_fp64():
    assert_close("logits", tiny(F64)(Batch.pack([prompt_of(40)])), whole(40), LOGITS)


def test_the_same_call_gives_the_same_bits():
    assert torch.equal(tiny()(Batch.pack([prompt_of(40)])), tiny()(Batch.pack([prompt_of(40)])))


def test_embeddings_can_be_given():
    ids = torch.tensor(prompt_of(12))
    embeds = tiny().model.embed_tokens(ids)
    before = embeds.clone()
    got = tiny()(Batch.lengths([12]), inputs_embeds=embeds)
    assert torch.equal(got, tiny()(Batch.pack([ids])))
    assert torch.equal(embeds, before)


def test_autograd_and_inference_give_the_same_logits():
    with torch.no_grad():
        got = tiny()(Batch.pack([prompt_of(40)]))
    assert_close("logits", whole(40), got, LOGITS)


# ---- interior states


def test_interior_saves_equal_separate_prefills():
    model = tiny()
    ids, other = prompt_of(130), prompt_of(9, 1)
    saves = StateSaves((0, 0, 1, 0), (64, 128, 4, 77), torch.tensor([3, 4, 5, 6], dtype=torch.int32))
    pool = pool_of(model, num_pages=20, num_slots=6)
    batch = Batch.of(
        [130, 9], slots=[1, 2], page_tables=[[*range(1, 18)], [18, 19]], page_size=8,
        input_ids=torch.tensor(ids + other), saves=saves,
    )  # fmt: skip
    with torch.no_grad():
        logits = model(batch, pool)
    assert_close("logits", torch.cat([model(Batch.pack([x])) for x in (ids, other)]), logits, LOGITS)
    for request, offset, slot in zip(saves.requests, saves.offsets, (3, 4, 5, 6), strict=True):
        alone = pool_of(model, num_pages=20, num_slots=1)
        part = torch.tensor((ids, other)[request][:offset])
        with torch.no_grad():
            model(Batch.of([offset], slots=[1], page_tables=[[*range(1, 20)]], page_size=8, input_ids=part), alone)
        assert_close("state", alone.kda.state[:, 1], pool.kda.state[:, slot], STATES)
        assert_close("conv", alone.kda.conv[:, 1], pool.kda.conv[:, slot], STATES)


def test_a_saved_state_and_its_pages_continue_the_request():
    model, ids = tiny(), prompt_of(30)
    pool = pool_of(model)
    saves = StateSaves((0,), (13,), torch.tensor([4], dtype=torch.int32))
    pages, rest = [[1, 2, 3, 4]], torch.tensor(ids[13:])
    with torch.no_grad():
        model(Batch.of([30], slots=[1], page_tables=pages, page_size=8, input_ids=torch.tensor(ids), saves=saves), pool)
        again = Batch.of([17], cached_tokens=[13], slots=[4], page_tables=pages, page_size=8, input_ids=rest)
        got = model(again, pool)
    assert_close("logits", model(Batch.pack([ids]))[13:], got, LOGITS)


# ---- first layers, slices, taps


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 9])
def test_first_layers_equal_a_tap_of_the_whole_model(count, golden, load, expected):
    full, ids = load("tiny_k3_dev"), expected("tiny_k3_dev").ids["p0"]
    first = KimiK3ForCausalLM.from_pretrained(golden / "tiny_k3_dev", dtype=F32, layers=range(count), progress=False)
    assert [layer.index for layer in first.model.layers] == list(range(count))
    taps, batch = FeatureTap((count - 1,), "prefix"), Batch.pack([ids])
    full(batch, taps=taps)
    mine = FeatureTap((count - 1,), "prefix")
    logits = first(batch, taps=mine)
    assert torch.equal(mine.out, taps.out)
    assert logits.shape == (len(ids), 512)
    assert set(first.state_dict()) <= set(full.state_dict())


def test_tensors_of_other_layers_are_not_needed(golden, load, tmp_path):
    with safe_open(golden / "tiny_k3_dev" / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if "layers." not in name or "layers.0." in name or "layers.1." in name]  # noqa: SIM118
        save_file({name: file.get_tensor(name) for name in names}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((golden / "tiny_k3_dev" / "config.json").read_text())
    first = KimiK3ForCausalLM.from_pretrained(tmp_path, dtype=F32, layers=range(2), progress=False)
    assert first(Batch.pack([prompt_of(5)])).isfinite().all()
    with pytest.raises(CheckpointError, match=r"layers\.2\."):
        KimiK3ForCausalLM.from_pretrained(tmp_path, dtype=F32, layers=range(3), progress=False)


CUTS = [(0, 4, 9), (0, 5, 9), (0, 1, 9), (0, 3, 6, 9), (0, 4, 8, 9), (0, 2, 5, 7, 9)]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_stages_equal_the_whole(cuts, golden, load):
    full, ids = load("tiny_k3_dev"), torch.tensor(prompt_of(20))
    batch = Batch.pack([ids])
    stages = [load("tiny_k3_dev", F32, range(a, b)) for a, b in pairwise(cuts)]
    prefix, bank = stages[0].model.embed_tokens(ids), None
    with torch.no_grad():
        for stage, begin in zip(stages, cuts, strict=False):
            assert (0 if bank is None else bank.shape[1]) == math.ceil(begin / 4)
            stream = stage.model.run(stage.model.start(prefix, bank=bank), batch)
            prefix, bank = stream.hidden(), stream.history()
        last = stages[-1]
        logits = last.lm_head(stream.read(last.model.output_read))
        assert_close("logits", full(batch), logits, LOGITS)


def test_stages_decode_through_their_own_pools(load):
    full, ids = load("tiny_k3_dev"), torch.tensor(prompt_of(20))
    want = full(Batch.pack([ids]))
    spans = [range(5), range(5, 9)]
    stages = [load("tiny_k3_dev", F32, span) for span in spans]
    config = CacheConfig(num_pages=3, num_slots=1, page_size=8)
    pools = [HybridPool(full.config.text, config, dtype=F32, device="cpu", layers=span) for span in spans]
    got, done = [], 0
    with torch.no_grad():
        for part in ids.split([12, 1, 7]):
            batch = Batch.of(
                [len(part)], cached_tokens=[done], slots=[1], page_tables=[[1, 2, 3]], page_size=8, input_ids=part
            )
            first = stages[0].model.run(stages[0].model.start(stages[0].model.embed_tokens(part)), batch, pools[0])
            second = stages[1].model.start(first.hidden(), bank=first.history())
            stages[1].model.run(second, batch, pools[1])
            got.append(stages[1].lm_head(second.read(stages[1].model.output_read)))
            done += len(part)
    assert_close("logits", want, torch.cat(got), LOGITS)


@pytest.mark.parametrize(
    "layers",
    [range(0), range(10), range(3, 3), range(5, 3), range(-1, 3), range(0, 8, 2), (0, 1), 3, range(9, 10)],
    ids=str,
)
def test_ranges_that_are_no_slice_are_refused(layers):
    with pytest.raises(ConfigError) as caught:
        KimiK3ForCausalLM(tiny_config(), layers=layers, device="meta")
    assert str(layers) in str(caught.value)
    assert "0..9" in str(caught.value)


@pytest.mark.parametrize(("layers", "rows"), [(range(5, 9), 0), (range(5, 9), 1), (range(4, 9), 2), (range(3), 1)])
def test_a_slice_needs_its_history(layers, rows):
    model = seed_weights(KimiK3ForCausalLM(tiny_config(), layers=layers, dtype=F32))
    bank = draw(4, rows, 96) if rows else None
    with pytest.raises(ConfigError, match=f"layer {layers.start} needs .* got {rows}"):
        model.model.start(draw(4, 96), bank=bank)


def test_a_middle_slice_does_not_run_by_itself():
    model = seed_weights(KimiK3ForCausalLM(tiny_config(), layers=range(3, 6), dtype=F32))
    with pytest.raises(ConfigError, match=r"layers 3\.\.5 only.*start\(\) and run\(\)"):
        model(Batch.pack([prompt_of(3)]))


def test_a_mixture_tap_is_what_the_next_layer_reads():
    model, batch = tiny(), Batch.pack([prompt_of(20)])
    taps = FeatureTap(tuple(range(9)), "mixture")
    read = {}
    hooks = [
        layer.self_attn.register_forward_pre_hook(lambda _m, inputs, i=layer.index: read.update({i: inputs[0]}))
        for layer in model.model.layers
    ]
    out = model.model(batch, taps=taps)
    for hook in hooks:
        hook.remove()
    for layer, mixture in enumerate(taps.out.split(96, dim=-1)):
        norm = model.model.layers[layer + 1].input_layernorm if layer < 8 else model.model.norm
        assert_close(f"after {layer}", read[layer + 1] if layer < 8 else out, norm(mixture), STATES)


@pytest.mark.parametrize("kind", ["prefix", "mixture"])
def test_taps_are_the_same_in_chunks_and_do_not_change_the_logits(kind):
    model, ids = tiny(), prompt_of(20)
    taps = FeatureTap((7, 2, 8), kind)
    assert_close("logits", whole(20), model(Batch.pack([ids]), taps=taps), LOGITS)
    pool, got, done = pool_of(model), [], 0
    with torch.no_grad():
        for part in torch.tensor(ids).split([13, 1, 6]):
            mine = FeatureTap((7, 2, 8), kind)
            batch = Batch.of(
                [len(part)], cached_tokens=[done], slots=[1], page_tables=[[1, 2, 3]], page_size=8, input_ids=part
            )
            model(batch, pool, taps=mine)
            got.append(mine.out)
            done += len(part)
    assert_close("features", taps.out, torch.cat(got), LOGITS)


def test_the_two_kinds_of_tap_differ():
    prefix, mixture = FeatureTap((2,), "prefix"), FeatureTap((2,), "mixture")
    for taps in (prefix, mixture):
        tiny()(Batch.pack([prompt_of(20)]), taps=taps)
    assert (prefix.out - mixture.out).abs().max() > 0.1


def test_a_slice_cannot_tap_a_mixture_of_weights_it_lacks():
    model = seed_weights(KimiK3ForCausalLM(tiny_config(), layers=range(3), dtype=F32))
    with pytest.raises(ConfigError, match="after layer 2 needs weights of layer 3"):
        model(Batch.pack([prompt_of(3)]), taps=FeatureTap((2,), "mixture"))


# ---- routes


def routes(batch, ids, *, replay):
    batch.routes = RouteTap(ids, replay=replay)
    return batch


def test_routes_are_recorded_and_replayed():
    model, ids = tiny(), prompt_of(20)
    recorded = torch.full((20, 8, 4), -1, dtype=torch.int32)
    assert torch.equal(model(routes(Batch.pack([ids]), recorded, replay=False)), whole(20))
    assert ((recorded >= 0) & (recorded < 16)).all()
    assert torch.equal(model(routes(Batch.pack([ids]), recorded.clone(), replay=True)), whole(20))
    other = torch.arange(4, dtype=torch.int32).expand(20, 8, 4)
    assert (model(routes(Batch.pack([ids]), other, replay=True)) - whole(20)).abs().max() > 1e-2


def test_routes_recorded_in_chunks_equal_those_of_the_whole():
    model, ids = tiny(), prompt_of(20)
    recorded = torch.full((20, 8, 4), -1, dtype=torch.int32)
    model(routes(Batch.pack([ids]), recorded, replay=False))
    pool, got, done = pool_of(model), [], 0
    with torch.no_grad():
        for part in torch.tensor(ids).split([13, 1, 6]):
            mine = torch.full((len(part), 8, 4), -1, dtype=torch.int32)
            batch = Batch.of(
                [len(part)], cached_tokens=[done], slots=[1], page_tables=[[1, 2, 3]], page_size=8, input_ids=part
            )
            model(routes(batch, mine, replay=False), pool)
            got.append(mine)
            done += len(part)
    assert torch.equal(torch.cat(got).sort(-1).values, recorded.sort(-1).values)


@pytest.mark.parametrize("dense", [1, 3])
def test_routes_count_the_layers_with_experts(dense):
    model = tiny(first_k_dense_replace=dense)
    chosen = {}
    hooks = [
        layer.block_sparse_moe.gate.register_forward_hook(
            lambda _module, _inputs, routing, index=layer.index: chosen.update({index: routing.ids})
        )
        for layer in model.model.layers
        if not layer.is_dense
    ]
    recorded = torch.full((7, 9 - dense, 4), -1, dtype=torch.int32)
    model(routes(Batch.pack([prompt_of(7)]), recorded, replay=False))
    for hook in hooks:
        hook.remove()
    assert list(chosen) == list(range(dense, 9))
    assert torch.equal(recorded, torch.stack(list(chosen.values()), dim=1))


def run_with_routes(model, taps):
    """Two requests, prefilled in two steps, then decoded; `taps` gives the routes of each step's tokens."""
    pool, got, cached = pool_of(model), [], [0, 0]
    with torch.no_grad():
        for lengths in ([5, 9], [8, 1], [1, 1], [1, 1]):
            ids = torch.tensor(prompt_of(sum(lengths), seed=len(got)))
            batch = Batch.of(
                lengths,
                mode="decode" if max(lengths) == 1 else "prefill",
                cached_tokens=cached,
                slots=[1, 2],
                page_tables=[[1, 2], [3, 4]],
                page_size=8,
                input_ids=ids,
            )
            batch.routes = taps(len(got), len(ids))
            got.append(model(batch, pool))
            cached = [c + n for c, n in zip(cached, lengths, strict=True)]
    return torch.cat(got)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_replayed_routes_give_the_logits_of_the_recording_through_a_cache(dtype):
    model, kept = tiny(dtype), []

    def record(_step, tokens):
        kept.append(torch.full((tokens, 8, 4), -1, dtype=torch.int32))
        return RouteTap(kept[-1], replay=False)

    want = run_with_routes(model, record)
    assert all((ids >= 0).all() for ids in kept)
    assert torch.equal(want, run_with_routes(model, lambda _step, _tokens: None))
    before = [ids.clone() for ids in kept]
    assert torch.equal(want, run_with_routes(model, lambda step, _tokens: RouteTap(kept[step], replay=True)))
    assert all(torch.equal(a, b) for a, b in zip(before, kept, strict=True))


def test_replay_overrides_the_routers_choice():
    """Another bias chooses other experts; replayed ids keep the first choice, and scores do not see the bias."""
    model, ids = tiny(), prompt_of(12)
    recorded = torch.full((12, 8, 4), -1, dtype=torch.int32)
    want = model(routes(Batch.pack([ids]), recorded, replay=False))
    other = copy.deepcopy(model)
    for layer in other.model.layers:
        if not layer.is_dense:
            layer.block_sparse_moe.gate.e_score_correction_bias.neg_()
    assert not torch.equal(other(Batch.pack([ids])), want)
    assert torch.equal(other(routes(Batch.pack([ids]), recorded, replay=True)), want)


def test_ranks_record_and_replay_the_same_routes(tmp_path):
    whole_model, ids = tiny(), prompt_of(12)
    alone = torch.full((12, 8, 4), -1, dtype=torch.int32)
    whole_model(routes(Batch.pack([ids]), alone, replay=False))
    whole_model.save_pretrained(tmp_path)

    def work(group):
        model = KimiK3ForCausalLM.from_pretrained(tmp_path, mesh=Mesh(tp=group), progress=False)
        mine = torch.full((12, 8, 4), -1, dtype=torch.int32)
        first = model(routes(Batch.pack([ids]), mine, replay=False))
        again = model(routes(Batch.pack([ids]), mine.clone(), replay=True))
        return mine, first, again

    results = Ranks(2).run(work)
    for mine, first, again in results:
        assert torch.equal(mine, alone)
        assert torch.equal(first, again)
        assert torch.equal(first, results[0][1])


def int_ids(*shape, fill=0, dtype=torch.int32, device=None):
    return torch.full(shape, fill, dtype=dtype, device=device)


BAD_ROUTES = {
    "tokens": (lambda t: int_ids(t + 1, 8, 4), r"= \[2, 8, 4\], got int32 \[3, 8, 4\]"),
    "layers": (lambda t: int_ids(t, 9, 4), r"\[tokens, MoE layers, experts a token\] = .* got int32 \[2, 9, 4\]"),
    "top_k": (lambda t: int_ids(t, 8, 5), r"got int32 \[2, 8, 5\]"),
    "dims": (lambda t: int_ids(t, 8 * 4), r"got int32 \[2, 32\]"),
    "int64": (lambda t: int_ids(t, 8, 4, dtype=torch.int64), r"must be int32 .* got int64"),
    "float": (lambda t: int_ids(t, 8, 4, dtype=F32), "got float32"),
    "device": (lambda t: int_ids(t, 8, 4, device="meta"), "ids are on meta, the model on cpu"),
}
BAD_VALUES = {
    "high": (lambda t: int_ids(t, 8, 4, fill=16), r"id 16 is not one of the experts 0\.\.15"),
    "low": (lambda t: int_ids(t, 8, 4, fill=-1), "id -1 is not one of the experts"),
    "one": (lambda t: int_ids(t, 8, 4).index_put((torch.tensor(1),) * 3, torch.tensor(99, dtype=torch.int32)), "id 99"),
}


@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize(("make", "match"), BAD_ROUTES.values(), ids=BAD_ROUTES)
def test_routes_that_do_not_fit_are_refused(make, match, replay, mode):
    facts = {"slots": [1, 2], "page_tables": [[1], [2]], "page_size": 8} if mode == "decode" else {}
    batch = (
        Batch.of([1, 1], mode="decode", input_ids=torch.tensor([1, 2]), **facts)
        if facts
        else cached(torch.ones(2).long())
    )
    ids = make(2)
    refused_unwritten(tiny(), routes(batch, ids, replay=replay), ConfigError, match)
    assert ids.is_meta or not ids.any()


@pytest.mark.parametrize(("make", "match"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_replayed_ids_that_are_no_experts_are_refused(make, match):
    batch = cached(torch.tensor([1, 2]))
    refused_unwritten(tiny(), routes(batch, make(2), replay=True), ConfigError, match)
    tiny()(routes(Batch.pack([[1, 2]]), make(2), replay=False))  # what is there before does not matter


def test_routes_cannot_be_recorded_into_expanded_memory():
    batch = cached(torch.tensor([1, 2]))
    refused_unwritten(
        tiny(), routes(batch, int_ids(1, 8, 4).expand(2, 8, 4), replay=False), ConfigError, "share memory"
    )


@pytest.mark.parametrize(("make", "match"), [BAD_ROUTES["top_k"], BAD_VALUES["high"]], ids=["shape", "value"])
def test_a_view_of_a_rank_refuses_bad_routes_before_it_talks(make, match):
    model = KimiK3ForCausalLM(tiny_config(), mesh=Mesh(tp=RankView(1, 2)), dtype=F32)
    refused_unwritten(model, routes(cached(torch.tensor([1, 2])), make(2), replay=True), ConfigError, match)


def test_a_slice_counts_all_layers_with_experts_and_records_its_own():
    model, ids = tiny(), prompt_of(6)
    recorded, mine = (torch.full((6, 8, 4), -1, dtype=torch.int32) for _ in range(2))
    model(routes(Batch.pack([ids]), recorded, replay=False))
    first = KimiK3ForCausalLM(model.config, layers=range(3), dtype=F32)
    first.load_state_dict(model.state_dict(), strict=False)
    first(routes(Batch.pack([ids]), mine, replay=False))
    assert torch.equal(mine[:, :2], recorded[:, :2])
    assert (mine[:, 2:] == -1).all()
    stream = first.model.start(first.model.embed_tokens(torch.tensor(ids)))
    with pytest.raises(ConfigError, match=r"got int32 \[6, 2, 4\]"):
        first.model.run(stream, routes(Batch.pack([ids]), mine[:, :2], replay=False))


def test_a_model_without_experts_has_no_routes():
    config = tiny_config()
    text = dataclasses.replace(config.text, moe=None, dense_layers=frozenset(range(9)))
    model = seed_weights(KimiK3ForCausalLM(dataclasses.replace(config, text=text), dtype=F32))
    with pytest.raises(ConfigError, match="this model has no experts"):
        model(routes(Batch.pack([[1, 2]]), int_ids(2, 0, 4), replay=False))


# ---- refusals


def refused_unwritten(model, batch, error, match, **kwargs):
    """The call raises before any pool is written."""
    pool = pool_of(model)
    for tensor in (pool.kda.state, pool.kda.conv, pool.latent.pages):
        tensor.fill_(3)
    with pytest.raises(error, match=match), torch.no_grad():
        model(batch, pool, **kwargs)
    assert all((tensor == 3).all() for tensor in (pool.kda.state, pool.kda.conv, pool.latent.pages))


def cached(ids, **facts):
    place = {"slots": [1], "page_tables": [[1, 2, 3, 4]], "page_size": 8}
    return Batch.of([len(ids)], input_ids=ids, **(place | facts))


@pytest.mark.parametrize("bad", [512, -1, 1 << 40])
def test_ids_outside_the_vocabulary_are_refused(bad):
    refused_unwritten(tiny(), cached(torch.tensor([3, bad])), ConfigError, f"{bad} is outside the vocabulary 0..511")


@pytest.mark.parametrize("dtype", [F32, torch.bool, BF16])
def test_ids_that_are_no_integers_are_refused(dtype):
    refused_unwritten(tiny(), cached(torch.ones(2, dtype=dtype)), ConfigError, f"must be integers, got {dtype}")


@pytest.mark.parametrize(
    "bad",
    [torch.ones(3), torch.ones(3, dtype=torch.bool), torch.ones(1, 3, dtype=torch.int64), [0.5], [[1, 2]]],
    ids=str,
)
def test_packing_refuses_what_is_no_sequence_of_ids(bad):
    with pytest.raises(ConfigError, match="sequence 1 must be a 1-D tensor of integers"):
        Batch.pack([[1, 2], bad])


def test_a_batch_without_ids_is_refused():
    refused_unwritten(tiny(), Batch.of([2], slots=[1], page_tables=[[1]], page_size=8), ConfigError, "no input_ids")


def test_a_sequence_beyond_the_positions_is_refused():
    model = tiny(max_position_embeddings=16)
    ids = torch.tensor(prompt_of(17))
    refused_unwritten(model, cached(ids), RequestError, "17 tokens exceeds max_position_embeddings=16")
    refused_unwritten(model, cached(ids[:1], cached_tokens=[16]), RequestError, "17 tokens exceeds")
    assert model(Batch.pack([ids[:16]])).isfinite().all()


@pytest.mark.parametrize(
    ("embeds", "match"),
    [
        (torch.zeros(2, 96, dtype=BF16), "bfloat16 of width 96, the model has torch.float32"),
        (torch.zeros(2, 95), "width 95, the model has torch.float32 of width 96"),
        (torch.zeros(3, 96), "3 tokens, the batch describes 2"),
        (torch.zeros(2, 96, device="meta"), "on meta, the model on cpu"),
    ],
    ids=["dtype", "width", "tokens", "device"],
)
def test_embeddings_that_do_not_fit_are_refused(embeds, match):
    refused_unwritten(tiny(), cached(torch.tensor([1, 2])), ConfigError, match, inputs_embeds=embeds)


def test_ids_on_another_device_are_refused():
    refused_unwritten(
        tiny(), cached(torch.zeros(2, dtype=torch.int64, device="meta"), device="cpu"), ConfigError, "meta"
    )


def test_a_cache_without_its_indices_is_refused():
    model = tiny()
    with pytest.raises(ConfigError, match="no slots"):
        model(Batch.pack([[1, 2]]), pool_of(model))


BAD_BACKENDS = [
    ({"no_such_op": "torch"}, ConfigError, "no_such_op"),
    ({"kda_chunk": "no_such_impl"}, BackendUnavailable, "no_such_impl"),
    ({"kda_mixer": "no_such_impl"}, BackendUnavailable, "no_such_impl"),
    ("no_such_family", BackendUnavailable, "no_such_family"),
]


@pytest.mark.parametrize(("backends", "error", "match"), BAD_BACKENDS, ids=lambda x: str(x)[:30])
def test_unknown_kernels_are_refused_before_anything_is_made(backends, error, match, golden, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("something was made")

    monkeypatch.setattr(model_module, "KimiK3Model", never)
    with pytest.raises(error, match=match):
        KimiK3ForCausalLM(tiny_config(), backends=backends)
    monkeypatch.undo()
    monkeypatch.setattr(model_module.checkpoint, "load", never)
    with pytest.raises(error, match=match):
        KimiK3ForCausalLM.from_pretrained(golden / "tiny_k3_dev", backends=backends)


def test_a_kernel_that_cannot_serve_the_model_is_refused_with_its_reason():
    @register(
        ops.kda_chunk,
        name="narrow",
        platforms={"cpu"},
        supports=lambda spec: f"needs key_dim = 128, got {spec.key_dim}",
    )
    @functools.wraps(ops.kda_chunk.reference)
    def narrow(*args, **kwargs):
        raise AssertionError("chosen")

    try:
        with pytest.raises(BackendUnavailable, match="needs key_dim = 128, got 32"):
            KimiK3ForCausalLM(tiny_config(), backends={"kda_chunk": "narrow"}, dtype=F32)
    finally:
        ops.kda_chunk.remove("narrow")


def recording(op, name, seen, priority=0):
    """Register an implementation of `op` that runs the reference and keeps its result."""

    @register(op, name=name, platforms={"cpu"}, priority=priority)
    @functools.wraps(op.reference)
    def record(*args, **kwargs):
        seen.append(op.reference(*args, **kwargs))
        return seen[-1]


def test_forced_kernels_are_used_by_this_model_only():
    recording(ops.kda_chunk, "forced", [])
    recording(ops.kda_chunk, "preferred", [], priority=5)
    calls = []
    try:
        forced = seed_weights(KimiK3ForCausalLM(tiny_config(), dtype=F32, backends={"kda_chunk": "forced"}))
        with observe(lambda op, _spec, impl: calls.append(impl) if op == "kda_chunk" else None):
            got = forced(Batch.pack([prompt_of(20)]))
            tiny()(Batch.pack([prompt_of(20)]))
    finally:
        ops.kda_chunk.remove("forced")
        ops.kda_chunk.remove("preferred")
    assert calls == ["forced"] * 6 + ["preferred"] * 6
    assert_close("logits", whole(20), got, LOGITS)


# ---- gradients


def trainable(dtype):
    return seed_weights(KimiK3ForCausalLM(tiny_config(), dtype=dtype))


def loss_of(model, ids):
    logits = model(Batch.pack([ids, ids[:9]]))
    targets = torch.tensor([*ids[1:], 0, *ids[1:10]])
    return torch.nn.functional.cross_entropy(logits, targets)


def test_gradients_reach_every_weight():
    model = trainable(F32)
    loss_of(model, prompt_of(60)).backward()
    unused = {"model.layers.0.self_attention_res_norm.weight", "model.layers.0.self_attention_res_proj.weight"}
    for name, weight in model.named_parameters():
        if name in unused or name.endswith("e_score_correction_bias"):
            assert weight.grad is None or not weight.grad.any(), name
        else:
            assert weight.grad is not None, name
            assert weight.grad.isfinite().all(), name
            assert weight.grad.any(), name


def test_gradient_is_the_derivative_along_random_directions():
    model, ids = trainable(F64), prompt_of(18)
    loss_of(model, ids).backward()
    weights = [w for w in model.parameters() if w.grad is not None]
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        direction = [torch.randn(w.shape, generator=generator, dtype=F64) * w.abs().mean() for w in weights]
        slope = sum(float((w.grad * d).sum().detach()) for w, d in zip(weights, direction, strict=True))
        values = []
        with torch.no_grad():
            for sign in (1, -2, 1):  # there, to the other side, back
                for w, d in zip(weights, direction, strict=True):
                    w += sign * 1e-6 * d
                values.append(float(loss_of(model, ids)))
        assert slope == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-5)


# ---- looking inside


def test_every_submodule_output_has_a_name(load, expected):
    """Named tensors of a two-layer model against plain torch: nothing is doubled, scaled or left out."""
    full = load("tiny_k3_dev")
    model = load("tiny_k3_dev", F32, range(2))
    assert {name for name, _ in model.named_modules()} <= {name for name, _ in full.named_modules()}
    seen = {}
    hooks = [
        module.register_forward_hook(lambda _m, inputs, out, name=name: seen.update({name: (inputs[0], out)}))
        for name, module in model.named_modules()
        if name
    ]
    model(Batch.pack([expected("tiny_k3_dev").ids["p0"]]))
    for hook in hooks:
        hook.remove()
    weights = {name.removesuffix(".weight"): x for name, x in model.state_dict().items()}
    for layer in (0, 1):
        at = f"model.layers.{layer}.self_attn"
        x = seen[f"{at}.q_proj"][0]
        gate = x @ weights[f"{at}.f_a_proj"].T @ weights[f"{at}.f_b_proj"].T
        assert_close("low-rank gate", gate, seen[f"{at}.f_b_proj"][1], STATES)
        for name in ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj"):
            assert_close(name, x @ weights[f"{at}.{name}"].T, seen[f"{at}.{name}"][1], STATES)
        assert_close("o_proj", seen[at][1], seen[f"{at}.o_proj"][1], STATES)
    moe = "model.layers.1.block_sparse_moe"
    down = seen[f"{moe}.routed_expert_down_proj"]
    assert_close("down", down[0] @ weights[f"{moe}.routed_expert_down_proj"].T, down[1], STATES)
    total = seen[f"{moe}.routed_expert_up_proj"][1] + seen[f"{moe}.shared_experts"][1]
    assert_close("moe", total, seen[moe][1], STATES)


def test_ops_between_the_modules_can_be_recorded(load, expected):
    """Convolution and gated norm are ops and not modules: a registered implementation sees them."""
    model, conv, norm = load("tiny_k3_dev", F32, range(2)), [], []
    recording(ops.short_conv, "recorder", conv)
    recording(ops.gated_rms_norm, "recorder", norm)
    inputs, outputs, hooks = [], [], []
    for attn in (layer.self_attn for layer in model.model.layers):
        for proj in (attn.q_proj, attn.k_proj, attn.v_proj):
            hooks += [proj.register_forward_hook(lambda _m, _i, out: inputs.append(out))]
        hooks += [attn.o_proj.register_forward_pre_hook(lambda _m, given: outputs.append(given[0]))]
    try:
        with use_backend(short_conv="recorder", gated_rms_norm="recorder"):
            model(Batch.pack([expected("tiny_k3_dev").ids["p0"]]))
    finally:
        for op in (ops.short_conv, ops.gated_rms_norm):
            op.remove("recorder")
        for hook in hooks:
            hook.remove()
    assert (len(conv), len(norm)) == (2, 2)
    for i, layer in enumerate(model.model.layers):
        attn = layer.self_attn
        x = torch.cat(inputs[3 * i : 3 * i + 3], dim=-1)
        weight = torch.cat([attn.q_conv1d.weight, attn.k_conv1d.weight, attn.v_conv1d.weight])
        padded = torch.nn.functional.pad(x.T, (3, 0))
        want = torch.nn.functional.silu(torch.nn.functional.conv1d(padded, weight, groups=len(weight)).T)
        assert_close("conv", want, conv[i], STATES)
        assert torch.equal(norm[i].flatten(1), outputs[i])


def test_observe_names_every_op_of_a_step():
    calls = []
    with observe(lambda op, _spec, impl: calls.append((op, impl))):
        tiny()(Batch.pack([prompt_of(20)]))
    counts = {op: sum(name == op for name, _ in calls) for op, _ in calls}
    assert counts["kda_mixer"] == counts["short_conv"] == 6
    assert counts["attention_varlen"] == 3
    assert counts["route"] == counts["experts"] == 8
    assert counts["attn_res"] == 2 * 9 + 1
    assert all(impl for _, impl in calls)


def test_a_stream_is_what_a_stage_hands_on():
    stream = tiny().model.run(tiny().model.start(draw(4, 96)), Batch.lengths([4]))
    assert isinstance(stream, AttnResStream)
    assert stream.hidden().shape == (4, 96)
    assert stream.history().shape == (4, 3, 96)


def test_weights_kept_wide_survive_a_cast_of_the_whole_model():
    model = seed_weights(KimiK3ForCausalLM(tiny_config(), dtype=F32))
    model.to(BF16)
    wide = [name.removesuffix(".weight") for name, x in model.named_parameters() if x.dtype == F32]
    kept = {name.rsplit(".", 1)[-1] for name in wide}
    assert kept == {"A_log", "dt_bias", "o_norm", "q_conv1d", "k_conv1d", "v_conv1d", "e_score_correction_bias"}
    assert model.dtype == BF16
    assert {x.dtype for x in model.double().parameters()} == {F64}


def test_gate_form_follows_the_configuration():
    bounded, unbounded = (KimiK3ForCausalLM(tiny_config(gate_lower_bound=bound), dtype=F32) for bound in (-5.0, None))
    seed_weights(bounded)
    unbounded.load_state_dict(bounded.state_dict())
    batch = Batch.pack([prompt_of(20)])
    assert (bounded(batch) - unbounded(batch)).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16, torch.float64], ids=str)
def test_a_cache_made_from_the_models_configuration_has_the_models_dtype(dtype):
    """Built, cast or loaded: rounding the window and the latent rows would be silent."""
    built = KimiK3ForCausalLM(tiny_config(), dtype=dtype)
    cast = KimiK3ForCausalLM(tiny_config()).to(dtype)
    for model in (built, cast):
        cache = HybridCache.allocate(model.config, CacheConfig(num_pages=1, num_slots=1))
        assert model.config.dtype == str(dtype).removeprefix("torch.")
        assert cache.pool.latent.pages.dtype == cache.pool.kda.conv.dtype == dtype


def test_a_loaded_model_notes_the_dtype_it_was_loaded_in(load, expected, golden):
    assert load("tiny_k3_dev").config.dtype == "float32"
    as_stored = KimiK3ForCausalLM.from_pretrained(golden / "tiny_k3_dev", layers=range(1), progress=False)
    assert as_stored.config.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"dtype": torch.int8}, r"dtype=torch\.int8 is not one of torch\.bfloat16"),
        ({"device": "nonsense"}, "device='nonsense' cannot be used here"),
        ({"device": "cuda:99"}, "device='cuda:99' cannot be used here"),
    ],
    ids=str,
)
def test_a_dtype_or_device_that_cannot_be_is_refused_before_anything_is_read(place, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        KimiK3ForCausalLM(tiny_config(), **place)
    with pytest.raises(ConfigError, match=message):  # there is not even a folder to read
        KimiK3ForCausalLM.from_pretrained(tmp_path / "absent", **place)
