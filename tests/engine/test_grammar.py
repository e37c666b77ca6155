"""Grammars: what an output must be, and the tokens they allow next."""

import dataclasses
import json
import pathlib
import random
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3lib.engine.grammar import (
    Grammar,
    GrammarCompiler,
    Matcher,
    ToolRule,
    allowed_tokens,
    build_grammar,
    grammar_accepts,
    is_available,
)
from k3lib.errors import ConfigError, RequestError
from k3lib.server.chat import parse_output_ids
from k3lib.server.tokenizer import load_tokenizer

jsonschema = pytest.importorskip("jsonschema_rs")
pytest.importorskip("llguidance")

BYTES = load_tokenizer()
STOP = BYTES.stop_ids[0]
OPEN, CLOSE, SEP = (BYTES.special[f"<|{mark}|>"] for mark in ("open", "close", "sep"))
COMPILER = GrammarCompiler(BYTES)
CPU = torch.device("cpu")

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city"],
    "additionalProperties": False,
}


def marker(mark, tag):
    return [{"open": OPEN, "close": CLOSE}[mark], *BYTES.encode(tag), SEP]


def opened(tag):
    return marker("open", tag)


def closed(tag):
    return marker("close", tag)


def ids(text):
    return BYTES.encode(text, allow_special=True)


def json_format(schema, **fields):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}


def tool(name="f", parameters=None, *, strict=True):
    function = {"name": name, "strict": strict}
    return {"type": "function", "function": function | ({} if parameters is None else {"parameters": parameters})}


def one_argument(schema, **rest):
    """A strict tool with the single required argument `v`."""
    fields = {"properties": {"v": schema}, "required": ["v"], "additionalProperties": False}
    return tool(parameters={"type": "object", **fields, **rest})


def response(schema, *, thinking=False, **fields):
    return build_grammar(None, None, thinking=thinking, response_format=json_format(schema), **fields)


def required(*tools, **fields):
    return build_grammar(list(tools), "required", **{"thinking": False, "parallel_tool_calls": False, **fields})


def allowed(matcher, vocab=BYTES.vocab_size):
    """Ids that a matcher allows; all of them if it constrains nothing."""
    mask = allowed_tokens([matcher], vocab, CPU)
    return set(range(vocab)) if mask is None else set(mask[0].nonzero().flatten().tolist())


def fed(grammar, tokens, compiler=COMPILER):
    matcher = compiler.matcher(grammar)
    assert all(matcher.accept(token) for token in tokens)
    return matcher


def document_is_accepted(schema, text):
    return grammar_accepts(response(schema), f"{text}<|close|>response<|sep|>", BYTES)


def argument_is_accepted(schema, text, kind="string"):
    call = f'<|open|>call tool="f" index="1"<|sep|><|open|>argument key="v" type="{kind}"<|sep|>{text}'
    output = f"<|close|>response<|sep|><|open|>tools<|sep|>{call}<|close|>argument<|sep|><|close|>call<|sep|>"
    return grammar_accepts(required(one_argument(schema)), f"{output}<|close|>tools<|sep|>", BYTES)


# ---- the vectors --------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def real(golden):
    folder = golden.parent / "data/tokenizer"
    if not (folder / "tiktoken.model").is_file():
        pytest.skip(f"needs the official rank file at {folder}")
    return load_tokenizer(folder)


@pytest.fixture(params=["bytes", "official"])
def tok(request):
    return BYTES if request.param == "bytes" else request.getfixturevalue("real")


@pytest.fixture(scope="session")
def protocol(golden):
    return lambda name: json.loads((golden / "protocol" / name).read_text(encoding="utf-8"))


def grammar_of(case):
    return build_grammar(
        case["tools"],
        case["tool_choice"],
        parallel_tool_calls=case["parallel_tool_calls"],
        thinking=case["thinking"],
        response_format=case.get("response_format"),
    )


def test_structural_tags(protocol, tok):
    cases = protocol("structural_tags.json")["cases"]
    assert len(cases) == 10
    for case in cases:
        grammar = grammar_of(case)
        for text in case["accept"]:
            assert grammar_accepts(grammar, text, tok), (case["name"], text)
        for text in case["reject"]:
            assert not grammar_accepts(grammar, text, tok), (case["name"], text)


def test_accepted_outputs_parse(protocol):
    for case in protocol("structural_tags.json")["cases"]:
        for text in case["accept"]:
            found = parse_output_ids([*ids(text), STOP], BYTES, thinking=False)
            names = {t["function"]["name"] for t in case["tools"] or []}
            assert {call.name for call in found.tool_calls} <= names
            assert text.count("<|close|>call<|sep|>") == len(found.tool_calls)
            for call in found.tool_calls:
                json.loads(call.arguments)


def test_schemas_of_the_vendor_verifier(protocol, tok):
    compiler = GrammarCompiler(tok)
    schemas = protocol("tool_schemas.json")["schemas"]
    assert len(schemas) == 76
    for case in schemas:
        compiler.compile(build_grammar([tool(parameters=case["schema"])], "required"))


# ---- what a request asks for --------------------------------------------------------------------


def test_what_asks_for_nothing_has_no_grammar():
    assert build_grammar(None, None) is None
    assert build_grammar([], "auto", response_format={"type": "text"}) is None
    assert build_grammar([tool()], "none") is None
    assert build_grammar(None, None, response_format=json_format({"type": "object"}, strict=False)) is None


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (([tool()], "auto"), {"calls": "optional", "tools_only": False}),
        (([tool(strict=False)], "auto"), {"calls": "optional", "tools_only": True, "is_hint": True}),
        (([tool(strict=False)], None), {"calls": "optional", "tools_only": True, "is_hint": True}),
        (([tool(strict=False)], "required"), {"calls": "required", "tools_only": False, "is_hint": False}),
        (([tool("a"), tool("b")], {"type": "function", "function": {"name": "b"}}), {"calls": "required"}),
    ],
)
def test_what_a_tool_choice_asks_for(arguments, fields):
    grammar = build_grammar(*arguments)
    assert {name: getattr(grammar, name) for name in fields} == fields


