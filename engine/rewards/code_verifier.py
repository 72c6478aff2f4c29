"""Judges programs in responses by tests in a sandbox.

Imports nothing of rolltree, like `verifiers.py`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from .answers import without_reasoning
from .verifiers import load_file

BUDGET = 0.8
"""Share of a verdict's time limit that a response's code may use."""
PYTHON = re.compile(r"(?:language-|lang-|jupyter-|\.)?(?:i|c)?py(?:thon)?[\d.]*")
MARKDOWN = re.compile(r"markdown|md")
NO_NAME = re.compile("")
_INVISIBLE = re.compile(r"^[\ufeff\u200b\u00a0]+(?=[ \t]*(?:`{3}|~{3}))", re.MULTILINE)
_OPENED_IN_LINE = re.compile(
    r"^(.*[^\s`~>])[ \t]*((?:`{3,}|~{3,})[ \t]*py(?:thon)?[\d.]*[ \t]*)$", re.MULTILINE | re.IGNORECASE
)
_CLOSED_IN_LINE = re.compile(r"(?<=[^\s`~])[ \t]*(`{3,}|~{3,})[ \t]*$", re.MULTILINE)


class CodeVerifier:
    """The reward is the share of tests that the response's program (`extract_code`) passes in a sandbox.

    The problem's answer is a list of tests, or JSON of one. A test is a Python text that runs after the code, and
    passes if it runs to its end (``assert add(1, 2) == 3``); or ``{"input": ..., "output": ...}``, which gives the
    program its standard input and compares its standard output, ignoring blanks at line ends and empty last lines.
    ``{"inputs": [...], "outputs": [...]}`` is a list of such tests too. The expected outputs never enter the sandbox.
    An assertion is evaluated in the process that the response controls: ending that process passes no test, but code
    written to forge the sign of success, or objects equal to everything, can deceive it.

    Args:
        timeout_s: of the verdict; tests that do not start in time have failed.
        test_s: wall and processor time of one test, in seconds.
        memory_mb, processes, output_kb, files_mb: limits of the sandbox.
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
                    raise ValueError(f"the problem's test {test[:60]!r} is not valid Python: {error}") from None


def _tests(answer: Any) -> list[Any]:
    """Return the tests that a problem's answer lists.

    Raises:
        ValueError: the answer is not a list of tests.
    """
    found = json.loads(answer) if isinstance(answer, str) and answer.lstrip().startswith(("[", "{")) else answer
    if isinstance(found, dict) and "ground_truth" in found:  # verl's layout
        return _tests(found["ground_truth"])
    if isinstance(found, dict) and {"inputs", "outputs"} <= set(found) and not found.get("fn_name"):
        inputs, outputs = found["inputs"], found["outputs"]
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError("the problem's answer does not have as many 'outputs' as 'inputs'")
        found = [{"input": given, "output": wanted} for given, wanted in zip(inputs, outputs, strict=True)]
    found = [found] if isinstance(found, str) else found
    for test in found if isinstance(found, list) else [None]:
        if not isinstance(test, str) and not (isinstance(test, dict) and {"input", "output"} <= set(test)):
            raise ValueError("the problem's answer is not a list of tests, each a text or a dict of input and output")
    if not found:
        raise ValueError("the problem has no tests")
    return list(found)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


@lru_cache(maxsize=2)
def _markdown(strict: bool) -> MarkdownIt:
    """Return a parser of fenced blocks; unless strict, it ignores containers and code by indentation."""
    parser = MarkdownIt("commonmark").disable(["html_block", "reference", "lheading", "inline"])
    return parser if strict else parser.disable(["code", "list", "blockquote"])


def extract_code(text: str) -> str | None:
    """Return the program of a response; None if it has none.

    The program is the last fenced block (three or more backticks or tildes) that is closed and named Python; without
    such a block, the last that is closed and has no name, or a program in a block of Markdown. Fences are read by the
    rules of CommonMark, also within lists and quotations; if that finds no program, they are read again without regard
    to indentation, and then with fences that begin or end within a line. Of a response with reasoning in tags, the text
    after it is read.
    """
    text = _INVISIBLE.sub("", without_reasoning(text).replace("\r\n", "\n").replace("\r", "\n"))
    in_lines = _CLOSED_IN_LINE.sub(r"\n\1", _OPENED_IN_LINE.sub(r"\1\n\2", text))
    for read, strict in ((text, True), (text, False), (in_lines, True)):
        blocks = list(_closed_blocks(read, _markdown(strict)))
        for names in (PYTHON, NO_NAME):
            if found := [content for name, content in blocks if names.fullmatch(name)]:
                return found[-1]
        for name, content in reversed(blocks):
            if MARKDOWN.fullmatch(name) and (program := extract_code(content)) is not None:
                return program
    return None


def _closed_blocks(text: str, parser: MarkdownIt) -> Iterator[tuple[str, str]]:
    """Yield name and content of each fenced block that is closed, in order."""
    for token in parser.parse(text + "\n"):
        if token.type != "fence" or token.map is None:
            continue
        begin, end = token.map
        if end - begin == token.content.count("\n") + 2:  # the opening and closing fences are a line each
            name, *_ = re.split(r"[\s:{},=]", token.info.strip().strip("{}. "), maxsplit=1)
            yield name.casefold(), token.content
