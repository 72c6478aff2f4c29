"""Reads numbers that are written as English words.

Imports nothing of rolltree, like `verifiers.py`.
"""

from __future__ import annotations

import re
from fractions import Fraction

SMALL = {
    "zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16,
    "seventeen": 17, "eighteen": 18, "nineteen": 19,
}  # fmt: skip
TENS = {
    "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90,
}  # fmt: skip
SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
PARTS = {
    "half": 2, "halves": 2, "third": 3, "thirds": 3, "quarter": 4, "quarters": 4, "fourth": 4, "fourths": 4, "fifth": 5,
    "fifths": 5, "sixth": 6, "sixths": 6, "seventh": 7, "sevenths": 7, "eighth": 8, "eighths": 8, "ninth": 9,
    "ninths": 9, "tenth": 10, "tenths": 10,
}  # fmt: skip
_WORD = "|".join(sorted({*SMALL, *TENS, *SCALES, *PARTS, "hundred"}, key=len, reverse=True))
_BETWEEN = r"(?:\s*-\s*|\s+)(?:and\s+)?(?:a\s+)?"
_PHRASE = re.compile(rf"(?:a\s+)?(?:{_WORD})(?:{_BETWEEN}(?:{_WORD}))*(?![\w-])", re.IGNORECASE)
_OTHER = re.compile(rf"(?<!\w)(?:{_WORD})(?!\w)", re.IGNORECASE)


def in_digits(text: str, *, whole: bool = False) -> str:
    """Return ``text`` with the number in words that it begins with in digits; another text is returned unchanged.

    A text with digits or several numbers is unchanged, and so are ``one`` and ``half`` before other words.

    Args:
        whole: change only a text that is nothing but the number.
    """
    match = _PHRASE.match(text)
    if match is None or re.search(r"\d", text):
        return text
    words = re.split(r"[\s-]+", match[0].casefold())
    value, rest = _value(words), text[match.end() :]
    if value is None or (rest.strip() and (whole or words in (["one"], ["half"], ["a", "half"]))):
        return text
    if _OTHER.search(rest):
        return text
    written = str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    return written + rest


def _value(words: list[str]) -> Fraction | None:
    """Return the value of the words of a number; None if they are not one number."""
    if words[-1] in PARTS:
        *before, part = words
        cut = len(before) - before[::-1].index("and") if "and" in before else 0
        whole = _whole(before[: cut - 1]) if cut else 0
        count = 1 if before[cut:] == ["a"] or words == ["half"] else _whole(before[cut:])
        return None if whole is None or count is None else whole + Fraction(count, PARTS[part])
    integer = _whole(words)
    return None if integer is None else Fraction(integer)


def _whole(words: list[str]) -> int | None:
    """Return the value of the words of a whole number; None if they are not one number."""
    total, current, last, bound = 0, 0, "", 10**15
    for word in words:
        if word == "and":
            if last not in ("hundred", *SCALES):
                return None
        elif word in SMALL:
            if last in SMALL or (last in TENS and not 0 < SMALL[word] < 10):
                return None
            current += SMALL[word]
        elif word in TENS:
            if last in SMALL or last in TENS:
                return None
            current += TENS[word]
        elif word == "hundred":
            if not 0 < current < 100 or last == "and":
                return None
            current *= 100
        elif word in SCALES and current and SCALES[word] < bound and last != "and":
            total, current, bound = total + current * SCALES[word], 0, SCALES[word]
        else:
            return None
        last = word
    return None if not words or last == "and" else total + current
