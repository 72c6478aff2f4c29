"""Loss, metrics and all gradients of the head in one pass over chunks of rows, for a known objective.

A chunk is a GEMM into a tile of fp32 logits, the row statistics, the objective on the chunk's pairs (which gives value
*and* derivatives), the gradient of the logits, and two GEMMs: the logits are formed once. Rows that turn out to have no
gradient (clipped) leave before the last two GEMMs where the host may count them. `two_phase` is for objectives that
must have seen everything first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..linear_logprob import chunked, frozen
from ..linear_logprob.chunked import RowKernels
from ..linear_logprob.head import Head, HeadGradient
from ..linear_logprob.pairs import Pairs, sum_by_row
from ..policy_loss import SUMS, Evaluation, Objective, PolicyFields, evaluate
from .plan import Schedule


class Cuts(NamedTuple):
    """See `plan.HeadPlan`."""

    row: list[int]
    pair: list[int]
    block: list[int]
    count_on_device: bool


class Inputs(NamedTuple):
    """What is scored, and the loss on it."""

    hidden: Tensor  # [R, H]
    head: Head
    pairs: Pairs  # P of them
    caller: Tensor | None  # [P] int64, place of each pair in `fields`; None: the same
    temperature: Tensor  # [R], in the accumulation dtype
    softcap: float
    fields: PolicyFields  # M pairs
    objective: Objective


class Result(NamedTuple):
    total: Tensor  # [] fp64, sum of the losses
    sums: Tensor  # fp64, see `Evaluation`
    d_hidden: Tensor  # [R, H], or [0]


def one_pass(rows: RowKernels, given: Inputs, cuts: Cuts, need_hidden: bool, need: HeadGradient) -> Result:
    """Schedules fused_forward and sequence_aligned; the gradients of the head are added to ``need``."""
    hidden, head, pairs, caller, temperature, softcap, fields, objective = given
    V, accumulator = len(head.weight), temperature.dtype
    sizes = [b - a for a, b in zip(cuts.row, cuts.row[1:], strict=False)]
    tile = hidden.new_empty((max(sizes, default=0), V), dtype=accumulator)
    d_tile = tile if head.dtype == accumulator else torch.empty_like(tile, dtype=head.dtype)
    logprob, nothing = tile.new_empty(len(pairs.target)), tile.new_empty(0)
    d_hidden = torch.zeros_like(hidden) if need_hidden else hidden.new_empty(0)
    total = tile.new_zeros((), dtype=torch.float64)
    sums = tile.new_zeros(len(SUMS), dtype=torch.float64)
    if caller is not None and not cuts.block:
        fields, caller = fields.take(caller), None  # from here on in row order
    for k, n in enumerate(sizes):
        c, p = slice(cuts.row[k], cuts.row[k + 1]), slice(cuts.pair[k], cuts.pair[k + 1])
        logits = head.logits(hidden[c], tile[:n])
        start = pairs.start[c.start : c.stop + 1]
        logsumexp, correction, entropy = tile.new_empty(3, n)
        scaling = (head.bias, temperature[c], softcap)
        rows.statistics(logits, *scaling, start, pairs.target, logprob, logsumexp, correction, entropy, nothing)

        local = Pairs(start - p.start, pairs.target[p], None, pairs.one_a_row)
        part = slice(*cuts.block[2 * k : 2 * k + 2]) if cuts.block else p
        place = None if caller is None else caller[p] - part.start
        evaluation = _evaluate(
            logprob[p], _of_pairs(entropy, local), place, fields.slice(part.start, part.stop), objective
        )
        total, sums = total + evaluation.total, sums + evaluation.sums

        a, b, constant = _coefficients(evaluation, entropy, local, objective)
        counted = cuts.count_on_device
        alive = None if hidden.is_cuda or counted else chunked.rows_with_gradient(local, a, constant, b, nothing)
        x, out = hidden[c], d_tile[:n]
        if alive is not None:
            local, of_alive = local.of_rows(alive)
            logits, x, out = logits[alive], x[alive], d_tile[: len(alive)]
            if out.dtype == logits.dtype:
                out = logits
            a, constant, logsumexp, correction = a[of_alive], constant[alive], logsumexp[alive], correction[alive]
            b = b[alive] if len(b) else b
            scaling = (head.bias, temperature[c][alive], softcap)
        rows.gradient(logits, *scaling, local.start, local.target, logsumexp, correction, a, constant, b, nothing, out)
        if counted:
            _products_on_device(chunked.has_gradient(local, a, constant, b, nothing), out, x, d_hidden[c], head, need)
            continue
        if need_hidden:
            d_x = d_hidden[c] if alive is None else torch.empty_like(x)
            head.to_hidden(out, d_x)
            if alive is not None:
                d_hidden[c].index_copy_(0, alive, d_x)
        need.add(out, x)
    return Result(total, sums, d_hidden)


def _products_on_device(
    alive: Tensor,  # [C] bool
    d_logits: Tensor,  # [C, V]
    hidden: Tensor,  # [C, H]
    d_hidden: Tensor,  # [C, H], or [0]
    head: Head,
    need: HeadGradient,
) -> None:
    """The last two products over the rows that are alive, which the host does not count."""
    from ..linear_logprob import triton_counted  # not at the top: triton need not be installed

    origin, count = triton_counted.rows_on_device(alive)
    if len(d_hidden):
        triton_counted.to_hidden(d_logits, head.operand, origin, count, d_hidden)
    if len(need.weight):
        triton_counted.accumulate(need.weight, d_logits, hidden.contiguous(), origin, count)
    if len(need.bias):
        need.bias += d_logits.sum(0, dtype=need.bias.dtype)


def two_phase(
    forward: Callable[..., Any],  # `chunked.forward` with its row kernels, or `reference.forward`
    backward: Callable[..., Any],
    schedule: Schedule,
    given: Inputs,
    need_hidden: bool,
    need: HeadGradient,
) -> Result:
    """All log-probs, then the objective, then the gradient: recomputed, or by the direction of a frozen head."""
    hidden, head, pairs, caller, temperature, softcap, fields, objective = given
    keep_direction = schedule == "frozen_head"
    logprob, logsumexp, correction, entropy, _, kept = forward(
        hidden, head, pairs, temperature, softcap, True, False, keep_direction
    )
    if objective.scope == "token" and caller is not None:
        fields, caller = fields.take(caller), None
    evaluation = _evaluate(logprob, _of_pairs(entropy, pairs), caller, fields, objective)
    total, sums = evaluation.total.double(), evaluation.sums
    if schedule == "logprob_only":
        return Result(total, sums, hidden.new_empty(0))
    a, b, _ = _coefficients(evaluation, entropy, pairs, objective)
    if keep_direction:
        d_hidden = frozen.backward(head, pairs, temperature, softcap, logprob, logsumexp, kept, a, None)
        return Result(total, sums, d_hidden)
    nothing, zero = a.new_empty(0), torch.zeros_like(logsumexp)
    scored = (hidden, head, pairs, temperature, softcap, logsumexp, correction, entropy, nothing, kept)
    d_hidden = backward(*scored, a, zero, b, nothing, need_hidden, need)
    return Result(total, sums, d_hidden)


def _evaluate(
    logprob: Tensor,  # [P], in row order
    entropy: Tensor | None,  # [P]
    place: Tensor | None,  # [P] int64, of each in `fields`; None: the same
    fields: PolicyFields,  # [M]
    objective: Objective,
) -> Evaluation:
    """The objective on P of M pairs, the others counting as masked; derivatives in row order, [P]."""
    if place is None:
        return evaluate(logprob, entropy, fields, objective)
    M = len(fields.adv_pos)

    def spread(values: Tensor) -> Tensor:
        return values.new_zeros(M).index_copy_(0, place, values)

    scored = torch.zeros(M, dtype=torch.bool, device=place.device).index_fill_(0, place, True)
    everywhere = None if entropy is None else spread(entropy)
    value = evaluate(spread(logprob), everywhere, replace(fields, mask=scored), objective)
    d_entropy = None if value.d_entropy is None else value.d_entropy[place]
    return value._replace(d_logprob=value.d_logprob[place], d_entropy=d_entropy)


def _of_pairs(entropy: Tensor, pairs: Pairs) -> Tensor:  # [R] -> [P]
    return entropy if pairs.one_a_row else entropy[pairs.row]


def _coefficients(
    evaluation: Evaluation, entropy: Tensor, pairs: Pairs, objective: Objective
) -> tuple[Tensor, Tensor, Tensor]:
    """``a [P]``, and ``b`` ([R], or [0] without an entropy term) and ``c [R]`` of `chunked.RowKernels.gradient`."""
    a = evaluation.d_logprob.to(entropy.dtype)
    zero = torch.zeros_like(entropy)
    if not objective.needs_entropy or evaluation.d_entropy is None:
        return a, entropy.new_empty(0), zero
    b = sum_by_row(pairs, evaluation.d_entropy.to(entropy.dtype))
    constant, _, _ = chunked.coefficients(entropy, entropy.new_empty(0), zero, b, entropy.new_empty(0))
    return a, b, constant
