"""Parts of the user's that a run fills with what they name, each through real steps against a formula on plain
sequences: losses of terms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rolltree.engine import UserError, load_config
from rolltree.engine.app.dry_run import plan_lines
from rolltree.engine.methods.schedules import scheduled
from rolltree.engine.parts.context import Context

from ...support.real_step import STARTED, along, check_gradient, leaves_of, plain_logprobs, take_steps
from ...support.tiny import beside, tiny_job

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


toml = tiny_job(
    {"mine.py": MINE, "losses.py": LOSSES},
    reward={"verifier": "mine.py:odd"}, algorithm={"objective": "reinforce"},
)  # fmt: skip


def term(toml: Path, name: str, more: str = "") -> str:
    return f"--algorithm.terms=[{{name='mine',loss='{toml.parent}/losses.py:{name}',weight=0.5{more}}}]"


@pytest.mark.check(but=1)
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
    (own,) = [t.instance for t, _ in steps.orchestrator.learner.terms if t.name == "mine"]
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


# -- options that change with the step, and what parts ask of the run --------------------------------------------------

ASKING = """
import numpy as np

SEEN = []


def lengthy(tree, *, share: float):
    return tree.rewards["reward"] - share * tree.response_length


def telling(tree, *, entry, texts, tokenizer, step, metrics):
    ids = [tree.token_id[tree.response_rows(leaf)] for leaf in range(tree.num_leaves)]
    mine = [tokenizer.decode(some, skip_special_tokens=True) for some in ids]
    SEEN.append(("shaping", entry["question"], list(texts) == mine, step, "actor/loss" in metrics))
    return tree.rewards["reward"]


def credit(trees, scale: float, *, texts, entry, step):
    SEEN.append(("credit", [e["question"] for e in entry], [len(some) for some in texts], step))
    return [scale * (tree.rewards["reward"] - tree.rewards["reward"].mean()) for tree in trees]


def callback(tree, entry, step):
    SEEN.append(("callback", entry["question"], step))


def select(tree, entry, step):
    SEEN.append(("select", entry["question"], step))
    return np.full(tree.num_leaves, 1.0)


class Order:
    def gate(self, problem, step, metrics):
        SEEN.append(("gate", problem.entry["question"], step))
        return True


class Near:
    def prepare(self, trees, entry):
        SEEN.append(("prepare", [e["question"] for e in entry]))

    def loss(self, logprob, fields, step):
        return step * (logprob * fields.weight).sum()


