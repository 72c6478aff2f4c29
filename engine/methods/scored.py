"""Credit that reads the policy's own statistics of its distributions (`engine/data/statistics.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..data.columns import Array
from ..data.statistics import reads
from ..data.tree import TokenTree
from ..errors import UserError
from . import credit, estimators
from .credit import Credit, centred, group, rewards_of
from .losses import at_ends


def _steepness(tree: TokenTree) -> Array:  # [T] float64
    """Return ``1 - 2 p + sum_v p_v^2`` of each token, the squared norm of the gradient of its log-prob with respect to
    the logits; 0 outside of the loss.

    Raises:
        UserError: a token in the loss was not scored.
    """
    squared, probability = tree.policy_sum_p2.astype(np.float64), np.exp(tree.policy_logprob.astype(np.float64))
    steepness = np.where(tree.loss_mask, 1 - 2 * probability + squared, 0.0)
    if np.isnan(steepness).any():
        raise UserError("An advantage reads the column policy_sum_p2, which some token in the loss does not have.")
    return steepness


@reads("policy_logprob", "policy_sum_p2")
def optimal_token(trees: Sequence[TokenTree]) -> Credit:
    """Optimal token baseline (verl): ``A_t = R - B_t`` with ``B_t = sum_i R_i W_it / (sum_i W_it + 1e-8)`` over the
    group's responses that have a t-th token in the loss, ``W_it`` the sum of ``1 - 2 p + sum_v p_v^2`` over the tokens
    of response i up to t (the set of responses is inferred)."""

    def of_paths(tree: TokenTree) -> Array:  # [P]
        rewards, cuts = rewards_of(tree), np.cumsum(tree.response_length)[:-1]
        live = np.split(tree.loss_mask[tree.path_tokens], cuts)
        weight = np.split(_steepness(tree)[tree.path_tokens], cuts)
        total, share = np.zeros(max(map(len, live))), np.zeros(max(map(len, live)))
        for reward, counted, w in zip(centred(rewards), live, weight, strict=True):
            grown = np.cumsum(w) * counted
            total[: len(counted)] += reward * grown
            share[: len(counted)] += grown
        baseline = total / (share + 1e-8)
        return np.concatenate([r - baseline[: len(counted)] for r, counted in zip(centred(rewards), live, strict=True)])

    return Credit("path", [of_paths(tree) for tree in trees])


@reads("policy_logprob", "policy_sum_p2")
@group
def gradient_weighted(tree: TokenTree) -> Array:  # [L]
    """OBLR-PO: ``R - b`` with ``b = sum w R / sum w``, w the squared norm of the gradient of a response's log-prob,
    here ``sum_t (1 - 2 p_t + sum_v p_v^2)`` with respect to the logits (the proxy is inferred); mu if all are 0."""
    off = centred(rewards_of(tree))
    cuts = np.cumsum(tree.response_length)[:-1]
    weight = np.array([part.sum() for part in np.split(_steepness(tree)[tree.path_tokens], cuts)])
    return off - (np.average(off, weights=weight) if weight.any() else 0.0)


class SelfRewarded:
    """LaSeR, its advantage: ``(1 - mix)`` times `group_norm` of the rewards plus ``mix`` times that of the policy's own
    scores at the end of each response, which are log p(z) but for scale and offset (the mix is inferred).

    Args:
        token: as for the loss `laser`, whose beta and c do not change normalised scores.
        mix: share of the policy's own scores (default inferred).

    Raises:
        ValueError: the token is negative, or the mix is not within [0, 1].
    """

    reads = ("policy_logprob/scored_id",)

    def __init__(self, token: int, mix: float = 0.1) -> None:
        if token < 0 or not 0 <= mix <= 1:
            raise ValueError("its option `token` must be an id of the vocabulary, at least 0, and `mix` in [0, 1]")
        self.token, self.mix = token, mix

    def prepare(self, trees: Sequence[TokenTree]) -> None:
        for tree in trees:
            tree.set("scored_id", at_ends(tree, self.token))

    def __call__(self, trees: Sequence[TokenTree]) -> Credit:
        by_score = []
        for tree in trees:
            logprob, length = tree.columns["policy_logprob/scored_id"], tree.response_length
            score = [logprob[tree.response_rows(leaf)[-1]] if length[leaf] else 0.0 for leaf in range(tree.num_leaves)]
            values = np.nan_to_num(np.array(score, np.float64))
            spread = values.std(ddof=1) if len(values) > 1 else 1.0
            by_score.append(centred(values) / (spread + credit.EPS))
        by_reward = estimators.group_norm(trees).values
        return Credit("leaf", [(1 - self.mix) * a + self.mix * b for a, b in zip(by_reward, by_score, strict=True)])
