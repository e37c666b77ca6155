"""The ranks of the process tests: `python process_worker.py NAMES OUT FOLDER`, with WORLD_SIZE and where to meet.

Imports once, then forks a process for each rank, with the environment of torchrun. Each check leaves its results in
OUT/<check>.<rank>.pt, or the text of its failure; what a rank writes to stderr is in OUT/<rank>.stderr. In the end
OUT/ends.json has the exit status of every rank, and when it ended.
"""

import asyncio
import itertools
import json
import os
import pathlib
import sys
import threading
import time
import traceback
import warnings

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # seeded.py

from seeded import draw
from worlds import Steps, converse, load, new_pool, ngrams, of_replica, part_of, rules, run_steps

from k3lib import AsyncEngine, Batch, Engine, Mesh, ParallelConfig, SamplingParams
from k3lib.engine import follow
from k3lib.errors import ConfigError
from k3lib.ops import KDAParams
from k3lib.parallel import dcp
from k3lib.parallel.kcp import kda_context_parallel, prefill_split, split_tokens

RANK = -1  # set in each rank
SIZE = int(os.environ["WORLD_SIZE"])


def refusal_of(call):
    """The message of what `call` refuses, or None."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    return None


def collectives(_golden):
    """What every method of a group gives, on ranks whose inputs are known to all."""
    group = Mesh.create(ParallelConfig(tp_size=SIZE)).tp
    parts = [draw(SIZE, 6, seed=rank) for rank in range(SIZE)]
    mine = parts[RANK]
    before = mine.clone()
    whole = torch.stack(parts)
    found = {
        "sum": group.all_reduce(mine).allclose(whole.sum(0)),
        "max": group.all_reduce(mine, "max").equal(whole.amax(0)),
        "gather 0": group.all_gather(mine).equal(torch.cat(parts)),
        "gather 1": group.all_gather(mine, dim=1).equal(torch.cat(parts, dim=1)),
        "gather fp8": group.all_gather(mine.to(torch.float8_e4m3fn))
        .float()
        .equal(torch.cat(parts).to(torch.float8_e4m3fn).float()),
        "gather bool": group.all_gather(mine > 0).equal(torch.cat(parts) > 0),
        "gather nothing": group.all_gather(mine[:0]).shape == (0, 6),
        "scatter 0": group.reduce_scatter(mine).allclose(whole.sum(0)[RANK : RANK + 1]),
        "scatter -1": group.reduce_scatter(draw(6, 2 * SIZE, seed=RANK), dim=-1).allclose(
            sum(draw(6, 2 * SIZE, seed=r) for r in range(SIZE))[:, 2 * RANK : 2 * RANK + 2], atol=1e-5
        ),
        "bf16": group.all_reduce(torch.ones(3, dtype=torch.bfloat16)).tolist() == [SIZE] * 3,
    }
    # rank r sends r rows to everybody; rank 0 sends nothing
    rows = group.all_to_all(mine[:1].expand(RANK * SIZE, 6), [RANK] * SIZE, list(range(SIZE)))
    found["to all"] = rows.equal(torch.cat([parts[r][:1].expand(r, 6) for r in range(SIZE)]))
    work = group.send(mine, (RANK + 1) % SIZE)
    found["ring"] = group.receive(torch.empty(SIZE, 6), (RANK - 1) % SIZE).equal(parts[RANK - 1])
    work.wait()
    found["broadcast"] = group.broadcast(mine.clone(), 1).equal(parts[1])
    found["inputs stay"] = mine.equal(before)
    weight = torch.ones(2, requires_grad=True)
    total = group.all_reduce(weight * 2).sum()
    found["no gradient"] = refusal_of(total.backward) is not None and weight.grad is None
    for name, call in {
        "odd scatter": lambda: group.reduce_scatter(torch.ones(SIZE + 1)),
        "wrong counts": lambda: group.all_to_all(mine, [1] * SIZE, [1] * (SIZE + 1)),
        "unknown op": lambda: group.all_reduce(mine, "product"),
    }.items():
        found[name] = refusal_of(call) is not None
    return found


def layouts(folder):
    """Which replica this rank is in, and the logits of its steps, in every layout that was asked for."""
    found = {}
    for name, sizes in json.loads(os.environ["LAYOUTS"]).items():
        mesh = Mesh.create(ParallelConfig(**sizes))
        replica = RANK % mesh.config.tp_size // mesh.config.attention_size
        whole = folder / os.environ.get("MODEL", "")
        model = part_of(whole, mesh, sizes) if "SHORT" in os.environ else load(whole, mesh)
        found[name] = replica, run_steps(model, mesh, Steps(*of_replica(replica)))
    return found


def split_prompts(folder):
    """Logits behind two prompts whose tokens are split over the ranks; the second is shorter than they are many."""
    group = Mesh.create(ParallelConfig(tp_size=SIZE)).world
    model = load(folder, Mesh.single().replace(cp=group))
    pools = new_pool(model, model.mesh)
    with torch.no_grad():
        return prefill_split(
            lambda batch: model(batch, pools, logits="last"),
            [torch.arange(13) * 7 % 512, torch.tensor([9])],
            group,
            slots=[1, 2],
            page_tables=[[1, 2, 3, 4], [5]],
            page_size=4,
            chunk=4,
        )


def engine(folder):
    """An engine of eight ranks with drafts: what rank 0 answers."""
    mesh = Mesh.create(ParallelConfig(tp_size=SIZE, dcp_size=SIZE))
    model = part_of(folder, mesh, {})
    if RANK:
        return follow(model, rules(ngrams()))
    leading = Engine(model, rules(ngrams()))
    try:
        return converse(leading)
    finally:
        leading.close()


def golden_greedy(golden):
    """Greedy tokens of packed checkpoints, cut over ranks."""
    found = {}
    for name, sizes in {
        "tiny_k3_dev_mxfp4": {"tp_size": 4, "ep_size": 2, "dcp_size": 2},
        "tiny_k3_wide_nvfp4": {"tp_size": 2, "ep_size": 2, "pp_size": 2},
    }.items():
        mesh = Mesh.create(ParallelConfig(**sizes))
        model = load(golden / name, mesh)
        for key, prompt in torch.load(os.environ["PROMPTS"])[name].items():
            found[name, key] = greedy(model, mesh, prompt, 6)
    return found


@torch.no_grad()
def greedy(model, mesh, prompt, count):
    pools, size = new_pool(model, mesh), mesh.dcp.size
    todo, cached, found, logits = prompt, 0, [], []
    for _ in range(count):
        batch = Batch.of(
            [len(todo)],
            mode="prefill" if cached == 0 else "decode",
            cached_tokens=[cached],
            slots=[1],
            page_tables=[list(range(1, 17))],
            page_size=4 * size,
            input_ids=todo,
        )
        if size > 1:
            dcp.place_rows(batch, 4, size, mesh.dcp.rank)
        logits.append(model(batch, pools, logits="last")[0])
        cached += len(todo)
        todo = logits[-1].argmax(-1, keepdim=True)
        found.append(int(todo))
    return found, torch.stack(logits)


def micro_batches(golden):
    """Four prompts that fill a pipeline of four stages at once, and two chunks of one prompt in order."""
    mesh = Mesh.create(ParallelConfig(pp_size=4))
    model = load(golden / "tiny_k3_dev", mesh)
    pools = new_pool(model, mesh)
    ids = torch.arange(40) * 7 % 512
    parts = [(1, 0, ids[:9]), (2, 0, ids[9:12]), (1, 9, ids[12:20]), (3, 0, ids[20:21])]
    batches = [
        Batch.of(
            [len(part)],
            cached_tokens=[cached],
            slots=[slot],
            page_tables=[list(range(6 * slot, 6 * slot + 6))],
            page_size=4,
            input_ids=part,
        )
        for slot, cached, part in parts
    ]
    with torch.no_grad():
        return model.pipeline(batches, pools, logits="last")


def long_sequence(_golden):
    """KDA over one sequence that is split over all ranks, with a bounded gate."""
    group = Mesh.create(ParallelConfig(tp_size=SIZE)).tp
    heads, keys, values, length = 2, 8, 4, 300
    tensors = [draw(length, heads, n, seed=i) for i, n in enumerate((keys, keys, values, keys))]
    beta = draw(length, heads, seed=9)
    params = KDAParams(draw(heads, seed=10), draw(heads, keys, seed=11), -5.0)
    ((begin, end),) = split_tokens([length], SIZE, RANK, chunk=32)
    state = draw(3, heads, values, keys, seed=12)
    out = kda_context_parallel(
        *[x[begin:end] for x in tensors],
        beta[begin:end],
        params=params,
        state=state,
        slots=torch.tensor([2], dtype=torch.int32),
        cu_seqlens=torch.tensor([0, end - begin], dtype=torch.int32),
        scale=keys**-0.5,
        group=group,
    )
    return out, state


def refusals(_golden):
    """Messages of what is refused on every rank, before anything is exchanged or after all know."""
    found = {}
    for name, call in {
        "world": lambda: Mesh.create(ParallelConfig(tp_size=2)),
        "other configuration": lambda: Mesh.create(ParallelConfig(tp_size=SIZE)).check_same(
            "config.json", "same" if RANK != 2 else "other"
        ),
    }.items():
        found[name] = refusal_of(call)
    Mesh.create(ParallelConfig(tp_size=SIZE)).check_same("config.json", "same")
    return found


def death(_golden):
    """The last rank dies inside a step; what the others see, and when, and who they are told is gone."""
    mesh, told, heard = Mesh.create(ParallelConfig(tp_size=SIZE), timeout_s=20), [], threading.Event()

    def hear(message):
        told.append(message)
        heard.set()

    mesh.watch(timeout_s=3, on_loss=hear if RANK else None)  # rank 0 does what a server would
    mesh.tp.all_reduce(torch.ones(2))
    if RANK == SIZE - 1:
        os._exit(7)
    begin = time.monotonic()
    try:
        while True:
            mesh.tp.all_reduce(torch.ones(2))
    except Exception as error:
        seconds = time.monotonic() - begin
        heard.wait(30)  # rank 0 ends here
        return type(error).__name__, str(error), seconds, told


def failure(folder):
    """A step fails on one rank; rank 0 has two requests, and waits for what ends it."""
    failing = int(os.environ["FAILS"])
    mesh = Mesh.create(ParallelConfig(pp_size=SIZE), timeout_s=90)
    mesh = mesh.replace(health=mesh.watch(timeout_s=90))
    model = load(folder, mesh)
    stages = itertools.count()
    run_stage = model.model.run_stage

    def runs_out_of_memory(*args, **options):
        if next(stages) == 3:
            raise torch.OutOfMemoryError("out of memory on purpose")
        return run_stage(*args, **options)

    if failing == RANK:
        model.model.run_stage = runs_out_of_memory
    if RANK:
        return follow(model, rules())
    seen = []
    leading = Engine(model, rules())
    step = leading.step

    def watched():
        try:
            return step()
        except Exception as error:
            seen.append(type(error).__name__)
            raise

    leading.step = watched
    server = AsyncEngine(leading)

    async def ask(prompt):
        params = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)
        return [out.finish async for out in server.generate(prompt, params)][-1]

    async def both():
        return await asyncio.gather(ask([1, 2, 3]), ask([4, 5]))

    begin = time.time()
    finishes = asyncio.run(both())
    torch.save((begin, finishes, seen[0]), pathlib.Path(sys.argv[2]) / "failure.0.pt")
    time.sleep(120)
    return "nothing ended rank 0"


def drafts(folders):
    """A conversation with an engine whose ranks share a draft, and everything that was proposed in it."""
    from test_draft_ranks import converse, spec  # noqa: PLC0415 - imports pytest

    mesh = Mesh.create(ParallelConfig(tp_size=SIZE, dcp_size=SIZE))
    model, rules = load(folders / "target", mesh), spec({"radixark": folders / "radixark"}, "radixark")
    if RANK:
        follow(model, rules)
        return None
    engine = Engine(model, rules)
    found = converse(engine)
    engine.close()
    return found


def run_checks(names, out, folder):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in names:
        try:
            result = globals()[name](folder)
        except BaseException:
            result = traceback.format_exc()
        torch.save(result, out / f"{name}.{RANK}.pt")
        if isinstance(result, str):
            os._exit(1)
    os._exit(0)  # groups with a dead rank cannot be taken down in order


def begin(rank, out):
    """A process of a rank."""
    global RANK
    RANK = rank
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.dup2(os.open(out / f"{rank}.stderr", os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())


def main():
    names, out, folder = sys.argv[1].split(","), pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
    ranks = {}
    for rank in range(SIZE):
        pid = os.fork()
        if not pid:
            begin(rank, out)
            run_checks(names, out, folder)
        ranks[pid] = rank
    codes, ends = [0] * SIZE, [0.0] * SIZE
    for _ in range(SIZE):
        pid, status = os.wait()
        codes[ranks[pid]], ends[ranks[pid]] = os.waitstatus_to_exitcode(status), time.time()
    (out / "ends.json").write_text(json.dumps([codes, ends]))


if __name__ == "__main__":
    main()
