"""``make gpu ARGS="--part first"``: the checks of one backend, or one timed row of each op, told as they end.

    python -m rolltree.bench.gpu_first triton --out DIR

Before the next check begins, a result is in ``DIR/first_KIND.outcomes.jsonl`` and its figures in
``DIR/first_KIND.jsonl``. A process that ends in the middle is started again by gpu.py and leaves out what has an
outcome. ``--emulated FILE`` loads the CUDA kernels as `tests/kernels/emulation` builds them for a CPU.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from rolltree.kernels import dispatch

from .cli import load
from .gpu_checks import Check, WrongError, checks
from .journal import Journal
from .runner import Bench, Choice, DeviceLostError, check_device, run
from .schema import Context, Row

KINDS = ("triton", "cuda", "rows")
ROWS = {
    "linear_policy_loss": r"^N=8192 H=1024 V=151936 all live$",
    "policy_loss": "",
    "tree_attention": r"^4096\+28x1024 ",
    "tree_decode": r"^P=4096 R=128 G=16 x 16 ",
    "sample_tokens": r"^N=512 V=151936 T=1$",
    "tree_recurrence": "",
}
"""The case of each op that is timed; the first of those whose names contain the pattern."""
Run = Callable[[], tuple[list[Row], str]]  # rows and a summary


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if everything of a kind passed, 1 if something failed, 3 if a fault left the device unusable."""
    parser = argparse.ArgumentParser(prog="python -m rolltree.bench.gpu_first")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--emulated", type=Path)
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    if args.emulated is not None and args.kind == "cuda":
        emulate(args.emulated)
    journal, context = Journal(f"first_{args.kind}", args.out), Context.of(device)
    if args.kind == "rows":
        todo = timed(device, args.rehearse, args.seconds)
    else:
        todo = compared(args.kind, device, args.rehearse, context)
    try:
        tell_all(args.kind, todo, journal, device)
    except DeviceLostError as error:
        print(error, file=sys.stderr)
        return 3
    return 1 if journal.problems else 0


def tell_all(provider: str, todo: Iterator[tuple[str, Run]], journal: Journal, device: torch.device) -> None:
    """Run what has no outcome yet and record each outcome at once.

    Raises:
        DeviceLostError: the device no longer works in this process; the outcome is recorded.
    """
    for case, one in todo:
        if journal.known(case, provider):
            continue
        journal.begin(case, provider)
        try:
            rows, summary = one()
        except Exception as error:
            first_line = (str(error).splitlines() or [""])[0]
            journal.record(case, provider, "failed", f"{type(error).__name__}: {first_line}")
            error.__traceback__ = None  # it holds the call's tensors
            check_device(device)
        else:
            journal.finish(case, rows, provider, summary)


def compared(backend: str, device: torch.device, small: bool, context: Context) -> Iterator[tuple[str, Run]]:
    """Yield the checks of a backend."""
    for check in checks(small):
        if backend in check.backends:
            yield check.name, partial(_compare, check, backend, device, context)


def _compare(check: Check, backend: str, device: torch.device, context: Context) -> tuple[list[Row], str]:
    compared = check.compare(backend, device)
    if wrong := [x for x in compared if not x.error <= x.bound]:
        raise WrongError(", ".join(f"{x.name} is off by {x.error:.2g} ({x.bound:.2g} is allowed)" for x in wrong))
    shared = asdict(context)
    rows = [
        Row("first", check.name, backend, x.name, "error", x.error, x.error, x.error, x.bound, **shared)
        for x in compared
    ]
    return rows, ", ".join(f"{x.name} {x.error:.1e} of {x.bound:.1e}" for x in compared)


def timed(device: torch.device, small: bool, seconds: float) -> Iterator[tuple[str, Run]]:
    """Yield one case of each op, by rolltree alone."""
    for op, pattern in ROWS.items():
        bench = load(op)
        name = next(case.name for case in bench.cases(device, small) if small or re.search(pattern, case.name))
        choice = Choice(small, re.compile(f"^{re.escape(name)}$"), re.compile("^rolltree$"), seconds)
        yield f"{op} {name}", partial(timed_once, bench, device, choice)


def timed_once(bench: Bench, device: torch.device, choice: Choice) -> tuple[list[Row], str]:
    journal = Journal(bench.op, None)
    rows = list(run(bench, device, choice, journal, print))
    if journal.problems:
        raise RuntimeError("; ".join(map(str, journal.problems)))
    times = [row for row in rows if row.metric == "time_ms"]
    return rows, ", ".join(f"{row.direction} {row.value:.3g} ms" for row in times)


def emulate(library: Path) -> None:
    """Make backend "cuda" take tensors on the CPU, by kernels built as C++."""
    torch.ops.load_library(str(library))
    unusable = dispatch._unusable
    dispatch._unusable = lambda name, device: None if name == "cuda" else unusable(name, device)


if __name__ == "__main__":
    sys.exit(main())
