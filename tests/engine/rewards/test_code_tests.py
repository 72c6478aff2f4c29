"""Tests of programs in the forms of public sets: right programs get 1, wrong ones 0, unknown forms are refused.

The rows have the sets' own layout: Eurus-2 / PRIME / TACO / APPS (lists beside ``fn_name``), DeepCoder and open-r1 (a
type in each test), LiveCodeBench (``testtype``, arguments by line), verl (``assert_case``), KodCode (pytest).
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rolltree.engine.rewards import RewardItem, RewardPool
from rolltree.engine.rewards.code.harness import same_output, same_value, with_prelude
from rolltree.engine.rewards.code.tests import check_text, read_tests
from rolltree.engine.settings import RewardConfig


def program(source: str) -> str:
    return f"```python\n{source}\n```"


ADD = program("def add(a, b):\n    return a + b")
MINUS = program("def add(a, b):\n    return a - b")
SOLUTION = program("class Solution:\n    def add(self, a, b):\n        return a + b")
READS = program("a, b = map(int, input().split())\nprint(a + b)")
READS_MINUS = program("a, b = map(int, input().split())\nprint(a - b)")


def packed(value: Any) -> str:
    return base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()


KODCODE = """from solution import add
import pytest

def test_positive():
    assert add(1, 2) == 3

@pytest.mark.parametrize("a, b, wanted", [(0, 0, 0), (-1, 1, 0), (2, 5, 7)])
def test_many(a, b, wanted):
    assert add(a, b) == wanted

def test_text_and_number():
    with pytest.raises(TypeError):
        add(1, "a")

class TestFloats:
    def setup_method(self):
        self.small = 0.1

    def test_sum(self):
        assert add(self.small, 0.2) == pytest.approx(0.3)
"""
UNITTEST = """import unittest
from solution import add

class AddTest(unittest.TestCase):
    def test_sum(self):
        self.assertEqual(add(1, 2), 3)
