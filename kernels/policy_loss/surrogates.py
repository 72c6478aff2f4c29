"""Surrogates and KL estimators: pure elementwise formulas, each with its derivative.

A surrogate is one function from log-prob and log-ratio ``d`` (r = exp d) to the values of g and their derivatives by
the log-prob, which differ where a stop-gradient stands in the formula. To add one, write the function, name it in
``SURROGATES``, add its branch to `triton._surrogate` and its row to the test table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""|log-ratios| are clamped here: exp stays finite and a runaway token gets no gradient."""
TINY = 1e-8


class Spec(NamedTuple):
    """The numbers of an objective that the elementwise kernels read."""

    eps_low: float
    eps_high: float
    clip_ratio_c: float  # inf: none
    tau_pos: float
    tau_neg: float
    beta: float
    kl_coef: float
    entropy_coef: float
    mismatch_low: float
    mismatch_cap: float


class Pairs(NamedTuple):
    """What a surrogate may read, each [M]; absent tensors are None."""

    logprob: Tensor
    d: Tensor
    low: Tensor | None  # bounds of the ratio; None: 1 - eps_low and 1 + eps_high
    high: Tensor | None
    extra: Tensor | None  # `Objective.extra_field`

    def bounds(self, spec: Spec) -> tuple[Tensor | float, Tensor | float]:
        return (
            1 - spec.eps_low if self.low is None else self.low,
            1 + spec.eps_high if self.high is None else self.high,
        )


class Terms(NamedTuple):
    """Values of g and derivatives by the log-prob, each [M]; and where a bound acts, as booleans [M]."""

    pos: Tensor
    neg: Tensor
    all: Tensor
    d_pos: Tensor
    d_neg: Tensor
    d_all: Tensor
    clipped_pos: Tensor  # r > 1 + eps_high, or what stands for it
    clipped_neg: Tensor  # r < 1 - eps_low
    clipped_lower: Tensor  # dual clip: above clip_ratio_c


def ratio(d: Tensor) -> tuple[Tensor, Tensor]:
    """``r`` and ``dr/dlogprob`` of a log-ratio [M]: both e^d, the latter 0 where d was clamped."""
    r = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return r, torch.where(d.abs() <= MAX_LOG_RATIO, r, 0)


def _signed(
    pos: Tensor,
    neg: Tensor,
    d_pos: Tensor,
    d_neg: Tensor,
    all_: Tensor | None = None,
    d_all: Tensor | None = None,
    clipped_pos: Tensor | None = None,
    clipped_neg: Tensor | None = None,
) -> Terms:
    zero, never = torch.zeros_like(pos), torch.zeros_like(pos, dtype=torch.bool)

    def given(t: Tensor | None, default: Tensor) -> Tensor:
        return default if t is None else t

    return Terms(
        pos, neg, given(all_, zero), d_pos, d_neg, given(d_all, zero),
        given(clipped_pos, never), given(clipped_neg, never), never,
    )  # fmt: skip


def _for_all(value: Tensor, derivative: Tensor) -> Terms:
    zero = torch.zeros_like(value)
    return _signed(zero, zero, zero, zero, value, derivative)


def _ppo(x: Pairs, spec: Spec) -> Terms:
    r, dr = ratio(x.d)
    low, high = x.bounds(spec)
    over, under = r > high, r < low
    neg = torch.where(under, low, r)
    beyond = neg > spec.clip_ratio_c
    d_neg = torch.where(~under & ~beyond, dr, 0)
    zero = torch.zeros_like(r)
    pos = -torch.where(over, high, r)
    return Terms(
        pos, neg.clamp(max=spec.clip_ratio_c), zero, torch.where(over, 0, -dr), d_neg, zero, over, under, beyond
    )


def _unclipped(x: Pairs, spec: Spec) -> Terms:
    r, dr = ratio(x.d)
    return _signed(-r, r, -dr, dr)


def _cispo(x: Pairs, spec: Spec) -> Terms:
    r, _ = ratio(x.d)
    low, high = x.bounds(spec)
    over, under = r > high, r < low
    w = torch.where(over, high, torch.where(under, low, r))
    return _signed(-w * x.logprob, w * x.logprob, -w, w, clipped_pos=over, clipped_neg=under)


def _sapo(x: Pairs, spec: Spec) -> Terms:
    r, dr = ratio(x.d)
    pos, neg = torch.sigmoid(spec.tau_pos * (r - 1)), torch.sigmoid(spec.tau_neg * (r - 1))
    d_pos, d_neg = -4 * pos * (1 - pos) * dr, 4 * neg * (1 - neg) * dr
    return _signed(-4 / spec.tau_pos * pos, 4 / spec.tau_neg * neg, d_pos, d_neg)


def _reinforce(x: Pairs, spec: Spec) -> Terms:
    one = torch.ones_like(x.logprob)
    return _signed(-x.logprob, x.logprob, -one, one)


