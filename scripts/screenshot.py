"""Ask the model of the package in the chat page, and write what is to be seen: `python scripts/screenshot.py`.

It starts `k3lib-serve` and drives Chromium (K3LIB_CHROMIUM, or one that is installed). Answers are greedy.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "tests" / "server"))

from browser import Browser, Page, find_chromium  # noqa: E402
from process import Server  # noqa: E402

from k3lib import nano  # noqa: E402

QUESTIONS = ["Who are you?", "What is 15% of 240?"]
SECONDS = 120


def settle(page: Page) -> None:
    """Greedy answers, so that the picture can be made again."""
    page.click("#open-settings")
    page.fill("#temperature", "0")
    page.click("#close-settings")
    page.wait("!document.getElementById('settings').open")


def ask(page: Page, question: str, count: int) -> None:
    """Ask, and wait for the end of the answer."""
    page.fill("#prompt", question)
    page.press("Enter")
    page.wait(f"document.querySelectorAll('.assistant .usage').length === {count}", SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", default=QUESTIONS, help="asked one after the other")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "images" / "chat.png")
    parser.add_argument("--width", type=int, default=900)
    parser.add_argument("--height", type=int, default=840)
    args = parser.parse_args()
    path = find_chromium()
    if path is None:
        raise SystemExit("needs Chromium: install it, or set K3LIB_CHROMIUM")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        server, browser = Server(Path(folder), nano.NAME), Browser(path, Path(folder) / "profile")
        try:
            page = browser.open(server.wait().url, width=args.width, height=args.height)
            page.wait("document.getElementById('model-name').textContent")
            settle(page)
            for count, question in enumerate(args.questions, 1):
                ask(page, question, count)
                print(question, "->", page.js("[...document.querySelectorAll('.assistant')].at(-1).innerText"))
            page.js("document.querySelectorAll('.reasoning').forEach(e => { e.open = true; })")
            page.js("document.getElementById('log').scrollTo(0, 1e9)")
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_bytes(page.screenshot())
            troubles = page.troubles()
        finally:
            browser.close()
            server.stop()
    if troubles:
        raise SystemExit(f"the page had troubles: {troubles}")
    print(args.out)


if __name__ == "__main__":
    main()
