"""Drafts: guesses of the next tokens of branches, taken from earlier texts and verified in one step.

`DraftIndex` (csrc/host) finds earlier places with the same last tokens as a branch: in the prompt, in the branch's own
text, in its siblings, in earlier responses to the prompt and in those to other prompts. The places vote for the next
token. One step then computes a branch's next token and its drafted ones.

Verification is exact. A sample's random number is a function of (seed of the branch, position), so a step draws a
sample at every position of a draft with that position's own number. The longest run of samples that agree with the
draft equals the samples of steps of one token, and the first one that disagrees is a valid sample too. A draft
changes the speed and never a token.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...data.media import FIRST_ID
from ...data.segment import Text
from ..branch import Node
from ..sampling_params import INT32, check_integer
from .rows import RowTable
from .stops import GO_ON, Stops

with contextlib.suppress(ImportError):  # `KvCache` reports what is missing
    from ._host import DraftIndex

Array = npt.NDArray[Any]
_NOTHING: Array = np.zeros(0, np.int64)
_MOST_REQUESTS = 4096
"""Number of requests whose scope is cached; beyond it a request's prompt is hashed and indexed again."""


@dataclass(frozen=True)
class DraftConfig:
    """Limits of drafting in the native engine. The sampled tokens are the same with any values.

    Raises:
        ValueError: a number is out of range.
    """

    rows: int = 8
    """Maximum number of rows, without drafted ones, of a step that gets drafts."""
    tokens: int = 4
    """Maximum number of drafted tokens for each branch."""
    remembered: int = 1 << 20
    """Number of text tokens kept to draft from, 28 bytes each; the oldest texts are dropped first."""

    def __post_init__(self) -> None:
        check_integer("DraftConfig.rows", self.rows, 1, INT32)
        check_integer("DraftConfig.tokens", self.tokens, 1, INT32)
        check_integer("DraftConfig.remembered", self.remembered, 256, INT32)


class Drafts:
    """Indexes the texts that an engine has sampled and drafts tokens from them."""

    def __init__(self, config: DraftConfig) -> None:
        self.config = config
        self.index = DraftIndex(config.remembered)
        self._scopes: dict[int, int] = {}  # request number -> scope: the hash of its prompt

    def propose(self, rows: RowTable, slots: Array, others: int, room: int) -> tuple[Array, Array]:
        """Draft for the running branches of a step.

        Args:
            slots: [R] int64, the running branches.
            others: number of the step's other rows.
            room: maximum number of drafted tokens in total; `cut` enforces it.

        Returns:
            The number of tokens of each branch [R] int64, and the tokens [sum] int64, one branch after another; two
            empty arrays if the step gets no drafts.
        """
        if len(slots) + others > self.config.rows or room < 1:
            return _NOTHING, _NOTHING
        self._follow(rows, slots)
        counts, tokens = self.index.propose(
            slots, rows.segment_end, rows.length, rows.forks, rows.seed, rows.temperature, self.config.tokens
        )
        return _of_words(counts, tokens) if (tokens >= FIRST_ID).any() else (counts, tokens)

    def sampled(self, rows: RowTable, slots: Array) -> None:
        """Index the samples of branches whose segment has ended, before they fork, are rewound or removed.

        Args:
            slots: [E] int64, the branches.
        """
        self._follow(rows, slots)

    def remember(self, text: Text) -> None:
        """Index a text that this engine did not sample."""
        path = np.concatenate([text.prompt, text.before])
        self.index.add(scope_of(text.prompt), path[-DraftIndex.CONTEXT :], text.tokens)

    def _follow(self, rows: RowTable, slots: Array) -> None:  # [S] int64
        """Index the tokens that the branches of ``slots`` have sampled since the last call."""
        tokens = rows.records["token"]
        begun: dict[Node, list[tuple[int, int]]] = {}  # node -> (slot, own tokens) of the branches that begin after it
        for slot in self.index.follow(slots, rows.order, rows.position, rows.forks, rows.fill, tokens):
            branch = rows.branch[slot]
            assert branch is not None
            sampled, node = (0, branch.node) if branch.node.sealed else (int(rows.fill[slot]), branch.node.parent)
            assert node is not None
            if (indexed := self.index.position(slot, branch.order)) >= 0:
                missing = int(rows.position[slot]) - indexed
                path = _last_tokens(node, tokens[slot, :sampled], missing)
                if 0 < missing == len(path):  # an observation was appended, for example
                    self.index.append(np.full(missing, slot), path)
                    continue
            begun.setdefault(node, []).append((slot, sampled))
        for node, siblings in begun.items():
            of, sampled = np.array(siblings).T
            branch = rows.branch[of[0]]
            assert branch is not None
            scope = self._scope(branch.request.number, branch.request.prompt)
            above, position = _last_tokens(node, _NOTHING, DraftIndex.CONTEXT), int(rows.position[of[0]]) - sampled[0]
            self.index.begin(of, scope, rows.order[of], position, above)
            held = np.arange(sampled.max()) < sampled[:, None]
            self.index.append(np.repeat(of, sampled), tokens[of, : sampled.max()][held])

    def _scope(self, request: int, prompt: Array) -> int:  # [P] int32
        """Return the scope of a request; its prompt is indexed the first time."""
        if request not in self._scopes:
            if len(self._scopes) >= _MOST_REQUESTS:
                self._scopes.clear()
            self._scopes[request] = scope = scope_of(prompt)
            self.index.add(scope, [], prompt)
        return self._scopes[request]


