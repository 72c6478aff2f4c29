"""`policy_loss`: value, gradient and metrics of a policy objective from log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import Arguments
from .elements import SUMS
from .evaluate import evaluate
from .fields import PolicyFields
from .objective import Objective

Metrics = dict[str, tuple[Tensor, Tensor]]


class PolicyLossOutput(NamedTuple):
    """The loss, and the sums that its metrics are made of."""

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
    """Compute ``sum of the tokens' losses / normalizer``, differentiable to ``logprob`` and ``entropy``; see
    `Objective`.

    The loss of a token is S_pos g_pos + |S_neg| g_neg + S_1 (g_all + kl_coef KL - entropy_coef H). If there is nothing
    to learn from (all masked), the loss is a zero with zero gradients, also for a normalizer of 0. (Schulman et al.
    2017, https://arxiv.org/abs/1707.06347, eq. 7, for the default objective)

    Metrics are sums weighted like the loss (S_1: every leaf counts a shared token once) and the sums of these weights:
    ``actor/pg_loss`` (surrogate alone), ``actor/pg_clipfrac``, ``actor/pg_clipfrac_lower``, ``actor/ppo_kl`` (mean of
    old - current); with entropy ``actor/entropy``; with a reference ``actor/kl_loss`` (without its coefficient); with
    behaviour log-probs ``training/mismatch_k3_kl`` and ``training/rollout_probs_diff_mean``, over tokens that have one;
    with mismatch correction of tokens ``training/rollout_is_mean`` and ``training/rollout_is_rejected``. A token shared
    by leaves of both signs counts as clipped for the clipped side alone: by its ``pos_weight`` or ``neg_weight``, or
    without these by that side's share of the advantages.

    Args:
        logprob: ``[M]`` fp32 or fp64, nats, of the current policy.
        fields: constants of the M targets; see `PolicyFields`.
        objective: see `Objective`.
        normalizer: the global denominator (all micro-batches, all ranks), so that the loss does not depend on how the
            batch is cut: logical tokens, sequences, ... by the objective's aggregation.
        entropy: ``[M]`` nats; needed with an entropy term.

    Returns:
        The loss ``[]`` in the dtype of ``logprob``, and metrics ``{name: (sum, count)}`` in fp64.

    Raises:
        ValueError, TypeError: the objective needs something that the fields, or ``entropy``, do not give, or shapes,
            dtypes, devices or values do not fit.
        IndexError: a leaf's or sequence's place is out of range (CPU only; on a GPU the program stops).
    """
    call = Arguments("policy_loss", "logprob", logprob)
    if entropy is not None:
        call.floats("entropy", entropy, logprob.shape, " like logprob")
    if objective.needs_entropy and entropy is None:
        why = "entropy_coef is not 0" if objective.entropy_coef else "entropy_share is below 1"
        raise ValueError(f"policy_loss: {why}, so entropy must be given.")
    fields = check("policy_loss", logprob, logprob.dtype, fields, objective, normalizer)
    fields = fields.folded(objective.aggregation)
    total, _, _, sums = policy_loss_op(logprob, entropy, *fields.tensors(), objective.encoded)
    return finish(total, sums, normalizer, fields, objective, has_entropy=entropy is not None)


def check(
    op: str,
    logprob: Tensor,  # [M], or another tensor of the targets
    dtype: torch.dtype,
    fields: PolicyFields,
    objective: Objective,
    normalizer: float | Tensor,
) -> PolicyFields:
    """Return ``fields`` after checking that they fit the targets and hold what the objective needs.

    Raises:
        ValueError: they do not; the message begins with ``op``.
        IndexError: a leaf's or sequence's place is out of range (CPU only; on a GPU the program stops).
    """
    call = Arguments(op, "logprob", logprob)
    require = call.require
    if not isinstance(fields, PolicyFields):
        call.wrong_type("fields", "PolicyFields", fields)
    if not isinstance(objective, Objective):
        call.wrong_type("objective", "an Objective", objective)
    call.tensor("logprob", logprob, fields.adv_pos.shape, " like the fields")
    call.tensor("the fields", fields.adv_pos)
    call.look("the fields' adv_pos must not be negative", fields.adv_pos, lambda: ~(fields.adv_pos < 0))
    call.look("the fields' adv_neg must not be positive", fields.adv_neg, lambda: ~(fields.adv_neg > 0))
    call.normalizer(normalizer)
    if fields.paths is not None:
        fields.paths.check(call, len(logprob))
    require(
        dtype in (torch.float32, torch.float64),
        f"logprob must be fp32 or fp64, got {dtype}: ratios of rounded log-probs are noise",
    )
    for name, why in objective.needs_fields.items():
        require(getattr(fields, name) is not None, f"{why}, so the fields must have {name}")
    no_sampler = fields.old_logprob is None and fields.behaviour_logprob is None
    require(
        objective.off_policy_delta is None or not no_sampler,
        "off_policy_delta is set, so the fields must have behaviour_logprob or old_logprob",
    )
    return fields


def finish(
    total: Tensor,  # []
    sums: Tensor,  # [len(SUMS)]
    normalizer: float | Tensor,
    fields: PolicyFields,
    objective: Objective,
    *,
    has_entropy: bool,
) -> PolicyLossOutput:
    """Return loss and metrics from sums.

    Targets that were left out because they cannot have a gradient count as zeros in the denominators of the surrogate
    and its clip fractions.
    """
    total_of = dict(zip(SUMS, sums.unbind(), strict=True))
    weight = fields.weight if fields.mask is None else torch.where(fields.mask, fields.weight, 0)
    everything, count, compared = weight.sum(dtype=torch.float64), total_of["tokens"], total_of["behaviour_count"]
    metrics = {
        "actor/pg_loss": (total_of["pg_loss"], everything),
        "actor/pg_clipfrac": (total_of["clipped"], everything),
        "actor/pg_clipfrac_lower": (total_of["clipped_lower"], everything),
        "actor/ppo_kl": (total_of["ppo_kl"], count),
    }
    if has_entropy:
        metrics["actor/entropy"] = (total_of["entropy"], count)
    if fields.ref_logprob is not None:
        metrics["actor/kl_loss"] = (total_of["kl"], count)
    if fields.behaviour_logprob is not None:
        metrics["training/mismatch_k3_kl"] = (total_of["mismatch_k3"], compared)
        metrics["training/rollout_probs_diff_mean"] = (total_of["mismatch_probability"], compared)
    if objective.token_mismatch != "none":
        metrics["training/rollout_is_mean"] = (total_of["mismatch_weight"], count)
        metrics["training/rollout_is_rejected"] = (total_of["mismatch_rejected"], count)
    return PolicyLossOutput(normalized(total, normalizer), metrics)


def normalized(total: Tensor, normalizer: float | Tensor) -> Tensor:
    """Return ``total / normalizer``, and 0 where both are 0."""
    if not isinstance(normalizer, Tensor):
        normalizer = torch.full((), normalizer, dtype=total.dtype, device=total.device)
    return total / torch.where((normalizer == 0) & (total == 0), 1, normalizer)


@torch.library.custom_op("rolltree::policy_loss", mutates_args=())
def policy_loss_op(
    logprob: Tensor,  # [M]
    entropy: Tensor | None,  # [M]
    fields: Sequence[Tensor],  # `PolicyFields.tensors`
    names: str,
    objective: str,  # `Objective.encoded`
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``(total [], d_logprob [M], d_entropy [M] or [0], sums)``; see `Evaluation`."""
    chosen = Objective.decode(objective)
    loss = evaluate(logprob, entropy, PolicyFields.from_tensors(fields, names, chosen.aggregation), chosen)
    d_entropy = logprob.new_empty(0) if loss.d_entropy is None else loss.d_entropy
    return loss.total, loss.d_logprob, d_entropy, loss.sums


@policy_loss_op.register_fake
def _(
    logprob: Tensor, entropy: Tensor | None, fields: Sequence[Tensor], names: str, objective: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        logprob.new_empty(()),
        logprob.new_empty(logprob.shape[0]),
        logprob.new_empty(0 if entropy is None else logprob.shape[0]),
        logprob.new_empty(len(SUMS), dtype=torch.float64),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.has_entropy, ctx.num_fields = inputs[1] is not None, len(inputs[2])
    ctx.save_for_backward(output[1], output[2])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _autograd_backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    d_logprob, d_entropy = ctx.saved_tensors
    constants = [None] * ctx.num_fields, None, None
    if grad is None:
        return None, None, *constants
    return grad * d_logprob, grad * d_entropy if ctx.has_entropy else None, *constants


policy_loss_op.register_autograd(_autograd_backward, setup_context=_setup_context)
