"""Reads a run directory for the report; for every missing file it adds a sentence to `RunData.missing`."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import UserError
from ...record.problems import PROBLEMS


@dataclass
class RunData:
    """The contents of a run directory."""

    run_dir: Path
    config: dict[str, Any]
    """Tables of config.toml; empty if it is missing."""
    config_text: str
    rows: list[dict[str, float]]
    """Metrics of each step, ascending, finite numbers only."""
    rollout_files: list[Path]
    problems: dict[str, Any] | None = None
    """Estimates of the problems' success rates, see `SuccessRates.table`; None where the run made none."""
    missing: list[str] = field(default_factory=list)
    """One sentence for each thing that the report cannot show."""

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Return the steps at which ``key`` was recorded, and its values there."""
        points = [(int(r["step"]), r[key]) for r in self.rows if key in r]
        return [s for s, _ in points], [v for _, v in points]

    def total(self, key: str) -> float:
        return math.fsum(self.series(key)[1])


def read_run(run_dir: Path, metrics: Metrics | None = None) -> RunData:
    """Read a run directory.

    Args:
        metrics: keeps the rows of metrics.jsonl from one call to the next.

    Raises:
        UserError: ``run_dir`` is not a directory, or has no file that a run writes.
    """
    if not run_dir.is_dir():
        raise UserError(f"There is no run directory '{run_dir}'; give the directory of a run, such as runs/NAME.")
    config_file, metrics_file = run_dir / "config.toml", run_dir / "metrics.jsonl"
    rollout_files = sorted((run_dir / "rollouts").glob("*.parquet"))
    if not (config_file.exists() or metrics_file.exists() or rollout_files):
        raise UserError(
            f"'{run_dir}' is not the directory of a run: it holds no config.toml, metrics.jsonl or rollouts/*.parquet."
        )
    missing: list[str] = []
    config_text, config = _read_config(config_file, missing)
    rows = (metrics or Metrics()).read(metrics_file, missing)
    if not rollout_files:
        missing.append("There are no rollouts/*.parquet, so there are no trees to explore.")
    return RunData(
        run_dir, config, config_text, rows, rollout_files, _read_problems(run_dir / PROBLEMS, missing), missing
    )


def _read_problems(path: Path, missing: list[str]) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None  # only some curricula estimate
    except (OSError, ValueError) as error:
        missing.append(f"{path.name} cannot be read ({error}), so the problems' success rates are not shown.")
        return None


def _read_config(path: Path, missing: list[str]) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
        return text, tomllib.loads(text)
    except FileNotFoundError:
        missing.append("There is no config.toml, so the settings of this run are not shown.")
    except (OSError, ValueError) as error:
        missing.append(f"config.toml cannot be read ({error}), so the settings of this run are not shown.")
    return "", {}


END = 4096
"""Bytes before the place up to which a file was read; where they have changed, it is another file."""


class Metrics:
    """The rows of a file metrics.jsonl; when they are read again, only the lines that were added are.

    A file that was replaced, as a resumed run does, is read as a whole.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._place = self._lines = 0  # bytes and lines that are read for good
        self._end = b""  # the last of those bytes
        self._rows: dict[int, dict[str, float]] = {}
        self._broken: list[int] = []

    def read(self, path: Path, missing: list[str]) -> list[dict[str, float]]:
        """Return the rows by step; of a step written twice (by a resumed run) the last row counts."""
        try:
            with path.open("rb") as file:
                file.seek(self._place - len(self._end))
                if file.read(len(self._end)) != self._end:
                    self._forget()
                    file.seek(0)
                added = file.read()
        except OSError as error:
            absent = isinstance(error, FileNotFoundError)
            reason = "There is no metrics.jsonl" if absent else f"metrics.jsonl: {error.strerror}"
            missing.append(f"{reason}, so there are no curves and no account of time.")
            return []
        whole, _, rest = added.rpartition(b"\n")
        self._take(whole.splitlines() if whole else [], self._rows, self._broken)
        self._place += len(added) - len(rest)
        self._end = (self._end + added[: len(added) - len(rest)])[-END:]
        self._lines += len(whole.splitlines()) if whole else 0
        rows, broken, lines = dict(self._rows), list(self._broken), self._lines
        if rest:  # its end may come
            self._take([rest], rows, broken)
            lines += 1
        if broken:
            shown = ", ".join(map(str, broken[:5])) + (", ..." if len(broken) > 5 else "")
            missing.append(f"{len(broken)} of {lines} lines of metrics.jsonl are not a step's JSON (line {shown}).")
        if not rows and not broken:
            missing.append("metrics.jsonl is empty, so there are no curves and no account of time.")
        return [rows[step] for step in sorted(rows)]

    def _take(self, lines: Sequence[bytes], rows: dict[int, dict[str, float]], broken: list[int]) -> None:
        for number, line in enumerate(lines, start=self._lines + 1):
            try:
                row = json.loads(line)
                step = int(row["step"])
                numbers = {k: float(v) for k, v in row.items() if isinstance(v, int | float)}
            except (ValueError, KeyError, TypeError, OverflowError):
                broken.append(number)
                continue
            rows[step] = {k: v for k, v in numbers.items() if math.isfinite(v)} | {"step": float(step)}
