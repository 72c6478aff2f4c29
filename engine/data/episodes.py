"""Episodes of agents: what is said of a response holds for an episode, whose tokens may be in several leaves.

Functions of responses (credit, shaping, selections, group callbacks, curricula, metrics) get `Episodes.tree`, which has
one leaf for each episode: its response are the tokens of all its leaves' responses, call after call. What they answer
goes back to the leaves by `leaves`, `tokens` and `write_back`. A tree whose every leaf is a response of its own, as all
are that no agent made, is its own `Episodes.tree`.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from .columns import COLUMNS, Array
from .tree import TokenTree, in_order

OF_LEAVES = ("errors", "given_rewards", "given_named")
"""Metadata by the number of a leaf, which a tree of episodes does not have."""


def answers(tree: TokenTree) -> Array:  # [L] int64
    """Return for each leaf the one that stands for its episode: which ends with the last answer, or else its last."""
    every = np.arange(tree.num_leaves)
    if "episode" not in tree.names:
        return every
    main = every.copy()
    for number in np.unique(tree.episode[tree.episode >= 0]):
        leaves = np.flatnonzero(tree.episode == number)
        answering = leaves[tree.answer[leaves]]
        main[leaves] = answering[0] if len(answering) else leaves[-1]
    return main


def count(tree: TokenTree, counted: Array) -> int:  # [L] bool
    """Return the number of episodes of the ``counted`` leaves."""
    return len(np.unique(answers(tree)[counted]))


def shares(tree: TokenTree, counted: Array) -> Array:  # [L] bool -> [L] float64
    """Return the weight of each ``counted`` leaf in means over sequences: those of an episode weigh 1 together."""
    of = answers(tree)
    number = np.bincount(of, counted, tree.num_leaves)
    return np.where(counted, 1 / np.maximum(number[of], 1), 0.0)


class Episodes:
    """A group's tree with one leaf an episode, and the way back to the group's own.

    Attributes:
        tree: the tree of episodes; the group's own tree where each leaf is one.
        place: [L] int64, the leaf of `tree` that each leaf is part of.
    """

    def __init__(self, tree: TokenTree) -> None:
        self._group = tree
        of = answers(tree)
        self._main, first = np.unique(of, return_index=True)
        by_first = np.argsort(first)  # in the order of their first leaves
        self._main = self._main[by_first]
        number = np.empty(tree.num_leaves, np.int64)
        number[self._main] = np.arange(len(self._main))
        self.place: Array = number[of]
        self._rows: Array | None = None  # of the group's tokens in the tree of episodes
        self.tree = tree
        if len(self._main) < tree.num_leaves:
            stored = tree.of_episodes(self._main)
            self.tree = self._joined() if stored is None else stored
            self.tree.rewards = {name: values[self._main] for name, values in tree.rewards.items()}
            self.tree.meta = {name: value for name, value in tree.meta.items() if name not in OF_LEAVES}

    def leaves(self, values: Array) -> Array:  # [E] -> [L]
        """Return the values of episodes for their leaves; values of another number as they are."""
        return values[self.place] if values.shape[:1] == (len(self._main),) else values

    def tokens(self, values: Array) -> Array:  # [T of the tree of episodes] -> [T]
        """Return values of the tokens of responses; 0 for those that are in none."""
        if self.tree is self._group:
            return values
        if self._rows is None:
            self._joined()
        spread = np.zeros((self._group.num_tokens, *values.shape[1:]), values.dtype)
        spread[self._rows] = values
        return spread

    def members(self, episodes: Collection[int]) -> list[int]:
        """Return the leaves of the episodes of these numbers.

        Raises:
            ValueError: there is no such episode.
        """
        if self.tree is self._group:
            return list(episodes)
        if not set(episodes) <= set(range(len(self._main))):
            raise ValueError(f"a group of {len(self._main)} episodes cannot keep {list(episodes)[:8]}")
        return np.flatnonzero(np.isin(self.place, list(episodes))).tolist()

    def write_back(self) -> None:
        """Write columns, rewards and metadata that were changed or added in the tree of episodes on the group's own.

        Credit of nodes becomes credit of their tokens.
        """
        if self.tree is self._group:
            return
        if self._rows is None:
            self._joined()
        for name, values in self.tree.columns.items():
            before = self._before.get(name)
            if before is not None and np.array_equal(before, values, equal_nan=values.dtype.kind == "f"):
                continue
            per = COLUMNS[name].per
            if per == "leaf":
                self._group.set(name, self.leaves(values))
            elif per == "path":
                column = COLUMNS[name].filled(len(values))
                column[self._source] = values
                self._group.set(name, column)
            elif per == "token":
                column = np.array(getattr(self._group, name))
                column[self._rows] = values
                self._group.set(name, column)
            else:
                self._group.set("token_advantage", self.tokens(np.repeat(values, self.tree.length)))
        for name, values in self.tree.rewards.items():
            self._group.rewards[name] = self.leaves(values)
        self._group.meta |= self.tree.meta

    def _joined(self) -> TokenTree:
        """Return the tree of episodes; its nodes are the runs of a node's tokens, those of an episode one below the
        other."""
        group = self._group
        rows, leaf = group.path_tokens, np.repeat(np.arange(group.num_leaves), group.response_length)
        self._source = np.lexsort((np.arange(len(rows)), group.call[rows], self.place[leaf]))  # call after call
        rows, episode = rows[self._source], self.place[leaf[self._source]]
        node = np.repeat(np.arange(group.num_nodes), group.length)[rows]
        begins = np.ones(len(rows), bool)
        begins[1:] = (node[1:] != node[:-1]) | (episode[1:] != episode[:-1])
        first = np.flatnonzero(begins)
        of = episode[first]  # [K - 1], the episode of each node but the prompt
        above = np.where(np.append(True, of[1:] != of[:-1])[: len(of)], 0, np.arange(len(of)))
        ends = np.zeros(len(self._main), np.int64)
        ends[of] = np.arange(1, len(of) + 1)  # the last one of each
        prompt = group.prompt_length
        self._rows = np.concatenate([np.arange(prompt), rows])
        source = {
            "token": self._rows,
            "node": np.append(0, node[first]).astype(np.int64),
            "leaf": self._main,
            "path": self._source,
        }
        tree = in_order(
            np.append(-1, above),
            np.diff(np.concatenate([[0], prompt + first, [prompt + len(rows)]])),
            group.token_id[self._rows],
            ends,
            np.full(len(ends), prompt),
            {name: values[source[COLUMNS[name].per]] for name, values in group.columns.items()},
        )
        self._before = {name: values.copy() for name, values in tree.columns.items()}
        tree.pictures = group.pictures
        return tree
