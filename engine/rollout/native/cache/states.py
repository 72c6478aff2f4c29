"""States of recurrent layers, stored with the paged keys: their slots, which are kept, and the segments of a step.

Keys of a path stay where they were written; a state is overwritten by every token. So each running branch has a slot
of its own, in which a step finds the state before the branch's last token and leaves the state after it. A fork copies
nothing: the first step of each child reads the slot of its parent and writes its own. All reads of a layer precede its
writes, so a slot may be read and written in one step.

A state at a position is that of the path's first ``position`` tokens. States are kept where branches may begin again:
at the ends of prompts, segments and prefilled chunks, and before the last token of each, which is computed once more
when its branch goes on. A kept state is found by the serial of the KV node that holds the token before it and its
position, which a split of the node does not change. Beyond a budget the least recently used is dropped; then the
tokens since the last state above are computed again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rolltree.kernels.tree_recurrence import RecurrencePlan, Segments

from ....batches.recurrence import Recurrence
from ..rows import Fill, RowTable

if TYPE_CHECKING:
    from .._host import KvTree

Array = npt.NDArray[Any]
Key = tuple[int, int]  # serial of a KV node, position
ZERO = 0  # the slot of the state before any token; in the row table: no state
PLANS = 64  # plans of steps that only decode are kept for this many numbers of rows


class StateStep(NamedTuple):
    """The segments of a step's rows; all their end states are written."""

    segments: Segments | None  # None: every row is a segment of its own, with a given state
    read: Array  # [R] int64, slots of the given states
    write: Array  # [S] int64, a slot for each segment


