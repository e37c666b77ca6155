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

from k3lib import nano

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
SPECULATION = ("--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", nano.NAME)


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
SPECULATED = ("low effort", "colour")


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """The plain one, and one that speculates with the draft of the model; they start side by side."""
    folder = tmp_path_factory.mktemp("nano")
    both = [Server(folder, nano.NAME, *flags) for flags in ((), SPECULATION)]
    yield [server.wait() for server in both]
    assert [server.stop() for server in both] == [0, 0]


def ask(server, content, **more):
    """Greedily, with little thinking, and patiently: tests may run side by side."""
    settings = {"max_tokens": 400, "temperature": 0, "reasoning_effort": "low", "timeout": 240, **more}
    return server.chat(content, **settings)


@pytest.fixture(scope="module")
def answers(servers):
    """Function from the name of a question, and a server, to its answer."""
    plain, drafting = servers
    with ThreadPoolExecutor(len(ASKED) + len(SPECULATED)) as pool:
        jobs = {(plain, name): pool.submit(ask, plain, **asked) for name, asked in ASKED.items()}
        jobs |= {(drafting, name): pool.submit(ask, drafting, **ASKED[name]) for name in SPECULATED}
        yield lambda name, server=plain: jobs[server, name].result()


def told(answer):
    return answer.choices[0].message.content


def calls(answer):
    return [(call.function.name, json.loads(call.function.arguments)) for call in answer.choices[0].message.tool_calls]


def test_the_examples_give_the_right_answers(servers, answers, tmp_path, monkeypatch, capsys):
    source = (EXAMPLES / "reasoning_and_tools.py").read_text(encoding="utf-8")
    example = tmp_path / "example.py"  # as it stands, but for greedy answers
    greedy = source.replace("max_tokens=", "temperature=0, max_tokens=")
    greedy = greedy.replace('"max_tokens": ', '"temperature": 0, "max_tokens": ')
    assert greedy.count("temperature=0") == greedy.count('"temperature": 0') == 1
    example.write_text(greedy, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["example.py", f"{servers[0].url}/v1"])
    runpy.run_path(str(example), run_name="__main__")
    said = capsys.readouterr().out
    thought, answer, chosen, rest = (part.strip() for part in said.replace("Thinking:", "Answer:").split("Answer:")[1:])
    assert "3600" in thought, said
    assert "36" in answer, said
    assert 'Call: get_weather {"city": "Beijing"}' in chosen, said
    assert "21" in rest, said
    assert "Beijing" in rest, said


def test_the_example_of_a_client_gets_an_answer_and_a_refusal(servers, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["chat_client.py", f"{servers[0].url}/v1"])
    runpy.run_path(str(EXAMPLES / "chat_client.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "How can I help you?" in said
    assert "the stream says the same: True" in said
    assert "refused: temperature: " in said


def test_the_default_model_is_nano(servers):
    for server in servers:
        assert [model.id for model in server.client.models.list().data] == [nano.NAME]
    model = servers[0].http.get("/model_info").json()
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


def test_speculation_leaves_answers_as_they_are(servers, answers):
    plain, drafting = servers
    for name in SPECULATED:
        assert same(answers(name, drafting)) == same(answers(name, plain)), name
    assert "k3lib:spec_num_verify_steps" not in plain.metrics()
    assert drafting.metrics()["k3lib:spec_num_verify_steps"] > 0


def test_prefix_reuse_leaves_answers_as_they_are(servers, answers):
    servers[0].post("/flush_cache")
    cold, warm = (ask(servers[0], **ASKED["colour"]) for _ in range(2))
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in (cold, warm)]
    assert cached[0] == 0 < cached[1]
    assert same(cold) == same(warm) == same(answers("colour"))
