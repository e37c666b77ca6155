"""What Kimi-K3 would run on each chip: a table over targets made by hand."""

import dataclasses

import pytest
import torch

from k3lib import KimiK3Config
from k3lib.ops import (
    AttentionSpec,
    AttnResSpec,
    ExpertsSpec,
    KDASpec,
    LinearSpec,
    MLASpec,
    NormSpec,
    Target,
    explain,
    ops,
)
from k3lib.ops.conv import ConvSpec
from k3lib.ops.kda import ReplaySpec
from k3lib.ops.moe import RouteSpec
from k3lib.server.reports import model_specs

K3 = KimiK3Config.tiny(
    num_heads=96, head_dim=128, num_attention_heads=96, num_key_value_heads=96, kv_lora_rank=512, qk_nope_head_dim=128,
    qk_rope_head_dim=64, v_head_dim=128, num_experts=896, num_experts_per_token=16, moe_intermediate_size=3072,
    routed_expert_hidden_size=3584, hidden_size=7168,
)  # fmt: skip
BF16 = torch.bfloat16
HOPPER = Target.of("cuda", "sm90", triton="3.6.0")
FULL_HOPPER = Target.of(
    "cuda", "sm90", triton="3.6.0", fla="0.6.0", flash_mla="1.0.0", humming="0.1.20", flash_kda="0.0.1"
)
BARE_HOPPER = Target.of("cuda", "sm90")
BLACKWELL = Target.of("cuda", "sm100", triton="3.6.0")
MI35X = Target.of("rocm", "gfx950", triton="3.6.0")
ASCEND = Target.of("npu", "a3")
CPU = Target.of("cpu")

PREFILL = KDASpec.from_config(K3, tp_size=8, mode="prefill")
DECODE = KDASpec.from_config(K3, tp_size=8, mode="decode")
VERIFY = KDASpec.from_config(K3, tp_size=8, mode="verify")
REPLAY = ReplaySpec(heads=12, key_dim=128, value_dim=128, dtype=BF16, state_dtype=torch.float32)
MXFP4 = ExpertsSpec.from_config(K3, tp_size=8, weights="mxfp4")
MLA = MLASpec(
    heads=12,
    latent_dim=512,
    rope_dim=64,
    value_dim=512,
    dtype=BF16,
    kv_dtype=BF16,
    page_size=64,
    tokens_per_request="1",
)
WIDE_MLA = dataclasses.replace(MLA, heads=96)
ATTENTION = AttentionSpec(heads=12, key_dim=192, value_dim=128, dtype=BF16, causal=True)
RESIDUAL = AttnResSpec(hidden=7168, num_blocks=4, dtype=BF16, adds=True, writes=False, norms=True)
CONV = ConvSpec(channels=4608, width=4, dtype=BF16, stateful=True, tokens_per_request="many")
ROUTE = RouteSpec(experts=896, top_k=16, num_groups=1, dtype=BF16)
PRODUCT = LinearSpec(dtype=BF16, weight_dtype=BF16, tokens="few")
MANY = dataclasses.replace(PRODUCT, tokens="many")
NORM = NormSpec(width=7168, dtype=BF16, weight_dtype=BF16)

# op, spec: on Hopper with Triton and with more, without it, Blackwell, MI35x, Ascend, CPU
TABLE = [
    ("kda_chunk", PREFILL, "triton", "triton", "reference", "triton", "triton", "reference", "reference"),
    ("kda_mixer", PREFILL, "composed", "composed", "composed", "composed", "composed", "composed", "composed"),
    ("kda_mixer", DECODE, "triton", "triton", "composed", "triton", "triton", "composed", "cpu"),
    ("kda_mixer", VERIFY, "triton", "triton", "composed", "triton", "triton", "composed", "composed"),
    ("kda_recurrent", VERIFY, "triton", "triton", "reference", "triton", "triton", "reference", "reference"),
    ("kda_replay", REPLAY, "triton", "triton", "reference", "triton", "triton", "reference", "reference"),
    ("kda_recurrent", DECODE, "triton", "triton", "reference", "triton", "triton", "reference", "reference"),
    ("short_conv", CONV, "triton", "triton", "reference", "triton", "triton", "reference", "reference"),
    ("mla_decode", MLA, "triton", "triton", "reference", "triton", "triton", "reference", "cpu"),
    ("mla_decode", WIDE_MLA, "triton", "flash_mla", "reference", "triton", "triton", "reference", "cpu"),
    ("attention_varlen", ATTENTION, "cudnn", "cudnn", "reference", "triton", "triton", "reference", "reference"),
    ("experts", MXFP4, "triton", "triton", "reference", "triton", "triton", "reference", "cpu"),
    ("attn_res", RESIDUAL, "triton", "triton", "reference", "triton", "triton", "reference", "cpu"),
    ("route", ROUTE, "triton", "triton", "reference", "triton", "triton", "reference", "cpu"),
    ("linear", PRODUCT, "triton", "triton", "torch", "torch", "torch", "torch", "reference"),
    ("linear", MANY, "torch", "torch", "torch", "torch", "torch", "torch", "reference"),
    ("rms_norm", NORM, "triton", "triton", "reference", "triton", "triton", "reference", "cpu"),
]
TARGETS = [HOPPER, FULL_HOPPER, BARE_HOPPER, BLACKWELL, MI35X, ASCEND, CPU]


