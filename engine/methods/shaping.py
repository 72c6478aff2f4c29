"""Shaping: from the named rewards that a verifier returned to the one reward that credit reads.

Each function takes a tree, whose ``rewards`` hold the verifier's named rewards (``reward`` among them), and returns the
new ``reward`` ``[L]``. Several are applied one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..data.columns import Array
from ..data.tree import TokenTree
from ..errors import UserError
from ..parts.calling import call

Shaping = Callable[[TokenTree], Array]
GIVEN = "verifier"
"""The reward as it was before any shaping."""


def shape_rewards(shapings: Sequence[tuple[str, Shaping]], tree: TokenTree) -> None:
    """Replace ``tree.rewards["reward"]`` by the shaped reward; the unshaped one stays in ``rewards["verifier"]``.

    Args:
        shapings: each with its key in the configuration, for error messages; applied in this order.

    Raises:
        UserError: a shaping does not return a finite number for every response.
    """
    if shapings:
        tree.rewards[GIVEN] = tree.rewards["reward"]
    for what, shaping in shapings:
        found = call(what, np.asarray, shaping(tree), np.float32)
        if found.shape != (tree.num_leaves,) or not np.isfinite(found).all():
            raise UserError(f"{what} must return a finite number for each of {tree.num_leaves} responses.")
        tree.rewards["reward"] = found


def weighted(tree: TokenTree, *, weights: Mapping[str, float]) -> Array:  # [L]
    """The reward is the weighted sum of the verifier's named rewards."""
    return sum((w * _named(tree, name) for name, w in weights.items()), np.zeros(tree.num_leaves))


def gated(tree: TokenTree, *, gate: str) -> Array:  # [L]
    """The reward counts only where the verifier's reward named ``gate`` is positive, and is 0 elsewhere."""
    return np.where(_named(tree, gate) > 0, tree.rewards["reward"], 0.0)


def overlong(tree: TokenTree, *, longest: int, buffer: int) -> Array:  # [L]
    """DAPO's soft overlong punishment (Yu et al. 2025, eq. 13): the reward falls linearly by up to 1 over the last
    ``buffer`` tokens before a response has ``longest`` tokens; longer ones lose 1."""
    return tree.rewards["reward"] - np.clip((tree.response_length - (longest - buffer)) / buffer, 0.0, 1.0)


def _named(tree: TokenTree, name: str) -> Array:
    if name not in tree.rewards or np.isnan(tree.rewards[name]).any():
        raise UserError(
            f"The verifier did not give every response a reward '{name}'; it named {', '.join(sorted(tree.rewards))}."
        )
    return tree.rewards[name]


SHAPINGS: dict[str, Callable[..., Array]] = {"weighted": weighted, "gated": gated, "overlong": overlong}
