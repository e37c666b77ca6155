"""README, docs and examples run as they stand; the commands that README promises are the ones that exist."""

import os
import pathlib
import re
import runpy
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from k3lib.ops import ops

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
CLIENTS = {"chat_client.py", "reasoning_and_tools.py"}  # they need a server
EXAMPLES = sorted(path for path in (REPOSITORY / "examples").glob("*.py") if path.name not in CLIENTS)
BLOCK = re.compile(r"(<!-- no-run -->\n)?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INSTALL = "python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt -e '.[server]' && .venv/bin/k3lib-serve"
TEST = "bash scripts/test.sh"

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def blocks(page):
    """Line number and source of each block of a page that is meant to run."""
    text = page.read_text(encoding="utf-8")
    return [(text[: m.start(2)].count("\n"), m[2]) for m in BLOCK.finditer(text) if not m[1]]


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """An empty working directory; kernels registered meanwhile are taken away again."""
    monkeypatch.chdir(tmp_path)
    before = {op: {impl.name for impl in op.implementations()} for op in ops().values()}
    yield tmp_path
    for op, names in before.items():
        for impl in op.implementations():
            if impl.name not in names:
                op.remove(impl.name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_of_a_page_run_in_order(page, workplace):
    namespace = {"__name__": "__page__"}
    for line, source in blocks(page):
        # empty lines in front, so that a traceback shows the line of the page
        exec(compile("\n" * line + source, str(page), "exec"), namespace)


def test_pages_begin_with_something_that_can_be_run():
    for page in PAGES:
        first = re.search(r"^```(\w+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert first is not None, page.name
        assert first[1] in {"python", "shell"}, page.name


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_example_runs(example, workplace, capsys):
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.count("\n") >= 2


@pytest.mark.parametrize("example", sorted((REPOSITORY / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_example_is_short(example):
    assert len(example.read_text(encoding="utf-8").splitlines()) < 60


def test_every_example_is_linked_from_the_readme():
    text = PAGES[0].read_text(encoding="utf-8")
    for path in (REPOSITORY / "examples").glob("*.py"):
        assert f"(examples/{path.name})" in text


def test_links_lead_to_files():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_readme_has_the_two_commands_on_lines_of_their_own():
    lines = PAGES[0].read_text(encoding="utf-8").splitlines()
    assert INSTALL in lines
    assert TEST in lines


def test_ci_runs_the_same_script():
    assert (REPOSITORY / "scripts" / "test.sh").is_file()
    assert re.search(r"\bbash \S.*/scripts/test\.sh", (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Base URL of `k3lib-serve` in a process of its own."""
    pytest.importorskip("uvicorn")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [sys.executable, "-c", "from k3lib.server.cli import serve; serve()", "--port", str(port)]
    log = tmp_path_factory.mktemp("serve") / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 90
        while not is_up(url):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, f"no answer in 90 s\n{log.read_text()}"
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(20)


def is_up(url):
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


@pytest.mark.slow
def test_chat_client_talks_to_a_server(server, monkeypatch, capsys):
    pytest.importorskip("openai")
    monkeypatch.setattr(sys, "argv", ["chat_client.py", f"{server}/v1"])
    runpy.run_path(str(REPOSITORY / "examples" / "chat_client.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "the stream says the same: True" in said
    assert "refused: temperature: " in said


@pytest.mark.slow
def test_reasoning_and_tools_over_a_server(server, tmp_path, monkeypatch, capsys):
    pytest.importorskip("openai")
    monkeypatch.setattr(sys, "argv", ["reasoning_and_tools.py", f"{server}/v1"])
    source = (REPOSITORY / "examples" / "reasoning_and_tools.py").read_text(encoding="utf-8")
    assert source.count('"max_tokens": 300') == 1
    example = tmp_path / "example.py"  # as it stands, but for shorter answers
    example.write_text(source.replace('"max_tokens": 300', '"max_tokens": 100'), encoding="utf-8")
    runpy.run_path(str(example), run_name="__main__")
    said = capsys.readouterr().out
    assert said.count("  thought: ") == said.count("  said:    ") == 3
