"""The HTTP server: OpenAI's completion endpoints over any object with `generate`."""

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from k3lib.engine.request import SamplingParams, StepOutput
from k3lib.errors import CapacityError, RequestError
from k3lib.server.chat import (
    EFFORTS,
    Delta,
    OutputParser,
    check_messages,
    encode_segments,
    render_chat,
)
from k3lib.server.schemas import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatMessage,
    ChatRequest,
    CommonRequest,
    Completion,
    CompletionChoice,
    CompletionRequest,
    ErrorBody,
    Finish,
    FunctionCall,
    MessageToolCall,
    Usage,
)
from k3lib.server.tokenizer import IncrementalDecoder, Tokenizer, check_ids

__all__ = ["StepSource", "create_app"]

logger = logging.getLogger(__name__)

MAX_DEFAULT_TOKENS = 131_072
_CLIENT_GONE = 499


class StepSource(Protocol):
    """What the server needs of an engine; `k3lib.engine.AsyncEngine` is one."""

    def generate(self, prompt_ids: list[int], params: SamplingParams) -> AsyncIterator[StepOutput]:
        """Generate tokens for one prompt. Closing the iterator aborts the request."""
        ...


def create_app(engine: StepSource, tok: Tokenizer, *, model_name: str, max_model_len: int) -> FastAPI:
    """Make the ASGI application.

    Args:
        engine: generates the tokens.
        tok: encodes prompts and decodes answers; it also decides which ids stop a request.
        model_name: the only value of `model` that requests may name.
        max_model_len: upper bound of prompt and generated tokens together.
    """
    app = FastAPI(title="k3lib")
    served = _Served(engine, tok, model_name, max_model_len)
    _add_error_handlers(app)

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [served.card()]})

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        served.check_model(model_id)
        return JSONResponse(served.card())

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, http: Request) -> Response:
        return await _chat_completions(served, body, http)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, http: Request) -> Response:
        return await _completions(served, body, http)

    return app


class _EngineFailure(RuntimeError):
    """The engine could not finish a request; the client may try again."""

    status = 500


class _Overloaded(_EngineFailure):
    status = 503


class _UnknownModel(RequestError):
    """A model that is not served here; the one client error that is not 400."""


class _ClientGone(Exception):
    """Nobody is left to answer."""


@dataclass(frozen=True, slots=True)
class _Served:
    """What all requests share."""

    engine: StepSource
    tok: Tokenizer
    model_name: str
    max_model_len: int
    created: int = field(default_factory=lambda: int(time.time()))

    def card(self) -> dict[str, object]:
        return {
            "id": self.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "k3lib",
            "max_model_len": self.max_model_len,
        }

    def check_model(self, name: str) -> None:
        if name != self.model_name:
            raise _UnknownModel(f"model {name!r} does not exist; use {self.model_name!r}", param="model")

    def params(
        self,
        body: CommonRequest,
        limit: tuple[str, int | None],
        prompt: tuple[str, int],
        top_p: float,
    ) -> SamplingParams:
        """Sampling parameters of a request.

        Args:
            body: the request.
            limit: name and value of the field that bounds the answer.
            prompt: name of the field that holds the prompt, and its length in tokens.
            top_p: the default of the endpoint.
        """
        (limit_field, wanted), (prompt_field, num_prompt) = limit, prompt
        left = self.max_model_len - num_prompt
        if left < 0 or (left == 0 and wanted != 0):
            raise RequestError(
                f"the prompt has {num_prompt} tokens, the context of {self.max_model_len} tokens "
                "must hold it and the answer",
                param=prompt_field,
            )
        if wanted is not None and wanted > left:
            raise RequestError(
                f"{limit_field}={wanted} and a prompt of {num_prompt} tokens exceed the context of "
                f"{self.max_model_len} tokens; ask for at most {left}",
                param=limit_field,
            )
        return SamplingParams(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=top_p if body.top_p is None else body.top_p,
            top_k=max(body.top_k or 0, 0),
            max_new_tokens=min(left, MAX_DEFAULT_TOKENS) if wanted is None else wanted,
            stop_token_ids=() if body.ignore_eos else self.tok.stop_ids,
            ignore_eos=bool(body.ignore_eos),
            seed=body.seed,
        )


