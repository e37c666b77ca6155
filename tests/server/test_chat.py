"""The chat format against the published vectors, and the promises of the output parser."""

from __future__ import annotations

import copy
import json
import os
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3lib.errors import RequestError
from k3lib.server.chat import (
    ChatFormatError,
    OutputParser,
    ParsedOutput,
    check_messages,
    encode_segments,
    parse_output,
    parse_output_ids,
    render_chat,
)
from k3lib.server.tokenizer import load_tokenizer

TINY = load_tokenizer()
CONTROL = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"]


@cache
def _official():
    default = Path(__file__).parents[2] / "../shared/data/tokenizer"
    folder = Path(os.environ.get("K3LIB_TOKENIZER_DIR", default))
    return load_tokenizer(folder) if (folder / "tiktoken.model").is_file() else None


@pytest.fixture
def official():
    if _official() is None:
        pytest.skip("needs the official tiktoken.model, set K3LIB_TOKENIZER_DIR")
    return _official()


@pytest.fixture
def renderings(golden):
    return json.loads((golden / "protocol/chat_render.json").read_text(encoding="utf-8"))


@pytest.fixture
def outputs(golden):
    return json.loads((golden / "protocol/output_parse.json").read_text(encoding="utf-8"))


def as_dict(parsed):
    return {
        "reasoning": parsed.reasoning,
        "content": parsed.content,
        "tool_calls": [call._asdict() for call in parsed.tool_calls],
    }


def joined(deltas, *, skipped_think=False):
    """What a client assembles from the deltas."""
    reasoning = "".join(d.get("reasoning", "") for d in deltas)
    content = "".join(d.get("content", "") for d in deltas)
    calls = [d["tool_call"] for d in deltas if "tool_call" in d]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    return {
        "reasoning": None if skipped_think else reasoning or None,
        "content": content or None,
        "tool_calls": [{k: call[k] for k in ("name", "arguments")} for call in calls],
    }


def pieces(text, sizes):
    at = 0
    for size in sizes:
        yield text[at : at + size]
        at += size
    yield text[at:]


def text_of(segments):
    return "".join(segment.text for segment in segments)


def test_renderings(renderings):
    for case in renderings["cases"] + renderings["k3lib_cases"]:
        before = copy.deepcopy(case["messages"])
        segments = render_chat(case["messages"], case["tools"], **case["options"])
        name = case["name"]
        assert text_of(segments) == case["prompt"], name
        assert [[s.text, int(s.special)] for s in segments] == case["segments"], name
        assert encode_segments(TINY, segments) == case["tiny_token_ids"], name
        assert case["messages"] == before, name


def test_renderings_with_the_official_vocabulary(renderings, official):
    for case in renderings["cases"] + renderings["k3lib_cases"]:
        segments = render_chat(case["messages"], case["tools"], **case["options"])
        assert encode_segments(official, segments) == case["token_ids"], case["name"]


def test_refused_renderings(renderings):
    for case in renderings["rejects"]:
        with pytest.raises(ChatFormatError):
            render_chat(case["messages"], **case["options"])


def test_a_format_error_is_a_client_error():
    assert issubclass(ChatFormatError, RequestError)
    assert issubclass(ChatFormatError, ValueError)


@pytest.mark.parametrize("effort", ["none", "medium", "xhigh", ""])
def test_unknown_efforts_are_refused(effort):
    with pytest.raises(ChatFormatError, match="must be one of low, high, max") as caught:
        render_chat([], thinking_effort=effort)
    assert caught.value.param == "thinking_effort"


def test_efforts_render_differently():
    prompts = {e: text_of(render_chat([], thinking_effort=e)) for e in ("low", "high", "max", None)}
    assert len(set(prompts.values())) == 4
    assert prompts["max"] == text_of(render_chat([]))


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_request_text_cannot_make_control_tokens(role):
    text = "".join(TINY.special) + "<|kimi_image_placeholder|>"
    message = {"role": role, "content": text, "name": text}
    plain = encode_segments(TINY, render_chat([{"role": role, "content": "", "name": "n"}]))
    ids = encode_segments(TINY, render_chat([message]))
    assert [i for i in ids if i >= TINY.n_base] == [i for i in plain if i >= TINY.n_base]
    assert text in TINY.decode(ids)


def test_notes_about_tools_need_tools():
    assert "tool_choice" not in text_of(render_chat([], tool_choice="none"))
    dynamic = [{"role": "system", "tools": [{"type": "function", "function": {"name": "f"}}]}]
    assert "tool_choice=required" in text_of(render_chat(dynamic, tool_choice="required"))


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([{"role": "user", "content": "x"}], {}, "needs an assistant message at the end"),
        ([], {}, "needs an assistant message at the end"),
        ([{"role": "assistant", "name": "a"}], {}, "with name cannot be continued"),
        (
            [{"role": "assistant", "tool_calls": [{"name": "f"}]}],
            {},
            "with tool_calls cannot be continued",
        ),
        ([{"role": "assistant"}], {"add_generation_prompt": False}, "needs add_generation_prompt"),
    ],
)
def test_what_cannot_be_continued(messages, options, message):
    with pytest.raises(ChatFormatError, match=message):
        render_chat(messages, continue_final_message=True, **options)


