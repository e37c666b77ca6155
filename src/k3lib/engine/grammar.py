"""What an output must be: grammars of K3's channels, and the tokens they allow next.

The only module that knows llguidance, and it imports it when a grammar is compiled. A grammar describes the output
behind the think channel (protocol specification, section 4); markup is the very tokens that the chat format writes, so
text that merely looks like a marker is text.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib.util
import itertools
import json
import logging
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import torch

from k3lib.engine.lark import NOTHING, UNSATISFIABLE, write_grammar
from k3lib.engine.schema import read_parameters, read_response
from k3lib.errors import ConfigError, RequestError

if TYPE_CHECKING:
    import llguidance
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = [
    "CompiledGrammar",
    "Grammar",
    "GrammarCompiler",
    "Matcher",
    "ToolRule",
    "Vocabulary",
    "allowed_tokens",
    "build_grammar",
    "build_text_grammar",
    "grammar_accepts",
    "is_available",
]

logger = logging.getLogger(__name__)

_JSON_OBJECT = '{"type":"object"}'
_NO_ARGUMENTS = {"type": "object", "additionalProperties": False}


class Vocabulary(Protocol):
    """What a grammar needs of a tokenizer; `k3lib.server.tokenizer.Tokenizer` is one."""

    def __hash__(self) -> int:
        """Tell it from others."""
        ...

    @property
    def n_base(self) -> int:
        """Number of ordinary tokens; the special ones follow."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of all tokens."""
        ...

    @property
    def special(self) -> Mapping[str, int]:
        """Special tokens by name."""
        ...

    @property
    def stop_ids(self) -> Sequence[int]:
        """Ids that end a turn, the one that the model was trained to end it with first."""
        ...

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Encode text."""
        ...

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Concatenate the bytes of tokens."""
        ...


