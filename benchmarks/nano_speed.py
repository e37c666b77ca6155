"""How fast k3lib-nano loads and decodes, plainly and with speculation, side by side on real chats."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from benchmarks.nano_scores import held_out_items
from k3lib import Engine, EngineConfig, KimiK3ForConditionalGeneration, SamplingParams
from k3lib.engine import Request
from k3lib.server.tokenizer import load_tokenizer
from k3lib.spec import SpecConfig
from k3lib.spec.draft_files import BUNDLE
from training.data import prompt_ids

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

CHATS = ("arithmetic", "tool_call", "tool_result", "parallel_calls", "json", "memory")  # of text, not too long
_LOAD = """
import time
begin = time.perf_counter()
import torch
from k3lib import Engine, EngineConfig
Engine.from_pretrained({folder!r}, EngineConfig(max_running_requests=1), dtype={dtype}, device={device!r}, vision=True,
                       progress=False)
print(time.perf_counter() - begin)
"""


def load_seconds(folder: Path, device: str, dtype: torch.dtype, rounds: int) -> float:
    """From the start of a new process to an engine that takes requests: median."""
    code = _LOAD.format(folder=str(folder), dtype=dtype, device=device)
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(rounds)]
    return statistics.median(float(run.stdout) for run in runs)


def chats(count: int) -> list[list[int]]:
    """Prompts of held-out chats, kind after kind in turn."""
    tok = load_tokenizer()
    each = [held_out_items(kind, -(-count // len(CHATS))) for kind in CHATS]
    return [prompt_ids(item, tok)[0] for items in zip(*each, strict=True) for item in items][:count]


class Pace:
    """One engine with so many requests in flight: whenever one ends, the next chat takes its place.

    Attributes:
        rates: tokens a second of the decode steps of each round; prefill steps are not counted.
    """

    def __init__(self, engine: Engine, prompts: Sequence[list[int]], requests: int) -> None:
        self.engine, self.requests = engine, requests
        self.rates: list[float] = []
        self._left = itertools.cycle(prompts)

    def _fill(self) -> None:
        stats = self.engine.stats()
        for _ in range(self.requests - stats["running"] - stats["waiting"]):
            self.engine.add(Request(next(self._left), SamplingParams(temperature=0, max_new_tokens=600)))

    def measure(self, steps: int, *, keep: bool = True) -> None:
        """Run so many decode steps."""
        seconds, tokens, done = 0.0, 0, 0
        while done < steps:
            self._fill()
            prefills = self.engine.stats()["prefill_steps"]
            begin = time.perf_counter()
            outputs = self.engine.step()
            spent = time.perf_counter() - begin
            if self.engine.stats()["prefill_steps"] == prefills:
                done += 1
                seconds += spent
                tokens += sum(len(out.token_ids) for out in outputs)
        if keep:
            self.rates.append(tokens / seconds)

    @property
    def rate(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.rates)


def acceptance(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Accepted draft tokens of a verify step, and the part of the verified ones accepted at each place."""
    steps = sum(r["steps"] for r in reports)
    tried = [sum(x) for x in itertools.zip_longest(*(r["tried_by_position"] for r in reports), fillvalue=0)]
    taken = [sum(x) for x in itertools.zip_longest(*(r["by_position"] for r in reports), fillvalue=0)]
    return {
        "steps": steps,
        "tokens_per_step": sum(r["emitted"] for r in reports) / max(1, steps),
        "accepted": sum(taken) / max(1, steps),
        "by_position": [a / max(1, b) for a, b in zip(taken, tried, strict=True)],
    }


def run_speed(
    folder: Path, *, dtype: torch.dtype, device: str = "cpu", draft: str | None = None,
    batches: Sequence[int] = (1, 8, 32), rounds: int = 5, steps: int = 60,
) -> dict[str, Any]:  # fmt: skip
    """Print and return load time, rates and acceptance; all contestants take turns, round by round.

    Args:
        folder: of the checkpoint.
        dtype: of weights and activations.
        device: where they are.
        draft: folder of a draft; None takes the bundled one, or n-grams.
        batches: requests in flight.
        rounds: of which the medians are taken.
        steps: of a round with one request; of more requests fewer, with the root of their number.
    """
    proposer = draft or (str(folder) if (folder / BUNDLE).is_dir() else "ngram")
    found: dict[str, Any] = {"load_seconds": load_seconds(folder, device, dtype, min(rounds, 3)), "rates": []}
    print(f"import and load: {found['load_seconds']:.2f} s", flush=True)
    prompts, paces = chats(96), {}
    for requests, spec in itertools.product(batches, (None, SpecConfig(draft=proposer))):
        model = KimiK3ForConditionalGeneration.from_pretrained(folder, device=device, dtype=dtype, progress=False)
        config = EngineConfig(
            max_running_requests=requests, max_total_tokens=32768, spec=spec, disable_radix_cache=True
        )
        paces[requests, spec is not None] = Pace(Engine(model, config), prompts, requests)
    for number in range(rounds + 1):  # the first one captures and compiles
        for pace in paces.values():
            pace.measure(max(1, round(steps / pace.requests**0.5)), keep=number > 0)
    name = "n-gram" if proposer == "ngram" else "draft"
    print(f"{'requests':>8}{'tokens/s':>10}{'with ' + name:>12}{'speed-up':>10}{'tokens a step':>15}")
    reports = []
    for requests in batches:
        plain, other = paces[requests, False], paces[requests, True]
        reports.append(other.engine.stats()["speculation"])
        line = {"requests": requests, "plain": plain.rate, name: other.rate, "rounds": [plain.rates, other.rates]}
        found["rates"].append(line)
        length = reports[-1]["accept_length"]
        print(f"{requests:>8}{plain.rate:>10.0f}{other.rate:>12.0f}{other.rate / plain.rate:>10.2f}{length:>15.2f}")
    found["proposer"], found["acceptance"] = name, acceptance(reports)
    places = " ".join(f"{100 * x:.0f}" for x in found["acceptance"]["by_position"])
    print(f"accepted of a draft: {found['acceptance']['accepted']:.2f} tokens; by place, %: {places}")
    return found
