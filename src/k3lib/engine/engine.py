"""The engine: requests in, tokens out. Synchronous `Engine`, and `AsyncEngine` that runs it in a thread."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import itertools
import logging
import queue
import secrets
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from k3lib import ops
from k3lib.cache import Limit
from k3lib.engine import ranks
from k3lib.engine.config import EngineConfig, Resolved, image_limits, resolve_limits
from k3lib.engine.grammar import Grammar, GrammarCompiler, Matcher
from k3lib.engine.graphs import DecodeGraphs
from k3lib.engine.media import MediaStore
from k3lib.engine.prompts import Prompts
from k3lib.engine.request import FinishReason, Request, RequestState, SamplingParams, StepOutput
from k3lib.engine.runner import Launched, Runner
from k3lib.engine.sampler import TokenCounts
from k3lib.engine.scheduler import Scheduler, SchedulerConfig
from k3lib.engine.speculation import Speculation, make_proposer
from k3lib.engine.vision_graphs import VisionGraphs
from k3lib.errors import CheckpointError, ConfigError, RequestError
from k3lib.model import KimiK3ForCausalLM
from k3lib.multimodal import KimiK3ForConditionalGeneration

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from os import PathLike

    from torch import Tensor

    from k3lib.batch import FeatureTap
    from k3lib.cache import CacheEvent
    from k3lib.engine.grammar import CompiledGrammar, Vocabulary
    from k3lib.engine.media import Media
    from k3lib.engine.replicas import Lockstep
    from k3lib.engine.request import TokenLogprob
    from k3lib.engine.scheduler import StepPlan
    from k3lib.spec.proposer import Draft

__all__ = ["AsyncEngine", "Engine"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class _Taken:
    """Tokens that a request keeps of a step.

    Attributes:
        ids: the tokens.
        finish: why it ends with the last of them.
        is_first: nothing was generated before.
        is_bad: the step failed for this request.
    """

    ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    is_first: bool = False
    is_bad: bool = False


_LONGEST_GUESS = 4096  # tokens a request may still generate that admission takes seriously
_LARGEST_PIECE = 4096  # cached tokens that a prefill expands together, and never more than a chunk


class Engine(Prompts):
    """Runs requests through a model, many at once, with what is cached of earlier ones.

    `generate` and `stream` are the simple ways; `add`, `step` and `abort` are for a server.
    """

    def __init__(
        self,
        model: KimiK3ForCausalLM | KimiK3ForConditionalGeneration,
        config: EngineConfig | None = None,
        *,
        tokenizer: Any = None,  # noqa: ANN401
        listener: Callable[[CacheEvent], None] | None = None,
        lockstep: Lockstep | None = None,
    ) -> None:
        """Make an engine and its cache.

        Args:
            model: a whole model; one with a vision tower takes images.
            config: limits.
            tokenizer: with `encode` and `decode`, for prompts and stops given as text; grammars need one of K3 (see
                `k3lib.engine.grammar.Vocabulary`).
            listener: called with every event of the prefix cache.
            lockstep: of an engine that is one of several replicas: begins every pass on all of them.

        Raises:
            ConfigError: a context longer than the model's positions, a budget that holds not one request, or ranks that
                this one does not lead (see `k3lib.engine.follow`).
        """
        self._whole = model
        if isinstance(model, KimiK3ForConditionalGeneration):
            model = model.language_model
        self.model = model
        self._leader: ranks.Leader | None = None
        self.config = config or EngineConfig()
        self._lockstep = lockstep
        ranks.check_leader(model, self.config, in_lockstep=lockstep is not None)
        self.tokenizer = tokenizer
        self._grammars = _grammar_compiler(model, tokenizer)
        spec = self.config.spec
        proposer = None if spec is None else make_proposer(spec, model)
        resolved = resolve_limits(self._whole, self.config, proposer)
        self.context_length = resolved.context_length
        cache = resolved.cache
        self.cache = ranks.allocate(model, cache, listener=listener)
        self.limits: tuple[Limit, ...] = (*resolved.limits, *self._scratch_limits())
        self.limits += tuple(image_limits(self._whole, self.config))
        for limit in self.limits:
            logger.info("%s = %s (%s) %s", *limit)
        guess = min(self.context_length, _LONGEST_GUESS)
        self.scheduler = Scheduler(
            self.cache,
            SchedulerConfig(
                page_size=self.cache.page_tokens,
                max_running=resolved.max_running,
                max_queued=self.config.max_queued_requests,
                chunk_tokens=resolved.chunk_tokens,
                mix_decode=self.config.mix_decode,
                aligned=self.config.deterministic,
                reserve_tokens=int(guess * min(1.0, self.config.schedule_conservativeness / 2)),
                queue_timeout=self.config.queue_timeout,
                draft_tokens=cache.block_size if proposer is not None else 0,
            ),
        )
        self.speculation: Speculation | None = None
        if spec is not None and proposer is not None:
            room = self.scheduler.draft_room
            self.speculation = Speculation(spec, proposer, model, self.cache, draft_room=room)
            if spec.simulate_accept_len is not None:
                logger.warning(
                    "simulate_accept_len=%s: acceptance is made up, the output is of no use but to measure speed",
                    spec.simulate_accept_len,
                )
        tap = None if self.speculation is None else self.speculation.tap
        piece = min(resolved.chunk_tokens, _LARGEST_PIECE)
        led = self._led_model(piece, resolved, tap)
        self.media = self._media_store()
        self.runner = Runner(
            led,
            self.cache,
            media=self.media,
            piece_tokens=piece,
            strict=self.config.strict_backends,
            one_by_one=self.config.deterministic,
            graphs=self._decode_graphs(resolved, tap),
            tap=tap,
            accept="chain" if spec is None else spec.accept,
            simulate=None if spec is None else spec.simulate_accept_len,
        )
        if self.speculation is not None:
            self.speculation.bind(led, self._leader)
        self._states: dict[str, RequestState] = {}
        # ends that the next step tells, outputs that no step() has returned yet, and those for `generate` and `stream`
        self._pending: list[StepOutput] = []
        self._unread: list[StepOutput] = []
        self._inboxes: dict[str, collections.deque[StepOutput]] = {}
        self._names = itertools.count(1)
        self._numbers = itertools.count(1)
        self._counters: collections.Counter[str] = collections.Counter()
        self._weights = 0

    def _led_model(self, piece_tokens: int, resolved: Resolved, tap: FeatureTap | None) -> KimiK3ForCausalLM:
        """The model; over several ranks one that tells the others of every call, after they were told to begin."""
        led = self._led_by_this(piece_tokens, resolved, tap)
        if self._lockstep is None:
            return led
        return cast("KimiK3ForCausalLM", self._lockstep.join(led, self._leader, self.config))

    def _led_by_this(self, piece_tokens: int, resolved: Resolved, tap: FeatureTap | None) -> KimiK3ForCausalLM:
        if self.model.mesh.replica_group.size == 1:
            return self.model
        self._leader = leader = ranks.Leader(self.model.mesh)
        rules, graphs = self.config, self._graph_sizes(resolved)
        leader.send("start", self.cache.config, piece_tokens, rules.strict_backends, rules.deterministic, graphs, tap)
        self.cache.tell = leader.note
        return cast("KimiK3ForCausalLM", ranks.LedModel(self.model, leader, self._whole))

    def close(self) -> None:
        """Let the other ranks go, if there are any; nothing more can be computed then. Idempotent."""
        if self._leader is not None:
            self._leader.send("end")
            self._leader = None

    def _scratch_limits(self) -> list[Limit]:
        scratch, config = self.cache.pool.kda.scratch, self.cache.config
        if scratch is None:
            return []
        what = "inputs" if config.rollback == "replay" else "states"
        note = f"{what} of {scratch.width} tokens of {scratch.rows} requests, for rejected drafts"
        return [Limit("verify_scratch_bytes", scratch.nbytes, "derived", note)]

    def _media_store(self) -> MediaStore:
        rules, model = self.config, self._whole
        return MediaStore(
            model,
            cache_bytes=rules.image_cache_bytes,
            one_by_one=rules.deterministic,
            graphs=VisionGraphs.wanted(model, enabled=rules.vision_graphs),
            leader=self._leader,
        )

    def _decode_graphs(self, resolved: Resolved, tap: FeatureTap | None) -> DecodeGraphs | None:
        requests, pages = self._graph_sizes(resolved)
        if not requests:
            return None
        graphs = DecodeGraphs(self.model, self.cache, max_requests=requests, max_pages=pages, tap=tap)
        led = graphs if self._leader is None else cast("DecodeGraphs", ranks.LedGraphs(graphs, self._leader))
        return led if self._lockstep is None else cast("DecodeGraphs", self._lockstep.join_graphs(led))

    def _graph_sizes(self, resolved: Resolved) -> tuple[int, int]:
        """Most requests of a replayed step, and most pages of one; no requests if none is replayed."""
        if not ranks.can_replay(self.model.mesh):
            return 0, 0
        return resolved.graph_requests, -(-self.context_length // self.cache.page_tokens)

    @classmethod
    def from_pretrained(
        cls,
        path: str | PathLike[str],
        config: EngineConfig | None = None,
        *,
        vision: bool = False,
        **load: Any,  # noqa: ANN401
    ) -> Engine:
        """Load a model, if asked with its vision tower, and make an engine; `load` goes to its `from_pretrained`."""
        kind = KimiK3ForConditionalGeneration if vision else KimiK3ForCausalLM
        return cls(kind.from_pretrained(path, **load), config)

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._states or self._pending or self._unread)

    def check_request(self, request: Request) -> None:
        """Refuse a request that can never run.

        Raises:
            RequestError: an empty prompt, ids outside the vocabulary, more tokens than context or memory hold, texts to
                stop at without a tokenizer, images that the model or the prompt does not take, a grammar that cannot be
                enforced here, or a field of a wrong type.
        """
        ids, vocab, params = request.prompt_ids, self.model.config.text.vocab_size, request.params
        _check_ids(ids, vocab)
        total = len(ids) + params.max_new_tokens
        if total > self.context_length:
            raise RequestError(
                f"{len(ids)} prompt tokens and max_new_tokens={params.max_new_tokens} exceed the context of "
                f"{self.context_length} tokens",
                param="prompt",
            )
        if params.stop and self.tokenizer is None:
            raise RequestError("texts to stop at need Engine(..., tokenizer=...)", param="stop")
        if params.logit_bias and max(params.logit_bias) >= vocab:
            worst = max(params.logit_bias)
            raise RequestError(
                f"logit_bias names token {worst}, outside the vocabulary 0..{vocab - 1}", param="logit_bias"
            )
        if params.grammar is not None:
            self._compile(params.grammar)
        for name, kind in (("priority", int), ("namespace", str)):
            if not isinstance(getattr(request, name), kind):
                raise RequestError(f"{name} must be {kind.__name__}, got {getattr(request, name)!r}", param=name)
        if request.timeout is not None and not request.timeout > 0:
            raise RequestError(f"timeout must be above 0 seconds, got {request.timeout}", param="timeout")
        if request.record_routes and self.model.config.text.moe is None:
            raise RequestError("this model routes nothing", param="record_routes")
        ranks.check_request(self.model.mesh, request)
        if request.media:
            self.media.check_request(ids, request.media)

    def _compile(self, grammar: Grammar) -> CompiledGrammar | None:
        """A grammar, ready to be followed; None for one that nobody asked for and that cannot be had."""
        if not isinstance(grammar, Grammar):
            raise RequestError(f"grammar must be a Grammar, got {type(grammar).__name__}", param="grammar")
        if self._grammars is None:
            if grammar.is_hint:
                return None
            raise RequestError(
                f"{grammar.param} needs Engine(..., tokenizer=...) with the tokens of K3's chat format",
                param=grammar.param,
            )
        try:
            return self._grammars.compile(grammar)
        except RequestError as error:
            if not grammar.is_hint:
                raise
            logger.debug("calls are not kept well-formed: %s", error)
            return None

    def add(self, request: Request) -> str:
        """Queue a request and return its id.

        Raises:
            RequestError: see `check_request`, or an id that is in use.
            CapacityError: the queue is full.
        """
        self.check_request(request)
        request.prompt_ids = list(request.prompt_ids)  # the caller may go on writing to theirs
        if request.request_id is None:
            names = (f"request-{n}" for n in self._names)
            request.request_id = next(name for name in names if name not in self._states)
        if request.name in self._states:
            raise RequestError(f"request id {request.name!r} is in use", param="request_id")
        seed, grammar = request.params.seed, request.params.grammar
        compiled = None if grammar is None else self._compile(grammar)
        state = RequestState(
            request,
            next(self._numbers),
            secrets.randbits(63) if seed is None else seed,
            self.scheduler.clock(),
            list(request.prompt_ids),
            counts=TokenCounts.of(request.params, request.prompt_ids),
            matcher=None if compiled is None else Matcher(compiled),
        )
        if self.speculation is not None:
            self.speculation.start(state)
        if not (request.params.max_new_tokens or request.params.prompt_logprobs or request.record_routes):
            self._pending.append(StepOutput([], "length", request_id=request.name))
            self._states[request.name] = state
            return request.name
        loser = self.scheduler.add(state)
        self._states[request.name] = state
        if loser is not None:
            self._pending.append(StepOutput([], "abort", request_id=loser.request.name))
        return request.name

    def abort(self, request_id: str) -> bool:
        """Drop a request at any moment and free its memory; False if it is not known (any more)."""
        state = self._states.pop(request_id, None)
        if state is None:
            return False
        self._pending = [out for out in self._pending if out.request_id != request_id]
        self._unread = [out for out in self._unread if out.request_id != request_id]
        self.scheduler.drop(state)
        self._let_go(state)
        self._counters["aborted"] += 1
        return True

    def _let_go(self, state: RequestState) -> None:
        """A request has ended: nobody needs to know it any more."""
        self._states.pop(state.request.name, None)
        self.media.settle(self.scheduler.running)
        if self.speculation is not None:
            self.speculation.drop(state.request.name)

    def stats(self) -> dict[str, Any]:
        """Counts of requests, tokens and memory, the cache's statistics, and every limit with its reason."""
        names = (
            "finished", "aborted", "failed", "steps", "prefill_steps", "decode_steps", "verify_steps", "prompt_tokens",
            "generated_tokens", "cached_state_tokens", "cached_kv_tokens",
        )  # fmt: skip
        return {
            "running": len(self.scheduler.running),
            "waiting": self.scheduler.num_waiting,
            **{name: self._counters[name] for name in names},
            "preempted": self.scheduler.num_preemptions,
            "free_pages": self.cache.free_pages,
            "free_slots": self.cache.free_slots,
            "cached_pages": self.cache.cached_pages,
            "cached_slots": self.cache.cached_slots,
            "cache": self.cache.stats(),
            "media": self.media.stats(),
            "speculation": None if self.speculation is None else self.speculation.report.summary(),
            "limits": {x.name: {"value": x.value, "reason": x.reason, "note": x.note} for x in self.limits},
        }

    def step(self) -> list[StepOutput]:
        """Advance by one prefill step or one decode step.

        Returns:
            What was computed since the last call, but not for `generate` and `stream`, which get theirs.

        Raises:
            Exception: the model failed. The requests of the step end with "error", which the next call tells.
        """
        self._step()
        outputs, self._unread = self._unread, []
        return outputs

    @torch.inference_mode()
    def _step(self) -> None:
        pending, self._pending = self._pending, []
        for out in pending:
            self._states.pop(out.request_id or "", None)
            self._counters["aborted" if out.finish == "abort" else "finished"] += 1
            self._hand_out(out)
        for out in self._expire():
            self._hand_out(out)
        plan = self.scheduler.next()
        if plan is not None:
            for out in self._run(plan):
                self._hand_out(out)
        self.media.settle(self.scheduler.running)  # some may have been preempted

    def _hand_out(self, out: StepOutput) -> None:
        inbox = self._inboxes.get(out.request_id or "")
        (self._unread if inbox is None else inbox).append(out)

    def _expire(self) -> list[StepOutput]:
        if self.config.queue_timeout is None and not any(self._timeout(s) is not None for s in self._states.values()):
            return []
        late = self.scheduler.expired(self._timeout)
        for state in late:
            self._let_go(state)
            self._counters["aborted"] += 1
        return [StepOutput([], "abort", request_id=state.request.name) for state in late]

    def _timeout(self, state: RequestState) -> float | None:
        own = state.request.timeout
        return own if own is not None else self.config.request_timeout

    def _run(self, plan: StepPlan) -> list[StepOutput]:
        drafts: list[Draft] = []
        if self.speculation is not None:
            self.speculation.sync()
            plan, drafts = self.speculation.plan(plan)
        try:
            launched = self.runner.launch(plan, drafts)
            self.scheduler.commit(plan)
            self.scheduler.prepare()
            tokens = launched.tokens()
            if self._leader is not None:
                self._leader.check()
            if self._lockstep is not None:
                self._lockstep.check()
            launched.note_prompts()
            logprobs = launched.token_logprobs(tokens)
        except BaseException:
            # the state of these requests is unknown: give their memory back, then let the caller see the failure
            for work in plan.work:
                self._hand_out(self._fail(work.state))
            raise
        self._counters.update({"steps": 1, f"{plan.mode}_steps": 1})
        found = [self._take(state, ids) for state, ids in zip(launched.states, tokens, strict=True)]
        if self.speculation is not None:
            self._commit(plan, launched, found, drafts)
        outputs = []
        for i, (state, taken) in enumerate(zip(launched.states, found, strict=True)):
            if taken.is_bad:
                outputs.append(self._fail(state))
            elif tokens[i]:
                entries = logprobs[i][: len(taken.ids)] if logprobs is not None and taken.ids else None
                outputs.append(self._conclude(state, taken, entries))
        return outputs

    def _commit(
        self,
        plan: StepPlan,
        launched: Launched,
        found: list[_Taken],
        drafts: list[Draft],
    ) -> None:
        """Make context of what a verify step accepted, and tell the proposer about any step."""
        assert self.speculation is not None, "only then"
        good = [i for i, taken in enumerate(found) if not taken.is_bad]
        states = [launched.states[i] for i in good]
        if plan.mode == "verify":
            # the anchor, and the accepted tokens but the last one, which is the next anchor
            lengths = [max(1, len(found[i].ids)) for i in good]
            self.cache.commit_verified(
                [(w.lease, w.ids[:n]) for w, n in zip((plan.work[i] for i in good), lengths, strict=True)]
            )
            for i, state in zip(good, states, strict=True):
                taken = found[i]
                self.speculation.count(state, drafts[i], taken.ids, is_over=taken.finish is not None)
        else:
            by_state = {work.state.number: len(work.ids) for work in plan.work}
            lengths = [by_state[state.number] for state in states]
        features = [launched.features[i] for i in good] if launched.features else []
        begins = list(itertools.accumulate(map(len, launched.features), initial=0))
        self.speculation.commit(states, lengths, features, [begins[i] for i in good] if features else [])

    def _take(self, state: RequestState, tokens: list[int]) -> _Taken:
        """Count the tokens that a step gave to a request, up to the one that ends it."""
        if tokens and min(tokens) < 0:
            return _Taken(is_bad=True)
        taken = _Taken(is_first=bool(tokens) and not state.num_generated)
        if taken.is_first:
            self._counters["prompt_tokens"] += state.num_prompt
            self._counters["cached_state_tokens"] += state.cached_tokens or 0
            self._counters["cached_kv_tokens"] += state.kv_tokens
        try:
            for token in tokens:
                if state.request.params.max_new_tokens:
                    self._take_one(state, token, taken)
                if taken.finish is None and not state.left:
                    taken.finish = "length"
                if taken.finish is not None:
                    break
        except Exception:
            logger.exception("%s ends with an error", state.request.name)
            taken.is_bad = True
        return taken

    def _take_one(self, state: RequestState, token: int, taken: _Taken) -> None:
        if state.matcher is not None and not state.matcher.accept(token):
            raise AssertionError(f"token {token} was chosen although its grammar does not allow it")
        taken.ids.append(token)
        state.tokens.append(token)
        if state.counts is not None:
            state.counts.add(token)
        self._counters["generated_tokens"] += 1
        if self._stops(state, token):
            taken.finish = "stop"

    def _conclude(self, state: RequestState, taken: _Taken, logprobs: list[TokenLogprob] | None) -> StepOutput:
        """What a step tells of a request; its memory is taken back if it has ended."""
        params, finish = state.request.params, taken.finish
        if finish is not None:
            self.scheduler.drop(state)
            self._let_go(state)
            self._counters["finished"] += 1
        return StepOutput(
            taken.ids,
            finish,
            logprobs if params.logprobs else None,
            state.cached_tokens,
            state.request.name,
            state.kv_tokens,
            state.prompt_logprobs if taken.is_first and params.prompt_logprobs else None,
            state.routes if finish is not None else None,
            state.preemptions,
            state.speculation,
        )

    def _stops(self, state: RequestState, token: int) -> bool:
        """Whether a stop id or a stop text was generated; looks at the last tokens only."""
        params = state.request.params
        if state.matcher is not None and state.matcher.is_finished:
            return True
        if token in params.stop_token_ids or (token == self.model.config.eos_token_id and not params.ignore_eos):
            return True
        stop = params.stop
        if not stop:
            return False
        # a token holds at least one byte, and a character has at most four
        reach = max(len(text.encode()) for text in stop) + 4
        tail = self.tokenizer.decode(state.tokens[state.num_prompt :][-reach:])
        return any(text in tail for text in stop)

    def _fail(self, state: RequestState) -> StepOutput:
        """End a request whose memory is not to be trusted; what others found of it in the cache neither."""
        self._let_go(state)
        self._counters["failed"] += 1
        self.scheduler.reopen()
        if state.lease is not None:
            self.cache.discard(state.lease)
        self.scheduler.forget(state)
        return StepOutput(
            [], "error", None, state.cached_tokens, state.request.name, state.kv_tokens, preemptions=state.preemptions
        )

    def clear_cache(self) -> int:
        """Forget all cached prefixes; returns the tokens of KV that were forgotten. Running requests go on."""
        return self.cache.clear()

    def update_weights(
        self,
        source: str | PathLike[str] | Mapping[str, Tensor],
        *,
        keep_cache: bool = False,
        **options: Any,  # noqa: ANN401
    ) -> None:
        """Replace the weights between two steps, in place.

        Running requests wait and are computed anew with the new weights; their generated tokens stay.

        Args:
            source: what `KimiK3ForCausalLM.load_weights` takes, with its `options`.
            keep_cache: go on using what the old weights computed.

        Raises:
            CheckpointError, ConfigError: a source that does not fit; nothing has been changed. Or, with
                `weights_changed`, a failure while writing: the weights are of no use, what was computed is forgotten.
        """
        is_changed = True
        try:
            (self._whole if self._leader is None else self.runner.model).load_weights(source, **options)
        except (CheckpointError, ConfigError) as error:
            is_changed, keep_cache = getattr(error, "weights_changed", False), False
            raise
        finally:
            if is_changed:
                self._restart(keep_cache=keep_cache)

    def _restart(self, *, keep_cache: bool) -> None:
        self.scheduler.preempt_all(donate=keep_cache)
        if not keep_cache:
            self.cache.clear()
            self.media.clear()
            self._weights += 1
            self.scheduler.tag = f"weights {self._weights}"

    def has_room(self, priority: int = 0) -> bool:
        """Whether the queue takes one more request of a priority."""
        return self.scheduler.has_room(priority)

    def _is_open(self, name: str) -> bool:
        return name in self._states

    def make_requests(
        self,
        prompts: Sequence[Sequence[int] | str],
        params: SamplingParams | Sequence[SamplingParams] | None,
        media: Sequence[Sequence[Media]] | None,
    ) -> list[Request]:
        """The requests of `generate`, checked; arguments and errors as there."""
        each = (
            [params or SamplingParams()] * len(prompts)
            if params is None or isinstance(params, SamplingParams)
            else params
        )
        if len(each) != len(prompts):
            raise ConfigError(f"generate: {len(each)} params for {len(prompts)} prompts")
        images = [()] * len(prompts) if media is None else media
        if len(images) != len(prompts):
            raise ConfigError(f"generate: media for {len(images)} of {len(prompts)} prompts")
        requests = [Request(self._ids(p), q, media=m) for p, q, m in zip(prompts, each, images, strict=True)]
        for request in requests:
            self.check_request(request)
        return requests

    def _ids(self, prompt: Sequence[int] | str) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ConfigError("a prompt given as text needs Engine(..., tokenizer=...)")
            ids: list[int] = self.tokenizer.encode(prompt)
            return ids
        return [int(i) for i in prompt]


