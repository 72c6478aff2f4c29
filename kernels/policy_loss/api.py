"""`policy_loss`: value, gradient and metrics of a policy objective from log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import dispatch
from . import reference
from .fields import PolicyFields
from .objective import Objective, Spec

Metrics = dict[str, tuple[Tensor, Tensor]]


class PolicyLossOutput(NamedTuple):
    loss: Tensor  # []
    metrics: Metrics  # {name: (sum [], count [])}, fp64, to be added up over micro-batches and ranks, then divided


def policy_loss(
    logprob: Tensor,  # [M]
    fields: PolicyFields,
    objective: Objective,
    *,
    normalizer: float | Tensor,
    entropy: Tensor | None = None,  # [M]
) -> PolicyLossOutput:
    """``sum of the tokens' losses / normalizer`` with gradients to ``logprob`` and ``entropy``; see `Objective`.

    ``normalizer`` is global (all micro-batches, all ranks), so the loss does not depend on how the batch was cut:
    logical tokens, sequences, ... by the objective's aggregation. Where nothing is to be learned from (all masked), the
    loss is a zero with zero gradients, also for a normalizer of 0.

    Metrics are sums weighted like the loss (S_1: every leaf counts a shared token once) and the sums of these weights:
    ``actor/pg_loss`` (surrogate alone), ``actor/pg_clipfrac``, ``actor/pg_clipfrac_lower``, ``actor/ppo_kl`` (mean of
    old - current); with entropy ``actor/entropy``; with a reference ``actor/kl_loss`` (without its coefficient); with
    behaviour log-probs ``training/mismatch_k3_kl`` and ``training/rollout_probs_diff_mean``, over tokens that have one;
    with mismatch correction ``training/rollout_is_mean``. Clip fractions: a token shared by leaves of both signs is
    clipped in the share that the clipped side has of the advantages through it.

    Raises:
        ValueError: the objective needs something that the fields, or ``entropy``, do not give, or shapes differ.
    """
    fields = _checked(logprob, fields, objective, entropy).folded(objective.aggregation)
    if objective.ratio_level == "sequence":
        total, sums = _sequence_level(logprob, fields, objective, entropy)
    else:
        total, sums = _elements(logprob, entropy, fields, objective)
    if not isinstance(normalizer, Tensor):
        normalizer = torch.full((), normalizer, dtype=total.dtype, device=total.device)
    loss = total / torch.where((normalizer == 0) & (total == 0), 1, normalizer)
    return PolicyLossOutput(loss, _metrics(sums, fields, objective, entropy))


def _checked(logprob: Tensor, fields: PolicyFields, objective: Objective, entropy: Tensor | None) -> PolicyFields:
    def require(condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"policy_loss: {message}.")

    shape = list(fields.adv_pos.shape)
    require(list(logprob.shape) == shape, f"logprob must be {shape} like the fields, got {list(logprob.shape)}")
    require(
        logprob.dtype in (torch.float32, torch.float64),
        f"logprob must be fp32 or fp64, got {logprob.dtype}: ratios of rounded log-probs are noise",
    )
    if entropy is not None:
        require(list(entropy.shape) == shape, f"entropy must be {shape} like logprob, got {list(entropy.shape)}")
    require(not objective.needs_entropy or entropy is not None, "entropy_coef is not 0, so entropy must be given")
    require(
        not objective.needs_reference or fields.ref_logprob is not None,
        "kl_coef is not 0, so the fields must have ref_logprob",
    )
    require(
        objective.mismatch == "none" or fields.behaviour_logprob is not None,
        f"mismatch '{objective.mismatch}' needs behaviour_logprob in the fields",
    )
    return fields


def _elements(
    logprob: Tensor, entropy: Tensor | None, fields: PolicyFields, objective: Objective
) -> tuple[Tensor, Tensor]:
    """Sum of the losses of single elements [] and the sums of `reference.SUMS`."""

    def same(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.to(logprob.dtype)

    total, _, _, sums = _policy_loss_terms(
        logprob,
        same(entropy),
        fields.adv_pos.to(logprob.dtype),
        fields.adv_neg.to(logprob.dtype),
        fields.weight.to(logprob.dtype),
        fields.mask,
        same(fields.old_logprob),
        same(fields.ref_logprob),
        same(fields.behaviour_logprob),
        objective.surrogate,
        objective.ratio_base == "self" or fields.old_logprob is None,
        objective.kl,
        list(Spec.of(objective)),
    )
    return total, sums


def _sequence_level(
    logprob: Tensor, fields: PolicyFields, objective: Objective, entropy: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The ratio of a leaf acts on every token of its path, so leaves cannot be merged: two linear passes.

    The surrogate runs on leaves, with s = mean log-ratio of the path in the place of the log-prob and w_l len_l in the
    place of the weight; the gradient of a token is the sum over the leaves below it. KL and entropy stay with tokens.
    """
    paths = fields.paths
    if paths is None or paths.leaf_advantage is None or paths.leaf_weight is None:
        raise ValueError(
            "policy_loss: ratio_level 'sequence' needs one advantage and weight a sequence; "
            "give flat() an advantage [sequences] together with cu_seqlens."
        )
    base = fields.old_logprob if fields.old_logprob is not None and objective.ratio_base == "old" else logprob.detach()
    d = logprob - base.to(logprob.dtype)
    if fields.mask is not None:
        d = torch.where(fields.mask, d, 0)
    length = paths.leaf_length.to(logprob.dtype)
    s = paths.sum(d) / length.clamp(min=1)
    tokens = paths.leaf_weight.to(logprob.dtype) * length
    advantage = paths.leaf_advantage.to(logprob.dtype)
    leaves = PolicyFields(
        tokens * advantage.clamp(min=0), tokens * advantage.clamp(max=0), tokens, old_logprob=torch.zeros_like(tokens)
    )
    nothing = torch.zeros_like(fields.adv_pos)
    of_leaves, sums = _elements(s, None, leaves, objective)
    of_tokens, token_sums = _elements(logprob, entropy, _with_advantages(fields, nothing), objective)
    surrogate = reference.SUMS.index("entropy")  # sums before it are the surrogate's
    return of_leaves + of_tokens, torch.cat([sums[:surrogate], token_sums[surrogate:]])


