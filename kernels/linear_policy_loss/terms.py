"""Terms of a loss that share one pass of the head, and their evaluation chunk by chunk.

Objectives reach the head through two numbers a target, a = dL/dlogprob and b = dL/dentropy. Those of several terms add
up, so a sum of terms over the same rows costs the matrix products of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..linear_logprob import STATISTICS
from ..policy_loss import SUMS, Evaluation, Objective, PolicyFields, PolicyLossOutput, evaluate
from ..policy_loss.api import Metrics, finish


class Term(NamedTuple):
    """A loss term: ``weight`` times an objective on the targets that ``fields.mask`` selects.

    An NLL is surrogate "nll"; a KL or an entropy alone is an objective with that coefficient on fields without
    advantages. Metrics are called ``name/...`` where `policy_loss` has ``actor/...`` and ``training/...``; the name
    "actor" keeps those.
    """

    fields: PolicyFields  # M targets
    objective: Objective
    normalizer: float | Tensor
    weight: float = 1.0
    name: str = "actor"


class LogprobTerm(NamedTuple):
    """A loss term: ``weight`` times any differentiable loss of the targets' log-probs that is not a sum over them.

    Preference pairs: ``partial(pair_loss, paths=..., chosen=..., rejected=..., normalizer=..., mask=mask)``. ``loss``
    gets log-probs ``[M]``, which are 0 where neither ``mask`` nor another term selects the target, and the statistics
    in ``want`` as keyword arguments, likewise.
    """

    loss: Callable[..., PolicyLossOutput]
    mask: Tensor  # [M] bool: the targets whose log-prob the loss reads
    weight: float = 1.0
    name: str = "actor"
    want: tuple[str, ...] = ()  # of `STATISTICS`
    extra_ids: Tensor | None = None  # [M, K] int, for the statistic extra_logprob; -1: none


AnyTerm = Term | LogprobTerm


class TermsLossOutput(NamedTuple):
    """Loss and metrics of several terms."""

    loss: Tensor  # [], the weighted sum, differentiable
    metrics: Metrics  # of all terms; see `PolicyLossOutput`
    losses: dict[str, Tensor]  # [], of each term by its name, without its weight
    logprob: Tensor | None = None  # [M], without gradient; NaN where no term needed it
    entropy: Tensor | None = None  # [M], likewise


def statistics_read(terms: Sequence[AnyTerm]) -> tuple[tuple[str, ...], Tensor | None]:
    """Return the statistics that the terms read, in the order of `STATISTICS`, and their further ids ``[M, K]``."""
    of_logprobs = [t for t in terms if isinstance(t, LogprobTerm)]
    names = tuple(name for name in STATISTICS if any(name in t.want for t in of_logprobs))
    ids = [t.extra_ids for t in of_logprobs if t.extra_ids is not None and "extra_logprob" in t.want]
    return names, torch.cat(ids, 1) if ids else None


def statistics_of(
    terms: Sequence[AnyTerm], statistics: Mapping[str, Tensor]
) -> Iterator[tuple[AnyTerm, dict[str, Tensor]]]:
    """Yield each term with its own statistics, from those of all; see `statistics_read`."""
    first = 0
    for term in terms:
        of_term = {} if isinstance(term, Term) else {name: statistics[name] for name in term.want}
        if "extra_logprob" in of_term:
            assert isinstance(term, LogprobTerm)
            assert term.extra_ids is not None
            K = term.extra_ids.shape[1]
            of_term["extra_logprob"] = of_term["extra_logprob"][:, first : first + K]
            first += K
        yield term, of_term


def live(term: AnyTerm) -> Tensor:
    """Return ``[M] bool``: targets that can have a gradient from this term, or whose log-prob it reads."""
    return term.objective.live(term.fields) if isinstance(term, Term) else term.mask


def named(metrics: Metrics, name: str) -> Metrics:
    """Return the metrics under the names of the term called ``name``."""
    return metrics if name == "actor" else {f"{name}/{key.split('/', 1)[-1]}": value for key, value in metrics.items()}


def common_normalizer(terms: Sequence[Term], like: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``n []`` and ``scale [K]`` with ``scale / n = weight / normalizer`` of each term, like ``like``.

    The largest scale is 1, so that intermediate gradients are of the size they have for a single term, which half
    precision can hold.
    """
    each = _normalizers(terms, like)
    counts = each.isfinite()
    n = torch.where(counts & (each != 0), each.abs(), torch.inf).min()
    n = torch.where(n.isfinite(), n, 1)
    return n, torch.where(counts, n / each, 0)  # inf for a normalizer of 0, which only a loss of zeros may have