def _check_ids(ids: Sequence[int], vocab: int) -> None:
    if not ids:
        raise RequestError("the prompt is empty", param="prompt")
    bad = next((i for i in ids if not isinstance(i, int) or not 0 <= i < vocab), None)
    if bad is None:
        return
    if not isinstance(bad, int):
        raise RequestError(f"token ids must be integers, got {bad!r}", param="prompt")
    raise RequestError(f"token id {bad} is outside the vocabulary 0..{vocab - 1}", param="prompt")


def _grammar_compiler(model: KimiK3ForCausalLM, tokenizer: object) -> GrammarCompiler | None:
    """Compiles grammars, if the tokenizer has what they are made of."""
    if not all(hasattr(tokenizer, name) for name in ("n_base", "vocab_size", "special", "stop_ids", "decode_bytes")):
        return None
    eos = [i for i in [model.config.eos_token_id] if i is not None]
    return GrammarCompiler(cast("Vocabulary", tokenizer), model.config.text.vocab_size, stop_ids=eos)


class AsyncEngine:
    """An `Engine` in its own thread, for an event loop. Closing an iterator aborts its request."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._commands: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._sinks: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[StepOutput | Exception]]] = {}
        self._names = itertools.count(1)
        self._is_closed = False
        self._lock = threading.Lock()  # nothing is put behind "stop"
        self._thread = threading.Thread(target=self._loop, name="k3lib-engine", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        media: Sequence[Media] = (),
        priority: int = 0,
        namespace: str = "",
        timeout: float | None = None,
    ) -> AsyncIterator[StepOutput]:
        """Run one request and yield its tokens as they come. Keywords are those of `Request`.

        Raises:
            RequestError: the request can never run; raised before anything is queued.
            CapacityError: the queue is full.
            ConfigError: the engine was closed.
        """
        request = Request(
            list(prompt_ids),
            params,
            request_id=f"async-{next(self._names)}",
            priority=priority,
            namespace=namespace,
            media=media,
            timeout=timeout,
        )
        if params.grammar is None:
            self.engine.check_request(request)
        else:  # to compile one takes long enough to stall others
            await asyncio.to_thread(self.engine.check_request, request)
        sink: asyncio.Queue[StepOutput | Exception] = asyncio.Queue()
        finish = None
        try:
            self._sinks[request.name] = (asyncio.get_running_loop(), sink)
            self._put("add", request)
            while finish is None:
                out = await sink.get()
                if isinstance(out, Exception):
                    finish = "error"
                    raise out
                finish = out.finish
                yield out
        finally:
            self._sinks.pop(request.name, None)
            if finish is None:
                with contextlib.suppress(ConfigError):  # closed: it has ended
                    self._put("abort", request.name)

    def close(self) -> None:
        """Stop the thread; running requests end with "abort"."""
        with contextlib.suppress(ConfigError):
            self._put("stop", None)
        self._thread.join()

    def _put(self, kind: str, value: object) -> None:
        with self._lock:
            if self._is_closed:
                raise ConfigError("this engine was closed")
            self._is_closed = kind == "stop"
            self._commands.put((kind, value))

    def _loop(self) -> None:
        while True:
            while not self._commands.empty() or not self.engine.has_work:
                kind, value = self._commands.get()
                if kind == "stop":
                    self._end_all("abort")
                    return
                if kind == "abort":
                    self.engine.abort(value)
                elif kind == "call":
                    self._call(*value)
                elif value.request_id in self._sinks:  # else it has been told the end of already
                    self._add(value)
            try:
                outputs = self.engine.step()
            except Exception:
                self._end_all("error")
                logger.exception("a step failed; its requests end with an error")
                continue
            for out in outputs:
                self._deliver(out.request_id or "", out)

    def _add(self, request: Request) -> None:
        try:
            self.engine.add(request)
        except Exception as error:
            self._deliver(request.name, error)

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run `function(engine)` between two steps and return what it returns: statistics, a cache flush, new weights.

        Raises:
            ConfigError: the engine was closed.
            Exception: what the function raises.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._put("call", (function, future))
        return await asyncio.wrap_future(future)

    def _call(self, function: Callable[[Engine], T], future: concurrent.futures.Future[T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function(self.engine)
        except BaseException as error:  # the thread lives on, whatever it is
            future.set_exception(error)
        else:
            future.set_result(result)

    def _end_all(self, finish: FinishReason) -> None:
        for name in list(self._sinks):
            self.engine.abort(name)
            self._deliver(name, StepOutput([], finish, request_id=name))
            self._sinks.pop(name, None)  # a request that is still on its way here is not added any more

    def _deliver(self, name: str, out: StepOutput | Exception) -> None:
        entry = self._sinks.get(name)
        if entry is not None:
            loop, sink = entry
            try:
                loop.call_soon_threadsafe(sink.put_nowait, out)
            except RuntimeError:  # its loop was closed: nobody listens any more
                self._sinks.pop(name, None)
                self.engine.abort(name)


def decisions(model: KimiK3ForCausalLM) -> str:
    """The kernels that this model uses here, a table."""
    device = model.device.type
    with model.use_backends():
        return "\n".join(str(ops.explain(op, target=op.local_target(device))) for op in ops.ops().values())
