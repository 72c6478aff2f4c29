"""Which blocks see each other: runs of wholly and of partly visible blocks, found on the device without synchronising.

Row i sees key j iff ``j <= i < subtree_end[j]``, so the largest and smallest subtree_end of a block of keys tell
whether a block of rows sees nothing, all or a part of it. What a row block sees is the path from its root, cut into
about as many runs as the path has nodes; the rows that see a key block are contiguous but for a window.

A list holds ``CAPACITY`` runs of either kind. Where a tree has more, everything from there on becomes one partly
visible run: blocks it should not see are then masked instead of skipped, and the result is the same.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .blocks import Tile

CAPACITY = 32
CHUNK = 256


class Runs(NamedTuple):
    """For every block of one side: ``[begin, end)`` in blocks of the other side, wholly visible runs first."""

    bounds: Tensor  # [B, 2 CAPACITY + 1, 2] int32: CAPACITY wholly visible runs, then CAPACITY + 1 partly visible ones
    full_count: Tensor  # [B] int32
    partial_count: Tensor  # [B] int32
    order: Tensor  # [B] int32, blocks by falling amount of work


@triton.jit
def _visibility(
    row_block, key_block, lows, highs, key_firsts, key_lasts, row_firsts, row_lasts, tokens, offset, window,
    ROWS: tl.constexpr, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Whether blocks see each other in part or whole, and whether wholly."""
    row, key = offset + row_block * ROWS, key_block * KEYS
    exists = (row_block >= 0) & (row < tokens) & (key_block >= 0) & (key < tokens)
    row_end = tl.minimum(row + ROWS, tokens)
    low = tl.load(lows + key_block, mask=exists, other=0)
    high = tl.load(highs + key_block, mask=exists, other=0)
    some = exists & (key < row_end) & (high > row)
    full = some & (key + KEYS - 1 <= row) & (low >= row_end)
    if HAS_WINDOW:
        nearest = tl.load(row_firsts + row_block, mask=exists, other=0) - tl.load(
            key_lasts + key_block, mask=exists, other=0
        )
        farthest = tl.load(row_lasts + row_block, mask=exists, other=0) - tl.load(
            key_firsts + key_block, mask=exists, other=0
        )
        some &= nearest < window
        full &= farthest < window
    return some & ~full, some & full


