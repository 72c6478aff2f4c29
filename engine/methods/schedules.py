"""Schedules: numbers that change with the step, given in a configuration as ``[[step, value], ...]``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Schedule = float | Sequence[tuple[int, float]]


def at_step(schedule: Schedule, step: int) -> float:
    """The value at ``step``: linear between the points, and the first and last one's before and after them."""
    if isinstance(schedule, int | float):
        return float(schedule)
    if step <= schedule[0][0]:
        return float(schedule[0][1])
    for (begin, first), (end, last) in pairwise(schedule):
        if step <= end:
            return first + (last - first) * (step - begin) / (end - begin)
    return float(schedule[-1][1])
