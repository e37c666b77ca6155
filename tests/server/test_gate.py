"""Keys, limits, bad bodies, shutting down, and the lines of the log."""

import asyncio
import json
import logging

import pytest
from scripted import HI, MODEL, TOK, ScriptedEngine, chat, client_of, events, refused, request

from k3lib.engine.request import StepOutput
from k3lib.errors import ConfigError
from k3lib.server.config import ApiConfig
from k3lib.server.logs import JsonFormatter, TextFormatter

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": HI}


def bearer(key):
    return {"authorization": f"Bearer {key}".encode()}


def status(path, body, key=None, **config):
    headers = None if key is None else bearer(key)
    response = request(ScriptedEngine(), path, body, headers, config=ApiConfig(**config))
    if response.status_code in (401, 403):
        refused(response, response.status_code, None)
    return response.status_code


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/metrics", "/server_info", "/generate"])
def test_a_key_is_demanded(path):
    body = None if path in ("/v1/models", "/metrics", "/server_info") else BODY
    for wrong in (None, "", "kez", "key2", "ключ"):
        assert status(path, body, wrong, api_key="key") == 401
    assert status(path, body, "key", api_key="key") not in (401, 403)
    assert status(path, body, "admin", api_key="key", admin_api_key="admin") not in (401, 403)
    assert status(path, body, "ключ", api_key="ключ") not in (401, 403)
    assert status(path, body) not in (401, 403)


def test_probes_need_no_key():
    assert status("/health", None, api_key="key") == status("/ready", None, api_key="key") == 200


@pytest.mark.parametrize(
    ("path", "body", "done"),
    [
        ("/flush_cache", {}, 501),
        ("/update_weights", {"model_path": "x"}, 501),
        ("/abort_request", {"abort_all": True}, 200),
    ],
)
def test_operators_have_a_key_of_their_own(path, body, done):
    assert status(path, body) == done
    assert status(path, body, "key", api_key="key") == done
    assert status(path, body, "key", api_key="key", admin_api_key="admin") == 403
    assert status(path, body, "admin", api_key="key", admin_api_key="admin") == done
    assert status(path, body, "admin", admin_api_key="admin") == done
    assert status(path, body, "other", admin_api_key="admin") in (401, 403)


def test_one_request_can_be_aborted_with_the_ordinary_key():
    assert status("/abort_request", {"rid": "x"}, "key", api_key="key", admin_api_key="admin") == 200


def test_keys_must_not_be_empty():
    with pytest.raises(ConfigError, match="api_key must not be empty"):
        ApiConfig(api_key="")


def test_browsers_are_let_in_only_by_name():
    async def ask(config):
        async with client_of(ScriptedEngine(), config=config) as client:
            origin = {"origin": "http://page", "access-control-request-method": "POST"}
            before = await client.options(CHAT, headers=origin)
            return before, await client.post(CHAT, json=BODY, headers={"origin": "http://page", **bearer("key")})

    before, after = asyncio.run(ask(ApiConfig(api_key="key")))
    assert before.status_code in (401, 405)
    assert "access-control-allow-origin" not in after.headers
    before, after = asyncio.run(ask(ApiConfig(api_key="key", cors_origins=("http://page",))))
    assert before.status_code == 200
    assert after.headers["access-control-allow-origin"] == "http://page"
    before, after = asyncio.run(ask(ApiConfig(cors_origins=("http://other",))))
    assert "access-control-allow-origin" not in after.headers


def test_large_bodies_are_refused_by_their_length_and_by_their_bytes():
    small = ApiConfig(max_body_bytes=1000)
    body = json.dumps({**BODY, "user": "x" * 2000})
    assert "1,000 bytes" in refused(request(ScriptedEngine(), CHAT, body, config=small), 413, None)

    async def parts():
        for i in range(0, len(body), 100):
            yield body[i : i + 100].encode()

    async def ask():
        async with client_of(ScriptedEngine(), config=small) as client:
            return await client.post(CHAT, content=parts(), headers={"content-type": "application/json"})

    response = asyncio.run(ask())
    assert "content-length" not in response.request.headers
    refused(response, 413, None)
    assert request(ScriptedEngine(), CHAT, json.dumps(BODY), config=small).status_code == 200


def deep(n, opening, closing):
    return opening * n + closing * n


@pytest.mark.parametrize(
    "body",
    [
        "", "{", "nul", "[]", "5", '"x"', "null", '{"model"}', b"\xff\xfe", b'{"model": "\xff"}', "{'a': 1}",
        deep(100_000, "[", "]"), '{"messages": ' + deep(100_000, "[", "]") + "}", '{"model": "a", "model"',
        '{"seed": ' + "9" * 5000 + "}", "\x00", '{"model": 1}trailing',
    ],
    ids=lambda body: repr(body)[:24],
)  # fmt: skip
def test_what_is_no_request_is_refused(body):
    engine = ScriptedEngine()
    response = request(engine, CHAT, body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert not engine.requests


@pytest.mark.parametrize("name", ["temperature", "top_p", "frequency_penalty", "timeout"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_none_are_refused_by_name(name, value):
    body = json.dumps(BODY)[:-1] + f', "{name}": {value}}}'
    refused(request(ScriptedEngine(), CHAT, body), 400, name)


@pytest.mark.parametrize("depth", [10, 150, 300, 900, 5000])
def test_deep_schemas_are_rendered_or_refused(depth):
    schema = '{"properties": {"a": ' * depth + "{}" + "}}" * depth
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {schema}}}}}'
    response = request(ScriptedEngine(), CHAT, json.dumps(BODY)[:-1] + f', "tools": [{tool}]}}', max_model_len=10**6)
    assert response.status_code in (200, 400)
    assert response.status_code == 200 or depth > 100


