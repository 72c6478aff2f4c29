"""Several passes over the batch of a step: `trainer.epochs`, against formulas on plain sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rolltree.engine import UserError, load_config
from rolltree.engine.app.assembly.checks import check_training
from rolltree.engine.app.assembly.learning import inert, roles
from rolltree.engine.app.dry_run import plan_lines
from rolltree.engine.train.group import ALONE

from ...support.real_step import Steps, check_gradient, leaves_of, plain_logprobs, plain_model, take_steps
from ...support.tiny import GIVEN, tiny_job
from ..loop.test_policies_run import take, write_two

JUDGES = """
def odd(text, entry):
    return float(sum(map(ord, entry["question"])) % 3 and sum(map(ord, text)) % 2)  # some groups are all wrong
"""
LR = 0.02
COMMON = (
    "--trainer.epochs=2", f"--trainer.lr={LR}", "--trainer.max_tokens=4096", "--trainer.self_check=false",
    "--trainer.prompts_per_step=8", "--algorithm.objective=grpo", "--rollout.n=4",
)  # fmt: skip


toml = tiny_job({"reward.py": JUDGES, "given.jsonl": GIVEN}, reward={"verifier": "reward.py:odd"})


@pytest.fixture(scope="module")
def twice(toml, tmp_path_factory) -> Steps:
    """Two steps of two passes; demonstrations, and a reference that becomes the policy after every second update."""
    return take_steps(
        toml, tmp_path_factory.mktemp("twice"), *COMMON, "--trainer.steps=2", "--roles.reference={reset_every=2}",
        f"--demonstrations={{path='{toml.parent}/given.jsonl',per_step=3}}",
        '--algorithm.terms=[{name="teach",objective="sft",select="injected",weight=0.5}]',
    )  # fmt: skip


def credit(tree) -> np.ndarray:
    R = tree.rewards["reward"].astype(np.float64)
    return (R - R.mean()) / (R.std(ddof=1) + 1e-6)


def full_batch_loss(model, start, trees, given) -> torch.Tensor:
    """GRPO's loss, a mean over the responses of all groups that have credit, and half the mean NLL of what is given."""
    seen = [tree for tree in trees if np.ptp(tree.rewards["reward"])]
    parts = []
    for tree, leaf in leaves_of(seen):
        lp, A = plain_logprobs(model, tree, leaf), float(credit(tree)[leaf])
        with torch.no_grad():
            r_old = plain_logprobs(start, tree, leaf)
        r = (lp - r_old).exp()
        parts.append(-torch.minimum(r * A, r.clamp(0.8, 1.2) * A).mean())
    nll = torch.cat([-plain_logprobs(model, tree, 0) for tree in given])
    return torch.stack(parts).mean() + 0.5 * nll.mean()


@pytest.mark.check
@pytest.mark.parametrize("step", [0, 1])
def test_each_pass_is_an_update_on_the_whole_batch_against_the_samplers_log_probs(twice, step):
    first, second = twice.updates[2 * step : 2 * step + 2]
    assert [id(tree) for tree in second.trees] == [id(tree) for tree in first.trees]
    assert len(first.trees) == 8
    assert [id(tree) for tree in second.given] == [id(tree) for tree in first.given]
    assert len(first.given) == 3
    start = plain_model(twice, first)
    for k in (2 * step, 2 * step + 1):
        mine = twice.updates[k]
        check_gradient(twice, lambda m, u=mine: full_batch_loss(m, start, u.trees, u.given), update=k, tolerance=5e-3)
    moved = max((second.weights[name] - w).abs().max().item() for name, w in first.weights.items())
    assert moved > LR / 2  # AdamW's first updates are about the learning rate


def test_the_bounds_act_in_the_second_pass(twice):
    first, second = twice.updates[:2]
    start, model = plain_model(twice, first), plain_model(twice, second)
    clipped = tokens = 0
    for tree, leaf in leaves_of([tree for tree in first.trees if np.ptp(tree.rewards["reward"])]):
        with torch.no_grad():
            r = (plain_logprobs(model, tree, leaf) - plain_logprobs(start, tree, leaf)).exp()
        clipped += int(((r > 1.2) if credit(tree)[leaf] > 0 else (r < 0.8)).sum())
        tokens += len(r)
    assert clipped > 5
    assert twice.rows[0]["actor/pg_clipfrac"] == pytest.approx(clipped / tokens / 2, abs=1e-3)  # none in the first pass


