"""Generators: what they render parses back, what they ask for is accepted, and the splits share nothing."""

import copy
import json
import random
import re
from fractions import Fraction

import numpy as np
import pytest
import torch

from k3lib.server.chat import ParsedOutput, ToolCall, parse_output_ids
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


# ---- arithmetic ---------------------------------------------------------------------------------

STEP = re.compile(r"(?<![\w.])(\d+)([-+*/])(\d+)(?:([-+])(\d+))?=(\d+(?:\.\d+)?)(?:, rest |r)?(\d+)?")


def true_steps(text):
    """The equations of a reasoning, each held to be true; how many there are."""
    found = STEP.findall(text)
    for a, op, b, more, c, value, rest in found:
        a, b, c = int(a), int(b), int(c or 0)
        if rest:
            assert (int(value), int(rest)) == divmod(a, b), (a, op, b, value, rest)
            continue
        want = Fraction(a, b) if op == "/" else {"+": a + b, "-": a - b, "*": a * b}[op]
        assert want + {"+": c, "-": -c, "": 0}[more] == Fraction(value), (a, op, b, more, c, value)
    return len(found)


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_sums_are_reasoned_in_true_steps_of_single_digits(split):
    seen = {"long": 0, "decimal": 0}
    for i in range(150):
        for effort in ("low", "max"):
            item = tasks.make(f"{i}", split, "arithmetic", style=tasks.Style(effort, thinking=True))
            steps = item.answer["reasoning_content"]
            assert true_steps(steps) >= 1, steps
            for a, op, b, *_ in STEP.findall(steps):  # what is asked of one step: two digits, or to move a point
                assert len(b) == 1 or (op, b) == ("/", "100"), steps
                assert len(a) <= {"+": 1, "*": 1, "-": 2, "/": 2 if b != "100" else 5}[op], steps
            value = f"{item.expect['number']:.2f}".rstrip("0").rstrip(".")
            assert steps.rstrip(".").endswith(value)
        seen["long"] += ", tens " in steps
        seen["decimal"] += item.expect["number"] % 1 != 0
    assert min(seen.values()) > 5


@pytest.mark.parametrize(
    ("percent", "of", "value"), [(15, 240, "36"), (7, 350, "24.5"), (1, 7, "0.07"), (99, 999, "989.01")]
)
def test_percentages_are_exact(percent, of, value):
    for steps in tasks._percent(percent, of):
        assert true_steps(steps) >= 1
        assert steps.endswith(value)


def judged(item, content=None, calls=()):
    made = [ToolCall(name, text) for name, text in calls]
    return tasks.check(item, ParsedOutput(None, content, made))


def test_the_judge_looks_at_values_and_not_at_how_they_are_written():
    number = tasks.Item("arithmetic", [], {}, {"number": 24.5})
    assert judged(number, "7% of 350 is 24.5.")
    assert judged(number, "7% of 350 is 24.50.")
    assert not judged(number, "7% of 350 is 24.")
    assert not judged(number, "7% of 350 is 245.")
    form = tasks.Item("json", [], {}, {"json": {"a": 1, "b": ["x", "y"]}})
    assert judged(form, '{"b": ["x", "y"], "a": 1.0}')
    assert not judged(form, '{"a": true, "b": ["x", "y"]}')
    assert not judged(form, '{"a": 1, "b": ["y", "x"]}')
    assert not judged(form, '{"a": 1, "b": ["x", "y"]')
    call = tasks.Item("tool_call", [], {}, {"calls": [["f", {"city": "Oslo", "days": 3}], ["g", {}]]})
    assert judged(call, calls=[("g", "{}"), ("f", '{"days": 3.0, "city": "Oslo"}')])
    assert not judged(call, calls=[("f", '{"days": 3, "city": "Oslo"}')])
    assert not judged(call, calls=[("g", "{}"), ("f", '{"days": "3", "city": "Oslo"}')])


# ---- recall and pictures ------------------------------------------------------------------------