def test_nan_in_a_schema_is_refused_by_name():
    tool = '{"type": "function", "function": {"name": "f", "parameters": {"const": NaN}}}'
    refused(request(ScriptedEngine(), CHAT, json.dumps(BODY)[:-1] + f', "tools": [{tool}]}}'), 400, "tools")


def test_half_a_surrogate_pair_in_a_message_is_one_replacement_character():
    engine = ScriptedEngine()
    body = json.dumps({**BODY, "messages": [{"role": "user", "content": "a\ud83d"}]})
    assert request(engine, CHAT, body).status_code == 200
    assert "a\ufffd" in TOK.decode(engine.requests[0][0])


def test_other_content_types_are_not_read():
    response = request(ScriptedEngine(), CHAT, json.dumps(BODY), {"content-type": "text/plain"})
    refused(response, 400, None)


@pytest.mark.parametrize(
    "body", [{"model": MODEL}, {"messages": HI}, {**BODY, "messages": "hi"}, {**BODY, "messages": [1]}]
)
def test_missing_and_mistyped_fields_are_named(body):
    param = "model" if "model" not in body else "messages"
    refused(request(ScriptedEngine(), CHAT, body), 400, param)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../health",
        "/v1/models/../../etc/passwd",
        "/..%2f..%2fetc/passwd",
        "//health",
        "/v1/models/%00",
        "/%ff",
        "/docs",
    ],
)
def test_paths_that_lead_nowhere(path):
    response = request(ScriptedEngine(), path, None)
    assert response.status_code in (200, 404)
    assert "root:" not in response.text


def test_wrong_methods_have_the_shape_of_errors():
    refused(request(ScriptedEngine(), CHAT, None), 405, None)
    refused(request(ScriptedEngine(), "/v1/models", {}), 405, None)


@pytest.mark.parametrize("path", ["/server_info", "/flush_cache", "/update_weights"])
def test_what_needs_the_real_engine_says_so(path):
    body = {"/server_info": None, "/flush_cache": {}, "/update_weights": {"model_path": "x"}}[path]
    response = request(ScriptedEngine(), path, body)
    message = refused(response, 501, None)
    assert path in message
    assert "ScriptedEngine, which has no call()" in message
    assert response.json()["error"]["type"] == "server_error"


def test_metrics_and_model_info_work_over_any_engine():
    async def ask():
        async with client_of(ScriptedEngine(cached=3, kv=7)) as client:
            await client.post(CHAT, json=BODY)
            return await client.get("/metrics"), await client.get("/model_info"), await client.get("/get_model_info")

    metrics, info, again = asyncio.run(ask())
    label = f'{{model_name="{MODEL}"}}'
    assert f"k3lib:cached_kv_tokens_total{label} 7.0" in metrics.text
    assert f"k3lib:cached_state_tokens_total{label} 3.0" in metrics.text
    assert f"k3lib:num_requests_total{label} 1.0" in metrics.text
    assert f"k3lib:time_to_first_token_seconds_count{label} 1.0" in metrics.text
    assert info.json() == again.json()
    assert info.json()["served_model_name"] == MODEL


def test_two_apps_have_registries_of_their_own():
    first, second = (request(ScriptedEngine(), "/metrics", None) for _ in range(2))
    assert first.status_code == second.status_code == 200


class Gated(ScriptedEngine):
    """Generates when it is let."""

    def __init__(self):
        super().__init__()
        self.begun, self.go = asyncio.Event(), asyncio.Event()

    async def generate(self, prompt_ids, params):
        try:
            yield StepOutput([65], None)
            self.begun.set()
            await self.go.wait()
            yield StepOutput([66], "length")
        finally:
            self.closed += 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_drain_finishes_what_runs_and_refuses_what_comes(stream):
    async def play():
        engine = Gated()
        client = client_of(engine)
        served = client._transport.app.state.served
        async with client:
            running = asyncio.create_task(client.post(CHAT, json={**BODY, "stream": stream}))
            await engine.begun.wait()
            drain = asyncio.create_task(served.drain(10))
            await asyncio.sleep(0)
            late, health = await client.post(CHAT, json=BODY), await client.get("/health")
            ready = await client.get("/ready")
            assert not drain.done()
            engine.go.set()
            return await running, late, [health.status_code, ready.status_code], await drain

    answer, late, probes, in_time = asyncio.run(play())
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n") == stream
    assert "shutting down" in refused(late, 503, None)
    assert late.headers["retry-after"]
    assert (probes, in_time) == ([503, 503], True)


