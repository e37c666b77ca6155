"""OpenAI's own library: what it does beyond plain requests, and the usual patterns of other servers' cookbooks."""

import json

import pytest

pytest.importorskip("openai", reason="openai is not installed")

import openai
from pydantic import BaseModel

HI = [{"role": "user", "content": "Say hi."}]
WEATHER = [{"role": "user", "content": "How is the weather in Paris and in Rome?"}]
ADA = [{"role": "user", "content": "Ada is 36 years old."}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True}}]


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def client(scripted):
    return openai.OpenAI(base_url=scripted.url, api_key="EMPTY", max_retries=0)


def test_parsed_answer(scripted, client):
    answer = client.chat.completions.parse(model=scripted.model, messages=ADA, response_format=Person)
    assert answer.choices[0].message.parsed == Person(name="Ada", age=36)


def test_parsed_tool_calls(scripted, client):
    answer = client.chat.completions.parse(model=scripted.model, messages=WEATHER, tools=TOOLS)
    calls = answer.choices[0].message.tool_calls
    assert [call.function.parsed_arguments for call in calls] == [{"city": "Paris"}, {"city": "Rome"}]


def test_events_of_a_stream(scripted, client):
    asked = {"model": scripted.model, "messages": WEATHER, "tools": TOOLS, "stream_options": {"include_usage": True}}
    with client.chat.completions.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        answer = stream.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert [json.loads(call.function.arguments) for call in answer.choices[0].message.tool_calls] == [
        {"city": "Paris"},
        {"city": "Rome"},
    ]
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0


def test_an_answer_goes_back_as_it_came(scripted, client):
    asked = client.chat.completions.create(model=scripted.model, messages=WEATHER, tools=TOOLS).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "21 degrees"} for call in asked.tool_calls]
    for message in (asked, asked.model_dump(), asked.model_dump(exclude_none=True)):
        messages = [*WEATHER, message, *results]
        answer = client.chat.completions.create(model=scripted.model, messages=messages, tools=TOOLS)
        assert answer.choices[0].message.content == "It is 21 degrees in Paris."


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({"extra_body": {"chat_template_kwargs": {"thinking": True}}}, True),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, False),
        ({"extra_body": {"thinking": {"type": "disabled"}}}, False),
        ({"extra_body": {"separate_reasoning": True, "stream_reasoning": True}}, True),
        ({"extra_body": {"top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1, "skip_special_tokens": False}}, True),
        ({"reasoning_effort": "high", "timeout": 30, "temperature": 1.0, "top_p": 0.95}, True),
        ({"reasoning_effort": "none"}, False),
    ],
    ids=str,
)
def test_usual_patterns(scripted, client, fields, thinks):
    message = client.chat.completions.create(model=scripted.model, messages=HI, **fields).choices[0].message
    assert message.content == "Hello! How can I help?"
    assert message.reasoning_content == ("They greet me." if thinks else None)
    thoughts = ""
    for chunk in client.chat.completions.create(model=scripted.model, messages=HI, stream=True, **fields):
        thoughts += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
    assert thoughts == ("They greet me." if thinks else "")


def test_errors_have_types(client):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="another", messages=HI)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="kimi-k3-tiny", prompt="a", temperature=-1)
    assert caught.value.param == "temperature"
    for ask in (client.embeddings.create, client.responses.create):
        with pytest.raises(openai.NotFoundError, match="this server has no POST"):
            ask(model="another", input="a")
