"""Trees that several policies sampled: the part of each policy, and the texts and tokens of each role."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from .columns import Array
from .segment import Origin
from .tree import TokenTree


def sampled_by(tree: TokenTree, policy: int) -> TokenTree | None:
    """Return ``tree`` as the policy of that number learns from it: other policies' tokens are observations to it.

    Leaves without a token of the policy are left out; None if there are no others. The columns are copies, so what is
    written on the result is not written on ``tree``.
    """
    others = (tree.origin == Origin.SAMPLED) & (tree.model != policy)
    columns = dict(tree.columns)
    columns["origin"] = np.where(others, np.int8(Origin.OBSERVATION), tree.origin)
    columns["loss_mask"] = tree.loss_mask & ~others
    seen = replace(tree, columns=columns, meta=dict(tree.meta))
    absent = seen.count_along(seen.origin == Origin.SAMPLED) == 0
    return seen.without_leaves(absent) if absent.any() else seen


def in_role(tree: TokenTree, role: int) -> Array:  # [T] bool
    """Mark the tokens that were sampled in the role of that place among ``tree.meta["roles"]``."""
    marked: Array = (tree.origin == Origin.SAMPLED) & (tree.role == role)
    return marked


def role_texts(tree: TokenTree, leaf: int, decode: Callable[[Array], str]) -> dict[str, str]:
    """Return the text of each role's tokens in a response, by the role's name; a role without tokens is absent.

    Args:
        decode: returns the text of token ids.
    """
    rows, texts = tree.response_rows(leaf), {}
    for place, name in enumerate(tree.meta.get("roles", ())):
        role_rows = rows[in_role(tree, place)[rows]]
        if len(role_rows):
            texts[name] = decode(tree.token_id[role_rows])
    return texts
