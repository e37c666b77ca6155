"""Run a random model in every parallel layout on the GPUs of one host, and compare with one rank.

    python scripts/multi_gpu.py --ranks 2                                # NCCL, bf16, MXFP4 experts
    python scripts/multi_gpu.py --ranks 2 --backend gloo --size tiny     # on a CPU

Starts one process a rank. Prints one line a layout: the error of its logits against one rank in fp32 beside the error
of one rank in the same dtype, and the time of a prefill and of a decode step. Exit status 1 if a layout is off, or if a
rank fails.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

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
from k3lib.cache import CacheConfig
from k3lib.cache.pools import HybridPool
from k3lib.engine import follow
from k3lib.ops import KDAParams, kda_chunk
from k3lib.parallel import dcp
from k3lib.parallel.kcp import kda_context_parallel, split_tokens

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "mid": {
        "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16,
        "num_heads": 16, "head_dim": 128, "q_lora_rank": 512, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 32, "num_experts_per_token": 4,
        "moe_intermediate_size": 512, "routed_expert_hidden_size": 512, "vocab_size": 8192,
        "max_position_embeddings": 65536, "attn_res_block_size": 4,
    },
}  # fmt: skip
PAGE = 16


class Work(NamedTuple):
    """What is run: prompt lengths of the two requests of a replica, the second chunk over them, and decode steps."""

    prompts: tuple[int, int]
    chunk: tuple[int, int]
    steps: int


WORK = {"tiny": Work((23, 5), (9, 2), 3), "mid": Work((1500, 300), (512, 40), 20)}


def layouts(ranks: int) -> dict[str, dict[str, Any]]:
    """Layouts of that many ranks."""
    n = ranks
    found: dict[str, dict[str, Any]] = {
        "tp": {"tp_size": n},
        "tp, latent projections cut": {"tp_size": n, "shard_latent_projections": True},
        "tp x ep, all-reduce": {"tp_size": n, "ep_size": n},
        "tp x ep, all-to-all (tokens sharded)": {"tp_size": n, "ep_size": n, "moe_exchange": "all_to_all"},
        "dp attention, gather": {"tp_size": n, "dp_size": n},
        "dp attention x ep, all-to-all": {"tp_size": n, "dp_size": n, "ep_size": n, "moe_exchange": "all_to_all"},
        "tp x dcp, all-to-all": {"tp_size": n, "dcp_size": n},
        "tp x dcp, gather and reduce-scatter": {"tp_size": n, "dcp_size": n, "dcp_comm_backend": "ag_rs"},
        "tp x dcp, replicated queries": {"tp_size": n, "dcp_size": n, "dcp_replicate_q_proj": True},
        "pp": {"pp_size": n},
    }
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


def write_model(folder: Path, size: str) -> None:
    """A seeded random checkpoint with packed experts, and what every rank reads of it."""
    config = KimiK3Config.tiny(**SIZES[size])
    torch.manual_seed(0)
    model = KimiK3ForCausalLM(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("e_score_correction_bias"):
            parameter.data.normal_(std=0.1)
        elif name.endswith("A_log"):
            parameter.data.uniform_(-1, 1)
            parameter.data[config.text.kda.num_heads :] = 0
    model.to(torch.bfloat16).save_pretrained(folder, experts="bf16" if size == "tiny" else "mxfp4")


class Case:
    """The steps of one replica on one rank."""

    def __init__(self, model: KimiK3ForCausalLM, mesh: Mesh, work: Work, replica: int) -> None:
        self.model, self.mesh, self.work = model, mesh, work
        self.device = model.device
        text = model.config.text
        most = max(sum(lengths) for lengths in zip(work.prompts, work.chunk, strict=True)) + work.steps + 64
        self.width = -(-most // PAGE)
        pages = CacheConfig(num_pages=2 * self.width, num_slots=2, page_size=PAGE, block_size=3)
        self.pools = HybridPool(
            text,
            pages,
            dtype=model.dtype,
            device=self.device,
            tp_size=mesh.tp.size,
            layers=model.model.layer_range,
        )
        generator = torch.Generator().manual_seed(replica)
        self.ids = [torch.randint(text.vocab_size, (most,), generator=generator) for _ in work.prompts]
        self.cached = [0, 0]

    def batch(self, lengths: tuple[int, int], mode: Any = "prefill") -> Batch:
        new = [ids[c : c + n] for ids, c, n in zip(self.ids, self.cached, lengths, strict=True)]
        size = self.mesh.dcp.size
        made = Batch.of(
            lengths,
            mode=mode,
            cached_tokens=self.cached,
            slots=[1, 2],
            page_tables=[[1 + i * self.width + j for j in range(self.width)] for i in range(2)],
            page_size=PAGE * size,
            input_ids=torch.cat(new).to(self.device),
        )
        if size > 1:
            dcp.place_rows(made, PAGE, size, self.mesh.dcp.rank)
        if mode != "verify":  # which leaves the state where it was
            self.cached = [c + n for c, n in zip(self.cached, lengths, strict=True)]
        return made

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.model(batch, self.pools, logits="last")

    def run(self) -> tuple[list[torch.Tensor], dict[str, float]]:
        """Logits of every step, and seconds."""
        outs, seconds = [], {}
        for name, lengths in (("prefill", self.work.prompts), ("chunk", self.work.chunk)):
            batch = self.batch(lengths)
            begin = self._now()
            outs.append(self.forward(batch))
            seconds[name] = self._now() - begin
        outs.append(self.forward(self.batch((3, 2), "verify")))
        spent = 0.0
        for step in range(self.work.steps):
            batch = self.batch((1, 1), "decode")
            begin = self._now()
            outs.append(self.forward(batch))
            spent += self._now() - begin if step >= self.work.steps // 2 else 0.0
        seconds["decode"] = spent / (self.work.steps - self.work.steps // 2)
        return outs, seconds

    def run_captured(self) -> tuple[torch.Tensor, torch.Tensor, float]:
        """The next decode step eagerly and from a graph, and seconds of a replay.

        Raises:
            RuntimeError: something waits for the device, which a graph cannot.
        """
        batch = self.batch((1, 1), "decode")
        state = self.pools.kda.state.clone(), self.pools.kda.conv.clone()

        def restore() -> None:
            self.pools.kda.state.copy_(state[0])
            self.pools.kda.conv.copy_(state[1])

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            eager = self.forward(batch).clone()
            restore()
            torch.cuda.set_sync_debug_mode("error")
            try:
                self.forward(batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            restore()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = self.forward(batch)
        restore()
        graph.replay()
        torch.cuda.synchronize()
        found = captured.clone()
        begin = self._now()
        for _ in range(10):
            graph.replay()
        return eager, found, (self._now() - begin) / 10

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def error_of(want: list[torch.Tensor], got: list[torch.Tensor]) -> float:
    """RMS error of all logits over their RMS."""
    difference = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(want, got, strict=True))
    return (difference / sum(float(a.double().square().sum()) for a in want)) ** 0.5


class Rank:
    """One process: its reference, and the layouts it takes part in."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cuda", self.rank) if args.backend == "nccl" else torch.device("cpu")
        self.dtype = torch.bfloat16 if args.backend == "nccl" else torch.float32
        self.world = Mesh.create(ParallelConfig(tp_size=self.ranks), args.backend, timeout_s=120).tp
        self.work = WORK[args.size]
        self.failed = False
        self._references: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def worst(self, value: float) -> float:
        kind = self.device if self.device.type == "cuda" else "cpu"
        return float(self.world.all_reduce(torch.tensor([value], dtype=torch.float64, device=kind), "max"))

    def load(self, mesh: Mesh, dtype: torch.dtype) -> KimiK3ForCausalLM:
        folder = Path(self.args.folder)
        return KimiK3ForCausalLM.from_pretrained(folder, mesh=mesh, dtype=dtype, device=self.device, progress=False)

    def reference(self, replica: int, dtype: torch.dtype) -> list[torch.Tensor]:
        key = replica, dtype
        if key not in self._references:
            single = Mesh.single()
            self._references[key] = Case(self.load(single, dtype), single, self.work, replica).run()[0]
        return self._references[key]

    def line(self, name: str, error: float, one: float, *, allowed: float, more: str = "") -> None:
        """One result, the worst of all ranks."""
        error, one = self.worst(error), self.worst(one)
        good = error <= allowed
        self.failed |= not good
        verdict = "ok" if good else "OFF"
        self.say(f"{verdict:4} {name:38} error {error:.2e}, one rank {one:.2e}{more}")

    def layout(self, name: str, sizes: dict[str, Any]) -> None:
        mesh = Mesh.create(ParallelConfig(**sizes), self.args.backend, timeout_s=120)
        replica = mesh.dp.rank
        exact = self.reference(replica, torch.float32)
        one = error_of(exact, self.reference(replica, self.dtype))
        case = Case(self.load(mesh, self.dtype), mesh, self.work, replica)
        case.run()  # kernels and communicators are made on first use
        case = Case(case.model, mesh, self.work, replica)
        outs, seconds = case.run()
        times = f"; prefill {seconds['prefill'] * 1e3:.1f} ms, decode {seconds['decode'] * 1e3:.2f} ms"
        error = error_of(exact, outs)
        # sums in another order choose other experts for a few tokens, as other kernels would
        self.line(name, error, one, allowed=max(1e-4, 2 * self.worst(one)), more=times)
        # all-to-all and gathering ask the host how many rows come
        fixed = mesh.pp.size == mesh.dp.size == 1 and mesh.config.moe_exchange == "all_reduce"
        if self.device.type == "cuda" and fixed:
            try:
                eager, captured, spent = case.run_captured()
            except RuntimeError as error:  # on all ranks alike
                self.say(f"--   {name + ', captured':38} not possible: {str(error).splitlines()[0]}")
                return
            off = error_of([eager], [captured])
            self.line(f"{name}, captured", off, 0.0, allowed=1e-3, more=f"; decode {spent * 1e3:.2f} ms")

    def pipeline(self) -> None:
        """Micro-batches through the stages: four prompts at once against one after the other."""
        mesh = Mesh.create(ParallelConfig(pp_size=self.ranks), self.args.backend, timeout_s=120)
        model = self.load(mesh, self.dtype)
        case = Case(model, mesh, self.work, 0)
        length = self.work.prompts[1]
        parts = [Batch.pack([ids[i : i + length].to(self.device)]) for ids in case.ids for i in (0, 7)]
        alone = [model(part, logits="last") for part in parts]
        begin = case._now()
        [model(part, logits="last") for part in parts]
        middle = case._now()
        together = model.pipeline(parts, logits="last")
        end = case._now()
        more = f"; one by one {(middle - begin) * 1e3:.1f} ms, together {(end - middle) * 1e3:.1f} ms"
        self.line("pp, four micro-batches", error_of(alone, together), 0.0, allowed=1e-6, more=more)

    def long_sequence(self) -> None:
        """KDA over one sequence that is split over the ranks."""
        small = self.args.size == "tiny"
        heads, keys, length = (2, 16, 300) if small else (8, 128, 8192)
        generator = torch.Generator().manual_seed(1)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(self.device)

        wide = [draw(length, heads, keys) for _ in range(4)] + [draw(length, heads)]
        params = KDAParams(draw(heads) * 0.5, draw(heads, keys), -5.0)
        facts = {"params": params, "scale": keys**-0.5, "slots": torch.ones(1, dtype=torch.int32, device=self.device)}

        def whole(dtype: torch.dtype) -> list[torch.Tensor]:
            state = torch.zeros(2, heads, keys, keys, device=self.device)
            cu = torch.tensor([0, length], dtype=torch.int32, device=self.device)
            return [kda_chunk(*[x.to(dtype) for x in wide], state=state, cu_seqlens=cu, **facts), state[1]]

        ((begin, end),) = split_tokens([length], self.ranks, self.rank)
        state = torch.zeros(2, heads, keys, keys, device=self.device)
        cu = torch.tensor([0, end - begin], dtype=torch.int32, device=self.device)
        mine = [x[begin:end].to(self.dtype) for x in wide]
        out = kda_context_parallel(*mine, state=state, cu_seqlens=cu, group=self.world, **facts)
        exact, plain = whole(torch.float32), whole(self.dtype)
        one = max(error_of([a], [b]) for a, b in zip(exact, plain, strict=True))
        error = max(error_of([exact[1]], [state[1]]), error_of([exact[0][begin:end]], [out]) if end > begin else 0.0)
        self.line("kda context parallel prefill", error, one, allowed=max(1e-4, 2 * self.worst(one)))

    def engine(self, sizes: dict[str, Any]) -> None:
        """An engine that rank 0 leads against one on rank 0 alone: greedy tokens, and time of a token."""
        mesh = Mesh.create(ParallelConfig(**sizes), self.args.backend, timeout_s=120)
        small = self.args.size == "tiny"
        length, count = (20, 6) if small else (300, 32)
        pools = CacheConfig(num_pages=256, num_slots=16, page_size=PAGE, checkpoint_grid=64)
        rules = EngineConfig(cache=pools, chunked_prefill_size=128, max_running_requests=4, context_length=1024)
        model = self.load(mesh, self.dtype)
        if self.rank:
            follow(model, rules)
            self.worst(0.0)
            return
        prompts = [(torch.arange(length) * (7 + 2 * i) % 509).tolist() for i in range(4)]
        params = SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True)
        found = []
        for engine in (Engine(self.load(Mesh.single(), self.dtype), rules), Engine(model, rules)):
            engine.generate(prompts, params)  # kernels are compiled, graphs captured
            engine.clear_cache()
            begin = time.perf_counter()
            outs = engine.generate(prompts, params)
            found.append(([out.token_ids for out in outs], time.perf_counter() - begin))
            graphs = engine.runner.graphs
            engine.close()
        (one, alone), (other, together) = found
        firsts = sum(a[0] == b[0] for a, b in zip(one, other, strict=True))
        equal = sum(a == b for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))
        replays = "no graphs" if graphs is None else graphs.reason or f"{graphs.num_replays} replays"
        # greedy texts of a random model part ways at the first near tie
        good = equal == 4 * count if self.dtype == torch.float32 else firsts >= 3
        self.failed |= self.worst(float(not good)) > 0
        name = f"engine, {', '.join(f'{k}={v}' for k, v in sizes.items())}"
        self.say(
            f"{'ok' if good else 'OFF':4} {name:38} {equal} of {4 * count} tokens as on one rank, {firsts} of 4 first; "
            f"{together * 1e3:.0f} ms, one rank {alone * 1e3:.0f} ms; {replays}"
        )

    def run(self) -> int:
        wanted = layouts(self.ranks)
        self.say(f"{self.ranks} ranks, {self.args.backend}, {self.args.size} model, {str(self.dtype)[6:]}")
        for name, sizes in wanted.items():
            if self.args.only is None or self.args.only in name:
                self.layout(name, sizes)
        if self.args.only is None:
            self.pipeline()
            self.long_sequence()
            self.engine({"tp_size": self.ranks, "dcp_size": self.ranks})
        return int(self.failed)


