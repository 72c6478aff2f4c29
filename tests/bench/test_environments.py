"""The benchmark of environments: every provider plays whole episodes, with its own server."""

from __future__ import annotations

import pytest

from rolltree.bench.runs import environments
from rolltree.engine.programs.servers.background import BACKGROUND


@pytest.mark.parametrize(("provider", "package"), [
    ("Python", "torch"), pytest.param("MCP", "mcp", marks=pytest.mark.check),
    pytest.param("OpenEnv", "openenv", marks=pytest.mark.check),
    pytest.param("OpenEnv, clients alone", "openenv", marks=pytest.mark.check),
])  # fmt: skip
def test_every_provider_plays(provider: str, package: str) -> None:
    pytest.importorskip(package)
    try:
        environments.BENCH.providers[provider](environments.Inputs(2, 0.0))["episodes"]()
    finally:
        BACKGROUND.close()
        for kind in ("openenv", "mcp"):
            environments.command(kind).close()
