"""The prompt side of the K3 chat format: messages to prompt segments.

The prompt is XTML, a markup whose brackets `<|open|>`, `<|close|>` and `<|sep|>` are special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from k3lib.errors import RequestError
from k3lib.server.calls import JSON_SPACE

if TYPE_CHECKING:
    from k3lib.server.tokenizer import Tokenizer

Message = Mapping[str, object]

EFFORTS = ("low", "high", "max")
IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"

_DECLARATION = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
_EXTENSION = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n"
)
_EFFORT_NOTE = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={effort}`."
)
_CHOICE_NOTES = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_FORMAT_NOTE = (
    "The system is invoked with `response_format={kind}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional "
    "formatting."
)
_SCHEMA_NOTE = "\nThe JSON data must match the following schema:\n"


class ChatFormatError(RequestError):
    """A conversation that the chat format cannot express."""

    def __init__(self, message: str, *, param: str | None = "messages") -> None:
        super().__init__(message, param=param)


class Segment(NamedTuple):
    """A part of a prompt that is encoded on its own; `special` allows special tokens in it."""

    text: str
    special: bool = False


def render_chat(  # noqa: PLR0913 - the options of the published encoder, one keyword each
    messages: Sequence[Message],
    tools: Sequence[Message] | None = None,
    *,
    thinking: bool = True,
    thinking_effort: str | None = "max",
    add_generation_prompt: bool = True,
    tool_choice: str | Message | None = None,
    response_format: Message | None = None,
    image_prompts: Sequence[str] | None = None,
    continue_final_message: bool = False,
) -> list[Segment]:
    """Render a conversation as prompt segments.

    Args:
        messages: roles `system`, `user`, `assistant` and `tool`. They are not changed.
        tools: OpenAI tool objects, rendered whole.
        thinking: write the think channel of assistant messages and open one at the end.
        thinking_effort: `low`, `high` or `max`; None writes no note. Ignored without `thinking`.
        add_generation_prompt: end with the opening of an assistant message.
        tool_choice: `required` and `none` add a note if there are tools.
        response_format: `json_object` and `json_schema` add a note.
        image_prompts: the ready image blocks in prompt order; None renders a placeholder each.
        continue_final_message: let the model go on with the last message, which is the assistant's.

    Raises:
        ChatFormatError: the conversation or an option cannot be rendered.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ChatFormatError(f"messages must be a list, got {type(messages).__name__}")
    for position, message in enumerate(messages):
        _check_message(message, position)
    final: Message | None = None
    if continue_final_message:
        if not add_generation_prompt:
            raise ChatFormatError("continue_final_message needs add_generation_prompt", param="continue_final_message")
        messages, final = _split_final(messages)
    images = _Images(image_prompts)
    segments = [
        *_preamble(tools, thinking_effort if thinking else None),
        *_history(with_ordered_results(messages), thinking, images),
        *_notes(_has_tools(messages, tools), tool_choice, response_format),
    ]
    if add_generation_prompt:
        segments += _open("message", role="assistant")
        segments += _open("think" if thinking else "response")
    if final is not None:
        segments += _continuation(final, thinking, images)
    images.check_all_used()
    return [segment for segment in segments if segment.text]


def encode_segments(tok: Tokenizer, segments: Iterable[Segment]) -> list[int]:
    """Encode each segment on its own and concatenate the ids."""
    ids: list[int] = []
    for text, special in segments:
        ids += tok.encode(text, allow_special=special)
    return ids


def _open(tag: str, **attributes: object) -> Iterator[Segment]:
    yield Segment("<|open|>", True)
    yield Segment(tag)
    for key, value in attributes.items():
        yield Segment(f" {key}")
        yield Segment('="')
        yield Segment(str(value).replace("&", "&amp;").replace('"', "&quot;"))
        yield Segment('"')
    yield Segment("<|sep|>", True)


def _close(tag: str) -> Iterator[Segment]:
    yield Segment("<|close|>", True)
    yield Segment(tag)
    yield Segment("<|sep|>", True)


def _element(tag: str, body: Iterable[Segment], **attributes: object) -> Iterator[Segment]:
    yield from _open(tag, **attributes)
    yield from body
    yield from _close(tag)


def _message(body: Iterable[Segment], **attributes: object) -> Iterator[Segment]:
    yield from _element("message", body, **attributes)
    yield Segment("<|end_of_msg|>", True)


def _system(kind: str, text: str) -> Iterator[Segment]:
    return _message([Segment(text)], role="system", type=kind)


