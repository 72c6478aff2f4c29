"""Comparison of the loss that the op computed with TRL's own, term by term."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .fused_head import Learned

AGREE = 1e-3
"""Tolerance of each term, relative to its magnitude."""
SUMMATION = 1e-5
"""Error of a difference of sums in fp32, relative to their magnitude."""
ROUNDING = 1e-6
"""Error of one token's KL estimate ``exp(x) - x - 1`` in fp32."""


def compare(
    trainer: Any, compute_loss: Callable[..., Tensor], model: Any, inputs: dict[str, Any], learned: Learned
) -> None:
    """Compare the loss of the op with that of ``compute_loss``, TRL's code, which also logs the metrics.

    TRL's policy loss of a sequence is proportional to its advantage, as long as the sign stays. It is therefore the
    advantage times the derivative, and the KL term is what these leave of the loss.

    Raises:
        RuntimeError: the policy term or the KL term is not TRL's.
    """
    assert learned.kl is not None
    assert learned.kl_weight is not None
    advantages = inputs["advantages"].detach().clone().requires_grad_()
    with torch.enable_grad():
        loss = compute_loss(model, {**inputs, "advantages": advantages})
    of_sequences = torch.autograd.grad(loss, advantages)[0] * advantages.detach()
    policy, magnitude = of_sequences.sum(), of_sequences.abs().sum()
    kl = loss.detach() - policy
    own_kl = learned.kl.to(kl)
    own_policy = learned.loss.detach() - own_kl
    rounding = SUMMATION * (magnitude + kl.abs())
    terms = {
        "policy": (own_policy, policy, AGREE * magnitude + rounding),
        "KL": (own_kl, kl, AGREE * kl.abs() + rounding + ROUNDING * learned.kl_weight),
    }
    agree = torch.stack([(ours - trl_value).abs() <= tolerance for ours, trl_value, tolerance in terms.values()])
    if agree.all():
        return
    differences = ", ".join(
        f"{name} {float(ours):.6g} for {float(trl_value):.6g}" for name, (ours, trl_value, _) in terms.items()
    )
    raise RuntimeError(
        f"The terms of the loss '{trainer.loss_type}' are not those of TRL ({differences}); report this, and pass "
        "head=False and tree=False."
    )
