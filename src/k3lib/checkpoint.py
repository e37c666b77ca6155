"""Loading weights in the released layout, and replacing them in place: names, formats, shards, strictness.

Model specification, section 2. Which format a module is stored in is decided by its tensors, never by the manifest:

    plain   `<base>.weight`          BF16, F32, F16 or F64 [out, in]
    mxfp4   `<base>.weight_packed`   U8 [out, in/2],     `.weight_scale` U8 [out, in/32]
    nvfp4   `<base>.weight`          U8 [out, in/2],     `.weight_scale` F8_E4M3 [out, in/16], `.weight_scale_2` F32 []
    fp8     `<base>.weight`          F8_E4M3 [out, in],  `.weight_scale` F32 [ceil(out/128), 1, ceil(in/128), 1]

Routed experts stay packed in memory, or on disk; other packed modules are decoded while loading. Files and folders:
`k3lib.stored`; experts: `k3lib.expert_io`; writing: `k3lib.export`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from tqdm import tqdm

from k3lib.errors import CheckpointError, ConfigError
from k3lib.expert_io import (
    Cut,
    DiskExperts,
    check_codes,
    check_expert,
    check_plain,
    copy_expert,
    encode_expert,
    new_experts,
)
from k3lib.layers import Experts, KimiDeltaAttention, Linear
from k3lib.layers.kda import live_decay, warn_tails
from k3lib.layers.linear import Shard, placement, shard_range
from k3lib.ops import ExpertWeights, quant
from k3lib.stored import (
    GIVEN,
    PLAIN,
    TORCH_DTYPES,
    Folder,
    GivenTensors,
    OpenFiles,
    TensorInfo,
    fingerprint,
    read_header,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from k3lib.config import KimiK3Config, TextConfig
    from k3lib.ops.moe import ExpertFormat
    from k3lib.stored import Form, Reader

__all__ = [
    "DiskExperts",
    "Folder",
    "GivenTensors",
    "LoadPlan",
    "TensorInfo",
    "fingerprint",
    "load",
    "load_vision",
    "main_dtype",
    "plan_load",
    "plan_vision",
    "read_header",
    "update",
    "update_vision",
]

VISION_ROOTS = ("vision_tower.", "mm_projector.")

_EXPERT_FORMATS: dict[Form, ExpertFormat] = {"plain": "bf16", "mxfp4": "mxfp4", "nvfp4": "nvfp4"}

_Parts = dict[str, TensorInfo]  # the stored tensors of one matrix by role: weight, scale, scale_2


# ---- names --------------------------------------------------------------------------------------

_OLD_SPELLING = re.compile(r"(self_attention_res|mlp_res|output_attn_res)\.(proj|norm)_weight$")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def canonical_name(stored: str) -> str | None:
    """The module-tree name of a stored text tensor; None if its root is unknown."""
    name = stored.removeprefix("language_model.")
    if name.startswith("layers.") and name != stored:
        name = f"model.{name}"
    if not name.startswith(("model.", "lm_head.")):
        return None
    return _OLD_SPELLING.sub(r"\1_\2.weight", name)


def main_dtype(stored: Mapping[str, TensorInfo], config: KimiK3Config) -> torch.dtype:
    """Dtype of the activations of a checkpoint: that of its embedding, else what the configuration says."""
    for name, info in stored.items():
        if canonical_name(name) == "model.embed_tokens.weight" and info.dtype in PLAIN:
            return TORCH_DTYPES[info.dtype]
    dtype = getattr(torch, config.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"config: dtype={config.dtype!r} is not a torch dtype")
    return dtype


# ---- planning: what is read where, and everything that is wrong, before anything is allocated ----


@dataclass(slots=True)
class _Job:
    """Fill one parameter, or the experts of one layer. `check` raises beforehand what `run` would for their values."""

    names: list[str]
    run: Callable[[Reader, torch.device | str], None]
    check: Callable[[Reader], None] | None = None


@dataclass(slots=True)
class LoadPlan:
    """What loading will read, and what is wrong with the stored tensors.

    Attributes:
        missing: stored names that the model needs and the checkpoint lacks.
        unexpected: stored names that nothing asks for.
        misfits: tensors of a wrong shape or dtype, each with found and expected value.
        skipped: stored names passed over by rule: vision, layers that this model does not hold.
        forms: how many modules are stored in each format.
        tails: `A_log` tensors whose padding is not zero; known when they have been read.
    """

    jobs: list[_Job] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    forms: dict[str, int] = field(default_factory=dict)
    tails: list[str] = field(default_factory=list)

    def problems(self) -> list[str]:
        """All that is wrong, one line each."""
        return [
            *(f"missing: {name}" for name in self.missing),
            *(f"unexpected: {name}" for name in self.unexpected),
            *self.misfits,
        ]

    def check(self, path: Path | str) -> None:
        """Raise CheckpointError if anything is wrong."""
        problems = self.problems()
        if problems:
            summary = (
                f"{path}: {len(self.missing)} tensors missing, {len(self.unexpected)} unexpected, {len(self.misfits)} "
                "of a wrong shape or dtype:"
            )
            raise CheckpointError.listing(summary, problems)


class _Planner:
    def __init__(self, stored: Mapping[str, TensorInfo], *, dtype: torch.dtype, partial: bool) -> None:
        self.plan = LoadPlan()
        self.dtype = dtype
        self.partial = partial
        self.used: set[str] = set()
        self.stored: dict[str, TensorInfo] = {}
        for name, info in stored.items():
            if name.startswith(VISION_ROOTS):
                self.plan.skipped.append(name)
                continue
            canonical = canonical_name(name)
            if canonical is None:
                self.plan.unexpected.append(name)
            elif canonical in self.stored:
                self.plan.misfits.append(f"{name}: the same weight as {self.stored[canonical].name}")
            else:
                self.stored[canonical] = info
        # of a part: every module with a stored name below it
        names = self.stored if partial else ()
        self.owners = {name[:i] for name in names for i, letter in enumerate(name) if letter == "."}

    def take(self, name: str, dtypes: frozenset[str], *shapes: tuple[int, ...], hint: str = "") -> TensorInfo | None:
        """The stored tensor `name`, checked; None (and a note in the plan) if it is not right."""
        self.used.add(name)
        info = self.stored.get(name)
        if info is None:
            self.plan.missing.append(name)
            return None
        if info.dtype not in dtypes:
            self.plan.misfits.append(f"{info.name}: dtype {info.dtype}, expected {' or '.join(sorted(dtypes))}{hint}")
            return None
        if info.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            self.plan.misfits.append(f"{info.name}: shape {list(info.shape)}, expected {expected}{hint}")
            return None
        size = math.prod(info.shape) * TORCH_DTYPES[info.dtype].itemsize
        if info.nbytes != size:
            self.plan.misfits.append(f"{info.name}: {info.nbytes} bytes, its shape and dtype need {size}")
            return None
        return info

    def passes_over(self, name: str) -> bool:
        """Whether this part of the model is not to be replaced: a partial update lacks its tensor."""
        return self.partial and name not in self.stored and f"{name}_packed" not in self.stored

    def form(self, base: str) -> Form:
        """Format of the module `base`, by the tensors present."""
        if f"{base}.weight_packed" in self.stored:
            return "mxfp4"
        info = self.stored.get(f"{base}.weight")
        if info is not None and info.dtype == "U8":
            return "nvfp4"
        if info is not None and info.dtype == "F8_E4M3":
            return "fp8"
        return "plain"

    def count(self, form: Form) -> None:
        self.plan.forms[form] = self.plan.forms.get(form, 0) + 1

    def matrix(self, base: str, form: Form, rows: int, cols: int) -> dict[str, TensorInfo] | None:
        """The stored tensors of one matrix `[rows, cols]` in `form`, by their role."""
        u8, f32 = frozenset({"U8"}), frozenset({"F32"})
        fp8 = frozenset({"F8_E4M3"})
        parts: dict[str, TensorInfo | None]
        if form == "plain":
            parts = {"weight": self.take(f"{base}.weight", PLAIN, (rows, cols))}
        elif form == "mxfp4":
            hint = " (MXFP4: one scale for 32 inputs)"
            parts = {
                "weight": self.take(f"{base}.weight_packed", u8, (rows, cols // 2)),
                "scale": self.take(f"{base}.weight_scale", u8, (rows, cols // 32), hint=hint),
            }
        elif form == "nvfp4":
            hint = " (NVFP4: one scale for 16 inputs)"
            parts = {
                "weight": self.take(f"{base}.weight", u8, (rows, cols // 2)),
                "scale": self.take(f"{base}.weight_scale", fp8, (rows, cols // 16), hint=hint),
                "scale_2": self.take(f"{base}.weight_scale_2", f32, (), (1,)),
            }
            self.used.add(f"{base}.input_scale")
        else:
            tiles = (math.ceil(rows / 128), math.ceil(cols / 128))
            hint = " (one scale for 128 x 128)"
            parts = {
                "weight": self.take(f"{base}.weight", fp8, (rows, cols)),
                "scale": self.take(f"{base}.weight_scale", f32, (tiles[0], 1, tiles[1], 1), tiles, hint=hint),
            }
            self.used.add(f"{base}.input_scale")
        found = {role: info for role, info in parts.items() if info is not None}
        return found if len(found) == len(parts) else None

    def add(
        self,
        infos: list[TensorInfo],
        run: Callable[[Reader, torch.device | str], None],
        check: Callable[[Reader], None] | None = None,
    ) -> None:
        self.plan.jobs.append(_Job([info.name for info in infos], run, check))

    def refuse(self, owner: str, reason: str) -> None:
        """Note one misfit for all tensors of a module."""
        self.plan.misfits.append(f"{owner}: {reason}")
        self.used.update(name for name in self.stored if name.startswith(f"{owner}."))


def plan_load(
    model: nn.Module,
    stored: Mapping[str, TensorInfo],
    text: TextConfig,
    dtype: torch.dtype,
    *,
    resident_experts: int | None = None,
    partial: bool = False,
) -> LoadPlan:
    """Match the parameters of `model` with stored tensors.

    Parameters on the meta device get memory when the plan is carried out; others are written where they are.

    Args:
        model: a `KimiK3ForCausalLM`, whole, truncated, a slice, or one rank's part.
        stored: tensors by stored name.
        text: configuration of the text model.
        dtype: what packed modules outside the experts are decoded to.
        resident_experts: leave the routed experts in their files and hold this many of each layer; None loads all.
        partial: parts of the model that are not stored stay as they are.

    Raises:
        ConfigError: a packed format cannot be cut for this rank.
    """
    planner = _Planner(stored, dtype=dtype, partial=partial)
    files = None
    for name, module in model.named_modules():
        if partial and name not in planner.owners:
            continue
        if isinstance(module, Experts):
            limit = module.packed.limit if isinstance(module.packed, DiskExperts) else resident_experts
            if limit is None:
                _plan_experts(planner, name, module)
            else:
                files = files or _open_files(planner)
                _plan_disk_experts(planner, name, module, limit, files)
        else:
            for parameter_name in module._parameters:
                _plan_parameter(planner, name, module, parameter_name)
    held = {int(match[1]) for name, _ in model.named_parameters() if (match := _LAYER.match(name))}
    partial = len(held) < text.num_layers
    for name, info in planner.stored.items():
        if name in planner.used:
            continue
        match = _LAYER.match(name)
        layer = int(match[1]) if match else None
        elsewhere = partial and (layer is None or layer not in held) and _is_text_name(name, text)
        if (layer is not None and layer >= text.num_layers) or elsewhere:
            planner.plan.skipped.append(info.name)
        else:
            planner.plan.unexpected.append(info.name)
    return planner.plan


def _is_text_name(name: str, text: TextConfig) -> bool:
    """Whether a stored name that a partial model does not hold can belong to the whole model."""
    match = _LAYER.match(name)
    if match:
        return int(match[1]) < text.num_layers
    return name.startswith(("model.embed_tokens.", "model.norm.", "model.output_attn_res_", "lm_head."))


def _plan_parameter(planner: _Planner, owner: str, module: nn.Module, name: str) -> None:
    full = f"{owner}.{name}"
    if planner.passes_over(full):
        return
    if isinstance(module, KimiDeltaAttention) and name == "A_log":
        _plan_decay(planner, full, module)
        return
    place = placement(module.get_parameter(name))
    if isinstance(module, Linear):
        form = planner.form(owner)
        planner.count(form)
        if form != "plain":
            _plan_packed(planner, owner, module, form)
            return
    info = planner.take(full, PLAIN, place.full_shape)
    if info is not None:

        def run(source: Reader, device: torch.device | str, info: TensorInfo = info) -> None:
            dim = place.shard.dim if place.shard is not None else 0
            end = place.end if place.shard is not None else None
            source.copy_into(_memory(module, name, device), info, dim, place.begin, end)

        planner.add([info], run)


def _plan_packed(planner: _Planner, owner: str, module: Linear, form: Form) -> None:
    """Plan to decode a packed weight."""
    place = placement(module.weight)
    rows, cols = place.full_shape
    parts = planner.matrix(owner, form, rows, cols)
    if parts is None:
        return

    def run(source: Reader, device: torch.device | str) -> None:
        value = _decode(source, form, parts, planner.dtype)
        if place.shard is not None:
            value = value.narrow(place.shard.dim, place.begin, place.end - place.begin)
        _memory(module, "weight", device).copy_(value)

    def check(source: Reader) -> None:
        if form != "fp8":
            scale = source.read(parts["scale"]).clone()
            check_codes(form, parts, lambda: source.read(parts["weight"]), scale, planner.dtype)

    planner.add(list(parts.values()), run, check)


def _plan_decay(planner: _Planner, full: str, module: KimiDeltaAttention) -> None:
    info = _take_decay(planner, full, module)
    if info is None:
        return

    def run(source: Reader, device: torch.device | str) -> None:
        stored = source.read(info)
        if stored.reshape(-1)[module.config.num_heads :].any():
            planner.plan.tails.append(info.name)
        _memory(module, "A_log", device).copy_(module.pad_decay(info.name, stored))

    planner.add([info], run)


def _take_decay(planner: _Planner, full: str, module: KimiDeltaAttention) -> TensorInfo | None:
    info = planner.stored.get(full)
    planner.used.add(full)
    if info is None:
        planner.plan.missing.append(full)
        return None
    if info.dtype not in PLAIN:
        planner.plan.misfits.append(f"{info.name}: dtype {info.dtype}, expected F32")
        return None
    try:
        live_decay(info.name, torch.zeros(info.shape), module.config.num_heads)
    except CheckpointError as error:
        planner.plan.misfits.append(str(error))
        return None
    return info


def _pass_over_experts(planner: _Planner, owner: str, module: Experts) -> None:
    """Note the stored tensors of experts that lie on other ranks."""
    for e in sorted(set(range(module.config.num_experts)) - set(module.held)):
        for w in ("w1", "w2", "w3"):
            for end in ("weight", "weight_packed", "weight_scale", "weight_scale_2", "input_scale"):
                info = planner.stored.get(f"{owner}.{e}.{w}.{end}")
                if info is not None:
                    planner.used.add(f"{owner}.{e}.{w}.{end}")
                    planner.plan.skipped.append(info.name)


def _expert_parts(planner: _Planner, owner: str, module: Experts, form: Form) -> dict[int, dict[str, _Parts]] | None:
    """The stored matrices of every expert held here, by place; None (and notes in the plan) if any is not right."""
    c = module.config
    if form != "plain":
        unit = 32 if form == "mxfp4" else 16
        for width, what in ((c.expert_width, "the width"), (c.intermediate_size, "the intermediate width")):
            if width % unit:
                raise ConfigError(f"{owner}: {form.upper()} needs {what} of an expert ({width}) in multiples of {unit}")
        # a cut inside a group would tear codes from their scale
        shard_range(c.intermediate_size, module.tp, Shard(0, unit, f"the intermediate width of {form.upper()} experts"))
    parts: dict[int, dict[str, _Parts]] = {}
    complete = True
    for place, e in enumerate(module.held):
        matrices = {}
        for w, rows, cols in (
            ("w1", c.intermediate_size, c.expert_width),
            ("w3", c.intermediate_size, c.expert_width),
            ("w2", c.expert_width, c.intermediate_size),
        ):
            if planner.passes_over(f"{owner}.{e}.{w}.weight"):
                continue
            found = planner.matrix(f"{owner}.{e}.{w}", form, rows, cols)
            if found is not None:
                matrices[w] = found
            else:
                complete = False
        if matrices:
            parts[place] = matrices
    return parts if complete else None


def _expert_form(planner: _Planner, owner: str, module: Experts) -> Form | None:
    """The stored format of a layer's experts; None if there are none, or (and a note in the plan) it cannot be read."""
    _pass_over_experts(planner, owner, module)
    bases = [f"{owner}.{e}.{w}" for e in module.held for w in ("w1", "w2", "w3")]
    first = next((base for base in bases if not planner.passes_over(f"{base}.weight")), None)
    if first is None:
        return None
    form = planner.form(first)
    planner.count(form)
    if form == "fp8":
        planner.refuse(owner, "FP8 experts are not implemented; expected MXFP4, NVFP4 or plain")
        return None
    return form


