"""Reading config.json: published configurations, exact derived values, and everything that is refused."""

import copy
import json
import logging
import pathlib
import re
import subprocess
import sys

import pytest

from k3lib.config import KDAConfig, KimiK3Config, LatentMoEConfig, MLAConfig, SiTU
from k3lib.draft_config import DraftConfig
from k3lib.errors import ConfigError

SPEC = pathlib.Path(__file__).resolve().parents[2] / "shared" / "spec" / "configs"
MODELS = ["kimi_k3", "kimi_k3_0.40b", "kimi_k3_0.40b_mxfp4", "kimi_k3_0.18b"]


def published(name):
    file = SPEC / f"{name}.json"
    if not file.is_file():
        pytest.skip(f"needs the published configurations: {file} does not exist")
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def k3():
    return KimiK3Config.from_hf(published("kimi_k3"))


@pytest.fixture
def hf():
    """A good configuration that a test may spoil."""
    return KimiK3Config.tiny().to_hf()


def refused(hf, *parts):
    """Reading `hf` raises a ConfigError whose message has all `parts`: the key, the found and the expected value."""
    with pytest.raises(ConfigError) as caught:
        KimiK3Config.from_hf(hf)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("name", MODELS)
def test_published_configurations_are_read(name):
    config = KimiK3Config.from_hf(published(name))
    assert len(config.text.layer_types) == published(name)["text_config"]["num_hidden_layers"]


def test_schedule_of_k3(k3):
    text = k3.text
    assert text.num_layers == 93
    assert text.layers_of("mla") == (*range(3, 92, 4), 92)
    assert len(text.layers_of("kda")) == 69
    assert text.dense_layers == {0}
    assert [layer for layer in range(93) if layer % text.attn_res.layers_per_block == 0] == [*range(0, 85, 12)]


@pytest.mark.parametrize(
    ("layer", "blocks"),
    [(0, 0), (1, 1), (12, 1), (13, 2), (24, 2), (31, 3), (62, 6), (73, 7), (84, 7), (85, 8), (93, 8)],
)
def test_bank_rows_in_front_of_a_layer_of_k3(k3, layer, blocks):
    assert k3.text.attn_res.num_blocks_before(layer) == blocks


def test_derived_sizes_of_k3(k3):
    text, kda, mla, moe = k3.text, k3.text.kda, k3.text.mla, k3.text.moe
    assert (text.hidden_size, text.vocab_size, text.intermediate_size) == (7168, 163840, 33792)
    assert kda.num_heads * kda.key_dim == kda.num_heads * kda.value_dim == 12288
    assert kda.conv_channels == 36864
    assert kda.scale == 128**-0.5
    assert kda.gate_rank == 128
    assert mla.qk_head_dim == 192
    assert mla.scale == 192**-0.5
    assert mla.latent_width == 576
    assert mla.num_heads * mla.qk_head_dim == 18432
    assert mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim) == 24576
    assert moe.shared_size == 6144
    assert moe.expert_width == 3584
    assert (moe.num_experts, moe.top_k, moe.renormalize, moe.routed_scale, moe.latent_norm) == (
        896,
        16,
        True,
        1.0,
        True,
    )


def test_constants_of_k3(k3):
    assert (k3.bos_token_id, k3.eos_token_id, k3.pad_token_id) == (163584, 163586, 163839)
    assert k3.media_placeholder_token_id == 163605
    assert k3.text.act == k3.text.moe.act == SiTU(beta=4.0, linear_beta=25.0)
    assert k3.text.kda.gate_lower_bound == -5.0
    assert k3.text.kda.full_rank_gate
    assert k3.text.mla.output_gate
    assert k3.text.norm_eps == k3.text.kda.norm_eps == k3.text.moe.norm_eps == k3.text.attn_res.norm_eps == 1e-5
    assert k3.text.mla.latent_norm_eps == 1e-6
    assert k3.text.max_position_embeddings == 1048576
    assert k3.quantization.expert_format == "mxfp4"
    assert k3.dtype == "bfloat16"


