"""What the ranks of `multi_gpu.py` do: one process a rank, which is given one case after the other.

A case compares what the ranks of a layout compute with what one rank computes in fp32 by the reference kernels, beside
what one rank loses in the dtype of the layout. Experts are those that fp32 chooses, where that can be said; the random
model has few scores so nearly equal that roundings choose others. The best token has to be that of fp32 where its lead
is beyond what roundings of one rank do to any lead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import json
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import save_file

from k3lib import (
    Batch,
    Engine,
    EngineConfig,
    KimiK3Config,
    KimiK3ForCausalLM,
    Mesh,
    ParallelConfig,
    SamplingParams,
)
from k3lib.batch import RouteTap
from k3lib.cache import CacheConfig
from k3lib.cache.pools import HybridPool
from k3lib.capture import capture, reason_of
from k3lib.engine import ReplicatedEngine, follow
from k3lib.engine.ranks import can_replay
from k3lib.errors import ConfigError
from k3lib.ops import KDAParams, kda_chunk, use_backend
from k3lib.parallel.kcp import kda_context_parallel, prefill_split, split_tokens
from k3lib.server.tiny import tiny_draft_config
from k3lib.spec import DraftConfig, SpecConfig, make_draft

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks
from benchmarks.parallel import Echo

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from k3lib.parallel import Group

CLEAR = 1.5  # a lead of the best token, in the largest change of a lead on one rank
EXACT = 1e-4  # error in fp32
STEADY = 0.3  # of the outputs of layers, beside an embedding of 1, as in trained models
GAP = 6.0  # between the router's logits of experts that a token likes and of others
CYCLE = 6  # tokens that the random model likes to repeat

SIZES: dict[str, dict[str, Any]] = {
    "cpu": {},
    "cuda": {
        "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8,
        "num_key_value_heads": 8, "num_heads": 8, "head_dim": 128, "q_lora_rank": 256, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 32,
        "num_experts_per_token": 8, "moe_intermediate_size": 256, "routed_expert_hidden_size": 512,
        "max_position_embeddings": 16384,
    },
}  # fmt: skip
PAGE = {"cpu": 4, "cuda": 64}
PIPELINE, LONG_KDA = "pp, four micro-batches", "KDA context parallel prefill"
LONG_MODEL = "prompts split over ranks"


class Job(NamedTuple):
    """What all processes are told.

    Attributes:
        device: "cpu" or "cuda".
        ranks: processes of a layout.
        folder: the checkpoint, and what ranks keep for a process that comes after them.
        port: of rank 0's store.
        dtype_name: of the layouts.
        overlap: `overlap_shared_experts` of layouts that do not say it.
    """

    device: str
    ranks: int
    folder: str
    port: int
    dtype_name: str = "float32"
    overlap: str = "graphs"

    @property
    def backend(self) -> str:
        """Of torch.distributed."""
        return "nccl" if self.device == "cuda" else "gloo"

    @property
    def dtype(self) -> torch.dtype:
        """Of the layouts."""
        found: torch.dtype = getattr(torch, self.dtype_name)
        return found


class Result(NamedTuple):
    """What one rank, or all together, found in a case.

    Attributes:
        good: nothing is off.
        error: of the worst step, relative to the size of its logits.
        one: the same of one rank.
        equal, clear: tokens that are as on one rank, of those that have to be.
        graph: whether a captured step gave the bits of the eager one; empty if it cannot be captured.
        eager_ms, captured_ms: of a decode step; 0 if it was not run so.
        note: more.
    """

    good: bool
    error: float = 0.0
    one: float = 0.0
    equal: int = 0
    clear: int = 0
    graph: str = ""
    eager_ms: float = 0.0
    captured_ms: float = 0.0
    note: str = ""

    @classmethod
    def of_all(cls, ranks: list[Result]) -> Result:
        """The worst of all ranks."""
        return ranks[0]._replace(
            good=all(r.good for r in ranks),
            error=max(r.error for r in ranks),
            one=max(r.one for r in ranks),
            equal=sum(r.equal for r in ranks),
            clear=sum(r.clear for r in ranks),
            graph="NO" if any(r.graph == "NO" for r in ranks) else ranks[0].graph,
            eager_ms=max(r.eager_ms for r in ranks),
            captured_ms=max(r.captured_ms for r in ranks),
        )


def layouts(ranks: int) -> dict[str, dict[str, Any]]:
    """Layouts of that many ranks."""
    n = ranks
    found: dict[str, dict[str, Any]] = {
        "tp": {"tp_size": n},
        "tp x ep, all-reduce": {"tp_size": n, "ep_size": n},
        "tp x dcp, all-to-all": {"tp_size": n, "dcp_size": n},
        "tp x dcp, gather and reduce-scatter": {"tp_size": n, "dcp_size": n, "dcp_comm_backend": "ag_rs"},
        "tp x ep, all-to-all, tokens sharded": {"tp_size": n, "ep_size": n, "moe_exchange": "all_to_all"},
        "dp attention, all-gather": {"tp_size": n, "dp_size": n},
        "dp attention x ep, all-to-all": {"tp_size": n, "dp_size": n, "ep_size": n, "moe_exchange": "all_to_all"},
        "pp": {"pp_size": n},
        "tp, latent projections cut": {"tp_size": n, "shard_latent_projections": True},
        "tp x dcp, replicated queries": {"tp_size": n, "dcp_size": n, "dcp_replicate_q_proj": True},
        "tp x dcp x ep, tokens sharded": {
            "tp_size": n, "dcp_size": n, "ep_size": n, "moe_exchange": "all_to_all",
        },
        "dp attention x ep, all-gather": {"tp_size": n, "dp_size": n, "ep_size": n},
        "tp x ep, shared experts always beside": {"tp_size": n, "ep_size": n, "overlap_shared_experts": "always"},
        "tp x ep, shared experts never beside": {"tp_size": n, "ep_size": n, "overlap_shared_experts": "never"},
        "tp x ep, copies of experts": {"tp_size": n, "ep_size": n, "redundant_experts": n},
    }  # fmt: skip
    if n % 2 == 0 and n >= 4:
        half = n // 2
        found |= {
            "tp x ep/2": {"tp_size": n, "ep_size": half},
            "dp 2 x tp": {"tp_size": n, "dp_size": 2},
            "dp 2 x tp x ep, all-to-all": {"tp_size": n, "dp_size": 2, "ep_size": n, "moe_exchange": "all_to_all"},
            "tp x dcp 2": {"tp_size": n, "dcp_size": 2},
            "pp 2 x tp": {"tp_size": half, "pp_size": 2},
            "pp 2 x tp x dcp": {"tp_size": half, "pp_size": 2, "dcp_size": half},
        }
    return found


def engines(ranks: int) -> dict[str, tuple[dict[str, Any], str]]:
    """Engines that rank 0 leads: a layout, and what drafts."""
    dcp = {"tp_size": ranks, "dcp_size": ranks}
    sharded = {"tp_size": ranks, "ep_size": ranks, "moe_exchange": "all_to_all"}
    return {
        "engine, tp x dcp": (dcp, ""),
        "engine, tp x dcp, n-gram": (dcp, "ngram"),
        "engine, tp x dcp, DSPARK": (dcp, "dspark"),
        "engine, dp replicas x ep": ({"tp_size": ranks, "dp_size": ranks, "ep_size": ranks}, ""),
        "engine, pp": ({"pp_size": ranks}, ""),
        "engine, tp x ep, tokens sharded": (sharded, ""),
    }


def names(ranks: int) -> list[str]:
    """All cases of that many ranks but those in which ranks die, those first that others build on."""
    plain = list(layouts(ranks))
    return [*plain[:8], PIPELINE, LONG_KDA, LONG_MODEL, *engines(ranks), *plain[8:]]


# ---- the model --------------------------------------------------------------------------------


def write_model(folder: Path, device: str) -> None:
    """A seeded random checkpoint whose layers' outputs are small beside its embedding, and a draft for it.

    Its head likes to go on in short cycles of tokens, so that most steps have a clear best token, and n-grams repeat.
    Tokens are of four kinds, each of which likes a quarter of the experts: the first ones, the last ones, and those
    between them of even and of odd number, so that some visit one rank and others several.
    """
    config = KimiK3Config.tiny(**SIZES[device])
    random = torch.Generator(device).manual_seed(0)
    model = KimiK3ForCausalLM(config, dtype=torch.float32, device=device)
    assert config.text.moe is not None
    experts = torch.arange(config.text.moe.num_experts, device=device)
    quarter = 4 * experts // len(experts)
    liked_by = torch.where(quarter % 3 == 0, quarter, 1 + experts % 2)
    aims = torch.randn(4, config.text.hidden_size, generator=random, device=device)
    aims = torch.nn.functional.normalize(aims, dim=-1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            draw = torch.randn(p.shape, generator=random, device=device)
            if p.ndim == 1:
                small = 0.02 if "e_score" in name else 0.1
                p.copy_(small * draw + (1.0 if "norm" in name else 0.0))
                continue
            scale = 1.0 if "embed_tokens" in name else p.shape[-1] ** -0.5
            if name.endswith("block_sparse_moe.gate.weight"):
                p.copy_(0.2 * draw * scale + aims[liked_by] * (GAP / p.shape[-1] ** 0.5))
                continue
            if name.endswith(("o_proj.weight", "down_proj.weight", "routed_expert_up_proj.weight", "res_proj.weight")):
                scale *= STEADY
            p.copy_(draw * scale)
            if "embed_tokens" in name:
                kinds = torch.arange(len(p), device=device) % 4
                p += 2 * aims[kinds] * p.shape[-1] ** 0.5
                own = draw
        vocab, hidden = model.lm_head.weight.shape
        ids = torch.arange(vocab - vocab % CYCLE, device=device)
        after = ids - ids % CYCLE + (ids + 1) % CYCLE
        model.lm_head.weight[after] += own[ids] * (24 / hidden)
    model.to(torch.bfloat16).save_pretrained(folder / "model", experts="bf16" if device == "cpu" else "mxfp4")
    text, draft = config.text, folder / "draft"
    draft.mkdir()
    hf = tiny_draft_config("inferact") | {
        "hidden_size": text.hidden_size, "target_hidden_size": text.hidden_size, "vocab_size": text.vocab_size,
        "intermediate_size": 2 * text.hidden_size, "max_position_embeddings": text.max_position_embeddings,
        "num_attention_heads": text.mla.num_heads, "num_key_value_heads": text.mla.num_heads,
    }  # fmt: skip
    shapes = make_draft(DraftConfig.from_hf(hf), dtype=torch.bfloat16, device="meta").named_parameters()
    tensors = {
        name: torch.randn(p.shape, generator=random, device=device).mul(p.shape[-1] ** -0.5).to(p.dtype)
        if p.ndim > 1
        else torch.ones(p.shape, dtype=p.dtype)
        for name, p in shapes
    }
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    (draft / "config.json").write_text(json.dumps(hf), encoding="utf-8")
    (folder / "ready").touch()


def load(job: Job, mesh: Mesh, dtype: torch.dtype | None = None) -> KimiK3ForCausalLM:
    """A rank's part of the checkpoint."""
    place = torch.device("cuda", torch.cuda.current_device()) if job.device == "cuda" else torch.device("cpu")
    folder, dtype = Path(job.folder) / "model", dtype or job.dtype
    return KimiK3ForCausalLM.from_pretrained(folder, mesh=mesh, dtype=dtype, device=place, progress=False)


