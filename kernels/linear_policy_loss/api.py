"""`linear_policy_loss`: a policy objective from hidden states, without a separate pass for log-probs and no logits.

`linear_terms_loss` is the same for the sum of several terms over the same rows, in the matrix products of one. The plan
decides between two ways. Where the gradients can be made in the forward, one op does everything (`op`, `fused`).
Otherwise `by_autograd` computes all log-probs first, then the losses, and leaves the gradients to autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..checks import Arguments
from ..forward_gradients import check_in_forward
from ..linear_logprob import STATISTICS, HeadLora
from ..linear_logprob.api import check_accumulator, prepare
from ..policy_loss import Objective, PolicyFields, PolicyLossOutput
from ..policy_loss.api import check
from .autograd import CallHead, CallRows, by_autograd
from .op import AccumulatedLoss, HeadPass, linear_terms_loss_op
from .plan import ONE_PASS, HeadPlan, plan_everything, plan_terms_loss
from .terms import (
    AnyTerm,
    LogprobTerm,
    Term,
    TermsLossOutput,
    common_normalizer,
    finish_terms,
    half_normalizer,
    own_normalizers,
)


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
    """Compute ``policy_loss(linear_logprob(...), ...)`` in one op that forms the logits once.

    Value, gradients and metrics are the same. The gradients are made in the forward, chunk by chunk, and returned by
    the one backward that is allowed. Targets that cannot have a gradient (masked, or of zero advantage in an objective
    without KL and entropy terms) never reach a matrix product. They count as zeros in the normalizer and in the
    denominators of ``actor/pg_loss`` and the clip fractions; the other metrics are means over the targets that were
    computed.

    Args:
        hidden: ``[N, H]``, bf16, fp16, fp32 or fp64; weight and bias have the same dtype (autocast casts all to its
            own).
        weight: ``[V, H]``, the head.
        target: ``[M]`` vocabulary ids. On a CPU out-of-range ids raise; on a GPU their log-prob is NaN.
        fields: of the M targets; see `PolicyFields`.
        objective: the objective; see `Objective`.
        normalizer: the global denominator of the loss, as in `policy_loss`.
        row: ``[M]``, row of each target; default ``arange(N)``, then M = N.
        bias: ``[V]``.
        temperature: a number, or ``[N]``, one a row; positive, applied after softcap.
        softcap: ``softcap * tanh(logits / softcap)`` before the temperature.
        tp_group: a process group over which the vocabulary is split, as in `linear_logprob`; then the two ops run one
            after the other, and the backward recomputes the logits. A plan is for this rank's rows of the head, and
            leaves out what has no gradient.
        lora: a low-rank adapter of the head; weight + scale b a is never formed.
        plan: from `plan_policy_loss`. If it was made on the host, nothing here waits for a GPU. Default: made here,
            which waits for the GPU once; without ``row`` and for an objective of tokens it does not wait, and computes
            every target. `torch.compile` reads no data, so there an objective of tokens computes every target too, and
            others run as the two ops, 2 + 6 f NHV.
        weight_grad: ``[V, H]``, an fp32 accumulator (Megatron's ``main_grad``): the backward adds weight's gradient to
            it in fp32 and leaves ``weight.grad`` alone. ``weight`` must still require a gradient.
        in_forward: add to ``weight_grad`` where the gradients are made, chunk by chunk: for a plan of one pass that is
            the forward, and saves one buffer [V, H]. The loss must then be differentiated once and as it is, with a
            factor of 1: put other factors into ``normalizer``. Not in fp16.

    Returns:
        The loss ``[]`` in the accumulation dtype (fp32; fp64 for fp64 inputs), and metrics as in `policy_loss`.

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
    """Compute the weighted sum of ``terms`` over the same rows: `linear_policy_loss` of each, added up, in one pass.

    A target is scored if any term selects it, and counts nothing in a term that does not. `Term`s of tokens and of
    paths have their gradients made in the forward. With a `LogprobTerm` (preference pairs) or an objective of the whole
    batch, all log-probs come first and the backward forms the logits again (``plan.explain()`` says what it costs).

    Args:
        terms: `Term` and `LogprobTerm` on the M targets, each with a name of its own.
        plan: from `plan_terms_loss`.
        hidden, weight, target, row, bias, temperature, softcap, tp_group, lora, weight_grad, in_forward: as in
            `linear_policy_loss`.

    Returns:
        The loss, the metrics of all terms, each term's loss, and log-prob and entropy of the targets; see
        `TermsLossOutput`.

    Raises:
        ValueError, IndexError, RuntimeError: as `linear_policy_loss`.
        TypeError: a term is none, or a `LogprobTerm` does not return a `PolicyLossOutput`.
    """
    hidden, weight, bias, lora, temperature = prepare(
        "linear_policy_loss", hidden, weight, target, row, bias, temperature, softcap, lora
    )
    call = Arguments("linear_policy_loss", "hidden", hidden)
    call.positive("temperature", temperature)
    if row is not None:
        call.index("row", row, len(hidden), remedy="it names rows of hidden")
    terms = _checked(call, terms, target, temperature)
    head = CallHead(weight, bias, lora, softcap, tp_group, weight_grad)
    _check_head(call, head, temperature.dtype, in_forward)
    rows = CallRows(hidden, temperature, target, row, None, len(target))
    whole_graph = torch.compiler.is_compiling() and not _reads_no_data(row, terms)
    if plan is None and (tp_group is not None or whole_graph):
        return by_autograd(rows, head, terms)
    need = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, *head.tensors)]
    if plan is None:
        plan = _plan(hidden, weight, row, terms, gradient=any(need), frozen=not any(need[1:]))
    elif not isinstance(plan, HeadPlan):
        call.wrong_type("plan", "a HeadPlan", plan)
    else:
        plan.check(terms, row, hidden, weight)
    of_policy = [t for t in terms if isinstance(t, Term)]
    if tp_group is None and plan.schedule in ONE_PASS and any(need) and len(of_policy) == len(terms):
        return _in_one_pass(rows, head, of_policy, plan, need, in_forward)
    return by_autograd(rows.planned(plan)._replace(row=plan.row_of_target()), head, terms)


