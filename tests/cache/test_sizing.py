"""Bytes of the cache: by KDA and MLA layers, never by all layers. Plans, ratios, and the reasons of every limit."""

import inspect
import itertools
import json
import math
import pathlib
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from k3lib import KimiK3Config
from k3lib.cache import (
    CacheConfig,
    HybridCache,
    default_mem_fraction,
    draft_bytes_per_token,
    format_ratio,
    kv_bytes_per_token,
    plan_memory,
    ratio_terms,
    replay_bytes_per_slot,
    rest_from_memory,
    slots_per_request,
    state_bytes_per_slot,
    state_kv_ratio,
)
from k3lib.draft_config import DraftConfig
from k3lib.errors import ConfigError

MIB, GIB = 1 << 20, 1 << 30
SLOT = 56_171_520  # bytes of a state of K3 on one of 8 ranks
GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
PLANS = json.loads((GOLDEN / "pool_plans.json").read_text())["examples"]
RATIOS = json.loads((GOLDEN / "ratios.json").read_text())["examples"]


@pytest.fixture(scope="module")
def official():
    """The geometry of K3: 69 KDA layers of 96 heads, 24 MLA layers of 576 values a token."""
    config = KimiK3Config.tiny(
        num_hidden_layers=93,
        hidden_size=7168,
        full_attn_layers=[*range(4, 93, 4), 93],
        kda_layers=[n for n in range(1, 93) if n % 4],
        num_heads=96,
        num_attention_heads=96,
        num_key_value_heads=96,
        head_dim=128,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
    )
    assert (len(config.text.layers_of("kda")), len(config.text.layers_of("mla"))) == (69, 24)
    return replace(config.text, max_position_embeddings=1 << 20)


def only(kind, layers=4):
    """A tiny text model with one kind of layer."""
    text = KimiK3Config.tiny().text
    return replace(text, layer_types=(kind,) * layers, dense_layers=frozenset(range(layers)), moe=None)


def wide():
    """A tiny text model whose sizes all differ: K 24, V 56, 6 KDA heads, a window of 4."""
    text = KimiK3Config.tiny().text
    return replace(text, kda=replace(text.kda, num_heads=6, key_dim=24, value_dim=56, conv_width=5))


def test_the_released_configuration_has_this_geometry(official, golden):
    file = pathlib.Path(golden).parent / "spec" / "configs" / "kimi_k3.json"
    if not file.exists():
        pytest.skip(f"needs {file}")
    text = KimiK3Config.from_hf(json.loads(file.read_text())).text
    assert state_bytes_per_slot(text) == state_bytes_per_slot(official)
    assert kv_bytes_per_token(text) == kv_bytes_per_token(official)


@pytest.mark.parametrize(("itemsize", "dcp_size", "want"), [(2, 1, 27_648), (1, 1, 13_824), (2, 8, 3_456)])
def test_kv_bytes_per_token(official, itemsize, dcp_size, want):
    assert kv_bytes_per_token(official, itemsize=itemsize, dcp_size=dcp_size) == want


@pytest.mark.parametrize(
    ("tp_size", "fp32", "bf16"),
    [
        (1, 449_372_160, 232_316_928),
        (2, 224_686_080, 116_158_464),
        (4, 112_343_040, 58_079_232),
        (8, 56_171_520, 29_039_616),
        (16, 28_085_760, 14_519_808),
        (32, 14_042_880, 7_259_904),
    ],
)
def test_state_bytes_per_slot(official, tp_size, fp32, bf16):
    assert state_bytes_per_slot(official, tp_size=tp_size) == fp32
    assert state_bytes_per_slot(official, tp_size=tp_size, state_itemsize=2) == bf16


def test_the_matrix_alone_takes_six_mebibytes_a_layer(official):
    matrix = state_bytes_per_slot(official, conv_itemsize=0)
    assert matrix == 414 * MIB == 69 * 6 * MIB
    assert state_bytes_per_slot(official, conv_itemsize=0, tp_size=8) == 69 * 3 * MIB // 4


def test_more_mla_layers_leave_the_state_alone(official):
    types = official.layer_types + ("mla",) * 24
    doubled = replace(official, layer_types=types)
    assert len(doubled.layers_of("mla")) == 48
    assert state_bytes_per_slot(doubled) == state_bytes_per_slot(official)
    assert kv_bytes_per_token(doubled) == 2 * kv_bytes_per_token(official)


def test_more_kda_layers_leave_the_kv_alone(official):
    more = replace(official, layer_types=official.layer_types + ("kda",) * 69)
    assert state_bytes_per_slot(more) == 2 * state_bytes_per_slot(official)
    assert kv_bytes_per_token(more) == kv_bytes_per_token(official)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("kv", "kv_size", "ssm", "ssm_size"),
    [(None, 2, None, 4), ("fp8_e4m3", 1, "bfloat16", 2), ("float32", 4, "float32", 4)],
)
def test_sizes_are_those_of_the_tensors(tp_size, kv, kv_size, ssm, ssm_size):
    config = KimiK3Config.tiny()
    sizes = CacheConfig(num_pages=5, num_slots=3, page_size=16, kv_cache_dtype=kv, mamba_ssm_dtype=ssm)
    pool = HybridCache.allocate(config, sizes, tp_size=tp_size).pool
    # the null page and the null slot come on top
    assert pool.latent.pages.nbytes == kv_bytes_per_token(config.text, itemsize=kv_size) * 16 * 6
    state = state_bytes_per_slot(config.text, state_itemsize=ssm_size, tp_size=tp_size)
    assert pool.kda.state.nbytes + pool.kda.conv.nbytes == state * 4
    assert pool.nbytes == sum(x.nbytes for x in (pool.latent.pages, pool.kda.state, pool.kda.conv))
    assert pool.kda.conv.dtype == torch.bfloat16