class _Reader(Protocol):
    """Turns ids into deltas."""

    def feed_ids(self, ids: Sequence[int], /) -> list[Delta]: ...

    def finish(self) -> list[Delta]: ...


class _TextReader:
    """Reads an output without channels: everything is content."""

    def __init__(self, tok: Tokenizer) -> None:
        self._decoder = IncrementalDecoder(tok)

    def feed_ids(self, ids: Sequence[int], /) -> list[Delta]:
        return _content_delta(self._decoder.push(ids))

    def finish(self) -> list[Delta]:
        return _content_delta(self._decoder.finish())


class _StopStrings:
    """Ends a text before the first stop string, holding back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.is_stopped = False

    def push(self, text: str) -> str:
        text = self._held + text
        self._held = ""
        at = min((i for i in map(text.find, self._stops) if i >= 0), default=-1)
        if at >= 0:
            self.is_stopped = True
            return text[:at]
        longest = min(len(text), max(map(len, self._stops), default=1) - 1)
        for size in range(longest, 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                self._held = text[-size:]
                return text[:-size]
        return text

    def finish(self) -> str:
        rest, self._held = self._held, ""
        return rest


class _Choice:
    """One answer while it is generated."""

    def __init__(
        self,
        index: int,
        prompt_ids: list[int],
        params: SamplingParams,
        reader: _Reader,
        stops: Sequence[str],
    ) -> None:
        self.index = index
        self.prompt_ids = prompt_ids
        self.params = params
        self.reader = reader
        self.content: list[str] = []
        self.calls: list[FunctionCall] = []
        self.num_tokens = 0
        self.cached_tokens: int | None = None
        self.finish_reason: Finish | None = None
        self._stops = _StopStrings(stops)

    def advance(self, item: StepOutput | None, tok: Tokenizer) -> list[Delta]:
        """Take one step of the engine and return the news; None means that the engine has ended."""
        if item is None:
            if self.params.max_new_tokens > 0:
                raise _EngineFailure("the engine ended without a finish reason")
            item = StepOutput([], "length")
        # Any object with `generate` may be an engine; plain (ids, finish) pairs are enough.
        ids, finish = list(item[0]), item[1]
        if finish in ("abort", "error"):
            raise _EngineFailure(f"the engine ended the request with finish={finish!r}")
        self.num_tokens += len(ids)
        if self.cached_tokens is None:
            self.cached_tokens = getattr(item, "cached_tokens", None)
        if finish == "stop" and ids and _is_stop(ids[-1], tok):
            ids.pop()
        deltas = self.reader.feed_ids(ids)
        if finish is not None:
            deltas += self.reader.finish()
        deltas = self._until_stop(deltas, is_last=finish is not None)
        if self._stops.is_stopped:
            self.finish_reason = "stop"
        elif finish == "length":
            self.finish_reason = "length"
        elif finish is not None:
            self.finish_reason = "tool_calls" if self.calls else "stop"
        return deltas

    def _until_stop(self, deltas: list[Delta], *, is_last: bool) -> list[Delta]:
        """Pass visible content through the stop strings; reasoning and calls never stop."""
        result: list[Delta] = []
        for delta in deltas:
            if self._stops.is_stopped:
                break
            if "content" in delta:
                result += self._visible(self._stops.push(delta["content"]))
                continue
            if "tool_call" in delta:
                result += self._visible(self._stops.finish())
                call = delta["tool_call"]
                self.calls.append(FunctionCall(name=call["name"], arguments=call["arguments"]))
            result.append(delta)
        if is_last:
            result += self._visible(self._stops.finish())
        return result

    def _visible(self, text: str) -> list[Delta]:
        self.content.append(text)
        return _content_delta(text)


class _ChatPrompt(NamedTuple):
    """A rendered chat request."""

    ids: list[int]
    billed_tokens: int
    starts_thinking: bool
    tools_active: bool
    calls_before: int


async def _chat_completions(served: _Served, body: ChatRequest, http: Request) -> Response:
    served.check_model(body.model)
    body.refuse_unsupported()
    # Rendering and encoding a long conversation takes long enough to stall other streams.
    prompt = await asyncio.to_thread(_chat_prompt, body, served.tok)
    limit = ("max_tokens", body.max_tokens)
    if body.max_completion_tokens is not None:
        limit = ("max_completion_tokens", body.max_completion_tokens)
    params = served.params(body, limit, ("messages", len(prompt.ids)), top_p=0.95)
    parsers = [OutputParser(prompt.starts_thinking, prompt.tools_active, served.tok) for _ in range(body.n or 1)]
    choices = [_Choice(i, prompt.ids, _seeded(params, i), parser, body.stops) for i, parser in enumerate(parsers)]
    completion_id, created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())

    def usage() -> Usage:
        counts = _usage(prompt.billed_tokens, choices)
        reasoning = sum(parser.reasoning_tokens for parser in parsers)
        return counts.model_copy(update={"completion_tokens_details": {"reasoning_tokens": reasoning}})

    def chunk(parts: list[ChatChunkChoice], counts: Usage | None = None) -> str:
        item = ChatChunk(
            id=completion_id,
            object="chat.completion.chunk",
            created=created,
            model=body.model,
            choices=parts,
        )
        if body.includes_usage:
            item.usage = counts
        return _event(item)

    async def events() -> AsyncGenerator[str, None]:
        begun: set[int] = set()
        async with contextlib.aclosing(_steps(served, choices, http)) as steps:
            async for choice, deltas in steps:
                messages = [_delta_message(delta, prompt.calls_before) for delta in deltas]
                if choice.index not in begun:
                    begun.add(choice.index)
                    messages.insert(0, ChatMessage(role="assistant", content=""))
                for message in messages:
                    yield chunk([_chunk_choice(choice, message, None)])
                if choice.finish_reason is not None:
                    yield chunk([_chunk_choice(choice, ChatMessage(), choice.finish_reason)])
        if body.includes_usage:
            yield chunk([], usage())

    if body.stream:
        return await _stream(events())
    await _run(served, choices, http)
    completion = ChatCompletion(
        id=completion_id,
        object="chat.completion",
        created=created,
        model=body.model,
        choices=[
            _chat_choice(choice, parser, prompt.calls_before) for choice, parser in zip(choices, parsers, strict=True)
        ],
        usage=usage(),
    )
    return JSONResponse(completion.model_dump(exclude_unset=True))


async def _completions(served: _Served, body: CompletionRequest, http: Request) -> Response:
    served.check_model(body.model)
    body.refuse_unsupported()
    prompts = await asyncio.to_thread(_raw_prompts, body, served.tok)
    choices = _completion_choices(served, body, prompts)
    completion_id, created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
    num_prompt = sum(map(len, prompts))

    def completion(parts: list[CompletionChoice]) -> Completion:
        return Completion(
            id=completion_id,
            object="text_completion",
            created=created,
            model=body.model,
            choices=parts,
        )

    def part(choice: _Choice, text: str, finish: Finish | None) -> CompletionChoice:
        return CompletionChoice(index=choice.index, text=text, logprobs=None, finish_reason=finish)

    def echoed(choice: _Choice) -> str:
        return served.tok.decode(choice.prompt_ids) if body.echo else ""

    def event(parts: list[CompletionChoice], counts: Usage | None = None) -> str:
        item = completion(parts)
        if body.includes_usage:
            item.usage = counts
        return _event(item)

    async def events() -> AsyncGenerator[str, None]:
        begun: set[int] = set()
        async with contextlib.aclosing(_steps(served, choices, http)) as steps:
            async for choice, deltas in steps:
                text = "".join(delta.get("content", "") for delta in deltas)
                if choice.index not in begun:
                    begun.add(choice.index)
                    text = echoed(choice) + text
                if text or choice.finish_reason is not None:
                    yield event([part(choice, text, choice.finish_reason)])
        if body.includes_usage:
            yield event([], _usage(num_prompt, choices))

    if body.stream:
        return await _stream(events())
    await _run(served, choices, http)
    result = completion([part(c, echoed(c) + "".join(c.content), c.finish_reason) for c in choices])
    result.usage = _usage(num_prompt, choices)
    return JSONResponse(result.model_dump(exclude_unset=True))


def _completion_choices(served: _Served, body: CompletionRequest, prompts: Sequence[list[int]]) -> list[_Choice]:
    choices: list[_Choice] = []
    for ids in prompts:
        params = served.params(body, ("max_tokens", body.max_tokens), ("prompt", len(ids)), top_p=1.0)
        for i in range(body.n or 1):
            reader = _TextReader(served.tok)
            choices.append(_Choice(len(choices), ids, _seeded(params, i), reader, body.stops))
    return choices


def _chat_prompt(body: ChatRequest, tok: Tokenizer) -> _ChatPrompt:
    thinking, effort = _thinking(body)
    messages, tool_names = check_messages(body.messages, body.tools)
    _check_tool_choice(body, tool_names)
    _check_response_format(body)
    _refuse_grammar(body, messages, tool_names)
    if body.add_generation_prompt is False:
        raise RequestError("add_generation_prompt=false leaves nothing to answer", param="add_generation_prompt")
    continues = bool(body.continue_final_message or messages[-1].get("partial"))
    if any(message.get("partial") for message in messages[:-1]):
        raise RequestError("partial is allowed on the last message only", param="messages")
    segments = render_chat(
        messages,
        body.tools,
        thinking=thinking,
        thinking_effort=effort,
        tool_choice=body.tool_choice,
        response_format=body.response_format,
        continue_final_message=continues,
    )
    ids = encode_segments(tok, segments)
    # The trailing opener is input of the model but not billed.
    ends_with_opener = segments[-1] == ("<|sep|>", True)
    opener = len(encode_segments(tok, segments[-3:])) if ends_with_opener else 0
    channel = segments[max(i for i, s in enumerate(segments) if s == ("<|open|>", True)) + 1]
    return _ChatPrompt(
        ids=ids,
        billed_tokens=len(ids) - opener,
        starts_thinking=channel.text == "think",
        tools_active=bool(tool_names) and body.tool_choice != "none",
        calls_before=sum(_num_calls(message) for message in messages),
    )


def _thinking(body: ChatRequest) -> tuple[bool, str | None]:
    """Whether to think and how hard: `chat_template_kwargs` over `thinking` over `reasoning_effort`."""
    thinking, effort, param = True, "max", "reasoning_effort"
    if body.reasoning_effort == "none":
        thinking = False
    elif body.reasoning_effort is not None:
        effort = body.reasoning_effort
    if body.thinking is not None:
        kind = body.thinking.get("type", "enabled")
        if kind not in ("enabled", "disabled"):
            raise RequestError(f"thinking.type must be enabled or disabled, got {kind!r}", param="thinking")
        wanted = body.thinking.get("effort") if kind == "enabled" else None
        if kind == "disabled" or "type" in body.thinking:
            thinking = kind == "enabled"
        if wanted == "none":
            thinking = False
        elif wanted is not None:
            thinking, effort, param = True, str(wanted), "thinking"
    return _template_thinking(body, thinking, effort, param)


def _template_thinking(body: ChatRequest, thinking: bool, effort: str | None, param: str) -> tuple[bool, str | None]:
    for key, value in (body.chat_template_kwargs or {}).items():
        if key in ("thinking", "enable_thinking"):
            if not isinstance(value, bool):
                raise RequestError(f"{key} must be true or false, got {value!r}", param="chat_template_kwargs")
            thinking = value
        elif key == "thinking_effort":
            # Only here does an explicit null mean: no note at all.
            effort, param = None if value is None else str(value), "chat_template_kwargs"
        elif key not in ("tokenize", "return_dict", "image_prompts"):
            raise RequestError(f"unknown chat_template_kwargs {key!r}", param="chat_template_kwargs")
    if thinking and effort is not None and effort not in EFFORTS:
        raise RequestError(f"the thinking effort must be one of {', '.join(EFFORTS)}, got {effort!r}", param=param)
    return thinking, effort


def _check_tool_choice(body: ChatRequest, tool_names: Sequence[str]) -> None:
    choice = body.tool_choice
    if choice is None or choice in ("auto", "none"):
        return
    name: object = None
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if choice.get("type") != "function" or not isinstance(name, str):
            raise RequestError("tool_choice must name a function", param="tool_choice")
    elif choice != "required":
        raise RequestError(
            f"tool_choice must be auto, none, required or a function, got {choice!r}",
            param="tool_choice",
        )
    if not tool_names:
        raise RequestError("tool_choice asks for a call, but there are no tools", param="tool_choice")
    if name is not None and name not in tool_names:
        raise RequestError(f"tool_choice names {name!r}, which is no tool", param="tool_choice")
    if (body.response_format or {}).get("type") in ("json_object", "json_schema"):
        raise RequestError("a forced tool call and a JSON response exclude each other", param="response_format")


def _check_response_format(body: ChatRequest) -> None:
    if body.response_format is None:
        return
    kind = body.response_format.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise RequestError(
            f"response_format.type must be text, json_object or json_schema, got {kind!r}",
            param="response_format",
        )
    if kind != "json_schema":
        return
    schema = body.response_format.get("json_schema")
    if not isinstance(schema, Mapping) or not isinstance(schema.get("name"), str):
        raise RequestError("response_format.json_schema needs a name and a schema", param="response_format")
    if not isinstance(schema.get("schema"), Mapping):
        raise RequestError("response_format.json_schema.schema must be an object", param="response_format")
    if not isinstance(schema.get("strict", True), bool):
        raise RequestError("response_format.json_schema.strict must be true or false", param="response_format")


def _refuse_grammar(body: ChatRequest, messages: Sequence[Mapping[str, object]], tool_names: Sequence[str]) -> None:
    """Refuse what only constrained decoding can promise."""
    reason = "needs constrained decoding, which this version does not have"
    response_format = body.response_format or {}
    if response_format.get("type") == "json_object":
        raise RequestError(f"response_format json_object {reason}", param="response_format")
    if response_format.get("type") == "json_schema":
        schema = response_format["json_schema"]
        if not (isinstance(schema, Mapping) and schema.get("strict") is False):
            raise RequestError(
                f"response_format json_schema {reason}, unless strict is false",
                param="response_format",
            )
    if not tool_names or body.tool_choice == "none":
        return
    if body.tool_choice not in (None, "auto"):
        raise RequestError(f"a forced tool call {reason}", param="tool_choice")
    if body.parallel_tool_calls is False:
        raise RequestError(f"parallel_tool_calls=false {reason}", param="parallel_tool_calls")
    dynamic = [tool for message in messages for tool in _listed(message.get("tools"))]
    for param, tools in (("tools", _listed(body.tools)), ("messages", dynamic)):
        for tool in tools:
            function = tool.get("function") if isinstance(tool, Mapping) else None
            if isinstance(function, Mapping) and function.get("strict"):
                raise RequestError(f"the strict tool {function.get('name')!r} {reason}", param=param)


def _listed(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else ()


def _num_calls(message: Mapping[str, object]) -> int:
    return len(_listed(message.get("tool_calls"))) if message.get("role") == "assistant" else 0


def _raw_prompts(body: CompletionRequest, tok: Tokenizer) -> list[list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        prompts = [tok.encode(prompt, allow_special=True)]
    elif prompt and isinstance(prompt[0], int):
        prompts = [[i for i in prompt if isinstance(i, int)]]
    else:
        prompts = [
            tok.encode(item, allow_special=True) if isinstance(item, str) else item
            for item in prompt
            if not isinstance(item, int)
        ]
    if not prompts or not all(prompts):
        raise RequestError("prompt must not be empty", param="prompt")
    for ids in prompts:
        check_ids(tok, ids, param="prompt")
    return prompts


def _seeded(params: SamplingParams, index: int) -> SamplingParams:
    """Give each choice its own seed: equal seeds would give equal answers."""
    if params.seed is None or index == 0:
        return params
    return SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        max_new_tokens=params.max_new_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        seed=params.seed + index,
    )


def _is_stop(token_id: int, tok: Tokenizer) -> bool:
    """Whether the last id of a stopped request is a stop id and no text.

    A checkpoint may name an eos id of its own, so any special id counts that is no bracket.
    """
    brackets = (tok.special["<|open|>"], tok.special["<|close|>"], tok.special["<|sep|>"])
    return token_id >= tok.n_base and token_id not in brackets


def _content_delta(text: str) -> list[Delta]:
    return [{"content": text}] if text else []


async def _steps(
    served: _Served, choices: Sequence[_Choice], http: Request
) -> AsyncGenerator[tuple[_Choice, list[Delta]], None]:
    """Run all choices at once and yield their news. Closing it, or the client's leaving, aborts them."""
    gone = asyncio.ensure_future(_disconnected(http))
    iterators: dict[int, AsyncIterator[StepOutput]] = {}
    waiting: dict[asyncio.Future[StepOutput | None], _Choice] = {}
    try:
        for choice in choices:
            with _engine_errors():
                iterator = aiter(served.engine.generate(choice.prompt_ids, choice.params))
            iterators[choice.index] = iterator
            waiting[asyncio.ensure_future(_next(iterator))] = choice
        while waiting:
            watched: set[asyncio.Future[Any]] = {gone, *waiting}
            done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if gone in done:
                raise _ClientGone
            for task in [task for task in waiting if task in done]:
                choice = waiting.pop(task)
                yield choice, choice.advance(task.result(), served.tok)
                if choice.finish_reason is None:
                    waiting[asyncio.ensure_future(_next(iterators[choice.index]))] = choice
                else:
                    await _close(iterators.pop(choice.index))
    finally:
        gone.cancel()
        for future in waiting:
            future.cancel()
        await asyncio.gather(gone, *waiting, return_exceptions=True)
        for iterator in iterators.values():
            await _close(iterator)


