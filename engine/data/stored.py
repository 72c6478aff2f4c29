"""Trees and texts that are in another process until something in this one reads them.

An engine keeps what it has sampled, and the run's process decides by lengths, rewards and versions alone. A
`StoredTree` has these: nodes and leaves, the columns of leaves, rewards, metadata, and numbers of tokens. They are read
and written as those of any tree. Whatever else is read of it, it fetches its tokens first and is an ordinary tree from
then on, so code that needs tokens works on both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from .columns import COLUMNS, Array, find_column
from .episodes import Episodes
from .parting import tree_parting
from .tree import TokenTree

STRUCTURE = ("parent", "start", "length", "first_leaf", "last_leaf", "leaf_node", "leaf_order", "leaf_prompt")
"""Arrays of nodes and leaves, which are here."""


class Source(Protocol):
    """A value that is elsewhere; `get` returns it."""

    def get(self) -> Any: ...


class Sampled(NamedTuple):
    """A tree, and the texts of its leaves' responses where they were decoded."""

    tree: TokenTree
    texts: Sequence[str] | None


@dataclass(frozen=True)
class Here:
    """The source of a value of this process."""

    value: Any

    def get(self) -> Any:
        return self.value


@dataclass(frozen=True)
class TreeOf:
    """The source of the tree in a stored `Sampled`."""

    stored: Source

    def get(self) -> TokenTree:
        tree: TokenTree = self.stored.get().tree
        return tree


class StoredTexts(Sequence[str]):
    """The texts in a stored `Sampled`, fetched when the first is read; a copy for another process fetches its own.

    Args:
        told: the texts, where this process has been told them.
    """

    def __init__(self, stored: Source, count: int, told: Sequence[str] | None = None) -> None:
        self._stored, self._count = stored, count
        self._fetched = told

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: Any) -> Any:
        if self._fetched is None:
            self._fetched = self._stored.get().texts
        return self._fetched[at]

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredTexts, (self._stored, self._count)


class LossVersions(NamedTuple):
    """The policy versions of a tree's tokens in the loss: their number, sum, smallest and largest; 0 without any."""

    tokens: int = 0
    total: int = 0
    oldest: int = 0
    newest: int = 0

    @classmethod
    def of(cls, tree: TokenTree) -> LossVersions:
        """Return those of a tree; a stored one knows them."""
        if isinstance(tree, StoredTree):
            return tree._counted.in_loss
        versions = tree.policy_version[tree.loss_mask]
        if not len(versions):
            return cls()
        return cls(len(versions), int(versions.sum(dtype=np.int64)), int(versions.min()), int(versions.max()))

    def only(self, version: int) -> bool:
        """Return True if no token has another version."""
        return not self.tokens or self.oldest == self.newest == version


class Counted(NamedTuple):
    """Properties of a tree that follow from its tokens, and are computed where these are.

    Attributes:
        node_position, sampled_tokens, loss_length: see `TokenTree`.
        versions: [L, 2] int64, the oldest and the newest policy version of each response's tokens in the loss; 0 and -1
            without any.
        first_difference: tokens before the first difference between the prompts of an agent's episodes; None: all are
            the same.
        in_loss: versions of the tokens in the loss.
    """

    node_position: Array
    sampled_tokens: int
    loss_length: Array
    versions: Array
    first_difference: int | None
    in_loss: LossVersions

    @classmethod
    def of(cls, tree: TokenTree) -> Counted:
        """Return those of a tree; a stored one knows them."""
        if isinstance(tree, StoredTree):
            return tree._counted
        parted = tree_parting(tree) if "agent" in tree.meta else None
        shared = None if parted is None else parted.shared
        lengths, versions = tree.loss_length, _versions(tree)
        return cls(tree.node_position, tree.sampled_tokens, lengths, versions, shared, LossVersions.of(tree))


def _versions(tree: TokenTree) -> Array:
    rows, leaf = tree.path_tokens, np.repeat(np.arange(tree.num_leaves), tree.response_length)
    in_loss = tree.loss_mask[rows]
    bounds, leaf = np.tile(np.array([0, -1]), (tree.num_leaves, 1)), leaf[in_loss]
    if len(leaf):
        version, first = tree.policy_version[rows[in_loss]], np.flatnonzero(np.diff(leaf, prepend=-1))
        bounds[leaf[first], 0] = np.minimum.reduceat(version, first)
        bounds[leaf[first], 1] = np.maximum.reduceat(version, first)
    return bounds


