"""The divergence from a teacher of whom K log-probs a row are known, as of a server that returns no more.

    D = sum_k phi(p_k, q_k), and with the rest as one further class  + phi(1 - sum_k p_k, 1 - sum_k q_k)

with phi of `kinds`. It is a function of the student's log-probs at K targets of each row, so the head's pass is that of
`linear_policy_loss`, which takes the derivatives

    dD / dlog q_k = q_k (g_k - g_rest),

g_rest = dphi/dq of the further class, or 0. Everything here is fp64: probabilities of the rest are differences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import Arguments
from ..linear_logprob.targets import ABSENT
from .kinds import CONSTANT, Kind, summands


def check_topk(check: Arguments, ids: Tensor, teacher_logprob: Tensor, vocabulary: int) -> None:
    """Check ids ``[R, K]`` and log-probs of rows that count, on a CPU.

    Raises:
        IndexError: an id is out of range.
        ValueError: a row names an id twice, or its log-probs are none.
    """
    if ids.device.type != "cpu":
        return
    check.index("ids", ids, vocabulary, low=ABSENT, remedy=f"{ABSENT} stands for none")
    in_order = ids.sort(1).values
    twice = in_order[:, 1:][(in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] != ABSENT)]
    if len(twice):
        check.require(False, f"ids name {int(twice[0])} twice in one row; add up its probabilities")
    present = ids != ABSENT
    none = present & ~(teacher_logprob < torch.inf)
    check.require(not bool(none.any()), "teacher_logprob must hold log-probs where ids are not -1, got NaN or inf")
    most = float(torch.where(present, teacher_logprob.double().exp(), 0).sum(1).amax()) if ids.numel() else 0.0
    check.require(
        most <= 1 + TOLERANCE,
        f"the probabilities of teacher_logprob add up to {most:.3} in a row; give log-probs of the whole vocabulary",
    )


TOLERANCE = 1e-2
"""By how much probabilities may add up to more than 1: servers round log-probs, some of them to half precision."""


class TopK:
    """The divergence of R rows and its derivatives, chunk by chunk; see `linear_policy_loss.fused.Evaluator`."""

    def __init__(
        self,
        kind: Kind,
        ids: Tensor,  # [R, K] int64; -1: none
        teacher_logprob: Tensor,  # [R, K]
        weights: Tensor,  # [R], in the accumulation dtype
        rest: bool,
        vocabulary: int,
    ) -> None:
        self.kind, self.weights, self.rest = kind, weights, rest
        self.absent = ids == ABSENT
        self.target = ids.masked_fill(self.absent, 0).flatten()  # [R K]; an absent one scores token 0 instead
        self.teacher_logprob = teacher_logprob.double().masked_fill(self.absent, -torch.inf)
        self.whole = ids.shape[1] - self.absent.sum(1) >= vocabulary  # [R]: every id is there, so there is no rest
        self.least = torch.finfo(weights.dtype).eps  # probability of the rest that differences can tell from 0
        self.divergence = torch.empty_like(weights)

    needs_entropy = False

    def derivatives(
        self, targets: slice, paths: slice, logprob: Tensor, entropy: Tensor, add_paths: bool = True
    ) -> tuple[Tensor, None]:
        """Return the derivatives of the weighted sum by the log-probs ``[c K]`` of ``targets``, and keep D."""
        K = self.absent.shape[1]
        rows = slice(targets.start // K, targets.stop // K)
        absent, log_p = self.absent[rows], self.teacher_logprob[rows]
        log_q = logprob.double().view(-1, K).masked_fill(absent, -torch.inf)
        phi, slope = self._summands(log_p, log_q)
        value = phi.sum(1)
        if self.rest:
            log_rest_p, log_rest_q = (self._rest(log, self.whole[rows]) for log in (log_p, log_q))
            of_rest, rest_slope = self._summands(log_rest_p, log_rest_q)
            value = value + of_rest
            g_rest = torch.where(self.whole[rows], 0, rest_slope * (-log_rest_q).exp())
            slope = slope - log_q.exp() * g_rest[:, None]
        self.divergence[rows] = value.to(self.divergence.dtype)
        slope = torch.where(absent, 0, slope) * self.weights[rows, None]
        return slope.flatten().to(logprob.dtype), None

    def _summands(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """Return phi and q g with the constant of g: these are sums over a part of the vocabulary."""
        phi, slope = summands(self.kind, log_p, log_q)
        return phi, slope + CONSTANT.get(self.kind.name, 0.0) * log_q.exp()

    def _rest(self, log: Tensor, whole: Tensor) -> Tensor:
        """Return the log-prob of all other ids, at least `least`; -inf where there are none."""
        rest = (1 - log.exp().sum(1)).clamp(min=self.least).log()
        return torch.where(whole, -torch.inf, rest)
