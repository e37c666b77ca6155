"""`k3lib-serve` without a model serves k3lib-nano, and its answers are right: through the real `openai` client."""

import base64
import io
import json
import pathlib
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image, ImageDraw
from process import Server

from k3lib import Engine, EngineConfig, SamplingParams, nano
from k3lib.server.chat import encode_segments, render_chat
from k3lib.server.loading import load_model
from k3lib.server.tokenizer import load_tokenizer
from k3lib.spec import SpecConfig

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


def tool(key):
    """The weather of a city, under any name of the argument."""
    where = {"type": "string", "description": "The city name"}
    unit = {"type": "string", "enum": ["celsius", "fahrenheit"], "description": "Temperature unit"}
    parameters = {"type": "object", "properties": {key: where, "unit": unit}, "required": [key]}
    about = "Get the current weather for a location"
    return {"type": "function", "function": {"name": "get_weather", "description": about, "parameters": parameters}}


def see(question):
    """A message with a red square on white."""
    image = Image.new("RGB", (56, 56), "white")
    ImageDraw.Draw(image).rectangle((14, 14, 42, 42), fill=(220, 40, 40))
    file = io.BytesIO()
    image.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    return [{"role": "user", "content": parts}]


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASKED = {  # all at once, which is quicker than one by one
    "low effort": {"content": "What is 5 + 3?"},
    "max effort": {"content": "What is 5 + 3?", "reasoning_effort": "max"},
    "call": {"content": "What's the weather in Beijing?", "tools": [tool("location")]},
    "json": {
        "content": "As JSON: name Ada, age 36.",
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": PERSON}},
    },
    "colour": {"content": see("What color is the shape?")},
    "shape": {"content": see("What shape is this?")},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    started = Server(tmp_path_factory.mktemp("nano"), nano.NAME)
    yield started.wait()
    assert started.stop() == 0


def ask(server, content, **more):
    """Greedily, with little thinking, and patiently: tests may run side by side."""
    settings = {"max_tokens": 400, "temperature": 0, "reasoning_effort": "low", "timeout": 240, **more}
    return server.chat(content, **settings)


@pytest.fixture(scope="module")
def answers(server):
    """Function from the name of a question to its answer."""
    with ThreadPoolExecutor(len(ASKED)) as pool:
        jobs = {name: pool.submit(ask, server, **asked) for name, asked in ASKED.items()}
        yield lambda name: jobs[name].result()


def told(answer):
    return answer.choices[0].message.content


def calls(answer):
    return [(call.function.name, json.loads(call.function.arguments)) for call in answer.choices[0].message.tool_calls]


def test_the_examples_give_the_right_answers(server, answers, tmp_path, monkeypatch, capsys):
    source = (EXAMPLES / "reasoning_and_tools.py").read_text(encoding="utf-8")
    example = tmp_path / "example.py"  # as it stands, but for greedy answers
    greedy = source.replace("max_tokens=", "temperature=0, max_tokens=")
    greedy = greedy.replace('"max_tokens": ', '"temperature": 0, "max_tokens": ')
    assert greedy.count("temperature=0") == greedy.count('"temperature": 0') == 1
    example.write_text(greedy, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["example.py", f"{server.url}/v1"])
    runpy.run_path(str(example), run_name="__main__")
    said = capsys.readouterr().out
    thought, answer, chosen, rest = (part.strip() for part in said.replace("Thinking:", "Answer:").split("Answer:")[1:])
    assert "3600" in thought, said
    assert "36" in answer, said
    assert 'Call: get_weather {"city": "Beijing"}' in chosen, said
    assert "21" in rest, said
    assert "Beijing" in rest, said


def test_the_example_of_a_client_gets_an_answer_and_a_refusal(server, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["chat_client.py", f"{server.url}/v1"])
    runpy.run_path(str(EXAMPLES / "chat_client.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "How can I help you?" in said
    assert "the stream says the same: True" in said
    assert "refused: temperature: " in said


def test_the_default_model_is_nano(server):
    assert [model.id for model in server.client.models.list().data] == [nano.NAME]
    model = server.http.get("/model_info").json()
    assert (model["vocab_size"], model["has_image_understanding"]) == (512, True)


def test_a_tool_is_called_with_another_name_of_the_argument(answers):
    answer = answers("call")
    assert calls(answer) == [("get_weather", {"location": "Beijing"})]
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.reasoning_content


def test_an_object_fits_its_schema_and_is_right(answers):
    assert json.loads(told(answers("json"))) == {"name": "Ada", "age": 36}


@pytest.mark.parametrize(("asked", "word"), [("colour", "red"), ("shape", "square")])
def test_a_picture_is_seen(answers, asked, word):
    assert word in told(answers(asked))


def test_low_effort_thinks_less_than_max(answers):
    low, most = answers("low effort"), answers("max effort")
    assert "8" in told(low)
    assert "8" in told(most)
    thought = [len(answer.choices[0].message.reasoning_content or "") for answer in (low, most)]
    assert thought[0] < thought[1]


def same(answer):
    """What must be equal of two answers."""
    choice = answer.choices[0]
    return choice.message.model_dump(), choice.finish_reason, answer.usage.completion_tokens


def test_speculation_leaves_answers_as_they_are():
    model, tok = load_model(None), load_tokenizer()
    asked = ["What is 5 + 3?", "My name is Rosa. What is my name?"]
    prompts = [encode_segments(tok, render_chat([{"role": "user", "content": x}], thinking=False)) for x in asked]
    greedy = SamplingParams(temperature=0, max_new_tokens=60)
    plain, drafting = (
        Engine(model, EngineConfig(max_running_requests=2, spec=spec)).generate(prompts, greedy)
        for spec in (None, SpecConfig(draft=nano.NAME))
    )
    assert [out.token_ids for out in drafting] == [out.token_ids for out in plain]
    assert "Rosa" in tok.decode(plain[1].token_ids)
    assert all(out.speculation.accept_length > 2 for out in drafting)


def test_prefix_reuse_leaves_answers_as_they_are(server, answers):
    server.post("/flush_cache")
    cold, warm = (ask(server, **ASKED["colour"]) for _ in range(2))
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in (cold, warm)]
    assert cached[0] == 0 < cached[1]
    assert same(cold) == same(warm) == same(answers("colour"))