def _masked_importance(x: Pairs, spec: Spec, bad_pos: Tensor, bad_neg: Tensor) -> Terms:
    r, _ = ratio(x.d)
    w = r.clamp(max=spec.clip_ratio_c)
    pos, neg = torch.where(bad_pos, 0, w), torch.where(bad_neg, 0, w)
    return _signed(-pos * x.logprob, neg * x.logprob, -pos, neg, clipped_pos=bad_pos, clipped_neg=bad_neg)


def _dppo_tv(x: Pairs, spec: Spec) -> Terms:
    moved = x.logprob.exp() - (x.logprob - x.d).exp()
    return _masked_importance(x, spec, moved > spec.eps_high, moved < -spec.eps_low)


def _dppo_kl(x: Pairs, spec: Spec) -> Terms:
    old = x.logprob - x.d
    p, q = x.logprob.exp(), old.exp()
    divergence = -q * x.d + (1 - q) * torch.log((1 - q + TINY) / (1 - p + TINY))
    return _masked_importance(x, spec, (divergence > spec.eps_high) & (p > q), (divergence > spec.eps_low) & (p < q))


def _dro(x: Pairs, spec: Spec) -> Terms:
    one = torch.ones_like(x.logprob)
    return _signed(-x.logprob, x.logprob, -one, one, 0.5 * spec.beta * x.d * x.d, spec.beta * x.d)


def _kl_cov(x: Pairs, spec: Spec) -> Terms:
    r, dr = ratio(x.d)
    return _signed(-r, r, -dr, dr, spec.beta * x.d.abs(), spec.beta * x.d.sign())


def _nft(x: Pairs, spec: Spec) -> Terms:
    assert x.extra is not None
    r, dr = ratio(x.d)
    q = x.extra.clamp(max=1 - 1e-6)
    rest = (1 - q * r) / (1 - q)
    floor = rest < spec.beta
    one = torch.ones_like(r)
    inside = torch.where(floor, spec.beta, rest)
    return _signed(-x.d, -inside.log(), -one, torch.where(floor, 0, q * dr / ((1 - q) * inside)), clipped_neg=floor)


def _nll(x: Pairs, spec: Spec) -> Terms:
    return _for_all(-x.logprob, -torch.ones_like(x.logprob))


def _distill_reverse(x: Pairs, spec: Spec) -> Terms:
    assert x.extra is not None
    away = x.logprob - x.extra
    return _for_all(away * x.logprob, away)


def _distill_forward(x: Pairs, spec: Spec) -> Terms:
    assert x.extra is not None
    w = (x.extra - x.logprob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=spec.clip_ratio_c)
    return _for_all(-w * x.logprob, -w)


SURROGATES: dict[str, Callable[[Pairs, Spec], Terms]] = {
    "ppo": _ppo,
    "unclipped": _unclipped,
    "cispo": _cispo,
    "sapo": _sapo,
    "reinforce": _reinforce,
    "dppo_tv": _dppo_tv,
    "dppo_kl": _dppo_kl,
    "dro": _dro,
    "kl_cov": _kl_cov,
    "nft": _nft,
    "nll": _nll,
    "distill_reverse": _distill_reverse,
    "distill_forward": _distill_forward,
}


def kl_terms(logprob: Tensor, ref_logprob: Tensor, estimator: str) -> tuple[Tensor, Tensor]:
    """KL estimate and its derivative by the log-prob, each [M]. ``+``: the estimate's value with k2's derivative."""
    x = ref_logprob - logprob
    value, derivative = _kl(x, estimator.removesuffix("+"))
    return value, -x if estimator.endswith("+") else derivative


def _kl(x: Tensor, estimator: str) -> tuple[Tensor, Tensor]:
    match estimator:
        case "k1":
            return -x, torch.ones_like(x)
        case "abs":
            return x.abs(), -x.sign()
        case "k2":
            return 0.5 * x * x, -x
    inside = x.abs() <= MAX_LOG_RATIO
    x = x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3, derivative = torch.expm1(x) - x, torch.where(inside, -torch.expm1(x), 0)
    if estimator == "low_var":
        return k3.clamp(max=10), torch.where(k3 <= 10, derivative, 0)
    return k3, derivative


def dynamic_bounds(old_logprob: Tensor, eps_low: float, eps_high: float) -> tuple[Tensor, Tensor]:
    """Bounds of the ratio ``[M]`` each where ``|r - 1| p = eps``, p = r q: wide for unlikely tokens (DCPO).

    high = (1 + sqrt(1 + 4 eps_high / q)) / 2, low = (1 + sqrt(max(1 - 4 eps_low / q, 0))) / 2, q = exp(old_logprob).
    """
    inverse = (-old_logprob).clamp(max=MAX_LOG_RATIO).exp()
    low = 0.5 + 0.5 * (1 - 4 * eps_low * inverse).clamp(min=0).sqrt()
    return low, 0.5 + 0.5 * (1 + 4 * eps_high * inverse).sqrt()


LOG_TINY = math.log(TINY)
