from __future__ import annotations

import pytest


@pytest.fixture
def without_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of the command line leave no report, whose plots take half of a short run's time; test_run.py has one."""
    monkeypatch.setattr("rolltree.engine.app.report.write_report", lambda directory: directory / "report.html")
