"""TokenTree: exact round trips, the laws of its arrays, and the merging rule."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltree.engine.data.segment import LeafStatus, Origin, Segment
from rolltree.engine.data.tree import TokenTree

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


@pytest.mark.slow
@settings(max_examples=70, deadline=None)
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


@settings(max_examples=50, deadline=None)
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


@pytest.mark.check
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


@st.composite
def samples(draw):
    """Samples with prompts of their own that begin alike; prompts often repeat another sample's prompt and response."""
    prompts, responses = [], []
    for _ in range(draw(st.integers(1, 8))):
        base = [7]
        if prompts and draw(st.booleans()):
            i = draw(st.integers(0, len(prompts) - 1))
            base = prompts[i] + responses[i]
        prompts.append(base + draw(st.lists(st.integers(0, 2), max_size=3)))
        responses.append(draw(ids))
    return prompts, responses, draw(st.lists(st.sampled_from([-0.5, -1.0]), min_size=60, max_size=60))


@pytest.mark.check
@settings(max_examples=70, deadline=None)
@given(samples())
def test_many_prompts(drawn):
    prompts, responses, pool = drawn
    logprobs = [pool[: len(r)] for r in responses]
    masks = [[i % 3 != 1 for i in range(len(r))] for r in responses]
    advantages = np.arange(len(prompts)) - 2.0
    tree = TokenTree.from_sequences(
        prompts, responses, advantages=advantages, behaviour_logprobs=logprobs, loss_masks=masks
    )
    counted = np.zeros(tree.num_tokens, int)
    for i, s in enumerate(tree.flatten()):
        assert (s.prompt, s.response) == (prompts[i], responses[i])
        assert s.behaviour_logprob.tolist() == logprobs[i]
        assert s.loss_mask.tolist() == masks[i]
        assert tree.loss_length[i] == sum(masks[i])
        assert tree.response_length[i] == len(responses[i])
        counted[tree.response_rows(i)] += 1
    check_laws(tree)
    np.testing.assert_array_equal(tree.response_leaves, counted)
    rest = tree.without_leaves(np.arange(len(prompts)) % 2 == 1)
    assert [(s.prompt, s.response) for s in rest.flatten()] == list(zip(prompts, responses, strict=True))[::2]


def test_a_conversation_by_turns_is_one_path():
    turns = [([1, 2], [3, 4]), ([1, 2, 3, 4, 9], [5]), ([1, 2, 3, 4, 9, 5, 9, 9], [6, 7])]
    tree = TokenTree.from_sequences(
        [p for p, _ in turns], [r for _, r in turns], behaviour_logprobs=[[-1.0] * len(r) for _, r in turns]
    )
    assert tree.num_tokens == 10
    assert tree.loss_length.tolist() == [2, 1, 2]
    assert tree.response_leaves.tolist() == [0, 0, 1, 1, 0, 1, 0, 0, 1, 1]
    np.testing.assert_array_equal(np.isnan(tree.behaviour_logprob), [1, 1, 0, 0, 1, 0, 1, 1, 0, 0])


def test_prompts_of_several_kinds_make_a_forest():
    prompts, responses = [[1, 2], [8], [1, 3], [8]], [[4], [5], [6], [5, 7]]
    trees, members = TokenTree.forest(prompts, responses, advantages=[0.0, 1.0, 2.0, 3.0])
    assert [m.tolist() for m in members] == [[0, 2], [1, 3]]
    for tree, samples_of in zip(trees, members, strict=True):
        for i, s in zip(samples_of, tree.flatten(), strict=True):
            assert (s.prompt, s.response, s.advantage) == (prompts[i], responses[i], float(i))
    with pytest.raises(ValueError, match=r"share no first token.*forest"):
        TokenTree.from_sequences(prompts, responses)
    with pytest.raises(ValueError, match="prompt has 2 entries for 1 responses"):
        TokenTree.from_sequences([[1], [1]], [[2]])
    with pytest.raises(ValueError, match="at least one token"):
        TokenTree.from_sequences([], [[2]])
    with pytest.raises(ValueError, match="share no first token"):
        TokenTree.from_sequences([[1], []], [[2], [3]])


def test_versions_of_responses_of_several_lengths():
    tree = TokenTree.from_sequences([5], [[1, 2], [1, 3, 4], []], policy_version=[[3, 4], np.array([3, 3, 4]), 7])
    assert [s.policy_version.tolist() for s in tree.flatten()] == [[3, 4], [3, 3, 4], []]
    alike = TokenTree.from_sequences([5], [[1, 2], [1]], policy_version=np.int64(6))
    assert [s.policy_version.tolist() for s in alike.flatten()] == [[6, 6], [6]]
