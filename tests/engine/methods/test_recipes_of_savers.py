"""Recipes that save FLOP by the choice of problems and of responses, against formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rolltree.engine.data.tree import TokenTree
from rolltree.engine.methods.candidates import Observed, Store
from rolltree.engine.methods.success import Greso

from ...support.real_step import Steps, along, check_gradient, leaves_of, plain_logprobs
from .problem_runs import by_step, clipped, norm, row_of, steps_of_recipes

GRID = (np.arange(4000) + 0.5) / 4000
"""Success rates at which the posterior is summed up."""


def rewards_of(tree: TokenTree) -> np.ndarray:
    return tree.rewards["reward"].astype(np.float64)


def ratios_clipped(model: Any, trees: list[TokenTree], credit: Any = norm) -> torch.Tensor:
    """Return grpo's loss without KL: ratios to the policy that sampled, a mean of the responses' means."""
    parts = []
    for tree in trees:
        A = credit(rewards_of(tree))
        for leaf in range(tree.num_leaves):
            old = along(tree, leaf, "behaviour_logprob")
            parts.append(clipped(plain_logprobs(model, tree, leaf), old, float(A[leaf])).mean())
    return torch.stack(parts).mean()


def unequal(trees: list[TokenTree]) -> list[TokenTree]:
    return [tree for tree in trees if np.ptp(rewards_of(tree)) > 0]


def check_grpo(steps: Steps) -> None:
    """Check the gradient of every update."""
    for number, update in enumerate(steps.updates):
        check_gradient(steps, lambda model, t=update.trees: ratios_clipped(model, unequal(t)), number, 5e-3)


# -- numbers of responses ----------------------------------------------------------------------------------------------


def posterior(counts: dict[Any, list[float]], problem: Any, kind: Any) -> np.ndarray:
    """Return the weights of `GRID`."""
    pooled = counts.get(("kind", kind), np.zeros(2))
    scale = min(1.0, 100 / max(pooled.sum(), 1e-9))
    right, wrong = 2 * counts["all"] / counts["all"].sum() + scale * pooled + counts.get(problem, np.zeros(2))
    weight = np.exp((right - 1) * np.log(GRID) + (wrong - 1) * np.log(1 - GRID))
    return weight / weight.sum()


def best_sizes(weights: list[np.ndarray], costs: list[float]) -> list[int]:
    """Return sizes of at least 2 and at most 12 by the best value per token, while one fits."""
    sizes, left = [2] * len(costs), 4 * sum(costs)

    def per_token(i: int) -> float:
        value = [
            (GRID * (1 - GRID) ** 2 * (1 - GRID**n - (1 - GRID) ** n)) @ weights[i] for n in (sizes[i], sizes[i] + 1)
        ]
        return (value[1] - value[0]) / costs[i]

    while fits := [i for i in range(len(costs)) if sizes[i] < 12 and costs[i] <= left + 1e-6]:
        best = max(fits, key=lambda i: (per_token(i), -i))
        sizes[best] += 1
        left -= costs[best]
    return sizes


@pytest.mark.slow
def test_knapsack_spends_the_tokens_of_a_step_where_they_add_most(step_of, toml):
    steps = step_of("knapsack")
    counts: dict[Any, Any] = {"all": np.ones(2)}
    tokens: dict[str, list[int]] = {}
    seen = set()
    for trees in by_step(steps):
        everything = [length for lengths in tokens.values() for length in lengths] or [1]
        costs = [max(np.mean(tokens.get(tree.meta["prompt_id"], everything)), 1.0) for tree in trees]
        kinds = [row_of(tree, toml)["difficulty"] for tree in trees]
        weights = [posterior(counts, tree.meta["prompt_id"], kind) for tree, kind in zip(trees, kinds, strict=True)]
        sizes = [tree.num_leaves for tree in trees]
        assert sizes == best_sizes(weights, costs)
        assert -1e-6 < 6 * sum(costs) - np.dot(sizes, costs) < max(costs)
        seen |= set(sizes)
        if tokens:
            for key in counts:
                counts[key] = 0.985 * counts[key]
        for tree, kind in zip(trees, kinds, strict=True):
            right = int((rewards_of(tree) >= 1).sum())
            for key in (tree.meta["prompt_id"], ("kind", kind), "all"):
                counts[key] = counts.get(key, np.zeros(2)) + np.array([right, tree.num_leaves - right])
            tokens.setdefault(tree.meta["prompt_id"], []).extend(tree.response_length.tolist())
    assert len(seen) > 3, "every problem got the same number of responses"
    check_grpo(steps)
    table = steps.orchestrator.options.directory / "problems.json"
    assert table.exists()


@pytest.mark.methods
def test_sgpo_profiles_then_samples_the_inverse_of_the_success_rate(step_of):
    steps = step_of("sgpo")
    first, later = by_step(steps)[:2], by_step(steps)[2:]
    rate = {tree.meta["prompt_id"]: (rewards_of(tree) >= 1).mean() for trees in first for tree in trees}
    assert len(rate) == 24
    assert {tree.num_leaves for trees in first for tree in trees} == {3}
    kept = {problem for problem, p in rate.items() if 0 < p < 1}
    order = [tree.meta["prompt_id"] for trees in later for tree in trees]
    assert set(order) <= kept
    turns = [order[k : k + len(kept)] for k in range(0, len(order), len(kept))]
    for turn in turns:
        assert len(set(turn)) == len(turn)
        assert [rate[problem] for problem in turn] == sorted((rate[problem] for problem in turn), reverse=True)
    for tree in [tree for trees in later for tree in trees]:
        assert tree.num_leaves == min(max(round(2 / rate[tree.meta["prompt_id"]]), 2), 7)
    assert len({tree.num_leaves for trees in later for tree in trees}) > 1
    check_grpo(steps)


# -- problems without signal -------------------------------------------------------------------------------------------


@pytest.mark.methods
def test_greso_passes_over_by_the_number_of_equal_groups(toml, tmp_path_factory, monkeypatch):
    """Each order is that of the probabilities 1 - p^z, with the same random numbers, and p moves with the shares."""
    groups: list[tuple[int, str, str]] = []  # step, problem, side
    passed = 0

    def explored(side: str, step: int) -> float:
        p = 0.6
        for past in range(1, step):
            sides = [found for at, _, found in groups if at == past]
            if sides:
                up = sides.count(side) / len(sides) < {"easy": 1 / 12, "hard": 1 / 6}[side]
                p = min(max(p + (0.1 if up else -0.1), 0.0), 1.0)
        return p

    def order(part: Greso, store: Store) -> list[str]:
        nonlocal passed
        copied = np.random.default_rng()
        copied.bit_generator.state = store.rng.bit_generator.state
        newest = max((at for at, _, _ in groups), default=0)
        first, last = [], []
        for problem in store.problems:
            past = [side for _, name, side in groups if name == problem]
            z = next((k for k, side in enumerate(reversed(past)) if side != past[-1]), len(past)) if past else 0
            if z and past[-1] and copied.random() < 1 - explored(past[-1], newest) ** z:
                last.append(problem)
            else:
                first.append(problem)
        passed += len(last)
        answer = list(real_order(part, store))
        assert answer == first + last
        return answer

    def observe(part: Greso, group: Observed, step: int) -> None:
        R = rewards_of(group.tree)
        groups.append((step, group.problem.id, "" if np.ptp(R) > 0 else "easy" if R[0] >= 1 else "hard"))
        real_observe(part, group, step)

    real_order, real_observe = Greso.order, Greso.observe
    monkeypatch.setattr(Greso, "order", order)
    monkeypatch.setattr(Greso, "observe", observe)
    steps = steps_of_recipes(toml, tmp_path_factory)("greso")
    assert passed > 5
    assert {side for _, _, side in groups} == {"", "easy", "hard"}
    assert all(np.ptp(rewards_of(tree)) > 0 for tree in steps.trees)


@pytest.mark.methods
def test_speed_rl_trains_on_groups_whose_first_responses_differ(step_of):
    steps = step_of("speed_rl")
    for tree in steps.trees:
        assert tree.num_leaves == 7
        assert np.ptp(rewards_of(tree)[:3]) > 0
        assert tree.meta["attempt"] == 1
    assert sum(row.get("group/dropped_equal_rewards", 0) for row in steps.rows) > 0
    for number, update in enumerate(steps.updates):

        def loss(model, trees=update.trees):
            parts = []
            for tree, leaf in leaves_of(trees):
                R = rewards_of(tree)
                A = R[leaf] - np.delete(R, leaf).mean()
                parts.append(-float(A) * plain_logprobs(model, tree, leaf).sum())
            return torch.stack(parts).mean()

        check_gradient(steps, loss, number, 5e-3)


@pytest.mark.methods
def test_aero_evens_out_the_sides_by_the_mean_of_a_posterior(step_of):
    def credit(R: np.ndarray) -> np.ndarray:
        m = (R.sum() + 1) / (len(R) + 2)
        return (R - m) / np.sqrt(m * (1 - m))

    steps = step_of("aero")
    sizes = set()
    for tree in steps.judged:
        right, n = int(rewards_of(tree).sum()), tree.num_leaves
        assert (right in (0, n) and n == 4 + 4 and tree.meta["attempt"] == 1) or right == n - right
        sizes.add((right, n))
        np.testing.assert_allclose(tree.advantage, credit(rewards_of(tree)), rtol=1e-5)
    assert len(sizes) > 2
    for number, update in enumerate(steps.updates):
        check_gradient(steps, lambda model, t=update.trees: ratios_clipped(model, t, credit), number, 5e-3)


@pytest.mark.methods
def test_fifo_replay_takes_half_of_a_step_from_the_newest_groups_with_signal(step_of):
    steps = step_of("fifo_replay")
    per_step = len(steps.updates) // 4
    stored: list[tuple[int, tuple[Any, ...]]] = []
    for number, trees in enumerate(by_step(steps, per_step)):
        again = [tree for tree in trees if "replayed" in tree.meta]
        young = [key for step, key in stored if number - step <= 2]
        assert len(again) == min(3, len(young))
        assert all(key_of(tree) in young for tree in again)
        new = [tree for tree in trees if "replayed" not in tree.meta]
        assert len(new) == 3
        stored += [(number, key_of(tree)) for tree in unequal(new)]
    assert any("replayed" in tree.meta for tree in steps.trees)
    check_grpo(steps)


def key_of(tree: TokenTree) -> tuple[Any, ...]:
    return tree.meta["prompt_id"], *tree.token_id.tolist()
