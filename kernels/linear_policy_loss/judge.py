"""The sum of a batch's terms, evaluated where the log-probs of a part of it are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..policy_loss import SUMS, Evaluation, Objective, PolicyFields, evaluate
from .terms import scaled


class Judge:
    """The terms' sum, asked chunk by chunk of targets for its derivatives; adds up values and metrics meanwhile.

    Targets lie in row order. A term of tokens judges them there; what looks at paths needs the caller's order, in
    which the log-probs known so far are kept.
    """

    def __init__(
        self,
        terms: Sequence[tuple[PolicyFields, Objective]],
        scale: Tensor | None,  # [K]; None: of one term
        place: Tensor | None,  # [P] int64, of each target in the caller's order; None: the same order
        like: Tensor,
    ) -> None:
        M = len(terms[0][0].adv_pos)
        in_order = [place is None or objective.scope == "token" for _, objective in terms]
        self.terms = [
            (fields if place is None or not here else fields.take(place), objective, here)
            for (fields, objective), here in zip(terms, in_order, strict=True)
        ]
        self.everything = slice(0, M)
        self.scale, self.place = scale, place
        self.known = () if all(in_order) else (like.new_zeros(M), like.new_zeros(M))
        self.scored = torch.zeros(M if self.known else 0, dtype=torch.bool, device=like.device)
        self.totals = [like.new_zeros((), dtype=torch.float64) for _ in terms]
        self.sums = [like.new_zeros(len(SUMS), dtype=torch.float64) for _ in terms]

    def know(self, own: slice, logprob: Tensor, entropy: Tensor) -> None:
        """Take in the values ``[p]`` of targets that paths of several chunks share."""
        if self.known:
            assert self.place is not None
            for everywhere, values in zip(self.known, (logprob, entropy), strict=True):
                everywhere.index_copy_(0, self.place[own], values)
            self.scored.index_fill_(0, self.place[own], True)

    def derivatives(
        self,
        own: slice,  # of the targets in row order
        paths: slice,  # of the caller's: the whole paths of these
        logprob: Tensor,  # [p]
        entropy: Tensor,  # [p]
        add_paths: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """``a [p]`` and ``b [p]``, the latter None where no term has an entropy.

        ``add_paths``: whether value and metrics of ``paths`` are added up here, or later with others.
        """
        self.know(own, logprob, entropy)
        a: Tensor | None = None
        b: Tensor | None = None
        for k, (fields, objective, in_order) in enumerate(self.terms):
            if in_order:
                of = evaluate(logprob, entropy, fields.slice(own.start, own.stop), objective)
                d_logprob, d_entropy = of.d_logprob, of.d_entropy
            else:
                of, at = self._of_paths(fields, objective, own, paths)
                d_logprob, d_entropy = of.d_logprob[at], None if of.d_entropy is None else of.d_entropy[at]
            if in_order or add_paths:
                self.totals[k], self.sums[k] = self.totals[k] + of.total, self.sums[k] + of.sums
            a = self._add(a, k, d_logprob.to(logprob.dtype))
            if objective.needs_entropy and d_entropy is not None:
                b = self._add(b, k, d_entropy.to(logprob.dtype))
        assert a is not None
        return a, b

    def _of_paths(
        self, fields: PolicyFields, objective: Objective, own: slice, paths: slice
    ) -> tuple[Evaluation, Tensor]:
        assert self.place is not None
        local, scored = fields.slice(paths.start, paths.stop), self.scored[paths]
        local = replace(local, mask=scored if local.mask is None else scored & local.mask)
        logprob, entropy = (everywhere[paths] for everywhere in self.known)
        return evaluate(logprob, entropy, local, objective), self.place[own] - paths.start

    def _add(self, before: Tensor | None, k: int, values: Tensor) -> Tensor:
        values = values if self.scale is None else scaled(values, self.scale[k])
        return values if before is None else before + values

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """``total []``, ``totals [K]``, ``sums [K, len(SUMS)]``, in fp64."""
        totals = torch.stack(self.totals)
        total = (totals if self.scale is None else scaled(totals, self.scale.double())).sum()
        return total, totals, torch.stack(self.sums)
