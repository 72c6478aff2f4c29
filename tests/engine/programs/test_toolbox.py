"""Tools by name: a calculator that only calculates, and Python that is contained."""

from __future__ import annotations

import copy

import pytest

from rolltree.engine.errors import UserError
from rolltree.engine.programs.chat.toolbox import PythonTool, calculator
from rolltree.engine.programs.tools import ToolTurns


@pytest.mark.parametrize(
    ("call", "value"),
    [
        ("3 - 5 + 12", "10"),
        (" 2 * (3 + 4) ", "14"),
        ("7 / 2", "3.5"),
        ("8 / 2", "4"),
        ("7 // 2 - -1 % 3", "1"),
        ("1 / 0", "error: division by zero"),
        ("3 +", "error: invalid syntax"),
        ("__import__('os')", "error: only numbers, + - * / // % and parentheses"),
        ("9 ** 9 ** 9", "error: only numbers, + - * / // % and parentheses"),
        ("'a' * 10", "error: only numbers, + - * / // % and parentheses"),
        ("*".join(["9" * 400] * 4), "error: the number is too large"),
        ("9" * 100_000, None),
        ("(" * 10_000, None),
        ("1e308 * 10", "inf"),
        ("", "error: invalid syntax"),
    ],
)
def test_the_calculator_calculates_and_nothing_else(call: str, value: str | None) -> None:
    found = calculator(call)
    assert found == value if value is not None else found.startswith("error: ")


def test_python_is_contained_and_says_how_it_ended() -> None:
    tool = PythonTool(wall_s=0.5, most_characters=10)
    assert tool.note.startswith("Code in tool calls runs in ")
    assert tool("print(6 * 7)") == "42"
    assert tool("print(1)\n1 / 0") == "1\nZeroDivisionError: division by zero"
    assert tool("1 +") == "SyntaxError: invalid syntax"
    assert tool("print(1, flush=True)\nwhile True: pass") == "1\nstopped: timeout"
    assert tool("print('x' * 30)") == "xxxxxxxxxx ... (20 characters left out)"
    assert tool("open('/etc/passwd')").startswith(("FileNotFoundError", "PermissionError"))
    assert copy.deepcopy(tool) is tool


def test_tools_are_found_by_name() -> None:
    assert ToolTurns("calculator").tool is calculator
    program = ToolTurns("python", tool_options={"wall_s": 1.0})
    assert isinstance(program.tool, PythonTool)
    assert program.note == program.tool.note
    with pytest.raises(UserError, match="did you mean 'wall_s'"):
        ToolTurns("python", tool_options={"walls": 1.0})
    with pytest.raises(UserError, match="did you mean 'calculator'"):
        ToolTurns("calculate")
