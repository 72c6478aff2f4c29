"""`linear_divergence` and `linear_topk_divergence` as differentiable ops of torch, which choose the live rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..checks import Arguments
from ..forward_gradients import INPUTS, accumulated, backward, empty_gradients, registered
from ..linear_logprob import chunked as logprob_chunked
from ..linear_logprob.head import Head, HeadGradient
from ..linear_logprob.op import backend_of, row_kernels
from ..linear_logprob.targets import Targets
from ..linear_policy_loss import fused
from ..linear_policy_loss.plan import even_cuts
from . import chunked, reference
from .kinds import Kind
from .topk import TopK, check_topk

NAME, TOPK = "linear_divergence", "linear_topk_divergence"


def _one_pass(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    bias: Tensor | None,  # [V]
    lora_a: Tensor | None,  # [r, H]
    lora_b: Tensor | None,  # [V, r]
    lora_scale: float,
    temperature: Tensor,  # [N]
    softcap: float,  # 0: none
    teacher_hidden: Tensor,  # [N_t, H_t]
    teacher_weight: Tensor,  # [V, H_t]
    teacher_bias: Tensor | None,  # [V]
    teacher_temperature: Tensor | None,  # [N_t]; None: the student's
    teacher_softcap: float,
    row: Tensor | None,  # [M] int64
    teacher_row: Tensor | None,  # [M] int64
    weights: Tensor,  # [M], of any device
    kind: str,
    share: float,
    need: Sequence[bool],  # [5], gradients of hidden, weight, bias, a, b
    weight_grad: Tensor | None,  # [V, H], to which weight's gradient is added
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return ``(sum of weights times divergence [], divergence [M], entropy [M], the teacher's entropy [M], gradients
    of hidden, weight, bias, a, b)``.

    Values of pairs that are left out are NaN. A gradient that is not needed, or that is added to ``weight_grad``, is
    empty.
    """
    pairs = Pairs(NAME, weights, hidden, row)
    teachers = pairs.places(teacher_row, "teacher_row", len(teacher_hidden))
    check = Arguments(NAME, "hidden", hidden)
    check.positive("temperature", temperature)
    at = pairs.of_rows(temperature)
    if teacher_temperature is None:
        teacher_at = at
    else:
        check.positive("teacher_temperature", teacher_temperature)
        teacher_at = teacher_temperature if teachers is None else teacher_temperature[teachers]
    head = Head.of_flat(weight, bias, lora_a, lora_b, lora_scale, temperature.dtype)
    gradient = HeadGradient(head, need[1], need[2], need[3] or need[4], weight_grad if need[1] else None)
    teacher = Head(teacher_weight, teacher_bias, None, at.dtype)
    d_hidden, scores = chunked.one_pass(
        divergence_rows(backend_of(NAME, hidden)),
        chunked.Side(hidden, head, pairs.row, at, softcap),
        chunked.Side(teacher_hidden, teacher, teachers, teacher_at, teacher_softcap),
        Kind(kind, share),
        pairs.weights,
        row is not None,
        need[0],
        gradient,
    )
    total = (pairs.weights.double() * scores.divergence).sum()
    values = (pairs.spread(values) for values in scores)
    return total.to(at.dtype), *values, d_hidden, *_of_head(gradient, weight_grad)  # type: ignore[return-value]


