"""The adapters of a product, found by their numbers in one table that all backends read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import Arguments

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The dtypes of rows and adapters; float64 runs on the reference, for checks."""


class LowRank(NamedTuple):
    """A low-rank adapter of a product: its weight acts as ``weight + scale b a``."""

    a: Tensor  # [r, K]
    b: Tensor  # [M, r]
    scale: float


class Adapters:
    """The adapters of a product with ``weight [M, K]``, by number.

    They are used as they are where they have the dtype and lie contiguous, so changes in place take effect; others are
    copied.

    Args:
        of: the adapter of each number; None where it has no part in this product.
        weight: gives width, depth, device and dtype.
        dtype: of rows and adapters, instead of the weight's.

    Raises:
        ValueError, TypeError: a shape, dtype or device that does not fit.
    """

    def __init__(self, of: Sequence[LowRank | None], weight: Tensor, dtype: torch.dtype | None = None) -> None:
        check = Arguments("Adapters", "weight", weight)
        width, depth = check.tensor("weight", weight, ("M", "K")).shape
        self.dtype = weight.dtype if dtype is None else dtype
        check.require(self.dtype in DTYPES, f"adapters cannot be {self.dtype}")
        checked: list[LowRank | None] = []
        for one in of:
            if one is not None:
                rank = len(check.floats("a", one.a, ("r", depth), " like weight"))
                check.floats("b", one.b, (width, rank), " like weight and a")
                a, b = (t.detach().to(self.dtype).contiguous() for t in (one.a, one.b))
                one = LowRank(a, b, check.number("scale", one.scale))
            checked.append(one)
        self.of = tuple(checked)
        self.shape = width, depth
        self.device = weight.device
        rows = [(0, 0, 0) if one is None else (one.a.data_ptr(), one.b.data_ptr(), len(one.a)) for one in checked]
        self.matrices = torch.tensor(rows, dtype=torch.int64).view(-1, 3).to(self.device)
        """[G, 3] int64: the addresses of a and b, and the rank; zeros where there is none."""
        scales = [0.0 if one is None else one.scale for one in checked]
        self.scales = torch.tensor(scales, dtype=torch.float32, device=self.device)
        """[G] float32."""
        self.most_rank = max((rank for *_, rank in rows), default=0)
