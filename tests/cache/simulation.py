"""What pages and slots would hold: a HybridAllocator driven without tensors, with its contents written down.

A row of a page stands for the KV of a token, which depends on all tokens before it, and so does a state. Both are
therefore written down as the whole sequence up to there, with the requests that had a part in computing it.
"""

from collections import Counter
from itertools import count
from typing import NamedTuple

from k3lib.cache import HybridAllocator
from k3lib.cache.prefix import prefix_keys, token_keys

__all__ = ["Held", "Router", "Run", "Simulation"]


class Held(NamedTuple):
    """Contents of a row or a slot: namespace and keys, and who computed them."""

    sequence: tuple
    writers: frozenset


ZERO = Held((), frozenset())


class Run:
    """What a request should be, computed from what was asked of it."""

    def __init__(self, lease, space, prompt, media):
        self.lease, self.space, self.media = lease, space, media
        self.promised = token_keys(prompt, media).tolist()
        self.keys = self.promised[: lease.cached_len]
        self.step = None  # (ids, saves) that were described and not committed
        self.has_run = False  # the step in flight has moved the state
        self.writers = frozenset()

    @property
    def sequence(self):
        return (self.space, *self.keys) if self.keys else ()

    @property
    def saves(self):
        return self.step[1] if self.step is not None else []

    def keys_of(self, ids):
        """Keys of further ids: inside an image those of the prompt."""
        promised = self.promised[len(self.keys) : len(self.keys) + len(ids)]
        return [p if p < 0 else i for i, p in zip(ids, [*promised, *[0] * len(ids)], strict=False)]


class Router:
    """Replays cache events and knows nothing else."""

    def __init__(self):
        self.stored = {"page": {}, "checkpoint": {}}

    def __call__(self, event):
        stored = self.stored[event.kind]
        assert event.tier == "device"
        if event.action == "clear":
            stored.clear()
        elif event.action == "store":
            assert event.key not in stored, "stored twice"
            stored[event.key] = event
        else:
            assert stored.pop(event.key).tokens == event.tokens, "removed what was not stored"

    def longest(self, prompt, space, media=()):
        """The longest hit of a prompt, as a router computes it."""
        names = prefix_keys(prompt, range(len(prompt)), namespace=space, media=media)
        return max((i for i, name in enumerate(names) if i and name in self.stored["checkpoint"]), default=0)


