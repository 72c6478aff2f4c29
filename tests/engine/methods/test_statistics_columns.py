"""Statistics of the policy's distributions as columns, and the parts that read them, against plain log-softmaxes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rolltree.engine import UserError, load_config
from rolltree.engine.app.assembly.statistics import read_columns
from rolltree.engine.data.columns import find_column
from rolltree.engine.data.statistics import STATISTIC

from ...support.real_step import Steps, check_gradient, leaves_of, plain_logprobs, plain_model, take_steps
from ...support.tiny import NO_METHOD, tiny_job

JUDGES = """
def odd(text, entry):
    return float(sum(map(ord, text)) % 3 == 0)
"""

MINE = """
import numpy as np
from rolltree.engine.data.columns import Column, declare
from rolltree.engine.methods.credit import Credit

declare(Column("wanted_id", np.int32, "token", "id to score", -1, merge="first", to_device=True))

class ByIds:
    reads = ("policy_logprob", "policy_entropy", "policy_logprob/wanted_id")

    def prepare(self, trees):
        for tree in trees:
            tree.set("wanted_id", np.where(np.arange(tree.num_tokens) % 2, (tree.token_id + 3) % 50, -1))

    def __call__(self, trees):
        return [tree.rewards["reward"] - tree.rewards["reward"].mean() for tree in trees]

def surprise(tree):  # a shaping: statistics are there before rewards are shaped
    return tree.rewards["reward"] - np.array([
        np.nanmean(tree.policy_mean_logprob[tree.response_rows(leaf)]) for leaf in range(tree.num_leaves)])

surprise.reads = ("policy_mean_logprob",)

def unlikely_places(tree):
    return tree.loss_mask & (tree.policy_sum_p2 < 0.1)

unlikely_places.reads = ("policy_sum_p2",)

def wrong(tree):
    return tree.loss_mask

wrong.reads = ("logits",)

def of_no_ids(tree):
    return tree.loss_mask

