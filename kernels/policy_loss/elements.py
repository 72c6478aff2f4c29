"""The definition of the policy loss on elements, in the words of `elementwise`: PyTorch runs it (`reference`), Triton
compiles it (`triton`), CUDA C++ has its clipped-ratio case by hand (csrc/cuda/policy_loss.cu).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .elementwise import MAX_LOG_RATIO, clamp, exp, expm1, isfinite, ratio, where, zeros_like
from .kl import Estimator
from .surrogates import Formula, Spec, Token


class Elements(NamedTuple):
    """Inputs of the elementwise loss, each [M] in one dtype, None where absent."""

    logprob: Tensor
    adv_pos: Tensor
    adv_neg: Tensor
    weight: Tensor
    all_weight: Tensor | None = None  # of g_all; None: `weight`
    log_ratio: Tensor | None = None  # None: 0
    low: Tensor | None = None  # bounds of the ratio; None: 1 - eps_low and 1 + eps_high
    high: Tensor | None = None
    extra: Tensor | None = None
    old_logprob: Tensor | None = None  # None: the current one
    ref_logprob: Tensor | None = None
    behaviour_logprob: Tensor | None = None  # NaN where not known
    entropy: Tensor | None = None
    pos_weight: Tensor | None = None  # both or none
    neg_weight: Tensor | None = None
    mask: Tensor | None = None  # bool; what is not masked in never reaches a formula's result


class Kind(NamedTuple):
    """What the elementwise kernels are compiled for."""

    surrogate: str
    kl: str
    kl_importance: bool
    mismatch: str  # "none", "truncate" or "mask", of tokens


class Sums(NamedTuple):
    """What is added up over the elements: the loss, and what metrics are made of. Backends hand the sums on by these
    names. All but the first are weighted by S_1, those of the mismatch where a behaviour log-prob is known.
    """

    loss: Tensor | float
    pg_loss: Tensor | float
    clipped: Tensor | float
    clipped_lower: Tensor | float
    ppo_kl: Tensor | float
    entropy: Tensor | float
    kl: Tensor | float
    mismatch_k3: Tensor | float
    mismatch_probability: Tensor | float
    mismatch_weight: Tensor | float
    mismatch_rejected: Tensor | float
    behaviour_count: Tensor | float
    tokens: Tensor | float


class _Surrogate(NamedTuple):
    value: Tensor
    d_logprob: Tensor
    clipped: Tensor | float
    clipped_lower: Tensor | float


class _Mismatch(NamedTuple):
    factor: Tensor | None = None  # of the surrogate; None: 1
    k3: Tensor | float = 0.0
    probability: Tensor | float = 0.0
    weight: Tensor | float = 0.0
    rejected: Tensor | float = 0.0
    known: Tensor | float = 0.0


class _Term(NamedTuple):
    value: Tensor | None = None  # what is added to the loss; None: nothing
    derivative: Tensor | float = 0.0
    metric: Tensor | float = 0.0


def losses(
    x: Elements,
    n: Spec,
    surrogate: Formula,
    kl: Estimator,
    straight_through: bool,
    kl_importance: bool,
    mismatch: str,
) -> tuple[Tensor, Tensor | float, Sums]:
    """``(d/dlogprob, d/dentropy, what is to be added up)``, of each element; numbers stand for all of them."""
    old = x.logprob if x.old_logprob is None else x.old_logprob
    d = zeros_like(x.logprob) if x.log_ratio is None else x.log_ratio
    of = _surrogate(x, n, d, surrogate)
    sampler = _mismatch(x, n, old, mismatch)
    pg = of.value
    grad = of.d_logprob
    if sampler.factor is not None:
        pg = sampler.factor * pg
        grad = sampler.factor * grad
    loss = pg
    penalty = _penalty(x, n, d, kl, straight_through, kl_importance)
    if penalty.value is not None:
        loss = loss + penalty.value
        grad = grad + penalty.derivative
    bonus = _bonus(x, n)
    if bonus.value is not None:
        loss = loss - bonus.value
    sums = Sums(
        loss=loss,
        pg_loss=pg,
        clipped=of.clipped,
        clipped_lower=of.clipped_lower,
        ppo_kl=x.weight * (old - x.logprob),
        entropy=bonus.metric,
        kl=penalty.metric,
        mismatch_k3=sampler.k3,
        mismatch_probability=sampler.probability,
        mismatch_weight=sampler.weight,
        mismatch_rejected=sampler.rejected,
        behaviour_count=sampler.known,
        tokens=x.weight,
    )
    return grad, bonus.derivative, sums


def _surrogate(x: Elements, n: Spec, d: Tensor, surrogate: Formula) -> _Surrogate:
    low = 1 - n.eps_low if x.low is None else x.low
    high = 1 + n.eps_high if x.high is None else x.high
    g = surrogate(Token(x.logprob, d, low, high, x.extra), n)  # type: ignore[arg-type]
    of_all = x.weight if x.all_weight is None else x.all_weight
    if g.pos is None or g.neg is None:
        return _Surrogate(of_all * g.all, of_all * g.d_all, 0.0, 0.0)  # type: ignore[operator]
    pg = x.adv_pos * g.pos - x.adv_neg * g.neg
    grad = x.adv_pos * g.d_pos - x.adv_neg * g.d_neg
    if g.all is not None:
        pg = pg + of_all * g.all
        grad = grad + of_all * g.d_all
    if g.clipped_neg is None:
        return _Surrogate(pg, grad, 0.0, 0.0)
    # A shared token counts as clipped for the leaves of the side that is.
    if x.pos_weight is None or x.neg_weight is None:
        size = x.adv_pos - x.adv_neg
        size = where(size > 0, size, 1.0)
        of_pos = x.weight * (x.adv_pos / size)
        of_neg = x.weight * (-x.adv_neg / size)
    else:
        of_pos = where(x.adv_pos > 0, x.pos_weight, 0.0)
        of_neg = where(x.adv_neg < 0, x.neg_weight, 0.0)
    clipped = where(g.clipped_neg, of_neg, 0.0)
    if g.clipped_pos is not None:
        clipped = where(g.clipped_pos, of_pos, 0.0) + clipped
    return _Surrogate(pg, grad, clipped, 0.0 if g.clipped_lower is None else where(g.clipped_lower, of_neg, 0.0))


def _mismatch(x: Elements, n: Spec, old: Tensor, mismatch: str) -> _Mismatch:
    if x.behaviour_logprob is None:
        return _Mismatch()
    finite = isfinite(x.behaviour_logprob)
    behaviour = where(finite, x.behaviour_logprob, old)
    gap = clamp(old - behaviour, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    known = where(finite, x.weight, 0.0)
    k3 = where(known != 0, known * (expm1(gap) - gap), 0.0)
    probability = where(known != 0, known * abs(exp(old) - exp(behaviour)), 0.0)
    if mismatch == "none":
        return _Mismatch(k3=k3, probability=probability, known=known)
    w = exp(gap)
    if mismatch == "truncate":
        w = clamp(w, n.mismatch_low, n.mismatch_cap)
        return _Mismatch(w, k3, probability, x.weight * w, 0.0, known)
    outside = (w > n.mismatch_cap) | (w < n.mismatch_low)
    w = where(outside, 0.0, w)
    return _Mismatch(w, k3, probability, x.weight * w, where(outside, x.weight, 0.0), known)


def _penalty(x: Elements, n: Spec, d: Tensor, kl: Estimator, straight_through: bool, kl_importance: bool) -> _Term:
    if x.ref_logprob is None:
        return _Term()
    gap = x.ref_logprob - x.logprob
    estimate, derivative = kl(gap)
    if straight_through:
        derivative = -gap
    if kl_importance:
        r, dr = ratio(d)
        derivative = r * derivative + dr * estimate
        estimate = r * estimate
    if n.kl_coef is None:
        return _Term(metric=x.weight * estimate)
    weight = x.weight * n.kl_coef
    return _Term(weight * estimate, weight * derivative, x.weight * estimate)


def _bonus(x: Elements, n: Spec) -> _Term:
    """Its derivative is the loss's, by the entropy."""
    if x.entropy is None:
        return _Term()
    if n.entropy_coef is None:
        return _Term(metric=x.weight * x.entropy)
    return _Term(x.weight * n.entropy_coef * x.entropy, -n.entropy_coef * x.weight, x.weight * x.entropy)
