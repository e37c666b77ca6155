"""Routed experts between their stored tensors and memory: copied, encoded, checked, or read when they are chosen.

Shapes: E experts, L width of an expert, I intermediate width of this rank. An expert is stored as three matrices: w1
and w3 `[I, L]`, whose rows are cut over ranks, and w2 `[L, I]`, whose columns are.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import torch

from k3lib.errors import CheckpointError
from k3lib.ops import ExpertWeights, quant
from k3lib.stored import TORCH_DTYPES, GivenTensors, OpenFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from k3lib.ops.moe import ExpertFormat
    from k3lib.stored import Reader, TensorInfo

    ExpertInfos = Mapping[str, Mapping[str, TensorInfo]]  # by matrix (w1, w2, w3) and role (weight, scale, scale_2)

__all__ = [
    "Cut",
    "DiskExperts",
    "check_codes",
    "check_expert",
    "check_plain",
    "copy_expert",
    "encode_expert",
    "new_experts",
]

# how many columns of a matrix share one entry of a stored tensor, by role
_SHRINK: dict[str, dict[str, int]] = {
    "bf16": {"weight": 1},
    "mxfp4": {"weight": 2, "scale": 32},
    "nvfp4": {"weight": 2, "scale": 16},
}
_SCALE_DTYPES = {"mxfp4": torch.uint8, "nvfp4": torch.float8_e4m3fn}
_ENCODABLE = 1.75 * 2.0**127  # magnitudes below it have an MXFP4 and an NVFP4 code


class Cut(NamedTuple):
    """This rank's part `[begin, end)` of the intermediate width."""

    begin: int
    end: int

    def of(self, w: str, shrink: int = 1) -> tuple[int, int, int]:
        """Axis and range of this rank's part of a stored matrix."""
        return (1, self.begin // shrink, self.end // shrink) if w == "w2" else (0, self.begin, self.end)


def new_experts(
    count: int, form: ExpertFormat, width: int, inner: int, *, dtype: torch.dtype, device: torch.device | str
) -> ExpertWeights:
    """Uninitialised memory for `count` experts; `dtype` is that of plain weights."""

    def empty(role: str, shrink: int) -> tuple[Tensor, Tensor]:
        stored = dtype if form == "bf16" else _SCALE_DTYPES[form] if role == "scale" else torch.uint8
        w13 = torch.empty(count, 2 * inner, width // shrink, dtype=stored, device=device)
        return w13, torch.empty(count, width, inner // shrink, dtype=stored, device=device)

    made = {role: empty(role, shrink) for role, shrink in _SHRINK[form].items()}
    s13, s2 = made.get("scale", (None, None))
    weights = ExpertWeights(*made["weight"], s13, s2, None, None, form)
    if form == "nvfp4":
        weights.w13_scale_2, weights.w2_scale_2 = torch.empty(2, count, dtype=torch.float32, device=device).unbind()
    return weights


def _views(of: ExpertWeights, e: int) -> dict[str, dict[str, Tensor]]:
    """The matrices of expert `e` by name and role."""
    views: dict[str, dict[str, Tensor]] = {"w1": {}, "w2": {}, "w3": {}}
    for role, w13, w2 in (("weight", of.w13, of.w2), ("scale", of.w13_scale, of.w2_scale)):
        if w13 is not None and w2 is not None:
            views["w1"][role], views["w3"][role] = w13[e].chunk(2)
            views["w2"][role] = w2[e]
    return views


def copy_expert(
    reader: Reader, infos: ExpertInfos, cut: Cut, into: ExpertWeights, e: int, *, dtype: torch.dtype
) -> None:
    """Copy this rank's part of stored matrices, which have the format of `into`, to its expert `e`.

    Args:
        reader: gives the stored values.
        infos: all three matrices, or some.
        cut: this rank's part.
        into: experts of this rank.
        e: which of them.
        dtype: what packed weights will be decoded to; values beyond it are refused.

    Raises:
        CheckpointError: a packed matrix that decodes to NaN or infinity, or w1 and w3 with two global scales.
    """
    views = _views(into, e)
    for w, parts in infos.items():
        for role, shrink in _SHRINK[into.format].items():
            reader.copy_into(views[w][role], parts[role], *cut.of(w, shrink))
        if into.format != "bf16":
            check_codes(into.format, parts, lambda w=w: views[w]["weight"], views[w]["scale"], dtype)  # type: ignore[misc]
    if into.format == "nvfp4":
        assert into.w13_scale_2 is not None, "NVFP4 has global scales"
        assert into.w2_scale_2 is not None, "NVFP4 has global scales"
        for w, scale in _global_scales(reader, infos).items():
            (into.w2_scale_2 if w == "w2" else into.w13_scale_2)[e] = scale


def encode_expert(reader: Reader, infos: ExpertInfos, cut: Cut, into: ExpertWeights, e: int) -> None:
    """Encode plain matrices in the packed format of `into`, as its expert `e`; the rest as in `copy_expert`."""
    views = _views(into, e)
    tops: dict[str, Tensor] = {}
    if into.format == "nvfp4":  # whose global scale is that of whole matrices, not of a rank's part
        tops = {w: reader.read(parts["weight"]).abs().amax().float() for w, parts in infos.items()}
        if "w1" in tops and "w3" in tops:
            tops["w1"] = tops["w3"] = torch.maximum(tops["w1"], tops["w3"])
    for w, parts in infos.items():
        plain = _part(reader, parts["weight"], cut.of(w)).to(into.w13.device)
        if into.format == "mxfp4":
            packed, scale = quant.mxfp4_encode(plain)
        else:
            assert into.w13_scale_2 is not None, "NVFP4 has global scales"
            assert into.w2_scale_2 is not None, "NVFP4 has global scales"
            packed, scale, scale_2 = quant.nvfp4_encode(plain, amax=tops[w])
            (into.w2_scale_2 if w == "w2" else into.w13_scale_2)[e] = scale_2
        views[w]["weight"].copy_(packed)
        views[w]["scale"].copy_(scale)


def check_expert(reader: Reader, infos: ExpertInfos, cut: Cut, form: ExpertFormat, *, dtype: torch.dtype) -> None:
    """Raise what `copy_expert` would, without memory to copy to; reads scales, and codes only beside large scales."""
    for w, parts in infos.items():
        shrinks = _SHRINK[form]
        scale = _part(reader, parts["scale"], cut.of(w, shrinks["scale"]))

        def codes(w: str = w, parts: Mapping[str, TensorInfo] = parts, shrink: int = shrinks["weight"]) -> Tensor:
            return _part(reader, parts["weight"], cut.of(w, shrink))

        check_codes(form, parts, codes, scale, dtype)
    if form == "nvfp4":
        _global_scales(reader, infos)


def check_plain(reader: Reader, infos: ExpertInfos, form: ExpertFormat) -> None:
    """Refuse plain matrices that `encode_expert` could not encode.

    Raises:
        CheckpointError: a matrix with values that are not finite, or too large.
    """
    for parts in infos.values():
        top = reader.read(parts["weight"]).abs().amax()
        if not bool(top < _ENCODABLE):
            name = parts["weight"].name
            raise CheckpointError(
                f"{name}: needs finite values below {_ENCODABLE:.3g} to become {form}, got {top.item()}"
            )


def check_codes(
    form: str, parts: Mapping[str, TensorInfo], codes: Callable[[], Tensor], scale: Tensor, dtype: torch.dtype
) -> None:
    """Refuse a packed matrix that decodes to NaN, or to infinities in `dtype`.

    Args:
        form: "mxfp4" or "nvfp4".
        parts: its stored tensors, for the message.
        codes: gives the packed values; called only if the scales leave a doubt.
        scale: its scales.
        dtype: what it will be decoded to.
    """
    name = parts["scale"].name
    if form == "mxfp4" and not quant.mxfp4_is_safe(scale, dtype):
        quant.check_mxfp4(name, codes(), scale, dtype)
    if form == "nvfp4" and scale.float().isnan().any():
        raise CheckpointError(f"{name}: a scale is NaN")


def _global_scales(reader: Reader, infos: ExpertInfos) -> dict[str, float]:
    """The NVFP4 global scale of each matrix."""
    scales = {w: float(reader.read(parts["scale_2"])) for w, parts in infos.items()}
    if "w1" in scales and "w3" in scales and scales["w1"] != scales["w3"]:
        raise CheckpointError(
            f"{infos['w1']['scale_2'].name}: {scales['w1']} differs from {scales['w3']} of w3; an expert shares one "
            "global scale"
        )
    return scales


def _part(reader: Reader, info: TensorInfo, where: tuple[int, int, int]) -> Tensor:
    """This rank's part of a stored matrix."""
    dim, begin, end = where
    if isinstance(reader, GivenTensors):
        return reader.read(info).narrow(dim, begin, end - begin)
    shape = list(info.shape)
    shape[dim] = end - begin
    part = torch.empty(shape, dtype=TORCH_DTYPES[info.dtype])
    reader.copy_into(part, info, dim, begin, end)
    return part


class DiskExperts:
    """The routed experts of one layer, read when they are chosen; the last used are kept, as they are stored.

    Stands in for `ExpertWeights` in the `experts` op. An expert that is not held is read from its file; if `limit`
    experts are held already, the one that was not used for the longest time leaves first. Stored values are checked
    when they are read.

    Attributes:
        limit: most experts held.
        hits, misses: experts that a call of the op needed and found, or had to read. One that several tokens of a
            call chose counts once.
        bytes_read: bytes taken from files.
    """

    offloaded = True
    first_expert = 0

    def __init__(
        self,
        infos: Sequence[ExpertInfos],
        cut: Cut,
        form: ExpertFormat,
        files: OpenFiles,
        *,
        limit: int,
        check_dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Note where the experts are; reads nothing.

        Args:
            infos: stored tensors of each expert.
            cut: this rank's part.
            form: the stored format.
            files: reader of the files.
            limit: most experts to hold.
            check_dtype: what packed weights will be decoded to.
            device: where experts go when they are read.
        """
        self.infos = infos
        self.cut = cut
        self.format: ExpertFormat = form
        self.files = files
        self.limit = limit
        self.check_dtype = check_dtype
        self.device = torch.device(device)
        self.width = infos[0]["w2"]["weight"].shape[0]
        self.dtype = torch.uint8 if form != "bf16" else _common_dtype(infos)
        self.hits = self.misses = self.bytes_read = 0
        self._held: OrderedDict[int, ExpertWeights] = OrderedDict()

    @property
    def num_experts(self) -> int:
        """Experts of the layer."""
        return len(self.infos)

    @property
    def intermediate(self) -> int:
        """I, the local intermediate width."""
        return self.cut.end - self.cut.begin

    @property
    def held(self) -> tuple[int, ...]:
        """The experts in memory, the one that leaves next first."""
        return tuple(self._held)

    def stats(self) -> dict[str, int]:
        """Counters, the number of experts held now, and the most that are held."""
        return {
            "hits": self.hits,
            "misses": self.misses,
            "bytes_read": self.bytes_read,
            "resident": len(self._held),
            "limit": self.limit,
        }

    def decode(self, which: Tensor | int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return `w13` and `w2` of the experts `which` as plain matrices of `dtype`.

        Raises:
            CheckpointError: the file of an expert cannot be read, has changed, or holds values that are refused. Held
                experts stay, except for one that made room.
        """
        if isinstance(which, int):
            return self._hold(which).decode(0, dtype)
        numbers: list[int] = which.tolist()
        shapes = (len(numbers), 2 * self.intermediate, self.width), (len(numbers), self.width, self.intermediate)
        w13, w2 = (torch.empty(shape, dtype=dtype, device=self.device) for shape in shapes)
        for e in sorted(set(numbers)):
            one = self.decode(e, dtype)
            for row in (i for i, number in enumerate(numbers) if number == e):
                w13[row], w2[row] = one
        return w13, w2

    def expert(self, e: int) -> ExpertWeights:
        """Expert `e` as a stack of one: the held one, else read without being kept or counted as used."""
        return self._held.get(e) or self._read(e)

    def to(self, device: torch.device) -> None:
        """Move what is held; experts read later go to `device` too."""
        self.device = device
        for one in self._held.values():
            one.to(device)

    def _hold(self, e: int) -> ExpertWeights:
        one = self._held.get(e)
        if one is not None:
            self.hits += 1
            self._held.move_to_end(e)
            return one
        self.misses += 1
        if len(self._held) >= self.limit:
            self._held.popitem(last=False)
        one = self._held[e] = self._read(e)
        return one

    def _read(self, e: int) -> ExpertWeights:
        before = self.files.bytes_read
        try:
            # held experts outlive the call: they must be usable while gradients are recorded, too
            with torch.inference_mode(mode=False), torch.no_grad():
                one = new_experts(1, self.format, self.width, self.intermediate, dtype=self.dtype, device="cpu")
                copy_expert(self.files, self.infos[e], self.cut, one, 0, dtype=self.check_dtype)
                one.to(self.device)
        except CheckpointError as error:
            places = sorted({str(info.file) for parts in self.infos[e].values() for info in parts.values()})
            raise CheckpointError(f"expert {e} cannot be read from {', '.join(places)}: {error}") from error
        finally:
            self.bytes_read += self.files.bytes_read - before
        return one


def _common_dtype(infos: Sequence[ExpertInfos]) -> torch.dtype:
    """The dtype that holds the plain weights of all experts exactly."""
    dtypes = {TORCH_DTYPES[parts["weight"].dtype] for matrices in infos for parts in matrices.values()}
    common = dtypes.pop()
    for dtype in dtypes:
        common = torch.promote_types(common, dtype)
    return common
