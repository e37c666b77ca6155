"""The real process with the tiny model, used through the real `openai` client."""

import json
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from process import Server

from k3lib.server.tiny import make_tiny

GRID = 128


def start(folder, model, *flags):
    """A server of the tiny model."""
    return Server(
        folder, "tiny", "--model-path", model, "--served-model-name", "tiny", "--dtype", "float32", *flags
    ).wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory, tiny_folder):
    flags = ("--checkpoint-grid", GRID, "--max-running-requests", 4, "--max-queued-requests", 3, "--log-format", "json")
    server = start(tmp_path_factory.mktemp("serve"), tiny_folder, *flags)
    yield server
    assert server.stop() == 0


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """After every test the server is idle, and what it holds can be had back."""
    yield
    if "server" not in request.fixturenames:
        return
    server = request.getfixturevalue("server")
    state = server.wait_until(lambda s: not s["running"] and not s["waiting"] and not s["cache"]["leases"])
    cache = state["cache"]
    assert state["free_pages"] + state["cached_pages"] == cache["num_pages"]
    assert state["free_slots"] + state["cached_slots"] == cache["num_slots"]
    assert server.post("/flush_cache").status_code == 200
    state = server.state()
    assert (state["free_pages"], state["free_slots"]) == (cache["num_pages"], cache["num_slots"])


def test_probes_and_models(server):
    for path in ("/health", "/ready", "/health_generate"):
        assert server.http.get(path).json() == {"status": "ok"}
    (model,) = server.client.models.list().data
    assert (model.id, model.max_model_len) == ("tiny", 4096)
    assert server.client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("another")


def test_chat_answers_the_same_streamed_or_not(server):
    whole = server.chat(temperature=0)
    assert whole.usage.completion_tokens <= 24
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole.choices[0].finish_reason in {"stop", "length"}
    server.post("/flush_cache")
    reasoning, content, finish, usage = "", "", None, None
    for chunk in server.chat(temperature=0, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            content += choice.delta.content or ""
            finish = choice.finish_reason or finish
    message = whole.choices[0].message
    assert reasoning == (message.reasoning_content or "")
    assert content == (message.content or "")
    assert (finish, usage) == (whole.choices[0].finish_reason, whole.usage)
    assert usage.completion_tokens_details.reasoning_tokens <= usage.completion_tokens


def test_thinking_off(server):
    answer = server.chat(reasoning_effort="none", temperature=0)
    assert answer.choices[0].message.reasoning_content is None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_a_seed_repeats_the_answer_whatever_else_is_running(server):
    ask = lambda: server.chat(temperature=1.0, seed=7).choices[0].message.model_dump()  # noqa: E731
    alone = ask()
    with ThreadPoolExecutor(6) as pool:
        crowd = [pool.submit(ask) for _ in range(3)]
        others = [pool.submit(server.chat, temperature=1.0, seed=n) for n in range(3)]
        assert [job.result() for job in crowd] == [alone] * 3
        assert all(job.result().choices for job in others)


def test_completions_take_text_and_ids(server):
    text = server.complete("abc").choices[0].text
    assert server.complete([97, 98, 99]).choices[0].text == text
    both = server.complete([[97, 98, 99], [97, 98, 99]], n=2, seed=1, temperature=1).choices
    assert [choice.index for choice in both] == [0, 1, 2, 3]
    assert both[0].text == both[2].text
    assert "".join(chunk.choices[0].text for chunk in server.complete("abc", stream=True)) == text


def test_logprobs_of_a_chat(server):
    answer = server.chat(temperature=0, logprobs=True, top_logprobs=3, max_tokens=5)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens == 5
    for entry in entries:
        assert (entry.token, entry.logprob, entry.bytes) == (
            entry.top_logprobs[0].token, entry.top_logprobs[0].logprob, entry.top_logprobs[0].bytes,
        )  # fmt: skip
        assert len(entry.top_logprobs) == 3
        assert 0 > entry.logprob > entry.top_logprobs[1].logprob > entry.top_logprobs[2].logprob
    streamed = [
        entry
        for chunk in server.chat(temperature=0, logprobs=True, top_logprobs=3, max_tokens=5, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    assert [entry.bytes for entry in streamed] == [entry.bytes for entry in entries]
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in entries], abs=1e-4)


def test_scoring_a_prompt_with_echo(server):
    """The two-request pattern of evaluation harnesses: the continuation's score is part of the whole one's."""
    part = server.complete("abcdef", echo=True, logprobs=1, max_tokens=1).choices[0].logprobs
    whole = server.complete("abcdefgh", echo=True, logprobs=1, max_tokens=0).choices[0]
    assert whole.text == "abcdefgh"
    assert (whole.logprobs.token_logprobs[0], len(whole.logprobs.tokens)) == (None, 8)
    assert whole.logprobs.token_logprobs[1:6] == pytest.approx(part.token_logprobs[1:6], abs=1e-4)
    assert whole.logprobs.text_offset == list(range(8))
    assert all(
        best[token] == value
        for best, token, value in zip(
            whole.logprobs.top_logprobs[1:], whole.logprobs.tokens[1:], whole.logprobs.token_logprobs[1:], strict=True
        )
    )


def test_biases_and_penalties_change_the_answer(server):
    forced = server.complete("abc", logit_bias={"120": 100}).choices[0].text
    assert forced == "xxxxxx"
    once = server.complete("abc", logit_bias={"120": 100}, extra_body={"repetition_penalty": 1e6}).choices[0].text
    assert once.count("x") < 6
    body = {"input_ids": [97], "sampling_params": {"temperature": 0, "max_new_tokens": 40}}
    plain = server.post("/generate", body).json()["output_ids"]
    for name in ("presence_penalty", "frequency_penalty"):
        body["sampling_params"][name] = 2
        assert server.post("/generate", body).json()["output_ids"] != plain
        del body["sampling_params"][name]


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"min_p": 1.0}])
def test_narrow_sampling_is_greedy(server, narrow):
    greedy = server.complete("abc").choices[0].text
    assert server.complete("abc", temperature=1.0, seed=3, extra_body=narrow).choices[0].text == greedy


