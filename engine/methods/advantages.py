"""The advantage estimators that `algorithm.advantage` names: those of `credit`, and those of further papers.

The rewards of a group are in float64, ``mu`` and ``sd`` their mean and unbiased standard deviation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..data.columns import Array
from ..data.segment import Origin
from ..data.statistics import reads
from ..data.tree import TokenTree
from ..errors import UserError
from . import credit, estimators, remembered, scored
from .credit import EPS, Credit, centred, group, rewards_of
from .estimators import node_values
from .progress import progress_bonus
from .roles import by_role
from .selections import most_varied
from .shaping import ANSWER, begins_given, last_match


def _normalised(values: Array, eps: float = EPS) -> Array:
    """Return ``(x - mean) / (sd + eps)``; zeros for a single value."""
    return centred(values) / (values.std(ddof=1) + eps) if len(values) > 1 else np.zeros(len(values))


@group
def virtual_max(tree: TokenTree, *, largest: float = 1.0) -> Array:  # [L]
    """NGRPO (Nan et al. 2025, arXiv 2509.18851): `group_norm` with mu and sd over the rewards and one virtual reward
    ``largest``, so a group that is all wrong has negative credit (the unbiased sd is inferred)."""
    rewards = rewards_of(tree)
    union = np.append(rewards, largest)
    return (rewards - union.mean()) / (union.std(ddof=1) + EPS)


@group
def signed(tree: TokenTree) -> Array:  # [L]
    """W-REINFORCE (Zhu et al. 2025, arXiv 2506.01347): 1 where R > 0, else -1; no baseline."""
    return np.where(rewards_of(tree) > 0, 1.0, -1.0)


def gpg(trees: Sequence[TokenTree]) -> Credit:
    """GPG (Chu et al. 2025, arXiv 2504.02546): ``alpha (R - mu)``, alpha the number of responses of the batch over the
    number with a reward other than 0 (at least 1)."""
    every = np.concatenate([rewards_of(tree) for tree in trees])
    alpha = len(every) / max(int(np.count_nonzero(every)), 1)
    return Credit("leaf", [alpha * centred(rewards_of(tree)) for tree in trees])


@group
def passk_best(tree: TokenTree) -> Array:  # [L]
    """Pass@k training (verl `grpo_passk`): the best response alone has credit, ``(R_max - R_second) / (sd + 1e-6)``."""
    rewards = rewards_of(tree)
    advantage = np.zeros(len(rewards))
    if len(rewards) > 1:
        second, first = np.sort(rewards)[-2:]
        advantage[rewards.argmax()] = (first - second) / (rewards.std(ddof=1) + EPS)
    return advantage


def remax(trees: Sequence[TokenTree]) -> Credit:
    """ReMax (Li et al. 2023, arXiv 2310.10505): ``R - R_greedy``, the reward of the group's greedy response, as the
    program `greedy_baseline` samples it; the mean of the others where it has no verdict.

    Raises:
        UserError: no group has a response that is not trained on.
    """
    credit.check_untrained(trees, "remax", "a greedy response", "greedy_baseline")
    advantages = []
    for tree in trees:
        rewards, counted = rewards_of(tree), tree.trained
        greedy = rewards[~counted]
        advantages.append(np.where(counted, rewards - (greedy.mean() if len(greedy) else rewards.mean()), 0.0))
    return Credit("leaf", advantages)


def gdpo(trees: Sequence[TokenTree], *, weights: Mapping[str, float], whiten: bool = True) -> Credit:
    """GDPO (Liu et al. 2026, arXiv 2601.05242): ``sum_k w_k (R_k - mu_k) / (sd_k + 1e-6)`` over named rewards, each
    normalised by its group, then whitened over the responses of the batch.

    Args:
        weights: the weight of each named reward of the verifier; one that judges no response of a group (all NaN, see
            `reward.parts`) adds nothing there.
        whiten: whiten the sum over the batch.

    Raises:
        UserError: the verifier gave no reward of a name.
    """
    advantages = []
    for tree in trees:
        total = np.zeros(tree.num_leaves)
        for name, weight in weights.items():
            if name not in tree.rewards:
                raise UserError(f"The verifier named no reward '{name}'; it named {', '.join(sorted(tree.rewards))}.")
            values = tree.rewards[name].astype(np.float64)
            if not np.isnan(values).all():  # else the reward does not judge this problem's task
                total += weight * _normalised(values)
        advantages.append(total)
    return Credit(
        "leaf",
        estimators.whitened(advantages, [np.ones(len(values)) for values in advantages]) if whiten else advantages,
    )


def task_norm(trees: Sequence[TokenTree]) -> Credit:
    """Task-balanced advantages (Shen et al. 2025, QwenLong-L1.5, arXiv 2512.12967): ``(R - mu) / (sd + 1e-6)`` with mu
    of the group and sd over all responses of its task in the batch (the pairing of the two scopes is inferred)."""
    tasks = [tree.meta.get("task") for tree in trees]
    spread: dict[object, float] = {}
    for task in dict.fromkeys(tasks):
        rewards = np.concatenate([rewards_of(t) for t, other in zip(trees, tasks, strict=True) if other == task])
        spread[task] = float(rewards.std(ddof=1)) if len(rewards) > 1 else 1.0
    return Credit("leaf", [centred(rewards_of(t)) / (spread[task] + EPS) for t, task in zip(trees, tasks, strict=True)])


@group
def noise_forward(tree: TokenTree, *, false_negatives: float) -> Array:  # [L]
    """Noisy verifiers, forward correction (Cai et al. 2025): ``rho`` where R = 1, ``rho - 1`` where
    R = 0, rho the rate at which the verifier rejects right answers."""
    return np.where(rewards_of(tree) > 0, false_negatives, false_negatives - 1)


def treerl(trees: Sequence[TokenTree]) -> Credit:
    """TreeRL (Hou et al. 2025, arXiv 2506.11902): a node's credit is ``(GA + LA) / sqrt(leaves below)``, GA and LA its
    value minus the root's and the parent's; values are means of the leaves' leave-one-out rewards (as `rloo`)."""

    def of_nodes(tree: TokenTree) -> Array:  # [K]
        count = max(tree.num_leaves, 1)
        value = node_values(tree) * (count / (count - 1) if count > 1 else 1.0)
        below = tree.last_leaf - tree.first_leaf + 1
        return (2 * value - value[0] - value[np.maximum(tree.parent, 0)]) / np.sqrt(below)

    return Credit("node", [of_nodes(tree) for tree in trees])


