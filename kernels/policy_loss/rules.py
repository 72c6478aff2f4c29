"""Objectives that look beyond a single token: one function each, entered into ``RULES`` under its name.

A rule changes what the elementwise surrogate sees, by what it reads of whole paths or of the whole batch:

    leaf_weight    factors of each leaf's advantages, from sums along its path; without gradient
    token_choice   fields in which some tokens of the batch are chosen or weighed; without gradient
    path_ratio     the log-ratios that are averaged over a path, for a side of the advantages at a time

Its options are a frozen dataclass: a field that `Objective` has too takes its value from there, any other comes from
``Objective.options``. To add an objective, write its function here, with its options, and a row in the test table.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .elementwise import MAX_LOG_RATIO, TINY, ratio
from .fields import PolicyFields
from .subsets import covariance, live_of, only, rank, share_of

LOG_TINY = math.log(TINY)


class Targets(NamedTuple):
    """The targets that a rule reads."""

    logprob: Tensor  # [M]
    log_ratio: Tensor  # [M], logprob - old_logprob; 0 where the ratio is 1
    fields: PolicyFields

    def total(self, values: Tensor) -> Tensor:
        """Return the sum of ``values [M]`` over the unmasked targets of each leaf's path, ``[L]``."""
        assert self.fields.paths is not None
        return self.fields.paths.sum(torch.where(live_of(self.fields), values, 0))


class LeafFactors(NamedTuple):
    """Factors of the leaves' advantages, by their sign."""

    pos: Tensor | float  # [L]
    neg: Tensor | float  # [L]


class Side(NamedTuple):
    """A part of the loss whose log-ratios are averaged together."""

    fields: PolicyFields  # [K], on sequences, segments or leaves
    log_ratio: Tensor  # [M], to be averaged
    inside: Tensor  # [M] bool: targets whose log-ratio has a derivative


@dataclass(frozen=True)
class Rule:
    """A function that changes what the elementwise surrogate sees, and how it combines with other options."""

    kind: Literal["leaf_weight", "token_choice", "path_ratio"]
    function: Callable[..., Any]
    on: str | None = None  # the surrogate that runs after it; None: the one of the rule's own name
    options: type | None = None  # frozen dataclass of what the function reads besides the targets
    needs: tuple[str, ...] = ()  # optional fields of `PolicyFields` that it reads
    levels: tuple[str, ...] | None = None  # ratio levels that it allows; None: those of its surrogate
    against_sampler: bool = False  # its weights are against the policy that sampled, so `mismatch` would count twice
    corrects_tokens: bool = False  # it applies a mismatch of tokens itself, and allows no other
    preset: Mapping[str, Any] | None = None  # options of the preset that has its name; None: there is none

    @functools.cached_property
    def reads_ratio(self) -> bool:
        """Return whether the function reads `Targets.log_ratio`."""
        todo: list[CodeType] = [self.function.__code__]
        while todo:
            code = todo.pop()
            if "log_ratio" in code.co_names:
                return True
            todo += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        return False

    @property
    def option_names(self) -> tuple[str, ...]:
        return () if self.options is None else tuple(f.name for f in dataclasses.fields(self.options))

    @property
    def required(self) -> tuple[str, ...]:
        """Names of the options without a default."""
        options = () if self.options is None else dataclasses.fields(self.options)
        missing = dataclasses.MISSING
        return tuple(f.name for f in options if f.default is missing and f.default_factory is missing)


RULES: dict[str, Rule] = {}


