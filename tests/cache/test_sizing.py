"""Bytes of the cache: by KDA and MLA layers, never by all layers."""

import json
import pathlib
from dataclasses import replace

import pytest
import torch

from k3lib import KimiK3Config
from k3lib.cache import CacheConfig, HybridCache, kv_bytes_per_token, state_bytes_per_slot

MIB = 1 << 20


@pytest.fixture(scope="module")
def official():
    """The geometry of K3: 69 KDA layers of 96 heads, 24 MLA layers of 576 values a token."""
    config = KimiK3Config.tiny(
        num_hidden_layers=93,
        hidden_size=7168,
        full_attn_layers=[*range(4, 93, 4), 93],
        kda_layers=[n for n in range(1, 93) if n % 4],
        num_heads=96,
        head_dim=128,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
    )
    assert (len(config.text.layers_of("kda")), len(config.text.layers_of("mla"))) == (69, 24)
    return config.text


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
