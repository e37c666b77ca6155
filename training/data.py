"""Items as token ids: the chat format itself, a mask over the assistant's tokens, and rectangular batches.

    python -m training.data        # what the training tokens are spent on, kind by kind

Shapes: B sequences of S tokens; N targets; P patches.
"""

from __future__ import annotations

import argparse
import collections
import pickle
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from k3lib.multimodal import expand_placeholders
from k3lib.server import chat
from k3lib.server.images import DEFAULT, image_prompt
from k3lib.server.tokenizer import Tokenizer, load_tokenizer
from training import tasks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from training.pictures import Picture
    from training.tasks import Item
    from training.words import Split

__all__ = ["Rows", "Sample", "batches", "encode", "main", "padded", "patches_of", "pool", "prompt_ids", "token_table"]

# lengths of batches: few, so that each can have a CUDA graph, and dense, so that little is padding
LENGTHS = sorted({base << shift for base in (128, 160, 192, 224) for shift in range(7)} | {16384})
POOL = 2048  # items that are sorted by length together


@dataclass(slots=True)
class Sample:
    """One chat as training sees it.

    Attributes:
        ids: prompt and answer.
        learn: whether the token at each place is one that the model has to write.
        images: first token of each image and its pixels.
    """

    ids: list[int]
    learn: list[bool]
    images: list[tuple[int, Picture]]


@dataclass(slots=True)
class Rows:
    """A rectangular batch.

    Attributes:
        ids: `[B, S]`, padded behind the end; the last rows may be padding alone.
        places: `[N]`, flat places whose next token counts.
        labels: `[N]`, these tokens.
        patches: for each size of images their patches `[P, 3, p, p]` uint8.
        grids: for each size rows and columns of patches, and the number of images.
        slots: for each size the flat places of the images' tokens, image after image.
        num_real: tokens that are no padding.
    """

    ids: Tensor
    places: Tensor
    labels: Tensor
    patches: list[Tensor]
    grids: list[tuple[int, int, int]]
    slots: list[Tensor]
    num_real: int

    def to(self, device: torch.device | str) -> Rows:
        """Move to a device without waiting for it."""

        def move(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=True)

        return Rows(
            move(self.ids), move(self.places), move(self.labels), [move(x) for x in self.patches], self.grids,
            [move(x) for x in self.slots], self.num_real,
        )  # fmt: skip


# ---- one item -----------------------------------------------------------------------------------


def _blocks(item: Item) -> list[str]:
    return [image_prompt(p.pixels.shape[1], p.pixels.shape[0]) for p in item.images]


def _openers(tok: Tokenizer, thinking: bool) -> list[int]:
    """What stands in front of everything that the assistant writes."""
    return chat.encode_segments(tok, chat.render_chat([], thinking=thinking, thinking_effort=None))


