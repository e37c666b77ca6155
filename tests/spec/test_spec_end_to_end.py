"""Speculation end to end: distributions, structured output, draft models, ranks, and the server."""

from __future__ import annotations

import json

import pytest
import torch
from engines import alone, drained, greedy, ids_of, make_engine, one_thread, prompts, small_model
from fastapi.testclient import TestClient
from proposers import Random, Scripted
from seeded import Ranks

from k3lib import KimiK3ForCausalLM
from k3lib.engine import AsyncEngine, Engine, EngineConfig, SamplingParams
from k3lib.engine.grammar import build_grammar
from k3lib.parallel import Mesh
from k3lib.server.app import create_app
from k3lib.server.tiny import make_tiny
from k3lib.server.tokenizer import load_tokenizer
from k3lib.spec import Draft, DSpark, SpecConfig


@pytest.fixture(scope="module", autouse=True)
def threads():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model():
    return small_model()


# ---- sampled tokens have the target's distribution ----------------------------------------------

VOCAB = 12


class Chain:
    """In place of a runner's model: the scores behind a token are a row of a table."""

    def __init__(self, model, table):
        self.config, self.mesh, self.device, self.dtype = model.config, model.mesh, model.device, model.dtype
        self.rows = torch.full((model.config.text.vocab_size,) * 2, -torch.inf)
        self.rows[:, :VOCAB] = table[torch.arange(model.config.text.vocab_size) % VOCAB]

    def __call__(self, batch, cache, logits="last"):
        ids = batch.input_ids if logits == "all" else batch.input_ids[batch.cu_seqlens[1:].long() - 1]
        return self.rows[ids]


class Drawn(Scripted):
    """Draws from another table."""

    def __init__(self, table, vocab, block_size):
        super().__init__([], block_size=block_size)
        self.probs = torch.zeros(vocab, vocab)
        self.probs[:, :VOCAB] = table.softmax(-1)[torch.arange(vocab) % VOCAB]
        self.generator = torch.Generator().manual_seed(0)

    def propose(self, contexts):
        anchor = torch.tensor([c.token_ids[-1] for c in contexts])
        ids, probs = [], []
        for _ in range(self.block_size):
            probs.append(self.probs[anchor])
            anchor = torch.multinomial(probs[-1], 1, generator=self.generator)[:, 0]
            ids.append(anchor)
        rows = torch.stack(ids, 1).tolist()
        return [Draft(row, probs=p) for row, p in zip(rows, torch.stack(probs, 1), strict=True)]

    def commit(self, contexts):
        pass


