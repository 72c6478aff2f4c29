r"""Rewrites mathematical answers in common notation as formulas that math-verify reads.

An answer is read in two steps, so that nothing is guessed:

- Notation: `notation.py` brings usual notation into LaTeX that math-verify reads, `numerals.py` English words for
  numbers into digits.
- Words: `split` separates words from formulas. A formula with words after it is a value with its unit (``72 clips``);
  words alone are a text; several formulas among words are ambiguous.

The formula goes to math-verify as a whole (`mathematics.py`): it never extracts a number from a text it cannot read.

Imports nothing of rolltree, like `verifiers.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from ..answers import tidy
from .notation import FUNCTIONS, latex
from .numerals import in_digits

CONNECTORS = {"and", "or", "und", "oder", "et", "ou"}
UNITS = (
    "mm millimeter millimeters millimetre millimetres", "cm centimeter centimeters centimetre centimetres",
    "dm decimeter decimeters", "m meter meters metre metres", "km kms kilometer kilometers kilometre kilometres",
    "in inch inches", "ft foot feet", "yd yard yards", "mi mile miles", "mg milligram milligrams", "g gm gram grams",
    "kg kgs kilogram kilograms", "lb lbs pound pounds", "oz ounce ounces", "ml mL milliliter milliliters",
    "l L liter liters litre litres", "s sec secs second seconds", "min mins minute minutes", "h hr hrs hour hours",
    "day days", "week weeks", "month months", "yr yrs year years", "mph", "kph kmh", "deg degree degrees",
    "rad radian radians", "dollar dollars USD", "cent cents", "euro euros EUR",
)  # fmt: skip
"""Names of each known unit, its symbol first."""
UNIT_OF = {name: names.partition(" ")[0] for names in UNITS for name in names.split()}
SHORT_WORDS = re.compile(
    "is|the|she|he|it|its|so|we|to|of|at|per|was|are|for|all|her|his|has|had|as|if|us|me|my|who|how|why|see|did|can|may|"
    "sum|ago|each|but|off|out|by|on|an|not|no|yes|one|two|six|ten|odd|sq|cu|pm|am|rs|hz|kw|kj|kn|pa|nm|mv|ma|uc|mol|ev|pc|"
    "cup|car|egg|hen|cat|dog|pig|cow|box|bag|pen|men|boy|kid|way|pie|pad"
)
"""Words of two or three letters that are not products of variables."""
TELLING = re.compile(
    r"(?<!\w)(?:north|south|east|west|left|right|up|down|am|pm|ad|bc|bce|more|less|fewer|greater|smaller|above|below|"
    r"before|after|increase|decrease|profit|loss|gain|positive|negative)(?!\w)"
)
"""Words that change the meaning of an answer next to them."""
HEDGES = re.compile(
    r"(?<![\w\\])(?:not|either|neither|nor|maybe|perhaps|possibly|unless|otherwise|\w+n['’]t)(?!\w)", re.I
)
BOUNDS = re.compile(
    r"(?<!\w)(?:at (?:least|most)|(?:more|less|fewer|greater|larger|smaller) than|up to|"
    r"or (?:more|less|fewer|greater))(?!\w)",
    re.IGNORECASE,
)
"""Words that make a number a bound of the answer and not the answer itself."""
_NUMBER = re.compile(r"([-+]?)(\d{1,3}(?:,\d{3})+|\d+)?(\.\d*)?")
_TOKEN = re.compile(
    r"(?P<kept>\\(?:begin|end)\{[^}]*\}(?:\{[^}]*\})?|\\(?:operatorname|mathbb|mathcal|mathfrak)\*?\s*\{[^}]*\})"
    r"|\\(?:text|textbf|textit|textrm|textsf|textnormal|mathrm|mathbf|mathit|mathsf|rm|mbox|hbox|bf)\s*"
    r"\{(?P<text>(?:[^{}]|\{[^{}]*\})*)\}"
    r"|(?P<command>\\[a-zA-Z]+|\\.)|(?P<word>[^\W\d_]+(?:['’][^\W\d_]+|-[^\W\d_]{3,})*)|(?P<other>.)",
    re.DOTALL,
)

_NOUN = re.compile(r"(?<=[\d.])\s*\(([^\W\d_]{2,}(?:[\s-]+[^\W\d_]{2,})+|[^\W\d_]{4,})\)$")
_ONLY_TEXT = re.compile(r"^\\(?:text|mathrm|textbf|textit|mbox)\s*\{([^{}\d]*)\}$")


class AmbiguousError(ValueError):
    """The text holds several values and does not single one out as the answer."""


@dataclass(frozen=True)
class Answer:
    """An answer that was read.

    Attributes:
        text: as written, tidied.
        words: the answer in lower case if it is a text without a value, else None.
        number: the value if it is a plain decimal number, else None.
        formula: LaTeX for math-verify; empty for a text.
        percent: the formula was followed by a percent sign.
        units, telling: known units, and words that change the meaning (`TELLING`), found with the formula.
    """

    text: str
    words: str | None = None
    number: Fraction | None = None
    formula: str = ""
    percent: bool = False
    units: frozenset[str] = frozenset()
    telling: frozenset[str] = frozenset()


_LAST_OF_LIST = re.compile(r",\s*\\(?:text\w*|mathrm|mbox)\s*\{\s*and\s*\}\s*")
"""The word before the last value of a list: ``19, 46, \\text{ and } 82``."""


def number(text: str) -> Fraction | None:
    """Return the value of a plain decimal number, with or without commas between thousands; None for other texts."""
    match = _NUMBER.fullmatch(text.replace("−", "-"))
    if match is None or not (match[2] or (match[3] or "").strip(".")):
        return None
    return Fraction(f"{match[1]}{(match[2] or '0').replace(',', '')}{(match[3] or '').rstrip('.')}")


def _decimal(text: str) -> str:
    return re.sub(r"[^-\d.]", "", text.replace("−", "-"))


def plain_words(text: str) -> str:
    """Return ``text`` as words to compare: lower case, without markup, punctuation and articles."""
    text = re.sub(r"\\(?:text\w*|math\w+|mbox|hbox|rm|bf)\b|\\[,!;: ]|[{}$~*_`]|\\", " ", text)
    text = re.sub(r"[^\w\s+/%°<>=^-]", " ", text).casefold()
    return " ".join(re.sub(r"(?<!\w)(?:the|an?)\s+(?=\w{2,})", "", " ".join(text.split())).split())


def split(text: str) -> tuple[list[str], list[str], bool]:
    """Return the formulas of a text, its words, and True if a word precedes the first formula."""
    runs, words, leading = [""], list[str](), False
    for match in _TOKEN.finditer(text):
        token = match[0]
        word = match["text"] if match["text"] is not None else match["word"]
        if word is not None and match["text"] is not None:
            inside = word.strip()
            if inside.casefold() in CONNECTORS:
                runs[-1] += ","
                continue
            unit = inside in tuple("mslghLNJWVAKCF") and _has_value(runs[-1])
            if not re.search(r"[^\W\d_]", inside) or (len(inside) == 1 and not unit):
                runs[-1] += inside
                continue
            if re.fullmatch(FUNCTIONS, inside):
                runs[-1] += f"\\{inside} "
                continue
        elif word is not None and not _is_word(word, text, match.start(), match.end()):
            runs[-1] += f" {word} " if word.casefold() in CONNECTORS else token
            continue
        if word is None:
            runs[-1] += token
            continue
        leading = leading or not any(map(_has_value, runs))
        words += re.findall(r"[^\W\d_]+", word)
        runs.append("\0")
    trimmed = [_trim(run) for run in runs]
    return [run for run in trimmed if _has_value(run)], words, leading


def _is_word(run: str, text: str, begin: int, end: int) -> bool:
    """Return True if letters are a word, False if they are a product of variables."""
    if run in ("a", "A") and (noun := re.match(r"\s+([^\W\d_]{2,})", text[end:])) and noun[1] not in UNIT_OF:
        return True
    if run.casefold() in CONNECTORS or (len(run) == 1 and not "\u3040" <= run <= "\ud7a3"):
        return False
    if (
        len(run) > 3
        or "'" in run
        or "-" in run
        or not run.isascii()
        or SHORT_WORDS.fullmatch(run.casefold())
        or run in UNIT_OF
    ):
        return True
    before, after = text[:begin], text[end:].lstrip()
    if (run.istitle() and len(run) == 3) or (not before.strip() and text[end:] != after and after[:1].isalnum()):
        return True
    if not before.strip() or (after[:1] in "^+-=*<>_/" and after):
        return False
    return bool(before[-1:].isspace() and re.search(r"[\w})%.]\s*$", before))


def _has_value(run: str) -> bool:
    return bool(re.search(r"\d|\\(?:infty|pi|emptyset|mathbb|sqrt|frac|begin)|[=<>]", run)) or bool(
        re.fullmatch(r"[\s()\[\]{}|+\-*/^_,a-zA-Z]*|.*\\[a-zA-Z]+.*", run) and re.search(r"[a-zA-Z]", run)
    )


def _trim(run: str) -> str:
    """Return a formula without punctuation and connectors of the words around it."""
    if run.startswith("\0"):
        power = r"(?:\^\s*(?:\{[-\d\s]*\}|-?\d))?"
        run = re.sub(rf"^\0\s*{power}(?:\s*(?:/|\\cdot|per)\s*[a-zA-Z]{{1,3}}{power}(?![a-zA-Z]))*", "", run)
        run = re.sub(r"^(?:[)\].,;:?!/*\s]|\\cdot(?![a-zA-Z]))*", "", run)
        run = re.sub(r"^(?:is|equals)?\s*[=:]\s*", "", run)
        run = re.sub(r"^[aAI]\s+(?=\S)|^[aAI]$", "", run)
    previous = None
    while previous != run:
        previous = run
        run = re.sub(
            r"^\s*(?:and|or|[,;=:])(?![a-zA-Z])\s*|\s*(?<![a-zA-Z])(?:and|or|,|;|:|\?|\()\s*$|\s+/\s*$|\.\s*$", "", run
        )
        if run.count(")") == run.count("(") + 1 and run.endswith(")") and "[" not in run:
            run = run[:-1]
    return run.strip()


def read(text: str, *, reference: bool = False) -> Answer | None:
    """Return the answer that a candidate or a reference holds; None if it holds none.

    Args:
        reference: True for a reference, in which words before a formula make it a text (``May 5``).

    Raises:
        AmbiguousError: the text holds several answers.
    """
    text = tidy(re.sub(r"(?<!\w)([ap])\.\s?m(?:\.|(?!\w))", r"\1m", text, flags=re.I))
    text = _LAST_OF_LIST.sub(", ", text)
    text = _NOUN.sub(r" \\text{\1}", text)
    spelled = _ONLY_TEXT.sub(r"\1", text)
    if (counted := in_digits(spelled, whole=reference)) != spelled:
        text = counted
    if not text or not re.search(r"\w|\\|∞|[∅√½⅓⅔¼¾]", text):
        return None
    if (value := number(re.sub(r"^([-+−]?)(?:\\?\$|[€£¥])\s*", r"\1", text))) is not None:
        return Answer(text, number=value, formula=f"{value.numerator}" if value.denominator == 1 else _decimal(text))
    inner = [m for group in re.findall(r"(?<!\\)\$([^$]+)(?<!\\)\$|\\\((.+?)\\\)", text) for m in group if m]
    outside = re.sub(r"(?<!\\)\$[^$]+(?<!\\)\$|\\\(.+?\\\)", " ", text)
    if len(set(inner)) == 1 and not re.search(r"\d", outside) and re.search(r"[^\W\d_]{2,}", outside):
        if HEDGES.search(outside):
            raise AmbiguousError
        inner_answer = read(inner[0], reference=reference)
        if inner_answer is not None and not (reference and re.search(r"^\W*[^\W\d_]{2,}", text)):
            return inner_answer
    text = re.sub(r"(?<!\\)\$|\\[()]", "", text) if inner else text
    written = latex(text)
    runs, words, leading = split(written)
    folded = {word.casefold() for word in words}
    units = frozenset(UNIT_OF[word] for word in words if word in UNIT_OF)
    telling = frozenset(TELLING.findall(" ".join(words).casefold()))
    if not words and len(runs) == 1:
        return _answer(text, runs[0], frozenset(), telling)
    if not runs or (reference and leading):
        return Answer(text, words=plain_words(text)) if plain_words(text) else None
    if HEDGES.search(text) or BOUNDS.search(text) or folded & {"but", "wait", "versus"}:
        raise AmbiguousError
    equal = {run.rpartition("=")[2].strip() for run in runs}
    if len(equal) > 1:
        raise AmbiguousError
    return _answer(text, runs[-1], units, telling)


def _answer(text: str, formula: str, units: frozenset[str], telling: frozenset[str]) -> Answer:
    percent = formula.count("%") == 1 and formula.endswith("%")
    formula = re.sub(r"\s*\\?%$", "", formula) if percent else formula
    return Answer(text, None, number(formula), formula, percent, units, telling)