@triton.jit(do_not_specialize=["tokens", "offset", "window"])
def find_runs_kernel(
    lows, highs, key_firsts, key_lasts,  # [key blocks] int32
    row_firsts, row_lasts,  # [row blocks] int32
    bounds, full_counts, partial_counts, weights,
    tokens, offset, window,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BY_KEY: tl.constexpr, HAS_WINDOW: tl.constexpr,
    CAPACITY: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    this = tl.program_id(0) + tl.zeros([CHUNK], tl.int32)
    others = tl.cdiv(tokens - offset, ROWS) if BY_KEY else tl.cdiv(tokens, KEYS)
    mine = bounds + block * (4 * CAPACITY + 2)
    full_runs, partial_runs, weight = 0, 0, 0
    cut = others  # the first block of the run that no list has room for
    stop = 0  # one past the last visible block
    for chunk in range(0, others, CHUNK):
        other = chunk + tl.arange(0, CHUNK)
        row, key = (other, this) if BY_KEY else (this, other)
        step: tl.constexpr = 1
        row_step: tl.constexpr = 1 if BY_KEY else 0
        key_step: tl.constexpr = step - row_step
        partial, full = _visibility(
            row, key, lows, highs, key_firsts, key_lasts, row_firsts, row_lasts, tokens, offset, window,
            ROWS, KEYS, HAS_WINDOW,
        )  # fmt: skip
        partial_before, full_before = _visibility(
            row - row_step, key - key_step, lows, highs, key_firsts, key_lasts, row_firsts, row_lasts, tokens, offset,
            window, ROWS, KEYS, HAS_WINDOW,
        )  # fmt: skip
        partial_after, full_after = _visibility(
            row + row_step, key + key_step, lows, highs, key_firsts, key_lasts, row_firsts, row_lasts, tokens, offset,
            window, ROWS, KEYS, HAS_WINDOW,
        )  # fmt: skip
        weight += tl.sum((partial | full).to(tl.int32), 0)
        stop = tl.maximum(stop, tl.max(tl.where(partial | full, other + 1, 0), 0))
        full_begins, partial_begins = full & ~full_before, partial & ~partial_before
        full_rank = full_runs + tl.cumsum(full_begins.to(tl.int32), 0) - 1
        partial_rank = partial_runs + tl.cumsum(partial_begins.to(tl.int32), 0) - 1
        too_many = (full_begins & (full_rank >= CAPACITY)) | (partial_begins & (partial_rank >= CAPACITY))
        cut = tl.minimum(cut, tl.min(tl.where(too_many, other, others), 0))
        fits = other < cut
        tl.store(mine + 2 * full_rank, other, mask=full_begins & fits)
        tl.store(mine + 2 * full_rank + 1, other + 1, mask=full & ~full_after & fits)
        partial_mine = mine + 2 * CAPACITY
        tl.store(partial_mine + 2 * partial_rank, other, mask=partial_begins & fits)
        tl.store(partial_mine + 2 * partial_rank + 1, other + 1, mask=partial & ~partial_after & fits)
        full_runs += tl.sum((full_begins & fits).to(tl.int32), 0)
        partial_runs += tl.sum((partial_begins & fits).to(tl.int32), 0)
    if cut < others:
        tl.store(mine + 2 * CAPACITY + 2 * partial_runs, cut)
        tl.store(mine + 2 * CAPACITY + 2 * partial_runs + 1, stop)
        partial_runs += 1
    tl.store(full_counts + block, full_runs)
    tl.store(partial_counts + block, partial_runs)
    tl.store(weights + block, weight)


_found: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""subtree_end -> its version and the runs found for it: the layers of a model ask for the same ones."""


def visible_runs(
    subtree_end: Tensor,  # [N] int32
    position: Tensor | None,  # [N] int32
    window: int | None,
    tile: Tile,
    offset: int,
    by_key: bool,
) -> Runs:
    """Runs of key blocks for every row block, or with ``by_key`` of row blocks for every key block.

    Row blocks begin at row ``offset``. ``subtree_end`` and ``position`` must not change between two calls without their
    version counters telling so, as those of tensors do.
    """
    if subtree_end.is_cuda and torch.cuda.is_current_stream_capturing():  # a graph's memory is its own
        return _find(subtree_end, position, window, tile, offset, by_key)
    version, known = _found.get(subtree_end, (-1, {}))
    if version != subtree_end._version:
        version, known = subtree_end._version, {}
        _found[subtree_end] = version, known
    windowed = None if position is None or window is None else (id(position), position._version, window)
    request = (tile.rows, tile.keys, offset, by_key, windowed)
    if request not in known:
        known[request] = (
            _find(subtree_end, position, window, tile, offset, by_key),
            position,
        )  # an id lives with its tensor
    return known[request][0]


def _find(
    subtree_end: Tensor, position: Tensor | None, window: int | None, tile: Tile, offset: int, by_key: bool
) -> Runs:
    tokens = subtree_end.numel()
    low, high = _blocked(subtree_end, tile.keys, 0)
    spans = (low, low, low, low)  # not read without a window
    if window is not None:
        assert position is not None
        spans = (*_blocked(position, tile.keys, None), *_blocked(position[offset:], tile.rows, None))
    blocks = triton.cdiv(tokens, tile.keys) if by_key else triton.cdiv(tokens - offset, tile.rows)
    bounds = subtree_end.new_empty((blocks, 2 * CAPACITY + 1, 2))
    full_count, partial_count, weight = subtree_end.new_empty((3, blocks)).unbind()
    find_runs_kernel[(blocks,)](
        low, high, *spans, bounds, full_count, partial_count, weight, tokens, offset, window or 0,
        ROWS=tile.rows, KEYS=tile.keys, BY_KEY=by_key, HAS_WINDOW=window is not None, CAPACITY=CAPACITY, CHUNK=CHUNK,
        num_warps=4,
    )  # fmt: skip
    order = weight.argsort(descending=True, stable=True).to(torch.int32)
    return Runs(bounds, full_count, partial_count, order)


def _blocked(values: Tensor, block: int, filling: int | None) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of every block, [B]; the last block is filled up (None: with its own last value)."""
    missing = -values.numel() % block
    if missing:
        last = values[-1:] if filling is None else values.new_full((1,), filling)
        values = torch.cat([values, last.expand(missing)])
    blocks = values.view(-1, block)
    return blocks.amin(1), blocks.amax(1)
