"""Calls of every op with random arguments, of any size: what `conformance` checks and `bench` times.

Arguments are made on the CPU from a seed and moved, so that a machine with an accelerator and one without see the same.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import torch

from k3lib.batch import StateSaves, VerifyScratch
from k3lib.config import SiTU
from k3lib.errors import ConfigError
from k3lib.ops import ExpertWeights, KDAParams
from k3lib.ops.quant import mxfp4_encode, nvfp4_encode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["Data", "Trial", "kept_in", "make_trial", "moved", "widened"]

Data = Literal["random", "bound", "weak", "extreme", "poison"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One call of an op.

    Attributes:
        op: name of the op.
        title: what is special about it.
        args: arguments by name; positional ones too.
        written: names of arguments that the op changes in place.
        moved_bytes: device memory that has to be read or written at least once.
        flops: multiplications and additions that have to be done.
    """

    op: str
    title: str
    args: dict[str, Any]
    written: tuple[str, ...] = ()
    moved_bytes: int = 0
    flops: int = 0


@dataclass(slots=True)
class _Maker:
    """Draws arguments.

    Attributes:
        dtype: of activations.
        data: their kind.
        random: source of randomness.
        device: where they are drawn.
    """

    dtype: torch.dtype
    data: Data
    random: torch.Generator
    device: torch.device
    sizes: dict[str, Any] = field(default_factory=dict)

    def draw(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        """Normal values."""
        scale *= 20.0 if self.data == "extreme" else 1.0
        return (torch.randn(*shape, generator=self.random, device=self.device) * scale).to(dtype or self.dtype)

    def between(self, low: int, high: int, *shape: int) -> Tensor:
        """Integers in [low, high)."""
        return torch.randint(low, high, shape, generator=self.random, dtype=torch.int32, device=self.device)

    def order(self, count: int) -> Tensor:
        """A permutation."""
        return torch.randperm(count, generator=self.random, device=self.device)

    def uniform(self, *shape: int) -> Tensor:
        """Numbers in [0, 1)."""
        return torch.rand(*shape, generator=self.random, device=self.device)

    def offsets(self, lengths: Sequence[int]) -> Tensor:
        """`cu_seqlens`."""
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self.device)

    def size(self, name: str, default: int) -> int:
        value: int = self.sizes.get(name, default)
        return value

    def lengths(self) -> list[int]:
        found: Sequence[int] = self.sizes.get("lengths", (5,))
        return list(found)


def make_trial(
    op: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    data: Data = "random",
    seed: int = 0,
    title: str = "",
    device: torch.device | str = "cpu",
    **sizes: Any,  # noqa: ANN401 - integers, lists of them, flags; see the makers below
) -> Trial:
    """Make the arguments of a call.

    Args:
        op: name of the op.
        dtype: of activations.
        data: "random"; "bound" forgets as much as the gate can; "weak" forgets nothing and has keys that point one
            way; "extreme" has large values; "poison" has NaN in all memory that must not be read.
        seed: equal seeds give equal arguments.
        title: what to call it.
        device: where to draw them; another device draws others.
        sizes: see the maker of the op; each has defaults.

    Raises:
        ConfigError: an unknown op.
    """
    if op not in _MAKERS:
        raise ConfigError(f"there are no trials of {op!r}; there are some of {', '.join(sorted(_MAKERS))}")
    where = torch.device(device)
    maker = _Maker(dtype, data, torch.Generator(where).manual_seed(seed), where, sizes)
    trial = _MAKERS[op](maker)
    shown = ", ".join(f"{name} {value}" for name, value in sizes.items())
    return dataclasses.replace(trial, title=title or f"{data}: {shown}")


def moved(trial: Trial, device: torch.device) -> Trial:
    """A copy of the trial on a device."""
    return dataclasses.replace(
        trial, args={name: _mapped(x, lambda t: t.to(device, copy=True)) for name, x in trial.args.items()}
    )


