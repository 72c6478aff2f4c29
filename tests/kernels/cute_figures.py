"""What the machine code of the head's products on quack's GEMMs says, in the rows of `aot.harness`.

``python -m tests.kernels.cute_figures FOLDER`` writes bench/results/static-sm_90/quack-VERSION.jsonl from what
`make hopper ARGS=--basetemp=FOLDER` left there.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rolltree.kernels.linear_logprob.exponentials import PINGPONG, ROWS, TILES

from .aot import harness, machine_code

TILE_K = 64  # columns of the operands that a round of a main loop multiplies
FIRST = ("exponentials", "scores")
MADE_FROM = {"to_hidden": "times_v", "to_weight adding": "_ao_", "to_weight": "_product_"}
"""Kernel -> a part of its name that none before has."""


def table_file() -> Path:
    return harness.STATIC / f"quack-{version('quack-kernels')}.jsonl"


def written() -> list[dict[str, Any]]:
    return [json.loads(line) for line in table_file().read_text().splitlines()]


def case_of(name: str, tile: int) -> str:
    return f"head {name}{f' tile {tile}' if name in FIRST else ''} bf16"


def figures(name: str, tile: int, kernel: machine_code.Kernel) -> harness.AotResult:
    """``name``: as in `read`; clocks are modelled, for the warps that multiply one tile."""
    columns, warps = (tile, 4 if tile <= PINGPONG else 8) if name in FIRST else (256, 8)
    case = harness.AotCase(
        case_of(name, tile), None, {}, num_warps=warps, multiply_adds=ROWS * columns * TILE_K
    )  # fmt: skip
    loops = tuple(harness.loop_figures(loop, case, modelled=True) for loop in kernel.main_loops)
    wgmma = all(any(shape.startswith("HGMMA") for shape in loop.tensor) for loop in kernel.main_loops)
    return harness.AotResult(
        case.name, 90, kernel.registers, kernel.stack, 0, wgmma, 1, len(kernel.instructions), loops
    )


def read(code: Path, major: int, tile: int) -> dict[str, machine_code.Kernel]:
    """The kernels among the cubins that `hopper_builds` left, one below a folder for each step; "plain" are those that
    scale no operand on Hopper."""
    found = {}
    for file in (code / f"{major}0a-tile-{tile}").glob("head, cute, */*.cubin"):
        name = file.parent.name.removeprefix("head, cute, ")
        if name.startswith("gradients"):
            plain = " plain" if "entropy" in name else ""
            name = next(n for n, part in MADE_FROM.items() if part in file.name) + plain
        (found[name],) = machine_code.read(file.read_bytes())
    return found


def main() -> None:
    (code,) = Path(sys.argv[1]).glob("**/code")
    rows = [figures(name, tile, kernel) for tile in TILES for name, kernel in sorted(read(code, 9, tile).items())]
    table_file().write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))


if __name__ == "__main__":
    main()
