"""The process behind `k3lib-serve`: model, engine, HTTP server, and how it ends."""

from __future__ import annotations

import asyncio
import dataclasses
import faulthandler
import gc
import logging
import os
import threading
from typing import TYPE_CHECKING, Any, cast

import uvicorn

from k3lib import nano, ops
from k3lib.engine import AsyncEngine, Engine, EngineConfig, ReplicatedEngine
from k3lib.engine.engine import decisions
from k3lib.engine.grammar import is_available
from k3lib.errors import ConfigError
from k3lib.server.admin import reuse_obstacle
from k3lib.server.app import create_app
from k3lib.server.joining import follow_rank_0, joined
from k3lib.server.loading import default_device, load_model, tokenizer_for
from k3lib.server.vision import image_reader, low_memory_profile

if TYPE_CHECKING:
    from types import FrameType

    from fastapi import FastAPI

    from k3lib.model import KimiK3ForCausalLM
    from k3lib.parallel import Mesh
    from k3lib.server.config import NetworkConfig, ServeConfig
    from k3lib.server.served import Served

__all__ = ["run_server"]

logger = logging.getLogger(__name__)

BUILT_IN_GRID = 64  # a chat with it has some hundred tokens, so at 512 nothing would ever be reused
_LAST_WORDS = 5  # seconds for connections to close once their answers are out


def run_server(config: ServeConfig) -> int:
    """Serve until a signal comes; returns the exit status. Of many ranks rank 0 serves, and the others follow it."""
    device = default_device(config.model.model_path, config.model.device)
    with joined(config.parallel, device=device, timeout_s=config.network.rank_timeout) as mesh:
        return _run(config, mesh)


def _run(config: ServeConfig, mesh: Mesh) -> int:
    where = config.model
    model = load_model(
        where.model_path,
        dtype=where.dtype,
        device=where.device,
        revision=where.revision,
        resident_experts=where.resident_experts,
        vision=not config.vision.language_model_only,
        mesh=mesh,
    )
    tok = tokenizer_for(where.model_path, where.tokenizer_path, model, revision=where.revision)
    path = nano.find(where.model_path)
    images = image_reader(model, tok, config.images, model_path=path, revision=where.revision)
    rules = _engine_config(config.engine, is_built_in=nano.is_meant(where.model_path))
    if config.vision.low_memory:
        rules, notes = low_memory_profile(rules, model.config.text.max_position_embeddings)
        for note in notes:
            logger.info("low memory: %s", note)
    rules = dataclasses.replace(rules, spec=config.speculation.spec())
    if mesh.world.rank:
        return follow_rank_0(cast("KimiK3ForCausalLM", model), rules, tok)
    # a front over replicas has the methods of an engine
    kind = Engine if mesh.dp.size == 1 else cast("type[Engine]", ReplicatedEngine)
    engine = kind(model, rules, tokenizer=tok)
    _say_grammars(required=config.api.require_grammar)
    name = where.served_model_name or where.model_path or nano.NAME
    _banner(name, engine)
    if tok.vocab_size > model.config.text.vocab_size:
        logger.warning(
            "the tokenizer has %d ids, the model %d: prompts with the others are refused",
            tok.vocab_size,
            model.config.text.vocab_size,
        )
    if config.api.api_key is None and config.network.host not in ("127.0.0.1", "::1", "localhost"):
        logger.warning("everybody who reaches %s may use this server: there is no --api-key", config.network.host)
    gc.collect()
    gc.freeze()  # the model lives as long as the process; do not walk it again and again
    runner = AsyncEngine(engine)
    info = {"arguments": _arguments(config), "kernels": decisions(engine.model).split("\n")}
    app = create_app(
        runner,
        tok,
        model_name=name,
        max_model_len=engine.context_length,
        config=config.api,
        info=info,
        images=images,
    )
    server = _Server(app, config.network, name)
    watchdog = _Watchdog(runner, app.state.served, config.network.watchdog_timeout)
    try:
        server.run()
    finally:
        watchdog.stop()
        runner.close()
        engine.close()
        if images is not None:
            images.close()
    return 0 if server.started else 1


def _say_grammars(*, required: bool) -> None:
    """Say once if constrained decoding is missing."""
    if is_available():
        return
    missing = "constrained decoding needs the package llguidance, which is not installed (k3lib[server] has it)"
    if required:
        raise ConfigError(f"--require-grammar: {missing}")
    logger.warning("%s: JSON answers, forced calls and strict tools get 400", missing)


