"""A server whose model always knows what to say: what it plays depends on the prompt alone.

Run as `python scripted_server.py PORT`; prints one line when the port is open. `GET /requests` shows what it got.
"""

import json
import pathlib
import sys

import uvicorn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "server"))
from scripted import MODEL, TOK, ScriptedEngine

from k3lib.server.app import create_app

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
PERSON = '{"name": "Ada", "age": 36}'
WEATHER = "It is 21 degrees in Paris."


def close(tag):
    return f"{CLOSE}{tag}{SEP}"


def element(tag, text, **attributes):
    marks = "".join(f' {key}="{value}"' for key, value in attributes.items())
    return f"{OPEN}{tag}{marks}{SEP}{text}{close(tag)}"


def call(tool, index=1, **arguments):
    kinds = {str: "string", int: "number"}
    body = "".join(element("argument", value, key=key, type=kinds[type(value)]) for key, value in arguments.items())
    return element("call", body, tool=tool, index=index)


def answer(prompt):
    """Reasoning, text and calls that fit the prompt."""
    if "weather" in prompt:
        if 'role="tool"' in prompt:
            return "The tool has answered.", WEATHER, ""
        both = call("get_weather", 2, city="Rome") if "Rome" in prompt else ""
        return "I need the weather.", "", call("get_weather", city="Paris") + both
    if "Ada" in prompt:
        for tool in ("Person", "final_result"):  # the libraries make a tool of the schema
            if f'"name":"{tool}"' in prompt:
                return "A person.", "", call(tool, name="Ada", age=36)
        return "A person.", PERSON, ""
    return "They greet me.", "Hello! How can I help?", ""


def play(prompt):
    """The whole output of the model."""
    reasoning, text, calls = answer(prompt)
    thinks = prompt.endswith(f"{OPEN}think{SEP}")
    head = f"{reasoning}{close('think')}{OPEN}response{SEP}" if thinks else ""
    tail = element("tools", calls) if calls else ""
    return f"{head}{text}{close('response')}{tail}{close('message')}{END}"


class Actor:
    """An engine that plays what fits the prompt, one token at a time."""

    async def generate(self, prompt_ids, params, **_):
        engine = ScriptedEngine(TOK.encode(play(TOK.decode(prompt_ids)), True), cached=4, kv=4)
        async for item in engine.generate(prompt_ids, params):
            yield item


def recorded(app, requests):
    """The app, which now also notes the body of every POST."""

    async def handle(scope, receive, send):
        if scope["type"] == "http" and scope["path"] == "/requests":
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
            )
            await send({"type": "http.response.body", "body": json.dumps(requests).encode()})
            return
        body = b""

        async def receive_and_note():
            nonlocal body
            message = await receive()
            if message["type"] == "http.request":
                body += message.get("body", b"")
                if not message.get("more_body") and scope["method"] == "POST":
                    requests.append({"path": scope["path"], "body": json.loads(body or "null")})
            return message

        await app(scope, receive_and_note, send)

    return handle


class Server(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        print(f"serving {MODEL} on port {self.config.port}", flush=True)


if __name__ == "__main__":
    app = create_app(Actor(), TOK, model_name=MODEL, max_model_len=100_000)
    Server(uvicorn.Config(recorded(app, []), port=int(sys.argv[1]), log_level="warning", lifespan="off")).run()
