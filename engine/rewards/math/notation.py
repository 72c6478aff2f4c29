r"""Brings the notations of people, calculators and textbooks into LaTeX that math-verify reads.

Unicode, TeX's arguments without braces, thin spaces, thousands (``1,234``, ``1\,234``), decimal commas, mixed numbers
(``3 1/2``), powers of ten (``4.5e33``, ``2 million``), repeating decimals, intervals (``]0, 1[``) and currency signs.

Imports nothing of rolltree, like `verifiers.py`.
"""

from __future__ import annotations

import re
from fractions import Fraction

from ..answers import closing_brace

FUNCTIONS = (
    "arcsin|arccos|arctan|arcsec|arccsc|arccot|sinh|cosh|tanh|coth|sin|cos|tan|sec|csc|cot|log|ln|exp|lim|max|min|gcd|lcm|"
    "det|dim|ker|arg|mod|Re|Im|tr|rank"
)
GREEK = (
    "alpha|beta|gamma|delta|epsilon|theta|lambda|mu|nu|xi|pi|rho|sigma|tau|phi|chi|psi|omega|"
    "Gamma|Delta|Theta|Lambda|Pi|Sigma|Phi|Psi|Omega"
)
_UNICODE = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "∞": r"\infty ", "π": r"\pi ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "∈": r"\in ",
    "±": r"\pm ", "°": r"^\circ ", "º": r"^\circ ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda ",
    "⁰": "^0", "¹": "^1", "²": "^2", "³": "^3", "⁴": "^4", "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}",
    "⅔": r"\frac{2}{3}", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]", "≈": r"\approx ", "≃": r"\approx ", "∓": r"\mp ",
    "⟨": "(", "⟩": ")", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "ℝ": r"\mathbb{R}", "∣": "|", "，": ",", "；": ";",
    "（": "(", "）": ")", "：": ":", "％": "%", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "、": ",",
}  # fmt: skip
_UNIT = r"\\(?:text|mathrm)\{([^{}]*)\}"
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"√\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"√\s*(\w+)", r"\\sqrt{\1}"),
        (r"\\(?:displaystyle|limits|quad|qquad|bigl?|bigr?|Bigl?|Bigr?)(?![a-zA-Z])", " "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\left(?=[(\[\]|.\\])|\\right(?=[)\]\[|.\\])", ""),
        (r"\\langle(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])", ")"),
        (r"\\backslash(?![a-zA-Z])", r"\\setminus "),
        (r"(\\mathbb\{[A-Z]\})\s*[-\\](?=\s*\\\{)", r"\1\\setminus "),
        (r"\\\{\s*\\\}|(?<![\\a-zA-Z])(?:the\s+)?(?:empty|null)\s+set(?![a-zA-Z])", r"\\emptyset "),
        (r"(?<=[)\]}])\s*U\s*(?=\\?[(\[{])", r"\\cup "),
        (r"(?<![a-zA-Z])(?:[Mm]inus|[Nn]egative)\s+(?=[\d.√\\])", "-"),
        (r"(?:the\s+)?square\s+root\s+of\s+(\d+|[a-z](?![a-z]))", r"\\sqrt{\1}"),
        (r"(?<=[\d})])\s*(?:percent|per\s+cent|pct|Prozent)(?![a-zA-Z])", r"\\%"),
        (rf"\\frac\s*\{{\s*{_UNIT}\s*\}}\s*\{{\s*{_UNIT}(?:\^\{{?\d\}}?)?\s*\}}", r"\\text{\1/\2}"),
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
        (
            r"(\([^(),;]*\)\s*|(?<![\w^{}.\\])\d+)(?=\([^(),;]*\d[^(),;]*\))",
            r"\1\\cdot ",
        ),  # math-verify reads (1)(3) as 1 + 3
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"\*\*", "^"),
        (r"(?<![*])\*(?![*])", r"\\cdot "),
    ]
]
_DEGREES = re.compile(
    r"(?<![a-zA-Z])\\?(sin|cos|tan|sec|csc|cot)(\s*\^\s*\{?\d\}?)?\s*[({]?\s*(\d+(?:\.\d+)?)\s*"
    r"(?:\^\s*\{?\s*\\circ\s*\}?|\\degree)\s*[)}]?"
)
_SPANS = re.compile(r"([\[\](])([^\[\]()]*[,;][^\[\]()]*)([\[\])])")
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:[.\s\u202f'’]\d{3})+,\d+(?![\d,])")
_COMMA = re.compile(r"(?<![\d.,])(0(?=,\d+(?![\d,]))|\d+(?=,\d+(?![\d,]))(?!,\d{3}(?!\d))),")
_GROUP = re.compile(r"[(\[{][^()\[\]{}]*;[^()\[\]{}]*[)\]}]")
_SCALE = re.compile(
    r"(?<=\d)\s*(?:(?P<word>thousand|million|billion|trillion)s?(?![a-zA-Z])"
    r"|\\(?:text|mathrm)\s*\{\s*(?P<text>thousand|million|billion|trillion)s?(?![a-zA-Z])\s*(?P<unit>[^{}]*)\})"
)
_COMMANDS = {"frac": 2, "dfrac": 2, "tfrac": 2, "cfrac": 2, "binom": 2, "sqrt": 1}
"""Commands of TeX, and how many arguments each has."""
_COMMAND = re.compile(rf"\\({'|'.join(_COMMANDS)})(?![a-zA-Z])(\s*\[[^\]]*\])?")
_ARGUMENT = re.compile(r"\s*(?:(?P<group>\{)|(?P<token>\\[a-zA-Z]+|[^\s\\{}]))")
_SIGNS = re.compile(r"\\(p|m)(?:m|p)(?![a-zA-Z])")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|dot|bar)\s*\{(\d+)\}")
_RATIO = re.compile(r"-?[\w.\\{}]+(?:\s*:\s*-?[\w.\\{}]+){2,}")
_IN_SET = re.compile(
    r"^\s*(?:\\\(|\()?\s*[a-zA-Z](?:\s*,\s*[a-zA-Z])*\s*\)?\s*(?:\\in(?![a-zA-Z])|=(?=\s*\\?[(\[{]))\s*"
)
_POINT = re.compile(
    r"^\s*[A-Z]'?(?:_\{?\d+\}?)?\s*=?\s*(?=\([^()]*(?:\([^()]*\)[^()]*)*,[^()]*(?:\([^()]*\)[^()]*)*\)\s*$)"
)
_BUILDER = re.compile(r"^\s*\\\{\s*[a-z]\s*(?:\\in[^|]*?)?(?:\\mid|\\vert|[|:])\s*([^{}|]*)\\\}\s*$")


