"""Credit: the rewards of a batch of trees in, a number for every leaf, node or token out.

An estimator is a function of all trees of an update, so it may normalise over the batch; most use one group at a time.
``R`` are the rewards ``tree.rewards["reward"]`` of one prompt's responses, mu and sd their mean and unbiased standard
deviation, computed in float64. The loss weights of a token shared by several leaves follow exactly from the credit
(``engine/batches/batch.py``), so estimators do not deal with sharing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..data.columns import Array, Per
from ..data.tree import TokenTree
from ..errors import UserError
from ..parts.calling import call
from ..parts.context import NotReadyError

EPS = 1e-6  # added to a standard deviation that divides, as in verl (TRL adds 1e-4)
COLUMN: dict[Per, str] = {
    "leaf": "advantage",
    "node": "node_advantage",
    "token": "token_advantage",
    "path": "path_advantage",
}
"""The tree column that holds the credit of each kind."""


class Credit(NamedTuple):
    """One array per tree: of its leaves ``[L]``, nodes ``[K]``, tokens ``[T]``, or of the response tokens of one leaf
    after the other ``[P]``."""

    per: Per
    values: list[Array]


CreditFunction = Callable[[Sequence[TokenTree]], Credit]
"""Makes credit of an update's trees; its further parameters are its options."""


def give_credit(function: CreditFunction, name: str, trees: Sequence[TokenTree]) -> None:
    """Compute the credit of ``trees`` by ``function`` and store it in their columns.

    Args:
        function: returns a `Credit`, or a list of arrays ``[L]``, which is the credit of leaves.
        name: of the function in the configuration, for error messages.

    Raises:
        UserError: ``function`` raised, or did not return one finite number per leaf, node or token of every tree.
    """
    what = f"algorithm.advantage = '{name}'"
    answer = call(what, function, trees)
    credit = answer if isinstance(answer, Credit) else Credit("leaf", call(what, list, answer))
    if len(credit.values) != len(trees):
        raise UserError(f"algorithm.advantage = '{name}' returned {len(credit.values)} arrays for {len(trees)} trees.")
    for tree, values in zip(trees, credit.values, strict=True):
        numbers = call(what, np.asarray, values, np.float64)
        if not np.isfinite(numbers).all():
            raise UserError(
                f"algorithm.advantage = '{name}' must return finite numbers, one a {credit.per}; "
                f"{int((~np.isfinite(numbers)).sum())} of {numbers.size} are not."
            )
        try:
            tree.set(COLUMN[credit.per], numbers)
        except ValueError as error:
            raise UserError(f"algorithm.advantage = '{name}': {error}") from error


def group(function: Callable[..., Array]) -> Callable[..., Credit]:
    """Make an estimator of a batch from ``function``, which computes the credit ``[L]`` of one tree."""

    @functools.wraps(function)
    def estimate(trees: Sequence[TokenTree], **options: Any) -> Credit:
        return Credit("leaf", [function(tree, **options) for tree in trees])

    return estimate


def rewards_of(tree: TokenTree) -> Array:  # [L] float64
    """Return the rewards of a tree's responses."""
    return tree.rewards["reward"].astype(np.float64)


def centred(rewards: Array) -> Array:  # [L] -> [L]
    """Return rewards minus their mean: exact zeros where all are equal, so that a group without credit is known."""
    return rewards - (rewards[0] if np.ptp(rewards) == 0 else rewards.mean())


def check_untrained(trees: Sequence[TokenTree], name: str, needed: str, program: str) -> None:
    """Check that groups have responses that are not trained on.

    Args:
        name: of the estimator that reads them.
        needed: what they are, for messages.
        program: the rollout program that samples them.

    Raises:
        NotReadyError: there is none, in groups that are made up.
        UserError: there is none.
    """
    if not all(tree.trained.all() for tree in trees):
        return
    if not any("entry" in tree.meta for tree in trees):
        raise NotReadyError(f"A made-up group does not have {needed}.")
    raise UserError(
        f"algorithm.advantage = '{name}' needs groups with {needed} that no update counts; set rollout.program to "
        f"'{program}'."
    )
