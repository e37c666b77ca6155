"""k3lib-nano: a trained Kimi-K3 of ten million parameters that comes with the package, with its draft and its eyes.

    model = KimiK3ForCausalLM.from_pretrained(nano.folder())

It is a folder in the released layout, like any checkpoint; `README.md` in it is the model card.
"""

from __future__ import annotations

from pathlib import Path

from k3lib.errors import CheckpointError

__all__ = ["NAME", "find", "folder", "is_meant"]

NAME = "k3lib-nano"

_FILES = ("config.json", "model.safetensors", "dspark/config.json", "dspark/model.safetensors")
_LFS = b"version https://git-lfs"  # how a file begins that stands for one kept elsewhere


def folder() -> Path:
    """Folder of the checkpoint; its draft lies in `dspark/`.

    Raises:
        CheckpointError: this copy of k3lib was made without one of the files.
    """
    here = Path(__file__).parent
    for name in _FILES:
        file = here / name
        if not file.is_file():
            raise CheckpointError(
                f"{NAME}: {file} is missing: this copy of k3lib was made without its weights; install k3lib again, "
                "or name another model"
            )
        with file.open("rb") as stream:
            if stream.read(len(_LFS)) == _LFS:
                raise CheckpointError(f"{NAME}: {file} is a git-lfs pointer, not the weights; run `git lfs pull`")
    return here


def is_meant(path: str | None) -> bool:
    """Whether this model is: no path is given, or its name, and no folder is called so."""
    return path is None or (path == NAME and not Path(path).is_dir())


def find(path: str | None) -> str:
    """A folder or hub name as it is, or the folder of this model if it is meant.

    Raises:
        CheckpointError: as in `folder`.
    """
    return str(folder()) if path is None or is_meant(path) else path