# ---- what is wanted -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRule:
    """A tool that may be called. `parameters` is the text of the schema that its arguments obey; None = any."""

    name: str
    parameters: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What an output must be, in terms of K3's channels. A value: it has a hash and is plain JSON by `asdict`.

    Attributes:
        response: text of the schema that the response obeys; None is any text.
        tools: what may be called.
        calls: whether there is a tools channel.
        parallel: allow more than one call.
        thinking: the output begins inside the think channel, where nothing is constrained but its end.
        tools_only: constrain nothing before the tools channel opens.
        prefix: response text that the prompt ends with.
        channels: the output has channels; without, it is the response and nothing else.
        pattern: regular expression that the whole of a response without channels obeys; None is any text.
    """

    response: str | None = None
    tools: tuple[ToolRule, ...] = ()
    calls: Literal["none", "optional", "required"] = "none"
    parallel: bool = True
    thinking: bool = True
    tools_only: bool = False
    prefix: str = ""
    channels: bool = True
    pattern: str | None = None

    @property
    def is_hint(self) -> bool:
        """Whether nobody asked for it: it keeps calls well-formed, and an engine may do without."""
        return self.tools_only and self.parallel

    @property
    def is_forced(self) -> bool:
        """Whether a turn that ends without an answer breaks it."""
        return self.response is not None or self.calls == "required"

    @property
    def param(self) -> str:
        """The request field that it comes from."""
        if not self.channels:
            return "sampling_params"
        if self.response is not None:
            return "response_format"
        if self.calls == "required":
            return "tool_choice"
        return "tools" if any(tool.parameters is not None for tool in self.tools) else "parallel_tool_calls"


def build_grammar(
    tools: Sequence[Mapping[str, object]] | None,
    tool_choice: str | Mapping[str, object] | None,
    *,
    parallel_tool_calls: bool = True,
    thinking: bool = True,
    response_format: Mapping[str, object] | None = None,
    prefix: str = "",
) -> Grammar | None:
    """Return what a chat request asks of the output, or None if it asks for nothing.

    Args:
        tools: OpenAI tool objects, those of system messages included.
        tool_choice: `auto`, `none`, `required` or the object that names a function; None is `auto`.
        parallel_tool_calls: allow more than one call.
        thinking: the prompt ends inside the think channel, else inside the response channel.
        response_format: `json_object` and `json_schema` constrain the response, unless `strict` is false.
        prefix: response text that the prompt ends with.

    Raises:
        RequestError: the fields contradict each other, or a schema is malformed or not supported.
    """
    kind = (response_format or {}).get("type")
    response = _response_schema(response_format or {})
    chosen = [tool for tool in tools or () if tool_choice != "none"]
    name: str | None = None
    if isinstance(tool_choice, Mapping):
        function = tool_choice.get("function")
        name = str(function.get("name")) if isinstance(function, Mapping) else ""
        chosen = [tool for tool in chosen if _function(tool).get("name") == name]
    is_forced = name is not None or tool_choice == "required"
    if is_forced and not chosen:
        wanted = "a call" if name is None else f"the function {name!r}"
        raise RequestError(f"tool_choice asks for {wanted}, which is not among the tools", param="tool_choice")
    if is_forced and kind in ("json_object", "json_schema"):
        raise RequestError("a forced tool call and a JSON response exclude each other", param="response_format")
    rules = tuple(_tool_rule(tool) for tool in chosen)
    if not rules and response is None:
        return None
    grammar = Grammar(
        response=response,
        tools=rules,
        calls="required" if is_forced else "optional" if rules else "none",
        parallel=parallel_tool_calls,
        thinking=thinking,
        prefix=prefix,
    )
    is_free = response is None and not is_forced and all(rule.parameters is None for rule in rules)
    return dataclasses.replace(grammar, tools_only=True) if is_free else grammar


def build_text_grammar(*, json_schema: object = None, pattern: str | None = None) -> Grammar:
    """Return what a text without channels must be: the JSON of a schema, or what a regular expression matches.

    Args:
        json_schema: a schema, or its text.
        pattern: has to match the whole of the text.

    Raises:
        RequestError: both or none of them, or a schema that is malformed or not supported.
    """
    if (json_schema is None) == (pattern is None):
        raise RequestError("give either json_schema or regex", param="sampling_params")
    if pattern is not None:
        return Grammar(thinking=False, channels=False, pattern=pattern)
    if isinstance(json_schema, str):
        try:
            json_schema = json.loads(json_schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"json_schema is no JSON: {str(error)[:120]}", param="sampling_params") from error
    read_response(json_schema, param="sampling_params", where="json_schema")
    return Grammar(thinking=False, channels=False, response=_dumped(json_schema))


def _function(tool: Mapping[str, object]) -> Mapping[str, object]:
    function = tool.get("function")
    return function if isinstance(function, Mapping) else {}


def _response_schema(response_format: Mapping[str, object]) -> str | None:
    kind = response_format.get("type")
    if kind == "json_object":
        return _JSON_OBJECT
    if kind != "json_schema":
        return None
    wrapper = response_format.get("json_schema")
    if not isinstance(wrapper, Mapping) or "schema" not in wrapper:
        raise RequestError("response_format.json_schema needs a schema", param="response_format")
    if wrapper.get("strict") is False:
        return None
    read_response(wrapper["schema"])
    return _dumped(wrapper["schema"])


def _tool_rule(tool: Mapping[str, object]) -> ToolRule:
    function = _function(tool)
    name, parameters = str(function.get("name")), function.get("parameters")
    if not function.get("strict"):
        return ToolRule(name=name)
    wanted = _NO_ARGUMENTS if parameters is None else parameters
    read_parameters(name, wanted)
    return ToolRule(name=name, parameters=_dumped(wanted))


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


# ---- compiled -----------------------------------------------------------------------------------

_TAGS = (("close", "think"), ("open", "response"), ("open", "tools"), ("close", "response"), ("close", "message"))
_LONGEST_TAG = 8  # bytes


def is_available() -> bool:
    """Whether grammars can be compiled here."""
    return importlib.util.find_spec("llguidance") is not None


def _library(param: str) -> Any:  # noqa: ANN401 - a module
    try:
        # Here and not at the top: everything else works without the package.
        import llguidance  # noqa: PLC0415
    except ImportError as error:
        raise RequestError(
            f"{param} needs constrained decoding with the package llguidance, which is not installed; install "
            "k3lib[server]",
            param=param,
        ) from error
    return llguidance


class _Tokens:
    """Tokens in the form that llguidance asks for."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, tokens: list[bytes]) -> None:
        self.eos_token_id = vocabulary.stop_ids[0]
        self.tokens = tokens
        self.special_token_ids = list(range(vocabulary.n_base, vocabulary.vocab_size))
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