def _enter(kind: Any, properties: Mapping[str, Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        RULES[function.__name__] = Rule(kind, function, **properties)
        return function

    return enter


def leaf_weight(
    **properties: Any,
) -> Callable[[Callable[[Targets, Any], LeafFactors]], Callable[[Targets, Any], LeafFactors]]:
    """Enter a function from targets and options to factors of the leaves; ``properties`` are fields of `Rule`."""
    return _enter("leaf_weight", properties)


def token_choice(
    **properties: Any,
) -> Callable[[Callable[[Targets, Any], PolicyFields]], Callable[[Targets, Any], PolicyFields]]:
    """Enter a function from targets and options to fields; ``properties`` are fields of `Rule`."""
    return _enter("token_choice", properties)


def path_ratio(
    **properties: Any,
) -> Callable[[Callable[[Targets, Any], Iterable[Side]]], Callable[[Targets, Any], Iterable[Side]]]:
    """Enter a function from targets and options to sides; its fields are [K]; ``properties`` are fields of `Rule`."""
    return _enter("path_ratio", properties)


def corrected(w: Tensor, n: Any) -> Tensor:
    """Return importance weights truncated or masked by ``n.mismatch``, ``n.mismatch_low`` and ``n.mismatch_cap``."""
    low, cap = n.mismatch_low, n.mismatch_cap
    return torch.where((w < low) | (w > cap), 0, w) if n.mismatch == "mask" else w.clamp(low, cap)


@leaf_weight(on="reinforce", against_sampler=True, preset={})
def topr(x: Targets, n: None) -> LeafFactors:
    """reinforce, sequences of negative advantage times sg(min(r_sequence, 1)) (Le Roux et al. 2025)."""
    return LeafFactors(1.0, x.total(x.log_ratio).clamp(-MAX_LOG_RATIO, 0).exp())


@dataclass(frozen=True)
class VespoOptions:
    vespo_pos: tuple[float, float]  # (k, lam) for positive advantages
    vespo_neg: tuple[float, float]
    mismatch: str
    mismatch_low: float
    mismatch_cap: float


@leaf_weight(on="reinforce", options=VespoOptions, corrects_tokens=True, preset={})
def vespo(x: Targets, n: VespoOptions) -> LeafFactors:
    """reinforce times sg(e^lam W^k e^(-lam W)), W the sequence's ratio times the corrected mismatch of its tokens."""
    log_w = x.total(x.log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    behaviour, old = x.fields.behaviour_logprob, x.fields.old_logprob
    if n.mismatch != "none":
        assert behaviour is not None
        w = torch.where(behaviour.isfinite(), ((x.logprob if old is None else old) - behaviour).exp(), 1)
        log_w = log_w + x.total(corrected(w, n).log().clamp(LOG_TINY, MAX_LOG_RATIO))
    log_w = log_w.clamp(LOG_TINY, MAX_LOG_RATIO)
    pos, neg = ((lam + k * log_w - lam * log_w.exp()).exp() for k, lam in (n.vespo_pos, n.vespo_neg))
    return LeafFactors(pos, neg)


@dataclass(frozen=True)
class ClipCovOptions:
    covariance_share: float
    covariance_low: float
    covariance_high: float
    eps_low: float
    eps_high: float


@token_choice(on="ppo", options=ClipCovOptions, preset={})
def clip_cov(x: Targets, n: ClipCovOptions) -> PolicyFields:
    """ppo without a few tokens of high covariance that the clip has not caught (Cui et al. 2025).

    They are ``covariance_share`` of the live tokens, drawn among those whose covariance of advantage and log-prob is
    in (covariance_low, covariance_high).
    """
    fields = x.fields
    live = live_of(fields)
    r, _ = ratio(x.log_ratio)
    advantage = fields.adv_pos + fields.adv_neg
    low = 1 - n.eps_low if fields.clip_low is None else fields.clip_low
    high = 1 + n.eps_high if fields.clip_high is None else fields.clip_high
    caught = ((advantage > 0) & (r > high)) | ((advantage < 0) & (r < low))
    cov = covariance(x.logprob, fields)
    candidate = live & ~caught & (cov > n.covariance_low) & (cov < n.covariance_high)
    order = rank(torch.where(candidate, _noise(x.logprob), torch.inf))
    return only(fields, ~(candidate & (order < share_of(live, n.covariance_share))))


def _noise(logprob: Tensor) -> Tensor:
    """Return ``[M]`` in [0, 1): a hash of the log-prob's bits, so that the choice depends on no order or generator."""
    x = logprob.float().view(torch.int32).long()
    for multiplier in (0x2545F4914F6CDD1D, 0x369DEA0F31A53F85):
        x = x * multiplier
        x = x ^ (x >> 29)
    return (x & 0xFFFFFF).double() / 2**24


@dataclass(frozen=True)
class KlCovOptions:
    covariance_share: float


@token_choice(options=KlCovOptions)
def kl_cov(x: Targets, n: KlCovOptions) -> PolicyFields:
    """The surrogate kl_cov, whose penalty is for the ``covariance_share`` of largest covariance (Cui et al. 2025)."""
    live = live_of(x.fields)
    cov = torch.where(live, covariance(x.logprob, x.fields), -torch.inf)
    first = rank(-cov) < share_of(live, n.covariance_share)
    return replace(x.fields, all_weight=torch.where(first & live, x.fields.weight, 0))


@dataclass(frozen=True)
class GeoMeanOptions:
    eps_low: float
    eps_high: float


@path_ratio(on="unclipped", options=GeoMeanOptions, levels=("sequence",))
def geo_mean(x: Targets, n: GeoMeanOptions) -> Iterator[Side]:
    """Unclipped r of the sequence, from log-ratios clamped to [-eps_low, eps_high] on the side that acts (GMPO)."""
    none = torch.zeros_like(x.fields.adv_pos)
    high, low = n.eps_high, -n.eps_low
    yield Side(replace(x.fields, adv_neg=none), x.log_ratio.clamp(max=high), x.log_ratio <= high)
    yield Side(replace(x.fields, adv_pos=none), x.log_ratio.clamp(min=low), x.log_ratio >= low)