def test_a_named_function_is_the_only_tool():
    grammar = build_grammar([tool("a"), tool("b")], {"type": "function", "function": {"name": "b"}})
    assert [rule.name for rule in grammar.tools] == ["b"]


def test_one_call_at_most_is_no_hint():
    grammar = build_grammar([tool(strict=False)], "auto", parallel_tool_calls=False)
    assert grammar.tools_only
    assert not grammar.is_hint
    assert grammar.param == "parallel_tool_calls"


def test_a_document_or_calls():
    grammar = build_grammar([tool(strict=False)], "auto", response_format={"type": "json_object"})
    call = '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
    for text, is_good in [
        ("{}<|close|>response<|sep|>", True),
        (f'{{"a": 1}}<|close|>response<|sep|>{call}', True),
        (f"<|close|>response<|sep|>{call}<|close|>message<|sep|>", True),
        ("<|close|>response<|sep|>", False),
        (f"text<|close|>response<|sep|>{call}", False),
        ("1<|close|>response<|sep|>", False),
    ]:
        assert grammar_accepts(grammar, text, BYTES) == is_good, text


def test_a_grammar_is_a_plain_value():
    grammar = build_grammar([tool("a", WEATHER), tool("b", strict=False)], "required", thinking=False)
    fields = json.loads(json.dumps(dataclasses.asdict(grammar)))
    fields["tools"] = tuple(ToolRule(**rule) for rule in fields["tools"])
    again = Grammar(**fields)
    assert again == grammar
    assert hash(again) == hash(grammar)
    assert len({grammar, again}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        grammar.thinking = True


@pytest.mark.parametrize(
    ("call", "param", "words"),
    [
        (lambda: build_grammar([], "required"), "tool_choice", "a call"),
        (lambda: build_grammar(None, {"type": "function", "function": {"name": "g"}}), "tool_choice", "'g'"),
        (lambda: build_grammar([tool()], {"type": "function", "function": {"name": "g"}}), "tool_choice", "'g'"),
        (lambda: build_grammar([tool()], "required", response_format={"type": "json_object"}), "response_format",
         "exclude each other"),
        (lambda: response({"type": "nothing"}), "response_format", "at /type: type must be"),
        (lambda: response({"type": "object", "properties": {"a/b": {"minLength": -1}}}), "response_format",
         "at /properties/a~1b/minLength"),
        (lambda: response({"items": {"uniqueItems": True}}), "response_format", "'uniqueItems' is not supported"),
        (lambda: response({"$ref": "https://example.com/x"}), "response_format", "own schema"),
        (lambda: response({"$ref": "#/$defs/no"}), "response_format", "not there"),
        (lambda: response({"$ref": "#"}), "response_format", "no finite value"),
        (lambda: response({"required": ["a"], "type": "object", "properties": {"a": {"$ref": "#"}}}),
         "response_format", "no finite value"),
        (lambda: response({"enum": []}), "response_format", "/enum: enum must be"),
        (lambda: response([]), "response_format", "object or a boolean"),
        (lambda: response({"const": float("nan")}), "response_format", "not plain JSON"),
        (lambda: response({"enum": ["\x00"]}), "response_format", "control characters"),
        (lambda: required(tool(parameters={"type": "array"})), "tools", "the schema of an object"),
        (lambda: required(tool(parameters={"type": "object", "required": ["x"]})), "tools", "'x' is required but not"),
        (lambda: required(tool(parameters={"anyOf": [{"type": "object"}]})), "tools", "'anyOf' is not supported"),
        (lambda: required(tool(parameters={"type": "object", "properties": []})), "tools", "at /properties"),
    ],
)  # fmt: skip
def test_bad_requests_are_refused_by_name_without_the_package(call, param, words):
    with pytest.raises(RequestError) as caught:
        call()
    assert caught.value.param == param
    assert words in str(caught.value)


UNENFORCEABLE = [
    (False, "no finite value"),
    ({"type": "string", "pattern": "("}, "unclosed group"),
    ({"type": "object", "properties": {"a": {"items": {"pattern": "(?=x)"}}}}, "/properties/a/items"),
    ({"type": "string", "pattern": "^a$", "minLength": 3}, "no value can match"),
    ({"type": "integer", "minimum": 3, "maximum": 1}, "no value can match"),
    ({"oneOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, "oneOf"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, "no finite value"),
]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        *UNENFORCEABLE,
        ({"$defs": {"a": {"pattern": "(?<!x)"}}, "type": "array", "items": {"$ref": "#/$defs/a"}}, "at /$defs/a"),
    ],
)
def test_responses_that_cannot_be_enforced_are_refused_with_their_place(schema, words):
    with pytest.raises(RequestError) as caught:
        COMPILER.compile(response(schema))
    assert caught.value.param == "response_format"
    assert words in str(caught.value)


@pytest.mark.parametrize(("schema", "words"), UNENFORCEABLE)
def test_arguments_that_cannot_be_enforced_are_refused_with_their_place(schema, words):
    with pytest.raises(RequestError) as caught:
        COMPILER.compile(required(one_argument(schema)))
    assert caught.value.param == "tools"
    assert words in str(caught.value)
    assert "of the strict tool 'f'" in str(caught.value)


def test_an_optional_argument_that_nothing_matches_cannot_be_given():
    schema = {"type": "object", "properties": {"a": {"enum": [1], "type": "null"}}}
    grammar = required(tool(parameters=schema))
    begun = '<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
    assert grammar_accepts(grammar, f"{begun}<|close|>call<|sep|><|close|>tools<|sep|>", BYTES)
    argument = '<|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|>'
    assert not grammar_accepts(grammar, f"{begun}{argument}<|close|>call<|sep|><|close|>tools<|sep|>", BYTES)


# ---- documents ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "object"}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "", "{", '{"a":  1}', '{"a":\n1}', " {}"]),
        ({"type": "object", "additionalProperties": False}, ["{}", "{ }"], ['{"a": 1}']),
        ({"enum": ["a", 1, None, [2, {"b": True}]]}, ['"a"', "1", "null", '[2, {"b": true}]'], ["2", '"b"', "[2]"]),
        ({"const": {"a": "é"}}, ['{"a": "é"}', '{"a":"é"}'], ["{}", '{"a": "e"}']),
        ({"anyOf": [{"type": "integer"}, {"type": "boolean"}]}, ["1", "true"], ['"1"', "null", "1.5"]),
        ({"type": ["string", "null"]}, ['"x"', "null"], ["1"]),
        ({"type": "array", "items": {"type": "array", "items": {"type": "integer"}}, "maxItems": 2},
         ["[]", "[[1], [2, 3]]"], ["[[], [], []]", "[1]", "[[[1]]]"]),
        ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False, "minItems": 1},
         ["[1]", '[1, "a"]'], ["[]", '["a"]', '[1, "a", 2]']),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "integer"}],
          "additionalItems": False, "type": "array"}, ["[]", "[1]"], ['["a"]', "[1, 2]"]),
        ({"type": "string", "pattern": "^[a-z]{2,3}$"}, ['"ab"', '"abc"'], ['"a"', '"abcd"', '"AB"']),
        ({"type": "string", "pattern": "b"}, ['"b"', '"abc"'], ['"a"', '""']),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ['"東京"', '"abc"', '"\\n\\t"'],
         ['"a"', '"abcd"', '"\\n"']),
        ({"type": "string"}, ['"é東😀"', '"\\"\\\\"', '""'], ['"\\x"', '"\n"', '"']),
        ({"type": "string", "format": "date"}, ['"2024-02-28"'], ['"2024-13-01"', '"x"']),
        ({"type": "string", "format": "binary"}, ['"x"'], ["1"]),
        ({"type": "integer", "minimum": -3, "exclusiveMaximum": 12}, ["-3", "0", "11"], ["-4", "12", "1.0", "01"]),
        ({"type": "number", "minimum": 0.5, "maximum": 2}, ["0.5", "1", "1.75", "2"], ["0.4", "2.1", "-1"]),
        ({"type": "integer", "multipleOf": 5}, ["0", "15", "-5"], ["7"]),
        ({"type": "object", "properties": {"é ü": {"type": "integer"}, "a\"b": {}}, "required": ["é ü"]},
         ['{"é ü": 1}', '{"é ü": 1, "a\\"b": 2, "z": 3}'], ["{}", '{"é ü": "x"}']),
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, ['{"b": 1}', '{"a": 1}'],
         ['{"a": "x"}', '{"\\u0061": "x"}', '{"a": 1, "a": "x"}', '{"b": 1, "a": "x"}']),
        ({"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
         ['{"x1": 1}', "{}"], ['{"x1": "a"}', '{"y": 1}']),
        ({"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"], "type": "object"},
                    {"properties": {"b": {"type": "null"}}, "required": ["b"]}]},
         ['{"a": 1, "b": null}'], ['{"a": 1}']),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ["1", '"a"'], ["null"]),
        ({"$ref": "#/definitions/n", "definitions": {"n": {"type": "object", "properties": {
            "v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/definitions/n"}, {"type": "null"}]}},
            "required": ["v", "next"], "additionalProperties": False}}},
         ['{"v": 1, "next": {"v": 2, "next": null}}'], ['{"v": 1}', '{"v": 1, "next": {}}']),
        ({"properties": {"c": {"$ref": "#"}, "n": {"type": "string"}}, "required": ["n"], "type": "object"},
         ['{"c": {"n": "b"}, "n": "a"}', '{"n": "a"}'], ['{"c": {}, "n": "a"}']),
        ({"properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}}, "required": ["b"],
          "type": "object"},
         ['{"a": 1, "b": 2}'], ['{"b": "x"}']),
        (True, ["1", '{"a": []}', "null"], ["", "x"]),
        ({"title": "T", "x-made-up": 3, "nullable": True, "type": "boolean"}, ["true"], ["1", "null"]),
        ({"type": "object", "properties": {"never": {"$ref": "#/$defs/n"}},
          "$defs": {"n": {"type": "object", "required": ["n"], "properties": {"n": {"$ref": "#/$defs/n"}}}}},
         ["{}"], ['{"never": {}}', '{"never": {"n": {}}}']),
    ],
)  # fmt: skip
def test_documents(schema, good, bad):
    for text in good:
        assert document_is_accepted(schema, text), text
        assert jsonschema.is_valid(schema, json.loads(text)), text
    for text in bad:
        assert not document_is_accepted(schema, text), text


