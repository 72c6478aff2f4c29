"""The functions that formulas on elements are written with, as torch has them; `triton` maps them to Triton's.

A formula that uses only these, arithmetic, comparisons, ``abs``, and tests against None or an option's name has one
text, which PyTorch runs and Triton compiles (`triton.compiled`). Conditions on elements are joined by ``&`` and ``|``.
Where an ``if`` returns, code that must not be compiled with it stands in its ``else``.
"""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +- this: exp stays finite, and a token beyond it gets no gradient."""
TINY = 1e-8

exp, expm1, log, sigmoid = torch.exp, torch.expm1, torch.log, torch.sigmoid
sign, isfinite, zeros_like = torch.sign, torch.isfinite, torch.zeros_like


@overload
def where(condition: Tensor, yes: Tensor, no: Tensor | float) -> Tensor: ...
@overload
def where(condition: Tensor, yes: Tensor | float, no: Tensor) -> Tensor: ...
def where(condition: Tensor, yes: Tensor | float, no: Tensor | float) -> Tensor:
    result: Tensor = torch.where(condition, yes, no)
    return result


def minimum(x: Tensor, high: Tensor | float) -> Tensor:
    """Return ``min(x, high)``; NaN stays NaN, here and in `clamp`."""
    return x.clamp(max=high)


def clamp(x: Tensor, low: float, high: float) -> Tensor:
    return x.clamp(low, high)


def ratio(d: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``r = e^d`` and ``dr/dlogprob`` of a log-ratio; the latter is 0 where d was clamped."""
    r = exp(clamp(d, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return r, where(abs(d) <= MAX_LOG_RATIO, r, 0.0)
