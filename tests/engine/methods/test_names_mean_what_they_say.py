"""Each name of a configuration does what its paper says: runs through learner and trees against plain formulas."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from ..tiny import write_run
from .real_step import along, check_gradient, leaves_of, plain_logprobs, take_steps

MINE = """
def right(text, entry):
    return 1.0

def by_prompt(text, entry):  # some groups all right, some all wrong, some mixed
    kind = sum(map(ord, entry["question"])) % 3
    return [0.0, 1.0, float(len(text) % 2)][kind]
"""


@pytest.fixture(scope="module")
def toml(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("names")
    path = write_run(directory)
    (directory / "mine.py").write_text(MINE)
    rows = [{"prompt": f"{a} + 2 =", "response": f"Answer: {a + 2}"} for a in range(6)]
    (directory / "given.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def reward(toml: Path, name: str) -> str:
    return f"--reward.verifier={toml.parent}/mine.py:{name}"


class TestGroupsOfEqualRewards:
    """A group leaves an update only where no term has a gradient from it, and normalisers count what is in it."""

    def test_raft_imitates_groups_that_are_all_right(self, toml, tmp_path):
        steps = take_steps(
            toml, tmp_path, reward(toml, "right"), "--algorithm.objective=raft", "--algorithm.select=rewarded"
        )

        def nll(model):
            found = torch.cat([plain_logprobs(model, *leaf) for leaf in leaves_of(steps.trees)])
            return -found.mean()

        check_gradient(steps, nll)

    def test_raft_divides_by_what_it_imitates(self, toml, tmp_path):
        steps = take_steps(
            toml, tmp_path, reward(toml, "by_prompt"), "--algorithm.objective=raft", "--algorithm.select=rewarded"
        )
        right = [(tree, leaf) for tree, leaf in leaves_of(steps.trees) if tree.rewards["reward"][leaf] >= 1]
        assert any(np.ptp(tree.rewards["reward"]) == 0 for tree, _ in right)
        check_gradient(steps, lambda model: -torch.cat([plain_logprobs(model, *leaf) for leaf in right]).mean())

    def test_whitened_returns_train_every_group(self, toml, tmp_path):
        steps = take_steps(
            toml, tmp_path, reward(toml, "by_prompt"), "--algorithm.objective=ppo", "--algorithm.advantage=reinforce_pp"
        )
        every = leaves_of(steps.trees)
        returns = np.concatenate(
            [np.full(tree.response_length[leaf], tree.rewards["reward"][leaf], np.float64) for tree, leaf in every]
        )
        whitened = torch.from_numpy((returns - returns.mean()) / np.sqrt(returns.var(ddof=1) + 1e-8)).float()

        def surrogate(model):
            lp = torch.cat([plain_logprobs(model, *leaf) for leaf in every])
            return -(whitened * (lp - lp.detach()).exp()).mean()

        check_gradient(steps, surrogate)

    def test_a_kl_reaches_groups_without_credit(self, toml, tmp_path):
        steps = take_steps(
            toml, tmp_path, reward(toml, "right"), "--algorithm.objective=ppo", "--roles.reference={}",
            "--algorithm.objective_options={kl_coef=0.5,entropy_coef=0.01}", "--rollout.temperature=0.7",
        )  # fmt: skip

        def loss(model):
            rows = [plain_logprobs(model, *leaf, 0.7, vocabulary=True) for leaf in leaves_of(steps.trees)]
            entropy = torch.cat([-(row.exp() * row).sum(-1) for row in rows])
            return -0.01 * entropy.mean()  # the policy is its own reference: the KL and its gradient are 0

        check_gradient(steps, loss)

    def test_groups_without_credit_leave_the_normaliser_too(self, toml, tmp_path):
        steps = take_steps(toml, tmp_path, reward(toml, "by_prompt"), "--algorithm.objective=grpo", "--seed=3")
        mixed = [tree for tree in steps.trees if np.ptp(tree.rewards["reward"]) > 0]
        assert 0 < len(mixed) < len(steps.trees)
        assert steps.rows[0]["filter/unseen_groups"] == len(steps.trees) - len(mixed)

        def grpo(model):
            losses = []
            for tree, leaf in leaves_of(mixed):
                rewards = tree.rewards["reward"].astype(np.float64)
                advantage = (rewards[leaf] - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
                lp = plain_logprobs(model, tree, leaf)
                losses.append(-(advantage * (lp - lp.detach()).exp()).mean())
            return torch.stack(losses).mean()

        check_gradient(steps, grpo)

    def test_the_critic_learns_from_every_group(self, toml, tmp_path):
        steps = take_steps(
            toml, tmp_path, reward(toml, "right"), "--algorithm.advantage=gae", "--algorithm.objective=ppo",
            "--roles.critic={lr=1e-3}",
        )  # fmt: skip
        assert steps.rows[0]["critic/vf_loss"] == pytest.approx(0.5)  # its head is 0, every return 1

    def test_the_critic_warms_up_while_the_policy_waits(self, toml, tmp_path):
        steps = take_steps(
            toml, tmp_path, reward(toml, "by_prompt"), "--algorithm.advantage=gae", "--algorithm.objective=ppo",
            "--roles.critic={lr=1e-3}", "--algorithm.weight=0",
        )  # fmt: skip
        assert steps.rows[0]["critic/grad_norm"] > 0
        assert not steps.updates[0].gradient  # the policy took no step

    def test_demonstrations_do_not_count_where_no_term_selects_them(self, toml, tmp_path):
        teach = '--algorithm.terms=[{name="teach",objective="sft",select="injected",weight=0.5}]'
        steps = take_steps(
            toml, tmp_path, reward(toml, "right"), teach, "--algorithm.objective=grpo",
            f"--demonstrations={{path='{toml.parent}/given.jsonl',per_step=4}}",
        )  # fmt: skip
        given = leaves_of(steps.updates[0].given)
        check_gradient(
            steps, lambda model: -0.5 * torch.cat([plain_logprobs(model, *leaf) for leaf in given]).mean()
        )


assert along
