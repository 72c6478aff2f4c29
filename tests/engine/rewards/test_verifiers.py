"""Built-in verifiers: right, wrong, and not to be parsed; code by its tests; and verdicts that leave a response out."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolltree.engine.data.segment import LeafStatus
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.errors import UserError
from rolltree.engine.rewards import RewardItem, RewardPool, RewardResult
from rolltree.engine.rewards.bounded import Bounded
from rolltree.engine.rewards.code.verifier import extract_code
from rolltree.engine.rewards.verdicts import put_rewards
from rolltree.engine.settings import RewardConfig, TaskConfig


def judged(verifier: str, texts: list[str], answer: object, **options: object) -> list[tuple[float | None, str | None]]:
    config = RewardConfig(verifier=verifier, workers=1, options=options, timeout_s=10.0)
    with RewardPool(config, (TaskConfig(name="chain_sum"),)) as pool:
        found = pool.score([RewardItem(text, {"answer": answer, "task_index": 0}) for text in texts])
    assert all(verdict.reason is None for verdict in found), found
    return [(verdict.value, verdict.unparsed) for verdict in found]


NO = "no_answer"


@pytest.mark.slow(but=1)
@pytest.mark.check(but=1)
@pytest.mark.parametrize(
    ("verifier", "options", "texts", "verdicts"),
    [
        ("math", {}, ["\\boxed{\\frac{10}{2}}", "Answer: 6", "no idea"], [(1, None), (0, None), (0, NO)]),
        ("exact", {}, ["Answer: 5", "5", "Answer: 6", "6"], [(1, None), (1, None), (0, None), (0, NO)]),
        ("task", {}, ["Answer: 5", "Answer: 6", "5"], [(1, None), (0, None), (0, NO)]),
        (
            "regex",
            {"pattern": r"so (\w+)"},
            ["so 4, no, so 5", "so 5, no, so 4", "5"],
            [(1, None), (0, None), (0, NO)],
        ),
        ("regex", {"pattern": r"\d"}, ["4 5", "5 4", "five"], [(1, None), (0, None), (0, NO)]),
    ],
)
def test_what_cannot_be_parsed_is_not_what_is_wrong(
    verifier: str, options: dict[str, object], texts: list[str], verdicts: list[tuple[float, str | None]]
) -> None:
    assert judged(verifier, texts, "5", **options) == verdicts


def test_regular_expressions_may_ignore_case() -> None:
    assert judged("regex", ["so YES"], "Yes", pattern="SO (.*)", ignore_case=True) == [(1, None)]


ADD = "```python\ndef add(a, b):\n    return a + b\n```"
TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(2, 2) == 4", "assert add('a', 'b') == 'ab'"]


@pytest.mark.slow
def test_the_reward_of_code_is_the_share_of_tests_it_passes() -> None:
    texts = [
        f"First\n```python\n1 / 0\n```\nthen\n{ADD}\nthat is all",
        "```py\ndef add(a, b):\n    return abs(a + b) if a else 0\n```",
        "```\nadd = lambda a, b: 3\n```",
        "```python\ndef add(a, b) return a + b\n```",
        "def add(a, b): return a + b",
        "```python\nimport os\nos._exit(0)\n```",
        "```python\nimport sys\nsys.exit()\n```",
        "```python\nwhile True: pass\n```",
        "```python\nopen('/etc/passwd')\n```",
        "```python\ndef add(a, b):\n    if a == 2: raise KeyboardInterrupt\n    return a + b\n```",
    ]
    options = {"test_s": 0.3}
    assert judged("code", texts, TESTS, **options) == [
        (1, None),
        (0.75, None),
        (0.25, None),
        (0, "syntax_error"),
        (0, "no_code"),
        (0, None),
        (0, None),
        (0, None),
        (0, None),
        (0.75, None),
    ]


def test_programs_are_judged_by_their_output() -> None:
    tests = json.dumps([{"input": "1 2\n", "output": "3"}, {"input": "5 7\n", "output": "12\n"}])
    texts = [
        "```python\nprint(sum(map(int, input().split())), ' ')\n```",
        "```python\nprint(3)\nexit()\n```",
        "```python\nprint(input())\n```",
        "```python\nprint(3)\nraise ValueError\n```",
    ]
    assert judged("code", texts, tests) == [(1, None), (0.5, None), (0, None), (0, None)]


@pytest.mark.slow
def test_no_program_keeps_the_verdict_waiting() -> None:
    """Many tests that never end take their share of the verdict's time, and have failed: it is no failure to judge."""
    config = RewardConfig(verifier="code", workers=1, timeout_s=2.0)
    with RewardPool(config) as pool:
        (found,) = pool.score([RewardItem("```python\nwhile True: pass\n```", {"answer": TESTS * 10})])
        assert pool.note.startswith("Code in responses runs in ")
    assert found == RewardResult(0.0, None)