# ---- unit costs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tp_size", [1, 2, 3, 6])
def test_b3_the_pool_is_sized_by_the_layers_of_each_kind(tp_size):
    text = wide()
    kda, mla = text.kda, text.mla
    assert len({kda.num_heads, kda.key_dim, kda.value_dim, kda.conv_width, mla.latent_width}) == 5
    for layers in itertools.product([1, 3], [1, 2]):
        model = replace(text, layer_types=("kda",) * layers[0] + ("mla",) * layers[1])
        matrix = kda.num_heads * kda.key_dim * kda.value_dim
        window = (kda.conv_width - 1) * kda.num_heads * (2 * kda.key_dim + kda.value_dim)
        for state_itemsize, conv_itemsize in itertools.product([2, 4], [2, 4]):
            got = state_bytes_per_slot(
                model, state_itemsize=state_itemsize, conv_itemsize=conv_itemsize, tp_size=tp_size
            )
            assert got == layers[0] * (matrix * state_itemsize + window * conv_itemsize) / tp_size
        assert kv_bytes_per_token(model, itemsize=1, dcp_size=3) == layers[1] * mla.latent_width / 3


def test_b3_the_plan_uses_the_same_unit_costs():
    text = wide()
    plan = plan_memory(text, rest_bytes=1 << 28, tp_size=2, dcp_size=2, kv_cache_dtype="fp8_e4m3", dtype="float32")
    assert plan.state_bytes == state_bytes_per_slot(text, conv_itemsize=4, tp_size=2)
    assert plan.cell_bytes == kv_bytes_per_token(text, itemsize=1)
    more = plan_memory(replace(text, layer_types=text.layer_types + ("mla",) * 3), rest_bytes=1 << 28)
    assert more.state_bytes == plan_memory(text, rest_bytes=1 << 28).state_bytes
    assert more.cell_bytes == 2 * plan_memory(text, rest_bytes=1 << 28).cell_bytes


def test_a_replay_ring_takes_a_third_of_a_slot(official):
    assert replay_bytes_per_slot(official, tp_size=8) == 20_401_920
    assert replay_bytes_per_slot(official, tp_size=8) == 69 * 295_680
    assert replay_bytes_per_slot(official, cache_len=32, tp_size=8) == 2 * 20_401_920
    text = wide()
    token = 6 * (2 * (24 + 56) * 2 + 24 * 4 + 4)
    assert replay_bytes_per_slot(text, cache_len=4) == len(text.layers_of("kda")) * 4 * token


def test_a_draft_shares_or_repeats_its_heads(golden):
    folder = pathlib.Path(golden).parent / "spec" / "configs"
    if not folder.is_dir():
        pytest.skip(f"needs {folder}")
    grouped, latent = (
        DraftConfig.from_hf(json.loads((folder / f"dspark_{name}_k3.json").read_text()))
        for name in ("radixark", "inferact")
    )
    sizes = [draft_bytes_per_token(grouped, tp_size=n) for n in (1, 8, 16, 32)]
    assert sizes == [20_480, 2_560, 1_280, 1_280]
    assert draft_bytes_per_token(grouped, itemsize=1, tp_size=8) == 1_280
    assert draft_bytes_per_token(latent) == draft_bytes_per_token(latent, tp_size=8) == 5_760
    with pytest.raises(ConfigError, match="tp_size=3 neither divides the 16 KV heads"):
        draft_bytes_per_token(grouped, tp_size=3)


# ---- slots a request, and the ratio ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "flags", "want"),
    [
        ("auto", {}, 5),
        ("extra_buffer", {}, 5),
        ("extra_buffer", {"disable_overlap_schedule": True}, 4),
        ("extra_buffer", {"pp_size": 2}, 4),
        ("extra_buffer", {"skip_decode_lock": True}, 4),
        ("extra_buffer", {"skip_decode_lock": True, "pp_size": 2}, 3),
        ("extra_buffer_lazy", {}, 4),
        ("extra_buffer_lazy", {"pp_size": 2}, 4),
        ("extra_buffer_lazy", {"skip_decode_lock": True}, 3),
        ("no_buffer", {}, 3),
        ("no_buffer", {"skip_decode_lock": True}, 3),
        ("extra_buffer", {"disable_radix_cache": True}, 1),
        ("extra_buffer", {"role": "decode"}, 1),
        ("extra_buffer", {"role": "prefill"}, 5),
    ],
    ids=str,
)
def test_slots_per_request(strategy, flags, want):
    assert slots_per_request(strategy, **flags) == want


def test_an_unknown_strategy_or_role_is_refused_with_the_known_names(official):
    message = "mamba_radix_cache_strategy='lazy'; expected one of auto, no_buffer, extra_buffer, extra_buffer_lazy"
    with pytest.raises(ConfigError, match=message):
        slots_per_request("lazy")
    with pytest.raises(ConfigError, match=message):
        plan_memory(official, rest_bytes=GIB, mamba_radix_cache_strategy="lazy")
    with pytest.raises(ConfigError, match=message):
        state_kv_ratio(official, mamba_radix_cache_strategy="lazy")
    with pytest.raises(ConfigError, match="role='router'; expected one of"):
        slots_per_request(role="router")
    with pytest.raises(ConfigError, match="no cache"):
        plan_memory(official, rest_bytes=GIB, role="encoder-only")
    assert slots_per_request(role="unified") == slots_per_request(role="null") == slots_per_request(role=None)


