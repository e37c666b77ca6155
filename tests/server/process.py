"""A process of `k3lib-serve`, and how to ask it."""

import os
import socket
import subprocess
import sys
import time

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

__all__ = ["Server"]

SCRIPT = "from k3lib.server.cli import serve; serve()"


class Server:
    """Starts at once; `wait` returns when it serves.

    Args:
        folder: for its log.
        name: of the model that it will serve.
        flags: of the command.
    """

    def __init__(self, folder, name, *flags):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        self.log = folder / f"log-{port}"
        command = [sys.executable, "-c", SCRIPT, "--port", port, *flags]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                list(map(str, command)), stdout=subprocess.PIPE, stderr=log, text=True, env=env
            )
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def wait(self):
        line = self.process.stdout.readline()
        assert line.startswith(f"serving {self.name} on {self.url}"), self.log.read_text()
        return self

    def chat(self, content="Say hi.", **more):
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        return self.client.chat.completions.create(
            **{"model": self.name, "messages": messages, "max_tokens": 24, **more}
        )

    def complete(self, prompt="abc", **more):
        settings = {"model": self.name, "prompt": prompt, "max_tokens": 6, "temperature": 0}
        return self.client.completions.create(**{**settings, **more})

    def post(self, path, body=None):
        return self.http.post(path, json={} if body is None else body)

    def info(self):
        return self.http.get("/server_info").json()

    def metrics(self):
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        return {sample.name: sample.value for family in families for sample in family.samples}

    def state(self):
        return self.info()["internal_states"][0]

    def wait_until(self, is_so):
        for _ in range(200):
            state = self.state()
            if is_so(state):
                return state
            time.sleep(0.05)
        raise AssertionError(state)

    def stop(self):
        self.http.close()
        self.process.terminate()
        self.process.stdout.close()
        return self.process.wait(20)