def test_problems_without_tests_are_failures() -> None:
    with RewardPool(RewardConfig(verifier="code", workers=1)) as pool:
        found = pool.score([RewardItem(ADD, {"answer": answer}) for answer in ("[]", 3, [{"input": "a"}])])
    assert all(verdict.value is None and "tests" in str(verdict.reason) for verdict in found)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```", "a\n"),
        ("```\na\n```\n```bash\nls\n```", "a\n"),
        ("```python\na", None),
        ("    ```python\n    a\n    ```", "a\n"),
        ("``` py \na\n```\n```python3\nb\n```", "b\n"),
        ("Run\n```bash\nls\n```\nwhere a.py is\n```python\na\n```", "a\n"),
        ("```json\n3\n```\nand\n```Python\na\n```\nprints\n```text\n6\n```", "a\n"),
        ("```cpp\nint a;\n```\n```PYTHON3\na\n```", "a\n"),
        ("```python\na\n```\nprints\n```\n6\n```", "a\n"),
        ("```python\r\na\r\nb\r\n```\r\n", "a\nb\n"),
        ("~~~python\na\n~~~", "a\n"),
        ("~~~~py\na\n```\nb\n~~~\n~~~~", "a\n```\nb\n~~~\n"),
        ("1. Do\n   ```python\n   if a:\n       b\n   ```\n2. Run", "if a:\n    b\n"),
        ("- one\n  - two\n\n    ```py\n    a\n    ```", "a\n"),
        ("1. Sloppy:\n   ```python\na\nb\n   ```\nend", "a\nb\n"),
        ("> ```python\n> a\n> ```", "a\n"),
        ("<think>\nhm\n</think>\n```python\na\n```", "a\n"),
        ("<answer>\n```python\na\n```\n</answer>", "a\n"),
        ("```{.python}\na\n```", "a\n"),
        ("```python title=a.py\na\n```", "a\n"),
        ('```python\ns = """\n    ```\n"""\n```', 's = """\n    ```\n"""\n'),
        ("```python\na\n```\n```python\nb", "a\n"),
        ("```python\n```", ""),
        ("\t```python\n\ta\n\t```", "a\n"),
        ("````markdown\n```python\nb\n```\n````\n```python\na\n```", "a\n"),
        ("````markdown\nText\n```python\na\n```\n````", "a\n"),
        ("```python3.11\na\n```", "a\n"),
        ("```python:main.py\na\n```", "a\n"),
        ("```python{1,3}\na\n```", "a\n"),
        ("~~~ { .python .numberLines }\na\n~~~", "a\n"),
        ("```language-python\na\n```", "a\n"),
        ("```python-repl\n>>> b\n```\n```py2\na\n```", "a\n"),
        ("```python\na\n```\n```pycon\n>>> b\n```", "a\n"),
        ("> 1. x\n>    ```python\n>    a\n>    ```", "a\n"),
        ("<details>\n\n```python\na\n```\n</details>", "a\n"),
        ("```python\na\n```````", "a\n"),
        ("```python\ra\r```\r", "a\n"),
        ("\ufeff```python\na\n```", "a\n"),
        ("The code is ```python\na\n```", "a\n"),
        ("```python\na```", "a\n"),
        ("<think>\n```python\nb\n```\n</think>\n```python\na\n```", "a\n"),
        ("<think>\n```python\nb\n</think>\n```python\na\n```", "a\n"),
        ("<think>\n```python\nb\n```\n</think>\nI have none.", None),
        ("<think>\n```python\na\n```\n</think>\n", None),
        ("```pyramid\nb\n```", None),
        ("```bash\nls\n```", None),
        ("`python a`", None),
        ("no code", None),
    ],
)
def test_the_last_closed_block_of_python_is_the_program(text: str, code: str | None) -> None:
    assert extract_code(text) == code


@pytest.mark.check
def test_a_program_after_other_blocks_is_run() -> None:
    program = "```python\nprint(int(input()) * 2)\n```\n"
    texts = [
        program,
        f"Run it by\n```bash\npython a.py\n```\nwhere a.py is\n{program}",
        f"Input:\n```json\n3\n```\nProgram:\n{program}Output:\n```\n6\n```\n",
        program.replace("python", "Python"),
        program.replace("\n", "\r\n"),
        program.replace("```", "~~~"),
        program.replace("* 2", "* 3"),
    ]
    tests = [{"input": "3", "output": "6"}]
    assert judged("code", texts, tests) == [(1, None)] * 6 + [(0, None)]
    assert judged("code", texts[:1], {"ground_truth": '{"inputs": ["3"], "outputs": ["6"]}'}) == [(1, None)]


def test_exact_answers_are_compared_without_what_surrounds_them() -> None:
    texts = ["Answer: **yes**", "<answer>yes.</answer>", "\\boxed{yes}", "The answer is yes.", "#### yes", "yes"]
    wrong = ["Answer: yes or no", "<answer>no</answer>", "Answer: yes\nAnswer: no", "Answer: yes, sir"]
    assert judged("exact", texts, "yes") == [(1, None)] * 6
    assert judged("exact", wrong, "yes") == [(0, None)] * 4
    assert judged("exact", ["#### Yes it is\nyes or so", "yes!"], "yes") == [(0, NO)] * 2
    assert judged("exact", ["Answer: 72"], "48 + 24 = 72\n#### 72") == [(1, None)]


