"""Leases: one request's claim on pages and a slot, and the prefix tree that they hit and feed. Pure Python.

Who owns what. A page has one reference for each lease and each tree node that lists it, a slot one for its lease or its
node. Copies are scheduled here and issued by whoever has the tensors (`take_ops`), in order and before the next forward
pass; until then their source and target have one reference more. So nothing can be handed out while somebody still
needs it, and eviction never touches what a request uses.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from k3lib.cache.allocator import PageAllocator, SlotAllocator
from k3lib.cache.prefix import MediaKey, Node, PrefixTree, common_length, token_keys
from k3lib.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["CacheEvent", "HybridAllocator", "Lease", "Op", "save_positions"]


class CacheEvent(NamedTuple):
    """A change of what can be matched. Stores and removes balance; "clear" removes everything of its kind.

    Attributes:
        kind: "page" (latent KV) or "checkpoint" (KDA state).
        action: "store", "remove" or "clear".
        tier: where, "device".
        tokens: length of the prefix at the end of the page, or the checkpoint's position.
        size: unit of the kind in tokens: page size or checkpoint grid.
        key: name of that prefix (`prefix_keys` computes it from tokens).
        parent: name of the prefix in front of this page or run; None at the start of a sequence.
    """

    kind: Literal["page", "checkpoint"]
    action: Literal["store", "remove", "clear"]
    tier: str
    tokens: int
    size: int
    key: str
    parent: str | None


class Op(NamedTuple):
    """Work on the pools that must be issued, in order, before the next forward pass.

    Attributes:
        kind: "zero" a slot, "copy_slot" all state of one slot to another, "copy_page", or "scrub_page" with zeros.
        source: 0 for the kinds without one.
        target: slot or page.
    """

    kind: Literal["zero", "copy_slot", "copy_page", "scrub_page"]
    source: int
    target: int


@dataclass(slots=True)
class _Scheduled:
    op: Op
    lease: Lease | None  # whose memory the target is; None = a checkpoint or memory that is about to be freed
    node: Node | None = None  # becomes ready when the copy was issued


@dataclass(slots=True, eq=False)
class Lease:
    """One request's memory. Made by `HybridAllocator.open`; read-only for others.

    Attributes:
        number: distinguishes leases in messages.
        slot: KDA state slot.
        pages: KV pages in the order of the context.
        tokens: ids of the committed context.
        cached_len: tokens of the prompt that need no prefill.
        kv_len: tokens of the prompt whose KV was found, with or without a state; for metrics.
        prompt_len: tokens of the prompt.
        branch: position at which the prompt leaves what is cached, on the checkpoint grid; 0 = none.
        namespace: tree it belongs to.
        in_flight: new tokens of a step that was described but not committed; None = none.
        publishes: whether what it computes is kept for others: not without a prefix cache, nor after a lease was
            discarded from which it may have come.
    """

    number: int
    slot: int
    pages: list[int]
    tokens: list[int]
    cached_len: int
    kv_len: int
    prompt_len: int
    branch: int
    namespace: str
    is_open: bool = True
    in_flight: int | None = None
    publishes: bool = True
    _keys: array[int] = field(default_factory=lambda: array("q"), repr=False)  # of the context, at least of the prompt
    _node: Node | None = field(default=None, repr=False)  # deepest node of the tree on this context, locked
    _saves: list[tuple[int, int]] = field(default_factory=list)  # (position, slot) that the step in flight writes
    _published: list[Node] = field(default_factory=list, repr=False)
    _passing: tuple[Node, int] | None = field(default=None, repr=False)  # checkpoint that a later one supersedes

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self.tokens)

    def _key_of(self, begin: int, end: int) -> array[int]:
        return self._keys[begin:end]


def save_positions(start: int, end: int, *, grid: int, prompt_len: int, branch: int = 0) -> list[int]:
    """Where a prefill step that advances a request from `start` to `end` tokens keeps its state.

    At the last multiple of the grid it reaches; at the last one that a resent prompt can resume from; and at the
    branch point.
    """
    wanted = {end // grid * grid, (prompt_len - 1) // grid * grid, branch}
    return sorted(p for p in wanted if start < p <= end)


class HybridAllocator:
    """Pages and slots of all requests, and what is cached of finished ones.

    A call that fails changes no lease and takes nothing; it may find out about a lack of room only for what can never
    be had by evicting cached prefixes, since those give way to requests.
    """

    def __init__(
        self,
        num_pages: int,
        num_slots: int,
        page_size: int,
        *,
        checkpoint_grid: int = 512,
        track_interval: int | None = None,
        keep_turn_ends: bool = True,
        prefix_cache: bool = True,
        listener: Callable[[CacheEvent], None] | None = None,
    ) -> None:
        """Make an allocator with everything free.

        Args:
            num_pages, num_slots: without the null page and the null slot.
            page_size: tokens a page.
            checkpoint_grid: states are kept at multiples of so many tokens.
            track_interval: the same during decode; None = `checkpoint_grid`, 0 = never.
            keep_turn_ends: keep the last state of a closed lease, at its exact length.
            prefix_cache: False never matches and keeps nothing.
            listener: called with every `CacheEvent`.

        Raises:
            ConfigError: a size below 1.
        """
        for name, value in (
            ("page_size", page_size), ("checkpoint_grid", checkpoint_grid), ("track_interval", track_interval)
        ):  # fmt: skip
            least = 0 if name == "track_interval" else 1
            if value is not None and value < least:
                raise ConfigError(f"{name} must be >= {least}, got {value}")
        self.page_size = page_size
        self.checkpoint_grid = checkpoint_grid
        self.track_interval = checkpoint_grid if track_interval is None else track_interval
        self.keep_turn_ends = keep_turn_ends
        self.prefix_cache = prefix_cache
        self.pages = PageAllocator(num_pages)
        self.slots = SlotAllocator(num_slots)
        self.tree = PrefixTree(page_size, named=listener is not None)
        self.leases: dict[int, Lease] = {}
        self.counters: Counter[str] = Counter()
        self._listener = listener
        self._numbers = itertools.count(1)
        self._ticks = itertools.count(1)
        self._ops: list[_Scheduled] = []
        self._states: OrderedDict[Node, None] = OrderedDict()  # nodes with a state, next victim first
        self._leaves: list[tuple[int, int, Node]] = []  # heap; entries may be out of date

    # -- leases ---------------------------------------------------------------------------------------------------

    def open(
        self, prompt_ids: Sequence[int], *, namespace: str = "", media: Sequence[MediaKey] = (), reuse: bool = True
    ) -> Lease:
        """Take a slot for a request and what is cached of its prompt: KV up to a token after which a state was kept.

        At least one token is left to compute. Restoring is scheduled, see `take_ops`: a copy of the state and of a
        partly filled last page, or zeroing the slot.

        Args:
            prompt_ids: the prompt, or all tokens so far of a request that was preempted.
            namespace: only what was cached under the same one can match.
            media: spans of the prompt that are images.
            reuse: False computes everything anew.

        Raises:
            ConfigError: an empty prompt, bad ids or bad spans.
            CapacityError: no slot, or no page for the copy, can be had.
        """
        tokens = list(prompt_ids)
        if not tokens:
            raise ConfigError("open: the prompt is empty")
        keys = token_keys(tokens, media)
        found = self.tree.longest(namespace, keys, len(keys) - 1) if reuse and self.prefix_cache else None
        hit = found.node if found is not None else None
        if hit is not None:
            hit.locks += 1  # pinned before anything is taken
        try:
            self._make_room(pages=1 if hit is not None and hit.end % self.page_size else 0, slots=1, spare=hit)
        except CapacityError:
            if hit is None:
                raise
            self._unlock(hit)
            if self.leases or self._ops:
                raise
            # nobody will ever give a page back: the hit itself stands in the way
            return self.open(tokens, namespace=namespace, media=media, reuse=False)
        cached = hit.end if hit is not None else 0
        kv_len = found.kv_len if found is not None else 0
        branch = kv_len // self.checkpoint_grid * self.checkpoint_grid
        lease = Lease(
            next(self._numbers), 0, [], tokens[:cached], cached, kv_len, len(tokens),
            branch if branch > cached else 0, namespace, publishes=self.prefix_cache,
        )  # fmt: skip
        lease._keys, lease._node = keys, hit
        self._restore(lease, hit)
        self.leases[lease.number] = lease
        if found is not None and found.deepest is not None:
            still_there = found.deepest.parent is not None  # it may have made room for this lease
            self._touch(found.deepest if still_there else hit, hit)
        self.counters.update(lookups=1, prompt_tokens=len(tokens), hit_tokens=cached, kv_tokens=kv_len)
        return lease

    def grow(self, lease: Lease, tokens: int) -> None:
        """Reserve pages for `tokens` beyond the committed length; calling it twice reserves once.

        Raises:
            CapacityError: the pages cannot be had; nothing was taken.
        """
        self._check_open(lease)
        if tokens < 0:
            raise ConfigError(f"grow: tokens must be >= 0, got {tokens}")
        missing = self.pages_to_grow(lease, tokens)
        if not missing:
            return
        if missing > self.pages.num_free:
            try:
                self._make_room(pages=missing)
            except CapacityError:
                node = lease._node
                if node is None:
                    raise
                # the last resort: cached pages that are held only because this request came from there
                node.locks -= 1
                self._used(node, node.last_used)
                try:
                    self._make_room(pages=missing)
                except CapacityError:
                    node.locks += 1
                    raise
                lease._node = None  # what follows is published from the root on
                if node.parent is not None:
                    self._prune(node)
        lease.pages += self.pages.take(missing)

    def pages_to_grow(self, lease: Lease, tokens: int) -> int:
        """Pages that `grow` would have to take."""
        over = len(lease.tokens) + tokens - len(lease.pages) * self.page_size
        return -(-over // self.page_size) if over > 0 else 0

    def begin(self, lease: Lease, tokens: int, *, saves: bool) -> list[tuple[int, int]]:
        """Note that a step of `tokens` new ones is being described, and reserve slots for the states it should keep.

        Returns:
            `(offset, slot)`: after how many of the new tokens the state goes to which slot. A state for which there is
            no slot is left out.
        """
        self._check_open(lease)
        self.check_room(lease, tokens)
        self._forget_saves(lease)
        lease.in_flight = tokens
        if not saves:
            return []
        if lease.publishes:
            start = lease.length
            for position in save_positions(
                start, start + tokens, grid=self.checkpoint_grid, prompt_len=lease.prompt_len, branch=lease.branch
            ):
                if (slot := self._spare_slot()) is not None:
                    lease._saves.append((position, slot))
        return [(position - lease.length, slot) for position, slot in lease._saves]

    def accept(self, lease: Lease, tokens: int) -> list[tuple[int, int]]:
        """Shorten the step in flight to its first `tokens`, of which a verify step found that they hold.

        Returns:
            `(offset, slot)` as from `begin`: states to keep on the way, at multiples of the track interval.

        Raises:
            ConfigError: no step is in flight, or it has fewer tokens, or none are accepted.
        """
        self._check_open(lease)
        if lease.in_flight is None or not 1 <= tokens <= lease.in_flight:
            raise ConfigError(f"lease {lease.number}: {tokens} tokens accepted of a step of {lease.in_flight or 0}")
        self._forget_saves(lease)
        lease.in_flight = tokens
        start, interval = lease.length, self.track_interval
        if lease.publishes and interval:
            for position in range((start // interval + 1) * interval, start + tokens + 1, interval):
                if (slot := self._spare_slot()) is not None:
                    lease._saves.append((position, slot))
        return [(position - start, slot) for position, slot in lease._saves]

    def commit(self, lease: Lease, ids: Sequence[int]) -> None:
        """Count `ids` as context: their KV and state have been written, or will be before anything else is issued.

        Publishes the states that the step kept. Where the new length is on the grid and no state was kept, a copy of
        the running one is scheduled.

        Raises:
            ConfigError: the lease has no room for them, or the step that was described had another length.
        """
        self._check_open(lease)
        if len(ids) == 1 and self._commit_one(lease, ids[0]):
            return
        ids = list(ids)
        self.check_room(lease, len(ids))
        if lease.in_flight is not None and lease.in_flight != len(ids):
            raise ConfigError(
                f"lease {lease.number}: the step in flight has {lease.in_flight} tokens and its state stands behind "
                f"all of them, commit got {len(ids)}"
            )
        keys = token_keys(ids)
        start, end = lease.length, lease.length + len(ids)
        lease.tokens += ids
        # what was computed counts, whatever the prompt said; but inside a media span ids say nothing
        promised = lease._keys[start:end]
        if promised and min(promised) < 0:
            keys[: len(promised)] = array("q", [p if p < 0 else k for p, k in zip(promised, keys, strict=False)])
        lease._keys[start:end] = keys
        lease.in_flight = None
        saves, lease._saves = lease._saves, []
        for position, slot in saves:
            if lease.publishes:
                self._publish(lease, position, slot)
            else:
                self.slots.drop([slot])
        on_grid = self.track_interval > 0 and end % self.track_interval == 0
        if lease.publishes and ids and on_grid and end not in {p for p, _ in saves}:
            self._copy_running(lease)

    def _commit_one(self, lease: Lease, token: int) -> bool:
        """`commit` of a decoded token that nothing else comes with; False if this is not one."""
        length = len(lease.tokens)
        if lease._saves or lease.in_flight not in (None, 1) or len(lease._keys) != length:
            return False
        interval = self.track_interval
        if type(token) is not int or not 0 <= token < 1 << 63 or (interval and (length + 1) % interval == 0):
            return False
        if length >= len(lease.pages) * self.page_size:
            return False
        lease._keys.append(token)
        lease.tokens.append(token)
        lease.in_flight = None
        return True

    def close(self, lease: Lease, *, donate: bool = True) -> None:
        """Give the memory back. Legal at any moment; a second call does nothing.

        Args:
            lease: the lease.
            donate: keep what was computed for later requests, the running state included, if it stands behind exactly
                the committed tokens.
        """
        if not lease.is_open:
            return
        self._check_open(lease)
        dropped, node = self._drop_ops(lease), lease._node
        self._forget_saves(lease)
        # a slot that was taken over needs no copy, and goes back to a node that has its pages
        restored = not dropped or (dropped == {"copy_page"} and node is not None and node.end == lease.length)
        whole = restored and lease.in_flight is None and lease.length > 0
        worth = self.keep_turn_ends or lease.length == lease.cached_len  # a state that was taken over goes back
        if donate and whole and worth and lease.publishes:
            self._publish(lease, lease.length, lease.slot, is_passing=False)
        else:
            self.slots.drop([lease.slot])
        self.pages.drop(lease.pages)
        if lease._node is not None:
            self._unlock(lease._node)
        del self.leases[lease.number]
        lease.is_open = False
        lease._node = lease._passing = None
        lease._published.clear()

    def discard(self, lease: Lease) -> None:
        """Close a lease whose contents are not to be trusted: its memory is zeroed first, and nothing of it can match.

        Neither can what other leases computed or will compute from it.
        """
        if not lease.is_open:
            return
        self._check_open(lease)
        written = set(lease.pages[lease.cached_len // self.page_size :])
        deepest = self.tree.longest(lease.namespace, lease._keys[: lease.length], lease.length).deepest
        for node in deepest.path() if deepest is not None else ():
            if node in lease._published or not written.isdisjoint(node.pages):
                self._cut_off(node)
                break
        for other in self.leases.values():
            if not written.isdisjoint(other.pages):
                other.publishes = False
        for page in lease.pages:
            if self.pages.refs(page) == 1:
                self._schedule(Op("scrub_page", 0, page), None)
        self._schedule(Op("zero", 0, lease.slot), None)
        self.close(lease, donate=False)

    def check_room(self, lease: Lease, tokens: int) -> None:
        """Refuse a step that the reserved pages cannot hold."""
        room = len(lease.pages) * self.page_size - len(lease.tokens)
        if tokens > room:
            raise ConfigError(
                f"lease {lease.number} has room for {room} more tokens, {tokens} are asked; call grow() first"
            )

    # -- copies ---------------------------------------------------------------------------------------------------

    @property
    def has_ops(self) -> bool:
        """Whether copies or zeroings wait to be issued."""
        return bool(self._ops)

    def take_ops(self) -> list[Op]:
        """Hand over all scheduled work; the caller issues it in order, before the next forward pass."""
        scheduled, self._ops = self._ops, []
        for entry in scheduled:
            self._settle(entry)
            if entry.node is not None and entry.node.slot == entry.op.target:
                entry.node.is_ready = True
                self._emit_checkpoint("store", entry.node)
        return [entry.op for entry in scheduled]

    def _schedule(self, op: Op, lease: Lease | None, node: Node | None = None) -> None:
        if op.kind in {"copy_slot", "zero"}:
            self.slots.share([slot for slot in (op.source, op.target) if slot])
        else:
            self.pages.share([page for page in (op.source, op.target) if page])
        self._ops.append(_Scheduled(op, lease, node))

    def _settle(self, entry: _Scheduled) -> None:
        op = entry.op
        pool = self.slots if op.kind in {"copy_slot", "zero"} else self.pages
        pool.drop([number for number in (op.source, op.target) if number])

    def _drop_ops(self, lease: Lease) -> set[str]:
        """Forget what was scheduled for a lease, and return which kinds that were."""
        mine = [entry for entry in self._ops if entry.lease is lease]
        if mine:
            self._ops = [entry for entry in self._ops if entry.lease is not lease]
            for entry in mine:
                self._settle(entry)
        return {entry.op.kind for entry in mine}

    def _restore(self, lease: Lease, hit: Node | None) -> None:
        """Give a new lease its slot and the pages of its hit. There is room."""
        if hit is None:
            (lease.slot,) = self.slots.take(1)
            self._schedule(Op("zero", 0, lease.slot), lease)
            return
        lease.pages = self.tree.pages_of(hit)
        self.pages.share(lease.pages)
        if hit.end % self.page_size:
            source = lease.pages[-1]
            (lease.pages[-1],) = self.pages.take(1)
            self._schedule(Op("copy_page", source, lease.pages[-1]), lease)
            self.pages.drop([source])
        assert hit.slot is not None, "a hit has a state"
        if self.slots.num_free:
            (lease.slot,) = self.slots.take(1)
            self._schedule(Op("copy_slot", hit.slot, lease.slot), lease)
        else:  # the last state that can be had is the hit itself: take it over, it comes back when the lease closes
            lease.slot = hit.slot
            self.slots.share([hit.slot])
            self._drop_state(hit)

    def _copy_running(self, lease: Lease) -> None:
        """Keep the running state of a decoding request, if there is a slot for it."""
        slot = self._spare_slot()
        if slot is None:
            return
        node = self._publish(lease, lease.length, slot, is_ready=False)
        if node.slot == slot:
            self._schedule(Op("copy_slot", lease.slot, slot), None, node)

    def _forget_saves(self, lease: Lease) -> None:
        if not lease._saves:
            return
        self.slots.drop([slot for _, slot in lease._saves])
        lease._saves.clear()
        # in_flight stays: the running state may have moved

    # -- publishing -----------------------------------------------------------------------------------------------

    def _publish(
        self, lease: Lease, position: int, slot: int, *, is_passing: bool = True, is_ready: bool = True
    ) -> Node:
        """Make the first `position` tokens of a lease matchable, with the state in `slot`, which goes to the tree."""
        node = lease._node if lease._node is not None else self.tree.root(lease.namespace)
        assert node.end <= position, "a lease publishes forwards"
        while node.end < position:
            node = self._step_down(lease, node, position)
        is_new = node.slot is None
        if is_new:
            self.slots.keep([slot])
            node.slot, node.is_ready = slot, is_ready
            self._states[node] = None
            if is_ready:
                self._emit_checkpoint("store", node)
            lease._published.append(node)
        self.slots.drop([slot])
        if lease._node is not node:
            node.locks += 1
            if lease._node is not None:
                self._unlock(lease._node)
            lease._node = node
        self._supersede(lease, node, is_passing=is_passing and is_new)
        return node

    def _step_down(self, lease: Lease, node: Node, position: int) -> Node:
        """The child of `node` on the context of a lease, cut or made so that it ends at `position` at most."""
        begin, size = node.end, self.page_size
        child = node.children.get(lease._keys[begin])
        if child is None:
            pages = lease.pages[begin // size : -(-position // size)]
            self.pages.keep(pages)
            child = self.tree.add(node, lease._key_of(begin, position), pages)
            self._used(child)
            self._emit_pages("store", child)
            return child
        shared = common_length(child.key, lease._keys, begin)
        shared = min(shared, position - begin)
        if shared == len(child.key):
            return child
        upper = self.tree.split(child, shared)
        if upper.end % size:
            self.pages.keep(upper.pages[-1:])  # both halves list it
            self._emit_cut(upper)
        return upper

    def _supersede(self, lease: Lease, node: Node, *, is_passing: bool) -> None:
        """Let the checkpoint that a request passed on its way go first, once there is a later one."""
        before, tick = lease._passing or (None, 0)
        if before is not None and before is not node and before in self._states:
            wanted = before.locks or len(before.children) > 1 or before.last_used != tick
            if not wanted:
                self._states.move_to_end(before, last=False)
        grid = self.checkpoint_grid
        kept = {(lease.prompt_len - 1) // grid * grid, lease.branch}
        lease._passing = (node, node.last_used) if is_passing and node.end not in kept else None

    # -- eviction -------------------------------------------------------------------------------------------------

    def _make_room(self, *, pages: int = 0, slots: int = 0, spare: Node | None = None) -> None:
        """Evict until so many pages and slots are free, or raise CapacityError and evict nothing.

        The state of `spare` counts as a slot that can be had, but is left for the caller to take.
        """
        enough = self.slots.num_free + self.slots.num_idle >= slots
        victims = self._page_victims(pages - self.pages.num_free) if enough else None
        if victims is None:
            raise CapacityError(
                f"need {pages} pages and {slots} slots; {self.pages.num_free} of {self.pages.count} pages and "
                f"{self.slots.num_free} of {self.slots.count} slots are free, and evicting cached prefixes does not "
                "suffice",
                needed_pages=pages,
                free_pages=self.pages.num_free,
                needed_slots=slots,
                free_slots=self.slots.num_free,
            )
        for node in victims:
            if node.slot is not None:
                self._drop_state(node)
            self._prune(node)
            self.counters["evicted_nodes"] += 1
        if slots and not self.slots.num_free:
            self._evict_state(locked=True, spare=spare)

    def _page_victims(self, count: int) -> list[Node] | None:
        """Leaves to evict, least recently used first, to get `count` pages; None if that is impossible."""
        if count <= 0:
            return []
        if count > self.pages.num_idle:
            return None
        victims: dict[Node, None] = {}
        taken: list[tuple[int, int, Node]] = []
        owners: dict[int, int] = {}
        lost: Counter[Node] = Counter()
        freed = 0
        parents: list[tuple[int, int, Node]] = []  # become leaves as their children go
        while freed < count:
            if parents and (not self._leaves or parents[0] < self._leaves[0]):
                node = heapq.heappop(parents)[2]
            elif self._leaves:
                entry = heapq.heappop(self._leaves)
                node = entry[2]
                if not self._is_victim(node) or entry[0] != node.last_used or node in victims:
                    continue  # out of date, or listed twice
                taken.append(entry)
            else:
                for entry in taken:
                    heapq.heappush(self._leaves, entry)
                return None
            victims[node] = None
            for page in node.pages:
                owners[page] = owners.get(page, self.pages.refs(page)) - 1
                freed += not owners[page]
            parent = node.parent
            assert parent is not None, "a root is never a victim"
            lost[parent] += 1
            if parent.parent is not None and not parent.locks and lost[parent] == len(parent.children):
                heapq.heappush(parents, (parent.last_used, next(self._ticks), parent))
        return [*victims]

    def _is_victim(self, node: Node) -> bool:
        return node.parent is not None and not node.children and not node.locks

    def _spare_slot(self) -> int | None:
        """A slot for a checkpoint, if one is free or an unused checkpoint can give way."""
        if not self.slots.num_free and not self._evict_state(locked=False):
            self.counters["skipped_checkpoints"] += 1
            return None
        return self.slots.take(1)[0]

    def _evict_state(self, *, locked: bool, spare: Node | None = None) -> bool:
        """Free one slot by dropping the least recently used state, of nodes on the path of requests only if need be."""
        later = None
        for node in self._states:
            assert node.slot is not None, "listed without a state"
            if node is spare or not self.slots.is_idle(node.slot):
                continue  # wanted, or about to be copied
            if node.locks:
                later = later or node
                continue
            break
        else:
            if not locked or later is None:
                return False
            node = later
        self.counters["evicted_checkpoints"] += 1
        self._drop_state(node)
        self._prune(node)
        return True

    def _drop_state(self, node: Node) -> None:
        assert node.slot is not None, "no state to drop"
        self.slots.release([node.slot])
        if node.is_ready:
            self._emit_checkpoint("remove", node)
        node.slot, node.is_ready = None, True
        del self._states[node]

    def _prune(self, node: Node) -> None:
        """Remove a leaf without state and without lease, then its parents as far as they are such leaves."""
        while self._is_victim(node) and node.slot is None:
            self._emit_pages("remove", node)
            self.pages.release(node.pages)
            node = self.tree.remove(node)
        if self._is_victim(node):
            self._used(node, node.last_used)

    def _cut_off(self, top: Node) -> None:
        """Remove a node and all below it. Leases that stand there go on, but publish nothing more."""
        below = [top]
        for node in below:
            below += node.children.values()
            if node.slot is not None:
                self._drop_state(node)
        gone = set(below)
        for lease in self.leases.values():
            if lease._node is not None and lease._node in gone:
                self._unlock(lease._node)
                lease._node, lease.publishes = None, False
        for node in below[::-1]:
            self._prune(node)

    def _unlock(self, node: Node) -> None:
        node.locks -= 1
        if node.parent is not None:
            self._prune(node)

    def _touch(self, deepest: Node | None, hit: Node | None) -> None:
        """Note a match: the KV of the whole path was used, but of the states only the one that was taken."""
        tick, node = next(self._ticks), deepest
        while node is not None:
            self._used(node, tick)
            node = node.parent
        if hit is not None and hit in self._states:
            self._states.move_to_end(hit)

    def _used(self, node: Node, tick: int | None = None) -> None:
        node.last_used = next(self._ticks) if tick is None else tick
        if self._is_victim(node):
            heapq.heappush(self._leaves, (node.last_used, next(self._ticks), node))
            if len(self._leaves) > 2 * self.tree.num_nodes + 64:
                leaves = {entry[2] for entry in self._leaves if self._is_victim(entry[2])}
                self._leaves = [(leaf.last_used, next(self._ticks), leaf) for leaf in leaves]
                heapq.heapify(self._leaves)

    def clear(self) -> int:
        """Forget everything that is cached; returns how many tokens of KV that were. Leases go on."""
        nodes = list(self.tree.nodes())
        tokens = sum(len(node.key) for node in nodes)
        for lease in self.leases.values():
            lease._node = lease._passing = None
            lease._published.clear()
        for node in nodes:
            if node.slot is not None:
                self.slots.release([node.slot])
                node.slot = None
            self.pages.release(node.pages)
            node.parent, node.locks = None, 0
        self._states.clear()
        self._leaves.clear()
        self.tree.clear()
        if self._listener is not None:
            self._listener(CacheEvent("checkpoint", "clear", "device", 0, self.checkpoint_grid, "", None))
            self._listener(CacheEvent("page", "clear", "device", 0, self.page_size, "", None))
        return tokens

    # -- events and checks ----------------------------------------------------------------------------------------

    def _emit_checkpoint(self, action: Literal["store", "remove"], node: Node) -> None:
        self.counters[f"{action}d_checkpoints"] += 1
        if self._listener is not None:
            parent = node.parent.name if node.parent is not None and node.start else None
            self._listener(
                CacheEvent("checkpoint", action, "device", node.end, self.checkpoint_grid, node.name, parent)
            )

    def _emit_pages(self, action: Literal["store", "remove"], node: Node) -> None:
        ends = self.tree.page_ends(node)
        self.counters[f"{action}d_pages"] += len(ends)
        if self._listener is None:
            return
        events, parent = [], node.parent.name if node.parent is not None and node.start else None
        for end, name in zip(ends, self.tree.names(node, ends), strict=True):
            events.append(CacheEvent("page", action, "device", end, self.page_size, name, parent))
            parent = name
        for event in events if action == "store" else reversed(events):
            self._listener(event)

    def _emit_cut(self, upper: Node) -> None:
        """The upper part of a run that was cut inside a page: its last page is one more."""
        self.counters["stored_pages"] += 1
        if self._listener is not None:
            begin = max(upper.start, (upper.end - 1) // self.page_size * self.page_size)
            parent = next(self.tree.names(upper, [begin])) if begin else None
            self._listener(CacheEvent("page", "store", "device", upper.end, self.page_size, upper.name, parent))

    @property
    def cached_pages(self) -> int:
        """Pages that only the prefix tree owns."""
        return self.pages.num_idle

    @property
    def cached_slots(self) -> int:
        """Slots that only the prefix tree owns."""
        return self.slots.num_idle

    def stats(self) -> dict[str, int]:
        """Counts: what is cached now, and what was looked up, hit, stored, removed, evicted and skipped so far."""
        names = (
            "lookups", "prompt_tokens", "hit_tokens", "kv_tokens", "stored_pages", "removed_pages",
            "stored_checkpoints", "removed_checkpoints", "evicted_nodes", "evicted_checkpoints", "skipped_checkpoints",
        )  # fmt: skip
        return {
            "leases": len(self.leases),
            "nodes": self.tree.num_nodes,
            "checkpoints": len(self._states),
            "cached_pages": self.cached_pages,
            "cached_slots": self.cached_slots,
            **{name: self.counters[name] for name in names},
        }

    def dump(self) -> dict[str, object]:
        """Leases, and the nodes of the tree with parents first."""
        return {
            "leases": {
                n: {"slot": x.slot, "pages": list(x.pages), "tokens": x.length, "cached_len": x.cached_len}
                for n, x in self.leases.items()
            },
            "tree": [
                {
                    "namespace": node.namespace, "start": node.start, "end": node.end, "pages": list(node.pages),
                    "slot": node.slot, "locks": node.locks,
                }
                for node in self.tree.nodes()
            ],
            "scheduled": [entry.op for entry in self._ops],
        }  # fmt: skip

    def check(self) -> None:
        """Raise AssertionError if a page or slot is lost, has a wrong count of owners, or the tree is inconsistent."""
        self.pages.check()
        self.slots.check()
        self.tree.check()
        nodes = list(self.tree.nodes())
        pages, slots = Counter[int](), Counter[int]()
        locks = Counter[Node]()
        for node in nodes:
            pages.update(node.pages)
            slots.update([node.slot] if node.slot is not None else [])
            assert node.slot is not None or node.children or node.locks, "a leaf without state that nobody uses"
            assert (node.slot is not None) == (node in self._states), "a state is not listed"
        assert len(self._states) == sum(slots.values()), "a state is listed twice or of a removed node"
        assert max(slots.values(), default=1) == 1, "a slot belongs to two nodes"
        kept_pages, kept_slots = pages.copy(), slots.copy()
        for lease in self.leases.values():
            self._check_lease(lease, locks)
            pages.update(lease.pages)
            slots.update([lease.slot, *(slot for _, slot in lease._saves)])
        for op in (entry.op for entry in self._ops):
            owned = slots if op.kind in {"zero", "copy_slot"} else pages
            owned.update(number for number in (op.source, op.target) if number)
        assert {n: self.pages.refs(n) for n in pages} == pages, "page references are wrong"
        assert {n: self.slots.refs(n) for n in slots} == slots, "slot references are wrong"
        assert len(pages) == self.pages.count - self.pages.num_free, "a taken page belongs to nobody"
        assert len(slots) == self.slots.count - self.slots.num_free, "a taken slot belongs to nobody"
        assert self.pages._kept == kept_pages, "pages of the tree are miscounted"
        assert self.slots._kept == kept_slots, "slots of the tree are miscounted"
        assert all(node.locks == locks[node] for node in nodes), "locks and leases disagree"
        assert set(locks) <= set(nodes), "a lease stands on a removed node"
        listed = {(entry[2], entry[0]) for entry in self._leaves}
        assert all((n, n.last_used) in listed for n in nodes if self._is_victim(n)), "a leaf can never be evicted"

    def _check_lease(self, lease: Lease, locks: Counter[Node]) -> None:
        assert lease.length <= len(lease.pages) * self.page_size, "committed tokens have no page"
        assert len(set(lease.pages)) == len(lease.pages), "a page occurs twice in a context"
        assert lease.cached_len <= lease.length, "a hit was lost"
        assert all(position > lease.length for position, _ in lease._saves), "a state is kept in the past"
        if (node := lease._node) is not None:
            locks[node] += 1
            assert node.end <= lease.length, "the tree is ahead of a lease"
            prefix = [key for part in node.path() for key in part.key]
            assert prefix == lease._keys[: node.end].tolist(), "a lease stands on a foreign path"

    def _check_open(self, lease: Lease) -> None:
        if self.leases.get(lease.number) is not lease:
            raise ConfigError(f"lease {lease.number} is closed, or belongs to another cache")
