"""The definition of the policy loss on elements, written with the functions of `elementwise`.

PyTorch runs it (`terms`; on a CPU it is also the fast one), and Triton compiles it (`triton`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .elementwise import MAX_LOG_RATIO, clamp, exp, expm1, isfinite, minimum, ratio, sign, where, zeros_like
from .surrogates import SURROGATES, Formula, Spec, Token

Estimator = Callable[[Tensor], tuple[Tensor, Tensor | float]]
"""An estimator of KL(policy, reference) from a sampled token: from ``x = ref - logprob`` to the estimate and its
derivative by the log-prob."""


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


ESTIMATORS: dict[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3, "low_var": low_var, "abs": absolute}


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
    mask: Tensor | None = None  # bool; False: the element reaches no result


class Kind(NamedTuple):
    """Options that the elementwise kernels are compiled for."""

    surrogate: str
    kl: str
    kl_importance: bool
    mismatch: str  # "none", "truncate" or "mask", of tokens


class Sums(NamedTuple):
    """Values that are added up over the elements: the loss, and the sums that metrics are made of.

    Backends return the sums under these names. All but the first are weighted by S_1; those of the mismatch count only
    elements whose behaviour log-prob is known.
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


SUMS = Sums._fields[1:]
"""The sums over elements that metrics are made of, in the order of `Evaluation.sums`."""


class _Surrogate(NamedTuple):
    value: Tensor
    d_logprob: Tensor
    clipped: Tensor | float = 0.0
    clipped_lower: Tensor | float = 0.0


class _Mismatch(NamedTuple):
    factor: Tensor | float = 1.0  # of the surrogate
    k3: Tensor | float = 0.0
    probability: Tensor | float = 0.0
    compared: Tensor | float = 0.0
    weight: Tensor | float = 0.0
    rejected: Tensor | float = 0.0


def losses(
    x: Elements,
    n: Spec,
    surrogate: Formula,
    signed: bool,  # these three are properties of the surrogate
    of_all: bool,
    bounded: bool,
    kl: Estimator,
    straight_through: bool,
    kl_importance: bool,
    mismatch: str,
) -> tuple[Tensor, Tensor | float, Sums]:
    """Return ``(d/dlogprob, d/dentropy, sums)`` of each element; a number holds for all of them."""
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
        behaviour_count=sampler.compared,
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
        # A shared token counts as clipped only for the leaves of the clipped side.
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
        compared = where(finite, x.weight, 0.0)
        k3 = where(compared != 0, compared * (expm1(gap) - gap), 0.0)
        probability = where(compared != 0, compared * abs(exp(old) - exp(behaviour)), 0.0)
        if mismatch == "none":
            return _Mismatch(1.0, k3, probability, compared)
        elif mismatch == "truncate":
            w = clamp(exp(gap), n.mismatch_low, n.mismatch_cap)
            return _Mismatch(w, k3, probability, compared, x.weight * w)
        else:
            w = exp(gap)
            outside = (w > n.mismatch_cap) | (w < n.mismatch_low)
            w = where(outside, 0.0, w)
            return _Mismatch(w, k3, probability, compared, x.weight * w, where(outside, x.weight, 0.0))


def _kl(
    x: Elements, d: Tensor, kl: Estimator, straight_through: bool, kl_importance: bool
) -> tuple[Tensor | float, Tensor | float]:
    if x.ref_logprob is None:
        return 0.0, 0.0
    else:
        gap = x.ref_logprob - x.logprob
        estimate, derivative = kl(gap)
        if kl_importance:
            r, dr = ratio(d)
            derivative = r * derivative + dr * estimate
            estimate = r * estimate
            if straight_through:
                derivative = r * -gap  # the KL's gradient by itself, so that r has none
        elif straight_through:
            derivative = -gap
        return estimate, derivative


def terms(x: Elements, kind: Kind, spec: Spec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``(sum of the losses [], d/dlogprob [M], d/dentropy [M] or [0], sums [len(SUMS)] fp64)``, by PyTorch."""
    surrogate = SURROGATES[kind.surrogate]
    grad, d_entropy, parts = losses(
        x,
        spec,
        surrogate.formula,
        surrogate.signed,
        surrogate.of_all,
        surrogate.bounded,
        ESTIMATORS[kind.kl.removesuffix("+")],
        kind.kl.endswith("+"),
        kind.kl_importance,
        kind.mismatch,
    )
    zero = torch.zeros_like(x.logprob)
    absent = torch.zeros((), dtype=torch.float64, device=zero.device)

    def live(values: Tensor | float) -> Tensor:
        values = values if isinstance(values, Tensor) else torch.full_like(zero, values)
        return values if x.mask is None else torch.where(x.mask, values, 0)

    sums = [live(row).sum(dtype=torch.float64) if isinstance(row, Tensor) else absent for row in parts]
    return (
        sums[0].to(zero.dtype),
        live(grad),
        x.logprob.new_empty(0) if x.entropy is None else live(d_entropy),
        torch.stack(sums[1:]),
    )
