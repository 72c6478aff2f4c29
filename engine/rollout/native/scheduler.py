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
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..branch import Branch, Request
from ..failing import TooLongError
from .assembly import Assembly, Step
from .cache.kv_cache import KvCache, KvExhaustedError
from .cache.states import StateCache
from .drafts import Drafts, cut
from .pictures import whole_part
from .rows import Fill, RowTable
from .stops import Stops

if TYPE_CHECKING:
    from ._host import KvTree

Array = npt.NDArray[Any]


class TooLargeError(KvExhaustedError):  # type: ignore[misc, unused-ignore]
    """One branch alone does not fit into the KV cache."""

    def __init__(self, branch: Branch, tree: KvTree) -> None:
        capacity = tree.num_pages * tree.page_size
        message = f"One response alone exceeds the KV cache; raise kv_tokens (now {capacity}) or lower max_new_tokens."
        super().__init__(message)
        self.request = branch.request
        prompt, response = len(self.request.prompt), self.request.params.max_new_tokens
        limit = min(capacity, prompt + response - 1)  # less than the cache where it holds the prompt in pieces
        self.too_long = TooLongError(message, prompt, response, limit)


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
        max_prefill_tokens: int,
        rotary: bool = False,
        whole_pictures: bool = False,
    ) -> None:
        self.cache = cache
        self.rows = rows
        self.stops = stops
        self.drafts = drafts
        self.max_batch_rows = max_batch_rows
        self.max_prefill_tokens = max_prefill_tokens
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

    def schedule(self) -> Step | None:
        """Return the next step; None if no branch can run.

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
        return self._assemble(slots, fills, drafts)

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
        most = self.max_prefill_tokens
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


class Filling:
    """The chunks of waiting branches that one step computes, nodes nearest the root first.

    Attributes:
        fills: the chunks.
        pages: pages of the cache that the step takes.
        reserved_pages: pages left free for what the running branches and those of ``fills`` may still sample.
        tokens_left: tokens that the step may still compute.
        restored_tokens: tokens whose keys the host still had, and which are not computed.
    """

    def __init__(self, cache: KvCache, rows: RowTable, *, pages: int, max_tokens: int, whole_pictures: bool) -> None:
        self._cache, self._rows, self._whole_pictures = cache, rows, whole_pictures
        self.fills: list[Fill] = []
        self.pages = pages
        self.reserved_pages = self._growth(np.flatnonzero(rows.running))
        self.tokens_left = self._max_tokens = max_tokens
        self.restored_tokens = 0
        self._planned_keys: dict[int, int] = {}  # KvTree node -> keys that this step adds to it
        self._coming_states: dict[int, set[int]] = {}  # serial of a node -> positions of the states that it makes

    def add(self, branch: Branch, *, alone: bool) -> bool:
        """Add what a branch is missing, as far as tokens are left; return False if pages are too short for it.

        Args:
            alone: nothing else runs, so that the branch may take all pages.

        Raises:
            TooLargeError: it is alone, and the cache cannot hold it.
        """
        missing = self._missing(branch)
        pages = self._pages_of(missing)
        growth = self._growth(np.array([branch.slot])) * max(1, int(self._rows.forks[branch.slot]))
        if not self._make_room(branch, pages, growth, alone=alone):
            return False
        if self._restore(missing):
            missing = self._missing(branch)
            pages = self._pages_of(missing)
        self.pages += pages
        self.reserved_pages += growth
        for fill in missing:
            count = self._count_of(fill)
            self.tokens_left = self.tokens_left - count if count == fill.count else 0
            if count:
                fill.count = count
                fill.samples = fill is missing[-1] and self._reaches_end(fill)
                self.fills.append(fill)
                self._expect_keys_and_states(fill)
            if self.tokens_left == 0:
                break
        return True

    def is_complete(self, branch: Branch) -> bool:
        """Return whether the chunks hold all that the branch added last is missing."""
        last = self.fills[-1]
        return last.branch is branch and last.samples

    def _make_room(self, branch: Branch, pages: int, growth: int, *, alone: bool) -> bool:
        tree = self._cache.tree
        if alone:
            if tree.evict_others(np.array([branch.kv]), pages) < pages:
                raise TooLargeError(branch, tree)
            return True
        needed = self.pages + pages + growth + self.reserved_pages
        return tree.free_pages >= needed or tree.make_room(needed) >= needed

    def _restore(self, missing: list[Fill]) -> bool:
        """Copy missing keys back from the host, for which there are pages; return True if it had any."""
        before = self.restored_tokens
        for fill in missing:
            if not fill.keys_held and fill.node not in self._planned_keys:
                self.restored_tokens += self._cache.restore(fill.node, fill.begin, fill.count)
        return self.restored_tokens > before

    def _count_of(self, fill: Fill) -> int:
        """Return how many tokens of a missing chunk this step computes."""
        if not self._whole_pictures:
            return min(fill.count, self.tokens_left)
        first = self._cache.tree.position(fill.node) + fill.begin
        return whole_part(fill, first, self.tokens_left, self.tokens_left == self._max_tokens)

    def _expect_keys_and_states(self, fill: Fill) -> None:
        """Note which keys and recurrent states a chunk makes; pin the last state of an unfinished branch."""
        if not fill.keys_held:
            self._planned_keys[fill.node] = self._planned_keys.get(fill.node, 0) + fill.count
        states, tree = self._cache.states, self._cache.tree
        if states is None:
            return
        end = tree.position(fill.node) + fill.begin + fill.count
        ends = self._coming_states.setdefault(tree.serial(fill.node), set())
        ends.add(end)
        if fill.samples:
            if fill.count > 1:
                ends.add(end - 1)
            states.unpin(fill.branch.slot)
        else:
            states.pin(fill.branch.slot, tree, fill.node, end)

    def _missing(self, branch: Branch) -> list[Fill]:
        """Return the tokens to compute before ``branch`` is sampled, nodes nearest the root first."""
        tree = self._cache.tree
        if self._cache.states is not None:
            return self._since_state(branch, self._cache.states)
        missing = []
        for node, begin, count in zip(*tree.missing(branch.kv), strict=True):
            planned = self._planned_keys.get(node, 0)
            if planned < count:
                missing.append(Fill(branch, node, begin + planned, count - planned))
        if not missing or not self._reaches_end(missing[-1]):
            node = branch.kv
            last = tree.end(node) - tree.position(node) - 1
            missing.append(Fill(branch, node, last, 1, keys_held=True))
        return missing

    def _since_state(self, branch: Branch, states: StateCache) -> list[Fill]:
        """Return the tokens since the last recurrent state before the first that must be computed."""
        tree, path = self._cache.tree, [branch.kv]
        while (above := tree.parent(path[-1])) >= 0:
            path.append(above)
        path.reverse()
        keys_ends = [tree.position(node) + tree.length(node) + self._planned_keys.get(node, 0) for node in path]
        ends = [tree.end(node) for node in path]
        first = min(
            (keys_end for keys_end, end in zip(keys_ends, ends, strict=True) if keys_end < end), default=ends[-1]
        )
        begin = states.nearest(tree, path, min(first, ends[-1] - 1), self._coming_states)
        missing = []
        for node, keys_end, end in zip(path, keys_ends, ends, strict=True):
            position = tree.position(node)
            for low, high, keys_held in ((position, keys_end, True), (keys_end, end, False)):
                if (low := max(low, begin)) < high:
                    missing.append(Fill(branch, node, low - position, high - low, keys_held))
        return missing

    def _reaches_end(self, fill: Fill) -> bool:
        tree = self._cache.tree
        return fill.node == fill.branch.kv and tree.position(fill.node) + fill.begin + fill.count == tree.end(fill.node)

    def _pages_of(self, fills: list[Fill]) -> int:
        nodes = np.array([fill.node for fill in fills], np.int64)
        counts = np.array([0 if fill.keys_held else fill.count for fill in fills], np.int64)
        return self._cache.tree.pages_needed(nodes, counts)

    def _growth(self, slots: Array) -> int:  # [R] int64
        """Return the pages reserved for branches: half of the tokens that they may still sample, as most end early."""
        tokens = (self._rows.limit[slots] - self._rows.length[slots]) // 2
        return int((-(-tokens // self._cache.tree.page_size)).sum())


def _order(branch: Branch) -> int:
    return branch.order