class Called:
    def __init__(self):
        self.calls = 0

    def __call__(self, tree, step):
        self.calls += 1
        return tree.rewards["reward"] + 0 * step

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]
"""


@pytest.fixture(scope="module")
def asking(toml) -> Path:
    (toml.parent / "asking.py").write_text(ASKING)
    part = {"name": "odd", "weight": [[1, 1.0], [3, 3.0]], "verifier": "mine.py:odd"}
    return beside(toml, "asking", reward={"verifier": None, "parts": [part]})


def parts(toml: Path) -> list[str]:
    at = f"{toml.parent}/asking.py"
    return [
        f"--reward.shaping=[{{name='{at}:lengthy',options={{share={{schedule=[[1,0.1],[3,0.5]]}}}}}},"
        f"{{name='{at}:telling'}},{{name='{at}:Called'}}]",
        f"--algorithm.advantage={at}:credit",
        "--algorithm.advantage_options={scale={schedule=[[1,1.0],[2,0.25]]}}",
        "--algorithm.objective=ppo",
        "--algorithm.objective_options={eps_low={schedule=[[1,0.0],[2,0.1]]},eps_high={schedule=[[1,0.0],[2,0.02]]}}",
        f"--algorithm.terms=[{{name='near',loss='{at}:Near',weight=0.01,select='{at}:select'}}]",
        f"--loop.callback={at}:callback",
        f"--data.curriculum={at}:Order",
    ]


@pytest.mark.check
def test_options_change_and_parts_get_what_they_name(asking, tmp_path):
    """Two steps: each number of the second is that of its own step, in the gradient of its second update."""
    steps = take_steps(
        asking, tmp_path, *STEPS, "--trainer.max_tokens=4096", "--trainer.steps=2", *parts(asking), unset=EVERYTHING
    )
    rows = steps.rows
    shaping = next(name for name in rows[0] if name.startswith("schedule/shaping"))
    for step, (share, scale, low, high) in enumerate([(0.1, 1.0, 0.0, 0.0), (0.3, 0.25, 0.1, 0.02)]):
        assert rows[step][shaping] == pytest.approx(share)
        assert rows[step]["schedule/advantage.scale"] == pytest.approx(scale)
        assert rows[step]["schedule/reward.odd.weight"] == step + 1
        for tree in steps.judged[4 * step : 4 * step + 4]:
            np.testing.assert_array_equal(tree.rewards["verifier"], (step + 1) * tree.rewards["odd"])
        assert rows[step]["schedule/actor.eps_low"] == pytest.approx(low)
        assert rows[step]["schedule/actor.eps_high"] == pytest.approx(high)
    mine = steps.updates[3]
    for tree in mine.trees:
        length = np.array([len(tree.response_rows(leaf)) for leaf in range(tree.num_leaves)])
        shaped = tree.rewards["verifier"] - 0.3 * length
        np.testing.assert_allclose(tree.rewards["reward"], shaped, rtol=1e-5)
        np.testing.assert_allclose(tree.advantage, 0.25 * (shaped - shaped.mean()), rtol=1e-4, atol=1e-6)

    clipped = []

    def loss_of(model):
        policy = near = torch.zeros(())
        tokens = sum(len(t.response_rows(leaf)) for t, leaf in leaves_of(mine.trees))
        for tree, leaf in leaves_of(mine.trees):
            lp, A = plain_logprobs(model, tree, leaf), float(tree.advantage[leaf])
            r = (lp - along(tree, leaf, "behaviour_logprob")).exp()
            clipped.append(((r < 0.9) | (r > 1.02)).sum())
            policy = policy - torch.minimum(r * A, r.clamp(0.9, 1.02) * A).sum()
            near = near + 2 * lp.sum()
        return (policy + 0.01 * near) / tokens

    check_gradient(steps, loss_of, 3)
    assert sum(clipped) > 5
    check_what_they_saw(steps)


def check_what_they_saw(steps):
    import sys

    (module,) = [m for name, m in sys.modules.items() if name.startswith("rolltree_user_asking")]
    seen = {kind: [said[1:] for said in module.SEEN if said[0] == kind] for kind, *_ in module.SEEN}
    of_step = [[tree.meta["entry"]["question"] for tree in steps.judged[4 * k : 4 * k + 4]] for k in (0, 1)]
    assert seen["shaping"] == [(q, True, step + 1, step == 1) for step in (0, 1) for q in of_step[step]]
    assert [(c[0], c[2]) for c in seen["credit"]] == [(of_step[0], 1), (of_step[1], 2)]
    assert all(lengths == [4] * 4 for _, lengths, _ in seen["credit"])
    assert sorted(seen["callback"]) == sorted((q, step + 1) for step in (0, 1) for q in of_step[step])
    assert sorted(seen["select"]) == sorted(seen["callback"])
    assert [sorted(questions) for (questions,) in seen["prepare"]] == [sorted(questions) for questions in of_step]
    assert {step for _, step in seen["gate"]} == {1, 2}
    (called,) = [s for what, s in steps.orchestrator.learner.parts.shapings if "Called" in what]
    assert called.calls == 8
    assert called in steps.orchestrator.learner.parts.stateful.values()


def test_a_step_where_an_option_leaves_its_range_ends_the_run(asking, tmp_path):
    with pytest.raises(
        UserError, match=r"At step 2, algorithm.objective = 'ppo': Objective: eps_low must be in \[0, 1\]"
    ):
        take_steps(
            asking, tmp_path, *STEPS, "--trainer.steps=3", "--algorithm.objective=ppo",
            "--algorithm.objective_options={eps_low={schedule=[[1,1.0],[2,1.5]]}}", unset=EVERYTHING,
        )  # fmt: skip


@pytest.mark.slow
def test_a_weight_that_follows_a_metric_goes_on_in_a_resumed_run(asking, tmp_path):
    """The weight falls by 2% a step from the value of the step before, which is in the checkpoint."""
    steered = "weight='steer',weight_options={metric='actor/loss',target=100.0,own='schedule/reward.odd.weight'}"
    part = f"--reward.parts=[{{name='odd',verifier='{asking.parent}/mine.py:odd',{steered}}}]"
    flags = [*STEPS, "--trainer.max_tokens=4096", part]
    take_steps(asking, tmp_path, *flags, "--trainer.steps=2", unset=EVERYTHING)
    for key in [key for key in STARTED if "steer" in key]:
        del STARTED[key]  # it follows the first run's steps
    steps = take_steps(asking, tmp_path, *flags, "--trainer.steps=3", unset=EVERYTHING, resume=True)
    assert [row["schedule/reward.odd.weight"] for row in steps.rows] == pytest.approx([1, 0.98, 0.98**2])
    for tree in steps.judged:
        np.testing.assert_allclose(tree.rewards["reward"], np.float32(0.98**2) * tree.rewards["odd"])


def test_two_parts_of_one_name_have_metrics_of_their_own():
    context = Context()
    for value in (1.0, 2.0, 3.0):
        scheduled(context, "shaping.same", "key", {"most": {"schedule": value}})
    found = {name: option.now() for name, option in context.schedules.items()}
    assert found == {"shaping.same.most": 1, "shaping.same.most.2": 2, "shaping.same.most.3": 3}


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--algorithm.objective_options={eps_low={schedule=[[3,0.1],[2,0.2]]}}"], "eps_low.schedule must be a name"),
        (["--algorithm.objective_options={eps_low={schedule='cosin'}}"], "did you mean 'cosine'"),
        (["--algorithm.objective_options={eps_low={schedule='cosine'}}"], "needs the option 'end'"),
        (["--algorithm.objective_options={eps={schedule='cosine',end=3}}"], "no field is called eps"),
        (["--algorithm.objective_options={kl_coef={schedule=[[0,0.0],[9,0.1]]}}"], r"\[roles.reference\]"),
        (["--algorithm.terms=[{name='near',loss='asking.py:Near',loss_options={a={schedule=1.0}}}]"], "no option 'a'"),
    ],
)
def test_a_dry_run_refuses_a_wrong_schedule(asking, flags, why):
    flags = [flag.replace("asking.py", f"{asking.parent}/asking.py") for flag in flags]
    with pytest.raises(UserError, match=why):
        list(plan_lines(load_config(asking, ["--algorithm.objective=ppo", *flags])))
