"""Kimi-K3 with eyes: the text model, the vision tower and the projector, and how features get into a prompt.

An image takes as many tokens of the prompt as it has rows of features. Its rows replace the embeddings at its place;
everything behind the embedding treats them like tokens.

Shapes: P patches, N images, p patch size, T packed tokens, B requests, D hidden size, n rows of one image.
"""

from __future__ import annotations

import dataclasses
import logging
from itertools import accumulate, pairwise
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import torch

from k3lib import checkpoint
from k3lib.cache.prefix import MediaKey
from k3lib.config import KimiK3Config
from k3lib.errors import CheckpointError, ConfigError, RequestError
from k3lib.layers.linear import K3Module
from k3lib.layers.vision import VisionBatch, VisionProjector, VisionTower, read_grids, vision_flops
from k3lib.model import KimiK3ForCausalLM

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor, nn

    from k3lib.batch import Batch, CacheViews, FeatureTap
    from k3lib.layers.vision import Grid
    from k3lib.ops.moe import ExpertFormat
    from k3lib.parallel import Mesh
    from k3lib.parallel.group import Group

__all__ = [
    "KimiK3ForConditionalGeneration",
    "MediaSpan",
    "assign_images",
    "check_placeholders",
    "embed_ids",
    "expand_placeholders",
    "gather_images",
    "scatter_images",
]

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MediaSpan:
    """The features of one image at their place in a prompt.

    Attributes:
        position: of the first token of the image, in the expanded prompt of its request.
        features: `[n, D]`, from `KimiK3ForConditionalGeneration.encode`.
        digest: tells images apart in the prefix cache: equal for equal images under equal options, and only then.
        request: which request of a batch the prompt belongs to.
    """

    position: int
    features: Tensor
    digest: bytes | str = b""
    request: int = 0

    @property
    def length(self) -> int:
        """Tokens of the image."""
        return len(self.features)

    @property
    def key(self) -> MediaKey:
        """Its name in the prefix cache."""
        return MediaKey(self.position, self.length, self.digest)


def embed_ids(model: KimiK3ForCausalLM, ids: Tensor) -> Tensor:
    """Embed tokens `[T]` to `[T, D]`, all of them on every rank, in memory that may be written to."""
    text = model.model
    return text.rows.gather(text.embed_tokens(ids), len(ids))


