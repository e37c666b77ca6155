"""README, docs and examples run as they stand; the commands that README promises are the ones that exist."""

import pathlib
import re
import runpy

import pytest

from k3lib.ops import ops

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
CLIENTS = {"chat_client.py", "reasoning_and_tools.py"}  # they need a server: server/test_nano_serving.py runs them
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