def cut(
    rows: RowTable, stops: Stops, slots: Array, counts: Array, tokens: Array, room: int
) -> tuple[Array, Array]:  # [R] int64, [R] int64, [sum] int64 -> [R] int64, [sum] int64
    """Cut drafts to tokens that can become part of a response: none after a token that ends it or its segment, none for
    a branch that forks, and at most ``room`` in total."""
    most = np.where(rows.forks[slots] > 0, 0, rows.segment_end[slots] - rows.length[slots] - 1)
    ends = stops.tokens(np.repeat(rows.stop_table[slots], counts), tokens) != GO_ON
    owner = np.repeat(np.arange(len(counts)), counts)
    offset = np.arange(len(tokens)) - np.repeat(np.cumsum(counts) - counts, counts)
    kept = _unbroken(ends | (offset >= most[owner]), offset)
    kept &= np.cumsum(kept) <= room
    return np.bincount(owner[kept], minlength=len(counts)), tokens[kept]


def _of_words(counts: Array, tokens: Array) -> tuple[Array, Array]:  # [R] int64, [sum] int64
    """Cut drafts before the first row of a picture, which no response holds."""
    owner = np.repeat(np.arange(len(counts)), counts)
    offset = np.arange(len(tokens)) - np.repeat(np.cumsum(counts) - counts, counts)
    kept = _unbroken(tokens >= FIRST_ID, offset)
    return np.bincount(owner[kept], minlength=len(counts)), tokens[kept]


def on_path(token: Array, before: Array, offset: Array) -> Array:  # [E] int64 each -> [E] bool
    """Return a mask of the samples that continue the sampled tokens before them.

    Args:
        token: the samples, those of one branch in order.
        before: the token that precedes each sample, a drafted one where ``offset`` is not 0.
        offset: number of drafted tokens between the branch's last token and the sample.
    """
    wrong = np.zeros(len(token), np.bool_)
    wrong[1:] = (offset[1:] > 0) & (token[:-1] != before[1:])
    return _unbroken(wrong, offset)


def up_to_end(ends: Array, offset: Array) -> Array:  # [E] bool, [E] int64 -> [E] bool
    """Return the samples of each branch up to the first one that ``ends`` it."""
    after = np.zeros(len(ends), np.bool_)
    after[1:] = (offset[1:] > 0) & ends[:-1]
    return _unbroken(after, offset)


def _unbroken(breaks: Array, offset: Array) -> Array:  # [E] bool, [E] int64 -> [E] bool
    """Return the entries up to each branch's first break, without it; ``offset`` counts from 0 within a branch."""
    broken = np.cumsum(breaks)
    first = np.arange(len(breaks)) - offset
    return broken - (broken - breaks)[first] == 0


def scope_of(prompt: Array) -> int:  # [P] int32
    """Return the scope of the texts of a prompt: a hash of its tokens."""
    digest = hashlib.blake2b(np.ascontiguousarray(prompt, np.int32).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _last_tokens(node: Node | None, sampled: Array, most: int) -> Array:  # [up to most] int32
    """Return the last tokens of a path: those of the nodes down to ``node``, then ``sampled``."""
    parts, missing = [sampled[-most:]], most - len(sampled)
    while node is not None and missing > 0:
        parts.append(node.records["token"][-missing:])
        missing -= len(parts[-1])
        node = node.parent
    return np.concatenate(parts[::-1])
