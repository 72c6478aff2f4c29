"""The work of a contained child: it runs one untrusted program and reports the outcome.

Only `jail.py` loads this file, by its path.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import sys
import traceback
from typing import Any, NoReturn


def execute(code: str, then: str, mark: int, token: bytes) -> NoReturn:
    """Run a program and then ``then``, and write ``token`` and the outcome to the descriptor ``mark``."""
    text: dict[str, Any] = {"encoding": "utf-8", "errors": "replace", "closefd": False}
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0, "r", **text), os.fdopen(1, "w", **text), os.fdopen(2, "w", **text)
    sys.argv = ["program"]
    vars(builtins).update(
        exit=sys.exit, quit=sys.exit
    )  # the interpreter gets these from `site`, which is not imported because it reads the user's files
    if "/dev/stdin" in code:
        _open_stdin_by_name()
    scope = {"__name__": "solution" if then else "__main__", "__builtins__": builtins}
    exited, write = os._exit, os.write  # the program may replace these in the module `os`
    try:
        try:
            program = compile(code, "<program>", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, OverflowError, MemoryError):
            traceback.print_exc(limit=0)
            sys.stderr.flush()
            write(mark, token + b"syntax")
            exited(1)
        exec(program, scope)
        if then:
            exec(compile(then, "<test>", "exec", dont_inherit=True), scope)
        _finish()
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        with contextlib.suppress(BaseException):
            _finish()
        sys.stdout.flush()
        sys.stderr.flush()
        exited(0 if error.code in (None, 0) else 1)
    except BaseException as error:
        trace = error.__traceback__
        traceback.print_exception(type(error), error, trace.tb_next if trace is not None else None)
        sys.stdout.flush()
        sys.stderr.flush()
        exited(1)
    sys.stdout.flush()
    sys.stderr.flush()
    write(mark, token + b"ok")
    exited(0)


def _finish() -> None:
    """Do what the interpreter does at a program's end: wait for its threads, then call what `atexit` keeps."""
    if (threading := sys.modules.get("threading")) is not None:
        threading._shutdown()
    if (atexit := sys.modules.get("atexit")) is not None:
        atexit._run_exitfuncs()


def _open_stdin_by_name() -> None:
    """Let ``open("/dev/stdin")`` read the standard input; the jail has no such file."""
    real = builtins.open

    def opened(file: Any, *args: Any, **options: Any) -> Any:
        return real(os.dup(0) if file == "/dev/stdin" else file, *args, **options)

    builtins.open = io.open = opened
