"""Terms of a loss that share one pass of the head.

Objectives reach the head through two numbers a target, a = dL/dlogprob and b = dL/dentropy. Those of several terms add
up, so a sum of terms over the same rows costs the matrix products of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..policy_loss import Objective, PolicyFields, PolicyLossOutput
from ..policy_loss.api import Metrics, finish


class Term(NamedTuple):
    """``weight`` times an objective on the targets that ``fields.mask`` selects.

    An NLL is surrogate "nll"; a KL or an entropy alone is an objective with that coefficient on fields without
    advantages. Metrics are called ``name/...`` where `policy_loss` has ``actor/...`` and ``training/...``; the name
    "actor" leaves them as they are.
    """

    fields: PolicyFields  # M targets
    objective: Objective
    normalizer: float | Tensor
    weight: float = 1.0
    name: str = "actor"


class LogprobTerm(NamedTuple):
    """``weight`` times any differentiable loss of the targets' log-probs that is not a sum over them.

    Preference pairs: ``partial(pair_loss, paths=..., chosen=..., rejected=..., normalizer=..., mask=mask)``. ``loss``
    is given log-probs ``[M]``, which are 0 where neither ``mask`` nor another term selects the target.
    """

    loss: Callable[[Tensor], PolicyLossOutput]
    mask: Tensor  # [M] bool: the targets whose log-prob the loss reads
    weight: float = 1.0
    name: str = "actor"


AnyTerm = Term | LogprobTerm


class TermsLossOutput(NamedTuple):
    """What several terms have given."""

    loss: Tensor  # [], the weighted sum, differentiable
    metrics: Metrics  # of all terms; see `PolicyLossOutput`
    losses: dict[str, Tensor]  # [], of each term by its name, without its weight
    logprob: Tensor | None = None  # [M], without gradient; NaN where no term needed it
    entropy: Tensor | None = None  # [M], likewise


def live(term: AnyTerm) -> Tensor:
    """``[M] bool``: targets that can have a gradient from this term, or that it must know."""
    return term.objective.live(term.fields) if isinstance(term, Term) else term.mask


def named(metrics: Metrics, name: str) -> Metrics:
    """The metrics of a term of this name."""
    return metrics if name == "actor" else {f"{name}/{key.split('/', 1)[-1]}": value for key, value in metrics.items()}


def common_normalizer(terms: Sequence[Term], like: Tensor) -> tuple[Tensor, Tensor]:
    """``n []`` and ``scale [K]`` with ``scale / n = weight / normalizer`` of each term, in dtype and place of ``like``.

    The largest scale is 1, so that gradients on their way are of the size they have for a single term, which half
    precision keeps.
    """

    each = _normalizers(terms, like)
    counts = each.isfinite()
    n = torch.where(counts & (each != 0), each.abs(), torch.inf).min()
    n = torch.where(n.isfinite(), n, 1)
    return n, torch.where(counts, n / each, 0)  # inf for a normalizer of 0: a loss that has nothing to learn bears it


def own_normalizers(terms: Sequence[Term], like: Tensor) -> tuple[Tensor, Tensor]:
    """As `common_normalizer`, with ``n`` = 1: what is scaled is the loss itself. For dtypes that keep small numbers."""
    each = _normalizers(terms, like)
    return torch.ones_like(each[0]), torch.where(each.isfinite(), 1 / each, 0)


def _normalizers(terms: Sequence[Term], like: Tensor) -> Tensor:
    """``[K]``, normalizer / weight of each term."""

    def tensor(x: float | Tensor) -> Tensor:
        return (
            x.to(like, non_blocking=True)
            if isinstance(x, Tensor)
            else torch.full((), x, dtype=like.dtype, device=like.device)
        )

    return torch.stack([tensor(t.normalizer) / t.weight for t in terms])


def scaled(values: Tensor, scale: Tensor) -> Tensor:
    return torch.where(values == 0, 0, values * scale)


def finish_terms(
    total: Tensor,  # [], the sum scaled by `common_normalizer`, if there are several
    totals: Tensor,  # [K] fp64
    sums: Tensor,  # [K, len(SUMS)] fp64
    n: Tensor | None,  # [], of `common_normalizer`
    terms: Sequence[Term],
) -> TermsLossOutput:
    """Loss and metrics from sums."""
    metrics: Metrics = {}
    losses = {}
    for k, t in enumerate(terms):
        of_term = total if n is None else totals[k].to(total.dtype)
        out = finish(of_term, sums[k], t.normalizer, t.fields, t.objective, has_entropy=True)
        metrics |= named(out.metrics, t.name)
        losses[t.name] = out.loss
    loss = total / n if n is not None else out.loss if terms[0].weight == 1 else out.loss * terms[0].weight
    return TermsLossOutput(loss, metrics, {name: value.detach() for name, value in losses.items()})
