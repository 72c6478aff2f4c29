"""Preference losses on pairs of sequences: functions of summed log-probs (the DPO family).

With S the sum of a sequence's log-probs, S_ref the reference's, and h = (S_w - S_ref,w) - (S_l - S_ref,l):

    sigmoid  -(1 - s) log sigmoid(beta h - margin) - s log sigmoid(-(beta h - margin)), s the label smoothing (cDPO)
    robust   (the above with -s) / (1 - 2 s)        hinge    max(0, 1 - (beta h - margin))
    ipo      (h - 1 / (2 beta))^2, S as means       sppo, apo and others are a few lines on `PathIndex.sum`
    simpo    -log sigmoid(beta (mean_w - mean_l) - margin), no reference
    orpo     -beta log sigmoid(log odds_w - log odds_l) of mean log-probs, to be added to an NLL on the chosen

On a tree the prefix that two leaves share cancels in h exactly, so only the tokens after it get a gradient.
Sources: Rafailov et al. 2023 (DPO), Mitchell 2023 (cDPO), Chowdhury et al. 2024 (robust), Azar et al. 2023 (IPO), Liu
et al. 2023 (hinge), Meng et al. 2024 (SimPO), Hong et al. 2024 (ORPO).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..checks import Arguments
from .api import PolicyLossOutput, normalized
from .path_index import PathIndex

PairLoss = Literal["sigmoid", "robust", "hinge", "ipo", "simpo", "orpo"]
WITHOUT_REFERENCE = ("simpo", "orpo")
WITHOUT_MARGIN = ("ipo", "orpo")


def pair_loss(
    logprob: Tensor,  # [M]
    paths: PathIndex,  # L sequences or leaves
    chosen: Tensor,  # [P] int, leaves
    rejected: Tensor,  # [P] int
    kind: PairLoss = "sigmoid",
    *,
    normalizer: float | Tensor,
    ref_logprob: Tensor | None = None,  # [M]
    mask: Tensor | None = None,  # [M] bool
    beta: float = 0.1,
    margin: float | Tensor = 0.0,  # or [P]
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,  # [P]
) -> PolicyLossOutput:
    """Compute ``sum of the pairs' losses / normalizer``, differentiable to ``logprob``; the module has the formulas.

    Metrics, means over pairs: ``rewards/chosen``, ``rewards/rejected`` (beta times the log-ratio), ``rewards/margins``,
    ``rewards/accuracies``.

    Args:
        logprob: ``[M]`` fp32 or fp64, nats, of the current policy.
        paths: which targets lie on which of the L sequences or leaves; for flat sequences
            ``PolicyFields.flat(advantage, cu_seqlens=cu_seqlens).paths``.
        chosen, rejected: ``[P]`` int, the leaves of each pair.
        kind: one of sigmoid, robust, hinge, ipo, simpo, orpo.
        normalizer: the number of pairs of the whole batch.
        ref_logprob: ``[M]``, of the reference policy; needed unless kind is simpo or orpo, which take none.
        mask: ``[M]`` bool; False: no part of a sequence's sum.
        beta: positive.
        margin: a number, or ``[P]``, for the kinds whose formula has one: not ipo or orpo.
        label_smoothing: in [0, 0.5), for sigmoid and robust.
        weight: ``[P]``, factor of each pair's loss.

    Raises:
        ValueError, TypeError: an unknown kind, an option out of its range or one that the kind does not take, or
            shapes, dtypes or devices do not fit.
        IndexError: a leaf is out of range (CPU only; on a GPU the program stops).
    """
    check = Arguments("pair_loss", "logprob", logprob)
    _check_options(check, kind, ref_logprob is not None, beta, margin, label_smoothing)
    _check_tensors(check, logprob, paths, chosen, rejected, ref_logprob, mask, margin, weight)
    check.normalizer(normalizer)

    log_ratio = logprob if ref_logprob is None else logprob - ref_logprob.to(logprob.dtype)
    counted = torch.ones_like(log_ratio) if mask is None else mask.to(log_ratio.dtype)
    of_path = paths.sum(log_ratio if mask is None else torch.where(mask, log_ratio, 0))
    if kind in ("ipo", "simpo", "orpo"):
        of_path = of_path / paths.sum(counted).clamp(min=1)
    better, worse = of_path[chosen.long()], of_path[rejected.long()]
    if kind == "orpo":
        better, worse = (x.clamp(max=-1e-7) for x in (better, worse))  # log(1 - p) of a sequence that is certain
    losses = _losses(kind, better, worse, beta, margin, label_smoothing)
    losses = losses if weight is None else losses * weight
    reward_w, reward_l = (beta * r.detach().double() for r in (better, worse))
    metrics = {
        "rewards/chosen": reward_w,
        "rewards/rejected": reward_l,
        "rewards/margins": reward_w - reward_l,
        "rewards/accuracies": (reward_w > reward_l).double(),
    }
    count = reward_w.new_tensor(float(len(chosen)))
    total = losses.sum()
    return PolicyLossOutput(
        normalized(total, normalizer),
        {name: (value.sum(), count) for name, value in metrics.items()},
    )


def _check_options(
    check: Arguments, kind: PairLoss, has_reference: bool, beta: float, margin: float | Tensor, label_smoothing: float
) -> None:
    require = check.require
    require(kind in get_args(PairLoss), f"kind '{kind}' is not known; choose one of {', '.join(get_args(PairLoss))}")
    require(
        has_reference != (kind in WITHOUT_REFERENCE),
        f"kind '{kind}' {'takes no' if kind in WITHOUT_REFERENCE else 'needs'} ref_logprob",
    )
    check.number("beta", beta, above=0, expected="positive and finite")
    check.number("label_smoothing", label_smoothing, least=0)
    require(label_smoothing < 0.5, lambda: f"label_smoothing must be in [0, 0.5), got {label_smoothing}")
    require(label_smoothing == 0 or kind in ("sigmoid", "robust"), f"kind '{kind}' does not take label_smoothing")
    require(
        kind not in WITHOUT_MARGIN or (not isinstance(margin, Tensor) and margin == 0),
        f"kind '{kind}' does not take margin",
    )


def _check_tensors(
    check: Arguments,
    logprob: Tensor,
    paths: PathIndex,
    chosen: Tensor,
    rejected: Tensor,
    ref_logprob: Tensor | None,
    mask: Tensor | None,
    margin: float | Tensor,
    weight: Tensor | None,
) -> None:
    M = len(check.floats("logprob", logprob, ("M",), dtypes=(torch.float32, torch.float64)))
    if not isinstance(paths, PathIndex):
        check.wrong_type("paths", "a PathIndex, such as PolicyFields.flat(advantage, cu_seqlens=...).paths", paths)
    paths.check(check, M)
    for name, leaves in (("chosen", chosen), ("rejected", rejected)):
        check.integers(name, leaves, chosen.shape if name == "rejected" else ("P",), " like chosen")
        check.index(name, leaves, len(paths.leaf_target), remedy="it names leaves of the paths")
    P = len(chosen)
    if ref_logprob is not None:
        check.floats("ref_logprob", ref_logprob, (M,), " like logprob")
    if mask is not None:
        check.mask("mask", mask, (M,), " like logprob")
    if weight is not None:
        check.floats("weight", weight, (P,), " like chosen")
    if isinstance(margin, Tensor):
        check.floats("margin", margin)
        fits = margin.dim() == 0 or (margin.dim() == 1 and margin.shape[0] == P)
        check.require(fits, lambda: f"margin must be a number or [{P}], got {list(margin.shape)}")
    else:
        check.number("margin", margin)
    for name, constant in (("ref_logprob", ref_logprob), ("weight", weight), ("margin", margin)):
        check.constant(name, constant)


def _losses(
    kind: PairLoss, better: Tensor, worse: Tensor, beta: float, margin: float | Tensor, label_smoothing: float
) -> Tensor:  # [P]
    if kind == "orpo":
        odds = (better - torch.log(-torch.expm1(better))) - (worse - torch.log(-torch.expm1(worse)))
        return -beta * logsigmoid(odds)
    if kind == "ipo":
        return (better - worse - 1 / (2 * beta)).square()
    x = beta * (better - worse) - margin
    return (1 - x).clamp(min=0) if kind == "hinge" else _smoothed(x, label_smoothing, kind == "robust")


def _smoothed(x: Tensor, smoothing: float, robust: bool) -> Tensor:
    if robust:
        return (-(1 - smoothing) * logsigmoid(x) + smoothing * logsigmoid(-x)) / (1 - 2 * smoothing)
    return -(1 - smoothing) * logsigmoid(x) - smoothing * logsigmoid(-x)
