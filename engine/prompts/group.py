"""The responses to one prompt, from its admission to its update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from ..data.concat import join
from ..data.episodes import answers
from ..data.tree import TokenTree
from ..rewards import RewardResult
from .prompts import Prompt


class State(StrEnum):
    """The state of a group."""

    QUEUED = "queued"
    SAMPLING = "sampling"
    JUDGING = "judging"
    READY = "ready"
    TRAINING = "training"
    DONE = "done"
    DROPPED = "dropped"


@dataclass(eq=False)
class Responses:
    """The responses that one request sampled for a group."""

    tree: TokenTree
    texts: Sequence[str]
    """Texts of the responses, in the order of the leaves."""
    unsampled: dict[int, str]
    """Leaves that could not be sampled, with the reasons."""
    verdicts: list[RewardResult] = field(default_factory=list)
    """Verdicts on the leaves `judged`."""

    @property
    def judged(self) -> list[int]:
        """The leaves that verifiers are asked about: all that were sampled, of an agent's episode the last answer."""
        alone = answers(self.tree)
        return [leaf for leaf, main in enumerate(alone.tolist()) if leaf == main and leaf not in self.unsampled]

    @property
    def of_leaves(self) -> list[RewardResult | None]:
        """The verdict on each leaf or its episode; None: it was not sampled. Parts of a text are of `judged` leaves."""
        by_leaf = dict(zip(self.judged, self.verdicts, strict=True))
        alone = answers(self.tree).tolist()
        return [
            by_leaf.get(leaf) if leaf == main or main not in by_leaf else replace(by_leaf[main], spans=[])
            for leaf, main in enumerate(alone)
        ]


@dataclass(eq=False)
class Group:
    """The responses to one prompt, from its admission to its update."""

    ticket: int
    prompt: Prompt
    started: int
    """Number of steps that had ended when the group was admitted."""
    state: State = State.QUEUED
    reason: str = ""
    """Reason for which the group was dropped."""
    overtaken: int = 0
    """Number of younger groups taken before it."""
    other: Prompt | None = None
    """The prompt of the newest request, if it is trained under the group's own and sampled under another."""
    attempt: int = 0
    """Number of requests made for the group before the present one."""
    sampled: int = 0
    """Number of tokens sampled in its responses that are finished."""
    offered: bool = False
    """It was offered to be scored before its batch is complete."""
    place: int | None = None
    """`Flight.place` of its newest responses."""
    parts: list[Responses] = field(default_factory=list)
    """Responses of each request; the newest may not be judged yet."""

    @property
    def tree(self) -> TokenTree:
        """All responses of the group as one tree."""
        if len(self.parts) > 1:
            joined = Responses(join([part.tree for part in self.parts]), self.texts, {}, self.verdicts)
            begin = 0
            for part in self.parts:
                joined.unsampled |= {begin + leaf: why for leaf, why in part.unsampled.items()}
                begin += part.tree.num_leaves
            joined.tree.set("group", self.ticket)
            self.parts = [joined]
        return self.parts[0].tree

    @property
    def asked(self) -> Prompt:
        """The prompt of the newest request."""
        return self.prompt if self.other is None else self.other

    def keep(self, leaves: Sequence[int]) -> None:
        """Leave out all leaves of judged responses but ``leaves``.

        Raises:
            ValueError: there is no such leaf, or none is kept.
        """
        count = self.tree.num_leaves
        if not leaves or not set(leaves) <= set(range(count)):
            raise ValueError(f"a group of {count} responses cannot keep {list(leaves)[:8]}")
        whole, kept = self.parts[0], sorted(set(leaves))
        verdicts = dict(zip(whole.judged, whole.verdicts, strict=True))
        tree = whole.tree.without_leaves(~np.isin(np.arange(count), kept))
        assert tree is not None
        self.parts = [
            Responses(
                tree,
                [whole.texts[leaf] for leaf in kept],
                {new: whole.unsampled[old] for new, old in enumerate(kept) if old in whole.unsampled},
                [verdicts[leaf] for leaf in kept if leaf in verdicts],
            )
        ]

    @property
    def texts(self) -> Sequence[str]:
        """Texts of all responses, in the order of the leaves."""
        return self.parts[0].texts if len(self.parts) == 1 else [text for part in self.parts for text in part.texts]

    @property
    def unsampled(self) -> list[str]:
        """The reason of each response that could not be sampled."""
        return [
            part.unsampled[leaf]
            for part in self.parts
            for leaf, main in enumerate(answers(part.tree).tolist())
            if leaf == main and leaf in part.unsampled
        ]

    @property
    def responses(self) -> int:
        """Number of responses that were asked for: leaves, or episodes of an agent."""
        return sum(len(set(answers(part.tree).tolist())) for part in self.parts)

    @property
    def verdicts(self) -> list[RewardResult]:
        """Verdicts on the responses that were sampled."""
        return [verdict for part in self.parts for verdict in part.verdicts]
