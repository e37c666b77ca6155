"""What all requests to one server share, and how a request becomes sampling parameters."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from k3lib.engine.request import SamplingParams
from k3lib.errors import RequestError
from k3lib.server.answers import Answer, Run, StepSource
from k3lib.server.failures import NotSupportedError, UnknownModelError
from k3lib.server.tokenizer import Tokenizer, check_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from k3lib.engine.engine import Engine
    from k3lib.server.config import ApiConfig
    from k3lib.server.image_input import ImageReader, PromptImage
    from k3lib.server.metrics import Metrics
    from k3lib.server.schemas import CommonRequest, GenerateRequest, Sampling

__all__ = ["Prompt", "Served", "new_rid", "seeded"]

logger = logging.getLogger(__name__)

MAX_DEFAULT_TOKENS = 131_072
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the name of the field they came from."""

    ids: list[int]
    param: str


@dataclass(slots=True)
class Served:
    """What all requests share.

    Attributes:
        engine: generates the tokens.
        tok: encodes prompts and decodes answers.
        model_name: the only value of `model`.
        max_model_len: upper bound of prompt and answer together.
        config: rules of the API.
        metrics: counts of this server.
        live: the requests that are being answered, by name.
        info: what `/server_info` says besides the state of the engine.
        images: reads images; None where no vision tower is loaded.
        created: when the server came up, in seconds since 1970.
        is_draining: it finishes what runs and takes nothing new.
        is_loading: new weights are being read.
        num_open: HTTP requests that are being answered, probes not counted.
    """

    engine: StepSource
    tok: Tokenizer
    model_name: str
    max_model_len: int
    config: ApiConfig
    metrics: Metrics
    live: dict[str, Run] = field(default_factory=dict)
    info: Mapping[str, object] = field(default_factory=dict)
    images: ImageReader | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    is_draining: bool = False
    is_loading: bool = False
    num_open: int = 0
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def enter(self) -> None:
        """Count an HTTP request that came."""
        self.num_open += 1
        self._idle.clear()

    def leave(self) -> None:
        """Count an HTTP request that was answered."""
        self.num_open -= 1
        if not self.num_open:
            self._idle.set()

    async def drain(self, seconds: float) -> bool:
        """Take nothing new and wait until nothing is open; False if time was over first, and what ran was aborted."""
        self.is_draining = True
        if not self.num_open:
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except asyncio.TimeoutError:
            for run in list(self.live.values()):
                run.abort("the server shuts down")
            return False
        return True

    def card(self) -> dict[str, object]:
        """The model as `/v1/models` lists it."""
        return {
            "id": self.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "k3lib",
            "max_model_len": self.max_model_len,
        }

    def check_model(self, name: str) -> None:
        """Refuse a model that is not served here."""
        if name != self.model_name:
            raise UnknownModelError(f"model {name[:80]!r} does not exist; use {self.model_name!r}", param="model")

    async def call(self, function: Callable[[Engine], T], *, what: str) -> T:
        """Run a function between two steps of the engine.

        Raises:
            NotSupportedError: an engine that has no `call`.
        """
        call = getattr(self.engine, "call", None)
        if call is None:
            raise NotSupportedError(
                f"{what} needs k3lib's own engine; this server was made over a {type(self.engine).__name__}, which has "
                "no call()"
            )
        result: T = await call(function)
        return result

    def start(
        self,
        answers: Sequence[Answer],
        body: CommonRequest | GenerateRequest,
        rid: str,
        *,
        media: Sequence[PromptImage] = (),
    ) -> Run:
        """Make the run of a request; the engine gets only the keywords that the request needs."""
        if self.config.log_requests:
            logger.info("asked", extra={"fields": {"rid": rid, "body": body.model_dump_json(exclude_unset=True)}})
        extra: dict[str, Any] = {}
        if body.priority is not None:
            extra["priority"] = body.priority
        if body.cache_salt is not None:
            extra["namespace"] = body.cache_salt
        if media:
            extra["media"] = media
        return Run(
            self.engine, answers, rid=rid, live=self.live, metrics=self.metrics, extra=extra, timeout=body.timeout
        )

    def fit(self, prompt: Prompt, wanted: int | None, limit_field: str) -> tuple[list[int], int]:
        """The prompt and the most new tokens that the context holds.

        Args:
            prompt: what was asked.
            wanted: the most new tokens that the request names, or None.
            limit_field: the name of that field.

        Raises:
            RequestError: they exceed the context, unless the server cuts.
        """
        ids, room = prompt.ids, self.max_model_len
        if self.config.allow_auto_truncate:
            least = min(1 if wanted is None else wanted, 1)
            if len(ids) > room - least:
                logger.info("prompt of %d tokens cut to its last %d", len(ids), room - least)
                ids = ids[len(ids) - (room - least) :]
            wanted = None if wanted is None else min(wanted, room - len(ids))
        left = room - len(ids)
        if left < 0 or (left == 0 and wanted != 0):
            raise RequestError(
                f"the prompt has {len(ids)} tokens, the context of {room} tokens must hold it and the answer",
                param=prompt.param,
            )
        if wanted is not None and wanted > left:
            raise RequestError(
                f"{limit_field}={wanted} and a prompt of {len(ids)} tokens exceed the context of {room} tokens; ask "
                f"for at most {left}",
                param=limit_field,
            )
        return ids, min(left, MAX_DEFAULT_TOKENS) if wanted is None else wanted

    def params(self, body: Sampling, max_new_tokens: int, *, top_p: float, **report: Any) -> SamplingParams:  # noqa: ANN401
        """Sampling parameters of a request.

        Args:
            body: the request.
            max_new_tokens: from `fit`.
            top_p: the default of the endpoint.
            report: further fields of `SamplingParams`.
        """
        if self.config.moonshot_params:
            _check_moonshot(body)
        biases = body.biases
        if biases:
            check_ids(self.tok, list(biases), param="logit_bias")
        own = tuple(body.stop_token_ids or ())
        return SamplingParams(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=top_p if body.top_p is None else body.top_p,
            top_k=max(body.top_k or 0, 0),
            min_p=body.min_p or 0.0,
            max_new_tokens=max_new_tokens,
            stop_token_ids=own if body.ignore_eos else tuple(dict.fromkeys((*self.tok.stop_ids, *own))),
            ignore_eos=bool(body.ignore_eos),
            seed=body.seed,
            frequency_penalty=body.frequency_penalty or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
            repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
            logit_bias=biases,
            **report,
        )


def _check_moonshot(body: Sampling) -> None:
    """Refuse what vendors of Moonshot's models must refuse."""
    rules = (
        ("temperature", body.temperature is None or 0 <= body.temperature <= 1, "must be in [0, 1]"),
        ("top_p", body.top_p is None or body.top_p == 0.95, "must be 0.95"),
        ("frequency_penalty", not body.frequency_penalty, "must be 0"),
        ("presence_penalty", not body.presence_penalty, "must be 0"),
        ("n", body.n in (None, 1), "must be 1"),
        ("stop", len(body.stops) <= 5, "takes at most 5 strings"),
        ("stop", all(len(text.encode(errors="replace")) <= 32 for text in body.stops), "strings have at most 32 bytes"),
    )
    for name, is_kept, promise in rules:
        if not is_kept:
            raise RequestError(f"{name} {promise} on this server (--moonshot-params)", param=name)


def seeded(params: SamplingParams, index: int) -> SamplingParams:
    """Give each answer its own seed: equal seeds would give equal answers."""
    if params.seed is None or index == 0:
        return params
    return dataclasses.replace(params, seed=params.seed + index)


def new_rid(prefix: str) -> str:
    """A name for a request."""
    return f"{prefix}{uuid.uuid4().hex}"