@contextlib.contextmanager
def _engine_errors() -> Iterator[None]:
    """Tell the client's mistakes from the engine's."""
    try:
        yield
    except RequestError:
        raise
    except CapacityError as error:
        raise _Overloaded(str(error)) from error
    except Exception as error:
        logger.exception("the engine raised")
        raise _EngineFailure("the engine failed; see the log of the server") from error


async def _next(iterator: AsyncIterator[StepOutput]) -> StepOutput | None:
    with _engine_errors():
        return await anext(iterator, None)


async def _close(iterator: AsyncIterator[StepOutput]) -> None:
    # Generators have it; an engine may return a plain iterator that has nothing to close.
    aclose = getattr(iterator, "aclose", None)
    if aclose is not None:
        await aclose()


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _run(served: _Served, choices: Sequence[_Choice], http: Request) -> None:
    async with contextlib.aclosing(_steps(served, choices, http)) as steps:
        async for _ in steps:
            pass


def _usage(prompt_tokens: int, choices: Sequence[_Choice]) -> Usage:
    completion_tokens = sum(choice.num_tokens for choice in choices)
    usage = Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
    )
    cached = [choice.cached_tokens for choice in choices if choice.cached_tokens is not None]
    if cached:
        usage.prompt_tokens_details = {"cached_tokens": min(max(cached), prompt_tokens)}
    return usage


