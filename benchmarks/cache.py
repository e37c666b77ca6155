"""The cache: what its bookkeeping costs.

    python -m benchmarks.cache tree                 # match, insert and evict in prefix trees of 10^3 to 10^5 nodes

Nothing is computed and no tensor is made. Times are CPU time of one thread.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from typing import TYPE_CHECKING

from k3lib.cache import HybridAllocator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PAGE = GRID = 64
SHARED = 64  # prompts of one page that the others begin with


class Tree:
    """A prefix tree with a given number of short prompts, and room for `pages` more pages and `slots` more states."""

    def __init__(self, nodes: int, *, pages: int, slots: int, events: bool) -> None:
        self.random = random.Random(nodes)
        self.allocator = HybridAllocator(
            nodes + SHARED + pages,
            nodes + SHARED + slots,
            PAGE,
            checkpoint_grid=GRID,
            listener=(lambda event: None) if events else None,
        )
        self.shared = [self.tokens(PAGE) for _ in range(SHARED)]
        for prompt in self.shared:
            self.insert(prompt)
        for i in range(nodes - SHARED):
            self.insert(self.shared[i % SHARED] + self.tokens(PAGE))

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(1 << 17) for _ in range(count)]

    def insert(self, prompt: list[int]) -> None:
        """A whole request: what is cached is reused, the rest is one prefill step."""
        lease = self.allocator.open(prompt)
        new = prompt[lease.cached_len :]
        self.allocator.grow(lease, len(new))
        self.allocator.take_ops()
        self.allocator.begin(lease, len(new), saves=True)
        self.allocator.commit(lease, new)
        self.allocator.close(lease)

    def match(self, prompt: list[int]) -> None:
        """A request that is given up once it was admitted."""
        lease = self.allocator.open(prompt)
        self.allocator.take_ops()
        self.allocator.close(lease, donate=False)


def microseconds(call: Callable[[list[int]], None], prompts: Sequence[list[int]]) -> float:
    """CPU time of one call: the first decile, since others may use the machine."""
    times = []
    for prompt in prompts:
        start = time.thread_time_ns()
        call(prompt)
        times.append(time.thread_time_ns() - start)
    return statistics.quantiles(times, n=10)[0] / 1000


def measure(nodes: int, lengths: Sequence[int], repeats: int, *, events: bool) -> dict[tuple[str, int], float]:
    """Microseconds by operation and prompt length, in a tree of that many nodes."""
    pages = repeats * sum(-(-length // PAGE) for length in lengths)
    tree = Tree(nodes, pages=pages + PAGE, slots=4 * repeats * len(lengths), events=events)
    allocator, found = tree.allocator, {}
    gc.collect()
    gc.freeze()  # as k3lib-serve does
    for length in lengths:
        prompts = [tree.tokens(length) for _ in range(repeats)]
        found["insert", length] = microseconds(tree.insert, prompts)
        found["match", length] = microseconds(tree.match, [[*prompt, 0] for prompt in prompts])
    assert not allocator.stats()["removed_pages"], "there was not enough room"
    for what, pool, keep in (("evict a state", allocator.slots, 1), ("evict pages", allocator.pages, 0)):
        held = pool.take(pool.num_free - keep)  # as if other requests had them
        for length in lengths:
            prompts = [tree.tokens(length) for _ in range(repeats)]
            found[what, length] = microseconds(tree.insert, prompts)
        pool.drop(held)
    stats = allocator.stats()
    assert min(stats["evicted_nodes"], stats["evicted_checkpoints"]) >= repeats, "nothing was evicted"
    allocator.check()
    gc.unfreeze()
    return found


def tree(args: argparse.Namespace) -> None:
    """Print times by operation, prompt length and size of the tree, and how they grow with either."""
    columns = {n: measure(n, args.lengths, args.repeats, events=args.events) for n in args.nodes}
    small, large = min(args.nodes), max(args.nodes)
    short, long = min(args.lengths), max(args.lengths)
    print(f"microseconds a request, page {PAGE}, grid {GRID}, one prefill step; events: {args.events}")
    print(f"{'':<16}{'tokens':>8}" + "".join(f"{n:>10} nodes" for n in args.nodes) + f"{large // small:>8}x nodes")
    for name in ("match", "insert", "evict a state", "evict pages"):
        for length in args.lengths:
            times = [columns[n][name, length] for n in args.nodes]
            growth = columns[large][name, length] / columns[small][name, length]
            print(f"{name:<16}{length:>8}" + "".join(f"{t:>16.1f}" for t in times) + f"{growth:>13.2f}x")
        growths = [columns[n][name, long] / columns[n][name, short] for n in args.nodes]
        print(f"{'':<16}{long // short:>7}x" + "".join(f"{g:>15.1f}x" for g in growths))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("tree", help=tree.__doc__)
    command.add_argument("--nodes", type=int, nargs="*", default=[1000, 10_000, 100_000])
    command.add_argument("--lengths", type=int, nargs="*", default=[64, 512, 4096])
    command.add_argument("--repeats", type=int, default=100)
    command.add_argument("--events", action="store_true", help="with a listener for cache events")
    command.set_defaults(run=tree)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
