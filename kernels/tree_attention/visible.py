"""Lists of wholly and of partly visible blocks, made on the device without synchronising.

Row i sees key j iff ``j <= i < subtree_end[j]``, so the largest and smallest subtree_end of a block of keys tell
whether a block of rows sees none, all or a part of it. A kernel walks one list from end to end: a row block sees the
path from its root, and the pipeline of copies does not restart where the path leaves one node for the next.

The work of dK/dV is uneven: the keys of a root are seen by every row. `work_items` cuts it into items of about equal
length; the partial sums of one key block are added up later, in their order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .blocks import LARGEST, Tile

T = TypeVar("T")
SPAN = 128  # blocks that `list_blocks_kernel` tests at a time
SHORTEST_ITEM = 32  # tiles; shorter items would cost more in partial sums than the balance gains
WANTED_ITEMS = 512  # of all heads: about four for each multiprocessor of the largest GPUs


class VisibleBlocks(NamedTuple):
    """Visible blocks of the other side for every block of one side (rows or keys)."""

    blocks: Tensor  # [B, others + 1] int32: wholly visible ones from the front on, partly visible ones from the back
    full_count: Tensor  # [B] int32
    partial_count: Tensor  # [B] int32


class Mask(NamedTuple):
    """The vectors that masked tiles compare, padded with zeros to whole tiles: keys past the last are seen by no
    row."""

    ends: Tensor  # [N to a multiple of LARGEST] int32, subtree_end
    positions: Tensor  # likewise; `ends` without a window
    row_positions: Tensor  # [T to a multiple of LARGEST] int32, of the rows; `ends` without a window


class WorkItems(NamedTuple):
    """The tiles (block of rows, query head) of every key block, wholly visible ones first, cut into items.

    The sizes are bounds that follow from shapes alone; entries beyond the last one have block -1.
    """

    items: Tensor  # [M, 4] int32: key block, first tile, end, slot of the partial sum (-1: not cut); longest first
    splits: Tensor  # [S, 3] int32: key block, its first slot, number of slots
    slots: int


@triton.jit
def _visibility(
    row_block, key_block, lows, highs, key_firsts, key_lasts, row_firsts, row_lasts, tokens, offset, window,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BY_KEY: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Return whether blocks see each other in part, and whether wholly: every key by every row (with BY_KEY ROWS of
    them)."""
    row, key = offset + row_block * ROWS, key_block * KEYS
    exists = (row < tokens) & (key < tokens)
    row_end = tl.minimum(row + ROWS, tokens)
    low = tl.load(lows + key_block, mask=exists, other=0)
    high = tl.load(highs + key_block, mask=exists, other=0)
    seen = exists & (key < row_end) & (high > row)
    full = seen & (key + KEYS - 1 <= row) & (low >= row_end)
    if BY_KEY:
        full &= row + ROWS <= tokens
    if HAS_WINDOW:
        nearest = tl.load(row_firsts + row_block, mask=exists, other=0) - tl.load(
            key_lasts + key_block, mask=exists, other=0
        )
        farthest = tl.load(row_lasts + row_block, mask=exists, other=0) - tl.load(
            key_firsts + key_block, mask=exists, other=0
        )
        seen &= nearest < window
        full &= farthest < window
    return seen & ~full, seen & full


