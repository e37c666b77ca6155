"""k3lib-nano on held-out items, ability by ability, through the engine.

    python -m benchmarks.nano k3lib-nano                        # a folder; 100 items of each kind
    python -m benchmarks.nano k3lib-nano --items 20 --kinds arithmetic,image --device cuda
    python -m benchmarks.nano k3lib-nano --draft k3lib-nano     # the same with speculation, and what was accepted
    python -m benchmarks.nano k3lib-nano --levers               # the same items under every lever of numerics
    python -m benchmarks.nano k3lib-nano --speed                # tokens a second, plainly and with the draft
    python -m benchmarks.nano k3lib-nano --levers --speed --json nano.json       # what the model card is made from

An answer counts if it is exactly right (`training.tasks.check`): the number, the call with all its arguments, the
object. Names, pairs of numbers, tools, sets of arguments and pictures of the held-out split never occur in training.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.nano_levers import check_exact, run_levers
from benchmarks.nano_scores import LONG, Score, held_out_items, long_items
from benchmarks.nano_speed import run_speed
from k3lib import Engine, EngineConfig
from k3lib.spec import SpecConfig
from training import tasks


def failures(items: list[tasks.Item], score: Score, count: int) -> None:
    """Show some wrong answers."""
    for item, answer, right in zip(items, score.parsed, score.right, strict=True):
        if not right and count:
            count -= 1
            print(f"    asked {item.messages[-1]['content']!r:.300}\n    wants {item.expect}")
            print(f"    got   {tuple(answer)!r:.400}")


def run_abilities(engine: Engine, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Print the table of abilities; returns its lines."""
    heads = f"{'prompt':>9}{'thinks l/h/m':>14}{'accepted':>9}{'tokens/s':>10}"
    print(f"{'ability':<18}{'items':>6}{'exact %':>8}{'':7}{heads}")
    asked = {kind: held_out_items(kind, args.items) for kind in args.kinds.split(",") if args.items}
    asked |= {f"recall {length}": long_items(length, args.long) for length in LONG if args.long}
    lines = []
    for name, items in asked.items():
        score = Score(engine, items, args.tokens)
        lines.append(score.summary(name))
        print(score.row(name), flush=True)
        failures(items, score, args.failures)
    return lines


def machine(device: str) -> str:
    """What it ran on, in words."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"CPU, torch threads: {torch.get_num_threads()}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a checkpoint")
    parser.add_argument("--items", type=int, default=100, help="of each kind; 0 leaves the abilities out")
    parser.add_argument("--kinds", default=",".join(tasks.KINDS))
    parser.add_argument("--long", type=int, default=10, help="items of each length of the recall from long texts")
    parser.add_argument("--tokens", type=int, default=700, help="most generated tokens")
    parser.add_argument("--running", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=None, choices=["float32", "bfloat16"], help="default: by device")
    parser.add_argument("--draft", default=None, help="folder of a draft, or of a target with one")
    parser.add_argument("--failures", type=int, default=0, help="wrong answers to show of each kind")
    parser.add_argument("--levers", type=int, nargs="?", const=50, default=0, help="with so many items of each kind")
    parser.add_argument("--float-run", type=Path, help="folder of training.train: NVFP4 from its fp32 experts")
    parser.add_argument("--speed", type=int, nargs="?", const=5, default=0, help="with so many rounds")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--threads", type=int, help="of torch on a CPU; on a busy machine one is often fastest")
    args = parser.parse_args(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype or ("float32" if args.device == "cpu" else "bfloat16"))
    found: dict[str, Any] = {"machine": machine(args.device), "dtype": str(dtype), "torch": torch.__version__}
    if args.items or args.long:
        spec = None if args.draft is None else SpecConfig(draft=args.draft)
        config = EngineConfig(max_running_requests=args.running, spec=spec)
        load: dict[str, Any] = {"device": args.device, "dtype": dtype, "progress": False}
        found["abilities"] = run_abilities(Engine.from_pretrained(args.model, config, vision=True, **load), args)
    if args.speed:
        where: dict[str, Any] = {"device": args.device, "dtype": dtype, "draft": args.draft}
        found["speed"] = run_speed(args.model, rounds=args.speed, **where)
    if args.levers:
        items = {kind: held_out_items(kind, args.levers) for kind in args.kinds.split(",")}
        found["levers"] = run_levers(
            args.model, items, device=args.device, tokens=args.tokens, running=args.running, draft=args.draft,
            float_run=args.float_run,
        )  # fmt: skip
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    check_exact(found.get("levers", []))  # behind all figures, which a failure should not hide


if __name__ == "__main__":
    main()
