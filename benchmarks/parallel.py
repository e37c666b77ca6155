"""Time one KDA and one MLA layer of K3's shape, with their experts, sharded over the ranks of one host.

    python -m benchmarks.parallel --ranks 2                            # NCCL, bf16, MXFP4 experts
    python -m benchmarks.parallel --ranks 2 --warm                     # compile kernels side by side, and end
    torchrun --nproc-per-node 2 -m benchmarks.parallel --device cpu    # gloo, tiny: only counts mean something

First the links: what a rank sends per second in each kind of collective, by size. Then, for every layout, decode steps
and a prefill, all ranks with the same tokens in all: the time of the step, eager and captured; what a rank sends in it,
counted, beside the formula of `k3lib.parallel.traffic`; how long its collectives take alone; and how long they would
take at the fastest rate that their kind reached on the links; then the collectives of the larger decode step one by
one.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import multiprocessing
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from k3lib import Batch, KimiK3Config, Mesh, ParallelConfig
from k3lib.cache import CacheConfig
from k3lib.cache.pools import HybridPool
from k3lib.capture import reason_of
from k3lib.layers.latent_moe import Experts
from k3lib.layers.linear import fuse
from k3lib.model import KimiK3Model
from k3lib.ops import ExpertWeights
from k3lib.parallel.traffic import traffic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Call = tuple[str, Callable[[], Any], float]  # kind, the collective once more, bytes that a rank sends

# layers 1 (KDA) and 2 (MLA) are built; layer 0 is not
THREE = {"num_hidden_layers": 3, "kda_layers": [1, 2], "full_attn_layers": [3], "attn_res_block_size": 12}
PAIR = range(1, 3)
SIZES: dict[str, dict[str, Any]] = {
    "tiny": THREE,
    "k3": {
        **THREE, "hidden_size": 7168, "intermediate_size": 33792, "num_attention_heads": 96, "num_key_value_heads": 96,
        "num_heads": 96, "head_dim": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 896, "num_experts_per_token": 16,
        "moe_intermediate_size": 3072, "routed_expert_hidden_size": 3584, "vocab_size": 4096,
        "max_position_embeddings": 65536,
    },
}  # fmt: skip
# requests of all replicas and tokens of each: cached ones in a decode step, new ones in a prefill
STEPS = {
    "tiny": (("decode", 4, 24), ("prefill", 2, 16)),
    "k3": (("decode", 2, 16384), ("decode", 32, 16384), ("prefill", 2, 4096)),
}
BYTES = {"tiny": (1 << 12, 1 << 16), "k3": (1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 26, 1 << 28)}
PAGE = 64


class Echo:
    """A group whose other ranks say what this one says: sizes are right, values are not, nothing is sent."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, x: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return x.clone()

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return torch.cat([x] * self.size, dim=dim)

    def reduce_scatter(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return x.chunk(self.size, dim)[self.rank].contiguous()

    def all_to_all(self, x: torch.Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> torch.Tensor:
        return x.clone() if sum(recv_counts) == x.shape[0] else x.new_zeros(sum(recv_counts), *x.shape[1:])


class Counted:
    """A group that notes what is moved."""

    def __init__(self, group: Any, calls: list[Call]) -> None:
        self.group, self.calls = group, calls
        self.rank, self.size = group.rank, group.size

    def _note(self, name: str, share: float, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        method = getattr(self.group, name)
        kept = torch.zeros_like(x)
        self.calls.append((name, lambda: method(kept, *rest), x.nbytes * share))
        found: torch.Tensor = method(x, *rest)
        return found

    def all_reduce(self, x: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return self._note("all_reduce", 2 * (self.size - 1) / self.size, x, op)

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return self._note("all_gather", self.size - 1, x, dim)

    def reduce_scatter(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return self._note("reduce_scatter", (self.size - 1) / self.size, x, dim)

    def all_to_all(self, x: torch.Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> torch.Tensor:
        away = 1 - send_counts[self.rank] / max(1, x.shape[0])
        return self._note("all_to_all", away, x, send_counts, recv_counts)


def layouts(n: int) -> dict[str, dict[str, Any]]:
    """Layouts of that many ranks."""
    return {
        "tp": {"tp_size": n},
        "tp x ep, all-reduce": {"tp_size": n, "ep_size": n},
        "tp x ep, all-to-all, tokens sharded": {"tp_size": n, "ep_size": n, "moe_exchange": "all_to_all"},
        "tp x dcp, all-to-all": {"tp_size": n, "dcp_size": n},
        "tp x dcp, gather and reduce-scatter": {"tp_size": n, "dcp_size": n, "dcp_comm_backend": "ag_rs"},
        "tp, latent projections cut": {"tp_size": n, "shard_latent_projections": True},
        "tp x dcp, replicated queries": {"tp_size": n, "dcp_size": n, "dcp_replicate_q_proj": True},
        "dp attention x ep, all-gather": {"tp_size": n, "dp_size": n, "ep_size": n},
        "dp attention x ep, all-to-all": {"tp_size": n, "dp_size": n, "ep_size": n, "moe_exchange": "all_to_all"},
        "tp x ep, shared experts never beside": {"tp_size": n, "ep_size": n, "overlap_shared_experts": "never"},
        "one rank": {},  # each rank alone with all of the layers and tokens
    }


def device_of(args: argparse.Namespace) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if args.device == "cuda" else torch.device("cpu")


def build(config: KimiK3Config, mesh: Mesh, device: torch.device) -> KimiK3Model:
    """A rank's part of the two layers with random weights; on a GPU in bf16 with MXFP4 experts."""
    gpu = device.type == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    model = KimiK3Model(config.text, mesh=mesh, layers=PAIR, dtype=dtype, device="meta")
    for module in model.modules():
        if gpu and isinstance(module, Experts):
            shapes = [module.w13.shape, module.w2.shape]
            codes = [torch.randint(0, 256, (*s[:2], s[2] // 2), dtype=torch.uint8, device=device) for s in shapes]
            scales = [torch.randint(114, 118, (*s[:2], s[2] // 32), dtype=torch.uint8, device=device) for s in shapes]
            packed = ExpertWeights(*codes, *scales, format="mxfp4", first_expert=module.first_place)
            module.set_packed(packed)
    for module in model.modules():
        for name, old in module.named_parameters(recurse=False):
            new = torch.empty(old.shape, dtype=old.dtype, device=device)
            if old.ndim > 1:
                new.normal_(0, old.shape[-1] ** -0.5)
            else:
                new.normal_(1.0 if "norm" in type(module).__name__.lower() else 0.0, 0.02)
            setattr(module, name, torch.nn.Parameter(new, requires_grad=False))
    fuse(model)
    return model.eval()


# ---- clocks -----------------------------------------------------------------------------------


class Clock:
    """Seconds of a call on all ranks together, on this kind of device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], Any], times: int) -> float:
        """Median of three rounds of `times` calls."""
        call()
        found = []
        for _ in range(3):
            self.wait()
            dist.barrier()
            self.wait()
            begin = time.perf_counter()
            for _ in range(times):
                call()
            self.wait()
            found.append((time.perf_counter() - begin) / times)
        return statistics.median(found)

    def captured(self, call: Callable[[], Any]) -> tuple[Callable[[], Any], str]:
        """A replay of a call, or the call itself and why it was not captured."""
        if self.device.type != "cuda":
            return call, "no graphs here"
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        self.wait()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                call()
        except RuntimeError as error:
            self.wait()
            return call, reason_of(error)
        return graph.replay, ""


# ---- links ------------------------------------------------------------------------------------


def links(args: argparse.Namespace, group: Any, clock: Clock) -> dict[str, float]:
    """Print how fast ranks send, by kind of collective and size; return the best bytes per second of each kind."""
    n, rank = group.size, group.rank
    best: dict[str, float] = {}

    def pair(x: torch.Tensor) -> None:
        """Ranks in twos send to each other; an odd one is idle."""
        other = rank ^ 1
        if other < n:
            back = torch.empty_like(x)
            ops = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, back, other)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

    kinds: dict[str, tuple[Callable[[torch.Tensor], Any], float]] = {
        "all_reduce": (group.all_reduce, 2 * (n - 1) / n),
        "all_gather": (lambda x: group.all_gather(x[: len(x) // n]), (n - 1) / n),
        "reduce_scatter": (group.reduce_scatter, (n - 1) / n),
        "all_to_all": (lambda x: group.all_to_all(x, [len(x) // n] * n, [len(x) // n] * n), (n - 1) / n),
        "send and receive": (pair, 1.0),
    }
    say(f"{'link':<18}" + " ".join(f"{size >> 10:>8} KiB    " for size in BYTES[args.size]) + " µs (GB/s a rank sends)")
    for kind, (call, share) in kinds.items():
        row = []
        for size in BYTES[args.size]:
            x = torch.zeros(size // 2 // n * n, dtype=torch.bfloat16, device=clock.device)
            count = 10 if size <= 1 << 23 else 4

            def several(x: torch.Tensor = x, call: Callable[..., Any] = call, count: int = count) -> None:
                for _ in range(count):
                    call(x)

            replay = several if call is pair else clock.captured(several)[0]
            seconds = clock.seconds(replay, 2) / count
            rate = share * x.nbytes / seconds
            best[kind] = max(best.get(kind, 0.0), rate)
            row.append(f"{seconds * 1e6:>8.1f} {f'({rate / 1e9:.1f})':<7}")
        say(f"{kind:<18}" + " ".join(row))
    return best


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


# ---- layouts ----------------------------------------------------------------------------------


class Bench:
    """One layout on one rank."""

    def __init__(self, args: argparse.Namespace, sizes: dict[str, Any], mesh: Mesh | None = None) -> None:
        self.args, self.device = args, device_of(args)
        self.layout = ParallelConfig(**{"overlap_shared_experts": args.overlap, **sizes})
        self.clock = Clock(self.device)
        self.calls: list[Call] = []
        if not sizes:
            mesh = Mesh.single()
        elif mesh is None:
            plain = Mesh.create(self.layout, "nccl" if args.device == "cuda" else "gloo")
            axes = {a: getattr(plain, a) for a in ("tp", "dp", "dcp", "ep", "expert_tp", "shared")}
            counted = {a: Counted(group, self.calls) if group.size > 1 else group for a, group in axes.items()}
            mesh = plain.replace(**counted)
        self.mesh = mesh
        self.config = KimiK3Config.tiny(**SIZES[args.size])
        torch.manual_seed(0)
        self.model = build(self.config, self.mesh, self.device)
        self.dtype = self.model.layers[1].input_layernorm.weight.dtype

    def step(self, kind: str, requests: int, tokens: int) -> tuple[Callable[[], Any], int]:
        """A step, and its tokens on this replica."""
        requests = max(1, requests // self.layout.dp_size)
        text, dcp, model = self.config.text, self.layout.dcp_size, self.model
        width = -(-tokens // (PAGE * dcp)) + 1
        sizes = CacheConfig(num_pages=requests * width, num_slots=requests, page_size=PAGE)
        tp_size = self.mesh.tp.size
        pools = HybridPool(text, sizes, dtype=self.dtype, device=self.device, tp_size=tp_size, layers=PAIR)
        decode = kind == "decode"
        new = 1 if decode else tokens
        batch = Batch.of(
            [new] * requests,
            mode="decode" if decode else "prefill",
            cached_tokens=[tokens if decode else 0] * requests,
            slots=list(range(1, requests + 1)),
            page_tables=[list(range(1 + i * width, 1 + (i + 1) * width)) for i in range(requests)],
            page_size=PAGE * dcp,
            device=self.device,
        )
        batch.place_rows(PAGE, dcp_size=dcp, dcp_rank=self.mesh.dcp.rank)
        batch.replica_tokens = (batch.num_tokens,) * self.layout.dp_size
        hidden = model.rows.shard(torch.randn(batch.num_tokens, text.hidden_size, device=self.device).to(self.dtype))
        bank = hidden.flip(0)[:, None].contiguous()

        def run() -> torch.Tensor:
            stream = model.run(model.start(hidden, bank=bank), batch, pools)
            return model.rows.gather(stream.read(model.output_read), batch.num_tokens)

        return run, batch.num_tokens

    def formula(self, kind: str) -> float:
        """Bytes that a rank sends per token, of these two layers and the gather behind them."""
        pair = dataclasses.replace(self.layout, pp_size=2, pp_partition=(PAIR.start, len(PAIR)))
        kinds = traffic(self.config.text, pair, itemsize=self.dtype.itemsize, decode=kind == "decode")
        return sum(one.bytes_per_token for one in kinds if one.name != "stage payload")

    def run(self, name: str, best: dict[str, float]) -> None:
        """Print a line for each step, and one about the collectives of a decode step."""
        details = ""
        for kind, requests, tokens in STEPS[self.args.size]:
            run, count = self.step(kind, requests, tokens)
            run()
            self.calls.clear()
            run()
            calls, sent = list(self.calls), sum(moved for _, _, moved in self.calls)
            times = 5 if kind == "decode" else 2
            eager = self.clock.seconds(run, times)
            # all-to-all exchanges ask the host how many rows come
            fixed = kind == "decode" and self.layout.moe_exchange == "all_reduce"
            again, why = self.clock.captured(run) if fixed else (run, "lengths of prompts, or of exchanges")
            step = eager if why else self.clock.seconds(again, times)
            alone, _ = self.clock.captured(lambda calls=calls: [call() for _, call, _ in calls])
            together = self.clock.seconds(alone, times)
            floor = sum(moved / best[one] for one, _, moved in calls if best.get(one))
            label = f"{kind} {requests} x {tokens}"
            graph = f"{step * 1e3:9.3f}" if not why else f"{'-':>9}"
            say(
                f"{name:36} {label:17} {eager * 1e3:9.3f} {graph} {len(calls):4} {together * 1e6:9.0f} "
                f"{floor * 1e6:9.1f} {sent / 2**20:10.3f} {self.formula(kind) * count / 2**20:10.3f}"
            )
            if kind == "decode":
                details = self._one_by_one(calls, best)
            self.calls.clear()
            del run, again, alone, calls
        say(f"    one by one in that decode step, µs: {details}")

    def _one_by_one(self, calls: list[Call], best: dict[str, float]) -> str:
        """What each collective of a step takes, and would take at the rate of its link."""
        groups: dict[tuple[str, int], list[int]] = collections.defaultdict(list)
        for i, (kind, _, moved) in enumerate(calls):
            groups[kind, round(moved)].append(i)
        agreed = [groups]  # ranks that send other numbers of rows would group otherwise
        dist.broadcast_object_list(agreed, src=0, device=self.device)
        parts = []
        for (kind, moved), same in agreed[0].items():

            def several(call: Callable[[], Any] = calls[same[0]][1]) -> None:
                for _ in range(10):
                    call()

            replay, _ = self.clock.captured(several)
            micro = self.clock.seconds(replay, 2) / 10 * 1e6
            floor = moved / best[kind] * 1e6 if best.get(kind) else 0.0
            parts.append(f"{len(same)} x {kind} {moved / 1024:.1f} KiB {micro:.0f} ({floor:.1f})")
        return ", ".join(parts)


# ---- processes --------------------------------------------------------------------------------


def bench(args: argparse.Namespace) -> None:
    """One rank."""
    backend = "nccl" if args.device == "cuda" else "gloo"
    if args.device == "cpu":
        torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    group = Mesh.create(ParallelConfig(tp_size=ranks), backend).tp
    device = device_of(args)
    say(f"{ranks} ranks, {backend}, {args.size}, torch {torch.__version__}")
    best = links(args, group, Clock(device)) if "links" in args.parts else {}
    if "layouts" not in args.parts:
        return
    say(
        f"\n{'layout':36} {'step':17} {'eager ms':>9} {'graph ms':>9} {'coll':>4} {'alone µs':>9} {'at link':>9} "
        f"{'sent MiB':>10} {'formula':>10}"
    )
    for name, sizes in layouts(ranks).items():
        if args.only not in name:
            continue
        try:
            Bench(args, sizes).run(name, best)
        except Exception as error:  # on all ranks alike, else they wait for each other
            print(f"{name}: rank {dist.get_rank()} failed: {reason_of(error)}", flush=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()


def warm_one(args: argparse.Namespace, place: int, sizes: dict[str, Any], kind: str) -> None:
    """Compile the kernels of one layout's steps of a kind."""
    torch.cuda.set_device(place)
    torch.set_grad_enabled(False)
    warnings.simplefilter("ignore")
    layout = ParallelConfig(**sizes)

    def echo(rows: list[list[int]]) -> Any:
        return Echo(0, len(rows[0]))

    made = Bench(args, sizes, Mesh.of(layout, echo))
    for one, requests, tokens in STEPS[args.size]:
        if one == kind:
            made.step(one, requests, tokens)[0]()
    torch.cuda.synchronize()


def warm(args: argparse.Namespace) -> None:
    """Compile in several processes at once; kernels are found in the cache of Triton afterwards."""
    spawn = multiprocessing.get_context("spawn")
    wanted = ("tp", "tp x ep, all-reduce", "tp x dcp, all-to-all", "dp attention x ep, all-gather")
    tasks = [(layouts(args.ranks)[name], kind) for name in wanted for kind in ("decode", "prefill")]
    started = []
    for i, (sizes, kind) in enumerate(tasks):
        started.append(spawn.Process(target=warm_one, args=(args, i % args.ranks, sizes, kind), daemon=True))
        started[-1].start()
    for process in started:
        process.join()
    print(f"kernels of {len(tasks)} kinds of steps were compiled: {[process.exitcode for process in started]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes to start, unless torchrun does")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=tuple(SIZES), default=None, help="default: k3 on GPUs, tiny on a CPU")
    parser.add_argument("--parts", nargs="*", default=["links", "layouts"], choices=("links", "layouts"))
    parser.add_argument("--only", default="", help="layouts whose name contains this")
    parser.add_argument("--overlap", choices=("graphs", "always", "never"), default="graphs", help="shared experts")
    parser.add_argument("--warm", action="store_true", help="compile kernels in several processes at once, and end")
    args = parser.parse_args()
    args.size = args.size or ("k3" if args.device == "cuda" else "tiny")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast stays off
    if args.warm:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # its processes end with this one
        warm(args)
        return 0
    if "RANK" in os.environ:
        warnings.simplefilter("ignore")
        with torch.inference_mode():
            bench(args)
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
        return 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {**os.environ, "WORLD_SIZE": str(args.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-m", "benchmarks.parallel", *sys.argv[1:]]
    ranks = [subprocess.Popen(command, env={**common, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(args.ranks)]
    try:
        return max(process.wait() for process in ranks)
    finally:
        for process in ranks:
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
