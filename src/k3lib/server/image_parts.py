"""The parts of messages that are images, before anything is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from k3lib.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ImagePart", "has_images", "image_part", "image_parts", "refuse_images", "shortened"]

IMAGE_KINDS = ("image_url", "input_image", "image")


class ImagePart(NamedTuple):
    """An image of a message: its place there, and the URL that holds or names it."""

    place: str
    url: str


def image_part(part: object, place: str) -> dict[str, object]:
    """Check a content part that is not text and return it in the renderer's spelling.

    `{"type": "image_url", "image_url": {"url": …}}`, the same with a plain string, and `input_image` of the Responses
    API are images; `detail` changes nothing.

    Args:
        part: as the client sent it.
        place: its path, such as `messages[0].content[1]`; goes into errors.

    Raises:
        RequestError: it is no image, or one without a URL.
    """
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind not in IMAGE_KINDS:
        kinds = "; this server takes text and images" if isinstance(kind, str) else ", it must be an object with a type"
        raise RequestError(f"{place}: unsupported content type {shortened(kind)}{kinds}", param="messages")
    holder = part.get("image_url", part.get("image"))
    url = holder.get("url") if isinstance(holder, Mapping) else holder
    if not isinstance(url, str):
        raise RequestError(f"{place}: an image needs image_url with a string url, got {shortened(url)}", param=place)
    return {"type": "image_url", "image_url": {"url": url}, "place": place}


def image_parts(messages: Sequence[Mapping[str, object]]) -> list[ImagePart]:
    """The images of messages whose parts went through `image_part`, in the order of the messages."""
    return [
        ImagePart(str(part["place"]), part["image_url"]["url"])
        for message in messages
        for part in _listed(message.get("content"))
        if isinstance(part, Mapping) and part.get("type") == "image_url"
    ]


def has_images(messages: Sequence[Mapping[str, object]]) -> bool:
    """Whether messages, which nobody has checked yet, hold parts that call themselves images."""
    parts = (part for message in messages for part in _listed(message.get("content")))
    return any(isinstance(part, Mapping) and part.get("type") in IMAGE_KINDS for part in parts)


def refuse_images(parts: Sequence[ImagePart]) -> NoReturn:
    """Refuse the images of a request where no vision tower is loaded."""
    raise RequestError(
        f"{parts[0].place}: this server does not accept images: it runs without a vision tower, so send text only",
        param=parts[0].place,
    )


def _listed(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else ()


def shortened(value: object) -> str:
    """A value as an error names it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
