"""instructor: objects out of answers."""

from typing import Literal

import pytest

pytest.importorskip("instructor", reason="instructor is not installed")

import instructor
import openai
from instructor.core import InstructorRetryException
from pydantic import BaseModel

ADA = [{"role": "user", "content": "Ada is 36 years old."}]


class Person(BaseModel):
    name: str
    age: int


class Sound(BaseModel, extra="forbid"):
    """A sound, of which there are only a few: noise finds one."""

    color: Literal["red", "blue"]
    loud: bool


def client_of(server, mode):
    return instructor.from_openai(openai.OpenAI(base_url=server.url, api_key="none", max_retries=0), mode=mode)


@pytest.mark.parametrize("mode", [instructor.Mode.MD_JSON, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA], ids=str)
def test_json(scripted, mode):
    person = client_of(scripted, mode).create(model=scripted.model, response_model=Person, messages=ADA, max_retries=0)
    assert person.model_dump() == {"name": "Ada", "age": 36}


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT], ids=str)
def test_tools(scripted, mode):
    person = client_of(scripted, mode).create(model=scripted.model, response_model=Person, messages=ADA, max_retries=0)
    assert person.model_dump() == {"name": "Ada", "age": 36}


def test_a_random_model_is_held_to_the_schema(tiny):
    # not with TOOLS_STRICT: this library does not send "strict" with its tools
    settings = {"max_tokens": 400, "temperature": 0, "extra_body": {"chat_template_kwargs": {"thinking": False}}}
    client = client_of(tiny, instructor.Mode.JSON_SCHEMA)
    sound = client.create(model=tiny.model, response_model=Sound, messages=ADA, max_retries=0, **settings)
    assert sound.color in ("red", "blue")


def test_parts_of_a_stream(scripted):
    client = client_of(scripted, instructor.Mode.MD_JSON)
    parts = list(client.create_partial(model=scripted.model, response_model=Person, messages=ADA, max_retries=0))
    assert (parts[-1].name, parts[-1].age) == ("Ada", 36)


def test_the_answer_comes_along(scripted):
    client = client_of(scripted, instructor.Mode.MD_JSON)
    _, raw = client.create_with_completion(model=scripted.model, response_model=Person, messages=ADA, max_retries=0)
    assert raw.choices[0].message.reasoning_content == "A person."
    assert raw.usage.completion_tokens_details.reasoning_tokens > 0


def test_errors_have_types(scripted):
    client = client_of(scripted, instructor.Mode.MD_JSON)
    with pytest.raises(InstructorRetryException) as caught:
        client.create(model="another", response_model=Person, messages=ADA, max_retries=0)
    assert isinstance(caught.value.__cause__ or caught.value, Exception)
    assert "another" in str(caught.value)
