"""Reference answers: the text that a column's value stands for, and where the common layouts of data keep it.

Imports nothing of rolltree, as `verifiers.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any


def reference_text(answer: Any) -> str:
    """Return the text that a reference answer stands for.

    A text is itself, trimmed. A whole number is written without a point (72.0 is ``72``), another one with as few
    digits as give it back. A list, tuple or array of one is its item. A dict with ``ground_truth`` (verl's
    ``reward_model``) is what that holds. ``True`` and ``False`` are these words.

    Raises:
        ValueError: it is missing (None, NaN, an empty text or list), or a value without one text (several items, other
            dicts, bytes, dates, ...).
    """
    if hasattr(answer, "tolist") and not isinstance(answer, type):  # numpy's arrays and numbers
        answer = answer.tolist()
    if answer is None:
        raise ValueError("the reference answer is None")
    if isinstance(answer, str):
        if not answer.strip():
            raise ValueError("the reference answer is empty")
        return answer.strip()
    if isinstance(answer, bool | int):
        return str(answer)
    if isinstance(answer, float | Decimal):
        if not math.isfinite(answer):
            raise ValueError(f"the reference answer is {answer}, no number")
        exact = Fraction(answer)
        if exact.denominator == 1:
            return str(exact.numerator)
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


def find_answer(row: Mapping[str, Any], key: str) -> tuple[str, Any] | None:
    """Return the column that holds a row's reference answer, and its value; None if there is none.

    ``key`` may go into dicts (``reward_model.ground_truth``). Rows without the column ``answer``, the default, may keep
    it where verl has it (``reward_model.ground_truth``) or as TRL's ``solution``. A dict with ``ground_truth`` is what
    that holds.
    """
    for name in (key, "reward_model.ground_truth", "solution") if key == "answer" else (key,):
        value: Any = row
        for part in (name,) if name in row else name.split("."):
            if not isinstance(value, Mapping) or part not in value:
                break
            value = value[part]
        else:
            if isinstance(value, Mapping) and "ground_truth" in value:
                name, value = f"{name}.ground_truth", value["ground_truth"]
            return name, value
    return None
