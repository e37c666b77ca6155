"""Layers: modules that state their maths in one screen and work alone."""

from __future__ import annotations

from k3lib.layers.attn_res import AttnRes, AttnResStream, ResidualStream, ScoreWeights
from k3lib.layers.kda import KimiDeltaAttention
from k3lib.layers.latent_moe import Experts, LatentMoE, Router
from k3lib.layers.linear import K3Module, Linear, Shard, VocabEmbedding
from k3lib.layers.mla import GatedMLA
from k3lib.layers.mlp import SiTUMLP
from k3lib.layers.norm import GatedRMSNorm, RMSNorm
from k3lib.layers.vision import VisionProjector, VisionTower

__all__ = [
    "AttnRes",
    "AttnResStream",
    "Experts",
    "GatedMLA",
    "GatedRMSNorm",
    "K3Module",
    "KimiDeltaAttention",
    "LatentMoE",
    "Linear",
    "RMSNorm",
    "ResidualStream",
    "Router",
    "ScoreWeights",
    "Shard",
    "SiTUMLP",
    "VisionProjector",
    "VisionTower",
    "VocabEmbedding",
]
