"""What a policy objective is: numbers, names and pure elementwise formulas.

The loss of a token shared by leaves l with weights w_l and advantages A_l, minimised and exact where clipping acts, is

    S_pos g_pos + |S_neg| g_neg + S_1 (g_all + kl_coef KL - entropy_coef H),
    S_pos = sum w_l max(A_l, 0),  S_neg = sum w_l min(A_l, 0),  S_1 = sum w_l.

A surrogate is one function here: from the log-prob and the log-ratio ``d`` (r = exp d) to the values of g and their
derivatives by the log-prob, which differ where a stop-gradient stands in the formula. To add one, write the function,
name it in ``SURROGATES``, add its branch to `triton._surrogate` and its row to the test table.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .fields import PolicyFields

RatioLevel = Literal["token", "sequence"]
Surrogate = Literal["ppo", "cispo", "sapo", "reinforce", "nll"]
KL = Literal["k1", "k2", "k3", "low_var", "abs"]
Mismatch = Literal["none", "truncate"]
Aggregation = Literal["token_mean", "token_sum", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]

MAX_LOG_RATIO = 20.0
"""|log-ratios| are clamped here: exp stays finite and a runaway token gets no gradient."""


@dataclass(frozen=True)
class Objective:
    """A policy objective; see ``Objective.preset`` for the named ones.

    Args:
        surrogate: ``ppo``: g_pos = -min(r, 1 + eps_high), g_neg = max(r, 1 - eps_low), the latter at most
            ``clip_ratio_c`` where given (dual clip). ``cispo``: -+ sg(clip(r, 1 - eps_low, 1 + eps_high)) logprob.
            ``sapo``: -+ (4 / tau) sigmoid(tau (r - 1)). ``reinforce``: -+ logprob. ``nll``: -logprob, whatever the
            advantage.
        ratio_level: r of the ``token``, or of the ``sequence``: the exponential of the mean token log-ratio.
        ratio_base: ``old``: r against ``old_logprob`` (against the current policy, r = 1, where that is None);
            ``self``: r = 1 with its gradient, also where ``old_logprob`` is given (for metrics and mismatch).
        kl, kl_coef: estimator of KL(policy, reference) from sampled tokens, with x = ref - logprob: ``k1`` -x,
            ``abs`` |x|, ``k2`` x^2 / 2, ``k3`` e^x - x - 1, ``low_var`` k3 clamped to +-10.
        entropy_coef: the entropy times this is subtracted from the loss; needs ``entropy``.
        mismatch, mismatch_cap: ``truncate``: the surrogate of a token is multiplied by
            min(exp(old - behaviour), cap), without gradient (truncated importance sampling).
        aggregation: over what the loss is a mean; ``aggregation_weight`` has the formula. The denominator itself is the
            caller's ``normalizer``: logical tokens for ``token_mean``, 1 for ``token_sum``, sequences for
            ``seq_mean_token_mean`` and ``seq_mean_token_sum``, sequences times the length limit for
            ``seq_mean_token_sum_norm``.

    Raises:
        ValueError: a name is unknown, a number out of its range, or two options do not combine.
    """

    surrogate: Surrogate = "ppo"
    ratio_level: RatioLevel = "token"
    ratio_base: Literal["old", "self"] = "old"
    eps_low: float = 0.2
    eps_high: float = 0.2
    clip_ratio_c: float | None = None
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    kl: KL = "k3"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    mismatch: Mismatch = "none"
    mismatch_cap: float = 2.0
    aggregation: Aggregation = "token_mean"
    encoded: str = field(init=False, repr=False, compare=False)  # for ops of torch, which take no objects

    def __post_init__(self) -> None:
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        object.__setattr__(self, "encoded", json.dumps(named))
        _one_of("surrogate", self.surrogate, get_args(Surrogate))
        _one_of("ratio_level", self.ratio_level, get_args(RatioLevel))
        _one_of("ratio_base", self.ratio_base, ("old", "self"))
        _one_of("kl", self.kl, get_args(KL))
        _one_of("mismatch", self.mismatch, get_args(Mismatch))
        _one_of("aggregation", self.aggregation, get_args(Aggregation))
        _require(0 <= self.eps_low <= 1, f"eps_low must be in [0, 1], got {self.eps_low}")
        _require(self.eps_high >= 0, f"eps_high must not be negative, got {self.eps_high}")
        _require(
            self.clip_ratio_c is None or self.clip_ratio_c > 1, f"clip_ratio_c must be above 1, got {self.clip_ratio_c}"
        )
        _require(self.tau_pos > 0 and self.tau_neg > 0, "tau_pos and tau_neg must be positive")
        _require(self.mismatch_cap > 0, f"mismatch_cap must be positive, got {self.mismatch_cap}")
        _require(
            self.clip_ratio_c is None or self.surrogate == "ppo",
            f"clip_ratio_c belongs to surrogate 'ppo' and does not combine with '{self.surrogate}'",
        )
        if self.ratio_level == "sequence":
            _require(
                self.surrogate == "ppo",
                f"ratio_level 'sequence' is built for surrogate 'ppo' and does not combine with '{self.surrogate}' yet",
            )
            _require(
                self.mismatch == "none", f"ratio_level 'sequence' does not combine with mismatch '{self.mismatch}' yet"
            )

    @staticmethod
    def preset(name: str, **overrides: Any) -> Objective:
        """The objective of a published method, with fields replaced by ``overrides``.

        ``kl_coef`` and ``entropy_coef`` are 0 in every preset. gspo's clip range (3e-4, 4e-4) is the paper's, as public
        trainers quote it; their own defaults leave it at 0.2.

        Raises:
            ValueError: no such preset, or an override is wrong.
        """
        _one_of("preset", name, tuple(PRESETS))
        known = [f.name for f in fields(Objective) if f.init]
        unknown = ", ".join(sorted(overrides.keys() - set(known)))
        _require(not unknown, f"no field is called {unknown}; there are {', '.join(known)}")
        return replace(PRESETS[name], **overrides)

    @staticmethod
    @functools.cache
    def decode(text: str) -> Objective:
        """The objective whose ``encoded`` this is."""
        return Objective(**json.loads(text))

    @property
    def scope(self) -> Literal["token", "path", "batch"]:
        """What the loss of a pair depends on: that pair alone, its whole path, or every pair."""
        return "path" if self.ratio_level == "sequence" else "token"

    def live(self, fields: PolicyFields) -> Tensor:
        """``[M] bool``: pairs whose gradient can be other than zero, as known before any forward."""
        live = (fields.adv_pos != 0) | (fields.adv_neg != 0)
        if self.kl_coef or self.entropy_coef or self.surrogate == "nll":
            live = live | (fields.weight != 0)
        return live if fields.mask is None else live & fields.mask

    @property
    def needs_old(self) -> bool:
        """Whether ``old_logprob``, when given, changes the loss."""
        ratio = self.surrogate in ("ppo", "cispo", "sapo") and self.ratio_base == "old"
        return ratio or self.mismatch != "none"

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef != 0

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coef != 0


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"Objective: {message}.")


def _one_of(field: str, value: str, known: tuple[str, ...]) -> None:
    _require(value in known, f"{field} '{value}' is not known; choose one of {', '.join(known)}")


_SEQUENCE_MEAN: Aggregation = "seq_mean_token_mean"
PRESETS: dict[str, Objective] = {
    "reinforce": Objective(surrogate="reinforce"),
    "ppo": Objective(),
    "grpo": Objective(aggregation=_SEQUENCE_MEAN),
    "dual_clip": Objective(clip_ratio_c=3.0),
    "dapo": Objective(eps_high=0.28),
    "dr_grpo": Objective(aggregation="seq_mean_token_sum_norm"),
    "bnpo": Objective(),
    "gpg": Objective(surrogate="reinforce"),
    "cispo": Objective(surrogate="cispo"),
    "sapo": Objective(surrogate="sapo", aggregation=_SEQUENCE_MEAN),
    "gspo": Objective(ratio_level="sequence", eps_low=3e-4, eps_high=4e-4, aggregation=_SEQUENCE_MEAN),
    "on_policy_pg": Objective(ratio_base="self"),
    "sft": Objective(surrogate="nll"),
}


class Spec(NamedTuple):
    """The numbers of an objective that the elementwise kernels read."""

    eps_low: float
    eps_high: float
    clip_ratio_c: float  # inf: none
    tau_pos: float
    tau_neg: float
    kl_coef: float
    entropy_coef: float
    mismatch_cap: float  # 0: no mismatch correction

    @staticmethod
    def of(objective: Objective) -> Spec:
        return Spec(
            objective.eps_low,
            objective.eps_high,
            float("inf") if objective.clip_ratio_c is None else objective.clip_ratio_c,
            objective.tau_pos,
            objective.tau_neg,
            objective.kl_coef,
            objective.entropy_coef,
            objective.mismatch_cap if objective.mismatch == "truncate" else 0.0,
        )


class Terms(NamedTuple):
    """Values of g and derivatives by the log-prob, each [M]; and where a bound acts, as booleans [M]."""

    pos: Tensor
    neg: Tensor
    all: Tensor
    d_pos: Tensor
    d_neg: Tensor
    d_all: Tensor
    clipped_pos: Tensor  # r > 1 + eps_high
    clipped_neg: Tensor  # r < 1 - eps_low
    clipped_lower: Tensor  # dual clip: above clip_ratio_c


def ratio(d: Tensor) -> tuple[Tensor, Tensor]:
    """``r`` and ``dr/dlogprob`` of a log-ratio [M]: both e^d, the latter 0 where d was clamped."""
    r = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return r, torch.where(d.abs() <= MAX_LOG_RATIO, r, 0)


def _ppo(logprob: Tensor, d: Tensor, spec: Spec) -> Terms:
    r, dr = ratio(d)
    low, high, zero = 1 - spec.eps_low, 1 + spec.eps_high, torch.zeros_like(r)
    neg = r.clamp(min=low)
    beyond = neg > spec.clip_ratio_c
    d_neg = torch.where((r >= low) & ~beyond, dr, 0)
    d_pos = torch.where(r <= high, -dr, 0)
    return Terms(
        -r.clamp(max=high), neg.clamp(max=spec.clip_ratio_c), zero, d_pos, d_neg, zero, r > high, r < low, beyond
    )


def _cispo(logprob: Tensor, d: Tensor, spec: Spec) -> Terms:
    r, _ = ratio(d)
    low, high, zero = 1 - spec.eps_low, 1 + spec.eps_high, torch.zeros_like(r)
    w = r.clamp(low, high)
    return Terms(-w * logprob, w * logprob, zero, -w, w, zero, r > high, r < low, torch.zeros_like(r, dtype=torch.bool))


def _sapo(logprob: Tensor, d: Tensor, spec: Spec) -> Terms:
    r, dr = ratio(d)
    pos, neg = torch.sigmoid(spec.tau_pos * (r - 1)), torch.sigmoid(spec.tau_neg * (r - 1))
    zero, never = torch.zeros_like(r), torch.zeros_like(r, dtype=torch.bool)
    d_pos, d_neg = -4 * pos * (1 - pos) * dr, 4 * neg * (1 - neg) * dr
    return Terms(-4 / spec.tau_pos * pos, 4 / spec.tau_neg * neg, zero, d_pos, d_neg, zero, never, never, never)


def _reinforce(logprob: Tensor, d: Tensor, spec: Spec) -> Terms:
    one, zero = torch.ones_like(logprob), torch.zeros_like(logprob)
    never = torch.zeros_like(logprob, dtype=torch.bool)
    return Terms(-logprob, logprob, zero, -one, one, zero, never, never, never)


def _nll(logprob: Tensor, d: Tensor, spec: Spec) -> Terms:
    one, zero = torch.ones_like(logprob), torch.zeros_like(logprob)
    never = torch.zeros_like(logprob, dtype=torch.bool)
    return Terms(zero, zero, -logprob, zero, zero, -one, never, never, never)


SURROGATES: dict[str, Callable[[Tensor, Tensor, Spec], Terms]] = {
    "ppo": _ppo,
    "cispo": _cispo,
    "sapo": _sapo,
    "reinforce": _reinforce,
    "nll": _nll,
}


def kl_terms(logprob: Tensor, ref_logprob: Tensor, estimator: str) -> tuple[Tensor, Tensor]:
    """KL estimate and its derivative by the log-prob, each [M]."""
    x = ref_logprob - logprob
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


def aggregation_weight(aggregation: str, leaf_length: Tensor) -> Tensor:
    """Weight of a leaf's tokens ``[L]``: 1 / leaf_length for ``seq_mean_token_mean``, otherwise 1.

    A leaf without tokens to learn from has weight 0 in the former. Dtype of ``leaf_length``, fp32 for integers.
    """
    length = leaf_length if leaf_length.is_floating_point() else leaf_length.float()
    if aggregation == "seq_mean_token_mean":
        return torch.where(length > 0, 1 / length.clamp(min=1), 0)
    return torch.ones_like(length)
