"""Decode steps of fixed shape: filled in place, padded, and on a GPU replayed as graphs."""

import logging

import pytest
import torch
from engines import alone, drained, greedy, ids_of, make_engine, one_thread, prompts, small_model

from k3lib import Batch, KimiK3Config, KimiK3ForCausalLM, ops
from k3lib.cache import CacheConfig
from k3lib.engine import Engine, EngineConfig, SamplingParams
from k3lib.engine.config import resolve_limits
from k3lib.engine.graphs import DecodeGraphs, graph_sizes
from k3lib.errors import ConfigError

gpu_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: graphs are captured there")


@pytest.fixture(scope="module", autouse=True)
def threads():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model():
    return small_model()


def padded(engine, *, max_requests=8, captures=False):
    """Let an engine run its decode steps over static batches."""
    cache = engine.cache
    pages = -(-engine.context_length // cache.config.page_size)
    engine.runner.graphs = DecodeGraphs(
        engine.model, cache, max_requests=max_requests, max_pages=pages, captures=captures
    )
    return engine


# ---- the static batch ---------------------------------------------------------------------------


def test_a_static_batch_is_all_padding():
    batch = Batch.static(3, max_pages=5)
    assert (batch.mode, batch.new_tokens, batch.num_tokens) == ("decode", (1, 1, 1), 3)
    assert batch.cu_seqlens.tolist() == [0, 1, 2, 3]
    assert batch.page_table.shape == (3, 5)
    for zeros in (batch.input_ids, batch.slots, batch.rows, batch.page_table):
        assert not zeros.any()
    for ones in (batch.key_lens, batch.seq_lens):
        assert ones.eq(1).all()
    wide = Batch.static(2, 4, max_pages=1)
    assert (wide.mode, wide.new_tokens, wide.max_new) == ("verify", (4, 4), 4)
    assert wide.input_ids.shape == wide.rows.shape == wide.key_lens.shape == (8,)


def step(*totals, slots=None, pages=None, ids=None):
    """One token for each of some requests with so many tokens after it, on pages of 4."""
    tables = pages or [[10 * i + p + 1 for p in range(-(-n // 4))] for i, n in enumerate(totals)]
    return Batch.of(
        [1] * len(totals), mode="decode", cached_tokens=[n - 1 for n in totals], page_tables=tables, page_size=4,
        slots=slots or list(range(1, len(totals) + 1)),
        input_ids=torch.tensor(ids or [7 * n for n in totals]),
    )  # fmt: skip


def test_filling_copies_a_step_and_leaves_padding_behind_it():
    static = Batch.static(4, max_pages=6)
    kept = {
        name: getattr(static, name) for name in ("input_ids", "seq_lens", "slots", "rows", "key_lens", "page_table")
    }
    places = {name: x.data_ptr() for name, x in kept.items()}
    static.fill(step(9, 3, 17, 2))
    static.fill(batch := step(5, 6))
    assert {name: getattr(static, name).data_ptr() for name in kept} == places
    for name in ("input_ids", "seq_lens", "slots", "rows", "key_lens"):
        assert getattr(static, name)[:2].equal(getattr(batch, name)), name
    assert static.page_table[:2, :2].equal(batch.page_table)
    for name, value in {"input_ids": 0, "seq_lens": 1, "slots": 0, "rows": 0, "key_lens": 1}.items():
        assert getattr(static, name)[2:].eq(value).all(), name
    assert static.page_table[2:, 0].eq(0).all()
    assert (static.max_seq, static.cached_tokens) == (6, (4, 5, 0, 0))
    assert static.new_tokens == (1, 1, 1, 1)


@pytest.mark.parametrize("batch", [
    step(1, 2, 3), step(30), Batch.of([2], mode="decode", slots=[1]), Batch.lengths([1]), Batch.decode([1]),
])  # fmt: skip
def test_what_does_not_fit_is_refused(batch):
    static = Batch.static(2, max_pages=3)
    assert not static.fits(batch)
    with pytest.raises(ConfigError, match="do not fit 2 of 1"):
        static.fill(batch)


@pytest.mark.parametrize(("requests", "tokens"), [(0, 1), (1, 0)])
def test_a_static_batch_of_nothing_is_refused(requests, tokens):
    with pytest.raises(ConfigError, match="must be >= 1, got 0"):
        Batch.static(requests, tokens, max_pages=1)


@pytest.mark.parametrize("largest", [1, 3, 8, 17, 100, 256])
def test_sizes_reach_every_batch_without_much_padding(largest):
    sizes = graph_sizes(largest)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == largest
    assert len(sizes) <= 16
    for count in range(1, largest + 1):
        size = next(n for n in sizes if n >= count)
        assert size < 2 * count or size == 1
        if count > 16:
            assert size < 1.5 * count + 1


# ---- decoding over static batches ---------------------------------------------------------------


def test_padded_steps_give_the_same_tokens(model):
    engine = padded(make_engine(model, slots=8, page_size=8, context_length=64))
    params = [greedy(n) for n in (3, 9, 6, 12, 5)]
    asked = prompts(5, 17, 1, 30, 8)
    want = [alone(model, ids, p).token_ids for ids, p in zip(asked, params, strict=True)]
    assert ids_of(engine.generate(asked, params)) == want
    assert engine.runner.graphs.reason is None
    assert drained(engine)


def test_padding_touches_only_the_null_slot_and_the_null_page(model):
    engine = padded(make_engine(model, slots=4, pages=20, page_size=4, context_length=40), max_requests=4)
    pool = engine.cache.pool
    engine.generate(prompts(9), greedy(2))
    before = [x.clone() for x in (pool.latent.pages, pool.kda.state, pool.kda.conv)]
    static = Batch.static(4, max_pages=10)
    with torch.inference_mode():
        logits = model(static, engine.cache, logits="last")
    assert logits.isfinite().all()
    for old, new in zip(before, (pool.latent.pages, pool.kda.state, pool.kda.conv), strict=True):
        assert old[:, 1:].equal(new[:, 1:])
        assert new[:, 0].isfinite().all()


def test_routes_and_prompt_scores_run_without(model):
    engine = padded(make_engine(model, slots=4, page_size=8, context_length=64))
    ran = []
    graphs = engine.runner.graphs
    run = graphs.run
    graphs.run = lambda batch: ran.append(run(batch)) or ran[-1]
    (out,) = engine.generate(prompts(9), greedy(4, prompt_logprobs=True))
    assert len(out.prompt_logprobs) == 9
    assert not ran
    engine.generate(prompts(9), greedy(4))
    assert ran
    assert all(x is not None for x in ran)


def test_wider_steps_run_without(model):
    engine = padded(make_engine(model, slots=8, page_size=8, context_length=64), max_requests=2)
    asked = prompts(5, 6, 7)
    want = [alone(model, ids, greedy(4)).token_ids for ids in asked]
    assert ids_of(engine.generate(asked, greedy(4))) == want


def test_deterministic_requests_keep_their_logits(model):
    rules = {"deterministic": True, "disable_radix_cache": True}
    engine = padded(make_engine(model, slots=4, page_size=8, context_length=64, **rules), max_requests=1)
    asked = prompts(5, 11, 8)
    want = [alone(model, ids, greedy(5), deterministic=True).token_ids for ids in asked]
    assert ids_of(engine.generate(asked, greedy(5))) == want


def test_what_cannot_be_captured_runs_eagerly_and_says_why_once(model, monkeypatch, caplog):
    engine = padded(make_engine(model, slots=4, page_size=8, context_length=64), captures=True)

    def refuse(self, static):
        raise RuntimeError("mla_decode/reference waits for the device, which a graph cannot\nmore")

    monkeypatch.setattr(DecodeGraphs, "_capture", refuse)
    with caplog.at_level(logging.WARNING):
        asked = prompts(5, 11)
        want = [alone(model, ids, greedy(6)).token_ids for ids in asked]
        assert ids_of(engine.generate(asked, greedy(6))) == want
    told = [r.getMessage() for r in caplog.records if "CUDA graphs" in r.getMessage()]
    assert told == [
        "decode steps run without CUDA graphs: mla_decode/reference waits for the device, which a graph cannot"
    ]
    assert engine.runner.graphs.reason.startswith("mla_decode/reference waits")


def test_other_kernels_or_memory_start_anew(model):
    engine = padded(make_engine(model, slots=4, page_size=8, context_length=64))
    graphs = engine.runner.graphs
    engine.generate(prompts(5), greedy(3))
    first = graphs._graphs[1, 1]
    engine.generate(prompts(5), greedy(3))
    assert graphs._graphs[1, 1] is first
    with ops.use_backend("reference"):
        engine.generate(prompts(5), greedy(3))
    assert graphs._graphs[1, 1] is not first


def test_a_cpu_has_no_graphs(model):
    for flag, note in ((True, "no CUDA device"), (False, "decode steps run eagerly")):
        config = EngineConfig(cache=CacheConfig(num_pages=8, num_slots=4), cuda_graphs=flag)
        found = resolve_limits(model, config)
        assert found.graph_requests == 0
        assert next(x for x in found.limits if x.name == "cuda_graphs").note == note
        assert Engine(model, config).runner.graphs is None


# ---- captured -----------------------------------------------------------------------------------


def gpu_model():
    """Nine layers with K3's head widths, bf16, on the GPU."""
    changes = {
        "hidden_size": 256, "head_dim": 128, "num_heads": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    }  # fmt: skip
    torch.manual_seed(0)
    model = KimiK3ForCausalLM(KimiK3Config.tiny(**changes), dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        for name, x in model.named_parameters():
            if x.ndim > 1 and "conv" not in name:
                x.normal_(std=x.shape[-1] ** -0.5)
            elif "norm" in name:
                x.fill_(1)
            else:
                x.uniform_(-0.5, 0.5)
    return model.eval().requires_grad_(requires_grad=False)


def gpu_engine(model, graphs=True):
    cache = CacheConfig(num_pages=200, num_slots=24, page_size=64)
    return Engine(model, EngineConfig(cache=cache, context_length=512, max_running_requests=5, cuda_graphs=graphs))


@gpu_only
def test_a_graph_gives_the_bits_of_its_eager_step():
    model = gpu_model()
    engine = gpu_engine(model)
    graphs = engine.runner.graphs
    seen = []
    run = graphs.run

    def both(batch):
        pool = engine.cache.pool
        memory = (pool.latent.pages, pool.kda.state, pool.kda.conv)
        before = [x.clone() for x in memory]
        found = run(batch)
        if found is None:
            return None
        logits = found[0]
        replayed, after = logits.clone(), [x.clone() for x in memory]
        for x, old in zip(memory, before, strict=True):
            x.copy_(old)
        static = next(graphs._graphs[n, 1].batch for n in graphs.sizes if n >= len(batch.new_tokens))
        eager = model(static, engine.cache, logits="last")[: len(batch.new_tokens)]
        assert eager.equal(replayed)
        for x, new in zip(memory, after, strict=True):
            assert x[:, 1:].equal(new[:, 1:])
        seen.append(len(batch.new_tokens))
        return replayed, None

    graphs.run = both
    asked = prompts(5, 100, 1, 64, 130)
    engine.generate(asked, [SamplingParams(temperature=0, max_new_tokens=n, ignore_eos=True) for n in (3, 9, 6, 12, 5)])
    if graphs.reason is not None:
        pytest.skip(f"needs kernels that can be captured: {graphs.reason}")
    assert set(seen) == {1, 2, 3, 4, 5}
    assert graphs.num_captures == 4  # of 1, 2, 4 and 5


@gpu_only
def test_weights_that_are_replaced_in_place_reach_the_graphs():
    model = gpu_model()
    engine = gpu_engine(model)
    params = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
    engine.generate(prompts(20), params)
    graphs = engine.runner.graphs
    if graphs.reason is not None:
        pytest.skip(f"needs kernels that can be captured: {graphs.reason}")
    captured = graphs.num_captures
    with torch.no_grad():
        model.lm_head.weight.neg_()
    engine.clear_cache()
    got = ids_of(engine.generate(prompts(20), params))
    assert graphs.num_captures == captured
    assert got == ids_of(gpu_engine(model, graphs=False).generate(prompts(20), params))