@triton.jit(do_not_specialize=["tokens", "offset", "window", "width"])
def list_blocks_kernel(
    lows, highs, key_firsts, key_lasts,  # [key blocks] int32
    row_firsts, row_lasts,  # [row blocks] int32
    blocks,  # [B, width] int32
    full_counts, partial_counts,  # [B] int32
    tokens, offset, window, width,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BY_KEY: tl.constexpr, HAS_WINDOW: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    this = block + tl.zeros([SPAN], tl.int32)
    first = blocks + block.to(tl.int64) * width
    last = first + width - 1
    full_count, partial_count = 0, 0
    for begin in range(0, width - 1, SPAN):
        other = begin + tl.arange(0, SPAN)
        row, key = (other, this) if BY_KEY else (this, other)
        partial, full = _visibility(
            row, key, lows, highs, key_firsts, key_lasts, row_firsts, row_lasts, tokens, offset, window,
            ROWS, KEYS, BY_KEY, HAS_WINDOW,
        )  # fmt: skip
        partial, full = partial.to(tl.int32), full.to(tl.int32)
        tl.store(first + full_count + tl.cumsum(full, 0) - 1, other, mask=full != 0)
        tl.store(last - partial_count - tl.cumsum(partial, 0) + 1, other, mask=partial != 0)
        full_count += tl.sum(full, 0)
        partial_count += tl.sum(partial, 0)
    tl.store(full_counts + block, full_count)
    tl.store(partial_counts + block, partial_count)


_visible_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""subtree_end -> its version and the results made from it: all layers of a model ask for the same ones."""


def once(subtree_end: Tensor, position: Tensor | None, window: int | None, what: object, make: Callable[[], T]) -> T:
    """Return ``make()``, or the earlier result for these arguments.

    ``subtree_end`` and ``position`` must not change between two calls without a change of their version counters.
    """
    if subtree_end.is_cuda and torch.cuda.is_current_stream_capturing():  # a graph's memory is its own
        return make()
    version, by_kind = _visible_of.get(subtree_end, (-1, {}))
    if version != subtree_end._version:
        version, by_kind = subtree_end._version, {}
        _visible_of[subtree_end] = version, by_kind
    windowed = None if position is None or window is None else (id(position), position._version, window)
    if (what, windowed) not in by_kind:
        by_kind[what, windowed] = make(), position  # an id lives with its tensor
    return by_kind[what, windowed][0]


def visible_blocks(
    subtree_end: Tensor,  # [N] int32
    position: Tensor | None,  # [N] int32
    window: int | None,
    tile: Tile,
    offset: int,
    by_key: bool,
) -> VisibleBlocks:
    """Return the key blocks of every row block; row blocks begin at ``offset``. With ``by_key`` the row blocks of
    every key block."""

    def make() -> VisibleBlocks:
        tokens = subtree_end.numel()
        low, high = _extent(subtree_end, tile.keys, 0)
        spans = (low, low, low, low)  # not read without a window
        if window is not None:
            assert position is not None
            spans = (*_extent(position, tile.keys, None), *_extent(position[offset:], tile.rows, None))
        count, others = triton.cdiv(tokens - offset, tile.rows), triton.cdiv(tokens, tile.keys)
        if by_key:
            count, others = others, count
        blocks = subtree_end.new_empty((count, others + 1))
        room = triton.cdiv(count, 4) * 4  # both begin at 16 bytes: otherwise other kernels would be compiled
        full_count, partial_count = subtree_end.new_empty((2, room))[:, :count].unbind()
        list_blocks_kernel[(count,)](
            low, high, *spans, blocks, full_count, partial_count, tokens, offset, window or 0, others + 1,
            ROWS=tile.rows, KEYS=tile.keys, BY_KEY=by_key, HAS_WINDOW=window is not None, SPAN=SPAN,
            num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
        return VisibleBlocks(blocks, full_count, partial_count)

    return once(subtree_end, position, window, (tile.rows, tile.keys, offset, by_key), make)


def heavy_first(
    subtree_end: Tensor, position: Tensor | None, window: int | None, tile: Tile, offset: int
) -> tuple[VisibleBlocks, Tensor]:
    """Return the key blocks of every row block, and the row blocks [B] int32 by falling amount of work."""
    visible = visible_blocks(subtree_end, position, window, tile, offset, by_key=False)

    def make() -> Tensor:
        work = visible.full_count + visible.partial_count
        return work.argsort(descending=True, stable=True).to(torch.int32)

    return visible, once(subtree_end, position, window, ("order", tile.rows, tile.keys, offset), make)


def mask_of(subtree_end: Tensor, position: Tensor | None, window: int | None, offset: int) -> Mask:
    def make() -> Mask:
        ends = _filled(subtree_end)
        if window is None:
            return Mask(ends, ends, ends)
        assert position is not None
        return Mask(ends, _filled(position), _filled(position[offset:]))

    return once(subtree_end, position, window, ("mask", offset), make)


def work_items(
    subtree_end: Tensor, position: Tensor | None, window: int | None, tile: Tile, offset: int, heads: int, group: int
) -> tuple[VisibleBlocks, WorkItems]:
    """Return the row blocks of every key block, and their tiles of ``group`` query heads cut for ``heads`` key
    heads."""
    visible = visible_blocks(subtree_end, position, window, tile, offset, by_key=True)
    request = ("items", tile.rows, tile.keys, offset, heads, group)
    return visible, once(subtree_end, position, window, request, lambda: _cut(visible, heads, group))


def _cut(visible: VisibleBlocks, heads: int, group: int) -> WorkItems:
    count, others = visible.blocks.shape[0], visible.blocks.shape[1] - 1
    target_items = max(1, WANTED_ITEMS // heads)
    most = count * triton.cdiv(others * group, SHORTEST_ITEM)
    work = (visible.full_count + visible.partial_count).long() * group  # [count] tiles
    length = torch.clamp(-(-work.sum() // target_items), min=SHORTEST_ITEM)
    cuts = torch.clamp(-(-work // length), min=1)
    # at most `target_items` are split, as each is longer than length; there are then at most twice as many cuts
    split = cuts > 1
    slots = torch.where(split, cuts, 0)
    first_slot = slots.cumsum(0) - slots

    item = torch.arange(max(count, min(count + target_items, most)), device=work.device)
    ends = cuts.cumsum(0)
    owner = torch.searchsorted(ends, item, right=True)
    block = owner.clamp(max=count - 1)
    cut = item - (ends - cuts)[block]
    begin, end = work[block] * cut // cuts[block], work[block] * (cut + 1) // cuts[block]
    slot = torch.where(split[block], first_slot[block] + cut, -1)
    exists = owner < count
    order = torch.where(exists, end - begin, -1).argsort(descending=True, stable=True)
    items = torch.stack([torch.where(exists, block, -1), begin, end, slot], 1)[order]

    possible = most > count
    chosen = (~split).to(torch.int8).argsort(stable=True)[: min(count, target_items) if possible else 0]
    rows = torch.arange(count, device=work.device)
    splits = torch.stack([torch.where(split, rows, -1), first_slot, cuts], 1)[chosen]
    return WorkItems(items.int(), splits.int(), min(2 * target_items, most) if possible else 0)


def _extent(values: Tensor, block: int, filling: int | None) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest value of every block, [B]; the last block is padded (None: with its own last
    value)."""
    missing = -values.numel() % block
    if missing:
        last = values[-1:] if filling is None else values.new_full((1,), filling)
        values = torch.cat([values, last.expand(missing)])
    blocks = values.view(-1, block)
    return blocks.amin(1), blocks.amax(1)


def _filled(values: Tensor) -> Tensor:
    return F.pad(values, (0, -values.numel() % LARGEST))
