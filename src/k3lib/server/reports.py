"""What k3lib would do and why, as text: kernels of a model, contents of a checkpoint, health of an installation."""

from __future__ import annotations

import importlib.metadata
import platform
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

import torch

from k3lib import backends, checkpoint, ops
from k3lib.config import KimiK3Config
from k3lib.errors import ConfigError, K3Error
from k3lib.export import vision_layout
from k3lib.model import KimiK3ForCausalLM
from k3lib.ops.kda import KDASpec
from k3lib.ops.target import ARCHS, Target

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["doctor", "explain_model", "inspect_checkpoint"]


# ---- which kernels ------------------------------------------------------------------------------


def model_specs(
    config: KimiK3Config, *, tp_size: int = 1, dtype: torch.dtype = torch.bfloat16
) -> list[tuple[str, Any]]:
    """The calls a model makes: pairs of `op/phase` and spec."""
    text = config.text
    mla, hidden = text.mla, text.hidden_size
    heads = mla.num_heads // tp_size
    rows = 0 if text.attn_res is None else text.attn_res.num_blocks_before(text.num_layers)
    specs: list[tuple[str, Any]] = []
    modes: tuple[Literal["prefill", "decode"], ...] = ("prefill", "decode")
    for mode in modes:
        spec = KDASpec.from_config(config, tp_size=tp_size, mode=mode, dtype=dtype)
        specs.append((f"kda_mixer/{mode}", spec))
        specs.append((f"kda_{'chunk' if mode == 'prefill' else 'recurrent'}/{mode}", spec))
    channels = text.kda.conv_channels // tp_size
    specs += [
        (
            "short_conv/decode",
            ops.ConvSpec(
                channels=channels, width=text.kda.conv_width, dtype=dtype, stateful=True, tokens_per_request="1"
            ),
        ),
        (
            "attention_varlen/prefill",
            ops.AttentionSpec(heads=heads, key_dim=mla.qk_head_dim, value_dim=mla.v_head_dim, dtype=dtype, causal=True),
        ),
        (
            "mla_decode/decode",
            ops.MLASpec(
                heads=heads,
                latent_dim=mla.kv_lora_rank,
                rope_dim=mla.qk_rope_head_dim,
                value_dim=mla.kv_lora_rank,
                dtype=dtype,
                kv_dtype=dtype,
                page_size=64,
                tokens_per_request="1",
            ),
        ),
        (
            "attn_res/all",
            ops.AttnResSpec(hidden=hidden, num_blocks=rows, dtype=dtype, adds=True, writes=False, norms=True),
        ),
        ("linear/prefill", ops.LinearSpec(dtype=dtype, weight_dtype=dtype, tokens="many")),
        ("linear/decode", ops.LinearSpec(dtype=dtype, weight_dtype=dtype, tokens="few")),
        ("rms_norm/all", ops.NormSpec(width=hidden, dtype=dtype, weight_dtype=dtype)),
        (
            "situ_and_mul/all",
            ops.SiTUSpec(
                width=text.intermediate_size // tp_size, dtype=dtype, capped_up=text.act.linear_beta is not None
            ),
        ),
    ]
    if text.moe is not None:
        moe = text.moe
        specs += [
            (
                "route/all",
                ops.RouteSpec(experts=moe.num_experts, top_k=moe.top_k, num_groups=moe.num_groups, dtype=dtype),
            ),
            ("experts/all", ops.ExpertsSpec.from_config(config, tp_size=tp_size, dtype=dtype)),
        ]
    return specs


def target_of(arch: str | None) -> Target | None:
    """The target for `--arch`; None is this machine.

    Raises:
        ConfigError: an arch that no kernel knows.
    """
    if arch is None:
        return None
    if arch not in ARCHS:
        raise ConfigError(f"arch={arch!r} is not known; expected one of {', '.join(sorted(ARCHS))}")
    return Target.of(ARCHS[arch], arch)


def explain_model(
    config: KimiK3Config, *, arch: str | None = None, tp_size: int = 1, dtype: torch.dtype | None = None
) -> str:
    """The decision of every op for a model: which kernel would run, and why not the others.

    Packages count as present on a foreign chip if they are installed here.
    """
    target = target_of(arch)
    if dtype is None:
        dtype = torch.float32 if (target or Target.detect()).platform == "cpu" else torch.bfloat16
    lines = []
    for title, spec in model_specs(config, tp_size=tp_size, dtype=dtype):
        name, phase = title.split("/")
        op = ops.ops()[name]
        here = op.local_target()
        asked = here if target is None else Target(target.platform, target.arch, here.packages)
        decision = str(ops.explain(op, spec, target=asked)).split("\n")
        lines += [f"{decision[0]}, {phase}" if phase != "all" else decision[0], *decision[1:]]
    return "\n".join(lines)


# ---- what is in a checkpoint ----------------------------------------------------------------------


def _human(count: int) -> str:
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.4g} {unit}"


_CLASSES = (
    ("vision", "vision_tower."),
    ("vision", "mm_projector."),
    ("routed experts", ".experts."),
    ("shared experts", ".shared_experts."),
    ("router and latent projections", ".block_sparse_moe."),
    ("attention", ".self_attn."),
    ("dense MLP", ".mlp."),
    ("embedding and head", "embed_tokens"),
    ("embedding and head", "lm_head"),
)


def _class_of(name: str) -> str:
    return next((label for label, part in _CLASSES if part in name), "norms and attention residuals")


