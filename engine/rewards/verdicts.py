"""Writes verdicts on responses to the rewards of their tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..data.columns import Array
from ..data.segment import LeafStatus
from ..data.tree import TokenTree
from .interface import RewardResult
from .spans import put_spans


def put_rewards(
    tree: TokenTree,
    verdicts: Sequence[RewardResult | None],
    decode: Callable[[Array], str],
    *,
    failed: float = np.nan,
) -> None:
    """Write the named rewards of each leaf to ``tree``, NaN if there is none: such a leaf gets no credit. Names that an
    agent gave a value for, and no verifier, have the agent's.

    Args:
        verdicts: one per leaf; None: the leaf was not judged.
        decode: returns the text of token ids, as the verifier read it.
        failed: the reward of a leaf whose judging failed.
    """
    left_out = np.array([v is not None and v.skipped is not None for v in verdicts], bool)
    reward = [
        np.nan if v is None or v.skipped is not None else failed if v.value is None else v.value for v in verdicts
    ]
    tree.rewards["reward"] = np.array(reward, np.float32)
    for name in dict.fromkeys(name for v in verdicts if v is not None for name in v.named):
        named = [np.nan if v is None else v.named.get(name, np.nan) for v in verdicts]
        tree.rewards[name] = np.array(named, np.float32)
    for leaf, named_by_agent in tree.meta.get("given_named", {}).items():
        for name, value in named_by_agent.items():
            rewards = tree.rewards.setdefault(name, np.full(tree.num_leaves, np.nan, np.float32))
            if np.isnan(rewards[leaf]):
                rewards[leaf] = value
    if any(v is not None and v.spans for v in verdicts):
        put_spans(tree, [[] if v is None else v.spans for v in verdicts], decode)
    tree.status[np.isnan(tree.rewards["reward"]) & ~left_out] = LeafStatus.FAILED
