"""Published methods by name, as options of `Objective`. Advantages are the caller's: a preset says how they are used.

Defaults are those of the papers or, where a paper gives none, of public trainers; ``RECONSTRUCTED`` names those that
are neither. A surrogate or rule that is a method by itself has its preset with its function (`surrogates`, `rules`);
here are those that combine options. Where a method differs from another only in what the fields hold, its preset names
the fields (``needs``), so that fields without them are refused instead of giving the other method's loss.
"""

from __future__ import annotations

from typing import Any

from .rules import RULES
from .surrogates import SURROGATES

_SEQUENCE_MEAN = "seq_mean_token_mean"

OPTIONS: dict[str, dict[str, Any]] = {
    name: {"surrogate": name, **preset}
    for table in (SURROGATES, RULES)
    for name, preset in ((name, entry.preset) for name, entry in table.items())
    if preset is not None
} | {
    "rloo": {"surrogate": "reinforce", "aggregation": "seq_mean_token_sum"},  # with leave-one-out advantages
    "grpo": {"aggregation": _SEQUENCE_MEAN},
    "bnpo": {"aggregation": "batch_token_mean"},
    "dual_clip": {"clip_ratio_c": 3.0},
    "dapo": {"eps_high": 0.28},
    "dr_grpo": {"aggregation": "seq_mean_token_sum_norm"},
    "luspo": {"ratio_level": "sequence", "eps_low": 3e-4, "eps_high": 4e-4, "aggregation": "seq_mean_token_sum"},
    "gspo": {"ratio_level": "sequence", "eps_low": 3e-4, "eps_high": 4e-4, "aggregation": _SEQUENCE_MEAN},
    "gspo_token": {
        "ratio_level": "sequence_token", "eps_low": 3e-4, "eps_high": 4e-4, "aggregation": _SEQUENCE_MEAN
    },
    "gmpo": {
        "surrogate": "geo_mean", "ratio_level": "sequence", "eps_low": 0.4, "eps_high": 0.4,
        "aggregation": _SEQUENCE_MEAN,
    },
    "segment_ratio": {"ratio_level": "segment"},
    "decoupled_ppo": {"ratio_base": "proximal", "mismatch": "truncate"},
    "rollout_is": {"mismatch": "truncate"},
    "off_policy_mask": {"off_policy_delta": 0.1},
    "on_policy_pg": {"ratio_base": "self"},
    "dcpo_clip": {"dynamic_clip": True},
    "clip_tensor": {"needs": ("clip_low", "clip_high")},
    "ngrpo": {"eps_low": 0.16, "eps_high": 0.24, "aggregation": _SEQUENCE_MEAN},
    "w_reinforce": {"surrogate": "reinforce", "pos_weight": 0.1},  # pos_weight 0 learns from failures alone
    "token_entropy_mask": {"eps_high": 0.28, "entropy_share": 0.2},
    "sft": {"surrogate": "nll", "needs": ("token_weight",)},  # which tokens are demonstrations
    "pear": {
        "surrogate": "nll", "ratio_base": "current", "mismatch": "truncate", "mismatch_level": "sequence",
        "needs": ("token_weight",),
    },  # weights from the current policy against the demonstrations' own
    "opd": {"surrogate": "distill_reverse"},
    "opd_forward": {"surrogate": "distill_forward", "clip_ratio_c": 10.0},
}  # fmt: skip

ALIASES: dict[str, tuple[str, str]] = {
    "gpg": ("reinforce", "with advantages alpha (R - mean R), alpha = rollouts / rollouts of non-zero reward"),
    "weighted_nll": ("sft", "with token_weight the weights of the data"),
    "raft": ("sft", "with token_weight 1 on the rollouts kept, 0 on the others"),
    "aux_nll": ("sft", "on tokens of its own, added to another objective, with its own normalizer"),
}
"""Presets that are another one on purpose: the methods differ in the fields that the caller gives."""
OPTIONS |= {name: OPTIONS[other] for name, (other, _) in ALIASES.items()}

ADVANTAGES_ALONE = {"reinforce_pp": "ppo"}
"""Methods that are an objective with advantages of their own, by that objective: no presets."""

RECONSTRUCTED: dict[str, tuple[str, ...]] = {
    "gspo": ("eps_low", "eps_high"),
    "gmpo": ("eps_low", "eps_high"),  # verl has 0.2
    "segment_ratio": ("ratio_level",),
    "off_policy_mask": ("off_policy_delta",),
    "dcpo_clip": ("dynamic_cap",),
    "ngrpo": ("eps_low", "eps_high"),
    "w_reinforce": ("pos_weight",),
    "pear": ("mismatch_level", "mismatch_cap"),
    "nft": ("beta",),
    "prob_shaping": ("beta",),
}
"""Options of presets that are reconstructed, not read: check them against the paper before relying on them."""