def widened(trial: Trial, dtype: torch.dtype) -> Trial:
    """A copy whose activations have a wider dtype and the same values: what a reference is computed from."""

    def widen(x: Tensor) -> Tensor:
        return x.to(dtype) if x.dtype in (torch.bfloat16, torch.float16) else x.clone()

    return dataclasses.replace(trial, args={name: _mapped(x, widen) for name, x in trial.args.items()})


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:  # noqa: ANN401 - an argument of an op
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, KDAParams):
        return KDAParams(change(value.A_log), change(value.dt_bias), value.lower_bound)
    if isinstance(value, StateSaves):
        return StateSaves(value.requests, value.offsets, change(value.slots))
    if isinstance(value, VerifyScratch):
        return VerifyScratch(**{name: change(x) for name, x in kept_in(value).items()})
    if isinstance(value, ExpertWeights):
        scales = (value.w13_scale, value.w2_scale, value.w13_scale_2, value.w2_scale_2)
        s13, s2, g13, g2 = (None if x is None else change(x) for x in scales)
        return ExpertWeights(change(value.w13), change(value.w2), s13, s2, g13, g2, value.format, value.first_expert)
    return value


def kept_in(verify: VerifyScratch) -> dict[str, Tensor]:
    """The tensors of a verify step's scratch, by field."""
    fields = {name: getattr(verify, name) for name in VerifyScratch.__slots__}
    return {name: x for name, x in fields.items() if x is not None}


# ---- makers -------------------------------------------------------------------------------------


