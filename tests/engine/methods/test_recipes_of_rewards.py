"""Recipes that shape rewards, and those whose credit remembers earlier groups, against formulas."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ...support.real_step import Steps, leaves_of, plain_logprobs, plain_model
from .problem_runs import (
    by_step,
    norm,
    row_of,
    sd,
)

# -- rewards -----------------------------------------------------------------------------------------------------------


def exploration(steps: Steps) -> list[np.ndarray]:
    decode = functools.partial(steps.orchestrator.tokenizer.decode, skip_special_tokens=True)
    seen: dict[tuple[str, str], int] = {}
    found = []
    for tree in steps.trees:
        texts = [decode(tree.token_id[tree.response_rows(leaf)]) for leaf in range(tree.num_leaves)]
        answers = [(tree.meta["prompt_id"], text[0]) if text[:1].strip() else None for text in texts]
        for answer in filter(None, answers):
            seen[answer] = seen.get(answer, 0) + 1
        gain = [0.1 / math.sqrt(seen[a]) - 0.05 * (answers.count(a) - 1) if a else 0.0 for a in answers]
        found.append(tree.rewards["verifier"] + np.array(gain))
    return found


SHAPED: dict[str, Callable[[Steps], list[Any]]] = {
    "think_short": lambda steps: [
        tree.rewards["verifier"] + 0.5 * np.maximum(1 - np.maximum(tree.response_length - 6, 0) / 6, 0)
        for tree in steps.trees
    ],
    "reward_ensemble": lambda steps: [np.minimum(t.rewards["a"], t.rewards["b"]) for t in steps.trees],
    "fapo": lambda steps: [
        t.rewards["verifier"] - ((t.rewards["verifier"] == 1) & (t.rewards["flaw"] == 1)) for t in steps.trees
    ],
    "reasoning_sql": lambda steps: [1.5 * t.rewards["a"] - 0.5 * t.rewards["b"] for t in steps.trees],
    "chatshopbuddy": lambda steps: [t.rewards["verifier"] * (t.rewards["flaw"] == 1) for t in steps.trees],
    "outcome_exploration": exploration,
}


@pytest.mark.methods
@pytest.mark.parametrize("name", list(SHAPED))
def test_the_shaped_reward_is_that_of_the_formula(step_of, name):
    steps = step_of(name)
    for tree, want in zip(steps.trees, SHAPED[name](steps), strict=True):
        np.testing.assert_allclose(tree.rewards["reward"], want, atol=1e-6)
    assert any(not np.array_equal(t.rewards["reward"], t.rewards["verifier"]) for t in steps.trees)


@pytest.mark.methods
def test_intuitor_rewards_certainty(step_of):
    steps = step_of("intuitor")
    start = plain_model(steps, steps.updates[0])
    for tree in steps.trees:
        with torch.no_grad():
            want = [-plain_logprobs(start, tree, k, vocabulary=True).mean() for k in range(tree.num_leaves)]
        np.testing.assert_allclose(tree.rewards["reward"], want, rtol=1e-5)
        assert np.ptp(tree.rewards["reward"]) > 0


@pytest.mark.methods
@pytest.mark.parametrize("name", ["rlpr", "verifree"])
def test_the_policy_s_probability_of_the_answer_is_the_reward(step_of, toml, name):
    steps = step_of(name)
    start, tokenizer = plain_model(steps, steps.updates[0]), steps.orchestrator.tokenizer

    def p(tree, response):
        text = tree.meta["prompt_text"] + response + "\nAnswer: "
        ids_, answer = (
            tokenizer(t, add_special_tokens=False)["input_ids"] for t in (text, row_of(tree, toml)["answer"])
        )
        with torch.no_grad():
            logits = start(input_ids=torch.tensor([ids_ + answer])).logits[0, len(ids_) - 1 : -1].log_softmax(-1)
        return logits.gather(1, torch.tensor(answer)[:, None])[:, 0].exp().double()

    for tree in steps.trees[:3]:
        texts = [
            tokenizer.decode(tree.token_id[tree.response_rows(k)], skip_special_tokens=True)
            for k in range(tree.num_leaves)
        ]
        if name == "rlpr":
            want = [float((p(tree, t).mean() - p(tree, "").mean()).clamp(0, 1)) for t in texts]
            A = norm(np.array(want))
        else:
            want = [float(p(tree, t).prod()) for t in texts]
            A = np.array([w - np.delete(want, i).mean() for i, w in enumerate(want)])
        np.testing.assert_allclose(tree.rewards["reward"], want, rtol=2e-3, atol=1e-7)
        if np.ptp(tree.rewards["reward"]) > 1e-5 or name == "verifree":
            np.testing.assert_allclose(tree.advantage, A, rtol=0.05, atol=1e-5)


@pytest.mark.methods
def test_self_rewarding_ppo_takes_two_models_word_for_it(step_of, toml):
    steps = step_of("self_rewarding_ppo")
    teacher = AutoModelForCausalLM.from_pretrained(toml.parent / "other", dtype=torch.float32).eval()
    base, want = plain_model(steps, steps.updates[0]), []
    for tree, leaf in leaves_of(steps.trees):
        with torch.no_grad():
            gain = (plain_logprobs(teacher, tree, leaf) - plain_logprobs(base, tree, leaf)).double().numpy()
        want.append([sum(0.9 ** (s - t) * gain[s] for s in range(t, len(gain))) for t in range(len(gain))])
    every = np.concatenate(want)
    found = np.concatenate([tree.path_advantage for tree in steps.trees])
    np.testing.assert_allclose(found, (every - every.mean()) / np.sqrt(every.var(ddof=1) + 1e-8), atol=1e-3)


# -- credit that remembers ---------------------------------------------------------------------------------------------


@pytest.mark.methods
def test_fgrpo_raises_the_weight_of_what_falls_short(step_of):
    steps = step_of("fgrpo")
    weights = {"a": 0.0, "b": 0.0}
    for trees in by_step(steps, 2):
        for tree in trees:
            want = norm(tree.rewards["reward"]) + sum(w * norm(tree.rewards[k]) for k, w in weights.items())
            np.testing.assert_allclose(tree.advantage, want, atol=1e-4)
        for name, target in (("a", 0.9), ("b", -5.0)):
            mean = np.concatenate([tree.rewards[name] for tree in trees]).astype(np.float64).mean()
            weights[name] = max(0.0, weights[name] + 0.5 * (target - mean))
    assert weights["a"] > 0.5
    assert weights["b"] == 0


@pytest.mark.methods
def test_dcpo_blends_the_statistics_of_all_groups_of_a_problem(step_of):
    every: dict[str, list[np.ndarray]] = {}
    blended = 0
    for trees in by_step(step_of("dcpo")):
        for tree in trees:
            past = every.setdefault(tree.meta["prompt_id"], [])
            R = tree.rewards["reward"].astype(np.float64)
            past.append(R)
            i, all_of = len(past), np.concatenate(past)
            S, C = norm(R), (R - all_of.mean()) / (sd(all_of) + 1e-6)
            one, two = ((i - 1) * C + S) / i, (C + (i - 1) * S) / i
            want = np.where(np.abs(one) < np.abs(two), one, two) if i > 1 else S
            np.testing.assert_allclose(tree.advantage, want, atol=1e-5)
            blended += i > 1 and np.abs(want - S).max() > 1e-3
    assert blended > 3
