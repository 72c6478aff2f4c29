"""Attention in both directions between the rows of one picture, which Gemma 3 and 4 compute.

Attention over a tree is causal along each path. Such a picture's rows have one further interval of keys, the rest of
their picture, and are computed again with all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..batches.kv_store import AttentionRule


class Block(NamedTuple):
    """Rows that attend to each other in both directions, and to the path before them."""

    begin: int
    end: int
    seen: Tensor  # [n] int64, places of the keys of the path up to the block's last row, in the order of the path
    sliding: bool = False  # only in layers with a sliding window


def attend_both_ways(
    out: Tensor,  # [T, Hq, D]
    query: Tensor,  # [T, Hq, D]
    key: Tensor,  # [S, Hkv, D]
    value: Tensor,  # [S, Hkv, D]
    blocks: tuple[Block, ...],
    rule: AttentionRule,
) -> Tensor:  # [T, Hq, D]
    """Return ``out`` with the rows of ``blocks`` computed with all keys that they see, in both directions.

    The last row of a block is the last of its path, so the rows are at the end of the keys seen. With a sliding window,
    a key still lies less than the window before its query.

    Raises:
        ValueError: the layer has a softcap or sinks.
    """
    blocks = tuple(block for block in blocks if rule.window is not None or not block.sliding)
    if not blocks:
        return out
    if rule.softcap is not None or rule.sink is not None:
        raise ValueError("Attention in both directions with a softcap or sinks is not supported; leave pictures out.")
    rows, parts = [], []
    for begin, end, seen, _ in blocks:
        mask = None
        if rule.window is not None:
            place = torch.arange(len(seen), device=query.device)
            mask = place > place[begin - end :, None] - rule.window
        keys, values = (
            x.index_select(0, seen).transpose(0, 1).repeat_interleave(query.shape[1] // x.shape[1], 0)
            for x in (key, value)
        )
        part = F.scaled_dot_product_attention(
            query[begin:end].transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, scale=rule.scale
        )
        parts.append(part[0].transpose(0, 1))
        rows.append(torch.arange(begin, end, device=query.device))
    return out.index_copy(0, torch.cat(rows), torch.cat(parts).to(out.dtype))