LARGEST_IN_HALF = 64.0
"""The largest factor of a derivative in fp16: ratios up to 1000 do not overflow, and 1e-9 of it does not underflow."""


def half_normalizer(terms: Sequence[Term], like: Tensor) -> tuple[Tensor, Tensor]:
    """Like `common_normalizer` for fp16, whose range is small: ``n`` is a power of two that gives the largest advantage
    or weight the size of `LARGEST_IN_HALF`, whatever the normalizers and the factor of the loss are."""
    each = _normalizers(terms, like)
    size = each.abs() / torch.stack([_largest(t) for t in terms]).to(like)
    n = torch.where(size.isfinite() & (size != 0), size, torch.inf).min()
    n = torch.exp2(torch.log2(LARGEST_IN_HALF * torch.where(n.isfinite(), n, 1)).floor())
    return n, torch.where(each.isfinite(), n / each, 0)


def _largest(term: Term) -> Tensor:
    """Return the largest finite factor ``[]`` of a derivative among the term's targets."""
    fields, objective = term.fields, term.objective
    factors = [fields.adv_pos, fields.adv_neg]
    if objective.formula.of_all or objective.kl_coef or objective.entropy_coef:
        factors += [fields.weight]
    each = torch.stack([t.abs() for t in factors]).amax(0)
    each = each if fields.token_weight is None else each * fields.token_weight.abs()
    counts = each.isfinite() if fields.mask is None else each.isfinite() & fields.mask
    return torch.cat([torch.where(counts, each, 0), each.new_zeros(1)]).amax()


def own_normalizers(terms: Sequence[Term], like: Tensor) -> tuple[Tensor, Tensor]:
    """Like `common_normalizer` with ``n`` = 1, for dtypes that can hold gradients of the scaled loss itself."""
    each = _normalizers(terms, like)
    return torch.ones_like(each[0]), torch.where(each.isfinite(), 1 / each, 0)


def _normalizers(terms: Sequence[Term], like: Tensor) -> Tensor:
    """Return ``[K]``, normalizer / weight of each term."""

    def tensor(x: float | Tensor) -> Tensor:
        return (
            x.to(like, non_blocking=True)
            if isinstance(x, Tensor)
            else torch.full((), x, dtype=like.dtype, device=like.device)
        )

    return torch.stack([tensor(t.normalizer) / t.weight for t in terms])


def scaled(values: Tensor, scale: Tensor) -> Tensor:
    """Return ``values * scale``, and 0 where a value is 0, also times inf."""
    return torch.where(values == 0, 0, values * scale)


def finish_terms(
    total: Tensor,  # [], the sum, scaled by `common_normalizer` if there are several
    totals: Tensor,  # [K] fp64
    sums: Tensor,  # [K, len(SUMS)] fp64
    n: Tensor | None,  # [], of `common_normalizer`
    terms: Sequence[Term],
) -> TermsLossOutput:
    """Return loss and metrics from sums."""
    metrics: Metrics = {}
    losses = {}
    for k, t in enumerate(terms):
        of_term = total if n is None else totals[k].to(total.dtype)
        out = finish(of_term, sums[k], t.normalizer, t.fields, t.objective, has_entropy=True)
        metrics |= named(out.metrics, t.name)
        losses[t.name] = out.loss
    loss = total / n if n is not None else out.loss if terms[0].weight == 1 else out.loss * terms[0].weight
    return TermsLossOutput(loss, metrics, {name: value.detach() for name, value in losses.items()})