def expand_placeholders(ids: Sequence[int], placeholder: int, counts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Repeat the placeholder of each image once for every row of its features.

    Args:
        ids: a prompt with one placeholder an image.
        placeholder: its id; of a chat, `<|media_pad|>` of the tokenizer.
        counts: rows of each image, in the order of the prompt.

    Returns:
        The longer prompt, and where the tokens of each image begin in it.

    Raises:
        RequestError: the prompt has more or fewer placeholders than there are images.
    """
    found = [i for i, token in enumerate(ids) if token == placeholder]
    if len(found) != len(counts):
        raise RequestError(f"the prompt has {len(found)} image placeholders for {len(counts)} images", param="media")
    expanded: list[int] = []
    positions: list[int] = []
    start = 0
    for at, count in zip(found, counts, strict=True):
        expanded += ids[start:at]
        positions.append(len(expanded))
        expanded += [placeholder] * count
        start = at + 1
    return [*expanded, *ids[start:]], positions


def check_placeholders(ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> None:
    """Refuse images whose rows are not as many as the placeholders that wait for them.

    A placeholder is known by its place: an image stands on a run of equal ids, whatever they are, and takes all of it
    that no other image takes.

    Args:
        ids: of a prompt, or of a part of one.
        spans: first token and number of rows of each image, in any order.

    Raises:
        RequestError: names both numbers.
    """
    taken = sorted(spans)
    ends = [0, *(begin + count for begin, count in taken)]
    starts = [*(begin for begin, _ in taken), len(ids)]
    for i, (begin, count) in enumerate(taken):
        if count < 1 or begin < ends[i] or begin + count > len(ids):
            raise RequestError(
                f"an image with {count} rows of features at token {begin} leaves the prompt of {len(ids)} tokens or "
                "overlaps another image",
                param="media",
            )
    for i, (begin, count) in enumerate(taken):
        first, last = begin, begin + 1
        while first > ends[i] and ids[first - 1] == ids[begin]:
            first -= 1
        while last < starts[i + 1] and ids[last] == ids[begin]:
            last += 1
        if (first, last) != (begin, begin + count):
            raise RequestError(
                f"the image at token {begin} has {count} rows of features, the prompt has {last - first} placeholders "
                "for it",
                param="media",
            )


# ---- whole images over ranks --------------------------------------------------------------------


def assign_images(costs: Sequence[int], size: int) -> tuple[tuple[int, ...], ...]:
    """Spread whole images over ranks: the dearest first, each to the rank with the least to do.

    The same on every rank, from the same costs. No rank has more than 4/3 of the work of the best possible split.

    Args:
        costs: of the images, for example `vision_flops`.
        size: ranks.

    Returns:
        The images of each rank, ascending; empty for a rank without work.
    """
    if size < 1:
        raise ConfigError(f"assign_images: size must be >= 1, got {size}")
    loads = [0] * size
    shares: list[list[int]] = [[] for _ in range(size)]
    for image in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = loads.index(min(loads))
        loads[rank] += costs[image]
        shares[rank].append(image)
    return tuple(tuple(sorted(share)) for share in shares)


def scatter_images(
    patches: Tensor, shares: Sequence[Sequence[int]], counts: Sequence[int], group: Group, source: int = 0
) -> Tensor:
    """Give every rank the patches of its images, which one rank has.

    Args:
        patches: `[P, ...]` on rank `source`, image after image; `[0, ...]` of the same dtype and device on the others.
        shares: images of each rank, from `assign_images`.
        counts: patches of each image.
        group: the ranks.
        source: which rank has them.

    Returns:
        `[p, ...]`, the patches of this rank's images, one after the other.
    """
    totals = [sum(counts[i] for i in share) for share in shares]
    sent, received = [0] * group.size, [0] * group.size
    if group.rank == source:
        parts = torch.split(patches, list(counts))
        patches = torch.cat([patches[:0], *(parts[i] for share in shares for i in share)])
        sent = totals
    received[source] = totals[group.rank]
    return group.all_to_all(patches, sent, received)


def gather_images(mine: Tensor, shares: Sequence[Sequence[int]], rows: Sequence[int], group: Group) -> list[Tensor]:
    """Give every rank the features of all images.

    Args:
        mine: `[m, D]`, features of this rank's images, one after the other.
        shares: images of each rank, from `assign_images`.
        rows: rows of each image.
        group: the ranks.

    Returns:
        `[n, D]` of each image, in the order of `rows`.
    """
    totals = [sum(rows[i] for i in share) for share in shares]
    if len(mine) != totals[group.rank]:
        raise ConfigError(f"gather_images: this rank has {len(mine)} rows, its images have {totals[group.rank]}")
    longest = max(totals, default=0)
    padded = mine.new_zeros(longest, *mine.shape[1:])  # ranks exchange pieces of one size
    padded[: len(mine)] = mine
    pieces = torch.split(group.all_gather(padded), longest) if longest else ()
    features: dict[int, Tensor] = {}
    for share, piece in zip(shares, pieces, strict=False):
        own = [rows[i] for i in share]
        features.update(zip(share, torch.split(piece[: sum(own)], own), strict=True))
    return [features[i] for i in range(len(rows))]


# ---- the model ----------------------------------------------------------------------------------


class KimiK3ForConditionalGeneration(K3Module):
    """The text model with a vision tower and a projector.

    Attributes:
        language_model: the text model, which knows nothing of images.
        vision_tower: patches to features.
        mm_projector: features to rows of the width of the text model.
    """

    def __init__(
        self,
        config: KimiK3Config,
        *,
        mesh: Mesh | None = None,
        layers: range | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        backends: str | Mapping[str, str] | None = None,
    ) -> None:
        """Build the model with random weights; arguments as for `KimiK3ForCausalLM`.

        Raises:
            ConfigError: a configuration without a vision tower, or whose projector does not fit the text model.
        """
        super().__init__()
        _check_vision(config, layers)
        self.language_model = KimiK3ForCausalLM(
            config, mesh=mesh, layers=layers, dtype=dtype, device=device, backends=backends
        )
        self._add_vision(config, dtype, self._tower_device(device))

    def _tower_device(self, device: torch.device | str | None) -> torch.device | str | None:
        """On later pipeline stages names and shapes only, so that all ranks refuse the same checkpoints."""
        return device if self.has_tower else "meta"

    def _add_vision(self, config: KimiK3Config, dtype: torch.dtype | None, device: torch.device | str | None) -> None:
        assert config.vision is not None, "checked before"
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        self.vision_tower = VisionTower(config.vision, **place)
        self.mm_projector = VisionProjector(config.vision, **place)

    @classmethod
    def of(cls, language_model: KimiK3ForCausalLM) -> KimiK3ForConditionalGeneration:
        """Add a vision tower and a projector with random weights to a text model, whose memory is shared.

        Raises:
            ConfigError: see the constructor.
        """
        layers = None if language_model.mesh.pp.size > 1 else language_model.model.layer_range
        _check_vision(language_model.config, layers)
        model = cls.__new__(cls)
        K3Module.__init__(model)
        model.language_model = language_model
        model._add_vision(language_model.config, language_model.dtype, model._tower_device(language_model.device))
        return model

    @property
    def config(self) -> KimiK3Config:
        """Of the whole model."""
        return self.language_model.config

    @property
    def mesh(self) -> Mesh:
        """Groups of ranks."""
        return self.language_model.mesh

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the activations."""
        return self.language_model.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.language_model.device

    def use_backends(self) -> contextlib.AbstractContextManager[None]:
        """The kernel preferences of this model as a context."""
        return self.language_model.use_backends()

    @property
    def has_tower(self) -> bool:
        """Whether this rank sees: those of the first pipeline stage do, which alone need features."""
        return _is_first(self.mesh)

    # -- images ---------------------------------------------------------------------------------------------------

    def encode(
        self,
        pixel_values: Tensor | None,
        grid_thws: Tensor | Sequence[Sequence[int]],
        *,
        runner: Callable[[Tensor, Sequence[Grid]], Tensor] | None = None,
        source: int | None = None,
    ) -> list[Tensor]:
        """Compute the features of images.

        Ranks of the TP group that call it together share the images, whole ones each, and all get all features.

        Args:
            pixel_values: `[P, 3, p, p]` in [-1, 1], patches row by row, image after image; on any device.
            grid_thws: `[N, 3]`, frames, rows and columns of patches of each image.
            runner: computes this rank's images in place of `encode_local`, for example by replaying graphs.
            source: the only rank of the TP group that has the patches; the others give None and are sent those of
                their images. None: every rank has all.

        Returns:
            `[n, D]` of each image, in the dtype of the embedding. Later pipeline stages have no tower and need no
            features: there they have a shape only, on the meta device.

        Raises:
            ConfigError: grids that the tower does not take, or another number or shape of patches than they say.
        """
        config, tp = self.vision_tower.config, self.mesh.tp
        grids = read_grids(grid_thws, config)
        counts, rows = [grid.num_patches for grid in grids], [grid.num_rows(config.merge_kernel_size) for grid in grids]
        is_told = source is not None and source != tp.rank
        if not is_told and (pixel_values is None or sum(counts) != len(pixel_values)):
            found = 0 if pixel_values is None else len(pixel_values)
            raise ConfigError(f"pixel_values has {found} patches, the grids describe {sum(counts)}")
        if not (self.has_tower and grids):
            return [torch.empty(n, config.text_hidden_size, dtype=self.dtype, device="meta") for n in rows]
        run = runner or self.encode_local
        if tp.size == 1:
            assert pixel_values is not None, "checked before"
            return list(torch.split(run(pixel_values, grids), rows))
        shares = assign_images([vision_flops(grid, config) for grid in grids], tp.size)
        patches = self._own_patches(pixel_values, shares, counts, source)
        mine = [grids[i] for i in shares[tp.rank]]
        # a rank without images runs nothing, and exchanges with the others
        features = run(patches, mine) if mine else self._placed(patches).new_zeros(0, config.text_hidden_size)
        return gather_images(features, shares, rows, tp)

    def _own_patches(
        self, pixel_values: Tensor | None, shares: Sequence[Sequence[int]], counts: Sequence[int], source: int | None
    ) -> Tensor:
        """The patches of this rank's images."""
        tp, p = self.mesh.tp, self.vision_tower.config.patch_size
        if source is not None:
            given = torch.empty(0, 3, p, p) if pixel_values is None else pixel_values
            return scatter_images(self._placed(given), shares, counts, tp, source)
        assert pixel_values is not None, "every rank has all patches"
        parts = torch.split(pixel_values, list(counts))
        return torch.cat([pixel_values[:0], *(parts[i] for i in shares[tp.rank])])

    def _placed(self, pixel_values: Tensor) -> Tensor:
        return pixel_values.to(device=self.device, dtype=self.dtype, non_blocking=True)

    def encode_local(self, pixel_values: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Compute the features of images on this rank, one after the other, `[rows of all, D]`."""
        return self.encode_batch(pixel_values, self.vision_batch(grids))

    def vision_batch(self, grids: Sequence[Grid]) -> VisionBatch:
        """What the blocks of the tower need to know of some images."""
        return VisionBatch.of(grids, self.vision_tower.config, dtype=self.dtype, device=self.device)

    def encode_batch(self, pixel_values: Tensor, batch: VisionBatch) -> Tensor:
        """The same for a batch that was made before: waits for nothing, so it can be captured in a graph."""
        with self.use_backends():
            features: Tensor = self.mm_projector(self.vision_tower(self._placed(pixel_values), batch))
        return features

    @staticmethod
    def splice(embeds: Tensor, spans: Sequence[MediaSpan], start: int = 0) -> Tensor:
        """Overwrite the embeddings of images with their features, in place.

        Args:
            embeds: `[T, D]`, embeddings of one chunk of a prompt.
            spans: images of the prompt; a chunk takes those of their rows that fall into it.
            start: position of the chunk in the prompt.

        Returns:
            `embeds`.

        Raises:
            ConfigError: features of another width, or images that overlap. Nothing has been written.
        """
        _check_spans(spans, embeds.shape[1])
        for span in spans:
            begin, end = max(span.position, start), min(span.position + span.length, start + len(embeds))
            if begin < end:
                rows = span.features[begin - span.position : end - span.position]
                embeds[begin - start : end - start] = rows.to(device=embeds.device, dtype=embeds.dtype)
        return embeds

    def embed(self, batch: Batch, media: Sequence[MediaSpan], *, is_whole: bool = False) -> Tensor | None:
        """Embed the tokens of a batch `[T, D]` and put the features of its images in; None on later pipeline stages.

        Args:
            batch: T packed tokens.
            media: images of its requests.
            is_whole: the batch holds whole prompts, so no image may leave it.

        Raises:
            ConfigError: no ids, features of another width, images that overlap or belong to no request.
            RequestError: an image leaves the prompt, or has other rows than placeholders wait for it (looked up on the
                CPU only, where that waits for nothing).
        """
        if batch.input_ids is None:
            raise ConfigError("the batch has no input_ids to put images among")
        offsets = [0, *accumulate(batch.new_tokens)]
        by_request = _by_request(media, batch, is_whole=is_whole)
        for spans in by_request.values():
            _check_spans(spans, self.config.text.hidden_size)  # on all stages alike
        if not self.language_model.model.has_embedding:
            return None
        embeds = embed_ids(self.language_model, batch.input_ids)
        for request, spans in by_request.items():
            rows = slice(offsets[request], offsets[request + 1])
            self.splice(embeds[rows], spans, batch.cached_tokens[request])
        return embeds

    def forward(
        self,
        batch: Batch,
        cache: CacheViews | None = None,
        *,
        media: Sequence[MediaSpan] = (),
        taps: FeatureTap | None = None,
        logits: Literal["all", "last"] = "all",
    ) -> Tensor:
        """Compute logits of text and images.

        Args:
            batch: T packed tokens of B requests; an image has one placeholder for each row of its features.
            cache: memory of each layer; None means whole sequences, stateless.
            media: features of the images, in any order. A request whose tokens are not all new may have images before,
                within and behind them.
            taps: hidden states to keep for a draft.
            logits: "all" new tokens, or the "last" one of each request.

        Returns:
            float32 `[T, vocab]` or `[B, vocab]`.

        Raises:
            ConfigError, RequestError: see `embed` and `KimiK3Model.forward`; nothing has been computed.
        """
        embeds = self.embed(batch, media, is_whole=cache is None) if media else None
        scores: Tensor = self.language_model(batch, cache, inputs_embeds=embeds, taps=taps, logits=logits)
        return scores

    # -- weights --------------------------------------------------------------------------------------------------

    @property
    def vision_parts(self) -> dict[str, nn.Module]:
        """The modules that see, by the root of their stored names."""
        return {"vision_tower": self.vision_tower, "mm_projector": self.mm_projector}

    @classmethod
    def from_pretrained(
        cls,
        path: str | PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        revision: str | None = None,
        progress: bool = True,
        **options: Any,  # noqa: ANN401 - those of the text model
    ) -> KimiK3ForConditionalGeneration:
        """Load a checkpoint with its vision tower.

        Args:
            path: a folder, or a name on the Hugging Face hub.
            dtype: None keeps the stored dtypes; float32 upcasts everything.
            device: where the weights go; default CPU.
            revision: of a hub name.
            progress: show progress bars on a terminal.
            options: further arguments of `KimiK3ForCausalLM.from_pretrained`.

        Raises:
            CheckpointError: missing, unexpected, mis-shaped or damaged tensors or files; of vision tensors found before
                anything is loaded.
            ConfigError: a checkpoint without vision tower, or see `KimiK3ForCausalLM.from_pretrained`.
        """
        folder = checkpoint.Folder(path, revision=revision)
        config = KimiK3Config.from_hf(folder.config())
        stored = folder.tensors()
        mesh: Mesh | None = options.get("mesh")
        if mesh is not None:  # before anything that a rank with other files would refuse alone
            mesh.check_same("the checkpoint", checkpoint.fingerprint(config.hf, stored))
        _check_vision(config, options.get("layers"))
        model = cls.__new__(cls)
        K3Module.__init__(model)
        model._add_vision(config, dtype or checkpoint.main_dtype(stored, config), "meta")
        checkpoint.plan_vision(model.vision_parts, stored).check(folder.path.as_posix())
        model.language_model = KimiK3ForCausalLM.from_pretrained(
            path, dtype=dtype, device=device, revision=revision, progress=progress, **options
        )
        with torch.inference_mode(mode=False):
            if model.has_tower:
                checkpoint.load_vision(model.vision_parts, stored, device=device or "cpu", progress=progress)
            model.requires_grad_(requires_grad=False)
        return model.eval()

    def load_weights(
        self,
        source: str | PathLike[str] | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        *,
        partial: bool = False,
        revision: str | None = None,
        progress: bool = True,
    ) -> None:
        """Replace all weights in the memory where they are; see `KimiK3ForCausalLM.load_weights`.

        A folder whose configuration is text-only replaces the text model and leaves the tower.

        Raises:
            CheckpointError, ConfigError: as there; what does not fit the tower is found before anything is written.
        """
        given = None
        if isinstance(source, str | PathLike):
            folder = checkpoint.Folder(source, revision=revision)
            found = KimiK3Config.from_hf(folder.config()).vision
            if found is None:
                logger.info("%s is text-only: the vision tower stays as it is", source)
                self.language_model.load_weights(source, partial=partial, revision=revision, progress=progress)
                return
            if found != self.config.vision:
                raise ConfigError(f"{source}: its vision tower is {found}, this model has {self.config.vision}")
            stored = folder.tensors()
        else:
            given = checkpoint.GivenTensors.of(source)
            stored, source = given.infos(), given.tensors
        plan = checkpoint.plan_vision(self.vision_parts, stored, partial=partial)
        plan.check("the given tensors" if given is not None else str(source))
        self.language_model.load_weights(source, partial=partial, revision=revision, progress=progress)
        if not self.has_tower:
            return
        try:
            checkpoint.update_vision(self.vision_parts, stored, given, partial=partial, progress=progress)
        except Exception as error:
            failure = CheckpointError(
                f"{error}\nThis happened while writing the vision tower: the text model is new, the tower partly. Load "
                "again before the model is used"
            )
            failure.weights_changed = True
            raise failure from error

    def save_pretrained(
        self,
        path: str | PathLike[str],
        *,
        experts: ExpertFormat | None = None,
        max_file_bytes: int = 5 << 30,
    ) -> None:
        """Write the released layout, vision included; see `KimiK3ForCausalLM.save_pretrained`."""
        vision = {
            f"{root}.{name}": value.detach()
            for root, part in self.vision_parts.items()
            for name, value in part.named_parameters()
        }
        self.language_model.save_pretrained(path, experts=experts, max_file_bytes=max_file_bytes, extra=vision)


def _is_first(mesh: Mesh) -> bool:
    """Whether a rank is one of the first pipeline stage, which embeds."""
    return mesh.pp.rank == 0


def _check_spans(spans: Sequence[MediaSpan], width: int) -> None:
    """Refuse features of another width, and images of a request that overlap."""
    for span in spans:
        if span.features.ndim != 2 or span.features.shape[1] != width:
            raise ConfigError(
                f"the features at token {span.position} have shape {list(span.features.shape)}, the embeddings a "
                f"width of {width}"
            )
    for one, other in pairwise(sorted(spans, key=lambda span: span.position)):
        if one.position + one.length > other.position:
            raise ConfigError(
                f"{one.length} rows of features at token {one.position} overlap the image at {other.position}"
            )


def _check_vision(config: KimiK3Config, layers: range | None) -> None:
    if config.vision is None:
        raise ConfigError("this configuration has no vision_config; KimiK3ForCausalLM runs text-only models")
    if config.vision.text_hidden_size != config.text.hidden_size:
        raise ConfigError(
            f"vision_config: text_hidden_size={config.vision.text_hidden_size} differs from the text model's "
            f"hidden_size={config.text.hidden_size}"
        )
    if layers is not None and layers.start:
        raise ConfigError(
            f"layers={layers!r}: a slice that begins behind layer 0 has no embeddings to put images among"
        )


def _by_request(media: Sequence[MediaSpan], batch: Batch, *, is_whole: bool) -> dict[int, list[MediaSpan]]:
    """The images of each request of a batch, checked against its ids where they can be read at once."""
    found: dict[int, list[MediaSpan]] = {}
    for span in media:
        if not 0 <= span.request < len(batch.new_tokens):
            raise ConfigError(f"an image belongs to request {span.request} of a batch of {len(batch.new_tokens)}")
        if span.position < 0 or not span.length:
            raise RequestError(
                f"an image at token {span.position} has {span.length} rows of features; it needs a place in the prompt "
                "and at least one row",
                param="media",
            )
        found.setdefault(span.request, []).append(span)
    assert batch.input_ids is not None, "checked before"
    if batch.input_ids.device.type != "cpu":
        return found
    parts = torch.split(batch.input_ids, list(batch.new_tokens))
    for request, spans in found.items():
        start, ids = batch.cached_tokens[request], parts[request].tolist()
        end = start + len(ids)
        reach = max(s.position + s.length for s in spans) if is_whole else end
        here = [(max(s.position, start), min(s.position + s.length, max(end, reach))) for s in spans]
        check_placeholders(ids, [(first - start, last - first) for first, last in here if first < last])
    return found
