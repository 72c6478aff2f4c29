"""Runs whose rollouts stay where they were sampled: the run's process reads no token, and what is gone is made anew.

Engines, ranks and reward hosts are threads, so what one stores another reads without a copy.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rolltree.engine import TokenTree
from rolltree.engine.app.assembly import workers as build_workers
from rolltree.engine.data.stored import Sampled, StoredTexts, StoredTree
from rolltree.engine.fleet.hosted import HostedRewards, RewardHost
from rolltree.engine.fleet.workers import GoneError
from rolltree.engine.loop.judging import Judging
from rolltree.engine.loop.orchestrator import Orchestrator
from rolltree.engine.prompts.group import Group, State
from rolltree.engine.prompts.prompts import Prompt
from rolltree.engine.rewards import RewardResult, Rewards

from ...support.resumed import assert_same_run
from ...support.scale import assert_close, train
from ..loop.test_durability import audit, rows
from .test_ranks_run import OVERLAP, SHORT, TWO, Started, alone, one_at_a_time, threads

__all__ = ["alone", "one_at_a_time", "threads"]
READS = """
def asks(tree):
    assert len(tree.token_id) == tree.num_tokens
"""


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Reward hosts in threads, whose processes end with the test."""
    made: list[RewardHost] = []

    class Kept(RewardHost):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(build_workers, "HostedRewards", partial(HostedRewards, make=Kept))
    yield made
    for host in made:
        host.rewards.close()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The list of what the run's thread has read of stored rollouts."""
    seen: list[str] = []
    fetch, text = StoredTree.fetch, StoredTexts.__getitem__

    def fetches(self: StoredTree) -> None:
        if threading.current_thread() is threading.main_thread():
            seen.append("tree")
        fetch(self)

    def reads_text(self: StoredTexts, at: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            seen.append("text")
        return text(self, at)

    monkeypatch.setattr(StoredTree, "fetch", fetches)
    monkeypatch.setattr(StoredTexts, "__getitem__", reads_text)
    return seen


@pytest.mark.check
def test_the_run_reads_no_token_and_no_text(
    toml: Path, alone: Path, threads: Started, hosts: Any, reads: list[str], tmp_path: Path
) -> None:
    given: list[type] = []

    def watch(run: Orchestrator) -> None:
        update = run.learner.update

        def noting(trees: Any, *rest: Any) -> bool:
            given.extend(map(type, trees))
            return update(trees, *rest)

        run.learner.update = noting  # type: ignore[method-assign]

    config, _ = train(toml, [f"--output_dir={tmp_path}", *SHORT, *TWO, "--reward.hosts=1"], watch)
    assert_same_run(config.run_dir, alone)
    assert set(given) == {StoredTree}
    assert reads == []


@pytest.mark.check
def test_a_callback_that_reads_tokens_gets_them(
    toml: Path, alone: Path, threads: Started, reads: list[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(READS)
    callback = f"--loop.callback={tmp_path}/mine.py:asks"
    config, _ = train(toml, [f"--output_dir={tmp_path}", *SHORT, *TWO, callback])
    assert reads.count("tree") == 4 * config.trainer.prompts_per_step
    assert_close(config.run_dir, alone, 0)
    audit(config)


@pytest.mark.check
def test_each_rank_writes_its_part_of_a_step(toml: Path, alone: Path, threads: Started, tmp_path: Path) -> None:
    """A step that is trained again by one process has a file, and no part of the ranks' is left."""
    config, _ = train(toml, [f"--output_dir={tmp_path}", *SHORT, *TWO])
    for file in sorted((config.run_dir / "rollouts").iterdir()):
        assert file.is_dir()
        parts = [pq.read_table(part) for part in sorted(file.iterdir())]
        assert len(parts) == 2
        assert parts[0].schema == parts[1].schema
        assert pq.read_table(file).num_rows == sum(part.num_rows for part in parts)
    shutil.rmtree(max((config.run_dir / "checkpoints").glob("step_*")))
    train(toml, [f"--output_dir={tmp_path}", *SHORT], resume=True)
    kinds = [file.is_dir() for file in sorted((config.run_dir / "rollouts").iterdir())]
    assert kinds == [True, True, False, False]
    assert_same_run(config.run_dir, alone)


class Losing:
    """A stored value; those of rollouts that ``gone`` names by their number are no more."""

    def __init__(self, value: Any, number: int, gone: Callable[[int], bool]) -> None:
        self.value, self.number, self.gone = value, number, gone

    def get(self) -> Any:
        if self.gone(self.number):
            raise GoneError("its node has ended in the test")
        return self.value


def loses(monkeypatch: pytest.MonkeyPatch, workers: Started, gone: Callable[[int], bool]) -> None:
    """Number the stored rollouts of the run from 0, and let some be no more."""
    put, stored = workers.put, list[int]()

    def putting(value: Any) -> Any:
        if not isinstance(value, Sampled):
            return put(value)
        stored.append(len(stored))
        return Losing(value, stored[-1], gone)

    monkeypatch.setattr(workers, "put", putting)


def lost(directory: Path) -> list[float]:
    return [row.get("group/restarted_lost", 0) for row in rows(directory)[1:]]


@pytest.mark.check
@pytest.mark.parametrize("host", [False, True])
def test_groups_whose_rollouts_are_gone_are_sampled_anew_with_the_same_tokens(
    toml: Path, alone: Path, threads: Started, hosts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: bool
) -> None:
    """Before an update, where the ranks fetch them; with a reward host where it fetches their texts."""
    loses(monkeypatch, threads, lambda number: number in (2, 9))
    config, run = train(toml, [f"--output_dir={tmp_path}", *SHORT, *TWO, *["--reward.hosts=1"] * host])
    assert sum(lost(config.run_dir)) == 2
    assert_close(config.run_dir, alone, 0)
    audit(config)
    assert "lost" in str(run.buffer.summary())


@pytest.mark.check
def test_rollouts_that_are_gone_while_groups_are_open(
    toml: Path, threads: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups stay open over steps and checkpoints, and a callback reads their tokens."""
    (tmp_path / "mine.py").write_text(READS)
    loses(monkeypatch, threads, lambda number: number % 5 == 3)
    callback = f"--loop.callback={tmp_path}/mine.py:asks"
    options = [*OVERLAP, "--checkpoint.every=1", "--rollout.max_new_tokens=40", callback]
    config, run = train(toml, [f"--output_dir={tmp_path}", *SHORT, *TWO, *options])
    assert sum(lost(config.run_dir)) >= 2
    assert len(audit(config)) == 4 * config.trainer.prompts_per_step
    assert run.buffer.summary() is not None  # every token is accounted for


@pytest.mark.check
def test_a_checkpoint_keeps_open_groups_whole_and_begins_anew_those_that_are_gone(
    toml: Path, threads: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the checkpoint reads them before they are taken."""
    whole: list[TokenTree] = []
    inner = StoredTree.whole

    def noting(self: StoredTree) -> TokenTree:
        tree = inner(self)
        if threading.current_thread() is threading.main_thread():
            whole.append(tree)
        return tree

    monkeypatch.setattr(StoredTree, "whole", noting)
    loses(monkeypatch, threads, lambda number: number == 6)
    options = [*OVERLAP, "--checkpoint.every=1", "--rollout.max_new_tokens=40"]
    config, _ = train(toml, [f"--output_dir={tmp_path}", *SHORT, *TWO, *options])
    assert sum(lost(config.run_dir)) == 1
    assert len(audit(config)) == 4 * config.trainer.prompts_per_step
    resumed, _ = train(toml, [f"--output_dir={tmp_path}", *SHORT, *TWO, *options, "--trainer.steps=5"], resume=True)
    assert len(audit(resumed)) == 5 * config.trainer.prompts_per_step


def test_a_request_of_a_group_that_has_begun_anew_counts_for_nothing() -> None:
    """Its host fails to fetch the texts, or answers, when the group has other responses."""
    gone = Losing(Sampled(None, ["a"]), 0, lambda number: True)  # type: ignore[arg-type]
    for stored in (True, False):
        verdict: Future[list[RewardResult]] = Future()

        class Hosts(Rewards):
            fetches = True

            def score(self, items: Any, verdict: Future[list[RewardResult]] = verdict) -> list[RewardResult]:
                return verdict.result(10)

        tree = TokenTree.from_sequences([1], [[2]])
        group = Group(0, Prompt("p", "task", "text", [1], {}, "p"), 0, State.JUDGING)
        judging = Judging(None, lambda: None, on_failure="drop")  # type: ignore[arg-type]
        with judging.running(Hosts()):
            judging.add([(group, tree, StoredTexts(gone, 1))])
            judging.forget(group)
            group.parts = []
            if stored:
                verdict.set_exception(GoneError("its node has ended"))
            else:
                verdict.set_result([RewardResult(1.0, None)])
            judging.wait(10)
            assert (judging.take(), judging.take_gone()) == ([], [])
