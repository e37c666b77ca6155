"""Reading weights in the released layout: names, formats, shards, strictness. Writing: `k3lib.export`.

Model specification, section 2. Which format a module is stored in is decided by its tensors, never by the manifest:

    plain   `<base>.weight`          BF16, F32, F16 or F64 [out, in]
    mxfp4   `<base>.weight_packed`   U8 [out, in/2],     `.weight_scale` U8 [out, in/32]
    nvfp4   `<base>.weight`          U8 [out, in/2],     `.weight_scale` F8_E4M3 [out, in/16], `.weight_scale_2` F32 []
    fp8     `<base>.weight`          F8_E4M3 [out, in],  `.weight_scale` F32 [ceil(out/128), 1, ceil(in/128), 1]

Routed experts stay packed in memory; other packed modules are decoded while loading.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from tqdm import tqdm

from k3lib.errors import CheckpointError, ConfigError
from k3lib.layers import Experts, KimiDeltaAttention, Linear
from k3lib.layers.kda import live_decay, warn_tails
from k3lib.layers.linear import Shard, placement, shard_range
from k3lib.ops import ExpertWeights, quant

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from os import PathLike

    from torch import Tensor

    from k3lib.config import KimiK3Config, TextConfig

__all__ = [
    "Folder",
    "LoadPlan",
    "TensorInfo",
    "load",
    "main_dtype",
    "plan_load",
    "read_header",
]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
VISION_ROOTS = ("vision_tower.", "mm_projector.")

Form = Literal["plain", "mxfp4", "nvfp4", "fp8"]

_TORCH = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip
STORED_DTYPES = {dtype: name for name, dtype in _TORCH.items()}
_PLAIN = frozenset({"F64", "F32", "F16", "BF16"})


class TensorInfo(NamedTuple):
    """One stored tensor as its file's header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    nbytes: int


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Read the header of a safetensors file, and nothing else of it.

    Raises:
        CheckpointError: the file is missing, not safetensors, or shorter than its header promises.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > size - 8:
                raise CheckpointError(f"{file}: not a safetensors file, or cut inside its header ({size} bytes)")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    except (ValueError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: its header is damaged ({error})") from error
    infos = {}
    end = 0
    try:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            first, last = entry["data_offsets"]
            infos[name] = TensorInfo(name, entry["dtype"], tuple(entry["shape"]), file, last - first)
            end = max(end, last)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: its header is damaged (it does not describe tensors)") from error
    if size < 8 + length + end:
        raise CheckpointError(f"{file}: cut off: {size} bytes, its header promises {8 + length + end}")
    return infos


class Folder:
    """A weights folder on disk, or on the Hugging Face hub (files come when they are asked for)."""

    def __init__(self, path: str | PathLike[str], *, revision: str | None = None) -> None:
        self.path = Path(path)
        self.revision = revision
        self.is_local = self.path.is_dir()
        if not self.is_local and (self.path.exists() or len(self.path.parts) != 2 or self.path.is_absolute()):
            raise CheckpointError(f"{path}: neither a folder nor a name on the hub ('owner/name')")

    def file(self, name: str) -> Path:
        """Path of a file of the folder, fetched if it is on the hub."""
        if self.is_local:
            return self.path / name
        from huggingface_hub import hf_hub_download  # noqa: PLC0415 - only hub names need it
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError  # noqa: PLC0415

        try:
            return Path(hf_hub_download(self.path.as_posix(), name, revision=self.revision))
        except EntryNotFoundError:
            return self.path / name  # does not exist; reported by whoever needs it
        except (HfHubHTTPError, OSError) as error:
            raise CheckpointError(f"{self.path.as_posix()}: {name} cannot be fetched from the hub ({error})") from error

    def json(self, name: str) -> dict[str, Any]:
        """Parse a JSON file of the folder.

        Raises:
            CheckpointError: it is missing or not a JSON object.
        """
        file = self.file(name)
        try:
            value = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"{self.path}: there is no {name}") from error
        except ValueError as error:
            raise CheckpointError(f"{file}: not valid JSON ({error})") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{file}: expected a JSON object")
        return value

    def config(self) -> dict[str, Any]:
        """The parsed `config.json`."""
        return self.json("config.json")

    def tensors(self) -> dict[str, TensorInfo]:
        """All stored tensors by name, from the index and the headers of its files, or from the single file.

        Raises:
            CheckpointError: no weights, a file missing or damaged, or an index that names what its file lacks.
        """
        index_file = self.file(INDEX)
        if not index_file.exists():
            single = self.file(SINGLE)
            if not single.exists():
                raise CheckpointError(f"{self.path}: there is neither {INDEX} nor {SINGLE}")
            return read_header(single)
        weight_map = self.json(INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{index_file}: there is no weight_map from tensor names to file names")
        headers = {name: read_header(self.file(name)) for name in sorted(set(weight_map.values()))}
        absent = [f"{name} (in {file})" for name, file in weight_map.items() if name not in headers[file]]
        if absent:
            raise CheckpointError.listing(f"{index_file}: names {len(absent)} tensors that their files lack:", absent)
        return {name: headers[file][name] for name, file in weight_map.items()}


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
        if canonical_name(name) == "model.embed_tokens.weight" and info.dtype in _PLAIN:
            return _TORCH[info.dtype]
    dtype = getattr(torch, config.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"config: dtype={config.dtype!r} is not a torch dtype")
    return dtype


# ---- planning: what is read where, and everything that is wrong, before anything is allocated ----


@dataclass(slots=True)
class _Job:
    """Fill one parameter, or the experts of one layer."""

    names: list[str]
    run: Callable[[_Source, torch.device | str], None]


@dataclass(slots=True)
class LoadPlan:
    """What loading will read, and what is wrong with the stored tensors.

    Attributes:
        missing: stored names that the model needs and the checkpoint lacks.
        unexpected: stored names that nothing asks for.
        misfits: tensors of a wrong shape or dtype, each with found and expected value.
        skipped: stored names passed over by rule: vision, layers that this model does not hold.
        forms: how many modules are stored in each format.
    """

    jobs: list[_Job] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    forms: dict[str, int] = field(default_factory=dict)

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
    def __init__(self, stored: Mapping[str, TensorInfo]) -> None:
        self.plan = LoadPlan()
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
        return info

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
            parts = {"weight": self.take(f"{base}.weight", _PLAIN, (rows, cols))}
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

    def add(self, infos: list[TensorInfo], run: Callable[[_Source, torch.device | str], None]) -> None:
        self.plan.jobs.append(_Job([info.name for info in infos], run))


def plan_load(model: nn.Module, stored: Mapping[str, TensorInfo], text: TextConfig, dtype: torch.dtype) -> LoadPlan:
    """Match the parameters of `model` (which may be on the meta device) with stored tensors.

    Args:
        model: a `KimiK3ForCausalLM`, whole, truncated, a slice, or one rank's part.
        stored: tensors by stored name.
        text: configuration of the text model.
        dtype: what packed modules outside the experts are decoded to.

    Raises:
        ConfigError: a packed format cannot be cut for this rank.
    """
    planner = _Planner(stored)
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            _plan_experts(planner, name, module)
        else:
            for parameter_name in module._parameters:
                _plan_parameter(planner, name, module, parameter_name, dtype)
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


def _plan_parameter(planner: _Planner, owner: str, module: nn.Module, name: str, dtype: torch.dtype) -> None:
    target = module._parameters[name]
    assert target is not None, "modules have no empty parameters"
    place = placement(target)
    full = f"{owner}.{name}"
    if isinstance(module, KimiDeltaAttention) and name == "A_log":
        info = _take_decay(planner, full, module)
        if info is not None:

            def run_decay(source: _Source, device: torch.device | str, info: TensorInfo = info) -> None:
                stored = source.read(info)
                if stored.reshape(-1)[module.config.num_heads :].any():
                    source.tails.append(info.name)
                value = module.pad_decay(info.name, stored)
                _assign(module, name, value.to(device=device, dtype=target.dtype, copy=True))

            planner.add([info], run_decay)
        return
    form = planner.form(owner) if isinstance(module, Linear) else "plain"
    if form != "plain":
        planner.count(form)
        rows, cols = place.full_shape
        parts = planner.matrix(owner, form, rows, cols)
        if parts is not None:

            def run_packed(source: _Source, device: torch.device | str) -> None:
                value = _decode(source, form, parts, dtype)
                if place.shard is not None:
                    value = value.narrow(place.shard.dim, place.begin, place.end - place.begin)
                _assign(module, name, value.to(device=device, dtype=target.dtype, copy=True))

            planner.add(list(parts.values()), run_packed)
        return
    if isinstance(module, Linear):
        planner.count("plain")
    info = planner.take(full, _PLAIN, place.full_shape)
    if info is not None:

        def run_plain(source: _Source, device: torch.device | str, info: TensorInfo = info) -> None:
            value = torch.empty(target.shape, dtype=target.dtype, device=device)
            dim = place.shard.dim if place.shard is not None else 0
            source.copy_into(value, info, dim, place.begin, place.end if place.shard is not None else None)
            _assign(module, name, value)

        planner.add([info], run_plain)


def _take_decay(planner: _Planner, full: str, module: KimiDeltaAttention) -> TensorInfo | None:
    info = planner.stored.get(full)
    planner.used.add(full)
    if info is None:
        planner.plan.missing.append(full)
        return None
    if info.dtype not in _PLAIN:
        planner.plan.misfits.append(f"{info.name}: dtype {info.dtype}, expected F32")
        return None
    try:
        live_decay(info.name, torch.zeros(info.shape), module.config.num_heads)
    except CheckpointError as error:
        planner.plan.misfits.append(str(error))
        return None
    return info


def _plan_experts(planner: _Planner, owner: str, module: Experts) -> None:
    c = module.config
    form = planner.form(f"{owner}.0.w1")
    planner.count(form)
    if form == "fp8":
        planner.plan.misfits.append(f"{owner}: FP8 experts are not implemented; expected MXFP4, NVFP4 or plain")
        for name in planner.stored:
            if name.startswith(f"{owner}."):
                planner.used.add(name)
        return
    if form != "plain":
        unit = 32 if form == "mxfp4" else 16
        for width, what in ((c.expert_width, "the width"), (c.intermediate_size, "the intermediate width")):
            if width % unit:
                raise ConfigError(f"{owner}: {form.upper()} needs {what} of an expert ({width}) in multiples of {unit}")
        # a cut inside a group would tear codes from their scale
        shard_range(c.intermediate_size, module.tp, Shard(0, unit, f"the intermediate width of {form.upper()} experts"))
    parts: list[dict[str, dict[str, TensorInfo]]] = []
    for e in range(c.num_experts):
        matrices = {}
        for w, rows, cols in (
            ("w1", c.intermediate_size, c.expert_width),
            ("w3", c.intermediate_size, c.expert_width),
            ("w2", c.expert_width, c.intermediate_size),
        ):
            found = planner.matrix(f"{owner}.{e}.{w}", form, rows, cols)
            if found is not None:
                matrices[w] = found
        if len(matrices) == 3:
            parts.append(matrices)
    if len(parts) == c.num_experts:
        infos = [info for expert in parts for matrix in expert.values() for info in matrix.values()]
        planner.add(infos, lambda source, device: _fill_experts(source, device, module, form, parts))


# ---- reading ------------------------------------------------------------------------------------


class _Source:
    """Reads tensors and parts of tensors; never keeps more than a bounded piece of a file mapped."""

    BUDGET = 32 << 20

    def __init__(self, progress: tqdm[Any]) -> None:
        self.progress = progress
        self.tails: list[str] = []  # A_log tensors whose padding is not zero
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


def _decode(source: _Source, form: Form, parts: dict[str, TensorInfo], dtype: torch.dtype) -> Tensor:
    weight, scale = source.read(parts["weight"]).clone(), source.read(parts["scale"]).clone()
    if form == "mxfp4":
        quant.check_mxfp4(parts["scale"].name, weight, scale, dtype)
        return quant.mxfp4_decode(weight, scale, dtype)
    if form == "nvfp4":
        return quant.nvfp4_decode(weight, scale, source.read(parts["scale_2"]).clone(), dtype)
    return quant.fp8_block_decode(weight, scale, dtype)


def _assign(module: nn.Module, name: str, value: Tensor) -> None:
    old = module._parameters[name]
    new = nn.Parameter(value)
    if old is not None and hasattr(old, "placement"):
        new.placement = old.placement  # type: ignore[attr-defined]
    module._parameters[name] = new


def _fill_experts(
    source: _Source,
    device: torch.device | str,
    module: Experts,
    form: Form,
    parts: list[dict[str, dict[str, TensorInfo]]],
) -> None:
    """Stack the experts of one layer: w1 rows, then w3 rows, this rank's columns of w2; expert by expert."""
    c = module.config
    begin, end = module.begin, module.end
    local, width, count = end - begin, c.expert_width, c.num_experts
    shrink = {"plain": (1, 1), "mxfp4": (2, 32), "nvfp4": (2, 16)}[form]
    plain = module.w13.dtype
    stacks: dict[str, tuple[Tensor, Tensor]] = {}
    roles = ("weight",) if form == "plain" else ("weight", "scale")
    for role, factor in zip(roles, shrink, strict=False):
        dtype = plain if form == "plain" else _TORCH[parts[0]["w1"][role].dtype]
        w13 = torch.empty(count, 2 * local, width // factor, dtype=dtype, device=device)
        w2 = torch.empty(count, width, local // factor, dtype=dtype, device=device)
        stacks[role] = (w13, w2)
        for e, expert in enumerate(parts):
            source.copy_into(w13[e, :local], expert["w1"][role], 0, begin, end)
            source.copy_into(w13[e, local:], expert["w3"][role], 0, begin, end)
            source.copy_into(w2[e], expert["w2"][role], 1, begin // factor, end // factor)
    w13, w2 = stacks["weight"]
    if form == "plain":
        _assign(module, "w13", w13)
        _assign(module, "w2", w2)
        return
    w13_scale, w2_scale = stacks["scale"]
    if form == "nvfp4":
        for e, expert in enumerate(parts):
            for scale, w in ((w13_scale[e, :local], "w1"), (w13_scale[e, local:], "w3"), (w2_scale[e], "w2")):
                if scale.float().isnan().any():
                    raise CheckpointError(f"{expert[w]['scale'].name}: a scale is NaN")
    if form == "mxfp4":
        for e, expert in enumerate(parts):
            quant.check_mxfp4(expert["w1"]["scale"].name, w13[e, :local], w13_scale[e, :local], plain)
            quant.check_mxfp4(expert["w3"]["scale"].name, w13[e, local:], w13_scale[e, local:], plain)
            quant.check_mxfp4(expert["w2"]["scale"].name, w2[e], w2_scale[e], plain)
        module.set_packed(ExpertWeights(w13, w2, w13_scale, w2_scale, format="mxfp4"))
        return
    globals_: dict[str, list[float]] = {w: [float(source.read(x[w]["scale_2"])) for x in parts] for w in parts[0]}
    for e, (gate, up) in enumerate(zip(globals_["w1"], globals_["w3"], strict=True)):
        if gate != up:
            raise CheckpointError(
                f"{parts[e]['w1']['scale_2'].name}: {gate} differs from {up} of w3; an expert shares one global scale"
            )
    scale_13, scale_2 = (torch.tensor(globals_[w], dtype=torch.float32, device=device) for w in ("w1", "w2"))
    module.set_packed(ExpertWeights(w13, w2, w13_scale, w2_scale, scale_13, scale_2, format="nvfp4"))


def load(
    model: nn.Module,
    stored: Mapping[str, TensorInfo],
    *,
    text: TextConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: bool = True,
) -> None:
    """Fill a model that is on the meta device.

    Raises:
        CheckpointError: anything missing, unexpected, mis-shaped or damaged; nothing has been allocated if the headers
            show it.
        ConfigError: a packed format cannot be cut for this rank.
    """
    plan = plan_load(model, stored, text, dtype)
    plan.check(next(iter(stored.values())).file.parent if stored else "this checkpoint")
    by_name = {info.name: info for info in stored.values()}
    total = sum(by_name[name].nbytes for job in plan.jobs for name in job.names)
    with tqdm(total=total, unit="B", unit_scale=True, desc="weights", disable=None if progress else True) as bar:
        source = _Source(bar)
        for job in plan.jobs:
            job.run(source, device)
        source.close()
    warn_tails(source.tails, stacklevel=4)  # whoever called from_pretrained
