"""Triton backend: shared nodes read once, partial results merged along every row's path.

    partial  an item is (a chunk of a node's keys, some of the rows below it, a key head): online softmax over the chunk
    merge    a row's partials in the order of its path, weighted by their log-sum-exps

Chunks are counted from a node's first key and partials are merged in a fixed order, so a row's bits do not depend on
the other rows. The grid of the first kernel is fixed; each program takes item after item, and finds an item's node by
bisection, so no list of items exists.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import interpreting
from ..tree_attention.blocks import padded_width
from ..tree_attention.triton import LN2, log2_scores
from .plan import CHUNK
from .work import QUERIES, programs, work_of


@triton.jit(do_not_specialize=["nodes", "window"])
def partial_kernel(
    q,  # [N, Hq, D]
    k_pages,  # [P, page, Hkv, D]
    v_pages,  # [P, page, Hkv, D]
    page_indptr, page_ids, node_offset, node_length, node_position, row_begin, row_end, query_position,
    item_end,  # [K] int32
    partial_base,  # [K] int64
    out,  # [partials, Hq, D] fp32
    lse,  # [partials, Hq] fp32, in the log2 domain
    nodes, q_stride, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head, scale, window, softcap,
    PAGE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(1).to(tl.int64)
    rows_a_tile: tl.constexpr = QUERIES // GROUP
    columns = tl.arange(0, WIDTH)
    within = tl.arange(0, QUERIES)
    head = kv_head * GROUP + within % GROUP
    items = tl.load(item_end + nodes - 1)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        node, last = 0, nodes - 1
        while node < last:
            middle = (node + last) // 2
            if tl.load(item_end + middle) > item:
                last = middle
            else:
                node = middle + 1
        local = item - tl.load(item_end + node - 1, mask=node > 0, other=0)
        first_row, stop_row = tl.load(row_begin + node), tl.load(row_end + node)
        tiles = tl.cdiv(stop_row - first_row, rows_a_tile)
        chunk = local // tiles
        row = first_row + (local % tiles) * rows_a_tile + within // GROUP
        live = (within // GROUP < rows_a_tile) & (row < stop_row)
        inside = live[:, None] & (columns < DIM)[None, :]
        query = tl.load(
            q + row.to(tl.int64)[:, None] * q_stride + head[:, None] * q_head + columns[None, :], mask=inside, other=0.0
        )
        at = tl.load(query_position + row, mask=live, other=-1)
        length, offset = tl.load(node_length + node), tl.load(node_offset + node)
        position, pages = tl.load(node_position + node), page_ids + tl.load(page_indptr + node)
        top = tl.full([QUERIES], -float("inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        acc = tl.zeros([QUERIES, WIDTH], tl.float32)
        for begin in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, length), KEYS):
            index = begin + tl.arange(0, KEYS)
            held = index < length
            slot = offset + index
            page = tl.load(pages + slot // PAGE, mask=held, other=0).to(tl.int64)
            mask = held[:, None] & (columns < DIM)[None, :]
            key = tl.load(
                k_pages + (page * k_page + slot % PAGE * k_slot + kv_head * k_head)[:, None] + columns[None, :],
                mask=mask, other=0.0,
            )  # fmt: skip
            scores, _ = log2_scores(tl.dot(query, key.T, input_precision="ieee"), scale, softcap, HAS_SOFTCAP)
            age = at[:, None] - (position + index)[None, :]
            seen = live[:, None] & held[None, :] & (age >= 0)
            if HAS_WINDOW:
                seen &= age < window
            scores = tl.where(seen, scores, -float("inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            base = tl.where(new_top == -float("inf"), 0.0, new_top)
            probability = tl.exp2(scores - base[:, None])
            keep = tl.exp2(top - base)
            total = total * keep + tl.sum(probability, 1)
            value = tl.load(
                v_pages + (page * v_page + slot % PAGE * v_slot + kv_head * v_head)[:, None] + columns[None, :],
                mask=mask, other=0.0,
            )  # fmt: skip
            acc = tl.dot(probability.to(value.dtype), value, acc * keep[:, None], input_precision="ieee")
            top = new_top
        saw = total != 0.0
        to = tl.load(partial_base + node) + chunk * (stop_row - first_row) + row - first_row
        acc = acc / tl.where(saw, total, 1.0)[:, None]
        tl.store(out + (to * HEADS + head)[:, None] * DIM + columns[None, :], acc, mask=inside)
        log_sum = tl.where(saw, top + tl.log2(tl.where(saw, total, 1.0)), -float("inf"))
        tl.store(lse + to * HEADS + head, log_sum, mask=live)


@triton.jit
def merge_kernel(
    partial_out,  # [partials, Hq, D] fp32
    partial_lse,  # [partials, Hq] fp32, in the log2 domain
    partial_ids,  # [partials] int64
    partial_begin,  # [N + 1] int64
    out,  # [N, Hq, D]
    lse,  # [N, Hq] fp32
    HEADS: tl.constexpr, SOME: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * SOME + tl.arange(0, SOME)
    columns = tl.arange(0, WIDTH)
    exists = head < HEADS
    inside = exists[:, None] & (columns < DIM)[None, :]
    top = tl.full([SOME], -float("inf"), tl.float32)
    total = tl.zeros([SOME], tl.float32)
    acc = tl.zeros([SOME, WIDTH], tl.float32)
    for i in range(tl.load(partial_begin + row), tl.load(partial_begin + row + 1)):
        which = tl.load(partial_ids + i) * HEADS + head
        part_lse = tl.load(partial_lse + which, mask=exists, other=-float("inf"))
        part = tl.load(partial_out + which[:, None] * DIM + columns[None, :], mask=inside, other=0.0)
        new_top = tl.maximum(top, part_lse)
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        keep, weight = tl.exp2(top - base), tl.exp2(part_lse - base)
        total = total * keep + weight
        acc = acc * keep[:, None] + part * weight[:, None]
        top = new_top
    saw = total != 0.0
    acc = acc / tl.where(saw, total, 1.0)[:, None]
    to = row * HEADS + head
    tl.store(out + to[:, None] * DIM + columns[None, :], acc.to(out.dtype.element_ty), mask=inside)
    log_sum = tl.where(saw, (top + tl.log2(tl.where(saw, total, 1.0))) * LN2, -float("inf"))
    tl.store(lse + to, log_sum, mask=exists)


def tree_decode(
    q: Tensor,  # [N, Hq, D]
    k_pages: Tensor,  # [P, page, Hkv, D]
    v_pages: Tensor,  # [P, page, Hkv, D]
    page_indptr: Tensor,  # [K + 1] int32
    page_ids: Tensor,  # [*] int32
    node_offset: Tensor,  # [K] int32
    node_length: Tensor,  # [K] int32
    node_position: Tensor,  # [K] int32
    row_begin: Tensor,  # [K] int32
    row_end: Tensor,  # [K] int32
    query_position: Tensor,  # [N] int32
    scale: float,
    window: int | None,
    softcap: float | None,
    most: int | None = None,
) -> tuple[Tensor, Tensor]:
    plan = (page_indptr, page_ids, node_offset, node_length, node_position, row_begin, row_end, query_position)
    if interpreting() and q.dtype == torch.bfloat16:  # the interpreter multiplies bit patterns of bf16 operands
        out, lse = tree_decode(q.float(), k_pages.float(), v_pages.float(), *plan, scale, window, softcap, most)
        return out.to(q.dtype), lse
    rows, heads, dim = q.shape
    kv_heads, nodes = k_pages.shape[2], len(node_length)
    out, lse = q.new_empty(q.shape), q.new_empty((rows, heads), dtype=torch.float32)
    if rows == 0 or nodes == 0:
        return out.zero_(), lse.fill_(-float("inf"))
    group = heads // kv_heads
    work = work_of(row_begin, row_end, node_length, rows, group, most)
    partial_out = q.new_empty((len(work.partial_ids), heads, dim), dtype=torch.float32)
    partial_lse = q.new_empty((len(work.partial_ids), heads), dtype=torch.float32)
    width = padded_width(dim)
    keys, warps = tile_of(width, q.dtype)
    partial_kernel[(programs(q.device), kv_heads)](
        q, k_pages, v_pages, *plan, work.item_end, work.partial_base, partial_out, partial_lse,
        nodes, *q.stride()[:2], *k_pages.stride()[:3], *v_pages.stride()[:3], scale, window or 0, softcap or 0.0,
        PAGE=k_pages.shape[1], HEADS=heads, GROUP=group, DIM=dim, WIDTH=width, QUERIES=QUERIES,
        KEYS=keys, CHUNK=CHUNK, HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None,
        num_warps=warps, num_stages=2,
    )  # fmt: skip
    some = min(8, triton.next_power_of_2(heads))
    merge_kernel[(rows, triton.cdiv(heads, some))](
        partial_out, partial_lse, work.partial_ids, work.partial_begin, out, lse,
        HEADS=heads, SOME=some, DIM=dim, WIDTH=width, num_warps=4,
    )  # fmt: skip
    return out, lse


def tile_of(width: int, dtype: torch.dtype) -> tuple[int, int]:
    """Keys of a tile and warps, so that nothing spills (tests/kernels/aot)."""
    if dtype == torch.float32:
        return 16, 4
    return 64 if width <= 128 else 32, 4 if width <= 64 else 8