def _slots(m: _Maker, requests: int) -> Tensor:
    """Slots in another order than the requests, with the null slot and a missing one if asked."""
    slots = m.order(requests).to(torch.int32) + 1
    if m.sizes.get("absent") and requests > 2:
        slots[0], slots[requests // 2] = 0, -1
    return slots


def _saves(m: _Maker, requests: int) -> StateSaves | None:
    """Interior states `(request, offset)`, into slots behind those of the requests."""
    wanted: Sequence[tuple[int, int]] = m.sizes.get("saves", ())
    if not wanted:
        return None
    slots = torch.arange(requests + 1, requests + 1 + len(wanted), dtype=torch.int32, device=m.device)
    return StateSaves(tuple(i for i, _ in wanted), tuple(at for _, at in wanted), slots)


def _pool(m: _Maker, requests: int, *shape: int, dtype: torch.dtype) -> Tensor:
    """Rows for the requests, their saves, and one that nobody owns."""
    rows = requests + 2 + len(m.sizes.get("saves", ()))
    pool = m.draw(rows, *shape, dtype=dtype, scale=0.3)
    if m.data == "poison":
        pool[-1] = torch.nan
    pool[0] = 0
    return pool


def _scratch(
    m: _Maker, lengths: Sequence[int], channels: int, heads: int = 0, key: int = 0, value: int = 0
) -> VerifyScratch | None:
    """Scratch of a verify step, one row more than requests; of NaN, so that it shows what is written."""
    kind = m.sizes.get("verify")
    if kind is None:
        return None
    front = (len(lengths) + 1, m.size("entries", max(lengths, default=1)))

    def make(*shape: int, dtype: torch.dtype = m.dtype) -> Tensor:
        return torch.full((*front, *shape), torch.nan, dtype=dtype, device=m.device)

    if kind == "states":
        return VerifyScratch(make(channels), make(heads, value, key, dtype=m.sizes.get("state", torch.float32)))
    return VerifyScratch(
        make(channels), None, make(heads, key), make(heads, value), make(heads, key, dtype=torch.float32),
        make(heads, dtype=torch.float32),
    )  # fmt: skip


def _kept_bytes(verify: VerifyScratch, lengths: Sequence[int]) -> int:
    """Bytes that a verify step writes to its scratch."""
    return sum(x[0, 0].nbytes for x in kept_in(verify).values()) * sum(lengths)


def _gates(m: _Maker, tokens: int, heads: int, key: int) -> tuple[Tensor, Tensor, KDAParams]:
    gate, beta = m.draw(tokens, heads, key), m.draw(tokens, heads)
    if m.data == "bound":
        gate, beta = gate * 0 + 30, beta + 4
    elif m.data == "weak":
        gate, beta = gate * 0 - 30, beta * 0 + 8
    small = m.data == "extreme"
    return gate, beta, KDAParams(
        m.draw(heads, dtype=torch.float32, scale=0.02 if small else 0.5),
        m.draw(heads, key, dtype=torch.float32, scale=0.02 if small else 0.5),
        -5.0,
    )  # fmt: skip


def _recurrence(op: str) -> Callable[[_Maker], Trial]:
    """`lengths`, `heads`, `key`, `value`, `state` (dtype, None without), `saves`, `absent`, `verify`, `entries`."""

    def make(m: _Maker) -> Trial:
        lengths = m.lengths()
        tokens, heads, key, value = sum(lengths), m.size("heads", 2), m.size("key", 128), m.size("value", 128)
        q, k, v = (m.draw(tokens, heads, n) for n in (key, key, value))
        if m.data == "weak":
            k = k[:1].expand_as(k).contiguous() + 1e-2 * k
        gate, beta, params = _gates(m, tokens, heads, key)
        args: dict[str, Any] = {"q": q, "k": k, "v": v, "gate": gate, "beta": beta, "params": params}
        args |= {"cu_seqlens": m.offsets(lengths), "scale": key**-0.5}
        item = v.element_size()
        state_bytes = 0
        if (state_dtype := m.sizes.get("state", torch.float32)) is not None:
            state = _pool(m, len(lengths), heads, value, key, dtype=state_dtype)
            args |= {"state": state, "slots": _slots(m, len(lengths)), "saves": _saves(m, len(lengths))}
            state_bytes = 2 * len(lengths) * heads * value * key * state.element_size()
        written = ("state",) if "state" in args else ()
        if (verify := _scratch(m, lengths, 1, heads, key, value)) is not None:
            args["verify"], written = verify, ("verify",)
            state_bytes = state_bytes // 2 + _kept_bytes(verify, lengths)
            verify.inputs.zero_()  # which the convolution writes
        return Trial(
            op=op, title="", args=args, written=written,
            moved_bytes=tokens * heads * (3 * key + 2 * value + 1) * item + state_bytes,
            flops=6 * tokens * heads * key * value,
        )  # fmt: skip

    return make


def _mixer(m: _Maker) -> Trial:
    """`lengths`, `heads`, `key`, `value`, `width`, `state`, `saves`, `absent`, `verify`, `entries`."""
    lengths = m.lengths()
    tokens, heads, key, value = sum(lengths), m.size("heads", 2), m.size("key", 128), m.size("value", 128)
    channels, width = heads * (2 * key + value), m.size("width", 4)
    gate, beta, params = _gates(m, tokens, heads, key)
    state = _pool(m, len(lengths), heads, value, key, dtype=m.sizes.get("state", torch.float32))
    conv_state = _pool(m, len(lengths), width - 1, channels, dtype=m.dtype)
    args = {
        "qkv": m.draw(tokens, channels), "gate": gate, "beta": beta, "out_gate": m.draw(tokens, heads, value),
        "params": params, "conv_weight": m.draw(channels, width, dtype=torch.float32, scale=0.5),
        "norm_weight": m.draw(value, dtype=torch.float32), "norm_eps": 1e-5, "scale": key**-0.5, "state": state,
        "conv_state": conv_state, "slots": _slots(m, len(lengths)), "cu_seqlens": m.offsets(lengths),
        "saves": _saves(m, len(lengths)),
    }  # fmt: skip
    item = conv_state.element_size()
    per_token = channels + heads * (key + 2 * value + 1)
    per_request = heads * key * value * state.element_size() + (width - 1) * channels * item
    written: tuple[str, ...] = ("state", "conv_state")
    stored = len(lengths) * per_request
    if (verify := _scratch(m, lengths, channels, heads, key, value)) is not None:
        args["verify"], written, stored = verify, ("verify",), _kept_bytes(verify, lengths)
    return Trial(
        op="kda_mixer", title="", args=args, written=written,
        moved_bytes=tokens * per_token * item + len(lengths) * per_request + stored + channels * width * 4,
        flops=6 * tokens * heads * key * value,
    )  # fmt: skip


def _convolution(m: _Maker) -> Trial:
    """`lengths`, `channels`, `width`, `saves`, `absent`, `verify`, `entries`."""
    lengths, channels, width = m.lengths(), m.size("channels", 384), m.size("width", 4)
    tokens = sum(lengths)
    conv_state = _pool(m, len(lengths), width - 1, channels, dtype=m.dtype)
    args: dict[str, Any] = {
        "x": m.draw(tokens, channels), "weight": m.draw(channels, width, dtype=torch.float32, scale=0.5),
        "conv_state": conv_state, "slots": _slots(m, len(lengths)), "cu_seqlens": m.offsets(lengths),
        "saves": _saves(m, len(lengths)),
    }  # fmt: skip
    moved_bytes = (2 * tokens + 2 * len(lengths) * (width - 1)) * channels * conv_state.element_size()
    written: tuple[str, ...] = ("conv_state",)
    if (verify := _scratch(m, lengths, channels)) is not None:
        args["verify"], written = verify, ("verify",)
    return Trial(op="short_conv", title="", args=args, written=written, moved_bytes=moved_bytes)


def _replay(m: _Maker) -> Trial:
    """`counts` (of each entry), `layers`, `entries` (of a row), `heads`, `key`, `value`, `state`."""
    counts: Sequence[int] = m.sizes.get("counts", (3,))
    layers, width, heads = m.size("layers", 2), m.size("entries", max(counts, default=1)), m.size("heads", 2)
    key, value, n = m.size("key", 128), m.size("value", 128), len(counts)
    state = m.draw(layers, n + 3, heads, value, key, dtype=m.sizes.get("state", torch.float32), scale=0.3)
    if m.data == "poison":
        state[:, n + 2] = torch.nan
    front = (layers, n + 1, width, heads)
    logits = -30.0 if m.data == "weak" else 30.0 if m.data == "bound" else m.draw(*front, key, dtype=torch.float32)
    targets = m.order(n).to(torch.int32) + 1
    sources = targets.clone()
    if n > 1:
        targets[0], targets[1] = n + 1, 0  # elsewhere, and nowhere
    args = {
        "state": state, "k": m.draw(*front, key), "v": m.draw(*front, value),
        "log_decay": -5 * torch.sigmoid(torch.as_tensor(logits)).expand(*front, key).to(m.device).contiguous(),
        "beta": m.uniform(*front), "sources": sources, "rows": m.order(n + 1)[:n].to(torch.int32),
        "counts": torch.tensor(counts, dtype=torch.int32, device=m.device), "targets": targets,
    }  # fmt: skip
    moved_bytes = 2 * layers * n * state[0, 0].nbytes
    moved_bytes += sum(counts) * layers * sum(args[name][0, 0, 0].nbytes for name in ("k", "v", "log_decay", "beta"))
    return Trial(op="kda_replay", title="", args=args, written=("state",), moved_bytes=moved_bytes)


def _latent_decode(m: _Maker) -> Trial:
    """`contexts` (of each request), `per_request` (new tokens), `heads`, `latent`, `rope`, `page`, `pages` (dtype)."""
    contexts: Sequence[int] = m.sizes.get("contexts", (37,))
    heads, latent, rope, page = m.size("heads", 12), m.size("latent", 512), m.size("rope", 64), m.size("page", 64)
    each, dtype = m.size("per_request", 1), m.sizes.get("pages", m.dtype)
    counts = [-(-n // page) for n in contexts]
    width = max([*counts, 1]) + 2
    order = m.order(sum(counts)).to(torch.int32) + 1
    table = torch.full((len(contexts), width), 2**30, dtype=torch.int32, device=m.device)  # tails are garbage
    pages = m.draw(sum(counts) + 1, page, latent + rope).to(dtype)
    at = 0
    for row, (n, count) in enumerate(zip(contexts, counts, strict=True)):
        table[row, :count] = order[at : at + count]
        if m.data == "poison" and n % page:
            pages.view(-1, page, latent + rope)[int(order[at + count - 1]), n % page :] = torch.nan
        at += count
    lens = [max(0, n - each + 1 + i) for n in contexts for i in range(each)]
    args = {
        "q": m.draw(len(lens), heads, latent + rope), "pages": pages, "latent_dim": latent, "page_table": table,
        "key_lens": torch.tensor(lens, dtype=torch.int32, device=m.device),
        "cu_seqlens": m.offsets([each] * len(contexts)), "scale": (latent + rope) ** -0.5,
        "return_lse": bool(m.sizes.get("lse", False)),
    }  # fmt: skip
    item = torch.empty(0, dtype=m.dtype).element_size()
    return Trial(
        op="mla_decode", title="", args=args,
        moved_bytes=sum(contexts) * (latent + rope) * pages.element_size()
        + len(lens) * heads * (2 * latent + rope) * item,
        flops=2 * sum(lens) * heads * (2 * latent + rope),
    )  # fmt: skip


def _attention(m: _Maker) -> Trial:
    """`lengths` of queries, `keys` (of each request, default the same), `heads`, `key`, `value`, `causal`, `lse`."""
    lengths = m.lengths()
    keys: Sequence[int] = m.sizes.get("keys", lengths)
    heads, key, value = m.size("heads", 2), m.size("key", 192), m.size("value", 128)
    args = {
        "q": m.draw(sum(lengths), heads, key), "k": m.draw(sum(keys), heads, key), "v": m.draw(sum(keys), heads, value),
        "cu_seqlens_q": m.offsets(lengths), "cu_seqlens_k": m.offsets(keys), "scale": key**-0.5,
        "causal": bool(m.sizes.get("causal", True)), "return_lse": bool(m.sizes.get("lse", False)),
    }  # fmt: skip
    pairs = sum(q * k - (q * (q - 1) // 2 if args["causal"] else 0) for q, k in zip(lengths, keys, strict=True))
    item = args["q"].element_size()
    elements = sum(lengths) * (key + value) + sum(keys) * (key + value)
    return Trial(
        op="attention_varlen",
        title="",
        args=args,
        moved_bytes=elements * heads * item,
        flops=2 * pairs * heads * (key + value),
    )


def _merging(m: _Maker) -> Trial:
    """`parts`, `tokens`, `heads`, `value`."""
    parts, tokens, heads, value = m.size("parts", 3), m.size("tokens", 5), m.size("heads", 12), m.size("value", 128)
    outs, lses = m.draw(parts, tokens, heads, value), m.draw(parts, tokens, heads, dtype=torch.float32, scale=5)
    if tokens:
        lses[:, 0, 0], lses[0, :, -1] = -torch.inf, -torch.inf
        if m.data == "poison":
            outs[0, :, -1] = torch.nan
    return Trial(
        op="merge_partials",
        title="",
        args={"outs": outs, "lses": lses},
        moved_bytes=outs.nbytes + outs.nbytes // max(parts, 1),
    )


def _storing(m: _Maker) -> Trial:
    """`tokens`, `width`, `page`, `pages` (dtype)."""
    tokens, width, page = m.size("tokens", 5), m.size("width", 576), m.size("page", 64)
    pages = m.draw(tokens // page + 3, page, width).to(m.sizes.get("pages", m.dtype))
    rows = m.order((tokens // page + 3) * page)[:tokens]
    if tokens > 2:
        rows[1], rows[2] = 0, -1
    args = {"values": m.draw(tokens, width, scale=3), "pages": pages, "rows": rows}
    return Trial(op="store_rows", title="", args=args, written=("pages",), moved_bytes=args["values"].nbytes * 2)


def _gathering(m: _Maker) -> Trial:
    """`tokens`, `width`, `page`, `pages` (dtype)."""
    stored = _storing(m).args
    return Trial(
        op="gather_rows",
        title="",
        args={"pages": stored["pages"], "rows": stored["rows"]},
        moved_bytes=stored["values"].nbytes * 2,
    )


def _routing(m: _Maker) -> Trial:
    """`tokens`, `hidden`, `experts`, `top_k`, `replay`."""
    tokens, hidden, experts = m.size("tokens", 5), m.size("hidden", 256), m.size("experts", 64)
    top_k = m.size("top_k", 8)
    args: dict[str, Any] = {
        "x": m.draw(tokens, hidden), "weight": m.draw(experts, hidden, scale=hidden**-0.5),
        "bias": m.draw(experts, dtype=torch.float32, scale=0.05), "top_k": top_k, "renormalize": True, "scale": 2.5,
        "ids": m.between(0, experts, tokens, top_k) if m.sizes.get("replay") else None,
    }  # fmt: skip
    return Trial(
        op="route",
        title="",
        args=args,
        moved_bytes=args["x"].nbytes + args["weight"].nbytes,
        flops=2 * tokens * hidden * experts,
    )


def _product(m: _Maker) -> Trial:
    """`tokens`, `width`, `outputs`, `stride` (of the rows of x)."""
    tokens, width, outputs = m.size("tokens", 5), m.size("width", 256), m.size("outputs", 200)
    x = m.draw(tokens, m.size("stride", width))
    if m.data == "poison":
        x[:, width:] = torch.nan
    weight = m.draw(outputs, width, scale=width**-0.5)
    return Trial(
        op="linear", title="", args={"x": x[:, :width], "weight": weight},
        moved_bytes=weight.nbytes + tokens * (width + outputs) * x.element_size(),
        flops=2 * tokens * width * outputs,
    )  # fmt: skip


def _expert_weights(m: _Maker, form: str, shape: tuple[int, int, int], first: int) -> ExpertWeights:
    experts, rows, width = shape
    inner = rows // 2
    if m.sizes.get("raw"):  # any bits are MXFP4: so large ones need not be encoded
        shapes = [(experts, rows, width // 2), (experts, width, inner // 2)]
        p13, p2 = (m.between(0, 256, *each).to(torch.uint8) for each in shapes)
        s13, s2 = (m.between(117, 121, *each[:2], each[2] // 16).to(torch.uint8) for each in shapes)
        return ExpertWeights(p13, p2, s13, s2, format="mxfp4", first_expert=first)
    w13 = m.draw(experts, rows, width, dtype=torch.float32, scale=width**-0.5)
    w2 = m.draw(experts, width, inner, dtype=torch.float32, scale=inner**-0.5)
    if form == "bf16":
        return ExpertWeights(w13.to(m.dtype), w2.to(m.dtype), first_expert=first)
    if form == "mxfp4":
        (p13, s13), (p2, s2) = mxfp4_encode(w13), mxfp4_encode(w2)
        return ExpertWeights(p13, p2, s13, s2, format="mxfp4", first_expert=first)
    (p13, s13, g13), (p2, s2, g2) = nvfp4_encode(w13), nvfp4_encode(w2)
    g13, g2 = (x.expand(experts).contiguous() for x in (g13, g2))
    return ExpertWeights(p13, p2, s13, s2, g13, g2, "nvfp4", first)


def _experts(m: _Maker) -> Trial:
    """`tokens`, `experts`, `top_k`, `width`, `intermediate`, `format`, `outside` (ids of other ranks), `raw`."""
    tokens, experts, top_k = m.size("tokens", 5), m.size("experts", 8), m.size("top_k", 4)
    width, inner, form = m.size("width", 256), m.size("intermediate", 64), m.sizes.get("format", "mxfp4")
    first = 3 if m.sizes.get("outside") else 0
    weights = _expert_weights(m, form, (experts, 2 * inner, width), first)
    span = experts + (6 if m.sizes.get("outside") else 0)
    ids = m.uniform(tokens, span).argsort(-1)[:, :top_k].to(torch.int32).contiguous()
    args: dict[str, Any] = {
        "x": m.draw(tokens, width), "ids": ids, "weights": m.uniform(tokens, top_k),
        "prepared": weights, "act_fn": SiTU(beta=4.0, linear_beta=25.0),
    }  # fmt: skip
    used = len(torch.unique(ids))
    stored = (
        weights.w13.nbytes
        + weights.w2.nbytes
        + sum(0 if s is None else s.nbytes for s in (weights.w13_scale, weights.w2_scale))
    )
    return Trial(
        op="experts", title="", args=args, moved_bytes=stored * used // max(experts, 1) + 2 * args["x"].nbytes,
        flops=6 * tokens * top_k * width * inner,
    )  # fmt: skip


def _residuals(m: _Maker) -> Trial:
    """`tokens`, `hidden`, `rows` (that count), `bank` (rows in all), `write`, `prefix`, `delta`, `norm`."""
    tokens, hidden, rows = m.size("tokens", 5), m.size("hidden", 256), m.size("rows", 3)
    bank = m.draw(tokens, m.size("bank", 8), hidden)
    if m.data == "poison":
        bank[:, rows:] = torch.nan
    write = m.sizes.get("write")
    args = {
        "prefix": m.draw(tokens, hidden) if m.sizes.get("prefix", True) else None,
        "delta": m.draw(tokens, hidden) if m.sizes.get("delta", True) else None, "bank": bank,
        "score_weight": m.draw(hidden, dtype=torch.float32, scale=hidden**-0.5),
        "out_norm_weight": m.draw(hidden, dtype=torch.float32) if m.sizes.get("norm", True) else None,
        "num_blocks": rows, "write_block": write, "eps": 1e-5, "out_eps": 1e-5,
    }  # fmt: skip
    item = bank.element_size()
    passes = rows + (args["prefix"] is not None) + (args["delta"] is not None) + 2
    return Trial(op="attn_res", title="", args=args, written=("bank",), moved_bytes=tokens * hidden * item * passes)


def _norm(op: str) -> Callable[[_Maker], Trial]:
    """`tokens`, `hidden`."""

    def make(m: _Maker) -> Trial:
        tokens, hidden = m.size("tokens", 5), m.size("hidden", 256)
        x, weight = m.draw(tokens, hidden), m.draw(hidden, dtype=torch.float32)
        args: dict[str, Any] = {"x": x, "weight": weight, "eps": 1e-5}
        if op == "gated_rms_norm":
            args["gate"] = m.draw(tokens, hidden)
        return Trial(op=op, title="", args=args, moved_bytes=x.nbytes * (2 + ("gate" in args)))

    return make


def _activation(m: _Maker) -> Trial:
    """`tokens`, `hidden`."""
    x = m.draw(m.size("tokens", 5), 2 * m.size("hidden", 256), scale=3)
    return Trial(
        op="situ_and_mul", title="", args={"x": x, "beta": 4.0, "linear_beta": 25.0}, moved_bytes=x.nbytes * 3 // 2
    )


_MAKERS: dict[str, Callable[[_Maker], Trial]] = {
    "kda_chunk": _recurrence("kda_chunk"),
    "kda_recurrent": _recurrence("kda_recurrent"),
    "kda_mixer": _mixer,
    "kda_replay": _replay,
    "short_conv": _convolution,
    "mla_decode": _latent_decode,
    "attention_varlen": _attention,
    "merge_partials": _merging,
    "store_rows": _storing,
    "gather_rows": _gathering,
    "linear": _product,
    "route": _routing,
    "experts": _experts,
    "attn_res": _residuals,
    "rms_norm": _norm("rms_norm"),
    "gated_rms_norm": _norm("gated_rms_norm"),
    "situ_and_mul": _activation,
}