def latex(text: str) -> str:
    """Return a formula in common notation as LaTeX that math-verify reads."""
    for sign, written in _UNICODE.items():
        text = text.replace(sign, written)
    text = _brackets(_with_braces(text))
    text = _DEGREES.sub(lambda m: rf"\{m[1]}{m[2] or ''}(\frac{{{m[3]}\pi}}{{180}})", text)
    text = _SCALE.sub(_scaled, text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = re.sub(r"\\(?:text\w*|mathrm|mbox)\s*\{([^{}]*\d[^{}]*)\}", r" \1 ", text)
    text = _REPEATING.sub(_repeating, text)
    text = _IN_SET.sub("", _POINT.sub("", _BUILDER.sub(r"\1", text)))
    if _RATIO.fullmatch(text.strip()):
        text = f"({text.strip().replace(':', ',')})"
    return re.sub(r"(?<=\d)\.(?=[\s,/]|$)", "", text).strip()


def _with_braces(text: str) -> str:
    r"""Return ``text`` with the arguments of TeX's commands in braces: ``\frac ab`` is ``\frac{a}{b}``.

    A number after ``\sqrt`` is left as it is: people who write ``\sqrt13`` mean the root of 13.
    """
    for match in reversed(list(_COMMAND.finditer(text))):
        at, written = match.end(), []
        if match[1] == "sqrt" and not match[2] and re.match(r"\s*\d", text[at:]):
            continue
        for _ in range(_COMMANDS[match[1]]):
            if (argument := _ARGUMENT.match(text, at)) is None:
                break
            end = closing_brace(text, argument.end()) + 1 if argument["group"] else argument.end()
            if end == 0:
                break
            inner = argument["token"]
            while inner and inner.startswith("\\") and text[end : end + 1] == "{":  # its own arguments
                close = closing_brace(text, end + 1) + 1
                if close == 0:
                    break
                inner, end = inner + text[end:close], close
            written.append(text[argument.start() : end].strip() if argument["group"] else f"{{{inner}}}")
            at = end
        else:
            text = text[: match.end()] + "".join(written) + text[at:]
    return text


def _brackets(text: str) -> str:
    """Return ``text`` with French intervals (``]0, 1[``), and with commas for semicolons between items in brackets."""
    if re.match(r"\s*(?:\\left)?\]", text) or re.search(r"\[\s*$", text):
        text = re.sub(r"\\(?:left|right)(?![a-zA-Z])", "", text)
        text = _SPANS.sub(lambda m: f"{m[1].replace(']', '(')}{m[2]}{m[3].replace('[', ')')}", text)
    if ";" in text and not re.search(r"[(\[{]", text):
        text = with_decimal_points(text)
    return _GROUP.sub(lambda m: with_decimal_points(m[0]).replace(";", ","), text)


def _scaled(match: re.Match[str]) -> str:
    power = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}[match["word"] or match["text"]]
    return rf"\cdot 10^{{{power}}}" + (rf" \text{{{match['unit']}}}" if match["unit"] else "")


def with_decimal_points(text: str) -> str:
    """Return ``text`` with decimal commas (``0,5``, ``1.234,50``) as points.

    Commas between thousands stay, and so do those of lists in parentheses and of sets.
    """
    if re.search(r"[(\[]|\\\{", text) and ";" not in text:
        return text
    text = text.replace("{,}", ",")
    text = _GROUPED.sub(lambda m: re.sub(r"[^\d,]", "", m[0]).replace(",", "."), text)
    return _COMMA.sub(r"\1.", text)


def both_signs(formula: str) -> str:
    r"""Return the formulas that ``\pm`` and ``\mp`` stand for: that of the upper signs, and that of the lower ones."""
    if not _SIGNS.search(formula):
        return formula
    upper = _SIGNS.sub(lambda m: "+" if m[1] == "p" else "-", formula)
    lower = _SIGNS.sub(lambda m: "-" if m[1] == "p" else "+", formula)
    return re.sub(r"(^|[=(,\[{])\s*\+\s*", r"\1", f"{upper},{lower}")


def _repeating(match: re.Match[str]) -> str:
    whole, fixed, again = match[1] or "0", match[2], match[3]
    nines = 10 ** len(fixed) * (10 ** len(again) - 1)
    value = Fraction(int(whole + fixed + again) - int(whole + fixed), nines)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
