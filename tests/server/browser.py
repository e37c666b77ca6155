"""A headless Chromium driven over a pipe, as far as the tests of the chat page need it."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time

__all__ = ["Browser", "find_chromium"]

NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "google-chrome-stable", "chrome")
_KEYS = {"Enter": 13, "Escape": 27, "Tab": 9}

# The browser expects its pipes there; first out of each other's way.
_AT_3_AND_4 = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
for place, pipe in zip((3, 4), pipes):
    os.dup2(pipe, place)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_chromium():
    """Path of a Chromium, or None."""
    given = os.environ.get("K3LIB_CHROMIUM")
    return given or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """The process, and its DevTools protocol: JSON messages that end with a null byte."""

    def __init__(self, path, profile):
        ours, self._write = os.pipe()
        self._read, theirs = os.pipe()
        flags = [
            "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run",
            "--disable-gpu", "--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking",
            "--disable-component-update", "--disable-sync", "--mute-audio", "--hide-scrollbars", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-c", _AT_3_AND_4, str(ours), str(theirs), path, *flags],
            pass_fds=(ours, theirs),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(ours)
        os.close(theirs)
        self._rest = b""
        self._number = 0
        self.events = []

    def call(self, method, session=None, *, timeout=30, **params):
        """Send a command and wait for its result."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        end = time.monotonic() + timeout
        while True:
            message = self._next(end)
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message.get('error')}"
                return message["result"]
            self.events.append(message)

    def _next(self, end):
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(end - time.monotonic(), 0))
            assert ready, "the browser does not answer"
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def close(self):
        try:
            self.call("Browser.close", timeout=5)
            self._process.wait(10)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        finally:
            os.close(self._write)
            os.close(self._read)

    def open(self, url, *, width=1000, height=800, dark=False):
        """Open a page that shares nothing with the others."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Page(self, session, context, url, (width, height), dark)


class Page:
    """A tab."""

    def __init__(self, browser, session, context, url, size, dark):
        self._browser = browser
        self._session = session
        self._context = context
        for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
            self.call(f"{domain}.enable")
        width, height = size
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def call(self, method, **params):
        return self._browser.call(method, self._session, **params)

    def js(self, expression):
        """The value of an expression."""
        got = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in got, got["exceptionDetails"]
        return got["result"].get("value")

    def wait(self, expression, seconds=15):
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.js(f"Boolean({expression})"):
            if time.monotonic() > end:
                text = self.js("document.body.innerText")
                raise AssertionError(f"{expression} did not become true within {seconds} s:\n{text}\n{self.troubles()}")

    def text(self, selector):
        """The text of the elements that a selector finds, whether they are visible or not."""
        return self.js(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent).join('\\n')")

    def count(self, selector):
        return self.js(f"document.querySelectorAll({json.dumps(selector)}).length")

    def click(self, selector):
        """Press the mouse button over the middle of an element."""
        find = f"document.querySelector({json.dumps(selector)})"
        self.wait(f"{find}?.checkVisibility()")
        self.js(f"{find}.scrollIntoView({{block: 'nearest'}})")
        x, y = self.js(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({find}.getBoundingClientRect())")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def write(self, text):
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def fill(self, selector, text):
        """Replace what a field holds."""
        self.js(f"document.querySelector({json.dumps(selector)}).focus()")
        self.js(f"document.querySelector({json.dumps(selector)}).select?.()")
        self.write(text)

    def press(self, key, *, shift=False):
        common = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key], "modifiers": 8 if shift else 0}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def upload(self, selector, *paths):
        """Choose files in a file field."""
        got = self.call("Runtime.evaluate", expression=f"document.querySelector({json.dumps(selector)})")
        self.call("DOM.setFileInputFiles", objectId=got["result"]["objectId"], files=[str(path) for path in paths])

    def screenshot(self):
        """The visible part as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def troubles(self):
        """Exceptions of scripts, and what the browser refused to do."""
        self.js("0")
        mine = [event for event in self._browser.events if event.get("sessionId") == self._session]
        thrown = [e["params"]["exceptionDetails"] for e in mine if e["method"] == "Runtime.exceptionThrown"]
        logged = [e["params"]["entry"] for e in mine if e["method"] == "Log.entryAdded"]
        return [*thrown, *(entry for entry in logged if entry["source"] in ("security", "javascript", "violation"))]

    def asked(self):
        """URLs that the page asked for."""
        self.js("0")
        mine = [event for event in self._browser.events if event.get("sessionId") == self._session]
        return [e["params"]["request"]["url"] for e in mine if e["method"] == "Network.requestWillBeSent"]

    def close(self):
        self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)