def depth_norm(trees: Sequence[TokenTree]) -> Credit:
    """BranchGRPO (Li et al. 2025, arXiv 2509.06040): ``(V - mu) / (sd + 1e-6)`` of a node's value over the nodes of its
    depth in the tree; 0 for the prompt and where a depth has one node."""

    def of_nodes(tree: TokenTree) -> Array:  # [K]
        depth = np.zeros(tree.num_nodes, np.int64)
        for node in range(1, tree.num_nodes):
            depth[node] = depth[tree.parent[node]] + 1
        value, normalised = node_values(tree), np.zeros(tree.num_nodes)
        for level in range(1, int(depth.max()) + 1):
            normalised[depth == level] = _normalised(value[depth == level])
        return normalised

    return Credit("node", [of_nodes(tree) for tree in trees])


def branch_mean(trees: Sequence[TokenTree]) -> Credit:
    """ARPO, hard (Dong et al. 2025, arXiv 2507.19849): a shared token has the mean of its branches' `group_norm`
    advantages, any other its own response's."""

    def of_nodes(tree: TokenTree, advantage: Array) -> Array:  # [K]
        before = np.concatenate([[0.0], np.cumsum(advantage[tree.leaf_order])])
        below = tree.last_leaf - tree.first_leaf + 1
        return (before[tree.last_leaf + 1] - before[tree.first_leaf]) / below

    advantages = estimators.group_norm(trees).values
    return Credit("node", [of_nodes(tree, values) for tree, values in zip(trees, advantages, strict=True)])


