"""Log-probabilities in the three shapes that clients know: chat, completions, and `/generate`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from k3lib.server.schemas import ChatLogprobs, ChatToken, ChatTokenTop, CompletionLogprobs
from k3lib.server.tokenizer import IncrementalDecoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3lib.engine.request import TokenLogprob
    from k3lib.server.tokenizer import Tokenizer

__all__ = ["CompletionLogprobWriter", "chat_logprobs", "generate_logprobs"]

LEAST = -9999.0  # stands for minus infinity, which JSON cannot write


def _value(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST


def chat_logprobs(entries: Sequence[TokenLogprob], tok: Tokenizer) -> ChatLogprobs | None:
    """One entry a token, with its text, its bytes and the best tokens of its place; None if there is none."""

    def item(token_id: int, logprob: float) -> ChatTokenTop:
        raw = tok.decode_bytes([token_id])
        return {"token": raw.decode("utf-8", "replace"), "logprob": _value(logprob), "bytes": list(raw)}

    content: list[ChatToken] = [
        {**item(token_id, logprob), "top_logprobs": [item(*pair) for pair in top]} for token_id, logprob, top in entries
    ]
    return ChatLogprobs(content=content, refusal=None) if content else None


class CompletionLogprobWriter:
    """Writes the four lists of `/v1/completions`, part by part in a stream: it knows how far the text has come.

    A token that is no whole text is named by its bytes in hexadecimal, so that different tokens have different names.
    """

    def __init__(self, tok: Tokenizer, hidden: frozenset[int] = frozenset()) -> None:
        """Make a writer; `hidden` are ids that the text leaves out."""
        self._tok = tok
        self._hidden = hidden
        self._decoder = IncrementalDecoder(tok)
        self._offset = 0

    def _name(self, token_id: int) -> str:
        raw = self._tok.decode_bytes([token_id])
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def write(self, ids: Sequence[int], entries: Sequence[TokenLogprob | None]) -> CompletionLogprobs:
        """Add tokens; an entry is None where nothing predicts the token."""
        names: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, entry in zip(ids, entries, strict=True):
            name = self._name(token_id)
            names.append(name)
            offsets.append(self._offset)
            if token_id not in self._hidden:
                self._offset += len(self._decoder.push([token_id]))
            if entry is None:
                values.append(None)
                tops.append(None)
                continue
            values.append(_value(entry.logprob))
            # the token itself is always among them
            best = {self._name(other): _value(logprob) for other, logprob in entry.top}
            tops.append({**best, name: _value(entry.logprob)})
        return CompletionLogprobs(tokens=names, token_logprobs=values, top_logprobs=tops, text_offset=offsets)

    def end_prompt(self) -> None:
        """Close the text of the prompt: the answer begins a new one."""
        self._offset += len(self._decoder.finish())


def generate_logprobs(
    ids: Sequence[int], entries: Sequence[TokenLogprob | None], tok: Tokenizer, *, with_text: bool
) -> tuple[list[list[Any]], list[list[list[Any]] | None]]:
    """Triples of log-probability, id and text (or null), of the tokens and of the best of each place."""

    def triple(token_id: int, logprob: float | None) -> list[Any]:
        return [None if logprob is None else _value(logprob), token_id, tok.decode([token_id]) if with_text else None]

    tokens = [
        triple(token_id, None if entry is None else entry.logprob) for token_id, entry in zip(ids, entries, strict=True)
    ]
    tops = [None if entry is None else [triple(*pair) for pair in entry.top] for entry in entries]
    return tokens, tops