class StoredTree(TokenTree):
    """A tree without its tokens; see the module's description. Make one with `of`, and say with `place` where they are.

    Reading a token raises what its source raises, such as `GoneError`.
    """

    _counted: Counted
    _leaf_columns: dict[str, Array]
    _names: dict[str, None]  # of all columns, in order
    _source: Source  # of the tree as it was sampled
    _later: list[tuple[Source, int, list[str]]]  # columns written since: a list of those of trees, and the place in it
    _episodes: StoredTree | None

    @classmethod
    def of(cls, tree: TokenTree) -> StoredTree:
        """Return ``tree`` without its tokens."""
        stored = cls.__new__(cls)
        stored.__dict__ |= {name: getattr(tree, name) for name in STRUCTURE}
        stored.rewards, stored.meta, stored.pictures = dict(tree.rewards), dict(tree.meta), tree.pictures
        stored._counted = Counted.of(tree)
        stored._leaf_columns = {name: tree.columns[name] for name in tree.names if COLUMNS[name].per == "leaf"}
        stored._names = dict.fromkeys(tree.names)
        stored._later = []
        episodes = Episodes(tree).tree
        stored._episodes = None if episodes is tree else cls.of(episodes)
        return stored

    def place(self, source: Source) -> None:
        """Say where the tree is; what is here can be written from now on."""
        self._source = source
        self._leaf_columns = {name: np.array(values) for name, values in self._leaf_columns.items()}
        self.rewards = {name: np.array(values) for name, values in self.rewards.items()}

    def write(self, columns: Mapping[str, Array | None], rewards: Mapping[str, Array], source: Source, at: int) -> None:
        """Enter columns and rewards that another process wrote.

        Args:
            columns: those of leaves; None for another one, which ``source`` has in entry ``at`` of a list.
        """
        self._names |= dict.fromkeys(columns)
        if left := [name for name, values in columns.items() if values is None]:
            self._later.append((source, at, left))
        self._leaf_columns |= {name: np.array(values) for name, values in columns.items() if values is not None}
        self.rewards |= {name: np.array(values) for name, values in rewards.items()}

    def whole(self) -> TokenTree:
        """Return the tree with its tokens, whose arrays may be read-only; this one stays as it is."""
        tree: TokenTree = self._source.get()
        columns = dict(tree.columns)
        for source, at, names in self._later:
            of_tree = source.get()[at]
            columns |= {name: of_tree[name] for name in names}
        columns |= self._leaf_columns
        return replace(
            tree,
            columns={name: columns[name] for name in self._names},
            rewards=dict(self.rewards),
            meta=dict(self.meta),
            pictures=self.pictures,
        )

    def copy(self) -> StoredTree:
        """Return a copy that can be written apart from this one."""
        copied = StoredTree.__new__(StoredTree)
        copied.__dict__ |= vars(self)
        copied._leaf_columns = {name: values.copy() for name, values in self._leaf_columns.items()}
        copied._names, copied._later = dict(self._names), list(self._later)
        copied.rewards = {name: values.copy() for name, values in self.rewards.items()}
        copied.meta = dict(self.meta)
        return copied

    def enter(self, name: str, values: Array) -> None:
        """Give the column ``name`` values of this process; unlike `set` it fetches nothing."""
        held = find_column(name).array(values, len(values), "StoredTree.enter")
        if COLUMNS[name].per == "leaf":
            self.set(name, held)
        else:
            self.write({name: None}, {}, Here([{name: held}]), 0)

    def here(self) -> dict[str, Array]:
        """Return the columns that are in this process."""
        held = dict(self._leaf_columns)
        for source, at, names in self._later:
            if isinstance(source, Here):
                held |= {name: source.get()[at][name] for name in names}
        return {name: held[name] for name in self._names if name in held}

    def fetch(self) -> None:
        """Become an ordinary tree, which can be written."""
        tree = self.whole()
        tree.columns = {name: np.array(values) for name, values in tree.columns.items()}
        self.__dict__, self.__class__ = vars(tree), TokenTree  # type: ignore[assignment]

    def of_episodes(self, main: Array) -> TokenTree | None:
        assert self._episodes is not None
        joined = StoredTree.__new__(StoredTree)
        joined.__dict__ |= vars(self._episodes)
        joined._leaf_columns = {name: values[main] for name, values in self._leaf_columns.items()}
        joined._names = dict.fromkeys([*self._episodes._names, *self._names])
        joined._source = _EpisodesOf(self)
        return joined

    # -- as `TokenTree` ---------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        column = COLUMNS.get(name)
        if column is not None and column.per == "leaf" and "_leaf_columns" in self.__dict__:
            return self._leaf_columns[name] if name in self._leaf_columns else self._filled(name)
        if "_source" not in self.__dict__ or (column is None and name not in TokenTree.__dataclass_fields__):
            raise AttributeError(f"'StoredTree' object has no attribute or column '{name}'")
        self.fetch()
        return getattr(self, name)

    def set(self, name: str, values: npt.ArrayLike) -> None:
        if (column := find_column(name)).per != "leaf":
            self.fetch()
            return self.set(name, values)
        self._leaf_columns[name] = column.array(values, self.num_leaves, "TokenTree.set")
        self._names[name] = None

    @property
    def names(self) -> Collection[str]:
        return self._names.keys()

    @property
    def num_tokens(self) -> int:
        return int(self.length.sum())

    @property
    def node_position(self) -> Array:
        return self._counted.node_position

    @property
    def sampled_tokens(self) -> int:
        return self._counted.sampled_tokens

    @property
    def loss_length(self) -> Array:
        return self._counted.loss_length


def enter(tree: TokenTree, name: str, values: Array) -> None:
    """Give a column its values, without fetching a stored tree."""
    if isinstance(tree, StoredTree):
        tree.enter(name, values)
    else:
        tree.set(name, values)


def whole(tree: TokenTree) -> TokenTree:
    """Return a tree with its tokens; a stored one stays as it is, as other threads may have it too."""
    return tree.whole() if isinstance(tree, StoredTree) else tree


@dataclass(frozen=True)
class _EpisodesOf:
    """Makes the tree of episodes of a group's tree, whose tokens it fetches."""

    group: TokenTree

    def get(self) -> TokenTree:
        return Episodes(whole(self.group)).tree
