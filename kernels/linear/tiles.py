"""Tiles of Triton's products: what a weight fixes, and what the number of rows chooses.

The bits of a number of the result depend on the order of its sums along the depth alone. A weight fixes that: blocks of
`Order.block` numbers, one after the other, in `Order.parts` parts, which are added in their order. Rows and columns of
a tile, warps and stages are free, and are chosen by the number of rows, as long as all tiles use the same instructions
(wgmma on Hopper, which takes 64 rows or more). `triton.agreeing` compares their bits on the device before their use.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

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
