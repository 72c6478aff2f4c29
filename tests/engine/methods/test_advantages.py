"""Further advantage estimators against formulas written for single responses, on trees made by hand."""

from functools import partial

import numpy as np
import pytest

from rolltree.engine.data.segment import LeafStatus, Origin, Segment
from rolltree.engine.data.statistics import of_ids
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.errors import UserError
from rolltree.engine.methods.advantages import ADVANTAGES
from rolltree.engine.methods.credit import give_credit

RESPONSES = [[10, 11], [10, 12, 13], [10, 12, 14], [20], [20, 21]]
REWARDS = [1.0, 0.0, 0.5, 0.0, 1.0]


def tree_of(responses=RESPONSES, rewards=REWARDS, **named):
    tree = TokenTree.from_sequences([1, 2], responses)
    tree.rewards["reward"] = np.asarray(rewards, np.float32)
    tree.rewards |= {name: np.asarray(values, np.float32) for name, values in named.items()}
    return tree


def mean(values):
    return sum(values) / len(values)


def sd(values):
    return (sum((v - mean(values)) ** 2 for v in values) / (len(values) - 1)) ** 0.5


def whiten(values, counts):
    total = sum(counts)
    mu = sum(v * c for v, c in zip(values, counts, strict=True)) / total
    var = sum(c * (v - mu) ** 2 for v, c in zip(values, counts, strict=True)) / (total - 1)
    return [(v - mu) / (var + 1e-8) ** 0.5 for v in values]


def of_group(name, R):
    union = [*R, 1.0]
    ranked = sorted(R)
    p = mean(R)
    return {
        "virtual_max": lambda i: (R[i] - mean(union)) / (sd(union) + 1e-6),
        "signed": lambda i: 1.0 if R[i] > 0 else -1.0,
        "passk_best": lambda i: (ranked[-1] - ranked[-2]) / (sd(R) + 1e-6) if i == R.index(max(R)) else 0.0,
        "learnable": lambda i: 4 * p * (1 - p) * (R[i] - p) / (sd(R) + 1e-6),
    }[name]


@pytest.mark.parametrize("name", ["virtual_max", "signed", "passk_best", "learnable"])
@pytest.mark.parametrize("rewards", [REWARDS, [0.0] * 5, [1.0, 0.25, 0.75, 0.5, 0.0]])
def test_credit_of_a_group(name, rewards):
    found = ADVANTAGES[name]([tree_of(rewards=rewards)])
    want = [of_group(name, rewards)(i) for i in range(5)]
    assert found.per == "leaf"
    np.testing.assert_allclose(found.values[0], want, atol=1e-9)


def test_gpg_counts_over_the_batch():
    trees = [tree_of(), tree_of(rewards=[0.0, 0.0, 0.0, 0.0, 1.0])]
    alpha = 10 / 4
    for found, tree in zip(ADVANTAGES["gpg"](trees).values, trees, strict=True):
        rewards = tree.rewards["reward"].tolist()
        np.testing.assert_allclose(found, [alpha * (r - mean(rewards)) for r in rewards], rtol=1e-6)


@pytest.mark.parametrize("whitens", [False, True])
def test_gdpo_normalises_each_reward_first(whitens):
    a, b = [1.0, 0.0, 1.0, 0.0, 1.0], [0.1, 0.2, 0.3, 0.4, 0.9]
    trees = [tree_of(a=a, b=b), tree_of(a=b, b=a)]
    found = ADVANTAGES["gdpo"](trees, weights={"a": 1.0, "b": 0.5}, whiten=whitens)
    norm = lambda x: [(v - mean(x)) / (sd(x) + 1e-6) for v in x]  # noqa: E731
    first = [x + 0.5 * y for x, y in zip(norm(a), norm(b), strict=True)]
    second = [x + 0.5 * y for x, y in zip(norm(b), norm(a), strict=True)]
    want = first + second
    np.testing.assert_allclose(
        np.concatenate(found.values), whiten(want, [1] * 10) if whitens else want, rtol=1e-5, atol=1e-6
    )


def test_task_norm_divides_by_the_tasks_spread():
    trees = [tree_of(), tree_of(rewards=[1.0, 1.0, 0.0, 1.0, 1.0]), tree_of()]
    for tree, task in zip(trees, "aba", strict=True):
        tree.meta["task"] = task
    found = ADVANTAGES["task_norm"](trees).values
    np.testing.assert_allclose(found[0], [(r - 0.5) / (sd(REWARDS * 2) + 1e-6) for r in REWARDS], rtol=1e-6)
    np.testing.assert_allclose(found[1], [(r - 0.8) / (sd([1, 1, 0, 1, 1]) + 1e-6) for r in [1, 1, 0, 1, 1]], rtol=1e-6)


