"""Host view of packed requests: lengths and slots, checked once per op before anything is written."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from k3lib.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from k3lib.batch import StateSaves, VerifyScratch

__all__ = [
    "check_saves", "check_verify", "compute_dtype", "host_lengths", "host_slots", "saves_kind", "tokens_per_request",
]  # fmt: skip

TokensPerRequest = Literal["1", "<=8", "many"]
SavesKind = Literal["none", "chunk", "any"]
VerifyKind = Literal["none", "states", "replay"]

CHUNK_GRID = 64  # interior states at multiples of this are what chunk kernels can give


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype a reference computes in: float32, or float64 for float64 inputs."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def host_lengths(cu_seqlens: Tensor, num_tokens: int) -> list[int]:
    """Return the number of tokens of each request.

    Raises:
        ConfigError (a ValueError): offsets do not start at 0, decrease, or do not end at `num_tokens`.
    """
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 1 or cu_seqlens.is_floating_point():
        raise ConfigError(
            f"cu_seqlens must be a 1-D integer tensor of B + 1 offsets, got shape {tuple(cu_seqlens.shape)} of "
            f"{cu_seqlens.dtype}"
        )
    offsets: list[int] = cu_seqlens.tolist()
    lengths = [b - a for a, b in pairwise(offsets)]
    if offsets[0] != 0 or offsets[-1] != num_tokens or any(n < 0 for n in lengths):
        shown = offsets if len(offsets) <= 8 else [*offsets[:4], "…", *offsets[-3:]]
        raise ConfigError(
            f"cu_seqlens must rise from 0 to the number of tokens ({num_tokens}) without decreasing, got {shown}"
        )
    return lengths


def host_slots(slots: Tensor | None, state: Tensor | None, num_requests: int) -> list[int] | None:
    """Return the slot of each request, or None for a stateless call.

    Raises:
        ConfigError: state without slots, another count than requests, past the end, or one slot for two requests.
    """
    if (slots is None) != (state is None):
        raise ConfigError("state and slots must be given together, or both left out")
    if slots is None or state is None:
        return None
    values: list[int] = slots.tolist()
    if len(values) != num_requests:
        raise ConfigError(f"{len(values)} slots for {num_requests} requests")
    if values and max(values) >= state.shape[0]:
        raise ConfigError(f"slot {max(values)} is past the end of a pool with rows 0..{state.shape[0] - 1}")
    live = [s for s in values if s > 0]
    if len(set(live)) != len(live):
        raise ConfigError(f"a slot is given to two requests: {sorted(live)}")
    return values


def check_saves(
    saves: StateSaves | None, lengths: list[int], slots: list[int] | None, state: Tensor | None
) -> list[tuple[int, int, int]]:
    """Return `(request, offset, slot)` of each interior state that is wanted; slots <= 0 are dropped.

    Raises:
        ConfigError: a request, offset or slot out of range, a slot that is saved to twice or belongs to a request of
            this call, or saves in a stateless call.
    """
    if saves is None:
        return []
    if state is None or slots is None:
        raise ConfigError("saves need a state pool: state and slots are None")
    wanted = []
    taken = {slot for slot in slots if slot > 0}
    for request, offset, slot in zip(saves.requests, saves.offsets, saves.slots.tolist(), strict=True):
        if not 0 <= request < len(lengths):
            raise ConfigError(f"saves: request {request} is not among {len(lengths)} requests")
        if not 1 <= offset <= lengths[request]:
            raise ConfigError(
                f"saves: offset {offset} of request {request} must lie in 1..{lengths[request]}, its new tokens"
            )
        if slot >= state.shape[0]:
            raise ConfigError(f"saves: slot {slot} is past the end of a pool with rows 0..{state.shape[0] - 1}")
        if slot in taken:
            raise ConfigError(f"saves: slot {slot} is saved to twice, or belongs to a request of this call")
        if slot > 0:
            taken.add(slot)
            wanted.append((request, offset, slot))
    return wanted


def tokens_per_request(num_tokens: int, cu_seqlens: Tensor) -> TokensPerRequest:
    """Class of a batch by its shape alone: "1", "<=8" (a verify step) or "many" tokens a request on average."""
    requests = max(cu_seqlens.numel() - 1, 1)
    if num_tokens <= requests:
        return "1"
    return "<=8" if num_tokens <= 8 * requests else "many"


def saves_kind(saves: StateSaves | None) -> SavesKind:
    """Whether interior states are wanted: nowhere, only at multiples of 64 new tokens, or anywhere."""
    if saves is None or not saves.offsets:
        return "none"
    return "chunk" if all(offset % CHUNK_GRID == 0 for offset in saves.offsets) else "any"


def check_verify(
    op: str, verify: VerifyScratch, lengths: list[int], slots: list[int] | None, saves: StateSaves | None
) -> None:
    """Refuse a verify step that its scratch cannot hold, or that keeps states as well.

    Raises:
        ConfigError: names the counts on both sides.
    """
    if slots is None:
        raise ConfigError(f"{op}: a verify step needs state and slots")
    if saves is not None and saves.offsets:
        raise ConfigError(f"{op}: a verify step keeps no states of its own, got saves at {list(saves.offsets)}")
    rows, width = verify.inputs.shape[:2]
    if len(lengths) > rows or max(lengths, default=0) > width:
        raise ConfigError(
            f"{op}: the verify scratch has {rows} rows of {width} tokens, the step {len(lengths)} requests of up to "
            f"{max(lengths, default=0)}"
        )
    if verify.states is None and any(x is None for x in (verify.k, verify.v, verify.log_decay, verify.beta)):
        raise ConfigError(f"{op}: the verify scratch has neither states nor all of k, v, log_decay and beta")


class _HasVerify(Protocol):
    @property
    def verify(self) -> VerifyKind: ...


def verify_kind(verify: VerifyScratch | None) -> VerifyKind:
    """Whether a call verifies draft tokens, and what its scratch keeps."""
    return "none" if verify is None else verify.kind


def no_verify(spec: _HasVerify) -> str | None:
    """`supports` of an implementation that cannot verify draft tokens."""
    return None if spec.verify == "none" else f"needs verify=none, got verify={spec.verify}"
