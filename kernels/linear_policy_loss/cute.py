"""Cute backend of `linear_policy_loss`: the pass of `fused` on the exponentials of `linear_logprob.exponentials`.

A row is multiplied once for each of its targets, as siblings' derivatives may cancel: the gradient of a row with two
could not be scaled by their sum. Rows on paths of several chunks are scored and learnt by Triton, as everything is, and
said once, that the kernels do not take: what `linear_logprob.cute` names.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import fall_back, log_once
from ..linear_logprob import cute as of_head
from ..linear_logprob.exponentials import Exponentials
from ..linear_logprob.head import HeadGradient
from ..linear_logprob.targets import Targets
from . import fused
from .fused import Cuts, Inputs, SharedRows
from .judge import Judge

OP = "linear_policy_loss"


def one_pass(given: Inputs, judge: Judge, cuts: Cuts, need_hidden: bool, need: HeadGradient) -> tuple[Tensor, Tensor]:
    """As `fused.one_pass`."""
    hidden, head, targets, temperature, _ = given
    if reason := refusal(given, judge):
        fall_back(OP, "cute", "triton", reason)
        return fused.one_pass(of_head.portable(), given, judge, cuts, need_hidden, need)
    log_once(f"{OP} runs on quack's GEMMs.")
    sizes = [b - a for a, b in zip(cuts.target, cuts.target[1:], strict=False)]
    tile = Exponentials(of_head.kernels(), head.weight, max(sizes, default=0), store=True)
    scores = temperature.new_empty((2, len(targets.target)))
    d_hidden = torch.zeros_like(hidden) if need_hidden else hidden.new_empty(0)
    shared = SharedRows(of_head.portable(), given, cuts) if cuts.row[0] else None
    if shared is not None:
        shared.know(judge, scores)
    for k in range(len(sizes)):
        c, own = slice(cuts.row[k], cuts.row[k + 1]), slice(cuts.target[k], cuts.target[k + 1])
        one_a_row = sizes[k] == c.stop - c.start  # as every row of a plan has a target
        local = Targets(targets.start[c.start : c.stop + 1] - own.start, targets.target[own], None, one_a_row)
        x, of_row = hidden[c], temperature[c]
        if not local.one_a_row:
            x, of_row = x[local.row], of_row[local.row]
        found = tile.form(x, of_row, local.target)
        scores[0, own], scores[1, own] = found.logprob, found.entropy
        paths = slice(*cuts.path[2 * k : 2 * k + 2]) if cuts.path else own
        a, b = judge.derivatives(own, paths, found.logprob, found.entropy, add_paths=shared is None)
        tile.gradient(a, b)
        if need_hidden and local.one_a_row:
            tile.to_hidden(d_hidden[c])
        elif need_hidden:
            d_hidden[c] = _sum_of_targets(local, tile)
        if need.need_weight:
            into, there = need.weight_sum()
            tile.to_weight(into, add=there)
    if shared is not None:
        shared.learn(judge, need_hidden, need, d_hidden)
    return d_hidden, scores


def _sum_of_targets(local: Targets, tile: Exponentials) -> Tensor:
    """Gradient of hidden ``[n, H]`` from those that each target's row has, in a fixed order."""
    of_target = torch.empty_like(tile.x[: tile.n])
    tile.to_hidden(of_target)
    total = of_target.new_zeros((len(local.start) - 1, of_target.shape[1]), dtype=torch.float32)
    total.index_put_((local.row,), of_target.float(), accumulate=True)  # sorted, not atomic
    return total.to(of_target.dtype)


def refusal(given: Inputs, judge: Judge) -> str | None:
    """Why these arguments run on Triton, or None."""
    of_entropy = any(objective.needs_entropy for _, objective, _ in judge.terms)
    return of_head.refusal(given.hidden, given.head, given.softcap, of_entropy=of_entropy)
