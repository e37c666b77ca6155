"""The flags of `k3lib-serve`: names, defaults and help are those of the dataclasses below."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import tyro  # noqa: TC002 - tyro itself reads the annotations

from k3lib.engine.config import EngineConfig
from k3lib.errors import ConfigError
from k3lib.parallel import ParallelConfig
from k3lib.server.image_input import ImageLimits
from k3lib.server.logs import LogFormat  # noqa: TC001 - tyro reads it
from k3lib.server.vision import VisionFlags
from k3lib.spec.proposer import SpecConfig

__all__ = ["ApiConfig", "CompatibilityConfig", "ModelConfig", "NetworkConfig", "ServeConfig", "SpeculationConfig"]

DType = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which weights, and where they run."""

    model_path: str | None = None
    """Folder or hub name; the built-in k3lib-nano if left out."""
    revision: str | None = None
    """Of a hub name."""
    tokenizer_path: str | None = None
    """Folder with tiktoken.model, or "bytes"; default: the model folder."""
    served_model_name: str | None = None
    """Name in the API; default: the model path."""
    dtype: DType = "auto"
    """Of the weights and activations; auto: as stored, float32 on a CPU for the built-in model."""
    device: str | None = None
    """Default: the accelerator if there is one."""
    resident_experts: int | None = None
    """Hold so many routed experts of each layer in memory and read the others from their files when needed."""


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """Where to listen, and how to end."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 30000
    """Port to listen on."""
    drain_timeout: float = 30.0
    """After SIGTERM or SIGINT: seconds for running requests to end; new ones get 503. A second signal ends at once."""
    watchdog_timeout: float = 300.0
    """End the process if one step of the engine takes so many seconds; 0 waits for ever."""
    rank_timeout: float = 30.0
    """With many ranks: end if another one gives no sign of life for so many seconds."""
    log_level: Literal["debug", "info", "warning", "error"] | None = None
    """Default: K3LIB_LOG, or info."""
    log_format: LogFormat = "text"
    """json: one object a line."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be in 0..65535, got {self.port}")
        for name in ("drain_timeout", "watchdog_timeout"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be >= 0, got {getattr(self, name)}")
        if not self.rank_timeout > 0:
            raise ConfigError(f"rank_timeout must be > 0, got {self.rank_timeout}")


@dataclass(frozen=True, kw_only=True)
class ApiConfig:
    """Who may ask, and what."""

    api_key: str | None = None
    """Demand this bearer token; without, everybody who reaches the port may ask."""
    admin_api_key: str | None = None
    """Demand this one for flushing, new weights and aborting all; default: the API key."""
    cors_origins: tuple[str, ...] = ()
    """Let pages of these origins ask, e.g. http://localhost:3000; * is every page."""
    max_body_bytes: int = 64 << 20
    """Answer larger bodies with 413."""
    allow_auto_truncate: bool = False
    """Cut a prompt to its last tokens, or the answer, where they exceed the context, instead of refusing."""
    log_requests: bool = False
    """Write what is asked into the log, prompts included."""
    require_grammar: bool = False
    """Do not start without what JSON answers, forced calls and strict tools need."""
    moonshot_params: bool = False
    """Refuse the sampling parameters that vendors of Moonshot's models must refuse."""

    def __post_init__(self) -> None:
        for name in ("api_key", "admin_api_key"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name} must not be empty")
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes must be >= 1, got {self.max_body_bytes}")


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Let a draft propose tokens, which the model checks several at once; the answers stay the model's."""

    speculative_algorithm: Literal["DSPARK", "DFLASH", "NGRAM"] | None = None
    """Who proposes: a draft model, or what followed the same tokens earlier (NGRAM)."""
    speculative_draft_model_path: str | None = None
    """Folder of the draft model, or of a model with a draft in dspark/, as k3lib-nano."""
    speculative_dspark_block_size: int | None = None
    """Most draft tokens of a step; default: the draft's own, 7 for NGRAM."""
    speculative_dflash_block_size: int | None = None
    """The same for DFLASH, whose sizes count the token in front of the draft too."""
    speculative_num_draft_tokens: int | None = None
    """Tokens of a verify step: one more than the block size, and it must be."""
    speculative_accept: Literal["chain", "block"] = "chain"
    """Rule for drawn tokens: one by one, or block verification, which accepts more."""
    speculative_adaptive: bool = False
    """Shorten drafts that are not likely to be accepted."""
    speculative_max_batch: int | None = None
    """With more running requests, decode plainly."""
    speculative_rollback: Literal["replay", "states"] = "replay"
    """What keeps the recurrent state exact: the inputs of each step, or a state for every token of it."""
    speculative_simulate_accept_len: float | None = None
    """Make up acceptance of so many tokens a step, to measure speed; the answers are of no use."""
    enable_linear_replayssm_spec: bool = False
    """Another server's name for --speculative-rollback replay, the default here."""

    def __post_init__(self) -> None:
        if self.speculative_algorithm is None:
            for name, value in vars(self).items():
                if value != type(self).__dataclass_fields__[name].default:
                    raise ConfigError(f"--{name.replace('_', '-')} {value} needs --speculative-algorithm")
            return
        if self.speculative_algorithm != "NGRAM" and self.speculative_draft_model_path is None:
            raise ConfigError(
                f"--speculative-algorithm {self.speculative_algorithm} needs --speculative-draft-model-path"
            )
        if self.enable_linear_replayssm_spec and self.speculative_rollback == "states":
            raise ConfigError("--enable-linear-replayssm-spec contradicts --speculative-rollback states")
        tokens, size = self.speculative_num_draft_tokens, self.block_size
        if tokens is not None and (tokens < 2 or (size is not None and tokens != size + 1)):
            raise ConfigError(
                f"--speculative-num-draft-tokens {tokens} must be the block size and one more, at least 2; the block "
                f"size is {size if size is not None else 'the default'}"
            )

    @property
    def block_size(self) -> int | None:
        """Most draft tokens of a step, if a flag says it."""
        size = self.speculative_dspark_block_size
        if self.speculative_algorithm == "DFLASH" and self.speculative_dflash_block_size is not None:
            size = self.speculative_dflash_block_size - 1
        if size is None and self.speculative_num_draft_tokens is not None:
            size = self.speculative_num_draft_tokens - 1
        return size

    def spec(self) -> SpecConfig | None:
        """What the engine is told."""
        if self.speculative_algorithm is None:
            return None
        return SpecConfig(
            draft="ngram" if self.speculative_algorithm == "NGRAM" else str(self.speculative_draft_model_path),
            block_size=self.block_size,
            accept=self.speculative_accept,
            rollback=self.speculative_rollback,
            simulate_accept_len=self.speculative_simulate_accept_len,
            adaptive=self.speculative_adaptive,
            max_batch=self.speculative_max_batch,
        )


@dataclass(frozen=True, kw_only=True)
class CompatibilityConfig:
    """Flags of other servers that change nothing: what they turn on is always on."""

    reasoning_parser: Literal["kimi_k3"] | None = None
    """Reasoning is always parsed."""
    tool_call_parser: Literal["kimi_k3"] | None = None
    """Tool calls are always parsed."""
    enable_metrics: bool = False
    """/metrics is always there."""
    enable_cache_report: bool = False
    """Usage always says what was cached."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Serve a model over HTTP with OpenAI's API. Without a model: the built-in k3lib-nano, on the CPU."""

    model: tyro.conf.OmitArgPrefixes[ModelConfig] = field(default_factory=ModelConfig)
    network: tyro.conf.OmitArgPrefixes[NetworkConfig] = field(default_factory=NetworkConfig)
    api: tyro.conf.OmitArgPrefixes[ApiConfig] = field(default_factory=ApiConfig)
    engine: tyro.conf.OmitArgPrefixes[EngineConfig] = field(default_factory=EngineConfig)
    vision: tyro.conf.OmitArgPrefixes[VisionFlags] = field(default_factory=VisionFlags)
    images: tyro.conf.OmitArgPrefixes[ImageLimits] = field(default_factory=ImageLimits)
    speculation: tyro.conf.OmitArgPrefixes[SpeculationConfig] = field(default_factory=SpeculationConfig)
    parallel: tyro.conf.OmitArgPrefixes[ParallelConfig] = field(default_factory=ParallelConfig)
    compatibility: tyro.conf.OmitArgPrefixes[CompatibilityConfig] = field(default_factory=CompatibilityConfig)
