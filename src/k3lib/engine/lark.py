"""Grammars in the language of llguidance, a dialect of Lark. Text only: nothing here imports the package."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NoReturn, Protocol

from k3lib.engine.schema import TYPES, Node, Place, Schema, listed, read_parameters, read_response

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from k3lib.engine.grammar import Grammar, ToolRule

__all__ = ["NOTHING", "UNSATISFIABLE", "Toolbox", "write_grammar"]

# What is certain may be tokenised in any way: with the canonical one alone, llguidance 1.9.1 gets lost in rollbacks.
OPTIONS = '%llguidance {"no_forcing": true}'

UNSATISFIABLE = "Unsatisfiable schema"  # begins what llguidance says of a schema that no value matches
NOTHING = "no value can match this schema"

MAX_JSON_RULES = 400  # each takes about a millisecond to compile
MAX_JSON_CHARS = 1 << 20
MAX_TRIES = 200

_TEXT = "/(?s:.*)/"
_KEY = r"""/[^"& \t\r\n\f\x0B=<>]+/"""
_INDEX = "/[1-9][0-9]*/"

# One space at most between the tokens of JSON. No escapes by number: a key that has two spellings could be there twice.
_JSON_OPTIONS = {"whitespace_pattern": " ", "json_allowed_escapes": 'nrbtf\\"'}

_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_GROUP = "[0-9A-Fa-f]{1,4}"
_DATE = (
    "[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_CLOCK = "T(?:[0-9]+S|[0-9]+M(?:[0-9]+S)?|[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?)"
_DAYS = "(?:[0-9]+D|[0-9]+M(?:[0-9]+D)?|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?)"
_URI = r"(?:[A-Za-z0-9._~:\/?@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:[0-9]+W|{_CLOCK}|{_DAYS}(?:{_CLOCK})?)",
    "email": rf"[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+)*@{_LABEL}(?:\.{_LABEL})+",
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
    "ipv6": "|".join(
        [
            f"(?:{_GROUP}:){{7}}{_GROUP}",
            f"(?:{_GROUP}:){{1,7}}:",
            *(f"(?:{_GROUP}:){{1,{7 - n}}}(?::{_GROUP}){{1,{n}}}" for n in range(1, 7)),
            f":(?::{_GROUP}){{1,7}}",
            "::",
        ]
    ),
    "uuid": "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": f"[A-Za-z][A-Za-z0-9+.-]*:{_URI}+(?:#{_URI}*)?",
}


class Toolbox(Protocol):
    """What writing needs of a vocabulary and of llguidance."""

    @property
    def marks(self) -> Mapping[str, int]:
        """Ids of the brackets `open`, `close` and `sep`."""
        ...

    def encode(self, text: str) -> list[int]:
        """Encode ordinary text."""
        ...

    def trouble(self, text: str) -> str | None:
        """Why nothing matches a grammar; None if something may."""
        ...

    def terminal(self, regex: str) -> str:
        """A regular expression of a JSON Schema, to be matched as a whole."""
        ...


def write_grammar(grammar: Grammar, toolbox: Toolbox, *, tries: bool = False) -> str:
    """Write the grammar of all that follows the think channel.

    Args:
        grammar: what is wanted.
        toolbox: knows the tokens of markup, and tries parts.
        tries: compile every part by itself, to find the one to blame and those that match nothing.

    Raises:
        RequestError: a schema that is not supported, or that nothing matches where there has to be something.
    """
    return _Writer(toolbox, tries).write(grammar)


class _Writer:
    def __init__(self, toolbox: Toolbox, tries: bool) -> None:
        self._toolbox = toolbox
        self._tries = tries
        self._rules: dict[str, str] = {}  # name by body
        self._texts: dict[int, tuple[Node, str | None]] = {}  # terminal by node, with the node, so that it stays
        self._num_json = self._num_chars = 0
        self._open, self._close, self._sep = (f"<[{toolbox.marks[mark]}]>" for mark in ("open", "close", "sep"))

    def write(self, grammar: Grammar) -> str:
        if not grammar.channels:
            return self._written(f"start: {self._response(grammar)}")
        opener, closer = self._opened("response"), self._closed("response")
        tail = f"({self._closed('message')})?"
        response = f"({opener})? {self._response(grammar)} {closer}"
        if grammar.calls == "none":
            start = f"{response} {tail}"
        elif grammar.calls == "required":
            start = f"{response} {self._tools(grammar)} {tail}"
        elif grammar.response is None:
            start = f"{response} ({self._tools(grammar)})? {tail}"
        else:  # a turn that calls tools need not make up a document first
            tools = self._tools(grammar)
            start = f"({response} ({tools})? | ({opener})? {closer} {tools}) {tail}"
        return self._written(f"start: {start}")

    def _response(self, grammar: Grammar) -> str:
        if grammar.pattern is not None:
            return self._token(self._toolbox.terminal(grammar.pattern))
        if grammar.response is None:
            return self._token(_TEXT)
        schema = (
            read_response(json.loads(grammar.response))
            if grammar.channels
            else read_response(json.loads(grammar.response), param=grammar.param, where="json_schema")
        )
        return self._json(schema, Place("", schema.root), schema.root, tries=True) or schema.fail("", NOTHING)

    def _tools(self, grammar: Grammar) -> str:
        calls = self._rule(" | ".join(self._call(tool) for tool in grammar.tools))
        return self._rule(f"{self._opened('tools')} {calls}{'+' if grammar.parallel else ''} {self._closed('tools')}")

    def _call(self, tool: ToolRule) -> str:
        opener = self._opened("call", tool=self._ids(_attribute(tool.name)), index=self._token(_INDEX))
        arguments = self._any() if tool.parameters is None else self._strict(tool.name, tool.parameters)
        return self._rule(f"{opener} {arguments} {self._closed('call')}")

    def _any(self) -> str:
        anything = Schema(True, {}, "tools", "any tool")
        return f"{self._argument(self._token(_KEY), self._values(anything, Place('', True)))}*"

    def _strict(self, tool: str, parameters: str) -> str:
        schema, properties, others = read_parameters(tool, json.loads(parameters))
        parts = []
        for name, place, is_required in properties:
            values = self._values(schema, place)
            if values:
                argument = self._argument(self._ids(_attribute(name)), values)
                parts.append(argument if is_required else f"({argument})?")
            elif is_required:
                schema.fail(place.path, NOTHING)
        values = self._values(schema, others)
        if values:
            declared = _either(_literal(name) for name, _, _ in properties)
            key = f"{_KEY} & ~({declared})" if declared else _KEY
            parts.append(f"{self._argument(self._token(key), values)}*")
        return " ".join(parts)

    def _argument(self, key: str, values: Mapping[str, str]) -> str:
        """An argument, with one alternative for each type of its value."""
        equals, quote = self._ids('="'), self._ids('"')
        head = [self._open, self._ids("argument"), self._ids(" key"), equals, key, quote, self._ids(" type"), equals]
        typed = " | ".join(f"{self._ids(kind)} {quote} {self._sep} {value}" for kind, value in values.items())
        return self._rule(f"{' '.join(head)} ({typed}) {self._closed('argument')}")

    def _values(self, schema: Schema, place: Place) -> dict[str, str]:
        """Names of what matches the values of a schema, by type: a text is raw, all else is JSON."""
        types = schema.types(place.node)
        values = {}
        for kind in TYPES:
            if kind not in types:
                continue
            if kind == "string":
                value = self._text(schema, place)
            else:
                node = place.node if types == {kind} else _restricted(place.node, kind)
                value = self._json(schema, place, node, tries=self._tries)
            if value is not None:
                values[kind] = value
        return values

    def _json(self, schema: Schema, place: Place, node: Node, *, tries: bool) -> str | None:
        """Name of a rule for the JSON of a value; None if it is known that there is none."""
        body = _json_rule(schema, node)
        if body not in self._rules:
            self._num_json += 1
            self._num_chars += len(body)
            if self._num_json > MAX_JSON_RULES:
                schema.fail(place.path, f"a request has at most {MAX_JSON_RULES} different schemas of arguments")
            if self._num_chars > MAX_JSON_CHARS:
                schema.fail(place.path, f"a request has schemas of at most {MAX_JSON_CHARS} characters altogether")
            reason = self._toolbox.trouble(f"start: {body}") if tries else None
            if reason is not None:
                if UNSATISFIABLE in reason:
                    return None
                self._blame(schema, place, reason)
        return self._rule(body)

    def _blame(self, schema: Schema, place: Place, reason: str) -> NoReturn:
        """Refuse the innermost part that does not compile."""
        seen = {place.path}
        found: Place | None = place
        while found is not None:
            place, found = found, None
            for child in schema.children(place):
                if child.path in seen or len(seen) > MAX_TRIES:
                    continue
                seen.add(child.path)
                trouble = self._toolbox.trouble(f"start: {_json_rule(schema, child.node)}")
                if trouble is not None and UNSATISFIABLE not in trouble:
                    found, reason = child, trouble
                    break
        schema.fail(place.path, reason)

    def _text(self, schema: Schema, place: Place) -> str | None:
        """Name of a terminal for the raw text of a string; None if there is none."""
        body = self._terminal(schema, place, frozenset())
        if body is None:
            return None
        name = self._token(body)
        is_simple = body[0] in '/"' and " & " not in body
        return name if is_simple or self._toolbox.trouble(self._written(f"start: {name}", "T")) is None else None

    def _terminal(self, schema: Schema, place: Place, above: frozenset[str]) -> str | None:
        """A terminal for the raw text of a string; None if there is none."""
        path, node = place
        if isinstance(node, bool):
            return _TEXT if node else None
        if "string" not in schema.types(node):
            return None
        if path in above:
            schema.fail(path, "a text cannot refer to itself")
        if id(node) not in self._texts:
            parts = list(self._own(schema, place))
            for keyword, join in (("$ref", _all), ("allOf", _all), ("anyOf", _either), ("oneOf", _exactly_one)):
                if keyword in node:
                    options = [self._terminal(schema, x, above | {path}) for x in schema.parts(place, keyword)]
                    parts.append(join(options))
            body = _all(parts)
            # what is long has a name, so that it does not grow with each place that refers to it
            self._texts[id(node)] = node, body if body is None or len(body) < 100 else self._token(body)
        return self._texts[id(node)][1]

    def _own(self, schema: Schema, place: Place) -> Iterator[str | None]:
        """Terminals of the keywords that say something of a text themselves."""
        path, node = place
        assert isinstance(node, dict), "booleans have no keywords"
        for keyword in ("enum", "const"):
            if keyword in node:
                texts = listed(node[keyword]) if keyword == "enum" else [node[keyword]]
                yield _either(_literal(text) for text in texts if isinstance(text, str))
        if "minLength" in node or "maxLength" in node:
            yield f"/(?s:.{{{node.get('minLength', 0)},{node.get('maxLength', '')}}})/"
        if "format" in node:
            yield f"/{_FORMATS[str(node['format'])]}/"
        if "pattern" in node:
            yield self._pattern(schema, f"{path}/pattern", str(node["pattern"]))

    def _pattern(self, schema: Schema, path: str, pattern: str) -> str:
        terminal = self._toolbox.terminal(_searching(pattern))
        reason = self._toolbox.trouble(f"start: T\nT: {terminal}")
        if reason is not None:
            schema.fail(path, reason)
        return terminal

    def _opened(self, tag: str, **attributes: str) -> str:
        """An opening marker, token by token as the chat format writes it."""
        parts = [self._open, self._ids(tag)]
        for key, value in attributes.items():
            parts += [self._ids(f" {key}"), self._ids('="'), value, self._ids('"')]
        return " ".join([*parts, self._sep])

    def _closed(self, tag: str) -> str:
        return f"{self._close} {self._ids(tag)} {self._sep}"

    def _ids(self, text: str) -> str:
        return " ".join(f"<[{i}]>" for i in self._toolbox.encode(text))

    def _rule(self, body: str) -> str:
        return self._rules.setdefault(body, f"r{len(self._rules)}")

    def _token(self, body: str) -> str:
        return self._rules.setdefault(body, f"T{len(self._rules)}")

    def _written(self, start: str, kinds: str = "rT") -> str:
        """The text of a grammar with the rules and tokens so far."""
        rules = (f"{name}: {body}" for body, name in self._rules.items() if name[0] in kinds)
        return "\n".join([OPTIONS, start, *rules, ""])


def _json_rule(schema: Schema, node: Node) -> str:
    return f"%json {json.dumps({**schema.standalone(node), 'x-guidance': _JSON_OPTIONS}, ensure_ascii=False)}"


def _restricted(node: Node, kind: str) -> Node:
    return {"type": kind} if isinstance(node, bool) else {"allOf": [node], "type": kind}


def _attribute(value: str) -> str:
    return value.replace("&", "&amp;").replace('"', "&quot;")


def _literal(text: str) -> str:
    return json.dumps(text)


def _all(terminals: Sequence[str | None]) -> str | None:
    """A terminal that matches what all of these do; None if one of them matches nothing."""
    known = [terminal for terminal in dict.fromkeys(terminals) if terminal is not None]
    if None in terminals:
        return None
    return " & ".join(f"({terminal})" for terminal in known) if len(known) > 1 else known[0] if known else _TEXT


def _either(terminals: Iterable[str | None]) -> str | None:
    """A terminal that matches what one of these does; None if all of them match nothing."""
    known = [terminal for terminal in dict.fromkeys(terminals) if terminal is not None]
    return " | ".join(f"({terminal})" for terminal in known) if len(known) > 1 else known[0] if known else None


def _exactly_one(terminals: Sequence[str | None]) -> str | None:
    """A terminal that matches what one of these does and no other."""
    found = [terminal for terminal in terminals if terminal is not None]
    alone = []
    for i, terminal in enumerate(found):
        others = _either([*found[:i], *found[i + 1 :]])
        alone.append(f"({terminal}) & ~({others})" if others else terminal)
    return _either(alone)


def _searching(pattern: str) -> str:
    """A pattern that matches the whole of each text in which another one is found."""
    anything = "(?s:.*)"
    branches = []
    for branch in _branches(pattern):
        is_first, is_last = branch.startswith("^"), _ends_with_anchor(branch)
        body = branch[is_first : len(branch) - is_last]
        branches.append(f"{'' if is_first else anything}(?:{body}){'' if is_last else anything}")
    return "|".join(branches)


def _branches(pattern: str) -> Iterator[str]:
    """The alternatives of a pattern."""
    depth, start, is_class, i = 0, 0, False, 0
    while i < len(pattern):
        char = pattern[i]
        if char == "\\":
            i += 1
        elif is_class:
            is_class = char != "]"
        elif char == "[":
            is_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and depth == 0:
            yield pattern[start:i]
            start = i + 1
        i += 1
    yield pattern[start:]


def _ends_with_anchor(branch: str) -> bool:
    if not branch.endswith("$"):
        return False
    body = branch[:-1]
    return (len(body) - len(body.rstrip("\\"))) % 2 == 0