def test_long_texts_are_asked_about_more_than_once():
    lengths = []
    for i in range(300):
        words = Words(random.Random(i), "train")
        lengths.append(tasks._text_length(words.rng))
    assert sum(length > 8000 for length in lengths) > 3
    assert sum(length <= 1500 for length in lengths) > 200
    item = tasks.recall(Words(random.Random(5), "train"), tasks.Style("max", thinking=True), 3000, questions=4)
    text = item.messages[0]["content"]
    asked = [m["content"] for m in [*item.messages, item.answer] if m["role"] == "assistant"]
    assert len(asked) == len(set(asked)) == 4
    assert all(told in text for told in asked)
    assert item.expect["words"][0] in asked[-1]


def test_pictures_show_what_is_said():
    words = Words(random.Random(1), "held_out")
    for count in (1, 2, 3, 4, 5):
        for _ in range(8):
            pixels, facts = pictures.draw_shapes(words, count)
            near = np.abs(pixels.astype(int) - np.array(pictures.COLOURS[facts["colour"]])).max(-1) <= 12
            away = np.abs(pixels.astype(int) - np.array(pictures.COLOURS[facts["background"]])).max(-1) <= 12
            assert (near ^ away).all()
            assert near.sum() >= count * 60  # pixels of the smallest cross
            assert not near[0].any() or count > 1
            if count > 1:  # each in a cell of its own, which becomes one token
                cells = near.reshape(len(near) // pictures.CELL, pictures.CELL, -1, pictures.CELL).sum((1, 3))
                assert (cells > 0).sum() == count
    for _ in range(20):
        pixels, facts = pictures.draw_digit(words)
        near = np.abs(pixels.astype(int) - np.array(pictures.COLOURS[facts["colour"]])).max(-1) <= 12
        rows, columns = near.any(1).nonzero()[0], near.any(0).nonzero()[0]
        assert len(rows) > 0.45 * len(pixels) or facts["digit"] == 1
        assert columns[-1] - columns[0] < rows[-1] - rows[0] < len(pixels)


def test_chats_over_several_pictures_keep_their_order():
    item = next(x for x in (tasks.make(f"{i}", "train") for i in range(400)) if len(x.images) > 2)
    sample = data.encode(item, TOK)
    starts = [start for start, _ in sample.images]
    assert starts == sorted(starts)
    for start, picture in sample.images:
        count = (picture.pixels.shape[0] // pictures.CELL) ** 2
        assert sample.ids[start : start + count] == [TOK.special["<|media_pad|>"]] * count
    questions = [m for m in item.messages if m["role"] == "user"]
    assert len(questions) == len(item.images)


def test_answers_sent_back_without_reasoning_are_read_but_not_learnt():
    tok = load_tokenizer()
    items = (tasks.make(f"back {i}", "train") for i in range(400))
    item = next(x for x in items if not x.learn_history and any(m["role"] == "assistant" for m in x.messages))
    assert not any("reasoning_content" in message for message in item.messages)
    sample = data.encode(item, tok)
    item.learn_history = True
    more = data.encode(item, tok)
    assert sample.ids == more.ids
    assert 0 < sum(sample.learn) < sum(more.learn)
    first = sample.learn.index(True)
    assert sample.learn[first:] == more.learn[first:]


@pytest.mark.parametrize("kind", ["tool_call", "parallel_calls", "tool_result", "json"])
def test_chats_over_several_turns_keep_their_declarations(kind):
    item = next(x for x in (tasks.make(f"turns {i}", "train") for i in range(300)) if x.kind == kind and x.before)
    turn = item.before()
    assert turn[0]["role"] == "user"
    assert turn[-1]["role"] == "assistant"
    if item.tools:
        declared = {tool["function"]["name"] for tool in item.tools}
        called = [call["function"]["name"] for call in turn[1]["tool_calls"]]
        assert called == [message["name"] for message in turn if message["role"] == "tool"]
        assert set(called) <= declared


def test_tokens_are_counted_by_kind():
    table = data.token_table(60)
    assert {kind for kind, *_ in table} <= set(tasks.KINDS)
    for column in (1, 3, 4):
        assert sum(row[column] for row in table) == pytest.approx(1)
    assert all(row[2] > 100 for row in table)
    assert json.dumps(table)


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
