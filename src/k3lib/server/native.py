"""Endpoints below the chat format: `/generate`, `/tokenize` and `/detokenize`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from k3lib.engine.grammar import build_text_grammar
from k3lib.errors import RequestError
from k3lib.server.answers import Answer, TextReader
from k3lib.server.chat_completions import render_in_thread
from k3lib.server.completions import encode_prompts
from k3lib.server.events import event, json_answer, stream
from k3lib.server.failures import AbortedError
from k3lib.server.image_input import expand_images
from k3lib.server.image_parts import ImagePart
from k3lib.server.logprobs import generate_logprobs
from k3lib.server.schemas import (
    MAX_PROMPTS,
    ChatFields,
    DetokenizeRequest,
    GenerateParams,
    GenerateRequest,
    TokenizeRequest,
)
from k3lib.server.served import Prompt, new_rid, seeded
from k3lib.server.tokenizer import check_ids

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from fastapi import Request
    from starlette.responses import Response

    from k3lib.engine.media import PromptImage
    from k3lib.server.answers import Run
    from k3lib.server.image_input import OpenedImage
    from k3lib.server.served import Served

__all__ = ["answer_generate", "detokenize", "tokenize", "tokenizer_info"]

DEFAULT_NEW_TOKENS = 128


async def answer_generate(served: Served, body: GenerateRequest, http: Request) -> Response:
    """Answer a request in the form of sglang's own endpoint."""
    body.refuse_unsupported()
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("give either text or input_ids", param="text")
    field = "input_ids" if body.text is None else "text"
    given = body.input_ids if body.text is None else body.text
    prompts = await asyncio.to_thread(encode_prompts, given or "", served.tok, field)
    images: list[OpenedImage] = []
    if body.image_data is not None:
        prompts, images, positions = await _with_images(served, body.image_data, prompts)
    each = _params_of(body, len(prompts))
    rid = body.rid or new_rid("")
    answers = _answers(served, body, [Prompt(ids, field) for ids in prompts], each)
    is_one = len(answers) == 1 and (isinstance(given, str) or not isinstance((given or [[]])[0], str | list))
    writer = _Writer(served, body, rid, is_one=is_one)
    media: list[PromptImage] = []
    if images and served.images is not None:
        if len(answers[0].prompt_ids) != len(prompts[0]):
            raise RequestError("a prompt with images cannot be cut", param=field)
        media = await served.images.run(served.images.load, images, positions)
    run = served.start(answers, body, rid, media=media)
    if body.stream:
        return await stream(writer.events(run, http), rid)
    why = None
    try:
        await run.run(http)
    except AbortedError as error:
        why = str(error)
    results = [writer.result(run, answer, why) for answer in answers]
    return json_answer(results[0] if is_one else results, rid)


async def _with_images(
    served: Served, image_data: object, prompts: Sequence[list[int]]
) -> tuple[list[list[int]], list[OpenedImage], list[int]]:
    """Read the headers of images and make room for them in a prompt, which has a `<|media_pad|>` for each."""
    if served.images is None:
        raise RequestError(
            "this server does not accept images: it runs without a vision tower, so send text only", param="image_data"
        )
    urls = image_data if isinstance(image_data, list) else [image_data]
    if not urls or not all(isinstance(url, str) for url in urls):
        raise RequestError("image_data must be the URL of an image, or a list of them", param="image_data")
    if len(prompts) != 1:
        raise RequestError(f"image_data goes with one prompt, got {len(prompts)}", param="image_data")
    parts = [ImagePart(f"image_data[{i}]", url) for i, url in enumerate(urls)]
    images = await served.images.run(served.images.open, parts)
    try:
        ids, positions = expand_images(prompts[0], images, served.tok.special["<|media_pad|>"])
    except RequestError as error:
        raise RequestError(str(error), param="image_data") from error
    return [ids], images, positions


def _params_of(body: GenerateRequest, count: int) -> list[GenerateParams]:
    given = body.sampling_params or GenerateParams()
    each = [given] * count if isinstance(given, GenerateParams) else given
    if len(each) != count:
        raise RequestError(f"{len(each)} sampling_params for {count} prompts", param="sampling_params")
    for params in each:
        try:
            params.refuse_unsupported()
        except RequestError as error:
            raise RequestError(f"sampling_params: {error}", param="sampling_params") from error
        if params.ebnf is not None:
            raise RequestError("ebnf is not supported; use json_schema or regex", param="sampling_params")
    if sum(params.n or 1 for params in each) > MAX_PROMPTS:
        raise RequestError(f"a request has at most {MAX_PROMPTS} answers", param="sampling_params")
    return each


def _answers(
    served: Served, body: GenerateRequest, prompts: Sequence[Prompt], each: Sequence[GenerateParams]
) -> list[Answer]:
    answers: list[Answer] = []
    for prompt, asked in zip(prompts, each, strict=True):
        wanted = asked.max_new_tokens
        if wanted is None:
            wanted = max(0, min(DEFAULT_NEW_TOKENS, served.max_model_len - len(prompt.ids)))
        ids, max_new_tokens = served.fit(prompt, wanted, "sampling_params.max_new_tokens")
        start = -1 if body.logprob_start_len is None else body.logprob_start_len
        grammar = None
        if asked.json_schema is not None or asked.regex is not None:
            grammar = build_text_grammar(json_schema=asked.json_schema, pattern=asked.regex)
        params = served.params(
            asked,
            max_new_tokens,
            top_p=1.0,
            grammar=grammar,
            min_tokens=asked.min_new_tokens or 0,
            logprobs=bool(body.return_logprob),
            prompt_logprobs=bool(body.return_logprob) and 0 <= start < len(ids),
            top_logprobs=(body.top_logprobs_num or 0) if body.return_logprob else 0,
        )
        hidden = frozenset() if asked.skip_special_tokens is False else served.tok.hidden_ids
        for i in range(asked.n or 1):
            reader = TextReader(served.tok, hidden)
            answers.append(Answer(len(answers), ids, seeded(params, i), reader, asked.stops, tok=served.tok))
    return answers


