"""Ops: functions on tensors, each with a readable reference and a registry of kernels.

`explain(op)` says which kernel would run and why not the others; `use_backend` prefers or forces; `register` adds one.
"""

from __future__ import annotations

from k3lib.ops.activation import SiTUSpec, situ_and_mul
from k3lib.ops.attn_res import AttnResSpec, attn_res
from k3lib.ops.conv import ConvSpec, short_conv
from k3lib.ops.kda import (
    KDAParams,
    KDASpec,
    ReplaySpec,
    kda_chunk,
    kda_gate,
    kda_mixer,
    kda_recurrent,
    kda_replay,
    l2_norm,
)
from k3lib.ops.linear import LinearSpec, linear
from k3lib.ops.mla import (
    AttentionSpec,
    MergeSpec,
    MLASpec,
    RowsSpec,
    attention_varlen,
    gather_rows,
    merge_partials,
    mla_decode,
    store_rows,
)
from k3lib.ops.moe import ExpertsSpec, ExpertStore, ExpertWeights, RouteSpec, Routing, experts, route
from k3lib.ops.norm import NormSpec, gated_rms_norm, rms_norm
from k3lib.ops.registry import (
    Decision,
    Impl,
    Op,
    Spec,
    explain,
    implementations,
    observe,
    ops,
    options_key,
    register,
    use_backend,
    use_options,
)
from k3lib.ops.target import ASCEND, BLACKWELL, HOPPER, MI35X, Package, Target

__all__ = [
    "ASCEND",
    "BLACKWELL",
    "HOPPER",
    "MI35X",
    "AttentionSpec",
    "AttnResSpec",
    "ConvSpec",
    "Decision",
    "ExpertStore",
    "ExpertWeights",
    "ExpertsSpec",
    "Impl",
    "KDAParams",
    "KDASpec",
    "LinearSpec",
    "MLASpec",
    "MergeSpec",
    "NormSpec",
    "Op",
    "Package",
    "ReplaySpec",
    "RouteSpec",
    "Routing",
    "RowsSpec",
    "SiTUSpec",
    "Spec",
    "Target",
    "attention_varlen",
    "attn_res",
    "experts",
    "explain",
    "gated_rms_norm",
    "gather_rows",
    "implementations",
    "kda_chunk",
    "kda_gate",
    "kda_mixer",
    "kda_recurrent",
    "kda_replay",
    "l2_norm",
    "linear",
    "merge_partials",
    "mla_decode",
    "observe",
    "ops",
    "options_key",
    "register",
    "rms_norm",
    "route",
    "short_conv",
    "situ_and_mul",
    "store_rows",
    "use_backend",
    "use_options",
]
