"""Mathematical answers: right ones in many writings, wrong ones that are close, and what cannot be read.

References are shaped as the answer columns of MATH, DeepScaleR, DAPO, carp_en, GSM8K, ASDiv, AIME, AQuA, OlympiadBench,
Minerva and college_math have them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rolltree.engine.rewards import RewardItem, RewardPool
from rolltree.engine.rewards.math import mathematics
from rolltree.engine.rewards.math.mathematics import judge, read_reference
from rolltree.engine.settings import RewardConfig

CASES: list[tuple[str, list[str], list[str]]] = [
    (r"3\sqrt{13}", [r"3\sqrt{13}", r"$3\sqrt{13}$", "3√13", r"\sqrt{117}"], ["3", "13", r"\sqrt{13}"]),
    ("(1, 2)", ["(1,2)", r"\left(1,2\right)", "(x,y)=(1,2)"], ["2", "(2,1)", "1", "1.2"]),
    ("2k + 2", ["2k+2", "2(k+1)"], ["2", "2k"]),
    (r"11\sqrt2", [r"11\sqrt{2}", r"11\sqrt2"], ["11", "2"]),
    (r"\sqrt{2}", [r"\sqrt2", "√2"], ["7", "2", "1.41"]),
    (r"\frac{14}{3}", [r"\dfrac{14}{3}", "14/3", r"4\frac{2}{3}", "4 2/3"], ["14", "3", "4.67"]),
    (
        "72",
        [
            "72.",
            "**72**",
            "72 clips",
            "$72$",
            "$72$.",
            "72.0",
            r"\$72",
            "72 dollars",
            r"72 \text{ clips}",
            "x = 72",
            "48 + 24 = 72",
            "Natalia sold 72 clips",
            "$72",
            r"72\%",
            "72 cm^2",
            "72 km/h",
            "72cm",
            "72 m",
            r"72\,\text{cm}^2",
            "72 eggs",
            "72 units.",
            "she sold 48 + 24 = 72 clips",
            r"\text{The total is } 72",
            "about 72 clips",
        ],
        [
            "72 or 73",
            "72, 73",
            "73",
            "72 clips or 73 clips",
            "7.2",
            "not 72",
            "either 72 or 73",
            "720",
            "72 apples and 5 oranges",
            "72/73",
            "72x",
            r"72\sqrt{2}",
            "172",
            "-72",
            r"72 \pm 1",
            "isn't 72",
            "71 to 72",
            "2x = 72",
        ],
    ),
    (
        r"\$1,234",
        ["1234", "1,234", "$1{,}234$", r"1\,234", "1 234", r"\$1,234.00", "1,234 dollars"],
        ["234", "1", "1.234", "235"],
    ),
    ("3t", ["3t", "3 t"], ["3", "t"]),
    (r"50\%", [r"50\%", "50%", "50 percent", "0.5", "50"], ["5", "0.05", "500"]),
    (r"90^\circ", [r"90^\circ", "90°", "90 degrees", "90", r"90^{\circ}"], ["9", r"80^\circ", "90 radians"]),
    (r"3\frac{1}{2}", ["7/2", "3.5", "3 1/2", r"3\dfrac12"], ["3", "31/2", "3/2"]),
    (
        r"(-\infty, 3]",
        [
            r"(-\infty,3]",
            r"\left(-\infty, 3\right]",
            "(-∞, 3]",
            r"x \in (-\infty,3]",
            r"x \le 3",
            "(-inf, 3]",
            "(-infinity, 3]",
        ],
        [r"(-\infty,3)", "3", "x<3", r"[3,\infty)"],
    ),
    (r"(-1,1)\cup(2,3)", ["(-1,1) ∪ (2,3)", r"(2,3)\cup(-1,1)"], ["(-1,1)", "(2,3)"]),
    (
        "1,2",
        ["1,2", "2, 1", "1 and 2", "x=1 or x=2", r"\{1,2\}", r"1 \text{ and } 2", "x = 1, 2"],
        ["1", "2", "1,3", "1,2,3"],
    ),
    (r"\{1,2,3\}", [r"\{3,2,1\}", "1,2,3"], ["1,2", "123"]),
    (
        r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
        [r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}"],
        [r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}", "1", "2"],
    ),
    (r"\infty", [r"\infty", "∞", "infinity", r"+\infty"], [r"-\infty", "1", "0"]),
    (
        r"\text{Evelyn}",
        ["Evelyn", r"\text{Evelyn}", "evelyn", r"\textbf{Evelyn}", "Evelyn."],
        ["Briana", "velynE", "Evelyn or Briana", "5"],
    ),
    ("Evelyn", ["Evelyn", r"\text{Evelyn}"], ["nylevE"]),
    ("yes", ["Yes", "yes.", r"\text{yes}"], ["no", "sey", "yes or no", "not yes"]),
    (
        r"\text{(C)}",
        ["C", "(C)", r"\text{C}", r"\text{(C)}", "C.", "(C) 20", "C) 20", "option C"],
        ["A", "(B)", "(A) or (C)", "A, C", "(C) or (D)", "20"],
    ),
    ("D", ["D", "(D)", "D. 24"], ["A", "A or D", "4"]),
    ("x=3", ["3", "x=3", "x = 3"], ["4", "x=4", "y=3", "2x=3"]),
    ("y=2x+1", ["y=2x+1", "2x+1", "y = 1 + 2x"], ["2", "y=2x", "1"]),
    ("4.5e33", ["4.5e33", r"4.5 \times 10^{33}", "4.5*10^33", r"4.5\cdot 10^{33}"], ["4.5", "33", "4.5e32"]),
    ("2.7e-10", ["2.7e-10", r"2.7 \times 10^{-10}", r"27 \times 10^{-11}"], ["0", "5e-10", "2.7e-11", "2.7"]),
    (r"0.\overline{3}", ["1/3", r"0.\overline{3}", "0.333333"], ["0.3", "3"]),
    ("2516_8", ["2516_8", "2516_{8}", "2516"], ["2516_9", "8", "2517_8"]),
    ("1:2:3", ["1:2:3"], ["1:1:6", "1", "3"]),
    ("3:4", ["3:4", "3/4", "0.75"], ["4:3", "3", "4"]),
    (r"5 \text{ cm}", ["5", "5 cm", r"5\text{ cm}", r"5 \mathrm{~cm}", "5 centimeters"], ["5 km", "6 cm", "5 m"]),
    (r"10\text{ a.m.}", ["10 a.m.", "10 am"], ["10 p.m.", "10 pm"]),
    (r"1 \pm \sqrt{2}", [r"1 \pm \sqrt{2}", r"1+\sqrt{2}, 1-\sqrt{2}", "1 ± √2"], ["1", r"1+\sqrt{2}", "2"]),
    (r"-\frac{1}{2}", ["-1/2", "-0.5", "−0.5", r"-\frac12", r"\frac{-1}{2}"], ["1/2", "2", "0.5"]),
    (r"25\pi", ["25π", r"25\pi", "25 pi", r"25\pi \text{ cm}^2"], ["25", r"\pi", "78.5"]),
    ("073", ["73", "073"], ["3", "7"]),
    ("f(x)=x^2", ["f(x)=x^2", "x^2"], ["x", "2"]),
    (r"\frac{3}{4} \text{ miles}", ["3/4", "0.75 miles", r"\frac34"], ["3", "4"]),
    ("May 5", ["May 5", r"\text{May 5}"], ["5", "June 5"]),
    (r"\text{no solution}", ["no solution", r"\text{No solution}", "no solution."], ["0", "solution"]),
    (r"x<1 \text{ or } x>2", ["x<1 or x>2", r"(-\infty,1)\cup(2,\infty)"], ["x<1", "1", "1<x<2"]),
    (r"-3<x\le 5", ["(-3,5]", "-3 < x ≤ 5", r"x \in (-3,5]"], ["(-3,5)", "5", "-3"]),
    (r"\binom{5}{2}", ["10", r"\binom{5}{2}"], ["5", "2"]),
    (r"\log_2 3", [r"\log_2 3", r"\frac{\ln 3}{\ln 2}"], ["2", "3"]),
    ("2+3i", ["3i+2", "2+3i"], ["2", "3", "2-3i"]),
    ("x^2+2x+1", ["(x+1)^2", "x^2 + 2x + 1"], ["x^2+1", "1"]),
    (r"\left( 3, \frac{\pi}{2} \right)", [r"(3, \pi/2)", "(3,π/2)"], ["3", r"(\pi/2, 3)"]),
    ("9 (apples)", ["9", "9 apples"], ["8"]),
    ("A=2", ["2", "A=2"], ["3", "A"]),
    ("1,000,000", ["1000000", "1{,}000{,}000", "10^6", r"1\,000\,000", "1000000 people"], ["1", "1000"]),
    ("xy", ["xy", "yx"], ["x", "y"]),
    ("2^{10}", ["1024", "2^{10}"], ["10", "20"]),
    (r"\frac12", ["1/2", ".5", "½", r"\tfrac12"], ["12", "2"]),
    ("C", ["C", "(C)"], ["B"]),
    (r"\emptyset", [r"\varnothing", "∅", r"\emptyset"], ["0", "1"]),
    (r"\mathbb{R}", ["ℝ", r"\mathbb{R}", r"(-\infty,\infty)"], ["0", "R+1"]),
    (r"1,2,\ldots,10", [r"1,2,\ldots,10"], ["1,2,10"]),
    (
        r"\frac{3\sqrt{3}}{2}",
        [r"\frac{3\sqrt3}{2}", "3√3/2", r"3\sqrt{3}/2", r"\dfrac{3}{2}\sqrt{3}"],
        ["3", r"\frac{\sqrt{3}}{2}"],
    ),
    (
        r"\left[-\frac{1}{2}, \infty\right)",
        [r"[-1/2, \infty)", "[-0.5, ∞)", r"x \ge -1/2"],
        [r"(-1/2, \infty)", "-1/2"],
    ),
    (r"(-\infty,-2]\cup[2,\infty)", [r"(-\infty,-2] \cup [2,\infty)", r"x \le -2 or x \ge 2"], ["[-2,2]", r"x \le -2"]),
    (
        r"\begin{pmatrix} -2 & 0 \\ 1 & 3 \end{pmatrix}",
        [
            r"\begin{bmatrix} -2 & 0 \\ 1 & 3 \end{bmatrix}",
            r"\left(\begin{array}{cc} -2 & 0 \\ 1 & 3 \end{array}\right)",
        ],
        [r"\begin{pmatrix} -2 & 1 \\ 0 & 3 \end{pmatrix}", "-2"],
    ),
    (
        r"\left( -\frac{3}{2}, -13, \frac{1}{2} \right)",
        ["(-3/2, -13, 1/2)", "(-1.5,-13,0.5)"],
        ["-13", "(-13, -3/2, 1/2)"],
    ),
    ("6 - 5i", ["6-5i", "-5i+6"], ["6+5i", "6"]),
    ("p - q", ["p-q", "-q+p"], ["q-p", "p"]),
    (r"\text{June 20}", ["June 20", "june 20"], ["20", "July 20"]),
    (r"5.4 \text{ cents}", ["5.4", "5.4 cents", r"\$5.4"], ["54"]),
    (r"\$32,\!348", ["32348", "32,348", r"\$32,348"], ["32", "348"]),
    ("10,080", ["10080", "10{,}080"], ["10", "80"]),
    ("1,-2", ["1, -2", "-2, 1", "x=1, x=-2", "1 and -2"], ["1", "-2", "1,2"]),
    ("52_8", ["52_8", "52_{8}"], ["52_9", "53_8"]),
    (r"\frac{270}7\text{ degrees}", ["270/7", r"\frac{270}{7}", r"\frac{270}{7}^\circ"], ["270", "7"]),
    (r"\text{odd}", ["odd", "Odd", r"\text{odd}"], ["even", "odd or even"]),
    (r"y = -\frac{1}{3}x + 2", ["y=2-x/3", r"y = -\frac13 x + 2"], ["y=2", r"y = \frac13x+2"]),
    ("x^2 + y^2 = 25", ["x^2+y^2=25", "y^2 + x^2 = 25"], ["25", "x^2+y^2=5"]),
    (r"4 \sqrt{5}\text{ m}", [r"4\sqrt5", r"4\sqrt{5} m", "4√5 meters"], ["4", "5"]),
    ("-1, 0, 1", [r"\{-1,0,1\}", "0, 1, -1"], ["0,1", "1"]),
    (r"(0,9) \cup (9,36)", ["(0,9) ∪ (9,36)"], ["(0,36)", "9"]),
    (r"2\sqrt{3} + 3\sqrt{2}", [r"3\sqrt2+2\sqrt3"], [r"2\sqrt3", "5"]),
    (r"\frac{x+2}{7}", ["(x+2)/7", r"\frac{2+x}{7}"], ["x+2", "7"]),
    (r"\cot x", [r"\cot x", r"\cot(x)", r"\frac{1}{\tan x}"], [r"\tan x", "x"]),
    ("e^{-2}", ["e^{-2}", "1/e^2", r"\exp(-2)"], ["e^2", "-2"]),
    (r"\ln 2", [r"\ln(2)", "ln 2", r"\log_e 2"], ["2", r"\ln 3"]),
    (r"12\pi \text{ square inches}", [r"12\pi", "12π", "12 pi"], ["12", r"\pi"]),
    (r"33\%", ["33", "33%", "0.33"], ["3.3", "3"]),
    (r"1 \frac{4}{5}", ["9/5", "1.8", r"1\frac45"], ["4/5", "1"]),
    ("2:3", ["2:3", "2/3"], ["3:2"]),
    (r"7.5\times 10^{-3}", ["0.0075", "7.5e-3", r"7.5 \times 10^{-3}"], ["7.5", "0.075"]),
    ("1.6e-19", [r"1.6 \times 10^{-19}", "1.6e-19"], ["0", "1.7e-19", "1.6e19"]),
    (r"(-\infty, 0)", [r"(-\infty,0)", "x<0"], [r"(-\infty,0]", "0"]),
    (r"\{2, 3\}", ["2,3", r"\{3, 2\}"], ["(3,2,1)", "2"]),
    (r"\text{Monday}", ["Monday", "monday."], ["Tuesday", "Monday or Tuesday"]),
    (r"\textbf{(B)}\ 12", ["B", "(B)", "(B) 12", "12"], ["(A)", "13", "A"]),
    (r"\text{(E)}", ["E", "(E)", r"\textbf{(E)}"], ["e^1", "D"]),
    ("B", ["B", "(B)", "B) 3", "Option B"], ["C", "3"]),
    (r"\sqrt{2}+\sqrt{3}", ["√2 + √3", r"\sqrt{3}+\sqrt{2}"], [r"\sqrt5", "3.15"]),
    (r"\dfrac{\sqrt{10}}{10}", [r"\frac{1}{\sqrt{10}}", r"\frac{\sqrt{10}}{10}"], ["1", r"\sqrt{10}"]),
    (r"\pi r^2", [r"\pi r^2", "πr²"], [r"\pi", "r^2"]),
    ("3.14159", ["3.14159"], ["3.14", r"\pi"]),
    ("n(n+1)/2", [r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}"], ["n", "2"]),
    ("a^2+b^2", ["b^2+a^2"], ["a^2", "(a+b)^2"]),
    (r"\text{DNE}", ["DNE", "dne"], ["0"]),
    ("does not exist", ["does not exist", r"\text{does not exist}"], ["exists", "0"]),
    (r"-\infty", [r"-\infty", "-∞", "-infinity"], [r"\infty"]),
    ("4:30", ["4:30"], ["4:31"]),
    (r"100^\circ\text{C}", ["100", "100°C", r"100^\circ C"], ["10"]),
    (
        r"\frac{\pi}{6}, \frac{5\pi}{6}",
        [r"\frac{\pi}{6} and \frac{5\pi}{6}", r"\frac{5\pi}{6}, \frac{\pi}{6}", "π/6, 5π/6"],
        [r"\pi/6", "6"],
    ),
    ("m=2, b=3", ["m=2, b=3", "b=3, m=2"], ["2", "m=3, b=2"]),
    ("False", ["False", "false"], ["True"]),
    ("|x|", ["|x|"], ["x"]),
    (r"15 \text{ cm}^2", ["15", "15 cm²", "15 square centimeters", "15 sq cm"], ["15 m^2", "225"]),
    ("8!", ["8!", "40320"], ["8"]),
    (r"\frac{1}{3}", ["1/3", "0.333333", r"\frac{2}{6}"], ["0.3", "0.33", "3"]),
    ("+5", ["5", "+5"], ["-5"]),
    (r"\text{6}", ["6"], ["5"]),
    ("{5}", ["5"], ["4"]),
    (r"f^{-1}(x)=\frac{x-3}{2}", [r"f^{-1}(x)=\frac{x-3}{2}", r"\frac{x-3}{2}"], ["2", "3"]),
    (r"\mathrm{Yes}", ["yes", "Yes"], ["No"]),
    ("$5$ and $7$", ["5, 7", "5 and 7"], ["5", "7", "57"]),
]  # fmt: skip


@pytest.mark.check(but=12)
@pytest.mark.parametrize(("reference", "right", "wrong"), CASES, ids=[case[0] for case in CASES])
def test_right_answers_are_paid_in_any_writing_and_wrong_ones_in_none(
    reference: str, right: list[str], wrong: list[str]
) -> None:
    gold = read_reference(reference)
    for forms, paid in ((right, True), (wrong, False)):
        for answer in forms:
            for text in (f"So it is \\boxed{{{answer}}}", f"Answer: {answer}"):
                if text.startswith("Answer") or "$" not in answer:
                    assert (judge(text, gold) == 1) is paid, text


@pytest.mark.parametrize(
    "reference",
    [
        "73", "$73$", "\\(73\\)", "\\[73\\]", "#### 73", "48 + 25 = 73\n#### 73", "so \\boxed{73}.",
        "The answer is 73.", "<answer>73</answer>", "73.0", "073", "73 (apples)", "73 apples", "\\$73", "73\\%", "x=73",
        "73^\\circ", "73.",
        "48+25=73", "\\textbf{73}",
    ],
)  # fmt: skip
def test_references_are_read_from_their_marks_and_signs(reference: str) -> None:
    gold = read_reference(reference)
    assert judge("\\boxed{73}", gold) == 1
    assert judge("\\boxed{7}", gold) == judge("\\boxed{3}", gold) == judge("\\boxed{48}", gold) == 0


@pytest.mark.parametrize("reference", ["\\frac{1}{2", "\\max", "$$", "\\sqrt{", "()", "\\frac{}{3}"])
def test_references_that_cannot_be_read_are_refused(reference: str) -> None:
    with pytest.raises(ValueError, match="reference answer"):
        read_reference(reference)


RIGHT = [
    "Answer: 72.",
    "Answer: **72**",
    "**Answer: 72**",
    "**Answer:** 72",
    "**Answer**: 72",
    "*Answer:* $72$",
    "Answer: 72 clips",
    "Answer: $72$.",
    "So it is \\boxed{72}.\n\n#### Check\n48 + 24 = 72",
    "#### Step 1\n48 + 24\n#### Result\nThe answer is 72",
    "#### 72",
    "work\n#### 72\n",
    "#### 72 clips",
    "#### **72**",
    "\\boxed 72",
    "so $\\boxed{72}$",
    "$$\\boxed{72}$$",
    "\\boxed{\\text{72 clips}}",
    "The answer is 72.",
    "the final answer is $72$. I hope it is correct.",
    "The final answer is: $\\boxed{72}$. I hope",
    "So the answer is 72 clips, as computed.",
    "Therefore, the answer is **72**.",
    "Answer:\n72",
    "Answer:\n\n\\[\n72\n\\]",
    "Answer:\n\n$$\n72\n$$",
    "### Final Answer\n72 clips",
    "## Answer\n\n**72**",
    "**Final Answer**\n\n72",
    "**Final Answer:** \\boxed{72}",
    "<answer>72</answer>",
    "<answer> $72$ </answer>",
    "<Answer>72</Answer>",
    "<answer>\\boxed{72}</answer>",
    "答案：72",
    "答案是 72。",
    "Respuesta: 72",
    "La réponse est 72.",
    "Antwort: 72",
    "Die Antwort ist 72.",
    "Ответ: 72",
    "答え: 72",
    "정답: 72",
    "\\boxed{72}, and \\boxed{72}",
    "\\boxed{48+24=72}",
    "Final answer: 72 clips in total",
    "Answer - see below. The answer is 72",
    "\\boxed{72}. This answer is correct.",
    "\\boxed{72}\nAnswer: see the box above",
    "Answer: 3\nWait, that is wrong.\nAnswer: 72",
    "So she sold 72 clips.",
    "In total:\n$$48+24=72$$",
    "72",
    "**72**",
    "ANSWER: 72",
    "\\boxed{\\$72}",
    "\\boxed{72 \\\\ }",
    "\\boxed{{72}}",
    "The correct answer is option 72",
    "the answer to the question of how many clips is 72",
    "#### Answer: 72",
    "#### 72\n\nLet me know if you need more.",
    "Answer: 72\r\nthanks",
    "- Answer: 72",
    "1. Answer: 72",
    "> Answer: 72",
]
UNPAID = [
    "Answer: 73.",
    "Answer: **73**",
    "Answer: 72 or 73",
    "Answer: 72 clips or 73 clips",
    "\\boxed{72} or \\boxed{73}",
    "\\boxed{72}, \\boxed{73}",
    "\\boxed{72 \\text{ or } 73}",
    "The answer is 72 or 73",
    "The answer is not 72.",
    "The answer is 72, wait, no, it is 73.",
    "#### 72 or 73",
    "#### 73",
    "\\boxed{73}. Check: 72",
    "72 is wrong.\nAnswer: 73",
    "<answer>72 73</answer>",
    "<answer>72\n73</answer>",
    "Answer: between 72 and 73",
    "Answer: 72-73",
    "Answer: 72, 73 and 74",
    "\\boxed{72\n",
    "no idea",
    "Answer:",
    "Answer: I don't know",
    "72 clips or 73 clips",
    "Answer: 0.72",
    "Answer: 7 2",
    "\\boxed{7}2",
    "\\boxed{\\frac{72}{2}}",
    "Answer: 72^2",
    "Answer: x > 72",
    "答案：73",
    "Answer: at least 72",
    "Answer: 72 (or maybe 71)",
    "\\boxed{72}\nAnswer: 71",
    "Answer: more than 72",
    "Answer: less than 72 clips",
    "The answer is probably 72 but it could be 73",
    "1 2 3 72 73",
    "\\boxed{1,2,3,72}",
    "The answer isn't 72",
    "Answer: 72 73",
    "Answer: 72/1 or 73",
    "Answer: -72",
    "Answer: {72, 73}",
]
UNPARSED = [
    "", "no idea", "Answer:", "Answer: I don't know", "\\boxed{72\n", "\\boxed{}", "Answer: 72 clips or 73 clips",
    "The answer is probably 72 but it could be 73", "The answer is not 72.", "Answer: **", "<answer></answer>",
    "Answer: 72 apples and 5 oranges", "72 clips or 73 clips", "\\boxed{\\frac{72}{}}", "####",
]  # fmt: skip
"""Texts without one answer that can be read."""


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(RewardConfig(verifier="math", workers=1, timeout_s=60.0)) as pool:
        yield pool


GSM8K = {"answer": "48/2 = <<48/2=24>>24\n24+48 = 72\n#### 72"}


def test_usual_words_around_an_answer_cost_nothing(pool: RewardPool) -> None:
    verdicts = pool.score([RewardItem(text, GSM8K) for text in RIGHT])
    assert {text: v.value for text, v in zip(RIGHT, verdicts, strict=True) if v.value != 1 or v.unparsed} == {}


def test_no_wrong_answer_and_no_hedge_is_paid(pool: RewardPool) -> None:
    verdicts = pool.score([RewardItem(text, GSM8K) for text in UNPAID])
    assert {text: v.value for text, v in zip(UNPAID, verdicts, strict=True) if v.value != 0} == {}


def test_what_cannot_be_read_is_unparsed_and_not_wrong(pool: RewardPool) -> None:
    verdicts = pool.score([RewardItem(text, GSM8K) for text in UNPARSED])
    assert {text: v for text, v in zip(UNPARSED, verdicts, strict=True) if v.unparsed != "no_answer" or v.value} == {}
    (wrong,) = pool.score([RewardItem("Answer: 73", GSM8K)])
    assert (wrong.value, wrong.unparsed) == (0, None)


@pytest.mark.check
def test_a_reference_is_parsed_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    parse = mathematics.parse
    monkeypatch.setattr(mathematics, "parse", lambda formula: parsed.append(formula) or parse(formula))
    for _ in range(3):
        assert judge("\\boxed{\\sqrt{91}}", read_reference("\\sqrt{91}")) == 1
    assert len(parsed) == 4  # the reference once, each response


@pytest.mark.check(but=4)
@pytest.mark.parametrize(
    ("reference", "said", "right"),
    [
        (r"\frac{1}{2004!}", r"\frac{1}{2006!}", False),
        (r"\frac{1}{2004!}", r"\frac{2005}{2005!}", True),
        (r"\frac{2^{2005}+1}{3\cdot2^{2006}}", r"\frac{1}{3\cdot2^{2006}}", False),
        (r"\frac{2^{2005}+1}{3\cdot2^{2006}}", r"\frac{1}{6}", False),
        (r"\frac{2^{2005}+1}{3\cdot2^{2006}}", r"\frac{1}{6}+\frac{1}{3\cdot2^{2006}}", True),
        (r"\pi^{50}", r"\pi^{50}+1", False),
        (r"\frac{\sqrt2}{2}", r"\frac{1}{\sqrt2}", True),
        (r"\frac{\sqrt2}{2}", "0.7071068", True),
        ("2^{100000000}", "4^{50000000}", True),
        ("2^{100000000}", "2^{100000001}", False),
        (r"19, 46, \text{ and } 82", "19,46,82", True),
        (r"19, 46, \text{ and } 82", "19,46", False),
    ],
)
def test_exact_numbers_are_compared_exactly(reference: str, said: str, right: bool) -> None:
    assert judge(f"\\boxed{{{said}}}", read_reference(reference)) == right


def test_a_decimal_comma_is_read_where_the_reference_is_one_number() -> None:
    assert judge(r"\boxed{3,5}", read_reference("3.5")) == 1
    assert judge(r"\boxed{3,5}", read_reference("3, 5")) == 1
    assert judge(r"\boxed{3.5}", read_reference("3, 5")) == 0
