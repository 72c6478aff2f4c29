"""The definition of tree decode attention, dense and in plain PyTorch.

Row i sees key x of node n iff ``row_begin[n] <= i < row_end[n]`` and ``position(x) <= query_position[i]`` (and
``query_position[i] - position(x) < window``), where key x of a node has position ``node_position + x`` and lies in slot
``node_offset + x`` of the node's pages laid end to end. A row that sees nothing gives out 0 and lse -inf.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .schedule import Nodes, Work


def tree_decode(
    q: Tensor,  # [N, Hq, D]
    k_pages: Tensor,  # [P, page, Hkv, D]
    v_pages: Tensor,  # [P, page, Hkv, D]
    nodes: Nodes,
    work: Work,  # not used here
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return out [N, Hq, D] in q's dtype and the log-sum-exp [N, Hq] in float32 (float64 for float64)."""
    page_indptr, page_ids, node_offset, node_length, node_position, row_begin, row_end, query_position = nodes
    length = node_length.long()
    node = torch.repeat_interleave(torch.arange(length.numel(), device=q.device), length)  # [X], one entry a key
    index = torch.arange(node.numel(), device=q.device) - (length.cumsum(0) - length)[node]  # key x of its node
    slot = node_offset[node] + index
    page = page_ids[page_indptr[node] + slot // k_pages.shape[1]].long()
    keys, values = (pages[page, slot % k_pages.shape[1]] for pages in (k_pages, v_pages))  # [X, Hkv, D]

    row = torch.arange(q.shape[0], device=q.device)[:, None]
    age = query_position[:, None] - (node_position[node] + index)[None, :]
    seen = (row_begin[node] <= row) & (row < row_end[node]) & (age >= 0)  # [N, X]
    if window is not None:
        seen &= age < window

    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // k_pages.shape[2]
    keys, values = (t.to(compute).repeat_interleave(group, dim=1) for t in (keys, values))
    scores = torch.einsum("nhd,xhd->nhx", q.to(compute), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    probability = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    # 0 times what is not finite would be NaN in rows that do not see it
    spoiled = ~values.isfinite()
    out = torch.einsum("nhx,xhd->nhd", probability, values.masked_fill(spoiled, 0))
    reached = torch.einsum("nx,xhd->nhd", seen.to(compute), spoiled.to(compute)) > 0
    return out.masked_fill(reached, torch.nan).to(q.dtype).contiguous(), lse
