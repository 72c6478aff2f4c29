"""Published methods by name. Advantages are the caller's: a preset says what is done with them.

Defaults are those of the papers or, where a paper gives none, of public trainers; [inf] marks numbers that are
reconstructed and should be checked against the paper before they are relied on. A surrogate that is a method by itself
has its preset beside its formula (`surrogates`); here are those that combine options. Where a method differs from
another in what the fields hold, its preset names the fields (``needs``), so that it is refused where it would silently
be the other.
"""

from __future__ import annotations

from .objective import Aggregation, Objective
from .surrogates import SURROGATES

_SEQUENCE_MEAN: Aggregation = "seq_mean_token_mean"

PRESETS: dict[str, Objective] = {
    name: Objective(surrogate=name, **of.preset) for name, of in SURROGATES.items() if of.preset is not None
} | {
    "rloo": Objective(surrogate="reinforce", aggregation="seq_mean_token_sum"),  # with leave-one-out advantages
    "grpo": Objective(aggregation=_SEQUENCE_MEAN),
    "dual_clip": Objective(clip_ratio_c=3.0),
    "dapo": Objective(eps_high=0.28),
    "dr_grpo": Objective(aggregation="seq_mean_token_sum_norm"),
    "luspo": Objective(ratio_level="sequence", eps_low=3e-4, eps_high=4e-4, aggregation="seq_mean_token_sum"),
    "gspo": Objective(ratio_level="sequence", eps_low=3e-4, eps_high=4e-4, aggregation=_SEQUENCE_MEAN),  # eps [inf]
    "gspo_token": Objective(ratio_level="sequence_token", eps_low=3e-4, eps_high=4e-4, aggregation=_SEQUENCE_MEAN),
    "gmpo": Objective(
        surrogate="geo_mean", ratio_level="sequence", eps_low=0.4, eps_high=0.4, aggregation=_SEQUENCE_MEAN
    ),  # eps [inf]; verl 0.2
    "segment_ratio": Objective(ratio_level="segment"),  # [inf]
    "clip_cov": Objective(surrogate="clip_cov"),
    "vespo": Objective(surrogate="vespo"),
    "topr": Objective(surrogate="topr"),
    "decoupled_ppo": Objective(ratio_base="proximal", mismatch="truncate"),
    "rollout_is": Objective(mismatch="truncate"),
    "off_policy_mask": Objective(off_policy_delta=0.1),  # delta [inf]
    "on_policy_pg": Objective(ratio_base="self"),
    "dcpo_clip": Objective(dynamic_clip=True),  # cap [inf]
    "clip_tensor": Objective(needs=("clip_low", "clip_high")),
    "ngrpo": Objective(eps_low=0.16, eps_high=0.24, aggregation=_SEQUENCE_MEAN),  # eps [inf]
    "w_reinforce": Objective(surrogate="reinforce", pos_weight=0.1),  # [inf]; pos_weight 0 learns from failures alone
    "token_entropy_mask": Objective(eps_high=0.28, entropy_share=0.2),
    "sft": Objective(surrogate="nll", needs=("token_weight",)),  # which tokens are demonstrations
    "pear": Objective(
        surrogate="nll", ratio_base="current", mismatch="truncate", mismatch_level="sequence", needs=("token_weight",)
    ),  # weights from the current policy against the demonstrations' own; level, cap [inf]
    "opd": Objective(surrogate="distill_reverse"),
    "opd_forward": Objective(surrogate="distill_forward", clip_ratio_c=10.0),
}

ALIASES: dict[str, tuple[str, str]] = {
    "bnpo": ("ppo", "with the tokens of a micro-batch as its normalizer"),
    "gpg": ("reinforce", "with advantages alpha (R - mean R), alpha = rollouts / rollouts of non-zero reward"),
    "weighted_nll": ("sft", "with token_weight the weights of the data"),
    "raft": ("sft", "with token_weight 1 on the rollouts kept, 0 on the others"),
    "aux_nll": ("sft", "on tokens of its own beside another objective, with its own normalizer"),
}
"""Presets that are another one on purpose: the methods differ in what the caller hands over."""
PRESETS |= {name: PRESETS[of] for name, (of, _) in ALIASES.items()}

ADVANTAGES_ALONE = {"reinforce_pp": "ppo"}
"""Methods that are an objective with advantages of their own, by that objective: no presets."""