def test_vision_of_k3(k3):
    vision = k3.vision
    assert (vision.num_layers, vision.hidden_size, vision.qkv_hidden_size, vision.num_heads) == (27, 1024, 1536, 12)
    assert (vision.patch_size, vision.merge_kernel_size, vision.text_hidden_size) == (14, (2, 2), 7168)


def test_miniatures_have_no_gate_bound():
    assert KimiK3Config.from_hf(published("kimi_k3_0.40b")).text.kda.gate_lower_bound is None


def test_the_ancestor_is_refused_for_its_activation():
    refused(published("kimi_linear_48b"), "hidden_act", "'silu'", "'situ'")


def test_a_quantization_manifest_is_no_model():
    refused(published("kimi_k3_nvfp4_quant"), "missing")


def test_the_nvfp4_manifest_is_read_inside_a_model(hf):
    hf["quantization_config"] = published("kimi_k3_nvfp4_quant")
    assert KimiK3Config.from_hf(hf).quantization.expert_format == "nvfp4"


# ---- drafts


def test_inferact_draft():
    draft = DraftConfig.from_hf(published("dspark_inferact_k3"))
    assert (draft.family, draft.feature_kind, draft.feature_layers) == ("inferact", "prefix", (2, 23, 47, 71, 89))
    assert (draft.num_layers, draft.num_heads, draft.head_dim, draft.block_size) == (5, 64, 192, 7)
    assert (draft.mask_token_id, draft.markov_rank, draft.has_confidence_head) == (163837, 256, True)
    assert draft.rope.factor == 32
    assert not draft.mla.output_gate


def test_radixark_draft():
    draft = DraftConfig.from_hf(published("dspark_radixark_k3"))
    assert (draft.family, draft.feature_kind, draft.feature_layers) == ("radixark", "mixture", (7, 23, 51, 67, 83))
    assert (draft.num_heads, draft.num_kv_heads, draft.head_dim, draft.block_size) == (64, 16, 64, 7)
    assert (draft.mask_token_id, draft.mla) == (163824, None)
    assert draft.rope.factor == 16


@pytest.mark.parametrize("name", ["dspark_inferact_k3", "dspark_radixark_k3"])
def test_a_draft_is_no_model(name):
    refused(published(name), "draft", "DraftConfig")


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_no_draft(name):
    with pytest.raises(ConfigError, match="architectures='KimiK3ForConditionalGeneration'"):
        DraftConfig.from_hf(published(name))


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"markov_head_type": "deep"}, ["markov_head_type", "'deep'", "vanilla"]),
        ({"target_layer_ids": [2, 93]}, ["target_layer_ids", "[2, 93]", "93 layers"]),
        ({"architectures": ["Eagle3Model"]}, ["Eagle3Model", "K3DSparkModel", "DSparkDraftModel"]),
        ({"mask_token_id": None}, ["mask_token_id", "missing"]),
    ],
    ids=lambda x: next(iter(x)),
)
def test_other_drafts_are_refused(change, parts):
    with pytest.raises(ConfigError) as caught:
        DraftConfig.from_hf(published("dspark_inferact_k3") | change)
    assert all(part in str(caught.value) for part in parts)


# ---- the miniature


def test_tiny_is_the_golden_miniature(golden):
    assert KimiK3Config.tiny() == KimiK3Config.from_hf(json.loads((golden / "tiny_k3_dev" / "config.json").read_text()))


def test_tiny_takes_changes_by_their_key():
    config = KimiK3Config.tiny(q_lora_rank=None, gate_lower_bound=None, vocab_size=600, vt_num_hidden_layers=1)
    assert config.text.mla.q_lora_rank is None
    assert config.text.kda.gate_lower_bound is None
    assert config.text.vocab_size == 600
    assert config.vision.num_layers == 1


def test_tiny_changes_leave_the_next_tiny_alone():
    KimiK3Config.tiny(num_heads=2, gate_lower_bound=None)
    assert KimiK3Config.tiny().text.kda.gate_lower_bound == -5.0


def test_tiny_refuses_an_unknown_key():
    with pytest.raises(ConfigError, match="'gate_lower_bond'"):
        KimiK3Config.tiny(gate_lower_bond=-5.0)


