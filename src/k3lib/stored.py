"""Tensors as they are stored: headers of safetensors files, weights folders, and readers of parts of tensors."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch

from k3lib import nano
from k3lib.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from os import PathLike

    from torch import Tensor

__all__ = [
    "GIVEN",
    "INDEX",
    "PLAIN",
    "SINGLE",
    "STORED_DTYPES",
    "TORCH_DTYPES",
    "Folder",
    "Form",
    "GivenTensors",
    "OpenFiles",
    "Reader",
    "TensorInfo",
    "fingerprint",
    "read_header",
]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
GIVEN = Path("the tensors given")  # in place of a file name: tensors that are in memory

Form = Literal["plain", "mxfp4", "nvfp4", "fp8"]

TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip
STORED_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
PLAIN = frozenset({"F64", "F32", "F16", "BF16"})


class TensorInfo(NamedTuple):
    """One stored tensor as its file's header describes it; `offset` is where its bytes begin in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    nbytes: int
    offset: int = 0


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Read the header of a safetensors file, and nothing else of it.

    Raises:
        CheckpointError: the file is missing, not safetensors, or shorter than its header promises.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > size - 8:
                raise CheckpointError(f"{file}: not a safetensors file, or cut inside its header ({size} bytes)")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    except (ValueError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: its header is damaged ({error})") from error
    infos = {}
    end = 0
    try:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            first, last = entry["data_offsets"]
            place = 8 + length + first
            infos[name] = TensorInfo(name, entry["dtype"], tuple(entry["shape"]), file, last - first, place)
            end = max(end, last)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: its header is damaged (it does not describe tensors)") from error
    if size < 8 + length + end:
        raise CheckpointError(f"{file}: cut off: {size} bytes, its header promises {8 + length + end}")
    return infos


class Folder:
    """A weights folder on disk, the model of the package by its name, or a name on the Hugging Face hub.

    Files of the hub come when they are asked for.
    """

    def __init__(self, path: str | PathLike[str], *, revision: str | None = None) -> None:
        self.path = nano.folder() if nano.is_meant(str(path)) else Path(path)
        self.revision = revision
        self.is_local = self.path.is_dir()
        if not self.is_local and (self.path.exists() or len(self.path.parts) != 2 or self.path.is_absolute()):
            raise CheckpointError(f"{path}: neither a folder nor a name on the hub ('owner/name')")

    def file(self, name: str) -> Path:
        """Path of a file of the folder, fetched if it is on the hub."""
        if self.is_local:
            return self.path / name
        from huggingface_hub import hf_hub_download  # noqa: PLC0415 - only hub names need it
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError  # noqa: PLC0415

        try:
            return Path(hf_hub_download(self.path.as_posix(), name, revision=self.revision))
        except EntryNotFoundError:
            return self.path / name  # does not exist; reported by whoever needs it
        except (HfHubHTTPError, OSError) as error:
            raise CheckpointError(f"{self.path.as_posix()}: {name} cannot be fetched from the hub ({error})") from error

    def json(self, name: str) -> dict[str, Any]:
        """Parse a JSON file of the folder.

        Raises:
            CheckpointError: it is missing or not a JSON object.
        """
        file = self.file(name)
        try:
            value = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"{self.path}: there is no {name}") from error
        except ValueError as error:
            raise CheckpointError(f"{file}: not valid JSON ({error})") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{file}: expected a JSON object")
        return value

    def config(self) -> dict[str, Any]:
        """The parsed `config.json`."""
        return self.json("config.json")

    def tensors(self) -> dict[str, TensorInfo]:
        """All stored tensors by name, from the index and the headers of its files, or from the single file.

        Raises:
            CheckpointError: no weights, a file missing or damaged, or an index that names what its file lacks.
        """
        index_file = self.file(INDEX)
        if not index_file.exists():
            single = self.file(SINGLE)
            if not single.exists():
                raise CheckpointError(f"{self.path}: there is neither {INDEX} nor {SINGLE}")
            return read_header(single)
        weight_map = self.json(INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{index_file}: there is no weight_map from tensor names to file names")
        headers = {name: read_header(self.file(name)) for name in sorted(set(weight_map.values()))}
        absent = [f"{name} (in {file})" for name, file in weight_map.items() if name not in headers[file]]
        if absent:
            raise CheckpointError.listing(f"{index_file}: names {len(absent)} tensors that their files lack:", absent)
        return {name: headers[file][name] for name, file in weight_map.items()}


_SAMPLES, _SAMPLE_BYTES = 64, 256


def fingerprint(config: Mapping[str, Any], stored: Mapping[str, TensorInfo]) -> str:
    """A digest that tells checkpoints apart without reading them.

    Of the configuration, of names, dtypes and shapes of all tensors, and of the first bytes of 64 of them, spread over
    the names: other weights of the same shapes differ somewhere in these, one changed tensor may not.

    Args:
        config: the parsed `config.json`.
        stored: the tensors of the files, see `Folder.tensors`.

    Raises:
        CheckpointError: a file cannot be read.
    """
    names = sorted(stored)
    kinds = [(name, stored[name].dtype, stored[name].shape) for name in names]
    digest = hashlib.sha256(json.dumps([dict(config), kinds], sort_keys=True).encode())
    for name in names[:: max(1, len(names) // _SAMPLES)]:
        info = stored[name]
        try:
            with info.file.open("rb") as stream:
                stream.seek(info.offset)
                digest.update(stream.read(min(info.nbytes, _SAMPLE_BYTES)))
        except OSError as error:
            raise CheckpointError(f"{info.file}: cannot be read ({error.strerror})") from error
    return digest.hexdigest()


# ---- readers ------------------------------------------------------------------------------------


class Reader(Protocol):
    """Gives the values of stored tensors."""

    def read(self, info: TensorInfo) -> Tensor:
        """One whole tensor; copy it before the next read."""
        ...

    def copy_into(self, target: Tensor, info: TensorInfo, dim: int, begin: int, end: int | None) -> None:
        """Copy `[begin, end)` along `dim` (all if `end` is None) into `target`."""
        ...


class GivenTensors:
    """A reader of tensors that are in memory, by their stored names."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = {name: tensor.detach() for name, tensor in tensors.items()}

    @classmethod
    def of(cls, source: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> GivenTensors:
        """Take a mapping, or all of an iterable of pairs.

        Raises:
            ConfigError: something else, or a name given twice.
        """
        if not isinstance(source, Iterable):
            raise ConfigError(
                f"expected a folder, a mapping from stored names to tensors, or pairs of them, got {source!r}"
            )
        pairs = list(source.items() if isinstance(source, Mapping) else source)
        tensors: dict[str, Tensor] = {}
        for pair in pairs:
            name, tensor = pair if isinstance(pair, tuple) and len(pair) == 2 else (pair, None)
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor) or tensor.is_meta:
                raise ConfigError(
                    f"expected pairs of a stored name and a tensor with values, got {name!r}, {type(tensor)}"
                )
            if name in tensors:
                raise ConfigError(f"{name} is given twice")
            tensors[name] = tensor
        return cls(tensors)

    def infos(self) -> dict[str, TensorInfo]:
        """What a header would say about them."""
        return {
            name: TensorInfo(name, STORED_DTYPES.get(x.dtype, str(x.dtype)), tuple(x.shape), GIVEN, x.nbytes)
            for name, x in self.tensors.items()
        }

    def read(self, info: TensorInfo) -> Tensor:
        """One whole tensor."""
        return self.tensors[info.name]

    def copy_into(self, target: Tensor, info: TensorInfo, dim: int, begin: int, end: int | None) -> None:
        """Copy `[begin, end)` along `dim` (all if `end` is None) into `target`."""
        value = self.tensors[info.name]
        target.copy_(value if end is None else value.narrow(dim, begin, end - begin))


def _size_and_time(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_size, stat.st_mtime_ns


def _close_all(streams: dict[Path, io.FileIO]) -> None:
    for stream in streams.values():
        stream.close()


class OpenFiles:
    """A reader for a long time: files are opened when first needed, must not change, and are closed with this object.

    Nothing is mapped: what is read is in the memory of the target only, and a file that was cut off is an error, not
    a signal. Size and time of the last change are noted when this object is made and compared at every read.
    """

    PIECE = 32 << 20

    def __init__(self, files: Iterable[Path]) -> None:
        self.bytes_read = 0
        self._facts = {file: _size_and_time(file.stat()) for file in set(files)}
        self._streams: dict[Path, io.FileIO] = {}
        weakref.finalize(self, _close_all, self._streams)

    @property
    def files(self) -> tuple[Path, ...]:
        """What it reads from."""
        return tuple(self._facts)

    def __deepcopy__(self, memo: dict[int, Any]) -> OpenFiles:
        return self  # a copied model reads the same files

    def read(self, info: TensorInfo) -> Tensor:
        """One whole tensor."""
        target = torch.empty(info.shape, dtype=TORCH_DTYPES[info.dtype])
        self._fill(target, info, info.offset)
        return target

    def copy_into(self, target: Tensor, info: TensorInfo, dim: int, begin: int, end: int | None) -> None:
        """Copy `[begin, end)` along `dim` (all if `end` is None) into `target`, in pieces of bounded size.

        Columns are taken out of whole rows: one rank's part of a row is smaller than what a disk reads at once.
        """
        if not info.shape:
            target.copy_(self.read(info))
            return
        full = info.shape[dim]
        begin, end = (0, full) if end is None else (begin, end)
        dtype = TORCH_DTYPES[info.dtype]
        row_shape = info.shape[1:]
        row_bytes = math.prod(row_shape) * dtype.itemsize
        start = info.offset + (begin * row_bytes if dim == 0 else 0)
        columns = None if dim == 0 or (begin, end) == (0, full) else (begin, end - begin)
        direct = columns is None and target.dtype == dtype and target.is_contiguous() and target.device.type == "cpu"
        step = max(1, self.PIECE // max(1, row_bytes))
        for first in range(0, target.shape[0], step):
            part = target[first : first + step]
            piece = part if direct else torch.empty(part.shape[0], *row_shape, dtype=dtype)
            self._fill(piece, info, start + first * row_bytes)
            if not direct:
                part.copy_(piece if columns is None else piece.narrow(dim, *columns))

    def _stream(self, info: TensorInfo) -> io.FileIO:
        stream = self._streams.get(info.file)
        if stream is None:
            stream = self._streams[info.file] = io.FileIO(info.file)
        if _size_and_time(os.fstat(stream.fileno())) != self._facts[info.file]:
            self._streams.pop(info.file).close()
            raise CheckpointError(f"{info.name}: {info.file} has changed since the model was loaded; load it again")
        return stream

    def _fill(self, target: Tensor, info: TensorInfo, offset: int) -> None:
        """Fill a contiguous CPU tensor with the bytes from `offset` on."""
        view = target.reshape(-1).view(torch.uint8).numpy().data
        try:
            stream = self._stream(info)
            stream.seek(offset)
            filled = 0
            while filled < len(view):
                count = stream.readinto(view[filled:])
                if not count:
                    raise CheckpointError(
                        f"{info.name}: {info.file} ends in it; it was cut off after the model was loaded"
                    )
                filled += count
        except OSError as error:
            raise CheckpointError(f"{info.name}: {info.file} cannot be read ({error.strerror})") from error
        self.bytes_read += filled
