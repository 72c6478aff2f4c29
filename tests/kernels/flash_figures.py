"""Figures of the machine code of flash-attn 4's kernels under a tree's mask, in the rows of `aot.harness`.

``python -m tests.kernels.flash_figures FOLDER`` writes bench/results/static-sm_90/flash-attn-VERSION.jsonl from what
`make hopper ARGS=--basetemp=FOLDER` left there.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from rolltree.kernels.tree_attention.flash_lists import TILES

from .aot import harness, machine_code

OPTIONS = ("", "softcap, window")
ROWS_OF_A_ROUND = {64: 128, 96: 64, 128: 64, 256: 64}
"""Head dimension -> rows that a round of the backward's loop takes of a block: flash-attn's own choice."""


def table_file() -> Path:
    return harness.STATIC / f"flash-attn-{version('flash-attn-4')}.jsonl"


def figures(dim: int, direction: str, kernel: machine_code.Kernel) -> harness.AotResult:
    """``direction``: "fwd" or "bwd"; clocks are modelled, for the warps that multiply."""
    tile = TILES[9][dim].forward if direction == "fwd" else TILES[9][dim].backward
    rows = tile.rows if direction == "fwd" else ROWS_OF_A_ROUND[dim]
    products, warps = (2, tile.rows // 16) if direction == "fwd" else (5, 8)
    case = harness.AotCase(
        case_of(direction, dim), None, {}, num_warps=warps, multiply_adds=products * rows * tile.keys * dim
    )
    loops = tuple(harness.loop_figures(loop, case, modelled=True) for loop in kernel.main_loops)
    wgmma = any(shape.startswith("HGMMA") for loop in kernel.main_loops for shape in loop.tensor)
    return harness.AotResult(
        case.name, 90, kernel.registers, kernel.stack, 0, wgmma, 1, len(kernel.instructions), loops
    )


def case_of(direction: str, dim: int, option: str = "") -> str:
    return f"flash {direction} D{dim}{f' {option}' if option else ''} bf16"


def read(code: Path, major: int, dim: int, option: str = "") -> dict[str, machine_code.Kernel]:
    """The kernels without a prefix, of `OPTIONS`, by "fwd" and "bwd", among the cubins that `hopper_builds` left."""
    folder = code / f"{major}0a-{dim}{'-softcap' if option else ''}"
    found = {}
    for direction, step in (("fwd", "forward"), ("bwd", "backward")):
        step += ", window" if option else ""
        (file,) = (folder / f"attention, flash, {step}").glob(f"*flash_{direction}_sm{major}0*.cubin")
        (found[direction],) = machine_code.read(file.read_bytes())
    return found


def main() -> None:
    (code,) = Path(sys.argv[1]).glob("**/code")
    rows = [figures(dim, *kernel) for dim in TILES[9] for kernel in sorted(read(code, 9, dim).items())]
    table_file().write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))


if __name__ == "__main__":
    main()
