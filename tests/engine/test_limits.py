"""Limits: refused if impossible, derived if left open, and each told with its reason."""

import dataclasses
import itertools
import logging
from types import SimpleNamespace

import pytest
import torch
from engines import VOCAB, drained, greedy, make_engine, one_thread, prompts, small_model

from k3lib import KimiK3Config, KimiK3ForCausalLM
from k3lib.cache import CacheConfig, kv_bytes_per_token, state_bytes_per_slot
from k3lib.engine import AsyncEngine, Engine, EngineConfig, Request, SamplingParams
from k3lib.engine import config as engine_config
from k3lib.engine.config import free_bytes, resolve_limits
from k3lib.errors import CapacityError, ConfigError, RequestError
from k3lib.parallel import ParallelConfig

POOLS = CacheConfig(num_pages=8, num_slots=4, page_size=8, checkpoint_grid=16)
NAMES = {
    "context_length", "max_running_requests", "max_mamba_cache_size", "max_total_num_tokens", "page_size",
    "checkpoint_grid", "chunked_prefill_size", "max_queued_requests", "cuda_graphs",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def threads():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model():
    return small_model()


def resolved(model, **fields):
    found = resolve_limits(model, EngineConfig(**fields))
    limits = {limit.name: limit for limit in found.limits}
    assert set(limits) == NAMES
    assert limits["context_length"].value == found.context_length
    assert limits["max_running_requests"].value == found.max_running
    assert limits["max_mamba_cache_size"].value == found.cache.num_slots
    assert limits["max_total_num_tokens"].value == found.cache.num_pages * found.cache.page_size
    assert limits["page_size"].value == found.cache.page_size
    assert limits["checkpoint_grid"].value == found.cache.checkpoint_grid
    assert limits["chunked_prefill_size"].value == found.chunk_tokens
    return found, {name: (limit.value, limit.reason) for name, limit in limits.items()}


# ---- refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"context_length": 0}, "context_length must be an integer >= 1, got 0"),
        ({"chunked_prefill_size": 0}, "chunked_prefill_size must be an integer >= 1, got 0"),
        ({"chunked_prefill_size": 2.5}, r"chunked_prefill_size must be an integer >= 1, got 2\.5"),
        ({"max_running_requests": -1}, "max_running_requests must be an integer >= 1, got -1"),
        ({"max_queued_requests": -1}, "max_queued_requests must be an integer >= 0, got -1"),
        ({"max_mamba_cache_size": 0}, "max_mamba_cache_size must be an integer >= 1, got 0"),
        ({"max_total_tokens": -5}, "max_total_tokens must be an integer >= 1, got -5"),
        ({"checkpoint_grid": 0}, "checkpoint_grid must be an integer >= 1, got 0"),
        ({"mamba_track_interval": -1}, "mamba_track_interval must be an integer >= 0, got -1"),
        ({"page_size": True}, "page_size must be an integer >= 1, got True"),
        ({"queue_timeout": 0}, "queue_timeout must be above 0 seconds, got 0"),
        ({"request_timeout": -1.0}, r"request_timeout must be above 0 seconds, got -1\.0"),
        ({"request_timeout": float("nan")}, "request_timeout must be above 0 seconds, got nan"),
        ({"schedule_conservativeness": -0.1}, r"schedule_conservativeness must be >= 0, got -0\.1"),
        ({"mem_fraction_static": 1.0}, r"mem_fraction_static must be in \(0, 1\), got 1\.0"),
        ({"mamba_radix_cache_strategy": "lazy"}, "'lazy'"),
        ({"deterministic": True, "mix_decode": True}, "leave mix_decode out"),
        ({"deterministic": True, "chunked_prefill_size": 100}, "=100 must divide checkpoint_grid=512"),
        (
            {"deterministic": True, "chunked_prefill_size": 64, "mamba_track_interval": 64},
            "keeps no states of decode steps, but their interval is 64",
        ),
    ],
)  # fmt: skip
def test_values_that_cannot_be_are_refused(fields, pattern):
    with pytest.raises(ConfigError, match=pattern):
        EngineConfig(**fields)


