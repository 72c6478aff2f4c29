"""State of the branches in flight as one array of rows, so that no Python object changes with every token."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args, get_type_hints

import numpy as np
import numpy.typing as npt

from ..branch import Branch
from ..records import sample_dtype

with contextlib.suppress(ImportError):  # `KvCache` reports what is missing
    from ._host import push_tokens

Array = npt.NDArray[Any]


@dataclass
class Fill:
    """Consecutive tokens of one KV node on the path of a waiting branch."""

    branch: Branch
    node: int
    begin: int  # offset of the first token within the node
    count: int
    keys_held: bool = False  # the tokens are only queried again: their keys are in the cache
    samples: bool = False  # the last token is the branch's last: its row is sampled


class Sampled(NamedTuple):
    """Results of a step's samples; a row that forks has several, one after the other."""

    token: Array  # [E] int64, -1 where the logits were not finite; the numbers are NaN there
    logprob: Array  # [E] float32
    raw_logprob: Array  # [E] float32
    entropy: Array  # [E] float32
    top_id: Array | None = None  # [E, K] int64
    top_logprob: Array | None = None  # [E, K] float32
    top_raw: Array | None = None  # [E, K] float32
    kept: Array | None = None  # [E] object: the ids that the sample was drawn from, int32, if they are recorded
    why: Array | None = None  # [E] object: the reason of a failure, if it is known

    def only(self, mask: Array) -> Sampled:  # [E] bool
        """Return the samples where ``mask`` is True."""
        return self if mask.all() else Sampled(*_selected(self, mask))


class Samples(NamedTuple):
    """Samples of a step and where they belong, one entry each; those of one branch follow one another."""

    slot: Array  # [E] int64, the branch in the row table
    offset: Array  # [E] int64, drafted tokens between the branch's last one and the sample
    row: Array  # [E] int64, the row of the step whose logits were sampled
    sampled: Sampled
    effect: Array | None = None  # [E] int8: what the sample does if it is the last of its branch; see `stops`

    def only(self, mask: Array) -> Samples:  # [E] bool
        """Return the samples where ``mask`` is True."""
        if mask.all():
            return self
        slot, offset, row, effect = _selected((self.slot, self.offset, self.row, self.effect), mask)
        return Samples(slot, offset, row, self.sampled.only(mask), effect)


def _selected(columns: Iterable[Array | None], mask: Array) -> list[Any]:
    return [None if x is None else x[mask] for x in columns]


