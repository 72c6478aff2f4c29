"""The definition of :func:`sample_tokens`, in float64 and with a full sort.

For a row of logits x at temperature T, with m = max x and w_v = exp((x_v - m) / T):

    order       tokens by (x descending, index ascending)
    top_k       keeps the first k
    top_p       keeps those before which less than top_p of the mass left by top_k lies (so at least one)
    min_p       keeps those with w_v >= min(min_p, 1) (w of the best token is 1)
    token       argmax over the kept of w_v / E_v,   E_v = -log(1 - t_v),  lowest index among equals
    t_v         word v % 4 of Philox4x32-10(key = seed, counter = (v // 4, 0, step, step >> 32)), in (0, 1)

    last_kept   the last one kept that has a weight (w >= 2^-126): it and those before it in the order could be drawn

w_v / E_v is the exponential of the Gumbel-max score x_v / T - log(-log(u_v)) with u_v = 1 - t_v. Keeping t instead of u
keeps the small E, which decide between unlikely tokens, at full precision: a 32-bit draw resolves them down to 1e-10.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
TINY = torch.finfo(torch.float32).tiny  # a temperature below it is zero: its inverse would overflow


def philox(counter: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """Return Philox4x32-10 (Salmon et al. 2011): four words in, four out, each an int64 that holds 32 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        hi0, lo0 = _multiply(c0, _MULTIPLIERS[0])
        hi1, lo1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return [c0, c1, c2, c3]


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Return the high and low word of a 32 x 32 bit product, without overflowing the high one in int64."""
    high = (a * (b >> 16) + ((a * (b & 0xFFFF)) >> 16)) >> 16
    return high, (a * b) & _MASK


def uniforms(seed: Tensor, step: Tensor, vocab: int) -> Tensor:
    """Return t of every row and token, [N, vocab] float32: (word + 1/2) / 2^32, at most 1 - 2^-24."""
    group = torch.arange((vocab + 3) // 4, device=seed.device).expand(len(seed), -1)
    step, seed = step[:, None], seed[:, None]
    counter = [group, torch.zeros_like(group), step & _MASK, (step >> 32) & _MASK]
    words = torch.stack(philox(counter, [seed & _MASK, (seed >> 32) & _MASK]), -1).flatten(1)[:, :vocab]
    return ((words.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)


def sample_reference(
    logits: Tensor,  # [N, V]
    temperature: Tensor,  # [N] float32
    top_k: Tensor | None,  # [N] int32
    top_p: Tensor | None,  # [N] float32
    min_p: Tensor | None,  # [N] float32
    seed: Tensor,  # [N] int64
    step: Tensor,  # [N] int64
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return token [N] int64; logprob, raw_logprob and entropy [N] float32; last_kept [N] int64."""
    x = logits.double()
    best = x.amax(-1, keepdim=True)
    failed = ~(best.isfinite().squeeze(-1) & temperature.isfinite())
    for parameter in (temperature, top_p, min_p):
        if parameter is not None:
            failed |= ~(parameter >= 0)
    greedy = temperature < TINY
    x, best = x.masked_fill(failed[:, None], 0.0), best.masked_fill(failed[:, None], 0.0)
    scale = temperature.double().masked_fill(greedy | failed, 1.0)[:, None]
    z = (x - best) / scale
    weight = z.exp()

    order = x.argsort(dim=-1, descending=True, stable=True)
    rank = torch.arange(x.shape[1], device=x.device)
    kept = torch.ones_like(weight, dtype=torch.bool)  # in sorted order until it is scattered back
    ranked = weight.gather(1, order)
    if top_k is not None:
        kept &= (rank < top_k[:, None]) | (top_k[:, None] < 1)
    if top_p is not None:
        mass = ranked * kept
        before = mass.cumsum(-1) - mass
        total, limit = mass.sum(-1, keepdim=True), top_p.double()[:, None]
        kept &= (before < limit * total) | (rank == 0) | (limit >= 1)
    if min_p is not None:
        kept &= ranked >= min_p.double()[:, None].clamp(max=1)
    count = (kept & (ranked >= TINY)).sum(-1, keepdim=True)
    last_kept = order.gather(1, count - 1).squeeze(-1)
    kept = torch.zeros_like(kept).scatter(1, order, kept)

    arrival = -torch.log1p(-uniforms(seed, step, x.shape[1]).double())
    race = torch.where(greedy[:, None], x == best, weight * kept / arrival)
    token = (race == race.amax(-1, keepdim=True)).to(torch.uint8).argmax(-1)  # argmax of 0/1: the lowest index

    chosen = token[:, None]
    logprob = z.gather(1, chosen).squeeze(-1) - (weight * kept).sum(-1).log()
    raw_logprob = (x - best).log_softmax(-1).gather(1, chosen).squeeze(-1)
    entropy = torch.special.entr(weight / weight.sum(-1, keepdim=True)).sum(-1)
    zero, nan = torch.zeros_like(logprob), torch.full_like(logprob, torch.nan)
    logprob, entropy = torch.where(greedy, zero, logprob), torch.where(greedy, zero, entropy)
    logprob, raw_logprob, entropy = (
        torch.where(failed, nan, value).float() for value in (logprob, raw_logprob, entropy)
    )
    last_kept = torch.where(greedy, token, last_kept)
    return token.masked_fill(failed, -1), logprob, raw_logprob, entropy, last_kept.masked_fill(failed, -1)
