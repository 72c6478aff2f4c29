"""Composes the next step: one row for every running branch, and the missing keys of waiting ones.

    queued (a request) --> waiting (keys missing) <--> running (only the last token lacks its keys) --> resting / leaf

Keys can always be computed again from the tokens. A branch waits while keys of its path are missing: after its prompt,
a rewind to dropped keys, an appended observation, or a preemption. They are computed in chunks in the same steps as the
running rows, nodes nearest the root first. If pages run short, nodes without a holder are dropped first (least recently
used first), then nodes that no running branch reads, then the youngest branch's own.
The oldest branch is never preempted, so every step makes progress.

A model with recurrent layers needs their state before the first token that is computed. The tokens since the last kept
state are then computed again, even where their keys are held.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..branch import Branch, Request
from .assembly import Assembly, Step
from .cache.kv_cache import KvCache
from .drafts import Drafts, cut
from .filling import Filling, TooLargeError
from .rows import Fill, RowTable
from .stops import Stops
from .windows import Windows

Array = npt.NDArray[Any]


class Scheduler:
    """Chooses the rows of a step, and the keys to drop if pages run short.

    It does not call the loop: `admit` returns a request that may begin, `schedule` returns a step.
    """

    def __init__(
        self,
        cache: KvCache,
        rows: RowTable,
        stops: Stops,
        requests: list[Request],
        drafts: Drafts | None = None,
        *,
        max_batch_rows: int,
        prefill: Callable[[int], int],
        rotary: bool = False,
        whole_pictures: bool = False,
        window: int = 1,
        positions: int | None = None,
    ) -> None:
        self.cache = cache
        self.rows = rows
        self.stops = stops
        self.drafts = drafts
        drafted_rows = 0 if drafts is None else drafts.config.rows
        self.windows = Windows(rows, cache.tree, window, positions=positions, drafted_rows=drafted_rows)
        self.max_batch_rows = max_batch_rows
        self.prefill = prefill  # see `prefill_limit`
        self.whole_pictures = whole_pictures  # their rows attend to each other in both directions
        self.queue: deque[Request] = deque()
        self.requests = requests  # started and not done
        self.waiting: list[Branch] = []  # oldest first
        self.prefill_tokens = 0
        self.restored_tokens = 0
        self.preemptions = 0
        self._assemble = Assembly(rows, cache, rotary=rotary, whole_pictures=whole_pictures)

    def resume(self, branch: Branch) -> None:
        """Let a branch run, or wait for the missing keys of its path."""
        rows, tree, slot = self.rows, self.cache.tree, branch.slot
        pending = tree.end(branch.kv) == rows.position[slot]  # the cache does not hold the last token yet
        if pending and not tree.missing(branch.kv)[0] and self._find_state(branch):
            rows.running[slot] = True
            return
        if pending:
            tree.extend_by(branch.kv, [rows.last_token[slot]])
        insort(self.waiting, branch, key=_order)

    def replace(self, branch: Branch, other: Branch | None) -> None:
        """Let another branch, if there is one, wait in the place of a waiting branch."""
        if other is not None and branch in self.waiting:
            self.waiting.remove(branch)
            insort(self.waiting, other, key=_order)

    def suspend(self, branch: Branch) -> None:
        """Remove a branch from the running or waiting ones."""
        self.stop(branch)
        if branch in self.waiting:
            self.waiting.remove(branch)
            if self.cache.states is not None:
                self.cache.states.unpin(branch.slot)

    def stop(self, branch: Branch) -> None:
        """Let a branch run no more; keep the recurrent state with which it may go on, and the routes of its path."""
        if self.rows.running[branch.slot]:
            self.keep_state(branch)
            if self.cache.routes is not None:
                self.cache.routes.collect(self.cache.tree, branch.kv, branch.node)
        self.rows.running[branch.slot] = False

    def keep_state(self, branch: Branch) -> None:
        """Keep the recurrent state after a branch's tokens in the KV tree, for the branch or others to begin with."""
        if self.cache.states is not None:
            tree = self.cache.tree
            self.cache.states.keep(tree, branch.kv, tree.end(branch.kv), int(self.rows.state[branch.slot]))

    def admit(self) -> Request | None:
        """Return the next queued request to start; None if its branches do not fit into the batch."""
        if not self.queue:
            return None
        tips = sum(max(1, int(n)) for branch, n in zip(self.rows.branch, self.rows.forks, strict=True) if branch)
        if tips + self.queue[0].forks > self.max_batch_rows and self.requests:
            return None
        request = self.queue.popleft()
        self.requests.append(request)
        return request

    def schedule(self, *, windows: bool = True) -> Step | None:
        """Return the next step, or with ``windows`` several at once; None if no branch can run.

        Raises:
            TooLargeError: the KV cache cannot hold even one branch.
        """
        slots = self._running()
        # a branch needs at most one page, so the exact count matters only if pages are short
        fit = len(slots) <= self.cache.tree.free_pages and not self.waiting
        pages = 0 if fit else self._pages_for(slots)
        while pages > self.cache.tree.free_pages:
            slots = self._reclaim(pages)
            pages = self._pages_for(slots)
        fills: list[Fill] = []
        if self.waiting:
            filling = self._fill(pages, idle=not self.rows.running.any())
            fills, pages = filling.fills, filling.pages
        drafts = self._draft(slots, fills, pages) if self.drafts is not None and len(slots) else None
        self.cache.save_dropped()
        if not len(slots) and not fills:
            return None
        self.prefill_tokens += sum(fill.count for fill in fills)
        steps = 1 if not windows or fills or self.waiting or drafts is not None else self.windows.steps(slots)
        return self._assemble(slots, fills, drafts, steps)

    def preempt(self, branch: Branch) -> None:
        """Drop the keys that only ``branch`` holds; it waits until they are computed again."""
        self.stop(branch)
        self.cache.tree.extend_by(branch.kv, [self.rows.last_token[branch.slot]])
        self.cache.tree.evict(branch.kv)
        insort(self.waiting, branch, key=_order)
        self.preemptions += 1

    # -- running branches -------------------------------------------------------------------------------------------

    def _find_state(self, branch: Branch) -> bool:
        """Give a branch the recurrent state before its last token; return False if it is needed and gone."""
        states, slot = self.cache.states, branch.slot
        if states is None:
            return True
        self.rows.state[slot] = states.find(self.cache.tree, branch.kv, int(self.rows.position[slot]))
        return bool(self.rows.state[slot])

    def _running(self) -> Array:  # [R] int64
        slots = np.flatnonzero(self.rows.running)
        if len(slots) > self.max_batch_rows:
            slots = slots[np.argsort(self.rows.order[slots])[: self.max_batch_rows]]
        return slots

    def _pages_for(self, slots: Array) -> int:
        # the tree gets the tokens only after there is room for their keys
        return self.cache.tree.pages_needed(self.rows.kv_node[slots], np.ones(len(slots), np.int64))

    def _reclaim(self, pages: int) -> Array:
        """Drop keys until ``pages`` are free, or preempt one branch; return the running slots."""
        tree, rows = self.cache.tree, self.rows
        running = np.flatnonzero(rows.running)
        if tree.evict_others(rows.kv_node[running], pages) >= pages:
            return self._running()
        branch = rows.branch[running[np.argmax(rows.order[running])]]
        assert branch is not None
        if len(running) == 1:
            raise TooLargeError(branch, tree)
        self.preempt(branch)
        return self._running()

    # -- waiting branches -------------------------------------------------------------------------------------------

    def _fill(self, pages: int, *, idle: bool) -> Filling:
        """Return the chunks of waiting branches that a step computes, oldest branch first.

        Args:
            pages: those that the step's running rows take.
            idle: no branch runs, so the oldest one may take all pages.
        """
        most = self.prefill(max(self.cache.length(branch.kv) for branch in self.waiting))
        filling = Filling(self.cache, self.rows, pages=pages, max_tokens=most, whole_pictures=self.whole_pictures)
        for branch in list(self.waiting):
            if not filling.add(branch, alone=idle and not filling.fills):
                break
            if filling.is_complete(branch):
                self.waiting.remove(branch)
            if filling.tokens_left == 0:
                break
        self.restored_tokens += filling.restored_tokens
        return filling

    # -- the step ---------------------------------------------------------------------------------------------------

    def _draft(self, slots: Array, fills: list[Fill], taken: int) -> tuple[Array, Array] | None:
        """Return counts and tokens of drafts if pages remain for them; ``taken`` is 0 if pages are not short."""
        others, tree = sum(fill.count for fill in fills), self.cache.tree
        assert self.drafts is not None
        room = self.max_batch_rows - len(slots)
        counts, tokens = self.drafts.propose(self.rows, slots, others, room)
        if len(tokens):
            counts, tokens = cut(self.rows, self.stops, slots, counts, tokens, room)
        if not len(tokens):
            return None
        nodes = self.rows.kv_node[slots]
        needed = tree.pages_needed(nodes, 1 + counts) + (taken - self._pages_for(slots) if taken else 0)
        return (counts, tokens) if tree.make_room(needed) >= needed else None


def _order(branch: Branch) -> int:
    return branch.order
