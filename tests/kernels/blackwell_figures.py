"""Figures of the machine code of flash-attn 4's kernels for sm_100a, which is read, not modelled.

``python -m tests.kernels.blackwell_figures FOLDER`` writes bench/results/static-sm_100/ from what
`make hopper ARGS=--basetemp=FOLDER` left there.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from rolltree.kernels.tree_attention.flash_lists import TILES as FLASH_TILES

from . import flash_figures
from .aot import harness, machine_code

FOLDER = harness.STATIC.parent / "static-sm_100"
PRODUCT = "UTCHMMA"  # tcgen05.mma: one thread multiplies a tile from shared memory into tensor memory
TENSOR_MEMORY = ("LDTM", "STTM")  # tcgen05.ld and st: accumulators to registers, probabilities back
OLDER = ("HGMMA", "HMMA", "QGMMA", "IMMA")  # wgmma, mma.sync


@dataclass(frozen=True)
class LoopFigures:
    """An innermost loop that multiplies, or reads or writes tensor memory."""

    instructions: int
    products: int
    tensor_memory: int
    local: int  # loads and stores of spilled registers


@dataclass(frozen=True)
class Figures:
    case: str
    registers: int  # a thread, as launched; warps then hand registers on to each other
    stack: int  # bytes a thread
    instructions: int
    older: int  # tensor instructions of earlier GPUs
    loops: tuple[LoopFigures, ...]


def figures(case: str, kernel: machine_code.Kernel) -> Figures:
    loops = []
    for loop in kernel.loops:
        names = Counter(i.name for i in loop.instructions)
        memory = sum(names[name] for name in TENSOR_MEMORY)
        if names[PRODUCT] or memory:
            loops.append(LoopFigures(loop.count, names[PRODUCT], memory, loop.local))
    older = sum(i.name in OLDER for i in kernel.instructions)
    return Figures(case, kernel.registers, kernel.stack, len(kernel.instructions), older, tuple(loops))


@cache
def written() -> dict[str, Figures]:
    rows = map(json.loads, (FOLDER / "kernels.jsonl").read_text().splitlines())
    return {r["case"]: Figures(**r | {"loops": tuple(LoopFigures(**loop) for loop in r["loops"])}) for r in rows}


def check(case: str, kernel: machine_code.Kernel) -> None:
    found, before = figures(case, kernel), written()[case]
    assert found.older == 0
    assert any(loop.products for loop in found.loops)
    assert not any(loop.local for loop in found.loops if loop.products)
    assert (found.registers, len(found.loops)) == (before.registers, len(before.loops))
    assert found.stack <= before.stack
    for loop, old in zip(found.loops, before.loops, strict=True):
        assert (loop.products, loop.tensor_memory) == (old.products, old.tensor_memory)
        assert loop.local <= old.local
        assert loop.instructions <= old.instructions


PAGE = """# flash-attn 4 on sm_100a

Machine code of {versions}. Nothing here was run on a GPU, and
nothing is modelled. Written by `tests/kernels/blackwell_figures.py`. Every product is tcgen05's (UTCHMMA); no kernel
has a tensor instruction of earlier GPUs.

- *registers*: a thread, as launched; warps then hand registers on to each other. *stack*: bytes a thread.
- *products*: instructions a round of the loop that multiplies, which one warp runs; nothing is spilled in any.
- *tensor memory*: instructions a round of each loop that reads accumulators or writes probabilities there. *spilled*:
  loads and stores of spilled registers in that loop.

| kernel | registers | stack | instructions | products | tensor memory | spilled |
|---|---|---|---|---|---|---|
"""


def page(rows: list[Figures]) -> str:
    versions = f"flash-attn-4 {version('flash-attn-4')}"
    lines = []
    for row in rows:
        others = [loop for loop in row.loops if not loop.products]
        cells = (
            [loop.products for loop in row.loops if loop.products],
            [loop.tensor_memory for loop in others],
            [loop.local for loop in others],
        )
        lists = " | ".join(", ".join(map(str, cell)) or "-" for cell in cells)
        lines.append(
            f"| {row.case.removesuffix(' bf16')} | {row.registers} | {row.stack} | {row.instructions} | {lists} |"
        )
    return PAGE.format(versions=versions) + "\n".join(lines) + "\n"


def every(code: Path) -> Iterator[Figures]:
    """Return the figures of all kernels whose machine code `hopper_builds` left in ``code``."""
    for dim in FLASH_TILES[10]:
        for option in flash_figures.OPTIONS:
            for direction, kernel in sorted(flash_figures.read(code, 10, dim, option).items()):
                yield figures(flash_figures.case_of(direction, dim, option), kernel)


def main() -> None:
    (code,) = Path(sys.argv[1]).glob("**/code")
    rows = list(every(code))
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "kernels.jsonl").write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    (FOLDER / "table.md").write_text(page(rows))


if __name__ == "__main__":
    main()
