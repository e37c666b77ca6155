"""`POST /v1/completions`: raw prompts, text or token ids, and what follows them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from k3lib.errors import RequestError
from k3lib.server.answers import Answer, TextReader, count_usage
from k3lib.server.events import event, json_answer, stream
from k3lib.server.logprobs import CompletionLogprobWriter
from k3lib.server.schemas import (
    MAX_PROMPTS,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    Usage,
)
from k3lib.server.served import Prompt, new_rid, seeded
from k3lib.server.tokenizer import Tokenizer, check_ids

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from fastapi import Request
    from starlette.responses import Response

    from k3lib.server.answers import Run
    from k3lib.server.served import Served

__all__ = ["answer_completion", "encode_prompts"]


async def answer_completion(served: Served, body: CompletionRequest, http: Request) -> Response:
    """Answer a request for continuations."""
    served.check_model(body.model)
    body.refuse_unsupported()
    prompts = await asyncio.to_thread(encode_prompts, body.prompt, served.tok, "prompt")
    rid = body.rid or body.request_id or new_rid("cmpl-")
    answers = _answers(served, body, prompts)
    writer = _Writer(body, served.tok, answers, rid)
    run = served.start(answers, body, rid)
    if body.stream:
        return await stream(writer.events(run, http), rid)
    await run.run(http)
    return json_answer(writer.completion(answers), rid)


def encode_prompts(
    prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]], tok: Tokenizer, param: str
) -> list[list[int]]:
    """Token ids of one prompt or of several; texts may name special tokens.

    Raises:
        RequestError: an empty prompt, too many of them, or an id outside the vocabulary.
    """
    if isinstance(prompt, str):
        prompts = [tok.encode(prompt, allow_special=True)]
    elif prompt and isinstance(prompt[0], int):
        prompts = [[i for i in prompt if isinstance(i, int)]]
    else:
        if len(prompt) > MAX_PROMPTS:
            raise RequestError(f"{param} takes at most {MAX_PROMPTS} prompts, got {len(prompt)}", param=param)
        prompts = [
            tok.encode(item, allow_special=True) if isinstance(item, str) else list(item)
            for item in prompt
            if not isinstance(item, int)
        ]
    if not prompts or not all(prompts):
        raise RequestError(f"{param} must not be empty", param=param)
    for ids in prompts:
        check_ids(tok, ids, param=param)
    return prompts


def _answers(served: Served, body: CompletionRequest, prompts: Sequence[list[int]]) -> list[Answer]:
    count = body.n or 1
    if len(prompts) * count > MAX_PROMPTS:
        raise RequestError(f"{len(prompts)} prompts times n={count} are more than {MAX_PROMPTS} answers", param="n")
    hidden = served.tok.hidden_ids if body.skip_special_tokens else frozenset()
    answers: list[Answer] = []
    for given in prompts:
        ids, max_new_tokens = served.fit(Prompt(given, "prompt"), body.max_tokens, "max_tokens")
        params = served.params(
            body,
            max_new_tokens,
            top_p=1.0,
            min_tokens=body.min_tokens or 0,
            logprobs=body.logprobs is not None,
            prompt_logprobs=body.logprobs is not None and bool(body.echo),
            top_logprobs=body.logprobs or 0,
        )
        for i in range(count):
            reader = TextReader(served.tok, hidden)
            answers.append(Answer(len(answers), ids, seeded(params, i), reader, body.stops, tok=served.tok))
    return answers


class _Writer:
    """Writes the response to one request, whole or as events."""

    def __init__(self, body: CompletionRequest, tok: Tokenizer, answers: Sequence[Answer], rid: str) -> None:
        self._body = body
        self._tok = tok
        self._rid = rid
        self._created = int(time.time())
        self._num_prompt = sum(len(ids) for ids in {id(a.prompt_ids): a.prompt_ids for a in answers}.values())
        self._hidden = tok.hidden_ids if body.skip_special_tokens else frozenset()
        self._logprobs = [CompletionLogprobWriter(tok, self._hidden) for _ in answers]

    def completion(self, answers: Sequence[Answer]) -> Completion:
        result = self._completion([self._part(answer, "".join(answer.content), first=True) for answer in answers])
        result["usage"] = self._usage(answers)
        return result

    async def events(self, run: Run, http: Request) -> AsyncGenerator[bytes, None]:
        begun: set[int] = set()
        body = self._body
        async with contextlib.aclosing(run.steps(http)) as steps:
            async for answer, deltas in steps:
                first = answer.index not in begun
                begun.add(answer.index)
                text = "".join(delta.get("content", "") for delta in deltas)
                if text or answer.finish_reason is not None or (first and body.echo):
                    part = self._part(answer, text, first=first)
                    yield self._event([part], self._usage(run.answers) if body.always_includes_usage else None)
        if body.includes_usage:
            yield self._event([], self._usage(run.answers))

    def _part(self, answer: Answer, text: str, *, first: bool) -> CompletionChoice:
        if first and self._body.echo:
            text = self._tok.decode(i for i in answer.prompt_ids if i not in self._hidden) + text
        return CompletionChoice(
            index=answer.index,
            text=text,
            logprobs=self._new_logprobs(answer, first=first),
            finish_reason=answer.finish_reason,
        )

    def _new_logprobs(self, answer: Answer, *, first: bool) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        writer = self._logprobs[answer.index]
        parts = []
        if first and self._body.echo:
            known = answer.prompt_logprobs or [None] * len(answer.prompt_ids)
            parts.append(writer.write(answer.prompt_ids, known))
            writer.end_prompt()
        new = answer.new_logprobs()
        parts.append(writer.write([entry.token_id for entry in new], new))
        return CompletionLogprobs(
            tokens=[x for part in parts for x in part["tokens"]],
            token_logprobs=[x for part in parts for x in part["token_logprobs"]],
            top_logprobs=[x for part in parts for x in part["top_logprobs"]],
            text_offset=[x for part in parts for x in part["text_offset"]],
        )

    def _usage(self, answers: Sequence[Answer]) -> Usage:
        return count_usage(self._num_prompt, answers)

    def _completion(self, parts: list[CompletionChoice]) -> Completion:
        return Completion(
            id=self._rid,
            object="text_completion",
            created=self._created,
            model=self._body.model,
            choices=parts,
        )

    def _event(self, parts: list[CompletionChoice], usage: Usage | None) -> bytes:
        item = self._completion(parts)
        if self._body.includes_usage or usage is not None:
            item["usage"] = usage
        return event(item)
