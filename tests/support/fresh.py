"""Helpers of tests that keep results: what a test may change lasts for that test, or is copied for each call."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, TypeVar

Make = TypeVar("Make", bound=Callable[..., Any])
_made: list[Callable[[], None]] = []


def once_a_test(make: Make) -> Make:
    """Let ``make`` return one object to all calls of a test with the same arguments, and another to the next test."""
    kept: Any = functools.cache(make)
    _made.append(kept.cache_clear)
    return kept


def copied(make: Make) -> Make:
    """Call ``make`` once for each arguments in all tests, and return a copy of the result each time."""
    once = functools.cache(make)

    @functools.wraps(make)
    def call(*args: Any, **kwargs: Any) -> Any:
        return copy.deepcopy(once(*args, **kwargs))

    return call  # type: ignore[return-value]


def forget() -> None:
    """Drop the objects of a test; conftest.py calls it after each."""
    for clear in _made:
        clear()
