"""openai-agents, with its model for chat completions."""

import asyncio
from typing import Literal

import openai
import pytest

pytest.importorskip("agents", reason="openai-agents is not installed")

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from pydantic import BaseModel

set_tracing_disabled(True)


class Person(BaseModel):
    name: str
    age: int


class Sound(BaseModel):
    """A sound, of which there are only a few: noise finds one."""

    color: Literal["red", "blue"]
    loud: bool


@function_tool(strict_mode=False)
def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"21 degrees in {city}"


@function_tool
def get_weather_strictly(city: str) -> str:
    """Tell the weather of a city."""
    return f"21 degrees in {city}"


def agent_of(server, name=None, **more):
    client = openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0)
    return Agent(name="k3", model=OpenAIChatCompletionsModel(name or server.model, client), **more)


def run(agent, text):
    return asyncio.run(Runner.run(agent, text))


def test_chat(scripted):
    settings = ModelSettings(temperature=0.5, max_tokens=500, store=False, metadata={"a": "b"}, verbosity="low")
    result = run(agent_of(scripted, instructions="Be short.", model_settings=settings), "Say hi.")
    assert result.final_output == "Hello! How can I help?"
    usage = result.raw_responses[0].usage
    assert usage.input_tokens_details.cached_tokens == 4
    assert usage.output_tokens_details.reasoning_tokens > 0
    assert [item.type for item in result.new_items] == ["reasoning_item", "message_output_item"]


def test_stream(scripted):
    async def read():
        result = Runner.run_streamed(agent_of(scripted, model_settings=ModelSettings(include_usage=True)), "Say hi.")
        events = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
        return events, result

    events, result = asyncio.run(read())
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == result.final_output == "Hello! How can I help?"
    thoughts = [
        event.delta for event in events if event.type.startswith("response.reasoning") and "delta" in event.type
    ]
    assert "".join(thoughts) == "They greet me."
    assert result.raw_responses[0].usage.output_tokens > 0


def test_tool_round_trip(scripted):
    result = run(agent_of(scripted, tools=[get_weather]), "How is the weather in Paris and in Rome?")
    assert result.final_output == "It is 21 degrees in Paris."
    assert sum(item.type == "tool_call_item" for item in result.new_items) == 2


def test_tool_round_trip_streamed(scripted):
    async def read():
        result = Runner.run_streamed(agent_of(scripted, tools=[get_weather]), "How is the weather in Paris?")
        async for _ in result.stream_events():
            pass
        return result

    assert asyncio.run(read()).final_output == "It is 21 degrees in Paris."


def test_structured_output(scripted):
    result = run(agent_of(scripted, output_type=Person), "Ada is 36 years old.")
    assert result.final_output == Person(name="Ada", age=36)


def test_strict_and_forced_tools(scripted):
    settings = ModelSettings(tool_choice="required", parallel_tool_calls=True)
    agent = agent_of(scripted, tools=[get_weather_strictly], model_settings=settings)
    agent.tool_use_behavior = "stop_on_first_tool"
    agent.tools[0].name = "get_weather"
    assert run(agent, "How is the weather in Paris?").final_output == "21 degrees in Paris"
    (body,) = [body for body in scripted.requests() if body.get("tool_choice") == "required"][-1:]
    assert body["tools"][0]["function"]["strict"] is True


def test_a_random_model_is_held_to_the_schema(tiny):
    settings = ModelSettings(max_tokens=400, temperature=0, extra_body={"reasoning_effort": "none"})
    assert run(agent_of(tiny, output_type=Sound, model_settings=settings), "What?").final_output.color in (
        "red",
        "blue",
    )


def test_a_real_model(tiny):
    settings = ModelSettings(max_tokens=8, temperature=0, extra_body={"reasoning_effort": "none"})
    assert isinstance(run(agent_of(tiny, model_settings=settings), "hi").final_output, str)


def test_errors_have_types(scripted):
    with pytest.raises(openai.NotFoundError):
        run(agent_of(scripted, "another"), "hi")