@pytest.mark.parametrize("example", RATIOS, ids=lambda example: example["name"])
def test_ratio_of_the_published_calculator(official, example):
    terms = ratio_terms(official, **example["inputs"])
    want = dict(example["outputs"])
    assert round(terms.ratio, 6) == want.pop("ratio")
    assert {name: getattr(terms, name) for name in want} == want
    assert state_kv_ratio(official, **example["inputs"]) == terms.ratio


def test_there_are_34_ratios_and_17_plans():
    assert (len(RATIOS), len(PLANS)) == (34, 17)


@pytest.mark.parametrize(
    ("want", "flags"),
    [
        ("0.9", {}),
        ("7.21", {"dcp_size": 8}),
        ("5.13", {"dcp_size": 8, "speculative": True, "replayssm_spec": True}),
        ("13.4", {"dcp_size": 8, "speculative": True}),
        ("2.23", {"speculative": True}),
        ("5.77", {"tp_size": 1, "pp_size": 8, "disaggregation_mode": "prefill"}),
        ("0.75", {"tp_size": 32, "dp_size": 4, "mamba_radix_cache_strategy": "extra_buffer_lazy",
                  "kv_cache_dtype": "fp8_e4m3", "mamba_ssm_dtype": "bfloat16"}),
        ("5.97", {"tp_size": 32, "dp_size": 4, "mamba_radix_cache_strategy": "extra_buffer_lazy", "dcp_size": 8,
                  "kv_cache_dtype": "fp8_e4m3", "mamba_ssm_dtype": "bfloat16"}),
    ],
    ids=str,
)  # fmt: skip
def test_anchors_of_the_page(official, want, flags):
    assert ratio_terms(official, **{"tp_size": 8, **flags}).flag == want


def test_the_two_ratio_functions_take_the_same_arguments():
    first, second = inspect.signature(ratio_terms), inspect.signature(state_kv_ratio)
    assert first.parameters == second.parameters
    assert set(RATIOS[0]["inputs"]) <= set(first.parameters)
    plan = set(inspect.signature(plan_memory).parameters)
    assert set(PLANS[0]["inputs"]) - {"rest_gib"} <= plan


def test_the_ratio_is_the_cost_of_a_request_in_both_pools(official):
    terms = ratio_terms(official, tp_size=8, dcp_size=4, avg_request_length=5000, draft_cell_bytes=77, speculative=True)
    assert terms.draft_kv_bytes_per_token == 77
    states = (terms.S + terms.D) * terms.state_bytes
    assert terms.ratio == pytest.approx(states / (5000 * (27_648 / 4 + 77)))


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (0.9018, "0.9"), (0.746, "0.75"), (0.999, "1"), (0.994, "0.99"), (0.07751, "0.078"), (0.00001234, "0.000012"),
        (1, "1"), (1.005, "1"), (1.1, "1.1"), (2.2317, "2.23"), (3.296, "3.3"), (9.994, "9.99"), (9.999, "10"),
        (10, "10"), (13.35, "13.3"), (13.3502, "13.4"), (79.36, "79.4"), (100.04, "100"), (1234.56, "1234.6"),
    ],
)  # fmt: skip
def test_format_ratio(ratio, text):
    assert format_ratio(ratio) == text


@given(st.floats(1e-6, 1e6))
def test_a_formatted_ratio_is_near_and_short(ratio):
    text = format_ratio(ratio)
    assert float(text) == pytest.approx(ratio, rel=0.051)
    assert "e" not in text
    assert not text.endswith(".")
    assert "." not in text or not text.endswith("0")


@pytest.mark.parametrize("bad", [0, -1.5, math.nan, math.inf, True])
def test_a_ratio_that_is_none_is_refused(bad, official):
    with pytest.raises(ConfigError, match="ratio must be"):
        format_ratio(bad)
    with pytest.raises(ConfigError, match="avg_request_length must be"):
        state_kv_ratio(official, avg_request_length=bad)


@pytest.mark.parametrize(("kind", "missing"), [("kda", "MLA"), ("mla", "KDA")])
def test_a_model_with_one_kind_of_layer_has_no_ratio(kind, missing):
    with pytest.raises(ConfigError, match=f"without {missing} layers has no ratio"):
        state_kv_ratio(only(kind))


def test_a_ratio_at_which_both_pools_run_out_together(official):
    flags = {"tp_size": 8, "dcp_size": 8}
    ratio = state_kv_ratio(official, avg_request_length=4096, **flags)
    plan = plan_memory(official, rest_bytes=60 * GIB, mamba_full_memory_ratio=ratio, **flags)
    assert plan.max_num_reqs == pytest.approx(plan.logical_tokens / 4096, rel=0.02)


# ---- plans ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("example", PLANS, ids=lambda example: example["name"])
def test_checked_pool_plan(official, example):
    inputs = dict(example["inputs"])
    plan = plan_memory(official, rest_bytes=inputs.pop("rest_gib") * GIB, **inputs)
    want = example["outputs"]
    assert {name: getattr(plan, name) for name in want} == want
    assert plan.charged_bytes <= plan.rest_bytes


