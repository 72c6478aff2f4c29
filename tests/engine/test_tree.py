"""TokenTree: exact round trips, the laws of its arrays, and the merging rule."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltree.engine.tree import LeafStatus, Origin, Segment, TokenTree

ids = st.lists(st.integers(0, 2), max_size=7)  # few ids, so that prefixes are shared


@st.composite
def groups(draw):
    responses = draw(st.lists(ids, min_size=1, max_size=12))
    with_logprobs = draw(st.booleans())
    logprobs = [draw(st.lists(st.sampled_from([-0.5, -1.0]), min_size=len(r), max_size=len(r))) for r in responses]
    masks = [draw(st.lists(st.booleans(), min_size=len(r), max_size=len(r))) for r in responses]
    return responses, (logprobs if with_logprobs else None), masks


def check_laws(tree: TokenTree) -> None:
    rows = np.arange(tree.num_tokens)
    path_of = {
        int(row): tree.path_rows(leaf)[: i + 1]
        for leaf in range(tree.num_leaves)
        for i, row in enumerate(tree.path_rows(leaf))
    }
    for i in rows:  # the interval rule names exactly the path
        seen = rows[(rows <= i) & (i < tree.subtree_end)]
        np.testing.assert_array_equal(seen, path_of[i])
        assert tree.position[i] == len(seen) - 1
        assert tree.parent_row[i] == (seen[-2] if len(seen) > 1 else -1)
    np.testing.assert_array_equal(tree.start, np.cumsum(tree.length) - tree.length)
    assert (tree.parent[1:] < np.arange(1, tree.num_nodes)).all()
    for node in range(tree.num_nodes):
        below = {leaf for leaf in range(tree.num_leaves) if tree.start[node] in tree.path_rows(leaf)}
        assert below == set(tree.leaf_order[tree.first_leaf[node] : tree.last_leaf[node] + 1].tolist())


@settings(max_examples=200, deadline=None)
@given(groups())
def test_round_trip_and_laws(group):
    responses, logprobs, masks = group
    advantages = np.linspace(-1, 1, len(responses))
    tree = TokenTree.from_sequences(
        [7, 8], responses, advantages=advantages, behaviour_logprobs=logprobs, loss_masks=masks, policy_version=3
    )
    for i, sequence in enumerate(tree.flatten()):
        assert sequence.prompt == [7, 8]
        assert sequence.response == responses[i]
        assert sequence.loss_mask.tolist() == masks[i]
        assert sequence.policy_version.tolist() == [3] * len(responses[i])
        assert sequence.advantage == np.float32(advantages[i])
        if logprobs is None:
            assert np.isnan(sequence.behaviour_logprob).all()
        else:
            assert sequence.behaviour_logprob.tolist() == logprobs[i]
    check_laws(tree)
    assert tree.logical_tokens == sum(2 + len(r) for r in responses)
    # merged as far as the rule allows: unique tokens = distinct prefixes of (id, log-prob, mask)
    keys = [
        list(zip(r, logprobs[i] if logprobs else [None] * len(r), masks[i], strict=True))
        for i, r in enumerate(responses)
    ]
    assert tree.num_tokens == 2 + len({tuple(k[: n + 1]) for k in keys for n in range(len(k))})


@settings(max_examples=100, deadline=None)
@given(groups(), st.data())
def test_without_leaves_equals_building_from_the_rest(group, data):
    responses, logprobs, masks = group
    tree = TokenTree.from_sequences([5], responses, behaviour_logprobs=logprobs, loss_masks=masks)
    tree.rewards["reward"] = np.arange(len(responses), dtype=np.float32)
    drop = np.array(data.draw(st.lists(st.booleans(), min_size=len(responses), max_size=len(responses))))
    rest = tree.without_leaves(drop)
    if drop.all():
        assert rest is None
        return
    assert [s.response for s in rest.flatten()] == [r for r, d in zip(responses, drop, strict=True) if not d]
    assert rest.rewards["reward"].tolist() == np.flatnonzero(~drop).tolist()
    check_laws(rest)


def test_from_nodes_replaces_empty_segments_by_their_parent():
    sampled = lambda *t: Segment.sampled(t, [-0.1] * len(t))  # noqa: E731
    tree = TokenTree.from_nodes(
        [-1, 0, 1, 1, 0],
        [Segment.prompt([1, 2]), sampled(), sampled(3), sampled(4, 5), sampled()],
        [4, 2, 3],
        [LeafStatus.LENGTH, LeafStatus.STOP, LeafStatus.STOP],
    )
    assert [s.response for s in tree.flatten()] == [[], [3], [4, 5]]
    assert [s.status for s in tree.flatten()] == [LeafStatus.LENGTH, LeafStatus.STOP, LeafStatus.STOP]
    assert tree.num_nodes == 3
    assert tree.origin.tolist() == [Origin.PROMPT] * 2 + [Origin.SAMPLED] * 3
    check_laws(tree)


def test_a_different_log_prob_splits_the_path():
    tree = TokenTree.from_sequences([1], [[2, 3], [2, 3]], behaviour_logprobs=[[-0.5, -0.5], [-0.5, -0.6]])
    assert tree.num_tokens == 4
    assert TokenTree.from_sequences([1], [[2, 3], [2, 3]]).num_tokens == 3


def test_ten_thousand_leaves():
    rng = np.random.default_rng(0)
    responses = [rng.integers(0, 3, rng.integers(0, 40)).tolist() for _ in range(10_000)]
    tree = TokenTree.from_sequences([1, 2, 3], responses)
    assert [s.response for s in tree.flatten()] == responses


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: TokenTree.from_sequences([1], []), "at least one response"),
        (lambda: TokenTree.from_sequences([], [[1]]), "prompt of at least one token"),
        (lambda: TokenTree.from_sequences([1], [[2]], advantages=[1.0, 2.0]), "advantages has 2 entries"),
        (lambda: TokenTree.from_sequences([1], [[2]], behaviour_logprobs=[[0.1, 0.2]]), r"behaviour_logprobs\[0\]"),
        (
            lambda: TokenTree.from_nodes([-1, 0], [Segment.prompt([1]), Segment.prompt([2])], [0], [LeafStatus.STOP]),
            "childless",
        ),
    ],
)
def test_mistakes_are_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()
