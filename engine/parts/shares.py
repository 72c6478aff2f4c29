"""Reads what a response predicts of others, for the program that asks for it and the shaping that rewards it."""

from __future__ import annotations

import re

NUMBER = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(%?)")


def share_in(text: str) -> float | None:
    """Return the first number of ``text``, a percentage as a fraction; None without one in [0, 1]."""
    number = NUMBER.search(text)
    share = None if number is None else float(number[1]) / (100 if number[2] else 1)
    return None if share is None or share > 1 else share


def length_in(text: str) -> float | None:
    """Return the second number of ``text``, a number of tokens; None without one above 0."""
    numbers = NUMBER.findall(text)
    length = float(numbers[1][0]) if len(numbers) > 1 and not numbers[1][1] else 0.0
    return length or None
