"""Advantage estimators against independent few-line formulas, on trees made by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltree.engine.data.segment import LeafStatus, Segment
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.errors import UserError
from rolltree.engine.methods.advantages import ADVANTAGES
from rolltree.engine.methods.credit import give_credit
from rolltree.engine.methods.estimators import gae, reinforce_pp
from rolltree.engine.parts.resolve import resolve


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


def leaf_credit(name, tree):
    credit = ADVANTAGES[name]([tree])
    assert credit.per == "leaf"
    return credit.values[0]


@pytest.mark.parametrize("name", ["group_norm", "group_mean", "rloo", "maxrl", "opo", "tree_path_mean"])
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
    advantage = leaf_credit(name, tree_of(responses, rewards))
    np.testing.assert_allclose(advantage, expected(name, responses, rewards), rtol=1e-6, atol=1e-7)


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=6), st.integers(0, 4)), min_size=1, max_size=12),
)
def test_tree_path_mean_on_random_trees(leaves):
    responses, rewards = [list(r) for r, _ in leaves], [v / 4 for _, v in leaves]
    advantage = leaf_credit("tree_path_mean", tree_of(responses, rewards))
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
    np.testing.assert_array_equal(leaf_credit("tree_path_mean", cut), leaf_credit("tree_path_mean", joined))


@pytest.mark.parametrize(
    ("name", "value"),
    [("group_norm", 3 / (1 + 1e-6)), ("group_mean", 3), ("rloo", 3), ("maxrl", 0), ("opo", 0), ("tree_path_mean", 0)],
)
def test_group_of_one(name, value):
    np.testing.assert_allclose(leaf_credit(name, tree_of([[4, 5]], [3.0])), [value])


def test_opo_of_empty_responses_is_the_group_mean():
    np.testing.assert_allclose(leaf_credit("opo", tree_of([[], []], [1.0, 0.0])), [0.5, -0.5])


def test_maxrl_refuses_negative_rewards():
    with pytest.raises(UserError, match=r"maxrl.*-1"):
        leaf_credit("maxrl", tree_of([[1], [2]], [-1.0, 1.0]))


def test_a_function_of_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def double(trees):\n    return [2 * tree.rewards['reward'] for tree in trees]\n"
        "def wrong(trees):\n    return [[0.0]]\ndef nan(trees):\n    return [[float('nan')] * 4]\n"
        "def none(trees):\n    return []\n"
    )
    tree = tree_of(FLAT, REWARDS)
    find = lambda name: resolve("algorithm.advantage", f"{file}:{name}", parts=ADVANTAGES, inputs=("trees",))  # noqa: E731
    give_credit(find("double"), "double", [tree])
    np.testing.assert_array_equal(tree.advantage, 2 * np.array(REWARDS, np.float32))
    for name, said in [("wrong", "needs 4 values"), ("nan", "4 of 4 are not"), ("none", "0 arrays for 1 trees")]:
        with pytest.raises(UserError, match=said):
            give_credit(find(name), name, [tree])


# -- credit of the batch, of nodes and of tokens, against plain formulas on the flat paths ----------------------------


def forest(seed):
    """Two trees with shared prefixes, tool answers and unequal lengths."""
    rng = np.random.default_rng(seed)
    trees = []
    for _ in range(2):
        responses = [rng.integers(0, 2, rng.integers(1, 7)).tolist() for _ in range(6)]
        observed = rng.random(7) < 0.3  # by place, so that shared prefixes agree
        masks = [(~observed[: len(r)]).tolist() for r in responses]
        tree = TokenTree.from_sequences([9, 9], responses, loss_masks=masks)
        tree.rewards["reward"] = rng.normal(size=6).astype(np.float32)
        trees.append(tree)
    return trees


def split(tree, values):
    return np.split(np.asarray(values), np.cumsum(tree.response_length)[:-1])


def whitened(lists, masks):
    flat = np.concatenate([np.asarray(x, np.float64)[m] for x, m in zip(lists, masks, strict=True)])
    return [(np.asarray(x) - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8) for x in lists]


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_pp_on_flat_paths(gamma):
    trees = forest(0)
    lists, masks = [], []
    for tree in trees:
        for leaf, reward in zip(tree.flatten(), tree.rewards["reward"], strict=True):
            after = np.cumsum(leaf.loss_mask[::-1])[::-1] - 1  # tokens of the loss behind each of them
            lists.append(np.where(leaf.loss_mask, reward * gamma**after, 0.0))
            masks.append(leaf.loss_mask)
    found = ADVANTAGES["reinforce_pp"](trees) if gamma == 1 else reinforce_pp(trees, gamma=gamma)
    assert found.per == "path"
    got = [x for tree, values in zip(trees, found.values, strict=True) for x in split(tree, values)]
    for a, b, mask in zip(got, whitened(lists, masks), masks, strict=True):
        np.testing.assert_allclose(a[mask], b[mask], rtol=1e-9, atol=1e-12)


def test_reinforce_pp_discounts_rewards_of_tokens():
    """Returns of 1, 2 and 3 at gamma = 0.5 are 2.75, 3.5 and 3."""
    tree = tree_of([[10, 11, 12]], [0.0])
    tree.set("token_reward", np.array([1.0, 2.0, 3.0], np.float32))
    returns = np.array([2.75, 3.5, 3.0])
    expected = (returns - returns.mean()) / np.sqrt(returns.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(reinforce_pp([tree], gamma=0.5).values[0], expected, atol=1e-6)


def test_reinforce_pp_baseline_whitens_over_the_batch():
    trees = forest(1)
    lists, masks = [], []
    for tree in trees:
        for leaf, reward in zip(tree.flatten(), tree.rewards["reward"].astype(float), strict=True):
            lists.append(np.full(len(leaf.response), reward - tree.rewards["reward"].astype(float).mean()))
            masks.append(leaf.loss_mask)
    expected = whitened(lists, masks)
    found = ADVANTAGES["reinforce_pp_baseline"](trees)
    got = np.concatenate(found.values)
    np.testing.assert_allclose(got, [x[0] for x in expected], rtol=1e-9)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9)])
def test_gae_on_flat_paths(gamma, lam):
    trees = forest(2)
    for tree in trees:
        tree.set("value", np.random.default_rng(7).normal(size=tree.num_tokens))
        tree.set("token_reward", np.random.default_rng(8).normal(size=tree.response_length.sum()))
    found = gae(trees, gamma=gamma, lam=lam, whiten=False)
    for tree, values in zip(trees, found.values, strict=True):
        targets = split(tree, tree.value_target)
        rewards = split(tree, tree.token_reward)
        for leaf, got in enumerate(split(tree, values)):
            rows = tree.response_rows(leaf)
            live = np.flatnonzero(tree.loss_mask[rows])
            following, after = 0.0, 0.0
            for place in live[::-1]:  # the textbook's loop, over one path
                reward = float(rewards[leaf][place]) + (tree.rewards["reward"][leaf] if place == live[-1] else 0.0)
                value = float(tree.value[rows][place])
                after = reward + gamma * following - value + gamma * lam * after
                following = value
                assert got[place] == pytest.approx(after, rel=1e-6, abs=1e-6)
                assert targets[leaf][place] == pytest.approx(after + value, rel=1e-5, abs=1e-5)


def test_process_rewards_of_a_group_are_normalised_together_and_summed_from_behind():
    tree = TokenTree.from_sequences([1], [[2, 3, 4], [2, 5], [6]])
    nan = np.nan
    tree.set("token_reward", [nan, 1.0, 0.0, nan, 5.0, nan])
    (found,) = ADVANTAGES["process"]([tree]).values
    one, zero, five = ((v - 2.0) / (np.std([1.0, 0.0, 5.0], ddof=1) + 1e-6) for v in (1.0, 0.0, 5.0))
    np.testing.assert_allclose(found, [one + zero, one + zero, zero, five, five, 0.0], rtol=1e-6)
    (without,) = ADVANTAGES["process"]([tree_of(FLAT, REWARDS)]).values
    assert not without.any()


def test_gae_without_a_critic_is_refused():
    with pytest.raises(UserError, match="critic"):
        gae(forest(0))


def test_node_credit_follows_the_leaves_below():
    (tree,) = forest(3)[:1]
    below = [[leaf for leaf in range(6) if tree.start[node] in tree.path_rows(leaf)] for node in range(tree.num_nodes)]
    value = np.array([tree.rewards["reward"].astype(float)[some].mean() for some in below])
    difference = ADVANTAGES["segment_value_diff"]([tree]).values[0]
    siblings = ADVANTAGES["sibling_group"]([tree]).values[0]
    for node in range(1, tree.num_nodes):
        assert difference[node] == pytest.approx(value[node] - value[tree.parent[node]])
        group = value[[n for n in range(1, tree.num_nodes) if tree.parent[n] == tree.parent[node]]]
        spread = group.std(ddof=1) if len(group) > 1 else 0.0
        assert siblings[node] == pytest.approx((value[node] - group.mean()) / (spread + 1e-6), abs=1e-6)
    assert difference[0] == siblings[0] == 0
