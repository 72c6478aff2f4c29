"""State of the branches in flight as a structure of arrays: what changes with every token is never a Python object."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .branch import Branch

Array = npt.NDArray[Any]


class RowTable:
    """One slot for each branch in flight; `tokens` and `logprobs` hold what it sampled since its node began."""

    def __init__(self, capacity: int = 64, width: int = 64) -> None:
        self.kv_node = np.zeros(capacity, np.int64)
        self.order = np.zeros(capacity, np.int64)  # priority: older branches first
        self.seed = np.zeros(capacity, np.int64)
        self.last_token = np.zeros(capacity, np.int64)
        self.position = np.zeros(capacity, np.int64)  # of the last token, on the path
        self.length = np.zeros(capacity, np.int64)  # response tokens on the path
        self.segment_end = np.zeros(capacity, np.int64)  # response length at which the segment is full
        self.fill = np.zeros(capacity, np.int64)  # tokens in the buffers
        self.forks = np.zeros(capacity, np.int64)  # children to sample next; 0: go on in the same node
        self.running = np.zeros(capacity, np.bool_)  # only the last token lacks its keys, and no answer is waited for
        self.segment_tokens = np.zeros(capacity, np.int64)
        self.logprob_sum = np.zeros(capacity, np.float64)  # over the segment
        self.entropy_sum = np.zeros(capacity, np.float64)
        self.tokens = np.zeros((capacity, width), np.int32)
        self.logprobs = np.zeros((capacity, width), np.float32)
        self.branch: list[Branch | None] = [None] * capacity
        self._free = list(range(capacity))[::-1]

    def add(self, branch: Branch, *, position: int, length: int, segment_end: int, forks: int) -> int:
        """A slot for a branch whose last token is at ``position`` of its path and has ``length`` response tokens."""
        if not self._free:
            self._grow_capacity()
        slot = self._free.pop()
        self.branch[slot] = branch
        self.kv_node[slot] = branch.node.kv
        self.order[slot] = branch.order
        self.seed[slot] = branch.seed
        self.position[slot] = position
        self.length[slot] = length
        self.segment_end[slot] = segment_end
        self.forks[slot] = forks
        self.fill[slot] = 0
        self.running[slot] = False
        self.start_segment(slot, segment_end)
        return slot

    def remove(self, slot: int) -> None:
        self.branch[slot] = None
        self.running[slot] = False
        self._free.append(slot)

    def start_segment(self, slot: int, segment_end: int) -> None:
        self.segment_end[slot] = segment_end
        self.segment_tokens[slot] = 0
        self.logprob_sum[slot] = 0.0
        self.entropy_sum[slot] = 0.0

    def push(
        self,
        slots: Array,  # [E] int64, distinct
        token: Array,  # [E] int64
        logprob: Array,  # [E] float32
        entropy: Array,  # [E] float32
    ) -> None:
        """One more sampled token for each slot."""
        fill = self.fill[slots]
        if fill.max(initial=0) >= self.tokens.shape[1]:
            self._grow_width()
        self.tokens[slots, fill] = token
        self.logprobs[slots, fill] = logprob
        self.fill[slots] = fill + 1
        self.position[slots] += 1
        self.length[slots] += 1
        self.last_token[slots] = token
        self.segment_tokens[slots] += 1
        self.logprob_sum[slots] += logprob
        self.entropy_sum[slots] += entropy

    def take_back(self, slots: Array) -> None:  # [F] int64
        """Remove the last push for these slots, whose log-probability and entropy are NaN."""
        for values in (self.fill, self.position, self.length, self.segment_tokens):
            values[slots] -= 1
        for total in (self.logprob_sum, self.entropy_sum):
            total[slots] = np.nan

    def sampled(self, slot: int) -> tuple[Array, Array]:
        """Copies of the tokens and log-probabilities sampled since the node began."""
        fill = self.fill[slot]
        return self.tokens[slot, :fill].copy(), self.logprobs[slot, :fill].copy()

    def _grow_capacity(self) -> None:
        old = len(self.branch)
        for name, values in vars(self).items():
            if isinstance(values, np.ndarray):
                setattr(self, name, np.concatenate([values, np.zeros_like(values)]))
        self.branch += [None] * old
        self._free = list(range(old, 2 * old))[::-1]

    def _grow_width(self) -> None:
        self.tokens = np.concatenate([self.tokens, np.zeros_like(self.tokens)], axis=1)
        self.logprobs = np.concatenate([self.logprobs, np.zeros_like(self.logprobs)], axis=1)
