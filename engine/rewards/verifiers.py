"""What a verifier is, and the built-in ones: functions of a response's text and its problem's entry.

A verdict is a number; or None, to leave the response out of credit; or a dict with a ``reward`` (a number or None),
further numbers by name, and maybe

- ``spans``: a list of ``(begin, end, value)``, rewards of characters of the text;
- ``unparsed``: a word that says why there was nothing to judge (the reward counts all the same, usually 0), so that a
  response in the wrong form is counted apart from a wrong answer;
- ``skipped``: a word that says why the reward is None.

Imports nothing of rolltree: the verifiers' processes (`worker.py`) load it by itself.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

Verifier = Callable[[str, dict[str, Any]], Any]

WORD = re.compile(r"[a-z][a-z0-9_]{0,39}")
"""What ``unparsed`` and ``skipped`` may be: part of a metric's name."""
NO_ANSWER: dict[str, Any] = {"reward": 0.0, "unparsed": "no_answer"}
BUDGET = 0.8
"""Share of the time limit of a verdict that a response's code may take."""


def load_verifier(
    name: str, tasks: list[tuple[str, dict[str, Any]]], options: dict[str, Any], timeout_s: float
) -> tuple[Verifier, str]:
    """The verifier that ``name`` stands for, and what the user should know of it.

    Raises:
        ValueError: it has no such option, or refuses one's value.
    """
    if name == "task":
        _check_options(name, {}, options)
        return _task_verifier(tasks), ""
    if name in BUILT_IN:
        make = BUILT_IN[name]
        _check_options(name, inspect.signature(make).parameters, options)
        return make(**options), ""
    if name == "code":
        _check_options(
            name, inspect.signature(CodeVerifier.__init__).parameters, {"self": 0, "timeout_s": 0, **options}
        )
        code = CodeVerifier(timeout_s, **options)
        return code, f"Code in responses runs in {code.containment}"
    verify = _user_verifier(name)
    _check_options(name, inspect.signature(verify).parameters, options)
    return (partial(verify, **options) if options else verify), ""


def _check_options(name: str, known: Any, options: dict[str, Any]) -> None:
    if any(getattr(p, "kind", None) is inspect.Parameter.VAR_KEYWORD for p in dict(known).values()):
        return
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(f"it has no option '{unknown[0]}' (reward.options)")


def _math_verifier() -> Verifier:
    import math_verify

    def verify(text: str, entry: dict[str, Any]) -> Any:
        gold = parse(str(entry["answer"]))
        if not gold:
            raise ValueError(f"math-verify cannot read the reference answer {entry['answer']!r}")
        found = parse(text)
        if not found:
            return NO_ANSWER
        return float(math_verify.verify(gold, found, timeout_seconds=None))  # gold first: the order matters

    def parse(text: str) -> list[Any]:
        """A marked answer alone (GSM8K's references end in `#### 72`), else whatever math-verify finds."""
        answer = extract_answer(text)
        # No time limit here: the pool has a harder one.
        return math_verify.parse(text if answer is None else f"\\boxed{{{answer}}}", parsing_timeout=None)

    return verify


def _exact_verifier() -> Verifier:
    def verify(text: str, entry: dict[str, Any]) -> Any:
        marked = extract_answer(text)
        if (text.strip() if marked is None else marked) == str(entry["answer"]).strip():
            return 1.0
        return NO_ANSWER if marked is None else 0.0

    return verify


def _regex_verifier(pattern: str, ignore_case: bool = False) -> Verifier:
    """The last match of ``pattern``, its first group if it has one, is the answer."""
    try:
        compiled = re.compile(pattern, re.DOTALL | (re.IGNORECASE if ignore_case else 0))
    except re.error as error:
        raise ValueError(f"its option 'pattern' is no regular expression: {error}") from None

    def verify(text: str, entry: dict[str, Any]) -> Any:
        matches = list(compiled.finditer(text))
        if not matches:
            return NO_ANSWER
        said, wanted = matches[-1][1 if compiled.groups else 0] or "", str(entry["answer"])
        if ignore_case:
            said, wanted = said.casefold(), wanted.casefold()
        return float(said.strip() == wanted.strip())

    return verify


BUILT_IN: dict[str, Callable[..., Verifier]] = {
    "math": _math_verifier,
    "exact": _exact_verifier,
    "regex": _regex_verifier,
}


def _task_verifier(tasks: list[tuple[str, dict[str, Any]]]) -> Verifier:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of cellpylib, which it imports
        import reasoning_gym

    datasets = [reasoning_gym.create_dataset(task, **options) for task, options in tasks]

    def verify(text: str, entry: dict[str, Any]) -> Any:
        answer = extract_answer(text)
        value = datasets[entry["task_index"]].score_answer(answer, entry)
        return value if answer is not None else NO_ANSWER | {"reward": value}

    return verify


