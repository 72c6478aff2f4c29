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
    played(provider, environments.Inputs(2, 0.0), "episodes")


@pytest.mark.check
@pytest.mark.parametrize("provider", ["OpenEnv", environments.TRL])
def test_both_trainers_step(provider: str) -> None:
    pytest.importorskip("openenv")
    pytest.importorskip("trl")
    played(provider, environments.Inputs(4, 0.0, 64), "step")


def played(provider: str, inputs: environments.Inputs, direction: str) -> None:
    try:
        environments.BENCH.providers[provider](inputs)[direction]()
    finally:
        BACKGROUND.close()
        for kind in ("openenv", "mcp"):
            environments.command(kind).close()
