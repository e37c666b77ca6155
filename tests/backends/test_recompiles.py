"""Kernels are compiled for a few classes of sizes, and not again for another length, batch or context in them."""

import importlib
import pkgutil

import pytest
import torch
from seeded import seed_weights

from k3lib import KimiK3Config, KimiK3ForCausalLM
from k3lib.backends import triton as kernels
from k3lib.cache import CacheConfig
from k3lib.engine import Engine, EngineConfig, SamplingParams

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the interpreter compiles nothing")


def compiled():
    """Variants of each kernel that have been compiled in this process."""
    from triton.runtime.jit import JITFunction  # noqa: PLC0415 - only where there is one

    counts = {}
    for module in pkgutil.iter_modules(kernels.__path__):
        if not module.name.endswith("_kernels"):
            continue
        for name, value in vars(importlib.import_module(f"{kernels.__name__}.{module.name}")).items():
            if isinstance(value, JITFunction):
                counts[f"{module.name}.{name}"] = sum(len(cache[0]) for cache in value.device_caches.values())
    return counts


def serve(engine, lengths):
    generator = torch.Generator().manual_seed(sum(lengths))
    prompts = [torch.randint(512, (n,), generator=generator).tolist() for n in lengths]
    engine.generate(prompts, SamplingParams(temperature=0, max_new_tokens=5, ignore_eos=True))


@pytest.mark.parametrize("graphs", [False, True])
def test_other_lengths_compile_nothing(graphs):
    config = KimiK3Config.tiny(
        vocab_size=512, num_heads=2, head_dim=32, num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=64,
        qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
    )  # fmt: skip
    model = seed_weights(KimiK3ForCausalLM(config, dtype=torch.bfloat16, device="cuda")).eval()
    model.requires_grad_(requires_grad=False)
    pools = CacheConfig(num_pages=200, num_slots=40, page_size=16, checkpoint_grid=64)
    engine = Engine(model, EngineConfig(cache=pools, chunked_prefill_size=256, cuda_graphs=graphs))
    for lengths in ([1], [20], [64], [256, 300], [17] * 9, [700, 5, 64], [3, 2]):
        serve(engine, lengths)
    before = compiled()
    assert sum(before.values()) > 10
    for lengths in ([2], [65], [200, 333], [31] * 7, [48, 1, 129, 512], [16] * 16, [640]):
        serve(engine, lengths)
    after = compiled()
    grown = [f"{name}: {n} to {after[name]}" for name, n in before.items() if after[name] != n]
    assert not grown, ", ".join(grown)
