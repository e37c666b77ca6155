"""What each lever of numerics costs k3lib-nano: the same held-out items under every one of them.

An answer is right if `training.tasks.check` says so, and the same if its tokens are those of the base, one by one.
Prefix reuse and speculation must leave every answer as it was. They are compared in float32, where rounding is far
below what tells two tokens apart; in bfloat16 another batch already rounds differently.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.nano_scores import Score
from k3lib import Engine, EngineConfig, KimiK3ForConditionalGeneration
from k3lib.layers import Experts
from k3lib.ops import ExpertWeights, experts, register, situ_and_mul
from k3lib.ops.quant import mxfp8_decode, mxfp8_encode, nvfp4_encode
from k3lib.spec import SpecConfig
from k3lib.spec.draft_files import BUNDLE
from training.train import CHECKPOINT, load_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from training.tasks import Item

E4M3_MAX = 448.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """One change of the base.

    Attributes:
        name: in the table.
        dtype: of weights and activations; None is the base's.
        engine: changed fields of the engine's configuration.
        backends: as `from_pretrained` takes them.
        experts: new weights of each layer of experts, given its number and module.
        exact: every answer has to be that of the base.
        warm: what counts is a second run, over what the first left in the cache.
    """

    name: str
    dtype: torch.dtype | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    backends: str | dict[str, str] | None = None
    experts: Callable[[int, Experts], ExpertWeights] | None = None
    exact: bool = False
    warm: bool = False


# ---- weights and activations that are rounded otherwise -----------------------------------------


def to_nvfp4(w13: Tensor, w2: Tensor) -> ExpertWeights:
    """`[E, 2I, L]` and `[E, L, I]`, encoded; w1 and w3 of an expert share their global scale."""
    both = [
        [torch.stack(parts) for parts in zip(*map(nvfp4_encode, w), strict=True)] for w in (w13.float(), w2.float())
    ]
    (p13, s13, g13), (p2, s2, g2) = both
    return ExpertWeights(p13, p2, s13, s2, g13, g2, format="nvfp4")


def stored_as_nvfp4(_number: int, layer: Experts) -> ExpertWeights:
    """From the values of the checkpoint, which MXFP4 has rounded already."""
    every = torch.arange(layer.weights.num_experts, device=layer.weights.w2.device)
    return to_nvfp4(*layer.weights.decode(every, torch.float32))


def float_as_nvfp4(run: Path) -> Callable[[int, Experts], ExpertWeights]:
    """From the weights that a run of `training.train` kept in fp32."""
    model, _ = load_run(run / CHECKPOINT)
    wide = [(m.w13.detach(), m.w2.detach()) for m in model.modules() if isinstance(m, Experts)]

    def encode(number: int, layer: Experts) -> ExpertWeights:
        encoded = to_nvfp4(*wide[number])
        encoded.to(layer.weights.w2.device)
        return encoded

    return encode


def by_token(x: Tensor) -> Tensor:
    """Round `[T, L]` to E4M3 with one scale a token."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / E4M3_MAX
    return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def by_32(x: Tensor) -> Tensor:
    """Round `[T, L]` as MXFP8 does."""
    return mxfp8_decode(*mxfp8_encode(x), x.dtype)