def _check_head(call: Arguments, head: CallHead, accumulator: torch.dtype, in_forward: bool) -> None:
    check_accumulator("linear_policy_loss", head.weight, head.weight_grad, accumulator)
    if in_forward:
        check_in_forward(call, head.weight, head.weight_grad)
    if head.tp_group is not None and head.lora is not None:
        raise ValueError("linear_policy_loss: tp_group does not combine with lora.")


def _checked(call: Arguments, terms: Sequence[AnyTerm], target: Tensor, temperature: Tensor) -> list[AnyTerm]:
    """Return the checked terms, with their aggregation folded in."""
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
        call.names(f"want of term '{t.name}'", t.want, STATISTICS)
        if t.extra_ids is not None:
            call.integers(f"extra_ids of term '{t.name}'", t.extra_ids, (len(target), "K"), " like target")
        elif "extra_logprob" in t.want:
            raise ValueError(f"linear_policy_loss: the term '{t.name}' wants extra_logprob; give its extra_ids.")
        checked.append(t)
    for t in terms:
        call.number(f"the weight of term '{t.name}'", t.weight)
    return checked


def _reads_no_data(row: Tensor | None, terms: Sequence[AnyTerm]) -> bool:
    """Return whether `plan_everything` can plan the call: terms of tokens, one target a row."""
    return row is None and all(isinstance(t, Term) and t.objective.scope == "token" for t in terms)


def _plan(
    hidden: Tensor, weight: Tensor, row: Tensor | None, terms: Sequence[AnyTerm], *, gradient: bool, frozen: bool
) -> HeadPlan:
    (N, H), V = hidden.shape, len(weight)
    if torch.compiler.is_compiling() or (gradient and hidden.is_cuda and _reads_no_data(row, terms)):
        return plan_everything(N, V, H, hidden.device, frozen)
    return plan_terms_loss(
        terms, num_rows=N, vocabulary=V, hidden_size=H, device=hidden.device, row=row, frozen=frozen, gradient=gradient
    )


def _in_one_pass(
    rows: CallRows, head: CallHead, terms: Sequence[Term], plan: HeadPlan, need: Sequence[bool], in_forward: bool
) -> TermsLossOutput:
    """Compute the terms and their gradients in one pass of the head over the rows of ``plan``."""
    rows = rows.planned(plan)
    n, scale = None, None
    if in_forward:
        n, scale = own_normalizers(terms, rows.temperature)
    elif rows.hidden.dtype == torch.float16:
        n, scale = half_normalizer(terms, rows.temperature)
    elif len(terms) > 1:
        n, scale = common_normalizer(terms, rows.temperature)
    head_pass = HeadPass(
        hidden=rows.hidden,
        weight=head.weight,
        bias=head.bias,
        lora=head.lora,
        softcap=head.softcap,
        target=rows.target,
        temperature=rows.temperature,
        terms=terms,
        scale=scale,
        plan=plan,
        need=need,
        weight_grad=head.weight_grad,
    )
    compute = AccumulatedLoss.apply if in_forward else linear_terms_loss_op
    with torch.autocast(rows.hidden.device.type, enabled=False):
        total, totals, sums, scores, *_ = compute(*head_pass.encoded())
    logprob, entropy = (rows.by_caller(values, torch.nan) for values in scores)
    return finish_terms(total, totals, sums, n, terms)._replace(logprob=logprob, entropy=entropy)
