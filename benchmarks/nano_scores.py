"""Held-out items for k3lib-nano, and how its answers to them score."""

from __future__ import annotations

import collections
import math
import random
import statistics
import time
from typing import TYPE_CHECKING, Any

from k3lib import Engine, SamplingParams
from k3lib.engine.media import PromptImage
from k3lib.server.chat import parse_output_ids
from k3lib.server.images import DEFAULT
from k3lib.server.tokenizer import load_tokenizer
from training import tasks
from training.data import patches_of, prompt_ids
from training.words import Words

if TYPE_CHECKING:
    from collections.abc import Sequence

LONG = (2_000, 4_000, 8_000, 15_000)
EFFORTS = ("low", "high", "max")


def held_out_items(kind: str, count: int) -> list[tasks.Item]:
    """Items with thinking, at every effort in turn."""
    return [
        tasks.make(f"score {i}", "held_out", kind, style=tasks.Style(EFFORTS[-1 - i % 3], thinking=True))
        for i in range(count)
    ]


def long_items(length: int, count: int) -> list[tasks.Item]:
    """Recall from texts of about `length` tokens, asked once."""
    style = tasks.Style("max", thinking=True)
    return [
        tasks.recall(Words(random.Random(f"long {length} {i}"), "held_out"), style, length, questions=1)
        for i in range(count)
    ]


def media_of(item: tasks.Item, positions: list[int]) -> list[PromptImage]:
    """The pictures of an item, as the engine takes them."""
    found = []
    for picture, position in zip(item.images, positions, strict=True):
        patches = patches_of(picture).float() / 127.5 - 1
        rows, columns = (side // DEFAULT.patch_size for side in picture.pixels.shape[:2])
        found.append(PromptImage.of(position, patches, (1, rows, columns)))
    return found


class Score:
    """Greedy answers to some items.

    Attributes:
        answers: their tokens.
        parsed: the same as messages.
        right: whether each is exactly right.
        seconds, tokens: what it took, and how much was generated.
        prompt: mean length of the prompts.
        accepted: tokens of a verify step of each request that speculated.
        thought: bytes of reasoning of each answer, by effort.
    """

    def __init__(self, engine: Engine, items: Sequence[tasks.Item], tokens: int) -> None:
        tok = load_tokenizer()
        encoded = [prompt_ids(item, tok) for item in items]
        media = [media_of(item, positions) for item, (_, positions) in zip(items, encoded, strict=True)]
        begin = time.perf_counter()
        params = SamplingParams(temperature=0, max_new_tokens=tokens)
        outs = engine.generate([ids for ids, _ in encoded], params, media=media)
        self.seconds = time.perf_counter() - begin
        self.prompt = statistics.mean(len(ids) for ids, _ in encoded)
        self.answers = [list(out.token_ids) for out in outs]
        self.tokens = sum(map(len, self.answers))
        self.parsed = [
            parse_output_ids(ids, tok, thinking=item.thinking) for item, ids in zip(items, self.answers, strict=True)
        ]
        self.right = [tasks.check(item, answer) for item, answer in zip(items, self.parsed, strict=True)]
        self.accepted = [out.speculation.accept_length for out in outs if out.speculation is not None]
        self.thought: dict[str, list[int]] = collections.defaultdict(list)
        for item, answer in zip(items, self.parsed, strict=True):
            self.thought[item.effort or "none"].append(len(answer.reasoning or ""))

    def summary(self, name: str) -> dict[str, Any]:
        """The line of the table as plain values."""
        return {
            "name": name, "items": len(self.right), "right": sum(self.right), "prompt": self.prompt,
            "thought": {effort: statistics.mean(lengths) for effort, lengths in self.thought.items()},
            "accepted": statistics.mean(self.accepted) if self.accepted else None,
            "tokens_per_second": self.tokens / self.seconds,
        }  # fmt: skip

    def row(self, name: str) -> str:
        """One line of the table."""
        line = self.summary(name)
        part = line["right"] / line["items"]
        margin = 1.96 * math.sqrt(part * (1 - part) / line["items"])  # of the mean of so many items
        thought = "/".join(f"{line['thought'][e]:.0f}" if e in line["thought"] else "-" for e in EFFORTS)
        accepted = f"{'-':>9}" if line["accepted"] is None else f"{line['accepted']:>9.2f}"
        return (
            f"{name:<18}{line['items']:>6}{100 * part:>8.1f} ±{100 * margin:<5.1f}{line['prompt']:>9.0f}{thought:>14}"
            f"{accepted}{line['tokens_per_second']:>10.0f}"
        )