@contextlib.contextmanager
def rounded_activations(**rules: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Implementations of `experts` that round what goes into each product: the reference otherwise, slow everywhere."""

    def made(rounded: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
        def run(x: Tensor, ids: Tensor, weights: Tensor, prepared: Any, *, act_fn: Any) -> Tensor:
            total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
            for e in range(prepared.num_experts):
                token, slot = (ids == e + prepared.first_expert).nonzero(as_tuple=True)
                w13, w2 = prepared.decode(e, x.dtype)
                hidden = rounded(x[token]) @ w13.t()
                hidden = situ_and_mul(hidden, beta=act_fn.beta, linear_beta=act_fn.linear_beta)
                total.index_add_(0, token, (rounded(hidden) @ w2.t()).float() * weights[token, slot, None])
            return total.to(x.dtype)

        return run

    for name, rounded in rules.items():
        register(experts, name=name, platforms={"cpu", "cuda"}, priority=-2000)(made(rounded))
    try:
        yield
    finally:
        for name in rules:
            experts.remove(name)


# ---- the runs -----------------------------------------------------------------------------------


def levers(folder: Path, device: str, *, draft: str | None = None, float_run: Path | None = None) -> list[Lever]:
    """All of them: the base first, float32 in front of what must equal it."""
    on_cpu = device == "cpu"
    base, other = ("float32", "bfloat16") if on_cpu else ("bfloat16", "float32")
    encoders = {"from MXFP4": stored_as_nvfp4}
    if float_run is not None:
        encoders["from fp32"] = float_as_nvfp4(float_run)
    proposer = draft or (str(folder) if (folder / BUNDLE).is_dir() else "ngram")
    speculating = f"speculation, {'n-gram' if proposer == 'ngram' else 'draft'}"
    eager = {"cuda_graphs": False}  # simulated rounding waits for the device
    wide: dict[str, Any] = {"dtype": torch.float32, "exact": True}
    return [
        Lever(name=f"base: {base}", dtype=getattr(torch, base)),
        Lever(name=other, dtype=getattr(torch, other)),
        Lever(name="bf16 KDA state", engine={"mamba_ssm_dtype": "bfloat16"}),
        Lever(name="fp8 KV cache", engine={"kv_cache_dtype": "fp8_e4m3"}),
        *(Lever(name=f"NVFP4 experts {source}", experts=encode) for source, encode in encoders.items()),
        Lever(name="W4A8 simulated, E4M3 a token", engine=eager, backends={"experts": "e4m3_token"}),
        Lever(name="W4A8 simulated, MXFP8", engine=eager, backends={"experts": "mxfp8"}),
        *(Lever(name=f"backends: {name}", backends=name) for name in ("reference", "cpu" if on_cpu else "triton")),
        Lever(name="prefix reuse", engine={"disable_radix_cache": False, "checkpoint_grid": 64}, warm=True, **wide),
        Lever(name=speculating, engine={"spec": SpecConfig(draft=proposer)}, **wide),
    ]


class Answers:
    """What a lever makes of some items.

    Attributes:
        lever: which.
        right, items: exact answers and all of them, by kind.
        tokens: of every answer.
        reused: prompt tokens that were found in the cache.
        accept_length: tokens of a verify step; 0 without them.
        same: answers whose tokens are those of the base (of float32 for an exact lever); set by `compare`.
    """

    def __init__(self, lever: Lever, engine: Engine, items: dict[str, list[Item]], tokens: int) -> None:
        self.lever, self.same = lever, 0
        together = [item for listed in items.values() for item in listed]
        if lever.warm:
            Score(engine, together, tokens)
        cached = engine.stats()["cached_state_tokens"]
        score = Score(engine, together, tokens)
        self.tokens = score.answers
        self.reused = engine.stats()["cached_state_tokens"] - cached
        report = engine.stats()["speculation"]
        self.accept_length = 0.0 if report is None else report["accept_length"]
        self.items = {kind: len(listed) for kind, listed in items.items()}
        rights = iter(score.right)
        self.right = {kind: sum(next(rights) for _ in listed) for kind, listed in items.items()}

    def compare(self, base: Answers) -> None:
        """Count equal answers."""
        self.same = sum(mine == its for mine, its in zip(self.tokens, base.tokens, strict=True))

    def summary(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "name": self.lever.name, "exact": self.lever.exact, "right": self.right, "items": self.items,
            "same": self.same, "reused_tokens": self.reused, "accept_length": self.accept_length,
        }  # fmt: skip


def answers(
    folder: Path, lever: Lever, base: Lever, items: dict[str, list[Item]], *, device: str, tokens: int, running: int
) -> Answers:
    """Load the model under a lever and ask it everything."""
    model = KimiK3ForConditionalGeneration.from_pretrained(
        folder, dtype=lever.dtype or base.dtype, device=device, backends=lever.backends, progress=False
    )
    if lever.experts is not None:
        for number, layer in enumerate(m for m in model.modules() if isinstance(m, Experts)):
            layer.set_packed(lever.experts(number, layer))
    changes = {"disable_radix_cache": True, **lever.engine}
    return Answers(lever, Engine(model, EngineConfig(max_running_requests=running, **changes)), items, tokens)


def run_levers(
    folder: Path, items: dict[str, list[Item]], *, device: str = "cpu", tokens: int = 500, running: int = 32,
    draft: str | None = None, float_run: Path | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Print the table line by line; returns its lines."""
    listed = levers(folder, device, draft=draft, float_run=float_run)
    print(f"{'lever':<30}" + "".join(f"{kind:>15}" for kind in items) + f"{'same answers':>15}", flush=True)
    done: list[Answers] = []
    with rounded_activations(e4m3_token=by_token, mxfp8=by_32):
        for lever in listed:
            got = answers(folder, lever, listed[0], items, device=device, tokens=tokens, running=running)
            done.append(got)
            plain = next(a for a in done if not lever.exact or a.lever.dtype == torch.float32)
            got.compare(plain)
            cells = "".join(f"{f'{got.right[kind]} / {got.items[kind]}':>15}" for kind in items)
            print(f"{lever.name:<30}{cells}{f'{got.same} / {len(got.tokens)}':>15}", flush=True)
    return [got.summary() for got in done]


def check_exact(lines: list[dict[str, Any]]) -> None:
    """Hold prefix reuse and speculation to what they promise.

    Raises:
        AssertionError: one of them changed an answer, or had nothing to do.
    """
    for line in lines:
        if line["exact"]:
            count = sum(line["items"].values())
            assert line["same"] == count, f"{line['name']} changed {count - line['same']} of {count} answers"
            assert line["reused_tokens"] or line["accept_length"], f"{line['name']} had nothing to do"
