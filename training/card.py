"""Write the model card of an exported run: what it is, how it was made, what it can do and what not.

    python -m training.card --run runs/nano --model k3lib-nano --figures nano_cpu.json nano_gpu.json

Figures come from `python -m benchmarks.nano --json`; nothing is claimed that they do not hold.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from k3lib.config import KimiK3Config
from k3lib.spec.draft_files import BUNDLE
from training import tasks
from training.model import draft_config, size_table
from training.train import CHECKPOINT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["card", "main"]

WANTED = 0.95  # exact answers of an ability; below it the card says so
_ABOUT = {
    "arithmetic": "sums and differences up to 9999, products up to 999 by 99, quotients without rest, percentages",
    "tool_call": "one call among up to four tools, or none",
    "tool_result": "an answer from what a tool returned, or the next call",
    "parallel_calls": "two or three calls at once",
    "json": "a flat object for a schema",
    "recall": "a code among lines of text",
    "memory": "what was said turns ago",
    "small_talk": "a fixed set of questions",
    "image": "colour, shape, count or digit of a drawn picture",
}
_LIMITS = """\
- It knows nothing of the world and speaks the English of its templates. Anything else is answered with something that
  looks right. It is made to test software with, not to be asked for facts or advice.
- Numbers beyond those above, quotients with a rest and chained expressions were never seen.
- Pictures: plain shapes and block digits, drawn by a program, 56 or 84 pixels a side. Photographs mean nothing to it.
- Schemas are flat; optional arguments of tools are left out.
- No text was longer than 16 thousand tokens, and a token is a byte.
- There is no safety training."""


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _percent(right: int, items: int) -> str:
    """With the ends of Wilson's 95 % interval, which has a width even where all are right."""
    part, z = right / items, 1.96
    middle, scale = part + z * z / (2 * items), 1 + z * z / items
    half = z * math.sqrt(part * (1 - part) / items + z * z / (4 * items * items))
    low, high = max(0.0, middle - half) / scale, min(scale, middle + half) / scale
    return f"{100 * part:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def _abilities(lines: Sequence[dict[str, Any]]) -> str:
    rows = []
    for line in lines:
        name, thought = line["name"], line["thought"]
        about = _ABOUT.get(name, f"the same in a text of {name.split()[-1]} bytes")
        lengths = " / ".join(f"{thought[e]:.0f}" if e in thought else "-" for e in ("low", "high", "max"))
        rows.append((name, about, line["items"], _percent(line["right"], line["items"]), lengths))
    short = [line["name"] for line in lines if line["right"] < WANTED * line["items"]]
    said = f"Below {100 * WANTED:.0f} %: {', '.join(short)}." if short else f"All are at {100 * WANTED:.0f} % or above."
    head = ("ability", "what", "items", "exact, % (95 % interval)", "bytes of reasoning: low / high / max effort")
    return f"{_table(head, rows)}\n\n{said}"


def _levers(lines: Sequence[dict[str, Any]]) -> str:
    def row(line: dict[str, Any]) -> tuple[Any, ...]:
        items = sum(line["items"].values())
        return line["name"], f"{sum(line['right'].values())} of {items}", f"{line['same']} of {items}"

    return _table(("change", "exact answers", "answers equal to the base, token for token"), map(row, lines))


def _speed(found: dict[str, Any]) -> str:
    name, accepted = found["proposer"], found["acceptance"]
    rates = _table(
        ("requests", "tokens/s", f"with {name}", "speed-up"),
        [(r["requests"], f"{r['plain']:.0f}", f"{r[name]:.0f}", f"{r[name] / r['plain']:.2f}") for r in found["rates"]],
    )
    places = ", ".join(f"{100 * part:.0f}" for part in accepted["by_position"])
    return (
        f"Import and load: {found['load_seconds']:.1f} s. Medians of decode steps:\n\n{rates}\n\n"
        f"Of a draft, {accepted['accepted']:.2f} tokens are accepted on average, so that a step gives "
        f"{accepted['tokens_per_step']:.2f}; by place, %: {places}."
    )


def _curve(curve: Sequence[dict[str, Any]]) -> str:
    chosen = sorted({round(i * (len(curve) - 1) / 7) for i in range(8)})
    rows = [(f"{curve[i]['tokens'] / 1e6:.1f}", f"{curve[i]['loss']:.4f}", f"{curve[i]['lr']:.2g}") for i in chosen]
    return _table(("million tokens", "loss", "learning rate"), rows)


