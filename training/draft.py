"""Train the draft of k3lib-nano, of RadixArk's layout, on the taps of the trained model.

    python -m training.draft --run runs/nano --minutes 4

A block of seven rows behind an anchor attends to all context in front of the anchor and to itself. Anchors are drawn
among the assistant's tokens of the training data; the rows learn the model's own distribution of what follows.

Shapes: B sequences of S tokens, A anchors of each, g rows of a block, D hidden size, V vocabulary.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from k3lib.batch import FeatureTap
from training import data, ops
from training.model import new_draft
from training.muon import Muon, split_parameters
from training.train import CHECKPOINT, autocast, hidden_states, load_run

if TYPE_CHECKING:
    from torch import Tensor

    from k3lib.multimodal import KimiK3ForConditionalGeneration
    from k3lib.spec.drafts import RadixArkDraft
    from training.data import Rows

__all__ = ["DraftTrainer", "Targets", "block", "draw_anchors", "main"]

DRAFT = "draft.pt"


@dataclass(slots=True)
class Targets:
    """What the frozen model says of a batch.

    Attributes:
        features: `[B * S, taps * D]`.
        hidden: `[B * S, D]`.
        counts: `[B * S]`, whether the token behind each place is the assistant's.
    """

    features: Tensor
    hidden: Tensor
    counts: Tensor


@torch.no_grad()
def targets_of(model: KimiK3ForConditionalGeneration, draft: RadixArkDraft, rows: Rows) -> Targets:
    """Run the model with its experts as they are stored."""
    taps = FeatureTap(draft.config.feature_layers, draft.config.feature_kind)
    grouped = torch.is_autocast_enabled(model.device.type)
    hidden, _ = hidden_states(model, rows, qat=True, grouped=grouped, taps=taps)
    assert taps.out is not None, "the model fills it"
    counts = torch.zeros(rows.ids.numel(), dtype=torch.bool, device=hidden.device)
    counts[rows.places] = True
    return Targets(taps.out.to(draft.dtype), hidden.to(draft.dtype), counts)


def draw_anchors(rows: Rows, count: int, generator: torch.Generator) -> Tensor:
    """`[B, A]` places in their sequences, among those whose next token is the assistant's; of a batch on the CPU."""
    batch, length = rows.ids.shape
    owner = rows.places // length
    many = torch.bincount(owner, minlength=batch)
    first = many.cumsum(0) - many
    pick = (torch.rand(batch, count, generator=generator) * many[:, None]).long()
    # rows of padding get any place; nothing counts there
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
        anchors: of each sequence.
        longest: items with more tokens are left out.
        lr: highest learning rate.
        warmup: steps in which it rises.
        precision: as in `training.train`.
    """

    def __init__(
        self, model: KimiK3ForConditionalGeneration, *, seed: int = 0, tokens: float = 60e6, batch_tokens: int = 32768,
        anchors: int = 24, longest: int = 4000, lr: float = 2e-3, warmup: int = 100, precision: str = "bf16",
    ) -> None:  # fmt: skip
        self.model = model.requires_grad_(requires_grad=False)
        self.device = model.device
        self.seed, self.tokens_wanted, self.batch_tokens = seed, tokens, batch_tokens
        self.anchors, self.longest, self.lr, self.warmup, self.precision = anchors, longest, lr, warmup, precision
        self.draft: RadixArkDraft = new_draft(model.config, seed, device=model.device)  # type: ignore[assignment]
        matrices, others = split_parameters(self.draft, model.config.text)
        self.optimisers = [Muon(matrices, lr=lr), torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)]
        self.position, self.step, self.tokens = (0, 0), 0, 0

    def loss_of(self, rows: Rows, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and for each block how many of its tokens the model would take, `[B, A]`."""
        told = targets_of(self.model, self.draft, rows)
        batch, length = rows.ids.shape
        size = self.draft.config.block_size
        hidden = block(self.model, self.draft, rows.ids, anchors, told.features)
        places = anchors[..., None] + torch.arange(size, device=anchors.device)
        inside = places < length - 1
        flat = places.clamp(max=length - 1) + torch.arange(batch, device=anchors.device)[:, None, None] * length
        live = (inside & told.counts[flat]).cumprod(-1).bool()  # up to the end of the message
        previous = rows.ids.flatten()[flat]
        with torch.autocast(hidden.device.type, enabled=False):
            head = self.model.language_model.lm_head.weight
            wanted = F.linear(told.hidden[flat.flatten()], head)
            markov = self.draft.markov_head
            assert markov is not None, "of this family"
            said = markov(previous.flatten(), hidden.float().flatten(0, 2))
            scores = F.linear(hidden.to(head.dtype).flatten(0, 2), head) + said.bias
            each = F.cross_entropy(scores, wanted.softmax(-1), reduction="none").view_as(live)
            weight = live * 0.9 ** torch.arange(size, device=live.device)
            loss = (each * weight).sum() / weight.sum().clamp(min=1)
            hit = (scores.argmax(-1) == wanted.argmax(-1)).view_as(live) & live
            confidence = self.draft.confidence_head
            if confidence is not None:
                sure = (
                    confidence(hidden.detach().flatten(0, 2), said.embedding.detach())
                    .view_as(each)
                    .clamp(1e-4, 1 - 1e-4)
                )
                miss = F.binary_cross_entropy(sure, hit.float(), reduction="none")
                loss = loss + 0.1 * (miss * live).sum() / live.sum().clamp(min=1)
        return loss, hit.cumprod(-1).sum(-1)

    def train_step(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """One update; the loss and the mean number of accepted tokens."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.step)
        anchors = draw_anchors(rows, self.anchors, generator).to(self.device)
        left = 1 - self.tokens / self.tokens_wanted
        for optimiser in self.optimisers:
            optimiser.param_groups[0]["lr"] = self.lr * max(0.0, min((self.step + 1) / self.warmup, left / 0.5, 1.0))
        with autocast(self.device, self.precision):
            loss, accepted = self.loss_of(rows.to(self.device), anchors)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad()
        self.step += 1
        self.tokens += rows.ids.numel()
        return loss.detach(), accepted.float().mean()

    def run(
        self, *, minutes: float = float("inf"), steps: int | None = None, workers: int = 0, every: int = 50
    ) -> float:
        """Train until something is used up; returns the mean number of accepted tokens of the last `every` steps."""
        begin, recent, mean = time.monotonic(), [], 0.0
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
            if len(recent) == every:
                loss, mean = (torch.stack(x).mean().item() for x in zip(*recent, strict=True))
                print(
                    f"step {self.step:6}  {self.tokens / 1e6:8.2f} M tokens  loss {loss:.4f}  accepted {mean:.2f}",
                    flush=True,
                )
                recent.clear()
        if recent:
            mean = torch.stack([accepted for _, accepted in recent]).mean().item()
        return mean

    @torch.no_grad()
    def held_out(self, items: int = 128) -> dict[str, float]:
        """Accepted tokens of seven on held-out chats, behind every kind of anchor, teacher-forced."""
        found, losses = [], []
        for rows in data.pool(self.seed + 1, 0, self.batch_tokens, size=items, split="held_out", longest=2500):
            anchors = draw_anchors(rows, self.anchors, torch.Generator().manual_seed(0)).to(self.device)
            with autocast(self.device, self.precision):
                loss, accepted_of = self.loss_of(rows.to(self.device), anchors)
            losses.append(loss)
            found.append(accepted_of.flatten())
        accepted = torch.cat(found).float()
        by_place = {f"accepted_{k}": (accepted > k).float().mean().item() for k in range(self.draft.config.block_size)}
        return {"loss": torch.stack(losses).mean().item(), "accepted": accepted.mean().item(), **by_place}

    def save(self, file: Path) -> None:
        """Write all that is needed to go on."""
        state = {
            "draft": self.draft.state_dict(), "optimisers": [o.state_dict() for o in self.optimisers],
            "position": self.position, "step": self.step, "tokens": self.tokens,
        }  # fmt: skip
        torch.save(state, file.with_suffix(".tmp"))
        os.replace(file.with_suffix(".tmp"), file)

    def load(self, file: Path) -> None:
        """Go on where `save` was."""
        state = torch.load(file, map_location=self.device, weights_only=True)
        self.draft.load_state_dict(state["draft"])
        for optimiser, kept in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(kept)
        self.position, self.step, self.tokens = tuple(state["position"]), state["step"], state["tokens"]


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of training.train")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--tokens", type=float, default=60e6)
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