class _Machinery:
    """llguidance with the tokens of one vocabulary."""

    def __init__(self, vocabulary: Vocabulary, library: Any) -> None:  # noqa: ANN401
        self.vocab_size = vocabulary.vocab_size
        self.num_words = -(-self.vocab_size // 32)
        self.encode = vocabulary.encode
        self.stop_id = vocabulary.stop_ids[0]
        self.marks = {mark: vocabulary.special[f"<|{mark}|>"] for mark in ("open", "close", "sep")}
        self.mark_of = {token: mark for mark, token in self.marks.items()}
        self.tokens = [vocabulary.decode_bytes([i]) for i in range(self.vocab_size)]
        names = [name.encode() for _, name in _TAGS]
        self.fragments = {
            token: i
            for i, token in enumerate(self.tokens[: vocabulary.n_base])
            if len(token) <= _LONGEST_TAG and any(token in name for name in names)
        }
        self._library = library
        self._limits = library.LLParserLimits(verbose_errors=False)
        source = library.TokenizerWrapper(_Tokens(vocabulary, self.tokens))
        self._tokenizer = library.LLTokenizer(source, eos_token=self.stop_id)
        self._executor: llguidance.LLExecutor | None = None

    def start(self, text: str) -> tuple[llguidance.LLMatcher, str | None]:
        """Compile a grammar; with the machine comes why nothing matches it, or None if something may."""
        machine = self._library.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if machine.is_error():
            return machine, _reason(machine.get_error())
        row = np.zeros((1, self.num_words), dtype=np.uint32)
        self.fill([(machine.deep_copy(), 0)], row)
        return machine, None if row.any() else f"{UNSATISFIABLE}: {NOTHING}"

    def trouble(self, text: str) -> str | None:
        """Why nothing matches a grammar; None if something may."""
        return self.start(text)[1]

    def terminal(self, regex: str) -> str:
        """A regular expression as JSON Schema has them, to be matched as a whole."""
        return f"/{self._library.regex_to_lark(regex, 'dw')}/"

    def fill(self, machines: Sequence[tuple[llguidance.LLMatcher, int]], rows: NDArray[np.uint32]) -> None:
        """Set the bits of what each machine allows next in its row; none if it is stuck."""
        if len(machines) == 1:
            machine, row = machines[0]
            machine.unsafe_compute_mask_ptr(rows[row].ctypes.data, 4 * self.num_words)
        else:
            if self._executor is None:
                self._executor = self._library.LLExecutor(min(8, os.cpu_count() or 1))
            self._executor.unsafe_compute_mask_ptr(list(machines), rows.ctypes.data, 4 * self.num_words, len(rows))
        word, bit = divmod(self.stop_id, 32)
        for machine, row in machines:
            # a machine that is stuck allows the stop id, as if all were well
            rows[row, word] &= ~np.uint32(1 << bit)
            if machine.is_error():
                rows[row] = 0
                logger.warning("a grammar is stuck: %s", _reason(machine.get_error()))
            elif machine.is_accepting():
                rows[row, word] |= np.uint32(1 << bit)


def _reason(error: str) -> str:
    """The first sentence of an error message of llguidance."""
    text = error.split("<state>")[0]
    lines = [line.strip() for line in text.splitlines() if not re.match(r"\s*\d* \||[\s^]+$", line)]
    text = re.sub(r"^at \d+\(\d+\): |failed to compile JSON schema: ", "", " ".join(lines).strip())
    return "too large" if text.startswith("panic") else text[:200]


class CompiledGrammar:
    """A grammar with the machine that follows it. Shared by its requests, and never changed.

    Attributes:
        grammar: what was compiled.
        machinery: what follows it.
        stop_ids: ids that end a request.
        size: characters of its text.
    """

    def __init__(
        self,
        grammar: Grammar,
        machinery: _Machinery,
        machine: llguidance.LLMatcher,
        stop_ids: Sequence[int],
        size: int,
    ) -> None:
        self.grammar = grammar
        self.machinery = machinery
        self.stop_ids = tuple(stop_ids)
        self.size = size
        self._machine = machine
        self._entries = self._find_entries()
        self._barred = self._find_barred()

    def machine(self, seen: Sequence[int] = ()) -> llguidance.LLMatcher:
        """Make a machine that has seen these ids."""
        machine = self._machine.deep_copy()
        if machine.try_consume_tokens(list(seen)) != len(seen):
            raise AssertionError("a grammar begins with its own markers")
        return machine

    def entry(self, mark: str, name: bytes) -> tuple[int, ...] | None:
        """What the machine has to see when a marker begins the grammar; None if the marker does not."""
        return self._entries.get((mark, name))

    def barred(self, pending: tuple[str, bytes] | None) -> tuple[int, ...]:
        """Ids that would end the turn in the think channel, behind text or behind the beginning of a marker."""
        if not self.grammar.is_forced:
            return ()
        return self.stop_ids if pending is None else self.stop_ids + self._barred.get(pending, ())

    def _find_entries(self) -> dict[tuple[str, bytes], tuple[int, ...]]:
        marks, encode, grammar = self.machinery.marks, self.machinery.encode, self.grammar

        def ids(mark: str, tag: str) -> tuple[int, ...]:
            return marks[mark], *encode(tag), marks["sep"]

        opener = ids("open", "response")
        empty = opener + ids("close", "response")
        entries: dict[tuple[str, bytes], tuple[int, ...]] = {}
        if grammar.calls != "none":
            entries["open", b"tools"] = empty + ids("open", "tools")
        if not grammar.tools_only:
            entries["close", b"think"] = ()
            entries["open", b"response"] = opener
            if not grammar.is_forced:
                entries["close", b"response"] = empty
                entries["close", b"message"] = empty + ids("close", "message")
        return entries

    def _find_barred(self) -> dict[tuple[str, bytes], tuple[int, ...]]:
        """Ids that lead the beginning of a marker to one that ends the turn, and to no other."""
        found: dict[tuple[str, bytes], set[int]] = {}
        for mark, tag in _TAGS:
            name = tag.encode()
            if (mark, name) in self._entries:
                continue
            good = [other.encode() for m, other in _TAGS if m == mark and (m, other.encode()) in self._entries]
            good += [b"think"] * (mark == "open")  # an echo of the opener in the prompt
            found.setdefault((mark, name), set()).add(self.machinery.marks["sep"])
            for begin in range(len(name)):
                for end in range(begin + 1, len(name) + 1):
                    token = self.machinery.fragments.get(name[begin:end])
                    if token is not None and not any(other.startswith(name[:end]) for other in good):
                        found.setdefault((mark, name[:begin]), set()).add(token)
        return {key: tuple(sorted(ids)) for key, ids in found.items()}


class Matcher:
    """Where a request stands in its grammar. It depends on the token ids alone, so a preemption changes nothing.

    Inside the think channel nothing is constrained, except that a grammar that asks for an answer keeps the channel
    from ending the turn. A marker that ends the channel begins the grammar, also where the think close is missing.
    """

    __slots__ = ("_begin", "_compiled", "_entry", "_ids", "_is_ended", "_is_stuck", "_machine", "_mark")

    def __init__(self, compiled: CompiledGrammar) -> None:
        self._compiled = compiled
        self._ids: list[int] = []
        self._is_ended = False
        self._is_stuck = False
        self._mark: tuple[str, bytes] | None = None  # a marker that has begun in front of the grammar
        self._begin = 0  # tokens in front of the grammar
        self._entry: tuple[int, ...] = ()  # what the machine saw in their place
        grammar = compiled.grammar
        self._machine = None if grammar.thinking or grammar.tools_only else compiled.machine()

    @property
    def num_tokens(self) -> int:
        """Tokens that were accepted."""
        return len(self._ids)

    @property
    def num_words(self) -> int:
        """32-bit words that hold a bit for each token of the tokenizer."""
        return self._compiled.machinery.num_words

    @property
    def is_finished(self) -> bool:
        """Whether the output was ended."""
        return self._is_ended

    @property
    def is_stuck(self) -> bool:
        """Whether nothing at all was allowed when it was last asked."""
        return self._is_stuck

    @property
    def can_stop(self) -> bool:
        """Whether the output may end here."""
        if self._machine is None:
            return not self._compiled.grammar.is_forced
        return not self._machine.is_error() and self._machine.is_accepting()

    @property
    def must_stop(self) -> bool:
        """Whether the output can only end here."""
        return self._machine is not None and self._machine.is_stopped() and self.can_stop

    @property
    def constrains(self) -> bool:
        """Whether some token is not allowed next."""
        return self._machine is not None or self._compiled.grammar.is_forced

    def accept(self, token: int) -> bool:
        """Take the next token; False if it is not allowed, and then nothing has changed."""
        if self._is_ended:
            return False
        machinery = self._compiled.machinery
        if self._machine is None:
            if not self._follow(token):
                return False
        elif token == machinery.stop_id:
            if not self.can_stop:
                return False
            self._is_ended = True
        elif (
            not 0 <= token < machinery.vocab_size
            or self._machine.is_error()
            or self._machine.try_consume_tokens([token]) != 1
        ):
            return False
        self._ids.append(token)
        return True

    def _follow(self, token: int) -> bool:
        """Take a token in front of the grammar."""
        machinery = self._compiled.machinery
        if self.constrains and (token in self._compiled.barred(self._mark) or not 0 <= token < machinery.vocab_size):
            return False
        pending, self._mark = self._mark, self._next_mark(token)
        if pending is not None and token == machinery.marks["sep"]:
            seen = self._compiled.entry(*pending)
            if seen is not None:
                self._machine = self._compiled.machine(seen)
                self._begin, self._entry = len(self._ids) + 1, seen
        return True

    def _next_mark(self, token: int) -> tuple[str, bytes] | None:
        machinery = self._compiled.machinery
        mark = machinery.mark_of.get(token)
        if mark is not None:
            return None if mark == "sep" else (mark, b"")
        if self._mark is None or not 0 <= token < machinery.vocab_size:
            return None
        name = self._mark[1] + machinery.tokens[token]
        return (self._mark[0], name) if len(name) <= _LONGEST_TAG else None

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens."""
        if not 0 <= num_tokens <= len(self._ids):
            raise ConfigError(f"rollback: num_tokens={num_tokens} of {len(self._ids)} that were accepted")
        if num_tokens == 0:
            return
        keep = len(self._ids) - num_tokens
        if self._machine is None or keep < self._begin:
            self._machine, self._begin, self._entry = None, 0, ()
        elif self._machine.is_error() or not self._machine.rollback(num_tokens - self._is_ended):
            self._machine = self._compiled.machine([*self._entry, *self._ids[self._begin : keep]])
        self._is_ended = self._is_stuck = False
        del self._ids[keep:]
        if self._machine is None:
            self._mark = None
            for token in self._ids[-_LONGEST_TAG - 1 :]:
                self._mark = self._next_mark(token)

    def clone(self) -> Matcher:
        """Make an independent copy."""
        copy = Matcher.__new__(Matcher)
        copy._compiled, copy._ids, copy._is_ended = self._compiled, list(self._ids), self._is_ended
        copy._mark, copy._begin, copy._entry, copy._is_stuck = self._mark, self._begin, self._entry, self._is_stuck
        copy._machine = None if self._machine is None else self._machine.deep_copy()
        return copy

    @staticmethod
    def fill(matchers: Sequence[Matcher], rows: NDArray[np.uint32]) -> None:
        """Set the bits of the tokens that each matcher allows next in its row, and clear the others.

        Args:
            matchers: of one compiler.
            rows: `[len(matchers), num_words]`, contiguous.
        """
        machines = []
        for i, matcher in enumerate(matchers):
            if matcher._machine is None:
                matcher._fill_front(rows[i])
            else:
                machines.append((matcher._machine, i))
        if machines:
            matchers[0]._compiled.machinery.fill(machines, rows)
        for matcher, row in zip(matchers, rows, strict=True):
            matcher._is_stuck = not row.any()

    def _fill_front(self, row: NDArray[np.uint32]) -> None:
        row[:] = 0xFFFFFFFF
        for token in self._compiled.barred(self._mark):
            word, bit = divmod(token, 32)
            if word < len(row):
                row[word] &= ~np.uint32(1 << bit)


class GrammarCompiler:
    """Compiles grammars and keeps the last ones. Safe to share between threads."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        vocab_size: int | None = None,
        *,
        stop_ids: Sequence[int] = (),
        max_entries: int = 256,
        max_bytes: int = 64 << 20,
    ) -> None:
        """Make a compiler.

        Args:
            vocabulary: the tokenizer.
            vocab_size: of the model, which may have more ids than the tokenizer; these are never allowed.
            stop_ids: ids that end a request besides those of the tokenizer.
            max_entries, max_bytes: what to keep.
        """
        self._vocabulary = vocabulary
        self._vocab_size = vocabulary.vocab_size if vocab_size is None else vocab_size
        self._stop_ids = tuple(dict.fromkeys([*vocabulary.stop_ids, *stop_ids]))
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._kept: collections.OrderedDict[Grammar, CompiledGrammar] = collections.OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._machinery: _Machinery | None = None

    @property
    def num_kept(self) -> int:
        """Grammars that need not be compiled again."""
        return len(self._kept)

    def matcher(self, grammar: object) -> Matcher:
        """Make the state of a request that has generated nothing. Raises what `compile` does."""
        return Matcher(self.compile(grammar))

    def compile(self, grammar: object) -> CompiledGrammar:
        """Compile a grammar, or find it among the last ones. Takes milliseconds; for many strict tools a second.

        Raises:
            RequestError: this is no grammar, or has a schema that is not supported, that nothing matches or that is too
                large, or a text to continue that breaks it; or a package is missing.
        """
        if not isinstance(grammar, Grammar):
            raise RequestError(f"grammar must be a Grammar, got {type(grammar).__name__}", param="grammar")
        with self._lock:
            compiled = self._kept.get(grammar)
            if compiled is not None:
                self._kept.move_to_end(grammar)
                return compiled
        try:
            compiled = self._compile(grammar)
        except RecursionError as error:
            raise RequestError(f"{grammar.param} nests too deeply", param=grammar.param) from error
        with self._lock:
            if grammar not in self._kept:
                self._kept[grammar] = compiled
                self._bytes += compiled.size
            while len(self._kept) > self._max_entries or (self._bytes > self._max_bytes and len(self._kept) > 1):
                _, oldest = self._kept.popitem(last=False)
                self._bytes -= oldest.size
        return compiled

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        machinery = self._start(grammar.param)
        text = write_grammar(grammar, machinery)
        machine, trouble = machinery.start(text)
        if trouble is not None:
            text = write_grammar(grammar, machinery, tries=True)
            machine, trouble = machinery.start(text)
        if trouble is not None:
            param = grammar.param if not grammar.channels or grammar.response is not None else "tools"
            raise RequestError(f"{param} cannot be enforced: {trouble}", param=param)
        if grammar.prefix and not grammar.tools_only:
            prefix = machinery.encode(grammar.prefix)
            if machine.try_consume_tokens(prefix) != len(prefix):
                raise RequestError("the message to continue does not match response_format", param="messages")
        return CompiledGrammar(grammar, machinery, machine, self._stop_ids, len(text))

    def _start(self, param: str) -> _Machinery:
        library = _library(param)
        highest = max(*self._vocabulary.special.values(), *self._vocabulary.stop_ids)
        if self._vocab_size <= highest:
            raise RequestError(
                f"{param} needs the tokens of the chat format, up to id {highest}; the model has {self._vocab_size}",
                param=param,
            )
        with self._starting:
            if self._machinery is None:
                self._machinery = _Machinery(self._vocabulary, library)
            return self._machinery


