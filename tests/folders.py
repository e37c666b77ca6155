"""Weights folders and models of random weights: what the tests of loading, updating and offloading share."""

import json
import re

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from k3lib import Batch, KimiK3Config, KimiK3ForCausalLM, Mesh
from k3lib.layers import Experts, KimiDeltaAttention
from k3lib.parallel import RankView

__all__ = [
    "IDS",
    "LAYERS",
    "MOE",
    "decays_of",
    "experts_of",
    "load",
    "logits",
    "parameters",
    "random_model",
    "rank",
    "read",
    "write",
]

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
LAYERS = "language_model.model.layers"
MOE = f"{LAYERS}.1.block_sparse_moe"


def read(folder):
    """Configuration and tensors of a folder."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            tensors |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - not a dict
    return json.loads((folder / "config.json").read_text()), tensors


def write(folder, config, tensors):
    """Write a folder; tensors by their stored names."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors")
    return folder


def load(folder, **options):
    return KimiK3ForCausalLM.from_pretrained(folder, progress=False, **options)


def rank(index, size):
    return Mesh(tp=RankView(index, size))


@torch.inference_mode()
def logits(model, ids=IDS):
    return model(Batch.pack([ids]))


def experts_of(model):
    return [module for module in model.modules() if isinstance(module, Experts)]


def decays_of(model):
    return [module for module in model.modules() if isinstance(module, KimiDeltaAttention)]


def parameters(model):
    """Parameters outside the experts, by name."""
    return {name: x for name, x in model.named_parameters() if not re.search(r"experts\.w(13|2)$", name)}


def random_model(seed=1, *, dtype=torch.bfloat16, **changes):
    """A model of random weights, four layers unless told: KDA with a dense MLP, twice KDA and once MLA with experts."""
    model = KimiK3ForCausalLM(KimiK3Config.tiny(**{"num_hidden_layers": 4, **changes}), dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    for name, x in model.named_parameters():
        noise = torch.randn(x.shape, generator=generator)
        x.data.copy_(1 + 0.2 * noise if "norm" in name else 0.2 * noise)
    return model.requires_grad_(requires_grad=False).eval()
