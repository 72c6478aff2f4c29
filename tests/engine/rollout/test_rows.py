"""The columns of `RowTable` as numpy names their types."""

from __future__ import annotations

import types

import numpy as np
import numpy.typing as npt

from rolltree.engine.rollout.rows import element_type


def test_element_types_before_and_after_numpy_2_5() -> None:
    before = types.GenericAlias(np.ndarray, (tuple[int, ...], types.GenericAlias(np.dtype, (np.int64,))))
    after = types.GenericAlias(np.ndarray, (np.int64,))
    for array in (before, after, npt.NDArray[np.int64]):
        assert element_type(array) is np.int64
