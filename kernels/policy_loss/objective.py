"""A policy objective as names and numbers.

The loss of a token shared by leaves l with weights w_l and advantages A_l, minimised and exact where clipping acts, is

    S_pos g_pos + |S_neg| g_neg + S_1 (g_all + kl_coef KL - entropy_coef H),
    S_pos = sum w_l max(A_l, 0),  S_neg = sum w_l min(A_l, 0),  S_1 = sum w_l.

`surrogates` has the formulas of g, `rules` the methods that look beyond a token, `presets` the published methods.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..checks import shown
from .fields import OPTIONAL, PolicyFields
from .path_sums import SegmentSum
from .presets import ADVANTAGES_ALONE, OPTIONS
from .rules import RULES, Rule
from .subsets import live_of
from .surrogates import SURROGATES, Surrogate

RatioLevel = Literal["token", "segment", "sequence", "sequence_token"]
RatioBase = Literal["old", "proximal", "current", "self"]
KL = Literal["k1", "k2", "k3", "low_var", "abs", "k1+", "k3+", "low_var+", "abs+"]
Mismatch = Literal["none", "truncate", "mask"]
MismatchLevel = Literal["token", "sequence", "geometric"]
Aggregation = Literal[
    "token_mean",
    "batch_token_mean",
    "token_sum",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
]
OptionValue = float | str | bool


@dataclass(frozen=True)
class Objective:
    """A policy objective; see ``Objective.preset`` for the named ones.

    Args:
        surrogate: a function of `surrogates` or of `rules`, whose docstring has the formula.
        options: of a rule that has options of its own, by name.
        ratio_level: r of the ``token``; of the ``segment`` or ``sequence``: the exponential of the mean token
            log-ratio; ``sequence_token``: the sequence's value with the token's derivative (and advantage).
        ratio_base: ``old``: r against ``old_logprob`` (against the current policy, r = 1, where that is None).
            ``proximal``: ``proximal_logprob`` takes the place of ``old_logprob`` in all of the loss: r against it, and
            the mismatch from it to the sampler (decoupled PPO, Hilton et al. 2021). ``current``: the current policy
            does, without gradient. ``self``: r = 1 with its gradient, while metrics and mismatch go by ``old_logprob``.
        eps_low, eps_high: the bounds are low = 1 - eps_low and high = 1 + eps_high, unless the fields bring
            ``clip_low`` and ``clip_high`` of their own.
        dynamic_clip, dynamic_cap: bounds from the old probability q instead, where |r - 1| r q = eps; low is at least
            1/2, high at most the cap.
        pos_weight, neg_weight: multiply S_pos and S_neg.
        kl, kl_coef: estimator of KL(policy, reference) from sampled tokens, with x = ref - logprob: ``k1`` -x,
            ``abs`` |x|, ``k2`` x^2 / 2, ``k3`` e^x - x - 1, ``low_var`` k3 clamped to +-10. With ``+`` the value with
            the derivative of k2, whose expectation is the gradient of the KL.
        kl_importance: the KL estimate is multiplied by the token's r, unbiased off policy. r has its gradient, except
            with ``+``, where the estimate's derivative is that of the KL by itself.
        entropy_coef: the entropy times this is subtracted from the loss; needs ``entropy``.
        mismatch, mismatch_level, mismatch_low, mismatch_cap: the surrogate is multiplied by w = exp(old - behaviour)
            (old: see ``ratio_base``) without gradient: of the ``token``, of the ``sequence`` (product), or its
            ``geometric`` mean; ``truncate``: clamped to [low, cap]; ``mask``: 0 outside.
        off_policy_delta: sequences of negative advantage count 0 where mean(behaviour - logprob) exceeds this (old
            log-probs where there are no behaviour ones).
        entropy_share: only this share of the tokens, of highest entropy, enters the surrogate.
        needs: optional fields without which the loss would be that of another objective, besides those that the other
            options need; fields that lack one are refused.
        vespo_pos, vespo_neg, covariance_share, covariance_low, covariance_high: of the rules that name them.
        clip_ratio_c, tau_pos, tau_neg, beta: of the surrogates that name them.
        aggregation: which tokens the loss is a mean over; `aggregation_weight` has the formula. The denominator itself
            is the caller's ``normalizer``: logical tokens of the update for ``token_mean``, those of the micro-batch
            times the number of micro-batches for ``batch_token_mean``, 1 for ``token_sum``, sequences for
            ``seq_mean_token_mean`` and ``seq_mean_token_sum``, sequences times the length limit for
            ``seq_mean_token_sum_norm``.

    Raises:
        ValueError: a name is unknown, a number out of its range, or two options do not combine.
    """

    surrogate: str = "ppo"
    ratio_level: RatioLevel = "token"
    ratio_base: RatioBase = "old"
    eps_low: float = 0.2
    eps_high: float = 0.2
    clip_ratio_c: float | None = None
    dynamic_clip: bool = False
    dynamic_cap: float = 10.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    beta: float = 0.1
    vespo_pos: tuple[float, float] = (2.0, 3.0)
    vespo_neg: tuple[float, float] = (3.0, 2.0)
    covariance_share: float = 2e-4
    covariance_low: float = 1.0
    covariance_high: float = 5.0
    pos_weight: float = 1.0
    neg_weight: float = 1.0
    kl: KL = "k3"
    kl_coef: float = 0.0
    kl_importance: bool = False
    entropy_coef: float = 0.0
    mismatch: Mismatch = "none"
    mismatch_level: MismatchLevel = "token"
    mismatch_low: float = 0.0
    mismatch_cap: float = 2.0
    off_policy_delta: float | None = None
    entropy_share: float = 1.0
    needs: tuple[str, ...] = ()
    options: Mapping[str, OptionValue] | tuple[tuple[str, OptionValue], ...] = ()
    aggregation: Aggregation = "token_mean"
    encoded: str = field(init=False, repr=False, compare=False)  # for ops of torch, which take no objects

    def __post_init__(self) -> None:
        if torch.compiler.is_compiling():
            raise RuntimeError("Objective: make it outside of the compiled function and use it within.")
        for name in ("vespo_pos", "vespo_neg", "needs"):
            value = getattr(self, name)
            _require(isinstance(value, list | tuple), f"{name} must be a tuple, got {shown(value)}")
            object.__setattr__(self, name, tuple(value))
        for name, names in (
            ("surrogate", tuple(SURROGATES | RULES)), ("ratio_level", get_args(RatioLevel)),
            ("ratio_base", get_args(RatioBase)),
            ("kl", get_args(KL)), ("mismatch", get_args(Mismatch)), ("mismatch_level", get_args(MismatchLevel)),
            ("aggregation", get_args(Aggregation)),
        ):  # fmt: skip
            _one_of(name, getattr(self, name), names)
        self._check_numbers()
        self._check_combinations()
        self._check_options()
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        object.__setattr__(self, "encoded", json.dumps(named))

    def _check_numbers(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name, None)
            if isinstance(f.default, bool):
                _require(isinstance(value, bool), f"{f.name} must be True or False, got {shown(value)}")
            elif isinstance(f.default, float) or (f.name in ("clip_ratio_c", "off_policy_delta") and value is not None):
                _require(_is_number(value), f"{f.name} must be a number that is finite in fp32, got {shown(value)}")
        for name in ("vespo_pos", "vespo_neg"):
            pair = getattr(self, name)
            _require(
                len(pair) == 2 and all(map(_is_number, pair)),
                f"{name} must be two numbers that are finite in fp32, got {', '.join(map(shown, pair))}",
            )
        _require(0 <= self.eps_low <= 1, f"eps_low must be in [0, 1], got {self.eps_low}")
        _require(self.eps_high >= 0, f"eps_high must not be negative, got {self.eps_high}")
        _require(
            self.clip_ratio_c is None or self.clip_ratio_c > 1, f"clip_ratio_c must be above 1, got {self.clip_ratio_c}"
        )
        for name in ("tau_pos", "tau_neg", "beta", "mismatch_cap", "covariance_share"):
            _require(getattr(self, name) > 0, f"{name} must be positive, got {getattr(self, name)}")
        _require(self.dynamic_cap > 1, f"dynamic_cap must be above 1, got {self.dynamic_cap}")
        for name in ("pos_weight", "neg_weight"):
            _require(getattr(self, name) >= 0, f"{name} must not be negative, got {getattr(self, name)}")
        _require(
            0 <= self.mismatch_low < self.mismatch_cap,
            f"mismatch_low must be in [0, mismatch_cap), got {self.mismatch_low} with mismatch_cap {self.mismatch_cap}",
        )
        for name in self.needs:
            _one_of("needs", name, OPTIONAL)
        _require(0 < self.entropy_share <= 1, f"entropy_share must be in (0, 1], got {self.entropy_share}")

    def _check_combinations(self) -> None:
        def exclude(condition: bool, one: str, other: str) -> None:
            _require(not condition, f"{one} does not combine with {other}")

        surrogate, level = f"surrogate '{self.surrogate}'", f"ratio_level '{self.ratio_level}'"
        rule, reads = self.rule, self.formula.reads
        changed = rule is not None and rule.on is not None
        of_ratio = rule.kind == "path_ratio" if rule is not None and changed else self.formula.of_ratio
        exclude(self.clip_ratio_c is not None and "clip_ratio_c" not in reads, "clip_ratio_c", surrogate)
        exclude(self.ratio_level != "token" and not of_ratio, level, surrogate)
        allowed = None if rule is None else rule.levels
        exclude(allowed is not None and self.ratio_level not in allowed, surrogate, level)
        exclude(self.ratio_level != "token" and self.dynamic_clip, level, "dynamic_clip")
        exclude(self.dynamic_clip and ("low" not in reads or changed), "dynamic_clip", surrogate)
        of_policy = self.ratio_base in ("self", "current")
        exclude(self.dynamic_clip and of_policy, "dynamic_clip", f"ratio_base '{self.ratio_base}'")
        exclude(self.weighs_by_sampler and self.mismatch != "none", surrogate, f"mismatch '{self.mismatch}'")
        of_sequences = self.mismatch != "none" and self.mismatch_level != "token"
        corrects = rule is not None and rule.corrects_tokens
        exclude(corrects and of_sequences, surrogate, f"mismatch_level '{self.mismatch_level}'")

    def _check_options(self) -> None:
        options = self.options
        _require(isinstance(options, Mapping | list | tuple), f"options must be a mapping, got {shown(options)}")
        try:
            values = dict(options)
        except (TypeError, ValueError):
            raise ValueError(f"Objective: options must be a mapping, got {shown(options)}.") from None
        of_rule = [] if self.rule is None else self.rule.option_names
        option_names = [name for name in of_rule if name not in _FIELD_NAMES]
        for name, value in values.items():
            has = f"it has {', '.join(option_names)}" if option_names else "it has none of its own"
            _require(name in option_names, f"surrogate '{self.surrogate}' has no option '{name}'; {has}")
            fits = isinstance(value, bool | str) or _is_number(value)
            _require(fits, f"option '{name}' must be a number, a text, True or False, got {shown(value)}")
        object.__setattr__(self, "options", tuple(sorted(values.items())))
        required = () if self.rule is None else self.rule.required
        missing = ", ".join(n for n in required if n in option_names and n not in values)
        _require(not missing, f"surrogate '{self.surrogate}' needs options {missing}")
        _ = self.rule_options  # whose dataclass may check their values

    @staticmethod
    def preset(name: str, **overrides: Any) -> Objective:
        """Return the objective of a published method (`presets`), with fields replaced by ``overrides``.

        ``kl_coef`` and ``entropy_coef`` are 0 in every preset. `presets.RECONSTRUCTED` names the options that are not
        read from a paper or a public trainer.

        Raises:
            ValueError: no such preset, or an override is wrong.
        """
        same = ADVANTAGES_ALONE.get(name)
        _require(
            same is None, f"preset '{name}' is '{same}' with advantages of its own; choose '{same}' and give it those"
        )
        _one_of("preset", name, tuple(PRESETS))
        unknown = ", ".join(sorted(overrides.keys() - set(_FIELD_NAMES)))
        _require(not unknown, f"no field is called {unknown}; there are {', '.join(_FIELD_NAMES)}")
        return replace(PRESETS[name], **overrides) if overrides else PRESETS[name]

    @staticmethod
    @functools.cache
    def decode(text: str) -> Objective:
        """Return the objective whose ``encoded`` is ``text``."""
        return Objective(**json.loads(text))

    @property
    def rule(self) -> Rule | None:
        """The rule of ``surrogate``'s name in `rules`, if there is one."""
        return RULES.get(self.surrogate)

    @functools.cached_property
    def rule_options(self) -> Any:
        """The options that the rule's function reads: an instance of its dataclass, or None where it has none.

        Raises:
            ValueError: the dataclass refuses a value.
        """
        if self.rule is None or self.rule.options is None:
            return None
        chosen = dict(self.options)
        read = {n: getattr(self, n) for n in self.rule.option_names if n in _FIELD_NAMES}
        return self.rule.options(**read, **chosen)

    @property
    def elementwise(self) -> str:
        """The surrogate that runs on elements after the rule, a key of ``SURROGATES``."""
        return self.surrogate if self.rule is None or self.rule.on is None else self.rule.on

    @property
    def formula(self) -> Surrogate:
        return SURROGATES[self.elementwise]

    @property
    def scope(self) -> Literal["token", "path", "batch"]:
        """The targets that the loss of one depends on: that target alone, its whole path, or every target."""
        if self._has("token_choice") or self.entropy_share < 1:
            return "batch"
        return "path" if self.ratio_level != "token" or self.weighs_leaves else "token"

    def _has(self, kind: str) -> bool:
        return self.rule is not None and self.rule.kind == kind

    @property
    def weighs_leaves(self) -> bool:
        """True if sequences get weights of their own."""
        of_sequences = self.mismatch != "none" and self.mismatch_level != "token"
        return of_sequences or self.off_policy_delta is not None or self._has("leaf_weight")

    @property
    def token_mismatch(self) -> Mismatch:
        """The mismatch correction that the elementwise kernels apply."""
        corrects = self.rule is not None and self.rule.corrects_tokens
        return "none" if corrects or self.mismatch_level != "token" else self.mismatch

    def live(self, fields: PolicyFields) -> Tensor:
        """Return ``[M] bool``: targets whose gradient can be other than zero, as known before any forward."""
        everyone = live_of(fields)
        of_pairs = fields.paths is not None and fields.paths.pair_target is not None
        if self.scope == "batch" or (self.scope == "path" and of_pairs):
            return everyone
        live = torch.zeros_like(everyone)
        if self.pos_weight:
            live = live | (fields.adv_pos != 0)
        if self.neg_weight:
            live = live | (fields.adv_neg != 0)
        if self.formula.of_all:
            live = live | ((fields.weight if fields.all_weight is None else fields.all_weight) != 0)
        if fields.token_weight is not None:
            live = live & (fields.token_weight != 0)
        if self.kl_coef or self.entropy_coef:
            live = live | (fields.weight != 0)
        live = live & everyone
        together = fields.segment if fields.paths is None else fields.paths.sequence
        if self.scope == "path" and together is not None:  # a ratio is averaged over tokens without advantage too
            live = (SegmentSum(together)(live.double()) > 0) & everyone
        return live

    @property
    def needs_old(self) -> bool:
        """True if ``old_logprob``, when given, changes the loss."""
        ratio = "d" in self.formula.reads or (self.rule is not None and self.rule.reads_ratio)
        mismatch = self.mismatch != "none"
        return {"old": ratio or mismatch, "self": mismatch}.get(self.ratio_base, False)

    @property
    def weighs_by_sampler(self) -> bool:
        """True if its weights are by definition against the sampler, whatever other objectives compare with.

        Its ``old_logprob`` is then the log-prob recorded at sampling, also where a proximal policy's is known.
        """
        return self.rule is not None and self.rule.against_sampler

    @property
    def needs_entropy(self) -> bool:
        """True if the loss depends on the entropy."""
        return self.entropy_coef != 0 or self.entropy_share < 1

    @property
    def needs_fields(self) -> dict[str, str]:
        """Optional fields that must be given, and why."""
        need = dict.fromkeys(self.needs, f"the objective needs {' and '.join(self.needs)}")
        if self.ratio_base == "proximal":
            need["proximal_logprob"] = "ratio_base is 'proximal'"
        if self.kl_coef:
            need["ref_logprob"] = "kl_coef is not 0"
        if self.mismatch != "none":
            need["behaviour_logprob"] = f"mismatch is '{self.mismatch}'"
        rule_needs = () if self.rule is None else self.rule.needs
        for name in (*rule_needs, *(() if self.formula.extra is None else (self.formula.extra,))):
            need[name] = f"surrogate is '{self.surrogate}'"
        return need


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"Objective: {message}.")


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= torch.finfo(torch.float32).max


def _one_of(field: str, value: str, allowed: tuple[str, ...]) -> None:
    _require(value in allowed, f"{field} '{value}' is not known; choose one of {', '.join(allowed)}")


_FIELD_NAMES = tuple(f.name for f in fields(Objective) if f.init)
PRESETS: dict[str, Objective] = {name: Objective(**options) for name, options in OPTIONS.items()}