def _plan_experts(planner: _Planner, owner: str, module: Experts) -> None:
    """Plan to read the experts of a layer into memory; packed ones stay packed."""
    form = _expert_form(planner, owner, module)
    if form is None:
        return
    if not isinstance(module.packed, ExpertWeights | None):
        planner.refuse(owner, f"these experts are held by a {type(module.packed).__name__}, which cannot be written")
        return
    held = None if module.packed is None and module.w13.is_meta else module.weights.format
    stored = _EXPERT_FORMATS[form]
    if form != "plain" and held not in {None, stored}:
        planner.refuse(owner, f"held as {held}, given as {form}: in place only {held} or plain ones can be written")
        return
    parts = _expert_parts(planner, owner, module, form)
    if parts is None:
        return
    if "nvfp4" in {held, stored} and (lone := [e for e, m in parts.items() if ("w1" in m) != ("w3" in m)]):
        planner.refuse(f"{owner}.{module.held[lone[0]]}", "w1 and w3 share the global scale of NVFP4; give both")
        return
    planner.add(
        [info for matrices in parts.values() for roles in matrices.values() for info in roles.values()],
        lambda source, device: _fill_experts(source, device, module, stored, parts, planner.dtype),
        lambda source: _check_experts(source, module, stored, parts, planner.dtype),
    )


