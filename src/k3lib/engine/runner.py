"""From a step plan to tokens: builds the batch, runs the model, samples. Nothing waits for the device but `tokens`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from k3lib import ops
from k3lib.batch import FeatureTap, RouteTap
from k3lib.engine.grammar import allowed_tokens
from k3lib.engine.media import PromptPart
from k3lib.engine.sampler import Logprobs, Prepared, logprobs_of, sample, token_logprobs
from k3lib.engine.verify import NO_TOKEN, NOT_FINITE, judge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from k3lib.batch import Batch
    from k3lib.cache import HybridCache
    from k3lib.engine.graphs import DecodeGraphs
    from k3lib.engine.media import MediaStore
    from k3lib.engine.request import RequestState, TokenLogprob
    from k3lib.engine.scheduler import StepPlan, Work
    from k3lib.model import KimiK3ForCausalLM
    from k3lib.spec.proposer import Draft

__all__ = ["NOT_FINITE", "NO_TOKEN", "Launched", "Runner"]


@dataclass(slots=True)
class Launched:
    """A step on its way through the device.

    Attributes:
        states: its requests, first those that get a token.
        host: their tokens on the host, once `event` has passed, one column, or in a verify step as many as a request
            can get, filled up with `NO_TOKEN`; `NOT_FINITE` alone, or `NO_TOKEN` of a part of a prompt.
        event: None on a CPU.
        logprobs: of the tokens, column by column of each request.
        prompts: log-probabilities of prompt tokens, with the request and their ids.
        routes: experts of the tokens of requests that want them, with the position of the first.
        features: for each of `states`, the hidden states of its tokens; empty if no draft wants them.
    """

    states: list[RequestState]
    host: Tensor
    event: torch.cuda.Event | None
    logprobs: Logprobs | None
    prompts: list[tuple[RequestState, list[int], Logprobs]]
    routes: list[tuple[RequestState, int, Tensor]]
    features: list[Tensor]

    def tokens(self) -> list[list[int]]:
        """Wait for the tokens of each request, the one point of a step that does; empty for a part of a prompt."""
        if self.event is not None:
            self.event.synchronize()
        rows = self.host.tolist()
        return [[token for token in row if token != NO_TOKEN] for row in rows]

    def token_logprobs(self, tokens: Sequence[Sequence[int]]) -> list[list[TokenLogprob]] | None:
        """Log-probabilities of the chosen tokens of each request, if one of the step asked for them."""
        if self.logprobs is None:
            return None
        width = self.host.shape[1]
        count = len(self.logprobs.chosen) // width
        ids = [token for row in tokens[:count] for token in [*row, *[NO_TOKEN] * (width - len(row))]]
        top = [state.request.params.top_logprobs for state in self.states[:count] for _ in range(width)]
        entries = token_logprobs(ids, self.logprobs, top)
        return [entries[i * width : i * width + len(row)] for i, row in enumerate(tokens[:count])]

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

    def __init__(  # noqa: PLR0913 - rules of an engine
        self,
        model: KimiK3ForCausalLM,
        cache: HybridCache,
        *,
        piece_tokens: int = 4096,
        strict: bool = False,
        one_by_one: bool = False,
        graphs: DecodeGraphs | None = None,
        media: MediaStore | None = None,
        tap: FeatureTap | None = None,
        accept: Literal["chain", "block"] = "chain",
        simulate: float | None = None,
    ) -> None:
        """Make a runner.

        Args:
            model: a whole model.
            cache: its memory.
            piece_tokens: cached tokens that a prefill looks at together.
            strict: refuse slow references on an accelerator.
            one_by_one: give the model one request at a time, so that the company of a request changes nothing.
            graphs: replay decode and verify steps; None runs all eagerly.
            media: encodes images and puts them into prompts; None = there are none.
            tap: what a draft wants of hidden states.
            accept: rule of verify steps for draft tokens that were drawn.
            simulate: tokens that verify steps give on average, whatever was proposed; None = what is right.
        """
        self.model = model
        self.cache = cache
        self.piece_tokens = piece_tokens
        self.strict = strict
        self.one_by_one = one_by_one
        self.graphs = graphs
        self.media = media
        self.tap = tap
        self.accept: Literal["chain", "block"] = accept
        self.simulate = simulate
        self._prepared: tuple[tuple[int, ...], Prepared] | None = None

    def launch(self, plan: StepPlan, drafts: Sequence[Draft] = ()) -> Launched:
        """Issue a step to the device.

        Args:
            plan: what to compute.
            drafts: of a verify step, for each of its requests: the tokens behind the first of `ids`.
        """
        prompts: list[tuple[RequestState, list[int], Logprobs]] = []
        routes: list[tuple[RequestState, int, Tensor]] = []
        work = plan.work if drafts else sorted(plan.work, key=lambda work: not work.samples)
        states = [w.state for w in work]
        with ops.use_options(strict=self.strict or None, deterministic=self.one_by_one or None):
            groups = [[w] for w in work] if self.one_by_one else [work]
            passes = [self._forward(group, plan.mode, prompts, routes) for group in groups]
        logits, position = _joined([p[0] for p in passes]), _joined([p[1] for p in passes])
        features = [rows for p in passes for rows in p[2]]
        if drafts:
            tokens, found = self._judge(states, logits, drafts)
        else:
            tokens, found = self._choose(states[: sum(w.samples for w in work)], logits, position)
        host, event = _to_host(tokens)
        return Launched(states, host, event, found, prompts, routes, features)

    def _choose(self, chosen: list[RequestState], logits: Tensor, position: Tensor) -> tuple[Tensor, Logprobs | None]:
        """Sample for the first rows; the others are parts of prompts, and looked at too."""
        count, results, found = len(chosen), [], None
        if count:
            mine = logits[:count]
            prepared, counts = self._prepare(chosen, logits.device), [state.counts for state in chosen]
            allowed = self._allowed(chosen, logits)
            results.append(sample(mine, prepared, position[:count], counts=counts, allowed=allowed))
            if any(state.request.params.logprobs for state in chosen):
                top = max(state.request.params.top_logprobs for state in chosen)
                found = logprobs_of(mine, results[0], top)
        if count < len(logits):  # a failure must not stay in a cached prefix
            results.append(torch.where(logits[count:].amax(-1).isfinite(), NO_TOKEN, NOT_FINITE))
        return _joined(results)[:, None], found

    def _judge(
        self, states: list[RequestState], logits: Tensor, drafts: Sequence[Draft]
    ) -> tuple[Tensor, Logprobs | None]:
        """Accept draft tokens of each request, and choose the token behind them."""
        verdict = judge(logits, drafts, states, stop_ids=self._stop_ids, rule=self.accept, simulate=self.simulate)
        if not any(state.request.params.logprobs for state in states):
            return verdict.tokens, None
        top = max(state.request.params.top_logprobs for state in states)
        found = logprobs_of(logits[verdict.rows.flatten()], verdict.tokens.flatten().clamp(min=-1), top)
        return verdict.tokens, found

    @property
    def _stop_ids(self) -> list[int]:
        return [i for i in [self.model.config.eos_token_id] if i is not None]

    def _allowed(self, states: Sequence[RequestState], logits: Tensor) -> Tensor | None:
        """What grammars permit; the host works it out while the device still runs the model."""
        matchers = [state.matcher for state in states]
        if all(matcher is None for matcher in matchers):
            return None
        return allowed_tokens(matchers, logits.shape[1], logits.device)

    def _forward(
        self,
        group: list[Work],
        mode: Literal["prefill", "decode", "verify"],
        prompts: list[tuple[RequestState, list[int], Logprobs]],
        routes: list[tuple[RequestState, int, Tensor]],
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Run the model on some requests.

        Returns:
            The logits behind the tokens of each, in a verify step behind every token; the lengths of their contexts;
            and the features of each one's tokens.
        """
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
        if mode != "prefill" and self.graphs is not None and not wants_prompt:
            replayed = self.graphs.run(batch)
            if replayed is not None:
                logits, features = replayed
                # the next request of this step replays the same graph
                return logits.clone() if self.one_by_one else logits, batch.seq_lens, _parts(features, batch)
        tap = None if self.tap is None else dataclasses.replace(self.tap, out=None)
        options: dict[str, Any] = {} if tap is None else {"taps": tap}
        embeds = self._embed(group, starts, batch) if mode == "prefill" else None
        if embeds is not None:
            options["inputs_embeds"] = embeds
        hidden = None
        if wants_prompt:
            hidden = self.model.hidden(batch, self.cache, **options)
            logits = self.model.scores(hidden if mode == "verify" else hidden[batch.cu_seqlens[1:].long() - 1])
        else:
            logits = self.model(batch, self.cache, logits="all" if mode == "verify" else "last", **options)
        begin = 0
        for work, start in zip(group, starts, strict=True):
            rows = slice(begin, begin + len(work.ids))
            begin = rows.stop
            if hidden is not None and work.state.request.params.prompt_logprobs:
                self._score_prompt(work, start, hidden[rows], prompts)
            if batch.routes is not None and work.state.request.record_routes:
                routes.append((work.state, start, batch.routes.ids[rows]))
        return logits, batch.seq_lens, _parts(None if tap is None else tap.out, batch)

    def _embed(self, group: Sequence[Work], starts: Sequence[int], batch: Batch) -> Tensor | None:
        """Embeddings of a step that images fall into."""
        if self.media is None:
            return None
        parts = [
            PromptPart(work.state.number, work.state.request.media, start, start + len(work.ids))
            for work, start in zip(group, starts, strict=True)
        ]
        return self.media.embed(batch, parts)

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
            params = [state.request.params for state in states]
            made = Prepared.of(params, [state.seed for state in states], device, stop_ids=self._stop_ids)
            self._prepared = (key, made)
        return self._prepared[1]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _parts(features: Tensor | None, batch: Batch) -> list[Tensor]:
    """Features of each request."""
    return [] if features is None else list(torch.split(features, list(batch.new_tokens)))


def _to_host(tokens: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    if tokens.device.type != "cuda":
        return tokens.cpu(), None
    host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    host.copy_(tokens, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return host, event