def test_stops_and_least_lengths(server):
    bias = {"120": 100}
    assert server.complete("a", logit_bias=bias, stop="xxx").choices[0].text == ""
    stopped = server.complete("a", logit_bias=bias, extra_body={"stop_token_ids": [120]})
    assert (stopped.choices[0].finish_reason, stopped.usage.completion_tokens) == ("stop", 1)
    later = server.complete("a", logit_bias=bias, extra_body={"stop_token_ids": [120], "min_tokens": 3})
    assert later.usage.completion_tokens >= 4
    eos = {"258": 100}
    assert server.complete("a", logit_bias=eos).usage.completion_tokens == 1
    assert server.complete("a", logit_bias=eos, extra_body={"ignore_eos": True}).usage.completion_tokens == 6
    assert server.complete("a", logit_bias=eos, extra_body={"min_tokens": 4}).usage.completion_tokens == 5


def test_several_answers(server):
    answers = server.chat(n=3, temperature=1.0, seed=5, max_tokens=8)
    assert len({choice.message.reasoning_content for choice in answers.choices}) == 3
    assert answers.usage.completion_tokens <= 24


PROMPT = "The quick brown fox jumps over the lazy dog. " * 20


def test_what_was_cached_is_in_the_usage_and_in_the_metrics(server):
    prompt = PROMPT[: 5 * GRID]
    before = server.metrics()
    cold = server.complete(prompt, max_tokens=4)
    warm = server.complete(prompt, max_tokens=4)
    assert cold.choices[0].text == warm.choices[0].text
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    details = warm.usage.prompt_tokens_details
    assert details.cached_tokens == details.cached_state_tokens == 4 * GRID  # of the last token the logits are needed
    assert details.cached_kv_tokens >= 5 * GRID - 1
    after = server.metrics()
    grown = {name: after[f"k3lib:{name}_total"] - before[f"k3lib:{name}_total"] for name in (
        "cached_tokens", "cached_state_tokens", "cached_kv_tokens", "prompt_tokens", "generation_tokens",
    )}  # fmt: skip
    assert grown == {
        "cached_tokens": details.cached_tokens,
        "cached_state_tokens": details.cached_tokens,
        "cached_kv_tokens": details.cached_kv_tokens,
        "prompt_tokens": 10 * GRID,
        "generation_tokens": 8,
    }


