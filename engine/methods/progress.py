"""Credit for progress: how far each segment of a response raised the value of the prefix, by probes of its ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from ..data.columns import Array
from ..data.tree import TokenTree
from ..errors import UserError
from .credit import EPS, Credit, centred, check_untrained, rewards_of
from .estimators import continuations


def progress_bonus(trees: Sequence[TokenTree], *, alpha: float = 0.2, per: str = "segment") -> Credit:
    """MRT (arXiv 2503.07572): the outcome, and the progress of each segment, ``r_k = J(c + z_k) - J(c)``, with J the
    mean reward of the probes at the end of a prefix, as the program `prefix_value_probe` samples them.

    Per "segment" a token's credit is ``(R - mu) / (sd + 1e-6)`` plus ``alpha r_k`` of its own segment; per "response"
    it is ``(S - mu) / (sd + 1e-6)`` with ``S = R + alpha sum_k r_k``. mu and sd are over the responses of the group
    that are trained on. The last segment, which holds the answer, has no progress, and a segment whose end has no
    verdict of a probe is one with the next. So the sum is J at the last probed place less J at the prompt.

    Inferred: r_k is added as it is, the answer has none, and the default of ``alpha``.

    Args:
        alpha: weight of the progress.
        per: "segment" or "response".

    Raises:
        UserError: ``per`` is neither, or no group has probes.
    """
    if per not in ("segment", "response"):
        raise UserError(f"algorithm.advantage_options.per must be 'segment' or 'response', got {per!r}.")
    check_untrained(trees, "progress_bonus", "probes", "prefix_value_probe")
    if per == "response":
        return Credit("leaf", [_normalised(tree, _gained(tree, alpha)) for tree in trees])
    return Credit("path", [_of_tokens(tree, alpha) for tree in trees])


def _of_tokens(tree: TokenTree, alpha: float) -> Array:  # [P]
    length = tree.response_length
    token_credit = np.repeat(_normalised(tree, rewards_of(tree)), length)
    first = np.cumsum(length) - length
    for leaf, begin, end, rise in _segments(tree):
        token_credit[first[leaf] + begin : first[leaf] + end] += alpha * rise
    return token_credit


def _gained(tree: TokenTree, alpha: float) -> Array:  # [L]
    rewards = rewards_of(tree)
    for leaf, _, _, rise in _segments(tree):
        rewards[leaf] += alpha * rise
    return rewards


def _normalised(tree: TokenTree, rewards: Array) -> Array:  # [L] -> [L]
    """Normalise the rewards of the trained responses; the others have 0."""
    normalised, counted = np.zeros(tree.num_leaves), tree.trained
    if counted.any():
        trained = rewards[counted]
        normalised[counted] = centred(trained) / (trained.std(ddof=1) + EPS) if len(trained) > 1 else 0.0
    return normalised


def _segments(tree: TokenTree) -> Iterator[tuple[int, int, int, float]]:
    """Yield each probed segment of the trained responses: leaf, first and last token (exclusive), rise of the value."""
    count, total = continuations(tree)
    value, end = total / np.maximum(count, 1), tree.node_position + tree.length
    for leaf in np.flatnonzero(tree.trained).tolist():
        path = [int(tree.leaf_node[leaf])]
        while (above := int(tree.parent[path[-1]])) >= 0:
            path.append(above)
        probed = [node for node in reversed(path) if count[node]]
        for node, following in pairwise(probed):
            begin, until = (int(end[k] - tree.leaf_prompt[leaf]) for k in (node, following))
            yield leaf, begin, until, float(value[following] - value[node])
