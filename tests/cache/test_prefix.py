"""The prefix tree against dictionaries of token tuples, and the keys that stand for tokens."""

import hashlib
from array import array
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from k3lib.cache.prefix import MediaKey, PrefixTree, common_length, prefix_keys, token_keys
from k3lib.errors import ConfigError

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=14)
SPACES = st.sampled_from(["", "salt"])


def keys_of(node):
    return tuple(key for part in node.path() for key in part.key)


class Cached:
    """A tree, and for each of its pages the tokens from the begin of their sequence that it holds, by offset."""

    def __init__(self, page_size):
        self.size = page_size
        self.tree = PrefixTree(page_size, named=True)
        self.pages = {}

    def write(self, sequence):
        """Fresh pages with a whole sequence."""
        pages = []
        for begin in range(0, len(sequence), self.size):
            pages.append(len(self.pages) + 1)
            self.pages[pages[-1]] = [sequence[: i + 1] for i in range(begin, min(begin + self.size, len(sequence)))]
        return pages

    def insert(self, space, sequence):
        """The node that ends behind `sequence`, made if needed."""
        node, pages, keys = self.tree.root(space), self.write(sequence), array("q", sequence)
        while node.end < len(sequence):
            child = node.children.get(keys[node.end])
            if child is None:
                begin = node.end
                node = self.tree.add(node, keys[begin:], pages[begin // self.size :])
            else:
                shared = common_length(child.key, keys, node.end)
                node = child if shared == len(child.key) else self.tree.split(child, shared)
        return node

    def check_pages(self, node):
        sequence = keys_of(node)
        pages = self.tree.pages_of(node)
        assert len(pages) == -(-len(sequence) // self.size)
        for position in range(len(sequence)):
            held = self.pages[pages[position // self.size]][position % self.size]
            assert held == sequence[: position + 1]
        # the first page of a run is complete from its first token on
        first = node.pages[0]
        for position in range(node.start // self.size * self.size, min(node.end, len(self.pages[first]))):
            assert self.pages[first][position % self.size] == sequence[: position + 1]


class TreeMachine(RuleBasedStateMachine):
    """Compares a tree with the set of cached prefixes and a dictionary of states."""

    page_size = 4

    def __init__(self):
        super().__init__()
        self.cached = Cached(self.page_size)
        self.tree = self.cached.tree
        self.sequences = {}  # (namespace, tokens) of all that was inserted and not removed -> its state
        self.hidden = set()  # states that are not ready
        self.slot = 0

    def nodes(self):
        return {(node.namespace, keys_of(node)): node for node in self.tree.nodes()}

    @rule(space=SPACES, tokens=TOKENS, with_state=st.booleans())
    def insert(self, space, tokens, with_state):
        before = {name: node.slot for name, node in self.nodes().items()}
        node = self.cached.insert(space, tuple(tokens))
        name = (space, tuple(tokens))
        assert (node.namespace, keys_of(node)) == name
        assert {n: x.slot for n, x in self.nodes().items()}.items() >= before.items(), "a split moved a state"
        if with_state and node.slot is None:
            self.slot += 1
            node.slot = self.slot
        self.sequences[name] = node.slot

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), cut=st.integers(0, 13), tail=st.lists(st.integers(0, 2), max_size=4))
    def extend_a_cached_one(self, data, cut, tail):
        space, tokens = data.draw(st.sampled_from(sorted(self.sequences)))
        if tokens[:cut] or tail:
            self.insert(space, [*tokens[:cut], *tail], data.draw(st.booleans()))

    @precondition(lambda self: self.tree.num_nodes)
    @rule(data=st.data())
    def remove_a_leaf(self, data):
        leaves = {name: node for name, node in self.nodes().items() if not node.children}
        name = data.draw(st.sampled_from(sorted(leaves)))
        node = leaves[name]
        parent, start = node.parent, node.start
        assert self.tree.remove(node) is parent
        self.sequences = {
            (space, tokens): slot
            for (space, tokens), slot in self.sequences.items()
            if space != name[0] or tokens[: start + 1] != name[1][: start + 1]
        }
        if start and name[1][:start] not in {t for s, t in self.sequences if s == name[0]}:
            self.sequences[name[0], name[1][:start]] = None  # the run above stays

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def drop_or_hide_a_state(self, data):
        name = data.draw(st.sampled_from(sorted(self.sequences)))
        node = self.nodes()[name]
        node.is_ready = not node.is_ready
        self.hidden ^= {name}
        if data.draw(st.booleans()):
            node.slot = self.sequences[name] = None

    @rule(space=SPACES, tokens=TOKENS, limit=st.integers(0, 14))
    def look_up(self, space, tokens, limit):
        self.compare(space, tuple(tokens), limit)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), cut=st.integers(0, 13), tail=st.lists(st.integers(0, 2), max_size=4))
    def look_up_a_cached_one(self, data, cut, tail):
        space, tokens = data.draw(st.sampled_from(sorted(self.sequences)))
        wanted = (*tokens[:cut], *tail)
        self.compare(data.draw(SPACES), wanted, max(len(wanted) - 1, 0))
        self.compare(space, wanted, len(wanted))

    def compare(self, space, tokens, limit):
        found = self.tree.longest(space, array("q", tokens), limit)
        prefixes = [tokens[:n] for n in range(len(tokens), 0, -1)]
        stored = {t: slot for (s, t), slot in self.sequences.items() if s == space}
        usable = [p for p in prefixes if len(p) <= limit and stored.get(p) and (space, p) not in self.hidden]
        cached = [p for p in prefixes if any(t[: len(p)] == p for t in stored)]
        assert (found.node and keys_of(found.node)) == (usable[0] if usable else None)
        assert (found.node and found.node.slot) == (stored[usable[0]] if usable else None)
        assert found.kv_len == min(len(cached[0]) if cached else 0, limit)
        ends = [p for p in prefixes if (space, p) in self.nodes()]
        assert (found.deepest and keys_of(found.deepest)) == (ends[0] if ends else None)

    @invariant()
    def agrees(self):
        self.tree.check()
        nodes = self.nodes()
        self.hidden &= nodes.keys()
        assert len(nodes) == self.tree.num_nodes
        assert self.sequences.keys() <= nodes.keys()
        prefixes = {(s, t[:n]) for s, t in self.sequences for n in range(1, len(t) + 1)}
        assert {(s, t[:n]) for s, t in nodes for n in range(1, len(t) + 1)} == prefixes
        assert {name: node.slot for name, node in nodes.items() if node.slot} == {
            name: slot for name, slot in self.sequences.items() if slot
        }
        for (space, tokens), node in nodes.items():
            self.cached.check_pages(node)
            assert node.name == prefix_keys(tokens, [len(tokens)], namespace=space)[0]
            ends = self.tree.page_ends(node)
            assert ends == [n for n in range(node.start + 1, node.end + 1) if n % self.page_size == 0 or n == node.end]
            positions = [node.start, *ends]
            assert [*self.tree.names(node, positions)] == prefix_keys(tokens, positions, namespace=space)


class PageOfOne(TreeMachine):
    page_size = 1


class PageOfThree(TreeMachine):
    page_size = 3


class PageOfSixteen(TreeMachine):
    page_size = 16


FEWER = settings(max_examples=settings().max_examples // 2, stateful_step_count=30)
TestPageOfOne = PageOfOne.TestCase
TestPageOfThree = PageOfThree.TestCase
TestPageOfFour = TreeMachine.TestCase
TestPageOfSixteen = PageOfSixteen.TestCase
TestPageOfOne.settings = TestPageOfThree.settings = TestPageOfFour.settings = TestPageOfSixteen.settings = FEWER


# ---- splits


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("cut", [1, 3, 4, 5, 8, 9])
def test_a_split_lists_the_page_of_the_cut_on_both_sides(page_size, cut):
    cached = Cached(page_size)
    node = cached.insert("", tuple(range(10)))
    before = list(node.pages)
    upper = cached.tree.split(node, cut)
    assert upper.pages == before[: -(-cut // page_size)]
    assert node.pages == before[cut // page_size :]
    assert (upper.pages[-1] == node.pages[0]) == (cut % page_size != 0)
    for part in (upper, node):
        cached.check_pages(part)
    cached.tree.check()


def test_state_locks_and_use_stay_where_they_belong_at_a_split():
    tree = Cached(4).tree
    node = tree.add(tree.root(""), array("q", range(8)), [1, 2])
    node.slot, node.is_ready, node.locks, node.last_used = 7, False, 3, 11
    upper = tree.split(node, 5)
    assert (node.slot, node.is_ready, node.locks, node.last_used) == (7, False, 3, 11)
    assert (upper.slot, upper.is_ready, upper.locks, upper.last_used) == (None, True, 0, 11)
    assert (upper.start, upper.end, node.start, node.end) == (0, 5, 5, 8)


def test_the_pages_of_the_deeper_node_count_where_two_versions_of_a_page_exist():
    cached = Cached(4)
    upper = cached.insert("", (1, 1, 1, 1, 1, 1))
    lower = cached.insert("", (1, 1, 1, 1, 1, 1, 2, 2, 2))
    assert cached.tree.pages_of(upper) == upper.pages == [1, 2]
    assert lower.pages == [4, 5]
    assert cached.tree.pages_of(lower) == [1, 4, 5]


def test_an_emptied_namespace_leaves_no_root():
    tree = PrefixTree(4)
    node = tree.add(tree.root("a"), array("q", [1]), [1])
    tree.remove(node)
    assert tree.roots == {}
    tree.add(tree.root("a"), array("q", [1]), [1])
    tree.clear()
    assert (tree.roots, tree.num_nodes) == ({}, 0)


# ---- keys


@given(run=TOKENS, before=TOKENS, keys=TOKENS)
def test_the_common_length_is_that_of_a_loop(run, before, keys):
    want = 0
    while want < min(len(run), len(keys)) and run[want] == keys[want]:
        want += 1
    assert common_length(array("q", run), array("q", before + keys), len(before)) == want


@pytest.mark.parametrize("length", [1, 2, 3, 1000, 4095])
@pytest.mark.parametrize("place", [0, 0.5, 1])
def test_the_common_length_finds_one_difference_in_long_runs(length, place):
    run, keys = array("q", range(length)), array("q", range(-3, length))
    where = round(place * (length - 1))
    run[where] = -1
    assert common_length(run, keys, 3) == where


def test_the_keys_of_text_are_its_ids():
    assert token_keys([5, 0, 2**40]).tolist() == [5, 0, 2**40]
    assert token_keys([]).tolist() == []


@given(
    ids=st.lists(st.integers(0, 600), min_size=12, max_size=12),
    digests=st.lists(st.sampled_from(["cat", "dog", b"\x00\xff", ""]), min_size=2, max_size=2),
    lengths=st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
def test_media_keys_tell_images_apart_and_nothing_else(ids, digests, lengths):
    spans = [MediaKey(1, lengths[0], digests[0]), MediaKey(7, lengths[1], digests[1])]
    keys = token_keys(ids, spans[::-1]).tolist()
    inside = [[keys[s.position + i] for i in range(s.length)] for s in spans]
    outside = {i for i in range(12) if not any(s.position <= i < s.position + s.length for s in spans)}
    assert all(keys[i] == ids[i] for i in outside)
    assert all(key < 0 for run in inside for key in run)
    assert len(set(inside[0])) == lengths[0], "offsets inside an image differ"
    if digests[0] == digests[1]:
        short = min(lengths)
        assert inside[0][:short] == inside[1][:short]
    else:
        assert not set(inside[0]) & set(inside[1])


def test_media_keys_do_not_depend_on_ids_nor_on_the_place():
    first = token_keys([1] * 6, [MediaKey(0, 3, "cat")])
    later = token_keys([9] * 6, [MediaKey(2, 3, b"cat")])
    assert first[:3] == later[2:5]


def test_many_images_never_share_a_key():
    spans = [MediaKey(64 * i, 64, hashlib.sha256(bytes([i])).digest()) for i in range(100)]
    assert len(set(token_keys([7] * 6400, spans))) == 6400


@pytest.mark.parametrize(
    "media",
    [
        [MediaKey(0, 0, "a")],
        [MediaKey(0, -1, "a")],
        [MediaKey(-1, 2, "a")],
        [MediaKey(3, 2, "a")],
        [MediaKey(4, 1, "a")],
        [MediaKey(0, 2, "a"), MediaKey(1, 1, "b")],
        [MediaKey(1, 2, "b"), MediaKey(0, 2, "a")],
        [MediaKey(0, 2, "a"), MediaKey(0, 2, b"a")],
    ],
    ids=str,
)
def test_bad_spans_are_refused(media):
    with pytest.raises(ConfigError, match=r"media span of .* is empty, overlaps another one or leaves the 4 tokens"):
        token_keys([1, 2, 3, 4], media)


@pytest.mark.parametrize("ids", [[-1], [1, -5, 2], [2**63], [1.5], ["1"], [None]], ids=str)
def test_bad_ids_are_refused(ids):
    with pytest.raises(ConfigError, match="token ids must be"):
        token_keys(ids)


@given(tokens=TOKENS, data=st.data())
def test_prefix_keys_name_prefixes_and_only_them(tokens, data):
    positions = sorted(data.draw(st.sets(st.integers(0, len(tokens)))))
    names = prefix_keys(tokens, positions, namespace="n")
    assert len(set(names)) == len(names)
    for position, name in zip(positions, names, strict=True):
        assert prefix_keys(tokens[:position], [position], namespace="n") == [name]
        assert prefix_keys(tokens, [position], namespace="m") != [name]
    other = [*tokens[:-1], tokens[-1] + 1]
    assert prefix_keys(other, [len(other)]) != prefix_keys(tokens, [len(tokens)])


def test_prefix_keys_see_the_image_behind_the_ids():
    cat, dog, none = (
        prefix_keys([1, 7, 7, 2], [1, 2, 4], media=media)
        for media in ([MediaKey(1, 2, "cat")], [MediaKey(1, 2, "dog")], [])
    )
    assert cat[0] == dog[0] == none[0]
    for a, b in pairwise([cat, dog, none, cat]):
        assert a[1] != b[1]
        assert a[2] != b[2]


@pytest.mark.parametrize("positions", [[2, 1], [-1], [5], [0, 5]])
def test_prefix_keys_refuse_positions_that_are_out_of_range_or_order(positions):
    with pytest.raises(ConfigError, match=r"positions must be ascending within 0\.\.4"):
        prefix_keys([1, 2, 3, 4], positions)
