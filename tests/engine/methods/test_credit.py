"""Advantage estimators against independent few-line formulas, on trees made by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltree.engine.data.tree import LeafStatus, Segment, TokenTree
from rolltree.engine.errors import UserError
from rolltree.engine.methods.credit import ADVANTAGES, find_advantage


def tree_of(responses, rewards):
    tree = TokenTree.from_sequences([1, 2], responses)
    tree.rewards["reward"] = np.asarray(rewards, np.float32)
    return tree


FLAT = [[10], [20, 21], [30, 31, 32], [40]]
REWARDS = [1.0, 0.0, 0.5, 0.0]


def expected(name, responses, rewards):
    n, mean = len(rewards), sum(rewards) / len(rewards)
    if name == "group_norm":
        sd = (sum((r - mean) ** 2 for r in rewards) / (n - 1)) ** 0.5
        return [(r - mean) / (sd + 1e-6) for r in rewards]
    if name == "group_mean":
        return [r - mean for r in rewards]
    if name == "rloo":
        return [rewards[i] - sum(rewards[:i] + rewards[i + 1 :]) / (n - 1) for i in range(n)]
    if name == "maxrl":
        return [(r - mean) / mean if mean else 0.0 for r in rewards]
    if name == "opo":
        lengths = [len(r) for r in responses]
        baseline = sum(a * b for a, b in zip(lengths, rewards, strict=True)) / sum(lengths)
        return [r - baseline for r in rewards]
    assert name == "tree_path_mean"
    return treepo(responses, rewards)


def treepo(responses, rewards):
    """Groups read off the token ids: the responses that share a prefix, for every prefix of a leaf's response."""
    out = []
    for mine, reward in zip(responses, rewards, strict=True):
        groups = {
            frozenset(i for i, r in enumerate(responses) if list(r[:depth]) == list(mine[:depth]))
            for depth in range(len(mine) + 1)
        }
        groups = [g for g in groups if len(g) > 1 or len(g) == len(responses)]
        out.append(sum(reward - sum(rewards[i] for i in g) / len(g) for g in groups) / len(groups))
    return out


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize(
    ("responses", "rewards"),
    [
        (FLAT, REWARDS),
        (FLAT, [0.0, 0.0, 0.0, 0.0]),
        (FLAT, [1.0, 1.0, 1.0, 1.0]),
        ([[5, 6, 7], [5, 6, 8], [5, 9], [3], [5, 6, 8, 1], [5]], [1.0, 0.0, 1.0, 0.25, 0.0, 1.0]),
        ([[5, 1], [5, 2]], [1.0, 0.0]),  # the root and its only child hold the same leaves: one group
    ],
)
def test_formula(name, responses, rewards):
    advantage = find_advantage(name)(tree_of(responses, rewards))
    np.testing.assert_allclose(advantage, expected(name, responses, rewards), rtol=1e-6, atol=1e-7)


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=6), st.integers(0, 4)), min_size=1, max_size=12),
)
def test_tree_path_mean_on_random_trees(leaves):
    responses, rewards = [list(r) for r, _ in leaves], [v / 4 for _, v in leaves]
    advantage = ADVANTAGES["tree_path_mean"](tree_of(responses, rewards))
    np.testing.assert_allclose(advantage, treepo(responses, rewards), atol=1e-6)


def test_tree_path_mean_does_not_depend_on_how_runs_are_cut():
    sampled = [Segment.sampled([t], [-0.5]) for t in (5, 6, 7, 8)]
    prompt = Segment.prompt([1])
    stop = [LeafStatus.STOP] * 3
    # 5 - 6 - {7, 8} and a third response; 6 is a node of its own, then part of its parent
    cut = TokenTree.from_nodes([-1, 0, 1, 2, 2, 0], [prompt, *sampled, Segment.sampled([9], [-0.5])], [3, 4, 5], stop)
    joined = TokenTree.from_nodes(
        [-1, 0, 1, 1, 0],
        [prompt, Segment.sampled([5, 6], [-0.5, -0.5]), *sampled[2:], Segment.sampled([9], [-0.5])],
        [2, 3, 4],
        stop,
    )
    for tree in (cut, joined):
        tree.rewards["reward"] = np.array([1, 0, 0], np.float32)
    np.testing.assert_array_equal(ADVANTAGES["tree_path_mean"](cut), ADVANTAGES["tree_path_mean"](joined))


@pytest.mark.parametrize(
    ("name", "value"),
    [("group_norm", 3 / (1 + 1e-6)), ("group_mean", 3), ("rloo", 3), ("maxrl", 0), ("opo", 0), ("tree_path_mean", 0)],
)
def test_group_of_one(name, value):
    np.testing.assert_allclose(ADVANTAGES[name](tree_of([[4, 5]], [3.0])), [value])


def test_opo_of_empty_responses_is_the_group_mean():
    np.testing.assert_allclose(ADVANTAGES["opo"](tree_of([[], []], [1.0, 0.0])), [0.5, -0.5])


def test_maxrl_refuses_negative_rewards():
    with pytest.raises(UserError, match=r"maxrl.*-1"):
        ADVANTAGES["maxrl"](tree_of([[1], [2]], [-1.0, 1.0]))


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(UserError, match=r"group_nrom.*group_norm.*tree_path_mean.*file.py:function"):
        find_advantage("group_nrom")


def test_function_of_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def double(tree):\n    return 2 * tree.rewards['reward']\ndef wrong(tree):\n    return [0.0]\n")
    tree = tree_of(FLAT, REWARDS)
    np.testing.assert_allclose(find_advantage(f"{file}:double")(tree), 2 * np.array(REWARDS))
    with pytest.raises(UserError, match="4 finite numbers"):
        find_advantage(f"{file}:wrong")(tree)
    with pytest.raises(UserError, match="defines no function 'triple'"):
        find_advantage(f"{file}:triple")
    with pytest.raises(UserError, match="There is no file"):
        find_advantage(f"{tmp_path}/other.py:double")
    file.write_text("import nothing_of_that_name\n")
    with pytest.raises(UserError, match="cannot be imported"):
        find_advantage(f"{file}:double")
