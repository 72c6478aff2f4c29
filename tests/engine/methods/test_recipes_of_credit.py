"""Recipes whose credit or reward is one of several named, dispersed, stepwise or remembered, against formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rolltree.engine import UserError
from rolltree.engine.data.segment import LeafStatus, Origin, Segment
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.methods.advantages import ADVANTAGES
from rolltree.engine.methods.selections import SELECTIONS
from rolltree.engine.methods.shaping import SHAPINGS

from ...support.real_step import plain_logprobs, plain_model
from .problem_runs import by_step, norm

RESPONSES = [[10, 11, 12], [10, 12], [20], [20, 21, 22, 23]]


def tree_of(rewards=(1.0, 0.0, 0.0, 1.0), **named) -> TokenTree:
    tree = TokenTree.from_sequences([1, 2], RESPONSES, behaviour_logprobs=[[-1.0] * len(r) for r in RESPONSES])
    tree.rewards["reward"] = np.asarray(rewards, np.float32)
    tree.rewards |= {name: np.asarray(values, np.float32) for name, values in named.items()}
    return tree


# -- steps -------------------------------------------------------------------------------------------------------------


def along(tree: TokenTree, name: str) -> list[np.ndarray]:
    return np.split(np.asarray(tree.columns[name]), np.cumsum(tree.response_length)[:-1])


@pytest.mark.methods
def test_capo_takes_off_wrong_steps(step_of):
    wrong = right = outside = 0
    for tree in step_of("capo").trees:
        A = norm(tree.rewards["reward"])
        for leaf, (given, found) in enumerate(
            zip(along(tree, "token_reward"), along(tree, "path_advantage"), strict=True)
        ):
            for t in range(len(given)):
                later = [value for value in given[t:] if not math.isnan(value)]  # the first ends the token's step
                off = bool(later) and later[0] < 0
                assert found[t] == pytest.approx(A[leaf] - off, abs=1e-4)
                wrong, right, outside = wrong + off, right + bool(later and not off), outside + (not later)
    assert min(wrong, right, outside) > 3


def test_a_wrong_step_begins_after_the_one_before_it():
    tree = tree_of()
    none = np.nan  # responses of 3, 2, 1 and 4 tokens
    tree.set("token_reward", [1.0, -0.5, none, none, none, -1.0, none, 0.0, -2.0, none])
    (found,) = ADVANTAGES["wrong_steps"]([tree], penalty=0.5).values
    A = np.repeat(norm(np.array([1.0, 0, 0, 1])), [3, 2, 1, 4])
    np.testing.assert_allclose(found, A - 0.5 * np.array([0, 1, 0, 0, 0, 1, 0, 0, 1, 0]))


@pytest.mark.methods
def test_process_rewards_are_summed_from_each_token_on(step_of):
    steps = step_of("process_rewards")
    for tree in steps.trees:
        given = along(tree, "token_reward")
        every = np.concatenate(given).astype(np.float64)
        known = every[~np.isnan(every)]
        spread = math.sqrt(((known - known.mean()) ** 2).sum() / max(len(known) - 1, 1))
        for values, found in zip(given, along(tree, "path_advantage"), strict=True):
            for t in range(len(values)):
                later = [
                    (v - known.mean()) / (spread + 1e-6) for v in values[t:].astype(np.float64) if not math.isnan(v)
                ]
                assert found[t] == pytest.approx(sum(later), abs=1e-3)
    assert any(np.abs(tree.path_advantage).max() > 1 for tree in steps.trees)


# -- halves and dispersion ---------------------------------------------------------------------------------------------


@pytest.mark.methods
def test_canon_splits_a_group_by_entropy(step_of):
    steps = step_of("canon_entropy")
    start, split = plain_model(steps, steps.updates[0]), 0
    for tree in steps.trees:
        H = []
        for leaf in range(tree.num_leaves):
            with torch.no_grad():
                every = plain_logprobs(start, tree, leaf, 0.1, vocabulary=True).double()
            H.append(float(-(every.exp() * every).sum(1).mean()))
        R, high = tree.rewards["reward"].astype(np.float64), [h > np.median(H) for h in H]
        want = []
        for i in range(len(R)):
            own = np.mean([R[j] for j in range(len(R)) if high[j] == high[i]])
            other = np.mean([R[j] for j in range(len(R)) if high[j] != high[i]])
            want.append(0.75 * (R[i] - other) + 0.25 * (R[i] - own))
        np.testing.assert_allclose(tree.advantage, want, atol=1e-5)
        split += bool(np.abs(np.array(want) - (R - R.mean())).max() > 0.05)
    assert split > 2, "no group has halves of different rewards"


def test_a_group_of_one_entropy_has_its_mean():
    tree = tree_of()
    tree.set("policy_entropy", 0.5)
    (found,) = ADVANTAGES["canon_entropy"]([tree]).values
    np.testing.assert_allclose(found, tree.rewards["reward"] - 0.5)
    with pytest.raises(UserError, match="needs the policy's entropy"):
        ADVANTAGES["canon_entropy"]([tree_of()])


def test_halves_by_entropy_are_compared_with_each_other():
    tree = TokenTree.from_sequences([1], [[3], [4], [5], [6]], behaviour_logprobs=[[-1.0]] * 4)
    tree.rewards["reward"] = np.array([1, 1, 0, 1], np.float32)
    entropy = np.zeros(tree.num_tokens)
    for leaf, value in enumerate((0.1, 0.9, 0.2, 0.8)):
        entropy[tree.response_rows(leaf)] = value
    tree.set("policy_entropy", entropy)
    (found,) = ADVANTAGES["canon_entropy"]([tree], share=0.75).values
    # the high half has the mean 1, the low one 1/2
    low, high = [0.75 * (r - 1) + 0.25 * (r - 0.5) for r in (1, 0)], 0.75 * 0.5 + 0.25 * 0
    np.testing.assert_allclose(found, [low[0], high, low[1], high])


@pytest.mark.methods
def test_puzzlecraft_weighs_groups_by_difficulty_and_dispersion(step_of):
    steps = step_of("puzzlecraft")
    weights = set()
    for tree in steps.trees:
        texts = [
            steps.orchestrator.tokenizer.decode(tree.token_id[tree.response_rows(k)], skip_special_tokens=True)
            for k in range(tree.num_leaves)
        ]
        answers = [text[0] if text[:1].strip() else f"none of {k}" for k, text in enumerate(texts)]
        shares = [answers.count(a) / len(answers) for a in set(answers)]
        H = -sum(s * math.log(s) for s in shares) / math.log(len(answers))
        p = float(tree.rewards["reward"].mean())
        weights.add(round(H, 3))
        np.testing.assert_allclose(tree.advantage, 4 * p * (1 - p) * H * norm(tree.rewards["reward"]), atol=1e-5)
    assert len(weights) > 1, "all groups are as dispersed"


def test_a_collapsed_group_counts_nothing():
    dispersed = ADVANTAGES["dispersed"]
    same, apart = tree_of(), tree_of()
    texts = [["answer: 7"] * 4, ["answer: 7", "the answer is: 9\n", "", "none"]]
    collapsed, spread = dispersed([same, apart], texts).values
    assert not collapsed.any()
    np.testing.assert_allclose(spread, norm(np.array([1.0, 0, 0, 1])), rtol=1e-6)  # p = 1/2 and four answers
    (half,) = dispersed([same], [["answer: 7", "answer: 7", "answer: 8", "answer: 8"]]).values
    np.testing.assert_allclose(half, norm(np.array([1.0, 0, 0, 1])) / 2, rtol=1e-6)


# -- several rewards ---------------------------------------------------------------------------------------------------


@pytest.mark.methods
def test_recap_weighs_rewards_by_their_last_means(step_of):
    means: dict[str, list[float]] = {"a": [], "b": []}
    seen = []
    for trees in by_step(step_of("recap")):
        s = {k: max(0.0, 1 - np.mean(m[-2:])) + np.std(m[-2:]) if m else 0.0 for k, m in means.items()}
        w = {k: 2 * v / sum(s.values()) if sum(s.values()) else 1.0 for k, v in s.items()}
        seen.append(w["a"])
        for tree in trees:
            want = sum(w[k] * norm(tree.rewards[k]) for k in means)
            np.testing.assert_allclose(tree.advantage, want, atol=1e-4)
        for k, of in means.items():
            of.append(np.concatenate([tree.rewards[k] for tree in trees]).astype(np.float64).mean())
    assert len(seen) == 4
    assert seen[0] == 1
    assert len({round(w, 3) for w in seen}) == 4


@pytest.mark.methods
def test_rae_takes_off_a_running_mean(step_of):
    mean, means = None, []
    for trees in by_step(step_of("rae")):
        every = np.concatenate([tree.rewards["a"] for tree in trees]).astype(np.float64)
        mean = every.mean() if mean is None else mean
        means.append(mean)
        for tree in trees:
            for found, reward in zip(along(tree, "path_advantage"), tree.rewards["a"], strict=True):
                np.testing.assert_allclose(found, reward - mean, atol=1e-5)
        mean = 0.5 * mean + 0.5 * every.mean()
    assert np.ptp(means) > 0.01


def test_a_role_has_its_own_mean_and_tokens():
    def of(first: float, second: float) -> TokenTree:
        parts = [
            Segment.prompt([1]),
            Segment.make([2, 3], origin=Origin.SAMPLED, behaviour_logprob=-1.0, role=0),
            Segment.make([4], origin=Origin.OBSERVATION),
            Segment.make([5], origin=Origin.SAMPLED, behaviour_logprob=-1.0, role=1),
        ]
        tree = TokenTree.from_nodes([-1, 0, 1, 2], parts, [3], [LeafStatus.STOP])
        tree.meta["roles"] = ["generator", "verifier"]
        tree.rewards = {"one": np.array([first], np.float32), "two": np.array([second], np.float32)}
        return tree

    make = ADVANTAGES["by_role_mean"]
    roles = make(rewards={"generator": "one", "verifier": "two"}, decay=0.75)
    found = roles([of(1, 0), of(0, 0.5)]).values
    np.testing.assert_allclose(found, [[0.5, 0.5, 0, -0.25], [-0.5, -0.5, 0, 0.25]])
    again = make(rewards={"generator": "one", "verifier": "two"}, decay=0.75)
    roles([of(1, np.nan)])  # means 0.75 * 0.5 + 0.25 and 0.25, for no verdict changes none
    again.load_state_dict(roles.state_dict())
    (last,) = again([of(1, 1)]).values
    np.testing.assert_allclose(last, [0.375, 0.375, 0, 0.75])
    with pytest.raises(UserError, match="named no reward 'three'"):
        make(rewards={"generator": "three"})([of(1, 1)])


def test_weights_of_rewards_are_resumed():
    make = ADVANTAGES["reweighted"]
    one, other = make(names=["a", "b"], window=2), make(names=["a", "b"], window=2)
    batches = [[tree_of(a=(1, 1, 1, 0), b=(0, 0, k % 2, 1))] for k in range(4)]
    for trees in batches[:3]:
        one(trees)
    other.load_state_dict(one.state_dict())
    np.testing.assert_array_equal(one(batches[3]).values[0], other(batches[3]).values[0])
    third = make(names=["a", "b"], window=2)
    found = [third(trees).values[0] for trees in batches]
    # a has the mean 3/4 in each batch, b 1/2 and 1/4 in the last two: s = 1/4 and 5/8 + 1/8
    want = 0.5 * norm(np.array([1.0, 1, 1, 0])) + 1.5 * norm(np.array([0.0, 0, 1, 1]))
    np.testing.assert_allclose(found[3], want, rtol=1e-6)
    for options in ({"names": []}, {"names": "a"}, {"names": ["a"], "window": 0}):
        with pytest.raises(ValueError, match="`names` must list"):
            make(**options)


@pytest.mark.methods
def test_rlsp_adds_exploration_by_a_weight_that_falls(step_of):
    for step, trees in enumerate(by_step(step_of("rlsp"), 2), start=1):
        weight = {1: 0.5, 2: 0.25}[step]
        for tree in trees:
            want = tree.rewards["outcome"] + weight * tree.rewards["exploration"]
            np.testing.assert_allclose(tree.rewards["reward"], want, atol=1e-6)
        assert any(tree.rewards["exploration"].any() for tree in trees)
        assert all("value" in tree.columns for tree in trees)


@pytest.mark.methods
def test_format_length_peaks_at_half_the_longest(step_of):
    gained = set()
    for step, trees in enumerate(by_step(step_of("format_length"), 2), start=1):
        for tree in trees:
            given, x = tree.rewards["verifier"].astype(np.float64), tree.response_length / 10
            gain = np.where(x <= 0.5, 1 - (1 - 2 * x) ** 2, 1 - 2 * (2 * x - 1) ** 2)
            want = given + {1: 1.0, 2: 0.5}[step] * gain * (given == 1)
            np.testing.assert_allclose(tree.rewards["reward"], want, atol=1e-5)
            gained |= set(np.round(want - given, 2).tolist())
    assert len(gained) > 2


def test_length_peak():
    rewards = (1.0, 1.0, 0.0, 1.0)
    found = SHAPINGS["length_peak"](tree_of(rewards), longest=4, share=0.5, peak=0.5)
    # lengths 3, 2, 1, 4 of 4: halfway down, at the peak, a wrong form, at the end
    np.testing.assert_allclose(found, [1 + 0.5 * 0.5, 1.5, 0.0, 1 - 0.5])
    np.testing.assert_allclose(SHAPINGS["length_peak"](tree_of(), longest=8)[0], 1 + 1 - (1 - 3 / 4) ** 2)


# -- selections --------------------------------------------------------------------------------------------------------


def test_responses_of_the_own_and_of_another_prompt():
    tree = tree_of()
    tree.set("other_prompt", [0, 1, 0, 2])
    assert SELECTIONS["own_prompt"](tree).tolist() == [True, False, True, False]
    assert SELECTIONS["other_prompt"](tree).tolist() == [False, True, False, True]
    given = TokenTree.from_nodes(
        [-1, 0, 0],
        [Segment.prompt([1]), Segment.make([2], origin=Origin.INJECTED), Segment.make([3], origin=Origin.OBSERVATION)],
        [1, 2],
        [LeafStatus.STOP] * 2,
    )
    assert not SELECTIONS["own_prompt"](given).any()  # a demonstration was sampled under no prompt
    assert SELECTIONS["observed"](given).tolist() == [False, False, True]