def test_a_salt_keeps_tenants_apart(server):
    def cached(salt):
        answer = server.complete(PROMPT[: 2 * GRID + 9], max_tokens=1, extra_body={"cache_salt": salt} if salt else {})
        return answer.usage.prompt_tokens_details.cached_tokens

    assert [cached(None), cached("a"), cached("b")] == [0, 0, 0]
    assert [bool(cached(salt)) for salt in (None, "a", "b", "c")] == [True, True, True, False]


def test_four_turns_equal_those_of_a_server_that_has_not_seen_them(server):
    """Every turn of a chat with a tool result reuses the turns before it and answers as if it had not."""
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "now:0", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
    messages, asked, cached = [], [], []
    for turn in range(4):
        messages.append({"role": "user", "content": f"Question {turn}: {PROMPT[:100]}"})
        if turn == 1:
            messages.append({"role": "assistant", "content": "Looking.", "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": "now:0", "content": "12:34"})
        answer = server.chat(messages, tools=[tool], temperature=0, max_tokens=6)
        asked.append((list(messages), answer.choices[0].message.model_dump()))
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        message = answer.choices[0].message
        messages.append(
            {"role": "assistant", "content": message.content, "reasoning_content": message.reasoning_content}
        )
    assert cached[0] == 0
    assert all(cached[1:])
    for transcript, said in asked:
        server.post("/flush_cache")
        fresh = server.chat(transcript, tools=[tool], temperature=0, max_tokens=6)
        assert fresh.usage.prompt_tokens_details.cached_tokens == 0
        assert fresh.choices[0].message.model_dump() == said


def test_server_info_has_every_limit_with_its_reason(server):
    info = server.info()
    assert info == info | {"served_model_name": "tiny", "max_running_requests": 4, "prefix_reuse": "on"}
    limits = info["limits"]
    assert {name: (x["value"], x["reason"]) for name, x in limits.items() if x["reason"] == "given"} == {
        "max_running_requests": (4, "given"),
        "checkpoint_grid": (GRID, "given"),
        "max_queued_requests": (3, "given"),
    }
    assert {
        "context_length",
        "max_mamba_cache_size",
        "max_total_num_tokens",
        "page_size",
        "chunked_prefill_size",
    } <= set(limits)
    assert all(x["reason"] in {"given", "derived", "default"} for x in limits.values())
    assert info["arguments"]["checkpoint_grid"] == GRID
    assert any(line.startswith("kda_mixer on cpu") for line in info["kernels"])
    assert info["memory"]["cache_bytes"] > 0
    assert server.http.get("/get_server_info").json()["version"] == info["version"]
    log = server.log.read_text()
    assert all(log.count(f"{name} = {x['value']} ({x['reason']})") == 1 for name, x in limits.items())


def test_metrics_have_the_promised_names(server):
    server.chat(max_tokens=3)
    names = {
        "num_running_reqs", "num_queue_reqs", "token_usage", "full_token_usage", "mamba_usage", "max_total_num_tokens",
        "cache_hit_rate", "gen_throughput", "num_retracted_reqs", "num_aborted_requests_total", "num_requests_total",
        "prompt_tokens_total", "generation_tokens_total", "cached_tokens_total", "cached_kv_tokens_total",
        "cached_state_tokens_total", "time_to_first_token_seconds_count", "inter_token_latency_seconds_count",
        "e2e_request_latency_seconds_count",
    }  # fmt: skip
    metrics = server.metrics()
    assert not [name for name in names if f"k3lib:{name}" not in metrics]
    assert metrics["k3lib:inter_token_latency_seconds_count"] >= 2
    assert metrics["k3lib:max_total_num_tokens"] == server.info()["max_total_num_tokens"]


