"""Load on an OpenAI-compatible server: times to the first token and between tokens, also beside clients that misbehave.

    python -m benchmarks.serve                                        # starts k3lib-serve on k3lib-nano
    python -m benchmarks.serve --clients 500 --seconds 60 --leave 0.1 --bad 0.1
    python -m benchmarks.serve --url http://127.0.0.1:8000 --model NAME
    python -m benchmarks.serve --overhead                             # what the server adds to a token

`--leave` is the part of requests whose client goes away in the middle, `--bad` the part that has something wrong. In
the end all clients go away at once; then nothing may run on k3lib-serve, and all its memory has to be free.
`--overhead` measures the processor time of a server over an engine that does nothing, for each streamed token. Needs
aiohttp.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import random
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field

import aiohttp
import numpy as np

BAD = [
    b"{", b"\xff\xfe", b"[]", b'{"model": NaN}', b'{"model": 5}', b"[" * 5000,
    {"messages": "hi"}, {"messages": []}, {"messages": [{"role": "robot", "content": "x"}]}, {"n": 10**9},
    {"temperature": -1}, {"temperature": "warm"}, {"max_tokens": -5}, {"max_tokens": 10**9}, {"stop": ["x"] * 10_000},
    {"tools": [{"type": "function", "function": {"name": "0"}}]}, {"tool_choice": "required"},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png,x"}}]}]},
    {"response_format": {"type": "json_schema"}}, {"model": "another"}, {"logit_bias": {"10000000": 1}},
]  # fmt: skip
WAYS = ("good", "left", "bad")


@dataclass
class Record:
    """What the clients saw: seconds, and counts."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    tokens: int = 0
    statuses: dict[str, collections.Counter[int]] = field(
        default_factory=lambda: {way: collections.Counter() for way in WAYS}
    )
    broken: collections.Counter[str] = field(default_factory=collections.Counter)


@dataclass(frozen=True)
class Load:
    """What to ask, and how."""

    url: str
    model: str
    key: str | None
    clients: int
    seconds: float
    prompt: int
    tokens: int
    leave: float
    bad: float