class Simulation:
    def __init__(self, num_pages, num_slots, page_size, **options):
        self.router = Router()
        self.allocator = HybridAllocator(num_pages, num_slots, page_size, listener=self.router, **options)
        self.size = page_size
        self.garbage = count()
        self.rows = {page: self.stale_page() for page in range(1, num_pages + 1)}
        self.slots = {slot: self.stale() for slot in range(1, num_slots + 1)}
        self.runs = []
        self.distrusted = set()  # numbers of discarded leases

    def stale(self):
        return Held(("stale", next(self.garbage)), frozenset())

    def stale_page(self):
        return [self.stale() for _ in range(self.size)]

    # ---- what an engine does

    def open(self, prompt, space="", media=(), *, reuse=True):
        lease = self.allocator.open(prompt, namespace=space, media=media, reuse=reuse)
        run = Run(lease, space, prompt, media)
        self.runs.append(run)
        return run

    def describe(self, run, ids, *, saves):
        reserved = self.allocator.begin(run.lease, len(ids), saves=saves)
        run.step = (ids, reserved)
        return reserved

    def issue(self):
        protected = self.protected()
        for op in self.allocator.take_ops():
            self.apply(op, self.rows, self.slots, protected)

    def apply(self, op, rows, slots, protected=((), ())):
        if op.kind in {"zero", "copy_slot"}:
            assert op.target not in protected[1], "a checkpoint is overwritten"
            slots[op.target] = ZERO if op.kind == "zero" else slots[op.source]
        else:
            assert not any((op.target, i) in protected[0] for i in range(self.size)), "cached KV is overwritten"
            rows[op.target] = self.stale_page() if op.kind == "scrub_page" else list(rows[op.source])

    def forward(self, run, ids, saves=()):
        """Run a step: writes rows, the states to keep and the running state. Scheduled work comes first."""
        self.issue()
        rows, slots = self.protected()
        lease, keys, before = run.lease, list(run.keys), self.slots[run.lease.slot]
        assert before.sequence == run.sequence, "the running state is not that of the committed tokens"
        writers = {run.lease.number} | before.writers
        for position in range(len(keys)):
            held = self.row(lease.pages, position)
            assert held.sequence == (run.space, *keys[: position + 1]), "the context lost its KV"
            writers |= held.writers
        run.writers = frozenset(writers)
        where = dict(saves)
        assert len({*where.values(), lease.slot}) == len(where) + 1, "two states in one slot"
        assert not {*where.values(), lease.slot} & slots, "a checkpoint is overwritten"
        for offset, key in enumerate(run.keys_of(ids), 1):
            page, i = lease.pages[len(keys) // self.size], len(keys) % self.size
            assert (page, i) not in rows, "cached KV is overwritten"
            keys.append(key)
            held = Held((run.space, *keys), run.writers)
            self.rows[page][i] = held
            if offset in where:
                self.slots[where[offset]] = held
        if ids:
            self.slots[lease.slot] = held

    def commit(self, run, ids):
        self.allocator.commit(run.lease, ids)
        run.keys += run.keys_of(ids)
        run.step, run.has_run = None, False

    def advance(self, run, ids, *, saves=True):
        """A whole step that has room."""
        reserved = self.describe(run, ids, saves=saves)
        self.forward(run, ids, reserved)
        self.commit(run, ids)
        return [offset for offset, _ in reserved]

    def close(self, run, *, donate=True):
        self.allocator.close(run.lease, donate=donate)
        self.runs.remove(run)

    def discard(self, run):
        self.distrusted.add(run.lease.number)
        self.allocator.discard(run.lease)
        self.runs.remove(run)

    # ---- what is true

    def row(self, pages, position):
        return self.rows[pages[position // self.size]][position % self.size]

    def nodes(self):
        """Nodes of the tree by their namespace and keys."""
        tree = self.allocator.tree
        return {(node.namespace, *(key for part in node.path() for key in part.key)): node for node in tree.nodes()}

    def states(self):
        """Sequences that can be resumed from, with their nodes."""
        return {name: node for name, node in self.nodes().items() if node.slot is not None and node.is_ready}

    def longest(self, prompt, space, media=()):
        """The longest hit: the deepest state that leaves a token to compute."""
        wanted, states = (space, *token_keys(prompt, media)), self.states()
        return max((n for n in range(1, len(prompt)) if wanted[: n + 1] in states), default=0)

    def protected(self):
        """Rows and slots that nobody may write: cached KV, and states that can be resumed from."""
        rows, slots = set(), set()
        for node in self.allocator.tree.nodes():
            first = node.start // self.size * self.size
            rows |= {(node.pages[(p - first) // self.size], p % self.size) for p in range(first, node.end)}
            if node.slot is not None and node.is_ready:
                slots.add(node.slot)
        return rows, slots

    def obtainable_pages(self, *, given_up=(), held=()):
        """Free pages, and those that come free by evicting all that no lease holds.

        Args:
            given_up: nodes that one lease less holds.
            held: nodes that are held besides.
        """
        allocator, locks = self.allocator, Counter(held)
        locks.subtract(given_up)
        stay = set()
        for node in allocator.tree.nodes():
            if node.locks + locks[node] > 0:
                stay.update(node.path())
        owners = Counter(page for node in allocator.tree.nodes() if node not in stay for page in node.pages)
        return allocator.pages.num_free + sum(allocator.pages.refs(page) == n for page, n in owners.items())

    def poison_free(self):
        """Nobody may rely on memory that is free."""
        for page in self.rows:
            if not self.allocator.pages.refs(page):
                self.rows[page] = self.stale_page()
        for slot in self.slots:
            if not self.allocator.slots.refs(slot):
                self.slots[slot] = self.stale()

    def check(self):
        self.allocator.check()
        self.check_counts()
        rows, slots = {page: list(held) for page, held in self.rows.items()}, dict(self.slots)
        scheduled = self.allocator.dump()["scheduled"]
        for op in scheduled:
            self.apply(op, rows, slots)
        for name, node in self.nodes().items():
            self.check_node(name, node, rows, slots)
        for run in self.runs:
            self.check_run(run, rows, slots)
        self.check_events()

    def check_counts(self):
        """Everything is free, cached or used, and used by exactly those who use it."""
        allocator = self.allocator
        scheduled = allocator.dump()["scheduled"]
        slots = {run.lease.slot for run in self.runs} | {slot for run in self.runs for _, slot in run.saves}
        pages = {page for run in self.runs for page in run.lease.pages}
        for op in scheduled:
            (slots if op.kind in {"zero", "copy_slot"} else pages).update({op.source, op.target} - {0})
        assert len(slots) + allocator.slots.num_free + allocator.cached_slots == allocator.slots.count
        assert len(pages) + allocator.pages.num_free + allocator.cached_pages == allocator.pages.count
        assert [run.lease for run in self.runs] == list(allocator.leases.values())

    def check_node(self, name, node, rows, slots):
        """A node holds the KV of exactly its tokens, and its state stands behind the last of them."""
        writers = set()
        pages = self.allocator.tree.pages_of(node)
        first = node.start // self.size * self.size
        own = {p: node.pages[(p - first) // self.size] for p in range(first, node.end)}
        for position in range(node.end):
            held = rows[pages[position // self.size]][position % self.size]
            assert held.sequence == name[: position + 2], "the tree lists a page with other tokens"
            writers |= held.writers
        for position, page in own.items():
            assert rows[page][position % self.size].sequence == name[: position + 2], "a run begins inside a page"
        if node.slot is not None:
            assert slots[node.slot].sequence == name, "a checkpoint of other tokens"
            writers |= slots[node.slot].writers
            assert not writers & self.distrusted, "what was discarded can match"
            # what is ready needs no scheduled copy
            assert not node.is_ready or self.slots[node.slot] == slots[node.slot]

    def check_run(self, run, rows, slots):
        lease = run.lease
        assert (lease.length, lease.is_open) == (len(run.keys), True)
        assert lease.in_flight == (len(run.step[0]) if run.step is not None else None)
        if not run.has_run:
            assert slots[lease.slot].sequence == run.sequence, "the running state is not that of the committed tokens"
        for position in range(len(run.keys)):
            held = rows[lease.pages[position // self.size]][position % self.size]
            assert held.sequence == (run.space, *run.keys[: position + 1]), "the context lost its KV"

    def check_events(self):
        """A router knows exactly what is cached."""
        tree, allocator = self.allocator.tree, self.allocator
        pages = {}
        for node in tree.nodes():
            ends = tree.page_ends(node)
            pages |= zip(tree.names(node, ends), ends, strict=True)
        states = {node.name: node.end for node in self.states().values()}
        for kind, size, want in (("page", self.size, pages), ("checkpoint", allocator.checkpoint_grid, states)):
            stored = self.router.stored[kind]
            assert {name: event.tokens for name, event in stored.items()} == want
            assert all(event.size == size for event in stored.values())
        stats = allocator.stats()
        assert stats["nodes"] == tree.num_nodes
        assert stats["checkpoints"] == sum(node.slot is not None for node in tree.nodes())
