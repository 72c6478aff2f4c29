"""Windows of steps: the rows advance by themselves on the device for some steps, then the host looks at the samples.

A sample's random number is a function of the seed and the position, and a row writes keys of its own. So samples after
the end of a response can be thrown away: no other bit changes. A program is told of an end as if the host had looked at
every step: the rows of its request that went on are put back to that step, unless the program is `independent`.

A window has one step where the host has to see each token (constraints, texts that stop, forks, recorded likely tokens
or ids, drafts), where branches wait for keys, where pages for more are short, and where a row would begin another chunk
of keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rolltree.kernels.tree_decode.items import CHUNK, FIELDS

from .rows import RowTable, Sampled, Samples
from .stops import GO_ON

if TYPE_CHECKING:
    from ._host import KvTree

Array = npt.NDArray[Any]
MOST_STEPS = 8
WASTE = 16
"""At least so many row-steps of a window are kept for each that is thrown away because an end was known before."""


class Windows:
    """Decides how many steps rows take before the host looks.

    Args:
        most: most steps of a window.
        positions: longest path of the model, in tokens; None without a limit.
        drafted_rows: steps of at most this many rows may get drafts.
    """

    def __init__(
        self, rows: RowTable, tree: KvTree, most: int = 1, *, positions: int | None = None, drafted_rows: int = 0
    ) -> None:
        self.rows, self.tree, self.most = rows, tree, most
        self._positions = positions
        self._drafted_rows = drafted_rows

    def steps(self, slots: Array) -> int:  # [R] int64
        """Return the number of steps that the running branches of ``slots`` take, if nothing else is computed."""
        if self.most == 1 or len(slots) <= self._drafted_rows or self._each_token_counts(slots):
            return 1
        last = self.rows.position[slots]
        most = min(self.most, CHUNK - int((last % CHUNK).max()))  # chunks of paths
        most = min(most, CHUNK - int((self.tree.lengths(self.rows.kv_node[slots]) % CHUNK).max()))  # of nodes
        if self._positions is not None:
            most = min(most, self._positions - int(last.max()))
        return self._within_pages(slots, self._without_waste(slots, most))

    def _each_token_counts(self, slots: Array) -> bool:
        rows = self.rows
        looked_at = (rows.forks, rows.constrained, rows.stops_at_text, rows.keeps, rows.top)
        return any(bool(column[slots].any()) for column in looked_at)

    def _without_waste(self, slots: Array, most: int) -> int:
        left = self.rows.segment_end[slots] - self.rows.length[slots]
        together = ~self.rows.independent[slots]
        if together.any():
            of, first = _by_request(self.rows, slots), np.full(len(slots), np.iinfo(np.int64).max)
            np.minimum.at(first, of[together], left[together])
            left = np.minimum(left, first[of])
        while most > 1 and WASTE * int(np.maximum(most - left, 0).sum()) > most * len(slots):
            most -= 1
        return most

    def _within_pages(self, slots: Array, most: int) -> int:
        nodes, free = self.rows.kv_node[slots], self.tree.free_pages
        while most > 1 and self.tree.pages_needed(nodes, np.full(len(slots), most)) > free:
            most -= 1
        return most

    def cut(self, samples: Samples) -> Samples:
        """Leave out samples after the first end of another branch of the same request, unless its program is
        `independent`."""
        ends = (samples.effect != GO_ON) & ~self.rows.independent[samples.slot]
        if not ends.any():
            return samples
        of, last = _by_request(self.rows, samples.slot), np.full(len(samples.slot), np.iinfo(np.int64).max)
        np.minimum.at(last, of[ends], samples.offset[ends])
        return samples.only(samples.offset <= last[of])

    def name_tokens(self, samples: Samples) -> None:
        """Give the tree the tokens of a window, but for the last of each row, whose key is not computed yet."""
        inner = samples.slot[1:] == samples.slot[:-1]
        slots, counts = np.unique(samples.slot[:-1][inner], return_counts=True)
        order = np.argsort(samples.slot[:-1][inner], kind="stable")
        tokens = samples.sampled.token[:-1][inner][order]
        self.tree.name(self.rows.kv_node[slots], self.rows.position[slots] + 1, counts, tokens)


def _by_request(rows: RowTable, slots: Array) -> Array:  # [n] int64 -> [n] int64
    """Return numbers below n that are equal where the slots' requests are."""
    numbers: Array = np.unique(rows.order[slots] >> 32, return_inverse=True)[1]
    return numbers


def to_come(token: Array, steps: int) -> Array:  # [R] int64 -> [R * steps] int64
    """Return each row's token followed by those that the further steps of a window will sample, as 0."""
    if steps == 1:
        return token
    tokens = np.zeros(len(token) * steps, np.int64)
    tokens[::steps] = token
    return tokens


def samples_of(slot: Array, offset: Array, row: Array, steps: int, sampled: Sampled) -> Samples:
    """Return the samples of all steps; ``slot``, ``offset`` and ``row`` are those of one step [S] int64."""
    if steps == 1:
        return Samples(slot, offset, row, sampled)
    every = np.arange(len(slot) * steps)
    return Samples(np.repeat(slot, steps), every % steps, np.repeat(row, steps), sampled)


def rising_places(
    plan: tuple[Array, ...], columns: Mapping[str, Array], begins: Mapping[str, int], *, rotary: int
) -> Array:  # [<= M] int64
    """Return the places in a step's vector of the numbers that grow by one with each token of a row: its position, the
    keys of its own node, and those of the item that reads the last of them.

    Args:
        plan: see `KvTree.plan`; each row has a node of its own.
        columns: the items of a step, see `host_columns`.
        begins: places of the columns.
        rotary: distance of the three rotary positions of a row; 0 without any.
    """
    _, _, _, length, position, row_begin, row_end = plan
    rows = int(row_end.max(initial=0))
    last_node = np.searchsorted(row_begin, np.arange(rows), "right") - 1  # nodes are in depth-first order
    places = [begins["query_position"] + np.arange(rows), begins["node_length"] + last_node]
    if rotary:
        places += [begins["rotary"] + i * rotary + np.arange(rows) for i in range(3)]
    is_last = np.zeros(len(length), np.bool_)
    is_last[last_node] = True
    for name, column in columns.items():
        if name.startswith("items"):
            items = column.reshape(-1, FIELDS)
            node = items[1:, 7]
            newest = is_last[node] & (items[1:, 3] + items[1:, 2] == position[node] + length[node])
            places.append(begins[name] + FIELDS * (1 + np.flatnonzero(newest)) + 2)
    return np.concatenate(places)
