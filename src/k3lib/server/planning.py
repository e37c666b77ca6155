"""A published deployment as `k3lib plan` reads it: flags, what each means here, and what a rank's weights take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from k3lib.cache.costs import grouped_kv_bytes
from k3lib.engine.recipes import SIZES
from k3lib.server.foreign import Reading, read_env, read_option
from k3lib.server.layouts import layout_costs

if TYPE_CHECKING:
    from k3lib.config import KimiK3Config
    from k3lib.engine.recipes import Recipe
    from k3lib.parallel import ParallelConfig

__all__ = ["Weights", "describe", "draft_cell", "plan_flags", "readings", "serve_command", "weights_of"]

# options that plan by the same name
_PLANNED = (
    "kv-cache-dtype", "mamba-ssm-dtype", "mamba-radix-cache-strategy", "disable-radix-cache", "disaggregation-mode",
    "max-mamba-cache-size", "max-running-requests", "context-length", "shared-experts-tp-size", "dcp-comm-backend",
    "speculative-algorithm", "speculative-dspark-block-size", "speculative-dflash-block-size",
    "enable-linear-replayssm-spec",
)  # fmt: skip


class Weights(NamedTuple):
    """Bytes of the weights of one rank.

    Attributes:
        model: of the target, of the stage where they are largest, with the vision tower if there is one.
        draft: of the draft, cut over the ranks of a replica; None if its size is not known.
    """

    model: int
    draft: int | None


def readings(recipe: Recipe) -> list[Reading]:
    """What becomes of every flag and variable of a recipe."""
    return [
        read_option("mem-fraction-static", recipe.mem_fraction_static),
        *(read_option(name, value) for name, value in (recipe.options or {}).items()),
        *(read_env(entry) for entry in recipe.env),
    ]


def plan_flags(recipe: Recipe) -> dict[str, Any]:
    """Fields of `k3lib plan` that a recipe sets."""
    options = recipe.options or {}
    found = {name: getattr(recipe, name) for name in SIZES}
    found |= {name.replace("-", "_"): options[name] for name in _PLANNED if name in options}
    ranks = {"ep-size": recipe.tp_size, "shared-experts-tp-size": recipe.attn_tp_size}
    for reading in readings(recipe):
        for flag, value in reading.flags.items():
            if flag.replace("-", "_") not in found:
                found[flag.replace("-", "_")] = ranks[flag] if value is None else value
    ratio = (recipe.mamba or {}).get("flag")
    if ratio is not None:
        found["mamba_full_memory_ratio"] = float(ratio.split()[1])
    found |= {"mem_fraction_static": recipe.mem_fraction_static, "gpu_memory_gib": recipe.memory_gib}
    return found


def describe(recipe: Recipe) -> str:
    """Say what a recipe is, and what becomes of its flags and environment."""
    status = "verified" if recipe.status == "verified" else "not yet verified"
    nodes = f"{recipe.nodes} node{'s' if recipe.nodes > 1 else ''}"
    sizes = ", ".join(f"{name}={getattr(recipe, name)}" for name in SIZES if getattr(recipe, name) > 1)
    head = f"{recipe.name}: {recipe.model} on {nodes}, {sizes}; {status} by its publisher"
    if recipe.pipeline_collapsed:
        head += "; stages became ranks, since drafts need one stage"
    return "\n".join([head, *(f"  {reading}" for reading in readings(recipe))])


def serve_command(recipe: Recipe) -> str | None:
    """The command of k3lib for a recipe; None if it has a flag that k3lib refuses."""
    every = readings(recipe)
    if any(reading.verdict == "refused" for reading in every):
        return None
    flags = {name.replace("_", "-"): getattr(recipe, name) for name in SIZES if getattr(recipe, name) > 1}
    flags |= {reading.name: reading.value for reading in every if reading.verdict == "taken" and reading.name.islower()}
    for flag, value in plan_flags(recipe).items():
        name = flag.replace("_", "-")
        if name in ("mamba-full-memory-ratio", "moe-exchange", "ep-size", "shared-experts-tp-size") and value != 1:
            flags[name] = value
    flags["mem-fraction-static"] = recipe.mem_fraction_static
    words = [f"--{name}" if value is True else f"--{name} {value}" for name, value in flags.items()]
    return " ".join(["k3lib-serve --model-path", str(recipe.model), *words])


def weights_of(recipe: Recipe, config: KimiK3Config, layout: ParallelConfig, *, vision: bool) -> Weights:
    """Count what the weights of a rank take.

    Args:
        recipe: names the draft.
        config: the target.
        layout: the ranks, perhaps others than the recipe's.
        vision: the ranks hold the vision tower.
    """
    model = layout_costs(config, layout, vision=vision).weight_bytes
    draft = recipe.draft
    if draft is None:
        return Weights(model, 0)
    parameters = draft.get("parameters")
    return Weights(model, None if parameters is None else parameters * 2 // layout.attention_size)


def draft_cell(recipe: Recipe, *, itemsize: int, tp_size: int) -> int | None:
    """Draft KV of a token and rank; None where the draft is not known.

    Args:
        recipe: names the draft.
        itemsize: bytes of one value.
        tp_size: ranks of a replica.
    """
    draft = recipe.draft
    if not draft:
        return None
    return grouped_kv_bytes(draft["kv_heads"], draft["head_dim"], draft["layers"], itemsize=itemsize, tp_size=tp_size)
