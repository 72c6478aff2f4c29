"""``rolltree bench [op ...] [--quick] [--out FILE]``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from .runner import Bench, run
from .schema import Row, append
from .table import table

OPS = (
    "linear_logprob",
    "linear_policy_loss",
    "logprob_from_logits",
    "policy_loss",
    "tree_attention",
    "sample_tokens",
    "tree_step",
    "rollout",
    "treepo",
    "tree_decode",
)


def load(op: str) -> Bench:
    return importlib.import_module(f".{op}", __package__).BENCH


def main(argv: Sequence[str] | None = None) -> int:
    """Run benchmarks; 0, or 2 where the command line is wrong."""
    parser = argparse.ArgumentParser(prog="rolltree bench", description="Time the ops beside their peers and limits.")
    parser.add_argument("ops", nargs="*", metavar="op", help=f"default: all of {', '.join(OPS)}")
    parser.add_argument("--list", action="store_true", help="only list ops, cases and providers")
    parser.add_argument("--quick", action="store_true", help="small cases, about a second each")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="append the rows to this JSON-lines file")
    args = parser.parse_args(argv)
    if unknown := [op for op in args.ops if op not in OPS]:
        print(f"rolltree bench: there is no op '{unknown[0]}'; use one of {', '.join(OPS)}.", file=sys.stderr)
        return 2
    try:
        device = torch.device(args.device)
        torch.empty(0, device=device)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        print(f"rolltree bench: the device '{args.device}' cannot be used: {reason}", file=sys.stderr)
        return 2
    ops = args.ops or OPS
    if args.list:
        for op in ops:
            print(f"{op}: {', '.join(load(op).providers)}")
        return 0
    for op in ops:
        bench = load(op)
        rows: list[Row] = []
        for row in run(bench, device, quick=args.quick, say=lambda line: print(line, flush=True)):
            rows.append(row)
            if args.out:
                append([row], args.out)
        print(table(rows))
        if bench.ceiling_is:
            print(f"Ceiling of {op}: {bench.ceiling_is}.")
        print(flush=True)
    return 0
