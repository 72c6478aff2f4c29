"""Pictures in the native engine: which rows of a step they take, and the vision tower's output for them.

The tower runs outside of the decoder's call, once a picture. Its output is kept while prompts with the picture are
prefilled, and for later prompts as far as there is room; new weights make it anew.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...data.columns import Array
from ...data.media import Picture
from ...model.pictures import Features, embedded, encode
from .routes import path_slots
from .rows import Fill

if TYPE_CHECKING:
    from ._host import KvTree

KEPT_ROWS = 1 << 14
"""Rows of the tower's output that are kept; a step's own pictures may exceed it."""


class Shown(NamedTuple):
    """The rows of a step that pictures take."""

    row: Array  # [n] int64, rows of the step
    which: Array  # [n] int64, index into `pictures`
    inside: Array  # [n] int64, row of the picture
    pictures: tuple[Picture, ...]
    runs: tuple[tuple[int, int, Array], ...] = ()
    """First row and end of each run that a picture takes, and the slots of all keys on the path to its last row; for a
    model in which a picture's rows attend to each other in both directions."""

    @staticmethod
    def of(fills: Sequence[Fill], positions: Sequence[int], rows: Array, before: int) -> Shown | None:
        """Return the rows that ``fills`` compute of pictures; None if there are none.

        Args:
            fills: their tokens follow one another, after ``before`` other ones.
            positions: depth of each fill's first token.
            rows: [N] int64, the token that each row of the step computes.
        """
        index: dict[str, int] = {}
        pictures: list[Picture] = []
        which, inside = np.full(len(rows), -1), np.zeros(len(rows), np.int64)  # by token
        begin = before
        for fill, first in zip(fills, positions, strict=True):
            media = fill.branch.request.media
            for low, high, picture in () if media is None else media.spans:
                cut = max(low, first), min(high, first + fill.count)
                if cut[0] < cut[1]:
                    if index.setdefault(picture.digest, len(pictures)) == len(pictures):
                        pictures.append(picture)
                    tokens = slice(begin + cut[0] - first, begin + cut[1] - first)
                    which[tokens], inside[tokens] = index[picture.digest], np.arange(*cut) - low
            begin += fill.count
        if not pictures:
            return None
        row = np.flatnonzero(which[rows] >= 0)
        token = rows[row]
        return Shown(row, which[token], inside[token], tuple(pictures))

    def with_runs(self, tree: KvTree, node: Array, position: Array) -> Shown:
        """Return the same with `runs`.

        Args:
            node: [N] int64, the KV node of each row of the step, which has the keys of the step's rows already.
            position: [N] int64, depth of each row.
        """
        begins = [0, *(1 + np.flatnonzero((np.diff(self.row) != 1) | (np.diff(self.inside) != 1))), len(self.row)]
        runs = []
        for begin, end in itertools.pairwise(begins):
            last = self.row[end - 1]
            slots = path_slots(tree, int(node[last]))[: position[last] + 1]
            runs.append((int(self.row[begin]), int(last) + 1, slots))
        return self._replace(runs=tuple(runs))


def whole_part(fill: Fill, first: int, budget: int, whole: bool) -> int:
    """Return how many tokens of ``fill`` a step computes: at most ``budget``, and no picture in parts.

    In a model in which a picture's rows attend to each other in both directions, none is right before all are computed.

    Args:
        first: depth of the fill's first token.
        whole: nothing else uses the budget; a picture may then exceed it.
    """
    media = fill.branch.request.media
    for low, high, _ in () if media is None or fill.count <= budget else media.spans:
        if low < first + budget < high:
            return low - first if low > first else high - first if whole else 0
    return min(fill.count, budget)


class Towers:
    """The output of a model's vision tower, by picture; adapters of rows have no part in it.

    Attributes:
        encoded: number of pictures that the tower has computed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._kept: OrderedDict[str, Features] = OrderedDict()
        self.encoded = 0

    def inputs(self, decoder: Any, ids: Tensor, shown: Shown) -> dict[str, Any]:  # ids: [N] int64
        """Return the arguments of ``decoder`` that stand for ``input_ids`` in a step that shows pictures."""
        features = self._features(shown.pictures)
        sizes = np.array([picture.rows for picture in shown.pictures])
        source = (np.cumsum(sizes) - sizes)[shown.which] + shown.inside
        row, source = (torch.from_numpy(x).to(ids.device) for x in (shown.row, source))
        return embedded(decoder, ids, row, source, features)

    def forget(self) -> None:
        """Discard what old weights computed."""
        self._kept.clear()

    def _features(self, pictures: Sequence[Picture]) -> Features:
        new = [picture for picture in pictures if picture.digest not in self._kept]
        if new:
            device = self._model.get_output_embeddings().weight.device
            inputs = {
                name: torch.from_numpy(np.concatenate([picture.inputs[name] for picture in new])).to(device)
                for name in new[0].inputs
            }
            sizes = [picture.rows for picture in new]
            first, *deeper = (level.split(sizes) for level in _levels(encode(self._model, inputs, sizes)))
            for i, picture in enumerate(new):
                of_picture = Features(first[i].clone(), tuple(level[i].clone() for level in deeper))
                self._kept[picture.digest] = of_picture
            self.encoded += len(new)
        shown = [self._kept[picture.digest] for picture in pictures]
        for picture in pictures:
            self._kept.move_to_end(picture.digest)
        rows = sum(len(features.embedding) for features in self._kept.values())
        while rows > KEPT_ROWS and len(self._kept) > 1:
            rows -= len(self._kept.popitem(last=False)[1].embedding)
        first, *deeper = (torch.cat(level) for level in zip(*map(_levels, shown), strict=True))
        return Features(first, tuple(deeper))


def _levels(features: Features) -> tuple[Tensor, ...]:
    return features.embedding, *features.deeper