class TermEvaluator:
    """Evaluates a sum of terms chunk by chunk, and adds up values and metrics meanwhile.

    Targets lie in row order. A term of tokens is evaluated there; one that reads paths needs the caller's order, in
    which the log-probs scored so far are kept.
    """

    def __init__(
        self,
        terms: Sequence[tuple[PolicyFields, Objective]],
        scale: Tensor | None,  # [K]; None: one term
        place: Tensor | None,  # [P] int64, of each target in the caller's order; None: the same order
        like: Tensor,  # dtype and device of log-probs
    ) -> None:
        M = len(terms[0][0].adv_pos)
        in_order = [place is None or objective.scope == "token" for _, objective in terms]
        self.terms = [
            (fields if place is None or not here else fields.take(place), objective, here)
            for (fields, objective), here in zip(terms, in_order, strict=True)
        ]
        self.everything = slice(0, M)
        self.scale, self.place = scale, place
        self.scores = () if all(in_order) else (like.new_zeros(M), like.new_zeros(M))
        self.scored = torch.zeros(M if self.scores else 0, dtype=torch.bool, device=like.device)
        self.totals = [like.new_zeros((), dtype=torch.float64) for _ in terms]
        self.sums = [like.new_zeros(len(SUMS), dtype=torch.float64) for _ in terms]

    @property
    def needs_entropy(self) -> bool:
        """True if a term depends on the entropy."""
        return any(objective.needs_entropy for _, objective, _ in self.terms)

    def record(self, targets: slice, logprob: Tensor, entropy: Tensor) -> None:
        """Keep the scores ``[p]`` of ``targets`` (in row order) for the paths that they are on."""
        if self.scores:
            assert self.place is not None
            for everywhere, values in zip(self.scores, (logprob, entropy), strict=True):
                everywhere.index_copy_(0, self.place[targets], values)
            self.scored.index_fill_(0, self.place[targets], True)

    def derivatives(
        self,
        targets: slice,  # in row order
        paths: slice,  # of the caller's targets: the whole paths of these
        logprob: Tensor,  # [p]
        entropy: Tensor,  # [p]
        add_paths: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Return ``a [p]`` and ``b [p]``, the latter None where no term depends on the entropy.

        ``add_paths``: add value and metrics of ``paths`` here; False: a later call with all of them does.
        """
        self.record(targets, logprob, entropy)
        a: Tensor | None = None
        b: Tensor | None = None
        for k, (fields, objective, in_order) in enumerate(self.terms):
            if in_order:
                part = evaluate(logprob, entropy, fields.slice(targets.start, targets.stop), objective)
                d_logprob, d_entropy = part.d_logprob, part.d_entropy
            else:
                part, place = self._evaluate_paths(fields, objective, targets, paths)
                d_logprob = part.d_logprob[place]
                d_entropy = None if part.d_entropy is None else part.d_entropy[place]
            if in_order or add_paths:
                self.totals[k], self.sums[k] = self.totals[k] + part.total, self.sums[k] + part.sums
            a = self._add(a, k, d_logprob.to(logprob.dtype))
            if objective.needs_entropy and d_entropy is not None:
                b = self._add(b, k, d_entropy.to(logprob.dtype))
        assert a is not None
        return a, b

    def _evaluate_paths(
        self, fields: PolicyFields, objective: Objective, targets: slice, paths: slice
    ) -> tuple[Evaluation, Tensor]:
        """Evaluate on whole paths; return the places ``[p]`` of ``targets`` in it too."""
        assert self.place is not None
        local, scored = fields.slice(paths.start, paths.stop), self.scored[paths]
        local = replace(local, mask=scored if local.mask is None else scored & local.mask)
        logprob, entropy = (everywhere[paths] for everywhere in self.scores)
        return evaluate(logprob, entropy, local, objective), self.place[targets] - paths.start

    def _add(self, before: Tensor | None, k: int, values: Tensor) -> Tensor:
        values = values if self.scale is None else scaled(values, self.scale[k])
        return values if before is None else before + values

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``total []``, ``totals [K]`` and ``sums [K, len(SUMS)]``, in fp64."""
        totals = torch.stack(self.totals)
        total = (totals if self.scale is None else scaled(totals, self.scale.double())).sum()
        return total, totals, torch.stack(self.sums)
