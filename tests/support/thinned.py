"""Grids of parameters of which some run by default and the others with ``make slow``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], kept: Callable[[int, Any], bool]) -> list[Any]:
    """Return the parameters for ``parametrize``; those for which ``kept(number, case)`` is false are marked slow."""
    slow = pytest.mark.slow
    return [
        case if kept(number, case) else pytest.param(*(case if isinstance(case, tuple) else [case]), marks=slow)
        for number, case in enumerate(cases)
    ]


def every(n: int) -> Callable[[int, Any], bool]:
    """Keep the first of every ``n`` parameters."""
    return lambda number, case: number % n == 0
