"""Sums over runs of equal labels."""

from __future__ import annotations

import torch
from torch import Tensor


class RunSum:
    """``[M] -> [M]``: the sum over the run of equal labels that an element is in."""

    def __init__(self, label: Tensor) -> None:
        M = len(label)
        place = torch.arange(M, device=label.device)
        begins = torch.ones(M, dtype=torch.bool, device=label.device)
        begins[1:] = label[1:] != label[:-1]
        self.first = torch.where(begins, place, 0).cummax(0).values if M else place
        ends = begins.roll(-1)
        self.last = torch.where(ends, place, M).flip(0).cummin(0).values.flip(0) if M else place

    def __call__(self, values: Tensor) -> Tensor:
        before = torch.cat([values.new_zeros(1, dtype=torch.float64), values.cumsum(0, dtype=torch.float64)])
        return (before[self.last + 1] - before[self.first]).to(values.dtype)
