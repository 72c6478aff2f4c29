"""The place where the first prompts of a group's episodes differ; no token after it is shared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .columns import Array

if TYPE_CHECKING:  # the report imports this file, and needs none of what builds trees
    from .tree import TokenTree


class Begun(NamedTuple):
    """The sequences of an episode, which begin with calls.

    Attributes:
        prompts: of each sequence the number of its first call, and the token ids that this read.
        calls: the episode's calls with ``number``, ``arrived`` and ``ended``, in seconds.
    """

    prompts: Sequence[tuple[int, Sequence[int] | Array]]
    calls: Sequence[Mapping[str, Any]]

    def openings(self) -> Iterator[Array]:
        """Yield the prompts of calls that were made before any was answered, so that they hold no answer."""
        first = min((call["ended"] for call in self.calls), default=np.inf)
        early = {call["number"] for call in self.calls if call["arrived"] <= first}
        yield from (np.asarray(ids) for number, ids in self.prompts if number in early)


class Parting(NamedTuple):
    """The first difference between the prompts of a group's episodes.

    Attributes:
        shared: number of tokens before it.
        prompt: [n] int32, the prompt of the first episode.
        other: [m] int32, the prompt of another episode that has most in common with it.
    """

    shared: int
    prompt: Array
    other: Array


def parting(episodes: Iterable[Begun]) -> Parting | None:
    """Return where a prompt with which the first episode begins is no longer the same in each other episode; None where
    all are the same."""
    called = [episode for episode in episodes if episode.prompts]
    first = None
    for prompt in called[0].openings() if called else ():
        for other in called[1:]:
            read = [np.asarray(ids) for _, ids in other.prompts]
            shared = [common(prompt, ids) for ids in read]
            most = max(shared)
            if most < len(prompt) and (first is None or most < first.shared):
                first = Parting(most, prompt, read[shared.index(most)])
    return first


def tree_parting(tree: TokenTree) -> Parting | None:
    """Return the `parting` of the tree of a group of episodes."""
    begun: dict[int, list[tuple[int, Array]]] = {}
    for leaf in np.flatnonzero(tree.response_length).tolist():
        rows, length = tree.path_rows(leaf), int(tree.leaf_prompt[leaf])
        begun.setdefault(int(tree.episode[leaf]), []).append(
            (int(tree.call[rows[length]]), tree.token_id[rows[:length]])
        )
    times = tree.meta["timeline"]
    return parting(Begun(prompts, times[number]["calls"]) for number, prompts in begun.items() if times[number])


def common(a: Array, b: Array) -> int:
    """Return the number of tokens before the first in which two sequences differ, or one has ended."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length
