"""Surrogates: pure elementwise formulas, each with its derivative, written with the functions of `elementwise`.

A surrogate is one function from log-prob and log-ratio ``d`` (r = exp d) to the values of g (g_pos and g_neg together:
-+) and their derivatives by the log-prob, which differ where a stop-gradient sg is in the formula. PyTorch runs its
text and Triton compiles it, and the fields and options of an objective with it follow from what it reads. To add one,
write the function here, with what it reads and gives and the options of its preset if it has one of its name, and its
row in the test table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from .elementwise import MAX_LOG_RATIO, TINY, clamp, exp, log, minimum, ratio, sigmoid, sign, where


class Spec(NamedTuple):
    """The numbers of an objective that formulas read."""

    eps_low: float
    eps_high: float
    clip_ratio_c: float  # inf: none
    tau_pos: float
    tau_neg: float
    beta: float
    kl_coef: float | None  # None: the KL is a metric alone
    entropy_coef: float | None  # None: so is the entropy
    mismatch_low: float
    mismatch_cap: float


class Token(NamedTuple):
    """The values that a surrogate may read, each [M]."""

    logprob: Tensor
    d: Tensor
    low: Tensor | float  # bounds of the ratio
    high: Tensor | float
    extra: Tensor  # the field that the surrogate names


class Terms(NamedTuple):
    """Values of g, derivatives by the log-prob, and where a bound acts, each [M] or a number for all."""

    pos: Tensor | float = 0.0
    d_pos: Tensor | float = 0.0
    neg: Tensor | float = 0.0
    d_neg: Tensor | float = 0.0
    all: Tensor | float = 0.0
    d_all: Tensor | float = 0.0
    clipped_pos: Tensor | float = 0.0  # bool: r > 1 + eps_high, or the surrogate's own condition
    clipped_neg: Tensor | float = 0.0  # bool: r < 1 - eps_low
    clipped_lower: Tensor | float = 0.0  # bool: dual clip, above clip_ratio_c


Formula = Callable[[Token, Spec], Terms]


@dataclass(frozen=True)
class Surrogate:
    """A formula, what it reads and gives, and what an objective with it has by default."""

    formula: Formula
    reads: frozenset[str]  # fields of `Token` and `Spec`
    signed: bool = True  # it gives g_pos and g_neg
    of_all: bool = False  # it gives a g_all, whose weight is not an advantage
    bounded: bool = False  # it says where a bound acts
    extra: str | None = None  # the optional field of `PolicyFields` that is ``Token.extra``
    cap: float = math.inf  # clip_ratio_c where the objective gives none
    preset: dict[str, Any] | None = None  # options of the preset that has its name; None: there is none

    @property
    def of_ratio(self) -> bool:
        """True if the surrogate depends on the ratio alone, so that it may be a sequence's ratio as well."""
        return "d" in self.reads and not self.reads & {"logprob", "extra"} and not self.of_all


SURROGATES: dict[str, Surrogate] = {}


def surrogate(reads: str, **properties: Any) -> Callable[[Formula], Formula]:
    """Enter a function into ``SURROGATES`` under its name.

    ``reads`` lists names; ``properties`` are the other fields of `Surrogate`. A test compares all with the formula.
    """

    def enter(formula: Formula) -> Formula:
        SURROGATES[formula.__name__] = Surrogate(formula, frozenset(reads.split()), **properties)
        return formula

    return enter


@surrogate(reads="d low high clip_ratio_c", bounded=True, preset={})
def ppo(x: Token, n: Spec) -> Terms:
    """g_pos = -min(r, high), g_neg = max(r, low), the latter at most clip_ratio_c (dual clip; TRL's delta, from
    1 + eps_high on).
    """
    r, dr = ratio(x.d)
    over = r > x.high
    under = r < x.low
    floored = where(under, x.low, r)
    beyond = floored > n.clip_ratio_c
    return Terms(
        pos=-where(over, x.high, r),
        d_pos=where(over, 0.0, -dr),
        neg=minimum(floored, n.clip_ratio_c),
        d_neg=where(under | beyond, 0.0, dr),
        clipped_pos=over,
        clipped_neg=under,
        clipped_lower=beyond,
    )


@surrogate(reads="d")
def unclipped(x: Token, n: Spec) -> Terms:
    """-+ r."""
    r, dr = ratio(x.d)
    return Terms(pos=-r, d_pos=-dr, neg=r, d_neg=dr)


@surrogate(reads="logprob d low high", bounded=True, preset={})
def cispo(x: Token, n: Spec) -> Terms:
    """-+ sg(clip(r, low, high)) logprob. TRL's bound is 1 + eps_high with eps_low 1."""
    r, _ = ratio(x.d)
    over = r > x.high
    under = r < x.low
    w = where(over, x.high, where(under, x.low, r))
    return Terms(pos=-w * x.logprob, d_pos=-w, neg=w * x.logprob, d_neg=w, clipped_pos=over, clipped_neg=under)


@surrogate(reads="d tau_pos tau_neg", preset={"aggregation": "seq_mean_token_mean"})
def sapo(x: Token, n: Spec) -> Terms:
    """-+ (4 / tau) sigmoid(tau (r - 1))."""
    r, dr = ratio(x.d)
    pos = sigmoid(n.tau_pos * (r - 1))
    neg = sigmoid(n.tau_neg * (r - 1))
    return Terms(
        pos=-4 / n.tau_pos * pos,
        d_pos=-4 * pos * (1 - pos) * dr,
        neg=4 / n.tau_neg * neg,
        d_neg=4 * neg * (1 - neg) * dr,
    )


