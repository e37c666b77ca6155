"""Layouts whose ranks are threads, the steps that are run on them, and counted traffic."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from seeded import Ranks

from k3lib import Batch, EngineConfig, KimiK3ForCausalLM, SamplingParams
from k3lib.cache import CacheConfig
from k3lib.cache.pools import HybridPool
from k3lib.parallel import LOCAL, Mesh, dcp
from k3lib.spec.proposer import SpecConfig

__all__ = [
    "PAGE",
    "PROMPTS",
    "Steps",
    "World",
    "converse",
    "load",
    "new_pool",
    "ngrams",
    "of_replica",
    "part_of",
    "rules",
    "run_steps",
]

PAGE = 4


class _Link:
    """A rank of a thread group that can also send to one other rank, and whose traffic is counted."""

    def __init__(self, inner, key, world):
        self.inner, self.key, self.world = inner, key, world
        self.rank, self.size = inner.rank, inner.size

    def _count(self, kind, x, share):
        with self.world.lock:
            calls = self.world.traffic.setdefault(kind, [])
            calls.append(x.numel() * x.element_size() * share)

    def all_reduce(self, x, op="sum"):
        self._count("all_reduce", x, 2 * (self.size - 1) / self.size)
        return self.inner.all_reduce(x, op)

    def all_gather(self, x, dim=0):
        self._count("all_gather", x, self.size - 1)
        return self.inner.all_gather(x, dim)

    def reduce_scatter(self, x, dim=0):
        self._count("reduce_scatter", x, (self.size - 1) / self.size)
        return self.inner.reduce_scatter(x, dim)

    def all_to_all(self, x, send_counts, recv_counts):
        mine = send_counts[self.rank]
        self._count("all_to_all", x, (x.shape[0] - mine) / max(1, x.shape[0]))
        return self.inner.all_to_all(x, send_counts, recv_counts)

    def _queue(self, source, to):
        return self.world.queues[self.key, source, to]

    def send(self, x, to):
        self._count("send", x, 1)
        self._queue(self.rank, to).put(x)

    def receive(self, like, source):
        got = self._queue(source, self.rank).get(timeout=60)
        assert got.shape == like.shape and got.dtype == like.dtype  # noqa: PT018
        return got

    def broadcast(self, x, source):
        if self.rank != source:
            return self._queue(source, self.rank).get(timeout=60)
        for to in range(self.size):
            if to != source:
                self._queue(source, to).put(x)
        return x


class _Queues(dict):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def __missing__(self, key):
        with self.lock:
            return self.setdefault(key, queue.Queue())


class World:
    """All ranks of a layout as threads of this process: `World(config).run(lambda mesh, rank: ...)`."""

    def __init__(self, config, placements=None):
        self.config, self.placements = config, placements
        self.queues, self.traffic, self.lock = _Queues(), {}, threading.Lock()
        self.groups = {}
        for rows in config.axes().values():
            for row in rows:
                self.groups.setdefault(tuple(row), Ranks(len(row)))

    def mesh(self, rank):
        def place(rows):
            row = next(row for row in rows if rank in row)
            if len(row) == 1:
                return LOCAL
            return _Link(self.groups[tuple(row)][row.index(rank)], tuple(row), self)

        return Mesh.of(self.config, place, placements=self.placements)

    def run(self, work):
        def one(rank):
            try:
                with torch.no_grad():
                    return work(self.mesh(rank), rank)
            except BaseException:
                for group in self.groups.values():
                    group.barrier.abort()
                raise

        with ThreadPoolExecutor(self.config.world_size) as pool:
            return list(pool.map(one, range(self.config.world_size)))


@dataclass
class Steps:
    """What a replica is asked to do: `(mode, new tokens of each request)`, one step after the other."""

    steps: tuple[tuple[str, tuple[int, ...]], ...] = (
        ("prefill", (13, 3)),
        ("prefill", (6, 2)),
        ("decode", (1, 1)),
        ("decode", (1, 1)),
    )
    seed: int = 0

    def ids(self, vocab):
        """Token ids of each request."""
        totals = [sum(lengths) for lengths in zip(*[lengths for _, lengths in self.steps], strict=True)]
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.randint(vocab, (total,), generator=generator) for total in totals]

    def batches(self, vocab, mesh):
        """The batches of one rank, over pages of `PAGE` rows and slots 1, 2, …"""
        ids, size = self.ids(vocab), mesh.dcp.size
        pages = [list(range(1 + 8 * i, 9 + 8 * i)) for i in range(len(ids))]
        cached = [0] * len(ids)
        for mode, lengths in self.steps:
            new = [x[c : c + n] for x, c, n in zip(ids, cached, lengths, strict=True)]
            batch = Batch.of(
                lengths,
                mode=mode,
                cached_tokens=cached,
                slots=list(range(1, len(ids) + 1)),
                page_tables=pages,
                page_size=PAGE * size,
                input_ids=torch.cat(new) if new else torch.zeros(0, dtype=torch.int64),
            )
            if size > 1:
                dcp.place_rows(batch, PAGE, size, mesh.dcp.rank)
            yield batch
            cached = [c + n for c, n in zip(cached, lengths, strict=True)]


def of_replica(replica):
    """Steps of a replica: others than its neighbour's, of another size."""
    if replica % 2 == 0:
        return ((("prefill", (13, 3)), ("prefill", (6, 2)), ("decode", (1, 1)), ("verify", (3, 2))), replica)
    return ((("prefill", (2,)), ("prefill", (0,)), ("decode", (1,)), ("verify", (1,))), replica)


