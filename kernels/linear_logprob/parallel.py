"""`linear_logprob` with the vocabulary split over a process group: every rank has a shard of the weight's rows.

Each rank runs the unsharded op on its shard. One all_gather of 8 to 16 bytes a row and 4 a pair (twice that for fp64)
then gives every rank what all have found, combined in rank order, in fp64, with w_r = exp(lse_r - lse):

    lse = log sum_r exp(lse_r)     logprob_m = logprob_m on the rank r that owns the target + log w_r
    entropy = sum_r w_r (entropy_r - log w_r)     sum_p2 = sum_r w_r^2 sum_p2_r

Backward is that of the unsharded op with these in place of the shard's own; dHidden is then summed over the ranks in
the accumulation dtype. The loss must be the same on all ranks, as it is where hidden and targets are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .api import _check_range, _linear_logprob, _linear_logprob_backward


class VocabShards(NamedTuple):
    """Who has which rows of the weight: rank r has ids ``edges[r] .. edges[r + 1]``."""

    group: Any  # torch.distributed.ProcessGroup
    edges: list[int]  # [ranks + 1]

    @classmethod
    def gather(cls, group: Any, size: int, device: torch.device) -> VocabShards:
        """Ask every rank of ``group`` for its ``size``: a collective that waits for the device, so keep the result."""
        sizes = torch.empty(dist.get_world_size(group), dtype=torch.int64, device=device)
        dist.all_gather_into_tensor(sizes, torch.tensor([size], device=device), group=group)
        edges = [0]
        for n in sizes.tolist():
            edges.append(edges[-1] + n)
        return cls(group, edges)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)


def sharded(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`_ShardedLogprob` of its arguments, the last of which may be a process group."""
    *rest, shards = arguments
    weight = rest[1]
    if not isinstance(shards, VocabShards):
        shards = VocabShards.gather(shards, len(weight), weight.device)
    result: tuple[Tensor, Tensor, Tensor, Tensor] = _ShardedLogprob.apply(*rest, shards)
    return result


class _ShardedLogprob(torch.autograd.Function):
    """``(logprob [M], logsumexp [N], entropy [N] or [0], sum_p2 [N] or [0])`` over all shards."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [N, H], the same on all ranks
        weight: Tensor,  # [V of this rank, H]
        target: Tensor,  # [M] int64, ids of the whole vocabulary
        row: Tensor | None,  # [M] int64
        bias: Tensor | None,  # [V of this rank]
        temperature: Tensor,  # [N]
        softcap: float,
        want_entropy: bool,
        want_sum_p2: bool,
        shards: VocabShards,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rank, edges = shards.rank, shards.edges
        if len(weight) != edges[rank + 1] - edges[rank]:
            raise ValueError(
                f"linear_logprob: weight has {len(weight)} rows and tp_group says {edges[rank + 1] - edges[rank]} for "
                f"rank {rank}; gather the shards again."
            )
        if target.device.type == "cpu":
            _check_range("target", target, edges[-1])
        mine = (target >= edges[rank]) & (target < edges[rank + 1])  # [M]
        local_target = torch.where(mine, target - edges[rank], 0)
        *local, logits = _linear_logprob(
            hidden, weight, local_target, row, bias, temperature, softcap, want_entropy, want_sum_p2
        )
        logprob, logsumexp, correction, entropy, sum_p2 = _combine(local, target, row, shards)
        ctx.shards, ctx.softcap = shards, softcap
        ctx.save_for_backward(
            hidden, weight, local_target, row, bias, temperature, logsumexp, correction, entropy, sum_p2, logits, mine
        )
        ctx.set_materialize_grads(False)
        return logprob, logsumexp, entropy, sum_p2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, logsumexp, correction, entropy, sum_p2, logits, mine = ctx.saved_tensors
        hidden, _, _, row, _, _ = inputs
        grad_logprob, grad_logsumexp, grad_entropy, grad_sum_p2 = grads
        need_hidden, need_weight, _, _, need_bias = ctx.needs_input_grad[:5]
        if grad_logprob is None:
            grad_logprob = logsumexp.new_zeros(mine.shape)
        if grad_logsumexp is None:
            grad_logsumexp = torch.zeros_like(logsumexp)
        # d logprob = onehot - p: where the target is another rank's, only - p is left, a gradient of the log-sum-exp.
        elsewhere = torch.where(mine, 0.0, grad_logprob)
        grad_logsumexp = grad_logsumexp - (elsewhere if row is None else _sum_rows(elsewhere, row, len(hidden)))
        d_hidden, d_weight, d_bias = _linear_logprob_backward(
            *inputs,
            ctx.softcap,
            logsumexp,
            correction,
            entropy,
            sum_p2,
            logits,
            torch.where(mine, grad_logprob, 0.0),
            grad_logsumexp,
            (logsumexp.new_empty(0) if grad_entropy is None else grad_entropy.contiguous())[: len(entropy)],
            (logsumexp.new_empty(0) if grad_sum_p2 is None else grad_sum_p2.contiguous())[: len(sum_p2)],
            need_hidden,
            need_weight,
            need_bias,
        )
        if need_hidden:
            total = d_hidden.to(logsumexp.dtype)
            dist.all_reduce(total, group=ctx.shards.group)
            d_hidden = total.to(hidden.dtype)
        return (
            d_hidden if need_hidden else None,
            d_weight if need_weight else None,
            None,
            None,
            d_bias if need_bias else None,
            *(None,) * 5,
        )


def _sum_rows(values: Tensor, row: Tensor, N: int) -> Tensor:
    """``[N]``: the sum of ``values [M]`` over each row's pairs, in the order of the pairs, without atomics."""
    row, order = torch.sort(row, stable=True)
    lengths = torch.searchsorted(row, torch.arange(N + 1, device=row.device)).diff()
    return torch.segment_reduce(values[order], "sum", lengths=lengths, unsafe=True)


def _combine(
    local: list[Tensor], target: Tensor, row: Tensor | None, shards: VocabShards
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The five outputs of `_linear_logprob` over all shards from those of this one: one all_gather."""
    ranks, sizes = len(shards.edges) - 1, [len(part) for part in local]
    mine = torch.cat(local)
    gathered = mine.new_empty(ranks * len(mine))
    dist.all_gather_into_tensor(gathered, mine, group=shards.group)
    of_rank = [part.double().split(sizes) for part in gathered.split(len(mine))]
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
    dtype = mine.dtype
    rounded = lse.to(dtype)
    return logprob.to(dtype), rounded, (lse - rounded).to(dtype), entropy.to(dtype), sum_p2.to(dtype)
