"""`POST /v1/chat/completions`: from messages to a prompt, and from its answers to a response."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from k3lib.engine.grammar import build_grammar
from k3lib.errors import RequestError
from k3lib.server.answers import Answer, count_usage
from k3lib.server.chat import (
    EFFORTS,
    OutputParser,
    check_messages,
    encode_segments,
    render_chat,
    with_ordered_results,
)
from k3lib.server.events import event, json_answer, stream
from k3lib.server.image_input import expand_images
from k3lib.server.image_parts import has_images, image_parts, refuse_images
from k3lib.server.logprobs import chat_logprobs
from k3lib.server.schemas import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatFields,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    Finish,
    FunctionCall,
    FunctionCallPiece,
    MessageToolCall,
    ToolCallPiece,
    Usage,
)
from k3lib.server.served import Prompt, new_rid, seeded

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from fastapi import Request
    from starlette.responses import Response

    from k3lib.engine.grammar import Grammar
    from k3lib.server.answers import Run
    from k3lib.server.chat import Delta, ToolCall
    from k3lib.server.image_input import ImageReader, OpenedImage, PromptImage
    from k3lib.server.served import Served
    from k3lib.server.tokenizer import Tokenizer

__all__ = ["ChatPrompt", "answer_chat", "render_in_thread", "render_request"]


class ChatPrompt(NamedTuple):
    """A rendered chat request.

    Attributes:
        ids: the prompt.
        billed_tokens: its length without the trailing opener of a channel.
        starts_thinking: the model begins inside the think channel.
        tools_active: tool calls are reported.
        calls_before: tool calls of earlier messages.
        images: of the messages, in the order of the prompt.
        positions: where the tokens of each begin.
        grammar: what the answer must be; None is anything.
    """

    ids: list[int]
    billed_tokens: int
    starts_thinking: bool
    tools_active: bool
    calls_before: int
    images: list[OpenedImage]
    positions: list[int]
    grammar: Grammar | None


async def answer_chat(served: Served, body: ChatRequest, http: Request) -> Response:
    """Answer a chat request."""
    served.check_model(body.model)
    body.refuse_unsupported()
    prompt = await render_in_thread(served, body)
    wanted, limit_field = body.max_tokens, "max_tokens"
    if body.max_completion_tokens is not None:
        wanted, limit_field = body.max_completion_tokens, "max_completion_tokens"
    ids, max_new_tokens = served.fit(Prompt(prompt.ids, "messages"), wanted, limit_field)
    params = served.params(
        body,
        max_new_tokens,
        top_p=0.95,
        min_tokens=body.min_tokens or 0,
        logprobs=bool(body.logprobs),
        top_logprobs=body.num_top,
        grammar=prompt.grammar,
    )
    parsers = [
        OutputParser(prompt.starts_thinking, prompt.tools_active, served.tok, keeps_text=not body.stream)
        for _ in range(body.n or 1)
    ]
    answers = [
        Answer(i, ids, seeded(params, i), parser, body.stops, tok=served.tok) for i, parser in enumerate(parsers)
    ]
    rid = body.rid or body.request_id or new_rid("chatcmpl-")
    writer = _Writer(body, prompt._replace(billed_tokens=prompt.billed_tokens - len(prompt.ids) + len(ids)), rid)
    # after everything else that could refuse the request: pixels take time and memory
    run = served.start(answers, body, rid, media=await _media(served, prompt, ids))
    if body.stream:
        return await stream(writer.events(run, http, parsers, served.tok), rid)
    await run.run(http)
    return json_answer(writer.completion(answers, parsers, served.tok), rid)


async def render_in_thread(served: Served, body: ChatFields) -> ChatPrompt:
    """Render a request aside: a long conversation takes long enough to stall other streams, images still longer."""
    if served.images is not None and has_images(body.messages):
        return await served.images.run(render_request, body, served.tok, served.images)
    return await asyncio.to_thread(render_request, body, served.tok, served.images)


async def _media(served: Served, prompt: ChatPrompt, ids: Sequence[int]) -> list[PromptImage]:
    if served.images is None or not prompt.images:
        return []
    if len(ids) != len(prompt.ids):
        raise RequestError(
            f"a prompt with images cannot be cut from {len(prompt.ids)} to {len(ids)} tokens", param="messages"
        )
    return await served.images.run(served.images.load, prompt.images, prompt.positions)


class _Writer:
    """Writes the response to one request, whole or as events."""

    def __init__(self, body: ChatRequest, prompt: ChatPrompt, rid: str) -> None:
        self._body = body
        self._prompt = prompt
        self._rid = rid
        self._created = int(time.time())

    def completion(self, answers: Sequence[Answer], parsers: Sequence[OutputParser], tok: Tokenizer) -> ChatCompletion:
        before = self._prompt.calls_before
        return ChatCompletion(
            id=self._rid,
            object="chat.completion",
            created=self._created,
            model=self._body.model,
            choices=[_choice(*pair, before, tok) for pair in zip(answers, parsers, strict=True)],
            usage=self._usage(answers, parsers),
        )

    async def events(
        self, run: Run, http: Request, parsers: Sequence[OutputParser], tok: Tokenizer
    ) -> AsyncGenerator[bytes, None]:
        begun: set[int] = set()
        body = self._body
        async with contextlib.aclosing(run.steps(http)) as steps:
            async for answer, deltas in steps:
                usage = self._usage(run.answers, parsers) if body.always_includes_usage else None
                if answer.index not in begun:
                    begun.add(answer.index)
                    yield self._chunk(answer, ChatDelta(role="assistant", content=""), usage=usage)
                for delta in deltas:
                    message = _delta_message(delta, self._prompt.calls_before)
                    # with the first delta after them; what has none waits for the next one, or for the end
                    logprobs = chat_logprobs(answer.new_logprobs(), tok)
                    yield self._chunk(answer, message, logprobs=logprobs, usage=usage)
                if (finish := answer.finish_reason) is not None:
                    logprobs = chat_logprobs(answer.new_logprobs(), tok)
                    yield self._chunk(answer, ChatDelta(), logprobs=logprobs, finish=finish, usage=usage)
        if body.includes_usage:
            yield self._event([], self._usage(run.answers, parsers))

    def _usage(self, answers: Sequence[Answer], parsers: Sequence[OutputParser]) -> Usage:
        usage = count_usage(self._prompt.billed_tokens, answers)
        reasoning = sum(parser.reasoning_tokens for parser in parsers)
        usage["completion_tokens_details"] = {
            **usage.get("completion_tokens_details", {}),
            "reasoning_tokens": reasoning,
        }
        return usage

    def _chunk(
        self,
        answer: Answer,
        delta: ChatDelta,
        *,
        logprobs: ChatLogprobs | None = None,
        finish: Finish | None = None,
        usage: Usage | None = None,
    ) -> bytes:
        part = ChatChunkChoice(index=answer.index, delta=delta, logprobs=logprobs, finish_reason=finish)
        return self._event([part], usage)

    def _event(self, parts: list[ChatChunkChoice], usage: Usage | None) -> bytes:
        item = ChatChunk(
            id=self._rid,
            object="chat.completion.chunk",
            created=self._created,
            model=self._body.model,
            choices=parts,
        )
        if self._body.includes_usage or usage is not None:
            item["usage"] = usage
        return event(item)


def _call_id(name: str, position: int, calls_before: int) -> str:
    return f"{name}:{calls_before + position}"


def _tool_call(call: ToolCall, position: int, calls_before: int) -> MessageToolCall:
    function = FunctionCall(name=call.name, arguments=call.arguments)
    return MessageToolCall(id=_call_id(call.name, position, calls_before), type="function", function=function)


def _choice(answer: Answer, parser: OutputParser, calls_before: int, tok: Tokenizer) -> ChatChoice:
    parsed = parser.result()
    message = ChatMessage(
        role="assistant",
        content="".join(answer.content) or None,
        reasoning_content=parsed.reasoning,
        refusal=None,
    )
    if answer.num_calls:
        message["tool_calls"] = [_tool_call(call, i, calls_before) for i, call in enumerate(parsed.tool_calls)]
    return ChatChoice(
        index=answer.index,
        message=message,
        logprobs=chat_logprobs(answer.logprobs, tok),
        finish_reason=answer.finish_reason or "stop",
    )


def _delta_message(delta: Delta, calls_before: int) -> ChatDelta:
    if "reasoning" in delta:
        return ChatDelta(reasoning_content=delta["reasoning"])
    if "content" in delta:
        return ChatDelta(content=delta["content"])
    call = delta["tool_call"]
    piece = ToolCallPiece(index=call["index"], function=FunctionCallPiece(arguments=call["arguments"]))
    if "name" in call:
        piece["id"] = _call_id(call["name"], call["index"], calls_before)
        piece["type"] = "function"
        piece["function"]["name"] = call["name"]
    return ChatDelta(tool_calls=[piece])


def render_request(body: ChatFields, tok: Tokenizer, reader: ImageReader | None = None) -> ChatPrompt:
    """Check a chat request and render its prompt.

    Args:
        body: the request.
        tok: encodes it.
        reader: reads its images; None refuses them.

    Raises:
        RequestError: it cannot be answered.
    """
    thinking, effort = _thinking(body)
    messages, tool_names = check_messages(body.messages, body.tools)
    _check_tool_choice(body, tool_names)
    _check_response_format(body)
    if body.add_generation_prompt is False:
        raise RequestError("add_generation_prompt=false leaves nothing to answer", param="add_generation_prompt")
    continues = bool(body.continue_final_message or messages[-1].get("partial"))
    if any(message.get("partial") for message in messages[:-1]):
        raise RequestError("partial is allowed on the last message only", param="messages")
    parts = image_parts(with_ordered_results(messages))
    images: list[OpenedImage] = []
    if parts:
        images = refuse_images(parts) if reader is None else reader.open(parts)
    segments = render_chat(
        messages,
        body.tools,
        thinking=thinking,
        thinking_effort=effort,
        tool_choice=body.tool_choice,
        response_format=body.response_format,
        image_prompts=[image.prompt for image in images],
        continue_final_message=continues,
    )
    ids, positions = expand_images(encode_segments(tok, segments), images, tok.special["<|media_pad|>"])
    # The trailing opener is input of the model but not billed.
    ends_with_opener = segments[-1] == ("<|sep|>", True)
    opener = len(encode_segments(tok, segments[-3:])) if ends_with_opener else 0
    last_open = max(i for i, s in enumerate(segments) if s == ("<|open|>", True))
    starts_thinking = segments[last_open + 1].text == "think"
    written = "".join(segment.text for segment in segments[last_open + 3 :])  # behind the opener: what is continued
    return ChatPrompt(
        ids=ids,
        billed_tokens=len(ids) - opener,
        starts_thinking=starts_thinking,
        tools_active=bool(tool_names) and body.tool_choice != "none",
        calls_before=sum(_num_calls(message) for message in messages),
        images=images,
        positions=positions,
        grammar=_grammar(body, messages, thinking=starts_thinking, response_prefix="" if starts_thinking else written),
    )


def _thinking(body: ChatFields) -> tuple[bool, str | None]:
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


def _template_thinking(body: ChatFields, thinking: bool, effort: str | None, param: str) -> tuple[bool, str | None]:
    for key, value in (body.chat_template_kwargs or {}).items():
        if key in ("thinking", "enable_thinking"):
            if not isinstance(value, bool | None):
                raise RequestError(f"{key} must be true or false, got {value!r}", param="chat_template_kwargs")
            thinking = thinking if value is None else value
        elif key == "thinking_effort":
            # Only here does an explicit null mean: no note at all.
            effort, param = None if value is None else str(value), "chat_template_kwargs"
        elif key not in ("tokenize", "return_dict", "image_prompts"):
            raise RequestError(f"unknown chat_template_kwargs {key!r}", param="chat_template_kwargs")
    if thinking and effort is not None and effort not in EFFORTS:
        raise RequestError(f"the thinking effort must be one of {', '.join(EFFORTS)}, got {effort!r}", param=param)
    return thinking, effort


def _check_tool_choice(body: ChatFields, tool_names: Sequence[str]) -> None:
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


def _check_response_format(body: ChatFields) -> None:
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
    if not isinstance(schema.get("strict"), bool | None):
        raise RequestError("response_format.json_schema.strict must be true or false", param="response_format")


def _grammar(
    body: ChatFields, messages: Sequence[Mapping[str, object]], *, thinking: bool, response_prefix: str
) -> Grammar | None:
    """What the answer must be; tools of system messages are tools everywhere."""
    dynamic = [tool for message in messages for tool in _listed(message.get("tools"))]
    tools = [tool for tool in (*_listed(body.tools), *dynamic) if isinstance(tool, Mapping)]
    return build_grammar(
        tools,
        body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        thinking=thinking,
        response_format=body.response_format,
        prefix=response_prefix,
    )


def _listed(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else ()


def _num_calls(message: Mapping[str, object]) -> int:
    return len(_listed(message.get("tool_calls"))) if message.get("role") == "assistant" else 0
