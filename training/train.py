"""Train k3lib-nano: one command, one seed, resumable.

    python -m training.train --out runs/nano --minutes 9            # again and again until all tokens are done
    python -m training.train --out runs/nano --minutes 9 --tokens 400e6

A run is decided by its seed and `--tokens`: the data, their order and the schedule. `--minutes` only says when a call
saves and ends; the next one goes on where it stopped. `loss.csv` and `loss.png` grow with it.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import os
import time
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity
from torch.profiler import profile as recorder

from k3lib import Batch, KimiK3Config
from k3lib.layers.vision import Grid, VisionBatch
from training import data, ops
from training.graphs import Graphs
from training.model import nano_config, new_model, small_config
from training.muon import Muon, split_parameters
from training.plot import draw_curve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from k3lib.multimodal import KimiK3ForConditionalGeneration
    from training.data import Rows

__all__ = ["Settings", "Trainer", "batch_of", "embed", "held_out", "hidden_states", "load_run", "loss_of", "main"]

CHECKPOINT = "state.pt"
IGNORE = -100  # the label of a token that does not count


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What decides a run; a checkpoint refuses to go on under other ones.

    Attributes:
        seed: of weights and data.
        tokens: after which the learning rate has come down to nothing; padding counts.
        batch_tokens: of a step.
        longest: items with more tokens are left out.
        pool: items that are sorted by length together.
        lr: highest learning rate, of both optimisers.
        warmup: steps in which it rises.
        decay: part of the run, at its end, in which it falls.
        qat_from: part of the run after which experts are rounded to MXFP4.
        weight_decay: of matrices.
        clip: largest norm of the gradient.
        precision: "bf16" (autocast), "tf32" or "fp32".
        experts: "dense" (all experts of every token), "grouped" (the chosen ones, by grouped products), or "auto":
            grouped in bf16, which is what those products know on every device.
        capture: replay the layers and the optimisers from CUDA graphs, on devices that have them.
    """

    seed: int = 0
    tokens: float = 228_888_000
    batch_tokens: int = 32768
    longest: int = 16_384
    pool: int = data.POOL
    lr: float = 2.5e-3
    warmup: int = 200
    decay: float = 0.8
    qat_from: float = 0.0
    weight_decay: float = 0.05
    clip: float = 1.0
    precision: str = "bf16"
    experts: str = "auto"
    capture: bool = True

    @property
    def grouped(self) -> bool:
        """Whether only chosen experts are computed."""
        return self.experts == "grouped" or (self.experts == "auto" and self.precision == "bf16")


# ---- one pass -----------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _vision_batch(
    rows: int, columns: int, count: int, config: Any, device: torch.device, dtype: torch.dtype
) -> VisionBatch:
    return VisionBatch.of([Grid(1, rows, columns)] * count, config, dtype=dtype, device=device)


def embed(model: KimiK3ForConditionalGeneration, rows: Rows) -> Tensor:
    """Embeddings `[B * S, D]` with the features of images in their places, differentiable."""
    embeds = model.language_model.model.embed_tokens(rows.ids.flatten())
    for patches, (height, width, count), slots in zip(rows.patches, rows.grids, rows.slots, strict=True):
        batch = _vision_batch(height, width, count, model.config.vision, embeds.device, model.dtype)
        with ops.step(height * width):
            features = model.encode_batch(patches.to(model.dtype) / 127.5 - 1, batch)
        embeds = embeds.index_copy(0, slots, features.to(embeds.dtype))
    return embeds


def hidden_states(model: KimiK3ForConditionalGeneration, rows: Rows, **options: Any) -> tuple[Tensor, ops.Step]:
    """What the head reads, `[B * S, D]`; options of `ops.step`."""
    count, length = rows.ids.shape
    embeds = embed(model, rows)
    with ops.step(length, **options) as now:
        return model.language_model.hidden(batch_of(count, length, embeds.device), inputs_embeds=embeds), now


@lru_cache(maxsize=256)
def batch_of(count: int, length: int, device: torch.device) -> Batch:
    """`count` sequences of `length` tokens."""
    return Batch.lengths([length] * count, device=device)


def loss_of(model: KimiK3ForConditionalGeneration, rows: Rows, **options: Any) -> tuple[Tensor, Tensor, ops.Step]:
    """Mean loss of the tokens that count, their logits, and what the pass left behind."""
    hidden, now = hidden_states(model, rows, **options)
    with torch.autocast(hidden.device.type, enabled=False):
        picked = hidden.index_select(0, rows.places).to(model.dtype)
        logits = F.linear(picked, model.language_model.lm_head.weight)
        return F.cross_entropy(logits, rows.labels), logits, now


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context of a forward pass."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


