"""Columns of a data file in a checkpoint: kept, left out or refused before the first step."""

from __future__ import annotations

import datetime
import json
import shutil
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rolltree.engine.app.assembly.checks import kept_entries
from rolltree.engine.app.cli import main
from rolltree.engine.errors import UserError
from rolltree.engine.loop.replay import read_groups
from rolltree.engine.prompts.archive import Archive, NotKeptError
from rolltree.engine.settings import TrainConfig

from ...support.tiny import write_job

pytestmark = pytest.mark.usefixtures("without_report")

ZONE = datetime.timezone(datetime.timedelta(hours=5, minutes=30))
KEPT: list[Any] = [
    datetime.date(2026, 1, 1),
    datetime.datetime(2026, 1, 1, 3, 4, 5, 6),
    datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
    datetime.datetime(2026, 1, 1, tzinfo=ZONE),
    datetime.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")),
    datetime.time(23, 59, 59, 999999),
    datetime.timedelta(days=-3, microseconds=7),
    Decimal("1.10"),
    Decimal("-0E+5"),
    b"",
    b"\x00\xff",
    uuid.UUID(int=7),
    {"nested": [Decimal("3"), {"when": datetime.date.min}], 3: (b"x",)},
]


@pytest.mark.parametrize("value", KEPT, ids=str)
def test_an_archive_gives_back_what_columns_hold(value: Any) -> None:
    archive = Archive()
    again = Archive(archive.tensors).unpack(json.loads(json.dumps(archive.pack(value))))
    assert again == value
    assert repr(again) == repr(value)
    assert type(again) is type(value)


@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Berlin", "+02:00"])
def test_times_in_nanoseconds_are_given_back(zone: str | None) -> None:
    """pyarrow gives them as pandas.Timestamp, since Python's own have microseconds."""
    column = pa.array([7, 1_793_000_000_000_000_001], pa.timestamp("ns", tz=zone)).to_pylist()
    for value in [*column, *pa.array([-3, 10**17 + 1], pa.duration("ns")).to_pylist()]:
        again = Archive().unpack(json.loads(json.dumps(Archive().pack(value))))
        assert again == value
        assert type(again) is type(value)
        assert again.value == value.value


class Mine:
    pass


class OtherZone(datetime.tzinfo):
    def utcoffset(self, moment: Any) -> datetime.timedelta:
        return datetime.timedelta(0)


@pytest.mark.parametrize(
    "value", [Mine(), [Mine()], {"a": Mine()}, 1j, datetime.datetime(2026, 1, 1, tzinfo=OtherZone()), np.array(["a"])]
)
def test_an_archive_refuses_what_it_would_not_give_back(value: Any) -> None:
    with pytest.raises(NotKeptError, match="cannot be kept in a checkpoint"):
        Archive().pack(value)


def config(verifier: str = "exact", **loop: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "name": "t", "model": {"path": "m"}, "data": {"path": "p.jsonl", "n_key": "count"},
            "reward": {"verifier": verifier}, "loop": loop,
        }
    )  # fmt: skip


def kept(row: dict[str, Any], verifier: str = "exact") -> dict[str, Any]:
    check = kept_entries(config(verifier, staleness=1))
    assert check is not None
    return check(row, "Row 3")


def test_columns_that_nobody_reads_are_left_out() -> None:
    row = {"prompt": "a", "answer": "1", "extra": Mine(), "more": [1, Mine()], "when": datetime.date.min}
    assert kept(row) == {"prompt": "a", "answer": "1", "when": datetime.date.min}


@pytest.mark.parametrize("column", ["answer", "prompt", "solution", "count", "seed"])
def test_columns_that_are_read_are_refused_by_row_and_name(column: str) -> None:
    with pytest.raises(UserError, match=rf"Row 3 has a value in column '{column}'.*A Mine cannot be kept"):
        kept({"prompt": "a", "answer": "1", column: Mine()})


def test_code_of_the_users_may_read_every_column() -> None:
    with pytest.raises(UserError, match="Row 3 has a value in column 'extra'"):
        kept({"answer": "1", "extra": Mine()}, "rw.py:judge")


def test_a_run_without_open_groups_keeps_no_entries() -> None:
    assert kept_entries(config()) is None
    assert kept_entries(config(staleness=1)) is not None
    assert kept_entries(config(), recorded=True) is not None


