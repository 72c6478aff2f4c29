"""Sizes of the tiles of rows and keys that each kernel takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LARGEST = 128  # rows or keys of a tile; every tile divides it


@dataclass(frozen=True)
class Tile:
    rows: int
    keys: int
    warps: int
    stages: int = 2  # of the pipeline of copies; from 3 on it waits for copies of the round before, not for the newest
    parts: int = 1  # programs that share its columns: each computes all scores, for its part of the gradients


@dataclass(frozen=True)
class Tiles:
    """The tile of each kernel, chosen by its machine code (tests/kernels/aot): no registers spilled in a loop, and on
    Hopper 16 rows or keys for each warp, so that no two warp groups compute the same scores.
    """

    forward: Tile
    dq: Tile
    dkdv: Tile


def padded_width(dim: int) -> int:
    """Return the head dimension of a tile: a power of two that ``tl.dot`` takes."""
    return max(16, 1 << (dim - 1).bit_length())


def tiles_for(dim: int, dtype: torch.dtype, *, major: int, softcap: bool) -> Tiles:
    """Return the tiles for a head dimension and dtype.

    Args:
        dim: head dimension, 1 to 512.
        major: major compute capability; Hopper's products want tiles that fill Ampere's registers.
        softcap: True if scores have a softcap, whose tanh takes registers.
    """
    width = padded_width(dim)
    stages = 3 if major == 10 else 2
    if dtype == torch.float32:  # no tensor cores: operands stay in registers
        if width > 64:
            return Tiles(Tile(16, 16, 4), Tile(16, 16, 4), Tile(16, 16, 4))
        return Tiles(Tile(32, 16, 4), Tile(16, 32, 4), Tile(16, 16, 4, stages))
    if width > 256:  # a tile of 512 columns leaves room for few rows
        return Tiles(Tile(32, 16, 4), Tile(16, 16, 4), Tile(16, 16, 4))
    if major == 9:
        if width <= 64:
            return Tiles(Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3))
        if width <= 128:
            if softcap:  # its tanh takes registers
                return Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(32, 128, 8, 3))
            return Tiles(Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3))
        # wgmma takes 64 keys, whose gradients of 256 columns registers do not hold
        dkdv = Tile(32, 128, 8, 3, parts=2) if dim == 256 else Tile(32, 32, 8)
        return Tiles(Tile(128, 32, 8, 3), Tile(128, 32, 8, 3), dkdv)
    if width <= 64:
        return Tiles(Tile(128, 64, 8, stages), Tile(128, 64, 8, stages), Tile(64, 64, 4, stages))
    if width <= 128:
        dkdv = Tile(32 if softcap else 64, 64, 8, stages)
        return Tiles(Tile(128, 64 if major >= 9 else 32, 8, stages), Tile(64, 64, 8, stages), dkdv)
    return Tiles(Tile(64, 32, 8, stages), Tile(32, 32, 4, stages), Tile(32, 32, 8, stages))
