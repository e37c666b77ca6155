"""What a layout costs: the table of the docs, the parts of a model, and the command."""

import pathlib
import re

import pytest

from k3lib import KimiK3Config, KimiK3ForCausalLM, Mesh, ParallelConfig
from k3lib.cache.sizing import ratio_terms
from k3lib.errors import ConfigError
from k3lib.server.cli import Plan
from k3lib.server.layouts import explain_layout, layout_costs
from k3lib.testing import tiny_config

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "parallel.md"
ROW = re.compile(r"^\| ([^|]+) \| `(--[^`]+)` \| ([\d. |]+) \|$", re.MULTILINE)

# the geometry of the released model, without what costs nothing
K3 = KimiK3Config.tiny(
    num_hidden_layers=93, hidden_size=7168, full_attn_layers=[*range(4, 93, 4), 93],
    kda_layers=[n for n in range(1, 93) if n % 4], num_heads=96, num_attention_heads=96, num_key_value_heads=96,
    head_dim=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    intermediate_size=33792, moe_intermediate_size=3072, routed_expert_hidden_size=3584, num_experts=896,
    num_experts_per_token=16, vocab_size=163840, attn_res_block_size=12,
    quantization_config={"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
)  # fmt: skip


def parsed(flags):
    """The layout that flags of the command describe."""
    words, sizes = flags.split(), {}
    while words:
        name = words.pop(0).removeprefix("--").replace("-", "_")
        value = words.pop(0) if words and not words[0].startswith("--") else True
        sizes[name] = int(value) if isinstance(value, str) and value.isdigit() else value
    return ParallelConfig(**sizes)


@pytest.fixture(scope="module")
def rows():
    found = ROW.findall(PAGE.read_text(encoding="utf-8"))
    assert len(found) >= 10
    return found


@pytest.mark.parametrize("number", range(11))
def test_the_table_of_the_page_is_computed(rows, number):
    name, flags, cells = rows[number]
    costs = layout_costs(K3, parsed(flags))
    shown = [float(cell) for cell in cells.split("|")]
    exact = [
        costs.weight_bytes / 2**30, costs.state_bytes / 2**20, costs.kv_bytes / 2**10, costs.stream_bytes / 2**10,
        costs.decode_bytes / 2**20, costs.prefill_bytes / 2**20,
    ]  # fmt: skip
    for one, other, digits in zip(shown, exact, (1, 1, 2, 1, 2, 2), strict=True):
        assert one == pytest.approx(round(other, digits), abs=1e-9), name


@pytest.mark.parametrize("gpus", [16, 64])
def test_presets_for_many_gpus_are_layouts_of_the_model(gpus):
    """Eight ranks a replica, experts over all: the published ratio of pools, and weights that leave room for them."""
    layout = ParallelConfig(tp_size=gpus, dp_size=gpus // 8, ep_size=gpus, moe_exchange="all_to_all")
    layout.check(K3.text)
    dtypes = {"kv_cache_dtype": "fp8_e4m3", "mamba_ssm_dtype": "bfloat16"}
    terms = ratio_terms(K3, tp_size=gpus, dp_size=gpus // 8, mamba_radix_cache_strategy="extra_buffer_lazy", **dtypes)
    assert terms.flag == "0.75"
    costs = layout_costs(K3, layout, **dtypes)
    assert costs.state_bytes == terms.state_bytes
    assert costs.kv_bytes == terms.mla_kv_bytes_per_token
    assert costs.weight_bytes < 0.92 * 178 * 2**30


def test_parts_of_all_ranks_are_the_whole():
    config = tiny_config()
    whole = layout_costs(config, ParallelConfig()).weights
    parts = layout_costs(config, ParallelConfig(tp_size=4, ep_size=2)).weights
    for name in ("routed experts", "shared experts", "dense layers", "embedding and head"):
        assert parts[name] * 4 == whole[name], name
    for name in ("latent projections", "routers", "norms and residual scores"):
        assert parts[name] == whole[name], name
    model = KimiK3ForCausalLM(config, mesh=Mesh.view(ParallelConfig(tp_size=4, ep_size=2), 0), device="meta")
    assert sum(parts.values()) < sum(p.nbytes for p in model.parameters())  # built in fp32 there


def test_the_command_explains_a_layout(capsys):
    text = explain_layout(KimiK3Config.tiny(), ParallelConfig(tp_size=4, dcp_size=2, ep_size=2))
    for line in (
        "4 ranks: tp_size=4, dcp_size=2, ep_size=2",
        "8 whole experts a rank, width over 2",
        "tokens over 2",
        "x all-to-all over 2",
    ):
        assert line in text, line
    with pytest.raises(ConfigError, match="KDA heads"):
        explain_layout(KimiK3Config.tiny(), ParallelConfig(tp_size=3))
    assert Plan(explain_layout=True, tp_size=4, dcp_size=2, ep_size=2).run() == 0
    assert capsys.readouterr().out == text + "\n"
