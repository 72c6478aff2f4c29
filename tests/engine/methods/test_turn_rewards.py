"""Rewards of turns: from a program to the tokens of each response and through a step.

tests/engine/rollout/test_saving.py takes them through a checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rolltree.engine.data.concat import join
from rolltree.engine.data.segment import LeafStatus, Origin
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.rewards.spans import put_spans

from ...support.real_step import check_gradient, leaves_of, plain_logprobs, take_steps
from ...support.tiny import beside, tiny_job

JUDGES = """
def odd(text, entry):
    return float(sum(map(ord, text)) % 2)
"""

MINE = """
from rolltree.engine.data.segment import LeafStatus, Origin
from rolltree.engine.programs import Finish, Fork, Given, Reward, Rewind, RolloutProgram

def worth(tokens):
    return float(sum(map(int, tokens)) % 7) / 7

class Turns(RolloutProgram):
    segment_tokens = 2

    def decide(self, group, finished):
        for segment in finished:
            if segment.status is None:
                yield Reward(segment.branch, worth(segment.token_ids), at=segment.length)
                yield Fork(segment.branch, 1, append=Given([5, 6], Origin.OBSERVATION))

class Branching(Turns):
    rewinds = True

    def start(self, group):
        self.long, self.again = [], False
        return 1

    def decide(self, group, finished):
        for segment in finished:
            if segment.status is None:
                yield Reward(segment.branch, worth(segment.token_ids), at=segment.length)
                if segment.depth < 3:
                    yield Fork(segment.branch, 2 if segment.depth == 1 else 1, append=Given([5], Origin.OBSERVATION))
                else:
                    self.long.append(segment.branch)
                    yield Finish(segment.branch, LeafStatus.LENGTH)

    def ended(self, group):
        if self.long and not self.again:
            self.again = True
            yield Rewind(self.long[0], 3, 1)

class Beyond(Turns):
    def decide(self, group, finished):
        for segment in finished:
            yield Reward(segment.branch, 1.0, at=segment.length + 1)
"""
SIZES = (
    "--trainer.max_tokens=4096", "--trainer.lr=0.02", "--algorithm.objective=dapo", "--trainer.prompts_per_step=8",
)  # fmt: skip
UNSET = ("rollout.program", "rollout.program_options", "algorithm.advantage")


toml = tiny_job({"mine.py": MINE, "reward.py": JUDGES}, reward={"verifier": "reward.py:odd"})


def flags(toml: Path, program: str) -> tuple[str, ...]:
    return (f"--rollout.program={toml.parent}/mine.py:{program}", "--rollout.program_options={}", *SIZES)


def worth(tokens: list[int]) -> float:
    return float(sum(tokens) % 7) / 7


def turns_of(tree: TokenTree, leaf: int) -> list[list[int]]:
    """Return the places of the sampled tokens of each turn, from the origins of the response's tokens."""
    turns: list[list[int]] = []
    origins = tree.origin[tree.response_rows(leaf)].tolist()
    for place, origin in enumerate(origins):
        if origin == Origin.SAMPLED:
            if place == 0 or origins[place - 1] != Origin.SAMPLED:
                turns.append([])
            turns[-1].append(place)
    return turns


def rewards_along(tree: TokenTree, leaf: int) -> np.ndarray:
    first = int(tree.response_length[:leaf].sum())
    return tree.token_reward[first : first + int(tree.response_length[leaf])]


