"""The prefix tree: which tokens are cached, where their KV pages are, and after which of them a KDA state was kept.

A node stands for a run of tokens. It owns the pages of that run and at most one state: the one after its last token.
Pages have `page_size` tokens and nodes end anywhere, so a node may begin inside a page. It then has its own version of
that page, complete from the first token of the page on; along a path the version of the deeper node counts.
Pure Python.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING, NamedTuple

from k3lib.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Match", "MediaKey", "Node", "PrefixTree", "prefix_keys", "token_keys"]


class MediaKey(NamedTuple):
    """An image in a prompt: `length` tokens from `position` on, told apart by their content and not by their ids."""

    position: int
    length: int
    digest: bytes | str


def token_keys(tokens: Sequence[int], media: Sequence[MediaKey] = ()) -> array[int]:
    """The keys under which tokens are cached: their ids, and inside a media span a number made of digest and offset.

    Such a number is negative, so it never equals an id. Equal images give equal keys.

    Raises:
        ConfigError: a span that is empty, leaves the tokens or overlaps another one; an id below 0 or beyond 63 bits.
    """
    try:
        keys = array("q", tokens)
    except (TypeError, OverflowError) as error:
        raise ConfigError(f"token ids must be integers of at most 63 bits: {error}") from error
    if keys and min(keys) < 0:
        raise ConfigError(f"token ids must be >= 0, got {min(keys)}")
    end = 0
    for span in sorted(media, key=lambda span: span.position):
        if span.length < 1 or span.position < end or span.position + span.length > len(keys):
            raise ConfigError(
                f"media span of {span.length} tokens at {span.position} is empty, overlaps another one or leaves the "
                f"{len(keys)} tokens"
            )
        end = span.position + span.length
        digest = span.digest.encode() if isinstance(span.digest, str) else span.digest
        first = int.from_bytes(hashlib.blake2b(digest, digest_size=8).digest(), "little")
        for offset in range(span.length):
            # 63 bits, then below zero
            keys[span.position + offset] = -1 - ((first + offset * 0x9E3779B97F4A7C15) & 0x7FFF_FFFF_FFFF_FFFF)
    return keys


class _Hash:
    """A running hash of keys; copies cheaply, so that every prefix of a sequence is named in one pass."""

    __slots__ = ("state",)

    def __init__(self, namespace: str = "", *, state: hashlib.blake2b | None = None) -> None:
        self.state = state if state is not None else hashlib.blake2b(namespace.encode() + b"\0", digest_size=16)

    def extended(self, keys: array[int]) -> _Hash:
        state = self.state.copy()
        state.update(keys.tobytes())
        return _Hash(state=state)

    @property
    def name(self) -> str:
        return self.state.hexdigest()


def prefix_keys(
    tokens: Sequence[int], positions: Sequence[int], *, namespace: str = "", media: Sequence[MediaKey] = ()
) -> list[str]:
    """Names of the prefixes that end at `positions` (ascending), as cache events carry them.

    For a router that replays events: the longest hit of a prompt is its longest prefix, at most all but the last
    token, whose name is among the stored checkpoints.
    """
    keys = token_keys(tokens, media)
    if any(not 0 <= p <= len(keys) for p in positions) or list(positions) != sorted(positions):
        raise ConfigError(f"prefix_keys: positions must be ascending within 0..{len(keys)}, got {list(positions)}")
    running, start, names = _Hash(namespace), 0, []
    for position in positions:
        running = running.extended(keys[start:position])
        start = position
        names.append(running.name)
    return names


class Node:
    """A run of cached tokens.

    Attributes:
        key: keys of the run, never empty except at a root.
        start, end: token positions of the run in its sequence.
        pages: of the page indices `start // page_size` to `(end - 1) // page_size`.
        slot: state after token `end - 1`; None = not kept.
        is_ready: False while a copy into `slot` is scheduled but not issued.
        locks: leases whose context continues here.
        last_used: tick of the last match through this node.
        namespace: of the tree that the node belongs to.
    """

    __slots__ = (
        "children", "hash", "is_ready", "key", "last_used", "locks", "namespace", "pages", "parent", "slot", "start",
    )  # fmt: skip

    def __init__(
        self, key: array[int], start: int, parent: Node | None, pages: list[int], running: _Hash, namespace: str
    ) -> None:
        self.key = key
        self.start = start
        self.parent = parent
        self.pages = pages
        self.hash = running
        self.namespace = namespace
        self.children: dict[int, Node] = {}
        self.slot: int | None = None
        self.is_ready = True
        self.locks = 0
        self.last_used = 0

    @property
    def end(self) -> int:
        """Tokens up to the end of this run."""
        return self.start + len(self.key)

    @property
    def name(self) -> str:
        """Name of the prefix that ends here, as in cache events."""
        return self.hash.name

    def path(self) -> list[Node]:
        """The nodes from below the root to this one."""
        nodes: list[Node] = []
        node: Node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class Match(NamedTuple):
    """What is cached of a sequence.

    Attributes:
        node: the deepest usable state; None = no hit.
        kv_len: tokens whose KV is cached, with or without a state.
        deepest: the last node whose whole run matched.
    """

    node: Node | None
    kv_len: int
    deepest: Node | None


class PrefixTree:
    """A radix tree for each namespace. Knows structure only: who owns pages and slots is the caller's business."""

    def __init__(self, page_size: int, *, named: bool = False) -> None:
        """Make an empty tree.

        Args:
            page_size: tokens a page.
            named: keep the running hash of every node, for `Node.name`.
        """
        self.page_size = page_size
        self.named = named
        self.roots: dict[str, Node] = {}
        self.num_nodes = 0

    def root(self, namespace: str) -> Node:
        """The root of a namespace, made if needed."""
        if namespace not in self.roots:
            self.roots[namespace] = Node(array("q"), 0, None, [], _Hash(namespace), namespace)
        return self.roots[namespace]

    def longest(self, namespace: str, keys: array[int], limit: int) -> Match:
        """Find the deepest state after at most `limit` of `keys`, and the longest cached run of their KV.

        A node without state, or with one that is not ready, is passed over.
        """
        root = self.roots.get(namespace)
        if root is None:
            return Match(None, 0, None)
        node, found, position = root, None, 0
        while position < len(keys):
            child = node.children.get(keys[position])
            if child is None:
                break
            shared = common_length(child.key, keys, position)
            position += shared
            if shared < len(child.key):
                break
            node = child
            if node.slot is not None and node.is_ready and node.end <= limit:
                found = node
        return Match(found, min(position, limit), None if node is root else node)

    def add(self, parent: Node, key: array[int], pages: list[int]) -> Node:
        """Hang a new run of tokens below `parent`; no child may begin with the same key."""
        assert key, "a node holds at least one token"
        assert key[0] not in parent.children, "two children would begin with the same key"
        running = parent.hash.extended(key) if self.named else parent.hash
        node = Node(key, parent.end, parent, pages, running, parent.namespace)
        parent.children[key[0]] = node
        self.num_nodes += 1
        return node

    def split(self, node: Node, length: int) -> Node:
        """Cut a run after `length` tokens and return the new upper node. State and locks stay with the lower one.

        Both halves list the page in which the cut lies: the caller counts it once more.
        """
        assert 0 < length < len(node.key), "a split must leave tokens on both sides"
        assert node.parent is not None, "a root has no tokens"
        size, cut = self.page_size, node.start + length
        first = node.start // size
        head = node.key[:length]
        running = node.parent.hash.extended(head) if self.named else node.parent.hash
        pages = node.pages[: -(-cut // size) - first]
        upper = Node(head, node.start, node.parent, pages, running, node.namespace)
        upper.last_used = node.last_used
        node.parent.children[head[0]] = upper
        node.key, node.start, node.parent, node.pages = node.key[length:], cut, upper, node.pages[cut // size - first :]
        upper.children[node.key[0]] = node
        self.num_nodes += 1
        return upper

    def remove(self, node: Node) -> Node:
        """Take a leaf out and return its parent."""
        assert node.parent is not None, "a root stays"
        assert not node.children, "only leaves are removed"
        parent = node.parent
        del parent.children[node.key[0]]
        node.parent = None
        self.num_nodes -= 1
        if parent.parent is None and not parent.children:
            del self.roots[parent.namespace]
        return parent

    def pages_of(self, node: Node) -> list[int]:
        """Pages of the whole prefix that ends at `node`."""
        pages: list[int] = []
        for part in node.path():
            pages[part.start // self.page_size :] = part.pages
        return pages

    def page_ends(self, node: Node) -> list[int]:
        """Positions at which the pages of a run end: page borders, and the end of the run."""
        size = self.page_size
        ends = list(range((node.start // size + 1) * size, node.end + 1, size))
        if node.end % size:
            ends.append(node.end)
        return ends

    def names(self, node: Node, ends: Sequence[int]) -> Iterator[str]:
        """Names of the prefixes that end at ascending positions inside a run, or at its begin; in one pass."""
        assert node.parent is not None, "a root has no tokens"
        running, begin = node.parent.hash, node.start
        for end in ends:
            running = running.extended(node.key[begin - node.start : end - node.start])
            begin = end
            yield running.name

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents first."""
        todo = [child for root in self.roots.values() for child in root.children.values()]
        while todo:
            node = todo.pop()
            yield node
            todo += node.children.values()

    def clear(self) -> None:
        """Forget everything."""
        self.roots.clear()
        self.num_nodes = 0

    def check(self) -> None:
        """Raise AssertionError if the tree is malformed."""
        count, size = 0, self.page_size
        for node in self.nodes():
            count += 1
            assert node.key, "an empty run"
            assert node.parent is not None, "a node hangs in the air"
            assert node.parent.children.get(node.key[0]) is node, "a child under the wrong key"
            assert node.start == node.parent.end, "a run does not begin where its parent ends"
            assert len(node.pages) == -(-node.end // size) - node.start // size, "a run has too many or too few pages"
        assert count == self.num_nodes, "nodes are miscounted"


def common_length(run: array[int], keys: array[int], offset: int) -> int:
    """How many of the first keys of `run` equal `keys` from `offset` on."""
    length = min(len(run), len(keys) - offset)
    if run[:length] == keys[offset : offset + length]:
        return length
    low, high = 0, length - 1  # the first `low` are equal, the first `high + 1` are not
    while low < high:
        middle = (low + high + 1) // 2
        if run[low:middle] == keys[offset + low : offset + middle]:
            low = middle
        else:
            high = middle - 1
    return low