def test_a_drain_aborts_what_takes_too_long():
    async def play():
        engine = Gated()
        client = client_of(engine)
        async with client:
            running = asyncio.create_task(client.post(CHAT, json=BODY))
            await engine.begun.wait()
            in_time = await client._transport.app.state.served.drain(0.05)
            return await running, in_time, engine.closed

    answer, in_time, closed = asyncio.run(play())
    assert "shuts down" in refused(answer, 500, None)
    assert (in_time, closed) == (False, 1)


@pytest.mark.parametrize("body", [{"rid": "one"}, {"abort_all": True}])
def test_aborting(body):
    async def play():
        engine = Gated()
        async with client_of(engine) as client:
            plain = asyncio.create_task(client.post(CHAT, json={**BODY, "rid": "one"}))
            await engine.begun.wait()
            engine.begun.clear()
            nothing = await client.post("/abort", json={"request_id": "none"})
            done = await client.post("/abort_request", json=body)
            return await plain, nothing.json(), done.json(), engine.closed

    plain, nothing, done, closed = asyncio.run(play())
    assert "aborted" in refused(plain, 500, None)
    assert nothing["aborted"] == []
    assert (done["aborted"], closed) == (["one"], 1)
    refused(request(ScriptedEngine(), "/abort_request", {}), 400, "rid")
    refused(request(ScriptedEngine(), "/abort_request", {"rid": "x", "abort_all": True}), 400, "rid")


def lines(caplog):
    return [(record.getMessage(), record.fields) for record in caplog.records if hasattr(record, "fields")]


def test_the_log_has_numbers_and_no_words(caplog):
    caplog.set_level(logging.DEBUG)
    body = {"messages": [{"role": "user", "content": "a secret"}], "rid": "r1"}
    chat(ScriptedEngine(cached=2), body)
    events(chat(ScriptedEngine(), {**body, "stream": True}))
    chat(ScriptedEngine(), {**body, "temperature": -1})
    first, second, third = (fields for _, fields in lines(caplog))
    assert first["path"] == CHAT
    assert (first["status"], first["rid"], first["finish"], first["cached_tokens"]) == (200, "r1", "stop", 2)
    assert second["completion_tokens"] == first["completion_tokens"] > 0
    assert third["status"] == 400
    assert "secret" not in caplog.text
    assert not any("secret" in str(fields) for _, fields in lines(caplog))


def test_a_line_of_the_log_stays_one_line():
    record = logging.makeLogRecord(
        {"msg": "request", "name": "n", "levelname": "INFO", "fields": {"path": "/a\nb c", "n": 1}}
    )
    assert TextFormatter().format(record) == 'INFO n: request path="/a\\nb c" n=1'
    line = json.loads(JsonFormatter().format(record))
    assert (line["level"], line["message"], line["path"], line["n"]) == ("info", "request", "/a\nb c", 1)


def test_prompts_are_logged_on_demand(caplog):
    caplog.set_level(logging.INFO)
    chat(ScriptedEngine(), {"messages": [{"role": "user", "content": "a secret"}]}, config=ApiConfig(log_requests=True))
    asked = dict(lines(caplog))["asked"]
    assert "a secret" in asked["body"]


def test_moonshots_rules():
    config = ApiConfig(moonshot_params=True)
    bad = [("temperature", 1.1), ("temperature", 2.0), ("top_p", 0.9), ("frequency_penalty", 0.1), ("n", 2)]
    bad += [("presence_penalty", -0.1), ("stop", ["a"] * 6), ("stop", "a" * 33), ("temperature", -0.1)]
    for name, value in bad:
        refused(chat(ScriptedEngine(), {name: value}, config=config), 400, name)
    fine = {"temperature": 0.5, "top_p": 0.95, "n": 1, "presence_penalty": 0, "stop": ["a"] * 5}
    assert chat(ScriptedEngine(), fine, config=config).status_code == 200
    assert chat(ScriptedEngine(), {}, config=config).status_code == 200


def test_a_server_that_cuts():
    config = ApiConfig(allow_auto_truncate=True)
    engine = ScriptedEngine()
    request(
        engine,
        "/v1/completions",
        {"model": MODEL, "prompt": "abcdefgh", "max_tokens": 50},
        config=config,
        max_model_len=6,
    )
    ids, params = engine.requests[0]
    assert (TOK.decode(ids), params.max_new_tokens) == ("defgh", 1)
    request(
        engine, "/v1/completions", {"model": MODEL, "prompt": "abcd", "max_tokens": 50}, config=config, max_model_len=6
    )
    ids, params = engine.requests[1]
    assert (TOK.decode(ids), params.max_new_tokens) == ("abcd", 2)
    response = chat(engine, {}, config=config, max_model_len=40)
    usage = response.json()["usage"]
    assert usage["prompt_tokens"] == 39 - 7
