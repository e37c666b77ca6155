"""Images of requests: encoded once, held until the last chunk of their prompt has used them, and kept for others.

The features of an image are known by its digest. Requests that still need them hold them; without holders they stay as
long as a limit of bytes allows, the least recently used leave first.

On many ranks the TP group of the first pipeline stage encodes: each rank whole images, whose patches rank 0 sends it,
and all get the features of all.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections import OrderedDict
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from k3lib.cache.prefix import MediaKey
from k3lib.errors import ConfigError, RequestError
from k3lib.layers.vision import Grid, read_grids, vision_flops
from k3lib.multimodal import KimiK3ForConditionalGeneration, MediaSpan, assign_images, check_placeholders, embed_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from torch import Tensor

    from k3lib.batch import Batch
    from k3lib.config import KimiK3Config
    from k3lib.engine.ranks import Leader
    from k3lib.engine.vision_graphs import VisionGraphs
    from k3lib.model import KimiK3ForCausalLM
    from k3lib.parallel.group import Chain

__all__ = ["FeatureCache", "Media", "MediaMirror", "MediaStore", "Piece", "PromptImage", "PromptPart"]

logger = logging.getLogger(__name__)

_MOST_PATCHES = 65_536  # of images that a rank encodes together; what one image may have in K3


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
_Name = tuple["bytes | str", Grid]


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

    def __init__(self, max_bytes: int, *, on_drop: Callable[[_Name], None] | None = None) -> None:
        """Keep nothing yet.

        Args:
            max_bytes: most bytes of all features, as far as nobody holds them.
            on_drop: called with the name of what leaves, for whatever reason.

        Raises:
            ConfigError: a negative limit.
        """
        if max_bytes < 0:
            raise ConfigError(f"FeatureCache: max_bytes must be >= 0, got {max_bytes}")
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.hits = self.evictions = 0
        self._on_drop = on_drop
        self._features: OrderedDict[_Name, Tensor] = OrderedDict()
        self._holders: dict[_Name, set[int]] = {}  # of names that are held; none is empty

    def __len__(self) -> int:
        return len(self._features)

    def __contains__(self, name: _Name) -> bool:
        return name in self._features

    def __getitem__(self, name: _Name) -> Tensor:
        return self._features[name]

    @property
    def num_held(self) -> int:
        """Images that requests hold."""
        return len(self._holders)

    @property
    def held_bytes(self) -> int:
        """Of what requests hold."""
        return sum(self._features[name].nbytes for name in self._holders)

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
        known = self._features.pop(name, None)
        self.num_bytes -= 0 if known is None else known.nbytes
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
        self._holders.clear()
        for name in list(self._features):
            self._drop(name)

    def _drop(self, name: _Name) -> None:
        features = self._features.pop(name, None)
        if features is not None:
            self.num_bytes -= features.nbytes
            if self._on_drop is not None:
                self._on_drop(name)

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


class Piece(NamedTuple):
    """Rows of a step that an image covers.

    Attributes:
        row: the first of them.
        size: how many.
        start: row of the features that goes there.
        name: of the features; None for those that came with requests, which stand one after the other.
    """

    row: int
    size: int
    start: int
    name: _Name | None


class _Images:
    """What every rank of the first pipeline stage does with the images of a step, all at the same time."""

    def __init__(
        self,
        model: KimiK3ForCausalLM | KimiK3ForConditionalGeneration,
        *,
        one_by_one: bool = False,
        graphs: VisionGraphs | None = None,
    ) -> None:
        sees = isinstance(model, KimiK3ForConditionalGeneration)
        self._tower: KimiK3ForConditionalGeneration | None = model if sees else None  # type: ignore[assignment]
        self._text: KimiK3ForCausalLM = model.language_model if sees else model  # type: ignore[assignment]
        self._config: KimiK3Config = self._text.config
        self.graphs = graphs
        self.one_by_one = one_by_one

    def _encode(self, grids: Sequence[Grid], patches: Tensor | None) -> list[Tensor]:
        """Features of all images; rank 0 has the patches, and every rank computes some of the images."""
        assert self._tower is not None, "checked when the request came"
        features = self._tower.encode(patches, grids, runner=self._run, source=0)
        # one image must not keep the memory of its company
        return [x if x.untyped_storage().nbytes() == x.nbytes else x.clone() for x in features]

    def _run(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """The images of this rank, so many at a time as the tower has memory for."""
        assert self._tower is not None, "there are images"
        run = self._tower.encode_local if self.graphs is None else self.graphs.run
        groups = _groups(grids, 1 if self.one_by_one else _MOST_PATCHES)
        parts = torch.split(patches, [sum(grid.num_patches for grid in group) for group in groups])
        found = [run(part, group) for part, group in zip(parts, groups, strict=True)]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _put(
        self, batch: Batch, pieces: Sequence[Piece], features: Mapping[_Name, Tensor] | FeatureCache, given: Tensor
    ) -> Tensor:
        """The embeddings of a step with its images in place, `[T, D]`.

        Args:
            batch: of the step.
            pieces: where rows of features go.
            features: by name.
            given: `[n, D]`, those that have none.
        """
        assert batch.input_ids is not None, "the engine gives ids"
        embeds = embed_ids(self._text, batch.input_ids)
        for piece in pieces:
            source = given if piece.name is None else features[piece.name]
            rows = source[piece.start : piece.start + piece.size]
            embeds[piece.row : piece.row + piece.size] = rows.to(device=embeds.device, dtype=embeds.dtype)
        return embeds

    def _share(self, given: Tensor) -> Tensor:
        """Rows `[n, D]` that rank 0 has; the others give memory for them."""
        tp = self._text.mesh.tp
        return cast("Chain", tp).broadcast(given, 0) if tp.size > 1 and len(given) else given


def _groups(grids: Sequence[Grid], most: int) -> list[list[Grid]]:
    """Images in order, together with others up to so many patches."""
    groups: list[list[Grid]] = []
    room = 0
    for grid in grids:
        if not groups or grid.num_patches > room:
            groups.append([])
            room = most
        groups[-1].append(grid)
        room -= grid.num_patches
    return groups


class MediaStore(_Images):
    """Puts the images of a step into its embeddings. On many ranks this is rank 0's side.

    Attributes:
        features: of images.
        graphs: replay the tower; None computes anew.
        num_encoded, patches_encoded: images that went through the towers of all ranks, and their patches.
    """

    def __init__(
        self,
        model: KimiK3ForCausalLM | KimiK3ForConditionalGeneration,
        *,
        cache_bytes: int = 0,
        one_by_one: bool = False,
        graphs: VisionGraphs | None = None,
        leader: Leader | None = None,
    ) -> None:
        """Make an empty store.

        Args:
            model: without a vision tower it takes features only.
            cache_bytes: of features that nobody needs at the moment.
            one_by_one: encode every image by itself, so that its company changes nothing.
            graphs: replay the tower for grids that come again.
            leader: tells other ranks, each with a `MediaMirror`, what is done here.
        """
        super().__init__(model, one_by_one=one_by_one, graphs=graphs)
        self._leader = leader
        self.features = FeatureCache(cache_bytes, on_drop=None if leader is None else self._tell_drop)
        self.num_encoded = self.patches_encoded = 0

    def _tell_drop(self, name: _Name) -> None:
        assert self._leader is not None, "only then"
        self._leader.note("drop_image", name)  # with the next message: until then they only keep more

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
        pieces, given = self._pieces(batch, parts)
        if not pieces:
            return None
        missing, holders = self._hold(parts)
        if missing and self._text.mesh.tp.size > 1:
            self._look_ahead(parts, missing, holders)
        with contextlib.nullcontext() if self._leader is None else self._leader.together():
            if self._leader is not None:
                self._leader.send("images", list(missing), pieces)
            if missing:
                self._encode_missing(missing, holders)
            embeds = self._put(batch, pieces, self.features, self._share(given))
        for part in parts:
            self._let_go(part)
        self.features.shrink()
        return embeds

    def _pieces(self, batch: Batch, parts: Sequence[PromptPart]) -> tuple[list[Piece], Tensor]:
        """Which rows of a step images cover, and the features that came with requests, as far as they fall into it."""
        pieces: list[Piece] = []
        rows: list[Tensor] = []
        count = 0
        for begin, part in zip(accumulate(batch.new_tokens, initial=0), parts, strict=False):
            for image in part.media:
                first, last = max(image.position, part.start), min(image.position + image.length, part.end)
                if first >= last:
                    continue
                row, start = begin + first - part.start, first - image.position
                if isinstance(image, PromptImage):
                    pieces.append(Piece(row, last - first, start, _name(image)))
                else:
                    pieces.append(Piece(row, last - first, count, None))
                    rows.append(image.features[start : start + last - first])
                    count += last - first
        place: dict[str, Any] = {"device": self._text.device, "dtype": self._text.dtype}
        none = torch.empty(0, self._config.text.hidden_size, **place)
        return pieces, torch.cat([none, *(x.to(**place) for x in rows)])

    def _hold(self, parts: Sequence[PromptPart]) -> tuple[dict[_Name, PromptImage], dict[_Name, set[int]]]:
        """Hold the images of a step for its requests; those without features, and who needs them."""
        missing: dict[_Name, PromptImage] = {}
        holders: dict[_Name, set[int]] = {}
        for part in parts:
            for image in part.media:
                if not isinstance(image, PromptImage) or not _within(image, part):
                    continue
                name = _name(image)
                if name not in missing and self.features.hold(name, part.number) is None:
                    missing[name] = image
                if name in missing:
                    holders.setdefault(name, set()).add(part.number)
        return missing, holders

    def _look_ahead(
        self, parts: Sequence[PromptPart], missing: dict[_Name, PromptImage], holders: dict[_Name, set[int]]
    ) -> None:
        """Add images that come later in the same prompts, for ranks that would have nothing to encode meanwhile.

        A chunk of a prompt rarely has as many images as there are ranks. What is added must not make the busiest rank
        busier, nor what is held exceed the limit of the cache.
        """
        costs = [self._cost(image) for image in missing.values()]
        most = self._busiest(costs)
        room = self.features.max_bytes - self.features.held_bytes - sum(map(self._bytes, missing.values()))
        for part in parts:
            for image in part.media:
                if not isinstance(image, PromptImage) or image.position < part.end:
                    continue
                name = _name(image)
                if name in missing or name in self.features:
                    continue
                room -= self._bytes(image)
                costs.append(self._cost(image))
                if room < 0 or self._busiest(costs) > most:
                    return
                missing[name], holders[name] = image, {part.number}

    def _cost(self, image: PromptImage) -> int:
        assert self._config.vision is not None, "there is a tower"
        return vision_flops(Grid(*image.grid_thw), self._config.vision)

    def _bytes(self, image: PromptImage) -> int:
        return image.length * self._config.text.hidden_size * self._text.dtype.itemsize

    def _busiest(self, costs: Sequence[int]) -> int:
        """Work of the rank that has most of it."""
        return max(sum(costs[i] for i in share) for share in assign_images(costs, self._text.mesh.tp.size))

    def _encode_missing(self, missing: dict[_Name, PromptImage], holders: dict[_Name, set[int]]) -> None:
        images = list(missing.values())
        patches = images[0].patches if len(images) == 1 else torch.cat([image.patches for image in images])
        features = self._encode([Grid(*image.grid_thw) for image in images], patches)
        self.num_encoded += len(images)
        self.patches_encoded += len(patches)
        for name, rows in zip(missing, features, strict=True):
            self.features.put(name, rows, holders[name])

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


class MediaMirror(_Images):
    """The side of every other rank that embeds: keeps the features that rank 0 keeps, for as long.

    An image's rows travel once, when they were computed, and no byte of them in the steps that use them: these say in
    some integers which rows go where. Were the embeddings of each step sent instead, rows would travel again whenever
    a request finds them in the cache, and to every rank at the moment when all wait for the step. The price is the
    memory of the features on each rank, which `image_cache_bytes` bounds.

    Attributes:
        features: by name.
    """

    def __init__(
        self,
        model: KimiK3ForCausalLM | KimiK3ForConditionalGeneration,
        *,
        one_by_one: bool = False,
        graphs: VisionGraphs | None = None,
    ) -> None:
        """Keep nothing yet; arguments as for `MediaStore`."""
        super().__init__(model, one_by_one=one_by_one, graphs=graphs)
        self.features: dict[_Name, Tensor] = {}

    def embed(self, batch: Batch, missing: Sequence[_Name], pieces: Sequence[Piece]) -> Tensor:
        """Encode with rank 0 what it has no features of, and embed the step as it does."""
        if missing:
            self.features.update(zip(missing, self._encode([grid for _, grid in missing], None), strict=True))
        count = sum(piece.size for piece in pieces if piece.name is None)
        given = torch.empty(count, self._config.text.hidden_size, dtype=self._text.dtype, device=self._text.device)
        return self._put(batch, pieces, self.features, self._share(given))

    def drop(self, name: _Name) -> None:
        """Forget the features of an image, which rank 0 has forgotten."""
        del self.features[name]


def _name(image: PromptImage) -> _Name:
    return image.digest, Grid(*image.grid_thw)


def _within(image: Media, part: PromptPart) -> bool:
    return image.position < part.end and image.position + image.length > part.start
