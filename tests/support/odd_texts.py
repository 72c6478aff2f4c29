"""Texts that no well-behaved model writes: long numbers, open brackets, characters of all kinds, 100 kB of LaTeX."""

from __future__ import annotations

import random
from collections.abc import Callable

LONG = 100_000
"""Characters of the longest texts."""
FRAGMENTS = [
    "<answer>", "</answer>", "<final_answer>", "\\boxed{", "\\boxed{2} and ", "\\fbox", "}", "{", "Answer:",
    "## Answer\n",
    "**Answer** ", "answer - ", "the answer is ", "The correct option is ", "answer and so ", "答案是", "####",
    "#### 7\n",
    "*", "**a** ", "`", "__", "_", "$", "$$", "\\[", "\\]", "\\(", "\\)", "\"", "“", "```\n", "```python\n", "~~~",
    "````md\n",
    "> ", "- ", "1. ", "    ", "\t", "\n", "\r\n", "\r", " ", ".", ",", ";", "...", "!?", "Dr. ", "|", "\\",
    "\\\\", "'", "-",
    "–", "<think>", "</think>", "[THINK]", "[/THINK]", "◁think▷", "◁/think▷", "<|channel|>",
    "<|channel|>final<|message|>",
    "\\frac", "\\frac{", "\\frac{1}{", "\\dfrac12", "\\sqrt", "\\sqrt[3]{", "\\sqrt ", "\\left(", "\\right)",
    "\\text{", "\\text{a} ",
    "\\mathrm{cm}", "\\begin{pmatrix}", "\\end{pmatrix}", "\\\\ & ", "\\pm ", "\\mp 1", "\\approx ", "\\simeq 1",
    "\\in ", "\\cup ",
    "\\infty", "\\pi ", "\\overline{3}", "0.\\overline{", "\\log_", "\\binom{", "\\int ", "\\sum_{",
    "\\lim_{x \\to ", "\\degree",
    "^\\circ ", "\\%", "%", "^", "^{", "_{", "!", "9!", "10^", "10^{", "1,", "1,234", "1 234 ", "1/", "3 1/2 ",
    "0.", ".5", "7", "e9",
    "2**", "+", "=", "<", ">", "<=", "(", ")", "[", "]", "(1,2)", "[1;2)", "]0,1[", "{1,", "(1)(2)", "x", "x^",
    "x=", "xy ", "A, ",
    "(B) ", "A and B", "yes ", "true", "one hundred ", "and ", "two-", "half ", "million ", "5 m ", "km/h ",
    "3 pm ", "not ", "at least ",
    "square root of ", "sin ", "sin 30°", "½", "√", "√(", "∪", "≤", "π", "∞", "²", "−", "，", "é", "e\u0301",
    "\u202e", "\u200b",
    "\ufeff", "\u2028", "\x00", "\x0b", "\x1b[31m", "\ud800", "\udfff", "\U0001f600", "\u0660", "٣", "Ⅷ", "①", "한",
    "ไ", "def f(x):\n",
    "import ", "print(", "lambda: ", "f'{", "'''", "0x", "1_", "1j", "async ",
    "from __future__ import annotations\n", "(yield)", ":=", "@",
    "null", "NaN", "1e999", "{\"a\": ", "\\u0000", "&#0;", "Verdict: correct", "Score: 1", "\\operatorname{",
    "\\mathbb{R}", "\\varnothing",
    "\\ldots", "\\times 10^{", "\\cdot ", "\\div ", "\\{", "\\}", "\\mid ", "\\vert", "\\to", "\\not",
    "\\hspace{1", "\\!", "\\,", "~", "a" * 50,
]  # fmt: skip
"""Pieces of marks, LaTeX, Markdown, Python and numbers; each is also repeated up to `LONG` characters."""
FRAMES = [
    "{}", "\\boxed{{{}}}", "Answer: {}", "The answer is {}.", "<answer>{}</answer>", "#### {}", "```python\n{}\n```",
    "<think>{}</think>\\boxed{{7}}", "Let us see: {}\n\nAnswer: 7", "```python\nprint({})\n```", "$${}$$",
]  # fmt: skip
"""The places of a text in a response."""


