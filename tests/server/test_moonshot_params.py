"""What vendors of Moonshot's models must accept and refuse, with `--moonshot-params` and in any case."""

import asyncio

import httpx
import pytest
from scripted import HI, ScriptedEngine, chat, refused

from k3lib.server.app import create_app
from k3lib.server.config import ApiConfig

STRICT = ApiConfig(moonshot_params=True)
NOTE = "请用 JSON 格式回答：北京是中国的首都吗？答案需要包含键 capital。"  # noqa: RUF001 - as it was published
SCHEMA = {
    "type": "object",
    "properties": {"capital": {"type": "boolean"}},
    "required": ["capital"],
    "additionalProperties": False,
}
REFUSED = [
    ("temperature", 1.1),
    ("temperature", 2.0),
    ("temperature", -0.1),
    ("top_p", 0.94),
    ("top_p", 1),
    ("frequency_penalty", 0.1),
    ("presence_penalty", -0.1),
    ("n", 2),
    ("stop", ["a"] * 6),
    ("stop", "a" * 33),
    ("stop", ["ok", "ü" * 17]),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_what_must_be_refused_is_refused_by_name_on_demand_only(name, value):
    engine = ScriptedEngine()
    refused(chat(engine, {name: value}, config=STRICT), 400, name)
    assert not engine.requests
    assert chat(engine, {name: value}).status_code == (400 if value == -0.1 and name == "temperature" else 200)


def test_what_must_be_accepted():
    fine = [
        {},
        {"temperature": 0},
        {"temperature": 0.6, "top_p": 0.95, "n": 1, "presence_penalty": 0, "frequency_penalty": 0.0},
        {"temperature": 1, "stop": ["a" * 32] * 5, "max_completion_tokens": 100},
        {"temperature": None, "top_p": None, "n": None, "stop": None},
    ]
    for body in fine:
        assert chat(ScriptedEngine(), body, config=STRICT).status_code == 200, body


def tool(name="f", **more):
    return {"type": "function", "function": {"name": name}, **more}


def dynamic(tools, **more):
    return {"role": "system", "tools": tools, **more}


@pytest.mark.parametrize("config", [ApiConfig(), STRICT], ids=["plain", "strict"])
@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "hi", "tools": [tool()]},
        {"role": "assistant", "content": "hi", "tools": [tool()]},
        dynamic([tool()], content="not empty"),
        dynamic({"f": tool()}),
        dynamic("f"),
        dynamic(["f"]),
        dynamic([{"function": {"name": "f"}}]),
        dynamic([tool(type="builtin_function")]),
        dynamic([{"type": "function"}]),
        dynamic([{"type": "function", "function": {}}]),
        dynamic([tool("1f")]),
        dynamic([tool("a@b")]),
        dynamic([tool("")]),
        dynamic([tool("f" * 257)]),
        dynamic([tool(), tool()]),
        dynamic([tool("declared")]),
        {"role": "tool", "content": "no id"},
    ],
    ids=str,
)
def test_dynamic_tools_that_are_refused(message, config):
    body = {"messages": [*HI, message, *HI], "tools": [tool("declared")]}
    refused(chat(ScriptedEngine(), body, config=config), 400, "messages")


def test_a_tool_is_declared_once_in_all_messages():
    messages = [dynamic([tool()]), *HI, dynamic([tool()])]
    refused(chat(ScriptedEngine(), {"messages": messages}, config=STRICT), 400, "messages")


@pytest.mark.parametrize("content", [None, "", []], ids=str)
def test_dynamic_tools_are_tools_everywhere(content):
    messages = [dynamic([tool("f" * 256), tool("_a-b.c1")], content=content), *HI]
    for choice in ("auto", "none", "required", {"type": "function", "function": {"name": "_a-b.c1"}}):
        answer = chat(ScriptedEngine(), {"messages": messages, "tool_choice": choice}, config=STRICT)
        assert answer.status_code == 200, (choice, answer.text)


@pytest.mark.parametrize("name", ["1f", "a@b", "", "f" * 257])
def test_the_names_of_ordinary_tools_obey_the_same_rule(name):
    refused(chat(ScriptedEngine(), {"tools": [tool(name)]}, config=STRICT), 400, "tools")


def test_tool_choice():
    none_there = [{"tool_choice": "required"}, {"tool_choice": "required", "tools": []}]
    for body in [*none_there, {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [tool()]}]:
        refused(chat(ScriptedEngine(), body, config=STRICT), 400, "tool_choice")
    for choice in ("auto", "none", None):
        assert chat(ScriptedEngine(), {"tool_choice": choice}, config=STRICT).status_code == 200


@pytest.mark.parametrize(
    ("thinking", "status"),
    [
        ({"type": "enabled"}, 200),
        ({"type": "enabled", "effort": "low", "keep": "all"}, 200),
        ({"effort": "high"}, 200),
        ({"keep": "all"}, 200),
        ({"type": "disabled"}, 200),
        ({"type": "disabled", "effort": "medium"}, 200),
        ({"type": "adaptive"}, 400),
        ({"type": "enabled", "effort": "medium"}, 400),
    ],
    ids=str,
)
def test_the_thinking_object(thinking, status):
    answer = chat(ScriptedEngine(), {"thinking": thinking}, config=STRICT)
    assert answer.status_code == status
    if status == 400:
        refused(answer, 400, "thinking")


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "xml"},
        {},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "o"}},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"name": "o", "schema": "object"}},
        {"type": "json_schema", "json_schema": {"name": "o", "schema": SCHEMA, "strict": "yes"}},
    ],
    ids=str,
)
def test_response_formats_that_are_refused(response_format):
    refused(chat(ScriptedEngine(), {"response_format": response_format}, config=STRICT), 400, "response_format")


def test_response_formats():
    schema = {"name": "o", "schema": SCHEMA}
    formats = [{"type": "text"}, {"type": "json_object"}]
    formats += [{"type": "json_schema", "json_schema": {**schema, **strict}} for strict in ({}, {"strict": None})]
    formats += [{"type": "json_schema", "json_schema": {**schema, "strict": strict}} for strict in (True, False)]
    for response_format in formats:
        answer = chat(ScriptedEngine(), {"response_format": response_format}, config=STRICT)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({"messages": [{"role": "assistant", "content": "你好"}], "thinking": {"effort": "high"}}, 99),
        ({"messages": [{"role": "user", "content": NOTE}], "thinking": {"type": "disabled"}}, 36),
        (
            {
                "messages": [{"role": "user", "content": NOTE}],
                "thinking": {"type": "disabled"},
                "response_format": {"type": "json_schema", "json_schema": {"name": "o", "schema": SCHEMA}},
            },
            119,
        ),
    ],
    ids=["assistant", "plain", "schema"],
)
def test_published_numbers_of_prompt_tokens(body, count, official):
    engine = ScriptedEngine([official.stop_ids[0]])
    app = create_app(engine, official, model_name="k3", max_model_len=4096, config=STRICT)

    async def ask():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://k3") as client:
            return await client.post("/v1/chat/completions", json={"model": "k3", **body})

    assert asyncio.run(ask()).json()["usage"]["prompt_tokens"] == count