def treepo(trees: Sequence[TokenTree], *, by_size: bool = False, drop_equal: bool = False) -> Credit:
    """TreePO with its options (Li et al. 2025, arXiv 2508.17445): like `tree_path_mean`, over groups weighted by their
    size or without those whose rewards are all equal, then whitened over the batch's tokens in the loss.

    Args:
        by_size: weigh a group by its number of leaves.
        drop_equal: leave groups of equal rewards out of the mean.
    """

    def of_leaves(tree: TokenTree) -> Array:  # [L]
        rewards = rewards_of(tree)
        total, weight = np.zeros(tree.num_leaves), np.zeros(tree.num_leaves)
        size = tree.last_leaf - tree.first_leaf + 1
        for node in range(tree.num_nodes):
            is_group = node == 0 or 1 < size[node] < size[tree.parent[node]]
            members = tree.leaf_order[tree.first_leaf[node] : tree.last_leaf[node] + 1]
            if not is_group or (drop_equal and np.ptp(rewards[members]) == 0):
                continue
            share = float(len(members)) if by_size else 1.0
            total[members] += share * centred(rewards[members])
            weight[members] += share
        return total / np.maximum(weight, 1)

    advantages = [of_leaves(tree) for tree in trees]
    return Credit("leaf", estimators.whitened(advantages, [tree.loss_length for tree in trees]))


def turn_credit(trees: Sequence[TokenTree], *, gamma: float = 1.0) -> Credit:
    """Turn-level credit (as in EPO and SCoRe; the normalisation is inferred): a turn's credit is its return to go over
    turns, ``G_k = r_k + gamma G_k+1``, normalised over the group's turns of the same index.

    A turn is a run of sampled tokens, of one call where an agent made them; its reward is the sum of `token_reward` in
    it and before the next one, and the response's reward belongs to its last turn.
    """

    def of_paths(tree: TokenTree) -> Array:  # [P]
        sampled = (tree.origin == Origin.SAMPLED)[tree.path_tokens]
        token_rewards = np.nan_to_num(tree.token_reward.astype(np.float64))
        cuts = np.cumsum(tree.response_length)[:-1]
        turns: list[Array] = []
        gains: list[Array] = []
        calls = np.split(tree.call[tree.path_tokens], cuts)
        of_leaves = zip(np.split(sampled, cuts), calls, np.split(token_rewards, cuts), rewards_of(tree), strict=True)
        for live, call, reward, outcome in of_leaves:
            begins = live & ~np.concatenate([[False], live[:-1] & (call[1:] == call[:-1])])
            turn = np.maximum(np.cumsum(begins) - 1, 0)
            gain = np.bincount(turn, reward, max(int(turn.max(initial=0)) + 1, 1))
            gain[-1] += outcome
            for k in range(len(gain) - 2, -1, -1):
                gain[k] += gamma * gain[k + 1]
            turns.append(turn)
            gains.append(gain)
        for k in range(max(map(len, gains))):
            having = [gain for gain in gains if len(gain) > k]
            for gain, value in zip(having, _normalised(np.array([gain[k] for gain in having])), strict=True):
                gain[k] = value
        return np.concatenate([gain[turn] for gain, turn in zip(gains, turns, strict=True)])

    return Credit("path", [of_paths(tree) for tree in trees])


def canon(trees: Sequence[TokenTree], *, share: float = 0.75) -> Credit:
    """CANON by length (Chen et al. 2025; the mixing is inferred): the group is split at its median
    length; ``share (R - mean of the other half) + (1 - share) (R - mean of the own half)``. With halves of one size a
    share of 1/2 is R - mu, so the default, which is inferred, is another."""

    return Credit("leaf", [_halved(rewards_of(tree), tree.response_length, share) for tree in trees])


@reads("policy_entropy")
def canon_entropy(trees: Sequence[TokenTree], *, share: float = 0.75) -> Credit:
    """CANON by entropy (Chen et al. 2025): as `canon`, with the group split at its median of the mean entropy of a
    response's tokens in the loss, that of the policy before the step's updates; 0 for a response without tokens."""

    def entropy(tree: TokenTree) -> Array:  # [L]
        rows = [tree.response_rows(leaf) for leaf in range(tree.num_leaves)]
        live = [of_leaf[tree.loss_mask[of_leaf]] for of_leaf in rows]
        means = np.array(
            [tree.policy_entropy[of_leaf].astype(np.float64).mean() if len(of_leaf) else 0.0 for of_leaf in live]
        )
        if np.isnan(means).any():
            raise UserError(
                "algorithm.advantage = 'canon_entropy' needs the policy's entropy of every token in the loss."
            )
        return means

    return Credit("leaf", [_halved(rewards_of(tree), entropy(tree), share) for tree in trees])