"""
FORMS: dict[str, tuple[Any, str, str]] = {
    "Eurus, function": ({"fn_name": "add", "inputs": [[1, 2], [5, 5]], "outputs": [3, 10]}, ADD, MINUS),
    "TACO, results in lists": ({"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}, ADD, MINUS),
    "APPS, as JSON": (json.dumps({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}), SOLUTION, MINUS),
    "APPS, standard input": ({"inputs": ["1 2\n"], "outputs": ["3\n"]}, READS, READS_MINUS),
    "TACO, lines in lists": ({"inputs": [["1 2"]], "outputs": [["3"]]}, READS, READS_MINUS),
    "DeepCoder, function": ([{"type": "functional", "fn_name": "add", "input": [1, 2], "output": 3}], ADD, MINUS),
    "open-r1, function": ([{"type": "function_call", "fn_name": "add", "input": "[1, 2]", "output": "3"}], ADD, MINUS),
    "open-r1, standard input": (
        [{"type": "stdin_stdout", "fn_name": None, "input": "1 2\n", "output": "3\n"}],
        READS,
        READS_MINUS,
    ),
    "LiveCodeBench, function": (
        json.dumps(
            [{"input": "1\n2", "output": "3", "testtype": "functional", "metadata": json.dumps({"func_name": "add"})}]
        ),
        SOLUTION,
        MINUS,
    ),
    "LiveCodeBench, standard input": (
        json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]),
        READS,
        READS_MINUS,
    ),
    "verl": ({"ground_truth": json.dumps({"assert_case": ["assert add(1, 2) == 3"]})}, ADD, MINUS),
    "verl, empty lists beside": (
        {"assert_case": ["assert add(1, 2) == 3"], "inputs": [""], "outputs": [None]},
        ADD,
        MINUS,
    ),
    "assertions": (["assert add(1, 2) == 3", "assert add(2, 2) == 4"], ADD, program("def add(a, b):\n    return 0")),
    "packed": (packed([{"input": "1 2", "output": "3"}]), READS, READS_MINUS),
    "KodCode": (KODCODE, ADD, MINUS),
    "unittest": (UNITTEST, ADD, MINUS),
    "arrays of parquet": (
        {"inputs": np.array(["1 2"], object), "outputs": np.array(["3"], object)},
        READS,
        READS_MINUS,
    ),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(RewardConfig(verifier="code", workers=1, timeout_s=60)) as pool:
        yield pool


def rewards(pool: RewardPool, answer: Any, *texts: str) -> list[float | None]:
    return [verdict.value for verdict in pool.score([RewardItem(text, {"answer": answer}) for text in texts])]


@pytest.mark.parametrize("name", FORMS)
def test_every_form_tells_right_from_wrong(pool: RewardPool, name: str) -> None:
    answer, right, wrong = FORMS[name]
    assert rewards(pool, answer, right, wrong) == [1.0, 0.0]


REFUSED: dict[str, tuple[Any, str]] = {
    "a key that is not known": ([{"input": "1", "output": "1", "checker": "any"}], "the key 'checker'"),
    "a type that is not known": ([{"input": "1", "output": "1", "type": "interactive"}], "type 'interactive'"),
    "a function without a name": ([{"input": "1", "output": "1", "testtype": "functional"}], "names no function"),
    "two functions": ([{"input": [1], "output": 1, "fn_name": "a", "func_name": "b"}], "several functions"),
    "standard input with a function": ([{"input": "", "output": "", "type": "stdin", "fn_name": "a"}], "names the fun"),
    "arguments that are no list": ({"fn_name": "add", "inputs": ["1"], "outputs": [3]}, "no list"),
    "arguments that are no JSON": ({"fn_name": "add", "inputs": ["1,"], "outputs": [3]}, "no JSON"),
    "fewer outputs": ({"inputs": ["1", "2"], "outputs": ["1"]}, "as many 'outputs'"),
    "a pickle": (base64.b64encode(zlib.compress(b"\x80\x04]\x94K\x01a.")).decode(), "pickle, which is never loaded"),
    "a text that asserts nothing": (["add"], "asserts nothing and calls nothing"),
    "invalid Python": (["assert add(1,"], "not valid Python"),
    "a package": (["import numpy\nassert add(1, 2) == numpy.int64(3)"], "imports 'numpy'"),
    "a fixture": ("def test_a(tmp_path):\n    assert tmp_path", "the fixture 'tmp_path'"),
    "more of pytest": ("import pytest\n@pytest.mark.skip\ndef test_a():\n    assert 1", "pytest.mark.skip"),
    "an asynchronous test": ("async def test_a():\n    assert 1", "asynchronous test 'test_a'"),
    "a number": (3, "type int"),
    "no tests": ([], "no tests"),
    "something else": ([{"question": "1"}], "no known form"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_unknown_is_refused_by_a_sentence(name: str) -> None:
    answer, why = REFUSED[name]

    def read() -> None:
        for test in read_tests(answer):
            check_text(test)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=why):
        read()


def test_unreadable_tests_are_told_before_a_run_and_never_get_0(pool: RewardPool) -> None:
    entries = [{"answer": answer} for answer, _ in REFUSED.values()]
    assert all(pool.check(entries))
    assert rewards(pool, REFUSED["a type that is not known"][0], READS) == [None]


def test_names_of_the_sets_harnesses_are_there_for_functions_only(pool: RewardPool) -> None:
    source = "from __future__ import annotations\nclass Solution:\n    def most(self, x: List[int]) -> int:\n"
    source += "        return Counter(x).most_common(1)[0][0] + floor(0.5) + pow(2, 3, 8)"
    answer = {"fn_name": "most", "inputs": [[[1, 2, 2]]], "outputs": [2]}
    assert rewards(pool, answer, program(source)) == [1.0]
    assert rewards(pool, ["assert Counter([1])"], ADD) == [0.0]
    assert with_prelude("def (") == "def ("


def test_standard_input_by_name_threads_and_exit_functions(pool: RewardPool) -> None:
    texts = [
        "print(sum(map(int, open('/dev/stdin').read().split())))",
        "import threading, time\ndef late():\n    time.sleep(0.1)\n    print(3)\nthreading.Thread(target=late).start()",
        "import threading\nthreading.Thread(target=lambda: print(3)).start()\nraise SystemExit",
        "import atexit\natexit.register(print, 3)",
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(9), print(3)), daemon=True).start()",
    ]
    assert rewards(pool, [{"input": "1 2", "output": "3"}], *map(program, texts)) == [1.0, 1.0, 1.0, 1.0, 0.0]


def test_a_test_that_wants_much_output_gets_room(pool: RewardPool) -> None:
    answer = [{"input": "", "output": "7\n" * 200_000}]
    assert rewards(pool, answer, program("print('7\\n' * 200000)"), program("print('7\\n' * 400000)")) == [1.0, 0.0]


@pytest.mark.check
def test_all_tests_or_their_share_tolerance_and_packages() -> None:
    half = ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]
    options = {"score": "all", "tolerance": 1e-3, "packages": ["numpy"]}
    with RewardPool(RewardConfig(verifier="code", workers=1, timeout_s=60, options=options)) as pool:
        assert rewards(pool, half, ADD) == [0.0]
        assert rewards(pool, half[:1], ADD) == [1.0]
        third = program("print(1 / 3)")
        assert rewards(pool, [{"input": "", "output": "0.3334"}], third) == [1.0]
        assert rewards(pool, [{"input": "", "output": "0.35"}], third) == [0.0]
        numpy = program("import numpy as np\ndef add(a, b):\n    return np.add(a, b)")
        assert rewards(pool, {"fn_name": "add", "inputs": [[[1, 2], [3, 4]]], "outputs": [[4, 6]]}, numpy) == [1.0]
    with RewardPool(RewardConfig(verifier="code", workers=1, timeout_s=60)) as pool:
        assert rewards(pool, half, ADD) == [0.5]
        assert rewards(pool, {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}, numpy) == [0.0]


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        ([1, 2], (1, 2), True),
        (3, [3], True),
        ([3], [3], True),
        ([1], 1, False),
        ({"1": 2}, {1: 2}, True),
        (True, 1, False),
        (1.0, 1, True),
        (0.30000000000000004, 0.3, False),
        ("3", 3, False),
    ],
)
def test_results_are_compared_as_the_sets_compare_them(found: Any, wanted: Any, same: bool) -> None:
    assert same_value(found, wanted, 0.0) == same


def test_a_tolerance_is_for_decimals_alone() -> None:
    assert same_output("1.0001 a\n", "1.0 a", 1e-3)
    assert not same_output("1001", "1000", 1e-2)
    assert not same_output("1.0001", "1.0", 0.0)
    assert not same_output("a", "1.0", 1e-2)
    assert same_value([2.0001], [2.0], 1e-3)
    assert not same_value(2001, 2000, 1e-2)
