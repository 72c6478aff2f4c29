"""`linear_policy_loss`: a policy objective from hidden states, without a separate pass for log-probs and no logits.

`linear_terms_loss` is the same for the sum of several terms over the same rows, in the matrix products of one. The plan
decides between two ways. Where the gradients can be made in the forward, one op does everything (`op`, `fused`).
Otherwise `_by_autograd` computes all log-probs first, then the losses, and leaves the gradients to autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..checks import Arguments
from ..linear_logprob import STATISTICS, HeadLora, linear_statistics
from ..linear_logprob.api import check_accumulator, prepare
from ..policy_loss import Objective, PolicyFields, PolicyLossOutput
from ..policy_loss.api import Metrics, check, finish, policy_loss_op
from .op import AccumulatedLoss, encoded, linear_terms_loss_op
from .plan import ONE_PASS, HeadPlan, plan_everything, plan_terms_loss
from .terms import (
    AnyTerm,
    LogprobTerm,
    Term,
    TermsLossOutput,
    common_normalizer,
    finish_terms,
    half_normalizer,
    named,
    own_normalizers,
    statistics_of,
    wanted,
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
            after the other, and the backward recomputes the logits.
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
    check_accumulator("linear_policy_loss", weight, weight_grad, temperature.dtype)
    if in_forward:
        call.require(weight_grad is not None, "in_forward adds to weight_grad in the forward; give weight_grad")
    if in_forward and weight_grad is not None:
        call.require(weight_grad.is_contiguous(), "with in_forward=True weight_grad must be contiguous")
        call.require(
            hidden.dtype != torch.float16, "fp16 cannot hold gradients divided by normalizer; leave in_forward out"
        )
    for name, option in (("lora", lora), ("weight_grad", weight_grad)):
        if tp_group is not None and option is not None:
            raise ValueError(f"linear_policy_loss: tp_group does not combine with {name}.")
    head = (weight, bias, *((None, None) if lora is None else lora[:2]))
    options: dict[str, Any] = {"bias": bias, "softcap": softcap}
    if tp_group is not None:
        options |= {"temperature": temperature, "tp_group": tp_group}
        return _by_autograd(hidden, weight, target, terms, M=len(target), place=None, row=row, **options)
    grad = torch.is_grad_enabled()
    need = [grad and t is not None and t.requires_grad for t in (hidden, *head)]
    compiling = torch.compiler.is_compiling()
    if plan is None and compiling and (row is not None or not all(map(_of_tokens, terms))):
        options |= {"temperature": temperature, "lora": lora, "weight_grad": weight_grad}
        return _by_autograd(hidden, weight, target, terms, M=len(target), place=None, row=row, **options)
    if plan is None:
        plan = _plan(hidden, weight, row, terms, gradient=any(need), frozen=not any(need[1:]))
    else:
        if not isinstance(plan, HeadPlan):
            call.wrong_type("plan", "a HeadPlan", plan)
        plan.check(terms, row, hidden, weight)
    if plan.row is not None:
        hidden, temperature = hidden.index_select(0, plan.row), temperature[plan.row]
    target = target.long().contiguous() if plan.place is None else target.long()[plan.place]
    policy_terms = [t for t in terms if isinstance(t, Term)]
    if plan.schedule not in ONE_PASS or not any(need) or len(policy_terms) < len(terms):
        options |= {"temperature": temperature, "lora": lora, "weight_grad": weight_grad}
        options |= {"M": plan.size[1], "place": plan.place, "row": plan.row_of_target()}
        return _by_autograd(hidden, weight, target, terms, **options)
    tensors, names, objectives = encoded(policy_terms)
    n, scale = None, None
    if in_forward:
        n, scale = own_normalizers(policy_terms, temperature)
    elif hidden.dtype == torch.float16:
        n, scale = half_normalizer(policy_terms, temperature)
    elif len(terms) > 1:
        n, scale = common_normalizer(policy_terms, temperature)
    with torch.autocast(hidden.device.type, enabled=False):
        total, totals, sums, scores, *_ = (AccumulatedLoss.apply if in_forward else linear_terms_loss_op)(
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
    out = finish_terms(total, totals, sums, n, policy_terms)
    if plan.place is not None:
        scores = scores.new_full((2, plan.size[1]), torch.nan).index_copy(1, plan.place, scores)
    return out._replace(logprob=scores[0], entropy=scores[1])


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


def _of_tokens(term: AnyTerm) -> bool:
    return isinstance(term, Term) and term.objective.scope == "token"


def _plan(
    hidden: Tensor, weight: Tensor, row: Tensor | None, terms: Sequence[AnyTerm], *, gradient: bool, frozen: bool
) -> HeadPlan:
    (N, H), V = hidden.shape, len(weight)
    if torch.compiler.is_compiling() or (gradient and hidden.is_cuda and row is None and all(map(_of_tokens, terms))):
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


def _by_autograd(
    hidden: Tensor,  # [R, H]
    weight: Tensor,  # [V, H]
    target: Tensor,  # [P] int
    terms: Sequence[AnyTerm],  # on M targets
    *,
    M: int,
    place: Tensor | None,  # [P] int64: of each target in the terms; None: the same order
    row: Tensor | None,  # [P] int
    **options: Any,
) -> TermsLossOutput:
    """Compute the terms from one `linear_statistics`, which takes ``options``, and leave the gradients to autograd.

    For losses of preference pairs, objectives of the whole batch and a vocabulary split over ranks, where every
    log-prob is needed before any derivative is known. The backward forms the logits again for the rows that have a
    gradient (`linear_logprob` does not with a frozen head).
    """
    want, ids = wanted(terms)
    if ids is not None and place is not None:
        ids = ids[place]
    found = linear_statistics(hidden, weight, target, row=row, want=("entropy", *want), extra_ids=ids, **options)
    scored = None
    scores = [found[name].detach() for name in ("logprob", "entropy")]
    if place is not None:
        scores = [t.new_full((M,), torch.nan).index_copy(0, place, t) for t in scores]
        found = {name: t.new_zeros((M, *t.shape[1:])).index_copy(0, place, t) for name, t in found.items()}
        scored = torch.zeros(M, dtype=torch.bool, device=place.device).index_fill_(0, place, True)
    logprob, entropy = found["logprob"], found["entropy"]
    loss: Tensor | None = None
    metrics: Metrics = {}
    losses = {}
    for t, statistics in statistics_of(terms, found):
        if isinstance(t, Term):
            # detached unless needed: even a gradient of zeros by the entropy would be computed
            term_entropy = entropy if t.objective.needs_entropy else entropy.detach()
            mask = scored if t.fields.mask is None or scored is None else scored & t.fields.mask
            fields = t.fields if mask is None else replace(t.fields, mask=mask)
            total, _, _, sums = policy_loss_op(logprob, term_entropy, *fields.tensors(), t.objective.encoded)
            value = finish(total, sums, t.normalizer, t.fields, t.objective, has_entropy=True)
        else:
            value = t.loss(logprob, **statistics)
            if not isinstance(value, PolicyLossOutput) or value.loss.shape != ():
                raise TypeError(
                    f"linear_policy_loss: the loss of term '{t.name}' must return a PolicyLossOutput whose loss is a "
                    f"single number, got a {type(value).__name__}."
                )
        losses[t.name] = value.loss.detach()
        metrics |= named(value.metrics, t.name)
        weighted = value.loss if t.weight == 1 else value.loss * t.weight
        loss = weighted if loss is None else loss + weighted
    assert loss is not None
    return TermsLossOutput(loss, metrics, losses, *scores)
