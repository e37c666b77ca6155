"""Peak memory of loading a packed checkpoint, as a ratio to its size.

    python -m benchmarks.load --megabytes 400

Writes a random MXFP4 checkpoint of at least that size into a temporary folder, loads it in a fresh process, and
compares the growth of the resident set (its peak, from the kernel) with the size of the weights file.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from k3lib import KimiK3ForCausalLM
from k3lib.config import KimiK3Config, tiny_hf_config
from k3lib.export import stored_layout


def write(folder: Path, megabytes: int) -> int:
    """Write a checkpoint whose experts fill `megabytes`; returns its size in bytes."""
    width, inner = 512, 512
    expert = 3 * width * inner * (0.5 + 1 / 32)
    experts = max(4, math.ceil(megabytes * 1.02e6 / (8 * expert)))
    hf = tiny_hf_config(routed_expert_hidden_size=width, moe_intermediate_size=inner, num_experts=experts)
    hf["vision_config"] = None
    config = KimiK3Config.from_hf(hf)
    with torch.device("meta"):
        model = KimiK3ForCausalLM(config, dtype=torch.bfloat16)
    kinds = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}
    random = torch.Generator().manual_seed(0)
    tensors = {}
    for name, (dtype, shape) in stored_layout(model, "mxfp4").items():
        if dtype == "U8":
            low, high = (110, 128) if name.endswith("scale") else (0, 256)
            tensors[name] = torch.randint(low, high, shape, generator=random, dtype=torch.uint8)
        else:
            tensors[name] = (0.05 * torch.randn(shape, generator=random)).to(kinds[dtype])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf))
    return (folder / "model.safetensors").stat().st_size


def measure(folder: Path) -> dict[str, int]:
    """Load in this process; bytes of the resident set before, and at its peak."""
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    model = KimiK3ForCausalLM.from_pretrained(folder, progress=False)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"before": before, "peak": peak, "packed": sum(m.packed is not None for m in experts_of(model))}


def experts_of(model):
    return [layer.block_sparse_moe.experts for layer in model.model.layers if not layer.is_dense]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--child", type=Path)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child)))
        return
    with tempfile.TemporaryDirectory() as name:
        size = write(Path(name), args.megabytes)
        command = [sys.executable, "-m", "benchmarks.load", "--child", name]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    grown = found["peak"] - found["before"]
    print(f"checkpoint {size / 1e6:.0f} MB, MoE layers kept packed: {found['packed']}")
    print(f"resident set before {found['before'] / 1e6:.0f} MB, peak {found['peak'] / 1e6:.0f} MB")
    print(f"growth / size = {grown / size:.3f}")


if __name__ == "__main__":
    main()