def test_json_object_is_any_object():
    grammar = build_grammar(None, None, response_format={"type": "json_object"})
    assert grammar_accepts(grammar, '<|open|>response<|sep|>{"a": [1, "x"]}<|close|>response<|sep|>', BYTES)
    assert not grammar_accepts(grammar, "<|open|>response<|sep|>[1]<|close|>response<|sep|>", BYTES)


# ---- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, ["", "a", "é 東\n<b> \"x\" & 😀", "true"], []),
        ({"enum": ["a b", "", 5]}, ["a b", ""], ["a", "5"]),
        ({"const": "<|x"}, ["<|x"], ["<|"]),
        ({"type": "string", "pattern": "^a/b$"}, ["a/b"], ["a/b/", "xa/b"]),
        ({"type": "string", "pattern": "a|^b|c$"}, ["xax", "bx", "xc", "a"], ["xb", "cx"]),
        ({"type": "string", "pattern": r"^\d{2}\$$"}, ["12$"], ["12", "1٣$"]),
        ({"type": "string", "pattern": r"[|)]x\|"}, ["|x|", "a)x|b"], ["x|"]),
        ({"type": "string", "pattern": "a\nb"}, ["a\nb"], ["ab"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "東京都"], ["a", "abcd"]),
        ({"type": "string", "minLength": 2, "pattern": "^a*$"}, ["aa"], ["a", "ab"]),
        ({"allOf": [{"type": "string", "pattern": "a"}, {"pattern": "b"}]}, ["ab", "xbya"], ["a", "b"]),
        ({"type": "string", "anyOf": [{"const": "a"}, {"pattern": "^b"}]}, ["a", "bc"], ["c"]),
        ({"oneOf": [{"pattern": "^a"}, {"pattern": "b$"}], "type": "string"}, ["ax", "xb"], ["ab", "x"]),
        ({"$ref": "#/properties/w"}, ["x"], ["y"]),
        ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123", "x"]),
        ({"type": "string", "format": "date-time"}, ["2024-02-28T23:59:59.5Z", "2024-12-31T00:00:00+02:00"],
         ["2024-02-30T00:00:00Z", "2024-02-28"]),
        ({"type": "string", "format": "ipv4"}, ["127.0.0.1", "255.0.10.199"], ["256.1.1.1", "1.1.1"]),
        ({"type": "string", "format": "ipv6"}, ["::", "::1", "fe80::1:2", "1:2:3:4:5:6:7:8"], ["1:2", ":::", "g::"]),
        ({"type": "string", "format": "email"}, ["a.b+c@x-y.org"], ["a@b", "@x.org", "a b@x.org"]),
        ({"type": "string", "format": "uri"}, ["https://x.org/a?b=c#d", "urn:isbn:1"], ["x", "a b:c"]),
        ({"type": "string", "format": "duration"}, ["P1DT2H", "P3W", "PT5S"], ["P", "1D", "PT"]),
        ({"type": "string", "format": "hostname"}, ["a-b.example"], ["-a", "a..b"]),
        ({"type": "string", "format": "time"}, ["12:00:00Z"], ["24:00:00Z", "12:00"]),
    ],
)  # fmt: skip
def test_texts_of_arguments_are_raw(schema, good, bad):
    tools = tool(parameters={
        "type": "object", "properties": {"v": schema, "w": {"const": "x"}}, "required": ["v"],
        "additionalProperties": False,
    })  # fmt: skip

    def accepts(text):
        call = f'<|open|>call tool="f" index="1"<|sep|><|open|>argument key="v" type="string"<|sep|>{text}'
        output = f"<|close|>response<|sep|><|open|>tools<|sep|>{call}<|close|>argument<|sep|><|close|>call<|sep|>"
        return grammar_accepts(required(tools), f"{output}<|close|>tools<|sep|>", BYTES)

    for text in good:
        assert accepts(text), text
    for text in bad:
        assert not accepts(text), text


