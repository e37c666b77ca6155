"""Configuration of the engine, and the limits it derives from the model and the machine."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from k3lib.cache import CacheConfig, Limit, plan_memory, slots_per_request
from k3lib.cache.sizing import SPECULATIVE_RUNNING, default_mem_fraction, rest_from_memory
from k3lib.engine.recipes import resolve_recipe
from k3lib.errors import ConfigError
from k3lib.multimodal import KimiK3ForConditionalGeneration
from k3lib.spec.proposer import SpecConfig  # noqa: TC001 - a field that command lines are made from

if TYPE_CHECKING:
    from k3lib.model import KimiK3ForCausalLM
    from k3lib.spec.proposer import Proposer

__all__ = ["EngineConfig", "resolve_limits", "resolve_recipe"]

logger = logging.getLogger(__name__)

CPU_CACHE_BYTES = 2 << 30
DEFAULT_RUNNING = 16

Strategy = Literal["auto", "no_buffer", "extra_buffer", "extra_buffer_lazy"]
Reason = Literal["given", "derived", "default"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits and rules of an engine.

    Attributes:
        cache: pools, which no other field may contradict; None derives them from the model, the free memory and the
            fields below.
        context_length: longest prompt plus output; None = the model's positions.
        chunked_prefill_size: most prompt tokens of one prefill step.
        max_running_requests: requests in flight; None = what the pools admit, on a CPU 16.
        max_queued_requests: requests that may wait; None = any number.
        queue_timeout: seconds a request may wait before it first runs; None = any time.
        request_timeout: seconds a request may live; None = any time.
        disable_radix_cache: reuse nothing of earlier prompts.
        checkpoint_grid: states are kept for reuse at multiples of so many tokens.
        mamba_track_interval: the same during decode; None = `checkpoint_grid`, 0 = never.
        keep_turn_ends: also keep the state at the end of every request.
        page_size: tokens of a KV page.
        kv_cache_dtype: "bfloat16", "float32" or "fp8_e4m3"; None = that of the activations.
        mamba_ssm_dtype: of the recurrent state, "float32" or "bfloat16"; None = float32.
        mamba_radix_cache_strategy: counts the state slots of a request when pools are derived; all work alike.
        mamba_full_memory_ratio: bytes of states over bytes of tokens when pools are derived; None = 0.9.
        max_mamba_cache_size: state slots; None derives them.
        max_total_tokens: most tokens of the KV pool; None = what fits.
        mem_fraction_static: part of an accelerator's memory, as it was before the weights came, for weights and derived
            pools; None goes by the memory and the layout.
        schedule_conservativeness: how much of the tokens that a request may still generate (4096 at most) admission
            counts on; 1 is half of them.
        mix_decode: decoding requests ride in prefill steps instead of taking turns with them; not if deterministic.
        deterministic: the same bits for a request alone, in any batch and in any order. Every request is computed by
            itself, prefills are cut at multiples of `chunked_prefill_size`, or of the checkpoint grid if that is less,
            and only states at such multiples are reused.
        strict_backends: refuse the slow reference on an accelerator.
        cuda_graphs: replay decode and verify steps on a CUDA device, if all of their kernels can be captured.
        spec: speculate; None = one token a step.
        image_cache_bytes: features of images that are kept for later requests, on every rank that embeds tokens; those
            that running requests need come on top.
        vision_graphs: replay the vision tower on a CUDA device for small images whose sizes come again.
    """

    cache: CacheConfig | None = None
    context_length: int | None = None
    chunked_prefill_size: int = 2048
    max_running_requests: int | None = None
    max_queued_requests: int | None = None
    queue_timeout: float | None = None
    request_timeout: float | None = None
    disable_radix_cache: bool = False
    checkpoint_grid: int = 512
    mamba_track_interval: int | None = None
    keep_turn_ends: bool = True
    page_size: int = 64
    kv_cache_dtype: str | None = None
    mamba_ssm_dtype: str | None = None
    mamba_radix_cache_strategy: Strategy = "auto"
    mamba_full_memory_ratio: float | None = None
    max_mamba_cache_size: int | None = None
    max_total_tokens: int | None = None
    mem_fraction_static: float | None = None
    schedule_conservativeness: float = 1.0
    mix_decode: bool = False
    deterministic: bool = False
    strict_backends: bool = False
    cuda_graphs: bool = True
    spec: SpecConfig | None = None
    image_cache_bytes: int = 100 << 20
    vision_graphs: bool = False

    def __post_init__(self) -> None:
        for name, least in _COUNTS.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise ConfigError(f"EngineConfig: {name} must be an integer >= {least}, got {value!r}")
        for name in ("queue_timeout", "request_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"EngineConfig: {name} must be above 0 seconds, got {value}")
        if not self.schedule_conservativeness >= 0:
            raise ConfigError(
                f"EngineConfig: schedule_conservativeness must be >= 0, got {self.schedule_conservativeness}"
            )
        if self.mem_fraction_static is not None and not 0 < self.mem_fraction_static < 1:
            raise ConfigError(f"EngineConfig: mem_fraction_static must be in (0, 1), got {self.mem_fraction_static}")
        slots_per_request(self.mamba_radix_cache_strategy)  # refuses an unknown name
        if self.cache is not None:
            self._check_cache(self.cache)
        if self.deterministic:
            self._check_deterministic()

    def _check_cache(self, cache: CacheConfig) -> None:
        if (self.max_running_requests or 0) > cache.num_slots:
            raise ConfigError(
                f"EngineConfig: max_running_requests={self.max_running_requests} needs as many slots, the cache has "
                f"{cache.num_slots}"
            )
        there = {
            "page_size": cache.page_size,
            "checkpoint_grid": cache.checkpoint_grid,
            "mamba_track_interval": cache.track_interval,
            "keep_turn_ends": cache.keep_turn_ends,
            "kv_cache_dtype": cache.kv_cache_dtype,
            "mamba_ssm_dtype": cache.mamba_ssm_dtype,
            "max_mamba_cache_size": cache.num_slots,
            "max_total_tokens": cache.num_pages * cache.page_size,
        }
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            if field.name in there and value != there[field.name]:
                raise ConfigError(
                    f"EngineConfig: {field.name}={value!r} contradicts the given cache, which has "
                    f"{there[field.name]!r}; leave one of them out"
                )
            if field.name in {"mamba_radix_cache_strategy", "mamba_full_memory_ratio", "mem_fraction_static"}:
                raise ConfigError(f"EngineConfig: {field.name}={value!r} has no effect on a given cache; leave it out")

    def _check_deterministic(self) -> None:
        if self.spec is not None:
            raise ConfigError(
                "EngineConfig: deterministic=True promises the bits of steps of one token, and spec computes several "
                "at once: leave one of them out"
            )
        if self.mix_decode:
            raise ConfigError("EngineConfig: deterministic computes every request by itself; leave mix_decode out")
        if self.disable_radix_cache:
            return
        pools = self.cache
        grid = self.checkpoint_grid if pools is None else pools.checkpoint_grid
        interval = self.mamba_track_interval if pools is None else pools.track_interval
        if grid % min(grid, self.chunked_prefill_size):
            raise ConfigError(
                f"EngineConfig: deterministic reuses only states at the end of whole chunks, so chunked_prefill_size="
                f"{self.chunked_prefill_size} must divide checkpoint_grid={grid}"
            )
        if interval:
            raise ConfigError(
                f"EngineConfig: deterministic keeps no states of decode steps, but their interval is {interval}"
            )


_COUNTS = {
    "context_length": 1, "chunked_prefill_size": 1, "max_running_requests": 1, "max_queued_requests": 0,
    "checkpoint_grid": 1, "mamba_track_interval": 0, "page_size": 1, "max_mamba_cache_size": 1, "max_total_tokens": 1,
    "image_cache_bytes": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Resolved:
    """What an engine works with.

    Attributes:
        cache: sizes and dtypes of the pools.
        context_length: longest prompt plus output.
        max_running: requests in flight.
        chunk_tokens: most prompt tokens of a prefill step.
        graph_requests: most requests of a decode step that is replayed; 0 = none is.
        limits: every effective limit with its reason.
    """

    cache: CacheConfig
    context_length: int
    max_running: int
    chunk_tokens: int
    graph_requests: int
    limits: tuple[Limit, ...]


_OF_POOLS = frozenset({"max_mamba_cache_size", "max_total_tokens", "page_size", "checkpoint_grid"})


def resolve_limits(  # noqa: C901 - one limit after the other
    model: KimiK3ForCausalLM | KimiK3ForConditionalGeneration,
    config: EngineConfig,
    proposer: Proposer | None = None,
) -> Resolved:
    """Derive what the configuration leaves open, and say why each limit is what it is.

    Args:
        model: the target.
        config: what was asked for.
        proposer: what `config.spec` names.

    Raises:
        ConfigError: a context longer than the model's positions, a budget that holds not one request, or given pools
            that contradict `config.spec`.
    """
    positions = model.config.text.max_position_embeddings
    context = config.context_length or positions
    if context > positions:
        raise ConfigError(f"context_length={context} exceeds the model's {positions} positions")
    if config.cache is not None:
        cache, running = config.cache, config.max_running_requests or config.cache.num_slots
        running_note, slots_note = "one state slot each", "state slots"
        if proposer is not None and config.max_running_requests is None and running > SPECULATIVE_RUNNING:
            running, running_note = SPECULATIVE_RUNNING, f"speculation's default of {SPECULATIVE_RUNNING}"
            logger.warning("max_running_requests is not given and speculation is on: %d", running)
    else:
        cache, running, running_note, slots_note = _derive_cache(model, config, context, proposer)
    if config.spec is not None and proposer is not None:
        cache = _with_scratch(cache, config.spec, config.spec.block_size or proposer.block_size, running)
    if config.disable_radix_cache:
        cache = dataclasses.replace(cache, prefix_cache=False)
    if config.deterministic:
        # states of decode steps and of the ends of requests were not made in whole chunks
        cache = dataclasses.replace(cache, keep_turn_ends=False, track_interval=0)
    page_tokens = cache.page_size * model.mesh.dcp.size
    page_note = "tokens a page" + (f" of each of {model.mesh.dcp.size} ranks" if model.mesh.dcp.size > 1 else "")
    room = cache.num_pages * page_tokens
    context_note = "" if config.context_length else "the model's positions"
    if room < context:
        origin = "asked for" if config.context_length else "the model's positions"
        context_note = f"the KV pool has {cache.num_pages} pages of {page_tokens}; {context} were {origin}"
        logger.warning("context_length limited to %d tokens: %s", room, context_note)
        context = room
    chunk, chunk_note = config.chunked_prefill_size, "prompt tokens of a prefill step"
    if config.deterministic and cache.prefix_cache and chunk > cache.checkpoint_grid:
        chunk_note = f"deterministic cuts prefills where states are kept, {chunk} were asked for"
        chunk = cache.checkpoint_grid
        logger.warning("chunked_prefill_size limited to %d tokens: %s", chunk, chunk_note)
    reuse_note = "no prefix cache"
    if cache.prefix_cache:
        reuse_note = "reuse begins at its multiples" + (" and where requests ended" if cache.keep_turn_ends else "")
    queued = config.max_queued_requests
    # deterministic computes every request by itself
    graphs, graphs_note = (1 if config.deterministic else running), "requests of a decode step that is replayed"
    if model.device.type != "cuda" or not config.cuda_graphs:
        graphs, graphs_note = 0, "no CUDA device" if config.cuda_graphs else "decode steps run eagerly"

    def reason(field: str, value: object) -> Reason:
        if config.cache is not None and field in _OF_POOLS:
            return "given"
        default = next(f.default for f in dataclasses.fields(config) if f.name == field)
        if default is not None and value == default:
            return "default"
        return "given" if value == getattr(config, field) else "derived"

    limits = (
        Limit("context_length", context, reason("context_length", context), context_note),
        Limit("max_running_requests", running, reason("max_running_requests", running), running_note),
        Limit("max_mamba_cache_size", cache.num_slots, reason("max_mamba_cache_size", cache.num_slots), slots_note),
        Limit(
            "max_total_num_tokens", room, reason("max_total_tokens", room),
            f"{cache.num_pages} pages of {page_tokens} tokens",
        ),
        Limit("page_size", cache.page_size, reason("page_size", cache.page_size), page_note),
        Limit("checkpoint_grid", cache.checkpoint_grid, reason("checkpoint_grid", cache.checkpoint_grid), reuse_note),
        Limit("chunked_prefill_size", chunk, reason("chunked_prefill_size", chunk), chunk_note),
        Limit(
            "max_queued_requests", "unlimited" if queued is None else queued, "default" if queued is None else "given",
            "requests that wait",
        ),
        Limit("cuda_graphs", graphs, "derived" if config.cuda_graphs else "given", graphs_note),
    )  # fmt: skip
    return Resolved(cache, context, running, chunk, graphs, (*limits, *_draft_limits(model, proposer)))


def _draft_limits(model: KimiK3ForCausalLM | KimiK3ForConditionalGeneration, proposer: Proposer | None) -> list[Limit]:
    """What a draft's weights take of each rank that holds it; they are there when free memory is measured."""
    held: int = getattr(proposer, "weight_bytes", 0)
    if not held:
        return []
    mesh, note = model.mesh, "weights of the draft"
    if mesh.tp.size > 1:
        note += f" on each of {mesh.tp.size} ranks" + (" of the first stage" if mesh.pp.size > 1 else "")
    if mesh.pp.size > 1:
        target = model.language_model if isinstance(model, KimiK3ForConditionalGeneration) else model
        held += target.lm_head.weight.nbytes
        note += ", with a copy of the head" + (" on the first stage" if mesh.tp.size == 1 else "")
    return [Limit("draft_weight_bytes", held, "derived", note)]


def _with_scratch(cache: CacheConfig, spec: SpecConfig, block_size: int, running: int) -> CacheConfig:
    """Pools whose scratch holds the verify steps of `running` requests."""
    if cache.block_size and (cache.block_size, cache.rollback) != (block_size, spec.rollback):
        raise ConfigError(
            f"EngineConfig: spec verifies block_size={block_size} drafts with rollback={spec.rollback!r}, the given "
            f"cache has block_size={cache.block_size} and rollback={cache.rollback!r}"
        )
    if cache.verify_rows is not None and cache.verify_rows < running:
        raise ConfigError(
            f"EngineConfig: {running} requests may run, the given cache has verify_rows={cache.verify_rows}"
        )
    rows = running if cache.verify_rows is None else cache.verify_rows
    return dataclasses.replace(cache, block_size=block_size, rollback=spec.rollback, verify_rows=rows)


def free_bytes(model: KimiK3ForCausalLM | KimiK3ForConditionalGeneration, config: EngineConfig) -> int:
    """Memory for the pools of a rank, from the rank that has least; all ask together.

    Weights are in place when it is asked for, those of a vision tower included: ranks that have one have less left.
    What features of images may fill there is left out, too.

    Raises:
        ConfigError: nothing is left; on all ranks alike, with the smallest `mem_fraction_static` that leaves something.
    """
    if model.device.type != "cuda":
        return CPU_CACHE_BYTES
    sees = isinstance(model, KimiK3ForConditionalGeneration) and model.has_tower
    images = config.image_cache_bytes if sees else 0
    free, held = (model.mesh.least(x) for x in _device_bytes(model.device, images))
    mesh, fraction = model.mesh.config, config.mem_fraction_static
    if fraction is None:
        fraction = default_mem_fraction(
            free + held,
            tp_size=mesh.tp_size,
            pp_size=mesh.pp_size,
            dp_size=mesh.dp_size,
            chunked_prefill_size=config.chunked_prefill_size,
            vision=model.config.vision if isinstance(model, KimiK3ForConditionalGeneration) else None,
        )
    return rest_from_memory(free, free + held, fraction)


def _device_bytes(device: torch.device, images: int) -> tuple[int, int]:
    """What is free on a device, but for what is kept for images, and what this process holds of it."""
    held = torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - held  # by the allocator, which gives it to pools
    return torch.cuda.mem_get_info(device)[0] + cached - images, held + images


def image_limits(model: KimiK3ForCausalLM | KimiK3ForConditionalGeneration, config: EngineConfig) -> list[Limit]:
    """What a vision tower takes of the memory of a rank, as limits; none without one.

    The tower is not cut: every rank of the TP group of the first pipeline stage has all of it, and keeps the features
    of all images, because each of them embeds all tokens.
    """
    if not isinstance(model, KimiK3ForConditionalGeneration):
        return []
    size = model.mesh.tp.size
    where = f", on each of {size} ranks" if size > 1 else ""
    weights = sum(p.nbytes for part in model.vision_parts.values() for p in part.parameters())
    kept = config.image_cache_bytes
    reason: Reason = "default" if kept == EngineConfig().image_cache_bytes else "given"
    return [
        Limit("vision_weight_bytes", weights, "derived", f"vision tower and projector, whole{where}"),
        Limit("image_cache_bytes", kept, reason, f"features of images that no running request needs{where}"),
    ]


def _derive_cache(
    model: KimiK3ForCausalLM | KimiK3ForConditionalGeneration,
    config: EngineConfig,
    context_length: int,
    proposer: Proposer | None,
) -> tuple[CacheConfig, int, str, str]:
    """Choose pools from the memory that is free, and on a CPU not more than there is use for.

    Returns:
        The pools, how many requests may run, and notes on that number and on the slots.
    """
    device = model.device
    on_cpu = device.type != "cuda"
    budget = free_bytes(model, config)
    running = config.max_running_requests or (DEFAULT_RUNNING if on_cpu else None)
    spec = config.spec
    block_size = 0 if spec is None or proposer is None else spec.block_size or proposer.block_size
    plan = plan_memory(
        model.config,
        rest_bytes=budget,
        tp_size=model.mesh.tp.size,
        dcp_size=model.mesh.dcp.size,
        pp_size=model.mesh.pp.size,
        pp_partition=model.mesh.config.pp_partition,
        kv_cache_dtype=config.kv_cache_dtype or "auto",
        mamba_ssm_dtype=config.mamba_ssm_dtype or ("float64" if model.dtype == torch.float64 else "float32"),
        mamba_radix_cache_strategy=config.mamba_radix_cache_strategy,
        disable_radix_cache=config.disable_radix_cache,
        mamba_full_memory_ratio=config.mamba_full_memory_ratio,
        max_running_requests=running,
        max_mamba_cache_size=config.max_mamba_cache_size,
        max_total_tokens=config.max_total_tokens,
        page_size=config.page_size,
        context_length=context_length,
        speculative=spec is not None and proposer is not None,
        replayssm_spec=spec is not None and spec.rollback == "replay",
        verify_window=block_size + 1 if block_size else None,
        replayssm_cache_len=1 << (2 * block_size + 1).bit_length() if block_size else None,
        draft_cell_bytes=getattr(proposer, "cell_bytes", 0),
    )
    for warning in plan.warnings:
        logger.warning("%s", warning)
    slots, pages = plan.K, plan.num_pages
    if on_cpu:  # memory that no request can use would only be zeroed
        useful = plan.max_num_reqs
        if config.max_mamba_cache_size is None:
            slots = min(slots, useful * plan.S * (1 if config.disable_radix_cache else 4))
        if config.max_total_tokens is None:
            pages = min(pages, -(-context_length // (config.page_size * model.mesh.dcp.size)) * useful)
    cache = CacheConfig(
        num_pages=pages,
        num_slots=slots,
        page_size=config.page_size,
        checkpoint_grid=config.checkpoint_grid,
        track_interval=config.mamba_track_interval,
        keep_turn_ends=config.keep_turn_ends,
        kv_cache_dtype=config.kv_cache_dtype,
        mamba_ssm_dtype=config.mamba_ssm_dtype,
    )
    logger.info("memory plan: %s", str(plan).splitlines()[0])  # the limits follow, with their real reasons
    running_note = plan.limit("max_running_requests").note
    if on_cpu and config.max_running_requests is None:
        running_note += ", the default on a CPU"
    slots_note = f"state slots of {plan.state_bytes >> 10} KiB in a budget of {budget >> 20} MiB"
    return cache, plan.max_num_reqs, running_note, slots_note
