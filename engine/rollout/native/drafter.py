"""Drafts from what was sampled before: earlier responses to the prompt, siblings, the prompt and a branch's own text.

`DraftIndex` (csrc/host) finds places where a branch's last tokens stood before, lets them vote for the next one, and
draws from the votes with the very random number that the token will be sampled with. How right such tokens are is
counted by what spoke for them (`Acceptance`), how long steps take is measured (`StepCost`); of both follows how much is
drafted: as many tokens, likely ones first and those of long branches, as give the most sampled tokens a second, what it
took to find them included, and none where that is no more than without. A token drafted right saves its row later, but
not its part of what a step costs beside the rows unless the other branches get ahead too: the slowest one decides how
many steps there are.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from ...data.segment import Text
from ..branch import Node
from .rows import RowTable

with contextlib.suppress(ImportError):  # `KvCache` says what is missing
    from ._host import Acceptance, Drafted, DraftIndex, StepCost

Array = npt.NDArray[Any]
_NOTHING: Array = np.zeros(0, np.int64)
SOURCES = ("own", "siblings", "earlier", "shared")
"""Where a drafted token stood: in the prompt or the branch's text, in another branch of the group, in an earlier
response to the same prompt, or in one to another prompt."""
MOST = 32  # tokens of one draft
LEAST = 0.05  # probability of being right, below which nothing is drafted
TICK = 1e-6  # seconds, the least that a look counts as
BESIDE = 1.5  # what drafting takes on the host, in looks: samples are checked and texts cut too, as measured
PATIENCE = 8  # looks that brought less than they cost, after which steps pass without
PAUSE, LONGEST = 16, 64  # steps from one look to the next then: twice as many each time that it brings nothing


class HistoryDrafter:
    """A `Drafter` whose index keeps ``tokens`` tokens of texts, those of the last ``age`` versions of the policy."""

    def __init__(self, tokens: int, age: int) -> None:
        self.index = DraftIndex(tokens)
        self.cost = StepCost()
        self.acceptance = Acceptance()
        self.age = age
        self._version = 0
        self._branches = 0  # of the step that was last drafted for
        self._others = 0
        self._looked = 0.0  # seconds that it took to draft for it
        self._drafted: Drafted | None = None  # of a step whose samples are not known yet
        self._credit = float(PATIENCE)  # what looks brought, in looks
        self._rested = 0  # steps in a row that did not look
        self._pause = PAUSE
        self._scopes: dict[int, int] = {}  # request -> scope
        self._prompts: set[int] = set()

    def propose(self, rows: RowTable, slots: Array, others: int, room: int) -> tuple[Array, Array]:
        begin = time.perf_counter()
        self._drafted = self._draft(rows, slots, others, room, begin)
        self._looked = time.perf_counter() - begin
        return (_NOTHING, _NOTHING) if self._drafted is None else (self._drafted.count, self._drafted.token)

    def _draft(self, rows: RowTable, slots: Array, others: int, room: int, begin: float) -> Drafted | None:
        self._branches = 0
        self._rested += 1
        if self._credit <= 0 and self._rested < self._pause:
            return None  # nor is such a step's time looked at
        self._rested = 0
        self._branches, self._others = len(slots), others
        fit = self.cost.fit(len(slots))
        if fit is None or room < 1:
            return None
        self._follow(rows, slots)
        least = max(LEAST, fit.share(len(slots), others))  # below, a token costs more than it brings
        if least >= 1:
            return None
        drafted = self.index.propose(
            slots,
            rows.segment_end,
            rows.length,
            rows.forks,
            rows.seed,
            rows.temperature,
            MOST,
            self.acceptance.rates,
            self.acceptance.limits,
            least,
        )
        if self._credit <= 0:
            self._pause = min(2 * self._pause, LONGEST)
        self._credit = max(self._credit - 1, 0)
        if not len(drafted):
            return None
        look = BESIDE * (time.perf_counter() - begin)
        saved = self.acceptance.choose(drafted, rows.length, fit, others, room, look)
        if saved > look:
            self._pause = PAUSE
            self._credit = min(self._credit + saved / max(look, TICK), PATIENCE)
        return drafted if len(drafted) else None

    def sampled(self, rows: RowTable, slots: Array, offset: Array, token: Array, ended: Array, version: int) -> None:
        if version != self._version:
            self._version = version
            self.index.forget(version - self.age)
            self._prompts.clear()
        if self._drafted is not None:
            self.acceptance.count(self._drafted, slots, offset, token)
            self._drafted = None
        if ended.any():  # other texts are read when there is something to find
            self._follow(rows, slots[ended])

    def took(self, queries: int, seconds: float) -> None:
        if self._branches and self._others <= self._branches:
            self.cost.took(self._branches, queries - self._others, seconds - self._looked)
        self._branches = 0

    def remember(self, text: Text, version: int) -> None:
        """Draft from a text that was not sampled here."""
        path = np.concatenate([text.prompt, text.before])
        self.index.add(_scope_of(text.prompt), -1, version, path[-DraftIndex.CONTEXT :], text.tokens)

    def _follow(self, rows: RowTable, slots: Array) -> None:
        """Bring the index to where the branches stand."""
        tokens = rows.records["token"]
        begun: dict[Node, list[tuple[int, int]]] = {}  # by what they begin behind: branches and their own tokens
        for slot in self.index.follow(slots, rows.order, rows.position, rows.forks, rows.fill, tokens):
            branch = rows.branch[slot]
            assert branch is not None
            own, node = (0, branch.node) if branch.node.sealed else (int(rows.fill[slot]), branch.node.parent)
            assert node is not None
            if (known := self.index.position(slot, branch.order)) >= 0:
                missing = int(rows.position[slot]) - known
                path = _last_tokens(node, tokens[slot, :own], missing)
                if 0 < missing == len(path):  # a tool's answer, say
                    self.index.append(np.full(missing, slot), path)
                    continue
            begun.setdefault(node, []).append((slot, own))
        for node, siblings in begun.items():
            of, own = np.array(siblings).T
            branch = rows.branch[of[0]]
            assert branch is not None
            number, scope = branch.request.number, self._scope(branch.request.number, branch.request.prompt)
            above, position = _last_tokens(node, _NOTHING, DraftIndex.CONTEXT), int(rows.position[of[0]]) - own[0]
            self.index.begin(of, scope, number, rows.order[of], self._version, position, above)
            held = np.arange(own.max()) < own[:, None]
            self.index.append(np.repeat(of, own), tokens[of, : own.max()][held])

    def _scope(self, request: int, prompt: Array) -> int:
        if request not in self._scopes:
            if len(self._scopes) > 4096:
                self._scopes.clear()
            self._scopes[request] = scope = _scope_of(prompt)
            if scope not in self._prompts:
                self._prompts.add(scope)
                self.index.add(scope, request, self._version, [], prompt)
        return self._scopes[request]


def _scope_of(prompt: Array) -> int:
    digest = hashlib.blake2b(np.ascontiguousarray(prompt, np.int32).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _last_tokens(node: Node | None, own: Array, most: int) -> Array:  # [up to most]
    """The end of a path: of the nodes up to ``node``, and of what stands behind them."""
    parts, wanted = [own[-most:]], most - len(own)
    while node is not None and wanted > 0:
        parts.append(node.records["token"][-wanted:])
        wanted -= len(parts[-1])
        node = node.parent
    return np.concatenate(parts[::-1])
