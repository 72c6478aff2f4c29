"""Over-sampling by a schedule: how many groups each round admits, which of them are trained, what is out of range."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rolltree.engine import UserError, load_config
from rolltree.engine.loop.buffer import Buffer
from rolltree.engine.methods.schedules import valid_share

from ...support.real_step import Steps, take_steps
from ...support.tiny import tiny_job

P = 4
KEPT = ("equal_rewards", "surplus")
MINE = """
def wanted(step, metrics):
    assert step == 1 or metrics["group/kept_ratio"] > 0 and "timing_s/step" in metrics
    return [2.0, 3.5, 0.5][step - 1]
"""
JUDGES = """
def some(text, entry):  # half of the problems have equal rewards
    return float(sum(map(ord, text)) % 2) if sum(map(ord, entry["question"])) % 2 else 0.0
"""


toml = tiny_job({"mine.py": MINE, "reward.py": JUDGES}, reward={"verifier": "reward.py:some"})


class Watched:
    """The admissions of every step as (admitted, open before), and the fate of every ticket."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rounds: list[list[tuple[int, int]]] = []
        self.fates: list[dict[int, str]] = []
        admit, drop, batch = Buffer.admit, Buffer.drop, Buffer.batch

        def admitted(buffer: Buffer, prompts: Any) -> Any:
            while len(self.rounds) <= buffer.steps:
                self.rounds.append([])
                self.fates.append({})
            self.rounds[buffer.steps].append((len(prompts), len(buffer.open)))
            return admit(buffer, prompts)

        def dropped(buffer: Buffer, group: Any, reason: str) -> None:
            drop(buffer, group, reason)
            # the surplus is dropped when the step has ended
            self.fates[buffer.steps - (reason == "surplus")][group.ticket] = reason

        def taken(buffer: Buffer) -> Any:
            if found := batch(buffer):
                self.fates[-1] |= {group.ticket: "trained" for group in found}
            return found

        for name, method in (("admit", admitted), ("drop", dropped), ("batch", taken)):
            monkeypatch.setattr(Buffer, name, method)


def run(toml: Path, directory: Path, *flags: str) -> Steps:
    options = ["--loop.callback=dynamic_sampling", f"--trainer.prompts_per_step={P}", *flags]
    return take_steps(toml, directory, *options)


def check_rounds(watched: Watched, factors: list[float]) -> None:
    """Each admission is of ``factor`` groups for each one that the batch will lack; a full batch ends the step."""
    assert len(watched.rounds) == len(factors)
    for rounds, fates, factor in zip(watched.rounds, watched.fates, factors, strict=True):
        for admitted, before in rounds:
            assert before < P
            assert admitted == round(factor * (P - before))
        assert sum(admitted for admitted, _ in rounds) == len(fates)
        ready = sum(fate != "equal_rewards" for fate in fates.values())
        assert ready >= P
        good = [ticket for ticket in sorted(fates) if fates[ticket] != "equal_rewards"]
        assert [fates[ticket] for ticket in good] == ["trained"] * P + ["surplus"] * (ready - P)


ADAPTIVE = (
    "--loop.over_sampling=valid_share", "--loop.over_sampling_options={target=1.2,decay=0.75,most=2.4}",
    "--trainer.steps=6",
)  # fmt: skip


@pytest.fixture(scope="module")
def adaptive(toml: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Steps, Watched]:
    with pytest.MonkeyPatch.context() as patched:
        watched = Watched(patched)
        return run(toml, tmp_path_factory.mktemp("adaptive"), *ADAPTIVE), watched


@pytest.mark.slow
def test_the_factor_is_the_target_over_the_mean_share_of_kept_groups(adaptive: tuple[Steps, Watched]) -> None:
    steps, watched = adaptive
    factors, mean = [1.2], 0.0
    shares = [sum(fate != "equal_rewards" for fate in fates.values()) / len(fates) for fates in watched.fates]
    for number, share in enumerate(shares):
        mean = share if number == 0 else max(0.75 * mean, 0.75 * 1.2 / 2.4) + 0.25 * share
        factors.append(min(2.4, 1.2 / mean))
    assert [row["group/kept_ratio"] for row in steps.rows] == pytest.approx(shares)
    assert [row["schedule/over_sampling"] for row in steps.rows] == pytest.approx(factors[:-1])
    check_rounds(watched, factors[:-1])
    assert len({round(P * factor) for factor in factors}) > 2, "the number of groups stays the same; it shows nothing"
    assert sum(len(rounds) for rounds in watched.rounds) > 6, "no round was too small; it shows nothing"
    for row, fates in zip(steps.rows, watched.fates, strict=True):
        for reason in KEPT:
            assert row.get(f"group/dropped_{reason}", 0) == list(fates.values()).count(reason)


@pytest.mark.methods
def test_a_factor_out_of_range_ends_the_run(toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    with pytest.raises(UserError, match=r"loop.over_sampling must be from 1 to 64; at step 3 it is 0\.5"):
        run(toml, tmp_path, f"--loop.over_sampling={toml.parent}/mine.py:wanted", "--trainer.steps=3")
    check_rounds(watched, [2, 3.5])


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--loop.over_sampling=0.5"], "`loop.over_sampling` must be from 1 to 64, not 0.5"),
        (["--loop.over_sampling=[[1,1.0],[9,65.0]]"], "must be from 1 to 64, not 65"),
    ],
)
def test_what_has_no_meaning_is_refused(toml: Path, flags: list[str], why: str) -> None:
    with pytest.raises(UserError, match=why):
        load_config(toml, flags)


def test_the_average_stays_within_its_bounds() -> None:
    rows = {"group/kept_ratio": 0.01, "schedule/over_sampling": 8.0}
    assert valid_share(9, rows) == 8
    assert valid_share(3, rows | {"group/kept_ratio": 1.0}) == pytest.approx(1 / (0.5 / 8 + 0.5))
    assert valid_share(2, rows | {"group/kept_ratio": 0.8}) == pytest.approx(1.25)  # the first share alone
    for options in ({"target": 0.9}, {"target": 9.0}, {"decay": 1.0}):
        with pytest.raises(UserError, match="needs 1 <= target <= most"):
            valid_share(1, {}, **options)
    with pytest.raises(UserError, match=r"is for loop\.over_sampling"):
        valid_share(2, {"schedule/lr_scale": 1.0})
