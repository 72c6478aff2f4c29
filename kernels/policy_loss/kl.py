"""Estimators of KL(policy, reference) from a sampled token, in the words of `elementwise`: with x = ref - logprob, the
estimate and its derivative by the log-prob.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .elementwise import MAX_LOG_RATIO, clamp, expm1, minimum, sign, where

Estimator = Callable[[Tensor], tuple[Tensor, Tensor | float]]


def k1(x: Tensor) -> tuple[Tensor, Tensor | float]:
    return -x, 1.0


def k2(x: Tensor) -> tuple[Tensor, Tensor | float]:
    return 0.5 * x * x, -x


def k3(x: Tensor) -> tuple[Tensor, Tensor]:
    inside = abs(x) <= MAX_LOG_RATIO
    x = clamp(x, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    growth = expm1(x)
    return growth - x, where(inside, -growth, 0.0)


def low_var(x: Tensor) -> tuple[Tensor, Tensor | float]:
    value, derivative = k3(x)
    return minimum(value, 10.0), where(value <= 10.0, derivative, 0.0)


def absolute(x: Tensor) -> tuple[Tensor, Tensor | float]:
    return abs(x), -sign(x)


ESTIMATORS: dict[str, Estimator] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "low_var": low_var,
    "abs": absolute,
}