def _tool_call(call: FunctionCall, position: int, calls_before: int) -> MessageToolCall:
    return MessageToolCall(id=f"{call.name}:{calls_before + position}", type="function", function=call)


def _chat_choice(choice: _Choice, parser: OutputParser, calls_before: int) -> ChatChoice:
    message = ChatMessage(
        role="assistant",
        content="".join(choice.content) or None,
        reasoning_content=parser.result().reasoning,
        refusal=None,
    )
    if choice.calls:
        message.tool_calls = [_tool_call(call, i, calls_before) for i, call in enumerate(choice.calls)]
    return ChatChoice(
        index=choice.index,
        message=message,
        logprobs=None,
        finish_reason=choice.finish_reason or "stop",
    )


def _delta_message(delta: Delta, calls_before: int) -> ChatMessage:
    if "reasoning" in delta:
        return ChatMessage(reasoning_content=delta["reasoning"])
    if "content" in delta:
        return ChatMessage(content=delta["content"])
    call = delta["tool_call"]
    function = FunctionCall(name=call["name"], arguments=call["arguments"])
    item = _tool_call(function, call["index"], calls_before)
    item.index = call["index"]
    return ChatMessage(tool_calls=[item])


def _chunk_choice(choice: _Choice, delta: ChatMessage, finish: Finish | None) -> ChatChunkChoice:
    return ChatChunkChoice(index=choice.index, delta=delta, logprobs=None, finish_reason=finish)


