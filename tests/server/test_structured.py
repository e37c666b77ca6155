"""Structured output end to end: the chat endpoint over the engine and a random model."""

import asyncio
import json

import httpx
import pytest
import torch
from engines import make_engine, small_model
from scripted import MODEL, TOK, ScriptedEngine, chat

from k3lib.engine import AsyncEngine
from k3lib.server.app import create_app

jsonschema = pytest.importorskip("jsonschema_rs")
pytest.importorskip("llguidance")

ANSWER = {
    "type": "object",
    "properties": {
        "capital": {"type": "boolean"},
        "name": {"type": "string", "maxLength": 8},
        "sizes": {"type": "array", "items": {"enum": [1, 2, 3]}, "maxItems": 3},
    },
    "required": ["capital", "name", "sizes"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
COUNT = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}


def tool(name, parameters, **fields):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


TOOLS = [tool("get_weather", WEATHER, strict=True), tool("count", COUNT, strict=True)]
SCHEMAS = {"get_weather": WEATHER, "count": COUNT}
NAMED = {"type": "function", "function": {"name": "count"}}
CLOSE_THINK = TOK.encode("<|close|>think<|sep|>", allow_special=True)


class Dreamer:
    """In place of a runner's model: random logits, but thoughts of `length` tokens have an end of this kind."""

    def __init__(self, model, thoughts):
        self.config, self.mesh, self.device, self.dtype = model.config, model.mesh, model.device, model.dtype
        self.thoughts, self.starts = thoughts, {}

    def __call__(self, batch, cache, logits="last"):
        rows = []
        for length in batch.seq_lens.tolist():
            random = torch.Generator().manual_seed(length)
            scores = torch.randn(self.config.text.vocab_size, generator=random)
            at = length - min(self.starts.setdefault("prompt", length), length)
            if at < len(self.thoughts):
                scores[self.thoughts[at]] = 1e4
            rows.append(scores)
        return torch.stack(rows)


@pytest.fixture(scope="module")
def engine():
    running = AsyncEngine(make_engine(small_model(), pages=800, slots=60, tokenizer=TOK))
    yield running
    running.close()


def ask(engine, *bodies):
    """The answers to several requests at once."""

    async def send():
        app = create_app(engine, TOK, model_name=MODEL, max_model_len=2048)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://k3") as client:
            defaults = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
            posts = [client.post("/v1/chat/completions", json={**defaults, **body}) for body in bodies]
            return await asyncio.gather(*posts)

    return asyncio.run(send())


def choice(response):
    assert response.status_code == 200, response.text
    (only,) = response.json()["choices"]
    return only


def calls_of(message):
    calls = [call["function"] for call in message.get("tool_calls", ())]
    for call in calls:
        jsonschema.validate(SCHEMAS[call["name"]], json.loads(call["arguments"]))
    return [call["name"] for call in calls]


OFF = {"reasoning_effort": "none", "temperature": 1.0, "top_p": 1.0}


def test_documents_validate_in_a_batch_with_free_requests(engine):
    """Case J4: ten seeds of it at once, and as many requests without a grammar."""
    bodies = [
        {**OFF, "seed": seed, **({"response_format": FORMAT} if seed % 2 else {"max_tokens": 40})} for seed in range(20)
    ]
    answers = [choice(response) for response in ask(engine, *bodies)]
    for answer in answers[1::2]:
        assert answer["finish_reason"] == "stop"
        jsonschema.validate(ANSWER, json.loads(answer["message"]["content"]))
    free = [choice(response) for response in ask(engine, *bodies[:6:2])]
    assert [a["message"] for a in free] == [a["message"] for a in answers[:6:2]]


def test_a_grammar_leaves_the_neighbours_alone(engine):
    (alone,) = ask(engine, {**OFF, "seed": 5, "max_tokens": 40})
    together = ask(engine, {**OFF, "seed": 5, "max_tokens": 40}, {**OFF, "seed": 6, "response_format": FORMAT})
    assert choice(alone)["message"] == choice(together[0])["message"]


@pytest.mark.parametrize(
    "tool_choice", ["required", pytest.param(NAMED, marks=pytest.mark.again)], ids=["required", "named"]
)
def test_forced_calls_are_declared_and_validate(engine, tool_choice):
    """Case J4, with a bias so that the free text in front of the calls soon ends."""
    body = {**OFF, "tools": TOOLS, "tool_choice": tool_choice, "parallel_tool_calls": False, "max_tokens": 250}
    body["logit_bias"] = {TOK.special["<|close|>"]: 7}
    count = 8 if tool_choice == NAMED else 20  # where the model chooses, so many that it takes each of them
    answers = [choice(response) for response in ask(engine, *({**body, "seed": seed} for seed in range(count)))]
    assert {answer["finish_reason"] for answer in answers} == {"tool_calls"}
    names = [name for answer in answers for name in calls_of(answer["message"])]
    assert len(names) == count
    assert set(names) == ({"count"} if tool_choice == NAMED else set(SCHEMAS))


@pytest.mark.parametrize(
    "end",
    ["<|close|>think<|sep|>", "<|open|>response<|sep|>", "<|close|>think<|sep|><|open|>response<|sep|>"],
)
def test_the_grammar_begins_however_thinking_ends(end):
    model = small_model()
    engine = make_engine(model, pages=800, tokenizer=TOK)
    thoughts = TOK.encode("x{]} hm" + end, allow_special=True)
    engine.runner.model = Dreamer(model, thoughts)
    running = AsyncEngine(engine)
    try:
        (response,) = ask(running, {"response_format": FORMAT, "seed": 3})
    finally:
        running.close()
    answer = choice(response)
    assert answer["message"]["reasoning_content"] == "x{]} hm"
    jsonschema.validate(ANSWER, json.loads(answer["message"]["content"]))
    assert answer["finish_reason"] == "stop"


def test_thinking_cannot_end_a_turn_that_owes_an_answer():
    model = small_model()
    engine = make_engine(model, pages=800, tokenizer=TOK)
    wish = TOK.encode("hm<|end_of_msg|>", allow_special=True)
    engine.runner.model = Dreamer(model, wish)
    running = AsyncEngine(engine)
    try:
        free, owing = ask(running, {"seed": 3}), ask(running, {"seed": 3, "response_format": FORMAT, "max_tokens": 9})
    finally:
        running.close()
    assert choice(free[0])["finish_reason"] == "stop"
    assert choice(owing[0])["finish_reason"] == "length"


def test_streams_say_the_same(engine):
    body = {**OFF, "response_format": FORMAT, "seed": 11}
    (whole,) = ask(engine, body)
    (streamed,) = ask(engine, {**body, "stream": True})
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
    assert text == choice(whole)["message"]["content"]


def test_a_started_document_is_continued(engine):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": '{"capital": t', "partial": True}]
    (good,) = ask(engine, {**OFF, "messages": messages, "response_format": FORMAT, "seed": 1})
    jsonschema.validate(ANSWER, json.loads('{"capital": t' + choice(good)["message"]["content"]))
    messages[1]["content"] = "Once upon"
    (bad,) = ask(engine, {**OFF, "messages": messages, "response_format": FORMAT})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "messages")