def chi_square_bound(freedom):
    """What a chi-square exceeds with probability 0.001, by the cube of Wilson and Hilferty."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + 3.09 * part**0.5) ** 3


@pytest.mark.parametrize(
    ("accept", "block", "temperature", "top_p", "draws"),
    [
        pytest.param("chain", 7, 0.7, 0.95, 100_000, marks=pytest.mark.again),
        ("block", 3, 1.0, 0.95, 30_000),
        ("chain", 1, 1.0, 1.0, 10_000),
    ],
)
def test_drawn_tokens_have_the_distribution_of_plain_sampling(accept, block, temperature, top_p, draws):
    model = small_model(vocab_size=32)
    requests = draws // 250  # many at once: a step costs little more
    random = torch.Generator().manual_seed(3)
    table = torch.randn(VOCAB, VOCAB, generator=random) * 1.5
    other = table + torch.randn(VOCAB, VOCAB, generator=random)
    draft = Drawn(other, 32, block)
    tokens = draws // requests
    engine = make_engine(
        model, slots=requests, pages=requests * (tokens // 256 + 2), page_size=256, disable_radix_cache=True,
        max_running_requests=requests, spec=SpecConfig(draft=draft, accept=accept),
    )  # fmt: skip
    engine.runner.model = Chain(model, table)
    how = [
        SamplingParams(temperature=temperature, top_p=top_p, seed=i, max_new_tokens=tokens, ignore_eos=True)
        for i in range(requests)
    ]
    outs = engine.generate([[i % VOCAB] for i in range(requests)], how)
    found = torch.zeros(VOCAB, VOCAB)
    for out in outs:
        chain = torch.tensor([out.prompt_ids[-1], *out.token_ids])
        found.view(-1).index_add_(0, chain[:-1] * VOCAB + chain[1:], torch.ones(len(chain) - 1))
    # what plain sampling draws with: nucleus by the definition
    probs = (table.double() / temperature).softmax(-1)
    best, order = probs.sort(-1, descending=True)
    best = best * (best.cumsum(-1) - best < top_p)
    probs = torch.zeros_like(probs).scatter_(1, order, best / best.sum(-1, keepdim=True))
    assert not found[probs == 0].any()
    expected = found.sum(1, keepdim=True) * probs
    cells = expected > 5
    statistic = ((found - expected)[cells] ** 2 / expected[cells]).sum()
    assert float(statistic) < chi_square_bound(int(cells.sum()) - VOCAB)
    report = engine.stats()["speculation"]
    assert 0.1 < report["accept_rate"] < 0.95
    assert drained(engine)


# ---- structured output --------------------------------------------------------------------------

TOK = load_tokenizer()


@pytest.mark.parametrize("temperature", [0.0, pytest.param(1.0, marks=pytest.mark.again)])
def test_a_document_that_ends_anywhere_in_a_block_is_that_of_plain_decoding(model, temperature):
    pytest.importorskip("llguidance")
    asked, how, want = [], [], []
    for length in range(1, 9):  # the shortest completions have ends at every place of a block
        schema = {"type": "string", "minLength": length, "maxLength": length, "pattern": "^[ab]+$"}
        grammar = build_grammar(
            None, None, thinking=False, response_format={"type": "json_schema", "json_schema": {"schema": schema}}
        )
        params = SamplingParams(
            temperature=temperature, seed=length, stop_token_ids=TOK.stop_ids, max_new_tokens=60, grammar=grammar
        )
        asked += prompts(4 + length, seed=length)
        how.append(params)
        (out,) = make_engine(model, tokenizer=TOK).generate([asked[-1]], params)
        want.append((out.token_ids, out.finish))
    answers = [(ids, tokens) for ids, (tokens, _) in zip(asked, want, strict=True)]
    for draft in (Scripted(answers, right=lambda c: len(c.token_ids) % 8), Random(vocab=256), Scripted(answers)):
        engine = make_engine(model, tokenizer=TOK, spec=SpecConfig(draft=draft))
        outs = engine.generate(asked, how)
        assert [(out.token_ids, out.finish) for out in outs] == want
        assert drained(engine)
    assert engine.stats()["speculation"]["accept_rate"] == 1.0, "a right draft, whatever ends inside it"


# ---- draft models -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [pytest.param("inferact", marks=pytest.mark.again), "radixark"])
def test_a_draft_model_changes_no_token(tmp_path, family):
    make_tiny(tmp_path, draft=family)
    target = KimiK3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    asked = prompts(40, 3, below=256)
    want = [alone(target, ids, greedy(12)).token_ids for ids in asked]
    engine = make_engine(target, chunked_prefill_size=16, spec=SpecConfig(draft=str(tmp_path)))
    for _ in range(2):
        outs = engine.generate(asked, greedy(12))
        assert ids_of(outs) == want
        assert not any(out.speculation.refused for out in outs)
    assert any(out.cached_tokens for out in outs)
    assert drained(engine)
    seeded = [SamplingParams(temperature=0.8, seed=i, max_new_tokens=12, ignore_eos=True) for i in range(2)]
    assert all(len(out.token_ids) == 12 for out in engine.generate(asked, seeded))


class Aware(DSpark):
    """Right where the draft has rows of its own for every token of the context, else wrong."""

    def propose(self, contexts):
        drafts = super().propose(contexts)
        pages = self._bound.pool.pages  # [layers, groups, pages, rows, width]
        size = pages.shape[3]
        for context, draft in zip(contexts, drafts, strict=True):
            places = torch.arange(len(context.token_ids) - 1)
            held = pages[:, :, torch.tensor(context.lease.pages)[places // size], places % size]
            known = self.answers.answer(list(context.token_ids)) if held.abs().sum(-1).ne(0).all() else []
            draft.token_ids = (known + [1] * self.block_size)[: self.block_size]
        return drafts


@pytest.mark.parametrize("family", ["inferact", pytest.param("radixark", marks=pytest.mark.again)])
def test_the_rows_of_a_draft_come_with_a_hit(tmp_path, family):
    make_tiny(tmp_path, draft=family)
    target = KimiK3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    (ids,) = prompts(43, below=256)
    whole = alone(target, ids, greedy(30)).token_ids
    follow = [*ids, *whole[:19], 7, 8]  # behind a hit that ends inside a page, where the first request ended
    more = alone(target, follow, greedy(16)).token_ids
    draft = Aware.from_pretrained(tmp_path, dtype=torch.float32)
    draft.answers = Scripted([(ids, whole), (follow, more)])
    engine = make_engine(target, spec=SpecConfig(draft=draft))
    for asked, tokens, want in ((ids, 20, whole[:20]), (ids, 30, whole), (follow, 16, more)):
        (out,) = engine.generate([asked], greedy(tokens))
        assert out.token_ids == want
        assert out.speculation.accept_rate == 1.0
    assert out.cached_tokens == 62
    assert drained(engine)


# ---- several ranks ------------------------------------------------------------------------------


@pytest.mark.parametrize("rollback", ["replay", pytest.param("states", marks=pytest.mark.again)])
def test_two_ranks_speculate_like_one(tmp_path, rollback):
    make_tiny(tmp_path)
    whole = KimiK3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    asked = prompts(21, 4, below=256)
    want = [alone(whole, ids, greedy(14)).token_ids for ids in asked]
    answers = list(zip(asked, want, strict=True))

    def run(tp):
        rank = KimiK3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, mesh=Mesh(tp=tp))
        draft = Scripted(answers, right=lambda c: len(c.token_ids) % 5)
        engine = make_engine(rank, spec=SpecConfig(draft=draft, rollback=rollback))
        return ids_of(engine.generate(asked, greedy(14)))

    assert Ranks(2).run(run) == [want, want]


# ---- the server ---------------------------------------------------------------------------------


def test_the_server_reports_what_speculation_did(model):
    engine = Engine(model, EngineConfig(spec=SpecConfig(draft="ngram"), checkpoint_grid=64), tokenizer=TOK)
    runner = AsyncEngine(engine)
    app = create_app(runner, TOK, model_name="m", max_model_len=engine.context_length)
    with TestClient(app) as client:
        body = {"model": "m", "prompt": "ab" * 30, "max_tokens": 40, "temperature": 0}
        usage = client.post("/v1/completions", json=body).json()["usage"]
        details = usage["completion_tokens_details"]
        assert details["verify_steps"] > 0
        assert details["accepted_prediction_tokens"] == sum(details["accepted_by_position"])
        chat = {"model": "m", "messages": [{"role": "user", "content": "x" * 50}], "max_tokens": 30}
        assert (
            "verify_steps"
            in client.post("/v1/chat/completions", json=chat).json()["usage"]["completion_tokens_details"]
        )
        text = {"text": "ab" * 30, "sampling_params": {"max_new_tokens": 20, "temperature": 0}}
        meta = client.post("/generate", json=text).json()["meta_info"]
        assert meta["spec_verify_ct"] > 0
        assert not meta["spec_simulated"]
        metrics = client.get("/metrics").text
        for name in ("spec_accept_length", "spec_accept_rate", "spec_cap_length", "spec_accept_rate_by_position"):
            assert f"k3lib:{name}" in metrics
        info = client.get("/server_info").json()
        assert info["avg_spec_accept_length"] >= 1
        assert info["internal_states"][0]["speculation"]["steps"] > 0
        json.dumps(info)
    runner.close()
