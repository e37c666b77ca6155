"""Request and response models of the HTTP API."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel, StrictBool, StrictInt
from typing_extensions import NotRequired, TypedDict

from k3lib.errors import RequestError

__all__ = [
    "AbortRequest",
    "ChatAnswer",
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatLogprobs",
    "ChatMessage",
    "ChatRequest",
    "CommonRequest",
    "Completion",
    "CompletionAnswer",
    "CompletionChoice",
    "CompletionLogprobs",
    "CompletionRequest",
    "DetokenizeRequest",
    "ErrorAnswer",
    "ErrorBody",
    "ErrorResponse",
    "GenerateParams",
    "GenerateRequest",
    "TokenizeRequest",
    "UpdateWeightsRequest",
    "Usage",
]

Object = dict[str, object]
Finish = Literal["stop", "length", "tool_calls"]

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_IDS = 1024
MAX_BIASES = 4096
MAX_PROMPTS = 2048  # answers of one request: prompts times n
MAX_TOP = 20
MAX_RID = 256

# Fields of other servers that change nothing here.
IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "prediction",  # speeds up, elsewhere
        "verbosity",  # a hint
        "web_search_options",
        "stream_reasoning",
        "spaces_between_special_tokens",
    }
)

# Fields that this version does not have, and the values that ask for nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "separate_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
}

# What took the place of old fields.
SUCCESSORS = {"functions": "tools", "function_call": "tool_choice"}

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Natural = Annotated[int, Field(strict=True, ge=0)]
RequestId = Annotated[str, Field(pattern="^[!-~]+$", max_length=MAX_RID)]  # goes into a header
Seconds = Annotated[Number, Field(gt=0, le=1e7)]
Biases = Annotated[dict[str, Annotated[Number, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)]
StopIds = Annotated[list[Natural], Field(max_length=MAX_STOP_IDS)]
Penalty = Annotated[Number, Field(ge=-2, le=2)]


class StreamOptions(BaseModel):
    """What a stream carries besides the answer."""

    include_usage: StrictBool | None = None
    continuous_usage_stats: StrictBool | None = None


class OpenRequest(BaseModel):
    """A request that may have fields this version does not know."""

    model_config = ConfigDict(extra="allow")

    def refuse_unsupported(self) -> None:
        """Raise RequestError for a field that would have to change the answer but cannot."""
        for name, value in (self.model_extra or {}).items():
            if value is None or name in IGNORED:
                continue
            if name not in NEUTRAL:
                raise RequestError(f"unknown field {name[:80]!r}", param=name[:80])
            if not any(_is_same(value, neutral) for neutral in NEUTRAL[name]):
                instead = f"use {SUCCESSORS[name]}" if name in SUCCESSORS else f"send {NEUTRAL[name][0]!r}"
                raise RequestError(
                    f"{name}={str(value)[:80]} is not supported by this version; leave it out or {instead}", param=name
                )


class Sampling(OpenRequest):
    """How to choose tokens; what all endpoints that generate have in common. An explicit null means absent."""

    temperature: Annotated[Number, Field(ge=0)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[Number, Field(gt=0)] | None = None
    logit_bias: Biases | None = None
    seed: StrictInt | None = None
    n: Annotated[int, Field(strict=True, ge=1, le=MAX_CHOICES)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: StrictBool | None = None

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
    def biases(self) -> dict[int, float] | None:
        """The values of `logit_bias` by token id."""
        if not self.logit_bias:
            return None
        bad = next((key for key in self.logit_bias if not (key.isascii() and key.isdigit())), None)
        if bad is not None:
            raise RequestError(f"logit_bias maps token ids to values, got the key {bad[:80]!r}", param="logit_bias")
        return {int(key): value for key, value in self.logit_bias.items()}


class CommonRequest(Sampling):
    """Fields that both completion endpoints share."""

    model: str
    max_tokens: Natural | None = None
    min_tokens: Natural | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    priority: StrictInt | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_RID)] | None = None
    timeout: Seconds | None = None
    rid: RequestId | None = None
    request_id: RequestId | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def always_includes_usage(self) -> bool:
        """Whether every chunk of a stream carries the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class ChatFields(BaseModel):
    """What decides the prompt of a chat.

    Messages and tools stay as received: the prompt repeats the client's own text.
    """

    messages: list[Object]
    tools: list[Object] | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: StrictBool | None = None
    reasoning_effort: str | None = None
    thinking: Object | None = None
    chat_template_kwargs: Object | None = None
    response_format: Object | None = None
    continue_final_message: StrictBool | None = None
    add_generation_prompt: StrictBool | None = None


class ChatRequest(ChatFields, CommonRequest):
    """Body of `POST /v1/chat/completions`."""

    max_completion_tokens: Natural | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_TOP)] | None = None
    skip_special_tokens: StrictBool | None = None

    @property
    def num_top(self) -> int:
        """How many of the best tokens to name at each place."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        return self.top_logprobs or 0


class CompletionRequest(CommonRequest):
    """Body of `POST /v1/completions`."""

    prompt: str | list[StrictInt] | list[str] | list[list[StrictInt]]
    echo: StrictBool | None = None
    logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_TOP)] | None = None
    skip_special_tokens: StrictBool | None = None


class TokenizeRequest(BaseModel):
    """Body of `POST /tokenize`: a raw prompt, or the fields of a chat."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    prompt: str | list[str] | None = None
    messages: list[Object] | None = None


