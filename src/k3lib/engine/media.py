"""Images of requests: encoded once, held until the last chunk of their prompt has used them, and kept for others.

The features of an image are known by its digest. Requests that still need them hold them; without holders they stay as
long as a limit of bytes allows, the least recently used leave first.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch

from k3lib.cache.prefix import MediaKey
from k3lib.errors import ConfigError, RequestError
from k3lib.layers.vision import Grid, read_grids
from k3lib.multimodal import KimiK3ForConditionalGeneration, MediaSpan, check_placeholders, embed_ids

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from torch import Tensor

    from k3lib.batch import Batch
    from k3lib.config import KimiK3Config
    from k3lib.engine.vision_graphs import VisionGraphs
    from k3lib.model import KimiK3ForCausalLM

__all__ = ["FeatureCache", "Media", "MediaStore", "PromptImage", "PromptPart"]

logger = logging.getLogger(__name__)

_MOST_PATCHES = 65_536  # of images that are encoded together; what one image may have in K3


class PromptImage(NamedTuple):
    """An image at its place in a prompt, ready for the vision tower.

    Attributes:
        position: of its first token in the expanded prompt.
        length: its tokens: rows of features.
        digest: tells it apart in the caches: equal for equal images under equal options, and only then.
        patches: `[n, 3, p, p]` in float32, in [-1, 1].
        grid_thw: frames, rows and columns of patches.
    """

    position: int
    length: int
    digest: bytes | str
    patches: Tensor
    grid_thw: tuple[int, int, int]

    @classmethod
    def of(
        cls, position: int, patches: Tensor, grid_thw: tuple[int, int, int], *, merge: tuple[int, int] = (2, 2)
    ) -> PromptImage:
        """An image that its pixels tell apart from others; a server, which has the file, takes that.

        Args:
            position: of its first token in the expanded prompt.
            patches: `[n, 3, p, p]`, floats on the CPU.
            grid_thw: frames, rows and columns of patches.
            merge: rows and columns of patches that become one token.
        """
        grid = Grid(*grid_thw)
        digest = hashlib.sha256(repr((tuple(grid), patches.dtype)).encode())
        digest.update(patches.contiguous().view(torch.uint8).numpy().data)
        return cls(position, grid.num_rows(merge), digest.digest(), patches, grid)

    @property
    def key(self) -> MediaKey:
        """Its name in the prefix cache."""
        return MediaKey(self.position, self.length, self.digest)


Media = PromptImage | MediaSpan
_Name = tuple["bytes | str", tuple[int, int, int]]


class PromptPart(NamedTuple):
    """Tokens of a request in a step: `[start, end)` of its prompt and what was generated."""

    number: int
    media: Sequence[Media]
    start: int
    end: int


# ---- features -----------------------------------------------------------------------------------


class FeatureCache:
    """Features of images by name. What a request holds stays; the rest is bounded, the least recently used leave.

    Attributes:
        max_bytes: most bytes of all features; what is held may exceed it.
        num_bytes: of all features now.
        hits, evictions: counts.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ConfigError(f"FeatureCache: max_bytes must be >= 0, got {max_bytes}")
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.hits = self.evictions = 0
        self._features: OrderedDict[_Name, Tensor] = OrderedDict()
        self._holders: dict[_Name, set[int]] = {}  # of names that are held; none is empty

    def __len__(self) -> int:
        return len(self._features)

    @property
    def num_held(self) -> int:
        """Images that requests hold."""
        return len(self._holders)

    def hold(self, name: _Name, holder: int) -> Tensor | None:
        """Features for a request that will need them until it lets them go; None if they are not here."""
        features = self._features.get(name)
        if features is None:
            return None
        holders = self._holders.setdefault(name, set())
        self.hits += holder not in holders
        holders.add(holder)
        self._features.move_to_end(name)
        return features

    def put(self, name: _Name, features: Tensor, holders: Iterable[int]) -> None:
        """Keep features that were computed for some requests."""
        self._drop(name)
        self._features[name] = features
        self._keep(name, set(holders))
        self.num_bytes += features.nbytes
        self.shrink()

    def let_go(self, name: _Name, holder: int) -> None:
        """A request does not need some features any more."""
        self._keep(name, self._holders.get(name, set()) - {holder})

    def keep_only(self, holders: Collection[int]) -> None:
        """Let go of all that other requests hold."""
        for name, those in list(self._holders.items()):
            self._keep(name, those.intersection(holders))
        self.shrink()

    def _keep(self, name: _Name, holders: set[int]) -> None:
        if holders:
            self._holders[name] = holders
        else:
            self._holders.pop(name, None)

    def shrink(self) -> None:
        """Drop what nobody holds, the least recently used first, until the rest fits."""
        if self.num_bytes <= self.max_bytes:
            return
        for name in [name for name in self._features if name not in self._holders]:
            if self.num_bytes <= self.max_bytes:
                return
            self._drop(name)
            self.evictions += 1

    def clear(self) -> None:
        """Forget all features: they were made by other weights. Who needs them encodes again."""
        self._features.clear()
        self._holders.clear()
        self.num_bytes = 0

    def _drop(self, name: _Name) -> None:
        features = self._features.pop(name, None)
        if features is not None:
            self.num_bytes -= features.nbytes

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent."""
        assert self.num_bytes == sum(x.nbytes for x in self._features.values()), "bytes are miscounted"
        assert set(self._holders) <= set(self._features), "something is held that is not here"
        assert all(self._holders.values()), "nobody holds it"
        is_free = len(self._holders) < len(self._features)
        assert self.num_bytes <= self.max_bytes or not is_free, "features that nobody holds exceed the limit"
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in self._features.values()), (
            "features keep more memory alive than is counted"
        )


# ---- images of a step ---------------------------------------------------------------------------


class MediaStore:
    """Puts the images of a step into its embeddings.

    Attributes:
        features: of images.
        num_encoded, patches_encoded: images that went through the tower, and their patches.
    """

    def __init__(
        self,
        model: KimiK3ForCausalLM | KimiK3ForConditionalGeneration,
        *,
        cache_bytes: int = 0,
        one_by_one: bool = False,
        graphs: VisionGraphs | None = None,
    ) -> None:
        """Make an empty store.

        Args:
            model: without a vision tower it takes features only.
            cache_bytes: of features that nobody needs at the moment.
            one_by_one: encode every image by itself, so that its company changes nothing.
            graphs: replay the tower for grids that come again.
        """
        sees = isinstance(model, KimiK3ForConditionalGeneration)
        self._tower: KimiK3ForConditionalGeneration | None = model if sees else None  # type: ignore[assignment]
        self._text: KimiK3ForCausalLM = model.language_model if sees else model  # type: ignore[assignment]
        self._config: KimiK3Config = self._text.config
        self.features = FeatureCache(cache_bytes)
        self.graphs = graphs
        self.one_by_one = one_by_one
        self.num_encoded = self.patches_encoded = 0

    def check_request(self, ids: Sequence[int], media: Sequence[Media]) -> None:
        """Refuse images that a prompt cannot hold, before anything of them is computed.

        Raises:
            RequestError: no image, no vision tower, patches that do not fit their grid, other rows of features than the
                prompt has placeholders, or an image without a digest.
        """
        for i, image in enumerate(media):
            if isinstance(image, MediaSpan):
                self._check_features(image, f"media[{i}]")
            elif self._tower is None:
                raise RequestError(
                    f"media[{i}]: this engine does not take images: its model has no vision tower", param="media"
                )
            elif isinstance(image, PromptImage):
                self._check_image(image, f"media[{i}]")
            else:
                raise RequestError(
                    f"media[{i}] must be a PromptImage or a MediaSpan, got {type(image).__name__}", param="media"
                )
            if not image.digest or not isinstance(image.digest, (bytes, str)):
                raise RequestError(f"media[{i}] needs a digest that tells it apart from other images", param="media")
        if media:
            check_placeholders(ids, [(image.position, image.length) for image in media])

    def _check_image(self, image: PromptImage, place: str) -> None:
        config = self._config.vision
        assert config is not None, "there is a tower"
        try:
            (grid,) = read_grids([image.grid_thw], config)
        except ConfigError as error:
            raise RequestError(f"{place}: {error}", param="media") from error
        p, shape = config.patch_size, tuple(image.patches.shape)
        if shape != (grid.num_patches, 3, p, p) or not image.patches.is_floating_point():
            raise RequestError(
                f"{place}: its grid {tuple(grid)} needs floats [{grid.num_patches}, 3, {p}, {p}], got "
                f"{str(image.patches.dtype).removeprefix('torch.')} {list(shape)}",
                param="media",
            )
        rows = grid.num_rows(config.merge_kernel_size)
        if image.length != rows:
            raise RequestError(
                f"{place}: its grid {tuple(grid)} gives {rows} rows of features, the prompt has {image.length} "
                "placeholders for it",
                param="media",
            )

    def _check_features(self, span: MediaSpan, place: str) -> None:
        width = self._config.text.hidden_size
        if span.features.ndim != 2 or span.features.shape[1] != width or not span.features.is_floating_point():
            raise RequestError(
                f"{place}: features must be floats [rows, {width}], got "
                f"{str(span.features.dtype).removeprefix('torch.')} {list(span.features.shape)}",
                param="media",
            )
        if span.request:
            raise RequestError(f"{place}: request={span.request}, but a request has its own images only", param="media")

    def embed(self, batch: Batch, parts: Sequence[PromptPart]) -> Tensor | None:
        """The embeddings of a prefill step with its images in place, `[T, D]`; None if no image falls into it.

        Args:
            batch: of the step.
            parts: its requests, in the order of the batch.
        """
        if not any(_within(image, part) for part in parts for image in part.media):
            return None
        assert batch.input_ids is not None, "the engine gives ids"
        found = self._find(parts)
        embeds = embed_ids(self._text, batch.input_ids)
        begin = [0, *accumulate(batch.new_tokens)]
        for i, part in enumerate(parts):
            spans = [self._span(image, found) for image in part.media if _within(image, part)]
            KimiK3ForConditionalGeneration.splice(embeds[begin[i] : begin[i + 1]], spans, part.start)
        for part in parts:
            self._let_go(part)
        self.features.shrink()
        return embeds

    def _span(self, image: Media, found: dict[_Name, Tensor]) -> MediaSpan:
        if isinstance(image, MediaSpan):
            return image
        return MediaSpan(image.position, found[_name(image)], image.digest)

    def _find(self, parts: Sequence[PromptPart]) -> dict[_Name, Tensor]:
        """Features of the images of a step, computed for those that have none."""
        found: dict[_Name, Tensor] = {}
        missing: dict[_Name, PromptImage] = {}
        holders: dict[_Name, set[int]] = {}
        for part in parts:
            for image in part.media:
                if not isinstance(image, PromptImage) or not _within(image, part):
                    continue
                name = _name(image)
                holders.setdefault(name, set()).add(part.number)
                if name in missing:
                    continue
                features = self.features.hold(name, part.number)
                if features is None:
                    missing[name] = image
                else:
                    found[name] = features
        for group in self._groups(missing):
            features_of = self._encode([missing[name] for name in group])
            for name, features in zip(group, features_of, strict=True):
                found[name] = features
                self.features.put(name, features, holders[name])
        return found

    def _groups(self, missing: dict[_Name, PromptImage]) -> list[list[_Name]]:
        """Images that are encoded together."""
        groups: list[list[_Name]] = []
        room = 0
        for name, image in missing.items():
            patches = len(image.patches)
            if not groups or self.one_by_one or patches > room:
                groups.append([])
                room = _MOST_PATCHES
            groups[-1].append(name)
            room -= patches
        return groups

    def _encode(self, images: Sequence[PromptImage]) -> list[Tensor]:
        assert self._tower is not None, "checked when the request came"
        patches = images[0].patches if len(images) == 1 else torch.cat([image.patches for image in images])
        runner = None if self.graphs is None else self.graphs.run
        features = self._tower.encode(patches, [image.grid_thw for image in images], runner=runner)
        self.num_encoded += len(images)
        self.patches_encoded += len(patches)
        # one image must not keep the memory of its company
        return [x if x.untyped_storage().nbytes() == x.nbytes else x.clone() for x in features]

    def _let_go(self, part: PromptPart) -> None:
        """Let go of the images whose last token is computed, unless they come again in the same prompt."""
        images = [image for image in part.media if isinstance(image, PromptImage)]
        needed = {_name(image) for image in images if image.position + image.length > part.end}
        for image in images:
            if _name(image) not in needed:
                self.features.let_go(_name(image), part.number)

    def settle(self, running: Collection[int]) -> None:
        """Let go of what requests held that do not run any more, however they ended."""
        if self.features.num_held:
            self.features.keep_only(running)

    def clear(self) -> None:
        """Forget what the old weights made."""
        self.features.clear()

    def stats(self) -> dict[str, object]:
        """Counts for a report."""
        cache = self.features
        return {
            "has_vision": self._tower is not None,
            "images_encoded": self.num_encoded,
            "patches_encoded": self.patches_encoded,
            "feature_hits": cache.hits,
            "feature_evictions": cache.evictions,
            "features": len(cache),
            "features_held": cache.num_held,
            "feature_bytes": cache.num_bytes,
            "feature_limit_bytes": cache.max_bytes,
            "graphs": None if self.graphs is None else self.graphs.stats(),
        }


def _name(image: PromptImage) -> _Name:
    return image.digest, Grid(*image.grid_thw)


def _within(image: Media, part: PromptPart) -> bool:
    return image.position < part.end and image.position + image.length > part.start
