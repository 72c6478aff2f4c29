r"""Mathematical answers, compared by math-verify.

A reference is read as a whole, once in a process; of a response the first candidate (`answers.py`) that can be read
decides. Both go to math-verify in ``\boxed{}``, after `reading.py`, without its search for numbers in text.

Imports nothing of rolltree, as `verifiers.py`.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .answers import candidates, last_line, tidy
from .reading import HEDGES, UNIT_OF, AmbiguousError, Answer, plain_words, read

CHOICE = re.compile(r"(?:(?:option|choice)\s+)?\(?([A-J])\)?[.):]?", re.IGNORECASE)
CHOICE_AND_TEXT = re.compile(r"(?:(?:option|choice)\s+)?(?:\(([A-J])\)|([A-J])[.):])\s+(?P<text>.+)", re.DOTALL)
_BASE = re.compile(r"(?<=[\dA-F])_\s*(?:\{\s*(\d+)\s*\}|(\d+))")
_DOTS = re.compile(r"\\(?:ldots|cdots|dots|dotsc|vdots)(?![a-zA-Z])|\.\.\.|…")


@dataclass(frozen=True)
class Reference:
    """A reference answer that was read.

    Attributes:
        parsed: of math-verify; empty for a text.
    """

    answer: Answer
    choice: str | None
    parsed: Any
    bases: frozenset[str]


@lru_cache(maxsize=1 << 16)
def read_reference(text: str) -> Reference:
    """Return what a reference says; each text is read once in a process.

    Raises:
        ValueError: it cannot be read.
    """
    marked = next(candidates(text), None)
    said = text if marked is None else marked
    bare = tidy(_without_text(tidy(said)))
    if (match := CHOICE.fullmatch(bare)) and (bare.isupper() or len(bare) > 1):
        return Reference(Answer(bare, words=plain_words(bare)), match[1].upper(), [], frozenset())
    if match := CHOICE_AND_TEXT.fullmatch(bare):
        choice = (match[1] or match[2]).upper()
        return Reference(Answer(bare, words=plain_words(match["text"])), choice, [], frozenset())
    if _DOTS.search(said):
        return Reference(Answer(said, words=plain_words(said)), None, [], frozenset())
    try:
        found = read(said, reference=True)
    except AmbiguousError:
        found = Answer(said, words=plain_words(said))
    if found is None:
        raise ValueError(f"the reference answer {_shown(text)} says nothing")
    if found.words is not None:
        return Reference(found, None, [], frozenset())
    parsed = parse(found.formula)
    if not parsed and re.search("[\u3040-\ud7a3]", said):
        return Reference(Answer(said, words=plain_words(said)), None, [], frozenset())  # a sentence with formulas
    if not parsed:
        raise ValueError(f"math-verify cannot read the reference answer {_shown(text)}")
    return Reference(found, None, parsed, _bases(found.formula))


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def _without_text(text: str) -> str:
    text = re.sub(r"\\(?:text\w*|mathrm|mathbf|mbox|rm)\s*\{([^{}]*)\}", r"\1", text)
    return re.sub(r"\\(?:[ ,;:]|q?quad(?![a-zA-Z]))", " ", text)


def _bases(formula: str) -> frozenset[str]:
    return frozenset(m[1] or m[2] for m in _BASE.finditer(formula))


@lru_cache(maxsize=1)
def _extraction() -> list[Any]:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig

    # Units are left to `split`: math-verify's rule for them takes the t off 3t.
    rules = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
    return [LatexExtractionConfig(False, boxed_match_priority=0, normalization_config=rules)]


def parse(formula: str) -> list[Any]:
    """Return what math-verify makes of a whole formula; empty if it cannot read it."""
    import math_verify

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = math_verify.parse(f"\\boxed{{{formula}}}", _extraction(), "no_fallback", parsing_timeout=None)
    return [value for value in found if not isinstance(value, str)]


def judge(text: str, reference: Reference) -> float | None:
    """Return 1 if a response's answer is the reference's, 0 if it is another, None if none can be read.

    The first candidate that can be read decides. Without a mark the last line decides, if it gives one value.
    """
    marked = False
    for candidate in candidates(text):
        marked = True
        try:
            verdict = _compare(candidate, reference)
        except AmbiguousError:
            return None
        if verdict is not None:
            return float(verdict)
    line = tidy(last_line(text))
    if re.search(r"\\f?boxed", line):
        return None  # a box that was not read, or is not closed
    if reference.answer.words is not None and reference.choice is None:
        return 1.0 if not marked and plain_words(text) == reference.answer.words else None
    try:
        found = read(line) if reference.choice is None else None
        if found is not None and (found.words is not None or not re.search(r"\d|\\", found.formula)):
            return None
        verdict = _compare(line, reference)
    except AmbiguousError:
        return None
    return None if verdict is None else float(verdict)


def _compare(candidate: str, reference: Reference) -> bool | None:
    """Decide about one candidate; None if it cannot be read.

    Raises:
        AmbiguousError: it gives several answers.
    """
    bare = tidy(_without_text(tidy(candidate)))
    if reference.choice is not None:
        if not CHOICE.fullmatch(reference.answer.words or "A") and plain_words(bare) == reference.answer.words:
            return True  # the text of the choice
        return _chooses(bare, reference.choice)
    gold = reference.answer
    if gold.words is not None:
        said = plain_words(candidate)
        if not said:
            return None
        return said == gold.words or said.endswith((f" is {gold.words}", f" are {gold.words}", f" = {gold.words}"))
    if match := CHOICE_AND_TEXT.fullmatch(bare):
        candidate = match["text"]
    if _DOTS.search(candidate):
        return False
    found = read(candidate)
    if found is None or found.words is not None:
        return None
    if _contradict(found, gold):
        return False
    if found.number is not None and gold.number is not None:
        return found.number == gold.number
    bases = _bases(found.formula)
    if bases and reference.bases and bases != reference.bases:
        return False
    if not (parsed := parse(found.formula)):
        return None
    return any(_equal(one, other) for one in reference.parsed for other in parsed) or _with_unit(found, reference)


def _contradict(found: Answer, gold: Answer) -> bool:
    """Decide if the words around two values say that they are of different things."""
    if gold.units and found.units and not gold.units & found.units:
        return True
    return bool(gold.telling and found.telling and gold.telling != found.telling)


def _with_unit(found: Answer, reference: Reference) -> bool:
    """Decide if a number with a unit of one letter (``5 m``) is the reference's number."""
    match = re.fullmatch(r"(.*[\d})])\s*([mslghLNJWVAKC])(?:\s*/\s*[msh])?(?:\^\{?\d\}?)?", found.formula)
    if match is None or any(getattr(value, "free_symbols", None) for value in reference.parsed):
        return False
    if reference.answer.units and UNIT_OF.get(match[2]) not in reference.answer.units:
        return False
    return any(_equal(one, other) for one in reference.parsed for other in parse(match[1]))


