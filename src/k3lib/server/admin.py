"""What operators ask a server: is it well, what does it work with, forget the cache, end requests, take new weights."""

import asyncio
import contextlib
import importlib.metadata
import time
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

import k3lib
from k3lib.engine.request import SamplingParams
from k3lib.errors import CapacityError, CheckpointError, ConfigError, RequestError
from k3lib.server.gate import check_admin
from k3lib.server.schemas import AbortRequest, UpdateWeightsRequest
from k3lib.server.served import Served

if TYPE_CHECKING:
    from k3lib.engine.engine import Engine

__all__ = ["add_admin_routes", "reuse_obstacle"]

HEALTH_TIMEOUT = 20.0
STATE_TIMEOUT = 2.0  # a scrape does not wait longer for the end of a step
_POLL = 0.1


def add_admin_routes(app: FastAPI, served: Served) -> None:
    """Add the endpoints of operators to an app."""

    @app.get("/health")
    async def health() -> Response:
        """Whether the process answers; 503 while it shuts down."""
        return _state(served)

    @app.get("/ready")
    async def ready() -> Response:
        """Whether new requests are taken; 503 while the server shuts down."""
        return _state(served)

    @app.get("/health_generate")
    async def health_generate() -> Response:
        """Whether the engine brings forth tokens: any, within 20 seconds."""
        return await _generates(served)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Counts and times in Prometheus' text format."""
        return await _metrics(served)

    @app.get("/server_info")
    @app.get("/get_server_info", include_in_schema=False)
    async def server_info() -> Response:
        """Arguments, limits with their reasons, kernels, memory, and what runs."""
        return await _server_info(served)

    @app.get("/model_info")
    @app.get("/get_model_info", include_in_schema=False)
    async def model_info() -> Response:
        """The model and what it is for."""
        return _model_info(served)

    @app.post("/flush_cache")
    async def flush_cache() -> Response:
        """Forget all cached prefixes; 400 while requests run."""
        return await _flush(served)

    @app.post("/abort_request")
    @app.post("/abort", include_in_schema=False)
    async def abort_request(body: AbortRequest, http: Request) -> Response:
        """End a request by its `rid`, which is the `id` of its response, or all of them."""
        if body.abort_all:
            check_admin(http)
        return _abort(served, body)

    @app.post("/update_weights")
    async def update_weights(body: UpdateWeightsRequest) -> Response:
        """Replace the weights between two steps; running requests go on with the new ones."""
        return await _update_weights(served, body)


def _state(served: Served) -> Response:
    if served.is_draining:
        return JSONResponse({"status": "shutting down"}, 503)
    return JSONResponse({"status": "ok"})


async def _generates(served: Served) -> Response:
    if served.is_draining:
        return _state(served)
    before, end = served.metrics.num_steps, time.monotonic() + HEALTH_TIMEOUT
    probe = asyncio.create_task(_one_token(served))
    try:
        while not (served.metrics.num_steps > before or (probe.done() and probe.exception() is None)):
            failure = probe.exception() if probe.done() else None
            # a full queue is no illness as long as others get their tokens
            if time.monotonic() > end or (failure is not None and not isinstance(failure, CapacityError)):
                why = f": {failure}" if failure is not None else ""
                raise HTTPException(503, f"no token came within {HEALTH_TIMEOUT:g} s{why}")
            await asyncio.wait([probe], timeout=_POLL)
            if probe.done():
                await asyncio.sleep(0 if probe.exception() is None else _POLL)
    finally:
        probe.cancel()
    return _state(served)


async def _one_token(served: Served) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=1)
    async for _ in served.engine.generate([served.tok.special["[BOS]"]], params):
        pass


