"""How long ops take at the sizes of Kimi-K3, against the floor of the device and against each other.

Each case is checked first (`k3lib.conformance`). On a GPU a call is captured in a graph and replayed over several
copies of its arguments, so that the cache does not hold them; times are medians of device events.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from k3lib.conformance import check
from k3lib.errors import ConfigError
from k3lib.ops import ops, use_options
from k3lib.trials import make_trial, moved

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from k3lib.ops import Impl, Op
    from k3lib.trials import Trial

__all__ = ["CASES", "Case", "Ceilings", "Timing", "lines", "measure", "run", "table"]

COLD_BYTES = 256 << 20  # of arguments in turn: several times the cache of an H200
MAX_COPIES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A call at a size of the model. TP8 and TP16 are the sizes of one rank of so many."""

    op: str
    name: str
    sizes: dict[str, Any]


def _recurrent(op: str, name: str, lengths: list[int], heads: int, **more: str) -> Case:
    return Case(op=op, name=f"{name} H={heads}", sizes={"lengths": lengths, "heads": heads, **more})


def _replay(requests: int, layers: int) -> Case:
    sizes = {"counts": [8] * requests, "layers": layers, "heads": 12}
    return Case(op="kda_replay", name=f"{requests} x 8, layers {layers} H=12", sizes=sizes)


def _moe(tokens: int, inner: int) -> Case:
    sizes = {"tokens": tokens, "experts": 896, "top_k": 16, "width": 3584, "intermediate": inner, "raw": True}
    return Case(op="experts", name=f"{tokens} tokens, I={inner}", sizes=sizes)


def _latent(requests: int, context: int, heads: int, note: str = "", **more: Any) -> Case:  # noqa: ANN401 - sizes
    sizes = {"contexts": [context] * requests, "heads": heads, **more}
    return Case(op="mla_decode", name=f"{requests} x {context} H={heads}{note}", sizes=sizes)