def _halved(rewards: Array, metric: Array, share: float) -> Array:  # [L], [L] -> [L]
    """Return the credit of responses whose group is split at the median of ``metric``."""
    high = metric > np.median(metric)
    if high.all() or not high.any():
        return centred(rewards)
    mean = np.where(high, rewards[high].mean(), rewards[~high].mean())
    other = np.where(high, rewards[~high].mean(), rewards[high].mean())
    return share * (rewards - other) + (1 - share) * (rewards - mean)


def batch_std(trees: Sequence[TokenTree]) -> Credit:
    """Lite PPO (Liu et al. 2025, arXiv 2508.08221): ``(R - mu) / (sd + 1e-6)`` with mu of the group and sd over all
    responses of the batch."""
    every = np.concatenate([rewards_of(tree) for tree in trees])
    spread = float(every.std(ddof=1)) if len(every) > 1 else 1.0
    return Credit("leaf", [centred(rewards_of(tree)) / (spread + EPS) for tree in trees])


@group
def pods(tree: TokenTree, *, keep: int) -> Array:  # [L]
    """PODS (Xu et al. 2025, arXiv 2504.13818): `group_norm` among the ``keep`` responses that the selection
    `most_varied` chooses; 0 for the others."""
    advantage, chosen = np.zeros(tree.num_leaves), most_varied(tree, keep=keep)
    advantage[chosen] = _normalised(rewards_of(tree)[chosen])
    return advantage


@group
def learnable(tree: TokenTree) -> Array:  # [L]
    """Difficulty-weighted groups (as in PuzzleCraft; the form is inferred): `group_norm` times ``4 p (1 - p)``, p the
    group's mean reward within [0, 1]."""
    rewards = rewards_of(tree)
    p = float(np.clip(rewards.mean(), 0, 1))
    return 4 * p * (1 - p) * _normalised(rewards)


def dispersed(trees: Sequence[TokenTree], texts: Sequence[Sequence[str]], *, pattern: str = ANSWER) -> Credit:
    """PuzzleCraft (the form is inferred): `group_norm` times ``4 p (1 - p) H / log n``, p the group's mean reward
    within [0, 1] and H the entropy in nats of the answers of its n responses, so that groups that are easy, hard or
    of one answer count less. A response without an answer has one of its own.

    Args:
        pattern: a regular expression; the first group of its last match is the answer.
    """

    def of_leaves(tree: TokenTree, said: Sequence[str]) -> Array:  # [L]
        answers = [last_match(pattern, text) or f"\0{i}" for i, text in enumerate(said)]
        share = np.unique(answers, return_counts=True)[1] / len(answers)
        spread = -(share * np.log(share)).sum() / np.log(len(answers)) if len(answers) > 1 else 0.0
        rewards = rewards_of(tree)
        p = float(np.clip(rewards.mean(), 0, 1))
        return spread * 4 * p * (1 - p) * _normalised(rewards)

    return Credit("leaf", [of_leaves(tree, said) for tree, said in zip(trees, texts, strict=True)])


def wrong_steps(trees: Sequence[TokenTree], *, penalty: float = 1.0) -> Credit:
    """CAPO: `group_norm` less ``penalty`` at the tokens of wrong steps (the form and ``penalty`` are inferred).

    A step ends at a token with a reward of its own (`token_reward`, from a verifier's spans) and begins after the step
    before it; it is wrong where that reward is negative. Tokens after the last step are in none.
    """

    def of_paths(tree: TokenTree, advantage: Array) -> Array:  # [L] -> [P]
        token_credit = np.repeat(advantage, tree.response_length)
        cuts = np.cumsum(tree.response_length)
        for leaf, rewards in enumerate(np.split(tree.token_reward, cuts[:-1])):
            begin, first = cuts[leaf] - len(rewards), 0
            for end in np.flatnonzero(~np.isnan(rewards)).tolist():
                token_credit[begin + first : begin + end + 1] -= penalty * (rewards[end] < 0)
                first = end + 1
        return token_credit

    advantages = estimators.group_norm(trees).values
    return Credit("path", [of_paths(tree, values) for tree, values in zip(trees, advantages, strict=True)])


