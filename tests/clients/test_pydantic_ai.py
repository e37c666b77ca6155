"""pydantic-ai."""

import asyncio
from typing import Literal

import pytest

pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed")

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ThinkingPart, ToolCallPart, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    """A person."""

    name: str
    age: int


class Sound(BaseModel):
    """A sound, of which there are only a few: noise finds one."""

    color: Literal["red", "blue"]
    loud: bool


def agent_of(server, name=None, **more):
    model = OpenAIChatModel(name or server.model, provider=OpenAIProvider(base_url=server.url, api_key="none"))
    return Agent(model, **more)


def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"21 degrees in {city}"


def parts_of(result, kind):
    return [part for message in result.all_messages() for part in message.parts if isinstance(part, kind)]


def test_chat(scripted):
    result = agent_of(scripted, instructions="Be short.").run_sync("Say hi.", model_settings={"max_tokens": 500})
    assert result.output == "Hello! How can I help?"
    assert [part.content for part in parts_of(result, ThinkingPart)] == ["They greet me."]
    usage = result.usage
    usage = usage() if callable(usage) else usage
    assert usage.cache_read_tokens == 4
    assert usage.details["reasoning_tokens"] > 0


def test_stream(scripted):
    async def read():
        async with agent_of(scripted).run_stream("Say hi.") as result:
            return [text async for text in result.stream_text(delta=True, debounce_by=None)], result

    texts, result = asyncio.run(read())
    assert len(texts) > 3
    assert "".join(texts) == "Hello! How can I help?"
    assert [part.content for part in parts_of(result, ThinkingPart)] == ["They greet me."]


def test_tool_round_trip(scripted):
    result = agent_of(scripted, tools=[get_weather]).run_sync("How is the weather in Paris and in Rome?")
    assert [call.args_as_dict() for call in parts_of(result, ToolCallPart)] == [{"city": "Paris"}, {"city": "Rome"}]
    assert result.output == "It is 21 degrees in Paris."


def test_tool_round_trip_streamed(scripted):
    async def read():
        async with agent_of(scripted, tools=[get_weather]).run_stream("How is the weather in Paris?") as result:
            return await result.get_output()

    assert asyncio.run(read()) == "It is 21 degrees in Paris."


@pytest.mark.parametrize("kind", [PromptedOutput, NativeOutput, ToolOutput], ids=lambda kind: kind.__name__)
def test_structured_output(scripted, kind):
    result = agent_of(scripted, output_type=kind(Person)).run_sync("Ada is 36 years old.")
    assert result.output == Person(name="Ada", age=36)


@pytest.mark.parametrize("kind", [NativeOutput, ToolOutput], ids=lambda kind: kind.__name__)
def test_a_random_model_is_held_to_the_schema(tiny, kind):
    output = ToolOutput(Sound, strict=True) if kind is ToolOutput else NativeOutput(Sound, strict=True)
    settings = {"max_tokens": 400, "temperature": 0, "extra_body": {"reasoning_effort": "none"}}
    assert agent_of(tiny, output_type=output).run_sync("What?", model_settings=settings).output.color in ("red", "blue")


def test_a_real_model(tiny):
    more = {"ignore_eos": True, "reasoning_effort": "none"}
    settings = {"max_tokens": 8, "temperature": 0, "seed": 3, "extra_body": more}
    assert agent_of(tiny).run_sync("hi", model_settings=settings).output


def test_errors_have_types(scripted):
    with pytest.raises(ModelHTTPError) as caught:
        agent_of(scripted, "another").run_sync("hi")
    assert caught.value.status_code == 404
    assert "does not exist" in caught.value.body["message"]