@pytest.mark.parametrize(
    ("field", "value", "there"),
    [
        ("max_running_requests", 5, 4),
        ("page_size", 32, 8),
        ("checkpoint_grid", 64, 16),
        ("mamba_track_interval", 64, None),
        ("keep_turn_ends", False, True),
        ("kv_cache_dtype", "bfloat16", None),
        ("mamba_ssm_dtype", "bfloat16", None),
        ("max_mamba_cache_size", 3, 4),
        ("max_total_tokens", 65, 64),
        ("mamba_full_memory_ratio", 0.5, None),
        ("mamba_radix_cache_strategy", "no_buffer", None),
        ("mem_fraction_static", 0.5, None),
    ],
)
def test_nothing_contradicts_the_given_pools(field, value, there):
    """Neither value is taken silently; the message names both."""
    with pytest.raises(ConfigError, match=f"{field}={value!r}") as caught:
        EngineConfig(cache=POOLS, **{field: value})
    if there is not None:
        assert str(there) in str(caught.value)


def test_values_that_repeat_the_given_pools_are_taken():
    EngineConfig(
        cache=POOLS,
        page_size=8,
        checkpoint_grid=16,
        max_mamba_cache_size=4,
        max_total_tokens=64,
        max_running_requests=4,
    )


def test_a_context_beyond_the_positions_is_refused(model):
    with pytest.raises(ConfigError, match="context_length=4097 exceeds the model's 4096 positions"):
        Engine(model, EngineConfig(context_length=4097))
    assert Engine(model, EngineConfig(max_running_requests=1)).context_length == 4096
    assert Engine(model, EngineConfig(context_length=50, cache=POOLS)).context_length == 50


@pytest.mark.parametrize(
    ("budget", "fields", "pattern"),
    [
        (1, {}, "hold no slot"),
        (2, {"max_mamba_cache_size": 5}, "which leaves 0 for tokens"),
        (8, {"max_running_requests": 3, "mamba_full_memory_ratio": 0.5}, "limited to 0 by 1 slots, 5 a request"),
        (200, {"max_mamba_cache_size": 2}, "limited to 0 by 2 slots, 5 a request"),
        (200, {"max_total_tokens": 63}, "max_total_tokens=63 fill no page of page_size=64"),
    ],
)
def test_a_budget_that_holds_no_request_is_refused_with_the_needs_of_both_pools(
    model, monkeypatch, budget, fields, pattern
):
    """Before anything is allocated. `budget` counts state slots."""
    per_slot = state_bytes_per_slot(model.config.text, conv_itemsize=4)
    monkeypatch.setattr(engine_config, "CPU_CACHE_BYTES", budget * per_slot)
    monkeypatch.setattr(engine_config, "CacheConfig", None)
    with pytest.raises(ConfigError, match=pattern) as caught:
        Engine(model, EngineConfig(**fields))
    text = str(caught.value)
    assert f"slots of {per_slot:,}" in text
    assert f"rows of {kv_bytes_per_token(model.config.text, itemsize=4):,.0f}" in text
    assert f"rest_bytes={budget * per_slot:,}" in text


# ---- derived ------------------------------------------------------------------------------------


def test_what_is_left_open_is_derived_or_default(model):
    found, limits = resolved(model)
    assert limits == {
        "context_length": (4096, "derived"),
        "max_running_requests": (16, "derived"),
        "max_mamba_cache_size": (16 * 5 * 4, "derived"),  # no more than there is use for
        "max_total_num_tokens": (16 * 4096, "derived"),
        "page_size": (64, "default"),
        "checkpoint_grid": (512, "default"),
        "chunked_prefill_size": (2048, "default"),
        "max_queued_requests": ("unlimited", "default"),
        "cuda_graphs": (0, "derived"),  # a CPU has none
    }
    assert found.cache.prefix_cache
    assert found.cache.keep_turn_ends


CAPS = [{}, *({"max_running_requests": cap} for cap in (1, 16, 31, 32, 64))]
REUSE = [{}, {"disable_radix_cache": True}, {"mamba_radix_cache_strategy": "no_buffer"}]
SIZES = [
    {},
    {"max_mamba_cache_size": 400, "max_total_tokens": 128 * 1024, "page_size": 32, "checkpoint_grid": 96},
    {"context_length": 100, "chunked_prefill_size": 7, "max_queued_requests": 0},
]