def test_a_value_has_the_type_that_it_says():
    union = {"type": ["string", "integer", "object", "null"], "minimum": 3}
    good = [("string", "x"), ("string", "1"), ("number", "3"), ("object", '{"a": 1}'), ("null", "null")]
    bad = [("number", "2"), ("number", "1.5"), ("boolean", "true"), ("array", "[]"), ("integer", "3"), ("null", "x")]
    for kind, text in good:
        assert argument_is_accepted(union, text, kind), (kind, text)
    for kind, text in bad:
        assert not argument_is_accepted(union, text, kind), (kind, text)


def test_a_declared_argument_does_not_come_back_as_another_one():
    grammar = required(tool(parameters={"type": "object", "properties": {"a": {"type": "boolean"}}}))
    element = '<|open|>argument key="{}" type="{}"<|sep|>{}<|close|>argument<|sep|>'

    def accepts(*arguments):
        inner = "".join(element.format(*argument) for argument in arguments)
        call = f'<|open|>call tool="f" index="1"<|sep|>{inner}<|close|>call<|sep|>'
        return grammar_accepts(
            grammar, f"<|close|>response<|sep|><|open|>tools<|sep|>{call}<|close|>tools<|sep|>", BYTES
        )

    assert accepts(("a", "boolean", "true"), ("b", "number", "1"), ("c", "string", "x"))
    assert accepts(("b", "array", "[1]"))
    assert not accepts(("b", "number", "1"), ("a", "string", "x"))


def test_names_with_markup_are_escaped():
    key = 'a "b" & c <é>'
    grammar = required(tool(parameters={"type": "object", "properties": {key: {"const": 1}}, "required": [key]}))
    text = f'<|open|>argument key="{key.replace("&", "&amp;").replace(chr(34), "&quot;")}" type="number"<|sep|>1'
    output = f'<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>{text}'
    output += "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"
    assert grammar_accepts(grammar, output, BYTES)
    (call,) = parse_output_ids(ids(output), BYTES, thinking=False).tool_calls
    assert json.loads(call.arguments) == {key: 1}


def test_markers_are_the_tokens_that_the_chat_format_writes(real):
    """A tool name that would merge with the quote before it is a token of its own."""
    matcher = GrammarCompiler(real).matcher(required(tool("_f")))
    begin = [real.special["<|close|>"], *real.encode("response"), real.special["<|sep|>"], real.special["<|open|>"]]
    begin += [*real.encode("tools"), real.special["<|sep|>"], real.special["<|open|>"], *real.encode("call")]
    assert all(matcher.accept(token) for token in begin)
    for token in (4453, 878, 1198, 1):
        mask = allowed_tokens([matcher], real.vocab_size, CPU)[0]
        assert mask.nonzero().flatten().tolist() == [token]
        assert matcher.accept(token)


