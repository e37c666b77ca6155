"""Linear layers and embeddings. How a weight is cut over ranks is data on the parameter.

Shapes: T tokens, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from k3lib import ops
from k3lib.errors import ConfigError
from k3lib.parallel.group import LOCAL, Group

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = [
    "Fused",
    "K3Module",
    "Linear",
    "Placement",
    "Shard",
    "VocabEmbedding",
    "fuse",
    "parameter",
    "placement",
    "shard_range",
    "wide_dtype",
]


_SMALL_BYTES = 2 << 20  # of a weight whose layout is chosen for the products of few tokens; see `_by_columns`


@dataclass(frozen=True, slots=True)
class Shard:
    """How a stored tensor is cut over the ranks of a group.

    Attributes:
        dim: the axis that is cut.
        unit: smallest cut along it, in elements of the decoded weight (a head, a quant group).
        what: name of the axis in error messages.
        even: refuse parts of different size; else the last ones may be smaller.
    """

    dim: int
    unit: int = 1
    what: str = "dimension"
    even: bool = True


@dataclass(frozen=True, slots=True)
class Placement:
    """Which part of a stored tensor a parameter holds: all of it, or `[begin, end)` along `shard.dim`."""

    full_shape: tuple[int, ...]
    shard: Shard | None
    begin: int
    end: int


def shard_range(size: int, group: Group, shard: Shard) -> tuple[int, int]:
    """Return `[begin, end)` of this rank's part of `size` elements.

    Raises:
        ConfigError: the ranks do not divide `size` into multiples of the unit; the message lists sizes that do.
    """
    units = size // shard.unit
    most = -(-units // group.size)  # units of the largest part
    if not shard.even and size % shard.unit == 0 and most * (group.size - 1) < units:
        begin = group.rank * most * shard.unit
        return begin, min(begin + most * shard.unit, size)
    if size % shard.unit or units % group.size:
        good = [n for n in range(1, units + 1) if units % n == 0] if size % shard.unit == 0 else []
        raise ConfigError(
            f"tp_size={group.size} does not cut {shard.what} ({size} in units of {shard.unit}) evenly; use "
            + (f"one of {', '.join(map(str, good))}" if good else "an unpacked format")
        )
    part = units // group.size * shard.unit
    return group.rank * part, (group.rank + 1) * part


def placement(tensor: Tensor) -> Placement:
    """Which part of its stored tensor a parameter holds."""
    place: Placement | None = getattr(tensor, "placement", None)
    return place or Placement(tuple(tensor.shape), None, 0, 0)


def parameter(
    *full_shape: int,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    shard: Shard | None = None,
    tp: Group = LOCAL,
    fill: float | None = None,
) -> nn.Parameter:
    """Make a parameter that holds this rank's part of a tensor of `full_shape`.

    Its first values: `fill`, or normal with variance `1 / last axis`, so that a product of unit inputs has unit size.
    """
    shape, begin, end = list(full_shape), 0, 0
    if shard is not None:
        begin, end = shard_range(shape[shard.dim], tp, shard)
        shape[shard.dim] = end - begin
    made = nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))
    if not made.is_meta:
        if fill is None:
            nn.init.normal_(made, std=full_shape[-1] ** -0.5)
        else:
            nn.init.constant_(made, fill)
    made.placement = Placement(full_shape, shard, begin, end)  # type: ignore[attr-defined]
    return made


def wide_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of weights that are kept in fp32: fp64 in an fp64 model."""
    return torch.float64 if (dtype or torch.get_default_dtype()) == torch.float64 else torch.float32


class K3Module(nn.Module):
    """A module whose weights named in `wide` stay in fp32 when the model is cast to a narrow dtype."""

    wide: tuple[str, ...] = ()

    def fused_parts(self) -> Sequence[Fused]:
        """Groups of weights that read the same input."""
        return ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> K3Module:
        kept = {name: self._parameters[name].data for name in self.wide if self._parameters.get(name) is not None}  # type: ignore[union-attr]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            now = self._parameters[name]
            assert now is not None, "cast does not remove parameters"
            if now.dtype != before.dtype and now.dtype.itemsize < 4 and not before.is_meta:
                now.data = before.to(now.device)
        return self


