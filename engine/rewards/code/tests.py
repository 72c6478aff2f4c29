"""The tests of a problem, read from the forms in which public sets have them.

| form | sets |
|---|---|
| texts of assertions; ``{"assert_case": [...]}`` | MBPP, AceCode; verl |
| a text for pytest: functions ``test_*``, ``from solution import ...`` | KodCode |
| ``{"input", "output"}``, a list of them, or ``{"inputs": [...], "outputs": [...]}`` | APPS, TACO, CodeContests |
| the same with ``fn_name`` or ``func_name`` beside the lists | Eurus-2, PRIME, TACO |
| a list of tests with ``type`` or ``testtype``, and ``fn_name`` | DeepCoder, open-r1, LiveCodeBench |
| any of them as JSON, compressed by zlib and written in base64; within ``{"ground_truth": ...}`` | |

A form or a key that is not known is refused, and so is a pickle: nothing is ever unpickled.
"""

from __future__ import annotations

import ast
import base64
import binascii
import json
import re
import sys
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

MOST_UNPACKED = 1 << 27
"""Bytes of unpacked tests; more are refused."""
STDIN = {"stdin_stdout", "stdin", "stdio", "standard"}
FUNCTION = {"function_call", "function", "functional", "call_based", "call"}
NAMES = ("fn_name", "func_name")
TYPES = ("type", "testtype")
PYTEST_NAMES = {"pytest.raises", "pytest.approx", "pytest.mark", "pytest.mark.parametrize"}
_PACKED = re.compile(r"[A-Za-z0-9+/\s]{12,}={0,2}\s*")


@dataclass(frozen=True)
class Script:
    """A text that runs after the program, in its scope, and passes if it runs to its end."""

    text: str


@dataclass(frozen=True)
class PytestText:
    """A text for pytest; it passes if all its test functions do."""

    text: str


@dataclass(frozen=True)
class StdinTest:
    """The program reads ``stdin`` and has to print ``expected``."""

    stdin: str
    expected: str


@dataclass(frozen=True)
class CallTest:
    """The function ``name`` of the program, or the method of its class ``Solution``, has to return ``expected``."""

    name: str
    arguments: list[Any]
    expected: Any


Test = Script | PytestText | StdinTest | CallTest


def read_tests(answer: Any) -> list[Test]:
    """Return the tests that a problem's answer holds.

    Raises:
        ValueError: the answer has another form, a key that is not known, or no test.
    """
    answer = _plain(answer)
    if isinstance(answer, str):
        return read_tests(unpacked) if (unpacked := _unpacked(answer)) is not None else [_text(answer)]
    if isinstance(answer, Mapping):
        return _of_dict(dict(answer))
    if not isinstance(answer, list | tuple):
        raise ValueError(f"the problem's answer is of type {type(answer).__name__}, and not a list of tests")
    tests: list[Test] = []
    for each in map(_plain, answer):
        if isinstance(each, str):
            tests.append(_text(each))
        elif isinstance(each, Mapping):
            tests += _of_dict(dict(each))
        else:
            raise ValueError("the problem's answer is not a list of tests, each a text or a dict of input and output")
    if not tests:
        raise ValueError("the problem has no tests")
    return tests


def check_text(test: Script | PytestText, packages: Collection[str] = ()) -> None:
    """Check that a text of a test is Python that asserts or calls something, and imports nothing that is not there.

    Args:
        packages: names that may be imported besides the standard library.

    Raises:
        ValueError: it is not.
    """
    what = f"the problem's test {test.text.strip()[:60]!r}"
    try:
        tree = ast.parse(test.text)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{what} is not valid Python: {error}") from None
    if not any(isinstance(node, ast.Assert | ast.Call | ast.Raise) for node in ast.walk(tree)):
        raise ValueError(f"{what} is no test: it asserts nothing and calls nothing")
    provided = {"solution", "pytest"} if isinstance(test, PytestText) else set()
    for name in sorted(_imported(tree) - provided - set(packages)):
        if name not in sys.stdlib_module_names:
            raise ValueError(f"{what} imports '{name}', which the sandbox has not; name it in the option 'packages'")
    if isinstance(test, PytestText):
        _check_pytest(tree, what)


