"""Converts rewards of parts of a response from positions in its text to its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..data.characters import token_that_completes
from ..data.columns import Array
from ..data.tree import TokenTree

Span = tuple[int, int, float]
"""Characters ``begin`` to ``end`` (exclusive) of a response's text, and their reward."""


def put_spans(tree: TokenTree, spans: Sequence[Sequence[Span]], decode: Callable[[Array], str]) -> None:
    """Add to `token_reward`: a span's reward goes to the token that completes its text; several on one token add up.

    Args:
        spans: the spans of each leaf.
        decode: returns the text of token ids, as the verifier read it.
    """
    length = tree.response_length
    token_reward = tree.token_reward.copy()  # a program may have rewarded turns
    first = np.cumsum(length) - length
    for leaf, of_leaf in enumerate(spans):
        ids = tree.token_id[tree.response_rows(leaf)]
        for _, end, value in of_leaf:
            at = first[leaf] + token_that_completes(ids, end, decode)
            token_reward[at] = np.nan_to_num(token_reward[at]) + value
    tree.set("token_reward", token_reward)
