"""Sizes of the user's own for an op: ``rolltree bench OP --shape "N=4096 H=1024 V=32000 dtype=bfloat16"``.

An op that takes them has a function ``shaped(device, *, N, H, V, dtype)``, which also yields its cases of known models.
The keywords are the names of the sizes; those without a default are required.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from rolltree.engine import UserError

from .runner import Bench, Case

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
LARGEST = 2**40  # a size beyond it is a slip of the keyboard, which torch would refuse with words of its own


def with_shapes(bench: Bench, shapes: Sequence[str]) -> Bench:
    """Return ``bench`` with the cases of these shapes in place of its own.

    Raises:
        UserError: the op takes no shapes, or one of them has an unknown, missing or wrong size.
    """
    shaped = bench.shaped
    if shaped is None:
        raise UserError(f"{bench.op} takes no --shape; `rolltree bench OP --list` shows what an op takes.")
    sizes = [_sizes(bench.op, shaped, text) for text in shapes]

    def cases(device: torch.device, quick: bool) -> Iterator[Case]:
        for size in sizes:
            yield from shaped(device, **size)

    return replace(bench, cases=cases)


def described(shaped: Callable[..., Iterator[Case]]) -> str:
    """Return the names of the sizes as ``--shape`` takes them, those with a default in brackets."""
    parameters = _parameters(shaped).values()
    return " ".join(f"{p.name}=..." if p.default is p.empty else f"[{p.name}=...]" for p in parameters)


def _parameters(shaped: Callable[..., Iterator[Case]]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(shaped).parameters
    return {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}


def _sizes(op: str, shaped: Callable[..., Iterator[Case]], text: str) -> dict[str, int | torch.dtype]:
    parameters, takes = _parameters(shaped), f"{op} takes {described(shaped)}"
    sizes: dict[str, int | torch.dtype] = {}
    for part in text.split():
        name, equals, value = part.partition("=")
        if not equals or name not in parameters:
            raise UserError(f"--shape '{text}': '{part}' is none of its sizes; {takes}.")
        if name in sizes:
            raise UserError(f"--shape '{text}' has {name} twice; {takes}.")
        if name == "dtype":
            if value not in DTYPES:
                raise UserError(f"--shape '{text}': '{value}' is none of the types {', '.join(DTYPES)}.")
            sizes[name] = DTYPES[value]
        elif not (value.isascii() and value.isdecimal() and len(value) < 16 and 0 < int(value) < LARGEST):
            raise UserError(f"--shape '{text}': {name} must be a whole number above 0, got '{value}'.")
        else:
            sizes[name] = int(value)
    if missing := [p.name for p in parameters.values() if p.default is p.empty and p.name not in sizes]:
        raise UserError(f"--shape '{text}' lacks {', '.join(missing)}; {takes}.")
    return sizes
