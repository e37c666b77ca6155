"""Answers while they are generated: from the engine's steps to text, reasoning and tool calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any, Protocol

from k3lib.engine.request import StepOutput
from k3lib.errors import CapacityError, RequestError
from k3lib.server.failures import AbortedError, ClientGone, EngineError, OverloadedError, TimedOutError
from k3lib.server.gate import LOG
from k3lib.server.schemas import CompletionDetails, PromptDetails, Usage
from k3lib.server.tokenizer import IncrementalDecoder

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence

    from fastapi import Request

    from k3lib.engine.request import SamplingParams, SpecReport, TokenLogprob
    from k3lib.server.chat import Delta
    from k3lib.server.metrics import Metrics
    from k3lib.server.schemas import Finish
    from k3lib.server.tokenizer import Tokenizer

__all__ = ["Answer", "Reader", "Run", "StepSource", "StopStrings", "TextReader", "count_usage"]

logger = logging.getLogger(__name__)

_AHEAD = 256  # steps that an engine may be ahead of a slow client
_WHY_ABORTED = (
    "the engine ended the request with finish='abort': its time was over, or its place in the queue went to a higher "
    "priority"
)


class StepSource(Protocol):
    """What the server needs of an engine; `k3lib.engine.AsyncEngine` is one."""

    def generate(self, prompt_ids: list[int], params: SamplingParams) -> AsyncIterator[StepOutput]:
        """Generate tokens for one prompt. Closing the iterator aborts the request."""
        ...


class Reader(Protocol):
    """Turns ids into deltas."""

    def feed_ids(self, ids: Sequence[int], /) -> list[Delta]:
        """Take new ids."""
        ...

    def finish(self) -> list[Delta]:
        """Take the end."""
        ...

    @property
    def num_calls(self) -> int:
        """Complete tool calls so far."""
        ...


class TextReader:
    """Reads an output without channels: everything is content, but for `hidden` ids."""

    num_calls = 0

    def __init__(self, tok: Tokenizer, hidden: frozenset[int] = frozenset()) -> None:
        self._decoder = IncrementalDecoder(tok)
        self._hidden = hidden

    def feed_ids(self, ids: Sequence[int], /) -> list[Delta]:
        """Take new ids."""
        return _content_delta(self._decoder.push(i for i in ids if i not in self._hidden))

    def finish(self) -> list[Delta]:
        """Take the end."""
        return _content_delta(self._decoder.finish())


def _content_delta(text: str) -> list[Delta]:
    return [{"content": text}] if text else []


class StopStrings:
    """Ends a text before the first stop string, holding back what may become one.

    Attributes:
        matched: the stop string that ended the text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=1)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take more text and return what is certain to stay."""
        text = self._held + text
        self._held = ""
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.matched = min(found)
            return text[:at]
        for size in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                self._held = text[-size:]
                return text[:-size]
        return text

    def finish(self) -> str:
        """Return what was held back."""
        rest, self._held = self._held, ""
        return rest


class Answer:
    """One answer while it is generated.

    Attributes:
        index: its place among the answers of the request.
        content: the visible text so far, in pieces.
        ids: generated ids, the stop id included.
        logprobs, prompt_logprobs: as the engine reported them.
        cached_tokens, kv_tokens: prompt tokens that were not computed, and whose KV was found; None = not known.
        finish_reason: None while it goes on.
        matched: the stop string or id that ended it.
        speculation: what it did for this answer; None if the engine does not speculate.
    """

    def __init__(
        self,
        index: int,
        prompt_ids: list[int],
        params: SamplingParams,
        reader: Reader,
        stops: Sequence[str] = (),
        *,
        tok: Tokenizer,
    ) -> None:
        self.index = index
        self.prompt_ids = prompt_ids
        self.params = params
        self.reader = reader
        self.content: list[str] = []
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self.cached_tokens: int | None = None
        self.kv_tokens: int | None = None
        self.finish_reason: Finish | None = None
        self.matched: str | int | None = None
        self.speculation: SpecReport | None = None
        self._tok = tok
        self._stops = StopStrings(stops)
        self._reported = 0

    def advance(self, item: StepOutput | None) -> list[Delta]:
        """Take one step of the engine and return the news; None means that the engine has ended."""
        if item is None:
            if self.params.max_new_tokens > 0:
                raise EngineError("the engine ended without a finish reason")
            item = StepOutput([], "length")
        # Any object with `generate` may be an engine; plain (ids, finish) pairs are enough.
        ids, finish = list(item[0]), item[1]
        if finish == "abort":
            raise AbortedError(_WHY_ABORTED)
        if finish == "error":
            raise EngineError("the engine ended the request with finish='error'")
        self.ids += ids
        self._note(item)
        searches = len(self.ids) > self.params.min_tokens
        if finish == "stop" and ids and self._is_stop(ids[-1]):
            self.matched = ids.pop()
        deltas = self.reader.feed_ids(ids)
        if finish is not None:
            deltas += self.reader.finish()
        deltas = self._until_stop(deltas, searches=searches, is_last=finish is not None)
        if self._stops.matched is not None:
            self.finish_reason, self.matched = "stop", self._stops.matched
        elif finish == "length":
            self.finish_reason = "length"
        elif finish is not None:
            self.finish_reason = "tool_calls" if self.num_calls else "stop"
        return deltas

    @property
    def num_calls(self) -> int:
        """Complete tool calls so far; none if a stop string ended the text, which comes before all calls."""
        return 0 if self._stops.matched is not None else self.reader.num_calls

    def new_logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities of generated tokens since the last call."""
        entries = self.logprobs[self._reported :]
        self._reported = len(self.logprobs)
        return entries

    def _note(self, item: StepOutput) -> None:
        """Keep what an engine says besides tokens, if it says it."""
        if self.cached_tokens is None:
            self.cached_tokens = getattr(item, "cached_tokens", None)
            self.kv_tokens = getattr(item, "kv_tokens", None)
        self.speculation = getattr(item, "speculation", None)
        if self.params.logprobs:
            self.logprobs += getattr(item, "logprobs", None) or ()
        if self.params.prompt_logprobs:
            self.prompt_logprobs += getattr(item, "prompt_logprobs", None) or ()

    def _is_stop(self, token_id: int) -> bool:
        """Whether the last id of a stopped request is a stop id and no text.

        A checkpoint may name an eos id of its own, so any special id counts that is no bracket.
        """
        special, tok = self._tok.special, self._tok
        brackets = (special["<|open|>"], special["<|close|>"], special["<|sep|>"])
        return (token_id >= tok.n_base and token_id not in brackets) or token_id in self.params.stop_token_ids

    def _until_stop(self, deltas: list[Delta], *, searches: bool, is_last: bool) -> list[Delta]:
        """Pass visible content through the stop strings; reasoning and calls never stop."""
        result: list[Delta] = []
        for delta in deltas:
            if self._stops.matched is not None:
                break
            if "content" in delta:
                text = delta["content"]
                result += self._visible(self._stops.push(text) if searches else self._stops.finish() + text)
                continue
            if "tool_call" in delta:
                result += self._visible(self._stops.finish())
            result.append(delta)
        if is_last:
            result += self._visible(self._stops.finish())
        return result

    def _visible(self, text: str) -> list[Delta]:
        self.content.append(text)
        return _content_delta(text)


