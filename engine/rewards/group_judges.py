"""Judges of groups: functions of the texts of all responses of a group and the problem's entry.

A judge returns a list of as many verdicts, each as a verifier returns it (`verifiers.py`). One response alone cannot be
compared and is skipped. Imports nothing of rolltree, like `verifiers.py`.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from .answers import extract_answer, tidy

ALONE: dict[str, Any] = {"reward": None, "skipped": "alone"}
NO_ANSWER: dict[str, Any] = {"reward": 0.0, "unparsed": "no_answer"}
Compare = Callable[[str, str, dict[str, Any]], float]
"""Tells how far the first text is better than the second: 1 it is, 0 it is not, 0.5 neither."""


def _answers(texts: list[str]) -> list[str | None]:
    """Return the answer that each response marks, without emphasis, ``$`` and a full stop; None if it marks none."""
    return [None if (said := extract_answer(text)) is None else tidy(said) for text in texts]


class Majority:
    """Majority vote (TTRL, MM-UPT): 1 for a response whose answer is the most frequent of the group's, else 0.

    Of several that are as frequent, the answer that was given first counts (inferred). If no response has an answer,
    all are wrong.
    """

    def __call__(self, texts: list[str], entry: dict[str, Any]) -> list[Any]:
        if len(texts) < 2:
            return [ALONE] * len(texts)
        answers = _answers(texts)
        votes = Counter(answer for answer in answers if answer is not None)
        label = max(votes, key=votes.__getitem__, default=None)
        return [NO_ANSWER if answer is None else float(answer == label) for answer in answers]


class AnswerShare:
    """Semantic entropy (EMPO): the share of the group's responses that have a response's answer.

    Equal answers are one meaning (a classifier of meanings is not used). A group whose entropy over answers, in nats,
    is outside of ``low`` to ``high`` is skipped; responses without an answer have the reward 0 and are one meaning in
    the entropy (inferred).

    Args:
        low, high: bounds of the entropy (defaults inferred: none).

    Raises:
        ValueError: ``low`` is above ``high``.
    """

    def __init__(self, low: float = 0.0, high: float = math.inf) -> None:
        if low > high:
            raise ValueError("its option 'low' must not be above 'high'")
        self._low, self._high = low, high

    def __call__(self, texts: list[str], entry: dict[str, Any]) -> list[Any]:
        if len(texts) < 2:
            return [ALONE] * len(texts)
        answers = _answers(texts)
        shares = {answer: count / len(texts) for answer, count in Counter(answers).items()}
        entropy = -sum(share * math.log(share) for share in shares.values())
        if not self._low <= entropy <= self._high:
            return [{"reward": None, "skipped": "entropy"}] * len(texts)
        return [NO_ANSWER if answer is None else shares[answer] for answer in answers]


class Pairwise:
    """Pairwise wins (Pref-GRPO): the mean over the other responses of ``compare(response, other, entry)``; each pair is
    compared once, and the other order has the complement.

    Args:
        compare: see `Compare`, or its name as ``file.py:function``.

    Raises:
        ValueError: it is neither.
    """

    def __init__(self, compare: Compare | str) -> None:
        if not callable(compare):
            raise ValueError("its option 'compare' must be file.py:function")
        self._compare = compare

    def __call__(self, texts: list[str], entry: dict[str, Any]) -> list[Any]:
        if len(texts) < 2:
            return [ALONE] * len(texts)
        wins = [0.0] * len(texts)
        for i in range(len(texts)):
            for j in range(i + 1, len(texts)):
                share = self._share(texts[i], texts[j], entry)
                wins[i] += share
                wins[j] += 1 - share
        return [won / (len(texts) - 1) for won in wins]

    def _share(self, a: str, b: str, entry: dict[str, Any]) -> float:
        share = float(self._compare(a, b, entry))
        if not 0 <= share <= 1:
            raise ValueError(f"compare must return a number from 0 to 1, and it returned {share:g}")
        return share


class AgainstOne(Pairwise):
    """Bootstrapped reference (BRPO): one response of the group, drawn by its texts, is the reference; the others have 1
    where they are better than it, else -1, and the reference is skipped.

    Args:
        compare: as for `Pairwise`; more than 0.5 is better.
    """

    def __call__(self, texts: list[str], entry: dict[str, Any]) -> list[Any]:
        if len(texts) < 2:
            return [ALONE] * len(texts)
        drawn = int.from_bytes(
            hashlib.blake2b("\0".join(texts).encode(errors="surrogatepass"), digest_size=8).digest()
        ) % len(texts)
        return [
            {"reward": None, "skipped": "reference"}
            if i == drawn
            else 1.0
            if self._share(text, texts[drawn], entry) > 0.5
            else -1.0
            for i, text in enumerate(texts)
        ]


JUDGES: dict[str, type] = {
    "majority": Majority,
    "answer_share": AnswerShare,
    "pairwise": Pairwise,
    "against_one": AgainstOne,
}
