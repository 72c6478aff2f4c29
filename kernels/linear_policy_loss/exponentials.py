"""The gradient of a chunk from its exponentials, which the pass over the logits has stored in bf16.

With e = exp(z - base), p = e exp(base - lse) and a the derivative by the log-prob of a row's target,

    dL/dlogits = (a onehot - sum(a) p) / T

so the products read e as it is, with a factor for each row, and the one-hot part is added in fp32: rows of the weight
to dL/dhidden, rows of hidden states to dL/dweight. No second pass reads logits, and the one-hot part is not rounded.

A CPU keeps the gradient of the logits: there the second pass takes about a hundredth of the products' time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..linear_logprob.head import Head, HeadGradient
from ..linear_logprob.targets import Targets, sum_by_row


class Stored(NamedTuple):
    """The results of `RowKernels.exponentials` for n rows."""

    exponentials: Tensor  # [n, V]
    base: Tensor  # [n]
    logsumexp: Tensor  # [n]
    correction: Tensor  # [n]


def fits(rows: Any, head: Head, softcap: float, need: HeadGradient, targets: Targets) -> bool:
    """Return whether the gradient is made of exponentials: of heads in bf16 without adapter and softcap, by row kernels
    that have them, for few targets a row. A bias may be added, but has no gradient."""
    plain = head.dtype == torch.bfloat16 and head.lora is None and not softcap and not need.need_bias
    return plain and hasattr(rows, "exponentials") and len(targets.target) <= 4 * (len(targets.start) - 1)


def add_gradient(
    head: Head,
    need: HeadGradient,
    hidden: Tensor,  # [n, H]
    targets: Targets,
    temperature: Tensor,  # [n]
    a: Tensor,  # [p]
    stored: Stored,
    out: Tensor | None,  # [n, H]
) -> None:
    """Add the gradient of the head to ``need``, and fill ``out`` with that of hidden. Rows without a gradient have one
    of 0 whatever their logits are."""
    live = sum_by_row(targets, a.abs()) != 0
    share = torch.exp((stored.base - stored.logsumexp) - stored.correction)
    factor = torch.where(live, -sum_by_row(targets, a) * share / temperature, 0)[:, None]
    row, inside = targets.row, (targets.target >= 0) & (targets.target < len(head.weight))
    target = torch.where(inside, targets.target, 0)
    onehot = torch.where(inside & live[row], a / temperature[row], 0)[:, None]
    if out is not None:
        product = torch.where(live[:, None], head.times_weight(stored.exponentials) * factor, 0)
        of_targets = onehot * head.rows(target)
        if targets.one_a_row:
            product += of_targets
        else:
            product.index_put_((row,), of_targets, accumulate=True)
        out.copy_(product)
    if need.need_weight:
        need.add_product("weight", stored.exponentials.T, torch.where(live[:, None], factor * hidden, 0).to(head.dtype))
        of_targets = torch.where(onehot == 0, 0, onehot * hidden[row])
        need.sums["weight"].index_put_((target,), of_targets, accumulate=True)  # sorted, not by atomics
