"""Running requests through a model: sampling, batching, streaming."""

from __future__ import annotations

from k3lib.engine.config import EngineConfig
from k3lib.engine.engine import AsyncEngine, Engine
from k3lib.engine.replicas import ReplicatedEngine, follow
from k3lib.engine.request import Output, Request, SamplingParams, StepOutput

__all__ = [
    "AsyncEngine",
    "Engine",
    "EngineConfig",
    "Output",
    "ReplicatedEngine",
    "Request",
    "SamplingParams",
    "StepOutput",
    "follow",
]
