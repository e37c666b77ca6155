"""Servers for the clients of other people. They run on K3LIB_PYTHON, so that the clients may live apart from k3lib."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import urllib.request

import pytest

HERE = pathlib.Path(__file__).resolve().parent
PYTHON = os.environ.get("K3LIB_PYTHON", sys.executable)

# nobody asks the network
os.environ.update(LITELLM_LOCAL_MODEL_COST_MAP="True", OPENAI_AGENTS_DISABLE_TRACING="1", LANGSMITH_TRACING="false")


class Server:
    """A process that serves `model` under `url`."""

    def __init__(self, log, model, *command):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.root = f"http://127.0.0.1:{port}"
        self.url, self.model = f"{self.root}/v1", model
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [PYTHON, *(part.format(port=port) for part in command)],
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env=env,
            )
        line = self.process.stdout.readline()
        assert line.startswith(f"serving {model} on"), log.read_text()

    def requests(self, path="/v1/chat/completions"):
        """Bodies that came to a path of the scripted server, newest last."""
        with urllib.request.urlopen(f"{self.root}/requests") as response:
            return [item["body"] for item in json.load(response) if item["path"] == path]

    def stop(self):
        self.process.terminate()
        self.process.stdout.close()
        self.process.wait(20)


@pytest.fixture(scope="session")
def scripted(tmp_path_factory):
    """A model that knows what to say."""
    log = tmp_path_factory.mktemp("scripted") / "log"
    server = Server(log, "kimi-k3-tiny", str(HERE / "scripted_server.py"), "{port}")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A real model of random weights."""
    folder = tmp_path_factory.mktemp("tiny") / "tiny"
    make = "import sys; from k3lib.server.tiny import make_tiny; make_tiny(sys.argv[1])"
    subprocess.run([PYTHON, "-c", make, folder], check=True)
    model = f"--model-path {folder} --served-model-name tiny --dtype float32 --checkpoint-grid 64".split()
    serve = "from k3lib.server.cli import serve; serve()"
    server = Server(folder.parent / "log", "tiny", "-c", serve, *model, "--port", "{port}")
    yield server
    server.stop()