@pytest.fixture
def dated(tmp_path: Path) -> Path:
    """A run over a file with columns of many types."""
    columns: dict[str, Any] = {
        "prompt": ["a", "b", "c"],
        "answer": ["1", "2", "3"],
        "added": [datetime.date(2026, 1, 1)] * 3,
        "price": [Decimal("1.5")] * 3,
        "image": [b"\x00"] * 3,
        "at": pa.array([datetime.datetime(2026, 1, 1)] * 3, pa.timestamp("us", tz="UTC")),
        "took": [datetime.timedelta(seconds=1)] * 3,
        "made": pa.array([1, 2, 3], pa.timestamp("ns", tz="Europe/Berlin")),  # pandas.Timestamp
        "lasted": pa.array([1, 2, 3], pa.duration("ns")),
    }
    pq.write_table(pa.table(columns), tmp_path / "dated.parquet")
    return tmp_path


def options(directory: Path, file: str = "dated.parquet") -> list[str]:
    return [
        "--data.tasks=[]", f"--data.path={directory}/{file}", "--trainer.prompts_per_step=2", "--checkpoint.every=1",
        "--evaluation.problems=0", "--evaluation.every=0", "--checkpoint.keep=5",
    ]  # fmt: skip


@pytest.mark.check
def test_recorded_groups_hold_dates(dated: Path) -> None:
    path = write_job(dated)
    assert main(["rollout", str(path), "--record", str(dated / "g"), *options(dated)]) == 0
    (prompt, _), *_ = read_groups(dated / "g")
    assert prompt.entry["added"] == datetime.date(2026, 1, 1)
    assert prompt.entry["image"] == b"\x00"


SOURCE = """
import datetime

class Mine:
    pass

class Rows:
    def __init__(self):
        self.count = 0

    def next(self, count):
        self.count += count
        return [{"prompt": f"p{self.count}", "answer": "1", "when": datetime.date(2026, 1, 1)%s}]
"""


@pytest.mark.parametrize("staleness", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_rows_of_a_source_hold_dates_and_other_objects_are_refused_at_once(
    tmp_path: Path, staleness: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_job(tmp_path)
    (tmp_path / "source.py").write_text(SOURCE % "")
    own = [
        *options(tmp_path)[2:], "--data.tasks=[]", f"--data.source={tmp_path}/source.py:Rows", "--trainer.steps=2",
        f"--loop.staleness={staleness}",
    ]  # fmt: skip
    assert main(["train", str(path), *own]) == 0
    (tmp_path / "source.py").write_text(SOURCE % ', "odd": Mine()')
    assert main(["train", str(path), *own, "--name=odd"]) in (1, 2)
    assert "A Mine cannot be kept in a checkpoint" in capsys.readouterr().err
    metrics = tmp_path / "runs" / "odd" / "metrics.jsonl"
    assert not metrics.exists() or len(metrics.read_text().splitlines()) <= 1


def rows(path: Path, changes: dict[int, dict[str, str]]) -> None:
    lines = [{"prompt": f"{i}+1=", "answer": str(i + 1)} | changes.get(i, {}) for i in range(8)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, without_report: None) -> list[str]:
    """The command of a run of two steps whose second was not saved; its output is in ``stopped`` beside its TOML."""
    home = tmp_path_factory.mktemp("stopped")
    rows(home / "p.jsonl", {})
    own = [*options(home, "p.jsonl"), "--evaluation.problems=2", "--trainer.steps=2"]
    command = ["train", str(write_job(home)), *own]
    assert main(command) == 0
    shutil.rmtree(home / "runs" / "tiny" / "checkpoints" / "step_000002")
    (home / "runs").rename(home / "stopped")
    return command


@pytest.mark.check(but=1)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({1: {"answer": "9"}}, "other training rows"),
        pytest.param({1: {"prompt": "7+8="}}, "other training rows", marks=pytest.mark.slow),
        ({1: {"prompt": "2+1=", "answer": "3"}, 2: {"prompt": "1+1=", "answer": "2"}}, "other training rows"),
        pytest.param({0: {"hint": "new"}}, "other training rows", marks=pytest.mark.slow),
        ({7: {"answer": "0"}}, "other held-out rows"),
        ({}, None),
    ],
)
def test_a_file_with_other_rows_is_not_resumed_in_silence(
    stopped: list[str], changes: dict[int, dict[str, str]], said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    home = Path(stopped[1]).parent
    shutil.rmtree(home / "runs", ignore_errors=True)
    shutil.copytree(home / "stopped", home / "runs")
    rows(home / "p.jsonl", changes)
    code = main([*stopped, "--resume"])
    assert code == (0 if said is None else 2)
    assert said is None or said in capsys.readouterr().err
