"""Train the draft of k3lib-nano, of RadixArk's layout, on the taps of the trained model.

    python -m training.draft --run runs/nano --minutes 4

A block of seven rows behind an anchor attends to all context in front of the anchor and to itself. Anchors are drawn
among the assistant's tokens of the training data; the rows learn the model's own distribution of what follows.

Shapes: B sequences of S tokens, A anchors of each, g rows of a block, D hidden size, V vocabulary.
"""

from __future__ import annotations

import argparse
import collections
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional as F

from k3lib.batch import FeatureTap
from training import data, ops
from training.graphs import Graphs
from training.model import new_draft
from training.muon import Muon, split_parameters
from training.train import CHECKPOINT, autocast, batch_of, embed, load_run

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from torch import Tensor

    from k3lib.multimodal import KimiK3ForConditionalGeneration
    from k3lib.spec.drafts import RadixArkDraft
    from training.data import Rows

__all__ = ["DraftTrainer", "Targets", "Told", "block", "draw_anchors", "main"]

DRAFT = "draft.pt"


class Targets(NamedTuple):
    """What the frozen model says of a batch.

    Attributes:
        features: `[B * S, taps * D]`.
        hidden: `[B * S, D]`.
    """

    features: Tensor
    hidden: Tensor


class Told(NamedTuple):
    """What became of some blocks.

    Attributes:
        loss: `[]`.
        accepted: `[g]`, blocks of which the model would take so many tokens and one more.
        tried: `[g]`, blocks that have a token there in front of the end of the message.
    """

    loss: Tensor
    accepted: Tensor
    tried: Tensor


