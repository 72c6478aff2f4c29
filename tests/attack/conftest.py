"""The campaign's size: ``pytest tests/attack --attack-cases 2000`` is the long one, CI runs the few of the default."""

from __future__ import annotations

import pytest

IN_CI = 8


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--attack-cases", type=int, default=IN_CI, metavar="N", help="cases of each attack (tests/attack)")


@pytest.fixture
def cases(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("attack_cases", IN_CI))
