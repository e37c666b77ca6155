"""The K3 chat format: messages to prompt segments, and model output back to messages.

The prompt is XTML, a markup whose brackets are special tokens. A marker such as
`<|close|>think<|sep|>` is written `C(think)` in comments, `<|open|>think<|sep|>` is `O(think)`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict

from k3lib.errors import RequestError
from k3lib.server.image_parts import image_part
from k3lib.server.tokenizer import IncrementalDecoder

if TYPE_CHECKING:
    from k3lib.server.tokenizer import Tokenizer

__all__ = [
    "ChatFormatError",
    "Delta",
    "OutputParser",
    "ParsedOutput",
    "Segment",
    "ToolCall",
    "check_messages",
    "encode_segments",
    "parse_output",
    "parse_output_ids",
    "render_chat",
    "with_ordered_results",
]

logger = logging.getLogger(__name__)

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

_JSON_SPACE = " \t\n\r"
_TOOL_NAME = re.compile(r"[^\W\d][\w.-]{0,255}")


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


def check_messages(
    messages: Sequence[Message], tools: Sequence[Message] | None = None
) -> tuple[list[Message], list[str]]:
    """Apply the rules of the HTTP API that are stricter or wider than the chat format.

    Returns:
        The messages in the renderer's spelling, and the names of all tools, dynamic ones included.

    Raises:
        ChatFormatError: with `param` "tools" for the request's own tools, else "messages".
    """
    if not messages:
        raise ChatFormatError("messages must not be empty")
    names = _tool_names(tools or [], set(), param="tools")
    result: list[Message] = []
    for position, message in enumerate(messages):
        where = f"messages[{position}]"
        role = "system" if message.get("role") == "developer" else message.get("role")
        changed = {**message, "role": role, "content": _api_content(message.get("content"), where)}
        if message.get("tools") is not None:
            names += _dynamic_names(changed, set(names), where)
        if role == "tool" and not message.get("tool_call_id"):
            raise ChatFormatError(f"{where}: a tool message needs tool_call_id")
        if role == "assistant" and not (message.get("reasoning_content") or message.get("reasoning")):
            logger.debug("%s has no reasoning_content; the model loses its own thinking", where)
        result.append(changed)
    return result, names


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
    while at < len(text) and text[at] in _JSON_SPACE:
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


def _api_content(content: object, where: str) -> object:
    if not isinstance(content, list):
        return content
    parts: list[object] = []
    for index, part in enumerate(content):
        if isinstance(part, Mapping) and part.get("type") in ("text", "input_text"):
            parts.append({**part, "type": "text"})
        else:
            parts.append(image_part(part, f"{where}.content[{index}]"))
    return parts


def _dynamic_names(message: Message, taken: set[str], where: str) -> list[str]:
    tools, content = message["tools"], message.get("content")
    if message["role"] != "system":
        raise ChatFormatError(f"{where}: tools are allowed on system messages only")
    if not isinstance(tools, list):
        raise ChatFormatError(f"{where}: tools must be a list, got {type(tools).__name__}")
    if tools and content:
        raise ChatFormatError(f"{where}: a message with tools must have no content")
    return _tool_names(tools, taken, param="messages")


def _tool_names(tools: Sequence[object], taken: set[str], *, param: str) -> list[str]:
    names: list[str] = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise ChatFormatError("a tool must be an object of type 'function'", param=param)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
            raise ChatFormatError(
                "a tool needs function.name of 1 to 256 letters, digits, '_', '-' or '.', "
                f"starting with a letter or '_', got {str(name)[:80]!r}",
                param=param,
            )
        if name in taken or name in names:
            raise ChatFormatError(f"tool {name!r} is declared twice", param=param)
        names.append(name)
    return names


class ToolCall(NamedTuple):
    """A complete call; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class ParsedOutput(NamedTuple):
    """A whole model output. Empty channels are None."""

    reasoning: str | None
    content: str | None
    tool_calls: list[ToolCall]


