from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from .processes import forking


@pytest.fixture(scope="session")
def server() -> Iterator[subprocess.Popen[bytes]]:
    """What `processes.Process` forks."""
    with forking() as process:
        yield process