def allowed_tokens(matchers: Sequence[Matcher | None], vocab_size: int, device: torch.device) -> Tensor | None:
    """Return what the grammars of a batch allow next, with one copy to the device that nobody waits for.

    Args:
        matchers: of each row, of one compiler; None where there is no grammar.
        vocab_size: of the logits.
        device: of the logits.

    Returns:
        `[B, V]` bool; None if everything is allowed.
    """
    return allowed_ahead(matchers, [()] * len(matchers), vocab_size, device).allowed


class Ahead(NamedTuple):
    """What the grammars of B requests say to their drafts.

    Attributes:
        allowed: `[N, V]` bool, for each request a row in front of each token of its draft and one behind the last; None
            if everything is allowed. So do rows behind a token that is not allowed, or that ends the output: nothing
            may be chosen there.
        taken: for each request, how many tokens of its draft the grammar takes, up to the end of the output; all where
            there is no grammar.
        is_over: for each request, whether the last of these ends the output.
    """

    allowed: Tensor | None
    taken: list[int]
    is_over: list[bool]


def allowed_ahead(
    matchers: Sequence[Matcher | None], drafts: Sequence[Sequence[int]], vocab_size: int, device: torch.device
) -> Ahead:
    """Return what the grammars of a batch allow along drafts. The matchers stand where they stood when it returns.

    Args:
        matchers: of each request, of one compiler; None where there is no grammar.
        drafts: token ids of each request.
        vocab_size: of the logits.
        device: of the logits.
    """
    is_over = [False] * len(matchers)
    taken = [len(draft) for draft in drafts]
    places = list(itertools.accumulate((size + 1 for size in taken), initial=0))
    walks = {i: _Walk(matcher, drafts[i], places[i]) for i, matcher in enumerate(matchers) if matcher is not None}
    if not walks:
        return Ahead(None, taken, is_over)
    num_words = next(iter(walks.values())).matcher.num_words
    limit = sum(taken[i] + 1 for i in walks)
    packed = torch.empty(limit * (num_words + 1), dtype=torch.int32, pin_memory=device.type == "cuda")
    words = packed[: limit * num_words].view(limit, num_words).numpy().view(np.uint32)
    filled: list[int] = []
    going = [*walks.values()]
    try:
        while going:
            asked = [walk for walk in going if walk.matcher.constrains]
            if asked:
                Matcher.fill([walk.matcher for walk in asked], words[len(filled) : len(filled) + len(asked)])
                filled += [walk.place + walk.taken for walk in asked]
            going = [walk for walk in going if walk.advance()]
    finally:
        for i, walk in walks.items():
            taken[i], is_over[i] = walk.taken, walk.taken > 0 and walk.matcher.is_finished
            walk.undo()
    if not filled:
        return Ahead(None, taken, is_over)
    size = len(filled) * num_words
    packed[size : size + len(filled)] = torch.tensor(filled, dtype=torch.int32)
    packed = packed[: size + len(filled)].to(device, non_blocking=True)
    return Ahead(_mask(packed, filled, places[-1], vocab_size), taken, is_over)