class ToolCallDelta(TypedDict):
    """A finished call and its position among the calls of this output."""

    index: int
    name: str
    arguments: str


class Delta(TypedDict, total=False):
    """One piece of a streamed output; holds exactly one of its keys."""

    reasoning: str
    content: str
    tool_call: ToolCallDelta


Mark = Literal["open", "close", "sep", "end"]
_MARK_TEXT: dict[Mark, str] = {
    "open": "<|open|>",
    "close": "<|close|>",
    "sep": "<|sep|>",
    "end": "<|end_of_msg|>",
}
_MARK_OF = {text: mark for mark, text in _MARK_TEXT.items()}
_ANY_MARK = re.compile("|".join(re.escape(text) for text in _MARK_OF))
_ANY_MARK_BUT_SEP = re.compile("|".join(re.escape(t) for m, t in _MARK_TEXT.items() if m != "sep"))

State = Literal["think", "between", "response", "tools", "after"]
Tag = tuple[Literal["open", "close"], str]

_IMPLICIT: frozenset[Tag] = frozenset({("open", "tools"), ("close", "message")})
_TAGS: dict[State, frozenset[Tag]] = {
    "think": _IMPLICIT | {("open", "response"), ("close", "think"), ("close", "response"), ("open", "think")},
    "between": _IMPLICIT | {("open", "response"), ("close", "think"), ("close", "response")},
    "response": _IMPLICIT | {("open", "response"), ("close", "think"), ("close", "response"), ("open", "think")},
    "tools": frozenset(
        {
            ("close", "tools"),
            ("close", "message"),
            ("close", "call"),
            ("close", "argument"),
            ("close", "json"),
            ("open", "call"),
            ("open", "argument"),
            ("open", "json"),
        }
    ),
    "after": frozenset(),
}
_OPENER = re.compile(r"(call|argument|json)\s")
# Unfinished markers that are removed from the end of a channel which nothing closed.
_DANGLING: frozenset[Tag] = frozenset(
    {
        ("open", ""),
        ("open", "think"),
        ("open", "response"),
        ("open", "tools"),
        ("close", ""),
        ("close", "think"),
        ("close", "response"),
        ("close", "tools"),
        ("close", "message"),
    }
)

_ATTRIBUTE = re.compile(r'([^\s="]+)="([^"]*)"')


@dataclass(slots=True)
class _Pending:
    """A marker that has begun: its bracket, the text since, and the tokens seen before it.

    Attributes come in `attributes`, apart from `text`, because they may be long and arrive in pieces.
    """

    mark: Literal["open", "close"]
    tokens_before: int
    text: str = ""
    attributes: list[str] | None = None

    @property
    def tag(self) -> Tag:
        return self.mark, self.text

    @property
    def source(self) -> str:
        return "".join([_MARK_TEXT[self.mark], self.text, *(self.attributes or [])])


@dataclass(slots=True)
class _Call:
    """A call whose closing marker has not come yet."""

    name: str
    arguments: dict[str, str]
    json_block: str | None = None

    def finished(self) -> ToolCall:
        if not self.arguments and self.json_block is not None:
            return ToolCall(self.name, self.json_block)
        members = (f"{_quoted(key)}: {literal}" for key, literal in self.arguments.items())
        return ToolCall(self.name, "{" + ", ".join(members) + "}")


@dataclass(slots=True)
class _Value:
    """An argument or a json block whose closing marker has not come yet."""

    tag: str
    key: str | None
    kind: str
    parts: list[str]