def test_a_plan_is_frozen_and_reads_as_a_table(official):
    plan = plan_memory(official, rest_bytes=60 * GIB, tp_size=8)
    with pytest.raises(FrozenInstanceError):
        plan.K = 1
    first, heading, *rows = str(plan).split("\n")
    assert first.startswith("60 GiB: states 28.41 GiB, tokens 31.59 GiB, unused")
    assert heading.split() == ["limit", "value", "reason", "note"]
    assert [row.split()[0] for row in rows] == [limit.name for limit in plan.limits]
    assert all(limit.reason in row for limit, row in zip(plan.limits, rows, strict=True))
    with pytest.raises(KeyError, match="there are mamba_radix_cache_strategy, "):
        plan.limit("speed")


def test_the_planner_needs_no_torch():
    code = "import sys; from k3lib.cache.sizing import plan_memory; print({'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"


LAYOUTS = st.sampled_from([(1, 1, 1), (8, 1, 1), (8, 1, 8), (8, 2, 4), (32, 4, 2)])
FLAGS = st.fixed_dictionaries(
    {
        "layout": LAYOUTS,
        "mamba_radix_cache_strategy": st.sampled_from(["auto", "no_buffer", "extra_buffer", "extra_buffer_lazy"]),
        "disable_radix_cache": st.booleans(),
        "speculative": st.booleans(),
        "replayssm_spec": st.booleans(),
        "role": st.sampled_from([None, "prefill", "decode"]),
        "kv_cache_dtype": st.sampled_from(["auto", "fp8_e4m3"]),
        "mamba_ssm_dtype": st.sampled_from(["float32", "bfloat16"]),
        "max_running_requests": st.none() | st.integers(1, 600),
        "max_mamba_cache_size": st.none() | st.integers(1, 3000),
        "max_total_tokens": st.none() | st.integers(1, 10_000_000),
        "page_size": st.none() | st.sampled_from([1, 3, 64, 128]),
        "context_length": st.none() | st.integers(1, 1 << 20),
        "draft_cell_bytes": st.none() | st.integers(0, 6000),
    }
)


def attempt(text, *, layout=(1, 1, 1), **flags):
    """The plan, or None if it was refused for want of room."""
    tp_size, dp_size, dcp_size = layout
    try:
        return plan_memory(text, tp_size=tp_size, dp_size=dp_size, dcp_size=dcp_size, **flags)
    except ConfigError as error:
        refusal = str(error)
    assert "bytes of states" in refusal
    assert "bytes of tokens" in refusal
    return None


@given(rest=st.integers(GIB // 64, 200 * GIB), ratio=st.none() | st.floats(1e-3, 1e3), flags=FLAGS)
def test_a_plan_charges_no_more_than_it_has_and_admits_no_request_without_slots(official, rest, ratio, flags):
    plan = attempt(official, rest_bytes=rest, mamba_full_memory_ratio=ratio, **flags)
    assume(plan is not None)
    assert 0 < plan.charged_bytes <= rest
    assert plan.state_pool_bytes == (plan.K + 1) * (plan.state_bytes + plan.extra_bytes_per_slot)
    assert 1 <= plan.max_num_reqs * plan.S <= plan.K
    assert plan.max_total_num_tokens_rows % plan.page_size == 0
    assert plan.num_pages * plan.page_size == plan.max_total_num_tokens_rows >= 2
    if flags["speculative"] and not flags["replayssm_spec"] and flags["role"] != "prefill":
        assert plan.reserved_intermediate_bytes >= plan.state_bytes * (plan.max_num_reqs + 1) * 8
    else:
        assert plan.reserved_intermediate_bytes == 0
    for name, given_value in flags.items():
        if name.startswith("max_") and given_value is not None:
            effective = plan.limit({"max_total_tokens": "max_total_num_tokens"}.get(name, name)).value
            per_worker = given_value if name == "max_total_tokens" else given_value / flags["layout"][1]
            if effective != per_worker:
                assert any(f"{name}={given_value}" in warning for warning in plan.warnings), (name, plan.warnings)


@given(
    rest=st.integers(GIB, 100 * GIB),
    ratios=st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)).map(sorted),
    flags=FLAGS,
)
def test_more_ratio_means_no_fewer_slots_and_no_more_tokens(official, rest, ratios, flags):
    less, more = (attempt(official, rest_bytes=rest, mamba_full_memory_ratio=ratio, **flags) for ratio in ratios)
    assume(less is not None)
    assume(more is not None)
    assert less.K <= more.K
    assert less.max_total_num_tokens_rows >= more.max_total_num_tokens_rows


@pytest.mark.parametrize("dcp_size", [1, 2, 4, 8])
def test_dcp_multiplies_the_tokens_of_the_same_rows(official, dcp_size):
    one = plan_memory(official, rest_bytes=20 * GIB, tp_size=8)
    plan = plan_memory(official, rest_bytes=20 * GIB, tp_size=8, dcp_size=dcp_size)
    assert plan.max_total_num_tokens_rows == one.max_total_num_tokens_rows
    assert plan.logical_tokens == dcp_size * one.logical_tokens
    assert plan.K == one.K


def test_a_draft_is_kept_by_every_rank_that_shares_tokens(official):
    flags = {"rest_bytes": 50 * GIB, "tp_size": 8, "speculative": True, "replayssm_spec": True}
    cells = [plan_memory(official, dcp_size=n, draft_cell_bytes=1000, **flags).cell_bytes for n in (1, 2, 8)]
    assert cells == [28_648, 29_648, 35_648]
    plan = plan_memory(official, **flags)
    assert plan.cell_bytes == 27_648 + 1_400
    assert plan.limit("draft_cell_bytes")[1:3] == (1400, "default")