def test_to_hf_gives_back_what_was_read(hf):
    config = KimiK3Config.from_hf(hf)
    assert config.to_hf() == hf
    config.to_hf()["text_config"]["vocab_size"] = 1
    assert config.to_hf() == hf


def test_reading_does_not_change_its_input(hf):
    before = copy.deepcopy(hf)
    KimiK3Config.from_hf(hf)
    assert hf == before


def test_flat_text_configuration(hf):
    flat = KimiK3Config.from_hf(hf["text_config"])
    assert flat.text == KimiK3Config.from_hf(hf).text
    assert flat.vision is None


def test_flat_errors_do_not_speak_of_text_config(hf):
    hf["text_config"]["hidden_act"] = "silu"
    refused(hf["text_config"], "config: hidden_act")


def test_documentation_keys_are_ignored(hf):
    hf["_provenance"] = {"attn": "somewhere"}
    hf["text_config"]["_provenance"] = "somewhere"
    hf["text_config"]["linear_attn_config"]["_note"] = "somewhere"
    assert KimiK3Config.from_hf(hf) == KimiK3Config.tiny()


# ---- defaults

ABSENT = {
    "routed_scaling_factor": lambda t: t.moe.routed_scale == 1.0,
    "num_expert_group": lambda t: t.moe.num_groups == 1,
    "topk_group": lambda t: t.moe.top_groups == 1,
    "topk_method": lambda t: t.moe.top_k == 4,
    "moe_layer_freq": lambda t: t.dense_layers == {0},
    "latent_moe_use_norm": lambda t: not t.moe.latent_norm,
    "mla_use_output_gate": lambda t: not t.mla.output_gate,
    "rms_norm_eps": lambda t: t.norm_eps == t.kda.norm_eps == t.moe.norm_eps == t.attn_res.norm_eps == 1e-6,
    "num_key_value_heads": lambda t: t.mla.num_heads == 4,
    "activation_situ_beta": lambda t: t.act.beta == 1.0,
    "activation_situ_linear_beta": lambda t: t.act.linear_beta is None,
    "attn_res_block_size": lambda t: t.attn_res is None,
    "q_lora_rank": lambda t: t.mla.q_lora_rank is None,
    "tie_word_embeddings": lambda t: t.num_layers == 9,
    "first_k_dense_replace": lambda t: t.dense_layers == frozenset(),
}


@pytest.mark.parametrize("key", ABSENT)
@pytest.mark.parametrize("how", ["absent", "null"])
def test_default_of_an_absent_key(hf, key, how):
    if how == "absent":
        del hf["text_config"][key]
    else:
        hf["text_config"][key] = None
    assert ABSENT[key](KimiK3Config.from_hf(hf).text)


@pytest.mark.parametrize(
    ("key", "holds"),
    [
        ("use_full_rank_gate", lambda kda: not kda.full_rank_gate),
        ("gate_lower_bound", lambda kda: kda.gate_lower_bound is None),
        ("short_conv_kernel_size", lambda kda: kda.conv_width == 4),
    ],
)
def test_default_of_an_absent_linear_attention_key(hf, key, holds):
    del hf["text_config"]["linear_attn_config"][key]
    assert holds(KimiK3Config.from_hf(hf).text.kda)


def test_absent_latent_width_is_a_plain_mixture(hf):
    del hf["text_config"]["routed_expert_hidden_size"], hf["text_config"]["latent_moe_use_norm"]
    moe = KimiK3Config.from_hf(hf).text.moe
    assert (moe.latent_size, moe.expert_width) == (None, 96)


def test_a_model_without_experts_is_dense(hf):
    text = hf["text_config"]
    hf["text_config"] = {k: v for k, v in text.items() if not re.search("moe|expert|topk|routed", k)}
    text = KimiK3Config.from_hf(hf).text
    assert text.moe is None
    assert text.dense_layers == frozenset(range(9))


def test_zero_situ_beta_means_one(hf):
    hf["text_config"]["activation_situ_beta"] = 0
    assert KimiK3Config.from_hf(hf).text.act.beta == 1.0


def test_the_outer_padding_id_wins(hf):
    hf["text_config"]["pad_token_id"] = 0
    assert KimiK3Config.from_hf(hf).pad_token_id == 511


