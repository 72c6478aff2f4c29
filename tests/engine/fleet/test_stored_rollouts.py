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

import numpy as np
import pyarrow.parquet as pq
import pytest

from rolltree.engine import TokenTree
from rolltree.engine.app.assembly import workers as build_workers
from rolltree.engine.data.stored import Here, Sampled, StoredTexts, StoredTree, TreeOf, enter
from rolltree.engine.fleet import rank as rank_module
from rolltree.engine.fleet.hosted import HostedRewards, RewardHost
from rolltree.engine.fleet.workers import GoneError
from rolltree.engine.loop.controller import Controller
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
def test_the_runs_own_verifiers_judge_texts_that_were_told(
    toml: Path, alone: Path, threads: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's thread fetches nothing of what is stored; the first to do so are the ranks that gather a batch."""
    readers: list[str] = []
    put = threads.put

    class Noting(Here):
        def get(self) -> Any:
            readers.append(threading.current_thread().name)
            return self.value

    monkeypatch.setattr(threads, "put", lambda value: Noting(value) if isinstance(value, Sampled) else put(value))
    config, _ = train(toml, [f"--output_dir={tmp_path}", *SHORT, *TWO])
    assert readers
    assert threading.main_thread().name not in readers
    assert_same_run(config.run_dir, alone)


@pytest.mark.slow
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
    """A stored value; those of rollouts that ``gone`` names by their number are no more, from read ``after`` on."""

    def __init__(self, value: Any, number: int, gone: Callable[[int], bool], after: int = 0) -> None:
        self.value, self.number, self.gone, self.after = value, number, gone, after

    def get(self) -> Any:
        if self.after:
            self.after -= 1
        elif self.gone(self.number):
            raise GoneError("its node has ended in the test")
        return self.value


def loses(monkeypatch: pytest.MonkeyPatch, workers: Started, gone: Callable[[int], bool], after: int = 0) -> None:
    """Number the stored rollouts of the run from 0, and let some be no more, from read ``after`` on."""
    put, stored = workers.put, list[int]()

    def putting(value: Any) -> Any:
        if not isinstance(value, Sampled):
            return put(value)
        stored.append(len(stored))
        return Losing(value, stored[-1], gone, after)

    monkeypatch.setattr(workers, "put", putting)


def lost(directory: Path) -> list[float]:
    return [row.get("group/restarted_lost", 0) for row in rows(directory)[1:]]


@pytest.mark.check
@pytest.mark.parametrize(("host", "after"), [(False, 0), (True, 0), (True, 1)])
def test_groups_whose_rollouts_are_gone_are_sampled_anew_with_the_same_tokens(
    toml: Path, alone: Path, threads: Started, hosts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: bool,
    after: int,
) -> None:  # fmt: skip
    """They are gone for the ranks that gather a batch, without a reward host or after it has read the texts; or for the
    host."""
    loses(monkeypatch, threads, lambda number: number in (2, 9), after)
    config, run = train(toml, [f"--output_dir={tmp_path}", *SHORT, *TWO, *["--reward.hosts=1"] * host])
    assert sum(lost(config.run_dir)) == 2
    assert len(threads.ranks) == 2  # none was started anew
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
    """The first that is read for a checkpoint is gone."""
    saving, gone = [False], set[int]()
    inner = Controller.state_dict

    def saved(self: Controller) -> Any:
        saving[0] = True
        try:
            return inner(self)
        finally:
            saving[0] = False

    def is_gone(number: int) -> bool:
        if saving[0] and not gone and threading.current_thread() is threading.main_thread():
            gone.add(number)
        return number in gone

    monkeypatch.setattr(Controller, "state_dict", saved)
    loses(monkeypatch, threads, is_gone)
    options = [*OVERLAP, "--checkpoint.every=1", "--rollout.max_new_tokens=40"]
    config, _ = train(toml, [f"--output_dir={tmp_path}", *SHORT, *TWO, *options])
    assert gone
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


def test_ranks_tell_the_same_of_trees_that_they_have_fetched_or_not() -> None:
    """The hash that is compared, and what the first rank returns; the run's process gets it without a token."""
    tree = TokenTree.from_sequences([1, 2], [[3, 4], [5]], behaviour_logprobs=[[-1.0, -2.0], [-3.0]])
    source = Losing(Sampled(tree, None), 0, lambda number: False)
    received = StoredTree.of(tree)
    received.place(TreeOf(source))
    told = []
    for fetched in (False, True):
        ours = rank_module._copied(received)
        if fetched:
            assert len(ours.token_id) == 5
        ours.set("advantage", [1.0, -1.0])
        ours.rewards["shaped"] = np.array([0.5, 0.25], np.float32)
        enter(ours, "ref_logprob", np.arange(5, dtype=np.float32))
        assert (type(ours) is TokenTree) == fetched
        changes = rank_module._changes([ours], [received])
        written, left = rank_module._written(changes, [received])
        told.append((rank_module._hash(changes), written, left))
    (digest, (written,), left), (other, *_) = told
    assert digest == other
    assert set(written.columns) == {"advantage", "ref_logprob"}
    assert written.columns["ref_logprob"] is None
    received.write(written.columns, written.rewards, Here(left), 0)
    assert received.advantage.tolist() == [1, -1]
    assert type(received) is StoredTree
    assert received.ref_logprob.tolist() == [0, 1, 2, 3, 4]
    assert received.rewards["shaped"].tolist() == [0.5, 0.25]
    unequal = rank_module._copied(received)
    unequal.set("advantage", [1.0, -2.0])
    assert rank_module._hash(rank_module._changes([unequal], [tree])) != digest
