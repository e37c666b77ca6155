"""Scripted proposers: right, wrong, random and in between."""

import random

import torch

from k3lib.spec import Draft

__all__ = ["Scripted"]


class Scripted:
    """Proposes from what the target is known to say.

    Attributes:
        right: for a context, how many of the proposed tokens are right; the next one is wrong.
        seen: what `commit` was told, as pairs of request and number of tokens.
    """

    feature_layers: tuple[int, ...] = ()
    feature_kind = "prefix"

    def __init__(self, answers, *, block_size=7, right=lambda context: 7, length=lambda context: 7, layers=()):
        self.answers = {tuple(prompt): list(out) for prompt, out in answers}
        self.block_size = block_size
        self.right, self.length = right, length
        self.feature_layers = tuple(layers)
        self.contexts: dict[str, list[int]] = {}
        self.dropped: list[str] = []
        self.features: dict[str, dict[int, torch.Tensor]] = {}

    def answer(self, ids):
        for prompt, out in self.answers.items():
            if tuple(ids[: len(prompt)]) == prompt and list(ids[len(prompt) :]) == out[: len(ids) - len(prompt)]:
                return out[len(ids) - len(prompt) :]
        return []

    def propose(self, contexts):
        drafts = []
        for context in contexts:
            ids = list(context.token_ids)
            count = min(self.length(context), self.block_size)
            known = self.answer(ids)[:count]
            draft = known + [1] * (count - len(known))
            for place in range(self.right(context), count):
                draft[place] = (draft[place] + 1 + place) % 256
            drafts.append(Draft(draft))
        return drafts

    def commit(self, contexts):
        for context in contexts:
            ids = list(context.token_ids)
            known = self.contexts.get(context.request_id, [])
            assert ids[: len(known)] == known, "a context only grows"
            self.contexts[context.request_id] = ids
            if self.feature_layers:
                rows = self.features.setdefault(context.request_id, {})
                first = len(ids) - 1 - len(context.features)
                rows.update({first + i: row.clone() for i, row in enumerate(context.features)})

    def drop(self, request_id):
        self.contexts.pop(request_id, None)
        self.dropped.append(request_id)


class Random(Scripted):
    """Proposes tokens of a random number generator, also with made-up probabilities."""

    def __init__(self, *, block_size=7, vocab=512, drawn=False, seed=0):
        super().__init__([], block_size=block_size)
        self.random, self.vocab, self.drawn = random.Random(seed), vocab, drawn
        self.generator = torch.Generator().manual_seed(seed)

    def propose(self, contexts):
        drafts = []
        for _ in contexts:
            count = self.random.randint(0, self.block_size)
            if not self.drawn:
                drafts.append(Draft([self.random.randrange(self.vocab) for _ in range(count)]))
                continue
            probs = torch.rand(count, self.vocab, generator=self.generator).square()
            probs /= probs.sum(-1, keepdim=True)
            ids = torch.multinomial(probs, 1, generator=self.generator)[:, 0].tolist() if count else []
            drafts.append(Draft(ids, probs=probs))
        return drafts