def test_functions(tree: ast.Module) -> list[tuple[str | None, str]]:
    """Return class (None without one) and name of each test function of a text for pytest, in order."""
    functions: list[tuple[str | None, str]] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            functions.append((None, node.name))
        elif isinstance(node, ast.ClassDef) and (node.name.startswith("Test") or is_unittest(node)):
            functions += [
                (node.name, member.name)
                for member in node.body
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and member.name.startswith("test")
            ]
    return functions


def is_unittest(node: ast.ClassDef) -> bool:
    """Return whether a class is derived from ``unittest.TestCase``."""
    return any(getattr(base, "attr", getattr(base, "id", "")) == "TestCase" for base in node.bases)


def _of_dict(fields: dict[str, Any]) -> list[Test]:
    if "ground_truth" in fields:  # verl's layout
        return read_tests(_only(fields, {"ground_truth", "style"})["ground_truth"])
    if "assert_case" in fields:
        cases = _plain(_only(fields, {"assert_case", "inputs", "outputs"})["assert_case"])
        beside = [value for key in ("inputs", "outputs") for value in _plain(fields.get(key)) or []]
        if any(value not in ("", None) for value in beside):
            raise ValueError("the problem's answer has 'assert_case' beside inputs or outputs that are not empty")
        return read_tests([cases] if isinstance(cases, str) else cases)
    name, lines = _function(fields)
    if {"inputs", "outputs"} <= set(fields):
        _only(fields, {"inputs", "outputs", "metadata", *NAMES, *TYPES})
        inputs, outputs = _plain(fields["inputs"]), _plain(fields["outputs"])
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError("the problem's answer does not have as many 'outputs' as 'inputs'")
        if not inputs:
            raise ValueError("the problem has no tests")
        return [_test(name, lines, stdin, expected) for stdin, expected in zip(inputs, outputs, strict=True)]
    if not {"input", "output"} <= set(fields):
        raise ValueError(
            f"the problem's answer has a test of {', '.join(sorted(map(str, fields))) or 'nothing'}, which is no "
            "known form"
        )
    _only(fields, {"input", "output", "metadata", *NAMES, *TYPES})
    return [_test(name, lines, fields["input"], fields["output"])]


def _function(fields: Mapping[str, Any]) -> tuple[str | None, bool]:
    """Return the function that a test calls (None: it reads standard input), and whether each line of a text of
    arguments is one of them, as LiveCodeBench writes them."""
    meta = fields.get("metadata") or {}
    meta = json.loads(meta) if isinstance(meta, str) else meta
    _only(meta, {*NAMES}, "metadata")
    named = {str(value) for where in (fields, meta) for key in NAMES if (value := where.get(key))}
    kinds = {str(value).casefold() for key in TYPES if (value := fields.get(key))}
    if len(named) > 1 or len(kinds) > 1:
        raise ValueError(f"a test of the problem names several functions or types: {', '.join(sorted(named | kinds))}")
    name, kind = next(iter(named), None), next(iter(kinds), None)
    if kind is not None and kind not in STDIN | FUNCTION:
        raise ValueError(f"a test of the problem is of type '{kind}', which is not known")
    if kind in FUNCTION and name is None:
        raise ValueError(f"a test of the problem is of type '{kind}' and names no function ('fn_name')")
    if kind in STDIN and name is not None:
        raise ValueError(f"a test of the problem is of type '{kind}' and names the function '{name}'")
    return name, "testtype" in fields


