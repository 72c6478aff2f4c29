"""The files of a run: its rows and its failures, so that an interrupted run resumes.

In the directory of a run, ``OP.jsonl`` has the rows, ``OP.outcomes.jsonl`` a line for every provider that did not run
and for every finished case, and ``OP.running`` the current case and provider, which a crash leaves behind.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from .schema import Row, append, append_line, commit, read

Status = Literal["finished", "absent", "unsupported", "failed", "stopped", "again"]


@dataclass(frozen=True)
class Outcome:
    """The end of a case, or of one provider in it."""

    op: str
    case: str
    provider: str  # "" for the case itself
    status: Status
    reason: str
    commit: str
    time: str  # UTC, ISO 8601

    def __str__(self) -> str:
        who = f"{self.op} / {self.case}" + (f" / {self.provider}" if self.provider else "")
        return f"{who}: {self.status}" + (f": {self.reason}" if self.reason else "")


class Journal:
    """The files of one op. Records of other commits are ignored; without a directory nothing is kept."""

    def __init__(self, op: str, directory: Path | None) -> None:
        self.op, self.commit, self.directory = op, commit(), directory
        self.rows: list[Row] = []  # of this run
        self.outcomes: list[Outcome] = []
        self.read()

    def read(self) -> list[Outcome]:
        """Read what other processes recorded, and return the outcomes that are new."""
        before, self.outcomes = len(self.outcomes), []
        if self.directory is not None and self._path("outcomes.jsonl").exists():
            for line in self._path("outcomes.jsonl").read_text().splitlines():
                outcome = Outcome(**json.loads(line))
                if outcome.commit == self.commit:
                    self.outcomes.append(outcome)
        return self.outcomes[before:]

    def _path(self, suffix: str) -> Path:
        assert self.directory is not None
        return self.directory / f"{self.op}.{suffix}"

    def kept(self) -> list[Row]:
        """Return the rows of this commit that earlier runs kept."""
        if self.directory is None or not self._path("jsonl").exists():
            return []
        return [row for row in read(self._path("jsonl")) if row.commit == self.commit]

    def finished(self, case: str) -> bool:
        return any(o.case == case and not o.provider for o in self.outcomes)

    def known(self, case: str, provider: str) -> bool:
        """Return whether an outcome of ``provider`` in ``case`` is recorded, and not to be tried again."""
        last = next((o for o in reversed(self.outcomes) if (o.case, o.provider) == (case, provider)), None)
        return last is not None and last.status != "again"

    @property
    def problems(self) -> list[Outcome]:
        last = {(o.case, o.provider): o for o in self.outcomes}
        return [o for o in last.values() if o.status in ("failed", "stopped")]

    def retry(self) -> None:
        """Let every provider that failed or was stopped run again, and forget which one an earlier process ran."""
        for problem in self.problems:
            self.record(problem.case, problem.provider, "again")
        if self.directory is not None:
            self._path("running").unlink(missing_ok=True)

    def begin(self, case: str, provider: str) -> None:
        """Record the case and provider that run now."""
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._path("running").write_text(json.dumps([case, provider]))

    def since(self) -> float | None:
        """Return the time (seconds since the epoch) at which the current provider began; None if none runs."""
        at = self.interrupted()
        return None if at is None or self.known(*at) else self._path("running").stat().st_mtime

    def interrupted(self) -> tuple[str, str] | None:
        """Return the case and provider at which an earlier process died; None if none did."""
        if self.directory is None or not self._path("running").exists():
            return None
        case, provider = json.loads(self._path("running").read_text())
        return case, provider

    def record(self, case: str, provider: str, status: Status, reason: str = "") -> Outcome:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        outcome = Outcome(self.op, case, provider, status, reason, self.commit, now)
        self.outcomes.append(outcome)
        if self.directory is not None:
            append_line(asdict(outcome), self._path("outcomes.jsonl"))
        return outcome

    def finish(self, case: str, rows: Iterable[Row], provider: str = "", summary: str = "") -> None:
        """Keep the rows of a finished case, or of one finished provider in it, with a ``summary`` as its reason."""
        rows = list(rows)
        self.rows += rows
        if self.directory is not None:
            append(rows, self._path("jsonl"))
        self.record(case, provider, "finished", summary)
        if self.directory is not None:
            self._path("running").unlink(missing_ok=True)
