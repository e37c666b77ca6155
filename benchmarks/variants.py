"""Other launch configurations of a kernel, checked and timed on the cases of `k3lib bench`: one line a value.

    python -m benchmarks.variants kda_mixer "verify 32" k3lib.backends.triton.kda_verify_kernels:VERIFY \\
        "(128, 4, 168, 64)" "{'warps': 16}"
    python -m benchmarks.variants kda_chunk "" "k3lib.backends.triton.kda_chunk:_CONFIGS['narrow']" "{'chunk_warps': 4}"

A value is a whole configuration, or the fields that differ from the one that is set; the first line is that one.
"""

from __future__ import annotations

import argparse
import ast
import importlib
from typing import Any

from k3lib import bench


class Setting:
    """A configuration: a module's attribute, or an entry of one, `module:NAME` or `module:NAME[key]`."""

    def __init__(self, place: str) -> None:
        module, _, path = place.partition(":")
        name, _, key = path.partition("[")
        self.owner: Any = importlib.import_module(module)
        self.name, self.key = name, ast.literal_eval(key.rstrip("]")) if key else None

    @property
    def value(self) -> Any:
        found = getattr(self.owner, self.name)
        return found if self.key is None else found[self.key]

    @value.setter
    def value(self, value: Any) -> None:
        if self.key is None:
            setattr(self.owner, self.name, value)
        else:
            getattr(self.owner, self.name)[self.key] = value


def changed(value: Any, text: str) -> Any:
    """`value` with what `text` says."""
    given = ast.literal_eval(text)
    if isinstance(given, dict):
        return value._replace(**given)
    return type(value)(*given) if isinstance(given, tuple) else given


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op")
    parser.add_argument("case", help="part of the names of cases")
    parser.add_argument("setting")
    parser.add_argument("values", nargs="*")
    parser.add_argument("--impl", default="triton")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-checks", action="store_true")
    args = parser.parse_args()
    cases = [case for case in bench.CASES if case.op == args.op and args.case in case.name]
    setting = Setting(args.setting)
    plain = setting.value
    print("  ".join(case.name for case in cases))
    for text in [None, *args.values]:
        setting.value = plain if text is None else changed(plain, text)
        found = bench.run(device=args.device, cases=cases, impls=[args.impl], checks=not args.no_checks)
        shown = "  ".join(f"{t.us:8.1f}" if t.us is not None else t.note[:60] for t in found)
        print(f"{shown}  {text or setting.value}", flush=True)
    setting.value = plain


if __name__ == "__main__":
    main()
