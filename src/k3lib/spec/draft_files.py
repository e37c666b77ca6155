"""Reading a draft's folder: which family it is, and its weights by their exact names."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from k3lib.checkpoint import Folder, LoadPlan
from k3lib.draft_config import FAMILIES, DraftConfig
from k3lib.errors import CheckpointError, ConfigError
from k3lib.layers.linear import fuse, placement
from k3lib.model import check_place
from k3lib.parallel.group import LOCAL, Group
from k3lib.spec.drafts import InferactDraft, RadixArkDraft, divides, make_draft
from k3lib.stored import PLAIN, TORCH_DTYPES, OpenFiles, TensorInfo

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

__all__ = ["BUNDLE", "load_draft"]

BUNDLE = "dspark"  # subfolder of a target that brings its draft along
# a name that only one kind of draft has
_SIGNS = {
    "fc_norm": "per-tap norms (lightseek)",
    "midlayer.": "an EAGLE-3 draft",
    "lm_head.": "an own vocabulary head (RedHatAI, EAGLE-3)",
    "d2t": "an own vocabulary (RedHatAI, EAGLE-3)",
    "mtp.": "weights inside a target (DeepSeek)",
    "conv": "convolutions (DFlash2)",
    "selector": "a candidate selector (DFlash2)",
}


def load_draft(
    path: str | PathLike[str],
    *,
    tp: Group = LOCAL,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    revision: str | None = None,
    cut: Literal["always", "evenly"] = "always",
) -> InferactDraft | RadixArkDraft:
    """Load a draft model, without gradients.

    Args:
        path: folder or hub name of a draft, or folder of a target with a draft in `dspark/`.
        tp: ranks that share it; only this rank's part is read.
        dtype: of the weights; None keeps the stored one.
        device: where the weights go; default CPU. On "meta" everything is checked and no weight is read.
        revision: of a hub name.
        cut: what if its heads or MLP do not divide over the ranks of `tp`: refuse, or, cutting "evenly" or not at all,
            hold the whole draft on each of them.

    Raises:
        ConfigError: another family, a configuration that is not implemented or does not divide over the ranks, a dtype
            that weights cannot have, or a device that is not here.
        CheckpointError: missing, unexpected, mis-shaped or damaged tensors or files. Nothing has been allocated.
    """
    check_place(dtype, device)
    folder = _open(path, revision)
    stored = _canonical(folder)
    config = _read_config(folder.config(), stored)
    tp = LOCAL if cut == "evenly" and not divides(config, tp.size) else tp
    draft = make_draft(config, tp=tp, dtype=dtype or _stored_dtype(stored), device="meta")
    _plan(draft, stored).check(folder.path)
    if torch.device(device or "cpu").type == "meta":
        return draft.eval()
    with torch.inference_mode(mode=False), torch.no_grad():
        files = OpenFiles(info.file for info in stored.values())
        for owner, module in draft.named_modules():
            for name, parameter in module._parameters.items():
                assert parameter is not None, "modules have no empty parameters"
                place = placement(parameter)
                # not empty_like: of a meta tensor it imports the compiler, for more than half a second
                made = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device=device or "cpu"))
                made.placement = place  # type: ignore[attr-defined]
                module._parameters[name] = made
                part = (0, 0, None) if place.shard is None else (place.shard.dim, place.begin, place.end)
                files.copy_into(made, stored[f"{owner}.{name}"], *part)
        draft.requires_grad_(requires_grad=False)
        fuse(draft)
    return draft.eval()


def _open(path: str | PathLike[str], revision: str | None) -> Folder:
    folder = Folder(path, revision=revision)
    bundled = folder.path / BUNDLE
    if folder.is_local and (bundled / "config.json").is_file():
        architectures = folder.config().get("architectures") or []
        if not any(name in FAMILIES for name in architectures):
            return Folder(bundled)
    return folder


def _canonical(folder: Folder) -> dict[str, TensorInfo]:
    """Stored tensors by the names of the modules: a `model.` in front may be there or not."""
    stored: dict[str, TensorInfo] = {}
    for name, info in folder.tensors().items():
        short = name.removeprefix("model.")
        if short in stored:
            raise CheckpointError(f"{folder.path}: {name} is the same weight as {stored[short].name}")
        stored[short] = info
    return stored


def _read_config(config: dict[str, Any], stored: Mapping[str, TensorInfo]) -> DraftConfig:
    """The configuration; whether there is a confidence head, the tensors say if the file does not."""
    homes = [config, *(config.get(home) or {} for home in ("dspark_config", "dflash_config"))]
    if not any("enable_confidence_head" in home or "dspark_enable_confidence_head" in home for home in homes):
        config = {**config, "enable_confidence_head": any(name.startswith("confidence_head.") for name in stored)}
    read = DraftConfig.from_hf(config)
    other = "fc.weight" if read.family == "inferact" else "context_proj.weight"
    signs = sorted({what for name in stored for sign, what in _SIGNS.items() if sign in name})
    if other in stored:
        signs.insert(0, other)
    if signs:
        raise ConfigError(
            f"the configuration names the family {read.family!r}, but the tensors are of another draft: they have "
            f"{', '.join(signs)}; known are the drafts of Inferact and RadixArk, and DFlash drafts like RadixArk's"
        )
    return read


def _stored_dtype(stored: Mapping[str, TensorInfo]) -> torch.dtype:
    info = stored.get("layers.0.input_layernorm.weight")
    return TORCH_DTYPES[info.dtype] if info is not None and info.dtype in PLAIN else torch.bfloat16


def _plan(draft: InferactDraft | RadixArkDraft, stored: Mapping[str, TensorInfo]) -> LoadPlan:
    plan = LoadPlan()
    names = set()
    for name, parameter in draft.named_parameters():
        names.add(name)
        info, shape = stored.get(name), placement(parameter).full_shape
        if info is None:
            plan.missing.append(name)
        elif info.dtype not in PLAIN:
            plan.misfits.append(f"{info.name}: dtype {info.dtype}, expected {' or '.join(sorted(PLAIN))}")
        elif info.shape != shape:
            plan.misfits.append(f"{info.name}: shape {list(info.shape)}, expected {list(shape)}")
        elif info.nbytes != math.prod(shape) * TORCH_DTYPES[info.dtype].itemsize:
            plan.misfits.append(f"{info.name}: {info.nbytes} bytes do not fit its shape and dtype")
    ignored = {"embed_tokens.weight"} if draft.config.family == "inferact" else set()
    plan.unexpected = [info.name for name, info in stored.items() if name not in names | ignored]
    return plan
