"""The KV tree against a model of it: random traces, invariants after every event, and every path's keys read back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltree.engine.rollout._host import KvExhaustedError, KvTree

NAMES = ["root", "append", "append", "append", "fork", "rewind", "refill", "release"]
EVENTS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 999), st.integers(1, 7)), max_size=80)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


class Traced:
    """A KvTree, what each slot of its pages holds, and the tokens on the path of each held node."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.tree = KvTree(pages, page_size)
        self.slots = np.full(pages * page_size, -1)
        self.paths: dict[int, list[list[int]]] = {}  # held node -> one path a hold
        self.sealed: set[int] = set()
        self.next_token = 0

    def apply(self, event: str, pick: int, amount: int) -> None:
        held = sorted(self.paths)
        if event == "root" or not held:
            self.hold(self.tree.root(), [], sealed=False)
        else:
            getattr(self, event)(held[pick % len(held)], pick, amount)

    def hold(self, node: int, path: list[int], *, sealed: bool) -> None:
        self.paths.setdefault(node, []).append(list(path))
        (self.sealed.add if sealed else self.sealed.discard)(node)

    def drop(self, node: int) -> list[int]:
        path = self.paths[node].pop()
        if not self.paths[node]:
            del self.paths[node]
        return path

    def append(self, node: int, pick: int, amount: int) -> None:
        pages, length = self.tree.free_pages, self.tree.length(node)
        try:
            slots = self.tree.append(ids(node), ids(amount))
        except KvExhaustedError:
            assert amount > pages * self.tree.page_size or self.tree.pages_needed(ids(node), ids(amount)) > pages
            assert (self.tree.free_pages, self.tree.length(node)) == (pages, length)
            return
        except ValueError:
            assert node in self.sealed
            return
        assert node not in self.sealed
        self.slots[slots] = range(self.next_token, self.next_token + amount)
        self.paths[node][0] += range(self.next_token, self.next_token + amount)
        self.next_token += amount

    def fork(self, node: int, pick: int, amount: int) -> None:
        before = self.tree.free_pages, self.tree.tokens
        path = self.drop(node)
        for child in self.tree.fork(node, amount):
            self.hold(child, path, sealed=False)
        self.sealed.add(node)
        assert (self.tree.free_pages, self.tree.tokens) == before, "a fork copies nothing"

    def rewind(self, node: int, pick: int, amount: int) -> None:
        path = self.paths[node][0]
        if path:
            before = self.tree.free_pages, self.tree.tokens
            keep = 1 + pick % len(path)
            self.hold(self.tree.rewind(node, keep), path[:keep], sealed=True)
            assert (self.tree.free_pages, self.tree.tokens) == before, "a rewind copies nothing"

    def refill(self, node: int, pick: int, amount: int) -> None:
        """Evict a node of the path, then give it its keys back, perhaps in two chunks."""
        path = self.paths[node][0]
        for _ in range(pick % 4):
            node = node if self.tree.parent(node) < 0 else self.tree.parent(node)
        length, position = self.tree.length(node), self.tree.position(node)
        if length == 0 or self.tree.free_pages * self.tree.page_size < length + self.tree.page_size:
            return
        self.tree.evict(node)
        self.tree.check()
        for begin, end in ((0, min(amount, length)), (min(amount, length), length)):
            self.slots[self.tree.append(ids(node), ids(end - begin))] = path[position + begin : position + end]

    def release(self, node: int, pick: int, amount: int) -> None:
        self.tree.release(node)
        self.drop(node)

    def read(self, node: int) -> list[int]:
        """The tokens whose keys a query at the end of ``node`` reads, in order of position."""
        indptr, pages, offset, length, position, begin, end = self.tree.plan(ids(node), ids(1))
        tokens: list[int] = []
        size = self.tree.page_size
        for k in range(len(length)):
            assert (begin[k], end[k], position[k]) == (0, 1, len(tokens))
            at = np.arange(offset[k], offset[k] + length[k])
            page = pages[indptr[k] : indptr[k + 1]]
            assert len(page) == -(-(offset[k] + length[k]) // size)
            tokens += self.slots[page[at // size] * size + at % size].tolist()
        return tokens


@settings(max_examples=400)
@given(events=EVENTS, pages=st.integers(1, 60), page_size=st.integers(1, 5))
def test_random_traces_keep_the_invariants_and_every_path(
    events: list[tuple[str, int, int]], pages: int, page_size: int
) -> None:
    traced = Traced(pages, page_size)
    for event in events:
        traced.apply(*event)
        traced.tree.check()
    for node, paths in traced.paths.items():
        for path in paths:
            assert traced.read(node) == path
    distinct = {token for paths in traced.paths.values() for path in paths for token in path}
    assert traced.tree.tokens >= len(distinct)
    for node in [node for node, paths in list(traced.paths.items()) for _ in paths]:
        traced.tree.release(node)
        traced.tree.check()
    assert (traced.tree.free_pages, traced.tree.nodes, traced.tree.tokens) == (pages, 0, 0), "leak"


@given(events=EVENTS, seed=st.integers(0, 99))
def test_a_plan_covers_each_row_with_its_path(events: list[tuple[str, int, int]], seed: int) -> None:
    traced = Traced(200, 3)
    for event in events:
        traced.apply(*event)
    nodes = np.array(sorted(traced.paths), np.int64)
    np.random.default_rng(seed).shuffle(nodes)
    nodes = nodes[traced.tree.depth_first(nodes)]
    counts = np.arange(len(nodes)) % 3 + 1
    _, _, _, length, position, begin, end = traced.tree.plan(nodes, counts)
    row = np.repeat(nodes, counts)
    for i, node in enumerate(row.tolist()):
        on_path = (begin <= i) & (i < end)
        order = np.argsort(position[on_path])
        assert length[on_path].sum() == len(traced.paths[node][0])
        np.testing.assert_array_equal(
            position[on_path][order], np.cumsum(length[on_path][order]) - length[on_path][order]
        )


def test_fork_in_mid_page_and_rewind_share_pages() -> None:
    tree = KvTree(10, 4)
    root = tree.root()
    tree.append(ids(root), ids(6))
    a, b = tree.fork(root, 2)
    assert tree.free_pages == 8
    tree.append(ids(a, b), ids(1, 5))
    assert tree.free_pages == 5
    upper = tree.rewind(b, 9)  # keeps three of b's five tokens, so the halves share b's first page
    assert (tree.length(upper), tree.length(b), tree.parent(b), tree.free_pages) == (3, 2, upper, 5)
    indptr, _, offset, length, position, _, _ = tree.plan(ids(b), ids(1))
    assert (offset.tolist(), length.tolist(), position.tolist()) == ([0, 0, 3], [6, 3, 2], [0, 6, 9])
    assert np.diff(indptr).tolist() == [2, 1, 2]
    tree.release(b)
    assert tree.free_pages == 6, "the straddled page is still the upper half's"
    tree.check()


def test_misuse_is_refused_and_changes_nothing() -> None:
    tree = KvTree(2, 4)
    root = tree.root()
    with pytest.raises(KvExhaustedError, match="3 KV pages are needed and 2 are free"):
        tree.append(ids(root), ids(9))
    tree.append(ids(root), ids(4))
    (child,) = tree.fork(root, 1)
    for misuse in (
        lambda: tree.append(ids(root), ids(1)),  # sealed
        lambda: tree.append(ids(child, child), ids(1, 1)),
        lambda: tree.release(root),  # held by nobody but its child
        lambda: tree.fork(root, 1),
        lambda: tree.fork(child, 0),
        lambda: tree.rewind(child, 0),
        lambda: tree.length(7),
        lambda: KvTree(0, 4),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            misuse()
    sibling = tree.root()
    with pytest.raises(ValueError, match="depth-first"):
        tree.plan(ids(child, sibling, child), ids(1, 1, 1))
    tree.evict(root)
    with pytest.raises(ValueError, match="before the keys above it are back"):
        tree.plan(ids(child), ids(1))
    tree.check()


def test_eviction_spares_the_paths_in_use() -> None:
    tree = KvTree(4, 2)
    root = tree.root()
    tree.append(ids(root), ids(2))
    a, b, c = tree.fork(root, 3)
    tree.append(ids(a, b, c), ids(2, 2, 2))
    assert tree.evict_others(ids(b), 1) == 1
    assert tree.evict_others(ids(b), 4) == 2
    assert (tree.length(root), tree.length(a), tree.length(b), tree.length(c)) == (2, 0, 2, 0)
    tree.check()
