"""Runs with staleness: what lags and how far, the correction by its formula, group callbacks, and that they learn."""

from __future__ import annotations

import copy
import io
import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console as RichConsole

from rolltree.engine import UserError, load_config, pack
from rolltree.engine.app.assembly import learning as build_learning
from rolltree.engine.app.assembly import methods as build_methods
from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.assembly.sampling import sampling_params
from rolltree.engine.app.console import Console
from rolltree.engine.app.dry_run import plan_lines
from rolltree.engine.errors import RunError
from rolltree.engine.loop.budget import Budget, StalenessError
from rolltree.engine.loop.runtime import Cores
from rolltree.engine.model.roles import Role
from rolltree.engine.record.metrics import Sums
from rolltree.engine.train.group import ALONE
from rolltree.engine.train.terms import TokenTerm
from rolltree.kernels import Objective

from ...support.thinned import thinned
from ...support.tiny import tiny_job

QUICK = ["--evaluation.problems=0", "--evaluation.every=0", "--rollout.program=flat", "--rollout.program_options={}"]
QUICK += ["--algorithm.advantage=group_norm"]
THREAD = ["--loop.staleness=1", "--loop.overlap=true"]  # sampling in a thread, which on a CPU has to be asked for

JUDGES = """
def same(text, entry):
    return 1.0


def likes(text, entry):
    return float(sum(c in "0123456789" for c in text)) / max(1, len(text))
"""

MINE = """
from rolltree.engine.methods.groups import Accept, Add, Drop, More, Retry

def early(tree):
    return Drop("odd") if tree.meta["prompt_id"].endswith(("1", "3", "5")) else Accept()

def never(tree):
    return Drop("never")

def again(tree):
    return None if tree.meta["attempt"] else Retry("7 + 1 =")

def more(tree):
    return More(2) if tree.num_leaves < 8 else None

def helped(tree):
    return Add(["Answer: 1", "2"], [1.0, 0.0])

def nonsense(tree):
    return 3

"""


toml = tiny_job({"mine.py": MINE, "judges.py": JUDGES})


class Run:
    def __init__(self, toml: Path, directory: Path, *overrides: str) -> None:
        self.config = load_config(toml, [*QUICK, f"--output_dir={directory}/runs", *overrides])
        self.out = io.StringIO()
        self.loop = build(self.config, console=Console(RichConsole(file=self.out, width=300)))

    def run(self) -> Run:
        self.loop.run()
        return self

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.config.run_dir / "metrics.jsonl").read_text().splitlines()][1:]

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        return pq.read_table(self.config.run_dir / "rollouts" / f"step_{step:06d}.parquet").to_pylist()


@pytest.mark.slow(but=1)
@pytest.mark.check
@pytest.mark.parametrize("keep_keys", ["true", "false"])
def test_responses_go_on_under_new_weights(toml: Path, tmp_path: Path, keep_keys: str) -> None:
    """Without overlap some are unfinished at each update; their tokens keep the versions that sampled them."""
    options = ["--loop.staleness=2", "--loop.overlap=false", f"--loop.keep_keys={keep_keys}", "--trainer.steps=5"]
    run = Run(toml, tmp_path, *options, "--rollout.max_batch_rows=12", "--rollout.max_new_tokens=20").run()
    crossed = 0
    for step, row in enumerate(run.rows, start=1):
        lags = []
        for leaf in run.rollouts(step):
            versions = np.array(leaf["policy_version"])
            assert (np.diff(versions) >= 0).all()
            crossed += len(set(versions.tolist())) > 1
            lags += (step - 1 - versions).tolist()
            assert all(np.isfinite(leaf["behaviour_logprob"]))
        assert 0 <= min(lags) <= max(lags) <= 2
        assert "policy/lag" not in row or row["policy/lag"] <= 2
    assert crossed, "no response crossed an update; the test shows nothing"


