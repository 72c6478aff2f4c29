"""The KV tree against a model of it: random traces, invariants after every event, and every path's keys read back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltree.engine.rollout.native._host import KvExhaustedError, KvTree
from rolltree.engine.rollout.native.cache.kv_cache import KvCache

NAMES = ["insert", "insert", "grow", "grow", "grow", "truncate", "fork", "rewind", "refill", "release", "make_room"]
NAMES += ["keep", "let_go"]
EVENTS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 999), st.integers(1, 7)), max_size=80)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def path(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def fill(tree: KvTree, node: int) -> np.ndarray:
    """Give every missing key of the path a slot; the slots, nodes nearest the root first."""
    slots = [tree.append(ids(n), ids(count)) for n, _, count in zip(*tree.missing(node), strict=True)]
    return np.concatenate([ids(), *slots])


class Traced:
    """A KvTree, the token and the position whose key each slot holds, and the path of each held node."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.tree = KvTree(pages, page_size)
        self.slots = np.full((pages * page_size, 2), -1)
        self.paths: dict[int, list[list[int]]] = {}  # held node -> one path a hold
        self.open: set[int] = set()

    def apply(self, event: str, pick: int, amount: int) -> None:
        held = sorted(self.paths)
        if event == "insert" or not held:
            self.insert(pick, amount)
        elif event == "make_room":
            assert self.tree.make_room(amount) >= min(amount, self.tree.free_pages)
        else:
            getattr(self, event)(held[pick % len(held)], pick, amount)

    def insert(self, pick: int, amount: int) -> None:
        """A path that begins as another one does, or not."""
        known = [tokens for paths in self.paths.values() for tokens in paths] or [[]]
        tokens = known[pick % len(known)][: pick % 9] + [(pick + i * i) % 3 for i in range(amount)]
        before = self.tree.free_pages, self.tree.keys
        self.hold(self.tree.insert(pick % 2, path(*tokens)), tokens)
        assert (self.tree.free_pages, self.tree.keys) == before, "an insertion computes nothing"

    def hold(self, node: int, tokens: list[int]) -> None:
        self.paths.setdefault(node, []).append(list(tokens))

    def drop(self, node: int) -> list[int]:
        tokens = self.paths[node].pop()
        if not self.paths[node]:
            del self.paths[node]
        return tokens

    def compute(self, node: int) -> bool:
        """The missing keys of a path, as far as the pages reach."""
        for n, begin, count in zip(*self.tree.missing(node), strict=True):
            needed = self.tree.pages_needed(ids(n), ids(count))
            room = self.tree.make_room(needed)
            try:
                slots = self.tree.append(ids(n), ids(count))
            except KvExhaustedError:
                assert room == self.tree.free_pages < needed
                assert self.tree.length(n) == begin
                return False
            self.slots[slots, 0] = self.tree.tokens(n, begin, count)
            self.slots[slots, 1] = self.tree.position(n) + begin + np.arange(count)
        return True

    def grow(self, node: int, pick: int, amount: int) -> None:
        tokens = [pick % 3] * amount
        if node in self.open:
            self.tree.extend_by(node, tokens)
            self.paths[node][0] += tokens
        else:
            with pytest.raises(ValueError, match="sealed"):
                self.tree.extend_by(node, tokens)
        self.compute(node)

    def truncate(self, node: int, pick: int, amount: int) -> None:
        end = max(self.tree.position(node), len(self.paths[node][0]) - pick % 9)
        if node in self.open:
            free, missing = self.tree.free_pages, sum(self.tree.missing(node)[2])
            self.tree.truncate(ids(node), ids(end))
            del self.paths[node][0][end:]
            assert self.tree.free_pages >= free
            assert sum(self.tree.missing(node)[2]) <= missing
        else:
            with pytest.raises(ValueError, match="sealed"):
                self.tree.truncate(ids(node), ids(end))

    def fork(self, node: int, pick: int, amount: int) -> None:
        before = self.tree.free_pages, self.tree.keys
        tokens = self.drop(node)
        self.open.discard(node)
        for child in self.tree.fork(node, amount):
            self.hold(child, tokens)
            self.open.add(child)
        assert (self.tree.free_pages, self.tree.keys) == before, "a fork copies nothing"

    def rewind(self, node: int, pick: int, amount: int) -> None:
        tokens = self.paths[node][0]
        if tokens:
            before = self.tree.free_pages, self.tree.keys
            keep = 1 + pick % len(tokens)
            upper = self.tree.rewind(node, keep)
            self.open.discard(upper)
            self.hold(upper, tokens[:keep])
            assert (self.tree.free_pages, self.tree.keys) == before, "a rewind copies nothing"

    def refill(self, node: int, pick: int, amount: int) -> None:
        """Evict a node of the path, then give it its keys back."""
        below = node
        for _ in range(pick % 4):
            node = node if self.tree.parent(node) < 0 else self.tree.parent(node)
        self.tree.evict(node)
        self.tree.check()
        self.compute(below)

    def release(self, node: int, pick: int, amount: int) -> None:
        self.tree.release(node)
        self.drop(node)
        if node not in self.paths:
            self.open.discard(node)

    def keep(self, node: int, pick: int, amount: int) -> None:
        self.tree.keep(node, pick % 3)

    def let_go(self, node: int, pick: int, amount: int) -> None:
        self.tree.let_go(pick % 3)

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
            slots = page[at // size] * size + at % size
            assert self.slots[slots, 1].tolist() == list(range(len(tokens), len(tokens) + length[k]))
            tokens += self.slots[slots, 0].tolist()
        return tokens

    def release_all(self) -> None:
        for node in [node for node, paths in list(self.paths.items()) for _ in paths]:
            self.tree.release(node)
        self.paths.clear()
        self.open.clear()
        self.tree.check()
        self.tree.forget()
        self.tree.check()
        assert (self.tree.free_pages, self.tree.nodes, self.tree.keys) == (self.tree.num_pages, 0, 0), "leak"


def check_paths(traced: Traced) -> None:
    for node, paths in traced.paths.items():
        for tokens in paths:
            assert traced.tree.end(node) == len(tokens)
            if traced.compute(node):
                assert traced.read(node) == tokens


@settings(max_examples=150)
@given(events=EVENTS, pages=st.integers(1, 60), page_size=st.integers(1, 5))
def test_random_traces_keep_the_invariants_and_every_path(
    events: list[tuple[str, int, int]], pages: int, page_size: int
) -> None:
    traced = Traced(pages, page_size)
    for event in events:
        traced.apply(*event)
        traced.tree.check()
    check_paths(traced)
    traced.release_all()


@pytest.mark.parametrize(("owners", "left"), [([7], [1, 2]), ([], [3, 4]), ([7, 8], [1, 2])])
def test_what_an_owner_keeps_is_dropped_last(owners: list[int], left: list[int]) -> None:
    """The oldest of three paths is the last one while any owner keeps it, and goes where nothing else is left."""
    tree = KvTree(6, 1)
    for tokens in ([1, 2], [5, 6], [3, 4]):
        node = tree.insert(0, path(*tokens))
        fill(tree, node)
        if tokens == [1, 2]:
            for owner in owners:
                tree.keep(node, owner)
                tree.keep(node, owner)
        tree.release(node)
    tree.let_go(8)  # another one still keeps it
    tree.check()
    assert tree.make_room(4) == 4
    tree.start_counting()
    node = tree.insert(0, path(*left))
    assert tree.reused == 2
    tree.release(node)
    assert tree.make_room(6) == 6
    tree.check()
    tree.let_go(7)
    tree.check()


def test_what_an_owner_kept_is_dropped_in_its_turn() -> None:
    """After `let_go`, of the owner or of all, and in the parts into which a later path has cut it."""
    for let_go in (lambda tree: tree.let_go(7), lambda tree: tree.let_go_all()):
        tree = KvTree(8, 1)
        for tokens in ([1, 2, 3], [4, 5, 6]):
            node = tree.insert(0, path(*tokens))
            fill(tree, node)
            tree.keep(node, 7)
            tree.release(node)
        tree.release(tree.insert(0, path(1, 2)))
        let_go(tree)
        tree.check()
        assert tree.make_room(6) == 6
        tree.start_counting()
        tree.release(tree.insert(0, path(1, 2)))
        assert tree.reused == 2
        tree.release(tree.insert(0, path(4, 5, 6)))
        assert tree.reused == 2, "kept, it would be here still"
    node = tree.insert(0, path(1))
    tree.release(node)
    with pytest.raises(ValueError, match=r"No sequence holds|has no node"):
        tree.keep(node, 1)


@pytest.mark.slow
def test_a_million_events() -> None:
    """Invariants after every event, paths now and then; what is held is kept small, so that pages come and go."""
    rng = np.random.default_rng(0)
    traced = Traced(40, 3)
    names, weights = np.unique(NAMES, return_counts=True)
    for event in range(1_000_000):
        name = "release" if len(traced.paths) > 12 else str(rng.choice(names, p=weights / weights.sum()))
        traced.apply(name, int(rng.integers(1000)), int(rng.integers(1, 8)))
        traced.tree.check()
        if event % 1000 == 0:
            check_paths(traced)
    traced.release_all()


@given(events=EVENTS, seed=st.integers(0, 99))
def test_a_plan_covers_each_row_with_its_path(events: list[tuple[str, int, int]], seed: int) -> None:
    traced = Traced(400, 3)
    for event in events:
        traced.apply(*event)
    nodes = np.array(sorted(traced.paths), np.int64)
    for node in nodes.tolist():
        assert traced.compute(node)
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


def test_rows_of_one_key_are_neighbours() -> None:
    tree = KvTree(8, 4)
    nodes = [tree.insert(key, path(first, 9)) for first, key in enumerate((7, 3, 7, 3, 5))]
    assert tree.depth_first(ids(*nodes)).tolist() == [1, 3, 4, 0, 2]


@given(events=EVENTS, seed=st.integers(0, 99))
def test_what_is_arranged_is_ordered_appended_and_planned(events: list[tuple[str, int, int]], seed: int) -> None:
    """Some calls follow another one without a change, which keeps the order, and some follow a fork."""
    whole, parts = Traced(400, 3), Traced(400, 3)
    for event in [*events, ("insert", 7, 3), ("fork", seed, 2)]:
        whole.apply(*event)
        parts.apply(*event)
    rng = np.random.default_rng(seed)
    for call in range(3):
        nodes = rng.permutation(np.array(sorted(whole.paths), np.int64)) if call % 2 == 0 else nodes  # noqa: F821
        for traced in (whole, parts):
            for node in nodes.tolist():
                assert traced.compute(node)
        counts = 1 + rng.integers(3, size=len(nodes))
        appended = np.array([c if n in whole.open else 0 for n, c in zip(nodes.tolist(), counts.tolist(), strict=True)])
        for traced in (whole, parts):
            for node, count in zip(nodes.tolist(), appended.tolist(), strict=True):
                traced.tree.extend_by(node, [1] * count) if count else None
        order, slots, plan = whole.tree.arrange(nodes, counts, appended, 4321)
        expected = parts.tree.depth_first(nodes)
        np.testing.assert_array_equal(order, expected)
        writes = np.repeat(appended[order] > 0, counts[order])
        wrote = parts.tree.append(nodes[order][appended[order] > 0], appended[order][appended[order] > 0])
        np.testing.assert_array_equal(slots[writes], wrote)
        assert (slots[~writes] == 4321).all()
        for found, wanted in zip(plan, parts.tree.plan(nodes[order], counts[order]), strict=True):
            np.testing.assert_array_equal(found, wanted)
        if call == 1:
            for traced in (whole, parts):
                traced.fork(min(traced.paths), 0, 2)
    whole.tree.check()
    with pytest.raises(ValueError, match="all its rows, or of none"):
        whole.tree.arrange(nodes[:1], ids(3), ids(2), 0)


@given(events=EVENTS, seed=st.integers(0, 99), ahead=st.integers(1, 7))
def test_keys_ahead_have_the_slots_that_single_steps_would_read(
    events: list[tuple[str, int, int]], seed: int, ahead: int
) -> None:
    """The plan has a row's keys so far; as its node grows by one a step, the slots are those of its path in order."""
    traced = Traced(600, 3)
    for event in [*events, ("insert", 7, 3), ("fork", seed, 3)]:
        traced.apply(*event)
    tree, nodes = traced.tree, np.array(sorted(traced.open), np.int64)
    for node in nodes.tolist():
        assert traced.compute(node)
    ones, before = np.ones_like(nodes), tree.lengths(nodes)
    tree.extend(nodes, (1 + ahead) * ones, np.zeros(len(nodes) * (1 + ahead), np.int64))
    order, slots, plan = tree.arrange(nodes, ones, ones, 4321, ahead)
    assert tree.lengths(nodes).tolist() == (before + 1 + ahead).tolist()
    whole = tree.plan(nodes[order], ones)
    own = np.searchsorted(plan[5], np.arange(len(nodes)), "right") - 1
    for i, (found, later) in enumerate(zip(plan, whole, strict=True)):
        later = later.copy()
        if i == 3:
            later[own] -= ahead
        np.testing.assert_array_equal(found, later)
    rows = slots.reshape(-1, 1 + ahead)
    for row, node in zip(rows, own.tolist(), strict=True):
        at = plan[2][node] + plan[3][node] - 1 + np.arange(1 + ahead)
        pages = plan[1][plan[0][node] : plan[0][node + 1]]
        assert row.tolist() == (pages[at // 3] * 3 + at % 3).tolist()
    ends = np.array([tree.end(node) for node in nodes.tolist()])
    tree.name(nodes, ends - ahead, ahead * ones, np.arange(len(nodes) * ahead) % 3)
    for i, node in enumerate(nodes.tolist()):
        tokens = tree.tokens(node, tree.length(node) - ahead - 1, ahead + 1).tolist()
        assert tokens == [0, *((np.arange(ahead) + i * ahead) % 3).tolist()]
    tree.check()


def test_an_order_does_not_outlive_its_nodes() -> None:
    """A new node has the number of one that is gone, and comes behind those that stayed."""
    tree = KvTree(9, 4)
    root = tree.insert(0, path(1, 2))
    fill(tree, root)
    first, second = tree.fork(root, 2)
    for expected in ([0, 1], [1, 0]):
        for node in (first, second):
            tree.extend_by(node, [5])
        order, _, _ = tree.arrange(ids(first, second), ids(1, 1), ids(1, 1), 0)
        assert order.tolist() == expected
        if expected == [0, 1]:
            tree.evict(first)
            tree.release(first)
            assert tree.fork(tree.rewind(second, 2), 1) == [first]


def test_fork_in_mid_page_and_rewind_share_pages() -> None:
    tree = KvTree(10, 4)
    root = tree.insert(0, path(1, 2, 3, 4, 5, 6))
    fill(tree, root)
    a, b = tree.fork(root, 2)
    assert tree.free_pages == 8
    tree.extend_by(a, [7])
    tree.extend_by(b, [1, 2, 3, 4, 5])
    tree.append(ids(a, b), ids(1, 5))
    assert tree.free_pages == 5
    upper = tree.rewind(b, 9)  # keeps three of b's five tokens, so the halves share b's first page
    assert (tree.length(upper), tree.length(b), tree.parent(b), tree.free_pages) == (3, 2, upper, 5)
    indptr, _, offset, length, position, _, _ = tree.plan(ids(b), ids(1))
    assert (offset.tolist(), length.tolist(), position.tolist()) == ([0, 0, 3], [6, 3, 2], [0, 6, 9])
    assert np.diff(indptr).tolist() == [2, 1, 2]
    tree.release(b)
    tree.forget()
    assert tree.free_pages == 6, "the straddled page is still the upper half's"
    tree.check()


def test_prompts_are_found_again_where_they_begin_alike_and_the_key_is_the_same() -> None:
    tree = KvTree(20, 2)
    first = tree.insert(0, path(1, 2, 3, 4))
    fill(tree, first)
    tree.release(first)
    assert (tree.keys, tree.reused) == (4, 0)
    second = tree.insert(0, path(1, 2, 3, 9, 9))  # shares three tokens, in mid-page
    assert tree.reused == 3
    assert [run[0] for run in tree.missing(second)[1:]] == [0, 2]
    other = tree.insert(1, path(1, 2, 3, 4))  # other weights
    assert (tree.reused, len(tree.missing(other)[0])) == (3, 1)
    fill(tree, second)
    child = tree.fork(second, 1)[0]
    tree.extend_by(child, [5, 6])
    fill(tree, child)
    tree.release(child)
    whole = tree.insert(0, path(1, 2, 3, 9, 9, 5, 6, 7))  # the next turn of a conversation
    assert tree.reused == 3 + 7
    assert tree.missing(whole)[2] == [1]
    tree.check()


def test_the_least_recently_used_goes_first_and_what_is_held_stays() -> None:
    tree = KvTree(4, 2)
    nodes = [tree.insert(0, path(10 * i, 1)) for i in range(4)]
    for node in nodes:
        fill(tree, node)
    for node in (nodes[2], nodes[0], nodes[1]):  # node 3 stays held
        tree.release(node)
    kept = tree.insert(0, path(20, 1))  # used again
    tree.release(kept)
    assert tree.make_room(2) == 2
    found = [tree.insert(0, path(10 * i, 1)) for i in range(4)]
    assert [len(tree.missing(node)[0]) for node in found] == [1, 1, 0, 0]
    assert tree.make_room(4) == 2
    tree.check()


def test_misuse_is_refused_and_changes_nothing() -> None:
    tree = KvTree(2, 4)
    root = tree.insert(0, path(*range(9)))
    with pytest.raises(KvExhaustedError, match="3 KV pages are needed and 2 are free"):
        tree.append(ids(root), ids(9))
    (child,) = tree.fork(root, 1)
    tree.extend_by(child, [1])
    for misuse in (
        lambda: tree.extend_by(root, [1]),  # sealed
        lambda: tree.append(ids(root), ids(10)),  # more than it has
        lambda: tree.append(ids(child, child), ids(1, 1)),
        lambda: tree.release(root),  # held by nobody but its child
        lambda: tree.fork(root, 1),
        lambda: tree.fork(child, 0),
        lambda: tree.rewind(child, 0),
        lambda: tree.rewind(child, 11),
        lambda: tree.length(7),
        lambda: tree.insert(0, path()),
        lambda: tree.tokens(child, 0, 2),
        lambda: tree.name(ids(root), ids(0), ids(1), path(1)),  # sealed
        lambda: tree.name(ids(child), ids(9), ids(2), path(1, 2)),  # more than it has
        lambda: tree.name(ids(child), ids(8), ids(1), path(1)),  # above it
        lambda: tree.name(ids(child), ids(9), ids(1), path(1, 2)),
        lambda: tree.lengths(ids(child, 7)),
        lambda: tree.arrange(ids(child), ids(1), ids(0), 0, 1),
        lambda: tree.arrange(ids(child), ids(1), ids(1), 0, -1),
        lambda: KvTree(0, 4),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            misuse()
    sibling = tree.insert(1, path(1))
    with pytest.raises(ValueError, match="before the keys above it are back"):
        tree.plan(ids(child), ids(1))
    tree.append(ids(sibling), ids(1))
    tree.release(child)
    other = tree.insert(2, path(1))
    tree.append(ids(other), ids(1))
    with pytest.raises(ValueError, match="depth-first"):
        tree.plan(ids(other, sibling, other), ids(1, 1, 1))
    tree.check()


def test_eviction_spares_the_paths_in_use() -> None:
    tree = KvTree(4, 2)
    root = tree.insert(0, path(1, 2))
    a, b, c = tree.fork(root, 3)
    for node in (a, b, c):
        tree.extend_by(node, [1, 2])
        fill(tree, node)
    assert tree.evict_others(ids(b), 1) == 1
    assert tree.evict_others(ids(b), 4) == 2
    assert (tree.length(root), tree.length(a), tree.length(b), tree.length(c)) == (2, 0, 2, 0)
    tree.check()


def test_keys_lost_by_held_nodes_are_told_with_the_slots_they_lie_in() -> None:
    tree = KvTree(8, 4)
    tree.record_drops()
    prompt = tree.insert(0, path(*range(6)))
    slots = fill(tree, prompt)
    (node,) = tree.fork(prompt, 1)
    tree.extend_by(node, path(7, 8, 9))
    own = fill(tree, node)
    serial = tree.serial(node)
    tree.evict(node)
    found = tree.take_dropped()
    assert [x.tolist() for x in found] == [[serial], [6], [3], own.tolist()]
    upper = tree.rewind(node, 4)  # splits the prompt: its keys keep their name
    assert (tree.serial(upper), tree.position(upper)) == (tree.serial(tree.parent(node)), 0)
    tree.evict_others(ids(), 8)
    serials, positions, counts, lie = tree.take_dropped()
    assert set(serials.tolist()) == {tree.serial(upper)}
    assert sorted(zip(positions.tolist(), counts.tolist(), strict=True)) == [(0, 4), (4, 2)]
    assert sorted(lie.tolist()) == sorted(slots.tolist())
    tree.release(upper)
    tree.release(node)
    assert [len(x) for x in tree.take_dropped()] == [0] * 4, "nobody held what was dropped"


def test_keys_come_back_from_the_host_to_nodes_that_were_split_meanwhile() -> None:
    """Each half gets its own keys, and what the host has no more is not restored."""
    cache = KvCache(64, 4, torch.device("cpu"), host_tokens=20)
    k, v = cache._pages[0] = torch.zeros(17, 4, 1, 2), torch.zeros(17, 4, 1, 2)

    def keys(node: int) -> list[float]:
        plan = cache.tree.plan(ids(node), ids(1))
        slots = [
            page * 4 + slot
            for pages in np.split(plan[1], plan[0][1:-1])
            for page in pages.tolist()
            for slot in range(4)
        ]
        assert len(plan[3]) == 1
        begin = int(plan[2][0])
        return k.view(-1, 2)[slots][begin : begin + int(plan[3][0]), 0].tolist()

    node = cache.tree.insert(0, path(*range(10)))
    slots = torch.from_numpy(fill(cache.tree, node))
    k.view(-1, 2)[slots] = torch.arange(10.0)[:, None]
    v.view(-1, 2)[slots] = -torch.arange(10.0)[:, None]
    cache.tree.evict(node)
    cache.save_dropped()
    k.zero_()
    upper = cache.tree.rewind(node, 3)
    assert cache.restore(upper, 0, 3) == 3
    assert keys(upper) == [0, 1, 2]
    assert cache.restore(node, 0, 7) == 7
    written = k.view(-1, 2)[:, 0]
    assert sorted(written[written > 0].tolist()) == list(range(1, 10))
    last = cache.tree.plan(ids(node), ids(1))
    page, offset = int(last[1][int(last[0][1])]), int(last[2][1])
    assert k.view(-1, 2)[page * 4 + offset, 0] == 3, "the lower half begins with its own first key"
    cache.forget_dropped()
    cache.tree.evict(node)
    cache.forget_dropped()
    assert cache.restore(node, 0, 7) == 0