def by_beginning(trees: Sequence[TokenTree]) -> Credit:
    """Group statistics for each kind of response (as in MASA and role baselines): `group_norm` among the responses that
    begin with a given text, and among the others; 0 for one alone."""

    def of_leaves(tree: TokenTree) -> Array:  # [L]
        rewards, begins, advantage = rewards_of(tree), begins_given(tree), np.zeros(tree.num_leaves)
        for kind in (begins, ~begins):
            advantage[kind] = _normalised(rewards[kind])
        return advantage

    return Credit("leaf", [of_leaves(tree) for tree in trees])


def log_ratio(trees: Sequence[TokenTree], *, gamma: float = 1.0) -> Credit:
    """Self-Rewarding PPO: each token's reward is its log-prob under the teacher (a model after fine-tuning) less that
    under the reference (before it); credit is the discounted sum over the tokens in the loss from it on, whitened over
    the batch. The verifier's rewards do not count.

    Raises:
        UserError: a token was not scored by both, as in a run without these roles.
    """
    credits, live = [], []
    for tree in trees:
        gain = (tree.teacher_logprob.astype(np.float64) - tree.ref_logprob)[tree.path_tokens]
        counted = tree.loss_mask[tree.path_tokens]
        if np.isnan(gain[counted]).any():
            raise UserError("algorithm.advantage = 'log_ratio' needs [roles.teacher] and [roles.reference]; add both.")
        cuts, returns = np.cumsum(tree.response_length)[:-1], []
        for in_loss, values in zip(np.split(counted, cuts), np.split(np.where(counted, gain, 0.0), cuts), strict=True):
            total, sums = 0.0, np.zeros(len(values))
            for t in reversed(range(len(values))):
                if in_loss[t]:
                    total = values[t] + gamma * total
                sums[t] = total
            returns.append(sums)
        credits.append(np.concatenate(returns))
        live.append(counted)
    return Credit("path", estimators.whitened(credits, live))


ADVANTAGES: dict[str, Callable[..., Any]] = {
    "group_norm": estimators.group_norm,
    "group_mean": estimators.group_mean,
    "rloo": estimators.rloo,
    "maxrl": estimators.maxrl,
    "beta_norm": estimators.beta_norm,
    "opo": estimators.opo,
    "tree_path_mean": estimators.tree_path_mean,
    "reinforce_pp": estimators.reinforce_pp,
    "reinforce_pp_baseline": estimators.reinforce_pp_baseline,
    "process": estimators.process,
    "segment_value_diff": estimators.segment_value_diff,
    "sibling_group": estimators.sibling_group,
    "gae": estimators.gae,
    "nft": estimators.nft,
    "virtual_max": virtual_max,
    "signed": signed,
    "gpg": gpg,
    "passk_best": passk_best,
    "remax": remax,
    "gdpo": gdpo,
    "task_norm": task_norm,
    "noise_forward": noise_forward,
    "treerl": treerl,
    "depth_norm": depth_norm,
    "branch_mean": branch_mean,
    "treepo": treepo,
    "turn_credit": turn_credit,
    "canon": canon,
    "canon_entropy": canon_entropy,
    "learnable": learnable,
    "dispersed": dispersed,
    "wrong_steps": wrong_steps,
    "batch_std": batch_std,
    "pods": pods,
    "by_role": by_role,
    "optimal_token": scored.optimal_token,
    "gradient_weighted": scored.gradient_weighted,
    "laser": scored.SelfRewarded,
    "by_beginning": by_beginning,
    "prior_fusion": remembered.PriorFusion,
    "log_ratio": log_ratio,
    "progress_bonus": progress_bonus,
    "cumulative": remembered.Cumulative,
    "constrained": remembered.Constrained,
    "reweighted": remembered.Reweighted,
    "by_role_mean": remembered.RoleMeans,
}
