"""The definition of tree attention, dense and in plain PyTorch.

    S[h,i,j] = scale * <q[i,h], k[j, h // (Hq / Hkv)]>       (softcap * tanh(S / softcap) where softcap is given)
    row i sees key j  iff  j <= i < subtree_end[j]           (and position[i] - position[j] < window)
    the T rows of q are the last of N: the first N - T keys belong to an earlier piece of the tree
    out[i,h] = sum_j softmax_j(S[h,i,visible]) v[j]          lse[i,h] = log sum_j exp S[h,i,j]

A row that sees nothing (only a malformed ``subtree_end`` has one) gives out 0 and lse -inf. float64 is computed in
float64, everything else in float32. ``tree_attention_forward`` is differentiable by autograd;
``tree_attention_backward`` states the gradient in closed form, as the kernels compute it. Triton's kernels give
gradients of 0 to a row whose log-sum-exp exceeds 1.16e7 (2^24 ln 2): fp32 numbers of that size have no bits below one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Scoring(NamedTuple):
    """Says which keys a row sees and how its scores are formed, for N keys of which the last T are the rows' own."""

    subtree_end: Tensor  # [N] int32, exclusive end of each token's subtree
    position: Tensor | None  # [N] int32, depth of each token along its path; None without a window
    scale: float
    window: int | None
    softcap: float | None


def visible_keys(scoring: Scoring, rows: int) -> Tensor:
    """Return [rows, N] bool: row i of the last ``rows`` sees key j."""
    key = torch.arange(scoring.subtree_end.numel(), device=scoring.subtree_end.device)
    return sees(scoring, key[len(key) - rows :], key)


def sees(scoring: Scoring, row: Tensor, key: Tensor) -> Tensor:
    """Return [R, K] bool: which of the rows ``row [R]`` see which of the keys ``key [K]``, both numbered like keys."""
    seen = (key[None, :] <= row[:, None]) & (row[:, None] < scoring.subtree_end[key][None, :])
    if scoring.window is not None:
        assert scoring.position is not None
        seen &= scoring.position[row][:, None] - scoring.position[key][None, :] < scoring.window
    return seen


def tree_attention_forward(
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [N, Hkv, D]
    v: Tensor,  # [N, Hkv, D]
    scoring: Scoring,
) -> tuple[Tensor, Tensor]:
    """Return out [T, Hq, D] in q's dtype and the log-sum-exp [Hq, T] in float32 (float64 for float64)."""
    seen = visible_keys(scoring, len(q))
    scores, _ = _scores(q, k, scoring.scale, scoring.softcap)
    scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)  # [Hq, T]
    probability = _probability(scores, lse)
    out = torch.einsum("hij,jhd->ihd", probability, _per_query_head(v, q))
    return out.to(q.dtype).contiguous(), lse.contiguous()


def tree_attention_backward(
    grad_out: Tensor,  # [T, Hq, D]
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [N, Hkv, D]
    v: Tensor,  # [N, Hkv, D]
    out: Tensor,  # [T, Hq, D]
    lse: Tensor,  # [Hq, T]
    scoring: Scoring,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, in their dtypes."""
    seen = visible_keys(scoring, len(q))
    scores, slope = _scores(q, k, scoring.scale, scoring.softcap)
    probability = _probability(scores.masked_fill(~seen, -math.inf), lse)
    grad = _accumulate(grad_out)
    delta = (grad * _accumulate(out)).sum(-1).transpose(0, 1)  # [Hq, T]
    dscores = probability * (torch.einsum("ihd,jhd->hij", grad, _per_query_head(v, q)) - delta[..., None])
    dscores = dscores * scoring.scale
    if slope is not None:
        dscores = dscores * slope
    dq = torch.einsum("hij,jhd->ihd", dscores, _per_query_head(k, q))
    dk = _sum_group(torch.einsum("hij,ihd->jhd", dscores, _accumulate(q)), k)
    dv = _sum_group(torch.einsum("hij,ihd->jhd", probability, grad), v)
    return dq.to(q.dtype).contiguous(), dk.to(k.dtype).contiguous(), dv.to(v.dtype).contiguous()


def _accumulate(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _per_query_head(x: Tensor, q: Tensor) -> Tensor:
    return _accumulate(x).repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _sum_group(x: Tensor, like: Tensor) -> Tensor:
    tokens, heads, dim = like.shape
    return x.reshape(tokens, heads, x.shape[1] // heads, dim).sum(2)


def _scores(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Return the scores [Hq, T, N] and the slope of the softcap there, None without one."""
    scores = torch.einsum("ihd,jhd->hij", _accumulate(q), _per_query_head(k, q)) * scale
    if softcap is None:
        return scores, None
    bent = torch.tanh(scores / softcap)
    return softcap * bent, 1 - bent * bent


def _probability(scores: Tensor, lse: Tensor) -> Tensor:
    return torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
