"""The engine: requests in, tokens out. Synchronous `Engine`, and `AsyncEngine` that runs it in a thread."""

from __future__ import annotations

import asyncio
import collections
import itertools
import logging
import queue
import random
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from k3lib import ops
from k3lib.cache import HybridCache
from k3lib.engine.config import EngineConfig, derive_cache
from k3lib.engine.request import FinishReason, Output, Request, SamplingParams, StepOutput
from k3lib.engine.sampler import sample
from k3lib.errors import CapacityError, ConfigError, K3Error, RequestError
from k3lib.model import KimiK3ForCausalLM

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from os import PathLike

    from k3lib.cache import Lease

__all__ = ["AsyncEngine", "Engine"]

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Running:
    """A request with memory: the context is the committed tokens of its lease, `todo` comes next."""

    request: Request
    lease: Lease
    rng: random.Random
    todo: list[int]
    token_ids: list[int] = field(default_factory=list)


class Engine:
    """Runs requests through a model: whole prompts in chunks first, then one token a step for all.

    `generate` and `stream` are the simple ways; `add`, `step` and `abort` are for a server.
    """

    def __init__(
        self,
        model: KimiK3ForCausalLM,
        config: EngineConfig | None = None,
        *,
        tokenizer: Any = None,  # noqa: ANN401
    ) -> None:
        """Make an engine and its cache.

        Args:
            model: a whole model.
            config: limits.
            tokenizer: with `encode` and `decode`, for prompts given as text.

        Raises:
            ConfigError: a context longer than the model's positions.
        """
        self.model = model
        self.config = config or EngineConfig()
        self.tokenizer = tokenizer
        positions = model.config.text.max_position_embeddings
        self.context_length = self.config.context_length or positions
        if self.context_length > positions:
            raise ConfigError(f"context_length={self.context_length} exceeds the model's {positions} positions")
        cache = self.config.cache or derive_cache(model, self.config, self.context_length)
        room = cache.num_pages * cache.page_size
        if room < self.context_length:
            logger.warning(
                "context limited to %d tokens by the KV pool (%d pages of %d); %d were %s",
                room,
                cache.num_pages,
                cache.page_size,
                self.context_length,
                "asked for" if self.config.context_length else "the model's positions",
            )
            self.context_length = room
        self.cache = HybridCache.allocate(
            model.config, cache, device=model.device, dtype=model.dtype, tp_size=model.mesh.tp.size
        )
        self.max_running = self.config.max_running_requests or cache.num_slots
        self._waiting: list[Request] = []
        self._running: dict[str, _Running] = {}
        # outputs for `generate` and `stream`, whoever makes the step
        self._inboxes: dict[str, collections.deque[StepOutput]] = {}
        self._names = itertools.count(1)
        self._finished = 0

    @classmethod
    def from_pretrained(cls, path: str | PathLike[str], config: EngineConfig | None = None, **load: Any) -> Engine:  # noqa: ANN401
        """Load a model and make an engine; further arguments go to `KimiK3ForCausalLM.from_pretrained`."""
        return cls(KimiK3ForCausalLM.from_pretrained(path, **load), config)

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._waiting or self._running)

    def check_request(self, request: Request) -> None:
        """Refuse a request that can never run.

        Raises:
            RequestError: an empty prompt, ids outside the vocabulary, or more tokens than context or memory hold.
        """
        ids, vocab = request.prompt_ids, self.model.config.text.vocab_size
        if not ids:
            raise RequestError("the prompt is empty", param="prompt")
        bad = next((i for i in ids if not 0 <= i < vocab), None)
        if bad is not None:
            raise RequestError(f"token id {bad} is outside the vocabulary 0..{vocab - 1}", param="prompt")
        total = len(ids) + request.params.max_new_tokens
        if total > self.context_length:
            raise RequestError(
                f"{len(ids)} prompt tokens and max_new_tokens={request.params.max_new_tokens} exceed the context of "
                f"{self.context_length} tokens",
                param="prompt",
            )

    def add(self, request: Request) -> str:
        """Queue a request and return its id.

        Raises:
            RequestError: see `check_request`, or an id that is in use.
        """
        self.check_request(request)
        if request.request_id is None:
            request.request_id = f"request-{next(self._names)}"
        if self._knows(request.name):
            raise RequestError(f"request id {request.name!r} is in use", param="request_id")
        self._waiting.append(request)
        return request.name

    def abort(self, request_id: str) -> bool:
        """Drop a request at any moment and free its memory; False if it is not known (any more)."""
        for i, request in enumerate(self._waiting):
            if request.name == request_id:
                del self._waiting[i]
                return True
        if request_id in self._running:
            self._release(self._running[request_id])
            return True
        return False

    def stats(self) -> dict[str, int]:
        """Counts of requests and memory."""
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "finished": self._finished,
            "free_pages": self.cache.free_pages,
            "free_slots": self.cache.free_slots,
        }

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Advance: admit what fits, then one prefill step, or one decode step if every prompt is done."""
        outputs = self._admit()
        work: list[tuple[_Running, list[int]]] = self._prefill_work()
        mode = "prefill" if work else "decode"
        try:
            work = work or [(running, running.todo) for running in self._running.values()]
            if work:
                outputs += self._run(work, mode)
        finally:
            for out in outputs:
                if (inbox := self._inboxes.get(out.request_id or "")) is not None:
                    inbox.append(out)
        return outputs

    def _admit(self) -> list[StepOutput]:
        """Give memory to waiting requests in their order; the first that does not fit ends the round."""
        outputs = []
        while self._waiting and len(self._running) < self.max_running:
            request = self._waiting[0]
            if request.params.max_new_tokens == 0:
                self._finished += 1
                outputs.append(StepOutput([], "length", request_id=self._waiting.pop(0).request_id))
                continue
            try:
                lease = self.cache.open(request.prompt_ids)
            except CapacityError:
                break
            try:
                # the whole request at once: what runs can always finish
                self.cache.grow(lease, tokens=len(request.prompt_ids) + request.params.max_new_tokens)
            except CapacityError:
                self.cache.close(lease)
                break
            rng = random.Random(request.params.seed)
            self._waiting.pop(0)
            self._running[request.name] = _Running(request, lease, rng, list(request.prompt_ids))
        return outputs

    def _prefill_work(self) -> list[tuple[_Running, list[int]]]:
        room = self.config.chunked_prefill_size
        work = []
        for running in self._running.values():
            if running.token_ids or room == 0:
                continue
            chunk = running.todo[:room]
            room -= len(chunk)
            work.append((running, chunk))
        return work

    def _run(self, work: list[tuple[_Running, list[int]]], mode: Any) -> list[StepOutput]:  # noqa: ANN401 - a Literal
        try:
            with ops.use_options(strict=self.config.strict_backends or None):
                batch = self.cache.make_batch([(running.lease, ids) for running, ids in work], mode=mode)
                logits = self.model(batch, self.cache, logits="last")
            done = [i for i, (running, ids) in enumerate(work) if len(ids) == len(running.todo)]
            ready = [work[i][0] for i in done]
            tokens = sample(
                logits if len(done) == len(work) else logits[done],
                [running.request.params for running in ready],
                [running.rng for running in ready],
            )
        except BaseException:
            # the state of these requests is unknown: give their memory back, then let the caller see the failure
            for running, _ in work:
                self._release(running)
            raise
        for running, ids in work:
            self.cache.commit(running.lease, ids)
            running.todo = running.todo[len(ids) :]
        return [self._advance(running, token) for running, token in zip(ready, tokens, strict=True)]

    def _advance(self, running: _Running, token: int | None) -> StepOutput:
        name, params = running.request.name, running.request.params
        if token is None:
            self._release(running)
            return StepOutput([], "error", request_id=name)
        running.token_ids.append(token)
        running.todo = [token]
        finish: FinishReason | None = None
        if token in params.stop_token_ids or (token == self.model.config.eos_token_id and not params.ignore_eos):
            finish = "stop"
        elif len(running.token_ids) == params.max_new_tokens:
            finish = "length"
        if finish is not None:
            self._release(running)
        return StepOutput([token], finish, cached_tokens=running.lease.cached_len, request_id=name)

    def _release(self, running: _Running) -> None:
        self.cache.close(running.lease)
        del self._running[running.request.name]
        self._finished += 1

    def generate(
        self, prompts: Sequence[Sequence[int] | str], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Output]:
        """Run prompts to the end and return their outputs in the same order.

        Args:
            prompts: token ids, or text if the engine has a tokenizer.
            params: one for all, or one each.

        Raises:
            RequestError: a prompt that can never run; nothing has been queued.
            ConfigError: another number of params than prompts, or text without a tokenizer.
        """
        each = (
            [params or SamplingParams()] * len(prompts)
            if params is None or isinstance(params, SamplingParams)
            else params
        )
        if len(each) != len(prompts):
            raise ConfigError(f"generate: {len(each)} params for {len(prompts)} prompts")
        requests = [Request(self._ids(p), q) for p, q in zip(prompts, each, strict=True)]
        for request in requests:
            self.check_request(request)
        names = [self._submit(request) for request in requests]
        try:
            results = [list(self._outputs(name)) for name in names]
        finally:
            for name in names:
                self._forget(name)
        return [
            Output(n, r.prompt_ids, [i for out in outs for i in out.token_ids], outs[-1].finish or "abort")
            for n, r, outs in zip(names, requests, results, strict=True)
        ]

    def stream(
        self,
        prompt: Sequence[int] | str,
        params: SamplingParams | None = None,
        **sampling: Any,  # noqa: ANN401 - fields of SamplingParams
    ) -> Iterator[int]:
        """Yield the tokens of one request as they come: `stream(ids, max_new_tokens=16)`.

        Args:
            prompt: token ids, or text if the engine has a tokenizer.
            params: sampling parameters; or give them by name.
            sampling: fields of `SamplingParams`.

        Raises:
            ConfigError: both `params` and single fields.
            RequestError: a prompt that can never run.
            K3Error: while iterating, if the logits of the request are not finite.
        """
        if params is not None and sampling:
            raise ConfigError(f"stream: give params or single fields, not both ({', '.join(sampling)})")
        request = Request(self._ids(prompt), params or SamplingParams(**sampling))
        self.check_request(request)
        return self._tokens(request)

    def _tokens(self, request: Request) -> Iterator[int]:
        name = self._submit(request)
        try:
            for out in self._outputs(name):
                yield from out.token_ids
                if out.finish == "error":
                    raise K3Error(f"{name} ended with an error: its logits are not finite")
        finally:
            self._forget(name)

    def _submit(self, request: Request) -> str:
        name = self.add(request)
        self._inboxes[name] = collections.deque()
        return name

    def _outputs(self, name: str) -> Iterator[StepOutput]:
        """Outputs of a submitted request to its end, with steps as needed; "abort" if somebody dropped it."""
        inbox = self._inboxes[name]
        finish = None
        while finish is None:
            while not inbox and self._knows(name):
                self.step()
            out = inbox.popleft() if inbox else StepOutput([], "abort", request_id=name)
            finish = out.finish
            yield out

    def _forget(self, name: str) -> None:
        del self._inboxes[name]
        self.abort(name)

    def _knows(self, name: str) -> bool:
        return name in self._running or any(request.name == name for request in self._waiting)

    def _ids(self, prompt: Sequence[int] | str) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ConfigError("a prompt given as text needs Engine(..., tokenizer=...)")
            ids: list[int] = self.tokenizer.encode(prompt)
            return ids
        return [int(i) for i in prompt]


class AsyncEngine:
    """An `Engine` in its own thread, for an event loop. Closing an iterator aborts its request."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._commands: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._sinks: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[StepOutput]]] = {}
        self._names = itertools.count(1)
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop, name="k3lib-engine", daemon=True)
        self._thread.start()

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, media: Sequence[object] = ()
    ) -> AsyncIterator[StepOutput]:
        """Run one request and yield its tokens as they come.

        Raises:
            RequestError: the request can never run; raised before anything is queued.
            ConfigError: the engine was closed.
        """
        if media:
            raise RequestError("this engine does not take images", param="messages")
        request = Request(list(prompt_ids), params, request_id=f"async-{next(self._names)}")
        self.engine.check_request(request)
        sink: asyncio.Queue[StepOutput] = asyncio.Queue()
        self._sinks[request.name] = (asyncio.get_running_loop(), sink)
        if self._is_closed:  # looked at after the sink is known: a later close() finds it
            del self._sinks[request.name]
            raise ConfigError("generate: this engine was closed")
        self._commands.put(("add", request))
        finish = None
        try:
            while finish is None:
                out = await sink.get()
                finish = out.finish
                yield out
        finally:
            self._sinks.pop(request.name, None)
            if finish is None:
                self._commands.put(("abort", request.name))

    def close(self) -> None:
        """Stop the thread; running requests end with "abort"."""
        self._is_closed = True
        self._commands.put(("stop", None))
        self._thread.join()

    def _loop(self) -> None:
        while True:
            while not self._commands.empty() or not self.engine.has_work:
                kind, value = self._commands.get()
                if kind == "stop":
                    self._end_all("abort")
                    return
                if kind == "abort":
                    self.engine.abort(value)
                elif value.request_id in self._sinks:  # else it has been told the end of already
                    self.engine.add(value)
            try:
                outputs = self.engine.step()
            except Exception:
                self._end_all("error")
                logger.exception("a step failed; its requests end with an error")
                continue
            for out in outputs:
                self._deliver(out)

    def _end_all(self, finish: FinishReason) -> None:
        for name in list(self._sinks):
            self.engine.abort(name)
            self._deliver(StepOutput([], finish, request_id=name))

    def _deliver(self, out: StepOutput) -> None:
        entry = self._sinks.get(out.request_id or "")
        if entry is not None:
            loop, sink = entry
            if not loop.is_closed():
                loop.call_soon_threadsafe(sink.put_nowait, out)


def decisions(model: KimiK3ForCausalLM) -> str:
    """The kernels that this model uses here, a table."""
    device = model.device.type
    with model.use_backends():
        return "\n".join(str(ops.explain(op, target=op.local_target(device))) for op in ops.ops().values())