def _fenced(value: object, param: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatFormatError(f"{param} is not plain JSON: {error}", param=param) from error
    return f"```json\n{text}\n```"


class _Images:
    """Hands out the image blocks in prompt order."""

    def __init__(self, prompts: Sequence[str] | None) -> None:
        self._prompts = prompts
        self._used = 0

    def next(self) -> Segment:
        self._used += 1
        if self._prompts is None:
            return Segment(IMAGE_PLACEHOLDER, True)
        if self._used > len(self._prompts):
            raise ChatFormatError(f"{len(self._prompts)} image prompts for more image parts")
        return Segment(self._prompts[self._used - 1], True)

    def check_all_used(self) -> None:
        if self._prompts is not None and self._used != len(self._prompts):
            raise ChatFormatError(f"{len(self._prompts)} image prompts for {self._used} image parts")


def _check_message(message: object, position: int) -> None:
    if not isinstance(message, Mapping):
        raise ChatFormatError(f"messages[{position}] must be an object, got {type(message).__name__}")
    if message.get("role") not in ("system", "user", "assistant", "tool"):
        raise ChatFormatError(
            f"messages[{position}]: role must be system, user, assistant or tool, got {message.get('role')!r}"
        )


def _split_final(messages: Sequence[Message]) -> tuple[Sequence[Message], Message]:
    if not messages or messages[-1]["role"] != "assistant":
        raise ChatFormatError("continue_final_message needs an assistant message at the end")
    final = messages[-1]
    for field in ("tool_calls", "name"):
        if final.get(field):
            raise ChatFormatError(f"a message with {field} cannot be continued")
    return messages[:-1], final


def _preamble(tools: Sequence[Message] | None, effort: str | None) -> Iterator[Segment]:
    if tools is not None and (isinstance(tools, str) or not isinstance(tools, Sequence)):
        raise ChatFormatError(f"tools must be a list, got {type(tools).__name__}", param="tools")
    if tools:
        yield from _system("tool-declare", _DECLARATION + _fenced(tools, "tools"))
    if effort is not None:
        if effort not in EFFORTS:
            raise ChatFormatError(
                f"thinking_effort must be one of {', '.join(EFFORTS)}, got {effort!r}",
                param="thinking_effort",
            )
        yield from _system("thinking-effort", _EFFORT_NOTE.format(effort=effort))


def _has_tools(messages: Sequence[Message], tools: Sequence[Message] | None) -> bool:
    return bool(tools) or any(m["role"] == "system" and m.get("tools") for m in messages)


def _notes(has_tools: bool, tool_choice: str | Message | None, response_format: Message | None) -> Iterator[Segment]:
    if isinstance(tool_choice, str) and tool_choice != "auto":
        if tool_choice not in _CHOICE_NOTES:
            raise ChatFormatError(
                f"tool_choice must be auto, none, required or a function, got {tool_choice!r}",
                param="tool_choice",
            )
        if has_tools:
            yield from _system("tool-choice", _CHOICE_NOTES[tool_choice])
    if response_format is None:
        return
    kind = response_format.get("type")
    if kind == "text":
        return
    if kind not in ("json_object", "json_schema"):
        raise ChatFormatError(
            f"response_format.type must be text, json_object or json_schema, got {kind!r}",
            param="response_format",
        )
    note = _FORMAT_NOTE.format(kind=kind)
    if kind == "json_schema":
        note += _SCHEMA_NOTE + _fenced(_schema_of(response_format), "response_format")
    yield from _system("response-format", note)


def _schema_of(response_format: Message) -> object:
    schema = response_format.get("json_schema")
    if isinstance(schema, Mapping):
        for key in ("schema", "json_schema"):
            if key in schema:
                return schema[key]
    return schema


def _history(messages: Sequence[Message], thinking: bool, images: _Images) -> Iterator[Segment]:
    calls: list[object] = []
    results = 0
    for message in messages:
        role = message["role"]
        names = {"name": message["name"]} if message.get("name") else {}
        if role == "tool":
            results += 1
            yield from _message(
                _content(message, images),
                role="tool",
                tool=_result_name(message, calls, results),
                index=results,
            )
        elif role == "assistant":
            calls, results = _calls_of(message), 0
            yield from _message(_assistant_body(message, calls, thinking, images), role=role, **names)
        elif role == "system" and message.get("tools"):
            yield from _system("tool-declare", _EXTENSION + _fenced(message["tools"], "messages"))
        else:
            yield from _message(_content(message, images), role=role, **names)


def _content(message: Message, images: _Images) -> Iterator[Segment]:
    content = message.get("content")
    if content is None:
        return
    if isinstance(content, str):
        yield Segment(content)
        return
    if not isinstance(content, list | tuple):
        raise ChatFormatError(f"content must be a string or a list of parts, got {type(content).__name__}")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind is None:
            raise ChatFormatError("a content part must be an object with a type")
        if kind in ("image", "image_url"):
            yield images.next()
        elif isinstance(part.get("text"), str):
            yield Segment(part["text"])
        else:
            raise ChatFormatError(f"unsupported content type {kind!r}: the part has no text")


def _reasoning(message: Message) -> list[Segment]:
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning is None:
        return []
    if not isinstance(reasoning, str):
        raise ChatFormatError(f"reasoning_content must be a string, got {type(reasoning).__name__}")
    return [Segment(reasoning)]


def _assistant_body(message: Message, calls: Sequence[object], thinking: bool, images: _Images) -> Iterator[Segment]:
    if thinking:
        yield from _element("think", _reasoning(message))
    yield from _element("response", _content(message, images))
    if calls:
        yield from _open("tools")
        for index, call in enumerate(calls, start=1):
            name, arguments = _function(call)
            yield from _element("call", _arguments(arguments), tool=name, index=index)
        yield from _close("tools")


def _continuation(final: Message, thinking: bool, images: _Images) -> list[Segment]:
    content = [segment for segment in _content(final, images) if segment.text]
    if not thinking:
        return content
    reasoning = _reasoning(final)
    if not content:
        return reasoning
    return [*reasoning, *_close("think"), *_open("response"), *content]


def _calls_of(message: Message) -> list[object]:
    calls = message.get("tool_calls")
    if calls is None:
        return []
    if not isinstance(calls, list | tuple):
        raise ChatFormatError(f"tool_calls must be a list, got {type(calls).__name__}")
    return list(calls)


def _function(call: object) -> tuple[str, object]:
    """Name and arguments of a call; the `function` wrapper is optional."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise ChatFormatError("a tool call must be an object with a function name")
    return name, function.get("arguments")


def _arguments(arguments: object) -> Iterator[Segment]:
    if arguments is None or arguments == "":
        return
    if isinstance(arguments, str):
        members = _literal_members(arguments)
        if members is None:
            yield from _element("json", [Segment(arguments)], type="object")
            return
    elif isinstance(arguments, Mapping):
        members = [_member(str(key), value) for key, value in arguments.items()]
    else:
        raise ChatFormatError(f"arguments must be a string or an object, got {type(arguments).__name__}")
    for key, kind, text in members:
        yield from _element("argument", [Segment(text)], key=key, type=kind)


def _member(key: str, value: object) -> tuple[str, str, str]:
    if isinstance(value, str):
        return key, "string", value
    kinds = {bool: "boolean", int: "number", float: "number", type(None): "null"}
    kind = kinds.get(type(value))
    if kind is None:
        kind = "object" if isinstance(value, Mapping) else "array"
    try:
        return key, kind, json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatFormatError(f"argument {key!r} is not plain JSON: {error}") from error


# Numbers stay text: their literals are rendered as they are, and huge ones need no conversion.
_LENIENT = json.JSONDecoder(strict=False, parse_int=str, parse_float=str)
_KINDS = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}


def _literal_members(text: str) -> list[tuple[str, str, str]] | None:
    """Read a JSON object one level deep, keeping the literals of its values; None if it is not one.

    Text after the closing brace is ignored and duplicate keys are kept, as in the published encoder.
    """
    members: list[tuple[str, str, str]] = []
    at = _skip_space(text, 0)
    if text[at : at + 1] != "{":
        return None
    at = _skip_space(text, at + 1)
    if text[at : at + 1] == "}":
        return members
    try:
        while True:
            if text[at : at + 1] != '"':
                return None
            key, at = _LENIENT.raw_decode(text, at)
            at = _skip_space(text, at)
            if text[at : at + 1] != ":":
                return None
            start = _skip_space(text, at + 1)
            value, at = _LENIENT.raw_decode(text, start)
            kind = _KINDS.get(text[start], "number")
            members.append((key, kind, value if kind == "string" else text[start:at]))
            at = _skip_space(text, at)
            if text[at : at + 1] == "}":
                return members
            if text[at : at + 1] != ",":
                return None
            at = _skip_space(text, at + 1)
    except (ValueError, RecursionError):
        return None


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in JSON_SPACE:
        at += 1
    return at


def with_ordered_results(messages: Sequence[Message]) -> list[Message]:
    """The messages in the order of the prompt: each run of tool results by the calls they answer, if all name one."""
    result: list[Message] = []
    calls: list[object] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        if message["role"] != "tool":
            if message["role"] == "assistant":
                calls = _calls_of(message)
            result.append(message)
            at += 1
            continue
        end = at
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        result += _ordered_run(messages[at:end], calls)
        at = end
    return result


def _ordered_run(run: Sequence[Message], calls: Sequence[object]) -> Sequence[Message]:
    positions: dict[str, int] = {}
    for position, call in enumerate(calls):
        if isinstance(call, Mapping) and call.get("id") is not None:
            positions.setdefault(str(call["id"]), position)
    matched: list[tuple[int, Message]] = []
    for message in run:
        call_id = message.get("tool_call_id")
        call_id = message.get("id") if call_id is None else call_id
        found = None if call_id is None else positions.get(str(call_id))
        if found is None:
            return run
        name, _ = _function(calls[found])
        renamed = {**message, "tool": name}
        if "name" in message:
            renamed["name"] = name
        matched.append((found, renamed))
    return [message for _, message in sorted(matched, key=lambda pair: pair[0])]


def _result_name(message: Message, calls: Sequence[object], index: int) -> str:
    name = message["tool"] if "tool" in message else message.get("name")
    if name is not None:
        return str(name)
    if index <= len(calls):
        return _function(calls[index - 1])[0]
    raise ChatFormatError("a tool message needs a tool_call_id of an earlier call, or a tool name")
