"""Cases of AReaL's suite for recovery and of torchtitan's for the transfer of weights, written anew;
docs/outside_suites.md lists them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rolltree.engine.errors import UserError
from rolltree.engine.loop.budget import Budget
from rolltree.engine.rollout.sampler import WeightSource
from rolltree.engine.train import checkpoint

from ..engine.loop.test_sampler import Canned, Odd, Tensors, controller

# -- AReaL, tests/test_recover.py --------------------------------------------------------------------------------------

TRAINED = {"algorithm.objective": "dapo", "seed": 0}


def write(directory: Path, step: int, keep: int = 2) -> Path:
    def learner(folder: Path) -> checkpoint.Saved:
        return checkpoint.Saved(
            checkpoint.write_tensors(folder, {"w": torch.full((2,), float(step))}), {"updates": step}
        )

    return checkpoint.save(
        directory,
        step,
        learner=learner,
        tensors={"t": torch.tensor([step])},
        state={"at": step},
        trained=TRAINED,
        keep=keep,
    )


@pytest.mark.parametrize("made", [False, True])
def test_nothing_to_recover_is_no_checkpoint(tmp_path: Path, made: bool) -> None:
    """AReaL then starts from the beginning; here a run that is to be continued and cannot be says so."""
    directory = tmp_path / "checkpoints"
    if made:
        directory.mkdir()
    assert checkpoint.latest(directory) is None
    with pytest.raises(UserError, match="nothing to resume"):
        checkpoint.load_latest(directory, TRAINED)


@pytest.mark.parametrize("steps", [[1], [1, 2], [3, 12], [5, 100]])
def test_the_newest_checkpoint_is_recovered_whatever_run_asks(tmp_path: Path, steps: list[int]) -> None:
    for step in steps:
        write(tmp_path, step)
    for _ in range(2):
        found = checkpoint.load_latest(tmp_path, TRAINED)
        assert found.step == found.state["at"] == found.state["learner"]["updates"] == steps[-1]
        assert found.tensors["t"].tolist() == [steps[-1]]


def test_what_a_killed_run_left_is_not_recovered(tmp_path: Path) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2).rename(tmp_path / "step_000002.tmp")
    assert checkpoint.load_latest(tmp_path, TRAINED).step == 1
    write(tmp_path, 3)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_damaged_checkpoint_is_refused_and_not_begun_anew(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    damaged = next(path.glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(UserError, match=damaged.name):
        checkpoint.load_latest(tmp_path, TRAINED)


def test_another_experiments_checkpoint_is_refused_by_key(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with pytest.raises(UserError, match=r"`algorithm\.objective` is \"gspo\""):
        checkpoint.load_latest(tmp_path, TRAINED | {"algorithm.objective": "gspo"})


def test_old_checkpoints_go_once_a_newer_one_is_whole(tmp_path: Path) -> None:
    for step in range(1, 5):
        write(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000003", "step_000004"]


# -- torchtitan, experiments/rl/tests/test_weight_sync.py --------------------------------------------------------------


class Events:
    """Writes down when weights are gathered (torchtitan's push) and loaded (its pull)."""

    def __init__(self, on_load: Callable[[], None] = lambda: None) -> None:
        self.seen: list[str] = []
        self.on_load = on_load

    def source(self, value: float) -> Any:
        events = self

        class Source(Tensors):
            def tensors(self) -> dict[str, torch.Tensor]:
                events.seen.append("push")
                return super().tensors()

        return Source(value)

    def sampler(self) -> Canned:
        events = self

        class Loads(Canned):
            def load(self, weights: WeightSource | None, version: int, *, keep_keys: bool) -> None:
                super().load(weights, version, keep_keys=keep_keys)
                events.seen.append("pull")
                events.on_load()

        return Loads()


def test_weights_are_sent_then_loaded_then_the_groups_are_released() -> None:
    events = Events()
    made = controller(events.sampler(), Budget(batch=5, staleness=1))
    end_step = made.buffer.end_step
    made.buffer.end_step = lambda batch: (events.seen.append("release"), end_step(batch))[1]  # type: ignore[method-assign]
    with made.running(Odd()):
        batch = made.next_batch()
        room = made.buffer.room
        made.end_step(batch, events.source(1.0), 7)
    assert events.seen == ["push", "pull", "release"]
    assert made.buffer.room == room + 5


def test_the_sampler_gets_the_version_that_was_started() -> None:
    made = controller(Canned(), Budget(batch=1))
    with made.running(Odd()):
        made.end_step(made.next_batch(), Tensors(1.0), 42)
        (group,) = made.next_batch()
    assert [version for _, version, _ in made.sampler.loaded] == [42]
    assert group.tree.policy_version.max() == 42


def test_before_the_first_transfer_there_is_nothing_to_wait_for() -> None:
    made = controller(Canned(), Budget(batch=1))
    with made.running(Odd()):
        made.next_batch()
    assert made.sampler.loaded == []
    assert made.publication.difference is None


def test_each_version_comes_with_its_own_weights() -> None:
    """torchtitan binds a pull to its own push; here the second transfer begins after the first one's end."""
    made = controller(Canned(), Budget(batch=1))
    with made.running(Odd()):
        for version in (1, 2, 3):
            made.end_step(made.next_batch(), Tensors(10.0 * version), version)
    assert [(held["w"].item(), version) for held, version, _ in made.sampler.loaded] == [(10, 1), (20, 2), (30, 3)]


def test_an_error_of_the_transfer_ends_the_step_and_releases_nothing() -> None:
    def fails() -> None:
        raise RuntimeError("the transfer failed")

    events = Events(fails)
    made = controller(events.sampler(), Budget(batch=2))
    with made.running(Odd()):
        batch = made.next_batch()
        room = made.buffer.room
        with pytest.raises(RuntimeError, match="the transfer failed"):
            made.end_step(batch, events.source(1.0), 1)
    assert made.buffer.room == room
