"""Schedules: numbers that change with the step, given as ``[[step, value], ...]`` or by a function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ..errors import UserError
from ..parts.resolve import resolve

Function = Callable[[int, Mapping[str, float]], float]
"""The value by the step and the metrics of the step before, empty in a run's first."""
Schedule = float | Sequence[tuple[int, float]] | Function


def at_step(schedule: Schedule, step: int, metrics: Mapping[str, float] | None = None) -> float:
    """The value at ``step``; of points linear between them, and the first and last one's before and after them."""
    if isinstance(schedule, int | float):
        return float(schedule)
    if callable(schedule):
        return schedule(step, metrics or {})
    if step <= schedule[0][0]:
        return float(schedule[0][1])
    for (begin, first), (end, last) in pairwise(schedule):
        if step <= end:
            return first + (last - first) * (step - begin) / (end - begin)
    return float(schedule[-1][1])


def cosine(step: int, metrics: Mapping[str, float], *, end: int, last: float = 0.0) -> float:
    """From 1 at step 0 to ``last`` at ``end`` along half a cosine, and ``last`` from there on."""
    return last + (1 - last) * 0.5 * (1 + math.cos(math.pi * min(step / end, 1.0)))


def steer(
    step: int,
    metrics: Mapping[str, float],
    *,
    metric: str,
    target: float,
    own: str,
    initial: float = 1.0,
    gain: float = 0.1,
    low: float = 0.0,
    high: float = math.inf,
) -> float:
    """Each step times 1 + gain clip(metric / target - 1, -0.2, 0.2): the adaptive KL weight of Ziegler et al. (2019).

    Args:
        metric: what is to come to ``target``, such as ``actor/kl_loss`` or ``actor/entropy``.
        own: the metric that records this number (``schedule/...``), from which it goes on; ``initial`` where there is
            none yet.
        gain: above 0 where more of the number brings less of the metric; below 0 where it brings more.
    """
    value = metrics.get(own, initial)
    if metric in metrics:
        value *= 1 + gain * min(0.2, max(-0.2, metrics[metric] / target - 1))
    return min(high, max(low, value))


SCHEDULES: dict[str, Callable[..., float]] = {"cosine": cosine, "steer": steer}


def find_schedule(key: str, given: float | str | Sequence[tuple[int, float]], options: Mapping[str, Any]) -> Schedule:
    """The schedule that ``key`` of the configuration gives: a number, points, or the name of a function.

    Raises:
        UserError: there is no such function, or it has no such option; later, when it answers no finite number.
    """
    if not isinstance(given, str):
        if options:
            raise UserError(f"{key}_options are of a function; name one in {key}, or leave them out.")
        return given
    function = resolve(key, given, options, known=SCHEDULES, inputs=("step", "metrics"))

    def value(step: int, metrics: Mapping[str, float]) -> float:
        found = function(step, metrics)
        if not isinstance(found, int | float) or not math.isfinite(found):
            raise UserError(f"{key} = '{given}' must answer a finite number; at step {step} it is {found!r}.")
        return float(found)

    return value
