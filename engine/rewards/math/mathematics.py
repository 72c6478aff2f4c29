r"""Compares mathematical answers by math-verify.

A reference is read as a whole, once per process; in a response the first candidate (`answers.py`) that can be read
decides. Both go to math-verify in ``\boxed{}``, after `reading.py`, without its search for numbers in text.

Imports nothing of rolltree, like `verifiers.py`.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import product
from typing import Any

from ..answers import candidates, last_line, tidy, without_reasoning
from .notation import both_signs, with_decimal_points
from .reading import HEDGES, UNIT_OF, AmbiguousError, Answer, plain_words, read

CHOICE = re.compile(r"(?:(?:option|choice)\s+)?\(?([A-J])\)?[.):]?", re.IGNORECASE)
CHOICES = re.compile(r"\(?[A-J]\)?(?:\s*(?:,|;|/|&|\band\b|,\s*and\b)\s*\(?[A-J]\)?)+|(?!.*(.).*\1)[A-J]{2,}")
"""The letters of a question with several right choices."""
CHOICE_AND_TEXT = re.compile(r"(?:(?:option|choice)\s+)?(?:\(([A-J])\)|([A-J])[.):])\s+(?P<text>.+)", re.DOTALL)
YES_OR_NO = {"yes", "no", "true", "false"}
_BASE = re.compile(r"(?<=[\dA-F])_\s*(?:\{\s*(\d+)\s*\}|(\d+))")
LONGEST, MOST_DIGITS = 4_000, 200_000
"""Characters of an answer that are no digits, and characters of an answer; a longer one is read only if the reference
is as long."""
_DOTS = re.compile(r"\\(?:ldots|cdots|dots|dotsc|vdots)(?![a-zA-Z])|\.\.\.|…")


@dataclass(frozen=True)
class Reference:
    """A reference answer that was read.

    Attributes:
        choice: the letters of a multiple-choice answer, usually one.
        parsed: math-verify's values; empty for a text or a choice.
        bases: the number bases written in the formula.
    """

    answer: Answer
    choice: frozenset[str] | None
    parsed: Any
    bases: frozenset[str]

    @property
    def is_single(self) -> bool:
        """True if the reference is one number or expression, False for lists, sets, intervals, tuples and matrices."""
        from sympy import Eq, Expr, MatrixBase

        return self.answer.words is None and not any(
            isinstance(value, MatrixBase) or not isinstance(value, Expr | Eq) for value in self.parsed
        )


@lru_cache(maxsize=1 << 16)
def read_reference(text: str) -> Reference:
    """Read a reference answer; each text is read once per process.

    Raises:
        ValueError: the reference cannot be read.
    """
    marked = next(candidates(text), None)
    said = text if marked is None else marked
    bare = tidy(_without_text(tidy(said)))
    if (match := CHOICE.fullmatch(bare)) and (bare.isupper() or len(bare) > 1):
        return Reference(Answer(bare, words=plain_words(bare)), frozenset(match[1].upper()), [], frozenset())
    if CHOICES.fullmatch(bare) and sorted(letters := re.findall("[A-J](?![a-z])", bare)) == letters:
        return Reference(Answer(bare, words=plain_words(bare)), frozenset(letters), [], frozenset())
    if match := CHOICE_AND_TEXT.fullmatch(bare):
        choice = frozenset((match[1] or match[2]).upper())
        return Reference(Answer(bare, words=plain_words(match["text"])), choice, [], frozenset())
    if _DOTS.search(said):
        return Reference(Answer(said, words=plain_words(said)), None, [], frozenset())
    try:
        answer = read(said, reference=True)
    except AmbiguousError:
        answer = Answer(said, words=plain_words(said))
    if answer is None:
        raise ValueError(f"the reference answer {_shown(text)} has no content")
    if answer.words is not None:
        return Reference(answer, None, [], frozenset())
    parsed = _values(answer.formula)
    if not parsed and re.search("[\u3040-\ud7a3]", said):
        return Reference(Answer(said, words=plain_words(said)), None, [], frozenset())  # a sentence with formulas
    if not parsed:
        raise ValueError(f"math-verify cannot read the reference answer {_shown(text)}")
    return Reference(answer, None, parsed, _bases(answer.formula))


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

    # `split` handles units: math-verify's rule for them would remove the t of 3t.
    rules = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
    return [LatexExtractionConfig(False, boxed_match_priority=0, normalization_config=rules)]


def parse(formula: str) -> list[Any]:
    """Return math-verify's values of a whole formula; empty if it cannot read the formula."""
    import math_verify

    formula = both_signs(formula)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = math_verify.parse(f"\\boxed{{{formula}}}", _extraction(), "no_fallback", parsing_timeout=None)
    return [_plain(value) for value in values if not isinstance(value, str)]


def _plain(value: Any) -> Any:
    """Return a value whose symbols are all alike: the i of 4i is real to math-verify's parser, that of √3i is not."""
    from sympy import Symbol

    unreal = [one for one in getattr(value, "free_symbols", ()) if one.is_real is False]
    return value.xreplace({one: Symbol(one.name, real=True) for one in unreal}) if unreal else value


