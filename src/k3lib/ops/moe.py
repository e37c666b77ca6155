"""Routing and routed experts.

Shapes: T packed tokens, D hidden size, L width of the experts' input, I intermediate width, E experts of this rank,
k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch

from k3lib.config import KimiK3Config, SiTU, TextConfig
from k3lib.errors import ConfigError
from k3lib.ops.activation import situ_and_mul
from k3lib.ops.packing import compute_dtype
from k3lib.ops.quant import mxfp4_decode, nvfp4_decode
from k3lib.ops.registry import intern_spec, op

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = [
    "ExpertFormat",
    "ExpertStore",
    "ExpertWeights",
    "ExpertsSpec",
    "RouteSpec",
    "Routing",
    "experts",
    "needs_resident",
    "route",
]

ExpertFormat = Literal["bf16", "mxfp4", "nvfp4"]


class Routing(NamedTuple):
    """`ids [T, k]` int32 and `weights [T, k]` fp32."""

    ids: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSpec:
    """Static facts of a router call."""

    experts: int
    top_k: int
    num_groups: int
    dtype: torch.dtype
    replay: bool = False
    deterministic: bool = False

    @staticmethod
    def of(
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        *,
        top_k: int,
        num_groups: int = 1,
        top_groups: int = 1,
        renormalize: bool,
        scale: float,
        ids: Tensor | None = None,
    ) -> RouteSpec:
        """Facts of a call."""
        return intern_spec(RouteSpec, weight.shape[0], top_k, num_groups, x.dtype, ids is not None)


@op(RouteSpec.of)
def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    top_k: int,
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool,
    scale: float,
    ids: Tensor | None = None,
) -> Routing:
    """Choose experts: the `top_k` largest of `sigmoid(x·weightᵀ) + bias`; weights are the scores without the bias.

    Everything in fp32, whatever the dtypes of `x`, `weight` and `bias`. With groups, a group counts as the sum of its
    two best biased scores and only the best `top_groups` groups take part. Ties go to the lowest id. The weights are
    divided by their sum + 1e-20 if `renormalize` and `top_k` > 1, and multiplied by `scale` always (model
    specification, section 3.6).

    Args:
        x: `[T, D]`.
        weight: `[E, D]`.
        bias: `[E]`, used for the choice only.
        top_k: experts per token.
        num_groups: equal groups of consecutive experts.
        top_groups: groups that take part.
        renormalize: divide the weights by their sum.
        scale: factor on the weights.
        ids: `[T, k]` int32: compute weights for these experts instead of choosing (routing replay).

    Returns:
        `Routing`: ids int32 `[T, k]`, best first, and weights fp32 `[T, k]`.

    Raises:
        ConfigError: shapes do not fit.
    """
    num_experts = weight.shape[0]
    if x.shape[-1] != weight.shape[-1] or bias.shape != (num_experts,):
        raise ConfigError(f"route: x {tuple(x.shape)}, weight {tuple(weight.shape)}, bias {tuple(bias.shape)}")
    dtype = compute_dtype(x)
    scores = torch.sigmoid(x.to(dtype) @ weight.to(dtype).t())
    if ids is None:
        ids = _choose_experts(scores + bias.to(dtype), top_k, num_groups, top_groups)
    weights = scores.gather(1, ids.long())
    if renormalize and ids.shape[1] > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routing(ids.to(torch.int32), weights * scale)


def _choose_experts(biased: Tensor, top_k: int, num_groups: int, top_groups: int) -> Tensor:
    if num_groups > top_groups:
        grouped = biased.view(biased.shape[0], num_groups, -1)
        group_score = grouped.topk(2, dim=-1).values.sum(-1)
        best = group_score.sort(dim=-1, descending=True, stable=True).indices[:, :top_groups]
        keep = torch.zeros_like(group_score, dtype=torch.bool).scatter_(1, best, value=True)
        biased = grouped.masked_fill(~keep[..., None], -torch.inf).view_as(biased)
    # a stable sort, unlike topk, gives ties to the lowest id
    return biased.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]


class ExpertStore(Protocol):
    """What the `experts` op takes: the weights themselves (`ExpertWeights`), or something that fetches them.

    An implementation that works on stacked weights declines stores that are `offloaded` (see `needs_resident`); the
    others only call `decode`, once for each expert or small set of experts that a call needs.
    """

    @property
    def num_experts(self) -> int:
        """Experts of this rank."""
        ...

    @property
    def width(self) -> int:
        """L, the input and output width of an expert."""
        ...

    @property
    def intermediate(self) -> int:
        """I, the local intermediate width."""
        ...

    @property
    def format(self) -> ExpertFormat:
        """How they are stored."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of what is stored: a float dtype, or uint8 if packed."""
        ...

    @property
    def first_expert(self) -> int:
        """Global id of the first local expert."""
        ...

    @property
    def offloaded(self) -> bool:
        """Whether experts are fetched when they are needed."""
        ...

    def decode(self, which: Tensor | int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return `w13` and `w2` of the experts `which` (local numbers) as plain matrices of `dtype`."""
        ...

    def expert(self, e: int) -> ExpertWeights:
        """Expert `e` as a stack of one."""
        ...

    def to(self, device: torch.device) -> None:
        """Move to `device`; nothing is cast."""
        ...


@dataclass(slots=True, eq=False)
class ExpertWeights:
    """The routed experts of one rank in canonical form, as stored in the checkpoint.

    Attributes:
        w13: gate rows, then up rows: `[E, 2I, L]` for "bf16" (any float dtype), uint8 `[E, 2I, L/2]` packed.
        w2: `[E, L, I]`, packed `[E, L, I/2]`.
        w13_scale, w2_scale: MXFP4 uint8 `[E, 2I, L/32]` / `[E, L, I/32]`; NVFP4 float8_e4m3fn with groups of 16.
        w13_scale_2, w2_scale_2: NVFP4 fp32 `[E]`, one global scale for w1 and w3 together.
        format: "bf16", "mxfp4" or "nvfp4".
        first_expert: global id of the first local expert.
    """

    w13: Tensor
    w2: Tensor
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    w13_scale_2: Tensor | None = None
    w2_scale_2: Tensor | None = None
    format: ExpertFormat = "bf16"
    first_expert: int = 0
    _decoded: tuple[object, list[Tensor], ExpertWeights] | None = field(default=None, init=False, repr=False)

    @property
    def num_experts(self) -> int:
        """Experts held here."""
        return self.w13.shape[0]

    @property
    def width(self) -> int:
        """L, the input and output width of an expert."""
        return self.w2.shape[1]

    @property
    def intermediate(self) -> int:
        """I, the local intermediate width."""
        return self.w13.shape[1] // 2

    @property
    def dtype(self) -> torch.dtype:
        """Of what is stored: a float dtype, or uint8 if packed."""
        return self.w13.dtype

    @property
    def offloaded(self) -> bool:
        """All experts are here."""
        return False

    def expert(self, e: int) -> ExpertWeights:
        """Expert `e` as a stack of one, sharing memory."""
        return self._each(lambda x: x[e : e + 1], self.first_expert + e)

    def to(self, device: torch.device) -> None:
        """Move to `device`; nothing is cast."""
        moved = self._each(lambda x: x.to(device), self.first_expert)
        for name in self.__slots__:
            setattr(self, name, getattr(moved, name))

    def _each(self, change: Callable[[Tensor], Tensor], first_expert: int) -> ExpertWeights:
        scales = (self.w13_scale, self.w2_scale, self.w13_scale_2, self.w2_scale_2)
        s13, s2, g13, g2 = (None if x is None else change(x) for x in scales)
        return ExpertWeights(change(self.w13), change(self.w2), s13, s2, g13, g2, self.format, first_expert)

    def decoded(self, dtype: torch.dtype) -> ExpertWeights | None:
        """All experts as plain matrices of `dtype`, kept beside the packed ones, and made anew when those have changed.

        The caller sees to it that there is memory. None for tensors made in inference mode, whose changes go unnoticed.
        """
        every = (self.w13, self.w2, self.w13_scale, self.w2_scale, self.w13_scale_2, self.w2_scale_2)
        parts = [x for x in every if x is not None]
        if any(x.is_inference() for x in parts):
            return None
        now = (dtype, self.first_expert, *((x.data_ptr(), x._version) for x in parts))
        if self._decoded is None or self._decoded[0] != now:
            with torch.inference_mode(mode=False), torch.no_grad():  # else no use to a call that records gradients
                which = torch.arange(self.num_experts, device=self.w13.device)
                plain = ExpertWeights(*self.decode(which, dtype), first_expert=self.first_expert)
            self._decoded = (now, parts, plain)  # with the parts, so that no others can come to lie at their addresses
        return self._decoded[2]

    def decode(self, which: Tensor | int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return `w13` and `w2` of the experts `which` (local numbers) as plain matrices of `dtype`."""
        if self.format == "bf16":
            return _pick(self.w13, which).to(dtype), _pick(self.w2, which).to(dtype)
        assert self.w13_scale is not None, "a packed format has scales"
        assert self.w2_scale is not None, "a packed format has scales"
        if self.format == "mxfp4":
            return (
                mxfp4_decode(_pick(self.w13, which), _pick(self.w13_scale, which), dtype),
                mxfp4_decode(_pick(self.w2, which), _pick(self.w2_scale, which), dtype),
            )
        assert self.w13_scale_2 is not None, "NVFP4 has global scales"
        assert self.w2_scale_2 is not None, "NVFP4 has global scales"
        return (
            nvfp4_decode(self.w13[which], self.w13_scale[which], self.w13_scale_2[which], dtype),
            nvfp4_decode(self.w2[which], self.w2_scale[which], self.w2_scale_2[which], dtype),
        )


def _pick(stack: Tensor, which: Tensor | int) -> Tensor:
    """`stack[which]`; for many rows `index_select`, which is several times faster on a CPU."""
    return stack[which] if isinstance(which, int) else stack.index_select(0, which)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """Static facts of a call of the routed experts."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int
    weights: ExpertFormat
    activations: torch.dtype
    offloaded: bool = False
    act_fn: str = "situ"
    ep_size: int = 1
    deterministic: bool = False

    @staticmethod
    def of(x: Tensor, ids: Tensor, weights: Tensor, prepared: ExpertStore, *, act_fn: SiTU) -> ExpertsSpec:
        """Facts of a call."""
        return intern_spec(
            ExpertsSpec,
            prepared.num_experts,
            ids.shape[1],
            prepared.width,
            prepared.intermediate,
            prepared.format,
            x.dtype,
            prepared.offloaded,
        )

    @staticmethod
    def from_config(
        config: KimiK3Config | TextConfig,
        *,
        tp_size: int = 1,
        ep_size: int = 1,
        weights: ExpertFormat | None = None,
        offloaded: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> ExpertsSpec:
        """Facts of a model's calls; `weights=None` takes the stored format of the configuration."""
        text = config.text if isinstance(config, KimiK3Config) else config
        if text.moe is None:
            raise ConfigError("ExpertsSpec: this model has no experts")
        if weights is None:
            stored = config.quantization if isinstance(config, KimiK3Config) else None
            weights = stored.expert_format or "bf16" if stored else "bf16"
        return ExpertsSpec(
            experts=text.moe.num_experts // ep_size,
            top_k=text.moe.top_k,
            hidden=text.moe.expert_width,
            intermediate=text.moe.intermediate_size // tp_size,
            weights=weights,
            activations=dtype,
            offloaded=offloaded,
            ep_size=ep_size,
        )


def needs_resident(spec: ExpertsSpec) -> str | None:
    """`supports` of an implementation that reads the stacked weights of `ExpertWeights`."""
    return "needs all experts resident, got experts that are read when they are chosen" if spec.offloaded else None


@op(ExpertsSpec.of)
def experts(x: Tensor, ids: Tensor, weights: Tensor, prepared: ExpertStore, *, act_fn: SiTU) -> Tensor:
    """Weighted sum of the chosen experts, `Σ_i w_i · w2_i · SiTU([w1_i; w3_i] x)`: fp32 sum, one rounding.

    Packed weights are decoded here, expert by expert, and nowhere else. Each expert's output is rounded to the dtype
    of `x` before it is weighted (model specification, section 3.6).

    Args:
        x: `[T, L]`.
        ids: `[T, k]` int32, global expert ids; those outside this rank's range contribute nothing.
        weights: `[T, k]` fp32.
        prepared: the experts of this rank, or what fetches them; one expert is asked for at a time.
        act_fn: the activation between the two products.

    Returns:
        `[T, L]` in the dtype of `x`.

    Raises:
        ConfigError: shapes do not fit.
    """
    if x.shape[-1] != prepared.width or ids.shape != weights.shape or ids.shape[0] != x.shape[0]:
        raise ConfigError(
            f"experts: x {tuple(x.shape)}, ids {tuple(ids.shape)}, weights {tuple(weights.shape)} do not fit experts "
            f"of width {prepared.width}"
        )
    local = ids.long() - prepared.first_expert
    here = (local >= 0) & (local < prepared.num_experts)
    dtype = compute_dtype(x)
    total = x.new_zeros(x.shape, dtype=dtype)
    token, slot = here.nonzero(as_tuple=True)
    expert = local[token, slot]
    order = expert.argsort(stable=True)
    counts: list[int] = torch.bincount(expert, minlength=prepared.num_experts).tolist()
    token, weight = token[order], weights[token, slot][order].to(dtype)
    begin = 0
    for e, count in enumerate(counts):
        if not count:
            continue
        mine = token[begin : begin + count]
        w13, w2 = prepared.decode(e, x.dtype)
        hidden = situ_and_mul(x[mine] @ w13.t(), beta=act_fn.beta, linear_beta=act_fn.linear_beta)
        total = total.index_add(0, mine, (hidden @ w2.t()).to(dtype) * weight[begin : begin + count, None])
        begin += count
    return total.to(x.dtype)
