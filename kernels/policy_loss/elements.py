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
    clipped: Tensor | float = 0.0
    clipped_lower: Tensor | float = 0.0


class _Mismatch(NamedTuple):
    factor: Tensor | float = 1.0  # of the surrogate
    k3: Tensor | float = 0.0
    probability: Tensor | float = 0.0
    known: Tensor | float = 0.0
    weight: Tensor | float = 0.0
    rejected: Tensor | float = 0.0


def losses(
    x: Elements,
    n: Spec,
    surrogate: Formula,
    signed: bool,  # these three: what the surrogate has
    of_all: bool,
    bounded: bool,
    kl: Estimator,
    straight_through: bool,
    kl_importance: bool,
    mismatch: str,
) -> tuple[Tensor, Tensor | float, Sums]:
    """``(d/dlogprob, d/dentropy, what is to be added up)``, of each element; numbers stand for all of them."""
    old = x.logprob if x.old_logprob is None else x.old_logprob
    d = zeros_like(x.logprob) if x.log_ratio is None else x.log_ratio
    g = _surrogate(x, n, d, surrogate, signed, of_all, bounded)
    pg = g.value
    grad = g.d_logprob
    sampler = _mismatch(x, n, old, mismatch)
    if mismatch != "none" and x.behaviour_logprob is not None:
        pg = sampler.factor * pg
        grad = sampler.factor * grad
    loss = pg
    kl_estimate, d_kl = _kl(x, d, kl, straight_through, kl_importance)
    if n.kl_coef is not None and x.ref_logprob is not None:
        loss = loss + x.weight * n.kl_coef * kl_estimate
        grad = grad + x.weight * n.kl_coef * d_kl
    d_entropy, entropy = 0.0, 0.0
    if x.entropy is not None:
        entropy = x.weight * x.entropy  # type: ignore[assignment]
        if n.entropy_coef is not None:
            loss = loss - x.weight * n.entropy_coef * x.entropy
            d_entropy = -n.entropy_coef * x.weight  # type: ignore[assignment]
    sums = Sums(
        loss=loss,
        pg_loss=pg,
        clipped=g.clipped,
        clipped_lower=g.clipped_lower,
        ppo_kl=x.weight * (old - x.logprob),
        entropy=entropy,
        kl=0.0 if x.ref_logprob is None else x.weight * kl_estimate,
        mismatch_k3=sampler.k3,
        mismatch_probability=sampler.probability,
        mismatch_weight=sampler.weight,
        mismatch_rejected=sampler.rejected,
        behaviour_count=sampler.known,
        tokens=x.weight,
    )
    return grad, d_entropy, sums


def _surrogate(
    x: Elements, n: Spec, d: Tensor, surrogate: Formula, signed: bool, of_all: bool, bounded: bool
) -> _Surrogate:
    low = 1 - n.eps_low if x.low is None else x.low
    high = 1 + n.eps_high if x.high is None else x.high
    g = surrogate(Token(x.logprob, d, low, high, x.extra), n)  # type: ignore[arg-type]
    weight = x.weight if x.all_weight is None else x.all_weight
    if signed:
        value = x.adv_pos * g.pos - x.adv_neg * g.neg
        derivative = x.adv_pos * g.d_pos - x.adv_neg * g.d_neg
        if of_all:
            value = value + weight * g.all
            derivative = derivative + weight * g.d_all
    else:
        value = weight * g.all
        derivative = weight * g.d_all
    if bounded:
        # A shared token counts as clipped for the leaves of the side that is.
        if x.pos_weight is None or x.neg_weight is None:
            size = x.adv_pos - x.adv_neg
            size = where(size > 0, size, 1.0)
            of_pos = x.weight * (x.adv_pos / size)
            of_neg = x.weight * (-x.adv_neg / size)
        else:
            of_pos = where(x.adv_pos > 0, x.pos_weight, 0.0)
            of_neg = where(x.adv_neg < 0, x.neg_weight, 0.0)
        clipped = of_pos * g.clipped_pos + of_neg * g.clipped_neg
        return _Surrogate(value, derivative, clipped, of_neg * g.clipped_lower)
    else:
        return _Surrogate(value, derivative)


def _mismatch(x: Elements, n: Spec, old: Tensor, mismatch: str) -> _Mismatch:
    if x.behaviour_logprob is None:
        return _Mismatch()
    else:
        finite = isfinite(x.behaviour_logprob)
        behaviour = where(finite, x.behaviour_logprob, old)
        gap = clamp(old - behaviour, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        known = where(finite, x.weight, 0.0)
        k3 = where(known != 0, known * (expm1(gap) - gap), 0.0)
        probability = where(known != 0, known * abs(exp(old) - exp(behaviour)), 0.0)
        if mismatch == "none":
            return _Mismatch(1.0, k3, probability, known)
        elif mismatch == "truncate":
            w = clamp(exp(gap), n.mismatch_low, n.mismatch_cap)
            return _Mismatch(w, k3, probability, known, x.weight * w)
        else:
            w = exp(gap)
            outside = (w > n.mismatch_cap) | (w < n.mismatch_low)
            w = where(outside, 0.0, w)
            return _Mismatch(w, k3, probability, known, x.weight * w, where(outside, x.weight, 0.0))


def _kl(
    x: Elements, d: Tensor, kl: Estimator, straight_through: bool, kl_importance: bool
) -> tuple[Tensor | float, Tensor | float]:
    if x.ref_logprob is None:
        return 0.0, 0.0
    else:
        gap = x.ref_logprob - x.logprob
        estimate, derivative = kl(gap)
        if straight_through:
            derivative = -gap
        if kl_importance:
            r, dr = ratio(d)
            derivative = r * derivative + dr * estimate
            estimate = r * estimate
        return estimate, derivative