def dies(args: argparse.Namespace) -> int:
    """The last rank ends inside a loop of steps; every other one must notice, and say so."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # an exception in place of the end of the process
    world = Mesh.create(ParallelConfig(tp_size=ranks), args.backend, timeout_s=20).tp
    x = torch.ones(4, device=torch.device("cuda", rank) if args.backend == "nccl" else "cpu")
    world.all_reduce(x)
    if rank == ranks - 1:
        os._exit(7)
    begin = time.monotonic()
    try:
        while time.monotonic() - begin < 60:
            world.all_reduce(x).cpu()
    except Exception as error:
        if rank == 0:
            print(f"ok   a rank that dies is noticed after {time.monotonic() - begin:.1f} s: {type(error).__name__}")
        return 0
    return 1


def worker(args: argparse.Namespace) -> None:
    """One rank. Leaves at once: with a dead rank nothing can be taken down in order."""
    warnings.simplefilter("ignore")
    if args.backend == "gloo":
        torch.set_num_threads(1)
    try:
        with torch.no_grad():
            code = dies(args) if args.dies else Rank(args).run()
        if not args.dies:
            dist.barrier()
    except BaseException:
        print(f"rank {os.environ['RANK']} failed:\n{traceback.format_exc()}", flush=True)
        code = 3
    sys.stdout.flush()
    os._exit(code)


def start(args: argparse.Namespace, folder: Path, *extra: str, limit_s: float) -> list[int]:
    """Start one process a rank and wait; if one fails, the others get a while and are ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, __file__, "--worker", "--folder", str(folder), "--backend", args.backend]
    command += ["--size", args.size, *(["--only", args.only] if args.only else []), *extra]
    common = {**os.environ, "WORLD_SIZE": str(args.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast stays off
    started = [
        subprocess.Popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(args.ranks)
    ]
    end = time.monotonic() + limit_s
    try:
        while any(process.poll() is None for process in started) and time.monotonic() < end:
            if any(process.poll() not in {None, 0} for process in started):
                end = min(end, time.monotonic() + 60)
            time.sleep(0.1)
        return [124 if process.poll() is None else process.returncode for process in started]
    finally:
        for process in started:
            process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--ranks", type=int, default=None, help="processes; default: one for each GPU")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl" if torch.cuda.is_available() else "gloo")
    parser.add_argument("--size", choices=tuple(SIZES), default=None, help="default: mid on GPUs, tiny on a CPU")
    parser.add_argument("--only", default=None, help="layouts whose name contains this")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for all layouts")
    parser.add_argument("--folder", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--dies", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.size = args.size or ("mid" if args.backend == "nccl" else "tiny")
    if args.worker:
        worker(args)
    args.ranks = args.ranks or (torch.cuda.device_count() if args.backend == "nccl" else 2)
    if args.backend == "nccl" and args.ranks > torch.cuda.device_count():
        print(f"--ranks {args.ranks} needs as many GPUs, found {torch.cuda.device_count()}")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), args.size)
        codes = start(args, Path(folder), limit_s=args.limit)
        last = start(args, Path(folder), "--dies", limit_s=90) if args.only is None and args.ranks > 1 else []
    if last and last != [0] * (args.ranks - 1) + [7]:
        print(f"OFF  ranks beside one that died ended with {last}")
    good = not any(codes) and last in ([], [0] * (args.ranks - 1) + [7])
    print(json.dumps({"ranks": args.ranks, "backend": args.backend, "ok": good, "exit": codes, "death": last}))
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
