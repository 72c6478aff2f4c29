"""Estimators of credit from rewards alone: group baselines, whitened returns, values of segments, and GAE.

``R`` are the rewards of one prompt's responses, mu and sd their mean and unbiased standard deviation, computed in
float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rolltree.kernels.policy_loss import gae as generalised_advantages

from ..data.columns import Array
from ..data.tree import TokenTree
from ..errors import UserError
from .credit import EPS, Credit, centred, group, rewards_of


@group
def group_norm(tree: TokenTree, *, floor: float = 0.0) -> Array:  # [L]
    """GRPO (Shao et al. 2024, section 4.1.2): ``(R - mu) / (sd + 1e-6)``; a group of one has mu 0 and sd 1.

    Args:
        floor: least sd that divides, so that negligible differences of rewards stay small (as Pref-GRPO warns).
    """
    rewards = rewards_of(tree)
    if len(rewards) == 1:
        return rewards / (1 + EPS)
    return centred(rewards) / (max(rewards.std(ddof=1), floor) + EPS)


@group
def group_mean(tree: TokenTree) -> Array:  # [L]
    """Dr. GRPO (Liu et al. 2025, arXiv 2503.20783): ``R - mu``; a group of one has mu 0."""
    rewards = rewards_of(tree)
    return centred(rewards) if len(rewards) > 1 else rewards


@group
def rloo(tree: TokenTree) -> Array:  # [L]
    """RLOO (Ahmadian et al. 2024, arXiv 2402.14740): R minus the mean of the other responses, which is
    ``n / (n - 1) * (R - mu)``; R itself in a group of one."""
    rewards = rewards_of(tree)
    count = len(rewards)
    return rewards if count == 1 else count / (count - 1) * centred(rewards)


@group
def beta_norm(tree: TokenTree, *, right: float = 1.0, wrong: float = 1.0) -> Array:  # [L]
    """AERO (arXiv 2602.14338, by its abstract): ``(R - m) / sqrt(m (1 - m))``, m the mean of the posterior of the
    success rate, ``(k + right) / (n + right + wrong)`` for k right ones of n responses. No group has advantages of 0.

    Args:
        right, wrong: the prior ``Beta(right, wrong)`` (the defaults are inferred).

    Raises:
        UserError: the prior is not positive, or a reward is not within [0, 1].
    """
    rewards = rewards_of(tree)
    if min(right, wrong) <= 0 or rewards.min() < 0 or rewards.max() > 1:
        raise UserError(
            f"The advantage 'beta_norm' needs right and wrong above 0 and rewards from 0 to 1, and they are {right:g}, "
            f"{wrong:g} and from {rewards.min():g} to {rewards.max():g}; change them or choose another estimator."
        )
    mean = (rewards.sum() + right) / (len(rewards) + right + wrong)
    return (rewards - mean) / np.sqrt(mean * (1 - mean))


@group
def maxrl(tree: TokenTree) -> Array:  # [L]
    """MaxRL (Tajwar et al. 2026, arXiv 2602.02710): ``(R - mu) / mu``, 0 where mu is 0.

    Raises:
        UserError: a reward is negative, which could flip the sign of the advantages.
    """
    rewards = rewards_of(tree)
    if rewards.min() < 0:
        raise UserError(
            f"The advantage 'maxrl' divides by the mean reward and needs rewards >= 0, but one is {rewards.min():g}; "
            "shift the rewards or set algorithm.advantage to another estimator."
        )
    mean = rewards.mean()
    return centred(rewards) / mean if mean > 0 else np.zeros_like(rewards)


@group
def opo(tree: TokenTree) -> Array:  # [L]
    """OPO (Hao et al. 2025, arXiv 2505.23585): ``R - b`` with the length-weighted mean ``b = sum(len * R) / sum(len)``;
    mu if all responses are empty."""
    rewards = rewards_of(tree)
    length = tree.response_length.astype(np.float64)
    if np.ptp(rewards) == 0:
        return np.zeros_like(rewards)
    return rewards - (np.average(rewards, weights=length) if length.any() else rewards.mean())


@group
def tree_path_mean(tree: TokenTree) -> Array:  # [L]
    """TreePO (Li et al. 2025, arXiv 2508.17445): the mean over a leaf's ancestor groups ``g`` of ``R - mean_g(R)``,
    all groups weighted equally and not whitened.

    A group is the set of leaves below a node on the leaf's path: all leaves for the root, which always counts, and
    below it every smaller set of at least two. Nodes with the same leaves below are one group, so the result depends on
    where the tree branches and not on how its unbranched stretches are split into nodes.
    """
    rewards = rewards_of(tree)
    count = tree.num_leaves
    if np.ptp(rewards) == 0:
        return np.zeros_like(rewards)
    first, last = tree.first_leaf.astype(np.int64), tree.last_leaf.astype(np.int64)
    size = last - first + 1
    parent = np.maximum(tree.parent, 0)
    is_group = (size > 1) & (size < size[parent])
    is_group[0] = True
    first, end, size = first[is_group], last[is_group] + 1, size[is_group]

    below = np.concatenate([[0.0], np.cumsum(rewards[tree.leaf_order])])
    mean = (below[end] - below[first]) / size

    def per_leaf(values: Array) -> Array:  # [groups] -> [L], summed over the groups that hold the leaf
        # a group is a range of leaf ranks: add its value at the first rank, subtract it after the last
        change = np.bincount(first, values, count + 1) - np.bincount(end, values, count + 1)
        return change.cumsum()[:count]

    baseline = np.empty(count)
    baseline[tree.leaf_order] = per_leaf(mean) / np.round(per_leaf(np.ones_like(mean)))
    return rewards - baseline


@group
def nft(tree: TokenTree) -> Array:  # [L]
    """NFT (Chen et al. 2025, arXiv 2505.18116): ``w(q)`` for reward 1 and ``-w(q)`` for reward 0, q the pass rate of
    the group, ``w = sqrt((1 - q) / q)`` (inferred: on policy it gives GRPO's gradient).

    Raises:
        UserError: a reward is neither 0 nor 1.
    """
    rewards = rewards_of(tree)
    if not np.isin(rewards, (0, 1)).all():
        raise UserError("The advantage 'nft' needs rewards of 0 and 1; choose another estimator.")
    rate = rewards.mean()
    return (2 * rewards - 1) * (np.sqrt((1 - rate) / rate) if 0 < rate < 1 else 0.0)


def reinforce_pp(trees: Sequence[TokenTree], *, gamma: float = 1.0, kl_coef: float = 0.0) -> Credit:
    """REINFORCE++ (Hu 2025, arXiv 2501.03262): returns to go ``G_t = r_t + gamma G_t+1`` of the tokens in the loss,
    whitened over the batch.

    Args:
        kl_coef: each token's reward is lowered by this times its sampled log-prob minus the reference's.
    """
    returns = [_returns(tree, gamma, kl_coef) for tree in trees]
    return Credit("path", whitened(returns, [_in_loss(tree) for tree in trees]))


def reinforce_pp_baseline(trees: Sequence[TokenTree]) -> Credit:
    """REINFORCE++-baseline (Hu 2025, arXiv 2501.03262): ``R - mu`` of the group, whitened over the batch's tokens in
    the loss."""
    return Credit("leaf", whitened(group_mean(trees).values, [tree.loss_length for tree in trees]))


def process(trees: Sequence[TokenTree]) -> Credit:
    """GRPO with process supervision (Shao et al. 2024, section 4.1.3): ``A_t`` is the sum of the normalised rewards of
    the steps that end at t or later.

    The reward of a step is in the column `token_reward` at the step's last token. Rewards are normalised as in
    `group_norm` over all steps of a group. A response without steps has credit 0.
    """

    def of_steps(tree: TokenTree) -> Array:  # [P]
        rewards = tree.token_reward.astype(np.float64)
        steps = rewards[~np.isnan(rewards)]
        spread = steps.std(ddof=1) if len(steps) > 1 else 0.0
        normalised = np.nan_to_num((rewards - (steps.mean() if len(steps) else 0.0)) / (spread + EPS))
        cuts = _boundaries(tree)[1:-1]
        return np.concatenate([part[::-1].cumsum()[::-1] for part in np.split(normalised, cuts)])

    return Credit("path", [of_steps(tree) for tree in trees])


def segment_value_diff(trees: Sequence[TokenTree]) -> Credit:
    """SPO (Guo et al. 2025, arXiv 2505.23564): a node's advantage is ``V(node) - V(parent)``; 0 for the prompt.

    V is the mean reward of the leaves below. Where responses that are not trained on begin at a node's end, as in
    `spo_chain`, it is their mean reward; elsewhere such responses do not count.
    """

    def difference(tree: TokenTree) -> Array:  # [K]
        value = node_values(tree) if tree.trained.all() else _continued_values(tree)
        return value - value[np.maximum(tree.parent, 0)]

    return Credit("node", [difference(tree) for tree in trees])


def sibling_group(trees: Sequence[TokenTree]) -> Credit:
    """PROPA (Jiang et al. 2025, arXiv 2511.10279): a node's advantage is ``(V - mu) / (sd + 1e-6)`` over its siblings
    and itself, where V is the mean reward of the leaves below."""

    def normalised(tree: TokenTree) -> Array:  # [K]
        value, parent = node_values(tree)[1:], tree.parent[1:]
        count = np.maximum(np.bincount(parent, minlength=tree.num_nodes), 1)
        mean = np.bincount(parent, value, tree.num_nodes) / count
        off = value - mean[parent]
        deviation = np.sqrt(np.bincount(parent, off**2, tree.num_nodes) / np.maximum(count - 1, 1))
        return np.concatenate([[0.0], off / (deviation[parent] + EPS)])

    return Credit("node", [normalised(tree) for tree in trees])


def gae(
    trees: Sequence[TokenTree], *, gamma: float = 1.0, lam: float = 1.0, whiten: bool = True, kl_coef: float = 0.0
) -> Credit:
    """PPO: generalised advantages (Schulman et al. 2015, eq. 16) along every path, from the critic's column `value`;
    also writes `value_target`.

    ``delta_t = r_t + gamma V_t+1 - V_t``, ``A_t = delta_t + gamma lam A_t+1``, ``value_target = A + V``; tokens outside
    the loss pass V and A on. A shared token has one value, but an advantage of its own in each response.

    Args:
        whiten: normalise the advantages over the batch's tokens in the loss; value targets stay as they are.
        kl_coef: as in `reinforce_pp`.

    Raises:
        UserError: a token in the loss has no value, as in a run without a critic.
    """
    credit = []
    for tree in trees:
        rows, live = tree.path_tokens, _in_loss(tree)
        value = tree.value[rows].astype(np.float64)
        if np.isnan(value[live]).any():
            raise UserError("algorithm.advantage = 'gae' needs the value of every token; add a critic to [roles].")
        advantage, target = generalised_advantages(
            torch.from_numpy(_token_rewards(tree, kl_coef)),
            torch.from_numpy(np.where(live, value, 0.0)),
            torch.from_numpy(_boundaries(tree)),
            gamma=gamma,
            lam=lam,
            mask=torch.from_numpy(live),
        )
        credit.append(advantage.numpy())
        tree.set("value_target", target.numpy())
    return Credit("path", whitened(credit, [_in_loss(tree) for tree in trees]) if whiten else credit)


def node_values(tree: TokenTree) -> Array:  # [K] float64
    """Return the mean reward of the leaves below each node."""
    rewards = rewards_of(tree)
    if np.ptp(rewards) == 0:
        return np.full(tree.num_nodes, rewards[0])
    below = np.concatenate([[0.0], np.cumsum(rewards[tree.leaf_order])])
    return (below[tree.last_leaf + 1] - below[tree.first_leaf]) / (tree.last_leaf - tree.first_leaf + 1)


def _continued_values(tree: TokenTree) -> Array:  # [K] float64
    """Return the mean reward of the untrained responses that begin at each node's end; where there are none, of the
    trained leaves below, and of all leaves below a node that no trained one is below."""
    rewards = rewards_of(tree)[tree.leaf_order]
    trained = tree.trained[tree.leaf_order]

    def below(values: Array) -> Array:  # [L] -> [K]
        total = np.concatenate([[0.0], np.cumsum(values)])
        return total[tree.last_leaf + 1] - total[tree.first_leaf]

    count = below(trained)
    begun, of_begun = continuations(tree)
    live = np.where(count, below(rewards * trained) / np.maximum(count, 1), node_values(tree))
    return np.where(begun, of_begun / np.maximum(begun, 1), live)


def continuations(tree: TokenTree) -> tuple[Array, Array]:  # [K] int64, [K] float64
    """Return the number of untrained responses that begin at each node's end, and the sum of their rewards.

    The node is the first one above the response that a trained response passes through, or that has a token in the
    loss: the response that it continues may have lost its verdict.
    """
    passed = np.bincount(np.repeat(np.arange(tree.num_nodes), tree.length), tree.loss_mask, tree.num_nodes) > 0
    below = np.concatenate([[0], np.cumsum(tree.trained[tree.leaf_order])])
    passed |= below[tree.last_leaf + 1] > below[tree.first_leaf]
    rewards, start = rewards_of(tree)[~tree.trained], tree.leaf_node[~tree.trained]
    while (above := ~passed[start] & (tree.parent[start] >= 0)).any():
        start = np.where(above, tree.parent[start], start)
    return np.bincount(start, minlength=tree.num_nodes), np.bincount(start, rewards, tree.num_nodes)


def _boundaries(tree: TokenTree) -> Array:  # [L + 1] int64
    return np.concatenate([[0], np.cumsum(tree.response_length, dtype=np.int64)])


def _in_loss(tree: TokenTree) -> Array:  # [P] bool
    return tree.loss_mask[tree.path_tokens]


def _token_rewards(tree: TokenTree, kl_coef: float) -> Array:  # [P] float64
    """Return each token's own reward, plus the response's reward at the response's last token in the loss.

    Raises:
        UserError: ``kl_coef`` is given, and a token in the loss has no log-prob of the reference.
    """
    rewards, live = np.nan_to_num(tree.token_reward.astype(np.float64)), _in_loss(tree)
    if kl_coef:
        drift = (tree.behaviour_logprob.astype(np.float64) - tree.ref_logprob)[tree.path_tokens]
        if np.isnan(drift[live]).any():
            raise UserError("algorithm.advantage_options.kl_coef needs a reference; give the run a [roles.reference].")
        rewards = rewards - kl_coef * np.where(live, drift, 0.0)
    place = np.where(live, np.arange(len(live)), -1)
    cuts = _boundaries(tree)
    for leaf, value in enumerate(rewards_of(tree)):
        of_leaf = place[cuts[leaf] : cuts[leaf + 1]]
        if len(of_leaf) and of_leaf.max() >= 0:
            rewards[of_leaf.max()] += value
    return rewards


def _returns(tree: TokenTree, gamma: float, kl_coef: float) -> Array:  # [P] float64
    """Return ``G_t = r_t + gamma G_t+1`` over the tokens in the loss: the advantages where every value is 0."""
    rewards, live = _token_rewards(tree, kl_coef), torch.from_numpy(_in_loss(tree))
    zero = torch.zeros(len(rewards), dtype=torch.float64)
    cuts = torch.from_numpy(_boundaries(tree))
    return generalised_advantages(torch.from_numpy(rewards), zero, cuts, gamma=gamma, lam=1.0, mask=live)[0].numpy()


def whitened(values: list[Array], weights: list[Array]) -> list[Array]:
    """Return ``(x - mean) / sqrt(var + 1e-8)`` with mean and unbiased variance over all trees, counting each value
    ``weights`` times."""
    x, w = np.concatenate(values), np.concatenate(weights).astype(np.float64)
    count = w.sum()
    mean = (w * x).sum() / max(count, 1)
    variance = (w * (x - mean) ** 2).sum() / max(count - 1, 1)
    return [(v - mean) / np.sqrt(variance + 1e-8) for v in values]
