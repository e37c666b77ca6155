"""The flags of `k3lib-serve` as data and as a table; `python scripts/serve_flags.py docs/serving.md` renews a page."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from k3lib.server.config import ServeConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Flag", "flag_table", "flags"]

BEGIN, END = "<!-- flags -->\n", "<!-- end of flags -->\n"


class Flag(NamedTuple):
    """One flag."""

    group: str
    name: str
    default: str
    help: str


def flags() -> list[Flag]:
    """All flags, in the order of the help."""
    return list(_flags())


def _flags() -> Iterator[Flag]:
    config = ServeConfig()
    for group in dataclasses.fields(config):
        part = getattr(config, group.name)
        helps = _helps(type(part))
        for field in dataclasses.fields(part):
            if field.name not in {"cache", "spec"}:  # other flags make them
                default = _default(getattr(part, field.name))
                yield Flag(group.name, "--" + field.name.replace("_", "-"), default, helps.get(field.name, ""))


def _default(value: object) -> str:
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _helps(kind: type[Any]) -> dict[str, str]:
    """Help by field: from the string behind it, or from the section `Attributes` of the docstring."""
    source = textwrap.dedent(inspect.getsource(kind))
    found = {
        match[1]: " ".join(match[2].split())
        for match in re.finditer(r'^    (\w+): [^\n]+\n    """(.*?)"""', source, re.MULTILINE | re.DOTALL)
    }
    section = inspect.getdoc(kind) or ""
    for match in re.finditer(
        r"^    (\w+): ((?:.*\n?)(?:        .*\n?)*)", section.partition("Attributes:\n")[2], re.MULTILINE
    ):
        text = " ".join(match[2].split())
        found.setdefault(match[1], text[:1].upper() + text[1:])
    return found


def flag_table() -> str:
    """A table in Markdown."""
    lines = ["| flag | default | meaning |", "| --- | --- | --- |"]
    group = None
    for flag in flags():
        if flag.group != group:
            group = flag.group
            lines.append(f"| **{group}** | | |")
        meaning = flag.help.replace("|", "\\|")
        lines.append(f"| `{flag.name}` | {flag.default} | {meaning} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Replace the table in the page that is named on the command line."""
    page = Path(sys.argv[1])
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}{flag_table()}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
