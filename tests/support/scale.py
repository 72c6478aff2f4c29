"""Runs with engines elsewhere, compared with the run of one process: for threads and for processes of Ray."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import torch
from rich.console import Console as RichConsole

from rolltree.engine import Orchestrator, load_config
from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.console import Console
from rolltree.engine.prompts.group import Group
from rolltree.engine.settings import TrainConfig
from rolltree.engine.train.checkpoint import read_tensors


def train(
    toml: Path,
    arguments: list[str],
    watch: Callable[[Orchestrator], object] = lambda run: None,
    *,
    resume: bool = False,
) -> tuple[TrainConfig, Orchestrator]:
    """Train to the end; ``watch`` is called before."""
    config = load_config(toml, arguments)
    console = Console(RichConsole(file=io.StringIO(), width=300))
    run = build(config, console=console, resume=resume)
    watch(run)
    run.run()
    return config, run


def ages(run: Orchestrator) -> list[tuple[int, int]]:
    """A list that gets, for every group that is trained, the version of the weights when the group was admitted, and
    the oldest version of its tokens."""
    found: list[tuple[int, int]] = []
    versions = {0: 0}  # of the weights after so many steps
    next_batch = run.controller.next_batch

    def batch(*given: object) -> list[Group]:
        versions[run.step] = run.learner.updates
        groups = next_batch(*given)
        for group in groups:
            tree = group.tree
            found.append((versions[group.started], int(tree.policy_version[tree.loss_mask].min())))
        return groups

    run.controller.next_batch = batch  # type: ignore[method-assign,assignment]
    return found


def assert_close(ours: Path, theirs: Path, within: float) -> None:
    """The same tokens, and weights within a bound."""
    files = sorted((theirs / "rollouts").glob("*.parquet"))
    assert files
    for file in files:
        columns = ["group", "step", "response_ids"]
        one, other = (pq.read_table(at / "rollouts" / file.name, columns=columns) for at in (ours, theirs))
        assert one.equals(other), file.name
    last = max((theirs / "checkpoints").glob("step_*")).name
    got, expected = (read_tensors(at / "checkpoints" / last / "learner") for at in (ours, theirs))
    weights = [name for name in expected if name.startswith("weight.")]
    assert weights
    for name in weights:
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=within)


class Saboteur(threading.Thread):
    """Calls ``strike`` at some of a run's steps, while its engines are sampling."""

    def __init__(self, run: Orchestrator, strikes: list[tuple[int, Callable[[], object]]]) -> None:
        super().__init__(daemon=True)
        self.run_, self.strikes, self.done = run, strikes, 0

    def run(self) -> None:
        for step, strike in self.strikes:
            while self.run_.step < step:
                threading.Event().wait(0.005)
            strike()
            self.done += 1
