"""The rows of a step that have adapters, as runs of neighbours with the same one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

Array = npt.NDArray[Any]
TILE = 16
"""Most rows of a tile."""


@dataclass(frozen=True)
class Runs:
    """Rows of a step by their adapters."""

    rows: int
    """Rows of the step, those without an adapter included."""
    numbers: Sequence[int]
    """First row, end and adapter of each run, one run after the other; in order."""
    tiles: Tensor | None = None
    """[T, 3] int32 on the device, see `tiles_of`, for kernels that are launched tile by tile. Tiles of zeros are
    padding."""

    @staticmethod
    def of(adapter: Array) -> Runs:  # [N] int
        """Return the runs of rows with the numbers ``adapter``, -1 for rows without one."""
        first = np.flatnonzero(np.diff(adapter, prepend=adapter[:1] - 1))
        last, adapted = np.append(first, len(adapter))[1:], adapter[first] >= 0
        columns = first[adapted], last[adapted], adapter[first[adapted]]
        return Runs(len(adapter), np.stack(columns, 1).reshape(-1).tolist())

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Yield first row, end and adapter of each run."""
        return zip(self.numbers[::3], self.numbers[1::3], self.numbers[2::3], strict=True)


def tiles_of(runs: Runs) -> Array:  # [T, 3] int32
    """Return the runs cut into tiles of at most `TILE` rows, each with its first row, its end and its adapter."""
    tiles = [
        (begin, min(begin + TILE, end), adapter) for first, end, adapter in runs for begin in range(first, end, TILE)
    ]
    return np.array(tiles, np.int32).reshape(-1, 3)
