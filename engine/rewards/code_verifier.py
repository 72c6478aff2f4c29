"""Programs in responses, judged by tests in a sandbox.

Imports nothing of rolltree, as `verifiers.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from .verifiers import load_file

BUDGET = 0.8
"""Share of the time limit of a verdict that a response's code may take."""
PYTHON = {"python", "python3", "python2", "py", "py3", "ipython", "ipython3"}


class CodeVerifier:
    """The share of tests that the program of a response passes, run in a sandbox; `extract_code` says which that is.

    The problem's answer is a list of tests, or JSON of one. A test is a Python text that runs after the code, and
    passes if it gets to its end (``assert add(1, 2) == 3``); or ``{"input": ..., "output": ...}``, which gives the
    program its standard input and compares its standard output, blanks at line ends and empty last lines aside.
    ``{"inputs": [...], "outputs": [...]}`` is a list of such tests too. The outputs expected never enter the sandbox.
    An assertion is judged in the process that the response controls: ending that process passes no test, but code
    that sets out to forge the sign of success, or objects equal to everything, can deceive it.

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

    def check(self, entry: dict[str, Any]) -> None:
        for test in _tests(entry["answer"]):
            if isinstance(test, str):
                try:
                    compile(test, "test", "exec")
                except (SyntaxError, ValueError) as error:
                    raise ValueError(f"the problem's test {test[:60]!r} is no Python: {error}") from None


def _tests(answer: Any) -> list[Any]:
    """Return the tests that a problem's answer lists.

    Raises:
        ValueError: these are no tests.
    """
    found = json.loads(answer) if isinstance(answer, str) and answer.lstrip().startswith(("[", "{")) else answer
    if isinstance(found, dict) and "ground_truth" in found:  # as verl keeps it
        return _tests(found["ground_truth"])
    if isinstance(found, dict) and {"inputs", "outputs"} <= set(found) and not found.get("fn_name"):
        inputs, outputs = found["inputs"], found["outputs"]
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError("the problem's answer has not as many 'outputs' as 'inputs'")
        found = [{"input": given, "output": wanted} for given, wanted in zip(inputs, outputs, strict=True)]
    found = [found] if isinstance(found, str) else found
    for test in found if isinstance(found, list) else [None]:
        if not isinstance(test, str) and not (isinstance(test, dict) and {"input", "output"} <= set(test)):
            raise ValueError("the problem's answer is no list of tests, each a text or a dict of input and output")
    if not found:
        raise ValueError("the problem has no tests")
    return list(found)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


@lru_cache(maxsize=2)
def _markdown(strict: bool) -> MarkdownIt:
    """Return a parser of fenced blocks; one that is not strict knows no containers and no code by indentation."""
    parser = MarkdownIt("commonmark").disable(["html_block", "reference", "lheading", "inline"])
    return parser if strict else parser.disable(["code", "list", "blockquote"])


def extract_code(text: str) -> str | None:
    """Return the program of a response; None if it has none.

    The program is the last fenced block (three or more backticks or tildes) that is closed and named Python; without
    such a block, the last that is closed and has no name. Fences are read in order, as CommonMark has it, within lists
    and quotations too; where that finds no program, they are read again without regard to indentation.
    """
    for strict in (True, False):
        blocks = list(_closed_blocks(text, _markdown(strict)))
        for names in (PYTHON, {""}):
            if found := [content for name, content in blocks if name in names]:
                return found[-1]
    return None


def _closed_blocks(text: str, parser: MarkdownIt) -> Iterator[tuple[str, str]]:
    """Yield name and content of each fenced block that is closed, in order."""
    for token in parser.parse(text + "\n"):
        if token.type != "fence" or token.map is None:
            continue
        begin, end = token.map
        if end - begin == token.content.count("\n") + 2:  # the fences have a line each
            name, *_ = token.info.strip().strip("{}. ").split(maxsplit=1) or [""]
            yield name.rstrip(",:}").casefold(), token.content