def test_text_that_looks_like_a_marker_is_text(real):
    for tok in (BYTES, real):
        spelled = tok.encode("<|close|>argument<|sep|>", allow_special=False)
        matcher = GrammarCompiler(tok).matcher(build_grammar([tool(strict=False)], "required", thinking=False))
        assert all(matcher.accept(token) for token in spelled)
        assert not matcher.can_stop
        assert matcher.accept(tok.special["<|close|>"])


# ---- in front of the grammar --------------------------------------------------------------------

FORCED = {"schema": response({"const": 7}, thinking=True), "required": required(tool(), thinking=True)}


@pytest.mark.parametrize("grammar", FORCED.values(), ids=FORCED)
def test_thinking_is_free_but_for_the_end_of_the_turn(grammar):
    matcher = COMPILER.matcher(grammar)
    rest = set(range(BYTES.vocab_size)) - set(BYTES.stop_ids)
    assert allowed(matcher) == rest
    for token in [*BYTES.encode("any thing \xff"), 300, BYTES.special["<|media_pad|>"], SEP, OPEN, OPEN]:
        assert matcher.accept(token)
    for token in BYTES.stop_ids:
        assert not matcher.accept(token)


def test_a_marker_that_would_end_the_turn_is_not_begun():
    matcher = fed(FORCED["schema"], [*BYTES.encode("x"), CLOSE])
    assert allowed(matcher) == set(range(BYTES.vocab_size)) - {*BYTES.stop_ids, *b"rm"}
    matcher = fed(FORCED["schema"], [*BYTES.encode("x"), OPEN, *b"t"])  # of "think" or "tools"
    assert allowed(matcher) == set(range(BYTES.vocab_size)) - {*BYTES.stop_ids, *b"o"}
    matcher = fed(FORCED["required"], [OPEN, *b"t"])
    assert allowed(matcher) == set(range(BYTES.vocab_size)) - set(BYTES.stop_ids)


def test_long_tokens_cannot_begin_such_a_marker_either(real):
    matcher = GrammarCompiler(real).matcher(FORCED["schema"])
    assert matcher.accept(real.special["<|close|>"])
    barred = set(range(real.vocab_size)) - allowed(matcher, real.vocab_size)
    for word in ("r", "re", "response", "m", "message"):
        assert set(real.encode(word)) <= barred
    assert set(real.encode("think")) & barred == set()
    assert len(barred) < 30


@pytest.mark.parametrize(
    ("front", "rest"),
    [
        (closed("think"), opened("response") + list(b"7")),
        (closed("think"), list(b"7")),
        (opened("response"), list(b"7")),
        (list(b"hm") + opened("response"), list(b"7")),
        ([CLOSE, *b"think", *opened("response")], list(b"7")),
        ([CLOSE, CLOSE, *b"thin", SEP, *opened("think"), OPEN, *closed("think")], list(b"7")),
    ],
)
def test_the_grammar_begins_behind_thinking_however_it_ends(front, rest):
    output = [*front, *rest, *closed("response"), STOP]
    matcher = fed(FORCED["schema"], output)
    assert matcher.is_finished
    found = parse_output_ids(output, BYTES)
    assert found.content == "7"
    wrong = fed(FORCED["schema"], [*front, *rest[:-1]])
    assert not wrong.accept(ord("8"))


def test_calls_may_begin_inside_thinking():
    call = opened("tools") + ids('<|open|>call tool="f" index="1"<|sep|>') + closed("call") + closed("tools")
    output = [*b"need it", *call, STOP]
    assert fed(FORCED["required"], output).is_finished
    found = parse_output_ids(output, BYTES)
    assert (found.reasoning, found.content) == ("need it", None)
    assert [c.name for c in found.tool_calls] == ["f"]
    matcher = fed(FORCED["schema"], [*b"x", OPEN, *b"t"])
    assert not matcher.accept(ord("o"))


def test_an_answer_that_nobody_forces_may_be_missing():
    grammar = build_grammar([tool()], "auto")
    matcher = COMPILER.matcher(grammar)
    assert not matcher.constrains
    assert allowed(matcher) == set(range(BYTES.vocab_size))
    for end in (closed("message"), closed("response"), closed("response") + closed("message")):
        ended = fed(grammar, [*b"x", *end])
        assert ended.can_stop
    skipped = fed(grammar, [*b"x", *closed("response"), *opened("tools")])
    assert allowed(skipped) == {OPEN}
    assert allowed(fed(grammar, closed("think"))) != set(range(BYTES.vocab_size))


def test_a_hint_constrains_calls_alone():
    grammar = build_grammar([tool("one", strict=False), tool("two", strict=False)], "auto")
    for front in ([*b"x", STOP, 300, *closed("message")], [*closed("think"), *opened("response"), *b"y"]):
        matcher = fed(grammar, front)
        assert not matcher.constrains
        for token in ids('<|open|>tools<|sep|><|open|>call tool="'):
            assert matcher.accept(token)
        assert allowed(matcher) == {ord("o"), ord("t")}
    assert grammar_accepts(grammar, "anything <|close|> at all", BYTES)
    assert not grammar_accepts(grammar, '<|open|>tools<|sep|><|open|>call tool="no" index="1"<|sep|>', BYTES)


def test_a_prompt_may_have_begun_the_response():
    grammar = response(
        {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}, prefix='{"a": t'
    )
    assert allowed(COMPILER.matcher(grammar)) == {ord("r")}
    with pytest.raises(RequestError, match="does not match") as caught:
        COMPILER.compile(response({"type": "object"}, prefix="[1, "))
    assert caught.value.param == "messages"


# ---- ends ---------------------------------------------------------------------------------------


