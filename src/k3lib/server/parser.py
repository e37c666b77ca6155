"""The output side of the K3 chat format: model output to reasoning, content and tool calls, while it arrives.

A marker such as `<|close|>think<|sep|>` is written `C(think)` in comments, `<|open|>think<|sep|>` is `O(think)`.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict

from k3lib.server.calls import CallWriter, ToolCall
from k3lib.server.tokenizer import IncrementalDecoder

if TYPE_CHECKING:
    from collections.abc import Iterable

    from k3lib.server.tokenizer import Tokenizer

__all__ = ["Delta", "OutputParser", "ParsedOutput", "ToolCallDelta", "parse_output", "parse_output_ids"]


class ParsedOutput(NamedTuple):
    """A whole model output. Empty channels are None."""

    reasoning: str | None
    content: str | None
    tool_calls: list[ToolCall]


class ToolCallDelta(TypedDict, total=False):
    """A piece of the call at `index`: first its name with empty arguments, then fragments of their JSON text."""

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
_MARKS = tuple(_MARK_OF)
_MARKS_BUT_SEP = tuple(text for text, mark in _MARK_OF.items() if mark != "sep")
_ANY_MARK = re.compile("|".join(map(re.escape, _MARKS)))
_ANY_MARK_BUT_SEP = re.compile("|".join(map(re.escape, _MARKS_BUT_SEP)))
_LONGEST_START = max(map(len, _MARKS)) - 1

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

# What a pending marker may be so far.
_STARTS: dict[State, frozenset[Tag]] = {
    state: frozenset((mark, name[:size]) for mark, name in tags | _DANGLING for size in range(len(name) + 1))
    for state, tags in _TAGS.items()
}

# A name begins where another cannot go on; without the lookbehind, a long run of letters takes quadratic time.
_ATTRIBUTE = re.compile(r'(?<![^\s="])([^\s="]+)="([^"]*)"')


@dataclass(slots=True)
class _Pending:
    """A marker that has begun: its bracket, the text since, and the tokens seen before it.

    Its attributes come apart from `text`, because they may be long and arrive in pieces.
    """

    mark: Literal["open", "close"]
    tokens_before: int
    text: str = ""
    attributes: io.StringIO | None = None

    @property
    def tag(self) -> Tag:
        return self.mark, self.text

    @property
    def source(self) -> str:
        return _MARK_TEXT[self.mark] + self.text + self.attribute_text

    @property
    def attribute_text(self) -> str:
        return "" if self.attributes is None else self.attributes.getvalue()


class OutputParser:
    """Splits model output into reasoning, content and tool calls while it arrives.

    With `feed_ids`, markers are recognised only where their special ids stand, so text that merely looks
    like a marker stays text. With `feed`, they are the literal strings. Any chunking gives the same
    concatenated deltas. Nothing that the model writes raises.

    A call with short arguments is one delta when it ends. Longer arguments come as they are written, behind the
    name (`CallWriter` says when). Such a call may then never end: its `arguments` stay without their closing brace,
    and the next call has the next index. `result` has complete calls only.

    Args:
        thinking: the prompt ended inside the think channel, else inside the response channel.
        tools_active: report tool calls; otherwise the tools channel is read and dropped.
        tok: needed for `feed_ids`.
        keeps_text: keep what `result` returns. Without, memory holds the reasoning until it ends, because an
            answer without thinking sends it again, and of the rest one value that is not a string.

    Attributes:
        skipped_think: the model answered without thinking. The text that was streamed as reasoning has
            been sent again as content.
        reasoning_tokens: with `feed_ids`, the number of ids that belong to the think channel.
        num_calls: complete calls so far.
    """

    def __init__(
        self,
        thinking: bool = True,
        tools_active: bool = True,
        tok: Tokenizer | None = None,
        *,
        keeps_text: bool = True,
    ) -> None:
        self.skipped_think = False
        self.num_calls = 0
        self._state: State = "think" if thinking else "response"
        self._counts_reasoning = thinking
        self._reasoning_tokens: int | None = None
        self._tools_active = tools_active
        self._keeps_text = keeps_text
        self._tokens = 0
        self._at_start = True
        # The end of the text so far that may be the start of a bracket.
        self._held = ""
        # `_stale` is a dangling marker directly before `_pending`.
        self._stale: _Pending | None = None
        self._pending: _Pending | None = None
        # Text since the last marker while it is whitespace only; None once it was more.
        self._between: io.StringIO | None = io.StringIO()
        self._call: CallWriter | None = None
        self._num_announced = 0
        self._reasoning = io.StringIO()
        self._content = io.StringIO()
        self._calls: list[ToolCall] = []
        self._deltas: list[Delta] = []
        # Text for the next delta in pieces, and where it belongs: a channel, or the arguments of the last call.
        self._pieces: list[str] = []
        self._channel: Literal["reasoning", "content", "arguments"] = "content"
        self._tok = tok
        if tok is not None:
            self._decoder = IncrementalDecoder(tok)
            self._marks: dict[int, Mark] = {tok.special[t]: m for t, m in _MARK_OF.items()}
            self._marks.update(dict.fromkeys(tok.stop_ids, "end"))
            self._mark_ids = frozenset(self._marks)
            self._ascii_tokens = tok.ascii_tokens

    @property
    def reasoning_tokens(self) -> int:
        """Number of ids of the think channel so far, its closing marker included."""
        if not self._counts_reasoning:
            return 0
        return self._tokens if self._reasoning_tokens is None else self._reasoning_tokens

    def feed(self, text: str) -> list[Delta]:
        """Take the next piece of text."""
        if self._held:
            text = self._held + text
            self._held = ""
        if self._pending is None and "<|" not in text:  # as every bracket begins
            if text.endswith("<"):
                self._held, text = "<", text[:-1]
            return self._plain(text)
        at = 0
        while True:
            # <|sep|> only matters while a marker is pending; elsewhere it must not be held back.
            pattern = _ANY_MARK if self._pending else _ANY_MARK_BUT_SEP
            found = pattern.search(text, at)
            if found is None:
                break
            self._text(text[at : found.start()])
            at = found.start()
            if self._pending or _MARK_OF[found[0]] != "sep":
                self._mark(_MARK_OF[found[0]])
                at = found.end()
        self._unheld(text[at:])
        if self._pending is None and self._held:
            # The text before may have released what was pending.
            self._unheld(self._held)
        return self._take()

    def feed_ids(self, ids: Iterable[int]) -> list[Delta]:
        """Take the next token ids."""
        if self._tok is None:
            raise ValueError("feed_ids needs OutputParser(tok=...)")
        if not isinstance(ids, list):
            ids = list(ids)
        if self._pending is None:
            if len(ids) == 1 and self._decoder.is_whole and (text := self._ascii_tokens.get(ids[0])) is not None:
                self._tokens += 1
                return self._plain(text)
            if self._mark_ids.isdisjoint(ids):
                self._tokens += len(ids)
                return self._plain(self._decoder.push(ids))
        marks = self._marks
        run: list[int] = []
        for token_id in ids:
            if token_id not in marks:
                run.append(token_id)
                continue
            self._ordinary(run)
            run = []
            # What an interrupted character left behind belongs before the marker.
            self._text(self._decoder.finish())
            mark = marks[token_id]
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
        self._text(self._held)
        self._held = ""
        self._end()
        return self._take()

    def result(self) -> ParsedOutput:
        """Return everything parsed so far."""
        if not self._keeps_text:
            raise ValueError("result needs OutputParser(keeps_text=True)")
        return ParsedOutput(self._reasoning.getvalue() or None, self._content.getvalue() or None, list(self._calls))

    def _plain(self, text: str) -> list[Delta]:
        """Take text without brackets while no marker is pending.

        `_emit` would do. But nearly every call of a stream comes here, often for one token, and half of its time would
        go into the detour.
        """
        state = self._state
        if not text:
            return []
        self._at_start = False
        if state == "think":
            self._reasoning.write(text)
            return [{"reasoning": text}]
        if state == "response":
            if self._keeps_text:
                self._content.write(text)
            return [{"content": text}]
        if state == "tools" and self._call is not None:
            text = self._call.push(text)
            if text and self._call.is_announced:
                return [{"tool_call": {"index": self._num_announced - 1, "arguments": text}}]
            self._send_arguments(self._call, text)
            return self._take()
        self._emit(text)
        return self._take()

    def _unheld(self, text: str) -> None:
        size = len(text) - _held_suffix(text, with_sep=self._pending is not None)
        self._held = text[size:]
        self._text(text[:size])

    def _ordinary(self, run: list[int]) -> None:
        if run:
            self._tokens += len(run)
            self._text(self._decoder.push(run))

    def _take(self) -> list[Delta]:
        if self._pieces:
            self._flush()
        deltas, self._deltas = self._deltas, []
        return deltas

    def _flush(self) -> None:
        """Make a delta of the pieces."""
        text = "".join(self._pieces)
        self._pieces = []
        if self._channel == "reasoning":
            self._deltas.append({"reasoning": text})
        elif self._channel == "content":
            self._deltas.append({"content": text})
        else:
            self._deltas.append({"tool_call": {"index": self._num_announced - 1, "arguments": text}})

    def _text(self, text: str) -> None:
        if not text:
            return
        pending = self._pending
        if pending is None:
            self._emit(text)
        elif pending.attributes is not None:
            pending.attributes.write(text)
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
            pending.attributes = io.StringIO()
            pending.attributes.write(pending.text[found.end(1) :])
            pending.text = found[1]

    def _is_viable(self, pending: _Pending) -> bool:
        return pending.tag in _STARTS[self._state]

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
        self._between = io.StringIO()
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
            self._state = "between"
            text = self._reasoning.getvalue()
            self._reasoning = io.StringIO()
            self._send("content", text)
            return
        if not self._keeps_text:
            self._reasoning = io.StringIO()
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
        self._between = io.StringIO()
        self._state = "after"

    def _open_in_tools(self, opener: _Pending) -> None:
        attributes = _parse_attributes(opener.attribute_text)
        tag = opener.text
        if tag in ("argument", "json"):
            if self._call is not None:
                self._send_arguments(self._call, self._call.open(tag, attributes))
            return
        # A call that begins inside another one means that the other was never closed.
        name = attributes.get("tool", "")
        self._call = None
        if name and self._tools_active:
            self._call = CallWriter(name, keeps_text=self._keeps_text)

    def _close_in_tools(self, tag: str) -> None:
        call = self._call
        if tag in ("argument", "json"):
            if call is None:
                return
            if call.is_within_another(tag):
                self._emit(f"{_MARK_TEXT['close']}{tag}{_MARK_TEXT['sep']}")
            else:
                self._send_arguments(call, call.close())
            return
        self._call = None
        if tag != "call":
            self._state = "after"
        elif call is not None:
            self._send_arguments(call, call.finish())
            self.num_calls += 1
            if self._keeps_text:
                self._calls.append(call.call())

    def _send_arguments(self, call: CallWriter, text: str) -> None:
        """Send a fragment, the first one behind the name."""
        if text and not call.is_announced:
            call.is_announced = True
            if self._pieces:
                self._flush()
            self._deltas.append({"tool_call": {"index": self._num_announced, "name": call.name, "arguments": ""}})
            self._num_announced += 1
        self._send("arguments", text)

    def _emit(self, text: str) -> None:
        self._at_start = False
        state = self._state
        if state == "think":
            self._reasoning.write(text)
            self._send("reasoning", text)
        elif state == "response":
            self._send("content", text)
        elif state == "tools":
            if self._call is not None:
                self._send_arguments(self._call, self._call.push(text))
        elif state == "between":
            self._emit_between(text)

    def _emit_between(self, text: str) -> None:
        # Whitespace between channels is layout; anything else is an answer without its opener.
        if self._between is None:
            self._send("content", text)
            return
        self._between.write(text)
        if not text.isspace():
            text, self._between = self._between.getvalue(), None
            self._send("content", text)

    def _send(self, channel: Literal["reasoning", "content", "arguments"], text: str) -> None:
        if not text:
            return
        if channel == "content" and self._keeps_text:
            self._content.write(text)
        if self._pieces and self._channel != channel:
            self._flush()
        self._channel = channel
        self._pieces.append(text)


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
    at = text.rfind("<", -_LONGEST_START)
    if at < 0:
        return 0
    tail = text[at:]
    marks = _MARKS if with_sep else _MARKS_BUT_SEP
    return len(tail) if any(mark.startswith(tail) and mark != tail for mark in marks) else 0


def _parse_attributes(text: str) -> dict[str, str]:
    return {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in _ATTRIBUTE.findall(text)}
