"""Rewards of parts of a response: from places in its text to its tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np

from ..data.columns import COLUMNS, Array
from ..data.tree import TokenTree

Span = tuple[int, int, float]
"""Characters ``begin`` to ``end`` of a response's text, and their reward."""


def put_spans(tree: TokenTree, spans: Sequence[Sequence[Span]], decode: Callable[[Array], str]) -> None:
    """Fill `token_reward`: a span's reward comes with the token that completes its text; several on one token add up.

    Args:
        spans: of each leaf.
        decode: the text of token ids, as the verifier was given it.
    """
    length = tree.response_length
    found = COLUMNS["token_reward"].filled(int(length.sum()))
    first = np.cumsum(length) - length
    for leaf, of_leaf in enumerate(spans):
        ids = tree.token_id[tree.response_rows(leaf)]

        def characters(token: int, ids: Array = ids) -> int:
            """Of the text up to a token."""
            return len(decode(ids[: token + 1]))

        for _, end, value in of_leaf:
            at = first[leaf] + min(bisect_left(range(len(ids)), end, key=characters), len(ids) - 1)
            found[at] = np.nan_to_num(found[at]) + value
    tree.set("token_reward", found)
