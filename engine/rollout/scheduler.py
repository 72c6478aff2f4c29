"""Decides what the next step computes: one row for every running branch, and the missing keys of waiting ones.

    queued (a prompt) --> waiting (keys missing) <--> running (only the last token lacks its keys) --> resting / leaf

Keys are a cache of tokens. A branch waits while its path lacks any, be it a fresh prompt, a branch rewound to where
keys were dropped, or one that was preempted: in each case they are computed in chunks, nodes nearest the root first,
beside the running rows. When pages run short, nodes that no running branch reads are dropped first, then the youngest
branch's own.
The oldest branch is never preempted, so every step brings something nearer its end.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .branch import Branch, Group, Node
from .kv_cache import KvCache, KvExhaustedError
from .rows import RowTable

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Step:
    """Rows of one forward pass, in depth-first order."""

    input_ids: Array  # [N] int64
    position_ids: Array  # [N] int64
    kv_slots: Array  # [N] int64
    plan: tuple[Array, ...]  # see KvTree.plan
    sample_rows: Array  # [S] int64, rows whose logits are sampled
    sample_slots: Array  # [S] int64, their branches in the row table


@dataclass
class Fill:
    """Consecutive tokens of one node on the path of a waiting branch."""

    branch: Branch
    node: Node
    begin: int  # of the first token, within the node
    count: int
    keys_held: bool = False  # the token is only queried again: its keys are in the cache
    samples: bool = False  # the last token is the branch's last: its row is sampled


class Scheduler:
    """The only one who allocates and drops keys."""

    def __init__(
        self, cache: KvCache, rows: RowTable, *, max_batch_rows: int, max_prefill_tokens: int, max_new_tokens: int
    ) -> None:
        self.cache = cache
        self.rows = rows
        self.max_batch_rows = max_batch_rows
        self.max_prefill_tokens = max_prefill_tokens
        self.max_new_tokens = max_new_tokens
        self.queue: deque[Group] = deque()
        self.groups: list[Group] = []  # started and not done
        self.waiting: list[Branch] = []  # oldest first
        self.prefill_tokens = 0
        self.preemptions = 0

    @property
    def busy(self) -> bool:
        return bool(self.queue or self.groups)

    def resume(self, branch: Branch) -> None:
        """Let a branch run, or wait for what its path lacks."""
        missing = self._missing(branch, {})
        if len(missing) == 1 and missing[0].count == 1 and not missing[0].keys_held:
            self.rows.running[branch.slot] = True
        else:
            insort(self.waiting, branch, key=_order)

    def schedule(self, start: Callable[[Group], Branch]) -> Step:
        """The next step. ``start`` makes a queued group's first branch.

        Raises:
            KvExhaustedError: not even one branch fits.
        """
        slots = self._running()
        pages = self._pages_for(slots)
        while pages > self.cache.tree.free_pages:
            slots = self._reclaim(pages)
            pages = self._pages_for(slots)
        fills = self._fill(start, self.cache.tree.free_pages - pages, idle=len(slots) == 0)
        return self._assemble(slots, fills)

    # -- running branches -------------------------------------------------------------------------------------------

    def _running(self) -> Array:  # [R] int64
        slots = np.flatnonzero(self.rows.running)
        if len(slots) > self.max_batch_rows:
            slots = slots[np.argsort(self.rows.order[slots])[: self.max_batch_rows]]
        return slots

    def _pages_for(self, slots: Array) -> int:
        return self.cache.tree.pages_needed(self.rows.kv_node[slots], np.ones(len(slots), np.int64))

    def _reclaim(self, pages: int) -> Array:
        """Drop keys until ``pages`` are free, or one branch fewer runs; returns the running slots."""
        tree, rows = self.cache.tree, self.rows
        running = np.flatnonzero(rows.running)
        if tree.evict_others(rows.kv_node[running], pages) >= pages:
            return self._running()
        if len(running) == 1:
            raise self._exhausted()
        branch = rows.branch[running[np.argmax(rows.order[running])]]
        assert branch is not None
        rows.running[branch.slot] = False
        tree.evict(branch.node.kv)
        insort(self.waiting, branch, key=_order)
        self.preemptions += 1
        return self._running()

    def _exhausted(self) -> KvExhaustedError:
        capacity = self.cache.tree.num_pages * self.cache.tree.page_size
        return KvExhaustedError(
            f"One response alone exceeds the KV cache; raise kv_tokens (now {capacity}) or lower max_new_tokens."
        )

    # -- waiting branches -------------------------------------------------------------------------------------------

    def _fill(self, start: Callable[[Group], Branch], free: int, *, idle: bool) -> list[Fill]:
        """Chunks of waiting branches, oldest first, for the free pages and the budget of tokens."""
        fills: list[Fill] = []
        planned: dict[int, int] = {}  # KvTree node -> keys that this step adds to it
        budget = self.max_prefill_tokens
        headroom = self._growth(self.rows.length[self.rows.running])
        for branch in self._candidates(start, idle=idle):
            missing = self._missing(branch, planned)
            pages = self._pages_of(missing)
            growth = self._growth(self.rows.length[[branch.slot]]) * self._tips(branch)
            if idle and not fills:  # nothing else runs: this one may take all
                if pages > free:
                    free = self.cache.tree.evict_others(np.array([branch.node.kv]), pages)
                if pages > free:
                    raise self._exhausted()
            elif pages + growth + headroom > free:
                break
            free -= pages
            headroom += growth
            for fill in missing:
                fill.count = min(fill.count, budget)
                budget -= fill.count
                if not fill.keys_held:
                    planned[fill.node.kv] = planned.get(fill.node.kv, 0) + fill.count
                fill.samples = fill.node is branch.node and fill.begin + fill.count == self._tokens_of(
                    fill.node, branch
                )
                fills.append(fill)
                if budget == 0:
                    break
            if fills[-1].samples:
                self.waiting.remove(branch)
            if budget == 0:
                break
        return fills

    def _candidates(self, start: Callable[[Group], Branch], *, idle: bool) -> Iterator[Branch]:
        yield from list(self.waiting)
        while self.queue:
            tips = sum(max(1, group.width - len(group.leaves)) for group in self.groups)
            if tips + self.queue[0].width > self.max_batch_rows and self.groups:
                return
            group = self.queue.popleft()
            self.groups.append(group)
            branch = start(group)
            insort(self.waiting, branch, key=_order)
            yield branch

    def _missing(self, branch: Branch, planned: Mapping[int, int]) -> list[Fill]:
        """What must be computed before ``branch`` is sampled, nodes nearest the root first."""
        missing = []
        for node in reversed(list(branch.node.path())):
            held = self.cache.tree.length(node.kv) + planned.get(node.kv, 0)
            tokens = self._tokens_of(node, branch)
            if held < tokens:
                missing.append(Fill(branch, node, held, tokens - held))
        if not missing or missing[-1].node is not branch.node:
            last = self._tokens_of(branch.node, branch) - 1
            missing.append(Fill(branch, branch.node, last, 1, keys_held=True))
        return missing

    def _tokens_of(self, node: Node, branch: Branch) -> int:
        return len(node.tokens) if node.sealed else int(self.rows.fill[branch.slot])

    def _pages_of(self, fills: list[Fill]) -> int:
        nodes = np.array([fill.node.kv for fill in fills], np.int64)
        counts = np.array([0 if fill.keys_held else fill.count for fill in fills], np.int64)
        return self.cache.tree.pages_needed(nodes, counts)

    def _growth(self, length: Array) -> int:  # length: [R] int64, response tokens
        """Pages set aside for branches: half of what they may still sample, as most end early."""
        tokens = (self.max_new_tokens - length) // 2
        return int((-(-tokens // self.cache.tree.page_size)).sum())

    def _tips(self, branch: Branch) -> int:
        return branch.group.width if branch.node.parent is None else 1

    # -- the step ---------------------------------------------------------------------------------------------------

    def _assemble(self, slots: Array, fills: list[Fill]) -> Step:
        """One item a running branch and a fill, put in depth-first order, then spelled out as rows."""
        rows, tree = self.rows, self.cache.tree
        ones = np.ones(len(slots), np.int64)
        node, count, appended, sampler = rows.kv_node[slots], ones, ones, slots
        token, position = rows.last_token[slots], rows.position[slots]
        if fills:
            node = _extend(node, [fill.node.kv for fill in fills])
            count = _extend(count, [fill.count for fill in fills])
            appended = _extend(appended, [0 if fill.keys_held else fill.count for fill in fills])
            sampler = _extend(sampler, [fill.branch.slot if fill.samples else -1 for fill in fills])
            token = np.concatenate([token, *(self._tokens(fill) for fill in fills)])
            position = _extend(position, [fill.node.start + fill.begin for fill in fills])
            self.prefill_tokens += sum(fill.count for fill in fills)
        begin = np.cumsum(count) - count
        order = tree.depth_first(node)
        node, count, appended, sampler = node[order], count[order], appended[order], sampler[order]
        end = np.cumsum(count)
        if fills:
            within = np.arange(end[-1]) - np.repeat(end - count, count)
            input_ids = token[np.repeat(begin[order], count) + within]
            position_ids = np.repeat(position[order], count) + within
        else:
            input_ids, position_ids = token[order], position[order]

        writes = appended > 0
        kv_slots = tree.append(node[writes], appended[writes])
        if not writes.all():
            kv_slots, new = np.full(end[-1], self.cache.spare_slot, np.int64), kv_slots
            kv_slots[np.repeat(writes, count)] = new
        samples = sampler >= 0
        return Step(input_ids, position_ids, kv_slots, tree.plan(node, count), end[samples] - 1, sampler[samples])

    def _tokens(self, fill: Fill) -> Array:  # [count] int64
        tokens = fill.node.tokens if fill.node.sealed else self.rows.tokens[fill.branch.slot]
        return tokens[fill.begin : fill.begin + fill.count].astype(np.int64)


def _extend(values: Array, more: list[int]) -> Array:
    return np.concatenate([values, np.array(more, np.int64)])


def _order(branch: Branch) -> int:
    return branch.order
