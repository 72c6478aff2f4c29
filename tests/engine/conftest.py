from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from ..support.processes import forking


@pytest.fixture
def without_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of the command line leave no report, whose plots take half of a short run's time; test_run.py has one."""
    monkeypatch.setattr("rolltree.engine.app.report.write_report", lambda directory: directory / "report.html")


@pytest.fixture(scope="session")
def server() -> Iterator[subprocess.Popen[bytes]]:
    """Start the process that `processes.Process` forks."""
    with forking() as process:
        yield process


@pytest.fixture(scope="session")
def ray() -> Iterator[Any]:
    """One Ray for all tests, with room for their workers; it outlives the runs."""
    from rolltree.engine.fleet.ray import RayWorkers

    RayWorkers({"engine": ({"CPU": 1.0}, 8)}).close()
    import ray

    yield ray
    ray.shutdown()
