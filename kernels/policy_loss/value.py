"""The critic's side of PPO: generalised advantage estimates on ragged sequences, and the clipped value loss."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import Arguments
from .api import PolicyLossOutput, normalized


def gae(
    reward: Tensor,  # [M]
    value: Tensor,  # [M]
    cu_seqlens: Tensor,  # [S + 1] int, boundaries of the sequences, from 0 to M
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    mask: Tensor | None = None,  # [M] bool
    bootstrap: Tensor | None = None,  # [S]
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, ``[M]`` each; 0 for masked tokens (Schulman et al. 2015, eq. 16).

        delta_t = r_t + gamma V_t' - V_t        A_t = delta_t + gamma lam A_t'        return_t = A_t + V_t

    with t' the next unmasked token of the sequence: tokens that tools wrote are skipped, and no time passes there. No
    gradient. A scan of log2(M) steps in fp64, no loop over tokens. (https://arxiv.org/abs/1506.02438)

    Args:
        reward: ``[M]``, one a token.
        value: ``[M]``, the critic's estimates.
        cu_seqlens: ``[S + 1]`` int, boundaries of the sequences, from 0 to M.
        gamma, lam: in [0, 1].
        mask: ``[M]`` bool; False: written by a tool.
        bootstrap: ``[S]``, the value after the last token; 0 if None, right unless the sequence was cut off.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit, cu_seqlens does not rise from 0 to M, or gamma or
            lam is not in [0, 1].
    """
    check = Arguments("gae", "reward", reward)
    M = len(check.floats("reward", reward, ("M",)))
    check.floats("value", value, (M,), " like reward")
    if mask is not None:
        check.mask("mask", mask, (M,), " like reward")
    for name, number in (("gamma", gamma), ("lam", lam)):
        check.number(name, number)
    check.require(0 <= gamma <= 1 and 0 <= lam <= 1, lambda: f"gamma and lam must be in [0, 1], got {gamma} and {lam}")
    cu = check.boundaries(cu_seqlens, M)
    S = len(cu) - 1
    if bootstrap is not None:
        check.floats("bootstrap", bootstrap, (S,), ", one a sequence")
    advantage, returns = _gae_op(
        reward.detach(), value.detach(), cu, float(gamma), float(gamma * lam), mask,
        None if bootstrap is None else bootstrap.detach(),
    )  # fmt: skip
    return advantage, returns


@torch.library.custom_op("rolltree::gae", mutates_args=())
def _gae_op(
    reward: Tensor,  # [M]
    value: Tensor,  # [M]
    cu: Tensor,  # [S + 1] int64
    gamma: float,
    decay: float,  # gamma lam
    mask: Tensor | None,  # [M]
    bootstrap: Tensor | None,  # [S]
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns ``[M]``: an op, so that a compiler sees one call for any number of tokens."""
    M = len(reward)
    live = torch.ones(M, dtype=torch.bool, device=reward.device) if mask is None else mask
    place = torch.arange(M, device=reward.device)
    sequence = torch.searchsorted(cu[1:], place, right=True)
    # next unmasked token of the same sequence; M: none
    later = torch.where(live, place, M).flip(0).cummin(0).values.flip(0)
    following = torch.cat([later[1:], later.new_tensor([M])]) if M else later
    following = torch.where(following < cu[1:][sequence], following, M)
    ends = following == M

    values = torch.cat([value.double(), value.new_zeros(1, dtype=torch.float64)])
    last = values.new_zeros(M) if bootstrap is None else bootstrap.double()[sequence]
    delta = reward.double() + gamma * torch.where(ends, last, values[following]) - values[:M]
    # A_t = delta_t + factor_t A_next(t): double the reach of every token until it covers the longest sequence
    total = torch.cat([torch.where(live, delta, 0), delta.new_zeros(1)])
    factor = torch.cat([torch.where(ends, 0, torch.full_like(delta, decay)), delta.new_zeros(1)])
    jump = torch.cat([following, following.new_tensor([M])])
    for _ in range(max(M, 1).bit_length()):
        total = total + factor * total[jump]
        factor = factor * factor[jump]
        jump = jump[jump]
    advantage = torch.where(live, total[:M], 0)
    returns = torch.where(live, advantage + values[:M], 0)
    return advantage.to(reward.dtype), returns.to(reward.dtype)


@_gae_op.register_fake
def _(reward: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return reward.new_empty(reward.shape), reward.new_empty(reward.shape)


def value_loss(
    value: Tensor,  # [M]
    returns: Tensor,  # [M]
    *,
    normalizer: float | Tensor,
    old_value: Tensor | None = None,  # [M]
    clip: float | None = 0.5,
    mask: Tensor | None = None,  # [M] bool
) -> PolicyLossOutput:
    """Compute ``sum of max((V - G)^2, (clip(V, V_old +- clip) - G)^2) / 2 / normalizer``, differentiable to ``value``.

    Without ``old_value`` or ``clip`` it is the plain squared error. Metrics: ``critic/vf_loss``,
    ``critic/vf_clipfrac``, and the sums that explained variance is made of, ``critic/returns`` and
    ``critic/returns_sq``, ``critic/error`` and ``critic/error_sq``: 1 - (E e^2 - (E e)^2) / (E G^2 - (E G)^2).
    (The clip is that of OpenAI Baselines' PPO, not of a paper.)

    Args:
        value: ``[M]``, the critic's estimates.
        returns: ``[M]``, targets G, as from `gae`.
        normalizer: the global denominator: unmasked tokens of the whole batch.
        old_value: ``[M]``, estimates before the update.
        clip: how far an estimate may move from its old value; None: any distance.
        mask: ``[M]`` bool.

    Returns:
        The loss ``[]`` in fp32 (fp64 for fp64 estimates), and metrics ``{name: (sum, count)}`` in fp64.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit, clip is not positive, or a target or old estimate
            requires a gradient.
    """
    check = Arguments("value_loss", "value", value)
    M = len(check.floats("value", value, ("M",)))
    check.constant("returns", check.floats("returns", returns, (M,), " like value"))
    if old_value is not None:
        check.constant("old_value", check.floats("old_value", old_value, (M,), " like value"))
    if mask is not None:
        check.mask("mask", mask, (M,), " like value")
    if clip is not None:
        check.number("clip", clip, above=0, expected="positive or None")
    check.normalizer(normalizer)
    # squares do not fit fp16, and an estimate's error is smaller than a half-precision step
    wide = torch.promote_types(value.dtype, torch.float32)
    value, returns = value.to(wide), returns.to(wide)
    old_value = None if old_value is None else old_value.to(wide)
    live = torch.ones_like(value, dtype=torch.bool) if mask is None else mask
    error = torch.where(live, value - returns, 0)
    losses, clipped = error.square(), torch.zeros_like(live)
    if old_value is not None and clip is not None:
        near = torch.minimum(torch.maximum(value, old_value - clip), old_value + clip)
        other = torch.where(live, near - returns, 0).square()
        clipped, losses = other > losses, torch.maximum(losses, other)
    total = 0.5 * losses.sum(dtype=torch.float64).to(value.dtype)
    count = live.sum(dtype=torch.float64)
    target = torch.where(live, returns, 0).double()
    detached = error.detach().double()
    metrics = {
        "critic/vf_loss": 0.5 * losses.detach().double(),
        "critic/vf_clipfrac": clipped.double(),
        "critic/returns": target,
        "critic/returns_sq": target.square(),
        "critic/error": detached,
        "critic/error_sq": detached.square(),
    }
    return PolicyLossOutput(
        normalized(total, normalizer),
        {name: (values.sum(), count) for name, values in metrics.items()},
    )
