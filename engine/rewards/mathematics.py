r"""Mathematical answers: read from usual writing, and compared by math-verify.

An answer is read in steps, each of which leaves the next less to guess:

- Writing: `latex` brings Unicode, thin spaces, thousands (``1,234``, ``1\,234``), mixed numbers (``3 1/2``), powers of ten
  (``4.5e33``), repeating decimals and currency signs into LaTeX that math-verify reads.
- Words: `split` parts words from formulas. A formula with words after it is a value with its unit (``72 clips``); words
  alone are a text; several formulas among words are ambiguous.
- The formula goes to math-verify as a whole, in ``\boxed{}``, so that it never picks a number out of what it cannot read.

Imports nothing of rolltree, as `verifiers.py`.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from .answers import candidates, last_line, tidy

FUNCTIONS = (
    "arcsin arccos arctan arcsec arccsc arccot sinh cosh tanh coth sin cos tan sec csc cot log ln exp lim max min gcd lcm "
    "det dim ker arg mod Re Im tr rank"
).split()
GREEK = (
    "alpha beta gamma delta epsilon theta lambda mu nu xi pi rho sigma tau phi chi psi omega Gamma Delta Theta Lambda Pi "
    "Sigma Phi Psi Omega"
).split()
CONNECTORS = {"and", "or", "und", "oder", "et", "ou"}
UNITS = {
    canonical: names.split()
    for canonical, names in {
        "mm": "mm millimeter millimeters millimetre millimetres", "cm": "cm centimeter centimeters centimetre centimetres",
        "dm": "dm decimeter decimeters", "km": "km kilometer kilometers kilometre kilometres kms",
        "m": "m meter meters metre metres", "in": "in inch inches", "ft": "ft foot feet", "yd": "yd yard yards",
        "mi": "mi mile miles", "mg": "mg milligram milligrams", "g": "g gram grams gm",
        "kg": "kg kilogram kilograms kgs", "lb": "lb lbs pound pounds", "oz": "oz ounce ounces",
        "ml": "ml mL milliliter milliliters millilitre", "l": "l L liter liters litre litres",
        "s": "s sec secs second seconds", "min": "min mins minute minutes", "h": "h hr hrs hour hours",
        "day": "day days", "week": "week weeks", "month": "month months", "year": "yr yrs year years",
        "mph": "mph", "kph": "kph kmh", "deg": "deg degree degrees", "rad": "rad radian radians",
        "dollar": "dollar dollars USD", "cent": "cent cents", "euro": "euro euros EUR",
    }.items()
}  # fmt: skip
UNIT_OF = {name: canonical for canonical, names in UNITS.items() for name in names}
SHORT_WORDS = set(
    "is the she he it its so we to of at per was are for all her his has had men sq cu hz kw pm am rs no yes a an by on "
    "one two six ten odd not but off out per cup car day egg hen cat dog pig cow box bag pen men boy kid way pie pad "
    "as if us me my who how why see box sum ago each did can may "
    "mol ev pc kj kn pa nm mv ma uc".split()
)
"""Words of two or three letters that are no product of variables."""
TELLING = set(
    "north south east west left right up down am pm ad bc bce more less fewer greater smaller above below before after "
    "increase decrease profit loss gain positive negative".split()
)
"""Words that change the answer they stand with."""
HEDGES = re.compile(r"(?<![\w\\])(?:not|either|neither|nor|maybe|perhaps|possibly|unless|otherwise|\w+n['’]t)(?!\w)", re.I)
BOUNDS = re.compile(
    r"(?<!\w)(?:at (?:least|most)|(?:more|less|fewer|greater|larger|smaller) than|up to|or (?:more|less|fewer|greater))(?!\w)",
    re.IGNORECASE,
)
"""With these a number is not the answer, but a bound of it."""
CHOICE = re.compile(r"(?:(?:option|choice)\s+)?\(?([A-J])\)?[.):]?", re.IGNORECASE)
CHOICE_AND_TEXT = re.compile(r"(?:(?:option|choice)\s+)?(?:\(([A-J])\)|([A-J])[.):])\s+(?P<text>.+)", re.DOTALL)

_NUMBER = re.compile(r"([-+]?)(\d{1,3}(?:,\d{3})+|\d+)?(\.\d*)?")
_UNICODE = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "∞": r"\infty ", "π": r"\pi ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "∈": r"\in ",
    "±": r"\pm ", "°": r"^\circ ", "º": r"^\circ ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda ",
    "⁰": "^0", "¹": "^1", "²": "^2", "³": "^3", "⁴": "^4", "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}",
    "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "ℝ": r"\mathbb{R}", "∣": "|", "，": ",", "；": ";",
    "（": "(", "）": ")", "：": ":", "％": "%", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "、": ",",
}  # fmt: skip
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"√\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"√\s*(\w+)", r"\\sqrt{\1}"),
        (r"\\(?:displaystyle|limits|quad|qquad|bigl?|bigr?|Bigl?|Bigr?)(?![a-zA-Z])", " "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\left(?=[(\[|.\\])|\\right(?=[)\]|.\\])", ""),
        (r"\\(?:phantom|hspace|vspace)\{[^{}]*\}", " "),
        (r"(?<=\d)(?:\{,\}|\\,|\\!|\\ |~|\\;|\\:|,\\!|,\\,)+(?=\d{3}(?!\d))", ""),
        (r"(?<![\d.])(\d{1,3}) (?=\d{3}(?: \d{3})*(?![\d/.]))", r"\1"),
        (r"\{,\}", ","),
        (r"(?<!\\)\\[,!;:> ]|~", " "),
        (r"\\(?:\$|euro|pounds)|[$€£¥]|(?<![A-Za-z])(?:Rs\.?|USD)\s*(?=\d)", ""),
        (r"(?<=[\d.])[eE]([-+]?\d+)(?![\d.])", r"\\times 10^{\1}"),
        (r"(?<![\d.}])(\d+)\s+(\d+)\s*/\s*(\d+)", r"\1\\frac{\2}{\3}"),
        (r"(?<![\d.}])(\d+)\s+\\frac", r"\1\\frac"),
        (r"(?:\^\s*\{?\s*\\circ\s*\}?|\\degree)\s*[CF]?\s*$", r" \\text{degrees}"),
        (r"\^\s*\{?\s*\\circ\s*\}?\s*(?:[CF](?![a-zA-Z]))?|\\degree(?![a-zA-Z])", ""),
        (r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![\\a-zA-Z])sqrt\s*(\d+)", r"\\sqrt{\1}"),
        (r"(?<![\\a-zA-Z])(?:infinity|inf|oo)(?![a-zA-Z])", r"\\infty "),
        (rf"(?<![\\a-zA-Z])({'|'.join([*FUNCTIONS, *GREEK])})(?![a-zA-Z])", r"\\\1 "),
        (r"(?<![\\a-zA-Z])(pi)(?=[a-z]?(?![a-zA-Z]))", r"\\pi "),
        (r"\\(?:varnothing|O)(?![a-zA-Z])", r"\\emptyset "),
        (r"\\(?:leqslant|leq)(?![a-zA-Z])", r"\\le "),
        (r"\\(?:geqslant|geq)(?![a-zA-Z])", r"\\ge "),
        (r"_\s*\{?\s*\\(?:text|mathrm|rm|mbox)\s*\{[^{}]*\}\s*\}?|_\s*\{\s*\\?(?:max|min)\s*\}", ""),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"\*\*", "^"),
        (r"(?<![*])\*(?![*])", r"\\cdot "),
    ]
]
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|dot|bar)\s*\{(\d+)\}")
_RATIO = re.compile(r"-?[\w.\\{}]+(?:\s*:\s*-?[\w.\\{}]+){2,}")
_IN_SET = re.compile(r"^\s*(?:\\\(|\()?\s*[a-zA-Z](?:\s*,\s*[a-zA-Z])*\s*\)?\s*(?:\\in(?![a-zA-Z])|=(?=\s*\\?[(\[{]))\s*")
_BUILDER = re.compile(r"^\s*\\\{\s*[a-z]\s*(?:\\in[^|]*?)?(?:\\mid|\\vert|[|:])\s*([^{}|]*)\\\}\s*$")
_BASE = re.compile(r"(?<=[\dA-F])_\s*(?:\{\s*(\d+)\s*\}|(\d+))")
_DOTS = re.compile(r"\\(?:ldots|cdots|dots|dotsc|vdots)(?![a-zA-Z])|\.\.\.|…")
_TOKEN = re.compile(
    r"(?P<kept>\\(?:begin|end)\{[^}]*\}(?:\{[^}]*\})?|\\(?:operatorname|mathbb|mathcal|mathfrak)\*?\s*\{[^}]*\})"
    r"|\\(?:text|textbf|textit|textrm|textsf|textnormal|mathrm|mathbf|mathit|mathsf|rm|mbox|hbox|bf)\s*"
    r"\{(?P<text>(?:[^{}]|\{[^{}]*\})*)\}"
    r"|(?P<command>\\[a-zA-Z]+|\\.)|(?P<word>[^\W\d_](?:[^\W\d_]|['’-](?=[^\W\d_]))*)|(?P<other>.)",
    re.DOTALL,
)


class Ambiguous(Exception):
    """An answer of several values, of which none is said to be the one."""


@dataclass(frozen=True)
class Answer:
    """An answer that was read.

    Attributes:
        text: as it was written, tidied.
        words: in small letters, if it is a text; then there is no value.
        number: if it is a plain decimal number.
        formula: LaTeX for math-verify.
        units, telling: known units and words that change the answer, found with the formula.
    """

    text: str
    words: str | None = None
    number: Fraction | None = None
    formula: str = ""
    units: frozenset[str] = frozenset()
    telling: frozenset[str] = frozenset()


def number(text: str) -> Fraction | None:
    """Return the value of a plain decimal number; thousands may be parted by commas."""
    match = _NUMBER.fullmatch(text.replace("−", "-"))
    if match is None or not (match[2] or (match[3] or "").strip(".")):
        return None
    return Fraction(f"{match[1]}{(match[2] or '0').replace(',', '')}{(match[3] or '').rstrip('.')}")


def _decimal(text: str) -> str:
    return re.sub(r"[^-\d.]", "", text.replace("−", "-"))


def latex(text: str) -> str:
    """Return a formula in usual writing as LaTeX that math-verify reads."""
    for sign, written in _UNICODE.items():
        text = text.replace(sign, written)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = re.sub(r"\\(?:text\w*|mathrm|mbox)\s*\{([^{}]*\d[^{}]*)\}", r" \1 ", text)
    text = _REPEATING.sub(_repeating, text)
    text = _IN_SET.sub("", _BUILDER.sub(r"\1", text))
    if _RATIO.fullmatch(text.strip()):
        text = f"({text.strip().replace(':', ',')})"
    return re.sub(r"(?<=\d)\.(?=[\s,/]|$)", "", text).strip()


def _repeating(match: re.Match[str]) -> str:
    whole, fixed, again = match[1] or "0", match[2], match[3]
    nines = 10 ** len(fixed) * (10 ** len(again) - 1)
    value = Fraction(int(whole + fixed + again) - int(whole + fixed), nines)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def plain_words(text: str) -> str:
    """Return ``text`` as words to compare: small letters, without markup, punctuation and articles."""
    text = re.sub(r"\\(?:text\w*|math\w+|mbox|hbox|rm|bf)\b|\\[,!;: ]|[{}$~*_`]|\\", " ", text)
    text = re.sub(r"[^\w\s+/%°<>=^-]", " ", text).casefold()
    return " ".join(word for word in text.split() if word not in ("the", "a", "an"))


def split(text: str) -> tuple[list[str], list[str], bool]:
    """Return the formulas of a text, its words, and whether a word stands before the first formula."""
    runs, words, leading = [""], list[str](), False
    for match in _TOKEN.finditer(text):
        found = match[0]
        word = match["text"] if match["text"] is not None else match["word"]
        if word is not None and match["text"] is not None:
            inside = word.strip()
            if inside.casefold() in CONNECTORS:
                runs[-1] += ","
                continue
            if not re.search(r"[^\W\d_]", inside) or len(inside) == 1:
                runs[-1] += inside
                continue
            if inside in FUNCTIONS:
                runs[-1] += f"\\{inside} "
                continue
        elif word is not None and not _is_word(word, text, match.start(), match.end()):
            runs[-1] += f" {word} " if word.casefold() in CONNECTORS else found
            continue
        if word is None:
            runs[-1] += found
            continue
        leading = leading or not any(map(_has_value, runs))
        words += re.findall(r"[^\W\d_]+", word)
        runs.append("\0")
    trimmed = [_trim(run) for run in runs]
    return [run for run in trimmed if _has_value(run)], words, leading


def _is_word(run: str, text: str, begin: int, end: int) -> bool:
    """Decide between a word and a product of variables."""
    if run.casefold() in CONNECTORS or len(run) == 1:
        return False
    if len(run) > 3 or "'" in run or "-" in run or not run.isascii() or run.casefold() in SHORT_WORDS or run in UNIT_OF:
        return True
    before, after = text[:begin], text[end:].lstrip()
    if run.istitle() and len(run) == 3 or not before.strip() and text[end:] != after and after[:1].isalnum():
        return True
    if not before.strip() or after[:1] in "^+-=*<>_/" and after:
        return False
    return bool(before[-1:].isspace() and re.search(r"[\w})%.]\s*$", before))


def _has_value(run: str) -> bool:
    return bool(re.search(r"\d|\\(?:infty|pi|emptyset|mathbb|sqrt|frac|begin)|[=<>]", run)) or bool(
        re.fullmatch(r"[\s()\[\]{}|+\-*/^_,a-zA-Z]*|.*\\[a-zA-Z]+.*", run) and re.search(r"[a-zA-Z]", run)
    )


def _trim(run: str) -> str:
    """Return a formula without what belonged to the words around it."""
    if run.startswith("\0"):
        power = r"(?:\^\s*(?:\{[-\d\s]*\}|-?\d))?"
        run = re.sub(rf"^\0\s*{power}(?:\s*(?:/|\\cdot|per)\s*[a-zA-Z]{{1,3}}{power}(?![a-zA-Z]))*", "", run)
        run = re.sub(r"^(?:[)\].,;:?!/*\s]|\\cdot(?![a-zA-Z]))*", "", run)
        run = re.sub(r"^(?:is|equals)?\s*[=:]\s*", "", run)
        run = re.sub(r"^[aAI]\s+(?=\S)|^[aAI]$", "", run)
    previous = None
    while previous != run:
        previous = run
        run = re.sub(r"^\s*(?:and|or|,|;)(?![a-zA-Z])\s*|\s*(?<![a-zA-Z])(?:and|or|,|;|:|\?|\()\s*$|\s+/\s*$|\.\s*$", "", run)
        if run.count(")") == run.count("(") + 1 and run.endswith(")") and "[" not in run:
            run = run[:-1]
    return run.strip()


def read(text: str, *, reference: bool = False) -> Answer | None:
    """Return the answer that a candidate or a reference gives; None if there is none to be read.

    Args:
        reference: words before its formula are part of it, so that ``May 5`` is a text.

    Raises:
        Ambiguous: it gives several.
    """
    text = tidy(re.sub(r"(?<!\w)([ap])\.\s?m(?:\.|(?!\w))", r"\1m", text, flags=re.I))
    if not text or not re.search(r"\w|\\|∞|[∅√½⅓⅔¼¾]", text):
        return None
    if (value := number(re.sub(r"^([-+−]?)(?:\\?\$|[€£¥])\s*", r"\1", text))) is not None:
        return Answer(text, number=value, formula=f"{value.numerator}" if value.denominator == 1 else _decimal(text))
    inner = [m for group in re.findall(r"(?<!\\)\$([^$]+)(?<!\\)\$|\\\((.+?)\\\)", text) for m in group if m]
    outside = re.sub(r"(?<!\\)\$[^$]+(?<!\\)\$|\\\(.+?\\\)", " ", text)
    if len(set(inner)) == 1 and not re.search(r"\d", outside) and re.search(r"[^\W\d_]{2,}", outside):
        if HEDGES.search(outside):
            raise Ambiguous
        found = read(inner[0], reference=reference)
        if found is not None and not (reference and re.search(r"^\W*[^\W\d_]{2,}", text)):
            return found
    text = re.sub(r"(?<!\\)\$|\\[()]", "", text) if inner else text
    written = latex(text)
    runs, words, leading = split(written)
    folded = {word.casefold() for word in words}
    units = frozenset(UNIT_OF[word] for word in words if word in UNIT_OF)
    telling = frozenset(folded & TELLING)
    if not words and len(runs) == 1:
        return Answer(text, number=number(runs[0]), formula=runs[0], telling=telling)
    if not runs or reference and leading:
        return Answer(text, words=plain_words(text)) if plain_words(text) else None
    if HEDGES.search(text) or BOUNDS.search(text) or folded & {"but", "wait", "versus"}:
        raise Ambiguous
    equal = {run.rpartition("=")[2].strip() for run in runs}
    if len(equal) > 1:
        raise Ambiguous
    formula = runs[-1]
    return Answer(text, number=number(formula), formula=formula, units=units, telling=telling)


# -- references and responses -----------------------------------------------------------------------------------------


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
    if choice := CHOICE.fullmatch(bare):
        if bare.isupper() or len(bare) > 1:
            return Reference(Answer(bare, words=plain_words(bare)), choice[1].upper(), [], frozenset())
    if match := CHOICE_AND_TEXT.fullmatch(bare):
        choice = (match[1] or match[2]).upper()
        return Reference(Answer(bare, words=plain_words(match["text"])), choice, [], frozenset())
    if _DOTS.search(said):
        return Reference(Answer(said, words=plain_words(said)), None, [], frozenset())
    try:
        found = read(said, reference=True)
    except Ambiguous:
        found = Answer(said, words=plain_words(said))
    if found is None:
        raise ValueError(f"the reference answer {_shown(text)} says nothing")
    if found.words is not None:
        return Reference(found, None, [], frozenset())
    parsed = parse(found.formula)
    if not parsed:
        raise ValueError(f"math-verify cannot read the reference answer {_shown(text)}")
    return Reference(found, None, parsed, _bases(found.formula))


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def _without_text(text: str) -> str:
    return re.sub(r"\\(?:text\w*|mathrm|mathbf|mbox|rm)\s*\{([^{}]*)\}", r"\1", text)


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
        except Ambiguous:
            return None
        if verdict is not None:
            return float(verdict)
    line = last_line(text)
    if re.search(r"\\f?boxed", line):
        return None  # a box that was not read, or is not closed
    if not marked and reference.answer.words is not None:
        whole = plain_words(text) == reference.answer.words
        return 1.0 if whole else None
    try:
        found = read(line)
    except Ambiguous:
        return None
    if found is None or found.words is not None or not re.search(r"\d|\\", found.formula):
        return None
    verdict = _compare(line, reference)
    return None if verdict is None else float(verdict)


def _compare(candidate: str, reference: Reference) -> bool | None:
    """Decide about one candidate; None if it cannot be read.

    Raises:
        Ambiguous: it gives several answers.
    """
    bare = tidy(_without_text(tidy(candidate)))
    if reference.choice is not None:
        if len(reference.answer.words or "") > 1 and plain_words(bare) == reference.answer.words:
            return True  # the text of the choice
        return _chooses(bare, reference.choice)
    gold = reference.answer
    if gold.words is not None:
        said = plain_words(candidate)
        if not said:
            return None
        return said == gold.words or said.endswith((f" is {gold.words}", f" are {gold.words}", f" = {gold.words}"))
    if CHOICE_AND_TEXT.fullmatch(bare):
        bare = candidate = CHOICE_AND_TEXT.fullmatch(bare)["text"]  # type: ignore[index]
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
    free = any(getattr(value, "free_symbols", None) for value in reference.parsed)
    if match and reference.answer.units and UNIT_OF.get(match[2]) not in reference.answer.units:
        return False
    return bool(match) and not free and any(_equal(one, other) for one in reference.parsed for other in parse(match[1]))  # type: ignore[index]


def _chooses(said: str, choice: str) -> bool | None:
    """Decide if an answer names a choice; None if it names none.

    Raises:
        Ambiguous: it names several.
    """
    if match := CHOICE.fullmatch(said):
        return match[1].upper() == choice
    if match := CHOICE_AND_TEXT.fullmatch(said):
        if re.search(r"\([A-J]\)|(?<!\w)[B-J][.):](?:\s|$)|(?<!\w)(?:or|and)\s+\(?[A-J](?!\w)", match["text"]):
            raise Ambiguous
        return (match[1] or match[2]).upper() == choice
    letters = set(re.findall(r"(?<!\w)[A-J](?!\w)", said))
    if re.search(r"(?<!\w)(?!and\b|or\b)[a-z]{2,}", said):  # a sentence, with the article and the pronoun
        letters = letters - {"A", "I"} | set(re.findall(r"\(([AI])\)", said))
    if len(letters) > 1:
        raise Ambiguous
    return None if not letters or HEDGES.search(said) else letters == {choice}


def _equal(gold: Any, said: Any) -> bool:
    """Decide if two values of math-verify are equal; the reference goes first: the order matters to it."""
    import math_verify
    from sympy import Basic, Eq, FiniteSet, Set, Symbol

    if isinstance(gold, Set) and isinstance(said, Set) and isinstance(gold, FiniteSet) != isinstance(said, FiniteSet):
        gold, said = _united(gold), _united(said)
    if isinstance(said, Eq) and not isinstance(gold, Eq) and said.lhs.free_symbols:
        if not isinstance(said.lhs, Symbol) and not said.lhs.is_Function:
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
