"""How to split a memory budget between state slots and token rows. Pure arithmetic on a configuration.

Letters, as in the serving specification: S state slots that a request holds, D states kept inside a verify window,
K state slots of a worker. What one unit costs is in `costs`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from k3lib.cache.costs import (
    ITEMSIZES,
    WIDE,
    RatioTerms,
    Strategy,
    attention_width,
    check_count,
    check_draft_cell,
    check_number,
    draft_bytes_per_token,
    format_ratio,
    itemsize_of,
    kv_bytes_per_token,
    layer_replay_bytes,
    layer_state_bytes,
    most_in_a_stage,
    ratio_terms,
    replay_bytes_per_slot,
    role_of,
    slots_per_request,
    state_bytes_per_slot,
    state_kv_ratio,
    strategy_of,
    text_of,
)
from k3lib.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3lib.config import KimiK3Config, TextConfig, VisionConfig

__all__ = [
    "Limit",
    "MemoryPlan",
    "RatioTerms",
    "Strategy",
    "default_mem_fraction",
    "draft_bytes_per_token",
    "format_ratio",
    "kv_bytes_per_token",
    "plan_memory",
    "ratio_terms",
    "replay_bytes_per_slot",
    "rest_from_memory",
    "slots_per_request",
    "state_bytes_per_slot",
    "state_kv_ratio",
]

Reason = Literal["given", "derived", "default"]

DEFAULT_RATIO = 0.9
DEFAULT_PAGE_SIZE = 64
DEFAULT_WINDOW = 8
DEFAULT_RING = 16
SPECULATIVE_RUNNING = 48  # running requests with speculation, unless somebody says otherwise
MIB = 1 << 20
GIB = 1 << 30
IMAGE_BYTES = 100 * MIB  # kept for images by a server that takes them


# ---- the budget -----------------------------------------------------------------------------------


def rest_from_memory(
    available_bytes: float, total_before_bytes: float, mem_fraction_static: float, mm_reserve_bytes: float = 0
) -> int:
    """Bytes for both pools, from what a device has left after the weights (serving specification, section 1.2).

    Args:
        available_bytes: free now, the least of all ranks.
        total_before_bytes: free before the weights were loaded.
        mem_fraction_static: share of it for weights and pools, up to 1; the others are for activations.
        mm_reserve_bytes: kept for images.

    Raises:
        ConfigError: nothing would be left. The message names the smallest fraction that leaves something.
    """
    available = check_number("available_bytes", available_bytes, zero=True)
    total = check_number("total_before_bytes", total_before_bytes)
    fraction = check_number("mem_fraction_static", mem_fraction_static)
    kept = check_number("mm_reserve_bytes", mm_reserve_bytes, zero=True)
    if fraction > 1:
        raise ConfigError(f"mem_fraction_static must be at most 1, got {fraction}")
    rest = math.floor(available - total * (1 - fraction) - kept)
    if rest > 0:
        return rest
    least = 1 - (available - kept) / total
    advice = (
        f"give a fraction above {math.ceil(round(least * 1000, 6)) / 1000:.3f}"
        if least < 0.9995
        else "no fraction leaves any; use more ranks"
    )
    raise ConfigError(
        f"mem_fraction_static={fraction} leaves nothing for the cache: {available / GIB:.2f} of {total / GIB:.2f} GiB "
        f"are free, {total * (1 - fraction) / GIB:.2f} stay for activations and {kept / GIB:.2f} for images; {advice}"
    )


def default_mem_fraction(  # noqa: PLR0913 - everything that the reserve depends on
    memory_bytes: float,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    dp_size: int = 1,
    role: str | None = None,
    chunked_prefill_size: int | None = None,
    max_running_requests: int | None = None,
    verify_window: int = 1,
    decode_max_bs: int | None = None,
    mla_prefill_graphs: bool = False,
    deepep: bool = False,
    vision: VisionConfig | None = None,
    aiter_long_context: bool = False,
) -> float:
    """The `mem_fraction_static` that is used unless one is given (serving specification, section 1.4).

    Args:
        memory_bytes: of the device.
        tp_size, pp_size, dp_size: the layout.
        role: "prefill", "decode" or None.
        chunked_prefill_size: tokens of one prefill step; None goes by the memory of the device.
        max_running_requests: for a decode server, whose steps are that wide; None is `decode_max_bs`.
        verify_window: tokens of a request in one decode step.
        decode_max_bs: widest captured decode graph; None goes by the memory of the device, 0 captures none.
        mla_prefill_graphs: prefill is captured too.
        deepep: experts exchange through DeepEP.
        vision: the vision tower if this server runs it.
        aiter_long_context: AITER attention and a context above 8192 tokens.

    Raises:
        ConfigError: the device is smaller than the reserve.
    """
    memory = check_number("memory_bytes", memory_bytes) / MIB
    for name, value in (("tp_size", tp_size), ("pp_size", pp_size), ("dp_size", dp_size)):
        check_count(name, value)
    role = role_of(role)
    tokens, width = _memory_class(memory / 1024, tp_size)
    tokens = tokens if chunked_prefill_size is None else check_count("chunked_prefill_size", chunked_prefill_size)
    width = width if decode_max_bs is None else check_count("decode_max_bs", decode_max_bs, least=0)
    if role == "decode":
        running = _optional("max_running_requests", max_running_requests) or width or 1
        tokens = running * check_count("verify_window", verify_window)
    graphs = 2.0 * width
    if dp_size > 1:
        graphs += 3 * width * dp_size + (1.5 * width * dp_size if width > 300 else 0)
    if role == "prefill":
        graphs = 0
    reserve = 512 + 1.5 * max(tokens, 2048) + tp_size * pp_size / 8 * 1024 + graphs
    if mla_prefill_graphs and role != "decode":
        reserve += 1.5 * 1024
    if memory > 60 * 1024:
        reserve = max(reserve, 10 * 1024)
    if deepep and width and role != "prefill":
        reserve += 2 * 1024
    if reserve >= memory:
        raise ConfigError(
            f"memory_bytes={memory_bytes}: {reserve:.0f} MiB are kept for activations and graphs, the device has "
            f"{memory:.0f}; give mem_fraction_static"
        )
    fraction = round((memory - reserve) / memory, 3)
    if vision is not None and role != "decode":
        size = vision.num_layers * vision.hidden_size**2 / (24 * 1024**2)
        fraction *= 0.95 * min(max(1 - 0.1 * (size - 1), 0.8), 1.05)
    return fraction * 0.85 if aiter_long_context else fraction


def _memory_class(gib: float, tp_size: int) -> tuple[int, int]:
    """Tokens of a prefill step and width of a decode graph for a device of this size."""
    if gib < 60:
        return 2048, 32
    if gib < 160:
        return 8192, 256 if tp_size < 4 else 512
    return 16384, 512


# ---- the plan -------------------------------------------------------------------------------------


class Limit(NamedTuple):
    """One number of a plan and where it comes from."""

    name: str
    value: int | float | str
    reason: Reason
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Sizes of both pools of one rank. `str()` is a table.

    Attributes:
        case: the rule that gave K.
        state_bytes: a slot, of the stage with the most KDA layers.
        extra_bytes_per_slot: the replay ring of a slot.
        S: slots a request.
        K: state slots of a worker; the null slot comes on top.
        reserved_intermediate_bytes: states inside verify windows.
        cell_bytes: a token row: latent KV of the stage with the most MLA layers, and the draft's.
        max_total_num_tokens_rows: token rows of a rank, a multiple of the page size. The null page comes on top and is
            not charged.
        logical_tokens: tokens of a worker: rows times context-parallel ranks.
        state_pool_bytes: K + 1 slots.
        max_num_reqs: running requests of a worker.
        page_size: tokens a page.
        rest_bytes: the budget.
        limits: each number with its reason.
        warnings: what was asked for and is not so.
    """

    case: str
    state_bytes: int
    extra_bytes_per_slot: int
    S: int
    K: int
    reserved_intermediate_bytes: int
    cell_bytes: int
    max_total_num_tokens_rows: int
    logical_tokens: int
    state_pool_bytes: int
    max_num_reqs: int
    page_size: int
    rest_bytes: int
    limits: tuple[Limit, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def num_pages(self) -> int:
        """Pages of a rank, without the null page."""
        return self.max_total_num_tokens_rows // self.page_size

    @property
    def kv_pool_bytes(self) -> int:
        """Bytes of the token rows."""
        return self.max_total_num_tokens_rows * self.cell_bytes

    @property
    def charged_bytes(self) -> int:
        """Everything that is taken out of `rest_bytes`."""
        return self.state_pool_bytes + self.reserved_intermediate_bytes + self.kv_pool_bytes

    def limit(self, name: str) -> Limit:
        """The limit of that name.

        Raises:
            KeyError: there is none.
        """
        for limit in self.limits:
            if limit.name == name:
                return limit
        raise KeyError(f"{name}; there are {', '.join(limit.name for limit in self.limits)}")

    def __str__(self) -> str:
        shares = [
            ("states", self.state_pool_bytes),
            ("verify", self.reserved_intermediate_bytes),
            ("tokens", self.kv_pool_bytes),
            ("unused", self.rest_bytes - self.charged_bytes),
        ]
        parts = ", ".join(f"{name} {_human(size)}" for name, size in shares if size or name != "verify")
        rows = [("limit", "value", "reason", "note"), *((n, _shown(v), r, note) for n, v, r, note in self.limits)]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [
            f"{name:<{widths[0]}}  {value:>{widths[1]}}  {reason:<{widths[2]}}  {note}".rstrip()
            for name, value, reason, note in rows
        ]
        return "\n".join([f"{_human(self.rest_bytes)}: {parts}", *lines])


def plan_memory(  # noqa: PLR0913 - one argument a flag
    config: KimiK3Config | TextConfig,
    *,
    rest_bytes: float,
    tp_size: int = 1,
    dp_size: int = 1,
    dcp_size: int = 1,
    pp_size: int = 1,
    pp_partition: Sequence[int] | None = None,
    kv_cache_dtype: str = "auto",
    mamba_ssm_dtype: str = "float32",
    mamba_radix_cache_strategy: str = "auto",
    disable_radix_cache: bool = False,
    disable_overlap_schedule: bool = False,
    skip_decode_lock: bool = False,
    role: str | None = None,
    mamba_full_memory_ratio: float | None = None,
    speculative: bool = False,
    replayssm_spec: bool = False,
    verify_window: int | None = None,
    replayssm_cache_len: int | None = None,
    max_running_requests: int | None = None,
    max_mamba_cache_size: int | None = None,
    max_total_tokens: int | None = None,
    page_size: int | None = None,
    context_length: int | None = None,
    draft_cell_bytes: int | None = None,
    dtype: str | None = None,
) -> MemoryPlan:
    """Split a budget into state slots and token rows (serving specification, sections 1.2 and 1.3).

    State is never over-committed: a request is admitted only if its S slots are accounted for. Tokens are.
    What is None takes its default, and the plan says so.

    Args:
        config: the model, of any geometry.
        rest_bytes: for both pools of one rank; see `rest_from_memory`.
        tp_size, dp_size, dcp_size, pp_size: the layout. `dp_size` workers share the `tp_size` ranks for attention,
            each with its own pools.
        pp_partition: layers of each stage; None splits evenly.
        kv_cache_dtype: of the latent KV; "auto" is the activation dtype.
        mamba_ssm_dtype: of the recurrent state.
        mamba_radix_cache_strategy, disable_radix_cache, disable_overlap_schedule, skip_decode_lock: see
            `slots_per_request`. A decode server has no prefix cache.
        role: "prefill", "decode" or None.
        mamba_full_memory_ratio: bytes of states over bytes of tokens; None is 0.9.
        speculative: a draft proposes tokens and `verify_window` of them, the anchor included, are checked at once;
            None is 8.
        replayssm_spec: rejected tokens are undone from a ring of `replayssm_cache_len` recorded inputs a slot (None is
            16), not by keeping `verify_window` states a running request.
        max_running_requests: of all workers together; None is estimated, 48 with speculation.
        max_mamba_cache_size: state slots of all workers together, in place of the ratio.
        max_total_tokens: most token rows of a rank.
        page_size: tokens a page; None is 64.
        context_length: longest request; None is the model's positions.
        draft_cell_bytes: the draft's KV of a token and rank, see `draft_bytes_per_token`; None is 1400.
        dtype: of the activations; None is that of the model, bfloat16 for a `TextConfig`.

    Raises:
        ConfigError: a value is out of range, the layout does not divide the model, or not one request fits. The
            message names the bytes that both pools need.
    """
    text, activations = text_of(config, dtype)
    rest = math.floor(check_number("rest_bytes", rest_bytes))
    width = attention_width(text, tp_size, dp_size, dcp_size)
    notes = _Notes()
    if mamba_full_memory_ratio is not None:
        check_number("mamba_full_memory_ratio", mamba_full_memory_ratio)
    asked = _Asked(
        rest=rest,
        dp_size=dp_size,
        dcp_size=dcp_size,
        ratio=mamba_full_memory_ratio,
        running=_optional("max_running_requests", max_running_requests),
        slots=_optional("max_mamba_cache_size", max_mamba_cache_size),
        tokens=_optional("max_total_tokens", max_total_tokens),
        page=_optional("page_size", page_size),
        context=_optional("context_length", context_length),
        positions=text.max_position_embeddings,
        no_prefix_cache=disable_radix_cache or role_of(role) == "decode",
        speculative=speculative,
    )
    slots = slots_per_request(
        mamba_radix_cache_strategy,
        disable_radix_cache=disable_radix_cache,
        role=role,
        disable_overlap_schedule=disable_overlap_schedule,
        pp_size=pp_size,
        skip_decode_lock=skip_decode_lock,
    )
    notes.strategy(mamba_radix_cache_strategy, slots, asked.no_prefix_cache, skip_decode_lock)
    speculation = _speculation(
        speculative, replayssm_spec, verify_window, replayssm_cache_len, draft_cell_bytes, role_of(role), pp_size, notes
    )
    kda_layers, mla_layers = (most_in_a_stage(text, kind, pp_size, pp_partition) for kind in ("kda", "mla"))
    state_itemsize = itemsize_of("mamba_ssm_dtype", mamba_ssm_dtype, allowed=WIDE)
    state = kda_layers * layer_state_bytes(text.kda, state_itemsize, ITEMSIZES[activations]) // width
    ring = kda_layers * layer_replay_bytes(text.kda, speculation.ring, ITEMSIZES[activations]) // width
    latent = mla_layers * text.mla.latent_width * itemsize_of("kv_cache_dtype", kv_cache_dtype, auto=activations)
    costs = _Costs(state, ring, slots, speculation.window, latent + speculation.cell * dcp_size)
    return _plan(asked, costs, notes)


class _Costs(NamedTuple):
    """Bytes of a unit, and how many a request needs: p, e, S, D and the cell of the serving specification."""

    state: int
    ring: int
    per_request: int
    window: int
    cell: int

    @property
    def slot(self) -> int:
        return self.state + self.ring

    def states(self, slots: int) -> int:
        return (slots + 1) * self.slot

    def verify(self, requests: int) -> int:
        return self.state * (requests + 1) * self.window


class _Speculation(NamedTuple):
    window: int  # states kept a running request
    ring: int  # recorded positions a slot
    cell: int  # draft KV a token


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    rest: int
    dp_size: int
    dcp_size: int
    ratio: float | None
    running: int | None
    slots: int | None
    tokens: int | None
    page: int | None
    context: int | None
    positions: int
    no_prefix_cache: bool
    speculative: bool

    @property
    def page_size(self) -> int:
        return self.page or DEFAULT_PAGE_SIZE

    @property
    def context_length(self) -> int:
        return self.context or self.positions

    @property
    def requested(self) -> int | None:
        """Running requests of one worker, given or by speculation's default."""
        running = self.running or (SPECULATIVE_RUNNING if self.speculative else None)
        return None if running is None else max(1, running // self.dp_size)


@dataclass(slots=True)
class _Notes:
    limits: list[Limit] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def limit(self, name: str, value: float | str, reason: Reason, note: str = "") -> None:
        self.limits.append(Limit(name, value, reason, note))

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def strategy(self, asked: str, slots: int, no_prefix_cache: bool, skip_decode_lock: bool) -> None:
        name = strategy_of(asked)
        self.limit("mamba_radix_cache_strategy", name, "default" if asked == "auto" else "given")
        if no_prefix_cache:
            self.limit("slots_per_request", slots, "derived", "running state; no prefix cache")
            return
        held = ["running state", "hand-over from prefill"]
        if name == "no_buffer" or not skip_decode_lock:
            held.append("locked checkpoint")
        if slots > len(held):
            held.append(f"{slots - len(held)} for snapshots")
        self.limit("slots_per_request", slots, "derived", ", ".join(held))


def _speculation(
    speculative: bool,
    replays: bool,
    asked_window: int | None,
    asked_ring: int | None,
    cell: int | None,
    role: str | None,
    pp_size: int,
    notes: _Notes,
) -> _Speculation:
    window = check_count("verify_window", DEFAULT_WINDOW if asked_window is None else asked_window, least=2)
    ring = check_count("replayssm_cache_len", DEFAULT_RING if asked_ring is None else asked_ring)
    draft = check_draft_cell(cell)
    if not speculative:
        if replays:
            notes.warn("replayssm_spec=True has no effect: speculative=False")
        if cell:
            notes.warn(f"draft_cell_bytes={cell} is not charged: speculative=False")
        return _Speculation(0, 0, 0)
    if pp_size > 1 and role != "prefill":
        raise ConfigError(f"speculation needs pp_size=1 except on a prefill server, got pp_size={pp_size}, role={role}")
    notes.limit(
        "draft_cell_bytes",
        draft,
        "default" if cell is None else "given",
        "draft KV of a token, on every rank" + (", an estimate" if cell is None else ""),
    )
    if role == "prefill":
        if replays:
            notes.warn("replayssm_spec=True has no effect: a prefill server verifies nothing")
        return _Speculation(0, 0, draft)
    if not replays:
        reason: Reason = "default" if asked_window is None else "given"
        notes.limit("verify_window", window, reason, "states kept for each running request")
        return _Speculation(window, 0, draft)
    if ring & (ring - 1) or ring < 2 * window:
        raise ConfigError(
            f"replayssm_cache_len={ring} must be a power of two and at least twice verify_window={window}; use "
            f"{1 << (2 * window - 1).bit_length()}"
        )
    reason = "default" if asked_ring is None else "given"
    notes.limit("replayssm_cache_len", ring, reason, "recorded inputs of each slot")
    return _Speculation(0, ring, draft)


def _plan(asked: _Asked, costs: _Costs, notes: _Notes) -> MemoryPlan:
    case, slots, reserved = _slots(asked, costs, notes)
    rows = _rows(asked, costs, slots, reserved, notes)
    requests = _requests(asked, costs, slots, rows, notes)
    if slots is None:
        slots = requests * costs.per_request
        notes.limit("max_mamba_cache_size", slots, "derived", "no KDA layers: slots take no memory")
    return MemoryPlan(
        case=case,
        state_bytes=costs.state,
        extra_bytes_per_slot=costs.ring,
        S=costs.per_request,
        K=slots,
        reserved_intermediate_bytes=reserved,
        cell_bytes=costs.cell,
        max_total_num_tokens_rows=rows,
        logical_tokens=rows * asked.dcp_size,
        state_pool_bytes=costs.states(slots),
        max_num_reqs=requests,
        page_size=asked.page_size,
        rest_bytes=asked.rest,
        limits=tuple(notes.limits),
        warnings=tuple(notes.warnings),
    )


def _slots(asked: _Asked, costs: _Costs, notes: _Notes) -> tuple[str, int | None, int]:
    """The case, K (None if slots take no memory and none were asked for), and the bytes of verify windows."""
    if asked.slots is not None:
        case, slots = "max-mamba-cache-size", asked.slots // asked.dp_size
        notes.limit("max_mamba_cache_size", slots, "given", _per_worker(asked.slots, asked.dp_size))
        if slots * asked.dp_size != asked.slots:
            notes.warn(f"max_mamba_cache_size={asked.slots} over dp_size={asked.dp_size} workers is {slots} each")
    elif asked.no_prefix_cache and asked.requested is not None:
        case, slots = "radix off", asked.requested
        notes.limit("max_mamba_cache_size", slots, "derived", "no prefix cache: one for each running request")
    else:
        return _slots_by_ratio(asked, costs, notes)
    if asked.ratio is not None:
        why = f"max_mamba_cache_size={asked.slots}" if asked.slots is not None else "the number of running requests"
        notes.warn(f"mamba_full_memory_ratio={asked.ratio} is not used: {why} sets the slots")
    if slots < 1:
        raise _too_small(f"max_mamba_cache_size={asked.slots} over dp_size={asked.dp_size} is no slot", asked, costs)
    return case, slots, _reserved(asked, costs, slots)


def _slots_by_ratio(asked: _Asked, costs: _Costs, notes: _Notes) -> tuple[str, int | None, int]:
    if not costs.slot:
        if asked.ratio is not None:
            notes.warn(f"mamba_full_memory_ratio={asked.ratio} is not used: no KDA layers")
        return "no KDA layers", None, 0
    ratio = DEFAULT_RATIO if asked.ratio is None else asked.ratio
    budget = min(asked.rest * ratio / (1 + ratio), float(asked.rest))
    note = f"{_human(budget)} of {_human(asked.rest)} to states"
    if asked.ratio is None and not costs.cell:
        budget, note = float(asked.rest), "no MLA layers: everything to states"
    notes.limit("mamba_full_memory_ratio", ratio, "default" if asked.ratio is None else "given", note)
    if costs.window:
        case = "ratio with intermediates"
        first = costs.state * (1 + costs.window) + costs.ring
        slots = math.floor((budget - first) / (costs.state * (1 + costs.window / costs.per_request) + costs.ring))
    else:
        case = "ratio"
        slots = math.floor((budget - costs.slot) / costs.slot)
    if slots < 1:
        raise _too_small(f"{_human(budget)} for states hold no slot beside the null slot", asked, costs)
    notes.limit("max_mamba_cache_size", slots, "derived", f"slots of {_human(costs.slot)}")
    return case, slots, _reserved(asked, costs, slots)


def _reserved(asked: _Asked, costs: _Costs, slots: int) -> int:
    """Bytes of the states inside verify windows, for the requests that can be admitted."""
    return costs.verify(min(asked.requested or 0, slots // costs.per_request))


def _rows(asked: _Asked, costs: _Costs, slots: int | None, reserved: int, notes: _Notes) -> int:
    page = asked.page_size
    notes.limit("page_size", page, "default" if asked.page is None else "given", "tokens")
    left = asked.rest - reserved - costs.states(slots or 0)
    if costs.cell:
        fits, note = left // costs.cell, f"rows of {costs.cell:,} bytes"
    else:
        fits = math.ceil(asked.context_length / page) * page * max(1, (slots or 0) // costs.per_request)
        note = "no MLA layers: tokens take no memory"
    if left < 0 or fits < 1:
        raise _too_small(
            f"{slots or 0} slots and the null slot take {costs.states(slots or 0):,} bytes and verify windows "
            f"{reserved:,}, which leaves {max(left, 0):,} for tokens",
            asked,
            costs,
        )
    rows = min(fits, asked.tokens or fits) // page * page
    if asked.tokens is not None and costs.cell and asked.tokens > fits:
        notes.warn(f"max_total_tokens={asked.tokens} does not fit: limited to {rows}")
    elif asked.tokens is not None and rows != asked.tokens:
        notes.warn(f"max_total_tokens={asked.tokens} is rounded down to {rows}, a multiple of page_size={page}")
    if rows < 1:
        why = f"max_total_tokens={asked.tokens}" if asked.tokens is not None and asked.tokens < page else f"{fits} rows"
        raise _too_small(f"{why} fill no page of page_size={page}", asked, costs)
    if asked.tokens is not None:
        note += f", at most max_total_tokens={asked.tokens}"
    reason: Reason = "given" if rows == asked.tokens else "derived"
    notes.limit("max_total_num_tokens", rows, reason, note)
    notes.limit("pages", rows // page, reason, f"of {_human(costs.cell * page)}")
    if asked.dcp_size > 1:
        notes.limit("logical_tokens", rows * asked.dcp_size, "derived", f"over dcp_size={asked.dcp_size} ranks")
    return rows


def _requests(asked: _Asked, costs: _Costs, slots: int | None, rows: int, notes: _Notes) -> int:
    context = asked.context_length
    notes.limit("context_length", context, "default" if asked.context is None else "given", "tokens of a request")
    if context > asked.positions:
        notes.warn(f"context_length={context} exceeds the model's {asked.positions} positions")
    wanted = asked.requested or min(max(int(rows / context * 512), 2048), 4096)
    reason: Reason = "derived"
    origin = f"estimate of {wanted}"
    if asked.running is not None:
        reason, origin = "given", f"max_running_requests={asked.running}"
        if wanted * asked.dp_size != asked.running:
            notes.warn(f"{origin} over dp_size={asked.dp_size} workers is {wanted} each")
    elif asked.speculative:
        reason, origin = "default", f"speculation's default of {SPECULATIVE_RUNNING}"
        notes.warn(f"max_running_requests is not given and speculation is on: reset to {SPECULATIVE_RUNNING}")
    note = origin + (f", {wanted} for each of {asked.dp_size} workers" if asked.dp_size > 1 else "")
    requests = min(wanted, rows // 2)
    if requests < wanted:
        note += f", limited to {requests} by half of {rows} token rows"
    if slots is not None and slots // costs.per_request < requests:
        requests = slots // costs.per_request
        note += f", limited to {requests} by {slots} slots, {costs.per_request} a request"
    if requests < wanted:
        reason = "derived"
        if asked.requested is not None:
            notes.warn(note)
    if requests < 1:
        raise _too_small(note, asked, costs)
    notes.limit("max_running_requests", requests, reason, note)
    return requests


def _too_small(what: str, asked: _Asked, costs: _Costs) -> ConfigError:
    """Why a plan fails, with the bytes that one request needs in both pools."""
    page = asked.page_size
    rows = math.ceil(2 / page) * page
    states = costs.states(costs.per_request) + costs.verify(1)
    tokens = rows * costs.cell
    need = (
        f"{what}. One request needs {states:,} bytes of states ({costs.per_request} + 1 slots of {costs.slot:,}"
        + (f", 2 verify windows of {costs.window} states" if costs.window else "")
        + f") and {tokens:,} bytes of tokens ({rows} rows of {costs.cell:,}); rest_bytes={asked.rest:,}. "
    )
    if states + tokens > asked.rest:
        return ConfigError(need + "Free more memory: a higher mem_fraction_static, more ranks, or smaller dtypes")
    if asked.slots is not None:
        return ConfigError(need + "Change max_mamba_cache_size or max_total_tokens")
    return ConfigError(need + "Change mamba_full_memory_ratio, max_running_requests or max_total_tokens")


def _per_worker(total: int, dp_size: int) -> str:
    return f"{total} over {dp_size} workers" if dp_size > 1 else ""


def _optional(name: str, value: int | None) -> int | None:
    return None if value is None else check_count(name, value)


def _human(size: float) -> str:
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.4g} {unit}"


def _shown(value: float | str) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
