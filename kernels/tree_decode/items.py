"""Items of a step's schedule (schedule.py): their fields, and what both kinds of chunks need to make them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

CHUNK = 512
"""Keys that one item sums up at most. Chunks are counted from a node's first key or from a path's, never from a row, so
they do not depend on other rows."""
QUERIES = 64  # rows x query heads of an item
FIELDS = 8
"""Fields of an item: index of the first page id, slots to skip there, keys, position of the first key, first row, rows,
distance of its partials from the first of each row, node of its last key. 32 bytes, aligned.
"""


def queries_of(group: int) -> int:
    """Return the queries of an item: 64, or as many as the query heads of one key head need."""
    return max(QUERIES, 1 << (group - 1).bit_length())


def parents_of(begin: Array, end: Array, rows: int) -> Array:  # all [K]
    """Return the index of each node's parent, -1 for a root; nodes have rows ``begin`` to ``end - 1``, at least one.

    Raises:
        ValueError: they are not in depth-first order.
    """
    import numpy as np

    order = np.arange(len(begin))
    depth = order - np.bincount(end, minlength=rows + 1).cumsum()[begin]
    at_depth = depth.astype(np.int64) * len(begin) + order
    by_depth = np.sort(at_depth)
    child = np.flatnonzero(depth > 0)
    # The last node before n at depth - 1 is its parent, whose rows contain n's.
    parent = np.full(len(begin), -1)
    parent[child] = by_depth[np.searchsorted(by_depth, at_depth[child] - len(begin)) - 1] % max(len(begin), 1)
    if (np.diff(begin) < 0).any() or (depth < 0).any() or (end[child] > end[parent[child]]).any():
        raise ValueError("DecodePlan: nodes must be in depth-first order, and a node's rows among those of its parent.")
    return parent


def split(row: Array, rows: Array, group: int) -> tuple[Array, Array, Array]:  # [C], [C] -> [I] each
    """Divide the rows of chunks among items; return an item's chunk, its first row and the number of its rows."""
    import numpy as np

    at_once = queries_of(group) // group
    tiles = -(-rows // at_once)
    chunk = np.repeat(np.arange(len(rows)), tiles)
    skipped = at_once * (np.arange(len(chunk)) - np.repeat(tiles.cumsum() - tiles, tiles))
    return chunk, row[chunk] + skipped, np.minimum(rows[chunk] - skipped, at_once)


def ordered(*fields: Array) -> Array:  # [1 + I, FIELDS] int32
    """Return items with their ``FIELDS`` fields [I], those with the most keys first, after their number."""
    import numpy as np

    order = np.argsort((CHUNK - fields[2]).astype(np.int16), kind="stable")
    items = np.zeros((1 + len(order), FIELDS), np.int32)
    items[0, 0] = len(order)
    for i, field in enumerate(fields):
        items[1:, i] = field[order]
    return items