class _Walk:
    """A matcher on its way through a draft, and back."""

    def __init__(self, matcher: Matcher, draft: Sequence[int], place: int) -> None:
        self.matcher = matcher
        self.draft = draft
        self.place = place
        self.taken = 0
        self._was_stuck = matcher.is_stuck

    def advance(self) -> bool:
        """Take the next token; False if nothing may be chosen behind it."""
        if self.taken == len(self.draft):
            return False
        if self.taken == 0:
            self._was_stuck = self.matcher.is_stuck
        if not self.matcher.accept(self.draft[self.taken]):
            return False
        self.taken += 1
        return not self.matcher.is_finished

    def undo(self) -> None:
        if self.taken:
            self.matcher.rollback(self.taken)
            self.matcher._is_stuck = self._was_stuck


def _mask(packed: Tensor, filled: Sequence[int], num_rows: int, vocab_size: int) -> Tensor:
    """Make a mask of the words of the filled rows, behind which their places stand; the others allow everything."""
    octets = packed[: -len(filled)].view(torch.uint8).view(len(filled), -1, 1)
    bits = (octets >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    allowed = bits.view(len(filled), -1)[:, :vocab_size].bool()
    if allowed.shape[1] < vocab_size:
        allowed = torch.nn.functional.pad(allowed, (0, vocab_size - allowed.shape[1]))
    if filled == [*range(num_rows)]:
        return allowed
    everything = torch.ones(num_rows, vocab_size, dtype=torch.bool, device=packed.device)
    return everything.index_copy_(0, packed[-len(filled) :].long(), allowed)


@functools.lru_cache(maxsize=2)
def _compiler_of(vocabulary: Vocabulary) -> GrammarCompiler:
    return GrammarCompiler(vocabulary)


def grammar_accepts(grammar: Grammar, text: str, vocabulary: Vocabulary) -> bool:
    """Whether an output may be this text: what follows the think close, or the opener in the prompt, without the stop.

    Special tokens stand in the text by name, and markers are tokenised as the chat format writes them.
    """
    matcher = _compiler_of(vocabulary).matcher(dataclasses.replace(grammar, thinking=False))
    return all(matcher.accept(token) for token in _output_ids(text, vocabulary)) and matcher.can_stop


_ATTRIBUTE = re.compile(r'( [^\s="]+)(=")([^"]*)(")')


def _output_ids(text: str, vocabulary: Vocabulary) -> list[int]:
    """Token ids of an output: each part of a marker is encoded by itself."""
    brackets = {vocabulary.special[name] for name in ("<|open|>", "<|close|>")}
    result: list[int] = []
    run: list[int] = []
    is_marker = False
    for token in [*vocabulary.encode(text, allow_special=True), -1]:
        if 0 <= token < vocabulary.n_base:
            run.append(token)
            continue
        if is_marker and run:
            parts = _ATTRIBUTE.split(vocabulary.decode_bytes(run).decode("utf-8", "replace"))
            result += [i for part in parts for i in vocabulary.encode(part)]
        else:
            result += run
        run, is_marker = [], token in brackets
        result += [token] * (token >= 0)
    return result
