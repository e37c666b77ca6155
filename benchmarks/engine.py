"""The engine: continuous batching against one request at a time, waiting times beside a long prefill, host overhead.

    python -m benchmarks.engine                     # tiny random weights, float32, CPU
    python -m benchmarks.engine --device cuda --model-path ../shared/golden/tiny_k3_wide

All figures of a table come from one run; ratios are what to compare.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch

from k3lib import Engine, EngineConfig, KimiK3Config, KimiK3ForCausalLM, SamplingParams
from k3lib.cache import CacheConfig, HybridCache
from k3lib.engine import Request
from k3lib.engine.request import RequestState
from k3lib.engine.scheduler import Scheduler, SchedulerConfig
from k3lib.server.tiny import tiny_model


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_new_tokens=tokens, ignore_eos=True)


def random_ids(count: int, vocab: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(vocab) for _ in range(count)]


def throughput(model, concurrency: tuple[int, ...], *, requests: int = 32, prompt: int = 32, tokens: int = 24) -> None:
    """Generated tokens per second with so many requests in flight, and one after the other."""
    vocab = model.config.text.vocab_size
    prompts = [random_ids(prompt, vocab, seed) for seed in range(requests)]
    rates: dict[int, list[float]] = {n: [] for n in (0, *concurrency)}
    for _ in range(3):
        for n, found in rates.items():
            config = EngineConfig(max_running_requests=max(n, 1), disable_radix_cache=True)
            engine = Engine(model, config)
            engine.generate(prompts[:1], greedy(4))
            begin = time.perf_counter()
            if n:
                engine.generate(prompts, greedy(tokens))
            else:
                for ids in prompts:
                    engine.generate([ids], greedy(tokens))
            found.append(requests * tokens / (time.perf_counter() - begin))
    alone = statistics.median(rates[0])
    print(f"\n{requests} requests of {prompt} prompt tokens and {tokens} generated ones")
    print("in flight   tokens/s   against one after the other")
    for n, found in rates.items():
        rate = statistics.median(found)
        print(f"{n or 'one by one':>10} {rate:>10.0f} {rate / alone:>10.2f}")


def waiting(model, *, long: int, chunks: tuple[int, ...] = (256, 2048)) -> None:
    """A short request and eight decoding ones beside a long prefill."""
    vocab = model.config.text.vocab_size
    print(f"\na prompt of 32 tokens that comes when a prefill of {long} tokens has begun, 8 requests that decode")
    print("chunk  decode     first token of the short one, ms   between tokens, ms     long prefill, ms")
    print("                     alone    beside                 median     p99")
    for chunk in chunks:
        for mixed in (False, True):
            config = EngineConfig(
                cache=CacheConfig(num_pages=2 * (long + 8192) // 64, num_slots=32),
                chunked_prefill_size=chunk,
                mix_decode=mixed,
                disable_radix_cache=True,
            )
            engine = Engine(model, config)
            alone = []
            for seed in range(5):
                begin = time.perf_counter()
                next(engine.stream(random_ids(32, vocab, seed), greedy(1)))
                alone.append(time.perf_counter() - begin)
            decoding = [engine.add(Request(random_ids(64, vocab, n), greedy(2048))) for n in range(8)]
            for _ in range(20):
                engine.step()
            begin = time.perf_counter()
            name = engine.add(Request(random_ids(long, vocab, 99), greedy(1)))
            last = dict.fromkeys(decoding, begin)
            gaps, short, asked, took = [], None, None, None
            while took is None:
                for out in engine.step():
                    now = time.perf_counter()
                    if out.request_id in last:
                        gaps.append(now - last[out.request_id])
                        last[out.request_id] = now
                    elif out.request_id == short:
                        beside = now - asked
                    elif out.request_id == name:
                        took = now - begin
                if short is None:
                    short, asked = engine.add(Request(random_ids(32, vocab, 7), greedy(1))), time.perf_counter()
            gaps.sort()
            late = gaps[int(len(gaps) * 0.99)]
            figures = [min(alone), beside, statistics.median(gaps), late, took]
            shown = "{:>10.1f} {:>9.1f} {:>22.1f} {:>7.1f} {:>20.0f}".format(*(x * 1e3 for x in figures))
            print(f"{chunk:>5}  {'in prefills' if mixed else 'in turns':<11} {shown}")
            for each in decoding:
                engine.abort(each)


def overhead(running: int = 256, steps: int = 200) -> None:
    """Time of the bookkeeping of a decode step on the host, without a model."""
    cache = HybridCache.allocate(
        KimiK3Config.tiny(), CacheConfig(num_pages=running * 40, num_slots=running), dtype=torch.float32
    )
    config = SchedulerConfig(page_size=64, max_running=running, chunk_tokens=1 << 20)
    scheduler = Scheduler(cache, config)
    for n in range(running):
        ids = random_ids(500 + 4 * n, 500, n)
        scheduler.add(RequestState(Request(ids, SamplingParams(max_new_tokens=steps + 2)), n, 0, 0.0, list(ids)))
    times: dict[str, list[float]] = {"plan": [], "batch": [], "commit": [], "prepare": []}
    for step in range(steps + 1):
        marks = [time.perf_counter()]
        plan = scheduler.next()
        marks.append(time.perf_counter())
        cache.make_batch([(work.lease, work.ids) for work in plan.work], mode=plan.mode)
        marks.append(time.perf_counter())
        scheduler.commit(plan)
        marks.append(time.perf_counter())
        scheduler.prepare()
        marks.append(time.perf_counter())
        for work in plan.work:
            work.state.tokens.append(1)
        for found, begin, end in zip(times.values(), marks[:-1], marks[1:], strict=True):
            if step:
                found.append(end - begin)
    middle = {name: statistics.median(found) * 1e6 for name, found in times.items()}
    print(f"\na decode step of {running} requests on the host, microseconds")
    print("  ".join(f"{name} {value:.0f}" for name, value in middle.items()), end="  ")
    print(f"scheduler (plan, commit, prepare) {middle['plan'] + middle['commit'] + middle['prepare']:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["overhead", "throughput", "waiting"])
    parser.add_argument("--model-path")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--long", type=int, default=3584)
    args = parser.parse_args()
    if args.model_path:
        model = KimiK3ForCausalLM.from_pretrained(args.model_path, device=args.device)
    else:
        model = tiny_model(dtype=torch.float32).to(args.device)
    if "overhead" in args.parts:
        overhead()
    if "throughput" in args.parts:
        throughput(model, (1, 8, 32))
    if "waiting" in args.parts:
        waiting(model, long=args.long)


if __name__ == "__main__":
    main()