def _event(item: BaseModel) -> str:
    return f"data: {item.model_dump_json(exclude_unset=True)}\n\n"


async def _stream(events: AsyncGenerator[str, None]) -> Response:
    """Wait for the first event, so that an early failure still has its own status code."""
    return _EventStream(await anext(events), events)


class _EventStream(Response):
    """Server-sent events.

    Not starlette's StreamingResponse: it leaves the generator open when the client is gone, and then the
    engine would go on.
    """

    def __init__(self, first: str, events: AsyncGenerator[str, None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events), contextlib.aclosing(self._framed()) as framed:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with contextlib.suppress(_ClientGone, OSError):
                async for event in framed:
                    body = event.encode()
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _framed(self) -> AsyncGenerator[str, None]:
        yield self._first
        try:
            async for event in self._events:
                yield event
        except (RequestError, _EngineFailure) as error:
            _, body = _error(error)
            yield f"data: {json.dumps(body)}\n\n"
        yield "data: [DONE]\n\n"


def _error(error: Exception) -> tuple[int, dict[str, object]]:
    """Status and body of an error in OpenAI's shape."""
    status, param, message = 500, None, str(error)
    if isinstance(error, RequestError):
        status = 404 if isinstance(error, _UnknownModel) else 400
        param = error.param
    elif isinstance(error, RequestValidationError):
        status = 400
        first = error.errors()[0]
        where = [str(step) for step in first["loc"] if step != "body"]
        is_field = bool(where) and first["type"] != "json_invalid"
        param = where[0] if is_field else None
        message = f"{'.'.join(where)}: {first['msg']}" if is_field else f"bad body: {first['msg']}"
    elif isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    elif isinstance(error, _EngineFailure):
        status = error.status
    else:
        message = "internal error; see the log of the server"
    kinds = {400: "invalid_request_error", 404: "not_found_error", 405: "invalid_request_error"}
    kind = kinds.get(status, "server_error")
    return status, {"error": ErrorBody(message=message, type=kind, param=param, code=None).model_dump()}


def _add_error_handlers(app: FastAPI) -> None:
    async def answer(_: Request, error: Exception) -> Response:
        status, body = _error(error)
        return JSONResponse(body, status_code=status)

    async def leave(_: Request, error: Exception) -> Response:
        return Response(status_code=_CLIENT_GONE)

    for kind in (RequestError, RequestValidationError, HTTPException, _EngineFailure, Exception):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(_ClientGone, leave)