# ---- the run ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Record:
    """One line of the loss curve."""

    step: int
    tokens: int
    seconds: float
    loss: float
    norm: float
    lr: float
    most_load: float
    notes: dict[str, float] = field(default_factory=dict)


class Trainer:
    """Model, optimisers and place in the data.

    Attributes:
        model: in fp32.
        position: pool and batch that come next.
        step, tokens, seconds: how far it is.
        curve: what was recorded.
    """

    def __init__(self, settings: Settings, config: KimiK3Config | None = None, *, device: str = "cpu") -> None:
        self.settings, self.device = settings, torch.device(device)
        self.model = new_model(config or nano_config(), settings.seed, device=device)
        self.model.language_model.requires_grad_()
        matrices, others = split_parameters(self.model, self.model.config.text)
        self.trained = [value for value, _ in matrices] + others
        self.muon = Muon(matrices, lr=settings.lr, weight_decay=settings.weight_decay)
        rate = torch.tensor(settings.lr, device=device)  # a tensor, which graphs read when they run
        on_device = self.device.type == "cuda"
        self.adamw = torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, capturable=on_device)
        self.muon.param_groups[0]["lr"] = rate
        self.rate = rate
        self.grads = [torch.zeros_like(value) for value in self.trained]  # they stay where they are
        sees = {id(p) for part in (self.model.vision_tower, self.model.mm_projector) for p in part.parameters()}
        self._sees = [id(value) in sees for value in self.trained]
        self.graphs = Graphs(enabled=on_device and settings.capture)
        self.position, self.step, self.tokens, self.seconds = (0, 0), 0, 0, 0.0
        self.qat = False
        self.curve: list[Record] = []
        self._recent: list[tuple[Tensor, Tensor, Tensor]] = []
        self.hooks: list[Callable[[Trainer], dict[str, float]]] = []
        precise = settings.precision == "fp32"
        torch.set_float32_matmul_precision("highest" if precise else "high")

    @property
    def progress(self) -> float:
        """Part of the run that is done."""
        return min(1.0, self.tokens / self.settings.tokens)

    def learning_rate(self) -> float:
        """Rises, stays, falls in a straight line to nothing."""
        s = self.settings
        return s.lr * min((self.step + 1) / s.warmup, 1.0, (1 - self.progress) / s.decay)

    def train_step(self, rows: Rows) -> None:
        """One update: embeddings and pictures eagerly, layers and optimisers from graphs where there are any."""
        s = self.settings
        qat = self.progress >= s.qat_from
        if qat != self.qat:
            self.graphs.forget()
            self.qat = qat
        self.rate.fill_(self.learning_rate())
        rows = rows.to(self.device)
        has_images = bool(rows.grids)
        for value, grad, sees in zip(self.trained, self.grads, self._sees, strict=True):
            value.grad = grad if has_images or not sees else None  # optimisers leave alone what has none
        count, length = rows.ids.shape
        labels = torch.full((count * length,), IGNORE, device=self.device).index_put((rows.places,), rows.labels)

        def layers(embeds: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self._layers(embeds, labels, count, length)

        with autocast(self.device, s.precision):
            embeds = embed(self.model, rows)
        loss, load, grad = self.graphs.run(("layers", count, length), layers, embeds.detach(), labels)
        embeds.backward(grad)
        norm = self.graphs.run(("update", has_images), self._update)
        self._recent.append((loss, norm, load))
        self.step += 1
        self.tokens += rows.ids.numel()

    def _layers(self, embeds: Tensor, labels: Tensor, count: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Loss and load of a pass, and the gradient `[B * S, D]` of its embeddings; the others are added up."""
        s, model = self.settings, self.model.language_model
        embeds = embeds.detach().requires_grad_()
        batch = batch_of(count, length, self.device)
        with autocast(self.device, s.precision), ops.step(length, qat=self.qat, balance=True, grouped=s.grouped) as now:
            hidden = model.hidden(batch, inputs_embeds=embeds)
        loss = F.cross_entropy(F.linear(hidden.to(model.dtype), model.lm_head.weight), labels, ignore_index=IGNORE)
        loss.backward()
        with torch.no_grad():
            for bias, better in now.biases:
                bias.lerp_(better.to(bias.dtype), 0.1)
        assert embeds.grad is not None, "a backward pass came by"
        return loss.detach(), now.most_load().detach(), embeds.grad

    def _update(self) -> Tensor:
        """Move the weights and clear the gradients; returns the norm that these had."""
        norm = torch.nn.utils.clip_grad_norm_(self.trained, self.settings.clip)
        self.muon.step()
        self.adamw.step()
        torch._foreach_zero_(self.grads)
        return norm

    def run(
        self,
        *,
        minutes: float = float("inf"),
        steps: int | None = None,
        out: Path | None = None,
        workers: int = 0,
        every: int = 50,
    ) -> None:
        """Train until the time, the steps or the tokens are used up, then save.

        Args:
            minutes: of this call, saving included in the last of them.
            steps: of this call.
            out: folder for checkpoint and curve; None keeps nothing.
            workers: processes that make data.
            every: steps of a line of the curve.
        """
        begin, before, saved = time.monotonic(), self.seconds, time.monotonic()
        s = self.settings
        last = None if steps is None else self.step + steps
        stream = data.batches(s.seed, self.position, s.batch_tokens, size=s.pool, longest=s.longest, workers=workers)
        for position, rows in stream:
            if (
                self.progress >= 1
                or (last is not None and self.step >= last)
                or time.monotonic() - begin > 60 * minutes
            ):
                break
            self.train_step(rows)
            self.position = position
            self.seconds = before + time.monotonic() - begin
            if self.step % every == 0:
                self.record()
            if out is not None and time.monotonic() - saved > 120:
                self.save(out)
                saved = time.monotonic()
        if 2 * len(self._recent) >= every or not self.curve:  # the mean of a few steps says little
            self.record()
        if out is not None:
            self.save(out)

    def record(self) -> None:
        """Add a line to the curve; waits for the device."""
        if not self._recent:
            return
        loss, norm, load = (torch.stack(x).float().mean().item() for x in zip(*self._recent, strict=True))
        self._recent.clear()
        notes = {k: v for hook in self.hooks for k, v in hook(self).items()}
        self.curve.append(
            Record(self.step, self.tokens, round(self.seconds, 2), loss, norm, self.learning_rate(), load, notes)
        )
        extra = "".join(f"  {key} {value:.4f}" for key, value in notes.items())
        place = f"step {self.step:6}  {self.tokens / 1e6:8.2f} M tokens  {self.seconds:7.1f} s"
        print(f"{place}  loss {loss:.4f}  norm {norm:.2f}  load {load:.2f}{extra}", flush=True)

    # -- files ----------------------------------------------------------------------------------------------------

    def save(self, out: Path) -> None:
        """Write all that is needed to go on, and the curve."""
        out.mkdir(parents=True, exist_ok=True)
        state = {
            "settings": dataclasses.asdict(self.settings), "config": self.model.config.to_hf(),
            "model": self.model.state_dict(), "muon": self.muon.state_dict(), "adamw": self.adamw.state_dict(),
            "position": self.position, "step": self.step, "tokens": self.tokens, "seconds": self.seconds,
            "curve": [dataclasses.asdict(r) for r in self.curve],
        }  # fmt: skip
        torch.save(state, out / f"{CHECKPOINT}.tmp")
        os.replace(out / f"{CHECKPOINT}.tmp", out / CHECKPOINT)
        write_curve(self.curve, out)

    def load(self, out: Path) -> None:
        """Go on where `save` was.

        Raises:
            ValueError: it was another run.
        """
        state = torch.load(out / CHECKPOINT, map_location=self.device, weights_only=True)
        mine = dataclasses.asdict(self.settings)
        if state["settings"] != mine or state["config"] != self.model.config.to_hf():
            changed = {
                key: (state["settings"].get(key), value)
                for key, value in mine.items()
                if state["settings"].get(key) != value
            }
            raise ValueError(
                f"{out / CHECKPOINT} is of another run: {changed or 'another configuration'} (there, here)"
            )
        self.model.load_state_dict(state["model"])
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])
        for optimiser in (self.muon, self.adamw):
            optimiser.param_groups[0]["lr"] = self.rate
        self.position, self.step, self.tokens = tuple(state["position"]), state["step"], state["tokens"]
        self.seconds, self.curve = state["seconds"], [Record(**r) for r in state["curve"]]


def load_run(file: Path, *, device: str = "cpu") -> tuple[KimiK3ForConditionalGeneration, Settings]:
    """The model of a checkpoint, and the settings it was trained with."""
    state = torch.load(file, map_location=device, weights_only=True)
    model = new_model(KimiK3Config.from_hf(state["config"]), 0, device=device)
    model.load_state_dict(state["model"])
    return model, Settings(**state["settings"])


def write_curve(curve: Sequence[Record], out: Path) -> None:
    """`loss.csv`, and `loss.png` if Pillow is here."""
    names = [f.name for f in dataclasses.fields(Record)]
    with (out / "loss.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([json.dumps(v) if isinstance(v, dict) else v for v in dataclasses.astuple(r)] for r in curve)
    draw_curve([(r.tokens / 1e6, r.loss) for r in curve], out / "loss.png", across="million tokens", up="loss")


@torch.no_grad()
def held_out(trainer: Trainer, *, items: int = 256, longest: int = 2500) -> dict[str, float]:
    """Loss on held-out items, and the part of them in which every token of the assistant is the likeliest one."""
    s, total, tokens, right, rows_seen = trainer.settings, 0.0, 0, 0, 0
    for rows in data.pool(s.seed + 1, 0, s.batch_tokens, size=items, split="held_out", longest=longest):
        here = rows.to(trainer.device)
        with autocast(trainer.device, s.precision):
            loss, logits, _ = loss_of(trainer.model, here, qat=trainer.progress >= s.qat_from, grouped=s.grouped)
        row = here.places // here.ids.shape[1]
        wrong = torch.zeros(len(here.ids), dtype=torch.int64, device=row.device)
        wrong.index_add_(0, row, (logits.argmax(-1) != here.labels).long())
        total += loss.item() * len(here.labels)
        tokens += len(here.labels)
        asked = torch.bincount(row, minlength=len(wrong)) > 0  # not rows of padding
        right += int(((wrong == 0) & asked).sum())
        rows_seen += int(asked.sum())
    return {"held_out_loss": total / tokens, "held_out_exact": right / rows_seen}


def profile(trainer: Trainer, *, steps: int = 3, rows: int = 25) -> str:
    """What takes the time of a step: the device's kernels (on a CPU the operators), most expensive first."""
    on_device = trainer.device.type == "cuda"
    kinds = [ProfilerActivity.CUDA] if on_device else [ProfilerActivity.CPU]
    with recorder(activities=kinds) as seen:
        trainer.run(steps=steps)
        if on_device:
            torch.cuda.synchronize()
    spent = "self_device_time_total" if on_device else "self_cpu_time_total"
    events = sorted(seen.key_averages(), key=lambda event: -getattr(event, spent))
    total = sum(getattr(event, spent) for event in events)
    lines = [f"{total / steps / 1e3:.1f} ms and {sum(e.count for e in events) / steps:.0f} calls a step"]
    for event in events[:rows]:
        time_of = getattr(event, spent) / steps / 1e3
        part = 100 * getattr(event, spent) / total
        lines.append(f"{time_of:9.3f} ms {part:5.1f} % {event.count / steps:7.0f} x  {event.key[:150]}")
    return "\n".join(lines)


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which it saves and ends")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--every", type=int, default=50, help="steps of a line of the curve")
    parser.add_argument("--evaluate", type=int, default=20, help="lines from one evaluation to the next; 0 = never")
    parser.add_argument("--small", action="store_true", help="a tenth of the model, to try things out")
    parser.add_argument("--profile", action="store_true", help="print what takes the time, and end")
    for f in dataclasses.fields(Settings):
        flag = f"--{f.name.replace('_', '-')}"
        if isinstance(f.default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=f.default)
        else:
            parser.add_argument(flag, type=type(f.default), default=f.default)
    args = parser.parse_args()
    settings = Settings(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Settings)})
    trainer = Trainer(settings, small_config() if args.small else nano_config(), device=args.device)
    if (args.out / CHECKPOINT).is_file():
        trainer.load(args.out)
    if args.evaluate:
        trainer.hooks.append(lambda t: held_out(t) if len(t.curve) % args.evaluate == args.evaluate - 1 else {})
    with ops.training_ops():
        if args.profile:
            trainer.run(steps=5, workers=args.workers)
            print(profile(trainer))
            return
        trainer.run(minutes=args.minutes, out=args.out, workers=args.workers, every=args.every)
        print({"done": trainer.progress >= 1, "tokens": trainer.tokens, **held_out(trainer)})


if __name__ == "__main__":
    main()
