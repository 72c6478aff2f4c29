"""Which blocks of keys a block of rows sees, found on the device without synchronising, and how large blocks are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    rows: int
    keys: int
    warps: int


@dataclass(frozen=True)
class Tiles:
    """The tile of each kernel, chosen so that none spills registers on sm_80 to sm_100 (tests/kernels/aot)."""

    forward: Tile
    dq: Tile
    dkdv: Tile


def padded_width(dim: int) -> int:
    """Head dimension of a tile: a power of two that ``tl.dot`` takes."""
    return max(16, 1 << (dim - 1).bit_length())


def tiles_for(dim: int, dtype: torch.dtype) -> Tiles:
    width = padded_width(dim)
    if dtype == torch.float32:  # no tensor cores: operands stay in registers
        if width > 64:
            return Tiles(Tile(16, 16, 4), Tile(16, 16, 4), Tile(16, 16, 4))
        return Tiles(Tile(32, 32, 4), Tile(32, 32, 4), Tile(16, 32, 4))
    if width <= 64:
        return Tiles(Tile(128, 64, 4), Tile(64, 64, 4), Tile(64, 64, 4))
    if width <= 128:
        return Tiles(Tile(128, 64, 8), Tile(64, 64, 8), Tile(64, 64, 8))
    return Tiles(Tile(64, 32, 8), Tile(64, 32, 8), Tile(32, 32, 8))


def key_extents(
    subtree_end: Tensor,  # [T] int32
    block: int,
) -> tuple[Tensor, Tensor]:
    """Smallest and largest subtree_end of every key block, [T / block] int32; the last block's padding counts as 0."""
    padding = -subtree_end.numel() % block
    ends = torch.nn.functional.pad(subtree_end, (0, padding)).view(-1, block)
    return ends.amin(1), ends.amax(1)


def visible_blocks(
    subtree_end: Tensor,  # [T] int32
    position: Tensor | None,  # [T] int32
    window: int | None,
    tile: Tile,
) -> tuple[Tensor, Tensor, Tensor]:
    """Per row block: the key blocks it sees wholly, then those it sees in part; the count of the former; of both.

    Shapes [R, K + 1], [R] and [R], int32, for R row blocks and K key blocks; the lists' last column is not meant.
    """
    tokens, device = subtree_end.numel(), subtree_end.device
    low, high = key_extents(subtree_end, tile.keys)
    row = torch.arange(0, tokens, tile.rows, device=device, dtype=torch.int32)[:, None]
    key = torch.arange(0, tokens, tile.keys, device=device, dtype=torch.int32)[None, :]
    row_end = (row + tile.rows).clamp_max(tokens)
    some = (key < row_end) & (high > row)
    full = some & (key + tile.keys - 1 <= row) & (low >= row_end)
    if window is not None:
        assert position is not None
        row_positions, key_positions = (_blocked(position, size) for size in (tile.rows, tile.keys))
        some &= row_positions.amin(1)[:, None] - key_positions.amax(1)[None, :] < window
        full &= some & (row_positions.amax(1)[:, None] - key_positions.amin(1)[None, :] < window)
    partial = some & ~full
    full_count = full.sum(1, dtype=torch.int32)
    place = torch.where(full, full.cumsum(1), full_count[:, None] + partial.cumsum(1)) - 1
    place = torch.where(some, place, key.shape[1])
    ids = torch.arange(key.shape[1], device=device, dtype=torch.int32).expand_as(place)
    lists = torch.empty(row.shape[0], key.shape[1] + 1, device=device, dtype=torch.int32).scatter_(1, place, ids)
    return lists, full_count, some.sum(1, dtype=torch.int32)


def _blocked(position: Tensor, block: int) -> Tensor:
    """[T / block, block]; the last block repeats the last position."""
    index = torch.arange(-(-position.numel() // block) * block, device=position.device)
    return position[index.clamp_max(position.numel() - 1)].view(-1, block)
