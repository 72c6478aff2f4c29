"""`linear_logprob` with the vocabulary split over a process group: every rank has a shard of the weight's rows.

Each rank runs the unsharded op on its shard. One all_gather of 8 to 16 bytes a row and 4 a target (twice that for fp64)
then gives every rank the results of all, which it combines in rank order, in fp64, with w_r = exp(lse_r - lse):

    lse = log sum_r exp(lse_r)     logprob_m = logprob_m on the rank r that owns the target + log w_r
    entropy = sum_r w_r (entropy_r - log w_r)     sum_p2 = sum_r w_r^2 sum_p2_r

The backward is that of the unsharded op with these in place of the shard's own; dHidden is then summed over the ranks
in the accumulation dtype. The loss must be the same on all ranks, as it is where hidden and targets are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .op import check_values, linear_logprob_backward_op, linear_logprob_op
from .targets import group_by_row, sum_by_row


class VocabShards(NamedTuple):
    """The ranks' shares of the weight's rows: rank r has ids ``edges[r] .. edges[r + 1]``."""

    group: Any  # torch.distributed.ProcessGroup
    edges: list[int]  # [ranks + 1]

    @classmethod
    def gather(cls, group: Any, size: int, device: torch.device) -> VocabShards:
        """Gather the ``size`` of every rank of ``group``: a collective that waits for the device, so keep the
        result."""
        sizes = torch.empty(dist.get_world_size(group), dtype=torch.int64, device=device)
        dist.all_gather_into_tensor(sizes, torch.tensor([size], device=device), group=group)
        edges = [0]
        for n in sizes.tolist():
            edges.append(edges[-1] + n)
        return cls(group, edges)

    @classmethod
    def of(cls, tp_group: Any, weight: Tensor) -> VocabShards:
        """Return ``tp_group`` if it is the shards, else those of a process group, of which this rank has ``weight``."""
        return tp_group if isinstance(tp_group, cls) else cls.gather(tp_group, len(weight), weight.device)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)


def sharded(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `_ShardedLogprob` of the arguments, the last of which may be a process group."""
    *rest, tp_group = arguments
    result: tuple[Tensor, Tensor, Tensor, Tensor] = _ShardedLogprob.apply(*rest, VocabShards.of(tp_group, rest[1]))
    return result


