"""The K3 tokenizer: byte-level BPE over a rank file, or the built-in byte tokenizer of the tests."""

from __future__ import annotations

import base64
import binascii
import codecs
import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from k3lib.errors import ConfigError, RequestError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = ["IncrementalDecoder", "Tokenizer", "load_tokenizer"]

RANK_FILE_SHA256 = "b6c497a7469b33ced9c38afb1ad6e47f03f5e5dc05f15930799210ec050c5103"

NUM_SPECIAL = 256

# Offset from `n_base`; every other offset is a reserved token.
NAMED_SPECIAL = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}
STOP_OFFSETS = (2, 1, 9)
BRACKET_OFFSETS = (3, 4, 5)

PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

PIECE_CHARS = 400_000
RUN_CHARS = 25_000

# `\s` of a str pattern is exactly str.isspace().
_RUNS = re.compile(r"\s+|\S+")

_REPLACEMENT = "\ufffd".encode()


class Codec(Protocol):
    """Turns ordinary text into base ids; knows nothing of special tokens."""

    def __call__(self, text: str) -> list[int]:
        """Encode text that contains no special token."""
        ...


class _TokenBytes(dict[int, bytes]):
    """Bytes of each token; an id outside the vocabulary is U+FFFD."""

    def __missing__(self, token_id: int) -> bytes:
        return _REPLACEMENT


