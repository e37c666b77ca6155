"""The commands `k3lib` and `k3lib-serve`. Flags, defaults and help come from the dataclasses below."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from k3lib import nano
from k3lib.cache.costs import Strategy  # noqa: TC001 - tyro reads it
from k3lib.errors import ConfigError, K3Error

if TYPE_CHECKING:
    from collections.abc import Callable

    from k3lib.config import KimiK3Config
    from k3lib.engine.recipes import Recipe
    from k3lib.parallel import ParallelConfig

__all__ = ["bench", "main", "serve"]

# without it, tyro would make a subcommand of the pools in EngineConfig, which flags derive
SERVE_OPTIONS = (tyro.conf.AvoidSubcommands,)

DType = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class MakeTiny:
    """Write a seeded tiny checkpoint in the released naming and packing; byte-identical for equal arguments."""

    out: tyro.conf.Positional[Path]
    """Folder, made if needed."""
    seed: int = 0
    """Of the random weights."""
    mxfp4: bool = True
    """Pack the routed experts as in the official release."""
    vision: bool = True
    """Add the vision tower and projector."""
    draft: Literal["inferact", "radixark"] | None = None
    """Write a draft model of this family, too, into the subfolder dspark."""

    def run(self) -> int:
        from k3lib.server.tiny import make_tiny

        make_tiny(self.out, seed=self.seed, mxfp4=self.mxfp4, vision=self.vision, draft=self.draft)
        size = sum(file.stat().st_size for file in self.out.rglob("*") if file.is_file())
        print(f"{self.out}: {size / 1e6:.1f} MB")
        return 0


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Run one prompt through the engine and print what follows it."""

    model_path: str | None = None
    """Folder or hub name; the built-in k3lib-nano if left out."""
    prompt: str | None = None
    """Text; needs a tokenizer."""
    chat: bool = False
    """Put the text into K3's chat format, as a user's message; what follows has the brackets of that format."""
    ids: tuple[int, ...] = ()
    """Token ids in place of a text."""
    max_new_tokens: int = 64
    """Most tokens to generate."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of tokens that reaches this probability."""
    top_k: int = 0
    """Keep this many tokens; 0 keeps all."""
    seed: int | None = None
    """Makes the output repeatable."""
    ignore_eos: bool = False
    """Go on after the end of the message."""
    tokenizer_path: str | None = None
    """Folder with tiktoken.model, or "bytes"; default: the model folder."""
    device: str | None = None
    """Default: the accelerator if there is one."""
    dtype: DType = "auto"
    """auto: as stored; float32 on a CPU for the built-in model."""
    layers: int | None = None
    """Run only the first so many layers."""
    resident_experts: int | None = None
    """Hold so many routed experts of each layer in memory and read the others from their files when needed."""

    def run(self) -> int:
        from k3lib.engine import Engine, SamplingParams
        from k3lib.server.chat import encode_segments, render_chat
        from k3lib.server.loading import load_model, tokenizer_for
        from k3lib.server.tokenizer import IncrementalDecoder

        if (self.prompt is None) == (not self.ids):
            raise ConfigError("generate: give either --prompt TEXT or --ids N N …")
        if self.chat and self.prompt is None:
            raise ConfigError("generate: --chat needs --prompt TEXT")
        params = SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_new_tokens=self.max_new_tokens,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
        )
        model = load_model(
            self.model_path,
            dtype=self.dtype,
            device=self.device,
            layers=self.layers,
            resident_experts=self.resident_experts,
        )
        engine = Engine(model)
        if self.prompt is None:
            print(*engine.stream(list(self.ids), params))
            return 0
        tok = tokenizer_for(self.model_path, self.tokenizer_path, model)
        decoder = IncrementalDecoder(tok)
        ids = tok.encode(self.prompt, allow_special=True)
        if self.chat:
            ids = encode_segments(tok, render_chat([{"role": "user", "content": self.prompt}]))
        for token in engine.stream(ids, params):
            print(decoder.push([token]), end="", flush=True)
        print(decoder.finish())
        return 0


