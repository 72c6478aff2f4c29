"""Methods that need more than a policy, each as a run of two steps: what they record, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rolltree.engine import Orchestrator, UserError, load_config
from rolltree.engine.app.assembly.methods import Methods
from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.assembly.sampling import rollout_program
from rolltree.engine.app.console import Console
from rolltree.engine.learn import micro_batches

from ...support.tiny import GIVEN, ROOT, beside, tiny_job

MINE = """
import numpy as np
from rolltree.engine.programs import RolloutProgram

class Twice(RolloutProgram):
    def __init__(self, extra: int = 0):
        self.extra = extra
    def start(self, group):
        return group.width + self.extra
    def decide(self, group, finished):
        return ()

def centred(trees, *, scale=1.0):
    return [scale * (t.rewards["reward"] - t.rewards["reward"].mean()) for t in trees]

def first(tree):
    return np.arange(tree.num_leaves) == 0
"""


toml = tiny_job({"mine.py": MINE, "given.jsonl": GIVEN})


def run(toml: Path, tmp_path: Path, *overrides: str) -> tuple[list[dict[str, float]], Orchestrator]:
    fixed = ["--trainer.steps=2", "--evaluation.problems=0", "--evaluation.every=0", "--rollout.program=flat"]
    options = [*fixed, "--rollout.program_options={}", "--algorithm.advantage=group_norm", "--checkpoint.every=1"]
    config = load_config(toml, [*options, f"--output_dir={tmp_path}/runs", *overrides])
    orchestrator = build(config, console=Console())
    orchestrator.run()
    rows = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    return rows[1:], orchestrator


def rollouts(orchestrator: Orchestrator, step: int = 1) -> list[dict]:
    return pq.read_table(orchestrator.options.directory / "rollouts" / f"step_{step:06d}.parquet").to_pylist()


@pytest.mark.check
def test_ppo_with_a_critic(toml, tmp_path):
    rows, done = run(
        toml, tmp_path, "--algorithm.advantage=gae", "--algorithm.objective=ppo", "--roles.critic={lr=1e-3}"
    )
    assert all(row["critic/vf_loss"] > 0 and row["critic/grad_norm"] > 0 for row in rows)
    first, second = rollouts(done, 1), rollouts(done, 2)
    assert all(v == 0 for r in first for v in r["value"])  # its head begins at zero
    assert any(v != 0 for r in second for v in r["value"])
    for r in first:  # gamma = lam = 1 and no values: what is expected is the reward itself
        assert r["value_target"] == pytest.approx([r["reward"]] * len(r["value_target"]))


def test_a_kl_to_a_frozen_reference(toml, tmp_path):
    rows, done = run(
        toml, tmp_path, "--algorithm.objective_options={kl_coef=0.1}", "--roles.reference={}", "--trainer.lr=1e-2"
    )
    assert rows[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-6)  # the policy is its own reference at first
    assert rows[1]["actor/kl_loss"] > 1e-5
    assert all(math.isfinite(v) for r in rollouts(done) for v in r["ref_logprob"])


def test_distillation_from_a_teacher(toml, tmp_path):
    teacher = tmp_path / "teacher"
    shutil.copytree(toml.parent / "model", teacher)
    rows, done = run(toml, tmp_path, "--algorithm.objective=opd", f"--roles.teacher.path={teacher}")
    for r in rollouts(done):  # the policy's own copy: it has nothing to teach in the first step
        assert r["teacher_logprob"] == pytest.approx(r["behaviour_logprob"], abs=1e-4)
    assert rows[0]["actor/grad_norm"] < 1e-3


def test_dpo_on_the_leaves_of_trees(toml, tmp_path):
    term = '--algorithm.terms=[{name="dpo",pairs="every_unequal",weight=0.5}]'
    rows, _ = run(toml, tmp_path, term, "--roles.reference={}", "--algorithm.weight=0", "--trainer.lr=1e-2")
    assert rows[0]["dpo/margins"] == pytest.approx(0, abs=1e-5)
    assert rows[1]["dpo/margins"] != 0


def test_demonstrations_fade_into_reinforcement(toml, tmp_path):
    given = f"--demonstrations={{path='{toml.parent}/given.jsonl',per_step=4}}"
    teach = '--algorithm.terms=[{name="teach",objective="sft",select="injected",weight=[[1,1.0],[2,0.0]]}]'
    rows, _ = run(toml, tmp_path, given, teach, "--algorithm.weight=[[1,0.0],[2,1.0]]")
    assert "teach/pg_loss" in rows[0]
    assert "actor/pg_loss" not in rows[0]
    assert "teach/pg_loss" not in rows[1]
    assert "actor/pg_loss" in rows[1]


def test_ratios_against_the_policy_before_the_update(toml, tmp_path):
    options = [
        "--trainer.updates_per_step=2",
        "--algorithm.old_logprob=recompute",
        "--algorithm.objective=decoupled_ppo",
    ]
    rows, done = run(toml, tmp_path, *options, "--algorithm.drop_zero_variance=false")
    for r in rollouts(done):
        assert r["proximal_logprob"] == pytest.approx(r["behaviour_logprob"], abs=1e-4)
    assert rows[0]["actor/ppo_kl"] != 0


def test_nft_knows_the_pass_rate(toml, tmp_path):
    rows, done = run(toml, tmp_path, "--algorithm.objective=nft", "--algorithm.advantage=nft")
    by_prompt: dict[str, list[dict]] = {}
    for r in rollouts(done):
        by_prompt.setdefault(r["prompt_id"], []).append(r)
    for group in by_prompt.values():
        rate = sum(r["reward"] for r in group) / len(group)
        assert all(v == pytest.approx(rate) for r in group for v in r["pass_rate"])
    assert all(row["actor/skipped_updates"] == 0 for row in rows)


def test_programs_judge_with_the_runs_own_verifier(toml, tmp_path):
    options = ["--rollout.program=mcts", "--rollout.program_options={segment_tokens=3,expansions=2,branch=2}"]
    _, done = run(toml, tmp_path, *options)
    judged = [r for r in rollouts(done) if r["status"] != "failed"]
    assert judged
    assert done.sampler.engine.stats["failed_calls"] == 0
    assert all(r["reward"] == float(len(r["response_text"]) % 3 == 0) for r in judged)


def test_parts_of_the_users_own_beside_the_configuration(toml, tmp_path):
    own = beside(
        toml, "own", rollout={"program": "mine.py:Twice", "program_options": {"extra": 2}},
        algorithm={"advantage": "mine.py:centred", "advantage_options": {"scale": 2.0}, "select": "mine.py:first"},
    )  # fmt: skip
    config = load_config(
        own, ["--trainer.steps=1", "--evaluation.problems=0", "--evaluation.every=0", f"--output_dir={tmp_path}"]
    )
    orchestrator = build(config, console=Console())
    orchestrator.run()
    groups: dict[str, list[dict]] = {}
    for row in rollouts(orchestrator):
        groups.setdefault(row["prompt_id"], []).append(row)
    for group in groups.values():
        assert len(group) == 6
        mean = sum(r["reward"] for r in group) / 6
        assert [r["advantage"] for r in group] == pytest.approx([2 * (r["reward"] - mean) for r in group])


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.stem)
def test_examples_name_parts_that_exist(example):
    config = load_config(example)
    assert Methods.make(config).terms
    assert rollout_program(config.rollout) is not None


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["--algorithm.objective=clip_tensor"], "needs clip_low"),
        (["--algorithm.objective=opd"], r"\[roles.teacher\]"),
        (["--roles.critic={}"], r"'group_norm' sets no column value_target"),
        (['--algorithm.terms=[{name="x",objective="sft",select="bset"}]'], "did you mean 'best'"),
        (["--rollout.program=mine.py:centred"], "There is no file"),
        (["--algorithm.advantage_options={scal=1}"], "has no option 'scal'"),
    ],
)
def test_what_is_missing_is_named_before_the_run(toml, tmp_path, overrides, said):
    with pytest.raises(UserError, match=said):
        run(toml, tmp_path, *overrides)
    assert not (tmp_path / "runs").exists()


@pytest.mark.check(but=1)
@pytest.mark.parametrize("segments", [False, True])
def test_what_responses_sampled_alike_is_computed_once(toml, tmp_path, monkeypatch, segments):
    """Unless a ratio is of segments, which are the nodes that the program made."""
    seen: list[tuple[int, int]] = []
    share, packed = micro_batches.share_equal_prefixes, micro_batches.pack

    def pack(trees, **options):
        alone = [share(tree).num_tokens for tree in trees]
        seen.extend(zip((tree.num_tokens for tree in trees), alone, strict=True))
        return packed(trees, **options)

    monkeypatch.setattr(micro_batches, "pack", pack)
    level = '{ratio_level="segment"}' if segments else "{}"
    alike = ["--rollout.temperature=0.001", "--algorithm.drop_zero_variance=false"]
    run(toml, tmp_path, *alike, "--algorithm.objective=ppo", f"--algorithm.objective_options={level}")
    assert seen
    assert all(of == least for of, least in seen) != segments