@pytest.mark.parametrize("gamma", [0.5, pytest.param(0.9, marks=pytest.mark.methods)], ids=["options", "recipe"])
def test_a_turns_reward_is_at_its_last_token_and_becomes_its_credit(toml, tmp_path, gamma):
    """Full turns of two tokens are rewarded; G_k = r_k + gamma G_k+1, normalised over the group's turns of an index.

    The recipe `turn_rewards` has the discount 0.9.
    """
    options: tuple[str, ...] = ("--algorithm.advantage=turn_credit", "--algorithm.advantage_options={gamma=0.5}")
    if gamma == 0.9:
        toml = beside(toml, "bare", algorithm={"advantage": None})
        options = ("--recipe=turn_rewards", "--data.chat=false")
    steps = take_steps(toml, tmp_path, *flags(toml, "Turns"), *options, unset=UNSET)
    credit: dict[tuple[int, int], np.ndarray] = {}
    several = 0
    for tree in steps.trees:
        gains, places = [], []
        for leaf in range(tree.num_leaves):
            ids = tree.token_id[tree.response_rows(leaf)].tolist()
            turns, found = turns_of(tree, leaf), rewards_along(tree, leaf)
            wanted = np.full(len(ids), np.nan)
            gain = []
            for k, turn in enumerate(turns):
                goes_on = len(turn) == 2 and (k + 1 < len(turns) or turn[-1] + 1 < len(ids))
                if goes_on:
                    wanted[turn[-1]] = worth([ids[i] for i in turn])
                gain.append(worth([ids[i] for i in turn]) if goes_on else 0.0)
            np.testing.assert_allclose(found, wanted, atol=1e-6)
            gain[-1] += float(tree.rewards["reward"][leaf])
            for k in reversed(range(len(gain) - 1)):
                gain[k] += gamma * gain[k + 1]
            gains.append(gain)
            places.append(turns)
            several += len(turns) > 1
        for leaf, (gain, turns) in enumerate(zip(gains, places, strict=True)):
            along = np.zeros(int(tree.response_length[leaf]))
            for k, turn in enumerate(turns):
                same = np.array([other[k] for other in gains if len(other) > k])
                spread = same.std(ddof=1) if len(same) > 1 else 1.0
                along[turn] = (gain[k] - same.mean()) / (spread + 1e-6) if len(same) > 1 else 0.0
            credit[id(tree), leaf] = along
    assert several > 4

    def loss(model: Any) -> torch.Tensor:
        parts = []
        for tree, leaf in leaves_of(steps.trees):
            sampled = torch.from_numpy(tree.loss_mask[tree.response_rows(leaf)])
            if not any(np.abs(credit[id(tree), i]).max() > 1e-9 for i in range(tree.num_leaves)):
                continue  # the update leaves such a group out
            lp = plain_logprobs(model, tree, leaf)
            own = torch.from_numpy(credit[id(tree), leaf]).float()
            parts.append((-own * (lp - lp.detach()).exp())[sampled])
        return torch.cat(parts).mean()

    check_gradient(steps, loss)


def test_branches_have_the_rewards_of_the_turns_that_they_share(toml, tmp_path):
    """Two branches share the first turn; a third is rewound to it, and has none of the later turns that it cut off."""
    steps = take_steps(toml, tmp_path, *flags(toml, "Branching"), "--algorithm.advantage=turn_credit", unset=UNSET)
    rewound = 0
    for tree in steps.trees:
        firsts = []
        for leaf in range(tree.num_leaves):
            ids = tree.token_id[tree.response_rows(leaf)].tolist()
            turns = turns_of(tree, leaf)
            if tree.status[leaf] == LeafStatus.STOP:
                del turns[-1]  # it ended in this one, which the program did not reward
            wanted = np.full(len(ids), np.nan)
            for turn in turns:
                assert len(turn) == 2
                wanted[turn[-1]] = worth([ids[i] for i in turn])
            np.testing.assert_allclose(rewards_along(tree, leaf), wanted, atol=1e-6)
            firsts += [tuple(ids[:2])] if turns else []
        assert len(set(firsts)) <= 1
        rewound += len(firsts) == 3
    assert rewound > 1


def test_a_turn_ends_within_the_response(toml, tmp_path):
    with pytest.raises(RuntimeError, match="to a turn that ends after"):
        take_steps(toml, tmp_path, *flags(toml, "Beyond"), "--algorithm.advantage=turn_credit", unset=UNSET)


def test_spans_add_to_the_rewards_of_turns_and_a_joined_tree_keeps_both():
    tree = TokenTree.from_sequences([1], [[2, 3], [4, 5]])
    tree.set("token_reward", [np.nan, 1.0, 0.5, np.nan])
    tree.rewards["reward"] = np.zeros(2, np.float32)
    put_spans(tree, [[(0, 2, 0.25)], []], lambda ids: "x" * len(ids))
    np.testing.assert_array_equal(tree.token_reward, [np.nan, 1.25, 0.5, np.nan])
    other = TokenTree.from_sequences([1], [[6]])
    other.rewards["reward"] = np.zeros(1, np.float32)
    np.testing.assert_array_equal(join([other, tree]).token_reward, [np.nan, np.nan, 1.25, 0.5, np.nan])