def test_the_stop_id_comes_exactly_at_the_end():
    matcher = fed(response({"const": 7}), b"7")
    assert allowed(matcher) == {CLOSE}
    assert not matcher.accept(STOP)
    for token in closed("response"):
        assert matcher.accept(token)
    assert matcher.can_stop
    assert not matcher.must_stop
    assert allowed(matcher) == {CLOSE, STOP}
    for token in closed("message"):
        assert matcher.accept(token)
    assert matcher.must_stop
    assert allowed(matcher) == {STOP}
    assert not matcher.is_finished
    assert matcher.accept(STOP)
    assert matcher.is_finished
    assert not matcher.accept(STOP)
    assert not matcher.accept(65)


def test_ids_beyond_the_tokenizer_are_never_allowed():
    compiler = GrammarCompiler(BYTES, 600, stop_ids=[511])
    for grammar in (FORCED["schema"], response({"type": "string"})):
        mask = allowed_tokens([compiler.matcher(grammar)], 600, CPU)
        assert mask.shape == (1, 600)
        assert not mask[0, 512:].any()
        assert not mask[0, 511]
    matcher = compiler.matcher(response({"type": "string"}))
    for token in (-1, 512, 599, 10**6):
        assert not matcher.accept(token)


def test_a_model_without_the_markup_is_refused():
    with pytest.raises(RequestError, match="needs the tokens of the chat format") as caught:
        GrammarCompiler(BYTES, 256).compile(response({"type": "object"}))
    assert caught.value.param == "response_format"


def test_half_a_character_cannot_end_a_text():
    matcher = fed(response({"type": "string"}), [34, *"é".encode()[:1]])
    assert allowed(matcher) == set(range(0x80, 0xC0))
    grammar = build_grammar([tool(strict=False)], "required", thinking=False)
    assert CLOSE not in allowed(fed(grammar, "東".encode()[:2]))


def test_a_grammar_that_is_stuck_allows_nothing():
    unwritable = {"type": "string", "pattern": "^\\x01$"}
    with pytest.raises(RequestError, match="no value can match"):
        COMPILER.compile(response(unwritable))
    matcher = COMPILER.matcher(response({"type": "object", "properties": {"a": unwritable}, "required": ["a"]}))
    while choice := allowed(matcher):
        assert not matcher.is_stuck
        assert matcher.accept(min(choice - {OPEN, 32} or choice))
    assert matcher.is_stuck
    assert not matcher.accept(STOP)
    matcher.rollback(matcher.num_tokens)
    assert not matcher.is_stuck
    assert allowed(matcher) == {ord("{"), OPEN}


# ---- state --------------------------------------------------------------------------------------


def walk(matcher, rng, tok=BYTES, *, most=3000, busy=120):
    """Take random allowed tokens to the end, and look for the end after a while; the tokens."""
    ends = [tok.stop_ids[0], tok.special["<|close|>"], *tok.encode('"')]
    ways = [token for char in "}]}]}]nt0,abé" for token in tok.encode(char)]
    taken = []
    while not matcher.is_finished:
        choice = allowed(matcher, tok.vocab_size)
        assert choice, tok.decode(taken)
        soon = [token for token in ends if token in choice][:1] or [token for token in ways if token in choice]
        is_short = len(choice) < 40 and rng.random() < 0.5
        token = rng.choice(soon if soon and (len(taken) > busy or is_short) else sorted(choice))
        assert matcher.accept(token)
        taken.append(token)
        assert len(taken) < most
    return taken


def front_of(grammar):
    """Tokens behind which a grammar is at work."""
    return opened("tools") if grammar.tools_only else closed("think") if grammar.thinking else []


