"""Advantage estimators: the rewards of a tree's leaves in, one advantage a leaf out.

``R`` are the rewards ``tree.rewards["reward"]`` of one prompt's responses, mu and sd their mean and unbiased standard
deviation. Formulas and names are those of METHODS section 2; TreePO's is the only one that looks inside the tree.
A token shared by several leaves gets its exact share from the leaf advantages (``engine/data/batch.py``), so
estimators need not know about tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..data.tree import Array, TokenTree
from ..errors import UserError
from .resolve import import_function

EPS = 1e-6

Advantage = Callable[[TokenTree], Array]
"""Takes a tree of ``L`` leaves, returns ``[L]``."""


def _rewards(tree: TokenTree) -> Array:  # [L] float64
    return tree.rewards["reward"].astype(np.float64)


def group_norm(tree: TokenTree) -> Array:  # [L]
    """GRPO: ``(R - mu) / (sd + 1e-6)``; a group of one has mu 0 and sd 1."""
    rewards = _rewards(tree)
    if len(rewards) == 1:
        return rewards / (1 + EPS)
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + EPS)


def group_mean(tree: TokenTree) -> Array:  # [L]
    """Dr. GRPO: ``R - mu``; a group of one has mu 0."""
    rewards = _rewards(tree)
    return rewards - (rewards.mean() if len(rewards) > 1 else 0.0)


def rloo(tree: TokenTree) -> Array:  # [L]
    """RLOO: R minus the mean of the *others*, which is ``n / (n - 1) * (R - mu)``; R itself where there are none."""
    rewards = _rewards(tree)
    count = len(rewards)
    return rewards if count == 1 else count / (count - 1) * (rewards - rewards.mean())


def maxrl(tree: TokenTree) -> Array:  # [L]
    """MaxRL: ``(R - mu) / mu``, 0 where mu is 0.

    Raises:
        UserError: a reward is negative, which would turn the sign of the advantage around.
    """
    rewards = _rewards(tree)
    if rewards.min() < 0:
        raise UserError(
            f"The advantage 'maxrl' divides by the mean reward and needs rewards >= 0, but one is {rewards.min():g}; "
            "shift the rewards or set algorithm.advantage to another estimator."
        )
    mean = rewards.mean()
    return (rewards - mean) / mean if mean > 0 else np.zeros_like(rewards)


def opo(tree: TokenTree) -> Array:  # [L]
    """OPO: ``R - b``, ``b = sum(len * R) / sum(len)`` the length-weighted mean; mu if all responses are empty."""
    rewards = _rewards(tree)
    length = tree.response_length.astype(np.float64)
    return rewards - (np.average(rewards, weights=length) if length.any() else rewards.mean())


def tree_path_mean(tree: TokenTree) -> Array:  # [L]
    """TreePO: the mean over a leaf's ancestor groups ``g`` of ``R - mean_g(R)``.

    A group is the set of leaves below a node on the leaf's path: all leaves for the root, which always counts, and
    below it every smaller set of at least two. Nodes with the same leaves below are one group, so the result depends on
    where the tree branches and not on how its runs are cut.
    """
    rewards = _rewards(tree)
    count = tree.num_leaves
    first, last = tree.first_leaf.astype(np.int64), tree.last_leaf.astype(np.int64)
    size = last - first + 1
    parent = np.maximum(tree.parent, 0)
    is_group = (size > 1) & (size < size[parent])
    is_group[0] = True
    first, end, size = first[is_group], last[is_group] + 1, size[is_group]

    below = np.concatenate([[0.0], np.cumsum(rewards[tree.leaf_order])])
    mean = (below[end] - below[first]) / size

    def per_leaf(values: Array) -> Array:  # [groups] -> [L], summed over the groups that hold the leaf
        # a group is a range of ranks: its value begins at one end and stops at the other
        change = np.bincount(first, values, count + 1) - np.bincount(end, values, count + 1)
        return change.cumsum()[:count]

    baseline = np.empty(count)
    baseline[tree.leaf_order] = per_leaf(mean) / np.round(per_leaf(np.ones_like(mean)))
    return rewards - baseline


ADVANTAGES: dict[str, Advantage] = {
    "group_norm": group_norm,
    "group_mean": group_mean,
    "rloo": rloo,
    "maxrl": maxrl,
    "opo": opo,
    "tree_path_mean": tree_path_mean,
}


def find_advantage(name: str) -> Advantage:
    """The estimator called ``name``, or the function ``file.py:function`` names.

    Raises:
        UserError: there is no such estimator, file or function.
    """
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    if ":" not in name:
        raise UserError(
            f"algorithm.advantage = '{name}' is not known; use one of {', '.join(ADVANTAGES)}, or file.py:function."
        )
    return _checked(import_function(name), name)


def _checked(function: Advantage, name: str) -> Advantage:
    """``function`` with its result checked: it is the user's."""

    def estimate(tree: TokenTree) -> Array:  # [L]
        advantage = np.asarray(function(tree), np.float64)
        if advantage.shape != (tree.num_leaves,) or not np.isfinite(advantage).all():
            raise UserError(
                f"algorithm.advantage = '{name}' must return {tree.num_leaves} finite numbers, one a leaf; it returned "
                f"an array of shape {advantage.shape} with {int(np.isfinite(advantage).sum())} finite numbers."
            )
        return advantage

    return estimate
