"""The schedule of backend ``invariant``: chunks of keys that are counted from the root of a path, not from a node.

A row's partial c is of the keys at positions ``CHUNK c`` to ``CHUNK (c + 1) - 1`` of its path, whatever nodes hold
them, so the order of its sums does not depend on where the path is cut into nodes. Rows share an item if the same node
holds the last of its keys, because the path above a node is the same for all rows below it: where a chunk ends in a
node they are all rows below, and the chunk that the node leaves unfinished belongs to the rows that end there. These
are contiguous if a node's own rows come before those of its children, in the order of their positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from .items import CHUNK, ordered, parents_of, split

if TYPE_CHECKING:
    from .items import Array


class PathChunks(NamedTuple):
    """Chunks of paths; chunk i, of C, ends in a node, and some rows below it see it. All arrays are on the host."""

    parent: Array  # [K] int32, -1 for a root
    partial_begin: Array  # [N + 1] int32, where each row's partials begin
    node: Array  # [C], holds the last key
    chunk: Array  # [C], number of the chunk in its path
    keys: Array  # [C]
    row: Array  # [C], the first row that sees it
    rows: Array  # [C]

    def items(self, group: int) -> Array:  # [1 + I, FIELDS] int32
        """Return the items for ``group`` query heads a key head (`items.FIELDS`): item i finds its keys' slots at
        ``CHUNK i`` of a table."""
        import numpy as np

        item, row, rows = split(self.row, self.rows, group)
        chunk = self.chunk[item]
        items = ordered(chunk, 0 * chunk, self.keys[item], chunk * CHUNK, row, rows, chunk, self.node[item])
        items[1:, 0] = CHUNK * np.arange(len(items) - 1)
        return items


def path_chunks(plan: Sequence[Array]) -> PathChunks:
    """Return the chunks of the paths of a plan's rows.

    Args:
        plan: int32, the tensors of a `DecodePlan` in order.

    Raises:
        ValueError: nodes are not in depth-first order, do not begin where their parents end, or a node's own rows are
            not before those of its children, in the order of their positions.
    """
    import numpy as np

    _, _, _, length, position, row_begin, row_end, query = plan
    full = np.flatnonzero(row_end > row_begin)
    begin, end = row_begin[full].astype(np.int64), row_end[full].astype(np.int64)
    above = parents_of(begin, end, len(query))
    first = position[full].astype(np.int64)
    last = first + length[full]
    if (first != np.where(above < 0, 0, last[above])).any():
        raise ValueError("DecodePlan: backend 'invariant' takes nodes that begin where their parents end, roots at 0.")
    owned = _owned_rows(begin, end, above, length[full])
    newest = np.full(len(query), -1)
    segment = np.repeat(np.arange(len(owned.node)), owned.end - owned.begin)
    rows = owned.begin[segment] + np.arange(len(segment)) - np.searchsorted(segment, segment)
    newest[rows] = np.minimum(query[rows], last[owned.node[segment]] - 1)
    count = newest // CHUNK + 1
    place = segment * (1 << 32) + count[rows]  # rises, if it does within every segment

    def first_to_see(segment: Array, chunk: Array) -> Array:
        index = np.searchsorted(place, segment * (1 << 32) + chunk, "right")
        return np.minimum(np.append(rows, len(query))[index], owned.end[segment])

    # Chunks that end in a node: all rows below it see them, but for its own rows at earlier positions.
    chunks = last // CHUNK - first // CHUNK
    node = np.repeat(np.arange(len(full)), chunks)
    chunk = np.arange(len(node)) - np.repeat(chunks.cumsum() - chunks, chunks) + first[node] // CHUNK
    begins = begin[node]
    at = np.minimum(np.searchsorted(owned.begin, begins), max(len(owned.begin) - 1, 0))
    starts_node = (owned.begin[at] == begins) & (owned.node[at] == node)
    begins[starts_node] = first_to_see(at[starts_node], chunk[starts_node])
    # The chunk that a node leaves unfinished: the rows that end there see it.
    left = last[owned.node] % CHUNK
    open_ = np.flatnonzero(left)
    unfinished = last[owned.node[open_]] // CHUNK
    node = np.concatenate([node, owned.node[open_]])
    chunk = np.concatenate([chunk, unfinished])
    keys = np.concatenate([np.full(len(begins), CHUNK), left[open_]])
    row = np.concatenate([begins, first_to_see(open_, unfinished)])
    seen = np.concatenate([end[node[: len(begins)]], owned.end[open_]]) - row
    kept = seen > 0
    if (np.diff(place) < 0).any() or seen[kept].sum() != count.sum():
        raise ValueError("DecodePlan: rows of a node must be in the order of their positions, before its children's.")
    parent = np.full(len(length), -1, np.int32)
    parent[full] = np.where(above < 0, -1, full[above])
    starts = np.concatenate([[0], count.cumsum()]).astype(np.int32)
    return PathChunks(parent, starts, full[node[kept]], chunk[kept], keys[kept], row[kept], seen[kept])


class _Owned(NamedTuple):
    """Runs of rows that end in the same node."""

    begin: Array
    end: Array
    node: Array


def _owned_rows(begin: Array, end: Array, above: Array, length: Array) -> _Owned:
    """Return the runs of rows by the last node with keys on their paths; rows without one are in none."""
    import numpy as np

    bounds = np.unique(np.concatenate([begin, end]))
    if not len(bounds):
        return _Owned(bounds, bounds, bounds)
    starts, ends = bounds[:-1], bounds[1:]
    begun = np.searchsorted(begin, starts, "right") - 1  # the last node that begins there, if one does
    by_end = np.argsort(end, kind="stable")
    ended = by_end[np.minimum(np.searchsorted(end[by_end], starts), len(end) - 1)]  # the outermost that ends there
    node = np.where(begin[begun] == starts, begun, above[ended])
    while (empty := (node >= 0) & (length[node] == 0)).any():
        node = np.where(empty, above[node], node)
    new = np.concatenate([[True], node[1:] != node[:-1]])
    starts, node = starts[new], node[new]
    ends = np.append(starts[1:], ends[-1])
    kept = node >= 0
    return _Owned(starts[kept], ends[kept], node[kept])