def count_usage(prompt_tokens: int, answers: Iterable[Answer]) -> Usage:
    """Count the tokens of a request. Answers to the same prompt share what it cost."""
    cached: dict[int, int] = {}
    kv: dict[int, int] = {}
    completion_tokens, counts_kinds = 0, True
    answers = list(answers)
    for answer in answers:
        completion_tokens += len(answer.ids)
        if answer.cached_tokens is None:
            continue
        prompt, found = id(answer.prompt_ids), answer.kv_tokens or 0
        cached[prompt] = max(cached.get(prompt, 0), answer.cached_tokens)
        kv[prompt] = max(kv.get(prompt, 0), found)
        # what is reused has both: an engine that reports less KV does not count it
        counts_kinds = counts_kinds and answer.kv_tokens is not None and found >= answer.cached_tokens
    usage = Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
    )
    if cached:
        reused = min(sum(cached.values()), prompt_tokens)
        details = PromptDetails(cached_tokens=reused)
        if counts_kinds:
            details["cached_kv_tokens"] = min(sum(kv.values()), prompt_tokens)
            details["cached_state_tokens"] = reused
        usage["prompt_tokens_details"] = details
    if (drafts := count_drafts(answers)) is not None:
        usage["completion_tokens_details"] = drafts
    return usage


def count_drafts(answers: Iterable[Answer]) -> CompletionDetails | None:
    """What speculation did for a request; None without it."""
    reports = [answer.speculation for answer in answers if answer.speculation is not None]
    if not reports:
        return None
    width = max(len(report.by_position) for report in reports)
    details = CompletionDetails(
        accepted_prediction_tokens=sum(r.accepted for r in reports),
        rejected_prediction_tokens=sum(r.proposed - r.accepted for r in reports),
        verify_steps=sum(r.steps for r in reports),
        accepted_by_position=[sum(r.by_position[i] for r in reports if i < len(r.by_position))
                              for i in range(width)],
    )  # fmt: skip
    if any(report.simulated for report in reports):
        details["simulated_acceptance"] = True
    if refused := next((report.refused for report in reports if report.refused), ""):
        details["speculation_refused"] = refused
    return details


