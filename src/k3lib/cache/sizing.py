"""How many bytes the cache of a model takes. Pure arithmetic on a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from k3lib.config import TextConfig

__all__ = ["kv_bytes_per_token", "state_bytes_per_slot"]


def kv_bytes_per_token(text: TextConfig, *, itemsize: int = 2, dcp_size: int = 1) -> float:
    """Bytes of latent KV per token and rank, over all MLA layers (model specification, section 5).

    Args:
        text: the text model.
        itemsize: bytes of one value: 2 for bf16, 1 for fp8.
        dcp_size: ranks that share the tokens.
    """
    return len(text.layers_of("mla")) * text.mla.latent_width * itemsize / dcp_size


def state_bytes_per_slot(text: TextConfig, *, state_itemsize: int = 4, conv_itemsize: int = 2, tp_size: int = 1) -> int:
    """Bytes of one request's KDA state per rank, over all KDA layers: recurrent matrix and convolution window.

    Args:
        text: the text model.
        state_itemsize: bytes of one state value: 4 for fp32, 2 for bf16.
        conv_itemsize: bytes of one convolution input, the activation dtype.
        tp_size: ranks that share the heads.
    """
    kda = text.kda
    matrix = kda.num_heads * kda.key_dim * kda.value_dim * state_itemsize
    window = (kda.conv_width - 1) * kda.conv_channels * conv_itemsize
    return len(text.layers_of("kda")) * (matrix + window) // tp_size
