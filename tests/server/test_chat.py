"""The chat format against the published vectors: messages to prompts, and parsed outputs back to prompts."""

from __future__ import annotations

import copy
import json

import pytest

from k3lib.errors import RequestError
from k3lib.server.chat import (
    ChatFormatError,
    check_messages,
    encode_segments,
    parse_output,
    render_chat,
)
from k3lib.server.tokenizer import load_tokenizer

TINY = load_tokenizer()


@pytest.fixture
def renderings(golden):
    return json.loads((golden / "protocol/chat_render.json").read_text(encoding="utf-8"))


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
