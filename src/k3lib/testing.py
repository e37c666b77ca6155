"""What the tests of k3lib and of kernels registered from outside share: comparison, tolerances, small inputs."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from k3lib.batch import Batch
from k3lib.config import KimiK3Config
from k3lib.ops import Impl, Spec, ops

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

__all__ = ["assert_close", "fill_nan", "random_batch", "skip_unless_able", "tiny_config", "tolerance"]

# Root-mean-square error relative to the root mean square of the reference.
_BY_DTYPE: dict[torch.dtype, float] = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 4e-3,  # a rounding alone is 1.7e-3
    torch.float8_e4m3fn: 4e-2,  # a rounding alone is 2.6e-2
}
_BY_OP: dict[tuple[str, torch.dtype], float] = {
    # chunk kernels round the normalised q and k, and their products with the decays, to bf16
    ("kda_chunk", torch.bfloat16): 1e-2,
    ("kda_mixer", torch.bfloat16): 1e-2,
    # rounded between the two products, and each expert before the sum
    ("experts", torch.bfloat16): 8e-3,
}


def tolerance(op_name: str, dtype: torch.dtype) -> float:
    """Return the `ratio` for `assert_close`: of this op in this dtype, else of the dtype."""
    return _BY_OP.get((op_name, dtype), _BY_DTYPE[dtype])


def assert_close(name: str, want: Tensor, got: Tensor, ratio: float) -> None:
    """Fail if the RMS error of `got` exceeds `ratio` times the RMS of `want`.

    A NaN never passes, not even where the reference has one. Infinities must stand in the same places. A reference of
    zeros admits only zeros.

    Args:
        name: what is compared, for the message.
        want: the reference.
        got: the result, of the same shape; any dtype and device.
        ratio: see `tolerance`.

    Raises:
        AssertionError: with the name, the ratio that was found and the worst index.
    """
    if want.shape != got.shape:
        raise AssertionError(f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    if not want.numel():
        return
    reference, result = (x.detach().cpu().double() for x in (want, got))
    for which, x in (("reference", reference), ("result", result)):
        if x.isnan().any():
            raise AssertionError(f"{name}: NaN in the {which}, first at {_index(x.isnan().double())}")
    infinite = reference.isinf() | result.isinf()
    if not reference[infinite].equal(result[infinite]):
        where = (infinite & (reference != result)).double()
        raise AssertionError(f"{name}: infinities differ, first at {_index(where)}")
    reference, result = (x.masked_fill(infinite, 0) for x in (reference, result))
    error = (result - reference).abs()
    rms_error, rms_reference = (float(x.square().mean().sqrt()) for x in (error, reference))
    if rms_error <= ratio * rms_reference:
        return
    found = rms_error / rms_reference if rms_reference else float("inf")
    worst = _index(error)
    raise AssertionError(
        f"{name}: error ratio {found:.3g}, allowed {ratio:.3g}; worst at {worst}: got {float(result[worst]):.9g}, "
        f"expected {float(reference[worst]):.9g}"
    )


def _index(x: Tensor) -> tuple[int, ...]:
    """Place of the largest value."""
    return tuple(int(i) for i in torch.unravel_index(x.argmax(), x.shape))


def skip_unless_able(impl: Impl, spec: Spec) -> None:
    """Skip the running test, with the reason that `explain` gives, if `impl` cannot serve `spec` on this machine."""
    import pytest  # noqa: PLC0415 - the only function that needs it

    reason = impl.why_not(spec, ops()[impl.op].local_target())
    if reason is not None:
        pytest.skip(f"{impl.op}/{impl.name} {reason}")


@contextlib.contextmanager
def fill_nan() -> Iterator[None]:
    """Fill the memory that `torch.empty` and its relatives give with NaN, so that reading it shows.

    Floating dtypes only. Not done through `torch.utils.deterministic`, which would change the algorithms under test.
    """

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(make)
        def call(*args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401 - any overload of torch.empty
            made = make(*args, **kwargs)
            if made.is_floating_point():
                with torch.no_grad():
                    made.fill_(torch.nan)
            return made

        return call

    with contextlib.ExitStack() as patches:
        for owner, names in (
            (torch, ("empty", "empty_like", "empty_strided")),
            (torch.Tensor, ("new_empty", "new_empty_strided")),
        ):
            for name in names:
                patches.enter_context(mock.patch.object(owner, name, poisoned(getattr(owner, name))))
        yield


def tiny_config(**changes: object) -> KimiK3Config:
    """The nine-layer miniature; `changes` override keys of its `config.json` (see `KimiK3Config.tiny`)."""
    return KimiK3Config.tiny(**changes)


def random_batch(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> Batch:
    """Whole prompts of random token ids, stateless, one of each length."""
    generator = torch.Generator().manual_seed(seed)
    return Batch.pack([torch.randint(vocab_size, (length,), generator=generator) for length in lengths])
