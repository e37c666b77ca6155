"""From a step plan to tokens: builds the batch, runs the model, samples. Nothing waits for the device but `tokens`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from k3lib import ops
from k3lib.batch import RouteTap
from k3lib.engine.grammar import allowed_tokens
from k3lib.engine.sampler import Logprobs, Prepared, logprobs_of, sample, token_logprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from k3lib.cache import HybridCache
    from k3lib.engine.graphs import DecodeGraphs
    from k3lib.engine.request import RequestState, TokenLogprob
    from k3lib.engine.scheduler import StepPlan, Work
    from k3lib.model import KimiK3ForCausalLM

__all__ = ["NOT_FINITE", "NO_TOKEN", "Launched", "Runner"]

NOT_FINITE, NO_TOKEN = -1, -2  # in place of a token; the sampler gives the former


@dataclass(slots=True)
class Launched:
    """A step on its way through the device.

    Attributes:
        states: its requests, first those that get a token.
        host: their tokens on the host, once `event` has passed; `NOT_FINITE`, or `NO_TOKEN` of a part of a prompt.
        event: None on a CPU.
        logprobs: of the tokens.
        prompts: log-probabilities of prompt tokens, with the request and their ids.
        routes: experts of the tokens of requests that want them, with the position of the first.
    """

    states: list[RequestState]
    host: Tensor
    event: torch.cuda.Event | None
    logprobs: Logprobs | None
    prompts: list[tuple[RequestState, list[int], Logprobs]]
    routes: list[tuple[RequestState, int, Tensor]]

    def tokens(self) -> list[int]:
        """Wait for the tokens: the one point of a step that does."""
        if self.event is not None:
            self.event.synchronize()
        found: list[int] = self.host.tolist()
        return found

    def token_logprobs(self, tokens: Sequence[int]) -> list[TokenLogprob] | None:
        """Log-probabilities of the chosen tokens, if a request of the step asked for them."""
        if self.logprobs is None:
            return None
        count = len(self.logprobs.chosen)
        top = [state.request.params.top_logprobs for state in self.states[:count]]
        return token_logprobs(tokens[:count], self.logprobs, top)

    def note_prompts(self) -> None:
        """Hand prompt log-probabilities and routes to their requests."""
        for state, ids, found in self.prompts:
            if not state.prompt_logprobs:
                state.prompt_logprobs.append(None)  # nothing predicts the first token
            state.prompt_logprobs += token_logprobs(ids, found, [state.request.params.top_logprobs] * len(ids))
        for state, start, chosen in self.routes:
            there = chosen.cpu()
            state.routes = there if state.routes is None else torch.cat([state.routes[:start], there])


class Runner:
    """Runs step plans on one device."""

    def __init__(
        self,
        model: KimiK3ForCausalLM,
        cache: HybridCache,
        *,
        piece_tokens: int = 4096,
        strict: bool = False,
        one_by_one: bool = False,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """Make a runner.

        Args:
            model: a whole model.
            cache: its memory.
            piece_tokens: cached tokens that a prefill looks at together.
            strict: refuse slow references on an accelerator.
            one_by_one: give the model one request at a time, so that the company of a request changes nothing.
            graphs: replay decode steps; None runs all eagerly.
        """
        self.model = model
        self.cache = cache
        self.piece_tokens = piece_tokens
        self.strict = strict
        self.one_by_one = one_by_one
        self.graphs = graphs
        self._prepared: tuple[tuple[int, ...], Prepared] | None = None

    def launch(self, plan: StepPlan) -> Launched:
        """Issue a step to the device."""
        prompts: list[tuple[RequestState, list[int], Logprobs]] = []
        routes: list[tuple[RequestState, int, Tensor]] = []
        rows, positions = [], []
        work = sorted(plan.work, key=lambda work: not work.samples)
        states, count = [w.state for w in work], sum(w.samples for w in work)
        with ops.use_options(strict=self.strict or None, deterministic=self.one_by_one or None):
            for group in [[w] for w in work] if self.one_by_one else [work]:
                logits, place = self._forward(group, plan.mode, prompts, routes)
                rows.append(logits)
                positions.append(place)
        logits = rows[0] if len(rows) == 1 else torch.cat(rows)
        position = positions[0] if len(positions) == 1 else torch.cat(positions)
        results, found = [], None
        if count:
            chosen, chosen_logits = states[:count], logits[:count]
            prepared, counts = self._prepare(chosen, logits.device), [state.counts for state in chosen]
            allowed = self._allowed(chosen, logits)
            results.append(sample(chosen_logits, prepared, position[:count], counts=counts, allowed=allowed))
            if any(state.request.params.logprobs for state in chosen):
                top = max(state.request.params.top_logprobs for state in chosen)
                found = logprobs_of(chosen_logits, results[0], top)
        if count < len(work):  # parts of prompts are looked at too: a failure must not stay in a cached prefix
            results.append(torch.where(logits[count:].amax(-1).isfinite(), NO_TOKEN, NOT_FINITE))
        host, event = _to_host(results[0] if len(results) == 1 else torch.cat(results))
        return Launched(states, host, event, found, prompts, routes)

    def _allowed(self, states: Sequence[RequestState], logits: Tensor) -> Tensor | None:
        """What grammars permit; the host works it out while the device still runs the model."""
        matchers = [state.matcher for state in states]
        if all(matcher is None for matcher in matchers):
            return None
        return allowed_tokens(matchers, logits.shape[1], logits.device)

    def _forward(
        self,
        group: list[Work],
        mode: Literal["prefill", "decode"],
        prompts: list[tuple[RequestState, list[int], Logprobs]],
        routes: list[tuple[RequestState, int, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Run the model on some requests; the logits behind the tokens of each, and the lengths of their contexts."""
        starts = [work.lease.length for work in group]
        batch = self.cache.make_batch([(work.lease, work.ids) for work in group], mode=mode)
        if mode == "prefill":
            batch.prefix_pieces(self.cache.config.page_size, self.piece_tokens)
        wants_routes = any(work.state.request.record_routes for work in group)
        if wants_routes:
            text = self.model.config.text
            assert text.moe is not None, "checked when the request came"
            shape = (batch.num_tokens, text.num_layers - len(text.dense_layers), text.moe.top_k)
            batch.routes = RouteTap(torch.zeros(shape, dtype=torch.int32, device=self.model.device), replay=False)
        wants_prompt = any(work.state.request.params.prompt_logprobs for work in group)
        if mode == "decode" and self.graphs is not None and not wants_prompt:
            replayed = self.graphs.run(batch)
            if replayed is not None:
                # the next request of this step replays the same graph
                return replayed.clone() if self.one_by_one else replayed, batch.seq_lens
        if wants_prompt:
            hidden = self.model.hidden(batch, self.cache)
            logits = self.model.scores(hidden[batch.cu_seqlens[1:].long() - 1])
        else:
            hidden, logits = None, self.model(batch, self.cache, logits="last")
        begin = 0
        for work, start in zip(group, starts, strict=True):
            rows = slice(begin, begin + len(work.ids))
            begin = rows.stop
            if hidden is not None and work.state.request.params.prompt_logprobs:
                self._score_prompt(work, start, hidden[rows], prompts)
            if batch.routes is not None and work.state.request.record_routes:
                routes.append((work.state, start, batch.routes.ids[rows]))
        return logits, batch.seq_lens

    def _score_prompt(
        self, work: Work, start: int, hidden: Tensor, prompts: list[tuple[RequestState, list[int], Logprobs]]
    ) -> None:
        """Log-probabilities of the prompt tokens behind those of this step, a few rows at a time."""
        state = work.state
        known = max(0, len(state.prompt_logprobs) - 1)
        targets = state.request.prompt_ids[start + 1 : start + 1 + len(work.ids)]
        for begin in range(max(0, known - start), len(targets), 256):  # after a preemption some are known
            ids = targets[begin : begin + 256]
            wanted = torch.tensor(ids, device=hidden.device)
            logits = self.model.scores(hidden[begin : begin + len(ids)])
            prompts.append((state, ids, logprobs_of(logits, wanted, state.request.params.top_logprobs)))
        if not targets and not state.prompt_logprobs:
            state.prompt_logprobs.append(None)  # a prompt of one token

    def _prepare(self, states: list[RequestState], device: torch.device) -> Prepared:
        """Parameters on the device, kept while the same requests stand in the same rows."""
        key = tuple(state.number for state in states)
        if self._prepared is None or self._prepared[0] != key:
            eos = [i for i in [self.model.config.eos_token_id] if i is not None]
            params = [state.request.params for state in states]
            made = Prepared.of(params, [state.seed for state in states], device, stop_ids=eos)
            self._prepared = (key, made)
        return self._prepared[1]


def _to_host(tokens: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    if tokens.device.type != "cuda":
        return tokens.cpu(), None
    host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    host.copy_(tokens, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return host, event
