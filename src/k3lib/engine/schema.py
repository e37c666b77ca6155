"""JSON Schemas as grammars need them: checked, self-contained, and without what constrains nothing. Pure Python."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, TypeAlias
from urllib.parse import unquote

from k3lib.errors import RequestError

__all__ = [
    "FORMATS",
    "TYPES",
    "Node",
    "Parameters",
    "Place",
    "Property",
    "Schema",
    "listed",
    "read_parameters",
    "read_response",
    "read_schema",
]

Node: TypeAlias = "dict[str, object] | bool"

TYPES = ("string", "number", "boolean", "null", "object", "array")

# Formats that are enforced. All others are annotations, as the specification of JSON Schema has it.
FORMATS = ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")

MAX_DEPTH = 64  # levels of one part
MAX_PATH = 128  # levels along references: compilers recurse, at some kilobytes a level
MAX_NODES = 10_000
MAX_PROPERTIES = 1000  # of one object
MAX_REFERENCES = 256
MAX_CHARS = 256 << 10
MAX_COUNT = 1_000_000
MAX_PATTERNS = 4  # that apply to one text: their intersection may be exponential in this
MAX_MEETINGS = 100_000  # schemas that apply to one value, added up over all values

# Keywords that constrain and are not enforced, with the values that ask for nothing.
_REFUSED: dict[str, tuple[object, ...]] = {
    "not": (False,),
    "if": (),
    "uniqueItems": (False,),
    "contains": (),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "$dynamicRef": (),
    "$recursiveRef": (),
}


def _is_count(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and value == int(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_bound(value: object) -> bool:
    return _is_number(value) or isinstance(value, bool)  # draft 4 has flags


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_type(value: object) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(name in (*TYPES, "integer") for name in names)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_filled(value: object) -> bool:
    return isinstance(value, list) and bool(value)


_PLAIN: dict[str, tuple[str, Callable[[object], bool]]] = {
    "type": (f"one of {', '.join(TYPES)} and integer, or a list of these", _is_type),
    "enum": ("a list that is not empty", _is_filled),
    "const": ("any value", lambda _: True),
    "required": ("a list of texts", _are_texts),
    "pattern": ("a text", _is_text),
    "format": ("a text", _is_text),
    "multipleOf": ("a number above 0", lambda x: isinstance(x, int | float) and not isinstance(x, bool) and x > 0),
    "minimum": ("a number", _is_number),
    "maximum": ("a number", _is_number),
    "exclusiveMinimum": ("a number", _is_bound),
    "exclusiveMaximum": ("a number", _is_bound),
}
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_LEAST = ("minLength", "minItems", "minProperties")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_MAPS = ("properties", "patternProperties")
_SINGLE = ("items", "additionalProperties")


class Place(NamedTuple):
    """A node and the JSON pointer of where it stood."""

    path: str
    node: Node


@dataclass(frozen=True, slots=True)
class Schema:
    """A schema that was read.

    Attributes:
        root: the schema; references in it point into `defs`.
        defs: what is referred to, by name, with where it stood.
        param: the request field that it came in.
        where: what to call it in messages.
    """

    root: Node
    defs: dict[str, Place]
    param: str
    where: str

    def fail(self, path: str, message: str) -> NoReturn:
        """Refuse the schema for what stands at a path."""
        raise _error(self.param, self.where, path, message)

    def resolved(self, place: Place) -> Place:
        """Follow references that stand alone."""
        seen: set[str] = set()
        while isinstance(place.node, dict) and list(place.node) == ["$ref"]:
            name = _name(place.node["$ref"])
            if name in seen:
                break
            seen.add(name)
            place = self.defs[name]
        return place

    def standalone(self, node: Node) -> dict[str, object]:
        """A node as a document of its own, with what it refers to."""
        body: dict[str, object] = dict(node) if isinstance(node, dict) else {} if node else {"anyOf": [False]}
        names: dict[str, None] = {}
        todo = [node]
        while todo:
            for name in _references(todo.pop()):
                if name not in names:
                    names[name] = None
                    todo.append(self.defs[name].node)
        if names:
            body["$defs"] = {name: self.defs[name].node for name in names}
        return body

    def types(self, node: Node) -> frozenset[str]:
        """The types that a value can have. It may have fewer, if keywords exclude each other in other ways."""
        return self._types(node, {})

    def _types(self, node: Node, known: dict[str, frozenset[str]]) -> frozenset[str]:
        if isinstance(node, bool):
            return frozenset(TYPES if node else ())
        found = frozenset(TYPES)
        if "type" in node:
            found &= {"number" if name == "integer" else str(name) for name in listed(node["type"])}
        if "enum" in node:
            found &= {_type_of(value) for value in listed(node["enum"])}
        if "const" in node:
            found &= {_type_of(node["const"])}
        if "$ref" in node:
            name = _name(node["$ref"])
            if name not in known:
                known[name] = frozenset(TYPES)  # for references back to here
                known[name] = self._types(self.defs[name].node, known)
            found &= known[name]
        for keyword in ("anyOf", "oneOf"):
            if keyword in node:
                found &= frozenset().union(*(self._types(part, known) for part in _nodes(node[keyword])))
        for part in _nodes(node.get("allOf", [])):
            found &= self._types(part, known)
        return found

    def parts(self, place: Place, keyword: str) -> list[Place]:
        """The schemas of a keyword that has a list of them; of `$ref`, the one that it names."""
        path, node = place
        if isinstance(node, bool) or keyword not in node:
            return []
        if keyword == "$ref":
            return [self.defs[_name(node[keyword])]]
        return [Place(f"{path}/{keyword}/{i}", part) for i, part in enumerate(_nodes(node[keyword]))]

    def children(self, place: Place) -> Iterator[Place]:
        """The schemas inside of a schema, and the one that it refers to."""
        path, node = place
        if isinstance(node, bool):
            return
        for keyword in (*_LISTS, "$ref"):
            yield from self.parts(place, keyword)
        for keyword in _MAPS:
            for name, part in _members(node.get(keyword, {})):
                yield Place(f"{path}/{keyword}/{_escaped(name)}", part)
        for keyword in _SINGLE:
            if keyword in node:
                yield Place(f"{path}/{keyword}", _node(node[keyword]))


def read_schema(document: object, *, param: str, where: str) -> Schema:
    """Check a schema and bring it into the form that grammars are made of.

    References are rewritten to point into one table, so that a part can be cut out of its document; annotations,
    unknown keywords and unknown formats go. What can never end, because each value would hold another one, becomes
    `false`.

    Args:
        document: a mapping or a boolean, as JSON has it.
        param: the request field that it came in.
        where: what to call it in messages.

    Raises:
        RequestError: it is malformed, too large, or asks for what is not enforced; the message names the place.
    """
    return _Reader(document, param, where).read()


def read_response(
    document: object, *, param: str = "response_format", where: str = "response_format.json_schema.schema"
) -> Schema:
    """Read the schema of a response. Raises what `read_schema` does."""
    return read_schema(document, param=param, where=where)


class Property(NamedTuple):
    """An argument that a strict tool declares."""

    name: str
    place: Place
    is_required: bool


class Parameters(NamedTuple):
    """The parameters of a strict tool, cut into properties; `others` is the schema of arguments beside them."""

    schema: Schema
    properties: list[Property]
    others: Place


def read_parameters(tool: str, document: object) -> Parameters:
    """Read the parameters of a strict tool.

    Raises:
        RequestError: they are not the schema of an object that can be cut into properties; see also `read_schema`.
    """
    schema = read_schema(document, param="tools", where=f"parameters of the strict tool {tool!r}")
    path, root = schema.resolved(Place("", schema.root))
    if "object" not in schema.types(root):
        schema.fail(path, "the root must be the schema of an object")
    fields = {} if isinstance(root, bool) else root
    for keyword in fields:
        if keyword not in ("type", "properties", "required", "additionalProperties"):
            schema.fail(f"{path}/{keyword}", f"{keyword!r} is not supported at the root of a strict tool")
    required = listed(fields.get("required", []))
    properties = dict(_members(fields.get("properties", {})))
    for name in required:
        if name not in properties:
            schema.fail(f"{path}/required", f"{name!r} is required but not among the properties")
    found = [
        Property(name, Place(f"{path}/properties/{_escaped(name)}", node), name in required)
        for name, node in properties.items()
    ]
    return Parameters(
        schema, found, Place(f"{path}/additionalProperties", _node(fields.get("additionalProperties", True)))
    )


class _Reader:
    def __init__(self, document: object, param: str, where: str) -> None:
        self.document = document
        self.param = param
        self.where = where
        self.names: dict[str, str] = {}  # by pointer
        self.pending: list[str] = []
        self.num_nodes = 0
        self.deepest = 0

    def read(self) -> Schema:
        try:
            text = json.dumps(self.document, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"{self.where} is not plain JSON: {str(error)[:120]}", param=self.param) from error
        if len(text) > MAX_CHARS:
            self.fail("", f"a schema has at most {MAX_CHARS} characters, this one has {len(text)}")
        root = self.node(self.document, "", 0)
        depths = {"": self.deepest}
        defs: dict[str, Place] = {}
        while self.pending:
            pointer, self.deepest = self.pending.pop(), 0
            name = self.names[pointer]
            defs[name] = Place(pointer, self.node(self.target(pointer), pointer, 0))
            depths[name] = 1 + self.deepest
        if _longest_path({"": root, **{name: place.node for name, place in defs.items()}}, depths) > MAX_PATH:
            self.fail("", f"a schema nests at most {MAX_PATH} levels, references counted with what they refer to")
        finite = _finite(defs)
        if not _is_finite(root, finite):
            self.fail("", "no finite value can match this schema")
        cut = {name: Place(place.path, _pruned(place.node, finite)) for name, place in defs.items()}
        schema = Schema(_pruned(root, finite), cut, self.param, self.where)
        _Meetings(schema).check([Place("", schema.root)])
        return schema

    def fail(self, path: str, message: str) -> NoReturn:
        raise _error(self.param, self.where, path, message)

    def node(self, node: object, path: str, depth: int) -> Node:
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            self.fail(path, f"a schema has at most {MAX_NODES} parts")
        self.deepest = max(self.deepest, depth)
        if depth > MAX_DEPTH:
            self.fail(path, f"a schema nests at most {MAX_DEPTH} levels")
        if isinstance(node, bool):
            return node
        if not isinstance(node, Mapping):
            self.fail(path, f"a schema must be an object or a boolean, got {type(node).__name__}")
        result: dict[str, object] = {}
        for key, value in node.items():
            self.keyword(result, key, value, path, depth)
        if "additionalItems" in node and isinstance(node.get("items"), list):  # draft 7
            result["items"] = self.node(node["additionalItems"], f"{path}/additionalItems", depth + 1)
        return result

    def keyword(self, result: dict[str, object], key: str, value: object, path: str, depth: int) -> None:
        here = f"{path}/{_escaped(key)}"
        if key in _REFUSED:
            if not any(value == neutral for neutral in _REFUSED[key]):
                self.fail(here, f"{key!r} is not supported in constrained decoding")
        elif key == "$ref":
            result[key] = self.reference(value, here)
        elif key in _PLAIN or key in _COUNTS:
            self.plain(result, key, value, here)
        elif key in _LISTS or (key == "items" and isinstance(value, list)):
            if not isinstance(value, list) or not value:
                self.fail(here, f"{key} must be a list of schemas that is not empty")
            parts = [self.node(part, f"{here}/{i}", depth + 1) for i, part in enumerate(value)]
            result["prefixItems" if key == "items" else key] = parts
        elif key in _MAPS:
            if not isinstance(value, Mapping) or len(value) > MAX_PROPERTIES:
                self.fail(here, f"{key} must be an object of at most {MAX_PROPERTIES} schemas")
            result[key] = {name: self.node(part, f"{here}/{_escaped(name)}", depth + 1) for name, part in value.items()}
        elif key in _SINGLE:
            result[key] = self.node(value, here, depth + 1)

    def plain(self, result: dict[str, object], key: str, value: object, path: str) -> None:
        promise, is_kept = _PLAIN.get(key, ("an integer >= 0", _is_count))
        if not is_kept(value):
            self.fail(path, f"{key} must be {promise}, got {str(value)[:60]!r}")
        if key in ("enum", "const"):
            self.check_texts(value, path)
        if key in _COUNTS and isinstance(value, int | float):
            if value > MAX_COUNT and key in _LEAST:
                self.fail(path, f"{key} is at most {MAX_COUNT}")
            if value or key not in _LEAST:
                result[key] = min(int(value), MAX_COUNT)
        elif key != "format" or value in FORMATS:
            result[key] = value

    def check_texts(self, value: object, path: str) -> None:
        """Refuse texts that need escapes by number, which the grammar of JSON leaves out."""
        todo = [value]
        while todo:
            item = todo.pop()
            if isinstance(item, str):
                if any((c < " " and c not in "\b\t\n\f\r") or c == "\x7f" or "\ud800" <= c <= "\udfff" for c in item):
                    self.fail(path, "control characters and lone surrogates are not supported in constrained decoding")
            elif isinstance(item, Mapping):
                todo += [*item, *item.values()]
            elif isinstance(item, list):
                todo += item

    def reference(self, value: object, path: str) -> str:
        if not isinstance(value, str) or not value.startswith("#"):
            self.fail(path, f"$ref must point into its own schema (#/...), got {str(value)[:60]!r}")
        pointer = unquote(value[1:])
        if pointer not in self.names:
            if len(self.names) == MAX_REFERENCES:
                self.fail(path, f"a schema refers to at most {MAX_REFERENCES} places")
            self.target(pointer, path)
            self.names[pointer] = f"r{len(self.names)}"
            self.pending.append(pointer)
        return f"#/$defs/{self.names[pointer]}"

    def target(self, pointer: str, path: str = "") -> object:
        """What a pointer names. Raises if it names nothing."""
        found = self.document
        steps = pointer.split("/")
        if steps[0]:
            self.fail(path, f"$ref must be a pointer (#/...), got {'#' + pointer[:60]!r}")
        for step in steps[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and step in found:
                found = found[step]
            elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
                found = found[int(step)]
            else:
                self.fail(path, f"$ref names {'#' + pointer[:60]!r}, which is not there")
        return found


def _type_of(value: object) -> str:
    """The JSON type of a value."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    kinds = {str: "string", type(None): "null", list: "array"}
    return kinds.get(type(value), "object")


