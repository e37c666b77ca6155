"""What one token, one slot and one request cost, in bytes and slots. Pure arithmetic.

Letters, as in the published ratio calculator: S state slots that a request holds, D states kept inside a verify window,
L tokens of a mean request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Literal, get_args

from k3lib.config import KimiK3Config
from k3lib.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3lib.config import KDAConfig, LayerKind, TextConfig
    from k3lib.draft_config import DraftConfig

Strategy = Literal["auto", "no_buffer", "extra_buffer", "extra_buffer_lazy"]

DRAFT_BYTES = 1400  # draft KV of a token, the constant of the published calculator
MEAN_REQUEST_TOKENS = 11264

ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1}
WIDE = tuple(name for name in ITEMSIZES if name != "fp8_e4m3")
# a server without a role and one that leaves images to others hold the same cache
ROLES = {None: None, "null": None, "unified": None, "language-only": None, "prefill": "prefill", "decode": "decode"}


# ---- bytes of one unit ----------------------------------------------------------------------------


def kv_bytes_per_token(text: TextConfig, *, itemsize: int = 2, dcp_size: int = 1) -> float:
    """Bytes of latent KV per token and rank, over all MLA layers (model specification, section 5).

    Args:
        text: the text model.
        itemsize: bytes of one value: 2 for bf16, 1 for fp8.
        dcp_size: ranks that share the tokens.
    """
    return len(text.layers_of("mla")) * text.mla.latent_width * itemsize / dcp_size


def state_bytes_per_slot(text: TextConfig, *, state_itemsize: int = 4, conv_itemsize: int = 2, tp_size: int = 1) -> int:
    """Bytes of one request's KDA state per rank, over all KDA layers: recurrent matrix and convolution window.

    Args:
        text: the text model.
        state_itemsize: bytes of one state value: 4 for fp32, 2 for bf16.
        conv_itemsize: bytes of one convolution input, the activation dtype.
        tp_size: ranks that share the heads.
    """
    return len(text.layers_of("kda")) * layer_state_bytes(text.kda, state_itemsize, conv_itemsize) // tp_size


def replay_bytes_per_slot(text: TextConfig, *, cache_len: int = 16, itemsize: int = 2, tp_size: int = 1) -> int:
    """Bytes of the recorded inputs from which a verify window is replayed, per slot and rank, over all KDA layers.

    A position holds the value and key as they came and as the recurrence used them, the write strength and the decay.

    Args:
        text: the text model.
        cache_len: positions of the ring.
        itemsize: bytes of a recorded key or value, the activation dtype; strength and decay are fp32.
        tp_size: ranks that share the heads.
    """
    return len(text.layers_of("kda")) * layer_replay_bytes(text.kda, cache_len, itemsize) // tp_size


def draft_bytes_per_token(draft: DraftConfig, *, itemsize: int = 2, tp_size: int = 1) -> int:
    """Bytes of a draft's own KV per token and rank, over all its layers.

    An MLA draft keeps one latent on every rank; a draft with grouped heads shares or repeats them.

    Args:
        draft: the draft model.
        itemsize: bytes of one value.
        tp_size: ranks of an attention group.

    Raises:
        ConfigError: the heads can be neither shared nor repeated evenly.
    """
    if draft.mla is not None:
        return draft.num_layers * draft.mla.latent_width * itemsize
    return grouped_kv_bytes(draft.num_kv_heads, draft.head_dim, draft.num_layers, itemsize=itemsize, tp_size=tp_size)


def grouped_kv_bytes(heads: int, head_dim: int, layers: int, *, itemsize: int = 2, tp_size: int = 1) -> int:
    """Bytes of keys and values per token and rank of attention with grouped heads, over all its layers.

    Args:
        heads: of keys and values, shared or repeated over the ranks.
        head_dim: of both.
        layers: of the draft.
        itemsize: bytes of one value.
        tp_size: ranks of an attention group.

    Raises:
        ConfigError: the heads can be neither shared nor repeated evenly.
    """
    if heads % tp_size and tp_size % heads:
        raise ConfigError(f"tp_size={tp_size} neither divides the {heads} KV heads of the draft nor is a multiple")
    return max(1, heads // tp_size) * 2 * head_dim * layers * itemsize


def layer_state_bytes(kda: KDAConfig, state_itemsize: int, conv_itemsize: int) -> int:
    """Bytes of one slot in one KDA layer, all heads: recurrent matrix and convolution window."""
    matrix = kda.num_heads * kda.key_dim * kda.value_dim * state_itemsize
    window = (kda.conv_width - 1) * kda.conv_channels * conv_itemsize
    return matrix + window


def layer_replay_bytes(kda: KDAConfig, cache_len: int, itemsize: int) -> int:
    """Bytes of one replay ring in one KDA layer, all heads."""
    recorded = 2 * (kda.key_dim + kda.value_dim) * itemsize
    return kda.num_heads * cache_len * (recorded + 4 * kda.key_dim + 4)


# ---- slots a request, and the ratio ---------------------------------------------------------------


def slots_per_request(
    strategy: str = "auto",
    *,
    disable_radix_cache: bool = False,
    role: str | None = None,
    disable_overlap_schedule: bool = False,
    pp_size: int = 1,
    skip_decode_lock: bool = False,
) -> int:
    """State slots that one running request may hold at its peak (serving specification, section 2).

    Args:
        strategy: "no_buffer", "extra_buffer", "extra_buffer_lazy", or "auto", which is "extra_buffer".
        disable_radix_cache: nothing is kept for later requests, so the running state is all there is.
        role: "prefill", "decode" (which has no prefix cache) or None.
        disable_overlap_schedule: one tracked snapshot is enough.
        pp_size: pipeline stages; more than one switches the overlap scheduler off.
        skip_decode_lock: a decoding request does not hold the checkpoint it started from.

    Raises:
        ConfigError: an unknown strategy or role.
    """
    name, role = strategy_of(strategy), role_of(role)
    check_count("pp_size", pp_size)
    if disable_radix_cache or role == "decode":
        return 1
    if name == "no_buffer":
        return 3
    ahead = name == "extra_buffer" and not disable_overlap_schedule and pp_size == 1
    return (2 if skip_decode_lock else 3) + (2 if ahead else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioTerms:
    """What `state_kv_ratio` multiplies. Names and values are those of the published calculator.

    Attributes:
        attn_tp: ranks that share the heads of one attention group.
        S: state slots a request.
        D: further states a request while a verify window is checked.
        state_bytes: one slot on one rank.
        mla_kv_bytes_per_token: latent KV of a token before context parallelism.
        draft_kv_bytes_per_token: the draft's KV of a token, which every rank keeps.
        kv_bytes_per_token_per_rank: both, on one rank.
        ratio: bytes of states over bytes of tokens of a mean request.
    """

    attn_tp: int
    S: int
    D: int
    state_bytes: int
    mla_kv_bytes_per_token: int
    draft_kv_bytes_per_token: int
    kv_bytes_per_token_per_rank: float
    ratio: float

    @property
    def flag(self) -> str:
        """The value for `--mamba-full-memory-ratio`."""
        return format_ratio(self.ratio)


def ratio_terms(  # noqa: PLR0913 - the inputs of the published calculator
    config: KimiK3Config | TextConfig,
    *,
    tp_size: int = 1,
    dp_size: int = 1,
    pp_size: int = 1,
    dcp_size: int = 1,
    kv_cache_dtype: str = "auto",
    mamba_ssm_dtype: str = "float32",
    mamba_radix_cache_strategy: str = "auto",
    disable_radix_cache: bool = False,
    skip_decode_lock: bool = False,
    disable_overlap_schedule: bool = False,
    speculative: bool = False,
    replayssm_spec: bool = False,
    dspark_block_size: int = 7,
    disaggregation_mode: str | None = None,
    avg_request_length: float = MEAN_REQUEST_TOKENS,
    draft_cell_bytes: int | None = None,
    dtype: str | None = None,
) -> RatioTerms:
    """The ratio at which states and tokens run out together, with its terms.

    `(S + D) · state_bytes / (L · (mla_kv_bytes / dcp_size + draft_kv_bytes))`. Pipeline stages split both pools alike,
    so `pp_size` matters only for S.

    Args:
        config: the model.
        tp_size, dp_size, pp_size, dcp_size: the layout. `dp_size` workers share the `tp_size` ranks for attention.
        kv_cache_dtype: of the latent KV; "auto" is the activation dtype.
        mamba_ssm_dtype: of the recurrent state.
        mamba_radix_cache_strategy, disable_radix_cache, skip_decode_lock, disable_overlap_schedule: see
            `slots_per_request`.
        speculative: a draft proposes `dspark_block_size` tokens.
        replayssm_spec: rejected tokens are undone by replaying, not by keeping the state after each.
        disaggregation_mode: "prefill", "decode" or None.
        avg_request_length: L, mean prompt plus output in tokens.
        draft_cell_bytes: the draft's KV of a token and rank; None is 1400, the calculator's constant.
        dtype: of the activations; None is that of the model, bfloat16 for a `TextConfig`.

    Raises:
        ConfigError: a value is out of range, the layout does not divide the model, or one of the pools is empty.
    """
    text, activations = text_of(config, dtype)
    length = check_number("avg_request_length", avg_request_length)
    check_count("dspark_block_size", dspark_block_size)
    attn_tp = attention_width(text, tp_size, dp_size, dcp_size)
    role = role_of(disaggregation_mode)
    slots = slots_per_request(
        mamba_radix_cache_strategy,
        disable_radix_cache=disable_radix_cache,
        role=role,
        disable_overlap_schedule=disable_overlap_schedule,
        pp_size=pp_size,
        skip_decode_lock=skip_decode_lock,
    )
    window = dspark_block_size + 1 if speculative and not replayssm_spec and role != "prefill" else 0
    kv_itemsize = itemsize_of("kv_cache_dtype", kv_cache_dtype, auto=activations)
    state = state_bytes_per_slot(
        text,
        state_itemsize=itemsize_of("mamba_ssm_dtype", mamba_ssm_dtype, allowed=WIDE),
        conv_itemsize=ITEMSIZES[activations],
        tp_size=attn_tp,
    )
    latent = int(kv_bytes_per_token(text, itemsize=kv_itemsize))
    draft = check_draft_cell(draft_cell_bytes) if speculative else 0
    token = latent / dcp_size + draft
    if not state or not token:
        empty, other = ("KDA", "states") if not state else ("MLA", "tokens")
        raise ConfigError(f"a model without {empty} layers has no ratio: its {other} take no memory")
    return RatioTerms(
        attn_tp=attn_tp,
        S=slots,
        D=window,
        state_bytes=state,
        mla_kv_bytes_per_token=latent,
        draft_kv_bytes_per_token=draft,
        kv_bytes_per_token_per_rank=token,
        ratio=(slots + window) * state / (length * token),
    )


def state_kv_ratio(  # noqa: PLR0913 - the inputs of the published calculator
    config: KimiK3Config | TextConfig,
    *,
    tp_size: int = 1,
    dp_size: int = 1,
    pp_size: int = 1,
    dcp_size: int = 1,
    kv_cache_dtype: str = "auto",
    mamba_ssm_dtype: str = "float32",
    mamba_radix_cache_strategy: str = "auto",
    disable_radix_cache: bool = False,
    skip_decode_lock: bool = False,
    disable_overlap_schedule: bool = False,
    speculative: bool = False,
    replayssm_spec: bool = False,
    dspark_block_size: int = 7,
    disaggregation_mode: str | None = None,
    avg_request_length: float = MEAN_REQUEST_TOKENS,
    draft_cell_bytes: int | None = None,
    dtype: str | None = None,
) -> float:
    """The ratio of `ratio_terms`, which explains the arguments, alone."""
    return ratio_terms(
        config,
        tp_size=tp_size,
        dp_size=dp_size,
        pp_size=pp_size,
        dcp_size=dcp_size,
        kv_cache_dtype=kv_cache_dtype,
        mamba_ssm_dtype=mamba_ssm_dtype,
        mamba_radix_cache_strategy=mamba_radix_cache_strategy,
        disable_radix_cache=disable_radix_cache,
        skip_decode_lock=skip_decode_lock,
        disable_overlap_schedule=disable_overlap_schedule,
        speculative=speculative,
        replayssm_spec=replayssm_spec,
        dspark_block_size=dspark_block_size,
        disaggregation_mode=disaggregation_mode,
        avg_request_length=avg_request_length,
        draft_cell_bytes=draft_cell_bytes,
        dtype=dtype,
    ).ratio


def format_ratio(ratio: float) -> str:
    """The flag text of a ratio: one decimal from 10, two from 1, two significant digits below; no trailing zeros."""
    value = check_number("ratio", ratio)
    if value >= 10:
        text = f"{value:.1f}"
    elif value >= 1:
        text = f"{value:.2f}"
    else:
        text = format(Decimal(f"{value:.1e}"), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


# ---- checks ---------------------------------------------------------------------------------------


def check_count(name: str, value: int, *, least: int = 1) -> int:
    """The value if it is a whole number and large enough."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be an integer >= {least}, got {value!r}")
    return value


