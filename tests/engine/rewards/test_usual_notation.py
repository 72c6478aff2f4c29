"""Further writings of answers: references of each kind of LaTeX, answers in usual words, and what stands around them.

`test_mathematics.py` has the cases that were reported; these are of the same kinds.
"""

from __future__ import annotations

import pytest

from rolltree.engine.rewards.math.mathematics import judge, read_reference
from rolltree.engine.rewards.math.numerals import in_digits

WRITTEN: list[tuple[str, list[str], list[str]]] = [
    (r"\frac{-7}{9}", ["-7/9", r"-\frac{7}{9}", r"\frac{7}{-9}", r"-\dfrac79", "−7/9"], ["7/9", "-7", "9/7"]),
    (r"\frac ab", ["a/b", r"\frac{a}{b}"], ["a", "b/a"]),
    (r"\cfrac{1}{1+\cfrac{1}{2}}", ["2/3", r"\frac{2}{3}"], ["1", "1/2"]),
    (r"\frac{1}{2}\cdot\frac{3}{5}", ["3/10", "0.3"], ["1/2", "3/5"]),
    (r"\frac{2023!}{2021!}", [r"2023\cdot2022", "4090506"], ["2023"]),
    (
        r"\frac{\sqrt{6}-\sqrt{2}}{4}",
        [
            r"\frac{\sqrt6-\sqrt2}{4}", r"\sin 15^\circ", r"(\sqrt{6}-\sqrt{2})/4",
        ],
        [
            "4", r"\frac{\sqrt6+\sqrt2}{4}",
        ],
    ),
    (r"-2\frac{3}{8}", ["-19/8", "-2.375", "-2 3/8", r"-2\tfrac38"], ["-13/8", "2 3/8", "-2"]),
    (r"3\tfrac{1}{7}", ["22/7", "3 1/7"], ["3/7", "31/7"]),
    (r"\sqrt[3]{2}", ["2^{1/3}", r"\sqrt[3]2", "∛2"], ["2", "3", r"\sqrt2"]),
    (r"\sqrt[4]{48}", [r"2\sqrt[4]{3}"], ["48", r"\sqrt{48}"]),
    (r"5\sqrt{7}\text{ units}", [r"5\sqrt7", "5√7", "5*sqrt(7)", "5sqrt7"], ["5", "7"]),
    (r"\sqrt{\frac{2}{3}}", [r"\frac{\sqrt6}{3}", r"\sqrt{2/3}", "sqrt(2/3)"], ["2/3"]),
    (
        r"\frac{1+\sqrt{5}}{2}",
        [
            r"\frac{1}{2}+\frac{\sqrt5}{2}", "(1+√5)/2", r"(1 + \sqrt{5})/2",
        ],
        [
            "1.618", r"\frac{1-\sqrt5}2",
        ],
    ),
    (r"2^{\sqrt{2}}", [r"2^{\sqrt2}"], ["2"]),
    (
        r"[0,1)\cup(1,\infty)",
        [
            "[0,1) ∪ (1,∞)", r"[0, 1) U (1, \infty)", r"x\ge0, x\ne1", r"[0,1)\cup(1,+\infty)",
        ],
        [
            r"[0,\infty)", "(0,1)",
        ],
    ),
    (
        r"\left(-\infty,-\frac{5}{3}\right]",
        [
            r"(-\infty,-5/3]", r"x\le-\frac53", "x <= -5/3",
        ],
        [
            r"(-\infty,-5/3)", "-5/3",
        ],
    ),
    ("]-1,2[", ["(-1,2)", "]-1,2["], ["[-1,2]"]),
    ("(0,1]", ["(0,1]", "0<x<=1", r"0 < x \le 1", "(0; 1]"], ["(0,1)", "[0,1]", "1"]),
    (r"x\in[2,4]", ["[2,4]", r"2\le x\le4", "2 ≤ x ≤ 4"], ["(2,4)", "2"]),
    ("k>4", ["k>4", r"(4,\infty)", "4<k"], ["k<4", "4", r"k\ge4"]),
    ("|x|<3", ["|x|<3", "-3<x<3", "(-3,3)"], ["3", "x<3"]),
    (
        r"\left\{-\frac{1}{2},3\right\}",
        [
            r"\{3,-1/2\}", "-1/2, 3", r"x=-\frac12 \text{ or } x=3", "{3, -0.5}",
        ],
        [
            "3", "1/2,3",
        ],
    ),
    (r"\{0\}", ["0", r"\{0\}", "{0}"], ["1", r"\emptyset"]),
    (r"\{(1,2),(2,1)\}", [r"\{(2,1),(1,2)\}", "(1,2), (2,1)", "(2,1) and (1,2)"], ["(1,2)", r"\{(1,1),(2,2)\}"]),
    (r"\{x \mid x > 2\}", ["x>2", r"(2,\infty)"], ["2"]),
    (r"\varnothing", [r"\emptyset", "∅", r"\{\}", "empty set"], ["0"]),
    (
        r"\mathbb{R}\setminus\{1\}",
        [
            r"\mathbb{R}\setminus\{1\}", r"(-\infty,1)\cup(1,\infty)", r"x\ne1", r"\mathbb{R}-\{1\}",
        ],
        [
            r"\mathbb{R}", "1",
        ],
    ),
    (
        r"\begin{bmatrix}1&2\\3&4\end{bmatrix}",
        [
            r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\left[\begin{array}{cc}1&2\\3&4\end{array}\right]",
            r"\begin{bmatrix}1 & 2 \\ 3 & 4 \\ \end{bmatrix}",
        ],
        [
            r"\begin{pmatrix}1&3\\2&4\end{pmatrix}", "10",
        ],
    ),
    (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", ["-2"], ["2", "1"]),
    (
        r"\begin{pmatrix}\frac12\\0\\-1\end{pmatrix}",
        [
            r"\begin{pmatrix}1/2\\0\\-1\end{pmatrix}", r"\begin{pmatrix} 0.5 \\ 0 \\ -1 \end{pmatrix}",
        ],
        [
            r"\begin{pmatrix}1/2\\0\\1\end{pmatrix}",
        ],
    ),
    (r"\begin{bmatrix} 3 & -2 \end{bmatrix}", [r"\begin{pmatrix}3&-2\end{pmatrix}"], ["3"]),
    (
        r"12\,\text{m/s}",
        [
            "12", "12 m/s", r"12\ \mathrm{m/s}", "12 meters per second", r"12\,\frac{\text{m}}{\text{s}}",
        ],
        [
            "21", "12 km/h",
        ],
    ),
    (r"9.8\mathrm{~m}/\mathrm{s}^2", ["9.8", r"9.8\,\text{m/s}^2", "9.8 m/s²"], ["98"]),
    (r"250\text{ mL}", ["250 mL", "250", "250 milliliters"], ["250 L"]),
    (r"24 \mathrm{~cm}^{2}", ["24", "24 cm²", "24 cm^2", "24 square centimeters", r"24\text{ sq. cm}"], ["42"]),
    ("3.5 hours", ["3.5", "3.5 hours", "3.5 h", "7/2 hours", "3 1/2 hours"], ["35", "3.5 minutes"]),
    (r"\pounds 40", ["40", "£40", r"\pounds 40"], ["4"]),
    ("€15", ["15", "15 €", "15 euros", "€15"], ["51"]),
    ("15€", ["15", "15 €", "€15"], ["51"]),
    (r"\$18.90", ["18.90", "$18.90", "18.9", r"\$18.90", "18.90 dollars"], ["18", "1890"]),
    (r"60^{\circ}", ["60", "60°", "60 degrees", r"60^\circ"], ["6", "30"]),
    (r"\angle ABC = 40^\circ", ["40", "40°"], ["50"]),
    (r"12.5\%", ["12.5%", "12.5", "0.125", r"12.5\%", "12.5 percent"], ["1.25", "125"]),
    ("40%", ["40%", "40", r"40\%", "40 percent", "0.4"], ["4%", "60%"]),
    (r"66\frac{2}{3}\%", [r"66\frac23\%", "66 2/3%", "200/3 %"], ["66", "33"]),
    (r"150\%", ["150%", "1.5", "150"], ["15%"]),
    (r"\text{Friday}", ["Friday", "friday", r"\textbf{Friday}", "Friday."], ["Monday", "Friday or Monday"]),
    (r"\text{neither}", ["neither", "Neither"], ["both"]),
    (r"\text{increasing}", ["increasing"], ["decreasing"]),
    (r"\text{ellipse}", ["ellipse", "an ellipse", "Ellipse", "the ellipse"], ["circle", "hyperbola"]),
    (r"\text{(A), (C)}", ["A, C", "(A), (C)", "A and C"], ["A", "C", "A, B"]),
    (r"\text{A,B,D}", ["A,B,D", "A, B, D", "ABD", "B, A, D"], ["A", "A,B"]),
    (r"\text{Yes}", ["Yes", "yes.", r"\text{yes}"], ["No"]),
    (r"17 \text{ or } 18", ["17, 18", "17 or 18", "18 and 17"], ["17", "18"]),
    (r"75^\circ, 105^\circ", ["75°, 105°", "105, 75", r"75^\circ \text{ and } 105^\circ"], ["75"]),
    ("12,345", ["12345", "12,345", "12{,}345", "12 345"], ["12", "345", "12.345"]),
    ("1,234,567.89", ["1234567.89", "1,234,567.89"], ["1234567"]),
    (r"2,\!000,\!000", ["2000000", "2,000,000", "2 million"], ["2"]),
    ("1,000", ["1000", "1,000", "10^3"], ["1", "0"]),
    (r"\left(\frac{1}{3},-2\right)", ["(1/3,-2)", r"(\frac13, -2)", "(1/3; -2)"], ["(-2,1/3)", "1/3"]),
    ("(3,4,5)", ["(3, 4, 5)", r"\left(3,4,5\right)", r"\langle 3,4,5\rangle"], ["(5,4,3)", "345"]),
    ("(0,0)", ["(0,0)", "(0, 0)", "(x, y) = (0, 0)"], ["0"]),
    ("P(2,-3)", ["(2,-3)", "P(2,-3)", "P = (2, -3)"], ["2"]),
    (r"x=\frac{5}{2}", ["5/2", "2.5", "x=2.5", r"x = \frac52"], ["x=5", "2"]),
    ("y=3x-4", ["3x-4", "y = 3x - 4", "y=-4+3x"], ["y=3x+4", "3"]),
    ("3x+4y=12", ["3x+4y=12", "4y+3x=12", "3x+4y-12=0"], ["12", "3x-4y=12"]),
    ("(x-1)^2+(y+2)^2=9", ["(x-1)^2+(y+2)^2=9", "(y+2)^2 + (x-1)^2 = 9"], ["9", "(x+1)^2+(y-2)^2=9"]),
    ("x=1,y=2", ["x=1, y=2", "y=2, x=1", r"x = 1 \text{ and } y = 2"], ["x=2,y=1", "1"]),
    ("a_n=2n-1", ["2n-1", "a_n=2n-1", "a_{n} = 2n - 1"], ["2n+1", "2"]),
    ("f(x)=2x^3-1", ["2x^3-1", "f(x)=2x^3-1"], ["2x^3+1"]),
    (r"\pm 3", ["±3", "3, -3", "-3 and 3", r"\pm3", "x=3 or x=-3"], ["3", "-3"]),
    (r"\pm\sqrt{5}", [r"\pm\sqrt5", r"\sqrt5,-\sqrt5", "±√5"], [r"\sqrt5"]),
    (r"2\pm\sqrt{3}", [r"2+\sqrt3, 2-\sqrt3", "2 ± √3", r"x = 2 \pm \sqrt{3}"], [r"2+\sqrt3", "2"]),
    (r"\frac{-1\pm\sqrt{5}}{2}", [r"\frac{-1+\sqrt5}{2},\frac{-1-\sqrt5}{2}"], [r"\frac{-1+\sqrt5}{2}"]),
    ("-2, 5", ["5, -2", "x=-2, 5", "-2 and 5", "x = -2 or x = 5", "x_1=-2, x_2=5", "-2; 5"], ["-2", "5", "2,5"]),
    ("3 and 7", ["3, 7", "7 and 3", "3 and 7", r"3 \text{ and } 7"], ["3", "37"]),
    ("1, 2, 3, 6", ["1,2,3,6", "6,3,2,1", r"\{1,2,3,6\}", "1, 2, 3, and 6"], ["1,2,3", "12"]),
    ("10^{100}", ["10^{100}", "10^100", "1e100"], ["10", "100"]),
    (r"3.0 \times 10^8", ["3e8", r"3\times10^8", "300000000", "3.0*10^8", "3·10^8"], ["3", "8"]),
    (r"\log_{10} 5", [r"\log_{10}5"], ["5"]),
    (r"\ln\frac{3}{2}", [r"\ln(3/2)", r"\ln 3-\ln 2", r"\ln 1.5"], ["3/2"]),
    (r"2\pi-4", [r"2\pi-4", "2π − 4", r"-4+2\pi"], ["2", "-4"]),
    (r"e^{i\pi/4}", [r"e^{i\pi/4}", r"e^{\frac{i\pi}{4}}"], ["e"]),
    ("-i", ["-i"], ["i", "1", "-1"]),
    (r"4\sqrt{3}i", [r"4i\sqrt{3}", r"4\sqrt3 i"], ["4", r"4\sqrt3"]),
    (r"\binom{10}{3}", ["120", r"\binom{10}{3}"], ["10", "3"]),
    (r"\lfloor x \rfloor", [r"\lfloor x\rfloor"], ["x"]),
    (r"\sum_{k=1}^{10} k", ["55"], ["10", "1"]),
    ("1011_2", ["1011_2", "1011_{2}"], ["1011_3", "11_2"]),
    ("x^3-x", ["x(x^2-1)", "x(x-1)(x+1)", "x^3 - x"], ["x^3", "x"]),
    (r"0.\overline{142857}", ["1/7"], ["1", "0.14"]),
    (r"0.\dot{6}", ["2/3"], ["0.6"]),
    ("3:2:1", ["3:2:1"], ["1:2:3"]),
    ("7:15", ["7:15"], ["7:16", "715"]),
    ("six", ["six", "6"], ["seven", "7"]),
    (r"\frac{\pi}{2}-1", [r"\pi/2-1"], ["1", r"\pi/2"]),
    (r"\displaystyle\frac{5}{6}", ["5/6"], ["5"]),
    (r"\boxed{\frac{5}{6}}", ["5/6"], ["5"]),
    (r"$\frac{5}{6}$.", ["5/6"], ["5"]),
    ("{{42}}", ["42"], ["4"]),
    ("32 (pet fish)", ["32", "32 pet fish", "32 (fish)"], ["23"]),
    ("3", ["(1)(3)", "1(3)"], ["4", "13"]),
    ("4", ["(2)(2)"], ["(1)(3)", "(1)(4)(2)"]),
    ("5:1", ["5:1", "5 : 1"], ["1:5"]),
    ("42.", ["42"], ["4"]),
    ("42.0", ["42"], ["420"]),
    ("#### 42", ["42"], ["4"]),
    (r"Thus the answer is $\boxed{42}$", ["42"], ["4"]),
]  # fmt: skip
"""References, right answers to put into a box, and wrong ones."""
SAID: list[tuple[str, list[str], list[str]]] = [
    (
        "72",
        [
            "The answer is **72** dollars.", "72 (seventy-two)", "Answer: 72 (seventy-two)",
            "The answer is 72 (seventy-two).", "Answer: seventy-two", "The answer is seventy-two.",
            r"$\boxed{72\text{ cm}}$", r"$\boxed{\boxed{72}}$", r"$\boxed{\mathbf{72}}$",
            r"\boxed{\textbf{72 dollars}}", "<think>maybe \\boxed{5}</think>\n\\boxed{72}",
            "<think>\\boxed{72}</think>\nThe answer is 72.", "<think>Answer: 71?</think>\n\n**Answer:** 72",
            r"\boxed{70}... no wait, \boxed{72}", "Final Answer: The final answer is $72$. I hope it is correct.",
            "**Answer:** $72", r"Answer: $\$72$", "Answer: 72 USD", "Answer: USD 72", "Answer: US$72", "Answer: 72€",
            "Answer: EUR 72", "Answer: ≈ 72", "Answer: = 72", "Answer: x = 72 units", "**72**.",
            "Therefore the total is **72 dollars**.", "Total: 72", "= 72", "So 48 + 24 = **72**.", "Thus, $x = 72$.",
            "Hence, she has 72 clips left.", "Answer: 72,-", "Answer: 72,00 €", "Answer: 72,0",
            "Die Antwort ist 72,0.", "Antwort: 72,00 Euro", "Réponse : 72", "Réponse : 72,0",
            "La réponse est **72**.", "La respuesta es 72.", "La risposta è 72.", "A resposta é 72.",
            "De antwoord is 72.", "Het antwoord is 72.", "Odpowiedź: 72", "Svar: 72", "Vastaus: 72", "答案为72",
            "答案为：72。", "答：72", "答案是：$72$", "最终答案：**72**", "答えは72です。", "정답은 72입니다.",
            "Ответ: **72**.",
            "Відповідь: 72", "The final answer is:\n\n$$\\boxed{72}$$\n", "### Answer: 72", "### Final answer:\n72",
            "**Final answer:**\n\n$72$", "__Answer:__ 72", "*Answer*: 72", "Answer = 72", "Answer is 72",
            "ANSWER — 72", "Answer - 72", "Final answer → 72", "The answer: 72", "The answer would be 72 clips.",
            "The answer, then, is 72.", "My answer is 72.", "The result is 72.", "The solution is 72.",
            "So the total number of clips is 72.", "We get 72.", "There are 72 clips in total.", "It's 72.", "`72`",
            "Answer: `72`", "```\n72\n```", "<answer>72 clips</answer>", "<answer>**72**</answer>",
            "<answer>The answer is 72</answer>", "<answer>x = 72</answer>", "<answer>72</answer>.",
            "<final_answer>72</final_answer>", r"\(\boxed{72}\)", r"\[\boxed{72}\]", r"\boxed{72.}",
            r"\boxed{72.00}", r"\boxed{ 72 }", r"\boxed{x=72}", r"\fbox{72}", r"\boxed{72\ \text{clips}}",
            r"\boxed{72^\circ}", r"\boxed{\$72.00}", r"\boxed{72\,\%}", r"\boxed{+72}", r"\boxed{\text{Answer: }72}",
            r"\boxed{\text{Total} = 72}", r"\framebox{72}", r"$\boxed {72}$", "\\boxed{\n72\n}", "#### $72",
            "#### 72.0", "####72", "#### 72 dollars per week", "#### Final answer: 72", "A: 72", "Answer: (72)",
            "Answer: [72]", "Answer: {72}", "Answer: 72", "Answer: 72 ✓", "Answer: 72 ✅", r"\boxed{72} ✅",
            "**Answer: 72 🎉**", "Answer:72", "answer:   72   ", "ANSWER: 72 CLIPS", "Answer : 72", "| Answer | 72 |",
            "Answer: 144/2", r"Answer: \frac{144}{2}", "Answer: 7.2e1", "Answer: 7.2 × 10^1",
            "Answer: exactly 72 clips", "Answer: approximately 72", "Answer: a total of 72 clips",
            "Answer: Natalia sold 72 clips altogether in April and May.", "Answer: In total, she sold 72 clips",
            "Answer: 72 clips.\n\nExplanation: 48 in April and 24 in May.", "Answer: 72\n\n(48 + 24 = 72)",
            "**Answer:** 72 clips\n\n---\n\nLet me know if you have other questions about 5 things!",
        ],
        [
            "The answer is **73** dollars.", "73", "Answer: 720 (seven hundred twenty)",
            "<think>\\boxed{72}</think>\nThe answer is 71.", r"\boxed{72}... no wait, \boxed{70}", "Answer: 7,2",
            "Answer: 72,5", "Antwort: 72,50 Euro", "Answer: 71", "Answer: seventy-three", "Answer: -72",
            "Answer: 72 or 70", "Answer: 72 million", "Answer: 72k", r"\boxed{723}", "Answer: 172 clips",
            "The answer is 72.5.", "Answer: 72i", "Answer: 72x", r"Answer: 72\pi", r"Answer: \sqrt{72}",
            "Answer: 72!", "Answer: 7 (72/10)",
        ],
    ),
    (
        "0.5",
        [
            "Antwort: 0,5", "Réponse : 0,5", "Answer: 0,5", r"\boxed{0,5}", "Answer: 1/2", "Answer: ½", "Answer: .5",
            "Answer: 50%", "Answer: one half", r"\boxed{0{,}5}",
        ],
        [
            "Answer: 5", "Answer: 0, 5", r"\boxed{0, 5}", r"\boxed{(0,5)}", "Answer: 0.05", "Answer: 0,05",
        ],
    ),
    (
        "3.14",
        [
            "Antwort: 3,14", "Réponse : 3,14 cm", r"\boxed{3,14}", r"\boxed{3{,}14}", "Answer: 3.14",
        ],
        [
            "Answer: 3, 14", "Answer: 314", r"\boxed{14}", r"\boxed{(3,14)}", "Answer: 3",
        ],
    ),
    (
        "1234.5",
        [
            "Antwort: 1.234,5", "Answer: 1,234.5", "Answer: 1 234,5", r"\boxed{1.234,50}", "Answer: 1'234.5",
        ],
        [
            "Answer: 1.2345", "Answer: 1,234", "Answer: 12345",
        ],
    ),
    (
        "1234",
        [
            "Answer: 1,234", "Answer: 1 234", "Answer: 1234.00", "Answer: 1{,}234", "Answer: 1'234",
            "Antwort: 1.234,00", "Answer: 1\u202f234",
        ],
        [
            "Answer: 1.234", "Answer: 1, 234", "Answer: 234", "Answer: 12345",
        ],
    ),
    (
        "1,2",
        [
            r"\boxed{1,2}", r"\boxed{2,1}", r"\boxed{1, 2}", "Answer: 1 and 2",
        ],
        [
            r"\boxed{1.2}", r"\boxed{12}", r"\boxed{1}",
        ],
    ),
    ("12, 34", [r"\boxed{12,34}", "Answer: 34 and 12"], [r"\boxed{12.34}", "1234"]),
    (
        "-5",
        [
            "Answer: −5", "Answer: –5", "Answer: minus 5", "Answer: negative 5", "Answer: -5 degrees",
            "Answer: −5 °C", "Answer: (-5)", r"\boxed{-5^\circ C}", "Answer: - 5",
        ],
        [
            "Answer: 5", "Answer: plus 5",
        ],
    ),
    (
        "10",
        [
            "Answer: ten", "Answer: 10 (ten)", "Answer: ten apples", "Answer: 10 apples per box",
            "Answer: 10 apples each", r"\boxed{10 \text{ apples/box}}",
        ],
        [
            "Answer: eleven", "Answer: 100",
        ],
    ),
    (
        "yes",
        [
            "Answer: Yes, it is.", "The answer is yes.", "**Yes**", r"\boxed{\text{Yes}}", "Answer: Yes!",
        ],
        [
            "Answer: No", "Answer: no, yes",
        ],
    ),
    ("Mrs. Hilt", ["The answer is Mrs. Hilt.", "Answer: Mrs. Hilt", "Mrs. Hilt"], ["The answer is Mr. Hilt."]),
    (
        "B",
        [
            "The correct answer is B.", "Answer: **B**", "Answer: (B) because it is larger", "**Answer: B. Paris**",
            "The answer is option B", r"\boxed{B}", r"\boxed{\text{B}}", "<answer>B</answer>", "Answer: B) Paris",
            "Correct option: B", "The best choice is (B).", "B",
        ],
        [
            "Answer: A", "Answer: A or B", "The correct answer is C, not B.", "Answer: (A) not (B)",
        ],
    ),
]  # fmt: skip
"""References, responses that are right, and responses that are wrong or cannot be read."""


@pytest.mark.slow(but=1)
@pytest.mark.check(but=40)
@pytest.mark.parametrize(("reference", "right", "wrong"), WRITTEN, ids=[case[0] for case in WRITTEN])
def test_boxed_answers_to_references_in_latex(reference: str, right: list[str], wrong: list[str]) -> None:
    gold = read_reference(reference)
    assert [said for said in right if judge(f"So it is \\boxed{{{said}}}.", gold) != 1] == []
    assert [said for said in wrong if judge(f"So it is \\boxed{{{said}}}.", gold) == 1] == []


@pytest.mark.parametrize(("reference", "right", "wrong"), SAID, ids=[case[0] for case in SAID])
def test_answers_in_usual_words(reference: str, right: list[str], wrong: list[str]) -> None:
    gold = read_reference(reference)
    assert [text for text in right if judge(text, gold) != 1] == []
    assert [text for text in wrong if judge(text, gold) == 1] == []


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("<think>\\boxed{72}</think>\nIt is \\boxed{71}.", 0),
        ("<think>\\boxed{71}</think>\n72", 1),
        ("<think>\\boxed{72}</think>\nI cannot say.", None),
        ("<think>\\boxed{72}</think>\n", None),
        ("<think>a</think><think>\\boxed{71}</think>The answer is 72.", 1),
        ("[THINK]\\boxed{71}[/THINK]\\boxed{72}", 1),
        ("<reasoning>\\boxed{71}</reasoning>\n<answer>72</answer>", 1),
        ("analysis \\boxed{71}<|channel|>final<|message|>\\boxed{72}", 1),
        ("<think>\\boxed{72}", None),
        ("It is 5.\n<think>\\boxed{72}", 0),
        ("[THINK]\\boxed{72}", None),
        ("<|channel|>analysis<|message|>\\boxed{72}", None),
        ("<|channel|>analysis<|message|>\\boxed{71}<|end|><|start|>assistant<|channel|>final<|message|>It is 72.", 1),
        ("<|channel|>final<|message|>72<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>71", 1),
        ("<|channel>thought\n\\boxed{71}<channel|>\\boxed{72}", 1),
    ],
)
def test_the_answer_is_what_follows_the_reasoning(text: str, verdict: int | None) -> None:
    assert judge(text, read_reference("72")) == verdict


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("\\sqrt{2} \\approx 1.414", 1), ("1.414 \\approx \\sqrt{2}", 1), ("x = \\sqrt{2} \\approx 1.41", 1),
        ("\\sqrt{2} \\approx 3.1", None), ("\\sqrt{3} \\approx 1.732", 0), ("x \\approx 1.414", 0),
    ],
)  # fmt: skip
def test_an_approximation_counts_as_its_exact_side(text: str, value: int | None) -> None:
    assert judge(f"\\boxed{{{text}}}", read_reference("\\sqrt{2}")) == value


@pytest.mark.parametrize(
    ("text", "digits"),
    [
        ("six", "6"), ("Seventy two clips", "72 clips"), ("one hundred and five", "105"), ("one", "1"),
        ("two thousand three hundred forty-one", "2341"), ("two thirds", "\\frac{2}{3}"), ("a third", "\\frac{1}{3}"),
        ("three and a half hours", "\\frac{7}{2} hours"), ("twelve million dollars", "12000000 dollars"),
        ("one of them", "one of them"), ("two three", "two three"), ("twelve or thirteen", "twelve or thirteen"),
        ("sixteen-year-old", "sixteen-year-old"), ("tenth", "tenth"), ("none", "none"),
        ("six of 7", "six of 7"), ("hundred", "hundred"), ("thousand and one", "thousand and one"),
    ],
)  # fmt: skip
def test_numbers_in_words(text: str, digits: str) -> None:
    assert in_digits(text) == digits