def choice(op, spec, target):
    return explain(ops()[op], spec, target=target)


def title(row):
    return "-".join(
        [row[0], getattr(row[1], "tokens_per_request", getattr(row[1], "tokens", "")), getattr(row[1], "verify", "")]
    )


@pytest.mark.parametrize("row", TABLE, ids=title)
def test_choices(row):
    op, spec, *wanted = row
    assert [choice(op, spec, target).chosen.name for target in TARGETS] == wanted


@pytest.mark.parametrize(
    ("op", "spec", "wanted"),
    [
        ("kda_chunk", PREFILL, "triton_unsplit"),
        ("mla_decode", MLA, "triton_fixed"),
        ("attn_res", RESIDUAL, "triton_invariant"),
        ("kda_mixer", DECODE, "triton"),
        ("attention_varlen", ATTENTION, "triton"),
        ("rms_norm", NORM, "triton"),
        ("linear", PRODUCT, "torch"),
    ],
)
def test_deterministic_choices_on_hopper(op, spec, wanted):
    assert choice(op, dataclasses.replace(spec, deterministic=True), HOPPER).chosen.name == wanted


@pytest.mark.parametrize("target", [BLACKWELL, MI35X])
def test_kernels_are_proven_on_hopper_alone(target):
    decision = choice("kda_chunk", PREFILL, target)
    assert decision.chosen.is_experimental(target)
    assert "experimental" in str(decision)
    assert not choice("kda_chunk", PREFILL, HOPPER).chosen.is_experimental(HOPPER)


def test_fla_declines_what_it_has_not():
    reasons = dict(choice("kda_chunk", dataclasses.replace(PREFILL, saves="any"), FULL_HOPPER).rejected)
    assert reasons["fla"] == "needs saves=none, got any: its states are those of chunks"
    odd = dataclasses.replace(PREFILL, key_dim=64)
    assert "needs key_dim and value_dim 128" in dict(choice("kda_chunk", odd, FULL_HOPPER).rejected)["fla"]


PEERS = [
    ("mla_decode", "flash_mla", WIDE_MLA, {"heads": 256}, "needs at most 128 heads, got 256"),
    ("mla_decode", "flash_mla", WIDE_MLA, {"heads": 12}, "needs at least 48 heads to be the faster one, got 12"),
    ("mla_decode", "flash_mla", WIDE_MLA, {"page_size": 128}, "got 512, 64 and 128"),
    ("mla_decode", "flash_mla", WIDE_MLA, {"tokens_per_request": "<=8"}, "needs one token a request, got <=8"),
    ("mla_decode", "flash_mla", WIDE_MLA, {"kv_dtype": torch.float8_e4m3fn}, "needs bfloat16 queries and pages"),
    ("experts", "humming", MXFP4, {"weights": "nvfp4"}, "needs weights=mxfp4, got nvfp4"),
    ("experts", "humming", MXFP4, {"offloaded": True}, "needs all experts resident"),
    ("experts", "humming", MXFP4, {"activations": torch.float32}, "needs bfloat16, got torch.float32"),
    ("kda_chunk", "flash_kda", PREFILL, {"saves": "chunk"}, "needs saves=none, got saves=chunk"),
    ("kda_chunk", "flash_kda", PREFILL, {"bounded_gate": False}, "needs a gate with a lower bound, got none"),
    ("kda_chunk", "flash_kda", PREFILL, {"key_dim": 64}, "needs key_dim and value_dim 128, got 64 and 128"),
]


@pytest.mark.parametrize(("op", "name", "spec", "change", "reason"), PEERS)
def test_packages_decline_what_they_have_not(op, name, spec, change, reason):
    assert name in [impl.name for impl in choice(op, spec, FULL_HOPPER).able]
    assert reason in dict(choice(op, dataclasses.replace(spec, **change), FULL_HOPPER).rejected)[name]
    assert f"needs the package {name}" in dict(choice(op, spec, HOPPER).rejected)[name]
    assert name in dict(choice(op, spec, BLACKWELL).rejected)


def test_every_call_of_the_model_has_a_kernel_on_hopper():
    for title, spec in model_specs(K3, tp_size=8):
        op = title.split("/")[0]
        chosen = choice(op, spec, HOPPER).chosen
        assert chosen.name != "reference", title