@pytest.mark.parametrize(
    ("pp_size", "kda", "mla"), [(1, 69, 24), (2, 35, 13), (3, 24, 9), (4, 18, 7), (8, 9, 4), (93, 1, 1)]
)
def test_pipeline_stages_are_charged_as_the_largest(official, pp_size, kda, mla):
    base, longer = divmod(93, pp_size)
    lengths = [base] * (pp_size - longer) + [base + 1] * longer
    kinds, start = [], 0
    for length in lengths:
        kinds.append(official.layer_types[start : start + length])
        start += length
    assert (max(k.count("kda") for k in kinds), max(k.count("mla") for k in kinds)) == (kda, mla)
    plan = plan_memory(official, rest_bytes=60 * GIB, tp_size=8, pp_size=pp_size)
    assert plan.state_bytes * 69 == SLOT * kda
    assert plan.cell_bytes * 24 == 27_648 * mla
    assert plan.limit("slots_per_request").value == (5 if pp_size == 1 else 4)


def test_stages_by_hand_are_charged_as_they_are(official):
    flags = {"rest_bytes": 60 * GIB, "tp_size": 8, "pp_size": 3}
    even = plan_memory(official, **flags)
    assert plan_memory(official, **flags, pp_partition=(31, 31, 31)) == even
    plan = plan_memory(official, **flags, pp_partition=[20, 50, 23])
    assert (plan.state_bytes * 69, plan.cell_bytes * 24) == (SLOT * 38, 27_648 * 12)
    assert plan.K < even.K
    for partition, message in (
        ((50, 43), r"pp_partition=\(50, 43\) has 2 stages with 93 layers, expected pp_size=3 with 93"),
        ((31, 31, 30), r"has 3 stages with 92 layers, expected pp_size=3 with 93"),
        ((0, 50, 43), "pp_partition must be an integer >= 1, got 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            plan_memory(official, **flags, pp_partition=partition)


def test_a_model_without_kda_layers_is_limited_by_tokens_alone():
    plan = plan_memory(only("mla"), rest_bytes=MIB, context_length=100, page_size=16)
    assert (plan.case, plan.state_bytes, plan.state_pool_bytes) == ("no KDA layers", 0, 0)
    assert plan.S * plan.max_num_reqs == plan.K
    assert plan.max_num_reqs == plan.max_total_num_tokens_rows // 2
    assert "no KDA layers" in plan.limit("max_mamba_cache_size").note
    assert plan_memory(only("mla"), rest_bytes=MIB, max_running_requests=5).max_num_reqs == 5
    ignored = plan_memory(only("mla"), rest_bytes=MIB, mamba_full_memory_ratio=0.5)
    assert ignored.warnings == ("mamba_full_memory_ratio=0.5 is not used: no KDA layers",)


def test_a_model_without_mla_layers_is_limited_by_slots_alone():
    plan = plan_memory(only("kda"), rest_bytes=16 * MIB, context_length=100, page_size=16)
    assert plan.cell_bytes == plan.kv_pool_bytes == 0
    assert plan.rest_bytes - plan.charged_bytes < plan.state_bytes
    assert plan.max_num_reqs == plan.K // plan.S
    assert plan.max_total_num_tokens_rows == plan.max_num_reqs * 112  # a full context each, in whole pages
    assert "no MLA layers" in plan.limit("max_total_num_tokens").note
    half = plan_memory(only("kda"), rest_bytes=16 * MIB, mamba_full_memory_ratio=1)
    assert abs(half.K - plan.K / 2) <= 1


def test_pages_and_slots_of_a_plan_are_those_of_the_tensors():
    config = KimiK3Config.tiny()
    plan = plan_memory(config, rest_bytes=4 * MIB, page_size=16, dtype="bfloat16")
    sizes = CacheConfig(num_pages=plan.num_pages, num_slots=plan.K, page_size=plan.page_size)
    pool = HybridCache.allocate(config, sizes).pool
    assert pool.kda.state.nbytes + pool.kda.conv.nbytes == plan.state_pool_bytes
    assert pool.latent.pages.nbytes == plan.kv_pool_bytes + 16 * plan.cell_bytes  # the null page


def test_a_replay_ring_is_charged_to_every_slot_and_windows_to_running_requests(official):
    flags = {"rest_bytes": 60 * GIB, "tp_size": 8, "speculative": True, "max_running_requests": 10}
    ring = plan_memory(official, replayssm_spec=True, **flags)
    kept = plan_memory(official, **flags)
    assert (ring.extra_bytes_per_slot, ring.reserved_intermediate_bytes) == (20_401_920, 0)
    assert (kept.extra_bytes_per_slot, kept.reserved_intermediate_bytes) == (0, 11 * 8 * SLOT)
    prefill = plan_memory(official, role="prefill", **flags)
    assert prefill.reserved_intermediate_bytes == prefill.extra_bytes_per_slot == 0
    assert prefill.cell_bytes == 27_648 + 1_400


def test_activations_of_another_dtype_widen_window_and_kv(official):
    plan = plan_memory(official, rest_bytes=60 * GIB, dtype="float32")
    assert plan.state_bytes == state_bytes_per_slot(official, conv_itemsize=4)
    assert plan.cell_bytes == 2 * 27_648
    config = replace(KimiK3Config.tiny(), dtype="float32")
    assert plan_memory(config, rest_bytes=GIB).cell_bytes == 2 * plan_memory(config.text, rest_bytes=GIB).cell_bytes


# ---- reasons (case B5) ----------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [16, 31, 32, 64, None])
@pytest.mark.parametrize("role", [None, "prefill", "decode"])
@pytest.mark.parametrize("speculative", [False, True])
def test_b5_no_limit_changes_silently(official, cap, role, speculative):
    plan = plan_memory(
        official, rest_bytes=200 * GIB, tp_size=8, max_running_requests=cap, role=role, speculative=speculative
    )
    limits = {limit.name: limit for limit in plan.limits}
    assert len(limits) == len(plan.limits)
    assert {limit.reason for limit in plan.limits} <= {"given", "derived", "default"}
    assert limits["max_running_requests"].value == plan.max_num_reqs
    assert limits["max_mamba_cache_size"].value == plan.K
    assert limits["max_total_num_tokens"].value == plan.max_total_num_tokens_rows
    assert limits["pages"].value == plan.num_pages
    assert limits["slots_per_request"].value == plan.S
    assert limits["page_size"][1:3] == (64, "default")
    assert limits["context_length"][1:3] == (1 << 20, "default")
    running = limits["max_running_requests"]
    if cap is not None:
        assert (plan.max_num_reqs, running.reason, plan.warnings) == (cap, "given", ())
    elif speculative:
        assert (plan.max_num_reqs, running.reason) == (48, "default")
        assert plan.warnings == ("max_running_requests is not given and speculation is on: reset to 48",)
    else:
        assert (running.reason, plan.warnings) == ("derived", ())
        assert "estimate of 2048" in running.note


@pytest.mark.parametrize("role", [None, "prefill", "decode"])
def test_b5_a_larger_cap_never_shrinks_the_slots(official, role):
    caps = range(1, 101)
    plans = [plan_memory(official, rest_bytes=60 * GIB, tp_size=8, max_running_requests=n, role=role) for n in caps]
    assert [plan.max_num_reqs for plan in plans] == list(caps)
    for before, after in itertools.pairwise(plans):
        assert 0 <= after.K - before.K <= 1


def test_b5_a_clamped_cap_names_both_numbers(official):
    plan = plan_memory(official, rest_bytes=10 * GIB, tp_size=8, max_running_requests=64)
    assert plan.max_num_reqs == plan.K // 5 == 17
    running = plan.limit("max_running_requests")
    assert running.reason == "derived"
    for text in (running.note, *plan.warnings):
        assert "max_running_requests=64" in text
        assert f"limited to 17 by {plan.K} slots, 5 a request" in text


def test_b5_the_default_of_speculation_is_clamped_aloud(official):
    plan = plan_memory(official, rest_bytes=10 * GIB, tp_size=8, speculative=True, replayssm_spec=True)
    assert plan.max_num_reqs < 48
    assert plan.limit("max_running_requests").reason == "derived"
    assert any("default of 48, limited to" in warning for warning in plan.warnings)


@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        ({"max_running_requests": 30, "dp_size": 4}, "max_running_requests=30 over dp_size=4 workers is 7 each"),
        ({"max_running_requests": 2, "dp_size": 4}, "max_running_requests=2 over dp_size=4 workers is 1 each"),
        ({"max_mamba_cache_size": 90, "dp_size": 4}, "max_mamba_cache_size=90 over dp_size=4 workers is 22 each"),
        ({"max_total_tokens": 1000}, "max_total_tokens=1000 is rounded down to 960, a multiple of page_size=64"),
        ({"max_total_tokens": 10**9}, "max_total_tokens=1000000000 does not fit: limited to "),
        (
            {"max_mamba_cache_size": 90, "mamba_full_memory_ratio": 0.7},
            "mamba_full_memory_ratio=0.7 is not used: max_mamba_cache_size=90 sets the slots",
        ),
        (
            {"disable_radix_cache": True, "max_running_requests": 8, "mamba_full_memory_ratio": 0.7},
            "mamba_full_memory_ratio=0.7 is not used: the number of running requests sets the slots",
        ),
        ({"replayssm_spec": True}, "replayssm_spec=True has no effect: speculative=False"),
        ({"draft_cell_bytes": 9}, "draft_cell_bytes=9 is not charged: speculative=False"),
        ({"context_length": 1 << 21}, "context_length=2097152 exceeds the model's 1048576 positions"),
    ],
    ids=str,
)
def test_b5_an_explicit_value_is_not_overridden_silently(official, flags, warning):
    plan = plan_memory(official, **{"rest_bytes": 60 * GIB, "tp_size": 8, **flags})
    assert any(text.startswith(warning) for text in plan.warnings), plan.warnings


