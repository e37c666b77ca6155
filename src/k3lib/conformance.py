"""Every implementation of every op on this machine against the reference, over awkward shapes and data.

The reference runs in float32 on the same values; results are compared by `k3lib.testing.assert_close` at its
tolerances.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from k3lib.errors import K3Error
from k3lib.ops import Op, ops, use_options
from k3lib.testing import assert_close, tolerance
from k3lib.trials import Trial, kept_in, make_trial, moved, widened

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from k3lib.batch import VerifyScratch
    from k3lib.ops import Impl

__all__ = ["Result", "check", "run", "table", "trials_of"]

F32, BF16, FP8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
_RAGGED = [1, 0, 64, 3, 130, 63]
_PREFILL: list[dict[str, Any]] = [
    {"lengths": _RAGGED, "heads": 3}, {"lengths": [200], "heads": 1}, {"lengths": []}, {"lengths": [0, 0]},
    {"lengths": _RAGGED, "heads": 2, "state": None}, {"lengths": [65, 17], "state": BF16},
    {"lengths": [130, 70], "saves": [(0, 64), (0, 128), (1, 7)]}, {"lengths": [33, 5, 20, 18], "absent": True},
    {"lengths": [65, 9], "key": 32, "value": 64}, {"lengths": [65, 9], "key": 64, "value": 32},
    *({"lengths": [150, 40], "data": data} for data in ("bound", "weak", "extreme", "poison")),
]  # fmt: skip
_STEP: list[dict[str, Any]] = [
    {"lengths": [1]}, {"lengths": [1] * 9, "heads": 3}, {"lengths": [1] * 5, "absent": True}, {"lengths": []},
    {"lengths": [1] * 4, "state": BF16}, {"lengths": [1] * 3, "key": 32, "value": 64},
    *({"lengths": [1] * 6, "data": data} for data in ("bound", "weak", "extreme", "poison")),
]  # fmt: skip
_FEW: list[dict[str, Any]] = [{"lengths": [8, 3, 0, 8]}, {"lengths": [5, 8], "saves": [(0, 2), (1, 7)]}]
_DRAFTS: list[dict[str, Any]] = [
    {"lengths": [8, 3, 0, 8]}, {"lengths": [1], "heads": 3}, {"lengths": [16, 9], "entries": 16},
    {"lengths": [8] * 4, "absent": True}, {"lengths": [5, 8], "state": BF16},
    {"lengths": [4, 4], "key": 32, "value": 64},
    {"lengths": []}, *({"lengths": [8, 7], "data": data} for data in ("bound", "weak", "extreme", "poison")),
]  # fmt: skip
_VERIFY: list[dict[str, Any]] = [{"verify": kind, **sizes} for kind in ("replay", "states") for sizes in _DRAFTS]
TRIALS: dict[str, list[dict[str, Any]]] = {
    "kda_chunk": _PREFILL,
    "kda_recurrent": [*_STEP, *_FEW, *_VERIFY],
    "kda_mixer": [*_STEP, *(sizes for sizes in _PREFILL if sizes.get("state", F32) is not None), *_VERIFY],
    "kda_replay": [
        {"counts": [3, 8, 0, 1]}, {"counts": []}, {"counts": [16], "heads": 3, "layers": 1},
        {"counts": [4, 4, 4], "state": BF16}, {"counts": [5, 2], "key": 32, "value": 64},
        *({"counts": [8, 7, 8], "data": data} for data in ("bound", "weak", "extreme", "poison")),
    ],
    "short_conv": [
        {"lengths": lengths, "channels": channels, **more}
        for lengths, channels, more in (
            (_RAGGED, 384, {}), ([1] * 7, 130, {}), ([], 64, {}), ([2, 3, 1], 64, {"absent": True}),
            ([70, 5], 96, {"saves": [(0, 1), (0, 64), (1, 2)]}), ([40, 2], 64, {"data": "poison"}),
            ([9, 9], 64, {"width": 2}), ([1] * 4, 96, {"data": "extreme"}), ([8, 0, 3], 96, {"verify": "states"}),
            ([8] * 3, 64, {"verify": "states", "data": "poison"}), ([4] * 4, 64, {"verify": "states", "absent": True}),
        )
    ],
    "mla_decode": [
        {"contexts": [37]}, {"contexts": [1, 64, 65, 700], "heads": 12, "lse": True}, {"contexts": []},
        {"contexts": [0, 5], "lse": True}, {"contexts": [300, 9], "per_request": 8, "heads": 6},
        {"contexts": [2, 130], "per_request": 16, "heads": 3, "lse": True}, {"contexts": [90, 33], "pages": FP8},
        {"contexts": [100, 7], "latent": 64, "rope": 16, "page": 16, "heads": 5}, {"contexts": [5000], "heads": 12},
        {"contexts": [77, 130], "data": "extreme", "lse": True}, {"contexts": [77, 70], "data": "poison"},
        {"contexts": [300, 1, 64], "heads": 96, "lse": True}, {"contexts": [0, 5000], "heads": 48, "lse": True},
        {"contexts": [77, 70], "heads": 64, "data": "poison"},
    ],
    "attention_varlen": [
        {"lengths": [1, 64, 0, 129], "lse": True}, {"lengths": [70], "heads": 3}, {"lengths": [65, 9], "causal": False},
        {"lengths": [4, 3], "keys": [0, 30], "lse": True, "causal": False}, {"lengths": [5, 40], "keys": [100, 300]},
        {"lengths": []}, {"lengths": [33, 20], "key": 64, "value": 32}, {"lengths": [50], "data": "extreme"},
    ],
    "merge_partials": [{}, {"tokens": 0}, {"parts": 1}, {"parts": 8, "tokens": 33, "value": 512}, {"data": "poison"}],
    "store_rows": [{"tokens": 70}, {"tokens": 0}, {"tokens": 9, "pages": FP8}, {"tokens": 5, "width": 100, "page": 16}],
    "gather_rows": [{"tokens": 70}, {"tokens": 0}, {"tokens": 9, "pages": FP8}, {"tokens": 5, "width": 100}],
    "linear": [
        *({"tokens": n} for n in (0, 1, 2, 17, 64, 65)),
        *({"tokens": n, "width": 1536, "outputs": 70} for n in (1, 5, 33)),
        *({"tokens": n, "width": 200, "outputs": 1000, "stride": 208, "data": "poison"} for n in (1, 9)),
        *({"tokens": n, "width": 100, "outputs": 3, "data": "extreme"} for n in (1, 3)),
    ],
    "route": [
        {"tokens": 5}, {"tokens": 0}, {"tokens": 70, "experts": 896, "top_k": 16, "hidden": 512}, {"tokens": 1},
        {"tokens": 9, "replay": True}, {"tokens": 7, "data": "extreme"},
    ],
    "experts": [
        {"tokens": tokens, "format": form, **more}
        for form in ("mxfp4", "nvfp4", "bf16")
        for tokens, more in (
            (1, {}), (5, {"outside": True}), (0, {}), (70, {"intermediate": 192}), (300, {"experts": 16, "width": 512}),
        )
    ],
    "attn_res": [
        {"tokens": 5}, {"tokens": 0}, {"rows": 0, "bank": 1}, {"rows": 8}, {"write": 3, "prefix": False},
        {"write": 0, "rows": 0}, {"delta": False}, {"norm": False}, {"hidden": 7168, "rows": 4, "tokens": 3},
        {"data": "poison", "write": 3}, {"data": "extreme"}, {"hidden": 200},
    ],
    "rms_norm": [{"tokens": 5}, {"tokens": 0}, {"hidden": 7168}, {"hidden": 100}, {"data": "extreme"}],
    "gated_rms_norm": [{"tokens": 5}, {"tokens": 0}, {"hidden": 128}, {"hidden": 100}, {"data": "extreme"}],
    "situ_and_mul": [{"tokens": 5}, {"tokens": 0}, {"hidden": 192}, {"hidden": 100}, {"data": "extreme"}],
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one trial of one implementation: "ok", "skip" or "FAILED", and why."""

    op: str
    impl: str
    title: str
    outcome: str
    detail: str


