"""Images of a request: the bytes behind its parts, their pixels, their place in the prompt.

Pillow is imported when the first image comes, so a server of text needs none.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import math
import threading
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

from k3lib.engine.media import PromptImage
from k3lib.errors import ConfigError, RequestError
from k3lib.server.download import download
from k3lib.server.image_parts import shortened
from k3lib.server.images import DEFAULT, image_prompt, media_digest, plan_image, preprocess_image

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch
    from PIL.Image import Image

    from k3lib.server.image_parts import ImagePart
    from k3lib.server.images import ImageConfig, ImagePlan

__all__ = ["ImageLimits", "ImageReader", "OpenedImage", "PromptImage", "expand_images"]

T = TypeVar("T")

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "AVIF", "BMP")
MAX_PIXELS = 89_478_485  # where Pillow begins to warn; at twice as many it refuses


@dataclass(frozen=True, kw_only=True)
class ImageLimits:
    """Which images requests may carry."""

    max_images: int = 100
    """Images of one request."""
    max_image_bytes: int = 20 << 20
    """Of an encoded image."""
    max_image_pixels: int = MAX_PIXELS
    """Of an image before resizing."""
    image_hosts: tuple[str, ...] = ()
    """Fetch images from these hosts, e.g. example.org, *.example.org or example.org:8443; * is every host. By default
    images come in data: URLs only."""
    image_private_hosts: bool = False
    """Fetch from private addresses too."""
    image_timeout: float = 10.0
    """Seconds for fetching all images of a request."""

    def __post_init__(self) -> None:
        for name, most in (("max_images", None), ("max_image_bytes", None), ("max_image_pixels", 2 * MAX_PIXELS)):
            value = getattr(self, name)
            if value < 1 or (most is not None and value > most):
                wanted = ">= 1" if most is None else f"in 1..{most}, Pillow's own bound"
                raise ConfigError(f"{name} must be {wanted}, got {value}")
        if not 0 < self.image_timeout < math.inf:
            raise ConfigError(f"image_timeout must be above 0, got {self.image_timeout}")
        if not all(self.image_hosts):
            raise ConfigError("image_hosts must not hold an empty name; leave it out to fetch nothing")


@dataclass(frozen=True, slots=True, eq=False)
class OpenedImage:
    """An image whose header was read: its size is known, its pixels are not yet decoded.

    Attributes:
        place: where it stands in the request.
        data: the encoded image.
        width, height: in pixels, before resizing.
        plan: what it becomes.
        digest: what tells it apart in the prefix cache.
    """

    place: str
    data: bytes
    width: int
    height: int
    plan: ImagePlan
    digest: bytes

    @property
    def prompt(self) -> str:
        """Its block in the prompt, with one placeholder."""
        return image_prompt(self.width, self.height)


def expand_images(ids: Sequence[int], images: Sequence[OpenedImage], pad_id: int) -> tuple[list[int], list[int]]:
    """Repeat the placeholder of each image once for every token of it.

    Args:
        ids: a prompt with one placeholder an image.
        images: in the order of the prompt.
        pad_id: `<|media_pad|>` of the tokenizer.

    Returns:
        The longer prompt, and where the tokens of each image begin in it.

    Raises:
        RequestError: the prompt has more or fewer placeholders than images.
    """
    found = [i for i, token in enumerate(ids) if token == pad_id]
    if len(found) != len(images):
        raise RequestError(f"the prompt has {len(found)} image placeholders for {len(images)} images", param="messages")
    expanded: list[int] = []
    positions: list[int] = []
    start = 0
    for at, image in zip(found, images, strict=True):
        expanded += ids[start:at]
        positions.append(len(expanded))
        expanded += [pad_id] * image.plan.num_tokens
        start = at + 1
    expanded += ids[start:]
    return expanded, positions


class ImageReader:
    """Reads the images of requests, in a few threads of its own.

    First all headers, then the pixels: so a prompt that is too long is refused before memory is spent on it. Methods
    may be called from any thread.

    Attributes:
        config: how an image becomes patches.
        limits: which images requests may carry.
    """

    def __init__(
        self,
        config: ImageConfig = DEFAULT,
        limits: ImageLimits | None = None,
        *,
        num_threads: int = 8,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Start no thread yet.

        Args:
            config: how an image becomes patches.
            limits: which images requests may carry.
            num_threads: requests whose images are read at the same time.
            dtype: of the patches, rounded here to spare the engine's thread; None leaves them in float32.

        Raises:
            ConfigError: Pillow is not installed.
        """
        if find_spec("PIL") is None:
            raise ConfigError("images need Pillow: pip install k3lib[server]")
        self.config = config
        self.limits = limits or ImageLimits()
        self._dtype = dtype
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="k3lib-images")
        # an image at the limit of pixels takes up to 1 GB while it is resized
        self._decoding = threading.BoundedSemaphore(2)

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """Call a function that reads images in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def close(self) -> None:
        """End the threads once they are idle."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def open(self, parts: Sequence[ImagePart]) -> list[OpenedImage]:
        """Get the encoded images and read their headers.

        Raises:
            RequestError: too many, too large, from where nothing is fetched, or no image; `param` names the part.
        """
        if len(parts) > self.limits.max_images:
            raise RequestError(
                f"the request has {len(parts)} images, this server takes {self.limits.max_images}", param="messages"
            )
        deadline = time.monotonic() + self.limits.image_timeout
        return [self.open_bytes(self._bytes(part, deadline), part.place) for part in parts]

    def open_bytes(self, data: bytes, place: str) -> OpenedImage:
        """Read the header of an encoded image."""
        _check_bytes(len(data), self.limits.max_image_bytes, place)
        width, height = self._header(data, place).size
        try:
            plan = plan_image(height, width, self.config)
        except RequestError as error:
            raise RequestError(f"{place}: {error}", param=place) from error
        return OpenedImage(place, data, width, height, plan, media_digest(data, plan, self.config))

    def load(self, images: Sequence[OpenedImage], positions: Sequence[int]) -> list[PromptImage]:
        """Decode images and cut them into patches.

        Args:
            images: from `open`.
            positions: from `expand_images`.

        Raises:
            RequestError: an image is damaged; `param` names the part.
        """
        return [
            PromptImage(position, image.plan.num_tokens, image.digest, *self._pixels(image))
            for image, position in zip(images, positions, strict=True)
        ]

    def _bytes(self, part: ImagePart, deadline: float) -> bytes:
        limits, url = self.limits, part.url.strip()
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            return _data_of(url, limits.max_image_bytes, part.place)
        if scheme in ("http", "https") and limits.image_hosts:
            return download(
                url,
                hosts=limits.image_hosts,
                max_bytes=limits.max_image_bytes,
                timeout=limits.image_timeout,
                deadline=deadline,
                allow_private=limits.image_private_hosts,
                param=part.place,
            )
        known = "a data: URL" + (" or one of http or https" if limits.image_hosts else "; this server fetches nothing")
        raise RequestError(
            f"{part.place}: the URL of an image must be {known}, got {shortened(url[:80])}", param=part.place
        )

    def _header(self, data: bytes, place: str) -> Image:
        from PIL import Image as pillow  # noqa: PLC0415 - see above

        most = self.limits.max_image_pixels
        with _decoder_errors(data, place):
            image = pillow.open(io.BytesIO(data), formats=FORMATS)
        if image.width * image.height > most:
            raise RequestError(
                f"{place}: the image has {image.width} x {image.height} pixels, the limit of this server is {most:,}",
                param=place,
            )
        return image

    def _pixels(self, image: OpenedImage) -> tuple[torch.Tensor, tuple[int, int, int]]:
        decoded = self._header(image.data, image.place)
        with self._decoding, _decoder_errors(image.data, image.place):
            decoded.load()
            if decoded.size != (image.width, image.height):
                raise ValueError(f"its header says {image.width} x {image.height}, its pixels {decoded.size}")
            patches, grid = preprocess_image(decoded, self.config)
            return patches if self._dtype is None else patches.to(self._dtype), grid