def _error(param: str, where: str, path: str, message: str) -> RequestError:
    shown = path if len(path) <= 160 else f"{path[:60]}…{path[-90:]}"
    return RequestError(f"{where}{path and ' at '}{shown}: {message}", param=param)


class _Meetings:
    """Finds the schemas that apply to one value, and bounds how many patterns meet there."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.seen: set[frozenset[int]] = set()
        self.num_applied = 0

    def check(self, group: list[Place]) -> None:
        """Check a value that all of these schemas apply to, and the values inside of it."""
        todo = [group]
        while todo:
            group = todo.pop()
            key = frozenset(id(place.node) for place in group)
            if not group or key in self.seen:
                continue
            self.seen.add(key)
            alone = group[0].node if len(group) == 1 else True
            if isinstance(alone, dict) and list(alone) == ["anyOf"]:  # only one of them applies
                todo += [[part] for part in self.schema.parts(group[0], "anyOf")]
                continue
            places = self.applied(group)
            self.bound(places)
            todo += self.inside(places)

    def applied(self, group: list[Place]) -> list[Place]:
        """The schemas of a group with all that they apply to the same value."""
        found: dict[int, Place] = {}
        todo = list(group)
        while todo:
            place = todo.pop()
            if id(place.node) not in found:
                found[id(place.node)] = place
                for keyword in ("allOf", "anyOf", "oneOf", "$ref"):
                    todo += self.schema.parts(place, keyword)
        self.num_applied += len(found)
        if self.num_applied > MAX_MEETINGS:
            self.schema.fail("", "the schema combines too many parts")
        return list(found.values())

    def bound(self, places: list[Place]) -> None:
        patterns = {
            str(node[keyword])
            for _, node in places
            for keyword in ("pattern", "format")
            if isinstance(node, dict) and keyword in node
        }
        names = {name for _, node in places if isinstance(node, dict) for name in _keys(node, "patternProperties")}
        if max(len(patterns), len(names)) > MAX_PATTERNS:
            self.schema.fail(places[0].path, f"at most {MAX_PATTERNS} patterns and formats can apply to one text")

    def inside(self, places: list[Place]) -> list[list[Place]]:
        """The groups that apply to each of the values inside."""
        found = [(path, node) for path, node in places if isinstance(node, dict)]
        named: dict[str, list[Place]] = {name: [] for _, node in found for name in _keys(node, "properties")}
        unnamed: list[Place] = []
        items: list[Place] = []
        for path, node in found:
            declared = dict(_members(node.get("properties", {})))
            matching = [
                Place(f"{path}/patternProperties/{_escaped(name)}", part)
                for name, part in _members(node.get("patternProperties", {}))
            ]
            rest = [Place(f"{path}/{key}", _node(node[key])) for key in ["additionalProperties"] if key in node]
            unnamed += matching + rest
            for name, group in named.items():
                own = [Place(f"{path}/properties/{_escaped(name)}", declared[name])] if name in declared else rest
                group += own + matching
            items += [Place(f"{path}/prefixItems/{i}", x) for i, x in enumerate(_nodes(node.get("prefixItems", [])))]
            items += [Place(f"{path}/items", _node(node[key])) for key in ["items"] if key in node]
        return [*named.values(), unnamed, *([[item] for item in items] if len(found) == 1 else [items])]


def _keys(node: dict[str, object], keyword: str) -> Iterable[str]:
    return (name for name, _ in _members(node.get(keyword, {})))


def _longest_path(nodes: Mapping[str, Node], depths: Mapping[str, int]) -> int:
    """Upper bound of the levels along a path of references that comes nowhere twice."""
    targets = {name: set(_references(node)) for name, node in nodes.items()}
    reached: dict[str, set[str]] = {}
    for name in nodes:
        seen, todo = set[str](), [name]
        while todo:
            for target in targets[todo.pop()] - seen:
                seen.add(target)
                todo.append(target)
        reached[name] = seen
    rings = {name: frozenset({name, *(x for x in seen if name in reached[x])}) for name, seen in reached.items()}
    lengths: dict[frozenset[str], int] = {}

    def order(
        ring: frozenset[str],
    ) -> tuple[int, bool]:  # what is reached comes first, and a ring before what enters it
        name = min(ring)
        return len(reached[name]), name not in reached[name]

    for ring in sorted(set(rings.values()), key=order):
        beyond = {rings[target] for name in ring for target in targets[name]} - {ring}
        lengths[ring] = sum(depths[name] for name in ring) + max((lengths[other] for other in beyond), default=0)
    return lengths[rings[""]]


def _finite(defs: Mapping[str, Place]) -> set[str]:
    """Names of the definitions that a finite value can match: the least fixed point, as far as it is found soon."""
    known: set[str] = set()
    names = list(defs)
    for _ in range(64):
        names.reverse()
        new = [name for name in names if name not in known and _learn(defs[name].node, name, known)]
        if not new:
            return known
    return set(defs)


def _learn(node: Node, name: str, known: set[str]) -> bool:
    if _is_finite(node, known):
        known.add(name)
        return True
    return False


def _is_finite(node: Node, known: set[str]) -> bool:
    """Whether a value can match that holds only what is known to end. True where it takes more than this to tell."""
    if isinstance(node, bool):
        return node
    if "$ref" in node and _name(node["$ref"]) not in known:
        return False
    if not all(_is_finite(part, known) for part in _nodes(node.get("allOf", []))):
        return False
    for keyword in ("anyOf", "oneOf"):
        if keyword in node and not any(_is_finite(part, known) for part in _nodes(node[keyword])):
            return False
    if "enum" in node or "const" in node:
        return True
    kinds = listed(node["type"]) if "type" in node else TYPES
    return any(
        _is_finite_object(node, known)
        if kind == "object"
        else _is_finite_array(node, known)
        if kind == "array"
        else True
        for kind in kinds
    )


def _is_finite_object(node: dict[str, object], known: set[str]) -> bool:
    properties = dict(_members(node.get("properties", {})))
    others = _node(node.get("additionalProperties", True))
    return all(_is_finite(properties.get(str(name), others), known) for name in listed(node.get("required", [])))


def _is_finite_array(node: dict[str, object], known: set[str]) -> bool:
    least = node.get("minItems", 0)
    first = list(_nodes(node.get("prefixItems", [])))
    count = int(least) if isinstance(least, int | float) else 0
    needed = first[:count]
    if count > len(first):
        needed.append(_node(node.get("items", True)))
    return all(_is_finite(part, known) for part in needed)


def _pruned(node: Node, finite: set[str]) -> Node:
    """A copy with `false` in place of references to what never ends."""
    if isinstance(node, bool):
        return node
    if "$ref" in node and _name(node["$ref"]) not in finite:
        return False
    result: dict[str, object] = {}
    for key, value in node.items():
        if key in _LISTS:
            result[key] = [_pruned(part, finite) for part in _nodes(value)]
        elif key in _MAPS:
            result[key] = {name: _pruned(part, finite) for name, part in _members(value)}
        else:
            result[key] = _pruned(_node(value), finite) if key in _SINGLE else value
    return result


def _references(node: Node) -> Iterator[str]:
    """Names that a node refers to, at any depth of the node itself."""
    todo = [node]
    while todo:
        item = todo.pop()
        if isinstance(item, bool):
            continue
        if "$ref" in item:
            yield _name(item["$ref"])
        for keyword in _LISTS:
            todo += _nodes(item.get(keyword, []))
        for keyword in _MAPS:
            todo += [part for _, part in _members(item.get(keyword, {}))]
        todo += [_node(item[keyword]) for keyword in _SINGLE if keyword in item]


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _name(reference: object) -> str:
    return str(reference).removeprefix("#/$defs/")


def listed(value: object) -> Sequence[object]:
    """The items of a list, or the one value that is no list."""
    return value if isinstance(value, list) else [value]


def _node(value: object) -> Node:
    assert isinstance(value, dict | bool), "nodes were checked when the schema was read"
    return value


def _nodes(value: object) -> Iterable[Node]:
    """The schemas of a keyword that has a list of them."""
    assert isinstance(value, list), "lists were checked when the schema was read"
    return map(_node, value)


def _members(value: object) -> Iterable[tuple[str, Node]]:
    """The schemas of a keyword that has them by name."""
    assert isinstance(value, dict), "maps were checked when the schema was read"
    return ((name, _node(part)) for name, part in value.items())
