"""The definition of the recurrences, in plain PyTorch, chunk by chunk.

Along every path, with S [Dk, Dv] a head's state, which begins with the state of the path above:

    S <- exp(decay) S                     decay is one number a head, or one a channel of the key (Kimi)
    S <- S + k (beta (v - k S))           gated delta rule (Yang et al. 2024, arXiv 2412.06464); Kimi, arXiv 2510.26692
    S <- S + k v                          without beta: Mamba-2's scan with k = B, v = x dt, q = C (Dao and Gu 2024)
    out = scale q S

Within a chunk the rule is linear in the state with which the chunk begins (the WY form): all chunks' matrices are made
at once, and then states go from level to level. float64 is computed in float64, everything else in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .plan import SIZES, RecurrencePlan, Windows

BLOCK = 16
"""Rows for which decays of single channels are multiplied out pairwise; between blocks one factor is at their edge."""


class _Chunks(NamedTuple):
    """The chunks of one size, as maps from the state with which each begins."""

    query: Tensor  # [C, H, n, Dk]
    pairs: Tensor  # [C, H, n, n]
    new: Tensor  # [C, H, n, Dv]
    removed: Tensor | None  # [C, H, n, Dk]
    key: Tensor  # [C, H, n, Dk], decayed to the chunk's end
    whole: Tensor  # [C, H, 1 or Dk, 1], the chunk's decay


def tree_recurrence_forward(
    query: Tensor,  # [T, G, Dk]
    key: Tensor,  # [T, G, Dk]
    value: Tensor,  # [T, H, Dv]
    decay: Tensor,  # [T, H] or [T, H, Dk]
    beta: Tensor | None,  # [T, H]
    initial: Tensor | None,  # [R, H, Dk, Dv]
    plan: RecurrencePlan,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return out [T, H, Dv] in the dtype of value and the end states [E, H, Dk, Dv] in float32 (float64)."""
    q, k, v, g = (_accumulate(x) for x in (query, key, value, decay))
    g = g[..., None] if g.dim() == 2 else g
    b = None if beta is None else _accumulate(beta)[..., None]
    sizes = [_cut(q * scale, k, v, g, b, rows) if len(rows) else None for rows in plan.rows]
    shape = v.shape[1], k.shape[-1], v.shape[-1]
    states = v.new_zeros(1, *shape)
    if initial is not None:
        states = torch.cat([_accumulate(initial), states])
    outs: list[list[Tensor]] = [[] for _ in SIZES]
    kept: list[Tensor] = []
    for level in plan.levels:
        if level.parent is not None:
            states = _Inherit.apply(states, level.parent, level.order, level.children)
        ends, done = [], 0
        for size, begin, end in level.parts:
            chunks = sizes[size]
            assert chunks is not None
            of_level = slice(begin, end)
            state = states[done : done + end - begin]
            done += end - begin
            new = chunks.new[of_level]
            if chunks.removed is not None:
                new = new - chunks.removed[of_level] @ state
            outs[size].append(chunks.query[of_level] @ state + chunks.pairs[of_level] @ new)
            ends.append(chunks.whole[of_level] * state + chunks.key[of_level].mT @ new)
        states = ends[0] if len(ends) == 1 else torch.cat(ends)
        if level.kept is not None:
            kept.append(states.index_select(0, level.kept))
    flat = [torch.cat(outputs).transpose(1, 2).flatten(0, 1) for outputs in outs if outputs]
    joined = torch.cat(flat) if flat else v.new_empty(0, *v.shape[1:])
    last = torch.cat(kept).index_select(0, plan.end_order) if kept else v.new_empty(0, *shape)
    return joined.index_select(0, plan.place).to(value.dtype), last