def test_b5_given_values_are_called_given(official):
    given_values = {
        "mamba_radix_cache_strategy": "extra_buffer_lazy", "mamba_full_memory_ratio": 2.0, "page_size": 128,
        "context_length": 4096, "verify_window": 4, "draft_cell_bytes": 2560, "max_running_requests": 12,
    }  # fmt: skip
    flags = {"rest_bytes": 60 * GIB, "tp_size": 8, "speculative": True, "max_total_tokens": 12800}
    plan = plan_memory(official, **flags, **given_values)
    assert plan.warnings == ()
    for name, value in given_values.items():
        assert plan.limit(name)[1:3] == (value, "given")
    assert plan.limit("max_total_num_tokens")[1:3] == (12800, "given")
    assert plan.limit("slots_per_request")[1:3] == (4, "derived")
    slots = plan_memory(official, rest_bytes=60 * GIB, max_mamba_cache_size=50).limit("max_mamba_cache_size")
    assert slots[1:3] == (50, "given")


# ---- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf, True, "8"], ids=str)
@pytest.mark.parametrize("name", ["rest_bytes", "mamba_full_memory_ratio"])
def test_a_number_that_is_none_is_refused_by_name(official, name, bad):
    with pytest.raises(ConfigError, match=f"{name} must be"):
        plan_memory(official, **{"rest_bytes": GIB, name: bad})


