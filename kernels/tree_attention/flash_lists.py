"""The tree as flash-attn 4 reads it: tiles, lists of full and partial blocks, and the tensors of its mask.

The lists are those of `visible`, made on the device without synchronising, in flash-attn's layout: wholly and partly
visible blocks in separate tensors. Their size follows from shapes alone, so it grows as T N: both directions take
T N / 1024 bytes with blocks of 128 x 128, an eighth of a KiB a row at 128 K tokens. All heads and layers share them.
`LIST_BYTES` bounds them.

The mask of a partial block compares, for the row r of the T and the key j of all N = offset + T,

    j - offset <= r < subtree_end[j] - offset                 (and position[r] < position[j] + window)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from .blocks import Tile
from .visible import once, visible_blocks

LIST_BYTES = 2**30  # of one mask, both directions: 1 M tokens in blocks of 128 x 128
LARGEST_ROWS = 768  # per-row tensors of the mask are padded to a multiple of it: every tile of rows divides it
LARGEST_KEYS = 128


class FlashTiles(NamedTuple):
    """Blocks of the lists; the kernels split or join them."""

    forward: Tile
    backward: Tile


class BlockLists(NamedTuple):
    """Visible blocks of the other side for every block of one side, in the field order of flash-attn's tuple."""

    partial_count: Tensor  # [1, 1, B] int32
    partial: Tensor  # [1, 1, B, others] int32, of which a block's count is set, ascending
    full_count: Tensor  # [1, 1, B] int32
    full: Tensor  # [1, 1, B, others] int32


_HOPPER = {
    64: FlashTiles(Tile(192, 128, 12), Tile(128, 128, 12)),
    96: FlashTiles(Tile(192, 128, 12), Tile(128, 128, 12)),
    128: FlashTiles(Tile(128, 128, 12), Tile(128, 128, 12)),
    256: FlashTiles(Tile(128, 64, 12), Tile(128, 64, 12)),
}
_BLACKWELL = {dim: FlashTiles(Tile(256, 128, 16), Tile(256, 128, 16)) for dim in (64, 96, 128)}
TILES = {9: _HOPPER, 10: _BLACKWELL}
"""Compute capability's major -> head dimension -> tiles that both directions of flash-attn's kernels take."""


def list_bytes(rows: int, keys: int, tiles: FlashTiles) -> int:
    """Return the bytes of the index lists of both directions; a block has room for all others as full and as partial
    ones."""
    forward, backward = tiles
    entries = triton.cdiv(rows, forward.rows) * (triton.cdiv(keys, forward.keys) + 1)
    entries += triton.cdiv(keys, backward.keys) * (triton.cdiv(rows, backward.rows) + 1)
    return 2 * 4 * entries


def block_lists(
    subtree_end: Tensor,  # [N] int32
    position: Tensor | None,  # [N] int32
    window: int | None,
    tile: Tile,
    offset: int,
    by_key: bool,
) -> BlockLists:
    """Return the key blocks of every row block; row blocks begin at ``offset``. With ``by_key`` the row blocks of
    every key block."""
    visible = visible_blocks(subtree_end, position, window, tile, offset, by_key)

    def make() -> BlockLists:
        partial = visible.blocks.flip(1)  # `visible` writes these from the back
        counts = (count.view(1, 1, -1) for count in (visible.partial_count, visible.full_count))
        partial_count, full_count = counts
        return BlockLists(partial_count, partial[None, None, :, :-1], full_count, visible.blocks[None, None, :, :-1])

    request = ("flash lists", tile.rows, tile.keys, offset, by_key)
    return once(subtree_end, position, window, request, make)


def mask_tensors(subtree_end: Tensor, position: Tensor | None, window: int | None, offset: int) -> tuple[Tensor, ...]:
    """Return the tensors that the mask reads: `ends`, with ``offset`` > 0 `firsts`, with a window `lasts` and the rows'
    positions.

    All are padded to whole tiles: keys past the last are seen by no row.
    """

    def make() -> tuple[Tensor, ...]:
        tensors = [_filled(subtree_end - offset, LARGEST_KEYS)]
        keys = subtree_end.numel()
        if offset:
            firsts = torch.arange(-offset, keys - offset, dtype=torch.int32, device=subtree_end.device)
            tensors.append(_filled(firsts, LARGEST_KEYS))
        if window is not None:
            assert position is not None
            most = torch.iinfo(torch.int32).max
            lasts = (position.long() + window).clamp(max=most).int()
            tensors += [_filled(lasts, LARGEST_KEYS), _filled(position[offset:], LARGEST_ROWS)]
        return tuple(tensors)

    return once(subtree_end, position, window, ("flash mask", offset), make)


def sees(row, key, ends, tensors, load: Callable, *, prefix: bool, window: bool):  # type: ignore[no-untyped-def]
    """Return whether row r of the T sees key j, by `mask_tensors`; ``load(tensor, index)`` reads one of them.

    The kernels trace this function on their own values, tests run it on tensors.
    """
    rest = iter(tensors)
    first = load(next(rest), key) if prefix else key
    seen = (first <= row) & (row < load(ends, key))
    if window:
        last, positions = rest
        seen = seen & (load(positions, row) < load(last, key))
    return seen


def _filled(values: Tensor, multiple: int) -> Tensor:
    return F.pad(values, (0, -values.numel() % multiple))