def check_draft_cell(value: int | None) -> int:
    """Bytes of draft KV of a token; None is the published constant."""
    return DRAFT_BYTES if value is None else check_count("draft_cell_bytes", value, least=0)


def check_number(name: str, value: float, *, zero: bool = False) -> float:
    """The value if it is a finite number above zero, or zero where that is allowed."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{name} must be a finite number, got {value!r}")
    if value < 0 or (value == 0 and not zero):
        raise ConfigError(f"{name} must be {'>= 0' if zero else '> 0'}, got {value!r}")
    return value


def text_of(config: KimiK3Config | TextConfig, dtype: str | None) -> tuple[TextConfig, str]:
    """The text model and the activation dtype."""
    own = config.dtype if isinstance(config, KimiK3Config) else "bfloat16"
    activations = own if dtype is None else dtype
    itemsize_of("dtype", activations, allowed=WIDE)
    return (config.text if isinstance(config, KimiK3Config) else config), activations


def itemsize_of(name: str, dtype: str, *, allowed: tuple[str, ...] = tuple(ITEMSIZES), auto: str | None = None) -> int:
    """Bytes of one value of a dtype; `auto` is what "auto" stands for, if it is allowed."""
    found = auto if dtype == "auto" and auto is not None else dtype
    if found not in allowed:
        names = ("auto", *allowed) if auto is not None else allowed
        raise ConfigError(f"{name}={dtype!r}; expected one of {', '.join(names)}")
    return ITEMSIZES[found]


def strategy_of(name: str) -> str:
    """The strategy behind a name. Unlike the published calculator this refuses a name it does not know."""
    if name not in get_args(Strategy):
        raise ConfigError(f"mamba_radix_cache_strategy={name!r}; expected one of {', '.join(get_args(Strategy))}")
    return "extra_buffer" if name == "auto" else name


def role_of(role: str | None) -> str | None:
    """The role as the planner tells roles apart: "prefill", "decode" or None."""
    if role == "encoder-only":
        raise ConfigError("role='encoder-only' has no cache to plan")
    if role not in ROLES:
        raise ConfigError(f"role={role!r}; expected one of {', '.join(str(name) for name in ROLES)}")
    return ROLES[role]


def attention_width(text: TextConfig, tp_size: int, dp_size: int, dcp_size: int) -> int:
    """Ranks of one attention group, if the layout fits the model."""
    for name, value in (("tp_size", tp_size), ("dp_size", dp_size), ("dcp_size", dcp_size)):
        check_count(name, value)
    if tp_size % dp_size:
        raise ConfigError(f"dp_size={dp_size} must divide tp_size={tp_size}: each worker has an attention group")
    width = tp_size // dp_size
    heads = {"KDA": text.kda.num_heads, "MLA": text.mla.num_heads}
    for kind, count in heads.items():
        if text.layers_of("kda" if kind == "KDA" else "mla") and count % width:
            raise ConfigError(
                f"tp_size={tp_size} over dp_size={dp_size} is {width} ranks an attention group, which does not divide "
                f"the {count} {kind} heads; use a divisor of {count}"
            )
    if width % dcp_size:
        raise ConfigError(
            f"dcp_size={dcp_size} must divide the {width} ranks of an attention group (tp_size={tp_size}, "
            f"dp_size={dp_size}): DCP ranks are taken from it"
        )
    return width


def most_in_a_stage(text: TextConfig, kind: LayerKind, pp_size: int, partition: Sequence[int] | None = None) -> int:
    """Most layers of a kind in one pipeline stage.

    Args:
        text: the text model.
        kind: "kda" or "mla".
        pp_size: stages.
        partition: layers of each; None splits evenly, the last stages one layer longer if it does not divide.

    Raises:
        ConfigError: more stages than layers, or a partition that does not add up.
    """
    check_count("pp_size", pp_size)
    if partition is not None:
        counts = [check_count("pp_partition", count) for count in partition]
        if (len(counts), sum(counts)) != (pp_size, text.num_layers):
            raise ConfigError(
                f"pp_partition={tuple(counts)} has {len(counts)} stages with {sum(counts)} layers, expected pp_size="
                f"{pp_size} with {text.num_layers}"
            )
    elif pp_size > text.num_layers:
        raise ConfigError(f"pp_size={pp_size} exceeds the {text.num_layers} layers")
    else:
        base, longer = divmod(text.num_layers, pp_size)
        counts = [base + (stage >= pp_size - longer) for stage in range(pp_size)]
    ends = list(accumulate(counts))
    layers = text.layers_of(kind)
    return max(sum(start <= layer < end for layer in layers) for start, end in pairwise([0, *ends]))
