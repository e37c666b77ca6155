"""litellm."""

import json

import pytest

litellm = pytest.importorskip("litellm", reason="litellm is not installed")

HI = [{"role": "user", "content": "Say hi."}]
WEATHER = [{"role": "user", "content": "How is the weather in Paris?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def ask(server, messages, **more):
    # its spellings of a foreign server that speaks OpenAI's API, and of Moonshot's own
    provider = more.pop("provider", "openai")
    return litellm.completion(
        model=f"{provider}/{server.model}",
        api_base=server.url,
        api_key="none",
        messages=messages,
        max_retries=0,
        **more,
    )


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "moonshot"])
def test_chat(scripted, provider):
    answer = ask(scripted, HI, provider=provider, temperature=0.5, user="me", metadata={"a": "b"})
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("Hello! How can I help?", "They greet me.")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0
    assert answer.usage.prompt_tokens_details.cached_tokens == 4


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "moonshot"])
def test_stream(scripted, provider):
    pieces = list(ask(scripted, HI, provider=provider, stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(pieces, messages=HI)
    assert whole.choices[0].message.content == "Hello! How can I help?"
    assert whole.choices[0].message.reasoning_content == "They greet me."
    assert whole.usage.prompt_tokens == ask(scripted, HI).usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_tool_round_trip(scripted, stream):
    answer = ask(scripted, WEATHER, tools=TOOLS, tool_choice="auto", parallel_tool_calls=True, stream=stream)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer))
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    result = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
    answer = ask(scripted, [*WEATHER, message, result], tools=TOOLS)
    assert answer.choices[0].message.content == "It is 21 degrees in Paris."
    # what was thought goes back with the calls
    assert scripted.requests()[-1]["messages"][1]["reasoning_content"] == "I need the weather."


def test_old_completions(tiny):
    answer = litellm.text_completion(
        model=f"text-completion-openai/{tiny.model}", api_base=tiny.url, api_key="none", prompt="abc", max_tokens=4
    )
    assert answer.usage.completion_tokens == 4


def test_a_real_model(tiny):
    answer = ask(tiny, HI, max_tokens=8, temperature=0)
    assert answer.usage.completion_tokens <= 8
    pieces = list(ask(tiny, HI, max_tokens=8, temperature=0, stream=True))
    assert pieces[-1].choices[0].finish_reason is not None


def test_errors_have_types(scripted):
    other = "openai/another"
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(model=other, api_base=scripted.url, api_key="none", messages=HI, max_retries=0)
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        ask(scripted, HI, temperature=-1)
    with pytest.raises(litellm.NotFoundError):
        litellm.embedding(model=other, api_base=scripted.url, api_key="none", input=["a"], max_retries=0)
