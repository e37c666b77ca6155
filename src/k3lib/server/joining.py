"""`k3lib-serve` on many ranks: joining the others, following rank 0, and leaving together."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from typing import TYPE_CHECKING

from k3lib.engine import follow
from k3lib.parallel import Mesh, ParallelConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k3lib.engine import EngineConfig
    from k3lib.model import KimiK3ForCausalLM
    from k3lib.server.tokenizer import Tokenizer

__all__ = ["follow_rank_0", "joined"]

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def joined(layout: ParallelConfig, *, device: str, timeout_s: float) -> Iterator[Mesh]:
    """The ranks that `torchrun` started with this one, watched until the end; one rank without it.

    When this one fails, the others are told why, and end too.

    Args:
        layout: which ranks there are.
        device: where models go.
        timeout_s: a rank that gives no sign of life for so long is gone, and all others end.

    Raises:
        ConfigError: another number of processes than the layout has.
    """
    if layout.world_size == 1 and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Mesh.single()
        return
    backend = {"cuda": "nccl", "npu": "hccl"}.get(device.split(":")[0], "gloo")
    mesh = Mesh.create(layout, backend)
    logger.info("rank %d of %d over %s: %s", mesh.world.rank, mesh.world.size, backend, layout)
    beat = mesh.watch(timeout_s=timeout_s)
    mesh = mesh.replace(health=beat)
    try:
        yield mesh
    except BaseException as error:
        mesh.fail(error)
        raise
    finally:
        if beat is not None:
            beat.stop()


def follow_rank_0(model: KimiK3ForCausalLM, config: EngineConfig, tokenizer: Tokenizer) -> int:
    """Serve rank 0's engine until it closes; returns the exit status.

    Signals are left to rank 0, which lets running requests end before it lets the others go.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    follow(model, config, tokenizer=tokenizer)
    return 0
