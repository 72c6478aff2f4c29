"""Branches that have sampled the same tokens so far: one row of a step computes the logits of all of them.

    leader       holds the keys and runs; its row is sampled once for each member, with the seeds of all
    followers    have a slot and records of their own, no keys, and do not run

The children of a fork that draw the same token begin as one row. Members whose samples differ part: of each token one
becomes a leader with keys of its own below the shared ones. A member whose segment ends goes on alone, so programs see
no difference. Tokens and log-probs are those that each branch alone would have.

Sharp policies gain: labels, calls and sums are often sampled in a few ways. Windows, drafts, recurrent states and
recorded routes are of single branches, and leave rows apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..branch import Branch
from .cache.kv_cache import KvCache
from .rows import RowTable, Samples
from .stops import GO_ON

Array = npt.NDArray[Any]


class EqualRows:
    """The leaders of a row table and their followers."""

    def __init__(self, rows: RowTable, cache: KvCache) -> None:
        self._rows, self._cache = rows, cache
        self._followers: dict[int, list[Branch]] = {}  # by the leader's slot

    def __bool__(self) -> bool:
        return bool(self._followers)

    def of(self, slot: int) -> list[Branch]:
        """Return the followers of a slot's branch."""
        return self._followers.get(slot, [])

    def counts(self, slots: Array) -> Array:  # [S] int64 -> [S] int64
        """Return the number of branches that each slot's row stands for."""
        following = np.zeros(len(self._rows.branch), np.int64)
        for leader, others in self._followers.items():
            following[leader] = len(others)
        return 1 + following[slots]

    def owners(self, slots: Array, samples: Array) -> Array:  # [S] int64, [S] int64 -> [E] int64
        """Return the slot of each sample of the rows of ``slots``, which have ``samples`` each: those of a leader and
        its followers, or of the one branch."""
        owners = np.repeat(slots, samples)
        ends = np.cumsum(samples)
        for i in np.flatnonzero(np.isin(slots, list(self._followers))).tolist():
            owners[ends[i] - samples[i] + 1 : ends[i]] = [branch.slot for branch in self.of(int(slots[i]))]
        return owners

    def settle(self, samples: Samples) -> None:
        """Divide the branches of each sampled row into those that go on as one row, before their samples are recorded.

        Args:
            samples: of a step, with their effects; those of one row follow one another.
        """
        edges = np.flatnonzero(np.diff(samples.row, prepend=-1, append=-1))
        for i in np.flatnonzero(np.diff(edges) > 1).tolist():
            self._divide(samples, slice(edges[i], edges[i + 1]))

    def _divide(self, samples: Samples, of_row: slice) -> None:
        assert samples.effect is not None
        slots, tokens, effects = samples.slot[of_row], samples.sampled.token[of_row], samples.effect[of_row]
        followed = int(slots[0]) in self._followers
        if followed and (tokens == tokens[0]).all() and (effects == GO_ON).all():
            return
        rows, groups = self._rows, dict[tuple[float, ...], list[Branch]]()
        for slot, token, effect in zip(slots.tolist(), tokens.tolist(), effects.tolist(), strict=True):
            branch = rows.branch[slot]
            assert branch is not None
            alone = effect != GO_ON or rows.constrained[slot]
            key = (slot,) if alone else (token, float(rows.temperature[slot]))
            groups.setdefault(key, []).append(branch)
        if followed:
            leader = rows.branch[slots[0]]
            assert leader is not None
            del self._followers[leader.slot]
            below = self._cache.fork(leader.kv, len(groups))
            for (first, *_), kv in zip(groups.values(), below, strict=True):
                self._hold(first, kv)
        elif len(groups) == len(slots):
            return
        rows.changes += 1
        for first, *others in groups.values():
            for branch in others:
                if branch.kv >= 0:  # a child of a fork
                    self._cache.release(branch.kv)
                self._hold(branch, -1)
            if others:
                self._followers[first.slot] = others

    def leave(self, branch: Branch) -> Branch | None:
        """Take a branch out of its row before it is dropped.

        Returns:
            The follower that is leader now and holds the keys, if there is one.
        """
        for leader, others in self._followers.items():
            if branch in others:
                others.remove(branch)
                if not others:
                    del self._followers[leader]
                self._rows.changes += 1
                return None
        if (others := self._followers.pop(branch.slot, [])) == []:
            return None
        first, *rest = others
        self._hold(first, branch.kv)
        self._hold(branch, -1)
        self._rows.running[first.slot] = self._rows.running[branch.slot]
        self._rows.changes += 1
        if rest:
            self._followers[first.slot] = rest
        return first

    def _hold(self, branch: Branch, kv: int) -> None:
        branch.kv = self._rows.kv_node[branch.slot] = kv