def _topk_one_pass(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    bias: Tensor | None,  # [V]
    lora_a: Tensor | None,  # [r, H]
    lora_b: Tensor | None,  # [V, r]
    lora_scale: float,
    temperature: Tensor,  # [N]
    softcap: float,  # 0: none
    ids: Tensor,  # [M, K] int64; -1: none
    teacher_logprob: Tensor,  # [M, K]
    rest: bool,
    row: Tensor | None,  # [M] int64
    weights: Tensor,  # [M], of any device
    kind: str,
    share: float,
    need: Sequence[bool],  # [5], gradients of hidden, weight, bias, a, b
    weight_grad: Tensor | None,  # [V, H], to which weight's gradient is added
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what `_one_pass` does, without the teacher's entropy."""
    pairs = Pairs(TOPK, weights, hidden, row)
    check = Arguments(TOPK, "hidden", hidden)
    check.positive("temperature", temperature)
    if pairs.live is not None:
        ids, teacher_logprob = ids[pairs.live], teacher_logprob[pairs.live]
    check_topk(check, ids, teacher_logprob, len(weight))
    topk = TopK(Kind(kind, share), ids, teacher_logprob, pairs.weights, rest, len(weight))
    head = Head.of_flat(weight, bias, lora_a, lora_b, lora_scale, temperature.dtype)
    gradient = HeadGradient(head, need[1], need[2], need[3] or need[4], weight_grad if need[1] else None)
    (R, K), at = ids.shape, pairs.of_rows(temperature)
    targets = Targets(torch.arange(R + 1, device=ids.device) * K, topk.target, None, K == 1)
    row_cuts = even_cuts(R, logprob_chunked.chunk_rows(R, len(weight), hidden.device))
    cuts = fused.Cuts(list(row_cuts), [K * cut for cut in row_cuts], [])
    x = hidden if pairs.row is None else hidden.index_select(0, pairs.row)
    inputs = fused.Inputs(x, head, targets, at, softcap)
    d_x, scores = fused.one_pass(row_kernels(backend_of(TOPK, hidden)), inputs, topk, cuts, need[0], gradient)
    d_hidden = d_x
    if need[0] and pairs.row is not None:
        d_hidden = torch.zeros_like(hidden, dtype=at.dtype)
        d_hidden = d_hidden.index_put_((pairs.row,), d_x.to(at.dtype), accumulate=True).to(d_x.dtype)
    total = (pairs.weights.double() * topk.divergence).sum()
    entropy = scores[1].view(R, K)[:, 0]
    return (  # type: ignore[return-value]
        total.to(at.dtype),
        pairs.spread(topk.divergence),
        pairs.spread(entropy),
        d_hidden,
        *_of_head(gradient, weight_grad),
    )


class Pairs:
    """The pairs of a call whose weight is not 0: R of M. The others reach no product.

    They are chosen where ``weights`` are, so weights on the host make no call wait for a GPU.
    """

    def __init__(self, op: str, weights: Tensor, hidden: Tensor, row: Tensor | None) -> None:
        self.op, self.count, device = op, len(weights), hidden.device
        live = (weights != 0).nonzero().flatten()
        whole = len(live) == len(weights)
        self.live = None if whole else live.to(device, non_blocking=True)  # [R] int64; None: all
        self.weights = (weights if whole else weights[live]).contiguous().to(device, non_blocking=True)  # [R]
        self.row = self.places(row, "row", len(hidden))  # [R] int64, the student's; None: all, in order

    def places(self, row: Tensor | None, name: str, rows: int) -> Tensor | None:
        """Return the rows of these pairs, of ``rows`` rows of a model; None: all, in order."""
        if row is None:
            return self.live
        taken = row if self.live is None else row[self.live]
        Arguments(self.op, name, taken).index(name, taken, rows, remedy="give pairs without such a row the weight 0")
        return taken

    def of_rows(self, values: Tensor) -> Tensor:
        """Return ``values [N]`` of the student's rows by pair, ``[R]``."""
        return values if self.row is None else values[self.row]

    def spread(self, values: Tensor) -> Tensor:
        """Return ``values [R]`` in the caller's order ``[M]``; NaN for the others."""
        if self.live is None:
            return values.clone()
        return values.new_full((self.count,), torch.nan).index_copy_(0, self.live, values)


def divergence_rows(backend: str) -> chunked.DivergenceRows:
    """Return the row kernels of ``backend``."""
    if backend == "triton":
        from . import triton  # optional dependency

        return triton
    return reference if backend == "reference" else chunked.CPU


def _of_head(gradient: HeadGradient, weight_grad: Tensor | None) -> tuple[Tensor, ...]:
    d_weight, *others = gradient.results()
    return d_weight.new_empty(0) if weight_grad is not None else d_weight, *others


def _fake(columns: int, *arguments: Any) -> tuple[Tensor, ...]:
    """Return outputs without values of an op with ``columns`` values a pair; both ops begin and end alike."""
    inputs, temperature = arguments[:INPUTS], arguments[INPUTS + 1]
    weights, *_, need, weight_grad = arguments[-5:]
    values = (temperature.new_empty(weights.shape) for _ in range(columns))
    needed = [need[0], need[1] and weight_grad is None, *need[2:]]
    return temperature.new_empty(()), *values, *empty_gradients(inputs, temperature.dtype, needed)


linear_divergence_op, linear_divergence_into_op = registered(
    NAME, _one_pass, partial(_fake, 3), partial(backward, NAME)
)
linear_topk_divergence_op, linear_topk_divergence_into_op = registered(
    TOPK, _topk_one_pass, partial(_fake, 2), partial(backward, TOPK)
)


def _into(*arguments: Any) -> tuple[Tensor, ...]:
    out: tuple[Tensor, ...] = linear_divergence_into_op(*arguments)
    return out


def _topk_into(*arguments: Any) -> tuple[Tensor, ...]:
    out: tuple[Tensor, ...] = linear_topk_divergence_into_op(*arguments)
    return out


AccumulatedDivergence, AccumulatedTopK = accumulated(NAME, _into), accumulated(TOPK, _topk_into)
