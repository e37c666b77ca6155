"""What chip and which packages are here, without importing any of them."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

__all__ = ["ASCEND", "BLACKWELL", "HOPPER", "MI35X", "PLATFORMS", "Package", "Target", "default_family"]

Platform = Literal["cuda", "rocm", "npu", "cpu"]
PLATFORMS: tuple[Platform, ...] = ("cuda", "rocm", "npu", "cpu")

BLACKWELL = frozenset({"sm100", "sm103"})
HOPPER = frozenset({"sm90"})
MI35X = frozenset({"gfx950"})
ASCEND = frozenset({"a3", "950"})

ARCHS: dict[str, Platform] = {
    **dict.fromkeys(BLACKWELL | HOPPER, "cuda"),
    **dict.fromkeys(MI35X, "rocm"),
    **dict.fromkeys(ASCEND, "npu"),
    "cpu": "cpu",
}


@dataclass(frozen=True, slots=True)
class Package:
    """An optional package that an implementation needs.

    Attributes:
        module: the name that is imported.
        dists: accepted distributions; () accepts the one of the same name. Several PyPI names are placeholders.
        at_least: lowest version, or None.
        marker: a file (glob) that must exist in the package folder.
    """

    module: str
    dists: tuple[str, ...] = ()
    at_least: str | None = None
    marker: str | None = None

    def missing_from(self, target: Target) -> str | None:
        """Return None if `target` has the package, else the reason in one sentence."""
        version = dict(target.packages).get(self.module)
        install = self.dists[0] if self.dists else self.module
        if version is None:
            return f"needs the package {self.module} (install {install}), which is not here"
        if self.at_least is not None and _release(version) < _release(self.at_least):
            return f"needs {self.module} >= {self.at_least}, got {version}"
        return None


def _release(version: str) -> tuple[int, ...]:
    numbers = re.match(r"(?:\d+\.)*\d+", version)
    parts = [int(part) for part in numbers[0].split(".")] if numbers else []
    return tuple([*parts, 0, 0, 0][:3])


@functools.cache
def _find(package: Package) -> str | None:
    """Version of an installed package, found without importing it; None if absent or a placeholder."""
    try:
        spec = importlib.util.find_spec(package.module)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    version = None
    for dist in package.dists or (package.module,):
        try:
            version = importlib.metadata.version(dist)
        except importlib.metadata.PackageNotFoundError:
            continue
        break
    if version is None:
        return None
    if package.marker is not None:
        folders = list(spec.submodule_search_locations or [])
        if not any(any(Path(folder).glob(package.marker)) for folder in folders):
            return None
    return version


@dataclass(frozen=True, slots=True)
class Target:
    """A chip and the packages beside it. Hashable; made by hand, it describes a machine that is not here.

    Attributes:
        platform: "cuda", "rocm", "npu" or "cpu".
        arch: for example "sm90", "sm100", "gfx950", "a3"; "cpu" on a CPU.
        packages: pairs of module name and version.
    """

    platform: Platform
    arch: str
    packages: frozenset[tuple[str, str]] = frozenset()

    def __str__(self) -> str:
        return self.platform if self.platform == self.arch else f"{self.platform}/{self.arch}"

    @classmethod
    def of(cls, platform: Platform, arch: str | None = None, /, **packages: str) -> Target:
        """Make a target by hand: `Target.of("cuda", "sm90", flash_mla="1.0")`."""
        return cls(platform, arch or platform, frozenset(packages.items()))

    @classmethod
    def cpu(cls) -> Target:
        """The CPU of this machine."""
        return _CPU

    @classmethod
    def detect(cls) -> Target:
        """The accelerator of this machine, or its CPU. Cached for the process."""
        return _detect()

    def with_packages(self, packages: tuple[Package, ...]) -> Target:
        """Add those of `packages` that are installed here."""
        found = {(p.module, version) for p in packages if (version := _find(p)) is not None}
        return Target(self.platform, self.arch, self.packages | found)


_CPU = Target("cpu", "cpu")


@functools.cache
def _detect() -> Target:
    if torch.cuda.is_available():
        if torch.version.hip:
            arch = torch.cuda.get_device_properties(0).gcnArchName.split(":")[0]
            return Target("rocm", arch)
        major, minor = torch.cuda.get_device_capability()
        return Target("cuda", f"sm{major}{minor}")
    npu = getattr(torch, "npu", None)  # present once torch_npu has been loaded by torch's backend discovery
    if npu is not None and npu.is_available():
        return Target("npu", "950" if "950" in npu.get_device_name(0) else "a3")
    return _CPU


def default_family() -> str | None:
    """The backend family of the environment variable `K3LIB_BACKEND`, for debugging."""
    return os.environ.get("K3LIB_BACKEND") or None