def _table(rows: Iterable[tuple[str, int, int]]) -> list[str]:
    return [f"  {label:<32} {count:>9,} tensors  {_human(nbytes):>11}" for label, count, nbytes in rows]


def inspect_checkpoint(path: str, *, revision: str | None = None) -> tuple[str, list[str]]:
    """Describe a checkpoint from its headers, and list what is wrong with it.

    Returns:
        The report, and one sentence for each problem (empty: it will load).

    Raises:
        CheckpointError: there is nothing to read, or a file is damaged.
    """
    folder = checkpoint.Folder(path, revision=revision)
    raw = folder.config()
    stored = folder.tensors()
    files = {info.file for info in stored.values()}
    total = sum(info.nbytes for info in stored.values())
    lines = [f"{path}: {len(stored):,} tensors in {len(files)} file{'s' * (len(files) != 1)}, {_human(total)}"]
    for title, key in (("by class", lambda i: _class_of(i.name)), ("by dtype", lambda i: i.dtype)):
        counts: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for info in stored.values():
            counts[key(info)] += 1
            sizes[key(info)] += info.nbytes
        lines += [
            title,
            *_table((label, counts[label], sizes[label]) for label in sorted(counts, key=lambda k: -sizes[k])),
        ]
    try:
        config = KimiK3Config.from_hf(raw)
        model = KimiK3ForCausalLM(config, dtype=checkpoint.main_dtype(stored, config), device="meta")
        plan = checkpoint.plan_load(model, stored, config.text, torch.bfloat16)
    except K3Error as error:
        return "\n".join(lines), [str(error)]
    text = config.text
    lines += [
        "config",
        f"  {text.num_layers} layers: {len(text.layers_of('kda'))} KDA, {len(text.layers_of('mla'))} MLA; "
        f"{len(text.dense_layers)} dense; hidden {text.hidden_size}; vocabulary {text.vocab_size}",
    ]
    if text.moe is not None:
        lines.append(f"  {text.moe.num_experts} experts, top {text.moe.top_k}, latent {text.moe.latent_size}")
    bound = text.kda.gate_lower_bound
    lines += [
        f"  KDA gate: {'softplus (no gate_lower_bound)' if bound is None else f'bounded at {bound}'}",
        f"  parameters: {sum(p.numel() for p in model.parameters()):,} (text)",
        f"  stored as: {', '.join(f'{count} modules {form}' for form, count in sorted(plan.forms.items()))}",
        f"  manifest: {config.quantization.method if config.quantization else 'none'}",
    ]
    problems = plan.problems() + _manifest_problems(config, plan) + _vision_problems(config, set(stored))
    return "\n".join(lines), problems


def _manifest_problems(config: KimiK3Config, plan: checkpoint.LoadPlan) -> list[str]:
    says = config.quantization.expert_format if config.quantization else None
    if says is not None and says not in plan.forms:
        return [f"the manifest promises {says.upper()}, but no module is stored so"]
    return []


def _vision_problems(config: KimiK3Config, names: set[str]) -> list[str]:
    found = {name for name in names if name.startswith(checkpoint.VISION_ROOTS)}
    if config.vision is None:
        return [f"{len(found)} vision tensors, but config.json has no vision_config"] if found else []
    want = set(vision_layout(config.vision))
    if not found:
        return [f"config.json has a vision_config, but all {len(want)} vision tensors are missing"]
    return [
        *(f"missing: {name}" for name in sorted(want - found)),
        *(f"unexpected: {name}" for name in sorted(found - want)),
    ]


# ---- doctor ---------------------------------------------------------------------------------------


def _version(dist: str) -> str | None:
    try:
        return importlib.metadata.version(dist)
    except importlib.metadata.PackageNotFoundError:
        return None


def doctor() -> str:
    """What is installed, which kernels would run here for K3, and what would fail and why."""
    target = Target.detect()
    lines = [
        f"k3lib {_version('k3lib') or '(a checkout)'}, Python {platform.python_version()}, torch {torch.__version__}",
        f"device: {target}" + ("" if target.platform == "cpu" else f" ({torch.cuda.get_device_name(0)})"),
        "server packages",
    ]
    for dist, why in (
        ("fastapi", "k3lib-serve"),
        ("uvicorn", "k3lib-serve"),
        ("tiktoken", "the official tokenizer"),
        ("llguidance", "constrained decoding"),
        ("pillow", "image input"),
    ):
        version = _version(dist)
        lines.append(f"  {dist:<22} {version or f'missing: {why} needs it (pip install k3lib[server])'}")
    lines.append("kernel packages")
    for package in backends.KNOWN:
        found = dict(target.with_packages((package,)).packages).get(package.module)
        reason = package.missing_from(target.with_packages((package,)))
        lines.append(f"  {package.module:<22} {found if reason is None else reason}")
    lines.append("kernels for Kimi-K3 here")
    config = KimiK3Config.tiny()
    for title, spec in model_specs(config, dtype=torch.float32 if target.platform == "cpu" else torch.bfloat16):
        op = ops.ops()[title.split("/")[0]]
        chosen = ops.explain(op, spec).chosen
        lines.append(f"  {title:<26} {chosen.name if chosen else 'nothing is able'}")
    lines += [f"  entry point {name} failed: {why}" for name, why in backends.FAILED.items()]
    if target.platform == "cpu":
        lines.append("no accelerator: everything runs on the CPU; see `k3lib explain --arch sm90` for a Hopper GPU")
    return "\n".join(lines)
