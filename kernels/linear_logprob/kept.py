"""`kept` of `linear_logprob`: the softmax over the ids that each row was sampled from (top-k, top-p), by a sparse head.

Only the kept rows of the weight are read: 2 K H FLOP a row with K kept ids instead of 2 V H, forward and backward. The
logits ``[nnz]`` are the only intermediate; everything after them is plain autograd on vectors, in fp64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..checks import Arguments
from .op import check_values

ELEMENTS_AT_ONCE = 2**24
"""Elements of weight rows gathered at a time: 64 MiB in fp32."""


def kept_logprob(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    bias: Tensor | None,  # [V]
    target: Tensor,  # [M] int64
    row: Tensor | None,  # [M] int64
    temperature: Tensor,  # [N]
    softcap: float,  # 0: none
    kept: tuple[Tensor, Tensor],  # indptr [N + 1], ids [nnz]: row i keeps ids[indptr[i]:indptr[i + 1]], in any order
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``(logprob [M], logsumexp [N], entropy [N], sum_p2 [N])`` renormalised, in the dtype of ``temperature``.

    An id that a row names twice counts once. Rows that keep nothing have log-sum-exp -inf and entropy 0.

    Raises:
        ValueError: the shapes do not fit, or (on a CPU) a target is not among its row's kept ids; on a GPU, where
            checking would wait for the device, its log-prob is NaN.
        IndexError: an id is out of range (CPU only).
    """
    check_values("linear_logprob", hidden, target, row, temperature, len(weight))
    check = Arguments("linear_logprob", "hidden", hidden)
    if not isinstance(kept, tuple | list) or len(kept) != 2:
        check.wrong_type("kept", "a pair of tensors (indptr [N + 1], ids [nnz])", kept)
    (N, V), dtype = (len(hidden), len(weight)), temperature.dtype
    indptr = check.integers("kept's indptr", kept[0], (N + 1,), ", one more than rows").long().contiguous()
    ids = check.integers("kept's ids", kept[1], ("nnz",)).long()
    check.edges("kept's indptr", indptr, len(ids), "ids")
    check.index("kept's ids", ids, V)
    rows = torch.searchsorted(indptr[1:], torch.arange(len(ids), device=ids.device), right=True)
    key, order = (rows * V + ids).sort()  # within a row by id, so that targets can be looked up
    rows, ids = rows, ids[order]
    repeated = torch.zeros_like(key, dtype=torch.bool)
    repeated[1:] = key[1:] == key[:-1]
    lengths = indptr.diff()

    z = _GatheredLogits.apply(hidden, weight, rows, ids).double()
    if bias is not None:
        z = z + bias[ids].double()
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    z = z / temperature[rows].double()

    def total(values: Tensor) -> Tensor:  # [nnz] -> [N]
        return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)

    shift = torch.segment_reduce(z.detach(), "max", lengths=lengths, unsafe=True)
    shift = torch.where(shift.isfinite(), shift, 0)
    d = torch.where(repeated, 0, z - shift[rows])
    e = torch.where(repeated, 0, d.exp())
    whole = total(e)
    keeps = whole != 0
    log_sum = torch.where(keeps, whole, 1).log()
    logsumexp = torch.where(keeps, shift + log_sum, -torch.inf)
    p = e / torch.where(keeps, whole, 1)[rows]
    entropy = torch.where(keeps, log_sum - total(p * d), 0)

    of_target = torch.arange(len(target), device=target.device) if row is None else row
    target_key = of_target * V + target
    place = torch.searchsorted(key, target_key).clamp(max=max(len(key) - 1, 0))
    among = key[place] == target_key if len(key) else torch.zeros_like(target_key, dtype=torch.bool)
    if target.device.type == "cpu" and not bool(among.all()):
        m = int((~among).nonzero()[0])
        raise ValueError(
            f"linear_logprob: target {int(target[m])} in place {m} is not among the kept ids of row "
            f"{int(of_target[m])}; keep every sampled token."
        )
    no_key = target_key.double() * torch.nan
    logprob = torch.where(among, d[place] - log_sum[of_target], torch.nan) if len(key) else no_key
    return logprob.to(dtype), logsumexp.to(dtype), entropy.to(dtype), total(p * p).to(dtype)


class _GatheredLogits(torch.autograd.Function):
    """Computes ``hidden[rows] . weight[ids]`` ``[nnz]`` in the accumulation dtype, and sums both gradients in it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, rows, ids)
        accumulator = _accumulator(hidden)
        out = hidden.new_empty(len(ids), dtype=accumulator)
        for part in _parts(len(ids), hidden.shape[1]):
            left, right = hidden[rows[part]].to(accumulator), weight[ids[part]].to(accumulator)
            torch.sum(left.mul_(right), 1, out=out[part])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, rows, ids = ctx.saved_tensors
        grad, accumulator = grads[0], _accumulator(hidden)
        need_hidden, need_weight, _, _ = ctx.needs_input_grad
        d_hidden = torch.zeros_like(hidden, dtype=accumulator) if need_hidden else None
        d_weight = torch.zeros_like(weight, dtype=accumulator) if need_weight else None
        for part in _parts(len(ids), hidden.shape[1]):
            g = grad[part, None]
            # index_put_ sorts instead of adding atomically: the order of the sums is fixed
            if d_hidden is not None:
                d_hidden.index_put_((rows[part],), weight[ids[part]].to(accumulator).mul_(g), accumulate=True)
            if d_weight is not None:
                d_weight.index_put_((ids[part],), hidden[rows[part]].to(accumulator).mul_(g), accumulate=True)
        return (
            None if d_hidden is None else d_hidden.to(hidden.dtype),
            None if d_weight is None else d_weight.to(weight.dtype),
            None,
            None,
        )


def _accumulator(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _parts(nnz: int, H: int) -> Iterator[slice]:
    size = max(1, ELEMENTS_AT_ONCE // H)
    return (slice(begin, min(begin + size, nnz)) for begin in range(0, nnz, size))