class DetokenizeRequest(BaseModel):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[StrictInt] | list[list[StrictInt]]


class GenerateParams(Sampling):
    """`sampling_params` of `POST /generate`."""

    max_new_tokens: Natural | None = None
    min_new_tokens: Natural | None = None
    skip_special_tokens: StrictBool | None = None
    json_schema: str | Object | None = None
    regex: str | None = None
    ebnf: str | None = None


class GenerateRequest(OpenRequest):
    """Body of `POST /generate`."""

    text: str | list[str] | None = None
    input_ids: list[StrictInt] | list[list[StrictInt]] | None = None
    sampling_params: GenerateParams | list[GenerateParams] | None = None
    rid: RequestId | None = None
    stream: StrictBool | None = None
    return_logprob: StrictBool | None = None
    logprob_start_len: Annotated[int, Field(strict=True, ge=-1)] | None = None
    top_logprobs_num: Annotated[int, Field(strict=True, ge=0, le=MAX_TOP)] | None = None
    return_text_in_logprobs: StrictBool | None = None
    priority: StrictInt | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_RID)] | None = None
    timeout: Seconds | None = None
    image_data: object | None = None


class AbortRequest(BaseModel):
    """Body of `POST /abort_request`."""

    rid: str | None = None
    request_id: str | None = None
    abort_all: StrictBool | None = None


class UpdateWeightsRequest(BaseModel):
    """Body of `POST /update_weights`."""

    model_config = ConfigDict(extra="forbid")

    model_path: Annotated[str, Field(min_length=1)]
    revision: str | None = None
    keep_cache: StrictBool = False


# Responses are plain dictionaries: they are made for every token of a stream.


class ErrorBody(TypedDict):
    """The inner object of an error response."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(TypedDict):
    """Every error, whatever the endpoint."""

    error: ErrorBody


class CompletionDetails(TypedDict):
    """What the generated tokens were, and what speculation did for them: only on a server that speculates."""

    reasoning_tokens: NotRequired[int]
    accepted_prediction_tokens: NotRequired[int]
    rejected_prediction_tokens: NotRequired[int]
    accepted_by_position: NotRequired[list[int]]
    verify_steps: NotRequired[int]
    simulated_acceptance: NotRequired[bool]
    speculation_refused: NotRequired[str]


class PromptDetails(TypedDict):
    """How much of the prompt was not computed, and whose KV and state were found."""

    cached_tokens: int
    cached_kv_tokens: NotRequired[int]
    cached_state_tokens: NotRequired[int]


class Usage(TypedDict):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: NotRequired[CompletionDetails]
    prompt_tokens_details: NotRequired[PromptDetails]


class FunctionCall(TypedDict):
    """Name and arguments of a tool call."""

    name: str
    arguments: str


class MessageToolCall(TypedDict):
    """A tool call of a message."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(TypedDict, total=False):
    """The answer of the model."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None
    refusal: None
    tool_calls: list[MessageToolCall]


class FunctionCallPiece(TypedDict):
    """The name of a tool call, or a piece of its arguments."""

    name: NotRequired[str]
    arguments: str


class ToolCallPiece(TypedDict):
    """A piece of the streamed tool call at `index`; the first one has all fields, the others `arguments`."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionCallPiece


class ChatDelta(TypedDict, total=False):
    """A piece of a streamed answer."""

    role: Literal["assistant"]
    content: str
    reasoning_content: str
    tool_calls: list[ToolCallPiece]


class ChatTokenTop(TypedDict):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(ChatTokenTop):
    """A generated token, and the best tokens of its place."""

    top_logprobs: list[ChatTokenTop]


class ChatLogprobs(TypedDict):
    """Log-probabilities of an answer, or of a part of it in a stream: one entry a generated token."""

    content: list[ChatToken]
    refusal: None


class ChatChoice(TypedDict):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatCompletion(TypedDict):
    """Response of `POST /v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatChunkChoice(TypedDict):
    """News about one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class ChatChunk(TypedDict):
    """One event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]


class CompletionLogprobs(TypedDict):
    """Log-probabilities of a continuation, of its prompt too with `echo`; lists of equal length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One continuation, or a part of it in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None


class Completion(TypedDict):
    """Response of `POST /v1/completions`, and one event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


# For the OpenAPI document.


class ErrorAnswer(RootModel[ErrorResponse]):
    """Every error, whatever the endpoint."""


class ChatAnswer(RootModel[ChatCompletion]):
    """Response of `POST /v1/chat/completions`."""


class CompletionAnswer(RootModel[Completion]):
    """Response of `POST /v1/completions`."""


def _is_same(value: object, neutral: object) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