@pytest.mark.parametrize("bad", [0, -1, 1.5, math.nan, True], ids=str)
@pytest.mark.parametrize(
    "name",
    ["tp_size", "dp_size", "dcp_size", "pp_size", "verify_window", "replayssm_cache_len", "max_running_requests",
     "max_mamba_cache_size", "max_total_tokens", "page_size", "context_length"],
)  # fmt: skip
def test_a_count_that_is_none_is_refused_by_name(official, name, bad):
    with pytest.raises(ConfigError, match=f"{name} must be an integer >= "):
        plan_memory(official, rest_bytes=60 * GIB, **{name: bad})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tp_size": 7}, "does not divide the 96 KDA heads"),
        ({"tp_size": 64}, "tp_size=64 over dp_size=1 is 64 ranks"),
        ({"tp_size": 8, "dp_size": 3}, "dp_size=3 must divide tp_size=8"),
        ({"tp_size": 8, "dcp_size": 3}, "dcp_size=3 must divide the 8 ranks"),
        ({"tp_size": 8, "dp_size": 4, "dcp_size": 4}, "dcp_size=4 must divide the 2 ranks"),
        ({"pp_size": 94}, "pp_size=94 exceeds the 93 layers"),
        ({"pp_size": 2, "speculative": True}, "needs pp_size=1 except on a prefill server"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype='int4'; expected one of auto, float64"),
        ({"mamba_ssm_dtype": "fp8_e4m3"}, "mamba_ssm_dtype='fp8_e4m3'; expected one of float64"),
        ({"dtype": "fp8_e4m3"}, "dtype='fp8_e4m3'; expected one of"),
        ({"verify_window": 1, "speculative": True}, "verify_window must be an integer >= 2"),
        ({"replayssm_cache_len": 24, "speculative": True, "replayssm_spec": True}, "must be a power of two"),
        ({"replayssm_cache_len": 8, "speculative": True, "replayssm_spec": True}, "verify_window=8; use 16"),
        ({"draft_cell_bytes": -1, "speculative": True}, "draft_cell_bytes must be an integer >= 0"),
    ],
    ids=str,
)
def test_an_impossible_combination_is_refused_with_the_reason(official, flags, message):
    with pytest.raises(ConfigError, match=message):
        plan_memory(official, rest_bytes=60 * GIB, **flags)


def test_heads_that_are_not_there_need_not_be_divided():
    assert plan_memory(only("mla"), rest_bytes=MIB, tp_size=4).cell_bytes == 4 * 40 * 2
    text = only("kda")
    odd = replace(text, kda=replace(text.kda, num_heads=6))
    assert plan_memory(odd, rest_bytes=16 * MIB, tp_size=3).K > 0
    with pytest.raises(ConfigError, match="does not divide the 6 KDA heads"):
        plan_memory(odd, rest_bytes=MIB, tp_size=4)


@pytest.mark.parametrize(
    ("flags", "message", "advice"),
    [
        ({"rest_bytes": 100 * MIB}, "hold no slot beside the null slot", "Free more memory"),
        ({"rest_bytes": GIB, "mamba_full_memory_ratio": 0.01}, "hold no slot", "Change mamba_full_memory_ratio"),
        ({"rest_bytes": GIB, "mamba_full_memory_ratio": 0.3}, "limited to 0 by 3 slots, 5 a", "Change mamba_full_"),
        ({"rest_bytes": 10 * SLOT, "mamba_full_memory_ratio": 1e30}, "which leaves 0 for tokens", "Change mamba_"),
        ({"rest_bytes": 2 * GIB, "max_mamba_cache_size": 90}, "which leaves 0 for tokens", "Change max_mamba_"),
        ({"rest_bytes": GIB, "max_mamba_cache_size": 3, "dp_size": 4, "tp_size": 32}, "is no slot", "Change max_mamba"),
        ({"rest_bytes": GIB, "max_mamba_cache_size": 4}, "limited to 0 by 4 slots, 5 a", "Change max_mamba_cache_size"),
        ({"rest_bytes": GIB, "max_total_tokens": 63}, "max_total_tokens=63 fill no page", "or max_total_tokens"),
        ({"rest_bytes": GIB, "max_total_tokens": 1, "page_size": 1}, "by half of 1 token rows", "or max_total_tokens"),
        (
            {"rest_bytes": 2 * GIB, "disable_radix_cache": True, "max_running_requests": 99},
            "which leaves 0 for tokens",
            "max_running_requests",
        ),
    ],
    ids=str,
)
def test_a_plan_for_no_request_names_the_bytes_of_both_pools(official, flags, message, advice):
    with pytest.raises(ConfigError, match=message) as refused:
        plan_memory(official, **{"tp_size": 8, **flags})
    text = str(refused.value)
    assert advice in text
    assert "bytes of states" in text
    assert "bytes of tokens" in text
    assert f"rest_bytes={flags['rest_bytes']:,}" in text


def test_the_bytes_that_a_refusal_names_are_enough_for_one_request(official):
    """With that much, and the pools split so, one request is admitted; with one byte less none is."""
    for speculative in (False, True):
        states = 6 * SLOT + (2 * 8 * SLOT if speculative else 0)
        tokens = 64 * (27_648 + (1_400 if speculative else 0))
        flags = {"tp_size": 8, "max_mamba_cache_size": 5, "speculative": speculative, "max_running_requests": 1}
        with pytest.raises(ConfigError) as refused:
            plan_memory(official, rest_bytes=states + tokens - 1, **flags)
        assert f"needs {states:,} bytes of states" in str(refused.value)
        assert f"and {tokens:,} bytes of tokens" in str(refused.value)
        plan = plan_memory(official, rest_bytes=states + tokens, **flags)
        assert (plan.max_num_reqs, plan.max_total_num_tokens_rows) == (1, 64)
        assert plan.charged_bytes == states + tokens