def _user_verifier(name: str) -> Verifier:
    file, _, function = name.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    sys.path.insert(0, str(path.parent.resolve()))
    module = load_file(path.stem, path)
    verify = getattr(module, function, None)
    if not callable(verify):
        raise AttributeError(f"{path} has no function {function}")
    return verify


def load_file(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# -- code --------------------------------------------------------------------------------------------------------------


class CodeVerifier:
    """The share of tests that the last fenced block of a response passes, run in a sandbox.

    The problem's answer is a list of tests, or JSON of one. A test is a Python text that runs behind the code and
    passes if it gets to its end (``assert add(1, 2) == 3``); or ``{"input": ..., "output": ...}``, which gives the
    program its standard input and compares its standard output, blanks at line ends and empty last lines aside. The
    outputs expected never enter the sandbox. An assertion is judged in the process that the response controls: ending
    that process passes no test, but code that sets out to forge the sign of success, or objects equal to everything,
    can deceive it.

    Args:
        timeout_s: of the verdict; tests that there is no time for have failed.
        test_s: wall and processor time of one test.
    """

    def __init__(
        self,
        timeout_s: float,
        test_s: float = 2.0,
        memory_mb: int = 512,
        processes: int = 16,
        output_kb: int = 64,
        files_mb: int = 64,
    ) -> None:
        self._module = load_file("rolltree_sandbox", Path(__file__).parents[1] / "sandbox" / "sandbox.py")
        self._limits = partial(
            self._module.Limits, memory_mb=memory_mb, processes=processes, output_kb=output_kb, files_mb=files_mb
        )
        self._test_s, self._budget_s = test_s, BUDGET * timeout_s
        self._sandbox = self._module.Sandbox(self._limits(wall_s=test_s, cpu_s=test_s))
        self.containment: str = self._sandbox.containment

    def __call__(self, text: str, entry: dict[str, Any]) -> Any:
        tests = _tests(entry["answer"])
        code = extract_code(text)
        if code is None:
            return {"reward": 0.0, "unparsed": "no_code"}
        deadline, passed = time.monotonic() + self._budget_s, 0
        for test in tests:
            left = min(self._test_s, deadline - time.monotonic())
            if left <= 0:
                break
            limits = self._limits(wall_s=left, cpu_s=left)
            if isinstance(test, str):
                run = self._sandbox.run(code, then=test, limits=limits)
                passed += run.status == "ok"
            else:
                run = self._sandbox.run(code, stdin=str(test["input"]), limits=limits)
                passed += run.status in ("ok", "exited") and _lines(run.stdout) == _lines(str(test["output"]))
            if run.status == "syntax":
                return {"reward": 0.0, "unparsed": "syntax_error"}
            if run.status == "died":
                raise RuntimeError("the sandbox died")
        return passed / len(tests)


def _tests(answer: Any) -> list[Any]:
    """
    Raises:
        ValueError: these are no tests.
    """
    found = json.loads(answer) if isinstance(answer, str) and answer.lstrip().startswith("[") else answer
    found = [found] if isinstance(found, str) else found
    for test in found if isinstance(found, list) else [None]:
        if not isinstance(test, str) and not (isinstance(test, dict) and {"input", "output"} <= set(test)):
            raise ValueError("the problem's answer is no list of tests, each a text or a dict of input and output")
    if not found:
        raise ValueError("the problem has no tests")
    return list(found)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


FENCE = re.compile(r"^```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


def extract_code(text: str) -> str | None:
    """The last fenced block of a response that is closed and of Python or no named language; None without one."""
    found = FENCE.findall(text)
    return found[-1] if found else None


# -- the answer in a response ------------------------------------------------------------------------------------------


TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
LINE = re.compile(r"(?:Answer:|####)\s*(.*?)(?=</answer>|\n|$)")


def extract_answer(text: str) -> str | None:
    r"""The answer a response marks as final; None if it marks none.

    The last of these marks counts: ``<answer>...</answer>``, ``\boxed{...}`` (braces balanced), and the line that
    follows ``Answer:`` or ``####``. An ``<answer>`` or ``\boxed{`` that is never closed marks nothing.
    """
    found = [(match.start(), match[1]) for pattern in (TAGGED, LINE) for match in pattern.finditer(text)]
    for match in re.finditer(r"\\boxed\{", text):
        if (end := _closing_brace(text, match.end())) >= 0:
            found.append((match.start(), text[match.end() : end]))
    return max(found)[1].strip() if found else None


def _closing_brace(text: str, start: int) -> int:
    """Index of the brace that closes one opened before ``start``; -1 if none does."""
    depth = 1
    for index in range(start, len(text)):
        depth += (text[index] == "{") - (text[index] == "}")
        if depth == 0:
            return index
    return -1
