"""Programs in forks of a process that has imported what they share, as imports take longer than most programs."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

TORCH = """
import numpy, torch
import torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor.parallel, torch.nn.attention.flex_attention
"""
"""The parts of torch that Transformers imports, which take more than half of its import."""

PARENT = """
import json, os, sys, tempfile, traceback
answers, names = os.fdopen(os.dup(1), "w"), {"__name__": "program"}
for line in sys.stdin:
    case = json.loads(line)
    with tempfile.TemporaryFile("w+") as output:
        child = 0 if case["stays"] else os.fork()
        code = 1
        if child:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        else:
            before = os.dup(1), os.dup(2)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            try:
                os.chdir(case["directory"] or ".")
                exec(compile(case["program"], "program", "exec"), names)
                code = 0
            except SystemExit as end:
                code = end.code or 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            if not case["stays"]:
                os._exit(code)
            os.dup2(before[0], 1)
            os.dup2(before[1], 2)
        output.seek(0)
        print(json.dumps([code, output.read()]), file=answers, flush=True)
os._exit(0)  # nothing here needs the seconds that an orderly end takes
"""


class Forks:
    """A process that runs programs in forks of itself."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, program: str, *, directory: Path | None = None, stays: bool = False) -> tuple[int, str]:
        """Return the exit status of ``program`` and what it printed; with ``stays`` it runs in the parent, whose names,
        imports and directory the programs after it find."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        case = {"program": program, "directory": str(directory or ""), "stays": stays}
        print(json.dumps(case), file=self._process.stdin, flush=True)
        code, output = json.loads(self._process.stdout.readline())
        return code, output


@contextmanager
def forks(*programs: str) -> Iterator[Forks]:
    """Yield what forks a new process after ``programs`` have run in it."""
    command, pipe = [sys.executable, "-c", PARENT], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        made = Forks(process)
        for program in programs:
            code, output = made.run(program, stays=True)
            assert code == 0, output
        yield made
        assert process.stdin is not None
        process.stdin.close()


@contextmanager
def forked(work: Callable[..., object], *args: Any) -> Iterator[tuple[Any, TextIO]]:
    """Yield a fork of this process that runs ``work(*args)``, and what it prints, for what is killed or kills itself.

    It is killed in the end if it still runs. OpenMP's threads end before, as a fork has none and cannot end them
    (`release_threads`).
    """
    from rolltree.engine.openmp import release_threads  # after conftest.py has chosen Triton's interpreter

    release_threads()
    read, write = os.pipe()

    def run() -> None:
        os.close(read)
        sys.stdout = sys.stderr = os.fdopen(write, "w", buffering=1)
        work(*args)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    os.close(write)
    try:
        with os.fdopen(read) as printed:
            yield process, printed
    finally:
        process.kill()
        process.join()