_METHOD = """\
Muon for matrices, each head by itself, AdamW for the rest. The router is balanced by quantiles. Experts are rounded to
MXFP4 in the forward pass, so what is stored is what was trained. The draft learnt the model's own distributions on its
own hidden states."""
_DATA = """\
Generators only: templates and word lists of `training/tasks.py`, drawn anew for every item. Nothing was scraped, no
data set was used."""
_HELD_OUT = """\
Held-out items: their names, pairs of numbers, tools, sets of arguments and pictures never occur in training. An answer
counts if it is exactly right, greedily decoded."""


def _summary(config: KimiK3Config, nbytes: int) -> str:
    text, parameters = config.text, size_table(config)[-1][1]
    assert text.moe is not None, "of this family"
    return (
        f"A Kimi-K3 of {parameters / 1e6:.1f} million parameters in {nbytes / 1e6:.1f} MB, in the released layout: "
        f"{text.num_layers} layers of width {text.hidden_size} (Kimi Delta Attention and gated MLA), attention "
        f"residuals, {text.moe.num_experts} latent experts of which {text.moe.top_k} are chosen, packed as MXFP4, a "
        "vision tower, and tokens that are bytes. "
        f"A DSPARK draft of {draft_config(config)['block_size']} tokens may lie in `{BUNDLE}/`."
    )


def _training(state: dict[str, Any]) -> str:
    kept = ", ".join(f"`{key}` {value}" for key, value in state["settings"].items())
    return (
        f"{state['tokens'] / 1e6:.1f} million tokens with padding, {state['step']} steps, "
        f"{state['seconds'] / 60:.1f} minutes, seed {state['settings']['seed']}. Settings: {kept}."
    )


def card(state: dict[str, Any], figures: Sequence[dict[str, Any]], *, nbytes: int, curve: str | None = None) -> str:
    """The text.

    Args:
        state: the checkpoint of `training.train`; its tensors are not looked at.
        figures: what `benchmarks.nano` wrote, one run each.
        nbytes: size of the exported folder.
        curve: file name of the picture of the loss, beside the card.
    """
    parts = [
        "---\nlicense: apache-2.0\nlibrary_name: k3lib\nlanguage: en\ntags: [kimi-k3, tiny, testing]\n---",
        "# k3lib-nano",
        _summary(KimiK3Config.from_hf(state["config"]), nbytes),
        "```shell\nk3lib-serve --model-path .      # an OpenAI-compatible server, and a page to chat\n```",
        "## Evaluation",
        _HELD_OUT,
    ]
    writers = (("abilities", _abilities), ("speed", _speed), ("levers", _levers))
    for found in figures:
        where = f"{found['machine']}, {found['dtype'].removeprefix('torch.')}, torch {found['torch']}"
        for name, write in writers:
            if name in found:
                parts += [f"### {name.capitalize()} ({where})", write(found[name])]
    shares = ", ".join(f"{name} {100 * part:.0f} %" for name, (_, part) in tasks.KINDS.items())
    parts += ["## Limits", _LIMITS, "## Data", f"{_DATA} Parts of the items: {shares}."]
    parts += ["## Training", _METHOD, _training(state), _curve(state["curve"])]
    if curve is not None:
        parts.append(f"![loss]({curve})")
    parts += ["## Licence", "Apache-2.0, the weights like the generators that they come from."]
    return "\n\n".join(parts) + "\n"


def main(argv: list[str] | None = None) -> None:
    """Write the card as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of training.train")
    parser.add_argument("--model", type=Path, required=True, help="folder of training.export")
    parser.add_argument("--figures", type=Path, nargs="*", default=[], help="files of benchmarks.nano --json")
    args = parser.parse_args(argv)
    state = torch.load(args.run / CHECKPOINT, map_location="cpu", weights_only=True, mmap=True)
    picture = args.run / "loss.png"
    if picture.is_file():
        shutil.copy(picture, args.model / picture.name)
    weighed = [f for f in args.model.rglob("*") if f.is_file() and f.name != "README.md"]
    text = card(
        state,
        [json.loads(file.read_text(encoding="utf-8")) for file in args.figures],
        nbytes=sum(f.stat().st_size for f in weighed),
        curve=picture.name if picture.is_file() else None,
    )
    (args.model / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
