"""A tool call while the model writes it: JSON text in fragments, and the whole call at its end."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from json.encoder import encode_basestring as _quoted
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CallWriter", "ToolCall"]

JSON_SPACE = " \t\n\r"
HELD = 32  # characters of arguments that come in one piece with the name, however broken the markup is


class ToolCall(NamedTuple):
    """A complete call; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


@dataclass(slots=True)
class _Value:
    """An argument or a json block whose closing marker has not come yet.

    Attributes:
        text: what it holds so far, of a string its JSON text; None if nobody will ask.
        is_sent: a fragment with its key went out.
    """

    tag: str
    key: str
    is_string: bool
    text: io.StringIO | None
    is_sent: bool = False


class CallWriter:
    """Writes the arguments of one call. `open`, `push`, `close` and `finish` return the JSON text to send.

    Short arguments are sent when the call ends. Once they are longer than `HELD`, the text of a string is sent as it
    comes, and a key when its string begins or its value ends. A json block, which counts only if there are no
    arguments, is sent at the end of the call. The fragments concatenate to `call().arguments`, but for what long
    arguments leave behind where markup is not well-formed: of a key that comes twice both values, and the beginning of
    a string that is not closed.

    Args:
        name: of the tool.
        keeps_text: keep what `call` needs, which is the size of the arguments.

    Attributes:
        is_announced: the reader's mark that the name went out.
    """

    def __init__(self, name: str, *, keeps_text: bool) -> None:
        self.name = name
        self.is_announced = False
        self._keeps_text = keeps_text
        self._held: list[str] | None = []  # None once they are sent as they come
        self._num_held = 0
        self._literals: dict[str, str] = {}
        self._block: str | None = None
        self._has_members = False
        self._value: _Value | None = None

    def open(self, tag: str, attributes: Mapping[str, str]) -> str:
        """Begin an argument or a json block. It ends an open one, which then counts no longer."""
        end = self._send(self._abandon())
        key = attributes.get("key")
        if tag == "json":
            self._value = _Value(tag, "", False, io.StringIO())
        elif key is not None:
            is_string = attributes.get("type", "string") == "string"
            keeps = self._keeps_text or not is_string or self._held is not None
            self._value = _Value(tag, key, is_string, io.StringIO() if keeps else None)
        return end

    def push(self, text: str) -> str:
        """Take text; outside elements it means nothing."""
        value = self._value
        if value is None:
            return ""
        if value.is_string:
            text = _quoted(text)[1:-1]
        if value.text is not None:
            value.text.write(text)
        if self._held is None and value.is_sent:
            return text
        if not value.is_string:
            return ""
        return self._send(text if value.is_sent else self._begin(value) + text)

    def is_within_another(self, tag: str) -> bool:
        """Whether an element that is not a `tag` is open, so that the end of one is text."""
        return self._value is not None and self._value.tag != tag

    def close(self) -> str:
        """End the open element, if there is one."""
        value, self._value = self._value, None
        if value is None:
            return ""
        text = "" if value.text is None else value.text.getvalue()
        if value.tag == "json":
            self._block = text
            return ""
        if value.is_string:
            literal, rest = f'"{text}"', ("" if value.is_sent else self._begin(value)) + '"'
        else:
            literal = _literal(text)
            rest = self._key(value) + literal
        if self._keeps_text or self._held is not None:
            self._literals[value.key] = literal
        return self._send(rest)

    def finish(self) -> str:
        """End the call."""
        if self._held is not None:
            return self.call().arguments
        end = self._abandon()
        if self._has_members:
            return end + "}"
        return "{}" if self._block is None else self._block

    def call(self) -> ToolCall:
        """The whole call after its end; needs `keeps_text`."""
        if not self._literals and self._block is not None:
            return ToolCall(self.name, self._block)
        members = (f"{_quoted(key)}: {literal}" for key, literal in self._literals.items())
        return ToolCall(self.name, "{" + ", ".join(members) + "}")

    def _send(self, text: str) -> str:
        """Hold text back while there is little of it."""
        if self._held is None:
            return text
        self._held.append(text)
        self._num_held += len(text)
        if self._num_held <= HELD:
            return ""
        text, self._held = "".join(self._held), None
        if not self._keeps_text:
            self._literals = {}
            if self._value is not None and self._value.is_string:
                self._value.text = None
        return text

    def _key(self, value: _Value) -> str:
        before = ", " if self._has_members else "{"
        self._has_members = True
        return f"{before}{_quoted(value.key)}: "

    def _begin(self, value: _Value) -> str:
        value.is_sent = True
        return self._key(value) + '"'

    def _abandon(self) -> str:
        value, self._value = self._value, None
        return '"' if value is not None and value.is_sent else ""


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _literal(text: str) -> str:
    """JSON text of a value: what is valid JSON stays as the model wrote it, anything else is a string."""
    literal = text.strip(JSON_SPACE)
    try:
        json.loads(literal, parse_constant=_refuse_constant, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return _quoted(text)
    return literal