class OutputParser:
    """Splits model output into reasoning, content and tool calls while it arrives.

    With `feed_ids`, markers are recognised only where their special ids stand, so text that merely looks
    like a marker stays text. With `feed`, they are the literal strings. Any chunking gives the same
    concatenated deltas. Nothing that the model writes raises.

    Args:
        thinking: the prompt ended inside the think channel, else inside the response channel.
        tools_active: report tool calls; otherwise the tools channel is read and dropped.
        tok: needed for `feed_ids`.

    Attributes:
        skipped_think: the model answered without thinking. The text that was streamed as reasoning has
            been sent again as content.
        reasoning_tokens: with `feed_ids`, the number of ids that belong to the think channel.
    """

    def __init__(self, thinking: bool = True, tools_active: bool = True, tok: Tokenizer | None = None) -> None:
        self.skipped_think = False
        self._state: State = "think" if thinking else "response"
        self._counts_reasoning = thinking
        self._reasoning_tokens: int | None = None
        self._tools_active = tools_active
        self._tokens = 0
        self._at_start = True
        self._buffer = ""
        # `_stale` is a dangling marker directly before `_pending`.
        self._stale: _Pending | None = None
        self._pending: _Pending | None = None
        # Text since the last marker while it is whitespace only; None once it was more.
        self._between: str | None = ""
        self._call: _Call | None = None
        self._value: _Value | None = None
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        self._deltas: list[Delta] = []
        self._tok = tok
        if tok is not None:
            self._decoder = IncrementalDecoder(tok)
            self._marks: dict[int, Mark] = {tok.special[t]: m for t, m in _MARK_OF.items()}
            self._marks.update(dict.fromkeys(tok.stop_ids, "end"))

    @property
    def reasoning_tokens(self) -> int:
        """Number of ids of the think channel so far, its closing marker included."""
        if not self._counts_reasoning:
            return 0
        return self._tokens if self._reasoning_tokens is None else self._reasoning_tokens

    def feed(self, text: str) -> list[Delta]:
        """Take the next piece of text."""
        self._buffer += text
        at = 0
        while True:
            # <|sep|> only matters while a marker is pending; elsewhere it must not be held back.
            pattern = _ANY_MARK if self._pending else _ANY_MARK_BUT_SEP
            found = pattern.search(self._buffer, at)
            if found is None:
                break
            self._text(self._buffer[at : found.start()])
            at = found.start()
            if self._pending or _MARK_OF[found[0]] != "sep":
                self._mark(_MARK_OF[found[0]])
                at = found.end()
        self._buffer = self._buffer[at:]
        self._feed_unheld()
        if self._pending is None:
            self._feed_unheld()
        return self._take()

    def feed_ids(self, ids: Iterable[int]) -> list[Delta]:
        """Take the next token ids."""
        if self._tok is None:
            raise ValueError("feed_ids needs OutputParser(tok=...)")
        run: list[int] = []
        for token_id in ids:
            mark = self._marks.get(token_id)
            if mark is None:
                run.append(token_id)
                continue
            self._ordinary(run)
            # What an interrupted character left behind belongs before the marker.
            self._text(self._decoder.finish())
            run = []
            if mark != "end":
                self._tokens += 1
            self._mark(mark)
            if mark == "end":
                self._tokens += 1
        self._ordinary(run)
        return self._take()

    def finish(self) -> list[Delta]:
        """Take the end of the output and return what was held back."""
        if self._tok is not None:
            self._text(self._decoder.finish())
        self._text(self._buffer)
        self._buffer = ""
        self._end()
        return self._take()

    def result(self) -> ParsedOutput:
        """Return everything parsed so far."""
        reasoning, content = "".join(self._reasoning), "".join(self._content)
        return ParsedOutput(reasoning or None, content or None, list(self._calls))

    def _feed_unheld(self) -> None:
        size = len(self._buffer) - _held_suffix(self._buffer, with_sep=self._pending is not None)
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        self._text(text)

    def _ordinary(self, run: list[int]) -> None:
        self._tokens += len(run)
        if run:
            self._text(self._decoder.push(run))

    def _take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _text(self, text: str) -> None:
        if not text:
            return
        pending = self._pending
        if pending is None:
            self._emit(text)
        elif pending.attributes is not None:
            pending.attributes.append(text)
        else:
            pending.text += text
            self._split_attributes(pending)
            if pending.attributes is None and not self._is_viable(pending):
                self._release()

    def _mark(self, mark: Mark) -> None:
        if mark == "end":
            self._end()
        elif mark == "sep":
            self._complete()
        else:
            if self._pending is not None and self._pending.tag in _DANGLING:
                stale, self._stale = self._stale, None
                if stale is not None:
                    self._emit(stale.source)
                self._stale = self._pending
            else:
                self._release()
            self._pending = _Pending(mark, self._tokens - 1)

    def _split_attributes(self, pending: _Pending) -> None:
        if self._state != "tools" or pending.mark != "open":
            return
        found = _OPENER.match(pending.text)
        if found is not None:
            pending.text, pending.attributes = found[1], [pending.text[found.end(1) :]]

    def _is_viable(self, pending: _Pending) -> bool:
        tags = _TAGS[self._state] | _DANGLING
        return any(pending.mark == m and name.startswith(pending.text) for m, name in tags)

    def _release(self) -> None:
        """Turn what is pending into text: it was no marker."""
        stale, pending = self._stale, self._pending
        self._stale = self._pending = None
        for part in (stale, pending):
            if part is not None:
                self._emit(part.source)

    def _complete(self) -> None:
        """Act on `<|sep|>`."""
        pending = self._pending
        if pending is None:
            self._emit(_MARK_TEXT["sep"])
            return
        if pending.tag in _TAGS[self._state] and self._accepts(pending.tag):
            self._pending = None
            self._act(pending)
        else:
            self._release()
            self._emit(_MARK_TEXT["sep"])

    def _accepts(self, tag: Tag) -> bool:
        # The opener of the think channel counts only as the first thing of the output.
        return tag != ("open", "think") or (self._at_start and self._stale is None)

    def _act(self, pending: _Pending) -> None:
        tag, stale = pending.tag, self._stale
        self._stale = None
        state = self._state
        if state == "tools":
            if stale is not None:
                self._emit(stale.source)
            if pending.mark == "open":
                self._open_in_tools(pending)
            else:
                self._close_in_tools(pending.text)
            return
        implicit = tag in _IMPLICIT or (state != "response" and tag == ("open", "response"))
        if stale is not None and not implicit:
            self._emit(stale.source)
        self._at_start = False
        self._between = ""
        if tag == ("open", "think"):
            self._state = "think"
        elif state == "think":
            self._leave_think(tag, pending.tokens_before)
        elif tag == ("open", "tools"):
            self._state = "tools"
        elif tag == ("close", "message"):
            self._state = "after"
        elif tag == ("open", "response"):
            self._state = "response"
        elif tag == ("close", "response"):
            self._state = "between"

    def _leave_think(self, tag: Tag, tokens_before: int) -> None:
        if tag == ("close", "response"):
            self.skipped_think = True
            self._reasoning_tokens = 0
            text = "".join(self._reasoning)
            self._reasoning = []
            self._state = "between"
            self._send("content", text)
            return
        is_closed = tag == ("close", "think")
        self._reasoning_tokens = self._tokens if is_closed else tokens_before
        after: dict[Tag, State] = {
            ("close", "think"): "between",
            ("open", "response"): "response",
            ("open", "tools"): "tools",
            ("close", "message"): "after",
        }
        self._state = after[tag]

    def _end(self) -> None:
        stale, pending = self._stale, self._pending
        self._stale = self._pending = None
        if pending is not None and pending.tag not in _DANGLING:
            for part in (stale, pending):
                if part is not None:
                    self._emit(part.source)
        if self._state == "think" and self._reasoning_tokens is None:
            self._reasoning_tokens = self._tokens
        self._between = ""
        self._state = "after"

    def _open_in_tools(self, opener: _Pending) -> None:
        attributes = _parse_attributes("".join(opener.attributes or []))
        # An element that begins inside another one means that the other was never closed.
        self._value = None
        if opener.text == "call":
            self._call = _Call(attributes.get("tool", ""), {})
        elif self._call is not None:
            self._value = _Value(opener.text, attributes.get("key"), attributes.get("type", "string"), [])

    def _close_in_tools(self, name: str) -> None:
        if name in ("argument", "json"):
            self._close_value(name)
            return
        call, self._call, self._value = self._call, None, None
        if name == "call":
            if call is not None and call.name and self._tools_active:
                name, arguments = call.finished()
                delta = ToolCallDelta(index=len(self._calls), name=name, arguments=arguments)
                self._calls.append(ToolCall(name, arguments))
                self._deltas.append({"tool_call": delta})
        else:
            self._state = "after"

    def _close_value(self, name: str) -> None:
        call, value = self._call, self._value
        if call is None or value is None:
            return
        if value.tag != name:
            self._emit(f"{_MARK_TEXT['close']}{name}{_MARK_TEXT['sep']}")
            return
        self._value = None
        text = "".join(value.parts)
        if value.tag == "json":
            call.json_block = text
        elif value.key is not None:
            call.arguments[value.key] = _value_literal(text, value.kind)

    def _emit(self, text: str) -> None:
        self._at_start = False
        if self._state == "think":
            self._send("reasoning", text)
        elif self._state == "response":
            self._send("content", text)
        elif self._state == "tools":
            if self._value is not None:
                self._value.parts.append(text)
        elif self._state == "between":
            self._emit_between(text)

    def _emit_between(self, text: str) -> None:
        # Whitespace between channels is layout; anything else is an answer without its opener.
        if self._between is None:
            self._send("content", text)
            return
        self._between += text
        if self._between and not self._between.isspace():
            text, self._between = self._between, None
            self._send("content", text)

    def _send(self, channel: Literal["reasoning", "content"], text: str) -> None:
        if not text:
            return
        (self._reasoning if channel == "reasoning" else self._content).append(text)
        last = self._deltas[-1] if self._deltas else None
        if channel == "reasoning":
            if last is not None and "reasoning" in last:
                last["reasoning"] += text
            else:
                self._deltas.append({"reasoning": text})
        elif last is not None and "content" in last:
            last["content"] += text
        else:
            self._deltas.append({"content": text})


