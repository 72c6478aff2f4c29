"""The divergences between a teacher's distribution p and a student's q, each a sum over the vocabulary.

    forward_kl          KL(p || q)
    reverse_kl          KL(q || p)
    jsd                 beta KL(p || m) + (1 - beta) KL(q || m),  m = beta p + (1 - beta) q
    skew_forward_kl     KL(p || m),                               m = alpha p + (1 - alpha) q
    skew_reverse_kl     KL(q || m),                               m = (1 - alpha) p + alpha q
    total_variation     1/2 sum |p - q|

``jsd`` is the generalised Jensen-Shannon divergence of GKD (Agarwal et al. 2024) in TRL's convention: as in TRL, beta
0 stands for the forward KL and beta 1 for the reverse KL, which are its limits after division by beta and 1 - beta.
The skewed KLs are those of DistiLLM (Ko et al. 2024); with alpha 0 they are the KLs.

A kind is a function of one pair (p, q): its summand phi, and g = dphi/dq. With D = sum phi the gradient of the
student's scaled logits is

    dD / dz_j = q_j (g_j - sum_v q_v g_v),

so a kernel needs two sums over the vocabulary, of phi and of q g. Constants of g cancel, and `summands` leaves them
out; `CONSTANT` has them for sums over a part of the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import Arguments

KINDS = ("forward_kl", "reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "total_variation")
"""Kernels get a kind as its place here; csrc/cpu/linear_divergence.cpp and `triton` have the same order."""

CONSTANT = {"reverse_kl": 1.0, "skew_reverse_kl": 1.0}
"""The factor that `summands` leaves out of g."""

DEFAULT_BETA, DEFAULT_ALPHA = 0.5, 0.1


class Kind(NamedTuple):
    """A divergence as kernels get it."""

    name: str  # of `KINDS`
    share: float  # of p in the mixture m: beta of jsd, alpha or 1 - alpha of the skewed KLs; else 0

    @property
    def code(self) -> int:
        return KINDS.index(self.name)


def check_kind(kind: str, beta: float | None = None, alpha: float | None = None) -> None:
    """Check the kind of a divergence before there are tensors; see `kind_of`."""
    kind_of(Arguments("linear_divergence", "kind", torch.empty(0)), kind, beta, alpha)


def kind_of(check: Arguments, kind: object, beta: float | None, alpha: float | None) -> Kind:
    """Return the kind that the arguments name, and the plain KL where a mixture is one of its two distributions.

    Raises:
        ValueError, TypeError: no kind has this name, beta is outside of 0..1 or alpha outside of 0..1 without 1, or
            one of them is given for a kind that does not have it.
    """
    check.require(isinstance(kind, str) and kind in KINDS, f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    assert isinstance(kind, str)
    skewed = kind.startswith("skew")
    check.require(beta is None or kind == "jsd", f"beta belongs to kind='jsd', and kind is '{kind}'; leave it out")
    check.require(alpha is None or skewed, f"alpha belongs to the skewed KLs, and kind is '{kind}'; leave it out")
    if kind == "jsd":
        beta = DEFAULT_BETA if beta is None else check.number("beta", beta, least=0, expected="in 0..1")
        check.require(beta <= 1, lambda: f"beta must be in 0..1, got {beta}")
        return Kind("forward_kl", 0.0) if beta == 0 else Kind("reverse_kl", 0.0) if beta == 1 else Kind("jsd", beta)
    if skewed:
        alpha = DEFAULT_ALPHA if alpha is None else check.number("alpha", alpha, least=0, expected="at least 0")
        check.require(
            alpha < 1, lambda: f"alpha must be below 1, where the divergence is 0 for any student, got {alpha}"
        )
        if alpha == 0:
            return Kind(kind.removeprefix("skew_"), 0.0)
        return Kind(kind, alpha if kind == "skew_forward_kl" else 1 - alpha)
    return Kind(kind, 0.0)


def summands(kind: Kind, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Return phi and q g, without the constant of g, elementwise; a class that has no probability adds 0.

    Args:
        log_p, log_q: log-probs of teacher and student, of one shape.
    """
    p, q = log_p.exp(), log_q.exp()
    name, share = kind
    if name == "total_variation":
        return (p - q).abs() / 2, q * (q - p).sign() / 2
    if name in ("forward_kl", "reverse_kl"):
        log_m = log_q if name == "forward_kl" else log_p
    else:
        log_m = torch.logaddexp(log_p + _log(share), log_q + _log(1 - share))
    of_p = _times(p, log_p - log_m)  # a summand of KL(p || m)
    of_q = _times(q, log_q - log_m)
    if name == "forward_kl":
        return of_p, -p
    if name == "reverse_kl":
        return of_q, of_q
    if name == "jsd":
        return share * of_p + (1 - share) * of_q, (1 - share) * of_q
    q_of_m = torch.where(q == 0, 0, (log_q - log_m).exp())  # q / m
    if name == "skew_forward_kl":
        return of_p, -(1 - share) * p * q_of_m
    return of_q, of_q - (1 - share) * q * q_of_m


def _times(probability: Tensor, logarithm: Tensor) -> Tensor:
    """Return the product, and 0 where the probability is 0."""
    return torch.where(probability == 0, 0, probability * logarithm)


def _log(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float64).log())