class Run:
    """The answers of one HTTP request while they are generated at once.

    Attributes:
        rid: its name.
        answers: what is generated.
        started: when, on the monotonic clock.
    """

    def __init__(
        self,
        engine: StepSource,
        answers: Sequence[Answer],
        *,
        rid: str,
        live: dict[str, Run],
        metrics: Metrics,
        extra: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Make a run.

        Args:
            engine: generates the tokens.
            answers: one request to the engine each.
            rid: name of the run.
            live: runs by name, where this one stands while it goes on.
            metrics: told about every step.
            extra: further keywords for the engine.
            timeout: seconds.
        """
        self.rid = rid
        self.answers = answers
        self.started = time.monotonic()
        self._engine = engine
        self._live = live
        self._metrics = metrics
        self._extra = dict(extra or {})
        self._timeout = timeout
        self._failure: Exception | None = None
        self._events: asyncio.Queue[tuple[Answer, StepOutput | Exception | None] | None] = asyncio.Queue(_AHEAD)

    def abort(self, why: str = "the request was aborted") -> None:
        """End the run; its client gets an error."""
        self._fail(AbortedError(why))

    def _fail(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
            if not self._events.full():  # else there is something to wake up for
                self._events.put_nowait(None)

    async def steps(self, http: Request) -> AsyncGenerator[tuple[Answer, list[Delta]], None]:
        """Run all answers and yield their news. Closing it, or the client's leaving, aborts them."""
        if self.rid in self._live:
            raise RequestError(f"a request named {self.rid!r} is running", param="rid")
        self._live[self.rid] = self
        loop = asyncio.get_running_loop()
        timer = None
        if self._timeout is not None:
            error = TimedOutError(f"the request took longer than its timeout of {self._timeout:g} s")
            timer = loop.call_later(self._timeout, self._fail, error)
        watch = loop.create_task(_disconnected(http, self._fail))
        pumps = {answer.index: loop.create_task(self._pump(answer)) for answer in self.answers}
        for answer in self.answers:
            self._metrics.begin(answer)
        try:
            while pumps:
                event = await self._events.get()
                if self._failure is not None:
                    raise self._failure
                if event is None or (answer := event[0]).index not in pumps:
                    continue
                deltas = self._advance(*event)
                if answer.finish_reason is not None:
                    pump = pumps.pop(answer.index)
                    if answer.matched is not None:  # maybe a stop string, of which the engine knows nothing
                        pump.cancel()
                    await _ended([pump])
                yield answer, deltas
        finally:
            if timer is not None:
                timer.cancel()
            for task in (watch, *pumps.values()):
                task.cancel()
            await _ended([watch, *pumps.values()])
            self._live.pop(self.rid, None)
            for answer in self.answers:
                self._metrics.end(answer)
            http.scope.get(LOG, {}).update(self._summary())

    def _summary(self) -> dict[str, object]:
        """What the log says of the run: numbers only."""
        first = self.answers[0]
        return {
            "rid": self.rid,
            "prompt_tokens": len(first.prompt_ids),
            "cached_tokens": first.cached_tokens,
            "completion_tokens": sum(len(answer.ids) for answer in self.answers),
            "finish": ",".join(answer.finish_reason or "aborted" for answer in self.answers[:8]),
        }

    def _advance(self, answer: Answer, item: StepOutput | Exception | None) -> list[Delta]:
        if isinstance(item, Exception):
            raise item
        deltas = answer.advance(item)
        self._metrics.step(answer)
        return deltas

    async def run(self, http: Request) -> None:
        """Run all answers to the end."""
        async with contextlib.aclosing(self.steps(http)) as steps:
            async for _ in steps:
                pass

    async def _pump(self, answer: Answer) -> None:
        """Carry the steps of one answer into the queue of all."""
        iterator: AsyncIterator[StepOutput] | None = None
        try:
            with _engine_errors():
                iterator = aiter(self._engine.generate(answer.prompt_ids, answer.params, **self._extra))
                async for item in iterator:
                    await self._events.put((answer, item))
                    if item[1] is not None:
                        return
            await self._events.put((answer, None))
        except (RequestError, EngineError) as error:
            await self._events.put((answer, error))
        finally:
            # generators have it; an engine may return a plain iterator that has nothing to close
            aclose = getattr(iterator, "aclose", None)
            if aclose is not None:
                await aclose()


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def _engine_errors() -> Iterator[None]:
    """Tell the client's mistakes from the engine's."""
    try:
        yield
    except (RequestError, EngineError):
        raise
    except CapacityError as error:
        raise OverloadedError(str(error)) from error
    except Exception as error:
        logger.exception("the engine raised")
        raise EngineError("the engine failed; see the log of the server") from error


async def _disconnected(http: Request, then: Callable[[Exception], None]) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
    then(ClientGone())