def trials_of(op: str, dtype: torch.dtype = BF16) -> Iterator[Trial]:
    """The trials of an op; none for ops over ranks."""
    for seed, sizes in enumerate(TRIALS.get(op, ())):
        yield make_trial(op, dtype=dtype, seed=seed, **sizes)


def run(
    names: Sequence[str] = (),
    *,
    device: torch.device | str,
    dtypes: Sequence[torch.dtype] = (BF16,),
    impls: Sequence[str] = (),
    progress: bool = False,
) -> list[Result]:
    """Try implementations on a device.

    Args:
        names: ops; () is all.
        device: where.
        dtypes: of activations.
        impls: names of implementations; () is all but the references themselves.
        progress: show a bar.
    """
    device = torch.device(device)
    chosen = [op for name, op in ops().items() if (not names or name in names) and name in TRIALS]
    jobs = [(op, trial, dtype) for op in chosen for dtype in dtypes for trial in trials_of(op.name, dtype)]
    results = []
    for op, trial, dtype in tqdm(jobs, desc="conformance", disable=not progress):
        wanted = [impl for impl in op.implementations() if impl.name != op.default]
        results += [check(op, impl, trial, device, dtype) for impl in wanted if not impls or impl.name in impls]
    return results


def check(op: Op[Any, Any], impl: Impl, trial: Trial, device: torch.device, dtype: torch.dtype) -> Result:
    """Try one implementation once: right values, nothing else touched, the same bits when run again."""
    title = f"{str(dtype).removeprefix('torch.')} {trial.title}"
    local = moved(trial, device)
    reason = impl.why_not(op.spec_of(**local.args), op.local_target(device.type))
    if reason is not None:
        return Result(op.name, impl.name, title, "skip", reason)
    wide = moved(widened(trial, F32), device)
    try:
        with use_options(strict=False):
            want = _tensors(op.reference(**wide.args), wide)
        got = _tensors(impl.run(**local.args), local)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # so that a fault is blamed on this one
        again = moved(trial, device)
        repeated = _tensors(impl.run(**again.args), again)
        worst = max((_compare(op.name, name, x, got[name], dtype) for name, x in want.items()), default=0.0)
        if impl.deterministic:
            _check_repeated(got, repeated)
        _check_untouched(trial, local)
    except (AssertionError, K3Error) as error:
        return Result(op.name, impl.name, title, "FAILED", str(error))
    except Exception as error:  # a kernel that does not compile, or faults
        return Result(op.name, impl.name, title, "FAILED", f"{type(error).__name__}: {str(error)[:300]}")
    return Result(op.name, impl.name, title, "ok", f"{worst:.1e}")


