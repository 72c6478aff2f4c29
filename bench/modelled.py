"""Times that a model predicts for H100 and H200; nothing here was measured.

``python -m rolltree.bench.modelled`` writes bench/results/model-sm_90/model.jsonl and table.md. A row has two times:
``best``, if a kernel's parts overlap wholly, and ``worst``, if they take turns. From

- the head: FLOP of its products at `GEMM_SHARE` of the tensor cores' peak, or the bytes they move where that takes
  longer; the row kernels' bytes; ``worst`` adds bytes and FLOP up. 18 bytes a logit: 4 written by the first product, 4
  read for the statistics, 4 read and 2 written for the gradient, 2 read by each of the other products. Backend cute
  moves 6, its exponentials, and the statistics of their tiles; ``worst`` also adds the clocks in which its first
  product's epilogue, whose instructions bench/results/static-sm_90 has, would keep a multiprocessor from multiplying;
- attention: the tiles that the lists of blocks hold, times the clocks of a round of each kernel's main loops, full ones
  and masked ones, which bench/results/static-sm_90 has from machine code; all multiprocessors busy, no tail.

Decoding is modelled_decode's, drafts are modelled_drafts's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rolltree.engine import TokenTree
from rolltree.kernels.linear_logprob import exponentials

from . import workloads

RESULTS = Path(__file__).parent / "results"
FOLDER = RESULTS / "model-sm_90"
GEMM_SHARE = 0.70  # of the peak, which cuBLAS keeps up on these GPUs at its best sizes; an assumption
STREAM_SHARE = 0.90  # of the memory's rate; an assumption
CLOCK, SMS = 1.755e9, 132
PEAK = 2 * 2048 * SMS * CLOCK  # FLOP/s, dense bf16: 2048 multiply-adds a clock of a multiprocessor
MEMORY = {"H100": 3.35e12, "H200": 4.8e12}  # bytes/s
TOKENS = 8192  # rows of the head


@dataclass(frozen=True)
class Predicted:
    op: str
    case: str
    backend: str
    direction: str
    gpu: str
    best_ms: float
    worst_ms: float
    kind: str = "model"


def _head(H: int, V: int) -> Iterator[Predicted]:
    chunk = max(2048, 2**28 // V)
    chunks = -(-TOKENS // chunk)
    logits, weight, product = TOKENS * V, V * H, 2 * TOKENS * V * H / (GEMM_SHARE * PEAK)
    for gpu, rate in MEMORY.items():
        byte = 1 / (STREAM_SHARE * rate)
        first = product, (4 * logits + 2 * weight * chunks + 2 * TOKENS * H) * byte
        to_hidden = product, (2 * logits + 2 * weight * chunks + 2 * TOKENS * H) * byte
        # the weight's gradient is read and written in fp32 for each chunk but the first
        to_weight = product, (2 * logits + 4 * weight * (2 * chunks - 1) + 2 * TOKENS * H) * byte
        steps = {
            "forward": [first, (0.0, 4 * logits * byte)],
            "forward+backward": [first, (0.0, 4 * logits * byte), (0.0, 6 * logits * byte), to_hidden, to_weight],
        }
        rows = [("triton", direction, parts, 0.0) for direction, parts in steps.items()]
        tile = exponentials.tile_of(V)
        assert tile is not None
        # three numbers a tile, written, and read and written between the products; hidden is scaled there
        between = 0.0, (3 * 4 * 5 * logits / tile + 6 * TOKENS * H) * byte
        scored, stored = ((product, (e * logits + 2 * weight * chunks + 2 * TOKENS * H) * byte) for e in (0, 2))
        for direction, kernel, parts in (
            ("forward", "scores", [scored, between]),
            ("forward+backward", "exponentials", [stored, between, to_hidden, to_weight]),
        ):
            exposed = _epilogue(kernel, tile) * logits / (exponentials.ROWS * tile) / (SMS * CLOCK)
            rows.append(("cute", direction, parts, exposed))
        rows.append(("three bare products", "forward+backward", [(product, 0.0)] * 3, 0.0))
        case = f"N={TOKENS} H={H} V={V} bf16"
        for backend, direction, parts, exposed in rows:
            best, worst = sum(max(p) for p in parts), sum(sum(p) for p in parts) + exposed
            yield Predicted("head", case, backend, direction, gpu, 1e3 * best, 1e3 * worst)


def static_rows() -> Iterator[dict[str, Any]]:
    """The rows of bench/results/static-sm_90."""
    for file in sorted((RESULTS / "static-sm_90").glob("*.jsonl")):
        yield from map(json.loads, file.read_text().splitlines())


def _epilogue(kernel: str, tile: int) -> float:
    """Clocks in which the four schedulers issue what the first product of backend cute executes beside its main loop:
    at most, as warps that only copy have some of it."""
    (row,) = (row for row in static_rows() if row["case"] == f"head {kernel} tile {tile} bf16")
    warps = 4 if tile <= exponentials.PINGPONG else 8  # of one tile
    return (row["instructions"] - sum(loop["instructions"] for loop in row["loops"])) * warps / 4


def _blocks(ends: np.ndarray, size: int = 128) -> tuple[int, int]:
    """Pairs of blocks of ``size`` tokens that see each other wholly, and in part."""
    ends = np.pad(ends, (0, -len(ends) % size))
    blocks = ends.reshape(-1, size)
    low, high = blocks.min(1)[None, :], blocks.max(1)[None, :]
    row, key = np.arange(len(blocks))[:, None], np.arange(len(blocks))[None, :]
    some = (key <= row) & (high > row * size)
    full = some & (key < row) & (low >= (row + 1) * size)
    return int(full.sum()), int((some & ~full).sum())


def _clocks() -> dict[str, tuple[list[float], list[float]]]:
    """Kernel -> clocks of a round of its full and of its masked loop, [overlapped, in turn]."""
    found = {}
    for row in static_rows():
        if row["case"].endswith("D128 bf16") and row["loops"]:  # passes over a layer's rows have none
            loops = sorted(row["loops"], key=lambda loop: loop["instructions"])
            found[row["case"].removesuffix(" D128 bf16")] = loops[0]["modelled"], loops[-1]["modelled"]
    return found


# Backend -> direction -> kernel, and the rounds that 128 rows by 128 keys of one head take
_KERNELS = {
    "flash": {"forward": {"flash fwd": 1}, "backward": {"flash bwd": 2}},
    "triton": {"forward": {"tree forward": 1}, "backward": {"tree dq": 2, "tree dkdv": 2}},
}


def _attention(name: str, tree: TokenTree, heads: int = 32) -> Iterator[Predicted]:
    full, partial = _blocks(tree.subtree_end)
    clocks = _clocks()
    for backend, directions in _KERNELS.items():
        for direction, kernels in directions.items():
            times = []
            for bound in (0, 1):
                rounds = ((n, *clocks[kernel]) for kernel, n in kernels.items())
                each = sum(n * (full * whole[bound] + partial * masked[bound]) for n, whole, masked in rounds)
                times.append(1e3 * heads * each / (SMS * CLOCK))
            case = f"{name} heads {heads}/8 D=128 bf16"
            for gpu in MEMORY:
                yield Predicted("tree_attention", case, backend, direction, gpu, times[0], times[1])


def predictions() -> Iterator[Predicted]:
    for H in (1024, 2048, 4096):
        for V in (49152, 131072, 151936):
            yield from _head(H, V)
    trees = {
        "4096+28x1024": workloads.group(4096, 1024, 28),
        "2048+segments of 512, 7 deep, 16 wide": workloads.segments(2048, 512, 7, 16),
        "4096+3 conversations of 8x(512+1024)": workloads.agent(4096, 512, 1024, 8, 3),
    }
    for name, tree in trees.items():
        yield from _attention(name, tree)


def rows(of: Iterable[Predicted]) -> list[dict[str, Any]]:
    """As they are written, times to four digits."""
    return [asdict(p) | {name: float(f"{getattr(p, name):.4g}") for name in ("best_ms", "worst_ms")} for p in of]


def write(of: list[dict[str, Any]], name: str) -> None:
    """Into `FOLDER`."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / name).write_text("".join(json.dumps(row) + "\n" for row in of))


def table(of: list[dict[str, Any]]) -> str:
    lines = [
        "# Predicted by a model, not measured",
        "",
        "`bench/modelled.py` says from what. Milliseconds: if a kernel's parts overlap wholly, and if they take turns.",
        "",
        "| op | case | direction | backend | H100 | H200 |",
        "|---|---|---|---|---|---|",
    ]
    times: dict[tuple[str, ...], dict[str, str]] = {}
    for row in of:
        key = tuple(row[name] for name in ("op", "case", "direction", "backend"))
        times.setdefault(key, {})[row["gpu"]] = f"{row['best_ms']:.3g} to {row['worst_ms']:.3g}"
    lines += [f"| {' | '.join(key)} | {by_gpu['H100']} | {by_gpu['H200']} |" for key, by_gpu in times.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    of = rows(predictions())
    write(of, "model.jsonl")
    (FOLDER / "table.md").write_text(table(of))


if __name__ == "__main__":
    main()