def test_the_grammar_wins_over_min_tokens_and_ignore_eos(engine):
    short = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 1}}}
    body = {**OFF, "response_format": short, "seed": 1}
    for fields in ({"min_tokens": 60}, {"ignore_eos": True}, {"min_tokens": 60, "ignore_eos": True}):
        (response,) = ask(engine, {**body, **fields})
        answer = choice(response)
        assert (answer["message"]["content"], answer["finish_reason"]) == ("1", "stop")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
         "response_format"),
        ({"tools": [tool("f", {"type": "string"}, strict=True)]}, "tools"),
        ({"tools": [tool("f", {"type": "object", "required": ["a"]}, strict=True)]}, "tools"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_schemas_that_cannot_be_enforced_are_refused(engine, body, param, stream):
    (response,) = ask(engine, {**body, "stream": stream})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_without_the_package_plain_requests_are_answered_and_others_refused(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    running = AsyncEngine(make_engine(small_model(), pages=800, tokenizer=TOK))
    try:
        plain, hinted, owed, forced = ask(
            running, *({"max_tokens": 2, **body} for body in (
                {}, {"tools": [tool("f", COUNT)]}, {"response_format": FORMAT},
                {"tools": TOOLS, "tool_choice": "required"},
            ))
        )  # fmt: skip
    finally:
        running.close()
    assert plain.status_code == hinted.status_code == 200
    for response, param in ((owed, "response_format"), (forced, "tool_choice")):
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert "llguidance" in response.json()["error"]["message"]


def test_other_engines_get_the_grammar_with_the_parameters():
    engine = ScriptedEngine()
    assert chat(engine, {"response_format": FORMAT}).status_code == 200
    assert json.loads(engine.requests[0][1].grammar.response) == ANSWER
    assert chat(engine, {}).status_code == 200
    assert engine.requests[1][1].grammar is None


def test_native_texts_obey_a_schema_or_a_pattern(engine):
    async def send():
        app = create_app(engine, TOK, model_name=MODEL, max_model_len=2048)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://k3") as client:
            for sampling in (
                {"json_schema": json.dumps(ANSWER)},
                {"json_schema": ANSWER},
                {"regex": "(ab|cd){3}[0-9]"},
            ):
                got = await client.post("/generate", json={"text": "x", "sampling_params": sampling})
                yield got
            for sampling in ({"regex": "("}, {"regex": "a", "json_schema": {}}, {"ebnf": "x"}, {"json_schema": "{"}):
                got = await client.post("/generate", json={"text": "x", "sampling_params": sampling})
                yield got

    async def collect():
        return [got async for got in send()]

    first, second, third, *bad = asyncio.run(collect())
    for response in (first, second):
        jsonschema.validate(ANSWER, json.loads(response.json()["text"]))
    text = third.json()["text"]
    assert len(text) == 7
    assert text[-1].isdigit()
    for response in bad:
        assert (response.status_code, response.json()["error"]["param"]) == (400, "sampling_params")
