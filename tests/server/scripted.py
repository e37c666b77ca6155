"""A scripted engine, and the ways to ask a server over it."""

import asyncio
import json

import httpx

from k3lib.engine.request import StepOutput, TokenLogprob
from k3lib.server.app import create_app
from k3lib.server.tokenizer import load_tokenizer

TOK = load_tokenizer()
MODEL = "kimi-k3-tiny"
ANSWER = "think<|close|>think<|sep|><|open|>response<|sep|>Hello!<|close|>response<|sep|>"
ANSWER += "<|close|>message<|sep|><|end_of_msg|>"
HI = [{"role": "user", "content": "hi"}]


def logprob_of(token_id, top=0):
    """A number that tells tokens apart, with the token itself and its neighbours as the best ones."""
    return TokenLogprob(token_id, -token_id / 1000, tuple((token_id + i, -(token_id + i) / 1000) for i in range(top)))


class ScriptedEngine:
    """Plays one text per request, some ids at a time, and remembers what it was asked."""

    def __init__(self, output=ANSWER, finish="stop", *, step=1, cached=None, kv=0, error=None, after=0):
        self.output = output if isinstance(output, list) else TOK.encode(output, True)
        self.finish, self.step, self.cached, self.kv = finish, step, cached, kv
        self.error, self.after = error, after
        self.requests, self.closed = [], 0

    async def generate(self, prompt_ids, params):
        self.requests.append((prompt_ids, params))
        top = params.top_logprobs
        try:
            if self.error and not self.after:
                raise self.error
            for at in range(0, max(len(self.output), 1), self.step):
                await asyncio.sleep(0)
                if self.error and at >= self.after:
                    raise self.error
                ids = self.output[at : at + self.step]
                finish = self.finish if at + self.step >= len(self.output) else None
                logprobs = [logprob_of(i, top) for i in ids] if params.logprobs else None
                prompt = None
                if params.prompt_logprobs and at == 0:
                    prompt = [None, *(logprob_of(i, top) for i in prompt_ids[1:])]
                yield StepOutput(
                    ids, finish, logprobs, cached_tokens=self.cached, kv_tokens=self.kv, prompt_logprobs=prompt
                )
        finally:
            self.closed += 1


def client_of(engine, max_model_len=4096, **options):
    app = create_app(engine, TOK, model_name=MODEL, max_model_len=max_model_len, **options)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://k3")


def request(engine, path, body, headers=None, **options):
    async def send():
        async with client_of(engine, **options) as client:
            if isinstance(body, str | bytes):
                return await client.post(
                    path, content=body, headers={"content-type": "application/json", **(headers or {})}
                )
            return await (
                client.get(path, headers=headers) if body is None else client.post(path, json=body, headers=headers)
            )

    return asyncio.run(send())


def chat(engine, body, **options):
    return request(engine, "/v1/chat/completions", {"model": MODEL, "messages": HI, **body}, **options)


def complete(engine, body, **options):
    return request(engine, "/v1/completions", {"model": MODEL, **body}, **options)


def events(response):
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-1] == ""
    assert lines[-2] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def refused(response, status, param):
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert set(error) == {"message", "type", "param", "code"}
    return error["message"]
