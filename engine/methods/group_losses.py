"""Losses that relate the responses of one group: regressions on advantages, and a ranking.

Each ``loss`` is a sum over responses or groups of functions of the responses' summed log-probs, so a group is never
divided (``whole_trees``). ``D_i`` is the sum over the tokens of response i of log p less that of the policy before the
step's updates, or of the reference; the mean over a group is a function of the policy too, and has a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from rolltree.kernels import PathIndex, PolicyFields

from ..data.columns import Column, declare
from ..data.tree import TokenTree

declare(Column("of_group", np.int32, "leaf", "number of its group in the update, for losses", -1, to_device=True))
declare(Column("verdict", np.float32, "leaf", "the verifier's reward, for losses", to_device=True))
declare(Column("best_of_group", np.float32, "leaf", "1 for the first one of the highest reward", to_device=True))

Loss = tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]
"""A sum, and metrics as a sum and a count each."""


class _OfGroups:
    """The part that these losses have in common: each response's group and verdict as columns."""

    whole_trees = True

    def prepare(self, trees: Sequence[TokenTree]) -> None:
        for number, tree in enumerate(trees):
            tree.set("of_group", number)
            rewards = tree.rewards.get("verifier", tree.rewards.get("reward"))
            tree.set("verdict", np.zeros(tree.num_leaves) if rewards is None else rewards)

    def normalizer(self, trees: Sequence[TokenTree]) -> float:
        """Return the number of responses with tokens in the loss."""
        return float(sum((tree.loss_length > 0).sum() for tree in trees))


def _means(values: Tensor, live: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:  # [L] each -> [L], [L]
    """Return at each response the mean of ``values`` over the live responses of its group, and their number."""
    _, place = group.unique(return_inverse=True)
    zeros = values.new_zeros(int(place.max()) + 1 if len(place) else 0)
    count = zeros.index_add(0, place, live.to(values.dtype))
    total = zeros.index_add(0, place, torch.where(live, values, 0))
    return (total / count.clamp(min=1))[place], count[place]


class Regression(_OfGroups):
    """Reg-GRPO and CoPG: the sum over responses of ``(A_i - beta (D_i - mean_g D))**2``: the policy's log-ratios
    predict the advantages; there are no bounds. The divisor is the number of responses.

    Against the policy before the step's updates, with `group_norm`, it is Reg-GRPO (DeepVideo-R1; the form is
    inferred). Against the reference, with `group_mean`, its gradient is ``2 beta / n`` times that of CoPG summed over
    all pairs of a group of n, ``((R_a - R_b) - beta ((S_a - Sref_a) - (S_b - Sref_b))) grad (S_a - S_b)`` with the
    sign of a loss: the regression of differences of rewards, as in PRDP.

    Args:
        beta: scale of log-ratios (default inferred).
        base: "old" or "reference", with which log-probs are compared.

    Raises:
        ValueError: beta is not positive, or base is neither; in a step: credit is finer than a response, or there is
            no reference.
    """

    def __init__(self, beta: float = 0.1, base: str = "old") -> None:
        if not beta > 0 or base not in ("old", "reference"):
            raise ValueError(f"it needs beta above 0 and a `base` of 'old' or 'reference', got {beta} and '{base}'")
        self.beta, self.base = beta, base

    def loss(self, logprob: Tensor, fields: PolicyFields, columns: Mapping[str, Tensor], paths: PathIndex) -> Loss:
        if paths.leaf_advantage is None:
            raise ValueError("regression needs an advantage of whole responses, such as group_norm")
        base = fields.old_logprob if self.base == "old" else fields.ref_logprob
        if base is None:
            raise ValueError(f"regression found no log-probs of its `base`, '{self.base}'; give [roles.reference]")
        live = paths.leaf_length > 0
        ratio = self.beta * paths.sum(logprob - base)
        off = paths.leaf_advantage - (ratio - _means(ratio, live, columns["of_group"])[0])
        return (off.square() * live).sum(), {"ratio": ((ratio * live).sum(), live.sum())}


class Pacs(_OfGroups):
    """PACS: the verdict as a label that the policy predicts, the sum over responses of
    ``-R log sigmoid(psi) - (1 - R) log(1 - sigmoid(psi))``, ``psi_i = beta (D_i - mean of the others' D)``.

    D is against the policy before the step's updates, the divisor is the number of responses, and R is the verifier's
    reward, within [0, 1]. Inferred: the centring, and against which policy.

    Args:
        beta: scale of log-ratios (default inferred).

    Raises:
        ValueError: beta is not positive; in a step: a reward is outside of [0, 1].
    """

    def __init__(self, beta: float = 1.0) -> None:
        if not beta > 0:
            raise ValueError(f"its option `beta` must be positive, got {beta}")
        self.beta = beta

    def prepare(self, trees: Sequence[TokenTree]) -> None:
        super().prepare(trees)
        for tree in trees:
            verdict = tree.columns["verdict"]
            if ((verdict < 0) | (verdict > 1)).any():
                raise ValueError("pacs takes the reward as a label, and needs rewards within [0, 1]")

    def loss(self, logprob: Tensor, fields: PolicyFields, columns: Mapping[str, Tensor], paths: PathIndex) -> Loss:
        assert fields.old_logprob is not None
        live = paths.leaf_length > 0
        ratio = paths.sum(logprob - fields.old_logprob)
        mean, count = _means(ratio, live, columns["of_group"])
        psi = self.beta * count / (count - 1).clamp(min=1) * (ratio - mean)  # less the mean of the others
        losses = softplus(psi) - columns["verdict"] * psi
        return (losses * live).sum(), {"psi": ((psi * live).abs().sum(), live.sum())}


class Ranking(_OfGroups):
    """RRHF (as in the code optimisation of Duan et al. and in CycleAlign): the sum over groups of
    ``sum over R_i < R_j of max(0, p_i - p_j)`` and of ``-S`` of the response of the highest reward, the first if
    several have it; p is the mean of a response's log-probs, S their sum. The divisor is the number of groups.

    R is the verifier's reward. Inferred: that the best response counts also where all rewards are equal.
    """

    def prepare(self, trees: Sequence[TokenTree]) -> None:
        super().prepare(trees)
        for tree in trees:
            verdict = np.where(tree.loss_length > 0, tree.columns["verdict"], -np.inf)
            tree.set("best_of_group", (np.arange(tree.num_leaves) == verdict.argmax()) & (verdict > -np.inf))

    def normalizer(self, trees: Sequence[TokenTree]) -> float:
        """Return the number of groups with tokens in the loss."""
        return float(sum(bool((tree.loss_length > 0).any()) for tree in trees))

    def loss(self, logprob: Tensor, columns: Mapping[str, Tensor], paths: PathIndex) -> Loss:
        live, group, reward = paths.leaf_length > 0, columns["of_group"], columns["verdict"]
        total = paths.sum(logprob)
        mean = total / paths.leaf_length.clamp(min=1)
        worse = live[:, None] & live[None, :] & (group[:, None] == group[None, :]) & (reward[:, None] < reward[None, :])
        wrong = (mean[:, None] - mean[None, :]).clamp(min=0) * worse
        return wrong.sum() - (total * columns["best_of_group"]).sum(), {"disorder": (wrong.sum(), worse.sum())}
