"""Schedules: numbers that change with the step, given as ``[[step, value], ...]`` or by a function."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from ..errors import UserError
from ..parts.context import Changing, Context
from ..parts.resolve import resolve

Function = Callable[[int, Mapping[str, float]], float]
"""Returns the value from the step and the metrics of the step before (empty in a run's first step)."""
Schedule = float | Sequence[tuple[int, float]] | Function


def at_step(schedule: Schedule, step: int, metrics: Mapping[str, float] | None = None) -> float:
    """Return the value at ``step``. Points are interpolated linearly; before the first and after the last point it is
    that point's value."""
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


class _NoMetrics(Mapping[str, float]):
    """Stands for metrics that are not known; ``was_read`` tells whether something was read."""

    was_read = False

    def __getitem__(self, name: str) -> float:
        self.was_read = True
        raise LookupError(name)

    def __iter__(self) -> Iterator[str]:
        self.was_read = True
        return iter(())

    def __len__(self) -> int:
        self.was_read = True
        return 0


def zero_steps(schedule: Schedule, steps: int) -> list[tuple[int, int]]:
    """Return the first and the last step of each run of steps, of 1 to ``steps``, at which a schedule is 0.

    Nothing is known of one that reads metrics or raises: it has none.
    """
    runs: list[tuple[int, int]] = []
    metrics = _NoMetrics()
    for step in range(1, steps + 1):
        try:
            value = schedule(step, metrics) if callable(schedule) else at_step(schedule, step)
        except Exception:
            return []
        if metrics.was_read:
            return []
        if value == 0:
            begin = runs.pop()[0] if runs and runs[-1][1] == step - 1 else step
            runs.append((begin, step))
    return runs


def cosine(step: int, metrics: Mapping[str, float], *, end: int, last: float = 0.0) -> float:
    """The value falls from 1 at step 0 to ``last`` at step ``end`` along half a cosine (Loshchilov & Hutter 2017) and
    stays there."""
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
    """The value is multiplied by ``1 + gain * clip(metric / target - 1, -0.2, 0.2)`` at each step: the adaptive KL
    weight of Ziegler et al. 2019 (section 2.2), as is the default of ``gain``. It stays within ``low`` and ``high``.

    Args:
        metric: the metric to bring to ``target``, such as ``actor/kl_loss`` or ``actor/entropy``.
        own: the metric that records this value (``schedule/...``), from which the next one is computed.
        initial: the value before ``own`` is first recorded.
        gain: positive if raising the value lowers the metric; negative if raising it raises the metric.
    """
    value = metrics.get(own, initial)
    if metric in metrics:
        value *= 1 + gain * min(0.2, max(-0.2, metrics[metric] / target - 1))
    return min(high, max(low, value))


def towards(
    _: int,
    metrics: Mapping[str, float],
    *,
    metric: str,
    target: float,
    own: str,
    initial: float = 0.0,
    step: float,
    low: float = 0.0,
    high: float = math.inf,
) -> float:
    """Skywork-OR1's adaptive coefficient (He et al. 2025, arXiv 2505.22312, section 3.3): the value grows by ``step``
    after each step where ``metric`` was at most ``target`` and falls by it otherwise, within ``low`` and ``high``.

    Args:
        metric: a metric that raising the value raises, such as ``actor/entropy`` for an entropy bonus.
        own: the metric that records this value (``schedule/...``), from which the next one is computed.
        initial: the value before ``own`` is first recorded.
    """
    value = metrics.get(own, initial)
    if metric in metrics:
        value += step if metrics[metric] <= target else -step
    return min(high, max(low, value))


def valid_share(
    step: int,
    metrics: Mapping[str, float],
    *,
    target: float = 1.0,
    decay: float = 0.5,
    most: float = 8.0,
) -> float:
    """CodeV-R1's adaptive `loop.over_sampling`: ``target / share``, so that a round keeps about ``target`` groups for
    each one that the batch lacks.

    ``share = decay * share + (1 - decay) * kept`` after each step, with ``kept`` the metric ``group/kept_ratio``; it
    begins with the first step's and is read back from ``schedule/over_sampling``. The first step samples ``target``
    groups for each one. The form of the average and all defaults are inferred.

    Args:
        target: at least 1; above 1, a second round of sampling is rarer.
        decay: from 0 (the last step alone) to below 1.
        most: the value is at most this, so the average at least ``target / most``.

    Raises:
        UserError: an option is out of range, or the run has no such metrics.
    """
    if not 1 <= target <= most or not 0 <= decay < 1:
        raise UserError(
            f"The schedule 'valid_share' needs 1 <= target <= most and 0 <= decay < 1, not target = {target:g}, most = "
            f"{most:g}, decay = {decay:g}."
        )
    if not metrics:
        return target
    if "group/kept_ratio" not in metrics or "schedule/over_sampling" not in metrics:
        raise UserError("The schedule 'valid_share' is for loop.over_sampling, in a run with a loop.callback.")
    share = metrics["group/kept_ratio"]
    if step > 2:
        share = decay * target / metrics["schedule/over_sampling"] + (1 - decay) * share
    return min(most, target / share) if share > 0 else most


SCHEDULES: dict[str, Callable[..., float]] = {
    "cosine": cosine,
    "steer": steer,
    "towards": towards,
    "valid_share": valid_share,
}


def find_schedule(key: str, setting: float | str | Sequence[tuple[int, float]], options: Mapping[str, Any]) -> Schedule:
    """Return the schedule that ``key`` of the configuration gives: a number, points, or the name of a function.

    Raises:
        UserError: there is no such function, or it has no such option. The returned function raises it at a step where
            the value is not a finite number.
    """
    if not isinstance(setting, str):
        if options:
            raise UserError(f"{key}_options needs a function; name one in {key}, or leave the options out.")
        return setting
    function = resolve(key, setting, options, parts=SCHEDULES, inputs=("step", "metrics"))

    def value(step: int, metrics: Mapping[str, float]) -> float:
        number = function(step, metrics)
        if not isinstance(number, int | float) or not math.isfinite(number):
            raise UserError(f"{key} = '{setting}' must return a finite number; at step {step} it is {number!r}.")
        return float(number)

    return value


def scheduled(context: Context, name: str, key: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options``, those that are given as a table with ``schedule`` as values that change with the step.

    ``schedule`` is a list of points or the name of a function, whose options are the table's other keys.

    Args:
        context: the run's values, which keeps the schedules.
        name: begins the names under which metrics record the values, ``schedule/<name>.<option>``; a second part of
            that name adds ``.2``.
        key: the configuration's key of ``options``, for messages.

    Raises:
        UserError: a table is no schedule.
    """
    filled = dict(options)
    for option, setting in options.items():
        if isinstance(setting, dict) and "schedule" in setting:
            of = f"{key}.{option}"
            rest = {key: value for key, value in setting.items() if key != "schedule"}
            schedule = find_schedule(of, _points(of, setting["schedule"]), rest)
            filled[option] = Changing(partial(at_step, schedule), context)
            label, number = f"{name}.{option}", 2
            while label in context.schedules:  # two parts of one name
                label, number = f"{name}.{option}.{number}", number + 1
            context.schedules[label] = filled[option]
    return filled


def _points(key: str, setting: Any) -> float | str | list[tuple[int, float]]:
    """Return a schedule that is part of a table, checked.

    Raises:
        UserError: it is neither a number, nor a name, nor points of ascending steps.
    """
    if isinstance(setting, str) or (isinstance(setting, int | float) and not isinstance(setting, bool)):
        return setting
    try:
        points = [(int(step), float(value)) for step, value in setting]
    except (TypeError, ValueError):
        points = []
    ascending = all(before[0] < after[0] for before, after in pairwise(points))
    if not points or not ascending or points[0][0] < 0 or not all(math.isfinite(value) for _, value in points):
        raise UserError(
            f"{key}.schedule must be a name, or points [[step, value], ...] of ascending steps, not {setting!r}."
        )
    return points