class Streams:
    """Endless streams in threads, so that the server is busy."""

    def __init__(self, server, count, **more):
        self.server, self.begun, self.over = server, threading.Semaphore(0), threading.Event()
        self.errors = []
        self.threads = [threading.Thread(target=self._read, args=(more,)) for _ in range(count)]
        for thread in self.threads:
            thread.start()

    def _read(self, more):
        try:
            stream = self.server.complete(
                "abc",
                max_tokens=4000,
                stream=True,
                extra_body={"ignore_eos": True, **more.pop("extra_body", {})},
                **more,
            )
            for i, _ in enumerate(stream):
                if i == 0:
                    self.begun.release()
                if self.over.is_set():
                    break
            stream.close()
        except openai.APIError as error:
            self.errors.append(error)

    def __enter__(self):
        for _ in self.threads:
            assert self.begun.acquire(timeout=30)
        return self

    def __exit__(self, *_):
        self.over.set()
        for thread in self.threads:
            thread.join(30)


def test_clients_that_leave_free_their_requests(server):
    aborted = server.metrics()["k3lib:num_aborted_requests_total"]
    for _ in range(3):
        with Streams(server, 4):
            assert server.state()["running"] == 4
        server.wait_until(lambda s: not s["running"])
    assert server.metrics()["k3lib:num_aborted_requests_total"] == aborted + 12
    assert server.complete().choices


def test_a_client_that_does_not_wait_for_its_answer_frees_its_request(server):
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 4000, "ignore_eos": True}
    with pytest.raises(httpx.TimeoutException):
        server.http.post("/v1/completions", json=body, timeout=0.3)
    server.wait_until(lambda s: not s["running"])


def test_a_busy_server_keeps_its_cache_and_bounds_its_queue(server):
    with Streams(server, 4), ThreadPoolExecutor(8) as pool:
        answer = server.post("/flush_cache")
        assert answer.status_code == 400
        assert "requests are running" in answer.json()["error"]["message"]
        waiting = []
        for i in range(3):
            waiting.append(pool.submit(server.complete, "abc", extra_body={"rid": f"w{i}"}))
            server.wait_until(lambda s: s["waiting"] == len(waiting))
        with pytest.raises(openai.RateLimitError) as full:
            server.complete("abc")
        assert full.value.response.headers["retry-after"] == "1"
        assert full.value.body["type"] == "rate_limit_error"
        assert server.http.get("/health_generate").status_code == 200
        assert server.metrics()["k3lib:num_queue_reqs"] == 3
        # a better one takes the place of a worse one, which is told so
        better = pool.submit(server.complete, "abc", extra_body={"priority": 5, "rid": "better"})
        with pytest.raises(openai.InternalServerError, match="went to a higher priority"):
            waiting[2].result()
        for name in ("w0", "w1", "better"):
            assert server.post("/abort_request", {"rid": name}).json()["aborted"] == [name]
        for job in (*waiting[:2], better):
            with pytest.raises(openai.InternalServerError, match="aborted by /abort_request"):
                job.result()


def test_abort_all(server):
    with Streams(server, 3) as streams:
        assert len(server.post("/abort", {"abort_all": True}).json()["aborted"]) == 3
        for thread in streams.threads:
            thread.join(30)
    assert [error.message for error in streams.errors] == ["the request was aborted by /abort_request"] * 3


def test_a_timeout_frees_the_request(server):
    with pytest.raises(openai.InternalServerError, match=r"timeout of 0.2 s") as late:
        server.complete("abc", max_tokens=4000, extra_body={"ignore_eos": True, "timeout": 0.2})
    assert late.value.status_code == 503