class Linear(K3Module):
    """`y = x Wᵀ` without bias; `cut` says which side a tensor-parallel rank holds.

    Attributes:
        weight: `[out, in]`, this rank's part.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        cut: str | None = None,
        unit: int = 1,
        even: bool = True,
        tp: Group = LOCAL,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Make the layer.

        Args:
            in_features: full width of the input.
            out_features: full width of the output.
            cut: "out" (columns of the result, no exchange), "in" (partial sums, reduced here) or None (replicated).
            unit: smallest cut along that side, for example a head.
            even: refuse ranks with parts of different size.
            tp: ranks that share the layer.
            dtype: of the weight.
            device: of the weight.
        """
        super().__init__()
        self.tp = tp
        self.reduces = cut == "in"
        shard = (
            None
            if cut is None
            else Shard(0 if cut == "out" else 1, unit, f"the {cut}put width of a linear layer", even)
        )
        self.weight = parameter(out_features, in_features, dtype=dtype, device=device, shard=shard, tp=tp)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to `[..., in]`."""
        y = ops.linear(x, self._parameters["weight"])  # type: ignore[arg-type] # not self.weight: a Python call less
        return self.tp.all_reduce(y) if self.reduces else y

    def extra_repr(self) -> str:
        """Show the shape."""
        return f"{self.weight.shape[1]} -> {self.weight.shape[0]}"


class Fused:
    """Weights of modules that read the same input, side by side in one tensor while gradients are off.

    `fuse` moves the weights into one tensor and makes each parameter a view of its part, so names, checkpoints and
    in-place updates stay as they are. Whoever replaces a parameter or hooks a module gets the separate modules back.
    Large ones are padded with rows of zeros: kernels want rows of results that begin at multiples of 32 bytes.
    """

    ALIGNED = 16

    def __init__(self, *modules: nn.Module) -> None:
        self.modules = modules
        self.weight: Tensor | None = None
        self._rows = 0  # without the padding
        self._places: list[int] = []

    def fuse(self) -> None:
        """Join the weights along their first axis; weights of different dtypes stay apart."""
        weights = [module._parameters["weight"] for module in self.modules]
        if any(w is None or w.is_meta or w.dtype != weights[0].dtype for w in weights):  # type: ignore[union-attr]
            return
        parts = [w.data for w in weights if w is not None]
        self._rows = sum(w.shape[0] for w in parts)
        if self._rows >= 64 * self.ALIGNED and (more := -self._rows % self.ALIGNED):
            parts.append(parts[0].new_zeros(more, *parts[0].shape[1:]))
        joined = _by_columns(torch.cat(parts))
        first = 0
        for w in weights:
            assert w is not None, "checked above"
            w.data = joined.narrow(0, first, w.shape[0])
            first += w.shape[0]
        self.weight = joined
        self._places = [w.data_ptr() for w in weights if w is not None]

    def intact(self) -> Tensor | None:
        """The joined weight, or None if it may not be used."""
        if self.weight is None:
            return None
        records = torch.is_grad_enabled()
        for module, place in zip(self.modules, self._places):  # noqa: B905 - equally long
            weight: Any = module._parameters["weight"]
            if weight.data_ptr() != place or module._forward_hooks or module._forward_pre_hooks:
                return None
            if records and weight.requires_grad:
                return None
        return self.weight

    def joined(self) -> Tensor:
        """All weights side by side, from the joined tensor or put together now."""
        weight = self.intact()
        if weight is None:
            return torch.cat([m.weight for m in self.modules])  # type: ignore[misc]
        return weight if weight.shape[0] == self._rows else weight[: self._rows]

    def __call__(self, x: Tensor) -> Tensor:
        """Apply linear layers to `[..., in]`; their outputs side by side."""
        weight = self.intact()
        if weight is None:
            return torch.cat([module(x) for module in self.modules], dim=-1)
        y = ops.linear(x, weight)
        return y if y.shape[-1] == self._rows else y[..., : self._rows]


def _by_columns(weight: Tensor) -> Tensor:
    """Lay out a small fp32 matrix on a CPU column by column if it has more rows than columns; its values stay.

    MKL then reads it in one stream: 1104 x 256 for one token in 115 us in place of 205, for 8 in 270 in place of 380
    (one thread of an AMD EPYC, memory cold). That gains nothing for wide matrices, and loses up to a third for large
    ones.
    """
    is_small = weight.ndim == 2 and weight.shape[0] > weight.shape[1] and weight.nbytes <= _SMALL_BYTES
    if not is_small or weight.device.type != "cpu" or weight.dtype != torch.float32:
        return weight
    return weight.t().contiguous().t()


def fuse(model: nn.Module) -> None:
    """Join the weights of all modules that read the same input; see `Fused`."""
    for module in model.modules():
        if isinstance(module, K3Module):
            for part in module.fused_parts():
                part.fuse()


class VocabEmbedding(K3Module):
    """Token embedding, rows of the vocabulary cut over the ranks."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tp: Group = LOCAL,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.vocab_size = vocab_size
        rule = Shard(0, what="the vocabulary", even=False)
        self.first, self.end = shard_range(vocab_size, tp, rule)
        self.weight = parameter(vocab_size, hidden_size, dtype=dtype, device=device, shard=rule, tp=tp)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up `ids [T]`.

        Raises:
            ConfigError: an id outside the vocabulary (checked for ids on the CPU; the engine checks host ids).
        """
        if ids.device.type == "cpu" and ids.numel():
            low, high = (int(x) for x in ids.aminmax())
            if low < 0 or high >= self.vocab_size:
                raise ConfigError(
                    f"token id {low if low < 0 else high} is outside the vocabulary 0..{self.vocab_size - 1}"
                )
        if self.tp.size == 1:
            return F.embedding(ids, self.weight)
        mine = (ids >= self.first) & (ids < self.end)
        rows = F.embedding(torch.where(mine, ids - self.first, 0), self.weight)
        return self.tp.all_reduce(rows.masked_fill(~mine[:, None], 0))