# ---- steps ------------------------------------------------------------------------------------


class Reference(NamedTuple):
    """One rank's steps.

    Attributes:
        logits: in fp32 by the reference kernels, of every token of every step.
        routes: the experts it chose.
        one: error of one rank in the dtype of the layouts with these experts, and the largest change of a lead.
        free: the same with experts of its own choice.
    """

    logits: list[torch.Tensor]
    routes: list[torch.Tensor]
    one: tuple[float, float]
    free: tuple[float, float]


def steps_of(device: str, replica: int) -> list[tuple[str, tuple[int, int]]]:
    """Mode and new tokens of the two requests of a replica; replicas differ."""
    prompts, chunk = ((23, 5), (9, 2)) if device == "cpu" else ((700, 130), (256, 40))
    if replica % 2:
        prompts, chunk = (prompts[1], prompts[0] // 2), (chunk[1], 1)
    return [("prefill", prompts), ("prefill", chunk), ("verify", (3, 2)), *[("decode", (1, 1))] * 4]


class Case:
    """A replica on one rank: pools of its own, and the steps over them."""

    def __init__(self, job: Job, model: KimiK3ForCausalLM, mesh: Mesh, replica: int) -> None:
        self.model, self.mesh, self.device = model, mesh, model.device
        text = model.config.text
        self.steps = steps_of(job.device, replica)
        self.page = PAGE[job.device]
        most = max(map(sum, zip(*[new for _, new in self.steps], strict=True))) + 8
        self.width = -(-most // self.page)
        sizes = CacheConfig(num_pages=2 * self.width, num_slots=2, page_size=self.page, block_size=3)
        self.pools = HybridPool(
            text, sizes, dtype=model.dtype, device=self.device, tp_size=mesh.tp.size, layers=model.model.layer_range
        )
        random = torch.Generator().manual_seed(replica)
        self.ids = [torch.randint(text.vocab_size, (most,), generator=random) for _ in range(2)]
        self.cached = [0, 0]

    def batch(self, mode: Any, lengths: tuple[int, int]) -> Batch:
        new = [ids[c : c + n] for ids, c, n in zip(self.ids, self.cached, lengths, strict=True)]
        size = self.mesh.dcp.size
        made = Batch.of(
            lengths,
            mode=mode,
            cached_tokens=self.cached,
            slots=[1, 2],
            page_tables=[[1 + i * self.width + j for j in range(self.width)] for i in range(2)],
            page_size=self.page * size,
            input_ids=torch.cat(new).to(self.device),
        )
        made.place_rows(self.page, dcp_size=size, dcp_rank=self.mesh.dcp.rank)
        if mode != "verify":  # which leaves the state where it was
            self.cached = [c + n for c, n in zip(self.cached, lengths, strict=True)]
        return made

    def tap(self, batch: Batch, routes: torch.Tensor | None, *, record: bool = False) -> RouteTap | None:
        """Give a batch the experts to take, or room to note them."""
        if record:
            text = self.model.config.text
            assert text.moe is not None
            shape = (batch.num_tokens, text.num_layers - len(text.dense_layers), text.moe.top_k)
            batch.routes = RouteTap(torch.zeros(shape, dtype=torch.int32, device=self.device), replay=False)
        elif routes is not None:
            batch.routes = RouteTap(routes.to(self.device), replay=True)
        return batch.routes

    def run(
        self, routes: list[torch.Tensor] | None = None, *, record: bool = False, only: tuple[str, ...] = ()
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Logits of all tokens of every step, and the experts that were noted."""
        outs, noted = [], []
        for i, (mode, lengths) in enumerate(self.steps):
            batch = self.batch(mode, lengths)
            if only and mode not in only:
                continue
            tap = self.tap(batch, routes[i] if routes else None, record=record)
            outs.append(self.model(batch, self.pools).float())
            if tap is not None and record:
                noted.append(tap.ids)
        return outs, noted

    def captured(self, routes: torch.Tensor | None) -> tuple[bool, float]:
        """Whether a captured decode step gives the bits of an eager one, and its milliseconds.

        Raises:
            RuntimeError: something waits for the device, which a graph cannot.
        """
        batch = self.batch("decode", (1, 1))
        self.tap(batch, routes)
        batch.replica_tokens = (2,) * self.mesh.dp.size  # else the replicas ask each other
        kept = self.pools.kda.state.clone(), self.pools.kda.conv.clone()

        def forward() -> torch.Tensor:
            return self.model(batch, self.pools)

        def restore() -> None:
            self.pools.kda.state.copy_(kept[0])
            self.pools.kda.conv.copy_(kept[1])

        eager = forward().clone()
        restore()
        graph, out = capture(forward, self.device, torch.cuda.graph_pool_handle())
        restore()
        graph.replay()
        torch.cuda.synchronize()
        same = bool(out.equal(eager))
        begin = time.perf_counter()
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        return same, (time.perf_counter() - begin) / 20 * 1e3

    def eager_ms(self, routes: torch.Tensor | None) -> float:
        """Milliseconds of a decode step without a graph."""
        batch = self.batch("decode", (1, 1))
        self.tap(batch, routes)
        for i in range(6):
            if i == 1:
                _wait(self.device)
                begin = time.perf_counter()
            self.model(batch, self.pools)
        _wait(self.device)
        return (time.perf_counter() - begin) / 5 * 1e3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def error_of(want: list[torch.Tensor], got: list[torch.Tensor]) -> float:
    """RMS error of the worst step, over the RMS of its logits."""
    errors = [
        float(((a.double() - b.double()).square().sum() / a.double().square().sum()).sqrt())
        for a, b in zip(want, got, strict=True)
    ]
    return max(errors, key=lambda e: float("inf") if e != e else e)  # a NaN is the worst


def losses(want: list[torch.Tensor], got: list[torch.Tensor]) -> tuple[float, float]:
    """Error of the worst step, and the largest change of the best token's lead, over the RMS of a step's logits."""
    changes = []
    for a, b in zip(want, got, strict=True):
        first, second = a.topk(2, -1).indices.unbind(-1)
        leads = [(x.gather(-1, first[:, None]) - x.gather(-1, second[:, None])) for x in (a, b)]
        changes.append(float((leads[0] - leads[1]).abs().max() / a.square().mean().sqrt()))
    return error_of(want, got), max(changes)


def best_tokens(want: list[torch.Tensor], got: list[torch.Tensor], noise: float) -> tuple[int, int]:
    """How many tokens whose lead is beyond `noise` are the same, and how many there are."""
    equal = clear = 0
    for a, b in zip(want, got, strict=True):
        top = a.topk(2, -1).values
        sure = top[:, 0] - top[:, 1] > noise * a.square().mean().sqrt()
        equal += int((a.argmax(-1) == b.argmax(-1))[sure].sum())
        clear += int(sure.sum())
    return equal, clear


# ---- one rank ---------------------------------------------------------------------------------


class Rank:
    """One process: what it knows of one rank, and the cases that it takes part in."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        self.world = Mesh.create(ParallelConfig(tp_size=job.ranks), job.backend, timeout_s=120).tp
        self._references: dict[int, Reference] = {}

    def mesh(self, sizes: dict[str, Any]) -> Mesh:
        config = ParallelConfig(**{"overlap_shared_experts": self.job.overlap, **sizes})
        return Mesh.create(config, self.job.backend, timeout_s=120)

    def run(self, name: str) -> Result:
        """Run a case by its name."""
        if name in layouts(self.job.ranks):
            return self.layout(layouts(self.job.ranks)[name])
        if name in engines(self.job.ranks):
            return self.engine(*engines(self.job.ranks)[name])
        return {PIPELINE: self.pipeline, LONG_KDA: self.long_sequence, LONG_MODEL: self.long_prompts}[name]()

    def reference(self, replica: int) -> Reference:
        """Computed once; kept on the disk for a process that takes over."""
        if replica in self._references:
            return self._references[replica]
        file = Path(self.job.folder) / f"reference.{replica}.{self.rank}.pt"
        if not file.exists():
            job, single = self.job, Mesh.single()
            with use_backend("reference"):
                logits, routes = Case(job, load(job, single, torch.float32), single, replica).run(record=True)
            one = free = (0.0, 0.0)
            if job.dtype != torch.float32 or job.device == "cuda":  # kernels round otherwise in fp32, too
                model = load(job, single)
                one = losses(logits, Case(job, model, single, replica).run(routes)[0])
                free = losses(logits, Case(job, model, single, replica).run()[0])
            torch.save(tuple(Reference(logits, routes, one, free)), file)
        self._references[replica] = Reference(*torch.load(file))
        return self._references[replica]

    def layout(self, sizes: dict[str, Any]) -> Result:
        """All steps of a layout."""
        mesh, job = self.mesh(sizes), self.job
        want = self.reference(mesh.dp.rank)
        own = mesh.config.shards_tokens  # ranks see parts of the tokens, and cannot be told
        routes, (base, noise) = (None, want.free) if own else (want.routes, want.one)
        model = load(job, mesh)
        case = Case(job, model, mesh, mesh.dp.rank)
        begin = time.perf_counter()
        got, _ = case.run(routes)
        first = time.perf_counter() - begin
        error = error_of(want.logits, got)
        equal, clear = best_tokens(want.logits, got, max(CLEAR * noise, EXACT))
        last = None if routes is None else routes[-1]
        graph, eager, captured = "", case.eager_ms(last), 0.0
        if self.job.device == "cuda" and can_replay(mesh):
            same, captured = case.captured(last)
            graph = "yes" if same else "NO"
        # partial sums are rounded once more
        allowed = max(EXACT, 1.5 * base)
        good = error <= allowed and equal == clear and graph != "NO"
        return Result(good, error, base, equal, clear, graph, eager, captured, f"first pass {first:.1f} s")

    def pipeline(self) -> Result:
        """Micro-batches through the stages: four prompts at once against one after the other."""
        mesh = self.mesh({"pp_size": self.job.ranks})
        model = load(self.job, mesh)
        case = Case(self.job, model, mesh, 0)
        length = case.steps[0][1][1]
        parts = [Batch.pack([ids[i : i + length].to(case.device)]) for ids in case.ids for i in (0, 7)]
        alone = [model(part) for part in parts]
        _wait(case.device)
        times = [time.perf_counter()]
        for run in (lambda: [model(part) for part in parts], lambda: model.pipeline(parts)):
            together = run()
            _wait(case.device)
            times.append(time.perf_counter())
        error = error_of(alone, together)
        note = f"one by one {(times[1] - times[0]) * 1e3:.1f} ms, together {(times[2] - times[1]) * 1e3:.1f} ms"
        return Result(error <= 1e-6, error, note=note)

    def long_sequence(self) -> Result:
        """KDA over one sequence that is split over the ranks, against one rank."""
        cpu, device = self.job.device == "cpu", torch.device(self.job.device)
        heads, keys, length = (2, 16, 300) if cpu else (12, 128, 16384)
        random = torch.Generator().manual_seed(1)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=random).to(device)

        wide = [draw(length, heads, keys) for _ in range(4)] + [draw(length, heads)]
        wide[3] -= 9  # a state that lasts from rank to rank
        params = KDAParams(draw(heads) * 0.1, draw(heads, keys), -5.0)
        facts = {"params": params, "scale": keys**-0.5, "slots": torch.ones(1, dtype=torch.int32, device=device)}

        def run(dtype: torch.dtype, begin: int, end: int, **group: Any) -> tuple[torch.Tensor, torch.Tensor]:
            state = torch.zeros(2, heads, keys, keys, device=device)
            cu = torch.tensor([0, end - begin], dtype=torch.int32, device=device)
            call = kda_context_parallel if group else kda_chunk
            out = call(*[x[begin:end].to(dtype) for x in wide], state=state, cu_seqlens=cu, **facts, **group)
            return out, state[1]

        with use_backend("reference"):
            exact = run(torch.float32, 0, length)
        ((begin, end),) = split_tokens([length], self.job.ranks, self.rank)
        seconds = []
        for _ in range(2):  # the first pass compiles
            _wait(device)
            seconds = [time.perf_counter()]
            whole = run(self.job.dtype, 0, length)
            _wait(device)
            seconds.append(time.perf_counter())
            mine = run(self.job.dtype, begin, end, group=self.world)
            _wait(device)
            seconds.append(time.perf_counter())
        one = max(error_of([a], [b]) for a, b in zip(exact, whole, strict=True))
        error = max(error_of([exact[1]], [mine[1]]), error_of([exact[0][begin:end]], [mine[0]]) if end > begin else 0)
        note = f"{length} tokens, {heads} heads: {1e3 * (seconds[2] - seconds[1]):.2f} ms, "
        note += f"one rank {1e3 * (seconds[1] - seconds[0]):.2f} ms"
        return Result(error <= max(EXACT, 1.5 * one), error, one, note=note)

    def long_prompts(self) -> Result:
        """Prompts whose tokens are split over the ranks, each with the whole model: logits, states and latent rows."""
        lengths, page = ((150, 30), 4) if self.job.device == "cpu" else ((8192, 1000), 64)
        place, seconds = torch.device(self.job.device), {}

        def run(dtype: torch.dtype, group: Group | None = None) -> list[torch.Tensor]:
            mesh = Mesh.single() if group is None else Mesh.single().replace(cp=group)
            model = load(self.job, mesh, dtype)
            text, random = model.config.text, torch.Generator().manual_seed(2)
            ids = [torch.randint(text.vocab_size, (n,), generator=random).to(place) for n in lengths]
            width = -(-lengths[0] // page)
            sizes = CacheConfig(num_pages=2 * width, num_slots=2, page_size=page)
            tables = [[1 + i * width + j for j in range(width)] for i in range(2)]
            facts: dict[str, Any] = {"slots": [1, 2], "page_tables": tables, "page_size": page}
            for _ in range(2):  # the first pass compiles
                pools = HybridPool(text, sizes, dtype=dtype, device=place)
                _wait(place)
                begin = time.perf_counter()
                if group is None:
                    logits = model(Batch.of(lengths, input_ids=torch.cat(ids), **facts), pools, logits="last")
                else:
                    logits = prefill_split(lambda b, p=pools: model(b, p, logits="last"), ids, group, **facts)  # type: ignore[misc]
                _wait(place)
                seconds[dtype, group is None] = time.perf_counter() - begin
            kept = [pools.kda.state[:, 1:], pools.kda.conv[:, 1:], pools.latent.pages[:, 1:]]
            return [logits.float(), *[x.float() for x in kept]]

        with use_backend("reference"):
            exact = run(torch.float32)
        whole = run(self.job.dtype)
        mine = run(self.job.dtype, self.world)
        error, one = error_of(exact, mine), error_of(exact, whole)
        times = [1e3 * seconds[self.job.dtype, alone] for alone in (False, True)]
        note = f"{' and '.join(map(str, lengths))} tokens: {times[0]:.1f} ms, one rank {times[1]:.1f} ms"
        return Result(error <= max(EXACT, 1.5 * one), error, one, note=note)

    def engine(self, sizes: dict[str, Any], drafts: str) -> Result:
        """An engine that rank 0 leads against one on rank 0 alone: greedy tokens, also behind prefix hits."""
        draft = str(Path(self.job.folder) / "draft") if drafts == "dspark" else drafts
        page = PAGE[self.job.device]
        pools = CacheConfig(num_pages=128, num_slots=16, page_size=page, checkpoint_grid=4 * page)
        plain = EngineConfig(
            cache=pools, chunked_prefill_size=4 * page, max_running_requests=4, context_length=64 * page
        )
        spec = SpecConfig(draft=draft, block_size=None if drafts == "ngram" else 3) if drafts else None
        rules = dataclasses.replace(plain, spec=spec)
        model = load(self.job, self.mesh(sizes))
        if self.rank:
            follow(model, rules)
            return Result(True)
        want, alone = self.one_engine(plain)
        engine = (ReplicatedEngine if model.mesh.dp.size > 1 else Engine)(model, rules)
        got, seconds = self.converse(engine)
        runner = (engine.engine if isinstance(engine, ReplicatedEngine) else engine).runner
        note = f"{seconds * 1e3:.0f} ms, one rank {alone * 1e3:.0f} ms"
        if runner.graphs is not None:
            note += f"; {runner.graphs.reason or f'{runner.graphs.num_replays} replays'}"
        if isinstance(engine, Engine) and engine.speculation is not None:
            report = engine.speculation.report
            note += f"; {report.accepted} of {report.proposed} draft tokens accepted"
        engine.close()
        count = sum(map(len, want))
        equal = sum(a == b for x, y in zip(want, got, strict=True) for a, b in zip(x, y, strict=True))
        parted = self.parted(want, got)
        noise = max(2 * self.reference(0).free[1], EXACT)  # of both
        if parted:
            leads = ", ".join(f"{lead:.3f}" for lead in parted)
            note += f"; {len(parted)} texts part, at leads of {leads}, noise {noise:.3f} of the logits"
        good = all(abs(lead) <= noise for lead in parted)
        return Result(good, 0.0, 0.0, equal, count, note=note)

    def prompts(self) -> list[list[int]]:
        """Four, with a common beginning and cycles of tokens."""
        vocab, page = KimiK3Config.tiny(**SIZES[self.job.device]).text.vocab_size, PAGE[self.job.device]
        random = torch.Generator().manual_seed(5)
        common = torch.randint(vocab - 20, (5 * page,), generator=random).tolist()
        tails = [torch.randint(vocab - 20, (1 + i * page // 2,), generator=random).tolist() for i in range(4)]
        return [common + tail + [CYCLE * i + j for j in range(CYCLE)] * 2 for i, tail in enumerate(tails)]

    def converse(self, engine: Engine | ReplicatedEngine) -> tuple[list[list[int]], float]:
        """Tokens of two rounds, the second behind prefixes of the first; and seconds of a third one like the first."""
        params = SamplingParams(temperature=0, max_new_tokens=6 if self.job.device == "cpu" else 24, ignore_eos=True)
        prompts = self.prompts()
        first = [out.token_ids for out in engine.generate(prompts, params)]
        longer = [p + a + [9] for p, a in zip(prompts, first, strict=True)]
        again = [out.token_ids for out in engine.generate(longer, params)]
        (engine.check if isinstance(engine, ReplicatedEngine) else engine.cache.check)()
        engine.clear_cache()
        begin = time.perf_counter()
        engine.generate(prompts, params)
        return [*first, *again], time.perf_counter() - begin

    def one_engine(self, rules: EngineConfig) -> tuple[list[list[int]], float]:
        """What one rank answers, without speculation; kept on the disk."""
        file = Path(self.job.folder) / "engine.json"
        if not file.exists():
            engine = Engine(load(self.job, Mesh.single()), rules)
            file.write_text(json.dumps(self.converse(engine)))
            engine.close()
        tokens, seconds = json.loads(file.read_text())
        return tokens, seconds

    def parted(self, want: list[list[int]], got: list[list[int]]) -> list[float]:
        """For each text that parts, the lead there of one rank's token over the other one, over the logits' size.

        Computed in one pass over the whole text: negative where that agrees with the other ranks' token.
        """
        leads, model = [], None
        prompts = self.prompts()
        prompts += [p + a + [9] for p, a in zip(prompts, want, strict=False)]
        for prompt, a, b in zip(prompts, want, got, strict=True):
            if a == b:
                continue
            model = model or load(self.job, Mesh.single())
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y))
            ids = torch.tensor(prompt + a[:at], device=model.device)
            logits = model(Batch.pack([ids]))[-1].float()
            leads.append(float((logits[a[at]] - logits[b[at]]) / logits.square().mean().sqrt()))
        return leads


# ---- processes --------------------------------------------------------------------------------


def _start(job: Job, rank: int) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job.ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(job.port),
    }  # fmt: skip
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast stays off
    warnings.simplefilter("ignore")
    torch.set_grad_enabled(False)
    faulthandler.register(signal.SIGUSR1)  # where a rank hangs
    if job.device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(rank)


def work(job: Job, rank: int, pipe: Connection) -> None:
    """A process: take names of cases until there are no more, answer with a `Result` or a text."""
    _start(job, rank)
    while not (Path(job.folder) / "ready").exists():
        time.sleep(0.05)
    mine = None
    while True:
        try:
            name = pipe.recv()
        except EOFError:
            os._exit(1)
        if not name:
            os._exit(0)
        try:
            mine = mine or Rank(job, rank)
            answer: Result | str = mine.run(name)
        except ConfigError as error:
            answer = f"refused: {reason_of(error)}"
        except BaseException:
            answer = traceback.format_exc()
        gc.collect()
        pipe.send(answer)


def die(job: Job, rank: int, pipe: Connection, file: str) -> None:
    """A process that steps with the others until one of them is gone; its last words go to a file."""
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), 2)
    _start(job, rank)
    mesh = Mesh.create(ParallelConfig(tp_size=job.ranks), job.backend, timeout_s=120)
    mesh.watch(timeout_s=4)
    x = torch.ones(4, device=job.device)
    mesh.tp.all_reduce(x).cpu()
    pipe.send("ready")
    end = time.monotonic() + 60
    with contextlib.suppress(Exception):
        while time.monotonic() < end:
            mesh.tp.all_reduce(x).cpu()
    time.sleep(60)  # the connection broke: the watch says which rank is gone


def warm(job: Job, place: int, kind: str, modes: tuple[str, ...]) -> None:
    """A process that compiles the kernels of some steps, so that several are compiled side by side."""
    _start(job._replace(ranks=1), place)
    while not (Path(job.folder) / "ready").exists():
        time.sleep(0.05)
    echo, n = Echo(0, job.ranks), job.ranks
    meshes = {
        "one": Mesh.single(),
        "tp": Mesh(tp=echo, config=ParallelConfig(tp_size=n)),
        "dcp": Mesh(tp=echo, dcp=echo, config=ParallelConfig(tp_size=n, dcp_size=n)),
        "ep": Mesh(tp=echo, ep=echo, config=ParallelConfig(tp_size=n, ep_size=n)),
        "dp": Mesh(dp=echo, expert_tp=echo, config=ParallelConfig(tp_size=n, dp_size=n)),
    }
    if kind == "engine":
        one = Rank.__new__(Rank)
        one.job, one.rank = job, 0
        pools = CacheConfig(num_pages=128, num_slots=16, page_size=PAGE["cuda"], checkpoint_grid=4 * PAGE["cuda"])
        rules = EngineConfig(
            cache=pools,
            chunked_prefill_size=4 * PAGE["cuda"],
            max_running_requests=4,
            spec=SpecConfig(draft="ngram"),
            context_length=64 * PAGE["cuda"],
        )
        one.converse(Engine(load(job, Mesh.single()), rules))
        return
    mesh = meshes[kind]
    case = Case(job, load(job, mesh), mesh, 0)
    batches = [case.batch(mode, lengths) for mode, lengths in case.steps]
    for batch in batches:
        batch.replica_tokens = (batch.num_tokens,) * mesh.dp.size
        if batch.mode in modes:
            case.tap(batch, None, record=True)
            case.model(batch, case.pools)
    torch.cuda.synchronize()
