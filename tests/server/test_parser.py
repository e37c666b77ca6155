"""The output parser: the published vectors, and what it promises about streams."""

from __future__ import annotations

import json
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3lib.server.chat import OutputParser, ParsedOutput, parse_output, parse_output_ids
from k3lib.server.tokenizer import load_tokenizer

TINY = load_tokenizer()
CONTROL = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"]


@pytest.fixture(autouse=True, scope="module")
def nothing_is_held():
    """Short arguments are streamed like long ones; `test_short_calls.py` looks at what is held."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("k3lib.server.calls.HELD", -1)
        yield


def as_dict(parsed):
    return {
        "reasoning": parsed.reasoning,
        "content": parsed.content,
        "tool_calls": [call._asdict() for call in parsed.tool_calls],
    }


def joined(deltas):
    """What a client assembles from the deltas: reasoning, content, and (name, arguments) of each call."""
    reasoning = "".join(d.get("reasoning", "") for d in deltas)
    content = "".join(d.get("content", "") for d in deltas)
    calls = []
    for delta in deltas:
        assert len(delta) == 1
        assert "" not in delta.values()
        if (piece := delta.get("tool_call")) is None:
            continue
        if "name" in piece:
            assert piece == {"index": len(calls), "name": piece["name"], "arguments": ""}
            calls.append([piece["name"], ""])
        else:
            assert piece == {"index": len(calls) - 1, "arguments": piece["arguments"]}
            assert piece["arguments"]
            calls[-1][1] += piece["arguments"]
    return reasoning or None, content or None, [tuple(call) for call in calls]


# Calls that a client gets to see although they never end, and one whose key comes twice.
ON_THE_WIRE = {
    "missing_call_close_truncated": [("f", '{"a": 1}'), ("g", '{"b": "par')],
    "missing_call_close_then_next_call": [("a", '{"x": "1"'), ("b", '{"y": "2"}')],
    "duplicate_keys_last_wins": [("f", '{"a": 1, "b": 2, "a": 3}')],
}


def assert_streamed(parser, deltas, case):
    """The deltas say what the whole says, but for what the protocol excepts."""
    want = case["expected"]
    reasoning, content, calls = joined(deltas)
    if not parser.skipped_think:
        assert reasoning == want["reasoning"], case["name"]
    assert content == want["content"], case["name"]
    complete = [(call["name"], call["arguments"]) for call in want["tool_calls"]]
    assert calls == ON_THE_WIRE.get(case["name"], complete), case["name"]


def pieces(text, sizes):
    at = 0
    for size in sizes:
        yield text[at : at + size]
        at += size
    yield text[at:]


def test_output_vectors_as_text(outputs):
    for case in outputs["cases"]:
        flags = {"thinking": case["thinking"], "tools_active": case["tools_active"]}
        parsed = parse_output(case["output"], **flags)
        assert as_dict(parsed) == case["expected"], case["name"]
        chunkings = {**case["chunkings"], "characters": [1] * len(case["output"])}
        for sizes in chunkings.values():
            parser = OutputParser(**flags)
            deltas = [d for piece in pieces(case["output"], sizes) for d in parser.feed(piece)]
            deltas += parser.finish()
            assert parser.skipped_think == case["skipped_think"]
            assert_streamed(parser, deltas, case)
            assert as_dict(parser.result()) == case["expected"]


def test_output_vectors_as_ids(outputs, official):
    for case in outputs["cases"]:
        flags = {"thinking": case["thinking"], "tools_active": case["tools_active"]}
        for tok, ids in (
            (official, case["output_token_ids"]),
            (TINY, TINY.encode(case["output"], allow_special=True)),
        ):
            assert as_dict(parse_output_ids(ids, tok, **flags)) == case["expected"], case["name"]
            parser = OutputParser(tok=tok, **flags)
            deltas = [d for i in ids for d in parser.feed_ids([i])] + parser.finish()
            assert_streamed(parser, deltas, case)


def test_text_that_looks_like_markers_stays_text_in_token_mode(outputs, official):
    for case in outputs["token_mode_cases"]:
        parsed = parse_output_ids(case["token_ids"], official, thinking=case["thinking"])
        assert as_dict(parsed) == case["expected"], case["name"]


TAGS = [
    "think",
    "response",
    "tools",
    "message",
    "call",
    'call tool="f" index="1"',
    'call tool="a&amp;&quot;" index="2"',
    "argument",
    'argument key="k" type="number"',
    'argument key="s" type="string"',
    'json type="object"',
    "json",
]
MARKERS = [f"<|{bracket}|>{tag}<|sep|>" for bracket in ("open", "close") for tag in TAGS]
FRAGMENTS = st.one_of(
    st.sampled_from(MARKERS),
    st.sampled_from([*CONTROL, *TAGS, "a", "1", " ", "\n", "<", "<|", "<|ope", "n|>", "\r", "é", "😀", "[BOS]", '"']),
)
SCRIPTS = st.lists(FRAGMENTS, max_size=14).map("".join)


def stream(feed, finish, output, data):
    """Deltas of an output that comes in pieces."""
    deltas, at = [], 0
    while at < len(output):
        size = data.draw(st.integers(1, 12))
        deltas += feed(output[at : at + size])
        at += size
    return deltas + finish()


def parsers(thinking, tools_active, script):
    """Makers of parsers of text and of ids, each with what it is fed with."""
    for tok, output in ((None, script), (TINY, TINY.encode(script, allow_special=True))):

        def make(tok=tok, **more):
            parser = OutputParser(thinking, tools_active, tok, **more)
            return parser, parser.feed if tok is None else parser.feed_ids

        yield make, output


@given(SCRIPTS, st.booleans(), st.booleans(), st.data())
def test_chunking_changes_nothing(script, thinking, tools_active, data):
    for make, output in parsers(thinking, tools_active, script):
        whole, feed = make()
        once = joined(feed(output) + whole.finish())
        want = whole.result()
        parser, feed = make()
        reasoning, content, calls = joined(stream(feed, parser.finish, output, data))
        assert parser.result() == want
        assert (reasoning, content, calls) == once
        assert content == want.content
        assert reasoning == want.reasoning or parser.skipped_think
        assert parser.num_calls == len(want.tool_calls) <= len(calls)
        assert parser.reasoning_tokens == whole.reasoning_tokens <= len(output)
        assert parser.reasoning_tokens >= 0 or isinstance(output, str)


@given(SCRIPTS, st.booleans(), st.booleans())
def test_a_parser_that_keeps_nothing_sends_the_same(script, thinking, tools_active):
    for make, output in parsers(thinking, tools_active, script):
        (kept, feed), (bare, feed_bare) = make(), make(keeps_text=False)
        assert [feed(output), kept.finish()] == [feed_bare(output), bare.finish()]
        assert bare.num_calls == kept.num_calls
        with pytest.raises(ValueError, match="keeps_text"):
            bare.result()


TEXTS = st.lists(
    st.text(max_size=6) | st.sampled_from(["<|close|>argument<|sep|>", "<|", "\r\n", '"', "\\", "é😀"])
).map("".join)
ARGUMENTS = st.tuples(
    st.sampled_from(["a", "b", 'k"', ""]),
    st.sampled_from(["string", None, "number", "object"]),
    st.one_of(TEXTS, st.sampled_from(["1e2", " [1,2]\n", "NaN", "{", "", '"x"', "true"])),
)
CALLS = st.lists(
    st.tuples(st.sampled_from(["f", "g.h", "", "a&b"]), st.lists(ARGUMENTS, max_size=4), st.booleans(), st.booleans()),
    max_size=4,
)


def literal(kind, text):
    if kind in ("string", None):
        return json.dumps(text, ensure_ascii=False)
    try:
        json.loads(text, parse_constant=lambda name: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return json.dumps(text, ensure_ascii=False)
    return text.strip(" \t\r\n")


@given(CALLS, st.booleans(), st.data())
def test_streamed_calls_are_the_whole_ones(calls, as_ids, data):
    """`calls` are (name, arguments, whether its last argument has an end, whether the call has one)."""
    output = [("<|close|>think<|sep|><|open|>tools<|sep|>", True)]
    wire, complete = [], []
    for name, arguments, closes_last, closes in calls:
        quoted = name.replace("&", "&amp;")
        output += [(f'<|open|>call tool="{quoted}" index="1"<|sep|>', True)]
        members, kept, tail = [], {}, ""
        for i, (key, kind, text) in enumerate(arguments):
            text = text if as_ids else text.replace("|", "!")
            attributes = f'key="{key.replace(chr(34), "&quot;")}"' + (f' type="{kind}"' if kind else "")
            output += [(f"<|open|>argument {attributes}<|sep|>", True), (text, False)]
            member = f"{json.dumps(key)}: {literal(kind, text)}"
            if i + 1 < len(arguments) or closes_last:
                output += [("<|close|>argument<|sep|>", True)]
                members.append(member)
                kept[key] = member
            elif kind in ("string", None) and text:
                members.append(member[:-1])
                tail = '"'
        if closes:
            output += [("<|close|>call<|sep|>", True)]
            tail += "}"
        if name and closes:
            complete.append((name, "{" + ", ".join(kept.values()) + "}"))
        if name and (closes or members):
            wire.append((name, "{" + ", ".join(members) + (tail if closes else "")))
    if as_ids:
        parser = OutputParser(tok=TINY)
        output = [i for text, special in output for i in TINY.encode(text, special)]
        feed = parser.feed_ids
    else:
        parser = OutputParser()
        output = "".join(text for text, _ in output)
        feed = parser.feed
    assert joined(stream(feed, parser.finish, output, data)) == (None, None, wire)
    assert parser.result() == (None, None, complete)
    well_formed = all(
        closes and closes_last and len({a[0] for a in args}) == len(args) for _, args, closes_last, closes in calls
    )
    assert wire == complete or not well_formed


@given(SCRIPTS, st.booleans())
def test_ids_and_text_of_well_formed_brackets_agree(script, thinking):
    ids = TINY.encode(script, allow_special=True)
    if "[BOS]" not in script and "<|ope" not in script.replace("<|open|>", ""):
        assert parse_output_ids(ids, TINY, thinking=thinking) == parse_output(script, thinking=thinking)


@given(st.lists(st.integers(-1, 520), max_size=40), st.booleans())
def test_no_ids_make_the_parser_raise(ids, thinking):
    assert isinstance(parse_output_ids(ids, TINY, thinking=thinking), ParsedOutput)


@given(st.text(), st.text())
def test_no_plain_text_is_lost(reasoning, content):
    reasoning, content = reasoning.replace("|", "!"), content.replace("|", "!")
    output = f"{reasoning}<|close|>think<|sep|><|open|>response<|sep|>{content}<|close|>response"
    parsed = parse_output(output + "<|sep|><|close|>message<|sep|><|end_of_msg|>")
    assert parsed == (reasoning or None, content or None, [])


@pytest.mark.parametrize(
    ("fed", "delivered"),
    [
        ("a<|b", "a<|b"),
        ("a<|", "a"),
        ("a<|sep", "a<|sep"),
        ("a<|close|>", "a"),
        ("a<|close|>resp", "a"),
        ("a<|close|>respect", "a<|close|>respect"),
        ("a<|close|>x<|se", "a<|close|>x<|se"),
    ],
)
def test_only_the_start_of_a_marker_is_held_back(fed, delivered):
    parser = OutputParser(thinking=False)
    assert joined(parser.feed(fed))[1] == delivered


@pytest.mark.parametrize(
    ("output", "reasoning", "content"),
    [
        ("a<|close|>think<|open|>", "a", None),
        ("a<|close|>think<|open|>response", "a", None),
        ("a<|open|>response<|sep|>b<|close|>", "a", "b"),
        ("a<|close|>think<|sep|><|open|>", "a", None),
        ("a<|close|>think<|sep|>\n", "a", None),
        ("a<|close|>think<|sep|> b \n<|close|>message<|sep|>", "a", " b \n"),
        ("a<|close|><|end_of_msg|>tail", "a", None),
        ("a<|open|>think<|sep|>b", "a<|open|>think<|sep|>b", None),
    ],
)
def test_cut_and_careless_outputs(output, reasoning, content):
    assert parse_output(output) == (reasoning, content, [])
    assert parse_output_ids(TINY.encode(output, True), TINY) == (reasoning, content, [])


def call(body):
    return f'<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>{body}<|close|>call<|sep|>'


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('<|open|>argument type="number"<|sep|>1<|close|>argument<|sep|>', "{}"),
        (
            '<|open|>argument key="a"<|sep|>1<|open|>argument key="b"<|sep|>2<|close|>argument<|sep|>',
            '{"b": "2"}',
        ),
        ('<|open|>argument key="a"<|sep|>1', "{}"),
        ('<|open|>json type="object"<|sep|>{bad<|close|>json<|sep|>', "{bad"),
        (
            f'<|open|>argument key="a" type="array"<|sep|>{"[" * 50_000}<|close|>argument<|sep|>',
            json.dumps({"a": "[" * 50_000}),
        ),
        (
            f'<|open|>argument key="a" type="number"<|sep|>\n{"9" * 9000}\t<|close|>argument<|sep|>',
            f'{{"a": {"9" * 9000}}}',
        ),
        ('<|open|>argument key="a" type="number"<|sep|><|close|>argument<|sep|>', '{"a": ""}'),
        ('<|open|>argument key="a" type="object"<|sep|>[1]<|close|>argument<|sep|>', '{"a": [1]}'),
    ],
    ids=str,
)
def test_odd_arguments(body, arguments):
    assert parse_output(call(body)).tool_calls == [("f", arguments)]


ARGUMENT = '<|open|>argument key="a" type="{}"<|sep|>{}<|close|>argument<|sep|>'
BLOCK = '<|open|>json type="object"<|sep|>{"a":1}<|close|>json<|sep|>'
OPEN_STRING = '<|open|>argument key="a" type="string"<|sep|>x'


@pytest.mark.parametrize(
    ("body", "wire", "whole"),
    [
        (BLOCK, '{"a":1}', None),
        (BLOCK + BLOCK.replace("1", "2"), '{"a":2}', None),
        (BLOCK + ARGUMENT.format("number", "1"), '{"a": 1}', None),
        (ARGUMENT.format("number", "1") + BLOCK, '{"a": 1}', None),
        (ARGUMENT.format("string", ""), '{"a": ""}', None),
        (ARGUMENT.format("object", "{bad"), '{"a": "{bad"}', None),
        ('<|open|>argument key="a" type="number"<|sep|>1', "{}", None),
        ('<|open|>argument key="a"<|sep|>', "{}", None),
        ('<|open|>json type="object"<|sep|>{}', "{}", None),
        ('<|open|>argument type="string"<|sep|>x<|close|>argument<|sep|>', "{}", None),
        (
            '<|open|>argument key="a"<|sep|>x<|close|>json<|sep|><|close|>argument<|sep|>',
            '{"a": "x<|close|>json<|sep|>"}',
            None,
        ),
        # what the model wrote after a string was sent cannot be taken back
        (OPEN_STRING, '{"a": "x"}', "{}"),
        (OPEN_STRING + BLOCK, '{"a": "x"}', '{"a":1}'),
        (OPEN_STRING + ARGUMENT.format("number", "2"), '{"a": "x", "a": 2}', '{"a": 2}'),
        (ARGUMENT.format("number", "1") + ARGUMENT.format("string", "s"), '{"a": 1, "a": "s"}', '{"a": "s"}'),
    ],
    ids=str,
)
def test_streamed_and_whole_arguments(body, wire, whole):
    output = "<|close|>think<|sep|>" + call(body)
    for size in (1, 5, len(output)):
        parser = OutputParser()
        deltas = [d for at in range(0, len(output), size) for d in parser.feed(output[at : at + size])]
        assert joined(deltas + parser.finish())[2] == [("f", wire)]
        assert parser.result().tool_calls == [("f", whole or wire)]


def test_a_string_is_streamed_as_it_comes_and_other_values_at_their_end():
    parser, sent = OutputParser(), []
    output = call(ARGUMENT.format("string", 'é"') + ARGUMENT.replace('"a"', '"b"').format("number", "12"))
    for character in "<|close|>think<|sep|>" + output:
        sent += [list(d["tool_call"].values())[1:] for d in parser.feed(character)]
    assert sent == [["f", ""], ['{"a": "é'], ['\\"'], ['"'], [', "b": 12'], ["}"]]


def test_a_cut_call_stays_incomplete_and_the_next_one_has_the_next_index():
    cut = call(OPEN_STRING).removesuffix("<|close|>call<|sep|>")
    output = cut + call(BLOCK).removeprefix("<|open|>tools<|sep|>")
    parser = OutputParser(thinking=False)
    assert joined(parser.feed(output) + parser.finish())[2] == [("f", '{"a": "x'), ("f", '{"a":1}')]
    assert parser.result().tool_calls == [("f", '{"a":1}')]
    assert parse_output(cut).tool_calls == []


def test_a_call_without_anything_yet_is_not_announced():
    parser = OutputParser(thinking=False)
    assert parser.feed(call("").removesuffix("<|close|>call<|sep|>")) == []
    assert parser.finish() == []


@pytest.mark.parametrize("name", ['tool=""', "", "tool"])
def test_a_call_without_a_name_is_not_streamed(name):
    output = call(BLOCK + OPEN_STRING).replace('tool="f"', name)
    parser = OutputParser(thinking=False)
    assert parser.feed(output) + parser.finish() == []


def test_inactive_tools_are_not_streamed():
    parser = OutputParser(thinking=False, tools_active=False)
    assert parser.feed(call(OPEN_STRING)) + parser.finish() == []


def test_a_character_split_over_tokens_inside_an_argument():
    parser, sent = OutputParser(tok=TINY), []
    for token in TINY.encode("<|close|>think<|sep|>" + call(ARGUMENT.format("string", "é😀")), True):
        sent += parser.feed_ids([token])
    assert joined(sent)[2] == [("f", '{"a": "é😀"}')]
    cut = [*TINY.encode(call(OPEN_STRING).removesuffix("<|close|>call<|sep|>"), True), 0xF0, 0x9F]
    parser = OutputParser(tok=TINY)
    assert joined(parser.feed_ids(cut) + parser.finish())[2] == [("f", '{"a": "x\ufffd')]


def test_lone_surrogates_pass():
    parser = OutputParser(thinking=False)
    deltas = parser.feed("\ud800" + call(ARGUMENT.format("string", "\udc00"))) + parser.finish()
    assert joined(deltas) == (None, "\ud800", [("f", '{"a": "\udc00"}')])


@pytest.mark.parametrize(
    "unit", ["<|", "<|open", "<|open|>", "<|close|>response", "<|open|>call ", " ", "<|open|>call <|sep|>"]
)
@pytest.mark.parametrize(
    "opener", ["", call(OPEN_STRING).removesuffix("<|close|>call<|sep|>"), '<|open|>tools<|sep|><|open|>call tool="f']
)
@pytest.mark.parametrize("as_ids", [False, True])
def test_time_grows_with_the_length_only(unit, opener, as_ids):
    def seconds(count):
        output = opener + unit * count
        if as_ids:
            output = TINY.encode(output, True)
        parser = OutputParser(thinking=False, tok=TINY)
        feed = parser.feed_ids if as_ids else parser.feed
        start = time.thread_time()
        for at in range(0, len(output), 5):
            feed(output[at : at + 5])
        parser.finish()
        parser.result()
        return time.thread_time() - start

    assert seconds(8_000) < 30 * max(seconds(800), 0.001)


def test_a_long_attribute_takes_linear_time():
    start = time.thread_time()
    assert parse_output(call("").replace('index="1"', "a" * 1_000_000)).tool_calls == [("f", "{}")]
    assert time.thread_time() - start < 5


@pytest.mark.parametrize(
    "opener",
    [
        "<|close|>think<|sep|><|open|>response<|sep|>",
        "<|close|>think<|sep|>" + call(OPEN_STRING).removesuffix("<|close|>call<|sep|>"),
    ],
    ids=["content", "argument"],
)
def test_what_was_sent_takes_no_memory(opener):
    parser = OutputParser(tok=TINY, keeps_text=False)
    parser.feed_ids(TINY.encode(opener, True))
    tracemalloc.start()
    for _ in range(1000):
        parser.feed_ids([97] * 1000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200_000


@pytest.mark.parametrize(
    ("script", "thinking", "count"),
    [
        ("abc<|close|>think<|sep|>rest", True, 10),
        ("abc<|open|>response<|sep|>rest", True, 3),
        ("abc<|close|>message<|sep|><|end_of_msg|>", True, 3),
        ("abc<|end_of_msg|>", True, 3),
        ("abc", True, 3),
        ("abc<|close|>response<|sep|>", True, 0),
        ("abc<|close|>response<|sep|>", False, 0),
    ],
)
def test_reasoning_tokens(script, thinking, count):
    parser = OutputParser(thinking, tok=TINY)
    parser.feed_ids(TINY.encode(script, True))
    parser.finish()
    assert parser.reasoning_tokens == count


def test_an_interrupted_character_comes_before_the_marker():
    ids = [0xE4, *TINY.encode("<|close|>think<|sep|>x", True)]
    assert parse_output_ids(ids, TINY) == ("\ufffd", "x", [])