def _values(formula: str) -> list[Any]:
    r"""Return the values of a formula, those of both sides of an approximation: ``\sqrt{2} \approx 1.414``.

    Raises:
        AmbiguousError: the two sides are different numbers.
    """
    *exact, rounded = re.split(r"\s*\\(?:approx|simeq)(?![a-zA-Z])\s*", formula)
    all_values = parse(rounded) if rounded else []
    for side in exact:
        if re.fullmatch(r"(?:[a-zA-Z]\w*)?", side):
            continue
        values = parse(side)
        for one, other in product(values, all_values):
            if abs(_complex(one) - _complex(other)) > 0.05 * abs(_complex(one)):
                raise AmbiguousError
        all_values = values + all_values
    return all_values


def _complex(value: Any) -> complex:
    """Return the number that a value of math-verify is; NaN if it is none."""
    try:
        return complex(value)
    except (TypeError, ValueError, OverflowError):
        return complex("nan")


def judge(text: str, reference: Reference) -> float | None:
    """Return 1.0 if a response's answer equals the reference, 0.0 if it differs, None if no answer can be read.

    The first candidate that can be read decides. Without a mark the last line decides, if it has exactly one value.
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
    text = without_reasoning(text)
    line = tidy(last_line(text))
    if re.search(r"\\(?:f?boxed|fbox|framebox)", line):
        return None  # a box that could not be read, or is not closed
    if reference.answer.words is not None and reference.choice is None:
        return 1.0 if not marked and plain_words(text) == reference.answer.words else None
    if _too_long(line, reference):
        return None
    try:
        answer = read(line) if reference.choice is None else None
        if answer is not None and (answer.words is not None or not re.search(r"\d|\\", answer.formula)):
            return None
        verdict = _compare(line, reference)
    except AmbiguousError:
        return None
    return None if verdict is None else float(verdict)


def _compare(candidate: str, reference: Reference) -> bool | None:
    """Return True if one candidate equals the reference; None if it cannot be read.

    Raises:
        AmbiguousError: the candidate holds several answers.
    """
    if _too_long(candidate, reference):
        return None
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
        if gold.words in YES_OR_NO and (first := said.split()[0]) in YES_OR_NO and not HEDGES.search(candidate):
            return first == gold.words and len(YES_OR_NO & set(said.split())) == 1
        return said == gold.words or said.endswith((f" is {gold.words}", f" are {gold.words}", f" = {gold.words}"))
    if match := CHOICE_AND_TEXT.fullmatch(bare):
        candidate = match["text"]
    if _DOTS.search(candidate):
        return False
    verdict = _compare_values(candidate, reference)
    if not verdict and reference.is_single and (pointed := with_decimal_points(candidate)) != candidate:
        return _compare_values(pointed, reference)
    return verdict


def _too_long(answer: str, reference: Reference) -> bool:
    """Return True if reading an answer would take long, as the work grows with the square of its length."""
    reference_length = 2 * len(reference.answer.text)
    if len(answer) > max(MOST_DIGITS, reference_length):
        return True
    return len(answer) > LONGEST and len(re.sub(r"\d+", "", answer)) > max(LONGEST, reference_length)


def _compare_values(candidate: str, reference: Reference) -> bool | None:
    from sympy import Expr

    answer, gold = read(candidate), reference.answer
    if answer is None or answer.words is not None:
        return None
    if _contradict(answer, gold):
        return False
    scales: list[int | Fraction] = [1]
    if answer.percent != gold.percent:
        scales.append(100 if gold.percent else Fraction(1, 100))  # 12 and 0.12 are both 12 %
    if answer.number is not None and gold.number is not None:
        return any(answer.number * scale == gold.number for scale in scales)
    bases = _bases(answer.formula)
    if bases and reference.bases and bases != reference.bases:
        return False
    if not (parsed := _values(answer.formula)):
        return None
    if len(scales) == 2:
        parsed = [*parsed, *(value * scales[1] for value in parsed if isinstance(value, Expr))]
    return any(_equal(one, other) for one, other in product(reference.parsed, parsed)) or _with_unit(answer, reference)


def _contradict(answer: Answer, gold: Answer) -> bool:
    """Return True if the words around two values show that they are values of different things."""
    if gold.units and answer.units and not gold.units & answer.units:
        return True
    return bool(gold.telling and answer.telling and gold.telling != answer.telling)


def _with_unit(answer: Answer, reference: Reference) -> bool:
    """Return True if a number with a unit of one letter (``5 m``) equals the reference's number."""
    match = re.fullmatch(r"(.*[\d})])\s*([mslghLNJWVAKC])(?:\s*/\s*[msh])?(?:\^\{?\d\}?)?", answer.formula)
    if match is None or any(getattr(value, "free_symbols", None) for value in reference.parsed):
        return False
    if reference.answer.units and UNIT_OF.get(match[2]) not in reference.answer.units:
        return False
    return any(_equal(one, other) for one in reference.parsed for other in parse(match[1]))


