"""Sizes of the published models, built without memory: parameters, stored names, dtypes, shapes and bytes."""

import json
import math
import pathlib
from collections import Counter

import pytest
import torch

from k3lib import KimiK3Config, KimiK3ForCausalLM
from k3lib.export import stored_layout, vision_layout

SPEC = pathlib.Path(__file__).resolve().parents[2] / "shared" / "spec"
BYTES = {"BF16": 2, "F32": 4, "U8": 1}


def read(name):
    file = SPEC / name
    if not file.is_file():
        pytest.skip(f"needs the published sizes: {file} does not exist")
    return json.loads(file.read_text())


def build(name):
    config = KimiK3Config.from_hf(read(f"configs/{name}.json"))
    return KimiK3ForCausalLM(config, dtype=torch.bfloat16, device="meta")


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def count_vision(config, root):
    return sum(math.prod(shape) for name, shape in vision_layout(config.vision).items() if name.startswith(root))


@pytest.fixture(scope="module")
def k3():
    return build("kimi_k3")


@pytest.fixture(scope="module")
def inventory():
    return read("kimi_k3_tensors.json")


def expand(inventory, text):
    """Every tensor of the inventory by its full name; `text` tells layers apart."""
    kinds = {
        "-": [0],
        "all 93": range(text.num_layers),
        "KDA (69)": text.layers_of("kda"),
        "MLA (24)": text.layers_of("mla"),
        "layer 0 only": sorted(text.dense_layers),
        "MoE (92)": [i for i in range(text.num_layers) if i not in text.dense_layers],
        "MoE (92) x 896": [i for i in range(text.num_layers) if i not in text.dense_layers],
        "ViT 27": range(27),
    }
    expanded = {}
    for entry in inventory["tensors"]:
        stored = (entry["dtype"], tuple(entry["shape"]))
        for i in kinds[entry["layers"]]:
            name = entry["name"].replace("{i}", str(i))
            if "{e}" in name:
                expanded.update({name.replace("{e}", str(e)): stored for e in range(text.moe.num_experts)})
            else:
                expanded[name] = stored
    return expanded


def test_parameters_of_k3(k3):
    assert count(k3) == 2_779_484_478_208
    vision = count_vision(k3.config, "vision_tower."), count_vision(k3.config, "mm_projector.")
    assert vision == (401_214_464, 46_144_512)
    assert count(k3) + sum(vision) == 2_779_931_837_184


def test_parameters_of_k3_by_part(k3):
    layers = k3.model.layers
    assert count(layers[0].self_attn) == 443_740_416
    assert count(layers[3].self_attn) == count(layers[92].self_attn) == 232_196_096
    assert count(layers[0].mlp) == 726_663_168
    assert count(layers[1].block_sparse_moe.experts) == 896 * 33_030_144
    assert count(layers[1].block_sparse_moe.shared_experts) == 132_120_576
    assert count(layers[1].block_sparse_moe.gate) == 6_423_424


def test_active_parameters_of_k3(k3):
    moe = k3.config.text.moe
    idle = sum(
        count(layer.block_sparse_moe.experts) // moe.num_experts * (moe.num_experts - moe.top_k)
        for layer in k3.model.layers
        if not layer.is_dense
    )
    assert count(k3) - idle - count(k3.model.embed_tokens) == 104_189_614_848


@pytest.mark.slow
def test_stored_tensors_of_k3_are_the_released_ones(k3, inventory):
    want = expand(inventory, k3.config.text)
    assert len(want) == inventory["tensor_count"] == 497_220
    got = stored_layout(k3, experts="mxfp4")
    got |= {name: ("BF16", shape) for name, shape in vision_layout(k3.config.vision).items()}
    assert got.keys() == want.keys()
    assert not [name for name in want if got[name] != want[name]]
    by_dtype = Counter()
    for dtype, shape in got.values():
        by_dtype[dtype] += math.prod(shape) * BYTES[dtype]
    assert dict(by_dtype) == inventory["payload_bytes_by_dtype"]
    assert by_dtype.total() == inventory["payload_bytes"] == 1_560_860_324_864


def count_padding(model):
    """Entries of A_log behind the heads: the published counts of the miniatures leave them out, that of K3 does not."""
    decays = [layer.self_attn.A_log for layer in model.model.layers if layer.kind == "kda"]
    return sum(decay.numel() - model.config.text.kda.num_heads for decay in decays)


def test_parameters_of_the_larger_miniature():
    model = build("kimi_k3_0.40b")
    assert count(model) - count_padding(model) == 388_598_824
    assert count_vision(model.config, "vision_tower.") == 4_870_400
    assert count_vision(model.config, "mm_projector.") == 2_098_176


def test_parameters_of_the_smaller_miniature():
    model = build("kimi_k3_0.18b")
    assert count(model) - count_padding(model) == 178_645_412


def test_packed_linears_of_the_quantized_miniature():
    model = build("kimi_k3_0.40b_mxfp4")
    layout = stored_layout(model, experts="mxfp4")
    assert sum(name.endswith("weight_packed") for name in layout) == 168


def test_nothing_is_allocated(k3):
    assert all(tensor.is_meta for tensor in (*k3.parameters(), *k3.buffers()))