@pytest.mark.parametrize(
    "fields",
    [{**a, **b, **c} for a, b, c in itertools.product(CAPS, REUSE, SIZES)],
    ids=lambda f: "-".join(f) or "none",
)
def test_an_explicit_value_is_never_changed(model, caplog, fields):
    found, limits = resolved(model, **fields)
    told = {"max_total_tokens": "max_total_num_tokens"}
    for name, value in fields.items():
        if (name := told.get(name, name)) in limits:
            assert limits[name] == (value, "given")
    for name in NAMES - {told.get(name, name) for name in fields}:
        assert limits[name][1] in {"derived", "default"}, name
    assert found.max_running <= found.cache.num_slots
    assert found.cache.prefix_cache != fields.get("disable_radix_cache", False)
    assert not caplog.records


def test_a_value_that_does_not_fit_is_limited_with_a_warning_that_names_both(model, monkeypatch, caplog):
    per_slot = state_bytes_per_slot(model.config.text, conv_itemsize=4)
    monkeypatch.setattr(engine_config, "CPU_CACHE_BYTES", 100 * per_slot)
    found, limits = resolved(model, max_running_requests=64, max_total_tokens=10**9)
    slots = limits["max_mamba_cache_size"][0]
    assert limits["max_running_requests"] == (found.cache.num_slots // 5, "derived")
    assert f"max_running_requests=64, limited to {slots // 5} by {slots} slots, 5 a request" in caplog.text
    assert f"max_total_tokens=1000000000 does not fit: limited to {limits['max_total_num_tokens'][0]}" in caplog.text
    assert limits["max_total_num_tokens"][1] == "derived"


@pytest.mark.parametrize("grid", [16, 512])
def test_deterministic_chunks_are_no_larger_than_the_checkpoint_grid(model, caplog, grid):
    cache = CacheConfig(num_pages=40, num_slots=4, page_size=64, checkpoint_grid=grid)
    found, limits = resolved(model, cache=cache, deterministic=True)
    assert found.chunk_tokens == grid
    assert limits["chunked_prefill_size"] == (grid, "derived")
    assert f"chunked_prefill_size limited to {grid} tokens" in caplog.text
    assert "2048 were asked for" in caplog.text
    found, limits = resolved(model, cache=cache, deterministic=True, disable_radix_cache=True)
    assert found.chunk_tokens == 2048
    assert limits["chunked_prefill_size"] == (2048, "default")


@pytest.mark.parametrize(("asked", "origin"), [({}, "the model's positions"), ({"context_length": 100}, "asked for")])
def test_a_pool_smaller_than_the_context_limits_it_with_a_warning(model, caplog, asked, origin):
    engine = Engine(model, EngineConfig(cache=POOLS, **asked))
    number = asked.get("context_length", 4096)
    assert engine.context_length == 64
    assert f"context_length limited to 64 tokens: the KV pool has 8 pages of 8; {number} were {origin}" in caplog.text
    limit = engine.stats()["limits"]["context_length"]
    assert (limit["value"], limit["reason"]) == (64, "derived")
    assert str(number) in limit["note"]
    engine.check_request(Request([1] * 60, greedy(4)))
    with pytest.raises(RequestError, match="60 prompt tokens and max_new_tokens=5 exceed the context of 64 tokens"):
        engine.add(Request([1] * 60, greedy(5)))
    assert drained(engine)


@pytest.mark.parametrize("slots", [20, 64, 1000])
def test_derived_pools_stay_within_the_budget(model, monkeypatch, slots):
    per_slot = state_bytes_per_slot(model.config.text, conv_itemsize=4)
    budget = slots * per_slot
    monkeypatch.setattr(engine_config, "CPU_CACHE_BYTES", budget)
    engine = Engine(model, EngineConfig(max_running_requests=1))
    null_page = 64 * kv_bytes_per_token(model.config.text, itemsize=4)
    assert engine.cache.pool.nbytes <= budget + null_page
    assert engine.cache.config.num_slots >= 5


def test_derived_pools_of_a_model_without_kda_or_mla_layers():
    for layers in ({"kda_layers": [], "full_attn_layers": [1, 2]}, {"kda_layers": [1, 2], "full_attn_layers": []}):
        config = KimiK3Config.tiny(num_hidden_layers=2, **layers)
        tiny = KimiK3ForCausalLM(config, device="meta", dtype=torch.float32)
        found, _ = resolved(tiny, max_running_requests=2, context_length=100)
        assert (found.max_running, found.cache.num_pages) == (2, 4)
        assert found.cache.num_slots >= 2


# ---- told ---------------------------------------------------------------------------------------


def test_every_limit_is_logged_once_at_the_start_and_told_by_stats(model, caplog):
    caplog.set_level(logging.INFO)
    engine = Engine(model, EngineConfig(cache=POOLS, max_queued_requests=3, chunked_prefill_size=16))
    limits = engine.stats()["limits"]
    assert set(limits) == NAMES
    for name, limit in limits.items():
        lines = [r.message for r in caplog.records if r.message.startswith(f"{name} = {limit['value']} (")]
        assert len(lines) == 1, name
        assert f"({limit['reason']})" in lines[0]
    assert limits["max_queued_requests"]["value"] == 3
    assert {limits[name]["reason"] for name in ("page_size", "checkpoint_grid", "chunked_prefill_size")} == {"given"}


def test_a_start_without_reuse_says_so(model, caplog):
    caplog.set_level(logging.INFO)
    engine = Engine(model, EngineConfig(cache=POOLS, disable_radix_cache=True))
    assert "no prefix cache" in engine.stats()["limits"]["checkpoint_grid"]["note"]
    assert sum("no prefix cache" in r.message for r in caplog.records) == 1
    work = prompts(40)
    for _ in range(2):
        (out,) = engine.generate(work, greedy(3))
        assert (out.cached_tokens, out.kv_tokens) == (0, 0)
    assert engine.cache.cached_pages == engine.cache.cached_slots == 0
    assert drained(engine)


# ---- requests -----------------------------------------------------------------------------------


BAD = [
    (Request([], greedy()), "the prompt is empty", "prompt"),
    (Request([1, VOCAB], greedy()), rf"token id {VOCAB} is outside the vocabulary 0\.\.{VOCAB - 1}", "prompt"),
    (Request([-1], greedy()), "token id -1 is outside", "prompt"),
    (Request([1.0], greedy()), r"token ids must be integers, got 1\.0", "prompt"),
    (Request(["a"], greedy()), "token ids must be integers, got 'a'", "prompt"),
    (Request([1] * 60, greedy(5)), "60 prompt tokens and max_new_tokens=5 exceed the context of 64", "prompt"),
    (Request([1] * 65, greedy(0)), "65 prompt tokens and max_new_tokens=0 exceed the context of 64", "prompt"),
    (Request([1], greedy(10**9)), "exceed the context of 64", "prompt"),
    (Request([1], greedy(), timeout=0), "timeout must be above 0 seconds, got 0", "timeout"),
    (Request([1], greedy(), timeout=-2.0), r"timeout must be above 0 seconds, got -2\.0", "timeout"),
    (Request([1], greedy(), timeout=float("nan")), "timeout must be above 0 seconds, got nan", "timeout"),
    (Request([1], greedy(), priority="high"), "priority must be int, got 'high'", "priority"),
    (Request([1], greedy(), namespace=None), "namespace must be str, got None", "namespace"),
    (Request([1], greedy(stop=("x",))), "texts to stop at need", "stop"),
]


@pytest.mark.parametrize(("bad", "pattern", "param"), BAD, ids=lambda x: x[:30] if isinstance(x, str) else "")
def test_a_request_that_can_never_run_is_refused_and_changes_nothing(model, bad, pattern, param):
    engine = Engine(model, EngineConfig(cache=POOLS))
    engine.add(Request([1, 2, 3], greedy(2), "other"))
    engine.step()
    before = engine.stats()
    with pytest.raises(RequestError, match=pattern) as caught:
        engine.add(bad)
    assert caught.value.param == param
    assert engine.stats() == before
    while engine.has_work:
        assert {out.request_id for out in engine.step()} <= {"other"}
    assert drained(engine)


def test_a_model_without_experts_cannot_record_routes(model):
    text = dataclasses.replace(model.config.text, moe=None, dense_layers=frozenset(range(3)))
    dense = KimiK3ForCausalLM(dataclasses.replace(model.config, text=text), dtype=torch.float32)
    with pytest.raises(RequestError, match="this model routes nothing"):
        make_engine(dense).add(Request([1], greedy(), record_routes=True))


def test_a_full_queue_refuses_and_names_its_limit(model):
    engine = make_engine(model, slots=2, max_running_requests=1, max_queued_requests=2)
    for name in "abc":  # one of them has a place to run
        engine.add(Request([1, 2], greedy(2), name))
    before = engine.stats()
    late = Request([1, 2], greedy(2), "late")
    with pytest.raises(CapacityError, match="the queue is full: max_queued_requests=2"):
        engine.add(late)
    assert engine.stats() == before
    engine.step()
    with pytest.raises(CapacityError):
        engine.add(late)
    while engine.has_work:
        engine.step()
    engine.add(late)
    while engine.has_work:
        engine.step()
    assert drained(engine)


def test_a_full_queue_gives_up_its_worst_place_to_a_higher_priority(model):
    engine = make_engine(model, slots=2, max_running_requests=1, max_queued_requests=2)
    for name, priority in (("runs", 0), ("first", 0), ("last", 0)):
        engine.add(Request([1, 2], greedy(3), name, priority=priority))
    engine.step()
    engine.add(Request([1, 2], greedy(3), "better", priority=1))
    with pytest.raises(CapacityError):
        engine.add(Request([1, 2], greedy(3), "equal"))
    ends = {}
    while engine.has_work:
        for out in engine.step():
            if out.finish is not None:
                ends[out.request_id] = out.finish
    assert ends == {"last": "abort", "runs": "length", "better": "length", "first": "length"}
    assert list(ends)[-2:] == ["better", "first"]
    assert engine.stats()["aborted"] == 1
    assert drained(engine)


def test_generate_waits_for_room_in_the_queue(model):
    engine = make_engine(model, slots=2, max_running_requests=1, max_queued_requests=0)
    outputs = engine.generate(prompts(*range(1, 8)), greedy(3))
    assert [len(out.token_ids) for out in outputs] == [3] * 7
    assert drained(engine)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -1}, {"top_p": 0}, {"max_new_tokens": -1}, {"min_tokens": 200}, {"stop": "text"},
        {"stop": ("",)}, {"logit_bias": {-1: 1.0}}, {"top_logprobs": 3}, {"stop_token_ids": (-1,)},
    ],
    ids=str,
)  # fmt: skip
def test_sampling_parameters_are_checked_when_made(fields):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields)
    assert caught.value.param in fields