def tree_recurrence_backward(
    grad_out: Tensor,  # [T, H, Dv]
    grad_ends: Tensor,  # [E, H, Dk, Dv]
    query: Tensor,  # [T, G, Dk]
    key: Tensor,  # [T, G, Dk]
    value: Tensor,  # [T, H, Dv]
    decay: Tensor,  # [T, H] or [T, H, Dk]
    beta: Tensor | None,  # [T, H]
    initial: Tensor | None,  # [R, H, Dk, Dv]
    plan: RecurrencePlan,
    scale: float,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the six tensors, None for those that are None; the chunks are computed again."""
    arguments = query, key, value, decay, beta, initial
    with torch.enable_grad():
        q, k, v, g, b, first = inputs = [None if x is None else x.detach().requires_grad_() for x in arguments]
        outputs = tree_recurrence_forward(q, k, v, g, b, first, plan, scale)  # type: ignore[arg-type]
        # without an end in the plan the second output has no graph
        pairs = [(o, g) for o, g in zip(outputs, (grad_out, grad_ends), strict=True) if o.requires_grad]
        differentiable = [x for x in inputs if x is not None]
        outs, grads = zip(*pairs, strict=True)
        gradients = iter(torch.autograd.grad(outs, differentiable, grads, allow_unused=True))
    return tuple(None if x is None else next(gradients) for x in inputs)


def _cut(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor | None, rows: Tensor) -> _Chunks:
    """Cut the rows of one size; of absent rows decay, key and beta are 0, so the state stays."""

    def chunks(x: Tensor) -> Tensor:  # [T, H, D] -> [C, H, n, D]
        return F.pad(x, (0, 0, 0, 0, 0, 1))[rows].transpose(1, 2)

    q, k, v, total = chunks(q), chunks(k), chunks(v), chunks(g).cumsum(2)
    repeat = v.shape[1] // k.shape[1]
    if repeat > 1:
        q, k = (x.repeat_interleave(repeat, 1) for x in (q, k))
    last = total[:, :, -1:]
    new, removed = v, None
    if b is not None:
        beta = chunks(b)
        new, removed = v * beta, k * beta * total.exp()
        if rows.shape[1] > 1:
            system = _products(k * beta, k, total)
            both = torch.cat([new, removed], -1)
            both = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
            new, removed = both.split([v.shape[-1], k.shape[-1]], -1)
    return _Chunks(
        q * total.exp(), _products(q, k, total), new, removed, k * (last - total).exp(), last.exp().transpose(2, 3)
    )


def _products(a: Tensor, b: Tensor, total: Tensor) -> Tensor:  # [C, H, n, D], total [C, H, n, 1 or D] -> [C, H, n, n]
    """Return ``sum_d a_i b_j exp(total_i - total_j)`` for j <= i, else 0."""
    size = total.shape[2]
    if total.shape[-1] == 1:
        difference = total - total.mT
        # the future is masked before exp, where it would overflow
        return (a @ b.mT) * difference.masked_fill(_future(size, a), -torch.inf).exp()
    blocks = []
    for begin in range(0, size, BLOCK):
        rows = slice(begin, min(begin + BLOCK, size))
        in_block = total[:, :, rows]
        difference = (in_block[..., :, None, :] - in_block[..., None, :, :]).masked_fill(
            _future(in_block.shape[2], a)[..., None], -torch.inf
        )
        near = (a[:, :, rows, None] * b[:, :, None, rows] * difference.exp()).sum(-1)
        if begin:  # both factors decay from and to the block's edge, so none is above 1
            edge = total[:, :, begin - 1 : begin]
            far = (a[:, :, rows] * (in_block - edge).exp()) @ (b[:, :, :begin] * (edge - total[:, :, :begin]).exp()).mT
            near = torch.cat([far, near], -1)
        blocks.append(F.pad(near, (0, size - rows.stop)))
    return torch.cat(blocks, 2)


def _future(size: int, like: Tensor) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool, device=like.device).triu(1)


def tree_convolution_forward(
    x: Tensor,  # [N, D], rows, inputs of given states and a row of zeros
    weight: Tensor,  # [D, K]
    bias: Tensor | None,  # [D]
    windows: Windows,
) -> Tensor:  # [T, D]
    """Return ``bias + sum_j weight[:, K - 1 - j] x[the j-th row before it on its path]``."""
    newest = x[: windows.before.shape[1]]
    out = newest * weight[:, -1] if bias is None else torch.addcmul(bias, newest, weight[:, -1])
    for j, rows in enumerate(windows.before, 2):
        out = torch.addcmul(out, x.index_select(0, rows), weight[:, -j])
    return out


def tree_convolution_backward(
    grad: Tensor,  # [T, D]
    x: Tensor,  # [N, D]
    weight: Tensor,  # [D, K]
    windows: Windows,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias."""
    dx, dweight = torch.zeros_like(x), torch.empty_like(weight)
    dx[: len(grad)] = grad * weight[:, -1]
    dweight[:, -1] = (grad * x[: len(grad)]).sum(0)
    for j, rows in enumerate(windows.before, 2):
        add_rows(dx, rows, grad * weight[:, -j])
        dweight[:, -j] = (grad * x.index_select(0, rows)).sum(0)
    return dx, dweight, grad.sum(0)


def add_rows(total: Tensor, rows: Tensor, values: Tensor) -> None:
    """Add ``values`` to ``total[rows]`` in place, in a fixed order."""
    if total.device.type == "cpu":
        total.index_add_(0, rows, values)
    else:  # index_add is atomic there
        total.index_put_((rows,), values, accumulate=True)


class _Inherit(torch.autograd.Function):
    """Returns ``states[parent]``; the gradient of a parent is the sum over its children in the order of their rows."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, parent: Tensor, order: Tensor, children: Tensor) -> Tensor:
        ctx.save_for_backward(order, children)
        return states.index_select(0, parent)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        order, children = ctx.saved_tensors
        flat = grads[0].index_select(0, order).flatten(1)
        total = torch.segment_reduce(flat, "sum", lengths=children, axis=0, unsafe=True, initial=0.0)
        return total.view(-1, *grads[0].shape[1:]), None, None, None


def _accumulate(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