def _chooses(said: str, choice: str) -> bool | None:
    """Decide if an answer names a choice; None if it names none.

    Raises:
        AmbiguousError: it names several.
    """
    if match := CHOICE.fullmatch(said):
        return match[1].upper() == choice
    if match := CHOICE_AND_TEXT.fullmatch(said):
        if re.search(r"\([A-J]\)|(?<!\w)[B-J][.):](?:\s|$)|(?<!\w)(?:or|and)\s+\(?[A-J](?!\w)", match["text"]):
            raise AmbiguousError
        return (match[1] or match[2]).upper() == choice
    letters = set(re.findall(r"(?<!\w)[A-J](?!\w)", said))
    if re.search(r"(?<!\w)(?!and\b|or\b)[a-z]{2,}", said):  # a sentence, with the article and the pronoun
        letters = letters - {"A", "I"} | set(re.findall(r"\(([AI])\)", said))
    if len(letters) > 1:
        raise AmbiguousError
    return None if not letters or HEDGES.search(said) else letters == {choice}


def _equal(gold: Any, said: Any) -> bool:
    """Decide if two values of math-verify are equal; the reference goes first: the order matters to it."""
    import math_verify
    from sympy import Basic, Eq, FiniteSet, Set, Symbol

    if isinstance(gold, Set) and isinstance(said, Set) and isinstance(gold, FiniteSet) != isinstance(said, FiniteSet):
        gold, said = _united(gold), _united(said)
    if isinstance(gold, Eq) and gold.lhs.is_number:
        gold = gold.rhs  # 48 + 25 = 73
    equation = isinstance(said, Eq) and not isinstance(gold, Eq) and said.lhs.free_symbols
    if equation and not (isinstance(said.lhs, Symbol) or said.lhs.is_Function):
        return False  # of 2x = 6 math-verify would take the 6
    if not math_verify.verify(gold, said, allow_set_relation_comp=True, timeout_seconds=None):
        return False
    if isinstance(gold, Basic) and isinstance(said, Basic) and gold.is_number and said.is_number:
        try:  # math-verify compares six decimals, which say nothing of numbers as small as these
            wanted, given = complex(gold), complex(said)
        except (TypeError, ValueError, OverflowError):
            return True
        if abs(wanted) < 1e-3 and wanted != given:
            return abs(wanted - given) <= 1e-3 * abs(wanted)
    return True


def _united(values: Any) -> Any:
    """Return the set of numbers that inequalities joined by "or" describe; what is none of these stays as it is."""
    from sympy import Union
    from sympy.core.relational import Relational

    parts = list(getattr(values, "args", ()))
    if not parts or not all(isinstance(part, Relational) and len(part.free_symbols) == 1 for part in parts):
        return values
    return Union(*(part.as_set() for part in parts))
