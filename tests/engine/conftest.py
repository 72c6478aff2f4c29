from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..support.harbor import no_podman
from ..support.processes import forking


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The TOML of `write_job` in a folder of the file's tests; a file with other keys has its own by `tiny_job`."""
    from ..support.tiny import write_job

    return write_job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="session")
def _finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rolltree.engine.app.cli import main

    from ..support.tiny import write_job

    toml = write_job(tmp_path_factory.mktemp("finished"))
    assert main(["train", str(toml)]) == 0
    return toml


@pytest.fixture
def finished_run(_finished: Path, tmp_path: Path) -> Path:
    """A copy of the directory of a finished run of `write_job` as it is; its configuration is in ``config.toml``."""
    return Path(shutil.copytree(_finished.parent / "runs" / "tiny", tmp_path / "tiny"))


@pytest.fixture(scope="session")
def podman() -> None:
    """Skip a test where podman runs no container."""
    if why := no_podman():
        pytest.skip(why)


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
