"""Draft models and the proposer around them, against formulas written out a second time."""

import cmath
import copy
import json
import math
import pathlib
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from seeded import Ranks, copy_shard, seed_weights

from k3lib import Batch, KimiK3Config, KimiK3ForCausalLM, SamplingParams
from k3lib.batch import FeatureTap
from k3lib.cache import CacheConfig, HybridCache
from k3lib.draws import draw, uniforms
from k3lib.errors import CheckpointError, ConfigError
from k3lib.parallel import RankView
from k3lib.server.tiny import make_tiny_draft, tiny_draft_config
from k3lib.spec import Bound, DraftConfig, DraftContext, DSpark, NGram, Proposer, make_draft
from k3lib.spec.draft_graphs import DraftGraphs
from k3lib.testing import assert_close

SPEC = pathlib.Path(__file__).resolve().parents[3] / "shared" / "spec" / "configs"
FAMILIES = ["inferact", "radixark"]
GREEDY, DRAWN = SamplingParams(temperature=0), SamplingParams(temperature=0.8)
PAGE = 4


def published(name):
    file = SPEC / f"dspark_{name}_k3.json"
    if not file.is_file():
        pytest.skip(f"needs the published configurations: {file} does not exist")
    return json.loads(file.read_text())


def draft_of(family, seed=0, dtype=torch.float64, **changes):
    return seed_weights(make_draft(DraftConfig.from_hf(tiny_draft_config(family) | changes), dtype=dtype), seed).eval()


def target_of(**changes):
    return seed_weights(KimiK3ForCausalLM(KimiK3Config.tiny(**changes), dtype=torch.float32), seed=7).eval()


@pytest.fixture(scope="module")
def target():
    return target_of()


def cache_of(model, num_pages=64, **changes):
    sizes = {"num_pages": num_pages, "num_slots": 12, "page_size": PAGE, "checkpoint_grid": 8, **changes}
    return HybridCache.allocate(model.config, CacheConfig(**sizes), device=model.device)


class Run:
    """A target, a cache and a draft, without an engine."""

    def __init__(self, target, family="inferact", *, block_size=None, draft=None, **cache):
        self.target, self.cache = target, cache_of(target, **cache)
        self.draft = draft or draft_of(family, dtype=torch.float32)
        self.spark = DSpark(self.draft, block_size=block_size)
        self.spark.bind(target, self.cache)

    def advance(self, name, lease, ids, todo, *, commit=True):
        """Let the target compute `todo` behind the lease; `ids` is the whole context, the anchor last."""
        self.cache.grow(lease, tokens=len(todo))
        taps = FeatureTap(self.spark.feature_layers, self.spark.feature_kind)
        with torch.no_grad():
            self.target(self.cache.make_batch([(lease, todo)]), self.cache, taps=taps)
        self.cache.commit(lease, todo)
        context = DraftContext(name, ids, GREEDY, features=taps.out, lease=lease)
        if commit:
            self.spark.commit([context])
        return context

    def request(self, ids, name="r", *, steps=None, params=GREEDY, seed=0):
        """A request whose context is computed up to the anchor, in steps of some lengths."""
        lease = self.cache.open(ids[:-1] or ids)
        at = lease.cached_len
        for step in [len(ids) - 1 - at] * (len(ids) > 1) if steps is None else steps:
            self.advance(name, lease, ids[: at + step + 1], ids[at : at + step])
            at += step
        return DraftContext(name, ids, params, seed=seed, lease=lease)


def tokens(count, seed=0, vocab=500):
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


# ---- the formulas, a second time: one token and one head at a time


def rms(x, weight):
    return x / torch.sqrt((x * x).mean() + 1e-5) * weight


