"""What goes into the engine and what comes out: sampling parameters, requests, outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from k3lib.errors import RequestError

__all__ = ["FinishReason", "Output", "Request", "SamplingParams", "StepOutput"]

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the next token, and when to stop.

    Attributes:
        temperature: 0 is greedy (ties go to the lowest id).
        top_p: keep the smallest set of tokens whose probability reaches this value, in (0, 1].
        top_k: keep this many tokens; 0 keeps all.
        max_new_tokens: upper bound of generated tokens, the stop id included; 0 generates nothing.
        stop_token_ids: ids that end the request besides the model's eos id.
        ignore_eos: do not stop at the model's eos id.
        seed: makes the draw of this request reproducible, whatever else is in the batch.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RequestError(
                f"temperature must be a finite number >= 0, got {self.temperature}",
                param="temperature",
            )
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be in (0, 1], got {self.top_p}", param="top_p")
        if self.top_k < 0:
            raise RequestError(f"top_k must be >= 0 (0 = all), got {self.top_k}", param="top_k")
        if self.max_new_tokens < 0:
            raise RequestError(f"max_new_tokens must be >= 0, got {self.max_new_tokens}", param="max_new_tokens")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))


@dataclass(slots=True)
class Request:
    """One prompt with its parameters. `request_id=None` lets the engine choose a name."""

    prompt_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    request_id: str | None = None

    @property
    def name(self) -> str:
        """The id, once the request has one."""
        assert self.request_id is not None, "the engine names a request when it takes it"
        return self.request_id


class StepOutput(NamedTuple):
    """New tokens of one request after one engine step.

    `token_ids` include the stop id that ended the request; `finish` is None while it goes on.
    """

    token_ids: list[int]
    finish: FinishReason | None
    logprobs: None = None
    cached_tokens: int | None = None
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """A finished request. `token_ids` include the stop id that ended it."""

    request_id: str
    prompt_ids: list[int]
    token_ids: list[int]
    finish: FinishReason