@pytest.mark.parametrize(
    ("verifier", "options", "needle"),
    [
        ("math", {"strict": True}, "no option 'strict'"),
        ("regex", {"pattern": "("}, "no regular expression"),
        ("regex", {}, "pattern"),
        ("code", {"memory": 1}, "no option 'memory'"),
        ("code", {"memory_mb": 0}, "memory_mb"),
        ("mine.py:judge", {"by": 2, "too": 1}, "no option 'too'"),
    ],
)
def test_options_are_checked_before_a_run(
    verifier: str, options: dict[str, object], needle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def judge(text, entry, by): return by")
    with pytest.raises(UserError, match=needle):
        RewardPool(RewardConfig(verifier=verifier, options=options, workers=1)).__enter__()


JUDGE = """
def judge(text, entry, unit=1.0):
    if text == "skip":
        return None
    if text == "unsure":
        return {"reward": None, "skipped": "unsure"}
    if text == "form":
        return {"reward": -1.0, "unparsed": "form", "length": 4}
    if text == "both":
        return {"reward": 1.0, "skipped": "unsure"}
    if text == "word":
        return {"reward": 1.0, "unparsed": "No answer!"}
    return unit
"""


def test_a_verifier_may_leave_a_response_out(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(JUDGE)
    config = RewardConfig(verifier=f"{path}:judge", workers=1, options={"unit": 0.5})
    with RewardPool(config) as pool:
        texts = ["skip", "unsure", "form", "both", "word", "fine"]
        found = pool.score([RewardItem(text, {}) for text in texts])
    assert found[0] == RewardResult(None, None, skipped="no_verdict")
    assert found[1] == RewardResult(None, None, skipped="unsure")
    assert found[2] == RewardResult(-1.0, None, {"length": 4.0}, unparsed="form")
    assert "skipped a response" in str(found[3].reason)
    assert "must be a word" in str(found[4].reason)
    assert found[5] == RewardResult(0.5, None)


def test_what_is_left_out_has_no_reward_whatever_becomes_of_failures() -> None:
    tree = TokenTree.from_sequences([1, 2], [[3], [4], [5]])
    verdicts = [RewardResult(1.0, None), RewardResult(None, None, skipped="unsure"), RewardResult(None, "died")]
    put_rewards(tree, verdicts, str, failed=0.0)
    assert np.array_equal(tree.rewards["reward"], [1.0, np.nan, 0.0], equal_nan=True)
    put_rewards(tree, verdicts, str)
    assert np.array_equal(tree.rewards["reward"], [1.0, np.nan, np.nan], equal_nan=True)
    assert [LeafStatus(s) for s in tree.status] == [LeafStatus.STOP, LeafStatus.STOP, LeafStatus.FAILED]


def test_markdown_in_markdown_is_read_to_its_program() -> None:
    inner, none = "```python\na\n```", "```bash\nls\n```"
    for width in range(4, 8):
        inner, none = (f"{'`' * width}md\n{text}\n{'`' * width}" for text in (inner, none))
    assert extract_code(inner) == "a\n"
    assert extract_code(none) is None
    for width in range(8, 60):  # each level was read three times in each reading of the one around it
        none = f"{'`' * width}md\n{none}\n{'`' * width}"
    assert extract_code(none) is None


def test_one_response_fails_no_verifier_and_an_entry_does() -> None:
    def verify(text: str, entry: dict[str, Any]) -> float:
        if text == "loop":
            while True:
                with contextlib.suppress(Exception):
                    time.sleep(0)
        return float(text) / entry["answer"]

    bounded = Bounded(verify, lambda entry: 1 / entry["answer"], 0.3)
    assert bounded("4", {"answer": 4}) == 1.0
    assert bounded("four", {"answer": 4}) == {"reward": 0.0, "unparsed": "unreadable"}
    assert bounded("loop", {"answer": 4}) == {"reward": 0.0, "unparsed": "too_slow"}
    with pytest.raises(ZeroDivisionError):
        bounded("4", {"answer": 0})


@pytest.mark.slow
def test_a_response_takes_no_memory_without_bounds() -> None:
    """A list of 8 GB is made by one call, which no time limit interrupts."""
    entry = {
        "answer": "x**2 + C",
        "metadata": {"source_dataset": "simple_integration", "variable": "x", "integrand": "2*x"},
    }
    texts = ["<answer>[[]] * 10 ** 9</answer>", "<answer>x**2 + C</answer>"]
    with RewardPool(RewardConfig(verifier="task", workers=1), [TaskConfig(name="simple_integration")]) as pool:
        bomb, right = pool.score([RewardItem(text, {**entry, "task_index": 0}) for text in texts])
    assert bomb.value == 0.0
    assert right.value == 1.0
