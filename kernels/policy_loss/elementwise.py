"""The words that formulas on elements are written in, as torch has them; `triton` has the same words in its language.

A function of these, of arithmetic and comparisons, of ``abs`` and of tests against None or an option's name has one
text that PyTorch runs and Triton compiles (`triton.compiled`). Conditions on elements are joined by ``&`` and ``|``;
what must not be compiled where an ``if`` returns stands in its ``else``.
"""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""|log-ratios| are clamped here: exp stays finite and a runaway token gets no gradient."""
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
    """NaN stays NaN, here and below."""
    return x.clamp(max=high)


def clamp(x: Tensor, low: float, high: float) -> Tensor:
    return x.clamp(low, high)


def ratio(d: Tensor) -> tuple[Tensor, Tensor]:
    """``r`` and ``dr/dlogprob`` of a log-ratio: both e^d, the latter 0 where d was clamped."""
    r = exp(clamp(d, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return r, where(abs(d) <= MAX_LOG_RATIO, r, 0.0)