def _check_bytes(count: int, most: int, place: str) -> None:
    if count > most:
        raise RequestError(
            f"{place}: the encoded image has {count:,} bytes, the limit of this server is {most:,}", param=place
        )


def _data_of(url: str, most: int, place: str) -> bytes:
    """The bytes in a data: URL."""
    head, comma, text = url[len("data:") :].partition(",")
    kind, *options = (word.strip().lower() for word in head.split(";"))
    if kind.startswith(("video/", "audio/")):
        raise RequestError(f"{place}: unsupported content type {shortened(kind)}; send an image", param=place)
    if not comma or "base64" not in options:
        raise RequestError(
            f"{place}: a data: URL must look like data:image/png;base64,…, got {shortened(url[:80])}", param=place
        )
    _check_bytes(len(text) * 3 // 4 - 2, most, place)
    if "%" in text:
        text = urllib.parse.unquote(text)
    try:
        data = base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:
        raise RequestError(
            f"{place}: the {len(text):,} characters after the comma are not base64: {error}", param=place
        ) from error
    _check_bytes(len(data), most, place)
    return data


@contextlib.contextmanager
def _decoder_errors(data: bytes, place: str) -> Iterator[None]:
    """Blame the file for what a decoder raises, which on damaged files may be anything."""
    from PIL import UnidentifiedImageError  # noqa: PLC0415 - see above

    try:
        yield
    except (MemoryError, RequestError):
        raise
    except UnidentifiedImageError as error:
        raise RequestError(
            f"{place}: the {len(data):,} bytes are no image of a known format ({', '.join(FORMATS)})", param=place
        ) from error
    except Exception as error:
        raise RequestError(
            f"{place}: the image of {len(data):,} bytes cannot be decoded: {str(error) or type(error).__name__}",
            param=place,
        ) from error
