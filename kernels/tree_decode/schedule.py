"""The schedule of a step, made on the host from a plan's nodes and rows, for all layers at once.

An item is the work of one program for one key head: up to `CHUNK` keys of a node, for up to `queries_of(group) //
group` rows below it. Its result for a row is a partial. A row's partials are stored in the order of its path, so
merging them needs no list: a node's first partial is as far from the row's first as there are chunks above the node,
which is the same for all rows below it. The longest items come first, so that the last programs to end have little
left.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .. import machine

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

HAS_NUMPY = importlib.util.find_spec("numpy") is not None
"""True if numpy is installed. Plans are made by numpy, in half of torch's time. It is imported where it is used,
because the other kernels need torch alone.
"""
CHUNK = 512
"""Keys of a node that one item sums up; chunks are counted from the node's first key, so they do not depend on other
rows."""
QUERIES = 64  # rows x query heads of an item
PROGRAMS_A_PROCESSOR = 4
SAME_STRIDES = "tree_decode_attention: k_pages and v_pages must have the same strides; one address serves both."
FIELDS = 8
"""Fields of an item: index of the node's first page id, slots to skip there, keys, position of the first key, first
row, rows, distance of its partials from the first of each row, 0. 32 bytes, aligned.
"""


class Nodes(NamedTuple):
    """The tensors of a `DecodePlan`, which says what they are: K nodes, N rows, all int32 and contiguous."""

    page_indptr: Tensor  # [K + 1]
    page_ids: Tensor  # [*]
    node_offset: Tensor  # [K]
    node_length: Tensor  # [K]
    node_position: Tensor  # [K]
    row_begin: Tensor  # [K]
    row_end: Tensor  # [K]
    query_position: Tensor  # [N]


class Work(NamedTuple):
    """The items of a step for one number of query heads a key head; None where the backend has to make them."""

    partial_begin: Tensor | None  # [N + 1] int32, where each row's partials begin
    items: Tensor | None  # [1 + I, FIELDS] int32; I is the first number of the first
    partials: int  # room for partials; at least their number


class Schedule(NamedTuple):
    """The items of a step on the device of the queries; N rows."""

    partial_begin: Tensor  # [N + 1] int32, where each row's partials begin
    items: Mapping[int, Tensor]  # query heads a key head -> [1 + I, FIELDS] int32; I is the first number of the first
    partials: int  # room for partials; at least their number


def queries_of(group: int) -> int:
    """Return the queries of an item: 64, or as many as the query heads of one key head need."""
    return max(QUERIES, 1 << (group - 1).bit_length())


def count_partials(node_length: Array, row_begin: Array, row_end: Array) -> int:  # all [K]
    import numpy as np

    return int(((row_end - row_begin).astype(np.int64) * -(-node_length // CHUNK)).sum())


def partials_of_rows(node_length: Array, row_begin: Array, row_end: Array, rows: int) -> tuple[Array, Array]:
    """Return where rows' partials begin [N + 1] int32, and how many of a row's partials lie before a node's own [K].

    Raises:
        ValueError: the nodes are not in depth-first order.
    """
    import numpy as np

    chunks = np.where(row_end > row_begin, -(-node_length // CHUNK), 0)
    full = np.flatnonzero(row_end > row_begin)
    begin, end = row_begin[full], row_end[full]
    # In depth-first order the nodes before n are those above it and those whose rows end before n's begin.
    ended = np.bincount(end, chunks[full], rows + 1).astype(np.int64).cumsum()
    before = np.zeros(len(chunks), np.int64)
    before[full] = chunks[full].cumsum() - chunks[full] - ended[begin]
    _check_nested(begin, end, np.arange(len(full)) - np.bincount(end, minlength=rows + 1).cumsum()[begin])
    begun = np.bincount(begin, chunks[full], rows + 1).astype(np.int64).cumsum()
    return np.concatenate([[0], (begun - ended)[:rows].cumsum()]).astype(np.int32), before


def _check_nested(begin: Array, end: Array, depth: Array) -> None:
    """Check that nodes are nested: the last node before n at depth - 1 is its parent, whose rows contain n's."""
    import numpy as np

    order = np.arange(len(begin))
    at_depth = depth.astype(np.int64) * len(begin) + order
    by_depth = np.sort(at_depth)
    child = np.flatnonzero(depth > 0)
    parent = by_depth[np.searchsorted(by_depth, at_depth[child] - len(begin)) - 1] % max(len(begin), 1)
    if (np.diff(begin) < 0).any() or (depth < 0).any() or (end[child] > end[parent]).any():
        raise ValueError("DecodePlan: nodes must be in depth-first order, and a node's rows among those of its parent.")


def items_of(plan: Sequence[Array], before: Array, group: int) -> Array:  # [1 + I, FIELDS] int32
    """Return the items of a plan's nodes, in the order of `DecodePlan`."""
    import numpy as np

    page_indptr, _, offset, length, position, row_begin, row_end, *_ = plan
    rows_a_tile = queries_of(group) // group
    tiles = -(-np.maximum(row_end - row_begin, 0) // rows_a_tile)
    count = tiles * -(-length // CHUNK)
    node = np.repeat(np.arange(len(count)), count)
    local = np.arange(len(node)) - np.repeat(count.cumsum() - count, count)
    chunk, tile = np.divmod(local, tiles[node])
    row = row_begin[node] + tile * rows_a_tile
    keys = np.minimum(length[node] - chunk * CHUNK, CHUNK)
    items = np.zeros((1 + len(node), FIELDS), np.int32)
    items[0, 0] = len(node)
    columns = (
        page_indptr[node],
        offset[node] + chunk * CHUNK,
        keys,
        position[node] + chunk * CHUNK,
        row,
        np.minimum(row_end[node] - row, rows_a_tile),
        before[node] + chunk,
    )
    order = np.argsort((CHUNK - keys).astype(np.int16), kind="stable")
    for i, column in enumerate(columns):
        items[1:, i] = column[order]
    return items


_made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""row_begin of a plan -> query heads a key head -> its schedule: all layers of a step ask for the same one."""


def make_schedule(nodes: Nodes, group: int) -> Work:
    """Return the work of nodes on a device, for ``group`` query heads a key head; waits for the device once a plan."""
    known = _made.setdefault(nodes.row_begin, {})
    if group not in known:
        arrays = [x.cpu().numpy() for x in nodes]
        partial_begin, before = partials_of_rows(arrays[3], arrays[5], arrays[6], len(arrays[7]))
        device = nodes.row_begin.device
        begin, items = (torch.from_numpy(x).to(device) for x in (partial_begin, items_of(arrays, before, group)))
        known[group] = Work(begin, items, int(partial_begin[-1]))
    return known[group]


def programs(device: torch.device, kv_heads: int) -> int:
    """Return the number of programs that share the items of a key head."""
    return max(1, PROGRAMS_A_PROCESSOR * machine.gpu_processors(device) // kv_heads)