def new_pool(model, mesh, *, num_pages=24, num_slots=3):
    """Pools of one rank."""
    cache = CacheConfig(num_pages=num_pages, num_slots=num_slots, page_size=PAGE, block_size=3)
    return HybridPool(
        model.config.text,
        cache,
        dtype=model.dtype,
        device="cpu",
        tp_size=mesh.tp.size,
        layers=model.model.layer_range,
    )


def run_steps(model, mesh, steps):
    """Logits of every step, `[B, vocab]` each."""
    pools = new_pool(model, mesh)
    vocab = model.config.text.vocab_size
    with torch.no_grad():
        return [model(batch, pools, logits="last") for batch in steps.batches(vocab, mesh)]


def load(folder, mesh, **options):
    """One rank's part of a checkpoint, in fp32."""
    options = {"dtype": torch.float32, "progress": False, **options}
    return KimiK3ForCausalLM.from_pretrained(folder, mesh=mesh, **options)


def part_of(folder, mesh, sizes):
    """One rank's part: of all layers if there are stages, else of the first four, which is enough to see."""
    return load(folder, mesh, layers=None if sizes.get("pp_size", 1) > 1 else range(4))


def rules(spec=None):
    """Of an engine: small pages and a fine grid, so that prefixes are reused and end inside the pages of all ranks."""
    return EngineConfig(
        cache=CacheConfig(num_pages=64, num_slots=8, page_size=2, checkpoint_grid=16, block_size=3),
        chunked_prefill_size=16,
        max_running_requests=3,
        spec=spec,
    )


PROMPTS = ([7, 8, 9, 7, 8, 9, 7, 8] + [5] * 20, [1, 2] * 9)


def ngrams():
    """Drafts by looking up the last tokens."""
    return SpecConfig(draft="ngram", block_size=3)


def converse(engine):
    """Two rounds of two prompts, answered in three words: the second finds prefixes, and n-grams to propose.

    Returns:
        Tokens, reused tokens of the second round, and how many tokens of drafts were proposed and accepted.
    """
    words = dict.fromkeys((7, 8, 9), 50.0)
    params = SamplingParams(temperature=0, max_new_tokens=9, ignore_eos=True, logit_bias=words)
    first = engine.generate(PROMPTS, params)
    again = engine.generate([[*p, *out.token_ids] for p, out in zip(PROMPTS, first, strict=True)], params)
    engine.cache.check()
    report = engine.stats()["speculation"] or {"proposed": 0, "accepted": 0}
    tokens, reused = [out.token_ids for out in (*first, *again)], [out.cached_tokens for out in again]
    return tokens, reused, report["proposed"], report["accepted"]
