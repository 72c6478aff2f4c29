"""What a step costs by its branches and rows, learned from the steps there are."""

from __future__ import annotations

import math
from array import array
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

REMEMBERED = 256  # steps
HALF_LIFE = 64.0  # of a step's weight, in steps: contexts grow
FEWEST = 3.0  # weight of the steps that an estimate needs
KEPT = 8, 32  # steps for which an estimate is used: an eighth of those before it, within these bounds
OUTLIER = 3.0  # times as long as expected; a step that takes longer counts as one that takes so long
GUESS = np.array([0.5, 0.2, 0.3])  # shares of a step's time: fixed, by branches, by rows; as if one step had said so
TOGETHER = 8  # rows: products compute so many and more as one, so that times do not lie on a line
SIZES = 65  # such numbers of rows that are told apart


class Fit(NamedTuple):
    """What steps of about as many branches cost."""

    fixed: float  # seconds of a step
    branch: float
    row: float
    beyond: Array  # [SIZES], the share by which steps of so many eights of rows are above the line

    def seconds(self, branches: int, rows: Array) -> Array:
        """Of steps of so many rows each."""
        return (self.fixed + self.branch * branches + self.row * rows) * (1 + self.beyond[_size(rows)])


def _size(rows: Array) -> Array:
    return np.minimum((rows + TOGETHER - 1) // TOGETHER, SIZES - 1)


class StepCost:
    """Seconds of a step as ``fixed + a branches + b rows``, fitted to recent steps of about as many branches.

    Beside the line: how much steps of some numbers of rows were above or below it.

    Steps without drafts alone cannot tell branches from rows: then the guess of the shares decides, so that drafts that
    were not worth it for long are tried again.
    """

    def __init__(self) -> None:
        self._steps = array("d", bytes(8 * 3 * REMEMBERED))  # of each branches, rows, seconds
        self._count = 0
        self._fits: dict[int, tuple[int, Fit | None]] = {}  # by size: until which step

    def took(self, branches: int, queries: int, seconds: float) -> None:
        """A step of so many branches and rows took so long."""
        fit = self.fit(branches)
        if fit is not None:
            seconds = min(seconds, OUTLIER * (fit.fixed + fit.branch * branches + fit.row * queries))
        at = 3 * (self._count % REMEMBERED)
        self._steps[at], self._steps[at + 1], self._steps[at + 2] = branches, queries, seconds
        self._count += 1

    def fit(self, branches: int) -> Fit | None:
        """For steps of so many branches; None where too little is known."""
        size = round(8 * math.log2(branches))  # within a tenth
        until, fit = self._fits.get(size, (0, None))
        if fit is None or self._count >= until:
            fit = self._fit(branches)
            self._fits[size] = self._count + min(max(self._count // 8, KEPT[0]), KEPT[1]), fit
        return fit

    def _fit(self, branches: int) -> Fit | None:
        n = min(self._count, REMEMBERED)
        age = (self._count - 1 - np.arange(n)) % REMEMBERED
        steps = np.frombuffer(self._steps).reshape(-1, 3)[:n]
        weight = np.exp2(-age / HALF_LIFE - np.log2(np.maximum(steps[:, 0], 1) / branches) ** 2)
        if weight.sum() < FEWEST:
            return None
        mean = weight @ steps / weight.sum()
        scaled = steps / mean
        x = np.column_stack([np.ones(n), scaled[:, :2]])
        shares = np.linalg.solve((x.T * weight) @ x + np.eye(3), (x.T * weight) @ scaled[:, 2] + GUESS)
        fixed, branch, row = np.maximum(shares, (0.0, 0.0, 1e-3)) * mean[2] / (1.0, mean[0], mean[1])
        line = fixed + branch * steps[:, 0] + row * steps[:, 1]
        size = _size(steps[:, 1].astype(np.int64))
        above, seen = (np.bincount(size, w, SIZES) for w in (weight * (steps[:, 2] / line - 1), weight))
        return Fit(float(fixed), float(branch), float(row), above / (seen + 1))
