"""The fused elementwise loss, for every surrogate and KL estimator."""

from __future__ import annotations

from typing import get_args

from rolltree.kernels.policy_loss import triton
from rolltree.kernels.policy_loss.objective import KL, SURROGATES, Spec

from .harness import AotCase

POINTERS = ("logprob", "entropy", "adv_pos", "adv_neg", "weight", "old_logprob", "ref_logprob", "behaviour_logprob")
SIGNATURE = {
    **dict.fromkeys((*POINTERS, "d_logprob", "d_entropy", "partial"), "*fp32"),
    "mask": "*u8",
    **dict.fromkeys(("M", "blocks"), "i32"),
    **dict.fromkeys(Spec._fields, "fp32"),
}


def _case(surrogate: str, kl: str, options: bool) -> AotCase:
    flags = ("HAS_ENTROPY", "HAS_MASK", "HAS_OLD", "HAS_REF", "HAS_BEHAVIOUR", "MISMATCH")
    constexprs = {**dict.fromkeys(flags, options), "RATIO_SELF": not options, "SURROGATE": surrogate, "KL": kl}
    return AotCase(f"{surrogate} {kl} {options}", triton._terms, SIGNATURE, {**constexprs, "BLOCK": triton.BLOCK})


CASES = [_case(s, "k3", True) for s in SURROGATES] + [_case("ppo", kl, True) for kl in get_args(KL) if kl != "k3"]
CASES.append(_case("reinforce", "k1", False))