class RowTable:
    """One slot for each branch in flight; `records` hold the tokens that it sampled since its node began.

    A row's fields are adjacent in memory, because rows are added and removed as a whole; each attribute is a field of
    all slots.
    """

    kv_node: npt.NDArray[np.int64]
    order: npt.NDArray[np.int64]  # priority: older branches first
    seed: npt.NDArray[np.int64]
    last_token: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]  # of the last token, on the path
    length: npt.NDArray[np.int64]  # response tokens on the path
    drawn: npt.NDArray[np.int64]  # random numbers of the seed that were used before the response
    segment_tokens: npt.NDArray[np.int64]
    fill: npt.NDArray[np.int64]  # tokens in `records`
    limit: npt.NDArray[np.int64]  # maximum response length
    segment_end: npt.NDArray[np.int64]  # response length at which the segment is full
    forks: npt.NDArray[np.int64]  # children to sample next; 0: go on in the same node
    running: npt.NDArray[np.bool_]  # only the last token lacks its keys, and no program's answer is awaited
    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]  # 0: no limit
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    top: npt.NDArray[np.int64]  # number of likeliest tokens to record
    keeps: npt.NDArray[np.bool_]  # record the ids that each token was drawn from
    stop_table: npt.NDArray[np.int64]
    stops_at_text: npt.NDArray[np.bool_]
    constrained: npt.NDArray[np.bool_]  # has biased or forbidden tokens
    independent: npt.NDArray[np.bool_]  # see `RolloutProgram.independent`
    adapter: npt.NDArray[np.int64]
    held_out: npt.NDArray[np.bool_]  # answers a held-out problem
    moved: npt.NDArray[np.int64]  # rotary position of sampled tokens minus their depth, because of pictures
    state: npt.NDArray[np.int64]  # slot of a running branch's recurrent state before its last token; 0: none

    def __init__(self, capacity: int = 64, width: int = 64) -> None:
        self._hold(np.zeros(capacity, _ROW))
        self.records = np.zeros((capacity, width), sample_dtype(0))
        self.branch: list[Branch | None] = [None] * capacity
        self._free = list(range(capacity))[::-1]
        self.changes = 0
        """Incremented whenever a row changes other than through `push`; caches of sampling columns compare it."""

    def _hold(self, table: Array) -> None:
        self._table = table
        self._whole = table.view(np.dtype((np.void, _ROW.itemsize)))  # to copy rows as bytes, not by field
        for name in _FIELDS:
            setattr(self, name, table[name])

    def add(self, branch: Branch, **columns: Any) -> int:
        """Take a slot for a branch and return it; columns that are not given are 0."""
        (slot,) = self._take_slots([branch])
        if unknown := columns.keys() - set(_FIELDS):
            raise TypeError(f"The row table has no column {min(unknown)}.")
        self._table[slot] = tuple([columns.get(name, 0) for name in _FIELDS])
        self.kv_node[slot], self.order[slot], self.seed[slot] = branch.kv, branch.order, branch.seed
        if (top := int(self.top[slot])) > self.records["top_id"].shape[2]:
            self._grow_top(top)
        return slot

    def divide(self, slot: int, branches: Sequence[Branch]) -> None:
        """Replace the branch of a slot by ``branches``, which continue it and have no samples of their own yet."""
        slots = self._take_slots(branches)
        self._whole[slots] = self._whole[slot]
        for column in (self.last_token, self.segment_tokens, self.fill, self.forks, self.running):
            column[slots] = 0
        self.kv_node[slots] = [branch.kv for branch in branches]
        self.order[slots] = [branch.order for branch in branches]
        self.seed[slots] = [branch.seed for branch in branches]
        for branch, taken in zip(branches, slots, strict=True):
            branch.slot = taken
        self.remove(slot)

    def save(self, slot: int) -> dict[str, Any]:
        """Return the columns and the records of a slot, from which `restore` rebuilds it."""
        state = dict(zip(_FIELDS, self._table[slot].item(), strict=True))
        return {**state, "running": False, "state": 0, "records": self.sampled(slot)}

    def restore(self, branch: Branch, state: dict[str, Any]) -> int:
        """Take a slot for a branch with the result of `save` and return it."""
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
        """Free a slot."""
        self.branch[slot] = None
        self.running[slot] = False
        self._free.append(slot)
        self.changes += 1

    def start_segment(self, slot: int, segment_end: int) -> None:
        """Begin a segment of a slot that is full at response length ``segment_end``."""
        self.segment_end[slot] = segment_end
        self.segment_tokens[slot] = 0
        self.changes += 1

    def push(self, slots: Array, offset: Array, sampled: Sampled, version: int) -> None:
        """Append sampled tokens to their slots; failed samples change nothing.

        Args:
            slots: [E] int64, the slot of each sample.
            offset: [E] int64, the sample's index among the new tokens of its slot, ascending within a slot.
            version: version of the policy.
        """
        if (sampled.token < 0).any():
            whole = sampled.token >= 0
            slots, offset, sampled = slots[whole], offset[whole], sampled.only(whole)
        numbers = sampled.logprob, sampled.raw_logprob, sampled.entropy
        while not push_tokens(self._table, _GROWING, self.records, slots, offset, sampled.token, *numbers, version):
            self._grow_width()
        if sampled.top_id is None and sampled.kept is None:
            return
        fill, records = self.fill[slots] - 1, self.records
        last = np.zeros(len(self.branch), np.int64)
        np.maximum.at(last, slots, offset)
        fill -= last[slots] - offset
        if sampled.top_id is not None and sampled.top_logprob is not None:
            top = sampled.top_id.shape[1]
            records["top_id"][slots, fill, :top] = sampled.top_id
            records["top_logprob"][slots, fill, :top] = sampled.top_logprob
            records["top_raw"][slots, fill, :top] = sampled.top_raw
        if sampled.kept is not None:
            for i in np.flatnonzero(self.keeps[slots]).tolist():
                branch = self.branch[slots[i]]
                assert branch is not None
                branch.request.kept.append(sampled.kept[i])
                records["kept"][slots[i], fill[i]] = len(branch.request.kept)

    def sampled(self, slot: int) -> Array:  # [fill] records
        """Return a copy of the records since the node began, with as many likely tokens as the slot records."""
        records, top = self.records[slot, : self.fill[slot]], int(self.top[slot])
        if records["top_id"].shape[1] == top:
            return np.frombuffer(bytearray(records.tobytes()), records.dtype)  # a copy as bytes, not by field
        cut = np.zeros(len(records), sample_dtype(top))
        for name in cut.dtype.names or ():
            cut[name] = records[name][:, :top] if name.startswith("top") else records[name]
        return cut

    def _take_slots(self, branches: Sequence[Branch]) -> list[int]:
        slots = []
        self.changes += 1
        for branch in branches:
            if not self._free:
                self._grow_capacity()
            slots.append(self._free.pop())
            self.branch[slots[-1]] = branch
        return slots

    def _grow_capacity(self) -> None:
        old = len(self.branch)
        self._hold(np.concatenate([self._table, np.zeros_like(self._table)]))
        self.records = np.concatenate([self.records, np.zeros_like(self.records)])
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


def element_type(array: Any) -> Any:
    """Return the scalar type of ``npt.NDArray[scalar]``, which numpy 2.5 made an alias with that one argument."""
    last = get_args(array)[-1]
    return (get_args(last) or (last,))[0]


_ROW = np.dtype([(name, element_type(of)) for name, of in get_type_hints(RowTable).items()], align=True)
_FIELDS = tuple(_ROW.names or ())
_GROWING = [_ROW.fields[name][1] for name in ("fill", "position", "length", "segment_tokens", "last_token")]  # type: ignore[index]