@surrogate(reads="logprob", preset={})
def reinforce(x: Token, n: Spec) -> Terms:
    """-+ logprob."""
    return Terms(pos=-x.logprob, d_pos=-1.0, neg=x.logprob, d_neg=1.0)


def _masked_importance(x: Token, n: Spec, bad_pos: Tensor, bad_neg: Tensor) -> Terms:
    r, _ = ratio(x.d)
    w = minimum(r, n.clip_ratio_c)
    pos = where(bad_pos, 0.0, w)
    neg = where(bad_neg, 0.0, w)
    return Terms(
        pos=-pos * x.logprob, d_pos=-pos, neg=neg * x.logprob, d_neg=neg, clipped_pos=bad_pos, clipped_neg=bad_neg
    )


@surrogate(reads="logprob d eps_low eps_high clip_ratio_c", bounded=True, cap=20.0, preset={})
def dppo_tv(x: Token, n: Spec) -> Terms:
    """-+ sg(min(r, clip_ratio_c)) logprob, 0 where the probability has moved by more than eps with the advantage."""
    moved = exp(x.logprob) - exp(x.logprob - x.d)
    return _masked_importance(x, n, moved > n.eps_high, moved < -n.eps_low)


@surrogate(reads="logprob d eps_low eps_high clip_ratio_c", bounded=True, cap=20.0, preset={})
def dppo_kl(x: Token, n: Spec) -> Terms:
    """Like dppo_tv, by the binary KL."""
    p = exp(x.logprob)
    q = exp(x.logprob - x.d)
    divergence = -q * x.d + (1 - q) * log((1 - q + TINY) / (1 - p + TINY))
    return _masked_importance(x, n, (divergence > n.eps_high) & (p > q), (divergence > n.eps_low) & (p < q))


@surrogate(reads="logprob d beta", of_all=True, preset={})  # the caller sets beta
def dro(x: Token, n: Spec) -> Terms:
    """reinforce + (beta / 2) (log r)^2."""
    return Terms(pos=-x.logprob, d_pos=-1.0, neg=x.logprob, d_neg=1.0, all=0.5 * n.beta * x.d * x.d, d_all=n.beta * x.d)


@surrogate(reads="d beta", of_all=True, preset={})
def kl_cov(x: Token, n: Spec) -> Terms:
    """-+ r + beta |log r|, the latter on tokens of large covariance alone (`rules.kl_cov`)."""
    r, dr = ratio(x.d)
    return Terms(pos=-r, d_pos=-dr, neg=r, d_neg=dr, all=n.beta * abs(x.d), d_all=n.beta * sign(x.d))


# beta is the floor of the implicit negative policy; reconstructed
@surrogate(reads="d extra beta", bounded=True, extra="pass_rate", preset={"beta": 1e-2})
def nft(x: Token, n: Spec) -> Terms:
    """-log r, and -log max((1 - q r) / (1 - q), beta), q the prompt's pass rate and +-w(q) the advantages, not
    normalised by the group.
    """
    r, dr = ratio(x.d)
    q = minimum(x.extra, 1 - 1e-6)
    rest = (1 - q * r) / (1 - q)
    floor = rest < n.beta
    inside = where(floor, n.beta, rest)
    return Terms(
        pos=-x.d, d_pos=-1.0, neg=-log(inside), d_neg=where(floor, 0.0, q * dr / ((1 - q) * inside)), clipped_neg=floor
    )


# token_weight says which tokens another policy wrote; beta is reconstructed
@surrogate(reads="logprob beta", preset={"beta": 0.1, "needs": ("token_weight",)})
def prob_shaping(x: Token, n: Spec) -> Terms:
    """-+ p / (p + beta), p = e^logprob: for tokens of other policies, whose ratio is not known (Yan et al. 2025)."""
    p = exp(x.logprob)
    shaped = p / (p + n.beta)
    slope = shaped * (n.beta / (p + n.beta))
    return Terms(pos=-shaped, d_pos=-slope, neg=shaped, d_neg=slope)


@surrogate(reads="logprob", signed=False, of_all=True)
def nll(x: Token, n: Spec) -> Terms:
    """-logprob, whatever the advantage."""
    return Terms(all=-x.logprob, d_all=-1.0)


@surrogate(reads="logprob extra", signed=False, of_all=True, extra="teacher_logprob")
def distill_reverse(x: Token, n: Spec) -> Terms:
    """sg(logprob - teacher) logprob, whose value is no KL."""
    away = x.logprob - x.extra
    return Terms(all=away * x.logprob, d_all=away)


@surrogate(reads="logprob extra clip_ratio_c", signed=False, of_all=True, extra="teacher_logprob")
def distill_forward(x: Token, n: Spec) -> Terms:
    """-sg(min(e^(teacher - logprob), clip_ratio_c)) logprob."""
    w = minimum(exp(clamp(x.extra - x.logprob, -MAX_LOG_RATIO, MAX_LOG_RATIO)), n.clip_ratio_c)
    return Terms(all=-w * x.logprob, d_all=-w)
