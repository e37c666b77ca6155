"""Groups of ranks: who shares a layer, and how their parts travel."""

from __future__ import annotations

from k3lib.parallel.ep import ExpertSpread, Placement, ep_experts
from k3lib.parallel.group import LOCAL, Group, LocalGroup, RankView, TorchGroup, TransportError
from k3lib.parallel.kcp import kda_context_parallel, prefill_split
from k3lib.parallel.mesh import Mesh, ParallelConfig
from k3lib.parallel.pp import StagePayload, stage_layers
from k3lib.parallel.sp import TokenShards

__all__ = [
    "LOCAL",
    "ExpertSpread",
    "Group",
    "LocalGroup",
    "Mesh",
    "ParallelConfig",
    "Placement",
    "RankView",
    "StagePayload",
    "TokenShards",
    "TorchGroup",
    "TransportError",
    "ep_experts",
    "kda_context_parallel",
    "prefill_split",
    "stage_layers",
]
