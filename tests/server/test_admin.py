"""What operators learn of the real engine."""

import asyncio
import threading

import httpx
import pytest
import torch
from scripted import TOK

from k3lib.cache import CacheConfig
from k3lib.engine import AsyncEngine, Engine, EngineConfig, SamplingParams
from k3lib.server import serve
from k3lib.server.admin import reuse_obstacle
from k3lib.server.app import create_app
from k3lib.server.tiny import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float32)


def pools(**changes):
    return EngineConfig(cache=CacheConfig(**{"num_pages": 8, "num_slots": 2, **changes}))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (EngineConfig(), None),
        (pools(), None),
        (pools(keep_turn_ends=False, checkpoint_grid=32), None),
        (pools(num_slots=1), "there is one state slot"),
        (pools(keep_turn_ends=False), "states are kept every 512 tokens only, and the context has 512"),
        (
            EngineConfig(context_length=100, deterministic=True, chunked_prefill_size=128, checkpoint_grid=128),
            "every 128",
        ),
        (EngineConfig(disable_radix_cache=True), "off: disable_radix_cache"),
    ],
)
def test_what_makes_reuse_impossible_is_said(model, config, why):
    engine = Engine(model, config)
    said = reuse_obstacle(engine)
    assert (said is None) == (why is None)
    assert why is None or why in said
    if why is not None:
        short = SamplingParams(max_new_tokens=1)
        assert [engine.generate([list(range(1, 70))], short)[0].cached_tokens for _ in range(2)] == [0, 0]


def test_a_slow_step_does_not_hold_up_a_scrape(model, monkeypatch):
    monkeypatch.setattr("k3lib.server.admin.STATE_TIMEOUT", 0.05)
    runner = AsyncEngine(Engine(model, pools()))
    app = create_app(runner, TOK, model_name="m", max_model_len=64)

    async def play():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://k3") as client:
            before = await client.get("/metrics")
            busy = asyncio.create_task(runner.call(lambda _: asyncio.run(asyncio.sleep(0.5))))
            await asyncio.sleep(0)
            during = await client.get("/metrics")
            assert not busy.done()
            await busy
        return before.text, during.text

    before, during = asyncio.run(play())
    runner.close()
    gauge = 'k3lib:max_total_num_tokens{model_name="m"} 512.0'
    assert gauge in before
    assert gauge in during


def test_a_step_that_fails_is_an_error_of_its_requests_only(model, monkeypatch):
    engine = Engine(model, pools())
    runner = AsyncEngine(engine)
    app = create_app(runner, TOK, model_name="m", max_model_len=64)

    async def ask():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://k3") as client:
            return await client.post("/v1/completions", json={"model": "m", "prompt": "a", "max_tokens": 2})

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "launch", lambda _: 1 / 0)
        broken = asyncio.run(ask())
    healthy = asyncio.run(ask())
    runner.close()
    assert (broken.status_code, broken.json()["error"]["type"]) == (500, "server_error")
    assert "ZeroDivision" not in broken.text
    assert healthy.status_code == 200
    engine.cache.check()


@pytest.mark.parametrize(("hangs", "loads", "ends"), [(True, False, True), (True, True, False), (False, False, False)])
def test_the_watchdog_ends_a_process_whose_engine_hangs(monkeypatch, caplog, hangs, loads, ends):
    asked, ended = threading.Event(), threading.Event()

    class Engine:
        async def call(self, function):
            await asyncio.sleep(60 if hangs else 0)

    class Served:
        @property
        def is_loading(self):
            asked.set()
            return loads

    monkeypatch.setattr(serve.os, "_exit", lambda status: ended.set())
    monkeypatch.setattr(serve.faulthandler, "dump_traceback", lambda **_: None)
    watchdog = serve._Watchdog(Engine(), Served(), 0.05)
    assert asked.wait(5 if hangs else 0.3) == hangs
    assert ended.wait(0.5) == ends
    watchdog.stop()
    assert ("takes more than 0.05 s" in caplog.text) == ends
