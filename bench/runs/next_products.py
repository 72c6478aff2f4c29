"""Lines of gpu_next.py about products with a fixed order of sums, and about the gradient of the head.

Bits: which tiles of a weight agree, and whether the library's products do at any number of rows. Times: of each tile
and of the library. Nothing is chosen by these figures while a model runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from rolltree.kernels import Objective, PolicyFields, linear_policy_loss
from rolltree.kernels.linear.cancelling import cancelling
from rolltree.kernels.linear.tiles import order_of, tiles_for

from ..gpu_first import Run
from ..schema import Row

SHAPES = ((1024, 1024), (1024, 2048), (1024, 3072), (3072, 1024), (4096, 1024), (151936, 1024))
"""Widths and depths of Qwen3 0.6B: k and v, o, down, gate and up, q, k and v together, head."""
ROWS = (1, 17, 64, 256, 300, 2048, 12288)


class Measured(Protocol):
    """`gpu_next.Decoding`, as far as it is needed here."""

    @property
    def device(self) -> torch.device: ...
    @property
    def small(self) -> bool: ...
    def row(self, case: str, provider: str, metric: str, values: Sequence[float]) -> Row: ...
    def wait(self) -> None: ...


def products(x: Measured) -> Iterator[tuple[str, Run]]:
    """Yield bits and times of products, then times of the head's gradient."""
    shapes = ((70, 96),) if x.small else SHAPES
    for width, depth in shapes:
        yield f"bits of {width} x {depth}", partial(_bits, x, width, depth)
    for width, depth in shapes:
        yield f"times of {width} x {depth}", partial(_times, x, width, depth)
    for width in (64,) if x.small else (1024, 4096):
        yield f"gradient of a head of {width}", partial(_head, x, width)


def _bits(x: Measured, width: int, depth: int) -> tuple[list[Row], str]:
    """Compare all tiles, and the library's product at each number of rows with that of the most."""
    from rolltree.kernels.linear.triton import agreeing

    order, dtype = order_of(width, depth, torch.bfloat16), torch.bfloat16
    kept, tiles = agreeing(order, depth, dtype, x.device), tiles_for(order, dtype, depth)
    rows, weight, _ = cancelling(max(_row_numbers(x)), min(width, 4096), depth, dtype, x.device)
    whole = rows @ weight.T
    same = [torch.equal(rows[:n] @ weight.T, whole[:n]) for n in _row_numbers(x)]
    case = f"bits of {width} x {depth}"
    shares = [
        x.row(case, "tiles", "share", [len(kept) / len(tiles)]),
        x.row(case, "library", "share", [sum(same) / len(same)]),
    ]
    numbers = [str(n) for n, agrees in zip(_row_numbers(x), same, strict=True) if not agrees]
    return shares, f"{len(kept)} of {len(tiles)} tiles agree; the library differs at {', '.join(numbers) or 'no'} rows"


def _times(x: Measured, width: int, depth: int) -> tuple[list[Row], str]:
    from rolltree.kernels.linear.triton import by_tile

    order = order_of(width, depth, torch.bfloat16)
    times = []
    for n in _row_numbers(x):
        rows, weight = (torch.randn(m, depth, device=x.device).bfloat16() for m in (n, width))
        case = f"{n} rows of {width} x {depth}"
        wide: dict[str, Any] = {"out_dtype": torch.float32} if x.device.type == "cuda" else {}  # as the tiles write
        calls: dict[str, Callable[[], object]] = {"library": partial(torch.mm, rows, weight.T, **wide)}
        for tile in tiles_for(order, torch.bfloat16, depth):
            calls[f"{tile.rows} x {tile.columns}"] = partial(by_tile, rows, weight, order, tile)
        times += [x.row(case, name, "time_ms", _timed(x, call)) for name, call in calls.items()]
    best = min((row for row in times if row.provider != "library"), key=lambda row: row.value)
    return times, f"{len(times)} times, the shortest of a tile {best.value:.3g} ms for {best.case}"


def _head(x: Measured, width: int) -> tuple[list[Row], str]:
    """Time the fused loss with the gradient from exponentials, and from the gradient of the logits."""
    from rolltree.kernels.linear_policy_loss import fused

    N, V = (64, 300) if x.small else (8192, 151936)
    hidden, weight = (torch.randn(n, width, device=x.device).bfloat16().requires_grad_() for n in (N, V))
    target = torch.randint(V, (N,), device=x.device)
    fields = PolicyFields.flat(torch.randn(N, device=x.device), old_logprob=torch.full((N,), -9.0, device=x.device))

    def call() -> None:
        loss = linear_policy_loss(hidden, weight, target, fields, Objective(), normalizer=N).loss
        torch.autograd.grad(loss, (hidden, weight))

    case, fits = f"N={N} H={width} V={V}", fused.fits
    rows = [x.row(case, "exponentials", "time_ms", _timed(x, call))]
    never: Any = lambda *_: False  # noqa: E731
    fused.fits = never
    try:
        rows.append(x.row(case, "gradient of the logits", "time_ms", _timed(x, call)))
    finally:
        fused.fits = fits
    return rows, ", ".join(f"{row.provider} {row.value:.4g} ms" for row in rows)


def _row_numbers(x: Measured) -> tuple[int, ...]:
    return (1, 17, 70) if x.small else ROWS


def _timed(x: Measured, call: Callable[[], object]) -> list[float]:
    """Return milliseconds of a call, of several rounds."""
    call()
    times = []
    for _ in range(2 if x.small else 5):
        x.wait()
        begin, count = time.perf_counter(), 1 if x.small else 10
        for _ in range(count):
            call()
        x.wait()
        times.append(1e3 * (time.perf_counter() - begin) / count)
    return times
