"""What a server needs to see: flags, the reader of images for a model, and the profile for little memory."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from k3lib.checkpoint import Folder
from k3lib.engine.config import EngineConfig
from k3lib.multimodal import KimiK3ForConditionalGeneration
from k3lib.server.image_input import ImageReader
from k3lib.server.images import DEFAULT, read_image_config

if TYPE_CHECKING:
    from k3lib.model import KimiK3ForCausalLM
    from k3lib.server.image_input import ImageLimits
    from k3lib.server.tokenizer import Tokenizer

__all__ = ["VisionFlags", "image_reader", "low_memory_profile"]

logger = logging.getLogger(__name__)

LOW_MEMORY_RUNNING = 4


@dataclass(frozen=True, kw_only=True)
class VisionFlags:
    """Whether the server sees, and for how much memory."""

    language_model_only: bool = False
    """Load no vision tower and refuse images."""
    low_memory: bool = False
    """Fit into little memory: keep no features of images, halve the context, run few requests at a time. What other
    flags say stays; the log says what changed."""


def low_memory_profile(config: EngineConfig, positions: int) -> tuple[EngineConfig, list[str]]:
    """The configuration for little memory, and what it changes or leaves, a line for each.

    Args:
        config: as the flags say.
        positions: the model's longest context.
    """
    half = max(1, positions // 2)
    small = dataclasses.replace(
        config, image_cache_bytes=0, context_length=half, max_running_requests=LOW_MEMORY_RUNNING
    )
    whys = {
        "image_cache_bytes": "features of images leave as soon as their prompt is computed",
        "context_length": f"half of the model's {positions} positions",
        "max_running_requests": "requests at a time",
    }
    kept: dict[str, Any] = {}
    notes = []
    for name, why in whys.items():
        given = getattr(config, name)
        if given == getattr(EngineConfig(), name):
            notes.append(f"{name} = {getattr(small, name)}: {why}")
        else:
            kept[name] = given
            notes.append(f"{name} stays {given}, as given")
    return dataclasses.replace(small, **kept), notes


def image_reader(
    model: KimiK3ForCausalLM | KimiK3ForConditionalGeneration,
    tok: Tokenizer,
    limits: ImageLimits,
    *,
    model_path: str | None = None,
    revision: str | None = None,
) -> ImageReader | None:
    """The reader of images for a model; None if the model sees nothing.

    Args:
        model: has a vision tower or not.
        tok: says where images stand in a prompt.
        limits: which images requests may carry.
        model_path: folder or hub name with `preprocessor_config.json`; without one the values of K3 hold.
        revision: of a hub name.

    Raises:
        ConfigError: a preprocessor that does not fit the tower, or no Pillow.
    """
    if not isinstance(model, KimiK3ForConditionalGeneration):
        return None
    pad, expected = tok.special["<|media_pad|>"], model.config.media_placeholder_token_id
    if pad != expected:
        logger.warning(
            "<|media_pad|> is %d in the tokenizer, media_placeholder_token_id=%d in config.json: the tokenizer counts",
            pad,
            expected,
        )
    config = DEFAULT
    if model_path is not None:
        file = Folder(model_path, revision=revision).file("preprocessor_config.json")
        config = read_image_config(file, model.config.vision)
    return ImageReader(config, limits, dtype=model.dtype)