@pytest.mark.check
def test_behaviour_is_that_of_the_weights_that_sampled(toml: Path, tmp_path: Path) -> None:
    """Sampler and trainer are two modules with the same numbers: a batch on policy agrees to rounding."""
    options = [*THREAD, "--trainer.steps=4", "--trainer.lr=0.05"]
    run = Run(toml, tmp_path, *options).run()
    first, *_, last = run.rows
    assert first["training/rollout_probs_diff_mean"] < 1e-5
    assert last["training/rollout_is_mean"] != 1
    (ours, theirs) = (dict(m.named_parameters()) for m in (run.loop.learner.model, run.loop.sampler.engine.model))
    for name, parameter in theirs.items():
        assert parameter is not ours[name]
        assert torch.equal(parameter, ours[name])  # the last update has reached the sampler


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow(but=1)
@pytest.mark.check
@pytest.mark.parametrize(("overlap", "own", "sampling"), [("true", 2, {2, 4}), ("false", 4, {4}), (None, 4, {4})])
def test_updates_and_sampling_divide_the_cores_while_both_compute(
    toml: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    four_threads: None,
    overlap: str | None,
    own: int,
    sampling: set[int],
) -> None:
    given = [] if overlap is None else [f"--loop.overlap={overlap}"]
    run = Run(toml, tmp_path, "--loop.staleness=1", *given, "--trainer.steps=3")
    seen: dict[str, set[int]] = {"update": set(), "step": set(), "weights": set()}

    def noting(name: str, function: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            seen[name].add(torch.get_num_threads())
            return function(*args, **kwargs)

        return noted

    monkeypatch.setattr(run.loop.learner, "update", noting("update", run.loop.learner.update))
    monkeypatch.setattr(run.loop.sampler.engine, "step", noting("step", run.loop.sampler.engine.step))
    monkeypatch.setattr(
        run.loop.sampler.engine, "update_weights", noting("weights", run.loop.sampler.engine.update_weights)
    )
    run.run()
    assert seen["update"] == {own}
    assert seen["step"] <= sampling
    assert 4 in seen["step"]  # for the first batch it is alone
    assert seen["weights"] == {4}
    assert torch.get_num_threads() == 4


def test_who_waits_leaves_its_cores_to_the_other(four_threads: None) -> None:
    cores, turns = Cores(shared=True), ThreadPoolExecutor(1)

    def sampler() -> int:
        cores.take()
        return torch.get_num_threads()

    with turns:
        assert turns.submit(sampler).result() == 4
        with cores.left_to_sampler():
            assert turns.submit(sampler).result() == 4
        assert (turns.submit(sampler).result(), torch.get_num_threads()) == (2, 2)
        with cores.left_to_caller():
            assert torch.get_num_threads() == 4
        assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    one = Cores(shared=True)
    with one.left_to_sampler():
        pass
    one.take()
    assert torch.get_num_threads() == 1


@pytest.mark.check
@pytest.mark.parametrize(
    ("scored", "correction"),
    thinned(
        itertools.product([False, True], ["truncate", "mask", "none"]),
        lambda number, case: case in [(False, "truncate"), (True, "mask"), (False, "none")],
    ),
)
def test_the_correction_is_the_decoupled_one(toml: Path, tmp_path: Path, scored: bool, correction: str) -> None:
    """Tokens weigh min(exp(proximal - behaviour), cap), by an independent sum over sequences, whether the policy has
    scored the batch before its only update or that update itself does."""
    options = ["--loop.staleness=1", "--trainer.steps=1", "--loop.correction_cap=1.5", "--trainer.lr=1e-9"]
    options += ["--algorithm.old_logprob=recompute"] if scored else []
    run = Run(toml, tmp_path, *options, f"--loop.correction={correction}", "--algorithm.objective=grpo")
    run.run()
    learner = run.loop.learner
    batch = [group.tree for group in run.loop.buffer.open.values() if group.parts]
    batch = batch or _sample(run)
    rng = np.random.default_rng(0)
    for tree in batch:
        tree.rewards["reward"] = rng.random(tree.num_leaves).astype(np.float32)
        shift = rng.normal(0, 0.5, tree.num_tokens).astype(np.float32)
        tree.set("behaviour_logprob", np.where(tree.loss_mask, tree.behaviour_logprob + shift, np.nan))
        tree.set("policy_version", np.full(tree.num_tokens, learner.trainer.updates - 1))
    again = copy.deepcopy(batch)
    policy = Role("proximal_logprob", learner.model)
    policy.score(again, pack(again, max_tokens=4096), temperature=learner.temperature(1))
    sums = Sums()
    assert learner.update(batch, [], 1, sums)
    assert all(("proximal_logprob" in tree.columns) == scored for tree in batch)
    if correction == "none":
        return
    losses = []
    for tree in again:
        reward = tree.rewards["reward"]
        advantage = (reward - reward.mean()) / (reward.std(ddof=1) + 1e-6)
        for leaf in range(tree.num_leaves):
            rows = tree.response_rows(leaf)
            weight = np.exp((tree.proximal_logprob - tree.behaviour_logprob)[rows].astype(np.float64))
            kept = np.minimum(weight, 1.5) if correction == "truncate" else np.where(weight > 1.5, 0, weight)
            losses.append(np.mean(-advantage[leaf] * kept))
    assert sums.means()["actor/pg_loss"] == pytest.approx(np.mean(losses), rel=1e-3, abs=1e-5)


@pytest.mark.slow(but=3)
@pytest.mark.check(but=1)
@pytest.mark.parametrize(
    "objective", ["dapo", "dcpo_clip", "decoupled_ppo", "rollout_is", "gspo", "vespo", "cispo", "topr"]
)
def test_an_only_update_needs_no_scores_before_it(toml: Path, tmp_path: Path, objective: str) -> None:
    """The same gradient as against recorded scores of the policy before the update, and another than uncorrected; the
    weights of topr's own are against the sampler."""

    def learned(*given: str, off: float = 0.5) -> tuple[float, float]:
        given = (f"--algorithm.objective={objective}", "--loop.staleness=1", "--trainer.max_grad_norm=1e9", *given)
        run = Run(toml, tmp_path, *given)
        batch, learner, rng, sums = _sample(run), run.loop.learner, np.random.default_rng(0), Sums()
        learner.trainer.updates = 1
        for tree in batch:
            tree.rewards["reward"] = rng.random(tree.num_leaves).astype(np.float32)
            shift = rng.normal(0, off, tree.num_tokens).astype(np.float32)
            tree.set("behaviour_logprob", np.where(tree.loss_mask, tree.behaviour_logprob + shift, np.nan))
        assert learner.update(batch, [], 1, sums)
        assert ("proximal_logprob" in batch[0].columns) == ("--algorithm.old_logprob=recompute" in given)
        return sums.means()["actor/pg_loss"], sums.means()["actor/grad_norm"]

    found = learned()
    if objective == "topr":
        assert found != pytest.approx(learned(off=0.0), rel=1e-2)
        return
    assert found == pytest.approx(learned("--algorithm.old_logprob=recompute"), rel=1e-4, abs=1e-6)
    if objective not in ("decoupled_ppo", "rollout_is"):  # a correction of their own
        uncorrected = learned("--loop.correction=none", "--algorithm.old_logprob=recompute")
        assert found != pytest.approx(uncorrected, rel=1e-2)


def test_weights_of_toprs_own_are_against_the_sampler_in_several_updates(toml: Path, tmp_path: Path) -> None:
    """The policy before the step, which others are compared with, is scored all the same."""
    trees = _sample(Run(toml, tmp_path))
    for tree in trees:
        tree.set("proximal_logprob", np.where(tree.loss_mask, tree.behaviour_logprob - 1, np.nan))
    (batch,) = pack(trees, max_tokens=4096)
    for name, shift in (("dapo", -1), ("topr", 0)):
        old = TokenTerm(Objective.preset(name)).on(batch, 1.0, on_policy=False, weight=1.0).fields.old_logprob
        assert old is not None
        assert batch.behaviour_logprob is not None
        assert torch.equal(old[batch.loss_mask], (batch.behaviour_logprob + shift)[batch.loss_mask])


def _sample(run: Run) -> list[Any]:
    prompts = run.loop.source.peek(4)
    params = sampling_params(run.config.rollout)
    return run.loop.sampler.engine.generate([p.token_ids for p in prompts], params, seeds=[1, 2, 3, 4])


def test_what_has_a_correction_keeps_it(toml: Path) -> None:
    config = load_config(toml, ["--loop.staleness=1"])
    for name, expected in (("dapo", "truncate"), ("decoupled_ppo", "truncate"), ("topr", "none"), ("sft", "none")):
        found = build_methods.objective(config, "algorithm.objective", name, {}, select="best")
        assert found.mismatch == expected, name
    masked = build_methods.objective(config, "algorithm.objective", "dapo", {"mismatch": "mask", "mismatch_cap": 9.0})
    assert (masked.mismatch, masked.mismatch_cap) == ("mask", 9.0)
    on_policy = load_config(toml, [])
    assert build_methods.objective(on_policy, "algorithm.objective", "dapo", {}).mismatch == "none"
    assert build_learning.roles(config, None, ALONE, print, None) == []  # type: ignore[arg-type]
    several = load_config(toml, ["--loop.staleness=1", "--trainer.updates_per_step=2"])
    assert [role.column for role in build_learning.roles(several, None, ALONE, print, None)] == ["proximal_logprob"]  # type: ignore[arg-type]
    bases = [
        build_methods.objective(c, "algorithm.objective", "dapo", {}).ratio_base for c in (on_policy, config, several)
    ]
    assert bases == ["old", "current", "old"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["--loop.staleness=1", "--rollout.top_k=5"], r"`loop.staleness` = 1 .* top_p, top_k and min_p"),
        (["--loop.callback=dynamic_samplin"], "did you mean 'dynamic_sampling'"),
        (["--loop.callback=until_unequal", "--loop.callback_options={mor=1}"], "did you mean 'more'"),
    ],
)
def test_what_does_not_go_together_is_refused(toml: Path, tmp_path: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Run(toml, tmp_path, *overrides)
    with pytest.raises(UserError, match=said):  # as --dry-run does
        list(plan_lines(load_config(toml, [*QUICK, f"--output_dir={tmp_path}/runs", *overrides])))
    assert not (tmp_path / "runs").exists()


def test_a_broken_bound_ends_the_run(toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Budget, "capacity", property(lambda self: 4 * self.batch))
    run = Run(toml, tmp_path, "--loop.staleness=1", "--trainer.steps=6")
    with pytest.raises(StalenessError, match="a mistake in rolltree"):
        run.run()


def test_an_error_of_the_sampling_thread_ends_the_run(toml: Path, tmp_path: Path) -> None:
    run = Run(toml, tmp_path, *THREAD, f"--loop.callback={toml.parent}/mine.py:nonsense")
    with pytest.raises(UserError, match="answered 3"):
        run.run()


# -- group callbacks ---------------------------------------------------------------------------------------------------


@pytest.mark.check
@pytest.mark.parametrize("staleness", [0, 1])
def test_dynamic_sampling_fills_the_batch_with_unequal_groups(toml: Path, tmp_path: Path, staleness: int) -> None:
    given = ["--loop.callback=dynamic_sampling", "--trainer.steps=2", f"--loop.staleness={staleness}"]
    given += ["--loop.overlap=true"]
    run = Run(toml, tmp_path, *given, *(["--loop.over_sampling=1.5"] if staleness == 0 else [])).run()
    for step, row in enumerate(run.rows, start=1):
        rewards: dict[int, set[float]] = {}
        for leaf in run.rollouts(step):
            rewards.setdefault(leaf["group"], set()).add(leaf["reward"])
        assert len(rewards) == run.config.trainer.prompts_per_step
        assert all(len(values) > 1 for values in rewards.values())
        assert row["filter/zero_variance_groups"] == 0
    dropped = run.loop.buffer.dropped
    assert dropped["equal_rewards"] > 0
    assert (dropped["surplus"] > 0) == (staleness == 0)
    assert sum(row.get("group/dropped_equal_rewards", 0) for row in run.rows) > 0


@pytest.mark.slow
def test_synchronous_callbacks_do_not_depend_on_the_clock(toml: Path, tmp_path: Path) -> None:
    found = []
    for workers in (1, 2):
        run = Run(toml, tmp_path, "--loop.callback=dynamic_sampling", f"--reward.workers={workers}",
                  f"--name=w{workers}", "--trainer.steps=2").run()  # fmt: skip
        rows = [{k: v for k, v in r.items() if not k.startswith(("timing_s/", "perf/"))} for r in run.rows]
        found.append((rows, [run.rollouts(step) for step in (1, 2)]))
    assert found[0] == found[1]


@pytest.mark.check(but=1)
@pytest.mark.parametrize("name", ["again", "more", "helped"])
def test_what_callbacks_may_answer(toml: Path, tmp_path: Path, name: str) -> None:
    run = Run(toml, tmp_path, f"--loop.callback={toml.parent}/mine.py:{name}", "--trainer.steps=1").run()
    groups: dict[int, list[dict[str, Any]]] = {}
    for leaf in run.rollouts(1):
        groups.setdefault(leaf["group"], []).append(leaf)
    assert len(groups) == run.config.trainer.prompts_per_step
    for leaves in groups.values():
        assert all(leaf["reward"] is not None for leaf in leaves)
        if name == "again":
            assert {leaf["prompt_text"] for leaf in leaves} == {"7 + 1 =\n"}
            assert len(leaves) == 4
        elif name == "more":
            assert len(leaves) == 8
            texts = [tuple(leaf["response_ids"]) for leaf in leaves]
            assert len(set(texts)) > 4  # further responses, not the same again
        else:
            assert [leaf["response_text"] for leaf in leaves[4:]] == ["Answer: 1", "2"]
            assert [leaf["reward"] for leaf in leaves[4:]] == [1.0, 0.0]
            assert not any(any(leaf["loss_mask"]) for leaf in leaves[4:])
            assert all(all(leaf["loss_mask"]) for leaf in leaves[:4])


@pytest.mark.check
def test_a_callback_that_drops_everything_ends_the_run(toml: Path, tmp_path: Path) -> None:
    run = Run(toml, tmp_path, f"--loop.callback={toml.parent}/mine.py:never", "--loop.max_dropped_batches=2")
    with pytest.raises(RunError, match=r"dropped more than 12 groups for one step .*'never'"):
        run.run()


@pytest.mark.check
def test_sampling_more_has_an_end(toml: Path, tmp_path: Path) -> None:
    """Where rewards stay equal, `until_unequal` samples its further responses and then gives the group up."""
    options = ["--loop.callback=until_unequal", "--loop.callback_options={more=3,most=2}"]
    options += [f"--reward.verifier={toml.parent}/judges.py:same", "--loop.max_dropped_batches=1"]
    run = Run(toml, tmp_path, *options)
    leaves: list[int] = []
    drop = run.loop.buffer.drop
    run.loop.buffer.drop = lambda group, reason: (leaves.append(group.tree.num_leaves), drop(group, reason))  # type: ignore[method-assign,assignment]
    with pytest.raises(RunError, match="dropped more than 6 groups"):
        run.run()
    assert set(leaves) == {4 + 2 * 3}


# -- numbers that follow the step or a metric --------------------------------------------------------------------------


@pytest.mark.check
def test_temperature_and_length_follow_their_schedules(toml: Path, tmp_path: Path) -> None:
    """Log-probs of sampler and trainer are of the same temperature in each step."""
    options = ["--loop.temperature_scale=[[1,0.5],[3,1.5]]", "--loop.length_scale=[[1,0.3],[3,1.0]]"]
    run = Run(toml, tmp_path, *options, "--trainer.steps=3").run()
    assert [row["schedule/temperature_scale"] for row in run.rows] == [0.5, 1.0, 1.5]
    assert [row["response_length/max"] for row in run.rows] == [3, 6, 10]
    assert all(row["training/rollout_probs_diff_mean"] < 1e-5 for row in run.rows)
    with pytest.raises(UserError, match=r"loop.length_scale must be above 0 and at most 1; at step 1 it is 2"):
        Run(toml, tmp_path, "--loop.length_scale=2", "--name=other").run()


@pytest.mark.check
def test_a_number_is_steered_towards_a_metric(toml: Path, tmp_path: Path) -> None:
    """Ziegler et al.: the entropy of a random model is far above the target, so the temperature falls by 1 - gain/5."""
    given = "metric='actor/entropy',target=1.0,own='schedule/temperature_scale',gain=-0.5,low=0.75"
    options = ["--loop.temperature_scale=steer", f"--loop.temperature_scale_options={{{given}}}"]
    run = Run(toml, tmp_path, *options, "--trainer.steps=5", "--algorithm.drop_zero_variance=false").run()
    assert [row["schedule/temperature_scale"] for row in run.rows] == pytest.approx([1.0, 0.9, 0.81, 0.75, 0.75])


# -- learning ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_it_learns(toml: Path, tmp_path: Path, staleness: int) -> None:
    """The share of digits in random letters, a task that a random model can be taught in seconds."""
    options = [f"--loop.staleness={staleness}", f"--reward.verifier={toml.parent}/judges.py:likes", "--rollout.n=8"]
    options += ["--loop.overlap=true"]
    run = Run(toml, tmp_path, *options, "--trainer.steps=14", "--trainer.lr=2e-2", "--checkpoint.every=100").run()
    rewards = [row["reward/mean"] for row in run.rows]
    assert np.mean(rewards[-3:]) > 5 * np.mean(rewards[:2]), rewards