def _tensors(result: Any, trial: Trial) -> dict[str, Tensor]:  # noqa: ANN401 - of any op
    """What a call made: results by place, arguments that it changed by name."""
    found = result if isinstance(result, tuple) else (result,)
    made = {f"result {i}": x for i, x in enumerate(found) if isinstance(x, torch.Tensor)}
    for name in trial.written:
        value = trial.args[name]
        made |= {name: value} if isinstance(value, torch.Tensor) else _fields(name, value)
    return made


def _fields(name: str, verify: VerifyScratch) -> dict[str, Tensor]:
    return {f"{name}.{field}": x for field, x in kept_in(verify).items()}


def _compare(op: str, name: str, want: Tensor, got: Tensor, dtype: torch.dtype) -> float:
    """Compare one tensor; returns its error relative to its root mean square."""
    stored = got.dtype
    if op == "kda_replay":
        want, got = want.transpose(0, 1), got.transpose(0, 1)  # layers stand in front of rows
    if name in ("state", "conv_state", "pages") and want.shape[:1]:
        want, got = want.flatten(1)[1:], got.flatten(1)[1:]  # row 0 means nothing
        wild = want.isnan().any(-1)
        if not got[wild].isnan().all():
            raise AssertionError(f"{name}: a row that belongs to nobody was written")
        want, got = want[~wild], got[~wild]
    if (op == "attn_res" and name == "bank") or name.startswith("verify."):
        poisoned = want.isnan()
        if not got[poisoned].isnan().all():
            raise AssertionError(f"{name}: a row was written that was not asked for")
        want, got = want.masked_fill(poisoned, 0), got.masked_fill(poisoned, 0)
    if not want.is_floating_point():
        differing = (want != got).float().mean() if want.numel() else torch.zeros(())
        if float(differing) > 2e-3:  # nearly equal scores may change places
            raise AssertionError(f"{name}: {float(differing):.2%} of the integers differ")
        return 0.0
    want, got = want.float(), got.float()
    assert_close(name, want, got, tolerance(op, stored if stored == BF16 else dtype))
    finite = want.isfinite()
    scale = want[finite].square().mean().sqrt() if finite.any() else torch.zeros(())
    error = (got - want)[finite].square().mean().sqrt() if finite.any() else torch.zeros(())
    found = float(error / scale) if scale > 0 else 0.0
    return found if math.isfinite(found) else 0.0


def _check_repeated(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    for name, x in first.items():
        if not _same_bits(x, second[name]):
            raise AssertionError(f"{name}: other bits when run again")


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.is_floating_point():
        a, b = (x.float().nan_to_num(nan=12345.0) for x in (a, b))
    return bool(torch.equal(a, b))


def _check_untouched(trial: Trial, after: Trial) -> None:
    """Arguments that are not named as written are as they were."""
    for name, before in trial.args.items():
        if not isinstance(before, torch.Tensor) or name in trial.written:
            continue
        if not _same_bits(before.cpu(), after.args[name].cpu()):
            raise AssertionError(f"{name}: an input was changed")


def table(results: Sequence[Result]) -> str:
    """One line for each implementation, and one for each failure and reason to skip."""
    lines = [f"{'op':<18}{'implementation':<16}{'ok':>5}{'skip':>6}{'FAILED':>8}   worst error"]
    for op, impl in dict.fromkeys((r.op, r.impl) for r in results):
        mine = [r for r in results if (r.op, r.impl) == (op, impl)]
        count = {kind: sum(r.outcome == kind for r in mine) for kind in ("ok", "skip", "FAILED")}
        worst = max((float(r.detail) for r in mine if r.outcome == "ok"), default=0.0)
        lines.append(f"{op:<18}{impl:<16}{count['ok']:>5}{count['skip']:>6}{count['FAILED']:>8}   {worst:.1e}")
        reasons = dict.fromkeys(r.detail for r in mine if r.outcome == "skip")
        lines += [f"    skip: {reason}" for reason in reasons]
        lines += [f"    FAILED {r.title}: {r.detail}" for r in mine if r.outcome == "FAILED"]
    return "\n".join(lines)
