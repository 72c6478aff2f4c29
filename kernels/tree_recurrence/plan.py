"""The plan of a recurrence over packed trees: segments cut into chunks, and the order in which chunks are computed.

A *segment* is a run of rows without a branch. It begins with the state with which its parent segment ends. A chunk
never crosses the end of a segment, and its size depends on the segment's length alone, so a result does not depend on
what is packed with it. Everything within a chunk is independent of the tree and is computed for all chunks at once;
only the state goes from chunk to chunk. Chunks of one *level* (the number of chunks above them on their path) do not
depend on each other, so there are as many steps as the longest path has chunks.

A plan is made on the host from the structure alone, once for a batch and all of its layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .segment_lists import SegmentLists

Array = npt.NDArray[Any]

SIZES = (1, 16, 64)
"""Rows of a chunk. A segment has chunks of the largest size, and one of the smallest size that holds the rest."""


class Segments(NamedTuple):
    """Runs of rows without a branch, a parent before its children; together they cover all rows in order."""

    start: Array  # [S] int64, the first row
    length: Array  # [S] int64, at least 1
    parent: Array  # [S] int64, the segment before it on its path, -1 for none
    initial: Array  # [S] int64, of a segment without a parent: the given state with which it begins, -1 for zero


def find_segments(subtree_end: Array) -> Segments:  # [T]
    """Return the segments of packed trees, whose roots begin with a state of zero.

    A segment is a maximal run of equal ``subtree_end``: an only child ends where its parent ends, a first child of
    several ends before, and a later sibling follows a row that has ended.
    """
    end = subtree_end.astype(np.int64)
    start = np.flatnonzero(np.append(True, end[1:] != end[:-1])) if len(end) else np.zeros(0, np.int64)
    length = np.diff(np.append(start, len(end)))
    # the ancestors of a segment are the earlier segments except those that have ended
    number = np.arange(len(start))
    depth = number - np.searchsorted(np.sort(end[start]), start, side="right")
    # its parent is the last earlier segment that is one level higher
    key = depth * max(len(start), 1) + number
    order = np.argsort(key)
    parent = order[np.maximum(np.searchsorted(key[order], key - len(start)) - 1, 0)] if len(start) else order
    return Segments(start, length, np.where(depth > 0, parent, -1), np.full(len(start), -1))


class Level(NamedTuple):
    """Chunks that are computed together, in the order of their sizes and then of their rows."""

    parts: tuple[tuple[int, int, int], ...]  # index of the size, first and last + 1 of its chunks
    parent: (
        Tensor | None
    )  # [n] int64, each chunk's parent in the level above (at level 0 a given state); None: the same
    order: Tensor | None  # [n] int64, the chunks by their parents
    children: Tensor | None  # [m] int64, chunks of each parent
    kept: Tensor | None  # [e] int64, chunks whose end states are returned; None for none


@dataclass(frozen=True, eq=False)
class Windows:
    """The inputs that a convolution of K taps reads: int64 indices among the rows, the K - 1 inputs before each given
    state, and a row of zeros; ``N`` in all."""

    before: Tensor  # [K - 1, T], nearest first
    last: Tensor  # [E, K - 1], the last inputs at each end, oldest first
    inputs: int  # N

    @cached_property
    def readers(self) -> tuple[Tensor, Tensor]:
        """The rows that read each input, as ``tap T + row`` by tap and row [K T] int64, and where those of each input
        begin [N + 1] int64."""
        inputs = torch.arange(self.before.shape[1], device=self.before.device)
        read, order = torch.cat([inputs, self.before.flatten()]).sort(stable=True)
        return order, torch.searchsorted(read, torch.arange(self.inputs + 1, device=inputs.device))


@dataclass(frozen=True, eq=False)
class RecurrencePlan:
    """The chunks of a batch of ``T`` rows with ``R`` given states, of which ``E`` end states are returned."""

    parent_row: Tensor  # [T] int64, the row before each on its path; T + r: the given state r; T + R: none
    rows: tuple[Tensor, ...]  # for each of SIZES [C, size] int64, the rows of each chunk; T where it is short
    place: Tensor  # [T] int64, each row's place in the chunks' rows, all sizes side by side
    levels: tuple[Level, ...]
    end_order: Tensor  # [E] int64, each returned state's place among those that the levels keep
    end_row: Tensor  # [E] int64, the last row of each segment whose end state is returned
    states: int  # R
    segments: Segments
    ends: Array  # [E] int64, the segments whose end states are returned
    _windows: dict[int, Windows] = field(default_factory=dict)
    _lists: dict[int, SegmentLists] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return self.place.numel()

    @property
    def num_chunks(self) -> int:
        return sum(len(rows) for rows in self.rows)

    @property
    def num_ends(self) -> int:
        return self.end_row.numel()

    def lists(self, size: int) -> SegmentLists:
        """Return the segments as the Triton kernels read them, in chunks of ``size`` rows."""
        if size not in self._lists:
            self._lists[size] = SegmentLists.make(*self.segments, self.ends, self.states, size, self.place.device)
        return self._lists[size]

    @staticmethod
    def make(
        segments: Segments, *, ends: Array | None = None, states: int = 0, device: torch.device | str = "cpu"
    ) -> RecurrencePlan:
        """Return the plan for ``segments``.

        Args:
            ends: [E] int64, segments whose end states are returned; None for none.
            states: number of given states, to which ``segments.initial`` refers.
            device: where the plan's tensors are; they are copied there without waiting.
        """
        start, length, parent, initial = segments
        total, most = int(length.sum()), SIZES[-1]
        count = -(-length // most)
        first = np.cumsum(count) - count  # the first chunk of each segment
        segment = np.repeat(np.arange(len(start)), count)
        inside = np.arange(len(segment)) - first[segment]
        size = np.minimum(length[segment] - inside * most, most)
        bucket = np.searchsorted(SIZES, size)
        above = np.where(inside > 0, np.arange(len(segment)) - 1, -1)
        of = parent[segment[inside == 0]]
        above[inside == 0] = np.where(of >= 0, (first + count - 1)[of], -1)
        level = _depth(parent, count)[segment] + inside

        order = np.lexsort((bucket, level))  # stable: then by rows
        within = np.empty(len(order), np.int64)  # a chunk's place in its level
        bounds = np.searchsorted(level[order], np.arange(level.max(initial=-1) + 2))
        within[order] = np.arange(len(order)) - bounds[level[order]]

        tensor = partial(_tensor, device=device)
        rows, place, index, begin = [], np.empty(total, np.int64), np.empty(len(order), np.int64), 0
        for number, width in enumerate(SIZES):
            chunks = order[bucket[order] == number]
            index[chunks] = np.arange(len(chunks))
            at = (start[segment[chunks]] + inside[chunks] * most)[:, None] + np.arange(width)
            real = np.arange(width) < size[chunks, None]
            place[at[real]] = begin + np.flatnonzero(real)
            rows.append(tensor(np.where(real, at, total)))
            begin += real.size

        keep = np.zeros(0, np.int64) if ends is None else ends
        last = (first + count - 1)[keep]
        levels, end_order, kept_before = [], np.empty(len(keep), np.int64), 0
        for depth, (low, high) in enumerate(pairwise(bounds.tolist())):
            chunks = order[low:high]
            by_size = ((b, index[chunks[bucket[chunks] == b]]) for b in range(len(SIZES)))
            parts = tuple((b, int(of_size[0]), int(of_size[-1]) + 1) for b, of_size in by_size if len(of_size))
            initial_state = initial[segment[chunks]]
            slot = within[above[chunks]] if depth else np.where(initial_state < 0, states, initial_state)
            available = bounds[depth] - bounds[depth - 1] if depth else states + 1
            same = len(slot) == available and bool((slot == np.arange(available)).all())
            read_out = np.flatnonzero(level[last] == depth)
            end_order[read_out] = kept_before + np.arange(len(read_out))
            kept_before += len(read_out)
            kept = tensor(within[last[read_out]]) if len(read_out) else None
            if same:
                levels.append(Level(parts, None, None, None, kept))
                continue
            order_by_parent, children = np.argsort(slot, kind="stable"), np.bincount(slot, minlength=available)
            levels.append(Level(parts, tensor(slot), tensor(order_by_parent), tensor(children), kept))
        parent_row = np.arange(-1, total - 1)
        of_given = np.where(initial < 0, total + states, total + initial)
        parent_row[start] = np.where(parent >= 0, (start + length - 1)[parent], of_given)
        end_row = (start + length - 1)[keep]
        return RecurrencePlan(
            tensor(parent_row), tuple(rows), tensor(place), tuple(levels), tensor(end_order), tensor(end_row), states,
            segments, keep,
        )  # fmt: skip

    def windows(self, taps: int) -> Windows:
        """Return the inputs that a convolution of ``taps`` columns reads."""
        if taps not in self._windows:
            total, before = self.num_rows, taps - 1
            none = total + self.states * before
            ids = torch.arange(none + 1, device=self.place.device)
            ids = torch.where((ids - total) % max(before, 1) == 0, none, ids - 1)  # of given inputs the one before
            state_of_row = self.parent_row - total
            newest = total + state_of_row * before + before - 1
            row = torch.where(state_of_row < 0, self.parent_row, torch.where(state_of_row == self.states, none, newest))
            ids[:total], ids[none] = row, none
            back, places = torch.arange(total, device=ids.device), []
            for _ in range(before):
                back = ids[back]
                places.append(back)
            at, last = self.end_row, []
            for _ in range(before):
                last.append(at)
                at = ids[at]
            every = torch.stack(places) if places else back.new_empty(0, total)
            ends = torch.stack(last[::-1], 1) if last else at.new_empty(len(at), 0)
            self._windows[taps] = Windows(every, ends, none + 1)
        return self._windows[taps]


def _tensor(values: Array, device: torch.device | str) -> Tensor:
    host = torch.from_numpy(np.ascontiguousarray(values, np.int64))
    on_gpu = torch.device(device).type == "cuda"
    return (host.pin_memory() if on_gpu else host).to(device, non_blocking=True)


def _depth(parent: Array, count: Array) -> Array:  # [S]
    """Return the number of chunks on the path above each segment."""
    if not (parent >= 0).any():
        return np.zeros(len(parent), np.int64)
    depth: list[int] = []
    counts = count.tolist()
    for above in parent.tolist():
        depth.append(0 if above < 0 else depth[above] + counts[above])
    return np.array(depth, np.int64)
