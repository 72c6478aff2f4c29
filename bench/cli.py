"""The command line ``rolltree bench [op ...] [--quick] [--cases REGEX] [--shape SIZES] [--against DIR] [--out DIR]``.

``rolltree bench job``, ``curves``, ``plot``, ``simulate``, ``tinker`` and ``rows`` have command lines of their own.
"""

from __future__ import annotations

import argparse
import importlib
import math
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rolltree.engine import UserError

from .against import against, checked
from .journal import Journal, Outcome
from .runner import Bench, Calls, Choice, DeviceLostError, run
from .shapes import described, with_shapes
from .table import table

ROOMS = {
    "": ("ceilings",),
    "ops": (
        "linear_logprob",
        "linear_policy_loss",
        "linear_divergence",
        "logprob_from_logits",
        "policy_loss",
        "tree_attention",
        "tree_recurrence",
        "layer_ops",
        "sample_tokens",
        "tree_decode",
    ),
    "runs": (
        "tree_step",
        "picture_step",
        "rl_step",
        "trl_step",
        "rollout",
        "treepo",
        "speculation",
        "loop",
        "agents",
        "agent_calls",
        "environments",
    ),
}
"""The ops by the folder of their file."""
OPS = tuple(op for ops in ROOMS.values() for op in ops)

FIRST = (
    "linear_policy_loss",
    "linear_logprob",
    "tree_attention",
    "tree_decode",
    "sample_tokens",
    "tree_step",
    "rollout",
)
"""The ops that run, in small cases, if none is named."""


OWN = {
    "job": ".jobs.job",
    "curves": ".jobs.curves",
    "plot": ".plot",
    "simulate": ".runs.simulate",
    "tinker": ".runs.tinker_service",
    "rows": ".runs.rows",
}
"""Subcommands with their own command lines, and their modules."""


def load(op: str, recorded: Path | None = None, model: Path | None = None) -> Bench:
    """Return the benchmark of an op; with ``recorded``, that of drafts over the rollouts of this run, and with
    ``model``, its cases of the pretrained model in this directory.

    Raises:
        UserError: there is no such run or model, or it cannot be read, or the op has no cases of such models.
    """
    room = next(room for room, ops in ROOMS.items() if op in ops)
    bench: Bench = importlib.import_module(f".{room}.{op}" if room else f".{op}", __package__).BENCH
    if model is not None:
        if bench.model_cases is None:
            raise UserError(
                f"--model works with rollout, tree_step, trl_step, agents and agent_calls, not with {op}; name these."
            )
        if not (model / "config.json").is_file():
            raise UserError(f"--model: '{model}' is no directory of a model; it has no config.json.")
        return replace(bench, cases=partial(bench.model_cases, model.resolve()))
    return importlib.import_module(".runs.recorded", __package__).bench(recorded, bench) if recorded else bench


