"""Pipeline stages: which layers each has, and what travels from one to the next.

Shapes: T tokens, D hidden size, n finished blocks of the attention residuals, F width of draft features.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from k3lib.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["StagePayload", "features_before", "payload_rows", "stage_layers"]


def stage_layers(num_layers: int, size: int, partition: Sequence[int] | None = None) -> tuple[range, ...]:
    """The layers of each of `size` stages, in order.

    Args:
        num_layers: of the whole model.
        size: stages.
        partition: layers of each stage; None splits evenly, the last stages one longer if it does not divide.

    Raises:
        ConfigError: a stage without layers, or a partition that does not add up.
    """
    if size < 1:
        raise ConfigError(f"pp_size must be >= 1, got {size}")
    if partition is not None:
        counts = list(partition)
        if len(counts) != size:
            raise ConfigError(f"pp_partition={tuple(counts)} names {len(counts)} stages, pp_size={size}")
        if any(type(n) is not int or n < 1 for n in counts) or sum(counts) != num_layers:
            raise ConfigError(
                f"pp_partition={tuple(counts)} must be positive and add up to the {num_layers} layers, it adds up to "
                f"{sum(counts)}"
            )
    elif size > num_layers:
        raise ConfigError(f"pp_size={size} exceeds the {num_layers} layers: every stage needs one")
    else:
        base, longer = divmod(num_layers, size)
        counts = [base + (stage >= size - longer) for stage in range(size)]
    ends = list(accumulate(counts))
    return tuple(range(end - count, end) for count, end in zip(counts, ends, strict=True))


def payload_rows(layer: int, layers_per_block: int | None) -> int:
    """Hidden vectors a token that travel in front of `layer`: the running sum and the finished blocks.

    Args:
        layer: first layer of the receiving stage, from 0.
        layers_per_block: of the attention residuals; None in a model without them.
    """
    return 1 + (0 if layers_per_block is None else -(-layer // layers_per_block))


def features_before(layers: Sequence[int], first_layer: int) -> tuple[int, ...]:
    """Which of the wanted layers' features are known in front of `first_layer`, as indices into `layers`.

    A feature is the value after its layer as the next reader sees it, so the stage of that reader computes it: one at
    a stage's last layer belongs to the next stage.
    """
    return tuple(i for i, layer in enumerate(layers) if layer + 1 < first_layer)


@dataclass(slots=True)
class StagePayload:
    """What a stage hands to the next one.

    Attributes:
        prefix: `[T, D]`, the running sum with everything added.
        bank: `[T, n, D]`, the finished blocks; n = 0 in a model without attention residuals.
        features: `[T, F]`, draft features of the layers passed so far, or None.
    """

    prefix: Tensor
    bank: Tensor
    features: Tensor | None = None

    def pack(self) -> Tensor:
        """Everything in one tensor, `[T, (1 + n) · D + F]`."""
        parts = [self.prefix, self.bank.flatten(1)]
        if self.features is not None:
            parts.append(self.features)
        return torch.cat(parts, dim=1)

    @classmethod
    def unpack(cls, packed: Tensor, *, hidden: int, blocks: int, features: int = 0) -> StagePayload:
        """Take apart what `pack` made.

        Args:
            packed: `[T, (1 + blocks) · hidden + features]`.
            hidden: D.
            blocks: n.
            features: F.

        Raises:
            ConfigError: another width; the sender runs other layers or another batch.
        """
        widths = [hidden, blocks * hidden, features]
        if packed.shape[1] != sum(widths):
            raise ConfigError(
                f"a stage payload has {packed.shape[1]} values a token, {blocks} blocks and the running sum of "
                f"{hidden} and {features} of features are {sum(widths)}"
            )
        prefix, bank, extra = torch.split(packed, widths, dim=1)
        return cls(prefix, bank.reshape(bank.shape[0], blocks, hidden), extra if features else None)