# ---- memory of a device ---------------------------------------------------------------------------


def test_rest_is_what_weights_activations_and_images_leave():
    assert rest_from_memory(70 * GIB, 140 * GIB, 0.75) == 35 * GIB
    assert rest_from_memory(70 * GIB, 140 * GIB, 0.75, 100 * MIB) == 35 * GIB - 100 * MIB
    assert rest_from_memory(70 * GIB, 140 * GIB, 1) == 70 * GIB


@given(st.floats(0.0, 0.99), st.integers(1, 200), st.sampled_from([0, 100 * MIB]))
def test_the_named_fraction_is_the_smallest_that_leaves_something(share, gib, kept):
    total = gib * GIB
    available = int(total * share)
    try:
        rest_from_memory(available, total, 1e-9, kept)
    except ConfigError as error:
        text = str(error)
    least = 1 - (available - kept) / total
    if "no fraction leaves any" in text:
        assert least > 0.999
        return
    named = float(text.rsplit(" ", 1)[1])
    assert least <= named + 1e-9 < least + 0.001 + 1e-6
    assert rest_from_memory(available, total, min(1.0, named + 1e-4), kept) > 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((30, 100, 0.5), "give a fraction above 0.700"),
        ((30, 100, 0.7), "give a fraction above 0.700"),
        ((0, 100, 0.7), "no fraction leaves any"),
        ((30, 100, 1.2), "mem_fraction_static must be at most 1"),
        ((30, 100, 0), "mem_fraction_static must be > 0"),
        ((30, 100, math.nan), "mem_fraction_static must be a finite number"),
        ((-1, 100, 0.5), "available_bytes must be >= 0"),
        ((30, 0, 0.5), "total_before_bytes must be > 0"),
        ((30, 100, 0.8, -1), "mm_reserve_bytes must be >= 0"),
    ],
    ids=str,
)
def test_a_device_without_room_is_refused(args, message):
    with pytest.raises(ConfigError, match=message):
        rest_from_memory(*args)


def test_default_mem_fraction_by_memory_and_layout():
    # 512 + 1.5 · 8192 + 8/8 · 1024 + 2 · 512 MiB
    assert default_mem_fraction(80 * GIB, tp_size=8) == round(1 - (512 + 12_288 + 1_024 + 1_024) / (80 * 1024), 3)
    assert default_mem_fraction(80 * GIB, tp_size=1) == round(1 - (512 + 12_288 + 128 + 512) / (80 * 1024), 3)
    assert default_mem_fraction(192 * GIB, tp_size=8) == round(1 - (512 + 24_576 + 1_024 + 1_024) / (192 * 1024), 3)
    small = {"chunked_prefill_size": 1024, "decode_max_bs": 8}
    assert default_mem_fraction(80 * GIB, **small) == round(1 - 10 / 80, 3)  # the least reserve of a large device
    assert default_mem_fraction(40 * GIB, **small) == round(1 - (512 + 3_072 + 128 + 16) / (40 * 1024), 3)
    dp = {"tp_size": 8, "dp_size": 4}
    wide_graphs = 512 + 12_288 + 1_024 + 2 * 512 + 3 * 512 * 4 + 1.5 * 512 * 4
    assert default_mem_fraction(80 * GIB, **dp) == round(1 - wide_graphs / (80 * 1024), 3)
    narrow = 512 + 12_288 + 1_024 + 2 * 300 + 3 * 300 * 4
    assert default_mem_fraction(80 * GIB, decode_max_bs=300, **dp) == round(1 - narrow / (80 * 1024), 3)


def test_default_mem_fraction_by_role_and_extras():
    base = {"memory_bytes": 80 * GIB, "tp_size": 8}
    decode = 512 + 1.5 * 400 * 8 + 1_024 + 1_024
    got = default_mem_fraction(role="decode", max_running_requests=400, verify_window=8, **base)
    assert got == round(1 - max(decode, 10_240) / (80 * 1024), 3)
    prefill = 512 + 12_288 + 1_024
    assert default_mem_fraction(role="prefill", **base) == round(1 - prefill / (80 * 1024), 3)
    extras = prefill + 1_024 + 1_536 + 2_048
    assert default_mem_fraction(mla_prefill_graphs=True, deepep=True, **base) == round(1 - extras / (80 * 1024), 3)
    plain = default_mem_fraction(**base)
    assert default_mem_fraction(aiter_long_context=True, **base) == pytest.approx(0.85 * plain)
    vision = replace(KimiK3Config.tiny().vision, num_layers=27, hidden_size=1024)
    assert default_mem_fraction(vision=vision, **base) == pytest.approx(plain * 0.95 * (1 - 0.1 * 0.125))
    tiny = replace(vision, num_layers=1, hidden_size=64)
    assert default_mem_fraction(vision=tiny, **base) == pytest.approx(plain * 0.95 * 1.05)
    assert default_mem_fraction(vision=vision, role="decode", **base) == default_mem_fraction(role="decode", **base)
    with pytest.raises(ConfigError, match="give mem_fraction_static"):
        default_mem_fraction(2 * GIB, tp_size=8)