CASES: tuple[Case, ...] = (
    *(_recurrent("kda_chunk", "1 x 8192", [8192], heads) for heads in (6, 12, 96)),
    _recurrent("kda_chunk", "8 x 1024", [1024] * 8, 12),
    _recurrent("kda_chunk", "1 x 65536", [65536], 12),
    *(_recurrent("kda_mixer", f"decode {n}", [1] * n, heads) for heads in (6, 12, 96) for n in (1, 32, 256)),
    *(_recurrent("kda_mixer", f"verify {n} x 8", [8] * n, 12, verify="replay") for n in (1, 32, 256)),
    _recurrent("kda_mixer", "verify, states 32 x 8", [8] * 32, 12, verify="states"),
    *(_replay(n, layers) for n, layers in ((32, 1), (32, 8), (256, 1))),
    Case(op="short_conv", name="8192 tokens H=12", sizes={"lengths": [8192], "channels": 12 * 384}),
    _latent(1, 8192, 12),
    _latent(32, 8192, 12),
    _latent(8, 131072, 96),
    _latent(32, 8192, 12, " x 8", per_request=8),
    _latent(32, 8192, 12, " fp8", pages=torch.float8_e4m3fn),
    *(
        Case(op="attention_varlen", name=f"8192 tokens H={heads}", sizes={"lengths": [8192], "heads": heads})
        for heads in (12, 96)
    ),
    *(_moe(tokens, inner) for inner in (384, 192) for tokens in (1, 8, 64, 256, 8192)),
    *(
        Case(op="linear", name=f"{n} x {k} to {m}", sizes={"tokens": n, "width": k, "outputs": m})
        for n in (1, 32)
        for k, m in ((7168, 3584), (3584, 7168), (7168, 3216), (768, 7168), (7168, 768), (384, 7168))
    ),
    *(
        Case(op="route", name=f"{n} tokens", sizes={"tokens": n, "hidden": 7168, "experts": 896, "top_k": 16})
        for n in (1, 64, 8192)
    ),
    Case(op="attn_res", name="64 tokens, 4 rows", sizes={"tokens": 64, "hidden": 7168, "rows": 4}),
    Case(op="attn_res", name="8192 tokens, 8 rows", sizes={"tokens": 8192, "hidden": 7168, "rows": 8}),
    Case(op="situ_and_mul", name="131072 x 384", sizes={"tokens": 131072, "hidden": 384}),
    Case(op="rms_norm", name="8192 x 7168", sizes={"tokens": 8192, "hidden": 7168}),
    Case(op="gated_rms_norm", name="98304 x 128", sizes={"tokens": 98304, "hidden": 128}),
    Case(op="store_rows", name="8192 rows", sizes={"tokens": 8192}),
    Case(op="gather_rows", name="8192 rows", sizes={"tokens": 8192}),
)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device can do, measured: bytes and multiply-adds of bf16 matrices a second."""

    bytes_per_s: float
    flops_per_s: float

    @classmethod
    def of(cls, device: torch.device) -> Ceilings:
        """Measure them."""
        on_gpu = device.type == "cuda"
        source = torch.randn((1 << 28) if on_gpu else (1 << 24), device=device)
        target = torch.empty_like(source)
        side = 8192 if on_gpu else 512
        dtype = torch.bfloat16 if on_gpu else torch.float32
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        # by a kernel: a copy that stands in a graph goes through the copy engine, at two thirds of the speed
        calls = (lambda: torch.neg(source, out=target), lambda: a @ b)
        copy, product = (min(measure([call], device, repeat=8)) for call in calls)
        return cls(2 * source.nbytes / copy, 2 * side**3 / product)

    def floor(self, trial: Trial) -> float:
        """Seconds that the trial takes at least."""
        return max(trial.moved_bytes / self.bytes_per_s, trial.flops / self.flops_per_s)


@dataclass(frozen=True, slots=True)
class Timing:
    """One line of the result; times in microseconds. `us` is None if the case failed its check, with why in `note`."""

    op: str
    case: str
    impl: str
    us: float | None
    p10: float | None
    p90: float | None
    floor_us: float
    note: str
    device: str
    torch: str


def measure(calls: Sequence[Callable[[], object]], device: torch.device, *, repeat: int = 30) -> list[float]:
    """Seconds of each call, run in turn. On a GPU each is captured; what cannot be is timed by events as it is."""
    if device.type != "cuda":
        found = []
        calls[0]()
        for i in range(min(repeat, 5)):
            begin = time.perf_counter()
            calls[i % len(calls)]()
            found.append(time.perf_counter() - begin)
        return found
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    replays: list[Callable[[], object]] = []
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        for call in calls:
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, stream=stream):
                    call()
            except RuntimeError:  # it waits for the device
                torch.cuda.synchronize()
                replays.append(call)
            else:
                replays.append(graph.replay)
        events = []
        for i in range(repeat + 3):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            before.record(stream)
            replays[i % len(replays)]()
            after.record(stream)
            events.append((before, after))
        stream.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in events[3:]]


def run(
    names: Sequence[str] = (),
    *,
    device: torch.device | str,
    impls: Sequence[str] = (),
    cases: Sequence[Case] = CASES,
    checks: bool = True,
    references: bool = False,
    progress: bool = False,
) -> list[Timing]:
    """Time implementations.

    Args:
        names: ops; () is all.
        device: where.
        impls: names of implementations; () is all that are able.
        cases: what to call.
        checks: compare with the reference first.
        references: time the references too; they are slow on a GPU.
        progress: show a bar.

    Raises:
        ConfigError: an op without cases.
    """
    if unknown := sorted(set(names) - {case.op for case in cases}):
        raise ConfigError(f"bench has no case of {', '.join(unknown)}")
    device = torch.device(device)
    ceilings = Ceilings.of(device)
    found = []
    for case in tqdm([c for c in cases if not names or c.op in names], desc="bench", disable=not progress):
        op = ops()[case.op]
        trial = make_trial(case.op, title=case.name, device=device, **case.sizes)
        for impl in op.implementations():
            is_wanted = impl.name in impls if impls else references or impl.name != op.default
            reason = impl.why_not(op.spec_of(**trial.args), op.local_target(device.type))
            if is_wanted and (reason is None or impl.name in impls):
                found.append(_time(op, impl, case, trial, ceilings, device, checks=checks))
    return found


def _copy(trial: Trial, number: int, device: torch.device) -> dict[str, Any]:
    """Arguments for one of several calls in turn. Experts are many: copies share them, and each asks for others."""
    if not number:
        return trial.args
    if trial.op != "experts":
        return moved(trial, device).args
    store = trial.args["prepared"]
    ids = (trial.args["ids"] - store.first_expert + 41 * number) % store.num_experts + store.first_expert
    return {**trial.args, "ids": ids}


def _time(
    op: Op[Any, Any], impl: Impl, case: Case, trial: Trial, ceilings: Ceilings, device: torch.device, *, checks: bool
) -> Timing:
    note = ""
    times: list[float] = []
    if checks:
        result = check(op, impl, trial, device, torch.bfloat16)
        note = "" if result.outcome == "ok" else f"{result.outcome}: {result.detail}"
    if not note:
        copies = min(MAX_COPIES, 1 + COLD_BYTES // max(trial.moved_bytes, 1)) if device.type == "cuda" else 1
        each = [_copy(trial, i, device) for i in range(copies)]
        try:
            with torch.inference_mode(), use_options(strict=False):
                times = measure([lambda args=args: impl.run(**args) for args in each], device)  # type: ignore[misc]
        except Exception as error:  # the table goes on
            note = f"{type(error).__name__}: {str(error)[:200]}"
    us = sorted(1e6 * t for t in times)
    middle, low, high = (statistics.median(us), us[len(us) // 10], us[-1 - len(us) // 10]) if us else (None, None, None)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    floor = 1e6 * ceilings.floor(trial)
    return Timing(op.name, case.name, impl.name, middle, low, high, floor, note, name, torch.__version__)


def lines(timings: Sequence[Timing]) -> str:
    """JSON, one object a line."""
    return "\n".join(json.dumps(asdict(timing)) for timing in timings)


def table(timings: Sequence[Timing]) -> str:
    """For people."""
    rows = [f"{'op':<18}{'case':<28}{'implementation':<16}{'us':>10}{'p90':>10}{'floor':>9}{'x floor':>9}"]
    for t in timings:
        if t.us is None:
            rows.append(f"{t.op:<18}{t.case:<28}{t.impl:<16}  {t.note}")
        else:
            ratio = t.us / t.floor_us if t.floor_us else 0.0
            rows.append(
                f"{t.op:<18}{t.case:<28}{t.impl:<16}{t.us:>10.1f}{t.p90 or 0:>10.1f}{t.floor_us:>9.1f}{ratio:>9.1f}"
            )
    return "\n".join(rows)