def test_ungrouped_routing_ignores_the_group_counts(hf):
    hf["text_config"] |= {"use_grouped_topk": False, "num_expert_group": 4, "topk_group": 2}
    moe = KimiK3Config.from_hf(hf).text.moe
    assert (moe.num_groups, moe.top_groups) == (1, 1)


def test_layers_beyond_the_depth_are_skipped(hf):
    hf["text_config"]["num_hidden_layers"] = 5
    assert KimiK3Config.from_hf(hf).text.layer_types == ("kda", "kda", "kda", "mla", "kda")


# ---- refusals


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("hidden_act", "silu", "'situ'"),
        ("moe_router_activation_func", "softmax", "'sigmoid'"),
        ("topk_method", "greedy", "'noaux_tc'"),
        ("moe_layer_freq", 2, "1"),
        ("tie_word_embeddings", True, "False"),
        ("mla_use_nope", False, "True"),
        ("num_key_value_heads", 2, "num_attention_heads=4"),
        ("num_experts_per_token", 17, "num_experts=16"),
        ("num_expert_group", 3, "num_experts=16"),
        ("topk_group", 2, "num_groups=1"),
        ("attention_bias", True, "False"),
        ("activation_situ_beta", -4.0, "> 0"),
        ("activation_situ_linear_beta", -1.0, "> 0"),
        ("attn_res_block_size", 0, ">= 1"),
        ("hidden_size", 0, ">= 1"),
        ("vocab_size", -5, ">= 1"),
        ("num_shared_experts", -1, ">= 0"),
        ("kv_lora_rank", 0, ">= 1"),
        ("q_lora_rank", 0, ">= 1"),
        ("v_head_dim", 0, ">= 1"),
        ("num_attention_heads", 0, ">= 1"),
        ("moe_intermediate_size", 0, ">= 1"),
        ("intermediate_size", 1.5, ">= 1"),
        ("num_hidden_layers", "9", "an integer"),
        ("num_experts", True, "an integer"),
        ("rms_norm_eps", "1e-5", "a number"),
        ("moe_renormalize", "false", "true or false"),
        ("mla_use_output_gate", 1, "true or false"),
        ("max_position_embeddings", "4096", ">= 1"),
    ],
)
def test_value_that_is_not_implemented(hf, key, value, expected):
    hf["text_config"][key] = value
    if key == "num_attention_heads":
        hf["text_config"]["num_key_value_heads"] = value
    names = {"num_experts_per_token": "top_k", "num_expert_group": "num_groups", "topk_group": "top_groups"}
    names |= {"activation_situ_beta": "beta", "activation_situ_linear_beta": "linear_beta"}
    names |= {"attn_res_block_size": "layers_per_block", "num_attention_heads": "num_heads"}
    names |= {"moe_intermediate_size": "intermediate_size"}
    refused(hf, names.get(key, key), repr(value), expected)


@pytest.mark.parametrize("key", ["tie_word_embeddings"])
def test_outer_value_that_is_not_implemented(hf, key):
    hf[key] = True
    refused(hf, key, "True", "False")


def test_widely_copied_head_sizes_are_refused(hf):
    hf["text_config"] |= {"qk_nope_head_dim": 192, "qk_rope_head_dim": 0, "v_head_dim": 64}
    refused(hf, "qk_nope_head_dim=192", "qk_rope_head_dim", "got 0", "v_head_dim=64", "128/64/128")


def test_rotation_must_be_switched_off_in_words(hf):
    del hf["text_config"]["mla_use_nope"]
    refused(hf, "mla_use_nope=None", "True")


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act",
        "linear_attn_config", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        "moe_intermediate_size", "num_experts_per_token", "moe_renormalize", "max_position_embeddings",
    ],
)  # fmt: skip
def test_missing_key(hf, key):
    del hf["text_config"][key]
    refused(hf, key)


@pytest.mark.parametrize("key", ["kda_layers", "full_attn_layers", "head_dim", "num_heads"])
def test_missing_linear_attention_key(hf, key):
    del hf["text_config"]["linear_attn_config"][key]
    refused(hf, key, "linear_attn_config", "missing")


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id"])
def test_missing_token_id(hf, key):
    del hf[key], hf["text_config"][key]
    refused(hf, key, "missing")


