"""Integers of more digits than Python converts by default, in programs, tests, tools and answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rolltree.engine.programs.chat.toolbox import PythonTool
from rolltree.engine.rewards import RewardItem, RewardPool, RewardResult
from rolltree.engine.rewards.code.harness import same_value
from rolltree.engine.rewards.references import digits, reference_text
from rolltree.engine.settings import RewardConfig

BIG = 2**20000
TEXT = digits(BIG)
LONG = "7" * 5000


def power(source: str = "2**n") -> str:
    return f"```python\ndef f(n):\n    return {source}\n```"


def prints(source: str) -> str:
    return f"```python\nprint({source})\n```"


SUM = sum(map(int, TEXT))
PYTEST = f"from solution import f\n\ndef test_a():\n    assert sum(map(int, str(f(20000)))) == {SUM}\n"
PROGRAMS: list[tuple[str, Any, float]] = [
    (prints("2**20000"), [{"input": "", "output": TEXT}], 1),
    (prints("2**20000 + 1"), [{"input": "", "output": TEXT}], 0),
    (prints("int(input()) % 7"), [{"input": LONG, "output": "0"}], 1),
    (prints("f'{3**10000}'[:3]"), [{"input": "", "output": "163"}], 1),
    (power(), {"fn_name": "f", "inputs": [[20000]], "outputs": [BIG]}, 1),
    (power("2**n + 1"), {"fn_name": "f", "inputs": [[20000]], "outputs": [BIG]}, 0),
    (power("n % 7"), {"fn_name": "f", "inputs": [[BIG]], "outputs": [4]}, 1),
    (power(), f'{{"fn_name": "f", "inputs": ["[20000]"], "outputs": ["{TEXT}"]}}', 1),
    (power("n % 7"), f'[{{"type": "functional", "fn_name": "f", "input": [{TEXT}], "output": 4}}]', 1),
    (power(), [f"assert f(20000) == {TEXT}"], 1),
    (power(), PYTEST, 1),
]


def test_programs_and_tests_of_long_integers() -> None:
    with RewardPool(RewardConfig(verifier="code", workers=1)) as pool:
        entries = [{"answer": answer} for _, answer, _ in PROGRAMS]
        assert pool.check(entries) == [None] * len(entries)
        found = pool.score([RewardItem(text, entry) for (text, _, _), entry in zip(PROGRAMS, entries, strict=True)])
    assert found == [RewardResult(right, None) for _, _, right in PROGRAMS]


def test_a_tool_prints_a_long_integer() -> None:
    assert PythonTool(most_characters=7000)("print(2**20000)") == TEXT


ANSWERS: dict[str, list[tuple[Any, str, float]]] = {
    "math": [
        (LONG, rf"\boxed{{{LONG}}}", 1),
        (LONG[:-1] + "8", rf"\boxed{{{LONG}}}", 0),
        ("7", f"The answer is {LONG}", 0),
        ("7", rf"\boxed{{0.{LONG}}}", 0),
        (TEXT, r"\boxed{2^{20000}}", 1),
        ("2^{20000}", rf"\boxed{{{TEXT}}}", 1),
        (BIG, rf"\boxed{{{TEXT}}}", 1),
    ],
    "exact": [(BIG, f"Answer: {TEXT}.0", 1), (7, f"Answer: {TEXT}.5", 0)],
}


@pytest.mark.check(but=1)
@pytest.mark.parametrize("verifier", ["exact", "math"])
def test_answers_of_many_digits(verifier: str) -> None:
    with RewardPool(RewardConfig(verifier=verifier, workers=1, timeout_s=60.0)) as pool:
        found = pool.score([RewardItem(said, {"answer": answer}) for answer, said, _ in ANSWERS[verifier]])
    assert found == [RewardResult(right, None) for *_, right in ANSWERS[verifier]]


def test_a_result_that_no_float_holds_is_compared() -> None:
    assert not same_value(10**400, 7.5, 0.1)
    assert not same_value([float("nan")], [7.5], 0.1)


def test_references_of_any_length() -> None:
    assert len(reference_text(BIG)) == 6021
    assert [digits(number) for number in (0, -5, 10**30)] == [str(number) for number in (0, -5, 10**30)]
    assert json.loads(digits(10**40)) == 10**40
