"""Recipes that choose problems and numbers of responses by what was seen, against formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ...support.real_step import Steps, plain_logprobs, plain_model
from .problem_runs import (
    by_step,
    ids,
    row_of,
)


def history(steps: Steps, before: int) -> dict[str, list[float]]:
    """Return the rewards of each problem in the steps before one."""
    found: dict[str, list[float]] = {}
    for trees in by_step(steps)[:before]:
        for tree in trees:
            found.setdefault(tree.meta["prompt_id"], []).extend(tree.rewards["reward"].tolist())
    return found


@pytest.mark.slow
def test_gvm_samples_by_success_and_gradient(step_of):
    steps = step_of("gvm")
    known: dict[str, list[float]] = {}
    counts = []
    for trees, update in zip(by_step(steps), steps.updates, strict=True):
        score = {}
        for problem, (m, total, size) in known.items():
            p = min(max(total / m, 1 / (2 * m)), 1.0)
            score[problem] = size / m / math.sqrt(p + 0.5 / p)
        for tree in trees:
            name = tree.meta["prompt_id"]
            share = score[name] / np.mean(list(score.values())) if name in score else 0.5
            want = max(1, min(round(4 * share), 9)) if name in score else 2
            assert tree.num_leaves == want
            counts += [want] if name in score else []
        model = plain_model(steps, update)
        for tree in trees:
            m, total, size = known.get(tree.meta["prompt_id"], (0, 0.0, 0.0))
            for leaf in range(tree.num_leaves):
                with torch.no_grad():
                    every = plain_logprobs(model, tree, leaf, 0.1, vocabulary=True).double()
                rows = torch.from_numpy(tree.token_id[tree.response_rows(leaf)].astype(np.int64))
                lp = every.gather(1, rows[:, None])[:, 0]
                size += math.sqrt(float((1 - 2 * lp.exp() + every.exp().square().sum(1)).sum()))
            known[tree.meta["prompt_id"]] = [m + tree.num_leaves, total + float(tree.rewards["reward"].sum()), size]
        assert all((tree.columns["select_leaf/actor"] == (tree.rewards["reward"] >= 1)).all() for tree in trees)
    assert len(set(counts)) > 1, "every problem got the same number of responses"


@pytest.mark.methods
def test_drive_ends_with_many_responses_to_the_hardest(step_of):
    steps = step_of("drive")
    for number, trees in enumerate(by_step(steps)):
        assert {tree.num_leaves for tree in trees} == {4 if number < 2 else 5}
    past = {name: np.mean(r) for name, r in history(steps, 2).items()}
    assert len(past) == 24
    border = sorted(past.values())[5]
    assert {past[name] <= border for name in ids(steps)[2]} == {True}
    assert len(set(ids(steps)[2])) == 6


@pytest.mark.methods
def test_qwenlong_l1_draws_the_hard_again(step_of):
    steps = step_of("qwenlong_l1")
    first = [name for batch in ids(steps)[:2] for name in batch]
    assert sorted(first) == sorted(f"problems/{k}" for k in range(24))
    for number in (2, 3):
        past = {name: np.mean(r) for name, r in history(steps, number).items()}
        taken = [name for batch in ids(steps)[:number] for name in batch]
        order = sorted(past, key=lambda name, taken=taken: (taken.count(name), first.index(name)))
        # the store has those chosen least often first, each turn in an order of its own; so compare as sets of draws
        assert len(set(ids(steps)[number])) == 12
        assert set(ids(steps)[number]) <= set(order)


@pytest.mark.methods
def test_limr_leaves_out_what_learns_unlike_the_average(step_of):
    steps = step_of("limr")
    means: dict[str, list[float]] = {}
    for trees in by_step(steps)[:4]:
        for tree in trees:
            means.setdefault(tree.meta["prompt_id"], []).append(float(tree.rewards["reward"].mean()))
    assert {len(m) for m in means.values()} == {2}
    average = np.mean(list(means.values()), 0)
    score = {k: 1 - ((np.array(m) - average) ** 2).sum() / ((1 - average) ** 2).sum() for k, m in means.items()}
    kept = {name for name, s in score.items() if s > 0.6}
    assert 0 < len(kept) < 24
    assert set(ids(steps)[4]) <= kept


@pytest.mark.methods
def test_ariadne_climbs(step_of, toml):
    level, recent, levels = 2, [], []
    for trees in by_step(step_of("ariadne")):
        hardness = [row_of(tree, toml)["difficulty"] for tree in trees]
        assert max(hardness) <= level
        levels.append(level)
        for tree, d in zip(trees, hardness, strict=True):
            if d == level:
                recent = [*recent, float(tree.rewards["reward"].mean())][-4:]
            if len(recent) == 4 and np.mean(recent) > 0.1:
                level, recent = level + 1, []
    assert len(set(levels)) > 1


@pytest.mark.methods
def test_interplay_stays_at_the_edge(step_of):
    steps = step_of("interplay")
    past = {name: np.mean(r) for name, r in history(steps, 2).items()}
    assert len(past) == 24
    assert all(0.1 <= past[name] <= 0.9 for name in ids(steps)[2])
    assert any(not 0.1 <= mean <= 0.9 for mean in past.values())
