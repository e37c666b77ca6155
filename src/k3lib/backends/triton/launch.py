"""Launch options that depend on the chip.

From Hopper on a kernel may be launched before the one in front of it has ended (programmatic dependent launch): it
waits by itself (`gdc_wait`) before it touches memory, and lets its successor in at once (`gdc_launch_dependents`), so
that the launch costs of a chain of small kernels overlap. Everything that a kernel reads or writes comes after its
wait, parameters too: nobody knows what the kernel in front writes.
"""

from __future__ import annotations

import functools

import torch

__all__ = ["launch_options"]


@functools.cache
def launch_options(device: torch.device, warps: int, registers: int | None = None) -> dict[str, int | bool]:
    """Keywords of a launch: warps a program, registers a thread at most, and `EARLY` for the kernel itself."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    early = nvidia and torch.cuda.get_device_capability(device) >= (9, 0)
    options: dict[str, int | bool] = {"num_warps": warps, "EARLY": early}
    if early:
        options["launch_pdl"] = True
    if nvidia and registers is not None:
        options["maxnreg"] = registers
    return options