def test_generate_tokenize_and_back(server):
    prompt = server.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()["tokens"]
    result = server.post("/generate", {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 5}})
    chat = server.chat("hi", temperature=0, max_tokens=5)
    text = server.post("/detokenize", {"tokens": result.json()["output_ids"]}).json()["text"]
    assert text == chat.choices[0].message.reasoning_content


def test_new_weights_answer_like_new_and_forget_what_was_cached(server, tmp_path):
    make_tiny(tmp_path / "old", mxfp4=False, vision=False)
    make_tiny(tmp_path / "new", seed=1, mxfp4=False, vision=False)
    prompt = PROMPT[: 2 * GRID + 9]
    before = server.complete(prompt)
    assert server.complete(prompt).usage.prompt_tokens_details.cached_tokens > 0
    try:
        answer = server.post("/update_weights", {"model_path": str(tmp_path / "new")})
        assert answer.json()["success"], answer.text
        changed = server.complete(prompt)
        assert changed.usage.prompt_tokens_details.cached_tokens == 0
        assert changed.choices[0].text != before.choices[0].text
        refused = server.post("/update_weights", {"model_path": str(tmp_path / "nothing")})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model_path")
        assert server.complete(prompt).choices[0].text == changed.choices[0].text
    finally:
        assert server.post("/update_weights", {"model_path": str(tmp_path / "old")}).status_code == 200
    assert server.complete(prompt).choices[0].text == before.choices[0].text


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "messages"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"n": 10**9}, "n"),
        ({"stop": ["x"] * 10_000}, "stop"),
        ({"logit_bias": {str(i): 1 for i in range(10_000)}}, "logit_bias"),
        ({"min_tokens": 5}, "min_tokens"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_a_bad_request_gets_400_in_openais_shape_and_the_server_goes_on(server, change, param):
    with pytest.raises(openai.BadRequestError) as caught:
        server.chat(extra_body={"max_tokens": 4, **change})
    assert (caught.value.type, caught.value.param) == ("invalid_request_error", param)
    assert server.chat(temperature=0, max_tokens=1).choices


def test_the_log_is_json_without_prompts(server):
    server.chat("a very secret question", max_tokens=2)
    time.sleep(0.1)
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    requests = [line for line in lines if line["message"] == "request"]
    assert requests[-1]["path"] == "/v1/chat/completions"
    assert requests[-1]["completion_tokens"] == 2
    assert "secret" not in server.log.read_text()


def test_sigterm_finishes_what_runs_and_refuses_what_comes(tmp_path, tiny_folder):
    flags = ("--api-key", "open", "--admin-api-key", "sesame", "--disable-radix-cache", "--drain-timeout", 20)
    server = start(tmp_path, tiny_folder, *flags)
    with pytest.raises(openai.AuthenticationError):
        server.complete()
    server.client = server.client.with_options(api_key="open")
    server.http.headers["authorization"] = "Bearer open"
    assert server.post("/flush_cache").status_code == 403
    assert "prefix reuse is off" in server.log.read_text()  # once, at start
    assert server.info()["prefix_reuse"] == "off: disable_radix_cache"
    assert "open" not in server.info()["arguments"].values()

    stream = server.complete("abc", max_tokens=300, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    server.process.send_signal(signal.SIGTERM)
    for _ in range(100):
        if server.http.get("/health").status_code == 503:
            break
        time.sleep(0.02)
    with pytest.raises(openai.InternalServerError) as refused:
        server.complete()
    assert refused.value.status_code == 503
    assert list(stream)[-1].choices[0].finish_reason == "length"
    server.http.close()
    assert server.process.wait(20) == 0
    server.process.stdout.close()


def test_the_limit_of_a_drain_aborts(tmp_path, tiny_folder):
    server = start(tmp_path, tiny_folder, "--drain-timeout", 0.3)
    with Streams(server, 2) as streams:
        server.process.send_signal(signal.SIGTERM)
        assert server.stop() == 0
    assert [error.message for error in streams.errors] == ["the server shuts down"] * 2
    assert "2 requests were aborted" in server.log.read_text()
