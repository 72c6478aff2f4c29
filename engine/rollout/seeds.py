"""Seeds of branches: a hash of the way from the prompt, so that a sample never depends on who else is in the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def child_seed(
    seed: npt.ArrayLike,  # [...] int64
    index: npt.ArrayLike,  # [...] int64
) -> npt.NDArray[Any]:  # [...] int64
    """Seed of the child ``index`` of a branch: a step of splitmix64, whose mixing function is a bijection."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64
        z = np.asarray(seed, np.int64).astype(np.uint64)
        z = _mix(z) + (np.asarray(index, np.int64).astype(np.uint64) + np.uint64(1)) * GOLDEN
        return _mix(z).astype(np.int64)


def _mix(z: npt.NDArray[Any]) -> npt.NDArray[Any]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
