"""Published deployments of Kimi-K3: which layout, flags, environment and kernels each names, and how its pools split.

`recipes.json` beside this file holds what is published of a deployment; what follows from it is computed here: the
layout under speculation, what a combination excludes, and the ratio of the pools.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, fields
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal

from k3lib.cache.costs import MEAN_REQUEST_TOKENS, ratio_terms
from k3lib.cache.sizing import SPECULATIVE_RUNNING
from k3lib.config import KimiK3Config
from k3lib.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "SIZES",
    "HiCache",
    "Quantization",
    "Recipe",
    "Speculation",
    "kimi_k3",
    "recipe_names",
    "resolve_recipe",
]

Quantization = Literal["mxfp4", "nvfp4", "modelslim"]
Speculation = Literal["none", "dspark", "dflash"]
HiCache = Literal["off", "l2", "l3"]

SIZES = ("tp_size", "pp_size", "dp_size", "ep_size", "dcp_size")
_DRAFTS = {"dspark": "RadixArk/Kimi-K3-DSpark", "dflash": "modal-labs/Kimi-K3-DFlash"}
_MANIFESTS = {
    "mxfp4": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
    "nvfp4": {"quant_method": "modelopt_mixed", "quant_algo": "MIXED_PRECISION"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One published deployment, or why there is none. Flags and names of kernels are those of the server it is for.

    Attributes:
        hardware, pd_mode, strategy: which deployment.
        quantization: format of the weights.
        spec: who drafts.
        hicache: tiers behind the cache.
        available: whether it is published; of one that is not, only these and the reason are set.
        unavailable_reason: why not.
        pipeline_collapsed: stages became ranks of one stage, because drafts need one stage.
        model: hub name of the weights.
        nodes: machines.
        tp_size, pp_size, dp_size, ep_size, dcp_size: the layout.
        attn_tp_size: ranks of a replica.
        mem_fraction_static: share of a device's memory for weights and pools.
        options: further flags, without dashes in front.
        env: environment.
        resolved_backends: kernels and exchanges that the other server takes, by what for; one that is not known is
            left out.
        mamba: strategy, slots a request (S), states of a verify window (D), and ratio of the pools with its flag; or
            what sets the slots instead.
        max_running_requests_default: a number, or "auto".
        status: "verified" or "final-verification-in-progress".
    """

    hardware: str
    pd_mode: str
    strategy: str
    quantization: str
    spec: str
    hicache: str = "off"
    available: bool = True
    unavailable_reason: str | None = None
    pipeline_collapsed: bool = False
    model: str | None = None
    nodes: int = 0
    tp_size: int = 0
    pp_size: int = 0
    dp_size: int = 0
    attn_tp_size: int = 0
    ep_size: int = 0
    dcp_size: int = 0
    mem_fraction_static: float = 0.0
    options: Mapping[str, Any] | None = None
    env: tuple[str, ...] = ()
    resolved_backends: Mapping[str, Any] | None = None
    mamba: Mapping[str, Any] | None = None
    max_running_requests_default: int | str | None = None
    status: str | None = None

    @property
    def name(self) -> str:
        """HARDWARE/PD_MODE/STRATEGY."""
        return f"{self.hardware}/{self.pd_mode}/{self.strategy}"

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.tp_size * self.pp_size

    @property
    def memory_gib(self) -> float | None:
        """Memory of a device by its name on the box, in GiB; None if it is not known."""
        found = _data()["hardware"][self.hardware].get("memory_gb")
        return None if found is None else found * 1e9 / 2**30

    @property
    def draft(self) -> Mapping[str, int] | None:
        """KV heads, head size, layers and parameters of the draft, empty if they are not known; None without one."""
        path = (self.options or {}).get("speculative-draft-model-path")
        return None if path is None else _data()["drafts"][path]

    def as_dict(self) -> dict[str, Any]:
        """Everything by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def recipe_names() -> list[str]:
    """All HARDWARE/PD_MODE/STRATEGY."""
    data = _data()
    presets = data["presets"]
    large = [
        f"{hardware}/unified/{kind}-{gpus}"
        for hardware in presets["hardware"]
        for kind in ("peak-throughput", "peak-capacity")
        for gpus in presets["gpus"]
    ]
    return [*data["cells"], *large]


def resolve_recipe(
    hardware: str,
    pd_mode: str,
    strategy: str,
    *,
    quantization: Quantization | None = None,
    spec: Speculation | None = None,
    hicache: HiCache = "off",
) -> Recipe:
    """Resolve a published deployment.

    Args:
        hardware: "b300", "gb300", "b200", "gb200", "h200", "h100", "mi350x", "mi355x", "a3" or "a5".
        pd_mode: "unified", "prefill" or "decode".
        strategy: "low-latency", "balanced", "high-throughput", for prefill "default", "long-context"; or one for many
            devices, "peak-throughput-N" or "peak-capacity-N".
        quantization: of the weights; None is the first that is published for the hardware.
        spec: who drafts; None is nobody, on Ascend DSPARK.
        hicache: tiers behind the cache: "l2" is host memory, "l3" a store besides.

    Returns:
        The deployment; with `available=False` and the reason where what was asked for is not published.

    Raises:
        ConfigError: an unknown name. The message lists the known ones.
    """
    cell = _cell(hardware, pd_mode, strategy)
    machine = _data()["hardware"][hardware]
    npu = machine["family"] == "ascend"
    formats = machine["formats"]
    asked: dict[str, Any] = {
        "hardware": hardware,
        "pd_mode": pd_mode,
        "strategy": strategy,
        "quantization": _known("quantization", quantization or formats[0], tuple(_data()["models"])),
        "spec": _known("spec", spec or ("dspark" if npu else "none"), ("none", "dspark", "dflash")),
        "hicache": _known("hicache", hicache, ("off", "l2", "l3")),
    }
    sizes: dict[str, Any] = {name: cell.get(name, 1) for name in SIZES}
    reason = _excluded(asked, machine, cell, sizes)
    if reason is not None:
        return Recipe(**asked, available=False, unavailable_reason=reason)
    collapsed = asked["spec"] == "dspark" and sizes["pp_size"] > 1
    if collapsed:
        sizes = {name: size * sizes["pp_size"] if size > 1 else 1 for name, size in sizes.items()} | {"pp_size": 1}
    if hicache == "l3" or (hicache == "l2" and asked["spec"] == "dflash"):
        sizes["dcp_size"] = 1
    options = _options(asked, cell, npu)
    if options.get("moe-a2a-backend"):  # such exchanges spread whole experts over all ranks
        sizes["ep_size"] = sizes["tp_size"]
    if sizes["dcp_size"] == 1:
        options.pop("dcp-comm-backend", None)
    env = list(cell.get("env", ()))
    if machine["family"] == "cdna4" and asked["spec"] == "none":
        env.append("SGLANG_MLA_DECODE_TUNE=1")
    if hicache == "l3":
        env.append("SGLANG_HICACHE_MOONCAKE_CONFIG_PATH={CONFIG}")
    running: int | str = "auto (KV estimate, then state-pool clamp)" if asked["spec"] == "none" else SPECULATIVE_RUNNING
    return Recipe(
        **asked,
        **sizes,
        pipeline_collapsed=collapsed,
        model=_data()["models"][asked["quantization"]],
        nodes=cell["nodes"],
        attn_tp_size=sizes["tp_size"] // sizes["dp_size"],
        mem_fraction_static=cell.get("mem_fraction_static", 0.85),
        options=options,
        env=tuple(env),
        resolved_backends=_backends(asked, machine, sizes, options),
        mamba=_pools(asked, sizes, options, npu),
        max_running_requests_default=options.get("max-running-requests", running),
        status="verified" if cell.get("verified") and asked["spec"] != "dflash" else "final-verification-in-progress",
    )


@functools.cache
def kimi_k3(quantization: str = "mxfp4") -> KimiK3Config:
    """The geometry of the released model with weights of this format, without reading anything else."""
    geometry = _data()["geometry"]
    text = geometry["text"]
    last = text["num_hidden_layers"]
    mla = [*range(4, last, 4), last]
    return KimiK3Config.tiny(
        **{key: value for part in geometry.values() for key, value in part.items()},
        full_attn_layers=mla,
        kda_layers=[layer for layer in range(1, last) if layer not in mla],
        quantization_config=_MANIFESTS.get(quantization),
    )


@functools.cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(resources.files("k3lib.engine").joinpath("recipes.json").read_text("utf-8"))
    return data


def _known(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(known)}")
    return value


def _cell(hardware: str, pd_mode: str, strategy: str) -> dict[str, Any]:
    """What is published, with its named groups of flags and environment written out."""
    data = _data()
    name = f"{hardware}/{pd_mode}/{strategy}"
    if name not in recipe_names():
        near = [known for known in recipe_names() if known.startswith(f"{hardware}/")]
        what = f"{hardware} has {', '.join(near)}" if near else f"hardware is one of {', '.join(data['hardware'])}"
        raise ConfigError(f"recipe {name!r} is not published: {what}")
    if name not in data["cells"]:
        return _preset(hardware, *strategy.rsplit("-", 1))
    cell = data["cells"][name]
    options = {key: value for group in cell.get("use", ()) for key, value in data["options"][group].items()}
    return {**cell, "options": options | cell.get("options", {}), "env": data["env"].get(cell.get("env"), [])}


def _preset(hardware: str, kind: str, gpus: str) -> dict[str, Any]:
    """One for many devices: replicas of eight ranks, experts over all."""
    presets = _data()["presets"]
    size, width = int(gpus), presets["attention_tp"]
    replicas = {"enable-dp-attention": True, "enable-dp-lm-head": True} if size > width else {}
    return {
        "nodes": size // _data()["hardware"][hardware]["gpus_per_node"],
        "tp_size": size,
        "ep_size": size,
        "dp_size": size // width,
        "dcp_size": width if kind == "peak-capacity" else 1,
        "mem_fraction_static": presets["mem_fraction_static"],
        "options": {**replicas, **presets["options"]},
        "env": presets["env"],
        "formats": ["mxfp4"],
    }


def _excluded(
    asked: dict[str, str], machine: dict[str, Any], cell: dict[str, Any], sizes: dict[str, int]
) -> str | None:
    """Why this combination is not published."""
    family, spec, form = machine["family"], asked["spec"], asked["quantization"]
    formats = cell.get("formats", machine["formats"])
    if form not in formats:
        return f"quantization {form} is not published for this recipe; {' and '.join(formats)} is"
    if family == "ascend" and spec != "dspark":
        return "NPU recipes ship DSPARK only"
    if family == "ascend" and asked["hicache"] != "off":
        return "HiCache does not keep recurrent states on NPU"
    if spec == "dflash" and family != "blackwell":
        return "K3 DFLASH not validated on this hardware"
    if sizes["pp_size"] > 1 and (spec == "dflash" or (spec == "dspark" and not cell.get("collapses"))):
        return f"{spec.upper()} requires pp_size == 1"
    if spec == "dflash" and sizes["dp_size"] > 1:
        return "DFLASH recipe excluded with DP attention"
    return None


def _options(asked: dict[str, str], cell: dict[str, Any], npu: bool) -> dict[str, Any]:
    """Flags beside the layout, in the order in which they are laid over each other."""
    options = dict(cell["options"])
    spec = asked["spec"]
    if asked["quantization"] == "nvfp4":
        options["moe-runner-backend"] = "flashinfer_trtllm"
    if spec != "none":
        options["speculative-algorithm"] = spec.upper()
        options["speculative-draft-model-path"] = _DRAFTS[spec]
        options[f"speculative-{spec}-block-size"] = 7 if spec == "dspark" else 8
        if npu:
            options |= {
                "speculative-draft-attention-backend": "ascend",
                "speculative-eagle-topk": 1,
                "speculative-draft-model-quantization": "unquant",
            }
        elif asked["pd_mode"] != "prefill":
            options["enable-linear-replayssm-spec"] = True
    if asked["hicache"] != "off":
        options["enable-hierarchical-cache"] = True
    if asked["hicache"] == "l3":
        options["hicache-storage-backend"] = "mooncake"
    return options


def _pools(asked: dict[str, str], sizes: dict[str, int], options: dict[str, Any], npu: bool) -> dict[str, Any]:
    """How the pools split: the ratio of a mean request, or what replaces it."""
    if npu:
        slots = options.get("max-mamba-cache-size")
        sizing = (
            f"--max-mamba-cache-size {slots}" if slots else "from --max-running-requests with radix off (1 slot each)"
        )
        return {"strategy": None, "ratio": None, "sizing": sizing}
    strategy = options.get("mamba-radix-cache-strategy", "extra_buffer")
    layout: dict[str, Any] = {name: sizes[name] for name in ("tp_size", "dp_size", "pp_size", "dcp_size")}
    terms = ratio_terms(
        kimi_k3(),
        **layout,
        kv_cache_dtype=options.get("kv-cache-dtype", "auto"),
        mamba_ssm_dtype=options.get("mamba-ssm-dtype", "float32"),
        mamba_radix_cache_strategy=strategy,
        speculative=asked["spec"] != "none",
        replayssm_spec=options.get("enable-linear-replayssm-spec", False),
        disaggregation_mode=asked["pd_mode"],
        avg_request_length=MEAN_REQUEST_TOKENS,
    )
    return {
        "strategy": "chunk cache (strategy inert)" if asked["pd_mode"] == "decode" else strategy,
        "S": terms.S,
        "D": terms.D,
        f"ratio_at_L_{MEAN_REQUEST_TOKENS}": float(terms.flag),
        "flag": f"--mamba-full-memory-ratio {terms.flag}",
    }


def _backends(
    asked: dict[str, str], machine: dict[str, Any], sizes: dict[str, int], options: dict[str, Any]
) -> dict[str, Any]:
    """Kernels and exchanges of the other server (serving specification, section 9)."""
    family, spec, dcp = machine["family"], asked["spec"], sizes["dcp_size"] > 1
    exchange = "ag_rs"
    if dcp:
        exchange = options.get("dcp-comm-backend") or ("fi_a2a" if machine.get("mnnvl") else "a2a")
    found: dict[str, Any] = {"dcp_comm": exchange, "symm_mem": bool(options.get("enable-symm-mem")) and not dcp}
    if dcp:
        found["dcp_replicate_q_proj"] = True
    if family == "ascend":
        return found | {
            **dict.fromkeys(("attn_prefill", "attn_decode", "attn_verify", "draft_attention", "moe_runner"), "ascend"),
            "moe_a2a": options["moe-a2a-backend"],
            "kda_verify": options.get("linear-attn-verify-backend", "npu default"),
        }
    prefill = options.get("prefill-attention-backend") or options.get("attention-backend")
    decode = options.get("decode-attention-backend") or options.get("attention-backend")
    if family == "blackwell":
        prefill, decode = "trtllm_mla", "cutedsl_mla" if dcp else "trtllm_mla"
    moe = {"blackwell": "flashinfer_mxfp4", "hopper": "marlin", "cdna4": "aiter"}[family]
    found |= {
        "attn_prefill": prefill or "fa3",
        "attn_decode": decode,
        "moe_runner": options.get("moe-runner-backend", moe),
        "kda_prefill": "flashinfer" if family == "blackwell" else "triton",
        "kda_decode": "triton",
    }
    if family != "cdna4":
        found["page_size"] = 64
    if options.get("moe-a2a-backend"):
        found["moe_a2a"] = options["moe-a2a-backend"]
    if spec == "none":
        return found
    found["kda_verify"] = "nv_cutedsl"
    if spec == "dflash":  # what verifies and drafts is not published
        return found
    if family == "hopper":
        return found | {"attn_verify": "prefill backend", "draft_attention": "fa3"}
    found |= {"attn_verify": decode, "draft_attention": "trtllm_mha" if family == "blackwell" else "triton"}
    if family == "blackwell" or dcp:
        found["speculative_attention_mode"] = "decode"
    return found