@torch.no_grad()
def targets_of(model: KimiK3ForConditionalGeneration, draft: RadixArkDraft, embeds: Tensor, length: int) -> Targets:
    """Run the model with its experts as they are stored on embeddings `[B * S, D]`, S being `length`."""
    taps = FeatureTap(draft.config.feature_layers, draft.config.feature_kind)
    batch = batch_of(len(embeds) // length, length, embeds.device)
    with ops.step(length, qat=True, grouped=torch.is_autocast_enabled(embeds.device.type)):
        hidden = model.language_model.hidden(batch, inputs_embeds=embeds, taps=taps)
    assert taps.out is not None, "the model fills it"
    return Targets(taps.out.to(draft.dtype), hidden.to(draft.dtype))


def draw_anchors(rows: Rows, count: int, generator: torch.Generator) -> Tensor:
    """`[B, A]` places in their sequences, among those whose next token is the assistant's; of a batch on the CPU."""
    batch, length = rows.ids.shape
    owner = rows.places // length
    many = torch.bincount(owner, minlength=batch)
    first = many.cumsum(0) - many
    pick = (torch.rand(batch, count, generator=generator) * many[:, None]).long()
    # rows of padding get any place, where nothing counts
    return rows.places[(first[:, None] + pick).clamp(max=len(rows.places) - 1)] % length


def block(
    model: KimiK3ForConditionalGeneration, draft: RadixArkDraft, ids: Tensor, anchors: Tensor, features: Tensor
) -> Tensor:
    """The normed rows of the blocks behind some anchors, `[B, A, g, D]`; see `BlockDraft.block`.

    Args:
        model: the target, for its embedding.
        draft: of grouped attention.
        ids: `[B, S]`.
        anchors: `[B, A]` places.
        features: `[B * S, taps * D]`.
    """
    config = draft.config
    (batch, length), count, size = ids.shape, anchors.shape[1], config.block_size
    device = ids.device
    context = draft.context(features)
    turns = draft.rope.turns(torch.arange(length, device=device).repeat(batch), context.dtype)
    block_ids = torch.full((batch, count, size), config.mask_token_id, device=device)
    block_ids[..., 0] = ids.gather(1, anchors)
    hidden = model.language_model.model.embed_tokens(block_ids.flatten()).to(draft.dtype)
    positions = anchors[..., None] + torch.arange(size, device=device)
    own_turns = draft.rope.turns(positions.flatten(), hidden.dtype)
    seen = torch.arange(length, device=device) < anchors[..., None]  # [B, A, S]
    which = torch.arange(count * size, device=device) // size
    mask = torch.cat(
        [seen.repeat_interleave(size, dim=1), (which[:, None] == which).expand(batch, -1, -1)], dim=-1
    )[:, None]  # fmt: skip
    for layer in draft.layers:
        attention, x = layer.self_attn, layer.input_layernorm(hidden)
        d = attention.head_dim
        q = attention.queries(x, own_turns)[..., d:].view(batch, count * size, -1, d)  # without the part that is zero
        known = attention.rows(context, turns).view(batch, length, attention.groups, 2 * d)
        own = attention.rows(x, own_turns).view(batch, count * size, attention.groups, 2 * d)
        values, keys = (
            torch.cat([known, own], dim=1).transpose(1, 2).repeat_interleave(attention.share, dim=1).chunk(2, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2).to(values.dtype), keys, values, attn_mask=mask, scale=attention.scale
        )
        hidden = hidden + attention.output(mixed.transpose(1, 2).flatten(0, 1).unflatten(1, (attention.groups, -1)))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return draft.norm(hidden).view(batch, count, size, -1)


class DraftTrainer:
    """The draft, its optimisers and its place in the data.

    Args:
        model: the trained target; its weights stay.
        seed: of weights, anchors and data; other data than the target saw.
        tokens: of the whole run.
        batch_tokens: of a step.
        anchors: of 512 tokens of a sequence.
        longest: items with more tokens are left out.
        lr: highest learning rate.
        warmup: steps in which it rises.
        precision: as in `training.train`.
        capture: replay steps from CUDA graphs, on devices that have them.
    """

    def __init__(
        self, model: KimiK3ForConditionalGeneration, *, seed: int = 0, tokens: float = 40e6, batch_tokens: int = 32768,
        anchors: int = 24, longest: int = 4000, lr: float = 2e-3, warmup: int = 100, precision: str = "bf16",
        capture: bool = True,
    ) -> None:  # fmt: skip
        self.model = model.requires_grad_(requires_grad=False)
        self.device = model.device
        self.seed, self.tokens_wanted, self.batch_tokens = seed, tokens, batch_tokens
        self.anchors, self.longest, self.lr, self.warmup, self.precision = anchors, longest, lr, warmup, precision
        self.draft: RadixArkDraft = new_draft(model.config, seed, device=model.device)  # type: ignore[assignment]
        matrices, others = split_parameters(self.draft, model.config.text)
        on_device = self.device.type == "cuda"
        self.rate = torch.tensor(lr, device=self.device)  # a tensor, which graphs read when they run
        self.muon = Muon(matrices, lr=self.rate)
        self.adamw = torch.optim.AdamW(others, lr=self.rate, betas=(0.9, 0.95), weight_decay=0.0, capturable=on_device)
        self.trained = [value for value, _ in matrices] + others
        for value in self.trained:
            value.grad = torch.zeros_like(value)  # it stays where it is
        self.graphs = Graphs(enabled=on_device and capture)
        self.position, self.step, self.tokens = (0, 0), 0, 0
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")

    def draw(self, rows: Rows, seed: int) -> Tensor:
        """Anchors `[B, A]` of a batch on the CPU, as dense in short sequences as in long ones."""
        count = max(1, self.anchors * rows.ids.shape[1] // 512)
        return draw_anchors(rows, count, torch.Generator().manual_seed(seed))

    def loss_of(self, rows: Rows, anchors: Tensor) -> Told:
        """The loss of a batch without an update; `anchors [B, A]` of `draw_anchors`."""
        return self._loss_of(*self._read(rows, anchors))

    @torch.no_grad()
    def _read(self, rows: Rows, anchors: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """On the device: embeddings `[B * S, D]`, ids `[B, S]`, anchors, and where the assistant's tokens come next."""
        rows = rows.to(self.device)
        with autocast(self.device, self.precision):
            embeds = embed(self.model, rows)
        counts = torch.zeros(rows.ids.numel(), dtype=torch.bool, device=self.device)
        return (
            embeds,
            rows.ids,
            anchors.to(self.device, non_blocking=True),
            counts.index_fill_(0, rows.places, value=True),
        )

    def _loss_of(self, embeds: Tensor, ids: Tensor, anchors: Tensor, counts: Tensor) -> Told:
        (batch, length), size = ids.shape, self.draft.config.block_size
        with autocast(self.device, self.precision):
            told = targets_of(self.model, self.draft, embeds, length)
            hidden = block(self.model, self.draft, ids, anchors, told.features)
        places = anchors[..., None] + torch.arange(size, device=ids.device)
        inside = places < length - 1
        flat = places.clamp(max=length - 1) + torch.arange(batch, device=ids.device)[:, None, None] * length
        live = (inside & counts[flat]).cumprod(-1).bool()  # up to the end of the message; rows of padding have none
        head = self.model.language_model.lm_head.weight
        wanted = F.linear(told.hidden[flat.flatten()], head)
        markov, confidence = self.draft.markov_head, self.draft.confidence_head
        assert markov is not None, "of this family"
        said = markov(ids.flatten()[flat.flatten()], hidden.float().flatten(0, 2))
        scores = F.linear(hidden.to(head.dtype).flatten(0, 2), head) + said.bias
        each = F.cross_entropy(scores, wanted.softmax(-1), reduction="none").view_as(live)
        weight = live * 0.9 ** torch.arange(size, device=live.device)
        loss = (each * weight).sum() / weight.sum().clamp(min=1)
        hit = (scores.argmax(-1) == wanted.argmax(-1)).view_as(live) & live
        if confidence is not None:
            sure = confidence(hidden.detach().flatten(0, 2), said.embedding.detach()).view_as(each)
            miss = F.binary_cross_entropy(sure.clamp(1e-4, 1 - 1e-4), hit.float(), reduction="none")
            loss = loss + 0.1 * (miss * live).sum() / live.sum().clamp(min=1)
        return Told(loss, hit.cumprod(-1).sum((0, 1)), live.sum((0, 1)))

    def train_step(self, rows: Rows) -> Told:
        """One update: pictures eagerly; the model, the draft and the optimisers from graphs where there are any."""
        anchors = self.draw(rows, self.seed * 1_000_003 + self.step)
        left = 1 - self.tokens / self.tokens_wanted
        self.rate.fill_(self.lr * max(0.0, min((self.step + 1) / self.warmup, left / 0.5, 1.0)))
        told = self.graphs.run(("blocks", *rows.ids.shape), self._backward, *self._read(rows, anchors))
        self.graphs.run("update", self._update)
        self.step += 1
        self.tokens += rows.ids.numel()
        return told

    def _backward(self, embeds: Tensor, ids: Tensor, anchors: Tensor, counts: Tensor) -> Told:
        told = self._loss_of(embeds, ids, anchors, counts)
        told.loss.backward()
        return told._replace(loss=told.loss.detach())

    def _update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.muon.step()
        self.adamw.step()
        torch._foreach_zero_([value.grad for value in self.trained])

    def run(
        self, *, minutes: float = float("inf"), steps: int | None = None, workers: int = 0, every: int = 50
    ) -> float:
        """Train until something is used up; returns the mean number of accepted tokens of the last `every` steps."""
        begin, recent = time.monotonic(), collections.deque[Told](maxlen=every)
        last = None if steps is None else self.step + steps
        stream = data.batches(
            self.seed + 17,
            self.position,
            self.batch_tokens,
            longest=self.longest,
            workers=workers,
            size=data.POOL if workers else 64,
        )
        for position, rows in stream:
            over = self.tokens >= self.tokens_wanted or (last is not None and self.step >= last)
            if over or time.monotonic() - begin > 60 * minutes:
                break
            recent.append(self.train_step(rows))
            self.position = position
            if self.step % every == 0:
                place = f"step {self.step:6}  {self.tokens / 1e6:8.2f} M tokens"
                print(f"{place}  loss {_mean_loss(recent):.4f}  accepted {_accepted(recent)[0]:.2f}", flush=True)
        return _accepted(recent)[0]

    @torch.no_grad()
    def held_out(self, items: int = 128) -> dict[str, float]:
        """Accepted tokens of seven on held-out chats, behind every kind of anchor, teacher-forced."""
        made = data.pool(self.seed + 1, 0, self.batch_tokens, size=items, split="held_out", longest=2500)
        found = [self.loss_of(rows, self.draw(rows, 0)) for rows in made]
        mean, by_place = _accepted(found)
        return {"loss": _mean_loss(found), "accepted": mean, **{f"accepted_{k}": x for k, x in enumerate(by_place)}}

    def save(self, file: Path) -> None:
        """Write all that is needed to go on."""
        state = {
            "draft": self.draft.state_dict(), "muon": self.muon.state_dict(), "adamw": self.adamw.state_dict(),
            "position": self.position, "step": self.step, "tokens": self.tokens,
        }  # fmt: skip
        torch.save(state, file.with_suffix(".tmp"))
        os.replace(file.with_suffix(".tmp"), file)

    def load(self, file: Path) -> None:
        """Go on where `save` was."""
        state = torch.load(file, map_location=self.device, weights_only=True)
        self.draft.load_state_dict(state["draft"])
        for optimiser, name in ((self.muon, "muon"), (self.adamw, "adamw")):
            optimiser.load_state_dict(state[name])
            optimiser.param_groups[0]["lr"] = self.rate
        self.position, self.step, self.tokens = tuple(state["position"]), state["step"], state["tokens"]


def _mean_loss(told: Iterable[Told]) -> float:
    return torch.stack([each.loss for each in told]).mean().item()


def _accepted(told: Collection[Told]) -> tuple[float, list[float]]:
    """Tokens of a block that are accepted on average, and for each place the part of the blocks accepted so far."""
    if not told:
        return 0.0, []
    accepted = torch.stack([each.accepted for each in told]).sum(0).double()
    tried = torch.stack([each.tried for each in told]).sum(0).clamp(min=1)
    return (accepted.sum() / tried[0]).item(), (accepted / tried).tolist()


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of training.train")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which it saves and ends")
    parser.add_argument("--tokens", type=float, default=40e6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    args = parser.parse_args()
    model, settings = load_run(args.run / CHECKPOINT, device=args.device)
    trainer = DraftTrainer(model, seed=args.seed, tokens=args.tokens, precision=settings.precision)
    if (args.run / DRAFT).is_file():
        trainer.load(args.run / DRAFT)
    with ops.training_ops():
        trainer.run(minutes=args.minutes, workers=args.workers)
        trainer.save(args.run / DRAFT)
        print({"done": trainer.tokens >= args.tokens, **trainer.held_out()})


if __name__ == "__main__":
    main()
