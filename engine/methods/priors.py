"""Predicted mean rewards of problems, which V_0 and V_0.5 use: a column of the data, or the rewards of similar ones."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ..errors import UserError

WORD = re.compile(r"\w+|[^\w\s]")


class Values:
    """Predicts a problem's mean reward from the groups of earlier steps: V_0 without its pre-trained network.

    V_0 (arXiv 2602.03584) reads pairs of a prompt and its score, which describe the policy of the moment, and no
    parameter is updated. Here the pairs are averaged: ``V(x) = sum_j w_j r_j / sum_j w_j`` over the newest ``window``
    groups of earlier steps, ``w_j = exp((cos(x, x_j) - 1) / width)``, cos the cosine of the texts' word counts, each
    weighed by ``log((1 + N) / (1 + n))`` for a word in n of the N texts. Inferred: all of it but the use of pairs.

    Args:
        window: newest groups that count.
        width: how fast the weight of less similar problems falls.
    """

    def __init__(self, window: int = 256, width: float = 0.2) -> None:
        self._window, self._width = window, width
        self._pairs: dict[tuple[int, str], tuple[str, list[float]]] = {}  # by step and problem: text, mean rewards
        self._step = -1  # of the pairs below
        self._earlier: list[tuple[Counter[str], float, float]] = []  # word counts, their norm, mean reward
        self._rarity: dict[str, float] = {}

    def predict(self, text: str, step: int) -> float | None:
        """Return the predicted mean reward of a problem at ``step``; None before any group of an earlier one."""
        if step != self._step:
            self._read(step)
        if not self._earlier:
            return None
        words = self._weighed(text)
        norm = _norm(words)
        total = summed = 0.0
        for other_words, size, reward in self._earlier:
            both = sum(value * other_words[word] for word, value in words.items() if word in other_words)
            weight = math.exp((both / (norm * size) - 1 if norm and size else -1) / self._width)
            total, summed = total + weight, summed + weight * reward
        return summed / total

    def add(self, problem: str, text: str, reward: float, step: int) -> None:
        """Add the mean reward of a problem's group in ``step``, which counts from the next step on."""
        self._pairs.setdefault((step, problem), (text, []))[1].append(reward)

    def _read(self, step: int) -> None:
        """Take the pairs of the steps before ``step``, in an order that does not depend on the judges' time."""
        keys = sorted(key for key in self._pairs if key[0] < step)[-self._window :]
        kept = set(keys)
        self._pairs = {key: pair for key, pair in self._pairs.items() if key[0] >= step or key in kept}
        texts = [WORD.findall(self._pairs[key][0]) for key in keys]
        seen = Counter(word for text in texts for word in set(text))
        self._rarity = {word: math.log((1 + len(keys)) / (1 + count)) for word, count in seen.items()}
        self._earlier = []
        for key in keys:
            text, rewards = self._pairs[key]
            words = self._weighed(text)
            self._earlier.append((words, _norm(words), sum(sorted(rewards)) / len(rewards)))
        self._step = step

    def _weighed(self, text: str) -> Counter[str]:
        counts = Counter(WORD.findall(text))
        return Counter({word: n * w for word, n in counts.items() if (w := self._rarity.get(word, 0.0))})

    def state_dict(self) -> dict[str, Any]:
        """Return the pairs."""
        return {"pairs": [[step, problem, *pair] for (step, problem), pair in self._pairs.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self._pairs = {(step, problem): (text, list(means)) for step, problem, text, means in state["pairs"]}
        self._step = -1


def _norm(words: Mapping[str, float]) -> float:
    return math.sqrt(sum(value * value for value in words.values()))


def number_in(entry: Mapping[str, Any], column: str, what: str) -> float:
    """Return the number in a column of a problem's row.

    Raises:
        UserError: there is none.
    """
    try:
        return float(entry[column])
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"{what} reads the column '{column}' of a problem's row, which is to hold its predicted mean reward, a "
            "number; add it to the data, or leave `column` out."
        ) from None
