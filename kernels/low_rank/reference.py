"""The definition in plain PyTorch, with the roundings of peft's modules."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .adapters import Adapters
from .runs import Runs


def add_low_rank(out: Tensor, x: Tensor, adapters: Adapters, runs: Runs) -> None:  # [N, M], [N, K]
    for begin, end, number in runs:
        if (adapter := adapters.of[number]) is not None:
            out[begin:end] += F.linear(F.linear(x[begin:end], adapter.a), adapter.b) * adapter.scale