def test_forward_correction_is_unbiased():
    """Wrong answers have the expected weight -(1 - rho0 - rho1), right ones 0 (rho0: accepted although wrong)."""
    rho0, rho1 = 0.1, 0.3
    accepted, refused = ADVANTAGES["noise_forward"]([tree_of([[3], [4]], [1.0, 0.0])], false_negatives=rho1).values[0]
    assert (1 - rho1) * accepted + rho1 * refused == pytest.approx(0)
    assert rho0 * accepted + (1 - rho0) * refused == pytest.approx(-(1 - rho0 - rho1))


def prefixes(tree):
    """Each node's response prefix as a tuple of ids, read off the parents."""
    own = [tuple(tree.token_id[s : s + n]) for s, n in zip(tree.start, tree.length, strict=True)]
    found = []
    for node in range(tree.num_nodes):
        path = []
        at = node
        while at > 0:
            path = [*own[at], *path]
            at = tree.parent[at]
        found.append(tuple(path))
    return found


def below(prefix):
    return [i for i, r in enumerate(RESPONSES) if tuple(r[: len(prefix)]) == prefix]


def test_treerl_of_nodes():
    tree = tree_of()
    rloo = [REWARDS[i] - mean(REWARDS[:i] + REWARDS[i + 1 :]) for i in range(5)]
    found = ADVANTAGES["treerl"]([tree])
    assert found.per == "node"
    names = prefixes(tree)
    for node, name in enumerate(names):
        value = lambda p: mean([rloo[i] for i in below(p)])  # noqa: E731
        parent = names[max(tree.parent[node], 0)]
        want = (value(name) - value(()) + value(name) - value(parent)) / len(below(name)) ** 0.5
        assert found.values[0][node] == pytest.approx(want, abs=1e-6)


def test_depth_norm_of_nodes():
    tree = tree_of()
    names, depth = prefixes(tree), [0] * tree.num_nodes
    for node in range(1, tree.num_nodes):
        depth[node] = depth[tree.parent[node]] + 1
    (found,) = ADVANTAGES["depth_norm"]([tree]).values
    value = [mean([REWARDS[i] for i in below(name)]) for name in names]
    assert max(depth) > 1
    for node in range(1, tree.num_nodes):
        peers = [value[k] for k in range(tree.num_nodes) if depth[k] == depth[node]]
        want = (value[node] - mean(peers)) / (sd(peers) + 1e-6) if len(peers) > 1 else 0
        assert found[node] == pytest.approx(want, abs=1e-6)
    assert found[0] == 0


def test_branch_mean_of_nodes():
    tree = tree_of()
    own = [(r - mean(REWARDS)) / (sd(REWARDS) + 1e-6) for r in REWARDS]
    (found,) = ADVANTAGES["branch_mean"]([tree]).values
    np.testing.assert_allclose(found, [mean([own[i] for i in below(name)]) for name in prefixes(tree)], atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"by_size": True}, {"drop_equal": True}])
def test_treepo_options(options):
    rewards = [1.0, 0.5, 0.5, 0.0, 1.0]
    tree = tree_of(rewards=rewards)
    want = []
    for i, mine in enumerate(RESPONSES):
        groups = {frozenset(below(tuple(mine[:d]))) for d in range(len(mine) + 1)}
        groups = [g for g in groups if len(g) > 1]
        if options.get("drop_equal"):
            groups = [g for g in groups if len({rewards[j] for j in g}) > 1]
        weight = [len(g) if options.get("by_size") else 1 for g in groups]
        terms = [rewards[i] - mean([rewards[j] for j in g]) for g in groups]
        want.append(sum(w * t for w, t in zip(weight, terms, strict=True)) / sum(weight))
    want = whiten(want, [len(r) for r in RESPONSES])
    np.testing.assert_allclose(ADVANTAGES["treepo"]([tree], **options).values[0], want, atol=1e-6)


def test_turns_are_compared_with_turns_of_the_same_index():
    """Two responses of two turns and one of one turn; rewards of turns at their ends, the outcome on the last."""
    tree = TokenTree.from_nodes(
        [-1, 0, 1, 2, 0, 4, 5, 0],
        [
            Segment.prompt([1]),
            Segment.sampled([3, 4], -1.0), Segment.make([9], origin=Origin.INJECTED), Segment.sampled([5], -1.0),
            Segment.sampled([6], -1.0), Segment.make([9, 9], origin=Origin.INJECTED), Segment.sampled([7, 8], -1.0),
            Segment.sampled([2], -1.0),
        ],
        [3, 6, 7],
        [LeafStatus.STOP] * 3,
    )  # fmt: skip
    tree.rewards["reward"] = np.array([1, 0, 0.5], np.float32)
    nan = np.nan
    tree.set("token_reward", [nan, 0.25, nan, nan, 0.75, nan, nan, nan, nan, nan])
    found = ADVANTAGES["turn_credit"]([tree], gamma=0.5)
    first = [0.25 + 0.5 * 1, 0.75 + 0.5 * 0, 0.5]
    second = [1.0, 0.0]
    a = [(v - mean(first)) / (sd(first) + 1e-6) for v in first]
    b = [(v - mean(second)) / (sd(second) + 1e-6) for v in second]
    want = [a[0], a[0], a[0], b[0], a[1], a[1], a[1], b[1], b[1], a[2]]
    assert found.per == "path"
    np.testing.assert_allclose(found.values[0], want, atol=1e-6)


