"""`linear_policy_loss`: a policy objective from hidden states, without log-probs of its own pass, logits or waste."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..linear_logprob import HeadLora, linear_logprob
from ..linear_logprob.api import prepare
from ..policy_loss import Objective, PolicyFields, PolicyLossOutput, policy_loss
from ..policy_loss.api import check, finish
from .op import linear_policy_loss_op
from .plan import HeadPlan, plan_everything, plan_policy_loss


def linear_policy_loss(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    target: Tensor,  # [M] int
    fields: PolicyFields,  # M pairs
    objective: Objective,
    *,
    normalizer: float | Tensor,
    row: Tensor | None = None,  # [M] int
    bias: Tensor | None = None,  # [V]
    temperature: float | Tensor = 1.0,  # or [N]
    softcap: float | None = None,
    tp_group: Any = None,
    lora: HeadLora | None = None,
    plan: HeadPlan | None = None,
    weight_grad: Tensor | None = None,  # [V, H]
) -> PolicyLossOutput:
    """``policy_loss(linear_logprob(...), ...)`` in one op that forms the logits once; same value, gradients, metrics.

    The gradients are made in the forward, chunk by chunk, and handed to autograd by the one backward they allow. Pairs
    that cannot have a gradient (masked, or of zero advantage in an objective without KL and entropy terms) never reach
    a matrix product; they count in the normalizer and in the denominators of ``actor/pg_loss`` and the clip fractions,
    where they are zeros, while the other metrics are means over the pairs that were computed.

    Args:
        hidden, weight, target, row, bias, temperature, softcap, lora: as in `linear_logprob`.
        fields, objective, normalizer: as in `policy_loss`.
        tp_group: as in `linear_logprob`; then the two ops run one after the other, and the backward recomputes.
        weight_grad: an fp32 accumulator (Megatron's ``main_grad``): the backward adds weight's gradient to it in fp32
            and leaves ``weight.grad`` alone. ``weight`` must require a gradient all the same.
        plan: from `plan_policy_loss`; default: made here. On a GPU making it waits for the device, except without
            ``row`` for an objective of tokens: then every pair is computed.

    Raises:
        ValueError: shapes, dtypes or options do not fit, or the plan is of another batch; the message names which.
        IndexError: a target is out of range (CPU only).
        RuntimeError: a second backward.
    """
    hidden, weight, bias, lora, temperature = prepare(
        "linear_policy_loss", hidden, weight, target, row, bias, temperature, softcap, lora
    )
    fields = check("linear_policy_loss", target, temperature.dtype, fields, objective).folded(objective.aggregation)
    head = (weight, bias, *((None, None) if lora is None else lora[:2]))
    if tp_group is not None:
        if lora is not None or weight_grad is not None:
            other = "lora" if lora is not None else "weight_grad"
            raise ValueError(f"linear_policy_loss: tp_group does not combine with {other}.")
        options = {"row": row, "bias": bias, "temperature": temperature, "softcap": softcap, "tp_group": tp_group}
        out = linear_logprob(hidden, weight, target, **options, want=("entropy",))
        assert out.entropy is not None
        entropy = out.entropy if row is None else out.entropy[row]
        return policy_loss(out.logprob, fields, objective, normalizer=normalizer, entropy=entropy)
    if weight_grad is not None and (weight_grad.shape != weight.shape or weight_grad.dtype != temperature.dtype):
        raise ValueError(
            f"linear_policy_loss: weight_grad must be {list(weight.shape)} {temperature.dtype}, got "
            f"{list(weight_grad.shape)} {weight_grad.dtype}."
        )
    grad = torch.is_grad_enabled()
    need = [grad and t is not None and t.requires_grad for t in (hidden, *head)]
    if plan is None:
        plan = _plan(hidden, weight, row, fields, objective, gradient=any(need), frozen=not any(need[1:]))
    elif plan.given != (len(hidden), len(target)) or plan.head != tuple(weight.shape):
        raise ValueError(
            f"linear_policy_loss: the plan is for {plan.given[0]} rows, {plan.given[1]} pairs and a head of "
            f"{list(plan.head)}; here are {len(hidden)}, {len(target)} and {list(weight.shape)}: plan this batch."
        )
    if plan.row is not None:
        hidden, temperature = hidden.index_select(0, plan.row), temperature[plan.row]
    with torch.autocast(hidden.device.type, enabled=False):
        total, sums, *_ = linear_policy_loss_op(
            hidden,
            *head,
            0.0 if lora is None else lora.scale,
            plan.start,
            target.long() if plan.pair is None else target.long()[plan.pair],
            plan.pair,
            temperature,
            softcap or 0.0,
            *fields.tensors(),
            objective.encoded,
            plan.schedule,
            plan.row_cuts,
            plan.pair_cuts,
            plan.block_cuts,
            plan.count_on_device,
            need,
            weight_grad,
        )
    return finish(total, sums, normalizer, fields, objective, has_entropy=True)


def _plan(
    hidden: Tensor,
    weight: Tensor,
    row: Tensor | None,
    fields: PolicyFields,
    objective: Objective,
    *,
    gradient: bool,
    frozen: bool,
) -> HeadPlan:
    (N, H), V = hidden.shape, len(weight)
    if gradient and hidden.is_cuda and row is None and objective.scope == "token":
        return plan_everything(N, V, H, hidden.device, frozen)
    return plan_policy_loss(
        fields,
        objective,
        num_rows=N,
        vocabulary=V,
        hidden_size=H,
        device=hidden.device,
        row=row,
        frozen=frozen,
        gradient=gradient,
    )