class Tokenizer:
    """Maps text to token ids and back. Safe to share between threads.

    Attributes:
        n_base: number of ordinary tokens; the 256 special ids follow.
        vocab_size: `n_base + 256`.
        special: name of each special token -> id.
        stop_ids: ids that end a turn, `<|end_of_msg|>` first.
        hidden_ids: ids that `skip_special_tokens` leaves out of a text: the named ones but for the brackets.
        ascii_tokens: id -> text of the ordinary tokens that are plain ASCII, which need no decoder.
    """

    def __init__(self, codec: Codec, base_bytes: Sequence[bytes], special_names: Mapping[int, str]) -> None:
        self.n_base = len(base_bytes)
        self.vocab_size = self.n_base + NUM_SPECIAL
        self.stop_ids = tuple(self.n_base + offset for offset in STOP_OFFSETS)
        self.hidden_ids = frozenset(self.n_base + i for i in NAMED_SPECIAL if i not in BRACKET_OFFSETS)
        names = {i: special_name(self.n_base, i) for i in range(self.n_base, self.vocab_size)}
        names.update(special_names)
        self.special = {name: i for i, name in names.items()}
        if len(self.special) != NUM_SPECIAL:
            raise ConfigError(f"need {NUM_SPECIAL} different special tokens, found {len(self.special)}")
        self._codec = codec
        self._bytes = _TokenBytes(enumerate([*base_bytes, *(names[i].encode() for i in sorted(names))]))
        self.ascii_tokens = {i: data.decode() for i, data in enumerate(base_bytes) if data.isascii()}
        # Longest first, so that no name hides another one that starts with it.
        ordered = sorted(self.special, key=len, reverse=True)
        self._special_pattern = re.compile(f"({'|'.join(map(re.escape, ordered))})")

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Encode `text`.

        Args:
            text: any string; lone surrogates become U+FFFD.
            allow_special: map the names of special tokens to their ids. Only for text that the
                library wrote itself: text from a request must not be able to make control tokens.
        """
        ids: list[int] = []
        for piece in _pieces(_encodable(text)):
            if not allow_special:
                ids += self._codec(piece)
                continue
            for i, part in enumerate(self._special_pattern.split(piece)):
                if i % 2:
                    ids.append(self.special[part])
                elif part:
                    ids += self._codec(part)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids, special tokens as their names.

        Bytes that are not UTF-8 give one U+FFFD per maximal ill-formed subpart. So does an id outside
        the vocabulary, because a model may have more rows than its tokenizer has tokens.
        """
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Concatenate the bytes of the tokens."""
        return b"".join(map(self._bytes.__getitem__, ids))


class IncrementalDecoder:
    """Decodes a growing list of ids, holding back an incomplete UTF-8 tail.

    Attributes:
        is_whole: nothing is held back.
    """

    def __init__(self, tok: Tokenizer) -> None:
        self.is_whole = True
        self._tok = tok
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Take new ids and return the text that is now certain."""
        data = self._tok.decode_bytes(ids)
        if self.is_whole and data.isascii():  # the usual case, several times as fast
            return data.decode()
        text = self._utf8.decode(data)
        self.is_whole = not self._utf8.getstate()[0]
        return text

    def finish(self) -> str:
        """Return what is left, an incomplete character as U+FFFD. The decoder is then empty."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        self.is_whole = True
        return rest


def load_tokenizer(path: str | os.PathLike[str] | None = None, *, verify: bool = False) -> Tokenizer:
    """Load the tokenizer of a checkpoint folder. Never uses the network.

    Args:
        path: a folder with `tiktoken.model` and, optionally, `tokenizer_config.json`. None or
            "bytes" gives the built-in byte tokenizer of the tiny models, which needs no file.
        verify: check that the rank file is the published one.

    Raises:
        ConfigError: the folder, the rank file or the configuration is not what it should be.
    """
    if path is None or path == "bytes":
        return Tokenizer(_encode_bytes, [bytes([i]) for i in range(256)], {})
    folder = Path(path)
    file = folder / "tiktoken.model"
    if not file.is_file():
        raise ConfigError(
            f"no tokenizer at {folder}: need a folder with tiktoken.model, or 'bytes' for the built-in tokenizer"
        )
    data = file.read_bytes()
    if verify and (digest := hashlib.sha256(data).hexdigest()) != RANK_FILE_SHA256:
        raise ConfigError(f"{file} has SHA-256 {digest}, expected {RANK_FILE_SHA256}")
    base_bytes = _read_ranks(data, file)
    special_names = _read_special_names(folder / "tokenizer_config.json", len(base_bytes))
    return Tokenizer(_tiktoken_codec(base_bytes), base_bytes, special_names)


def special_name(n_base: int, token_id: int) -> str:
    """Name of a special id by its offset; reserved names carry the absolute id."""
    return NAMED_SPECIAL.get(token_id - n_base, f"<|reserved_token_{token_id}|>")


def check_ids(tok: Tokenizer, ids: Sequence[int], *, param: str) -> None:
    """Raise RequestError if an id is outside the vocabulary."""
    if ids and not (min(ids) >= 0 and max(ids) < tok.vocab_size):
        bad = next(i for i in ids if not 0 <= i < tok.vocab_size)
        raise RequestError(f"token id {bad} is not in 0..{tok.vocab_size - 1}", param=param)


def _encode_bytes(text: str) -> list[int]:
    return list(text.encode())


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _pieces(text: str) -> Iterator[str]:
    """Cut where the published encoder cuts; the cuts decide ids, so they are part of the format."""
    for start in range(0, len(text), PIECE_CHARS):
        piece = text[start : start + PIECE_CHARS]
        begin = 0
        if len(piece) > RUN_CHARS:
            for run in _RUNS.finditer(piece):
                for cut in range(run.start() + RUN_CHARS, run.end(), RUN_CHARS):
                    yield piece[begin:cut]
                    begin = cut
        yield piece[begin:]


def _read_ranks(data: bytes, file: Path) -> list[bytes]:
    tokens: dict[int, bytes] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        if not line:
            continue
        try:
            encoded, rank_text = line.split()
            token, rank = base64.b64decode(encoded, validate=True), int(rank_text)
        except (ValueError, binascii.Error) as error:
            raise ConfigError(f"{file} line {number}: expected '<base64> <rank>', found {line[:60]!r}") from error
        if rank in tokens:
            raise ConfigError(f"{file} line {number}: rank {rank} occurs twice")
        tokens[rank] = token
    missing = next((rank for rank in range(len(tokens)) if rank not in tokens), None)
    if missing is not None:
        raise ConfigError(f"{file}: ranks must be dense from 0, found {len(tokens)} ranks without rank {missing}")
    base_bytes = [tokens[rank] for rank in range(len(tokens))]
    distinct = set(base_bytes)
    if len(distinct) != len(base_bytes):
        raise ConfigError(f"{file}: {len(base_bytes) - len(distinct)} tokens occur twice")
    absent = [i for i in range(256) if bytes([i]) not in distinct]
    if absent:
        raise ConfigError(f"{file}: expected all 256 single bytes, {len(absent)} are missing, first {absent[0]}")
    return base_bytes


def _read_special_names(file: Path, n_base: int) -> dict[int, str]:
    if not file.is_file():
        return {}
    try:
        added = json.loads(file.read_text(encoding="utf-8")).get("added_tokens_decoder", {})
        names = {int(key): entry["content"] for key, entry in added.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file}: added_tokens_decoder must map ids to objects with 'content'") from error
    for token_id, name in names.items():
        if not n_base <= token_id < n_base + NUM_SPECIAL:
            raise ConfigError(
                f"{file}: special id {token_id} is outside {n_base}..{n_base + NUM_SPECIAL - 1}, "
                f"the ids after the {n_base} ranks"
            )
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{file}: special id {token_id} needs a name, found {name!r}")
    return names


def _tiktoken_codec(base_bytes: Sequence[bytes]) -> Codec:
    try:
        # Here and not at the top: the byte tokenizer must work without the server extra.
        import tiktoken  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            "a rank file needs the package tiktoken, which is not installed; install k3lib[server]"
        ) from error
    ranks = {token: rank for rank, token in enumerate(base_bytes)}
    encoding = tiktoken.Encoding("kimi_k3", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    return encoding.encode_ordinary