def test_canon_compares_halves_by_length():
    tree = tree_of([[1], [2, 2], [3, 3, 3], [4, 4, 4, 4]], [1.0, 0.0, 0.5, 0.0])
    (found,) = ADVANTAGES["canon"]([tree], share=0.25).values
    short, long = 0.5, 0.25
    want = [0.25 * (r - other) + 0.75 * (r - own) for r, other, own in (
        (1.0, long, short), (0.0, long, short), (0.5, short, long), (0.0, short, long)
    )]  # fmt: skip
    np.testing.assert_allclose(found, want)


def test_a_floor_keeps_negligible_differences_small():
    rewards = [0.5, 0.5001, 0.5, 0.5]
    (found,) = ADVANTAGES["group_norm"]([tree_of([[1], [2], [3], [4]], rewards)], floor=0.1).values
    np.testing.assert_allclose(found, [(r - mean(rewards)) / (0.1 + 1e-6) for r in rewards], atol=1e-6)


def test_a_kl_to_the_reference_lowers_the_rewards_of_tokens():
    tree = TokenTree.from_sequences([1], [[3, 4], [5]], behaviour_logprobs=[[-1.0, -0.5], [-2.0]])
    tree.rewards["reward"] = np.array([1, 0], np.float32)
    tree.set("ref_logprob", [0.0, -1.5, -0.75, -1.0])
    (found,) = ADVANTAGES["reinforce_pp"]([tree], kl_coef=0.5).values
    own = [-0.5 * (-1.0 + 1.5), 1 - 0.5 * (-0.5 + 0.75), -0.5 * (-2.0 + 1.0)]
    returns = [own[0] + own[1], own[1], own[2]]
    np.testing.assert_allclose(found, whiten(returns, [1] * 3), atol=1e-6)


MADE = {
    "laser": lambda: ADVANTAGES["laser"](7),
    "cumulative": lambda: ADVANTAGES["cumulative"](),
    "constrained": lambda: ADVANTAGES["constrained"]({"reward": 0.7}),
    "prior_fusion": lambda: partial(ADVANTAGES["prior_fusion"](), step=1),
    "reweighted": lambda: ADVANTAGES["reweighted"](["reward"]),
    "by_role_mean": lambda: ADVANTAGES["by_role_mean"]({"policy": "reward"}),
    "dispersed": lambda: lambda trees: ADVANTAGES["dispersed"](trees, [["answer: 1"] * t.num_leaves for t in trees]),
}
"""Estimators with options, state or the problem's row."""


NEED_MORE = {"gae", "gdpo", "noise_forward", "pods", "by_role", "remax", "progress_bonus"}


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - NEED_MORE))
def test_groups_of_one_and_empty_responses(name):
    estimator = MADE.get(name, lambda: ADVANTAGES[name])()
    for responses, rewards in (([[3]], [1.0]), ([[], [3]], [1.0, 0.0]), ([[3], [3]], [1.0, 1.0])):
        tree = tree_of(responses, rewards)
        for column, value in (("logprob", -1.0), ("sum_p2", 0.3), ("entropy", 0.5)):
            tree.set(f"policy_{column}", value)
        tree.set("ref_logprob", -1.5)
        tree.set("teacher_logprob", -1.0)
        if hasattr(estimator, "prepare"):
            of_ids("the test", *estimator.reads)
            estimator.prepare([tree])
            tree.set(estimator.reads[0], -2.0)
        give_credit(estimator, name, [tree])


