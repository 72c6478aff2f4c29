"""Faults in the middle of a run: what happens, what is lost, and that the run ends as one that had none."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console as RichConsole

from rolltree.engine import Orchestrator, load_config
from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.console import Console
from rolltree.engine.errors import RunError
from rolltree.engine.learn.learner import Learner
from rolltree.engine.loop.controller import Controller
from rolltree.engine.train import checkpoint
from rolltree.engine.train.gradients import Gradients

SHORT = ["--evaluation.problems=0", "--evaluation.every=0", "--checkpoint.every=1", "--trainer.steps=3"]


def orchestrate(toml: Path, directory: Path, *, resume: bool = False) -> Orchestrator:
    directory.mkdir(exist_ok=True)
    config = load_config(toml, [*SHORT, f"--output_dir={directory}"])
    return build(config, console=Console(RichConsole(file=(directory / "out").open("a"))), resume=resume)


def untimed(run: Orchestrator, without: tuple[str, ...] = ()) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run.options.directory / "metrics.jsonl").read_text().splitlines()]
    left_out = ("timing_s/", "perf/", *without)
    return [{k: v for k, v in row.items() if not k.startswith(left_out)} for row in rows]


@pytest.fixture(scope="module")
def whole(toml: Path, tmp_path_factory: pytest.TempPathFactory) -> Orchestrator:
    run = orchestrate(toml, tmp_path_factory.mktemp("whole"))
    run.run()
    assert any("actor/grad_norm" in row for row in untimed(run)), "no update happened; the tests show nothing"
    return run


def assert_same(run: Orchestrator, whole: Orchestrator, without: tuple[str, ...] = ()) -> None:
    assert untimed(run, without) == untimed(whole, without)
    assert all(
        torch.equal(a, b) for a, b in zip(run.learner.model.parameters(), whole.learner.model.parameters(), strict=True)
    )


@pytest.mark.check
def test_a_disk_that_fills_up_ends_the_run_which_goes_on_later(toml, tmp_path, whole, monkeypatch) -> None:
    write = checkpoint.write_tensors

    def full(directory: Path, tensors: dict[str, torch.Tensor], *rest: Any) -> Any:
        files = write(directory, tensors, *rest)  # as far as it gets
        if "step_000002.tmp" in (directory.name, directory.parent.name):
            raise OSError(28, "No space left on device")
        return files

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_tensors", full)
        with pytest.raises(RunError, match=r"No space left.*step_000001' is intact: free disk space and use --resume"):
            orchestrate(toml, tmp_path / "a").run()
    run = orchestrate(toml, tmp_path / "a", resume=True)
    assert run.run().steps == 3
    assert_same(run, whole)


@pytest.mark.check(but=1)
def test_a_request_that_the_engine_forgets_is_made_again(toml, tmp_path, whole, monkeypatch) -> None:
    step, seen = Controller._step_sampler, itertools.count()

    def forgets(self: Controller) -> None:
        step(self)
        if next(seen) == 3:
            going = [self.sampler._flights[flight] for flight in self._sampling.values() if not flight.done]
            assert len(self.sampler.engine.abort(going[:2])) == 2

    monkeypatch.setattr(Controller, "_step_sampler", forgets)
    run = orchestrate(toml, tmp_path / "a")
    run.run()
    assert [row.get("group/restarted_lost") for row in untimed(run)] == [None, 2, None, None]
    assert_same(run, whole, without=("group/restarted_lost",))


def test_clocks_that_jump_change_nothing(toml, tmp_path, whole, monkeypatch) -> None:
    """Forward and back by a day at every look. Time limits look at a clock that cannot be set."""
    now, looks = time.time, itertools.count()
    monkeypatch.setattr(time, "time", lambda: now() + 86400 * (-1) ** next(looks))
    run = orchestrate(toml, tmp_path / "a")
    run.run()
    assert next(looks) > 0
    assert_same(run, whole)


@pytest.mark.check
def test_a_verifiers_process_that_is_killed_is_replaced(toml, tmp_path, monkeypatch) -> None:
    update, killed = Learner.update, []

    def kills(self, trees, given, step, sums):
        if step == 1:
            for worker in run.rewards._workers:
                os.kill(worker.process.pid, signal.SIGKILL)
                killed.append(worker.process.pid)
        return update(self, trees, given, step, sums)

    monkeypatch.setattr(Learner, "update", kills)
    run = orchestrate(toml, tmp_path / "a")
    assert run.run().steps == 3
    rows = untimed(run)
    assert killed
    lost = sum(row.get("reward/failed_died", 0) for row in rows)
    assert lost == sum(row.get("reward/failed", 0) for row in rows)
    assert lost <= 1  # what it was judging, which nobody was then
    assert all("reward/mean" in row for row in rows[1:])


@pytest.mark.check(but=1)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_update_whose_gradient_is_not_finite_is_skipped(toml, tmp_path, monkeypatch, bad: float) -> None:
    end, done = Gradients.end_micro_batch, []

    def spoils(self: Gradients) -> None:
        end(self)
        if not done:
            done.append(True)
            next(m for m in self._masters if m.grad is not None).grad.view(-1)[0] = bad

    run = orchestrate(toml, tmp_path / "a")
    before = [p.detach().clone() for p in run.learner.model.parameters()]
    seen: list[bool] = []
    end_step = Controller.end_step

    def looks(self, batch, weights, version, others):
        seen.append(all(torch.equal(a, b) for a, b in zip(before, run.learner.model.parameters(), strict=True)))
        end_step(self, batch, weights, version, others)

    monkeypatch.setattr(Gradients, "end_micro_batch", spoils)
    monkeypatch.setattr(Controller, "end_step", looks)
    run.run()
    skipped = [row.get("actor/skipped_updates") for row in untimed(run) if "actor/skipped_updates" in row]
    assert skipped == [1, *[0] * (len(skipped) - 1)]
    assert seen[0]  # the weights are as they were
    assert not seen[-1]
    assert all(torch.isfinite(p).all() for p in run.learner.model.parameters())
