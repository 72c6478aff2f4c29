"""`linear_policy_loss`: a policy objective from hidden states, without log-probs of its own pass, logits or waste."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks import Arguments
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
        ValueError: shapes, dtypes, devices or options do not fit, or the plan is of another batch; the message names
            which.
        IndexError: a target or row is out of range (CPU only; on a GPU a wrong row stops the program).
        RuntimeError: a second backward.
    """
    hidden, weight, bias, lora, temperature = prepare(
        "linear_policy_loss", hidden, weight, target, row, bias, temperature, softcap, lora
    )
    fields = check("linear_policy_loss", target, temperature.dtype, fields, objective, normalizer)
    fields = fields.folded(objective.aggregation)
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
    call = Arguments("linear_policy_loss", "hidden", hidden)
    if weight_grad is not None:
        call.floats("weight_grad", weight_grad, weight.shape, " like weight", (temperature.dtype,))
    call.positive("temperature", temperature)
    if row is not None:
        call.index("row", row, len(hidden), remedy="it names rows of hidden")
    grad = torch.is_grad_enabled()
    need = [grad and t is not None and t.requires_grad for t in (hidden, *head)]
    if plan is None:
        plan = _plan(hidden, weight, row, fields, objective, gradient=any(need), frozen=not any(need[1:]))
    else:
        _check_plan(call, plan, weight, target, row, fields, objective, need, N=len(hidden))
    if plan.row is not None:
        hidden, temperature = hidden.index_select(0, plan.row), temperature[plan.row]
    with torch.autocast(hidden.device.type, enabled=False):
        total, sums, *_ = linear_policy_loss_op(
            hidden,
            *head,
            0.0 if lora is None else lora.scale,
            plan.start,
            target.long().contiguous() if plan.pair is None else target.long()[plan.pair],
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


def _check_plan(
    check: Arguments,
    plan: HeadPlan,
    weight: Tensor,
    target: Tensor,
    row: Tensor | None,
    fields: PolicyFields,
    objective: Objective,
    need: list[bool],
    *,
    N: int,
) -> None:
    """The plan must be of this batch: it leaves out pairs, and what it leaves out is never looked at again."""
    if not isinstance(plan, HeadPlan):
        check.wrong_type("plan", "a HeadPlan", plan)
    again = "plan this batch with `plan_policy_loss`"
    M = len(target)
    check.require(
        plan.given == (N, M) and plan.head == tuple(weight.shape),
        f"the plan is for {plan.given[0]} rows, {plan.given[1]} pairs and a head of {list(plan.head)}; here are {N}, "
        f"{M} and {list(weight.shape)}: {again}",
    )
    serves = {
        "logprob_only": not any(need),
        "fused_forward": objective.scope == "token",
        "sequence_aligned": objective.scope != "batch" and (objective.scope == "token" or fields.paths is not None),
        "frozen_head": not any(need[1:]) and not objective.needs_entropy,
        "two_phase": True,
    }
    check.require(
        serves[plan.schedule],
        f"the plan's schedule '{plan.schedule}' does not serve this objective and these gradients; {again}",
    )
    check.tensor("the plan", plan.start)
    for other in (plan.row, plan.pair):
        if other is not None:
            check.tensor("the plan", other)
    start, pair, paths = plan.start, plan.pair, fields.paths
    if pair is None:
        check.require(row is None, f"the plan is for one pair a row, and row= is given; {again}")
    else:
        rows = torch.arange(N, device=pair.device) if plan.row is None else plan.row
        here = pair if row is None else row.long()[pair]
        check.look(
            f"row is not the one that was planned for; {again}", here,
            lambda: here == torch.repeat_interleave(rows, start.diff(), output_size=len(pair)),
        )  # fmt: skip
        check.look(
            f"the plan leaves out pairs that have a gradient here; {again}", fields.weight,
            lambda: torch.zeros(M, dtype=torch.bool).index_fill_(0, pair, True) | ~objective.live(fields),
        )  # fmt: skip
    if plan.block_cuts and paths is not None:
        cuts = torch.tensor(plan.block_cuts)
        check.look(
            f"the plan cuts paths of these fields apart; {again}", paths.pair_end,
            lambda: torch.cat([cuts.new_zeros(1), paths.pair_end.long().cummax(0).values])[cuts] <= cuts,
        )  # fmt: skip


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