@pytest.mark.parametrize(
    ("arguments", "rendered"),
    [
        ('{"a":' + "[" * 100_000, 'json type="object"<|sep|>{"a":[[['),
        ('{"a": ' + "9" * 10_000 + "}", 'key="a" type="number"<|sep|>999'),
    ],
    ids=["deep", "long number"],
)
def test_extreme_arguments_render(arguments, rendered):
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    assert rendered in text_of(render_chat([{"role": "assistant", "tool_calls": calls}]))


def test_output_vectors_as_text(outputs):
    for case in outputs["cases"]:
        flags = {"thinking": case["thinking"], "tools_active": case["tools_active"]}
        parsed = parse_output(case["output"], **flags)
        assert as_dict(parsed) == case["expected"], case["name"]
        chunkings = {**case["chunkings"], "characters": [1] * len(case["output"])}
        for name, sizes in chunkings.items():
            parser = OutputParser(**flags)
            deltas = [d for piece in pieces(case["output"], sizes) for d in parser.feed(piece)]
            deltas += parser.finish()
            assert parser.skipped_think == case["skipped_think"]
            got = joined(deltas, skipped_think=parser.skipped_think)
            assert got == case["expected"], (case["name"], name)
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
            got = joined(deltas, skipped_think=parser.skipped_think)
            assert got == case["expected"], case["name"]


def test_text_that_looks_like_markers_stays_text_in_token_mode(outputs, official):
    for case in outputs["token_mode_cases"]:
        parsed = parse_output_ids(case["token_ids"], official, thinking=case["thinking"])
        assert as_dict(parsed) == case["expected"], case["name"]


def test_a_parsed_turn_renders_to_its_own_tokens(outputs):
    for case in outputs["cases"]:
        if not case.get("rerenders_to_output"):
            continue
        parsed = parse_output(case["output"], thinking=case["thinking"])
        calls = [{"function": call._asdict()} for call in parsed.tool_calls]
        message = {"role": "assistant", "content": parsed.content, "tool_calls": calls}
        message["reasoning_content"] = parsed.reasoning
        user, thinking = {"role": "user", "content": "q"}, case["thinking"]
        before = render_chat([user], thinking=thinking)
        after = render_chat([user, message], thinking=thinking)
        assert text_of(after).startswith(text_of(before) + case["output"]), case["name"]
        # One output holds bracket names inside an argument: as request text they are no brackets.
        if case["name"] != "string_contains_partial_markers":
            turn = encode_segments(TINY, before) + TINY.encode(case["output"], True)
            assert encode_segments(TINY, after)[: len(turn)] == turn, case["name"]


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
    st.sampled_from([*CONTROL, *TAGS, "a", "1", " ", "\n", "<|", "<|ope", "n|>", "é", "😀", "[BOS]"]),
)
SCRIPTS = st.lists(FRAGMENTS, max_size=14).map("".join)


@given(SCRIPTS, st.booleans(), st.booleans(), st.data())
def test_chunking_of_text_changes_nothing(script, thinking, tools_active, data):
    whole = parse_output(script, thinking=thinking, tools_active=tools_active)
    parser, deltas = OutputParser(thinking, tools_active), []
    sizes = data.draw(st.lists(st.integers(1, 12), max_size=len(script)))
    for piece in pieces(script, sizes):
        deltas += parser.feed(piece)
    deltas += parser.finish()
    assert parser.result() == whole
    assert joined(deltas, skipped_think=parser.skipped_think) == as_dict(whole)


@given(SCRIPTS, st.booleans(), st.booleans(), st.data())
def test_chunking_of_ids_changes_nothing(script, thinking, tools_active, data):
    ids = TINY.encode(script, allow_special=True)
    whole = parse_output_ids(ids, TINY, thinking=thinking, tools_active=tools_active)
    parser, deltas, at = OutputParser(thinking, tools_active, TINY), [], 0
    while at < len(ids):
        size = data.draw(st.integers(1, 9))
        deltas += parser.feed_ids(ids[at : at + size])
        at += size
    deltas += parser.finish()
    assert parser.result() == whole
    assert joined(deltas, skipped_think=parser.skipped_think) == as_dict(whole)
    assert 0 <= parser.reasoning_tokens <= len(ids)


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
    assert joined(parser.feed(fed))["content"] == delivered


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


def test_api_messages_are_brought_into_the_renderers_spelling():
    tool = {"type": "function", "function": {"name": "f"}}
    messages = [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}], "tools": None},
        {"role": "developer", "tools": [tool], "content": []},
    ]
    checked, names = check_messages(messages, [{"type": "function", "function": {"name": "g"}}])
    assert names == ["g", "f"]
    assert [m["role"] for m in checked] == ["system", "system"]
    assert checked[0]["content"] == [{"type": "text", "text": "a"}]
    assert messages[0]["role"] == "developer"
