"""The chunks of waiting branches that one step computes, and the pages that they may take."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from rolltree.kernels.tree_decode.items import CHUNK

from ..branch import Branch
from ..failing import TooLongError
from .cache.kv_cache import KvCache, KvExhaustedError
from .cache.states import StateCache
from .pictures import whole_part
from .rows import Fill, RowTable

if TYPE_CHECKING:
    from ._host import KvTree

Array = npt.NDArray[Any]
PREFILL_TOKENS = 2048
GPU_PREFILL_TOKENS = 8192
MOST_PARTIALS = 65536
"""Partial results of attention, each of a token and `CHUNK` keys, in a step with more than `PREFILL_TOKENS`: 1 GiB with
32 heads of 128."""


def prefill_limit(tokens: int | None, device: torch.device) -> Callable[[int], int]:
    """Return a function that gives, for the longest path of a step, the most tokens of missing keys that it computes.

    Args:
        tokens: as many whatever the path; None for the device's own number.
    """
    if tokens is not None or device.type != "cuda":
        return lambda longest: tokens or PREFILL_TOKENS
    return lambda longest: min(max(MOST_PARTIALS // -(-longest // CHUNK), PREFILL_TOKENS), GPU_PREFILL_TOKENS)


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
