"""Groups of ranks: who shares a layer, and how their parts travel."""

from __future__ import annotations

from k3lib.parallel.ep import ep_experts
from k3lib.parallel.group import LOCAL, Group, LocalGroup, RankView
from k3lib.parallel.mesh import Mesh

__all__ = ["LOCAL", "Group", "LocalGroup", "Mesh", "RankView", "ep_experts"]
