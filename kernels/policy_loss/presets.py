"""Published methods by name. Advantages are the caller's: a preset says what is done with them.

Defaults are those of the papers or, where a paper gives none, of public trainers; [inf] marks numbers that are
reconstructed and should be checked against the paper before they are relied on.
"""

from __future__ import annotations

from .objective import Aggregation, Objective

_SEQUENCE_MEAN: Aggregation = "seq_mean_token_mean"

PRESETS: dict[str, Objective] = {
    "reinforce": Objective(surrogate="reinforce"),
    "rloo": Objective(surrogate="reinforce", aggregation="seq_mean_token_sum"),  # with leave-one-out advantages
    "reinforce_pp": Objective(),  # REINFORCE++: whitened returns, PPO's clip
    "ppo": Objective(),
    "grpo": Objective(aggregation=_SEQUENCE_MEAN),
    "dual_clip": Objective(clip_ratio_c=3.0),
    "dapo": Objective(eps_high=0.28),
    "dr_grpo": Objective(aggregation="seq_mean_token_sum_norm"),
    "bnpo": Objective(),
    "luspo": Objective(ratio_level="sequence", eps_low=3e-4, eps_high=4e-4, aggregation="seq_mean_token_sum"),
    "gpg": Objective(surrogate="reinforce"),
    "cispo": Objective(surrogate="cispo"),
    "sapo": Objective(surrogate="sapo", aggregation=_SEQUENCE_MEAN),
    "gspo": Objective(ratio_level="sequence", eps_low=3e-4, eps_high=4e-4, aggregation=_SEQUENCE_MEAN),  # eps [inf]
    "gspo_token": Objective(ratio_level="sequence_token", eps_low=3e-4, eps_high=4e-4, aggregation=_SEQUENCE_MEAN),
    "gmpo": Objective(
        surrogate="geo_mean", ratio_level="sequence", eps_low=0.4, eps_high=0.4, aggregation=_SEQUENCE_MEAN
    ),  # eps [inf]; verl 0.2
    "segment_ratio": Objective(ratio_level="segment"),  # [inf]
    "dppo_tv": Objective(surrogate="dppo_tv"),
    "dppo_kl": Objective(surrogate="dppo_kl"),
    "clip_cov": Objective(surrogate="clip_cov"),
    "kl_cov": Objective(surrogate="kl_cov"),
    "dro": Objective(surrogate="dro"),  # beta is the user's to set
    "vespo": Objective(surrogate="vespo"),
    "topr": Objective(surrogate="topr"),
    "decoupled_ppo": Objective(mismatch="truncate"),  # old_logprob is the proximal policy's
    "rollout_is": Objective(mismatch="truncate"),
    "off_policy_mask": Objective(off_policy_delta=0.1),  # delta [inf]
    "on_policy_pg": Objective(ratio_base="self"),
    "dcpo_clip": Objective(dynamic_clip=True),  # cap [inf]
    "clip_tensor": Objective(),  # bounds are the fields' clip_low and clip_high
    "ngrpo": Objective(eps_low=0.16, eps_high=0.24, aggregation=_SEQUENCE_MEAN),  # eps [inf]
    "w_reinforce": Objective(surrogate="reinforce", pos_weight=0.1),  # [inf]; pos_weight 0 learns from failures alone
    "nft": Objective(surrogate="nft", beta=1e-2),  # beta, the floor of the implicit negative policy, [inf]
    "token_entropy_mask": Objective(eps_high=0.28, entropy_share=0.2),
    "sft": Objective(surrogate="nll"),
    "weighted_nll": Objective(surrogate="nll"),  # weights are the fields'
    "raft": Objective(surrogate="nll"),  # on the samples kept
    "aux_nll": Objective(surrogate="nll"),  # a second call on its own tokens, with its own normalizer
    "pear": Objective(surrogate="nll", mismatch="truncate", mismatch_level="sequence"),  # [inf]
    "opd": Objective(surrogate="distill_reverse"),
    "opd_forward": Objective(surrogate="distill_forward", clip_ratio_c=10.0),
}