@dataclass(frozen=True, kw_only=True)
class Explain:
    """Say which kernel each op would use for a model, and why not the others."""

    model_path: str | None = None
    """Folder or hub name (only config.json is read); the built-in k3lib-nano if left out."""
    arch: str | None = None
    """sm90, sm100, sm103, gfx950, a3, 950 or cpu; default: this machine."""
    tp_size: int = 1
    """Ranks that share the heads."""
    dtype: DType = "auto"
    """Of the activations; auto: float32 on a CPU, else bfloat16."""

    def run(self) -> int:
        import torch

        from k3lib.checkpoint import Folder
        from k3lib.config import KimiK3Config
        from k3lib.server.reports import explain_model

        config = KimiK3Config.from_hf(Folder(nano.find(self.model_path)).config())
        dtype = None if self.dtype == "auto" else getattr(torch, self.dtype)
        print(explain_model(config, arch=self.arch, tp_size=self.tp_size, dtype=dtype))
        return 0


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Describe a checkpoint from its headers, and say what is wrong with it. Exit status 1 if it would not load."""

    path: tyro.conf.Positional[str]
    """Folder or hub name."""

    def run(self) -> int:
        from k3lib.server.reports import inspect_checkpoint

        report, problems = inspect_checkpoint(self.path)
        print(report)
        if not problems:
            print("nothing is wrong with it")
            return 0
        print(f"{len(problems)} problems")
        for problem in problems[:20]:
            print(f"  {problem}")
        if len(problems) > 20:
            print(f"  … and {len(problems) - 20} more")
        return 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Split the memory of a device between state slots and tokens, and say where each number comes from."""

    recipe: str | None = None
    """HARDWARE/PD_MODE/STRATEGY of a published deployment of Kimi-K3, e.g. h200/unified/balanced or
    b300/unified/peak-capacity-32: takes its layout, flags, ratio and memory, but for what is given here."""
    quantization: Literal["mxfp4", "nvfp4", "modelslim"] | None = None
    """Of that deployment: format of the weights; default: the first that is published."""
    spec: Literal["none", "dspark", "dflash"] | None = None
    """Of that deployment: who drafts; default: nobody, on Ascend DSPARK."""
    hicache: Literal["off", "l2", "l3"] = "off"
    """Of that deployment: tiers behind the cache."""
    model_path: str | None = None
    """Folder or hub name (only config.json is read); left out: the built-in k3lib-nano, or that of the recipe."""
    rest_gib: float | None = None
    """Memory of one rank for both pools; or give the next three."""
    gpu_memory_gib: float | None = None
    """Memory of one rank before the weights are loaded."""
    weights_gib: float | None = None
    """What the weights of one rank take, those of the draft included."""
    mem_fraction_static: float | None = None
    """Share for weights and pools; default: goes by memory and layout."""
    language_only: bool = False
    """Keep nothing for images."""
    tp_size: int = 1
    """Tensor-parallel ranks."""
    dp_size: int = 1
    """Workers that share these ranks for attention, each with pools of its own."""
    dcp_size: int = 1
    """Ranks of a worker that share the tokens."""
    pp_size: int = 1
    """Pipeline stages."""
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8_e4m3", "float32"] = "auto"
    """Of the latent KV; auto: that of the activations."""
    mamba_ssm_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the recurrent state."""
    mamba_radix_cache_strategy: Strategy = "auto"
    """How many slots a request may hold; auto: extra_buffer."""
    disable_radix_cache: bool = False
    """Keep nothing for later requests."""
    disable_overlap_schedule: bool = False
    """One step at a time: a snapshot less a request."""
    skip_decode_lock: bool = False
    """Let go of the checkpoint a request started from: a slot less a request."""
    disaggregation_mode: Literal["null", "prefill", "decode"] = "null"
    """Role of the server."""
    mamba_full_memory_ratio: float | None = None
    """Bytes of states over bytes of tokens; default 0.9."""
    tokens_per_request: float | None = None
    """Mean prompt plus output: computes the ratio at which both pools run out together."""
    max_mamba_cache_size: int | None = None
    """State slots of all workers, in place of a ratio."""
    max_running_requests: int | None = None
    """Of all workers; default: estimated, 48 with speculation."""
    max_total_tokens: int | None = None
    """Most token rows of a rank."""
    page_size: int | None = None
    """Tokens a page; default 64."""
    context_length: int | None = None
    """Longest prompt plus output; default: the model's positions."""
    speculative_algorithm: Literal["DSPARK", "DFLASH"] | None = None
    """Plan for a draft."""
    speculative_draft_model_path: str | None = None
    """Folder or hub name of the draft (only config.json is read); default: 1400 bytes a token, blocks of 7."""
    speculative_dspark_block_size: int | None = None
    """Tokens a draft proposes; default: the draft's."""
    speculative_dflash_block_size: int | None = None
    """The same for DFLASH, whose sizes count the token in front of the draft too."""
    enable_linear_replayssm_spec: bool = False
    """Undo rejected tokens by replaying, not by keeping the state after each."""
    linear_replayssm_cache_len: int | None = None
    """Inputs recorded a slot for that; default 16."""
    explain_layout: bool = False
    """Say what the layout shards, and the bytes that a rank holds and sends; without a memory size nothing else."""
    ep_size: int = 1
    """For that: ranks over which whole experts are spread."""
    moe_exchange: Literal["all_reduce", "all_to_all"] = "all_reduce"
    """For that: how tokens and experts meet."""
    shared_experts_tp_size: int | None = None
    """For that: ranks that share the shared experts."""
    shard_latent_projections: bool = False
    """For that: cut the latent projections of the experts."""
    redundant_experts: int = 0
    """For that: copies of experts beyond one each."""
    dcp_comm_backend: Literal["a2a", "ag_rs"] | None = None
    """For that: how partial attention is exchanged; default: a2a."""
    dcp_replicate_q_proj: bool = False
    """For that: project the queries of a context-parallel group on each of its ranks."""
    pp_partition: tuple[int, ...] | None = None
    """Layers of each stage; default: split evenly."""
    prompt_ranks: int = 1
    """For that: ranks over which a long prompt is split in KDA layers."""

    def run(self) -> int:
        if self.recipe is not None:
            return self._published(self.recipe)
        for name, value in (("quantization", self.quantization), ("spec", self.spec)):
            if value is not None:
                raise ConfigError(f"--{name} {value} needs --recipe")
        if self.hicache != "off":
            raise ConfigError(f"--hicache {self.hicache} needs --recipe")
        return self._run(self._config(), None)

    def _config(self) -> KimiK3Config:
        from k3lib.checkpoint import Folder
        from k3lib.config import KimiK3Config

        return KimiK3Config.from_hf(Folder(nano.find(self.model_path)).config())

    def _published(self, name: str) -> int:
        """Plan a published deployment, with what was given in place of its own."""
        from k3lib.cache.costs import MEAN_REQUEST_TOKENS
        from k3lib.engine.recipes import SIZES, kimi_k3, resolve_recipe
        from k3lib.server.planning import describe, plan_flags

        parts = name.split("/")
        if len(parts) != 3:
            raise ConfigError(f"--recipe {name} is not HARDWARE/PD_MODE/STRATEGY")
        recipe = resolve_recipe(*parts, quantization=self.quantization, spec=self.spec, hicache=self.hicache)
        if not recipe.available:
            asked = f"quantization {recipe.quantization}, spec {recipe.spec} and hicache {recipe.hicache}"
            raise ConfigError(f"--recipe {name} with {asked} is not published: {recipe.unavailable_reason}")
        if self.explain_layout and self.model_path is None:
            _check_format(recipe)
        flags = plan_flags(recipe)
        if self.rest_gib is not None:
            flags = {key: value for key, value in flags.items() if key not in ("gpu_memory_gib", "mem_fraction_static")}
        default = Plan()
        taken = {key: value for key, value in flags.items() if getattr(self, key) == getattr(default, key)}
        decided = self.tokens_per_request is not None or self.max_mamba_cache_size is not None
        if "mamba_full_memory_ratio" in taken and (decided or not taken.keys() >= set(SIZES)):
            del taken["mamba_full_memory_ratio"]  # it was for these sizes
            if not decided:
                taken["tokens_per_request"] = MEAN_REQUEST_TOKENS
        plan = replace(self, recipe=None, quantization=None, spec=None, hicache="off", **taken)
        config = kimi_k3(recipe.quantization) if self.model_path is None else self._config()
        layout = plan._parallel()  # refuses sizes that do not fit before anything is said
        layout.check(config.text)
        print(describe(recipe))
        return plan._run(config, recipe)

    def _run(self, config: KimiK3Config, recipe: Recipe | None) -> int:
        if self.explain_layout:
            print(self._layout(config))
            if self.rest_gib is None and self.gpu_memory_gib is None:
                return 0
        if recipe is not None and self.rest_gib is None:
            if self.gpu_memory_gib is None:
                print("the memory of this device is not published: give --gpu-memory-gib, or --rest-gib for both pools")
                return 0
            if self.weights_gib is None:
                return replace(self, weights_gib=self._weigh(config, recipe))._run_pools(config, recipe)
        return self._run_pools(config, recipe)

    def _run_pools(self, config: KimiK3Config, recipe: Recipe | None) -> int:
        from k3lib.cache.sizing import plan_memory
        from k3lib.engine.recipes import SIZES
        from k3lib.server.planning import serve_command

        window, draft_cell = self._draft(config, recipe)
        plan = plan_memory(
            config,
            rest_bytes=self._rest(config, window),
            role=self.disaggregation_mode,
            mamba_full_memory_ratio=self._ratio(config, window, draft_cell),
            verify_window=window,
            replayssm_cache_len=self.linear_replayssm_cache_len,
            max_running_requests=self.max_running_requests,
            max_mamba_cache_size=self.max_mamba_cache_size,
            max_total_tokens=self.max_total_tokens,
            page_size=self.page_size,
            context_length=self.context_length,
            pp_partition=self.pp_partition,
            draft_cell_bytes=draft_cell,
            **self._shared(),
        )
        print(plan)
        for warning in plan.warnings:
            print(f"warning: {warning}")
        if recipe is None or self.gpu_memory_gib is None or self.weights_gib is None:
            return 0
        if all(getattr(self, name) == getattr(recipe, name) for name in SIZES):
            command = serve_command(recipe)
            print(f"as published: {command}" if command else "k3lib-serve cannot follow this recipe, see above")
        return 0

    def _weigh(self, config: KimiK3Config, recipe: Recipe) -> float:
        """GiB of the weights of a rank."""
        from k3lib.cache.sizing import GIB
        from k3lib.server.planning import weights_of

        _check_format(recipe)
        weights = weights_of(recipe, config, self._parallel(), vision=self._sees(config))
        draft = "" if weights.draft == 0 else ", of the draft not known"
        if weights.draft:
            draft = f", of the draft {weights.draft / GIB:.2f}"
        print(f"weights of a rank {weights.model / GIB:.2f} GiB{draft}")
        return (weights.model + (weights.draft or 0)) / GIB

    def _sees(self, config: KimiK3Config) -> bool:
        """Whether ranks hold the vision tower: decode servers leave images to the others."""
        return config.vision is not None and not self.language_only and self.disaggregation_mode != "decode"

    def _parallel(self) -> ParallelConfig:
        from k3lib.parallel import ParallelConfig

        return ParallelConfig(
            tp_size=self.tp_size,
            dp_size=self.dp_size,
            dcp_size=self.dcp_size,
            ep_size=self.ep_size,
            pp_size=self.pp_size,
            moe_exchange=self.moe_exchange,
            shared_experts_tp_size=self.shared_experts_tp_size,
            shard_latent_projections=self.shard_latent_projections,
            redundant_experts=self.redundant_experts,
            dcp_comm_backend=self.dcp_comm_backend,
            dcp_replicate_q_proj=self.dcp_replicate_q_proj,
            pp_partition=self.pp_partition,
        )

    def _layout(self, config: KimiK3Config) -> str:
        from k3lib.server.layouts import explain_layout

        dtypes = {"kv_cache_dtype": self.kv_cache_dtype, "mamba_ssm_dtype": self.mamba_ssm_dtype}
        vision = self._sees(config)
        return explain_layout(config, self._parallel(), **dtypes, vision=vision, prompt_ranks=self.prompt_ranks)

    def _shared(self) -> dict[str, Any]:
        """What the plan and the ratio are both asked with."""
        return {
            "tp_size": self.tp_size,
            "dp_size": self.dp_size,
            "dcp_size": self.dcp_size,
            "pp_size": self.pp_size,
            "kv_cache_dtype": self.kv_cache_dtype,
            "mamba_ssm_dtype": self.mamba_ssm_dtype,
            "mamba_radix_cache_strategy": self.mamba_radix_cache_strategy,
            "disable_radix_cache": self.disable_radix_cache,
            "disable_overlap_schedule": self.disable_overlap_schedule,
            "skip_decode_lock": self.skip_decode_lock,
            "speculative": self.speculative_algorithm is not None,
            "replayssm_spec": self.enable_linear_replayssm_spec,
        }

    def _draft(self, config: KimiK3Config, recipe: Recipe | None) -> tuple[int | None, int | None]:
        """Verify window, and draft KV of a token; None where nobody said."""
        from k3lib.cache.costs import attention_width, draft_bytes_per_token, itemsize_of, text_of
        from k3lib.checkpoint import Folder
        from k3lib.draft_config import DraftConfig
        from k3lib.server.planning import draft_cell

        path, block_size = self.speculative_draft_model_path, self._block_size()
        if self.speculative_algorithm is None:
            return None, None
        cell = None
        text, activations = text_of(config, None)
        width = attention_width(text, self.tp_size, self.dp_size, self.dcp_size)
        itemsize = itemsize_of("kv_cache_dtype", self.kv_cache_dtype, auto=activations)
        if path is not None:
            draft = DraftConfig.from_hf(Folder(path).config())
            cell = draft_bytes_per_token(draft, itemsize=itemsize, tp_size=width)
            block_size = draft.block_size if block_size is None else block_size
        elif recipe is not None:
            cell = draft_cell(recipe, itemsize=itemsize, tp_size=width)
        return None if block_size is None else block_size + 1, cell

    def _block_size(self) -> int | None:
        """Tokens that a draft proposes, if a flag says it."""
        algorithm, size = self.speculative_algorithm, self.speculative_dspark_block_size
        flags = {
            "draft-model-path": (self.speculative_draft_model_path, ("DSPARK", "DFLASH")),
            "dspark-block-size": (size, ("DSPARK",)),
            "dflash-block-size": (self.speculative_dflash_block_size, ("DFLASH",)),
        }
        for flag, (value, algorithms) in flags.items():
            if value is not None and algorithm not in algorithms:
                raise ConfigError(
                    f"--speculative-{flag} {value} needs --speculative-algorithm {' or '.join(algorithms)}"
                )
        window = self.speculative_dflash_block_size
        return size if window is None else window - 1

    def _rest(self, config: KimiK3Config, window: int | None) -> float:
        """Bytes for both pools."""
        from k3lib.cache.sizing import DEFAULT_WINDOW, GIB, IMAGE_BYTES, default_mem_fraction, rest_from_memory

        before, weights, fraction = self.gpu_memory_gib, self.weights_gib, self.mem_fraction_static
        if self.rest_gib is not None and (before, weights, fraction) == (None, None, None):
            return self.rest_gib * GIB
        if self.rest_gib is not None or before is None or weights is None:
            raise ConfigError("plan: give either --rest-gib or --gpu-memory-gib and --weights-gib")
        if not 0 <= weights < before:
            raise ConfigError(f"--weights-gib {weights} must lie between 0 and --gpu-memory-gib {before}")
        vision = None if self.language_only else config.vision
        origin = "default" if fraction is None else "given"
        if fraction is None:
            fraction = default_mem_fraction(
                before * GIB,
                tp_size=self.tp_size,
                pp_size=self.pp_size,
                dp_size=self.dp_size,
                role=self.disaggregation_mode,
                max_running_requests=self.max_running_requests,
                verify_window=1 if self.speculative_algorithm is None else window or DEFAULT_WINDOW,
                vision=vision,
            )
        images = IMAGE_BYTES if vision is not None else 0
        rest = rest_from_memory((before - weights) * GIB, before * GIB, fraction, images)
        print(f"mem_fraction_static {fraction:.3f} ({origin}): {rest / GIB:.2f} of {before:g} GiB for both pools")
        return rest

    def _ratio(self, config: KimiK3Config, window: int | None, draft_cell: int | None) -> float | None:
        """The ratio to plan with: the given one, that of the mean request, or None."""
        from k3lib.cache.sizing import DEFAULT_WINDOW, ratio_terms

        if self.tokens_per_request is None:
            return self.mamba_full_memory_ratio
        if self.max_mamba_cache_size is not None:
            raise ConfigError("plan: --tokens-per-request computes a ratio, and --max-mamba-cache-size replaces it")
        terms = ratio_terms(
            config,
            dspark_block_size=(DEFAULT_WINDOW if window is None else window) - 1,
            disaggregation_mode=self.disaggregation_mode,
            avg_request_length=self.tokens_per_request,
            draft_cell_bytes=draft_cell,
            **self._shared(),
        )
        print(
            f"--mamba-full-memory-ratio {terms.flag}: {terms.S + terms.D} states of {terms.state_bytes:,} bytes for "
            f"{self.tokens_per_request:g} tokens of {terms.kv_bytes_per_token_per_rank:,.0f}"
        )
        if self.mamba_full_memory_ratio is None:
            return float(terms.flag)
        print(f"warning: --mamba-full-memory-ratio {self.mamba_full_memory_ratio:g} was given and is used instead")
        return self.mamba_full_memory_ratio


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Say what is installed, which kernels would run, and what would fail and why."""

    def run(self) -> int:
        from k3lib.server.reports import doctor

        print(doctor())
        return 0


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Time ops at the sizes of Kimi-K3, each checked first, against the floor of the device and against each other."""

    op: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Only this op; may be given several times."""
    impl: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Only this implementation; may be given several times. Default: all that are able, without references."""
    case: str = ""
    """Only cases whose name has this text."""
    device: str | None = None
    """Default: the accelerator, else the CPU."""
    check: bool = True
    """Compare with the reference first."""
    references: bool = False
    """Time the references too."""
    json: bool = False
    """One JSON object a line in place of the table."""

    def run(self) -> int:
        from k3lib import bench

        cases = [case for case in bench.CASES if self.case in case.name]
        found = bench.run(
            self.op,
            device=_device(self.device),
            impls=self.impl,
            cases=cases,
            checks=self.check,
            references=self.references,
            progress=True,
        )
        print(bench.lines(found) if self.json else bench.table(found))
        return int(any(timing.us is None for timing in found))