def yarn(rope, dim):
    base, length, factor = rope["rope_theta"], rope["original_max_position_embeddings"], rope["factor"]
    found = [dim / 2 * math.log(length / (2 * math.pi * beta)) / math.log(base) for beta in (32, 1)]
    low, high = max(math.floor(found[0]), 0), min(math.ceil(found[1]), dim - 1)
    angles = []
    for i in range(dim // 2):
        plain = 1 / base ** (2 * i / dim)
        ramp = min(1, max(0, (i - low) / (high - low)))
        angles.append(plain / factor * ramp + plain * (1 - ramp))
    return angles


def turned(x, position, angles, multiplier, neighbours):
    half = len(x) // 2
    places = [(2 * i, 2 * i + 1) if neighbours else (i, i + half) for i in range(half)]
    out = x.clone()
    for (a, b), angle in zip(places, angles, strict=True):
        z = complex(x[a], x[b]) * cmath.exp(1j * position * angle) * multiplier
        out[a], out[b] = z.real, z.imag
    return out


class Naive:
    """A block of one request, from the weights by their names."""

    def __init__(self, draft, hf):
        self.w = {name: p.detach() for name, p in draft.named_parameters()}
        self.hf, self.is_latent = hf, hf["model_type"] == "k3_dspark"
        dim = hf["qk_rope_head_dim"] if self.is_latent else hf["head_dim"]
        self.angles = yarn(hf["rope_parameters"], dim)
        gain = 0.1 * math.log(hf["rope_parameters"]["factor"]) + 1
        self.multiplier = 1.0 if self.is_latent else gain
        width = hf["qk_nope_head_dim"] + dim if self.is_latent else dim
        self.scale = width**-0.5 * (gain**2 if self.is_latent else 1)

    def context(self, features):
        names = ("context_proj", "context_norm") if self.is_latent else ("fc", "hidden_norm")
        return [rms(self.w[f"{names[0]}.weight"] @ f, self.w[f"{names[1]}.weight"]) for f in features]

    def keys(self, layer, x, position):
        """Keys and values of one token, a pair for each head of the queries."""
        w, hf = lambda n: self.w[f"layers.{layer}.self_attn.{n}.weight"], self.hf
        if not self.is_latent:
            d, share = hf["head_dim"], hf["num_attention_heads"] // hf["num_key_value_heads"]
            k, v = (w("k_proj") @ x).view(-1, d), (w("v_proj") @ x).view(-1, d)
            k = [turned(rms(one, w("k_norm")), position, self.angles, self.multiplier, neighbours=False) for one in k]
            return [(k[h // share], v[h // share]) for h in range(hf["num_attention_heads"])]
        both = w("kv_a_proj_with_mqa") @ x
        latent, shared = both[: hf["kv_lora_rank"]], both[hf["kv_lora_rank"] :]
        shared = turned(shared, position, self.angles, self.multiplier, neighbours=True)
        expanded = (w("kv_b_proj") @ rms(latent, w("kv_a_layernorm"))).view(hf["num_attention_heads"], -1)
        nope = hf["qk_nope_head_dim"]
        return [(torch.cat([one[:nope], shared]), one[nope:]) for one in expanded]

    def query(self, layer, x, position):
        w, hf = lambda n: self.w[f"layers.{layer}.self_attn.{n}.weight"], self.hf
        if not self.is_latent:
            q = (w("q_proj") @ x).view(hf["num_attention_heads"], -1)
            return [
                turned(rms(one, w("q_norm")), position, self.angles, self.multiplier, neighbours=False) for one in q
            ]
        q = (w("q_b_proj") @ rms(w("q_a_proj") @ x, w("q_a_layernorm"))).view(hf["num_attention_heads"], -1)
        nope = hf["qk_nope_head_dim"]
        turns = [turned(one[nope:], position, self.angles, self.multiplier, neighbours=True) for one in q]
        return [torch.cat([one[:nope], turn]) for one, turn in zip(q, turns, strict=True)]

    def block(self, features, embeddings, causal=False):
        start, context = len(features), self.context(features)
        rows = list(embeddings)
        for layer in range(self.hf["num_hidden_layers"]):

            def w(name, layer=layer):
                return self.w[f"layers.{layer}.{name}.weight"]

            x = [rms(row, w("input_layernorm")) for row in rows]
            seen = [self.keys(layer, c, t) for t, c in enumerate(context)]
            seen += [self.keys(layer, one, start + t) for t, one in enumerate(x)]
            for t in range(len(rows)):
                visible = seen[: start + t + 1] if causal else seen
                heads = []
                for h, q in enumerate(self.query(layer, x[t], start + t)):
                    scores = torch.stack([q @ kv[h][0] for kv in visible]) * self.scale
                    heads.append(sum(p * kv[h][1] for p, kv in zip(scores.softmax(0), visible, strict=True)))
                rows[t] = rows[t] + w("self_attn.o_proj") @ torch.cat(heads)
                y = rms(rows[t], w("post_attention_layernorm"))
                gate = w("mlp.gate_proj") @ y
                rows[t] = rows[t] + w("mlp.down_proj") @ (gate * torch.sigmoid(gate) * (w("mlp.up_proj") @ y))
        return torch.stack([rms(row, self.w["final_norm.weight" if self.is_latent else "norm.weight"]) for row in rows])


@pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_block_equals_the_formulas(family, causal):
    draft = draft_of(family, is_causal=causal)
    naive = Naive(draft, tiny_draft_config(family))
    lengths, pages = [0, 5, 9], [[], [3, 1], [2, 6, 4]]
    pool = draft.new_pool(6, PAGE)
    features = [torch.randn(n, draft.config.feature_width, dtype=torch.float64) for n in lengths]
    embeddings = torch.randn(3, 4, 96, dtype=torch.float64)
    for some, table in zip(features, pages, strict=True):
        rows = torch.tensor([table[t // PAGE] * PAGE + t % PAGE for t in range(len(some))], dtype=torch.int64)
        pool.store(draft.rows(draft.context(some), torch.arange(len(some))), rows)
    table = torch.tensor([[*p, *[0] * (3 - len(p))] for p in pages])
    got = draft.block(embeddings, torch.tensor(lengths), pool, table)
    for i in range(3):
        assert_close(f"request {i}", naive.block(features[i], embeddings[i], causal), got[i], 1e-10)
    alone = draft.block(embeddings[:1], torch.tensor([0]))
    assert_close("without a pool", got[:1], alone, 1e-12)


@torch.no_grad()
def test_positions_of_a_million_are_exact():
    draft = draft_of("radixark", dtype=torch.float32)
    far, x = 1_000_000, torch.randn(2, 16)
    got = draft.rope.rotate(x, draft.rope.turns(torch.tensor([3, far]), torch.float32))
    angles = yarn(tiny_draft_config("radixark")["rope_parameters"], 16)
    gain = 0.1 * math.log(32) + 1
    for row, position in enumerate((3, far)):
        assert_close("rotated", turned(x[row].double(), position, angles, gain, neighbours=False), got[row], 1e-6)


@pytest.mark.parametrize(("family", "total"), [("inferact", 3_562_312_961), ("radixark", 2_249_289_601)])
def test_full_size_has_the_published_parameters(family, total):
    config = DraftConfig.from_hf(published(family))
    found = sum(p.numel() for p in make_draft(config, device="meta").parameters())
    assert found + (config.vocab_size * config.hidden_size if family == "inferact" else 0) == total


def test_full_size_scales():
    inferact, radixark = (DraftConfig.from_hf(published(family)).rope for family in FAMILIES)
    assert inferact.multiplier == 1
    assert inferact.softmax_factor == pytest.approx(1.81326, abs=1e-5)
    assert radixark.multiplier == pytest.approx(1.27726, abs=1e-5)
    assert (inferact.factor, inferact.original_length, inferact.theta) == (32, 32768, 50000)
    assert (radixark.factor, radixark.original_length, radixark.theta) == (16, 65536, 10000)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_compute_what_one_does(family):
    whole = draft_of(family, dtype=torch.float64)
    features, embeddings = torch.randn(5, 288, dtype=torch.float64), torch.randn(1, 3, 96, dtype=torch.float64)

    def block(draft):
        pool = draft.new_pool(2, PAGE)
        pool.store(draft.rows(draft.context(features), torch.arange(5)), torch.arange(PAGE, PAGE + 5))
        return draft.block(embeddings, torch.tensor([5]), pool, torch.tensor([[1, 2]]))

    with torch.no_grad():
        want = block(whole)
    parts = Ranks(2).run(lambda tp: block(copy_shard(whole, make_draft(whole.config, tp=tp, dtype=torch.float64))))
    for part in parts:
        assert_close("a rank", want, part, 1e-12)


# ---- context


@pytest.mark.parametrize("family", FAMILIES)
def test_context_in_chunks_equals_context_in_one_go(target, family):
    ids = tokens(15)
    whole, chunks = Run(target, family), Run(target, family)
    one, other = whole.request(ids), chunks.request(ids, steps=[3, 8, 1, 2])
    want, got = (
        run.cache.pool.paged[0].pages[:, :, lease.pages] for run, lease in ((whole, one.lease), (chunks, other.lease))
    )
    assert want.abs().amax((-1, -2)).gt(0).all()
    assert_close("rows", want, got, 1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_proposals_come_from_the_whole_context(target, family):
    run, ids = Run(target, family, block_size=3), tokens(10)
    context = run.request(ids)
    taps = FeatureTap(run.spark.feature_layers, run.spark.feature_kind)
    with torch.no_grad():
        target(Batch.pack([ids[:-1]]), taps=taps)
        naive = Naive(run.draft, tiny_draft_config(family))
        mask = run.draft.config.mask_token_id
        rows = naive.block(taps.out, target.model.embed_tokens(torch.tensor([ids[-1], mask, mask])))
        previous, want, sure = ids[-1], [], []
        w = naive.w
        for row in rows:
            e = w["markov_head.markov_w1.weight"][previous]
            sure.append(
                torch.sigmoid(
                    w["confidence_head.proj.weight"][0] @ torch.cat([row, e]) + w["confidence_head.proj.bias"][0]
                )
            )
            logits = target.lm_head.weight @ row + w["markov_head.markov_w2.weight"] @ e
            previous = int(logits.argmax())
            want.append(previous)
    (draft,) = run.spark.propose([context])
    assert draft.token_ids == want
    assert draft.probs is None
    assert_close("confidence", torch.stack(sure), torch.tensor(draft.confidence), 1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_equals_each_request_alone(target, family):
    run = Run(target, family)
    made = [
        run.request(tokens(n, seed=n), f"r{n}", params=params, seed=-n)
        for n, params in ((1, DRAWN), (6, GREEDY), (17, DRAWN), (9, SamplingParams(temperature=1.5, top_k=1)))
    ]
    together = run.spark.propose(made)
    for context, draft in zip(made, together, strict=True):
        (alone,) = run.spark.propose([context])
        assert draft.token_ids == alone.token_ids
        assert draft.confidence == pytest.approx(alone.confidence, abs=1e-5)
        assert (draft.probs is None) == (context.params in (GREEDY, made[3].params))
        if draft.probs is not None:
            assert_close("probs", alone.probs, draft.probs, 1e-4)
    assert run.spark.propose([]) == []


def test_contexts_are_committed_together(target):
    apart, together = Run(target), Run(target)
    for run in (apart, together):
        made = []
        for name, n in (("a", 7), ("b", 12)):
            ids = tokens(n, seed=n)
            lease = run.cache.open(ids[:-1])
            made.append(run.advance(name, lease, ids, ids[:-1], commit=run is apart))
        if run is together:
            run.spark.commit(made)
    assert_close("rows", apart.cache.pool.paged[0].pages, together.cache.pool.paged[0].pages, 1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("extra", [0, 3], ids=["at a page's end", "inside a page"])
def test_a_prefix_hit_brings_its_rows(target, family, extra):
    run, cold = Run(target, family), Run(target, family)
    first = tokens(17 + extra)
    again = [*first[: 16 + extra], *tokens(6, seed=5)]
    old = run.request(first)
    run.cache.close(old.lease)
    run.spark.drop("r")
    context = run.request(again, "again")
    assert context.lease.cached_len == 16 + extra
    want, got = cold.spark.propose([cold.request(again)])[0], run.spark.propose([context])[0]
    assert got.token_ids == want.token_ids
    assert got.confidence == pytest.approx(want.confidence, abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_blocks_propose_the_same(target, family):
    run = Run(target, family)
    wants = [(5, GREEDY), (1, DRAWN), (26, GREEDY)]
    contexts = [run.request(tokens(n, seed=n), f"r{n}", params=p, seed=n) for n, p in wants]
    want = run.spark.propose(contexts)
    graphs = run.spark.graphs = DraftGraphs(run.spark._compute, run.spark._facts, captures=False)
    for few in (contexts, contexts[:1], contexts[1:], contexts):
        for got, context in zip(run.spark.propose(few), few, strict=True):
            expected = want[contexts.index(context)]
            assert got.token_ids == expected.token_ids
            assert got.confidence == pytest.approx(expected.confidence, abs=1e-6)
            assert (got.probs is None) == (expected.probs is None)
            if got.probs is not None:
                torch.testing.assert_close(got.probs, expected.probs, rtol=1e-6, atol=1e-9)
    assert graphs.reason is None
    assert {size for size, _, _ in graphs._statics} == {1, 2, 4}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_accelerator_proposes_the_same_and_waits_once(target, family, device):
    if device != "cuda":
        pytest.skip("needs a GPU")
    here, there = (
        Run(target, family),
        Run(copy.deepcopy(target).to(device), draft=draft_of(family, dtype=torch.float32).to(device)),
    )
    wants = [(5, GREEDY), (17, DRAWN), (26, GREEDY)]
    want, contexts = (
        [run.request(tokens(n, seed=n), f"r{n}", params=p, seed=n) for n, p in wants] for run in (here, there)
    )
    want, got = here.spark.propose(want), there.spark.propose(contexts)
    assert [d.token_ids for d in got] == [d.token_ids for d in want]
    for one, other in zip(want, got, strict=True):
        assert other.confidence == pytest.approx(one.confidence, abs=1e-3)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchronizing") as waits:
            there.spark.propose(contexts)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == 1


def test_memory_of_the_draft_counts_with_the_cache(target):
    cache = cache_of(target)
    before, spark = cache.pool.nbytes, DSpark(draft_of("radixark", dtype=torch.float32))
    assert spark.nbytes == 0
    spark.bind(target, cache)
    assert spark.nbytes == 2 * 2 * 65 * PAGE * 32 * 4
    assert cache.pool.nbytes == cache.dump()["bytes"] == before + spark.nbytes


def test_pages_are_copied_and_zeroed_with_the_targets(target):
    run = Run(target, "radixark")
    context = run.request(tokens(9))
    page = torch.tensor(context.lease.pages[:2])
    rows = run.cache.pool.paged[0].pages
    run.cache.pool.copy_pages(page, torch.tensor([50, 51]))
    assert rows[:, :, page].equal(rows[:, :, [50, 51]])
    run.cache.pool.zero_pages(page)
    assert not rows[:, :, page].any()
    assert rows[:, :, 50].any()


# ---- choosing


@pytest.fixture(scope="module")
def small():
    """A target with a vocabulary of 16, and a draft for it."""
    ids = {"bos_token_id": 11, "eos_token_id": 12, "pad_token_id": 13, "media_placeholder_token_id": 14}
    model = target_of(vocab_size=16, **ids)
    hf = tiny_draft_config("radixark") | {
        "vocab_size": 16,
        "dflash_config": {"mask_token_id": 15, "target_layer_ids": [1, 8]},
    }
    draft = seed_weights(make_draft(DraftConfig.from_hf(hf), dtype=torch.float32), 3).eval()
    return model, draft


def clones(run, context, count, params):
    return [replace(context, params=params, seed=seed) for seed in range(count)]


def test_draws_follow_the_markov_chain(small):
    run = Run(small[0], draft=copy.deepcopy(small[1]), block_size=2)
    context = run.request(tokens(6, vocab=11))
    count, params = 6000, SamplingParams(temperature=1.2, top_k=3, top_p=0.5)  # of which only the temperature counts
    drafts = run.spark.propose(clones(run, context, count, params))
    first = drafts[0].probs[0]
    second = torch.zeros(16, 16)
    for draft in drafts:
        second[draft.token_ids[0]] = draft.probs[1]  # depends on the first token alone
    expected = (first[:, None] * second).double() * count
    seen = torch.zeros(16, 16, dtype=torch.float64)
    for draft in drafts:
        seen[tuple(draft.token_ids)] += 1
    cells = expected > 5
    chi = ((seen - expected) ** 2 / expected.clamp(min=1e-30))[cells].sum()
    freedom = int(cells.sum()) - 1
    assert freedom > 50
    assert chi < freedom + 5 * math.sqrt(2 * freedom)
    assert seen[~cells].sum() < 3 * expected[~cells].sum() + 20


@torch.no_grad()
def test_probabilities_are_those_of_the_corrected_logits(small):
    run = Run(small[0], draft=copy.deepcopy(small[1]), block_size=3)
    context = run.request(tokens(6, vocab=11), params=DRAWN, seed=41)
    (draft,) = run.spark.propose([context])
    (pool,) = run.cache.pool.paged
    ids = torch.tensor([[context.token_ids[-1], 15, 15]])
    hidden = run.draft.block(
        run.target.model.embed_tokens(ids), torch.tensor([5]), pool, torch.tensor([context.lease.pages])
    )
    previous = context.token_ids[-1]
    for k in range(3):
        bias = run.draft.markov_head.markov_w2.weight @ run.draft.markov_head.markov_w1.weight[previous]
        want = ((run.target.scores(hidden[0, k]) + bias) / 0.8).softmax(0)
        assert_close("probs", want, draft.probs[k], 1e-5)
        number = uniforms(torch.tensor([41]), torch.tensor([5 * 16 + k]), lane=8)
        previous = int(draw(want[None], number))
        assert draft.token_ids[k] == previous


def test_a_token_that_is_proposed_again_is_drawn_anew(small):
    """Else what is drawn would depend on why the first proposal was refused."""
    draft = copy.deepcopy(small[1])
    for parameter in draft.parameters():
        parameter.data.zero_()  # each token has probability 1 / 16
    run, ids = Run(small[0], draft=draft, block_size=2), tokens(7, vocab=11)
    early = run.request(ids[:6])
    drafts = run.spark.propose(clones(run, early, 400, DRAWN))
    run.advance("r", early.lease, ids, ids[5:6])
    later = run.spark.propose(clones(run, replace(early, token_ids=ids), 400, DRAWN))
    same = sum(a.token_ids[1] == b.token_ids[0] for a, b in zip(drafts, later, strict=True))
    assert 5 < same < 55  # 25 of 400


@pytest.mark.parametrize("kind", ["gated", "rnn"])
@torch.no_grad()
def test_other_markov_heads_follow_their_formulas(kind):
    head = draft_of("radixark", markov_head_type=kind).markov_head
    w = {name: p.detach() for name, p in head.named_parameters()}
    hidden, previous, state, s = (
        torch.randn(3, 2, 96, dtype=torch.float64),
        torch.tensor([7, 300]),
        None,
        torch.zeros(2, 16),
    )
    for k in range(3):
        said = head(previous, hidden[k], state)
        for i in range(2):
            e, h = w["markov_w1.weight"][previous[i]], hidden[k, i]
            if kind == "gated":
                inner = torch.sigmoid(w["gate_proj.weight"] @ torch.cat([h, e]) + w["gate_proj.bias"]) * e
            else:
                old = s[i].double() if k == 0 else state[i]
                g, c, o = (w["joint_proj.weight"] @ torch.cat([old, e, h]) + w["joint_proj.bias"]).split(16)
                inner = torch.tanh(o)
                new = torch.sigmoid(g) * old + (1 - torch.sigmoid(g)) * torch.tanh(c)
                assert_close("state", new, said.state[i], 1e-12)
            assert_close("bias", w["markov_w2.weight"] @ inner, said.bias[i], 1e-12)
        previous, state = said.bias.argmax(-1), said.state


@torch.no_grad()
def test_the_row_of_the_anchor_can_be_dropped(target):
    run = Run(target, draft=draft_of("inferact", dtype=torch.float32, sample_from_anchor=False, markov_rank=16))
    context = run.request(tokens(6))
    (draft,) = run.spark.propose([context])
    ids = torch.tensor([[context.token_ids[-1], *[509] * 7]])  # a row more than tokens
    (pool,) = run.cache.pool.paged
    hidden = run.draft.block(
        target.model.embed_tokens(ids), torch.tensor([5]), pool, torch.tensor([context.lease.pages])
    )
    previous, want = context.token_ids[-1:], []
    for k in range(7):
        logits = target.scores(hidden[:, 1 + k]) + run.draft.markov_head(torch.tensor(previous), hidden[:, 1 + k]).bias
        previous = logits.argmax(-1).tolist()
        want += previous
    assert draft.token_ids == want


@torch.no_grad()
def test_confidence_may_look_at_the_row_alone(target):
    run = Run(target, block_size=2, draft=draft_of("inferact", dtype=torch.float32, confidence_head_with_markov=False))
    context = run.request(tokens(6))
    (draft,), (pool,), head = run.spark.propose([context]), run.cache.pool.paged, run.draft.confidence_head.proj
    ids, table = torch.tensor([[context.token_ids[-1], 509]]), torch.tensor([context.lease.pages])
    hidden = run.draft.block(target.model.embed_tokens(ids), torch.tensor([5]), pool, table)
    assert draft.confidence == pytest.approx(torch.sigmoid(hidden[0] @ head.weight[0] + head.bias).tolist(), abs=1e-6)


def dflash(**changes):
    hf = tiny_draft_config("radixark") | {"architectures": ["DFlashDraftModel"], "block_size": 6}
    return {k: v for k, v in hf.items() if k not in ("markov_rank", "enable_confidence_head")} | changes


@torch.no_grad()
def test_dflash_chooses_each_token_by_itself(target):
    draft = seed_weights(make_draft(DraftConfig.from_hf(dflash()), dtype=torch.float32)).eval()
    assert not any(name.startswith(("markov", "confidence")) for name, _ in draft.named_parameters())
    run = Run(target, draft=draft)
    assert run.spark.block_size == 5  # the file counts the anchor
    context = run.request(tokens(6))
    (found,) = run.spark.propose([context])
    ids = torch.tensor([[context.token_ids[-1], *[508] * 5]])
    (pool,) = run.cache.pool.paged
    hidden = draft.block(target.model.embed_tokens(ids), torch.tensor([5]), pool, torch.tensor([context.lease.pages]))
    assert found.token_ids == target.scores(hidden[0, 1:]).argmax(-1).tolist()
    assert found.confidence is None
    (drawn,) = run.spark.propose([replace(context, params=DRAWN)])
    assert_close("probs", (target.scores(hidden[0, 1:]) / 0.8).softmax(-1), drawn.probs, 1e-5)


# ---- what is refused


def test_it_is_a_proposer():
    spark = DSpark(draft_of("inferact"))
    assert isinstance(spark, Proposer)
    assert isinstance(spark, Bound)
    assert (spark.block_size, spark.feature_layers, spark.feature_kind) == (7, (1, 4, 7), "prefix")
    assert DSpark(draft_of("radixark")).feature_kind == "mixture"
    assert isinstance(NGram(), Proposer)
    for size in (0, 16, True):
        with pytest.raises(ConfigError, match=f"block_size must be 1 .. 15, got {size}"):
            DSpark(spark.draft, block_size=size)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"vocab_size": 600}, ["vocab_size", "600", "512"]),
        ({"hidden_size": 80}, ["hidden_size", "80", "96"]),
        ({"target_hidden_size": 48}, ["target_hidden_size", "48", "96"]),
        ({"target_num_hidden_layers": 93}, ["layers", "93", "9"]),
        ({"target_num_hidden_layers": None, "target_layer_ids": [2, 9]}, ["[2, 9]", "0..8"]),
    ],
    ids=["vocabulary", "hidden size", "target hidden size", "layers", "tap"],
)
def test_a_draft_of_another_target_is_refused(target, changes, parts):
    cache, spark = cache_of(target), DSpark(draft_of("inferact", dtype=torch.float32, **changes))
    with pytest.raises(ConfigError) as caught:
        spark.bind(target, cache)
    assert all(part in str(caught.value) for part in parts)
    assert cache.pool.paged == []


def test_another_dtype_a_slice_or_a_second_target_is_refused(target):
    with pytest.raises(ConfigError, match=r"dtype is torch\.float64 in the draft, torch\.float32 in the target"):
        DSpark(draft_of("inferact")).bind(target, cache_of(target))
    part = KimiK3ForCausalLM(KimiK3Config.tiny(), layers=range(2, 9), dtype=torch.float32)
    spark = DSpark(draft_of("inferact", dtype=torch.float32))
    with pytest.raises(ConfigError, match=r"slice of layers 2\.\.8"):
        spark.bind(part, cache_of(target))
    spark.bind(target, cache_of(target))
    with pytest.raises(ConfigError, match="bound to a target already"):
        spark.bind(target, cache_of(target))


def test_steps_that_were_not_committed_are_noticed(target):
    run, ids = Run(target), tokens(14)
    with pytest.raises(ConfigError, match="bind"):
        DSpark(run.draft).propose([])
    lease = run.cache.open(ids)
    first = run.advance("r", lease, ids[:5], ids[:4])
    with pytest.raises(ConfigError, match="a context of 5 tokens, but the draft knows 4 only"):
        run.spark.propose([replace(first, token_ids=ids[:6])])
    skipped = run.advance("r", lease, ids[:8], ids[4:7], commit=False)
    later = run.advance("r", lease, ids[:10], ids[7:9], commit=False)
    before = run.cache.pool.paged[0].pages.clone()
    with pytest.raises(ConfigError, match=r"features of tokens 7 \.\. 8 .* up to 4 only"):
        run.spark.commit([later])
    for features in (None, later.features[:, :-1], later.features.double()):
        with pytest.raises(ConfigError, match=r"features \[n, 288\] of torch.float32, got"):
            run.spark.commit([replace(later, features=features)])
    with pytest.raises(ConfigError, match="needs its lease"):
        run.spark.commit([replace(later, lease=None)])
    assert run.cache.pool.paged[0].pages.equal(before)
    run.spark.commit([skipped])
    run.spark.commit([later])
    other = run.cache.open(ids)  # a request that lost its memory and got some again
    with pytest.raises(ConfigError, match="a context of 9 tokens, but the draft knows 8 only"):
        run.spark.propose([replace(later, lease=other)])
    assert len(run.spark.propose([replace(later, features=None)])[0].token_ids) == 7


@pytest.mark.parametrize(
    ("family", "changes", "parts"),
    [
        ("inferact", {"architectures": ["LlamaForCausalLMEagle3"]}, ["Eagle3", "K3DSparkModel", "DSparkDraftModel"]),
        ("inferact", {"architectures": ["DFlash2DraftModel"]}, ["DFlash2DraftModel", "known are"]),
        ("inferact", {"architectures": None}, ["architectures", "known are"]),
        ("radixark", {"model_type": "deepseek_v4"}, ["deepseek_v4", "qwen3"]),
        ("radixark", {"mask_token_id": None, "dflash_config": {"target_layer_ids": [1]}}, ["mask_token_id", "missing"]),
        ("inferact", {"mask_token_id": 512}, ["mask_token_id=512", "0..511"]),
        ("inferact", {"target_layer_ids": []}, ["target_layer_ids", "[]"]),
        ("inferact", {"target_layer_ids": [2, 9]}, ["[2, 9]", "9 layers"]),
        ("inferact", {"markov_rank": 0}, ["markov_rank", "0"]),
        ("inferact", {"markov_head_type": "fir"}, ["'fir'", "vanilla, gated, rnn"]),
        ("inferact", {"mla_use_output_gate": True}, ["mla_use_output_gate=True", "False"]),
        ("inferact", {"draft_vocab_size": 64}, ["64", "512"]),
        ("inferact", {"block_size": 16}, ["16", "15"]),
        ("radixark", {"hidden_act": "situ"}, ["'situ'", "'silu'"]),
        ("radixark", {"num_key_value_heads": 3}, ["3", "4"]),
        ("radixark", {"layer_types": ["linear_attention"] * 2}, ["layer_types", "linear_attention"]),
        ("radixark", {"mask_token_id": 3}, ["mask_token_id=3", "508"]),
        ("radixark", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, ["llama3", "yarn"]),
        ("radixark", {"quantization_config": {"quant_method": "fp8"}}, ["quantization_config"]),
    ],
)
def test_other_configurations_are_refused(family, changes, parts):
    with pytest.raises(ConfigError) as caught:
        DraftConfig.from_hf(tiny_draft_config(family) | changes)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_dflash_has_no_heads():
    with pytest.raises(ConfigError, match="markov_rank=16"):
        DraftConfig.from_hf(dflash(markov_rank=16))
    with pytest.raises(ConfigError, match="enable_confidence_head"):
        DraftConfig.from_hf(dflash(enable_confidence_head=True))


def test_keys_may_stand_in_three_places_and_prefixed_ones_win():
    hf = tiny_draft_config("inferact")
    moved = {key: hf.pop(key) for key in ("mask_token_id", "target_layer_ids", "markov_rank", "enable_confidence_head")}
    want = DraftConfig.from_hf(tiny_draft_config("inferact"))
    for home in ("dspark_config", "dflash_config"):
        assert DraftConfig.from_hf({**hf, home: moved}) == want
    prefixed = {
        "dspark_block_size": 5, "dspark_markov_rank": 8, "dspark_noise_token_id": 4, "dspark_target_layer_ids": [0],
    }  # fmt: skip
    found = DraftConfig.from_hf({**hf, "block_size": 7, "dspark_config": moved, **prefixed})
    assert (found.block_size, found.markov_rank, found.mask_token_id, found.feature_layers) == (5, 8, 4, (0,))


def test_sliding_layers_are_causal_unless_said_otherwise():
    mixed = {"layer_types": ["sliding_attention", "full_attention"]}
    assert DraftConfig.from_hf(tiny_draft_config("radixark") | mixed).causal == (True, False)
    for forced in (True, False):
        assert (
            DraftConfig.from_hf(tiny_draft_config("radixark") | mixed | {"is_causal": forced}).causal == (forced,) * 2
        )


# ---- files


@pytest.fixture(params=FAMILIES)
def folder(request, tmp_path):
    return make_tiny_draft(tmp_path, request.param)


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@torch.no_grad()
def test_a_draft_is_read_as_it_was_written(folder):
    stored = load_file(folder / "model.safetensors")
    for dtype in (None, torch.float32):
        draft = DSpark.from_pretrained(folder, dtype=dtype).draft
        read = dict(draft.named_parameters())
        assert draft.dtype == dtype or torch.bfloat16
        assert read.keys() == stored.keys()
        assert all(p.equal(stored[name].to(p.dtype)) and not p.requires_grad for name, p in read.items())
        assert draft.block(torch.randn(1, 2, 96, dtype=draft.dtype), torch.tensor([0])).isfinite().all()


def test_a_rank_reads_its_part(folder):
    whole = DSpark.from_pretrained(folder).draft
    part = DSpark.from_pretrained(folder, tp=RankView(1, 2)).draft
    want = copy_shard(whole, make_draft(whole.config, tp=RankView(1, 2), dtype=torch.bfloat16))
    assert all(p.equal(want.get_parameter(name)) for name, p in part.named_parameters())
    with pytest.raises(ConfigError, match="tp_size=8 does not cut"):
        DSpark.from_pretrained(folder, tp=RankView(0, 8))


def test_a_prefix_and_a_copy_of_the_embedding_change_nothing(folder):
    want = dict(DSpark.from_pretrained(folder).draft.named_parameters())
    is_inferact = json.loads((folder / "config.json").read_text())["model_type"] == "k3_dspark"

    def change(tensors):
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)
        if is_inferact:
            tensors["embed_tokens.weight"] = torch.zeros(512, 96)

    got = dict(DSpark.from_pretrained(rewrite(folder, change)).draft.named_parameters())
    assert all(p.equal(want[name]) for name, p in got.items())


def test_missing_unexpected_and_misshaped_tensors_are_named(folder):
    def change(tensors):
        del tensors["layers.1.self_attn.o_proj.weight"]
        tensors["layers.2.mlp.up_proj.weight"] = torch.zeros(2, 2)
        tensors["markov_head.markov_w2.weight"] = torch.zeros(512, 8)
        tensors["confidence_head.proj.bias"] = torch.zeros(1, dtype=torch.int32)

    with pytest.raises(CheckpointError) as caught:
        DSpark.from_pretrained(rewrite(folder, change))
    for part in (
        "missing: layers.1.self_attn.o_proj.weight",
        "unexpected: layers.2.mlp.up_proj.weight",
        "markov_head.markov_w2.weight: shape [512, 8], expected [512, 16]",
        "confidence_head.proj.bias: dtype I32",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "sign"), [("fc_norm.0.weight", "lightseek"), ("lm_head.weight", "RedHatAI"), ("midlayer.x", "EAGLE-3")]
)
def test_tensors_of_other_drafts_are_recognised(folder, name, sign):
    with pytest.raises(ConfigError, match=f"of another draft.*{sign}.*known are the drafts of Inferact and RadixArk"):
        DSpark.from_pretrained(rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(1)})))


def test_tensors_of_the_other_family_are_refused(tmp_path):
    make_tiny_draft(tmp_path, "radixark")
    (tmp_path / "config.json").write_text(json.dumps(tiny_draft_config("inferact")))
    with pytest.raises(ConfigError, match=r"family 'inferact'.*fc\.weight"):
        DSpark.from_pretrained(tmp_path)


def test_the_tensors_say_whether_there_is_a_confidence_head(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["enable_confidence_head"]
    (folder / "config.json").write_text(json.dumps(config))
    assert DSpark.from_pretrained(folder).draft.confidence_head is not None

    def change(tensors):
        del tensors["confidence_head.proj.weight"], tensors["confidence_head.proj.bias"]

    assert DSpark.from_pretrained(rewrite(folder, change)).draft.confidence_head is None
