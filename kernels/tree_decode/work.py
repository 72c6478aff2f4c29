"""What follows from a plan's nodes and rows, for all layers of a step: the items that programs take, the partials."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .plan import CHUNK

QUERIES = 64  # rows x query heads of an item
PROGRAMS_A_PROCESSOR = 4


class Work(NamedTuple):
    """K nodes, N rows."""

    item_end: Tensor  # [K] int32, running count of items
    partial_base: Tensor  # [K] int64, a node's first partial; partials run over its chunks, then its rows
    partial_ids: Tensor  # [at least the partials] int64, by row, along its path
    partial_begin: Tensor  # [N + 1] int64, where each row's partials begin there


_found: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""row_begin of a plan -> its work: the layers of a step ask for the same one."""


def work_of(row_begin: Tensor, row_end: Tensor, node_length: Tensor, rows: int, group: int, most: int | None) -> Work:
    """Items and partials of a plan, found once, with room for ``most`` partials; None counts, and waits for that."""
    known = _found.setdefault(row_begin, {})
    if group not in known:
        below = (row_end - row_begin).clamp(min=0).long()
        chunks = -(-node_length.long() // CHUNK)
        tiles = -(-below // (QUERIES // group))
        partials = below * chunks
        end = partials.cumsum(0)
        base = end - partials
        index = torch.arange(int(end[-1]) if most is None else most, device=row_begin.device)
        node = torch.searchsorted(end, index, right=True).clamp(max=len(end) - 1)
        row = row_begin[node] + (index - base[node]) % below[node].clamp(min=1)
        row = torch.where(index < end[-1], row, rows)  # room that is left goes to a row beyond the last
        ids = row.argsort(stable=True)  # a row's partials lie in the order of nodes, parents first, and of chunks
        counts = torch.zeros(rows + 2, dtype=torch.int64, device=row.device)
        counts[1:] = torch.zeros_like(counts[1:]).index_add_(0, row.long(), torch.ones_like(index))
        known[group] = Work((chunks * tiles).cumsum(0).int(), base, ids, counts.cumsum(0)[:-1])
    return known[group]


def programs(device: torch.device) -> int:
    if device.type != "cuda":
        return PROGRAMS_A_PROCESSOR
    return PROGRAMS_A_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
