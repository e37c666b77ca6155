"""Request and response models of the HTTP API."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt

from k3lib.errors import RequestError

__all__ = [
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatMessage",
    "ChatRequest",
    "Completion",
    "CompletionChoice",
    "CompletionRequest",
    "ErrorBody",
    "Usage",
]

Object = dict[str, object]
Finish = Literal["stop", "length", "tool_calls"]

MAX_CHOICES = 128
MAX_STOPS = 16

# Fields of other servers that change nothing here.
IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "request_id",
        "rid",
    }
)

# Fields that this version does not have, and the values that ask for nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "best_of": (1,),
    "suffix": ("",),
    "functions": ([],),
    "modalities": (["text"],),
    "separate_reasoning": (True,),
}


class StreamOptions(BaseModel):
    """What a stream carries besides the answer."""

    include_usage: bool | None = None


class CommonRequest(BaseModel):
    """Fields that both completion endpoints share. An explicit null means absent."""

    model_config = ConfigDict(extra="allow")

    model: str
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MAX_STOPS:
            raise RequestError(f"stop takes at most {MAX_STOPS} strings, got {len(stops)}", param="stop")
        if "" in stops:
            raise RequestError("stop strings must not be empty", param="stop")
        return stops

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def refuse_unsupported(self) -> None:
        """Raise RequestError for a field that would have to change the answer but cannot."""
        for name, value in (self.model_extra or {}).items():
            if value is None or name in IGNORED:
                continue
            if name not in NEUTRAL:
                raise RequestError(f"unknown field {name!r}", param=name)
            if not any(_is_same(value, neutral) for neutral in NEUTRAL[name]):
                raise RequestError(
                    f"{name}={str(value)[:80]} is not supported by this version; leave it out or "
                    f"send {NEUTRAL[name][0]!r}",
                    param=name,
                )


class ChatRequest(CommonRequest):
    """Body of `POST /v1/chat/completions`.

    Messages and tools stay as received: the prompt repeats the client's own text.
    """

    messages: list[Object]
    tools: list[Object] | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    reasoning_effort: str | None = None
    thinking: Object | None = None
    chat_template_kwargs: Object | None = None
    response_format: Object | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class CompletionRequest(CommonRequest):
    """Body of `POST /v1/completions`."""

    prompt: str | list[StrictInt] | list[str] | list[list[StrictInt]]
    echo: bool | None = None


class ErrorBody(BaseModel):
    """The inner object of an error response."""

    message: str
    type: str
    param: str | None
    code: str | None


class Usage(BaseModel):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: dict[str, int] | None = None
    prompt_tokens_details: dict[str, int] | None = None


class FunctionCall(BaseModel):
    """Name and arguments of a tool call."""

    name: str
    arguments: str


class MessageToolCall(BaseModel):
    """A tool call of a message; a streamed one has an index."""

    index: int | None = None
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(BaseModel):
    """The answer of the model, or a part of it in a stream."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    tool_calls: list[MessageToolCall] | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: None
    finish_reason: Finish


class ChatCompletion(BaseModel):
    """Response of `POST /v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatChunkChoice(BaseModel):
    """News about one answer."""

    index: int
    delta: ChatMessage
    logprobs: None
    finish_reason: Finish | None


class ChatChunk(BaseModel):
    """One event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionChoice(BaseModel):
    """One continuation, or a part of it in a stream."""

    index: int
    text: str
    logprobs: None
    finish_reason: Finish | None


class Completion(BaseModel):
    """Response of `POST /v1/completions`, and one event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


def _is_same(value: object, neutral: object) -> bool:
    # 0 and False ask for different things: logprobs=0 of /v1/completions wants log-probabilities.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
