"""Judges programs in responses by tests in a sandbox."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from ..answers import without_reasoning
from ..bounded import BUDGET, of_response
from ..loading import load_file
from .harness import call_text, pytest_text, result_of, same_output, same_value, with_prelude
from .tests import CallTest, PytestText, Script, StdinTest, Test, check_text, read_tests

PYTHON = re.compile(r"(?:language-|lang-|jupyter-|\.)?(?:i|c)?py(?:thon)?[\d.]*")
MARKDOWN = re.compile(r"markdown|md")
NO_NAME = re.compile("")
MOST_NESTED = 8
"""Levels of Markdown in blocks of Markdown that are read for a program."""
_INVISIBLE = re.compile(r"^[\ufeff\u200b\u00a0]+(?=[ \t]*(?:`{3}|~{3}))", re.MULTILINE)
_OPENED_IN_LINE = re.compile(
    r"^(.*[^\s`~>])[ \t]*((?:`{3,}|~{3,})[ \t]*py(?:thon)?[\d.]*[ \t]*)$", re.MULTILINE | re.IGNORECASE
)
_CLOSED_IN_LINE = re.compile(r"(?<=[^\s`~])[ \t]*(`{3,}|~{3,})[ \t]*$", re.MULTILINE)


class CodeVerifier:
    """Runs the response's program (`extract_code`) with the problem's tests in a sandbox.

    The problem's answer holds the tests in one of the forms of `tests.read_tests`. A text passes if it runs to its end
    after the program; a program that reads standard input has to print what is wanted (`harness.same_output`), a
    function has to return it (`harness.same_value`). Wanted outputs and results never enter the sandbox. An assertion
    is evaluated in the process that the response controls: ending that process passes no test, but code written to
    forge the sign of success, or objects equal to everything, can deceive it.

    Args:
        timeout_s: of the verdict; tests that do not start in time have failed.
        score: ``share``: the reward is the share of tests that pass; ``all``: 1 if all of them do, else 0.
        tolerance: by which decimals may differ from those that are wanted, relative to these, and absolute below 1.
        packages: installed packages that programs and tests may import besides the standard library, such as numpy.
        test_s: wall and processor time of one test, in seconds.
        memory_mb, processes, files_mb: limits of the sandbox.
        output_kb: limit on the output of a test; a test that wants more gets more.
    """

    def __init__(
        self,
        timeout_s: float,
        score: str = "share",
        tolerance: float = 0.0,
        packages: Sequence[str] = (),
        test_s: float = 2.0,
        memory_mb: int = 512,
        processes: int = 16,
        output_kb: int = 64,
        files_mb: int = 64,
    ) -> None:
        if score not in ("share", "all"):
            raise ValueError(f"its option 'score' must be share or all, and it is {score!r}")
        if not isinstance(tolerance, int | float) or not 0 <= tolerance < 1:
            raise ValueError(f"its option 'tolerance' must be from 0 to below 1, and it is {tolerance!r}")
        self._module = load_file("rolltree_sandbox", Path(__file__).parents[2] / "sandbox" / "sandbox.py")
        self._limits = partial(self._module.Limits, memory_mb=memory_mb, processes=processes, files_mb=files_mb)
        self._all, self._tolerance, self._packages = score == "all", float(tolerance), tuple(packages)
        self._test_s, self._budget_s, self._output_kb = test_s, BUDGET * timeout_s, output_kb
        limits = self._limits(wall_s=test_s, cpu_s=test_s, output_kb=output_kb)
        self._sandbox = self._module.Sandbox(limits, packages=self._packages)
        self.containment: str = self._sandbox.containment

    def __call__(self, text: str, entry: dict[str, Any]) -> Any:
        tests = self._read(entry)
        code, why = of_response(lambda: extract_code(text), self._budget_s)
        if code is None:
            return {"reward": 0.0, "unparsed": why or "no_code"}
        deadline, passed = time.monotonic() + self._budget_s, 0
        for test in tests:
            left = min(self._test_s, deadline - time.monotonic())
            if left <= 0:
                break
            status, right = self._run(code, test, left)
            if status == "syntax":
                return {"reward": 0.0, "unparsed": "syntax_error"}
            if status == "died" and self._sandbox.run("").status == "died":  # it is not the program that ended it
                raise RuntimeError("the sandbox died")
            passed += right
            if self._all and not right:
                return 0.0
        return float(passed == len(tests)) if self._all else passed / len(tests)

    def check(self, entry: dict[str, Any]) -> None:
        self._read(entry)

    def _read(self, entry: dict[str, Any]) -> list[Test]:
        tests = read_tests(entry["answer"])
        for test in tests:
            if isinstance(test, Script | PytestText):
                check_text(test, self._packages)
        return tests

    def _run(self, code: str, test: Test, seconds: float) -> tuple[str, bool]:
        """Return how a test ended, and whether it passed."""
        output_kb = self._output_kb
        if isinstance(test, StdinTest):
            output_kb = max(output_kb, len(test.expected.encode()) * 5 // 4096 + 1)  # a quarter more than is wanted
        elif isinstance(test, CallTest):
            output_kb = max(output_kb, len(json.dumps(test.expected)) * 5 // 4096 + 1)
        limits = self._limits(wall_s=seconds, cpu_s=seconds, output_kb=output_kb)
        match test:
            case Script(then):
                run = self._sandbox.run(code, then=then, limits=limits)
                return run.status, run.status == "ok"
            case PytestText():
                run = self._sandbox.run(code, then=pytest_text(test), limits=limits)
                return run.status, run.status == "ok"
            case StdinTest(stdin, expected):
                run = self._sandbox.run(code, stdin=stdin, limits=limits)
                ended = run.status in ("ok", "exited")
                return run.status, ended and same_output(run.stdout, expected, self._tolerance)
            case CallTest():
                mark = secrets.token_hex(16)
                run = self._sandbox.run(with_prelude(code), then=call_text(test, mark), limits=limits)
                returned, value = result_of(run.stdout, mark)
                right = run.status == "ok" and returned and same_value(value, test.expected, self._tolerance)
                return run.status, right


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
    after it is read. Markdown in Markdown is read to `MOST_NESTED` levels.
    """
    return _program(text, MOST_NESTED, set())


def _program(text: str, levels: int, without: set[str]) -> str | None:
    """Return the program of a text; ``without`` holds blocks of Markdown that were found to have none."""
    text = _INVISIBLE.sub("", without_reasoning(text).replace("\r\n", "\n").replace("\r", "\n"))
    in_lines = _CLOSED_IN_LINE.sub(r"\n\1", _OPENED_IN_LINE.sub(r"\1\n\2", text))
    for read, strict in ((text, True), (text, False), (in_lines, True)):
        blocks = list(_closed_blocks(read, _markdown(strict)))
        for names in (PYTHON, NO_NAME):
            if programs := [content for name, content in blocks if names.fullmatch(name)]:
                return programs[-1]
        for name, content in reversed(blocks):
            if not levels or not MARKDOWN.fullmatch(name) or content in without:
                continue
            if (program := _program(content, levels - 1, without)) is not None:
                return program
            without.add(content)
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
