"""Messages of an HTTP request: what the API checks beyond the chat format."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from k3lib.server.image_parts import image_part
from k3lib.server.render import ChatFormatError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3lib.server.render import Message

logger = logging.getLogger(__name__)

_TOOL_NAME = re.compile(r"[^\W\d][\w.-]{0,255}")


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
