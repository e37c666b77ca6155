"""From what a command line names to a model and a tokenizer."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal

import torch

from k3lib import nano
from k3lib.checkpoint import VISION_ROOTS, Folder
from k3lib.config import KimiK3Config
from k3lib.errors import ConfigError
from k3lib.model import KimiK3ForCausalLM
from k3lib.multimodal import KimiK3ForConditionalGeneration
from k3lib.ops.target import Target
from k3lib.server.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from k3lib.parallel import Mesh

__all__ = ["default_device", "load_model", "tokenizer_for"]

logger = logging.getLogger(__name__)

DType = Literal["auto", "float32", "bfloat16"]


def default_device(path: str | None, asked: str | None) -> str:
    """Where a model goes: where it was asked to, else to the accelerator; the built-in one stays on the CPU."""
    if asked is not None:
        return asked
    platform = "cpu" if nano.is_meant(path) else Target.detect().platform
    return "cuda" if platform == "rocm" else platform


def _sees(path: str, revision: str | None) -> bool:
    """Whether a checkpoint has a vision tower."""
    folder = Folder(path, revision=revision)
    if KimiK3Config.from_hf(folder.config()).vision is None:
        return False
    if any(name.startswith(VISION_ROOTS) for name in folder.tensors()):
        return True
    logger.warning("%s has a vision_config but no vision tensors: it runs as a text model", path)
    return False


def load_model(
    path: str | None,
    *,
    dtype: DType = "auto",
    device: str | None = None,
    layers: int | None = None,
    revision: str | None = None,
    resident_experts: int | None = None,
    vision: bool = False,
    mesh: Mesh | None = None,
) -> KimiK3ForCausalLM | KimiK3ForConditionalGeneration:
    """Load a checkpoint.

    Args:
        path: folder or hub name; None or its name is the built-in `k3lib.nano`.
        dtype: auto keeps what is stored; the built-in model on a CPU has float32.
        device: None is the accelerator if there is one; the built-in model stays on the CPU.
        layers: run only the first so many.
        revision: of a hub name.
        resident_experts: see `KimiK3ForCausalLM.from_pretrained`.
        vision: with its vision tower, if it has one.
        mesh: ranks that share the model.

    Raises:
        ConfigError: a revision of the built-in model.
    """
    where = default_device(path, device)
    wanted: torch.dtype | None = None if dtype == "auto" else getattr(torch, dtype)
    options: dict[str, Any] = {} if resident_experts is None else {"resident_experts": resident_experts}
    if nano.is_meant(path):
        if revision is not None:
            raise ConfigError("--revision needs --model-path")
        options["progress"] = False  # it is there at once
        if dtype == "auto" and where == "cpu":
            wanted = torch.float32
    path = nano.find(path)
    some = None if layers is None else range(layers)
    if mesh is not None and mesh.world.size > 1:
        options["mesh"] = mesh
    kind = KimiK3ForConditionalGeneration if vision and _sees(path, revision) else KimiK3ForCausalLM
    return kind.from_pretrained(path, dtype=wanted, device=where, layers=some, revision=revision, **options)


def tokenizer_for(
    model_path: str | None,
    asked: str | None,
    model: KimiK3ForCausalLM | KimiK3ForConditionalGeneration,
    *,
    revision: str | None = None,
) -> Tokenizer:
    """Find the tokenizer of a model: the one that was asked for, the one beside the weights, or the one of bytes.

    Raises:
        ConfigError: there is none.
    """
    if asked is not None:
        return load_tokenizer(asked)
    model_path = nano.find(model_path)
    ranks = Folder(model_path, revision=revision).file("tiktoken.model")
    if ranks.exists():
        return load_tokenizer(ranks.parent)
    bytes_tokenizer = load_tokenizer()
    if model.config.text.vocab_size == bytes_tokenizer.vocab_size:
        return bytes_tokenizer
    raise ConfigError(
        f"{model_path} has no tiktoken.model and a vocabulary of {model.config.text.vocab_size}; give --tokenizer-path"
    )
