"""A tree without the ends of responses, against the paths that it must keep."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltree.engine.data.cut import cut
from rolltree.engine.data.media import Picture
from rolltree.engine.data.paths import last_marked
from rolltree.engine.data.segment import LeafStatus, Segment
from rolltree.engine.data.tree import TokenTree

from .test_tree import check_laws, ids


@st.composite
def cases(draw: st.DrawFn) -> tuple[TokenTree, np.ndarray]:
    responses = draw(st.lists(ids, min_size=1, max_size=10))
    tree = TokenTree.from_sequences([7, 8], responses, advantages=np.arange(len(responses)))
    tree.set("path_advantage", np.arange(tree.response_length.sum()))
    tree.rewards["reward"] = np.arange(tree.num_leaves, dtype=np.float32)
    return tree, np.array([draw(st.integers(0, len(response))) for response in responses])


def test_last_marked() -> None:
    tree = TokenTree.from_sequences([1], [[2, 3, 4], [], [5, 6]])
    assert last_marked(tree, np.array([1, 1, 0, 0, 0], bool)).tolist() == [2, 0, 0]
    assert last_marked(tree, np.array([0, 0, 1, 1, 0], bool)).tolist() == [3, 0, 1]
    empty = TokenTree.from_sequences([1], [[]])
    assert last_marked(empty, np.zeros(0, bool)).tolist() == [0]


@settings(max_examples=60, deadline=None)
@given(cases())
def test_what_is_kept(case: tuple[TokenTree, np.ndarray]) -> None:
    tree, extent = case
    part = cut(tree, extent)
    if not (extent > 0).any():
        assert part is None
        return
    assert part is not None
    check_laws(part)
    leaves = np.flatnonzero(extent > 0)
    np.testing.assert_array_equal(part.advantage, tree.advantage[leaves])
    np.testing.assert_array_equal(part.rewards["reward"], tree.rewards["reward"][leaves])
    first = np.cumsum(tree.response_length) - tree.response_length
    values = iter(np.split(part.path_advantage, np.cumsum(part.response_length)[:-1]))
    needed = set()
    for place, leaf in enumerate(leaves):
        before = tree.token_id[tree.path_rows(leaf)].tolist()
        after = part.token_id[part.path_rows(place)].tolist()
        assert len(after) >= 2 + extent[leaf]
        assert after == before[: len(after)]
        np.testing.assert_array_equal(next(values), tree.path_advantage[first[leaf] : first[leaf] + len(after) - 2])
        needed |= set(tree.path_rows(leaf)[: 2 + extent[leaf]].tolist())
    assert part.num_tokens == len(needed | {0, 1}), "nothing is kept that no response needs"


def test_the_end_inside_a_node_that_another_response_needs() -> None:
    parts = [Segment.prompt([1, 2]), Segment.make([3, 4, 5, 6]), Segment.make([7]), Segment.make([8, 9])]
    tree = TokenTree.from_nodes([-1, 0, 1, 1], parts, [2, 3], [LeafStatus.STOP] * 2)
    part = cut(tree, np.array([2, 5]))
    assert part is not None
    assert [s.response for s in part.flatten()] == [[3, 4, 5, 6], [3, 4, 5, 6, 8]]
    part = cut(tree, np.array([2, 3]))
    assert part is not None
    assert [s.response for s in part.flatten()] == [[3, 4, 5], [3, 4, 5]]


def test_a_turn_after_the_response_of_another() -> None:
    tree = TokenTree.from_sequences([[1, 2], [1, 2, 3, 4, 5]], [[3, 4], [6, 7]])
    part = cut(tree, np.array([1, 1]))
    assert part is not None
    assert [(s.prompt, s.response) for s in part.flatten()] == [([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6])]
    part = cut(tree, np.array([1, 0]))
    assert part is not None
    assert [(s.prompt, s.response) for s in part.flatten()] == [([1, 2], [3])]


def test_a_tree_that_is_needed_whole_stays_itself() -> None:
    tree = TokenTree.from_sequences([1, 2], [[3, 4], [3, 5]])
    assert cut(tree, tree.response_length) is tree


def test_pictures_stay_whole() -> None:
    tree = TokenTree.from_sequences([1, 2], [[3, 4], [5, 6]])
    tree = replace(tree, pictures=(object.__new__(Picture),))
    part = cut(tree, np.array([1, 0]))
    assert part is not None
    assert [s.response for s in part.flatten()] == [[3, 4]]


@pytest.mark.parametrize("extent", [[2, 0], [1, 2]])
def test_the_tree_itself_is_not_changed(extent: list[int]) -> None:
    tree = TokenTree.from_sequences([1, 2], [[3, 4], [3, 5]])
    before = [s.response for s in tree.flatten()]
    cut(tree, np.array(extent))
    assert [s.response for s in tree.flatten()] == before
