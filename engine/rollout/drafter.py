"""Drafts from what was sampled before: earlier responses to the prompt, siblings, the prompt and a branch's own text.

`DraftIndex` (csrc/host) finds places where a branch's last tokens stood before, lets them vote for the next one, and
draws from the votes with the very random number that the token will be sampled with. How right such tokens are is
counted by what spoke for them, how long steps take is measured; of both follows how much is drafted: as many tokens,
likely ones first and those of long branches, as give the most sampled tokens a second, and none where that is no more
than without.
"""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from .rows import RowTable
from .step_cost import StepCost

with contextlib.suppress(ImportError):  # `KvCache` says what is missing
    from ._host import DraftIndex

Array = npt.NDArray[Any]
SOURCES = ("own", "siblings", "earlier", "shared")
"""Where a drafted token stood: in the prompt or the branch's text, in another branch of the group, in an earlier
response to the same prompt, or in one to another prompt."""
MOST = 32  # tokens of one draft
LEAST = 0.05  # probability of being right, below which nothing is drafted
MEMORY = 2000  # drafted tokens of a kind after which the counts are halved
MARGIN = 1.02  # how much faster a step with drafts must be: estimates are estimates


class HistoryDrafter:
    """A `Drafter` whose index keeps ``tokens`` tokens of texts, those of the last ``age`` versions of the policy."""

    def __init__(self, tokens: int, age: int) -> None:
        self.index = DraftIndex(tokens)
        self.cost = StepCost()
        self.age = age
        kinds = int(np.prod(DraftIndex.KINDS))
        # how right a token was, by its kind: at first as if 4 had been drafted
        self._tries = np.full(kinds, 4.0)
        self._hits = np.tile([1.5, 2.5, 3.5], kinds // 3)
        self.drafted = np.zeros(len(SOURCES), np.int64)
        self.right = np.zeros(len(SOURCES), np.int64)
        self._version = 0
        self._branches = 0  # of the step that was last drafted for
        self._others = 0
        # By slot: the branch and how far the index has it, and where its draft lies in those below.
        self._order = np.full(0, -1, np.int64)
        self._position = np.zeros(0, np.int64)
        self._begin = np.zeros(0, np.int64)
        self._count = np.zeros(0, np.int64)
        self._token = self._kind = np.zeros(0, np.int64)
        self._scopes: dict[int, int] = {}  # request -> scope
        self._prompts: set[int] = set()

    def propose(self, rows: RowTable, slots: Array, others: int, room: int) -> tuple[Array, Array]:
        self._follow(rows, slots, np.zeros(len(slots), np.int64))
        self._branches, self._others = len(slots), others
        self._count[:] = 0
        none = np.zeros(len(slots), np.int64), np.zeros(0, np.int64)
        rest = len(slots) + others
        seconds = self.cost.seconds(len(slots), np.arange(rest, rest + min(room, MOST * len(slots)) + 1))
        if seconds is None:
            return none
        # the most that a draft can gain: every token of it right
        if ((len(slots) + np.arange(len(seconds))) / seconds).max() <= MARGIN * len(slots) / seconds[0]:
            return none
        most = np.minimum(rows.segment_end[slots] - rows.length[slots] - 1, MOST)
        most[rows.forks[slots] > 0] = 0
        counts, tokens, kinds, survival = self.index.propose(
            slots,
            most,
            rows.seed[slots],
            rows.length[slots],
            rows.temperature[slots] == 0,
            self._hits / self._tries,
            LEAST,
        )
        owner = np.repeat(np.arange(len(slots)), counts)
        length = rows.length[slots]
        value = survival * (1 + length / max(int(length.max()), 1))[owner]
        ranked = np.argsort(-value, kind="stable")[: len(seconds) - 1]
        speed = (len(slots) + np.cumsum(survival[ranked])) / seconds[1 : 1 + len(ranked)]
        if not len(speed) or speed.max() <= MARGIN * len(slots) / seconds[0]:
            return none
        chosen = np.sort(ranked[: int(speed.argmax()) + 1])  # a branch's survival falls, so these are beginnings
        self._token, self._kind = tokens[chosen], kinds[chosen]
        counts = np.bincount(owner[chosen], minlength=len(slots))
        self._begin[slots], self._count[slots] = np.cumsum(counts) - counts, counts
        return counts, self._token

    def sampled(self, rows: RowTable, slots: Array, offset: Array, token: Array, version: int) -> None:
        if version != self._version:
            self._version = version
            self.index.forget(version - self.age)
            self._prompts.clear()
        if (token < 0).any():
            whole = token >= 0
            slots, offset, token = slots[whole], offset[whole], token[whole]
        new = np.bincount(slots, minlength=1)
        each = slots[offset == 0]
        self._follow(rows, each, new[each])
        self.index.append(slots, token)
        self._position[each] = rows.position[each]
        drafted = offset < self._count[slots]
        place = self._begin[slots[drafted]] + offset[drafted]
        self._count_right(self._kind[place], self._token[place] == token[drafted])

    def took(self, queries: int, seconds: float) -> None:
        if self._branches and self._others <= self._branches:
            self.cost.took(self._branches, queries - self._others, seconds)
        self._branches = 0

    def _count_right(self, kind: Array, right: Array) -> None:
        self._tries += np.bincount(kind, minlength=len(self._tries))
        self._hits += np.bincount(kind[right], minlength=len(self._hits))
        old = self._tries > MEMORY
        self._tries[old] /= 2
        self._hits[old] /= 2
        source = kind // (len(self._tries) // len(SOURCES))
        self.drafted += np.bincount(source, minlength=len(SOURCES))
        self.right += np.bincount(source[right], minlength=len(SOURCES))

    def _follow(self, rows: RowTable, slots: Array, new: Array) -> None:  # [R] int64 each
        """Bring the index to where the branches stood ``new`` tokens ago."""
        if len(self._order) < len(rows.order):
            more = len(rows.order) - len(self._order)
            self._order = np.concatenate([self._order, np.full(more, -1, np.int64)])
            for name in ("_position", "_begin", "_count"):
                setattr(self, name, np.concatenate([getattr(self, name), np.zeros(more, np.int64)]))
        behind = (self._order[slots] != rows.order[slots]) | (self._position[slots] != rows.position[slots] - new)
        for slot, tokens in zip(slots[behind].tolist(), new[behind].tolist(), strict=True):
            self._begin_text(rows, slot, tokens)

    def _begin_text(self, rows: RowTable, slot: int, new: int) -> None:
        branch = rows.branch[slot]
        assert branch is not None
        given = int(rows.position[slot]) - new - int(self._position[slot])
        path = _last_tokens(rows, slot, new + max(DraftIndex.CONTEXT, given))
        path = path[: len(path) - new]
        if self._order[slot] == branch.order and 0 < given <= len(path):  # a tool's answer, say
            self.index.append(np.full(given, slot), path[len(path) - given :])
        else:
            scope = self._scope(branch.request.number, branch.request.prompt)
            self.index.begin(
                slot, scope, branch.request.number, branch.order, self._version, path[-DraftIndex.CONTEXT :]
            )
        self._order[slot] = branch.order
        self._position[slot] = rows.position[slot] - new

    def _scope(self, request: int, prompt: Array) -> int:
        if request not in self._scopes:
            if len(self._scopes) > 4096:
                self._scopes.clear()
            digest = hashlib.blake2b(prompt.tobytes(), digest_size=8).digest()
            self._scopes[request] = scope = int.from_bytes(digest, "little", signed=True)
            if scope not in self._prompts:
                self._prompts.add(scope)
                self.index.add(scope, request, self._version, [], prompt)
        return self._scopes[request]


def _last_tokens(rows: RowTable, slot: int, most: int) -> Array:  # [up to most] int32
    """The end of a branch's path."""
    branch = rows.branch[slot]
    assert branch is not None
    node = branch.node if branch.node.sealed else branch.node.parent
    parts = [] if branch.node.sealed else [rows.records["token"][slot, : rows.fill[slot]][-most:]]
    while node is not None and (wanted := most - sum(map(len, parts))) > 0:
        parts.append(node.records["token"][-wanted:])
        node = node.parent
    return np.concatenate(parts[::-1])