def parse_output(text: str, *, thinking: bool = True, tools_active: bool = True) -> ParsedOutput:
    """Parse a whole output given as text; markers are their literal strings."""
    parser = OutputParser(thinking, tools_active)
    parser.feed(text)
    parser.finish()
    return parser.result()


def parse_output_ids(
    ids: Iterable[int], tok: Tokenizer, *, thinking: bool = True, tools_active: bool = True
) -> ParsedOutput:
    """Parse a whole output given as token ids; markers are their special ids."""
    parser = OutputParser(thinking, tools_active, tok)
    parser.feed_ids(ids)
    parser.finish()
    return parser.result()


def _held_suffix(text: str, *, with_sep: bool) -> int:
    """Length of the longest suffix of `text` that may be the start of a bracket."""
    marks = [t for m, t in _MARK_TEXT.items() if with_sep or m != "sep"]
    for size in range(min(len(text), max(map(len, marks)) - 1), 0, -1):
        if any(mark.startswith(text[-size:]) and len(mark) > size for mark in marks):
            return size
    return 0


def _parse_attributes(text: str) -> dict[str, str]:
    return {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in _ATTRIBUTE.findall(text)}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _value_literal(text: str, kind: str) -> str:
    """JSON text of an argument: a literal that is valid JSON stays as the model wrote it."""
    if kind == "string":
        return _quoted(text)
    literal = text.strip(_JSON_SPACE)
    try:
        json.loads(literal, parse_constant=_refuse_constant, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return _quoted(text)
    return literal