def _open_files(planner: _Planner) -> OpenFiles:
    files = {info.file for name, info in planner.stored.items() if ".experts." in name and info.file is not GIVEN}
    try:
        return OpenFiles(files)
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read ({error.strerror})") from error


def _plan_disk_experts(planner: _Planner, owner: str, module: Experts, limit: int, files: OpenFiles) -> None:
    """Plan to note where the experts of a layer are."""
    if planner.partial or not files.files:
        planner.refuse(owner, "these experts are read from files when they are chosen; give a whole folder")
        return
    form = _expert_form(planner, owner, module)
    parts = None if form is None else _expert_parts(planner, owner, module, form)
    if form is None or parts is None:
        return

    def run(_source: Reader, device: torch.device | str) -> None:
        where = module.packed.device if isinstance(module.packed, DiskExperts) else device
        infos = [parts[e] for e in range(len(parts))]
        cut = Cut(module.begin, module.end)
        held = DiskExperts(
            infos, cut, _EXPERT_FORMATS[form], files, limit=limit, check_dtype=planner.dtype, device=where
        )
        held.first_expert = module.first_place
        module.set_packed(held)

    planner.add([], run)


def plan_vision(parts: Mapping[str, nn.Module], stored: Mapping[str, TensorInfo], *, partial: bool = False) -> LoadPlan:
    """Match the parameters of the vision tower and the projector with stored tensors; all others are passed over.

    Args:
        parts: modules by the root of their stored names, `vision_tower` and `mm_projector`.
        stored: tensors by stored name.
        partial: what is not stored stays as it is.
    """
    planner = _Planner({}, dtype=torch.float32, partial=partial)
    planner.stored = {name: info for name, info in stored.items() if name.startswith(VISION_ROOTS)}
    planner.plan.skipped = [name for name in stored if name not in planner.stored]
    for root, part in parts.items():
        for owner, module in part.named_modules(prefix=root):
            for name in module._parameters:
                _plan_whole(planner, f"{owner}.{name}", module, name)
    planner.plan.unexpected = [name for name in planner.stored if name not in planner.used]
    return planner.plan


