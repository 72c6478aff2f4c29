"""Backend ``invariant``: the keys of a path are summed in chunks that are counted from its root (path_chunks.py).

The other backends count chunks from the first key of a node, so the order of a row's sums depends on where its path is
cut into nodes: a prompt is a node of its own where responses share it, and a part of a longer one in a sequence alone.

One kernel writes the slots of every item's keys to a table, once a step (`DecodePlan.located`): it goes from the node
of the last key to its parents. `triton.partial_kernel` then reads the table as the ids of pages of one key. Training
(tree_attention/triton_paths.py) has the same chunks and the same arithmetic.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .items import CHUNK, FIELDS
from .schedule import Nodes, Work, make_schedule
from .triton import attend


@triton.jit
def slots_kernel(
    page_indptr,  # [K + 1] int32
    page_ids,  # [*] int32
    node_offset,  # [K] int32
    node_position,  # [K] int32
    parent,  # [K] int32
    items,  # [1 + I, FIELDS] int32
    out,  # [I, CHUNK] int32
    PAGE: tl.constexpr, CHUNK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    if i < tl.load(items):
        item = items + (i + 1) * FIELDS
        lane = tl.arange(0, CHUNK)
        live = lane < tl.load(item + 2)
        position = tl.load(item + 3) + lane
        node = tl.full([CHUNK], 0, tl.int32) + tl.load(item + 7)
        begin = tl.load(node_position + node)
        above = live & (begin > position)
        while tl.max(above.to(tl.int32), 0) > 0:
            node = tl.where(above, tl.load(parent + node), node)
            begin = tl.load(node_position + node)
            above = live & (begin > position)
        slot = tl.load(node_offset + node) + position - begin
        page = tl.load(page_ids + tl.load(page_indptr + node) + slot // PAGE, mask=live, other=0)
        tl.store(out + i * CHUNK + lane, page * PAGE + slot % PAGE, mask=live)


def slots_of_items(
    nodes: Nodes,
    items: Tensor,  # [1 + I, FIELDS] int32
    parent: Tensor,  # [K] int32
    page: int,
) -> Tensor:
    """Return the slots of the items' keys in pages of ``page``, [I CHUNK] int32."""
    room = max(len(items) - 1, 1)
    slots = items.new_empty(room * CHUNK)
    slots_kernel[(room,)](
        nodes.page_indptr, nodes.page_ids, nodes.node_offset, nodes.node_position, parent, items, slots,
        PAGE=page, CHUNK=CHUNK, FIELDS=FIELDS, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return slots


def tree_decode(
    q: Tensor,  # [N, Hq, D]
    k_pages: Tensor,  # [P, page, Hkv, D]
    v_pages: Tensor,  # [P, page, Hkv, D]
    nodes: Nodes,
    work: Work,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Like `reference.tree_decode`; float32, bfloat16 or float16.

    Raises:
        ValueError: keys and values have different strides, or the keys of a page do not follow the page before.
    """
    page = k_pages.shape[1]
    if page > 1 and k_pages.stride(0) != page * k_pages.stride(1):
        raise ValueError("tree_decode_attention: backend 'invariant' takes pages that follow each other in memory.")
    work = located(nodes, work, q.shape[1] // k_pages.shape[2], page)
    assert work.slots is not None
    keys, values = (x.flatten(0, 1)[:, None] for x in (k_pages, v_pages))
    return attend(q, keys, values, work.slots, nodes.query_position, work, scale, window, softcap)


def located(nodes: Nodes, work: Work, group: int, page: int) -> Work:
    """Return the items of ``work`` for ``group`` query heads a key head, in chunks of paths, with the slots of their
    keys in pages of ``page``; what it lacks is made."""
    if work.parent is None or work.items is None:
        work = make_schedule(nodes, group, by_path=True)
    if work.slots is None:
        assert work.items is not None
        assert work.parent is not None
        work = work._replace(slots=slots_of_items(nodes, work.items, work.parent, page))
    return work