class StateCache:
    """The states of all recurrent layers, by slot.

    Args:
        budget: most states that are kept besides those of running branches and unfinished prompts.
    """

    def __init__(self, budget: int, device: torch.device) -> None:
        self.budget = budget
        self.evictions = 0
        self.peak = 0
        """Most states held at once."""
        self._device = device
        self._kept: OrderedDict[Key, int] = OrderedDict()  # slots, least recently used first
        self._positions: dict[int, set[int]] = {}  # of the kept states, by serial
        self._pinned: dict[int, Key] = {}  # rows whose prompts are computed in part -> the state to go on with
        self._slots = 1
        self._pools: dict[tuple[int, str], Tensor] = {}  # layer and name -> [slots, ...]
        self._plans: OrderedDict[int, RecurrencePlan] = OrderedDict()

    # -- kept states ------------------------------------------------------------------------------------------------

    def find(self, tree: KvTree, node: int, position: int) -> int:
        """Return the slot of the kept state at ``position`` of the path of ``node``; 0 for none."""
        key = _key(tree, node, position)
        if key not in self._kept:
            return ZERO
        self._kept.move_to_end(key)
        return self._kept[key]

    def keep(self, tree: KvTree, node: int, position: int, slot: int) -> None:
        """Keep the state in a slot, which is that at ``position`` of the path of ``node``."""
        self._keep(_key(tree, node, position), slot)

    def nearest(self, tree: KvTree, path: Sequence[int], position: int, coming: Mapping[int, Iterable[int]]) -> int:
        """Return the last position up to ``position`` on a path with a kept state; 0 if there is none.

        Args:
            path: KV nodes from the root.
            coming: positions of states that the step makes, by serial.
        """
        for node in reversed(path):
            serial, begin, end = tree.serial(node), tree.position(node), min(tree.end(node), position)
            kept = (*self._positions.get(serial, ()), *coming.get(serial, ()))
            if before := [p for p in kept if begin < p <= end]:
                return max(before)
        return 0

    def pin(self, row: int, tree: KvTree, node: int, position: int) -> None:
        """Keep a state, whatever the budget, until `unpin`: a waiting branch's tokens are computed up to it."""
        self._pinned[row] = _key(tree, node, position)

    def unpin(self, row: int) -> None:
        self._pinned.pop(row, None)

    def forget(self) -> None:
        """Drop the states that are kept for later."""
        self._drop([key for key in self._kept if key not in self._pinned.values()])

    def clear(self) -> None:
        """Drop every kept state, because the weights have changed or a step has failed."""
        self._drop(list(self._kept))
        self._pinned.clear()

    def free(self) -> None:
        """Free the memory; no branch may be running."""
        self.clear()
        self._pools, self._slots = {}, 1

    def _keep(self, key: Key, slot: int) -> None:
        self._kept[key] = slot
        self._kept.move_to_end(key)
        self._positions.setdefault(key[0], set()).add(key[1])

    def _drop(self, keys: Iterable[Key]) -> None:
        for key in keys:
            serial, position = key
            del self._kept[key]
            self._positions[serial].remove(position)
            if not self._positions[serial]:
                del self._positions[serial]

    def _trim(self) -> None:
        pinned = set(self._pinned.values())
        surplus = len(self._kept) - len(pinned) - self.budget
        if surplus > 0:
            oldest = [key for key in self._kept if key not in pinned][:surplus]
            self._drop(oldest)
            self.evictions += len(oldest)

    # -- the step ---------------------------------------------------------------------------------------------------

    def compose(
        self, tree: KvTree, rows: RowTable, running: Array, fills: Sequence[Fill], order: Array
    ) -> StateStep:  # running: [B] int64, order: [B + fills] int64
        """Return the segments of a step, and give each of its branches the slot of its new state.

        Args:
            running: rows of the table that decode one token each.
            order: the running rows and then the fills, in the order of the step.
        """
        read = rows.state[running]
        if not read.all():
            raise RuntimeError("A running branch has no recurrent state; report this.")
        in_use = rows.state[rows.running]
        shared = np.bincount(in_use, minlength=self._slots)[read] > 1
        shared |= np.isin(read, list(self._kept.values()))
        cuts = [(fill.count - 1, 1) if fill.samples and fill.count > 1 else (fill.count,) for fill in fills]
        taken = self._take(int(shared.sum()) + sum(map(len, cuts)), in_use)
        write = read.copy()
        write[shared], taken = taken[: shared.sum()], taken[shared.sum() :]
        rows.state[running] = write
        if not fills:
            self._trim()
            return StateStep(None, read[order], write[order])
        segment_of: dict[Key, int] = {}  # the segment that ends with a state
        read_slots: list[int] = []
        lengths, parents, initial, written = [], [], [], []
        new = iter(taken.tolist())
        for item in order.tolist():
            if item < len(running):
                lengths.append(1)
                parents.append(-1)
                initial.append(len(read_slots))
                read_slots.append(int(read[item]))
                written.append(int(write[item]))
                continue
            fill = fills[item - len(running)]
            position = tree.position(fill.node) + fill.begin
            key = _key(tree, fill.node, position) if position else (0, 0)
            for count in cuts[item - len(running)]:
                parents.append(segment_of.get(key, -1))
                initial.append(-1)
                if parents[-1] < 0:
                    initial[-1] = len(read_slots)
                    read_slots.append(self._kept[key] if position else ZERO)
                lengths.append(count)
                position += count
                key = tree.serial(fill.node), position
                segment_of[key] = len(written)
                written.append(next(new))
            if fill.samples:
                rows.state[fill.branch.slot] = written[-1]
        for key, segment in segment_of.items():  # after all reads have their slots
            self._keep(key, written[segment])
        self._trim()
        columns = (np.array(values, np.int64) for values in (lengths, parents, initial))
        length, parent, first = columns
        segments = Segments(np.cumsum(length) - length, length, parent, first)
        return StateStep(segments, np.array(read_slots, np.int64), np.array(written, np.int64))

    def recurrence(self, step: StateStep) -> Recurrence:
        """Return what the model's recurrent layers compute a step with."""
        read, write = (torch.from_numpy(slots).to(self._device) for slots in (step.read, step.write))
        return _StepRecurrence(self._plan(step), self, read, write)

    def pool(self, layer: int, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:  # [slots, *shape]
        """Return the states of a layer, made or extended where slots are new."""
        pool = self._pools.get((layer, name))
        if pool is None or len(pool) < self._slots:
            grown = like.new_zeros(self._slots, *shape)
            if pool is not None:
                grown[: len(pool)] = pool
            self._pools[layer, name] = pool = grown
        return pool

    def _take(self, count: int, in_use: Array) -> Array:  # [count] int64
        """Return free slots; those of running branches and of kept states are not."""
        if not count:
            return np.zeros(0, np.int64)
        free = np.ones(self._slots, np.bool_)
        free[ZERO] = free[in_use] = False
        free[list(self._kept.values())] = False
        unused = np.flatnonzero(free)
        self.peak = max(self.peak, self._slots - 1 - len(unused) + count)
        if len(unused) < count:
            before, self._slots = self._slots, max(2 * self._slots, self._slots + count)
            unused = np.append(unused, np.arange(before, self._slots))
        return unused[:count]

    def _plan(self, step: StateStep) -> RecurrencePlan:
        if step.segments is not None:
            every = np.arange(len(step.write))
            return RecurrencePlan.make(step.segments, ends=every, states=len(step.read), device=self._device)
        count = len(step.read)
        if count not in self._plans:
            if len(self._plans) >= PLANS:
                self._plans.popitem(last=False)
            every = np.arange(count)
            segments = Segments(every, np.ones_like(every), np.full_like(every, -1), every)
            self._plans[count] = RecurrencePlan.make(segments, ends=every, states=count, device=self._device)
        self._plans.move_to_end(count)
        return self._plans[count]


class _StepRecurrence(Recurrence):
    """Reads the states of a step from their slots and writes its end states."""

    def __init__(self, plan: RecurrencePlan, states: StateCache, read: Tensor, write: Tensor) -> None:
        super().__init__(plan)
        self._states, self._read, self._write = states, read, write

    def initial(self, layer: int, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return self._states.pool(layer, name, shape, like).index_select(0, self._read)

    def keep(self, layer: int, name: str, ends: Tensor, out: Tensor) -> Tensor:
        self._states.pool(layer, name, tuple(ends.shape[1:]), ends).index_copy_(0, self._write, ends)
        return out


def _key(tree: KvTree, node: int, position: int) -> Key:
    """Return the key of the state at a position of the path of ``node``."""
    while tree.position(node) >= position:
        node = tree.parent(node)
    return tree.serial(node), position
