"""A GRPO trainer's loss as an `Objective`, so that head and loss are one op that forms the logits once.

A loss without such a form stays TRL's own code on the same log-probs; its backward then forms the logits again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trl import RLOOTrainer

from rolltree.kernels import Objective, PolicyFields, Term

from .replaced import LOSS, own

LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"aggregation": "seq_mean_token_mean"},
    "bnpo": {},
    "dr_grpo": {"aggregation": "seq_mean_token_sum_norm"},
    "dapo": {},
    "luspo": {"aggregation": "seq_mean_token_sum"},
    "cispo": {"surrogate": "cispo"},
    "sapo": {"surrogate": "sapo", "aggregation": "seq_mean_token_mean"},
    "vespo": {"surrogate": "vespo"},
}
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


def objective(trainer: Any) -> Objective:
    """Return the trainer's loss as an objective of `linear_policy_loss`, by the options that the trainer has now.

    Raises:
        ValueError: the loss has no such form; the message is the reason.
    """
    if isinstance(trainer, RLOOTrainer):
        raise ValueError("RLOO clips the product of a sequence's ratios")
    if why := own(trainer, LOSS):
        raise ValueError(why)
    args, name = trainer.args, trainer.loss_type
    if name not in LOSSES:
        raise ValueError(f"its loss_type is '{name}'")
    if trainer.top_entropy_quantile < 1:
        raise ValueError("top_entropy_quantile looks at the whole micro-batch before any gradient is known")
    if trainer._entropy_bonus_enabled:
        raise ValueError("the entropy bonus is a mean of its own")
    if trainer.aux_loss_enabled:
        raise ValueError("the experts' balance is a summand")
    corrected = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    if corrected and (name == "vespo" or trainer.off_policy_mask_threshold is not None):
        raise ValueError("vLLM's log-probs, of which some may be missing, change the weights of sequences")
    sequence = trainer.importance_sampling_level == "sequence"
    options = dict(LOSSES[name])
    if name == "vespo":
        options |= {"vespo_pos": (args.vespo_k_pos, args.vespo_lambda_pos)}
        options |= {"vespo_neg": (args.vespo_k_neg, args.vespo_lambda_neg)}
    elif sequence:
        options["ratio_level"] = "sequence"
    if name in CLIPPED:
        options |= {"eps_low": trainer.epsilon_low, "eps_high": trainer.epsilon_high}
        if args.delta is not None:
            if args.delta < 1 + trainer.epsilon_high:
                raise ValueError(f"delta {args.delta} lies inside the clip range")
            options["clip_ratio_c"] = args.delta
    elif name == "cispo":  # TRL's upper bound is the ratio itself, and there is no lower one
        if trainer.epsilon_high < 1:
            raise ValueError(f"epsilon_high is {trainer.epsilon_high}, which caps ratios below 1")
        options |= {"eps_low": 1.0, "eps_high": trainer.epsilon_high - 1}
    elif name == "sapo":
        options |= {"tau_pos": args.sapo_temperature_pos, "tau_neg": args.sapo_temperature_neg}
    if trainer.beta != 0:
        if args.use_bias_correction_kl and (sequence or name == "vespo"):
            raise ValueError("use_bias_correction_kl takes another ratio than the loss")
        options |= {"kl_coef": trainer.beta, "kl_importance": args.use_bias_correction_kl}
    return Objective(off_policy_delta=trainer.off_policy_mask_threshold, **options)


def term(
    trainer: Any,
    loss: Objective,
    inputs: dict[str, Any],
    mask: Tensor,  # [B, C] bool
) -> Term | None:
    """Return the loss of a micro-batch on the M tokens of ``mask``; None if its inputs are not those of TRL's loss."""
    advantages = inputs["advantages"]
    if advantages.dim() != 1:
        return None

    def tokens(values: Tensor | None) -> Tensor | None:  # [B, C] or [B, 1] -> [M]
        return None if values is None else values.expand(mask.shape)[mask].float()

    corrected = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    lengths, old, sampler = mask.sum(1), tokens(inputs.get("old_per_token_logps")), None
    if loss.off_policy_delta is not None:
        sampler = tokens(inputs.get("sampling_per_token_logps"))
        if sampler is None and old is None:  # on policy: NaN is no evidence
            sampler = torch.full((int(lengths.sum()),), torch.nan, device=mask.device)
    fields = PolicyFields.flat(
        advantages.float(),
        old_logprob=old,
        ref_logprob=tokens(inputs.get("ref_per_token_logps")),
        behaviour_logprob=sampler,
        token_weight=tokens(inputs["importance_sampling_ratio"]) if corrected else None,
        mask=torch.ones(int(lengths.sum()), dtype=torch.bool, device=mask.device),
        cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
    )
    return Term(fields, loss, _normalizer(trainer, inputs, mask))


def _normalizer(trainer: Any, inputs: dict[str, Any], mask: Tensor) -> float | Tensor:
    """Return the divisor of TRL's sum over tokens or sequences, gradient accumulation included."""
    steps, name, sequences = trainer.current_gradient_accumulation_steps, trainer.loss_type, len(mask)
    if name in ("grpo", "sapo", "luspo"):
        return float(sequences * steps)
    if name == "bnpo":
        return mask.sum().clamp(min=1) * steps
    if name == "dr_grpo":
        return float(sequences * trainer.max_completion_length * steps)
    tokens = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
    return tokens * steps / trainer.args.steps_per_generation
