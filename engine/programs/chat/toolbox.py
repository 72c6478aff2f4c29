"""Built-in tools by name: functions that the program `tools` and environments may call."""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from transformers.utils import get_json_schema

from ...errors import UserError
from ...parts.resolve import import_object
from ...sandbox import Limits, Sandboxes
from ..harbor.shell import shell_schemas
from ..servers.mcp import listed_schemas
from ..servers.openenv import served_schemas

MOST_DIGITS = 1000
"""Largest number of digits of an integer in a calculation."""

OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculator(call: str, context: Any = None) -> str:
    """Return the value of an arithmetic expression of numbers, + - * / // % and parentheses, or ``error: ...``."""
    try:
        tree = ast.parse(call.strip(), mode="eval")
        return str(_value(tree.body))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        return f"error: {error.msg if isinstance(error, SyntaxError) else error}"


def _value(node: ast.AST) -> int | float:
    value: Any
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        value = OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    elif isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        value = OPERATORS[type(node.op)](_value(node.operand))
    else:
        raise ValueError("only numbers, + - * / // % and parentheses")
    if isinstance(value, int) and abs(value) >= 10**MOST_DIGITS:
        raise ValueError("the number is too large")
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


class PythonTool:
    """Runs the call as a Python program in a sandbox; returns its output and, if it failed, the reason.

    Args:
        wall_s, memory_mb, processes, files_mb: see `Limits`.
        most_characters: longest output that is returned; the rest is left out.

    Raises:
        ValueError: a limit is out of range.
    """

    def __init__(
        self,
        wall_s: float = 5.0,
        memory_mb: int = 512,
        processes: int = 16,
        files_mb: int = 64,
        most_characters: int = 2000,
    ) -> None:
        limits = Limits(wall_s=wall_s, cpu_s=wall_s, memory_mb=memory_mb, processes=processes, files_mb=files_mb)
        self._sandboxes, self._most = Sandboxes(limits), most_characters

    @property
    def note(self) -> str:
        """A sentence about the sandbox that contains the calls.

        Raises:
            OSError: this system has no sandbox that can contain a program.
        """
        with self._sandboxes.lent() as sandbox:
            return f"Code in tool calls runs in {sandbox.containment}"

    def __call__(self, call: str, context: Any = None) -> str:
        with self._sandboxes.lent() as sandbox:
            run = sandbox.run(call)
        said = run.stdout.rstrip("\n")
        if len(said) > self._most:
            said = f"{said[: self._most]} ... ({len(said) - self._most} characters left out)"
        if run.status in ("error", "syntax"):
            return "\n".join(filter(None, [said, (run.stderr.strip().splitlines() or ["it failed"])[-1]]))
        if run.status not in ("ok", "exited"):
            return "\n".join(filter(None, [said, f"stopped: {run.status}"]))
        return said

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # every group copies the program; all copies share the sandboxes


TOOLS: dict[str, Callable[..., Any]] = {"calculator": calculator, "python": PythonTool}


def calculate(expression: str) -> str:
    """Computes an arithmetic expression of numbers, + - * / // % and parentheses.

    Args:
        expression: The expression, such as 3 * (4 + 5).
    """
    return calculator(expression)


@functools.cache
def _python_tool() -> PythonTool:
    return PythonTool()


def python(code: str) -> str:
    """Runs a Python program with the standard library and gives what it prints.

    Args:
        code: The program.
    """
    return _python_tool()(code)


CHAT_TOOLS: dict[str, Callable[..., Any]] = {"calculator": calculate, "python": python}
"""Tools of conversations, which are called by name with named arguments."""


def find_chat_tool(name: str) -> Any:
    """Return the function that a name of `data.tools` stands for.

    Raises:
        UserError: there is none.
    """
    if name in CHAT_TOOLS:
        return CHAT_TOOLS[name]
    if ":" not in name:
        raise UserError(
            f"data.tools has '{name}', which is not known; use {', '.join(CHAT_TOOLS)}, or name your own as "
            "file.py:function."
        )
    return import_object(name)


def tool_name(name: str) -> str:
    """Return the name by which the model calls a tool."""
    return name if name in CHAT_TOOLS else name.rpartition(":")[2]


def tool_schema(name: str) -> dict[str, Any]:
    """Return the description of a tool for a chat template.

    Raises:
        UserError: there is none, or its parameters lack types or words in its docstring.
    """
    try:
        schema: dict[str, Any] = get_json_schema(find_chat_tool(name))
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"data.tools has '{name}', which cannot be described to the model: {' '.join(str(error).split())}; give it "
            "types and a docstring with its Args."
        ) from error
    schema["function"]["name"] = tool_name(name)
    return schema


Tool = str | Mapping[str, Any]
"""A tool of `data.tools` by its name, or the tools of a server by one of `SERVED`, as a configuration writes both."""
SERVED: dict[str, Callable[[Mapping[str, Any]], Sequence[dict[str, Any]]]] = {
    "mcp": listed_schemas,
    "openenv": served_schemas,
    "harbor": shell_schemas,
}
"""Functions that return the descriptions of a server's tools, by the key that names the server."""


def tool_schemas(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the descriptions of tools for a chat template, those of servers included.

    Raises:
        UserError: as for `tool_schema`; a server cannot be reached; or two tools have one name.
    """
    schemas: list[dict[str, Any]] = []
    for tool in tools:
        schemas += [tool_schema(tool)] if isinstance(tool, str) else _served(tool)
    names = [schema["function"]["name"] for schema in schemas]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"data.tools has two tools called '{twice[0]}'; the model could not tell them apart.")
    return schemas


def _served(tool: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    key = next((key for key in SERVED if key in tool), None)
    if key is None:
        raise UserError(f"data.tools has {dict(tool)}, which names no server; known are {', '.join(SERVED)}.")
    return SERVED[key](tool)