def body_of(load: Load, rng: random.Random) -> dict:
    words = " ".join(f"{rng.randrange(1000):03}" for _ in range(load.prompt // 4))
    return {
        "model": load.model, "messages": [{"role": "user", "content": words}], "max_tokens": load.tokens,
        "stream": True, "stream_options": {"include_usage": True}, "seed": rng.randrange(2**31),
    }  # fmt: skip


async def ask(session: aiohttp.ClientSession, load: Load, rng: random.Random, record: Record) -> None:
    """One request: a good one, one that is left, or a bad one."""
    way = rng.choices(WAYS, (1 - load.leave - load.bad, load.leave, load.bad))[0]
    body: object = body_of(load, rng)
    if way == "bad":
        flaw = rng.choice(BAD)
        body = flaw if isinstance(flaw, bytes) else {**body, **flaw}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    patience = rng.randrange(1, 8) if way == "left" else None
    begin = last = time.perf_counter()
    try:
        async with session.post("/v1/chat/completions", data=data) as response:
            record.statuses[way][response.status] += 1
            if response.status != 200:
                await response.read()
                await asyncio.sleep(float(response.headers.get("retry-after", 0.1)))
                return
            is_done, seen = False, 0
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    is_done = True
                    break
                now, chunk = time.perf_counter(), json.loads(line[6:])
                if "error" in chunk:
                    record.broken[chunk["error"]["message"][:60]] += 1
                    return
                if chunk.get("usage"):
                    record.tokens += chunk["usage"]["completion_tokens"]
                delta = chunk["choices"][0]["delta"] if chunk["choices"] else {}
                if not any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls")):
                    continue
                (record.between if seen else record.first).append(now - (last if seen else begin))
                last, seen = now, seen + 1
                if seen == patience:
                    response.close()
                    return
            if is_done:
                record.whole.append(time.perf_counter() - begin)
            else:
                record.broken["a stream ended without [DONE]"] += 1
    except aiohttp.ClientError as error:
        record.broken[type(error).__name__] += 1


async def run(load: Load) -> Record:
    record = Record()
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {load.key}"} if load.key else {})}
    async with aiohttp.ClientSession(
        load.url, headers=headers, connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as session:

        async def client(number: int) -> None:
            rng = random.Random(number)
            await asyncio.sleep(rng.random() * min(2.0, load.seconds / 4))  # not all in the same instant
            while True:
                await ask(session, load, rng, record)

        clients = [asyncio.create_task(client(number)) for number in range(load.clients)]
        await asyncio.wait(clients, timeout=load.seconds)
        for task in clients:
            task.cancel()
        for result in await asyncio.gather(*clients, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
    return record


async def get(load: Load, path: str, *, post: bool = False) -> tuple[int, dict]:
    headers = {"authorization": f"Bearer {load.key}"} if load.key else {}
    async with (
        aiohttp.ClientSession(load.url, headers=headers) as session,
        session.request("POST" if post else "GET", path) as response,
    ):
        with contextlib.suppress(aiohttp.ContentTypeError, json.JSONDecodeError):
            return response.status, await response.json()
        return response.status, {}


async def drained(load: Load) -> str:
    """Whether nothing runs any more and all memory is free or cached; only k3lib-serve says it."""
    for _ in range(100):
        status, info = await get(load, "/server_info")
        if status != 200 or "internal_states" not in info:
            return "not known of this server"
        (state,) = info["internal_states"]
        if not state["running"] and not state["waiting"]:
            break
        await asyncio.sleep(0.1)
    else:
        return f"NO: {state['running']} requests run, {state['waiting']} wait"
    await get(load, "/flush_cache", post=True)
    free = [(await get(load, "/server_info"))[1]["internal_states"][0][name] for name in ("free_pages", "free_slots")]
    limits = {name: limit["value"] for name, limit in info["limits"].items()}
    total = [info["max_total_num_tokens"] // limits["page_size"], limits["max_mamba_cache_size"]]
    return "yes" if free == total else f"NO: {free} pages and slots of {total} are free after a flush"


def table(record: Record, load: Load) -> None:
    print(
        f"\n{load.clients} clients for {load.seconds:g} s, {load.prompt} prompt tokens, at most {load.tokens} new ones"
    )
    for way, found in record.statuses.items():
        if found:
            print(f"  {way:<5} " + "  ".join(f"{count} x {status}" for status, count in sorted(found.items())))
    if record.broken:
        print("  broken " + "  ".join(f"{count} x {what}" for what, count in record.broken.items()))
    rates = record.tokens / load.seconds, len(record.whole) / load.seconds
    print("  {:.0f} tokens/s in whole answers, {:.1f} answers/s".format(*rates))
    print(f"  {'ms':<22}{'p50':>9}{'p90':>9}{'p99':>9}")
    for name, values in (
        ("first token", record.first), ("between tokens", record.between), ("whole answer", record.whole)
    ):  # fmt: skip
        if values:
            points = np.percentile(np.array(values) * 1e3, (50, 90, 99))
            print(f"  {name:<22}" + "".join(f"{point:>9.1f}" for point in points))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def started(command: list[str], url: str):
    """A server process, once it answers."""
    process = subprocess.Popen([sys.executable, *command])
    try:
        for _ in range(600):
            with contextlib.suppress(OSError, aiohttp.ClientError):
                probe = Load(url, "", None, 0, 0, 0, 0, 0, 0)
                if asyncio.run(get(probe, "/health"))[0] == 200:
                    break
            if process.poll() is not None:
                raise SystemExit("the server did not start")
            time.sleep(0.1)
        yield process
    finally:
        process.terminate()
        process.wait(60)


def processor_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100  # user and system time, in ticks


def serve_nothing(port: int) -> None:
    """A server over an engine that has all tokens at hand."""
    import uvicorn  # noqa: PLC0415 - only the child needs the server

    from k3lib.engine import StepOutput  # noqa: PLC0415
    from k3lib.server.app import create_app  # noqa: PLC0415
    from k3lib.server.tokenizer import load_tokenizer  # noqa: PLC0415

    class Nothing:
        async def generate(self, prompt_ids, params, **_):
            for i in range(params.max_new_tokens):
                await asyncio.sleep(0)
                yield StepOutput([97 + i % 26], "length" if i + 1 == params.max_new_tokens else None)

    app = create_app(Nothing(), load_tokenizer(), model_name="nothing", max_model_len=1 << 20)
    uvicorn.run(app, port=port, log_level="error", access_log=False)


def overhead(load: Load) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with started(["-m", "benchmarks.serve", "--null-server", str(port)], url) as process:
        print(f"\nserver over an engine that does nothing, {load.tokens} tokens an answer")
        print("clients   us of processor a token")
        for clients in (1, 32, load.clients):
            now = Load(url, "nothing", None, clients, min(load.seconds, 10), load.prompt, load.tokens, 0, 0)
            before = processor_seconds(process.pid)
            record = asyncio.run(run(now))
            streamed = len(record.first) + len(record.between)
            print(f"{clients:>7} {1e6 * (processor_seconds(process.pid) - before) / streamed:>12.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a running server; without, k3lib-serve is started on k3lib-nano")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--key", help="API key")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a tokenizer of bytes")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--leave", type=float, default=0.0)
    parser.add_argument("--bad", type=float, default=0.0)
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--null-server", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.null_server:
        serve_nothing(args.null_server)
        return
    port = free_port()
    url = args.url or f"http://127.0.0.1:{port}"
    load = Load(url, "", args.key, args.clients, args.seconds, args.prompt, args.tokens, args.leave, args.bad)
    if args.overhead:
        overhead(load)
        return
    serve = "from k3lib.server.cli import serve; serve()"
    own = started(["-c", serve, "--port", str(port), "--log-level", "error"], url)
    with contextlib.nullcontext() if args.url else own:
        model = args.model or asyncio.run(get(load, "/v1/models"))[1]["data"][0]["id"]
        load = Load(**{**vars(load), "model": model})
        record = asyncio.run(run(load))
        table(record, load)
        print(f"  drained: {asyncio.run(drained(load))}")
    if any(status >= 500 for found in record.statuses.values() for status in found) or record.broken:
        raise SystemExit("there were failures")


if __name__ == "__main__":
    main()
