"""Everything behind a trained run in one command: export, measure, write the model card.

    python -m training.release --run runs/nano --out k3lib-nano --device cuda
    python -m training.release --run runs/nano --out k3lib-nano --device cpu --items 50     # adds the CPU's figures

Figures stay in the run, a file for each device; the card shows all of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks import nano
from training import card, export

__all__ = ["main"]


def main(argv: list[str] | None = None) -> None:
    """Export, measure and write as the command line says; more options are those of `benchmarks.nano`.

    Raises:
        AssertionError: prefix reuse or speculation changed an answer; the card has been written.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of training.train")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args, more = parser.parse_known_args(argv)
    export.main(["--run", str(args.run), "--out", str(args.out)])
    figures = args.run / f"figures_{args.device.partition(':')[0]}.json"
    try:
        nano.main([
            str(args.out), "--device", args.device, "--levers", "--speed", "--float-run", str(args.run),
            "--json", str(figures), *more,
        ])  # fmt: skip
    finally:
        found = [str(file) for file in sorted(args.run.glob("figures_*.json"))]
        card.main(["--run", str(args.run), "--model", str(args.out), "--figures", *found])


if __name__ == "__main__":
    main()
