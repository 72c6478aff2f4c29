"""Runs that distil whole distributions: what they record, that they learn, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolltree.engine import Orchestrator, UserError, load_config
from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.console import Console
from rolltree.engine.batches.batch import TreeBatch
from rolltree.engine.batches.cost import CostModel, Work
from rolltree.engine.learn.learner import Learner
from rolltree.engine.model.losses.distillation import see

from ...support.tiny import tiny_job

toml = tiny_job()


@pytest.fixture(scope="module")
def teacher(toml: Path) -> Path:
    """A random model of twice the width with the policy's tokenizer."""
    folder = toml.parent / "teacher"
    torch.manual_seed(5)
    config = AutoModelForCausalLM.from_pretrained(toml.parent / "model").config
    config.hidden_size, config.intermediate_size, config.initializer_range = 2 * config.hidden_size, 64, 0.3
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(toml.parent / "model").save_pretrained(folder)
    return folder


def run(toml: Path, tmp_path: Path, *overrides: str) -> tuple[list[dict[str, Any]], Orchestrator]:
    fixed = ["--trainer.steps=2", "--evaluation.problems=0", "--evaluation.every=0", "--rollout.program=flat"]
    options = [*fixed, "--rollout.program_options={}", "--trainer.lr=1e-2", f"--output_dir={tmp_path}/runs"]
    config = load_config(toml, [*options, *overrides])
    orchestrator = build(config, console=Console())
    orchestrator.run()
    rows = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    return rows[1:], orchestrator


@pytest.mark.parametrize("recipe", [pytest.param("gkd", marks=pytest.mark.check), "opd_full"])
def test_a_recipe_learns_the_teacher(toml: Path, teacher: Path, recipe: str, tmp_path: Path) -> None:
    """A teacher of another width; the rewards count nothing, and no column of its log-probs is scored."""
    options = f"--recipe={recipe}", f"--roles.teacher.path={teacher}", "--trainer.steps=14", "--trainer.lr=1e-2"
    rows, done = run(toml, tmp_path, *options)
    divergence = [row["distill/divergence"] for row in rows]
    assert sum(divergence[-3:]) / 3 < 0.9 * divergence[0], divergence
    assert rows[0]["distill/teacher_entropy"] > 0
    assert all(row["actor/skipped_updates"] == 0 for row in rows)
    assert all("actor/pg_loss" not in row for row in rows)
    assert isinstance(done.learner, Learner)
    (role,) = done.learner.roles
    assert role.columns == ()


def test_the_account_has_the_teachers_part(
    toml: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows that the teacher computes, its head for those that are compared, and the policy's with its backward."""
    shown: list[TreeBatch] = []

    def kept(role: Any, batch: TreeBatch, *rest: Any) -> Any:
        shown.append(batch)
        return see(role, batch, *rest)

    monkeypatch.setattr("rolltree.engine.train.distillation.see", kept)
    options = "--recipe=opd_full", f"--roles.teacher.path={teacher}", "--trainer.max_tokens=80"
    (row, *_), done = run(toml, tmp_path, *options, "--trainer.steps=1")
    assert isinstance(done.learner, Learner)
    (role,), width = done.learner.roles, done.learner.model.config.hidden_size
    heads = (6 * width + 2 * 2 * width) * done.learner.model.config.vocab_size
    decoders = CostModel.of(role.model).forward(replace(Work.of(shown), heads=0))
    compared = sum(len(batch.head_row) for batch in shown)
    assert len(shown) > 1
    assert 1e12 * row["perf/divergence_tflop"] == pytest.approx(decoders + heads * compared)
    assert row["perf/flop_trained"] > 1e12 * row["perf/divergence_tflop"]


def test_beside_a_policy_gradient_a_copy_teaches_nothing_at_first(toml: Path, tmp_path: Path) -> None:
    term = '--algorithm.terms=[{name="near",divergence="forward_kl",weight=0.5}]'
    rows, _ = run(toml, tmp_path, term, f"--roles.teacher.path={toml.parent}/model")
    assert abs(rows[0]["near/divergence"]) < 1e-6
    assert rows[1]["near/divergence"] > 1e-5
    assert rows[0]["near/entropy"] == pytest.approx(rows[0]["near/teacher_entropy"], rel=1e-5)
    assert "actor/pg_loss" in rows[0]


@pytest.mark.slow
def test_the_policy_teaches_itself_with_the_solution(toml: Path, tmp_path: Path) -> None:
    """The teacher reads more than the policy, so it differs at first; its mean follows the policy."""
    context = '--roles.teacher.context="{prompt} {answer}"'
    rows, done = run(toml, tmp_path, "--recipe=self_distill", context, "--roles.teacher.ema=0.9")
    assert rows[0]["distill/divergence"] > 1e-4
    assert isinstance(done.learner, Learner)
    (role,) = done.learner.roles
    assert role.weights is not None
    assert role.seen == 2
    without = "--roles.teacher={ema=0.9}"
    same, _ = run(toml, tmp_path / "without", "--recipe=opd_full", without)
    assert abs(same[0]["distill/divergence"]) < 1e-6


@pytest.mark.parametrize(
    ("term", "sentence"),
    [
        ('{name="d",divergence="forward_kl"}', r"needs teacher_logprob .*give the run a \[roles.teacher\]"),
        ('{name="d",divergence="kl"}', "kind must be one of forward_kl"),
        ('{name="d",divergence="jsd",divergence_options={beta=2}}', "beta must be in 0..1, got 2"),
        ('{name="d",divergence="jsd",divergence_options={gamma=2}}', "gamma"),
        ('{name="d",divergence="jsd",objective="sft"}', "needs one of `objective`, `pairs`, `loss` and `divergence`"),
    ],
)
def test_mistakes_are_named(toml: Path, term: str, sentence: str, tmp_path: Path) -> None:
    roles = [] if "[roles" in sentence.replace("\\", "") else [f"--roles.teacher.path={toml.parent}/model"]
    with pytest.raises(UserError, match=sentence):
        run(toml, tmp_path, f"--algorithm.terms=[{term}]", *roles)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ['--roles.teacher={context="{prompt} {hint}"}'],
            r"names \{hint\}, a column that the problem .* does not",
        ),
        (
            ['--roles.teacher={context="{prompt}"}', "--algorithm.terms=[]"],
            "is read by loss terms with `divergence`",
        ),
        (['--roles.teacher={context="{prompt}"}', "--algorithm.objective=opd"], "does not score; choose a loss term"),
        (["--roles.teacher={ema=0.9,reset_every=2}"], "`roles.teacher.reset_every` or `roles.teacher.ema`, not both"),
        (["--roles.teacher={path='model',ema=0.9}"], "leave the path or these out"),
        (
            ['--roles.teacher={context="{prompt}"}', "--algorithm.advantage=log_ratio"],
            "does not go with `algo",
        ),
    ],
)
def test_what_does_not_go_with_a_teacher_of_more(toml: Path, options: list[str], sentence: str, tmp_path: Path) -> None:
    term = '--algorithm.terms=[{name="d",divergence="forward_kl"}]'
    with pytest.raises(UserError, match=sentence):
        run(toml, tmp_path, term, *options)