def odd_texts(number: int, seed: int = 0) -> list[str]:
    """Return ``number`` texts, the same for a seed; every one of `FRAGMENTS` and `SHAPES` is among the first 600."""
    draw = random.Random(seed)
    texts = [draw.choice(FRAMES[1:]).format(shape()) for shape in SHAPES]
    texts += [fragment * (LONG // len(fragment)) for fragment in FRAGMENTS]
    texts += [draw.choice(FRAMES[1:]).format(fragment * (LONG // len(fragment))) for fragment in FRAGMENTS]
    draw.shuffle(texts)
    while len(texts) < number:
        texts.append(draw.choice(FRAMES).format(draw.choice(KINDS)(draw)))
    return texts[:number]


def _mixed(draw: random.Random) -> str:
    return "".join(draw.choices(FRAGMENTS, k=draw.choice((1, 3, 8, 20, 200))))


def _repeated(draw: random.Random) -> str:
    unit = "".join(draw.choices(FRAGMENTS, k=draw.randint(1, 4)))
    return unit * (draw.choice((30, 1000, LONG)) // len(unit)) + draw.choice(["", "!", "b", "\n", "}"])


def _characters(draw: random.Random) -> str:
    return "".join(
        chr(draw.choice((draw.randrange(128), draw.randrange(0x110000)))) for _ in range(draw.randint(1, 400))
    )


NUMBERS = [
    "{}", "-{}", "0.{}", "{}.5", "{}/3", "\\frac{{1}}{{{}}}", "{}!", "1e{}", "2^{{{}}}", "x + {}", "{}%", "[0, {})",
    "\\sqrt{{{}}}", "{}_2", "0.\\overline{{{}}}", "{} cm", "1,{}", "int('{}')", "{} % 7",
]  # fmt: skip
"""The places of digits."""
BRACKETS = [
    ("(", ")"), ("[", "]"), ("{", "}"), ("\\frac{1}{", "}"), ("\\sqrt{", "}"), ("\\text{", "}"), ("x^{", "}"),
    ("\\boxed{", "}"), ("<answer>", "</answer>"), ("<think>", "</think>"), ("f(", ")"), ("\\left(", "\\right)"),
    ("-", ""), ("not ", ""), ("> ", ""), ("- ", ""), ("{'a':", "}"), ("1+", ""), ("\\{", "\\}"),
]  # fmt: skip


def _number(draw: random.Random) -> str:
    digits = "".join(draw.choices("0123456789", k=draw.choice((19, 400, 4300, 4301, 20_000, LONG))))
    return draw.choice(NUMBERS).format(digits)


def _nested(draw: random.Random) -> str:
    opening, closing = draw.choice(BRACKETS)
    depth = draw.choice((3, 40, 150, 1000, LONG // (len(opening) + len(closing))))
    return opening * depth + draw.choice(["1", "x", "", "7"]) + closing * draw.choice((depth, depth - 1, 0))


KINDS: list[Callable[[random.Random], str]] = [_mixed, _repeated, _characters, _number, _nested]


def _markdown() -> str:
    """Return fences within fences, each a character longer than that which it contains."""
    text = "nothing"
    for width in range(3, 200):
        text = f"{'`' * width}md\n{text}\n{'`' * width}"
    return text


SHAPES: list[Callable[[], str]] = [
    lambda: "10^{10^{10}}", lambda: "10^{10^{10^{10}}}", lambda: "2^{" * 30 + "2" + "}" * 30,
    lambda: "9^{9^{9^{9}}}", lambda: "((9!)!)!",
    lambda: "(9!)!", lambda: "1000000!", lambda: "\\binom{10^{9}}{5 \\cdot 10^{8}}",
    lambda: "\\sum_{k=1}^{10^{9}} \\frac{1}{k}",
    lambda: "\\prod_{k=1}^{100000} k", lambda: "\\int_0^1 e^{\\sin{e^{\\sin{x^x}}}} dx",
    lambda: "\\lim_{x \\to 0} \\frac{\\sin{x^x}}{x^{x^x}}",
    lambda: "(x+1)^{100000}", lambda: "(x+y+z)^{300} - 1", lambda: "(1+\\sqrt{2})^{100000}",
    lambda: "\\sqrt{" * 60 + "2" + "+1}" * 60,
    lambda: "\\frac{1}{1+" * 150 + "x" + "}" * 150, lambda: "x = " * 200 + "7",
    lambda: "+".join(f"\\sqrt{{{k}}}" for k in range(2, 300)),
    lambda: "+".join(f"x_{{{k}}}" for k in range(400)), lambda: "\\{" + ",".join(map(str, range(3000))) + "\\}",
    lambda: "\\begin{pmatrix}" + "\\\\".join("&".join(["x"] * 40) for _ in range(40)) + "\\end{pmatrix}",
    lambda: "[" + ",".join(["[1,2]"] * 500) + "]", lambda: "\\frac{" + "7" * 30_000 + "}{" + "3" * 30_000 + "}",
    lambda: "7" * 30_000 + "^{" + "7" * 30_000 + "}", lambda: "7" * 5000 + "^{" + "7" * 5000 + "}",
    lambda: "0." + "3" * LONG, _markdown,
    lambda: "e^{e^{e^{e^{e}}}}", lambda: "x^{x^{x^{x}}} = 7", lambda: "|" * 200 + "x" + "|" * 200,
    lambda: "\\log_{2}" * 100 + "7",
    lambda: "x < y < z < 1", lambda: "x \\in (-\\infty, \\sin x]", lambda: "\\sin(10^{10^{10}})",
    lambda: "10^{-10^{10}}", lambda: "0^{0^{0}}",
    lambda: "\\frac{1}{0}", lambda: "\\frac{0}{0}", lambda: "\\infty - \\infty",
    lambda: "(-1)^{\\frac{1}{10^{9}}}", lambda: "1.5^{1000000}",
    lambda: "\\gcd(10^{5000}, 7)", lambda: "10^{5000} \\mod 7", lambda: "i^{i^{i}}", lambda: "\\tan(10^{9999999})",
    lambda: "7" * 4000 + "!",
    lambda: "2 ** 10 ** 9", lambda: "[[]] * 10 ** 9", lambda: "'a' * 10 ** 12", lambda: "pow(3, 10**9)",
    lambda: "eval('(' * 9000)",
]  # fmt: skip
"""Texts whose value is vast, slow or undefined."""
