"""Fields that the clients of other people send, and that must not stand in their way."""

import pytest
from scripted import HI, TOK, ScriptedEngine, chat, complete, refused, request

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
# an assistant's message as the SDKs dump it
DUMPED = {
    "role": "assistant",
    "content": None,
    "refusal": None,
    "annotations": [],
    "audio": None,
    "function_call": None,
    "name": None,
    "reasoning_content": None,
    "tool_calls": None,
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("parallel_tool_calls", True),
        ("parallel_tool_calls", False),
        ("store", False),
        ("metadata", {"a": "b"}),
        ("user", "u"),
        ("safety_identifier", "s"),
        ("prompt_cache_key", "k"),
        ("prompt_cache_retention", "24h"),
        ("prompt_cache_options", {}),
        ("service_tier", "auto"),
        ("verbosity", "low"),
        ("modalities", ["text"]),
        ("prediction", {"type": "content", "content": "x"}),
        ("web_search_options", {}),
        ("logit_bias", {}),
        ("functions", []),
        ("function_call", "none"),
        ("function_call", "auto"),
        ("response_format", {"type": "text"}),
        ("stream_options", {"include_usage": True, "include_obfuscation": False}),
        ("separate_reasoning", True),
        ("stream_reasoning", True),
        ("stream_reasoning", False),
        ("skip_special_tokens", False),
        ("top_k", 20),
        ("min_p", 0.1),
        ("repetition_penalty", 1.1),
        ("timeout", 30),
        ("reasoning_effort", "high"),
        ("chat_template_kwargs", {}),
        ("chat_template_kwargs", {"thinking": True}),
        ("chat_template_kwargs", {"thinking": None, "enable_thinking": False}),
    ],
    ids=str,
)
def test_is_accepted(field, value):
    answer = chat(ScriptedEngine(), {field: value})
    assert answer.status_code == 200, answer.text


NULLS = ["max_tokens", "max_completion_tokens", "tools", "tool_choice", "stop", "response_format", "temperature", "n"]
NULLS += ["top_p", "seed", "logprobs", "top_logprobs", "logit_bias", "audio", "functions", "stream", "stream_options"]
NULLS += ["reasoning_effort", "thinking", "chat_template_kwargs", "parallel_tool_calls", "moderation", "modalities"]


def test_a_null_is_an_absent_field():
    nulled, plain = ScriptedEngine(), ScriptedEngine()
    assert chat(nulled, dict.fromkeys(NULLS)).json()["usage"] == chat(plain, {}).json()["usage"]
    assert nulled.requests == plain.requests
    names = ["suffix", "best_of", "echo", "logprobs", "max_tokens", "stop", "user"]
    assert complete(nulled, {"prompt": "a", **dict.fromkeys(names)}).status_code == 200


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ({**DUMPED, "content": "Hello"}, {"role": "assistant", "content": "Hello"}),
        ({**DUMPED, "content": [{"type": "text", "text": "Hello"}]}, {"role": "assistant", "content": "Hello"}),
        ({**DUMPED, "tool_calls": [CALL]}, {"role": "assistant", "tool_calls": [CALL]}),
        ({**DUMPED, "tool_calls": [{**CALL, "index": 0}]}, {"role": "assistant", "tool_calls": [CALL]}),
        ({**DUMPED, "tool_calls": [], "content": ""}, {"role": "assistant"}),
    ],
    ids=["text", "parts", "calls", "index", "empty"],
)
def test_what_a_client_sends_back_is_read_as_it_was_meant(sent, meant):
    after = [{"role": "user", "content": "go on"}]
    if meant.get("tool_calls"):
        after = [{"role": "tool", "tool_call_id": "call_1", "content": "x", "name": None}]
    prompts = []
    for message in (sent, meant):
        engine = ScriptedEngine()
        answer = chat(engine, {"messages": [*HI, message, *after], "tools": [TOOL]})
        assert answer.status_code == 200, answer.text
        prompts.append(TOK.decode(engine.requests[0][0]))
    assert prompts[0] == prompts[1]


def test_the_old_form_of_tools_is_refused_by_name():
    functions = [{"name": "f", "parameters": {}}]
    assert "tools" in refused(chat(ScriptedEngine(), {"functions": functions}), 400, "functions")
    refused(chat(ScriptedEngine(), {"function_call": {"name": "f"}}), 400, "function_call")


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses", "/v1/images/generations", "/v1/moderations"])
def test_an_endpoint_that_is_not_there(path):
    assert path in refused(request(ScriptedEngine(), path, {"model": "x"}), 404, None)


def test_names_of_special_tokens():
    found = request(ScriptedEngine(), "/tokenizer_info", None).json()
    assert all(found[f"{kind}_token"] in TOK.special for kind in ("bos", "eos", "pad"))
    assert found["vocab_size"] == TOK.vocab_size