@dataclass(frozen=True, kw_only=True)
class Conformance:
    """Check every implementation of every op on this machine against the reference; exit status 1 if one fails."""

    op: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Only this op; may be given several times."""
    impl: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Only this implementation; may be given several times."""
    device: str | None = None
    """Default: the accelerator, else the CPU."""
    dtype: tyro.conf.UseAppendAction[tuple[DType, ...]] = ()
    """Of activations; default: bfloat16 and float32."""

    def run(self) -> int:
        import torch

        from k3lib import conformance

        dtypes = [getattr(torch, name) for name in self.dtype or ("bfloat16", "float32")]
        found = conformance.run(self.op, device=_device(self.device), dtypes=dtypes, impls=self.impl, progress=True)
        print(conformance.table(found))
        return int(any(result.outcome == "FAILED" for result in found))


def _check_format(recipe: Recipe) -> None:
    if recipe.quantization not in ("mxfp4", "nvfp4"):
        raise ConfigError(
            f"weights in {recipe.quantization} are not a format of k3lib, so what they take is not known: give "
            "--weights-gib, or --rest-gib for both pools"
        )


def _device(asked: str | None) -> Any:  # noqa: ANN401 - a torch.device; torch is imported late
    import torch

    return torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))


Command = (
    Annotated[MakeTiny, tyro.conf.subcommand("make-tiny")]
    | Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Explain, tyro.conf.subcommand("explain")]
    | Annotated[Inspect, tyro.conf.subcommand("inspect")]
    | Annotated[Plan, tyro.conf.subcommand("plan")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[Conformance, tyro.conf.subcommand("conformance")]
)


