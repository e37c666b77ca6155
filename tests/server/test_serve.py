"""The real process with the built-in model, used through the real `openai` client."""

import json
import re
import socket
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

SCRIPT = "from k3lib.server.cli import serve; serve()"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    port = free_port()
    log = (tmp_path_factory.mktemp("serve") / "log").open("w+")
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "--port", str(port)], stdout=subprocess.PIPE, stderr=log, text=True
    )
    try:
        line = process.stdout.readline()  # printed when the model is ready, just before the socket opens
        assert re.match(rf"serving tiny on http://127.0.0.1:{port}", line), line
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=20, timeout=60)
        client.models.list()
        yield client
    finally:
        process.terminate()
        process.wait(20)


def test_health_and_models(server):
    with urllib.request.urlopen(f"{server.base_url}".replace("/v1/", "/health")) as answer:
        assert answer.status == 200
    (model,) = server.models.list().data
    assert model.id == "tiny"
    with pytest.raises(openai.NotFoundError):
        server.models.retrieve("another")


def chat(server, **more):
    return server.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Say hi."}], max_tokens=24, **more
    )


def test_chat_answers_the_same_streamed_or_not(server):
    whole = chat(server, temperature=0)
    assert whole.usage.completion_tokens <= 24
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole.choices[0].finish_reason in {"stop", "length"}
    reasoning, content, finish, usage = "", "", None, None
    for chunk in chat(server, temperature=0, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            content += choice.delta.content or ""
            finish = choice.finish_reason or finish
    message = whole.choices[0].message
    assert reasoning == (message.reasoning_content or "")
    assert content == (message.content or "")
    assert (finish, usage) == (whole.choices[0].finish_reason, whole.usage)


def test_a_seed_repeats_the_answer_whatever_else_is_running(server):
    ask = lambda: chat(server, temperature=1.0, seed=7).choices[0].message.model_dump()  # noqa: E731
    alone = ask()
    with ThreadPoolExecutor(8) as pool:
        crowd = [pool.submit(ask) for _ in range(4)]
        others = [pool.submit(chat, server, temperature=1.0, seed=n) for n in range(4)]
        assert [job.result() for job in crowd] == [alone] * 4
        assert all(job.result().choices for job in others)


def test_completions_take_text_and_ids(server):
    text = server.completions.create(model="tiny", prompt="abc", max_tokens=6, temperature=0)
    ids = server.completions.create(model="tiny", prompt=[97, 98, 99], max_tokens=6, temperature=0)
    assert text.choices[0].text == ids.choices[0].text
    streamed = server.completions.create(model="tiny", prompt="abc", max_tokens=6, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == text.choices[0].text


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "messages"),
        ({"model": "tiny", "reasoning_effort": "huge"}, "reasoning_effort"),
    ],
    ids=str,
)
def test_a_bad_request_gets_400_in_openais_shape_and_the_server_goes_on(server, change, param):
    request = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **change}
    url = f"{server.base_url}chat/completions"
    post = urllib.request.Request(url, json.dumps(request).encode(), {"content-type": "application/json"})
    with pytest.raises(urllib.request.HTTPError) as caught:
        urllib.request.urlopen(post)
    body = json.loads(caught.value.read())
    assert caught.value.code == 400
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error"
    assert (body["error"]["param"] or "").startswith(param)
    assert chat(server, temperature=0).choices


def test_a_client_that_leaves_frees_its_request(server):
    for _ in range(40):  # more than there are slots
        stream = server.completions.create(model="tiny", prompt="abc", max_tokens=2000, stream=True, temperature=0)
        next(iter(stream))
        stream.close()
    assert chat(server, temperature=0).choices
