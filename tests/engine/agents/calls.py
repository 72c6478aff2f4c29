"""Episodes for tests: random agents at the level of tokens, and calls taken out of finished conversations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from rolltree.engine import LeafStatus, TokenTree
from rolltree.engine.agents.records import EpisodeRecord, SampledCall
from rolltree.engine.data.columns import COLUMNS
from rolltree.engine.data.segment import Origin, Segment


def call_tree(prompt: list[int], sampled: list[int], logprobs: list[float], **columns: object) -> TokenTree:
    """A call as the engine records it."""
    response = Segment.sampled(sampled, logprobs)
    response = Segment(response.token_ids, {**response.columns, **Segment.make(sampled, **columns).columns})
    return TokenTree.from_nodes([-1, 0], [Segment.prompt(prompt), response], [1], [LeafStatus.STOP])


def calls_of(tree: TokenTree, leaf: int) -> list[SampledCall]:
    """The calls of a conversation of turns: each turn, after all that was there before it."""
    rows, found = tree.path_rows(leaf), []
    sampled = tree.origin[rows] == Origin.SAMPLED
    bounds = np.flatnonzero(np.diff(sampled.astype(int), prepend=0, append=0))
    of_tokens = {name: values for name, values in tree.columns.items() if COLUMNS[name].per == "token"}

    def segment(some: np.ndarray, **changed: object) -> Segment:
        values = {name: values[some] for name, values in of_tokens.items()}
        return Segment(tree.token_id[some], values | Segment.make(tree.token_id[some], **changed).columns)

    for number, (begin, end) in enumerate(zip(bounds[::2], bounds[1::2], strict=True)):
        read = segment(rows[:begin], origin=Origin.PROMPT, loss_mask=False)
        own = TokenTree.from_nodes([-1, 0], [read, segment(rows[begin:end])], [1], [LeafStatus.STOP])
        found.append(SampledCall(own, number=number))
    return found


@dataclass
class RandomAgent:
    """Makes episodes whose calls append, rewrite history, run beside each other, ask sub-agents and repeat calls.

    Each sampled token has a log-prob that no other one has.
    """

    rng: np.random.Generator
    words: int = 3
    """Ids that tokens are drawn from; few, so that much is equal by chance."""
    longest: int = 4
    first: list[int] = field(default_factory=lambda: [1, 2])
    count: int = 0
    """Tokens sampled so far."""
    alike: bool = False
    """A log-prob follows from the id instead, so that equal beginnings have equal records."""

    def ids(self, least: int, most: int) -> list[int]:
        return self.rng.integers(1, 1 + self.words, self.rng.integers(least, most + 1)).tolist()

    def episode(self, calls: int, **given: object) -> EpisodeRecord:
        made: list[tuple[list[int], list[int], SampledCall]] = []
        for number in range(calls):
            prompt, role = self._prompt(made)
            sampled = self.ids(0 if self.rng.random() < 0.1 else 1, self.longest)
            logprobs = [-1 - 0.001 * (self.count + i) for i in range(len(sampled))]
            logprobs = [-3 - 0.01 * word for word in sampled] if self.alike else logprobs
            self.count += len(sampled)
            tree = call_tree(prompt, sampled, logprobs)
            made.append((prompt, sampled, SampledCall(tree, role, number)))
        fields = {"status": LeafStatus.STOP, "reward": float(self.rng.integers(0, 2))} | given
        return EpisodeRecord(tuple(call for _, _, call in made), **fields)

    def _prompt(self, made: list[tuple[list[int], list[int], SampledCall]]) -> tuple[list[int], str]:
        if not made:
            return [*self.first, *self.ids(0, 1)], ""
        before, said, last = made[-1]
        kind = self.rng.choice(["append", "append", "append", "compact", "edit", "again", "sub", "earlier"])
        if kind == "append":
            return [*before, *said, *self.ids(1, self.longest)], last.role
        if kind == "compact":
            keep = int(self.rng.integers(1, len(before) + 1))
            return [*before[:keep], *self.ids(0, self.longest)], last.role
        if kind == "edit":
            keep = int(self.rng.integers(0, len(said) + 1))
            return [*before, *said[:keep], *self.ids(0, self.longest)], last.role
        if kind == "again":
            return list(before), last.role
        if kind == "sub":
            return [self.first[0], *self.ids(0, self.longest)], "helper"
        earlier, words, call = made[int(self.rng.integers(len(made)))]
        return [*earlier, *words, *self.ids(0, self.longest)], call.role


def sampled_tokens(episodes: list[EpisodeRecord]) -> Iterator[tuple[int, int, float, tuple[int, ...]]]:
    """Yield episode, id, log-prob and all ids before it of each token that was sampled."""
    for number, record in enumerate(episodes):
        for call in record.calls:
            ids = call.tree.token_id.tolist()
            for place in range(int(call.tree.leaf_prompt[0]), len(ids)):
                yield number, ids[place], float(call.tree.behaviour_logprob[place]), tuple(ids[:place])