class _ShardedLogprob(torch.autograd.Function):
    """Computes ``(logprob [M], logsumexp [N], entropy [N] or [0], sum_p2 [N] or [0])`` over all shards."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [N, H], the same on all ranks
        weight: Tensor,  # [V of this rank, H]
        bias: Tensor | None,  # [V of this rank]
        target: Tensor,  # [M] int64, ids of the whole vocabulary
        row: Tensor | None,  # [M] int64
        temperature: Tensor,  # [N]
        softcap: float,
        want_entropy: bool,
        want_sum_p2: bool,
        weight_grad: Tensor | None,  # [V of this rank, H]
        shards: VocabShards,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rank, edges = shards.rank, shards.edges
        if len(weight) != edges[rank + 1] - edges[rank]:
            raise ValueError(
                f"linear_logprob: weight has {len(weight)} rows and tp_group says {edges[rank + 1] - edges[rank]} for "
                f"rank {rank}; gather the shards again."
            )
        check_values("linear_logprob", hidden, target, row, temperature, edges[-1])
        in_shard = (target >= edges[rank]) & (target < edges[rank + 1])  # [M]
        local_target = torch.where(in_shard, target - edges[rank], 0)
        head = (hidden, weight, bias, None, None, 0.0)
        *local, kept = linear_logprob_op(
            *head, local_target, row, temperature, softcap, want_entropy, want_sum_p2, False, None
        )
        logprob, logsumexp, correction, entropy, sum_p2 = _combine(local, target, row, shards)
        ctx.shards, ctx.softcap, ctx.into = shards, softcap, weight_grad
        ctx.save_for_backward(
            hidden, weight, bias, local_target, row, temperature, logsumexp, correction, entropy, sum_p2, kept, in_shard
        )
        ctx.set_materialize_grads(False)
        return logprob, logsumexp, entropy, sum_p2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, row, temperature, *rest = ctx.saved_tensors
        logsumexp, correction, entropy, sum_p2, kept, in_shard = rest
        grad_logprob, grad_logsumexp, grad_entropy, grad_sum_p2 = grads
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        if grad_logprob is None:
            grad_logprob = logsumexp.new_zeros(in_shard.shape)
        # d logprob = onehot - p: where another rank owns the target, - p remains, a gradient of the log-sum-exp.
        targets = group_by_row(target, row, len(hidden))
        elsewhere = torch.where(in_shard, 0.0, grad_logprob)
        elsewhere = sum_by_row(targets, elsewhere if targets.order is None else elsewhere[targets.order])
        d_hidden, d_weight, d_bias, _, _ = linear_logprob_backward_op(
            hidden,
            weight,
            bias,
            None,
            None,
            0.0,
            target,
            row,
            temperature,
            ctx.softcap,
            grad_logprob,  # in the place of the log-prob, which only a frozen head's backward reads
            logsumexp,
            correction,
            entropy,
            sum_p2,
            kept,
            False,
            torch.where(in_shard, grad_logprob, 0.0),
            -elsewhere if grad_logsumexp is None else grad_logsumexp - elsewhere,
            grad_entropy if len(entropy) else None,
            grad_sum_p2 if len(sum_p2) else None,
            need_hidden,
            need_weight,
            need_bias,
            False,
            ctx.into,
        )
        if need_hidden:
            total = d_hidden.to(logsumexp.dtype)
            dist.all_reduce(total, group=ctx.shards.group)
            d_hidden = total.to(hidden.dtype)
        gradients = (d_hidden, d_weight, d_bias)
        needed = need_hidden, need_weight and ctx.into is None, need_bias
        return *(g if n else None for g, n in zip(gradients, needed, strict=True)), *(None,) * 8


def _combine(
    local: list[Tensor], target: Tensor, row: Tensor | None, shards: VocabShards
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Combine the five outputs of `linear_logprob_op` of all shards, with one all_gather."""
    ranks, sizes = len(shards.edges) - 1, [len(part) for part in local]
    local_values = torch.cat(local)
    gathered = local_values.new_empty(ranks * len(local_values))
    dist.all_gather_into_tensor(gathered, local_values, group=shards.group)
    of_rank = [part.double().split(sizes) for part in gathered.split(len(local_values))]
    # [ranks, N]; the correction of a shard whose every token has probability zero is inf - inf
    lse_of_rank = torch.stack([torch.where(lse == -torch.inf, lse, lse + low) for _, lse, low, _, _ in of_rank])
    lse = torch.logsumexp(lse_of_rank, 0)
    log_w = lse_of_rank - lse
    w = log_w.exp()
    logprob = torch.full_like(target, torch.nan, dtype=torch.float64)
    entropy, sum_p2 = (torch.zeros_like(part) for part in of_rank[0][3:])
    for r, (logprob_r, _, _, entropy_r, sum_p2_r) in enumerate(of_rank):
        owned = (target >= shards.edges[r]) & (target < shards.edges[r + 1])
        of_shard = log_w[r] if row is None else log_w[r][row]
        value = torch.where(of_shard == -torch.inf, of_shard, logprob_r + of_shard)
        logprob = torch.where(owned, value, logprob)
        if len(entropy):
            # a shard whose every token has probability zero adds nothing, not 0 * inf
            entropy += torch.where(w[r] == 0, 0.0, w[r] * (entropy_r - log_w[r]))
        if len(sum_p2):
            sum_p2 += torch.where(w[r] == 0, 0.0, w[r].square() * sum_p2_r)
    dtype = local_values.dtype
    rounded = lse.to(dtype)
    return logprob.to(dtype), rounded, (lse - rounded).to(dtype), entropy.to(dtype), sum_p2.to(dtype)
