"""The lists of a plan that Triton kernels read: rows of each segment, places of its first state and of its last one.

States are kept in *slots*: those that the plan returns come first, then those of segments with children (branch
points). A segment without a slot leaves no state. A *run* is a segment without a parent and all segments below it, in
the order of their rows; a program of the pass over states walks one run, so it has written every state that it reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]

ZERO = -1
"""The source of a segment that begins with a state of zero."""


@dataclass(frozen=True, eq=False)
class SegmentLists:
    """``S`` segments, ``C`` chunks, ``R`` runs, ``J`` segments that begin with a given state; tensors are int32."""

    row: Tensor  # [S] the first row
    rows: Tensor  # [S] how many
    chunk: Tensor  # [S] the first chunk
    source: Tensor  # [S] slot with whose state it begins; ZERO; -2 - j: the j-th of `initial`
    slot: Tensor  # [S] slot in which its end state is left, -1 for none
    run_begin: Tensor  # [R] the first segment of each run, the longest run first
    run_end: Tensor  # [R] the last segment + 1
    chunk_row: Tensor  # [C] the first row
    chunk_rows: Tensor  # [C] 1 to `size`
    size: int  # rows of a whole chunk
    slots: int
    ends: Tensor | None  # [E] int64, slot of each returned state; None: the first E slots
    initial: Tensor | None  # [J] int64, the given state of each segment that has one; None: the j-th has the j-th
    num_given: int  # J

    @property
    def runs(self) -> int:
        return self.run_begin.numel()

    @property
    def chunks(self) -> int:
        return self.chunk_row.numel()

    @staticmethod
    def make(
        row: Array,  # [S]
        rows: Array,  # [S]
        parent: Array,  # [S]
        initial: Array,  # [S]
        ends: Array,  # [E]
        states: int,
        size: int,
        device: torch.device | str,
    ) -> SegmentLists:
        """Return the lists of the segments of `plan.Segments`, of which ``ends`` are returned, on ``device``; chunks
        have ``size`` rows, the last one of a segment those that remain."""
        count = -(-rows // size)
        chunk = np.cumsum(count) - count
        segment = np.repeat(np.arange(len(row)), count)
        inside = (np.arange(len(segment)) - chunk[segment]) * size
        read_out = np.unique(ends)
        in_order = len(read_out) == len(ends)
        first = ends if in_order else read_out
        kept = np.concatenate([first, np.setdiff1d(np.unique(parent[parent >= 0]), read_out)])
        slot = np.full(len(row), -1)
        slot[kept] = np.arange(len(kept))
        with_state = np.flatnonzero((parent < 0) & (initial >= 0))
        source = np.where(parent >= 0, slot[parent], ZERO)
        source[with_state] = -2 - np.arange(len(with_state))
        state_of_segment = initial[with_state]
        begin = np.flatnonzero(parent < 0)
        end = np.append(begin[1:], len(row))[: len(begin)]
        chunks_of = np.append(chunk, len(segment))
        heavy = np.argsort(chunks_of[begin] - chunks_of[end], kind="stable")

        def tensor(values: Array, dtype: Any = np.int32) -> Tensor:
            host = torch.from_numpy(np.ascontiguousarray(values, dtype))
            on_gpu = torch.device(device).type == "cuda"
            return (host.pin_memory() if on_gpu else host).to(device, non_blocking=True)

        same = len(state_of_segment) == states and bool((state_of_segment == np.arange(states)).all())
        return SegmentLists(
            row=tensor(row),
            rows=tensor(rows),
            chunk=tensor(chunk),
            source=tensor(source),
            slot=tensor(slot),
            run_begin=tensor(begin[heavy]),
            run_end=tensor(end[heavy]),
            chunk_row=tensor(row[segment] + inside),
            chunk_rows=tensor(np.minimum(rows[segment] - inside, size)),
            size=size,
            slots=len(kept),
            ends=None if in_order else tensor(slot[ends], np.int64),
            initial=None if same else tensor(state_of_segment, np.int64),
            num_given=len(state_of_segment),
        )
