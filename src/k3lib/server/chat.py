"""The K3 chat format in one place: messages to prompt segments, and model output back to messages."""

from __future__ import annotations

from k3lib.server.calls import ToolCall
from k3lib.server.messages import check_messages
from k3lib.server.parser import (
    Delta,
    OutputParser,
    ParsedOutput,
    ToolCallDelta,
    parse_output,
    parse_output_ids,
)
from k3lib.server.render import (
    EFFORTS,
    ChatFormatError,
    Segment,
    encode_segments,
    render_chat,
    with_ordered_results,
)

__all__ = [
    "EFFORTS",
    "ChatFormatError",
    "Delta",
    "OutputParser",
    "ParsedOutput",
    "Segment",
    "ToolCall",
    "ToolCallDelta",
    "check_messages",
    "encode_segments",
    "parse_output",
    "parse_output_ids",
    "render_chat",
    "with_ordered_results",
]