class _Writer:
    """Writes results; every event of a stream repeats the text so far, as in the server that has this endpoint."""

    def __init__(self, served: Served, body: GenerateRequest, rid: str, *, is_one: bool) -> None:
        self._tok = served.tok
        self._body = body
        self._rid = rid
        self._is_one = is_one

    async def events(self, run: Run, http: Request) -> AsyncGenerator[bytes, None]:
        why = None
        try:
            async with contextlib.aclosing(run.steps(http)) as steps:
                async for answer, deltas in steps:
                    if deltas or answer.finish_reason is not None:
                        yield self._event(run, answer, None)
        except AbortedError as error:
            why = str(error)
        for answer in run.answers:
            if answer.finish_reason is None:
                yield self._event(run, answer, why)

    def _event(self, run: Run, answer: Answer, why: str | None) -> bytes:
        result = self.result(run, answer, why)
        if not self._is_one:
            result["index"] = answer.index
        return event(result)

    def result(self, run: Run, answer: Answer, why: str | None) -> dict[str, Any]:
        """One answer; `why` it was aborted, if it was."""
        meta: dict[str, Any] = {
            "id": self._rid if self._is_one else f"{self._rid}-{answer.index}",
            "finish_reason": _finish(answer, why),
            "prompt_tokens": len(answer.prompt_ids),
            "completion_tokens": len(answer.ids),
            "cached_tokens": answer.cached_tokens or 0,
            "e2e_latency": time.monotonic() - run.started,
        }
        if (found := answer.speculation) is not None:
            meta |= {
                "spec_verify_ct": found.steps,
                "spec_draft_token_num": found.proposed,
                "spec_accept_token_num": found.accepted,
                "spec_accept_rate": found.accept_rate,
                "spec_accept_length": found.accept_length,
                "spec_accepted_by_position": list(found.by_position),
                "spec_simulated": found.simulated,
            }
        if self._body.return_logprob:
            meta |= self._logprobs(answer)
        return {"text": "".join(answer.content), "output_ids": answer.ids, "meta_info": meta}

    def _logprobs(self, answer: Answer) -> dict[str, Any]:
        with_text = bool(self._body.return_text_in_logprobs)
        ids = [entry.token_id for entry in answer.logprobs]
        tokens, tops = generate_logprobs(ids, answer.logprobs, self._tok, with_text=with_text)
        start = self._body.logprob_start_len or 0
        prompt = answer.prompt_logprobs[start:]
        before = generate_logprobs(
            answer.prompt_ids[start : start + len(prompt)], prompt, self._tok, with_text=with_text
        )
        found: dict[str, Any] = {"input_token_logprobs": before[0], "output_token_logprobs": tokens}
        if self._body.top_logprobs_num:
            found |= {"input_top_logprobs": before[1], "output_top_logprobs": tops}
        return found


def _finish(answer: Answer, why: str | None) -> dict[str, object] | None:
    if answer.finish_reason == "length":
        return {"type": "length", "length": len(answer.ids)}
    if answer.finish_reason is not None:
        return {"type": "stop", "matched": answer.matched}
    return None if why is None else {"type": "abort", "message": why}


async def tokenize(served: Served, body: TokenizeRequest) -> Response:
    """Token ids of a raw prompt, of several, or of a chat request as `/v1/chat/completions` would render it."""
    if body.model is not None:
        served.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if body.messages is not None:
        try:
            chat = ChatFields.model_validate(body.model_dump())
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from error
        ids = (await render_in_thread(served, chat)).ids
        return _tokens(served, len(ids), ids)
    if isinstance(body.prompt, str):
        ids = await asyncio.to_thread(served.tok.encode, body.prompt, allow_special=True)
        return _tokens(served, len(ids), ids)
    texts = body.prompt or []
    if len(texts) > MAX_PROMPTS:
        raise RequestError(f"prompt takes at most {MAX_PROMPTS} texts, got {len(texts)}", param="prompt")
    each = await asyncio.to_thread(lambda: [served.tok.encode(text, allow_special=True) for text in texts])
    return _tokens(served, [len(ids) for ids in each], each)


def _tokens(served: Served, count: object, tokens: object) -> Response:
    return json_answer({"count": count, "max_model_len": served.max_model_len, "tokens": tokens})


async def detokenize(served: Served, body: DetokenizeRequest) -> Response:
    """Text of token ids, special tokens as their names."""
    if body.model is not None:
        served.check_model(body.model)
    many = [ids for ids in body.tokens if isinstance(ids, list)]
    each = many or [[i for i in body.tokens if isinstance(i, int)]]
    for ids in each:
        check_ids(served.tok, ids, param="tokens")
    texts = await asyncio.to_thread(lambda: [served.tok.decode(ids) for ids in each])
    text = texts if many else texts[0]
    return json_answer({"prompt": text, "text": text})


def tokenizer_info(served: Served) -> Response:
    """What clients that let the server tokenize ask first; there is no chat template to tell."""
    tokens = {"bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]"}
    return json_answer({"tokenizer_class": "k3lib", "vocab_size": served.tok.vocab_size, **tokens})