def _test(name: str | None, lines: bool, entered: Any, expected: Any) -> Test:
    entered, expected = _plain(entered), _plain(expected)
    if name is None:
        return StdinTest(_stream(entered, "input"), _stream(expected, "output"))
    if not isinstance(entered, str):
        if not isinstance(entered, list):
            raise ValueError(f"a test of '{name}' has arguments of type {type(entered).__name__}, and not a list")
        return CallTest(name, entered, expected)
    try:
        arguments = [json.loads(line) for line in entered.split("\n") if line.strip()] if lines else json.loads(entered)
        expected = json.loads(expected) if isinstance(expected, str) else expected
    except ValueError:
        raise ValueError(f"a test of '{name}' has arguments or a result that are no JSON: {entered[:60]!r}") from None
    if not isinstance(arguments, list):
        raise ValueError(f"a test of '{name}' has arguments that are no list: {entered[:60]!r}")
    return CallTest(name, arguments, expected)


def _stream(value: Any, what: str) -> str:
    """Return the text of a program's input or output; a list of texts are its lines."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"a test of the problem has an {what} of type {type(value).__name__}, and not a text")


def _text(text: str) -> Script | PytestText:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return Script(text)  # `check_text` has the reason
    return PytestText(text) if test_functions(tree) else Script(text)


def _unpacked(text: str) -> Any:
    """Return the value of a text that is JSON or packed JSON; None if it is neither.

    Raises:
        ValueError: it is JSON or packed, and cannot be read.
    """
    if text.lstrip().startswith(("[", "{")):
        try:
            return json.loads(text)
        except ValueError:
            return None  # Python, maybe
    if not _PACKED.fullmatch(text):
        return None
    try:
        packed = base64.b64decode("".join(text.split()), validate=True)
        unpacker = zlib.decompressobj()
        content = unpacker.decompress(packed, MOST_UNPACKED)
    except (binascii.Error, zlib.error):
        return None
    if unpacker.unconsumed_tail:
        raise ValueError(f"the problem's packed tests are larger than {MOST_UNPACKED >> 20} MiB")
    if content.startswith(b"\x80"):
        raise ValueError("the problem's tests are packed as a pickle, which is never loaded; convert them to JSON")
    try:
        return json.loads(content)
    except ValueError:
        raise ValueError("the problem's packed tests are no JSON") from None


def _plain(value: Any) -> Any:
    """Return lists in place of arrays and tuples."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, tuple) else value


def _only(fields: Any, allowed: Collection[str], where: str = "a test of the problem") -> Any:
    """Return ``fields``, a dict whose keys are all ``allowed`` or have no value.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(fields, Mapping):
        raise ValueError(f"{where} is of type {type(fields).__name__}, and not a dict")
    if unknown := sorted(str(key) for key, value in fields.items() if key not in allowed and value is not None):
        raise ValueError(f"{where} has the key '{unknown[0]}', which is not known; leave it out if it says nothing")
    return fields


def _imported(tree: ast.Module) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add((node.module or "").partition(".")[0])
    return modules - {"", "__future__"}


def _check_pytest(tree: ast.Module, what: str) -> None:
    """Raise ValueError if a text uses more of pytest than `harness.PYTEST` has."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "pytest":
            raise ValueError(f"{what} imports names from pytest; write 'import pytest'")
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            parts = name.split(".")
            if parts[0] == "pytest" and name not in (
                "pytest.raises",
                "pytest.approx",
                "pytest.mark",
                "pytest.mark.parametrize",
            ):
                raise ValueError(f"{what} uses {name}, which the sandbox has not")
        if isinstance(node, ast.AsyncFunctionDef) and node.name.startswith("test"):
            raise ValueError(f"{what} has the asynchronous test '{node.name}', which is not run")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            parameters = {argument.arg for argument in node.args.args} - {"self"}
            if missing := sorted(parameters - _parameters(node)):
                raise ValueError(f"{what} has a test with the fixture '{missing[0]}', which the sandbox has not")


def _parameters(node: ast.FunctionDef) -> set[str]:
    """Return the arguments that ``pytest.mark.parametrize`` gives a test."""
    parameters: set[str] = set()
    for mark in node.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.parametrize" and mark.args:
            names = ast.literal_eval(mark.args[0])
            parameters |= {name.strip() for name in (names.split(",") if isinstance(names, str) else names)}
    return parameters
