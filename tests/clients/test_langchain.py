"""langchain, with ChatOpenAI."""

from typing import Literal

import openai
import pytest

pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


class Sound(BaseModel):
    """A sound, of which there are only a few: noise finds one."""

    color: Literal["red", "blue"]
    loud: bool


@tool
def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"21 degrees in {city}"


def model_of(server, **more):
    return ChatOpenAI(model=more.pop("model", server.model), base_url=server.url, api_key="none", max_retries=0, **more)


def test_chat(scripted):
    answer = model_of(scripted, temperature=0, max_tokens=500, seed=1, model_kwargs={"user": "me"}).invoke("Say hi.")
    assert answer.content == "Hello! How can I help?"
    usage = answer.usage_metadata
    assert usage["input_token_details"]["cache_read"] == 4
    assert usage["output_token_details"]["reasoning"] > 0
    assert answer.response_metadata["finish_reason"] == "stop"


def test_stream(scripted):
    whole = None
    for piece in model_of(scripted, stream_usage=True).stream("Say hi."):
        whole = piece if whole is None else whole + piece
    assert whole.content == "Hello! How can I help?"
    assert whole.usage_metadata["output_tokens"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_tool_round_trip(scripted, stream):
    model = model_of(scripted, streaming=stream).bind_tools([get_weather], tool_choice="auto")
    asked = [HumanMessage("How is the weather in Paris and in Rome?")]
    answer = model.invoke(asked)
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [
        ("get_weather", {"city": "Paris"}),
        ("get_weather", {"city": "Rome"}),
    ]
    results = [get_weather.invoke(call) for call in answer.tool_calls]
    assert all(isinstance(result, ToolMessage) for result in results)
    assert model.invoke([*asked, answer, *results]).content == "It is 21 degrees in Paris."


def test_agent(scripted):
    agents = pytest.importorskip("langchain.agents", reason="langchain is not installed")
    agent = agents.create_agent(model_of(scripted), [get_weather])
    result = agent.invoke({"messages": [HumanMessage("How is the weather in Paris?")]})
    assert [message.type for message in result["messages"]] == ["human", "ai", "tool", "ai"]
    assert result["messages"][-1].content == "It is 21 degrees in Paris."


@pytest.mark.parametrize("method", ["json_mode", "json_schema", "function_calling"])
def test_structured_output(scripted, method):
    model = model_of(scripted).with_structured_output(Person, method=method)
    assert model.invoke("Ada is 36 years old.") == Person(name="Ada", age=36)


def test_a_random_model_is_held_to_the_schema(tiny):
    model = model_of(tiny, max_tokens=400, temperature=0, reasoning_effort="none")
    for method, more in (("json_schema", {}), ("function_calling", {"strict": True})):
        assert model.with_structured_output(Sound, method=method, **more).invoke("What?").color in ("red", "blue")


def test_log_probabilities_and_old_completions(tiny):
    answer = model_of(tiny, max_tokens=4, logprobs=True, top_logprobs=2).invoke("hi")
    assert len(answer.response_metadata["logprobs"]["content"]) == 4
    old = OpenAI(model=tiny.model, base_url=tiny.url, api_key="none", max_tokens=4, max_retries=0)
    assert isinstance(old.invoke("abc"), str)
    assert isinstance("".join(old.stream("abc")), str)


def test_errors_have_types(scripted):
    with pytest.raises(openai.NotFoundError):
        model_of(scripted, model="another").invoke("hi")
    embeddings = OpenAIEmbeddings(
        model="another", base_url=scripted.url, api_key="none", max_retries=0, check_embedding_ctx_length=False
    )
    with pytest.raises(openai.NotFoundError):
        embeddings.embed_query("hi")
