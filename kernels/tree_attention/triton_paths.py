"""Forward of backend ``invariant``: the chunks of a path one after the other, in one program a block of rows.

The arithmetic is that of decoding: `attend_keys` and `add_part` of tree_decode/triton.py, with as many queries, keys
and warps. There partial results go through memory; here they stay in registers. A program computes up to 128 columns of
values, so that the sum and a part of it fit there; heads of more are computed by several programs, with all scores in
each.

Reads q once for each of these, and for each block of rows the keys and values of its path.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..tree_decode.items import CHUNK
from ..tree_decode.triton import LN2, add_part, attend_keys, tile_of
from .blocks import padded_width
from .path_blocks import FIELDS
from .reference import Scoring

VALUES = 128


@triton.jit(do_not_specialize=["rows", "window"])
def paths_kernel(
    q,  # [T, Hq, D]
    k,  # [N, Hkv, D]
    v,  # [N, Hkv, D]
    keys,  # [*] int32, `PathBlocks`
    chunks,  # [*, 2] int32
    blocks,  # [B, FIELDS] int32
    out,  # [T, Hq, D]
    lse,  # [Hq, T] fp32
    rows, q_stride, q_head, k_stride, k_head, scale, window, softcap,  # strides of keys are those of values
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr, FIELDS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0).to(tl.int64)
    block = blocks + tl.program_id(1) * FIELDS
    columns, value_columns = tl.arange(0, WIDTH), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    within = tl.arange(0, QUERIES)
    live = within < tl.load(block + 1) * GROUP
    row, head = (tl.load(block) + within // GROUP).to(tl.int64), kv_head * GROUP + within % GROUP
    query = tl.load(
        q + row[:, None] * q_stride + head[:, None] * q_head + columns[None, :],
        mask=live[:, None] & (columns < DIM)[None, :], other=0.0,
    )  # fmt: skip
    position = tl.load(block + 2) + within // GROUP
    k_from = k + kv_head * k_head + columns[None, :]
    v_from = v + kv_head * k_head + value_columns[None, :]
    number, chunk = tl.load(block + 3), chunks + tl.load(block + 4) * 2
    top = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, VALUES], tl.float32)
    for i in range(tl.load(block + 5)):
        begin, count = tl.load(chunk + 2 * i), tl.load(chunk + 2 * i + 1)
        # A row sees the existing keys up to its own position; both are counted from the chunk's first key.
        age = tl.where(live, position - (number + i) * CHUNK, -1)
        newest = tl.where(live, tl.minimum(age, count - 1), -1)
        part, largest, weight = attend_keys(
            query, k_from, v_from, keys, begin, count, begin + count - 1, newest, age, k_stride, 0, scale, window,
            softcap, 1, DIM, WIDTH, VALUES, QUERIES, KEYS, HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
        saw = weight != 0.0
        part = part * (1.0 / tl.where(saw, weight, 1.0))[:, None]
        log_sum = tl.where(saw, largest + tl.log2(tl.where(saw, weight, 1.0)), -float("inf"))
        acc, top, total = add_part(acc, top, total, part, log_sum)
    saw = total != 0.0
    acc = acc * (1.0 / tl.where(saw, total, 1.0))[:, None]
    to = out + row[:, None] * (HEADS * DIM) + head[:, None] * DIM + value_columns[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=live[:, None] & (value_columns < DIM)[None, :])
    log_sum = tl.where(saw, (top + tl.log2(tl.where(saw, total, 1.0))) * LN2, -float("inf"))
    if tl.program_id(2) == 0:
        tl.store(lse + head * rows + row, log_sum, mask=live)


def attend_paths(
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [N, Hkv, D]
    v: Tensor,  # [N, Hkv, D], of the strides of k
    lists: Sequence[Tensor],
    queries: int,
    scoring: Scoring,
) -> tuple[Tensor, Tensor]:
    """Return the attention of the blocks of ``lists``, the tensors of `PathBlocks`; they have ``queries`` queries of a
    key head each."""
    _, _, scale, window, softcap = scoring
    (rows, heads, dim), kv_heads = q.shape, k.shape[1]
    out, lse = q.new_empty(q.shape), q.new_empty((heads, rows), dtype=torch.float32)
    if not rows:
        return out, lse
    width = padded_width(dim)
    tile, warps = tile_of(width, queries, q.dtype)
    values = values_of(dim)
    paths_kernel[(kv_heads, len(lists[2]), triton.cdiv(dim, values))](
        q, k, v, *lists, out, lse, rows, *q.stride()[:2], *k.stride()[:2], scale, window or 0,
        softcap or 0.0,
        HEADS=heads, GROUP=heads // kv_heads, DIM=dim, WIDTH=width, VALUES=values, QUERIES=queries, KEYS=tile,
        CHUNK=CHUNK, FIELDS=FIELDS, HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None,
        num_warps=warps, num_stages=3, enable_fp_fusion=True,
    )  # fmt: skip
    return out, lse


def values_of(dim: int) -> int:
    """Return the columns of values of a program: all, or a number that divides them."""
    width = padded_width(dim)
    return VALUES if width > VALUES and dim % VALUES == 0 else width
