"""The texts that run tests in the sandbox, and the comparison of what they return.

The wanted results never enter the sandbox, except those that a text of a test states itself.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from .tests import CallTest, PytestText, is_unittest, test_functions

PRELUDE = """
import bisect, collections, copy, datetime, functools, heapq, io, itertools, json, math, operator, random, re, string
import sys, typing
from bisect import *
from collections import *
from copy import *
from functools import *
from heapq import *
from itertools import *
from math import *
from operator import *
from typing import *
from builtins import *
"""
"""Names that the harnesses of the sets give the programs of functional tests."""

CALL = """
import json as _json
_target = globals().get("Solution")
_target = getattr(_target(), {name!r}, None) if isinstance(_target, type) else None
_target = globals()[{name!r}] if _target is None else _target

def _plain(_value):
    if isinstance(_value, dict):
        return {{str(_key): _plain(_each) for _key, _each in _value.items()}}
    if isinstance(_value, (list, tuple)):
        return [_plain(_each) for _each in _value]
    if hasattr(_value, "tolist"):
        return _value.tolist()
    return _value

_found = _json.dumps(_plain(_target(*_json.loads({arguments!r}))))
print("\\n" + {mark!r} + _found)
"""
PYTEST = """
class _Raises:
    def __init__(self, wanted, match): self.wanted, self.match = wanted, match
    def __enter__(self): return self
    def __exit__(self, kind, value, trace):
        assert kind is not None, f"did not raise {self.wanted}"
        self.type, self.value = kind, value
        if not issubclass(kind, self.wanted): return False
        if self.match is not None:
            import re
            assert re.search(self.match, str(value)), f"{value} does not match {self.match}"
        return True

class _Approx:
    def __init__(self, wanted, rel, abs): self.wanted, self.rel, self.abs = wanted, rel, abs
    def __eq__(self, other):
        import math
        wanted = self.wanted
        if isinstance(wanted, dict):
            return set(wanted) == set(other) and all(_Approx(wanted[k], self.rel, self.abs) == other[k] for k in wanted)
        if isinstance(wanted, (list, tuple)):
            return len(wanted) == len(other) and all(_Approx(a, self.rel, self.abs) == b for a, b in zip(wanted, other))
        return wanted == other or math.isclose(other, wanted, rel_tol=self.rel, abs_tol=self.abs)

def _raises(wanted, *call, match=None, **given):
    if not call: return _Raises(wanted, match)
    with _Raises(wanted, match): call[0](*call[1:], **given)

def _parametrize(names, values, **options):
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    def decorate(function):
        def of_all(*self, **given):
            for value in values:
                function(*self, **dict(zip(names, value if len(names) > 1 else (value,))), **given)
        return of_all
    return decorate

def _modules(scope):
    import sys, types
    solution, pytest = types.ModuleType("solution"), types.ModuleType("pytest")
    solution.__dict__.update({k: v for k, v in scope.items() if not k.startswith("__")})
    pytest.raises, pytest.mark = _raises, types.SimpleNamespace(parametrize=_parametrize)
    pytest.approx = lambda wanted, rel=1e-6, abs=1e-12: _Approx(wanted, rel, abs)
    sys.modules.update(solution=solution, pytest=pytest)

_modules(dict(globals()))
"""
"""A module in place of pytest, with the parts of it that `tests.check_text` lets a text use."""
UNITTEST = """
def _run_unittest(case):
    import unittest
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    assert result.wasSuccessful() and result.testsRun, (result.errors + result.failures)[0][1]
"""
_DECIMAL = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def with_prelude(code: str) -> str:
    """Return a program with `PRELUDE` before it, after its imports from ``__future__``; invalid Python as it is."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code
    last = max(
        (n.end_lineno or 0 for n in body if isinstance(n, ast.ImportFrom) and n.module == "__future__"), default=0
    )
    lines = code.splitlines(keepends=True)
    return "".join(lines[:last]) + PRELUDE + "".join(lines[last:])


def call_text(test: CallTest, mark: str) -> str:
    """Return the text that calls the function and prints its result as JSON after ``mark``."""
    return CALL.format(name=test.name, arguments=json.dumps(test.arguments), mark=mark)


def pytest_text(test: PytestText) -> str:
    """Return the text that runs all test functions."""
    tree = ast.parse(test.text)
    unit = [node.name for node in tree.body if isinstance(node, ast.ClassDef) and is_unittest(node)]
    calls = [f"_run_unittest({name})" for name in unit]
    for owner, name in test_functions(tree):
        if owner is None:
            calls.append(f"{name}()")
        elif owner not in unit:
            calls.append(f"_object = {owner}()\ngetattr(_object, 'setup_method', lambda: None)()\n_object.{name}()")
    return "\n".join([PYTEST, UNITTEST, test.text, *calls])


def result_of(stdout: str, mark: str) -> tuple[bool, Any]:
    """Return whether a call has returned, and its result."""
    _, separator, text = stdout.rpartition(mark)
    if not separator:
        return False, None
    try:
        return True, json.loads(text)
    except (ValueError, RecursionError):
        return False, None


def same_value(returned: Any, expected: Any, tolerance: float) -> bool:
    """Return whether a function returned what was wanted.

    Tuples are lists, keys of dicts are texts, and a list of one is its item, as the sets' own harnesses have it.
    """
    expected = json.loads(json.dumps(expected))
    return _equal(returned, expected, tolerance) or (
        isinstance(expected, list) and len(expected) == 1 and _equal(returned, expected[0], tolerance)
    )


def same_output(printed: str, expected: str, tolerance: float) -> bool:
    """Return whether two outputs have the same lines, but for blanks at their ends and empty last lines; with a
    tolerance, decimals need not be written alike."""
    lines, others = _lines(printed), _lines(expected)
    if lines == others or not tolerance:
        return lines == others
    if len(lines) != len(others):
        return False
    words = [(a.split(), b.split()) for a, b in zip(lines, others, strict=True)]
    return all(
        len(a) == len(b) and all(_same_word(x, y, tolerance) for x, y in zip(a, b, strict=True)) for a, b in words
    )


def _equal(returned: Any, expected: Any, tolerance: float) -> bool:
    if isinstance(returned, bool) or isinstance(expected, bool):
        return returned is expected
    if isinstance(returned, int | float) and isinstance(expected, int | float):
        try:
            near = isinstance(expected, float) and abs(returned - expected) <= tolerance * max(1.0, abs(expected))
        except OverflowError:  # an integer that no float holds
            near = False
        return returned == expected or near
    if isinstance(returned, list) and isinstance(expected, list):
        return len(returned) == len(expected) and all(
            _equal(a, b, tolerance) for a, b in zip(returned, expected, strict=True)
        )
    if isinstance(returned, dict) and isinstance(expected, dict):
        return returned.keys() == expected.keys() and all(
            _equal(returned[key], expected[key], tolerance) for key in expected
        )
    return type(returned) is type(expected) and bool(returned == expected)


def _same_word(word: str, expected: str, tolerance: float) -> bool:
    if word == expected:
        return True
    if "." not in expected and "e" not in expected.lower():
        return False  # whole numbers are compared exactly
    if not _DECIMAL.fullmatch(word) or not _DECIMAL.fullmatch(expected):
        return False
    return abs(float(word) - float(expected)) <= tolerance * max(1.0, abs(float(expected)))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
