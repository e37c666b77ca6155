"""The HTTP server over a scripted engine."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest
from pydantic import TypeAdapter
from scripted import ANSWER, HI, MODEL, TOK, ScriptedEngine, chat, client_of, complete, events, refused, request

from k3lib.engine.request import StepOutput
from k3lib.errors import CapacityError, RequestError
from k3lib.server.app import create_app
from k3lib.server.chat import encode_segments, render_chat
from k3lib.server.schemas import ChatAnswer, ChatChunk, CompletionAnswer


def assemble(chunks, index=0):
    """The message and finish reason that a client puts together."""
    message, finish = {"content": "", "reasoning_content": ""}, None
    calls = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            assert finish is None
            for key in ("content", "reasoning_content"):
                message[key] += choice["delta"].get(key) or ""
            for piece in choice["delta"].get("tool_calls", []):
                at = piece.pop("index")
                if at not in calls:
                    assert at == len(calls)
                    assert set(piece) == {"id", "type", "function"}
                    assert piece["function"]["arguments"] == ""
                    calls[at] = piece
                else:
                    assert at == len(calls) - 1
                    assert list(piece) == ["function"]
                    assert list(piece["function"]) == ["arguments"]
                    calls[at]["function"]["arguments"] += piece["function"]["arguments"]
            finish = choice["finish_reason"]
    return {**{k: v or None for k, v in message.items()}, "tool_calls": list(calls.values())}, finish


@pytest.fixture
def vectors(golden):
    return json.loads((golden / "protocol/api.json").read_text(encoding="utf-8"))


def test_api_vectors(vectors):
    for case in vectors["cases"]:
        body, want = case["request"], case["response"]
        engine = ScriptedEngine(case["model_output_tiny_token_ids"], case["engine_finish"])
        response = request(engine, "/v1/chat/completions", body)
        assert response.status_code == want["status"], response.text
        got = response.json()
        ChatAnswer.model_validate(got)
        assert engine.requests[0][0] == case["prompt_tiny_token_ids"], case["name"]
        message = got["choices"][0]["message"]
        assert {k: message.get(k) for k in want["message"]} == want["message"], case["name"]
        assert ("tool_calls" in message) == ("tool_calls" in want["message"])
        assert message["refusal"] is None
        assert got["choices"][0]["finish_reason"] == want["finish_reason"]
        assert {k: got["usage"][k] for k in want["usage"]} == want["usage"], case["name"]


def test_api_vectors_streamed(vectors):
    for case in vectors["cases"]:
        body, want = case["request"], case["response"]
        for step in (1, 7, 1000):
            engine = ScriptedEngine(case["model_output_tiny_token_ids"], case["engine_finish"])
            engine.step = step
            body = {**body, "stream": True, "stream_options": {"include_usage": True}}
            chunks = events(request(engine, "/v1/chat/completions", body))
            assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            assert chunks[-1]["choices"] == []
            for chunk in chunks:
                TypeAdapter(ChatChunk).validate_python(chunk)
            usage = chunks[-1]["usage"]
            assert {k: usage[k] for k in want["usage"]} == want["usage"], case["name"]
            assert all(chunk["usage"] is None for chunk in chunks[:-1])
            assert len({chunk["id"] for chunk in chunks}) == 1
            message, finish = assemble(chunks)
            assert finish == want["finish_reason"]
            expected = {"tool_calls": [], **want["message"]}
            keys = ["content", "tool_calls"]
            keys += [] if case["skipped_think"] else ["reasoning_content"]
            assert {k: message[k] for k in keys} == {k: expected[k] for k in keys}, case["name"]


def test_api_errors(vectors):
    for case in vectors["errors"]:
        engine = ScriptedEngine()
        body = case["raw_body"] if "raw_body" in case else case["request"]
        refused(request(engine, "/v1/chat/completions", body), case["status"], case["param"])
        assert not engine.requests, case["name"]


def test_health_and_models():
    engine = ScriptedEngine()
    assert request(engine, "/health", None).status_code == 200
    listed = request(engine, "/v1/models", None).json()
    assert [model["id"] for model in listed["data"]] == [MODEL]
    assert request(engine, f"/v1/models/{MODEL}", None).json()["id"] == MODEL
    refused(request(engine, "/v1/models/other/name", None), 404, "model")
    refused(request(engine, "/v1/nothing", None), 404, None)


def test_defaults_of_both_endpoints():
    engine = ScriptedEngine()
    chat(engine, {}, max_model_len=1000)
    prompt, params = engine.requests[-1]
    assert (params.temperature, params.top_p, params.seed) == (1.0, 0.95, None)
    assert params.max_new_tokens == 1000 - len(prompt)
    assert params.stop_token_ids == TOK.stop_ids
    complete(engine, {"prompt": "abc"}, max_model_len=300_000)
    _, params = engine.requests[-1]
    assert (params.temperature, params.top_p, params.max_new_tokens) == (1.0, 1.0, 131_072)


def test_parameters_reach_the_engine():
    engine = ScriptedEngine()
    same = {"temperature": 0, "top_p": 0.5, "seed": 7, "top_k": 3, "ignore_eos": True, "min_p": 0.25, "min_tokens": 2}
    same |= {"frequency_penalty": 0.5, "presence_penalty": -1, "repetition_penalty": 1.5}
    body = {**same, "logit_bias": {"5": -2, "7": 100}, "stop_token_ids": [65], "logprobs": True, "top_logprobs": 3}
    chat(engine, {**body, "max_tokens": 9, "max_completion_tokens": 5, "n": 2})
    first, second = (params for _, params in engine.requests)
    assert {name: getattr(first, name) for name in same} == same
    assert (first.max_new_tokens, first.stop_token_ids) == (5, (65,))
    assert dict(first.logit_bias) == {5: -2, 7: 100}
    assert (first.logprobs, first.top_logprobs, first.prompt_logprobs) == (True, 3, False)
    assert second == dataclasses.replace(first, seed=8)
    assert chat(engine, {"top_k": -1, "stop_token_ids": [65]}).status_code == 200
    assert (engine.requests[-1][1].top_k, engine.requests[-1][1].stop_token_ids) == (0, (*TOK.stop_ids, 65))


def test_only_what_a_request_needs_is_passed_to_the_engine():
    class Keywords(ScriptedEngine):
        async def generate(self, prompt_ids, params, **extra):
            self.extra = extra
            async for item in super().generate(prompt_ids, params):
                yield item

    engine = Keywords()
    chat(engine, {"timeout": 50, "rid": "a", "user": "u"})
    assert engine.extra == {}
    chat(engine, {"priority": -3, "cache_salt": "tenant"})
    assert engine.extra == {"priority": -3, "namespace": "tenant"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("frequency_penalty", 2.5),
        ("presence_penalty", -3),
        ("repetition_penalty", 0),
        ("min_p", 1.1),
        ("min_tokens", -3),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"512": 1}),
        ("logit_bias", [1]),
        ("logprobs", 1),
        ("logprobs", 0),
        ("top_logprobs", 2),
        ("top_logprobs", 21),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", "x"),
        ("priority", "high"),
        ("cache_salt", 5),
        ("timeout", 0),
        ("rid", "two words"),
        ("rid", "x\r\ny"),
        ("temperature", "hot"),
        ("temperature", True),
        ("max_tokens", 5.5),
        ("stream", "yes"),
        ("n", "2"),
        ("seed", 1.5),
        ("stream_options", 5),
        ("model", None),
        ("best_of", 2),
        ("include_stop_str_in_output", True),
        ("separate_reasoning", False),
        ("guided_json", {}),
        ("temperature", -0.1),
        ("top_p", 0),
        ("n", 1000),
        ("max_tokens", -1),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop", ["x"] * 10_000),
        ("stop", [5]),
        ("add_generation_prompt", False),
        ("chat_template_kwargs", {"builtin_tools": []}),
        ("continue_final_message", 3),
    ],
)
def test_unsupported_values_are_refused_by_name(field, value):
    engine = ScriptedEngine()
    refused(chat(engine, {field: value}), 400, field)
    assert not engine.requests


def test_values_that_ask_for_nothing_are_accepted():
    neutral = {"frequency_penalty": 0, "presence_penalty": 0.0, "logprobs": False, "n": 1}
    neutral |= {"logit_bias": None, "user": "u", "metadata": {}, "stop": None, "tools": [], "best_of": 1}
    neutral |= {"skip_special_tokens": True, "spaces_between_special_tokens": False, "top_logprobs": 0}
    assert chat(ScriptedEngine(), neutral).status_code == 200


def tool(**extra):
    return {"type": "function", "function": {"name": "f", "parameters": {}, **extra}}


def test_a_schema_that_is_not_strict_is_only_a_note():
    schema = {"name": "o", "strict": False, "schema": {"type": "object"}}
    response_format = {"type": "json_schema", "json_schema": schema}
    engine = ScriptedEngine()
    assert chat(engine, {"response_format": response_format}).status_code == 200
    assert "response_format=json_schema" in TOK.decode(engine.requests[0][0])


def test_images_are_refused():
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = {"messages": [{"role": "user", "content": [part]}]}
    assert "does not accept images" in refused(chat(ScriptedEngine(), body), 400, "messages[0].content[0]")


@pytest.mark.parametrize(
    ("body", "thinking", "effort"),
    [
        ({"reasoning_effort": None}, True, "max"),
        ({"reasoning_effort": "none", "thinking": {"type": "enabled"}}, True, "max"),
        ({"reasoning_effort": "none", "thinking": {"effort": "low"}}, True, "low"),
        ({"thinking": {"type": "disabled", "effort": "zzz"}}, False, None),
        ({"chat_template_kwargs": {"thinking_effort": None}}, True, None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False, None),
        ({"thinking": {"effort": "none"}}, False, None),
    ],
)
def test_spellings_of_thinking(body, thinking, effort):
    engine = ScriptedEngine()
    chat(engine, body)
    segments = render_chat(HI, thinking=thinking, thinking_effort=effort)
    assert engine.requests[0][0] == encode_segments(TOK, segments)


@pytest.mark.parametrize(
    ("last", "kwargs", "output", "content", "reasoning"),
    [
        ({"content": "Sure, "}, {}, "ok<|close|>response<|sep|>", "ok", None),
        ({"content": [{"type": "text", "text": ""}]}, {}, "r<|close|>think<|sep|>ok", "ok", "r"),
        ({"reasoning_content": "I"}, {}, " am<|close|>think<|sep|>ok", "ok", " am"),
        ({"content": "a"}, {"reasoning_effort": "none"}, "b<|close|>response<|sep|>", "b", None),
    ],
)
def test_continuing_the_last_message(last, kwargs, output, content, reasoning):
    engine = ScriptedEngine(output + "<|end_of_msg|>")
    messages = [*HI, {"role": "assistant", "partial": True, **last}]
    response = chat(engine, {"messages": messages, **kwargs}).json()
    message = response["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == (content, reasoning)
    prompt = len(engine.requests[0][0])
    billed = response["usage"]["prompt_tokens"]
    is_opener = TOK.decode(engine.requests[0][0]).endswith("think<|sep|>")
    assert billed == prompt - (7 if is_opener else 0)


@pytest.mark.parametrize("step", [1, 3, 100])
@pytest.mark.parametrize(
    ("stop", "content", "finish"),
    [
        ("lo", "Hel", "stop"),
        (["!", "ell"], "H", "stop"),
        ("think", "Hello!", "stop"),
        (["o!x", "!!"], "Hello!", "stop"),
        ("<|close|>", "Hello!", "stop"),
        ("Hello", None, "stop"),
    ],
)
def test_stop_strings_end_visible_content_only(step, stop, content, finish):
    plain, streamed = ScriptedEngine(step=step), ScriptedEngine(step=step)
    choice = chat(plain, {"stop": stop}).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (content, finish)
    assert choice["message"]["reasoning_content"] == "think"
    message, reason = assemble(events(chat(streamed, {"stop": stop, "stream": True})))
    assert (message["content"], reason) == (content, finish)
    assert plain.closed == streamed.closed == 1


def test_content_held_for_a_stop_string_comes_before_tool_calls():
    output = "<|close|>think<|sep|><|open|>response<|sep|>ab<|close|>response<|sep|>"
    output += '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|>'
    body = {"stop": "bc", "tools": [tool()], "stream": True}
    chunks = events(chat(ScriptedEngine(output + "<|end_of_msg|>"), body))
    kinds = [key for c in chunks for key in c["choices"][0]["delta"] if c["choices"]]
    assert kinds[-1] == "tool_calls"
    message, finish = assemble(chunks)
    assert (message["content"], finish) == ("ab", "tool_calls")
    assert message["tool_calls"][0]["id"] == "f:0"


def test_arguments_of_a_tool_call_are_streamed(monkeypatch):
    monkeypatch.setattr("k3lib.server.calls.HELD", -1)
    output = '<|close|>think<|sep|><|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
    output += '<|open|>argument key="text" type="string"<|sep|>é"\n<|close|>argument<|sep|><|close|>call<|sep|>'
    chunks = events(chat(ScriptedEngine(output + "<|end_of_msg|>"), {"tools": [tool()], "stream": True}))
    pieces = [call for c in chunks for call in c["choices"][0]["delta"].get("tool_calls", [])]
    first = {"index": 0, "id": "f:0", "type": "function", "function": {"name": "f", "arguments": ""}}
    fragments = ['{"text": "é', '\\"', "\\n", '"', "}"]
    assert pieces == [first, *({"index": 0, "function": {"arguments": f}} for f in fragments)]


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_only_complete_calls_count(finish, monkeypatch):
    monkeypatch.setattr("k3lib.server.calls.HELD", -1)
    argument = '<|open|>argument key="a"<|sep|>x'
    cut = f'<|open|>call tool="f" index="1"<|sep|>{argument}'
    output = f"<|close|>think<|sep|><|open|>tools<|sep|>{cut}"
    body = {"tools": [tool()]}
    choice = chat(ScriptedEngine(output, finish), body).json()["choices"][0]
    assert "tool_calls" not in choice["message"]
    message, reason = assemble(events(chat(ScriptedEngine(output, finish), {**body, "stream": True})))
    assert choice["finish_reason"] == reason == finish
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": "x'}
    output += f"{cut}<|close|>argument<|sep|><|close|>call<|sep|>"
    choice = chat(ScriptedEngine(output, finish), body).json()["choices"][0]
    assert [call["id"] for call in choice["message"]["tool_calls"]] == ["f:0"]
    message, reason = assemble(events(chat(ScriptedEngine(output, finish), {**body, "stream": True})))
    assert choice["finish_reason"] == reason == ("length" if finish == "length" else "tool_calls")
    assert [call["id"] for call in message["tool_calls"]] == ["f:0", "f:1"]
    assert message["tool_calls"][1]["function"]["arguments"] == '{"a": "x"}'


@pytest.mark.parametrize("step", [1, 1000])
def test_no_call_follows_a_stop_string(step):
    output = "<|close|>think<|sep|><|open|>response<|sep|>abc<|close|>response<|sep|>"
    output += '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|>'
    body = {"stop": "b", "tools": [tool()]}
    choice = chat(ScriptedEngine(output, step=step), body).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("a", "stop")
    assert "tool_calls" not in choice["message"]
    message, finish = assemble(events(chat(ScriptedEngine(output, step=step), {**body, "stream": True})))
    assert (message["content"], message["tool_calls"], finish) == ("a", [], "stop")


def test_several_answers():
    engine = ScriptedEngine()
    response = chat(engine, {"n": 3}).json()
    assert [choice["index"] for choice in response["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in response["choices"]} == {"Hello!"}
    tokens = len(engine.output)
    assert response["usage"]["completion_tokens"] == 3 * tokens
    assert response["usage"]["prompt_tokens"] == len(engine.requests[0][0]) - 7
    chunks = events(chat(ScriptedEngine(), {"n": 3, "stream": True}))
    assert all(assemble(chunks, i)[0]["content"] == "Hello!" for i in range(3))
    assert "usage" not in chunks[-1]


def test_cached_tokens_are_reported_when_the_engine_knows_them():
    usage = chat(ScriptedEngine(cached=4), {}).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}
    usage = chat(ScriptedEngine(cached=4, kv=9), {"n": 2}).json()["usage"]
    by_kind = {"cached_tokens": 4, "cached_kv_tokens": 9, "cached_state_tokens": 4}
    assert usage["prompt_tokens_details"] == by_kind
    usage = complete(ScriptedEngine(cached=1, kv=2), {"prompt": ["abc", "def"], "n": 2}).json()["usage"]
    assert usage["prompt_tokens_details"] == {name: 2 * n for name, n in zip(by_kind, (1, 2, 1), strict=True)}
    assert "prompt_tokens_details" not in chat(ScriptedEngine(), {}).json()["usage"]


class PairEngine:
    """The smallest engine: plain pairs, and an iterator without aclose."""

    def generate(self, prompt_ids, params):
        return self

    def __aiter__(self):
        return self

    async def __anext__(self):
        return TOK.encode("a<|open|>response<|sep|>b"), "length"


def test_plain_pairs_are_enough_of_an_engine():
    choice = chat(PairEngine(), {}).json()["choices"][0]
    assert choice["finish_reason"] == "length"


def test_a_prompt_longer_than_the_context():
    engine = ScriptedEngine()
    refused(chat(engine, {}, max_model_len=20), 400, "messages")
    refused(complete(engine, {"prompt": "abcdef"}, max_model_len=6), 400, "prompt")
    refused(chat(engine, {"max_tokens": 5000}), 400, "max_tokens")
    refused(chat(engine, {"max_completion_tokens": 5000}), 400, "max_completion_tokens")
    assert not engine.requests


@pytest.mark.parametrize("finish", ["abort", "error"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_gives_up_at_once(finish, stream):
    response = chat(ScriptedEngine([], finish), {"stream": stream})
    refused(response, 500, None)
    assert response.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    ("error", "status"),
    [(RequestError("no", param="seed"), 400), (CapacityError("full"), 429), (OSError("x"), 500)],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_the_engine_have_their_status(error, status, stream):
    response = chat(ScriptedEngine(error=error), {"stream": stream})
    refused(response, status, getattr(error, "param", None))
    assert ("retry-after" in response.headers) == (status == 429)


@pytest.mark.parametrize("error", [None, ValueError("secret")])
def test_an_error_after_streaming_began_is_an_event(error):
    engine = ScriptedEngine(ANSWER[:8], "error", error=error, after=4)
    *before, last = events(chat(engine, {"stream": True}))
    assert before
    assert last["error"]["type"] == "server_error"
    assert "secret" not in json.dumps(last)
    assert engine.closed == 1


async def drive(app, body, disconnect_after):
    """Speak ASGI to the app and leave after some events."""
    sent, gone = [], asyncio.Event()
    inbox = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive():
        if inbox:
            return inbox.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)
        if len(sent) >= disconnect_after:
            gone.set()

    if disconnect_after == 0:
        asyncio.get_running_loop().call_later(0.02, gone.set)
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    scope |= {"query_string": b"", "http_version": "1.1", "asgi": {"spec_version": "2.4"}}
    scope["headers"] = [(b"content-type", b"application/json")]
    await asyncio.wait_for(app(scope, receive, send), timeout=5)
    return sent


@pytest.mark.parametrize(("stream", "disconnect_after"), [(True, 4), (False, 0), (True, 0)])
def test_a_client_that_leaves_ends_the_request(stream, disconnect_after):
    class Endless(ScriptedEngine):
        async def generate(self, prompt_ids, params):
            try:
                while disconnect_after:
                    await asyncio.sleep(0)
                    yield StepOutput([65], None)
                await asyncio.Event().wait()
            finally:
                self.closed += 1

    engine = Endless()
    app = create_app(engine, TOK, model_name=MODEL, max_model_len=4096)
    body = {"model": MODEL, "messages": HI, "stream": stream}
    asyncio.run(drive(app, body, disconnect_after))
    assert engine.closed == 1


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("a<|open|>", [[97, 259]]),
        (["a", "b"], [[97], [98]]),
        ([1, 2, 259], [[1, 2, 259]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
    ids=str,
)
def test_kinds_of_raw_prompts(prompt, ids):
    engine = ScriptedEngine("xy<|end_of_msg|>")
    response = complete(engine, {"prompt": prompt, "max_tokens": 5}).json()
    CompletionAnswer.model_validate(response)
    assert [prompt_ids for prompt_ids, _ in engine.requests] == ids
    assert [choice["text"] for choice in response["choices"]] == ["xy"] * len(ids)
    assert response["object"] == "text_completion"
    assert response["usage"] == {
        "prompt_tokens": sum(map(len, ids)),
        "completion_tokens": 3 * len(ids),
        "total_tokens": sum(map(len, ids)) + 3 * len(ids),
    }


@pytest.mark.parametrize("prompt", ["", [], [[]], [512], [-1], [[1], [512]], [True], 5, [1, "a"]])
def test_bad_raw_prompts(prompt):
    refused(complete(ScriptedEngine(), {"prompt": prompt}), 400, "prompt")


@pytest.mark.parametrize(
    ("field", "value"), [("logprobs", 21), ("logprobs", True), ("best_of", 2), ("suffix", "x"), ("n", 0), ("foo", 1)]
)
def test_unsupported_completion_fields(field, value):
    refused(complete(ScriptedEngine(), {"prompt": "a", field: value}), 400, field)


def test_completion_stream_with_echo_and_stop():
    body = {"prompt": ["ab", "c"], "n": 2, "echo": True, "stop": "yz", "stream": True}
    body["stream_options"] = {"include_usage": True}
    chunks = events(complete(ScriptedEngine("x😀yzw"), body))
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {0: "abx😀", 1: "abx😀", 2: "cx😀", 3: "cx😀"}
    assert chunks[-1]["usage"]["prompt_tokens"] == 3
    assert chunks[-1]["usage"]["completion_tokens"] == 4 * 7


def test_a_completion_of_no_tokens():
    class Silent(ScriptedEngine):
        async def generate(self, prompt_ids, params):
            for item in ():
                yield item

    body = {"prompt": "ab", "max_tokens": 0, "echo": True}
    choice = complete(Silent(), body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    refused(complete(Silent(), {"prompt": "ab", "max_tokens": 1}), 500, None)


def test_turn_two_starts_with_the_tokens_of_turn_one():
    engine = ScriptedEngine()
    message = chat(engine, {}).json()["choices"][0]["message"]
    chat(engine, {"messages": [*HI, message, {"role": "user", "content": "more"}]})
    first, second = (ids for ids, _ in engine.requests)
    turn = first + engine.output
    assert second[: len(turn)] == turn


def test_usage_in_every_chunk():
    body = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    chunks = events(chat(ScriptedEngine(), body))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == len(TOK.encode(ANSWER, True))
    chunks = events(complete(ScriptedEngine("abc"), {"prompt": "x", **body}))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3])
def test_stop_strings_wait_for_min_tokens(min_tokens):
    body = {"prompt": "x", "stop": "b", "min_tokens": min_tokens}
    text = complete(ScriptedEngine("abcbd"), body).json()["choices"][0]["text"]
    assert text == ("a" if min_tokens < 2 else "abc")


def test_a_stop_id_of_the_request_is_no_text():
    body = {"prompt": "x", "stop_token_ids": [99]}
    choice = complete(ScriptedEngine("abc"), body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")


def test_named_special_tokens_can_be_left_out():
    body = {"prompt": "x[BOS]", "echo": True, "logprobs": 0}
    choice = complete(ScriptedEngine("a[EOT]<|open|>b"), body).json()["choices"][0]
    assert choice["text"] == "x[BOS]a[EOT]<|open|>b"
    choice = complete(ScriptedEngine("a[EOT]<|open|>b"), {**body, "skip_special_tokens": True}).json()["choices"][0]
    assert choice["text"] == "xa<|open|>b"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 10]


def test_the_name_of_a_request_is_its_id_and_cannot_be_taken_twice():
    for body in ({"rid": "mine"}, {"request_id": "mine"}):
        response = chat(ScriptedEngine(), body)
        assert response.json()["id"] == response.headers["x-request-id"] == "mine"
    assert complete(ScriptedEngine(), {"prompt": "x"}).json()["id"].startswith("cmpl-")

    async def twice():
        started, released = asyncio.Event(), asyncio.Event()

        class Held(ScriptedEngine):
            async def generate(self, prompt_ids, params):
                started.set()
                await released.wait()
                async for item in super().generate(prompt_ids, params):
                    yield item

        async with client_of(Held()) as client:
            body = {"model": MODEL, "messages": HI, "rid": "same"}
            first = asyncio.ensure_future(client.post("/v1/chat/completions", json=body))
            await started.wait()
            second = await client.post("/v1/chat/completions", json=body)
            released.set()
            answers = [await first, second, await client.post("/v1/chat/completions", json=body)]
        return [answer.status_code for answer in answers]

    assert asyncio.run(twice()) == [200, 400, 200]


def test_a_timeout_ends_a_request():
    class Slow(ScriptedEngine):
        async def generate(self, prompt_ids, params):
            try:
                yield StepOutput([65], None)
                await asyncio.sleep(60)
            finally:
                self.closed += 1

    engine = Slow()
    assert "timeout of 0.05 s" in refused(chat(engine, {"timeout": 0.05}), 503, None)
    last = events(chat(engine, {"timeout": 0.05, "stream": True}))[-1]
    assert "timeout of 0.05 s" in last["error"]["message"]
    assert engine.closed == 2


def test_more_answers_than_a_request_may_have():
    refused(complete(ScriptedEngine(), {"prompt": ["a"] * 2049}), 400, "prompt")
    refused(complete(ScriptedEngine(), {"prompt": ["a"] * 100, "n": 21}), 400, "n")