def _chooses(said: str, choice: frozenset[str]) -> bool | None:
    """Return True if an answer names the choices; None if it names no choice.

    Raises:
        AmbiguousError: the answer names several choices where one is asked.
    """
    if match := CHOICE.fullmatch(said):
        return {match[1].upper()} == choice
    if len(choice) > 1 and CHOICES.fullmatch(said):
        return set(re.findall("[A-J]", said)) == choice
    if match := CHOICE_AND_TEXT.fullmatch(said):
        if re.search(r"\([A-J]\)|(?<!\w)[B-J][.):](?:\s|$)|(?<!\w)(?:or|and)\s+\(?[A-J](?!\w)", match["text"]):
            raise AmbiguousError
        return {(match[1] or match[2]).upper()} == choice
    letters = set(re.findall(r"(?<!\w)[A-J](?!\w)", said))
    if re.search(r"(?<!\w)(?!and\b|or\b)[a-z]{2,}", said):  # a sentence, in which A and I can be words
        letters = letters - {"A", "I"} | set(re.findall(r"\(([AI])\)", said))
    if len(letters) > 1:
        raise AmbiguousError
    return None if not letters or HEDGES.search(said) else letters == choice


def _equal(gold: Any, said: Any) -> bool:
    """Return True if two values of math-verify are equal. Its comparison is not symmetric: the reference is first."""
    import math_verify
    from sympy import Basic, Eq, Symbol

    if isinstance(gold, Eq) and gold.lhs.is_number:
        gold = gold.rhs  # 48 + 25 = 73
    equation = isinstance(said, Eq) and not isinstance(gold, Eq) and said.lhs.free_symbols
    if equation and not (isinstance(said.lhs, Symbol) or said.lhs.is_Function):
        return False  # math-verify would read 2x = 6 as 6
    if not math_verify.verify(gold, said, allow_set_relation_comp=True, timeout_seconds=None):
        return _same_region(gold, said)
    if isinstance(gold, Basic) and isinstance(said, Basic) and gold.is_number and said.is_number:
        return _same_number(gold, said)
    return True


def _same_number(gold: Any, said: Any) -> bool:
    """Return True if two numbers that agree in six decimals, all that math-verify compares, are equal.

    Numbers without decimals are compared exactly: rational ones by their value, others by 40 digits. Decimals may be
    rounded: by a thousandth of a number below 0.001, by a millionth of one above 1e15.
    """
    from sympy import Float

    exact = not gold.has(Float) and not said.has(Float)
    if exact and not _is_vast(gold) and not _is_vast(said):
        one, other = gold.doit(), said.doit()
        if one.is_Rational and other.is_Rational:
            return bool(one == other)
    try:
        gold_number, said_number = gold.evalf(40), said.evalf(40)  # with exponents of any size
        size, apart = abs(gold_number), abs(gold_number - said_number)
        if exact:
            return bool(apart <= size * Float("1e-35"))
        if size < 1e-3:
            return bool(apart <= size * Float("1e-3"))
        return size < 1e15 or bool(apart <= size * Float("1e-6"))
    except (TypeError, ValueError, OverflowError):
        return True


def _is_vast(value: Any) -> bool:
    """Return True if a number has powers or factorials of more digits than exact arithmetic has time for."""
    from sympy import Pow, factorial

    powers = [node.exp for node in value.atoms(Pow)]
    factorials = [node.args[0] for node in value.atoms(factorial)]
    return any(not n.is_number or abs(n) > 20_000 for n in powers) or any(n > 5_000 for n in factorials)


def _same_region(gold: Any, said: Any) -> bool:
    """Return True if two values, at least one of them inequalities in one variable, describe the same real numbers."""
    from sympy import Set

    gold_region, said_region = _region(gold), _region(said)
    if gold_region is None and said_region is None:
        return False
    if gold_region is not None and said_region is not None:
        return bool(gold_region == said_region) and gold.free_symbols == said.free_symbols
    other = said if said_region is None else gold
    return isinstance(other, Set) and bool((said_region if gold_region is None else gold_region) == other)


def _region(value: Any) -> Any:
    """Return the set of real numbers that inequalities in one variable describe; None for other values.

    Several are joined by "or", unless one of them leaves numbers out (``x >= 0, x != 1``).
    """
    from sympy import And, FiniteSet, Intersection, Ne, Or, Union
    from sympy.core.relational import Equality, Relational

    parts = list(value.args) if isinstance(value, FiniteSet) else [value]
    if not parts or len(getattr(value, "free_symbols", ())) != 1:
        return None
    if any(not isinstance(part, Relational | And | Or) or isinstance(part, Equality) for part in parts):
        return None
    try:
        regions = [part.as_set() for part in parts]
    except (NotImplementedError, TypeError, ValueError):
        return None
    return (Intersection if any(isinstance(part, Ne) for part in parts) else Union)(*regions)
