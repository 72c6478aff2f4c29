"""Reference answers: the text that a value stands for.

Imports nothing of rolltree, like `verifiers.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any


def reference_text(answer: Any) -> str:
    """Return a reference answer as a text.

    A text is trimmed. A whole number is written without a decimal point (72.0 is ``72``), other numbers with the fewest
    digits that represent them. A list, tuple or array of one item stands for that item, a dict with ``ground_truth``
    (verl's ``reward_model``) for that value. ``True`` and ``False`` are these words.

    Raises:
        ValueError: the answer is missing (None, NaN, an empty text or list), or has no single text (several items,
            other dicts, bytes, dates, ...).
    """
    if hasattr(answer, "tolist") and not isinstance(answer, type):  # arrays and numbers of numpy
        answer = answer.tolist()
    if answer is None:
        raise ValueError("the reference answer is None")
    if isinstance(answer, str):
        if not answer.strip():
            raise ValueError("the reference answer is empty")
        return answer.strip()
    if isinstance(answer, bool):
        return str(answer)
    if isinstance(answer, int):
        return digits(answer)
    if isinstance(answer, float | Decimal):
        if not math.isfinite(answer):
            raise ValueError(f"the reference answer is {answer}, not a number")
        exact = Fraction(answer)
        if exact.denominator == 1:
            return digits(exact.numerator)
        return format(Decimal(repr(answer)) if isinstance(answer, float) else answer.normalize(), "f")
    if isinstance(answer, Fraction):
        return str(answer)
    if isinstance(answer, list | tuple):
        if len(answer) == 1:
            return reference_text(answer[0])
        raise ValueError(f"the reference answer is a list of {len(answer)} items, where one answer is needed")
    if isinstance(answer, Mapping):
        if "ground_truth" in answer:
            return reference_text(answer["ground_truth"])
        names = ", ".join(sorted(map(str, answer))) or "nothing"
        raise ValueError(f"the reference answer is a dict of {names}, without 'ground_truth'")
    raise ValueError(f"the reference answer is of type {type(answer).__name__}, which is no text and no number")


def digits(number: int) -> str:
    """Return an integer as a text, of any length: `str` refuses more than 4,300 digits by default."""
    return format(Decimal(number), "f")
