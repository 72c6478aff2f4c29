r"""Mathematical answers in usual writing, brought into a formula that math-verify reads.

An answer is read in steps, each of which leaves the next less to guess:

- Writing: `latex` brings Unicode, thin spaces, thousands (``1,234``, ``1\,234``), mixed numbers (``3 1/2``), powers of
  ten (``4.5e33``), repeating decimals and currency signs into LaTeX that math-verify reads.
- Words: `split` parts words from formulas. A formula with words after it is a value with its unit (``72 clips``); words
  alone are a text; several formulas among words are ambiguous.

The formula goes to math-verify as a whole (`mathematics.py`): it never picks a number out of what it cannot read.

Imports nothing of rolltree, as `verifiers.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from .answers import tidy

FUNCTIONS = (
    "arcsin|arccos|arctan|arcsec|arccsc|arccot|sinh|cosh|tanh|coth|sin|cos|tan|sec|csc|cot|log|ln|exp|lim|max|min|gcd|lcm|"
    "det|dim|ker|arg|mod|Re|Im|tr|rank"
)
GREEK = (
    "alpha|beta|gamma|delta|epsilon|theta|lambda|mu|nu|xi|pi|rho|sigma|tau|phi|chi|psi|omega|"
    "Gamma|Delta|Theta|Lambda|Pi|Sigma|Phi|Psi|Omega"
)
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
"""The names of each unit that is known, its sign first."""
UNIT_OF = {name: names.partition(" ")[0] for names in UNITS for name in names.split()}
SHORT_WORDS = re.compile(
    "is|the|she|he|it|its|so|we|to|of|at|per|was|are|for|all|her|his|has|had|as|if|us|me|my|who|how|why|see|did|can|may|"
    "sum|ago|each|but|off|out|by|on|an|not|no|yes|one|two|six|ten|odd|sq|cu|pm|am|rs|hz|kw|kj|kn|pa|nm|mv|ma|uc|mol|ev|pc|"
    "cup|car|egg|hen|cat|dog|pig|cow|box|bag|pen|men|boy|kid|way|pie|pad"
)
"""Words of two or three letters that are no product of variables."""
TELLING = re.compile(
    r"(?<!\w)(?:north|south|east|west|left|right|up|down|am|pm|ad|bc|bce|more|less|fewer|greater|smaller|above|below|"
    r"before|after|increase|decrease|profit|loss|gain|positive|negative)(?!\w)"
)
"""Words that change the answer they stand with."""
HEDGES = re.compile(
    r"(?<![\w\\])(?:not|either|neither|nor|maybe|perhaps|possibly|unless|otherwise|\w+n['’]t)(?!\w)", re.I
)
BOUNDS = re.compile(
    r"(?<!\w)(?:at (?:least|most)|(?:more|less|fewer|greater|larger|smaller) than|up to|"
    r"or (?:more|less|fewer|greater))(?!\w)",
    re.IGNORECASE,
)
"""With these a number is not the answer, but a bound of it."""
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
        (rf"(?<![\\a-zA-Z])({FUNCTIONS}|{GREEK})(?![a-zA-Z])", r"\\\1 "),
        (r"(?<![\\a-zA-Z])(pi)(?=[a-z]?(?![a-zA-Z]))", r"\\pi "),
        (r"\\(?:varnothing|O)(?![a-zA-Z])", r"\\emptyset "),
        (r"\\(?:leqslant|leq)(?![a-zA-Z])", r"\\le "),
        (r"\\(?:geqslant|geq)(?![a-zA-Z])", r"\\ge "),
        (r"_\s*\{?\s*\\(?:text|mathrm|rm|mbox)\s*\{[^{}]*\}\s*\}?|_\s*\{\s*\\?(?:max|min)\s*\}", ""),
        (r"\\log_\s*(?:\{\s*e\s*\}|e)", r"\\ln "),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"\*\*", "^"),
        (r"(?<![*])\*(?![*])", r"\\cdot "),
    ]
]
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|dot|bar)\s*\{(\d+)\}")
_RATIO = re.compile(r"-?[\w.\\{}]+(?:\s*:\s*-?[\w.\\{}]+){2,}")
_IN_SET = re.compile(
    r"^\s*(?:\\\(|\()?\s*[a-zA-Z](?:\s*,\s*[a-zA-Z])*\s*\)?\s*(?:\\in(?![a-zA-Z])|=(?=\s*\\?[(\[{]))\s*"
)
_BUILDER = re.compile(r"^\s*\\\{\s*[a-z]\s*(?:\\in[^|]*?)?(?:\\mid|\\vert|[|:])\s*([^{}|]*)\\\}\s*$")
_TOKEN = re.compile(
    r"(?P<kept>\\(?:begin|end)\{[^}]*\}(?:\{[^}]*\})?|\\(?:operatorname|mathbb|mathcal|mathfrak)\*?\s*\{[^}]*\})"
    r"|\\(?:text|textbf|textit|textrm|textsf|textnormal|mathrm|mathbf|mathit|mathsf|rm|mbox|hbox|bf)\s*"
    r"\{(?P<text>(?:[^{}]|\{[^{}]*\})*)\}"
    r"|(?P<command>\\[a-zA-Z]+|\\.)|(?P<word>[^\W\d_]+(?:['’][^\W\d_]+|-[^\W\d_]{3,})*)|(?P<other>.)",
    re.DOTALL,
)


class AmbiguousError(ValueError):
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
            unit = inside in tuple("mslghLNJWVAKCF") and _has_value(runs[-1])
            if not re.search(r"[^\W\d_]", inside) or (len(inside) == 1 and not unit):
                runs[-1] += inside
                continue
            if re.fullmatch(FUNCTIONS, inside):
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
        run = re.sub(
            r"^\s*(?:and|or|,|;)(?![a-zA-Z])\s*|\s*(?<![a-zA-Z])(?:and|or|,|;|:|\?|\()\s*$|\s+/\s*$|\.\s*$", "", run
        )
        if run.count(")") == run.count("(") + 1 and run.endswith(")") and "[" not in run:
            run = run[:-1]
    return run.strip()


def read(text: str, *, reference: bool = False) -> Answer | None:
    """Return the answer that a candidate or a reference gives; None if there is none to be read.

    Args:
        reference: words before its formula are part of it, so that ``May 5`` is a text.

    Raises:
        AmbiguousError: it gives several.
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
            raise AmbiguousError
        found = read(inner[0], reference=reference)
        if found is not None and not (reference and re.search(r"^\W*[^\W\d_]{2,}", text)):
            return found
    text = re.sub(r"(?<!\\)\$|\\[()]", "", text) if inner else text
    written = latex(text)
    runs, words, leading = split(written)
    folded = {word.casefold() for word in words}
    units = frozenset(UNIT_OF[word] for word in words if word in UNIT_OF)
    telling = frozenset(TELLING.findall(" ".join(words).casefold()))
    if not words and len(runs) == 1:
        return Answer(text, number=number(runs[0]), formula=runs[0], telling=telling)
    if not runs or (reference and leading):
        return Answer(text, words=plain_words(text)) if plain_words(text) else None
    if HEDGES.search(text) or BOUNDS.search(text) or folded & {"but", "wait", "versus"}:
        raise AmbiguousError
    equal = {run.rpartition("=")[2].strip() for run in runs}
    if len(equal) > 1:
        raise AmbiguousError
    formula = runs[-1]
    return Answer(text, number=number(formula), formula=formula, units=units, telling=telling)
