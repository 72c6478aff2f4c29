"""The schedule of a step, made on the host from a plan's nodes and rows, for all layers at once.

An item is the work of one program for one key head: up to `CHUNK` keys of a node, for up to `queries_of(group) //
group` rows below it. Its result for a row is a partial. A row's partials are stored in the order of its path, so
merging them needs no list: a node's first partial is as far from the row's first as there are chunks above the node,
which is the same for all rows below it. The longest items come first, so that the last programs to end have little
left.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .. import machine
from .items import CHUNK, FIELDS, ordered, parents_of, split
from .path_chunks import path_chunks

if TYPE_CHECKING:
    from .items import Array

HAS_NUMPY = importlib.util.find_spec("numpy") is not None
"""True if numpy is installed. Plans are made by numpy, in half of torch's time. It is imported where it is used,
because the other kernels need torch alone.
"""
PROGRAMS_A_PROCESSOR = 4


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
    parent: Tensor | None = None  # [K] int32, -1 for a root; of items in chunks of paths (path_chunks.py)
    slots: Tensor | None = None  # [I CHUNK] int32, likewise: the slots of the items' keys, if they are known


class Schedule(NamedTuple):
    """The items of a step on the device of the queries; N rows."""

    partial_begin: Tensor  # [N + 1] int32, where each row's partials begin
    items: Mapping[int, Tensor]  # query heads a key head -> [1 + I, FIELDS] int32; I is the first number of the first
    partials: int  # room for partials; at least their number
    parent: Tensor | None = None  # as in `Work`
    slots: Mapping[int, Tensor] | None = None  # query heads a key head -> as in `Work`


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
    parents_of(begin, end, rows)
    begun = np.bincount(begin, chunks[full], rows + 1).astype(np.int64).cumsum()
    return np.concatenate([[0], (begun - ended)[:rows].cumsum()]).astype(np.int32), before


def items_of(plan: Sequence[Array], before: Array, group: int) -> Array:  # [1 + I, FIELDS] int32
    """Return the items of a plan's nodes, in the order of `DecodePlan`."""
    import numpy as np

    page_indptr, _, offset, length, position, row_begin, row_end, *_ = plan
    chunks = np.where(row_end > row_begin, -(-length // CHUNK), 0)
    node = np.repeat(np.arange(len(chunks)), chunks)
    chunk = np.arange(len(node)) - np.repeat(chunks.cumsum() - chunks, chunks)
    item, row, rows = split(row_begin[node], row_end[node] - row_begin[node], group)
    node, chunk = node[item], chunk[item]
    keys = np.minimum(length[node] - chunk * CHUNK, CHUNK)
    slot, begin = offset[node] + chunk * CHUNK, position[node] + chunk * CHUNK
    return ordered(page_indptr[node], slot, keys, begin, row, rows, before[node] + chunk, node)


def columns_of(plan: Sequence[Array], groups: Iterable[int], by_path: bool = False) -> dict[str, Array]:
    """Return the int32 vectors of a plan's schedule by name.

    Args:
        plan: int32, the tensors of a `DecodePlan` in order.
        groups: numbers of query heads a key head to make items for.
        by_path: chunks are counted from the root of a path, not from a node (path_chunks.py).
    """
    if by_path:
        chunks = path_chunks(plan)
        items = {f"items{group}": chunks.items(group).ravel() for group in groups}
        return {"parent": chunks.parent, "partial_begin": chunks.partial_begin, **items}
    begin, before = partials_of_rows(plan[3], plan[5], plan[6], len(plan[7]))
    return {"partial_begin": begin, **{f"items{group}": items_of(plan, before, group).ravel() for group in groups}}


_schedules: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""row_begin of a plan -> query heads a key head, `by_path` -> its schedule: all layers of a step ask for the same."""


def make_schedule(nodes: Nodes, group: int, by_path: bool = False) -> Work:
    """Return the work of nodes on a device, for ``group`` query heads a key head; waits for the device once a plan."""
    by_shape = _schedules.setdefault(nodes.row_begin, {})
    if (group, by_path) not in by_shape:
        columns = columns_of([x.cpu().numpy() for x in nodes], [group], by_path)
        device = nodes.row_begin.device
        on_device = {name: torch.from_numpy(column).to(device) for name, column in columns.items()}
        items = on_device[f"items{group}"].view(-1, FIELDS)
        partials = int(columns["partial_begin"][-1])
        by_shape[group, by_path] = Work(on_device["partial_begin"], items, partials, on_device.get("parent"))
    return by_shape[group, by_path]


def programs(device: torch.device, kv_heads: int) -> int:
    """Return the number of programs that share the items of a key head."""
    return max(1, PROGRAMS_A_PROCESSOR * machine.gpu_processors(device) // kv_heads)
