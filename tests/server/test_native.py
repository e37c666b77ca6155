"""`/generate`, `/tokenize` and `/detokenize` over a scripted engine."""

import asyncio

import pytest
from scripted import HI, MODEL, TOK, ScriptedEngine, client_of, events, refused, request

from k3lib.engine.request import StepOutput
from k3lib.server.chat import encode_segments, render_chat


def generate(body, engine=None, **options):
    return request(engine or ScriptedEngine("xyz"), "/generate", body, **options)


def test_one_text():
    engine = ScriptedEngine("xy[EOT]<|end_of_msg|>", cached=2)
    result = generate({"text": "ab<|open|>", "rid": "me"}, engine).json()
    assert (result["text"], result["output_ids"]) == ("xy", TOK.encode("xy[EOT]<|end_of_msg|>", True))
    meta = result["meta_info"]
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "me",
        "finish_reason": {"type": "stop", "matched": 258},
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "cached_tokens": 2,
    }
    prompt, params = engine.requests[0]
    assert prompt == [97, 98, 259]
    assert (params.max_new_tokens, params.temperature, params.top_p) == (128, 1.0, 1.0)


def test_special_tokens_are_shown_on_demand():
    body = {"text": "a", "sampling_params": {"skip_special_tokens": False}}
    assert generate(body, ScriptedEngine("x[EOT]y")).json()["text"] == "x[EOT]y"


def test_parameters_reach_the_engine():
    engine = ScriptedEngine("xyz", "length")
    same = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "frequency_penalty": 1, "presence_penalty": 0.5}
    same |= {"repetition_penalty": 1.25, "ignore_eos": True, "seed": 3}
    params = {**same, "max_new_tokens": 7, "min_new_tokens": 2, "stop_token_ids": [9], "n": 2, "logit_bias": {"3": 1}}
    results = generate({"input_ids": [1, 2], "sampling_params": params}, engine).json()
    assert [r["meta_info"]["finish_reason"] for r in results] == [{"type": "length", "length": 3}] * 2
    assert len({r["meta_info"]["id"] for r in results}) == 2
    got = engine.requests[0][1]
    assert {name: getattr(got, name) for name in same} == same
    assert (got.max_new_tokens, got.min_tokens, got.stop_token_ids, dict(got.logit_bias)) == (7, 2, (9,), {3: 1})
    assert engine.requests[1][1].seed == 4


def test_batches():
    engine = ScriptedEngine("xy")
    body = {"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 3, "stop": "y"}, {"max_new_tokens": 5}]}
    first, second = generate(body, engine).json()
    assert first["text"] == "x"
    assert first["meta_info"]["finish_reason"] == {"type": "stop", "matched": "y"}
    assert second["text"] == "xy"
    assert [params.max_new_tokens for _, params in engine.requests] == [3, 5]
    assert isinstance(generate({"input_ids": [[1]]}).json(), list)
    assert isinstance(generate({"input_ids": [1]}).json(), dict)


def test_streams_repeat_the_text_so_far():
    chunks = events(generate({"text": "a", "stream": True}))
    assert [c["text"] for c in chunks] == ["x", "xy", "xyz"]
    assert [c["meta_info"]["finish_reason"] for c in chunks[:-1]] == [None, None]
    chunks = events(generate({"text": ["a", "b"], "stream": True}))
    assert {c["index"]: c["text"] for c in chunks} == {0: "xyz", 1: "xyz"}


@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_request_keeps_what_it_has(stream):
    class Endless(ScriptedEngine):
        async def generate(self, prompt_ids, params):
            yield StepOutput([65], None)
            self.begun.set()
            await asyncio.sleep(60)

    async def play():
        engine = Endless()
        engine.begun = asyncio.Event()
        async with client_of(engine) as client:
            running = asyncio.create_task(client.post("/generate", json={"text": "a", "rid": "r", "stream": stream}))
            await engine.begun.wait()
            await client.post("/abort_request", json={"rid": "r"})
            return await running

    response = asyncio.run(play())
    result = events(response)[-1] if stream else response.json()
    assert result["text"] == "A"
    assert result["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": ""}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": [512]}, "input_ids"),
        ({"input_ids": [True]}, "input_ids"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "sampling_params": {"foo": 1}}, "sampling_params"),
        ({"text": "a", "sampling_params": {"json_schema": "{"}}, "sampling_params"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params"),
        ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 5000}}, "sampling_params.max_new_tokens"),
        ({"text": "a" * 5000}, "text"),
        ({"text": "a", "bootstrap_room": 1}, "bootstrap_room"),
        ({"text": "a", "top_logprobs_num": 21}, "top_logprobs_num"),
    ],
)
def test_bad_requests(body, param):
    engine = ScriptedEngine()
    refused(generate(body, engine), 400, param)
    assert not engine.requests


def test_tokens_of_a_chat_are_those_of_its_prompt():
    answer = request(ScriptedEngine(), "/tokenize", {"model": MODEL, "messages": HI, "reasoning_effort": "low"}).json()
    assert answer["tokens"] == encode_segments(TOK, render_chat(HI, thinking_effort="low"))
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 4096)


def test_tokens_of_texts_and_back():
    answer = request(ScriptedEngine(), "/tokenize", {"prompt": "é<|sep|>"}).json()
    assert answer["tokens"] == [195, 169, 261]
    answer = request(ScriptedEngine(), "/tokenize", {"prompt": ["a", "bc"]}).json()
    assert (answer["tokens"], answer["count"]) == ([[97], [98, 99]], [1, 2])
    assert request(ScriptedEngine(), "/detokenize", {"tokens": [195, 169, 261]}).json()["text"] == "é<|sep|>"
    assert request(ScriptedEngine(), "/detokenize", {"tokens": [[97], [98]]}).json()["prompt"] == ["a", "b"]
    assert request(ScriptedEngine(), "/detokenize", {"tokens": []}).json()["text"] == ""


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"messages": [{"role": "x"}]}, 400, "messages"),
        ("/tokenize", {"messages": HI, "tools": 5}, 400, "tools"),
        ("/tokenize", {"model": "other", "prompt": "a"}, 404, "model"),
        ("/detokenize", {"tokens": [512]}, 400, "tokens"),
        ("/detokenize", {"tokens": "abc"}, 400, "tokens"),
        ("/detokenize", {}, 400, "tokens"),
    ],
)
def test_bad_tokenizer_requests(path, body, status, param):
    refused(request(ScriptedEngine(), path, body), status, param)
