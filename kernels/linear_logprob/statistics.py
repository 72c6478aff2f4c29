"""Statistics of the head's distribution for each target, for losses that are more than a function of log-probs.

They come from one `linear_logprob` and one product with the mean row of the head: with ``lse`` the logsumexp of the
scaled logits ``z / temperature``,

    mean_v log p_v = mean_v z_v / temperature - lse,    mean_v z_v = hidden . mean_v weight_v + mean_v bias_v,

so no logits exist for it either, and all gradients are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .api import linear_logprob, of_rows
from .head import HeadLora
from .parallel import VocabShards
from .targets import ABSENT

STATISTICS = ("entropy", "sum_p2", "mean_logprob", "extra_logprob")
"""Values of a target besides its log-prob; all but the last are of its row's distribution."""


def linear_statistics(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    target: Tensor,  # [M] int
    *,
    row: Tensor | None = None,  # [M] int
    want: Sequence[str] = (),
    extra_ids: Tensor | None = None,  # [M, K] int
    bias: Tensor | None = None,  # [V]
    temperature: float | Tensor = 1.0,  # or [N]
    softcap: float | None = None,
    lora: HeadLora | None = None,
    weight_grad: Tensor | None = None,  # [V, H]
    **options: Any,
) -> dict[str, Tensor]:
    """Return ``logprob [M]`` and the statistics in ``want``, all by target, with gradients to hidden and head.

    Args:
        want: of `STATISTICS`: ``entropy [M]``, ``sum_p2 [M]`` (sum over the vocabulary of p squared), ``mean_logprob
            [M]`` (mean over the vocabulary of log p), ``extra_logprob [M, K]``.
        extra_ids: K further ids to score for each target, where ``extra_logprob`` is wanted; -1 means none, and scores
            0 without gradient.
        hidden, weight, target, row, bias, temperature, softcap, lora, weight_grad, options: as in `linear_logprob`.

    Raises:
        ValueError: ``mean_logprob`` is wanted of a head with a softcap, which is not supported; or as in
            `linear_logprob`.
    """
    M = len(target)
    targets, rows = target, row
    if "extra_logprob" in want:
        assert extra_ids is not None
        row_of_target = torch.arange(M, device=target.device) if row is None else row.long()
        absent = extra_ids == ABSENT
        targets = torch.cat([target.long(), extra_ids.long().masked_fill(absent, 0).flatten()])
        rows = torch.cat([row_of_target, row_of_target[:, None].expand(extra_ids.shape).flatten()])
    out = linear_logprob(
        hidden, weight, targets, row=rows, bias=bias, temperature=temperature, softcap=softcap, lora=lora,
        weight_grad=weight_grad, want=[name for name in ("entropy", "sum_p2") if name in want], **options,
    )  # fmt: skip
    statistics = {"logprob": out.logprob[:M]}
    by_row = {"entropy": out.entropy, "sum_p2": out.sum_p2}
    if "mean_logprob" in want:
        if softcap:
            raise ValueError("linear_statistics: mean_logprob needs a head without softcap; leave it out.")
        group = options.get("tp_group")
        shards = None if group is None else VocabShards.of(group, weight)
        mean = _mean_logit(hidden, weight, bias, lora, weight_grad, shards).to(out.logsumexp.dtype)
        by_row["mean_logprob"] = mean / of_rows(temperature, out.logsumexp.dtype, hidden) - out.logsumexp
    for name, values in by_row.items():
        if values is not None:
            statistics[name] = values if row is None else values[row]
    if "extra_logprob" in want:
        statistics["extra_logprob"] = out.logprob[M:].view(absent.shape).masked_fill(absent, 0)
    return statistics


def _mean_logit(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora: HeadLora | None,
    weight_grad: Tensor | None,
    shards: VocabShards | None,
) -> Tensor:  # [N], in fp32 or fp64
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    hidden = hidden.to(dtype)
    mean: Tensor = hidden @ _MeanRow.apply(weight, weight_grad, dtype, shards)
    if bias is not None:
        mean = mean + _MeanRow.apply(bias[:, None], None, dtype, shards)
    if lora is not None:
        mean = mean + lora.scale * (hidden @ lora.a.to(dtype).T) @ lora.b.mean(0, dtype=dtype)
    return mean


class _MeanRow(torch.autograd.Function):
    """The mean row ``[H]`` of the head, of all its ``shards``; its gradient goes to ``weight_grad`` where that is
    given."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, weight_grad: Tensor | None, dtype: torch.dtype, shards: VocabShards | None
    ) -> Tensor:
        ctx.into, ctx.like = weight_grad, (weight.shape, weight.dtype)
        ctx.rows = len(weight) if shards is None else shards.edges[-1]
        total = weight.sum(0, dtype=dtype)
        if shards is not None:
            dist.all_reduce(total, group=shards.group)
        return total / ctx.rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        shape, dtype = ctx.like
        share = grads[0] / ctx.rows
        if ctx.into is not None:
            ctx.into += share
            return None, None, None, None
        return share.to(dtype).expand(shape), None, None, None
