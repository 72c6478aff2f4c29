"""State of the branches in flight as a structure of arrays: what changes with every token is never a Python object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .branch import Branch, sample_dtype

Array = npt.NDArray[Any]


class Sampled(NamedTuple):
    """One entry a sample; a row that forks has several, one after the other."""

    token: Array  # [E] int64, -1 where the logits were not finite; all else is NaN there
    logprob: Array  # [E] float32
    raw_logprob: Array  # [E] float32
    entropy: Array  # [E] float32
    top_id: Array | None = None  # [E, K] int64
    top_logprob: Array | None = None  # [E, K] float32
    top_raw: Array | None = None  # [E, K] float32
    kept: Array | None = None  # [E] object: the ids it was drawn from, int32, where they are asked for
    why: Array | None = None  # [E] object: the reason of a failure, where it is known

    def only(self, some: Array) -> Sampled:  # [E] bool
        if some.all():
            return self
        values: list[Any] = [None if x is None else x[some] for x in self]
        return Sampled(*values)


class RowTable:
    """One slot for each branch in flight; `records` hold what it sampled since its node began."""

    def __init__(self, capacity: int = 64, width: int = 64) -> None:
        self.kv_node = np.zeros(capacity, np.int64)
        self.order = np.zeros(capacity, np.int64)  # priority: older branches first
        self.seed = np.zeros(capacity, np.int64)
        self.last_token = np.zeros(capacity, np.int64)
        self.position = np.zeros(capacity, np.int64)  # of the last token, on the path
        self.length = np.zeros(capacity, np.int64)  # response tokens on the path
        self.limit = np.zeros(capacity, np.int64)  # longest response
        self.segment_end = np.zeros(capacity, np.int64)  # response length at which the segment is full
        self.segment_tokens = np.zeros(capacity, np.int64)
        self.fill = np.zeros(capacity, np.int64)  # tokens in the buffer
        self.forks = np.zeros(capacity, np.int64)  # children to sample next; 0: go on in the same node
        self.running = np.zeros(capacity, np.bool_)  # only the last token lacks its keys, and no answer is waited for
        self.temperature = np.zeros(capacity, np.float32)
        self.top_k = np.zeros(capacity, np.int32)  # 0: no limit
        self.top_p = np.zeros(capacity, np.float32)
        self.min_p = np.zeros(capacity, np.float32)
        self.top = np.zeros(capacity, np.int64)  # likeliest tokens to keep
        self.keeps = np.zeros(capacity, np.bool_)  # the ids that each token was drawn from
        self.stop_table = np.zeros(capacity, np.int64)
        self.stops_at_text = np.zeros(capacity, np.bool_)
        self.constrained = np.zeros(capacity, np.bool_)  # has biased or forbidden tokens
        self.adapter = np.zeros(capacity, np.int64)
        self.records = np.zeros((capacity, width), sample_dtype(0))
        self.branch: list[Branch | None] = [None] * capacity
        self._free = list(range(capacity))[::-1]
        self._columns = tuple(name for name, v in vars(self).items() if isinstance(v, np.ndarray) and name != "records")

    def add(self, branch: Branch, **columns: Any) -> int:
        """A slot for a branch; columns not given are 0."""
        (slot,) = self._take_slots([branch])
        for name in self._columns:
            getattr(self, name)[slot] = columns.pop(name, 0)
        if columns:
            raise TypeError(f"The row table has no column {next(iter(columns))}.")
        self.kv_node[slot], self.order[slot], self.seed[slot] = branch.kv, branch.order, branch.seed
        if (top := int(self.top[slot])) > self.records["top_id"].shape[2]:
            self._grow_top(top)
        return slot

    def divide(self, slot: int, branches: Sequence[Branch]) -> None:
        """Put ``branches`` in the place of a slot's: they go on as it would, with nothing sampled yet."""
        slots = self._take_slots(branches)
        for name in self._columns:
            column = getattr(self, name)
            column[slots] = column[slot]
        for column in (self.last_token, self.segment_tokens, self.fill, self.forks, self.running):
            column[slots] = 0
        self.kv_node[slots] = [branch.kv for branch in branches]
        self.order[slots] = [branch.order for branch in branches]
        self.seed[slots] = [branch.seed for branch in branches]
        for branch, own in zip(branches, slots, strict=True):
            branch.slot = own
        self.remove(slot)

    def save(self, slot: int) -> dict[str, Any]:
        """What `add` needs to put the branch back, and the records of its node so far."""
        state = {name: getattr(self, name)[slot].item() for name in self._columns}
        return {**state, "running": False, "records": self.sampled(slot)}

    def restore(self, branch: Branch, state: dict[str, Any]) -> int:
        columns = dict(state)
        records = columns.pop("records")
        slot = self.add(branch, **columns)
        while len(records) > self.records.shape[1]:
            self._grow_width()
        for name in records.dtype.names:
            if not name.startswith("top"):
                self.records[name][slot, : len(records)] = records[name]
        if top := records["top_id"].shape[1]:
            self.records["top_id"][slot, : len(records), :top] = records["top_id"]
            self.records["top_logprob"][slot, : len(records), :top] = records["top_logprob"]
            self.records["top_raw"][slot, : len(records), :top] = records["top_raw"]
        return slot

    def remove(self, slot: int) -> None:
        self.branch[slot] = None
        self.running[slot] = False
        self._free.append(slot)

    def start_segment(self, slot: int, segment_end: int) -> None:
        self.segment_end[slot] = segment_end
        self.segment_tokens[slot] = 0

    def push(self, slots: Array, offset: Array, sampled: Sampled, version: int) -> None:
        """More sampled tokens of each slot: ``slots`` [E] int64, and which of its slot's tokens each one is, in order.
        Failed samples change nothing."""
        if (sampled.token < 0).any():
            whole = sampled.token >= 0
            slots, offset, sampled = slots[whole], offset[whole], sampled.only(whole)
        fill, more = self.fill[slots] + offset, offset + 1
        while fill.max(initial=0) >= self.records.shape[1]:
            self._grow_width()
        records = self.records
        records["token"][slots, fill] = sampled.token
        records["logprob"][slots, fill] = sampled.logprob
        records["raw_logprob"][slots, fill] = sampled.raw_logprob
        records["entropy"][slots, fill] = sampled.entropy
        records["version"][slots, fill] = version
        if sampled.top_id is not None and sampled.top_logprob is not None:
            top = sampled.top_id.shape[1]
            records["top_id"][slots, fill, :top] = sampled.top_id
            records["top_logprob"][slots, fill, :top] = sampled.top_logprob
            records["top_raw"][slots, fill, :top] = sampled.top_raw
        records["kept"][slots, fill] = 0
        if sampled.kept is not None:
            for i in np.flatnonzero(self.keeps[slots]).tolist():
                branch = self.branch[slots[i]]
                assert branch is not None
                branch.request.kept.append(sampled.kept[i])
                records["kept"][slots[i], fill[i]] = len(branch.request.kept)
        for column in (self.fill, self.position, self.length, self.segment_tokens):
            column[slots] = column[slots] + more  # of a slot's tokens the last one is written
        self.last_token[slots] = sampled.token

    def sampled(self, slot: int) -> Array:  # [fill] records
        """A copy of what was sampled since the node began, with as many likely tokens as were asked for."""
        records, top = self.records[slot, : self.fill[slot]], int(self.top[slot])
        if records["top_id"].shape[1] == top:
            return records.copy()
        cut = np.zeros(len(records), sample_dtype(top))
        for name in cut.dtype.names or ():
            cut[name] = records[name][:, :top] if name.startswith("top") else records[name]
        return cut

    def _take_slots(self, branches: Sequence[Branch]) -> list[int]:
        slots = []
        for branch in branches:
            if not self._free:
                self._grow_capacity()
            slots.append(self._free.pop())
            self.branch[slots[-1]] = branch
        return slots

    def _grow_capacity(self) -> None:
        old = len(self.branch)
        for name in (*self._columns, "records"):
            values = getattr(self, name)
            setattr(self, name, np.concatenate([values, np.zeros_like(values)]))
        self.branch += [None] * old
        self._free = list(range(old, 2 * old))[::-1]

    def _grow_width(self) -> None:
        self.records = np.concatenate([self.records, np.zeros_like(self.records)], axis=1)

    def _grow_top(self, top: int) -> None:
        old, self.records = self.records, np.zeros(self.records.shape, sample_dtype(top))
        for name in old.dtype.names or ():
            if name.startswith("top"):
                self.records[name][..., : old[name].shape[2]] = old[name]
            else:
                self.records[name] = old[name]