def _engine_config(config: EngineConfig, *, is_built_in: bool) -> EngineConfig:
    """The configuration with "auto", as other servers spell it, for what is left to the engine."""
    kv, state = (None if x == "auto" else x for x in (config.kv_cache_dtype, config.mamba_ssm_dtype))
    grid = config.checkpoint_grid
    if is_built_in and grid == EngineConfig().checkpoint_grid and not config.deterministic:
        grid = BUILT_IN_GRID
    return dataclasses.replace(config, kv_cache_dtype=kv, mamba_ssm_dtype=state, checkpoint_grid=grid)


def _arguments(config: ServeConfig) -> dict[str, Any]:
    """All flags by name, keys hidden."""
    flat: dict[str, Any] = {}
    for group in dataclasses.fields(config):
        part = getattr(config, group.name)
        flat |= {f.name: getattr(part, f.name) for f in dataclasses.fields(part) if f.name not in ("cache", "spec")}
    for name in ("api_key", "admin_api_key"):
        flat[name] = None if flat[name] is None else "***"
    return flat


def _banner(name: str, engine: Engine) -> None:
    """Say once what this server works with; the engine has said its limits."""
    model = engine.model
    text = model.config.text
    logger.info(
        "%s: %d layers, vocabulary %d, %s on %s", name, text.num_layers, text.vocab_size, model.dtype, model.device
    )
    with model.use_backends():
        chosen = {n: ops.explain(op, target=op.local_target(model.device.type)).chosen for n, op in ops.ops().items()}
    kernels = ", ".join(f"{n}: {impl.name if impl else 'none'}" for n, impl in sorted(chosen.items()))
    logger.info("kernels (all reasons: GET /server_info)  %s", kernels)
    obstacle = reuse_obstacle(engine)
    if obstacle is not None:
        logger.warning("no prompt reuses what was cached: prefix reuse is %s", obstacle)


class _Server(uvicorn.Server):
    """uvicorn's server that finishes what runs, and refuses what comes, before it ends."""

    def __init__(self, app: FastAPI, network: NetworkConfig, name: str) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=network.host,
                port=network.port,
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_LAST_WORDS,
                timeout_keep_alive=30,
            )
        )
        self._served = app.state.served
        self._network = network
        self._name = name
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: Any = None) -> None:  # noqa: ANN401
        """Listen, and say so."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            url = f"http://{self._network.host}:{self._network.port}"
            print(f"serving {self._name} on {url}", flush=True)  # noqa: T201 - what scripts wait for

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; at the second signal, end."""
        if self._loop is None or self._served.is_draining:
            super().handle_exit(sig, frame)
            return
        self._served.is_draining = True
        self._loop.call_soon_threadsafe(self._start_drain)

    def _start_drain(self) -> None:
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        open_now, seconds = self._served.num_open, self._network.drain_timeout
        logger.info("shutting down: %d requests are open, they have %g s", open_now, seconds)
        if not await self._served.drain(seconds):
            logger.warning("%g s are over: %d requests were aborted", seconds, self._served.num_open)
        self.should_exit = True


class _Watchdog:
    """Ends the process if the engine does not come to the end of a step."""

    def __init__(self, engine: AsyncEngine, served: Served, seconds: float) -> None:
        self._engine = engine
        self._served = served
        self._seconds = seconds
        self._stopped = threading.Event()
        if seconds:
            threading.Thread(target=self._watch, name="k3lib-watchdog", daemon=True).start()

    def stop(self) -> None:
        """Watch no more."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(self._seconds / 4) and self._answers():
            pass

    def _answers(self) -> bool:
        """Whether the engine still does, or was closed; ends the process if it hangs."""
        try:
            # a loop of its own: that of the server may be what hangs
            asyncio.run(asyncio.wait_for(self._engine.call(lambda _: None), self._seconds))
        except asyncio.TimeoutError:
            if not self._stopped.is_set() and not self._served.is_loading:
                logger.critical("a step of the engine takes more than %g s; the process ends", self._seconds)
                faulthandler.dump_traceback(all_threads=True)
                os._exit(70)
        except ConfigError:
            return False
        return True
