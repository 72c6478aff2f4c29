"""Two checkouts beside each other: ``rolltree bench OP --against DIR``.

An op's first provider of rolltree's runs in a process of this checkout and in one of the checkout in ``DIR``, by turns,
so that other load on the machine meets both alike; rows of metric ``speedup`` are the ratio within a round. ``DIR`` is
a checkout with its kernels built, for example ``git worktree add ../before HEAD~1`` and ``make`` there. Both make the
same inputs, from the same seeds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rolltree.engine import UserError

from .runner import Bench, Calls
from .shapes import with_shapes
from .timing import TimedCall

PACKAGES = ("engine", "kernels", "bench")
HERE = Path(__file__).resolve().parent.parent


class Checkout:
    """The process of one checkout for one op. It starts with the first case, and anew after a fault."""

    def __init__(
        self, directory: Path, bench: Bench, device: torch.device, quick: bool, shape_of: Mapping[str, str]
    ) -> None:
        self.directory, self.shape_of = directory, shape_of
        self.arguments = [bench.op, timed_provider(bench), str(device), "quick" if quick else "all"]
        self.process: subprocess.Popen[str] | None = None
        self.case = ""
        self.files = ExitStack()

    def calls(self, case: str) -> Calls:
        """Return the calls of a case by direction.

        Raises:
            RuntimeError: the process cannot make them, or ended.
        """
        directions = self.ask({"case": case, "shape": self.shape_of.get(case)})["directions"]
        self.case = case
        return {direction: _Call(self, case, direction) for direction in directions}

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to one request.

        Raises:
            RuntimeError: the process cannot answer, or ended.
        """
        process = self.process = self.process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BaseException:  # a broken pipe, or the time limit in the middle of an answer
            self.close()
            raise
        if not line:
            self.close()
            raise RuntimeError(f"the process of '{self.directory}' ended; its errors are above")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def _start(self) -> subprocess.Popen[str]:
        home = Path(self.files.enter_context(tempfile.TemporaryDirectory(prefix="rolltree-against-")))
        (home / "rolltree").mkdir()
        for package in PACKAGES:
            (home / "rolltree" / package).symlink_to(self.directory / package)
        python = self.directory / ".venv" / "bin" / "python"
        return subprocess.Popen(
            [
                python if python.exists() else sys.executable,
                "-P",
                Path(__file__).with_name("served.py"),
                *self.arguments,
            ],
            env=os.environ | {"PYTHONPATH": str(home), "OMP_NUM_THREADS": str(torch.get_num_threads())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
        self.process, self.case = None, ""
        self.files.close()


class _Call(TimedCall):
    """One direction of a case in the process of a checkout."""

    def __init__(self, checkout: Checkout, case: str, direction: str) -> None:
        self.checkout, self.case, self.direction = checkout, case, direction

    def milliseconds(self) -> float:
        return float(self._ask("time")["ms"])

    def peak_mib(self) -> float | None:
        return self._ask("peak")["mib"]

    def _ask(self, what: str) -> dict[str, Any]:
        if self.checkout.case != self.case:  # the process ended since, and a new one has not made the case
            raise RuntimeError(f"the process of '{self.checkout.directory}' ended")
        return self.checkout.ask({what: self.direction})


def timed_provider(bench: Bench) -> str:
    """Return the provider that two checkouts are compared by.

    Raises:
        UserError: the op has none of rolltree's.
    """
    for name in bench.providers:
        if name.startswith("rolltree"):
            return name
    raise UserError(f"--against times a provider of rolltree's, and {bench.op} has none; name other ops.")


def checked(directory: Path) -> Path:
    """Return the absolute path of a checkout that can run.

    Raises:
        UserError: it is no checkout of rolltree, or its kernels are not built.
    """
    if missing := [name for name in PACKAGES if not (directory / name / "__init__.py").is_file()]:
        raise UserError(f"--against '{directory}' is no checkout of rolltree: it has no folder {missing[0]}.")
    if not list((directory / "kernels").glob("_cpu_*.so")):
        raise UserError(f"--against '{directory}': its kernels are not built; run `make` there first.")
    return directory.resolve()


@contextmanager
def against(
    bench: Bench, directory: Path, device: torch.device, quick: bool, shapes: Sequence[str], peers: bool
) -> Iterator[Bench]:
    """Yield ``bench`` with this checkout and another as its providers, and its own too if ``peers``.

    Raises:
        UserError: as `checked`.
    """
    other = checked(directory)
    shape_of = {case.name: shape for shape in shapes for case in with_shapes(bench, [shape]).cases(device, quick)}
    old, new = f"rolltree at {directory}", "rolltree, this checkout"
    with ExitStack() as stack:
        elsewhere = {}
        for name, where in ((old, other), (new, HERE)):
            checkout = Checkout(where, bench, device, quick, shape_of)
            stack.callback(checkout.close)
            elsewhere[name] = checkout.calls
        providers = bench.providers if peers else {}
        yield replace(bench, providers=providers, elsewhere=elsewhere, speedup_over=old, speedup_ceiling=None)
