"""Losses of whole terms, for `algorithm.terms` with `loss`: classes as docs/extending.md describes them.

Each ``loss`` returns a sum over responses or tokens, which the run divides by the term's normaliser.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rolltree.kernels import PathIndex, PolicyFields
from rolltree.kernels.policy_loss.path_sums import previous

from ..data.columns import Array, Column, declare
from ..data.tree import TokenTree
from .group_losses import Pacs, Ranking, Regression

declare(Column("scored_id", np.int32, "token", "id that a loss scores in its place", -1, merge="first", to_device=True))


def at_ends(tree: TokenTree, token: int) -> Array:  # [T]
    """Return ``token`` at the last token of each response that is in the loss, and -1 elsewhere."""
    ids = np.full(tree.num_tokens, -1)
    ends = [tree.response_rows(int(leaf))[-1] for leaf in np.flatnonzero(tree.response_length)]
    ids[ends] = token
    return np.where(tree.loss_mask, ids, -1)


class Laser:
    """LaSeR, last-token self-rewarding: the sum over responses of ``(beta (log p(z) - c) - R)**2``, p the policy's
    distribution over the token after the response's last one but one, where it ends, and R the verifier's reward.

    That the place is the one that predicts the end token, and that the divisor is the number of responses, is inferred.

    Args:
        token: id of z, a token that responses never contain.
        beta, c: scale and offset of the score; c is about log p(z) before training, so that scores begin near 0 (both
            defaults are inferred).
    """

    extra = ("scored_id",)

    def __init__(self, token: int, beta: float = 0.1, c: float = -20.0) -> None:
        if token < 0:
            raise ValueError("its option `token` must be an id of the vocabulary, at least 0")
        self.token, self.beta, self.c = token, beta, c

    def prepare(self, trees: Sequence[TokenTree]) -> None:
        for tree in trees:
            tree.set("scored_id", at_ends(tree, self.token))
            rewards = tree.rewards.get("verifier", tree.rewards.get("reward"))
            tree.set("verdict", np.zeros(tree.num_leaves) if rewards is None else rewards)

    def normalizer(self, trees: Sequence[TokenTree]) -> float:
        return float(sum((tree.loss_length > 0).sum() for tree in trees))

    def loss(
        self,
        extra_logprob: Tensor,  # [M, 1]
        columns: Mapping[str, Tensor],
        paths: PathIndex,
    ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        counts = (paths.leaf_length > 0) & (columns["scored_id"][paths.leaf_target] >= 0)  # [L]
        score = self.beta * (extra_logprob[paths.leaf_target, 0] - self.c)
        off = (score - columns["verdict"]) * counts
        return off.square().sum(), {"score": ((score * counts).sum(), counts.sum())}


class Rover:
    """ROVER, uniform-policy evaluation: the sum over the tokens t of responses i of
    ``(Q_t - (R_i - mu) - sg(mean_v Q_t+1(v)))**2`` with ``Q_t(v) = rho (log p(v) - log p_old(v))``, p_old the policy
    before the step's updates, divided by the number of tokens; there is no ratio, bound or KL.

    The form is inferred, and so is the target R_i - mu after a response's last token, and before one that is given.
    Credit must be of whole responses: `group_mean` is R - mu.

    Args:
        rho: scale of Q (default inferred).

    Raises:
        ValueError: rho is not positive, or credit is finer than a response.
    """

    reads = ("policy_logprob", "policy_mean_logprob")

    def __init__(self, rho: float = 1.0) -> None:
        if not rho > 0:
            raise ValueError(f"its option `rho` must be positive, got {rho}")
        self.rho = rho

    def loss(
        self,
        logprob: Tensor,  # [M]
        mean_logprob: Tensor,  # [M]
        fields: PolicyFields,
        columns: Mapping[str, Tensor],
        paths: PathIndex,
    ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        if paths.leaf_advantage is None:
            raise ValueError("rover needs an advantage of whole responses, such as group_mean")
        if paths.leaf_start is not None and bool((paths.leaf_start >= 0).any()):
            raise ValueError("rover needs responses of one prompt a tree")
        count, credit = fields.weight, fields.adv_pos + fields.adv_neg  # sums over the responses through each token
        live = count > 0
        q = self.rho * torch.where(live, logprob - columns["policy_logprob"], 0)
        mean = self.rho * torch.where(live, mean_logprob - columns["policy_mean_logprob"], 0).detach()
        before, _ = previous(paths.target_end)

        def of_next(values: Tensor) -> Tensor:  # [M] -> [M], summed over the tokens that follow each
            return torch.zeros(len(values) + 1, dtype=values.dtype, device=values.device).index_add(
                0, before, values
            )[:-1] * live  # fmt: skip

        squares = torch.where(live, paths.spread(paths.leaf_advantage.square()), 0)
        target = credit + of_next(count * mean)
        constant = squares + 2 * of_next(credit * mean) + of_next(count * mean.square())
        total = (count * q.square() - 2 * q * target + constant).sum()
        return total, {"q": ((count * q).sum(), count.sum())}


class RlPlus:
    """RL-PLUS, its loss of given tokens: the sum over them of ``-A (1 - sg(p))**gamma 2 p / (p_old + p_ext)``, p the
    policy's probability, p_old before the step's updates, and p_ext = 1 that of the writer, who is not known; there are
    no bounds. The divisor is the number of tokens.

    The form is inferred. The factor, which gives improbable tokens more weight, is for A > 0 alone. Select `injected`
    tokens; several updates a step need ``algorithm.old_logprob = "recompute"``.

    Args:
        gamma: power of the factor (default inferred).

    Raises:
        ValueError: gamma is negative; in a step: tokens have no log-probs of the policy before its updates.
    """

    def __init__(self, gamma: float = 1.0) -> None:
        if gamma < 0:
            raise ValueError(f"its option `gamma` must be at least 0, got {gamma}")
        self.gamma = gamma

    def loss(self, logprob: Tensor, fields: PolicyFields) -> Tensor:
        if fields.old_logprob is None:
            raise ValueError('rl_plus needs algorithm.old_logprob = "recompute"')
        p = logprob.exp()
        credit = fields.adv_pos * (1 - p.detach()) ** self.gamma + fields.adv_neg
        return -(credit * 2 * p / (fields.old_logprob.exp() + 1)).sum()


LOSSES: dict[str, Callable[..., Any]] = {
    "laser": Laser,
    "rover": Rover,
    "regression": Regression,
    "pacs": Pacs,
    "ranking": Ranking,
    "rl_plus": RlPlus,
}