def test_updates_are_counted_in_every_pass_and_what_a_step_leaves_out_once(twice):
    learner = twice.orchestrator.learner
    assert learner.updates == learner.roles[-1].seen == 4
    for row, update in zip(twice.rows, twice.updates[::2], strict=True):
        equal = [tree for tree in update.trees if not np.ptp(tree.rewards["reward"])]
        assert 0 < len(equal) < 8
        assert row["filter/unseen_groups"] == row["filter/zero_variance_groups"] == len(equal)
        assert row["filter/unseen_tokens"] == sum(tree.sampled_tokens for tree in equal)
        assert row["policy/lag"] == 0.5  # 0 in the first pass, 1 in the second
    assert "unseen" in str(twice.orchestrator.buffer.summary())  # which raises if a token is missing or counted twice
    for tree, leaf in leaves_of(twice.updates[2].trees):  # the reference has become the policy after both passes
        rows = tree.response_rows(leaf)
        np.testing.assert_allclose(tree.columns["ref_logprob"][rows], tree.behaviour_logprob[rows], atol=1e-4)


def test_a_step_without_a_term_leaves_its_tokens_out_once(toml, tmp_path):
    steps = take_steps(toml, tmp_path, *COMMON, "--algorithm.weight=0", "--algorithm.drop_zero_variance=false")
    (row,) = steps.rows
    assert row["actor/empty_updates"] == 2
    assert row["filter/unseen_tokens"] == sum(tree.sampled_tokens for tree in steps.judged) > 0
    assert steps.orchestrator.learner.updates == 0


def test_each_pass_divides_the_batch_alike_and_teaches_the_critic(toml, tmp_path):
    steps = take_steps(
        toml, tmp_path, *COMMON, "--trainer.updates_per_step=2", "--algorithm.advantage=gae",
        "--algorithm.objective=ppo", "--roles.critic={lr=1e-3}", "--algorithm.old_logprob=recompute",
        unset=("algorithm.advantage",),
    )  # fmt: skip
    shares = [[id(tree) for tree in update.trees] for update in steps.updates]
    assert shares[2:] == shares[:2]
    assert len({*shares[0], *shares[1]}) == 8
    learner = steps.orchestrator.learner
    assert learner.updates == learner.critic.trainer.updates == 4
    start = plain_model(steps, steps.updates[0])
    for tree, leaf in leaves_of(steps.trees[:8]):  # both passes compare with the policy before the step
        with torch.no_grad():
            lp = plain_logprobs(start, tree, leaf)
        np.testing.assert_allclose(tree.columns["proximal_logprob"][tree.response_rows(leaf)], lp, atol=2e-4)


def test_no_sentence_calls_bounds_inert_that_act(toml):
    once = load_config(toml, ["--algorithm.objective=cispo"])
    (sentence,) = inert(once)
    assert "set trainer.updates_per_step or trainer.epochs to 2 or more" in sentence
    assert inert(load_config(toml, ["--algorithm.objective=cispo", "--trainer.epochs=2"])) == []


def test_a_lag_is_corrected_against_the_policy_before_the_step(toml):
    config = load_config(toml, ["--loop.staleness=1", "--trainer.epochs=2"])
    assert [role.column for role in roles(config, None, ALONE, print, None)] == ["proximal_logprob"]  # type: ignore[arg-type]
    assert inert(config) == []


def test_what_the_samplers_log_probs_do_not_allow_is_refused(toml):
    check_training(load_config(toml, ["--rollout.top_k=5"]))
    with pytest.raises(UserError, match=r"`trainer.epochs` = 3 uses the sampler's log-probs.*top_k"):
        check_training(load_config(toml, ["--rollout.top_k=5", "--trainer.epochs=3"]))
    with pytest.raises(UserError, match="epochs"):
        load_config(toml, ["--trainer.epochs=0"])


def test_the_updates_of_all_passes_are_enough_to_extrapolate_from(toml):
    lora = "--model.lora={rank=4,extrapolate={every=2,horizon=3}}"
    with pytest.raises(UserError, match="8 updates at least, and the run makes 6"):
        load_config(toml, [lora, "--trainer.steps=3", "--trainer.epochs=2"])
    load_config(toml, [lora, "--trainer.steps=4", "--trainer.epochs=2"])


def test_the_plan_names_updates_and_passes(toml, tmp_path):
    options = ["--trainer.epochs=3", "--trainer.updates_per_step=2", f"--output_dir={tmp_path}"]
    (line,) = (line for line in plan_lines(load_config(toml, options)) if line.startswith("update "))
    assert line.endswith("6 optimiser step(s) in 3 passes over the batch")


@pytest.mark.check
def test_every_policy_passes_over_the_batch(tmp_path):
    two = take(write_two(tmp_path), tmp_path, "--trainer.epochs=2", "--trainer.steps=1")
    (row,) = two.rows
    assert [learner.updates for learner in two.learners.values()] == [2, 2]
    assert row["policy/lag"] == row["verifier/policy/lag"] == 0.5
    assert "Sampled tokens" in str(two.run.buffer.summary())
