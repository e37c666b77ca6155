"""From an image to the patches that the vision tower takes: size, pixels, name in the prefix cache.

Shapes: n patches of an image, p pixels a side of a patch; a grid is (time, rows, columns) in patches.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from k3lib.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray
    from PIL.Image import Image

    from k3lib.config import VisionConfig

__all__ = [
    "DEFAULT",
    "ImageConfig",
    "ImagePlan",
    "image_prompt",
    "media_digest",
    "plan_image",
    "preprocess_image",
    "read_image_config",
]

_ALPHA_MODES = ("RGBA", "LA", "PA", "RGBa", "La")  # not by band: in LAB the A is a colour
_DIGEST_VERSION = b"k3lib image 1\0"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


# ---- size ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """`media_proc_cfg` of `preprocessor_config.json`: how an image becomes patches.

    Attributes:
        patch_size: pixels a side of a patch.
        merge_kernel_size: patches a side of a token.
        in_patch_limit: about the most patches of an image.
        patch_limit_on_one_side: the most patches in a row or column.
        image_mean, image_std: of the three channels, which lie between 0 and 1.
        chessboard_square_size: pixels a side of the squares behind transparent images.
        chessboard_square_on_top_left: the top left square is a white one.
        chessboard_white_value, chessboard_gray_value: their colours.
    """

    patch_size: int = 14
    merge_kernel_size: int = 2
    in_patch_limit: int = 65536
    patch_limit_on_one_side: int = 512
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    chessboard_square_size: int = 8
    chessboard_square_on_top_left: bool = True
    chessboard_white_value: int = 255
    chessboard_gray_value: int = 180

    def __post_init__(self) -> None:
        counts = (
            "patch_size", "merge_kernel_size", "in_patch_limit", "patch_limit_on_one_side", "chessboard_square_size",
        )  # fmt: skip
        for name in counts:
            if not _is_count(getattr(self, name)):
                raise ConfigError(f"ImageConfig: {name} must be an integer >= 1, got {getattr(self, name)!r}")
        for name in ("chessboard_white_value", "chessboard_gray_value"):
            if getattr(self, name) not in range(256):
                raise ConfigError(f"ImageConfig: {name} must be in 0..255, got {getattr(self, name)!r}")
        if len(self.image_mean) != 3 or len(self.image_std) != 3 or not all(std > 0 for std in self.image_std):
            raise ConfigError(
                f"ImageConfig: image_mean={self.image_mean} and image_std={self.image_std} must have three values, "
                "the latter above 0"
            )

    @classmethod
    def from_dict(cls, raw: Mapping[str, object]) -> ImageConfig:
        """Read the published spelling, whole or from `media_proc_cfg` on. What is absent is as in K3.

        Raises:
            ConfigError: it asks for something that is not implemented.
        """
        inner = raw.get("media_proc_cfg", raw)
        background = inner.get("transparent_bg_config") or {} if isinstance(inner, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(background, Mapping):
            raise ConfigError("media_proc_cfg and its transparent_bg_config must be objects")
        for key, value, known in (
            ("fixed_output_tokens", inner.get("fixed_output_tokens"), None),
            ("transparent_bg_fill_stage", inner.get("transparent_bg_fill_stage", "after_resize"), "after_resize"),
            ("transparent_bg_config.pattern", background.get("pattern", "chessboard"), "chessboard"),
        ):
            if value != known:
                raise ConfigError(f"media_proc_cfg: {key}={value!r} is not implemented; expected {known!r}")
        names = {field.name for field in dataclasses.fields(cls)}
        values = {key: value for key, value in {**inner, **background}.items() if key in names}
        for key, value in values.items():
            if isinstance(value, list | tuple):
                same = key == "merge_kernel_size" and len(set(value)) == 1
                values[key] = value[0] if same else tuple(value)
        return cls(**values)


DEFAULT = ImageConfig()


def read_image_config(path: Path, vision: VisionConfig | None = None) -> ImageConfig:
    """Read `preprocessor_config.json`; without that file, the values of K3.

    Args:
        path: of the file.
        vision: the tower that gets the patches.

    Raises:
        ConfigError: the file does not fit the tower, or asks for something that is not implemented.
    """
    config = DEFAULT
    if path.exists():
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON: {error}") from error
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{path} must hold an object, got {type(raw).__name__}")
        config = ImageConfig.from_dict(raw)
    if vision is not None:
        ours = (config.patch_size, (config.merge_kernel_size, config.merge_kernel_size))
        theirs = (vision.patch_size, vision.merge_kernel_size)
        if ours != theirs:
            raise ConfigError(f"{path}: patch and merge sizes {ours} differ from the vision tower's {theirs}")
    return config


class ImagePlan(NamedTuple):
    """What becomes of an image: its new size, the black border right and below, its grid, its tokens."""

    new_height: int
    new_width: int
    pad_height: int
    pad_width: int
    grid_thw: tuple[int, int, int]
    num_tokens: int

    @property
    def num_patches(self) -> int:
        """Patches of the grid."""
        return math.prod(self.grid_thw)


def plan_image(height: int, width: int, config: ImageConfig | Mapping[str, object] = DEFAULT) -> ImagePlan:
    """Decide the size of an image. It is never enlarged; a border fills the last row and column of tokens.

    Raises:
        RequestError: a size that no image has.
    """
    config = _config(config)
    if not (_is_count(height) and _is_count(width)):
        raise RequestError(f"an image has at least 1 x 1 pixels, got width={width!r} and height={height!r}")
    patch, most = config.patch_size, config.patch_limit_on_one_side * config.patch_size
    patches = max(1, width // patch) * max(1, height // patch)
    scale = min(1, math.sqrt(config.in_patch_limit / patches), most / width, most / height)
    new_height, new_width = (min(max(1, int(side * scale)), most) for side in (height, width))
    step = config.merge_kernel_size * patch
    pad_height, pad_width = -new_height % step, -new_width % step
    rows, columns = (new_height + pad_height) // patch, (new_width + pad_width) // patch
    tokens = rows * columns // config.merge_kernel_size**2
    return ImagePlan(new_height, new_width, pad_height, pad_width, (1, rows, columns), tokens)


def image_prompt(width: int, height: int) -> str:
    """The block of an image in the prompt; its size is that of the upload, before resizing."""
    return f"<|media_begin|>image {width}x{height}<|media_content|><|media_pad|><|media_end|>"


def media_digest(data: bytes, plan: ImagePlan, config: ImageConfig = DEFAULT) -> bytes:
    """What tells an image apart in the prefix cache: equal files under equal options have equal digests.

    Args:
        data: the encoded image.
        plan: of the image.
        config: the options.
    """
    options = json.dumps([dataclasses.asdict(config), plan.grid_thw], sort_keys=True).encode()
    return hashlib.sha256(_DIGEST_VERSION + options + b"\0" + data).digest()


def _config(config: ImageConfig | Mapping[str, object]) -> ImageConfig:
    return config if isinstance(config, ImageConfig) else ImageConfig.from_dict(config)


# ---- pixels -------------------------------------------------------------------------------------


def preprocess_image(
    pil_image: Image, config: ImageConfig | Mapping[str, object] = DEFAULT
) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """Resize an image, put it before the chessboard where it is transparent, and cut it into patches.

    Orientation marks (EXIF) and colour profiles are not applied; of an animation the current frame is taken.

    Returns:
        Patches `[n, 3, p, p]` in float32, row by row, and the grid.
    """
    from PIL.Image import Resampling  # noqa: PLC0415 - servers of text need no Pillow

    config = _config(config)
    plan = plan_image(pil_image.height, pil_image.width, config)
    image = _resizable(pil_image).resize((plan.new_width, plan.new_height), Resampling.BICUBIC)
    rgb = _before_chessboard(np.asarray(image), config) if image.mode == "RGBA" else np.asarray(image.convert("RGB"))
    padded = np.zeros((plan.new_height + plan.pad_height, plan.new_width + plan.pad_width, 3), np.uint8)
    padded[: plan.new_height, : plan.new_width] = rgb
    return torch.from_numpy(_patches(padded, config)), plan.grid_thw


def _resizable(image: Image) -> Image:
    """The image in a mode whose resize mixes colours: RGBA if it may be transparent, never by palette or in one bit."""
    if image.mode.startswith("I"):
        return _eight_bit(image)
    if image.mode == "La":  # Pillow converts it to nothing else
        image = image.convert("LA")
    if image.mode in _ALPHA_MODES or "transparency" in image.info:
        return image if image.mode == "RGBA" else image.convert("RGBA")
    gray_or_colour = {"1": "L", "P": "RGB"}.get(image.mode)
    return image if gray_or_colour is None else image.convert(gray_or_colour)


def _eight_bit(image: Image) -> Image:
    """The high bytes of a gray image of 16 bits; Pillow's own conversion makes nearly all of them white."""
    from PIL.Image import fromarray  # noqa: PLC0415 - see above

    deep = np.asarray(image)
    gray = (deep.clip(0, 0xFFFF) >> 8).astype(np.uint8)
    clear = image.info.get("transparency")
    if not isinstance(clear, int):
        return fromarray(gray)
    alpha = np.where(deep == clear, 0, 255).astype(np.uint8)
    return fromarray(np.dstack([gray, gray, gray, alpha]))


