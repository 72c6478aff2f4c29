"""What a step costs by its branches and rows, learned from the steps there are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
PACE = 0.2  # how far an estimate moves towards a new time
JUMP = 0.5  # most that one time, as another job's load may cause, moves it, as a share of itself
MEMORY = 256  # steps of so many branches after which an estimate is too old to believe
REACH = 2.0  # steps of up to so many times the rows that were measured are tried


@dataclass
class Point:
    queries: float
    seconds: float
    at: int


class StepCost:
    """Seconds of a step of some branches with drafts, from steps of about as many branches (within a power of two).

    What was never measured, or long ago, is taken to cost what fewer rows do, up to `REACH` times as many: so it is
    tried, and known from then on.
    """

    def __init__(self) -> None:
        self._points: dict[int, dict[int, Point]] = {}
        self._steps: dict[int, int] = {}

    def took(self, branches: int, queries: int, seconds: float) -> None:
        """A step of so many branches and rows took so long."""
        size = _size(branches)
        now = self._steps[size] = self._steps.get(size, 0) + 1
        points = self._points.setdefault(size, {})
        # half octaves; steps without drafts are apart from those with few
        key = -1 if queries == branches else round(2 * math.log2(queries))
        point = points.get(key)
        if point is None or now - point.at > MEMORY:
            points[key] = Point(queries, seconds, now)
            return
        most = JUMP * point.seconds
        point.seconds += PACE * min(max(seconds - point.seconds, -most), most)
        point.queries += PACE * (queries - point.queries)
        point.at = now

    def seconds(self, branches: int, queries: Array) -> Array | None:  # [n] -> [n]
        """Estimates for steps of so many rows, infinite beyond reach; None where steps without drafts are not known."""
        size = _size(branches)
        now = self._steps.get(size, 0)
        known = {key: p for key, p in self._points.get(size, {}).items() if now - p.at <= MEMORY}
        if -1 not in known:
            return None
        points = sorted(known.values(), key=lambda point: point.queries)
        at = np.array([point.queries for point in points])
        times = np.maximum.accumulate([point.seconds for point in points])
        return np.where(queries <= max(REACH * at[-1], branches + 4), np.interp(queries, at, times), np.inf)


def _size(branches: int) -> int:
    return (branches - 1).bit_length()
