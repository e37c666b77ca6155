"""Write a trained run as a checkpoint in the released layout: MXFP4 experts, vision, the draft in `dspark/`.

python -m training.export --run runs/nano --out k3lib-nano
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from k3lib.layers import Experts
from k3lib.spec.draft_files import BUNDLE
from k3lib.stored import SINGLE
from training.draft import DRAFT
from training.model import draft_config, new_draft
from training.ops import fake_mxfp4
from training.train import CHECKPOINT, load_run

if TYPE_CHECKING:
    from torch import nn

    from k3lib.config import KimiK3Config
    from k3lib.multimodal import KimiK3ForConditionalGeneration

__all__ = ["export_draft", "export_model", "main"]


@torch.no_grad()
def export_model(model: KimiK3ForConditionalGeneration, out: Path) -> None:
    """Write the model, which stays as it is.

    Experts are rounded to MXFP4 in fp32 first: those values fit bf16 and are packed without another rounding.
    """
    model = copy.deepcopy(model).cpu()
    for module in model.modules():
        if isinstance(module, Experts):
            module.w13.copy_(fake_mxfp4(module.w13))
            module.w2.copy_(fake_mxfp4(module.w2))
    model.to(torch.bfloat16).save_pretrained(out, experts="mxfp4")


def export_draft(draft: nn.Module, config: KimiK3Config, out: Path) -> None:
    """Write the draft of a model into a folder of its own."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().cpu().to(torch.bfloat16).contiguous() for name, value in draft.named_parameters()}
    save_file(tensors, out / SINGLE, metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(draft_config(config), indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    """Export as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    model, _ = load_run(args.run / CHECKPOINT)
    export_model(model, args.out)
    if (args.run / DRAFT).is_file():
        draft = new_draft(model.config, 0)
        draft.load_state_dict(torch.load(args.run / DRAFT, map_location="cpu", weights_only=True)["draft"])
        export_draft(draft, model.config, args.out / BUNDLE)
    total = sum(file.stat().st_size for file in args.out.rglob("*") if file.is_file())
    print(f"{args.out}: {total:,} bytes")


if __name__ == "__main__":
    main()
