"""Parts of the user's that a run fills with what they name, each through real steps against a formula on plain
sequences: losses of terms."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rolltree.engine import UserError, load_config
from rolltree.engine.app.dry_run import plan_lines

from ..tiny import write_job
from .real_step import along, check_gradient, leaves_of, plain_logprobs, take_steps

MINE = """
def odd(text, entry):
    return float(sum(map(ord, text)) % 2)
"""
LOSSES = '''
import numpy as np
from rolltree.engine.data.columns import Column, declare

declare(Column("mine/half", np.float32, "token", "a weight of the place", merge="first", to_device=True))


class Drift:
    """Distance from the sampler, weighed by the place, and the share of the most probable tokens."""

    def __init__(self, power: float = 2.0):
        self.power, self.steps = power, 0

    def prepare(self, trees):
        self.steps += 1
        for tree in trees:
            tree.set("mine/half", 1 / (1 + tree.position))

    def normalizer(self, trees):
        return float(2 * sum(tree.loss_length.sum() for tree in trees))

    def loss(self, logprob, sum_p2, mean_logprob, fields, columns):
        d = (logprob - fields.old_logprob).abs() ** self.power + 0.3 * sum_p2 + 0.01 * mean_logprob
        return (d * fields.weight * columns["mine/half"]).sum(), {"mine": (d.sum(), len(d))}

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class Broken(Drift):
    def loss(self, logprob):
        return logprob.sum() * float("nan")


class Constant(Drift):
    def loss(self, logprob):
        return logprob.detach().sum()


class Fails(Drift):
    def loss(self, logprob):
        return logprob.missing
'''
STEPS = (
    "--trainer.updates_per_step=2", "--trainer.lr=0.02", "--trainer.self_check=false", "--trainer.prompts_per_step=4",
)  # fmt: skip
EVERYTHING = ("rollout.program", "rollout.program_options", "algorithm.advantage")


@pytest.fixture(scope="module")
def toml(tmp_path_factory) -> Path:
    path = write_job(tmp_path_factory.mktemp("points"), MINE)
    (path.parent / "losses.py").write_text(LOSSES)
    text = (
        path.read_text()
        .replace("reward.py:judge", "mine.py:odd")
        .replace('objective = "dapo"', 'objective = "reinforce"')
    )
    path.write_text(text)
    return path


def term(toml: Path, name: str, more: str = "") -> str:
    return f"--algorithm.terms=[{{name='mine',loss='{toml.parent}/losses.py:{name}',weight=0.5{more}}}]"


@pytest.mark.parametrize("max_tokens", [4096, 40])
def test_a_loss_of_the_users_in_two_updates_of_a_step(toml, tmp_path, max_tokens):
    """Whole trees and trees in pieces; the second update is compared, where the policy has left the sampler."""
    given = term(toml, "Drift", ",loss_options={power=3.0}")
    steps = take_steps(toml, tmp_path, *STEPS, f"--trainer.max_tokens={max_tokens}", "--rollout.kv_tokens=4096",
                       "--data.max_prompt_tokens=24", given, unset=EVERYTHING)  # fmt: skip
    mine = steps.updates[1]
    trees = mine.trees
    assert any(tree.num_tokens > tree.path_length.max() for tree in trees)

    def loss_of(model):
        policy = drift = torch.zeros(())
        tokens = sum(len(t.response_rows(leaf)) for t, leaf in leaves_of(trees))
        for tree, leaf in leaves_of(trees):
            every = plain_logprobs(model, tree, leaf, vocabulary=True)
            lp = plain_logprobs(model, tree, leaf)
            old = along(tree, leaf, "behaviour_logprob")
            place = torch.from_numpy(1.0 / (1 + tree.position[tree.response_rows(leaf)])).float()
            d = (lp - old).abs() ** 3 + 0.3 * every.exp().square().sum(1) + 0.01 * every.mean(1)
            policy = policy - (float(tree.advantage[leaf]) * lp).sum()
            drift = drift + (d * place).sum()
        return policy / tokens + 0.5 * drift / (2 * tokens)

    check_gradient(steps, loss_of, 1)
    assert {"mine/loss", "mine/mine"} <= steps.rows[0].keys()
    (own,) = [t.own for t, _ in steps.orchestrator.learner.terms if t.name == "mine"]
    assert own.steps == 1


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Broken", "loss on a made-up group is not finite"),
        ("Constant", "does not depend on the policy"),
        ("Fails", r"AttributeError.*line \d+ of 'losses.py'"),
        ("Drifts", "did you mean 'Drift'"),
    ],
)
def test_a_dry_run_tries_the_users_loss(toml, name, why):
    with pytest.raises(UserError, match=why):
        list(plan_lines(load_config(toml, [term(toml, name)])))


def test_a_term_has_one_loss(toml):
    with pytest.raises(UserError, match="one of `objective`, `pairs` and `loss`"):
        load_config(toml, [term(toml, "Drift", ",objective='sft'")])