def prompt_ids(item: Item, tok: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids up to where the model goes on, and the first token of each image."""
    segments = chat.render_chat(
        item.messages, item.tools, thinking=item.thinking, thinking_effort=item.effort,
        response_format=item.response_format, tool_choice=item.tool_choice,
        image_prompts=_blocks(item) if item.images else None,
    )  # fmt: skip
    merge = DEFAULT.merge_kernel_size * DEFAULT.patch_size
    counts = [(p.pixels.shape[0] // merge) * (p.pixels.shape[1] // merge) for p in item.images]
    return expand_placeholders(chat.encode_segments(tok, segments), tok.special["<|media_pad|>"], counts)


def encode(item: Item, tok: Tokenizer) -> Sample:
    """Prompt and answer; every message of the assistant counts, those of earlier turns too where the item says so."""
    opener = _openers(tok, item.thinking)
    ids, starts = prompt_ids(item, tok)
    whole = chat.render_chat([item.answer], thinking=item.thinking, thinking_effort=None, add_generation_prompt=False)
    answer = chat.encode_segments(tok, whole)
    assert answer[: len(opener)] == opener, "an assistant's message begins as the prompt ends"
    prompt, ids = len(ids), ids + answer[len(opener) :]
    learn = _learn(ids, opener, tok.stop_ids[0])
    if not item.learn_history:
        learn[:prompt] = [False] * prompt
    return Sample(ids, learn, list(zip(starts, item.images, strict=True)))


def _learn(ids: list[int], opener: list[int], end: int) -> list[bool]:
    learn, is_mine, first = [False] * len(ids), False, opener[0]
    for i, token in enumerate(ids):
        learn[i] = is_mine
        if is_mine:
            is_mine = token != end
        elif token == opener[-1] and i + 1 >= len(opener) and ids[i + 1 - len(opener)] == first:
            is_mine = ids[i + 1 - len(opener) : i + 1] == opener
    return learn


def patches_of(picture: Picture) -> Tensor:
    """`[n, 3, p, p]` uint8, row by row: pictures are as large as their patches, so nothing is resized."""
    p = DEFAULT.patch_size
    pixels = torch.from_numpy(picture.pixels)
    rows, columns = pixels.shape[0] // p, pixels.shape[1] // p
    return pixels.view(rows, p, columns, p, 3).permute(0, 2, 4, 1, 3).reshape(-1, 3, p, p)


# ---- batches ------------------------------------------------------------------------------------


def padded(length: int) -> int:
    """The length of a batch whose longest item has `length` tokens."""
    return next((n for n in LENGTHS if n >= length), -(-length // 1024) * 1024)


def _rows(samples: Sequence[Sample], pad: int, tokens: int) -> Rows:
    length = padded(max(len(s.ids) for s in samples))
    ids = torch.full((max(1, tokens // length), length), pad, dtype=torch.int64)  # as many rows for equal lengths
    places: list[int] = []
    labels: list[int] = []
    by_size: dict[tuple[int, int], tuple[list[Tensor], list[int]]] = {}
    for row, sample in enumerate(samples):
        ids[row, : len(sample.ids)] = torch.tensor(sample.ids)
        wanted = [i for i, learn in enumerate(sample.learn) if learn]
        places += [row * length + i - 1 for i in wanted]
        labels += [sample.ids[i] for i in wanted]
        for start, picture in sample.images:
            p = DEFAULT.patch_size
            rows, columns = picture.pixels.shape[0] // p, picture.pixels.shape[1] // p
            parts, slots = by_size.setdefault((rows, columns), ([], []))
            parts.append(patches_of(picture))
            slots += range(row * length + start, row * length + start + rows * columns // DEFAULT.merge_kernel_size**2)
    sizes = sorted(by_size)
    return Rows(
        ids,
        torch.tensor(places, dtype=torch.int64),
        torch.tensor(labels, dtype=torch.int64),
        [torch.cat(by_size[size][0]) for size in sizes],
        [(*size, len(by_size[size][0])) for size in sizes],
        [torch.tensor(by_size[size][1]) for size in sizes],
        sum(len(s.ids) for s in samples),
    )


def pool(
    seed: int, number: int, tokens: int, *, size: int = POOL, split: Split = "train", longest: int = 1 << 20
) -> list[Rows]:
    """The batches of one pool of items, each of about `tokens` tokens with padding, in random order.

    Args:
        seed: of the whole run.
        number: which pool; pools are independent of one another.
        tokens: of a batch; an item that is longer is a batch of its own.
        size: items of a pool.
        split: which words may occur.
        longest: items with more tokens are left out.
    """
    tok = load_tokenizer()
    samples = (encode(tasks.make(f"{seed} {number} {i}", split), tok) for i in range(size))
    ordered = sorted((s for s in samples if len(s.ids) <= longest), key=lambda s: len(s.ids))
    groups: list[list[Sample]] = []
    for sample in reversed(ordered):  # the longest of a group decides its length
        if groups and (len(groups[-1]) + 1) * padded(len(groups[-1][0].ids)) <= tokens:
            groups[-1].append(sample)
        else:
            groups.append([sample])
    random.Random(f"{seed} {number}").shuffle(groups)
    return [_rows(group, tok.special["[PAD]"], tokens) for group in groups]


class _Pools(torch.utils.data.Dataset[bytes]):
    """Pool by pool, for the workers of a loader; as bytes, because each tensor would take a file descriptor."""

    def __init__(self, seed: int, first: int, count: int, tokens: int, size: int, longest: int) -> None:
        self.seed, self.first, self.count = seed, first, count
        self.tokens, self.size, self.longest = tokens, size, longest

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> bytes:
        return pickle.dumps(pool(self.seed, self.first + index, self.tokens, size=self.size, longest=self.longest))


def batches(
    seed: int, position: tuple[int, int], tokens: int, *, size: int = POOL, longest: int = 1 << 20, workers: int = 0
) -> Iterator[tuple[tuple[int, int], Rows]]:
    """Endless training batches from a position on, each with the position behind it.

    Args:
        seed: of the run.
        position: pool and batch in it, `(0, 0)` at first.
        tokens: of a batch.
        size: items of a pool.
        longest: items with more tokens are left out.
        workers: processes that prepare pools ahead; the order does not depend on them.
    """
    number, done = position
    pools = torch.utils.data.DataLoader(
        _Pools(seed, number, 1 << 30, tokens, size, longest), batch_size=None, shuffle=False, num_workers=workers,
        prefetch_factor=2 if workers else None, persistent_workers=False,
    )  # fmt: skip
    for packed in pools:
        made = pickle.loads(packed)
        for i in range(done, len(made)):
            yield ((number, i + 1) if i + 1 < len(made) else (number + 1, 0)), made[i]
        number, done = number + 1, 0


# ---- what the tokens are spent on ---------------------------------------------------------------


def token_table(items: int, *, seed: int = 0) -> list[tuple[str, float, float, float, float]]:
    """Of each kind in training its part of the items, tokens of one, and its parts of all and of the learnt tokens."""
    tok = load_tokenizer()
    count: collections.Counter[str] = collections.Counter()
    tokens: collections.Counter[str] = collections.Counter()
    learnt: collections.Counter[str] = collections.Counter()
    for i in range(items):
        item = tasks.make(f"{seed} table {i}", "train")
        sample = encode(item, tok)
        count[item.kind] += 1
        tokens[item.kind] += len(sample.ids)
        learnt[item.kind] += sum(sample.learn)
    all_tokens, all_learnt = tokens.total(), learnt.total()
    return [
        (kind, count[kind] / items, tokens[kind] / number, tokens[kind] / all_tokens, learnt[kind] / all_learnt)
        for kind, number in count.most_common()
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=3000)
    args = parser.parse_args()
    print(f"{'kind':<16}{'items %':>9}{'tokens':>9}{'tokens %':>10}{'learnt %':>10}")
    for kind, part, mean, of_all, of_learnt in token_table(args.items):
        print(f"{kind:<16}{100 * part:>9.1f}{mean:>9.0f}{100 * of_all:>10.1f}{100 * of_learnt:>10.1f}")


if __name__ == "__main__":
    main()