async def _metrics(served: Served) -> Response:
    if hasattr(served.engine, "call"):
        # the step that runs may be long: then the last state is told again
        with contextlib.suppress(asyncio.TimeoutError):
            stats = served.call(lambda engine: engine.stats(), what="/metrics")
            served.metrics.engine_state(await asyncio.wait_for(stats, STATE_TIMEOUT))
    return Response(served.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _version() -> str:
    try:
        return importlib.metadata.version("k3lib")
    except importlib.metadata.PackageNotFoundError:
        return k3lib.__version__


async def _server_info(served: Served) -> Response:
    state = await served.call(_engine_info, what="/server_info")
    return JSONResponse(
        {
            "version": _version(),
            "served_model_name": served.model_name,
            "max_model_len": served.max_model_len,
            "uptime_seconds": round(time.time() - served.created, 3),
            "is_draining": served.is_draining,
            "num_live_requests": len(served.live),
            **served.info,
            **state,
        }
    )


def _engine_info(engine: "Engine") -> dict[str, Any]:
    """What the engine says of itself; runs between two of its steps."""
    stats = engine.stats()
    limits = stats.pop("limits")
    replicas = stats.pop("replicas", [stats])
    memory = {"cache_bytes": engine.cache.pool.nbytes, "weight_bytes": _weight_bytes(engine)}
    return {
        "limits": limits,
        "max_total_num_tokens": engine.cache.config.num_pages * engine.cache.page_tokens * len(replicas),
        "max_running_requests": engine.scheduler.config.max_running * len(replicas),
        "memory": memory,
        "prefix_reuse": reuse_obstacle(engine) or "on",
        "avg_spec_accept_length": None if stats["speculation"] is None else stats["speculation"]["accept_length"],
        "internal_states": [
            {"memory_usage": memory, **{k: v for k, v in each.items() if k != "limits"}} for each in replicas
        ],
    }


def _weight_bytes(engine: "Engine") -> int:
    seen = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in engine.model.parameters()}
    return sum(seen.values())


def reuse_obstacle(engine: "Engine") -> str | None:
    """Why the configuration of an engine makes prefix reuse impossible, or None."""
    cache, context = engine.cache.config, engine.context_length
    if not cache.prefix_cache:
        return "off: disable_radix_cache"
    if cache.num_slots < 2:
        return "impossible: there is one state slot, and the request that runs has it"
    interval = cache.checkpoint_grid if cache.track_interval is None else cache.track_interval
    if not cache.keep_turn_ends and min(cache.checkpoint_grid, interval or cache.checkpoint_grid) >= context:
        return (
            f"impossible: states are kept every {cache.checkpoint_grid} tokens only, and the context has {context} "
            "(checkpoint_grid, keep_turn_ends)"
        )
    return None


def _model_info(served: Served) -> Response:
    arguments = served.info.get("arguments")
    path = arguments.get("model_path") if isinstance(arguments, dict) else None
    return JSONResponse(
        {
            "model_path": path or served.model_name,
            "served_model_name": served.model_name,
            "is_generation": True,
            "max_model_len": served.max_model_len,
            "vocab_size": served.tok.vocab_size,
            "has_image_understanding": served.images is not None,
        }
    )


async def _flush(served: Served) -> Response:
    def flush(engine: "Engine") -> int | None:
        return None if engine.has_work else engine.clear_cache()

    tokens = await served.call(flush, what="/flush_cache")
    if tokens is None:
        raise RequestError("requests are running; the cache is flushed only while the server is idle")
    return JSONResponse({"success": True, "flushed_tokens": tokens})


def _abort(served: Served, body: AbortRequest) -> Response:
    rid = body.rid or body.request_id
    if bool(body.abort_all) == (rid is not None):
        raise RequestError("give either rid or abort_all", param="rid")
    names = [name for name in served.live if body.abort_all or name == rid]
    for name in names:
        served.live[name].abort("the request was aborted by /abort_request")
    return JSONResponse({"success": True, "aborted": names})


async def _update_weights(served: Served, body: UpdateWeightsRequest) -> Response:
    def update(engine: "Engine") -> None:
        engine.update_weights(body.model_path, keep_cache=body.keep_cache, revision=body.revision, progress=False)

    started = time.monotonic()
    served.is_loading = True
    try:
        await served.call(update, what="/update_weights")
    except (CheckpointError, ConfigError) as error:
        raise RequestError(str(error), param="model_path") from error
    finally:
        served.is_loading = False
    return JSONResponse({"success": True, "seconds": round(time.monotonic() - started, 3)})