ALL = [
    response({"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "number"}}, "required": ["b"]}),
    required(tool("f", WEATHER), tool("g", strict=False), parallel_tool_calls=True),
    required(tool("f", WEATHER), thinking=True),
    build_grammar([tool("f", WEATHER)], "auto"),
    build_grammar([tool("f", WEATHER)], "auto", response_format={"type": "json_object"}),
    build_grammar([tool("f", strict=False)], "auto", parallel_tool_calls=False),
]


@pytest.mark.parametrize("grammar", ALL, ids=str)
def test_tokens_can_be_taken_back(grammar):
    rng = random.Random(3)
    tokens = [*b"ab", CLOSE, OPEN, *front_of(grammar)] if grammar.thinking else []
    tokens += walk(fed(grammar, tokens), rng)
    matcher = fed(grammar, tokens)
    for _ in range(60):
        back = rng.randrange(matcher.num_tokens + 1)
        matcher.rollback(back)
        at = len(tokens) - back
        fresh = fed(grammar, tokens[:at])
        assert allowed(matcher) == allowed(fresh)
        assert (matcher.can_stop, matcher.must_stop, matcher.is_finished) == (
            fresh.can_stop, fresh.must_stop, fresh.is_finished,
        )  # fmt: skip
        assert all(matcher.accept(token) for token in tokens[at:])
        assert matcher.is_finished
    with pytest.raises(ConfigError):
        matcher.rollback(len(tokens) + 1)


def test_a_refused_token_changes_nothing():
    for grammar in ALL:
        rng = random.Random(5)
        tokens = walk(fed(grammar, front_of(grammar)), rng)
        matcher = fed(grammar, front_of(grammar))
        for token in tokens:
            good = allowed(matcher)
            for other in rng.sample(range(-2, 520), 12):
                if other not in good:
                    assert not matcher.accept(other)
            assert allowed(matcher) == good
            assert matcher.accept(token)


def test_a_clone_goes_its_own_way():
    matcher = fed(ALL[0], b'{"a":')
    copy = matcher.clone()
    assert all(copy.accept(token) for token in b' "xyz')
    assert allowed(matcher) == {32, 34}
    assert all(matcher.accept(token) for token in b'"q')
    assert copy.num_tokens == 10
    assert matcher.num_tokens == 7
    assert allowed(copy) == allowed(matcher)


def test_rows_without_a_grammar_are_free():
    matchers = [None, COMPILER.matcher(ALL[0]), COMPILER.matcher(ALL[3]), None, COMPILER.matcher(FORCED["schema"])]
    mask = allowed_tokens(matchers, 520, CPU)
    assert mask.dtype == torch.bool
    assert mask[[0, 2, 3]].all()
    assert mask[1].nonzero().flatten().tolist() == [ord("{"), OPEN]
    assert mask[4].sum() == 512 - 3
    assert allowed_tokens([None, None], 520, CPU) is None
    assert allowed_tokens([matchers[2]], 520, CPU) is None
    assert allowed_tokens([], 520, CPU) is None


def test_a_batch_allows_what_its_rows_allow_alone():
    rng = random.Random(0)
    tokens = [walk(fed(g, front_of(g)), rng) for g in ALL]
    matchers = [fed(g, front_of(g)) for g in ALL]
    for step in range(40):
        mask = allowed_tokens(matchers, 512, CPU)
        for row, matcher in enumerate(matchers):
            assert set(mask[row].nonzero().flatten().tolist()) == allowed(matcher)
            if step < len(tokens[row]):
                matcher.accept(tokens[row][step])


def test_masks_of_many_threads():
    """Requests are compiled in threads of the server while the engine fills masks."""
    compiler = GrammarCompiler(BYTES, max_entries=4)
    errors = []

    def work(seed):
        try:
            rng = random.Random(seed)
            for _ in range(6):
                name = rng.choice("abcdefgh")
                found = walk(compiler.matcher(response({"enum": [name, name * 2]})), rng)
                text = parse_output_ids(found, BYTES, thinking=False).content
                assert json.loads(text) in (name, name * 2)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert compiler.num_kept <= 4


def test_the_last_grammars_are_kept():
    compiler = GrammarCompiler(BYTES, max_entries=3)
    grammars = [response({"const": i}) for i in range(5)]
    first = compiler.compile(grammars[0])
    assert compiler.compile(grammars[0]) is first
    for grammar in grammars:
        compiler.compile(grammar)
    assert compiler.num_kept == 3
    assert compiler.compile(grammars[0]) is not first
    small = GrammarCompiler(BYTES, max_bytes=1)
    for grammar in grammars:
        small.compile(grammar)
    assert small.num_kept == 1


def test_what_is_no_grammar_is_refused():
    with pytest.raises(RequestError) as caught:
        COMPILER.compile("root ::= x")
    assert caught.value.param == "grammar"


@pytest.mark.parametrize("grammar", [ALL[0], ALL[1], ALL[3], ALL[5]], ids=lambda g: g.param)
def test_without_the_package_the_message_says_what_to_install(monkeypatch, grammar):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"llguidance.*install k3lib\[server\]") as caught:
        GrammarCompiler(BYTES).compile(grammar)
    assert caught.value.param == grammar.param


def test_the_package_is_looked_for_without_importing_it(monkeypatch):
    assert is_available()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not is_available()


# ---- limits -------------------------------------------------------------------------------------


def nested(levels, wrap, leaf):
    for _ in range(levels):
        leaf = wrap(leaf)
    return leaf


def in_array(schema):
    return {"type": "array", "items": schema}


BOMBS = {
    "levels": (nested(100, in_array, {}), "64 levels"),
    "many levels": (nested(3000, in_array, {}), "recursion depth"),
    "levels along references": (
        {"$ref": "#/$defs/d0", "$defs": {f"d{i}": nested(40, in_array, {"$ref": f"#/$defs/d{i + 1}"} if i < 9 else {})
         for i in range(10)}}, "128 levels"),
    "references": (
        {"anyOf": [{"$ref": f"#/$defs/d{i}"} for i in range(300)], "$defs": {f"d{i}": {} for i in range(300)}},
        "256 places"),
    "parts": ({"prefixItems": [{}] * 20_000}, "10000 parts"),
    "characters": ({"enum": ["x" * 300_000]}, "characters"),
    "properties": ({"properties": {f"p{i}": {} for i in range(1500)}}, "1000 schemas"),
    "patterns": ({"allOf": [{"type": "string", "pattern": f"x{i}"} for i in range(30)]}, "4 patterns"),
    "patterns of names": ({"patternProperties": {f"x{i}": {} for i in range(30)}}, "4 patterns"),
    "patterns that meet inside": (
        {"allOf": [{"additionalProperties": {"type": "string", "pattern": f"x{i}"}} for i in range(30)]}, "4 patterns"),
    "patterns along references": (
        {"$ref": "#/$defs/d0", "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}", "pattern": f"x{i}"} if i < 9 else {}
         for i in range(10)}}, "4 patterns"),
    "least length": ({"type": "string", "minLength": 10**9}, "at most 1000000"),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "words"), BOMBS.values(), ids=BOMBS)
def test_schemas_that_are_too_large_are_refused(schema, words):
    for make in (response, lambda s: required(one_argument(s, **{"$defs": s.get("$defs", {})}))):
        with pytest.raises(RequestError, match=words):
            make(schema)


def test_patterns_that_do_not_meet_are_not_counted_together():
    parts = [{"type": "object", "properties": {"id": {"pattern": f"^{i}"}}, "required": ["id"]} for i in range(20)]
    COMPILER.compile(response({"anyOf": parts}))
    COMPILER.compile(response({"type": "object", "properties": {f"p{i}": {"pattern": f"x{i}"} for i in range(20)}}))
    COMPILER.compile(response({"type": "array", "prefixItems": [{"pattern": f"x{i}"} for i in range(20)]}))


def test_a_large_most_length_is_no_burden():
    grammar = response({"type": "string", "maxLength": 2**40})
    assert len(allowed(fed(grammar, b'"'))) > 100


def test_many_schemas_of_arguments_are_refused():
    tools = [tool(f"f{i}", {"type": "object", "properties": {"a": {"const": i}}}) for i in range(500)]
    with pytest.raises(RequestError, match="at most 400 different schemas") as caught:
        COMPILER.compile(required(*tools))
    assert caught.value.param == "tools"
    COMPILER.compile(required(*(tool(f"f{i}", strict=False) for i in range(500))))


