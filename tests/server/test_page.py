"""The chat page in headless Chromium, against a server that plays prepared answers."""

from __future__ import annotations

import base64
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from browser import Browser, find_chromium

from k3lib.server.page import PAGE_HEADERS, page

# a red dot
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAUAAAAFCAYAAACNbyblAAAAHElEQVQI12P4//8/w38GIAXDIBKE0DHxgljNBAAO9TXL0Y4OHwAAAABJRU5ErkJggg=="
)
HOSTILE = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"
USAGE = {
    "prompt_tokens": 97,
    "completion_tokens": 41,
    "total_tokens": 138,
    "completion_tokens_details": {"reasoning_tokens": 5},
    "prompt_tokens_details": {"cached_tokens": 64, "cached_kv_tokens": 80, "cached_state_tokens": 64},
}
INFO = {
    "version": "0.1.0",
    "served_model_name": "kimi-k3",
    "prefix_reuse": "on",
    "limits": {"max_running_requests": {"value": 96, "reason": "derived", "note": "one state slot each"}},
    "kernels": ["kda_chunk: reference", "mla_decode: reference"],
    "internal_states": [{"num_running": 0}],
}


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        answers = self.server.answers
        if self.path == "/":
            self._answer(200, page().encode(), {"content-type": "text/html; charset=utf-8", **PAGE_HEADERS})
        elif self.path in answers:
            self._json(*answers[self.path])
        else:
            self._json(404, {"error": {"message": "Not Found"}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((dict(self.headers), body))
        script = self.server.scripts.pop(0)
        if isinstance(script, tuple):
            self._json(*script)
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        try:
            for item in script:
                self._play(item)
        except OSError:
            self.server.left.set()

    def _play(self, item):
        if isinstance(item, threading.Event):
            while not item.wait(0.05):  # a comment every now and then shows whether anybody listens
                self.wfile.write(b": wait\n\n")
        elif isinstance(item, bytes):
            self.wfile.write(item)
        else:
            self.wfile.write(f"data: {json.dumps(item)}\n\n".encode())
        self.wfile.flush()

    def _json(self, status, body):
        self._answer(status, json.dumps(body).encode(), {"content-type": "application/json"})

    def _answer(self, status, body, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


DONE = b"data: [DONE]\n\n"


def say(finish=None, **delta):
    """One event of a stream."""
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def answer(text, *, reasoning=None, calls=(), finish="stop"):
    """A whole stream."""
    events = [say(role="assistant", content="")]
    events += [say(reasoning_content=reasoning)] if reasoning else []
    events += [say(content=text)] if text else []
    events += [say(tool_calls=[{"index": i, **call}]) for i, call in enumerate(calls)]
    return [*events, say(finish=finish), {"choices": [], "usage": USAGE}, DONE]


def call(name, arguments):
    return {"id": f"{name}:0", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.scripts, server.asked, server.left = [], [], threading.Event()
    server.answers = {
        "/v1/models": (200, {"data": [{"id": "kimi-k3", "max_model_len": 4096}]}),
        "/server_info": (200, INFO),
    }
    server.url = f"http://127.0.0.1:{server.server_port}/"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    path = find_chromium()
    if path is None:
        pytest.skip("needs Chromium: install it, or set K3LIB_CHROMIUM")
    browser = Browser(path, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def chat(browser, server):
    """The page, open and ready; afterwards nothing was thrown, refused, or asked of anybody else."""
    tab = browser.open(server.url)
    tab.wait("document.getElementById('model-name').textContent")
    yield tab
    assert tab.troubles() == []
    assert all(url.startswith((server.url, "data:")) for url in tab.asked())
    tab.close()


def ask(chat, text="hello"):
    chat.fill("#prompt", text)
    chat.press("Enter")


def ended(chat, count=1):
    chat.wait(f"document.querySelectorAll('.assistant .usage').length === {count}")


# ---- without a browser --------------------------------------------------------------------------


def test_the_page_holds_nothing_that_runs_text_as_code():
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|srcdoc", page())
    assert not re.findall(r"(?:https?:)?//[\w.-]+\.\w+|@import|url\(", page())
    assert not re.findall(r"localStorage|sessionStorage|cookie|indexedDB", page())


def test_the_headers_allow_what_the_page_needs_and_no_more():
    policy = dict(rule.strip().split(" ", 1) for rule in PAGE_HEADERS["content-security-policy"].split(";"))
    assert policy["default-src"] == "'self' 'unsafe-inline'"
    assert policy["img-src"] == "data: blob:"
    assert policy["frame-ancestors"] == "'none'"


# ---- answers ------------------------------------------------------------------------------------


def test_text_appears_while_it_is_streamed(chat, server):
    gate = threading.Event()
    server.scripts.append([say(role="assistant", content=""), say(content="Hel"), gate, *answer("lo there")[1:]])
    ask(chat, "hi <b>you</b>")
    chat.wait("document.querySelector('.content')?.textContent === 'Hel'")
    assert chat.js("!document.getElementById('stop').hidden && document.getElementById('send').hidden")
    gate.set()
    ended(chat)
    assert chat.text(".content") == "Hello there"
    assert chat.text(".user .text") == "hi <b>you</b>"
    assert chat.js("document.getElementById('stop').hidden && !document.getElementById('send').hidden")
    assert chat.text("#status") == "Answer complete"
    headers, body = server.asked[0]
    assert body["messages"] == [{"role": "user", "content": "hi <b>you</b>"}]
    assert (body["model"], body["stream"], body["stream_options"]) == ("kimi-k3", True, {"include_usage": True})
    assert not {"temperature", "max_tokens", "reasoning_effort", "tools"} & set(body)
    assert "authorization" not in {name.lower() for name in headers}


def test_reasoning_is_folded_and_opens(chat, server):
    server.scripts.append(answer("Four.", reasoning="two and two"))
    ask(chat)
    ended(chat)
    assert chat.text(".reasoning .text") == "two and two"
    assert chat.js("document.querySelector('.reasoning').open") is False
    assert "two and two" not in chat.js("document.querySelector('.assistant').innerText")
    chat.click(".reasoning summary")
    chat.wait("document.querySelector('.assistant').innerText.includes('two and two')")


def test_usage_is_shown_with_what_was_cached(chat, server):
    server.scripts.append(answer("Four.", finish="length"))
    ask(chat)
    ended(chat)
    shown = chat.text(".usage")
    for part in ("prompt 97 tokens", "64 cached (KV 80, state 64)", "answer 41 tokens, 5 of them reasoning", "cut off"):
        assert part in shown


def test_calls_are_shown_and_their_results_go_back_with_the_whole_turn(chat, server):
    arguments = '{"city": "Paris",  "days": 1e0}'
    server.scripts += [
        answer("Looking.", reasoning="weather?", calls=[call("weather", arguments)], finish="tool_calls"),
        answer("Sunny."),
    ]
    ask(chat, "weather in Paris?")
    ended(chat)
    assert chat.text(".call strong") == "weather"
    assert chat.text(".call pre") == arguments
    chat.fill(".results textarea", "22 degrees")
    chat.click(".results button")
    ended(chat, 2)
    assert server.asked[1][1]["messages"] == [
        {"role": "user", "content": "weather in Paris?"},
        {
            "role": "assistant",
            "content": "Looking.",
            "reasoning_content": "weather?",
            "tool_calls": [call("weather", arguments)],
        },
        {"role": "tool", "tool_call_id": "weather:0", "content": "22 degrees"},
    ]
    assert chat.js("document.querySelector('.results textarea').disabled")


def test_calls_may_come_in_pieces(chat, server):
    first, *rest = ({"index": 0, "function": {"arguments": piece}} for piece in ("", '{"a"', ": 1}"))
    first |= {"id": "f:0", "type": "function"}
    first["function"]["name"] = "f"
    events = [say(tool_calls=[piece]) for piece in (first, *rest)]
    server.scripts += [[*events, say(finish="tool_calls"), DONE], answer("ok")]
    ask(chat)
    ended(chat)
    assert chat.text(".call pre") == '{"a": 1}'
    ask(chat)
    ended(chat, 2)
    assert server.asked[1][1]["messages"][1] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [call("f", '{"a": 1}')],
    }


def test_an_answer_inside_the_reasoning_is_shown_once(chat, server):
    server.scripts += [
        [say(reasoning_content="The "), say(reasoning_content="end."), *answer("The end.")],
        answer("ok"),
    ]
    ask(chat)
    ended(chat)
    assert chat.count(".reasoning") == 0
    assert chat.text(".content") == "The end."
    ask(chat)
    ended(chat, 2)
    assert server.asked[1][1]["messages"][1] == {"role": "assistant", "content": "The end."}


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_fences_become_code_however_the_text_is_cut(chat, server, size):
    text = "Look:\n```python\nif a < b:\n    print('``')\n```\nand `x`\n``` open"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    server.scripts.append([*(say(content=piece) for piece in pieces), *answer("")[1:]])
    ask(chat)
    ended(chat)
    assert chat.text(".content pre code") == "if a < b:\n    print('``')\n"
    assert chat.text(".content") == "Look:\nif a < b:\n    print('``')\nand `x`\n``` open"


def test_events_may_be_cut_anywhere(chat, server):
    whole = b"".join(f"data: {json.dumps(item)}\r\n\r\n".encode() for item in answer("grün 🌱 ok")[:-1]) + DONE
    server.scripts.append([whole[i : i + 7] for i in range(0, len(whole), 7)])
    ask(chat)
    ended(chat)
    assert chat.text(".content") == "grün 🌱 ok"


# ---- stopping and failing -----------------------------------------------------------------------


@pytest.mark.parametrize("by_key", [False, True], ids=["button", "escape"])
def test_stop_ends_the_request_and_keeps_what_came(chat, server, by_key):
    half = say(tool_calls=[{"index": 0, **call("f", '{"a')}])
    server.scripts += [[say(reasoning_content="hm"), say(content="One, two"), half, threading.Event()], answer("ok")]
    ask(chat)
    chat.wait("document.querySelector('.call')")
    chat.press("Escape") if by_key else chat.click("#stop")
    ended(chat)
    assert server.left.wait(10)
    assert "stopped" in chat.text(".usage")
    assert chat.count("#log .error") == chat.count(".call") == 0
    ask(chat, "go on")
    ended(chat, 2)
    kept = {"role": "assistant", "content": "One, two", "reasoning_content": "hm"}
    assert server.asked[1][1]["messages"][1:] == [kept, {"role": "user", "content": "go on"}]


def test_an_error_is_shown_and_the_turn_taken_back(chat, server):
    error = {
        "message": "no such thing",
        "type": "invalid_request_error",
        "param": "messages",
        "code": None,
    }
    server.scripts += [(400, {"error": error}), answer("ok")]
    ask(chat, "bad")
    chat.wait("document.querySelector('#log .error')")
    assert chat.text("#log .error") == "400: no such thing (messages)"
    assert chat.js("document.querySelector('#log .error').getAttribute('role')") == "alert"
    assert chat.js("document.getElementById('prompt').value") == "bad"
    ask(chat, "good")
    ended(chat)
    assert server.asked[1][1]["messages"] == [{"role": "user", "content": "good"}]


def test_an_error_that_comes_late_keeps_what_came(chat, server):
    server.scripts.append([say(content="Half"), {"error": {"message": "the engine failed"}}, DONE])
    ask(chat)
    ended(chat)
    assert chat.text(".content") == "Half"
    assert chat.text("#log .error") == "the engine failed"
    assert "incomplete" in chat.text(".usage")


def test_a_stream_that_breaks_off_is_an_error(chat, server):
    server.scripts.append([say(content="Half")])
    ask(chat)
    ended(chat)
    assert "closed before the answer ended" in chat.text("#log .error")


def test_a_missing_key_says_where_to_enter_it(chat, server):
    server.scripts.append((401, {"error": {"message": "the API key is missing or wrong"}}))
    ask(chat)
    chat.wait("document.querySelector('#log .error')")
    assert chat.text("#log .error") == "401: the API key is missing or wrong. Enter it under Settings."


def test_hostile_text_stays_text(chat, server):
    server.answers["/v1/models"] = (200, {"data": [{"id": HOSTILE, "max_model_len": HOSTILE}]})
    server.answers["/server_info"] = (
        200,
        {HOSTILE: HOSTILE, "limits": {HOSTILE: {"value": HOSTILE}}, "kernels": [HOSTILE]},
    )
    server.scripts += [
        answer(f"{HOSTILE}\n```\n{HOSTILE}\n```\n", reasoning=HOSTILE, calls=[call(HOSTILE, HOSTILE)]),
        (400, {"error": {"message": HOSTILE, "param": HOSTILE}}),
    ]
    ask(chat, HOSTILE)
    ended(chat)
    ask(chat, HOSTILE)
    chat.wait("document.querySelector('#log .error')")
    chat.click("#open-settings")
    chat.wait("document.getElementById('model').textContent.includes('onerror')")
    chat.click("#close-settings")
    chat.click("#open-info")
    chat.wait("document.querySelector('#info pre')")
    assert chat.text("#log").count(HOSTILE) == 9  # mine 2, reasoning 1, answer 2, call 3, error 1
    assert chat.text("#info-body").count(HOSTILE) == 5
    assert chat.count("img") == 0
    assert chat.count("script") == 1
    assert chat.js("window.hacked") is None


# ---- images -------------------------------------------------------------------------------------


def test_an_uploaded_image_becomes_a_part_of_the_message(chat, server, tmp_path):
    path = tmp_path / "dot.png"
    path.write_bytes(PNG)
    server.scripts += [answer("A red dot."), answer("Still red.")]
    chat.upload("#files", path)
    chat.wait("document.querySelector('#attachments img')?.naturalWidth === 5")
    ask(chat, "what is it?")
    ended(chat)
    url = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it?"}]
    assert server.asked[0][1]["messages"] == [{"role": "user", "content": parts}]
    assert chat.count("#attachments img") == 0
    assert chat.js("document.querySelector('.user img').alt") == "dot.png"
    ask(chat, "sure?")
    ended(chat, 2)
    assert [message["content"] for message in server.asked[1][1]["messages"]] == [parts, "A red dot.", "sure?"]


def test_a_refused_image_is_explained_and_given_back(chat, server, tmp_path):
    path = tmp_path / "dot.png"
    path.write_bytes(PNG)
    message = "messages[0].content[0]: this server does not accept images: it runs without a vision tower"
    server.scripts += [(400, {"error": {"message": message, "param": "messages[0].content[0]"}}), answer("ok")]
    chat.upload("#files", path)
    chat.wait("document.querySelector('#attachments img')")
    ask(chat, "what is it?")
    chat.wait("document.querySelector('#log .error')")
    assert message in chat.text("#log .error")
    assert chat.count("#attachments img") == 1
    chat.click("#attachments button")
    assert chat.count("#attachments img") == 0
    chat.js("document.getElementById('prompt').focus()")
    chat.press("Enter")
    ended(chat)
    assert server.asked[1][1]["messages"] == [{"role": "user", "content": "what is it?"}]


# ---- settings and server ------------------------------------------------------------------------


def test_settings_go_into_the_request(chat, server):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    server.scripts.append(answer("ok"))
    chat.click("#open-settings")
    chat.fill("#api-key", "secret")
    chat.js("document.getElementById('effort').value = 'low'")
    chat.fill("#temperature", "0")
    chat.fill("#max-tokens", "17")
    chat.fill("#system", "Be brief.")
    chat.fill("#tools", "{}")
    chat.click("#close-settings")
    assert "must be a JSON list" in chat.text("#settings-error")
    chat.fill("#tools", json.dumps(tools))
    chat.click("#close-settings")
    chat.wait("!document.getElementById('settings').open")
    ask(chat)
    ended(chat)
    headers, body = server.asked[0]
    assert headers["authorization"] == "Bearer secret"
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["reasoning_effort"], body["temperature"], body["max_tokens"]) == ("low", 0, 17)
    assert body["tools"] == tools
    assert chat.js("localStorage.length + sessionStorage.length + document.cookie.length") == 0


def test_a_new_chat_forgets_the_old_one_even_while_it_is_answered(chat, server):
    server.scripts += [answer("one"), [say(content="two"), threading.Event()], answer("three")]
    ask(chat)
    ended(chat)
    ask(chat)
    chat.wait("document.querySelectorAll('.content').length === 2")
    chat.click("#new-chat")
    assert server.left.wait(10)
    chat.wait("!document.getElementById('send').hidden")
    assert chat.count(".message") == 0
    ask(chat, "fresh")
    ended(chat)
    assert server.asked[2][1]["messages"] == [{"role": "user", "content": "fresh"}]


def test_the_server_panel_shows_limits_with_reasons_and_kernels(chat):
    chat.click("#open-info")
    chat.wait("document.querySelector('#info table')")
    assert "max_running_requests96derivedone state slot each" in chat.text("#info-body tr").replace("\n", "")
    assert chat.text("#info-body > pre") == "kda_chunk: reference\nmla_decode: reference"


@pytest.mark.parametrize(
    ("status", "message", "shown"),
    [
        (401, "the key is wrong", "401: the key is wrong. Enter it under Settings."),
        (404, "Not Found", "This server has no /server_info."),
        (501, "needs k3lib's own engine", "This server cannot say: needs k3lib's own engine"),
    ],
)
def test_the_server_panel_says_why_it_has_nothing(chat, server, status, message, shown):
    server.answers["/server_info"] = (status, {"error": {"message": message}})
    chat.click("#open-info")
    chat.wait("document.querySelector('#info table')")
    assert chat.text("#info .error") == shown
    assert "kimi-k34096" in chat.text("#info td").replace("\n", "")


# ---- for everybody ------------------------------------------------------------------------------


def test_the_keyboard_is_enough(chat, server):
    server.scripts.append(answer("ok", reasoning="hm"))
    assert chat.js("document.activeElement.id") == "prompt"
    chat.write("a")
    chat.press("Enter", shift=True)
    chat.write("b")
    chat.press("Enter")
    ended(chat)
    assert server.asked[0][1]["messages"][0]["content"] == "a\nb"
    seen = []
    for _ in range(12):
        chat.press("Tab")
        seen.append(chat.js("document.activeElement.id || document.activeElement.tagName"))
    assert {"files", "send", "new-chat", "open-info", "open-settings", "log", "SUMMARY"} <= set(seen)


def test_every_field_has_a_name(chat):
    unnamed = chat.js(
        "[...document.querySelectorAll('input, textarea, select')].filter(e => !e.labels.length).map(e => e.id)"
    )
    assert unnamed == []
    assert chat.js("document.documentElement.lang") == "en"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_fits_a_narrow_screen(browser, server, dark):
    long = "x" * 400
    server.scripts.append(
        answer(f"{long}\n```\n{long}\n```\n", reasoning=long, calls=[call("f" * 100, f'{{"{long}": 1}}')])
    )
    tab = browser.open(server.url, width=360, height=640, dark=dark)
    ask(tab, long)
    ended(tab)
    assert tab.js("document.documentElement.scrollWidth") <= 360
    assert tab.js("document.getElementById('log').scrollWidth") <= 360
    assert tab.js("document.getElementById('send').getBoundingClientRect().bottom") <= 640
    tab.click("#open-settings")
    assert tab.js("document.getElementById('settings').getBoundingClientRect().right") <= 360
    assert tab.js("getComputedStyle(document.body).backgroundColor") == (
        "rgb(20, 22, 26)" if dark else "rgb(255, 255, 255)"
    )
    tab.close()