def _before_chessboard(rgba: NDArray[np.uint8], config: ImageConfig) -> NDArray[np.uint8]:
    height, width, _ = rgba.shape
    size = config.chessboard_square_size
    is_even = (np.arange(width) // size + np.arange(2)[:, None]) % 2 == 0
    is_white = is_even if config.chessboard_square_on_top_left else ~is_even
    values = (config.chessboard_white_value, config.chessboard_gray_value)
    rows = np.where(is_white, *values).astype(np.float32)[..., None]  # the two kinds of rows
    out = np.empty((height, width, 3), np.uint8)
    for band in range(0, height, size):  # a band of squares at a time: large images have large floats
        part = rgba[band : band + size]
        alpha = part[..., 3:].astype(np.float32) / 255
        # towards zero, as the reference does
        out[band : band + size] = alpha * part[..., :3] + (1 - alpha) * rows[band // size % 2]
    return out


def _patches(pixels: NDArray[np.uint8], config: ImageConfig) -> NDArray[np.float32]:
    """Cut `[rows * p, columns * p, 3]` into `[n, 3, p, p]` and normalise: 256 values a channel, looked up."""
    size = config.patch_size
    rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
    cut = pixels.reshape(rows, size, columns, size, 3).transpose(4, 0, 2, 1, 3).reshape(3, rows * columns, size, size)
    values = np.arange(256, dtype=np.float32) / 255
    out = np.empty((rows * columns, 3, size, size), np.float32)
    for channel, (mean, std) in enumerate(zip(config.image_mean, config.image_std, strict=True)):
        table = (values - np.float32(mean)) / np.float32(std)
        out[:, channel] = table[cut[channel]]
    return out
