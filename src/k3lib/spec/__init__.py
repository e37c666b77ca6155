"""Speculative decoding: who proposes tokens, and which are accepted."""

from __future__ import annotations

from k3lib.draft_config import DraftConfig, RopeConfig
from k3lib.spec.draft_pool import DraftPool
from k3lib.spec.drafts import BlockDraft, InferactDraft, RadixArkDraft, make_draft
from k3lib.spec.dspark import DSpark
from k3lib.spec.ngram import NGram
from k3lib.spec.proposer import MAX_BLOCK, Bound, Draft, DraftContext, Proposer, Shared, SpecConfig

__all__ = [
    "MAX_BLOCK",
    "BlockDraft",
    "Bound",
    "DSpark",
    "Draft",
    "DraftConfig",
    "DraftContext",
    "DraftPool",
    "InferactDraft",
    "NGram",
    "Proposer",
    "RadixArkDraft",
    "RopeConfig",
    "Shared",
    "SpecConfig",
    "make_draft",
]
