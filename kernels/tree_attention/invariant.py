"""Backend ``invariant``: the forward pass by the kernels and the order of sums of decoding (tree_decode/invariant.py).

A token has the bits of the step that sampled it, whatever tree, piece or sequence it is trained in. A run of tokens
with one ``subtree_end`` is a node, and its rows are those of its subtree. The backward pass is `triton`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..tree_decode import DecodePlan
from ..tree_decode.invariant import tree_decode
from ..tree_decode.schedule import Nodes, Work
from .reference import Scoring
from .visible import once

if TYPE_CHECKING:
    from ..tree_decode.items import Array

PARTIAL_BYTES = 2**30
"""Room for partial results: query heads are computed in groups that need no more, or for one key head at a time."""


def tree_attention_forward(
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [N, Hkv, D]
    v: Tensor,  # [N, Hkv, D]
    scoring: Scoring,
) -> tuple[Tensor, Tensor]:
    """Like `reference.tree_attention_forward`; float32, bfloat16 or float16. Waits for the device once a tree.

    Raises:
        ValueError: windows are not measured in depths along the paths.
    """
    subtree_end, position, scale, window, softcap = scoring
    (rows, heads, dim), kv_heads = q.shape, k.shape[1]
    group = heads // kv_heads
    plan = once(
        subtree_end, position, window, ("paths", rows, group), lambda: _plan(subtree_end, position, rows, group)
    )
    schedule = plan.schedule
    assert schedule is not None
    work = Work(schedule.partial_begin, schedule.items[group], schedule.partials, schedule.parent)
    nodes, k, v = Nodes(**plan.tensors()), k[:, None], v[:, None]
    if k.stride() != v.stride():
        k, v = k.contiguous(), v.contiguous()
    out, lse = q.new_empty(q.shape), q.new_empty((heads, rows), dtype=torch.float32)
    at_once = max(1, PARTIAL_BYTES // max(1, 4 * schedule.partials * group * (dim + 1)))
    for first in range(0, kv_heads, at_once):
        last = min(first + at_once, kv_heads)
        of_group = slice(first * group, last * group)
        result = tree_decode(
            q[:, of_group], k[:, :, first:last], v[:, :, first:last], nodes, work, scale, window, softcap
        )
        out[:, of_group], lse[of_group] = result[0], result[1].T
    return out, lse


def _plan(subtree_end: Tensor, position: Tensor | None, rows: int, group: int) -> DecodePlan:
    """Return the plan of the last ``rows`` tokens, in which the keys are pages of one."""
    import numpy as np

    ends = subtree_end.cpu().numpy().astype(np.int64)
    depth = depths(ends)
    if position is not None and not np.array_equal(position.cpu().numpy()[-rows:], depth[-rows:]):
        raise ValueError(
            "tree_attention: backend 'invariant' takes windows in depths along a path, and position has other numbers; "
            "leave chunk out, or the backend."
        )
    tokens, before = len(ends), len(ends) - rows
    begin = np.flatnonzero(np.concatenate([[True], ends[1:] != ends[:-1]])) if tokens else ends
    row_begin = np.clip(begin - before, 0, rows)
    arrays = (
        np.append(begin, tokens),  # page_indptr
        np.arange(tokens),  # page_ids
        np.zeros(len(begin), np.int64),  # node_offset
        np.diff(np.append(begin, tokens)),  # node_length
        depth[begin],  # node_position
        row_begin,
        np.clip(ends[begin] - before, row_begin, rows),  # row_end
        depth[before:],  # query_position
    )
    return DecodePlan.from_host([a.astype(np.int32) for a in arrays], subtree_end.device, [group], by_path=True)


def depths(ends: Array) -> Array:  # [N] -> [N]
    """Return the number of earlier tokens whose subtree each token is in; ``ends`` are the ends of the subtrees."""
    import numpy as np

    tokens = np.arange(len(ends))
    ended = np.bincount(np.clip(ends, tokens + 1, len(ends)), minlength=len(ends) + 1)
    return tokens - ended.cumsum()[:-1]
