"""Tiles of Triton's products: what a weight fixes, and what the number of rows chooses.

The bits of a number of the result depend on the order of its sums along the depth alone. A weight fixes that: blocks of
`Order.block` numbers, one after the other, in `Order.parts` parts, which are added in their order. Rows and columns of
a tile, warps and stages are free, and are chosen by the number of rows, as long as all tiles use the same instructions
(wgmma on Hopper, which takes 64 rows or more). `agreeing` compares their bits on the device before they are used.
"""

from __future__ import annotations

import functools
import logging
from typing import NamedTuple

import torch

from .. import machine
from .cancelling import cancelling

_log = logging.getLogger("rolltree.kernels")

NARROW, DEEP, PARTS = 1024, 2048, 4
"""A weight of at most `NARROW` columns and at least `DEEP` rows of depth has too few tiles for a GPU where few rows are
multiplied, so its depth is divided into `PARTS`."""


class Order(NamedTuple):
    """The order of the sums of a weight."""

    block: int
    parts: int


class Tile(NamedTuple):
    rows: int
    columns: int
    warps: int
    stages: int
    apart: bool = False  # each part of the depth is computed by a program of its own, and a second kernel adds them


def order_of(width: int, depth: int, dtype: torch.dtype) -> Order:
    """Return the order of sums of a weight ``[width, depth]``; rows of an odd depth are not aligned for copies to
    shared memory."""
    if dtype == torch.float32:
        return Order(16, 1)
    block = max(16, 1 << (depth - 1).bit_length())
    if depth % 8:
        return Order(min(32, block), 1)
    return Order(min(64, block), PARTS if width <= NARROW and depth >= DEEP else 1)


def tiles_for(order: Order, dtype: torch.dtype, depth: int) -> tuple[Tile, ...]:
    """Return the tiles that compute sums of an order, the one first that all others are compared with."""
    if dtype == torch.float32:
        return (Tile(64, 64, 4, 3),)
    if depth % 8:
        return (Tile(64, 64, 4, 2),)
    if order.parts > 1:  # the sum of the parts takes as many registers as a part
        return Tile(64, 64, 4, 5, apart=True), Tile(128, 128, 8, 3)
    return Tile(64, 64, 4, 5), Tile(128, 128, 8, 4), Tile(128, 256, 8, 3)


def tile_of(order: Order, width: int, depth: int, dtype: torch.dtype, rows: int, device: torch.device) -> Tile:
    """Return the tile for ``rows`` rows: that whose programs, in rounds of one a processor, read the least. Few rows
    take the smallest."""
    tiles, processors = agreeing(order, depth, dtype, device), machine.gpu_processors(device)

    def read(tile: Tile) -> float:
        parts = order.parts if tile.apart else 1
        programs = -(-rows // tile.rows) * -(-width // tile.columns) * parts
        return -(-programs // processors) * (tile.rows + tile.columns) / parts

    return tiles[0] if rows <= tiles[0].rows else min(tiles, key=read)


@functools.cache
def agreeing(order: Order, depth: int, dtype: torch.dtype, device: torch.device) -> tuple[Tile, ...]:
    """Return the tiles whose sums have the same bits on this device; others are named in the log, and not used.

    They are compared on sums whose terms cancel, for more rows and columns than any tile has, once a depth, and not
    for the first time within a CUDA graph that is being captured. A tile that needs more shared memory than the device
    has is left out likewise.
    """
    from triton.runtime.errors import OutOfResources

    from .triton import by_tile

    first, *others = tiles_for(order, dtype, depth)
    if not others:
        return (first,)
    rows, weight, _ = cancelling(300, 300, depth, dtype, device)
    expected, kept = by_tile(rows, weight, order, first), [first]
    for tile in others:
        try:
            reason = (
                "" if torch.equal(by_tile(rows, weight, order, tile), expected) else f"its bits differ from {first}"
            )
        except OutOfResources as error:
            reason = str(error)
        if reason:
            _log.warning("linear: %s of depth %d is not used on %s: %s.", tile, depth, device, reason)
        else:
            kept.append(tile)
    return tuple(kept)