def _with_advantages(fields: PolicyFields, zero: Tensor) -> PolicyFields:
    return PolicyFields(
        zero, zero, fields.weight, fields.mask, fields.old_logprob, fields.ref_logprob, fields.behaviour_logprob
    )


def _metrics(sums: Tensor, fields: PolicyFields, objective: Objective, entropy: Tensor | None) -> Metrics:
    of = dict(zip(reference.SUMS, sums.unbind(), strict=True))
    count, known = of["count"], of["behaviour_count"]
    metrics = {
        "actor/pg_loss": (of["pg_loss"], count),
        "actor/pg_clipfrac": (of["clipped"], count),
        "actor/pg_clipfrac_lower": (of["clipped_lower"], count),
        "actor/ppo_kl": (of["ppo_kl"], count),
    }
    if entropy is not None:
        metrics["actor/entropy"] = (of["entropy"], count)
    if fields.ref_logprob is not None:
        metrics["actor/kl_loss"] = (of["kl"], count)
    if fields.behaviour_logprob is not None:
        metrics["training/mismatch_k3_kl"] = (of["mismatch_k3"], known)
        metrics["training/rollout_probs_diff_mean"] = (of["mismatch_probability"], known)
    if objective.mismatch != "none":
        metrics["training/rollout_is_mean"] = (of["mismatch_weight"], count)
    return metrics


@torch.library.custom_op("rolltree::policy_loss_terms", mutates_args=())
def _policy_loss_terms(
    logprob: Tensor,  # [M]
    entropy: Tensor | None,  # [M]
    adv_pos: Tensor,  # [M]
    adv_neg: Tensor,  # [M]
    weight: Tensor,  # [M]
    mask: Tensor | None,  # [M] bool
    old_logprob: Tensor | None,  # [M]
    ref_logprob: Tensor | None,  # [M]
    behaviour_logprob: Tensor | None,  # [M]
    surrogate: str,
    ratio_self: bool,
    kl: str,
    numbers: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    table = {b: f for b, f in _TERMS.items() if b != "triton" or logprob.dtype == torch.float32}
    run = dispatch.choose("policy_loss", table, logprob.device)
    tensors = (logprob, entropy, adv_pos, adv_neg, weight, mask, old_logprob, ref_logprob, behaviour_logprob)
    return run(*tensors, surrogate, ratio_self, kl, numbers)


@_policy_loss_terms.register_fake
def _(
    logprob: Tensor,
    entropy: Tensor | None,
    adv_pos: Tensor,
    adv_neg: Tensor,
    weight: Tensor,
    mask: Tensor | None,
    old_logprob: Tensor | None,
    ref_logprob: Tensor | None,
    behaviour_logprob: Tensor | None,
    surrogate: str,
    ratio_self: bool,
    kl: str,
    numbers: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        logprob.new_empty(()),
        logprob.new_empty(logprob.shape[0]),
        logprob.new_empty(0 if entropy is None else logprob.shape[0]),
        logprob.new_empty(len(reference.SUMS), dtype=torch.float64),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.has_entropy = inputs[1] is not None
    ctx.save_for_backward(output[1], output[2])
    ctx.set_materialize_grads(False)


def _autograd_backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    d_logprob, d_entropy = ctx.saved_tensors
    rest = (None,) * 11
    if grad is None:
        return None, None, *rest
    return grad * d_logprob, grad * d_entropy if ctx.has_entropy else None, *rest


_policy_loss_terms.register_autograd(_autograd_backward, setup_context=_setup_context)


def _triton_terms(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from . import triton  # not at the top: triton need not be installed

    return triton.terms(*args)


_TERMS: dict[str, Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]] = {
    "triton": _triton_terms,
    "cpu": reference.terms,
    "reference": reference.terms,
}
