"""Generated requests against the real engine: nothing is answered with 5xx, and nothing is left behind."""

import asyncio
import json

import httpx
import pytest
import schemathesis
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import TOK

from k3lib.engine import AsyncEngine, Engine, EngineConfig
from k3lib.server.app import create_app
from k3lib.server.tiny import tiny_model

CONTEXT = 96


@pytest.fixture(scope="module")
def app():
    torch.manual_seed(0)
    config = EngineConfig(context_length=CONTEXT, max_running_requests=4, max_total_tokens=1024, checkpoint_grid=16)
    engine = Engine(tiny_model(dtype=torch.float32), config)
    runner = AsyncEngine(engine)
    yield create_app(runner, TOK, model_name="m", max_model_len=engine.context_length)
    runner.close()
    assert not engine.has_work
    engine.cache.check()
    assert engine.cache.free_pages + engine.cache.cached_pages == engine.cache.config.num_pages
    engine.clear_cache()
    assert engine.cache.free_pages == engine.cache.config.num_pages
    assert engine.cache.free_slots == engine.cache.config.num_slots


def operations():
    """Operations of the OpenAPI document by name."""
    document = create_app(None, TOK, model_name="m", max_model_len=CONTEXT).openapi()
    found = [result.ok() for result in schemathesis.openapi.from_dict(document).get_all_operations()]
    return {operation.label: operation for operation in found}


OPERATIONS = operations()
# the one loads files, the other waits
LEFT_OUT = {"POST /update_weights", "GET /health_generate"}


@pytest.mark.parametrize("name", sorted(OPERATIONS.keys() - LEFT_OUT))
def test_the_openapi_document_describes_no_way_to_a_5xx(app, name):
    @given(OPERATIONS[name].as_strategy())
    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    def ask(case):
        body = case.body
        if isinstance(body, dict):
            if "model" in body and len(body) % 2:
                body["model"] = "m"
            for limit in ("n", "max_tokens", "max_completion_tokens"):
                if isinstance(body.get(limit), int):
                    body[limit] = min(body[limit], 8)
        answer = asyncio.run(send(app, case, body))
        assert answer.status_code < 500 or "timeout" in answer.text, answer.text
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    ask()


async def send(app, case, body):
    async with client_of(app) as client:
        content = json.dumps(body) if isinstance(body, (dict, list)) else None
        headers = {"content-type": "application/json"} if content else {}
        return await client.request(
            case.method, case.formatted_path, params=case.query, content=content, headers=headers
        )


def client_of(app):
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://k3")


def numbers():
    return st.one_of(st.integers(-3, 40), st.floats(), st.sampled_from([1e300, 1e-320, -0.0, 2**63, 10**30]))


def anything():
    leaves = st.one_of(st.none(), st.booleans(), numbers(), st.text(max_size=8))
    return st.recursive(leaves, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3))


FIELDS = {
    "temperature": numbers(),
    "top_p": numbers(),
    "top_k": numbers(),
    "min_p": numbers(),
    "n": st.integers(-1, 3),
    "max_tokens": st.integers(-1, 12),
    "min_tokens": st.integers(-1, 12),
    "frequency_penalty": numbers(),
    "presence_penalty": numbers(),
    "repetition_penalty": numbers(),
    "logit_bias": st.dictionaries(st.integers(-2, 600).map(str), st.floats(-120, 120), max_size=4),
    "stop": st.text(max_size=2) | st.lists(st.text(max_size=2), max_size=18),
    "stop_token_ids": st.lists(st.integers(-1, 600), max_size=4),
    "ignore_eos": st.booleans(),
    "seed": st.integers() | st.floats(),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries(
        {}, optional={"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}
    ),
    "logprobs": st.booleans() | st.integers(-1, 22),
    "top_logprobs": st.integers(-1, 22),
    "echo": st.booleans(),
    "priority": st.integers(),
    "cache_salt": st.text(max_size=4),
    "timeout": numbers(),
    "reasoning_effort": st.sampled_from(["none", "low", "medium", "x"]),
    "thinking": st.fixed_dictionaries({}, optional={"type": st.text(max_size=3), "effort": anything()}),
    "tools": anything(),
    "tool_choice": anything(),
    "response_format": anything(),
    "user": anything(),
    "unheard_of": anything(),
}
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer", "x"])},
        optional={
            "content": st.text(max_size=8) | anything(),
            "name": anything(),
            "tool_calls": anything(),
            "tools": anything(),
        },
    ),
    max_size=2,
)
PROMPTS = st.one_of(
    st.text(max_size=8), st.lists(st.integers(-1, 520), max_size=6), st.lists(st.text(max_size=4), max_size=3)
)


@st.composite
def requests(draw):
    """A request that is right but for a few fields."""
    few = draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=5, unique=True))
    fields = {name: draw(FIELDS[name] | anything() if draw(st.integers(0, 4)) == 0 else FIELDS[name]) for name in few}
    fields.setdefault("max_tokens", 6)
    kind = draw(st.integers(0, 4))
    if kind == 0:
        known = ("temperature", "top_p", "top_k", "min_p", "n", "stop", "seed", "logit_bias", "ignore_eos")
        params = {name: fields[name] for name in known if name in fields}
        body = {"text": "ab", "return_logprob": fields.get("echo"), "stream": fields.get("stream")}
        return "/generate", {**body, "sampling_params": {"max_new_tokens": 6, **params}}
    if kind < 3:
        return "/v1/completions", {"model": "m", "prompt": draw(PROMPTS), **fields}
    return "/v1/chat/completions", {"model": "m", "messages": draw(MESSAGES), "reasoning_effort": "none", **fields}


@given(st.lists(requests(), min_size=1, max_size=6))
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_crowds_of_odd_requests_do_no_harm_to_one_another(app, crowd):
    good = {"model": "m", "prompt": "abc", "max_tokens": 5, "temperature": 0}

    async def play():
        async with client_of(app) as client:
            sent = [
                client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
                for path, body in crowd
            ]
            return await asyncio.gather(client.post("/v1/completions", json=good), *sent)

    first, *answers = asyncio.run(play())
    assert first.json()["choices"][0]["text"] == asyncio.run(alone(app, good))
    for answer, (path, body) in zip(answers, crowd, strict=True):
        timed_out = answer.status_code == 503 and "timeout" in answer.text
        assert answer.status_code in (200, 400) or timed_out, (path, body, answer.text)
        if answer.status_code == 400:
            assert answer.json()["error"]["message"]
        elif "event-stream" in answer.headers["content-type"]:
            assert answer.text.endswith("data: [DONE]\n\n")
            assert '"error"' not in answer.text or "timeout" in answer.text


async def alone(app, body):
    async with client_of(app) as client:
        return (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
