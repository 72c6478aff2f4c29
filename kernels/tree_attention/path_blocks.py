"""Blocks of rows of backend ``invariant``, and the chunks of keys on their paths; made on the host once a tree.

A path's chunk c has the keys at positions ``CHUNK c`` to ``CHUNK (c + 1) - 1``, as in decoding
(tree_decode/path_chunks.py). Rows of a block are of one node, so they have the same chunks. A list names a chunk's
keys, which lie apart where the path does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..tree_decode.items import CHUNK

if TYPE_CHECKING:
    from ..tree_decode.items import Array

FIELDS = 6


class PathBlocks(NamedTuple):
    """Arrays of int32."""

    keys: Array  # [*], tokens, chunk after chunk
    chunks: Array  # [*, 2], where a chunk's keys begin, and how many they are; of a node's path in order
    blocks: Array  # [B, FIELDS]: first row, rows, position of the first, its first chunk's number and index, and chunks


def path_blocks(ends: Array, rows: int, size: int, window: int | None) -> PathBlocks:
    """Return the blocks of the last ``rows`` tokens, those with the most chunks first.

    Args:
        ends: [N], the end of each token's subtree. A token whose subtree has ended sees its ancestors, not itself.
        rows: number of the last tokens that are rows.
        size: rows of a block.
        window: chunks that no row of a block sees within it are left out.
    """
    import numpy as np

    tokens, before = len(ends), len(ends) - rows
    inside = ends > np.arange(tokens)
    new = np.concatenate([[True], (ends[1:] != ends[:-1]) | ~inside[1:] | ~inside[:-1]]) if tokens else inside
    begins = np.flatnonzero(new)
    keys: list[Array] = []
    chunks: list[Array] = []
    blocks: list[Array] = []
    counts = [0, 0]  # keys, chunks
    above: list[_Path] = []
    for begin, stop in zip(begins.tolist(), [*begins[1:].tolist(), tokens], strict=True):
        while above and above[-1].end <= begin:
            above.pop()
        parent = above[-1] if above else _root()
        fresh = np.arange(begin, stop if inside[begin] else begin)
        path = _below(parent, fresh, int(ends[begin]), counts[0])
        place = counts[1]
        keys.append(path.new_keys)
        chunks.append(path.chunks)
        counts[0] += len(path.new_keys)
        counts[1] += len(path.chunks)
        if len(fresh):
            above.append(path)
        first = np.arange(max(begin, before), stop, size)
        if len(first):
            last = np.minimum(first + size, stop) - 1
            low, high = (parent.length + (token - begin if len(fresh) else -1) + 0 * token for token in (first, last))
            skipped = 0 * low if window is None else np.maximum(low - window + 1, 0) // CHUNK
            skipped = np.minimum(skipped, high // CHUNK + 1)
            blocks.append(
                np.stack(
                    [first - before, last - first + 1, low, skipped, place + skipped, high // CHUNK + 1 - skipped], 1
                )
            )
    table = np.concatenate([np.zeros((0, FIELDS), np.int64), *blocks])
    table = table[np.argsort(-table[:, 5], kind="stable")]
    return PathBlocks(
        np.concatenate([np.zeros(0, np.int64), *keys]).astype(np.int32),
        np.concatenate([np.zeros((0, 2), np.int64), *chunks]).astype(np.int32),
        table.astype(np.int32),
    )


class _Path(NamedTuple):
    """The path to the last token of a node."""

    length: int
    end: int
    chunks: Array  # [C, 2]
    tail: Array  # keys of the last chunk, if it is not full
    new_keys: Array  # of the chunks that no earlier path has


def _below(parent: _Path, fresh: Array, end: int, keys: int) -> _Path:
    """Return the path of tokens below another; its new chunks' keys begin at ``keys``."""
    import numpy as np

    new = np.concatenate([parent.tail, fresh])
    full = parent.chunks[: parent.length // CHUNK]
    begin = np.arange(0, len(new), CHUNK)
    chunks = np.concatenate([full, np.stack([keys + begin, np.minimum(len(new) - begin, CHUNK)], 1)])
    return _Path(parent.length + len(fresh), end, chunks, new[len(new) // CHUNK * CHUNK :], new)


def _root() -> _Path:
    import numpy as np

    nothing = np.zeros(0, np.int64)
    return _Path(0, 0, np.zeros((0, 2), np.int64), nothing, nothing)