def test_layer_in_both_lists(hf):
    hf["text_config"]["linear_attn_config"]["kda_layers"].append(4)
    refused(hf, "[4]", "kda_layers", "full_attn_layers")


def test_layer_in_neither_list(hf):
    hf["text_config"]["linear_attn_config"]["kda_layers"].remove(2)
    refused(hf, "[2]", "neither", "kda_layers", "full_attn_layers", "num_hidden_layers=9")


def test_lists_that_count_from_zero(hf):
    linear = hf["text_config"]["linear_attn_config"]
    for key in ("kda_layers", "full_attn_layers"):
        linear[key] = [n - 1 for n in linear[key]]
    refused(hf, "[9]", "counted from 1")


@pytest.mark.parametrize("number", [0, -1])
def test_layer_number_below_one(hf, number):
    hf["text_config"]["linear_attn_config"]["kda_layers"].append(number)
    refused(hf, "count from 1", f"[{number}]")


@pytest.mark.parametrize("key", ["gate_upper_bound", "note"])
def test_unknown_linear_attention_key(hf, key):
    hf["text_config"]["linear_attn_config"][key] = 3.0
    refused(hf, f"{key}=3.0", "linear_attn_config", "known keys")


@pytest.mark.parametrize("bound", [0.0, 5.0])
def test_gate_bound_must_be_negative(hf, bound):
    hf["text_config"]["linear_attn_config"]["gate_lower_bound"] = bound
    refused(hf, "gate_lower_bound", "negative", str(bound))


@pytest.mark.parametrize("size", [0, 1])
def test_convolution_needs_two_taps(hf, size):
    hf["text_config"]["linear_attn_config"]["short_conv_kernel_size"] = size
    refused(hf, "conv_width", ">= 2", f"got {size}")


@pytest.mark.parametrize(
    "key",
    [
        "attn_logit_softcapping", "kda_foo", "final_logit_softcapping", "sliding_window", "mup_multiplier", "qk_norm",
        "moe_shared_gate", "residual_scale", "embedding_multiplier",
    ],
)  # fmt: skip
def test_unknown_key_that_may_change_the_maths(hf, key):
    hf["text_config"][key] = 30.0
    refused(hf, f"{key}=30.0", "text_config", "known keys")


def test_unknown_outer_key_that_may_change_the_maths(hf):
    hf["logit_scale"] = 2.0
    refused(hf, "logit_scale=2.0")


@pytest.mark.parametrize("value", [None, False])
def test_unknown_key_that_is_switched_off_is_harmless(hf, value):
    hf["text_config"]["attn_logit_softcapping"] = value
    assert KimiK3Config.from_hf(hf) == KimiK3Config.tiny()


def test_harmless_unknown_key_is_logged(hf, caplog):
    hf["text_config"]["favourite_colour"] = "blue"
    with caplog.at_level(logging.DEBUG, "k3lib.config"):
        assert KimiK3Config.from_hf(hf) == KimiK3Config.tiny()
    assert any(re.search(r"text_config.*favourite_colour", message) for message in caplog.messages)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"group_size": 64}, ["group_size=64", "32"]),
        ({"num_bits": 8}, ["num_bits=8", "4"]),
        ({"type": "int"}, ["type='int'", "'float'"]),
    ],
    ids=lambda x: next(iter(x)),
)
def test_other_mxfp4_manifest(change, parts):
    hf = published("kimi_k3")
    hf["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"] |= change
    refused(hf, "quantization_config", *parts)


@pytest.mark.parametrize(
    ("manifest", "parts"),
    [
        ({"quant_method": "gptq"}, ["quant_method='gptq'", "'compressed-tensors'", "'modelopt'"]),
        ({"group_size": 16}, ["quant_method=None", "'compressed-tensors'"]),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, ["quant_algo='FP8'", "'NVFP4'"]),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, ["group_size=32", "16"]),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"format": "int-quantized"}}},
            ["group_0", "format='int-quantized'", "'mxfp4-pack-quantized'"],
        ),
    ],
    ids=lambda x: "-".join(map(str, x.values()))[:30] if isinstance(x, dict) else "",
)
def test_other_quantization_is_refused(hf, manifest, parts):
    hf["text_config"]["quantization_config"] = manifest
    refused(hf, "quantization_config", *parts)


