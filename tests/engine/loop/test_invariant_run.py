"""Runs with `model.batch_invariant`: the first ratio of a step is 1, and old log-probs are not computed twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rolltree.engine import load_config
from rolltree.engine.app.dry_run import plan_lines
from rolltree.engine.learn import micro_batches
from rolltree.engine.model.roles import Role
from rolltree.engine.train.trainer import Metrics, Trainer

from ...kernels.on_device import needs_known_order
from ...support.real_step import Steps, take_steps

pytestmark = needs_known_order

EXACT = "--model.batch_invariant=true"
FLAGS = ("--trainer.steps=2", "--trainer.updates_per_step=2", "--trainer.lr=0.01", "--trainer.max_tokens=80")
PROGRAM = ("--rollout.program=treepo", "--rollout.program_options={segment_tokens=3,init=2}")
UNSET = ("trainer.steps", "rollout.program", "rollout.program_options")


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[Metrics]:
    """The metrics of every update."""
    found: list[Metrics] = []
    step = Trainer.optim_step

    def kept(self: Trainer) -> Metrics:
        found.append(step(self))
        return found[-1]

    monkeypatch.setattr(Trainer, "optim_step", kept)
    return found


def run(toml: Path, directory: Path, *flags: str, resume: bool = False) -> Steps:
    return take_steps(toml, directory, *PROGRAM, *FLAGS, *flags, unset=UNSET, resume=resume)


def weights(steps: Steps) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in steps.orchestrator.learner.model.named_parameters()}


@pytest.mark.slow(but=1)
@pytest.mark.check
@pytest.mark.parametrize(
    "flags",
    [
        ("--model.dtype=float32",),
        ("--model.dtype=bfloat16",),
        ("--model.lora={rank=4, alpha=8.0}",),
        ("--model.gradient_checkpointing=true",),
    ],
    ids=lambda flags: flags[0].partition("=")[2],
)
def test_the_first_ratio_of_a_step_is_one(
    flags: tuple[str, ...], toml: Path, tmp_path: Path, updates: list[Metrics]
) -> None:
    weighted = "--algorithm.objective_options={mismatch='truncate'}"  # by exp(log-prob - the sampler's)
    steps = run(toml, tmp_path, EXACT, weighted, *flags)
    assert [metrics["actor/ppo_kl"][1] > 0 for metrics in updates] == [True] * 4
    for first, second in (updates[:2], updates[2:]):
        assert first["actor/ppo_kl"][0] == first["actor/pg_clipfrac"][0] == 0
        assert second["actor/ppo_kl"][0] != 0
        assert first["training/rollout_probs_diff_mean"][0] == first["training/mismatch_k3_kl"][0] == 0
        ratios, tokens = first["training/rollout_is_mean"]
        assert ratios == tokens > 0
    assert len(steps.rows) == 2


@pytest.mark.parametrize("exact", [False, True])
def test_responses_computed_one_by_one(
    exact: bool, toml: Path, tmp_path: Path, updates: list[Metrics], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates without shared prefixes compute padded batches, whose attention has another order of sums: without the
    mode the first ratio is not 1."""
    monkeypatch.setattr(micro_batches, "trees_fit", lambda *_: False)
    steps = run(toml, tmp_path, f"--model.batch_invariant={str(exact).lower()}", "--trainer.steps=1")
    assert [note for note in steps.notes if "updates share no prefixes" in note]
    assert (updates[0]["training/rollout_probs_diff_mean"][0] == 0) == exact


@pytest.mark.slow
def test_old_log_probs_are_the_samplers(toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[str] = []
    score = Role.score

    def watched(self: Role, *given: object, **options: object) -> object:
        scored.append(self.column)
        return score(self, *given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Role, "score", watched)
    asked = "--algorithm.old_logprob=recompute"
    saved = run(toml, tmp_path / "saved", EXACT, asked)
    assert scored == []
    assert [note for note in saved.notes if "the pass is saved" in note]
    recorded = run(toml, tmp_path / "recorded", EXACT)
    monkeypatch.setattr("rolltree.engine.app.assembly.learning.samples_alike", lambda config: False)
    computed = run(toml, tmp_path / "computed", EXACT, asked)
    assert scored == ["proximal_logprob"] * 2
    assert not [note for note in computed.notes if "the pass is saved" in note]
    for other in (recorded, computed):
        theirs = weights(other)
        assert all(torch.equal(p, theirs[name]) for name, p in weights(saved).items())


@pytest.mark.parametrize(
    "flags", [("--rollout.top_p=0.9",), ("--loop.staleness=1",), ("--model.batch_invariant=false",)]
)
def test_where_the_samplers_are_others_the_pass_is_not_saved(flags: tuple[str, ...], toml: Path) -> None:
    asked = ("--algorithm.old_logprob=recompute", "--trainer.updates_per_step=1")
    assert any("the pass is saved" in line for line in plan_lines(load_config(toml, [EXACT, *asked])))
    assert not any("the pass is saved" in line for line in plan_lines(load_config(toml, [EXACT, *asked, *flags])))
