"""k3lib-nano on held-out items, ability by ability, through the engine.

    python -m benchmarks.nano k3lib-nano                        # a folder; 100 items of each kind
    python -m benchmarks.nano k3lib-nano --items 20 --kinds arithmetic,image --device cuda
    python -m benchmarks.nano k3lib-nano --draft k3lib-nano     # the same with speculation, and what was accepted

An answer counts if it is exactly right (`training.tasks.check`): the number, the call with all its arguments, the
object. Words, numbers, tool names, argument sets and pictures of the held-out split never occur in training.
"""

from __future__ import annotations

import argparse
import collections
import math
import random
import statistics
import time

import torch

from k3lib import Engine, EngineConfig, SamplingParams
from k3lib.engine.media import PromptImage
from k3lib.server.chat import parse_output_ids
from k3lib.server.tokenizer import load_tokenizer
from k3lib.spec import SpecConfig
from training import tasks
from training.data import patches_of, prompt_ids
from training.words import Words

LONG = (2_000, 4_000, 8_000, 15_000)


def held_out_items(kind: str, count: int) -> list[tasks.Item]:
    """Items with thinking, at every effort in turn."""
    efforts = ("max", "low", "high")
    return [
        tasks.make(f"score {i}", "held_out", kind, style=tasks.Style(efforts[i % 3], thinking=True))
        for i in range(count)
    ]


def long_items(length: int, count: int) -> list[tasks.Item]:
    """Recall from texts of about `length` tokens."""
    return [
        tasks.recall(Words(random.Random(f"long {length} {i}"), "held_out"), tasks.Style("max", thinking=True), length)
        for i in range(count)
    ]


def media_of(item: tasks.Item, positions: list[int]) -> list[PromptImage]:
    """The pictures of an item, as the engine takes them."""
    found = []
    for picture, position in zip(item.images, positions, strict=True):
        patches = patches_of(picture).float() / 127.5 - 1
        side = picture.pixels.shape[0] // 14, picture.pixels.shape[1] // 14
        found.append(PromptImage.of(position, patches, (1, *side)))
    return found


class Score:
    """Answers to some items."""

    def __init__(self, engine: Engine, items: list[tasks.Item], tokens: int) -> None:
        tok = load_tokenizer()
        encoded = [prompt_ids(item, tok) for item in items]
        media = [media_of(item, positions) for item, (_, positions) in zip(items, encoded, strict=True)]
        begin = time.perf_counter()
        params = SamplingParams(temperature=0, max_new_tokens=tokens)
        outs = engine.generate([ids for ids, _ in encoded], params, media=media)
        self.seconds = time.perf_counter() - begin
        self.prompt = statistics.mean(len(ids) for ids, _ in encoded)
        self.tokens = sum(len(out.token_ids) for out in outs)
        self.parsed = [
            parse_output_ids(out.token_ids, tok, thinking=item.thinking) for item, out in zip(items, outs, strict=True)
        ]
        self.right = [tasks.check(item, answer) for item, answer in zip(items, self.parsed, strict=True)]
        self.accepted = [out.speculation.accept_length for out in outs if out.speculation is not None]
        self.thought: dict[str, list[int]] = collections.defaultdict(list)
        for item, answer in zip(items, self.parsed, strict=True):
            self.thought[item.effort or "none"].append(len(answer.reasoning or ""))

    def row(self, name: str) -> str:
        """One line of the table."""
        part, count = sum(self.right) / len(self.right), len(self.right)
        margin = 1.96 * math.sqrt(part * (1 - part) / count)  # of the mean of so many items
        thought = "/".join(
            f"{statistics.mean(self.thought[e]):.0f}" if e in self.thought else "-" for e in ("low", "high", "max")
        )
        accepted = f"{statistics.mean(self.accepted):>9.2f}" if self.accepted else f"{'-':>9}"
        return (
            f"{name:<18}{count:>6}{100 * part:>8.1f} ±{100 * margin:<5.1f}{self.prompt:>9.0f}{thought:>14}{accepted}"
            f"{self.tokens / self.seconds:>10.0f}"
        )


def failures(items: list[tasks.Item], score: Score, count: int) -> None:
    """Show some wrong answers."""
    for item, answer, right in zip(items, score.parsed, score.right, strict=True):
        if not right and count:
            count -= 1
            print(f"    asked {item.messages[-1]['content']!r:.300}\n    wants {item.expect}")
            print(f"    got   {tuple(answer)!r:.400}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a checkpoint")
    parser.add_argument("--items", type=int, default=100, help="of each kind")
    parser.add_argument("--kinds", default=",".join(tasks.KINDS))
    parser.add_argument("--long", type=int, default=10, help="items of each length of the recall from long texts")
    parser.add_argument("--tokens", type=int, default=500, help="most generated tokens")
    parser.add_argument("--running", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=None, choices=["float32", "bfloat16"])
    parser.add_argument("--draft", default=None, help="folder of a draft, or of a target with one")
    parser.add_argument("--failures", type=int, default=0, help="wrong answers to show of each kind")
    args = parser.parse_args()
    config = EngineConfig(
        max_running_requests=args.running, spec=None if args.draft is None else SpecConfig(draft=args.draft)
    )
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    engine = Engine.from_pretrained(args.model, config, device=args.device, dtype=dtype, progress=False, vision=True)
    heads = f"{'prompt':>9}{'thinks l/h/m':>14}{'accepted':>9}{'tokens/s':>10}"
    print(f"{'ability':<18}{'items':>6}{'exact %':>8}{'':7}{heads}")
    for kind in args.kinds.split(","):
        items = held_out_items(kind, args.items)
        score = Score(engine, items, args.tokens)
        print(score.row(kind), flush=True)
        failures(items, score, args.failures)
    for length in LONG if args.long else ():
        items = long_items(length, args.long)
        score = Score(engine, items, args.tokens)
        print(score.row(f"recall {length}"), flush=True)
        failures(items, score, args.failures)


if __name__ == "__main__":
    main()
