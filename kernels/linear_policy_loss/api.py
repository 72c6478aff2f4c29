"""`linear_policy_loss`: a policy objective from hidden states, without log-probs of its own pass, logits or waste.

`linear_terms_loss` is the same for the sum of several terms over the same rows, in the matrix products of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..checks import Arguments
from ..linear_logprob import HeadLora
from ..linear_logprob.api import check_accumulator, prepare
from ..policy_loss import Objective, PolicyFields, PolicyLossOutput
from ..policy_loss.api import check
from .composed import composed
from .op import Into, encoded, linear_terms_loss_op
from .plan import ONE_PASS, HeadPlan, plan_everything, plan_terms_loss
from .terms import AnyTerm, LogprobTerm, Term, TermsLossOutput, common_normalizer, finish_terms, own_normalizers


def linear_policy_loss(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    target: Tensor,  # [M] int
    fields: PolicyFields,  # M targets
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
    in_forward: bool = False,
) -> PolicyLossOutput:
    """``policy_loss(linear_logprob(...), ...)`` in one op that forms the logits once; same value, gradients, metrics.

    The gradients are made in the forward, chunk by chunk, and handed to autograd by the one backward they allow.
    Targets that cannot have a gradient (masked, or of zero advantage in an objective without KL and entropy terms)
    never reach a matrix product; they count in the normalizer and in the denominators of ``actor/pg_loss`` and the clip
    fractions, where they are zeros, while the other metrics are means over the targets that were computed.

    Args:
        hidden, weight, target, row, bias, temperature, softcap, lora: as in `linear_logprob`.
        fields, objective, normalizer: as in `policy_loss`.
        tp_group: as in `linear_logprob`; then the two ops run one after the other, and the backward recomputes.
        weight_grad: an fp32 accumulator (Megatron's ``main_grad``): the backward adds weight's gradient to it in fp32
            and leaves ``weight.grad`` alone. ``weight`` must require a gradient all the same.
        in_forward: add to ``weight_grad`` where the gradients are made, chunk by chunk: for a plan of one pass that is
            the forward, and one buffer [V, H] less. The loss must then be differentiated once and as it is, with a
            factor of 1: put others into ``normalizer``. Not in fp16.
        plan: from `plan_policy_loss`, which may have been made on the host; then nothing here waits for a GPU.
            Default: made here, which waits for it once, except without ``row`` for an objective of tokens: then every
            target is computed.

    Raises:
        ValueError: shapes, dtypes, devices or options do not fit, or the plan is of another batch or another mask (a
            mask on a GPU: a device-side assertion); the message names which. From the backward: ``in_forward`` with
            another factor than 1 (on a GPU a device-side assertion).
        IndexError: a target or row is out of range (CPU only; on a GPU a wrong row stops the program).
        RuntimeError: a second backward of gradients made in the forward.
    """
    out = linear_terms_loss(
        hidden, weight, target, [Term(fields, objective, normalizer)], row=row, bias=bias, temperature=temperature,
        softcap=softcap, tp_group=tp_group, lora=lora, plan=plan, weight_grad=weight_grad, in_forward=in_forward,
    )  # fmt: skip
    return PolicyLossOutput(out.loss, out.metrics)


def linear_terms_loss(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    target: Tensor,  # [M] int
    terms: Sequence[AnyTerm],  # on M targets
    *,
    row: Tensor | None = None,  # [M] int
    bias: Tensor | None = None,  # [V]
    temperature: float | Tensor = 1.0,  # or [N]
    softcap: float | None = None,
    tp_group: Any = None,
    lora: HeadLora | None = None,
    plan: HeadPlan | None = None,
    weight_grad: Tensor | None = None,  # [V, H]
    in_forward: bool = False,
) -> TermsLossOutput:
    """The weighted sum of ``terms`` over the same rows, in one pass: `linear_policy_loss` of each, added up.

    A target is scored if any term selects it, and counts nothing in a term that does not. `Term`s of tokens and of
    paths have their gradients made in the forward; with a `LogprobTerm` (preference pairs), or an objective of the
    whole batch, all log-probs come first and the backward forms the logits again (``plan.explain()`` says what it
    costs).

    Args:
        terms: `Term` and `LogprobTerm`, each with a name of its own.
        plan: from `plan_terms_loss`.
        hidden, weight, target, row, bias, temperature, softcap, tp_group, lora, weight_grad, in_forward: as in
            `linear_policy_loss`.

    Raises:
        ValueError, IndexError, RuntimeError: as `linear_policy_loss`.
    """
    hidden, weight, bias, lora, temperature = prepare(
        "linear_policy_loss", hidden, weight, target, row, bias, temperature, softcap, lora
    )
    call = Arguments("linear_policy_loss", "hidden", hidden)
    call.positive("temperature", temperature)
    if row is not None:
        call.index("row", row, len(hidden), remedy="it names rows of hidden")
    terms = _checked(call, terms, target, temperature)
    check_accumulator("linear_policy_loss", weight, weight_grad, temperature.dtype)
    if in_forward:
        call.require(weight_grad is not None, "in_forward says when weight_grad is added to; give weight_grad")
    if in_forward and weight_grad is not None:
        call.require(weight_grad.is_contiguous(), "with in_forward=True weight_grad must be contiguous")
        call.require(
            hidden.dtype != torch.float16, "fp16 does not keep gradients divided by normalizer; leave in_forward out"
        )
    for name, given in (("lora", lora), ("weight_grad", weight_grad)):
        if tp_group is not None and given is not None:
            raise ValueError(f"linear_policy_loss: tp_group does not combine with {name}.")
    head = (weight, bias, *((None, None) if lora is None else lora[:2]))
    options: dict[str, Any] = {"bias": bias, "softcap": softcap}
    if tp_group is not None:
        options |= {"temperature": temperature, "tp_group": tp_group}
        return composed(hidden, weight, target, terms, M=len(target), place=None, row=row, **options)
    grad = torch.is_grad_enabled()
    need = [grad and t is not None and t.requires_grad for t in (hidden, *head)]
    if plan is None:
        plan = _plan(hidden, weight, row, terms, gradient=any(need), frozen=not any(need[1:]))
    else:
        if not isinstance(plan, HeadPlan):
            call.wrong_type("plan", "a HeadPlan", plan)
        plan.check(terms, row, hidden, weight)
    if plan.row is not None:
        hidden, temperature = hidden.index_select(0, plan.row), temperature[plan.row]
    target = target.long().contiguous() if plan.place is None else target.long()[plan.place]
    of_tokens = [t for t in terms if isinstance(t, Term)]
    if plan.schedule not in ONE_PASS or not any(need) or len(of_tokens) < len(terms):
        options |= {"temperature": temperature, "lora": lora, "weight_grad": weight_grad}
        options |= {"M": plan.given[1], "place": plan.place, "row": plan.row_of_target()}
        return composed(hidden, weight, target, terms, **options)
    tensors, names, objectives = encoded(of_tokens)
    n, scale = None, None
    if in_forward:
        n, scale = own_normalizers(of_tokens, temperature)
    elif len(terms) > 1:
        n, scale = common_normalizer(of_tokens, temperature)
    with torch.autocast(hidden.device.type, enabled=False):
        total, totals, sums, scores, *_ = (Into.apply if in_forward else linear_terms_loss_op)(
            hidden,
            *head,
            0.0 if lora is None else lora.scale,
            plan.start,
            target,
            plan.place,
            temperature,
            softcap or 0.0,
            tensors,
            names,
            objectives,
            scale,
            plan.row_cuts,
            plan.target_cuts,
            plan.path_cuts,
            need,
            weight_grad,
        )
    out = finish_terms(total, totals, sums, n, of_tokens)
    if plan.place is not None:
        scores = scores.new_full((2, plan.given[1]), torch.nan).index_copy(1, plan.place, scores)
    return out._replace(logprob=scores[0], entropy=scores[1])


def _checked(call: Arguments, terms: Sequence[AnyTerm], target: Tensor, temperature: Tensor) -> list[AnyTerm]:
    """The terms with their aggregation folded in."""
    if not isinstance(terms, list | tuple) or not all(isinstance(t, Term | LogprobTerm) for t in terms):
        call.wrong_type("terms", "a list of Term and LogprobTerm", terms)
    for t in terms:
        if not isinstance(t.name, str):
            call.wrong_type("the name of a term", "a text", t.name)
        if isinstance(t, LogprobTerm) and not callable(t.loss):
            call.wrong_type(f"the loss of term '{t.name}'", "a function of log-probs", t.loss)
    names = [t.name for t in terms]
    if not terms or len(set(names)) < len(names):
        raise ValueError(f"linear_policy_loss: terms must have names of their own, at least one, got {names}.")
    checked: list[AnyTerm] = []
    for t in terms:
        if isinstance(t, Term):
            fields = check("linear_policy_loss", target, temperature.dtype, t.fields, t.objective, t.normalizer)
            checked.append(t._replace(fields=fields.folded(t.objective.aggregation)))
            continue
        call.mask(f"the mask of term '{t.name}'", t.mask, target.shape, " like target")
        checked.append(t)
    for t in terms:
        call.number(f"the weight of term '{t.name}'", t.weight)
    return checked


def _plan(
    hidden: Tensor, weight: Tensor, row: Tensor | None, terms: Sequence[AnyTerm], *, gradient: bool, frozen: bool
) -> HeadPlan:
    (N, H), V = hidden.shape, len(weight)
    of_tokens = all(isinstance(t, Term) and t.objective.scope == "token" for t in terms)
    if gradient and hidden.is_cuda and row is None and of_tokens:
        return plan_everything(N, V, H, hidden.device, frozen)
    return plan_terms_loss(
        terms,
        num_rows=N,
        vocabulary=V,
        hidden_size=H,
        device=hidden.device,
        row=row,
        frozen=frozen,
        gradient=gradient,
    )