def _plan_whole(planner: _Planner, full: str, module: nn.Module, name: str) -> None:
    """Plan to read a parameter that every rank holds whole."""
    if planner.passes_over(full):
        return
    info = planner.take(full, PLAIN, tuple(module.get_parameter(name).shape))
    if info is not None:

        def run(source: Reader, device: torch.device | str) -> None:
            source.copy_into(_memory(module, name, device), info, 0, 0, None)

        planner.add([info], run)


# ---- reading ------------------------------------------------------------------------------------


class _Source:
    """A reader for loading: maps files, and never more than a bounded piece of one for long."""

    BUDGET = 32 << 20

    def __init__(self, progress: tqdm[Any]) -> None:
        self.progress = progress
        self._file: Path | None = None
        self._handle: Any = None
        self._mapped = 0

    def _open(self, info: TensorInfo) -> Any:  # noqa: ANN401 - safe_open has no types
        # pages of a mapped file stay in memory until it is closed
        if self._file != info.file or self._mapped > self.BUDGET:
            self.close()
            try:
                self._handle = safe_open(info.file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{info.file}: cannot be opened ({error})") from error
            self._file = info.file
        return self._handle

    def close(self) -> None:
        self._handle, self._file, self._mapped = None, None, 0

    def _count(self, tensor: Tensor) -> None:
        self._mapped += tensor.nbytes
        self.progress.update(tensor.nbytes)

    def read(self, info: TensorInfo) -> Tensor:
        """One whole tensor; copy it before the next read."""
        tensor: Tensor = self._open(info).get_tensor(info.name)
        self._count(tensor)
        return tensor

    def copy_into(self, target: Tensor, info: TensorInfo, dim: int, begin: int, end: int | None) -> None:
        """Copy `[begin, end)` along `dim` (all if `end` is None) into `target`, in pieces of bounded size."""
        if end is None:
            begin, end = 0, info.shape[dim] if info.shape else 0
        if not info.shape:
            target.copy_(self.read(info))
            return
        rows = target.shape[0]
        step = max(1, self.BUDGET // max(1, info.nbytes // info.shape[0]))
        for first in range(0, rows, step):
            last = min(rows, first + step)
            slices = [slice(None)] * len(info.shape)
            if dim == 0:
                slices[0] = slice(begin + first, begin + last)
            else:
                slices[0], slices[dim] = slice(first, last), slice(begin, end)
            piece = self._open(info).get_slice(info.name)[tuple(slices)]
            target[first:last].copy_(piece)
            self._count(piece)


def _decode(source: Reader, form: Form, parts: _Parts, dtype: torch.dtype) -> Tensor:
    weight, scale = source.read(parts["weight"]).clone(), source.read(parts["scale"]).clone()
    if form == "fp8":
        return quant.fp8_block_decode(weight, scale, dtype)
    check_codes(form, parts, lambda: weight, scale, dtype)
    if form == "mxfp4":
        return quant.mxfp4_decode(weight, scale, dtype)
    return quant.nvfp4_decode(weight, scale, source.read(parts["scale_2"]).clone(), dtype)


def _memory(module: nn.Module, name: str, device: torch.device | str) -> Tensor:
    """Where a parameter is to be written: its own memory; on the meta device it gets some on `device` first."""
    old = module._parameters[name]
    assert old is not None, "modules have no empty parameters"
    if old.is_meta:
        # not empty_like: of a meta tensor it imports the compiler, for more than half a second
        new = nn.Parameter(torch.empty(old.shape, dtype=old.dtype, device=device))
        if hasattr(old, "placement"):
            new.placement = old.placement  # type: ignore[attr-defined]
        module._parameters[name] = old = new
    return old.detach()


def _expert_memory(
    module: Experts, form: ExpertFormat, dtype: torch.dtype, device: torch.device | str
) -> ExpertWeights:
    """Where the experts of a layer are to be written: what it holds, or new memory in the stored format."""
    if isinstance(module.packed, ExpertWeights):
        return module.packed
    if form == "bf16":
        return ExpertWeights(_memory(module, "w13", device), _memory(module, "w2", device))
    c = module.config
    inner = module.end - module.begin
    made = new_experts(len(module.held), form, c.expert_width, inner, dtype=dtype, device=device)
    made.first_expert = module.first_place
    return made


def _fill_experts(
    source: Reader,
    device: torch.device | str,
    module: Experts,
    stored: ExpertFormat,
    parts: Mapping[int, Mapping[str, _Parts]],
    dtype: torch.dtype,
) -> None:
    into, cut = _expert_memory(module, stored, dtype, device), Cut(module.begin, module.end)
    for e, matrices in parts.items():
        if into.format == stored:
            copy_expert(source, matrices, cut, into, e, dtype=dtype)
        else:
            encode_expert(source, matrices, cut, into, e)
    if into.format != "bf16" and module.packed is None:
        module.set_packed(into)


def _check_experts(
    source: Reader,
    module: Experts,
    stored: ExpertFormat,
    parts: Mapping[int, Mapping[str, _Parts]],
    dtype: torch.dtype,
) -> None:
    """Raise what `_fill_experts` would for the values."""
    for matrices in parts.values():
        if stored != "bf16":
            check_expert(source, matrices, Cut(module.begin, module.end), stored, dtype=dtype)
        elif module.weights.format != "bf16":
            check_plain(source, matrices, module.weights.format)


def load(
    model: nn.Module,
    stored: Mapping[str, TensorInfo],
    *,
    text: TextConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    resident_experts: int | None = None,
    progress: bool = True,
) -> None:
    """Fill a model that is on the meta device.

    Args:
        model: a `KimiK3ForCausalLM`, whole, truncated, a slice, or one rank's part.
        stored: tensors by stored name.
        text: configuration of the text model.
        dtype: of the activations; packed modules outside the experts are decoded to it.
        device: where the weights go.
        resident_experts: routed experts of a layer that are held at most, the others being read when they are chosen;
            None holds all.
        progress: show a progress bar on a terminal.

    Raises:
        CheckpointError: anything missing, unexpected, mis-shaped or damaged; nothing has been allocated if the headers
            show it.
        ConfigError: a packed format cannot be cut for this rank.
    """
    plan = plan_load(model, stored, text, dtype, resident_experts=resident_experts)
    _check_and_run(plan, stored, device, progress=progress)
    warn_tails(plan.tails, stacklevel=4)  # whoever called from_pretrained


def _check_and_run(
    plan: LoadPlan, stored: Mapping[str, TensorInfo], device: torch.device | str, *, progress: bool
) -> None:
    plan.check(next(iter(stored.values())).file.parent if stored else "this checkpoint")
    with _progress(plan, stored, progress) as bar, torch.no_grad():
        source = _Source(bar)
        for job in plan.jobs:
            job.run(source, device)
        source.close()


def update(
    model: nn.Module,
    stored: Mapping[str, TensorInfo],
    given: GivenTensors | None,
    *,
    text: TextConfig,
    dtype: torch.dtype,
    partial: bool = False,
    progress: bool = True,
) -> None:
    """Replace the weights of a model in the memory where they are.

    Args:
        model: a `KimiK3ForCausalLM` that has weights.
        stored: the new tensors by stored name.
        given: the tensors that `stored` describes; None: they are in files.
        text: configuration of the text model.
        dtype: of the activations.
        partial: what is not stored stays.
        progress: show a progress bar on a terminal.

    Raises:
        CheckpointError: anything missing, unexpected, mis-shaped or damaged, and nothing has been written; or a failure
            while writing, which says so (`weights_changed`).
        ConfigError: a packed format cannot be cut for this rank.
    """
    plan = plan_load(model, stored, text, dtype, partial=partial)
    where = next(iter(stored.values())).file if stored else GIVEN
    plan.check(where if where is GIVEN else where.parent)
    with _progress(plan, stored, progress and given is None) as bar, torch.no_grad():
        files = _Source(bar)
        source: Reader = given or files
        for job in plan.jobs:
            if job.check is not None:
                job.check(source)
        bar.reset()
        done = 0
        try:
            for done, job in enumerate(plan.jobs):  # noqa: B007 - told in the error
                job.run(source, "cpu")  # parameters are where they are
        except Exception as error:
            failure = CheckpointError(
                f"{error}\nThis happened while writing: the weights are partly new ({done} of {len(plan.jobs)} "
                "parameters, and perhaps some of the next). Load again before the model is used"
            )
            failure.weights_changed = True
            raise failure from error
        files.close()
    warn_tails(plan.tails, stacklevel=4)  # whoever called load_weights


def load_vision(
    parts: Mapping[str, nn.Module],
    stored: Mapping[str, TensorInfo],
    *,
    device: torch.device | str,
    progress: bool = True,
) -> None:
    """Fill a vision tower and a projector that are on the meta device; see `plan_vision`.

    Raises:
        CheckpointError: anything missing, unexpected, mis-shaped or damaged.
    """
    _check_and_run(plan_vision(parts, stored), stored, device, progress=progress)


def update_vision(
    parts: Mapping[str, nn.Module],
    stored: Mapping[str, TensorInfo],
    given: GivenTensors | None,
    *,
    partial: bool = False,
    progress: bool = True,
) -> None:
    """Replace the weights of a vision tower and a projector where they are; see `update`.

    Raises:
        CheckpointError: anything missing, unexpected, mis-shaped or damaged, and nothing has been written.
    """
    plan = plan_vision(parts, stored, partial=partial)
    plan.check("the given tensors" if given is not None else next(iter(stored.values())).file.parent)
    with _progress(plan, stored, progress and given is None) as bar, torch.no_grad():
        files = _Source(bar)
        for job in plan.jobs:
            job.run(given or files, "cpu")  # parameters are where they are
        files.close()


def _progress(plan: LoadPlan, stored: Mapping[str, TensorInfo], shown: bool) -> tqdm[Any]:
    by_name = {info.name: info for info in stored.values()}
    total = sum(by_name[name].nbytes for job in plan.jobs for name in job.names)
    return tqdm(total=total, unit="B", unit_scale=True, desc="weights", disable=None if shown else True)