def test_every_name_is_another_credit():
    """On a tree with rewards of every kind, no two estimators agree."""
    found = {}
    elsewhere = {
        "optimal_token",
        "gradient_weighted",
        "log_ratio",
        "by_beginning",
        "remax",
        "progress_bonus",
        "canon_entropy",
        "wrong_steps",
    }  # test_pairs.py has what they read
    for name in sorted(
        set(ADVANTAGES) - {"gae", "gdpo", "noise_forward", "pods", "process", "nft", "by_role", *MADE, *elsewhere}
    ):
        trees = [tree_of(), tree_of(rewards=[0.0, 0.0, 1.0, 0.0, 0.25])]
        credit = ADVANTAGES[name](trees)
        values = []
        for tree, mine in zip(trees, credit.values, strict=True):
            counts = {"leaf": tree.response_length, "path": 1}
            if credit.per == "node":
                values.append(np.repeat(mine, tree.length)[tree.path_tokens])
            else:
                values.append(np.repeat(mine, counts[credit.per]))
        found[name] = np.concatenate(values)
    names = list(found)
    alike = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if np.allclose(found[a], found[b], atol=1e-4)]
    equal = [("batch_std", "task_norm"), ("group_norm", "turn_credit")]  # by definition, with one task and one turn
    assert alike == equal


# -- progress ----------------------------------------------------------------------------------------------------------


def probed_tree():
    """Two responses with segments of two tokens; probes at the prompt and at segment ends, one place without any."""
    sampled = lambda *ids: Segment.sampled(list(ids), [-1.0] * len(ids))  # noqa: E731
    probe = lambda *ids: Segment.make(list(ids), origin=Origin.INJECTED)  # noqa: E731
    nodes = [
        (-1, Segment.prompt([1, 2])),
        (0, sampled(10, 11)), (1, sampled(12, 13)), (2, sampled(14, 15)), (3, sampled(16)),
        (0, sampled(20, 21)), (5, sampled(22)),
        (0, probe(50, 60)), (0, probe(50, 61)),
        (1, probe(50, 62)), (1, probe(50, 63)),
        (3, probe(50, 64)),
        (5, probe(50, 65)), (5, probe(50, 66)),
    ]  # fmt: skip
    ends = [4, 6, 7, 8, 9, 10, 11, 12, 13]
    tree = TokenTree.from_nodes([n[0] for n in nodes], [n[1] for n in nodes], ends, [LeafStatus.STOP] * len(ends))
    tree.set("trained", [True, True] + [False] * 7)
    tree.rewards["reward"] = np.array([1.0, 0.0, 0.25, 0.25, 1.0, 0.5, 0.5, 0.0, 0.25], np.float32)
    return tree


def test_progress_is_the_rise_of_the_probes_mean():
    prompt, first, third, other = 0.25, 0.75, 0.5, 0.125  # J at the prompt and at the ends of segments
    A = [(1.0 - 0.5) / (sd([1.0, 0.0]) + 1e-6), (0.0 - 0.5) / (sd([1.0, 0.0]) + 1e-6)]
    per_token = [
        *(A[0] + 0.4 * r for r in [first - prompt] * 2 + [third - first] * 4 + [0.0]),
        *(A[1] + 0.4 * r for r in [other - prompt] * 2 + [0.0]),
    ]
    found = ADVANTAGES["progress_bonus"]([probed_tree()], alpha=0.4)
    assert found.per == "path"
    np.testing.assert_allclose(found.values[0][:10], per_token, rtol=1e-9)
    assert not found.values[0][10:].any()
    whole = [1.0 + 0.4 * (third - prompt), 0.0 + 0.4 * (other - prompt)]
    found = ADVANTAGES["progress_bonus"]([probed_tree()], alpha=0.4, per="response")
    assert found.per == "leaf"
    want = [(x - mean(whole)) / (sd(whole) + 1e-6) for x in whole]
    np.testing.assert_allclose(found.values[0], want + [0.0] * 7, rtol=1e-9)


def test_probes_of_a_response_that_was_not_judged_are_not_the_prompts():
    tree = probed_tree().without_leaves(np.arange(9) == 0)  # its verifier failed
    found = ADVANTAGES["progress_bonus"]([tree], alpha=1.0).values[0]
    np.testing.assert_allclose(found[:3], [0.125 - 0.25] * 2 + [0.0])


def test_progress_needs_probes():
    tree = tree_of()
    tree.meta["entry"] = {}
    with pytest.raises(UserError, match="prefix_value_probe"):
        ADVANTAGES["progress_bonus"]([tree])
    with pytest.raises(UserError, match="'segment' or 'response'"):
        ADVANTAGES["progress_bonus"]([probed_tree()], per="token")


def test_continuations_of_a_response_that_was_not_judged_are_not_the_prompts():
    """`segment_value_diff` took them for continuations of the prompt."""
    tree = probed_tree().without_leaves(np.arange(9) == 0)
    (found,) = ADVANTAGES["segment_value_diff"]([tree]).values
    rows = tree.response_rows(0)
    node = np.repeat(np.arange(tree.num_nodes), tree.length)[rows]
    np.testing.assert_allclose(found[node], [0.125 - 0.25] * 2 + [0.0 - 0.125])