def main(argv: Sequence[str] | None = None) -> int:
    """Run benchmarks and return the exit status: 0, 1 if a provider failed, 2 if the command line is wrong, 3 if the
    device failed."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] and argv[0] in OWN:
        return int(importlib.import_module(OWN[argv[0]], __package__).main(argv[1:]))
    args = _parser().parse_args(argv)
    glance = not args.ops and not args.list
    args.quick |= glance
    try:
        device, choice, benches = _chosen(args, glance)
    except UserError as error:
        print(f"rolltree bench: {error}", file=sys.stderr)
        return 2
    try:
        if args.list:
            _list(benches, device, args.quick)
            return 0
        with ExitStack() as stack:
            if args.against is not None:
                beside = partial(
                    against,
                    directory=args.against,
                    device=device,
                    quick=args.quick,
                    shapes=args.shape,
                    peers=bool(args.providers),
                )
                benches = [stack.enter_context(beside(bench)) for bench in benches]
            problems = _run_all(benches, device, choice, args.out)
    except UserError as error:
        print(f"rolltree bench: {error}", file=sys.stderr)
        return 2
    except DeviceLostError as error:
        print(f"rolltree bench: {error}", file=sys.stderr)
        return 3
    if glance:
        print("These were small cases; `rolltree bench OP` runs an op's own, `rolltree bench all` everything.")
    if problems:
        print(f"{len(problems)} failed:", *problems, sep="\n  ")
    return 1 if problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rolltree bench",
        description="Time the ops against their peers and limits.",
        epilog="rolltree bench job: a whole job by several trainers; rolltree bench curves: whole runs of recipes; "
        "rolltree bench plot: pictures of recorded rows; rolltree bench simulate: runs on many GPUs; "
        "rolltree bench tinker: the training service through Tinker's client; rolltree bench rows: files of many rows",
    )
    parser.add_argument(
        "ops", nargs="*", metavar="op", help=f"one of {', '.join(OPS)}; or all; default: some of them, --quick"
    )
    parser.add_argument("--list", action="store_true", help="only list ops, cases and providers")
    parser.add_argument("--quick", action="store_true", help="small cases, about a second each")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--cases", default="", metavar="REGEX", help="only cases whose names contain it")
    parser.add_argument("--providers", default="", metavar="REGEX", help="only providers whose names contain it")
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="SIZES",
        help='a size in place of the cases, as "N=4096 V=32000"',
    )
    parser.add_argument(
        "--add", action="append", default=[], metavar="FILE.py:NAME", help="a function of yours as a further provider"
    )
    parser.add_argument(
        "--against", type=Path, metavar="DIR", help="time this checkout and the one in DIR by turns, in processes"
    )
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="seconds of timing a case; default 8, 1 with --quick"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=120.0,
        metavar="S",
        help="seconds that one provider may take for a case; default %(default)s",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="run rollout, tree_step, trl_step, agents or agent_calls on this pretrained model",
    )
    parser.add_argument("--recorded", type=Path, metavar="RUN", help="run speculation over the rollouts of this run")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep rows here; cases found there do not run again")
    return parser


def _chosen(args: argparse.Namespace, glance: bool) -> tuple[torch.device, Choice, list[Bench]]:
    """Return the device, the cases and providers, and the benchmarks that a command line names.

    Args:
        glance: no op is named: a selection runs.

    Raises:
        UserError: the command line is wrong.
    """
    if unknown := [op for op in args.ops if op not in OPS and args.ops != ["all"]]:
        raise UserError(f"there is no op '{unknown[0]}'; use one of {', '.join(OPS)}.")
    for name, value in (("--shape", args.shape), ("--add", args.add)):
        if value and (len(args.ops) != 1 or args.ops == ["all"]):
            raise UserError(f"{name} belongs to one op; name it, and no other.")
    if args.recorded is not None and args.ops != ["speculation"]:
        raise UserError("--recorded works with speculation alone; name no other op.")
    for name, seconds, least in (("--seconds", args.seconds, "at least"), ("--limit", args.limit, "above")):
        fits = seconds is None or 0 < seconds < math.inf or (seconds == 0 and least == "at least")  # 0: fewest rounds
        if not fits:
            raise UserError(f"{name} must be {least} 0 seconds, got {seconds}.")
    try:
        device = torch.device(args.device)
        torch.empty(0, device=device)
        choice = Choice(args.quick, re.compile(args.cases), re.compile(args.providers), args.seconds, args.limit)
    except (AssertionError, RuntimeError) as error:  # torch without CUDA asserts
        reason = str(error).splitlines()[0]
        raise UserError(f"the device '{args.device}' cannot be used: {reason}") from None
    except re.error as error:
        raise UserError(f"{error.pattern!r} is not a regular expression: {error}") from None
    ops = FIRST if glance else args.ops if args.ops not in ([], ["all"]) else OPS
    benches = [load(op, args.recorded, args.model) for op in ops]
    if args.shape:
        benches = [with_shapes(benches[0], args.shape)]
    if args.add:
        benches = [replace(benches[0], providers={**benches[0].providers, **dict(map(_added, args.add))})]
    if args.against is not None:
        if args.model is not None or args.recorded is not None:
            raise UserError("--against times cases of ops; leave --model and --recorded out.")
        checked(args.against)
    if args.providers and not any(choice.providers.search(name) for bench in benches for name in bench.providers):
        raise UserError(f"no provider's name contains --providers '{args.providers}'; see `rolltree bench --list`.")
    if args.cases and not any(choice.cases.search(c.name) for b in benches for c in b.cases(device, args.quick)):
        raise UserError(f"no case's name contains --cases '{args.cases}'; see `rolltree bench --list`.")
    return device, choice, benches


def _list(benches: Sequence[Bench], device: torch.device, quick: bool) -> None:
    for bench in benches:
        print(f"{bench.op}: {'; '.join(bench.providers)}")
        if bench.shaped is not None:
            print(f'  --shape "{described(bench.shaped)}"')
        for case in bench.cases(device, quick):
            print(f"  {case.name}")


def _added(name: str) -> tuple[str, Callable[[Any], Calls]]:
    """Return a user's provider and its name, from ``file.py:function``.

    Raises:
        UserError: there is no such file or function, or the file cannot be run.
    """
    from rolltree.engine.rewards.loading import user_verifier  # the kernels' build has no packages of the engine

    try:
        return name.rpartition(":")[2], user_verifier(name)
    except Exception as error:  # whatever the file itself raises
        raise UserError(f"--add '{name}': {type(error).__name__}: {error}") from None


def _run_all(benches: Sequence[Bench], device: torch.device, choice: Choice, out: Path | None) -> list[Outcome]:
    """Run benchmarks, print a table of each, and return what failed.

    Raises:
        DeviceLostError: as `run`.
    """
    problems: list[Outcome] = []
    for bench in benches:
        journal = Journal(bench.op, out)
        before = journal.kept()
        print(table([*before, *run(bench, device, choice, journal, say=lambda line: print(line, flush=True))]))
        if bench.ceiling_is:
            print(f"Ceiling of {bench.op}: {bench.ceiling_is}.")
        print(flush=True)
        problems += journal.problems
    return problems