def test_an_asynchronous_engine_refuses_before_anything_is_queued(model):
    engine = AsyncEngine(Engine(model, EngineConfig(cache=POOLS)))
    try:
        for bad, pattern, _ in BAD[:7]:
            iterator = engine.generate(bad.prompt_ids, bad.params)
            with pytest.raises(RequestError, match=pattern):
                iterator.__anext__().send(None)
    finally:
        engine.close()
    assert drained(engine.engine)


def test_pools_get_what_the_fraction_leaves(monkeypatch):
    """`free - (1 - fraction) * before - images` (serving specification, section 1.2), on the rank that has least."""
    model = SimpleNamespace(
        device=torch.device("cuda"),
        mesh=SimpleNamespace(least=lambda n: n, config=ParallelConfig()),
        config=SimpleNamespace(vision=None),
    )
    gib = 1 << 30
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 90 * gib)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 92 * gib)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (48 * gib, 141 * gib))  # others hold one
    assert free_bytes(model, EngineConfig(mem_fraction_static=0.8)) == 22 * gib
    assert free_bytes(model, EngineConfig()) == pytest.approx(40 * gib, abs=0.1 * gib)  # 10 GiB for activations
    with pytest.raises(ConfigError, match=r"mem_fraction_static=0\.6 leaves nothing.*give a fraction above 0\.643"):
        free_bytes(model, EngineConfig(mem_fraction_static=0.6))
