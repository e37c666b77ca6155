"""Log-probabilities of all endpoints over a scripted engine, whose values tell which token they belong to."""

import math

import pytest
from scripted import ANSWER, TOK, ScriptedEngine, chat, complete, events, logprob_of, request

from k3lib.engine.request import StepOutput, TokenLogprob
from k3lib.server.logprobs import chat_logprobs


def expected(token_id, top):
    def item(i):
        raw = TOK.decode_bytes([i])
        return {"token": raw.decode("utf-8", "replace"), "logprob": -i / 1000, "bytes": list(raw)}

    return {**item(token_id), "top_logprobs": [item(i) for i, _ in logprob_of(token_id, top).top]}


@pytest.mark.parametrize("top", [0, 1, 3])
def test_chat_has_an_entry_for_every_generated_token_markup_and_stop_id_included(top):
    ids = TOK.encode(ANSWER, True)
    logprobs = chat(ScriptedEngine(), {"logprobs": True, "top_logprobs": top}).json()["choices"][0]["logprobs"]
    assert logprobs == {"content": [expected(i, top) for i in ids], "refusal": None}


@pytest.mark.parametrize("step", [1, 4, 1000])
def test_a_chat_stream_carries_the_same_entries_once(step):
    ids = TOK.encode(ANSWER, True)
    chunks = events(chat(ScriptedEngine(step=step), {"logprobs": True, "top_logprobs": 2, "stream": True}))
    found = [c["choices"][0]["logprobs"] for c in chunks]
    assert [x for part in found if part for x in part["content"]] == [expected(i, 2) for i in ids]
    assert found[0] is None  # the role alone


def test_tokens_cut_off_by_a_stop_string_have_their_entries():
    body = {"logprobs": True, "stop": "lo", "stream": True}
    entries = [
        x for c in events(chat(ScriptedEngine(), body)) for x in (c["choices"][0]["logprobs"] or {}).get("content", [])
    ]
    whole = chat(ScriptedEngine(), body | {"stream": False}).json()
    assert entries == whole["choices"][0]["logprobs"]["content"]
    assert len(entries) == whole["usage"]["completion_tokens"]


def test_without_logprobs_there_are_none():
    choice = chat(ScriptedEngine(), {}).json()["choices"][0]
    assert choice["logprobs"] is None
    assert all(c["choices"][0]["logprobs"] is None for c in events(chat(ScriptedEngine(), {"stream": True})))
    assert complete(ScriptedEngine(), {"prompt": "x"}).json()["choices"][0]["logprobs"] is None


def test_minus_infinity_is_a_number_that_json_can_write():
    (entry,) = chat_logprobs([TokenLogprob(65, -math.inf, ())], TOK)["content"]
    assert entry["logprob"] == -9999.0


@pytest.mark.parametrize("top", [0, 2])
def test_completions_write_four_lists(top):
    choice = complete(ScriptedEngine("é\U0001f600z"), {"prompt": "ab", "logprobs": top}).json()["choices"][0]
    ids = TOK.encode("é\U0001f600z")
    logprobs = choice["logprobs"]
    names = [f"bytes:\\x{i:02x}" if i > 127 else chr(i) for i in ids]
    assert logprobs["tokens"] == names
    assert logprobs["token_logprobs"] == [-i / 1000 for i in ids]
    assert [len(best) for best in logprobs["top_logprobs"]] == [max(top, 1)] * len(ids)
    assert all(best[name] == -i / 1000 for best, name, i in zip(logprobs["top_logprobs"], names, ids, strict=True))
    assert logprobs["text_offset"] == [0, 0, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_scores_the_prompt(max_tokens, stream):
    """What lm-evaluation-harness asks, and how it reads the answer."""
    engine = ScriptedEngine("z"[:max_tokens], "length")
    body = {"prompt": "aé", "echo": True, "logprobs": 1, "max_tokens": max_tokens, "stream": stream}
    response = complete(engine, body)
    choices = [c["choices"][0] for c in events(response)] if stream else response.json()["choices"]
    assert "".join(c["text"] for c in choices) == "aé" + "z"[:max_tokens]
    lists = {key: [x for c in choices for x in c["logprobs"][key]] for key in choices[0]["logprobs"]}
    ids = TOK.encode("aé" + "z"[:max_tokens])
    assert lists["token_logprobs"] == [None, *(-i / 1000 for i in ids[1:])]
    assert lists["top_logprobs"][0] is None
    assert lists["text_offset"] == [0, 1, 1, 2][: len(ids)]
    greedy = [max(best, key=best.get) for best in lists["top_logprobs"][1:]]
    assert greedy == lists["tokens"][1:]
    assert engine.requests[0][1].prompt_logprobs


def test_echo_without_logprobs_scores_nothing():
    engine = ScriptedEngine("z")
    complete(engine, {"prompt": "ab", "echo": True})
    assert not engine.requests[0][1].prompt_logprobs


def test_generate_writes_triples():
    params = {"max_new_tokens": 2}
    body = {
        "text": "ab",
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 1,
    }
    meta = request(ScriptedEngine("yz"), "/generate", {**body, "return_text_in_logprobs": True}).json()["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 97, "a"], [-0.098, 98, "b"]]
    assert meta["output_token_logprobs"] == [[-0.121, 121, "y"], [-0.122, 122, "z"]]
    assert meta["output_top_logprobs"] == [[[-0.121, 121, "y"]], [[-0.122, 122, "z"]]]
    meta = request(ScriptedEngine("yz"), "/generate", {**body, "logprob_start_len": 1}).json()["meta_info"]
    assert meta["input_token_logprobs"] == [[-0.098, 98, None]]
    meta = request(ScriptedEngine("yz"), "/generate", {**body, "logprob_start_len": -1}).json()["meta_info"]
    assert meta["input_token_logprobs"] == []


def test_an_engine_that_reports_none_is_no_error():
    class Mute(ScriptedEngine):
        async def generate(self, prompt_ids, params):
            yield [65], None
            yield StepOutput([66], "stop")

    assert chat(Mute(), {"logprobs": True}).json()["choices"][0]["logprobs"] is None
    logprobs = complete(Mute(), {"prompt": "ab", "logprobs": 1, "echo": True}).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [None, None]