# ---- random schemas -----------------------------------------------------------------------------

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=4)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-50, 50), TEXTS)
PATTERNS = st.sampled_from(["^a+$", "b", "^[0-9]{2}$", "^(x|yy)?$", "é", "^.{1,2}$", r"^\w\d\s?$"])


def bounds(low, high, names):
    return st.tuples(st.integers(low, high), st.integers(low, high)).map(
        lambda pair: dict(zip(names, sorted(pair), strict=True))
    )


TEXT_SCHEMAS = st.one_of(
    bounds(0, 4, ("minLength", "maxLength")),
    PATTERNS.map(lambda p: {"pattern": p}),
    st.sampled_from(["date", "ipv4", "uuid"]).map(lambda f: {"format": f}),
    st.lists(TEXTS, min_size=1, max_size=3).map(lambda xs: {"enum": xs}),
).map(lambda fields: {"type": "string", **fields})
LEAVES = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "number"}, {"type": ["string", "integer"]}]),
    bounds(-30, 30, ("minimum", "maximum")).map(lambda b: {"type": "integer", **b}),
    bounds(-30, 30, ("minimum", "maximum")).map(lambda b: {"type": "number", **b}),
    st.lists(SCALARS, min_size=1, max_size=3).map(lambda xs: {"enum": xs}),
    SCALARS.map(lambda x: {"const": x}),
    TEXT_SCHEMAS,
)


def objects(children):
    return st.builds(
        lambda fields, needed, rest: {
            "type": "object",
            "properties": fields,
            "required": [name for name, is_needed in zip(fields, needed, strict=False) if is_needed],
            "additionalProperties": rest,
        },
        st.dictionaries(TEXTS, children, max_size=3),
        st.lists(st.booleans(), min_size=3, max_size=3),
        st.one_of(st.just(False), children),
    )


def arrays(children):
    return st.builds(
        lambda items, sizes: {"type": "array", "items": items, **sizes},
        children,
        bounds(0, 2, ("minItems", "maxItems")),
    )


def unions(children):
    return st.lists(children, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts})


SCHEMAS = st.recursive(LEAVES, lambda x: st.one_of(objects(x), arrays(x), unions(x)), max_leaves=6)


def referring(schema):
    """The same schema with its parts behind references."""
    return {"$ref": "#/$defs/a~1b", "$defs": {"a/b": schema}}


@settings(max_examples=30)
@given(SCHEMAS, st.booleans(), st.booleans(), st.integers(0, 2**32))
def test_whatever_is_allowed_becomes_a_document_that_validates(schema, refers, thinks, seed):
    schema = referring(schema) if refers else schema
    rng = random.Random(seed)
    front = [*b"hm", *closed("think")] if thinks else []
    tokens = front + walk(fed(response(schema, thinking=thinks), front), rng)
    found = parse_output_ids(tokens, BYTES, thinking=thinks)
    assert found.reasoning == ("hm" if thinks else None)
    assert found.tool_calls == []
    assert "\n" not in found.content
    assert jsonschema.is_valid(schema, json.loads(found.content)), found.content


@settings(max_examples=25)
@given(st.dictionaries(TEXTS, SCHEMAS, max_size=3), st.data(), st.integers(0, 2**32))
def test_whatever_is_allowed_becomes_calls_that_validate(properties, data, seed):
    needed = [name for name in properties if data.draw(st.booleans())]
    rest = data.draw(st.one_of(st.just(False), st.just(True), LEAVES))
    schema = {"type": "object", "properties": properties, "required": needed, "additionalProperties": rest}
    rng = random.Random(seed)
    grammar = required(tool("a.b-c", schema), tool("plain", strict=False), parallel_tool_calls=data.draw(st.booleans()))
    tokens = walk(COMPILER.matcher(grammar), rng, most=6000)
    found = parse_output_ids(tokens, BYTES, thinking=False)
    assert found.tool_calls
    assert grammar.parallel or len(found.tool_calls) == 1
    for call in found.tool_calls:
        arguments = json.loads(call.arguments)
        if call.name == "a.b-c":
            assert jsonschema.is_valid(schema, arguments), call.arguments
        else:
            assert call.name == "plain"


@settings(max_examples=15)
@given(SCHEMAS, st.integers(0, 2**32))
def test_whatever_is_allowed_decodes_with_the_official_tokens(real, schema, seed):
    tokens = walk(compiler_of(real).matcher(response(schema)), random.Random(seed), real, busy=40)
    found = parse_output_ids(tokens, real, thinking=False)
    assert jsonschema.is_valid(schema, json.loads(found.content)), found.content


_compilers = {}


def compiler_of(tok):
    return _compilers.setdefault(id(tok), GrammarCompiler(tok))


@settings(max_examples=40)
@given(TEXT_SCHEMAS, TEXTS)
def test_a_raw_text_obeys_what_its_json_obeys(schema, text):
    """But for formats: in these, the two ways to write a string leave out different rare cases."""
    if "format" not in schema:
        expected = jsonschema.is_valid(schema, text)
        assert argument_is_accepted(schema, text) == expected
        if "\x7f" not in text:
            assert document_is_accepted(schema, json.dumps(text, ensure_ascii=False)) == expected


def test_masks_are_packed_as_numpy_has_them():
    matcher = COMPILER.matcher(ALL[0])
    row = np.full((1, matcher.num_words), 7, dtype=np.uint32)
    Matcher.fill([matcher], row)
    assert np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0].tolist() == [ord("{"), OPEN]


def test_the_package_is_imported_in_one_place():
    folder = pathlib.Path(sys.modules["k3lib"].__file__).parent
    found = [p.name for p in folder.rglob("*.py") if "import llguidance" in p.read_text(encoding="utf-8")]
    assert found == ["grammar.py"]
