"""Calls the user's functions: any exception in one becomes a `UserError` of one sentence that names the line.

Imports nothing of rolltree when loaded: the verifiers' processes (`engine/rewards/worker.py`) load this file alone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any


def call(what: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return ``function(*arguments, **options)``.

    Args:
        what: the function's place in the configuration, such as ``algorithm.advantage = 'mine.py:f'``.

    Raises:
        UserError: the function raised an exception or called `sys.exit`; its own `UserError` passes unchanged, and so
            does an `ElsewhereError`, such as that of a tree whose tokens it has read and whose node has ended.
    """
    from ..errors import ElsewhereError, UserError

    try:
        return function(*arguments, **options)
    except (UserError, ElsewhereError, KeyboardInterrupt):
        raise
    except BaseException as error:  # sys.exit in the function must not end a run
        raise UserError(f"{what} failed: {failure(error, function)}.") from error


def ask(what: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Like `call`, but a ValueError's message is shown to the user as it is: functions reject their arguments by it.

    Raises:
        UserError: as for `call`.
    """
    from ..errors import UserError

    try:
        return call(what, function, *arguments, **options)
    except UserError as error:
        if isinstance(error.__cause__, ValueError):
            raise UserError(f"{what}: {str(error.__cause__).rstrip('.')}.") from error.__cause__
        raise


def failure(error: BaseException, place: Callable[..., Any] | Path | None = None) -> str:
    """Describe an error on one printable line, such as ``ValueError: no answer (line 12 of 'mine.py')``.

    Args:
        place: a file, or a function in it: the innermost line of this file is named; None: the innermost of all.
    """
    try:
        said = " ".join(str(error).split())
    except Exception:  # the exception's __str__ is the user's code too
        said = ""
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    text = text[:400].rstrip(".").encode("utf-8", "backslashreplace").decode()
    if (line := _line(error.__traceback__, _file(place))) is not None:
        text += f" (line {line[1]} of '{Path(line[0]).name}')"
    return text


def _file(place: Callable[..., Any] | Path | None) -> str | None:
    if place is None or isinstance(place, Path):
        return None if place is None else str(place)
    while isinstance(place, functools.partial):
        place = place.func
    try:
        return inspect.getsourcefile(inspect.unwrap(place))
    except (TypeError, ValueError):
        return None  # a builtin, or an object with __call__


def _line(trace: TracebackType | None, file: str | None) -> tuple[str, int] | None:
    in_file = innermost = None
    while trace is not None:
        innermost = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        if innermost[0] == file:
            in_file = innermost
        trace = trace.tb_next
    return in_file or innermost
