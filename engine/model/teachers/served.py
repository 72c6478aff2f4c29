"""A teacher on a server, which tells the log-probs of its likeliest tokens at each place of a response."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel

from ...batches.batch import TreeBatch
from ...data.columns import TOP_IDS, TOP_LOGPROBS
from ...data.tree import TokenTree
from ..roles import Role

KEPT = 1 << 22
"""Largest number of log-probs of answered questions that are kept."""


class Told(Protocol):
    """The log-probs of the tokens of a sequence after its first ones; see `protocols.scoring.Known`."""

    @property
    def logprob(self) -> npt.NDArray[np.float32]: ...

    @property
    def ids(self) -> npt.NDArray[np.int32]: ...

    @property
    def logprobs(self) -> npt.NDArray[np.float32]: ...


Ask = Callable[[Sequence[Sequence[int]], Sequence[int], int], Sequence[Told]]
"""Asks a server for the log-probs of the tokens of each sequence from the place ``first`` on: ``ask(sequences, first,
vocabulary)``; see `protocols.scoring.ScoringServer.score`."""


class _Path(NamedTuple):
    """A response with its prompt."""

    ids: bytes  # int32 [n]
    first: int  # place of the first token whose log-prob is asked for


class ServedTeacher(Role):
    """Writes the log-probs of each response token, and those of the likeliest tokens at its place.

    A tree costs one question for each path that is not the beginning of another one, whatever its leaves; a question
    whose answer is known is not asked again. A place that several paths share has the values of the first.

    Args:
        column: of the log-probs of the tokens themselves.
        model: the policy, whose vocabulary the server shares.
        ask: called on all ranks alike, as each scores all trees.
        scores: write these too.
    """

    def __init__(self, column: str, model: PreTrainedModel, ask: Ask, *, scores: bool) -> None:
        super().__init__(column, model, scores=scores)
        self._ask_server = ask
        self._vocabulary = len(model.get_output_embeddings().weight)
        self._answers: OrderedDict[_Path, Told] = OrderedDict()
        self._kept = 0

    @property
    def fixed(self) -> bool:
        return True

    @property
    def columns(self) -> tuple[str, ...]:
        return (*super().columns, TOP_IDS, TOP_LOGPROBS)

    def score(
        self, trees: Sequence[TokenTree], batches: Sequence[TreeBatch], *, temperature: float
    ) -> list[PreTrainedModel]:
        paths = [_paths(tree) for tree in trees]
        self._ask(list(dict.fromkeys(path for of_tree in paths for path, _ in of_tree)))
        for tree, of_tree in zip(trees, paths, strict=True):
            self._write(tree, of_tree)
        return []

    def _ask(self, paths: Sequence[_Path]) -> None:
        """Have the answers for ``paths``, which are the latest that are kept."""
        new = [path for path in paths if path not in self._answers]
        sequences = [np.frombuffer(path.ids, np.int32).tolist() for path in new]
        answers = self._ask_server(sequences, [path.first for path in new], self._vocabulary) if new else []
        self._answers |= zip(new, answers, strict=True)
        self._kept += sum(answer.ids.size for answer in answers)
        for path in paths:
            self._answers.move_to_end(path)
        needed = len(paths)
        while self._kept > KEPT and len(self._answers) > needed:
            self._kept -= self._answers.popitem(last=False)[1].ids.size

    def _write(self, tree: TokenTree, paths: Sequence[tuple[_Path, npt.NDArray[np.int64]]]) -> None:
        K = max(self._answers[path].ids.shape[1] for path, _ in paths)
        ids = np.full((tree.num_tokens, K), -1, np.int32)
        logprobs, of_tokens = np.zeros((tree.num_tokens, K), np.float32), np.full(tree.num_tokens, np.nan, np.float32)
        for path, rows in reversed(paths):  # the first one is written last
            answer, n = self._answers[path], len(rows)
            ids[rows], logprobs[rows], of_tokens[rows] = answer.ids[:n], answer.logprobs[:n], answer.logprob[:n]
        tree.set(TOP_IDS, ids)
        tree.set(TOP_LOGPROBS, logprobs)
        if self.scores:
            tree.set(self.column, of_tokens)


def _paths(tree: TokenTree) -> list[tuple[_Path, npt.NDArray[np.int64]]]:
    """Return for each leaf of ``tree`` the path to ask for, its own or one that begins with it, and the rows of its
    response."""
    rows = [tree.path_rows(leaf) for leaf in range(tree.num_leaves)]
    tokens = [tree.token_id[of_leaf].astype(np.int32).tobytes() for of_leaf in rows]
    longest = b""
    for leaf in sorted(range(len(tokens)), key=tokens.__getitem__, reverse=True):  # what begins with it came before
        longest = tokens[leaf] = longest if longest.startswith(tokens[leaf]) else tokens[leaf]
    first = tree.prompt_length
    return [(_Path(ids, first), of_leaf[first:]) for ids, of_leaf in zip(tokens, rows, strict=True)]