@pytest.mark.parametrize("place", ["top", "text_config"])
def test_manifest_is_found_in_both_places(hf, place):
    manifest = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    (hf if place == "top" else hf["text_config"])["quantization_config"] = manifest
    assert KimiK3Config.from_hf(hf).quantization.expert_format == "nvfp4"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("merge_type", "sd2", "'sd2_tpool'"),
        ("activation_func", "gelu", "'gelu_pytorch_tanh'"),
        ("pos_emb_interpolation_mode", "bicubic", "'bilinear'"),
        ("mm_hidden_size", 64, "vt_hidden_size=32"),
        ("vt_num_attention_heads", 5, "qkv_hidden_size=48"),
    ],
)
def test_other_vision_tower_is_refused(hf, key, value, expected):
    hf["vision_config"][key] = value
    refused(hf, key.removeprefix("vt_").replace("attention_", ""), repr(value), expected)


@pytest.mark.parametrize(
    ("groups", "parts"),
    [
        ({"num_groups": 3}, ["num_groups=3", "num_experts=16"]),
        ({"num_groups": 4, "top_groups": 5}, ["top_groups=5", "num_groups=4"]),
        ({"num_groups": 8, "top_groups": 1}, ["top_k=4", "2 experts"]),
        ({"num_groups": 16, "top_groups": 8}, ["num_groups=16", "two experts"]),
        ({"top_k": 17}, ["top_k=17", "num_experts=16"]),
        ({"latent_size": None}, ["latent_norm", "latent_size"]),
    ],
    ids=str,
)
def test_mixture_that_cannot_route(groups, parts):
    good = {
        "hidden_size": 48, "latent_size": 32, "intermediate_size": 32, "num_experts": 16, "top_k": 4,
        "num_shared_experts": 2, "renormalize": True, "latent_norm": True, "act": SiTU(beta=4.0, linear_beta=25.0),
    }  # fmt: skip
    LatentMoEConfig(**good)
    with pytest.raises(ConfigError) as caught:
        LatentMoEConfig(**(good | groups))
    assert all(part in str(caught.value) for part in parts)


def test_layer_configurations_are_usable_alone():
    kda = KDAConfig(hidden_size=40, num_heads=3, key_dim=32, value_dim=48, gate_lower_bound=None)
    assert (kda.gate_rank, kda.conv_channels) == (32, 3 * (32 + 32 + 48))
    mla = MLAConfig(
        hidden_size=40,
        num_heads=3,
        q_lora_rank=None,
        kv_lora_rank=8,
        qk_nope_head_dim=5,
        qk_rope_head_dim=3,
        v_head_dim=4,
    )
    assert (mla.latent_width, mla.scale) == (11, 8**-0.5)


def wrong_types(hf):
    """Every key of the text configuration with a value of a wrong JSON type."""
    for part in ("text_config", "linear_attn_config"):
        values = hf["text_config"] if part == "text_config" else hf["text_config"]["linear_attn_config"]
        for key, value in values.items():
            if key not in {"model_type", "use_cache"}:
                for wrong in ("seven", [], {}, 7.5):
                    if type(wrong) is not type(value):
                        yield part, key, wrong


def test_wrong_json_types_are_configuration_errors_or_harmless(hf):
    escaped = []
    for part, key, wrong in wrong_types(hf):
        spoilt = copy.deepcopy(hf)
        (spoilt["text_config"] if part == "text_config" else spoilt["text_config"]["linear_attn_config"])[key] = wrong
        try:
            KimiK3Config.from_hf(spoilt)
        except ConfigError:
            pass
        except Exception as error:
            escaped.append(f"{part}.{key}={wrong!r}: {type(error).__name__}: {error}")
    assert not escaped, "\n".join(escaped)


def test_reading_a_configuration_needs_no_torch():
    code = "import sys, k3lib.config; k3lib.config.KimiK3Config.tiny(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
