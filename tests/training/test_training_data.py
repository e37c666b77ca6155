"""Generators: what they render parses back, what they ask for is accepted, and the splits share nothing."""

import copy
import random

import pytest
import torch

from k3lib.server.chat import ParsedOutput, parse_output_ids
from k3lib.server.images import DEFAULT, preprocess_image
from k3lib.server.tokenizer import load_tokenizer
from training import data, pictures, tasks
from training.words import Words, is_held_out

TOK = load_tokenizer()


def answered(item):
    sample = data.encode(item, TOK)
    prompt, _ = data.prompt_ids(item, TOK)
    assert sample.ids[: len(prompt)] == prompt
    return sample, prompt, parse_output_ids(sample.ids[len(prompt) :], TOK, thinking=item.thinking)


@pytest.mark.parametrize("split", ["train", "held_out"])
@pytest.mark.parametrize("kind", tasks.KINDS)
def test_reference_answers_parse_back_and_are_accepted(kind, split):
    for i in range(25):
        item = tasks.make(f"test {i}", split, kind)
        sample, prompt, parsed = answered(item)
        assert tasks.check(item, parsed), (item, parsed)
        assert parsed.reasoning == (item.answer.get("reasoning_content") if item.thinking else None)
        # all of the answer is learnt, and nothing that a user or a tool said
        assert all(sample.learn[len(prompt) :])
        learnt = TOK.decode(t for t, wanted in zip(sample.ids, sample.learn, strict=True) if wanted)
        assert learnt.count("<|end_of_msg|>") == 1 + sum(m["role"] == "assistant" for m in item.messages)
        assert 'role="' not in learnt
        if isinstance(item.messages[-1]["content"], str) and len(item.messages[-1]["content"]) > 12:
            assert f"{item.messages[-1]['content']}<|close|>" not in learnt


@pytest.mark.parametrize("kind", tasks.KINDS)
def test_wrong_answers_are_refused(kind):
    for i in range(10):
        item = tasks.make(f"test {i}", "held_out", kind)
        _, _, parsed = answered(item)
        assert not tasks.check(item, ParsedOutput(parsed.reasoning, None, []))
        assert not tasks.check(item, ParsedOutput(parsed.reasoning, "I do not know 7777777.", []))
        if "calls" in item.expect:
            call = parsed.tool_calls[0]
            assert not tasks.check(item, ParsedOutput(None, None, [*parsed.tool_calls, call]))
            other = call._replace(name=call.name + "x")
            assert not tasks.check(item, ParsedOutput(None, None, [other, *parsed.tool_calls[1:]]))
        if "number" in item.expect:
            wrong = copy.deepcopy(item)
            wrong.expect["number"] += 1
            assert not tasks.check(wrong, parsed)


def test_items_depend_on_seed_and_split_alone():
    assert tasks.make("a", "train") == tasks.make("a", "train") != tasks.make("b", "train")
    seen = {split: set() for split in ("train", "held_out")}
    for split, found in seen.items():
        words = Words(random.Random(split), split)
        for _ in range(200):
            found |= {words.city(), words.person(), words.made_up()}
    assert not seen["train"] & seen["held_out"]
    assert is_held_out("Beijing")
    assert is_held_out("15%240")


def test_low_effort_thinks_less():
    def thought(effort):
        style = tasks.Style(effort, thinking=True)
        items = [tasks.make(f"{i}", "train", kind, style=style) for i in range(10) for kind in tasks.KINDS]
        return sum(len(item.answer.get("reasoning_content", "")) for item in items)

    assert thought("low") < thought("max") / 2


def test_long_recall_stays_below_16k_tokens():
    item = tasks.recall(Words(random.Random(0), "train"), tasks.Style("max", thinking=True), tasks.LONGEST)
    sample, _, parsed = answered(item)
    assert 14_000 < len(sample.ids) < 16_384
    assert tasks.check(item, parsed)


def test_patches_are_those_that_the_server_makes():
    image = pytest.importorskip("PIL.Image")
    words = Words(random.Random(3), "train")
    for picture in (pictures.draw_digit(words), pictures.draw_shapes(words, 1), pictures.draw_shapes(words, 5)):
        patches, grid = preprocess_image(image.fromarray(picture.pixels))
        side = picture.pixels.shape[0] // DEFAULT.patch_size
        assert grid == (1, side, side)
        torch.testing.assert_close(data.patches_of(picture).float() / 127.5 - 1, patches, rtol=0, atol=1e-6)


def test_batches_are_rectangular_and_go_on_anywhere():
    made = list(zip(range(9), data.batches(5, (0, 0), 4096, size=24, longest=1500), strict=False))
    tokens = 0
    for _, (_, rows) in made:
        assert rows.ids.shape[1] in data.LENGTHS
        assert len(rows.ids) == 4096 // rows.ids.shape[1]
        assert torch.equal(rows.ids.flatten()[rows.places + 1], rows.labels)
        for slots, (height, width, count), patches in zip(rows.slots, rows.grids, rows.patches, strict=True):
            assert len(slots) * 4 == height * width * count == len(patches)
            assert (rows.ids.flatten()[slots] == TOK.special["<|media_pad|>"]).all()
        tokens += rows.num_real
    assert tokens > 0.6 * sum(rows.ids.numel() for _, (_, rows) in made)
    again = data.batches(5, made[4][1][0], 4096, size=24, longest=1500)
    for _, (position, rows) in made[5:]:
        other_position, other = next(again)
        assert other_position == position
        assert torch.equal(other.ids, rows.ids)
