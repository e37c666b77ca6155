"""Time one KDA and one MLA layer of K3's shape, with their experts, sharded over the ranks of one host.

    python benchmarks/parallel.py --ranks 2                              # NCCL, bf16, MXFP4 experts
    python benchmarks/parallel.py --ranks 2 --backend gloo --size tiny   # on a CPU: counts only mean something

Starts one process a rank. For every layout: a decode step and a prefill, what a rank sends in each (counted, beside the
formula of `k3lib.parallel.traffic`), and how long its collectives take alone, one after the other.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from k3lib import Batch, KimiK3Config, KimiK3ForCausalLM, Mesh, ParallelConfig
from k3lib.cache import CacheConfig
from k3lib.cache.pools import HybridPool
from k3lib.expert_io import new_experts
from k3lib.layers import Experts
from k3lib.parallel.traffic import traffic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# layer 0 is dense; layers 1 (KDA) and 2 (MLA) have experts. An eighth of K3's experts, so that every layout fits.
THREE = {"num_hidden_layers": 3, "kda_layers": [1, 2], "full_attn_layers": [3], "attn_res_block_size": 12}
SIZES: dict[str, dict[str, Any]] = {
    "tiny": THREE,
    "k3": {
        **THREE, "hidden_size": 7168, "intermediate_size": 7168, "num_attention_heads": 96, "num_key_value_heads": 96,
        "num_heads": 96, "head_dim": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 112, "num_experts_per_token": 16,
        "moe_intermediate_size": 3072, "routed_expert_hidden_size": 3584, "vocab_size": 4096,
        "max_position_embeddings": 65536,
    },
}  # fmt: skip
STEPS = {"tiny": ((4, 24), (2, 16)), "k3": ((64, 4096), (2, 4096))}  # requests and context of a decode, of a prefill
PAGE = 64


class Counted:
    """A group that notes what is moved."""

    def __init__(self, group: Any, calls: list[tuple[str, Callable[[], Any], float]]) -> None:
        self.group, self.calls = group, calls
        self.rank, self.size = group.rank, group.size

    def _note(self, name: str, share: float, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        method = getattr(self.group, name)
        kept = torch.empty_like(x)
        self.calls.append((name, lambda: method(kept, *rest), x.nbytes * share))
        return method(x, *rest)

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
    return {
        "tp": {"tp_size": n},
        "tp, latent projections cut": {"tp_size": n, "shard_latent_projections": True},
        "tp x ep, all-reduce": {"tp_size": n, "ep_size": n},
        "tp x ep, all-to-all (tokens sharded)": {"tp_size": n, "ep_size": n, "moe_exchange": "all_to_all"},
        "dp attention x ep, all-to-all": {"tp_size": n, "dp_size": n, "ep_size": n, "moe_exchange": "all_to_all"},
        "tp x dcp, all-to-all": {"tp_size": n, "dcp_size": n},
        "tp x dcp, gather and reduce-scatter": {"tp_size": n, "dcp_size": n, "dcp_comm_backend": "ag_rs"},
        "tp x dcp, replicated queries": {"tp_size": n, "dcp_size": n, "dcp_replicate_q_proj": True},
    }


class Bench:
    """One layout on one rank."""

    def __init__(self, args: argparse.Namespace, sizes: dict[str, Any]) -> None:
        self.args = args
        self.device = torch.device("cuda", torch.cuda.current_device()) if args.backend == "nccl" else "cpu"
        self.dtype = torch.bfloat16 if args.backend == "nccl" else torch.float32
        self.layout = ParallelConfig(**sizes)
        self.calls: list[tuple[str, Callable[[], Any], float]] = []
        plain = Mesh.create(self.layout, args.backend)
        axes = {a: getattr(plain, a) for a in ("tp", "dp", "dcp", "ep", "expert_tp", "shared")}
        counted = {a: Counted(group, self.calls) if group.size > 1 else group for a, group in axes.items()}
        self.mesh = plain.replace(**counted)
        self.config = KimiK3Config.tiny(**SIZES[args.size])
        torch.manual_seed(0)
        self.model = KimiK3ForCausalLM(self.config, mesh=self.mesh, dtype=self.dtype, device=self.device)
        if args.backend == "nccl":
            self._pack()

    def _pack(self) -> None:
        """Random codes in place of the experts' weights."""
        for module in self.model.modules():
            if isinstance(module, Experts):
                c = module.config
                inner = module.end - module.begin
                made = new_experts(
                    len(module.held), "mxfp4", c.expert_width, inner, dtype=self.dtype, device=self.device
                )
                made.first_expert = module.first_place
                for codes, scale in ((made.w13, made.w13_scale), (made.w2, made.w2_scale)):
                    codes.random_(0, 256)
                    scale.random_(116, 120)  # about 2^-9
                module.set_packed(made)

    def step(self, kind: str) -> tuple[Callable[[], Any], int]:
        """A step, and its tokens on this replica."""
        requests, context = STEPS[self.args.size][kind == "prefill"]
        dcp = self.layout.dcp_size
        width = -(-context // (PAGE * dcp)) + 1
        sizes = CacheConfig(num_pages=requests * width, num_slots=requests, page_size=PAGE)
        pools = HybridPool(self.config.text, sizes, dtype=self.dtype, device=self.device, tp_size=self.mesh.tp.size)
        new = 1 if kind == "decode" else context
        batch = Batch.of(
            [new] * requests,
            mode="decode" if kind == "decode" else "prefill",
            cached_tokens=[context if kind == "decode" else 0] * requests,
            slots=list(range(1, requests + 1)),
            page_tables=[list(range(1 + i * width, 1 + (i + 1) * width)) for i in range(requests)],
            page_size=PAGE * dcp,
            input_ids=torch.randint(self.config.text.vocab_size, (new * requests,)).to(self.device),
        )
        batch.place_rows(PAGE, dcp_size=dcp, dcp_rank=self.mesh.dcp.rank)
        batch.replica_tokens = (batch.num_tokens,) * self.layout.dp_size
        return (lambda: self.model.hidden(batch, pools)), batch.num_tokens

    def seconds(self, run: Callable[[], Any], times: int) -> float:
        run()
        self._wait()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(times):
            run()
        self._wait()
        return (time.perf_counter() - begin) / times

    def _wait(self) -> None:
        if self.args.backend == "nccl":
            torch.cuda.synchronize()

    def run(self, name: str) -> None:
        for kind, times in (("decode", 20), ("prefill", 5)):
            run, tokens = self.step(kind)
            run()
            self.calls.clear()
            run()
            calls, sent = list(self.calls), sum(moved for _, _, moved in self.calls)
            whole = self.seconds(run, times)
            self.calls.clear()
            alone = self.seconds(lambda calls=calls: [again() for _, again, _ in calls], times)  # type: ignore[misc]
            kinds = traffic(self.config.text, self.layout, itemsize=self.dtype.itemsize, decode=kind == "decode")
            formula = sum(one.bytes_per_token for one in kinds) * tokens
            if dist.get_rank() == 0:
                rate = sent / alone / 1e9 if alone else 0.0
                print(
                    f"{name:38} {kind:8} {whole * 1e3:9.3f} ms, {len(calls):3} collectives alone {alone * 1e3:8.3f} ms "
                    f"({rate:6.1f} GB/s), sent {sent / 2**20:9.3f} MiB, formula {formula / 2**20:9.3f}",
                    flush=True,
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl" if torch.cuda.is_available() else "gloo")
    parser.add_argument("--size", choices=tuple(SIZES), default=None, help="default: k3 on GPUs, tiny on a CPU")
    parser.add_argument("--only", default="", help="layouts whose name contains this")
    args = parser.parse_args()
    args.size = args.size or ("k3" if args.backend == "nccl" else "tiny")
    if "RANK" in os.environ:
        if args.backend == "gloo":
            torch.set_num_threads(1)
        with torch.inference_mode():
            for name, sizes in layouts(int(os.environ["WORLD_SIZE"])).items():
                if args.only in name:
                    Bench(args, sizes).run(name)
        dist.destroy_process_group()
        return 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {**os.environ, "WORLD_SIZE": str(args.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast stays off
    command = [sys.executable, __file__, "--backend", args.backend, "--size", args.size, "--only", args.only]
    ranks = [subprocess.Popen(command, env={**common, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(args.ranks)]
    try:
        return max(process.wait() for process in ranks)
    finally:
        for process in ranks:
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