of_no_ids.reads = ("policy_logprob/value",)
"""
T = 0.1
"""Temperature, so low that the distributions of the random model are far from uniform."""
COMMON = (
    "--trainer.updates_per_step=2",
    "--trainer.lr=0.002",
    f"--rollout.temperature={T}",
    "--trainer.self_check=false",
    "--trainer.prompts_per_step=4",
)
PATHS = ("--rollout.program=treepo", "--rollout.program_options={segment_tokens=3,init=2}", "--rollout.n=4")


toml = tiny_job(
    {"mine.py": MINE, "reward.py": JUDGES}, reward={"verifier": "reward.py:odd"}, algorithm=NO_METHOD["algorithm"]
)


@pytest.fixture(scope="module", params=[4096, 80], ids=["whole", "in pieces"])
def steps(request, toml, tmp_path_factory) -> Steps:
    mine = f"{toml.parent}/mine.py"
    return take_steps(
        toml, tmp_path_factory.mktemp("columns"), *COMMON, *PATHS, f"--algorithm.advantage={mine}:ByIds",
        f"--trainer.max_tokens={request.param}", f"--reward.shaping=[{{name='{mine}:surprise'}}]",
        f"--algorithm.select={mine}:unlikely_places", "--loop.temperature_scale=0.8", "--trainer.prompts_per_step=8",
        unset=("rollout.program", "rollout.program_options", "algorithm.advantage"),
    )  # fmt: skip


@pytest.mark.check
def test_columns_are_the_statistics_of_the_policy_before_the_step(steps):
    model, ids_scored = plain_model(steps, steps.updates[0]), 0
    for tree, leaf in leaves_of(steps.trees):
        rows = tree.response_rows(leaf)
        with torch.no_grad():
            every = plain_logprobs(model, tree, leaf, 0.8 * T, vocabulary=True).double()
        ids = torch.from_numpy(tree.token_id[rows].astype(np.int64))
        other = torch.from_numpy(tree.columns["wanted_id"][rows].astype(np.int64))
        want = {
            "policy_logprob": every.gather(1, ids[:, None])[:, 0],
            "policy_entropy": -(every.exp() * every).sum(1),
            "policy_sum_p2": every.exp().square().sum(1),
            "policy_mean_logprob": every.mean(1),
            "policy_logprob/wanted_id": torch.where(other < 0, 0.0, every.gather(1, other.clamp(min=0)[:, None])[:, 0]),
        }
        ids_scored += int((other >= 0).sum())
        for name, values in want.items():
            np.testing.assert_allclose(tree.columns[name][rows], values, atol=2e-4, err_msg=name)
    assert ids_scored > 50


def test_a_shaping_and_a_selection_read_them(steps):
    cut = 0
    for tree in steps.trees:
        for leaf in range(tree.num_leaves):
            rows = tree.response_rows(leaf)
            raised = tree.rewards["reward"][leaf] - tree.rewards["verifier"][leaf]
            assert raised == pytest.approx(-tree.policy_mean_logprob[rows].mean(), rel=1e-4)
        chosen = tree.columns["select_token/actor"] != 0
        want = tree.loss_mask & (tree.policy_sum_p2 < 0.1)
        assert np.array_equal(chosen, want)
        cut += int((tree.loss_mask & ~want).sum())
    assert cut > 0


def test_a_run_without_such_parts_computes_nothing(toml, tmp_path):
    config = load_config(toml, [f"--output_dir={tmp_path}"])
    assert read_columns(config) == []
    plain = take_steps(toml, tmp_path, *COMMON, "--trainer.prompts_per_step=2")
    assert not plain.orchestrator.learner.roles
    assert not [name for tree in plain.trees for name in tree.columns if name in STATISTIC]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wrong", "reads 'logits', which the policy does not compute"),
        ("of_no_ids", "must be integers per token, and to_device"),
    ],
)
def test_what_the_policy_does_not_compute_is_named(toml, tmp_path, name, said):
    config = load_config(toml, [f"--output_dir={tmp_path}", f"--algorithm.select={toml.parent}/mine.py:{name}"])
    if name == "of_no_ids":  # the critic's column goes to the device, and holds no ids
        assert find_column("value").to_device
    with pytest.raises(UserError, match=said):
        read_columns(config)


# -- the parts ---------------------------------------------------------------------------------------------------------


def take(toml, tmp_path_factory, *overrides) -> Steps:
    return take_steps(
        toml, tmp_path_factory.mktemp("part"), *COMMON, *PATHS, "--trainer.max_tokens=4096", *overrides,
        unset=("rollout.program", "rollout.program_options", "algorithm.advantage"),
    )  # fmt: skip


def statistics(model, tree, leaf):
    """Return log p of the tokens, sum of p squared and mean of log p, float64 [n] each."""
    with torch.no_grad():
        every = plain_logprobs(model, tree, leaf, T, vocabulary=True).double()
    ids = torch.from_numpy(tree.token_id[tree.response_rows(leaf)].astype(np.int64))
    return every.gather(1, ids[:, None])[:, 0].numpy(), every.exp().square().sum(1).numpy(), every.mean(1).numpy()


def test_the_optimal_token_baseline(toml, tmp_path_factory):
    steps = take(toml, tmp_path_factory, "--recipe=optimal_token")
    model, nonzero = plain_model(steps, steps.updates[0]), 0
    for tree in steps.trees:
        R = tree.rewards["reward"].astype(np.float64)
        W = []
        for leaf in range(tree.num_leaves):
            lp, sum_p2, _ = statistics(model, tree, leaf)
            W.append(np.cumsum(1 - 2 * np.exp(lp) + sum_p2))
        want = []
        for i in range(tree.num_leaves):
            for t in range(len(W[i])):
                others = [j for j in range(tree.num_leaves) if len(W[j]) > t]
                B = sum(R[j] * W[j][t] for j in others) / sum(W[j][t] for j in others)
                want.append(R[i] - B)
        np.testing.assert_allclose(tree.path_advantage, want, atol=1e-4)
        nonzero += int(np.abs(want).max() > 0.1)
    assert nonzero > 1


def test_the_gradient_weighted_baseline(toml, tmp_path_factory):
    steps = take(toml, tmp_path_factory, "--recipe=oblr")
    model = plain_model(steps, steps.updates[0])
    for tree in steps.trees:
        R = tree.rewards["reward"].astype(np.float64)
        w = np.array([
            (1 - 2 * np.exp(lp) + p2).sum() for lp, p2, _ in (statistics(model, tree, i) for i in range(len(R)))
        ])  # fmt: skip
        np.testing.assert_allclose(tree.advantage, R - (w * R).sum() / w.sum(), atol=1e-4)


def test_rover_regresses_q_on_the_rewards_and_the_mean_of_the_next(toml, tmp_path_factory):
    """Both updates: in the first Q is 0; in the second it bootstraps from the next token of each response."""
    steps = take(toml, tmp_path_factory, "--recipe=rover", "--algorithm.terms=[{name='rover',loss_options={rho=0.7}}]")
    start = plain_model(steps, steps.updates[0])
    for number, update in enumerate(steps.updates):
        leaves = leaves_of(update.trees)

        def loss(model, leaves=leaves):
            found, count = torch.zeros(()), 0
            for tree, leaf in leaves:
                R = tree.rewards["reward"].astype(np.float64)
                every = plain_logprobs(model, tree, leaf, T, vocabulary=True)
                with torch.no_grad():
                    old = plain_logprobs(start, tree, leaf, T, vocabulary=True)
                ids = torch.from_numpy(tree.token_id[tree.response_rows(leaf)].astype(np.int64))[:, None]
                Q = 0.7 * (every - old).gather(1, ids)[:, 0]
                following = torch.cat([(0.7 * (every - old)).mean(1).detach()[1:], torch.zeros(1)])
                found = found + (Q - float(R[leaf] - R.mean()) - following).square().sum()
                count += len(ids)
            return found / count

        check_gradient(steps, loss, update=number, tolerance=5e-3)
    assert sum(tree.num_nodes > tree.num_leaves + 1 for tree in steps.trees), "no tree branches, nothing is shared"


def test_laser_scores_and_mixes(toml, tmp_path_factory):
    steps = take(
        toml, tmp_path_factory, "--recipe=laser", "--algorithm.advantage_options={token=7,mix=0.25}",
        "--algorithm.terms=[{name='laser',loss_options={token=7,beta=0.5,c=-4.0},weight=0.3}]",
    )  # fmt: skip
    start = plain_model(steps, steps.updates[0])

    def norm(x):
        return (x - x.mean()) / (np.sqrt(((x - x.mean()) ** 2).sum() / (len(x) - 1)) + 1e-6)

    credit = {}
    for tree in steps.trees:
        with torch.no_grad():
            scores = [plain_logprobs(start, tree, i, T, vocabulary=True)[-1, 7] for i in range(tree.num_leaves)]
        want = 0.75 * norm(tree.rewards["reward"].astype(np.float64)) + 0.25 * norm(np.array(scores, np.float64))
        np.testing.assert_allclose(tree.advantage, want, atol=2e-3)
        credit[id(tree)] = tree.advantage
    leaves = leaves_of(steps.updates[1].trees)

    def loss(model):
        parts, scored = [], []
        for tree, leaf in leaves:
            every = plain_logprobs(model, tree, leaf, T, vocabulary=True)
            ids = torch.from_numpy(tree.token_id[tree.response_rows(leaf)].astype(np.int64))[:, None]
            with torch.no_grad():
                old = plain_logprobs(start, tree, leaf, T)
            r, A = (every.gather(1, ids)[:, 0] - old).exp(), float(credit[id(tree)][leaf])
            parts.append(-torch.minimum(r * A, r.clamp(0.8, 1.2) * A).mean())
            scored.append((0.5 * (every[-1, 7] + 4) - float(tree.rewards["reward"][leaf])).square())
        return torch.stack(parts).mean() + 0.3 * torch.stack(scored).mean()

    # the run's loss metric is the first term's alone
    model = plain_model(steps, steps.updates[1])
    loss(model).backward()
    off = sum(float((steps.updates[1].gradient[n] - p.grad).norm() ** 2) for n, p in model.named_parameters())
    norm_of = sum(float(p.grad.norm() ** 2) for p in model.parameters())
    assert off <= 25e-6 * norm_of