def _run(run: Callable[[], int]) -> int:
    try:
        status = run()
        sys.stdout.flush()
    except K3Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever reads the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ImportError as error:
        print(f"error: {error.name} is not installed (pip install k3lib[server])", file=sys.stderr)
        return 2
    return status


def main() -> None:
    """Run `k3lib`."""
    command = tyro.cli(Command, prog="k3lib", description="Kimi-K3 in modular PyTorch.")
    level = os.environ.get("K3LIB_LOG", "warning")
    logging.basicConfig(level=level.upper(), format="%(levelname)s %(name)s: %(message)s")
    sys.exit(_run(command.run))


def bench() -> None:
    """Run `k3lib bench`."""
    sys.exit(_run(tyro.cli(Bench, prog="k3lib bench").run))


def serve() -> None:
    """Run `k3lib-serve`."""
    sys.exit(_run(_serve))


def _serve() -> int:
    from k3lib.server.config import ServeConfig
    from k3lib.server.foreign import translate
    from k3lib.server.logs import configure_logs

    arguments, read = translate(sys.argv[1:])
    config = tyro.cli(ServeConfig, prog="k3lib-serve", args=arguments, config=SERVE_OPTIONS)
    configure_logs(config.network.log_level or os.environ.get("K3LIB_LOG", "info"), config.network.log_format)
    for reading in read:
        logging.getLogger(__name__).info("--%s", reading)

    from k3lib.server.serve import run_server

    return run_server(config)
