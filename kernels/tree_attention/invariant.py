"""Backend ``invariant``: the forward pass in the order of sums of decoding (tree_decode/invariant.py).

A token has the bits of the step that sampled it, whatever tree, piece or sequence it is trained in. A run of tokens
with one ``subtree_end`` is a node, and its rows are those of its subtree. The backward pass is `triton`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import machine
from ..tree_decode.items import queries_of
from .path_blocks import path_blocks
from .reference import Scoring
from .triton_paths import attend_paths
from .visible import once

if TYPE_CHECKING:
    from ..tree_decode.items import Array


def tree_attention_forward(
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [N, Hkv, D]
    v: Tensor,  # [N, Hkv, D]
    scoring: Scoring,
) -> tuple[Tensor, Tensor]:
    """Like `reference.tree_attention_forward`; float32, bfloat16 or float16. Waits for the device once a tree.

    Raises:
        ValueError: windows are not measured in depths along the paths.
    """
    if machine.interpreting() and q.dtype == torch.bfloat16:  # it multiplies bit patterns
        out, lse = tree_attention_forward(q.float(), k.float(), v.float(), scoring)
        return out.to(q.dtype), lse
    rows, queries = len(q), queries_of(q.shape[1] // k.shape[1])
    size = queries * k.shape[1] // q.shape[1]
    blocks = once(
        scoring.subtree_end,
        scoring.position,
        scoring.window,
        ("paths", rows, size),
        lambda: _blocks(scoring, rows, size),
    )
    if k.stride() != v.stride():
        k, v = k.contiguous(), v.contiguous()
    return attend_paths(q, k, v, blocks, queries, scoring)


def _blocks(scoring: Scoring, rows: int, size: int) -> tuple[Tensor, ...]:
    """Return `PathBlocks` of the last ``rows`` tokens on their device."""
    import numpy as np

    subtree_end, position, _, window, _ = scoring
    ends = subtree_end.cpu().numpy().astype(np.int64)
    if position is not None and not np.array_equal(position.cpu().numpy()[-rows:], depths(ends)[-rows:]):
        raise ValueError(
            "tree_attention: backend 'invariant' takes windows in depths along a path, and position has other numbers; "
            "leave chunk out, or the backend."
        )
    return tuple(torch.from_numpy(part).to(subtree_end.device) for part in path_blocks(ends, rows, size, window))


def depths(ends: Array) -> Array:  # [N] -> [N]
    """Return the number of earlier tokens whose subtree each token is in; ``ends`` are the ends of the subtrees."""
    import numpy as np

    tokens = np.arange(len(ends))
    ended = np.bincount(np.clip(ends, tokens + 1, len(ends)), minlength=len(ends) + 1)
    return tokens - ended.cumsum()[:-1]
