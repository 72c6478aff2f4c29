"""A layer's decode attention on H100 and H200 by kernel, by a model; nothing here was measured.

``python -m rolltree.bench.modelled_decode`` writes bench/results/model-sm_90/decode.jsonl and decode.md, for the trees
of bench/tree_decode.py and for one that forks, 16 query heads of 8 key heads, bf16. A row has two times, ``best`` and
``worst``. A launch's items, a tile of queries and some keys of a node for a key head, go to the multiprocessors longest
first. An item takes the larger of

- its rounds of the main loop, whose clocks bench/results/static-sm_90 has; ``worst``: products and the rest in turn,
  and `COLD` seconds before the first, shared by the blocks that a multiprocessor holds;
- its bytes of keys and values at `SM_BYTES` a clock; ``worst``: at an equal share of the memory's rate, each tile and
  head from memory even if another has just read them.

A launch takes the multiprocessor that ends last, or all bytes, once, at `STREAM_SHARE` of the memory's rate. A step
adds `LAUNCH` for each launch, and ``worst`` the bytes of partial results, written and read; ``best`` finds them in L2.

- triton, cuda: two launches; 64 queries, 512 keys an item; partials in fp32.
- flash-attn 4: tiles of 64 or 128 queries, cp.async for pages of 16 keys (TMA wants a page to be a tile of keys); a
  node, or 512 keys of it, is an entry of its page table, for it does not split keys on sm_90. Three launches: rows'
  queries are copied for each entry, as a row of its input belongs to one; partials are bf16, the only dtype that it
  writes; our merge.
- FlashInfer's cascade: a level of the tree is a call, merged into the last by another launch. On sm_90 a call takes
  its FA3 kernel, whose plan gives each query head a tile of 128 rows (192 for D = 64) of a whole node; clocks as
  flash-attn 4's of 128. ``fa2`` is what it has for other GPUs: query heads packed in tiles of 16, 64 or 128 by the
  mean of a level, keys cut to fill two blocks a multiprocessor, merged by a second launch if cut; clocks as our CUDA
  kernel's for 64 by 64, partials in fp32. Neither was compiled.

Not in it: what a host needs for plans, which FlashInfer makes anew each step; binary search for an entry in flash-attn
4's scheduler; a node that begins within a page, which neither of them can read.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .modelled import CLOCK, FOLDER, MEMORY, SMS, STREAM_SHARE, Predicted, rows, static_rows, write

HEADS, KEY_HEADS, PAGE, CHUNK = 16, 8, 16, 512
GROUP = HEADS // KEY_HEADS
SM_BYTES = 64  # a clock that one multiprocessor draws from L2 at most; an assumption
COLD = 1.3e-6  # seconds of a page's id, then its first keys, coming from memory; an assumption
LAUNCH = 2e-6  # seconds to end a kernel and begin the next in a replayed graph; an assumption


class Node(NamedTuple):
    keys: int
    rows: int
    level: int


class Item(NamedTuple):
    keys: int
    queries: int
    times: int  # so many equal ones, over heads


class Clocks(NamedTuple):
    """Of a round of a main loop: ``queries`` by ``keys``."""

    best: float
    worst: float
    queries: int
    keys: int
    blocks: int  # that a multiprocessor holds


class Launch(NamedTuple):
    items: list[Item]
    clocks: Clocks
    partials: float  # bytes written, and read by a merge
    unique: float  # bytes of keys and values, each once


@dataclass(frozen=True)
class Step:
    """What a kernel does for a tree: launches that read keys, and how many there are in all."""

    reading: list[Launch]
    launches: int


def shared(prefix: int, own: int, group: int, groups: int) -> list[Node]:
    """``groups`` prompts with ``group`` rows each."""
    return [Node(prefix, group, 0)] * groups + [Node(own, 1, 1)] * (groups * group)


def forked(prompt: int, segment: int, depth: int, width: int) -> list[Node]:
    """`workloads.segments`, all rows at its leaves."""
    nodes = [Node(prompt, width, 0)]
    for level in range(1, depth + 1):
        count = min(2**level, width)
        nodes += [Node(segment, width // count, level)] * count
    return nodes


TREES = {
    "P=16384 R=128 G=16 x 1": shared(16384, 128, 16, 1),
    "P=16384 R=2048 G=16 x 1": shared(16384, 2048, 16, 1),
    "P=4096 R=128 G=16 x 16": shared(4096, 128, 16, 16),
    "P=4096 R=2048 G=16 x 16": shared(4096, 2048, 16, 16),
    "P=4096 R=128 G=64 x 1": shared(4096, 128, 64, 1),
    "P=2048, segments of 512, 7 deep, 16 wide": forked(2048, 512, 7, 16),
    "P=1024 R=1024 G=1 x 16": shared(1024, 1024, 1, 16),
    "P=1024 R=1024 G=1 x 64": shared(1024, 1024, 1, 64),
}


@functools.cache
def clocks(case: str, queries: int, keys: int) -> Clocks:
    row = [row for row in static_rows() if row["case"] == case][-1]  # the newest version's
    best, worst = max((loop["modelled"] for loop in row["loops"]), key=max)
    return Clocks(best, worst, queries, keys, row["ctas"])


def _launch(nodes: Sequence[Node], dim: int, of: Clocks, chunk: int | None, packed: bool, size: float) -> Launch:
    """``size``: bytes of a number of a partial; 0: none are written."""
    items, partials = [], 0.0
    for keys, below, _ in nodes:
        queries, heads = (below * GROUP, KEY_HEADS) if packed else (below, HEADS)
        tiles = -(-queries // of.queries)
        whole, rest = divmod(keys, chunk or keys)
        parts = [(chunk or keys, whole), (rest, 1 if rest else 0)]
        items += [Item(k, of.queries, n * tiles * heads) for k, n in parts if n]
        partials += (whole + bool(rest)) * below * HEADS * (dim * size + 4) if size else 0
    return Launch(items, of, partials, sum(n.keys for n in nodes) * 2 * 2 * KEY_HEADS * dim)


def triton(nodes: Sequence[Node], dim: int) -> Step:
    return Step([_launch(nodes, dim, clocks(f"decode partial D{dim} bf16", 64, 64), CHUNK, True, 4)], 2)


def cuda(nodes: Sequence[Node], dim: int) -> Step:
    return Step([_launch(nodes, dim, clocks(f"decode cuda D{dim} bf16", 64, 64), CHUNK, True, 4)], 2)


def _flash(nodes: Sequence[Node], dim: int, rows: int, chunk: int | None) -> Step:
    return Step([_launch(nodes, dim, clocks(f"decode flash {rows}x128 D{dim} bf16", rows, 128), chunk, True, 2)], 3)


def flash_nodes(nodes: Sequence[Node], dim: int) -> Step:
    return _flash(nodes, dim, 64, None)


def flash_chunks(nodes: Sequence[Node], dim: int) -> Step:
    return _flash(nodes, dim, 64, CHUNK)


def flash_chunks_128(nodes: Sequence[Node], dim: int) -> Step:
    return _flash(nodes, dim, 128, CHUNK)


def _levels(nodes: Sequence[Node]) -> list[list[Node]]:
    return [[n for n in nodes if n.level == level] for level in range(1 + max(n.level for n in nodes))]


def cascade(nodes: Sequence[Node], dim: int) -> Step:
    of = clocks(f"decode flash 128x128 D{dim} bf16", 128, 128)
    if dim == 64:  # three warp groups instead of two
        of = of._replace(best=1.5 * of.best, worst=1.5 * of.worst, queries=192)
    levels = _levels(nodes)
    return Step([_launch(level, dim, of, None, False, 2) for level in levels], 2 * len(levels) - 1)


def cascade_fa2(nodes: Sequence[Node], dim: int) -> Step:
    reading, launches = [], 0
    for level in _levels(nodes):
        mean = sum(n.rows for n in level) * GROUP / len(level)
        tile = 128 if mean > 64 else 64 if mean > 16 else 16
        base = clocks(f"decode cuda D{dim} bf16", 64, 64)
        of = base._replace(best=base.best * tile / 64, worst=base.worst * tile / 64, queries=tile)
        chunk = _chunk_of(level, tile)
        cut = chunk < max(n.keys for n in level)
        reading.append(_launch(level, dim, of, chunk, True, 4 if cut else 2))
        launches += 1 + cut
    return Step(reading, launches + len(reading) - 1)


def _chunk_of(level: Sequence[Node], tile: int) -> int:
    """The least keys, in pages and at least 128, of which all parts fit two blocks a multiprocessor."""
    most, longest = 2 * SMS // KEY_HEADS, max(n.keys for n in level)
    for chunk in range(128, longest, PAGE):
        if sum(-(-n.rows * GROUP // tile) * -(-n.keys // chunk) for n in level) <= most:
            return chunk
    return longest


def _ends(launch: Launch, dim: int, rate: float, worst: bool) -> float:
    """Seconds until the last multiprocessor ends."""
    of, durations = launch.clocks, []
    total = sum(item.times for item in launch.items)
    share = min(SM_BYTES * CLOCK, rate / min(SMS, total)) if worst else SM_BYTES * CLOCK
    for keys, _, count in launch.items:
        compute = -(-keys // of.keys) * (of.worst if worst else of.best) / CLOCK
        cold = COLD / of.blocks if worst else 0.0
        durations += [max(compute, 4 * keys * dim / share) + cold] * count
    free = [0.0] * SMS
    for duration in sorted(durations, reverse=True):
        heapq.heapreplace(free, free[0] + duration)
    return max(free)


def seconds(step: Step, dim: int, memory: float) -> tuple[float, float]:
    """``best`` and ``worst`` of a step; ``memory`` in bytes/s."""
    rate = STREAM_SHARE * memory
    best = sum(max(_ends(launch, dim, rate, False), launch.unique / rate) for launch in step.reading)
    worst = sum(max(_ends(launch, dim, rate, True), launch.unique / rate) for launch in step.reading)
    worst += sum(2 * launch.partials / rate for launch in step.reading)
    return best + step.launches * LAUNCH, worst + step.launches * LAUNCH


KERNELS = {
    "triton": triton,
    "cuda": cuda,
    "flash-attn 4, 512 keys an entry": flash_chunks,
    "flash-attn 4, 128 queries": flash_chunks_128,
    "flash-attn 4, a node an entry": flash_nodes,
    "FlashInfer cascade": cascade,
    "FlashInfer cascade, fa2": cascade_fa2,
}


def predictions() -> Iterator[Predicted]:
    for dim in (128, 64):
        for name, nodes in TREES.items():
            case = f"{name} heads {HEADS}/{KEY_HEADS} D={dim} bf16"
            for gpu, memory in MEMORY.items():
                for kernel, step in KERNELS.items():
                    best, worst = seconds(step(nodes, dim), dim, memory)
                    yield Predicted("tree_decode", case, kernel, "step", gpu, 1e3 * best, 1e3 * worst)


def table(of: list[dict[str, Any]]) -> str:
    lines = [
        "# Decode attention, predicted by a model, not measured",
        "",
        "`bench/modelled_decode.py` says from what. Microseconds of a layer's step, best to worst.",
        "",
        f"| tree, {HEADS} query heads of {KEY_HEADS} key heads, bf16 | D | GPU | " + " | ".join(KERNELS) + " |",
        "|---|---|---|" + "---|" * len(KERNELS),
    ]
    cells: dict[tuple[str, str, str], list[str]] = {}
    for row in of:
        tree, _, shape = row["case"].partition(" heads ")
        dim = shape.partition("D=")[2].split()[0]
        times = f"{1e3 * row['best_ms']:.3g} to {1e3 * row['worst_ms']:.3g}"
        cells.setdefault((tree, dim, row["gpu"]), []).append(times)
    lines += [f"| {' | '.join(key)} | {' | '.join(by_kernel)} |" for key, by_kernel in cells.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    of = rows(predictions())
    write(of, "decode.jsonl")
    (FOLDER / "decode.md").write_text(table(of))


if __name__ == "__main__":
    main()
